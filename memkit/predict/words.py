"""How other libraries name the arguments of predictions and plans, for `memkit._core.words.guided`."""

from __future__ import annotations

from memkit._core.foreign import ACCUMULATION, BATCH_SIZE, CHECKPOINTING, HALF_PRECISION, LIMIT, LOSS, RANKS

SIZE_OF_AN_ESTIMATE = "check a size on the result, as in estimate.fits('24GiB')"

STEP_WORDS = {
    "sample_batch": "input_data inputs example_inputs batch data x loader dataloader",
    "sample_batch=torch.empty(shape)": "input_size input_shape shape",
    "loss_fn=lambda model, batch: criterion(model(batch[0]), batch[1])": LOSS,
    "batch_size is that of sample_batch, so pass a batch of that size": BATCH_SIZE,
    "a learning rate takes no memory": "lr learning_rate",
    "apply it to the model first, mk.train.Checkpointing(model, 'auto'), or let plan_training choose": CHECKPOINTING,
    "profile_scaling(..., modes=('inference',)) measures a step without gradients": "requires_grad training mode",
}
"""Foreign words for the arguments that describe a step."""

ESTIMATE_WORDS = STEP_WORDS | {
    "target": "gpu card device gpu_name",
    SIZE_OF_AN_ESTIMATE: f"{LIMIT} gpu_memory_gb",
    "shard=mk.predict.Shard('fsdp2', ranks=2)": f"{RANKS} zero_stage devices",
    "run the step with the wrapper inside a VirtualGPU to see what offloading saves": "offload_optimizer cpu_offload",
}
"""Foreign words for arguments of `memkit.estimate_memory_usage`."""

PLAN_WORDS = STEP_WORDS | {
    "budget": f"gpu card {LIMIT}",
    "target": "device",
    "activation_budget": "activation_memory_budget saved_bytes",
    "precisions=(None, 'bf16-mixed')": f"{HALF_PRECISION} mixed_precision precision dtype",
    "the plan chooses the number of micro-batches; micro_batch_size fixes their rows": ACCUMULATION,
    "micro_batch_size": BATCH_SIZE,
    "the plan chooses which blocks are treated": f"{CHECKPOINTING} checkpoint offload",
}
"""Foreign words for arguments of `memkit.plan_training` and `memkit.prepare`."""

ADVICE_WORDS = ESTIMATE_WORDS | {
    "budget": LIMIT,
    "advise looks at one batch, and suggests how to cut it": ACCUMULATION,
    "advise looks at one process; estimate_memory_usage(..., shard=...) predicts a rank": "shard strategy zero_stage",
}
"""Foreign words for arguments of `memkit.advise`."""

GPU_WORDS = {
    "gpu": "name target",
    "a card has the memory that `memkit gpus` lists, so name a smaller card": f"{LIMIT} total_memory size",
    "torch": "torch_version version pytorch",
    "cudnn": "cudnn_version",
    "allocator_settings": "alloc_conf allocator settings PYTORCH_CUDA_ALLOC_CONF",
}
"""Foreign words for arguments of `memkit.VirtualGPU`."""
