"""The worst batch of a data set, foreseen, beside the real epoch: text, graphs, point clouds, images of many sizes.

- text: functions of the standard library as bytes, padded to the longest of their batch; batches by number of bytes. A
  transformer.
- graphs: patches of a brain's surface (fsaverage5, nilearn's wheel) of several sizes; edges join points closer than
  6 mm. Layers that send messages over the edges.
- clouds: the same patches; each point attends to all points of its cloud.
- images: slices of the MNI152 template (nilearn's wheel) in three directions, cut to the head and padded to the largest
  of their batch. A convolutional network with pooling over the whole image.

The real epoch runs on the CPU with AdamW, after one step that makes the optimizer's state. Each step's peak is the
highest sum of the CPU allocator's events (torch.profiler) with what was there before; "live" leaves out what kernels
take inside and give back, as the prediction does. "By size alone" are the batches that sizes would name. "Smaller but
more" are pairs of kinds of which one has no larger size and still takes more. Nothing is loaded for the search. Times
are processor time: the epoch's without a profiler.

Run: KINETO_LOG_LEVEL=6 python -m benchmarks.cases.worst_batch
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from nilearn import datasets, surface
from scipy.spatial import cKDTree
from torch import Tensor, nn

import memkit as mk
from benchmarks.result import write_result
from benchmarks.timing import seconds_of
from memkit._recorder.recorder import Recorder
from memkit._recorder.workspace import WorkspaceMarks
from memkit._simulation.simulation import hold
from memkit._torch.pytree import tree_leaves
from tests.allocations import trace_allocations

CARD = "RTX 4090"
LIMIT = 12
NUM_PATCHES = 160


class Task(NamedTuple):
    """A data set with a model.

    Attributes:
        batches: Indices of the samples of each batch.
        load: Makes a batch of indices.
        sketch: The same on the meta device, from sizes alone.
        sizes: Of each sample, the size that one would sort by.
    """

    model: nn.Module
    loss_fn: Callable[[nn.Module, Any], Tensor]
    batches: list[list[int]]
    load: Callable[[list[int]], Any]
    sketch: Callable[[list[int]], Any]
    sizes: list[int]


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def shuffled(num_samples: int, batch_size: int) -> list[list[int]]:
    order = np.random.default_rng(0).permutation(num_samples).tolist()
    return [order[start : start + batch_size] for start in range(0, num_samples, batch_size)]


# --------------------------------------------------------------------------------------------------------- text


class Reader(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.embedding, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens: Tensor, is_padding: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(tokens), src_key_padding_mask=is_padding))


def text() -> Task:
    folder = Path(ast.__file__).parent
    functions = [
        source
        for name in ("heapq", "bisect", "textwrap", "shlex", "csv", "queue", "string", "fractions")
        for node in ast.walk(ast.parse((folder / f"{name}.py").read_text()))
        if isinstance(node, ast.FunctionDef)
        and (source := ast.get_source_segment((folder / f"{name}.py").read_text(), node)) is not None
    ]
    rows = [torch.tensor(list(each.encode()[:1024])) for each in functions]
    lengths = [len(row) for row in rows]

    def sketch(indices: list[int]) -> tuple[Tensor, Tensor]:
        shape = len(indices), max(lengths[each] for each in indices)
        return empty(*shape, dtype=torch.long), empty(*shape, dtype=torch.bool)

    def load(indices: list[int]) -> tuple[Tensor, Tensor]:
        tokens = nn.utils.rnn.pad_sequence([rows[each] for each in indices], batch_first=True)
        return tokens, tokens == 0

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, is_padding = batch
        return F.cross_entropy(model(tokens, is_padding).flatten(0, 1), tokens.flatten())

    batches = list(mk.points.BudgetBatchSampler(lengths, max_points=3000, seed=0))
    return Task(Reader(), loss_fn, batches, load, sketch, lengths)


# ------------------------------------------------------------------------------------------- graphs and clouds


def patches() -> list[Tensor]:
    """Points around places on a hemisphere, 8 to 40 mm far: (num_points, 3) each."""
    mesh = surface.load_surf_mesh(datasets.fetch_surf_fsaverage("fsaverage5")["pial_left"])
    points = np.asarray(mesh.coordinates, dtype=np.float32)
    tree, draw = cKDTree(points), np.random.default_rng(0)
    places, radii = draw.choice(len(points), NUM_PATCHES, replace=False), draw.uniform(8, 40, NUM_PATCHES)
    return [
        torch.from_numpy(points[tree.query_ball_point(points[place], radius)])
        for place, radius in zip(places, radii, strict=True)
    ]


class Messages(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, width), nn.Linear(width, 1)
        self.layers = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(3))

    def forward(self, points: Tensor, edges: Tensor) -> Tensor:
        x = self.first(points)
        for layer in self.layers:
            messages = layer(torch.cat([x[edges[0]], x[edges[1]]], dim=1)).relu()
            x = x + torch.zeros_like(x).index_add(0, edges[1], messages)
        return self.last(x)


def graphs() -> Task:
    clouds = patches()
    joined = [torch.from_numpy(cKDTree(each).query_pairs(6.0, output_type="ndarray").T).long() for each in clouds]

    def sketch(indices: list[int]) -> tuple[Tensor, Tensor]:
        num_edges = sum(joined[each].shape[1] for each in indices)
        return empty(sum(len(clouds[each]) for each in indices), 3), empty(2, num_edges, dtype=torch.long)

    def load(indices: list[int]) -> tuple[Tensor, Tensor]:
        starts = np.cumsum([0, *(len(clouds[each]) for each in indices[:-1])]).tolist()
        edges = [joined[each] + start for each, start in zip(indices, starts, strict=True)]
        return torch.cat([clouds[each] for each in indices]), torch.cat(edges, dim=1)

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return model(*batch).square().mean()

    return Task(Messages(), loss_fn, shuffled(len(clouds), 4), load, sketch, [len(each) for each in clouds])


class Attention(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, width), nn.Linear(width, 1)

    def forward(self, points: Tensor) -> Tensor:
        x = self.first(points)
        return self.last((x @ x.T / 100).softmax(dim=1) @ x)


def clouds() -> Task:
    points = patches()

    def sketch(indices: list[int]) -> list[Tensor]:
        return [empty(len(points[each]), 3) for each in indices]

    def load(indices: list[int]) -> list[Tensor]:
        return [points[each] for each in indices]

    def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return torch.stack([model(each).square().mean() for each in batch]).mean()

    return Task(Attention(), loss_fn, shuffled(len(points), 4), load, sketch, [len(each) for each in points])


# ------------------------------------------------------------------------------------------------------- images


def images() -> Task:
    volume = torch.from_numpy(datasets.load_mni152_template(resolution=2).get_fdata()).float()
    slices = [cut for axis in range(3) for each in volume.unbind(axis) if (cut := inside(each)) is not None]
    model = nn.Sequential(
        *(nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.ReLU()) for a, b in ((1, 32), (32, 32), (32, 32))),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 3),
    )

    def sketch(indices: list[int]) -> Tensor:
        return empty(len(indices), 1, *(max(slices[each].shape[axis] for each in indices) for axis in (0, 1)))

    def load(indices: list[int]) -> Tensor:
        batch = torch.zeros(sketch(indices).shape)
        for image, each in zip(batch, indices, strict=True):
            image[0, : len(slices[each]), : slices[each].shape[1]] = slices[each]
        return batch

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    return Task(model, loss_fn, shuffled(len(slices), 4), load, sketch, [max(each.shape) for each in slices])


def inside(image: Tensor) -> Tensor | None:
    """The part of a slice where there is a head; None for less than 10 rows or columns."""
    rows, columns = (image > 0).nonzero(as_tuple=True)
    if not len(rows):
        return None
    cut = image[int(rows.min()) : int(rows.max()) + 1, int(columns.min()) : int(columns.max()) + 1]
    return cut if min(cut.shape) >= 10 else None


# -------------------------------------------------------------------------------------------------------- truth


def epoch(task: Task, optimizer: torch.optim.Optimizer) -> Iterator[tuple[Any, Callable[[], None]]]:
    """Batches, each with its step."""

    def step(batch: Any) -> None:
        task.loss_fn(task.model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(task.load(task.batches[0]))  # makes the optimizer's state
    for indices in task.batches:
        batch = task.load(indices)
        yield batch, partial(step, batch)


def peaks(task: Task) -> tuple[list[int], list[int]]:
    """Each step's peak in the allocator and in live tensors."""
    allocated, live = [], []
    for batch, step in epoch(task, torch.optim.AdamW(task.model.parameters())):
        with Recorder(marks=WorkspaceMarks()) as recorder:
            hold(recorder, task.model, batch)
            step()
        live.append(recorder.live_recording().peak_bytes())
        before = sum(each.nbytes for each in recorder.recording().storages() if not each.operator)
        allocated.append(before + trace_allocations(step).peak)
    return allocated, live


def highest(values: list[int]) -> int:
    return values.index(max(values))


def run_epoch(task: Task) -> None:
    for _, step in epoch(task, torch.optim.AdamW(task.model.parameters())):
        step()


# ------------------------------------------------------------------------------------------------------ figures


def figures_of(task: Task) -> dict[str, Any]:
    find = partial(mk.predict.find_worst_batch, model=task.model, loss_fn=task.loss_fn)
    find(task.batches[:2], make_batch=task.sketch)  # the first estimate of a process imports
    found: list[mk.predict.WorstBatch] = []
    seconds = seconds_of(lambda: found.append(find(task.batches, make_batch=task.sketch)))
    few_seconds = seconds_of(lambda: found.append(find(task.batches, make_batch=task.sketch, num_estimates=LIMIT)))
    worst, few = found
    loaded = find([task.load(indices) for indices in task.batches])
    on_card = find(task.batches, make_batch=task.sketch, target=CARD)
    allocated, live = peaks(task)
    low, high = worst.estimate.peak_interval
    elements = [sum(leaf.numel() for leaf in tree_leaves(task.sketch(indices))) for indices in task.batches]
    estimates = {number: each for first, each in worst.estimates.items() for number in worst.numbers[first]}
    return {
        "num_batches": worst.num_batches,
        "num_kinds": worst.num_kinds,
        "foreseen": worst.number,
        "foreseen_with_data": loaded.number,
        "foreseen_of_few": few.number,
        "num_estimated_of_few": len(few.estimates),
        "real": {"allocated": highest(allocated), "live": highest(live)},
        "by_size_alone": {
            "the largest sample": highest([max(task.sizes[each] for each in batch) for batch in task.batches]),
            "the most samples": highest([len(batch) for batch in task.batches]),
            "the largest samples together": highest(
                [sum(task.sizes[each] for each in batch) for batch in task.batches]
            ),
            "the most elements": highest(elements),
        },
        "predicted_bytes": low,
        "most_predicted_bytes": high,
        "live_bytes": live[worst.number],
        "allocated_bytes": allocated[worst.number],
        "num_batches_of_equal_live_bytes": sum(estimates[k].peak_bytes == each for k, each in enumerate(live)),
        "num_batches_inside": sum(
            estimates[k].peak_interval[0] <= each <= estimates[k].peak_interval[1] + 64
            for k, each in enumerate(allocated)
        ),
        "smaller_but_more": {"cpu": violations(worst), CARD: violations(on_card)},
        "seconds_of_search": seconds,
        "seconds_per_kind": seconds / worst.num_kinds,
        "seconds_of_few": few_seconds,
        "seconds_of_epoch": seconds_of(lambda: run_epoch(task)),
    }


def violations(worst: mk.predict.WorstBatch) -> dict[str, int]:
    """Pairs of kinds of which one has no larger size than the other, and how many of them take more all the same."""
    shapes = {number: [s for leaf in tree_leaves(batch) for s in leaf.shape] for number, batch in worst.batches.items()}
    pairs = [
        (a, b)
        for a, b in itertools.permutations(shapes, 2)
        if len(shapes[a]) == len(shapes[b]) and all(x <= y for x, y in zip(shapes[a], shapes[b], strict=True))
    ]
    needs = {number: each.required_bytes for number, each in worst.estimates.items()}
    return {"num_pairs": len(pairs), "num_more": sum(needs[a] > needs[b] for a, b in pairs)}


TASKS = {"text": text, "graphs": graphs, "clouds": clouds, "images": images}


def main() -> None:
    torch.set_num_threads(1)
    figures = {}
    for name, make_task in TASKS.items():
        torch.manual_seed(0)
        figures[name] = figures_of(make_task())
        print(name, figures[name], flush=True)
    print(write_result("worst_batch", figures, peers=("nilearn",)))


if __name__ == "__main__":
    main()
