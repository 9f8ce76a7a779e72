"""Models of the grammar: a body over tokens, traits over rows, a head; and the ways in which a forward returns."""

from __future__ import annotations

import copy
import numbers
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.search.traits import TRAITS

DEPTH, WIDTH, CLASSES, WORDS = 4, 6, 3, 7  # features of the input, of the rows, outputs, ids


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(DEPTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x, mask, ids):
        return self.layers(x)


class Conv1d(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv1d(DEPTH, WIDTH, 3, padding=1)

    def forward(self, x, mask, ids):
        return torch.tanh(self.layer(x.transpose(1, 2)).transpose(1, 2))


class Conv2d(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.mix = nn.Conv2d(1, 2, 3, padding=1), nn.Linear(2 * DEPTH, WIDTH)

    def forward(self, x, mask, ids):
        return self.mix(torch.tanh(self.conv(x[:, None])).transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(DEPTH, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True)

    def forward(self, x, mask, ids):
        return self.layer(self.embed(x), src_key_padding_mask=~mask)


class Gru(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.GRU(DEPTH, WIDTH, batch_first=True)

    def forward(self, x, mask, ids):
        return self.layer(x)[0]


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mix = nn.Embedding(WORDS, WIDTH, padding_idx=0), nn.Linear(DEPTH, WIDTH)

    def forward(self, x, mask, ids):
        return torch.tanh(self.embed(ids) + self.mix(x))


class EmbeddingBag(nn.Module):
    """With sparse gradients."""

    def __init__(self):
        super().__init__()
        self.bag, self.mix = nn.EmbeddingBag(WORDS, WIDTH, mode="sum", sparse=True), nn.Linear(DEPTH, WIDTH)

    def forward(self, x, mask, ids):
        return torch.tanh(self.bag(ids)[:, None] + self.mix(x))


BODIES = {each.__name__: each for each in (Mlp, Conv1d, Conv2d, Transformer, Gru, Embedding, EmbeddingBag)}
USES_IDS = {"Embedding", "EmbeddingBag"}


@dataclass
class Output:
    """What a model of style "dataclass" returns; the losses of the grammar read this of every style."""

    rows: torch.Tensor  # (B, CLASSES)
    tokens: torch.Tensor  # (B, T, CLASSES)
    embeddings: torch.Tensor  # (B, WIDTH)


STYLES = {
    "tuple": lambda out: (out.rows, out.tokens, out.embeddings),
    "dict": lambda out: {"rows": out.rows, "tokens": out.tokens, "embeddings": out.embeddings},
    "dataclass": lambda out: out,
}


def read_output(out: Any) -> Output:
    if isinstance(out, tuple):
        return Output(*out)
    return Output(**out) if isinstance(out, dict) else out


class Net(nn.Module):
    """A generated model."""

    def __init__(self, body, traits, style, world):
        super().__init__()
        self.body, self.style, self.world = BODIES[body](), style, world
        self.traits = nn.ModuleList(TRAITS[name].make(WIDTH, world) for name in traits)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x, mask=None, ids=None, anchors=None, mixing=None):
        mask = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
        for trait in self.traits:
            x = trait(x) if trait.on_input else x
        h = self.body(x, mask, ids)
        if mixing is not None:
            h = torch.softmax(mixing, 1) @ h
        weight = mask[..., None].to(h.dtype)
        z = (h * weight).sum(1) / weight.sum(1).clamp(min=1)
        if anchors is not None:
            z = z + torch.softmax(z @ anchors.T.to(z.dtype), 1) @ anchors.to(z.dtype)
        for trait in self.traits:
            z = z if trait.on_input else trait(z)
        return STYLES[self.style](Output(self.head(z), self.head(torch.tanh(h) + z[:, None]), z))

    def aux(self):
        """The auxiliary losses that the last forward left behind; 0 where there are none."""
        return sum(trait.aux for trait in self.traits if trait.aux is not None)


_OWN = {"world", "width", "style", "generator"}


def transfer(source: nn.Module, target: nn.Module) -> None:
    """Give a model of the same build the other's state, in its own dtypes: all attributes, not only what is saved."""
    targets = dict(target.named_modules())
    with torch.no_grad():
        for name, module in source.named_modules():
            twin = targets[name]
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    twin._parameters[key].copy_(parameter)
                    twin._parameters[key].grad = None
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    twin._buffers[key] = _like(buffer, twin._buffers[key])
            if isinstance(generator := vars(module).get("generator"), torch.Generator):
                twin.generator.set_state(generator.get_state())
            for key, value in vars(module).items():
                if not key.startswith("_") and key not in _OWN and key in {"training", "aux"} | _state_keys(module):
                    setattr(twin, key, _as_twin(value, exact=target.world.exact))


def _state_keys(module: nn.Module) -> set[str]:
    return {key for key, value in vars(module).items() if isinstance(value, (numbers.Number, torch.Tensor, deque))} | {
        "state"
    }


def _like(value: torch.Tensor, twin: torch.Tensor) -> torch.Tensor:
    return value.detach().to(twin.dtype, copy=True)


def _as_twin(value: Any, *, exact: bool) -> Any:
    if isinstance(value, torch.Tensor):
        wide = exact and value.is_floating_point()
        return value.detach().to(torch.float64 if wide else value.dtype, copy=True)
    if isinstance(value, deque):
        return deque([_as_twin(each, exact=exact) for each in value], maxlen=value.maxlen)
    return copy.copy(value)
