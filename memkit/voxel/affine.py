"""Volumes with a voxel-to-world affine: tensors with an ``affine`` attribute, such as MONAI's MetaTensor.

An affine maps voxel indices along D, H, W to world coordinates. A flip moves voxels, not the world, so the affine must
change with it, or a file written from the volume would be mirrored. MONAI is not imported: any subclass of torch's
Tensor with an ``affine`` attribute qualifies.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memkit._core.errors import InputError, InputTypeError

_RECORD = "memkit"  # in MONAI's record of applied operations
_IDENTITY = torch.eye(4, dtype=torch.float64)


def compose(call: str, affine: Any, moves: Sequence[Tensor], *, batched: bool) -> Tensor:
    """Return the affine of moved volumes.

    Args:
        call: The user's call, for messages.
        affine: (4, 4), or (B, 4, 4) for a batch; a tensor or an array.
        moves: For each sample, the (4, 4) matrix from new to old voxel indices.
        batched: Whether the volumes are a batch.

    Returns:
        The same shape and dtype, computed in float64.

    Raises:
        InputError: The shape is wrong, or a single affine is given for samples that move differently.
    """
    given = torch.as_tensor(affine)
    is_one = given.shape == (4, 4)
    if not is_one and not (batched and given.shape == (len(moves), 4, 4)):
        raise InputError(
            call,
            got=f"an affine of shape {tuple(given.shape)} for {len(moves)} volumes that are flipped or rotated",
            expected="(4, 4)" + (f", or {(len(moves), 4, 4)}" if batched else ""),
            fix="give each volume the matrix from its voxels along D, H, W to world coordinates, or pass a plain "
            "tensor instead.",
        )
    if is_one and any(not torch.equal(each, moves[0]) for each in moves):
        raise InputError(
            call,
            got=f"one affine for {len(moves)} volumes that are moved in different ways",
            expected="an affine for each volume of the batch, (B, 4, 4)",
            fix="collate with monai.data.list_data_collate, which keeps the affines, augment before batching, or "
            "set same_on_batch=True.",
        )
    steps = moves[0] if is_one else torch.stack(list(moves))
    matrix = given.to(torch.float64) @ steps.to(given.device)
    return matrix.to(given.dtype if given.is_floating_point() else torch.float64)


def described_as(call: str, result: Tensor, source: Tensor, moves: Sequence[Tensor] | None, *, batched: bool) -> Tensor:
    """Give a result the class and attributes of its source, with the affine updated for the move.

    Args:
        call: The user's call, for messages.
        result: A plain tensor.
        source: The volume, which `carries_affine`.
        moves: As for `compose`; None if nothing moves.
        batched: As for `compose`.

    Raises:
        InputError: As for `compose`; or the source has pending operations, which would apply to moved voxels.
        InputTypeError: The affine cannot be set.
    """
    whole: Any = result.as_subclass(type(source))
    whole.__dict__.update(copy.deepcopy(source.__dict__))
    if moves is None or all(torch.equal(each, _IDENTITY) for each in moves):
        return whole  # type: ignore[no-any-return]  # a tensor
    if getattr(source, "has_pending_operations", False):
        raise InputError(
            call,
            got=f"a {type(source).__name__} with pending operations",
            expected="a volume without pending operations, because they refer to the current positions of the voxels",
            fix="apply them first with monai.transforms.ApplyPending, or use lazy=False.",
        )
    affine: Any = source.affine  # type: ignore[attr-defined]  # it carries one
    moved: Any = compose(call, affine, moves, batched=batched)
    try:
        whole.affine = moved.numpy() if isinstance(affine, np.ndarray) else moved
    except AttributeError as error:
        raise InputTypeError(
            call,
            got=f"a {type(source).__name__} whose affine cannot be set",
            expected="a volume whose affine can follow its voxels",
            fix="pass x.as_subclass(torch.Tensor), and compute its affine with augmentation.affine_after(affine, "
            "params).",
        ) from error
    _note(whole, moves, batched=batched)
    return whole  # type: ignore[no-any-return]  # a tensor


def _note(volume: Any, moves: Sequence[Tensor], *, batched: bool) -> None:
    """Replace the record of applied operations by the move, so that MONAI refuses to invert them now.

    A move that undoes the last one restores the record.
    """
    applied = getattr(volume, "applied_operations", None)
    if not isinstance(applied, list):
        return
    if not (batched and getattr(volume, "is_batch", False)):
        applied[:] = _noted(applied, moves[0])
    elif len(applied) == len(moves):
        applied[:] = [_noted(each, move) for each, move in zip(applied, moves, strict=True)]


def _noted(record: Any, move: Tensor) -> Any:
    """Return one volume's updated record; in a batch MONAI writes "none" for an empty one."""
    if torch.equal(move, _IDENTITY):
        return record
    done = list(record) if isinstance(record, list) else []
    last = done[-1] if done and isinstance(done[-1], dict) else {}
    extra = last.get("extra_info", {}) if last.get("class") == _RECORD else {}
    if extra and torch.equal(torch.tensor(extra["new_to_old"], dtype=torch.float64) @ move, _IDENTITY):
        return [*extra["before"], *done[:-1]]
    warning = "memkit has flipped or turned this volume: undo that first, with augmentation.inverse(y, params)."
    extra = {"new_to_old": move.tolist(), "warn": warning, "before": done}
    return [{"class": _RECORD, "id": _RECORD, "extra_info": extra, "do_transforms": True}]
