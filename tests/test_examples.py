"""Every example runs in its short form; the ladder's files are small steps, and its trainings are one and the same."""

import difflib
import json
import re
import subprocess
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from tests.helpers import run_module

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("[!_]*.py"))  # the others hold data of several
LADDER = [path for path in EXAMPLES if path.name[0].isdigit()]
MOST_LINES, MOST_CHANGED_LINES = 120, 25
# All in one process, which imports torch once; a process of its own for each one takes a minute more.
RUN_ALL = """
import contextlib, gc, io, json, logging, os, runpy, sys, traceback
print_found, sys.argv[1:], paths = sys.stdout, ["--smoke"], sys.argv[1:]
sys.path.insert(0, os.path.dirname(paths[0]))  # as Python does for a script
for path in paths:
    logging.root.handlers.clear()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            runpy.run_path(path, run_name="__main__")
            error = None
        except BaseException:
            error = traceback.format_exc()
    print(json.dumps([path, printed.getvalue(), error]), file=print_found, flush=True)
    gc.collect()
    gc.freeze()  # what earlier examples imported is not searched for holders of memory again
"""
OWN_PROCESS = {"resume.py"}  # it starts processes that import it as the main module; among the slow tests
# A few seconds each; the slow tests run all.
LONG = {
    *(
        "03_chunked_loss.py",
        "04_memory_log.py",
        "05_estimate.py",
        "06_plan.py",
        "07_loop.py",
        "08_resume.py",
        "09_precision.py",
        "plan.py",
        "memory_log.py",
        "virtual_gpu.py",
    ),
    *(
        "sparse_surface.py",
        "surface_operator.py",
        "s0_edge_memory.py",
        "s1_memory_report.py",
        "s2_density_invariant.py",
        "s3_gan_radiance_field.py",
        "s4_radar_to_lidar.py",
        "s4_usage.py",
    ),
}


@cache
def printed(*, by_long_ones):
    """What each example, long or short, prints with --smoke, by its path; an error's text comes second."""
    chosen = [path for path in EXAMPLES if path.name not in OWN_PROCESS and (path.name in LONG) == by_long_ones]
    paths = list(map(str, chosen))
    done = subprocess.run([sys.executable, "-c", RUN_ALL, *paths], cwd=ROOT, capture_output=True, text=True)
    found = {Path(path): (text, error) for path, text, error in map(json.loads, done.stdout.splitlines())}
    return found, done.stderr


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[pytest.mark.slow] if path.name in OWN_PROCESS | LONG else [], id=path.name)
        for path in EXAMPLES
    ],
)
def test_smoke(path):
    if path.name in OWN_PROCESS:
        script = f"import runpy, sys; sys.argv[1:] = ['--smoke']; runpy.run_path({str(path)!r}, run_name='__main__')"
        done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
        text, error = done.stdout, done.stderr if done.returncode else None
    else:
        found, stderr = printed(by_long_ones=path.name in LONG)
        assert path in found, stderr
        text, error = found[path]
    assert error is None, error
    assert text.strip()


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.name for path in EXAMPLES])
def test_is_short(path):
    assert len(path.read_text("utf-8").splitlines()) <= MOST_LINES


def test_each_step_of_the_ladder_is_small():
    assert [int(path.name[:2]) for path in LADDER] == list(range(len(LADDER)))
    for below, above in pairwise(LADDER):
        lines = difflib.ndiff(below.read_text("utf-8").splitlines(), above.read_text("utf-8").splitlines())
        assert sum(line[0] in "+-" for line in lines) <= MOST_CHANGED_LINES, above.name


@pytest.mark.parametrize("is_whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_ladder_trains_as_plain_pytorch_does(is_whole):
    """The loss after each epoch; mixed precision, the last step, is near it and says that it is another."""
    losses = {}
    for path in LADDER:
        if path.name in LONG and not is_whole:
            continue
        text, error = printed(by_long_ones=path.name in LONG)[0][path]
        assert error is None, error
        losses[path.name] = [
            float(loss) for loss in re.findall(r"^epoch \d+: validation loss (\S+),", text, re.MULTILINE)
        ]
    mixed = losses.pop("09_precision.py", None)
    plain = losses["00_plain_pytorch.py"]
    assert len(plain) == 2
    for name, found in losses.items():
        assert found == pytest.approx(plain, rel=1e-5), name
    assert (mixed is not None) == is_whole
    if mixed is not None:
        assert mixed == pytest.approx(plain, rel=1e-2)
        assert mixed != pytest.approx(plain, rel=1e-5)


@pytest.mark.slow
def test_exact_accumulation_matches_its_page():
    """The table of its page: an error near 1e-16 for memkit, large for the usual loop, 0.75 in the last group."""
    done = run_module("examples.exact_accumulation")
    rows = {line[:22].strip(): line[22:].split() for line in done.stdout.splitlines()}
    usual, exact = rows["usual: loss / steps"], rows["memkit"]
    # The text is a source file of this Python: another patch release has another argparse.py.
    page = (ROOT / "docs" / "gradient-accumulation.md").read_text()
    (said,) = re.findall(r"usual: `\(loss / steps\).backward\(\)` \| (\S+) \| (\S+) \| (\S+) \|", page)
    assert list(map(float, usual[:3])) == pytest.approx(list(map(float, said)), rel=0.5)
    assert float(usual[2]) == pytest.approx(0.75, abs=0.01)
    assert max(map(float, exact[:3])) <= 1e-14
