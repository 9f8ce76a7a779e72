"""The lowest versions in pyproject.toml are those that the integrations were tested with."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXTRAS = ("hf", "lightning", "pyg")


def test_extras_require_tested_versions():
    tested = dict(re.findall(r"^(\w+)==([\d.]+)$", (ROOT / "tests/integrations/lowest.txt").read_text(), re.MULTILINE))
    optional = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = dict(each.split(">=") for extra in EXTRAS for each in optional[extra])
    assert set(wanted) == set(tested)
    for name, version in wanted.items():
        assert tested[name] in (version, f"{version}.0"), name
