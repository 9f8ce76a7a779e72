"""TrainingConfig: strict types, four-part errors, and a round trip through a file."""

import json
import pickle

import pytest
from hypothesis import given, strategies as st
from pydantic import ValidationError

from memkit._core.errors import ConfigError, FileFormatError, InputTypeError
from memkit.predict.config import TrainingConfig
from tests.helpers import assert_refused

configs = st.builds(
    TrainingConfig,
    preset=st.sampled_from(["low", "medium", "high", "custom"]),
    gpu_memory_gb=st.none() | st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    batch_size=st.integers(1, 10**12),
    gradient_accumulation_steps=st.integers(1, 10**6),
    model_channels=st.integers(1, 10**4).map(lambda n: 8 * n),
    vae_channels=st.integers(1, 10**4).map(lambda n: 8 * n),
    resolution=st.integers(1, 100).map(lambda n: 32 * n),
    precision=st.sampled_from(["fp32", "bf16-mixed", "fp16-mixed"]),
    checkpointing=st.booleans(),
    optimizer=st.sampled_from(["adamw", "sgd"]),
)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("batch_size", "2"),
        ("batch_size", 2.0),
        ("batch_size", True),
        ("batch_size", 0),
        ("gradient_accumulation_steps", -1),
        ("model_channels", 50),
        ("resolution", 100),
        ("gpu_memory_gb", float("nan")),
        ("gpu_memory_gb", float("inf")),
        ("gpu_memory_gb", -8),
        ("gpu_memory_gb", 0),
        ("gpu_memory_gb", "24"),
        ("gpu_memory_gb", True),
        ("precision", "bf16"),
        ("checkpointing", 1),
        ("checkpointing", "false"),
        ("optimizer", None),
    ],
)
def test_config_error_names_invalid_value(field, value):
    error = assert_refused(lambda: TrainingConfig(**{field: value}), ConfigError)
    assert error.call == f"TrainingConfig({field}={value!r})"
    assert error.got == f"{field}={value!r} ({type(value).__name__})"
    assert error.expected == f"for {field}: {TrainingConfig.model_fields[field].description}"
    assert field in error.fix or "should" in error.fix


def test_an_unknown_field_suggests_the_known_one():
    words = "batch_siz=2 (int); expected one of the fields preset, ", "write batch_size=2"
    assert_refused(lambda: TrainingConfig(batch_siz=2), ConfigError, *words)
    assert_refused(lambda: TrainingConfig(zzz=2), ConfigError, "Way out: write TrainingConfig(...) without zzz.")


def test_reports_all_faults_at_once():
    words = "batch_size=0 (int); resolution='big' (str)"
    assert_refused(lambda: TrainingConfig(batch_size=0, resolution="big"), ConfigError, words)


def test_pydantic_entry_points_raise_pydantic_error_with_our_text():
    for build in (TrainingConfig.model_validate, lambda data: TrainingConfig.model_validate_json(json.dumps(data))):
        with pytest.raises(
            ValidationError, match=r"TrainingConfig\(batch_size='2'\): got .* Way out: write batch_size=2"
        ):
            build({"batch_size": "2"})


def test_is_frozen_and_suggests_replace():
    config = TrainingConfig(batch_size=2)
    with pytest.raises(ConfigError, match=r"config\.replace\(batch_size=4\)"):
        config.batch_size = 4
    assert config.replace(batch_size=4) == TrainingConfig(batch_size=4)
    assert config.batch_size == 2
    assert hash(config) == hash(TrainingConfig(batch_size=2))


def test_replace_names_the_call():
    assert_refused(
        lambda: TrainingConfig().replace(batch_size=0), ConfigError, "TrainingConfig.replace(batch_size=0): "
    )


def test_effective_batch_size():
    assert TrainingConfig(batch_size=3, gradient_accumulation_steps=5).effective_batch_size == 15


def test_round_trip_through_files(tmp_path_factory):
    path = tmp_path_factory.mktemp("round") / "run.json"

    @given(configs)
    def check(config):
        path.write_text(config.model_dump_json())
        read = TrainingConfig.from_file(path)
        assert read == config
        assert {name: type(value) for name, value in read} == {name: type(value) for name, value in config}

    check()


@given(configs)
def test_round_trip_through_pickle(config):
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_file_may_leave_fields_out(tmp_path):
    path = tmp_path / "run.json"
    path.write_text('{"gpu_memory_gb": 24}')
    assert TrainingConfig.from_file(str(path)) == TrainingConfig(gpu_memory_gb=24.0)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[1, 2]", b"\xff\xfe", b"[" * 100_000, b"batch_size = 2"],
)
def test_rejects_file_without_config(tmp_path, content):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    error = assert_refused(lambda: TrainingConfig.from_file(path), FileFormatError)
    assert error.call == f"TrainingConfig.from_file({str(path)!r})"
    assert "model_dump_json()" in error.fix


def test_a_wrong_value_in_a_file_names_the_file(tmp_path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"gpu_memory_gb": float("nan")}))
    error = assert_refused(lambda: TrainingConfig.from_file(path), ConfigError)
    assert error.call == f"TrainingConfig.from_file({str(path)!r})"
    assert error.got == "gpu_memory_gb=nan (float)"


def test_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        TrainingConfig.from_file(tmp_path / "run.json")


def test_a_path_that_is_no_file(tmp_path):
    assert assert_refused(lambda: TrainingConfig.from_file(tmp_path), FileFormatError).got == "a folder"
    error = assert_refused(lambda: TrainingConfig.from_file(None), InputTypeError)
    assert error.call == "TrainingConfig.from_file(path=...)"
