"""Everything that memkit offered at commit fcdc795, and its place today, with a test that names it.

``tests/data/inventory.json`` was made at that commit. Removed and renamed entries, and pages that were merged into
others, are listed with their reason in ``tests/data/inventory_changes.json``. Run ``python -m tests.inventory`` for the
whole list.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import json
import re
from pathlib import Path
from typing import get_args

import memkit as mk
import memkit.cli
from memkit._events import log

ROOT = Path(__file__).parents[1]
DATA = Path(__file__).parent / "data"
THEN = json.loads((DATA / "inventory.json").read_text("utf-8"))
CHANGES = json.loads((DATA / "inventory_changes.json").read_text("utf-8"))
WORD = re.compile(r"--[a-z][a-z-]*|[A-Za-z_]\w*")


def entries_of_name(name):
    """A name, its parameters, its members, and theirs."""
    what = THEN["names"][name]
    yield name
    yield from (f"{name}({each})" for each in what["parameters"])
    for member, parameters in what["members"].items():
        yield f"{name}.{member}"
        yield from (f"{name}.{member}({each})" for each in parameters or ())


def entries_of_shell():
    for command, options in THEN["commands"].items():
        yield f"memkit {command}"
        yield from (f"memkit {command} {each}" for each in options)


def entries_of_log():
    yield from (f"event key {each}" for each in THEN["event_keys"])
    yield from (f"event kind {each}" for each in THEN["kinds"])


def entries_of_pages():
    for page, what in THEN["pages"].items():
        yield f"docs/{page}"
        yield from (f"docs/{page}: {row}" for row in what["card"])


@functools.cache
def homes():
    """By public name, where people import it: the top, or the package of its topic."""
    found = {name: f"memkit.{room}.{name}" for room in mk._PACKAGES for name in getattr(mk, room).__all__}
    return found | {name: f"memkit.{name}" for name in mk.__all__}


@functools.cache
def commands():
    parsers = argparse.ArgumentParser(prog="memkit").add_subparsers()
    for name in memkit.cli._COMMANDS:
        importlib.import_module(f"memkit.cli.{name}").add_parser(parsers)
    return {
        name: {option for action in parser._actions for option in (action.option_strings or [action.dest])}
        for name, parser in parsers.choices.items()
    }


def parameters(function):
    try:
        return set(inspect.signature(function).parameters)
    except (ValueError, TypeError):
        return set()


def has_member(value, member):
    return hasattr(value, member) or any(member in getattr(each, "__annotations__", {}) for each in value.__mro__)


def american(text):
    """The spelling of today: British at that commit, half of the time."""
    return functools.reduce(lambda found, pair: found.replace(*pair), CHANGES["spelling"].items(), text)


def place(entry):
    """Where an entry is now; None where it is not."""
    entry = american(entry)
    if entry.startswith("memkit "):
        _, command, *option = entry.split(" ")
        known = commands().get(command, set())
        return entry if command in commands() and (not option or option[0] in known) else None
    if entry.startswith("event "):
        _, kind, value = entry.split(" ")
        return entry if value in (log.EVENT_KEYS if kind == "key" else get_args(log.RecordKind)) else None
    if entry.startswith("docs/"):
        page, _, row = entry.partition(": ")
        path = ROOT / CHANGES["merged"].get(page, page)
        return entry if path.exists() and (not row or f"| {row} |" in path.read_text("utf-8")) else None
    name, member, parameter = re.fullmatch(r"(\w+)(?:\.(\w+))?(?:\((\w+)\))?", entry).groups()
    if name not in homes():
        return None
    value = getattr(importlib.import_module(homes()[name].rpartition(".")[0]), name)
    if member is not None:
        if not has_member(value, member):
            return None
        value = getattr(value, member, None)
    if parameter is not None and parameter not in parameters(value):
        return None
    return homes()[name] + entry.removeprefix(name)


@functools.cache
def words_of_tests():
    """By file of the tests, to which the code of pages and docstrings belongs: the words and options in it."""
    paths = [*ROOT.glob("tests/**/*.py"), *ROOT.glob("docs/**/*.md"), ROOT / "README.md", *ROOT.glob("examples/*.py")]
    own = {Path(__file__), ROOT / "tests/test_inventory.py"}
    found = {path: path.read_text("utf-8") for path in sorted(paths) if path not in own}
    for path in ROOT.glob("memkit/**/*.py"):
        found[path] = "\n".join(re.findall(r"^ *(?:>>>|\.\.\.) (.*)$", path.read_text("utf-8"), re.MULTILINE))
    return {path.relative_to(ROOT): set(WORD.findall(text)) for path, text in found.items()}


def test_of(entry):
    """A file of the tests that names an entry with what it belongs to; where none does, one that names it alone."""
    entry = american(entry)
    if entry.startswith("docs/"):
        return "tests/test_docs.py"  # runs the code of each page, and looks at each card
    words = [each for each in WORD.findall(entry) if each not in {"memkit", "event", "key", "kind"}]
    files = words_of_tests()
    whole = [path for path, there in files.items() if there.issuperset(words)]
    found = whole or [path for path, there in files.items() if words[-1] in there and path.parts[0] == "tests"]
    found.sort(key=lambda path: (path.suffix != ".py", not path.name.startswith("test_")))
    if not found and entry in homes():
        return "tests/test_architecture.py"  # runs the example in its docstring
    return str(found[0]) if found else None


def all_entries():
    for name in THEN["names"]:
        yield from entries_of_name(name)
    yield from entries_of_shell()
    yield from entries_of_log()
    yield from entries_of_pages()


if __name__ == "__main__":
    for each in all_entries():
        now = place(each)
        print(each, "->", f"{now}, {test_of(each)}" if now else CHANGES.get(each, "MISSING"))
