"""Steps of `transformers` models: built from a config with random weights, on real bytes and pictures."""

from __future__ import annotations

import tokenize
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from sklearn.datasets import load_digits
from torch import Tensor

from tests.predict.step import Step

_BYTES = bytearray(Path(tokenize.__file__).read_bytes())
_SMALL = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_WIDE = _SMALL | {"intermediate_size": 128}
_DECODER = _WIDE | {"num_key_value_heads": 2, "max_position_embeddings": 64}
_SPEECH = {"conv_dim": (32, 32), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_conv_pos_embeddings": 16}


def text(num_rows: int = 4, length: int = 64) -> Tensor:
    """The source of a module of the standard library, a token for each byte."""
    return torch.frombuffer(_BYTES, dtype=torch.uint8)[: num_rows * length].view(num_rows, length).long()


def pictures() -> Tensor:
    """Handwritten digits, in three colors of 32 x 32."""
    digits = torch.from_numpy(load_digits().images[:4]).float() / 16
    return digits.repeat_interleave(4, 1).repeat_interleave(4, 2)[:, None].expand(-1, 3, -1, -1).contiguous()


def sound() -> Tensor:
    """Bytes as air pressure."""
    return text(4, 1600).float() / 64 - 2


def digit_labels() -> Tensor:
    return torch.from_numpy(load_digits().target[:4]).long()


def _step(model: str, config: str, options: dict[str, Any], batch: Callable[[], dict[str, Any]]) -> Step:
    torch.manual_seed(0)
    np.random.seed(0)  # speech models draw their masks with NumPy
    network = getattr(transformers, model)(getattr(transformers, config)(**options)).train()
    return Step(network, batch(), lambda model, batch: model(**batch).loss)


def _language(**more: Any) -> dict[str, Any]:
    return {"input_ids": text(), "labels": text(), **more}


def _no_padding() -> dict[str, Any]:
    return _language(attention_mask=torch.ones(4, 64, dtype=torch.int64))


def _padding() -> dict[str, Any]:
    return _language(attention_mask=(torch.arange(64) < torch.tensor([[64], [50], [64], [30]])).long())


def _vision() -> dict[str, Any]:
    return {"pixel_values": pictures(), "labels": digit_labels()}


_MODELS: dict[str, tuple[str, str, dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 4}, _language),
    "llama": ("LlamaForCausalLM", "LlamaConfig", _DECODER, _no_padding),
    "mistral_window": ("MistralForCausalLM", "MistralConfig", _DECODER | {"sliding_window": 16}, _language),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", _DECODER | {"head_dim": 16}, _language),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", _DECODER | {"pad_token_id": 0}, _padding),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", _DECODER | {"num_local_experts": 4}, _language),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        _DECODER | {"head_dim": 16, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2},
        _language,
    ),
    "mamba": (
        "MambaForCausalLM",
        "MambaConfig",
        {"vocab_size": 256, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 1},
        lambda: {"input_ids": text(2, 16), "labels": text(2, 16)},
    ),
    "mamba2": (
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {"vocab_size": 256, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2}
        | {"head_dim": 16, "num_heads": 4, "n_groups": 1, "chunk_size": 32},
        _language,
    ),
    "bert": ("BertForMaskedLM", "BertConfig", _WIDE | {"max_position_embeddings": 64}, _padding),
    "bert_full": ("BertForMaskedLM", "BertConfig", _WIDE | {"max_position_embeddings": 64}, _no_padding),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", _WIDE | {"max_position_embeddings": 80}, _language),
    "deberta": (
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        _WIDE | {"max_position_embeddings": 64, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
        _language,
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": 256, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
        | {"decoder_start_token_id": 0},
        _language,
    ),
    "bart": (
        "BartForConditionalGeneration",
        "BartConfig",
        {"vocab_size": 256, "d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 64}
        | dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4)
        | dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 128),
        _no_padding,
    ),
    "vit": (
        "ViTForImageClassification",
        "ViTConfig",
        _WIDE | {"image_size": 32, "patch_size": 8, "num_labels": 10},
        _vision,
    ),
    "swin": (
        "SwinForImageClassification",
        "SwinConfig",
        {"image_size": 32, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4, "num_labels": 10},
        _vision,
    ),
    "convnext": (
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2, "num_labels": 10},
        _vision,
    ),
    "resnet_hf": (
        "ResNetForImageClassification",
        "ResNetConfig",
        {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "num_labels": 10},
        _vision,
    ),
    "segformer": (
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        {"hidden_sizes": [16, 32], "depths": [1, 1], "num_encoder_blocks": 2, "sr_ratios": [2, 1], "num_labels": 5}
        | {"num_attention_heads": [1, 2], "patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [2, 2]}
        | {"decoder_hidden_size": 32},
        lambda: {"pixel_values": pictures(), "labels": (4 * pictures()[:, 0]).long()},
    ),
    "clip": (
        "CLIPModel",
        "CLIPConfig",
        {
            "text_config": _WIDE | {"max_position_embeddings": 64, "eos_token_id": 10},
            "vision_config": _WIDE | {"image_size": 32, "patch_size": 8},
            "projection_dim": 32,
        },
        lambda: {"input_ids": text(), "pixel_values": pictures(), "return_loss": True},
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {"vocab_size": 256, "num_mel_bins": 16, "d_model": 64, "encoder_layers": 1, "decoder_layers": 1}
        | dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4)
        | dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 128)
        | {"max_source_positions": 32, "max_target_positions": 64, "pad_token_id": 0, "decoder_start_token_id": 1}
        | {"bos_token_id": 1, "eos_token_id": 2},
        lambda: {"input_features": sound()[:, :1024].reshape(4, 16, 64), "labels": text()},
    ),
    "wav2vec2": (
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        _WIDE | _SPEECH | {"num_conv_pos_embedding_groups": 4, "layerdrop": 0.0},
        lambda: {"input_values": sound(), "labels": text(4, 20)},
    ),
}


def _checkpointed() -> Step:
    step = _step(*_MODELS["llama"][:3], _language)
    step.model.activation_checkpointing_enable()
    return step


def _half() -> Step:
    step = _step(*_MODELS["llama"])
    step.precision = "bf16-mixed"
    return step


STEPS: dict[str, Callable[[], Step]] = {
    **{name: partial(_step, *model) for name, model in _MODELS.items()},
    "llama_checkpointed": _checkpointed,
    "llama_bfloat16": _half,
}
