"""Selection of the backend for passes over the points: NumPy, numba, torch operators, or Triton kernels."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Literal, cast, get_args

import torch

from memkit._core.errors import ConfigError
from memkit._core.settings import Checker
from memkit.points import passes
from memkit.points.passes import Passes

HostBackend = Literal["numpy", "numba"]
GridBackend = Literal["auto", "numpy", "numba", "torch", "triton"]


def host_passes(backend: HostBackend, call: str) -> Passes:
    """Return the passes of a host backend.

    Raises:
        ConfigError: The backend is unknown, or numba is not installed.
    """
    _check_known(backend, call, get_args(HostBackend))
    if backend == "numpy":
        return passes
    _check_installed(backend, call)
    return cast("Passes", importlib.import_module("memkit.points.compiled"))  # imported lazily: numba takes a second


def resolved(backend: GridBackend, device: torch.device, call: str) -> GridBackend:
    """Return the backend for a device.

    Raises:
        ConfigError: The backend does not run on the device, or is not installed.
    """
    fitting: tuple[GridBackend, ...] = ("auto", "torch", "triton") if device.type != "cpu" else get_args(GridBackend)
    if backend == "auto":
        with_triton = device.type == "cuda" and importlib.util.find_spec("triton") is not None
        return "numpy" if device.type == "cpu" else "triton" if with_triton else "torch"
    _check_known(backend, call, fitting)
    _check_installed(backend, call)
    if backend == "triton" and device.type == "cpu":
        _refuse_without_interpreter(call)
    return backend


def _refuse_without_interpreter(call: str) -> None:
    if importlib.import_module("memkit.points.kernels").are_compiled():
        raise ConfigError(
            call,
            got="backend='triton' on the CPU, for which Triton cannot compile",
            expected="an accelerator, or Triton's interpreter",
            fix="omit backend; to try the kernels, set TRITON_INTERPRET=1 before Triton is imported.",
        )


def _check_installed(backend: GridBackend, call: str) -> None:
    if backend in ("numba", "triton") and importlib.util.find_spec(backend) is None:
        raise ConfigError(
            call,
            got=f"backend={backend!r}, but {backend} is not installed",
            expected=f"{backend}",
            fix=f"run `pip install {backend}`, or omit backend.",
        )


def _check_known(backend: str, call: str, known: tuple[str, ...]) -> None:
    Checker(call).choice("backend", backend, known, fix="omit backend: all of them give the same samples.")
