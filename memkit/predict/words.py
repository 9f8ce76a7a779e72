"""How other libraries, and other calls of this one, name the arguments of predictions and plans."""

from __future__ import annotations

SIZE_OF_AN_ESTIMATE = "a size is asked of the result, as in estimate.fits('24GiB')"
_BATCH = "batch_size is that of sample_batch, so pass a batch of that size"

PRECISIONS = {
    **dict.fromkeys(("mixed_precision", "amp_dtype", "dtype"), "precision"),
    **dict.fromkeys(("bf16", "use_amp", "amp", "autocast"), "precision='bf16-mixed'"),
    **dict.fromkeys(("fp16", "half"), "precision='fp16-mixed'"),
}
"""Foreign words of ``precision``."""

STEP_WORDS = {
    **dict.fromkeys(
        ("input_data", "inputs", "example_inputs", "batch", "data", "x", "loader", "dataloader"), "sample_batch"
    ),
    **dict.fromkeys(("input_size", "input_shape", "shape"), "sample_batch=torch.empty(shape)"),
    **dict.fromkeys(
        ("criterion", "loss", "loss_function", "loss_func"),
        "loss_fn=lambda model, batch: criterion(model(batch[0]), batch[1])",
    ),
    **dict.fromkeys(("optim", "opt", "optimizer_cls", "optimizers"), "optimizer"),
    **dict.fromkeys(("batch_size", "per_device_train_batch_size", "train_micro_batch_size_per_gpu"), _BATCH),
    **dict.fromkeys(("lr", "learning_rate"), "a learning rate takes no memory"),
    **dict.fromkeys(
        ("gradient_checkpointing", "checkpointing", "use_checkpoint"),
        "apply it to the model first, mk.train.Checkpointing(model, 'auto'), or let plan_training choose",
    ),
    **dict.fromkeys(
        ("requires_grad", "training", "mode"),
        "a step without gradients is one of profile_scaling(..., modes=('inference',))",
    ),
}
"""Foreign words of what describes a step."""

ESTIMATE_WORDS = {
    **STEP_WORDS,
    **PRECISIONS,
    **dict.fromkeys(("gpu", "card", "device", "gpu_name"), "target"),
    **dict.fromkeys(
        ("budget", "memory", "limit", "capacity", "max_memory", "gpu_memory_gb", "memory_budget"), SIZE_OF_AN_ESTIMATE
    ),
    **dict.fromkeys(
        ("gradient_accumulation_steps", "accumulate_grad_batches", "grad_accum", "steps", "num_microbatches"),
        "accumulation_steps",
    ),
    **dict.fromkeys(
        ("strategy", "zero_stage", "num_gpus", "world_size", "devices"), "shard=mk.predict.Shard('fsdp2', ranks=2)"
    ),
    **dict.fromkeys(
        ("offload_optimizer", "cpu_offload"),
        "run the step with the wrapper inside a VirtualGPU to see what offloading saves",
    ),
}
"""Foreign words of `memkit.estimate_memory_usage`."""

PLAN_WORDS = {
    **STEP_WORDS,
    **dict.fromkeys(("gpu", "card", "memory", "limit", "capacity", "max_memory", "memory_budget"), "budget"),
    "device": "target",
    **dict.fromkeys(("precision", *PRECISIONS), "precisions=(None, 'bf16-mixed')"),
    **dict.fromkeys(
        ("gradient_accumulation_steps", "accumulate_grad_batches", "accumulation_steps", "grad_accum"),
        "the plan chooses the number of micro-batches; micro_batch_size fixes their rows",
    ),
    **dict.fromkeys(
        ("batch_size", "per_device_train_batch_size", "train_micro_batch_size_per_gpu"), "micro_batch_size"
    ),
    **dict.fromkeys(
        ("gradient_checkpointing", "checkpointing", "checkpoint", "offload"),
        "the plan chooses which blocks are treated",
    ),
    **dict.fromkeys(("gradient_clip_val", "clip_grad", "grad_clip", "max_norm"), "max_grad_norm"),
    **dict.fromkeys(("lr_scheduler", "schedule"), "scheduler"),
}
"""Foreign words of `memkit.plan_training` and `memkit.prepare`."""

ADVICE_WORDS = ESTIMATE_WORDS | {
    **dict.fromkeys(("memory", "limit", "capacity", "max_memory", "memory_budget"), "budget"),
    **dict.fromkeys(
        ("gradient_accumulation_steps", "accumulation_steps"), "advise looks at one batch, and suggests how to cut it"
    ),
    **dict.fromkeys(
        ("shard", "strategy", "zero_stage"),
        "advise looks at one process; estimate_memory_usage(..., shard=...) predicts a rank",
    ),
}
"""Foreign words of `memkit.advise`."""

GPU_WORDS = {
    **dict.fromkeys(("name", "card", "target", "device"), "gpu"),
    **dict.fromkeys(
        ("memory", "budget", "limit", "capacity", "total_memory", "size"),
        "a card has the memory that `memkit gpus` lists, so name a smaller card",
    ),
    **dict.fromkeys(("torch_version", "version", "pytorch"), "torch"),
    **dict.fromkeys(("cudnn_version",), "cudnn"),
    **dict.fromkeys(("alloc_conf", "allocator", "settings", "PYTORCH_CUDA_ALLOC_CONF"), "allocator_settings"),
}
"""Foreign words of `memkit.VirtualGPU`."""
