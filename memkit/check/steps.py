"""Rules about work that a training step repeats every time."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from memkit.check.findings import Rule, SourceSpan
from memkit.check.script import (
    Loop,
    Script,
    backward_names,
    dotted,
    has_unpacked,
    is_constant,
    keyword,
    leaves,
    method,
    owner,
    position,
)

_MODULE = re.compile(r"torch\.nn\.[A-Z]\w*|(torchmetrics|lpips|torchvision\.models|timm\.models)(\.\w+)*\.[A-Z]\w*")
_NOT_MODULES = frozenset({"torch.nn.Parameter", "torch.nn.Buffer"})
_READS = frozenset({"item", "cpu", "numpy", "tolist"})


def _find_cache(script: Script) -> Iterator[SourceSpan]:
    for call in script.calls_of("torch.cuda.empty_cache", "torch.mps.empty_cache", "torch.accelerator.empty_cache"):
        if script.hot_loop(call) is not None:
            yield SourceSpan.of(call)


def _find_built(script: Script) -> Iterator[SourceSpan]:
    modules = [call for call in script.calls if _is_module(script, call)]
    for call in modules:
        loop = script.hot_loop(call)
        if loop is not None and _trains_on(script, loop) and not any(script.inside(call, other) for other in modules):
            yield SourceSpan.of(call)


def _is_module(script: Script, call: ast.Call) -> bool:
    full = script.qualified(call.func)
    return full not in _NOT_MODULES and _MODULE.fullmatch(full) is not None


def _trains_on(script: Script, loop: Loop) -> bool:
    """Whether a loop's steps belong to one training run, with an optimizer from outside; else it may run trials."""
    stepped = {script.stepped(call) for call in script.optimizer_steps if script.inside(call, loop)}
    made = (b.statement for name in stepped for b in script.bound.get(name, ()))
    return bool(stepped) and not any(script.inside(statement, loop) for statement in made)


def _find_reads(script: Script) -> Iterator[SourceSpan]:
    if not script.on_accelerator:
        return
    seen: set[Loop] = set()
    for find in (_read_in_loop, _read_in_helper):
        for call in script.calls:
            loop = find(script, call)
            if loop is not None and loop not in seen:
                seen.add(loop)
                yield SourceSpan.of(call)


def _read_in_loop(script: Script, call: ast.Call) -> Loop | None:
    loop = script.hot_loop(call)
    return loop if loop is not None and (_reads_loss(script, loop, call) or _synchronizes(script, call)) else None


def _read_in_helper(script: Script, call: ast.Call) -> Loop | None:
    is_read = _synchronizes(script, call) or (getattr(call.func, "attr", "") == "item" and not call.args)
    return script.calling_loop(call) if is_read else None


def _synchronizes(script: Script, call: ast.Call) -> bool:
    return script.qualified(call.func) in ("torch.cuda.synchronize", "torch.accelerator.synchronize")


def _reads_loss(script: Script, loop: Loop, call: ast.Call) -> bool:
    """Whether a call waits for the value of one of this loop's losses."""
    losses = set[str]().union(*(backward_names(c) for c in script.backwards if script.loop_of(c) is loop))
    name, what = method(call)
    if isinstance(call.func, ast.Name) and call.func.id in ("float", "print"):
        return any(losses.intersection(leaves(argument)) for argument in call.args)
    return what in _READS and name.removesuffix(".data") in losses


def _find_blocking_copies(script: Script) -> Iterator[SourceSpan]:
    if not any(is_constant(keyword(call, "pin_memory"), value=True) for call in script.calls):
        return  # a copy from unpinned memory waits in any case
    seen = set()
    for call in script.calls:
        loop = script.hot_loop(call)
        if loop is None or loop in seen or not isinstance(loop, ast.For) or not _copies(loop, call):
            continue
        seen.add(loop)
        yield SourceSpan.of(call)


def _copies(loop: ast.For, call: ast.Call) -> bool:
    """Whether a call copies part of the loop's batch to a device and waits for it."""
    batch = {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}
    if owner(call) not in batch or keyword(call, "non_blocking") is not None or has_unpacked(call):
        return False
    return getattr(call.func, "attr", "") in ("cuda", "to") and _names_device(call)


def _names_device(call: ast.Call) -> bool:
    """Whether ``.to(...)`` moves to an accelerator, judging by its arguments."""
    if getattr(call.func, "attr", "") == "cuda":
        return True
    given = call.args[0] if len(call.args) == 1 else keyword(call, "device")
    if isinstance(given, ast.Constant):
        return isinstance(given.value, str) and given.value.startswith("cuda")
    return given is not None and "device" in (dotted(given) or dotted(getattr(given, "func", given)))


def _find_retries(script: Script) -> Iterator[SourceSpan]:
    for node in script.nodes:
        if isinstance(node, ast.Try):
            tried = {dotted(call.func) for each in node.body for call in ast.walk(each) if isinstance(call, ast.Call)}
            for handler in node.handlers:
                calls = (call for each in handler.body for call in ast.walk(each) if isinstance(call, ast.Call))
                again = next((call for call in calls if _runs_again(script, call, tried)), None)
                if again is not None and _catches_shortage(handler):
                    yield SourceSpan.of(again)


def _runs_again(script: Script, call: ast.Call, tried: set[str]) -> bool:
    """Whether a call repeats the call that failed: the network, the same step, a backward pass."""
    name = dotted(call.func)
    defined = {getattr(node, "name", None) for node in script.nodes if isinstance(node, ast.FunctionDef)}
    is_same = bool(name) and name in tried and (name in script.models or name.removeprefix("self.") in defined)
    return is_same or call in script.backwards


def _catches_shortage(handler: ast.ExceptHandler) -> bool:
    """Whether a handler is for out-of-memory errors: by its type, or by the text it looks for."""
    caught = {dotted(node).rpartition(".")[2] for node in ast.walk(handler.type)} if handler.type is not None else set()
    words = (node.value for each in handler.body for node in ast.walk(each) if isinstance(node, ast.Constant))
    return "OutOfMemoryError" in caught or any(
        "out of memory" in word.lower() for word in words if isinstance(word, str)
    )


def _find_zeros(script: Script) -> Iterator[SourceSpan]:
    added = {dotted(node.target).rpartition(".")[2] for node in script.nodes if isinstance(node, ast.AugAssign)}
    names = {getattr(node, "attr", None) for node in script.nodes}
    if "grad" in added or names & {"CUDAGraph", "make_graphed_callables"}:
        return  # something else keeps the gradient tensors alive
    for call in script.calls:
        if method(call)[1] == "zero_grad" and is_constant(keyword(call, "set_to_none"), value=False):
            yield SourceSpan.of(call)


def _find_lost_tails(script: Script) -> Iterator[SourceSpan]:
    for step in script.optimizer_steps:
        loop = script.loop_of(step)
        if not isinstance(loop, ast.For) or not any(script.inside(call, loop) for call in script.backwards):
            continue
        for _, up in script.ancestors(step):
            if isinstance(up, ast.If) and script.inside(up, loop) and _counts(up.test, loop):
                stepped = (other for other in script.optimizer_steps if script.stepped(other) == script.stepped(step))
                if all(script.inside(other, up) for other in stepped):
                    yield SourceSpan.of(up)


def _counts(test: ast.expr, loop: ast.For) -> bool:
    """Whether a condition is only ``(i + 1) % n == 0`` on the index of an enumerated loop."""
    is_enumerated = isinstance(loop.iter, ast.Call) and dotted(loop.iter.func) == "enumerate"
    if not (is_enumerated and isinstance(loop.target, ast.Tuple) and isinstance(test, ast.Compare)):
        return False
    left = test.left
    return (
        isinstance(left, ast.BinOp)
        and isinstance(left.op, ast.Mod)
        and isinstance(left.left, ast.BinOp)
        and isinstance(left.left.op, ast.Add)
        and dotted(loop.target.elts[0]) in set(leaves(left.left))
        and isinstance(test.ops[0], ast.Eq)
        and len(test.ops) == 1
    )


def _find_reduced_chunks(script: Script) -> Iterator[SourceSpan]:
    if not any(script.qualified(call.func).endswith("DistributedDataParallel") for call in script.calls):
        return
    names = {getattr(node, "attr", None) or getattr(node, "id", None) for node in script.nodes}
    if names & {"no_sync", "require_backward_grad_sync", "set_requires_gradient_sync"}:
        return
    for call in script.backwards:
        loop = script.loop_of(call)
        if loop is None or script.is_guarded(call, loop):
            continue
        around = [outer for outer in script.loops_of(call) if outer is not loop]
        steps = [step for step in script.optimizer_steps if script.inside(step, loop)]
        outer_steps = [s for s in script.optimizer_steps if around and script.loop_of(s) is around[0]]
        later = [s for s in outer_steps if position(s) > position(call)]
        if (not steps and later) or (steps and all(script.is_guarded(s, loop) for s in steps)):
            yield SourceSpan.of(call)


RULES: tuple[Rule[Script], ...] = (
    Rule(
        id="empty-cache-in-step",
        level="warning",
        what="empty_cache() in every step",
        why="it frees no tensor, and the allocator must request the same memory from the driver again in the next "
        "step; before it reports out-of-memory, the allocator empties its cache by itself.",
        figure="about 10% slower in the Hugging Face Trainer, which removed it (transformers#31372, PR#31530)",
        fix="remove it, or call it where shapes change: between training and evaluation, after an out-of-memory error.",
        example="""
import torch
for x, y in loader:
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    torch.cuda.empty_cache()
""",
        near_miss="""
import torch
for epoch in range(10):
    for step, (x, y) in enumerate(loader):
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        if step % 500 == 0:
            torch.cuda.empty_cache()
    torch.cuda.empty_cache()
""",
        find=_find_cache,
    ),
    Rule(
        id="built-in-step",
        level="warning",
        what="a module is built in every step",
        why="its parameters and buffers are created, moved and freed each time; its own parameters never learn.",
        fix="build it once before the loop.",
        example="""
import torch
from torch import nn
for x, y in loader:
    loss = nn.CrossEntropyLoss()(model(x), y)
    loss.backward()
    optimizer.step()
""",
        near_miss="""
import torch
from torch import nn
for fold in folds:
    criterion = nn.CrossEntropyLoss()
    for x, y in fold:
        loss = criterion(model(x), y) + nn.functional.l1_loss(model(y), x)
        loss.backward()
        optimizer.step()
""",
        find=_find_built,
    ),
    Rule(
        id="sync-in-step",
        level="warning",
        what="every step waits for the device",
        why="`.item()`, `.cpu()`, `float()` and `print` of the loss, and `synchronize()`, wait until the device has "
        "finished all queued work, so it idles while the next step is prepared; also in a function that the loop "
        "calls. One finding per loop.",
        fix="sum `loss.detach()` on the device and read it every N steps; measure times with CUDA events.",
        example="""
import torch
model.cuda()
for x, y in loader:
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    running += loss.item()
""",
        near_miss="""
import torch
model.cuda()
for step, (x, y) in enumerate(loader):
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(loss.item())
""",
        find=_find_reads,
    ),
    Rule(
        id="copy-that-waits",
        level="warning",
        what="a pinned batch is copied to the device without non_blocking=True",
        why="the copy waits until the device has finished all queued work, so the loader's pinned memory is of no use. "
        "One finding per loop.",
        fix="write `x.to(device, non_blocking=True)`, or use memkit's to_device, which checks whether the batch is "
        "pinned.",
        example="""
import torch
loader = torch.utils.data.DataLoader(data, batch_size=8, num_workers=4, pin_memory=True)
for x, y in loader:
    x, y = x.to(device), y.to(device)
    criterion(model(x), y).backward()
    optimizer.step()
""",
        near_miss="""
import torch
loader = torch.utils.data.DataLoader(data, batch_size=8, num_workers=4, pin_memory=True)
for x, y in loader:
    x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
    x = x.to(torch.float32)
    criterion(model(x), y).backward()
    optimizer.step()
""",
        find=_find_blocking_copies,
    ),
    Rule(
        id="retry-in-except",
        level="error",
        what="the step runs again inside `except` after it ran out of memory",
        why="until the handler ends, the error's traceback keeps the frames of the failed step, with all their "
        "tensors: the second try has less memory than the first.",
        fix="set a flag in the handler and retry after the `except` block, or use memkit's recover_from_oom.",
        example="""
import torch
for x, y in loader:
    try:
        criterion(model(x), y).backward()
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        for part in x.split(4):
            criterion(model(part), y).backward()
    optimizer.step()
""",
        near_miss="""
import torch
for x, y in loader:
    try:
        criterion(model(x), y).backward()
        is_done = True
    except torch.cuda.OutOfMemoryError:
        is_done = False
    if not is_done:
        torch.cuda.empty_cache()
        for part in x.split(4):
            criterion(model(part), y).backward()
    optimizer.step()
""",
        find=_find_retries,
    ),
    Rule(
        id="grads-set-to-zero",
        level="warning",
        what="zero_grad(set_to_none=False)",
        why="gradients stay in memory between the steps, and optimizers change parameters that had no gradient in this "
        "step by weight decay and momentum.",
        fix="omit set_to_none (True is the default), unless something else, such as a CUDA graph, keeps the "
        "gradients' tensors.",
        example="""
import torch
optimizer.zero_grad(set_to_none=False)
""",
        near_miss="""
import torch
optimizer.zero_grad(set_to_none=True)
optimizer.zero_grad()
""",
        find=_find_zeros,
    ),
    Rule(
        id="accumulation-tail",
        level="warning",
        what="the last batches of an epoch are accumulated but not stepped",
        why="if the number of batches is not a multiple of the group size, their gradient is lost, or is added to the "
        "first group of the next epoch.",
        fix="step after the last batch too, and divide by the size of that group; or use memkit's GradientAccumulator.",
        example="""
import torch
for i, (x, y) in enumerate(loader):
    loss = criterion(model(x), y) / 4
    loss.backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
        near_miss="""
import torch
for i, (x, y) in enumerate(loader):
    loss = criterion(model(x), y) / 4
    loss.backward()
    if (i + 1) % 4 == 0 or i + 1 == len(loader):
        optimizer.step()
        optimizer.zero_grad()
""",
        find=_find_lost_tails,
    ),
    Rule(
        id="chunks-reduced",
        level="warning",
        what="several backward passes per step under DistributedDataParallel without no_sync",
        why="gradients are averaged over the processes in every pass, although once per step is enough.",
        figure="2x slower in accelerate's own example (accelerate PR#1153)",
        fix="run forward and backward of all passes but the last under `with model.no_sync():`.",
        example="""
import torch
model = torch.nn.parallel.DistributedDataParallel(net)
for batch in loader:
    for part in batch.split(8):
        model(part).sum().backward()
    optimizer.step()
""",
        near_miss="""
import torch
model = torch.nn.parallel.DistributedDataParallel(net)
for batch in loader:
    model(batch).sum().backward()
    optimizer.step()
""",
        find=_find_reduced_chunks,
    ),
)
