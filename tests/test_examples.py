"""Every example runs as a newcomer would run it, in its short form."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.name for path in EXAMPLES])
def test_smoke(path):
    script = f"import runpy, sys; sys.argv[1:] = ['--smoke']; runpy.run_path({str(path)!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", script], cwd=path.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.slow
def test_exact_accumulation_shows_what_the_readme_says():
    """The README's table: an error near 1e-16 for memkit, large for the usual loop, 0.75 in the last group."""
    path = next(path for path in EXAMPLES if path.name == "exact_accumulation.py")
    done = subprocess.run(
        [sys.executable, "-m", f"examples.{path.stem}"], cwd=path.parents[1], capture_output=True, text=True
    )
    rows = {line[:22].strip(): line[22:].split() for line in done.stdout.splitlines()}
    readme = (path.parents[1] / "README.md").read_text()
    usual, exact = rows["usual: loss / steps"], rows["memkit"]
    # The text is a source file of this Python: another patch release has another argparse.py.
    (said,) = re.findall(r"usual: `\(loss / steps\).backward\(\)` \| (\S+) \| (\S+) \| (\S+) \|", readme)
    assert list(map(float, usual[:3])) == pytest.approx(list(map(float, said)), rel=0.5)
    assert float(usual[2]) == pytest.approx(0.75, abs=0.01)
    assert max(map(float, exact[:3])) <= 1e-14
