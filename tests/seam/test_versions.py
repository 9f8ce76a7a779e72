"""Versions of torch: the warning for untested ones, and the error for a feature that a version lacks."""

import json
import re
from pathlib import Path

import pytest
import torch

import memkit as mk
from memkit._simulation.cuda import autocast
from memkit._torch import aten, optimizers, tensors
from memkit._torch.versions import NEWEST, OLDEST, parse, require, warn_beyond_tested
from tests.helpers import assert_refused, run_python
from tests.versions import has

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("version", "number"),
    [
        ("2.13.0", (2, 13)),
        ("2.8.0+cu128", (2, 8)),
        ("2.16.0.dev20261120+cpu", (2, 16)),
        ("2.14.0a0+gitabc", (2, 14)),
        ("3.0", (3, 0)),
        ("main", (0, 0)),
    ],
)
def test_a_version_is_compared_as_numbers(version, number):
    assert parse(version) == number


@pytest.mark.parametrize("version", ["2.7.1", "2.16.0.dev20261120+cpu", "3.0.0", "1.13.1"])
def test_beyond_the_tested_range_there_is_a_warning_with_the_range(version):
    with pytest.warns(mk.MemkitWarning, match=r"tested on PyTorch 2\.\d+ to 2\.\d+, and this is " + re.escape(version)):
        warn_beyond_tested(version)


@pytest.mark.parametrize("version", ["2.8.0", "2.13.0+cpu", "2.15.1+cu130", torch.__version__])
def test_no_warning_within_tested_range(version, recwarn):
    warn_beyond_tested(version)
    assert not recwarn.list


def test_warns_once_per_process_at_first_use():
    code = (
        "import warnings; warnings.simplefilter('always')\n"
        "import torch; torch.__version__ = '9.9.0'\n"
        "import memkit\n"
        "print('imported')\n"
        "memkit.GradientAccumulator, memkit.VirtualGPU, memkit.Tracker\n"
        "import memkit.train.wrapper, memkit.predict.usage\n"
    )
    said = run_python(code).stderr
    assert said.count("MemkitWarning") == 1
    assert "9.9.0" in said


def test_the_table_proves_the_range():
    (oldest,) = re.findall(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    rows = json.loads((ROOT / "benchmarks/results/torch_versions.json").read_text())["figures"]
    assert parse(oldest) == OLDEST == min(map(parse, rows))
    assert max(map(parse, rows)) == NEWEST
    assert [name for name, row in rows.items() if row["failed"]] == []


def test_missing_torch_feature_raises_typed_error():
    with pytest.raises(
        mk.errors.TorchVersionError, match=r"f\(\): got PyTorch .* which has no Tensor\.x; .*2\.99 or newer"
    ):
        require(None, name="Tensor.x", since="2.99", feature="f()")
    require(1, name="Tensor.x", since="2.99", feature="f()")


def test_float32_accumulation_requires_grad_dtype():
    """It works, or is refused by name; features that need no other dtype work everywhere."""
    half = torch.nn.Linear(2, 1).to(torch.bfloat16)
    optimizer = torch.optim.SGD(half.parameters(), lr=0.1)
    if has("torch.Tensor.grad_dtype"):
        mk.GradientAccumulator(optimizer, 2, accumulate_dtype=torch.float32).close()
        tensors.assign_gradient_dtype(half.weight, torch.float32)
        assert tensors.gradient_dtype(half.weight) == torch.float32
    else:
        with pytest.raises(mk.errors.TorchVersionError, match=r"accumulate_dtype=torch\.float32.*Tensor\.grad_dtype"):
            mk.GradientAccumulator(optimizer, 2, accumulate_dtype=torch.float32)
        assert tensors.gradient_dtype(half.weight) == torch.bfloat16
    mk.GradientAccumulator(optimizer, 2).close()


def test_omits_only_missing_operators():
    assert aten.overloads("mm", "no_such_operator") == aten.overloads("mm")
    assert aten.overloads("mm.out") < aten.overloads("mm")
    assert len(aten.FUSED_ATTENTION) == 5
    assert len(aten.FUSED_RMS_NORM) == has("torch.ops.aten._fused_rms_norm_backward")
    assert len(optimizers.MUON) == has("torch.optim.Muon")


def test_autocast_table_covers_installed_torch(monkeypatch):
    assert autocast.operators_without_a_rule() in ([], ["linalg_matrix_sqrth"])  # 2.15 casts it; it is refused
    monkeypatch.setitem(autocast._OPERATORS, "widest", "addcdiv")  # negative control
    assert "grid_sampler" in autocast.operators_without_a_rule()


def test_the_table_of_autocast_is_the_header_of_this_torch():
    header = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text().replace("\\\n", "")
    policies = autocast.operators_by_policy(parse(torch.__version__))
    names = dict(zip(policies, ("LOWER_PRECISION_FP", "FP32", "FP32_SET_OPT_DTYPE", "PROMOTE"), strict=True))
    for policy, operators in policies.items():
        line = re.search(rf"#define AT_FORALL_{names[policy]}\(_\)(.*)", header)[1]
        entries = re.findall(r"_\(\s*(\w+)\s*(?:,\s*(\w+)\s*)?\)", line)
        listed = {f"{name}.{overload}" if overload else name for name, overload in entries}
        assert listed == {name for name in operators if "imname" not in name or name in listed}, policy


def test_rejects_only_used_operators_without_rule(monkeypatch):
    monkeypatch.setitem(autocast._OPERATORS, "widest", "addcdiv")
    with mk.VirtualGPU("RTX 4090"), torch.autocast("cuda"):
        x = torch.ones(4, 4, device="cuda")
        assert (x @ x).dtype is torch.float16
        assert_refused(lambda: torch.dot(x[0], x[0]), mk.errors.TorchVersionError, "runs dot")
