"""Autocast: its cache, which differs by version, and which operators CUDA runs in which precision."""

import contextlib
from collections.abc import Callable, Iterator

import torch

from memkit._torch.versions import parse

KEEPS_CASTS_WITHOUT_GRAPHS = parse(torch.__version__) < (2, 12)
"""Whether autocast takes a weight's cast without a graph where a graph is wanted: 2.10 does, 2.12 does not."""


@contextlib.contextmanager
def without_gradients(*, are_off: bool = True) -> Iterator[None]:
    """A context in which no graph is made, and whose casts of weights nobody meets outside.

    Older versions keep a cast that was made without a graph until autocast ends: whoever uses that weight again, with
    gradients, would get none for it.

    Args:
        are_off: False makes graphs after all.
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
"""Names the operators that have a kernel for a dispatch key, such as ``"aten::mm"`` for ``"AutocastCUDA"``."""
