"""camlab-ethz/GAOT: attention-weighted messages in chunks, the softmax of each neighborhood included."""

from __future__ import annotations

from benchmarks.acceptance.project import Copy, Project

TRAIN = """import torch
from nilearn.datasets import load_fsaverage, load_fsaverage_data
from torch import nn

from src.model.layers.agno import AGNO

NUM_POINTS, WIDTH = 2562, 32  # the first vertices of a sphere that was refined are the sphere before that

sphere = load_fsaverage("fsaverage5")["sphere"].parts
kinds = [load_fsaverage_data("fsaverage5", data_type=kind).data.parts for kind in ("curvature", "sulcal")]
points = torch.tensor(sphere["left"].coordinates[:NUM_POINTS] / 100, dtype=torch.get_default_dtype())
sides = [torch.stack([torch.tensor(kind[side][:NUM_POINTS]) for side in ("left", "right")]) for kind in kinds]
curvature, depth = [values[..., None].to(points.dtype) for values in sides]
depth = (depth - depth.mean()) / depth.std()
near = torch.cdist(points, points) < 0.2
neighbors = {
    "neighbors_index": near.nonzero()[:, 1],
    "neighbors_row_splits": nn.functional.pad(near.sum(1).cumsum(0), (1, 0)),
}
layers = [6, 64, 64, 64, WIDTH]
agno = AGNO(channel_mlp_layers=layers, use_attn=True, attention_type="cosine", coord_dim=3)
lift, project = nn.Linear(1, WIDTH), nn.Linear(WIDTH, 1)
model = nn.ModuleList([lift, agno, project])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-5)
for step in range(100):
    optimizer.zero_grad()
    values = agno(points, neighbors, points, lift(curvature))
    loss = (project(nn.functional.gelu(values)) - depth).square().mean()
    loss.backward()
    optimizer.step()
    print("loss", loss.item())
"""


def prepare(copy: Copy) -> None:
    copy.write("train.py", TRAIN, "a loop of ours around its layer: its own needs data sets of several gigabytes")
    settings = "src/model/layers/utils/dataclass.py"
    copy.replace(settings, "from omegaconf import DictConfig, OmegaConf", "", "its settings are not read")
    copy.add_stand_in("torch_scatter", ".", "a stand-in: torch.segment_reduce")


PROJECT = Project(
    name="gaot",
    repository="camlab-ethz/GAOT",
    commit="aec18bb6ef750b77097fbf6f84bf0031c84bb58a",
    licence="none stated",
    files=("src/model/layers/agno.py", "src/model/layers/mlp.py", "src/model/layers/utils"),
    folder=".",
    command=("train.py",),
    num_steps=8,
    loss=r"loss ([\d.e-]+)",
    prepare=prepare,
    data="fsaverage5's sphere, coarsened to 2,562 points: from the curvature to the depth of the folds",
    shows="`chunked_segment_reduce` with `weight=` in its attention layer, 4,096 edges at a time",
)
