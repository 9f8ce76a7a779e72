"""Validation of settings and records: one typed error that names the key."""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
import operator
import os
from collections.abc import Collection, Iterable, Mapping, Set
from pathlib import Path
from typing import Any, TypeVar

from memkit._core.errors import ConfigError, FileFormatError, InputTypeError, MemkitError

T = TypeVar("T")
LARGEST_WHOLE = 2**63 - 1
ANY_WHOLE = (-LARGEST_WHOLE, LARGEST_WHOLE)  # the ends, for `Checker.whole`


class Checker:
    """Validate the arguments of one call.

    Args:
        call: The user's call, for messages.
        error: Exception type to raise: `ConfigError` for settings, `InputError` for records.
    """

    def __init__(self, call: str, error: type[MemkitError] = ConfigError) -> None:
        self.call = call
        self._error = error

    def refusal(self, name: str, value: object, expected: str, *, fix: str) -> MemkitError:
        """Return an error that names the argument, for the caller to raise."""
        shown = repr(value)
        return self._error(
            self.call,
            got=f"{name}={shown if len(shown) <= 80 else shown[:77] + '...'}",
            expected=expected,
            fix=fix,
        )

    def number(
        self,
        name: str,
        value: Any,
        low: float = -math.inf,
        high: float = math.inf,
        *,
        above: float = -math.inf,
        below: float = math.inf,
        fix: str | None = None,
    ) -> float:
        """Return a finite number from ``low`` to ``high``, greater than ``above`` and less than ``below``."""
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        try:
            found = float(value) if is_number else math.nan
        except OverflowError:
            found = math.nan
        if not (math.isfinite(found) and low <= found <= high and above < found < below):
            most = "to" if math.isfinite(low) else "and at most" if math.isfinite(above) else "of at most"
            least = "and below" if math.isfinite(max(low, above)) else "below"
            ends = (("from", low), ("above", above), (most, high), (least, below))
            rule = " ".join(f"{word} {end:g}" for word, end in ends if math.isfinite(end))
            meant = _number_in(value) if isinstance(value, str) else found
            nearest = meant if low <= meant <= high and above < meant < below else high if meant > high else low
            if (max(low, above), high) == (0, 1) and 5 <= found <= 100:
                nearest = found / 100  # a percentage
            suggested = (
                f"pass {name}={nearest if math.isfinite(nearest) else _example(max(low, above), min(high, below)):g}."
            )
            raise self.refusal(name, value, f"a finite number {rule}".rstrip(), fix=fix or suggested)
        return found

    def whole(self, name: str, value: Any, low: int = 0, high: int = LARGEST_WHOLE, *, fix: str | None = None) -> int:
        """Return an integer from ``low`` to ``high``."""
        found = as_whole(value)
        if found is None or not low <= found <= high:
            rule = f", {low} or more" if high == LARGEST_WHOLE else f" from {low} to {high}"
            rule = "" if (low, high) == ANY_WHOLE else rule
            fix = fix or f"pass {name}={_nearest_whole(value, low, high)}."
            raise self.refusal(name, value, f"a whole number{rule}", fix=fix)
        return found

    def flag(self, name: str, value: Any) -> bool:
        """Return a bool, also for NumPy's."""
        kind = type(value)
        if kind is not bool and (kind.__module__, kind.__name__) != ("numpy", "bool"):  # NumPy may not be loaded
            meant = str(value).lower() in ("yes", "true", "on", "1", "y")
            raise self.refusal(name, value, "True or False", fix=f"pass {name}={meant}.")
        return bool(value)

    def choice(self, name: str, value: Any, known: Collection[T], *, fix: str | None = None) -> T:
        """Return one of the known values; for a misspelled word, the error suggests the closest one."""
        for each in known:
            if (type(value) is type(each) or isinstance(value, str)) and value == each:
                return each
        words = [each for each in known if isinstance(each, str)]
        meant = nearest_word(value, words) if isinstance(value, str) else None
        is_open = isinstance(value, str) and sum(word.startswith(value) for word in words) > 1
        suggested = f"pass {name}={meant!r}." if meant and not is_open else fix or f"pass {name}={next(iter(known))!r}."
        raise self.refusal(name, value, "one of " + ", ".join(map(repr, known)), fix=suggested)

    def instance(self, value: Any, kind: type[T], expected: str, fix: str) -> T:
        """Return an object of the type, or of a subclass.

        Raises:
            InputTypeError: It is of another type.
        """
        if not isinstance(value, kind):
            raise InputTypeError(self.call, got=f"a {type(value).__name__}", expected=expected, fix=fix)
        return value

    def function(self, name: str, value: T) -> T:
        """Return a function.

        Raises:
            InputTypeError: It cannot be called.
        """
        if not callable(value):
            raise InputTypeError(
                f"{self.call}({name}=...)",
                got=f"a {type(value).__name__}",
                expected="a function",
                fix=f"pass the function itself, not its result {name}().",
            )
        return value

    def path(self, name: str, value: Any) -> Path:
        """Return a path.

        Raises:
            InputTypeError: It is neither text nor a path.
        """
        if not isinstance(value, str | os.PathLike):
            raise InputTypeError(
                f"{self.call}({name}=...)",
                got=f"a {type(value).__name__}",
                expected="a path",
                fix=f"pass {name}='path/to/it'.",
            )
        return Path(value)

    def items(self, name: str, value: Any, length: int | None = None) -> tuple[Any, ...]:
        """Return a list or tuple as a tuple, of the given length if any."""
        if not isinstance(value, (list, tuple)) or length not in (None, len(value)):
            rule = "a list" if length is None else f"a list of {length}"
            raise self.refusal(
                name, value, rule, fix=f"pass {name}=[...]{'' if length is None else f' with {length} entries'}."
            )
        return tuple(value)

    def series(self, name: str, value: Any, length: int | None = None) -> tuple[Any, ...]:
        """Return the items of a list or another ordered iterable, such as an array or a range."""
        is_series = isinstance(value, Iterable) and not isinstance(value, (str, bytes, Set, Mapping))
        has_items = is_series and getattr(value, "ndim", 1) > 0
        return self.items(name, tuple(value) if has_items else value, length)

    def triple(self, name: str, value: Any) -> tuple[float, float, float]:
        """Return three numbers."""
        x, y, z = (self.number(name, each) for each in self.items(name, value, 3))
        return x, y, z

    def record(self, cls: type[T], value: Any) -> T:
        """Build a dataclass from a mapping; its keys are checked here, its values by the class."""
        if not isinstance(value, Mapping):
            raise self.refusal(
                cls.__name__,
                value,
                "a mapping from names to values",
                fix=f"pass the keywords of {cls.__name__} as a dict.",
            )
        fields = [each for each in dataclasses.fields(cls) if each.init]  # type: ignore[arg-type] # a dataclass
        known = [each.name for each in fields]
        for key in value:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, 1)
                raise self._error(
                    self.call,
                    got=f"the key {repr(key)[:40]}",
                    expected=f"keys of {cls.__name__}: {', '.join(known)}",
                    fix=f"write {near[0]!r}." if near else "leave it out.",
                )
        for each in fields:
            is_needed = each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING
            if is_needed and each.name not in value:
                raise self.refusal(
                    each.name, None, "a value, because it has no default", fix=f"add {each.name!r} to the dict."
                )
        return cls(**value)


def nearest_word(value: str, words: Iterable[str]) -> str | None:
    """Return the word that was probably meant, in any case; None if no word is close."""
    by_lower = {word.lower(): word for word in words}
    near = difflib.get_close_matches(value.lower(), by_lower, 1)
    return by_lower[near[0]] if near else None


def _number_in(text: str) -> float:
    """Return the number that a text contains; nan if it is not a number."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _example(low: float, high: float) -> float:
    """Return a number between two ends, either of which may be infinite."""
    if math.isfinite(low) and math.isfinite(high):
        return (low + high) / 2
    return low + 1 if math.isfinite(low) else high - 1 if math.isfinite(high) else 1.0


def _nearest_whole(value: Any, low: int, high: int) -> int:
    """Return the whole number in the range that the user probably meant."""
    try:
        return max(low, 0) if isinstance(value, bool) else min(max(int(float(value)), low), high)
    except (TypeError, ValueError, OverflowError):
        return max(low, 0)


def check_version(call: str, state: object, *known: int) -> None:
    """Refuse a saved state that this memkit cannot read.

    Raises:
        FileFormatError: It has another version, or none.
    """
    version = state.get("version") if isinstance(state, Mapping) else None
    if type(version) is not int or version not in known:  # a tensor would not compare
        raise FileFormatError(
            call,
            got=f"version {version!r}" if isinstance(state, Mapping) else f"a {type(state).__name__}",
            expected=f"version {' or '.join(map(str, known))}",
            fix=_way_to_a_state(state),
        )


def _way_to_a_state(state: object) -> str:
    if isinstance(state, Mapping):
        return "load the state with the version of memkit that saved it."
    if isinstance(state, str | os.PathLike):
        return f"load the file first: state = torch.load({os.fspath(state)!r})."
    return "pass the mapping that state_dict() returned."


def as_whole(value: Any) -> int | None:
    """Return an integer of any type, such as NumPy's, as an int; None for anything else, including a bool."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None
