"""A card that is not there as the stage of a dry run: what its allocator hands out and reserves in the second step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from memkit.planning.card.allocator import CachingAllocator
from memkit.planning.card.allocator_settings import AllocatorSettings
from memkit.planning.card.answers import cuda_answers
from memkit.planning.card.memory import CardMemory, CardRecorder
from memkit.planning.card.tensors import CARD, CardMode, on_stage
from memkit.planning.dryrun import Stage
from memkit.planning.gpus import GPU, capability_of

_UNLIMITED = 2**60


@contextmanager
def on_card(gpu: GPU, selected_fraction: float | None, settings: AllocatorSettings | None = None) -> Iterator[Stage]:
    """A card without limit, so that a step that does not fit is known to the end."""
    mode, memory = CardMode(selected_fraction), CardMemory(gpu, CachingAllocator(_UNLIMITED, settings=settings))

    def make_recorder() -> CardRecorder:
        memory.allocator.reset_peaks()
        return CardRecorder(memory)

    with on_stage(mode, capability_of(gpu)), cuda_answers(gpu, memory):
        yield Stage(CARD.type, mode, make_recorder, has_past=True)
