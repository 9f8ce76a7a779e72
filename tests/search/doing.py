"""The steps as memkit does them: one way for each mode of the grammar."""

from __future__ import annotations

import contextlib
import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

import memkit as mk
from tests.search.batches import CONTAINERS, Fields, cast, take
from tests.search.models import Net
from tests.search.oracle import Gradients, build, make_loss_fn, widen
from tests.search.specs import Spec, Step
from tests.search.worlds import Told, World
from tests.train.faults import FailingOperator


@dataclass
class Done:
    """What memkit did.

    Attributes:
        sizes: Rows of the parts; empty where it is not known.
        gradients: What the optimizer stepped with.
        stepped: Whether it stepped.
        messages: Texts of the MemkitWarnings.
        error: What was raised.
    """

    sizes: tuple[int, ...] = ()
    gradients: Gradients = field(default_factory=dict)
    stepped: bool = False
    num_ooms: int = 0
    messages: list[str] = field(default_factory=list)
    error: BaseException | None = None


def tell(said: Any) -> Any:
    """A `Told` in memkit's own form."""
    if not isinstance(said, Told):
        return said
    return mk.Loss(mean=said.mean, sum=said.sum, count=said.count, outputs=said.outputs)


class Runner:
    """A model, an optimizer and memkit's object of a case's mode, from step to step."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.world = World(exact=False)
        self.model: Net = build(spec, self.world)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self._gradients: Gradients = {}
        self._fault: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        self.optimizer.register_step_pre_hook(self._catch)
        self._owner, self._run = _OWNERS[spec.mode](self)

    def step(self, step: Step, fields: Fields, *, place: int = 0) -> Done:
        """Do one step; `place` is the number of the operator that runs out of memory, 0 for none."""
        done = Done()
        self.model.train(step.training)
        self.model.zero_grad()
        self._gradients = {}
        batch = CONTAINERS[step.container].wrap(cast(fields, self.spec.dtype))
        self._fault = FailingOperator(place) if place else contextlib.nullcontext()
        with seeded(self.spec.index), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                self._run(done, step, batch, fields)
            except Exception as error:  # noqa: BLE001 - each error is an outcome
                done.error = error
        told = [str(each.message) for each in caught if issubclass(each.category, mk.MemkitWarning)]
        done.messages = [
            each for each in told if "Training continues: " not in each
        ]  # an out-of-memory survived is no alarm
        done.gradients, done.stepped = self._gradients, done.error is None and bool(self._gradients)
        return done

    def close(self) -> None:
        if hasattr(self._owner, "close"):
            self._owner.close()

    def fault(self) -> contextlib.AbstractContextManager[Any]:
        """Around what memkit has to recover: memory runs out in it, once."""
        return self._fault

    def loss_fn(self, step: Step) -> Callable[[Any, Any], Any]:
        return _once(self, step)

    def _catch(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        with _disable_current_modes():  # memory runs out in the step, not in what looks at it
            for group in optimizer.param_groups:
                for each in group["params"]:
                    if each.grad is not None:
                        self._gradients[names[each]] = widen(each.grad)


def _once(runner: Runner, step: Step) -> Callable[[Any, Any], Any]:
    """One function for all steps with the same loss, as in a user's loop."""
    known = vars(runner).setdefault("_loss_fns", {})
    key = (runner.spec.loss_of(step), step.container)
    if key not in known:
        known[key] = make_loss_fn(runner.spec, step, runner.world)
    return known[key]


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**31)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def _settings(spec: Spec) -> dict[str, Any]:
    return {"precision": spec.precision, "checkpoint": spec.checkpoint}


def split_list(batch: Any, parts: int) -> list[Any]:
    """Cut a list of samples into parts: a user's split_fn."""
    edges = [round(part * len(batch) / parts) for part in range(parts + 1)]
    return [batch[a:b] for a, b in itertools.pairwise(edges) if b > a]


def drop_last(split_fn: Callable[[Any, int], list[Any]]) -> Callable[[Any, int], list[Any]]:
    """A split_fn that forgets the last part."""
    return lambda batch, parts: split_fn(batch, parts)[:-1] or [batch]


def _wrapper(runner: Runner, **settings: Any) -> tuple[Any, Any]:
    spec = runner.spec
    settings = {"accumulation_steps": spec.parts, **_settings(spec), **settings}
    trainer = mk.MemoryEfficientTrainingWrapper(runner.model, runner.optimizer, **settings)

    def run(done: Done, step: Step, batch: Any, fields: Fields) -> None:
        loss_fn = runner.loss_fn(step)
        with runner.fault():
            result = trainer.train_step(batch, _told(runner, step, loss_fn))
        done.num_ooms = result.num_ooms
        done.sizes = result.sizes

    return trainer, run


def _told(runner: Runner, step: Step, loss_fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    known = vars(runner).setdefault("_told", {})
    if loss_fn not in known or runner.spec.index % 2:  # every other user writes the lambda inside the loop
        known[loss_fn] = lambda model, micro: tell(loss_fn(model, micro))
    return known[loss_fn]


def _wrapper_oom(runner: Runner) -> tuple[Any, Any]:
    return _wrapper(runner, accumulation_steps=1, on_oom=_on_oom(runner))


def _on_oom(runner: Runner) -> str:
    """Every other user lets what memory forces change the gradient, with a warning."""
    return "inexact" if runner.spec.index % 2 else "exact"


def _microbatches(runner: Runner, **settings: Any) -> tuple[Any, Any]:
    spec = runner.spec
    settings = {"accumulation_steps": spec.parts, **_settings(spec), **settings}
    trainer = mk.MemoryEfficientTrainingWrapper(runner.model, runner.optimizer, **settings)

    def run(done: Done, step: Step, batch: Any, fields: Fields) -> None:
        loss_fn, unwrap = runner.loss_fn(step), CONTAINERS[step.container].unwrap
        sizes = []
        with runner.fault():
            for attempt in trainer.microbatches(batch):
                with attempt as micro:
                    with trainer.autocast():
                        said = loss_fn(runner.model, micro)
                    _backward(trainer, said)
                    sizes.append(len(unwrap(micro)["x"]))
            trainer.step()
        done.sizes = tuple(sizes)

    return trainer, run


def _backward(owner: Any, said: Any, **more: Any) -> None:
    if isinstance(said, Told):
        how = "mean" if said.mean is not None else "sum"
        owner.backward(said.mean if said.mean is not None else said.sum, count=said.count, reduction=how)
    else:
        owner.backward(said, **more)


def _split_loss(runner: Runner, **settings: Any) -> tuple[Any, Any]:
    split = mk.SplitLoss(runner.model, **{"num_microbatches": runner.spec.parts, **settings})

    def run(done: Done, step: Step, batch: Any, fields: Fields) -> None:
        with runner.fault():
            loss = split(batch, _told(runner, step, runner.loss_fn(step)))
        loss.backward()
        done.sizes, done.num_ooms = split.sizes, split.num_ooms
        runner.optimizer.step()

    return split, run


def _accumulator(runner: Runner, *, weigh: str) -> tuple[Any, Any]:
    accumulator = mk.GradientAccumulator(runner.optimizer, runner.spec.parts)

    def run(done: Done, step: Step, batch: Any, fields: Fields) -> None:
        loss_fn, wrap = runner.loss_fn(step), CONTAINERS[step.container].wrap
        done.sizes = even_sizes(len(fields["x"]), runner.spec.parts)
        at, data = 0, cast(fields, runner.spec.dtype)
        for size in done.sizes:
            said = loss_fn(runner.model, wrap(take(data, at, at + size)))
            if weigh == "sum" and not isinstance(said, (Told, tuple)):
                _backward(accumulator, said * size, count=size, reduction="sum")
            else:
                _backward(accumulator, said, **({"count": size} if weigh == "rows" else {}))
            at += size
        if not accumulator.step():
            accumulator.flush()

    return accumulator, run


def even_sizes(rows: int, parts: int) -> tuple[int, ...]:
    """Rows of each part, the larger ones first."""
    parts = max(1, min(parts, rows))
    return tuple(rows // parts + (part < rows % parts) for part in range(parts))


def _split_fn(runner: Runner, *, drops: bool = False, how: str = "wrapper") -> tuple[Any, Any]:
    split_fn = mk.points.split_packed if runner.spec.steps[0].container == "packed" else split_list
    make = _wrapper if how == "wrapper" else _split_loss
    owner, run_inner = make(runner, split_fn=drop_last(split_fn) if drops else split_fn)

    def run(done: Done, step: Step, batch: Any, fields: Fields) -> None:
        run_inner(done, step, batch, fields)
        unwrap = CONTAINERS[step.container].unwrap
        done.sizes = tuple(len(unwrap(part)["x"]) for part in split_fn(batch, runner.spec.parts))

    return owner, run


_OWNERS: dict[str, Callable[[Runner], tuple[Any, Any]]] = {
    "wrapper": _wrapper,
    "wrapper, unchecked": lambda runner: _wrapper(runner, probe=False),
    "wrapper, require": lambda runner: _wrapper(runner, probe="require"),
    "wrapper, on_oom=raise": lambda runner: _wrapper(runner, on_oom="raise"),
    "wrapper, out of memory": _wrapper_oom,
    "microbatches": _microbatches,
    "microbatches, out of memory": lambda runner: _microbatches(runner, accumulation_steps=1, on_oom=_on_oom(runner)),
    "SplitLoss": _split_loss,
    "SplitLoss, sum": lambda runner: _split_loss(runner, reduction="sum"),
    "SplitLoss, out of memory": lambda runner: _split_loss(runner, num_microbatches=1, on_oom=_on_oom(runner)),
    "accumulator": lambda runner: _accumulator(runner, weigh="rows"),
    "accumulator, sum": lambda runner: _accumulator(runner, weigh="sum"),
    "accumulator, no count": lambda runner: _accumulator(runner, weigh="one"),
    "split_fn": _split_fn,
    "split_fn, drops": lambda runner: _split_fn(runner, drops=True),
    "split_fn, SplitLoss": lambda runner: _split_fn(runner, how="SplitLoss"),
}
