"""Samples in any form: volumes alone, in dicts and tuples, as arrays, and as torchio's images and subjects.

torchio is not imported for this: an image is anything with ``data`` (C, D, H, W), ``affine`` and ``set_data``.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from memkit._core.errors import InputError, InputTypeError, warn_user
from memkit._core.sparse_voxels import SparseVoxels
from memkit._torch import pytree
from memkit.voxel.layout import VoxelLayout, scalars

_OF_THE_FILE = "original_affine"  # MONAI's record of the file, which does not move with the voxels
_PLACES = re.compile(
    r"points?|key_?points?|bbox(es)?|box(es)?|landmarks?|coord(s|inates)?|centers?|centroids?|corners|vert(ex|ices)|rois?"
)
_PLACES_OF_TORCHVISION = ("BoundingBoxes", "KeyPoints")
_COLUMNS_OF_PLACES = (2, 3, 4, 6, 7)  # two corners, or a center, sizes and an angle


class VoxelPoints(NamedTuple):
    """Points of one sample, in the frame of a `VoxelLayout`.

    Attributes:
        coords: (N, 3) floating point: meters along X, Y, Z.
        features: (N, C): the channels of the layout.

    Example:
        >>> import torch
        >>> import memkit as mk
        >>> aug = mk.VoxelAugmentation(layout=mk.voxel.VoxelLayout(("scalar",), origin=(-4.0, -4.0, 0.0)))
        >>> params = mk.voxel.VoxelParams((8, 8, 4), batched=False, draws=(mk.voxel.VoxelDraw(flips="X"),))
        >>> aug.apply(mk.voxel.VoxelPoints(torch.tensor([[1.0, 2.0, 3.0]]), torch.ones(1, 1)), params).coords
        tensor([[-1.,  2.,  3.]])
    """

    coords: Tensor
    features: Tensor


def is_image(value: object) -> bool:
    """Return whether this is an image like torchio's."""
    return all(hasattr(value, name) for name in ("spatial_shape", "affine", "data", "set_data"))


def is_volume(value: object, *, batched: bool | None = None) -> bool:
    """Return whether this can be augmented: a volume in any form, or points of one sample.

    Args:
        value: Anything.
        batched: Whether tensors are (B, C, D, H, W); None for either form.
    """
    if isinstance(value, Tensor | np.ndarray):
        is_number = isinstance(value, Tensor) or value.dtype.kind in "biuf"
        return is_number and value.ndim in ((4, 5) if batched is None else (5,) if batched else (4,))
    return isinstance(value, SparseVoxels | VoxelPoints) or is_image(value)


def entries_of(sample: Any) -> dict[Any, Any]:
    """Return the entries of a sample by name, or by position in a tuple or list; 0 is a volume alone."""
    if is_volume(sample):
        return {0: sample}
    if isinstance(sample, Mapping):
        return dict(sample)
    if isinstance(sample, (tuple, list)):
        return dict(enumerate(sample))
    return {0: sample}


def like(sample: Any, entries: Mapping[Any, Any]) -> Any:
    """Return the entries in the form of a sample: its own type of mapping, a named tuple, a list, or one volume."""
    if is_volume(sample) or not isinstance(sample, (Mapping, tuple, list)):
        return entries[0]
    if isinstance(sample, Mapping):
        return _like_mapping(sample, entries)
    values: Iterable[Any] = entries.values()
    return list(values) if isinstance(sample, list) else getattr(sample, "_make", tuple)(values)


def _like_mapping(sample: Mapping[Any, Any], entries: Mapping[Any, Any]) -> Any:
    if type(sample) is dict or not hasattr(sample, "__setitem__"):
        return dict(entries)
    new: Any = copy.copy(sample)
    for name, value in entries.items():
        new[name] = value
    if hasattr(new, "update_attributes"):  # torchio's Subject has its entries as attributes too
        new.update_attributes()
    return new


def shape_of(call: str, sample: Any) -> tuple[int, ...]:
    """Return the shape for which parameters of a sample are drawn: that of its first volume.

    Raises:
        InputTypeError: The sample has no volume.
        InputError: Its only content is points, which have no grid.
    """
    entries = entries_of(sample)
    found = [each for each in entries.values() if is_volume(each)]
    volumes = [each for each in found if not isinstance(each, VoxelPoints)]
    if volumes:
        first = volumes[0]
        if isinstance(first, SparseVoxels):
            return first.batch_size, first.features.shape[1], *first.shape
        return tuple((first.data if is_image(first) else first).shape)
    if found:
        raise InputError(
            call,
            got="points without a volume",
            expected="the grid in which they lie",
            fix="write aug.apply(points, aug.sample((C, D, H, W), seed=seed)).",
        )
    raise InputTypeError(
        call,
        got=f"a sample of {', '.join(_described(each) for each in entries.values()) or 'no entries'}",
        expected="a volume (C, D, H, W), or a mapping or tuple with such volumes",
        fix="write aug(volume[None]) for a volume (D, H, W), or aug(image.unsqueeze(1)).squeeze(1) for an image "
        "(C, H, W).",
    )


def _described(value: object) -> str:
    shape = f" {tuple(value.shape)}" if isinstance(value, Tensor | np.ndarray) else ""
    return f"{type(value).__name__}{shape}"


def apply_to_image(augmentation: Any, image: Any, params: Any, layout: VoxelLayout | None) -> Any:
    """Return a new image with moved voxels and its affine; the values of a label map are moved, not changed."""
    data = image.data
    if getattr(image, "type", None) == "label":
        known = layout or augmentation.layout
        params, layout = params.geometry(), scalars(data.shape[0], known.axes if known else "XYZ")
    new = copy.copy(image)
    new.set_data(augmentation.apply(data, params, layout=layout))
    new.affine = augmentation.affine_after(torch.as_tensor(image.affine), params, layout=layout).numpy()
    return new


def with_affine(augmentation: Any, name: Any, value: Any, params: Any) -> Any:
    """Update an affine next to the volumes, or in a metadata mapping, to follow their voxels."""
    if isinstance(value, Mapping) and not is_image(value):
        return {key: with_affine(augmentation, key, each, params) for key, each in value.items()}
    is_named = isinstance(name, str) and (name == "affine" or name.endswith("_affine")) and name != _OF_THE_FILE
    if not (is_named and isinstance(value, Tensor | np.ndarray) and tuple(value.shape[-2:]) == (4, 4)):
        return value
    moved = augmentation.affine_after(torch.as_tensor(value), params)
    return moved.numpy() if isinstance(value, np.ndarray) else moved


def refuse_unmoved(call: str, name: object, value: Any, shape: Sequence[int]) -> None:
    """Refuse an entry that would not be moved while the volumes of its sample are flipped and turned."""
    for leaf in pytree.tree_leaves(value):
        is_array = isinstance(leaf, Tensor | np.ndarray)
        if is_array and tuple(leaf.shape[-3:]) == tuple(shape):
            got = f"a {type(leaf).__name__} of shape {tuple(leaf.shape)}"
        elif not is_array and (hasattr(leaf, "spatial_shape") or hasattr(leaf, "affine")):
            got = f"a {type(leaf).__name__}"
        else:
            continue
        raise InputTypeError(
            call,
            got=f"{name!r}, {got}, which would not be moved with the volumes of its sample",
            expected="volumes as tensors or arrays (C, D, H, W), SparseVoxels, or images of torchio, at the top of the "
            "sample",
            fix="add a channel dimension (mask[None]), move it to the top of the sample, or remove it from the sample.",
        )


def warn_of_places(augmentation: str, name: object, value: Any, *, batched: bool) -> None:
    """Warn of boxes and points that are not moved while the volumes of their sample are flipped and turned."""
    for key, leaf in _named_leaves(name, value):
        if not isinstance(leaf, Tensor | np.ndarray) or leaf.ndim < 2 or leaf.shape[-1] not in _COLUMNS_OF_PLACES:
            continue
        if isinstance(key, str):
            is_place = any(_PLACES.fullmatch(part) for part in (key.lower(), *re.split(r"[^a-z]+", key.lower())))
        else:  # in a tuple (volume, places); in a batch it may be a target for each sample
            is_place = not batched and leaf.ndim == 2 and torch.as_tensor(leaf).is_floating_point()
        if is_place or type(leaf).__name__ in _PLACES_OF_TORCHVISION:
            warn_user(
                f"{augmentation}: {key!r}, a {type(leaf).__name__} {tuple(leaf.shape)}, stays as it is while the "
                "volumes of its sample are flipped and turned. To move positions in the grid, pass them as "
                "mk.voxel.VoxelPoints(coords, features), or use aug.affine_after in your own code "
                "(docs/augmentation.md); positions in world coordinates stay correct if the volume has an affine."
            )


def _named_leaves(name: object, value: Any) -> Iterator[tuple[object, Any]]:
    """Yield the leaves of a nested value, each with the innermost key that leads to it."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _named_leaves(key, each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _named_leaves(name, each)
    else:
        yield name, value
