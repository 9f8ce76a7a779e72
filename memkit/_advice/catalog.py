"""The catalog: each remedy and each symptom once, with all of its texts (`catalog.json` beside this file).

`memkit._advice.suggest` chooses remedies from facts about a run; `memkit.advise` tries them on a step.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from memkit._core.packaged import packaged_text

Horizon = Literal["short", "middle", "long"]
HORIZONS: tuple[Horizon, ...] = ("short", "middle", "long")
_BITWISE = "bit for bit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A change that may lower a run's memory, or show where the memory goes. Its texts have placeholders.

    Attributes:
        key: Its key in the catalog.
        name: Short name for a trial on a step.
        effect: Effect on the numbers, in words.
        exact: Whether gradients and step stay the same except for rounding; None if it does not touch the results.
        compares: The values that are compared to check this; None for a different model.
        redraws: Whether it draws random numbers in a different order.
        moves: Whether it costs transfers in every step, which no operation count shows.
        settings: Settings of the training wrapper that apply it.
        code: Other code that applies it.
        horizon: ``"short"``: today, by a setting or one line. ``"middle"``: a change of the program. ``"long"``: a
            change of the model or the hardware.
        action: What to do, by language; ``{code}`` stands for `full_code`. Empty for a remedy that is only tried.
        limit: When the remedy does not help, by language.
    """

    key: str
    name: str = ""
    effect: str = ""
    exact: bool | None = True
    compares: Literal["gradients", "updates"] | None = "gradients"
    redraws: bool = False
    moves: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    code: str = ""
    horizon: Horizon = "middle"
    action: Mapping[str, str] = field(default_factory=dict)
    limit: Mapping[str, str] = field(default_factory=dict)

    def filled(self, *, settings: Mapping[str, Any] | None = None, **values: object) -> Remedy:
        """Return the remedy for one program: with the settings, if given, and the placeholders filled in."""
        texts = {each: getattr(self, each).format(**values) for each in ("name", "effect", "code")}
        return replace(self, settings=self.settings if settings is None else settings, **texts)

    def with_other(self, other: Remedy) -> Remedy:
        """Combine two remedies, applied one after the other."""
        return replace(
            self,
            key=f"{self.key} + {other.key}",
            name=f"{self.name} + {other.name}",
            effect=_joined(self.effect, other.effect),
            exact=self.exact and other.exact,
            compares=self.compares if self.compares == other.compares else "gradients",
            redraws=self.redraws or other.redraws,
            moves=self.moves or other.moves,
            settings={**self.settings, **other.settings},
            code="\n".join(filter(None, (self.code, other.code))),
        )

    @property
    def arguments(self) -> str:
        """The settings as arguments of the wrapper."""
        return ", ".join(f"{name}={value!r}" for name, value in self.settings.items())

    def full_code(self, precision: str | None = None, *, is_packed: bool = False) -> str:
        """Return all the code to write; ``precision`` is the one that the wrapper must keep, as is a ``split_fn``."""
        kept = [f"{precision=}"] * bool(precision) + ["split_fn=split_fn"] * is_packed
        given = ", ".join(["model", "optimizer", *kept, self.arguments])
        wrapper = f"mk.MemoryEfficientTrainingWrapper({given})" if self.settings else ""
        return "\n".join(filter(None, (wrapper, self.code)))


def _joined(*effects: str) -> str:
    """The clauses of all effects; together they are bit for bit only if each one is."""
    clauses = "; ".join(effects).split("; ")
    if not all(_BITWISE in each for each in effects):
        clauses = [each for each in clauses if _BITWISE not in each]
    return "; ".join(dict.fromkeys(clauses))


def remedy(key: str) -> Remedy:
    """Return a remedy of the catalog."""
    record = _catalog()["remedies"][key]
    settings = {name: tuple(v) if isinstance(v, list) else v for name, v in record.get("settings", {}).items()}
    return Remedy(**{**record, "key": key, "settings": settings})


def symptom(key: str) -> dict[str, str]:
    """Return a symptom of the catalog: its topic, and the evidence for it by language."""
    found: dict[str, str] = _catalog()["symptoms"][key]
    return found


@functools.cache
def _catalog() -> dict[str, dict[str, Any]]:
    catalog: dict[str, dict[str, Any]] = json.loads(packaged_text("memkit._advice", "catalog.json"))
    return catalog
