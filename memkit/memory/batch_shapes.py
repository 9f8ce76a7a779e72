"""Shapes of a batch as text, cheap enough for every step."""

from __future__ import annotations

from typing import Any

from memkit._torch.pytree import children_of

_MOST = 16  # tensors listed, and entries inspected per container


def batch_shapes(batch: Any) -> list[str]:
    """List the first tensors and arrays of a batch, in containers of any kind.

    Args:
        batch: Any object; if it holds no tensor or array, the result is the name of its type.

    Returns:
        For example ``["float32[8, 3, 224, 224]", "int64[8]"]``; at most 16, then ``"and more"``.

    Example:
        >>> import torch
        >>> from memkit.memory.batch_shapes import batch_shapes
        >>> batch_shapes({"x": torch.ones(8, 3), "y": [torch.ones(8, dtype=torch.int64)]})
        ['float32[8, 3]', 'int64[8]']
    """
    shapes: list[str] = []
    nodes, is_cut = [batch], False
    while nodes and len(shapes) < _MOST:
        node = nodes.pop()
        shape = getattr(node, "shape", None)
        if shape is not None and hasattr(node, "dtype"):
            shapes.append(f"{str(node.dtype).removeprefix('torch.')}{[*map(int, shape)]}")
            continue
        children = children_of(node) or ()
        is_cut = is_cut or len(children) > _MOST
        nodes.extend(reversed(children[:_MOST]))  # a batch may be a list of thousands of samples
    return [*shapes, *["and more"] * (is_cut or bool(nodes))] or [type(batch).__name__]
