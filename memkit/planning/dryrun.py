"""A training step on fake tensors: what the second (warm) step holds, without data and without a copy of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.compiler import set_stance
from torch.optim import Optimizer

from memkit import _rng
from memkit._errors import InputTypeError
from memkit._recorder import Recorder
from memkit._whereabouts import Whereabouts
from memkit.planning.estimate import Holder, MemoryEstimate
from memkit.planning.fakes import DryMode
from memkit.planning.kernels import workspace_bound
from memkit.planning.libraries import told_that_tensors_are_real
from memkit.planning.optimizers import MakeOptimizer, optimizer_maker

LossFn: TypeAlias = Callable[[Any, Any], Any]
_NUM_HOLDERS = 8


@dataclass(frozen=True)
class DryRun:
    """A user's step; the fields are the arguments of `memkit.estimate_memory_usage`."""

    model: nn.Module
    batch: Any
    loss_fn: LossFn
    optimizer: str | MakeOptimizer | Optimizer
    precision: str | None
    accumulation_steps: int
    selected_fraction: float | None

    def estimate(self) -> MemoryEstimate:
        """Run two steps, and take the second one's peak apart."""
        return summarise(*self.record())

    def record(self) -> tuple[StepRecorder, Mapping[str, int]]:
        """Run two steps and record the second; return with it what was answered without data, and how often."""
        if not isinstance(self.model, nn.Module):
            raise InputTypeError(
                f"estimate_memory_usage({type(self.model).__name__}, sample_batch)",
                got=f"a {type(self.model).__name__}",
                expected="a torch.nn.Module",
                fix="pass the model; put several models into torch.nn.ModuleList([...]).",
            )
        mode = DryMode(self.selected_fraction)
        stand_ins = mode.standing_in(self.model, self.optimizer, self.loss_fn, self.batch)
        with (
            as_by_itself(),
            stand_ins as (whole, _, loss_fn, batch),
            mode,
            self.prepared(whole) as (model, optimizer, recorder),
        ):
            self._step(model, batch, loss_fn, optimizer)
            with recorder:
                recorder.hold(model, batch)
                self._step(model, batch, loss_fn, optimizer)
        return recorder, mode.guesses

    @contextmanager
    def prepared(self, model: nn.Module) -> Iterator[tuple[nn.Module, Optimizer, StepRecorder]]:
        """What the steps run with, made from a model without data: that model, its optimizer, and a recorder."""
        yield model, optimizer_maker(self.optimizer)(model.parameters()), StepRecorder()

    def _step(self, model: nn.Module, batch: Any, loss_fn: LossFn, optimizer: Optimizer) -> None:
        for _ in range(min(2, self.accumulation_steps)):  # a third micro-batch finds what the second finds
            with self._autocast():
                loss = loss_fn(model, batch)
            if isinstance(loss, tuple):
                loss = loss[0] / loss[1]
            if not isinstance(loss, Tensor):
                raise InputTypeError(
                    "loss_fn(model, sample_batch)",
                    got=f"a {type(loss).__name__}",
                    expected="the mean loss as a tensor, or (loss_sum, count)",
                    fix="return the tensor that backward() is called on.",
                )
            if self.accumulation_steps > 1:
                loss = loss / self.accumulation_steps
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        optimizer.step()
        optimizer.zero_grad()

    def _autocast(self) -> AbstractContextManager[object]:
        return nullcontext() if self.precision is None else torch.autocast("cpu", torch.bfloat16)


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


class StepRecorder(Recorder):  # type: ignore[no-untyped-call]  # torch's own class hook
    """A Recorder that knows what a step starts with, and how much its kernels may take inside."""

    def __init__(self) -> None:
        super().__init__()
        self._bounds: list[tuple[int, int]] = []  # number of events so far, bytes

    def hold(self, model: nn.Module, batch: Any) -> None:
        """Count the model and the batch, whether an operator touches them or not."""
        self._label(list(model.parameters()), "parameter")
        self._label(list(model.buffers()), "buffer")
        self._label(batch, "input")

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        bound = self._bound(func, args, out)
        if bound:
            self._bounds.append((self.num_events(), bound))
        return out

    def _bound(self, func: Any, args: tuple[Any, ...], out: Any) -> int:
        return workspace_bound(func, args, out)

    def highest_peak_bytes(self) -> int:
        """The peak if each kernel takes as much as it may."""
        there_before = sum(num_bytes for _, _, num_bytes in self._adopted)
        live = np.concatenate([[0], np.cumsum(self._event_bytes)]) + there_before
        return int(max((live[event] + bound for event, bound in self._bounds), default=0))


def summarise(recorder: StepRecorder, guesses: Mapping[str, int]) -> MemoryEstimate:
    """Take the peak of a recorded step apart."""
    recording = recorder.recording()
    caller = str(Whereabouts().place().line)  # the line that asked for the estimate: the optimizer is called from there
    parts = recording.peak_by("category")
    peak = recording.peak_storage()
    where = (peak.module, peak.operator, peak.phase, peak.source.replace(caller, "")) if peak else ()
    workspace_bytes = max(0, recorder.highest_peak_bytes() - recording.peak_bytes())
    return MemoryEstimate(
        parameters_bytes=parts.get("parameter", 0),
        gradients_bytes=parts.get("gradient", 0),
        optimizer_bytes=parts.get("optimizer", 0),
        activations_bytes=parts.get("activation", 0),
        temporaries_bytes=parts.get("temporary", 0),
        other_bytes=parts.get("input", 0) + parts.get("buffer", 0),
        workspace_bytes=workspace_bytes,
        peak_where=", ".join(part for part in where if part),
        confidence="guessed" if guesses else "workspace" if workspace_bytes else "exact",
        guesses=tuple(f"{count} x {guess}" for guess, count in guesses.items()),
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
