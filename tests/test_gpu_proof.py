"""`python -m benchmarks gpu`: it refuses without a GPU, resumes, finds what differs, and reads no damaged file."""

import contextlib
import json
import os
import shutil
import subprocess

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st

import memkit as mk
from benchmarks.__main__ import main
from benchmarks.gpu import child, command, evidence, page
from benchmarks.gpu.cases import CASES, Case, Place, predicted
from benchmarks.gpu.evidence import Outcome
from benchmarks.gpu.models import TRAININGS
from benchmarks.gpu.observe import Ledger, Operator, differing_operators, events_of
from benchmarks.gpu.ranks import train_both
from memkit._core.units import MIB
from memkit.errors import FileFormatError
from tests.helpers import assert_refused
from tests.ranks import TOGETHER

CARD = "RTX 4060"
FEW = ["measured/gan", "predicted/gan"]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A run of one training on the virtual GPU."""
    work = tmp_path_factory.mktemp("work")
    assert command.Run(work, CARD).cases(FEW, is_again=False) == command.DONE
    return work


def test_runs_no_case_without_gpu(tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main(["gpu", "--work", str(tmp_path / "work")]) == command.REFUSED
    assert "Nothing was run." in capsys.readouterr().err
    assert not (tmp_path / "work").exists()


def test_an_unknown_case_is_refused(capsys):
    assert main(["gpu", "measure-all"]) == command.REFUSED
    assert "--list" in capsys.readouterr().err


@pytest.mark.slow
def test_a_virtual_gpu_is_predicted_to_the_byte(ran):
    found = evidence.read(ran / "virtual.json")
    prediction = found.predictions()["gan"]
    assert prediction.peak_bytes == prediction.measured_peak_bytes
    assert prediction.reserved_bytes == prediction.measured_reserved_bytes
    assert prediction.differing_operators == []
    assert prediction.allocations.num_same_address == prediction.allocations.num > 100
    assert found.card.is_virtual


@pytest.mark.slow
def test_skips_finished_cases(ran, capsys):
    before = (ran / "measured-gan.json").stat().st_mtime_ns
    assert command.Run(ran, CARD).cases(FEW, is_again=False) == command.DONE
    assert (ran / "measured-gan.json").stat().st_mtime_ns == before
    assert "[1/" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_failed_case_stays_in_the_file_until_it_runs_again(ran, tmp_path, capsys):
    work = shutil.copytree(ran, tmp_path / "work")
    found = evidence.read(work / "virtual.json")
    failed = found.cases | {"tracked": Outcome(status="failed", seconds=1, reason="KeyError: 'x'")}
    found.model_copy(update={"cases": failed}).write(work / "virtual.json")
    assert command.Run(work, CARD).cases(FEW, is_again=False) == command.FAILED
    assert evidence.read(work / "virtual.json").cases["tracked"].status == "failed"
    capsys.readouterr()


@pytest.mark.slow
def test_another_version_begins_anew(ran, monkeypatch):
    other = command.software().model_copy(update={"torch": "1.0"})
    monkeypatch.setattr(command, "software", lambda: other)
    assert command.Run(ran, CARD).earlier() == {}


@pytest.mark.slow
def test_another_measurement_is_found_and_traced_to_its_operators(ran):
    """The figures of a training with other convolutions, in place of those of the card."""
    place = Place(ran, CARD)
    stem = place.stem("measured/gan")
    kept = {suffix: stem.with_suffix(suffix).read_bytes() for suffix in (".json", ".operators.json")}
    figures = json.loads(kept[".json"])
    figures["figures"]["peak_bytes"] = [each + 8 * MIB for each in figures["figures"]["peak_bytes"]]
    operators = [Operator(*each) for each in json.loads(kept[".operators.json"])]
    changed = [
        each._replace(most=each.most + 8 * MIB) if each.name == "aten.convolution_backward.default" else each
        for each in operators
    ]
    try:
        stem.with_suffix(".json").write_text(json.dumps(figures))
        stem.with_suffix(".operators.json").write_text(json.dumps(changed))
        found = predicted(place, "gan")
    finally:
        for suffix, content in kept.items():
            stem.with_suffix(suffix).write_bytes(content)
    assert found["peak_error"] < -0.02
    (row,) = found["differing_operators"]
    assert row["operator"] == "aten.convolution_backward.default"
    assert (row["kept_bytes"], row["inside_bytes"]) == (0, 8 * MIB)


def test_ledger_records_operator_workspace():
    with mk.VirtualGPU("H100 80GB"), Ledger() as ledger:
        x = torch.zeros(4, 64, 32, 32, device="cuda", requires_grad=True)
        F.conv2d(x, torch.zeros(64, 64, 3, 3, device="cuda")).sum().backward()
    names = [row.name for row in ledger.operators]
    assert "aten.convolution.default" in names
    assert "aten.convolution_backward.default" in names  # the backward's thread is seen too
    conv = ledger.operators[names.index("aten.convolution.default")]
    assert conv.kept == 4 * 64 * 30 * 30 * 4
    assert conv.most == conv.kept + 4 * 64 * 32 * 32 * 4 + 64 * 64 * 3 * 3 * 4  # copies in channels-last order


def test_one_sided_operators_count_saved_tensors():
    plain = [Operator("mm", 0, 100, 100), Operator("add", 100, 50, 50)]
    more = [plain[0], Operator("copy", 100, 30, 40), plain[1]]
    assert differing_operators(plain, plain) == []
    assert differing_operators(more, plain) == [
        {"operator": "copy (not predicted)", "times": 1, "kept_bytes": 30, "inside_bytes": 40}
    ]
    assert differing_operators(plain, more)[0]["operator"] == "copy (predicted only)"
    assert differing_operators(plain, more)[0]["kept_bytes"] == -30


def test_events_are_those_of_the_snapshot():
    trace = [
        {"action": "alloc", "addr": 512, "size": 64, "stream": 0},
        {"action": "oom", "device_free": 7, "addr": 0, "size": 1024, "stream": 3},
        {"action": "a later torch's own", "addr": 1, "size": 1, "stream": 0},
    ]
    assert events_of({"device_traces": [trace]}).tolist() == [[0, 512, 64, 0], [5, 7, 1024, 3]]


# ---------------------------------------------------------------------------------------------- cases that end badly


def fail(name, place, log):
    child.main("no such case", place, log)


def speak_and_fail(name, place, log):
    os.setsid()
    log.write_text("RuntimeError: no file /home/ada/secret/train.py\n")
    os._exit(3)


def hang(name, place, log):
    os.setsid()
    subprocess.run(["sleep", "60"], check=False)


@pytest.mark.slow
def test_a_failed_case_says_its_reason_without_folders(tmp_path):
    run = command.Run(tmp_path, CARD)
    outcome = run.one("card", CASES["card"], target=speak_and_fail)
    assert (outcome.status, outcome.reason) == ("failed", "RuntimeError: no file train.py")
    outcome = run.one("card", CASES["card"], target=fail)
    assert (outcome.status, outcome.reason) == ("failed", "KeyError: 'no such case'")


def test_kills_hanging_case(tmp_path):
    outcome = command.Run(tmp_path, CARD).one("card", Case(predicted, limit_s=1), target=hang)
    assert (outcome.status, outcome.reason) == ("timed out", "over 1 s")
    assert outcome.seconds < 30


def test_skips_cases_exceeding_the_card(tmp_path):
    run = command.Run(tmp_path, CARD)
    assert run.one("ranks", CASES["ranks"]).reason == "needs 2 GPUs"
    assert run.one("sampler", CASES["sampler"]).reason == "needs a GPU with data"


# ------------------------------------------------------------------------------------------------------ files of others


def small_evidence(**changes):
    outcome = evidence.Outcome(status="done", seconds=1.5, figures={"exit_code": 0, "summary": "", "failed": []})
    given = {
        "date": "2026-11-23",
        "card": evidence.Card(
            name="NVIDIA RTX 4060",
            row=CARD,
            compute_capability="8.9",
            total_bytes=8 << 30,
            num_gpus=1,
            is_virtual=False,
        ),
        "software": command.software(),
        "cases": {"tests": outcome},
    }
    return evidence.Evidence(**given | changes)


@given(place=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_flipped_bit_is_rejected_or_harmless(place, bit, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "bit.json"
    expected = small_evidence()
    expected.write(path)
    content = bytearray(path.read_bytes())
    content[place % len(content)] ^= 1 << bit
    path.write_bytes(content)
    with contextlib.suppress(FileFormatError):
        assert evidence.read(path) == expected  # a space in the layout


def rewritten(path, change):
    """A file whose content was changed with a sum that fits."""
    content = small_evidence().model_dump(mode="json")
    change(content)
    path.write_text(json.dumps(content | {"sha256": evidence.sum_of(content)}))
    return path


BAD = {
    "cut": (lambda path: path.write_text('{"date": '), "a JSON object"),
    "a list": (lambda path: path.write_text("[1]"), "a JSON object"),
    "no sum": (lambda path: path.write_text("{}"), "a JSON object"),
    "deep": (lambda path: path.write_text("[" * 100_000), "a JSON object"),
    "a later version": (lambda path: rewritten(path, lambda c: c.update(schema_version=2)), "version 1"),
    "a further field": (lambda path: rewritten(path, lambda c: c.update(host="ada")), "version 1"),
    "a prediction without figures": (
        lambda path: rewritten(
            path, lambda c: c["cases"].update({"predicted/gan": {"status": "done", "seconds": 1.0, "figures": {}}})
        ),
        "version 1",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_damaged_file_is_refused(kind, tmp_path, capsys):
    make, words = BAD[kind]
    make(tmp_path / "other.json")
    assert_refused(lambda: evidence.read(tmp_path / "other.json"), FileFormatError, words)
    assert main(["gpu", "--show", str(tmp_path / "other.json")]) == command.REFUSED
    assert "Way out" in capsys.readouterr().err


@pytest.mark.slow
def test_a_card_is_added_to_the_docs(ran, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(evidence, "FOLDER", tmp_path / "gpu")
    monkeypatch.setattr(page, "PAGE", tmp_path / "page.md")
    page.PAGE.write_text("before\n<!-- gpu results -->\nold\n<!-- gpu results end -->\nafter\n")
    predictions = {name: each for name, each in evidence.read(ran / "virtual.json").cases.items() if "/" in name}
    small_evidence(cases=predictions).write(tmp_path / "sent.json")
    assert main(["gpu", "--add", str(tmp_path / "sent.json")]) == command.DONE
    text = page.PAGE.read_text()
    assert "| NVIDIA RTX 4060 |" in text
    assert "| gan |" in text
    assert "old" not in text
    assert text.startswith("before")
    assert text.endswith("after\n")
    (kept,) = evidence.FOLDER.glob("*.json")
    assert kept.name.startswith("nvidia-rtx-4060-torch-")
    capsys.readouterr()


@pytest.mark.slow
def test_a_virtual_file_is_not_added(ran, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(evidence, "FOLDER", tmp_path / "gpu")
    assert main(["gpu", "--add", str(ran / "virtual.json")]) == command.REFUSED
    assert "proves nothing" in capsys.readouterr().err
    assert not (tmp_path / "gpu").exists()


def test_page_matches_committed_files():
    before = page.PAGE.read_text()
    page.main()
    after = page.PAGE.read_text()
    page.PAGE.write_text(before)
    assert after == before


# ------------------------------------------------------------------------------------------------- what the cases hold


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp2", marks=TOGETHER)])
def test_ranks_end_with_the_losses_of_one_process(kind):
    found = train_both("cpu", width=16, kinds=[kind])[kind]
    assert found["largest_difference"] < 1e-5
    assert max(found["num_ooms"]) == 1


def test_every_training_fits_a_small_card():
    """Eight GB without what a desktop takes, and large enough that a wrong rule shows."""
    assert len(TRAININGS) >= 40
    for name in ("point net", "mobilenet", "3D unet"):  # the largest ones
        with mk.VirtualGPU(CARD) as gpu:
            TRAININGS[name].start()()
        assert 200 * MIB < gpu.peak_bytes < gpu.reserved_peak_bytes < 5 * 2**30, name


@pytest.mark.slow
def test_the_whole_command_runs_on_the_virtual_gpu(tmp_path):
    assert command.Run(tmp_path, CARD).cases(list(CASES), is_again=False) == command.DONE
    found = evidence.read(tmp_path / "virtual.json")
    assert found.cases.keys() == CASES.keys()
    for name, prediction in found.predictions().items():
        assert prediction.peak_bytes == prediction.measured_peak_bytes, name
        assert prediction.differing_operators == [], name
        assert prediction.allocations.num_same_address == prediction.allocations.num, name
    for row in found.cases["recovery"].figures.values():
        assert row["plain_ran_out"]
        assert row["num_ooms"] > 0
        assert row["reserved_bytes"] <= row["limit_bytes"]
