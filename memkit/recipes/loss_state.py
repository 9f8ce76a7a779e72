"""State that a loss function or a data set keeps: no saved state has it, and a validation must not change it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor, nn

from memkit._core.attributes import attributes_of
from memkit._core.errors import warn_user
from memkit._core.printable import list_some
from memkit._recorder.rehearsal import Attributes
from memkit._recovery.snapshot import HeldState
from memkit._torch.tensors import bit_sums
from memkit.recipes.order import reading_changes
from memkit.recipes.samplers import Samplers, held_apart

# By these a module saves what it likes.
_OWN = [(name, getattr(nn.Module, name)) for name in ("get_extra_state", "state_dict", "_save_to_state_dict")]


class UnsavedState:
    """What no state has, as it is now: tensors that a loss function holds, a data set's own generators, and numbers.

    The numbers are those in attributes of what the model, the loss function and the loader's ``collate_fn`` hold, and
    in variables that these functions assign to.

    Cost: a sum over the bits of the tensors, now and when they are compared.

    Args:
        model: The model.
        loss_fn: The loss function.
        data: The data set; None if there is none.
        samplers: The samplers of its loader.
        saved: Objects whose state is saved; the modules among them are left out, with their children.
    """

    def __init__(
        self, model: nn.Module, loss_fn: object, data: object, samplers: Samplers, saved: Iterable[object]
    ) -> None:
        self._model, saved = model, list(saved)
        self._numbers = held_apart([model, loss_fn, *samplers.collate_fns])
        self._saved = {id(each) for each in saved if not isinstance(each, nn.Module)}
        self._data, self._samplers = Attributes([data]), samplers
        samplers.note()
        self._holders = _holders(Attributes([loss_fn]), saved)
        self._before = dict(self._sums())

    def _sums(self) -> Iterator[tuple[tuple[int, str], list[int]]]:
        for number, holder in enumerate(self._holders):
            for name, each in _tensors_of(holder).items():
                yield (number, name), bit_sums([each])

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
                f"{call}: training has changed what loss_fn holds ({list_some(list(dict.fromkeys(changed)), 3)}), and "
                "that is not saved: a resumed run begins with it anew, and differs. Way out: write model.criterion = "
                "criterion before the trainer is made: its buffers and parameters are then saved as the model's."
            )
        if numbers := self._numbers.changed_numbers(self._saved | _with_states(self._model)):
            warn_user(
                f"{call}: training has changed what the model, loss_fn or collate_fn keeps ({list_some(numbers, 3)}), "
                "and that is not saved: a resumed run begins with it anew. If the training depends on it, as on a "
                "count of steps, it differs. Way out: keep it in a buffer of the model, "
                "self.register_buffer('count', torch.zeros(())), or save it by the model's get_extra_state() and "
                "set_extra_state(state); draw random numbers from a torch.Generator, which is saved."
            )
        if of_data:
            warn_user(f"{call}: {reading_changes(of_data)} Way out: compute it from seed, epoch and index.")
        if of_samplers := self._samplers.changed():
            warn_user(
                f"{call}: an epoch changes what a sampler of the loader keeps ({list_some(of_samplers, 3)}), and that "
                "is not saved: a resumed run begins with it anew, and its batches differ. Way out: draw the order from "
                "the epoch, in a sampler with set_epoch(epoch), which the loop calls, or from a torch.Generator that "
                "the sampler holds; or give it state_dict() and load_state_dict()."
            )
        if self._data.have_drawn():
            warn_user(
                f"{call}: the data set has drawn from a random generator of its own, and that is not saved: a resumed "
                "run begins with it anew, and its samples differ. Way out: draw by torch.rand, np.random or random, "
                "whose state is saved."
            )


@contextlib.contextmanager
def undone_in_loss(loss_fn: object, model: nn.Module) -> Iterator[None]:
    """Put back what the block changes in anything that a loss function holds, the buffers of the model excepted."""
    trained = {id(each) for each in model.parameters() if each.requires_grad}
    held = HeldState(loss_fn, content="saved", trained=trained, except_for=set(model.modules()))
    try:
        yield
    finally:
        held.restore()


def _with_states(model: nn.Module) -> set[int]:
    """Return the ids of modules that save a state of their own, of torch's modules, and of all that the former hold."""
    own = [each for each in model.modules() if any(getattr(type(each), name) is not default for name, default in _OWN)]
    of_torch = [each for each in model.modules() if type(each).__module__.startswith("torch.")]
    return set(map(id, [*Attributes(own).owners(), *of_torch]))


def _holders(held: Attributes, known: Iterable[object]) -> list[object]:
    """Return what holds tensors, without objects that are known, or children of known modules."""
    known = list(known)
    ids = {id(each) for module in known if isinstance(module, nn.Module) for each in module.modules()}
    ids |= set(map(id, known))
    return [each for each in held.holders() if id(each) not in ids]


def _tensors_of(holder: object) -> dict[str, Tensor]:
    found = {name: each for name, each in attributes_of(holder).items() if isinstance(each, Tensor)}
    if isinstance(holder, nn.Module):
        found |= dict(holder.named_parameters(recurse=False)) | dict(holder.named_buffers(recurse=False))
    return found
