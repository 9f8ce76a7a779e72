"""Calls in other libraries' words: a typed error whose way out is the corrected call, instead of Python's own.

Python answers a misspelt keyword, a missing argument or an absent method with a sentence about its own rules. `guided`
answers with the call that works. It costs nothing where a call is right: arguments are looked at only after Python has
refused them.

    @guided(words={"use_amp": "precision='bf16-mixed'"}, absent={"fit": "MemoryEfficientTrainLoop(...).run()"})
    class Wrapper: ...
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from memkit._core.errors import AbsentError, InputTypeError

F = TypeVar("F", bound=Callable[..., Any])
Rewrite = Callable[[tuple[Any, ...]], "str | None"]
# In `absent`: what is done to the object itself, and what Python looks up for it.
_DONE = {"()": "__call__", "float()": "__float__", "iter()": "__iter__"}
_SAID = {"()": "a call of the {} itself", "float()": "a {} as a number", "iter()": "a {} to be unpacked"}
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

    Args:
        words: By a keyword of another library: this library's name for it (``"accumulation_steps"``, which keeps the
            value), the argument to write (``"precision='bf16-mixed'"``), or a sentence that says what to do instead;
            one that begins with "write " is the whole corrected call. The entry ``""`` is the sentence for all others.
            ``{key}`` in a sentence stands for the keyword.
        absent: For a class, by an attribute or method that it does not have: the code to write instead. ``"()"`` is the
            object itself, called; ``"float()"`` converted to a number; ``"iter()"`` unpacked.
        methods: For a class, the methods that are guided too, besides the constructor; class methods as well. A mapping
            gives their own words by method.
        rewrite: By method (``"__init__"`` for a constructor) or by the function's name: given the positional arguments
            of a call with too many or too few, the corrected call, or None for the usual one; it may also raise an
            error of its own.

    Returns:
        The decorator.

    Example:
        >>> @guided(words={"n": "size"})
        ... def make(size): ...
        >>> make(n=3)
        Traceback (most recent call last):
        ...
        memkit.errors.InputTypeError: make: got n=3; expected the arguments size. Way out: write make(size=3)
    """

    def decorate(thing: F) -> F:
        if not isinstance(thing, type):
            name = thing.__name__
            return _guided_function(thing, name, words or {}, (rewrite or {}).get(name), is_method=False)
        name = thing.__name__
        for method in ("__init__", *methods):
            label = {"__init__": name, "__call__": f"{name}(...)"}.get(method, f"{name}.{method}")
            known = methods[method] if isinstance(methods, Mapping) and method in methods else words or {}
            found = inspect.getattr_static(thing, method)
            raw = found.__func__ if isinstance(found, classmethod) else found
            function: Any = _guided_function(raw, label, known, (rewrite or {}).get(method), is_method=True)
            setattr(thing, method, classmethod(function) if isinstance(found, classmethod) else function)
        if absent:
            _answer_for_absent(thing, absent)
        return thing

    return decorate


def _guided_function(
    function: F, name: str, words: Mapping[str, str], rewrite: Rewrite | None = None, *, is_method: bool
) -> F:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError:
            refuse_call(function, name, args, kwargs, words, rewrite, is_method=is_method)
            raise

    return call  # type: ignore[return-value]  # it has the same signature


def taking_settings_of(function: Callable[..., Any]) -> Callable[[F], F]:
    """Give a function with ``**settings``, which it passes on to another one, that one's keywords in its signature.

    Then help shows them, and a wrong one is refused under the name of the function that was called.
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
    words: Mapping[str, str],
    rewrite: Rewrite | None = None,
    *,
    is_method: bool,
) -> None:
    """Raise the guided error if these arguments do not fit the function; return if they do.

    Raises:
        InputTypeError: An argument is unknown, missing, given twice, or one too many.
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
    words: Mapping[str, str],
    rewrite: Rewrite | None,
) -> NoReturn:
    free = [each.name for each in _named(parameters)]
    positional = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    series = next((each.name for each in parameters if each.kind is each.VAR_POSITIONAL), None)
    written: dict[str, str] = {}  # by parameter, as it stands in the corrected call
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
        elif key in free or (takes_any and key not in words):
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
    """Return the names of the arguments that a call must have, and has not."""
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
    key: str, value: Any, free: list[str], words: Mapping[str, str], written: dict[str, str], notes: list[str]
) -> None:
    """Put this library's words for a foreign keyword into the corrected call, or what to do instead into the notes."""
    unknown = words.get("", "there is no {key}").replace("{key}", key)
    word = words[key].replace("{key}", key) if key in words else None
    if word is None:
        near = difflib.get_close_matches(key, [each for each in free if each not in written], n=1)
        word = near[0] if near else unknown
    if _ONE_WORD.fullmatch(word) and word not in free:  # it belongs to another method
        word = unknown
    if _ONE_WORD.fullmatch(word):
        written.setdefault(word, f"{word}={_shown(word, value)}")
    elif re.match(r"\w+=\S", word):
        written.setdefault(word.partition("=")[0], word)
    else:
        notes.append(word)


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
    for done in _DONE.keys() & absent.keys():
        setattr(cls, _DONE[done], _refusing(done, absent[done]))  # not in the class body: type checkers still report it


def _refusing(done: str, instead: str) -> Callable[..., NoReturn]:
    """Return a method that refuses a use of the object itself."""

    def refuse(self: Any, *_: Any, **__: Any) -> NoReturn:
        kind = type(self).__name__
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
    public = [each for each, value in members.items() if not each.startswith("_") and not isinstance(value, str)]
    near = difflib.get_close_matches(name, public, n=1)
    meant = absent.get(name) or (near[0] if near else f"help({kind})")
    return AbsentError(
        f"{kind}.{name}",
        got=f"the absent name {name!r}",
        expected=f"one of {', '.join(public)}" if public else "a call of the object itself",
        fix=f"write {meant}",
    )
