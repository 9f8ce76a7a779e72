"""Choose a model's blocks: by name or pattern, by class, as modules, by a function, or the repeated ones."""

from __future__ import annotations

import difflib
import fnmatch
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from torch import nn

from memkit._core.errors import ConfigError
from memkit._core.settings import nearest_word
from memkit._torch.modules import parameters_of
from memkit.train.treatments import TREATMENTS, Treatment

BlockKey: TypeAlias = str | type[nn.Module] | nn.Module
Choice: TypeAlias = (
    Literal["auto"] | bool | BlockKey | Sequence[BlockKey] | Mapping[Any, Treatment] | Callable[[str, nn.Module], bool]
)
_Modules = dict[str, nn.Module]


def choose_blocks(model: nn.Module, choice: Choice) -> _Modules:
    """Return the blocks of a ``checkpoint=`` setting by name, outermost first; see `memkit.Checkpointing`."""
    return BlockChoice(model, choice, "checkpoint={}").blocks


class BlockChoice:
    """The blocks that a choice selects, and their treatments.

    Args:
        model: The model.
        choice: The user's choice.
        form: The user's call, for messages, with ``{}`` for the choice.

    Attributes:
        blocks: The chosen modules by name, outermost first.
        treatments: The treatment of each block.
        call: The user's call with the choice.

    Raises:
        ConfigError: No block was chosen, a pattern matches no module, or a mapping is ambiguous.
    """

    def __init__(self, model: nn.Module, choice: Choice, form: str) -> None:
        self._model, self._form, self.call = model, form, form.format(_shown(choice))
        if isinstance(choice, bool):
            choice = "auto" if choice else {}
        self._modules = {name: module for name, module in model.named_modules() if name}
        self._found: dict[Any, _Modules] = {}  # by key of the choice
        self.blocks = _outermost(dict(_open_containers(self._chosen(choice))))
        if not self.blocks and not isinstance(choice, Mapping):  # an empty mapping treats no block
            names = list(_repeated_blocks(model))[:3]
            fix = self._written(names) if names else "omit checkpoint: no module inside holds several layers."
            raise self._refusal(
                f"a choice that selects no block of {type(model).__name__}",
                "at least one block that contains several layers",
                fix,
            )
        self.treatments: dict[str, Treatment] = dict.fromkeys(self.blocks, "full")
        if isinstance(choice, Mapping):
            self.treatments = self._treatments(choice)

    def _chosen(self, choice: Any) -> _Modules:
        if isinstance(choice, str) and choice == "auto":
            return _repeated_blocks(self._model)
        if isinstance(choice, str) and choice not in self._modules and not any(each in choice for each in "*?["):
            self._refuse_word(choice)
        if isinstance(choice, Mapping):
            self._check_treatments(choice)
        elif not _is_block(choice) and callable(choice):
            self._check_function(choice)
            return {name: module for name, module in self._modules.items() if choice(name, module)}
        keys = [choice] if _is_block(choice) else choice
        if not isinstance(keys, Sequence | Mapping) or not all(map(_is_block, keys)):
            raise self._refusal(
                _shown(choice),
                "'auto', patterns as strings, classes, modules of the model, a mapping from these to treatments, or a "
                "callable (name, module) -> bool",
                self._written("auto"),
            )
        treatments = choice if isinstance(choice, Mapping) else {}
        self._found = {key: self._select(key, treatments.get(key)) for key in keys}
        return {name: module for found in self._found.values() for name, module in found.items()}

    def _select(self, key: BlockKey, treatment: Treatment | None) -> _Modules:
        """Return the modules that a name, a pattern, a class or a module selects; None is the default treatment."""
        kind = type(self._model).__name__
        if isinstance(key, str):
            found = {name: each for name, each in self._modules.items() if fnmatch.fnmatchcase(name, key)}
            got = f"the pattern {key!r}, which matches no module of {kind}"
            near = difflib.get_close_matches(key, self._modules, n=3, cutoff=0.3)
        elif isinstance(key, type):
            found = {name: each for name, each in self._modules.items() if isinstance(each, key)}
            got = f"the class {key.__name__}, of which {kind} has no module"
            classes = {type(each).__name__: name for name, each in reversed(self._modules.items())}
            near = [classes[each] for each in difflib.get_close_matches(key.__name__, classes, n=1, cutoff=0.3)]
        else:
            found = {name: each for name, each in self._modules.items() if each is key}
            is_whole = key is self._model
            got = f"the whole {kind}" if is_whole else f"a {type(key).__name__} that is not inside of {kind}"
            near = list(_repeated_blocks(self._model)) if is_whole else []
        if not found:
            names = list(_outermost({name: self._modules[name] for name in near or self._modules}))[:3]
            others = names if treatment is None else dict.fromkeys(names, treatment)
            raise self._refusal(
                got,
                "fnmatch patterns over the names of model.named_modules(), classes, or modules of the model",
                self._written(others) if names else "omit checkpoint: the model has no modules inside.",
            )
        return found

    def _refuse_word(self, word: str) -> None:
        """Refuse a word that is neither a pattern nor a name: a treatment alone, or a misspelt ``"auto"``."""
        if word in TREATMENTS:
            names = list(_repeated_blocks(self._model))
            raise self._refusal(
                f"the treatment {word!r} without blocks",
                "the blocks, or a mapping from blocks to treatments",
                self._written(dict.fromkeys(names[:3], word) if names else "auto"),
            )
        if nearest_word(word, ["auto"]):
            raise self._refusal(f"the word {word!r}", "'auto', or names of modules", self._written("auto"))

    def _check_treatments(self, choice: Mapping[Any, Any]) -> None:
        for key, treatment in choice.items():
            if not isinstance(treatment, str) or treatment not in TREATMENTS:
                meant = (nearest_word(treatment, TREATMENTS) if isinstance(treatment, str) else None) or "full"
                raise self._refusal(
                    f"{treatment!r} for {_shown(key)}",
                    f"one of {TREATMENTS}; a block that is not named keeps its activations",
                    self._written({key: meant}),
                )

    def _check_function(self, choice: Callable[..., object]) -> None:
        try:
            signature = inspect.signature(choice)
        except (TypeError, ValueError):  # some built-in functions have no signature
            return
        try:
            signature.bind("", self._model)
        except TypeError:
            raise self._refusal(
                f"a function with the signature {signature}",
                "a function that takes a module's name and the module: (name, module) -> bool",
                "write lambda name, module: ...",
            ) from None

    def _treatments(self, choice: Mapping[Any, Treatment]) -> dict[str, Treatment]:
        """Return each block's treatment, from its own name or from the keys that match it or its container."""
        treatments: dict[str, Treatment] = {}
        idle = dict.fromkeys(choice)
        for name, block in self.blocks.items():
            keys = [key for key in choice if _covers(self._found[key], name)]
            own = [key for key in keys if key is block or (isinstance(key, str) and key == name)]
            for key in keys:
                idle.pop(key, None)
            treatments[name] = choice[(own or keys)[0]]
            if not own and len({choice[key] for key in keys}) > 1:
                raise self._refusal(
                    f"{' and '.join(map(_shown, keys))}, which differ on the block {name!r}",
                    "one treatment for each block",
                    f"give the block its own entry: {name!r}: {choice[keys[0]]!r}",
                )
        for key in idle:
            raise self._refusal(
                f"{_shown(key)}, whose modules all lie inside other chosen blocks",
                "one treatment for a block and everything inside it",
                self._written({each: treatment for each, treatment in choice.items() if each != key}),
            )
        return treatments

    def _refusal(self, got: str, expected: str, fix: str) -> ConfigError:
        return ConfigError(self.call, got=got, expected=expected, fix=fix)

    def _written(self, choice: Any) -> str:
        """Return the corrected call."""
        return f"write {self._form.format(_shown(choice))}"


def _is_block(value: object) -> bool:
    return isinstance(value, str | nn.Module) or (isinstance(value, type) and issubclass(value, nn.Module))


def _shown(choice: object) -> str:
    """Format a choice as the user may have written it."""
    if isinstance(choice, nn.Module):
        return f"<{type(choice).__name__}>"
    if isinstance(choice, Mapping):
        return f"{{{', '.join(f'{_shown(key)}: {treatment!r}' for key, treatment in choice.items())}}}"
    if isinstance(choice, list | tuple):
        return f"[{', '.join(map(_shown, choice))}]"
    return getattr(choice, "__name__", repr(choice)) if callable(choice) else repr(choice)


def _covers(found: _Modules, name: str) -> bool:
    """Return whether a block, or a container around it, is among these modules."""
    parts = name.split(".")
    return any(".".join(parts[:count]) in found for count in range(1, len(parts) + 1))


def _open_containers(chosen: dict[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Replace a ModuleList or ModuleDict without a forward, which a subclass may have, with its children."""
    for name, module in chosen.items():
        if _has_no_forward(module):
            yield from _open_containers({f"{name}.{key}": child for key, child in module.named_children()})
        else:
            yield name, module


def _repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Find the outermost multi-layer blocks whose class occurs more than once; else see `_repeated_among`.

    A trunk (a module that holds a stack of such blocks) saves little as a whole, since its recomputation needs all its
    activations at once; a single layer saves nothing, since it would recompute exactly what it must keep.
    """
    candidates = {
        name: module
        for name, module in model.named_modules()
        if name and not _has_no_forward(module) and _num_layers(module) > 1 and not _holds_stack(module)
    }
    return _repeated_among(candidates)


def _repeated_among(candidates: _Modules) -> _Modules:
    """Return the outermost modules of a class that occurs more than once, or all of them if there is no such class.

    One that holds blocks of its own is then a trunk, and replaced with these: a network inside of a module that only
    prepares its inputs, or beside a head. Of several, only if they are most of its layers: small blocks alone, such as
    two attentions among convolutions, would save less than the whole.
    """
    outermost = _outermost(candidates)
    occurrences = Counter(type(module) for module in outermost.values())
    repeated = {name: module for name, module in outermost.items() if occurrences[type(module)] > 1}
    if repeated:
        return repeated
    found: _Modules = {}
    for name, module in outermost.items():
        inside = {id(each) for each in module.modules()} - {id(module)}
        inner = _repeated_among({key: each for key, each in candidates.items() if id(each) in inside})
        is_most = 2 * sum(map(_num_layers, inner.values())) > _num_layers(module)
        is_trunk = len(inner) > 1 and (len(outermost) == 1 or is_most)
        found |= inner if is_trunk else {name: module}
    return found


def _has_no_forward(module: nn.Module) -> bool:
    is_container = isinstance(module, nn.ModuleList | nn.ModuleDict)
    return is_container and getattr(module.forward, "__func__", None) is nn.Module.forward


def _holds_stack(module: nn.Module) -> bool:
    stacks = [
        each
        for each in module.modules()
        # A ModuleDict with a forward runs its members in turn (torchvision's _DenseBlock); others offer a choice.
        if isinstance(each, nn.ModuleList | nn.Sequential)
        or (isinstance(each, nn.ModuleDict) and not _has_no_forward(each))
    ]
    return any(sum(_num_layers(child) > 1 for child in stack.children()) > 1 for stack in stacks)


def _outermost(modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    # By identity: a module may be reached under several names.
    inside = {id(each) for module in modules.values() for each in module.modules() if each is not module}
    return {name: module for name, module in modules.items() if id(module) not in inside}


def _num_layers(module: nn.Module) -> int:
    return sum(any(each is not None for each in parameters_of(child).values()) for child in module.modules())
