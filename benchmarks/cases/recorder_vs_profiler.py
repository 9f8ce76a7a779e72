"""The recorder against the CPU allocator: peaks, hidden workspace, time per operator, and a sweep of operators.

Truth is a run without recorder under torch.profiler, allocation events summed. The peer is `MemTracker`, which torch
ships for the same purpose. The sweep runs forward and backward of torch's own operator samples, recorder and truth.

Run: python -m benchmarks.cases.recorder_vs_profiler   (8 minutes; torch's samples need `expecttest`)
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.result import write_result
from memkit._recorder.recorder import Recorder
from tests.allocations import observe_operators, trace_allocations
from tests.zoo import CASES, Case, no_mark

NUM_STEPS = 2
REPEATS = 9
WORKSPACE = 64  # bytes; less than this inside an operator is a Python number wrapped in a tensor
TIMED = ("encoder", "mlp", "unet2d")


def fresh(name: str) -> Case:
    torch.manual_seed(0)
    return CASES[name]()


def steps(case: Case) -> None:
    for _ in range(NUM_STEPS):
        case.step(no_mark)


def storages_bytes(model: torch.nn.Module) -> int:
    tensors = [*model.parameters(), *model.buffers()]
    return sum({id(t.untyped_storage()): t.untyped_storage().nbytes() for t in tensors}.values())


def peaks(name: str, hidden: dict[str, int]) -> dict[str, Any]:
    case = fresh(name)
    there_before = storages_bytes(case.model)
    truth = trace_allocations(lambda: steps(case)).peak + there_before
    case = fresh(name)
    with Recorder() as recorder:
        steps(case)
    case = fresh(name)
    operators, _ = observe_operators(lambda: steps(case), as_without_recorder=True)
    for op in operators:
        if op.hidden > WORKSPACE:
            hidden[op.name] = max(hidden.get(op.name, 0), op.hidden)
    top = max(operators, key=lambda op: op.recorded + op.hidden)
    return {
        "plain_peak_bytes": truth,
        "recorder_peak_bytes": recorder.recording().peak_bytes(),
        "hidden_at_peak": {top.name: top.hidden} if top.hidden > WORKSPACE else {},
        "unexplained_bytes": truth - there_before - top.recorded - top.hidden,
        "memtracker_peak_bytes": memtracker_peak(name),
    }


def memtracker_peak(name: str) -> int | str:
    case = fresh(name)
    tracker = MemTracker()
    tracker.track_external(case.model)
    try:
        with tracker:
            for _ in range(NUM_STEPS):
                case.step(no_mark)
                tracker.reset_mod_stats()
    except (RuntimeError, NotImplementedError) as error:  # a peer that cannot run a model is a result too
        return type(error).__name__
    return sum(device["Total"] for device in tracker.get_tracker_snapshot("peak").values())


class _Nothing(TorchDispatchMode):
    """The least that any dispatch mode costs."""

    num_operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_operators += 1
        return func(*args, **(kwargs or {}))


def microseconds_per_operator(name: str, *, fake: bool) -> dict[str, float]:
    with FakeTensorMode() if fake else contextlib.nullcontext():
        case = fresh(name)
        case.step(no_mark)
        counter = _Nothing()
        with counter:
            case.step(no_mark)
        best: dict[str, float] = {}
        for _ in range(REPEATS):
            for label, mode in (
                ("none", contextlib.nullcontext()),
                ("empty_mode", _Nothing()),
                ("recorder", Recorder()),
            ):
                with mode:
                    case.step(no_mark)
                    start = time.perf_counter()
                    steps(case)
                    taken = (time.perf_counter() - start) / NUM_STEPS / counter.num_operators * 1e6
                best[label] = min(best.get(label, taken), taken)
    return {label: round(value, 1) for label, value in best.items()} | {
        "ratio": round(best["recorder"] / best["none"], 2),
        "recorder_alone": round(best["recorder"] - best["none"], 1),
    }


def sweep() -> dict[str, Any]:
    """Forward and backward of torch's own samples: does recorder plus hidden workspace give the plain peak?"""
    from torch.testing._internal.common_methods_invocations import op_db

    exact, off, failed = 0, {}, []
    for op in op_db:
        if not op.supports_autograd or torch.float32 not in op.dtypes:
            continue
        try:
            samples = sorted(op.sample_inputs("cpu", torch.float32, requires_grad=True), key=num_elements)[-2:]
            differences = [sample_difference(op, sample) for sample in samples]
        except Exception as error:  # noqa: BLE001  # whatever a sample raises here, plain or watched, is a result
            failed.append(f"{op.name}: {type(error).__name__}")
            continue
        exact += sum(abs(d) <= WORKSPACE for d in differences)
        if any(abs(d) > WORKSPACE for d in differences):
            off[op.name] = [d for d in differences if abs(d) > WORKSPACE]
    num_off = sum(len(d) for d in off.values())
    return {
        "num_samples": exact + num_off,
        "num_exact": exact,
        "plain_minus_recorder_bytes": off,
        "not_run": failed,
    }


def num_elements(sample: Any) -> int:
    return sum(t.numel() for t in tree_leaves((sample.input, sample.args, sample.kwargs)) if torch.is_tensor(t))


def sample_difference(op: Any, sample: Any) -> int:
    def clear() -> None:
        for t in tree_leaves((sample.input, sample.args, sample.kwargs)):
            if torch.is_tensor(t):
                t.grad = None

    def run() -> None:
        torch.manual_seed(0)
        results = op(sample.input, *sample.args, **sample.kwargs)
        results = [t for t in tree_leaves(results) if torch.is_tensor(t) and t.requires_grad]
        if results:
            sum(t.abs().sum() for t in results).backward()

    def fresh_run(observe: Callable[[Callable[[], None]], Any]) -> Any:
        clear()
        return observe(run)

    fresh_run(lambda f: f())  # caches of the first call
    truth = fresh_run(trace_allocations).peak
    operators, _ = fresh_run(lambda f: observe_operators(f, as_without_recorder=True))
    return truth - max((op.recorded + op.hidden for op in operators), default=0)


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    hidden: dict[str, int] = {}
    models = {name: peaks(name, hidden) for name in CASES}
    figures = {
        "models": models,
        "hidden_workspace_bytes": dict(sorted(hidden.items(), key=lambda item: -item[1])),
        "microseconds_per_operator": {
            f"{name}, {'fake' if fake else 'real'}": microseconds_per_operator(name, fake=fake)
            for name in TIMED
            for fake in (False, True)
        },
        "operator_sweep": sweep(),
    }
    for name, row in models.items():
        print(name, row)
    print(figures["microseconds_per_operator"])
    print({k: v for k, v in figures["operator_sweep"].items() if k != "not_run"})
    print(write_result("recorder_vs_profiler", figures, peers=("expecttest",)))


if __name__ == "__main__":
    main()
