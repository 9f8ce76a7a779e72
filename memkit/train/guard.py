"""Out of memory inside an optimiser's step: the first steps, when its state is made, leave nothing half done."""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from memkit._device import release_cached_memory
from memkit._errors import MemkitOutOfMemoryError
from memkit._oom import describe_error, is_out_of_memory

_SMALL_BYTES = 64 * 1024  # not worth a file
_NUM_GUARDED_STEPS = 2  # the first makes the optimiser's state, the second is the first to have it all


class StepGuard:
    """Protects the first steps of optimisers with a copy of parameters and state.

    The copy of an accelerator's tensors lies in host memory, that of host tensors in temporary files: it must not take
    the memory that is short. Almost every out-of-memory inside ``optimizer.step()`` comes in the first two steps. When
    it comes, parameters and state are put back and the step is tried once more with the allocator's cache released.
    Where the copy itself does not fit, the step runs without it.

    Args:
        optimizers: The optimisers that step together.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._num_steps = 0

    def run(self, step: Callable[[], bool]) -> bool:
        """Run ``step``, which steps the optimisers; return what it returns.

        Raises:
            MemkitOutOfMemoryError: It ran out of memory; the message says whether all is as it was before.
        """
        with contextlib.ExitStack() as stack:
            before = self._copy() if self._num_steps < _NUM_GUARDED_STEPS else None
            if before is not None:
                stack.enter_context(before)
            for _ in range(2 if before else 1):
                failure = None
                try:
                    stepped = step()
                except Exception as error:
                    if not is_out_of_memory(error):
                        raise
                    failure = describe_error(error)
                if failure is None:
                    self._num_steps += stepped
                    return stepped
                if before is not None:
                    before.restore()
                release_cached_memory()
        raise MemkitOutOfMemoryError(
            "optimizer.step()",
            got=f"out of memory inside it: {failure}; parameters and state are "
            + ("as they were before the step" if before else "partly stepped"),
            expected="memory for the optimiser's state and its temporary results",
            fix="pass foreach=False or fused=True to the optimiser, which need less"
            + ("." if before else "; go on from the last checkpoint."),
        )

    def _copy(self) -> _Copy | None:
        try:
            return _Copy(self._optimizers)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        return None


class _Copy(contextlib.AbstractContextManager["_Copy"]):
    """Parameters and optimiser state at one instant; its files go when the context ends."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._cleanup = contextlib.ExitStack()
        self._num_files = 0
        try:
            self._parameters = [
                (parameter, self._copy(parameter))
                for optimizer in optimizers
                for group in optimizer.param_groups
                for parameter in group["params"]
                if parameter.grad is not None
            ]
            self._states = [
                (optimizer, {parameter: self._copy_state(state) for parameter, state in optimizer.state.items()})
                for optimizer in optimizers
            ]
        except BaseException:
            self._cleanup.close()
            raise

    def __exit__(self, *_: object) -> None:
        self._parameters, self._states = [], []  # some systems cannot remove a file that is mapped
        self._cleanup.close()

    @torch.no_grad()
    def restore(self) -> None:
        """Write everything back in place."""
        for parameter, value in self._parameters:
            parameter.copy_(value)
        for optimizer, states in self._states:
            for parameter in list(optimizer.state):
                if parameter in states:
                    _restore_state(optimizer.state[parameter], states[parameter])
                else:
                    del optimizer.state[parameter]

    def _copy_state(self, state: dict[str, Any]) -> dict[str, Any]:
        return {
            name: self._copy(value) if isinstance(value, torch.Tensor) else copy.deepcopy(value)
            for name, value in state.items()
        }

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        if tensor.device.type != "cpu" or tensor.nbytes < _SMALL_BYTES:
            return tensor.to("cpu", copy=True)
        if self._num_files == 0:
            self._folder = self._cleanup.enter_context(tempfile.TemporaryDirectory(prefix="memkit-step-"))
        self._num_files += 1
        path = Path(self._folder, str(self._num_files))
        stored = torch.from_file(str(path), shared=True, size=tensor.numel(), dtype=tensor.dtype).view(tensor.shape)
        return stored.copy_(tensor)


def _restore_state(state: dict[str, Any], before: dict[str, Any]) -> None:
    for name in state.keys() - before.keys():
        del state[name]
    for name, value in before.items():
        if isinstance(value, torch.Tensor) and isinstance(state.get(name), torch.Tensor):
            state[name].copy_(value)
        else:
            state[name] = copy.deepcopy(value)
