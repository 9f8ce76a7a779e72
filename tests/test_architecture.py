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


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(PACKAGE)) for path in FILES])
def test_file(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "the first line of a file says what it is for"
    calls = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert "print" not in calls or "cli" in path.parts


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


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(PACKAGE)) for path in FILES])
def test_no_handler_outside_the_kernel_judges_whether_memory_ran_out(path):
    """`memkit._recovery` alone catches such errors, so that no second way to recover can drift away from it."""
    if KERNEL in path.parents or path in {PACKAGE / "__init__.py", PACKAGE / "_device.py"}:
        return
    tree = ast.parse(path.read_text("utf-8"))
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for name in node.names}
    assert not imported & JUDGES
    simulates = "card" in path.parts  # the simulated card raises these errors itself
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


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(PACKAGE)) for path in FILES])
def test_private_parts_of_torch_are_named_in_the_seam_only(path):
    if SEAM not in path.parents:
        assert list(private_parts(ast.parse(path.read_text("utf-8")))) == []


def test_the_law_sees_what_it_forbids():
    text = "from torch.utils import _pytree\nimport torch._dynamo\nfrom torch._C import DispatchKey\ntorch._C._nn.x()"
    assert len(set(private_parts(ast.parse(text)))) >= 4
    assert list(private_parts(ast.parse("import torch\ntorch.__version__\nfrom torch import nn"))) == []
