"""The table of cards: names, sizes, errors, files."""

import contextlib
import json
import multiprocessing
import re
import zipfile
from dataclasses import FrozenInstanceError, replace
from functools import partial

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from memkit._core.errors import ConfigError, FileFormatError, InputError, InputTypeError
from memkit._core.records import DeviceMemory
from memkit._core.units import GIB, MIB
from memkit.predict import calibration
from memkit.predict.calibration import calibrate_gpu
from memkit.predict.estimate import LESS, MORE, MORE_AT_LEAST, SPREAD, Margin
from memkit.predict.gpus import all_gpus, capacity_bytes, find_gpu, write_gpus
from memkit.predict.usage import estimate_memory_usage
from tests.helpers import assert_refused, run_python
from tests.predict.estimates import estimate_with

GPUS = all_gpus()
SHORT = json.dumps({"gpus": [GPUS[0].as_dict() | {"total": ["1GiB"]}]})  # one end of two


def test_the_table_is_large_and_its_names_differ():
    assert len(GPUS) >= 50
    assert len({gpu.name for gpu in GPUS}) == len(GPUS)
    assert {gpu.vendor for gpu in GPUS} == {"NVIDIA", "AMD", "Intel", "Apple"}
    assert sum(gpu.confidence == "observed" for gpu in GPUS) >= 50
    assert all(gpu.source and re.fullmatch(r"20\d\d-\d\d", gpu.date) for gpu in GPUS)


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_a_row_is_possible(gpu):
    lowest, highest = gpu.total_interval
    least, most = gpu.context_interval
    assert 0 <= least <= most < lowest <= highest <= 1.01 * gpu.box_bytes
    assert gpu.usable_bytes == lowest - most
    for name in (
        gpu.name,
        *gpu.aliases,
        f"{gpu.vendor} {gpu.name.removeprefix(gpu.vendor)}",
        gpu.name.lower().replace(" ", ""),
    ):
        assert find_gpu(name) is gpu
    with pytest.raises(FrozenInstanceError):
        gpu.name = "other"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("4090", "RTX 4090"),
        ("nvidia geforce rtx4090", "RTX 4090"),
        ("RTX 4090 24GB", "RTX 4090"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("Tesla V100-SXM2-32GB", "V100 32GB"),
        ("NVIDIA H100 80GB HBM3", "H100 80GB"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("Quadro RTX 6000", "Quadro RTX 6000"),
        ("Intel(R) Arc(TM) B580 Graphics", "Arc B580"),
        ("AMD Instinct MI300X", "Instinct MI300X"),
        ("AMD Radeon RX 7900 XTX", "RX 7900 XTX"),
        ("mac 16GB", "Apple 16GB"),
    ],
)
def test_names_as_people_and_drivers_write_them(name, expected):
    assert find_gpu(name).name == expected


@pytest.mark.parametrize(
    ("name", "got", "names"),
    [
        ("A100", "matches several GPUs", "A100 40GB, A100 80GB"),
        ("RTX 4060 Ti", "matches several GPUs", "RTX 4060 Ti 8GB, RTX 4060 Ti 16GB"),
        ("RTX 4091", "an unknown GPU", "RTX 4090"),
        ("H10O", "an unknown GPU", "H100 80GB"),
        ("abacus", "an unknown GPU", "a GPU that `memkit gpus` lists"),
        ("", "an unknown GPU", "a GPU that `memkit gpus` lists"),
    ],
)
def test_rejects_ambiguous_or_unknown_card(name, got, names):
    error = assert_refused(lambda: find_gpu(name), InputError, f"find_gpu({name!r})")
    assert got in error.got
    assert names in error.expected


@pytest.mark.slow
@given(st.text(max_size=12))
def test_any_text_is_a_card_or_an_input_error(name):
    with contextlib.suppress(InputError):
        assert find_gpu(name) in GPUS


def test_capacity_is_a_size_or_a_card():
    card = find_gpu("RTX 4090")
    assert capacity_bytes("24GiB") == capacity_bytes("24GiB", context_counted=True) == 24 * GIB
    assert capacity_bytes("7B") == 7
    assert_refused(lambda: capacity_bytes(24), InputError, "write '24GiB'")
    assert capacity_bytes("RTX 4090") == card.total_bytes - card.context_bytes
    assert capacity_bytes("RTX 4090", context_counted=True) == card.total_bytes
    assert capacity_bytes(card) == card.usable_bytes
    assert capacity_bytes(card, context_counted=True) == card.total_bytes
    error = assert_refused(lambda: capacity_bytes("RTX 4091"), InputError, "expected a number and a unit")
    assert "RTX 4090" in error.expected
    assert_refused(lambda: capacity_bytes(-1), InputError, "-1")
    assert_refused(lambda: capacity_bytes(24.0), InputTypeError)


def test_fits_takes_the_context_off_once():
    """Exactly the card's total fits if the context is counted; without a context, only the driver's rest fits."""
    card = find_gpu("RTX 3090")
    cpu = estimate_with(parameters_bytes=card.usable_bytes)
    assert cpu.headroom_bytes("RTX 3090") == 0
    assert not replace(cpu, other_bytes=1).fits("RTX 3090")
    cuda = replace(cpu, reserved_bytes=card.usable_bytes, context_bytes=card.context_bytes)
    assert cuda.headroom_bytes("RTX 3090") == 0
    assert replace(cuda, context_bytes=card.context_bytes - MIB).headroom_bytes("RTX 3090") == MIB


def step_of_1200_mib(**others):
    """A step that reserves 1200 MiB beside a context of 300, and needs 1000 at least."""
    return estimate_with(
        parameters_bytes=900 * MIB,
        reserved_bytes=1200 * MIB,
        _find_least=lambda: 1000 * MIB,
        context_bytes=300 * MIB,
        **others,
    )


def words_of(estimate, *sizes):
    return [str(estimate.verdict(int(size * MIB))) for size in sizes]


def test_step_runs_in_less_than_it_reserves():
    estimate = step_of_1200_mib()
    assert estimate.required_bytes == 1200 * MIB + MORE.bytes_of(1200 * MIB, 200 * MIB) + 300 * MIB
    enough = estimate.least_required_interval[1]
    assert enough == 1000 * MIB + int(MORE_AT_LEAST * 200 * MIB) + 300 * MIB  # a part of the cache cannot be freed
    assert words_of(estimate, 1299, 1300, enough / MIB, 1700) == ["does not fit", "too close", "fits", "fits"]
    assert "takes time" in estimate.verdict(estimate.required_bytes - 1).reason
    assert "takes time" not in estimate.verdict(estimate.required_bytes).reason
    assert "at least 1.27 GiB" in estimate.verdict(MIB).reason
    unknown = replace(estimate, _find_least=None)
    assert words_of(unknown, 1499, 1500) == ["does not fit", "fits"]


def test_verdict_is_too_close_within_interval():
    with_kernels = step_of_1200_mib(workspace_bytes=50 * MIB, spread=SPREAD)
    low, high = with_kernels.least_required_interval
    beyond = Margin(SPREAD, MORE_AT_LEAST).bytes_of(1000 * MIB, 200 * MIB)
    assert (low, high) == (int(1000 * MIB * (1 - SPREAD)) + 300 * MIB, 1000 * MIB + beyond + 300 * MIB)
    words = [str(with_kernels.verdict(size)) for size in (low - 1, low, high - 1, high)]
    assert words == ["does not fit", "too close", "too close", "fits"]
    # Drivers take different amounts: what is enough with one may be too little with another.
    drivers = replace(step_of_1200_mib(least_context_bytes=100 * MIB), reserved_bytes=1000 * MIB)
    assert words_of(drivers, 1099, 1100, 1299, 1300) == ["does not fit", "too close", "too close", "fits"]
    assert "at least 1.07 GiB, or up to 1.27 GiB" in drivers.verdict(1200 * MIB).reason


def test_peak_uncertainty_covers_workspace_and_spread():
    estimate = step_of_1200_mib(workspace_bytes=MIB, spread=0.1)
    assert estimate.peak_interval == (810 * MIB, 990 * MIB)
    assert replace(estimate, workspace_bytes=200 * MIB).peak_interval == (810 * MIB, 1100 * MIB)
    assert replace(estimate, workspace_bytes=0, spread=0.0).peak_interval == (900 * MIB, 900 * MIB)
    # What is required counts the scratch memory in full, beside all that may be reserved.
    assert replace(estimate, workspace_bytes=800 * MIB).required_bytes == (1200 + 800 + 300) * MIB


def test_a_reserve_is_as_uncertain_as_its_elastic_part():
    estimate = step_of_1200_mib()
    low, high = estimate.reserved_interval
    assert low == 1200 * MIB - LESS.bytes_of(1200 * MIB, 200 * MIB)
    assert high == 1200 * MIB + MORE.bytes_of(1200 * MIB, 200 * MIB) == estimate.required_bytes - 300 * MIB
    stiff = replace(estimate, _find_least=lambda: 1200 * MIB)  # nothing that it reserves can be spared
    assert stiff.reserved_interval == (1188 * MIB, 1212 * MIB)
    elastic = replace(estimate, _find_least=lambda: 600 * MIB)
    assert elastic.reserved_interval[0] < low < stiff.reserved_interval[0]
    assert elastic.reserved_interval[1] > high > stiff.reserved_interval[1]
    edge = replace(estimate, _find_range=lambda: (1000 * MIB, 1400 * MIB))
    assert edge.reserved_interval[0] < 1000 * MIB < 1400 * MIB < edge.reserved_interval[1]
    assert replace(estimate, reserved_bytes=None).reserved_interval is None
    assert replace(estimate, _find_least=None).reserved_interval == (1200 * MIB, 1200 * MIB)  # a formula's estimate


def test_independent_margins_add_up_by_their_squares():
    assert Margin(share=0.03, elastic=0.4).bytes_of(1000, 100) == 50
    assert Margin(share=0.03, elastic=0.4).bytes_of(1000, 0) == 30


@pytest.mark.parametrize(
    ("target", "model", "x", "spread"),
    [
        ("RTX 3060", nn.Conv2d(3, 8, 3), torch.ones(1, 3, 8, 8), SPREAD),
        ("RTX 3060", nn.Linear(8, 8), torch.ones(1, 8), 0.0),
        ("cpu", nn.Conv2d(3, 8, 3), torch.ones(1, 3, 8, 8), 0.0),
    ],
)
def test_only_convolutions_of_cudnn_have_a_spread(target, model, x, spread):
    estimate = estimate_memory_usage(model, x, lambda model, x: model(x).sum(), target=target)
    assert estimate.spread == spread
    with torch.backends.cudnn.flags(enabled=False):
        plain = estimate_memory_usage(model, x, lambda model, x: model(x).sum(), target=target)
    assert plain.spread == 0.0


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [
        ("RTX 4090", 8_519_680),
        ("A100 80GB", 8_519_680),
        ("H100", 32 * MIB),
        ("RTX 5090", 32 * MIB),
        ("MI300X", 128 * MIB),
    ],
)
def test_cublas_workspaces_follow_torch_rule(name, num_bytes):
    assert find_gpu(name).cublas_workspace_bytes == num_bytes


def test_compute_capability():
    assert find_gpu("RTX 4090").compute_capability == (8, 9)
    assert find_gpu("B200").compute_capability == (10, 0)
    assert find_gpu("MI300X").compute_capability is None
    assert find_gpu("Apple 16GB").compute_capability is None


def test_a_file_of_own_cards_comes_before_the_table(tmp_path):
    own = replace(find_gpu("RTX 4090"), context_interval=(400 * MIB, 400 * MIB), confidence="calibrated")
    new = replace(own, name="RTX 9090", aliases=("my card",))
    path = tmp_path / "cards.json"
    write_gpus(path, [own, new])
    assert find_gpu("4090", calibrated=path) == own != find_gpu("4090")
    assert find_gpu("my card", calibrated=path) == new
    assert len(all_gpus(path)) == len(GPUS) + 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"gpus": [{}]}',
        '{"gpus": [{"total": ["1 GiB"], "context": [0, 0]}]}',
        SHORT,
        "\0",
    ],
)
def test_rejects_invalid_card_file(tmp_path, text):
    path = tmp_path / "cards.json"
    path.write_text(text)
    assert_refused(lambda: all_gpus(path), FileFormatError, f"calibrated={str(path)!r}")
    with pytest.raises(
        FileNotFoundError, match=r"no file at this path.*`memkit gpus --calibrate .*none`, or omit it\.$"
    ):
        all_gpus(tmp_path / "none")


def test_a_record_is_its_own_card_and_other_things_are_none():
    own = replace(find_gpu("RTX 4090"), name="mine")
    assert find_gpu(own) is own
    for name in (None, 4090, torch.device("cuda")):
        assert_refused(partial(find_gpu, name), InputTypeError, "the name of a GPU as a string, or a GPU object")


@pytest.mark.slow  # it starts a process, which imports torch
def test_failed_calibration_ends_its_process(monkeypatch):
    readings = iter([DeviceMemory(free_bytes=GIB)])  # there is no second one
    monkeypatch.setattr(calibration, "find_gpu", lambda _: find_gpu("RTX 4090"))
    monkeypatch.setattr(calibration, "resolve_device", lambda _: torch.device("cpu"))
    monkeypatch.setattr(calibration, "device_memory", lambda _: next(readings))
    with pytest.raises(StopIteration):
        calibrate_gpu("cuda")
    assert not multiprocessing.active_children()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has one")
@pytest.mark.parametrize("call", [find_gpu, capacity_bytes, calibrate_gpu])
def test_a_live_reading_needs_the_card(call):
    assert_refused(lambda: call("cuda"), ConfigError, "card of this machine", "write 'RTX 4090'")


@pytest.mark.gpu
def test_a_live_reading_is_the_card_of_this_machine():
    gpu = find_gpu("cuda")
    assert gpu.total_interval == (torch.cuda.get_device_properties(0).total_memory,) * 2
    assert gpu.confidence == "live"


@pytest.mark.gpu
def test_calibration_measures_a_context_and_a_workspace():
    gpu = calibrate_gpu()
    assert 50 * MIB < gpu.context_bytes < 3 * GIB
    assert gpu.cublas_workspace_bytes == find_gpu("cuda").cublas_workspace_bytes


def test_the_table_is_part_of_the_package(tmp_path):
    pytest.importorskip("hatchling")
    done = run_python("import hatchling.build as b, sys; print(b.build_wheel(sys.argv[1]))", tmp_path)
    with zipfile.ZipFile(tmp_path / done.stdout.split()[-1]) as wheel:
        assert json.loads(wheel.read("memkit/predict/gpus.json"))["gpus"]


@pytest.mark.parametrize(
    ("device", "own_name", "architecture", "total_bytes", "row"),
    [
        ("cuda:0", "NVIDIA GeForce RTX 3080", "8.6", 12_580_000_000, "RTX 3080 12GB"),
        ("cuda", "NVIDIA GeForce RTX 3080", "8.6", 10_500_000_000, "RTX 3080 10GB"),
        ("cuda", "NVIDIA Unheard-of", "8.9", 25_000_000_000, "RTX 4090"),
        ("mps", "arm64", None, 11_453_000_000, "Apple 16GB"),
    ],
)
def test_live_reading_keeps_total_and_name(monkeypatch, device, own_name, architecture, total_bytes, row):
    """The device's answers are put in: no test machine has these cards."""
    monkeypatch.setattr("memkit._machine.devices.resolve_device", torch.device)
    monkeypatch.setattr("memkit._machine.devices.device_name", lambda device: own_name)
    monkeypatch.setattr("memkit._machine.devices.device_architecture", lambda device: architecture)
    monkeypatch.setattr("memkit._machine.devices.device_memory", lambda device: DeviceMemory(total_bytes=total_bytes))
    gpu = find_gpu(device)
    assert (gpu.name, gpu.total_interval, gpu.confidence) == (own_name, (total_bytes, total_bytes), "live")
    assert gpu.context_interval == find_gpu(row).context_interval
    assert gpu.source.endswith(f"the rest as {row}")
    assert gpu.num_multiprocessors == (find_gpu(row).num_multiprocessors if "RTX" in own_name else None)
    assert capacity_bytes(device, context_counted=True) == total_bytes
