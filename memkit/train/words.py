"""How other libraries call what the wrapper and the accumulator do, and what to write here instead.

The words are those of accelerate, Lightning, the Hugging Face trainer, DeepSpeed, fairscale, and of plain loops.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from memkit.train.owners import refuse_trainer

_STEPS = (
    "gradient_accumulation_steps",
    "gradient_accumulation",
    "accumulate_grad_batches",
    "grad_accum",
    "grad_accum_steps",
    "grad_accumulation_steps",
    "accum_steps",
    "accum_iter",
    "accumulation",
    "accumulate",
    "num_accumulation_steps",
    "steps",
    "num_steps",
    "num_microbatches",
    "num_micro_batches",
    "microbatches",
    "chunks",
)
_NORM = (
    "gradient_clip_val",
    "gradient_clipping",
    "clip_grad",
    "clip_grad_norm",
    "clip_norm",
    "clip",
    "grad_clip",
    "grad_clip_norm",
    "max_norm",
)
_BATCH = (
    "batch_size",
    "train_batch_size",
    "micro_batch_size",
    "microbatch_size",
    "per_device_train_batch_size",
    "train_micro_batch_size_per_gpu",
)
_CHECKPOINT = (
    "gradient_checkpointing",
    "activation_checkpointing",
    "checkpointing",
    "use_checkpoint",
    "use_checkpointing",
    "use_gradient_checkpointing",
    "recompute",
)
_MEMORY = (
    "budget",
    "memory_budget",
    "memory_limit",
    "memory_fraction",
    "memory_manager",
    "max_memory",
)
_BF16 = ("bf16", "use_bf16", "use_amp", "amp", "use_autocast", "autocast", "amp_dtype", "autocast_dtype")
_FP16 = ("fp16", "use_fp16", "half")
_DEVICE = ("device", "devices", "gpu", "cuda", "accelerator", "place_model_on_device")
_RANKS = ("strategy", "ddp", "world_size", "num_gpus", "gpus", "distributed")
_OPTIMIZER = ("lr", "learning_rate", "weight_decay", "betas", "momentum")
_LOSS = ("loss_fn", "criterion", "loss", "loss_func", "loss_function")
_LOADER = ("dataloader", "loader", "train_loader", "train_dataloader", "train_dataset", "dataset", "data")
_EPOCHS = ("epochs", "num_epochs", "max_epochs", "num_train_epochs", "max_steps")
_GRADIENTS = ("keep_gradients", "keep_grads", "retain_gradients", "log_gradients", "track_grad_norm", "gradient_hook")
_STATE_OUT = ("cpu_offload", "offload_optimizer", "offload_optimizer_state", "zero_stage", "offload_optimizer_device")

_ROWS_TARGETS_LOSS = 3

_SHARED: dict[str, str] = {
    **dict.fromkeys(_STEPS, "accumulation_steps"),
    **dict.fromkeys(_NORM, "max_grad_norm"),
    **dict.fromkeys(_BATCH, "the loader makes the batches, and accumulation_steps=n cuts each into n micro-batches"),
    **dict.fromkeys(_OPTIMIZER, "the optimizer has it: torch.optim.AdamW(model.parameters(), lr=...)"),
    **dict.fromkeys(_RANKS, "wrap the model first: torch.nn.parallel.DistributedDataParallel(model)"),
    **dict.fromkeys(("grad_scaler", "gradscaler", "amp_scaler"), "scaler"),
    **dict.fromkeys(("optim", "optimizers", "opt"), "optimizer"),
    **dict.fromkeys(("weight", "num_rows", "num_samples", "num_tokens", "num_items"), "count"),
    **dict.fromkeys(("net", "network", "module"), "model"),
}

WRAPPER_WORDS: Mapping[str, str] = {
    **_SHARED,
    **dict.fromkeys(("mixed_precision", "dtype", "torch_dtype", "precision_plugin"), "precision"),
    **dict.fromkeys(_BF16, "precision='bf16-mixed'"),
    **dict.fromkeys(_FP16, "precision='fp16-mixed'"),
    **dict.fromkeys(_CHECKPOINT, "checkpoint"),
    **dict.fromkeys(_MEMORY, "memory"),
    **dict.fromkeys(("target", "gpu_memory", "gpu_memory_gb"), "memory='22GiB'"),
    **dict.fromkeys(_DEVICE, "move the model first: model.to('cuda')"),
    **dict.fromkeys(_LOSS, "it goes into each step: trainer.train_step(batch, loss_fn)"),
    **dict.fromkeys(_LOADER, "it goes into the loop: mk.MemoryEfficientTrainLoop(trainer, loader, loss_fn)"),
    **dict.fromkeys(
        _EPOCHS, "the loop has it: mk.MemoryEfficientTrainLoop(trainer, loader, loss_fn).run(num_epochs=1)"
    ),
    **dict.fromkeys(_GRADIENTS, "on_gradients=look"),
    **dict.fromkeys(_STATE_OUT, "offload={'optimizer'}"),
    **dict.fromkeys(("offload_activations", "activation_offload", "activation_offloading"), "offload={'activations'}"),
    **dict.fromkeys(("lr_scheduler", "schedule", "sched"), "scheduler"),
    **dict.fromkeys(("ema", "ema_model", "swa_model", "average_model"), "average"),
    **dict.fromkeys(("oom", "on_out_of_memory", "handle_oom"), "on_oom"),
    **dict.fromkeys(("auto_find_batch_size", "retry_on_oom", "recover_from_oom"), "on_oom='exact'"),
    **dict.fromkeys(("compile", "torch_compile", "use_compile"), "compile first: model = torch.compile(model)"),
    **dict.fromkeys(
        ("clip_value", "clip_grad_value", "gradient_clip_algorithm"),
        "on_gradients=lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)",
    ),
    "collate_fn": "the loader has it",
    "config": "a config goes in this way: MemoryEfficientTrainingWrapper.from_config(model, optimizer, config)",
}

ACCUMULATOR_WORDS: Mapping[str, str] = {
    **_SHARED,
    **dict.fromkeys((*_BF16, *_FP16, "mixed_precision", "precision"), "compute the loss inside torch.autocast(...)"),
    **dict.fromkeys(_LOSS, "it goes into each micro-batch: accumulator.backward(loss, count=len(x))"),
    **dict.fromkeys(("sum_dtype", "dtype", "reduce_dtype", "grad_dtype"), "accumulate_dtype"),
    **dict.fromkeys(_GRADIENTS, "optimizer.register_step_pre_hook(look) shows the gradients"),
    **dict.fromkeys(("scheduler", "lr_scheduler"), "write `if accumulator.step(): scheduler.step()` in the loop"),
}

_LOOP = "mk.MemoryEfficientTrainLoop(trainer, loader, loss_fn).run(num_epochs=1)"
_SAVE = "mk.TrainingStateManager(folder).save(step, **trainer.parts())"
_OF_THE_MODEL = (
    "parameters",
    "named_parameters",
    "named_modules",
    "modules",
    "buffers",
    "children",
    "train",
    "half",
    "bfloat16",
    "float",
)

WRAPPER_ABSENT: Mapping[str, str] = {
    "()": "trainer.model(x)",
    **{name: f"trainer.model.{name}()" for name in _OF_THE_MODEL},
    "training": "trainer.model.training",
    "forward": "trainer.model(x)",
    "to": "model.to(device) before MemoryEfficientTrainingWrapper(model, optimizer)",
    "requires_grad_": "trainer.model.requires_grad_(False)",
    "eval": "`with trainer.evaluation() as evaluate:`, or trainer.model.eval()",
    **dict.fromkeys(("fit", "run", "train_epoch", "train_loop"), _LOOP),
    **dict.fromkeys(("training_step", "optimize", "update"), "trainer.train_step(batch, loss_fn)"),
    **dict.fromkeys(("zero_grad", "no_sync"), "nothing in its place: trainer.train_step and trainer.step do it"),
    **dict.fromkeys(("optimizer_step", "step_optimizer"), "trainer.step()"),
    **dict.fromkeys(("accumulate", "split", "micro_batches"), "`for attempt in trainer.microbatches(batch):`"),
    **dict.fromkeys(
        ("clip_grad_norm_", "clip_grad_norm", "clip_gradients"),
        "MemoryEfficientTrainingWrapper(model, optimizer, max_grad_norm=1.0)",
    ),
    **dict.fromkeys(
        ("clip_grad_value_", "register_gradient_hook"),
        "MemoryEfficientTrainingWrapper(model, optimizer, on_gradients=look)",
    ),
    **dict.fromkeys(
        ("evaluate", "validate", "test", "predict", "validation_step"), "`with trainer.evaluation() as evaluate:`"
    ),
    **dict.fromkeys(("save", "save_state", "save_checkpoint", "save_model", "save_pretrained"), _SAVE),
    **dict.fromkeys(
        ("load", "load_state", "load_checkpoint", "restore"),
        "mk.TrainingStateManager(folder).restore(**trainer.parts())",
    ),
    **dict.fromkeys(("prepare", "setup", "unwrap_model"), "trainer.model: it is the model that you passed"),
    **dict.fromkeys(("optimizer", "optimizers"), "trainer.parts()['optimizer']"),
    **dict.fromkeys(("scheduler", "lr_scheduler"), "trainer.parts()['scheduler']"),
    **dict.fromkeys(
        ("scale", "scaler", "unscale_", "unscale_gradients"), "nothing in its place: the step scales and unscales"
    ),
    **dict.fromkeys(("grad_norm", "loss", "outputs"), "result = trainer.train_step(batch, loss_fn), which has it"),
    **dict.fromkeys(("backward_step", "manual_backward"), "trainer.backward(loss)"),
    "device": "next(trainer.model.parameters()).device",
    "accumulation_steps": "result.num_microbatches, of result = trainer.train_step(batch, loss_fn)",
}

ACCUMULATOR_ABSENT: Mapping[str, str] = {
    "()": "accumulator.backward(loss, count=len(x))",
    **dict.fromkeys(
        ("steps", "gradient_accumulation_steps", "num_accumulation_steps"), "accumulator.accumulation_steps"
    ),
    **dict.fromkeys(("zero_grad", "no_sync"), "nothing in its place: accumulator.step() does it"),
    **dict.fromkeys(("accumulate", "add", "manual_backward"), "accumulator.backward(loss, count=len(x))"),
    **dict.fromkeys(
        ("clip_grad_norm_", "clip_grad_norm", "clip_gradients"), "GradientAccumulator(optimizer, max_grad_norm=1.0)"
    ),
    **dict.fromkeys(("scale", "unscale_", "update"), "GradientAccumulator(optimizer, scaler=scaler)"),
    **dict.fromkeys(
        ("train_step", "training_step"),
        "mk.MemoryEfficientTrainingWrapper(model, optimizer).train_step(batch, loss_fn)",
    ),
    **dict.fromkeys(("should_step", "sync_gradients", "is_last"), "`if accumulator.step():`"),
    "finish": "accumulator.flush()",
    "reset": "accumulator.discard()",
}

RESULT_ABSENT: Mapping[str, str] = {
    "float()": "float(result.loss)",
    "iter()": "result.loss, result.grad_norm",
    **{name: f"result.loss.{name}()" for name in ("item", "detach", "cpu", "tolist")},
    **dict.fromkeys(("metrics", "logs", "output", "logits", "log"), "result.outputs"),
    **dict.fromkeys(("loss_value", "mean_loss", "total_loss", "training_loss"), "result.loss"),
    **dict.fromkeys(("norm", "gradient_norm", "total_norm"), "result.grad_norm"),
    **dict.fromkeys(("skipped", "did_step", "has_stepped"), "result.stepped"),
    **dict.fromkeys(
        ("gradients", "grads", "grad"), "MemoryEfficientTrainingWrapper(model, optimizer, on_gradients=look)"
    ),
    "backward": "nothing in its place: train_step ran backward and the optimizer's step",
}


def _step_of(args: tuple[Any, ...]) -> str | None:
    """The corrected call of ``train_step(batch)`` and of ``train_step(x, y, loss_fn)``."""
    if len(args) <= 1:
        return "trainer.train_step((x, y), lambda model, batch: criterion(model(batch[0]), batch[1]))"
    return f"trainer.train_step({'(x, y)' if len(args) == _ROWS_TARGETS_LOSS else '(x, y, ...)'}, loss_fn)"


def _wrapper_of(args: tuple[Any, ...]) -> str | None:
    """The corrected call of ``MemoryEfficientTrainingWrapper(model, optimizer, scheduler)``, by kinds."""
    if args:
        refuse_trainer(args[0], has_optimizer=len(args) > 1)
    call = "MemoryEfficientTrainingWrapper(model, optimizer"
    for value in args[2:]:
        if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
            call += ", scheduler=scheduler"
        elif isinstance(value, torch.amp.GradScaler):
            call += ", scaler=scaler"
        elif type(value) is int:
            call += f", accumulation_steps={value}"
        elif type(value) is float:
            call += f", max_grad_norm={value}"
        elif not callable(value):  # a criterion goes into each step
            return None
    return call + ")" if args[2:] else None


def _accumulator_of(args: tuple[Any, ...]) -> str | None:
    """The corrected call of ``GradientAccumulator(model, optimizer, 4)``."""
    if not isinstance(args[0], nn.Module):
        return None
    number = next((each for each in args if type(each) is int), 1)
    return f"GradientAccumulator(optimizer, accumulation_steps={number}, model=model)"


WRAPPER_REWRITE = {"__init__": _wrapper_of, "train_step": _step_of}
ACCUMULATOR_REWRITE = {"__init__": _accumulator_of}
