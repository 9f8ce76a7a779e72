"""Functions run in chunks, with forward and backward memory bounded by one chunk."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memkit.chunk.cross_entropy import chunked_linear_cross_entropy as chunked_linear_cross_entropy
    from memkit.chunk.loss import chunked_loss as chunked_loss
    from memkit.chunk.map import chunked_map as chunked_map
    from memkit.chunk.processor import ChunkedProcessor as ChunkedProcessor
    from memkit.chunk.resolution import DynamicResolutionProcessor as DynamicResolutionProcessor
    from memkit.chunk.segments import chunked_segment_reduce as chunked_segment_reduce
    from memkit.chunk.sparse import SparsityAwareProcessor as SparsityAwareProcessor
    from memkit.chunk.submanifold import submanifold_conv3d as submanifold_conv3d
    from memkit.chunk.tiled import tiled_apply as tiled_apply
else:  # hidden from type checkers, which would accept any name because of `__getattr__`
    from memkit._core.lazy import load_lazily

    _HOMES = {
        "ChunkedProcessor": "memkit.chunk.processor",
        "DynamicResolutionProcessor": "memkit.chunk.resolution",
        "SparsityAwareProcessor": "memkit.chunk.sparse",
        "chunked_linear_cross_entropy": "memkit.chunk.cross_entropy",
        "chunked_loss": "memkit.chunk.loss",
        "chunked_map": "memkit.chunk.map",
        "chunked_segment_reduce": "memkit.chunk.segments",
        "submanifold_conv3d": "memkit.chunk.submanifold",
        "tiled_apply": "memkit.chunk.tiled",
    }
    __getattr__, __dir__, __all__ = load_lazily(__name__, _HOMES)
