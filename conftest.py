"""Collects the code blocks of README.md and docs/ as tests: what a reader copies must run."""

import gc
from collections.abc import Generator
from typing import Any

import pytest
import torch
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser


def set_aside(_: dict[str, Any]) -> None:
    """Hide what the test session itself holds: pages about leaks look at every object of a reader's process.

    For good: shown again, it would be looked at by each of the hundreds of collections that recoveries run.
    """
    gc.collect()  # what is garbage now would never be found again
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None]:
    """Skip what an older PyTorch cannot have."""
    return (yield from skipping_what_torch_lacks(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Likewise."""
    return (yield from skipping_what_torch_lacks(item))


def skipping_what_torch_lacks(item: pytest.Item) -> Generator[None]:
    """Skip what an older PyTorch cannot have; `python -m benchmarks.cases.torch_versions` lists it by version."""
    from tests.versions import missing

    try:
        return (yield)
    except (Exception, pytest.fail.Exception) as error:
        if reason := missing(error):
            if item.path.suffix == ".md" and torch.distributed.is_initialized():  # a page that ends in the middle
                torch.distributed.destroy_process_group()
            pytest.skip(reason)
        raise


pytest_collect_file = Sybil(parsers=[PythonCodeBlockParser()], patterns=["*.md"], setup=set_aside).pytest()
