"""Other libraries' names for features of the wrapper and the accumulator, with the corresponding call here."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from memkit._core.foreign import BATCH_SIZE, EPOCHS, HALF_PRECISION, LOAD, LOADER, LOSS, RANKS, SAVE
from memkit.train.owners import refuse_trainer

_GRADIENTS = "keep_gradients keep_grads retain_gradients log_gradients track_grad_norm gradient_hook"
_ROWS_TARGETS_LOSS = 3

_SHARED = {
    "the loader makes the batches, and accumulation_steps=n cuts each into n micro-batches": (
        f"{BATCH_SIZE} micro_batch_size microbatch_size"
    ),
    "the optimizer has it: torch.optim.AdamW(model.parameters(), lr=...)": (
        "lr learning_rate weight_decay betas momentum"
    ),
    "wrap the model first: torch.nn.parallel.DistributedDataParallel(model)": RANKS,
}

WRAPPER_WORDS = _SHARED | {
    "memory='22GiB'": "target gpu_memory gpu_memory_gb",
    "move the model first: model.to('cuda')": "device devices gpu cuda accelerator place_model_on_device",
    "it goes into each step: trainer.train_step(batch, loss_fn)": LOSS,
    "it goes into the loop: mk.MemoryEfficientTrainLoop(trainer, loader, loss_fn)": LOADER,
    "the loop has it: mk.MemoryEfficientTrainLoop(trainer, loader, loss_fn).run(num_epochs=1)": f"{EPOCHS} max_steps",
    "on_gradients=look": _GRADIENTS,
    "offload={'optimizer'}": (
        "cpu_offload offload_optimizer offload_optimizer_state zero_stage offload_optimizer_device"
    ),
    "offload={'activations'}": "offload_activations activation_offload activation_offloading",
    "average": "ema ema_model swa_model average_model",
    "on_oom": "oom on_out_of_memory handle_oom",
    "on_oom='exact'": "auto_find_batch_size retry_on_oom recover_from_oom",
    "compile first: model = torch.compile(model)": "compile torch_compile use_compile",
    "on_gradients=lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)": (
        "clip_value clip_grad_value gradient_clip_algorithm"
    ),
    "the loader has it": "collate_fn",
    "a config goes in this way: MemoryEfficientTrainingWrapper.from_config(model, optimizer, config)": "config",
}

ACCUMULATOR_WORDS = _SHARED | {
    "compute the loss inside torch.autocast(...)": f"{HALF_PRECISION} mixed_precision precision",
    "it goes into each micro-batch: accumulator.backward(loss, count=len(x))": LOSS,
    "optimizer.register_step_pre_hook(look) shows the gradients": _GRADIENTS,
    "write `if accumulator.step(): scheduler.step()` in the loop": "scheduler lr_scheduler",
}

_OF_THE_MODEL = "parameters named_parameters named_modules modules buffers children train half bfloat16 float"

WRAPPER_ABSENT = {
    **{f"trainer.model.{name}()": name for name in _OF_THE_MODEL.split()},
    "trainer.model(x)": "() forward",
    "for batch in loader: trainer.train_step(batch, loss_fn)": "iter()",
    "trainer.model[0], the model that you passed": "[]",
    "trainer.model.training": "training",
    "model.to(device) before MemoryEfficientTrainingWrapper(model, optimizer)": "to",
    "trainer.model.requires_grad_(False)": "requires_grad_",
    "`with trainer.evaluation() as evaluate:`, or trainer.model.eval()": "eval",
    "mk.MemoryEfficientTrainLoop(trainer, loader, loss_fn).run(num_epochs=1)": "fit run train_epoch train_loop",
    "trainer.train_step(batch, loss_fn)": "training_step optimize update",
    "nothing in its place: trainer.train_step and trainer.step do it": "zero_grad no_sync",
    "trainer.step()": "optimizer_step step_optimizer",
    "`for attempt in trainer.microbatches(batch):`": "accumulate split micro_batches",
    "MemoryEfficientTrainingWrapper(model, optimizer, max_grad_norm=1.0)": (
        "clip_grad_norm_ clip_grad_norm clip_gradients"
    ),
    "MemoryEfficientTrainingWrapper(model, optimizer, on_gradients=look)": "clip_grad_value_ register_gradient_hook",
    "`with trainer.evaluation() as evaluate:`": "evaluate validate test predict validation_step",
    "mk.TrainingStateManager(folder).save(step, **trainer.parts())": f"{SAVE} save_model save_pretrained",
    "mk.TrainingStateManager(folder).restore(**trainer.parts())": f"{LOAD} restore",
    "trainer.model: it is the model that you passed": "prepare setup unwrap_model",
    "trainer.parts()['optimizer']": "optimizer optimizers",
    "trainer.parts()['scheduler']": "scheduler lr_scheduler",
    "nothing in its place: the step scales and unscales": "scale scaler unscale_ unscale_gradients",
    "result = trainer.train_step(batch, loss_fn), which has it": "loss outputs",
    "trainer.backward(loss)": "backward_step manual_backward",
    "next(trainer.model.parameters()).device": "device",
    "result.num_microbatches, of result = trainer.train_step(batch, loss_fn)": "accumulation_steps",
}

ACCUMULATOR_ABSENT = {
    "accumulator.backward(loss, count=len(x))": "() accumulate add manual_backward",
    "for x, y in loader: accumulator.backward(criterion(model(x), y), count=len(x)); accumulator.step()": "iter()",
    "accumulator.accumulation_steps": "steps gradient_accumulation_steps num_accumulation_steps",
    "nothing in its place: accumulator.step() does it": "zero_grad no_sync",
    "GradientAccumulator(optimizer, max_grad_norm=1.0)": "clip_grad_norm_ clip_grad_norm clip_gradients",
    "GradientAccumulator(optimizer, scaler=scaler)": "scale unscale_ update",
    "mk.MemoryEfficientTrainingWrapper(model, optimizer).train_step(batch, loss_fn)": "train_step training_step",
    "`if accumulator.step():`": "should_step sync_gradients is_last",
    "accumulator.flush()": "finish",
    "accumulator.discard()": "reset",
}

RESULT_ABSENT = {
    **{f"result.loss.{name}()": name for name in ("item", "detach", "cpu", "tolist")},
    "float(result.loss)": "float() +",
    "f'{float(result.loss):.3f}'": "format()",
    "result.loss, or result.outputs[0]": "[]",
    "result.loss, result.grad_norm": "iter()",
    "result.outputs": "metrics logs output logits log",
    "result.loss": "loss_value mean_loss total_loss training_loss",
    "result.grad_norm": "norm gradient_norm total_norm",
    "result.stepped": "skipped did_step has_stepped",
    "MemoryEfficientTrainingWrapper(model, optimizer, on_gradients=look)": "gradients grads grad",
    "nothing in its place: train_step ran backward and the optimizer's step": "backward",
}


def _step_of(args: tuple[Any, ...]) -> str | None:
    """Return the corrected call for ``train_step(batch)`` and for ``train_step(x, y, loss_fn)``."""
    if len(args) <= 1:
        return "trainer.train_step((x, y), lambda model, batch: criterion(model(batch[0]), batch[1]))"
    return f"trainer.train_step({'(x, y)' if len(args) == _ROWS_TARGETS_LOSS else '(x, y, ...)'}, loss_fn)"


def _wrapper_of(args: tuple[Any, ...]) -> str | None:
    """Return the corrected call for ``MemoryEfficientTrainingWrapper(model, optimizer, scheduler)``, by types."""
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
    """Return the corrected call for ``GradientAccumulator(model, optimizer, 4)``."""
    if not isinstance(args[0], nn.Module):
        return None
    number = next((each for each in args if type(each) is int), 1)
    return f"GradientAccumulator(optimizer, accumulation_steps={number}, model=model)"


WRAPPER_REWRITE = {"__init__": _wrapper_of, "train_step": _step_of}
ACCUMULATOR_REWRITE = {"__init__": _accumulator_of}
