"""Submodules that remedies act on: find those that hold the most at the peak, and replace them."""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from memkit._core.errors import InputError, InputTypeError
from memkit.chunk.halo import find_reach
from memkit.chunk.tiles import ExactAxis, Reach
from memkit.recipes.advice.step import AdvisedStep, Call, Observation
from memkit.train.row_mixers import scan_modules

_LEAST_ROWS = 256  # with fewer rows, micro-batches are better
_NUM_CHUNKS = 16
_NUM_TILES = 4  # along the longest dimension
_MOST_TRIED = 3  # finding the reach of a large module takes seconds
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_WIDTHS = (nn.Linear, nn.LayerNorm)


def held_by_modules(seen: Observation) -> dict[str, int]:
    """Bytes at the peak that each module's calls allocated, including its submodules."""
    held = dict.fromkeys(seen.calls, 0)
    for storage in seen.recording.top(seen.recording.num_storages):
        if storage.category in ("activation", "temporary"):
            for name in held:
                if name == "" or storage.module == name or storage.module.startswith(f"{name}."):
                    held[name] += storage.nbytes
    return held


def chunkable(model: nn.Module, seen: Observation) -> tuple[str, int] | None:
    """Find the module with many rows that holds the most at the peak: its name, and the rows of a chunk."""
    for name, call in _by_size(seen):
        num_rows = {shape[0] if shape else 0 for shape in (*call.shapes, call.out_shape or ())}
        has_rows = bool(name) and len(num_rows) == 1 and min(num_rows) >= _LEAST_ROWS
        if has_rows and not scan_modules(model.get_submodule(name)):
            return name, -(-min(num_rows) // _NUM_CHUNKS)
    return None


def tileable(model: nn.Module, seen: Observation) -> tuple[str, int, int] | None:
    """Find the convolutional module that holds the most at the peak: its name, the dimension to tile, the tile size."""
    tried = 0
    for name, call in _by_size(seen):
        module = model.get_submodule(name)
        shape = call.shapes[0] if call.shapes else ()
        is_one = len(call.shapes) == 1 and len(shape) >= 3 and len(call.out_shape or ()) == len(shape)
        if not is_one or not any(isinstance(each, _CONVOLUTIONS) for each in module.modules()):
            continue
        dim = max(range(2 - len(shape), 0), key=lambda each: shape[each])
        size = -(-shape[dim] // _NUM_TILES)
        x = torch.empty((), dtype=next(iter(module.parameters())).dtype).expand(shape)
        with suppress(InputError, InputTypeError):  # unbounded reach, or it mixes positions far apart
            # Cached for the module: the runs without data need it.
            reach = find_reach(module, x, [dim], functools.partial(_tile_length, shape, size))[dim]
            if size + reach.before + reach.after < shape[dim]:
                return name, dim, size
        tried += 1
        if tried == _MOST_TRIED:
            return None
    return None


def _tile_length(shape: Sequence[int], tile_size: int, dim: int, reach: Reach) -> list[int]:
    return [ExactAxis.cut(shape[dim], tile_size, reach).length]


def _by_size(seen: Observation) -> Iterator[tuple[str, Call]]:
    """Yield modules called once per step, largest holders first; of equal ones the outer first."""
    held = held_by_modules(seen)
    for name in sorted(held, key=lambda each: (-held[each], each.count(".") + bool(each))):
        if held[name] and seen.calls[name].num_calls == 1:
            yield name, seen.calls[name]


def replace_submodule(step: AdvisedStep, name: str, make_run: Callable[[nn.Module], Callable[..., Any]]) -> None:
    """Replace a module by another function; an empty name means the model itself.

    It is replaced by one of its own class with the same parameters and attributes, which other code may use.
    """
    module = step.model.get_submodule(name)
    replacement: nn.Module = object.__new__(type(module))
    hooks: dict[str, Any] = {each: OrderedDict() for each in vars(module) if each.endswith("_hooks")}  # run inside
    vars(replacement).update(vars(module), **hooks, forward=_by_position(module, make_run(module)))
    if name:
        parent, _, key = name.rpartition(".")
        setattr(step.model.get_submodule(parent), key, replacement)
    else:
        step.model = replacement


def _by_position(module: nn.Module, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward with the module's own signature for a function that takes arguments by position."""
    signature = inspect.signature(module.forward)

    def forward(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        if bound.kwargs:
            raise InputTypeError(
                "advise",
                got=f"a call of {type(module).__name__} with {', '.join(bound.kwargs)} by keyword only",
                expected="arguments that its forward takes by position, too",
                fix="name them in the signature of its forward.",
            )
        return run(*bound.args)

    return forward


def find_mlps(model: nn.Module) -> dict[str, nn.Sequential]:
    """Return the sequences of linear layers with only elementwise layers between them."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Sequential)
        and sum(isinstance(layer, nn.Linear) for layer in module) > 1
        and all(isinstance(layer, _WIDTHS) or not list(layer.parameters()) for layer in module)
    }


def halve_widths(mlp: nn.Sequential) -> None:
    """Rebuild a sequence of linear layers with half as many hidden units."""
    last = [key for key, layer in mlp.named_children() if isinstance(layer, nn.Linear)][-1]
    width: int | None = None  # input width of the next layer, if it has changed
    for key, layer in list(mlp.named_children()):
        if isinstance(layer, nn.Linear):
            before = layer.in_features if width is None else width
            width = None if key == last else max(1, layer.out_features // 2)
            after = layer.out_features if width is None else width
            setattr(mlp, key, nn.Linear(before, after, layer.bias is not None, **_form(layer.weight)))
        elif isinstance(layer, nn.LayerNorm) and width is not None:
            setattr(mlp, key, nn.LayerNorm(width, layer.eps, layer.elementwise_affine, **_form(layer.weight)))


def _form(weight: Tensor) -> dict[str, Any]:
    return {"device": weight.device, "dtype": weight.dtype}
