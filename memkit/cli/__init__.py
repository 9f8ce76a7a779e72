"""Command line entry point: `memkit COMMAND`. One module per command: parse, call, render."""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from memkit._core.printable import printable
from memkit._core.settings import nearest_word
from memkit._version import __version__
from memkit.cli._codes import MEANINGS, YES
from memkit.cli._terminal import WIDTH, folded

# A command is a module with add_parser(commands), whose parser sets run=, a function from arguments to an exit code.
# One with RUNS_SCRIPT = True gets the words after the first -- unread, as arguments.after: argparse would drop the --.
_COMMANDS = ("check", "compare", "demo", "dryrun", "estimate", "gpus", "presets", "profile", "report")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The arguments after the program name; None reads them from the command line.

    Returns:
        The exit code, one of `memkit.cli._codes.MEANINGS`; for wrong arguments argparse itself exits.
    """
    parser = _Parser(
        prog="memkit",
        description="Predict, fit and prove the memory of PyTorch training.",
        epilog="\n".join(["exit codes:", *(f"  {code:<4} {meaning}" for code, meaning in MEANINGS.items())]),
    )
    parser.formatter_class = functools.partial(argparse.RawDescriptionHelpFormatter, width=WIDTH)
    parser.add_argument("--version", action="version", version=f"memkit {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    given = sys.argv[1:] if argv is None else argv
    if given and given[0] not in _COMMANDS and not given[0].startswith("-"):
        meant = nearest_word(given[0], _COMMANDS)
        parser.error(
            f"unknown command {given[0]!r}; "
            + (f"write `{' '.join(['memkit', meant, *given[1:]])}`" if meant else f"one of {', '.join(_COMMANDS)}")
        )
    # Only the requested command is loaded; without one, all are, for the help and the errors.
    names = given[:1] if given and given[0] in _COMMANDS else _COMMANDS
    modules = [importlib.import_module(f"memkit.cli.{name}") for name in names]
    for module in modules:
        module.add_parser(commands)
    runs_script = len(modules) == 1 and getattr(modules[0], "RUNS_SCRIPT", False)
    end = given.index("--") if runs_script and "--" in given else len(given)
    arguments = parser.parse_args(given[:end], argparse.Namespace(after=list(given[end + 1 :])))
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()  # a closed pipe raises its error here, and not at the end of the program
    except BrokenPipeError:  # as in `memkit gpus --all | head`: the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return YES
    except BaseException as error:
        from memkit.cli._failures import code_of

        failure = code_of(error)
        if failure is None:
            raise
        return failure
    return code


class _Parser(argparse.ArgumentParser):
    """A parser with texts of 80 columns; it escapes typed text that it repeats, so that the terminal is unaffected."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.formatter_class = functools.partial(argparse.HelpFormatter, width=WIDTH)

    def _print_message(self, message: str, file: Any = None) -> None:
        super()._print_message(message and folded(printable(message, is_one_line=False)), file)
