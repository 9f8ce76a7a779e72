"""Out-of-memory is recognized by type and message, and a retry starts without the failed attempt's tensors."""

import gc
import itertools
import json
import logging
import pickle
import pydoc
import sys
import textwrap
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

from memkit._core.errors import ConfigError, InputError, InputTypeError, MemkitOutOfMemoryError, StateError
from memkit._recovery import attempt, errors
from memkit._recovery.attempt import recover_from_oom
from memkit._recovery.errors import OomVerdict, classify_oom, is_out_of_memory
from tests.helpers import assert_refused, run_python

ROOT = Path(__file__).parents[2]
CORPUS = json.loads((ROOT / "tests" / "data" / "oom_corpus.json").read_text())
CPU_OOM = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 134217728 bytes."


def build(entry):
    kind = pydoc.locate(entry["type"])
    return kind(*[entry[key] for key in ("errno", "message") if entry.get(key)])


def linked(exc, *, cause=None, context=None):
    """The error as ``raise ... from`` (cause) or a raise inside ``except`` (context) leaves it."""
    if cause is not None:
        exc.__cause__ = cause
    exc.__context__ = context or cause
    return exc


def ids(entry):
    return f"{entry['type']}-{entry['message'][:40]}"


# ---- the classifier


@pytest.mark.parametrize("entry", CORPUS["positive"], ids=ids)
def test_known_message_is_recognized(entry):
    exc = build(entry)
    assert classify_oom(exc) == OomVerdict(entry["certain"], entry["backend"])
    assert is_out_of_memory(exc, under_pressure=True)
    assert is_out_of_memory(exc, under_pressure=False) == entry["certain"]


@pytest.mark.parametrize("entry", CORPUS["negative"], ids=ids)
def test_other_error_is_not_recognized_even_under_pressure(entry):
    assert classify_oom(build(entry)) is None
    assert not is_out_of_memory(build(entry), under_pressure=True)


def test_corpus_is_large_enough_and_every_message_has_a_source():
    assert len(CORPUS["positive"]) >= 40
    assert len(CORPUS["negative"]) >= 60
    assert all(entry["source"].strip() for entry in CORPUS["positive"] + CORPUS["negative"])


def test_every_row_of_the_table_is_there_for_a_real_message():
    messages = [str(build(entry)) for entry in CORPUS["positive"]]
    for _, _, pattern in errors._SIGNS:
        for alternative in _alternatives(pattern.pattern):
            assert any(errors.re.search(alternative, message) for message in messages), alternative


def _alternatives(pattern):
    """Split at the bars that are not inside brackets."""
    parts, depth = [""], 0
    for char in pattern:
        depth += (char == "(") - (char == ")")
        if char == "|" and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return parts


@pytest.mark.parametrize(
    "exc",
    [
        ValueError("the log says: CUDA out of memory. Tried to allocate 2.00 GiB"),
        KeyError("CUDA out of memory"),
        AssertionError(CPU_OOM),
        StateError("step()", got="CUDA out of memory", expected="a step", fix="call step()."),
        KeyboardInterrupt(),
        SystemExit(CPU_OOM),
        RuntimeError("expected memory_format to be one of torch.contiguous_format"),
        RuntimeError("the output may share memory with the input; out-of-place version wanted"),
        RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned"),
    ],
    ids=repr,
)
def test_message_counts_only_on_its_error_types(exc):
    assert not is_out_of_memory(exc, under_pressure=True)


class UnprintableError(RuntimeError):
    def __str__(self):
        raise TypeError("broken __str__")


@pytest.mark.parametrize("exc", [RuntimeError(), RuntimeError(12, None), OSError(), Exception(), UnprintableError("x")])
def test_odd_arguments_do_not_crash(exc):
    assert not is_out_of_memory(exc, under_pressure=True)


def test_out_of_memory_types_need_no_text():
    assert classify_oom(MemoryError()) == OomVerdict(True, "cpu")
    assert classify_oom(torch.OutOfMemoryError()) == OomVerdict(True, "cuda")
    assert classify_oom(OSError(12, "any language")) == OomVerdict(True, "cpu")


def test_explicit_cause_counts_and_mere_context_does_not():
    oom = RuntimeError(CPU_OOM)
    assert is_out_of_memory(linked(ValueError("could not build the batch"), cause=oom))
    assert is_out_of_memory(linked(ValueError("outer"), cause=linked(KeyError("inner"), cause=oom)))
    assert not is_out_of_memory(linked(KeyError("x"), context=oom))
    assert not is_out_of_memory(linked(RuntimeError("bad sample"), context=oom))
    assert not is_out_of_memory(linked(KeyboardInterrupt(), cause=oom))


def test_certain_cause_outweighs_a_probable_error():
    exc = linked(RuntimeError("could not create a primitive"), cause=torch.OutOfMemoryError("CUDA out of memory."))
    assert classify_oom(exc) == OomVerdict(True, "cuda")


def test_masked_context_counts_only_for_the_known_mask():
    mask = "[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"
    assert is_out_of_memory(linked(RuntimeError(mask), context=MemoryError()))
    assert not is_out_of_memory(linked(RuntimeError(mask), context=OSError(28, "No space left on device")))
    assert not is_out_of_memory(RuntimeError(mask))


def test_cyclic_causes_terminate():
    first, second = RuntimeError("a"), RuntimeError("b")
    first.__cause__, second.__cause__ = second, first
    assert not is_out_of_memory(first)


def test_group_counts_when_every_leaf_does():
    oom = RuntimeError(CPU_OOM)
    assert is_out_of_memory(ExceptionGroup("g", [oom, ExceptionGroup("h", [MemoryError()])]))
    assert not is_out_of_memory(ExceptionGroup("g", [oom, ValueError("x")]))
    assert not is_out_of_memory(BaseExceptionGroup("g", [oom, KeyboardInterrupt()]))
    mixed = ExceptionGroup("g", [oom, RuntimeError("could not create a primitive")])
    assert not is_out_of_memory(mixed, under_pressure=False)
    assert is_out_of_memory(mixed, under_pressure=True)


def test_source_line_quoted_by_a_worker_traceback_is_no_evidence():
    text = (
        "Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        '  File "data.py", line 9, in __getitem__\n    raise RuntimeError(f"no CUDA out of memory here: {x}")\n'
        "RuntimeError: no such sample\n"
    )
    assert not is_out_of_memory(RuntimeError(text))


# ---- recovery


class Probe:
    """fn(size) that keeps a weak reference to each attempt's tensor and says which are alive when it starts."""

    def __init__(self, largest, fail):
        self.largest, self.fail = largest, fail
        self.tensors, self.alive_at_start = [], []

    def __call__(self, size):
        self.alive_at_start.append(sum(ref() is not None for ref in self.tensors))
        batch = torch.zeros(size)
        self.tensors.append(weakref.ref(batch))
        if size > self.largest:
            self.fail(batch)
        return size, float(batch.sum())


def fail_plainly(batch):
    raise RuntimeError(CPU_OOM)


def fail_in_a_cycle(batch):
    frame = sys._getframe()  # the frame holds itself through its own local: only the cycle collector frees it
    assert frame.f_locals["batch"] is batch
    raise RuntimeError(CPU_OOM)


def fail_with_a_ring(batch):
    ring = [batch]
    ring.append(ring)  # outlives the frame: clearing frames is not enough either
    raise RuntimeError(CPU_OOM)


def fail_with_a_cause(batch):
    try:
        fail_plainly(batch)
    except RuntimeError as exc:
        raise ValueError("could not build the batch") from exc


kept_errors = []


def fail_and_keep_the_error(batch):
    try:
        fail_plainly(batch)
    except RuntimeError as exc:
        kept_errors.append(exc)
        raise


FAILURES = [fail_plainly, fail_in_a_cycle, fail_with_a_ring, fail_with_a_cause, fail_and_keep_the_error]


@pytest.mark.parametrize("fail", FAILURES)
def test_failed_attempt_is_freed_before_the_next(fail):
    probe = Probe(largest=20, fail=fail)
    gc.disable()  # so that only the recovery's own collection can free a cycle
    try:
        assert recover_from_oom(probe, 100) == (12, 0.0)
    finally:
        gc.enable()
        kept_errors.clear()
    assert probe.alive_at_start == [0, 0, 0, 0]


def read_something():
    payload = [1]
    raise KeyError(payload.pop())


@pytest.mark.parametrize("fail", FAILURES)
def test_an_error_handled_around_a_recovery_keeps_its_frames(fail):
    """It is the context of each error inside, but not of the recovery's making."""
    probe = Probe(largest=20, fail=fail)
    gc.disable()
    try:
        read_something()
    except KeyError as error:
        handled, trace = error, error.__traceback__
        assert recover_from_oom(probe, 100) == (12, 0.0)
    finally:
        gc.enable()
        kept_errors.clear()
    assert handled.__traceback__ is trace
    assert trace.tb_next.tb_frame.f_locals == {"payload": []}
    assert probe.alive_at_start == [0, 0, 0, 0]


def retry_inside_except(fn, size):
    """The common way, accelerate's find_executable_batch_size included: clean up and continue inside `except`."""
    try:
        return fn(size)
    except (RuntimeError, ValueError):
        gc.collect()
        return retry_inside_except(fn, size // 2)


@pytest.mark.parametrize("fail", FAILURES)
def test_negative_control_the_naive_retry_keeps_them_all(fail):
    probe = Probe(largest=20, fail=fail)
    assert retry_inside_except(probe, 100) == (12, 0.0)
    kept_errors.clear()
    assert probe.alive_at_start == [0, 1, 2, 3]


def test_returns_result_of_first_fitting_size():
    tried = []

    def fn(size):
        tried.append(size)
        if size > 50:
            raise MemoryError
        return "done"

    assert recover_from_oom(fn, (200, 96, 32, 8)) == "done"
    assert tried == [200, 96, 32]


@given(st.integers(1, 10**6))
def test_an_int_is_halved_down_to_one(start):
    tried = []

    def fn(size):
        tried.append(size)
        raise MemoryError

    assert_refused(lambda: _without_release(fn, start), MemkitOutOfMemoryError)
    assert len(tried) == start.bit_length()
    assert tried[0] == start
    assert tried[-1] == 1
    assert all(after == before // 2 for before, after in itertools.pairwise(tried))


def _without_release(fn, sizes):
    """The recovery without its garbage collection, which takes milliseconds per attempt and is tested above."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attempt, "release_cached_memory", lambda: None)
        return recover_from_oom(fn, sizes)


def test_other_errors_pass_through_at_once():
    tried = []
    error = RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)")

    def fn(size):
        tried.append(size)
        raise error

    with pytest.raises(RuntimeError) as caught:
        recover_from_oom(fn, 256)
    assert caught.value is error
    assert tried == [256]


def test_raises_out_of_memory_if_nothing_fits():
    def fn(size):
        raise RuntimeError(CPU_OOM + "\nsecond line")

    error = assert_refused(lambda: recover_from_oom(fn, [8, 2]), MemkitOutOfMemoryError)
    assert error.__context__ is None
    assert str(error) == (
        "recover_from_oom(fn, sizes): got out of memory at every size: 8, 2; the last error was "
        f"RuntimeError: {CPU_OOM}; expected at least one size that fits into memory. Way out: allow smaller sizes, or "
        "free memory outside fn: checkpointing, a smaller model, a lower precision."
    )
    assert classify_oom(error) == OomVerdict(True, "cpu")
    assert classify_oom(pickle.loads(pickle.dumps(error))) == OomVerdict(True, "cpu")


def test_recoveries_nest():
    def fn(outer):
        def inner(size):
            if outer * size > 6:
                raise MemoryError
            return outer, size

        return recover_from_oom(inner, [4, 2])

    assert recover_from_oom(fn, [8, 4, 2]) == (2, 2)


def test_each_failure_is_logged(caplog):
    with caplog.at_level(logging.WARNING, logger="memkit"):
        recover_from_oom(Probe(largest=20, fail=fail_plainly), 40)
    assert [record.getMessage() for record in caplog.records] == [f"out of memory at size 40: RuntimeError: {CPU_OOM}"]


@pytest.mark.parametrize(
    ("sizes", "error", "text"),
    [
        ([], InputError, "got no size"),
        (0, InputError, "got size 0; expected positive sizes"),
        ([4, 0], InputError, "got size 0 after 4"),
        ([4, 8], InputError, "got size 8 after 4; expected positive sizes, each smaller"),
        ([4, 4], InputError, "got size 4 after 4"),
        (iter([4, 8]), InputError, "got size 8 after 4"),
        (2.5, InputTypeError, "got a float; expected int sizes"),
        ([True], InputTypeError, "got a bool"),
        ("256", InputTypeError, "got a str"),
        (None, InputTypeError, "got a NoneType"),
    ],
)
def test_rejects_invalid_sizes_before_first_call(sizes, error, text):
    tried = []
    assert_refused(lambda: recover_from_oom(tried.append, sizes), error, text)
    assert tried == []


# ---- the real thing, in a child process with a soft limit on its data segment

PREAMBLE = """
import gc, io, mmap, os, resource, sys
import numpy as np
import torch
from memkit._machine.devices import under_memory_pressure
from memkit._recovery.attempt import recover_from_oom
from memkit._recovery.errors import classify_oom, is_out_of_memory
MIB = 2**20

def limit(headroom_bytes):
    status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
    used_bytes = int(status["VmData"].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (used_bytes + headroom_bytes, resource.RLIM_INFINITY))

def report(fn):
    try:
        fn()
    except BaseException as exc:
        known = is_out_of_memory(exc)  # asks the machine where the text does not decide
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        print(type(exc).__name__, known, classify_oom(exc).backend, exc, sep="|")
"""


def run_child(code):
    if not Path("/proc/self/status").exists():
        pytest.skip("RLIMIT_DATA and /proc are Linux")
    # Every large block is its own mapping, given back when freed; two threads keep oneDNN's scratch small.
    settings = {"MALLOC_MMAP_THRESHOLD_": "1048576", "OMP_NUM_THREADS": "2"}
    return run_python(PREAMBLE + textwrap.dedent(code), **settings).stdout.strip()


LIVE = {
    "torch": "limit(64 * MIB); report(lambda: torch.empty(128 * MIB, dtype=torch.uint8))",
    "numpy": "limit(64 * MIB); report(lambda: np.ones(128 * MIB, dtype=np.uint8))",
    "python": "limit(64 * MIB); report(lambda: bytearray(128 * MIB))",
    "LAPACK": """
        square = torch.randn(2000, 2000)
        torch.linalg.svd(torch.randn(8, 8))
        torch.mm(square, square)
        limit(75 * MIB)  # the copy and the result fit, the library's scratch does not
        report(lambda: torch.linalg.svd(square, full_matrices=False))
        """,
    "mmap": """
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, resource.RLIM_INFINITY))
        report(lambda: mmap.mmap(-1, 16 << 30))
        """,
    "save": """
        rows = torch.zeros(24 * MIB)
        torch.save(rows[:1].clone(), io.BytesIO())
        limit(64 * MIB)
        report(lambda: torch.save(rows, io.BytesIO()))
        """,
    "worker": """
        class Rows(torch.utils.data.Dataset):
            def __len__(self):
                return 1

            def __getitem__(self, index):
                limit(64 * MIB)
                return np.ones(128 * MIB, dtype=np.uint8)

        report(lambda: list(torch.utils.data.DataLoader(Rows(), num_workers=1)))
        """,
    "oneDNN": """
        conv = torch.nn.functional.conv2d
        conv(torch.randn(1, 3, 16, 16), torch.randn(4, 3, 3, 3))
        pairs = [(torch.randn(1, c, 24, 24), torch.randn(c + 1, c, 3, 3)) for c in range(3, 200, 7)]
        limit(4 * MIB)
        report(lambda: [conv(x, w, padding=1) for x, w in pairs])
        """,
}
EXPECTED = {
    "torch": ("RuntimeError", CPU_OOM[:40]),
    "numpy": ("MemoryError", "Unable to allocate 128. MiB"),
    "python": ("MemoryError", ""),
    "LAPACK": ("RuntimeError", "std::bad_alloc"),
    "mmap": ("OSError", "[Errno 12] Cannot allocate memory"),
    "save": ("RuntimeError", "unexpected pos"),
    "worker": ("RuntimeError", "Caught MemoryError in DataLoader worker process 0."),
    "oneDNN": ("RuntimeError", ""),  # its own message or the allocator's, whichever of the two is first to ask
}


BY_DEFAULT = {"torch"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in BY_DEFAULT else [pytest.mark.slow]) for name in LIVE]
)
def test_real_out_of_memory_is_recognized(name):
    kind, known, backend, text = run_child(LIVE[name]).split("|", 3)
    expected_kind, expected_text = EXPECTED[name]
    assert (kind, known, backend) == (expected_kind, "True", "cpu")
    assert expected_text in text


@pytest.mark.slow
def test_ambiguous_message_without_pressure_is_not_recognized():
    output = run_child("""
        error = RuntimeError("could not create a primitive")
        print(is_out_of_memory(error), under_memory_pressure("cpu"))
        held = torch.ones(200 * MIB, dtype=torch.uint8)
        limit(8 * MIB)
        print(is_out_of_memory(error), under_memory_pressure("cpu"))
    """)
    assert output.splitlines() == ["False False", "True True"]


@pytest.mark.slow
def test_real_training_step_recovers_at_a_smaller_size():
    output = run_child("""
        torch.set_num_threads(2)
        layers = [layer for _ in range(8) for layer in (torch.nn.Linear(512, 512), torch.nn.GELU())]
        model = torch.nn.Sequential(*layers)
        rows = torch.randn(256 * 64, 512)

        def step(size):
            model.zero_grad(set_to_none=True)
            loss = model(rows[: size * 64]).square().mean()
            loss.backward()
            return size, float(loss.detach())

        step(1)
        limit(200 * MIB)
        size, loss = recover_from_oom(step, 256)
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        print(size, loss == step(size)[1], model[0].weight.grad is not None)
    """)
    size, same, graded = output.split()
    assert 1 < int(size) < 256
    assert same == "True"
    assert graded == "True"


def test_uninspectable_error_counts_as_out_of_memory(monkeypatch):
    """Stands in for a process with nothing left, where now and then the look at the error fails."""

    def fail(error):
        raise MemoryError

    monkeypatch.setattr("memkit._recovery.errors.classify_oom", fail)
    assert is_out_of_memory(RuntimeError("CUDA out of memory"))
    assert not is_out_of_memory(KeyboardInterrupt())


def test_a_tensor_of_one_number_is_the_first_size():
    def step(size):
        if size > 1:
            raise MemoryError
        return size

    assert recover_from_oom(step, torch.tensor(4)) == 1
    assert recover_from_oom(step, torch.tensor([4, 1])) == 1


def test_functions_whose_call_does_no_work_are_refused():
    """They would run out of memory where nothing retries."""

    def parts(size):
        yield size

    async def answer(size):
        return size

    for fn in (parts, answer):
        assert_refused(lambda fn=fn: recover_from_oom(fn, 4), InputTypeError, "call recover_from_oom inside of it")
    assert recover_from_oom(lambda size: list(parts(size)), 4) == [4]


def test_pressure_is_said_by_true_or_false():
    error = RuntimeError("could not create a primitive")
    with pytest.raises(ConfigError, match=r"is_out_of_memory\(exc\): got under_pressure='no'.*under_pressure=False\."):
        is_out_of_memory(error, under_pressure="no")


def test_bytes_are_no_sizes():
    assert_refused(lambda: recover_from_oom(str, b"x"), InputTypeError, "recover_from_oom")
