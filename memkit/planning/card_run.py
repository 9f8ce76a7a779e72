"""A training step on a card that is not there: what its allocator hands out and reserves in the second step."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from memkit.planning.allocator import CachingAllocator
from memkit.planning.card_memory import CardMemory, CardRecorder
from memkit.planning.cuda_api import cuda_answers
from memkit.planning.dryrun import DryRun, as_by_itself, summarise
from memkit.planning.estimate import MemoryEstimate
from memkit.planning.gpus import GPU, capability_of
from memkit.planning.optimizers import optimizer_maker
from memkit.planning.virtual_card import CardMode, on_stage

_UNLIMITED = 2**60


@dataclass(frozen=True, kw_only=True)
class CardRun(DryRun):
    """A user's step on a card without limit, so that a step that does not fit is known to the end."""

    gpu: GPU

    def estimate(self) -> MemoryEstimate:
        """Run two steps, and take the second one's peak apart."""
        mode, memory = CardMode(self.selected_fraction), CardMemory(self.gpu, CachingAllocator(_UNLIMITED))
        with (
            as_by_itself(),
            on_stage(mode, capability_of(self.gpu)),
            cuda_answers(self.gpu, memory.allocator),
            mode.standing_in(self.model, self.optimizer, self.loss_fn, self.batch) as (model, _, loss_fn, batch),
            mode,
        ):
            with CardRecorder(memory) as first:
                first.hold(model, batch)
                optimizer = optimizer_maker(self.optimizer)(model.parameters())
                self._step(model, batch, loss_fn, optimizer)
            memory.allocator.reset_peaks()
            with CardRecorder(memory) as second:
                second.hold(model, batch)
                self._step(model, batch, loss_fn, optimizer)
        return memory.complete(summarise(second, mode.guesses))

    def _autocast(self) -> AbstractContextManager[object]:
        dtypes = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}
        return nullcontext() if self.precision is None else torch.autocast("cuda", dtypes[self.precision])
