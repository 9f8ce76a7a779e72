"""Tensors without data: a mode that makes them and answers reads of them, and stand-ins in the user's own objects.

`Tensors` is torch's fake tensor mode for whole steps with concrete sizes: results of repeated operator calls come from
a cache, small integer tensors keep their values, and where a step needs data it gets an answer that is counted.
`StandIns` replaces the tensors of a model, a batch and an optimizer, and restores them afterwards.
"""

from __future__ import annotations

import gc
import math
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import is_dataclass
from functools import cache, partial, wraps
from types import CellType, FunctionType, MethodType, NoneType
from typing import Any, NamedTuple, NoReturn, Self, TypeAlias, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.nn.parameter import is_lazy
from torch.nn.utils.rnn import PackedSequence

from memkit._core.attributes import attributes_of, has_attributes, set_attributes, slots_content
from memkit._core.code import global_names
from memkit._core.errors import InputError, NotSimulatedError, StateError
from memkit._core.installed import is_users_module
from memkit._core.settings import Checker
from memkit._recorder.recorder import StepPosition
from memkit._simulation.dtypes import CHECKED, refuse_dtypes
from memkit._simulation.guesses import KNOWN, Guesses, known_value
from memkit._simulation.leftovers import patched
from memkit._torch import aten
from memkit._torch.dispatch import (
    HigherOrderOperator,
    LeanDispatchMode,
    OpOverload,
    TensorBase,
    keys_of,
    no_dispatch,
    without_modes,
)
from memkit._torch.fake import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorConverter,
    FakeTensorMode,
    attributes_of_user,
    default_device,
    guard_data_pointer,
)
from memkit._torch.graph import current_node
from memkit._torch.operators import schema_of
from memkit._torch.pytree import tree_leaves
from memkit._torch.tensors import MAKE_SUBCLASS, is_view, storage_key, strided_parts

CALL = "a step on tensors without data"  # a placeholder for the user's call, which is not known here
_aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_EMPTY = _aten.empty.memory_format
_UNINITIALIZED = frozenset(
    aten.overloads("empty_like.default", "new_empty.default", "new_empty_strided.default")  # shape functions call them
)
_LOOKING = frozenset(
    {
        aten.local_scalar_dense,
        _aten.alias.default,
        _aten.detach.default,
        _aten.select.int,
        _aten.slice.Tensor,
        _aten.unbind.int,
    }
)
_WITHOUT_FAKES = ((), (Tensor,))  # types at operators on tensors with data; 2.8 detaches twice, and names one then
_FEWEST_MADE = 100_000  # number of remembered tensors above which dead ones are dropped
_CPU = torch.device("cpu")
ON_HOST = "data_on_host"  # attribute of parameters that were moved to a simulated GPU: their previous tensor
DATA_OF: Any = TensorBase.data  # torch's own, which a simulated GPU patches
_COUNTED = ("cpu", "lazy")  # devices of tensors whose values are known without data: lazy is the simulated GPU
_POSITION = 8  # bytes of an index
_BLOCK = 512  # bytes: the sizes of an accelerator's allocator are multiples of it
# Integer tensors of up to this many elements keep their values, so that reads from them (lengths, whether there is
# padding) are true. Those that a step makes without inputs are computed for real, up to the second, smaller limit.
COMPRESSED = frozenset({torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})
_MOST_VALUES, _MOST_COUNTED = 2**20, 1024
_ATOMS = frozenset({bool, int, float, str})
_COUNTING = frozenset(  # operators without inputs, which make tensors with known values
    {
        _aten.arange.default,
        _aten.arange.start,
        _aten.arange.start_step,
        _aten.eye.default,
        _aten.eye.m,
        _aten.full.default,
        _aten.ones.default,
        _aten.zeros.default,
    }
)


_PLAIN = frozenset(
    {bool, int, float, complex, str, NoneType, torch.dtype, torch.device, torch.layout, torch.memory_format}
)
_MOST_RECIPES = 2**15  # some 30 MB
_META = torch.device("meta")
# The number of labels that count depends on their values, and only the backward uses it.
_COUNTS_LABELS = frozenset({_aten.nll_loss_forward.default, _aten.nll_loss2d_forward.default})
_READ_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
Kernels: TypeAlias = Mapping[Any, Callable[..., Any]]


def check_selected_fraction(call: str, fraction: float | None) -> None:
    """Refuse a fraction that masks cannot select.

    Raises:
        ConfigError: It is not in (0, 1].
    """
    if fraction is not None:
        Checker(call).number("selected_fraction", fraction, high=1, above=0)


class Tensors(FakeTensorMode):  # type: ignore[no-untyped-call]  # torch's own class hook
    """A fake tensor mode for whole training steps that answers where a step needs data, and counts the answers.

    torch's own cache of results handles symbolic sizes and all layouts, and dominates the time of a warm run; here all
    sizes are concrete. torch's cache skips every call with a tensor that has values (labels, lengths); but values only
    matter to an operator if it has those of all its tensors, or writes them, or its result's size depends on them.

    Args:
        selected_fraction: The fraction of its elements that a mask is assumed to select; None makes masks an error.
        results: By operator, a function of the shape function's result and the arguments, for kernels of the device
            whose result differs from the shape function's.
        instead: By operator, a function of the arguments, for kernels that accept arguments which the shape function
            rejects.

    Attributes:
        guesses: How often each ``"operator at line"`` was answered without data.
        is_padding: Whether packed rows are being padded: C++ writes their lengths into a new tensor, which has data.
        is_open: Whether its tensors may be used. They have no data, so any use after the run is an error.
    """

    supports_higher_order_operators = True

    def __init__(
        self, selected_fraction: float | None = None, *, results: Kernels | None = None, instead: Kernels | None = None
    ) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.cache_enabled = False  # torch's own cache
        self.is_open, self.is_padding = True, False
        self.guesses = Guesses()
        self.fake_tensor_converter = self.converter = _Converter()
        self.copies = StorageCopies()
        self._results = {**_RESULTS, **(results or {})}
        refused: dict[Any, Callable[..., Any]] = dict.fromkeys(aten.NESTING, _refuse_nesting)
        self._instead = {aten.pack_padded_sequence: self._pack, **refused, **(instead or {})}
        self._selected_fraction = selected_fraction
        self._has_known = False
        self._num_answers = 0  # to operators that asked for data, including those inside other operators
        self._attributes: dict[torch.device, dict[str, Any]] = {}  # initial attributes of a tensor, by device
        # References to storages: a tensor with weak references could not move to another device.
        self._made: list[weakref.ref[torch.UntypedStorage]] = []
        self._most_made = _FEWEST_MADE
        self._stand_ins: dict[int, tuple[Tensor, Tensor]] = {}  # by id() of the original, which is kept alive here

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # a module that copies its layers would otherwise copy the mode with them

    # -------------------------------------------------------------------------------------- life and death

    def survivors(self) -> list[Tensor]:
        """Return the tensors without data that are still alive; scans all objects only if there are any."""
        if all(ref() is None for ref in self._made):
            return []
        return [each for each in gc.get_objects() if issubclass(type(each), FakeTensor) and each.fake_mode is self]

    def close(self) -> None:
        """Release all tensors; any later use of one raises an error."""
        self.is_open = False
        self._stand_ins.clear()
        self._attributes.clear()
        self.copies = StorageCopies()
        self.fake_tensor_converter = self.converter = _Converter()

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

    # ------------------------------------------------------------------------------------------- stand-ins

    @contextmanager
    def standing_in(self, *values: Any, holders: Iterable[object] = ()) -> Iterator[tuple[Any, ...]]:
        """Replace all tensors that values and holders hold by stand-ins; restore them and close the stand-ins.

        Yields:
            The values; see `StandIns`.
        """
        try:
            with StandIns(self.stand_in).put(*values, holders=holders) as replaced:
                yield replaced
        finally:
            self.converter.restore()
            self.close()

    def stand_in(self, tensor: Tensor) -> Tensor:
        """Return a stand-in with the tensor's type, sizes, strides and sharing of storage, on the simulated device."""
        if id(tensor) in self._stand_ins:
            return self._stand_ins[id(tensor)][1]
        if is_lazy(tensor):
            raise InputError(
                CALL,
                got="a model whose parameters have no sizes yet (a lazy module)",
                expected="a model that has run on one batch",
                fix="call model(batch) once first.",
            )
        plain = tensor.detach()
        fake = self.with_values(plain) if has_values(tensor) else self.without_data(plain)
        if isinstance(tensor, nn.Parameter):
            fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
        else:
            fake.requires_grad_(tensor.requires_grad)
        self._note(fake)
        self._stand_ins[id(tensor)] = tensor, fake
        if type(tensor) in (Tensor, nn.Parameter):  # p.decay = 0.1, which the step reads
            vars(fake).update({name: each for name, each in vars(tensor).items() if name not in vars(fake)})
        return fake

    def block_bytes(self, device: torch.device) -> int:
        """Return what the allocator of an accelerator holds for the tensors that have stand-ins here."""
        found = {**self.converter.storages, **self.copies.storages()}
        return sum(-(-num_bytes // _BLOCK) * _BLOCK for where, num_bytes in found.values() if where == device)

    def is_stand_in(self, tensor: Tensor) -> bool:
        """Whether a tensor was made by `stand_in`, so that its memory lives as long as the simulation."""
        return any(made is tensor for _, made in self._stand_ins.values())

    def was_there(self, tensor: Tensor) -> bool:
        """Whether a tensor that a step meets was there before it."""
        return not isinstance(tensor, FakeTensor) or self.is_stand_in(tensor)

    def note_original(self, tensor: Tensor) -> None:
        """Note that an operator reads a tensor that has a stand-in: the optimizer has another one than the loss.

        Raises:
            InputError: It is not on the simulated device.
        """
        _, made = self._stand_ins.get(id(tensor), (None, None))
        if made is None or not _trains(tensor):
            return
        if made.device != tensor.device:
            raise InputError(
                CALL,
                got=f"a loss that reads a trained tensor of shape {tuple(tensor.shape)} through a class, a module or "
                f"another object in which it is not found, so that it stays on {tensor.device}",
                expected="trained tensors in the model, in the loss function, or in variables that it names",
                fix="let the loss function name it: codes = config.codes outside, and codes inside of it.",
            )
        self.guesses.trains_unfound(tensor)

    def without_data(self, tensor: Tensor) -> Tensor:
        """Make a stand-in without data."""
        return self.fake(self.copies.view(tensor, "meta"), _CPU)

    def with_values(self, tensor: Tensor) -> Tensor:
        """Make a stand-in that keeps its values."""
        values = self.copies.view(tensor, "cpu")
        storage, itemsize = values.untyped_storage(), values.dtype.itemsize
        if storage.nbytes() == values.nbytes or storage.nbytes() % itemsize:
            return self.converter.from_real_tensor(self, values, make_constant=True)
        # A view of a fake tensor over the whole storage, so that the whole storage counts.
        whole = torch.empty(0, dtype=values.dtype).set_(storage, 0, (storage.nbytes() // itemsize,), (1,))
        fake = self.converter.from_real_tensor(self, whole, make_constant=True)
        with self:
            return fake.as_strided(values.shape, values.stride(), values.storage_offset())

    def may_turn_const(self, t: Tensor) -> bool:
        """Whether a result computed from values may keep its values; torch's own limit is one number."""
        return bool(super().may_turn_const(t)) or (not self.is_our_fake(t) and has_values(t))

    # -------------------------------------------------------------------------------------------- operators

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and remember the tensors it made; torch calls this for each operator."""
        if func is _DEVICE:  # C++ asks for it, several times in an operator
            return args[0].fake_device if isinstance(args[0], FakeTensor) else args[0].device
        if not self.is_open:
            raise StateError(
                f"{func} on a tensor without data",
                got="a tensor from a finished virtual GPU or estimate, kept by a variable or a cache",
                expected="no use after the simulation: the tensor has a size but no values",
                fix="create the tensor or the model again, and clear the cache that holds it.",
            )
        kwargs = {} if kwargs is None else kwargs
        if isinstance(func, HigherOrderOperator):
            self.guesses.runs_whole(func)
            out = super().dispatch(func, types, args, kwargs)  # type: ignore[arg-type]  # torch passes these too
        else:
            out = self.run(func, types, args, kwargs)
        self._note(out)
        return out

    def run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator without data."""
        if self.guesses.place is not None:
            is_blank = func is _aten.select.int and isinstance(args[0], FakeTensor) and args[0].constant is None
            self.guesses.selected(has_values=not is_blank)
        if func in CHECKED:
            refuse_dtypes(func, args)
        if func in aten.INDEXING and any(map(_is_mask_of_bytes, args[1])):
            args = args[0], [each.bool() if _is_mask_of_bytes(each) else each for each in args[1]], *args[2:]
        if types in _WITHOUT_FAKES and (_looks_into_values(func, args) or (self.is_padding and func is _EMPTY)):
            return func(*args, **kwargs)
        if func in self._results:
            return self._results[func](self._infer(func, types, args, kwargs), *args)
        try:
            out = self._instead[func](*args) if func in self._instead else self._infer(func, types, args, kwargs)
        except DataDependentOutputException:
            value = known_value(args[0])
            self._num_answers += 1
            return self.guesses.inside(str(func), args[0].dtype, len(args)) if value is None else value
        except DynamicOutputShapeException:
            self._num_answers += 1
            return self._selection(func, *args)
        if _writes_to_lists(func):
            increment_version(args[0])
        if self._has_known or func in _FINDING:
            self.note_known(func, args, out)
        return self._counted(out, func, args, kwargs) if func in _COUNTING else out

    def create_symbolic_nested_int(self, *, nt_tensor_id: int | None = None) -> NoReturn:  # noqa: ARG002 - torch's
        """Refuse a jagged tensor that the step makes: torch would need symbols for its lengths."""
        _refuse_nesting()

    def note_known(self, func: Any, args: Sequence[Any], out: Any) -> None:
        """Remember that an operator's result is known, given that all numbers are finite."""
        value = _value(func, args) if isinstance(out, FakeTensor) else None
        if value is not None:
            setattr(out, KNOWN, value)
            self._has_known = True

    def _counted(self, out: Any, func: Any, args: Any, kwargs: Any) -> Any:
        """Attach values to positions and to masks of ones or zeros, which are known without data."""
        is_known = out.constant is None and out.fake_device.type in _COUNTED
        if not is_known or out.numel() > _MOST_COUNTED:
            return out
        with no_dispatch():
            values = func(*args, **{**kwargs, "device": _CPU})
        return self.known(out, values)

    def known(self, fake: Any, constant: Tensor) -> Tensor:  # noqa: ARG002 - a card's tensor stays
        """Return a tensor without data as one with values; views of the values share its storage."""
        return self.converter.from_real_tensor(self, constant, make_constant=True)

    def _pack(self, x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001 - torch's
        """Pack padded rows of known lengths; the number of rows at each step has data, since C++ reads it."""
        known = known_values(lengths)
        if lengths.device.type != "cpu":
            raise RuntimeError(
                f"'lengths' argument should be a 1D CPU int64 tensor, but got {lengths.dim()}D {lengths.device} Long "
                "tensor"
            )
        if known is None:
            raise DynamicOutputShapeException(aten.pack_padded_sequence)
        self.guesses.num_true += 1
        with no_dispatch():
            places = torch.empty((*x.shape[:2], 1), dtype=torch.uint8)
            rows, num_rows = aten.pack_padded_sequence(places, known, batch_first)
        return x.new_empty((len(rows), *x.shape[2:])), num_rows

    def _selection(self, func: Any, tensor: Tensor, *others: Tensor) -> Tensor:
        mask = others[0] if func is _aten.masked_select.default else None
        if mask is not None and known_values(mask) is not None:
            self.guesses.num_true += 1
            return tensor.new_empty(num_selected(mask, selected_shape(tensor, mask)))
        if func is _aten.nonzero.default and (known := known_values(tensor)) is not None:
            self.guesses.num_true += 1
            with no_dispatch():
                places = known.nonzero()
            return self.known(tensor.new_empty(places.shape, dtype=places.dtype), places)
        self.guesses.note(str(func))
        if self._selected_fraction is None or func not in (_aten.nonzero.default, _aten.masked_select.default):
            raise NotSimulatedError(
                CALL,
                got=f"{func} at {StepPosition().place().line}, whose result's size depends on data",
                expected="sizes that depend only on the sizes of the batch",
                fix="for masks and nonzero, pass selected_fraction=1.0 (the worst case) or the fraction that they "
                "select; pass output_size=... to repeat_interleave; give pack_padded_sequence lengths that come with "
                "the batch; other such operators cannot be estimated.",
            )
        if func is _aten.nonzero.default:
            return tensor.new_empty((self.num_assumed(tensor.numel()), tensor.dim()), dtype=torch.int64)
        return tensor.new_empty(self.num_assumed(math.prod(selected_shape(tensor, *others))))

    def num_assumed(self, number: int) -> int:
        """Return how many of so many elements an unknown mask is assumed to select: all, unless a fraction is given."""
        if self._selected_fraction is None:
            return number
        self.guesses.selected_fraction = self._selected_fraction
        return math.ceil(self._selected_fraction * number)

    # --------------------------------------------------------------------------------- what operators make

    def _infer(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Return an operator's result by torch's shape function, which runs once for the same arguments."""
        if func is aten.to_copy and "layout" in kwargs and kwargs.get("device") == _META:
            # C++ adds a tangent of zeros by copying the other tensor to the device that it finds; there it is this one.
            kwargs = {**kwargs, "device": args[0].device}
        key = self._key(func, args, kwargs)
        if key is None:
            return self._infer_anew(func, types, args, kwargs)
        recipe = _recipes.get(key)
        if recipe is not None:
            return self.again(recipe, func, args, kwargs)
        num_answers = self._num_answers
        out: Any = super().dispatch(func, types, args, kwargs)
        if func in _COUNTS_LABELS:
            out[1].constant = None
        is_certain = self._num_answers == num_answers  # otherwise its size may depend on an answer without data
        recipe = self._recipe_of(out, args, kwargs) if is_certain and _may_be_kept(func) else None
        if recipe is not None:
            if len(_recipes) >= _MOST_RECIPES:
                _recipes.clear()
            _recipes[key] = recipe
        return out

    def _infer_anew(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Return an operator's result where that depends on more than a key can hold, such as values."""
        if self._counts_up(func, args, kwargs):
            return args[0]
        if func in _UNINITIALIZED and args[0].constant is not None:  # its result's values are anything
            known, args[0].constant = args[0].constant, None
            try:
                return self._infer(func, types, args, kwargs)
            finally:
                args[0].constant = known
        out: Any = super().dispatch(func, types, args, kwargs)
        given = [each for each in tree_leaves(args) if isinstance(each, FakeTensor)]
        if not all(each.constant is not None for each in given):
            self.forget_written(func, args)
        if any(each.layout in COMPRESSED for each in given):
            self.guesses.unsized(str(func))  # its kernels convert, into tensors of their own
        if isinstance(out, FakeTensor) and out.layout is torch.sparse_coo:
            return self._sparse(func, args, out)
        for each in tree_leaves(out):
            _take_storage_of_values(each)
        self.guesses.num_true += _reads_values(func, args)  # without values it raises an error
        return out

    def forget_written(self, func: Any, args: Sequence[Any]) -> None:
        """Forget the values of tensors in lists that an operator writes into; of single tensors torch does so."""
        schema = schema_of(func)
        for argument, value in zip(schema.arguments, args, strict=False) if schema.is_mutable else ():
            if isinstance(value, (list, tuple)) and argument.alias_info is not None and argument.alias_info.is_write:
                for each in value:
                    if isinstance(each, FakeTensor) and each.constant is not None:
                        self.converter.invalidate_constant_aliases(each.constant)

    def again(self, recipe: _Recipe, func: Any, args: Any, kwargs: Any) -> Any:  # noqa: ARG002 - a test compares them
        """Make an operator's result again from its recipe."""
        return self._follow(recipe, args)

    def _sparse(self, func: Any, args: Any, out: Tensor) -> Tensor:
        """Return a sparse result with as many entries as it has with data; the shape function's often has none."""
        if func is _aten.clone.default:
            return _cloned_entries(args[0])
        given = [each for each in tree_leaves(args) if isinstance(each, Tensor) and each.layout is out.layout]
        if _num_entries(out) < sum(map(_num_entries, given)):
            self.guesses.unsized(str(func))
        return out

    def _counts_up(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Add a number to a known tensor in place, as layers that count their batches do; torch would copy it."""
        is_known = func is _aten.add_.Tensor and isinstance(args[0], FakeTensor) and args[0].constant is not None
        if not is_known or type(args[1]) is not int:
            return False
        with no_dispatch():
            args[0].constant.add_(args[1], **kwargs)
        return True

    def _key(self, func: Any, args: Any, kwargs: Any) -> tuple[object, ...] | None:
        """Return the cache key of a result; None if the result depends on more than a key can hold."""
        key: list[object] = [
            type(self),  # results are shared by all modes of a class
            func,
            torch.get_default_dtype(),
            default_device(),
            torch.is_inference_mode_enabled(),
            torch.backends.cudnn.enabled,  # which chooses the order of a convolution's dimensions
            *kwargs,
        ]
        has_values: set[bool] = set()
        if not self._add(key, args, has_values) or not self._add(key, kwargs.values(), has_values):
            return None
        if True in has_values and (
            False not in has_values or schema_of(func).is_mutable or not _READ_VALUES.isdisjoint(func.tags)
        ):
            return None
        return tuple(key)

    def _add(self, key: list[object], arguments: Iterable[object], has_values: set[bool]) -> bool:
        """Add arguments to a key, and whether tensors have values to a set; return whether they can be in a key."""
        for argument in arguments:
            kind = type(argument)
            if kind in _PLAIN:
                key += kind, argument  # 1 and 1.0 are equal, but their results are not
            elif isinstance(argument, FakeTensor):
                if argument.fake_mode is not self or argument.layout is not torch.strided:
                    return False
                has_values.add(argument.constant is not None)
                key += (
                    argument.dtype,
                    argument.shape,
                    argument.stride(),
                    argument.storage_offset(),
                    argument.untyped_storage().nbytes(),
                    argument.fake_device,
                    argument.requires_grad,
                    argument.is_conj(),
                    argument.is_neg(),
                    argument.is_inference(),
                )
            elif isinstance(argument, (list, tuple)):
                key += kind, len(argument)
                if not self._add(key, argument, has_values):
                    return False
            else:
                return False
        return True

    def _recipe_of(self, out: Any, args: Any, kwargs: Any) -> _Recipe | None:
        """Return a recipe that makes a result again; None if there is none."""
        if out is None or type(out) is bool:
            return _Plain(out)
        if isinstance(out, (tuple, list)):
            recipes = [self._recipe_of(each, args, kwargs) for each in out]
            known = tuple(each for each in recipes if each is not None)
            new = [_storage_of(each) for each, recipe in zip(out, recipes, strict=True) if _is_new(recipe)]
            is_known = len(known) == len(recipes) and len(set(new)) == len(new)
            return _Several(list if isinstance(out, list) else tuple, known) if is_known else None
        if not isinstance(out, FakeTensor) or out.constant is not None or out.layout is not torch.strided:
            return None
        given = [index for index, arg in enumerate(args) if arg is out]
        return _Given(given[0]) if given else self._recipe_of_one(out, args, kwargs)

    def _recipe_of_one(self, out: FakeTensor, args: Any, kwargs: Any) -> _Made | None:
        storage = _storage_of(out)
        bases = [index for index, arg in enumerate(args) if _storage_of(arg) == storage]
        others = [arg for arg in args if not isinstance(arg, Tensor)]
        if len(bases) > 1 or storage in map(_storage_of, tree_leaves((others, kwargs))):
            return None  # the storage that it views may depend on other arguments
        base = bases[0] if bases else None
        made = _Made(tuple(out.shape), out.stride(), out.dtype, out.fake_device, int(out.storage_offset()), base)
        return made if _unlike(self._follow(made, args)) == _unlike(out) else None

    def _follow(self, recipe: _Recipe, args: Sequence[Any]) -> Any:
        if isinstance(recipe, _Made):
            with no_dispatch():
                elem = torch.empty_strided(recipe.shape, recipe.stride, dtype=recipe.dtype, device=_META)
                if recipe.base is not None:
                    elem.set_(args[recipe.base].untyped_storage(), recipe.offset, recipe.shape, recipe.stride)
            return self.fake(elem, recipe.device)
        if isinstance(recipe, _Given):
            return args[recipe.position]
        if isinstance(recipe, _Several):
            return recipe.kind([self._follow(each, args) for each in recipe.items])
        return recipe.value

    def fake(self, elem: Tensor, device: torch.device) -> Tensor:
        """Make a fake tensor from a meta tensor, as `FakeTensor` does, but without its slow checks."""
        attributes = self._attributes.get(device)
        if attributes is None:
            fake = FakeTensor(self, elem, device)
            self._attributes[device] = vars(fake).copy()
            return fake
        make = getattr(Tensor, MAKE_SUBCLASS)
        made: Tensor = make(FakeTensor, elem, dispatch_device=True, device_for_backend_keys=device)
        guard_data_pointer(made)
        vars(made).update(attributes)
        return made


class _Made(NamedTuple):
    """A tensor that an operator made: new, or a view of its argument number ``base``."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int
    base: int | None


class _Given(NamedTuple):
    """The argument that an operator returned."""

    position: int


class _Plain(NamedTuple):
    value: bool | None


class _Several(NamedTuple):
    kind: type
    items: tuple[_Recipe, ...]


_Recipe: TypeAlias = _Made | _Given | _Plain | _Several
_recipes: dict[tuple[object, ...], _Recipe] = {}  # one cache per process, like torch's own


def _may_be_kept(func: Any) -> bool:
    """Whether an operator only makes its result and has no known side effects."""
    is_known = type(func) is OpOverload and func.namespace in ("aten", "prims", "prim")
    return is_known and torch.Tag.inplace_view not in func.tags


def _is_new(recipe: _Recipe | None) -> bool:
    return isinstance(recipe, _Made) and recipe.base is None


def _storage_of(value: Any) -> int | None:
    is_dense = isinstance(value, FakeTensor) and value.layout is torch.strided
    return storage_key(value.untyped_storage()) if is_dense else None


def _unlike(tensor: Tensor) -> tuple[object, ...]:
    """Return the properties of a tensor that `_Made` does not describe."""
    return tensor.untyped_storage().nbytes(), tensor.storage_offset(), tensor.requires_grad, keys_of(tensor)


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor is a scalar (an optimizer's step count) or a small integer tensor, whose values matter."""
    limit = 1 if tensor.dtype.is_floating_point or tensor.dtype.is_complex else _MOST_VALUES
    return (
        tensor.layout is torch.strided
        and not tensor.requires_grad
        and tensor.device == _CPU
        and tensor.untyped_storage().nbytes() <= limit * tensor.dtype.itemsize
    )


def known_values(tensor: Tensor) -> Tensor | None:
    """Return a tensor with the values; None if they are not known."""
    known: Tensor | None = tensor.constant if isinstance(tensor, FakeTensor) else tensor
    return known


def num_selected(mask: Tensor, shape: Sequence[int]) -> int:
    """Return how many elements of a shape a mask selects: as many as assumed, if its values are not known."""
    known = known_values(mask)
    if known is None:
        number, mode = math.prod(shape), mask.fake_mode if isinstance(mask, FakeTensor) else None
        return mode.num_assumed(number) if isinstance(mode, Tensors) else number
    with no_dispatch():
        return int(torch.count_nonzero(known.expand(shape)))


def selected_shape(tensor: Tensor, mask: Tensor) -> torch.Size:
    """Return the shape in which `masked_select` and `masked_scatter` see both."""
    shape: torch.Size = torch.broadcast_shapes(tensor.shape, mask.shape)  # type: ignore[no-untyped-call]
    return shape


def masks_bytes(indices: Iterable[Tensor | None]) -> list[int]:
    """Return the bytes of the positions that a kernel looks up first for each mask among its indices."""
    return [num_selected(mask, mask.shape) * mask.dim() * _POSITION for mask in indices if is_mask(mask)]


def is_mask(index: Tensor | None) -> TypeGuard[Tensor]:
    """Whether an index is a mask."""
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _reads_values(func: Any, args: Sequence[Any]) -> bool:
    """Whether an operator's result, or its size, depends on values; places to take do not change the size."""
    if func is _aten.index.Tensor:
        return any(map(is_mask, args[1]))
    return not _READ_VALUES.isdisjoint(func.tags)


def _looks_into_values(func: Any, args: Sequence[Any]) -> bool:
    """Whether an operator reads or indexes a tensor with data that is small enough to keep its values."""
    return func in _LOOKING and isinstance(args[0], Tensor) and has_values(args[0])


# ------------------------------------------------------------------------- what shape functions do not say


def _reduced_in_place(out: Tensor, x: Tensor, target: Tensor, *options: Any) -> Tensor:
    """Correct losses that are reduced in place: the scalar is in a storage as large as all losses."""
    reduction = next((option for option in options if isinstance(option, int)), _MEAN)
    if reduction not in (_MEAN, _SUM):
        return out
    return torch.empty_like(x + target).as_strided((), ())


def _layer_norm_backward(out: tuple[Tensor | None, ...], _: Tensor, x: Tensor, *args: Any) -> tuple[Tensor | None, ...]:
    """Make the input's gradient contiguous whatever the incoming strides; weight gradients have their own dtypes."""
    weights = args[3:5]  # torch 2.8's shape function gives their gradients the dtype of the input
    typed = (each if each is None else each.to(like.dtype) for each, like in zip(out[1:], weights, strict=True))
    return (None if out[0] is None else x.new_empty(x.shape)), *typed


def _contiguous(out: Tensor, *_: Any) -> Tensor:
    """Make a gradient contiguous whatever the layout of the arguments."""
    return out.new_empty(out.shape)


def _in_layout_of_both(out: Tensor, gradient: Tensor, *args: Any) -> Tensor:
    """Lay out an elementwise result by the incoming gradient first; the shape function begins with the other tensor."""
    x = next(each for each in args if isinstance(each, Tensor))
    if gradient.stride() == x.stride():
        return out
    return torch.empty_like(gradient + x, dtype=out.dtype)


def _bag_gradient(out: Tensor, gradient: Tensor, indices: Tensor, *_: Any) -> Tensor:
    """Give a sparse gradient an entry for each index; the shape function's has none."""
    if out.layout is torch.strided:
        return out
    return _entries(indices.view(1, -1), gradient.new_empty((len(indices), gradient.shape[1])), out.shape)


def _take_storage_of_values(out: Any) -> None:
    """Make a result as long as its storage is with data: `unique_consecutive` returns the head of a longer one."""
    if isinstance(out, FakeTensor) and out.constant is not None and not is_view(out.constant):
        num_bytes = out.constant.untyped_storage().nbytes()
        if num_bytes > out.untyped_storage().nbytes():
            with no_dispatch():
                out.untyped_storage().resize_(num_bytes)


def _cloned_entries(tensor: Tensor) -> Tensor:
    """Clone a sparse tensor; without dispatch modes a parameter would take over its first gradient instead."""
    indices, values = strided_parts(tensor)
    node = current_node()
    if node is None or "AccumulateGrad" not in node.name():
        indices, values = indices.clone(), values.clone()
    return _entries(indices, values, tensor.shape)


def _entries(indices: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)


def _num_entries(tensor: Tensor) -> int:
    return len(strided_parts(tensor)[1])


_MEAN, _SUM = 1, 2  # at::Reduction
_RESULTS: Kernels = {  # on all devices
    **dict.fromkeys(
        aten.overloads(
            "binary_cross_entropy.default", "mse_loss.default", "smooth_l1_loss.default", "soft_margin_loss.default"
        ),
        _reduced_in_place,
    ),
    **dict.fromkeys(
        aten.overloads(
            "mse_loss_backward.default",
            "smooth_l1_loss_backward.default",
            "huber_loss_backward.default",
            "_log_softmax_backward_data.default",
        ),
        _contiguous,
    ),
    **dict.fromkeys(
        aten.overloads(
            *("elu_backward.default", "hardsigmoid_backward.default", "hardswish_backward.default"),
            *("hardtanh_backward.default", "softplus_backward.default"),
        ),
        _in_layout_of_both,
    ),
    **dict.fromkeys(aten.overloads("native_layer_norm_backward.default"), _layer_norm_backward),
    **dict.fromkeys(aten.overloads("_embedding_bag_backward.default"), _bag_gradient),
}


def is_matrix(tensor: Tensor) -> bool:
    """Whether rows or columns are contiguous, so that BLAS takes the matrix without a copy."""
    (num_rows, num_columns), (down, right) = tensor.shape[-2:], tensor.stride()[-2:]
    return (right == 1 and down >= num_columns) or (down == 1 and right >= num_rows)


def pads_packed(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's function that pads packed rows, for rows without data too."""

    @wraps(original)
    def pad_packed(data: Tensor, *args: Any) -> Any:
        mode = data.fake_mode if isinstance(data, FakeTensor) else None
        if not isinstance(mode, Tensors):
            return original(data, *args)
        mode.is_padding = True
        try:
            return original(data, *args)
        finally:
            mode.is_padding = False

    return pad_packed


def makes_one_hot(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return torch's `one_hot`, with the operators that tensors with data take; for others torch has a second way."""

    @cache
    def checks() -> list[Callable[[Tensor], Any]]:  # of the labels, on the host
        seen = _Looks()
        with without_modes(), seen:
            original(torch.zeros(1, dtype=torch.int64, device=_CPU), 1)
        return seen.operators

    @wraps(original)
    def one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
        is_blank = isinstance(tensor, FakeTensor) and tensor.dtype is torch.int64 and tensor.numel() > 0
        if not is_blank or type(num_classes) is not int or num_classes < 1:
            return original(tensor, num_classes)
        for check in checks() if tensor.device == _CPU else ():
            check(tensor)
        zeros = torch.zeros((*tensor.shape, num_classes), dtype=tensor.dtype, device=tensor.device)
        return zeros.scatter_(-1, tensor.unsqueeze(-1), 1)

    return one_hot


def keeps_parameters(original: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Return torch's function that converts a module, `module.to(...)`, so that parameters without data are set too.

    torch sets ``parameter.data``, whatever holds the parameter. One without data it swaps for another, even if nothing
    is converted, and refuses to do so if a graph or a weak reference holds it.
    """

    @wraps(original)
    def converted(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        swap = torch.utils.swap_tensors

        def set_or_swap(tensor: Tensor, other: Tensor) -> None:
            is_blank = isinstance(tensor, FakeTensor) and isinstance(other, FakeTensor)
            (set_data if is_blank and tensor.device == other.device else swap)(tensor, other)

        with patched(torch.utils, "swap_tensors", set_or_swap):
            return original(module, *args, **kwargs)

    return converted


def copy_without_data(self: Tensor, memo: dict[int, Any]) -> Tensor:
    """Implement ``copy.deepcopy`` of a tensor without data; torch's own reads its data."""
    if id(self) not in memo:
        copy = self.detach().clone()
        new = memo[id(self)] = nn.Parameter(copy) if isinstance(self, nn.Parameter) else copy
        new.requires_grad_(self.requires_grad)
        if self.grad is not None:
            new.grad = copy_without_data(self.grad, memo)
        given = {name: each for name, each in attributes_of_user(self).items() if name != ON_HOST}
        vars(new).update(deepcopy(given, memo))
    made: Tensor = memo[id(self)]
    return made


def set_data(tensor: Tensor, value: Tensor) -> None:
    """Do the same as ``tensor.data = value``, for two tensors on one device."""
    DATA_OF.__set__(tensor, value)
    if isinstance(tensor, FakeTensor):
        tensor.constant = getattr(value, "constant", None)


class _Looks(LeanDispatchMode):
    """Lists the operators of a call that look at a whole tensor and at nothing else, such as its largest number."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[Callable[[Tensor], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if len(args) == 1 and isinstance(args[0], Tensor) and args[0].dim():
            self.operators.append(func)
        return func(*args, **(kwargs or {}))


def _is_mask_of_bytes(index: Any) -> bool:
    """Whether an index is a mask as it was before `torch.bool`, which kernels take and shape functions refuse."""
    return isinstance(index, Tensor) and index.dtype is torch.uint8


def _refuse_nesting(*_: object) -> NoReturn:
    raise NotSimulatedError(
        CALL,
        got=f"a nested tensor made from others at {StepPosition().place().line}",
        expected="jagged tensors that come with the batch",
        fix="make it with the batch, as in collate_fn: torch.nested.nested_tensor(samples, layout=torch.jagged); pad "
        "instead of nesting (nn.TransformerEncoder(layer, n, enable_nested_tensor=False)); or watch a real step with "
        "mk.Tracker().",
    )


@cache
def _writes_to_lists(func: Any) -> bool:
    """Whether an operator writes to lists of tensors: their versions are counted by its kernels, not by autograd."""
    return bool(schema_of(func).name.startswith("aten::_foreach_") and schema_of(func).is_mutable)


class _Converter(FakeTensorConverter):
    """Fakes tensors that a step finds outside the replaced objects, and remembers gradients it may touch."""

    def __init__(self) -> None:
        super().__init__()
        self._gradients: dict[int, tuple[Tensor, Tensor | None]] = {}
        self.storages: dict[int, tuple[torch.device, int]] = {}  # device and bytes of those with data, by address

    def from_real_tensor(self, fake_mode: FakeTensorMode, t: Tensor, *args: Any, **kwargs: Any) -> FakeTensor:
        if _trains(t):
            if isinstance(fake_mode, Tensors):
                fake_mode.note_original(t)
            self._gradients.setdefault(id(t), (t, t.grad))
        if t.layout is torch.strided and not (t.is_cpu or t.is_meta):
            storage = t.untyped_storage()
            self.storages[storage_key(storage)] = t.device, storage.nbytes()
        if t.dtype is torch.bool and has_values(t):  # a mask on the host beside tensors of the card
            kwargs["make_constant"] = True
        if t.is_leaf:
            return super().from_real_tensor(fake_mode, t, *args, **kwargs)
        with warnings.catch_warnings():  # torch looks for a gradient of this one too
            warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf", UserWarning)
            return super().from_real_tensor(fake_mode, t, *args, **kwargs)

    def invalidate_constant_aliases(self, tensor: Tensor) -> None:
        """Forget the values of other tensors in the same storage, which a sparse one does not have."""
        if tensor.layout is torch.strided:
            super().invalidate_constant_aliases(tensor)

    def from_meta_and_device(
        self, fake_mode: FakeTensorMode, t: Tensor, device: torch.device, pytype: Any = None, dispatch_keys: Any = None
    ) -> FakeTensor:
        """Convert as torch does, but without the memo, whose weak reference would keep a module from moving devices."""
        return FakeTensor(fake_mode, t, device, pytype=pytype, dispatch_keys=dispatch_keys)

    def restore(self) -> None:
        """Restore the gradients of tensors from outside."""
        for tensor, gradient in self._gradients.values():
            tensor.grad = gradient


# ------------------------------------------------------------------------------- whether numbers are finite
#
# Code checks for NaN or infinite numbers to stop a training run that has failed. A simulated run has not failed.

_IS_FINITE = {_aten.isnan.default: 0, _aten.isinf.default: 0, _aten.isposinf.default: 0, _aten.isneginf.default: 0}
_COMPARED = {_aten.eq.Tensor: 1, _aten.ne.Tensor: 0}  # with itself: only NaN is not equal to itself
_WITH_INFINITY = {_aten.eq.Scalar: 0, _aten.ne.Scalar: 1}
_NEGATED = {_aten.logical_not.default, _aten.bitwise_not.default}
_SUMMED = {_aten.sum.default, _aten.count_nonzero.default}
_OR = {_aten.logical_or.default, _aten.bitwise_or.Tensor, _aten.maximum.default}
_AND = {_aten.logical_and.default, _aten.bitwise_and.Tensor, _aten.minimum.default, _aten.mul.Tensor}
_KEPT = {
    aten.is_any_true, aten.is_all_true,  # called by anomaly detection
    _aten.any.default, _aten.any.dim, _aten.any.dims, _aten.all.default, _aten.all.dim, _aten.all.dims,
    _aten.max.default, _aten.min.default, _aten.amax.default, _aten.amin.default, _aten.mean.default,
    aten.to_copy, _aten.clone.default, _aten.detach.default, _aten.alias.default,
    _aten.view.default, _aten.expand.default, _aten.squeeze.default, _aten.squeeze.dim,
    _aten.unsqueeze.default, _aten.select.int, _aten.slice.Tensor, _aten.t.default, _aten.transpose.int,
}  # fmt: skip
_FINDING = frozenset({*_IS_FINITE, *_COMPARED, *_WITH_INFINITY})  # known even if their inputs are not


def _value(func: Any, args: Sequence[Any]) -> float | None:
    if func in _IS_FINITE:
        return _IS_FINITE[func]
    if func in _COMPARED:
        return _COMPARED[func] if args[0] is args[1] else None
    if func in _WITH_INFINITY:
        return _WITH_INFINITY[func] if isinstance(args[1], float) and math.isinf(args[1]) else None
    known: list[float] = [value for value in map(known_value, args[:2]) if value is not None]
    if not known:
        return None
    if func in _NEGATED:
        return float(not known[0])
    if func in _SUMMED:
        return known[0] * int(args[0].numel())
    if func in _OR or func in _AND:
        decides = max(known) == 1 if func in _OR else min(known) == 0
        both = max(known) if func in _OR else min(known)
        return both if decides or len(known) > 1 else None
    return known[0] if func in _KEPT else None


# -------------------------------------------------------------------------------- in the user's objects


class StorageCopies:
    """Copies of whole storages: tensors that shared a storage share its copy."""

    def __init__(self) -> None:
        # By id() of the original, which is kept alive here, and the device of the copy.
        self._copies: dict[tuple[int, str], tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def view(self, tensor: Tensor, device: str) -> Tensor:
        """Return the same view of a copy of the whole storage; on the meta device the copy is empty."""
        storage = tensor.untyped_storage()
        with torch.no_grad():
            if (id(storage), device) not in self._copies:
                all_bytes = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                copy = torch.empty_like(all_bytes, device=device)
                if device == "cpu":
                    copy.copy_(all_bytes)
                self._copies[id(storage), device] = storage, copy.untyped_storage()
            copied = self._copies[id(storage), device][1]
            empty = torch.empty(0, dtype=tensor.dtype, device=device)
            return empty.set_(copied, tensor.storage_offset(), tensor.shape, tensor.stride())

    def storages(self) -> dict[int, tuple[torch.device, int]]:
        """Return device and bytes of the originals, by address."""
        originals = [original for original, _ in self._copies.values()]
        return {storage_key(original): (original.device, original.nbytes()) for original in originals}


def holds_values(value: object) -> bool:
    """Return whether an object may be a batch that holds its values as attributes.

    Such an object is a UserDict, as tokenizers return, a dataclass, or one that moves itself to a device, as PyG's
    `Data` does.
    """
    return isinstance(value, Mapping) or is_dataclass(value) or callable(getattr(type(value), "to", None))


class StandIns:
    """Replaces the tensors that the user's objects hold.

    Modules, optimizers, dicts and lists keep their identity, so that everything that refers to them also sees the
    stand-ins. Anything added to them in the meantime is removed afterwards.

    Args:
        make: Makes the stand-in for a tensor; returns the same one for the same tensor.
    """

    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        self._make = make
        self._saved: dict[int, tuple[Any, Any]] = {}
        self._globals: list[tuple[dict[str, Any], str, object]] = []
        self._functions: dict[int, tuple[FunctionType, tuple[Any, ...] | None]] = {}  # by `id`, with their defaults

    @contextmanager
    def put(self, *values: Any, holders: Iterable[object] = ()) -> Iterator[tuple[Any, ...]]:
        """Replace the tensors within the block.

        Args:
            values: Modules, optimizers, functions, and batches in any nesting.
            holders: Other objects, whose attributes are replaced whatever their class is.

        Yields:
            The values; tensors and tuples themselves are replaced.
        """
        try:
            replaced = tuple(map(self._replaced, values))
            for each in holders:
                self._replace_attributes(each)
            yield replaced
        finally:
            for variables, name, value in self._globals:
                variables[name] = value
            for function, defaults in self._functions.values():
                if function.__defaults__ is not defaults:
                    function.__defaults__ = defaults
            for container, content in self._saved.values():
                if isinstance(container, CellType):
                    container.cell_contents = content
                elif isinstance(container, dict):
                    container.clear()
                    container.update(content)
                elif isinstance(container, list):
                    container[:] = content
                else:
                    set_attributes(container, content)

    def _replaced(self, value: Any) -> Any:
        if value is None or type(value) in _ATOMS:
            return value
        if isinstance(value, Tensor):  # tensors that are not strided are faked when an operator meets them
            return self._make(value) if value.layout is torch.strided and not value.is_nested else value
        if isinstance(value, (nn.Module, torch.optim.Optimizer)):
            self._replaced(vars(value))
        elif isinstance(value, (dict, list)) and id(value) not in self._saved:
            self._saved[id(value)] = value, value.copy()
            self._replace_items(value)
        elif isinstance(value, FunctionType):
            self._replace_captured(value)
        elif isinstance(value, MethodType):
            self._replace_attributes(value.__self__)
        elif isinstance(value, partial):
            self._replaced([value.func, value.args, value.keywords])
        elif type(value) is tuple or (isinstance(value, tuple) and hasattr(value, "_make")):
            make = getattr(value, "_make", tuple)  # a named tuple's own
            known = value.batch_sizes if isinstance(value, PackedSequence) else None  # which C++ reads on the host
            return make(item if item is known else self._replaced(item) for item in value)
        elif not isinstance(value, (type, dict, list)) and holds_values(value) and has_attributes(value):
            self._replace_attributes(value)
        return value

    def _replace_attributes(self, value: Any) -> None:
        in_slots = {} if isinstance(value, nn.Module) else slots_content(value)
        if in_slots and id(value) not in self._saved:
            self._saved[id(value)] = value, attributes_of(value)
            set_attributes(
                value, attributes_of(value) | {name: self._replaced(each) for name, each in in_slots.items()}
            )
        if hasattr(value, "__dict__"):
            self._replaced(vars(value))

    def _replace_items(self, value: dict[Any, Any] | list[Any]) -> None:
        if isinstance(value, list):
            value[:] = [self._replaced(item) for item in value]
        elif value:  # most of a module's dicts are empty dicts of hooks
            items = [(self._replaced(key), self._replaced(item)) for key, item in value.items()]
            value.clear()
            value.update(items)

    def _replace_captured(self, function: FunctionType) -> None:
        """Replace what a function captures: of a script's globals those that train, as others may be anything."""
        if id(function) in self._functions:
            return
        self._functions[id(function)] = function, function.__defaults__
        if _trains(function.__defaults__):
            function.__defaults__ = self._replaced(function.__defaults__)
        if _trains(function.__kwdefaults__):
            self._replaced(function.__kwdefaults__)
        for cell in function.__closure__ or ():
            if id(cell) not in self._saved and cell != CellType():
                self._saved[id(cell)] = cell, cell.cell_contents
                cell.cell_contents = self._replaced(cell.cell_contents)
        for name in global_names(function.__code__):
            self._replace_global(function.__globals__, name)

    def _replace_global(self, variables: dict[str, Any], name: str) -> None:
        value = variables.get(name)
        if isinstance(value, FunctionType):
            if is_users_module(sys.modules.get(value.__module__)):
                self._replace_captured(value)
        elif isinstance(value, nn.Module):
            self._replaced(value)
        elif _trains(value):
            self._globals.append((variables, name, value))
            variables[name] = self._replaced(value)


def _trains(value: object) -> bool:
    """Return whether a value is, or a container holds, a leaf that needs a gradient."""
    if isinstance(value, Tensor):
        return value.requires_grad and value.is_leaf
    if isinstance(value, dict):
        return any(map(_trains, value.values()))
    return isinstance(value, (list, tuple)) and any(map(_trains, value))
