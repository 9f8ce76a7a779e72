"""Autocast: its cache, which differs by version, and which operators CUDA runs in which precision."""

import contextlib
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from memkit._torch.versions import parse, refuse_unknown

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


@functools.cache
def operators_by_policy() -> dict[str, tuple[str, ...]]:
    """Return the operators of each of CUDA's autocast policies, read from the header that PyTorch ships.

    Raises:
        TorchVersionError: The header is not there, or has another form.
    """
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    text = header.read_text(encoding="utf-8").replace("\\\n", "") if header.is_file() else ""
    lists = {}
    for policy in ("LOWER_PRECISION_FP", "FP32", "FP32_SET_OPT_DTYPE", "PROMOTE"):
        name = f"AT_FORALL_{policy}"
        line = re.search(rf"#define {name}\(_\)(.*)", text)
        if line is None:
            refuse_unknown(f"{name} in {'/'.join(header.parts[-3:])}", feature="a virtual GPU")
        entries = re.findall(r"_\(\s*(\w+)\s*(?:,\s*(\w+)\s*)?\)", line[1])
        lists[policy] = tuple(f"{name}.{overload}" if overload else name for name, overload in entries)
    return lists
