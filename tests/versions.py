"""Skips on versions of PyTorch that lack what a test is about: each names what is missing, as the table wants it."""

from __future__ import annotations

import functools

import pytest
import torch


def has(name: str) -> bool:
    """Whether this PyTorch has a name, such as "torch.optim.Muon"."""
    try:
        functools.reduce(getattr, name.split(".")[1:], torch)
    except AttributeError:
        return False
    return True


def needs(name: str, what: str = "what is tested") -> pytest.MarkDecorator:
    """Skip a test where PyTorch lacks a name."""
    return pytest.mark.skipif(not has(name), reason=f"PyTorch has no {name} ({what})")
