"""A neural operator whose memory grows with its edges: encoder, decoder, whole model, and the edge MLP alone.

A kernel integral over a graph: an MLP of the coordinates of both ends of each edge is multiplied with the features at
the edge's source and averaged at its target. Written from the description in the GAOT-3D project (its "linear" kind of
integral transform), in plain PyTorch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from memkit.predict.scaling.points import StepMode
from memkit.recipes.memory_test.config import MemoryTestConfig

ModelPart = Literal["encoder", "decoder", "full model", "edge MLP"]
_ITEM_BYTES = 4  # float32


class IntegralTransform(nn.Module):
    """Average, at each target, the features of its sources, weighted by a kernel of both ends' coordinates."""

    def __init__(self, mlp: tuple[int, ...], coord_dim: int, feature_dim: int) -> None:
        super().__init__()
        self.kernel = edge_mlp(mlp, coord_dim, feature_dim)

    def forward(self, sources: Tensor, targets: Tensor, features: Tensor, edges: Tensor) -> Tensor:
        """Transform features from sources to targets.

        Args:
            sources: ``(s, coord_dim)``, coordinates.
            targets: ``(t, coord_dim)``, coordinates.
            features: ``(s, feature_dim)``.
            edges: int64 ``(2, e)``: source and target of each edge.

        Returns:
            ``(t, feature_dim)``.
        """
        source, target = edges
        messages = self.kernel(torch.cat([sources[source], targets[target]], -1)) * features[source]
        sums = messages.new_zeros(len(targets), messages.shape[1]).index_add(0, target, messages)
        counts = messages.new_zeros(len(targets)).index_add(0, target, torch.ones_like(target, dtype=messages.dtype))
        mean: Tensor = sums / counts.clamp(min=1)[:, None]
        return mean


class NeuralOperator(nn.Module):
    """Encoder and decoder, each an integral transform, with a processor between them: an MLP on every token."""

    def __init__(self, mlp: tuple[int, ...], coord_dim: int, feature_dim: int) -> None:
        super().__init__()
        self.encoder = IntegralTransform(mlp, coord_dim, feature_dim)
        self.processor = nn.Sequential(
            nn.Linear(feature_dim, 4 * feature_dim), nn.GELU(), nn.Linear(4 * feature_dim, feature_dim)
        )
        self.decoder = IntegralTransform(mlp, coord_dim, feature_dim)

    def forward(self, nodes: Tensor, tokens: Tensor, features: Tensor, edges: Tensor) -> Tensor:
        """Transform features from nodes to tokens and back; the same edges are used both ways.

        Args:
            nodes: ``(p, coord_dim)``, coordinates.
            tokens: ``(l, coord_dim)``, coordinates.
            features: ``(p, feature_dim)``.
            edges: int64 ``(2, e)``: node and token of each edge.

        Returns:
            ``(p, feature_dim)``.
        """
        latent = self.encoder(nodes, tokens, features, edges)
        latent = latent + self.processor(latent)
        decoded: Tensor = self.decoder(tokens, nodes, latent, edges.flip(0))
        return decoded


def edge_mlp(mlp: tuple[int, ...], coord_dim: int, feature_dim: int) -> nn.Sequential:
    """MLP from ``(e, 2 * coord_dim)`` through hidden layers with GELU to ``(e, feature_dim)``."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise((2 * coord_dim, *mlp)):
        layers += [nn.Linear(before, after), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(mlp[-1], feature_dim))


@dataclass(frozen=True)
class EdgeCase:
    """One part of the operator with one setting: the subject of one curve.

    Attributes:
        part: The part that runs.
        mlp: Hidden widths of the edge MLP.
        coord_dim: Coordinates per node.
        feature_dim: Features per node.
        num_physical_nodes: Number of nodes; not used by the MLP alone.
        num_latent_tokens: Number of tokens; not used by the MLP alone.
    """

    part: ModelPart
    mlp: tuple[int, ...]
    coord_dim: int
    feature_dim: int
    num_physical_nodes: int
    num_latent_tokens: int

    def edge_bytes(self, num_edges: int) -> int:
        """Bytes by the source's theory: each edge's row at the input and after every MLP layer, once, in float32.

        ``num_edges * (2 * coord_dim + sum(mlp) + feature_dim) * 4 bytes``, and twice that for the whole model, which
        has two such MLPs. A real step holds more: values saved by the activation functions, products, gradients.
        """
        widths = 2 * self.coord_dim + sum(self.mlp) + self.feature_dim
        return num_edges * widths * _ITEM_BYTES * (2 if self.part == "full model" else 1)

    def build_step(self, num_edges: int, mode: StepMode) -> Callable[[], None]:
        """Create model and inputs, and return a step that runs the model once."""
        model, inputs = self._model_and_inputs(num_edges)
        if mode == "inference":

            def infer() -> None:
                with torch.no_grad():
                    model(*inputs)

            return infer
        optimizer = torch.optim.AdamW(model.parameters())

        def train() -> None:
            optimizer.zero_grad()
            loss = model(*inputs).square().mean()
            loss.backward()
            optimizer.step()

        return train

    def _model_and_inputs(self, num_edges: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
        sizes = self.mlp, self.coord_dim, self.feature_dim
        if self.part == "edge MLP":
            return edge_mlp(*sizes), (torch.randn(num_edges, 2 * self.coord_dim),)
        num_sources, num_targets = self.num_physical_nodes, self.num_latent_tokens
        if self.part == "decoder":
            num_sources, num_targets = num_targets, num_sources
        edges = torch.stack([torch.randint(count, (num_edges,)) for count in (num_sources, num_targets)])
        model = NeuralOperator(*sizes) if self.part == "full model" else IntegralTransform(*sizes)
        coordinates = [torch.rand(count, self.coord_dim) for count in (num_sources, num_targets)]
        return model, (*coordinates, torch.randn(num_sources, self.feature_dim), edges)


def full_cases(config: MemoryTestConfig) -> tuple[EdgeCase, ...]:
    """Cases of the full analysis: the parts that are enabled."""
    parts: dict[ModelPart, bool] = {
        "encoder": config.test_encoder,
        "decoder": config.test_decoder,
        "full model": config.test_full_model,
    }
    sizes = config.mlp, config.coord_dim, config.feature_dim, config.num_physical_nodes, config.num_latent_tokens
    return tuple(EdgeCase(part, *sizes) for part, is_on in parts.items() if is_on)


def core_cases(config: MemoryTestConfig) -> tuple[EdgeCase, ...]:
    """Cases of the core analysis: the MLP alone, with every combination of its settings."""
    settings = itertools.product(config.core_mlps, config.core_coord_dims, config.core_feature_dims)
    nodes = config.num_physical_nodes, config.num_latent_tokens
    return tuple(EdgeCase("edge MLP", *setting, *nodes) for setting in settings)
