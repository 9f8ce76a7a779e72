"""Analysis of source code: how it uses a number that it reads from a tensor.

A number that is added up or becomes text does not matter, unless the text decides a branch or becomes a number again;
one that is compared, bounds a loop or passes into code where it cannot be followed may affect memory use. A check that
raises an error decides a branch if the step catches that error. The use is found in the file's syntax tree, by the
position of the running instruction; names are followed within their function, attributes within their file.
"""

from __future__ import annotations

import ast
import builtins
import dis
import inspect
import linecache
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

from memkit._core.installed import is_users_file

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.Module)
_CONDITIONAL = (ast.If, ast.While, ast.Assert)
_EXITS = {"exit", "_exit", "quit", "abort"}
# Calls that turn their arguments into text or write them; matched by the last part of their names.
_WRITING = frozenset(
    {"print", "str", "repr", "format", "write", "echo", "log", "debug", "info", "warning", "error", "critical"}
    | {"exception", "add_scalar", "add_scalars", "add_histogram", "log_dict", "log_metric", "log_metrics"}
    | {"set_postfix", "set_postfix_str", "set_description"}
    | {"Loss"}  # memkit's own, which divides by the number
)
_TEXTS = frozenset({"str", "repr", "format"})  # those of them whose result is the text
# Calls whose result is a number computed from their arguments.
_NUMBERS = frozenset(
    {"float", "int", "bool", "abs", "round", "sum", "min", "max", "mean", "median", "fmean", "len", "item", "divmod"}
    | {"exp", "log", "log2", "log10", "sqrt", "pow"}
)
_LOSING = frozenset(
    {"exp", "log", "log2", "log10", "sqrt", "pow", "tensor", "as_tensor", "full", "full_like", "fill_", "new_tensor"}
)
_OF_TEXT = frozenset({"float", "int"})  # calls that turn a text into a number again
_LOST, _AS_TEXT = "(lost)", "(text)"  # markers among the followed names
_FINITE = frozenset({"isnan", "isinf", "isfinite"})  # checks that a healthy training run always passes
_TRIES = (ast.Try, getattr(ast, "TryStar", ast.Try))
_RUNNING = str(Path(__file__).parent)  # the code that runs the step
_RUNNING_TESTS = frozenset({"_pytest", "pluggy", "unittest"})  # a test is a step, too: they catch all errors
_ADDING = frozenset({"append", "add", "extend", "insert", "appendleft"})


class Use(IntEnum):
    """Use of a value; a larger one may affect more.

    Attributes:
        TEXT: Text, sums, or unused.
        GUARD: It decides whether to raise an error: a run that continues has passed.
        RETURNED: It leaves the function.
        UNKNOWN: Something else.
        BRANCH: It is compared, or is a condition.
    """

    TEXT = 0
    GUARD = 1
    RETURNED = 2
    UNKNOWN = 3
    BRANCH = 4


@dataclass(frozen=True, slots=True)
class Site:
    """A place in the code where a value is read.

    Attributes:
        use: Use of the value.
        passing: For a GUARD that tests the value itself: the value required for the run to continue; None if unknown.
        is_lost: Whether a C function turns it into another number, a tensor or a text that decides, where it cannot be
            followed.
        error: For such a GUARD: the error that it raises.
    """

    use: Use
    passing: bool | None = None
    is_lost: bool = False
    error: ast.expr | type[BaseException] | None = None


def site_of(frame: FrameType) -> Site:
    """Find what the running instruction of a frame does with its value."""
    source = _source(frame)
    site = Site(Use.UNKNOWN) if source is None else _site(*source, _position(frame))
    is_branch = site.use is Use.GUARD and site.error is not None and is_caught(frame, site.error)
    return Site(Use.BRANCH, is_lost=site.is_lost) if is_branch else site


def is_caught(frame: FrameType | None, error: ast.expr | type[BaseException]) -> bool:
    """Return whether an error that a frame raises is caught within the step, which then goes on another way."""
    kind = error if isinstance(error, type) else _kind_of_error(error, frame)
    while frame is not None and not _runs_the_step(frame):
        source = _source(frame)
        for handlers in () if source is None else _handlers(*source, _position(frame)):
            for kinds, body in handlers:
                if kinds is None or any(_may_catch(_kind_of_error(each, frame), kind) for each in kinds):
                    if not _ends(body):
                        return True
                    kind = _error_of(body, frame) or kind
                    break
        frame = None if _is_program(frame) else frame.f_back
    return False


def _runs_the_step(frame: FrameType) -> bool:
    package, _, _ = str(frame.f_globals.get("__name__", "")).partition(".")
    return package in _RUNNING_TESTS or frame.f_code.co_filename.startswith(_RUNNING)


def _is_program(frame: FrameType) -> bool:
    """Whether installed code runs a frame's code as a program: a script, a cell of a notebook, a line of a console.

    Such code catches all errors, to show them, and the program has ended. A program that the user's own code runs by
    `exec` may go on there; importlib and runpy are frozen, and catch nothing that they do not raise again.
    """
    is_function = frame.f_code.co_flags & inspect.CO_NEWLOCALS
    return not is_function and frame.f_back is not None and not is_users_file(frame.f_back.f_code.co_filename)


def _may_catch(caught: type | None, raised: type | None) -> bool:
    return caught is None or raised is None or issubclass(raised, caught)


def _error_of(body: list[ast.stmt], frame: FrameType) -> type | None:
    """Return what statements raise at their end; None if that is the error that they have caught."""
    last = body[-1]
    if isinstance(last, ast.Raise):
        return None if last.exc is None else _kind_of_error(last.exc, frame)
    return SystemExit


def _kind_of_error(expression: ast.expr, frame: FrameType | None) -> type | None:
    """Return the class of errors that an expression names, or makes one of; None if that is unknown."""
    value = _value_of(expression.func if isinstance(expression, ast.Call) else expression, frame)
    kind = type(value) if isinstance(value, BaseException) else value
    return kind if isinstance(kind, type) and issubclass(kind, BaseException) else None


def _value_of(expression: ast.expr, frame: FrameType | None) -> Any:
    if isinstance(expression, ast.Attribute):
        return getattr(_value_of(expression.value, frame), expression.attr, None)
    if not isinstance(expression, ast.Name) or frame is None:
        return None
    places = frame.f_locals, frame.f_globals, vars(builtins)
    return next((place[expression.id] for place in places if expression.id in place), None)


def _source(frame: FrameType) -> tuple[str, tuple[int, int]] | None:
    """Return the name of a frame's file, and what tells its versions apart; None without its source."""
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
    # linecache keeps the list as long as the file is unchanged
    return (frame.f_code.co_filename, (id(lines), len(lines))) if lines else None


def operation_of(frame: FrameType) -> str:
    """Return the name of a frame's running instruction, such as ``"COMPARE_OP"``."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]]


def _position(frame: FrameType) -> tuple[int | None, ...]:
    return next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))  # two bytes per instruction


@lru_cache(maxsize=4096)
def _site(filename: str, version: tuple[int, int], position: tuple[int | None, ...]) -> Site:
    tree = _tree(filename, version)
    return Site(Use.UNKNOWN) if tree is None else tree.site(position)


# The handlers of a `try` around a statement: the classes of errors (None: all), and the code that runs then.
_Handlers = list[tuple[list[ast.expr] | None, list[ast.stmt]]]


@lru_cache(maxsize=4096)
def _handlers(filename: str, version: tuple[int, int], position: tuple[int | None, ...]) -> tuple[_Handlers, ...]:
    tree = _tree(filename, version)
    return () if tree is None else tuple(tree.handlers(position))


@lru_cache(maxsize=64)
def _tree(filename: str, version: tuple[int, int]) -> _Tree | None:  # noqa: ARG001 - part of the cache key
    try:
        return _Tree(ast.parse("".join(linecache.getlines(filename))))
    except (SyntaxError, ValueError):  # a notebook's magic, a file that has changed
        return None


@dataclass(slots=True)
class _Tree:
    """A file's syntax tree, with each node's parent."""

    root: ast.Module
    _parents: dict[ast.AST, ast.AST] = field(default_factory=dict)
    _by_position: dict[tuple[int | None, ...], ast.AST] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for parent in ast.walk(self.root):  # from the outside in: of two nodes at one position, the inner one is kept
            for child in ast.iter_child_nodes(parent):
                self._parents[child] = parent
                if isinstance(child, (ast.expr, *_CONDITIONAL)):
                    place = child.lineno, child.end_lineno, child.col_offset, child.end_col_offset
                    self._by_position[place] = child

    def site(self, position: tuple[int | None, ...]) -> Site:
        """Return the use of the value at the position of an instruction."""
        node = self._by_position.get(position)
        if node is None:
            return Site(Use.UNKNOWN)
        if isinstance(node, _CONDITIONAL):  # up to Python 3.12 a jump has the position of its whole statement
            return _guard(node) or Site(Use.BRANCH)
        if isinstance(node, (ast.IfExp, ast.BoolOp)):
            return self._guard_around(node) or Site(Use.BRANCH)
        seen: set[str] = set()
        use = self._use_of_text(node, seen) if _makes_text(node) else self.use(node, seen)
        is_lost = _LOST in seen
        return (self._guard_around(node) if use is Use.BRANCH else None) or Site(use, is_lost=is_lost)

    def handlers(self, position: tuple[int | None, ...]) -> Iterator[_Handlers]:
        """Yield what catches the errors of an instruction, from the inside out."""
        node = self._by_position.get(position)
        while node is not None and not isinstance(node, _SCOPES):
            parent = self._parents.get(node)
            if isinstance(parent, _TRIES) and node in parent.body:
                yield [(None if each.type is None else _each_in(each.type), each.body) for each in parent.handlers]
            elif isinstance(parent, ast.With) and node in parent.body:
                calls = [each.context_expr for each in parent.items if isinstance(each.context_expr, ast.Call)]
                yield [(each.args, [ast.Pass()]) for each in calls if _last_name(each.func) == "suppress"]
            node = parent

    def _guard_around(self, node: ast.AST) -> Site | None:
        """Return the guard whose condition contains an expression."""
        is_plain = True
        while isinstance(node, ast.expr):
            parent = self._parents[node]
            if isinstance(parent, _CONDITIONAL):
                guard = _guard(parent)
                passing = None if guard is None or guard.passing is None or not is_plain else guard.passing
                return guard and replace(guard, passing=passing)
            is_plain &= isinstance(parent, (ast.BoolOp, ast.UnaryOp)) or _is_bool(parent)
            node = parent
        return None

    # ---------------------------------------------------------------------------------------------- uses

    def use(self, node: ast.AST, seen: set[str]) -> Use:
        """Return the use of the value of an expression."""
        parent = self._parents.get(node)
        if isinstance(parent, ast.Attribute):
            return self._use_of_attribute(parent, seen)
        if isinstance(parent, (ast.Call, ast.keyword)):
            return self._use_in_call(node, parent, seen)
        if isinstance(parent, (ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.AugAssign, ast.For, ast.comprehension)):
            return self._use_of_targets(parent, seen)
        if isinstance(parent, (ast.Compare, ast.BoolOp, ast.If, ast.While, ast.Assert, ast.Subscript, ast.IfExp)):
            return self._use_in_condition(node, parent, seen)
        if parent is not None and _makes_text(parent):
            return self._use_of_text(parent, seen)
        if isinstance(parent, (ast.Expr, ast.Raise)):
            return Use.TEXT
        if isinstance(parent, ast.UnaryOp):
            return Use.BRANCH if isinstance(parent.op, ast.Not) else self.use(parent, seen)
        if isinstance(
            parent,
            (
                ast.BinOp,
                ast.FormattedValue,
                ast.Tuple,
                ast.List,
                ast.Dict,
                ast.Set,
                ast.Starred,
                ast.ListComp,
                ast.GeneratorExp,
            ),
        ):
            return self.use(parent, seen)
        if isinstance(parent, (ast.Return, ast.Yield, ast.Lambda)):
            return Use.RETURNED
        return Use.UNKNOWN

    def _use_of_text(self, node: ast.AST, seen: set[str]) -> Use:
        """Return the use of a number that becomes text: it matters where the text is compared, or is a number again."""
        call = self._parents.get(node)
        name = _last_name(call.func) if isinstance(call, ast.Call) else ""
        if isinstance(node, ast.Call) and _last_name(node.func) not in _TEXTS:
            return Use.TEXT  # it writes the text
        seen.add(_AS_TEXT)
        use = self.use(node, seen)
        if use is not Use.BRANCH and name not in _OF_TEXT:
            return Use.TEXT
        seen |= {_LOST} if use is not Use.TEXT else set()
        return use

    def _use_in_call(self, node: ast.AST, parent: ast.AST, seen: set[str]) -> Use:
        call = self._parents[parent] if isinstance(parent, ast.keyword) else parent
        if not isinstance(call, ast.Call) or node is call.func:
            return Use.UNKNOWN
        name = _last_name(call.func)
        is_number = name in _NUMBERS and (name not in _WRITING or _of_numbers(call.func))
        seen |= {_LOST} if name in _LOSING and (is_number or name not in _NUMBERS) else set()
        if name in _WRITING and not is_number:
            return self._use_of_text(call, seen)
        if name in _FINITE:
            return Use.GUARD
        if name in _NUMBERS:
            return Use.TEXT if name == "len" and _AS_TEXT in seen else self.use(call, seen)  # lengths lay text out
        if name in _ADDING and isinstance(call.func, ast.Attribute):
            return self._use_of_name(call.func.value, seen)
        return Use.UNKNOWN

    def _use_of_attribute(self, node: ast.Attribute, seen: set[str]) -> Use:
        """Return the use of an attribute, such as a called method: ``losses.append`` or ``values.mean``."""
        call = self._parents.get(node)
        if not isinstance(call, ast.Call) or node is not call.func:
            return Use.UNKNOWN
        if node.attr in _NUMBERS:
            return self.use(call, seen)
        return Use.TEXT if node.attr in _ADDING | _WRITING | {"clear", "reset"} else Use.UNKNOWN

    def _use_in_condition(self, node: ast.AST, parent: ast.AST, seen: set[str]) -> Use:
        if isinstance(parent, ast.Subscript):
            return self.use(parent, seen) if node is parent.value else Use.UNKNOWN
        if isinstance(parent, ast.Assert):
            return Use.TEXT if node is parent.msg else Use.BRANCH
        if isinstance(parent, ast.IfExp) and node is not parent.test:
            return self.use(parent, seen)
        return Use.BRANCH

    def _use_of_targets(self, parent: ast.AST, seen: set[str]) -> Use:
        targets = parent.targets if isinstance(parent, ast.Assign) else [getattr(parent, "target", None)]
        uses = [self._use_of_name(target, seen) for target in targets]
        if isinstance(parent, ast.NamedExpr):
            uses.append(self.use(parent, seen))
        return max(uses)

    def _use_of_name(self, target: ast.AST | None, seen: set[str]) -> Use:
        """Return the use of a variable: the largest of all its uses."""
        if isinstance(target, ast.Subscript):
            return self._use_of_name(target.value, seen)
        if isinstance(target, (ast.Tuple, ast.List)):
            return max((self._use_of_name(each, seen) for each in target.elts), default=Use.TEXT)
        if not isinstance(target, (ast.Name, ast.Attribute)):
            return Use.UNKNOWN
        name = ast.dump(target) if isinstance(target, ast.Name) else f".{target.attr}"
        if name in seen:
            return Use.TEXT
        seen.add(name)
        return max((self.use(load, seen) for load in self._loads(target)), default=Use.TEXT)

    def _loads(self, target: ast.Name | ast.Attribute) -> Iterator[ast.AST]:
        if isinstance(target, ast.Attribute):
            scope: ast.AST = self.root
        else:
            scope = target
            while not isinstance(scope, _SCOPES):
                scope = self._parents[scope]
            is_global = any(isinstance(each, ast.Global) and target.id in each.names for each in ast.walk(scope))
            scope = self.root if is_global else scope
        for each in ast.walk(scope):
            is_same = (isinstance(each, ast.Name) and isinstance(target, ast.Name) and each.id == target.id) or (
                isinstance(each, ast.Attribute) and isinstance(target, ast.Attribute) and each.attr == target.attr
            )
            if is_same and isinstance(each.ctx, ast.Load):  # type: ignore[attr-defined]  # both have it
                yield each


# ---------------------------------------------------------------------------------------------------- guards


def _guard(statement: ast.AST) -> Site | None:
    """Return a statement as a guard, if it raises an error or exits depending on its condition."""
    if isinstance(statement, ast.Assert):
        return Site(Use.GUARD, _passing(statement.test, wanted=True), error=AssertionError)
    if isinstance(statement, ast.If) and _ends(statement.body) and not statement.orelse:
        last = statement.body[-1]
        error = (last.exc or Exception) if isinstance(last, ast.Raise) else SystemExit
        return Site(Use.GUARD, _passing(statement.test, wanted=False), error=error)
    return None


def _passing(test: ast.expr, *, wanted: bool) -> bool | None:
    """Return the value all parts of a condition must have for the whole to be ``wanted``; None if they differ."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _passing(test.operand, wanted=not wanted)
    if isinstance(test, ast.BoolOp):
        parts = {_passing(part, wanted=wanted) for part in test.values}
        return parts.pop() if len(parts) == 1 else None
    return wanted


def _is_bool(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and _last_name(node.func) == "bool"


def _ends(body: list[ast.stmt]) -> bool:
    """Whether statements end the program with an error or an exit."""
    last = body[-1]
    call = last.value if isinstance(last, ast.Expr) else None
    return isinstance(last, ast.Raise) or (isinstance(call, ast.Call) and _last_name(call.func) in _EXITS)


# ----------------------------------------------------------------------------------------------------- names


def _makes_text(node: ast.AST) -> bool:
    """Whether an expression formats text, such as ``"%d rows" % count``."""
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.Mod) and isinstance(node.left, (ast.Constant, ast.JoinedStr))
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Call) and _last_name(node.func) in _WRITING)


def _of_numbers(function: ast.expr) -> bool:
    """Whether ``log`` is a logarithm."""
    return isinstance(function, ast.Name) or (
        isinstance(function, ast.Attribute)
        and isinstance(function.value, ast.Name)
        and function.value.id in {"math", "cmath", "np", "numpy", "torch"}
    )


def _each_in(kinds: ast.expr) -> list[ast.expr]:
    return kinds.elts if isinstance(kinds, ast.Tuple) else [kinds]


def _last_name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
