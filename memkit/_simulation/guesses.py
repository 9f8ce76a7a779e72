"""Numbers that code reads from tensors without data: the answers it gets, and whether they matter.

The methods by which code reads them are at the end, as `READING`.

A tensor without data answers with 1, or False. The answer is a number that knows it is a guess: arithmetic with it
makes more guesses, conversion to text counts only where the text decides something, and a comparison, a condition or a
conversion that loses this knowledge is noted with its line. So is a number that passes into code where it cannot be
followed, unless the source shows that it becomes text or a sum.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any, Self

import numpy as np
import torch

from memkit._core.printable import counted
from memkit._core.units import format_bytes
from memkit._recorder.recorder import StepPosition
from memkit._simulation.uses import Site, Use, is_caught, operation_of, site_of
from memkit._torch.dispatch import no_dispatch
from memkit._torch.fake import FakeTensor
from memkit._torch.files import ADAFACTOR, WRAPPERS

READ = "aten._local_scalar_dense.default"  # the operator behind `Tensor.item`
_COMPARING_TENSORS = frozenset({"aten.allclose.default", "aten.equal.default"})
KNOWN = "known_value"  # an attribute of tensors whose numbers are all the same, and known
_COMPARING = ("COMPARE_OP", "CONTAINS_OP")
_INDEXING = ("BINARY_SUBSCR", "STORE_SUBSCR", "BINARY_OP")  # the last one since Python 3.14, and for arithmetic
_SEARCHING = ("BINARY", "STORE", "DELETE", "LOAD", "BUILD", "MAP", "LIST", "SET")  # dictionaries and sets compare keys
_TORCH, _MEMKIT = Path(torch.__file__).parent, Path(__file__).parents[1]
_FILLING = str(_TORCH / "nn" / "init.py")  # fills weights with random numbers
_SCALING = str(_TORCH / ADAFACTOR)  # scales updates by the larger of two numbers: no size and no operator depends on it
_ASSERTING = str(_TORCH / "testing")  # raises an error where numbers differ
_SIZING = tuple(str(_MEMKIT / name) for name in ("points", "voxel"))  # as many cells as the values say
# Files whose frames are between the code that reads a number and the answer.
_BETWEEN = (
    *(str(_TORCH / name) for name in WRAPPERS),
    str(Path(__file__).parent),
    str(_MEMKIT / "_recorder"),
)


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers of a tensor without data.

    Attributes:
        whole: Answer as an integer.
        real: Answer as a floating point number.
        truth: Answer as a truth value.
        is_contrary: Whether comparisons with answered numbers give the opposite result.
    """

    whole: int = 1
    real: float = 1.0
    truth: bool = False
    is_contrary: bool = False


PLAIN = Answers()
CONTRARY = Answers(truth=True, is_contrary=True)
OTHER, LARGE, SMALL = Answers(whole=2, real=0.5), Answers(whole=1000, real=1e6), Answers(whole=0, real=1e-6)


class Guesses(Counter[str]):
    """Counts of answers without data for each ``"operator at line"``, and the uses of these answers.

    Attributes:
        answers: The answers to give.
        branches: Lines that branch on an answer: a different answer might take the other branch.
        numbers: Lines whose number passes into code where it cannot be followed: it may become a size.
        assumptions: Lines that raise an error unless the answer is the given one.
        uncounted: Lines that run something else than what is counted: compiled code, code inside of an operator, other
            chunks.
        num_true: How often a value was read that a tensor does have: it needed no guess.
        place: The line of ``x[place]`` whose place was answered, and where the selection is still to come.
        selected_fraction: The share that a mask was assumed to select; None if no size depends on such a share.
    """

    def __init__(self, answers: Answers = PLAIN) -> None:
        super().__init__()
        self.answers = answers
        self.branches: dict[str, None] = {}
        self.numbers: dict[str, None] = {}
        self.assumptions: dict[str, None] = {}
        self.num_true = 0
        self.uncounted: dict[str, None] = {}
        self.place: str | None = None
        self.selected_fraction: float | None = None
        self._drawn: set[str] = set()  # lines whose numbers are random

    @property
    def doubts(self) -> tuple[str, ...]:
        """Why the memory of the step is not known; empty if it is."""
        return (*self.branches, *self.numbers, *self.uncounted)

    def note(self, name: str) -> str:
        """Count an answer and return the line that read it."""
        line = str(StepPosition().place().line)
        self[f"{name} at {line}"] += 1
        return line

    def runs_compiled(self) -> None:
        """Note that compiled code is called here."""
        line = StepPosition().place().line
        made = "what torch.compile makes of it may take more or less"
        self.uncounted[f"{line} calls compiled code, counted as it is written: {made}"] = None

    def cuts_rows(self, chunk_size: int) -> None:
        """Note that the size of chunks was chosen by what trials without data take."""
        line = StepPosition().place().line
        way_out = f"call it once with data before, or pass chunk_size={chunk_size}"
        self.uncounted[f"{line} measures chunks without data, and may cut others with data: {way_out}"] = None

    def counts_as_full(self, what: str) -> None:
        """Note that how full a volume is decides what runs, and that the whole volume is counted."""
        line = StepPosition().place().line
        self.uncounted[
            f"{line} runs {what}, of which the whole volume is counted: how full it is is not known without data. "
            "Measure a step under mk.Tracker"
        ] = None

    def looks_on_zeros(self, module: str) -> None:
        """Note that what parts of a volume read was found with zeros in place of a module's buffers of indices."""
        line = StepPosition().place().line
        self.uncounted[
            f"{line} cuts a volume for a {module} with buffers of integers, which have no data: parts may be larger or "
            "smaller with data. Call it once with data before"
        ] = None

    def trains_others(self, parameters: Sequence[torch.Tensor]) -> None:
        """Note parameters that the loss trains and that are not the model's: they may have an optimizer, too."""
        what, size = counted(len(parameters), "parameter"), format_bytes(sum(each.nbytes for each in parameters))
        self.uncounted[
            f"the loss trains {what} outside of the model ({size}), which an optimizer by name, class or function does "
            "not have: pass the step's own optimizer, or a list of them"
        ] = None

    def trains_unfound(self, tensor: torch.Tensor) -> None:
        """Note a trained tensor that the loss reads where it has no stand-in, unlike its optimizer."""
        line = StepPosition().place().line
        self.uncounted[
            f"{line} reads a trained tensor of shape {tuple(tensor.shape)} through a class, a module or another object "
            "in which it is not found, so that its gradient and its optimizer's state are not counted as they are: let "
            "the loss function name it (codes = config.codes outside, and codes inside of it)"
        ] = None

    def runs_whole(self, operator: object) -> None:
        """Note that an operator runs code that it is given, such as flex_attention's scores."""
        line = StepPosition().place().line
        self.uncounted[f"{line} calls {operator}, of which the results are counted, not what it takes inside"] = None

    # ---------------------------------------------------------------------------------------------- answers

    def number(self, dtype: torch.dtype) -> Any:
        """Answer with a number that can be followed."""
        if dtype is torch.bool:
            return self.truth()
        if dtype.is_complex:
            return self.plain(dtype, complex)
        line = self.note(READ)
        if dtype.is_floating_point:
            if _site().is_lost:
                self.converted(line, None)
            return GuessedFloat(self.answers.real).of(self, line)
        self.is_whole(line)
        return GuessedInt(self.answers.whole).of(self, line)

    def truth(self) -> bool:
        """Answer whether something is true."""
        if _frame().f_code.co_filename == _FILLING:
            return False  # `trunc_normal_` asks whether a number is out of bounds and has to be drawn again
        return self._branched(_site(), self.note(READ), natural=False, contrary=self.answers.truth)

    def drawn(self, name: str, value: Any) -> Any:
        """Follow a random number; what else was chosen at random may be of any size."""
        line = self.note(name)
        self._drawn.add(line)
        if type(value) not in _KINDS:
            self._note_branch(line)
            return value
        if type(value) is int:
            self.is_whole(line)
        elif _site().is_lost:
            self.converted(line, None)
        return _KINDS[type(value)](value).of(self, line)

    def unseen(self, source: str) -> None:
        """Note a source of random numbers that cannot be followed."""
        self[f"draws from {source}"] = 1
        self.numbers[f"the step draws from {source}, whose numbers memkit cannot follow"] = None

    def plain(self, dtype: torch.dtype, kind: type) -> Any:
        """Answer ``int(tensor)`` or ``float(tensor)``: Python turns it into a number that cannot be followed."""
        number = self.answers.real if dtype.is_floating_point or dtype.is_complex else self.answers.whole
        return self.converted(self.note(READ), kind(number))

    def size(self) -> int:
        """Answer where a tensor is used as a size or an index."""
        self._note_number(self.note(READ))
        return self.answers.whole

    def inside(self, name: str, dtype: torch.dtype, num_tensors: int) -> Any:
        """Answer a PyTorch operator that reads a number itself, for example to use it as a size."""
        line = self.note(name)
        is_place = name == READ and dtype not in (torch.bool, torch.uint8)
        if is_place and operation_of(_frame((*_BETWEEN, str(_MEMKIT)))) in _INDEXING:  # modes may stand between
            self.place = line
            return 0  # the only place that each dimension has
        if name in _COMPARING_TENSORS:
            return self._branched(_site(), line, natural=False, contrary=self.answers.truth)
        self._note_number(line)
        if num_tensors > 1 or dtype is torch.bool:
            return self.answers.truth
        return self.answers.real if dtype.is_floating_point else self.answers.whole

    def selected(self, *, has_values: bool) -> None:
        """Note what was selected at the guessed `place`: without values it does not matter which, all are alike."""
        line, self.place = self.place, None
        if line is not None and has_values:
            self._note_number(line)

    def unsized(self, name: str) -> None:
        """Note an operator whose result has fewer entries than it would have with data."""
        line = self.note(name)
        self.numbers[f"{_now(line)} computes with a sparse tensor, whose size depends on data"] = None

    def approximated(self, name: str) -> None:
        """Note an operator that takes other memory on a card than its parts here."""
        line = self.note(name)
        self.numbers[f"{_now(line)} runs without cuDNN, in cells that keep other tensors on a card"] = None

    def array(self, dtype: torch.dtype) -> Any:
        """Answer with the number that fills an array."""
        line = self.note("Tensor.numpy")
        if _site().use is not Use.TEXT:
            self._note_number(line)
        if dtype is torch.bool:
            return self.answers.truth
        return self.answers.real if dtype.is_floating_point or dtype.is_complex else self.answers.whole

    def into_data(self, line: str) -> None:
        """Note a number that is written into a tensor with data, where later reads take it as known."""
        if _site().use is not Use.TEXT:
            self._note_number(line)

    def finite(self) -> None:
        """Note that code checked whether numbers are finite, and was told that they are."""
        self.assumptions[f"{StepPosition().place().line} finds all numbers finite"] = None

    # -------------------------------------------------------------------------- what becomes of the answers

    def compared(self, line: str, natural: Any) -> Any:
        """Return the result of a comparison with an answered number."""
        operation = operation_of(_frame())
        if natural is NotImplemented or (operation not in _COMPARING and operation.startswith(_SEARCHING)):
            return natural
        # If the code itself does not compare, min, max or sorted does, and the source shows how the result is used.
        site = _site()
        contrary = natural != self.answers.is_contrary
        return self._branched(site, line, natural=natural, contrary=contrary)

    def is_whole(self, line: str) -> None:
        """Note an integer: it may bound a loop or slice a list, which cannot be observed in Python."""
        site = _site()
        if site.use in (Use.RETURNED, Use.UNKNOWN) or (site.is_lost and site.use is Use.BRANCH):
            self._note_number(line)

    def shown(self, line: str, text: str) -> str:
        """Note an answer that becomes text, if the source shows that this text decides something."""
        if _site().is_lost:
            self.converted(line, None)
        return text

    def converted(self, line: str, number: Any) -> Any:
        """Note an answer that becomes a number which cannot be followed."""
        use = _site().use
        if use is Use.GUARD:
            self._note_assumption(line)
        elif use is not Use.TEXT:
            self._note_number(line)  # a branch too: the comparison of a plain number cannot be turned around
        return number

    def described(self) -> None:
        """Note a tensor that becomes text, if the source shows that this text decides something."""
        if _site().is_lost:
            self._note_number(self.note("Tensor.__repr__"))

    def _branched(self, site: Site, line: str, *, natural: bool, contrary: bool) -> bool:
        if site.use is Use.TEXT:
            return natural
        if site.use is Use.GUARD:
            self._note_assumption(line)
            return natural if site.passing is None else site.passing
        self._note_branch(line)
        return contrary

    def _note_branch(self, line: str) -> None:
        self.branches[f"{_now(line)} branches on {self._named(line)}"] = None

    def _note_number(self, line: str) -> None:
        self.numbers[f"{_now(line)} uses {self._named(line)} where memkit cannot follow it"] = None

    def _note_assumption(self, line: str) -> None:
        self.assumptions[f"{_now(line)} raises no error"] = None

    def _named(self, line: str) -> str:
        is_here = _now(line) == line
        if line in self._drawn:
            return "a random number" if is_here else f"a random number that was drawn at {line}"
        return "a guessed value" if is_here else f"a value that was guessed at {line}"


def _now(line: str) -> str:
    """Return the user's line that is running, or else the line that read the number."""
    return str(StepPosition().place().line or line)


def _frame(between: tuple[str, ...] = _BETWEEN) -> FrameType:
    """Return the frame that reads the number."""
    frame = sys._getframe(1)  # noqa: SLF001 - no public form
    while frame.f_back is not None and frame.f_code.co_filename.startswith(between):
        frame = frame.f_back
    return frame


def _site() -> Site:
    """Find how the reading code uses the answer. memkit and Adafactor use it only for weights and checks."""
    frame = _frame()
    file = frame.f_code.co_filename
    if file.startswith(_ASSERTING):
        return Site(Use.BRANCH) if is_caught(frame, AssertionError) else Site(Use.GUARD, passing=True)
    is_own = file.startswith(str(_MEMKIT)) and not file.startswith(_SIZING)
    return Site(Use.TEXT) if is_own or file == _SCALING else site_of(frame)


# ------------------------------------------------------------------------------------------- guessed numbers


class _Guessed:
    """Base class of guessed numbers: the `Guesses` they belong to, and the line that read them."""

    guesses: Guesses
    line: str

    def of(self, guesses: Guesses, line: str) -> Self:
        """Set the `Guesses` that it belongs to."""
        self.guesses, self.line = guesses, line
        return self

    def again(self, result: Any) -> Any:
        """Turn a result of arithmetic into a guess."""
        if type(result) is int and isinstance(self, GuessedFloat):
            self.guesses.is_whole(self.line)
        if type(result) in _KINDS:
            return _KINDS[type(result)](result).of(self.guesses, self.line)
        return tuple(map(self.again, result)) if type(result) is tuple else result

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(self).__base__, (plain_number(self),)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """Apply a NumPy function: if its result is a number, it is a guess too."""
        result = getattr(ufunc, method)(*map(plain_number, inputs), **options)
        return self.again(result.item()) if getattr(result, "shape", None) == () else result


class GuessedFloat(_Guessed, float):
    """A float that was read from a tensor without data, or computed from such numbers."""

    __hash__ = float.__hash__


class GuessedInt(_Guessed, int):
    """An integer that was read from a tensor without data, or computed from such numbers."""

    __hash__ = int.__hash__


def plain_number(value: Any) -> Any:
    """Return a guessed number as a plain one, and other values unchanged."""
    if isinstance(value, GuessedFloat):
        return float.__float__(value)
    return int.__int__(value) if isinstance(value, GuessedInt) else value


_KINDS: dict[type, Any] = {float: GuessedFloat, int: GuessedInt}
_WITH_ANOTHER = [
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "divmod",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
]
_ARITHMETIC = {
    *(f"__{side}{name}__" for name in _WITH_ANOTHER for side in ("", "r")),
    *(f"__{name}__" for name in ["neg", "pos", "abs", "invert", "round", "trunc", "floor", "ceil"]),
}
_COMPARISONS = {f"__{name}__" for name in ["lt", "le", "gt", "ge", "eq", "ne", "bool"]}
_CONVERSIONS = {"__int__", "__float__"}
_SHOWING = {"__repr__", "__format__"}


def _follow(kind: Any, base: type) -> None:
    """Give a class of guessed numbers methods that propagate the guess or note what becomes of it."""

    def arithmetic(method: Any) -> Any:
        return lambda self, *others: self.again(method(self, *others))

    def comparison(method: Any) -> Any:
        return lambda self, *others: self.guesses.compared(self.line, method(self, *others))

    def conversion(method: Any) -> Any:
        return lambda self: self.guesses.converted(self.line, method(self))

    def showing(method: Any) -> Any:
        return lambda self, *how: self.guesses.shown(self.line, method(self, *how))

    made = (_ARITHMETIC, arithmetic), (_COMPARISONS, comparison), (_CONVERSIONS, conversion), (_SHOWING, showing)
    for names, make in made:
        for name in names & vars(base).keys():
            setattr(kind, name, make(getattr(base, name)))


for _base, _kind in _KINDS.items():
    _follow(_kind, _base)
    _kind.__name__ = _base.__name__  # its name in logs and errors


# -------------------------------------------------------------------------------------- methods that read numbers


def known_value(tensor: Any) -> float | None:
    """Return the number that all elements of a tensor equal, if it is known."""
    return getattr(tensor, KNOWN, None) if isinstance(tensor, FakeTensor) else None


def _guesses_of(tensor: Any) -> Guesses | None:
    """Return the `Guesses` of a tensor's mode; None if the tensor has data or its mode is closed."""
    mode = tensor.fake_mode
    guesses = getattr(mode, "guesses", None)
    is_guessed = isinstance(guesses, Guesses) and tensor.constant is None and mode.is_open
    return guesses if is_guessed else None


def _answered(guesses: Guesses, tensor: Any, kind: Callable[[Any], Any], guess: Callable[[], Any]) -> Any:
    value = known_value(tensor)
    if value is None:
        return guess()
    guesses.finite()
    return kind(value)


def _as_dtype(dtype: torch.dtype) -> Callable[[Any], Any]:
    return bool if dtype is torch.bool else float if dtype.is_floating_point else int


def _item(guesses: Guesses, tensor: Any) -> Any:
    return _answered(guesses, tensor, _as_dtype(tensor.dtype), lambda: guesses.number(tensor.dtype))


def _truth(guesses: Guesses, tensor: Any) -> bool:
    return bool(_answered(guesses, tensor, bool, guesses.truth))


def _index(guesses: Guesses, tensor: Any) -> int:
    return int(_answered(guesses, tensor, int, guesses.size))


def _number(kind: type) -> Callable[[Guesses, Any], Any]:
    return lambda guesses, tensor: _answered(guesses, tensor, kind, lambda: guesses.plain(tensor.dtype, kind))


def _of_one(answer: Callable[[Guesses, Any], Any]) -> Callable[[Any], Any]:
    """Make a method of one-element tensors, such as `Tensor.item`."""

    def make(original: Any) -> Any:
        @wraps(original)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            guesses = _guesses_of(self)
            if guesses is None or self.numel() != 1:
                return original(self, *args, **kwargs)
            return answer(guesses, self)

        return method

    return make


def _listing(original: Any) -> Any:
    @wraps(original)
    def tolist(self: Any) -> Any:
        guesses = _guesses_of(self)
        if guesses is None:
            return original(self)
        if 0 in self.shape:
            return np.empty(self.shape).tolist()
        return _nested(_item(guesses, self), tuple(self.shape))

    return tolist


def _nested(number: Any, shape: tuple[int, ...]) -> Any:
    return [_nested(number, shape[1:]) for _ in range(shape[0])] if shape else number


def _formatting(original: Any) -> Any:
    @wraps(original)
    def shown(self: Any, specification: str) -> str:
        guesses = _guesses_of(self)
        if guesses is None or self.dim():
            return str(original(self, specification))
        return format(plain_number(_item(guesses, self)), specification)

    return shown


def _describing(original: Any) -> Any:
    @wraps(original)
    def described(self: Any, **how: Any) -> str:
        if (guesses := _guesses_of(self)) is not None:
            guesses.described()
        return str(original(self, **how))

    return described


def _array(original: Any) -> Any:
    @wraps(original)
    def numpy(self: Any, *, force: bool = False) -> Any:
        guesses = _guesses_of(self)
        if self.is_cuda and not force:
            raise TypeError(
                f"can't convert {self.device} device type tensor to numpy. "
                "Use Tensor.cpu() to copy the tensor to host memory first."
            )
        if self.requires_grad and not force:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        with no_dispatch():
            if self.constant is not None:
                self.fake_mode.guesses.num_true += 1
                return self.constant.detach().numpy()
            if guesses is None:
                return original(self, force=force)
            return torch.full(self.shape, guesses.array(self.dtype), dtype=self.dtype, device="cpu").numpy()

    return numpy


READING: dict[str, Callable[[Any], Any]] = {
    "item": _of_one(_item),
    "__bool__": _of_one(_truth),
    "__index__": _of_one(_index),
    "__int__": _of_one(_number(int)),
    "__float__": _of_one(_number(float)),
    "__complex__": _of_one(_number(complex)),
    "tolist": _listing,
    "numpy": _array,
    "__format__": _formatting,
    "__repr__": _describing,
}
"""Methods of tensors without data that read numbers: by name, a function that wraps torch's own method."""
