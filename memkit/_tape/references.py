"""References to a forward's outputs, by which an output is recognized that no backward reads."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memkit._torch.dispatch import without_modes
from memkit._torch.storage import storage_use_count
from memkit._torch.tensors import storage_key, use_count

Counts = tuple[int, int, int]
Run = Callable[[], list[Tensor]]
"""Runs a forward and returns its outputs, which nothing else holds."""


def references(tensors: list[Tensor], place: int) -> Counts:
    """Count the references to a tensor: in C++, in Python, and to its storage."""
    key = storage_key(tensors[place].untyped_storage())
    return use_count(tensors[place]), sys.getrefcount(tensors[place]), storage_use_count(key)


def references_if_unread(watch: Callable[[Run], tuple[object, list[Tensor]]]) -> Counts | None:
    """Return the references to an output that nothing reads, as this Python and this torch count them.

    Args:
        watch: Runs a forward as it will be run; returns the object that may itself hold its outputs, and these.

    Returns:
        None if one that a variable, a graph, or another tensor over its storage holds has as many.
    """
    holders: tuple[Callable[[Tensor], Any], ...] = (lambda _: None, lambda out: out, torch.sin, torch.detach)
    counts = []
    with without_modes(), torch.inference_mode(mode=False), torch.enable_grad():
        for hold in holders:
            one = torch.ones(1, 1, device="cpu", requires_grad=True)
            watcher, outputs = watch(lambda one=one: [one @ one])  # type: ignore[misc]
            held = hold(outputs[0])
            counts.append(references(outputs, 0))
            del watcher, held
    unread, *others = counts
    return None if unread in others else unread
