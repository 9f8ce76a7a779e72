"""Rules about evaluation: gradients that are never used, and outputs that stay on the device."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from memkit.check.findings import Rule, SourceSpan
from memkit.check.script import Script, dotted, method, position

_VALIDATES = re.compile(r"(^|[^a-z])(val|valid|validation|test|eval|dev)([^a-z]|$)", re.IGNORECASE)
_EVALUATES = re.compile(r"eval|valid|test|infer|predict", re.IGNORECASE)


def _find_graphs_in_evaluation(script: Script) -> Iterator[SourceSpan]:
    tests = {"pytest", "unittest"}.intersection(script.imports)
    if tests or any(script.qualified(call.func).endswith("set_grad_enabled") for call in script.calls):
        return
    found = dict.fromkeys((*_after_eval(script), *_in_loops_that_validate(script)))
    yield from (SourceSpan.of(call) for call in found)


def _in_loops_that_validate(script: Script) -> Iterator[ast.Call]:
    """Network calls in a loop over a dataset named like a validation set, whose results only become numbers."""
    for loop in script.nodes:
        if not (isinstance(loop, ast.For) and _VALIDATES.search(" ".join(_words(loop.iter)))):
            continue
        inside = [node for node in ast.walk(loop) if isinstance(node, ast.Call)]
        if any(_uses_gradients(script, c) or method(c)[1] in ("step", "manual_backward") for c in inside):
            continue
        uses = [c for c in inside if dotted(c.func) in script.models and not script.under_no_grad(c)]
        reads = any(method(c)[1] in ("item", "cpu", "update") or dotted(c.func) == "float" for c in inside)
        is_kept = bool(uses) and not isinstance(script.parents[uses[0]], ast.Expr)
        if reads and is_kept and not _called_under_no_grad(script, uses[0]):
            yield uses[0]


def _words(node: ast.AST) -> Iterator[str]:
    """The names in an expression."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield part.id
        elif isinstance(part, ast.Attribute):
            yield part.attr


def _uses_gradients(script: Script, call: ast.Call) -> bool:
    full = script.qualified(call.func)
    return method(call)[1] in ("backward", "requires_grad_") or full.startswith(
        ("torch.autograd", "torch.jit", "torch.onnx")
    )


def _after_eval(script: Script) -> Iterator[ast.Call]:
    """Network calls between the network's eval() and its train()."""
    for call in script.calls:
        name, what = method(call)
        if what != "eval" or not name or call.args:
            continue
        statement, rest = _after(script, call)
        first = next((use for use in _uses(script, name, statement, rest) if _repeats(script, use)), None)
        if first is not None and not _called_under_no_grad(script, first):
            yield first


def _after(script: Script, call: ast.Call) -> tuple[ast.stmt, Sequence[ast.stmt]]:
    """The statement of a call, and the statements after it in the same block."""
    for child, parent in script.ancestors(call):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(parent, field, None)
            if isinstance(child, ast.stmt) and isinstance(block, list) and child in block:
                return child, block[block.index(child) + 1 :]
    raise AssertionError("every call is in a statement of a block")


def _uses(script: Script, name: str, statement: ast.stmt, rest: Sequence[ast.stmt]) -> list[ast.Call]:
    """Calls of a network between eval() and train() with gradients on; empty if any gradient is used."""
    found: list[ast.Call] = []
    function = script.function_of(statement)
    for following in rest:
        for node in ast.walk(following):
            if not isinstance(node, ast.Call) or script.function_of(node) is not function:
                continue
            if _uses_gradients(script, node):
                return []
            if method(node) == (name, "train"):
                return found
            if dotted(node.func) == name and not script.under_no_grad(node):
                found.append(node)
    return found


def _repeats(script: Script, call: ast.Call) -> bool:
    """Whether a call runs for many batches, as far as the file shows; unit tests and warm-ups are excluded."""
    if isinstance(script.parents[call], ast.Expr):
        return False  # nothing keeps the graph
    name = getattr(script.function_of(call), "name", "")
    is_named_so = bool(_EVALUATES.search(name)) and not name.startswith("test_")
    return is_named_so or script.loop_of(call) is not None


def _called_under_no_grad(script: Script, node: ast.AST) -> bool:
    """Whether every call, in this file, of the function around a node has gradients off."""
    name = getattr(script.function_of(node), "name", None)
    callers = [call for call in script.calls if name is not None and dotted(call.func).rpartition(".")[2] == name]
    return bool(callers) and all(map(script.under_no_grad, callers))


def _find_outputs_on_device(script: Script) -> Iterator[SourceSpan]:
    if not script.on_accelerator:
        return
    for call in script.calls:
        target, what = method(call)
        loop = script.loop_of(call)
        if what != "append" or len(call.args) != 1 or loop is None or not script.under_no_grad(call):
            continue
        value: ast.expr = call.args[0]
        if isinstance(value, ast.Name):
            before = [b for b in script.bound[value.id] if position(b.statement) < position(call)]
            value = before[-1].value if before and script.inside(before[-1].statement, loop) else value
        if (
            isinstance(value, ast.Call)
            and dotted(value.func) in script.models
            and not any(
                script.inside(b.statement, each) for each in script.loops_of(call) for b in script.bound[target]
            )
        ):
            yield SourceSpan.of(call)


RULES: tuple[Rule[Script], ...] = (
    Rule(
        id="eval-with-graph",
        level="warning",
        what="evaluation with gradients on",
        why="`eval()` changes dropout and batch norm only: without no_grad, every forward pass records a graph with "
        "its activations.",
        fix="put the loop under `with torch.no_grad():`, or decorate the function with it.",
        example="""
import torch
def validate(model, loader):
    model.eval()
    for x, y in loader:
        correct += (model(x).argmax(1) == y).sum().item()
""",
        near_miss="""
import torch
def validate(model, loader):
    model.eval()
    with torch.no_grad():
        for x, y in loader:
            correct += (model(x).argmax(1) == y).sum().item()
def attack(model, loader):
    model.eval()
    for x, y in loader:
        criterion(model(x), y).backward()
""",
        find=_find_graphs_in_evaluation,
    ),
    Rule(
        id="eval-outputs-on-device",
        level="warning",
        what="a list of a network's outputs that stays on the device",
        why="the outputs of the whole evaluation set take device memory at once.",
        fix="append `output.cpu()`, or reduce to the metric batch by batch.",
        example="""
import torch
model.eval().cuda()
outputs = []
with torch.no_grad():
    for x in loader:
        outputs.append(model(x.cuda()))
""",
        near_miss="""
import torch
model.eval().cuda()
outputs = []
with torch.no_grad():
    for x in loader:
        output = model(x.cuda())
        outputs.append(output.cpu())
""",
        find=_find_outputs_on_device,
    ),
)
