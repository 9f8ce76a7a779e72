"""Pictures are not compared, so none are written."""

from __future__ import annotations

from typing import Any


def save_image(*_: Any, **__: Any) -> None:
    pass
