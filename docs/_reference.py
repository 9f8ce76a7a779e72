"""Writes the site's reference while it is built: a page for each room, from the names that memkit exports.

A hook of mkdocs and an extension of griffe, which reads the docstrings (both named in mkdocs.yml). No page is
committed, so that a new name cannot be forgotten; a new room stops the strict build until it has a place in the nav.
"""

from __future__ import annotations

import argparse
import importlib
import re
from typing import Any

from griffe import Extension, Object
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import memkit
import memkit.cli

_TOOLS = "tools"
_INTEGRATIONS = ("transformers", "lightning", "fabric", "torch_geometric", "torchmetrics")


def pages() -> dict[str, str]:
    """Write the pages.

    Returns:
        The Markdown of each page by its name: one for each room, "tools" for names that live in no room,
        "integrations" for what is imported from `memkit.integrations`, "shell" for the commands, and "index".
    """
    rooms: dict[str, list[str]] = {}
    for name, home in memkit._HOMES.items():  # noqa: SLF001 - where each name lives is what the pages are made from
        rooms.setdefault(_TOOLS if home.startswith("_") else home.split(".")[0], []).append(name)
    index = ["# All names\n\nEach is an attribute of `memkit`; the pages follow the rooms that the names live in.\n"]
    written = {}
    for room, names in sorted(rooms.items(), key=lambda item: (item[0] == _TOOLS, item[0])):
        title = "Tools and errors" if room == _TOOLS else f"memkit.{room}"
        written[room] = "\n\n".join([f"# {title}", *(f"::: memkit.{name}" for name in names)]) + "\n"
        links = ", ".join(f"[`{name}`]({room}.md#memkit.{name})" for name in names)
        index.append(f"## {title}\n\n{links}\n")
    index.append("What other frameworks need is imported by its module: [memkit.integrations](integrations.md).\n")
    return written | {"integrations": _integrations(), "shell": _shell(), "index": "\n".join(index)}


def _integrations() -> str:
    """Name each module that a user imports for a framework; griffe reads them without importing the framework."""
    modules = "\n\n".join(f"::: memkit.integrations.{name}" for name in _INTEGRATIONS)
    return f"# memkit.integrations\n\n{modules}\n"


def _shell() -> str:
    """Write what each command says about itself."""
    commands = argparse.ArgumentParser(prog="memkit").add_subparsers()
    for name in memkit.cli._COMMANDS:  # noqa: SLF001 - the one list of them
        importlib.import_module(f"memkit.cli.{name}").add_parser(commands)
    texts = (f"## memkit {name}\n\n```text\n{each.format_help()}```" for name, each in commands.choices.items())
    return "\n\n".join(["# The shell", *texts]) + "\n"


def on_files(files: Files, *, config: MkDocsConfig, **_: Any) -> None:
    """Add the pages to the site."""
    for name, content in pages().items():
        files.append(File.generated(config, f"reference/{name}.md", content=content))


class ExampleSections(Extension):
    """Lets an ``Example:`` be set as code; griffe knows the section as ``Examples:``."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rename the section in one docstring."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
