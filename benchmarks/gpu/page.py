"""Results of GPUs as tables: what the command prints, and what stands in docs/virtual-gpu-proof.md.

With `cudnn.benchmark` the first step is left out, and what is reserved: its trials take what is free.
The part of the page stands between ``<!-- gpu results -->`` and ``<!-- gpu results end -->``.
Run: python -m benchmarks.gpu.page
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu import evidence
from benchmarks.gpu.evidence import Evidence, Outcome, Prediction
from benchmarks.gpu.models import TRAININGS
from benchmarks.markdown import table
from benchmarks.tables import ROOT
from memkit._core.units import format_bytes

PAGE = ROOT / "docs" / "virtual-gpu-proof.md"
NEAR = 0.01  # a prediction farther off is explained or mended
MOST = 2  # operators that are named with a training
NONE_YET = "No card's file is here yet."


def main() -> None:
    """Write the part: all cards side by side, and each one whose trainings are not predicted again, by itself."""
    files = {path: evidence.read(path) for path in sorted(evidence.FOLDER.glob("*.json"))}
    others = [
        card(found) for path, found in files.items() if not path.with_name(f"{path.stem}.operators.json.gz").exists()
    ]
    text = "\n\n".join([overview([*files.values()]), *others]) if files else NONE_YET
    part = f"<!-- gpu results -->\n{text}\n<!-- gpu results end -->"
    PAGE.write_text(
        re.sub(r"<!-- gpu results -->.*<!-- gpu results end -->", lambda _: part, PAGE.read_text(), flags=re.DOTALL)
    )


def of(files: Sequence[Evidence]) -> str:
    """Markdown: the cards side by side, then each card's predictions and other figures."""
    return "\n\n".join([overview(files), *(card(each) for each in files)])


def overview(files: Sequence[Evidence]) -> str:
    heads = [
        "card",
        "PyTorch",
        "memkit",
        "peak: median error",
        "worst",
        "within 1%",
        "reserved: median error",
        "addresses",
    ]
    return table([*heads, "failed"], [row(each) for each in files])


def row(found: Evidence) -> list[str]:
    predictions = found.predictions()
    name = f"{found.card.name}{' (virtual: no proof)' if found.card.is_virtual else ''}"
    failed = [name for name, each in found.cases.items() if each.status in {"failed", "timed out"}]
    tests = found.cases.get("tests")
    failing_tests = f"{len(tests.figures['failed'])} tests" if tests and tests.status == "done" else "tests not run"
    words = [name, found.software.torch, found.software.commit or ""]
    if predictions:
        peaks = [abs(peaks_of(training, each)[1]) for training, each in predictions.items()]
        reserves = [abs(each.reserved_error) for training, each in predictions.items() if not is_tuned(training)]
        same = sum(each.allocations.num_same_address for each in predictions.values())
        words += [
            f"{statistics.median(peaks):.2%}",
            f"{max(peaks):.2%}",
            f"{sum(error <= NEAR for error in peaks)} of {len(peaks)}",
            f"{statistics.median(reserves):.2%}" if reserves else "not run",
            f"{same / max(sum(each.allocations.num for each in predictions.values()), 1):.2%}",
        ]
    else:
        words += ["not run"] * 5
    return [*words, f"{len(failed)} cases, {failing_tests}"]


def card(found: Evidence) -> str:
    software = found.software
    cuda = f"CUDA {software.cuda}, cuDNN {software.cudnn}, driver {software.driver}, " if software.cuda else ""
    size = format_bytes(found.card.total_bytes)
    text = f"{size}, PyTorch {software.torch}, {cuda}memkit {software.commit}, {found.date}."
    parts = [f"## {found.card.name}, memkit {software.commit}", text]
    predictions = found.predictions()
    if predictions:
        heads = ["training", "peak", "predicted", "reserved", "predicted", "what differs most"]
        parts.append(table(heads, [prediction(name, predictions[name]) for name in TRAININGS if name in predictions]))
    others = {name: each for name, each in found.cases.items() if "/" not in name}
    parts.append(table(["case", "outcome"], [[name, in_words(each)] for name, each in others.items()]))
    unmeasured = {name: each for name, each in found.cases.items() if "/" in name and each.status != "done"}
    parts += [f"- {name}: {each.status}: {each.reason}" for name, each in unmeasured.items()]
    return "\n\n".join(parts)


def is_tuned(name: str) -> bool:
    """Whether a training uses `cudnn.benchmark`."""
    return name in TRAININGS and TRAININGS[name].is_tuned


def peaks_of(name: str, found: Prediction) -> tuple[int, float]:
    """Return a training's measured peak, and the relative error of the predicted one."""
    first = int(is_tuned(name))
    measured, predicted = max(found.measured_peak_bytes[first:]), max(found.peak_bytes[first:])
    return measured, predicted / measured - 1


def prediction(name: str, found: Prediction) -> list[str]:
    def pair(measured: int, error: float) -> list[str]:
        return [format_bytes(measured), "equal" if error == 0 else f"{error:+.2%}"]

    differing = [
        f"{each.operator.removeprefix('aten.')} {_larger(each.kept_bytes, each.inside_bytes)}"
        for each in found.differing_operators[:MOST]
    ]
    measured, error = peaks_of(name, found)
    reserve = ["", ""] if is_tuned(name) else pair(found.measured_reserved_bytes, found.reserved_error)
    return [
        name,
        *pair(measured, error),
        *reserve,
        ", ".join(differing),
    ]


def _larger(*num_bytes: int) -> str:
    found = max(num_bytes, key=abs)
    return f"{'-' if found < 0 else '+'}{format_bytes(abs(found))}"


def in_words(found: Outcome) -> str:
    """All figures of a case in one line; a long list only by its length."""
    if found.status != "done":
        return f"{found.status}: {found.reason}"
    return "; ".join(f"{name}: {value}" for name, value in flat(found.figures)) or "no figures"


def flat(figures: dict[str, Any], most: int = 24) -> list[tuple[str, str]]:
    lines: list[tuple[str, str]] = []
    for name, value in figures.items():
        if isinstance(value, dict):
            lines += [(f"{name}, {inner}", text) for inner, text in flat(value)]
        elif name.endswith("_bytes") and isinstance(value, int):
            lines.append((name.removesuffix("_bytes"), format_bytes(value)))
        else:
            lines.append((name, f"{value:.4g}" if isinstance(value, float) else str(value)))
    return lines if len(lines) <= most else [("figures in the file", str(len(lines)))]


if __name__ == "__main__":
    main()
