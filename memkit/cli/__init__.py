"""The shell's door: `memkit COMMAND`. One module per command: parse, call, render."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from memkit._errors import MemkitError
from memkit._version import __version__
from memkit.cli import demo, dryrun, estimate, gpus, presets

# A command is a module with add_parser(commands), whose parser sets run=, a function from arguments to an exit code.
_COMMANDS = (demo, dryrun, estimate, gpus, presets)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The arguments after the program's name; None reads them from the command line.

    Returns:
        The exit code: 0, or 1 where the command's own question is answered with no, or 2 where the arguments or a file
        are wrong (argparse itself exits with 2).
    """
    parser = argparse.ArgumentParser(
        prog="memkit", description="Predict, fit and prove the memory of PyTorch training."
    )
    parser.add_argument("--version", action="version", version=f"memkit {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add_parser(commands)
    arguments = parser.parse_args(argv)
    try:
        code: int = arguments.run(arguments)
    except (MemkitError, OSError) as error:
        print(f"memkit: error: {error}", file=sys.stderr)
        return 2
    return code
