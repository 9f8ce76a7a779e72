"""Libraries that take another path where a tensor has no data, and how a dry run keeps them from it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# It asks; for a fake tensor it builds masks that it would leave out.
TRANSFORMERS_UTILS = "transformers.utils.import_utils"


@contextmanager
def told_that_tensors_are_real() -> Iterator[None]:
    """Transformers, where it is loaded, takes the path that it takes with data."""
    utils: Any = sys.modules.get(TRANSFORMERS_UTILS)
    if not hasattr(utils, "is_fake_tensor"):
        yield
        return
    asks = utils.is_fake_tensor
    utils.is_fake_tensor = lambda _: False
    try:
        yield
    finally:
        utils.is_fake_tensor = asks
