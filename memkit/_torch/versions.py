"""Which versions of torch memkit's tests have run on, and what is said beyond them."""

import re
import warnings
from typing import NoReturn

import torch

from memkit._core.errors import MemkitWarning, TorchVersionError

OLDEST, NEWEST = (2, 8), (2, 15)  # docs/versions.md has the table; pyproject.toml asks for the oldest


def parse(version: str) -> tuple[int, int]:
    """Return major and minor number of a version: "2.13.0+cpu" is (2, 13)."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def warn_beyond_tested(version: str = torch.__version__) -> None:
    """Warn where memkit's tests have not run on a version of torch.

    Warns:
        MemkitWarning: The version is older or newer than those that were tested.
    """
    if not OLDEST <= parse(version) <= NEWEST:
        warnings.warn(
            f"memkit was tested on PyTorch {_name(OLDEST)} to {_name(NEWEST)}, and this is {version}. It uses private "
            "parts of PyTorch, which may have changed: predictions may be off, and a feature may fail. Way out: "
            "memkit's newest version, or a PyTorch within that range.",
            MemkitWarning,
            stacklevel=2,
        )


def require(found: object, *, name: str, since: str, feature: str) -> None:
    """Refuse a feature whose part of torch is missing.

    Args:
        found: That part; None where this torch lacks it.
        name: How torch calls it.
        since: The first version that has it.
        feature: What was asked of memkit.

    Raises:
        TorchVersionError: It is None.
    """
    if found is None:
        raise TorchVersionError(
            feature,
            got=f"PyTorch {torch.__version__}, which has no {name}",
            expected=f"PyTorch {since} or newer",
            fix=f'pip install "torch>={since}"; the rest of memkit works with this one.',
        )


def refuse_unknown(name: str, *, feature: str) -> NoReturn:
    """Refuse a feature whose part of torch is not as in the versions that were tested.

    Raises:
        TorchVersionError: Always.
    """
    tested = f"{_name(OLDEST)} to {_name(NEWEST)}"
    raise TorchVersionError(
        feature,
        got=f"PyTorch {torch.__version__}, which has no {name}",
        expected=f"PyTorch {tested}, as its wheels install it",
        fix="install one of these, or a newer memkit; what needs no virtual GPU works with this one.",
    )


def _name(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
