"""Autocast: its cache, which differs by version, and the precision that CUDA uses for each operator."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from memkit._torch.versions import parse

KEEPS_CASTS_WITHOUT_GRAPHS = parse(torch.__version__) < (2, 12)
"""Whether autocast reuses a weight's cast without a graph when a graph is needed: 2.10 does, 2.12 does not."""


def graphs(*, enabled: bool) -> AbstractContextManager[None]:
    """Return a context in which graphs are built, or not; weight casts made without one are not reused outside.

    Enter it at once. Older versions cache a cast made without a graph until autocast ends: a later use of that weight
    with gradients would get no gradient for it.
    """
    if enabled or not (KEEPS_CASTS_WITHOUT_GRAPHS and torch.is_autocast_cache_enabled()):
        return torch.set_grad_enabled(mode=enabled)
    return _without_casts()


@contextmanager
def _without_casts() -> Iterator[None]:
    with torch.no_grad():
        torch.set_autocast_cache_enabled(False)
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled(True)


def without_gradients() -> AbstractContextManager[None]:
    """Return a context in which no graph is built: see `graphs`."""
    return graphs(enabled=False)


kernels_of: Callable[[str], list[str]] = torch._C._dispatch_get_registrations_for_dispatch_key
"""Lists the operators that have a kernel for a dispatch key, such as ``"aten::mm"`` for ``"AutocastCUDA"``."""
