"""`python -m benchmarks gpu`: run every case on the card of this machine, resume, show results, take in others'."""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import multiprocessing
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import groupby
from pathlib import Path

import torch

import memkit
from benchmarks.gpu import child, evidence, page
from benchmarks.gpu.cases import CASES, Case, Place
from benchmarks.gpu.evidence import Card, Evidence, Outcome, Software
from benchmarks.result import commit, version_of

WORK = Path("memkit-gpu-work")
DONE = 0
FAILED = 1  # a case failed; the others are in the file
REFUSED = 2  # no GPU, or a file that cannot be read
MOST_AT_ONCE = 16  # simulations, each of about 1 GB of host memory


def add_to(parser: argparse.ArgumentParser) -> None:
    """Describe the command's arguments."""
    parser.add_argument("cases", nargs="*", metavar="CASE", help="only cases whose names begin so; all without")
    parser.add_argument("--list", action="store_true", help="name the cases and end")
    parser.add_argument("--work", type=Path, default=WORK, metavar="FOLDER", help=f"of what is done ({WORK})")
    parser.add_argument("--again", action="store_true", help="run also what is done")
    parser.add_argument("--virtual", metavar="CARD", help="no proof: try the command on a card that is not there")
    parser.add_argument("--show", type=Path, nargs="+", metavar="FILE", help="print the results of files and end")
    parser.add_argument("--add", type=Path, metavar="FILE", help="check another card's file and put it into the docs")


def run(given: argparse.Namespace) -> int:
    if given.list:
        print(*CASES, sep="\n")
        return DONE
    if given.show or given.add:
        return show(given.show or [given.add], is_taken=given.add is not None)
    names = [name for name in CASES if not given.cases or name.startswith(tuple(given.cases))]
    if not names:
        print(f"No case begins with {' or '.join(given.cases)}; --list names them.", file=sys.stderr)
        return REFUSED
    if not given.virtual and not torch.cuda.is_available():
        print(
            "There is no NVIDIA GPU that this PyTorch can use "
            f"(torch {torch.__version__}, built for {'CUDA ' + torch.version.cuda if torch.version.cuda else 'the CPU'}"
            "). Nothing was run. `--virtual 'RTX 4090'` tries the command without a GPU; that proves nothing.",
            file=sys.stderr,
        )
        return REFUSED
    return Run(given.work.absolute(), given.virtual).cases(names, is_again=given.again)


def show(paths: list[Path], *, is_taken: bool) -> int:
    try:
        found = [evidence.read(path) for path in paths]
    except (memkit.errors.FileFormatError, OSError) as error:
        print(error, file=sys.stderr)
        return REFUSED
    print(page.of(found))
    if is_taken:
        if found[0].card.is_virtual:
            print("A virtual GPU's file proves nothing; it was not taken.", file=sys.stderr)
            return REFUSED
        evidence.FOLDER.mkdir(parents=True, exist_ok=True)
        found[0].write(evidence.FOLDER / name_of(found[0]))
        page.main()
    return DONE


def name_of(found: Evidence) -> str:
    words = f"{found.card.name} torch {found.software.torch} memkit {found.software.commit}"
    return "-".join("".join(c if c.isalnum() or c == "." else " " for c in words.lower()).split()) + ".json"


class Run:
    """The cases of one machine, whose results are written as they come.

    Args:
        work: Folder of files that cases leave for each other, and of the results so far.
        virtual: Name of a card that is not there.
    """

    def __init__(self, work: Path, virtual: str | None) -> None:
        self.place = Place(work, virtual)
        self.file = work / ("virtual.json" if virtual else "results.json")
        self.num_gpus = 1 if virtual else torch.cuda.device_count()
        (work / "logs").mkdir(parents=True, exist_ok=True)
        self.outcomes: dict[str, Outcome] = {}
        self.software = software()
        # Its server has imported everything and has no context of CUDA, so that a case begins within milliseconds.
        self.processes = multiprocessing.get_context("forkserver")
        self.processes.set_forkserver_preload(["benchmarks.gpu.child"])

    def cases(self, names: list[str], *, is_again: bool) -> int:
        if not is_again:
            self.outcomes = self.earlier()
        if not self.is_done("card"):
            names = ["card", *(name for name in names if name != "card")]
        numbers = {name: number for number, name in enumerate(names, 1)}
        for name, outcome in self.run_in_turn([name for name in names if is_again or not self.is_done(name)]):
            self.outcomes[name] = outcome
            words = f"{outcome.status}, {outcome.seconds:.0f} s{outcome.reason and ': ' + outcome.reason}"
            print(f"[{numbers[name]}/{len(names)}] {name} ... {words}", flush=True)
            if not self.is_done("card"):
                print("Without the card's own figures nothing else can run.", file=sys.stderr)
                return FAILED
            self.evidence().write(self.file)
        found = self.evidence()
        print(page.of([found]), f"\nWritten to {self.file}", sep="\n")
        return FAILED if any(each.status in {"failed", "timed out"} for each in found.cases.values()) else DONE

    def is_done(self, name: str) -> bool:
        return name in self.outcomes and self.outcomes[name].status == "done"

    def run_in_turn(self, names: Sequence[str]) -> Iterator[tuple[str, Outcome]]:
        """One case after the other; those that do not see the GPU, and so cannot disturb each other, at once."""
        for is_simulation, group in groupby(names, lambda name: CASES[name].hides_gpu):
            num = min(MOST_AT_ONCE, max(1, len(os.sched_getaffinity(0)) - 1)) if is_simulation else 1
            pool = ThreadPoolExecutor(num)
            try:
                waiting = {pool.submit(self.one, name, CASES[name]): name for name in group}
                yield from ((waiting[done], done.result()) for done in as_completed(waiting))
            finally:
                pool.shutdown(cancel_futures=True)

    def earlier(self) -> dict[str, Outcome]:
        """Results of an earlier run of the same commit and PyTorch on the same machine."""
        if not self.file.exists():
            return {}
        found = evidence.read(self.file)
        if found.software != self.software:
            print(f"{self.file} is of another commit or version of PyTorch: begun anew.")
            return {}
        return dict(found.cases)  # failed ones too: they stay in the file until they are run again

    def one(self, name: str, case: Case, target: Callable[..., None] = child.main) -> Outcome:
        """Run a case in its own process."""
        if case.num_gpus > self.num_gpus:
            return Outcome(status="skipped", seconds=0, reason=f"needs {case.num_gpus} GPUs")
        if case.needs_data and self.place.virtual:
            return Outcome(status="skipped", seconds=0, reason="needs a GPU with data")
        stem = self.place.stem(name)
        stem.with_suffix(".json").unlink(missing_ok=True)
        log = self.place.work / "logs" / f"{stem.name}.txt"
        log.write_text("")
        process = self.processes.Process(target=target, args=(name, self.place, log))
        start = time.monotonic()
        process.start()
        try:
            process.join(case.limit_s)
        finally:  # also at Ctrl-C, which does not reach a session of its own
            is_late = process.is_alive()
            kill_group(process.pid)
            process.kill()  # which may not have begun its own session yet
            process.join()
        seconds = time.monotonic() - start
        if is_late:
            return Outcome(status="timed out", seconds=seconds, reason=f"over {case.limit_s} s")
        if process.exitcode:
            lines = log.read_text(errors="replace").strip().splitlines()
            reason = evidence.without_paths(lines[-1])[:300] if lines else f"exit code {process.exitcode}"
            return Outcome(status="failed", seconds=seconds, reason=reason)
        return Outcome(
            status="done", seconds=seconds, figures=json.loads(stem.with_suffix(".json").read_text())["figures"]
        )

    def evidence(self) -> Evidence:
        row = self.outcomes["card"].figures
        card = Card(
            **{name: row[name] for name in ("name", "row", "compute_capability", "total_bytes")},
            num_gpus=self.num_gpus,
            is_virtual=self.place.virtual is not None,
        )
        order = [name for name in CASES if name in self.outcomes]
        return Evidence(
            date=dt.datetime.now(dt.UTC).strftime("%Y-%m-%d"),
            card=card,
            software=self.software,
            cases={name: self.outcomes[name] for name in order},
        )


def kill_group(pid: int | None) -> None:
    """Kill the processes that a case has left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def software() -> Software:
    return Software(
        commit=commit(),
        memkit=memkit.__version__,
        python=platform.python_version(),
        torch=version_of("torch") or torch.__version__,
        cuda=torch.version.cuda,
        cudnn=torch.backends.cudnn.version() if torch.version.cuda else None,
        driver=_driver(),
        system=f"{platform.system()} {platform.machine()}",
    )


def _driver() -> str | None:
    """The driver's version, as nvidia-smi says it."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    return done.stdout.strip().partition("\n")[0] or None
