"""One published figure of FSDP2: Llama 3.1 8B on 8 H100, as torchtitan trains it, against the estimate.

The model is written anew from the sizes of the paper, as torchtitan arranged it at the end of 2024: rotary positions as
complex numbers, RMSNorm written out, float32 logits; every block checkpointed but for attention and every second
product of matrices; float32 parameters that are gathered in bfloat16 and reduced in float32; AdamW. Source of the
figures: pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3. Its memory is the most that
the allocator reserved. The settings of its allocator are not said: both kinds are estimated.

Run: python -m benchmarks.cases.shards_published   (1 minute)
"""

from __future__ import annotations

import json
import warnings
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from benchmarks.result import write_result
from memkit._simulation.ranks import as_first_rank
from memkit._simulation.shard import Shard
from memkit._simulation.simulation import Gpu, TrainingStep
from memkit.predict.estimate import MemoryEstimate
from memkit.predict.gpus import find_gpu

_aten = torch.ops.aten
WIDTH, NUM_BLOCKS, HEADS, KV_HEADS, HIDDEN, VOCABULARY = 4096, 32, 32, 8, 14336, 128256
ROWS, LENGTH = 2, 8192
PUBLISHED_GIB = {8: 82.4, 128: 67.0}
SETTINGS = ("", "expandable_segments:True")
SAVED = (
    _aten.mm.default,
    _aten._scaled_dot_product_flash_attention.default,  # noqa: SLF001 - its name
    _aten._scaled_dot_product_efficient_attention.default,  # noqa: SLF001
)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        full = x.float()
        return (full * torch.rsqrt(full.square().mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


def rotated(x: Tensor, turns: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns[:, None]).flatten(3).type_as(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = Norm(), Norm()
        kv_width = WIDTH // HEADS * KV_HEADS
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, n, bias=False) for n in (WIDTH, kv_width, kv_width, WIDTH))
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def attend(self, x: Tensor, turns: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, WIDTH // HEADS)) for layer in (self.q, self.k, self.v))
        q, k = rotated(q, turns), rotated(k, turns)
        k, v = (y[:, :, :, None].expand(-1, -1, -1, HEADS // KV_HEADS, -1).flatten(2, 3) for y in (k, v))
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # assumed of that run; 2.13 takes cuDNN's on an H100
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def whole(self, x: Tensor, turns: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x), turns)
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))  # type: ignore[no-any-return]

    def forward(self, x: Tensor, turns: Tensor) -> Any:
        return checkpoint(self.whole, x, turns, use_reentrant=False, context_fn=selectively, preserve_rng_state=False)


def selectively() -> Any:
    num_products = {False: 0, True: 0}

    def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if operator is _aten.mm.default:
            num_products[context.is_recompute] += 1
        is_second = operator is _aten.mm.default and num_products[context.is_recompute] % 2 == 0
        return CheckpointPolicy.MUST_SAVE if operator in SAVED and not is_second else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.register_buffer("turns", torch.zeros(LENGTH, WIDTH // HEADS // 2, dtype=torch.complex64))
        self.layers = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.norm = Norm()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.turns)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def loss_fn(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())


def measure(ranks: int, settings: str) -> dict[str, Any]:
    with torch.device("meta"):
        model = Llama()
    shard = Shard("fsdp2", ranks, ("layers.*",), param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    tokens = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    card = Gpu(find_gpu("H100"), settings=settings)
    record = TrainingStep(model, tokens, loss_fn).record(card, spread=partial(as_first_rank, shard))
    estimate = MemoryEstimate.of(record)
    reserved_gib = (estimate.reserved_bytes or 0) / 2**30
    return {
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        **{key: value for key, value in estimate.as_dict().items() if key.endswith("_bytes")},
        "published_gib": PUBLISHED_GIB[ranks],
        "reserved_gib": round(reserved_gib, 2),
        "reserved_to_published": round(reserved_gib / PUBLISHED_GIB[ranks], 4),
    }


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    figures = {
        f"{ranks} ranks, {settings or 'default allocator'}": measure(ranks, settings)
        for ranks in PUBLISHED_GIB
        for settings in SETTINGS
    }
    print(json.dumps(figures, indent=2))
    print(write_result("shards_published", figures))


if __name__ == "__main__":
    main()
