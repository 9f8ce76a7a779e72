"""Autocast: its cache, which differs by version, and the precision that CUDA uses for each operator."""

import contextlib
from collections.abc import Callable, Iterator

import torch

from memkit._torch.versions import parse

KEEPS_CASTS_WITHOUT_GRAPHS = parse(torch.__version__) < (2, 12)
"""Whether autocast reuses a weight's cast without a graph when a graph is needed: 2.10 does, 2.12 does not."""


@contextlib.contextmanager
def without_gradients(*, are_off: bool = True) -> Iterator[None]:
    """Return a context in which no graph is built, and whose weight casts are not reused outside.

    Older versions cache a cast made without a graph until autocast ends: a later use of that weight with gradients
    would get no gradient for it.

    Args:
        are_off: False builds graphs after all.
    """
    is_cached = torch.is_autocast_cache_enabled()
    with torch.set_grad_enabled(mode=not are_off):
        if not (are_off and is_cached and KEEPS_CASTS_WITHOUT_GRAPHS):
            yield
            return
        torch.set_autocast_cache_enabled(False)
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled(is_cached)


kernels_of: Callable[[str], list[str]] = torch._C._dispatch_get_registrations_for_dispatch_key
"""Lists the operators that have a kernel for a dispatch key, such as ``"aten::mm"`` for ``"AutocastCUDA"``."""
