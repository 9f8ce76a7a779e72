"""Sharded tensors in files of torch.distributed.checkpoint: each rank writes its own, and reads the parts it needs.

PyTorch writes the files. They are read here, because PyTorch's own reader unpickles their index and would run any code
in it. No rank waits for another while reading.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, final

import torch

from memkit._core.pickles import Noted, load_noted, name_of, rebuild, refuse_pickle
from memkit._core.printable import short
from memkit._torch.pickles import GET_LAYOUT, MEMORY_FORMATS, STORAGE_INFO
from memkit.recipes.state.files import read_file
from memkit.recipes.state.reader import DTYPES, read_tensor

_INDEX = ".metadata"
_DATA = re.compile(r"__\d+_\d+\.distcp", re.ASCII)
_RECORDS: Final = "torch.distributed.checkpoint.metadata."
_NAMES: Final = frozenset(
    {
        *DTYPES,
        *(f"{_RECORDS}{name}" for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
        *(f"{_RECORDS}{name}" for name in ("TensorStorageMetadata", "ChunkStorageMetadata", MEMORY_FORMATS)),
        *(f"{module}.{system}Path" for module in ("pathlib", "pathlib._local") for system in ("Posix", "Windows")),
        "builtins.getattr",  # Python before 3.11.4 writes an enum's member as this call, which is noted and never made
        "torch.Size",
        STORAGE_INFO,
        GET_LAYOUT,
    }
)


class _Box(NamedTuple):
    """A rectangular part of a tensor."""

    starts: tuple[int, ...]
    shape: tuple[int, ...]

    def overlap(self, other: _Box) -> _Box:
        """Return the intersection; its shape has a zero if it is empty."""
        starts = tuple(map(max, self.starts, other.starts))
        ends = [min(one.starts[dim] + one.shape[dim] for one in (self, other)) for dim in range(len(starts))]
        return _Box(starts, tuple(max(0, end - start) for start, end in zip(starts, ends, strict=True)))

    def within(self, outer: _Box) -> tuple[slice, ...]:
        """Return the slices that select this box within an enclosing one."""
        return tuple(
            slice(start - its_start, start - its_start + size)
            for start, its_start, size in zip(self.starts, outer.starts, self.shape, strict=True)
        )


class _Chunk(NamedTuple):
    """A part of a tensor, stored in a file."""

    box: _Box
    file: str
    start: int
    num_bytes: int


class _Stored(NamedTuple):
    """A tensor stored in the files."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: list[_Chunk]


def write_shards(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write sharded tensors with torch.distributed.checkpoint, each rank its own; all ranks must call it."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter  # slow to import, and rarely needed
    from torch.distributed.checkpoint.state_dict_saver import save

    save(dict(tensors), storage_writer=FileSystemWriter(folder))


@final
class ShardFiles:
    """The files written by `write_shards`, on any number of ranks.

    Args:
        folder: The state's folder.

    Raises:
        InputError: The index was not written by torch.distributed.checkpoint.
        OSError: The index cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        data = read_file(folder / _INDEX)
        value = load_noted(data, "index of sharded tensors", _NAMES)
        self._stored: dict[str, _Stored] = rebuild(value, _make, 4 * len(data))
        if not isinstance(self._stored, dict):
            refuse_pickle(short(self._stored), "an index of sharded tensors")

    def read(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a tensor, in host memory.

        Args:
            name: The name under which it was written.
            like: A sharded tensor of the same shape and dtype; its sharding determines this rank's part.

        Raises:
            InputError: The files do not hold all values of this part.
            OSError: They cannot be read.
        """
        stored = self._stored.get(name)
        if stored is None or stored.shape != tuple(like.shape) or stored.dtype != like.dtype:
            found = "no tensor" if stored is None else f"{stored.dtype} of shape {stored.shape}"
            refuse_pickle(f"{found} for {name}", f"{like.dtype} of shape {tuple(like.shape)}")
        local: torch.Tensor = like.to_local()  # type: ignore[attr-defined] # a DTensor's
        values = torch.empty(local.shape, dtype=local.dtype)
        (own,) = like.__create_chunk_list__()  # type: ignore[attr-defined] # a DTensor's
        box = _Box(tuple(own.offsets), tuple(own.sizes))
        done: list[_Box] = []
        for chunk in stored.chunks:
            common = box.overlap(chunk.box)
            if math.prod(common.shape):
                values[common.within(box)] = self._read_chunk(chunk, stored.dtype)[common.within(chunk.box)]
                done.append(common)
        is_twice = any(
            math.prod(one.overlap(other).shape) for index, one in enumerate(done) for other in done[index + 1 :]
        )
        if is_twice or sum(math.prod(each.shape) for each in done) != values.numel():
            refuse_pickle(f"missing or duplicate values of {name}", "each value of a tensor once")
        return values

    def _read_chunk(self, chunk: _Chunk, dtype: torch.dtype) -> torch.Tensor:
        tensor = read_tensor(read_file(self._folder / chunk.file, chunk.start, chunk.num_bytes))
        if tuple(tensor.shape) != chunk.box.shape or tensor.dtype != dtype:
            refuse_pickle(
                f"{tensor.dtype} of shape {tuple(tensor.shape)} in {chunk.file}", f"{dtype} of {chunk.box.shape}"
            )
        return tensor


def _make(noted: Noted | type[Noted]) -> object:
    """Build the object for a note in the index: plain tuples and dicts, and one `_Stored` for each tensor."""
    if isinstance(noted, type):
        return DTYPES.get(name_of(noted) or "")
    match noted.name.rpartition(".")[2]:
        case "Size":
            return tuple(int(size) for size in noted.args[0])
        case "MetadataIndex":
            return noted.state["fqn"], noted.state["offset"]
        case "ChunkStorageMetadata":
            return _Box(noted.state["offsets"], noted.state["sizes"])
        case "Metadata":
            places = noted.state["storage_data"]
            entries = noted.state["state_dict_metadata"]
            return {name: _stored(name, entry, places) for name, entry in entries.items()}
        case _:
            return noted.state


def _stored(name: str, entry: Mapping[str, Any], places: Mapping[tuple[str, Any], Mapping[str, Any]]) -> _Stored:
    shape, dtype = entry["size"], entry["properties"][0]
    chunks = []
    for box in entry["chunks"]:
        place = places[name, box.starts]
        file = place["relative_path"]
        if not _DATA.fullmatch(file) or place.get("transform_descriptors"):
            refuse_pickle(f"values in {short(file)}", "unmodified files beside the index")
        if not len(shape) == len(box.starts) == len(box.shape) or min(*box.starts, *box.shape, 0) < 0:
            refuse_pickle(f"{box} of a tensor of shape {shape}", "a part of that tensor")
        chunks.append(_Chunk(box, file, max(0, place["offset"]), place["length"]))
    return _Stored(shape, dtype, chunks)
