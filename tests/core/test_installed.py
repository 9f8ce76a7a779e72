"""Whose a module is."""

import types

import pytest

from memkit._core.installed import is_users_module


@pytest.mark.parametrize(
    ("file", "is_own"),
    [
        ("/project/model.py", True),
        ("/usr/lib/python3/dist-packages/monai/losses/dice.py", False),  # seen from a venv with the system's packages
        ("/opt/conda/lib/python3.11/site-packages/torch/__init__.py", False),
    ],
)
def test_packages_of_any_environment_are_installed(file, is_own):
    module = types.ModuleType("some")
    module.__file__ = file
    assert is_users_module(module) is is_own
