"""Offload saved activations to disk or host memory, with a budget of bytes that may stay."""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, Self

import numpy as np
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer

from memkit._core.errors import StateError, warn_user
from memkit._core.settings import Checker, nearest_word
from memkit._core.units import parse_bytes
from memkit._recorder.data_reads import DataReads
from memkit._torch.compiler import uncompiled
from memkit._torch.fake import FakeTensor
from memkit._torch.graph import at_end_of_backward, current_backward, current_node, is_functorch_wrapped_tensor
from memkit._torch.tensors import base_of, is_view, is_zero_tensor, storage_key, version_of
from memkit.train.checks import WRAPPER, check_transforms
from memkit.train.models import device_of
from memkit.train.offload_files import Arriving, DiskStore, FakeStore, HostStore, Store, given_folder, span
from memkit.train.state_offload import moved_state

_WORTH_WHOLE = 4  # a storage is kept as a whole, once for all its views, unless the view at hand is much smaller
_OFFLOADS = ("activations", "optimizer")  # the wrapper's choices
_ALIGNMENT = 16  # bytes of the largest element
# A checksum adds up numbers of so many bytes, and every so many of them once more, so that order matters.
_WORD, _STRIDE, _WEIGHT = 8, 7, 1_000_003
_UNFILLED_NODE = "RreluWithNoise"  # the backward of `rrelu`


class WrittenAsideError(StateError):
    """A storage was written by code that autograd does not see, between the saving of two views of it."""


class offload_activations(contextlib.AbstractContextManager["offload_activations"]):  # noqa: N801 - used like a function
    """Offload the activations saved for backward: to disk, or from an accelerator to host memory.

    Saved tensors beyond ``budget`` are moved out, oldest first, because backward needs them last; the backward, which
    may run after the block, brings them back. Gradients are bit-identical. Several views of one storage are written
    once, and keep their strides. A storage that is written to through ``.data`` afterwards is moved out again before
    backward reads it, so that backward reads what the plain one would; until then it stays in memory. Parameters,
    buffers and tensors smaller than ``min_bytes`` stay. The same object can be entered again for each step.

    Args:
        to: ``"disk"``: an unlinked temporary file, removed with the process, however it ends. ``"host"``: pinned
            memory, copied on a separate stream, for tensors of an accelerator; those on the CPU stay.
        budget: Bytes (or text such as ``"2GiB"``) of saved tensors that may stay where they are.
        min_bytes: Smaller tensors stay, and do not count against the budget.
        model: Model whose parameters and buffers stay. Without it parameters are recognized, buffers are not.
        folder: Folder of the file; None is the system's temporary folder, which some systems keep in memory.

    Attributes:
        held_bytes: Bytes that currently count against the budget.
        written_bytes: Bytes moved out so far.

    Raises:
        InputTypeError: ``model`` is not a module, or ``folder`` is not a path.
        InputError: ``folder`` is not a directory that exists.
        ConfigError: A setting is invalid. Or, from the block: it calls `torch.func.grad`, or another transform that
            takes gradients, which torch does not run within saved tensor hooks.
        MemkitOutOfMemoryError: From the forward: the disk is full. The state is unchanged since before that operator.
        StateError: From the backward: a saved tensor that stayed was changed in place since, as plain autograd would
            also refuse. A tensor that was moved out keeps the value that it had when it was saved. On an accelerator,
            also if code that nothing tells of, such as a kernel, wrote to a storage between the saving of two views.

    Not supported: ``rrelu`` in training. Autograd saves its noise before it is drawn, so that gradients would be wrong:
    backward raises. Use ``leaky_relu``, or recompute that block.

    Memory:
        The budget, plus the storages that the current backward operator needs, and the last one that several operators
        have saved; from host memory also the next operator's, which is brought back while this one computes.

    Example:
        >>> import torch, memkit as mk
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh())
        >>> offload = mk.train.offload_activations(to="disk", budget="4KiB", min_bytes=1024)
        >>> with offload:
        ...     loss = model(torch.ones(32, 64)).sum()
        >>> offload.written_bytes, offload.held_bytes
        (16384, 0)
        >>> loss.backward()
    """

    def __init__(
        self,
        *,
        to: Literal["disk", "host"],
        budget: int | str = 0,
        min_bytes: int | str = "16KiB",
        model: nn.Module | None = None,
        folder: str | Path | None = None,
    ) -> None:
        check = Checker("offload_activations")
        to = check.choice("to", to, ("disk", "host"), fix="pass to='host'.")
        if model is not None:
            expected, fix = "a module, or None", f"write offload_activations(to={to!r}, model=model)."
            Checker("offload_activations(model=...)").instance(model, nn.Module, expected, fix)
        self._budget = parse_bytes(budget, name="budget", is_large=True)
        self._min_bytes = parse_bytes(min_bytes, name="min_bytes")
        self._to, self._folder, self._model = to, given_folder(check, folder), model
        self._stores: dict[torch.device, Store] = {}
        self._records: weakref.WeakValueDictionary[int, _Record] = weakref.WeakValueDictionary()  # by storage address
        self._reads: DataReads | None = None
        self._num_moved = 0  # records that are alive
        self._moved: dict[int, weakref.WeakSet[_Record]] = {}  # by storage address
        self._held: OrderedDict[int, weakref.ref[_Record]] = OrderedDict()  # by identity, oldest first
        self._active: list[contextlib.AbstractContextManager[Self]] = []
        self.held_bytes = self.written_bytes = 0
        self._num_on_cpu, self._has_moved, self._has_warned = 0, False, False
        self._last: weakref.ref[_Record] | None = None  # the latest record
        self._staying: weakref.ref[_Record] | None = None
        self._checks: weakref.WeakValueDictionary[int, _Checks] = weakref.WeakValueDictionary()  # by backward

    def __enter__(self) -> Self:
        """Start offloading."""
        self._active.append(self.within(self._model))
        return self._active[-1].__enter__()

    def __exit__(self, *error: Any) -> None:
        """Stop offloading; saved tensors stay where they are until their backward."""
        self._active.pop().__exit__(*error)
        if self._num_on_cpu and not self._has_moved and not self._has_warned:
            self._has_warned = True
            warn_user(
                "offload_activations(to='host') moves tensors of an accelerator, but those of this forward are on "
                f"the CPU: {self._num_on_cpu} stay where they are, and no memory is saved. Way out: pass to='disk', "
                "or run the model on the accelerator."
            )

    @contextlib.contextmanager
    def within(self, model: nn.Module | None) -> Iterator[Self]:
        """Offload in a ``with`` block; the given model's parameters and buffers stay."""
        lasting = _storages(model) if model is not None else set()

        def pack(tensor: torch.Tensor) -> _Packed:
            return self.pack(tensor, lasting)

        try:
            with saved_tensors_hooks(uncompiled(pack), uncompiled(_Packed.unpack_for_node)):
                yield self
        except RuntimeError as error:
            check_transforms(error, call="with offload_activations(...)")
            raise

    @contextlib.contextmanager
    def of_any_size(self) -> Iterator[None]:
        """Move small tensors out too, within the block: of few rows, they are what larger ones are of many."""
        min_bytes, self._min_bytes = self._min_bytes, 0
        try:
            yield
        finally:
            self._min_bytes = min_bytes

    def save_written(self) -> None:
        """Save again what was written to through ``.data``: plain autograd has no copy, and reads it as it is now."""
        for whole in () if self._reads is None else self._reads.written():
            storage = whole.untyped_storage()
            for record in self._moved_of(storage):
                store, handle = record.store, record.handle
                self._write(record, whole)
                record.later = []
                if store is not None:
                    store.release(handle)

    def has_moved(self, tensor: torch.Tensor) -> bool:
        """Whether bytes of a tensor's storage were moved out."""
        return bool(self._moved_of(tensor.untyped_storage()))

    def _moved_of(self, storage: torch.UntypedStorage) -> list[_Record]:
        """Return the records of a storage that were moved out; another one may have its address since."""
        return [each for each in self._moved.get(storage_key(storage), ()) if each.is_of(storage)]

    def pack(self, tensor: torch.Tensor, lasting: Collection[int] = ()) -> _Packed:
        """Take a tensor that autograd saves: keep it, or move it out.

        Args:
            tensor: The tensor.
            lasting: Addresses of storages that stay.
        """
        moves, is_alone = self._may_move(tensor, lasting), _has_own_version(tensor)
        tensor = tensor.detach()  # an operator's own result would keep its graph alive; the version stays shared
        record = self._record(tensor, is_alone=is_alone) if moves else None
        if record is not None:
            record.num_saved += 1
        return _Packed(tensor, record)

    def _may_move(self, tensor: torch.Tensor, lasting: Collection[int]) -> bool:
        if isinstance(tensor, nn.Parameter) or isinstance(base_of(tensor), nn.Parameter) or not _has_storage(tensor):
            return False
        if tensor.nbytes < self._min_bytes or tensor.device.type == "meta":
            return False
        if storage_key(tensor.untyped_storage()) in lasting:
            return False
        if self._to == "host" and tensor.device.type == "cpu":
            self._num_on_cpu += 1
            return False
        self._has_moved = True
        return True

    def _record(self, tensor: torch.Tensor, *, is_alone: bool) -> _Record:
        """Find the record of a tensor's storage, or make one and move out storages that no longer fit."""
        storage = tensor.untyped_storage()
        record = self._records.get(storage_key(storage))
        first, size = _extent(tensor)
        if not is_alone:
            covers = record is not None and record.covers(storage, version_of(tensor), first, size)
            if record is not None and covers and self._is_unchanged(record, tensor):
                return record
            if storage.nbytes() <= _WORTH_WHOLE * size:
                first, size = 0, storage.nbytes()
        record = _Record(self, tensor, first, size, before=self._last)
        self._last = weakref.ref(record)
        if not is_alone:
            self._records[storage_key(storage)] = record
        self._held[id(record)] = weakref.ref(record)
        self.held_bytes += record.num_bytes
        while self.held_bytes > self._budget and self._held:
            oldest = self._held.popitem(last=False)[1]()
            if oldest is not None and oldest.original is not None:
                self._move_out(oldest, oldest.original)
        return record

    def _move_out(self, record: _Record, original: torch.Tensor) -> None:
        if version_of(original) == record.version:  # otherwise backward reports the change
            self._write(record, original)
            self._moved.setdefault(storage_key(original.untyped_storage()), weakref.WeakSet()).add(record)
            self._num_moved += 1
            if self._reads is None and not isinstance(original, FakeTensor):  # until the last of these records is gone
                here = weakref.ref(self)
                self._reads = DataReads(lambda tensor: (own := here()) is not None and own.has_moved(tensor))
                self._reads.__enter__()
        record.original = None
        self.held_bytes -= record.num_bytes

    def _write(self, record: _Record, original: torch.Tensor) -> None:
        store = self._store_for(original)
        record.handle = store.write(_view_bytes(original, record.first, record.num_bytes))
        record.store = store  # a write that failed has nothing to release
        record.checksum = None if _compares_in_backward(original) else _checksum(original, record)
        self.written_bytes += record.num_bytes

    def _is_unchanged(self, record: _Record, tensor: torch.Tensor) -> bool:
        """Return whether a record still has the bytes of its storage: a write through ``.data`` makes no new version.

        On an accelerator that is not known yet, and assumed: a backward that brings the record back compares them.
        """
        if record.is_kept or record.store is None:
            return True
        if _compares_in_backward(tensor):
            record.later.append(
                _checksum_on_device(tensor.untyped_storage(), tensor.device, record.first, record.num_bytes)
            )
            return True
        return record.checksum is None or _checksum(tensor, record) == record.checksum

    def stay(self, record: _Record) -> None:
        """Let the record that stayed so far go.

        What several operators have saved stays until the next such record: the result of an activation function, for
        example, is saved by that and by the next layer, whose backwards follow each other.
        """
        last = self._staying() if self._staying is not None else None
        if last is not None and last is not record:
            last.leave()
        self._staying = weakref.ref(record)

    def check(self, record: _Record, storage: torch.UntypedStorage) -> None:
        """Compare what a backward brought back with what its storage held whenever it was saved again.

        That waits for the device, so all are compared when the backward ends.
        """
        number = current_backward()
        if not record.later or record.checked_in == number:
            return
        record.checked_in = number
        checksum = _checksum_on_device(storage, record.device, 0, record.num_bytes)
        if isinstance(checksum, FakeTensor):
            return
        checks = self._checks.get(number)
        is_first = checks is None
        if checks is None:
            self._checks[number] = checks = _Checks()
        checks.pairs += [(checksum, later) for later in record.later]
        if is_first:
            at_end_of_backward(checks.compare)

    def _store_for(self, tensor: torch.Tensor) -> Store:
        if isinstance(tensor, FakeTensor):
            return FakeStore(reads_ahead=self._to == "host")
        key = torch.device("cpu") if self._to == "disk" else tensor.device
        if key not in self._stores:
            self._stores[key] = DiskStore(self._folder) if self._to == "disk" else HostStore(key)
        return self._stores[key]

    def _forget(self, record: _Record) -> None:
        if record.original is not None:
            self._held.pop(id(record), None)
            self.held_bytes -= record.num_bytes
        if record.store is not None:
            record.store.release(record.handle)
            self._num_moved -= 1
            if self._num_moved == 0 and self._reads is not None:
                self._reads.__exit__()
                self._reads = None
                self._moved.clear()


def read_offload(offload: object) -> frozenset[str]:
    """Read the wrapper's ``offload`` setting; None is the empty set.

    Raises:
        ConfigError: It is not a collection of ``"activations"`` and ``"optimizer"``.
    """
    if offload is None:
        return frozenset()
    if isinstance(offload, list | tuple | set | frozenset) and all(each in _OFFLOADS for each in offload):
        return frozenset(offload)
    words = [offload] if isinstance(offload, str) else list(offload) if isinstance(offload, Collection) else []
    meant = sorted({nearest_word(each, _OFFLOADS) or "" for each in words if isinstance(each, str)} - {""})
    shown = ", ".join(map(repr, meant or _OFFLOADS[:1]))
    raise Checker(WRAPPER.kind).refusal(
        "offload",
        offload,
        "a set of 'activations' and 'optimizer', or an empty one",
        fix="pass offload=()." if offload is False else f"pass offload={{{shown}}}.",
    )


def make_offload(
    choice: Collection[str], model: nn.Module, optimizers: Sequence[Optimizer], cleanup: contextlib.ExitStack
) -> offload_activations | None:
    """Apply the wrapper's ``offload`` setting (to the next larger memory); return the activation offload, if any."""
    if "optimizer" in choice:
        cleanup.enter_context(moved_state(optimizers))
    if "activations" not in choice:
        return None
    return offload_activations(to="disk" if device_of(model).type == "cpu" else "host", model=model)


class _Record:
    """The bytes of one storage, or of a small part of it, kept in place or moved out.

    Args:
        owner: Whose record it is.
        tensor: A tensor with this storage.
        first: First byte in the storage.
        num_bytes: Number of bytes.
        before: The record that was made before this one, which a backward needs after it.
    """

    def __init__(
        self,
        owner: offload_activations,
        tensor: torch.Tensor,
        first: int,
        num_bytes: int,
        *,
        before: weakref.ref[_Record] | None,
    ) -> None:
        self._owner, self._before = owner, before
        self._source = weakref.ref(tensor.untyped_storage())
        self._loaded: weakref.ref[torch.UntypedStorage] | None = None
        self._ahead: Arriving | None = None  # on its way, for the next operator of the backward
        self._staying: torch.UntypedStorage | None = None  # until the next one that stays is brought back
        self.device = tensor.device
        self.version = version_of(tensor)
        self.first, self.num_bytes = first, num_bytes
        self.num_saved = 0  # tensors of a graph that it is for
        self.original: torch.Tensor | None = tensor  # while it is kept
        self.store: Store | None = None
        self.handle: Any = None
        self.checksum: tuple[int, ...] | None = None  # of what was moved out; None on an accelerator, and without data
        self.later: list[torch.Tensor] = []  # checksums, on an accelerator, of its storage whenever it was saved again
        self.checked_in: int | None = None  # the backward that has compared them

    def __del__(self) -> None:
        self._owner._forget(self)  # noqa: SLF001 - one mechanism in two classes

    def is_of(self, storage: torch.UntypedStorage) -> bool:
        """Whether it has bytes of this storage: another one may have its address since."""
        return self._source() is storage

    @property
    def is_kept(self) -> bool:
        """Whether it was not moved out."""
        return self.original is not None

    def covers(self, storage: torch.UntypedStorage, version: int, first: int, size: int) -> bool:
        """Return whether it holds these bytes of this storage, in this version."""
        inside = self.first <= first and first + size <= self.first + self.num_bytes
        return inside and self._source() is storage and self.version == version

    def load(self) -> tuple[torch.UntypedStorage, int]:
        """Return a storage with the bytes, and the offset of its first byte in the original storage."""
        if self.original is not None:
            _check_version(self.original, self.version)
            storage, first = self.original.untyped_storage(), 0
        else:
            self._owner.save_written()  # the backward may run inside the block
            storage, first = self._bring_back(), self.first
        before = self._before() if self._before is not None else None
        if before is not None:
            before.read_ahead()
        return storage, first

    def _bring_back(self) -> torch.UntypedStorage:
        if self.store is None:
            _refuse_changed()
        storage = self._loaded() if self._loaded else None  # another operator may still have it
        if storage is None:
            arriving, self._ahead = self._ahead or self.store.read(self.handle, self.device), None
            storage = arriving.wait().untyped_storage()
            self._loaded = weakref.ref(storage)
        self._owner.check(self, storage)
        if self.num_saved > 1:
            self._owner.stay(self)
            self._staying = storage
        return storage

    def leave(self) -> None:
        """Stay no longer than the operators that have it."""
        self._staying = None

    def read_ahead(self) -> None:
        """Start bringing it back beside the computing, if its store can, and there is room."""
        is_there = self._ahead is not None or (self._loaded is not None and self._loaded() is not None)
        if self.store is None or is_there or not self.store.reads_ahead:
            return
        with contextlib.suppress(torch.OutOfMemoryError):
            self._ahead = self.store.read(self.handle, self.device)


class _Checks:
    """Checksums of what a backward brought back, each beside that of the same bytes when they were saved again."""

    def __init__(self) -> None:
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def compare(self) -> None:
        """Compare them.

        Raises:
            WrittenAsideError: They differ.
        """
        by_device: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for pair in self.pairs:
            by_device.setdefault(pair[0].device, []).append(pair)
        if all(torch.equal(*map(torch.stack, zip(*each, strict=True))) for each in by_device.values()):
            return
        raise WrittenAsideError(
            "backward() through tensors that offload_activations saved",
            got="a tensor that was written through .data, or by code that autograd does not see, after a part of it "
            "was saved",
            expected="writes that autograd sees",
            fix="write x[i] = value instead of x.data[i] = value, make a list and torch.stack it, or do without "
            "offload: checkpoint='auto' recomputes instead.",
        )


class _Packed:
    """Stand-in that autograd keeps for a saved tensor."""

    def __init__(self, tensor: torch.Tensor, record: _Record | None) -> None:
        self._record = record
        if record is None:
            self._tensor, self._saved_version = tensor, version_of(tensor)
        else:
            self._layout = (tensor.dtype, tensor.device, tensor.storage_offset(), tensor.shape, tensor.stride())

    def unpack(self) -> torch.Tensor:
        """Return the tensor as it was saved."""
        if self._record is None:
            _check_version(self._tensor, self._saved_version)
            return self._tensor
        storage, first = self._record.load()
        dtype, device, offset, shape, stride = self._layout
        return torch.empty(0, dtype=dtype, device=device).set_(storage, offset - first // dtype.itemsize, shape, stride)

    def unpack_for_node(self) -> torch.Tensor:
        """Return the tensor as it was saved, unless it may have been saved before it had its values."""
        node = current_node()
        is_moved = self._record is not None and not self._record.is_kept
        if is_moved and node is not None and node.name().startswith(_UNFILLED_NODE):
            _refuse_unfilled()
        return self.unpack()


def _has_storage(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is just a view of one storage; the zeros of forward-mode AD have an empty one."""
    plain = type(tensor) in {torch.Tensor, nn.Parameter, FakeTensor} and tensor.layout == torch.strided
    is_other = tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or is_zero_tensor(tensor)
    return plain and not (is_other or is_functorch_wrapped_tensor(tensor))


def _has_own_version(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a part of a storage whose other parts may change without its version.

    `unsafe_chunk` and `unsafe_split` make such parts, as in PyTorch's own GRU on a CPU.
    """
    return not is_view(tensor) and _has_storage(tensor) and _extent(tensor)[1] < tensor.untyped_storage().nbytes()


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return first byte and size of a view's range in its storage; the first byte is aligned for every dtype."""
    start = int(tensor.storage_offset()) * tensor.element_size()
    first = start - start % _ALIGNMENT
    return first, start + span(tensor) * tensor.element_size() - first


def _storages(model: nn.Module) -> set[int]:
    """Return the addresses of a model's parameters and buffers."""
    tensors = [*model.parameters(), *model.buffers()]
    return {storage_key(tensor.untyped_storage()) for tensor in tensors if _has_storage(tensor)}


def _view_bytes(tensor: torch.Tensor, first: int, size: int) -> torch.Tensor:
    """Return a byte range of a tensor's storage as a tensor."""
    return tensor.new_empty(0, dtype=torch.uint8).set_(tensor.untyped_storage(), first, (size,), (1,))


def _compares_in_backward(tensor: torch.Tensor) -> bool:
    """Whether checksums of a tensor are compared in backward: to compare numbers of an accelerator waits for it."""
    return tensor.device.type != "cpu"


def _checksum(tensor: torch.Tensor, record: _Record) -> tuple[int, ...] | None:
    """Return a checksum of a record's bytes in a tensor's storage on the CPU; None for a tensor without data."""
    if isinstance(tensor, FakeTensor):
        return None
    size = record.num_bytes
    data: Any = _view_bytes(tensor, record.first, size).numpy()  # no tensor beside the training's own
    words, rest = data[: size - size % _WORD].view(np.uint64), data[size - size % _WORD :]
    return int(words.sum()), int(words[::_STRIDE].sum()), int(rest.sum())


def _checksum_on_device(storage: torch.UntypedStorage, device: torch.device, first: int, size: int) -> torch.Tensor:
    """Return a checksum, int64, 0-dim, of a byte range of a storage; nothing waits for the device."""
    start, num_words = first // _WORD, size // _WORD
    empty = torch.empty(0, dtype=torch.int64, device=device)
    checksum = empty.set_(storage, start, (num_words,), (1,)).sum()
    some = empty.set_(storage, start, (-(-num_words // _STRIDE),), (_STRIDE,)).sum()
    checksum = torch.add(checksum, some, alpha=_WEIGHT)
    if size % _WORD:
        rest = torch.empty(0, dtype=torch.uint8, device=device)
        rest = rest.set_(storage, first + num_words * _WORD, (size % _WORD,), (1,))
        checksum = checksum + rest.sum(dtype=torch.int64)
    return checksum


def _check_version(tensor: torch.Tensor, version: int) -> None:
    if version_of(tensor) != version:
        _refuse_changed(f", which has the shape {tuple(tensor.shape)}")


def _refuse_unfilled() -> NoReturn:
    raise StateError(
        "backward() through tensors that offload_activations saved",
        got="the noise of rrelu, which autograd saved before it was drawn",
        expected="tensors that have their values when they are saved",
        fix="use leaky_relu in place of rrelu, or recompute its block: checkpoint={'...': 'full'}.",
    )


def _refuse_changed(shape: str = "") -> NoReturn:
    node = current_node()
    raise StateError(
        "backward() through tensors that offload_activations saved",
        got=f"a tensor{shape} that was changed in place after it was saved for {node.name() if node else 'backward'}",
        expected="saved tensors that stay unchanged until backward",
        fix="change a copy (x = x + 1 instead of x += 1), or change it after backward.",
    )
