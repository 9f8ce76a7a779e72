"""The edge-count memory test: its settings, its reference operator, its figures and its files."""

import csv
import json
import sys
from functools import partial
from itertools import pairwise
from xml.etree import ElementTree as ET

import pytest
import torch

from memkit._core.errors import ConfigError, InputError, InputTypeError, MemkitWarning
from memkit.predict.gpus import all_gpus
from memkit.recipes.memory_test.config import MemoryTestConfig
from memkit.recipes.memory_test.curves import capacities
from memkit.recipes.memory_test.reference import EdgeCase, IntegralTransform, core_cases, full_cases
from memkit.recipes.memory_test.sweep import run_memory_test
from tests.helpers import assert_refused, one_in
from tests.predict.scaling.families import allocated_peak

SMALL = MemoryTestConfig(
    num_physical_nodes=1000,
    num_latent_tokens=900,
    min_edges=200,
    max_edges=3200,
    num_test_points=2,
    test_full_model=True,
    mlp=[16, 16],
    feature_dim=8,
    core_mlps=[[8], [16, 16]],
    core_num_edges=[100, 400],
    core_coord_dims=[2, 3],
    core_feature_dims=[8],
)


@pytest.fixture(scope="module")
def full():
    return run_memory_test(SMALL)


@pytest.fixture(scope="module")
def core():
    return run_memory_test(SMALL, "core")


# ----------------------------------------------------------------------------------------------------- settings


def test_the_defaults_are_those_of_the_source():
    config = MemoryTestConfig()
    assert (config.device, config.num_physical_nodes, config.num_latent_tokens) == ("cuda:0", 5_000, 4_096)
    assert (config.min_edges, config.max_edges, config.num_test_points) == (5_000, 500_000, 12)
    assert (config.test_encoder, config.test_decoder, config.test_full_model) == (True, True, False)
    assert config.modes == ("train", "inference")
    assert config.core_mlps == ((64, 64), (128, 128, 128), (256, 256, 256))
    assert config.core_num_edges == (5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000)
    assert len(core_cases(config)) == 3 * 2 * 3
    assert [case.part for case in full_cases(config)] == ["encoder", "decoder"]


def test_edge_counts_form_geometric_sequence():
    counts = MemoryTestConfig().num_edges
    assert (len(counts), counts[0], counts[-1]) == (12, 5_000, 500_000)
    ratios = [after / before for before, after in pairwise(counts)]
    assert max(ratios) / min(ratios) < 1.001
    assert MemoryTestConfig(min_edges=3, max_edges=4).num_edges == (3, 4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_edges": 10}, "not below min_edges"),
        ({"device": "tpu"}, "cuda:0"),
        ({"max_edge": 5}, "write max_edges=5."),
        ({"core_mlps": [[64, 0]]}, "hidden widths"),
        ({"mlp": []}, "at least one"),
    ],
)
def test_invalid_field_error_names_field_and_range(fields, message):
    assert_refused(lambda: MemoryTestConfig(**fields), ConfigError, "MemoryTestConfig(", message)


def test_a_config_goes_through_a_file(tmp_path):
    (tmp_path / "sweep.json").write_text(SMALL.model_dump_json())
    assert MemoryTestConfig.from_file(tmp_path / "sweep.json") == SMALL


# ---------------------------------------------------------------------------------------------------- reference


def test_integral_transform_averages_kernel_times_feature():
    torch.manual_seed(0)
    transform = IntegralTransform((5,), 2, 3).double()
    sources, targets, features = (torch.rand(n, d, dtype=torch.float64) for n, d in ((4, 2), (3, 2), (4, 3)))
    edges = torch.tensor([[0, 1, 3, 3], [0, 0, 0, 2]])
    out = transform(sources, targets, features, edges)
    expected = torch.zeros_like(out)
    for target in (0, 2):
        parts = [
            transform.kernel(torch.cat([sources[s], targets[target]])) * features[s]
            for s, t in edges.T.tolist()
            if t == target
        ]
        expected[target] = torch.stack(parts).mean(0)
    torch.testing.assert_close(out, expected)  # no edge ends at node 1, which stays zero


def test_the_theory_counts_each_row_of_each_layer_once():
    case = EdgeCase("edge MLP", (16, 8), 3, 4, 1, 1)
    model, inputs = case._model_and_inputs(10)
    sizes = [inputs[0].nbytes]
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_hook(lambda *args: sizes.append(args[2].nbytes))
    model(*inputs)
    assert case.edge_bytes(10) == sum(sizes) == 10 * (6 + 16 + 8 + 4) * 4


@pytest.mark.parametrize("mode", ["train", "inference"])
@pytest.mark.parametrize("number", one_in(2, [0, 1, 2]))
def test_predictions_are_the_allocators_bytes(full, number, mode):
    curve = full.curves[number]
    build_step = partial(curve.case.build_step, mode=mode)
    allocated_peak(build_step, 100, mode)  # caches of the first call
    assert curve.result.peaks(mode)[3200] == allocated_peak(build_step, 3200, mode)
    assert curve.result.law[mode].tier == "structural"


# ------------------------------------------------------------------------------------------------------ figures


def test_growth_is_free_of_the_constant_part(full):
    curve = full.curves[0]
    peaks = curve.result.peaks("train")
    assert curve.growth_bytes("train", 200) * 1.5 < peaks[200]  # nodes and parameters do not grow
    larger = curve.predicted_bytes("train", 32_000), curve.predicted_bytes("train", 64_000)
    assert curve.growth_bytes("train", 32_000) == larger[1] - larger[0]
    assert curve.result.scaling_factor("train") < 0.99 < curve.result.law["train"].order


def test_the_ratio_is_given_for_every_size(full):
    for curve in full.curves:
        train, inference = curve.result.peaks("train"), curve.result.peaks("inference")
        assert curve.ratios() == {size: train[size] / inference[size] for size in SMALL.num_edges}
        assert len(set(curve.ratios().values())) == len(SMALL.num_edges)


def test_the_largest_size_fits_a_card_and_the_next_does_not(full):
    for each in full.capacities:
        largest = full.curves[2].largest("train", each.card.usable_bytes)
        predicted = [full.curves[2].predicted_bytes("train", n) for n in (largest, largest + 1)]
        assert predicted[0] <= each.card.usable_bytes < predicted[1]


def test_judges_card_class_by_smallest_card():
    assert [each.advised for each in capacities()] == [100_000, 500_000, 1_000_000]
    room = capacities()[1].card.usable_bytes
    others = [gpu for gpu in all_gpus() if 12 <= gpu.box_bytes / 2**30 <= 16 and gpu.vendor == "NVIDIA"]
    assert room == min(gpu.usable_bytes for gpu in others)
    assert_refused(lambda: capacities(["A100"]), InputError, "the name of one GPU")


# -------------------------------------------------------------------------------------------------------- files


@pytest.mark.slow
def test_the_files_have_the_sources_names(full, core, tmp_path):
    pytest.importorskip("matplotlib")
    names = [path.name for result in (full, core) for path in result.write(tmp_path / "new")]
    assert {"memory_analysis_results.png", "memory_analysis_data.csv"} < set(names)
    assert {"edge_memory_analysis.png", "edge_memory_results.csv"} < set(names)
    for name in names:
        content = (tmp_path / "new" / name).read_bytes()
        if name.endswith(".png"):
            assert content.startswith(b"\x89PNG")
        elif name.endswith(".svg"):
            assert ET.fromstring(content).tag.endswith("svg")


def test_without_matplotlib_all_but_the_png_is_written(core, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    paths = core.write(tmp_path)
    assert [path.suffix for path in paths] == [".csv", ".json", ".svg"]
    assert b"\r" not in (tmp_path / "edge_memory_results.csv").read_bytes()  # as the other tables end their lines
    with (tmp_path / "edge_memory_results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 2 * 2 * 2
    row = next(row for row in rows if (row["mlp"], row["coord_dim"], row["feature_dim"]) == ("16x16", "3", "8"))
    assert (row["mode"], row["size"], row["status"], row["source"]) == ("train", "100", "ok", "fake")
    assert int(row["theoretical_edge_bytes"]) == 100 * (6 + 16 + 16 + 8) * 4
    record = json.loads((tmp_path / "edge_memory_results.json").read_text())
    assert record["points"][0]["peak_bytes"] == int(rows[0]["peak_bytes"])
    assert {each["tier"] for each in record["curves"]} == {"structural"}


def test_text_names_laws_and_cards_and_that_nothing_ran(full, core):
    text = full.explain()
    assert "no step ran on any device" in text
    assert "structural, n^1" in text
    assert "includes the constant part" in text
    assert all(each.card.name in text for each in full.capacities)
    assert "Shown: 3 coordinates, 8 features. 2 other combinations are in the CSV file." in core.explain()


# ------------------------------------------------------------------------------------------------------- errors


def test_predicts_for_missing_device_and_says_so():
    config = SMALL.replace(source="measured", device="xpu:7", test_decoder=False, test_full_model=False)
    with pytest.warns(MemkitWarning, match="no xpu:7 device, so all points are predicted"):
        result = run_memory_test(config)
    assert result.device is None
    assert {point.source for point in result.curves[0].result.points} == {"fake"}


@pytest.mark.parametrize(
    ("changes", "analysis", "words"),
    [
        ({"test_encoder": False, "test_decoder": False, "test_full_model": False}, "full", "enabled"),
        ({"test_training_mode": False, "test_inference_mode": False}, "core", "enabled"),
        ({}, "whole", "pass analysis='full'"),
    ],
)
def test_empty_sweep_is_an_error(changes, analysis, words):
    assert_refused(lambda: run_memory_test(SMALL.replace(**changes), analysis), ConfigError, words)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (["core"], {}, InputTypeError, "analysis='core'"),
        ([SMALL], {"memory_limit": "junk"}, InputError, "memory_limit='junk'"),
        ([SMALL], {"memory_limit": "1GiB"}, ConfigError, "a memory limit only for measured runs"),
    ],
)
def test_rejects_ineffective_options(arguments, options, error, message):
    assert_refused(lambda: run_memory_test(*arguments, **options), error, message)
