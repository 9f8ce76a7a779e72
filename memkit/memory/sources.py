"""Source search for the statement that makes a name's value grow. Used by the leak watch."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterable
from dataclasses import dataclass

_ADDS = {"append", "appendleft", "extend", "extendleft", "insert", "add", "update", "setdefault"}
_EMPTIES = {"clear", "pop", "popleft", "popitem", "remove", "discard"}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@dataclass(frozen=True, slots=True)
class NamePlace:
    """Place of a name in the source.

    Attributes:
        name: The name as written in the source: of a variable, or of an attribute.
        file: The file whose code uses it; None if unknown.
        scope: First line of the function, or name of the class, that it belongs to; None for a global.
        is_local: Whether only that file can refer to it.
    """

    name: str
    file: str | None
    scope: int | str | None = None
    is_local: bool = False


@dataclass(frozen=True, slots=True)
class Growth:
    """Findings in the source about a name.

    Attributes:
        line: ``"file:line"`` of the statement that makes its value grow, otherwise of its function or class; None if
            neither is known.
        is_certain: Whether such a statement was found.
        is_emptied: Whether the source also removes elements from it, or recreates it, along the way.
        is_restarted: Whether an outer loop recreates it: at each epoch, or at each step.
    """

    line: str | None = None
    is_certain: bool = False
    is_emptied: bool = False
    is_restarted: bool = False


def find_growth(place: NamePlace, other_files: Iterable[str]) -> Growth:
    """Look for the statement that makes a name's value grow.

    Args:
        place: The name and its own file.
        other_files: Files to search next: files of the running code, which may change another file's attribute.
    """
    searches = [(place.file, True)] if place.scope is not None else []
    searches += [(file, False) for file in (place.file, *(() if place.is_local else other_files))]
    for file, in_scope in searches:
        if file is None:
            continue
        search = _Search(place, in_scope=in_scope)
        search.visit(_parse(file))
        if search.grows:
            _, number, blocks = min(search.grows, key=lambda found: found[0])
            # One call of a function runs its lines once; only its local names do not survive to the next call.
            once = isinstance(blocks[-1], (ast.Module, *(_FUNCTIONS if place.is_local else ())))
            return Growth(
                f"{file}:{number}",
                is_certain=True,
                is_emptied=search.empties or (not once and any(blocks[-1] is each for each in search.restarts)),
                is_restarted=any(each is block for each in search.restarts for block in blocks if _is_loop(block)),
            )
    line = _class_line(place.scope, place.file) if isinstance(place.scope, str) else place.scope
    return Growth(f"{place.file}:{line}" if place.file and line else None)


def find_call(method: str, files: Iterable[str]) -> str | None:
    """Return ``"file:line"`` of the first call of a method with this name."""
    for file in files:
        for node in ast.walk(_parse(file)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == method:
                return f"{file}:{node.lineno}"
    return None


def _class_line(name: str, file: str | None) -> int | None:
    classes = [node for node in ast.walk(_parse(file)) if isinstance(node, ast.ClassDef)] if file else []
    return next((node.lineno for node in classes if node.name == name), None)


def _parse(file: str) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ast.Module(body=[], type_ignores=[])


def _is_loop(node: ast.AST) -> bool:
    return isinstance(node, (ast.For, ast.AsyncFor, ast.While))


def _names(node: ast.AST) -> set[str]:
    """Return the names and attributes in an expression such as ``self.store["x"].setdefault(k, [])``."""
    names = set()
    while True:
        match node:
            case ast.Attribute(value=inner, attr=name):
                names.add(name)
            case ast.Subscript(value=inner) | ast.Call(func=inner) | ast.Starred(value=inner):
                pass
            case ast.Name(id=name):
                return names | {name}
            case _:
                return names
        node = inner


class _Search(ast.NodeVisitor):
    """Collects the statements about one name, each with the loops and functions around it."""

    def __init__(self, place: NamePlace, *, in_scope: bool) -> None:
        self._place = place
        self._blocks: tuple[ast.AST, ...] = ()
        self._inside = not in_scope
        self.grows: list[tuple[bool, int, tuple[ast.AST, ...]]] = []  # first entry: whether the sign is weak
        self.restarts: list[ast.AST] = []
        self.empties = False

    def visit(self, node: ast.AST) -> None:
        blocks, inside = self._blocks, self._inside
        if _is_loop(node) or isinstance(node, (ast.Module, *_FUNCTIONS)):
            self._blocks = (*blocks, node)
        if isinstance(node, _FUNCTIONS):
            starts = {node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))}
            self._inside = inside or self._place.scope in starts
        if isinstance(node, ast.ClassDef):
            self._inside = inside or self._place.scope == node.name
        super().visit(node)
        self._blocks, self._inside = blocks, inside

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute) and self._means(node.func.value):
            if node.func.attr in _ADDS:
                self._grow(node)
            self.empties = self.empties or node.func.attr in _EMPTIES
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if self._sets(node.target):
            self._grow(node)
        self.generic_visit(node)

    def visit_Delete(self, node: ast.Delete) -> None:
        self.empties = self.empties or any(
            isinstance(target, ast.Subscript) and self._means(target) for target in node.targets
        )

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            for each in target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]:
                if self._sets(each):
                    self._assign(node, each)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None and self._sets(node.target):
            self.restarts.append(self._blocks[-1])
        self.generic_visit(node)

    def _assign(self, node: ast.Assign, target: ast.expr) -> None:
        value = node.value
        if isinstance(target, ast.Subscript):
            if isinstance(target.slice, ast.Slice):
                self.empties = True
            elif not isinstance(target.slice, ast.Constant):  # a constant key is replaced each time
                self._grow(node)
                # slots[step % 4] = x reuses the same slots
                self.empties = self.empties or any(isinstance(each, ast.Mod) for each in ast.walk(target.slice))
        elif not any(self._means(each) for each in ast.walk(value) if isinstance(each, (ast.Name, ast.Attribute))):
            self.restarts.append(self._blocks[-1])
        elif isinstance(value, ast.Subscript):
            self.empties = True  # x = x[-5:]
        elif not isinstance(value, (ast.Name, ast.Attribute)):  # self.x = x
            self._grow(node, weak=True)

    def _grow(self, node: ast.stmt | ast.expr, *, weak: bool = False) -> None:
        self.grows.append((weak or isinstance(self._blocks[-1], ast.Module), node.lineno, self._blocks))

    def _sets(self, target: ast.expr) -> bool:
        """Whether an assignment changes the value of the name, not of one of its attributes."""
        match target:
            case ast.Name(id=name) | ast.Attribute(attr=name):
                return self._inside and name == self._place.name
            case _:
                return isinstance(target, ast.Subscript) and self._means(target)

    def _means(self, node: ast.AST) -> bool:
        return self._inside and self._place.name in _names(node)
