"""The settings of a training run as one frozen, validated value that reads and writes JSON, YAML and TOML."""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, Self, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from memkit._atomic import write_text
from memkit._errors import ConfigError, FileFormatError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

Precision = Literal["fp32", "bf16-mixed", "fp16-mixed"]
OptimizerName = Literal["adamw", "sgd"]


class TrainingConfig(BaseModel):
    """Settings of a latent-diffusion run on voxel volumes (a 3D VAE and a U-Net, trained together).

    Frozen: `replace` gives a changed, validated copy (pydantic's own ``model_copy(update=...)`` does not validate).
    Types are strict: the text ``"2"`` is not the number 2. Each field moves the memory of a step; see
    `memkit.estimate_memory_usage`.

    Raises:
        ConfigError: A field is unknown, has the wrong type, or is out of range.

    Example:
        >>> from memkit import TrainingConfig
        >>> config = TrainingConfig(batch_size=2, gradient_accumulation_steps=4)
        >>> config.effective_batch_size
        8
        >>> config.replace(checkpointing=True).checkpointing
        True
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    preset: Literal["low", "medium", "high", "custom"] = "custom"
    """the preset that the values started from: 'low', 'medium', 'high', or 'custom' for none"""
    gpu_memory_gb: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """the number on the graphics card's box (GiB), a positive finite number, or None when not known"""
    batch_size: int = Field(default=1, ge=1)
    """samples in one forward and backward pass (the micro-batch), 1 or more"""
    gradient_accumulation_steps: int = Field(default=1, ge=1)
    """micro-batches per optimizer step, 1 or more"""
    model_channels: int = Field(default=48, ge=8, multiple_of=8)
    """width of the U-Net's first level, a multiple of 8; the next levels have 2 and 4 times as many"""
    vae_channels: int = Field(default=32, ge=8, multiple_of=8)
    """width of the VAE at full resolution, a multiple of 8; the next levels have 2 and 4 times as many"""
    resolution: int = Field(default=128, ge=32, multiple_of=32)
    """voxels along each edge of the cubic volume, a multiple of 32"""
    precision: Precision = "bf16-mixed"
    """'fp32', 'bf16-mixed' or 'fp16-mixed'; mixed keeps parameters, gradients and optimizer state in float32"""
    checkpointing: bool = False
    """True computes the inside of each residual block again in the backward pass instead of keeping it"""
    optimizer: OptimizerName = "adamw"
    """'adamw' (two float32 numbers per parameter) or 'sgd' (momentum, one number)"""

    if not TYPE_CHECKING:  # type checkers read the exact signature that pydantic generates

        def __init__(self, **data: Any) -> None:
            try:
                super().__init__(**data)
            except ValidationError as error:
                raise _config_error(error) from None

    def __setattr__(self, name: str, value: Any) -> None:
        raise ConfigError(
            f"config.{name} = {value!r}",
            got="an assignment",
            expected="a config that never changes",
            fix=f"make a changed copy: config.replace({name}={value!r}).",
        )

    @property
    def effective_batch_size(self) -> int:
        """Samples per optimizer step: ``batch_size * gradient_accumulation_steps``."""
        return self.batch_size * self.gradient_accumulation_steps

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed, validated like a new config.

        Raises:
            ConfigError: A change is not valid.
        """
        shown = ", ".join(f"{name}={value!r}" for name, value in changes.items())
        return self.validated(f"TrainingConfig.replace({shown})", {**self.model_dump(), **changes})

    @classmethod
    def validated(cls, call: str, values: dict[str, Any]) -> Self:
        """Build a config for another entry point, whose errors name ``call``, what the user wrote."""
        try:
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(call, got=error.got, expected=error.expected, fix=error.fix) from None

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Self:
        """Read a config from a ``.json``, ``.yaml``, ``.yml`` or ``.toml`` file.

        Args:
            path: The file. Fields that it does not name take their defaults.

        Raises:
            ConfigError: The suffix is not one of these, PyYAML is missing, or a value is not valid.
            FileFormatError: The file is not valid JSON, YAML or TOML, or holds something else than fields.
            OSError: The file cannot be read.

        Example:
            >>> import pathlib, tempfile
            >>> from memkit import TrainingConfig
            >>> path = pathlib.Path(tempfile.mkdtemp(), "run.toml")
            >>> _ = path.write_text('batch_size = 2')
            >>> TrainingConfig.from_file(path).batch_size
            2
        """
        path = Path(path)
        call = f"TrainingConfig.from_file({str(path)!r})"
        parse, _ = _format_of(path, call)
        data = path.read_bytes()
        try:
            values = parse(data.decode())
        except Exception as error:  # ValueError or YAMLError from the parser, RecursionError from deep nesting
            raise _file_error(call, path, f"text that does not parse ({error})") from error
        if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
            raise _file_error(call, path, f"a {type(values).__name__} that does not map field names to values")
        return cls.validated(call, values)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the config to a ``.json``, ``.yaml``, ``.yml`` or ``.toml`` file, whole or not at all.

        Reading the file back with `from_file` gives an equal config.

        Raises:
            ConfigError: The suffix is not one of these, or PyYAML is missing.
            OSError: The file cannot be written; an older file stays as it was.
        """
        path = Path(path)
        _, render = _format_of(path, f"TrainingConfig.save({str(path)!r})")
        write_text(path, render(self.model_dump()))


_Parse = Callable[[str], object]
_Render = Callable[[dict[str, Any]], str]


def _format_of(path: Path, call: str) -> tuple[_Parse, _Render]:
    """Return the reader and the writer for the file's suffix."""
    match path.suffix.lower():
        case ".json":
            return json.loads, _to_json
        case ".toml":
            return tomllib.loads, _to_toml
        case ".yaml" | ".yml":
            yaml = _import_yaml(call)
            return yaml.safe_load, lambda values: cast(str, yaml.safe_dump(values, sort_keys=False))
        case suffix:
            raise ConfigError(
                call,
                got=f"the suffix {suffix!r}",
                expected="a file named *.json, *.yaml, *.yml or *.toml",
                fix="name the file after the format that you want.",
            )


def _to_json(values: dict[str, Any]) -> str:
    return json.dumps(values, indent=2) + "\n"


def _to_toml(values: dict[str, Any]) -> str:
    # JSON writes flat text, numbers and booleans just as TOML does. TOML has no null: a field left out is its default.
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items() if value is not None)


def _import_yaml(call: str) -> ModuleType:
    try:
        import yaml
    except ImportError as error:
        raise ConfigError(
            call,
            got="a YAML file, but PyYAML is not installed",
            expected="PyYAML for .yaml and .yml files",
            fix="run `pip install memkit[yaml]`, or use .json or .toml.",
        ) from error
    return yaml


def _file_error(call: str, path: Path, got: str) -> FileFormatError:
    return FileFormatError(
        call,
        got=got,
        expected=f"{path.suffix} text that holds one value per field of TrainingConfig",
        fix="write a valid file with TrainingConfig(...).save(path) and edit that.",
    )


def _config_error(error: ValidationError) -> ConfigError:
    """Say in four parts what pydantic found, for all fields at once."""
    details = error.errors(include_url=False)
    given = ", ".join(f"{_field(detail)}={detail['input']!r}" for detail in details)
    return ConfigError(
        f"TrainingConfig({given})",
        got="; ".join(f"{_field(detail)}={detail['input']!r} ({type(detail['input']).__name__})" for detail in details),
        expected="; ".join(_rule(detail) for detail in details),
        fix=" ".join(_way_out(detail) for detail in details),
    )


def _field(detail: ErrorDetails) -> str:
    return str(detail["loc"][0])


def _rule(detail: ErrorDetails) -> str:
    if detail["type"] == "extra_forbidden":
        return f"one of the fields {', '.join(TrainingConfig.model_fields)}"
    return f"for {_field(detail)}: {TrainingConfig.model_fields[_field(detail)].description}"


def _way_out(detail: ErrorDetails) -> str:
    name = _field(detail)
    if detail["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, TrainingConfig.model_fields, n=1)
        return f"did you mean {near[0]}?" if near else f"leave {name} out."
    return f"{detail['msg'].replace('Input', name)}."
