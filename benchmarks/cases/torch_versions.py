"""Run the tests on another version of PyTorch, in an environment made for it, and write what passed into the table.

    python -m benchmarks.cases.torch_versions 2.8.0 2.15.0

makes an environment for each version in a temporary folder (some gigabytes, removed afterwards), installs memkit with
its test extras, runs the default tests, predicts the peaks of the tests' models, and writes it all into
``benchmarks/results/torch_versions.json``. A version has passed if nothing failed and each test that was skipped there,
and not on the version that CI runs, names what this PyTorch lacks. ``--environment FOLDER`` uses one that is there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import result, tables

ROOT = Path(__file__).parents[2]
CASE = "torch_versions"
OF_THE_TABLE = "tests/seam/test_versions.py::test_the_table_proves_the_range"  # it wants all rows
TESTS = ("-n", "2", "--dist", "loadfile", "-q", "-p", "no:cacheprovider", f"--deselect={OF_THE_TABLE}")
LACKS = re.compile(r"^(Skipped: )?PyTorch has no torch[\w.]* ")
"""How the reason of a skip begins that is due to the version: see `tests/versions.py`."""

PEAKS = """
import json, sys
from benchmarks.cases.torch_versions import predicted_peaks
json.dump(predicted_peaks(), sys.stdout)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cases.torch_versions", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("versions", nargs="+", metavar="VERSION", help="of PyTorch, such as 2.8.0")
    parser.add_argument("--environment", type=Path, help="an environment with that version, instead of a new one")
    parser.add_argument("--python", default=sys.executable, help="the Python that a new environment is made with")
    given = parser.parse_args(arguments)
    if given.environment and len(given.versions) > 1:
        parser.error("--environment has one version")
    return max(run(version, given.python, given.environment) for version in given.versions)


def run(version: str, python: str, environment: Path | None) -> int:
    """Test one version, and write its row; 1 if anything failed."""
    with tempfile.TemporaryDirectory(prefix="memkit-versions-") as folder:
        scratch = Path(folder)
        home = environment or make_environment(scratch / "venv", version, python)
        figures = {**result.read_result(CASE)["figures"], version: test(home, scratch)}
        figures = dict(sorted(figures.items(), key=lambda item: tuple(map(int, item[0].split(".")))))
        result.write_result(CASE, figures)
        row = figures[version]
        tables.main()
        print(f"{version}: {row['num_passed']} passed, {len(row['skipped'])} skipped, {len(row['failed'])} failed")
        print(*map(": ".join, row["failed"].items()), *unexplained(figures, version), sep="\n")
        return int(bool(row["failed"] or unexplained(figures, version)))


def make_environment(home: Path, version: str, python: str) -> Path:
    """Install memkit with its test extras and one version of PyTorch."""
    subprocess.run([python, "-m", "venv", home], check=True)
    pin = home / "constraints.txt"
    pin.write_text(f"torch=={version}\n")
    pip = [home / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-cache-dir", "--constraint", pin]
    subprocess.run([*pip, "--editable", f"{ROOT}[test]"], check=True)
    return home


def test(home: Path, scratch: Path) -> dict[str, Any]:
    """Run the tests in an environment; return its row of the table."""
    python = home / "bin" / "python"
    own = {"PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    variables = {**os.environ, **own, "VIRTUAL_ENV": str(home), "PYTHONDONTWRITEBYTECODE": "1"}
    log = scratch / "junit.xml"
    subprocess.run([python, "-m", "pytest", *TESTS, f"--junitxml={log}"], check=False, cwd=ROOT, env=variables)
    said = subprocess.run(
        [python, "-W", "ignore", "-c", PEAKS], check=True, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True
    ).stdout
    about = subprocess.run(
        [python, "-c", "import platform, torch; print(platform.python_version(), torch.__version__)"],
        check=True, env=variables, stdout=subprocess.PIPE, text=True,
    ).stdout.split()  # fmt: skip
    commit = result.environment(())["commit"]
    return {"commit": commit, "python": about[0], "build": about[1], **outcome(log), "peak_bytes": json.loads(said)}


def outcome(log: Path) -> dict[str, Any]:
    """Count what passed; name what failed or was skipped, with the reason."""
    num_passed, failed, skipped = 0, dict[str, str](), dict[str, str]()
    for case in ET.parse(log).getroot().iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        skip, failure = case.find("skipped"), next((each for each in case if each.tag in ("failure", "error")), None)
        if failure is not None:
            said = re.sub(r"/(?:[^\s/\"':]+/)+", "", failure.get("message") or "")  # no paths of this machine
            failed[name] = re.sub(r"\s+", " ", said)[:300]
        elif skip is not None:
            skipped[name] = re.sub(r"\s+", " ", skip.get("message") or "")
        else:
            num_passed += 1
    return {"num_passed": num_passed, "failed": failed, "skipped": skipped}


def unexplained(figures: dict[str, Any], version: str) -> list[str]:
    """Tests that a version skips, the one that CI runs does not, and whose reason names nothing that is lacking."""
    return [
        f"skipped without naming what is lacking: {name}: {reason}"
        for name, reason in tables.only_here(figures, version).items()
        if not LACKS.match(reason)
    ]


def predicted_peaks() -> dict[str, dict[str, int | str]]:
    """Predict the peak of a second step of each of the tests' models, on this CPU and on a card."""
    import torch

    import memkit as mk
    from tests.predict.steps import STEPS

    torch.set_num_threads(1)
    peaks: dict[str, dict[str, int | str]] = {}
    for place in ("cpu", "RTX 4090"):
        peaks[place] = {}
        for name, build in STEPS.items():
            torch.manual_seed(0)
            step = build()
            options = {"optimizer": step.optimizer, "precision": step.precision, "target": place}
            try:
                estimate = mk.estimate_memory_usage(
                    step.model, step.batch, step.loss_fn, accumulation_steps=step.accumulation_steps, **options
                )
                peaks[place][name] = estimate.peak_bytes
            except Exception:  # noqa: BLE001 - steps that make tensors on the CPU, and what a version refuses
                peaks[place][name] = "refused"
    return peaks


if __name__ == "__main__":
    sys.exit(main())
