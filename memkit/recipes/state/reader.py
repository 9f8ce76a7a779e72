"""Read files of `torch.save` without unpickling: only plain values and dense tensors, no executable code.

``torch.load(weights_only=True)`` reads them too, but it calls any function that the program has added to its list of
safe globals. Here a call in the pickle is only recorded. The few objects that a state consists of are built from the
table below, and each tensor is checked against the bytes in the file.
"""

from __future__ import annotations

import io
import math
import struct
import sys
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, final

import torch

from memkit._core.pickles import Noted, load_noted, name_of, rebuild, refuse_pickle
from memkit._core.printable import short
from memkit._torch.pickles import GET_LAYOUT, REBUILD_TENSOR, REBUILD_TENSOR_OF_DTYPE

_PICKLE = "data.pkl"
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, lengths of the name and of the field after it
DTYPES: Final = {str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}
_LAYOUTS: Final = {str(each): each for each in vars(torch).values() if isinstance(each, torch.layout)}
_STORAGES: Final = {
    "torch.storage.UntypedStorage": torch.uint8,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.BoolStorage": torch.bool,
    "torch.ByteStorage": torch.uint8,
    "torch.CharStorage": torch.int8,
    "torch.ComplexDoubleStorage": torch.complex128,
    "torch.ComplexFloatStorage": torch.complex64,
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.IntStorage": torch.int32,
    "torch.LongStorage": torch.int64,
    "torch.ShortStorage": torch.int16,
}


def _ordered(noted: Noted) -> OrderedDict[Any, Any]:
    made = OrderedDict(noted.items)
    attributes = noted.state or {}
    if any(not isinstance(name, str) or hasattr(OrderedDict, name) for name in attributes):
        refuse_pickle(f"a dict with the attributes {short(list(attributes))}", "a module's versions")
    vars(made).update(attributes)
    return made


def _encoded(text: str, encoding: str) -> bytes:
    return text.encode("latin1") if encoding == "latin1" else refuse_pickle(f"the encoding {short(encoding)}", "latin1")


def _device(*args: Any) -> torch.device:
    try:
        return torch.device(*args)
    except RuntimeError:
        refuse_pickle(f"the device {short(args)}", "a device of torch")


def _layout(name: str) -> torch.layout:
    return _LAYOUTS.get(name) or refuse_pickle(f"the layout {short(name)}", "a layout of torch")


_CALLS: Final[Mapping[str, Callable[[Noted], object]]] = {
    "collections.OrderedDict": _ordered,
    "collections.Counter": lambda noted: Counter(dict(*noted.args)),
    "__builtin__.set": lambda noted: set(*noted.args),
    "__builtin__.complex": lambda noted: complex(*noted.args),
    "_codecs.encode": lambda noted: _encoded(*noted.args),
    "torch.Size": lambda noted: torch.Size(*noted.args),
    "torch.device": lambda noted: _device(*noted.args),
    GET_LAYOUT: lambda noted: _layout(*noted.args),
}
_NAMES: Final = frozenset({*DTYPES, *_STORAGES, *_CALLS, REBUILD_TENSOR, REBUILD_TENSOR_OF_DTYPE})


class _Storage(NamedTuple):
    """The values of one or more tensors, still in the file."""

    key: str
    dtype: torch.dtype
    num_elements: int


@final
class TensorFile:
    """A file of `torch.save`, or part of one; tensors are read on demand.

    Args:
        file: The file, which must stay open.

    Attributes:
        value: The saved value, in which tensors and the like are notes; see `read`.

    Raises:
        InputError: The file was not written by `torch.save`, or holds more than plain values and tensors.
    """

    def __init__(self, file: io.BufferedIOBase) -> None:
        self._file = file
        self._places = _find_records(file)
        self._storages: dict[str, torch.Tensor] = {}  # bytes by key
        self._unused: set[str] = set()
        names = [name for name in self._places if name.endswith(f"/{_PICKLE}")]
        if len(names) != 1:
            refuse_pickle(f"a zip file with {len(names)} {_PICKLE}", "a file of torch.save")
        self._folder = names[0].removesuffix(_PICKLE)
        order = self._read_record("byteorder") if f"{self._folder}byteorder" in self._places else b"little"
        if order != sys.byteorder.encode():
            refuse_pickle(f"values in the byte order {short(order)}", f"{sys.byteorder}, as on this machine")
        pickled = self._read_record(_PICKLE)
        self._most_parts = 4 * len(pickled)
        self.value: Any = load_noted(pickled, "state", _NAMES)

    def read(self, part: object) -> Any:
        """Read `value`, or a part of it, with its tensors, into host memory.

        Raises:
            InputError: A tensor does not match the bytes in the file, or an object cannot be part of a state.
            OSError: The file cannot be read.
        """
        value = rebuild(part, self._make, self._most_parts)
        if self._unused:
            refuse_pickle("values that do not belong to any tensor", "tensors")
        return value

    def _make(self, noted: Noted | type[Noted]) -> object:
        if isinstance(noted, type):
            name = name_of(noted)
            found = (DTYPES | _STORAGES).get(name or "")
            return refuse_pickle(f"{name} without a call", "a dtype") if found is None else found
        if not noted.name:
            return self._storage(*noted.args)
        if noted.name in {REBUILD_TENSOR, REBUILD_TENSOR_OF_DTYPE}:
            return self._tensor(*noted.args, has_dtype=noted.name == REBUILD_TENSOR_OF_DTYPE)
        if noted.name not in _CALLS:
            refuse_pickle(f"a call of {noted.name}", "plain values and tensors")
        if noted.name != "collections.OrderedDict" and (noted.items or noted.state is not None):
            refuse_pickle(f"{noted.name} that is changed afterwards", "plain values and tensors")
        return _CALLS[noted.name](noted)

    def _storage(self, reference: tuple[Any, ...]) -> _Storage:
        kind, dtype, key, _, num_elements = reference
        if kind != "storage" or not isinstance(dtype, torch.dtype) or not isinstance(key, str):
            refuse_pickle(f"a reference to {short(reference)}", "a tensor's values")
        self._unused.add(key)
        return _Storage(key, dtype, num_elements)

    def _tensor(
        self,
        storage: _Storage,
        offset: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        requires_grad: object,  # noqa: ARG002 - irrelevant for values that are copied
        hooks: object,  # noqa: ARG002 - never called
        *more: Any,
        has_dtype: bool,
    ) -> torch.Tensor:
        dtype = more[0] if has_dtype else storage.dtype
        if any(each is not None and each != {} for each in more[has_dtype:]):
            refuse_pickle("a tensor with attributes", "a dense tensor")
        data, numbers = self._read_storage(storage), (offset, *shape, *strides)
        if any(type(number) is not int or not 0 <= number < 2**62 for number in numbers):
            refuse_pickle(f"a tensor of shape {short(shape)}", "whole numbers")
        num_elements = math.prod(shape)
        last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        if num_elements * dtype.itemsize != len(data) or (num_elements and last >= num_elements):
            refuse_pickle(f"a tensor of shape {short(shape)} over {len(data)} bytes", f"as many values of {dtype}")
        return data.view(dtype).as_strided(shape, strides, offset)

    def _read_storage(self, storage: _Storage) -> torch.Tensor:
        self._unused.discard(storage.key)
        if storage.key not in self._storages:
            start, num_bytes = self._place(f"data/{storage.key}")
            data = torch.empty(num_bytes, dtype=torch.uint8)
            self._file.seek(start)
            self._file.readinto(memoryview(data.numpy()))  # type: ignore[arg-type] # it has a buffer
            self._storages[storage.key] = data
        data = self._storages[storage.key]
        if len(data) != storage.num_elements * storage.dtype.itemsize:
            refuse_pickle(
                f"{short(storage.num_elements)} values of {storage.dtype} in {len(data)} bytes", "as many as fit"
            )
        return data

    def _read_record(self, name: str) -> bytes:
        start, num_bytes = self._place(name)
        self._file.seek(start)
        return self._file.read(num_bytes)

    def _place(self, name: str) -> tuple[int, int]:
        place = self._places.get(f"{self._folder}{name}")
        return place or refuse_pickle(f"no record {short(name)}", "a complete file of torch.save")


def read_tensor(data: bytes) -> torch.Tensor:
    """Return the only tensor in bytes written by `torch.save`.

    Raises:
        InputError: They hold anything else.
    """
    file = TensorFile(io.BytesIO(data))
    tensor = file.read(file.value)
    return tensor if isinstance(tensor, torch.Tensor) else refuse_pickle(short(tensor), "a tensor")


def _find_records(file: io.BufferedIOBase) -> dict[str, tuple[int, int]]:
    """Find the offset and size of each record of a zip file; `torch.save` compresses none."""
    end = file.seek(0, io.SEEK_END)
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
        places = {entry.filename: (_find_start(file, entry), entry.file_size) for entry in entries}
    except (zipfile.BadZipFile, struct.error, ValueError, NotImplementedError, OSError) as error:
        refuse_pickle(f"a zip file that cannot be read ({short(str(error))})", "a file of torch.save")
    is_packed = any(entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 for entry in entries)
    num_bytes = sum(size for _, size in places.values())
    if is_packed or len(places) < len(entries) or num_bytes > end:
        refuse_pickle("a zip file with packed or repeated records", "a file of torch.save")
    if any(start + size > end for start, size in places.values()):
        refuse_pickle("a zip file with records beyond its end", "a complete file of torch.save")
    return places


def _find_start(file: io.BufferedIOBase, entry: zipfile.ZipInfo) -> int:
    file.seek(entry.header_offset)
    signature, *lengths = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    if signature != b"PK\x03\x04":
        refuse_pickle(f"no record at byte {entry.header_offset}", "a file of torch.save")
    return int(entry.header_offset + _LOCAL_HEADER.size + sum(lengths))
