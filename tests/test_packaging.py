"""The built package in clean environments, with no source tree left: contents, use, types, tests, each extra alone.

Needs a package index, two gigabytes of disk, and minutes. Run: pytest -m slow tests/test_packaging.py
"""

import importlib.metadata
import os
import shutil
import site
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import memkit as mk

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
OUTSIDE = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "site", "*.egg-info")
FEATURE_OF_INTEGRATION = """
import doctest, importlib
found = doctest.testmod(importlib.import_module("memkit.integrations.{}"))
assert found.attempted and not found.failed
"""
LOOP = """
import torch, memkit as mk
model = torch.nn.Linear(2, 1)
trainer = mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters(), lr=0.1))
loop = mk.MemoryEfficientTrainLoop(trainer, [torch.ones(4, 2)], lambda m, x: m(x).pow(2).mean(), {})
loop.run(num_epochs=2)
"""
# What an extra is for. In an environment without the extra, each of these fails.
FEATURES = {
    "numba": 'import memkit as mk, torch; mk.GridIndex.from_coords(torch.rand(99, 3), 0.2, backend="numba")',
    "progress": "import tqdm" + LOOP.format("progress=True"),
    "tensorboard": "from torch.utils.tensorboard import SummaryWriter"
    + LOOP.format('writer=SummaryWriter("runs"), report_every=1'),
    "metrics": """
import memkit as mk, torch
mk.voxel.nearest_points(torch.rand(9, 3), torch.rand(9, 3), backend="kdtree")
""",
    "plots": """
import memkit as mk, torch
weight = torch.ones(4, 4, requires_grad=True)
build_step = lambda n: lambda: (torch.ones(n, 4) @ weight).sum().backward()
mk.predict.profile_scaling(build_step, sizes=[64, 128, 256]).plot("law.png")
""",
    "hf": FEATURE_OF_INTEGRATION.format("transformers"),
    "lightning": FEATURE_OF_INTEGRATION.format("lightning"),
    "pyg": FEATURE_OF_INTEGRATION.format("torch_geometric"),
    "docs": "import material, mkdocs, mkdocstrings",
}
COLLECTIONS = {"test", "dev", "bench"}  # of other extras and tools, for those who work on memkit
TESTS = [
    "tests/test_public_api.py",
    "tests/core/test_units.py",
    "tests/train/test_wrapper.py",
    "tests/points/test_grid.py",
]


def call(*command, cwd, python=sys.executable, **options):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([python, *command], cwd=cwd, env=environment, capture_output=True, text=True, **options)
    return done.returncode, done.stdout + done.stderr


def succeed(*command, **options):
    code, text = call(*command, **options)
    assert code == 0, text[-4000:]
    return text


class Environment:
    """A virtual environment, on top of what other site-packages hold."""

    def __init__(self, folder, *below):
        venv.create(folder, with_pip=False)
        self.python = str(folder / "bin" / "python")
        found = subprocess.run(
            [self.python, "-c", "import site; print(site.getsitepackages()[0])"], capture_output=True
        )
        self.packages = Path(found.stdout.decode().strip())
        (self.packages / "below.pth").write_text("\n".join(map(str, below)))

    def install(self, *requirements):
        command = ["-m", "pip", "--python", self.python, "install", "--quiet", "-c", str(ROOT / "constraints.txt")]
        return succeed(*command, *requirements, cwd=self.packages)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with the wheel, made from the sdist alone, the sdist, and the tests that the sdist holds."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    shutil.copytree(ROOT, source, ignore=OUTSIDE)
    build = "import sys, hatchling.build as build; getattr(build, 'build_' + sys.argv[1])(sys.argv[2])"
    succeed("-c", build, "sdist", str(folder), cwd=source)
    shutil.rmtree(source)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as sdist:
        sdist.extractall(folder, filter="data")
    unpacked = next(folder.glob("memkit-*/"))
    succeed("-c", build, "wheel", str(folder), cwd=unpacked)
    shutil.rmtree(unpacked / "memkit")
    return folder


@pytest.fixture(scope="module")
def wheel(built):
    return str(next(built.glob("*.whl")))


@pytest.fixture(scope="module")
def plain(wheel, tmp_path_factory):
    """The wheel with what it needs, and nothing else."""
    environment = Environment(tmp_path_factory.mktemp("plain"))
    environment.install(wheel)
    yield environment
    shutil.rmtree(environment.packages)


@pytest.fixture(scope="module")
def tools(wheel, tmp_path_factory):
    """The wheel on top of this session's pytest and mypy; an editable memkit in there is not seen."""
    environment = Environment(tmp_path_factory.mktemp("tools"), *site.getsitepackages())
    environment.install("--no-deps", wheel)
    return environment


@pytest.fixture
def fresh(plain, tmp_path):
    """An environment on top of the plain one."""
    environment = Environment(tmp_path / "environment", plain.packages)
    yield environment
    shutil.rmtree(environment.packages)


def test_wheel_and_sdist_hold_the_package_and_its_data(built, wheel):
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "memkit").rglob("*") if path.is_file()}
    files = {name for name in files if "__pycache__" not in name}
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name for name in names if name.startswith("memkit/")} == files
    assert {Path(name).parent.name for name in names if name.endswith("LICENSE")} == {"licenses"}
    assert Path(wheel).name.endswith("-py3-none-any.whl")
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert files | {"README.md", "LICENSE", "CHANGELOG.md", "constraints.txt", "pyproject.toml"} <= inside


def test_works_with_core_dependencies_only(plain, tmp_path):
    script = LOOP.format("") + "print(mk.__file__, mk.__version__, loop.run(num_epochs=1))\n"
    script += "import importlib.metadata; assert importlib.metadata.version('memkit') == mk.__version__\n"
    script += "for name in mk.__all__: getattr(mk, name)\n"
    assert str(plain.packages) in succeed("-I", "-c", script, python=plain.python, cwd=tmp_path)
    command = Path(plain.python).with_name("memkit")
    assert "medium" in succeed("presets", python=str(command), cwd=tmp_path)


def test_types_are_those_of_the_installed_wheel(tools, built, tmp_path):
    """As users check their own script: strict, without memkit's settings."""
    (tmp_path / "api.py").write_text((next(built.glob("memkit-*/")) / "tests/typing/api.py").read_text())
    check = ["-m", "mypy", "--config-file=", "--strict", "--python-executable", tools.python, "api.py"]
    succeed(*check, cwd=tmp_path)
    (tmp_path / "api.py").write_text(
        "from memkit.memory import parse_bytes\nreveal_type(parse_bytes)\nparse_bytes([1])\n"
    )
    code, text = call(*check, cwd=tmp_path)
    assert code == 1
    assert "-> int" in text
    assert 'incompatible type "list[int]"' in text


def test_tests_of_the_sdist_pass_with_the_installed_wheel(tools, built):
    tests = next(built.glob("memkit-*/"))
    where = succeed("-c", "import memkit; print(memkit.__file__)", python=tools.python, cwd=tests)
    assert str(tools.packages) in where
    assert " passed" in succeed("-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS, python=tools.python, cwd=tests)


def test_every_extra_is_tried(wheel):
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith("METADATA"))
        extras = importlib.metadata.PathDistribution(zipfile.Path(wheel) / Path(name).parent.name).metadata
    assert set(extras.get_all("Provides-Extra")) == {*FEATURES, *COLLECTIONS}


@pytest.mark.parametrize("extra", FEATURES)
def test_each_extra_works_alone(extra, plain, fresh, wheel, tmp_path):
    (tmp_path / "use.py").write_text(FEATURES[extra])
    assert call("-I", "use.py", python=plain.python, cwd=tmp_path)[0] != 0
    fresh.install(f"memkit[{extra}] @ {Path(wheel).as_uri()}")
    succeed("-I", "use.py", python=fresh.python, cwd=tmp_path)


@pytest.mark.parametrize("extra", sorted(COLLECTIONS))
def test_a_collection_of_extras_can_be_resolved(extra, fresh, wheel):
    fresh.install("--dry-run", f"memkit[{extra}] @ {Path(wheel).as_uri()}")


def test_the_citation_is_of_this_version():
    lines = (ROOT / "CITATION.cff").read_text().splitlines()
    assert f"version: {mk.__version__}" in lines
