"""Recompute chosen blocks in backward instead of keeping their activations, without touching the user's classes."""

from __future__ import annotations

import difflib
import fnmatch
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memkit._errors import ConfigError
from memkit.train.replay import BufferWatch, Replay

Choice = Literal["auto"] | Sequence[str] | Callable[[str, nn.Module], bool]
_OWN_SETTINGS = {"use_reentrant", "context_fn", "determinism_check", "debug", "early_stop", "preserve_rng_state"}
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


class Checkpointing:
    """Checkpoints chosen blocks of a model until `close`.

    Gradients are bit-equal to the plain model's: torch's, NumPy's and Python's random state are replayed, and buffers
    (BatchNorm statistics, spectral-norm vectors) change once. Names, ``state_dict`` and classes stay; a deep copy or a
    pickle of the model is checkpointed too.

    Args:
        model: The model.
        choice: ``"auto"`` takes the repeated blocks; a list holds `fnmatch` patterns over ``named_modules()``; a
            callable ``(name, module) -> bool`` decides. A block inside a chosen block is not checkpointed again.

    Attributes:
        blocks: The checkpointed modules by name.

    Raises:
        ConfigError: Nothing was chosen, or a pattern matches no module.
    """

    def __init__(self, model: nn.Module, choice: Choice) -> None:
        if isinstance(model, nn.DataParallel):
            raise ConfigError(
                "checkpoint=...",
                got="a DataParallel model, whose replicas would run the original's blocks",
                expected="one model per process",
                fix="use DistributedDataParallel.",
            )
        self.blocks = choose_blocks(model, choice)
        self._before = {name: block.__dict__.get("forward") for name, block in self.blocks.items()}
        self._installed: dict[str, CheckpointedForward] = {}
        for name, block in self.blocks.items():
            if not isinstance(self._before[name], CheckpointedForward):  # another wrapper's: it is checkpointed already
                self._installed[name] = CheckpointedForward(block)
                block.__dict__["forward"] = self._installed[name]  # on the instance, not on the class

    def close(self) -> None:
        """Give every block its own forward back."""
        for name, installed in self._installed.items():
            block = self.blocks[name]
            if block.__dict__.get("forward") is not installed:  # somebody has put another one on top: it is theirs
                continue
            del block.__dict__["forward"]
            if self._before[name] is not None:
                block.__dict__["forward"] = self._before[name]
        self._installed = {}


class CheckpointedForward:
    """A block's forward that keeps its inputs only, and runs again in backward.

    An object and not a closure: a deep copy of the model (an EMA) must call the copy's block, not the original's.

    Args:
        block: The module whose forward it is.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._forward = block.__dict__.get("forward")  # somebody may have put one on the instance already
        self._watch = BufferWatch(block)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block's own forward, checkpointed where gradients are wanted."""
        forward = self._forward or type(self._block).forward.__get__(self._block)
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # the compiler recomputes by copying operators, not by calling Python again
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        if _OWN_SETTINGS & kwargs.keys():  # checkpoint() would take these for its own
            forward, kwargs = functools.partial(forward, **kwargs), {}
        replay = Replay(self._watch)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=lambda: (replay, replay.again), **kwargs)


def choose_blocks(model: nn.Module, choice: Choice) -> dict[str, nn.Module]:
    """Choose the blocks to checkpoint, outermost first; see `Checkpointing`."""
    if choice == "auto":
        chosen = _repeated_blocks(model)
    elif callable(choice):
        chosen = {name: module for name, module in model.named_modules() if name and choice(name, module)}
    else:
        chosen = _match(model, choice)
    if not chosen:
        raise ConfigError(
            f"checkpoint={choice!r}",
            got=f"no block of {type(model).__name__} chosen",
            expected="at least one block with several layers in it",
            fix="name the blocks, for example checkpoint=['encoder.*'], or leave checkpoint=None.",
        )
    return _outermost(dict(_open_containers(chosen)))


def _match(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    modules = {name: module for name, module in model.named_modules() if name}
    chosen: dict[str, nn.Module] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        matched = {name: module for name, module in modules.items() if fnmatch.fnmatchcase(name, pattern)}
        if not matched:
            near = difflib.get_close_matches(pattern, modules, n=3, cutoff=0.3) or list(modules)[:3]
            raise ConfigError(
                f"checkpoint={patterns!r}",
                got=f"the pattern {pattern!r}, which matches no module of {type(model).__name__}",
                expected="fnmatch patterns over the names of model.named_modules()",
                fix=f"write for example {', '.join(map(repr, near))}.",
            )
        chosen |= matched
    return chosen


def _open_containers(chosen: dict[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Replace a ModuleList, which has no forward of its own, by what is in it."""
    for name, module in chosen.items():
        if isinstance(module, _CONTAINERS):
            yield from _open_containers({f"{name}.{key}": child for key, child in module.named_children()})
        else:
            yield name, module


def _repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Find the outermost blocks of several layers whose class occurs more than once.

    A trunk (a module that holds a stack of such blocks) saves little as a whole, since its recomputation needs all its
    activations at once; a single layer saves nothing, since what it would recompute is what it must keep.
    """
    candidates = {
        name: module
        for name, module in model.named_modules()
        if name and not isinstance(module, _CONTAINERS) and _num_layers(module) > 1 and not _holds_stack(module)
    }
    outermost = _outermost(candidates)
    occurrences = Counter(type(module) for module in outermost.values())
    repeated = {name: module for name, module in outermost.items() if occurrences[type(module)] > 1}
    return repeated or outermost


def _holds_stack(module: nn.Module) -> bool:
    stacks = [each for each in module.modules() if isinstance(each, nn.ModuleList | nn.Sequential)]
    return any(sum(_num_layers(child) > 1 for child in stack.children()) > 1 for stack in stacks)


def _outermost(modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    return {
        name: module for name, module in modules.items() if not any(name.startswith(f"{other}.") for other in modules)
    }


def _num_layers(module: nn.Module) -> int:
    return sum(any(True for _ in child.parameters(recurse=False)) for child in module.modules())
