"""Checks of the wrapper's settings: each error ends with the corrected call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from memkit._core.errors import ConfigError, InputTypeError
from memkit._core.protocols import Scheduler
from memkit._core.settings import Checker, nearest_word
from memkit._core.words import ForeignWords, refuse_call
from memkit.train.checks import WRAPPER, check_norm
from memkit.train.words import WRAPPER_WORDS

_KIND = WRAPPER.kind
_OF_CONFIG, _PRESETS = ("gradient_accumulation_steps", "precision", "checkpointing"), ("low", "medium", "high")


def check_settings(
    accumulation_steps: object,
    on_oom: object,
    memory: object,
    average: object,
    split_fn: object,
    max_grad_norm: object,
) -> None:
    """Check the settings of `MemoryEfficientTrainingWrapper`."""
    check = Checker(_KIND)
    check.whole("accumulation_steps", accumulation_steps, 1)
    fix = "pass on_oom='exact'; or 'inexact' for splits that change the gradient, 'raise' for no recovery."
    check.choice("on_oom", on_oom, ("exact", "inexact", "raise"), fix=fix)
    check_norm(max_grad_norm, call=_KIND)
    if average is not None and (isinstance(average, type) or not callable(getattr(average, "update_parameters", None))):
        raise InputTypeError(
            f"{_KIND}(average=...)",
            got=f"the class {average.__name__}" if isinstance(average, type) else f"a {type(average).__name__}",
            expected="a running average with a method update_parameters(model)",
            fix="pass average=torch.optim.swa_utils.AveragedModel(model).",
        )
    is_size = isinstance(memory, int | str | float) and not isinstance(memory, bool)
    is_watch = callable(getattr(memory, "available_bytes", None)) and not isinstance(memory, type)
    if memory is not None and not is_size and not is_watch:
        raise check.refusal(
            "memory",
            memory,
            "a MemoryManager, or a budget: bytes, text such as '22GiB', or a fraction in (0, 1]",
            fix="pass memory=mk.MemoryManager()." if isinstance(memory, type) else "pass memory='22GiB'.",
        )
    if split_fn is not None:
        check.function("split_fn", split_fn)


def list_schedules(scheduler: Scheduler | Sequence[Scheduler] | None) -> list[Scheduler]:
    """Return the schedules as a list; each must step without a metric."""
    if scheduler is None:
        return []
    schedules: list[Any] = list(scheduler) if isinstance(scheduler, list | tuple) else [scheduler]
    for each in schedules:
        if isinstance(each, ReduceLROnPlateau):
            raise ConfigError(
                f"{_KIND}(scheduler=...)",
                got="ReduceLROnPlateau, which steps with a metric",
                expected="a schedule that steps without one, after each optimizer step",
                fix="write scheduler.step(metric) after each validation of a loop of your own, or pass it to memkit's, "
                "MemoryEfficientTrainLoop(..., plateau=scheduler).",
            )
        if isinstance(each, type) or not callable(getattr(each, "step", None)):
            raise InputTypeError(
                f"{_KIND}(scheduler=...)",
                got=f"the class {each.__name__}" if isinstance(each, type) else f"a {type(each).__name__}",
                expected="a schedule with a method step(), or a list of such schedules",
                fix="pass scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000).",
            )
    return schedules


def check_on_gradients(on_gradients: object) -> None:
    """Check that a hook can be called with the model."""
    if on_gradients is None:
        return
    right = "on_gradients=lambda model: print([p.grad.norm() for p in model.parameters() if p.grad is not None])"
    if not callable(on_gradients):
        raise InputTypeError(
            f"{_KIND}(on_gradients=...)",
            got=f"a {type(on_gradients).__name__}",
            expected="a function that is called with the model before each step",
            fix=f"pass {right}.",
        )
    try:
        inspect.signature(on_gradients).bind(None)
    except TypeError as error:
        raise InputTypeError(
            f"{_KIND}(on_gradients=...)",
            got=f"a function that cannot be called with the model alone ({error})",
            expected="on_gradients(model)",
            fix=f"pass {right}.",
        ) from None
    except ValueError:  # a function in C without a signature
        return


def check_config(config: object, constructor: Callable[..., None]) -> None:
    """Check that a config has the entries that `MemoryEfficientTrainingWrapper.from_config` reads."""
    if not all(hasattr(config, name) for name in _OF_CONFIG):
        raise InputTypeError(
            f"{_KIND}.from_config(model, optimizer, config)",
            got=f"the text {config!r}" if isinstance(config, str) else f"a {type(config).__name__}",
            expected="a config, as returned by mk.get_preset_config",
            fix=_way_to_configure(config, constructor),
        )


def _way_to_configure(config: object, constructor: Callable[..., None]) -> str:
    """Return the corrected call for a name of a preset, for a config's entries, or for settings in a dict."""
    preset = config.get("preset", "") if isinstance(config, Mapping) else config
    made = "mk.get_preset_config('medium', 24)"
    if isinstance(config, Mapping) and all(name in config for name in _OF_CONFIG):
        made = "mk.predict.TrainingConfig(**config)"
    elif isinstance(preset, str) and preset:
        made = f"mk.get_preset_config({(nearest_word(preset, _PRESETS) or 'medium')!r})"
    elif isinstance(config, Mapping):
        settings = {str(name): value for name, value in config.items()}
        words = ForeignWords(WRAPPER_WORDS)
        own, model, optimizer = object(), object(), object()  # placeholders for the first three arguments
        try:
            refuse_call(constructor, _KIND, (own, model, optimizer), settings, words, is_method=True)
        except InputTypeError as error:
            return error.fix
        return f"write {_KIND}(model, optimizer, **config)"
    return f"write {_KIND}.from_config(model, optimizer, {made})."
