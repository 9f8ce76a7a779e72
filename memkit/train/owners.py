"""Checks of the model and the optimizers over which a wrapper or an accumulator is built.

Objects passed by mistake (a trainer of another library, a class, the two swapped) are recognized by name, without
importing that library, and the error names the right call.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memkit._core.attributes import attributes_of
from memkit._core.errors import ConfigError, InputTypeError, StateError, warn_user
from memkit._core.settings import nearest_word
from memkit._gradients.closures import refuse_closure
from memkit._recovery.loss_key import parts_of_loss
from memkit.train.backward_steps import steps_in_backward
from memkit.train.checks import ACCUMULATOR, WRAPPER, Caller

# By library and class: a description of the object, and the way out. Subclasses count too.
_TRAINERS = {
    ("transformers", "Trainer"): (
        "a Hugging Face Trainer, which runs steps of its own",
        (
            "from memkit.integrations.transformers import MemoryEfficientTrainer; "
            "trainer = MemoryEfficientTrainer(model=model, args=args, train_dataset=dataset)."
        ),
    ),
    ("lightning", "Trainer"): (
        "a Lightning Trainer, which runs steps of its own",
        (
            "derive your module from memkit.integrations.lightning.MemoryEfficientModule instead of LightningModule, "
            "and write trainer.fit(module)."
        ),
    ),
    ("lightning", "Fabric"): (
        "a Fabric, which is not a model",
        (
            "from memkit.integrations.fabric import FabricSplitLoss; model, optimizer = fabric.setup(model, "
            "optimizer); split = FabricSplitLoss(model); fabric.backward(split(batch, loss_fn))."
        ),
    ),
    ("accelerate", "Accelerator"): (
        "an Accelerator, which is not a model",
        (
            "write model, optimizer = accelerator.prepare(model, optimizer); then "
            "MemoryEfficientTrainingWrapper(model, optimizer)."
        ),
    ),
    ("deepspeed", "DeepSpeedEngine"): (
        "a DeepSpeed engine, which runs backward and step itself",
        (
            "shard the plain model with torch.distributed.fsdp.fully_shard(model); then "
            "MemoryEfficientTrainingWrapper(model, optimizer)."
        ),
    ),
    ("memkit", "MemoryEfficientTrainingWrapper"): (
        "a MemoryEfficientTrainingWrapper, which is one already",
        "write trainer.train_step(batch, loss_fn); its model is trainer.model.",
    ),
    ("memkit", "MemoryEfficientTrainLoop"): (
        "a MemoryEfficientTrainLoop, which has a wrapper of its own",
        "write loop.run(num_epochs=1); its model is loop.trainer.model.",
    ),
}
_MODULES = {
    ("lightning", "LightningModule"): (
        "a LightningModule, whose optimizer Lightning makes",
        (
            "derive it from memkit.integrations.lightning.MemoryEfficientModule instead of LightningModule, and write "
            "trainer.fit(module); in a loop of your own write MemoryEfficientTrainingWrapper(module, optimizer)."
        ),
    )
}
_EXPECTED = "an nn.Module as the model"
_AS_MODEL = (
    "make it the model: {name} = torch.nn.Parameter(...); "
    f"{WRAPPER.kind}(torch.nn.ParameterList([{{name}}]), Adam([{{name}}]))"
)
_EXPECTED_OPTIMIZER = "a torch optimizer or a list of them"
_LIBRARIES = {"pytorch_lightning": "lightning", "lightning_fabric": "lightning"}


def library_kind(thing: object, known: Mapping[tuple[str, str], Any]) -> tuple[str, str] | None:
    """Return the known library and class of an object, or of one of its base classes; None if it is unknown."""
    for each in type(thing).__mro__:
        library = each.__module__.partition(".")[0]
        kind = _LIBRARIES.get(library, library), each.__name__
        if kind in known:
            return kind
    return None


def read_model(model: object, optimizer: object) -> nn.Module:
    """Return the wrapper's model; refuse anything else, and parameters without data.

    Raises:
        InputTypeError: It is not a module, or a trainer of another library.
        StateError: A parameter or a buffer is on the meta device.
    """
    refuse_trainer(model)
    call = f"{WRAPPER.kind}(model, optimizer)"
    if not isinstance(model, nn.Module):
        got, fix = _describe_non_model(model, optimizer)
        raise InputTypeError(call, got=got, expected=_EXPECTED, fix=fix)
    _check_has_data(model, call)
    return model


def warn_of_unused_step(model: nn.Module, loss_fn: object) -> None:
    """Warn of a LightningModule whose ``training_step`` the loss function does not call: its code does not name it."""
    if library_kind(model, _MODULES) is None:
        return
    lines, _, _ = parts_of_loss(loss_fn)
    codes = [each for each in (*lines, getattr(type(loss_fn).__call__, "__code__", None)) if isinstance(each, CodeType)]
    for code in codes:  # which grows by the functions inside
        if "training_step" in code.co_names:
            return
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
    warn_user(
        f"{WRAPPER.kind}: the model is a LightningModule, of which the wrapper uses only what loss_fn calls: "
        "training_step, configure_optimizers and the hooks are not called. For training by a Lightning Trainer derive "
        "it from memkit.integrations.lightning.MemoryEfficientModule instead; in a loop of your own write "
        "loss_fn = lambda model, batch: model.training_step(batch, 0)."
    )


def refuse_trainer(
    thing: object,
    *,
    has_optimizer: bool = True,
    call: str = f"{WRAPPER.kind}(model, optimizer)",
    expected: str = _EXPECTED,
) -> None:
    """Refuse a trainer of another library, and a LightningModule that came without an optimizer.

    Args:
        thing: The object that was passed.
        has_optimizer: Whether an optimizer came with it.
        call: The user's call, for the message.
        expected: The object that should have been passed, for the message.

    Raises:
        InputTypeError: It is one; the message names its adapter.
    """
    kind = library_kind(thing, _TRAINERS if has_optimizer else {**_TRAINERS, **_MODULES})
    if kind is not None:
        got, fix = {**_TRAINERS, **_MODULES}[kind]
        raise InputTypeError(call, got=got, expected=expected, fix=fix) from None


def _describe_non_model(model: object, optimizer: object) -> tuple[str, str]:
    """Describe an object passed in place of a model, and the way out."""
    right = f"{WRAPPER.kind}(model, optimizer)"
    if isinstance(model, Optimizer):
        if isinstance(optimizer, nn.Module):
            return f"the optimizer ({type(model).__name__}) first and the model second", f"write {right}."
        return f"an optimizer ({type(model).__name__})", f"write {right}."
    if isinstance(model, type):
        name = model.__name__
        return f"the class {name}", f"pass an object of it: model = {name}(...); {right}."
    if isinstance(model, list | tuple) and any(isinstance(each, nn.Module) for each in model):
        return (
            f"a {type(model).__name__} of models",
            f"write {WRAPPER.kind}(nn.ModuleList(models), optimizer), or make one wrapper for each model.",
        )
    if isinstance(model, Mapping):
        return (
            f"a {type(model).__name__}, perhaps a state_dict",
            f"load it into a model first: model.load_state_dict(state); {right}.",
        )
    if isinstance(model, torch.Tensor):
        return f"a {type(model).__name__}", f"{_AS_MODEL.format(name='tensor')}."
    if callable(model):
        return f"a {type(model).__name__}", f"put the function into an nn.Module with its parameters; {right}."
    return f"a {type(model).__name__}", f"write {right}."


def _check_has_data(model: nn.Module, call: str) -> None:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    absent = [name for name, tensor in tensors if tensor.device.type == "meta"]
    if absent:
        raise StateError(
            call,
            got=f"{len(absent)} of the model's {len(tensors)} tensors on the meta device, without data ({absent[0]})",
            expected="a model whose parameters and buffers have data",
            fix="write model.to_empty(device='cpu') or device='cuda', then model.load_state_dict(state) or your own "
            "initialization, and make the optimizer after it.",
        )


def list_optimizers(optimizer: Any, caller: Caller) -> list[Optimizer]:
    """Return the optimizers as a list; each must be a torch optimizer that needs no closure."""
    if isinstance(optimizer, str | bytes) or not isinstance(optimizer, Sequence | Optimizer):
        raise _no_optimizer(optimizer, caller)
    optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    if not optimizers:
        raise _no_optimizer(optimizers, caller)
    for each in optimizers:
        if not isinstance(each, Optimizer):
            raise _no_optimizer(each, caller)
        refuse_closure(
            each, constructor_call(caller), constructor_call(caller, "torch.optim.AdamW(model.parameters())")
        )
        _check_prepared(each)
    check_steps_later(optimizers, caller)
    return optimizers


def numbered(name: str, parts: Sequence[object]) -> dict[str, Any]:
    """Return the parts by names: the first has no number."""
    return {f"{name}{number}" if number > 1 else name: each for number, each in enumerate(parts, 1)}


def constructor_call(caller: Caller, optimizer: str = "optimizer") -> str:
    """Return the call that constructs the user's object over an optimizer, or over a list of them."""
    first = "" if caller is ACCUMULATOR else "model, "
    return f"{caller.kind}({first}{optimizer}{caller.others})"


def _no_optimizer(value: object, caller: Caller) -> InputTypeError:
    """Return the error for an object that is not an optimizer."""
    refuse_trainer(value, call=constructor_call(caller), expected=_EXPECTED_OPTIMIZER)
    known = {name: each for name, each in vars(torch.optim).items() if isinstance(each, type) and name != "Optimizer"}
    schedule = ", scheduler=scheduler" if caller is WRAPPER else ""
    made, got = "torch.optim.AdamW(model.parameters())", f"a {type(value).__name__}"
    inner = None if isinstance(value, (type, nn.Module, torch.optim.lr_scheduler.LRScheduler)) else _optimizer_in(value)
    if isinstance(value, type):
        made, got = f"torch.optim.{value.__name__}(model.parameters())", f"the class {value.__name__}"
        made = made if value.__name__ in known else f"{value.__name__}(model.parameters())"
    elif isinstance(value, str):
        name = nearest_word(value, known)
        made, got = f"torch.optim.{name or 'AdamW'}(model.parameters())", f"the text {value!r}"
    elif isinstance(value, list) and not value:
        got = "an empty list"
    elif isinstance(value, nn.Module):
        got = f"a model ({type(value).__name__})"
    elif isinstance(value, Mapping):
        made, got = "list(optimizers.values())", "a mapping"
    elif isinstance(value, nn.Parameter | torch.Tensor) or inspect.isgenerator(value):
        got = "parameters"
    elif isinstance(value, torch.optim.lr_scheduler.LRScheduler):
        made, got = f"scheduler.optimizer{schedule}", f"a schedule ({type(value).__name__})"
    elif inner:
        made = f"optimizer.{inner}{schedule}"
        got = f"a {type(value).__name__} around an optimizer, whose own step() would not run"
    fix = f"write {constructor_call(caller, made)}."
    if inner and inner != "optimizer":
        right = constructor_call(caller, f"optimizer.{inner}")
        fix = f"write {right}, and set the learning rates that it sets before each step."
    return InputTypeError(constructor_call(caller), got=got, expected=_EXPECTED_OPTIMIZER, fix=fix)


def _optimizer_in(value: object) -> str | None:
    """Return the attribute in which an object wraps an optimizer: Lightning's, Fabric's, somebody's own schedule."""
    names = [name for name, each in attributes_of(value).items() if isinstance(each, Optimizer)]
    if not names and isinstance(getattr(value, "optimizer", None), Optimizer):
        return "optimizer"
    return names[0] if len(names) == 1 else None


def _check_prepared(optimizer: Optimizer) -> None:
    """Refuse an optimizer prepared by accelerate to unscale or skip steps: losses are scaled here."""
    if getattr(optimizer, "scaler", None) is not None:
        got, fix = "a loss scaler of its own", "Accelerator(mixed_precision='no') and precision='fp16-mixed' here"
    elif getattr(getattr(optimizer, "gradient_state", None), "num_steps", 1) > 1:
        got, fix = (
            "steps that accelerate skips in order to accumulate gradients",
            "Accelerator(gradient_accumulation_steps=1)",
        )
    else:
        return
    raise ConfigError(
        f"{type(optimizer).__name__} of accelerate",
        got=got,
        expected="either accelerate or memkit to scale and accumulate, not both",
        fix=f"use {fix}; or keep accelerate's step, with SplitLoss and accelerator.backward(loss).",
    )


def check_steps_later(optimizers: Sequence[Optimizer], caller: Caller) -> None:
    """Refuse optimizers that step in backward: their gradients cannot accumulate, and steps cannot be undone."""
    for each in optimizers:
        if steps_in_backward(each):
            raise ConfigError(
                constructor_call(caller),
                got=f"{type(each).__name__}, which steps inside of backward",
                expected="an optimizer outside of step_in_backward, because gradients must accumulate",
                fix="leave the block `with mk.train.step_in_backward(optimizer):` first, or keep it and call "
                "loss.backward() yourself.",
            )


def check_owner(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers that hold no parameter of a model with trainable ones: no step would train it.

    One optimizer of several may belong to another module, such as a criterion with its own parameters.
    """
    held = {id(parameter) for each in optimizers for group in each.param_groups for parameter in group["params"]}
    if any(parameter.requires_grad for parameter in model.parameters()) and held.isdisjoint(
        map(id, model.parameters())
    ):
        name = type(optimizers[0]).__name__
        raise ConfigError(
            f"{WRAPPER.kind}(model, optimizer)",
            got=f"{name} over {len(held)} tensors, none of which is a parameter of the model",
            expected="an optimizer over parameters of this same model",
            fix="build it from the model as it is now, after wrapping or sharding: "
            f"{name}(model.parameters(), ...). To train only something else through this model, such as a prompt, call "
            "model.requires_grad_(False) first; to train something beside it, such as SAC's temperature, "
            f"{_AS_MODEL.format(name='log_alpha')}.",
        )
