"""`import memkit` does nothing: no cost, no heavy module, no side effect; and it works from a bare source tree."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import memkit as mk
from tests.helpers import run_python

ROOT = Path(__file__).parents[1]

CHECK = """
import json, os, random, sys, threading, time, warnings, logging, signal
import numpy as np
{first}
import torch
def state():
    return {{
        "environment": dict(os.environ), "filters": len(warnings.filters), "threads": threading.active_count(),
        "handlers": len(logging.getLogger().handlers), "python": hash(random.getstate()),
        "numpy": hash(np.random.get_state()[1].tobytes()), "torch": hash(torch.get_rng_state().numpy().tobytes()),
        "dtype": str(torch.get_default_dtype()), "cuda": torch.cuda.is_initialized(),
        "signals": [str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM)], "grad": torch.is_grad_enabled(),
    }}
before, modules, start = state(), set(sys.modules), time.process_time()
{second}
seconds = time.process_time() - start
print(json.dumps({{"seconds": seconds, "same": state() == before, "new": sorted(set(sys.modules) - modules)}}))
"""

HEAVY = {"torch", "matplotlib", "rich", "transformers", "lightning", "accelerate", "pandas", "scipy", "sklearn", "yaml"}
HEAVY |= {"torchmetrics", "torch_geometric", "pytest"}


def run(second, *, first="", cwd=ROOT):
    script = CHECK.format(first=first, second=second)
    done = subprocess.run([sys.executable, "-c", script], cwd=cwd, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_import_has_no_side_effects():
    for _ in range(3):  # another process may have taken the core
        result = run("import memkit")
        assert result["same"]
        assert {name for name in result["new"] if name.startswith("memkit")} == {
            "memkit", "memkit._core", "memkit._core.lazy", "memkit._version",
        }  # fmt: skip
        if result["seconds"] <= 0.050:
            return
    pytest.fail(f"{result['seconds']} s")


@pytest.mark.slow
def test_a_public_package_costs_nothing():
    script = (
        "import importlib, json, time, torch, memkit\n"
        "def seconds(name):\n"
        "    start = time.process_time()\n"
        "    importlib.import_module(f'memkit.{name}')\n"
        "    return time.process_time() - start\n"
        "print(json.dumps({name: seconds(name) for name in memkit._PACKAGES}))"
    )
    runs = [
        json.loads(subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, check=True).stdout)
        for _ in range(2)
    ]
    for name in mk._PACKAGES:
        assert min(each[name] for each in runs) <= 0.050


def test_public_names_import_no_heavy_modules():
    result = run(
        "import memkit\n"
        "for module in (memkit, *(getattr(memkit, name) for name in memkit._PACKAGES)):\n"
        "    for name in module.__all__: getattr(module, name)"
    )
    roots = {name.partition(".")[0] for name in result["new"]}
    assert not roots & (HEAVY - {"torch"})
    assert not {name for name in result["new"] if name.startswith(("torch._inductor", "torch.distributed.fsdp"))}
    assert result["same"]


def test_torch_free_names_import_no_torch():
    script = (
        "import sys, memkit as mk\n"
        "config = mk.get_preset_config('medium', 24); mk.estimate_memory_usage(config); mk.memory.parse_bytes('1GiB')\n"
        "mk.report.read_memory_events\n"
        "assert 'torch' not in sys.modules, 'torch was loaded'"
    )
    run_python(script)  # which asserts that it ends well


@pytest.mark.slow
def test_works_from_a_bare_source_tree(tmp_path):
    """Without installation, without the current directory being the checkout, without site-packages' memkit."""
    import shutil

    shutil.copytree(ROOT / "memkit", tmp_path / "memkit", ignore=shutil.ignore_patterns("__pycache__"))
    script = "import memkit, sys; memkit.GradientAccumulator; print(memkit.__file__, memkit.__version__)"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(str(tmp_path / "memkit"))
    done = subprocess.run([sys.executable, "-m", "memkit", "presets"], cwd=tmp_path, capture_output=True, check=True)
    assert b"medium" in done.stdout
