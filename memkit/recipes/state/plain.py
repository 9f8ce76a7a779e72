"""States as plain values: only what ``torch.load(weights_only=True)`` can read.

Sharded tensors (DTensor) are taken out of the state and replaced by placeholders: the ranks save and load them
together.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, final

import numpy as np
import torch
from torch import nn

from memkit._core.errors import FileFormatError, InputTypeError

_ATOMS = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, torch.layout}
)
_PLACEHOLDER = "memkit sharded tensor"
_MOST_LEVELS = 100  # reading takes four Python calls per level, of the thousand that Python allows


@final
class Flattener:
    """Turns state dicts into plain values; tensors are kept as they are, or copied to the host.

    Args:
        copy: Copy tensors into host memory, each once, because they must not change before they are written.

    Attributes:
        sharded: The sharded tensors that were found, by name.
    """

    def __init__(self, *, copy: bool = False) -> None:
        self._copy = copy
        self._copies: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}  # by place: original, copy
        self._num_levels = 0
        self.sharded: dict[str, torch.Tensor] = {}

    def plain(self, value: Any, name: str) -> Any:
        """Return ``value`` as plain values.

        Args:
            value: A state dict, or a value inside one.
            name: Its name in an error.

        Raises:
            InputTypeError: It contains a value that a safe load would refuse; the name says where.
        """
        if type(value) in _ATOMS:
            return value
        if self._num_levels == _MOST_LEVELS:
            _refuse(value, name[:200])
        self._num_levels += 1
        try:
            return self._plain(value, name)
        finally:
            self._num_levels -= 1

    def _plain(self, value: Any, name: str) -> Any:
        kind = type(value)
        if kind in {dict, Counter, OrderedDict} and _PLACEHOLDER in value:
            _refuse(_PLACEHOLDER, name)
        if kind in {dict, Counter}:
            return kind({self._key(key, name): self.plain(each, f"{name}.{key}") for key, each in value.items()})
        if kind is OrderedDict:
            ordered = OrderedDict(
                (self._key(key, name), self.plain(each, f"{name}.{key}")) for key, each in value.items()
            )
            vars(ordered).update(self.plain(vars(value), name))  # a module's versions
            return ordered
        if kind is set:
            return {self._key(each, name) for each in value}
        if kind in {list, tuple}:
            return kind([self.plain(each, f"{name}[{index}]") for index, each in enumerate(value)])
        if isinstance(value, torch.Tensor):
            return self._tensor(value, name)
        if not isinstance(value, np.generic) or type(value.item()) not in _ATOMS:
            _refuse(value, name)
        return value.item()

    def _key(self, key: Any, name: str) -> Any:
        if isinstance(key, torch.Tensor):  # on reading it is a different tensor, and so a different key
            _refuse(key, f"{name}, as a key")
        return self.plain(key, f"{name}, as a key")

    def _tensor(self, tensor: torch.Tensor, name: str) -> Any:
        if hasattr(tensor, "device_mesh"):
            while name in self.sharded:  # as "a.b" and "b" in "a"; all ranks visit them in the same order
                name += "'"
            self.sharded[name] = tensor.detach()
            shards = [str(each) for each in tensor.placements]  # type: ignore[attr-defined] # a DTensor's
            return {_PLACEHOLDER: name, "shape": tensor.shape, "dtype": tensor.dtype, "placements": shards}
        is_dense = tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_meta
        if type(tensor) not in {torch.Tensor, nn.Parameter, nn.Buffer} or not is_dense:
            _refuse(tensor, name)
        tensor = tensor.detach().resolve_conj().resolve_neg()
        if not self._copy:
            # torch.save writes whole storages: a small part of a large one is copied first.
            return tensor if tensor.nbytes == tensor.untyped_storage().nbytes() else tensor.clone()
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if place not in self._copies:
            # The original is kept alive, so that no other tensor can take its address.
            self._copies[place] = tensor, tensor.to("cpu", copy=True)
        return self._copies[place][1]


def has_placeholders(value: object) -> bool:
    """Whether a plain value contains placeholders of sharded tensors."""
    if isinstance(value, dict):
        return _PLACEHOLDER in value or any(map(has_placeholders, value.values()))
    return isinstance(value, (list, tuple)) and any(map(has_placeholders, value))


def fill_placeholders(value: Any, fill: Callable[[Mapping[str, Any]], torch.Tensor]) -> Any:
    """Return a plain value with each placeholder replaced by ``fill(placeholder)``; dicts change in place."""
    if isinstance(value, dict):
        if _PLACEHOLDER in value:
            return fill(value)
        for key, each in value.items():
            value[key] = fill_placeholders(each, fill)
    elif type(value) in {list, tuple}:
        return type(value)([fill_placeholders(each, fill) for each in value])
    return value


class ShardedTensors:
    """Destinations for the values of sharded tensors: existing tensors, or new ones like them.

    Args:
        live: The sharded tensors in the objects' states, by name.
    """

    def __init__(self, live: Mapping[str, torch.Tensor]) -> None:
        self._live = live
        self.chosen: dict[str, torch.Tensor] = {}

    def choose(self, placeholder: Mapping[str, Any], *, always_new: bool = False) -> torch.Tensor:
        """Return the tensor for a placeholder; its values are read later.

        Args:
            placeholder: The placeholder in the state.
            always_new: Create a new tensor even if an existing one fits.

        Raises:
            FileFormatError: No existing tensor has the shape.
        """
        name, shape = placeholder[_PLACEHOLDER], placeholder["shape"]
        tensor = self._live.get(name)
        if always_new or tensor is None or tensor.shape != shape or tensor.dtype != placeholder["dtype"]:
            alike = [each for each in self._live.values() if each.shape == shape]
            if not alike:
                raise FileFormatError(
                    "TrainingStateManager.restore()",
                    got=f"{name} of shape {tuple(shape)}",
                    expected="a sharded tensor of that shape in one of the objects to restore",
                    fix="shard the model as it was when saved (fully_shard), and restore the model with its optimizer.",
                )
            like = min(alike, key=lambda each: [str(one) for one in each.placements] != placeholder["placements"])  # type: ignore[attr-defined] # a DTensor's
            tensor = torch.empty_like(like, dtype=placeholder["dtype"])
        self.chosen[name] = tensor
        return tensor


def _refuse(value: Any, name: str) -> NoReturn:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    fix = "let state_dict() return plain values: torch.from_numpy for an array, list for a deque, str for a path."
    if isinstance(value, torch.Tensor) and type(value) is torch.Tensor:
        kind += f" ({'on meta' if value.is_meta else value.layout})"
        if value.layout is torch.sparse_coo and "gradients" in name:
            fix = "save after a whole batch, when its step is done and there are no gradients, or use sparse=False."
    raise InputTypeError(
        f"TrainingStateManager.save({name.split('.', 1)[0]}=...)",
        got=f"{kind} at {name}",
        expected="numbers, strings, bytes, dense tensors with values, and dicts, lists, tuples and sets of them, up "
        f"to {_MOST_LEVELS} levels deep: these load without running code",
        fix=fix,
    )
