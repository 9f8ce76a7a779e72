"""Base of all voxel augmentations: draw once, apply to volumes, sparse voxels and points, and invert."""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memkit._core.errors import InputError, InputTypeError, NotSimulatedError, warn_user
from memkit._core.settings import Checker, nearest_word
from memkit._core.sparse_voxels import SparseVoxels, Triple, carries_affine
from memkit.voxel.affine import compose, described_as
from memkit.voxel.layout import VoxelLayout, scalars
from memkit.voxel.params import AugmentationParams, Box
from memkit.voxel.samples import (
    VoxelPoints,
    apply_to_image,
    entries_of,
    is_image,
    is_volume,
    like,
    refuse_unmoved,
    shape_of,
    warn_of_places,
    with_affine,
)

_RGB = 3
BLOCK = 2**12  # voxels changed at once: a smaller block takes more time, a larger one more memory


Content: TypeAlias = Tensor | NDArray[Any] | SparseVoxels | VoxelPoints
X = TypeVar("X", bound=Content)
P = TypeVar("P", bound=AugmentationParams)


class BatchShape(NamedTuple):
    """The shape for which parameters are drawn."""

    shape: Triple
    num_channels: int
    num_samples: int
    batched: bool


class Augmentation(ABC, Generic[P]):
    """A call augments with fresh draws; `sample` and `apply` repeat a draw; `inverse` undoes flips and turns.

    ``aug(x)`` takes its seed from torch's random generator; a draw by `sample` depends only on seed, epoch and index:
    not on the number of workers, other samples, or any global random state. Each subclass documents its constructor.

    Attributes:
        last_params: The parameters of the last call, for `apply` to other volumes, for `inverse`, or for a log; None
            before the first one. In a DataLoader each worker's copy of the augmentation has its own. If several
            threads share an augmentation, use `sample` and `apply`.
    """

    layout: VoxelLayout | None
    last_params: P | None = None
    _params: type[P]

    def __call__(
        self,
        *sample: Any,
        photometric: Collection[Any] | None = None,
        layouts: Mapping[Any, VoxelLayout] | None = None,
    ) -> Any:
        """Augment with fresh draws, recorded in `last_params`.

        The seed is drawn from torch's default CPU generator: set it with ``torch.manual_seed``. In a DataLoader worker
        that generator has the worker's own seed, and is not reset between epochs, also in persistent workers.

        Args:
            *sample: A volume in any form that `apply` takes, an image or a subject of torchio, or a mapping, list or
                tuple of volumes, all of which undergo the same flips and turns; see `apply_joint` for its other
                entries. Several arguments count as a tuple.
            photometric: See `apply_joint`; names are positions in a tuple.
            layouts: See `apply_joint`.

        Returns:
            The same type; ``x`` itself is unchanged.

        Raises:
            InputTypeError: There is no volume, or an entry could not be moved with the volumes.
            InputError: As for `sample` and `apply`.
        """
        call = f"{type(self).__name__}(...)(x)"
        if not sample:
            raise InputTypeError(call, got="no volume", expected="a volume or a sample", fix="write aug(x).")
        first: tuple[int, ...] = sample[0].shape if isinstance(sample[0], Tensor | np.ndarray) else ()
        if len(sample) == 1 and len(first) == 4 and first[1] == _RGB < min(first[2:]):
            warn_user(
                f"{call}: a tensor {tuple(first)} is taken as one volume (C, D, H, W) of depth 3. For a batch of "
                "images (B, 3, H, W) write aug(x.unsqueeze(2)).squeeze(2)."
            )
        seed = int(torch.randint(2**63 - 1, (), device="cpu"))
        with calling(call):
            result, params = self.augment_with(
                sample[0] if len(sample) == 1 else sample, seed=seed, photometric=photometric, layouts=layouts
            )
        object.__setattr__(self, "last_params", params)  # the settings of a frozen augmentation stay as they are
        return result

    def augment_with(
        self,
        sample: Any,
        *,
        seed: int,
        epoch: int = 0,
        index: int | Sequence[int] = 0,
        photometric: Collection[Any] | None = None,
        layouts: Mapping[Any, VoxelLayout] | None = None,
    ) -> tuple[Any, P]:
        """Draw parameters for a sample of any form, as in a call, and apply them.

        Args:
            sample: As for a call.
            seed: As for `sample`.
            epoch: As for `sample`.
            index: As for `sample`.
            photometric: See `apply_joint`.
            layouts: See `apply_joint`.

        Returns:
            The augmented sample, and its parameters.

        Raises:
            InputTypeError: As for a call.
            InputError: As for a call.
        """
        shape = shape_of(f"{type(self).__name__}(...)(x)", sample)
        params = self.sample(shape, seed=seed, epoch=epoch, index=index)
        entries = self.apply_joint(entries_of(sample), params, photometric=photometric, layouts=layouts)
        return like(sample, entries), params

    @abstractmethod
    def sample(self, shape: Sequence[int], *, seed: int, epoch: int = 0, index: int | Sequence[int] = 0) -> P:
        """Draw parameters.

        Args:
            shape: (C, D, H, W) of a sample, or (B, C, D, H, W) of a batch, in which each sample gets its own draw. For
                sparse voxels, pass ``(voxels.batch_size, C, *voxels.shape)``.
            seed: Seed of the run.
            epoch: Epoch of the run; each epoch gives new draws.
            index: Index of the sample in its dataset. For a batch: the indices of its samples, each of which then gets
                the same draw as alone; or a single number for the batch.

        Raises:
            InputError: The shape or a number is invalid.
        """

    def apply(self, x: X, params: P, *, layout: VoxelLayout | None = None, inplace: bool = False) -> X:
        """Apply drawn parameters.

        Args:
            x: (C, D, H, W) or (B, C, D, H, W), a tensor or an array, matching the draw; `SparseVoxels` with the same
                number of samples; or `VoxelPoints` of one sample. Integer or bool volumes are labels: they are moved,
                but their values are not changed.
            params: Parameters drawn by `sample`.
            layout: The layout of this volume, if it differs from the augmentation's, such as a target's.
            inplace: Whether a tensor may be overwritten and its memory reused for the result. Otherwise ``x`` is
                unchanged.

        Returns:
            The same type as ``x``, sharing memory with it only with ``inplace``. A tensor with an ``affine`` (MONAI's
            MetaTensor) keeps its class and metadata, and the affine follows the voxels. Tensors of torchvision keep
            their class; the values of a ``Mask`` do not change.

        Raises:
            InputTypeError: ``x`` is not a supported volume, ``params`` belong to another augmentation, or the
                ``affine`` of ``x`` cannot be set.
            InputError: The shape of ``x`` does not match the draw, or its ``affine`` cannot be updated.

        Memory cost: the result, plus about 60 bytes and three times its channels per voxel of a block: a 64th of the
            grid, or 4096 voxels.
        """
        call = f"{type(self).__name__}.apply(x, params)"
        self._refuse_other_params(call, params)
        if isinstance(x, np.ndarray):
            tensor = _tensor_of(call, x)
            return cast("X", self.apply(tensor, params, layout=layout, inplace=inplace).numpy())
        if not isinstance(x, Tensor) or not carries_affine(x):
            kind: Any = type(x)
            if not kind.__module__.startswith("torchvision.tv_tensors"):
                return self._apply(x, params, layout or self.layout, inplace=inplace)
            known: Any = params.geometry() if kind.__name__ == "Mask" else params  # a mask of floats holds labels too
            plain = self._apply(x.as_subclass(Tensor), known, layout or self.layout, inplace=inplace)  # type: ignore[union-attr]
            return cast("X", plain.as_subclass(kind))
        result = self._apply(x.as_subclass(Tensor), params, layout or self.layout, inplace=inplace)
        moves, batched = self._moves(params, layout or self.layout), x.dim() == 5
        return cast("X", described_as(call, result, x, moves, batched=batched))

    def affine_after(self, affine: Tensor, params: P, *, layout: VoxelLayout | None = None) -> Tensor:
        """Return the voxel-to-world affine after flips and turns; tensors with an ``affine`` get it automatically.

        Args:
            affine: (4, 4), or (B, 4, 4) for a batch: from voxel indices along D, H, W to world coordinates, as in NIfTI
                files.
            params: Parameters drawn by `sample`.
            layout: As for `apply`.

        Returns:
            The same shape and dtype.

        Raises:
            InputTypeError: ``params`` belong to another augmentation.
            InputError: The shape is wrong, or a single affine is given for samples that move differently.

        Example:
            >>> import torch, memkit as mk
            >>> aug = mk.VoxelAugmentation()
            >>> params = mk.voxel.VoxelParams((4, 8, 8), batched=False, draws=(mk.voxel.VoxelDraw(flips="X"),))
            >>> aug.affine_after(torch.eye(4), params)[0]
            tensor([-1.,  0.,  0.,  3.])
        """
        call = f"{type(self).__name__}.affine_after(affine, params)"
        self._refuse_other_params(call, params)
        moves = self._moves(params, layout or self.layout)
        if moves is None:
            return affine
        return compose(call, affine, moves, batched=len(moves) > 1 or torch.as_tensor(affine).dim() == 3)

    def moves_voxels(self, params: P) -> bool:
        """Return whether this augmentation can flip or turn voxels, regardless of the current draw."""
        return self._moves(params, self.layout) is not None

    def _moves(self, params: P, layout: VoxelLayout | None) -> list[Tensor] | None:  # noqa: ARG002 - used by subclasses
        """Return per-sample (4, 4) float64 matrices from new to old voxel indices; None if nothing moves."""
        return None

    def _refuse_other_params(self, call: str, params: object) -> None:
        if not isinstance(params, self._params):
            raise InputTypeError(
                call,
                got=f"params of type {type(params).__name__}",
                expected=self._params.__name__,
                fix="pass the parameters that sample() of this augmentation returned.",
            )

    @abstractmethod
    def _apply(self, x: X, params: P, layout: VoxelLayout | None, *, inplace: bool) -> X: ...

    def inverse(self, y: X, params: P, *, layout: VoxelLayout | None = None) -> X:
        """Undo the flips and turns of `apply`, mapping an output or prediction back to the frame of its input.

        ``inverse(apply(x, p.geometry()), p)`` is ``x``, bit for bit; for points, up to rounding. Noise, jitter,
        dropout, holes and mixing are not undone.

        Args:
            y: As for `apply`; or a sample, as for a call.
            params: The applied parameters.
            layout: As for `apply`.

        Raises:
            InputTypeError: As for `apply`.
            InputError: As for `apply`.
        """
        call = f"{type(self).__name__}.inverse(y, params)"
        self._refuse_other_params(call, params)
        back: Any = params.inverse()
        with calling(call):
            given: Any = y
            if isinstance(given, Mapping | list | tuple) and not is_volume(given):
                layouts = None if layout is None else dict.fromkeys(entries_of(given), layout)
                return like(given, self.apply_joint(entries_of(given), back, layouts=layouts))  # type: ignore[no-any-return]
            return self._apply_form(given, back, layout)  # type: ignore[no-any-return]  # the type that was passed

    def apply_joint(
        self,
        sample: Mapping[Any, Any],
        params: P,
        *,
        photometric: Collection[Any] | None = None,
        layouts: Mapping[Any, VoxelLayout] | None = None,
    ) -> dict[Any, Any]:
        """Apply the same parameters to several volumes: input, target, labels.

        Args:
            sample: Volumes by name. Other entries (names, labels, numbers) are handed on, except that an entry
                ``"affine"`` or ``"..._affine"``, (4, 4) or one per sample of a batch, follows the voxels, also in a
                mapping of metadata. The values of a torchio ``LabelMap`` do not change.
            params: Parameters drawn by `sample`.
            photometric: Names of volumes whose values change (noise, jitter, dropout, holes); the others get
                ``params.geometry()``. None means all.
            layouts: Layouts by name, for volumes whose channels differ from the augmentation's.

        Returns:
            The augmented volumes and the other entries under the same names, in the sample's own type of mapping.

        Raises:
            InputError: A name in ``photometric`` or ``layouts`` is not in the sample.
            InputTypeError: As for `apply`; or an entry has the size of a volume but no form that can be moved with it.

        Warns:
            MemkitWarning: Voxels can move, and an entry looks like boxes or points, which are not moved with them.
        """
        call = f"{type(self).__name__}.apply_joint(sample, params)"
        check_mapping(call, sample)
        named = layouts or {}
        check_names(call, sample, photometric, named)
        self._refuse_other_params(call, params)
        shape, is_batch = params.shape, params.batched  # type: ignore[attr-defined]  # the composed one overrides this
        moved: dict[Any, Any] = {}
        for name, x in sample.items():
            if is_volume(x, batched=is_batch):
                changed: Any = params if photometric is None or name in photometric else params.geometry()
                moved[name] = self._apply_form(x, changed, named.get(name))
            else:
                moved[name] = x
                if self.moves_voxels(params):
                    refuse_unmoved(call, name, x, shape)
                    warn_of_places(type(self).__name__, name, x, batched=is_batch)
                    moved[name] = with_affine(self, name, x, params)
        return like(sample, moved)  # type: ignore[no-any-return]  # a mapping for a mapping

    def _apply_form(self, x: Any, params: P, layout: VoxelLayout | None) -> Any:
        if is_image(x):
            return apply_to_image(self, x, params, layout)
        return self.apply(x, params, layout=layout)


def check_mapping(call: str, sample: object) -> None:
    """Refuse a sample that is not a mapping."""
    if not isinstance(sample, Mapping):
        raise InputTypeError(
            call,
            got=f"a {type(sample).__name__}",
            expected="a mapping of volumes by name",
            fix="write aug.apply(x, params)" if is_volume(sample) else "write aug.apply_joint({'image': x}, params)",
        )


def check_names(
    call: str, sample: Mapping[Any, Any], photometric: Collection[Any] | None, layouts: Mapping[Any, VoxelLayout]
) -> None:
    """Refuse names of volumes that a sample does not have."""
    if isinstance(photometric, str):
        raise InputError(
            call,
            got=f"photometric={photometric!r}",
            expected="a list of names",
            fix=f"write photometric=[{photometric!r}].",
        )
    for name in (*(photometric or ()), *layouts):
        if name not in sample:
            near = nearest_word(str(name), [each for each in sample if isinstance(each, str)])
            raise InputError(
                call,
                got=f"the name {name!r}",
                expected="names of its volumes: " + ", ".join(map(str, sample)),
                fix=f"write {near!r}." if near else "use one of the sample's names.",
            )


@contextlib.contextmanager
def calling(call: str) -> Iterator[None]:
    """Let errors name the call that the user wrote."""
    try:
        yield
    except (InputError, InputTypeError) as error:
        if not isinstance(error, NotSimulatedError):  # it names the call in the simulation
            error.call = call
        raise


def _tensor_of(call: str, array: NDArray[Any]) -> Tensor:
    """Return an array's values as a tensor, which shares its memory if torch can."""
    try:
        return torch.from_numpy(array if min(array.strides, default=0) >= 0 else array.copy())
    except TypeError as error:
        raise InputTypeError(
            call,
            got=f"an array of dtype {array.dtype}",
            expected="a dtype that torch supports",
            fix="convert it first, as in array.astype('float32').",
        ) from error


def read_grid(call: str, shape: object, layout: VoxelLayout | None) -> BatchShape:
    """Check a shape (C, D, H, W) or (B, C, D, H, W)."""
    check = Checker(call, InputError)
    if not isinstance(shape, (list, tuple)):  # torch.Size is a tuple
        meant = "x.shape" if isinstance(shape, (Tensor, np.ndarray)) else "(C, D, H, W)"
        raise InputTypeError(
            call,
            got=f"a {type(shape).__name__}",
            expected="the shape of a volume",
            fix=f"write sample({meant}, seed=seed), or aug(x) for fresh draws.",
        )
    sizes = tuple(check.whole("shape", each, 0, 2**31) for each in shape)
    if 0 in sizes:
        raise InputError(
            call,
            got=f"an empty volume {sizes}",
            expected="at least one sample and one voxel",
            fix="skip empty batches.",
        )
    if len(sizes) not in (4, 5):
        raise InputError(
            call,
            got=f"the shape {sizes}",
            expected="(C, D, H, W) of a sample or (B, C, D, H, W) of a batch",
            fix="pass x.shape of a volume; for SparseVoxels pass (voxels.batch_size, C, *voxels.shape).",
        )
    num_samples, (num_channels, depth, height, width) = (1, sizes) if len(sizes) == 4 else (sizes[0], sizes[1:])
    grid = BatchShape((depth, height, width), num_channels, num_samples, batched=len(sizes) == 5)
    if layout is not None and len(layout.channels) != num_channels:
        raise _other_channels(call, num_channels, layout)
    return grid


def generators(
    call: str, grid: BatchShape, seed: int, epoch: int, index: int | Sequence[int]
) -> Iterator[np.random.Generator]:
    """Yield a fresh generator for each sample."""
    check = Checker(call, InputError)
    if grid.batched and isinstance(index, Sequence):
        names = [[each] for each in check.items("index", tuple(index), grid.num_samples)]
    else:
        names = [[index, number] if grid.batched else [index] for number in range(grid.num_samples)]
    for each in names:
        yield generator(check, seed=seed, epoch=epoch, index=each)


def generator(check: Checker, *, seed: int, epoch: int, index: Sequence[Any]) -> np.random.Generator:
    """Return a fresh generator, seeded only by these numbers, each below 2^63."""
    named = [("seed", seed), ("epoch", epoch), *(("index", each) for each in index)]
    numbers = [check.whole(name, value) for name, value in named]
    # Always two 32-bit words each, even if one suffices: NumPy treats 2^32 + 1 and the sequence 1, 1 as the same seed.
    return np.random.default_rng([word for each in numbers for word in (each % 2**32, each >> 32)])


def layout_of(call: str, x: object, grid: tuple[Triple, int, bool], layout: VoxelLayout | None) -> VoxelLayout:
    """Return the layout of a volume after checking its shape, number of samples and batch dimension."""
    shape, num_samples, batched = grid
    if isinstance(x, Tensor):
        wanted = ("B, " if batched else "") + "C, D, H, W"
        found = (x.dim(), tuple(x.shape[-3:]), len(x) if x.dim() == 5 else 1)
        num_channels = x.shape[-4] if x.dim() >= 4 else 0
        form = f"a tensor {tuple(x.shape)}"
        expected = f"({wanted}) with {num_samples} samples of {shape}"
        is_right = found == (5 if batched else 4, shape, num_samples)
    elif isinstance(x, SparseVoxels):
        num_channels, form = x.features.shape[1], f"SparseVoxels of {x.batch_size} samples of {x.shape}"
        expected = f"{num_samples} samples of {shape}"
        is_right = (x.shape, x.batch_size) == (shape, num_samples)
    elif isinstance(x, VoxelPoints) and all(isinstance(each, Tensor) for each in x):
        sizes = tuple(x.coords.shape), tuple(x.features.shape)
        form = f"points {sizes[0]}, {x.coords.dtype}, with features {sizes[1]}"
        expected = f"coordinates (N, 3) and features (N, C), floating point, of one sample; there are {num_samples}"
        is_right = len(sizes[1]) == 2 and sizes[0] == (sizes[1][0], 3) and num_samples == 1
        is_right = is_right and x.coords.is_floating_point() and x.features.is_floating_point()
        num_channels = sizes[1][-1] if sizes[1] else 0
    else:
        is_joint = isinstance(x, (Mapping, list, tuple))
        raise InputTypeError(
            call,
            got=f"a {type(x).__name__}",
            expected="a tensor, an array, SparseVoxels or VoxelPoints",
            fix="write aug.apply_joint(sample, params)." if is_joint else "write aug(x), or pass the volume itself.",
        )
    if not is_right or not num_channels:
        raise InputError(call, got=form, expected=expected, fix="draw parameters for the shape of this volume.")
    if isinstance(x, Tensor) and not x.is_floating_point():
        return scalars(num_channels, layout.axes if layout else "XYZ")  # labels
    if layout is None and isinstance(x, VoxelPoints):
        raise InputError(
            call,
            got="points without a layout",
            expected="a layout, whose origin and voxel_size place the grid among the points",
            fix="create the augmentation with layout=VoxelLayout(channels, voxel_size=..., origin=...).",
        )
    if layout is None:
        return scalars(num_channels)
    if len(layout.channels) != num_channels:
        raise _other_channels(call, num_channels, layout)
    return layout


def _other_channels(call: str, num_channels: int, layout: VoxelLayout) -> InputError:
    return InputError(
        call,
        got=f"{num_channels} channels",
        expected=f"the {len(layout.channels)} channels of the layout: {', '.join(layout.channels)}",
        fix="pass layout=VoxelLayout(channels) that describes the channels of this volume.",
    )


def each_sample(x: Tensor, *, batched: bool) -> Iterator[Tensor]:
    """Yield views of a batch's samples that may be written one after the other.

    Autograd refuses writes into the views that iterating over a tensor returns, and into a view that was made before
    the batch began to need a gradient.
    """
    yield from (x[number] for number in range(len(x))) if batched else (x,)


def blocks_of(shape: Triple) -> Iterator[tuple[slice, slice]]:
    """Yield blocks along D and H of a 64th of the grid or a few thousand voxels, contiguous in row-major order."""
    rows = max(1, min(max(BLOCK, math.prod(shape) // 64), 8 * BLOCK) // shape[2])
    layers = max(1, rows // shape[1])
    for depth in range(0, shape[0], layers):
        for height in range(0, shape[1], min(rows, shape[1])):
            yield slice(depth, min(depth + layers, shape[0])), slice(height, min(height + rows, shape[1]))


def numbers_of(places: Tensor, shape: Triple) -> Tensor:
    """Return the row-major indices of voxels: (N, 3) int64 to (N,) int64."""
    return (places[:, 0] * shape[1] + places[:, 1]) * shape[2] + places[:, 2]


def with_rows(voxels: SparseVoxels, coords: Tensor, features: Tensor) -> SparseVoxels:
    """Return new voxels in the same grid."""
    return SparseVoxels.from_coords(coords, features, shape=voxels.shape, batch_size=voxels.batch_size)


def filled(empties: Sequence[float], like: Tensor) -> Tensor:
    """Return the per-channel empty values, (C,), with the dtype and device of another tensor."""
    return torch.tensor(empties, dtype=like.dtype, device=like.device)


def box_of(chance: np.random.Generator, shape: Triple, share: float) -> Box:
    """Draw a box inside a grid whose sides are a fraction of the grid's, rounded to voxels."""
    sides = [round(share * size) for size in shape]
    d, h, w = (int(chance.integers(size - side + 1)) for size, side in zip(shape, sides, strict=True))
    return (d, h, w), (d + sides[0], h + sides[1], w + sides[2])


def in_box(places: Tensor, box: Box) -> Tensor:
    """Return which voxels (N, 3) are in a box: (N,) bool."""
    start, stop = (torch.tensor(each, device=places.device) for each in box)
    return ((places >= start) & (places < stop)).all(1)
