"""Collects the code blocks of README.md and docs/ as tests: what a reader copies must run."""

import gc
from typing import Any

from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser


def set_aside(_: dict[str, Any]) -> None:
    """Hide what the test session itself holds: pages about leaks look at every object of a reader's process."""
    gc.freeze()


def take_back(_: dict[str, Any]) -> None:
    """Show it again."""
    gc.unfreeze()


pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser()], patterns=["*.md"], setup=set_aside, teardown=take_back
).pytest()
