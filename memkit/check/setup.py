"""Rules about one-time setup: defaults, loaders, files, checkpointing."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from memkit.check.findings import Rule, SourceSpan
from memkit.check.script import Script, dotted, has_unpacked, is_constant, keyword, method

_LOADERS = ("torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader")
_CHECKPOINTS = ("torch.utils.checkpoint.checkpoint", "torch.utils.checkpoint.checkpoint_sequential")
_MOST_AHEAD = 64  # half of the 128 batches that filled 90% of 500 GB in pytorch#97432


def _find_defaults(script: Script) -> Iterator[SourceSpan]:
    for call in script.calls_of("torch.set_default_tensor_type", "torch.set_default_device"):
        if call.args and _is_cuda(call.args[0]):
            yield SourceSpan.of(call)


def _is_cuda(value: ast.expr) -> bool:
    parts = (node.value if isinstance(node, ast.Constant) else dotted(node) for node in ast.walk(value))
    return any("cuda" in part for part in parts if isinstance(part, str))


def _find_anomaly(script: Script) -> Iterator[SourceSpan]:
    for call in script.calls_of("torch.autograd.set_detect_anomaly", "torch.autograd.anomaly_mode.set_detect_anomaly"):
        mode = call.args[0] if call.args else keyword(call, "mode")
        if is_constant(mode, value=True) and not any(_is_choice(up) for _, up in script.ancestors(call)):
            yield SourceSpan.of(call)


def _is_choice(node: ast.AST) -> bool:
    """Whether a node is an `if` other than ``if __name__ == "__main__"``."""
    return isinstance(node, ast.If) and not (
        isinstance(node.test, ast.Compare) and dotted(node.test.left) == "__name__"
    )


def _loaders(script: Script) -> Iterator[tuple[ast.Call, int | None]]:
    """Loaders whose number of workers is known, and that number."""
    for call in script.calls_of(*_LOADERS):
        workers = call.args[5] if len(call.args) > 5 else keyword(call, "num_workers")
        if has_unpacked(call) or any(isinstance(given, ast.Starred) for given in call.args):
            continue
        if workers is None:
            yield call, 0
        elif isinstance(workers, ast.Constant) and isinstance(workers.value, int):
            yield call, workers.value


def _find_workerless(script: Script) -> Iterator[SourceSpan]:
    for call, workers in _loaders(script):
        prefetch = keyword(call, "prefetch_factor")
        is_set = prefetch is not None and isinstance(prefetch, ast.Constant) and prefetch.value is not None
        if workers == 0 and (is_set or is_constant(keyword(call, "persistent_workers"), value=True)):
            yield SourceSpan.of(call)


def _find_pinning(script: Script) -> Iterator[SourceSpan]:
    for call, workers in _loaders(script):
        if workers == 0 and is_constant(keyword(call, "pin_memory"), value=True):
            yield SourceSpan.of(call)


def _find_crowds(script: Script) -> Iterator[SourceSpan]:
    for call, workers in _loaders(script):
        prefetch = keyword(call, "prefetch_factor")
        ahead = prefetch.value if isinstance(prefetch, ast.Constant) and isinstance(prefetch.value, int) else 2
        if workers is not None and workers * ahead > _MOST_AHEAD:
            yield SourceSpan.of(call)


def _find_placed_loads(script: Script) -> Iterator[SourceSpan]:
    if any(method(call)[1] == "cpu" and isinstance(script.parents[call], ast.Expr) for call in script.calls):
        return  # the network moves to the CPU before it is saved
    for call in script.calls_of("torch.load"):
        is_placed = len(call.args) > 1 or keyword(call, "map_location") is not None
        if script.on_accelerator and not is_placed and not has_unpacked(call) and _is_copied(script, call):
            yield SourceSpan.of(call)


def _is_copied(script: Script, loaded: ast.Call) -> bool:
    """Whether a loaded object goes into load_state_dict, directly or through a name in the same function."""
    function = script.function_of(loaded)
    names = {b.name for b in script.bindings if b.value is loaded or script.inside(loaded, b.value)}
    for call in script.calls:
        if method(call)[1] == "load_state_dict" and script.function_of(call) is function:
            inside = [node for given in call.args for node in ast.walk(given)]
            if loaded in inside or names.intersection(map(dotted, inside)):
                return True
    return False


def _find_checkpoints(script: Script) -> Iterator[SourceSpan]:
    for call in script.calls_of(*_CHECKPOINTS):
        if keyword(call, "use_reentrant") is None and not has_unpacked(call):
            yield SourceSpan.of(call)


RULES: tuple[Rule[Script], ...] = (
    Rule(
        id="global-cuda-default",
        level="warning",
        what="a CUDA device is the default for all tensors",
        why="every library creates its tensors on the GPU, including those that belong on the CPU, and "
        "DataLoader(shuffle=True) fails in its sampler (pytorch#110820); set_default_tensor_type is deprecated.",
        fix="pass `device=` where a tensor is created.",
        example="""
import torch
torch.set_default_tensor_type("torch.cuda.FloatTensor")
""",
        near_miss="""
import torch
torch.set_default_dtype(torch.float32)
torch.set_default_device("cpu")
""",
        find=_find_defaults,
    ),
    Rule(
        id="anomaly-left-on",
        level="warning",
        what="anomaly detection is on for the whole run",
        why="every operation keeps its call stack, and every gradient is checked for NaN.",
        fix="turn it on with a command-line flag while you look for a NaN.",
        example="""
import torch
torch.autograd.set_detect_anomaly(True)
""",
        near_miss="""
import torch
torch.autograd.set_detect_anomaly(args.debug)
if args.debug:
    torch.autograd.set_detect_anomaly(True)
""",
        find=_find_anomaly,
    ),
    Rule(
        id="loader-without-workers",
        level="error",
        what="persistent_workers or prefetch_factor without workers",
        why="DataLoader raises ValueError.",
        fix="set num_workers to at least 1, or omit the other argument.",
        example="""
import torch
from torch.utils.data import DataLoader
loader = DataLoader(data, batch_size=8, persistent_workers=True)
""",
        near_miss="""
import torch
from torch.utils.data import DataLoader
loader = DataLoader(data, batch_size=8, num_workers=4, persistent_workers=True)
other = DataLoader(data, batch_size=8, num_workers=args.workers, prefetch_factor=2)
""",
        find=_find_workerless,
    ),
    Rule(
        id="pin-without-workers",
        level="warning",
        what="pin_memory=True without workers",
        why="the training process itself loads each batch and copies it into pinned memory, while the GPU waits.",
        fix="set num_workers to 1 or more.",
        example="""
import torch
loader = torch.utils.data.DataLoader(data, batch_size=8, pin_memory=True)
""",
        near_miss="""
import torch
loader = torch.utils.data.DataLoader(data, batch_size=8, pin_memory=True, num_workers=args.workers)
""",
        find=_find_pinning,
    ),
    Rule(
        id="many-batches-ahead",
        level="warning",
        what=f"more than {_MOST_AHEAD} batches are loaded ahead",
        why="num_workers times prefetch_factor (2 by default) batches wait in host memory, per loader and process.",
        figure="16 workers with prefetch_factor 8 took 90% of 500 GB (pytorch#97432)",
        fix="use fewer workers, at most one for each core of the process.",
        example="""
import torch
loader = torch.utils.data.DataLoader(data, batch_size=8, num_workers=16, prefetch_factor=8)
""",
        near_miss="""
import torch
loader = torch.utils.data.DataLoader(data, batch_size=8, num_workers=16, prefetch_factor=2)
""",
        find=_find_crowds,
    ),
    Rule(
        id="load-without-map-location",
        level="warning",
        what="torch.load without map_location",
        why="tensors that were saved from a GPU are loaded onto the same GPU, beside the model's tensors into which "
        "they are copied; in a run of several processes, all of them onto the first GPU.",
        fix='pass `map_location="cpu"`; load_state_dict copies from there.',
        example="""
import torch
model.cuda()
model.load_state_dict(torch.load(path, weights_only=True))
""",
        near_miss="""
import torch
model.cuda()
model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
""",
        find=_find_placed_loads,
    ),
    Rule(
        id="checkpoint-unspecified",
        level="warning",
        what="checkpoint() without use_reentrant",
        why="without it, the old reentrant variant runs: parameters get no gradient if no input requires one, and "
        "torch warns at each call.",
        fix="pass `use_reentrant=False`.",
        example="""
import torch
from torch.utils.checkpoint import checkpoint
y = checkpoint(block, x)
""",
        near_miss="""
import torch
from torch.utils.checkpoint import checkpoint
y = checkpoint(block, x, use_reentrant=False)
""",
        find=_find_checkpoints,
    ),
)
