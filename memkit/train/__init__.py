"""Training steps that fit in memory."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memkit._gradients.loss import Loss as Loss
    from memkit._recovery.attempt import recover_from_oom as recover_from_oom
    from memkit._recovery.errors import is_out_of_memory as is_out_of_memory
    from memkit.train.accumulate import GradientAccumulator as GradientAccumulator
    from memkit.train.backward_steps import step_in_backward as step_in_backward
    from memkit.train.checkpointing import Checkpointing as Checkpointing
    from memkit.train.chunked_steps import atomic_steps as atomic_steps
    from memkit.train.contrastive import cached_backward as cached_backward
    from memkit.train.loader import make_dataloader as make_dataloader, to_device as to_device
    from memkit.train.offload import offload_activations as offload_activations
    from memkit.train.parameterwise import (
        materialize_state as materialize_state,
        register_parameterwise as register_parameterwise,
    )
    from memkit.train.penalty import gradient_penalty as gradient_penalty
    from memkit.train.saved_tensors import treat_saved_tensors as treat_saved_tensors
    from memkit.train.split_check import check_split as check_split
    from memkit.train.split_loss import SplitLoss as SplitLoss
    from memkit.train.state_offload import offload_state as offload_state
    from memkit.train.wrapper import MemoryEfficientTrainingWrapper as MemoryEfficientTrainingWrapper
else:  # a type checker would accept any name through `__getattr__`
    from memkit._core.lazy import load_lazily

    _HOMES = {
        "Checkpointing": "memkit.train.checkpointing",
        "GradientAccumulator": "memkit.train.accumulate",
        "Loss": "memkit._gradients.loss",
        "MemoryEfficientTrainingWrapper": "memkit.train.wrapper",
        "check_split": "memkit.train.split_check",
        "SplitLoss": "memkit.train.split_loss",
        "atomic_steps": "memkit.train.chunked_steps",
        "cached_backward": "memkit.train.contrastive",
        "gradient_penalty": "memkit.train.penalty",
        "is_out_of_memory": "memkit._recovery.errors",
        "make_dataloader": "memkit.train.loader",
        "materialize_state": "memkit.train.parameterwise",
        "offload_activations": "memkit.train.offload",
        "treat_saved_tensors": "memkit.train.saved_tensors",
        "offload_state": "memkit.train.state_offload",
        "recover_from_oom": "memkit._recovery.attempt",
        "register_parameterwise": "memkit.train.parameterwise",
        "step_in_backward": "memkit.train.backward_steps",
        "to_device": "memkit.train.loader",
    }
    __getattr__, __dir__, __all__ = load_lazily(__name__, _HOMES)
