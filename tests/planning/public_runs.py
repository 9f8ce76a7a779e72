"""Public training runs whose memory was recorded on real GPUs, as replicas that make the same allocations in order.

Each replica was written anew after the source that the run's owner published, and runs on a virtual card.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

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


@dataclass(frozen=True)
class CourseRun:
    """Five steps, then the recorded one."""

    length: int
    trains: bool
    autocast: bool

    def __call__(self, record: Callable[[], None]) -> None:
        model = CourseModel(10_000, self.length, 1024, 4096, 24, 16)
        model.to("cuda")
        optimizer = CourseAdam(model.parameters())
        (self._train if self.trains else self._infer)(model, optimizer, record)

    def _tokens(self, num_steps: int) -> Tensor:
        return torch.randint(0, 10_000, (num_steps, 4, self.length), device="cuda")

    def _autocast(self) -> torch.autocast:
        return torch.autocast("cuda", torch.bfloat16, enabled=self.autocast)

    def _train(self, model: nn.Module, optimizer: CourseAdam, record: Callable[[], None]) -> None:
        warmup_inputs, inputs, warmup_targets, targets = (self._tokens(n) for n in (5, 1, 5, 1))
        for step in range(5):
            with self._autocast():
                output = model(warmup_inputs[step])
                loss = course_loss(output, warmup_targets[step])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        del output, loss
        record()
        with self._autocast():
            output = model(inputs[0])
            loss = course_loss(output, targets[0])
        loss.backward()
        optimizer.step()

    def _infer(self, model: nn.Module, _: CourseAdam, record: Callable[[], None]) -> None:
        warmup_inputs, inputs = self._tokens(5), self._tokens(1)
        model.eval()
        with torch.inference_mode():
            for step in range(5):
                with self._autocast():
                    model(warmup_inputs[step])
            record()
            with self._autocast():
                model(inputs[0])
