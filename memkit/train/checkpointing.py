"""Reduce the activation memory of chosen blocks, without touching the user's classes."""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

from torch import nn

from memkit._core.errors import ConfigError
from memkit._core.protocols import Closing
from memkit.train.models import unwrap_model
from memkit.train.treatments import TREATMENTS, Elsewhere, TreatedForward, Treatment

Choice = Literal["auto"] | Sequence[str] | Mapping[str, Treatment] | Callable[[str, nn.Module], bool]
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


class Checkpointing(Closing):
    """Reduces the activation memory of chosen blocks, in any loop, until `close` or the end of a ``with`` block.

    Gradients are bit-equal to the plain model's: torch's, NumPy's and Python's random state are replayed, and buffers
    (BatchNorm statistics, spectral-norm vectors) change once. Names, ``state_dict`` and classes do not change; a deep
    copy or a pickle of the model is treated too.

    Args:
        model: The model; also compiled, or in DistributedDataParallel.
        choice: ``"auto"`` selects the repeated blocks; a list holds `fnmatch` patterns over ``named_modules()``; a
            callable ``(name, module) -> bool`` selects blocks; all of these are recomputed in backward. A mapping from
            names or patterns gives each block's treatment. ``"full"``: recompute it. ``"selective"``: recompute only
            the cheap operators and keep the results of `KEPT_OPERATORS`. ``"offload"``: move everything it saves to
            disk or, with an accelerator, to host memory. A block's own name takes precedence over patterns. Modules
            inside a chosen block are treated with it.

    Attributes:
        blocks: The chosen modules by name.
        treatments: The treatment of each block.

    Raises:
        ConfigError: Nothing was chosen, a pattern matches no module, or a mapping is ambiguous.
        StateError: From the model's forward: a block to be recomputed in backward has changed its input in place.

    Memory cost: whatever ``choice`` keeps of each block until backward, plus the peak of the largest block.

    Source: `docs/checkpointing.md`.

    Example:
        >>> import torch, memkit as mk
        >>> block = torch.nn.TransformerEncoderLayer(8, 2, 16)
        >>> model = torch.nn.TransformerEncoder(block, 3, enable_nested_tensor=False)
        >>> blocks = mk.Checkpointing(model, {"layers.*": "full", "layers.0": "selective"})  # and train as before
        >>> blocks.treatments
        {'layers.0': 'selective', 'layers.1': 'full', 'layers.2': 'full'}
        >>> blocks.close()  # the model is as it was found
    """

    def __init__(self, model: nn.Module, choice: Choice) -> None:
        if isinstance(model, nn.DataParallel):
            raise ConfigError(
                "checkpoint=...",
                got="a DataParallel model, whose replicas would run the blocks of the original model",
                expected="one model per process",
                fix="use DistributedDataParallel.",
            )
        self.blocks = choose_blocks(unwrap_model(model), choice)
        self.treatments = _treatments(self.blocks, choice)
        self._before = {name: block.__dict__.get("forward") for name, block in self.blocks.items()}
        for name, before in self._before.items():
            _refuse_other(name, before, self.treatments[name])
        elsewhere = Elsewhere()
        self._installed: dict[str, TreatedForward] = {}
        for name, block in self.blocks.items():
            if not isinstance(self._before[name], TreatedForward):  # another wrapper already treats it
                self._installed[name] = TreatedForward(name, block, self.treatments[name], elsewhere)
                block.__dict__["forward"] = self._installed[name]  # on the instance, not on the class

    @property
    def recomputed(self) -> tuple[str, ...]:
        """Names of the blocks that are recomputed in backward, in whole or in part."""
        return tuple(name for name, treatment in self.treatments.items() if treatment != "offload")

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Disable all treatments inside the ``with`` block."""
        for each in self._installed.values():
            each.is_suspended = True
        try:
            yield
        finally:
            for each in self._installed.values():
                each.is_suspended = False

    def close(self) -> None:
        """Restore every block's own forward."""
        for name, installed in self._installed.items():
            block = self.blocks[name]
            if block.__dict__.get("forward") is not installed:  # someone replaced it: leave theirs
                continue
            del block.__dict__["forward"]
            if self._before[name] is not None:
                block.__dict__["forward"] = self._before[name]
        self._installed = {}


def choose_blocks(model: nn.Module, choice: Choice) -> dict[str, nn.Module]:
    """Choose the blocks to treat, outermost first; see `Checkpointing`."""
    if choice == "auto":
        chosen = _repeated_blocks(model)
    elif callable(choice):
        chosen = {name: module for name, module in model.named_modules() if name and choice(name, module)}
    else:
        chosen = _match(model, choice)
    if not chosen and not isinstance(choice, Mapping):  # an empty mapping treats no block
        raise ConfigError(
            f"checkpoint={choice!r}",
            got=f"a choice that selects no block of {type(model).__name__}",
            expected="at least one block that contains several layers",
            fix="name the blocks, for example checkpoint=['encoder.*'], or leave checkpoint=None.",
        )
    return _outermost(dict(_open_containers(chosen)))


def _treatments(blocks: Mapping[str, nn.Module], choice: Choice) -> dict[str, Treatment]:
    """Return each block's treatment, from its own name or from the patterns that match it or its container."""
    if not isinstance(choice, Mapping):
        return dict.fromkeys(blocks, "full")
    treatments: dict[str, Treatment] = {}
    idle = dict.fromkeys(choice)
    for name in blocks:
        keys = [key for key in choice if _names(key, name)]
        for key in keys:
            idle.pop(key, None)
        treatments[name] = choice[name] if name in choice else choice[keys[0]]
        if name not in choice and len({choice[key] for key in keys}) > 1:
            raise ConfigError(
                f"checkpoint={choice!r}",
                got=f"{' and '.join(repr(key) for key in keys)}, which differ on the block {name!r}",
                expected="one treatment for each block",
                fix=f"give the block its own entry: {name!r}: {choice[keys[0]]!r}.",
            )
    for key in idle:
        raise ConfigError(
            f"checkpoint={choice!r}",
            got=f"{key!r}, whose modules all lie inside other chosen blocks",
            expected="one treatment for a block and everything inside it",
            fix="remove this pattern, or remove the block that contains these modules.",
        )
    return treatments


def _names(key: str, name: str) -> bool:
    """Return whether a name or pattern matches a block, or a container around it."""
    parts = name.split(".")
    return any(fnmatch.fnmatchcase(".".join(parts[:count]), key) for count in range(1, len(parts) + 1))


def _refuse_other(name: str, before: object, treatment: Treatment) -> None:
    """Refuse a block that is already treated in another way."""
    if isinstance(before, TreatedForward) and before.treatment != treatment:
        raise ConfigError(
            f"checkpoint={{{name!r}: {treatment!r}}}",
            got=f"a block that already has the treatment {before.treatment!r}",
            expected="one treatment for each block",
            fix="first close the wrapper (or the Checkpointing) that treats this block.",
        )


def _match(model: nn.Module, patterns: Sequence[str] | Mapping[str, Treatment]) -> dict[str, nn.Module]:
    if isinstance(patterns, Mapping):
        for pattern, treatment in patterns.items():
            if treatment not in TREATMENTS:
                raise ConfigError(
                    f"checkpoint={patterns!r}",
                    got=f"{treatment!r} for {pattern!r}",
                    expected=f"one of {TREATMENTS}; a block that is not named keeps its activations",
                    fix="pass one of these, or remove the block's entry.",
                )
    wanted: object = [patterns] if isinstance(patterns, str) else patterns
    if not isinstance(wanted, Sequence | Mapping) or not all(isinstance(pattern, str) for pattern in wanted):
        raise ConfigError(
            f"checkpoint={patterns!r}",
            got=repr(patterns),
            expected="'auto', patterns as strings, a mapping from patterns to treatments, or a callable (name, "
            "module) -> bool",
            fix="write for example checkpoint=['encoder.*'].",
        )
    modules = {name: module for name, module in model.named_modules() if name}
    chosen: dict[str, nn.Module] = {}
    for pattern in wanted:
        matched = {name: module for name, module in modules.items() if fnmatch.fnmatchcase(name, pattern)}
        if not matched:
            near = difflib.get_close_matches(pattern, modules, n=3, cutoff=0.3) or list(modules)[:3]
            names = ", ".join(map(repr, near))
            raise ConfigError(
                f"checkpoint={patterns!r}",
                got=f"the pattern {pattern!r}, which matches no module of {type(model).__name__}",
                expected="fnmatch patterns over the names of model.named_modules()",
                fix=f"write for example {names}." if near else "omit checkpoint: the model has no modules inside.",
            )
        chosen |= matched
    return chosen


def _open_containers(chosen: dict[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Replace a ModuleList or ModuleDict, which has no forward of its own, with its children."""
    for name, module in chosen.items():
        if isinstance(module, _CONTAINERS):
            yield from _open_containers({f"{name}.{key}": child for key, child in module.named_children()})
        else:
            yield name, module


def _repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Find the outermost multi-layer blocks whose class occurs more than once.

    A trunk (a module that holds a stack of such blocks) saves little as a whole, since its recomputation needs all its
    activations at once; a single layer saves nothing, since it would recompute exactly what it must keep.
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
