"""The file that a run on a GPU leaves: one JSON without private data, whose sum shows whether it is whole."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from memkit._machine.files import write_text
from memkit.errors import FileFormatError

FOLDER = Path(__file__).parents[1] / "results" / "gpu"
"""Of the committed files, one for each card and version of PyTorch."""
_PATH = re.compile(r"(?:[A-Za-z]:)?[/\\](?:[^\s'\"/\\:]+[/\\])+")  # folders of a path; the file's name stays


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Card(Strict):
    """The GPU: its name as the driver says it, memkit's row for it, and how many there were."""

    name: str
    row: str
    compute_capability: str
    total_bytes: int
    num_gpus: int
    is_virtual: bool


class Software(Strict):
    commit: str | None
    memkit: str
    python: str
    torch: str
    cuda: str | None
    cudnn: int | None
    driver: str | None
    system: str


class Outcome(Strict):
    """The outcome of a case; the reason says why it has no figures."""

    status: Literal["done", "failed", "timed out", "skipped"]
    seconds: float
    reason: str = ""
    figures: dict[str, Any] = {}


class Allocations(Strict):
    num: int
    num_same_address: int
    num_other_decisions: int


class Difference(Strict):
    operator: str
    times: int
    kept_bytes: int
    inside_bytes: int


class Prediction(Strict):
    """The figures of a case ``predicted/...``."""

    peak_bytes: list[int]
    kept_bytes: list[int]
    reserved_bytes: int
    measured_peak_bytes: list[int]
    measured_reserved_bytes: int
    peak_error: float
    reserved_error: float
    differing_operators: list[Difference]
    allocations: Allocations


class Evidence(Strict):
    """All that a run found."""

    schema_version: Literal[1] = 1
    date: str
    card: Card
    software: Software
    cases: dict[str, Outcome]

    def predictions(self) -> dict[str, Prediction]:
        """By training; of those that ran."""
        return {
            name.removeprefix("predicted/"): Prediction.model_validate(outcome.figures)
            for name, outcome in self.cases.items()
            if name.startswith("predicted/") and outcome.status == "done"
        }

    def write(self, path: Path) -> None:
        """Write it with its sum, atomically."""
        content = self.model_dump(mode="json")
        write_text(path, json.dumps(content | {"sha256": sum_of(content)}, indent=1) + "\n")


def read(path: Path) -> Evidence:
    """Read a file, also one from another machine.

    Raises:
        FileFormatError: It is damaged, was changed after it was written, or is no such file.
        OSError: It cannot be read.
    """
    try:
        content = json.loads(path.read_bytes())
        found = content.pop("sha256")
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise _refusal(path, f"{type(error).__name__}: {error}", "a JSON object with its sum, `sha256`") from error
    if found != sum_of(content):
        raise _refusal(path, "content that does not have the sum in the file", "the file as it was written")
    try:
        evidence = Evidence.model_validate(content)
        evidence.predictions()
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise _refusal(path, f"{where}: {first['msg']}", "the fields of version 1") from error
    return evidence


def _refusal(path: Path, got: str, expected: str) -> FileFormatError:
    return FileFormatError(
        f"python -m benchmarks gpu show {path.name}",
        got=got,
        expected=expected,
        fix="copy the file again from the machine that wrote it, or run `python -m benchmarks gpu` there once more.",
    )


def sum_of(content: dict[str, Any]) -> str:
    """SHA-256 of the content, however it is laid out."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def without_paths(text: str) -> str:
    """A message in which no folder of the machine is left."""
    return _PATH.sub("", text)
