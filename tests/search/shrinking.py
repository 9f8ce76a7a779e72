"""Make a case smaller while the verdict stays, and say in code what is left."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from dataclasses import replace

from tests.search.judging import Verdict, judge
from tests.search.losses import LOSSES
from tests.search.specs import Spec, Step, fit
from tests.search.traits import TRAITS

_PLAIN_STEP = Step()


def shrink(verdict: Verdict) -> Verdict:
    """The smallest case found with the same verdict."""
    smallest, goes_on = verdict, True
    while goes_on:
        goes_on = False
        for spec in _smaller(smallest.spec):
            if found := _same(spec, verdict.kind):
                smallest, goes_on = found, True
                break
    return smallest


def _same(spec: Spec, kind: str) -> Verdict | None:
    return next((each for each in judge(spec) if each.kind == kind), None)


def _smaller(spec: Spec) -> Iterator[Spec]:
    """Specs with one thing less, those that take away most first."""
    candidates = [replace(spec, steps=(each,)) for each in spec.steps] if len(spec.steps) > 1 else []
    if len(spec.steps) > 2:
        candidates += [replace(spec, steps=spec.steps[:2]), replace(spec, steps=spec.steps[1:])]
    candidates += [replace(spec, traits=tuple(t for t in spec.traits if t != each)) for each in spec.traits]
    simple = Spec(spec.seed, spec.index)
    for name in ("other_loss", "loss", "setting", "mode", "body", "style", "script", "parts"):
        candidates.append(replace(spec, **{name: getattr(simple, name)}))
    if spec.mode.endswith("out of memory"):
        candidates.append(replace(spec, mode="wrapper, out of memory"))
    candidates += [
        replace(spec, steps=tuple(replace(each, **{name: getattr(_PLAIN_STEP, name)}) for each in spec.steps))
        for name in ("container", "training", "fault", "other_loss")
    ]
    candidates += [
        replace(
            spec, steps=tuple(replace(each, data=replace(each.data, **{key.name: key.default})) for each in spec.steps)
        )
        for key in dataclasses.fields(_PLAIN_STEP.data)
    ]
    for each in candidates:
        fitted = fit(each)
        if fitted == each and each != spec:
            yield each


def source(verdict: Verdict) -> str:
    """The code of the traits and the loss that are left."""
    spec = verdict.spec
    pieces = [inspect.getsource(TRAITS[name].make) for name in spec.traits]
    pieces += [inspect.getsource(LOSSES[name].fn) for name in dict.fromkeys(spec.losses)]
    return "\n".join(pieces)


def cause(verdict: Verdict) -> str:
    """What is unusual in a shrunk case, in words."""
    spec, plain, step = verdict.spec, Spec(verdict.spec.seed, verdict.spec.index), verdict.step
    words = [f"trait {each}" for each in spec.traits]
    words += [f"loss {spec.loss}"] if spec.loss != plain.loss or not words else []
    words += [f"then loss {spec.other_loss}"] if spec.other_loss else []
    words += [spec.mode] if spec.mode != plain.mode else []
    words += [spec.setting] if spec.setting != plain.setting else []
    words += [f"body {spec.body}"] if spec.body != plain.body else []
    words += [f"container {step.container}"] if step.container != "tuple" else []
    words += [f"{len(spec.steps)} steps"] if len(spec.steps) > 1 else []
    words += [f"{key}={value}" for key, value in _unusual(step)]
    return ", ".join(words)


def _unusual(step: Step) -> Iterator[tuple[str, object]]:
    for key in dataclasses.fields(step.data):
        value = getattr(step.data, key.name)
        if value != key.default:
            yield key.name, value
    if not step.training:
        yield "training", False
