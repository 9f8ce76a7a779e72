"""The grammar: what a generated case is made of, and how (seed, index) chooses it.

A case is a trainer and one to four steps. Each family of productions is dealt like cards: in every run of as many cases
as it has productions, each comes once, in an order of its own. So all come equally often, and a case depends on nothing
but its seed and its index.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from tests.search.batches import CONTAINERS, Data
from tests.search.losses import LOSSES
from tests.search.models import BODIES, STYLES, USES_IDS
from tests.search.traits import TRAITS

Item = TypeVar("Item")

MODES = {  # and how often each is dealt
    "wrapper": 6,
    "wrapper, on_oom=raise": 1,
    "wrapper, require": 1,
    "wrapper, out of memory": 3,
    "microbatches": 3,
    "microbatches, out of memory": 1,
    "SplitLoss": 3,
    "SplitLoss, sum": 1,
    "SplitLoss, out of memory": 1,
    "accumulator": 1,
    "accumulator, sum": 1,
    "accumulator, no count": 1,
    "split_fn": 2,
    "split_fn, drops": 1,
    "split_fn, SplitLoss": 1,
}
SCRIPTS = {
    "once": 2,
    "again": 3,
    "even, then ragged": 3,
    "unpadded, then padded": 3,
    "balanced, then skewed": 3,
    "eval, then train": 2,
    "train, then eval": 1,
    "another loss": 3,
    "another container": 1,
    "one row first": 1,
    "zeros first": 1,
    "identical rows first": 1,
    "two rows": 1,
    "identical rows": 1,
    "padded": 3,
}
SETTINGS = {
    "float32": 8,
    "float64": 2,
    "bfloat16": 1,
    "bf16-mixed": 2,
    "checkpoint": 2,
}
EXTRAS = {"": 28, "anchors": 1, "anchors by accident": 1, "mixing": 1, "mixing by accident": 1}
NOT_IN_BFLOAT16 = {"Spectrum", "FloatCastStays", "SpectralNorm", "NoiseFromNumpy", "HalfCast"}


@dataclass(frozen=True)
class Step:
    """One training step of a case.

    Attributes:
        data: How its data look.
        container: What holds them.
        training: Whether the model is in training mode.
        other_loss: Whether the case's second loss is used.
        fault: Where memory runs out, as a share of the plain step's operators; 0: nowhere.
    """

    data: Data = Data()  # noqa: RUF009 - frozen
    container: str = "tuple"
    training: bool = True
    other_loss: bool = False
    fault: float = 0.0


@dataclass(frozen=True)
class Spec:
    """One case."""

    seed: int
    index: int
    body: str = "Mlp"
    traits: tuple[str, ...] = ()
    style: str = "dataclass"
    loss: str = "mse"
    other_loss: str = ""
    mode: str = "wrapper"
    script: str = "once"
    setting: str = "float32"
    parts: int = 2
    steps: tuple[Step, ...] = (Step(),)

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.setting) if self.setting in {"float64", "bfloat16"} else torch.float32

    @property
    def precision(self) -> str | None:
        return self.setting if self.setting == "bf16-mixed" else None

    @property
    def checkpoint(self) -> list[str] | None:
        return ["body"] if self.setting == "checkpoint" else None

    @property
    def losses(self) -> tuple[str, ...]:
        return (self.loss, self.other_loss) if self.other_loss else (self.loss,)

    @property
    def needs(self) -> set[str]:
        """Fields that batches hold."""
        needed = {name for loss in self.losses for name in LOSSES[loss].needs}
        needed |= {"ids"} if self.body in USES_IDS else set()
        return needed | ({"mask"} if any(step.data.padded for step in self.steps) else set())

    @property
    def is_noisy(self) -> bool:
        return any(TRAITS[each].noisy for each in self.traits)

    def loss_of(self, step: Step) -> str:
        return self.other_loss if step.other_loss and self.other_loss else self.loss

    def productions(self, step: Step) -> Iterator[str]:
        """Names of what makes up a step."""
        yield from (f"body {self.body}", f"style {self.style}", f"mode {self.mode}", f"script {self.script}")
        yield from (f"setting {self.setting}", f"container {step.container}", f"loss {self.loss_of(step)}")
        yield from (f"trait {each}" for each in self.traits)
        yield f"extra {step.data.extra or 'none'}"
        yield "ragged" if step.data.rows % self.parts else "even"


def deal(cards: Sequence[Item], seed: int, name: str, index: int) -> Item:
    """The card of a case: packs of cards, each shuffled in its own way, one after the other."""
    pack, place = divmod(index, len(cards))
    shuffled = list(cards)
    random.Random(f"{seed} {name} {pack}").shuffle(shuffled)
    return shuffled[place]


def rank(name: str, cards: Sequence[str], chosen: set[str], seed: int, index: int) -> int:
    """How many cases before this one were dealt one of the chosen cards."""
    pack, place = divmod(index, len(cards))
    before = sum(each in chosen for each in cards) * pack
    return before + sum(deal(cards, seed, name, pack * len(cards) + i) in chosen for i in range(place))


def _weighted(choices: dict[str, int]) -> list[str]:
    return [name for name, number in choices.items() for _ in range(number)]


_MIXING_TRAITS = [name for name, kind in TRAITS.items() if kind.mixes]
_OTHER_TRAITS = [name for name, kind in TRAITS.items() if not kind.mixes]
_MIXING_LOSSES = [name for name, kind in LOSSES.items() if kind.mixes]
_OTHER_LOSSES = [name for name, kind in LOSSES.items() if not kind.mixes]
_CONTAINERS = [name for name in CONTAINERS if name not in {"packed", "samples"}]
# What makes a case unequal, if anything: mostly one thing alone, so that a silent case names its cause.
_CAUSES = [*["none"] * 6, *["loss"] * 8, *["trait"] * 6, "both"]


def generate(seed: int, index: int) -> Spec:
    """The case of a number."""
    chance = random.Random(f"{seed} case {index}")

    def card(name: str, cards: Sequence[str]) -> str:
        return deal(cards, seed, name, index)

    cause = card("cause", _CAUSES)
    mixes = cause in {"loss", "both"}
    number = {each: rank("cause", _CAUSES, {each, "both"}, seed, index) for each in ("loss", "trait")}
    losses = [deal(_MIXING_LOSSES, seed, "mixing loss", number["loss"]), card("other loss", _OTHER_LOSSES)]
    traits = [card("other trait", _OTHER_TRAITS)]
    if chance.random() < 0.3:
        traits.append(card("second trait", _OTHER_TRAITS))
    if cause in {"trait", "both"}:
        traits[-1] = deal(_MIXING_TRAITS, seed, "mixing trait", number["trait"])
    script = card("script", _weighted(SCRIPTS))
    spec = Spec(
        seed,
        index,
        body=card("body", list(BODIES)),
        traits=tuple(dict.fromkeys(traits)),
        style=card("style", list(STYLES)),
        loss=losses[0] if mixes else losses[1],
        mode=card("mode", _weighted(MODES)),
        script=script,
        setting=card("setting", _weighted(SETTINGS)),
        parts=chance.choice([2, 2, 3, 4]),
    )
    if script == "another loss":  # the first one adds up; the other is the case's own
        spec = replace(spec, loss=losses[1], other_loss=losses[0] if mixes else card("third loss", _OTHER_LOSSES))
    extra = card("extra", _weighted(EXTRAS))
    container = card("container", [*_CONTAINERS, *_CONTAINERS, "samples"])
    return fit(replace(spec, steps=tuple(_script(spec, extra, container, chance))))


def _script(spec: Spec, extra: str, container: str, chance: random.Random) -> Iterator[Step]:
    """The steps of a case."""
    even = spec.parts * chance.choice([2, 3, 4])
    ragged = even + chance.randint(1, spec.parts - 1)
    rows = chance.choice([even, ragged])
    data = Data(rows, length=chance.choice([3, 4, 5]), padded=chance.random() < 0.3, extra=extra)
    data = replace(data, classes=chance.choice(["any", "any", "skewed"]))
    step = Step(data, container)
    first, second = _FIRST_SECOND.get(spec.script, ({}, {}))
    if spec.script == "even, then ragged":
        first, second = {"rows": even}, {"rows": ragged}
    steps = [replace(step, data=replace(data, **first))]
    steps += [replace(step, data=replace(data, **second)) for _ in range(chance.choice([1, 1, 2]))]
    if spec.script in {"eval, then train", "train, then eval"}:
        steps[0] = replace(steps[0], training=spec.script == "train, then eval")
        steps[1:] = [replace(each, training=spec.script == "eval, then train") for each in steps[1:]]
    elif spec.script == "another loss":
        steps[1:] = [replace(each, other_loss=True) for each in steps[1:]]
    elif spec.script == "another container":
        steps[1:] = [replace(each, container="dict" if container != "dict" else "list") for each in steps[1:]]
    elif spec.script == "again":
        steps.append(steps[-1])
    elif spec.script in {"once", "two rows", "identical rows", "padded"}:
        steps = steps[:2] if spec.script == "padded" else steps[1:2]
    if "out of memory" in spec.mode:
        faults = [chance.choice([chance.uniform(0.01, 1.0), chance.uniform(0.01, 0.6), 0.0]) for _ in steps]
        steps = [replace(each, fault=fault) for each, fault in zip(steps, faults, strict=True)]
    yield from steps[:4]


_FIRST_SECOND: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "unpadded, then padded": ({"padded": False}, {"padded": True}),
    "balanced, then skewed": ({"classes": "balanced"}, {"classes": "skewed"}),
    "one row first": ({"rows": 1}, {}),
    "zeros first": ({"rare": "zeros"}, {}),
    "identical rows first": ({"rare": "identical", "classes": "balanced"}, {}),
    "two rows": ({}, {"rows": 2}),
    "identical rows": ({}, {"rare": "identical"}),
    "padded": ({"padded": True}, {"padded": True}),
}


def fit(spec: Spec) -> Spec:
    """Take away what does not go together."""
    if spec.mode.startswith("split_fn"):
        spec = _fit_split_fn(spec)
    if spec.mode.startswith(("accumulator", "SplitLoss")) and spec.setting in {"bf16-mixed", "checkpoint"}:
        spec = replace(spec, setting="float32")
    if spec.body == "EmbeddingBag" and spec.setting in {"bfloat16", "bf16-mixed"}:
        spec = replace(spec, body="Embedding")
    if spec.setting in {"bfloat16", "bf16-mixed"} and NOT_IN_BFLOAT16 & set(spec.traits):
        spec = replace(spec, setting="float32")
    if any(step.container in {"samples", "packed"} for step in spec.steps) or spec.is_noisy:
        spec = _map_data(spec, extra="")
    if any(step.container in {"samples", "packed"} for step in spec.steps):
        spec = replace(spec, traits=tuple(each for each in spec.traits if not TRAITS[each].make.on_input))
    if spec.mode.startswith("accumulator"):  # what a hook sees there is the weighted loss's: both ways are right
        spec = replace(
            spec, traits=tuple(each for each in spec.traits if each not in {"GradientHook", "ParameterHook"})
        )
    if any("mixing" in step.data.extra for step in spec.steps) and spec.body == "EmbeddingBag":
        spec = replace(spec, body="Mlp")
    return spec


def _fit_split_fn(spec: Spec) -> Spec:
    """Such batches come as lists of samples or packed, and their losses tell a count, or are refused."""
    container = "packed" if spec.index % 2 else "samples"
    return replace(spec, steps=tuple(replace(step, container=container) for step in spec.steps))


def _map_data(spec: Spec, **changes: object) -> Spec:
    return replace(spec, steps=tuple(replace(each, data=replace(each.data, **changes)) for each in spec.steps))
