"""The kit's description of a public project, and the copy that runs here."""

from __future__ import annotations

import importlib
import pkgutil
import re
import shutil
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.acceptance import projects

FOLDER = Path(__file__).parent
PATCHES = FOLDER / "patches"


@dataclass
class Copy:
    """A fresh copy of a project's files. What is changed here is changed in the plain version too, and is reported."""

    root: Path
    changes: list[str] = field(default_factory=list)  # in words, for the result file

    def replace(self, path: str, old: str, new: str, why: str) -> None:
        """Replace a text of a file, everywhere in it."""
        file = self.root / path
        text = file.read_text()
        assert old in text, f"{path}: {old!r} is not there; is the commit the one that the project names?"
        file.write_text(text.replace(old, new))
        self.changes.append(f"{path}: {why}")

    def write(self, path: str, content: str | bytes, what: str) -> None:
        """Add a file."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)
        self.changes.append(f"{path}: {what}")

    def add_stand_in(self, package: str, path: str, what: str) -> None:
        """Put a package of stand_ins/ beside the script, at ``path``, where ``import`` finds it first."""
        source = FOLDER / "stand_ins" / package
        shutil.copytree(source, self.root / path / package, ignore=shutil.ignore_patterns("__pycache__"))
        self.changes.append(f"{package}: {what}")


@dataclass(frozen=True)
class Project:
    """A public project: where it comes from, how it is run, and what memkit does in it.

    The patch is patches/NAME.diff, against the files of ``commit``, so that a user can apply it to a clone. A
    negative control, where there is one, is patches/NAME.control.diff: the obvious wrong way, which must be seen.
    """

    name: str
    repository: str  # OWNER/NAME
    commit: str
    licence: str
    files: tuple[str, ...]  # what is read of the repository: files or folders, from its root
    folder: str  # the script is run here
    command: tuple[str, ...]  # the script and its arguments
    num_steps: int  # optimizer steps, of all optimizers together; then the run is ended
    loss: str  # a regular expression for what the script prints of the loss; all its groups are read
    prepare: Callable[[Copy], None]  # what both versions need to run here: data without downloads, digits of the loss
    data: str  # what it is trained on
    shows: str  # what memkit does in it
    failed: str = "nothing"  # what did not work, in words
    control: str | None = None  # what the negative control does wrong
    dtype: str = "float64"  # of the comparison; "float32" where the code cannot run in float64
    exactness: float = 1e-10  # the relative difference that counts as equal there
    peers: tuple[str, ...] = ()  # packages whose versions belong to the figures

    @property
    def patch(self) -> Path:
        return PATCHES / f"{self.name}.diff"

    @property
    def control_patch(self) -> Path:
        return PATCHES / f"{self.name}.control.diff"


def all_projects() -> dict[str, Project]:
    names = [module.name for module in pkgutil.iter_modules(projects.__path__)]
    found = [importlib.import_module(f"{projects.__name__}.{name}").PROJECT for name in names]
    return {project.name: project for project in found}


def count_lines(patch: str) -> tuple[int, int]:
    """Count the lines that a unified diff adds and removes; empty lines count."""
    added = re.findall(r"^\+(?!\+\+ )", patch, re.MULTILINE)
    removed = re.findall(r"^-(?!-- )", patch, re.MULTILINE)
    return len(added), len(removed)


def stdlib_text(num_characters: int) -> str:
    """The beginning of Python's standard library, file after file by name: real text that is on every machine."""
    text = ""
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += file.read_text(encoding="utf-8", errors="ignore")
        if len(text) >= num_characters:
            break
    return text[:num_characters]
