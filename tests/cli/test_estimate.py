"""The `memkit estimate` command, as typed in a shell."""

import json
import re
import textwrap
from dataclasses import replace

import pytest
import torch
from torch import nn

from memkit.cli import main
from memkit.predict.gpus import find_gpu, write_gpus
from memkit.predict.presets import get_preset_config
from memkit.predict.usage import estimate_memory_usage
from tests.cli.commands import assert_error, assert_wrong_usage, unfolded

SCRIPT = """
from dataclasses import dataclass

import torch
from torch import nn
from widths import WIDTH


@dataclass
class Options:
    width: int = WIDTH


def build():
    model = nn.Linear(Options().width, 10)
    return model, (torch.empty(64, WIDTH), torch.zeros(64, dtype=torch.long)), loss_fn, "sgd"


def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def as_dict():
    model, batch, loss, _ = build()
    return {"model": model, "sample_batch": batch, "loss_fn": loss}


def nothing():
    pass


def too_few():
    return build()[:2]


def too_many():
    return *build(), "fp16-mixed"


def misspelt():
    return {**as_dict(), "optimiser": "sgd"}


if __name__ == "__main__":
    raise SystemExit("trained")
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)  # put back afterwards, with what the command adds
    (tmp_path / "widths.py").write_text("WIDTH = 1000\n")
    path = tmp_path / "steps_of_a_user.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


def expected(**options):
    batch = torch.empty(64, 1000), torch.zeros(64, dtype=torch.long)

    def loss_fn(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    return estimate_memory_usage(nn.Linear(1000, 10), batch, loss_fn=loss_fn, **options)


def test_a_step_of_the_user_on_a_card(script, capsys):
    assert main(["estimate", f"{script}:build", "--gpu", "RTX 4090", "--precision", "fp16-mixed", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    estimate = expected(optimizer="sgd", target="RTX 4090", precision="fp16-mixed")
    assert record["peak_bytes"] == estimate.peak_bytes
    assert record["total_bytes"] == estimate.total_bytes
    assert record["fits"] is True
    assert record["headroom_bytes"] == estimate.headroom_bytes("RTX 4090")


def test_a_step_as_a_dict_on_the_cpu(script, capsys):
    assert main(["estimate", f"{script}:as_dict", "--accumulation-steps", "2"]) == 0
    out = capsys.readouterr().out
    headline, rest = out.split("\n\n", 1)
    assert headline.startswith("needs at most ")
    same = expected(accumulation_steps=2).explain().replace(__file__, str(script))
    texts = [re.sub(r":\d+ in ", ":LINE in ", unfolded(text)) for text in (rest, same)]
    assert texts[0] == texts[1]
    assert "fits" not in out


def test_oversized_step_exits_with_1(script, capsys):
    assert main(["estimate", f"{script}:build", "--budget", "1kB"]) == 1
    assert capsys.readouterr().out.startswith("does not fit into 1kB: it needs at least ")


def test_a_preset(capsys):
    assert main(["estimate", "medium", "--gpu", "RTX 4090", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["total_bytes"] == estimate_memory_usage(get_preset_config("medium")).total_bytes
    assert record["fits"]


@pytest.mark.parametrize(
    "option", [["--precision", "fp16-mixed"], ["--accumulation-steps", "2"], ["--selected-fraction", "1"]]
)
def test_a_preset_says_its_options_itself(capsys, option):
    assert_wrong_usage(capsys, ["estimate", "medium", *option], f"{option[0]} applies only to your own step")


def test_a_calibrated_card(script, tmp_path, capsys):
    own = replace(find_gpu("RTX 4090"), name="own card", total_interval=(2**30, 2**30), context_interval=(2**29, 2**29))
    write_gpus(tmp_path / "own.json", [own])
    options = ["--gpu", "own card", "--calibrated", str(tmp_path / "own.json"), "--json"]
    assert main(["estimate", f"{script}:build", *options]) == 0
    assert json.loads(capsys.readouterr().out)["context_bytes"] == 2**29
    assert main(["estimate", "medium", *options]) == 1  # a preset is held against it
    options[0] = "--budget"
    assert main(["estimate", "medium", *options]) == 1
    assert main(["estimate", f"{script}:build", *options]) == 0
    capsys.readouterr()
    for without in (options[2:], ["--budget", "24GiB", *options[2:]]):
        assert_wrong_usage(capsys, ["estimate", f"{script}:build", *without], "--calibrated needs a GPU")


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ("huge", "neither a preset nor FILE.py:FUNCTION"),
        ("train.py:build", "which does not exist in"),
        ("{script}:no_such", "a missing function"),
        ("{script}:nothing", "a function that returned NoneType"),
        ("{script}:too_few", "a function that returned tuple of 2"),
        ("{script}:too_many", "a function that returned tuple of 5"),
        ("{script}:misspelt", "a function that returned dict of 'model', 'sample_batch', 'loss_fn', 'optimiser'"),
    ],
)
def test_an_error_is_one_line_and_exit_code_2(script, capsys, step, message):
    assert_error(capsys, ["estimate", step.format(script=script)], "memkit: error: memkit estimate ", message)
