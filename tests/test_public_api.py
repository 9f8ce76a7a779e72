"""The public surface: names, where they are, their documentation, and what a misspelt one says."""

import ast
import importlib
import inspect
import pydoc
from pathlib import Path

import pytest

import memkit as mk

ROOMS = {name: importlib.import_module(f"memkit.{name}") for name in mk._PACKAGES}
LAZY = {"": mk, **ROOMS}
NAMES = [(room, name) for room, module in {"": mk, **ROOMS}.items() for name in module.__all__]


def imports_for_type_checkers(module):
    """By name, the module that it is imported from under `if TYPE_CHECKING`."""
    block = next(node for node in ast.parse(Path(module.__file__).read_text()).body if isinstance(node, ast.If))
    found = [node for node in block.body if isinstance(node, ast.ImportFrom) and node.module != module.__name__]
    assert all(alias.asname == alias.name for node in found for alias in node.names)  # else it is not exported
    return {alias.name: node.module for node in found for alias in node.names}


@pytest.mark.parametrize("module", LAZY.values(), ids=LAZY)
def test_type_checkers_see_the_same_names_from_the_same_modules(module):
    assert imports_for_type_checkers(module) == module._HOMES
    assert sorted(module._HOMES) == module.__all__
    assert set(module.__all__) <= set(dir(module))


def test_top_level_names():
    assert len(mk.__all__) <= 46
    rooms = {name: module._HOMES[name] for module in LAZY.values() for name in module._HOMES if module is not mk}
    for name, home in mk._HOMES.items():  # the same, also in the package of its topic
        assert home == "memkit._core.errors" or rooms[name] == home


@pytest.mark.parametrize(("room", "name"), NAMES)
def test_every_name_loads_and_is_documented(room, name):
    value = getattr(ROOMS.get(room, mk), name)
    text = inspect.getdoc(value)
    assert text
    if not (inspect.isclass(value) and issubclass(value, (Exception, Warning))):
        assert "Example:" in text, f"{name} has no example"


def test_no_name_is_hidden_by_a_module_of_its_package():
    for room, module in LAZY.items():
        files = {path.stem for path in Path(module.__file__).parent.glob("*.py")}
        files |= {path.parent.name for path in Path(module.__file__).parent.glob("*/__init__.py")}
        assert not files & set(module.__all__), room


def test_moved_name_error_names_its_place():
    for module, name, text in (
        (
            mk,
            "chamfer_distance",
            "has no attribute 'chamfer_distance'; it is memkit.voxel.chamfer_distance",
        ),
        (mk, "ConfigError", "it is memkit.errors.ConfigError"),
        (mk.points, "MemoryManager", "it is memkit.MemoryManager"),
        (mk.train, "GradientAcumulator", "did you mean 'GradientAccumulator'?"),
        (mk, "VirtualGpu", "did you mean 'VirtualGPU'?"),
        (mk, "chamfer_distanse", "did you mean memkit.voxel.chamfer_distance?"),
        (mk.errors, "Stage", "it is memkit.recipes.Stage"),
        (mk, "quux", r"has no attribute 'quux'; see help\(memkit\) for all names"),
    ):
        with pytest.raises(AttributeError, match=text):
            getattr(module, name)


def test_import_of_moved_name_names_its_place():
    with pytest.raises(ImportError, match=r"it is memkit\.points\.sample_edges"):
        exec("from memkit import sample_edges")
    with pytest.raises(ImportError, match="did you mean 'GridIndex'"):
        exec("from memkit.points import GridIdx")
    assert not hasattr(mk, "sample_edges")
    assert getattr(mk, "GridIdx", None) is None


def test_help_begins_with_six_described_names():
    lines = [line.strip() for line in pydoc.plain(pydoc.render_doc(mk)).splitlines()]
    entries = [number for number, line in enumerate(lines) if line.startswith("- `")]
    assert entries[0] < 10
    names = {lines[number].split("`")[1] for number in entries}
    assert names <= set(mk.__all__)
    assert len(names) == len(entries) == 6
    assert all(lines[entries[0] : entries[-1] + 1])  # one list, without an empty line


def test_errors_have_their_public_name():
    for name in mk.errors.__all__:
        assert getattr(mk.errors, name).__module__ == "memkit.errors"
