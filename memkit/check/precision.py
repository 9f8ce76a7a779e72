"""Rules about mixed precision: the order of scaling, clipping, stepping and the schedule."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from memkit.check.findings import Rule, SourceSpan
from memkit.check.script import Script, dotted, is_constant, keyword, method, position

_CLIPS = ("clip_grad_norm_", "clip_grad_value_", "clip_grad_norm", "clip_grad_value")


def _scaler_calls(script: Script, name: str) -> list[ast.Call]:
    return [call for call in script.calls if method(call)[1] == name and method(call)[0] in script.scalers]


def _find_clipped_scaled(script: Script) -> Iterator[SourceSpan]:
    scales, unscales, steps = (_scaler_calls(script, name) for name in ("scale", "unscale_", "step"))
    for clip in script.calls:
        if dotted(clip.func).rpartition(".")[2] not in _CLIPS:
            continue
        function = script.function_of(clip)
        later = (s for s in steps if script.function_of(s) is function and position(s) > position(clip))
        # The last unscale_ may belong to the previous step; one anywhere earlier in the function counts as correct.
        earlier = (u for u in unscales if script.function_of(u) is function and position(u) < position(clip))
        scaled = (c for c in scales if script.function_of(c) is function and position(c) < position(clip))
        if any(scaled) and any(not script.are_exclusive(clip, step) for step in later) and not any(earlier):
            yield SourceSpan.of(clip)


def _find_mixed(script: Script) -> Iterator[SourceSpan]:
    for unscale in _scaler_calls(script, "unscale_"):
        loop, target = script.loop_of(unscale), _target(unscale)
        steps = [s for s in _scaler_calls(script, "step") if script.loop_of(s) is loop and _target(s) == target]
        end = min((position(s) for s in steps if position(s) > position(unscale)), default=None)
        for call in script.backwards:
            if (
                end is not None
                and position(unscale) < position(call) < end
                and script.loop_of(call) is loop
                and script.function_of(call) is script.function_of(unscale)
                and not script.are_exclusive(unscale, call)
            ):
                yield SourceSpan.of(call)


def _target(call: ast.Call) -> str:
    return dotted(call.args[0]) if call.args else ""


def _find_updated_between(script: Script) -> Iterator[SourceSpan]:
    events = [
        *((position(c), "backward", c) for c in script.backwards),
        *((position(c), "step", c) for c in _scaler_calls(script, "step")),
        *((position(c), "update", c) for c in _scaler_calls(script, "update")),
    ]
    events.sort(key=lambda event: event[0])
    for first, second, third in zip(events, events[1:], events[2:], strict=False):
        calls = (first[2], second[2], third[2])
        if (
            (first[1], second[1], third[1]) == ("step", "update", "step")
            and len({(script.function_of(call), script.loop_of(call)) for call in calls}) == 1
            and len({method(call)[0] for call in calls}) == 1
            and _target(first[2]) != _target(third[2])
            and not any(script.are_exclusive(calls[0], call) for call in calls[1:])
        ):
            yield SourceSpan.of(second[2])


def _find_schedules(script: Script) -> Iterator[SourceSpan]:
    names = {getattr(node, "attr", None) for node in script.nodes}
    if "get_scale" in names or "_scale" in names:
        return
    for call in script.calls:
        if not _is_schedule(script, call):
            continue
        loop = script.hot_loop(call)
        steps = [s for s in _scaler_calls(script, "step") if loop is not None and script.loop_of(s) is loop]
        if any(not script.are_exclusive(call, step) for step in steps):
            yield SourceSpan.of(call)


def _find_early_schedules(script: Script) -> Iterator[SourceSpan]:
    for call in script.calls:
        if not _is_schedule(script, call):
            continue
        loop = script.loop_of(call)
        steps = [s for s in script.optimizer_steps if loop is not None and script.inside(s, loop)]
        same = [s for s in steps if script.function_of(s) is script.function_of(call)]
        is_first = bool(same) and position(call) < min(map(position, same))
        if loop is not None and is_first and not script.is_guarded(call, loop) and not _has_position(call):
            yield SourceSpan.of(call)


def _is_schedule(script: Script, call: ast.Call) -> bool:
    name, what = method(call)
    made = any("lr_scheduler" in _full(script, b.value) for b in script.bound[name])
    return what == "step" and (made or name.rpartition(".")[2] in ("scheduler", "lr_scheduler"))


def _has_position(call: ast.Call) -> bool:
    """Whether a scheduler gets its position as an argument, as in timm; such a scheduler may step first."""
    return bool(call.args or call.keywords)


def _find_low_penalties(script: Script) -> Iterator[SourceSpan]:
    for call in script.calls_of("torch.autograd.grad"):
        if is_constant(keyword(call, "create_graph"), value=True) and _autocast_around(script, call):
            yield SourceSpan.of(call)


def _autocast_around(script: Script, node: ast.AST) -> bool:
    """Whether the innermost autocast around a node is on."""
    for _, parent in script.ancestors(node):
        if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef):
            return False
        for item in parent.items if isinstance(parent, ast.With | ast.AsyncWith) else ():
            context = item.context_expr
            if isinstance(context, ast.Call) and dotted(context.func).rpartition(".")[2] == "autocast":
                return not is_constant(keyword(context, "enabled"), value=False)
    return False


def _full(script: Script, value: ast.expr) -> str:
    return script.qualified(value.func) if isinstance(value, ast.Call) else ""


RULES: tuple[Rule[Script], ...] = (
    Rule(
        id="penalty-in-autocast",
        level="warning",
        what="a gradient penalty is computed inside autocast",
        why="the gradient of a gradient is then a product of low-precision numbers: in float16 it overflows or becomes "
        "zero, and the scaler does not detect it.",
        fix='compute it under `torch.autocast("cuda", enabled=False)` from float32 inputs, or with memkit\'s '
        "gradient_penalty.",
        example="""
import torch
with torch.autocast("cuda"):
    score = critic(mixed)
    gradient, = torch.autograd.grad(score.sum(), mixed, create_graph=True)
    loss = loss + 10 * (gradient.norm(dim=1) - 1).square().mean()
""",
        near_miss="""
import torch
with torch.autocast("cuda"):
    loss = critic(fake).mean() - critic(real).mean()
    with torch.autocast("cuda", enabled=False):
        score = critic(mixed)
        gradient, = torch.autograd.grad(score.sum(), mixed, create_graph=True)
        loss = loss + 10 * (gradient.norm(dim=1) - 1).square().mean()
""",
        find=_find_low_penalties,
    ),
    Rule(
        id="schedule-before-step",
        level="warning",
        what="the learning-rate scheduler is stepped before the optimizer",
        why="the first value of the schedule is skipped, and every step uses the rate of the next one; torch warns of "
        "it once.",
        fix="call `scheduler.step()` after `optimizer.step()`.",
        example="""
import torch
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
for x, y in loader:
    criterion(model(x), y).backward()
    scheduler.step()
    optimizer.step()
""",
        near_miss="""
import torch
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
for x, y in loader:
    criterion(model(x), y).backward()
    optimizer.step()
    scheduler.step()
""",
        find=_find_early_schedules,
    ),
    Rule(
        id="clip-before-unscale",
        level="error",
        what="gradients are clipped while they are scaled",
        why="the limit is compared with gradients that are 2**16 times too large at the default scale, so every step "
        "is clipped to almost zero.",
        fix="call `scaler.unscale_(optimizer)` before clipping.",
        example="""
import torch
scaler = torch.amp.GradScaler()
for x, y in loader:
    scaler.scale(criterion(model(x), y)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
""",
        near_miss="""
import torch
scaler = torch.amp.GradScaler()
for x, y in loader:
    if amp:
        scaler.scale(criterion(model(x), y)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    else:
        criterion(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
""",
        find=_find_clipped_scaled,
    ),
    Rule(
        id="backward-after-unscale",
        level="error",
        what="a backward pass after unscale_ and before the step",
        why="scaled gradients are added to unscaled ones.",
        figure="a gradient of 262148 instead of 4 (torch 2.13, CPU)",
        fix="run every backward pass of the step first, then unscale_, clip, step.",
        example="""
import torch
scaler = torch.amp.GradScaler()
for x, y in loader:
    scaler.scale(first(model(x), y)).backward()
    scaler.unscale_(optimizer)
    scaler.scale(second(model(x), y)).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        near_miss="""
import torch
scaler = torch.amp.GradScaler()
for x, y in loader:
    scaler.scale(first(D(x), y)).backward()
    scaler.unscale_(optimizer_d)
    scaler.step(optimizer_d)
    scaler.scale(second(G(x), y)).backward()
    scaler.step(optimizer_g)
    scaler.update()
""",
        find=_find_mixed,
    ),
    Rule(
        id="update-between-steps",
        level="error",
        what="scaler.update() between the steps of two optimizers",
        why="gradients that were scaled by the old factor are divided by the new one.",
        figure="the second optimizer's gradient is 2.0 times wrong if the first one's overflowed (torch 2.13, CPU)",
        fix="call update() once, after all steps; or give each optimizer its own scaler.",
        example="""
import torch
scaler = torch.amp.GradScaler()
for x in loader:
    scaler.scale(d_loss(x)).backward()
    scaler.scale(g_loss(x)).backward()
    scaler.step(optimizer_d)
    scaler.update()
    scaler.step(optimizer_g)
    scaler.update()
""",
        near_miss="""
import torch
scaler = torch.amp.GradScaler()
for x in loader:
    scaler.scale(d_loss(x)).backward()
    scaler.step(optimizer_d)
    scaler.update()
    scaler.scale(g_loss(x)).backward()
    scaler.step(optimizer_g)
    scaler.update()
""",
        find=_find_updated_between,
    ),
    Rule(
        id="schedule-on-skipped-step",
        level="warning",
        what="the learning-rate scheduler advances when the scaler skips the step",
        why="`scaler.step` silently skips the optimizer after an overflow, but the schedule counts the step.",
        fix="step the scheduler only if `scaler.get_scale()` after update() is not lower than before it.",
        example="""
import torch
scaler = torch.amp.GradScaler()
for x, y in loader:
    scaler.scale(criterion(model(x), y)).backward()
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
""",
        near_miss="""
import torch
scaler = torch.amp.GradScaler()
for epoch in range(10):
    for x, y in loader:
        scaler.scale(criterion(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
    scheduler.step()
""",
        find=_find_schedules,
    ),
)
