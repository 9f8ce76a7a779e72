"""State that a loss function, a model or a data set keeps: no saved state has it, or no validation may change it."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterable, Iterator, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils.data import DataLoader, Dataset, Sampler

from memkit._core.attributes import attributes_of
from memkit._core.errors import warn_user
from memkit._core.printable import list_some
from memkit._machine import random_state
from memkit._recorder.attributes import Attributes, HeldValue, fingerprint_of
from memkit._recovery.snapshot import HeldState, RandomNumbers
from memkit._torch.modules import STATE, unsaved_buffers_of
from memkit._torch.tensors import bit_sums, has_storage, storage_key
from memkit.recipes.order import all_parts, changed_names, plain_attributes, reading_changes
from memkit.recipes.samplers import Samplers, held_apart

# By these a module saves what it likes.
_OWN = [(name, getattr(nn.Module, name)) for name in ("get_extra_state", "state_dict", "_save_to_state_dict")]

_MOST_ITEMS = 4096  # of a list that is compared with the one in its place before


class UnsavedState:
    """State that nothing saves, as it is now: tensors of a step's functions, a data set's own generators, and values.

    The values are numbers, words, tensors and arrays that stand in attributes, lists and dicts of what the model, the
    functions of a step and the loader's ``collate_fn`` hold, and in variables of these functions. One that is no value
    of its kind before the training does not count: a cache begins as None, a log as an empty list.

    Cost: a sum over the bits of the tensors, now and when they are compared.

    Args:
        model: The model.
        functions: The functions of a step: the loss function, ``on_gradients``, and hooks of the optimizers.
        data: The data set; None if there is none.
        samplers: The samplers of its loader.
        saved: Objects whose state is saved; they are left out, with what they hold.
    """

    def __init__(
        self,
        model: nn.Module,
        functions: Sequence[object],
        data: object,
        samplers: Samplers,
        saved: Iterable[object],
    ) -> None:
        saved = list(saved)
        self._held = held_apart([model, *functions, *samplers.collate_fns])
        self._modules = [model, *(each for each in saved if isinstance(each, nn.Module))]
        by_objects = Attributes([each for each in saved if not isinstance(each, nn.Module)]).ids()
        self._except_for = _with_states(self._modules) | _members(self._held.modules()) | by_objects
        self._data, self._samplers = Attributes([data]), samplers
        samplers.note()
        self._holders = _holders(Attributes(functions), saved, by_objects)
        self._before = dict(self._sums())
        self._buffers_before = self._unsaved_buffers()
        self._values_before = {(id(each.place), each.key): fingerprint for each, fingerprint in self._values()}
        self._lists_before = {(id(each.place), each.key): (each.now, prints) for each, prints in self._lists()}

    def _sums(self) -> Iterator[tuple[tuple[int, str], list[int]]]:
        for number, holder in enumerate(self._holders):
            for name, each in _tensors_of(holder).items():
                yield (number, name), bit_sums([each])

    def _unsaved_buffers(self) -> dict[tuple[int, str], tuple[str, torch.Size, list[int]]]:
        """Return name, shape and sums of the buffers that no module's state has; its own way to save may have them."""
        modules = {each for root in self._modules for each in root.modules() if id(each) not in self._except_for}
        return {
            (id(module), name): (f"{type(module).__name__}.{name}", each.shape, bit_sums([each]))
            for module in modules
            for name, each in unsaved_buffers_of(module).items()
            if has_storage(each)
        }

    def _changed_buffers(self) -> list[str]:
        before = self._buffers_before
        pairs = [(before[key], now) for key, now in self._unsaved_buffers().items() if key in before]
        # One of another shape is a cache, which grows.
        return sorted({now[0] for then, now in pairs if then[1] == now[1] and then[2] != now[2]})

    def _values(self) -> Iterator[tuple[HeldValue, tuple[object, object] | None]]:
        tensors = [each for module in self._modules for each in (*module.parameters(), *module.buffers())]
        storages = {storage_key(each.untyped_storage()) for each in tensors if has_storage(each)}
        for each in self._held.values(self._except_for):
            is_saved = has_storage(each.now) and storage_key(each.now.untyped_storage()) in storages
            yield each, None if is_saved else fingerprint_of(each.now)

    def _lists(self) -> Iterator[tuple[HeldValue, list[object]]]:
        """Yield the lists and tuples that stand in attributes and variables, with what tells their items apart."""
        for each in self._held.values(self._except_for):
            if type(each.now) in (list, tuple) and len(each.now) <= _MOST_ITEMS and not isinstance(each.place, list):
                yield each, [fingerprint_of(item) for item in each.now]

    def _changed_values(self) -> set[str]:
        names = set[str]()
        for each, prints in self._lists():  # another one in its place; one that only got longer is a log
            then, prints_then = self._lists_before.get((id(each.place), each.key), (each.now, prints))
            is_log = prints[: len(prints_then)] == prints_then
            if not (then is each.now or is_log or None in prints):
                names.add(each.shown)
        for each, now in self._values():
            key = id(each.place), each.key
            if key in self._values_before:
                before = self._values_before[key]
            else:  # a count may begin in the class
                before = fingerprint_of(getattr(type(each.place), str(each.key), None))
            if before is not None and now is not None and before[0] == now[0] and before[1] != now[1]:
                names.add(each.shown)
        return names

    def tell(self, call: str, of_data: Sequence[str] = ()) -> None:
        """Warn of what has changed since.

        Args:
            call: The user's call, for the message.
            of_data: Names of the data set's attributes that reading samples has changed.
        """
        now = dict(self._sums())
        changed = [
            f"{type(self._holders[number]).__name__}.{name}"
            for number, name in now
            if self._before.get((number, name)) != now[number, name]
        ]
        if changed:
            warn_user(
                f"{call}: training has changed what loss_fn, on_gradients or a hook of the optimizer holds "
                f"({list_some(list(dict.fromkeys(changed)), 3)}), and that is not saved: a resumed run begins with it "
                "anew, and differs. Way out: let the loop save it. For a module's parameters and buffers, write "
                "objects={'criterion': criterion}; for an object that is no module, name the module that it has, "
                "objects={'teacher': criterion.teacher}, or give it state_dict() and load_state_dict(state)."
            )
        if values := sorted({*self._changed_values(), *self._held.drawn()}.difference(changed)):
            warn_user(
                f"{call}: training has changed what the model, loss_fn, collate_fn, on_gradients or a hook of the "
                f"optimizer keeps ({list_some(values, 3)}), and that is not saved: a resumed run begins with it anew. "
                "If the training depends on it, as on a count of steps, it differs. Way out: keep it in a buffer of "
                "the model, self.register_buffer('count', torch.zeros(())), or save it by the model's "
                "get_extra_state() and set_extra_state(state); give any other object state_dict() and "
                "load_state_dict(state), and write objects={'clip': clip} for the loop; draw random numbers from a "
                "torch.Generator, which is saved."
            )
        if buffers := self._changed_buffers():
            warn_user(
                f"{call}: training has changed buffers with persistent=False ({list_some(buffers, 3)}), and these are "
                "not saved: a resumed run begins with them anew. If the training depends on them, as on a running "
                "mean, it differs. Way out: write self.register_buffer('mean', torch.zeros(4), persistent=True)."
            )
        if of_data:
            warn_user(f"{call}: {reading_changes(of_data)} Way out: compute it from seed, epoch and index.")
        if of_samplers := self._samplers.changed():
            tell_of_order(call, "a sampler of the loader", of_samplers)
        if self._data.have_drawn():
            warn_user(
                f"{call}: the data set has drawn from a random generator of its own, and that is not saved: a resumed "
                "run begins with it anew, and its samples differ. Way out: draw by torch.rand, np.random or random, "
                "whose state is saved."
            )


def tell_of_order(call: str, whose: str, changed: Sequence[str]) -> None:
    """Warn of attributes of a loader or a sampler that an epoch changes: the next one's order may depend on them."""
    warn_user(
        f"{call}: an epoch changes what {whose} keeps ({list_some(changed, 3)}), and that is not saved: a resumed run "
        "begins with it anew, and its batches differ if they depend on it. Way out: draw the order from the epoch, "
        "in a set_epoch(epoch) method, which the loop calls, or from a torch.Generator that is an attribute; or give "
        f"{whose} state_dict() and load_state_dict(state)."
    )


class Validations:
    """Keeps validations from changing what the training depends on.

    Put back are the attributes of the model's modules, with the lists, dicts, arrays and tensors that stand there, the
    buffers, what the loss function holds, and all random generators: the global ones, and those of the model and of the
    training's data. Changes of other objects that the model holds, or that ``val_fn`` and the loss function share, and
    of what a data set counts, are told once: a logger or a cache keeps them.

    Memory cost: while a validation runs, copies of buffers and small tensors, of 64 MiB in all; as much again for what
    the loss function holds.

    Args:
        call: The user's call, for messages.
        model: The model.
        data: The training's batches: a loader, or anything else.
    """

    def __init__(self, call: str, model: nn.Module, data: object) -> None:
        self._call, self._model, self._data = call, model, data
        self._told: set[str] = set()

    @contextlib.contextmanager
    def one(self, loss_fn: object, val_fn: object = None) -> Iterator[None]:
        """Run the block, a validation, and put back what it changes.

        Args:
            loss_fn: The loss function of the training, or a loop that has one.
            val_fn: The user's function that validates; None if it is ``loss_fn``. What it reaches by itself, and not
                through ``loss_fn``, it may collect: of that, only modules are put back, and the rest is told.
        """
        trained = {id(each) for each in self._model.parameters() if each.requires_grad}
        modules = set(self._model.modules())
        by_itself = set[int]()
        if val_fn is not None:
            called = {id(loss_fn)} if callable(loss_fn) else ()  # a loop may collect, too
            by_itself = Attributes([val_fn, self._model], content="arrays", left_out=called).ids()
        of_loss = HeldState(loss_fn, content="saved", trained=trained, left_out=by_itself, except_for=modules)
        shared = self._shared(loss_fn, trained) if val_fn is not None else None
        # A lazy module stays as its first run leaves it; a validation may swap an average of the weights in and out.
        how: dict[str, Any] = {"apart": trained, "except_for": (LazyModuleMixin,), "with_buffers": True}
        of_model = Attributes([self._model], content="saved", **how)
        parts = list(all_parts(self._data, set()))
        of_data = Attributes([*parts, *(each for part in parts for each in _drawing_from(part))])
        of_shared = [] if shared is None else shared.generators()
        random = RandomNumbers([*of_model.generators(), *of_shared, *of_data.generators()])
        counts = _counts_of(parts)
        try:
            yield
        finally:
            of_loss.restore()
            of_model.restore_modules(modules)
            if shared is not None:
                shared.restore_modules(shared.modules())
            random.restore()
            self._tell(
                "what the model holds",
                of_model.differences(),
                "keep it in attributes of the model's own modules, which are restored, or change it only if "
                "self.training.",
            )
            self._tell(
                "what loss_fn holds" if callable(loss_fn) else "what the training loop holds",
                [] if shared is None else shared.differences(),
                "keep it in a buffer or an attribute of a module, which is restored, or let val_fn use a copy of its "
                "own.",
            )
            now = _counts_of(parts)
            self._tell(
                "what the training's data counts",
                [name for pair in zip(counts, now, strict=True) for name in changed_names(*pair)],
                "validate on data of its own: DataLoader(copy.deepcopy(dataset), ...).",
            )

    def _shared(self, loss_fn: object, trained: Container[int]) -> Attributes:
        """Save what a loss function holds, but for what the model holds, too."""
        of_model = Attributes([self._model], content="arrays").ids()
        return Attributes(
            [loss_fn],
            content="saved",
            apart=trained,
            left_out=of_model,
            except_for=(Dataset, DataLoader, Sampler),
            with_buffers=True,
        )

    def _tell(self, what: str, changed: Sequence[str], way_out: str) -> None:
        if changed and what not in self._told:
            self._told.add(what)
            warn_user(
                f"{self._call}: a validation has changed {what} ({list_some(list(dict.fromkeys(changed)), 3)}), and "
                "that stays changed: if the training depends on it, it differs from a training without validation. "
                f"Way out: {way_out}"
            )


def _drawing_from(part: object) -> list[object]:
    """Return the generators, and the functions that may hold some, of a part that may be a class of torch's own."""
    may_draw = (*random_state.GENERATORS, FunctionType)
    return [each for each in getattr(part, "__dict__", {}).values() if isinstance(each, may_draw)]


def _counts_of(parts: Iterable[object]) -> list[dict[str, Any]]:
    """Return the numbers and texts that the user's data sets and samplers among a loader's parts hold."""
    users = [each for each in parts if type(each).__module__.partition(".")[0] not in ("torch", "memkit")]
    return [plain_attributes(each, with_saving=True) for each in users]


def _with_states(roots: Iterable[nn.Module]) -> set[int]:
    """Return the ids of modules that save a state of their own, of torch's modules, and of all that the former hold."""
    modules = {each for root in roots for each in root.modules()}
    own = [each for each in modules if any(getattr(type(each), name) is not default for name, default in _OWN)]
    of_torch = [each for each in modules if type(each).__module__.startswith("torch.")]
    return {*Attributes(own).ids(), *map(id, of_torch)}


def _members(modules: Iterable[nn.Module]) -> set[int]:
    """Return the ids of the dicts in which modules keep parameters, buffers and children."""
    return {id(each) for module in modules for name, each in vars(module).items() if name in STATE}


def _holders(held: Attributes, known: Sequence[object], ids_of_known: set[int]) -> list[object]:
    """Return what holds tensors, without objects that are known, children of known modules, and these ids."""
    ids = {id(each) for module in known if isinstance(module, nn.Module) for each in module.modules()}
    ids |= ids_of_known.union(map(id, known))
    return [each for each in held.holders() if id(each) not in ids]


def _tensors_of(holder: object) -> dict[str, Tensor]:
    found = {name: each for name, each in attributes_of(holder).items() if isinstance(each, Tensor)}
    if isinstance(holder, nn.Module):
        found |= dict(holder.named_parameters(recurse=False)) | dict(holder.named_buffers(recurse=False))
    return found
