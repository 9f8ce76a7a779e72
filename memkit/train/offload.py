"""Activations that wait for backward on the disk or in host memory, under a budget of bytes that may stay."""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from memkit._errors import ConfigError, StateError
from memkit._units import parse_bytes
from memkit.train.offload_files import DiskStore, HostStore, Store

_WORTH_WHOLE = 4  # a storage is kept as a whole, once for all its views, unless the view at hand is much smaller


class offload_activations(contextlib.AbstractContextManager["offload_activations"]):  # noqa: N801 - used like a function
    """Keep what a forward saves for its backward elsewhere: on the disk, or an accelerator's in host memory.

    What the forwards in the block save beyond ``budget`` is moved out, the oldest first, as backward needs it last; the
    backward, which may run after the block, brings it back. Gradients are bit-identical. Several views of one storage
    are written once, and keep their strides. Parameters and buffers stay, and so does what is smaller than
    ``min_bytes``. The same object can be entered again for each step.

    Args:
        to: ``"disk"``: an unlinked temporary file, which is gone with the process, however it ends. ``"host"``: pinned
            memory, filled and read by a stream of its own, for tensors of an accelerator; those on the CPU stay.
        budget: Bytes (or text such as ``"2GiB"``) of saved tensors that may stay where they are.
        min_bytes: Smaller tensors stay, and do not count.
        model: Its parameters and buffers stay. Without it parameters are recognised, buffers are not.
        folder: Where the file lies; None is the system's temporary folder. Some systems keep that in memory.

    Attributes:
        held_bytes: What counts against the budget now.
        written_bytes: What was moved out so far.

    Raises:
        ConfigError: A setting is wrong.
        MemkitOutOfMemoryError: From the forward: the disk is full. Everything is as before that operator.
        StateError: From the backward: a saved tensor that stayed was changed in place since, as plain autograd would
            also refuse. A tensor that was moved out has the value that it had when it was saved.

    Memory:
        The budget, and while it is brought back the storage that one operator of the backward needs.

    Example:
        >>> import torch, memkit as mk
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh())
        >>> offload = mk.offload_activations(to="disk", budget="4KiB", min_bytes=1024)
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
        if to not in {"disk", "host"}:
            raise ConfigError(
                f"offload_activations(to={to!r})", got=repr(to), expected="'disk' or 'host'", fix="change to."
            )
        self._budget = parse_bytes(budget, name="budget")
        self._min_bytes = parse_bytes(min_bytes, name="min_bytes")
        self._to, self._folder, self._model = to, None if folder is None else Path(folder), model
        self._stores: dict[torch.device | None, Store] = {}
        self._lasting: set[int] = set()  # storages of the model, refreshed on entry
        self._records: dict[int, weakref.ref[_Record]] = {}  # by the storage's address; a dead one is replaced
        self._held: OrderedDict[int, weakref.ref[_Record]] = OrderedDict()  # by id, oldest first
        self._active: list[saved_tensors_hooks] = []
        self.held_bytes = self.written_bytes = 0

    def __enter__(self) -> offload_activations:
        """Begin to offload."""
        if self._model is not None:
            tensors = [*self._model.parameters(), *self._model.buffers()]
            self._lasting = {tensor.untyped_storage()._cdata for tensor in tensors}  # noqa: SLF001 - its identity
        hooks = saved_tensors_hooks(self._pack, _unpack)
        hooks.__enter__()
        self._active.append(hooks)
        return self

    def __exit__(self, *error: object) -> None:
        """Stop; what was saved stays where it is until its backward."""
        self._active.pop().__exit__(*error)

    def _pack(self, tensor: torch.Tensor) -> _Packed:
        tensor = tensor.detach()  # an operator's own result would keep its graph alive; the version is shared
        if not self._may_move(tensor):
            return _Packed(None, tensor, tensor._version)
        storage = tensor.untyped_storage()
        first, extent = _extent(tensor)
        if storage.nbytes() <= _WORTH_WHOLE * extent:
            first, extent = 0, storage.nbytes()
        key = storage._cdata  # noqa: SLF001 - the storage's address, valid as long as the weak reference to it
        known = self._records.get(key)
        record = known() if known else None
        if record is None or not record.has(storage, first, extent, tensor._version):
            record = _Record(self, tensor, storage, first, extent)
            self._records[key] = weakref.ref(record)
            self._hold(record)
        return _Packed(record, tensor.to("meta") if record.original is None else tensor, tensor._version)

    def _may_move(self, tensor: torch.Tensor) -> bool:
        if type(tensor) not in {torch.Tensor, nn.Parameter} or tensor.layout != torch.strided or tensor.is_quantized:
            return False
        if tensor.is_conj() or tensor.is_neg() or tensor.nbytes < self._min_bytes:
            return False
        return True
