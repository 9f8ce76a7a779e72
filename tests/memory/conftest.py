"""What tests of the memory room share."""

import gc

import pytest


@pytest.fixture(scope="module")
def few_objects():
    """For tests that look at all objects the collector knows, again and again: it forgets those that were there.

    In a test run they are half a million, which take most of such a test's time. `test_leak_surroundings` looks at all
    of them, and so does the benchmark of the leak watch, which runs each script.
    """
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
