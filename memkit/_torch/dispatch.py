"""torch's dispatcher: modes that see each operator, and dispatch keys that are excluded in a block."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._C import (
    DisableTorchFunctionSubclass as without_torch_function,  # noqa: N813 - a context
    DispatchKey,
    DispatchKeySet,
    TensorBase,  # attributes of tensors below their subclasses
    _AutoDispatchBelowAutograd as below_autograd,  # a context in which autograd records nothing, as inside a mode
    _DisableTorchDispatch as below_modes,  # as long as the object lives; a context would take longer
    _ExcludeDispatchKeyGuard as without_keys,
    _get_dispatch_stack_at as mode_at,  # as `current_modes`, one by one
    _get_privateuse1_backend_name as private_backend_name,
    _len_torch_dispatch_stack as num_modes,
)
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._ops import HigherOrderOperator, OpOverload  # that runs code which it is given; an ordinary one
from torch.utils import _python_dispatch
from torch.utils._mode_utils import no_dispatch  # runs below all modes
from torch.utils._python_dispatch import (
    TorchDispatchMode,  # sees each operator; documented, but its module is private
    _disable_current_modes,
    _get_current_dispatch_mode_stack as current_modes,
    _pop_mode as pop_mode,
    _push_mode as push_mode,
    is_traceable_wrapper_subclass_type,  # a tensor that holds other tensors
)


class LeanDispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own class hook
    """A dispatch mode whose Python code `torch.compile` leaves alone, at no cost.

    The wrapper that torch puts around a mode's ``__torch_dispatch__`` for this takes 0.7 microseconds at each operator.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]
        if "__torch_dispatch__" in vars(cls):
            set_code_exec_strategy(cls.__torch_dispatch__.__code__, _SKIPPED)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    if not hasattr(TorchDispatchMode, "ignore_compile_internals"):

        def __exit__(self, *error: Any) -> None:
            """Leave the mode, and nothing of it behind.

            PyTorch 2.8 has one pair of flags for the modes of all threads, and compiles nothing while they are set.
            Where modes end in another order than they began, as in two threads, it leaves them set.
            """
            super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch leaves it untyped
            if not num_modes():
                _python_dispatch._is_in_torch_dispatch_mode = False
                _python_dispatch._is_in_non_infra_torch_dispatch_mode = False


_SKIPPED = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)  # the function, and all that it calls


def fake_mode() -> Any:
    """Return the active fake tensor mode; None if there is none."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)


def without_modes() -> AbstractContextManager[Any]:
    """Return a context in which no mode sees an operator."""
    return _disable_current_modes() if num_modes() else _AS_IT_IS


_AS_IT_IS = nullcontext()


keys_of: Callable[[torch.Tensor], DispatchKeySet] = torch._C._dispatch_keys
"""Returns the dispatch keys that select the kernels for a tensor's operators."""


def counting_in_views() -> Any:
    """Return a context below autograd in which views track their versions as they do above it."""
    return torch._C._SetExcludeDispatchKeyGuard(DispatchKey.ADInplaceOrView, False)  # noqa: FBT003 - torch's signature


__all__ = [
    "DispatchKey",
    "DispatchKeySet",
    "HigherOrderOperator",
    "LeanDispatchMode",
    "OpOverload",
    "TensorBase",
    "TorchDispatchMode",
    "below_autograd",
    "below_modes",
    "counting_in_views",
    "current_modes",
    "fake_mode",
    "is_traceable_wrapper_subclass_type",
    "keys_of",
    "mode_at",
    "no_dispatch",
    "num_modes",
    "pop_mode",
    "private_backend_name",
    "push_mode",
    "without_keys",
    "without_modes",
    "without_torch_function",
]
