"""Run many cases, count verdicts by production, and write the findings."""

from __future__ import annotations

import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from tests.search import judging
from tests.search.judging import Verdict, describe, is_bad, judge
from tests.search.losses import LOSSES
from tests.search.shrinking import cause, shrink, source
from tests.search.specs import generate
from tests.search.traits import TRAITS

SEED, NUM_CASES = 16, 2700


def search(seed: int, indices: Iterable[int]) -> Iterator[Verdict]:
    """Judge every step of these cases."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of the plain loops
        for index in indices:
            yield from judge(generate(seed, index))


def summarize(verdicts: list[Verdict]) -> dict[str, Any]:
    """What the result file holds."""
    judged = [each for each in verdicts if each.kind != judging.EXCLUDED]
    counts = Counter(each.kind for each in verdicts)
    productions = Counter(name for each in judged for name in each.spec.productions(each.step))
    equal = counts[judging.EQUAL] + sum(counts[kind] for kind in _ALARMS)
    return {
        "num_cases": len({(each.spec.seed, each.spec.index) for each in verdicts}),
        "num_steps": len(judged),
        "num_unequal": sum(each.is_unequal is True and each.kind != judging.UNCUT for each in judged),
        "num_equal": equal,
        "num_silent": counts[judging.SILENT] + counts[judging.SILENT_AGAIN],
        "num_false_alarms": sum(counts[kind] for kind in _ALARMS),
        "num_crashes": counts[judging.CRASH],
        "num_equal_with_other_buffers": sum(each.kind == judging.EQUAL and bool(each.buffers) for each in judged),
        "verdicts": dict(sorted(counts.items())),
        "fewest_steps_of_a_production": min(productions.values(), default=0),
        "productions": dict(sorted(productions.items())),
        "bad": [describe(each) for each in verdicts if is_bad(each)][:40],
    }


_ALARMS = (judging.ALARM, judging.UNCHECKED_ALARM, judging.REFUSAL)


def by_production(verdicts: list[Verdict]) -> str:
    """For each production with a silent step: silent steps of its unequal ones."""
    silent, unequal = Counter[str](), Counter[str]()
    for each in verdicts:
        if each.is_unequal:
            unequal.update(each.spec.productions(each.step))
            if each.kind in {judging.SILENT, judging.SILENT_AGAIN}:
                silent.update(each.spec.productions(each.step))
    rows = sorted(silent, key=lambda name: -silent[name] / unequal[name])
    return "\n".join(f"| {name} | {silent[name]} of {unequal[name]} |" for name in rows)


def findings(verdicts: list[Verdict], *, most: int = 40) -> str:
    """The bad verdicts as a page: put together by what they have in common, one of each shrunk."""
    groups: dict[tuple[str, ...], list[Verdict]] = defaultdict(list)
    for each in filter(is_bad, verdicts):
        said = (re.sub(r"[\d, ]+", " ", note)[:60] for note in each.notes[-1:])
        groups[each.kind, *_suspects(each), *said].append(each)
    lines = []
    for found in sorted(groups.values(), key=lambda found: (found[0].kind == judging.CRASH, -len(found)))[:most]:
        small = shrink(min(found, key=lambda each: len(each.spec.steps)))
        cases = ", ".join(dict.fromkeys(f"{each.spec.seed} {each.spec.index}" for each in found[:8]))
        lines += [f"## {small.kind} x{len(found)}: {cause(small)}", ""]
        spec = small.spec
        lines += [f"cases {cases}; shrunk from {spec.index}, error {small.error:.3g} tolerances", ""]
        lines += [f"- {spec.mode}, {spec.parts} parts, {spec.setting}, body {spec.body}, seed {spec.seed} {spec.index}"]
        lines += [f"- step {number}: {step}" for number, step in enumerate(small.spec.steps)]
        lines += [f"- said: {note:.400}" for note in small.notes]
        lines += ["", "```python", source(small).strip(), "```", ""]
    lines += [f"{max(0, len(groups) - most)} kinds of bad cases more."]
    return "\n".join(lines)


def _suspects(verdict: Verdict) -> Iterator[str]:
    """What may have made a case unequal."""
    spec, name = verdict.spec, verdict.spec.loss_of(verdict.step)
    yield spec.mode if "split_fn" in spec.mode or "," in spec.mode else ""
    yield name if LOSSES[name].mixes else ""
    yield verdict.step.data.extra
    yield from (each for each in spec.traits if TRAITS[each].mixes)
