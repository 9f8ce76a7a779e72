"""How other libraries, and other calls of this one, name the arguments of predictions and plans."""

from __future__ import annotations

from memkit._core.calls import by_word

SIZE_OF_AN_ESTIMATE = "a size is asked of the result, as in estimate.fits('24GiB')"
_BATCH = "batch_size is that of sample_batch, so pass a batch of that size"

PRECISIONS = by_word(
    {
        "precision": "mixed_precision amp_dtype dtype",
        "precision='bf16-mixed'": "bf16 use_amp amp autocast",
        "precision='fp16-mixed'": "fp16 half",
    }
)
"""Foreign words of ``precision``."""

STEP_WORDS = by_word(
    {
        "sample_batch": "input_data inputs example_inputs batch data x loader dataloader",
        "sample_batch=torch.empty(shape)": "input_size input_shape shape",
        "loss_fn=lambda model, batch: criterion(model(batch[0]), batch[1])": "criterion loss loss_function loss_func",
        "optimizer": "optim opt optimizer_cls optimizers",
        _BATCH: "batch_size per_device_train_batch_size train_micro_batch_size_per_gpu",
        "a learning rate takes no memory": "lr learning_rate",
        "apply it to the model first, mk.train.Checkpointing(model, 'auto'), or let plan_training choose": (
            "gradient_checkpointing checkpointing use_checkpoint"
        ),
        "a step without gradients is one of profile_scaling(..., modes=('inference',))": "requires_grad training mode",
    }
)
"""Foreign words of what describes a step."""

ESTIMATE_WORDS = (
    STEP_WORDS
    | PRECISIONS
    | by_word(
        {
            "target": "gpu card device gpu_name",
            SIZE_OF_AN_ESTIMATE: "budget memory limit capacity max_memory gpu_memory_gb memory_budget",
            "accumulation_steps": (
                "gradient_accumulation_steps accumulate_grad_batches grad_accum steps num_microbatches"
            ),
            "shard=mk.predict.Shard('fsdp2', ranks=2)": "strategy zero_stage num_gpus world_size devices",
            "run the step with the wrapper inside a VirtualGPU to see what offloading saves": (
                "offload_optimizer cpu_offload"
            ),
        }
    )
)
"""Foreign words of `memkit.estimate_memory_usage`."""

PLAN_WORDS = STEP_WORDS | by_word(
    {
        "budget": "gpu card memory limit capacity max_memory memory_budget",
        "target": "device",
        "precisions=(None, 'bf16-mixed')": (
            "precision mixed_precision amp_dtype dtype bf16 use_amp amp autocast fp16 half"
        ),
        "the plan chooses the number of micro-batches; micro_batch_size fixes their rows": (
            "gradient_accumulation_steps accumulate_grad_batches accumulation_steps grad_accum"
        ),
        "micro_batch_size": "batch_size per_device_train_batch_size train_micro_batch_size_per_gpu",
        "the plan chooses which blocks are treated": "gradient_checkpointing checkpointing checkpoint offload",
        "max_grad_norm": "gradient_clip_val clip_grad grad_clip max_norm",
        "scheduler": "lr_scheduler schedule",
    }
)
"""Foreign words of `memkit.plan_training` and `memkit.prepare`."""

ADVICE_WORDS = ESTIMATE_WORDS | by_word(
    {
        "budget": "memory limit capacity max_memory memory_budget",
        "advise looks at one batch, and suggests how to cut it": "gradient_accumulation_steps accumulation_steps",
        "advise looks at one process; estimate_memory_usage(..., shard=...) predicts a rank": (
            "shard strategy zero_stage"
        ),
    }
)
"""Foreign words of `memkit.advise`."""

GPU_WORDS = by_word(
    {
        "gpu": "name card target device",
        "a card has the memory that `memkit gpus` lists, so name a smaller card": (
            "memory budget limit capacity total_memory size"
        ),
        "torch": "torch_version version pytorch",
        "cudnn": "cudnn_version",
        "allocator_settings": "alloc_conf allocator settings PYTORCH_CUDA_ALLOC_CONF",
    }
)
"""Foreign words of `memkit.VirtualGPU`."""
