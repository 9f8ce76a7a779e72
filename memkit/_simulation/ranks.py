"""Run one rank of many: the step under torch's own DDP, FSDP2 and ZeRO code, in a fake process group."""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from memkit._core.errors import ConfigError, InputTypeError, StateError
from memkit._simulation.leftovers import Patches, applied
from memkit._simulation.shard import REPLICATED, Shard
from memkit._simulation.simulation import MakeOptimizer, RankPart, is_own, optimizer_maker
from memkit._torch.dispatch import fake_mode, without_modes
from memkit._torch.fake_ranks import (
    INFER_SHAPES,
    SETS_STATES,
    TRACKER,
    FakeStore,
    ShardedDraws,
    ShardingPropagator,
    composable_states,
    device_of_shard,
    draws_owner,
)


@contextmanager
def as_first_rank(
    shard: Shard, model: nn.Module, optimizer: str | MakeOptimizer | Optimizer | Sequence[Optimizer], device_type: str
) -> Iterator[RankPart]:
    """Distribute a model of fake tensors over ranks, of which only the first exists."""
    _refuse_own_ranks(shard.kind, optimizer)
    make_optimizers = optimizer_maker(optimizer)
    with _first_of(shard.ranks, device_type) as mesh:
        if shard.kind in REPLICATED:
            buckets: list[Tensor] = []
            replica = _replica(model, shard.gradient_as_bucket_view, buckets)
            if shard.kind == "zero1":
                make_optimizers = _sharing(make_optimizers)
            yield RankPart(replica, make_optimizers(model.parameters()), buckets)
        else:
            with applied(shard_patches()), _sharded(model, shard, mesh):
                yield RankPart(model, make_optimizers(model.parameters()), ())


def _refuse_own_ranks(kind: str, optimizer: str | MakeOptimizer | Optimizer | Sequence[Optimizer]) -> None:
    call = f"estimate_memory_usage(model, sample_batch, shard={kind!r})"
    if dist.is_initialized():
        raise StateError(
            call,
            got="a process that is already in a process group",
            expected="no process group: the estimate creates its own, which communicates with no other process",
            fix="estimate before init_process_group, or in a separate process.",
        )
    if is_own(optimizer):
        raise InputTypeError(
            call,
            got="optimizers of the whole model",
            expected="an optimizer that can be created for the parameters of one rank",
            fix="pass its name, its class, or a function: lambda params: torch.optim.AdamW(params, lr=1e-3).",
        )


@contextmanager
def _first_of(ranks: int, device_type: str) -> Iterator[DeviceMesh]:
    """Act as the first rank of a process group whose collectives return at once."""
    excepthook = sys.excepthook  # torch wraps it in one that writes "[rank0]"
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        with _with_data(device_type):
            mesh = init_device_mesh(device_type, (ranks,))
        yield mesh
    finally:
        dist.destroy_process_group()
        sys.excepthook = excepthook


def _with_data(device_type: str) -> AbstractContextManager[object]:
    """Return a context for making meshes, which need data. A virtual GPU's host tensors have data anyway."""
    return without_modes() if device_type == "cpu" else nullcontext()


@contextmanager
def _sharded(model: nn.Module, shard: Shard, mesh: DeviceMesh) -> Iterator[None]:
    """Call `fully_shard` on the units, inner ones first; restore the modules' own classes afterwards."""
    reshard: Any = {"zero2": False, "zero3": True}.get(shard.kind, shard.reshard_after_forward)
    policy = MixedPrecisionPolicy(param_dtype=shard.param_dtype, reduce_dtype=shard.reduce_dtype)
    with ExitStack() as cleanup:
        for unit in (*_units(model, shard.units), model):
            cleanup.callback(composable_states.pop, unit, None)
            cleanup.callback(setattr, unit, "__class__", type(unit))
            with _with_data(mesh.device_type):  # a divisor makes another mesh
                fully_shard(unit, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
        yield


def shard_patches() -> list[Patches]:
    """Make the patches with which shards are on the GPU, and take the memory that they take there."""
    infer = getattr(ShardingPropagator, INFER_SHAPES)

    @wraps(infer)
    def inferred(*args: Any) -> Any:
        # torch finds out the result's shape with fake tensors of the whole size, which a recorder would count.
        simulation = fake_mode()
        with without_modes(), nullcontext() if simulation is None else simulation:
            return infer(*args)

    return [
        Patches(ShardingPropagator, "tensors of the whole size are not counted", {INFER_SHAPES: inferred}),
        Patches(DTensor, "a shard says `cuda`, not what autograd is told", {"device": property(device_of_shard)}),
        Patches(draws_owner, "what the first draw makes is for this GPU only", {TRACKER: None}),
        Patches(
            ShardedDraws,
            "a virtual GPU has no random state",
            {SETS_STATES: property(lambda self: False, lambda self, value: None)},  # noqa: ARG005 - a property's own form
        ),
    ]


def _units(model: nn.Module, patterns: tuple[str, ...]) -> list[nn.Module]:
    """Return the modules whose names match, children before their parents."""
    named = {name: module for name, module in model.named_modules() if name}
    for pattern in patterns:
        if not any(_matches(name, pattern) for name in named):
            near = difflib.get_close_matches(pattern, named, n=1, cutoff=0.4)
            raise ConfigError(
                f"Shard(units={patterns!r})",
                got=f"{pattern!r}, which matches no module",
                expected="dotted names as in model.named_modules(), with a star for one part of a name",
                fix=f"did you mean {near[0]!r}?" if near else "use names from model.named_modules().",
            )
    chosen = [module for name, module in named.items() if any(_matches(name, pattern) for pattern in patterns)]
    return chosen[::-1]


def _matches(name: str, pattern: str) -> bool:
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _replica(model: nn.Module, as_view: bool, buckets: list[Tensor]) -> DistributedDataParallel:  # noqa: FBT001
    """Wrap a model without data in DDP; `buckets` receives its flat gradients in the first backward."""
    replica = DistributedDataParallel(model, init_sync=False, gradient_as_bucket_view=as_view)
    keep_first_buckets(replica, buckets)
    return replica


def keep_first_buckets(replica: DistributedDataParallel, buckets: list[Tensor]) -> None:
    """Let DDP run without data: it does not rebuild its buckets, reduces nothing, and measures no times."""
    replica.reducer = _FirstBuckets(replica.reducer)  # type: ignore[assignment]  # it has all that DDP calls
    replica.register_comm_hook(buckets, _keep_bucket)
    replica.logger = _NoStatistics(replica.logger)  # it has all that DDP calls in a step


def _keep_bucket(state, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202 - DDP refuses text annotations
    """Stand in for the all-reduce, which works in place."""
    state.append(bucket.buffer())
    reduced: torch.futures.Future[Tensor] = torch.futures.Future()
    reduced.set_result(bucket.buffer())
    return reduced


def _sharing(
    make_optimizers: Callable[[Iterable[nn.Parameter]], list[Optimizer]],
) -> Callable[[Iterable[nn.Parameter]], list[Optimizer]]:
    """Return torch's ZeRO 1, which calls its optimizer class with parameters only, so that a function works."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own use of torch.jit.script
        from torch.distributed.optim import ZeroRedundancyOptimizer

    def make_one(parameters: Iterable[nn.Parameter]) -> Optimizer:
        (made,) = make_optimizers(parameters)  # several are the user's own, and refused
        return made

    return lambda parameters: [ZeroRedundancyOptimizer(parameters, optimizer_class=make_one)]  # type: ignore[arg-type]


@dataclass(frozen=True)
class _NoStatistics:
    """Stand-in for DDP's logger, which would warn that it cannot measure times on a simulated GPU."""

    logger: Any  # C++ refers to it, but does not keep it

    def set_runtime_stats_and_log(self) -> None:
        """Log nothing."""


class _FirstBuckets:
    """DDP's reducer, except that it does not rebuild its buckets after the first step.

    The ranks agree on the new buckets by reading numbers from a tensor, and fake tensors have none. The total size of
    the buckets would not change: it is the sum of the gradients.
    """

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False
