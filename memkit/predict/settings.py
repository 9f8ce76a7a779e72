"""Base class of all settings: frozen, validated with four-part errors, read from and written to files."""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Self, cast

from pydantic import BaseModel, ConfigDict, ValidationError

from memkit._core.errors import ConfigError, FileFormatError
from memkit._machine.files import write_text
from memkit._machine.regular_file import read_regular

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


class Settings(BaseModel):
    """A frozen object with strictly typed fields; each field's docstring is the rule that its errors quote.

    `replace` gives a changed, validated copy (pydantic's own ``model_copy(update=...)`` does not validate).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    if not TYPE_CHECKING:  # type checkers read the exact signature that pydantic generates

        def __init__(self, **data: Any) -> None:
            try:
                super().__init__(**data)
            except ValidationError as error:
                raise _config_error(type(self), error) from None

    def __setattr__(self, name: str, value: Any) -> None:
        raise ConfigError(
            f"config.{name} = {value!r}",
            got="an assignment to a field",
            expected="no assignment, because configs are immutable",
            fix=f"make a copy with the new value: config.replace({name}={value!r}).",
        )

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed, validated like a new config.

        Raises:
            ConfigError: A change is invalid.
        """
        shown = ", ".join(f"{name}={value!r}" for name, value in changes.items())
        return self.validated(f"{type(self).__name__}.replace({shown})", {**self.model_dump(), **changes})

    @classmethod
    def validated(cls, call: str, values: dict[str, Any]) -> Self:
        """Build a config for another entry point, with errors that name ``call``, the user's own call."""
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
            ConfigError: The suffix is not one of these, PyYAML is missing, or a value is invalid.
            FileFormatError: The file is not valid JSON, YAML or TOML, or holds something other than fields.
            OSError: The file cannot be read.

        Example:
            >>> import pathlib, tempfile
            >>> from memkit.predict import TrainingConfig
            >>> path = pathlib.Path(tempfile.mkdtemp(), "run.toml")
            >>> _ = path.write_text('batch_size = 2')
            >>> TrainingConfig.from_file(path).batch_size
            2
        """
        path = Path(path)
        call = f"{cls.__name__}.from_file({str(path)!r})"
        parse, _ = _format_of(path, call)
        data = read_regular(path, call)
        try:
            values = parse(data.decode())
        except Exception as error:  # ValueError or YAMLError from the parser, RecursionError from deep nesting
            raise _file_error(cls, call, path, f"text that does not parse ({error})") from error
        if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
            raise _file_error(
                cls, call, path, f"a {type(values).__name__} instead of a mapping from field names to values"
            )
        return cls.validated(call, values)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the config to a ``.json``, ``.yaml``, ``.yml`` or ``.toml`` file, whole or not at all.

        Reading the file back with `from_file` gives an equal config.

        Raises:
            ConfigError: The suffix is not one of these, or PyYAML is missing.
            OSError: The file cannot be written; an existing file is unchanged.
        """
        path = Path(path)
        _, render = _format_of(path, f"{type(self).__name__}.save({str(path)!r})")
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
                fix="use one of these suffixes, for example 'config.json'.",
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


def _file_error(settings: type[Settings], call: str, path: Path, got: str) -> FileFormatError:
    return FileFormatError(
        call,
        got=got,
        expected=f"{path.suffix} text with one value per field of {settings.__name__}",
        fix=f"write a valid file with {settings.__name__}(...).save(path) and edit that file.",
    )


def _config_error(settings: type[Settings], error: ValidationError) -> ConfigError:
    """Turn pydantic's findings on all fields into one four-part error."""
    details = error.errors(include_url=False)
    given = ", ".join(f"{_field(detail)}={detail['input']!r}" for detail in details)
    return ConfigError(
        f"{settings.__name__}({given})",
        got="; ".join(f"{_field(detail)}={detail['input']!r} ({type(detail['input']).__name__})" for detail in details),
        expected="; ".join(_rule(settings, detail) for detail in details),
        fix=" ".join(_way_out(settings, detail) for detail in details),
    )


def _field(detail: ErrorDetails) -> str:
    return str(detail["loc"][0])


def _rule(settings: type[Settings], detail: ErrorDetails) -> str:
    if detail["type"] == "extra_forbidden":
        return f"one of the fields {', '.join(settings.model_fields)}"
    return f"for {_field(detail)}: {settings.model_fields[_field(detail)].description}"


def _way_out(settings: type[Settings], detail: ErrorDetails) -> str:
    name = _field(detail)
    if detail["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, settings.model_fields, n=1)
        return f"did you mean {near[0]}?" if near else f"leave {name} out."
    return f"{detail['msg'].replace('Input', name)}."
