"""The objects of a training run: capture each one's state, check that a state fits, and restore it.

All states are compared with their objects before any object is changed. A model accepts values of a narrower dtype,
which is exact; every other dtype change is refused. An optimizer restores the hyperparameters that were saved, as in
PyTorch.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from memkit._core.attributes import attributes_of
from memkit._core.errors import FileFormatError, InputTypeError, warn_user
from memkit._core.printable import list_some
from memkit._core.protocols import Composed, Stateful
from memkit._recorder.attributes import Attributes
from memkit._recovery.attempt import Done, Failed, unless_failed
from memkit._torch.modules import loads_as_torch_does
from memkit._torch.optimizers import own_attributes
from memkit._torch.pytree import tree_leaves
from memkit._torch.tensors import has_storage, storage_key
from memkit.recipes.state.plain import Flattener
from memkit.train.gradients import set_gradient
from memkit.train.models import unwrap_model

_GRADIENTS = "memkit gradients"
_NO_SUM: Final = {"count": 0.0, "num_microbatches": 0, "factor": None, "gradients": None}  # in an accumulator's state
# Entries that PyTorch's optimizers add themselves to a group from an older version.
_FILLED: Final = frozenset(
    {"amsgrad", "capturable", "decoupled_weight_decay", "differentiable", "foreach", "fused", "maximize", "nesterov"}
)
_EXACT: Final = {
    torch.float32: {torch.float16, torch.bfloat16},
    torch.float64: {torch.float16, torch.bfloat16, torch.float32},
    torch.complex128: {torch.complex64},
}

Parameters = Mapping[int, Sequence[str]]  # the names of a parameter, by its id


def check_objects(call: str, objects: Mapping[str, Any]) -> dict[str, Stateful]:
    """Return the objects, with models unwrapped, so that a state fits with and without wrappers.

    Raises:
        InputTypeError: An object has no state.
    """
    for name, value in objects.items():
        if not isinstance(value, Stateful) or isinstance(value, type):
            raise InputTypeError(
                f"TrainingStateManager.{call}({name}=...)",
                got=f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__,
                expected="objects with state_dict() and load_state_dict(state)",
                fix=_way_out(call, name, value),
            )
    return {name: unwrap_model(each) if isinstance(each, nn.Module) else each for name, each in objects.items()}


def _way_out(call: str, name: str, value: object) -> str:
    """Return the way out for an object without a state."""
    if isinstance(value, Mapping):
        return f"write {call}(..., {name}={name}), the object itself instead of its state_dict()."
    if isinstance(value, type):
        return f"pass the {value.__name__} that trains, an object of this class."
    if isinstance(value, DataLoader):
        return f"write {call}(..., {name}=loader), with loader = mk.recipes.ResumableLoader(...) around the DataLoader."
    if isinstance(value, (int, float)):
        return "write save(step, ...) for a step, save(step, metric=value, ...) for a figure of the model."
    return f"write a class for {name} with state_dict() and load_state_dict(state)."


def find_replicated(objects: Mapping[str, Any]) -> set[str]:
    """Return names of objects of which one rank's state is that of all.

    They are models in DDP, optimizers of only those, and those that have gathered their state, see `gather_divided`.
    """
    models = {name: each for name, each in objects.items() if isinstance(each, nn.parallel.DistributedDataParallel)}
    own = {parameter for model in models.values() for parameter in model.parameters()}
    optimizers = {name for name, each in objects.items() if isinstance(each, Optimizer) and own.issuperset(_list(each))}
    return {*models, *optimizers, *(name for name, each in objects.items() if _is_divided(each))}


def gather_divided(objects: Mapping[str, Any]) -> None:
    """Let optimizers that divide their state over the ranks gather it on rank 0; all ranks must call it.

    A ZeroRedundancyOptimizer's ``state_dict`` is otherwise that of the last time, or an error.
    """
    for each in filter(_is_divided, objects.values()):
        each.consolidate_state_dict(to=0)


def _is_divided(target: object) -> bool:
    return isinstance(target, Optimizer) and hasattr(target, "consolidate_state_dict")


def saved_state_of(target: Stateful) -> Mapping[str, Any]:
    """Return an object's state; for an optimizer including existing gradients, which its next step depends on."""
    state = target.state_dict()
    if isinstance(target, Optimizer):
        gradients = [parameter.grad for parameter in _list(target)]
        if any(gradient is not None for gradient in gradients):
            return {**state, _GRADIENTS: gradients}
    return state


def tell_of_unsaved(call: str, targets: Mapping[str, Stateful], states: Mapping[str, Any]) -> bool:
    """Warn of what the objects train with and no state has; whether it did."""
    # A model's own values do not count: slow weights are equal to them from time to time.
    saved = tree_leaves({name: state for name, state in states.items() if not isinstance(targets[name], nn.Module)})
    has_told = [
        _tell_of_others(call, targets),
        _tell_of_parameters(call, targets, states),
        *(
            _tell_of_attributes(call, name, each, saved)
            for name, each in targets.items()
            if isinstance(each, Optimizer)
        ),
    ]
    return any(has_told)


def _tell_of_others(call: str, targets: Mapping[str, Stateful]) -> bool:
    """Warn of objects that one of these steps and that are not saved, such as a wrapper's schedule; whether it did.

    A model that is not saved here is known to be saved elsewhere, and what an object of the user's holds by that.
    """
    modules = [module for each in targets.values() if isinstance(each, nn.Module) for module in each.modules()]
    rest = [each for each in targets.values() if not isinstance(each, (nn.Module, Optimizer, Composed))]
    saved = {*map(id, targets.values()), *map(id, modules), *Attributes(rest).ids()}
    for name, target in targets.items():
        if not isinstance(target, Composed):
            continue
        others, call_of_all = target.__saved_together__()
        bare = {key: unwrap_model(each) if isinstance(each, nn.Module) else each for key, each in others.items()}
        unsaved = [key for key, each in bare.items() if id(each) not in saved]
        if set(unsaved) - {"model"}:
            warn_user(
                f"{call}: {name}, a {type(target).__name__}, steps what its own state leaves out and no other object "
                f"saves ({list_some(unsaved, 4)}): a resumed run begins with it anew. Way out: write "
                f"{call_of_all}."
            )
            return True
    return False


def _tell_of_parameters(call: str, targets: Mapping[str, Stateful], states: Mapping[str, Any]) -> bool:
    """Warn of parameters that an optimizer trains and no other object saves, such as a criterion's; whether it did.

    Where no model is saved here, they are known to be saved elsewhere.
    """
    known = {id(each) for target in targets.values() if isinstance(target, nn.Module) for each in target.parameters()}
    if not known:
        return False
    saved = tree_leaves({name: state for name, state in states.items() if not isinstance(targets[name], Optimizer)})
    storages = {storage_key(leaf.untyped_storage()) for leaf in saved if has_storage(leaf)}
    for name, target in targets.items():
        unsaved = [
            str(tuple(each.shape))
            for each in (_list(target) if isinstance(target, Optimizer) else ())
            if each.requires_grad and id(each) not in known
            if not (has_storage(each) and (storage_key(each.untyped_storage()) in storages or _is_copied(each, saved)))
        ]
        if unsaved:
            warn_user(
                f"{call}: {name} trains parameters that no saved object has, of the shapes "
                f"{list_some(unsaved, 3)}: a resumed run begins with them anew. Way out: save and restore the module "
                "that has them too (for a tensor alone, torch.nn.ParameterList([log_alpha]), log_alpha being a "
                "Parameter), MemoryEfficientTrainLoop(..., objects={'criterion': criterion}), or in a loop of your own "
                "state.save(step, model=model, criterion=criterion, optimizer=optimizer)."
            )
            return True
    return False


def _tell_of_attributes(call: str, name: str, optimizer: Optimizer, saved: Sequence[object]) -> bool:
    """Warn of tensors like its parameters, such as slow weights, that an optimizer has in attributes alone."""
    if type(optimizer).__module__.startswith("torch."):
        return False
    parameters = _list(optimizer)
    shapes = {each.shape for each in parameters if each.numel() > 1}  # others are a rate or a count
    there = [*saved, *parameters, *(each.grad for each in parameters)]
    storages = {storage_key(each.untyped_storage()) for each in there if has_storage(each)}
    unsaved = [
        f"{type(optimizer).__name__}.{attribute}"
        for attribute, value in own_attributes(attributes_of(optimizer)).items()
        if any(
            each.shape in shapes
            and each.is_floating_point()
            and storage_key(each.untyped_storage()) not in storages
            and not _is_copied(each, saved)
            for each in tree_leaves(dict(value.state) if isinstance(value, Optimizer) else value)
            if has_storage(each)
        )
    ]
    if unsaved:
        warn_user(
            f"{call}: {name} keeps tensors of the shapes of its parameters ({list_some(unsaved, 3)}) that its "
            "state_dict() does not have: a resumed run begins with them anew. If a later step reads them, as slow "
            "weights, it differs. Way out: keep them in the optimizer's state, self.state[p]['slow'] = p.clone()."
        )
    return bool(unsaved)


def _is_copied(parameter: Tensor, saved: Sequence[object]) -> bool:
    """Whether a parameter's values are saved: in a tensor, or as numbers, those of `.item()` or `.tolist()`."""
    values = parameter.detach().cpu().flatten()
    tensors = [each for each in saved if has_storage(each) and each.numel() == len(values)]
    if any(each.cpu().flatten().equal(values) for each in tensors):
        return True
    numbers = [each for each in saved if type(each) is float]
    return len(values) <= len(numbers) and set(values.tolist()) <= set(numbers)


def own_part(target: Stateful) -> dict[str, Any] | None:
    """Return the rank-specific part of an object in `find_replicated`: an optimizer's gradients before its step."""
    return {_GRADIENTS: [parameter.grad for parameter in _list(target)]} if isinstance(target, Optimizer) else None


def with_own_parts(shared: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return rank 0's states, replaced by this rank's own states, or merged with its own parts."""
    merged = dict(shared)
    for name, state in own.items():
        is_part = isinstance(state, dict) and state.keys() == {_GRADIENTS}
        merged[name] = {**shared[name], **state} if is_part else state
    return merged


def without_pending(state: Any) -> Any:
    """Return the state of an optimizer, an accumulator or a wrapper without gradients that wait for their step.

    It is the same object if it has none.
    """
    if not isinstance(state, dict):
        return state
    if state.keys() >= _NO_SUM.keys():
        is_pending = state["num_microbatches"] or state["gradients"] is not None
        return {**state, **_NO_SUM} if is_pending else state
    inner = state.get("accumulator")
    if isinstance(inner, dict):
        rest = without_pending(inner)
        return state if rest is inner else {**state, "accumulator": rest}
    return {key: each for key, each in state.items() if key != _GRADIENTS} if _GRADIENTS in state else state


# ---- a state's description of its object


def name_parameters(targets: Mapping[str, Stateful]) -> Parameters:
    """Return the names that parameters have in the models among the objects."""
    names: dict[int, list[str]] = {}
    for name, target in targets.items():
        if isinstance(target, nn.Module):
            for its_name, parameter in target.named_parameters(remove_duplicate=False):
                names.setdefault(id(parameter), []).append(f"{name}.{its_name}")
    return names


def describe_object(target: Stateful, names: Parameters) -> dict[str, Any]:
    """Return the plain values that must match when a state is restored."""
    about: dict[str, Any] = {"kind": [type(target).__module__, type(target).__qualname__]}
    if isinstance(target, Optimizer):
        about["parameters"] = [
            {
                "names": list(names.get(id(each), ())),
                "shape": each.shape,
                "dtype": each.dtype,
                "is_sharded": _is_sharded(each),
            }
            for each in _list(target)
        ]
    return about


def check_fits(
    name: str, target: Stateful, state: Mapping[str, Any], about: Mapping[str, Any], names: Parameters
) -> list[str]:
    """Compare a state with the object that is to receive it; nothing is changed.

    Args:
        name: The object's name.
        target: The object.
        state: Its saved state.
        about: The result of `describe_object` for the saved object.
        names: The current names of the parameters.

    Returns:
        Remarks about differences that do not prevent the restore.

    Raises:
        FileFormatError: The state belongs to a different object.
    """
    if isinstance(target, nn.Module):
        return _check_model(name, target, state)
    remarks = _check_kind(name, target, about["kind"])
    if isinstance(target, Optimizer):
        _check_parameters(name, target, about["parameters"], names)
        _check_optimizer(name, target, state, is_other=bool(remarks))
    elif isinstance(target, (LRScheduler, torch.amp.GradScaler)):
        _check_entries(name, target, state, target.state_dict(), "")
    return remarks


def _check_kind(name: str, target: Stateful, kind: Sequence[str]) -> list[str]:
    module, qualified_name = kind
    own = type(target)
    if own.__qualname__ == qualified_name:
        return []
    if own.__module__.startswith("torch.") and module.startswith("torch."):
        _refuse(name, f"the state of a {qualified_name}", f"that of a {own.__qualname__}")
    return [f"{name} was a {qualified_name} when it was saved, now it is a {own.__qualname__}"]


def _check_model(name: str, model: nn.Module, state: Mapping[str, Any]) -> list[str]:
    live, own = model.state_dict(), type(model).__name__
    pairs = [(key, value, state[key]) for key, value in live.items() if key in state and _is_value(value)]
    if is_stock(model):  # otherwise its own `load_state_dict` decides which names and shapes it accepts
        problems = [f"no {key}" for key in live if key not in state]
        problems += [f"{key}, which the model does not have" for key in state if key not in live]
        problems += [
            f"size mismatch for {key}: {_shape(saved)}, here {_shape(value)}"
            for key, value, saved in pairs
            if _shape(saved) != _shape(value)
        ]
        if problems:
            _refuse(
                name,
                f"a state that {own}.load_state_dict refuses: {list_some(problems, 4)}",
                f"the state of this {own}",
            )
    problems = [f"values for {key}, which is on meta" for key, value, _ in pairs if value.is_meta]
    problems += [f"{key} {_how(saved)}, here {_how(its)}" for key, its, saved in pairs if _how(saved) != _how(its)]
    problems += [
        f"{key} in {saved.dtype}, here {value.dtype}"
        for key, value, saved in pairs
        if _is_value(saved) and saved.dtype not in {value.dtype, *_EXACT.get(value.dtype, ())}
    ]
    if problems:
        _refuse(name, list_some(problems, 4), "values that this model can hold, in the same dtype or a narrower one")
    widened = {(saved.dtype, value.dtype) for _, value, saved in pairs if _is_value(saved)}
    return [f"{name} holds values in {own} that were saved in {saved}" for saved, own in widened if saved != own]


def _is_value(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not is_lazy(value)


def _is_sharded(value: object) -> bool:
    return hasattr(value, "device_mesh")


def _how(value: object) -> str:
    return "sharded" if _is_sharded(value) else "whole"


def _shape(value: object) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def is_stock(model: nn.Module) -> bool:
    """Whether a model loads states like PyTorch's own modules: a state fits if its names and shapes match."""
    return all(
        type(module).load_state_dict is nn.Module.load_state_dict and loads_as_torch_does(module)
        for module in model.modules()
    )


def _check_parameters(name: str, optimizer: Optimizer, saved: Sequence[Mapping[str, Any]], names: Parameters) -> None:
    live = _list(optimizer)
    if len(saved) != len(live):
        own = type(optimizer).__name__
        _refuse(name, f"a state that {own}.load_state_dict refuses: of {len(saved)} parameters", f"that of {len(live)}")
    problems = []
    for index, (parameter, its) in enumerate(zip(live, saved, strict=True)):
        own_names, its_names = names.get(id(parameter), ()), its["names"]
        if own_names and its_names and not set(own_names) & set(its_names):
            problems.append(f"{its_names[0]} as parameter {index}, which is {own_names[0]} now")
        elif its["shape"] != parameter.shape:
            problems.append(f"parameter {index} of shape {tuple(its['shape'])}, here {tuple(parameter.shape)}")
        elif its["dtype"] != parameter.dtype:
            problems.append(f"parameter {index} in {its['dtype']}, here {parameter.dtype}")
        elif its["is_sharded"] != _is_sharded(parameter):
            problems.append(f"parameter {index} {_how(parameter)}, unlike when it was saved")
    if problems:
        _refuse(name, list_some(problems, 4), "the same parameters in the same order, of the same shapes and dtypes")


def _check_optimizer(name: str, optimizer: Optimizer, state: Mapping[str, Any], *, is_other: bool) -> None:
    groups, values, parameters = state["param_groups"], state["state"], _list(optimizer)
    sizes, own_sizes = ([len(group["params"]) for group in each] for each in (groups, optimizer.param_groups))
    if sizes != own_sizes:
        own = type(optimizer).__name__
        _refuse(name, f"a state that {own}.load_state_dict refuses: groups of {sizes}", f"groups of {own_sizes}")
    missing = sorted({key for group in groups for key in optimizer.defaults.keys() - group.keys() - _FILLED})
    if missing:
        _refuse(name, f"groups without {list_some(missing, 4)}", f"those of a {type(optimizer).__name__}")
    numbers, own_values = list(range(len(parameters))), _by_parameter(values)
    if [index for group in groups for index in group["params"]] != numbers or not own_values.keys() <= set(numbers):
        _refuse(name, "state for unknown parameter numbers", f"state for {len(parameters)} parameters, by number")
    kept = next((set(each) for each in optimizer.state.values() if isinstance(each, dict) and each), None)
    theirs = next((set(each) for each in own_values.values() if each), None)
    if is_other and kept is not None and theirs is not None and kept != theirs:
        _refuse(name, f"the values {list_some(sorted(theirs), 4)} for each parameter", f"{list_some(sorted(kept), 4)}")
    gradients = state.get(_GRADIENTS)
    if gradients is not None and (
        len(gradients) != len(parameters)
        or any(each is not None and each.shape != its.shape for each, its in zip(gradients, parameters, strict=True))
    ):
        _refuse(name, "gradients of different shapes", "the shapes of its parameters")


def _check_entries(name: str, target: Stateful, saved: object, live: object, place: str) -> None:
    """Compare the entries of a scaler or a schedule, including nested schedules."""
    if not isinstance(live, Mapping):
        return
    kind = f"a {type(target).__name__} with the same arguments"
    if not isinstance(saved, Mapping):
        _refuse(name, f"no entries{place}", f"the state of {kind}")
    if missing := sorted(live.keys() - saved.keys()):
        _refuse(name, f"no {list_some(missing, 4)}{place}", f"the state of {kind}")
    if saved and not live:
        _refuse(name, f"{list_some(sorted(saved), 4)}{place}", f"no entries, as in {kind}")
    for key in ("base_lrs", "_schedulers"):
        theirs, own = saved.get(key), live.get(key)
        if isinstance(own, list):
            if not isinstance(theirs, list) or len(theirs) != len(own):
                _refuse(name, f"a different number of {key}{place}", str(len(own)))
            for its, each in zip(theirs, own, strict=True):
                _check_entries(name, target, its, each, f"{place} in {key}")


# ---- restoring a state


def is_checked(target: Stateful) -> bool:
    """Whether `check_fits` covers everything the object's `load_state_dict` checks, so that loading cannot fail."""
    if isinstance(target, nn.Module):
        return is_stock(target)
    if isinstance(target, Optimizer):
        return type(target).load_state_dict is Optimizer.load_state_dict
    return isinstance(target, (LRScheduler, torch.amp.GradScaler))


def keep_copy(target: Stateful, name: str) -> Mapping[str, Any] | None:
    """Return a copy of an object's state, in host memory if possible; None for an object that has none now."""
    try:
        state = saved_state_of(target)
        try:
            copied = Flattener(copy=True)
            plain: Mapping[str, Any] = copied.plain(state, name)
        except InputTypeError:
            return copy.deepcopy(state)
        return copy.deepcopy(state) if copied.sharded else plain
    except Exception:  # noqa: BLE001 - foreign code, which may refuse to return a state before it has started
        return None


def load_into(target: Stateful, state: Mapping[str, Any], name: str) -> None:
    """Restore a state; values are copied into existing tensors, so that no device holds them twice.

    Raises:
        FileFormatError: The state belongs to another kind of object.
    """
    kinds = (RuntimeError, ValueError, LookupError, TypeError, AttributeError, AssertionError)
    outcome: Done[Any] | Failed
    if isinstance(target, Optimizer):
        outcome = unless_failed(kinds, _load_optimizer, target, dict(state))
    else:
        outcome = unless_failed(kinds, target.load_state_dict, state)
    if isinstance(outcome, Failed):
        if isinstance(outcome.error, FileFormatError):
            raise outcome.error
        raise FileFormatError(
            f"TrainingStateManager.restore({name}=...)",
            got=f"a state that {type(target).__name__}.load_state_dict refuses: {outcome.error}",
            expected="the state of an object that was created with the same arguments",
            fix=f"create {name} with the same arguments as when it was saved, or leave it out.",
        ) from outcome.error


def _load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    gradients = state.pop(_GRADIENTS, None)
    # Twice: first without values, which compares the groups and frees the existing values.
    optimizer.load_state_dict({"state": {}, "param_groups": state["param_groups"]})
    optimizer.load_state_dict(state)
    parameters = _list(optimizer)
    for index, saved in _by_parameter(state["state"]).items():
        live = optimizer.state[parameters[index]]
        for key, value in saved.items():  # torch casts to the parameter's dtype: bfloat16 would lose float32 state
            if isinstance(value, torch.Tensor) and live[key].dtype != value.dtype:
                live[key] = value.to(live[key].device)
    for parameter, gradient in zip(parameters, gradients or [None] * len(parameters), strict=True):
        set_gradient(parameter, None if gradient is None else gradient.to(parameter.device))


def _by_parameter(values: Mapping[Any, Any]) -> dict[int, dict[str, Any]]:
    """Return an optimizer's per-parameter values, by index; some optimizers keep others under names of their own."""
    return {index: each for index, each in values.items() if isinstance(index, int) and isinstance(each, dict)}


def _list(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return an optimizer's parameters, in the order of the indices in its state."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _refuse(name: str, got: str, expected: str) -> NoReturn:
    raise FileFormatError(
        f"TrainingStateManager.restore({name}=...)",
        got=got,
        expected=f"{expected}; no object was changed",
        fix=f"create {name} with the same arguments as when it was saved, or leave it out.",
    )
