"""The error tree: the built-in type that a caller expects, four parts, and the way through a worker process."""

import pickle

import pytest

import memkit as mk

TREE = {
    mk.errors.ConfigError: ValueError,
    mk.errors.InputError: ValueError,
    mk.errors.InputTypeError: TypeError,
    mk.errors.StateError: RuntimeError,
    mk.errors.FileFormatError: ValueError,
}


@pytest.mark.parametrize(("error", "builtin"), TREE.items())
def test_four_parts_survive_pickling(error, builtin):
    original = error("f(x=3)", got="x=3", expected="an even x", fix="pass 2 or 4.")
    copied = pickle.loads(pickle.dumps(original))
    assert type(copied) is error
    assert isinstance(copied, builtin)
    assert isinstance(copied, mk.MemkitError)
    assert (copied.call, copied.got, copied.expected, copied.fix) == ("f(x=3)", "x=3", "an even x", "pass 2 or 4.")
    assert str(copied) == str(original) == "f(x=3): got x=3; expected an even x. Way out: pass 2 or 4."


def test_warnings_are_user_warnings():
    assert issubclass(mk.MemkitWarning, UserWarning)
