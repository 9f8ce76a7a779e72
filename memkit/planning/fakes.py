"""Stand-ins without data: the user's model, batch and optimizer on fake tensors, put back as they were afterwards."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from memkit._errors import InputError, NotSimulatedError, StateError
from memkit._settings import Checker
from memkit._torch.dispatch import no_dispatch
from memkit._torch.fake import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorConverter,
    FakeTensorMode,
)
from memkit._whereabouts import Whereabouts
from memkit.planning.fakecache import CachedFakeMode
from memkit.planning.guesses import Guesses
from memkit.planning.kernels import INSTEAD, RESULTS, Kernels
from memkit.planning.reading import known_value, note_known, reading

CALL = "a step on tensors without data"  # whichever call of the user runs it
_aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_FEWEST_MADE = 100_000  # tensors that are remembered before those that died are forgotten
_CPU = torch.device("cpu")
# Tensors of up to this many whole numbers keep their values: what is read from them (lengths, whether there is padding)
# is then true. Those that a step makes of nothing are computed for real, and kept up to fewer.
_MOST_VALUES, _MOST_COUNTED = 2**20, 1024
_ATOMS = frozenset({bool, int, float, str})
_COUNTING = frozenset(  # what makes tensors, whose values are known, from nothing
    {
        _aten.arange.default,
        _aten.arange.start,
        _aten.arange.start_step,
        _aten.full.default,
        _aten.ones.default,
        _aten.zeros.default,
    }
)


class DryMode(CachedFakeMode):  # type: ignore[no-untyped-call]  # torch's own class hook
    """A fake tensor mode for whole training steps: it answers where a step asks for data, and counts the answers.

    Args:
        selected_fraction: The share of its elements that a mask is taken to select; None refuses masks.

    Raises:
        ConfigError: ``selected_fraction`` is no share in (0, 1].

    Attributes:
        guesses: How often each ``"operator at line"`` was answered without data.
        is_open: Whether its tensors may be used. They have no data: what uses them after the run is wrong.
    """

    # What the kernels of the device do that shape functions do not say.
    results: Kernels = RESULTS
    instead: Kernels = INSTEAD

    def __init__(self, selected_fraction: float | None) -> None:
        check = Checker(CALL)
        if selected_fraction is not None and check.number("selected_fraction", selected_fraction, 0, 1) == 0:
            raise check.refuse("selected_fraction", selected_fraction, "None, or a share in (0, 1]")
        super().__init__(allow_non_fake_inputs=True)
        self.is_open = True
        # Of storages: a tensor with weak references could not move to another device.
        self._made: list[weakref.ref[torch.UntypedStorage]] = []
        self._most_made = _FEWEST_MADE
        self.fake_tensor_converter = self._converter = _Converter()
        self.guesses = Guesses()
        self._selected_fraction = selected_fraction
        # By id() of the original, which is kept with its stand-in; a storage's also by the device of the copy.
        self._storages: dict[tuple[int, str], tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._stand_ins: dict[int, tuple[Tensor, Tensor]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # a module that copies its layers would otherwise copy the mode with them

    # -------------------------------------------------------------------------------------- life and death

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and remember what it made."""
        if not self.is_open and func is not _DEVICE:
            raise StateError(
                f"{func} on a tensor without data",
                got="a tensor of a virtual GPU or an estimate that is over, kept by a variable or a cache",
                expected="use while it is simulated: it has a size and no values",
                fix="make the tensor again, or build the model again; empty the cache.",
            )
        out = super().__torch_dispatch__(func, types, args, {} if kwargs is None else kwargs)
        self._note(out)
        return out

    def _note(self, made: Any) -> None:
        if isinstance(made, FakeTensor):
            if made.layout is torch.strided:
                self._made.append(weakref.ref(made.untyped_storage()))
            if len(self._made) > self._most_made:
                self._made = [ref for ref in self._made if ref() is not None]
                self._most_made = max(_FEWEST_MADE, 2 * len(self._made))
        elif isinstance(made, (list, tuple)):
            for each in made:
                self._note(each)

    def survivors(self) -> list[Tensor]:
        """The tensors without data that somebody still holds; looks at all objects only where there are any."""
        if all(ref() is None for ref in self._made):
            return []
        return [each for each in gc.get_objects() if type(each) is FakeTensor and each.fake_mode is self]

    def close(self) -> None:
        """Let go of all tensors; from here on whoever uses one gets an error."""
        self.is_open = False
        self._stand_ins.clear()
        self._storages.clear()
        self.fake_tensor_converter = self._converter = _Converter()

    # ------------------------------------------------------------------------------------------- stand-ins

    def stand_in(self, tensor: Tensor) -> Tensor:
        """The tensor's type, sizes, strides and shared storage, without data, as if on the CPU."""
        if id(tensor) in self._stand_ins:
            return self._stand_ins[id(tensor)][1]
        if is_lazy(tensor):
            raise InputError(
                CALL,
                got="a model whose parameters have no sizes yet (a lazy module)",
                expected="a model that has run once",
                fix="call the model on one batch first.",
            )
        plain = tensor.detach()
        fake = self._with_values(plain) if self._has_values(tensor) else self._without_data(plain)
        if isinstance(tensor, nn.Parameter):
            fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
        else:
            fake.requires_grad_(tensor.requires_grad)
        self._note(fake)
        self._stand_ins[id(tensor)] = tensor, fake
        return fake

    def _has_values(self, tensor: Tensor) -> bool:
        """Whether a tensor is a number (an optimizer's step count) or a few whole numbers, whose values matter."""
        limit = 1 if tensor.dtype.is_floating_point or tensor.dtype.is_complex else _MOST_VALUES
        return (
            not tensor.requires_grad
            and tensor.device == _CPU
            and tensor.untyped_storage().nbytes() <= limit * tensor.dtype.itemsize
        )

    def _without_data(self, tensor: Tensor) -> Tensor:
        return FakeTensor(self, self._copy(tensor, "meta"), _CPU)

    def _with_values(self, tensor: Tensor) -> Tensor:
        values = self._copy(tensor, "cpu")
        storage, itemsize = values.untyped_storage(), values.dtype.itemsize
        if storage.nbytes() == values.nbytes or storage.nbytes() % itemsize:
            return self._converter.from_real_tensor(self, values, make_constant=True)
        # A view: of a tensor without data for all of its storage, so that this counts.
        whole = torch.empty(0, dtype=values.dtype).set_(storage, 0, (storage.nbytes() // itemsize,), (1,))
        fake = self._converter.from_real_tensor(self, whole, make_constant=True)
        with self:
            return fake.as_strided(values.shape, values.stride(), values.storage_offset())

    def _copy(self, tensor: Tensor, device: str) -> Tensor:
        """The same view of a copy of the whole storage; of an empty one on the meta device."""
        storage = tensor.untyped_storage()
        with torch.no_grad():
            if (id(storage), device) not in self._storages:
                all_bytes = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                copy = torch.empty_like(all_bytes, device=device)
                if device == "cpu":
                    copy.copy_(all_bytes)
                self._storages[id(storage), device] = storage, copy.untyped_storage()
            copied = self._storages[id(storage), device][1]
            empty = torch.empty(0, dtype=tensor.dtype, device=device)
            return empty.set_(copied, tensor.storage_offset(), tensor.shape, tensor.stride())

    def may_turn_const(self, t: Tensor) -> bool:
        """What torch asks about a result that was computed from values: torch's own limit is one number."""
        return bool(super().may_turn_const(t)) or (not self.is_our_fake(t) and self._has_values(t))

    @contextmanager
    def standing_in(self, *values: Any) -> Iterator[tuple[Any, ...]]:
        """Put stand-ins in place of all tensors that values hold, in place; afterwards all is as it was.

        Modules, optimizers, dicts and lists stay the objects that they are, so that whoever else refers to them sees
        the stand-ins as well. What the block adds to them is gone afterwards.

        Yields:
            The values; tensors and tuples are exchanged themselves.
        """
        saved: dict[int, tuple[Any, Any]] = {}
        try:
            with reading():
                yield tuple(self._replaced(value, saved) for value in values)
        finally:
            for container, content in saved.values():
                if isinstance(container, CellType):
                    container.cell_contents = content
                elif isinstance(container, dict):
                    container.clear()
                    container.update(content)
                else:
                    container[:] = content
            self._converter.restore()
            self.close()

    def _replaced(self, value: Any, saved: dict[int, tuple[Any, Any]]) -> Any:
        if value is None or type(value) in _ATOMS:
            return value
        if isinstance(value, Tensor):  # others than strided ones are faked when an operator meets them
            return self.stand_in(value) if value.layout is torch.strided else value
        if isinstance(value, (nn.Module, torch.optim.Optimizer)):
            self._replaced(vars(value), saved)
        elif isinstance(value, (dict, list)) and id(value) not in saved:
            saved[id(value)] = value, value.copy()
            self._replace_items(value, saved)
        elif isinstance(value, FunctionType):
            self._replace_captured(value, saved)
        elif isinstance(value, MethodType):
            self._replaced(vars(value.__self__), saved)
        elif isinstance(value, partial):
            self._replaced([value.func, value.args, value.keywords], saved)
        elif type(value) is tuple or (isinstance(value, tuple) and hasattr(value, "_make")):
            make = getattr(value, "_make", tuple)  # a named tuple's own
            return make(self._replaced(item, saved) for item in value)
        elif isinstance(value, Mapping) and hasattr(value, "__dict__"):  # a UserDict, what tokenizers return
            self._replaced(vars(value), saved)
        return value

    def _replace_items(self, value: dict[Any, Any] | list[Any], saved: dict[int, tuple[Any, Any]]) -> None:
        if isinstance(value, list):
            value[:] = [self._replaced(item, saved) for item in value]
        elif value:  # most of a module's dicts are for hooks that it does not have
            items = [(self._replaced(key, saved), self._replaced(item, saved)) for key, item in value.items()]
            value.clear()
            value.update(items)

    def _replace_captured(self, function: FunctionType, saved: dict[int, tuple[Any, Any]]) -> None:
        for cell in function.__closure__ or ():
            if id(cell) not in saved and cell != CellType():
                saved[id(cell)] = cell, cell.cell_contents
                cell.cell_contents = self._replaced(cell.cell_contents, saved)
        for name in function.__code__.co_names:
            if isinstance(function.__globals__.get(name), nn.Module):
                self._replaced(function.__globals__[name], saved)

    # --------------------------------------------------------------------------------- where data is missing

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator without data."""
        if func in self.results:
            return self.results[func](super().dispatch(func, types, args, kwargs), *args)
        try:
            out = self.instead[func](*args) if func in self.instead else super().dispatch(func, types, args, kwargs)
        except DataDependentOutputException:
            value = known_value(args[0])
            return self.guesses.inside(str(func), args[0].dtype, len(args)) if value is None else value
        except DynamicOutputShapeException:
            self.guesses.note(str(func))
            return self._selection(func, *args)
        note_known(func, args, out)
        return self._counted(out, func, args, kwargs) if func in _COUNTING else out

    def _counted(self, out: Any, func: Any, args: Any, kwargs: Any) -> Any:
        """Positions, and masks of ones or zeros, are known without data."""
        is_known = out.constant is None and out.fake_device == _CPU
        if not is_known or out.numel() > _MOST_COUNTED:
            return out
        with no_dispatch():
            values = func(*args, **(kwargs or {}))
        return self._converter.from_real_tensor(self, values, make_constant=True)

    def _selection(self, func: Any, tensor: Tensor, *others: Tensor) -> Tensor:
        if self._selected_fraction is None or func not in (_aten.nonzero.default, _aten.masked_select.default):
            raise NotSimulatedError(
                CALL,
                got=f"{func} at {Whereabouts().place().line}, whose result's size depends on data",
                expected="sizes that follow from the batch's sizes",
                fix="where masks or nonzero select, pass selected_fraction=1.0 (the worst case) or the share that they "
                "select; pass output_size=... to repeat_interleave; other such operators cannot be estimated.",
            )
        if func is _aten.nonzero.default:
            count = math.ceil(self._selected_fraction * tensor.numel())
            return tensor.new_empty((count, tensor.dim()), dtype=torch.int64)
        shape = torch.broadcast_shapes(tensor.shape, *(mask.shape for mask in others))  # type: ignore[no-untyped-call]
        return tensor.new_empty(math.ceil(self._selected_fraction * math.prod(shape)))


class _Converter(FakeTensorConverter):
    """Fakes tensors that a step finds outside of what was replaced, and remembers whose gradient it may touch."""

    def __init__(self) -> None:
        super().__init__()
        self._gradients: dict[int, tuple[Tensor, Tensor | None]] = {}

    def from_real_tensor(self, fake_mode: FakeTensorMode, t: Tensor, *args: Any, **kwargs: Any) -> FakeTensor:
        if t.requires_grad and t.is_leaf:
            self._gradients.setdefault(id(t), (t, t.grad))
        return super().from_real_tensor(fake_mode, t, *args, **kwargs)

    def from_meta_and_device(
        self, fake_mode: FakeTensorMode, t: Tensor, device: torch.device, pytype: Any = None, dispatch_keys: Any = None
    ) -> FakeTensor:
        """As torch's own, without the memo: its weak reference would forbid to move a module to another device."""
        return FakeTensor(fake_mode, t, device, pytype=pytype, dispatch_keys=dispatch_keys)

    def restore(self) -> None:
        """Give tensors from outside the gradients back that they had."""
        for tensor, gradient in self._gradients.values():
            tensor.grad = gradient
