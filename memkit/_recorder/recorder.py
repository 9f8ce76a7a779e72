"""Recorder of storage lifetimes, on real or fake tensors, with the place each storage was created.

All memory tracking in memkit builds on it. Its design and its limits: `docs/explanation-recorder.md`.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from operator import attrgetter, eq
from pathlib import Path
from threading import get_ident
from types import CodeType, FrameType
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parameter import Parameter, is_lazy
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memkit._core.errors import StateError
from memkit._recorder.recording import (
    Category,
    IntArray,
    Label,
    Recording,
    StepPhase,
    encoded,
    lifetimes,
    resolve_categories,
)
from memkit._torch.compiler import eagerly, is_loaded
from memkit._torch.dispatch import (
    LeanDispatchMode,
    OpOverload,
    is_traceable_wrapper_subclass_type,
    mode_at,
    num_modes,
    pop_mode,
    push_mode,
)
from memkit._torch.graph import ENGINE, current_backward, current_node, next_sequence_number, sequence_number
from memkit._torch.modules import buffers_of, parameters_of
from memkit._torch.operators import kernel_of
from memkit._torch.pytree import tree_leaves
from memkit._torch.storage import is_dense, storage_use_count
from memkit._torch.tensors import is_zero_tensor, leaf_gradient, storage_key, strided_parts, use_count

_aten = torch.ops.aten
ADD = _aten.add.Tensor
# Operators that autograd's AccumulateGrad node calls to store a gradient in `.grad`.
ACCUMULATIONS = frozenset({_aten.detach.default, _aten.clone.default, _aten.add_.Tensor, ADD})
# Backward formulas write into fresh zeros. Under a dispatch mode they call the out-of-place variants.
FILLS = frozenset({_aten.new_zeros.default, _aten.zeros.default, _aten.zeros_like.default})
WRITES = frozenset(
    {
        _aten.scatter.src,
        _aten.scatter.value,
        _aten.scatter_add.default,
        _aten.index_add.default,
        _aten.index_put.default,
        _aten.masked_scatter.default,
        _aten.put.default,
    }
)
# By `id`: an operator's own hash is a function of Python.
_ACCUMULATIONS = frozenset(map(id, ACCUMULATIONS))
_REUSING = frozenset(map(id, WRITES | {ADD}))
_IN_BACKWARD = _ACCUMULATIONS | _REUSING
# Unbound: looking a method up takes longer than calling it.
_storage_of, _nbytes_of = Tensor.untyped_storage, torch.UntypedStorage.nbytes
# Types of nearly all tensors, and of arguments without tensors: `isinstance` would take longer than all other work.
_PLAIN = frozenset({Tensor, Parameter})
_NO_TENSORS = {int, float, bool, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, str}
_LIFT = _aten.lift_fresh.default  # how torch.tensor([...]) returns the tensor that it created below the dispatcher
_DEVICE = torch.ops.prim.device.default
# Storages of these categories may exist before the block; others only since the start of the current step.
_LASTING: frozenset[Category] = frozenset({"parameter", "buffer", "gradient", "optimizer"})
_Holders = tuple[int, int, int]
# Code in these folders is not the user's: the source line is the innermost frame outside them.
_INTERNAL = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_NO_BACKWARD = -1
_OWN_FRAMES = 1  # of the recorder, at least, between an operator and the lookup of its place
UNSHARD = "fsdp.unshard"  # creator of a storage that FSDP gathers into and empties again


class Beneath(Protocol):
    """Backend of a simulated device: its kernels, and optionally its allocator.

    The recorder reports storage changes to it before counting them itself, so an allocation that fails is not counted.
    """

    def counts(self, device: torch.device) -> bool:
        """Return whether storages on a device belong to it; others are not recorded."""

    def device_of(self, storage: torch.UntypedStorage) -> torch.device:
        """Return the device of a storage whose tensors are unknown."""

    def hold(self, storage: torch.UntypedStorage) -> None:
        """Allocate memory for a new storage, until it is freed."""

    def resize(self, storage: torch.UntypedStorage) -> None:
        """Reallocate memory for a storage whose size has changed."""

    def pass_on(self, key: int, storage: torch.UntypedStorage) -> None:
        """Transfer the memory of the storage whose `id` is ``key`` to another storage."""

    def run_inside(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
        """Allocate and free the memory that an operator's kernels use internally; return how much more they may use."""

    def divided(self, func: Any, args: Sequence[Any]) -> Callable[..., Any] | None:
        """Return a function that runs an operator as its decomposition; None if the operator is not decomposed."""


class Marks(Protocol):
    """Marks around each operator for another observer: see `memkit._recorder.workspace.WorkspaceMarks`."""

    accelerator: torch.device | None

    def begin(self) -> None:
        """Begin at the start of the recorder's block."""

    def end(self) -> None:
        """End at the end of the recorder's block."""

    def around(self, func: Any, run: Callable[[], Any], moment: Callable[[], RecorderMark]) -> Any:
        """Run an operator between two marks."""

    def added_to(self, recording: Recording) -> Recording:
        """Return the recording with the events between the marks added."""


class RecorderMark(NamedTuple):
    """Progress of a recorder: numbers of events and phases so far, and the place of the running operator."""

    num_events: int
    num_phases: int
    place: OperatorPlace


class Events(NamedTuple):
    """Events of a recorder from a given event on.

    Attributes:
        live: int64, shape ``(num_events + 1,)``: live bytes at the start and after each event.
        operators: For each event, the operator that created its storage.
        is_growth: For each event, whether memory was allocated.
        places: For each event, the place where its storage was created.
        bounds: int64, shape ``(num_kernels,)``: for each kernel that may allocate internally, live bytes plus the
            maximum that it may allocate.
        bound_at: int64, shape ``(num_kernels,)``: the places of these live bytes in ``live``.
    """

    live: IntArray
    operators: tuple[str, ...]
    is_growth: tuple[bool, ...]
    places: tuple[OperatorPlace, ...]
    bounds: IntArray
    bound_at: IntArray

    def highest(self) -> IntArray:
        """Return live bytes, raised by what the kernels may allocate: int64, shape ``(num_events + 1,)``."""
        highest = self.live.copy()
        np.maximum.at(highest, self.bound_at, self.bounds)
        return highest


class _Block(weakref.ref[torch.UntypedStorage]):
    """Weak reference to a storage, with its record number: the weakref callback receives nothing else."""

    __slots__ = ("key", "number")
    key: int
    number: int


class _Alias(_Block):
    """The storage of a view without data: it keeps the storage with data alive, as the view would."""

    __slots__ = ("storage",)
    storage: torch.UntypedStorage


_number_of = attrgetter("number")


class Recorder(LeanDispatchMode):
    """Record every storage that is created, resized or freed in a block of code.

    Use it as ``with Recorder() as recorder: step()`` and read `recording` then or later. It works on real tensors and
    inside ``FakeTensorMode``, keeps no tensor alive and changes no result. It sees the thread that entered it and
    the threads that autograd starts for its backward. One recorder records one block.

    Args:
        beneath: Backend of a simulated device, which is notified of storages and kernels.
        marks: Marks around operators; the events between them are part of `recording` after the block.
        as_without_recorder: Any dispatch mode makes autograd sum gradients out of place where it would otherwise
            reuse one of them. True reports the memory that the step uses without the recorder; False reports what
            this run actually allocates.

    Example:
        >>> import torch
        >>> from memkit._recorder.recorder import Recorder
        >>> with Recorder() as recorder:
        ...     x = torch.ones(1024)
        ...     y = x * 2
        >>> recorder.recording().peak_bytes()
        8192
    """

    supports_higher_order_operators = True

    def __init__(
        self, *, beneath: Beneath | None = None, marks: Marks | None = None, as_without_recorder: bool = True
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._beneath, self._marks = beneath, marks
        self._operator: Any = ""  # the one whose storages are being counted
        self._bounds: list[tuple[int, int]] = []  # number of events so far, bytes
        self._reusing = _REUSING if as_without_recorder else frozenset[int]()
        self._unshared: _Holders | None = None  # reference counts of an unshared gradient
        self._is_probing = False
        self._cleanup = ExitStack()
        self._was_entered = False
        self._runs_eagerly = False
        self._where = StepPosition()
        # By id() of the storage's Python object, which lives as long as the storage does.
        self._blocks: dict[int, _Block] = {}
        self._sizes: dict[int, int] = {}
        # Size of a storage that needs no second look; marks are told the device of each tensor.
        self._settled_size: Callable[[int], int | None] = (self._sizes if marks is None else dict[int, int]()).get
        self._live: dict[torch.device, int] = {}  # live bytes after the first `_num_summed` events
        self._num_summed = 0
        # One entry per event, and the storages that existed before: (event before which they count, number, bytes).
        self._event_storage: list[int] = []
        self._event_bytes: list[int] = []
        self._adopted: list[tuple[int, int, int]] = []
        self._step_start = 0  # first event of the current step
        self._phases: list[tuple[int, StepPhase]] = []
        self._phase: StepPhase | None = None
        self._plain_types: set[type] = set()  # of tensors that do not wrap other tensors
        # One entry per storage.
        self._devices: list[torch.device] = []
        self._operators: list[Any] = []  # the operator, or "" for storages from before the block
        self._places: list[OperatorPlace] = []
        self._nodes: list[int] = []  # sequence number of the autograd node that ran; -1 outside backward
        self._categories: dict[int, Category] = {}
        self._untracked: dict[str, None] = {}

    def __enter__(self) -> Self:
        if self._was_entered:
            raise StateError(
                "with recorder",
                got="a Recorder that was entered before",
                expected="one block for each Recorder",
                fix="make a new Recorder().",
            )
        self._was_entered = True
        with ExitStack() as cleanup:
            self._runs_eagerly = is_loaded()
            cleanup.enter_context(eagerly())
            super().__enter__()  # type: ignore[no-untyped-call]
            cleanup.push(super().__exit__)
            if self._reusing:
                self._probe()
            self._where = StepPosition()
            for handle in (
                register_module_forward_pre_hook(self._before_module),
                register_module_forward_hook(self._after_module, always_call=True),
                register_optimizer_step_pre_hook(self._before_optimizer),
                register_optimizer_step_post_hook(self._after_optimizer),
            ):
                cleanup.callback(handle.remove)
            cleanup.enter_context(on_resize(self._note_resized))
            if self._marks is not None:
                self._marks.begin()
                cleanup.callback(self._marks.end)
            self._cleanup = cleanup.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()
        self._blocks.clear()  # drops the weakref callbacks too: storages freed from here on were live at the end
        self._sizes.clear()

    def live_bytes(self, device: torch.device | str | None = None) -> int:
        """Return bytes in live storages now (after the block, at its end), on one device or on all."""
        num_events = len(self._event_bytes)
        for event in range(self._num_summed, num_events):
            where = self._devices[self._event_storage[event]]
            self._live[where] = self._live.get(where, 0) + self._event_bytes[event]
        self._num_summed = num_events
        if device is None:
            return sum(self._live.values())
        return self._live.get(torch.device(device), 0)

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """Return the number of a tensor's storage; None if it has no storage that the recorder has seen."""
        try:
            block = self._blocks.get(id(tensor.untyped_storage()))
        except (NotImplementedError, RuntimeError):
            return None
        return None if block is None else block.number

    def num_events(self) -> int:
        """Return the number of events so far: a mark for `peak_since`."""
        return len(self._event_bytes)

    def peak_since(self, event: int, device: torch.device | str | None = None) -> int:
        """Return peak live bytes since an event, on one device or on all; takes time linear in the events since."""
        changes = _int64(self._event_bytes[event:])
        if device is not None:
            where = torch.device(device)
            changes *= _int64([self._devices[number] == where for number in self._event_storage[event:]])
        live_after = np.cumsum(changes) - changes.sum() + self.live_bytes(device)
        return int(max(live_after.max(initial=0), self.live_bytes(device) - changes.sum()))

    def events_since(self, event: int) -> Events:
        """Return all events from a given event on."""
        before = sum(num_bytes for _, _, num_bytes in self._adopted) + sum(self._event_bytes[:event])
        live = before + np.cumsum([0, *self._event_bytes[event:]], dtype=np.int64)
        storages = self._event_storage[event:]
        return Events(
            live,
            operators=tuple(_texts([self._operators[number] for number in storages])),
            is_growth=tuple(num_bytes > 0 for num_bytes in self._event_bytes[event:]),
            places=tuple(self._places[number] for number in storages),
            bounds=_int64([int(live[index - event]) + bound for index, bound in self._bounds if index >= event]),
            bound_at=_int64([index - event for index, _ in self._bounds if index >= event]),
        )

    def moment(self) -> RecorderMark:
        """Return the current progress."""
        return RecorderMark(len(self._event_bytes), len(self._phases), self._where.place())

    @property
    def operator(self) -> Any:
        """The operator whose storages are being counted; "" before the first operator."""
        return self._operator

    # ------------------------------------------------------------------------------------------- operators

    def __torch_dispatch__(  # noqa: C901 - one function: it runs at each operator, where each step of Python counts
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        is_marked: bool = False,
    ) -> Any:
        if self._marks is not None and not is_marked:
            run = partial(self.__torch_dispatch__, func, types, args, kwargs, is_marked=True)
            return self._marks.around(func, run, self.moment)
        if types:
            if func is _DEVICE:  # C++ asks for `.device` of a fake tensor, which Python answers without a dispatch
                return getattr(args[0], "fake_device", None) or args[0].device
            if not self._plain_types.issuperset(types) and self._is_wrapped(types):
                return NotImplemented  # a wrapper around other tensors unwraps itself; its operators then come here
        beneath = self._beneath
        if beneath is not None and torch.is_inference_mode_enabled():
            divided = beneath.divided(func, args)
            if divided is not None:
                return self._run_divided(divided, args, kwargs or {})
        where = self._where
        backward = current_backward()
        # Each thread has its own sequence, and autograd its own threads on a GPU, in which there is nothing to update.
        if backward == where.backward and (
            next_sequence_number() == where.next_sequence_number or get_ident() != where.thread
        ):
            place = None  # looked up if a storage is born; otherwise as `update` would leave it
            phase = where.phase = where.outside_backward if backward == _NO_BACKWARD else "backward"
        else:
            place = where.update()
            phase = where.phase
        is_special = phase == "backward" and id(func) in _IN_BACKWARD
        reused = self._reused_otherwise(func, args) if is_special and id(func) in self._reusing else None
        kernel = kernel_of(func) if type(func) is OpOverload else func
        out = kernel(*args, **kwargs) if kwargs else kernel(*args)
        if phase != self._phase:
            if self._is_probing:
                return out
            self._phase = phase
            self._phases.append((len(self._event_storage), phase))
        settled_size = self._settled_size
        known = () if func is _LIFT else args
        for value in known:
            kind = type(value)
            if kind is Tensor or kind is Parameter:
                try:
                    storage = _storage_of(value)
                    if _nbytes_of(storage) == settled_size(id(storage)):
                        continue
                except (NotImplementedError, RuntimeError):  # no storage of its own
                    pass
                self._note(value, None, None)
            elif kind not in _NO_TENSORS and (kernel is func or not (kind is list and value and type(value[0]) is int)):
                # Not sizes: an operator's lists hold values of one type; those of a higher-order one may mix them.
                self._note_all((value,), None, None)
        if kwargs and not _NO_TENSORS.issuperset(map(type, kwargs.values())):
            self._note_all(kwargs.values(), None, None)
        if beneath is not None and known and type(known[0]) in _PLAIN and kernel is not func and func.is_view:
            self._alias(known[0], out)
        if reused is not None:
            self._reuse(reused, out)
        if not known or out is not known[0]:  # in place, the result is the first argument
            if type(out) is Tensor:
                try:
                    storage = _storage_of(out)
                    is_new = _nbytes_of(storage) != settled_size(id(storage))
                except (NotImplementedError, RuntimeError):
                    is_new = True
                if is_new:
                    self._note(out, func, place or where.place(_OWN_FRAMES))
            else:
                self._note_all((out,), func, place)
        if is_special and id(func) in _ACCUMULATIONS:
            node = current_node()
            if node is not None and type(node).__name__ == "AccumulateGrad":
                self._label_gradient(out)
        if beneath is not None:
            self._operator = func
            bound = beneath.run_inside(func, args, kwargs or {}, out)
            if bound:
                self._bounds.append((len(self._event_bytes), bound))
        return out

    def _is_wrapped(self, types: Sequence[type]) -> bool:
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return True
        self._plain_types.update(types)
        return False

    def _run_divided(self, divided: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        push_mode(self)
        try:
            return divided(*args, **kwargs)
        finally:
            pop_mode()

    def _note_all(self, values: Iterable[Any], operator: Any, place: OperatorPlace | None) -> None:
        """Register the storages of all tensors in ``values``.

        Args:
            values: Arguments or results of an operator.
            operator: The operator that created those that are unknown; None if they existed before.
            place: Its place, if known.
        """
        settled_size = self._settled_size
        for value in values:
            kind = type(value)
            if kind in _NO_TENSORS:
                continue
            if kind in _PLAIN or isinstance(value, Tensor):
                try:
                    storage = value.untyped_storage()
                except (NotImplementedError, RuntimeError):  # no storage of its own
                    storage = None
                if storage is None or storage.nbytes() != settled_size(id(storage)):
                    if place is None and operator is not None:
                        place = self._where.place(_OWN_FRAMES)
                    self._note(value, operator, place)
            elif isinstance(value, (list, tuple)):
                self._note_all(value, operator, place)
            elif isinstance(value, dict):
                self._note_all(value.values(), operator, place)

    def _note(self, tensor: Tensor, operator: Any, place: OperatorPlace | None) -> int | None:
        """Register a tensor's storage: as a birth if `operator` created it, as an adoption if it already existed.

        Returns:
            The storage's number; None if it has no memory of its own.
        """
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse or opaque: no storage of its own
            for part in self._parts(tensor, operator):
                if part is not tensor:
                    self._note(part, operator, place)
            return None
        if self._marks is not None and not tensor.is_cpu:
            self._marks.accelerator = tensor.device
        block = self._blocks.get(id(storage))
        if block is not None:
            return self._book_again(block, storage, operator)
        number = None if is_zero_tensor(tensor) else self._book(storage, tensor.device, operator, place)
        if place is None and number is not None and type(tensor) is Parameter:  # such as an average of the weights
            self._categories[number] = "parameter"
        return number

    def _note_resized(self, storage: torch.UntypedStorage) -> None:
        if not self._is_active():
            return
        device = storage.device if self._beneath is None else self._beneath.device_of(storage)
        block = self._blocks.get(id(storage))
        if block is not None:
            number: int | None = self._book_again(block, storage, UNSHARD)
        else:
            number = self._book(storage, device, UNSHARD, self._where.place())
        if number is not None and self._operators[number] == UNSHARD:
            self._categories[number] = "parameter"

    def _book_again(self, block: _Block, storage: torch.UntypedStorage, operator: Any) -> int:
        """Register the new size of a storage."""
        change = storage.nbytes() - self._sizes[block.key]
        if change:
            if self._beneath is not None:
                self._operator = operator
                self._beneath.resize(storage)
            self._event_storage.append(block.number)
            self._event_bytes.append(change)
            self._sizes[block.key] += change
        return block.number

    def _book(
        self, storage: torch.UntypedStorage, device: torch.device, operator: Any, place: OperatorPlace | None
    ) -> int | None:
        """Count a storage that was not seen before."""
        nbytes = storage.nbytes()
        if nbytes == 0:
            return None
        if self._beneath is not None:
            if not self._beneath.counts(device):
                return None
            self._operator = operator
            self._beneath.hold(storage)
        number = len(self._devices)
        self._devices.append(device)
        node = None
        if place is None:
            self._adopted.append((self._step_start, number, nbytes))
            self._live[device] = self._live.get(device, 0) + nbytes
        else:
            self._event_storage.append(number)
            self._event_bytes.append(nbytes)
            node = current_node() if place.phase == "backward" else None
        self._operators.append(operator or "")
        self._places.append(place or _BEFORE)
        self._nodes.append(-1 if node is None else sequence_number(node))
        self._follow(storage, number, nbytes)
        return number

    def _follow(self, storage: torch.UntypedStorage, number: int, nbytes: int) -> None:
        block = _Block(storage, self._died)
        block.key = key = id(storage)
        block.number = number
        self._blocks[key] = block
        self._sizes[key] = nbytes

    def _alias(self, tensor: Tensor, out: Any) -> None:
        """Let views without data of a tensor with data, from outside a simulation, count as that tensor's memory."""
        views = out if isinstance(out, (list, tuple)) else (out,)
        try:
            storage = tensor.untyped_storage()
            others = [each.untyped_storage() for each in views]
        except (NotImplementedError, RuntimeError):  # of a sparse tensor
            return
        block = self._blocks.get(id(storage))
        for other in others:
            if block is not None and id(other) not in self._blocks:
                alias = _Alias(other, self._alias_died)
                alias.key, alias.number, alias.storage = id(other), block.number, storage
                self._blocks[alias.key], self._sizes[alias.key] = alias, other.nbytes()

    def _alias_died(self, alias: _Block) -> None:
        del self._blocks[alias.key], self._sizes[alias.key]

    def _died(self, block: _Block) -> None:
        key = block.key
        del self._blocks[key]
        self._event_storage.append(block.number)
        self._event_bytes.append(-self._sizes.pop(key))

    def _parts(self, tensor: torch.Tensor, operator: Any) -> Iterator[torch.Tensor]:
        """Yield the plain tensors that hold the memory of a sparse or wrapper tensor."""
        if is_traceable_wrapper_subclass_type(type(tensor)):
            for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]  # ensured by the check
                part = getattr(tensor, name)
                if isinstance(part, torch.Tensor):  # a DTensor's mesh is not memory
                    yield from self._parts(part, operator)
        elif tensor.layout is torch.strided:
            yield tensor
        elif parts := strided_parts(tensor):
            yield from parts
        else:
            self._untracked[f"{operator or 'input'}: {tensor.layout}"] = None

    # ------------------------------------------------------------------------------------- gradients in place

    def _reused_otherwise(self, func: Any, args: tuple[Any, ...]) -> _Block | None:
        """Return the block that this operator would have written into without a dispatch mode.

        The rule is `can_accumulate_inplace` in torch/csrc/autograd/input_buffer.cpp: a dense gradient whose tensor and
        storage are referenced only by the engine. A backward formula writes into fresh zeros.
        """
        tensor = args[0]
        if torch.is_grad_enabled() or tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()
        holders = (use_count(tensor), sys.getrefcount(tensor), storage_use_count(storage_key(storage)))
        if self._is_probing:
            self._unshared = holders
            return None
        block = self._blocks.get(id(storage))
        if block is None:
            return None
        if func is ADD:
            is_filled = tensor.is_contiguous() or is_dense(tensor)  # the second takes hundreds of steps of Python
            is_free = holders == self._unshared and is_filled and self._may_be_summed(block)
        else:
            is_free = block.number == len(self._devices) - 1 and self._operators[block.number] in FILLS
        return block if is_free and self._where.called_by_engine() else None

    def _may_be_summed(self, block: _Block) -> bool:
        """Whether the engine, not a node's own formula, may be adding to this block.

        The engine adds gradients that two nodes send to the same input, or one node along two of its edges.
        """
        node = current_node()
        if node is None or sequence_number(node) != self._nodes[block.number]:
            return True
        edges = [edge for edge in node.next_functions if edge[0] is not None]
        return len(set(edges)) < len(edges)

    def _reuse(self, block: _Block, out: torch.Tensor) -> None:
        """Count the result as written into `block`, whose own storage is about to be freed unseen."""
        if self._beneath is not None:
            self._beneath.pass_on(block.key, out.untyped_storage())
        del self._blocks[block.key]
        self._follow(out.untyped_storage(), block.number, self._sizes.pop(block.key))

    def _probe(self) -> None:
        """Measure the reference counts of an unshared gradient at this point, in this version of Python and torch."""
        self._is_probing = True
        with torch.inference_mode(mode=False), torch.enable_grad():
            x = torch.zeros(1, device="cpu", requires_grad=True)
            y = x * 1
            torch.autograd.grad(y * 2 + y * 3, x)
        self._is_probing = False

    # ------------------------------------------------------------------------------------------------ hooks

    def _is_active(self) -> bool:
        for place in range(num_modes()):  # noqa: SIM110 - a generator would take longer than the search
            if mode_at(place) is self:  # hooks are global, recorders belong to a thread
                return True
        return False

    def _before_module(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        if not self._runs_eagerly and is_loaded():  # the model was compiled in the block
            self._runs_eagerly = True
            self._cleanup.enter_context(eagerly())
        if not self._is_active() or not self._where.enter_module(module):
            return
        if not torch.is_grad_enabled():
            self._step_start = len(self._event_storage)
        self._where.outside_backward = "forward"
        owners = [(child, self._where.name_of(child)) for child in module.modules()]
        members = [
            each for child, _ in owners for each in (*parameters_of(child).values(), *buffers_of(child).values())
        ]
        if not self._are_labeled([each for each in members if each is not None], with_module=True):
            for child, owner in owners:
                own = list(parameters_of(child).values())
                self.label(own, "parameter", owner)
                self.label([leaf_gradient(each) for each in own if each is not None], "gradient", owner)
                self.label(list(buffers_of(child).values()), "buffer", owner)
        self.label(inputs, "input")

    def _after_module(self, *_: Any) -> None:
        if self._is_active():
            self._where.leave_module()

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._is_active():
            self._where.outside_backward = "optimizer"
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            self.label(parameters, "parameter")
            self.label([p.grad for p in parameters], "gradient")
            self.label(list(optimizer.state.values()), "optimizer")

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._is_active():
            self.label(list(optimizer.state.values()), "optimizer")
            self._where.outside_backward = "other"
            self._step_start = len(self._event_storage)

    def label(self, value: Any, category: Category, module: str = "") -> None:
        """Label the storages of all tensors in `value`. The first label stays: a parameter never becomes an input."""
        categories, places, blocks, sizes = self._categories, self._places, self._blocks, self._sizes
        leaves = _leaves_of(value)
        if len(leaves) > 1 and self._are_labeled(leaves, with_module=bool(module)):
            return
        for tensor in leaves:
            is_plain = type(tensor) in _PLAIN
            if not is_plain and is_lazy(tensor):
                continue
            number = None
            try:
                storage = tensor.untyped_storage()
                if storage.nbytes() == sizes.get(id(storage)):
                    number = blocks[id(storage)].number
            except (NotImplementedError, RuntimeError):  # no storage of its own
                pass
            if number in categories and (not module or places[number].module):
                continue
            if number is not None and is_plain and self._marks is None:
                self._categorize(number, category, module)
                continue
            for part in self._parts(tensor, None):
                number = self._note(part, None, None)
                if number is not None:
                    self._categorize(number, category, module)

    def _label_gradient(self, tensor: Any) -> None:
        block = None
        if type(tensor) is Tensor and tensor.layout is torch.strided:
            block = self._blocks.get(id(_storage_of(tensor)))
        if block is None or self._marks is not None:
            self.label(tensor, "gradient")
        else:
            self._categories.setdefault(block.number, "gradient")

    def _are_labeled(self, tensors: Sequence[Tensor], *, with_module: bool) -> bool:
        """Whether all tensors have a label, as in most steps: without a step of Python for each."""
        if not _PLAIN.issuperset(map(type, tensors)):
            return False
        try:
            storages = list(map(_storage_of, tensors))
        except (NotImplementedError, RuntimeError):  # sparse
            return False
        keys = list(map(id, storages))
        if not all(map(eq, map(_nbytes_of, storages), map(self._sizes.get, keys))):
            return False
        numbers = list(map(_number_of, map(self._blocks.__getitem__, keys)))
        if not all(map(self._categories.__contains__, numbers)):
            return False
        return not with_module or all(map(_module_of, map(self._places.__getitem__, numbers)))

    def _categorize(self, number: int, category: Category, module: str) -> None:
        place = self._places[number]
        if category == "input" and place.phase != "other":
            return  # a forward's result is an activation, even if it is another model's input
        if self._categories.setdefault(number, category) == category and module and not place.module:
            self._places[number] = place._replace(module=module)

    # ---------------------------------------------------------------------------------------------- reading

    def recording(self) -> Recording:
        """Return everything seen so far as plain data, including the events between `Marks`."""
        live = self.live_recording()
        return live if self._marks is None else self._marks.added_to(live)

    def live_recording(self) -> Recording:
        """Return the storages seen so far as plain data."""
        before = [0 if self._categories.get(number) in _LASTING else event for event, number, _ in self._adopted]
        event_storage = np.insert(_int64(self._event_storage), before, [number for _, number, _ in self._adopted])
        event_bytes = np.insert(_int64(self._event_bytes), before, [nbytes for *_, nbytes in self._adopted])
        earlier = np.sort(_int64(before))
        phases = tuple((index + int(np.searchsorted(earlier, index)), phase) for index, phase in self._phases)
        texts: dict[Label, Sequence[str]] = {
            "device": _texts(self._devices),
            "module": [place.module for place in self._places],
            "operator": _texts(self._operators),
            "phase": [place.phase for place in self._places],
            "source": _texts([place.line or "" for place in self._places]),
        }
        texts["category"] = resolve_categories(
            self._categories,
            born_in=texts["phase"],
            was_before=[number for _, number, _ in self._adopted],
            lifetimes=lifetimes(event_storage, event_bytes, len(self._devices)),
            backwards=[index for index, phase in phases if phase == "backward"],
            end=len(event_storage),
        )
        tables = {label: encoded(values) for label, values in texts.items()}
        codes = {label: code for label, (code, _) in tables.items()}
        names = {label: table for label, (_, table) in tables.items()}
        return Recording(event_storage, event_bytes, codes, names, phases, tuple(self._untracked))


def _leaves_of(value: Any) -> list[Tensor]:
    """Return the tensors of a tree; `tree_leaves` takes several times longer for plain containers."""
    if type(value) in _PLAIN:
        return [value]
    if type(value) is list:  # of tensors, or an optimizer's states: without a step of Python for each
        kinds = set(map(type, value))
        inside = list(chain.from_iterable(map(dict.values, value))) if kinds == {dict} else value
        if _PLAIN.issuperset(map(type, inside)):
            return inside
    leaves: list[Tensor] = []
    _add_leaves(value, leaves)
    return leaves


def _add_leaves(value: Any, leaves: list[Tensor]) -> None:
    kind = type(value)
    if kind is list or kind is tuple or kind is dict:
        for each in value.values() if kind is dict else value:
            if type(each) in _PLAIN:
                leaves.append(each)
            else:
                _add_leaves(each, leaves)
    elif isinstance(value, Tensor):
        leaves.append(value)
    elif kind not in _NO_TENSORS:
        leaves += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _texts(values: Sequence[object]) -> list[str]:
    """Return the text of each value; the few objects among them are each formatted once."""
    texts = {key: str(value) for key, value in {id(value): value for value in values}.items()}
    return [texts[id(value)] for value in values]


def _int64(values: Sequence[int]) -> IntArray:
    return np.asarray(values, dtype=np.int64)


# ----------------------------------------------------------------------------------------- origin of an operator


class SourceLine(NamedTuple):
    """A line of code. The code object holds names and constants, never values as a frame would."""

    code: CodeType
    number: int

    def __str__(self) -> str:
        return f"{self.code.co_filename}:{self.number} in {self.code.co_name}"


class OperatorPlace(NamedTuple):
    """Phase, module and source line of an operator; module "" and line None if there is none."""

    phase: StepPhase
    module: str
    line: SourceLine | None


_BEFORE = OperatorPlace("other", "", None)
_module_of = attrgetter("module")


class StepPosition:
    """The current position in a step: follows its operators and module calls.

    Call `update` at every operator, `enter_module` and `leave_module` around module calls, and set `outside_backward`
    when an optimizer step starts or ends.

    Attributes:
        phase: Phase of the latest operator.
        outside_backward: Phase of operators that run outside autograd's engine.
        backward: Autograd's number of the backward in which the latest operator ran; -1 outside of one.
        next_sequence_number: Number of the next graph node, as of the latest operator.
        thread: The thread of the step.
    """

    def __init__(self) -> None:
        self.phase: StepPhase = "other"
        self.outside_backward: StepPhase = "other"
        self.thread = get_ident()
        self.next_sequence_number = next_sequence_number()
        self._origins: dict[int, OperatorPlace] = {}
        self._places: dict[tuple[object, ...], OperatorPlace] = {}
        self.backward = _NO_BACKWARD
        self._backward_depth = 0
        self._modules: list[str] = []
        self._module_names: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()
        self._roots: set[str] = set()
        self._internal: set[str] = set()  # files of torch and memkit, and others
        self._external: set[str] = set()

    def update(self) -> OperatorPlace | None:
        """Detect changes since the last operator: a backward began or ended, or graph nodes were created.

        Returns:
            The place of the running operator, if it created nodes.
        """
        backward = current_backward()
        if backward != self.backward:
            if self.backward == _NO_BACKWARD:
                self.outside_backward = "other"  # the forward has ended too once the backward ends
            self.backward = backward
            self._backward_depth = len(self._modules)
        self.phase = self.outside_backward if backward == _NO_BACKWARD else "backward"
        number = next_sequence_number()
        # The counter is per thread: on an accelerator, backward runs in another thread.
        if number == self.next_sequence_number or get_ident() != self.thread:
            return None
        if self.phase == "other":
            self.phase = self.outside_backward = "forward"
        place = self.place(_OWN_FRAMES)
        for node in range(self.next_sequence_number, number):
            self._origins[node] = place
        self.next_sequence_number = number
        return place

    def place(self, num_own: int = 0) -> OperatorPlace:
        """Return the place of the running operator; the same object for the same place.

        Args:
            num_own: Number of the callers that are known to be of memkit: looking at a frame takes long.
        """
        module = self._modules[-1] if self._modules else ""
        phase = self.phase
        node = current_node() if phase == "backward" else None
        origin = self._origins.get(sequence_number(node)) if node is not None else None
        if origin is not None and len(self._modules) <= self._backward_depth:  # deeper: a checkpoint reruns its module
            module = origin.module
        frame = None
        key: tuple[object, ...]
        if origin is not None and self.called_by_engine(num_own + 1):
            key = module, id(origin)
        elif (frame := self._caller(num_own + 1)) is not None:  # not the line's number: finding it takes long
            key = phase, module, id(frame.f_code), frame.f_lasti
        else:
            key = phase, module
        place = self._places.get(key)
        if place is None:
            if frame is not None:
                line: SourceLine | None = SourceLine(frame.f_code, frame.f_lineno)  # keeps the code, and its id
            else:
                line = None if origin is None else origin.line
            self._places[key] = place = OperatorPlace(phase, module, line)
        return place

    def called_by_engine(self, num_own: int = 0) -> bool:
        """Whether the operator is called by autograd's C++ code, not by Python code inside the backward."""
        frame = sys._getframe(num_own).f_back  # noqa: SLF001 - no public equivalent
        while frame is not None:
            if frame.f_code is ENGINE:
                return True
            if (name := frame.f_code.co_filename) not in self._internal and not self._is_internal(name):
                return False
            frame = frame.f_back
        return True  # a thread of the engine: it has no Python frames of its own

    def enter_module(self, module: torch.nn.Module) -> bool:
        """Push a module call; True if it is the outermost one."""
        self._modules.append(self.name_of(module))
        return len(self._modules) == 1

    def leave_module(self) -> None:
        """Pop a module call."""
        if self._modules:  # a call that began before the recorder was never pushed
            self._modules.pop()

    def name_of(self, module: torch.nn.Module) -> str:
        """Return the dotted name of a module.

        A module that was not seen before gives names to all modules under it.

        The first root's are plain dotted names; those of later roots start with the root's class name.
        """
        known = self._module_names.get(module)
        if known is not None:
            return known
        class_name = type(module).__name__
        if self._modules:
            root, prefix = f"{self._modules[-1]}.{class_name}", f"{self._modules[-1]}.{class_name}."
        else:
            root, count = class_name, 1
            while root in self._roots:
                count += 1
                root = f"{class_name}#{count}"
            prefix = f"{root}." if self._roots else ""
            self._roots.add(root)
        for path, child in module.named_modules():
            self._module_names.setdefault(child, f"{prefix}{path}" if path else root)
        return self._module_names[module]

    def _caller(self, num_own: int) -> FrameType | None:
        """Return the innermost frame of user code."""
        internal, external = self._internal, self._external
        frame = sys._getframe(num_own).f_back  # noqa: SLF001 - no public equivalent
        while frame is not None:
            name = frame.f_code.co_filename
            if name not in internal and (name in external or not self._is_internal(name)):
                return frame
            frame = frame.f_back
        return None

    def _is_internal(self, filename: str) -> bool:
        """Classify a file of code; the loops over frames look into the two sets first."""
        is_internal = filename.startswith(_INTERNAL)
        (self._internal if is_internal else self._external).add(filename)
        return is_internal


# ------------------------------------------------------------------------------------------------ resized storages


_resize = torch.UntypedStorage.resize_
# Blocks in several threads may end in a different order than they began: each removes its own listener.
_listeners: list[Callable[[torch.UntypedStorage], None]] = []


def _resize_and_notify(storage: torch.UntypedStorage, size: int) -> Any:
    result = _resize(storage, size)
    for listener in tuple(_listeners):
        listener(storage)
    return result


@contextmanager
def on_resize(listener: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call ``listener`` with each storage after it is resized, in any thread."""
    _listeners.append(listener)
    torch.UntypedStorage.resize_ = _resize_and_notify  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        _listeners.remove(listener)
        if not _listeners:
            torch.UntypedStorage.resize_ = _resize  # type: ignore[method-assign]
