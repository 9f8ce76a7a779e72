"""neuraloperator, the graph neural operator: the messages of all edges in chunks (neuraloperator#726 asks for it)."""

from __future__ import annotations

from benchmarks.acceptance.project import Copy, Project

TRAIN = '''import torch
from nilearn.datasets import load_fsaverage, load_fsaverage_data
from torch import nn

from neuralop.layers.gno_block import GNOBlock

NUM_POINTS = 642  # the first vertices of a sphere that was refined are the sphere before that


class SurfaceOperator(nn.Module):
    """From a function on a surface to another one: lifted, integrated twice over neighbourhoods, projected."""

    def __init__(self, width=32):
        super().__init__()
        self.lift = nn.Linear(1, width)
        blocks = [GNOBlock(width, width, 3, 0.3, reduction="mean") for _ in range(2)]
        self.blocks = nn.ModuleList(blocks)
        self.project = nn.Linear(width, 1)

    def forward(self, points, values):
        values = self.lift(values)
        for block in self.blocks:
            values = values + nn.functional.gelu(block(points, points, values))
        return self.project(values)


points = torch.tensor(load_fsaverage("fsaverage5")["sphere"].parts["left"].coordinates[:NUM_POINTS] / 100)
curvature, depth = [
    torch.stack([
        torch.tensor(load_fsaverage_data("fsaverage5", data_type=kind).data.parts[side][:NUM_POINTS])
        for side in ("left", "right")
    ])[..., None]
    for kind in ("curvature", "sulcal")
]
dtype = torch.get_default_dtype()
points, curvature, depth = points.to(dtype), curvature.to(dtype), depth.to(dtype)
depth = (depth - depth.mean()) / depth.std()
model = SurfaceOperator()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)
for step in range(100):
    optimizer.zero_grad()
    loss = (model(points, curvature) - depth).square().mean()
    loss.backward()
    optimizer.step()
    print("loss", loss.item())
'''


def prepare(copy: Copy) -> None:
    copy.write("train.py", TRAIN, "a loop of ours: its own scripts need data sets of several gigabytes")
    copy.add_stand_in("torch_scatter", ".", "a stand-in: torch.segment_reduce; without it, a loop over points")


PROJECT = Project(
    name="neuraloperator",
    repository="neuraloperator/neuraloperator",
    commit="93d3f0633e048c915004cd782cb339acf06e1157",
    licence="MIT",
    files=tuple(
        f"neuralop/layers/{each}.py"
        for each in ("gno_block", "channel_mlp", "integral_transform", "neighbor_search", "segment_csr", "embeddings")
    ),
    folder=".",
    command=("train.py",),
    num_steps=8,
    loss=r"loss ([\d.e-]+)",
    prepare=prepare,
    data="fsaverage5's sphere, coarsened to 642 points: from the curvature to the depth of the folds",
    shows="`chunked_segment_reduce` in its `IntegralTransform`: features, kernel and messages of 2,048 edges at a time",
)
