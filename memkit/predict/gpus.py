"""GPU memory sizes: a table of GPUs as torch reports them, with confidence and source; live readings.

The table is `gpus.json` next to this file. Nothing here imports torch until a live reading is requested.
"""

from __future__ import annotations

import difflib
import functools
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, SupportsIndex, TypeAlias

from memkit._core.errors import ConfigError, FileFormatError, InputError, InputTypeError
from memkit._core.packaged import packaged_text
from memkit._core.settings import Checker
from memkit._core.units import parse_bytes
from memkit._machine.files import write_text
from memkit._machine.regular_file import read_regular

_WORDS = re.compile(
    r"\((?:r|tm)\)|nvidia|geforce|tesla|quadro|amd|radeon|instinct|intel|arc|graphics|generation|[^a-z0-9]"
)
_FAMILY = re.compile(r"^(?:rtx|gtx|rx)(?=[a-z0-9])")
_LIVE = re.compile(r"(?:cuda|xpu|mps)(?::\d+)?")
_VENDORS = {"cuda": ("NVIDIA", "AMD"), "xpu": ("Intel",), "mps": ("Apple",)}  # by torch's type of device
_COLUMNS = {  # of the table, by field, where the names differ
    "box_bytes": "box",
    "total_interval": "total",
    "context_interval": "context",
    "cublas_workspace_bytes": "workspace",
    "num_multiprocessors": "multiprocessors",
}
_NUM_SUGGESTIONS = 6
# Words in a name that identify the maker, including those that `_WORDS` and `_FAMILY` leave out.
_MAKERS = {
    "NVIDIA": re.compile(r"nvidia|geforce|quadro|tesla|\bgtx|\brtx|titan"),
    "AMD": re.compile(r"\bamd|radeon|instinct|\brx|\bmi\d"),
    "Intel": re.compile(r"intel|\barc"),
    "Apple": re.compile(r"apple|\bm\d\b"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GPU:
    """A GPU. Where reports differ, both ends are kept, and memkit calculates with the worse one.

    Attributes:
        name: Its common name.
        vendor: NVIDIA, AMD, Intel or Apple.
        architecture: Compute capability such as ``"8.9"``, AMD's ``"gfx90a"``, or the name of a family.
        box_bytes: The size on the box, in GiB there (for Apple the machine's memory).
        total_interval: Lowest and highest total that torch has been seen to report: drivers and error correction
            differ.
        context_interval: Lowest and highest memory that a process holds outside torch's allocator.
        cublas_workspace_bytes: Workspace that torch allocates per cuBLAS handle; None if unknown.
        num_multiprocessors: Number of multiprocessors; None if unknown.
        confidence: ``"observed"``: a report names the GPU and the total. ``"derived"``: from a related GPU.
            ``"live"`` and ``"calibrated"``: read on this machine.
        source: Source of the totals.
        date: Year and month of the newest source, or of the reading.
        aliases: Other names.

    Example:
        >>> import memkit as mk
        >>> card = mk.find_gpu("4090")
        >>> card.name, card.usable_bytes == card.total_bytes - card.context_bytes
        ('RTX 4090', True)
    """

    name: str
    vendor: str
    architecture: str
    box_bytes: int
    total_interval: tuple[int, int]
    context_interval: tuple[int, int]
    cublas_workspace_bytes: int | None
    num_multiprocessors: int | None
    confidence: Literal["observed", "derived", "live", "calibrated"]
    source: str
    date: str
    aliases: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        """The smallest total memory that torch has been seen to report."""
        return self.total_interval[0]

    @property
    def context_bytes(self) -> int:
        """The most memory that driver and libraries have been seen to hold."""
        return self.context_interval[1]

    @property
    def usable_bytes(self) -> int:
        """Bytes left for torch's allocator: ``total_bytes - context_bytes``."""
        return self.total_bytes - self.context_bytes

    @property
    def compute_capability(self) -> tuple[int, int] | None:
        """Major and minor compute capability of an NVIDIA GPU; None for others."""
        major, _, minor = self.architecture.partition(".")
        return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None

    def as_dict(self) -> dict[str, Any]:
        """Return the GPU as a row of the table, with sizes in bytes, ready for JSON."""
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        return {_COLUMNS.get(name, name): value for name, value in values.items()}


CapacityLike: TypeAlias = SupportsIndex | str | GPU


class CardsNotFoundError(InputError, FileNotFoundError):
    """There is no file of measured GPUs at the path."""


def all_gpus(calibrated: str | os.PathLike[str] | None = None) -> tuple[GPU, ...]:
    """Return the table, ordered by vendor, generation and size.

    Args:
        calibrated: A file written by `write_gpus`: its GPUs replace those of the same name.

    Returns:
        The GPUs. Without ``calibrated``, only the package's own file is read.

    Raises:
        FileFormatError: ``calibrated`` was not written by `write_gpus`.
        CardsNotFoundError: There is no such file (an `InputError` and a ``FileNotFoundError``).
        OSError: ``calibrated`` cannot be read.

    Example:
        >>> import memkit as mk
        >>> len(mk.predict.all_gpus()) >= 50
        True
    """
    if calibrated is None:
        return _table()
    own = {gpu.name: gpu for gpu in _read(Checker("all_gpus").path("calibrated", calibrated))}
    table = {gpu.name: gpu for gpu in _table()}
    return tuple((table | own).values())


def find_gpu(name: str | GPU, *, calibrated: str | os.PathLike[str] | None = None) -> GPU:
    """Look up a GPU by name.

    Args:
        name: The name as printed on the box or reported by the driver, in any case and spacing: ``"RTX 4090"``,
            ``"4090"``, ``"NVIDIA A100-SXM4-40GB"``, ``"Apple 16GB"``. ``"cuda"``, ``"cuda:1"``, ``"xpu"`` and ``"mps"``
            read the GPU of this machine. A `GPU` is returned unchanged.
        calibrated: As for `all_gpus`.

    Returns:
        The GPU.

    Raises:
        InputError: No GPU, or several, match this name; the message lists the closest ones.
        InputTypeError: ``name`` is neither text nor a `GPU`.
        ConfigError: This machine does not have the device.
        FileFormatError: ``calibrated`` is not a file of GPUs.
        OSError: ``calibrated`` cannot be read.

    Example:
        >>> import memkit as mk
        >>> mk.find_gpu("nvidia geforce rtx4090").name
        'RTX 4090'
        >>> mk.find_gpu("A100")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        memkit.errors.InputError: find_gpu('A100'): got a name that matches several GPUs; expected the name ...
    """
    if calibrated is not None:
        calibrated = Checker("find_gpu").path("calibrated", calibrated)
    return look_up(name, f"find_gpu({_shown(name)})", calibrated=calibrated)


def look_up(name: str | GPU, call: str, *, calibrated: str | os.PathLike[str] | None = None) -> GPU:
    """Look up a GPU as `find_gpu` does, for another entry point; ``call`` is the user's own call."""
    if isinstance(name, GPU):
        return name
    if not isinstance(name, str):
        raise _refuse_type(name, call)
    gpus = all_gpus(calibrated)
    if _LIVE.fullmatch(name):
        return _live(name, gpus, call)
    by_key = {key: gpu for gpu in gpus for key in _keys(gpu)}
    wanted = _key(name)
    if wanted in by_key:
        return by_key[wanted]
    if is_size_text(name):
        raise InputError(
            call, got="a size instead of a card", expected="the name of a GPU", fix=_size_fix(name.strip())
        )
    beginnings = [key for key in by_key if wanted and key.startswith(wanted)]
    if beginnings:
        names = list(dict.fromkeys(by_key[key].name for key in beginnings))[:_NUM_SUGGESTIONS]
        raise InputError(
            call,
            got="a name that matches several GPUs",
            expected=f"the name of one GPU: {', '.join(names)}",
            fix=f"write for example {names[0]!r}.",
        )
    names = _similar(name, wanted, gpus)
    raise InputError(
        call,
        got="an unknown GPU",
        expected=f"a GPU that `memkit gpus` lists, such as {', '.join(names)}"
        if names
        else "a GPU that `memkit gpus` lists",
        fix="write the name of a listed card of the same generation and size, or 'cuda' for the GPU of this machine; "
        "estimate.fits('8GiB') says whether a size is enough.",
    )


def _refuse_type(value: Any, call: str) -> InputTypeError:
    is_size = isinstance(value, (int, float)) and not isinstance(value, bool)
    return InputTypeError(
        call,
        got=f"{value!r}, a size instead of a card" if is_size else f"a {type(value).__name__}",
        expected="the name of a GPU as a string, or a GPU object",
        fix=_size_fix(f"{value:g}GiB") if is_size else "write 'RTX 4090', or 'cuda' for the GPU of this machine.",
    )


def _similar(name: str, wanted: str, gpus: Iterable[GPU]) -> list[str]:
    """Return similar names of cards by the same maker, or by any maker if the name names none."""
    makers = [maker for maker, words in _MAKERS.items() if words.search(name.lower())]
    by_key = {key: gpu.name for gpu in gpus if not makers or gpu.vendor in makers for key in _keys(gpu)}
    near = difflib.get_close_matches(wanted, by_key, n=_NUM_SUGGESTIONS)
    family = _FAMILY.match(_WORDS.sub("", name.lower()))
    if not near and family:  # the number is unknown, the series is not
        near = [key for key in by_key if by_key[key].lower().startswith(family[0])]
    return list(dict.fromkeys(by_key[key] for key in near))[:_NUM_SUGGESTIONS]


def is_size_text(text: str) -> bool:
    """Return whether a text is a size such as ``"24GiB"``, instead of the name of a card."""
    try:
        parse_bytes(text)
    except InputError:
        return False
    return True


def _size_fix(size: str) -> str:
    return (
        f"name a card, such as 'RTX 4090'; to check a size write estimate.fits({size!r}), or pass it as a budget: "
        f"plan_training(..., budget={size!r})."
    )


def _shown(name: object) -> str:
    return name.name if isinstance(name, GPU) else repr(name)


def capacity_bytes(
    capacity: CapacityLike, *, context_counted: bool = False, is_large: bool = True, name: str = "capacity"
) -> int:
    """Return the bytes of a device capacity.

    Args:
        capacity: Bytes as an int, text with a unit such as ``"24GiB"``, a GPU name that `find_gpu` accepts, or a
            `GPU`.
        context_counted: Whether the figure to compare includes the driver's context. If so, a GPU counts with its
            `GPU.total_bytes`, otherwise with its `GPU.usable_bytes`. Has no effect on a size.
        is_large: As for `memkit.memory.parse_bytes`.
        name: Name of the argument, for the error message.

    Returns:
        The capacity in bytes.

    Raises:
        InputError: A negative number, or text that is neither a size nor the name of one GPU.
        InputTypeError: ``capacity`` has another type.
        ConfigError: The named device of this machine does not exist.

    Example:
        >>> from memkit.predict.gpus import capacity_bytes, find_gpu
        >>> capacity_bytes("RTX 4090") == find_gpu("RTX 4090").usable_bytes, capacity_bytes("24GB")
        (True, 24000000000)
    """
    if isinstance(capacity, GPU):
        return capacity.total_bytes if context_counted else capacity.usable_bytes
    try:
        return parse_bytes(capacity, name=name, is_large=is_large)
    except InputError as not_a_size:
        if not isinstance(capacity, str):
            raise
        try:
            return capacity_bytes(find_gpu(capacity), context_counted=context_counted)
        except InputError as not_a_gpu:
            raise InputError(
                not_a_size.call,
                got=not_a_size.got,
                expected=f"{not_a_size.expected}; or {not_a_gpu.expected}",
                fix="write its memory as a size, such as '24GiB', or a card of `memkit gpus`, such as 'RTX 4090'.",
            ) from None


def write_gpus(path: str | os.PathLike[str], gpus: Iterable[GPU]) -> None:
    """Write GPUs to a file that `all_gpus` and `find_gpu` read, atomically replacing an existing one.

    Args:
        path: The file to write. Its directory must exist.
        gpus: The GPUs.

    Raises:
        InputError: ``path`` is a directory, or lies in one that does not exist.
        OSError: The file cannot be written.
    """
    write_text(path, json.dumps({"gpus": [gpu.as_dict() for gpu in gpus]}, indent=1) + "\n")


def capability_of(gpu: GPU) -> tuple[int, int]:
    """Return the compute capability; raise ConfigError for a GPU whose operators are unknown."""
    if gpu.compute_capability is None:
        others = [each for each in reversed(all_gpus()) if each.vendor == "NVIDIA"]  # the newest one of a size
        nearest = min(others, key=lambda each: abs(each.box_bytes - gpu.box_bytes))
        raise ConfigError(
            f"a dry run on {gpu.name!r}",
            got=f"a GPU from {gpu.vendor}",
            expected="an NVIDIA GPU: the memory of operators on other GPUs is not known",
            fix=f"write an NVIDIA GPU of about the same size, such as {nearest.name!r}.",
        )
    return gpu.compute_capability


@functools.cache
def _table() -> tuple[GPU, ...]:
    data = json.loads(packaged_text("memkit.predict", "gpus.json"))
    return tuple(_gpu({**data["architectures"][row["architecture"]], **row}) for row in data["gpus"])


def _read(path: Path) -> list[GPU]:
    try:
        data = read_regular(path, f"calibrated={str(path)!r}")
        return [_gpu(row) for row in json.loads(data.decode("utf-8"))["gpus"]]
    except FileFormatError:
        raise
    except FileNotFoundError:
        raise CardsNotFoundError(
            f"calibrated={str(path)!r}",
            got="no file at this path",
            expected="a file that `memkit gpus --calibrate FILE` wrote",
            fix=f"write it on the machine that has the GPU, with `memkit gpus --calibrate {path}`, or omit it.",
        ) from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise FileFormatError(
            f"calibrated={str(path)!r}",
            got=f"{type(error).__name__}: {error}",
            expected="a file that `memkit gpus --calibrate FILE` wrote",
            fix="write the file again with `memkit gpus --calibrate FILE` on the machine that has the GPU.",
        ) from error


def _gpu(row: Mapping[str, Any]) -> GPU:
    total, context = ([parse_bytes(end) for end in row[name]] for name in ("total", "context"))
    return GPU(
        name=row["name"],
        vendor=row["vendor"],
        architecture=row["architecture"],
        box_bytes=parse_bytes(row["box"]),
        total_interval=(total[0], total[1]),
        context_interval=(context[0], context[1]),
        cublas_workspace_bytes=None if row["workspace"] is None else parse_bytes(row["workspace"]),
        num_multiprocessors=row["multiprocessors"],
        confidence=row["confidence"],
        source=row["source"],
        date=row["date"],
        aliases=tuple(row["aliases"]),
    )


def _key(name: str) -> str:
    """Reduce a name to its distinctive part: ``"NVIDIA GeForce RTX 4090"`` to ``"4090"``."""
    return _FAMILY.sub("", _WORDS.sub("", name.lower()))


def _keys(gpu: GPU) -> set[str]:
    keys = {_key(name) for name in (gpu.name, *gpu.aliases)}
    return keys | {f"{key}{gpu.box_bytes // 2**30}gb" for key in keys}


def _live(name: str, gpus: Iterable[GPU], call: str) -> GPU:
    """Read the GPU of this machine: total and name from torch, the rest from the nearest row of the table."""
    from memkit._machine.devices import device_architecture, device_memory, device_name, resolve_device  # imports torch

    try:
        device = resolve_device(name)
    except ConfigError as error:
        raise ConfigError(
            call,
            got=f"{name!r}, the card of this machine, which has none",
            expected="a card that this machine has, or the name of one",
            fix="write 'RTX 4090', or another card of `memkit gpus`.",
        ) from error
    total_bytes = device_memory(device).total_bytes or 0
    architecture, own_name = device_architecture(device), device_name(device)
    gpus = [gpu for gpu in gpus if gpu.vendor in _VENDORS[device.type]]
    known = [gpu for gpu in gpus if any(key.startswith(_key(own_name)) for key in _keys(gpu))]
    related = known or [gpu for gpu in gpus if gpu.architecture == architecture] or gpus
    nearest = min(related, key=lambda gpu: abs(gpu.total_bytes - total_bytes))
    if not known:
        nearest = replace(nearest, box_bytes=total_bytes, num_multiprocessors=None, aliases=())
    return replace(
        nearest,
        name=own_name,
        architecture=architecture or nearest.architecture,
        total_interval=(total_bytes, total_bytes),
        confidence="live",
        source=f"total read from {device}, the rest as {nearest.name}",
    )
