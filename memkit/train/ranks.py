"""Communication between ranks that accumulate gradients together: counts, gradients, buffers.

Two ways of sharing a model need two ways of exchanging gradients:

* `Replicas` (DistributedDataParallel): no communication inside forward or backward at all. Each rank accumulates on its
  own and the ranks perform one explicit all-reduce per optimizer step. A rank that runs out of memory, splits its batch
  or has fewer batches than another cannot make the others wait for a collective that never comes.
* `Shards` (`fully_shard`, FSDP2): every backward reduce-scatters as usual. Deferring it would keep the unsharded
  gradients, the very memory that sharding saves.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from memkit._core.errors import (
    ConfigError,
    MemkitOutOfMemoryError,
    OutOfMemoryElsewhereError,
    StateError,
    warn_user,
)
from memkit._core.units import MIB
from memkit._recovery.attempt import insist
from memkit._torch import foreach
from memkit._torch.ranks import announces_forwards, communication_hooks, synchronize_buffers
from memkit._torch.tensors import gradient_dtype
from memkit.train.checks import Caller
from memkit.train.gradients import local_part, widen_gradients

_Tensor = TypeVar("_Tensor", bound=torch.Tensor)
_NORM = "measuring the gradients' norm"
_SUM = "summing the gradients over ranks"
_BUCKET_BYTES = 25 * MIB  # DDP's own bucket size: large enough for the network, small compared with the gradients


class Ranks:
    """Sums over the processes of one or more process groups.

    Args:
        groups: Groups to reduce over, one after the other.
        device: Device that the groups' backend requires for numbers.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
        self._groups = groups
        self._device = device

    def before_forwards(self) -> None:
        """Exchange what the next forward would, so that no forward waits for other ranks; all ranks must call it."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks that share the gradient."""
        num_ranks = 1
        for group in self._groups:
            num_ranks *= dist.get_world_size(group)
        return num_ranks

    def agree(
        self, parameters: Sequence[nn.Parameter], count: float, *, is_last: bool
    ) -> tuple[float, list[bool], bool]:
        """Agree on a step; all ranks must call it, or `give_up`.

        Args:
            parameters: The same on every rank, in the same order.
            count: The weight of this rank's gradients.
            is_last: Whether this rank has no more data.

        Returns:
            The total weight of all ranks' gradients, for each parameter whether any rank has a gradient, and whether
            no rank has more data.

        Raises:
            MemkitOutOfMemoryError: Another rank has given up, because it ran out of memory.
            StateError: Another rank has given up, because of another error.
        """
        have = [float(parameter.grad is not None) for parameter in parameters]
        num_out, num_failed, total, num_last, *num_have = self.sum([0.0, 0.0, count, float(is_last), *have])
        fix = "see the error of that rank; all ranks drop this step and keep the parameters that they had before it."
        if num_out:
            raise OutOfMemoryElsewhereError(
                "a step of several ranks",
                got=f"out of memory on {int(num_out)} of the {self.num_ranks} ranks, even in the smallest parts",
                expected="parts that fit on every rank",
                fix=fix,
            )
        if num_failed:
            raise StateError(
                "a step of several ranks",
                got=f"an error on {int(num_failed)} of the {self.num_ranks} ranks",
                expected="a batch on every rank that memkit can train on",
                fix=fix,
            )
        return total, [num > 0 for num in num_have], num_last == self.num_ranks

    def give_up(self, parameters: Sequence[nn.Parameter], *, is_out: bool) -> None:
        """Tell the other ranks, which reach `agree`, that this rank has run out of memory for good, or has failed."""
        self.sum([float(is_out), float(not is_out), *[0.0] * (2 + len(parameters))])

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """Return each number summed over the ranks; all ranks must call it, with the same number of numbers."""
        return self._reduce(numbers, dist.ReduceOp.SUM)

    def max(self, numbers: Sequence[float]) -> list[float]:
        """Return each number's maximum over the ranks; all ranks must call it, with the same number of numbers."""
        return self._reduce(numbers, dist.ReduceOp.MAX)

    def _reduce(self, numbers: Sequence[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        packed = insist(lambda: torch.tensor(numbers, dtype=torch.float64, device=self._device), "a sum over the ranks")
        for group in self._groups:
            dist.all_reduce(packed, operation, group=group)
        values: list[float] = packed.tolist()
        return values


class Shards(Ranks):
    """Ranks that hold shards of the parameters; each backward averages the gradient over them."""

    def total_norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the norm of gradients sharded over the ranks; all of them must call it.

        One that is not sharded, as of `fully_shard(ignored_params=...)`, counts once: the mean over the ranks.
        """
        parts, copies = _by_kind(gradients)

        def square() -> torch.Tensor:
            squared = _total_norm([local_part(each) for each in parts]).square()
            return squared + _total_norm(copies).square() / self.num_ranks if copies else squared

        # Only code before or after the collective is retried; the collective itself must run once.
        squared = insist(square, _NORM)
        for group in self._groups:
            dist.all_reduce(squared, group=group)
        return insist(squared.sqrt, _NORM)


class Replicas(Ranks):
    """Ranks that hold whole copies of the parameters under DistributedDataParallel.

    From construction to `close` the modules are in DDP's own ``no_sync`` state. ``static_graph`` is off meanwhile: its
    first forward starts an all-reduce even there, which then fails.

    Args:
        modules: The DDP modules.
        caller: The object that the user works with, for messages.

    Raises:
        ConfigError: A module has a communication hook, or is in torch's `Join`; also from each step.
    """

    def __init__(self, modules: Sequence[nn.parallel.DistributedDataParallel], caller: Caller) -> None:
        super().__init__([modules[0].process_group], modules[0].device)
        self._modules, self._caller = modules, caller
        self._check()
        self._no_sync = contextlib.ExitStack()
        for module in modules:
            self._no_sync.enter_context(module.no_sync())
            self._no_sync.callback(setattr, module, "static_graph", module.static_graph)
            module.static_graph = False

    def close(self) -> None:
        """Let DDP synchronize in backward again."""
        self._no_sync.close()

    def before_forwards(self) -> None:
        """Broadcast buffers where DDP's next forward would, the first of all: it may run again on some of the ranks."""
        self._check()
        for module in self._modules:
            if module.require_forward_param_sync:
                synchronize_buffers(module)

    def agree(
        self, parameters: Sequence[nn.Parameter], count: float, *, is_last: bool
    ) -> tuple[float, list[bool], bool]:
        """Agree on a step, see `Ranks.agree`."""
        self._check()  # before the ranks wait for each other
        return super().agree(parameters, count, is_last=is_last)

    def _check(self) -> None:
        for module in self._modules:
            if names := communication_hooks(module):
                _refuse_hook(names, self._caller)
            if announces_forwards(module):
                _refuse_join(self._caller)

    def sum_gradients(self, parameters: Iterable[nn.Parameter], present: Sequence[bool]) -> None:
        """Sum the gradients over the ranks, in buckets.

        Args:
            parameters: The same on every rank, in the same order.
            present: For each parameter, whether any rank has a gradient. A rank without one contributes zeros.
        """
        gradients = []
        for parameter, has_gradient in zip(parameters, present, strict=True):
            if has_gradient and parameter.grad is None:
                make_zeros = functools.partial(torch.zeros_like, parameter, dtype=gradient_dtype(parameter))
                parameter.grad = insist(make_zeros, _SUM)
            if parameter.grad is not None:
                gradients.append(parameter.grad)
        for bucket in _buckets(gradients):
            if len(bucket) == 1 and (bucket[0].is_sparse or bucket[0].is_contiguous()):
                dist.all_reduce(bucket[0], group=self._groups[0])
                continue
            # Retried before the collective: the other ranks would wait in it for one that has given up.
            flat = insist(functools.partial(_flatten, bucket), _SUM)
            dist.all_reduce(flat, group=self._groups[0])
            insist(functools.partial(_unflatten, flat, bucket), _SUM)

    def broadcast_buffers(self) -> None:
        """Give every rank the first rank's buffers, as DDP does before the forward that follows a synchronization."""
        group = self._groups[0]
        for module in self._modules:
            if not module.broadcast_buffers:
                continue
            for name, buffer in module.module.named_buffers():
                if name not in module.parameters_to_ignore:
                    dist.broadcast(buffer, src=dist.get_global_rank(group, 0), group=group)


@contextlib.contextmanager
def without_buffer_sync(model: nn.Module) -> Iterator[None]:
    """Keep DistributedDataParallel from broadcasting buffers before a forward whose results are dropped."""
    replicated = [module for module in model.modules() if isinstance(module, nn.parallel.DistributedDataParallel)]
    before = [module.require_forward_param_sync for module in replicated]
    try:
        for module in replicated:
            module.require_forward_param_sync = False
        yield
    finally:
        for module, value in zip(replicated, before, strict=True):
            module.require_forward_param_sync = value


def find_ranks(
    model: nn.Module | Sequence[nn.Module] | None, parameters: Sequence[nn.Parameter], caller: Caller
) -> Ranks | None:
    """Determine how the gradient of ``parameters`` is shared between processes.

    Args:
        model: The model or models, as wrapped for distributed training; None for one process or sharded parameters.
        parameters: The parameters that the optimizers update.
        caller: The object that the user works with, for messages.

    Returns:
        `Replicas` for DDP, `Shards` for parameters sharded by ``fully_shard``, None for a single process.

    Raises:
        ConfigError: The first-generation FullyShardedDataParallel, a mesh of several dimensions, whose data dimension
            cannot be told from a tensor dimension, or what `Replicas` refuses.

    Warns:
        MemkitWarning: There are several processes, and no model that tells how they share the gradient.
    """
    if not dist.is_available() or not dist.is_initialized():
        return None
    models = [model] if isinstance(model, nn.Module) else (model or [])
    modules = [module for each in models for module in each.modules()]
    replicated = [module for module in modules if isinstance(module, nn.parallel.DistributedDataParallel)]
    if replicated:
        return Replicas(replicated, caller)
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    if any(isinstance(module, FullyShardedDataParallel) for module in modules):
        raise ConfigError(
            _call(caller),
            got="a FullyShardedDataParallel module, which owns its gradients",
            expected="DistributedDataParallel, or a module sharded by torch.distributed.fsdp.fully_shard",
            fix="shard the model with fully_shard(model); the rest of the loop stays as it is.",
        )
    meshes = {parameter.device_mesh for parameter in parameters if isinstance(parameter, DTensor)}
    if not meshes:
        if not models and dist.get_world_size() > 1:
            warn_user(
                f"{caller.kind}(optimizer): this is one of {dist.get_world_size()} processes, and without the model it "
                "cannot know that they share a gradient: under DistributedDataParallel ranks with different counts "
                "would step differently, and their parameters drift apart. Way out, also if each process trains by "
                f"itself: {caller.kind}(optimizer, model=model), with the model as it is wrapped."
            )
        return None
    mesh = meshes.pop()
    if meshes or mesh.ndim != 1:
        raise ConfigError(
            _call(caller),
            got=f"parameters on {'several device meshes' if meshes else f'a {mesh.ndim}-dimensional device mesh'}",
            expected="parameters sharded over one 1-dimensional mesh of ranks that see different data",
            fix="accumulate gradients in your own loop, dividing the loss by the number of micro-batches; please "
            "report the layout so that it can be added.",
        )
    return Shards([mesh.get_group()], torch.device(mesh.device_type))


def _call(caller: Caller) -> str:
    return f"{caller.kind}(model=...)"


def _refuse_hook(names: Sequence[str], caller: Caller) -> NoReturn:
    raise ConfigError(
        _call(caller),
        got=f"a communication hook ({', '.join(names)}), which would never run: the gradients of all micro-batches are "
        "summed over the ranks in one exchange per step, which is not DistributedDataParallel's own",
        expected="DistributedDataParallel without register_comm_hook and mixed_precision=",
        fix=f"to train with the hook, keep a loop of your own (loss.backward(), optimizer.step()), after "
        f"{caller.name}.close() if there is one already; to train without it, build the module anew: "
        "model = DistributedDataParallel(module).",
    )


def _refuse_join(caller: Caller) -> NoReturn:
    raise ConfigError(
        _call(caller),
        got="DistributedDataParallel in torch's Join, by which each forward exchanges a number with the other ranks",
        expected=f"no Join: {caller.name}.flush() joins the steps of ranks that have more batches",
        fix=f"write Join([model], enable=False), or leave it out, and after the loop call {caller.name}.flush() on all "
        "ranks.",
    )


def widen_for_step(parameters: Sequence[nn.Parameter], dtype: torch.dtype | None, ranks: Ranks | None) -> None:
    """Convert the gradients to the dtype in which the step reduces, unscales and normalizes them.

    Runs before the ranks agree: a rank that runs out of memory here must not leave the others waiting in the reduction.
    """
    over_ranks = isinstance(ranks, Replicas)  # another rank may have a gradient where this one has none
    widen = functools.partial(widen_gradients, parameters, dtype, missing=over_ranks)
    try:
        insist(widen, "converting the gradients")
    except MemkitOutOfMemoryError:
        if ranks is not None:
            ranks.give_up(parameters, is_out=True)
        raise


def clip_gradients(parameters: Sequence[nn.Parameter], max_norm: float, shards: Shards | None) -> torch.Tensor:
    """Clip the gradients to a total norm; return the norm before clipping."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = shards.total_norm(gradients) if shards is not None else insist(lambda: _total_norm(gradients), _NORM)
    for alike in (parameters,) if shards is None else _by_kind(parameters):  # torch multiplies no mixture
        insist(functools.partial(nn.utils.clip_grads_with_norm_, alike, max_norm, norm), "clipping the gradients")
    return norm


def _by_kind(tensors: Sequence[_Tensor]) -> tuple[list[_Tensor], list[_Tensor]]:
    """Return the sharded tensors, and the others."""
    sharded = [each for each in tensors if hasattr(each, "to_local")]
    return sharded, [each for each in tensors if not hasattr(each, "to_local")]


def _total_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the norm of all gradients together, computed in float32 for half-precision ones.

    A sparse gradient takes the memory of a second one meanwhile, in which the entries of a row are added up.
    """
    half, others = list[torch.Tensor](), list[torch.Tensor]()
    for each in gradients:
        values = each.coalesce().values() if each.is_sparse else each
        (half if values.dtype in {torch.bfloat16, torch.float16} else others).append(values)
    norms = foreach.norm(half, dtype=torch.float32) if half else []  # as get_total_norm
    return nn.utils.get_total_norm([*norms, *others])


def _flatten(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([gradient.reshape(-1) for gradient in gradients])


def _unflatten(flat: torch.Tensor, gradients: Sequence[torch.Tensor]) -> None:
    parts = torch.split(flat, [gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view(gradient.shape))


def _buckets(gradients: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Group gradients that can share one flat tensor; a sparse one stands alone."""
    open_buckets: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for gradient in gradients:
        if gradient.is_sparse:
            yield [gradient]
            continue
        key = gradient.dtype, gradient.device
        if sizes.get(key, 0) + gradient.nbytes > _BUCKET_BYTES and key in open_buckets:
            yield open_buckets.pop(key)
            sizes[key] = 0
        open_buckets.setdefault(key, []).append(gradient)
        sizes[key] = sizes.get(key, 0) + gradient.nbytes
    yield from open_buckets.values()
