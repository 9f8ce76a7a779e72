"""Rules about graphs that outlive their step, or are cut where they should not be."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from memkit.check.findings import Rule, SourceSpan
from memkit.check.script import (
    Binding,
    Loop,
    Script,
    backward_names,
    dotted,
    is_constant,
    keyword,
    leaves,
    method,
    owner,
    position,
)

_OF_CRITIC = re.compile(r"(^|[._])(d|dis|disc|discriminator|critic)([._]|$)|(opt|optim|optimizer)_?D$")


def _graph_names(script: Script, loop: Loop) -> set[str]:
    """Names that hold a graph in a training loop: the start of backward, its parts, and the networks' outputs."""
    backwards = [call for call in script.backwards if script.loop_of(call) is loop]
    names = set[str]().union(*map(backward_names, backwards))
    here = [binding for binding in script.bindings if script.inside(binding.statement, loop)]
    for binding in reversed(here):
        if binding.name in names:
            computed = {b.name for b in here if isinstance(b.value, ast.Call)}
            names |= computed.intersection(leaves(binding.value))
        elif isinstance(binding.value, ast.Call) and script.is_network(binding.value) and backwards:
            names.add(binding.name)
    return {name for name in names if not any(script.under_no_grad(b.statement) for b in here if b.name == name)}


def _holds_graph(script: Script, loop: Loop, name: str, use: ast.stmt | ast.expr) -> bool:
    """Whether the value at a use is still the one that went into the backward pass."""
    last_pass = max(
        (position(c) for c in script.backwards if script.inside(c, loop) and position(c) < position(use)),
        default=(0, 0),
    )
    rebound = (
        position(b.statement)
        for b in script.bound[name]
        if script.inside(b.statement, loop) and name not in leaves(b.value)
    )
    return last_pass == (0, 0) or not any(last_pass < at < position(use) for at in rebound)


def _kept(script: Script) -> Iterator[tuple[ast.stmt | ast.expr, str, ast.expr]]:
    """Accumulations: the code, the name that is added to, and the value added."""
    for node in script.nodes:
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
            yield node, dotted(node.target), node.value
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp) and len(node.targets) == 1:
            name = dotted(node.targets[0])
            if name in leaves(node.value):
                yield node, name, node.value
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "append" and len(node.args) == 1:
            yield node, owner(node), node.args[0]


def _is_sum(node: ast.stmt | ast.expr, value: ast.expr) -> bool:
    """Whether an accumulation computes a new tensor; a list keeps the tensors themselves, with their graphs."""
    return isinstance(node, ast.stmt) and not isinstance(value, (ast.List, ast.Tuple, ast.ListComp))


def _added(value: ast.expr) -> set[str]:
    """The names in an added value, also as an item: ``out["features"]``."""
    stack, names = [value], set[str]()
    while stack:
        part = stack.pop()
        names.update(leaves(part))
        stack += [part.value] if isinstance(part, ast.Subscript) else getattr(part, "elts", [])
    return names


def _is_reset(script: Script, loop: Loop, name: str) -> bool:
    """Whether a name is rebound or cleared in every iteration of a loop."""
    made = (b.statement for b in script.bound[name] if name not in leaves(b.value))
    emptied = (call for call in script.calls if method(call) == (name, "clear"))
    return any(script.inside(node, loop) and not script.is_guarded(node, loop) for node in (*made, *emptied))


def _find_kept_graphs(script: Script) -> Iterator[SourceSpan]:
    in_loss = set[str]().union(*map(backward_names, script.backwards))
    in_loss |= {leaf for b in script.bindings if b.name in in_loss for leaf in _names_in(b.value)}
    for loop in script.step_loops:
        graph = _graph_names(script, loop)
        for node, name, value in _kept(script):
            added = graph.intersection(_added(value)) - {name}
            if (
                name
                and name not in in_loss
                and script.inside(node, loop)
                and not (_is_sum(node, value) and script.under_no_grad(node))
                and not _is_reset(script, loop, name)
                and any(_holds_graph(script, loop, part, node) for part in added)
            ):
                yield SourceSpan.of(node)


def _names_in(value: ast.expr) -> set[str]:
    return {dotted(node) for node in ast.walk(value)} - {""}


def _find_wasted_generators(script: Script) -> Iterator[SourceSpan]:
    for binding in script.bindings:
        loop = script.hot_loop(binding.statement)
        maker = binding.value
        if loop is None or not (isinstance(maker, ast.Call) and dotted(maker.func) in script.models):
            continue
        if script.under_no_grad(binding.statement):
            continue
        end = min(
            (position(b.statement) for b in _later(script, loop, binding)), default=(loop.end_lineno or 0, 1 << 30)
        )
        uses = [
            call
            for call in script.calls
            if dotted(call.func) in script.models - {dotted(maker.func)}
            and position(binding.statement) < position(call) < end
            and script.inside(call, loop)
            and any(dotted(given) == binding.name for given in call.args)
        ]
        if uses and all(_trains_another(script, loop, use, dotted(maker.func)) for use in uses):
            yield SourceSpan.of(uses[0])


def _later(script: Script, loop: Loop, binding: Binding) -> Iterator[Binding]:
    """Later assignments to the same name in a loop."""
    for other in script.bound[binding.name]:
        if script.inside(other.statement, loop) and position(other.statement) > position(binding.statement):
            yield other


def _trains_another(script: Script, loop: Loop, use: ast.Call, generator: str) -> bool:
    """Whether the next optimizer step is known to update other parameters than the generator's."""
    steps = [step for step in script.optimizer_steps if script.loop_of(step) is loop and position(step) > position(use)]
    passes = [call for call in script.backwards if steps and position(use) < position(call) < position(steps[0])]
    if not passes or any(is_constant(keyword(call, "retain_graph"), value=True) for call in passes):
        return False  # the graph may be kept for the generator's own step
    stepped = script.stepped(steps[0])
    made = [b.value for b in script.bound[stepped] if isinstance(b.value, ast.Call)]
    owners = {method(node)[0] for value in made for node in ast.walk(value) if isinstance(node, ast.Call)} - {""}
    trained = owners & script.models
    if not trained:
        return not made and bool(_OF_CRITIC.search(stepped))
    return generator not in trained


def _find_retained(script: Script) -> Iterator[SourceSpan]:
    for loop in script.step_loops:
        inside = [call for call in script.backwards if script.inside(call, loop)]
        steps = [call for call in script.optimizer_steps if script.loop_of(call) is loop]
        other = [
            c for c in script.calls if script.inside(c, loop) and script.qualified(c.func) == "torch.autograd.grad"
        ]
        if len(inside) == 1 and steps and not other and is_constant(keyword(inside[0], "retain_graph"), value=True):
            yield SourceSpan.of(inside[0])


def _find_created(script: Script) -> Iterator[SourceSpan]:
    for call in script.backwards:
        if is_constant(keyword(call, "create_graph"), value=True):
            yield SourceSpan.of(call)


def _find_cut_generators(script: Script) -> Iterator[SourceSpan]:
    for binding in script.bindings:
        value = binding.value
        if not (isinstance(value, ast.Call) and _is_network(script, value) and script.under_no_grad(binding.statement)):
            continue
        function = script.function_of(binding.statement)
        inputs = set(leaves(value.args[0])) if value.args else set()
        from_network = any(
            isinstance(b.value, ast.Call)
            and _is_network(script, b.value)
            and position(b.statement) < position(binding.statement)
            and script.function_of(b.statement) is function
            and not script.under_no_grad(b.statement)
            for name in inputs
            for b in script.bound[name]
        )
        if from_network and _is_revived(script, binding.name, function):
            yield SourceSpan.of(value)


def _is_network(script: Script, call: ast.Call) -> bool:
    """Whether a call runs a network, by its use in the file or because it is not a known function."""
    full = script.qualified(call.func)
    return dotted(call.func) in script.models or (bool(full) and not full.startswith(("torch.", "numpy.")))


def _is_revived(script: Script, name: str, function: ast.AST) -> bool:
    calls = (call for call in script.calls if method(call) == (name, "requires_grad_"))
    return any(script.function_of(call) is function and not _is_off(call) for call in calls) or any(
        script.function_of(b.statement) is function and is_constant(b.value, value=True)
        for b in script.bound[f"{name}.requires_grad"]
    )


def _is_off(call: ast.Call) -> bool:
    return bool(call.args) and is_constant(call.args[0], value=False)


RULES: tuple[Rule[Script], ...] = (
    Rule(
        id="generator-graph-in-critic-step",
        level="warning",
        what="the generator's graph is built in the discriminator's step",
        why="the backward pass of the discriminator's loss runs through the generator: its activations are kept, and "
        "its gradients are not used.",
        fix="pass `fake.detach()` to the discriminator, or compute `fake` under `torch.no_grad()`.",
        example="""
import torch
optimizer_d = torch.optim.Adam(discriminator.parameters())
optimizer_g = torch.optim.Adam(generator.parameters())
for real in loader:
    fake = generator(noise())
    d_loss = criterion(discriminator(real), 1) + criterion(discriminator(fake), 0)
    d_loss.backward()
    optimizer_d.step()
    fake = generator(noise())
    g_loss = criterion(discriminator(fake), 1)
    g_loss.backward()
    optimizer_g.step()
""",
        near_miss="""
import torch
optimizer_d = torch.optim.Adam(discriminator.parameters())
optimizer_g = torch.optim.Adam(generator.parameters())
for real in loader:
    fake = generator(noise())
    d_loss = criterion(discriminator(real), 1) + criterion(discriminator(fake.detach()), 0)
    d_loss.backward()
    optimizer_d.step()
    g_loss = criterion(discriminator(fake), 1)
    g_loss.backward()
    optimizer_g.step()
""",
        find=_find_wasted_generators,
    ),
    Rule(
        id="graph-kept",
        level="warning",
        what="a tensor with its graph is kept from step to step",
        why="every step's graph stays alive for as long as the sum or the list does, and memory grows.",
        figure="758 graph nodes were alive after 50 steps of `running += loss` (torch 2.13, CPU)",
        fix="keep `loss.item()` if the value is read anyway, otherwise `loss.detach()`.",
        example="""
import torch
running = 0.0
for x, y in loader:
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    running += loss
""",
        near_miss="""
import torch
running = 0.0
for x, y in loader:
    total = 0
    for part in parts:
        total += criterion(model(part), y)
    total.backward()
    optimizer.step()
    running += total.detach()
""",
        find=_find_kept_graphs,
    ),
    Rule(
        id="retain-graph",
        level="warning",
        what="retain_graph=True on the only backward pass of a step",
        why="the tensors that the graph saved stay in memory until the loss is overwritten; if a state is carried to "
        "the next step with its graph, every backward pass runs through all earlier steps.",
        fix="omit retain_graph; detach a state that is carried to the next step.",
        example="""
import torch
for x, y in loader:
    optimizer.zero_grad()
    output, hidden = net(x, hidden)
    loss = criterion(output, y)
    loss.backward(retain_graph=True)
    optimizer.step()
""",
        near_miss="""
import torch
for x, y in loader:
    optimizer.zero_grad()
    features = encoder(x)
    first(features).backward(retain_graph=True)
    second(features, y).backward()
    optimizer.step()
""",
        find=_find_retained,
    ),
    Rule(
        id="create-graph-backward",
        level="warning",
        what="backward(create_graph=True)",
        why="parameters and their gradients then refer to each other, and the graph is freed only when `.grad` is "
        "reset; torch itself warns of this.",
        fix="compute the gradients with `torch.autograd.grad(..., create_graph=True)`, or set every `.grad` to None.",
        example="""
import torch
loss.backward(create_graph=True)
""",
        near_miss="""
import torch
gradient, = torch.autograd.grad(score.sum(), images, create_graph=True)
gradient.square().sum().backward()
""",
        find=_find_created,
    ),
    Rule(
        id="gradient-cut",
        level="error",
        what="a network runs under no_grad in the path of another one's gradient, and requires_grad is set afterwards",
        why="the result is a new leaf: backward runs, but the first network silently gets no gradient from it.",
        fix="freeze the parameters (`network.requires_grad_(False)`) and call it outside no_grad.",
        example="""
import torch
images = generator(z)
with torch.no_grad():
    large = upscaler(images)
large.requires_grad_(True)
loss = criterion(discriminator(large))
loss.backward()
""",
        near_miss="""
import torch
with torch.no_grad():
    fake = generator(z)
    large = upscaler(fake)
large.requires_grad_(True)
penalty(discriminator(large), large).backward()
""",
        find=_find_cut_generators,
    ),
)
