"""Non-public parts of modules, and base classes of torch's layers that have no public name."""

from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.dropout import _DropoutNd as Dropout
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

__all__ = [
    "APPLY",
    "BUFFERS",
    "CHILDREN",
    "COMPILED",
    "FLAT_WEIGHTS",
    "HOOKS",
    "LOAD",
    "MACHINERY",
    "PAD_PACKED",
    "PARAMETERS",
    "STATE",
    "BatchNorm",
    "Dropout",
    "all_parameters",
    "apply_to",
    "buffers_of",
    "children_of",
    "is_compiled",
    "is_compiled_wrapper",
    "loads_as_torch_does",
    "members_of",
    "parameters_of",
    "recomputed_by_hooks",
    "rnn_functions",
    "spectral_norms_among",
    "training_flags",
    "unsaved_buffers_of",
]


buffers_of: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")
"""Returns a module's own buffers, including None, for reading and replacing: `setattr` rejects some values."""


def unsaved_buffers_of(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's own buffers with ``persistent=False``, which its ``state_dict`` does not have."""
    names = module._non_persistent_buffers_set
    return {name: each for name, each in module._buffers.items() if name in names and each is not None}


def all_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a module, even if its own ``parameters()`` returns only those that train."""
    return [parameter for _, parameter in nn.Module.named_parameters(module)]


def training_flags(modules: Iterable[nn.Module]) -> list[bool]:
    """Return for each module whether it is in training mode."""
    return list(map(_MODE, modules))


_MODE = attrgetter("training")


def is_compiled(module: nn.Module) -> bool:
    """Return whether torch.compile created or changed a module."""
    return is_compiled_wrapper(module) or module._compiled_call_impl is not None


def is_compiled_wrapper(module: nn.Module) -> bool:
    """Return whether a module is the wrapper returned by `torch.compile(module)`, whose class is slow to import."""
    return COMPILED in module._modules


COMPILED = "_orig_mod"
"""Name of the attribute in which the wrapper returned by `torch.compile(module)` holds the module."""


def loads_as_torch_does(module: nn.Module) -> bool:
    """Return whether a module loads its state as torch's own modules do: without a custom method or hooks."""
    is_own = type(module)._load_from_state_dict.__module__.startswith("torch.nn.")
    return is_own and not module._load_state_dict_pre_hooks


APPLY = "_apply"
"""Name of a module's method for moving it."""

LOAD = "_load_from_state_dict"
"""Name of a module's method for loading its own part of a state."""


def apply_to(module: nn.Module, fn: Any, *, recurse: bool = True) -> None:
    """Apply a function to a module's parameters and buffers, as `to` does."""
    module._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch leaves it untyped


parameters_of: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter("_parameters")
"""Returns a module's own parameters, including None."""


children_of: Callable[[nn.Module], Mapping[str, nn.Module | None]] = attrgetter("_modules")
"""Returns a module's own children, including None."""


MACHINERY = frozenset(vars(nn.Module())) - {"training"}
"""Names of the attributes that every module has, besides its mode."""


STATE = frozenset(("_parameters", "_buffers", "_modules", "training"))
"""Names of a module's attributes that a forward may change."""


def members_of(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object's attributes; for a module, including its buffers and parameters."""
    members = attributes.get("_buffers"), attributes.get("_parameters")
    found = dict(attributes)
    for each in members:
        found |= each if isinstance(each, dict) else {}  # a plain object may have a list by that name
    return found


BUFFERS, PARAMETERS, CHILDREN = "_buffers", "_parameters", "_modules"
"""Names of the attributes in which a module holds its own buffers and parameters, and its child modules."""

HOOKS = {
    "_forward_hooks": "register_forward_hook",
    "_forward_pre_hooks": "register_forward_pre_hook",
    "_backward_hooks": "register_full_backward_hook",
    "_backward_pre_hooks": "register_full_backward_pre_hook",
}
"""Attribute in which a module holds its hooks, by the method that registers them."""


def recomputed_by_hooks(module: nn.Module) -> set[str]:
    """Return the attributes that weight norms, spectral norms and pruning, by hooks, compute before each forward.

    A recurrent layer then renews the lists of its weights, too.
    """
    hooks = module._forward_pre_hooks.values()
    names = {each.name for each in hooks if isinstance(each, (WeightNorm, SpectralNorm))}
    names |= {each._tensor_name for each in hooks if isinstance(each, BasePruningMethod)}
    return names | {FLAT_WEIGHTS, "_flat_weight_refs"} if names else names


_VECTORS = {"parametrization": ("._u", "._v"), "hook": ("weight_u", "weight_v")}


def spectral_norms_among(buffers: Iterable[str]) -> list[str]:
    """Return the forms of spectral norm, of ``"parametrization"`` and ``"hook"``, whose vectors have these names.

    A name may be followed by the class of the network: ``"0.weight_u of Discriminator"``.
    """
    names = [name.partition(" ")[0] for name in buffers]
    return [form for form, ends in _VECTORS.items() if any(name.endswith(ends) for name in names)]


FLAT_WEIGHTS = "_flat_weights"
"""Attribute in which a recurrent layer holds its weights for cuDNN; some may be missing."""

rnn_functions = torch._VF
"""The C++ functions that recurrent layers and `torch.nn.utils.rnn` call."""

PAD_PACKED = "_pad_packed_sequence"
"""The name of the one that pads packed rows; it writes their lengths in C++."""
