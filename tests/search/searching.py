"""Run many cases, count verdicts by production, and write the findings."""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from tests.search import judging
from tests.search.judging import Verdict, describe, is_bad, judge
from tests.search.shrinking import cause, shrink, source
from tests.search.specs import Spec, generate

SEED, NUM_CASES = 16, 2600


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


def findings(verdicts: list[Verdict], *, most: int = 200) -> str:
    """The bad verdicts as a page: shrunk, put together by cause, the most frequent first."""
    groups: dict[tuple[str, str], list[Verdict]] = defaultdict(list)
    for each in _one_of_each_case(verdicts, most):
        small = shrink(each)
        groups[small.kind, cause(small)].append(small)
    lines = []
    for (kind, why), found in sorted(groups.items(), key=lambda group: (group[0][0], -len(group[1]))):
        first = min(found, key=lambda each: len(each.spec.steps))
        cases = ", ".join(f"{each.spec.seed} {each.spec.index}" for each in found[:6])
        lines += [f"## {kind} x{len(found)}: {why}", "", f"cases {cases}; error {first.error:.3g} tolerances", ""]
        lines += [f"- step {number}: {step}" for number, step in enumerate(first.spec.steps)]
        lines += [f"- said: {note:.300}" for note in first.notes]
        lines += ["", "```python", source(first).strip(), "```", ""]
    return "\n".join(lines)


def _one_of_each_case(verdicts: list[Verdict], most: int) -> Iterator[Verdict]:
    seen: set[tuple[Spec, str]] = set()
    for each in verdicts:
        if is_bad(each) and (each.spec, each.kind) not in seen and len(seen) < most:
            seen.add((each.spec, each.kind))
            yield each
