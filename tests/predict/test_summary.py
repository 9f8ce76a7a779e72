"""print_config_summary: what it says, and where."""

import io
import re

from memkit._core.errors import InputTypeError
from memkit._core.units import GIB
from memkit.predict.config import TrainingConfig
from memkit.predict.formula import estimate_by_formula
from memkit.predict.presets import get_preset_config
from memkit.predict.summary import print_config_summary
from tests.helpers import assert_refused


def rows(text):
    return {line[2:30].strip(): line[30:].strip() for line in text.splitlines() if line.startswith("  ")}


def test_every_setting_and_every_figure(capsys):
    config = get_preset_config("medium", 24)
    print_config_summary(config)
    table = rows(capsys.readouterr().out)
    for field, value in config:
        assert table[field] == str(value)
    assert table["effective_batch_size"] == "8"
    estimate = estimate_by_formula(config)
    assert table["peak of live tensors"] == f"{estimate.peak_bytes / GIB:.2f} GiB  in {estimate.peak_where}"
    assert table["total"] == f"{estimate.total_bytes / GIB:.2f} GiB"
    assert table["card of 24 GB"] == f"fits, {24 - estimate.total_bytes / GIB:.2f} GiB free"


def test_too_small_card():
    file = io.StringIO()
    config = TrainingConfig(gpu_memory_gb=4)
    print_config_summary(config, file=file)
    short = estimate_by_formula(config).total_bytes / GIB - 4
    assert rows(file.getvalue())["card of 4 GB"] == f"does not fit, {short:.2f} GiB short"


def test_unknown_is_left_out_and_sizes_are_gib_with_two_decimals(capsys):
    print_config_summary(TrainingConfig(), file=(file := io.StringIO()))
    text = file.getvalue()
    assert "gpu_memory_gb" not in text
    assert "None" not in text
    assert len(re.findall(r" \d+\.\d\d GiB", text)) == 11
    assert capsys.readouterr().out == ""


def test_rejects_non_config():
    assert_refused(lambda: print_config_summary({"batch_size": 2}), InputTypeError, "expected a TrainingConfig")
