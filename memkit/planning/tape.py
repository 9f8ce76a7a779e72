"""Memory of a forward and backward pass by arithmetic: a model written with sizes in place of tensors, then walked.

A model calls `Tape.apply` once per operator, which leaves a list of what each one reads, makes and keeps for the
backward pass. `Tape.peak` walks that list as autograd would, forward and then backward, and adds up what is live.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class Block:
    """The storage behind a tensor and its views. Two blocks are the same only if they are one object."""

    num_bytes: int
    wants_grad: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """What is live at the peak of a pass; parameters, optimizer state and the batch are not counted."""

    gradients_bytes: int
    activations_bytes: int
    temporaries_bytes: int
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Op:
    name: str
    inputs: Sequence[Block]
    output: Block
    saved: Sequence[Block]
    num_parameters: int
    weight_cast: Block | None
    shares_grad: bool


@dataclass(frozen=True, slots=True)
class _Segment:
    """Operators under a checkpoint: only the inputs of the whole are kept."""

    inputs: Sequence[Block]
    ops: list[_Op] = field(default_factory=list)

    @property
    def output(self) -> Block:
        return self.ops[-1].output


class Tape:
    """Records operators, then finds the peak of their forward and backward pass.

    Args:
        cast_itemsize: Bytes of one number in the copies of the weights that autocast makes; None without autocast.
    """

    def __init__(self, *, cast_itemsize: int | None) -> None:
        self.num_parameters = 0
        self.num_parameter_tensors = 0
        self._cast_itemsize = cast_itemsize
        self._steps: list[_Op | _Segment] = []
        self._segment: _Segment | None = None

    @contextlib.contextmanager
    def checkpoint(self, *inputs: Block) -> Iterator[None]:
        """Operators in the block are computed again in the backward pass, from ``inputs``, which alone are kept."""
        self._segment = _Segment(inputs)
        self._steps.append(self._segment)
        try:
            yield
        finally:
            self._segment = None

    def apply(
        self,
        name: str,
        inputs: Sequence[Block],
        output_bytes: int,
        *,
        saves: Sequence[Block] = (),
        saves_output: bool = False,
        weights: Sequence[int] = (),
        shares_grad: bool = False,
    ) -> Block:
        """Record one operator.

        Args:
            name: What to call it where it turns out to be the peak.
            inputs: What it reads.
            output_bytes: Size of its result.
            saves: Which of the inputs it keeps for the backward pass.
            saves_output: Whether it keeps its result too.
            weights: Number of elements of each of its parameters. Autocast makes a copy of these, which is kept.
            shares_grad: The gradients of the inputs are the gradient of the result (an addition), not new tensors.

        Returns:
            The result.
        """
        num_parameters = sum(weights)
        output = Block(output_bytes, wants_grad=bool(weights) or any(block.wants_grad for block in inputs))
        cast = Block(num_parameters * self._cast_itemsize) if weights and self._cast_itemsize else None
        op = _Op(
            name=name,
            inputs=inputs,
            output=output,
            saved=[*saves, *([output] if saves_output else []), *([cast] if cast else [])],
            num_parameters=num_parameters,
            weight_cast=cast,
            shares_grad=shares_grad,
        )
        (self._steps if self._segment is None else self._segment.ops).append(op)
        self.num_parameters += num_parameters
        self.num_parameter_tensors += len(weights)
        return output

    def peak(self, *, gradients_exist: bool) -> Peak:
        """Walk one micro-batch, forward, backward and up to the optimizer's step.

        Args:
            gradients_exist: Whether an earlier micro-batch has left gradients of all parameters.
        """
        walk = _Walk(gradients_bytes=4 * self.num_parameters if gradients_exist else 0)
        walk.forward(self._steps)
        walk.backward(self._steps)
        return walk.peak


class _Walk:
    """The bytes that are live while a pass goes on. Gradients of parameters that exist already are added to."""

    def __init__(self, *, gradients_bytes: int) -> None:
        self.peak = Peak(gradients_bytes=0, activations_bytes=0, temporaries_bytes=0, where="")
        self._peak_bytes = 0
        self._gradients_bytes = gradients_bytes
        self._gradients_exist = gradients_bytes > 0
        self._live_bytes = 0
        self._holders: Counter[Block] = Counter()
        self._savers: Counter[Block] = Counter()  # those of the holders that are autograd
        self._grads: dict[Block, Block] = {}

    def forward(self, steps: Sequence[_Op | _Segment]) -> None:
        casts: list[Block] = []
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
        self._grads[loss] = loss  # a number: its own size will do for its gradient
        for step in reversed(steps):
            if isinstance(step, _Segment):
                # What the repeated forward makes on its way and drops is less than what the backward adds next.
                for op in step.ops:
                    self._save(op.saved)
                for op in reversed(step.ops):
                    self._run_backward(op)
                self._unsave(step.inputs)
            else:
                self._run_backward(step)
        self._mark("optimizer.step")

    def _run(self, op: _Op) -> list[Block]:
        """Run an operator forward; returns the copy of its weights, held by autocast."""
        casts = [op.weight_cast] if op.weight_cast else []
        self._hold([op.output, *casts])
        self._mark(f"{op.name}, forward")
        return casts

    def _run_backward(self, op: _Op) -> None:
        if not op.output.wants_grad:  # a cast of the batch, say: autograd does not know it
            return
        grad = self._grads.pop(op.output)
        readers = [block for block in op.inputs if block.wants_grad]
        grads = [grad if op.shares_grad else Block(block.num_bytes) for block in readers]
        # Under autocast the gradient of the weights has their low precision first, then float32.
        parameter_grad = Block(4 * op.num_parameters)
        first_grad = Block(op.weight_cast.num_bytes) if op.weight_cast else parameter_grad

        self._hold([*grads, first_grad])
        self._mark(f"{op.name}, backward")
        self._unsave(op.saved)
        self._release([grad])
        self._hold([parameter_grad])
        self._mark(f"{op.name}, backward")
        self._release([first_grad, parameter_grad])
        if not self._gradients_exist:
            self._gradients_bytes += parameter_grad.num_bytes
        for block, new in zip(readers, grads, strict=True):
            if block in self._grads:
                self._release([new])  # added to the one that is there
            else:
                self._grads[block] = new

    def _hold(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            if not self._holders[block]:
                self._live_bytes += block.num_bytes
            self._holders[block] += 1

    def _release(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            self._holders[block] -= 1
            if not self._holders[block]:
                self._live_bytes -= block.num_bytes

    def _save(self, blocks: Sequence[Block]) -> None:
        self._hold(blocks)
        self._savers.update(blocks)

    def _unsave(self, blocks: Sequence[Block]) -> None:
        self._savers.subtract(blocks)
        self._release(blocks)

    def _mark(self, where: str) -> None:
        if self._live_bytes + self._gradients_bytes > self._peak_bytes:
            self._peak_bytes = self._live_bytes + self._gradients_bytes
            activations_bytes = sum(block.num_bytes for block, count in self._savers.items() if count)
            self.peak = Peak(
                gradients_bytes=self._gradients_bytes,
                activations_bytes=activations_bytes,
                temporaries_bytes=self._live_bytes - activations_bytes,
                where=where,
            )


def _last_reads(steps: Sequence[_Op | _Segment]) -> list[list[Block]]:
    """For each step, the blocks made by these steps that no later step reads."""
    made = {step.output for step in steps}
    last = {block: number for number, step in enumerate(steps) for block in step.inputs if block in made}
    dying: list[list[Block]] = [[] for _ in steps]
    for block, number in last.items():
        dying[number].append(block)
    return dying
