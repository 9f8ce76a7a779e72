"""These tests state bytes, which differ between versions of PyTorch."""

import pytest

from memkit import VirtualGPU
from tests.rules import rules_of_one_version  # noqa: F401 - a fixture that all of them have


@pytest.fixture
def card():
    with VirtualGPU("RTX 4090") as gpu:
        yield gpu
