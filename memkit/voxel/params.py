"""Drawn augmentation parameters: frozen records that convert to and from JSON and can be reapplied."""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from memkit._core.errors import FileFormatError, InputError, InputTypeError
from memkit._core.settings import Checker
from memkit._core.sparse_voxels import Triple
from memkit.voxel.layout import read_axes

VERSION = 1
_AMOUNTS = "noise_std", "doppler_std", "intensity_gain"
Box = tuple[Triple, Triple]  # first voxel along D, H, W, and one past the last


@dataclass(frozen=True, slots=True)
class AugmentationParams(ABC):
    """Drawn parameters of an augmentation; the same record always gives the same result.

    Source: `docs/augmentation.md`.

    Example:
        >>> import memkit as mk
        >>> params = mk.VoxelAugmentation().sample((4, 32, 32, 16), seed=0, epoch=1, index=7)
        >>> mk.voxel.AugmentationParams.from_json(params.to_json()) == params
        True
    """

    kind: ClassVar[str]

    @abstractmethod
    def geometry(self) -> AugmentationParams:
        """Return the part that applies to targets: flips, turns and mixing, but no noise, jitter, dropout or holes."""

    @abstractmethod
    def inverse(self) -> AugmentationParams:
        """Return parameters that undo flips and turns. Noise, jitter, dropout, holes and mixing cannot be undone."""

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain types."""
        return {"kind": self.kind, **json.loads(json.dumps(dataclasses.asdict(self)))}

    def to_json(self) -> str:
        """Return one line of JSON, for a log."""
        return json.dumps({"version": VERSION, **self.to_dict()})

    @staticmethod
    def from_json(text: str | bytes) -> AugmentationParams:
        """Read a record written by `to_json`.

        Raises:
            InputTypeError: ``text`` is not text.
            FileFormatError: The text was not written by `to_json`.
            InputError: A value in it is invalid.
        """
        if not isinstance(text, str | bytes | bytearray):
            raise InputTypeError(
                "AugmentationParams.from_json(text)",
                got=f"a {type(text).__name__}",
                expected="the text that to_json() returned",
                fix="write AugmentationParams.from_json(params.to_json())",
            )
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _unreadable(f"invalid JSON: {error}"[:200]) from None
        if not isinstance(found, dict) or found.pop("version", None) != VERSION:
            raise _unreadable("JSON that is not an object with version 1")
        return _from_dict(found)


@dataclass(frozen=True, slots=True)
class VoxelDraw:
    """Parameters of `VoxelAugmentation`, or of one of its operations, for one sample.

    Attributes:
        flips: The mirrored axes among X, Y and Z.
        turns: Quarter turns from X toward Y, after the flips: 0 to 3.
        noise_std: Standard deviation of the noise on intensities and scalars.
        doppler_std: Standard deviation of the noise on Doppler channels.
        intensity_gain: Factor applied to the intensities.
        dropout_prob: Probability that a voxel is emptied.
        seed: Seed of noise and dropout, which depend only on it and on the voxel's position.
        operation: Name of your own `VoxelOperation` that drew ``extra``.
        extra: The numbers that it drew, by name.

    Raises:
        InputError: A value is invalid.

    Example:
        >>> import memkit as mk
        >>> draw = mk.voxel.VoxelDraw(flips="XZ", turns=1, noise_std=0.02).inverse()
        >>> draw.flips, draw.turns, draw.noise_std
        ('XZ', 1, 0.0)
    """

    flips: str = ""
    turns: int = 0
    noise_std: float = 0.0
    doppler_std: float = 0.0
    intensity_gain: float = 1.0
    dropout_prob: float = 0.0
    seed: int = 0
    operation: str = ""
    extra: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check = _check("VoxelDraw(...)")
        checked = {name: check.number(name, getattr(self, name), 0.0) for name in _AMOUNTS}
        checked["dropout_prob"] = check.number("dropout_prob", self.dropout_prob, 0.0, 1.0)
        wholes = {"turns": check.whole("turns", self.turns, 0, 3), "seed": check.whole("seed", self.seed)}
        read_axes(check, "flips", self.flips)
        if not isinstance(self.operation, str):
            raise check.refusal("operation", self.operation, "the name of a class", fix="pass operation=''.")
        if not isinstance(self.extra, Mapping):
            raise check.refusal("extra", self.extra, "numbers by name", fix="pass extra={'std': 0.1}.")
        extra = {str(name): check.number(f"extra[{name!r}]", value) for name, value in self.extra.items()}
        for name, value in (checked | wholes | {"extra": extra}).items():
            object.__setattr__(self, name, value)

    def geometry(self) -> VoxelDraw:
        """Return only the flips and turns."""
        return VoxelDraw(self.flips, self.turns)

    def inverse(self) -> VoxelDraw:
        """Return the flips and turns that undo this draw."""
        is_mirrored = ("X" in self.flips) != ("Y" in self.flips)  # then a turn and its inverse are swapped
        return VoxelDraw(self.flips, self.turns if is_mirrored else -self.turns % 4)


@dataclass(frozen=True, slots=True)
class VoxelParams(AugmentationParams):
    """Parameters of `VoxelAugmentation`.

    Attributes:
        shape: (D, H, W) of the grid.
        batched: Whether it is for volumes (B, C, D, H, W); otherwise for (C, D, H, W).
        draws: One draw per sample.

    Raises:
        InputError: A value is invalid.

    Example:
        >>> import torch
        >>> import memkit as mk
        >>> params = mk.voxel.VoxelParams((2, 2, 2), batched=False, draws=(mk.voxel.VoxelDraw(turns=1),))  # by hand
        >>> mk.VoxelAugmentation().apply(torch.arange(8.0).view(1, 2, 2, 2), params)[0, :, :, 0]
        tensor([[2., 6.],
                [0., 4.]])
    """

    kind = "voxel"
    shape: Triple
    batched: bool
    draws: tuple[VoxelDraw, ...]

    def __post_init__(self) -> None:
        check = _check("VoxelParams(...)")
        given = check.items("draws", self.draws)
        _set_grid(self, check, len(given))
        draws = tuple(each if isinstance(each, VoxelDraw) else check.record(VoxelDraw, each) for each in given)
        object.__setattr__(self, "draws", draws)

    def geometry(self) -> VoxelParams:
        """Return only the flips and turns, which apply to targets too."""
        return VoxelParams(self.shape, self.batched, tuple(each.geometry() for each in self.draws))

    def inverse(self) -> VoxelParams:
        """Return parameters that undo flips and turns."""
        return VoxelParams(self.shape, self.batched, tuple(each.inverse() for each in self.draws))


@dataclass(frozen=True, slots=True)
class CutoutParams(AugmentationParams):
    """Parameters of `CutoutAugmentation`.

    Attributes:
        shape: (D, H, W) of the grid.
        batched: Whether it is for volumes (B, C, D, H, W); otherwise for (C, D, H, W).
        holes: The boxes of each sample.
    """

    kind = "cutout"
    shape: Triple
    batched: bool
    holes: tuple[tuple[Box, ...], ...]

    def __post_init__(self) -> None:
        check = _check("CutoutParams(...)")
        _set_grid(self, check, len(check.items("holes", self.holes)))
        holes = tuple(
            tuple(_box(check, "holes", box, self.shape) for box in check.items("holes", each)) for each in self.holes
        )
        object.__setattr__(self, "holes", holes)

    def geometry(self) -> CutoutParams:
        """Return parameters without holes: only inputs are cut, not targets."""
        return CutoutParams(self.shape, self.batched, ((),) * len(self.holes))

    def inverse(self) -> CutoutParams:
        """Return parameters without holes: emptied voxels cannot be restored."""
        return self.geometry()


@dataclass(frozen=True, slots=True)
class MixupParams(AugmentationParams):
    """Parameters of `MixupAugmentation`.

    Attributes:
        shape: (D, H, W) of the grid.
        partners: For each sample, the one that is mixed into it.
        weights: For each sample, its own weight; the partner gets the rest.
    """

    kind = "mixup"
    shape: Triple
    partners: tuple[int, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        check = _check("MixupParams(...)")
        object.__setattr__(self, "shape", _triple(check, "shape", self.shape, 1))
        given = check.items("partners", self.partners)
        if not given:
            raise check.refusal(
                "partners",
                given,
                "one partner for each sample, and at least one sample",
                fix="pass partners=(0,), weights=(1.0,).",
            )
        partners = tuple(check.whole("partners", each, 0, len(given) - 1) for each in given)
        object.__setattr__(self, "partners", partners)
        weights = check.items("weights", self.weights, len(self.partners))
        object.__setattr__(self, "weights", tuple(check.number("weights", each, 0.0, 1.0) for each in weights))

    batched: ClassVar[bool] = True

    def geometry(self) -> MixupParams:
        """Return the same parameters: a target is mixed like its input."""
        return self

    def inverse(self) -> MixupParams:
        """Return parameters that mix nothing: mixing cannot be undone."""
        return MixupParams(self.shape, tuple(range(len(self.partners))), (1.0,) * len(self.partners))


@dataclass(frozen=True, slots=True)
class CallableParams(AugmentationParams):
    """Parameters of a function, or of another library's transform, within a `ComposedAugmentation`.

    Attributes:
        name: Its name.
        seed: Seed of the random generators while it runs.
    """

    kind = "callable"
    name: str
    seed: int

    def __post_init__(self) -> None:
        check = _check("CallableParams(...)")
        if not isinstance(self.name, str):
            raise check.refusal("name", self.name, "the name of the callable", fix="pass its __name__.")
        object.__setattr__(self, "seed", check.whole("seed", self.seed))

    def geometry(self) -> CallableParams:
        """Refuse: memkit cannot know which part of the callable moves voxels."""
        raise self._unknown("geometry")

    def inverse(self) -> CallableParams:
        """Refuse: memkit cannot know how to undo the callable."""
        raise self._unknown("inverse")

    def _unknown(self, method: str) -> InputError:
        return InputError(
            f"AugmentationParams.{method}()",
            got=f"parameters of {self.name}, which is not an augmentation of memkit",
            expected="augmentations whose flips and turns are known",
            fix=f"call it before or after the composed augmentation: {self.name}(aug(x)).",
        )


@dataclass(frozen=True, slots=True)
class ComposedParams(AugmentationParams):
    """Parameters of `ComposedAugmentation`.

    Attributes:
        steps: The record of each augmentation, in order.
    """

    kind = "composed"
    steps: tuple[AugmentationParams, ...]

    def __post_init__(self) -> None:
        check = _check("ComposedParams(...)")
        steps = check.items("steps", self.steps)
        read = (each if isinstance(each, AugmentationParams) else _from_dict(each) for each in steps)
        object.__setattr__(self, "steps", tuple(read))

    def geometry(self) -> ComposedParams:
        """Return the part of each step that applies to targets."""
        return ComposedParams(tuple(each.geometry() for each in self.steps))

    def inverse(self) -> ComposedParams:
        """Return parameters that undo the flips and turns, last step first."""
        return ComposedParams(tuple(each.inverse() for each in reversed(self.steps)))

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain types."""
        return {"kind": self.kind, "steps": [each.to_dict() for each in self.steps]}


_KINDS: dict[str, type[AugmentationParams]] = {
    each.kind: each for each in (VoxelParams, CutoutParams, MixupParams, CallableParams, ComposedParams)
}


def _from_dict(found: object) -> AugmentationParams:
    if not isinstance(found, Mapping) or found.get("kind") not in tuple(_KINDS):
        raise _unreadable("an object whose kind is not one of " + ", ".join(_KINDS))
    rest = {name: value for name, value in found.items() if name != "kind"}
    return _check("AugmentationParams.from_json(text)").record(_KINDS[found["kind"]], rest)


def _unreadable(got: str) -> FileFormatError:
    return FileFormatError(
        "AugmentationParams.from_json(text)",
        got=got,
        expected="text written by to_json() of augmentation parameters",
        fix="check that the line is complete, and read it with the version of memkit that wrote it.",
    )


def _check(call: str) -> Checker:
    return Checker(call, InputError)


def _triple(check: Checker, name: str, value: object, low: int, high: Triple | None = None) -> Triple:
    ends = high or (2**31,) * 3
    a, b, c = (check.whole(name, each, low, end) for each, end in zip(check.items(name, value, 3), ends, strict=True))
    return a, b, c


def _box(check: Checker, name: str, value: object, shape: Triple) -> Box:
    start, stop = (_triple(check, name, each, 0, shape) for each in check.items(name, value, 2))
    if any(first > last for first, last in zip(start, stop, strict=True)):
        raise check.refusal(name, value, "a box that ends after its start", fix=f"pass {(stop, start)}.")
    return start, stop


def _set_grid(params: VoxelParams | CutoutParams, check: Checker, num_samples: int) -> None:
    object.__setattr__(params, "shape", _triple(check, "shape", params.shape, 1))
    is_batch = check.flag("batched", params.batched)
    if num_samples < 1 or (num_samples > 1 and not is_batch):
        raise check.refusal(
            "samples",
            num_samples,
            "at least one, and exactly one for a volume (C, D, H, W)",
            fix="pass batched=True, and one draw for each sample.",
        )
