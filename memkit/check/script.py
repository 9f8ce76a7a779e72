"""A Python script's syntax tree and the rules' queries on it: names, training loops, code under no_grad."""

from __future__ import annotations

import ast
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple, TypeAlias

Loop: TypeAlias = ast.For | ast.AsyncFor | ast.While
FunctionNode: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda

_NETWORK = re.compile(
    r"(^|[._])(model|net|network|encoder|decoder|backbone|generator|discriminator|critic|classifier|net_?[DG]|[DG])$"
)
_OPTIMIZER = re.compile(r"optim|(^|_)opt([A-Z_0-9]|$)", re.IGNORECASE)
_SCHEDULER = re.compile(r"sched|(^|_)lr", re.IGNORECASE)
_MOVES = (".cuda(", ".to(", "accelerator", '"cuda', "'cuda", "torch.cuda.FloatTensor")
_LIBRARIES = ("torch", "lightning", "pytorch_lightning", "accelerate")
_SETTINGS = frozenset(  # module methods that do not run the module
    {"parameters", "named_parameters", "buffers", "modules", "named_modules", "children", "state_dict", "train", "eval"}
    | {"load_state_dict", "to", "cuda", "cpu", "half", "float", "zero_grad", "requires_grad_", "apply", "no_sync"}
)
_RUNNERS = ("accelerator", "fabric")  # their backward takes the loss as an argument


class Binding(NamedTuple):
    """One assignment: the statement, the name bound, the value."""

    statement: ast.stmt
    name: str
    value: ast.expr


class Script:
    """One parsed file.

    Raises:
        SyntaxError: The text is not Python 3.
        RecursionError, MemoryError: It nests too deeply for the parser.
        ValueError: It contains a null byte.
    """

    def __init__(self, text: str) -> None:
        with warnings.catch_warnings():  # about the checked file's own escapes
            warnings.simplefilter("ignore")
            self.tree = ast.parse(text)
        self.on_accelerator = any(word in text for word in _MOVES)
        self.parents: dict[ast.AST, ast.AST] = {}
        self.nodes: list[ast.AST] = []  # in source order
        stack: list[ast.AST] = [self.tree]
        while stack:
            node = stack.pop()
            self.nodes.append(node)
            children = list(ast.iter_child_nodes(node))
            self.parents.update(dict.fromkeys(children, node))
            stack += reversed(children)
        self.calls = [node for node in self.nodes if isinstance(node, ast.Call)]
        self.imports = dict(_imports(self.nodes))
        self.uses_torch = any(full.startswith(_LIBRARIES) for full in self.imports.values())

    # ------------------------------------------------------------------------------------------------- names

    def qualified(self, node: ast.AST) -> str:
        """Full name behind a name or a call's function, as in ``torch.nn.MSELoss``; "" if unknown."""
        name = dotted(node)
        first, dot, rest = name.partition(".")
        return self.imports.get(first, first) + dot + rest

    def calls_of(self, *names: str) -> Iterator[ast.Call]:
        """Calls of functions with these full names."""
        return (call for call in self.calls if self.qualified(call.func) in names)

    @cached_property
    def bindings(self) -> list[Binding]:
        """Every assignment to a name or an attribute; each target of a tuple gets the whole value."""
        found = []
        for node in self.nodes:
            targets = node.targets if isinstance(node, ast.Assign) else []
            if isinstance(node, ast.AnnAssign) and node.value is not None:
                targets = [node.target]
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                parts = [part for target in targets for part in getattr(target, "elts", [target])]
                found += [Binding(node, name, node.value) for part in parts if (name := dotted(part))]
        return found

    @cached_property
    def bound(self) -> dict[str, list[Binding]]:
        """The assignments of each name."""
        by_name = defaultdict(list)
        for binding in self.bindings:
            by_name[binding.name].append(binding)
        return by_name

    @cached_property
    def stores(self) -> dict[str, list[ast.AST]]:
        """Places that bind each name in any way except by an import or a definition."""
        by_name: dict[str, list[ast.AST]] = defaultdict(list)
        for node in self.nodes:
            if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                by_name[dotted(node)].append(node)
        return by_name

    @cached_property
    def models(self) -> set[str]:
        """Names used as networks: their parameters are read, or their mode is set; or they are named like one."""
        methods = {"parameters", "train", "eval", "named_parameters"}
        used = {method(call)[0] for call in self.calls if method(call)[1] in methods}
        named = {name for call in self.calls if _NETWORK.search(name := dotted(call.func))}
        return (used | named) - {"", "self"}

    @cached_property
    def scalers(self) -> set[str]:
        """Names of gradient scalers: bound to one, or used like one."""
        made = {b.name for b in self.bindings if self.qualified(_function(b.value)).endswith("GradScaler")}
        used = {method(scaling)[0] for call in self.backwards if (scaling := _scaling(call)) is not None}
        return (made | used) - {""}

    def is_optimizer(self, name: str) -> bool:
        """Whether a name stands for an optimizer, by its binding or else by the words in it."""
        made = [self.qualified(_function(binding.value)) for binding in self.bound[name]]
        if any("lr_scheduler" in full for full in made):
            return False
        if any(full.startswith("torch.optim.") for full in made):
            return True
        last = name.rpartition(".")[2]
        return bool(_OPTIMIZER.search(last)) and not _SCHEDULER.search(last)

    # ------------------------------------------------------------------------------------------------- places

    def ancestors(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """Pairs of (child, parent) from a node up to the module."""
        while (parent := self.parents.get(node)) is not None:
            yield node, parent
            node = parent

    def function_of(self, node: ast.AST) -> ast.AST:
        """The innermost function around a node, or the module."""
        return next((up for _, up in self.ancestors(node) if isinstance(up, FunctionNode)), self.tree)

    def loops_of(self, node: ast.AST) -> Iterator[Loop]:
        """Loops of the same function whose body contains a node, innermost first."""
        for child, parent in self.ancestors(node):
            if isinstance(parent, FunctionNode):
                return
            if isinstance(parent, Loop) and child in parent.body:
                yield parent

    def loop_of(self, node: ast.AST) -> Loop | None:
        """The innermost such loop."""
        return next(self.loops_of(node), None)

    def inside(self, node: ast.AST, outer: ast.AST) -> bool:
        """Whether a node is somewhere inside another."""
        return any(parent is outer for _, parent in self.ancestors(node))

    def is_guarded(self, node: ast.AST, outer: ast.AST) -> bool:
        """Whether a node runs only in some iterations of the loop around it, by a condition that may change."""
        for child, parent in self.ancestors(node):
            if parent is outer:
                return False
            if isinstance(parent, ast.ExceptHandler | FunctionNode):
                return True
            if isinstance(parent, ast.If) and child is not parent.test and not self._is_setting(parent.test, outer):
                return True
        return False

    def _is_setting(self, test: ast.expr, loop: ast.AST) -> bool:
        """Whether a condition tests a setting, which does not change in a loop."""
        parts = [test]
        while parts:
            part = parts.pop()
            if isinstance(part, ast.UnaryOp):
                parts.append(part.operand)
            elif isinstance(part, ast.BoolOp):
                parts += part.values
            elif isinstance(part, ast.Compare):
                parts += [part.left, *part.comparators]
            elif isinstance(part, ast.Constant):
                if not isinstance(part.value, str | bool | None):
                    return False  # a comparison with a number, such as that of a counter
            elif not dotted(part) or any(self.inside(node, loop) for node in self.stores.get(dotted(part), ())):
                return False
        return True

    def are_exclusive(self, first: ast.AST, second: ast.AST) -> bool:
        """Whether two nodes are in different branches of the same `if`."""
        branches = {up: child for child, up in self.ancestors(first)}
        for child, up in self.ancestors(second):
            if isinstance(up, ast.If) and up in branches:
                sides = [node in up.orelse for node in (child, branches[up])]
                return sides[0] != sides[1]
        return False

    def under_no_grad(self, node: ast.AST) -> bool:
        """Whether a `with` or a decorator around a node turns gradients off."""
        for _, parent in self.ancestors(node):
            if isinstance(parent, ast.With | ast.AsyncWith):
                if any(_turns_off(item.context_expr) for item in parent.items):
                    return True
            elif isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef) and any(
                map(_turns_off, parent.decorator_list)
            ):
                return True
        return False

    # ------------------------------------------------------------------------------------------------- training

    @cached_property
    def backwards(self) -> list[ast.Call]:
        """The calls that run a backward pass, without those inside an autograd function's own `backward`."""
        return [
            call
            for call in self.calls
            if method(call)[1] in ("backward", "manual_backward")
            and getattr(self.function_of(call), "name", "") not in ("backward", "manual_backward")
        ]

    @cached_property
    def optimizer_steps(self) -> list[ast.Call]:
        """`optimizer.step()` and `scaler.step(optimizer)`."""
        return [call for call in self.calls if method(call)[1] == "step" and self.stepped(call)]

    def stepped(self, call: ast.Call) -> str:
        """Name of the optimizer that a `step` call steps; "" for a scheduler's or any other step."""
        receiver = method(call)[0]
        if receiver in self.scalers and call.args:
            return dotted(call.args[0])
        return receiver if receiver and self.is_optimizer(receiver) else ""

    @cached_property
    def step_loops(self) -> list[Loop]:
        """The innermost loops around a backward pass or an optimizer step, in source order."""
        loops = {self.loop_of(call) for call in (*self.backwards, *self.optimizer_steps)}
        return sorted((loop for loop in loops if loop is not None), key=position)

    def hot_loop(self, node: ast.AST) -> Loop | None:
        """The training loop in which a node runs in every iteration."""
        for loop in self.loops_of(node):
            if loop in self.step_loops:
                return None if self.is_guarded(node, loop) else loop
        return None

    def calling_loop(self, node: ast.AST) -> Loop | None:
        """The training loop that calls the function around a node in every iteration, if the node runs in every call.

        Either the loop trains, or the function does, such as a `train_step` that a loop over batches calls.
        """
        function = self.function_of(node)
        name = getattr(function, "name", None)
        between = [parent for _, parent in self.ancestors(node) if self.inside(parent, function)]
        if name is None or any(isinstance(each, Loop | ast.If | ast.ExceptHandler) for each in between):
            return None
        trains = any(self.function_of(call) is function for call in (*self.backwards, *self.optimizer_steps))
        for call in self.calls:
            loop = self.loop_of(call)
            is_own = dotted(call.func) in (name, f"self.{name}")
            if is_own and loop is not None and not self.is_guarded(call, loop) and (trains or loop in self.step_loops):
                return loop
        return None

    def is_network(self, call: ast.Call) -> bool:
        """Whether a call runs a network or a part of one, such as ``model(x)`` or ``model.features(x)``."""
        name = dotted(call.func)
        owner, _, last = name.rpartition(".")
        return name in self.models or (owner in self.models and last not in _SETTINGS)


def position(node: ast.stmt | ast.expr) -> tuple[int, int]:
    """Start of a statement or expression, for comparison."""
    return node.lineno, node.col_offset


def dotted(node: ast.AST) -> str:
    """The text of a dotted expression such as ``self.net.layer``; "" for anything else."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def owner(call: ast.Call) -> str:
    """Name of the object whose method is called, or of its container: ``stats["loss"].append(x)``."""
    target = call.func.value if isinstance(call.func, ast.Attribute) else call.func
    while isinstance(target, ast.Subscript):
        target = target.value
    return dotted(target)


def method(call: ast.Call) -> tuple[str, str]:
    """Receiver and name of a method call: ``loss.item()`` gives ("loss", "item")."""
    return (dotted(call.func.value), call.func.attr) if isinstance(call.func, ast.Attribute) else ("", "")


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """The value of a keyword argument."""
    return next((given.value for given in call.keywords if given.arg == name), None)


def has_unpacked(call: ast.Call) -> bool:
    """Whether a call unpacks keyword arguments that are not visible here."""
    return any(given.arg is None for given in call.keywords)


def is_constant(node: ast.AST | None, value: object) -> bool:
    """Whether an expression is this literal."""
    return isinstance(node, ast.Constant) and node.value is value


def leaves(node: ast.expr) -> Iterator[str]:
    """Names that a value consists of, through arithmetic or literals; names inside calls are excluded."""
    stack: list[ast.expr] = [node]
    while stack:
        part = stack.pop()
        if isinstance(part, ast.BinOp):
            stack += [part.right, part.left]
        elif isinstance(part, ast.UnaryOp):
            stack.append(part.operand)
        elif isinstance(part, ast.Tuple | ast.List):
            stack += reversed(part.elts)
        elif name := dotted(part):
            yield name


def backward_names(call: ast.Call) -> set[str]:
    """Names that a backward pass starts from."""
    receiver, name = method(call)
    scaling = _scaling(call)
    if scaling is not None:
        return set(leaves(scaling.args[0]))
    if call.args and (name == "manual_backward" or receiver.rpartition(".")[2] in _RUNNERS):
        return set(leaves(call.args[0]))
    return set(leaves(call.func.value)) if isinstance(call.func, ast.Attribute) else set()


def _scaling(call: ast.Call) -> ast.Call | None:
    """The inner call of ``scaler.scale(loss).backward()``."""
    inner = call.func.value if isinstance(call.func, ast.Attribute) else None
    return inner if isinstance(inner, ast.Call) and method(inner)[1] == "scale" and inner.args else None


def _function(value: ast.expr) -> ast.expr:
    return value.func if isinstance(value, ast.Call) else value


def _turns_off(node: ast.expr) -> bool:
    """Whether a context manager or decorator turns gradients off, under whatever name a project gives it."""
    last = dotted(_function(node)).rpartition(".")[2]
    return "nograd" in last.replace("_", "") or "inference_mode" in last or last == "set_grad_enabled"


def _imports(nodes: list[ast.AST]) -> Iterator[tuple[str, str]]:
    for node in nodes:
        if isinstance(node, ast.Import):
            for name in node.names:
                yield (name.asname, name.name) if name.asname else (name.name.partition(".")[0],) * 2
        elif isinstance(node, ast.ImportFrom):
            for name in node.names:
                yield name.asname or name.name, f"{node.module or ''}.{name.name}"
