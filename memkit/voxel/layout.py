"""Meaning of a volume's channels and its position in space, which flips and turns need to be correct."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memkit._core.settings import Checker, nearest_word
from memkit._core.sparse_voxels import Triple
from memkit._core.words import guided

KINDS = ("occupancy", "intensity", "doppler", "scalar", "count")
_ALL_KINDS = (*KINDS, "vector:x", "vector:y", "vector:z")
_CENTRAL = 1e-3  # of a voxel: a sensor this close to the center counts as centered


class VectorField(NamedTuple):
    """The channels that hold one vector; z is None where the volume has none."""

    x: int
    y: int
    z: int | None


@guided(words={"channels": "kinds names"}, rewrite={"__init__": lambda _: "VoxelLayout(('scalar',))"})
@dataclass(frozen=True, slots=True)
class VoxelLayout:
    """The channels of a volume (C, D, H, W), and its frame.

    Attributes:
        channels: Kind of each channel: ``"occupancy"``; ``"count"`` (of points); ``"intensity"``; ``"doppler"`` (radial
            velocity relative to the sensor); ``"scalar"`` (anything invariant to turns); ``"vector:x"``,
            ``"vector:y"``, ``"vector:z"`` for a vector's components, with a name appended if there is more than one
            vector: ``"vector:x:normal"``.
        axes: The axes along D, H and W: ``"XYZ"``, or ``"ZYX"`` if D is the height.
        voxel_size: Voxel size in meters along X, Y and Z.
        origin: Position of the grid corner at voxel (0, 0, 0), in meters along X, Y and Z, in the frame of the points.
        sensor_origin: Position of the sensor, in the same frame. Required with a Doppler channel.
        empty_value: Value of an empty voxel: one number, or one per channel (-1 for data scaled to [-1, 1]).
        value_range: For each channel its minimum and maximum value, or None. Jitter and noise are clamped to it. A
            vector's range must be symmetric, since a flip changes the sign.

    Raises:
        ConfigError: A setting is invalid; the message names it.

    Source: `docs/augmentation.md`.

    Example:
        >>> import memkit as mk
        >>> layout = mk.voxel.VoxelLayout(
        ...     ("occupancy", "intensity", "doppler"),
        ...     voxel_size=(0.2, 0.2, 0.4),
        ...     origin=(0.0, -12.8, -2.0),
        ...     sensor_origin=(0.0, 0.0, 0.0),
        ... )
        >>> layout.off_center((64, 128, 10))
        'X'
    """

    channels: Sequence[str]
    _: KW_ONLY
    axes: str = "XYZ"
    voxel_size: Sequence[float] = (1.0, 1.0, 1.0)
    origin: Sequence[float] = (0.0, 0.0, 0.0)
    sensor_origin: Sequence[float] | None = None
    empty_value: float | Sequence[float] = 0.0
    value_range: Sequence[Sequence[float] | None] | None = None

    def __post_init__(self) -> None:
        check = Checker("VoxelLayout(...)")
        if isinstance(self.channels, str):
            raise check.refusal("channels", self.channels, "a list", fix=f"pass channels=[{self.channels!r}].")
        channels = check.items("channels", self.channels)
        if not channels:
            raise check.refusal(
                "channels", channels, "one kind for each channel", fix="pass for example VoxelLayout(('scalar',))."
            )
        for kind in channels:
            if not (isinstance(kind, str) and (kind in KINDS or _is_component(kind))):
                raise check.refusal(
                    "channels",
                    kind,
                    f"one of {', '.join(KINDS)}, vector:x, vector:y, vector:z, vector:x:<name> and so on",
                    fix=f"write {nearest_word(str(kind), _ALL_KINDS) or 'scalar'!r} for it.",
                )
        if len(read_axes(check, "axes", self.axes)) != 3:
            raise check.refusal(
                "axes",
                self.axes,
                "the letters X, Y and Z in the order of D, H and W",
                fix="pass axes='XYZ', or axes='ZYX' if D is the height.",
            )
        sensor = None if self.sensor_origin is None else check.triple("sensor_origin", self.sensor_origin)
        if sensor is None and "doppler" in channels:
            raise check.refusal(
                "sensor_origin",
                None,
                "three numbers, because a Doppler channel is relative to a sensor",
                fix="pass sensor_origin=(x, y, z), in meters, in the frame of the points.",
            )
        empty = self.empty_value
        is_list = isinstance(empty, (list, tuple))
        empties = check.items("empty_value", empty if is_list else (empty,) * len(channels), len(channels))
        ranges = (None,) * len(channels)
        if self.value_range is not None:
            ranges = check.items("value_range", self.value_range, len(channels))
        voxel_size = check.triple("voxel_size", self.voxel_size)
        if min(voxel_size) <= 0:
            raise check.refusal("voxel_size", voxel_size, "sizes above zero", fix="pass voxel_size=(1.0, 1.0, 1.0).")
        values = {
            "channels": channels,
            "voxel_size": voxel_size,
            "origin": check.triple("origin", self.origin),
            "sensor_origin": sensor,
            "empty_value": tuple(check.number("empty_value", each) for each in empties),
            "value_range": tuple(_range(check, kind, each) for kind, each in zip(channels, ranges, strict=True)),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        _ = self.vectors  # refuses an incomplete vector

    @property
    def empties(self) -> tuple[float, ...]:
        """Value of an empty voxel, for each channel."""
        assert isinstance(self.empty_value, tuple)  # noqa: S101 # set above
        return self.empty_value

    @property
    def vectors(self) -> tuple[VectorField, ...]:
        """The channels that hold vectors."""
        check = Checker("VoxelLayout(...)")
        fields: dict[str, dict[str, int]] = {}
        for channel, kind in enumerate(self.channels):
            if _is_component(kind):
                component, _, name = kind.removeprefix("vector:").partition(":")
                if component in fields.setdefault(name, {}):
                    raise check.refusal(
                        "channels",
                        kind,
                        "each component of a vector once; a second vector needs a name, as in vector:x:flow",
                        fix=f"write {kind + ':flow'!r} for the second one.",
                    )
                fields[name][component] = channel
        for each in fields.values():
            if not {"x", "y"} <= each.keys():
                raise check.refusal(
                    "channels",
                    self.channels,
                    "a vector's x and y together, because a rotation mixes them",
                    fix="name both components, or write 'scalar' for a component that flips and turns must not change.",
                )
        return tuple(VectorField(each["x"], each["y"], each.get("z")) for each in fields.values())

    def dim(self, axis: str) -> int:
        """Return which of D, H, W (0, 1, 2) an axis runs along."""
        return self.axes.index(axis)

    def center(self, shape: Triple) -> tuple[float, float, float]:
        """Return the center of a grid (D, H, W): meters along X, Y and Z."""
        x, y, z = (
            start + size * shape[self.dim(axis)] / 2
            for axis, start, size in zip("XYZ", self.origin, self.voxel_size, strict=True)
        )
        return x, y, z

    def is_square(self, shape: Triple) -> bool:
        """Return whether a quarter turn in XY maps a grid (D, H, W) onto itself."""
        return shape[self.dim("X")] == shape[self.dim("Y")] and self.voxel_size[0] == self.voxel_size[1]

    def off_center(self, shape: Triple) -> str:
        """Return the axes along which the sensor is off the center of a grid (D, H, W); empty without a sensor."""
        if self.sensor_origin is None:
            return ""
        places = zip("XYZ", self.sensor_origin, self.center(shape), self.voxel_size, strict=True)
        return "".join(axis for axis, sensor, middle, size in places if abs(sensor - middle) > _CENTRAL * size)

    def occupied(self, volume: Tensor) -> Tensor:
        """Return which voxels are occupied: (C, ...) to (...) bool.

        This is determined by the occupancy channel, otherwise by the count channel; without both, a voxel is occupied
        if any channel differs from its empty value.
        """
        for kind in ("occupancy", "count"):
            if kind in self.channels:
                channel = list(self.channels).index(kind)
                return volume[channel] != self.empties[channel]
        mask = torch.zeros(volume.shape[1:], dtype=torch.bool, device=volume.device)
        for values, empty in zip(volume, self.empties, strict=True):
            mask |= values != empty
        return mask


@functools.lru_cache(maxsize=64)  # otherwise each sample without a layout would check this one again
def scalars(num_channels: int, axes: str = "XYZ") -> VoxelLayout:
    """Return the layout of a volume whose channels are all scalars."""
    return VoxelLayout(("scalar",) * num_channels, axes=axes)


def read_axes(check: Checker, name: str, value: Any) -> str:
    """Return a selection of X, Y and Z without repeats."""
    if isinstance(value, str) and not set(value) - set("XYZ") and len(set(value)) == len(value):
        return value
    listed = value if isinstance(value, (str, list, tuple)) else (value,)
    letters = ["XYZ"[each] if type(each) is int and each in range(3) else str(each).upper() for each in listed]
    meant = "".join(dict.fromkeys(each for each in letters if each in {"X", "Y", "Z"})) or "XYZ"
    raise check.refusal(
        name, value, "a combination of the letters X, Y and Z, each at most once", fix=f"pass {name}={meant!r}."
    )


def refuse_no_layout(check: Checker, layout: object) -> None:
    """Refuse anything but a layout or None."""
    if not isinstance(layout, VoxelLayout | None):
        raise check.refusal(
            "layout", layout, "a VoxelLayout or None", fix="pass layout=mk.voxel.VoxelLayout(channels)."
        )


def _is_component(kind: object) -> bool:
    if not isinstance(kind, str) or not kind.startswith("vector:"):
        return False
    component, colon, name = kind.removeprefix("vector:").partition(":")
    return component in {"x", "y", "z"} and bool(name) == bool(colon)


def _range(check: Checker, kind: str, given: object) -> tuple[float, float] | None:
    if given is None:
        return None
    low, high = (check.number("value_range", each) for each in check.items("value_range", given, 2))
    if low > high or (_is_component(kind) and low != -high):
        raise check.refusal(
            "value_range",
            given,
            "the lower end first, and low = -high for a vector's component",
            fix=f"pass ({-max(abs(low), abs(high)):g}, {max(abs(low), abs(high)):g}) for this channel.",
        )
    return low, high
