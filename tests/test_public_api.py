"""The public surface: names, their homes, their documentation."""

import ast
import inspect
from pathlib import Path

import pytest

import memkit as mk

SOURCE = ast.parse(Path(mk.__file__).read_text())


def test_names_are_sorted_complete_and_said_once():
    assert mk.__all__ == sorted(mk.__all__)
    assert set(mk.__all__) == {*mk._HOMES, "__version__"}
    assert dir(mk) == mk.__all__


def test_type_checkers_see_the_same_names_from_the_same_homes():
    block = next(node for node in SOURCE.body if isinstance(node, ast.If))
    imports = {
        alias.name: node.module.removeprefix("memkit.")
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imports == mk._HOMES


@pytest.mark.parametrize("name", [name for name in mk.__all__ if name != "__version__"])
def test_every_name_loads_and_is_documented(name):
    value = getattr(mk, name)
    text = inspect.getdoc(value)
    assert text
    if not (inspect.isclass(value) and issubclass(value, (Exception, Warning))):
        assert "Example:" in text, f"{name} has no example"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'memkit' has no attribute 'GradientAcumulator'"):
        _ = mk.GradientAcumulator
