"""Texts that are installed with memkit: also where its modules have no files of their own, as in a zip archive."""

from __future__ import annotations

from importlib import resources


def packaged_text(package: str, name: str) -> str:
    """Read a text file of a package of memkit.

    Args:
        package: The package, such as ``"memkit.report"``.
        name: The name of its file.
    """
    return resources.files(package).joinpath(name).read_text("utf-8")
