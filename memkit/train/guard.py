"""Out of memory inside an optimiser's step: the first steps, when its state is made, leave nothing half done."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from memkit._device import release_cached_memory
from memkit._errors import MemkitOutOfMemoryError
from memkit._oom import describe_error, is_out_of_memory

_NUM_GUARDED_STEPS = 2  # the first makes the optimiser's state, the second is the first to have it all


class StepGuard:
    """Protects the first steps of optimisers with a copy of parameters and state in host memory.

    Almost every out-of-memory inside ``optimizer.step()`` comes in the first two steps. When it comes, parameters and
    state are put back and the step is tried once more with the allocator's cache released. Where the copy itself does
    not fit, the step runs without it.

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
        before = self._copy() if self._num_steps < _NUM_GUARDED_STEPS else None
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


class _Copy:
    """Parameters and optimiser state at one instant, in host memory."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._parameters = [
            (parameter, _to_host(parameter))
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        self._states = [
            (optimizer, {parameter: _copy_state(state) for parameter, state in optimizer.state.items()})
            for optimizer in optimizers
        ]

    @torch.no_grad()
    def restore(self) -> None:
        for parameter, value in self._parameters:
            parameter.copy_(value)
        for optimizer, states in self._states:
            for parameter in list(optimizer.state):
                if parameter in states:
                    _restore_state(optimizer.state[parameter], states[parameter])
                else:
                    del optimizer.state[parameter]


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _copy_state(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _to_host(value) if isinstance(value, torch.Tensor) else copy.deepcopy(value)
        for name, value in state.items()
    }


def _restore_state(state: dict[str, Any], before: dict[str, Any]) -> None:
    for name in state.keys() - before.keys():
        del state[name]
    for name, value in before.items():
        if isinstance(value, torch.Tensor) and isinstance(state.get(name), torch.Tensor):
            state[name].copy_(value)
        else:
            state[name] = copy.deepcopy(value)
