"""What a module is besides its public parts, and bases of torch's layers that have no public name."""

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.dropout import _DropoutNd as Dropout

__all__ = ["BatchNorm", "Dropout", "buffers_of", "is_compiled", "is_compiled_wrapper", "loads_as_torch_does"]


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return a module's own buffers, those that are None too, to be read and replaced: `setattr` refuses some."""
    return module._buffers


def is_compiled(module: nn.Module) -> bool:
    """Say whether torch.compile made or changed a module."""
    return is_compiled_wrapper(module) or module._compiled_call_impl is not None


def is_compiled_wrapper(module: nn.Module) -> bool:
    """Say whether a module is what `torch.compile(module)` returned, whose class is slow to import."""
    return "_orig_mod" in module._modules


def loads_as_torch_does(module: nn.Module) -> bool:
    """Say whether a module loads a state as torch's own do: without a method or hooks of its own."""
    is_own = type(module)._load_from_state_dict.__module__.startswith("torch.nn.")
    return is_own and not module._load_state_dict_pre_hooks
