"""These tests state bytes, which differ between versions of PyTorch."""

from tests.rules import rules_of_one_version  # noqa: F401 - a fixture that all of them have
