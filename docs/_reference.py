"""Writes the site's reference while it is built: a page for each public package, from the names that it exports.

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

_INTEGRATIONS = ("transformers", "lightning", "fabric", "torch_geometric")


def pages() -> dict[str, str]:
    """Write the pages.

    Returns:
        The Markdown of each page by its name: one for each public package, "integrations" for what is imported
        from `memkit.integrations`, "shell" for the commands, and "index".
    """
    top = set(memkit.__all__)
    index = [f"# All names\n\nAttributes of `memkit` itself: {', '.join(f'`{name}`' for name in sorted(top))}.\n"]
    written = {}
    for room in memkit._PACKAGES:  # noqa: SLF001 - the one list of them
        names = importlib.import_module(f"memkit.{room}").__all__
        written[room] = "\n\n".join([f"# memkit.{room}", *(f"::: memkit.{room}.{name}" for name in names)]) + "\n"
        links = ", ".join(f"[`{name}`]({room}.md#memkit.{room}.{name})" for name in names)
        index.append(f"## memkit.{room}\n\n{links}\n")
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
