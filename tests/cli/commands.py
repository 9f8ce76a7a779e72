"""Error messages of a command about its arguments."""

import pytest

from memkit.cli import main


def unfolded(text):
    """Text without the breaks and indents of folded lines, nor those of columns."""
    return " ".join(text.split())


def assert_wrong_usage(capsys, arguments, text):
    """The parser refuses the arguments with exit code 2 and says the text."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    said = unfolded(capsys.readouterr().err)
    assert text in said, said


def assert_error(capsys, arguments, *words):
    """The command ends with exit code 2 and one sentence on standard error, folded, which has the words."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert not out
    first, *rest = err.splitlines()
    assert first.startswith("memkit: error: ")
    assert all(line.startswith("  ") for line in rest)  # one line that is folded
    said = unfolded(err)
    assert not [each for each in words if each not in said], said
