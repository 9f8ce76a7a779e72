"""Public runs whose memory was recorded on real GPUs, as replicas that make the same allocations in the same order.

Each replica was written anew after the source that the run's owner published, and runs on a virtual GPU:
github.com/Wedsonlin/assignment2-systems at 87b0864, cs336_systems/nsys_profile.py (the language model), and
github.com/silmont2000/assignment2-systems at 75d09aa, cs336_systems/debug_memory.py (attention). The recordings are in
the same repositories; replayed block by block on the allocator model, they give the figures of `RUNS`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from memkit._simulation.cuda.allocator import Block
from memkit.predict.virtual_gpu import VirtualGPU
from tests.simulation.allocator_replay import ALLOC, FOLDER as TRACES, FREE_REQUESTED

# ------------------------------------------------------------- the language model of a university course (CS336)


class Projection(nn.Module):
    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width_out, width_in))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bsi,oi->bso", x, self.weight)


class Table(nn.Module):
    def __init__(self, num_rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows, width))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens, :]


class RootMeanSquareNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        x = x * scale
        return (self.weight * x).to(dtype)


class Rotation(nn.Module):
    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.register_buffer("cache", torch.empty(2, length, width // 2))

    def forward(self, x: Tensor) -> Tensor:
        *leading, length, width = x.shape
        halves = x.reshape(*leading, length, width // 2, 2).movedim(-1, 0)
        x1, x2 = halves.unbind(0)
        cos, sin = self.cache[:, :length, :].unbind(0)
        turned1 = cos * x1 - sin * x2
        turned2 = sin * x1 + cos * x2
        return torch.concat((turned1, turned2), dim=-1)


def softmax(x: Tensor) -> Tensor:
    rescaled = x - torch.max(x, dim=-1, keepdim=True)[0]
    powers = torch.exp(rescaled)
    return powers / torch.sum(powers, dim=-1, keepdim=True)


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key) / math.sqrt(key.shape[-1])
    scores = torch.where(mask, scores, float("-inf"))
    weights = softmax(scores)
    return torch.einsum("bhqk,bhkd->bhqd", weights, value)


class SelfAttention(nn.Module):
    def __init__(self, width: int, num_heads: int, rotation: Rotation) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key, self.value, self.out = (Projection(width, width) for _ in range(4))
        self.rotation = rotation

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.query(x), self.key(x), self.value(x)
        query, key, value = (y.reshape(*y.shape[:2], self.num_heads, -1).transpose(1, 2) for y in (query, key, value))
        query = self.rotation(query)
        key = self.rotation(key)
        position = torch.arange(x.shape[1], device=x.device)
        mask = position[:, None] >= position[None, :]
        out = attention(query, key, value, mask[None])
        out = out.transpose(1, 2).reshape(x.shape)
        return self.out(out)


class Gated(nn.Module):
    def __init__(self, width: int, width_inside: int) -> None:
        super().__init__()
        self.w1 = Projection(width, width_inside)
        self.w2 = Projection(width_inside, width)
        self.w3 = Projection(width, width_inside)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(silu(self.w1(x)) * self.w3(x))


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


class Layer(nn.Module):
    def __init__(self, width: int, width_inside: int, num_heads: int, rotation: Rotation) -> None:
        super().__init__()
        self.attention = SelfAttention(width, num_heads, rotation)
        self.inside = Gated(width, width_inside)
        self.norm1, self.norm2 = RootMeanSquareNorm(width), RootMeanSquareNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        attended = self.attention(self.norm1(x))
        after_attention = x + attended
        gated = self.inside(self.norm2(after_attention))
        return after_attention + gated


class CourseModel(nn.Module):
    def __init__(self, vocabulary: int, length: int, width: int, width_inside: int, depth: int, num_heads: int) -> None:
        super().__init__()
        self.table = Table(vocabulary, width)
        rotation = Rotation(length, width // num_heads)
        self.rotation = rotation
        self.layers = nn.ModuleList(Layer(width, width_inside, num_heads, rotation) for _ in range(depth))
        self.norm = RootMeanSquareNorm(width)
        self.head = Projection(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.table(tokens)
        x = embedded  # the first one lives until the end, without autograd too
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return self.head(x)


def log_softmax(x: Tensor) -> Tensor:
    largest = torch.max(x, dim=-1, keepdim=True)[0]
    x = x - largest
    return x - torch.log(torch.sum(torch.exp(x), dim=-1, keepdim=True))


def course_loss(logits: Tensor, targets: Tensor) -> Tensor:
    negative = -log_softmax(logits)
    return torch.mean(torch.gather(negative, -1, targets.unsqueeze(-1)))


class CourseAdam(torch.optim.Optimizer):
    """AdamW as students write it: tensor by tensor, with new state in each step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = p.grad.data
                state = self.state[p]
                p.data -= 1e-5 * p.data
                mean_before = state.get("m", torch.zeros_like(grad))
                square_before = state.get("v", torch.zeros_like(grad))
                mean = 0.9 * mean_before + (0.1 * grad)
                square = 0.999 * square_before + (0.001 * torch.square(grad))
                p.data -= 1e-3 * mean / (torch.sqrt(square) + 1e-8)
                state["m"] = mean
                state["v"] = square


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run whose last step was recorded, with what the card held in it.

    Attributes:
        peak_bytes: ``max_memory_allocated`` of the recorded step.
        reserved_bytes: ``max_memory_reserved``.
        trace: Name of the recording in tests/data/allocator_traces, where it is there.
    """

    peak_bytes: int
    reserved_bytes: int
    trace: str = ""
    autocast: bool = False

    @property
    def name(self) -> str:
        """As it stands in the result file."""
        raise NotImplementedError

    def play(self, num_steps: int = 5) -> Played:
        """Run it on a card of compute capability 8.9, whose cuBLAS workspace is that of the recordings."""
        with VirtualGPU("RTX 4090", torch="2.13") as gpu:
            self._run(num_steps, played := Played(gpu))
        return played

    def _run(self, num_steps: int, played: Played) -> None:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class AttentionRun(Run):
    """Attention written out, forward and backward once, from an empty allocator."""

    @property
    def name(self) -> str:
        return "attention in parts, forward and backward"

    def _run(self, num_steps: int, played: Played) -> None:
        with played.listening():
            query, key, value = (torch.randn(8, 4096, 16, device="cuda", requires_grad=True) for _ in range(3))
            output = attention_in_parts(query, key, value)
            output.register_hook(lambda grad: grad)
            loss = output.sum()
            loss.backward()


def attention_in_parts(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = torch.einsum("bqd,bkd->bqk", query, key)
    scores = scores / (query.shape[-1] ** 0.5)
    weights = softmax_by_values(scores)
    return torch.einsum("bqk,bkd->bqd", weights, value)


def softmax_by_values(x: Tensor) -> Tensor:
    largest = x.max(dim=-1, keepdim=True).values
    powers = torch.exp(x - largest)
    total = torch.sum(powers, dim=-1, keepdim=True)
    return powers / total


@dataclass(frozen=True, kw_only=True)
class CourseRun(Run):
    """A few steps of the language model, then the recorded one.

    Attributes:
        length: Tokens in a sequence; four sequences in a batch.
        trains: Whether the step goes backward and updates the weights.
    """

    length: int
    trains: bool

    @property
    def name(self) -> str:
        return f"medium_{self.length}_{'training' if self.trains else 'inference'}"

    def _run(self, num_steps: int, played: Played) -> None:
        model = CourseModel(10_000, self.length, 1024, 4096, 24, 16)
        model.to("cuda")
        (self._train if self.trains else self._infer)(model, num_steps, played)

    def _tokens(self, num_steps: int) -> Tensor:
        return torch.randint(0, 10_000, (num_steps, 4, self.length), device="cuda")

    def _autocast(self) -> torch.autocast:
        return torch.autocast("cuda", torch.bfloat16, enabled=self.autocast)

    def _train(self, model: nn.Module, num_steps: int, played: Played) -> None:
        optimizer = CourseAdam(model.parameters())
        warmup_inputs, inputs, warmup_targets, targets = (self._tokens(n) for n in (num_steps, 1, num_steps, 1))
        for step in range(num_steps):
            with self._autocast():
                output = model(warmup_inputs[step])
                loss = course_loss(output, warmup_targets[step])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        del output, loss
        with played.listening():
            with self._autocast():
                output = model(inputs[0])
                loss = course_loss(output, targets[0])
            loss.backward()
            optimizer.step()

    def _infer(self, model: nn.Module, num_steps: int, played: Played) -> None:
        warmup_inputs, inputs = self._tokens(num_steps), self._tokens(1)
        model.eval()
        with torch.inference_mode():
            for step in range(num_steps):
                with self._autocast():
                    model(warmup_inputs[step])
            with played.listening(), self._autocast():
                model(inputs[0])


class Played:
    """What a virtual GPU did in the recorded step.

    Attributes:
        peak_bytes: ``max_memory_allocated``.
        reserved_bytes: ``max_memory_reserved``.
        events: For each block that was taken or given back whether it was taken, and the bytes that were asked for.
    """

    def __init__(self, gpu: VirtualGPU) -> None:
        self.peak_bytes = self.reserved_bytes = 0
        self.events: list[tuple[bool, int]] = []
        self._gpu = gpu

    @contextmanager
    def listening(self) -> Iterator[None]:
        """The block holds the recorded step."""
        allocator = self._gpu.memory.allocator
        allocate, free = allocator.allocate, allocator.free

        def taken(num_bytes: int, stream: int = 0) -> Block:
            self.events.append((True, num_bytes))
            return allocate(num_bytes, stream)

        def given_back(block: Block) -> None:
            self.events.append((False, block.requested_bytes))
            free(block)

        allocator.reset_peaks()
        with mock.patch.object(allocator, "allocate", taken), mock.patch.object(allocator, "free", given_back):
            yield
        self.peak_bytes, self.reserved_bytes = allocator.peak_allocated_bytes, allocator.peak_reserved_bytes


def num_alike(run: Run, played: Played) -> tuple[int, int]:
    """How many of the GPU's allocations are met in the same order, with the same blocks given back since the last one.

    Returns:
        These, and all of the GPU's allocations.
    """
    events = np.load(TRACES / f"{run.trace}.npz")["events"].tolist()
    recorded = _allocations((kind == ALLOC, size) for kind, _, size, _ in events if kind in {ALLOC, FREE_REQUESTED})
    matcher = difflib.SequenceMatcher(None, recorded, _allocations(played.events), autojunk=False)
    return sum(match.size for match in matcher.get_matching_blocks()), len(recorded)


def _allocations(events: Iterable[tuple[bool, int]]) -> list[tuple[int, tuple[int, ...]]]:
    """For each allocation its size, and the sizes of what was given back before it: C++ and Python differ in order."""
    allocations: list[tuple[int, tuple[int, ...]]] = []
    given_back: list[int] = []
    for was_taken, num_bytes in events:
        if was_taken:
            allocations.append((num_bytes, tuple(sorted(given_back))))
            given_back = []
        else:
            given_back.append(num_bytes)
    return allocations


RUNS: tuple[Run, ...] = (
    AttentionRun(peak_bytes=3249144832, reserved_bytes=3781165056, trace="gpt_small_clean_start"),
    CourseRun(length=128, trains=True, peak_bytes=7026606592, reserved_bytes=7235174400),
    CourseRun(
        length=256, trains=True, peak_bytes=9113374720, reserved_bytes=9265217536,
        trace="gpt24_ctx256_fp32_train",
    ),
    CourseRun(
        length=512, trains=True, autocast=True, peak_bytes=12434494464, reserved_bytes=12660506624,
        trace="gpt24_ctx512_amp_train",
    ),
    CourseRun(length=1024, trains=True, autocast=True, peak_bytes=24213918720, reserved_bytes=25178406912),
    CourseRun(length=128, trains=False, peak_bytes=1738928128, reserved_bytes=1763704832),
    CourseRun(length=256, trains=False, peak_bytes=1795741696, reserved_bytes=1864368128),
    CourseRun(
        length=512, trains=False, autocast=True, peak_bytes=1951309824, reserved_bytes=1981808640,
        trace="gpt24_ctx512_amp_infer",
    ),
    CourseRun(length=1024, trains=False, peak_bytes=2879401984, reserved_bytes=3204448256),
)  # fmt: skip
