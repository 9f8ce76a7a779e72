"""The rule by which tests are skipped on an older PyTorch: it must not hide what memkit gets wrong."""

import types

import pytest
import torch

import memkit as mk
from memkit._torch.versions import require
from tests.versions import missing


def caught(call):
    with pytest.raises(Exception) as found:  # noqa: PT011 - each kind is under test
        call()
    return found.value


def test_skips_features_memkit_refuses_by_name():
    error = caught(lambda: require(None, name="Tensor.x", since="2.99", feature="f()"))
    assert missing(error) == "PyTorch has no torch.Tensor.x (memkit refuses what needs it)"
    child = RuntimeError(f"-- Process 1 terminated:\nmemkit.errors.TorchVersionError: {error}")
    assert missing(child) == missing(error)


def test_skips_missing_torch_names_used_by_tests():
    assert missing(caught(lambda: torch.optim.NoSuchOptimizer)) == (
        "PyTorch has no torch.optim.NoSuchOptimizer (the test is about it)"
    )


def test_fails_on_missing_torch_names_used_by_memkit():
    """The same error from a line of memkit."""
    code = compile("import torch\ntorch.optim.NoSuchOptimizer", mk.__file__, "exec")
    assert missing(caught(lambda: exec(code, {}))) is None


@pytest.mark.parametrize(
    "call",
    [
        lambda: types.SimpleNamespace().missing,
        lambda: torch.ones(2).no_such_method,
        lambda: 1 / 0,
        lambda: torch.ones(2) + torch.ones(3),
        lambda: mk.memory.parse_bytes("x"),
    ],
)
def test_other_errors_are_failures(call):
    assert missing(caught(call)) is None
