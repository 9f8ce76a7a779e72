"""Other libraries' training loops: the state that they keep besides the model, and how to validate them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from memkit._core.attributes import attributes_of
from memkit._core.errors import FileFormatError, InputTypeError
from memkit.train.models import unwrap_model

_VERSION = 1
# The names that improved-diffusion, guided-diffusion and consistency_models give to values that change in training.
_NUMBERS = ("step", "global_step", "lg_loss_scale")
_TENSORS = ("master_params", "ema_params", "target_model_master_params")
_NUMERIC = (bool, int, float, np.number)
_STATEFUL = (
    "model",
    "opt",
    "optimizer",
    "scheduler",
    "scaler",
    "residual_connection_net",
    "target_model",
    "schedule_sampler",
    "data",
)


class Counters:
    """The numbers and tensors of a foreign loop that change during training, as one object with a state.

    Those of its ``schedule_sampler`` are among them: the losses by which timesteps are drawn, and weighted.

    Some loops count a step in ``run_step``, others after it. A state is captured right after ``run_step`` and must hold
    the number with which the loop begins the next step; `note_begin` and `note_end` find out which kind of loop it is.

    Args:
        loop: The loop.
    """

    def __init__(self, loop: object) -> None:
        self._loop = loop
        self._at_begin = self._at_end = getattr(loop, "step", None)
        self._numbers_before = _numbers_of(self._sampler)
        self._is_open = False
        self._counts_outside: bool | None = None  # unknown before the first step

    def note_begin(self) -> None:
        """Call this right before ``run_step``."""
        self._at_begin = getattr(self._loop, "step", None)
        if self._is_open:
            self._counts_outside = self._at_begin != self._at_end

    def note_end(self) -> None:
        """Call this right after ``run_step``."""
        self._at_end = getattr(self._loop, "step", None)
        if self._counts_outside is None:
            self._counts_outside = self._at_end == self._at_begin
        self._is_open = True

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers and tensors."""
        numbers = {
            f"{owner}{name}": getattr(each, name)
            for owner, each in self._owners()
            for name in _NUMBERS
            if name in vars(each)
        }
        if self._counts_outside and "step" in numbers and numbers["step"] == self._at_end:
            numbers["step"] += 1  # as the loop is about to do itself
        # Numbers that training leaves alone are settings, which a resumed run may choose anew.
        before, of_sampler = self._numbers_before, _numbers_of(self._sampler)
        sampler = {
            "numbers": {name: value for name, value in of_sampler.items() if before.get(name) != value},
            "arrays": {name: _copied(value) for name, value in _arrays_of(self._sampler).items()},
        }
        return {"version": _VERSION, "numbers": numbers, "tensors": self._tensors(), "sampler": sampler}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the numbers, and copy the values into the existing tensors.

        Raises:
            FileFormatError: The state has another version, or comes from a loop with other tensors.
        """
        tensors, sampler = self._tensors(), state.get("sampler")  # earlier states have none
        arrays = {} if sampler is None else _arrays_of(self._sampler)
        saved = {} if sampler is None else sampler["arrays"]
        found = (state.get("version"), [tuple(each.shape) for each in (*state.get("tensors", ()), *saved.values())])
        shapes = [tuple(each.shape) for each in (*tensors, *arrays.values())]
        if found != (_VERSION, shapes) or saved.keys() != arrays.keys():
            raise FileFormatError(
                "create_enhanced_train_loop(state=...)",
                got=f"version {found[0]!r}, {_describe(found[1])} besides the model",
                expected=f"version {_VERSION}, {_describe(shapes)}",
                fix="create the loop with the same arguments as when the state was saved; a schedule_sampler whose "
                "arrays grow needs its own state_dict() and load_state_dict().",
            )
        owners = dict(self._owners())
        for name, value in state["numbers"].items():
            owner, _, attribute = name.rpartition(".")
            setattr(owners[f"{owner}." if owner else ""], attribute, value)
        with torch.no_grad():
            for tensor, value in zip(tensors, state["tensors"], strict=True):
                tensor.copy_(value)
            for name, array in arrays.items():
                array[...] = saved[name] if isinstance(array, Tensor) else saved[name].numpy()
        for name, value in ({} if sampler is None else sampler["numbers"]).items():
            setattr(self._sampler, name, value)
        self._is_open = False

    @property
    def _sampler(self) -> object:
        """The sampler of timesteps, unless it has a state of its own; None if there is none."""
        found = getattr(self._loop, "schedule_sampler", None)
        return None if _has_state(found) else found

    def _owners(self) -> list[tuple[str, Any]]:
        inner = getattr(self._loop, "mp_trainer", None)
        return [("", self._loop)] + ([("mp_trainer.", inner)] if inner is not None else [])

    def _tensors(self) -> list[Tensor]:
        """Return the tensors besides the models: averages, and master weights unless they are the model's own."""
        models = [each for each in vars(self._loop).values() if isinstance(each, nn.Module)]
        seen = {id(parameter) for model in models for parameter in model.parameters()}
        found: list[Tensor] = []
        todo = [getattr(each, name, None) for _, each in self._owners() for name in _TENSORS]
        while todo:
            each = todo.pop(0)
            if isinstance(each, list | tuple):
                todo = [*each, *todo]
            elif isinstance(each, Tensor) and id(each) not in seen:
                seen.add(id(each))
                found.append(each)
        return found


def _numbers_of(sampler: object) -> dict[str, Any]:
    numbers = {name: value for name, value in attributes_of(sampler).items() if isinstance(value, _NUMERIC)}
    return {name: value.item() if isinstance(value, np.generic) else value for name, value in numbers.items()}


def _arrays_of(sampler: object) -> dict[str, Any]:
    """Return a sampler's tensors, and its arrays of numbers that a tensor can hold and that may change."""
    return {name: value for name, value in attributes_of(sampler).items() if isinstance(value, Tensor) or _fits(value)}


def _fits(value: object) -> bool:
    if not isinstance(value, np.ndarray):
        return False
    return value.flags.writeable and value.dtype.kind in "biuf" and value.dtype.itemsize <= 8


def _copied(values: Any) -> Tensor:
    if isinstance(values, Tensor):
        return values.detach().clone()
    return torch.from_numpy(values.astype(values.dtype.newbyteorder("=")))


def _has_state(part: object) -> bool:
    return hasattr(part, "state_dict") and hasattr(part, "load_state_dict")


def _describe(shapes: list[tuple[int, ...]]) -> str:
    return f"{len(shapes)} tensors" + (f" of shapes {', '.join(map(str, shapes[:5]))}" if shapes else "")


def stateful_parts(loop: object) -> dict[str, Any]:
    """Return the parts of a loop that have a state, under the names that the loop gives them."""
    parts = {name: getattr(loop, name, None) for name in _STATEFUL}
    return {name: part for name, part in parts.items() if _has_state(part)}


def diffusion_losses(loop: Any) -> Callable[[nn.Module, Any], dict[str, Tensor]] | None:
    """Return a validation function from a diffusion loop's own losses and weights; None for other loops."""
    if not (hasattr(loop, "diffusion") and hasattr(loop, "schedule_sampler")):
        return None

    def losses_of(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        images, condition = images_and_condition(model, batch)
        times, weights = loop.schedule_sampler.sample(images.shape[0], images.device)
        losses = loop.diffusion.training_losses(model, images, times, model_kwargs=condition)["loss"]
        return {"loss": losses * weights}

    return losses_of


def images_and_condition(model: nn.Module, batch: Any) -> tuple[Tensor, Mapping[str, Any]]:
    """Split a diffusion loop's batch into images and the other model inputs, by name.

    A condition that is a tensor goes to the only argument that the model's forward has besides images and timesteps.

    Raises:
        InputTypeError: The batch is not such a pair, or more than one argument could take the condition.
    """
    if isinstance(batch, tuple | list) and len(batch) == 2:
        images, condition = batch
        names = _condition_names(model)
        if condition is None or isinstance(condition, Mapping):
            return images, condition or {}
        if isinstance(condition, Tensor) and len(names) == 1:
            return images, {names[0]: condition}
        taken = ", ".join(names) or "no condition"
        got = f"a condition that is a {type(condition).__name__}, for a model that takes {taken}"
    else:
        got = f"a batch that is a {type(batch).__name__}" + (
            f" of {len(batch)}" if isinstance(batch, list | tuple) else ""
        )
    raise InputTypeError(
        "create_enhanced_train_loop(val_dataloader=...)",
        got=got,
        expected="batches (images, condition), with a mapping from arguments of the model to tensors",
        fix="let the loader yield (images, {'y': labels}), or pass val_fn=..., which accepts any batch.",
    )


def _condition_names(model: nn.Module) -> list[str]:
    """The arguments of a diffusion model besides images and timesteps."""
    arguments = list(inspect.signature(unwrap_model(model).forward).parameters.values())[2:]
    return [each.name for each in arguments if each.kind not in {each.VAR_POSITIONAL, each.VAR_KEYWORD}]
