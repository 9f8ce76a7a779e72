"""Rules about shell scripts that start training: processes and the GPUs they see."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator

from memkit.check.findings import Rule, SourceSpan

_CARDS = re.compile(r"CUDA_VISIBLE_DEVICES=[\"']?([0-9]+(?:,[0-9]+)*)(?![\w,$])")
_PROCESSES = re.compile(r"--nproc[_-]per[_-]node[= ]\s*([0-9]+)(?!\w)")
_MPI = re.compile(r"\b(?:mpirun|mpiexec|srun)\b.*?\s(?:-n|-np|--n|--np|-c|--ntasks)(?:=|\s*)([0-9]+)\b(.*)")
_GIVEN = re.compile(
    r"\s--?(?:gpus?|gpu[_-]ids?|gpu[_-]list|devices?|device[_-]ids?)[= ]\s*[\"']?[0-9]+(?:,[0-9]+)*(?![\w,$.])"
)
_STARTS = re.compile(r"\b(python|torchrun|accelerate|deepspeed)")
_COMMENT = re.compile(r"(^|\s)#.*$")
_BACKGROUND = re.compile(r"(?<![&>])&\s*$")
_WAITS = re.compile(r"(^|[\s;&])wait\b")
_BLOCKS = re.compile(r"^\s*(if|for|while|until|case|else|elif|fi|done|esac|function)\b|\(\)\s*\{")


class Launcher:
    """A shell script as commands: lines joined, comments removed, each with its first and last line."""

    def __init__(self, text: str) -> None:
        self.commands: list[tuple[int, int, str]] = []
        first, parts = 1, list[str]()
        for number, line in enumerate(io.StringIO(text, newline=None), 1):
            code = _COMMENT.sub("", line.rstrip("\n"))
            parts.append(code.removesuffix("\\"))
            if not code.endswith("\\"):
                self.commands.append((first, number, " ".join(parts)))
                first, parts = number + 1, []
        if parts:
            self.commands.append((first, first + len(parts) - 1, " ".join(parts)))


def _find_shared(launcher: Launcher) -> Iterator[SourceSpan]:
    busy: set[str] = set()
    for first, last, command in launcher.commands:
        if _WAITS.search(command) or _BLOCKS.search(command):
            busy.clear()
        cards = _CARDS.search(command)
        if cards is None or not _STARTS.search(command):
            continue
        used = set(cards[1].split(","))
        if used & busy:
            yield SourceSpan(first, 1, last)
        if _BACKGROUND.search(command):
            busy |= used


def _find_crowded(launcher: Launcher) -> Iterator[SourceSpan]:
    exported: int | None = None
    for first, last, command in launcher.commands:
        cards, processes = _CARDS.search(command), _PROCESSES.search(command) or _MPI.search(command)
        here = len(cards[1].split(",")) if cards else None
        if _BLOCKS.search(command) or ("CUDA_VISIBLE_DEVICES" in command and cards is None):
            exported = None
        elif command.lstrip().startswith("export "):
            exported = here or exported
        visible = here or exported
        if processes is not None and visible is not None and int(processes[1]) > visible:
            yield SourceSpan(first, 1, last)


def _find_same_arguments(launcher: Launcher) -> Iterator[SourceSpan]:
    for first, last, command in launcher.commands:
        processes = _MPI.search(command)
        if processes is not None and int(processes[1]) > 1 and _GIVEN.search(processes[2]):
            yield SourceSpan(first, 1, last)


RULES: tuple[Rule[Launcher], ...] = (
    Rule(
        id="same-gpus-for-all-ranks",
        level="warning",
        what="mpirun passes the same GPUs to every process",
        why="each process is started with the same arguments: unless the script picks a GPU by its rank, all have "
        "their context and their peak on the first one.",
        fix="let the script take the GPU of its local rank, such as `$OMPI_COMM_WORLD_LOCAL_RANK`, and omit the list; "
        "set the available GPUs with CUDA_VISIBLE_DEVICES.",
        example="""
mpirun -n 2 python train.py --gpu_id 0,1
""",
        near_miss="""
CUDA_VISIBLE_DEVICES=0,1 mpirun -n 2 python train.py
mpirun -n 1 python train.py --gpu_id 0
""",
        find=_find_same_arguments,
    ),
    Rule(
        id="two-processes-one-gpu",
        level="warning",
        what="a second process is started on a GPU while the first one may still run",
        why="both have their context and their peak on one GPU.",
        fix="give each its own CUDA_VISIBLE_DEVICES, or put `wait` between them.",
        example="""
CUDA_VISIBLE_DEVICES=0 python train.py --seed 1 &
CUDA_VISIBLE_DEVICES=0 python train.py --seed 2 &
wait
""",
        near_miss="""
CUDA_VISIBLE_DEVICES=0 python train.py --seed 1 &
CUDA_VISIBLE_DEVICES=1 python train.py --seed 2 &
wait
CUDA_VISIBLE_DEVICES=0 python train.py --seed 3
""",
        find=_find_shared,
    ),
    Rule(
        id="more-processes-than-gpus",
        level="error",
        what="more processes per node than visible GPUs",
        why="the processes without a GPU of their own fail, or share one.",
        fix="list as many GPUs as processes.",
        example="""
CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node=4 train.py
""",
        near_miss="""
CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node=2 train.py
""",
        find=_find_crowded,
    ),
)
