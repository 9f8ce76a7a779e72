"""A training step on fake tensors: what the second (warm) step holds, without data and without a copy of the model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.compiler import set_stance
from torch.optim import Optimizer

from memkit import _rng
from memkit._errors import InputTypeError, MemkitWarning
from memkit._loss import Loss, detached, read_loss
from memkit._recorder import Recorder
from memkit._resizing import UNSHARD
from memkit._torch.pytree import tree_leaves
from memkit._whereabouts import Whereabouts
from memkit.planning.estimate import Holder, MemoryEstimate
from memkit.planning.fakes import DryMode
from memkit.planning.guesses import Guesses
from memkit.planning.kernels import workspace_bound
from memkit.planning.leftovers import leaving_nothing
from memkit.planning.libraries import told_that_tensors_are_real
from memkit.planning.optimizers import MakeOptimizer, optimizer_maker

LossFn: TypeAlias = Callable[[Any, Any], Any]
_NUM_HOLDERS = 8
_CHUNK_CAT = "fsdp::chunk_cat"  # a CPU pads copies of gradients that cannot be cut evenly
_PRECISIONS = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}


class Stage(NamedTuple):
    """Where steps run: a device, tensors without data on it, and what records a step.

    Attributes:
        has_past: Whether what a step takes depends on the one before, as where an allocator keeps what it once took.
    """

    device_type: str
    mode: DryMode
    make_recorder: Callable[[], StepRecorder]
    has_past: bool


class Part(NamedTuple):
    """What one rank runs: its model, its optimizer, and flat gradients that live on from step to step."""

    model: nn.Module
    optimizer: Optimizer
    buckets: Sequence[Tensor]


@contextmanager
def on_cpu(selected_fraction: float | None) -> Iterator[Stage]:
    """Stand-ins on the CPU."""
    yield Stage("cpu", DryMode(selected_fraction), StepRecorder, has_past=False)


@contextmanager
def alone(model: nn.Module, optimizer: str | MakeOptimizer | Optimizer, device_type: str) -> Iterator[Part]:  # noqa: ARG001 - as all that spread
    """One process has all."""
    yield Part(model, optimizer_maker(optimizer)(model.parameters()), ())


@dataclass(frozen=True)
class DryRun:
    """A user's step; the fields are the arguments of `memkit.estimate_memory_usage`.

    Where it runs and how it is spread are two choices: `on_cpu` or `memkit.planning.card.stage.on_card`, `alone` or
    `memkit.planning.shards.as_first_rank`.
    """

    model: nn.Module
    batch: Any
    loss_fn: LossFn
    optimizer: str | MakeOptimizer | Optimizer
    precision: str | None
    accumulation_steps: int
    selected_fraction: float | None
    stage: Callable[[float | None], AbstractContextManager[Stage]] = on_cpu
    spread: Callable[[nn.Module, str | MakeOptimizer | Optimizer, str], AbstractContextManager[Part]] = alone

    def estimate(self) -> MemoryEstimate:
        """Run two steps, and take the second one's peak apart."""
        return summarise(*self.record())

    def record(self) -> tuple[StepRecorder, Guesses]:
        """Run two steps and record the second; return with it what was answered without data, and how often."""
        call = "estimate_memory_usage"
        check_model(call, self.model)
        return leaving_nothing(call, (self.model, self.optimizer, self.loss_fn, self.batch), self._record)

    def _record(self, watch: Callable[[DryMode], None]) -> tuple[StepRecorder, Guesses]:
        with (
            as_by_itself(),
            self.stage(self.selected_fraction) as (device_type, mode, make_recorder, has_past),
            mode.standing_in(self.model, self.optimizer, self.loss_fn, self.batch) as (whole, _, loss_fn, batch),
            mode,
            self.spread(whole, self.optimizer, device_type) as (model, optimizer, buckets),
        ):
            watch(mode)
            for is_recorded in (has_past, True):
                recorder = make_recorder()
                with recorder if is_recorded else nullcontext():
                    if is_recorded:
                        recorder.hold(model, batch, buckets)
                    self._step(model, batch, loss_fn, optimizer, device_type)
        return recorder, mode.guesses

    def _step(self, model: nn.Module, batch: Any, loss_fn: LossFn, optimizer: Optimizer, device_type: str) -> None:
        dtype = None if self.precision is None else _PRECISIONS[self.precision]
        outputs: list[Any] = []  # held for as long as a real step's result is
        for number in range(self.accumulation_steps):
            if number > 1 and not any(isinstance(leaf, Tensor) for leaf in tree_leaves(outputs)):
                break  # a third micro-batch finds what the second finds
            with torch.autocast(device_type, dtype) if dtype else nullcontext():
                loss = loss_fn(model, batch)
            outputs.append(detached(loss.outputs) if isinstance(loss, Loss) else None)
            loss = mean_of(loss)
            if self.accumulation_steps > 1:
                loss = loss / self.accumulation_steps
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        optimizer.step()
        optimizer.zero_grad()


def check_model(call: str, model: object) -> None:
    """Refuse what is no module; ``call`` is the name of the user's call."""
    if not isinstance(model, nn.Module):
        raise InputTypeError(
            f"{call}({type(model).__name__}, ...)",
            got=f"a {type(model).__name__}",
            expected="a torch.nn.Module",
            fix="pass the model; put several models into torch.nn.ModuleList([...]).",
        )


def mean_of(loss: object) -> Tensor:
    """Return the mean loss of what ``loss_fn`` returned."""
    return read_loss(loss, call="loss_fn(model, sample_batch)").average()


@contextmanager
def as_by_itself() -> Iterator[None]:
    """Whatever the caller's modes: gradients on, compiled modules as written, random state put back."""
    with (
        _rng.preserved(),
        torch.inference_mode(mode=False),
        torch.enable_grad(),
        set_stance("force_eager"),
        told_that_tensors_are_real(),
    ):
        yield


def warn_of_doubts(call: str, estimate: MemoryEstimate, stacklevel: int = 3) -> None:
    """Warn where an estimate is used that is not known to hold; ``stacklevel`` leads to the user's call."""
    if estimate.doubts:
        warnings.warn(
            f"{call}(...) is not known to hold: {'; '.join(estimate.doubts)}. Way out: let no size and no branch of "
            "the step depend on values of its tensors.",
            MemkitWarning,
            stacklevel=stacklevel,
        )


class StepRecorder(Recorder):  # type: ignore[no-untyped-call]  # torch's own class hook
    """A Recorder that knows what a step starts with, and how much its kernels may take inside."""

    def __init__(self) -> None:
        super().__init__()
        self._bounds: list[tuple[int, int]] = []  # number of events so far, bytes
        self._trained: dict[str, bool] = {}  # lines that step an optimizer: whether its parameters ever had a gradient

    def hold(self, model: nn.Module, batch: Any, buckets: Sequence[Tensor] = ()) -> None:
        """Count the model, the batch and DDP's flat gradients, whether an operator touches them or not."""
        self._label(list(model.parameters()), "parameter")
        self._label(list(model.buffers()), "buffer")
        self._label(_leaves(batch), "input")
        self._label(buckets, "gradient")

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        bound = self._bound(func, args, kwargs or {}, out)
        if bound:
            self._bounds.append((self.num_events(), bound))
        return out

    def complete(self, estimate: MemoryEstimate) -> MemoryEstimate:
        """Add what is known of the device alone: of a CPU nothing."""
        return estimate

    def starved(self) -> tuple[str, ...]:
        """What was trained without a gradient ever: a run that went another way than training does."""
        return tuple(f"{line}, and no gradient ever was there" for line, has in self._trained.items() if not has)

    def _before_optimizer(self, optimizer: Optimizer, *others: Any) -> None:
        super()._before_optimizer(optimizer, *others)
        self._note_gradients(optimizer)

    def _after_optimizer(self, optimizer: Optimizer, *others: Any) -> None:
        self._note_gradients(optimizer)  # a closure has made them
        super()._after_optimizer(optimizer, *others)

    def _note_gradients(self, optimizer: Optimizer) -> None:
        has_gradient = any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
        line = f"{self._where.place().line or 'the step'} steps {type(optimizer).__name__}"
        self._trained[line] = self._trained.get(line, False) or has_gradient

    def _bound(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:
        if func.name() == _CHUNK_CAT:
            return int(kwargs["out"].nbytes)
        return workspace_bound(func, args, out)

    def highest_peak_bytes(self) -> int:
        """The peak if each kernel takes as much as it may."""
        there_before = sum(num_bytes for _, _, num_bytes in self._adopted)
        live = np.concatenate([[0], np.cumsum(self._event_bytes)]) + there_before
        return int(max((live[event] + bound for event, bound in self._bounds), default=0))


def _leaves(batch: Any) -> list[Any]:
    """What a batch holds, also in mappings that torch's trees do not look into."""
    inside = [_leaves(dict(leaf)) if isinstance(leaf, Mapping) else [leaf] for leaf in tree_leaves(batch)]
    return [leaf for leaves in inside for leaf in leaves]


def summarise(recorder: StepRecorder, guesses: Guesses) -> MemoryEstimate:
    """Take the peak of a recorded step apart."""
    recording = recorder.recording()
    caller = str(Whereabouts().place().line)  # the line that asked for the estimate: the optimizer is called from there
    parts = recording.peak_by("category")
    peak = recording.peak_storage()
    where = (peak.module, peak.operator, peak.phase, peak.source.replace(caller, "")) if peak else ()
    workspace_bytes = max(0, recorder.highest_peak_bytes() - recording.peak_bytes())
    unsharded_bytes = recording.peak_by("operator").get(UNSHARD, 0)
    estimate = MemoryEstimate(
        parameters_bytes=parts.get("parameter", 0) - unsharded_bytes,
        gradients_bytes=parts.get("gradient", 0),
        optimizer_bytes=parts.get("optimizer", 0),
        activations_bytes=parts.get("activation", 0),
        temporaries_bytes=parts.get("temporary", 0),
        other_bytes=parts.get("input", 0) + parts.get("buffer", 0),
        unsharded_bytes=unsharded_bytes if UNSHARD in recording.names["operator"] else None,
        workspace_bytes=workspace_bytes,
        peak_where=", ".join(part for part in where if part),
        confidence="guessed" if guesses else "workspace" if workspace_bytes else "exact",
        guesses=tuple(f"{count} x {guess}" for guess, count in guesses.items()),
        doubts=(*guesses.doubts, *recorder.starved()),
        assumptions=tuple(guesses.assumptions),
        holders=tuple(
            Holder(
                nbytes=storage.nbytes,
                category=storage.category,
                module=storage.module,
                operator=storage.operator,
                source=storage.source.replace(caller, ""),
            )
            for storage in recording.top(_NUM_HOLDERS)
        ),
    )
    return recorder.complete(estimate)
