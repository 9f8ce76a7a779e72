"""The house law that no linter holds: short files, no print, no hasattr, every example in a docstring runs."""

import ast
import doctest
import importlib
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "memkit"
FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = [".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in FILES]


EXTRAS = {"numba", "triton"}  # each is imported by one module, which is loaded when it is chosen


@pytest.mark.parametrize("module", [name for name in MODULES if not name.endswith(("__main__", "__init__"))])
def test_docstring_examples_run(module):
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as missing:
        if missing.name not in EXTRAS:
            raise
        pytest.skip(f"needs {missing.name}, which is an extra")
    assert doctest.testmod(loaded).failed == 0


KERNEL = PACKAGE / "_recovery"
JUDGES = {"is_out_of_memory", "classify_oom", "OomVerdict", "under_memory_pressure"}


def assert_leaves_out_of_memory_to_the_kernel(path, tree):
    """`memkit._recovery` alone catches such errors, so that no second way to recover can drift away from it."""
    if KERNEL in path.parents or path in {
        PACKAGE / each for each in ("__init__.py", "train/__init__.py", "_machine/devices.py")
    }:
        return
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for name in node.names}
    assert not imported & JUDGES
    simulates = path in {PACKAGE / "_simulation/cuda/memory.py", PACKAGE / "predict/script/process.py"}
    for handler in (node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)):
        names = {node.attr if isinstance(node, ast.Attribute) else node.id
                 for node in ast.walk(handler) if isinstance(node, (ast.Attribute, ast.Name))}  # fmt: skip
        assert simulates or not names & (JUDGES | {"OutOfMemoryError"}), ast.unparse(handler)


SEAM = PACKAGE / "_torch"


def private_parts(tree):
    """Private modules and names of torch that a file imports or reaches, as text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [f"{node.module}.{name.name}" for name in node.names]
        elif isinstance(node, ast.Import):
            names = [name.name for name in node.names if name.name.split(".")[0] == "torch"]
        elif isinstance(node, ast.Attribute) and re.fullmatch(r"torch(\.\w+)+", ast.unparse(node)):
            names = [ast.unparse(node)]
        else:
            continue
        for name in names:
            if not name.startswith("torch.ops.") and any(
                part.startswith("_") and not part.startswith("__") for part in name.split(".")
            ):
                yield name


def private_names(tree):
    """Names with one underscore in front, as attributes, imports or text: what the seam knows of torch."""
    for node in ast.walk(tree):
        found = {ast.Attribute: "attr", ast.alias: "name", ast.Constant: "value"}.get(type(node))
        name = getattr(node, found) if found else None
        if isinstance(name, str) and re.fullmatch(r"_[a-zA-Z][a-zA-Z_]+", name):
            yield name


# Operators are found by name in the dispatcher: `memkit._torch.aten.overloads` leaves out what is missing.
SEAM_FILES = [path for path in SEAM.glob("*.py") if path.name != "aten.py"]
PRIVATE_NAMES = {name for path in SEAM_FILES for name in private_names(ast.parse(path.read_text("utf-8")))}


def assert_leaves_private_names_to_the_seam(path, tree):
    """`getattr(module, "_buffers")` needs the seam as well."""
    if SEAM in path.parents:
        return
    assert list(private_parts(tree)) == []
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    named = {each for each in texts if isinstance(each, str)}
    assert sorted(PRIVATE_NAMES & named) == []
    assert [each for each in named if re.fullmatch(r"torch(\.\w+)*\._\w+(\.\w+)*", each)] == []


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(PACKAGE)) for path in FILES])
def test_file(path):
    tree = ast.parse(path.read_text("utf-8"))
    assert ast.get_docstring(tree), "the first line of a file says what it is for"
    calls = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert "print" not in calls or "cli" in path.parts
    assert_leaves_out_of_memory_to_the_kernel(path, tree)
    assert_leaves_private_names_to_the_seam(path, tree)


def test_no_file_outside_the_seam_may_name_private_attributes():
    """Lint forbids them, and these are the exceptions: none of them is torch's."""
    excepted = {
        str(path.relative_to(PACKAGE)): line.partition("noqa: SLF001")[0].strip()
        for path in FILES
        if SEAM not in path.parents
        for line in path.read_text("utf-8").splitlines()
        if "noqa: SLF001" in line
    }
    assert set(excepted) == {
        "_core/calls.py", "_core/errors.py", "_core/lazy.py", "_recorder/recorder.py",  # frames of Python
        "memory/holders.py", "_simulation/draws.py", "_simulation/guesses.py", "train/nesting.py",  # likewise
        "predict/worst_batch.py", "recipes/plan_report.py",  # memkit's own
        "chunk/engine.py", "train/offload.py", "voxel/compose.py",  # memkit's own
        "integrations/fabric.py", "integrations/lightning.py", "integrations/lightning_parts.py",
        "integrations/torch_geometric.py",
    }  # fmt: skip


def test_law_detects_violations():
    text = "from torch.utils import _pytree\nimport torch._dynamo\nfrom torch._C import DispatchKey\ntorch._C._nn.x()"
    assert len(set(private_parts(ast.parse(text)))) >= 4
    assert list(private_parts(ast.parse("import torch\ntorch.__version__\nfrom torch import nn"))) == []
