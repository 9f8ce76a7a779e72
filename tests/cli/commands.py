"""What a command says of its arguments when it cannot run."""

import pytest

from memkit.cli import main


def assert_wrong_usage(capsys, arguments, text):
    """The parser refuses the arguments with exit code 2 and says the text."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert text in err, err


def assert_error(capsys, arguments, *words):
    """The command ends with exit code 2 and one line of standard error, which has the words."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("memkit: error: ")
    assert err.count("\n") == 1
    assert not [each for each in words if each not in err], err
