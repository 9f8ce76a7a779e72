"""Out-of-memory at every operator of a training, and Ctrl-C at every line of a step, while other threads train.

Three models, three optimizers. A fault stands in place of the n-th operator of the first two steps, for every n. Two
other threads train other models at the same time, one of them with a fault of its own. Afterwards parameters, state of
the optimizer, buffers, generators, modes, hooks and gradients of all three are compared, bit for bit, with a plain loop
over micro-batches of the same sizes.

Ctrl-C comes before the n-th line of memkit that runs in a step, for every n, while two threads train on. The step must
be done or undone, wholly: all is as after the step, or as before it; the steps that follow end where they end without
the interrupt. One model and optimizer of each kind.

Run: python -m benchmarks.cases.recovery_search   (20 minutes, two processes)
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import multiprocessing
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import memkit as mk
from benchmarks.result import write_result
from tests.train.faults import MODELS, FailingOperator
from tests.train.interrupts import InterruptedLine

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd, momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "rmsprop, foreach": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, momentum=0.5, foreach=True),
}
KINDS = [(model, optimizer) for model in MODELS for optimizer in OPTIMIZERS]
ROWS, PARTS, STEPS, FAULTY_STEPS = 8, 2, 3, 2
INTERRUPTED = 1  # the step

Kind = tuple[str, str]


class Training:
    """A model in training, with random numbers of its own: torch's generator belongs to all threads."""

    def __init__(self, kind: Kind, *, is_plain: bool = False) -> None:
        with _LOCK:
            torch.manual_seed(3)
            self.model = MODELS[kind[0]]()
        for module in self.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            elif isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0
        self.model.noise = torch.Generator().manual_seed(5)
        self.optimizer = OPTIMIZERS[kind[1]](self.model.parameters())
        self.trainer = None if is_plain else mk.MemoryEfficientTrainingWrapper(
            self.model, self.optimizer, accumulation_steps=PARTS, max_grad_norm=1.0, probe=False
        )  # fmt: skip
        self.accumulator = mk.GradientAccumulator(self.optimizer, max_grad_norm=1.0) if is_plain else None
        generator = torch.Generator().manual_seed(7)
        shapes = ((ROWS, 6), (ROWS, 1))
        self.batches = [tuple(torch.randn(shape, generator=generator) for shape in shapes) for _ in range(STEPS)]

    def step(self, number: int) -> tuple[int, ...]:
        """Step with memkit; return the sizes of the micro-batches."""
        assert self.trainer is not None
        return self.trainer.train_step(self.batches[number % STEPS], self.loss).sizes

    def step_plainly(self, number: int, sizes: Sequence[int]) -> None:
        """Step in a loop over micro-batches of these sizes, in which nothing fails."""
        assert self.accumulator is not None
        x, y = self.batches[number % STEPS]
        self.accumulator.expect(ROWS)
        for part in zip(x.split(list(sizes)), y.split(list(sizes)), strict=True):
            self.accumulator.backward(self.loss(self.model, part), count=len(part[0]))
        self.accumulator.flush()

    def loss(self, model: nn.Module, part: Any) -> torch.Tensor:
        x, y = part
        return F.mse_loss(model(x + 0.01 * torch.randn(x.shape, generator=model.noise)), y)

    def state(self) -> dict[str, Any]:
        """All that can be compared."""
        optimizer = self.optimizer.state_dict()["state"].items()
        modules = list(self.model.modules())
        return {
            "model": {name: value.clone() for name, value in self.model.state_dict().items()},
            "optimizer": {
                number: {name: torch.as_tensor(each).clone() for name, each in state.items() if each is not None}
                for number, state in optimizer
            },
            "noise": self.model.noise.get_state(),
            "modes": [each.training for each in modules],
            "hooks": [len(each._forward_pre_hooks) + len(each._forward_hooks) for each in modules],  # noqa: SLF001
            "gradients": [parameter.grad is None for parameter in self.model.parameters()],
            "step": "step" in vars(self.optimizer),
        }


_LOCK, _SIGNALS = threading.Lock(), (signal.SIGINT, signal.SIGTERM)


def same(one: Any, other: Any) -> bool:
    try:
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    except AssertionError:
        return False
    return True


class Plain:
    """Ends of plain loops, by kind and sizes."""

    def __init__(self) -> None:
        self._known: dict[Any, dict[str, Any]] = {}

    def end(self, kind: Kind, sizes: Sequence[tuple[int, ...]]) -> dict[str, Any]:
        key = kind, tuple(sizes)
        if key not in self._known:
            training = Training(kind, is_plain=True)
            for number, each in enumerate(sizes):
                training.step_plainly(number, each)
            self._known[key] = training.state()
        return self._known[key]


class Worker(threading.Thread):
    """Trains in a thread, with a fault where one is asked for.

    Args:
        kind: Model and optimizer.
        place: The operator that fails; None for none.
        is_endless: Train until `stop`.
    """

    def __init__(self, kind: Kind, place: int | None = None, *, is_endless: bool = False) -> None:
        super().__init__()
        self.kind, self.place = kind, place
        self.sizes: list[tuple[int, ...]] = []
        self.num_failures = 0
        self.error = ""
        self._is_endless, self._stop_asked = is_endless, threading.Event()
        self.training = Training(kind)

    def run(self) -> None:
        try:
            with FailingOperator(*() if self.place is None else (self.place,)) as fault:
                while (self._is_endless and not self._stop_asked.is_set()) or len(self.sizes) < STEPS:
                    self.sizes.append(self.training.step(len(self.sizes)))
            self.num_failures = fault.num_failures
        except BaseException as error:  # noqa: BLE001 - it is told
            self.error = repr(error)

    def stop(self) -> None:
        self._stop_asked.set()
        self.join()

    def differences(self, plain: Plain) -> list[str]:
        if self.error:
            return [self.error]
        found, wanted = self.training.state(), plain.end(self.kind, self.sizes)
        return [name for name in found if not same(found[name], wanted[name])]


def num_operators(kind: Kind) -> int:
    """Operators of the first two steps."""
    training = Training(kind)
    with FailingOperator() as counter:
        for number in range(FAULTY_STEPS):
            training.step(number)
    return counter.num_operators


def others_of(kind: Kind) -> list[Kind]:
    number = KINDS.index(kind)
    return [KINDS[(number + 4) % len(KINDS)], KINDS[(number + 8) % len(KINDS)]]


def plant_everywhere(kind: Kind, plain: Plain, stride: int) -> dict[str, Any]:
    number, (second, third) = num_operators(kind), others_of(kind)
    number_second = num_operators(second)
    row: dict[str, Any] = {"operators": number, "runs": 0, "faults": 0, "cut": 0, "wrong": []}
    for place in range(1, number + 1, stride):
        workers = [Worker(kind, place), Worker(second, 1 + 7 * place % number_second), Worker(third)]
        for each in workers:
            each.start()
        for each in workers:
            each.join()
        row["runs"] += 1
        row["faults"] += sum(each.num_failures for each in workers)
        row["cut"] += any(sizes != (4, 4) for sizes in workers[0].sizes)
        row["wrong"] += [f"{place}: {each.kind}: {name}" for each in workers for name in each.differences(plain)]
    return row


@contextlib.contextmanager
def training_on(kinds: Sequence[Kind], plain: Plain, wrong: list[str]) -> Iterator[None]:
    """In the block, train in other threads; what differs in the end is noted."""
    workers = [Worker(kind, place, is_endless=True) for kind, place in zip(kinds, (60, None), strict=True)]
    for each in workers:
        each.start()
    try:
        yield
    finally:
        for each in workers:
            each.stop()
            wrong += [f"{each.kind} in another thread: {name}" for name in each.differences(plain)]


def interrupt(kind: Kind, place: int, ends: list[list[dict[str, Any]]]) -> tuple[bool, list[str]]:
    """Interrupt a step before a line; say whether it was done, and what is wrong."""
    training = Training(kind)
    for number in range(INTERRUPTED):
        training.step(number)
    line, handlers = InterruptedLine(place), [signal.getsignal(each) for each in _SIGNALS]
    interrupted = False
    try:
        with line.around():
            training.step(INTERRUPTED)
    except KeyboardInterrupt:
        interrupted = True
    wrong = [] if interrupted else ["no interrupt came"]
    for each, handler in zip(_SIGNALS, handlers, strict=True):
        if signal.getsignal(each) is not handler:
            signal.signal(each, handler)
            wrong.append("another handler of signals")
    if not torch.is_grad_enabled():
        torch.set_grad_enabled(True)
        wrong.append("gradients are off")
    assert training.trainer is not None
    is_done = training.trainer.num_steps == INTERRUPTED + 1
    way = ends[not is_done]
    found = training.state()
    wrong += [name for name in found if name != "gradients" and not same(found[name], way[INTERRUPTED][name])]
    training.trainer.state_dict()
    for number in range(INTERRUPTED + 1, STEPS):
        training.step(number)
        found = training.state()
        wrong += [f"{name} after step {number}" for name in found if not same(found[name], way[number][name])]
    return is_done, [f"{line.where}: {each}" for each in wrong]


def interrupt_everywhere(kind: Kind, plain: Plain, stride: int) -> dict[str, Any]:
    ends: list[list[dict[str, Any]]] = []
    for left_out in (None, INTERRUPTED):
        training = Training(kind)
        ends.append([])
        for number in range(STEPS):
            if number != left_out:
                training.step(number)
            ends[-1].append(training.state())
    training = Training(kind)
    for number in range(INTERRUPTED):
        training.step(number)
    with (counter := InterruptedLine()).around():
        training.step(INTERRUPTED)
    row: dict[str, Any] = {"lines": counter.num_lines, "interrupts": 0, "done": 0, "wrong": []}
    with training_on(others_of(kind), plain, row["wrong"]):
        for place in range(1, counter.num_lines + 1, stride):
            is_done, wrong = interrupt(kind, place, ends)
            row["interrupts"] += 1
            row["done"] += is_done
            row["wrong"] += wrong
    return row


def prepare() -> None:
    """In a process of the search."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores it
    gc.collect()
    gc.freeze()  # each survived fault collects cycles: not among all that was imported


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stride", type=int, default=1, help="every n-th place only; writes no result")
    stride = parser.parse_args().stride
    jobs = [(interrupt_everywhere, kind) for kind in (KINDS[8], KINDS[4], KINDS[0])]
    jobs += [(plant_everywhere, kind) for kind in reversed(KINDS)]
    figures: dict[str, dict[str, Any]] = {"faults": {}, "interrupts": {}}
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn"), initializer=prepare) as pool:
        futures = {pool.submit(search, kind, Plain(), stride): (search, kind) for search, kind in jobs}
        for future in as_completed(futures):
            search, kind = futures[future]
            what = "faults" if search is plant_everywhere else "interrupts"
            figures[what][", ".join(kind)] = future.result()
            print(what, kind, future.result(), flush=True)
    if stride == 1:
        print(write_result("recovery_search", {name: dict(sorted(rows.items())) for name, rows in figures.items()}))


if __name__ == "__main__":
    main()
