"""The `memkit gpus` command, as typed in a shell."""

import json

import pytest
import torch

from memkit.cli import main
from memkit.predict.gpus import all_gpus, find_gpu, write_gpus
from tests.cli.commands import assert_error, assert_wrong_usage, unfolded
from tests.helpers import assert_not_imported


def test_the_table(capsys):
    assert main(["gpus", "--all"]) == 0
    table, legend = capsys.readouterr().out.split("\n\n")
    assert [line.partition(":")[0] for line in legend.splitlines()] == ["observed", "derived"]
    header, *rows = table.splitlines()
    assert header.split()[-5:] == ["torch", "sees", "context", "usable", "confidence"]
    names = [gpu.name for gpu in all_gpus()]
    width = max(map(len, names))
    assert [row[:width].rstrip() for row in rows] == names
    row = next(row for row in rows if row.startswith("RTX 4090 "))
    assert row[width:].split() == ["24", "23.53", "0.50", "23.03", "observed"]


def test_all_by_size_on_one_screen(capsys):
    assert main(["gpus"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") < 60
    assert "*: derived from a related GPU" in out
    sizes = [int(line[:3]) for line in out.splitlines() if line[3:7] == " GB "]
    assert sizes == sorted({round(gpu.box_bytes / 2**30) for gpu in all_gpus()})
    text = " ".join(out.split())
    for gpu in all_gpus():
        assert f"{gpu.name} {gpu.usable_bytes / 2**30:.2f}{'*' if gpu.confidence == 'derived' else ''}" in text


def test_the_table_as_json(capsys):
    assert main(["gpus", "--json"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert records == [{**gpu.as_dict(), "usable": gpu.usable_bytes} for gpu in all_gpus()]


def test_one_card(capsys):
    assert main(["gpus", "nvidia rtx4090"]) == 0
    out = capsys.readouterr().out
    assert "23.53 to 23.99 GiB" in out
    assert "Comfy-Org/ComfyUI#7063" in out
    assert main(["gpus", "4090", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["usable"] == find_gpu("4090").usable_bytes


def test_lists_sufficient_cards_smallest_first(capsys):
    assert main(["gpus", "--need", "23.1GiB", "--json"]) == 0
    usable = [record["usable"] for record in json.loads(capsys.readouterr().out)]
    assert usable == sorted(usable)
    assert len(usable) == sum(gpu.usable_bytes >= 23.1 * 2**30 for gpu in all_gpus())
    assert main(["gpus", "--need", "2TiB"]) == 1
    assert capsys.readouterr().out == "no GPU in the table holds 2TiB: the largest, Apple 512GB, leaves 384.00 GiB\n"
    assert main(["gpus", "--need", "2TiB", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == []


def test_lists_first_sufficient_cards_and_mentions_the_rest(capsys):
    num = sum(gpu.usable_bytes >= 14 * 2**30 for gpu in all_gpus())
    for arguments, num_shown in (([], 12), (["--all"], num)):
        assert main(["gpus", "--need", "14GiB", *arguments]) == 0
        title, table, rest = capsys.readouterr().out.split("\n\n")
        assert title == f"{num} of 107 GPUs hold 14GiB, the smallest first"
        assert len(table.splitlines()) == 1 + num_shown
        assert (f"--all shows the other {num - 12} too" in rest) == (num_shown == 12)


def test_a_file_of_own_cards(capsys, tmp_path):
    write_gpus(tmp_path / "own.json", [find_gpu("RTX 4090")])
    assert main(["gpus", "4090", "--calibrated", str(tmp_path / "own.json")]) == 0
    capsys.readouterr()
    assert_error(capsys, ["gpus", "--calibrated", "none.json"], "with `memkit gpus --calibrate none.json`, or omit it.")


@pytest.mark.parametrize("arguments", [["A100"], ["--need", "14"], ["--need", "much"]])
def test_an_error_is_one_line_and_exit_code_2(capsys, arguments):
    assert_error(capsys, ["gpus", *arguments])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--calibrate", "own.json", "--need", "14GiB"], "omit --need and --calibrated"),
        (["--calibrate", "own.json", "--calibrated", "14GiB"], "omit --need and --calibrated"),
        (["RTX 4090", "--need", "14GiB"], "omit the name"),
    ],
)
def test_conflicting_options_are_wrong_usage(capsys, arguments, text):
    assert_wrong_usage(capsys, ["gpus", *arguments], text)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has one")
def test_calibration_without_a_card(capsys, tmp_path):
    assert main(["gpus", "--calibrate", str(tmp_path / "own.json")]) == 2
    assert "got 'cuda', the card of this machine, which has none" in unfolded(capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


def test_without_torch():
    assert_not_imported({"torch"}, "from memkit.cli import main; assert main(['gpus', '4090']) == 0")
