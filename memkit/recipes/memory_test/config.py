"""Configuration of the edge-count analysis of a neural operator: one frozen value, with the source's defaults."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from memkit.predict.scaling.points import StepMode
from memkit.predict.settings import Settings


def _frozen(value: Any) -> Any:
    """Turn lists into tuples, at any depth: configuration files, and most users, write ``[64, 64]``."""
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value


_Size = Annotated[int, Field(ge=1)]
_Sizes = Annotated[tuple[_Size, ...], BeforeValidator(_frozen), Field(min_length=1)]


class MemoryTestConfig(Settings):
    """Settings of `memkit.recipes.run_memory_test`, the edge-count memory analysis of a neural operator.

    There are two analyses. The full one sweeps encoder, decoder and whole model over ``num_test_points`` edge counts.
    The core one sweeps only the edge MLP, over every combination of MLP, coordinate and feature dimension.

    Raises:
        ConfigError: A field is unknown, has the wrong type, or is out of range.

    Example:
        >>> import memkit as mk
        >>> config = mk.MemoryTestConfig(max_edges=80_000, num_test_points=5)
        >>> config.num_edges
        (5000, 10000, 20000, 40000, 80000)
        >>> config.modes
        ('train', 'inference')
    """

    foreign_words: ClassVar[Mapping[str, str]] = {
        "num_test_points": "num_points num_steps test_points",
        "mlp": "hidden_dims hidden_sizes mlp_dims mlp_layers",
        "core_num_edges": "edges num_edges edge_counts",
        "test_training_mode": "training train",
        "test_inference_mode": "inference eval",
        "source='measured'": "measured real",
    }

    device: str = "cuda:0"
    """device of a measured run: 'cpu', 'cuda', 'xpu' or 'mps', with or without an index such as 'cuda:0'"""
    num_physical_nodes: int = Field(default=5_000, ge=1)
    """nodes of the physical domain, 1 or more"""
    num_latent_tokens: int = Field(default=4_096, ge=1)
    """tokens of the latent domain, 1 or more"""
    min_edges: int = Field(default=5_000, ge=1)
    """the smallest edge count of the full analysis, 1 or more"""
    max_edges: int = Field(default=500_000, ge=1)
    """the largest edge count of the full analysis, not below min_edges"""
    num_test_points: int = Field(default=12, ge=2)
    """number of edge counts of the full analysis, 2 or more; they are geometrically spaced"""
    test_encoder: bool = True
    """True includes the encoder, from physical nodes to latent tokens, in the full analysis"""
    test_decoder: bool = True
    """True includes the decoder, from latent tokens to physical nodes, in the full analysis"""
    test_full_model: bool = False
    """True includes the whole model in the full analysis: encoder, processor of the tokens, decoder"""
    test_training_mode: bool = True
    """True tests training steps: forward, backward, optimizer"""
    test_inference_mode: bool = True
    """True tests forward passes without gradients"""
    source: Literal["fake", "measured"] = "fake"
    """'fake' predicts from tensors without data; 'measured' runs each point in a process of its own on the device"""
    mlp: _Sizes = (128, 128, 128)
    """hidden widths of the edge MLP in the full analysis, at least one"""
    coord_dim: int = Field(default=3, ge=1)
    """coordinates of a node in the full analysis, 1 or more"""
    feature_dim: int = Field(default=64, ge=1)
    """features of a node in the full analysis, 1 or more"""
    core_mlps: Annotated[tuple[_Sizes, ...], BeforeValidator(_frozen), Field(min_length=1)] = (
        (64, 64),
        (128, 128, 128),
        (256, 256, 256),
    )
    """hidden widths of each MLP of the core analysis, at least one MLP"""
    core_num_edges: _Sizes = (5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000)
    """edge counts of the core analysis, at least one"""
    core_coord_dims: _Sizes = (2, 3)
    """coordinates of a node in the core analysis, at least one number"""
    core_feature_dims: _Sizes = (32, 64, 128)
    """features of a node in the core analysis, at least one number"""

    @field_validator("max_edges")
    @classmethod
    def _is_not_below_min_edges(cls, max_edges: int, info: ValidationInfo) -> int:
        if max_edges < info.data.get("min_edges", 1):
            least = info.data["min_edges"]
            raise PydanticCustomError("below_min_edges", "max_edges must be {meant} or more", {"meant": least})
        return max_edges

    @field_validator("device")
    @classmethod
    def _is_a_device(cls, device: str) -> str:
        if not re.fullmatch(r"(cpu|cuda|xpu|mps)(:\d+)?", device):
            meant = "cuda" if device.startswith("gpu") else "cpu"
            raise PydanticCustomError("device", "device must be 'cpu', 'cuda', 'xpu' or 'mps'", {"meant": meant})
        return device

    @property
    def num_edges(self) -> tuple[int, ...]:
        """The edge counts of the full analysis, from `min_edges` to `max_edges`, geometrically spaced."""
        ratio = self.max_edges / self.min_edges
        last = self.num_test_points - 1
        return tuple(sorted({round(self.min_edges * ratio ** (point / last)) for point in range(last + 1)}))

    @property
    def modes(self) -> tuple[StepMode, ...]:
        """The modes that are enabled, of ``"train"`` and ``"inference"``."""
        switches: tuple[tuple[StepMode, bool], ...] = (
            ("train", self.test_training_mode),
            ("inference", self.test_inference_mode),
        )
        return tuple(mode for mode, is_on in switches if is_on)
