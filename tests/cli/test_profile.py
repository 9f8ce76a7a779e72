"""The `memkit profile` command, as typed in a shell."""

import json
import sys

import pytest

from memkit.cli import main, profile
from memkit.recipes.memory_test.config import MemoryTestConfig
from tests.cli.commands import assert_error, assert_wrong_usage

CONFIG = MemoryTestConfig(
    num_physical_nodes=50,
    num_latent_tokens=40,
    min_edges=200,
    max_edges=3200,
    num_test_points=2,
    test_decoder=False,
    mlp=[8],
    feature_dim=8,
    core_mlps=[[8]],
    core_num_edges=[100, 400],
    core_coord_dims=[2],
    core_feature_dims=[8],
)
SCRIPT = """
import torch

def build_step(n):
    print("building", n)
    weight = torch.nn.Parameter(torch.ones(256))
    x = torch.ones(n, 256)
    def step():
        weight.grad = None
        (x * weight).square().mean().backward()
    return step
"""


@pytest.fixture(autouse=True)
def no_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)


@pytest.fixture
def config(tmp_path):
    (tmp_path / "sweep.json").write_text(CONFIG.model_dump_json())
    return str(tmp_path / "sweep.json")


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return f"{tmp_path}/train.py:build_step"


def test_both_analyses_with_their_files(config, tmp_path, capsys):
    folder = tmp_path / "new"
    assert main(["profile", "--config", config, "--output-dir", str(folder), "--all"]) == 0  # as without it
    out, err = capsys.readouterr()
    assert out.count("no step ran on any device") == 2
    assert "predicted" not in err  # progress is for those who watch
    assert "no PNG: it needs matplotlib, `pip install matplotlib`" in err
    names = {path.name for path in folder.iterdir()}
    assert {"memory_analysis_data.csv", "edge_memory_results.csv", "memory_analysis_results.svg"} < names
    assert not any(name.endswith(".jsonl") for name in names)


def test_max_edges_and_modes(config, tmp_path, capsys):
    arguments = ["--core", "--max-edges", "150", "--modes", "inference", "--output-dir", str(tmp_path), "--json"]
    assert main(["profile", "--config", config, *arguments]) == 0
    ((result),) = json.loads(capsys.readouterr().out)
    assert [(point["size"], point["mode"]) for point in result["points"]] == [(100, "inference")]
    assert result["analysis"] == "core"


def test_own_step_exceeding_the_card(script, tmp_path, capsys):
    """x, its product with the weight, and what is kept of the square: 3 KiB a row; 24 GiB end at 8 million rows."""
    arguments = ["profile", script, "--output-dir", str(tmp_path), "--gpu", "RTX 4090", "--json"]
    assert main([*arguments, "--sizes", "1k,4k"]) == 0
    ((result),) = json.loads(capsys.readouterr().out)
    train, inference = result["curves"]
    assert train["tier"] == "structural"
    assert train["largest"]["RTX 4090"] < inference["largest"]["RTX 4090"]
    assert main([*arguments, "--sizes", "1k,10M"]) == 1
    assert {path.name for path in tmp_path.glob("scaling_*.csv")} == {"scaling_data.csv"}


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("5k,10k,1M", [5_000, 10_000, 1_000_000]), ("1.5k", [1_500]), ("7, 9", [7, 9]), ("3..4", [3, 4])],
)
def test_sizes(text, sizes):
    assert profile._sizes(text) == sizes


def test_a_range_is_twelve_sizes_in_equal_ratios():
    sizes = profile._sizes("5k..1M")
    assert (len(sizes), sizes[0], sizes[-1]) == (12, 5_000, 1_000_000)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{script}", "--sizes", "5k,many"], "positive numbers such as 5000 or 5k"),
        (["{script}", "--sizes", "10..5"], "SMALLEST..LARGEST"),
        (["train:build", "--sizes", "5"], "not a Python file"),
        (["{script}s", "--sizes", "5"], "a missing function"),
        (["--gpu", "A100"], "A100 40GB, A100 80GB"),
        (["--max-edges", "0"], "max_edges=0"),
    ],
)
def test_an_error_is_one_line_and_exit_code_2(script, tmp_path, capsys, arguments, message):
    given = [argument.format(script=script) for argument in arguments]
    assert_error(capsys, ["profile", "--output-dir", str(tmp_path), *given], message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train.py:build_step"], "--sizes must be given together"),
        (["--sizes", "5"], "--sizes must be given together"),
        (["--memory-limit", "nonsense"], "--memory-limit applies only to measured runs"),
        (["--device", "cpu"], "--device applies only to measured runs"),
        (["train.py:build_step", "--sizes", "5", "--max-edges", "3"], "--max-edges applies only to the memory test"),
    ],
)
def test_options_without_effect_are_refused(capsys, arguments, message):
    assert_wrong_usage(capsys, ["profile", *arguments], message)


@pytest.mark.slow
def test_measured_sweep_matches_prediction(script, tmp_path, capsys):
    arguments = ["profile", script, "--sizes", "10,20", "--modes", "train", "--measured", "--device", "cpu", "--json"]
    arguments += ["--output-dir", str(tmp_path / "out")]
    assert main(arguments) == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert [(p["status"], p["source"], p["peak_bytes"]) for p in result["points"]] == [
        ("ok", "measured", p["predicted_bytes"]) for p in result["points"]
    ]
