"""`Checker`: which values pass, and the error that names the argument, the rule and a value that passes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from memkit._core.errors import ConfigError, InputError, InputTypeError, MemkitError
from memkit._core.settings import ANY_WHOLE, Checker

CHECK = Checker("train(...)")


@dataclass(frozen=True)
class Options:
    size: int
    mode: str = "fast"


@pytest.mark.parametrize(
    ("check", "want"),
    [
        (lambda: CHECK.number("p", 1, 0, 1), 1.0),
        (lambda: CHECK.number("p", np.float32(0.5), above=0, below=1), 0.5),
        (lambda: CHECK.whole("steps", np.int64(3), 1), 3),
        (lambda: CHECK.flag("flip", True), True),
        (lambda: CHECK.flag("flip", np.bool_(False)), False),
        (lambda: CHECK.choice("mode", "fast", ("fast", "exact")), "fast"),
        (lambda: CHECK.choice("dtype", None, (None, torch.float32)), None),
        (lambda: CHECK.instance(torch.zeros(2).sum(), torch.Tensor, "a tensor", "pass one."), torch.tensor(0.0)),
        (lambda: CHECK.function("loss_fn", len), len),
        (lambda: CHECK.path("folder", "a"), Path("a")),
        (lambda: CHECK.items("sizes", [1, 2], 2), (1, 2)),
        (lambda: CHECK.series("sizes", range(2)), (0, 1)),
        (lambda: CHECK.triple("origin", (0, 1, 2)), (0.0, 1.0, 2.0)),
        (lambda: CHECK.record(Options, {"size": 3}), Options(3)),
    ],
)
def test_valid_values_come_back(check: Callable[[], Any], want: object) -> None:
    assert check() == want


REFUSALS: list[tuple[Callable[[], Any], type[MemkitError], str, str, str]] = [
    (lambda: CHECK.number("p", 1.5, 0, 1), ConfigError, "p=1.5", "a finite number from 0 to 1", "pass p=1."),
    (lambda: CHECK.number("p", 2, 0, 1), ConfigError, "p=2", "a finite number from 0 to 1", "pass p=1."),
    (lambda: CHECK.number("p", math.nan, 0, 1), ConfigError, "p=nan", "a finite number from 0 to 1", "pass p=0."),
    (lambda: CHECK.number("p", 0, above=0, below=1), ConfigError, "p=0", "above 0 and below 1", "pass p=0.5."),
    (lambda: CHECK.number("p", 1, 0, below=1, fix="try 0.2."), ConfigError, "p=1", "from 0 and below 1", "try 0.2."),
    (lambda: CHECK.number("p", True, 0), ConfigError, "p=True", "a finite number from 0", "pass p=0."),
    (lambda: CHECK.number("p", 10**400), ConfigError, "p=1000", "a finite number", "pass p=1."),
    (lambda: CHECK.whole("steps", 0, 1), ConfigError, "steps=0", "a whole number, 1 or more", "pass steps=1."),
    (lambda: CHECK.whole("steps", 2.5, 1), ConfigError, "steps=2.5", "a whole number, 1 or more", "pass steps=2."),
    (lambda: CHECK.whole("bits", 9, 1, 8), ConfigError, "bits=9", "a whole number from 1 to 8", "pass bits=8."),
    (lambda: CHECK.whole("label", "x", *ANY_WHOLE), ConfigError, "label='x'", "a whole number", "pass label=0."),
    (lambda: CHECK.flag("flip", 1), ConfigError, "flip=1", "True or False", "pass flip=True."),
    (lambda: CHECK.choice("mode", "fats", ("fast",)), ConfigError, "mode='fats'", "'fast'", "pass mode='fast'."),
    (lambda: CHECK.choice("p", "bf16", ("bf16-mixed", "bf16-true"), fix="which?"), ConfigError, "p=", "one", "which?"),
    (lambda: CHECK.choice("n", True, (1, 2), fix="leave it out."), ConfigError, "n=True", "1, 2", "leave it out."),
    (
        lambda: CHECK.choice("mode", torch.zeros(2), ("a", "b")),
        ConfigError,
        "mode=tensor",
        "'a', 'b'",
        "pass mode='a'.",
    ),
    (lambda: CHECK.instance(3, str, "text", "pass text."), InputTypeError, "a int", "text", "pass text."),
    (lambda: CHECK.function("loss_fn", 3), InputTypeError, "a int", "a function", "not its result loss_fn()."),
    (lambda: CHECK.path("folder", 3), InputTypeError, "a int", "a path", "pass folder='path/to/it'."),
    (lambda: CHECK.items("sizes", 3), ConfigError, "sizes=3", "a list", "pass sizes=[...]."),
    (lambda: CHECK.items("sizes", [3], 2), ConfigError, "sizes=[3]", "a list of 2", "with 2 entries."),
    (lambda: CHECK.series("sizes", {3}), ConfigError, "sizes={3}", "a list", "pass sizes=[...]."),
    (lambda: CHECK.record(Options, {"sise": 3}), ConfigError, "the key 'sise'", "size, mode", "write 'size'."),
    (lambda: CHECK.record(Options, {}), ConfigError, "size=None", "no default", "add 'size' to the dict."),
    (lambda: CHECK.record(Options, 3), ConfigError, "Options=3", "a mapping", "of Options as a dict."),
    (lambda: Checker("read(x)", InputError).whole("n", "x" * 99), InputError, "x...", "0 or more", "pass n=0."),
]


@pytest.mark.parametrize(("check", "kind", "got", "expected", "fix"), REFUSALS)
def test_refusals_name_argument_rule_and_fix(
    check: Callable[[], Any], kind: type[MemkitError], got: str, expected: str, fix: str
) -> None:
    with pytest.raises(kind) as caught:
        check()
    assert type(caught.value) is kind
    assert got in caught.value.got
    assert expected in caught.value.expected
    assert caught.value.fix.endswith(fix)
