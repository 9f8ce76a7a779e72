"""Collects the code blocks of README.md and docs/ as tests: what a reader copies must run."""

import gc
from typing import Any

from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser


def set_aside(_: dict[str, Any]) -> None:
    """Hide what the test session itself holds: pages about leaks look at every object of a reader's process.

    For good: shown again, it would be looked at by each of the hundreds of collections that recoveries run.
    """
    gc.collect()  # what is garbage now would never be found again
    gc.freeze()


pytest_collect_file = Sybil(parsers=[PythonCodeBlockParser()], patterns=["*.md"], setup=set_aside).pytest()
