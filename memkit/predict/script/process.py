"""The process in which `memkit dryrun` runs a script: on a virtual GPU, with its writes redirected.

`memkit.cli.dryrun` starts it as ``python -m memkit.predict.script.process ORDER``, where ORDER is a JSON object:
folder (used by this run only), cwd, script, is_module (script is a name, as for ``python -m``), arguments, gpu,
calibrated, steps, num_ranks (null: no torchrun), selected_fraction, answers (how the GPU answers reads of unknown
values), sizes (a file: if it exists, it holds the allocator requests of another run, and this run ends at the first
different request; otherwise it is written into the folder). The findings go to ``folder/report.json``; the script's own
output goes to this process's output.
"""

from __future__ import annotations

import json
import multiprocessing.process
import os
import random
import sys
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from importlib.abc import InspectLoader
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path
from sysconfig import get_paths
from types import CodeType, ModuleType, TracebackType
from typing import Any
from urllib.error import URLError

import numpy as np
import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from memkit._core.errors import MemkitError
from memkit._recorder.recorder import OperatorPlace, StepPosition
from memkit._simulation.guesses import CONTRARY, LARGE, OTHER, PLAIN, SMALL
from memkit._simulation.leftovers import patched
from memkit._simulation.simulation import AllocatorFigures
from memkit._torch.fake import UnsupportedFakeTensorException, UnsupportedOperatorException
from memkit.predict.estimate import MemoryEstimate
from memkit.predict.gpus import find_gpu
from memkit.predict.script.imports import AtImport
from memkit.predict.script.redirected import Redirection
from memkit.predict.script.torchrun import launched_as_first_rank
from memkit.predict.virtual_gpu import VirtualGPU

_ANSWERS = {"plain": PLAIN, "contrary": CONTRARY, "other": OTHER, "large": LARGE, "small": SMALL}
# Packages whose modules have a different name.
_PACKAGES = {
    "Bio": "biopython", "PIL": "Pillow", "absl": "absl-py", "bs4": "beautifulsoup4", "cv2": "opencv-python",
    "dateutil": "python-dateutil", "dotenv": "python-dotenv", "git": "GitPython", "hydra": "hydra-core",
    "mpl_toolkits": "matplotlib", "pytorch_lightning": "pytorch-lightning", "skimage": "scikit-image",
    "sklearn": "scikit-learn", "skvideo": "scikit-video", "umap": "umap-learn", "yaml": "PyYAML",
}  # fmt: skip
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_NETWORK_PACKAGES = ("huggingface_hub", "requests", "urllib3", "httpx")
_NO_NETWORK = (URLError, ConnectionError, TimeoutError)
# Errors that a script would not raise on a real GPU.
_NOT_THE_SCRIPTS = (MemkitError, NotImplementedError, UnsupportedFakeTensorException, UnsupportedOperatorException)
# Code in these folders is not the user's own.
_INSTALLED = (*(get_paths()[name] for name in ("stdlib", "purelib", "platlib")), str(Path(__file__).parents[2]))


_AFTER_STEPS, _BY_ITSELF = "after its steps", "by itself"  # how a script ended


class _EndOfStepsError(BaseException):
    """Ends a script after its last step, past its own ``except Exception``."""


class _DivergedError(BaseException):
    """Ends a script when its memory requests diverge from those of the run it is compared with."""


class Requests:
    """A script's requests to the allocator, in order, compared with those of another run.

    Args:
        gpu: The virtual GPU.
        expected: The sizes that another run requested; None if there is none.

    Attributes:
        sizes: The requested sizes.
        other_way: The first line whose request differed from the expected one; "" if none did.
    """

    def __init__(self, gpu: VirtualGPU, expected: Sequence[int] | None = None) -> None:
        self.sizes: list[int] = []
        self.other_way = ""
        self._gpu, self._expected = gpu, expected
        gpu.memory.on_request = self._note

    def _note(self, num_bytes: int) -> None:
        number = len(self.sizes)
        self.sizes.append(num_bytes)
        if self._expected is not None and self._expected[number : number + 1] != [num_bytes]:
            self.other_way = self.other_way or _line_of(self._gpu.memory.asker().place) or "the script"
            raise _DivergedError


class StepCounter:
    """Counts a script's steps and ends it after the last one.

    A step is an optimizer step. Several optimizers count separately, and the script ends when every optimizer that
    steps at all has done its steps. In a script without an optimizer, a step is a backward pass and what follows it.

    Args:
        most: Number of steps to run.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._num_done: Counter[int] = Counter()
        self._num_backwards = 0
        self._has_optimizer = False
        self._made: list[tuple[weakref.ref[Optimizer], str]] = []  # with the lines that made them

    @property
    def num_done(self) -> int:
        """Steps so far: of the optimizer with the most steps, or else backward passes."""
        return max(self._num_done.values(), default=self._num_backwards)

    @property
    def has_gradients(self) -> bool:
        """Whether there was a step, or a backward pass without one."""
        return bool(self.num_done or self._num_backwards)

    def unstepped(self) -> list[str]:
        """Return the lines that made optimizers which are there and have never stepped."""
        there = [(each(), line) for each, line in self._made]
        return [line for each, line in there if each is not None and not self._num_done[id(each)]]

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count steps within the block."""
        backward, initialize = torch.autograd.backward, Optimizer.__init__

        @wraps(backward)
        def counting(*args: Any, **kwargs: Any) -> None:
            if not self._has_optimizer and self._num_backwards == self._most:
                raise _EndOfStepsError
            backward(*args, **kwargs)
            self._num_backwards += 1

        @wraps(initialize)
        def noting(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            self._has_optimizer = True
            self._made.append((weakref.ref(optimizer), _line_of(StepPosition().place())))
            initialize(optimizer, *args, **kwargs)

        handle = register_optimizer_step_post_hook(self._after_step)
        try:
            with patched(torch.autograd, "backward", counting), patched(Optimizer, "__init__", noting):
                yield
        finally:
            handle.remove()

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._num_done[id(optimizer)] += 1
        if min(self._num_done.values()) >= self._most:
            raise _EndOfStepsError


def run_child() -> None:
    """Carry out the order on the command line."""
    order = json.loads(sys.argv[1])
    folder = Path(order["folder"])
    mirror = folder / "written"
    mirror.mkdir()
    script = order["script"]
    os.chdir(order["cwd"])
    multiprocessing.process.ORIGINAL_DIR = order["cwd"]  # type: ignore[attr-defined]  # workers look here
    sys.argv = [script, *order["arguments"]]
    sys.path[0] = order["cwd"] if order["is_module"] else str(Path(script).resolve().parent)
    redirection = Redirection(mirror)
    redirection.install()
    sys.meta_path.insert(0, AtImport(redirection))
    settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")  # noqa: TID251
    card = find_gpu(order["gpu"], calibrated=order["calibrated"])
    sizes = Path(order["sizes"])
    expected = np.load(sizes).tolist() if sizes.is_file() else None
    options = {"selected_fraction": order["selected_fraction"], "allocator_settings": settings}
    gpu = VirtualGPU(card, **options)
    requests = Requests(gpu, expected)
    gpu.guesses.answers = _ANSWERS[order["answers"]]
    _seed_draws()
    steps = StepCounter(order["steps"])
    start = time.perf_counter()
    ended, problem, is_compiled = _run(order, gpu, steps)
    allocator = gpu.memory.allocator
    report = {
        "ended": ended,
        "num_steps": steps.num_done,
        "seconds": time.perf_counter() - start,
        "problem": problem,
        "out_of_memory": [
            {"line": _line_of(place), "module": place.module, "phase": place.phase}
            for place in (asker.place for asker in gpu.memory.shortages)
            if place is not None
        ],
        "is_compiled": is_compiled,
        "written": redirection.written(),
        "branches": list(gpu.guesses.branches),
        "numbers": list(gpu.guesses.numbers),
        "other_way": requests.other_way,
        "peaks": (allocator.highest_allocated_bytes, allocator.highest_reserved_bytes),
        "estimate": _estimate(
            gpu,
            (
                *_doubt_of_nothing(gpu, steps, ended),
                *_doubts_of_steps(steps, ended),
                *((_COMPILES,) if is_compiled else ()),
            ),
        ).as_dict(),
    }
    if expected is None:
        np.save(folder / sizes.name, np.asarray(requests.sizes, dtype=np.int64))
    (folder / "report.json").write_text(json.dumps(report), encoding="utf-8")


def _doubt_of_nothing(gpu: VirtualGPU, steps: StepCounter, ended: str) -> tuple[str, ...]:
    """Return a doubt if the script took no memory of the GPU, or ended by itself without any gradient."""
    if not (gpu.memory.allocator.highest_allocated_bytes or gpu.memory.shortages):
        if steps.num_done:
            return ("the script trained on the CPU and put nothing on the card: move model and batches to cuda",)
        if ended == _BY_ITSELF:
            return ("the script put nothing on the card: pass it the arguments that training gets",)
    if ended == _BY_ITSELF and not steps.has_gradients:
        return ("no gradient was seen: what training takes is not counted. Pass the arguments that training gets",)
    return ()


_COMPILES = "the script calls torch.compile, and ran as written: compiled code often takes less, and can take more"


def _doubts_of_steps(steps: StepCounter, ended: str) -> list[str]:
    """Return a doubt for each optimizer that never stepped in a script which was ended: it may step later."""
    if ended != _AFTER_STEPS:
        return []
    return [
        f"the optimizer made at {line} never stepped: what it trains from a later step on is not counted. "
        f"--steps with more than {steps.num_done}, or a shorter warm-up, counts it"
        for line in steps.unstepped()
    ]


def _estimate(gpu: VirtualGPU, doubts: tuple[str, ...]) -> MemoryEstimate:
    """Return the estimate of a `VirtualGPU`, regardless of peaks that the script has reset, with further doubts."""
    record, memory = gpu.record(), gpu.memory
    figures = AllocatorFigures(
        memory.allocator.highest_allocated_bytes,
        memory.allocator.highest_reserved_bytes,
        memory.least_reserved(),
        memory.reserved_range(of_all=True),
        gpu.gpu.context_interval,
        gpu.gpu.name,
        gpu.gpu.total_bytes,
        memory.convolves,
    )
    return MemoryEstimate.of(replace(record, figures=figures, doubts=(*record.doubts, *doubts)))


def _line_of(place: OperatorPlace | None) -> str:
    return str(place.line or "") if place is not None else ""


def _seed_draws() -> None:
    """Make two runs of a script draw the same random numbers, unless it seeds them itself."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - the state that scripts draw from
    torch.manual_seed(0)  # noqa: TID251 - this process is the script's


def _run(order: dict[str, Any], gpu: VirtualGPU, steps: StepCounter) -> tuple[str, dict[str, str] | None, bool]:
    """Run a script as Python would; return how it ended, its problem, and whether it uses `torch.compile`."""
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    load = _load_module if order["is_module"] else _load_script
    compiled: list[bool] = []
    try:
        gpu.__enter__()  # never exited: the script's tensors live as long as the process
        with _noting_compile(compiled), steps.counted(), launched_as_first_rank(order["num_ranks"]):
            code = load(order["script"], module)
            exec(code, vars(module))  # the user's own code
    except _EndOfStepsError:
        return _AFTER_STEPS, None, bool(compiled)
    except _DivergedError:
        return "diverged", None, bool(compiled)
    except torch.OutOfMemoryError as error:
        return "out of memory", _problem(error, "the card is full: see docs/out-of-memory.md."), bool(compiled)
    except SystemExit as error:
        if error.code not in {None, 0}:
            return "error", _problem(error, "the script exited: its own output above says why."), bool(compiled)
    except KeyboardInterrupt as error:
        traceback.print_exception(error.with_traceback(_own(error)))
        sys.excepthook = _nothing  # Python itself would show it once more, with the frames of this file
        raise
    except Exception as error:  # noqa: BLE001 - a script may raise anything
        traceback.print_exception(error.with_traceback(_own(error)))
        after_guess = bool(gpu.guesses.branches or gpu.guesses.numbers)
        return "error", _problem(error, _way_out(error, after_guess=after_guess)), bool(compiled)
    return _BY_ITSELF, None, bool(compiled)


def _nothing(*_: object) -> None:
    """Do nothing: the error has been shown."""


def _load_script(script: str, module: ModuleType) -> CodeType:
    """Return the code of a file, and set in its module what `python SCRIPT.py` sets."""
    module.__file__ = str(Path(script).resolve())
    return compile(Path(script).read_bytes(), script, "exec")


def _load_module(name: str, module: ModuleType) -> CodeType:
    """Return the code of a module or a package's ``__main__``, and set in its module what `python -m NAME` sets."""
    spec = find_spec(name)  # imports the packages that it is in
    if spec is not None and spec.submodule_search_locations is not None:
        spec = find_spec(f"{name}.__main__")
    code = spec.loader.get_code(spec.name) if spec is not None and isinstance(spec.loader, InspectLoader) else None
    if spec is None or code is None:
        raise ModuleNotFoundError(f"No module named {name!r} that can be run as python -m {name}", name=name)
    module.__spec__, module.__package__, module.__loader__ = spec, spec.parent, spec.loader
    module.__file__ = sys.argv[0] = spec.origin or name
    return code


@contextmanager
def _noting_compile(compiled: list[bool]) -> Iterator[None]:
    compile_ = torch.compile

    def noted(*args: Any, **kwargs: Any) -> Any:
        compiled.append(True)
        return compile_(*args, **kwargs)

    with patched(torch, "compile", noted):
        yield


# ------------------------------------------------------------------------------------------------ what went wrong


def _problem(error: BaseException, fix: str) -> dict[str, str]:
    """Describe an error at the innermost line of the user's own code."""
    frames = [frame for frame in traceback.extract_tb(_own(error)) if not frame.filename.startswith(("<", *_INSTALLED))]
    line = f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}: {frames[-1].line}" if frames else ""
    message = f"got {error.got}; expected {error.expected}" if isinstance(error, MemkitError) else str(error)
    message = message or f"{type(error).__name__} without a message"
    kind = "simulation" if isinstance(error, _NOT_THE_SCRIPTS) else "script"
    return {"error": type(error).__name__, "message": message, "line": line, "fix": fix, "of": kind}


def _own(error: BaseException) -> TracebackType | None:
    """Return the traceback without the frames of this file."""
    rest = error.__traceback__
    while rest is not None and rest.tb_frame.f_code.co_filename == __file__:
        rest = rest.tb_next
    return rest


def _way_out(error: BaseException | None, *, after_guess: bool) -> str:
    """Suggest a fix for a script's error, based on its type and on whether a guessed value may have led to it."""
    if isinstance(error, MemkitError):
        return error.fix.replace("selected_fraction=", "--selected-fraction ")
    if isinstance(error, ModuleNotFoundError):
        return _way_to_module(str(error.name))
    if _asks_for_rank(error):
        return "the script is for torchrun: run memkit dryrun --nproc-per-node N SCRIPT, with torchrun's own N."
    chain = error
    while chain is not None:
        is_of_hub = type(chain).__module__.partition(".")[0] in _NETWORK_PACKAGES
        if isinstance(chain, _NO_NETWORK) or is_of_hub or "download" in str(chain).lower():
            return "the script downloads data: run it once without memkit to fetch the data."
        chain = chain.__cause__ or chain.__context__
    if isinstance(error, FileNotFoundError):
        return f"prepare {error.filename or 'the data'} as for training, and run in the folder in which you train."
    if after_guess:
        return (
            "see the script's traceback above; if a guessed value led there, leave its check out, or let it raise its "
            "error itself, as `if not ok: raise ValueError(...)`, which is assumed to pass: see docs/virtual-gpu.md."
        )
    return (
        "see the script's traceback above; if it does not fail on a real GPU, it uses something that the virtual GPU "
        "lacks, such as kernels of its own: see docs/virtual-gpu.md."
    )


def _asks_for_rank(error: BaseException | None) -> bool:
    """Return whether an error means that the script was not started by torchrun."""
    return isinstance(error, (KeyError, ValueError)) and any(name in str(error) for name in _RANK_VARIABLES)


def _way_to_module(name: str) -> str:
    """Suggest a fix for a missing module: a package, another version of one, or a folder of the project."""
    top = name.partition(".")[0]
    if name != top and find_spec(top) is not None:
        installed = packages_distributions().get(top, [top])[0]
        return f"{name} is not part of the installed {installed}: install the version that the script was written for."
    package = _PACKAGES.get(top, top)
    return (
        f"install {package} into the Python environment that memkit runs in; if {top} is the project's own, install "
        "the project, or set PYTHONPATH as for training."
    )


if __name__ == "__main__":
    run_child()
