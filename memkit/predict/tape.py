"""Memory of a forward and backward pass by arithmetic: a model written with sizes in place of tensors, then walked.

A model calls `Tape.apply` once per operator, which records what each operator reads, creates and saves for the
backward pass. `Tape.peak` walks these records as autograd would, forward and then backward, and adds up the live bytes,
counting each tensor as the block that PyTorch's CUDA allocator hands out for it.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from memkit._core.units import MIB

# The allocator's sizes, as in `memkit._simulation.cuda.allocator`, which needs torch.
_SMALLEST_BLOCK = 512
_LARGEST_SMALL = MIB
_SHARED_SEGMENT = 20 * MIB  # shared by smaller requests
_SHARES_SEGMENT = 10 * MIB  # from this size on, a request has a segment of its own,
_SEGMENT = 2 * MIB  # rounded up to a multiple of this
_UNSPLIT = MIB  # a remainder of a free block up to this size is not split off


def allocated_bytes(sizes: Iterable[int]) -> int:
    """Return the allocated bytes for tensors of these sizes, placed one by one into new segments."""
    num_bytes, remainders = 0, list[int]()
    for size in sizes:
        rounded = -(-size // _SMALLEST_BLOCK) * _SMALLEST_BLOCK
        if rounded <= _LARGEST_SMALL:
            num_bytes += rounded
            continue
        free = min((remainder for remainder in remainders if remainder >= rounded), default=0)
        if free:
            remainders.remove(free)
        else:
            free = _SHARED_SEGMENT if rounded < _SHARES_SEGMENT else -(-rounded // _SEGMENT) * _SEGMENT
        if free - rounded > _UNSPLIT:
            remainders.append(free - rounded)
            free = rounded
        num_bytes += free
    return num_bytes


@dataclass(eq=False, slots=True)
class TapeStorage:
    """The storage behind a tensor and its views, compared by identity."""

    num_bytes: int
    wants_grad: bool = True
    rounding_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.rounding_bytes = allocated_bytes([self.num_bytes]) - self.num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TapePeak:
    """Live bytes at the peak of a pass; parameters, optimizer state and the batch are not counted.

    ``rounding_bytes`` is the allocator's rounding of these tensors, except gradients left by an earlier micro-batch;
    ``workspace_bytes`` is how far the pass may rise above the peak through scratch memory inside kernels.
    """

    gradients_bytes: int
    activations_bytes: int
    temporaries_bytes: int
    rounding_bytes: int
    workspace_bytes: int
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Op:
    name: str
    inputs: Sequence[TapeStorage]
    output: TapeStorage
    saved: Sequence[TapeStorage]
    weights: Sequence[int]
    weight_casts: Sequence[TapeStorage]
    shares_grad: bool
    inside_bytes: int
    workspace_bytes: int


@dataclass(frozen=True, slots=True)
class _Segment:
    """Operators under a checkpoint: only the inputs of the whole segment are kept."""

    inputs: Sequence[TapeStorage]
    ops: list[_Op] = field(default_factory=list)

    @property
    def output(self) -> TapeStorage:
        return self.ops[-1].output


class Tape:
    """Records operators, then finds the peak of their forward and backward pass.

    Args:
        cast_itemsize: Bytes of one number in the copies of the weights that autocast makes; None without autocast.
    """

    def __init__(self, *, cast_itemsize: int | None) -> None:
        self.weights: list[int] = []  # numbers of elements of all parameters
        self._cast_itemsize = cast_itemsize
        self._steps: list[_Op | _Segment] = []
        self._segment: _Segment | None = None

    @contextlib.contextmanager
    def checkpoint(self, *inputs: TapeStorage) -> Iterator[None]:
        """Recompute the block's operators in the backward pass from ``inputs``; nothing else is kept."""
        self._segment = _Segment(inputs)
        self._steps.append(self._segment)
        try:
            yield
        finally:
            self._segment = None

    def apply(
        self,
        name: str,
        inputs: Sequence[TapeStorage],
        output_bytes: int,
        *,
        saves: Sequence[TapeStorage] = (),
        saves_output: bool = False,
        weights: Sequence[int] = (),
        shares_grad: bool = False,
        inside_bytes: int = 0,
        workspace_bytes: int = 0,
    ) -> TapeStorage:
        """Record one operator.

        Args:
            name: Its name in case it is at the peak.
            inputs: The storages that it reads.
            output_bytes: Size of its result.
            saves: The inputs that it saves for the backward pass.
            saves_output: Whether it saves its result too.
            weights: Number of elements of each of its parameters. Autocast makes a copy of these, which is kept.
            shares_grad: The gradients of the inputs are the gradient of the result (an addition), not new tensors.
            inside_bytes: Scratch memory that its forward kernel allocates and frees besides its result.
            workspace_bytes: Upper bound on its kernels' scratch memory where the size is unknown, in both passes.

        Returns:
            The result.
        """
        output = TapeStorage(output_bytes, wants_grad=bool(weights) or any(block.wants_grad for block in inputs))
        casts = [TapeStorage(number * self._cast_itemsize) for number in weights] if self._cast_itemsize else []
        op = _Op(
            name=name,
            inputs=inputs,
            output=output,
            saved=[*saves, *([output] if saves_output else []), *casts],
            weights=weights,
            weight_casts=casts,
            shares_grad=shares_grad,
            inside_bytes=inside_bytes,
            workspace_bytes=workspace_bytes,
        )
        (self._steps if self._segment is None else self._segment.ops).append(op)
        self.weights += weights
        return output

    def peak(self, *, gradients_exist: bool) -> TapePeak:
        """Walk one micro-batch: forward, backward and up to the optimizer's step.

        Args:
            gradients_exist: Whether an earlier micro-batch has left gradients of all parameters.
        """
        walk = _Walk(gradients_bytes=4 * sum(self.weights) if gradients_exist else 0)
        walk.forward(self._steps)
        walk.backward(self._steps)
        return walk.peak()


class _Walk:
    """Live bytes in the course of a pass. Existing parameter gradients are accumulated into."""

    def __init__(self, *, gradients_bytes: int) -> None:
        self._peak = TapePeak(
            gradients_bytes=0, activations_bytes=0, temporaries_bytes=0, rounding_bytes=0, workspace_bytes=0, where=""
        )
        self._peak_bytes = 0
        self._highest_bytes = 0  # including scratch memory inside kernels
        self._gradients_bytes = gradients_bytes
        self._gradients_exist = gradients_bytes > 0
        self._live_bytes = 0  # without finished parameter gradients
        self._rounding_bytes = 0
        self._holders: Counter[TapeStorage] = Counter()
        self._savers: Counter[TapeStorage] = Counter()  # holders that belong to autograd
        self._grads: dict[TapeStorage, TapeStorage] = {}

    def peak(self) -> TapePeak:
        return replace(self._peak, workspace_bytes=self._highest_bytes - self._peak_bytes)

    def forward(self, steps: Sequence[_Op | _Segment]) -> None:
        casts: list[TapeStorage] = []
        for step, dying in zip(steps, _last_reads(steps), strict=True):
            if isinstance(step, _Segment):
                self._save(step.inputs)
                for op, dying_inside in zip(step.ops, _last_reads(step.ops), strict=True):
                    casts += self._run(op)
                    self._release(dying_inside)
            else:
                self._save(step.saved)
                casts += self._run(step)
            self._release(dying)
        # Autocast holds its copies of the weights until its block ends, before the backward pass.
        self._release(casts)

    def backward(self, steps: Sequence[_Op | _Segment]) -> None:
        loss = steps[-1].output
        self._grads[loss] = loss  # a scalar: its own size stands for its gradient
        for step in reversed(steps):
            if isinstance(step, _Segment):
                # The temporaries of the repeated forward are smaller than what the backward adds next.
                for op in step.ops:
                    self._save(op.saved)
                for op in reversed(step.ops):
                    self._run_backward(op)
                self._unsave(step.inputs)
            else:
                self._run_backward(step)
        self._mark("optimizer.step")

    def _run(self, op: _Op) -> Sequence[TapeStorage]:
        """Run an operator's forward; return the copies of its weights that autocast holds."""
        inside = TapeStorage(op.inside_bytes)
        self._hold([op.output, *op.weight_casts, inside])
        self._mark(f"{op.name}, forward", op.workspace_bytes)
        self._release([inside])
        return op.weight_casts

    def _run_backward(self, op: _Op) -> None:
        if not op.output.wants_grad:  # for example a cast of the batch, which autograd does not track
            return
        grad = self._grads.pop(op.output)
        readers = [block for block in op.inputs if block.wants_grad]
        grads = [grad if op.shares_grad else TapeStorage(block.num_bytes) for block in readers]
        # Under autocast the weights' gradient is first in low precision, then in float32.
        parameter_grads = [TapeStorage(4 * number) for number in op.weights]
        first_grads = [TapeStorage(cast.num_bytes) for cast in op.weight_casts] or parameter_grads

        self._hold([*grads, *first_grads])
        self._mark(f"{op.name}, backward", op.workspace_bytes)
        self._unsave(op.saved)
        self._release([grad])
        self._hold(parameter_grads)
        self._mark(f"{op.name}, backward")
        self._release([*first_grads, *parameter_grads])
        if not self._gradients_exist:
            self._gradients_bytes += sum(block.num_bytes for block in parameter_grads)
            self._rounding_bytes += sum(block.rounding_bytes for block in parameter_grads)
        for block, new in zip(readers, grads, strict=True):
            if block in self._grads:
                self._release([new])  # accumulated into the existing one
            else:
                self._grads[block] = new

    def _hold(self, blocks: Iterable[TapeStorage]) -> None:
        for block in blocks:
            if not self._holders[block]:
                self._live_bytes += block.num_bytes
                self._rounding_bytes += block.rounding_bytes
            self._holders[block] += 1

    def _release(self, blocks: Iterable[TapeStorage]) -> None:
        for block in blocks:
            self._holders[block] -= 1
            if not self._holders[block]:
                self._live_bytes -= block.num_bytes
                self._rounding_bytes -= block.rounding_bytes

    def _save(self, blocks: Sequence[TapeStorage]) -> None:
        self._hold(blocks)
        self._savers.update(blocks)

    def _unsave(self, blocks: Sequence[TapeStorage]) -> None:
        self._savers.subtract(blocks)
        self._release(blocks)

    def _mark(self, where: str, workspace_bytes: int = 0) -> None:
        num_bytes = self._gradients_bytes + self._live_bytes + self._rounding_bytes
        self._highest_bytes = max(self._highest_bytes, num_bytes + workspace_bytes)
        if num_bytes > self._peak_bytes:
            self._peak_bytes = num_bytes
            activations_bytes = sum(block.num_bytes for block, count in self._savers.items() if count)
            self._peak = TapePeak(
                gradients_bytes=self._gradients_bytes,
                activations_bytes=activations_bytes,
                temporaries_bytes=self._live_bytes - activations_bytes,
                rounding_bytes=self._rounding_bytes,
                workspace_bytes=0,
                where=where,
            )


def _last_reads(steps: Sequence[_Op | _Segment]) -> list[list[TapeStorage]]:
    """Return, for each step, the blocks made by these steps that no later step reads."""
    made = {step.output for step in steps}
    last = {block: number for number, step in enumerate(steps) for block in step.inputs if block in made}
    dying: list[list[TapeStorage]] = [[] for _ in steps]
    for block, number in last.items():
        dying[number].append(block)
    return dying
