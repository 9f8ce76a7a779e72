"""Batches of the grammar: fields with a row for each sample, and the containers that people put them into."""

from __future__ import annotations

from collections import UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.search.losses import IGNORED
from tests.search.models import CLASSES, DEPTH, WIDTH, WORDS

SHARED = {"anchors", "mixing"}  # fields without rows
Fields = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Data:
    """How the data of a step look.

    Attributes:
        rows: Samples.
        length: Tokens of the longest sample.
        padded: Whether samples differ in length.
        classes: "any", "balanced" (every part sees each class alike), "skewed" (sorted by class).
        rare: "", "identical" rows, "zeros".
        extra: A shared entry: "", "anchors" (as many as rows by accident: "anchors by accident"), "mixing" likewise.
    """

    rows: int = 8
    length: int = 5
    padded: bool = False
    classes: str = "any"
    rare: str = ""
    extra: str = ""


def make_fields(data: Data, needs: set[str], dtype: torch.dtype, seed: int) -> Fields:
    """Draw what the model and the loss read; floats are float64 with values that the dtype can hold."""
    draw = torch.Generator().manual_seed(seed)
    rows, length = data.rows, data.rows if data.extra == "mixing by accident" else data.length
    lengths = torch.randint(1, length + 1, (rows,), generator=draw) if data.padded else torch.full((rows,), length)
    lengths[-1 if data.padded else 0] = length
    mask = torch.arange(length)[None] < lengths[:, None]
    made = {
        "x": torch.randn((rows, length, DEPTH), generator=draw, dtype=torch.float64) * mask[..., None],
        "mask": mask,
        "ids": torch.randint(1, WORDS, (rows, length), generator=draw) * mask,
        "label": torch.randint(0, CLASSES, (rows,), generator=draw),
        "target": torch.randn((rows, CLASSES), generator=draw, dtype=torch.float64),
        "words": torch.randint(0, CLASSES, (rows, length), generator=draw).masked_fill(~mask, IGNORED),
        "ctc": torch.randint(1, CLASSES, (rows, 1), generator=draw),
    }
    if data.classes == "balanced":
        made["label"] = torch.full((rows,), 1)
    elif data.classes == "skewed":
        made["label"] = made["label"].sort().values
    absent = torch.rand((rows, CLASSES), generator=draw) < 0.4
    absent[0] = False
    made["missing"] = made["target"].masked_fill(absent & (data.classes != "balanced"), torch.nan)
    made = {key: _rare(value, data.rare) for key, value in made.items()}
    for name, accident, shape in (("anchors", rows, (WIDTH,)), ("mixing", length, (length,))):
        if data.extra.startswith(name):
            size = accident if "accident" in data.extra else rows + 2 if name == "anchors" else length
            made[name] = torch.randn((size, *shape), generator=draw, dtype=torch.float64)
    kept = needs | {"x", "mask"} | SHARED if data.padded else needs | {"x"} | SHARED
    return {key: _round(value, dtype) for key, value in made.items() if key in kept}


def _rare(value: torch.Tensor, rare: str) -> torch.Tensor:
    if rare == "identical":
        return value[:1].expand_as(value).clone()
    return torch.zeros_like(value) if rare == "zeros" and value.is_floating_point() else value


def _round(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return value.to(dtype).double() if value.is_floating_point() else value


def cast(fields: Fields, dtype: torch.dtype) -> Fields:
    """The same values, new tensors."""
    return {
        key: value.to(dtype if value.is_floating_point() else value.dtype, copy=True) for key, value in fields.items()
    }


def take(fields: Fields, start: int, stop: int) -> Fields:
    """Rows of a batch as its user means them: what is shared stays whole."""
    return {key: value if key in SHARED else value[start:stop] for key, value in fields.items()}


@dataclass
class Record:
    """A batch as a dataclass."""

    fields: Fields
    name: str = "record"


@dataclass
class Columns:
    x: torch.Tensor
    others: Fields = field(default_factory=dict)


Pair = namedtuple("Pair", ["x", "others"])


def _pad(samples: list[Fields]) -> Fields:
    """Collate samples of different lengths."""
    length = max(len(each["x"]) for each in samples)
    made: Fields = {}
    for key, first in samples[0].items():
        values = [each[key] for each in samples]
        if key in TOKENS:
            fill = IGNORED if key == "words" else 0
            whole = first.new_full((len(samples), length, *first.shape[1:]), fill)
            for row, value in enumerate(values):
                whole[row, : len(value)] = value
            made[key] = whole
        else:
            made[key] = torch.stack(values)
    return made


TOKENS = {"x", "mask", "ids", "words"}


def _to_samples(fields: Fields) -> list[Fields]:
    lengths = fields["mask"].sum(1).tolist() if "mask" in fields else [fields["x"].shape[1]] * len(fields["x"])
    return [
        {key: value[row, :size].clone() if key in TOKENS else value[row] for key, value in fields.items()}
        for row, size in enumerate(lengths)
    ]


def _to_packed(fields: Fields) -> dict[str, Any]:
    samples = _to_samples(fields)
    packed: dict[str, Any] = {key: torch.cat([each[key] for each in samples]) for key in fields if key in TOKENS}
    packed |= {key: value for key, value in fields.items() if key not in TOKENS}
    packed["offset"] = torch.tensor([len(each["x"]) for each in samples]).cumsum(0)
    return packed


def _from_packed(packed: dict[str, Any]) -> Fields:
    ends = packed["offset"].tolist()
    starts = [0, *ends[:-1]]
    others = {key: value for key, value in packed.items() if key not in TOKENS and key != "offset"}
    return _pad(
        [
            {key: value[start:end] for key, value in packed.items() if key in TOKENS}
            | {key: value[row] for key, value in others.items()}
            for row, (start, end) in enumerate(zip(starts, ends, strict=True))
        ]
    )


def _rest(fields: Fields) -> Fields:
    return {key: value for key, value in fields.items() if key != "x"}


@dataclass(frozen=True)
class Container:
    """A way to hold a batch.

    Attributes:
        wrap: From fields.
        unwrap: To fields.
        may_refuse: It need not be cut without a split_fn.
        needs_split_fn: Its rows are not in dimension 0.
    """

    wrap: Callable[[Fields], Any]
    unwrap: Callable[[Any], Fields]
    may_refuse: bool = False
    needs_split_fn: bool = False


def _strings(rows: int) -> list[str]:
    return [f"row {each}" for each in range(rows)]


CONTAINERS = {
    "tuple": Container(lambda f: (f["x"], _rest(f)), lambda b: {"x": b[0], **b[1]}),
    "list": Container(lambda f: [f["x"], _rest(f)], lambda b: {"x": b[0], **b[1]}),
    "dict": Container(dict, dict),
    "UserDict": Container(UserDict, dict),
    "namedtuple": Container(lambda f: Pair(f["x"], _rest(f)), lambda b: {"x": b.x, **b.others}),
    "dataclass": Container(lambda f: Columns(f["x"], _rest(f)), lambda b: {"x": b.x, **b.others}, may_refuse=True),
    "with strings": Container(
        lambda f: {"fields": f, "names": _strings(len(f["x"])), "split": "train"}, lambda b: b["fields"]
    ),
    "with None": Container(lambda f: (f["x"], None, _rest(f)), lambda b: {"x": b[0], **b[2]}),
    "with numbers": Container(lambda f: {"fields": f, "epoch": 3, "scale": torch.tensor(2.0)}, lambda b: b["fields"]),
    "with a list of ids": Container(  # it may be one number for each row, or shared
        lambda f: {"fields": f, "ids": list(range(len(f["x"])))}, lambda b: b["fields"], may_refuse=True
    ),
    "nested": Container(
        lambda f: {"inputs": {"x": f["x"]}, "rest": [_rest(f)]}, lambda b: {**b["inputs"], **b["rest"][0]}
    ),
    "samples": Container(_to_samples, _pad, may_refuse=True, needs_split_fn=True),
    "packed": Container(_to_packed, _from_packed, may_refuse=True, needs_split_fn=True),
}
