"""Collects the code blocks of README.md and docs/ as tests: what a reader copies must run."""

import gc
import importlib.util
from collections.abc import Generator
from typing import Any

import pytest
import torch
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

gc.disable()  # while a thousand modules are imported, until the tests have been collected


def pytest_collection_finish() -> None:
    """Collect garbage again."""
    gc.enable()
    gc.freeze()


def prepare(namespace: dict[str, Any]) -> None:
    """Give each page the same random numbers in any order, and let it ask for a library.

    It also hides what the test session holds, because pages about leaks look at every object. That is for good: shown
    again, it would be looked at by each of the hundreds of collections that recoveries run.
    """
    torch.manual_seed(0)  # noqa: TID251 - that of the test session, where a page is the program
    namespace["is_missing"] = is_missing  # for comments such as <!-- skip: start if(is_missing("monai")) -->
    gc.collect()  # what is garbage now would never be found again
    gc.freeze()


def is_missing(library: str) -> bool:
    """Whether a library that a page is about, and that the tests do not bring, is not installed."""
    return importlib.util.find_spec(library) is None


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
    from tests.versions import PINNED, missing

    try:
        return (yield)
    except (Exception, pytest.fail.Exception) as error:
        if torch.__version__.partition("+")[0] != PINNED and (reason := missing(error)):
            if item.path.suffix == ".md" and torch.distributed.is_initialized():  # a page that ends in the middle
                torch.distributed.destroy_process_group()
            pytest.skip(reason)
        raise


pytest_collect_file = Sybil(parsers=[PythonCodeBlockParser(), SkipParser()], patterns=["*.md"], setup=prepare).pytest()
