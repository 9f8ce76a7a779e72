"""Versions of torch that memkit is tested on, and the messages for others."""

import re
import warnings
from typing import NoReturn

import torch

from memkit._core.errors import MemkitWarning, TorchVersionError

OLDEST, NEWEST = (2, 8), (2, 15)  # docs/versions.md has the table; pyproject.toml requires the oldest


def parse(version: str) -> tuple[int, int]:
    """Return the major and minor numbers of a version: "2.13.0+cpu" is (2, 13)."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def warn_beyond_tested(version: str = torch.__version__) -> None:
    """Warn if memkit is not tested on a version of torch.

    Warns:
        MemkitWarning: The version is older or newer than the tested ones.
    """
    if not OLDEST <= parse(version) <= NEWEST:
        warnings.warn(
            f"memkit was tested on PyTorch {_name(OLDEST)} to {_name(NEWEST)}, and this is {version}. It uses private "
            "parts of PyTorch, which may have changed: predictions may be wrong, and a feature may fail. Way out: "
            "install memkit's newest version, or a PyTorch within that range.",
            MemkitWarning,
            stacklevel=2,
        )


def require(found: object, *, name: str, since: str, feature: str) -> None:
    """Reject a feature that needs a missing part of torch.

    Args:
        found: That part; None if this torch lacks it.
        name: Its name in torch.
        since: The first version that has it.
        feature: The requested memkit feature.

    Raises:
        TorchVersionError: ``found`` is None.
    """
    if found is None:
        raise TorchVersionError(
            feature,
            got=f"PyTorch {torch.__version__}, which has no {name}",
            expected=f"PyTorch {since} or newer",
            fix=f'pip install "torch>={since}"; the rest of memkit works with this one.',
        )


def refuse_unknown(name: str, *, feature: str) -> NoReturn:
    """Reject a feature whose part of torch differs from the tested versions.

    Raises:
        TorchVersionError: Always.
    """
    tested = f"{_name(OLDEST)} to {_name(NEWEST)}"
    raise TorchVersionError(
        feature,
        got=f"PyTorch {torch.__version__}, which has no {name}",
        expected=f"PyTorch {tested}, as its wheels install it",
        fix="install one of these, or a newer memkit; features that need no virtual GPU work with this one.",
    )


def _name(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
