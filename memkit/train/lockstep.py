"""Keeps the ranks of a model sharded by ``fully_shard`` (FSDP2) in step when one of them runs out of memory.

A rank that fails in the middle of forward or backward would leave the others waiting in a collective. The solution:

* Each of FSDP's collectives passes through a `_Channel`, which counts it. The sequence of a micro-batch's collectives
  does not depend on its rows, so one rehearsal with two rows determines it.
* A failing rank drops its tensors, resets FSDP's iteration state, and stays in step: it joins all-gathers with its real
  shards, so the others compute with real parameters and get no NaN, and joins reduce-scatters with zeros.
* At the end of the batch one small all_reduce tells all ranks whether one of them failed. If so, all restart the
  batch, from zeroed gradients (`memkit.train.sharded`).
"""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist
from torch import nn

from memkit._core.errors import StateError, warn_user
from memkit._recovery.attempt import Done, attempt, insist
from memkit._torch.dispatch import TorchDispatchMode
from memkit._torch.ranks import COLLECTIVES, is_root, missing_for_lockstep, parameter_group, state_of
from memkit.train.ranks import Shards


@dataclass(frozen=True, slots=True)
class _Call:
    """One collective. Two micro-batches communicate identically if their calls are equal."""

    channel: int
    num_elements: int  # of the larger of the two tensors
    dtype: torch.dtype
    device: torch.device = field(compare=False, repr=False)
    group: dist.ProcessGroup = field(compare=False, repr=False)
    options: dict[str, Any] = field(compare=False, repr=False)


class _Channel:
    """Wrapper around one collective of an FSDP module, which counts its calls."""

    def __init__(self, own: Any, number: int, note: Callable[[_Call], None]) -> None:
        self._own = own
        self._number = number
        self._note = note

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate a buffer through FSDP's own collective."""
        buffer: torch.Tensor = self._own.allocate(size, dtype=dtype, device=device)
        return buffer

    def __call__(
        self, *, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, **options: Any
    ) -> Any:
        """Run FSDP's own collective, and count it.

        Raises:
            StateError: Memory ran out inside it, which no rank can recover from.
        """
        larger = max(output_tensor, input_tensor, key=torch.Tensor.numel)
        if larger.device.type == "cpu":  # gloo copies inside the collective: better to fail before it
            torch.empty(2 * larger.numel(), dtype=larger.dtype)
        exchange = functools.partial(self._own, output_tensor=output_tensor, input_tensor=input_tensor, group=group)
        outcome = attempt(functools.partial(exchange, **options))
        if not isinstance(outcome, Done):
            _refuse_torn(outcome.description)
        self._note(_Call(self._number, larger.numel(), larger.dtype, larger.device, group, options))
        return outcome.result


class Lockstep:
    """The sequence of a sharded model's collectives in a micro-batch, and this rank's position in it.

    Args:
        model: The model, with modules sharded by ``fully_shard``.
        shards: Its ranks.

    Attributes:
        is_rehearsed: Whether a micro-batch's sequence is known.
        is_steady: Whether all micro-batches communicate identically, so that a failed rank can stay in step.

    Raises:
        AttributeError: FSDP's collectives have moved in this torch version.
        AssertionError: A module's parameters lie on several meshes.
    """

    def __init__(self, model: nn.Module, shards: Shards) -> None:
        from torch.distributed.fsdp import FSDPModule

        self.shards = shards
        self.is_rehearsed = False
        self.is_steady = True
        self._model = model
        self._sequence: list[_Call] = []
        self._is_learning = self._is_counting = self._has_warned = False
        self._num_calls = 0  # of the last micro-batch
        self._foreign: list[str] = []
        self._modules: list[FSDPModule] = []  # of each pair of channels
        self._channels: list[_Channel] = []
        self._close = contextlib.ExitStack()
        # Only reading and replacing the current collectives is private API. A state shared by modules counts once.
        sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._states = {state_of(module): module for module in sharded}
        with self._close:
            for state, module in self._states.items():
                group = parameter_group(state)
                if group is not None:
                    self._modules.append(module)
                    for name in COLLECTIVES:
                        self._tap(group, name)
            self._close = self._close.pop_all()

    @classmethod
    def find(cls, model: nn.Module, shards: Shards) -> Self | None:
        """Return the lockstep of a model; None if this torch version or the sharding is unsupported."""
        if missing_for_lockstep():
            return None
        try:
            return cls(model, shards)
        except (AttributeError, AssertionError):
            return None

    def close(self) -> None:
        """Restore FSDP's own collectives."""
        self._close.close()

    def begin_batch(self) -> None:
        """Drop parameters that an evaluation has left gathered: each batch begins like the rehearsal."""
        for module in self._modules:
            module.reshard()

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Record the collectives of forward and backward in the block, including those outside FSDP."""
        self._is_learning = True
        try:
            with _Listener() as listener:
                yield
        finally:
            self._is_learning = False
        self._foreign = listener.names

    def end_rehearsal(self) -> None:
        """Compare the ranks' recorded sequences; all must call it. Warn if a failed rank could not stay in step."""
        self.is_rehearsed = True
        obstacle = ""
        if len(self._foreign) != len(self._sequence):
            names = ", ".join(sorted(set(self._foreign)))
            obstacle = f"the model or the loss communicates outside FSDP, too (all collectives: {names})"
        elif any(dist.get_world_size(call.group) != self.shards.num_ranks for call in self._sequence):
            obstacle = "parameters are resharded to a smaller mesh after forward"
        mark = float(zlib.crc32(repr(self._sequence).encode()))
        has_obstacle, highest, negative_lowest = self.shards.max([float(bool(obstacle)), mark, -mark])
        if has_obstacle or highest != -negative_lowest:
            self.give_up(obstacle or "the ranks run different collectives")

    @contextlib.contextmanager
    def microbatch(self) -> Iterator[None]:
        """Count the collectives of forward and backward in the block; detect deviations from the rehearsal."""
        self._num_calls, self._is_counting = 0, True
        try:
            yield
        finally:
            self._is_counting = False

    def end_microbatch(self) -> None:
        """Detect a complete micro-batch with fewer collectives than the rehearsal."""
        self.is_steady = self.is_steady and self._num_calls == len(self._sequence)

    def drop_out(self) -> None:
        """Discard the failed micro-batch: FSDP's iteration state, gathered parameters, half-added gradients."""
        for parameter in self._model.parameters():
            parameter.grad = None  # also that of a gathered parameter, which the next backward would add to
        for state, module in self._states.items():
            if is_root(state):
                module.reset_iter_state()

    def join_rest(self) -> None:
        """Join the micro-batch's remaining collectives without contributing gradients."""
        self.join(self._num_calls)

    def join(self, start: int = 0) -> None:
        """Join a micro-batch's collectives from number ``start`` on without contributing gradients."""
        for call in self._sequence[start:]:
            module = self._modules[call.channel // 2]
            if call.channel % 2 == 0:
                insist(module.unshard, "gathering parameters for the other ranks")
                module.reshard()
            else:
                insist(functools.partial(self._reduce_zeros, call), "reducing with the other ranks")

    def give_up(self, reason: str) -> None:
        """Turn recovery off because a failed rank cannot stay in step: errors now pass through. Warns on all ranks."""
        self.is_steady = False
        if self._has_warned:
            return
        self._has_warned = True
        warn_user(
            "MemoryEfficientTrainingWrapper: no recovery from out-of-memory from now on, and such errors pass "
            f"through: {reason}, so a rank that has failed cannot continue in step with the others. Raise "
            "accumulation_steps or set checkpoint='auto' instead."
        )

    def _tap(self, group: Any, name: str) -> None:
        own = getattr(group, name)
        channel = _Channel(own, len(self._channels), self._note)
        self._channels.append(channel)
        setattr(group, name, channel)
        self._close.callback(setattr, group, name, own)

    def _note(self, call: _Call) -> None:
        if self._is_learning:
            self._sequence.append(call)
        elif self._is_counting:
            expected = self._sequence[self._num_calls] if self._num_calls < len(self._sequence) else None
            self.is_steady = self.is_steady and call == expected
            self._num_calls += 1

    def _reduce_zeros(self, call: _Call) -> None:
        channel = self._channels[call.channel]
        zeros, unused = (
            channel.allocate((size,), dtype=call.dtype, device=call.device)
            for size in (call.num_elements, call.num_elements // self.shards.num_ranks)
        )
        channel(output_tensor=unused, input_tensor=zeros.zero_(), group=call.group, **call.options)


def _refuse_torn(description: str) -> NoReturn:
    raise StateError(
        "MemoryEfficientTrainingWrapper",
        got=f"out of memory inside a collective: {description}",
        expected="memory for one exchange between the ranks: the parameters of one fully_shard module",
        fix="call fully_shard on smaller modules too; resume all ranks from the last checkpoint.",
    )  # not an out-of-memory error: a retry would not match the other ranks


class _Listener(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own class hook
    """Records the names of all collectives of this process."""

    def __init__(self) -> None:
        from torch.distributed.tensor import DTensor

        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self._sharded = DTensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, self._sharded) for kind in types):
            return NotImplemented  # DTensor first turns it into plain operators and collectives
        if func.namespace in {"c10d", "_c10d_functional"} and "wait" not in func.name() and "wrap" not in func.name():
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))
