"""Command line entry point: `memkit COMMAND`. One module per command: parse, call, render."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from memkit._core.printable import printable
from memkit._core.settings import nearest_word
from memkit._version import __version__

# A command is a module with add_parser(commands), whose parser sets run=, a function from arguments to an exit code.
_COMMANDS = ("check", "compare", "demo", "dryrun", "estimate", "gpus", "presets", "profile", "report")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The arguments after the program name; None reads them from the command line.

    Returns:
        The exit code: 0 yes, or done; 1 no (it does not fit, there are findings, it got worse); 2 wrong usage, or
        unreadable input (argparse itself exits with 2); 3 not known; 4 the user's own code failed.
    """
    parser = _Parser(prog="memkit", description="Predict, fit and prove the memory of PyTorch training.")
    parser.add_argument("--version", action="version", version=f"memkit {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    given = sys.argv[1:] if argv is None else argv
    if given and given[0] not in _COMMANDS and not given[0].startswith("-"):
        meant = nearest_word(given[0], _COMMANDS)
        parser.error(
            f"no command {given[0]!r}; "
            + (f"write `{' '.join(['memkit', meant, *given[1:]])}`" if meant else f"one of {', '.join(_COMMANDS)}")
        )
    # Only the requested command is loaded; without one, all are, for the help and the errors.
    for name in given[:1] if given and given[0] in _COMMANDS else _COMMANDS:
        importlib.import_module(f"memkit.cli.{name}").add_parser(commands)
    arguments = parser.parse_args(given)
    try:
        code: int = arguments.run(arguments)
    except BaseException as error:
        from memkit.cli._failures import code_of

        failure = code_of(error)
        if failure is None:
            raise
        return failure
    return code


class _Parser(argparse.ArgumentParser):
    """A parser that echoes what was typed, without letting it affect the terminal."""

    def _print_message(self, message: str, file: Any = None) -> None:
        super()._print_message(message and printable(message, is_one_line=False), file)
