"""Base class of all settings: frozen, validated with four-part errors, read from JSON files."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from memkit._core.errors import ConfigError, FileFormatError, of_call
from memkit._core.settings import Checker, nearest_word
from memkit._core.words import ForeignWords
from memkit._machine.regular_file import read_regular

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


class Settings(BaseModel):
    """A frozen object with strictly typed fields; each field's docstring is the rule that its errors quote.

    `replace` gives a changed, validated copy (pydantic's own ``model_copy(update=...)`` does not validate).
    """

    foreign_words: ClassVar[Mapping[str, str]] = {}
    """Other libraries' words, separated by spaces, by the field or the argument to write instead."""

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
            raise of_call(call, error) from None

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Self:
        """Read a config from a JSON file; ``config.model_dump_json()`` is the text of one.

        Args:
            path: The file. Fields that it does not name take their defaults.

        Raises:
            InputTypeError: ``path`` is not a path.
            ConfigError: A value is invalid.
            FileFormatError: The file is not valid JSON, or holds something other than fields.
            OSError: The file cannot be read.

        Example:
            >>> import pathlib, tempfile
            >>> from memkit.predict import TrainingConfig
            >>> path = pathlib.Path(tempfile.mkdtemp(), "run.json")
            >>> _ = path.write_text('{"batch_size": 2}')
            >>> TrainingConfig.from_file(path).batch_size
            2
        """
        call = f"{cls.__name__}.from_file({str(path)!r})"
        data = read_regular(Checker(f"{cls.__name__}.from_file").path("path", path), call)
        try:
            values = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise _file_error(cls, call, f"text that is not JSON ({error})") from error
        if not isinstance(values, dict):
            raise _file_error(cls, call, f"a {type(values).__name__} instead of a mapping from field names to values")
        return cls.validated(call, values)


def _file_error(settings: type[Settings], call: str, got: str) -> FileFormatError:
    return FileFormatError(
        call,
        got=got,
        expected=f"a JSON object with one value per field of {settings.__name__}",
        fix=f"write {settings.__name__}(...).model_dump_json() to a file, and edit that.",
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
    name, value = _field(detail), detail["input"]
    if detail["type"] == "extra_forbidden":
        word = ForeignWords(settings.foreign_words).meant_by(name, settings.model_fields)
        if not word:
            return f"write {settings.__name__}(...) without {name}."
        return f"write {word}={value!r}." if word in settings.model_fields else f"write {word}."
    meant = _meant(detail)
    return f"{detail['msg'].replace('Input', name)}." if meant is None else f"write {name}={meant!r}."


def _meant(detail: ErrorDetails) -> Any:
    """Return the value that was probably meant, or None."""
    kind, value, limits = detail["type"], detail["input"], detail.get("ctx", {})
    number = re.match(r"\s*-?\d+(?:\.\d+)?", value) if isinstance(value, str) else None
    if kind in ("int_type", "float_type"):
        meant = float(number[0]) if number else value
        if isinstance(meant, (int, float)) and not isinstance(meant, bool) and math.isfinite(meant):
            return round(meant) if kind == "int_type" or meant == int(meant) else meant
        return None
    if kind == "literal_error":
        known = re.findall(r"'([^']+)'", limits["expected"])
        begun = [each for each in known if isinstance(value, str) and value and each.startswith(value.lower())]
        return begun[0] if begun else nearest_word(str(value), known)
    if kind == "bool_type":
        return {"yes": True, "true": True, "1": True, "on": True}.get(str(value).lower(), False)
    if kind == "tuple_type":
        return (value,) if isinstance(value, (int, float)) else None
    if kind == "multiple_of":
        step = limits["multiple_of"]
        return max(step, step * round(value / step))
    return limits.get("ge") if kind == "greater_than_equal" else limits.get("meant")
