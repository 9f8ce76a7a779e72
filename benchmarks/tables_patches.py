"""The table of a virtual GPU's patches of torch, read from the simulation itself."""

from __future__ import annotations

import re
from importlib.metadata import version
from typing import Any

from benchmarks.markdown import table

_OF_CI = "2.13."
_MARKED = re.compile(r"(<!-- patches -->\n).*?(<!-- end patches -->)", re.DOTALL)


def render(text: str) -> str:
    """Write the table where a page marks its place: that of the PyTorch that CI runs, since others have other names."""
    if not _MARKED.search(text) or not version("torch").startswith(_OF_CI):
        return text
    return _MARKED.sub(lambda match: match[1] + patches() + match[2], text)


def patches() -> str:
    """Owners, their patched names, and the reasons."""
    from memkit._simulation.simulation import Gpu
    from memkit.predict.gpus import find_gpu

    place = Gpu(find_gpu("RTX 4090"))
    with place.active(place.make_tensors(None)) as found:
        rows = [
            [_name(each.owner), each.purpose, ", ".join(f"`{name}`" for name in sorted(each.values))]
            for each in found
            if each.values  # this PyTorch may have no such names
        ]
    return table(["of", "so that", "names"], rows)


def _name(owner: Any) -> str:
    module = getattr(owner, "__module__", None)
    name = f"{module}.{owner.__qualname__}" if module and hasattr(owner, "__qualname__") else owner.__name__
    public = {"torch._tensor.Tensor": "torch.Tensor", "torch.nn.modules.module.Module": "torch.nn.Module"}
    return f"`{public.get(name, name)}`"
