"""Typed errors for wrong calls, such as those in other libraries' words; the way out is the corrected call.

Python answers a misspelled keyword, a missing argument or an absent method with a sentence about its own rules.
`guided` answers with the call that works. A correct call enters no other function: apart from the switches, which have
to be True or False, arguments are inspected only after Python has rejected them.

    @guided(words={"the model has it": "device"}, absent={"MemoryEfficientTrainLoop(...).run()": "fit train"})
    class Wrapper: ...

Other libraries' names for the same idea are listed once, in `memkit._core.foreign`, for all guided calls.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn, TypeVar

from memkit._core.errors import AbsentError, InputTypeError
from memkit._core.foreign import IDEAS, VALUES
from memkit._core.settings import Checker

F = TypeVar("F", bound=Callable[..., Any])
Rewrite = Callable[[tuple[Any, ...]], "str | None"]
# In `absent`: a use of the object itself, and the methods that Python looks up for it.
_DONE = {
    "()": ("__call__",),
    "[]": ("__getitem__",),
    "float()": ("__float__",),
    "iter()": ("__iter__",),
    "+": ("__add__", "__radd__"),
    "format()": ("__format__",),
}
_SAID = {
    "()": "a call of the {} itself",
    "[]": "an index into a {}",
    "float()": "a {} used as a number",
    "iter()": "a {} being unpacked",
    "+": "a {} in a sum",
    "format()": "a {} formatted as a number",
}
_LONGEST = 60  # characters of a value that a corrected call repeats
_ONE_WORD = re.compile(r"[a-z]\w*")


def guided(
    *,
    words: Mapping[str, str] | None = None,
    absent: Mapping[str, str] | None = None,
    methods: tuple[str, ...] | Mapping[str, Mapping[str, str]] = (),
    rewrite: Mapping[str, Rewrite] | None = None,
) -> Callable[[F], F]:
    """Let a public function or class answer wrong calls with the corrected call.

    Keywords annotated as ``bool`` are refused unless they are one (or NumPy's): ``check="False"`` would mean True.

    The constructor of a dataclass without ``words`` and ``rewrite`` is left alone: it is a result, which memkit makes.

    Args:
        words: For each answer, the keywords that it answers, separated by spaces. They take precedence over those of
            `memkit._core.foreign`; of several answers to a keyword, the last one counts. An answer is this function's
            own name (``"accumulation_steps"``, which keeps the value), the argument to write
            (``"precision='bf16-mixed'"``), or a sentence that says what to do instead; one that begins with "write "
            is the whole corrected call. ``{key}`` in a sentence stands for the keyword. The answer for ``""`` applies
            to all unknown keywords.
        absent: For a class, the attributes and methods that it does not have, by the code to write instead. ``()``
            stands for the object itself when called; ``[]`` when indexed; ``float()`` when converted to a number;
            ``iter()`` when unpacked; ``+`` when added; ``format()`` when formatted with a specification.
        methods: For a class, the methods to guide besides the constructor; class methods too. A mapping gives each
            method its own words.
        rewrite: By method (``"__init__"`` for the constructor) or function name, a function that receives the
            positional arguments of a call with too many or too few of them. It returns the corrected call, or None for
            the usual one, or raises its own error.

    Returns:
        The decorator.

    Example:
        >>> @guided(words={"size": "n number"})
        ... def make(size): ...
        >>> make(n=3)
        Traceback (most recent call last):
        ...
        memkit.errors.InputTypeError: make: got n=3; expected the arguments size. Way out: write make(size=3)
    """

    def decorate(thing: F) -> F:
        if not isinstance(thing, type):
            name = thing.__name__
            return _guided_function(thing, name, ForeignWords(words), (rewrite or {}).get(name), is_method=False)
        name = thing.__name__
        is_result = dataclasses.is_dataclass(thing) and not words and not rewrite  # only memkit makes it
        for method in (*methods,) if is_result else ("__init__", *methods):
            label = f"{name}(...)" if method in ("__call__", "forward") else f"{name}.{method}"
            label = name if method == "__init__" else label
            answers = methods[method] if isinstance(methods, Mapping) and method in methods else words
            found = inspect.getattr_static(thing, method)
            raw = found.__func__ if isinstance(found, classmethod) else found
            known = ForeignWords(answers, maker=None if method == "__init__" else thing)
            function: Any = _guided_function(raw, label, known, (rewrite or {}).get(method), is_method=True)
            setattr(thing, method, classmethod(function) if isinstance(found, classmethod) else function)
        if absent:
            _answer_for_absent(thing, ForeignWords(absent).own)
        return thing

    return decorate


class ForeignWords:
    """The foreign words that one call understands.

    Args:
        answers: The keywords of each answer, as in `guided`.
        maker: For a method, its class: its constructor may take an argument that the method does not.

    Example:
        >>> words = ForeignWords({"size": "n number", "bind {key}": ""})
        >>> words.own
        {'n': 'size', 'number': 'size', '': 'bind {key}'}
        >>> words.meant_by("n", ["size", "memory"]), words.meant_by("budget", ["size", "memory"])
        ('size', 'memory')
    """

    def __init__(self, answers: Mapping[str, str] | None, maker: type | None = None) -> None:
        self.own = {word: answer for answer, words in (answers or {}).items() for word in words.split() or [""]}
        self._maker = maker

    def meant_by(self, key: str, names: Collection[str]) -> str | None:
        """Return the answer to a foreign keyword, given the names of the call's free parameters; None without one."""
        word = self.own.get(key, "")
        if word in names or (word and not _ONE_WORD.fullmatch(word)):  # another name belongs to another method
            return word.replace("{key}", key)
        value = _VALUES.get(key, "")
        if value.partition("=")[0] in names:
            return value
        alike = (name for idea in IDEAS if key in idea for name in names if name in idea)
        return next(alike, None) or next(iter(difflib.get_close_matches(key, names, n=1)), None)

    def instead_of(self, key: str, value: Any) -> str:
        """Return the answer to a keyword for which a call has no parameter."""
        if "" not in self.own and self._maker is not None:
            meant = self.meant_by(key, list(inspect.signature(self._maker).parameters))
            if meant is not None and _as_argument(meant, value):
                return f"pass it to the constructor, {self._maker.__name__}(..., {_as_argument(meant, value)})"
        return self.own.get("", "there is no {key}").replace("{key}", key)


_VALUES = ForeignWords(VALUES).own


def _as_argument(answer: str, value: Any) -> str:
    """Return an answer in the form of an argument in a call; empty for a sentence."""
    if _ONE_WORD.fullmatch(answer):
        return f"{answer}={_shown(answer, value)}"
    return answer if re.match(r"\w+=\S", answer) else ""


def _guided_function(
    function: F, name: str, words: ForeignWords, rewrite: Rewrite | None = None, *, is_method: bool
) -> F:
    notes = getattr(function, "__annotations__", {})
    switches = tuple(key for key, kind in notes.items() if key != "return" and kind in ("bool", bool))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for key in switches:
            if type(kwargs.get(key, False)) is not bool:
                kwargs[key] = Checker(name).flag(key, kwargs[key])
        try:
            return function(*args, **kwargs)
        except TypeError:
            refuse_call(function, name, args, kwargs, words, rewrite, is_method=is_method)
            raise

    return call  # type: ignore[return-value]  # it has the same signature


def taking_settings_of(function: Callable[..., Any]) -> Callable[[F], F]:
    """Add another function's keywords to the signature of a function that passes its ``**settings`` on to that one.

    Then `help` shows them, and an error for a wrong one names the function that was called.
    """
    passed_on = [each for each in inspect.signature(function).parameters.values() if each.kind is each.KEYWORD_ONLY]

    def decorate(taking: F) -> F:
        own = inspect.signature(taking)
        named = [each for each in own.parameters.values() if each.kind is not each.VAR_KEYWORD]
        taking.__signature__ = own.replace(parameters=[*named, *passed_on])  # type: ignore[attr-defined]
        return taking

    return decorate


def refuse_call(
    function: Callable[..., Any],
    name: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    words: ForeignWords,
    rewrite: Rewrite | None = None,
    *,
    is_method: bool,
) -> None:
    """Raise the guided error if these arguments do not fit the function; return if they do.

    Raises:
        InputTypeError: An argument is unknown, missing or given twice, or there are too many.
    """
    signature = inspect.signature(function)
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        parameters = list(signature.parameters.values())
        if is_method:
            parameters, args = parameters[1:], args[1:]
        _refuse(name, parameters, args, kwargs, words, rewrite)


def _refuse(
    name: str,
    parameters: list[inspect.Parameter],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    words: ForeignWords,
    rewrite: Rewrite | None,
) -> NoReturn:
    free = [each.name for each in _named(parameters)]
    positional = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    series = next((each.name for each in parameters if each.kind is each.VAR_POSITIONAL), None)
    written: dict[str, str] = {}  # by parameter, the argument in the corrected call
    wrong: list[str] = []
    notes: list[str] = []
    for position, value in enumerate(args):
        if position < len(positional):
            written[positional[position]] = _shown(positional[position], value)
        elif series:
            written[f"*{series}"] = f"*{series}"
        else:
            wrong.append("one argument too many" if position == len(positional) else "")
            keyword = next((each for each in free[position:] if each not in kwargs), None)
            if keyword is not None:
                written[keyword] = f"{keyword}={_shown(keyword, value)}"
    kinds = {each.name: each.kind for each in parameters}
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds.values()
    for key, value in kwargs.items():
        if key in written:
            wrong.append(f"{key} twice")
        elif kinds.get(key) is inspect.Parameter.POSITIONAL_ONLY:
            wrong.append(f"{key} by name")
            written[key] = _shown(key, value)
        elif key in free or (takes_any and key not in words.own):
            written[key] = f"{key}={_shown(key, value)}"
        else:
            wrong.append(f"{key}={_shown(key, value)}")
            _translate(key, value, free, words, written, notes)
    for each in _missing(parameters, written):
        wrong.append(f"no {each}")
        written[each] = each if each in positional else f"{each}=..."
    corrected = rewrite(args) if rewrite and not kwargs and len(args) != len(positional) else None
    raise InputTypeError(
        name,
        got=", ".join(filter(None, wrong)),
        expected=f"the arguments {', '.join(free)}" if free else "no arguments",
        fix=_fix(corrected or f"{_last_name(name)}({_in_order(written, [*positional, f'*{series}', *free])})", notes),
    ) from None


def _missing(parameters: list[inspect.Parameter], written: Mapping[str, str]) -> list[str]:
    """Return the names of the required arguments that a call lacks."""
    return [each.name for each in _named(parameters) if each.default is each.empty and each.name not in written]


def _named(parameters: list[inspect.Parameter]) -> list[inspect.Parameter]:
    return [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]


def _in_order(written: Mapping[str, str], names: list[str]) -> str:
    """Return the arguments of a call: the known ones in the order of the signature, then the others.

    After the first one by name, all are by name.
    """
    known = [name for name in dict.fromkeys(names) if name in written]
    texts: list[str] = []
    is_named = False
    for name in dict.fromkeys([*known, *written]):
        text = written[name]
        needs_name = is_named and not text.startswith(("*", f"{name}="))
        is_named = is_named or text.startswith(f"{name}=")
        texts.append(f"{name}={text}" if needs_name else text)
    return ", ".join(texts)


def _fix(corrected: str, notes: list[str]) -> str:
    """Return the notes and the corrected call, or the note that is a whole call."""
    whole = next((note for note in notes if note.startswith("write ")), None)
    return whole or "; ".join([*dict.fromkeys(notes), f"write {corrected}"])


def _last_name(name: str) -> str:
    """Return a call's name without the class that a method belongs to."""
    return name if name.endswith(")") else name.rpartition(".")[2]


def _translate(
    key: str, value: Any, free: list[str], words: ForeignWords, written: dict[str, str], notes: list[str]
) -> None:
    """Add memkit's argument for a foreign keyword to the corrected call, or advice to the notes."""
    answer = words.meant_by(key, [each for each in free if each not in written])
    argument = answer and _as_argument(answer, value)
    if argument:
        written.setdefault(argument.partition("=")[0], argument)
    else:
        notes.append(answer or words.instead_of(key, value))


def _shown(name: str, value: Any) -> str:
    """Return a value as its user may have written it: a literal, or else the name of the argument."""
    text = repr(value) if _is_literal(value) else name
    return text if len(text) <= _LONGEST else name


def _is_literal(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return type(value) in (list, tuple) and all(map(_is_literal, value))
    return value is None or type(value) in (bool, int, float, str)


def _answer_for_absent(cls: type, absent: Mapping[str, str]) -> None:
    inherited = getattr(cls, "__getattr__", None)

    def answer(self: Any, name: str) -> Any:
        if inherited is not None and name not in absent:
            return inherited(self, name)
        if name.startswith("_") or hasattr(type(self), name):  # hasattr: a property of this name failed
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name)
        raise refuse_attribute(self, name, absent)

    cls.__getattr__ = answer  # type: ignore[attr-defined]  # so that type checkers still report absent names
    if not dataclasses.is_dataclass(cls):
        _refuse_settings(cls)
    for done in _DONE.keys() & absent.keys():
        for method in _DONE[done]:
            setattr(cls, method, _refusing(done, absent[done]))  # not in the class body: type checkers still report it


def _refuse_settings(cls: type) -> None:
    """Make each argument of the constructor an attribute that nobody can set, unless a method has one of its name."""
    constructor: Any = inspect.unwrap(cls.__init__)  # type: ignore[misc]  # it reads the class's, not an instance's
    if not inspect.isfunction(constructor):
        return
    code = constructor.__code__
    methods = [inspect.unwrap(each) for kind in cls.__mro__ for each in vars(kind).values() if callable(each)]
    # `co_names` has no arguments, but attributes.
    own = {name for each in methods if inspect.isfunction(each) for name in each.__code__.co_names}
    for name in code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]:
        if name not in own and not hasattr(cls, name):
            setattr(cls, name, _Setting(cls, name))


class _Setting:
    """Refuses to set what only the constructor takes: an attribute of this name would be read by nobody.

    A descriptor for each name costs nothing when other attributes are set, as a ``__setattr__`` would.

    Args:
        cls: The class. A class of the user's that inherits from it may use the name for itself.
        name: The constructor's parameter.
    """

    def __init__(self, cls: type, name: str) -> None:
        self._cls, self._name = cls, name
        self.__doc__ = "An argument of the constructor alone, no attribute."  # for help()

    def __get__(self, owner: object, kind: type | None = None) -> Any:
        own = {} if owner is None else vars(owner)
        if self._name not in own:
            raise AttributeError(self._name)  # as if it were not here
        return own[self._name]

    def __set__(self, owner: object, value: object) -> None:
        if type(owner) is not self._cls:
            vars(owner)[self._name] = value
            return
        kind, name = self._cls.__name__, self._name
        needed = [
            each.name
            for each in inspect.signature(self._cls).parameters.values()
            if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD and each.name != name
        ]
        raise AbsentError(
            f"{kind}.{name} = ...",
            got=f"an assignment to the constructor's argument {name!r}, which would have no effect",
            expected="settings that the constructor gets",
            fix=f"make a new one, {kind}({', '.join([*needed, f'{name}={_shown(name, value)}'])})",
        )


def _refusing(done: str, instead: str) -> Callable[..., Any]:
    """Return a method that refuses a use of the object itself."""

    def refuse(self: Any, *args: Any, **__: Any) -> Any:
        kind = type(self).__name__
        if done == "format()" and args == ("",):  # as str() does
            return str(self)
        raise InputTypeError(
            f"{kind}(...)(...)" if done == "()" else kind,
            got=_SAID[done].format(kind),
            expected="one of its methods" if done == "()" else "one of its attributes",
            fix=f"write {instead}",
        )

    return refuse


def refuse_attribute(owner: object, name: str, absent: Mapping[str, str]) -> AbsentError:
    """Return the error for an attribute that an object does not have."""
    kind = type(owner).__name__
    members = {each: inspect.getattr_static(type(owner), each, None) for each in dir(type(owner))}
    public = [
        each for each, value in members.items() if not each.startswith("_") and not isinstance(value, (str, _Setting))
    ]
    near = difflib.get_close_matches(name, public, n=1)
    meant = absent.get(name) or (near[0] if near else f"help({kind})")
    return AbsentError(
        f"{kind}.{name}",
        got=f"the unknown name {name!r}",
        expected=f"one of {', '.join(public)}" if public else "a call of the object itself",
        fix=f"write {meant}",
    )
