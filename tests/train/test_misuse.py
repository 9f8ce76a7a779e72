"""Common first attempts: each call is refused under its own name, and the message ends with the corrected line."""

import contextlib
import functools
import inspect
import re
import types
from pathlib import Path

import pytest
import torch
from torch import nn

import memkit as mk
from memkit._core.words import ForeignWords
from memkit.errors import AbsentError, ConfigError, FileFormatError, InputError, InputTypeError, StateError
from memkit.train import words
from tests.toys import mean_square

WRAPPER, ACCUMULATOR = mk.MemoryEfficientTrainingWrapper, mk.GradientAccumulator
BATCH = torch.ones(6, 4)


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def wrapped(**settings):
    model = net()
    return WRAPPER(model, sgd(model), **settings)


def accumulator(*args, **settings):
    return ACCUMULATOR(sgd(net()), *args, **settings)


def foreign(library, name):
    """An object of a class that another library could have."""
    return type(name, (), {"__module__": f"{library}.inner"})()


def in_loop(trainer, **keywords):
    for attempt in trainer.microbatches(BATCH):
        with attempt as micro:
            trainer.backward(mean_square(trainer.model, micro), **keywords)
    return trainer


def on_meta():
    with torch.device("meta"):
        return net()


def loss_that_calls_backward(model, x):
    loss = mean_square(model, x)
    loss.backward()
    return loss


W = "MemoryEfficientTrainingWrapper"
RIGHT = f"{W}(model, optimizer)"
MADE = f"write {W}(model, torch.optim.AdamW(model.parameters()))."

CONSTRUCTED = [
    # the words of other libraries
    (
        lambda: wrapped(gradient_accumulation_steps=4),
        InputTypeError,
        f"write {W}(model, optimizer, accumulation_steps=4)",
    ),
    (lambda: wrapped(accumulate_grad_batches=2), InputTypeError, f"write {W}(model, optimizer, accumulation_steps=2)"),
    (lambda: wrapped(steps=2), InputTypeError, f"write {W}(model, optimizer, accumulation_steps=2)"),
    (lambda: wrapped(mixed_precision="fp16"), InputTypeError, f"write {W}(model, optimizer, precision='fp16')"),
    (lambda: wrapped(use_amp=True), InputTypeError, f"write {W}(model, optimizer, precision='bf16-mixed')"),
    (lambda: wrapped(fp16=True), InputTypeError, f"write {W}(model, optimizer, precision='fp16-mixed')"),
    (lambda: wrapped(gradient_checkpointing=True), InputTypeError, f"write {W}(model, optimizer, checkpoint=True)"),
    (lambda: wrapped(gradient_clip_val=1.0), InputTypeError, f"write {W}(model, optimizer, max_grad_norm=1.0)"),
    (lambda: wrapped(lr_scheduler=3), InputTypeError, f"write {W}(model, optimizer, scheduler=3)"),
    (lambda: wrapped(budget="8GiB"), InputTypeError, f"write {W}(model, optimizer, memory='8GiB')"),
    (lambda: wrapped(cpu_offload=True), InputTypeError, f"write {W}(model, optimizer, offload={{'optimizer'}})"),
    (lambda: wrapped(ema=3), InputTypeError, f"write {W}(model, optimizer, average=3)"),
    (lambda: wrapped(keep_gradients=True), InputTypeError, f"write {W}(model, optimizer, on_gradients=look)"),
    (lambda: wrapped(batch_size=8), InputTypeError, f"cuts each into n micro-batches; write {RIGHT}"),
    (lambda: wrapped(device="cuda"), InputTypeError, f"model.to('cuda'); write {RIGHT}"),
    (lambda: wrapped(lr=1e-3), InputTypeError, f"lr=...); write {RIGHT}"),
    (lambda: wrapped(criterion=nn.MSELoss()), InputTypeError, f"loss_fn); write {RIGHT}"),
    (lambda: wrapped(num_epochs=3), InputTypeError, f".run(num_epochs=1); write {RIGHT}"),
    (lambda: wrapped(strategy="ddp"), InputTypeError, f"DistributedDataParallel(model); write {RIGHT}"),
    (lambda: wrapped(on_gradient=print), InputTypeError, f"write {W}(model, optimizer, on_gradients=on_gradients)"),
    # by position
    (lambda: WRAPPER(net()), InputTypeError, f"write {RIGHT}"),
    (lambda: WRAPPER(net(), sgd(net()), 4), InputTypeError, f"write {W}(model, optimizer, accumulation_steps=4)"),
    (lambda: WRAPPER(net(), sgd(net()), "bf16"), InputTypeError, f"write {W}(model, optimizer, precision='bf16')"),
    (
        lambda: WRAPPER(net(), o := sgd(net()), torch.optim.lr_scheduler.StepLR(o, 1)),
        InputTypeError,
        f"write {W}(model, optimizer, scheduler=scheduler)",
    ),
    (lambda: WRAPPER(net(), sgd(net()), nn.MSELoss()), InputTypeError, f"write {RIGHT}"),
    # the model
    (lambda: WRAPPER(sgd(m := net()), m), InputTypeError, f"write {RIGHT}."),
    (lambda: WRAPPER(nn.Linear, sgd(net())), InputTypeError, f"model = Linear(...); {RIGHT}."),
    (lambda: WRAPPER([net()], sgd(net())), InputTypeError, "or make one wrapper for each model."),
    (
        lambda: WRAPPER(net().state_dict(), sgd(net())),
        InputTypeError,
        f"load_state_dict(state); {RIGHT}.",
    ),
    (lambda: WRAPPER(wrapped(), sgd(net())), InputTypeError, "its model is trainer.model."),
    (lambda: WRAPPER(m := on_meta(), sgd(m)), StateError, "and make the optimizer after it."),
    (lambda: WRAPPER(foreign("transformers", "Trainer")), InputTypeError, "train_dataset=dataset)."),
    (lambda: WRAPPER(foreign("transformers", "Trainer"), sgd(net())), InputTypeError, "train_dataset=dataset)."),
    (lambda: WRAPPER(foreign("lightning", "Trainer"), sgd(net())), InputTypeError, "write trainer.fit(module)."),
    (lambda: WRAPPER(foreign("pytorch_lightning", "Trainer")), InputTypeError, "write trainer.fit(module)."),
    (lambda: WRAPPER(foreign("lightning", "LightningModule")), InputTypeError, f"write {W}(module, optimizer)."),
    (lambda: WRAPPER(foreign("lightning", "Fabric"), 1), InputTypeError, "fabric.backward(split(batch, loss_fn))."),
    (lambda: WRAPPER(foreign("accelerate", "Accelerator"), 1), InputTypeError, f"then {RIGHT}."),
    (lambda: WRAPPER(foreign("deepspeed", "DeepSpeedEngine"), 1), InputTypeError, f"then {RIGHT}."),
    # the optimizer
    (lambda: WRAPPER(net(), torch.optim.AdamW), InputTypeError, MADE),
    (lambda: WRAPPER(net(), "adamw"), InputTypeError, MADE),
    (lambda: WRAPPER(net(), "sgdd"), InputTypeError, f"write {W}(model, torch.optim.SGD(model.parameters()))."),
    (lambda: WRAPPER(m := net(), m.parameters()), InputTypeError, MADE),
    (lambda: WRAPPER(m := net(), list(m.parameters())), InputTypeError, MADE),
    (lambda: WRAPPER(net(), []), InputTypeError, MADE),
    (lambda: WRAPPER(m := net(), torch.optim.LBFGS(m.parameters())), ConfigError, MADE),
    (lambda: WRAPPER(m := net(), {"a": sgd(m)}), InputTypeError, f"write {W}(model, list(optimizers.values()))."),
    (
        lambda: WRAPPER(m := net(), torch.optim.lr_scheduler.StepLR(sgd(m), 1)),
        InputTypeError,
        f"write {W}(model, scheduler.optimizer, scheduler=scheduler).",
    ),
    (
        lambda: WRAPPER(m := net(), types.SimpleNamespace(_optimizer=sgd(m), lr=1)),
        InputTypeError,
        f"write {W}(model, optimizer._optimizer), and set the learning rates that it sets before each step.",
    ),
    # settings
    (lambda: wrapped(precision=16), ConfigError, "pass precision='fp16-mixed'."),
    (lambda: wrapped(precision="16-mixed"), ConfigError, "pass precision='fp16-mixed'."),
    (lambda: wrapped(precision=32), ConfigError, "pass precision='fp32'."),
    (lambda: wrapped(precision="no"), ConfigError, "pass precision='fp32'."),
    (lambda: wrapped(precision=torch.bfloat16), ConfigError, "pass precision='bf16-mixed'."),
    (lambda: wrapped(precision="BF16"), ConfigError, "pass precision='bf16'."),
    (lambda: wrapped(precision=True), ConfigError, "pass precision='bf16-mixed'."),
    (lambda: wrapped(precision=False), ConfigError, "pass precision=None, which keeps the model as it is."),
    (lambda: wrapped(precision="64-true"), ConfigError, "pass precision=None, which keeps the model as it is."),
    (lambda: wrapped(precision="16-true"), ConfigError, "which float16 steps would not change."),
    (lambda: wrapped(precision="bf8"), ConfigError, "or 'fp16-mixed' on older cards."),
    (
        lambda: WRAPPER(m := net(torch.bfloat16), sgd(m), precision="fp32"),
        ConfigError,
        "or pass precision=None, which keeps the model as it is.",
    ),
    (lambda: WRAPPER(m := net(torch.float16), sgd(m), precision="fp16"), ConfigError, "make the optimizer after it."),
    (lambda: wrapped(scaler=True), InputTypeError, "or leave it at None: precision='fp16-mixed' makes one."),
    (lambda: wrapped(scaler=torch.amp.GradScaler), InputTypeError, "precision='fp16-mixed' makes one."),
    (lambda: wrapped(offload="activations"), ConfigError, "pass offload={'activations'}."),
    (lambda: wrapped(offload=["optimiser", "activation"]), ConfigError, "pass offload={'activations', 'optimizer'}."),
    (lambda: wrapped(offload=True), ConfigError, "pass offload={'activations'}."),
    (lambda: wrapped(offload=False), ConfigError, "pass offload=()."),
    (lambda: wrapped(offload=5), ConfigError, "pass offload={'activations'}."),
    (lambda: wrapped(memory=mk.MemoryManager), ConfigError, "pass memory=mk.MemoryManager()."),
    (lambda: wrapped(memory=[8]), ConfigError, "pass memory='22GiB'."),
    (
        lambda: wrapped(scheduler=torch.optim.lr_scheduler.StepLR),
        InputTypeError,
        "CosineAnnealingLR(optimizer, T_max=1000).",
    ),
    (lambda: wrapped(scheduler="cosine"), InputTypeError, "CosineAnnealingLR(optimizer, T_max=1000)."),
    (lambda: wrapped(average="ema"), InputTypeError, "pass average=torch.optim.swa_utils.AveragedModel(model)."),
    (lambda: wrapped(on_oom="skip"), ConfigError, "'raise' for no recovery."),
    (lambda: wrapped(on_gradients=True), InputTypeError, "if p.grad is not None])."),
    (lambda: wrapped(on_gradients=lambda: None), InputTypeError, "if p.grad is not None])."),
    (lambda: wrapped(max_grad_norm="1"), ConfigError, "pass max_grad_norm=1.0, or None for no clipping."),
    (lambda: wrapped(split_fn=4), InputTypeError, "not its result split_fn()."),
    (
        lambda: wrapped(memory="RTX 4090"),
        InputError,
        "write memory=mk.find_gpu('RTX 4090').usable_bytes for all memory of that GPU.",
    ),
    (lambda: wrapped(memory="24"), InputError, "write '24GiB', or '24B' if bytes are meant."),
    (
        lambda: mk.ChunkedProcessor(net(), memory_budget="A100 80GB"),
        InputError,
        "write memory_budget=mk.find_gpu('A100 80GB').usable_bytes for all memory of that GPU.",
    ),
]

FROM_CONFIG = [
    (lambda: WRAPPER.from_config(m := net(), sgd(m)), InputTypeError, "write from_config(model, optimizer, config)"),
    (
        lambda: WRAPPER.from_config(m := net(), sgd(m), "medium"),
        InputTypeError,
        f"write {W}.from_config(model, optimizer, mk.get_preset_config('medium')).",
    ),
    (
        lambda: WRAPPER.from_config(m := net(), sgd(m), {"precision": "fp32"}),
        InputTypeError,
        f"write {W}(model, optimizer, **config)",
    ),
    (
        lambda: WRAPPER.from_config(m := net(), sgd(m), {"gradient_accumulation_steps": 4, "grad_clip": 1.0}),
        InputTypeError,
        f"write {W}(model, optimizer, accumulation_steps=4, max_grad_norm=1.0)",
    ),
    (
        lambda: WRAPPER.from_config(m := net(), sgd(m), mk.get_preset_config("low").model_dump()),
        InputTypeError,
        f"write {W}.from_config(model, optimizer, mk.predict.TrainingConfig(**config)).",
    ),
    (
        lambda: WRAPPER.from_config(m := net(), sgd(m), {"preset": "hihg"}),
        InputTypeError,
        f"write {W}.from_config(model, optimizer, mk.get_preset_config('high')).",
    ),
    (
        lambda: WRAPPER.from_config(m := net(), sgd(m), 24),
        InputTypeError,
        f"write {W}.from_config(model, optimizer, mk.get_preset_config('medium', 24)).",
    ),
    (
        lambda: WRAPPER.from_config(m := net(), sgd(m), mk.get_preset_config("low"), grad_clip=1.0),
        InputTypeError,
        "write from_config(model, optimizer, config, max_grad_norm=1.0)",
    ),
]

STEPPED = [
    (lambda: wrapped().train_step(BATCH, [BATCH]), InputTypeError, "write trainer.train_step((x, y), loss_fn)"),
    (lambda: wrapped().train_step(BATCH, BATCH), InputTypeError, "write trainer.train_step((x, y), loss_fn)"),
    (lambda: list(wrapped()), InputTypeError, "write for batch in loader: trainer.train_step(batch, loss_fn)"),
    (lambda: wrapped().backward({"loss": BATCH}), InputTypeError, "loss = sum(losses.values())."),
    (lambda: wrapped().load_state_dict("a.pt"), FileFormatError, "first: state = torch.load('a.pt')."),
    (lambda: wrapped().train_step(BATCH), InputTypeError, "criterion(model(batch[0]), batch[1]))"),
    (lambda: wrapped().train_step(BATCH, BATCH, mean_square), InputTypeError, "trainer.train_step((x, y), loss_fn)"),
    (
        lambda: wrapped().train_step(BATCH, loss_that_calls_backward),
        StateError,
        "`return criterion(model(batch[0]), batch[1])`.",
    ),
    (lambda: wrapped().train_step(BATCH, lambda m, x: mean_square(m, x).detach()), InputError, "not detached."),
    (
        lambda: wrapped().train_step(BATCH, lambda m, x: mk.Loss(mean=mean_square(m, x), count=-1)),
        InputError,
        "for example count=len(batch).",
    ),
    (
        lambda: wrapped(split_fn=lambda batch, n: batch.chunk(n)).train_step(BATCH, mean_square),
        InputError,
        "end loss_fn with `return mk.Loss(mean=loss, count=n)`.",
    ),
    (
        lambda: in_loop(wrapped(split_fn=lambda batch, n: batch.chunk(n))),
        InputError,
        "write trainer.backward(loss, count=n).",
    ),
    (
        lambda: in_loop(wrapped(), reduction="sum"),
        InputError,
        "write trainer.backward(loss, count=n, reduction='sum').",
    ),
    (
        lambda: in_loop(wrapped(), reduction="max"),
        InputError,
        "reduce the loss first: trainer.backward(loss.mean(), count=len(x)).",
    ),
    (lambda: wrapped().step(), StateError, "or loop over trainer.microbatches(batch) first."),
    (
        lambda: in_loop(wrapped()).step() and in_loop(wrapped(), n=3),
        InputTypeError,
        "there is no n; write backward(loss)",
    ),
    (lambda: wrapped().load_state_dict(net().state_dict()), FileFormatError, "for the result of trainer.state_dict()."),
    (lambda: wrapped().load_state_dict({"version": 1}), FileFormatError, "torch.save(trainer.state_dict(), path)."),
    (lambda: wrapped().load_state_dict([1]), FileFormatError, "pass the mapping that state_dict() returned."),
    (
        lambda: wrapped().load_state_dict({**wrapped().state_dict(), "accumulator": 3}),
        FileFormatError,
        "pass the mapping that state_dict() returned.",
    ),
    (lambda: wrapped()(BATCH), InputTypeError, "write trainer.model(x)"),
]

ABSENT = [
    (lambda: wrapped().fit, "write mk.MemoryEfficientTrainLoop(trainer, loader, loss_fn).run(num_epochs=1)"),
    (lambda: wrapped().training_step, "write trainer.train_step(batch, loss_fn)"),
    (lambda: wrapped().train, "write trainer.model.train()"),
    (lambda: wrapped().eval, "or trainer.model.eval()"),
    (lambda: wrapped().parameters, "write trainer.model.parameters()"),
    (lambda: wrapped().zero_grad, "write nothing in its place: trainer.train_step and trainer.step do it"),
    (lambda: wrapped().save, "write mk.TrainingStateManager(folder).save(step, **trainer.parts())"),
    (lambda: wrapped().load, "write mk.TrainingStateManager(folder).restore(**trainer.parts())"),
    (lambda: wrapped().accumulate, "write `for attempt in trainer.microbatches(batch):`"),
    (lambda: wrapped().clip_grad_norm_, f"write {W}(model, optimizer, max_grad_norm=1.0)"),
    (lambda: wrapped().prepare, "write trainer.model: it is the model that you passed"),
    (lambda: wrapped().optimizer, "write trainer.parts()['optimizer']"),
    (lambda: wrapped().microbatch, "write microbatches"),
    (lambda: accumulator().zero_grad, "write nothing in its place: accumulator.step() does it"),
    (lambda: accumulator().steps, "write accumulator.accumulation_steps"),
    (lambda: accumulator().clip_grad_norm_, "write GradientAccumulator(optimizer, max_grad_norm=1.0)"),
    (lambda: wrapped().train_step(BATCH, mean_square).item, "write result.loss.item()"),
    (lambda: wrapped().train_step(BATCH, mean_square).metrics, "write result.outputs"),
]

RESULTS = [
    (lambda: float(wrapped().train_step(BATCH, mean_square)), InputTypeError, "write float(result.loss)"),
    (lambda: list(wrapped().train_step(BATCH, mean_square)), InputTypeError, "write result.loss, result.grad_norm"),
    (
        lambda: wrapped().train_step(BATCH, mean_square)["loss"],
        InputTypeError,
        "write result.loss, or result.outputs[0]",
    ),
    (lambda: f"{wrapped().train_step(BATCH, mean_square):.3f}", InputTypeError, "write f'{float(result.loss):.3f}'"),
    (lambda: 0.0 + wrapped().train_step(BATCH, mean_square), InputTypeError, "write float(result.loss)"),
    (lambda: wrapped().train_step(BATCH, mean_square) + 0.0, InputTypeError, "write float(result.loss)"),
    (lambda: sum(wrapped().train_step(BATCH, mean_square).losses), InputTypeError, "float(loss.value)"),
    (lambda: wrapped().train_step(BATCH, mean_square).losses[0].item(), AbsentError, "write loss.value.item()"),
    (lambda: f"{mk.Loss(mean=torch.ones(())):.3f}", InputTypeError, "float(loss.value)"),
    (lambda: tuple(mk.Loss(mean=torch.ones(()))), InputTypeError, "write loss.value, loss.count"),
    (lambda: mk.Loss(torch.ones(()), 6), InputTypeError, "write Loss(mean=loss, count=n)"),
    (lambda: mk.Loss(torch.ones(())), InputTypeError, "write Loss(mean=loss, count=n)"),
    (lambda: mk.Loss(loss=torch.ones(()), n=6), InputTypeError, "write Loss(mean=mean, count=6)"),
    (lambda: mk.Loss(value=torch.ones(()), metrics=None), InputTypeError, "write Loss(mean=mean, outputs=None)"),
    (lambda: mk.Loss(mean=torch.ones(()), reduction="sum"), InputTypeError, "or Loss(sum=loss, count=n)"),
]

SPLIT = [
    (
        lambda: mk.train.check_split(BATCH, net(), mean_square),
        InputTypeError,
        "write check_split(model, batch, loss_fn)",
    ),
    (
        lambda: mk.train.check_split(net(), mean_square, BATCH),
        InputTypeError,
        "write check_split(model, batch, loss_fn)",
    ),
    *(
        (lambda n=n: mk.train.check_split(net(), BATCH, mean_square, num_parts=n), ConfigError, "pass num_parts=1.")
        for n in (0, -1, float("nan"), None)
    ),
    (
        lambda: mk.train.check_split(net(), BATCH, mean_square, split_fn="x"),
        InputTypeError,
        "not its result split_fn().",
    ),
    (
        lambda: mk.train.check_split(net(), BATCH, mean_square, parameters="abc"),
        ConfigError,
        "pass parameters=[...].",
    ),
    *(
        (
            lambda given=given: mk.train.check_split(net(), BATCH, mean_square, parameters=given),
            InputTypeError,
            "write check_split(model, batch, loss_fn, parameters=model.parameters()).",
        )
        for given in (["a", None], net()[0].weight, net().named_parameters())
    ),
    (lambda: mk.train.check_split(net(), BATCH), InputTypeError, "write check_split(model, batch, loss_fn)"),
    (
        lambda: mk.train.check_split(net(), BATCH, criterion=mean_square),
        InputTypeError,
        "write check_split(model, batch, loss_fn=loss_fn)",
    ),
    (lambda: wrapped().trust_split(mean_square, BATCH), InputTypeError, "write trainer.trust_split(batch, loss_fn)"),
    (lambda: mk.recover_from_oom(lambda: 1, 8), InputTypeError, "lambda size: step(batch[:size]), sizes)."),
    (
        lambda: mk.train.make_dataloader((BATCH, BATCH), batch_size=2),
        InputTypeError,
        "write make_dataloader(torch.utils.data.TensorDataset(*tensors))",
    ),
    (
        lambda: mk.prepare(net(), torch.optim.Adam, BATCH, mean_square, budget="1GiB"),
        InputTypeError,
        "write prepare(model, torch.optim.Adam(model.parameters()), sample_batch, loss_fn).",
    ),
]

ACCUMULATED = [
    (lambda: accumulator().expect(None), InputError, "for example count=len(batch)."),
    (lambda: accumulator().expect("6"), InputError, "for example count=len(batch)."),
    (
        lambda: accumulator().backward(mean_square(net(), BATCH), torch.ones(6)),
        InputError,
        "add up the entries: count=mask.sum().",
    ),
    (
        lambda: accumulator().load_state_dict("a.pt"),
        FileFormatError,
        "load the file first: state = torch.load('a.pt').",
    ),
    (lambda: accumulator().load_state_dict(None), FileFormatError, "pass the mapping that state_dict() returned."),
    (lambda: list(accumulator()), InputTypeError, "count=len(x)); accumulator.step()"),
    (lambda: accumulator(steps=4), InputTypeError, "write GradientAccumulator(optimizer, accumulation_steps=4)"),
    (
        lambda: accumulator(gradient_accumulation_steps=4),
        InputTypeError,
        "write GradientAccumulator(optimizer, accumulation_steps=4)",
    ),
    (lambda: accumulator(clip_grad=1.0), InputTypeError, "write GradientAccumulator(optimizer, max_grad_norm=1.0)"),
    (
        lambda: ACCUMULATOR(net(), sgd(net()), 4),
        InputTypeError,
        "write GradientAccumulator(optimizer, accumulation_steps=4, model=model)",
    ),
    (
        lambda: ACCUMULATOR(net(), sgd(net())),
        InputTypeError,
        "write GradientAccumulator(optimizer, accumulation_steps=1, model=model).",
    ),
    (lambda: ACCUMULATOR(4, sgd(net())), InputTypeError, "write GradientAccumulator(optimizer, accumulation_steps=4)."),
    (
        lambda: ACCUMULATOR(net()),
        InputTypeError,
        "write GradientAccumulator(torch.optim.AdamW(model.parameters())).",
    ),
    *(
        (lambda given=given: accumulator(scaler=given), InputTypeError, "scaler=torch.amp.GradScaler()).")
        for given in (True, 1024.0, torch.amp.GradScaler)
    ),
    (lambda: accumulator(guard_steps="False"), ConfigError, "pass guard_steps=False."),
    (
        lambda: accumulator().backward(mean_square(net(), BATCH), retain_graph=None),
        ConfigError,
        "pass retain_graph=False.",
    ),
    *(
        (
            lambda block=block, given=given: block(given).__enter__(),
            InputTypeError,
            f"then {block.__name__}(optimizer).",
        )
        for block in (mk.train.atomic_steps, mk.train.offload_state, mk.train.step_in_backward)
        for given in (None, net(), [], "adamw", [None])
    ),
    (lambda: mk.train.materialize_state(net()), InputTypeError, "then materialize_state(optimizer)."),
    (
        lambda: mk.train.cached_backward(net(), BATCH, lambda z: z.sum(), chunk_size=4, backward=None),
        InputTypeError,
        "not its result backward().",
    ),
    (
        lambda: mk.train.gradient_penalty(net(), BATCH, BATCH, generator=0),
        InputTypeError,
        "torch.Generator().manual_seed(0).",
    ),
    (
        lambda: mk.train.offload_activations(to="disk", model="x"),
        InputTypeError,
        "write offload_activations(to='disk', model=model).",
    ),
    (lambda: mk.train.offload_activations(to="disk", folder=3), InputTypeError, "pass folder='path/to/it'."),
    (lambda: mk.train.offload_state(sgd(net()), folder=3).__enter__(), InputTypeError, "pass folder='path/to/it'."),
    (
        lambda: mk.train.offload_activations(to="disk", folder="/no/x"),
        InputError,
        "create it first: os.makedirs('/no/x', exist_ok=True).",
    ),
    (
        lambda: mk.train.offload_state(sgd(net()), folder=__file__).__enter__(),
        InputError,
        f"use a directory, for example {str(Path(__file__).parent)!r}.",
    ),
    (lambda: accumulator(0), ConfigError, "pass accumulation_steps=1."),
    (lambda: accumulator(objective="max"), ConfigError, "pass objective='mean'."),
    (lambda: accumulator(accumulate_dtype=torch.float16), ConfigError, "pass accumulate_dtype=torch.float32."),
    (
        lambda: ACCUMULATOR(sgd(net(torch.float16)), scaler=torch.amp.GradScaler("cpu")),
        ConfigError,
        "or pass accumulate_dtype=torch.float32.",
    ),
    (
        lambda: accumulator().backward(mean_square(net(), BATCH), num_tokens=5),
        InputTypeError,
        "write backward(loss, count=5)",
    ),
    (
        lambda: accumulator().backward(mean_square(net(), BATCH), reduction="sum"),
        InputError,
        "or build the accumulator with objective='sum'.",
    ),
    (lambda: accumulator().load_state_dict({"version": 2}), FileFormatError, "(accumulator.state_dict(), path)."),
    (lambda: accumulator().load_state_dict(net().state_dict()), FileFormatError, "of accumulator.state_dict()."),
]


@pytest.mark.parametrize(
    ("call", "error", "end"), [*CONSTRUCTED, *FROM_CONFIG, *STEPPED, *RESULTS, *ACCUMULATED, *SPLIT]
)
@pytest.mark.filterwarnings("ignore:.*gradients that another backward:memkit.MemkitWarning")
def test_a_wrong_call_ends_with_the_corrected_call(call, error, end):
    with pytest.raises(error) as caught:
        call()
    text = str(caught.value)
    assert text.endswith(end), text
    assert not re.search(r"Way out: (change \w+\.|leave it out)", text)


@pytest.mark.parametrize(
    "config",
    [
        "hihg",
        {"precision": "fp32"},
        {"gradient_accumulation_steps": 4, "grad_clip": 1.0},
        {"preset": "low", "gpu_memory_gb": 8},
        mk.get_preset_config("low", checkpointing=False).model_dump(),
        24,
        {},
    ],
)
def test_the_way_out_for_an_invalid_config_runs(config):
    with pytest.raises(InputTypeError) as caught:
        WRAPPER.from_config(m := net(), sgd(m), config)
    line = str(caught.value).rpartition("write ")[2].rstrip(".")
    trainer = eval(line, {W: WRAPPER, "mk": mk, "config": config, "model": (m := net()), "optimizer": sgd(m)})
    assert isinstance(trainer, WRAPPER)


@pytest.mark.parametrize(("use", "end"), ABSENT)
def test_an_absent_name_ends_with_the_corrected_call(use, end):
    with pytest.raises(AbsentError) as caught:
        use()
    assert str(caught.value).endswith(end), str(caught.value)


@pytest.mark.parametrize(("call", "error", "end"), [*CONSTRUCTED, *FROM_CONFIG, *STEPPED])
@pytest.mark.filterwarnings("ignore::memkit.MemkitWarning")
def test_a_mistake_in_the_wrapper_does_not_name_the_accumulator(call, error, end):
    with pytest.raises(error) as caught:
        call()
    assert "GradientAccumulator" not in str(caught.value)
    assert not re.search(r"\baccumulator\.", str(caught.value))


@pytest.mark.parametrize(("cls", "table"), [(WRAPPER, words.WRAPPER_WORDS), (ACCUMULATOR, words.ACCUMULATOR_WORDS)])
def test_synonyms_lead_to_existing_arguments(cls, table):
    known = set(inspect.signature(cls).parameters) | {"model"}
    in_backward = set(inspect.signature(cls.backward).parameters)
    meant = {found[1] for found in (re.fullmatch(r"([a-z]\w*)(=\S.*)?", word) for word in table) if found}
    assert meant <= known | in_backward
    assert (
        not set(inspect.signature(cls).parameters) & ForeignWords(table).own.keys()
    )  # no word of our own is translated


class CallingStep:
    def __call__(self, model, batch):
        return model.training_step(batch, 0)


class TestWarnings:
    @pytest.mark.parametrize(
        ("loss_fn", "is_told"),
        [
            (mean_square, True),
            (lambda model, x: model.training_step(x, 0), False),
            (functools.partial(lambda model, x, step: step(model, x), step=lambda m, x: m.training_step(x, 0)), False),
            (CallingStep(), False),
        ],
    )
    def test_a_lightning_module_whose_step_is_not_called_is_led_to_its_adapter(self, loss_fn, is_told):
        class Net(nn.Linear):
            def training_step(self, batch, batch_idx):
                return mean_square(self, batch)

        module = type("LightningModule", (), {"__module__": "lightning.pytorch.core.module"})
        model = type("LitNet", (Net, module), {})(4, 2)
        trainer = WRAPPER(model, sgd(model))
        text = r"memkit\.integrations\.lightning\.MemoryEfficientModule instead"
        with pytest.warns(mk.MemkitWarning, match=text) if is_told else contextlib.nullcontext():
            assert trainer.train_step(BATCH, loss_fn).stepped
        assert trainer.train_step(BATCH, loss_fn).stepped  # without a second warning

    def test_warns_once_of_empty_batch(self):
        trainer = wrapped()
        with pytest.warns(mk.MemkitWarning, match=r"the batch has no rows: nothing is trained") as caught:
            assert not trainer.train_step(BATCH[:0], mean_square).stepped
        assert caught[0].filename == __file__
        assert not trainer.train_step(BATCH[:0], mean_square).stepped  # without a second warning

    def test_a_backward_of_ones_own_trains_nothing(self):
        model = net()
        acc = ACCUMULATOR(sgd(model))
        mean_square(model, BATCH).backward()
        with pytest.warns(mk.MemkitWarning, match=r"write accumulator\.backward\(loss, count=len\(x\)\) in place"):
            assert acc.step() is False

    def test_a_step_without_gradients_of_anybody_says_nothing(self):
        assert accumulator().step() is False

    def test_idle_step_warning_names_the_called_method(self):
        other = net()
        with pytest.warns(mk.MemkitWarning, match=r"^MemoryEfficientTrainingWrapper: nothing was trained"):
            wrapped().train_step(BATCH, lambda _, x: mean_square(other, x))
        acc = accumulator()
        acc.backward(mean_square(other, BATCH))
        with pytest.warns(mk.MemkitWarning, match=r"^GradientAccumulator: nothing was trained"):
            acc.step()


def test_verdict_is_true_for_exact_split():
    """`if check_split(...):` asks for the verdict, not whether there is one."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    assert mk.train.check_split(net(), BATCH, mean_square)
    assert not mk.train.check_split(model, torch.randn(6, 4), mean_square)
    assert not mk.train.check_split(model.requires_grad_(False), BATCH, mean_square)


def test_result_prints_without_format_spec():
    result = wrapped().train_step(BATCH, mean_square)
    assert f"{result}" == str(result)
    assert f"{result.losses[0]}" == str(result.losses[0])
