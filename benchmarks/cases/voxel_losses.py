"""Losses of volumes: memory and time against the plain forms, digits against float64, generated inputs.

Peaks are the CPU allocator's, by profiler events, of forward and backward with the prediction's gradient; the volumes
are there before. Volumes for memory and time are random, 3 % occupied; those for digits are crops of the MNI152 head.
MONAI's networks are downloads, so its own forward runs with a random network in their place: this one's, for a single
channel, as MONAI sends each channel through by itself and compares the last features alone.

Run: KINETO_LOG_LEVEL=6 python -m benchmarks.cases.voxel_losses   (4 minutes on a quiet core, 2 GB)
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.result import write_result
from benchmarks.timing import in_turns, median_ratio, seconds_of
from memkit.voxel.losses import OccupancyAwareLoss, StructurePreservingLoss
from memkit.voxel.perceptual import Perceptual3DLoss
from tests.allocations import trace_allocations
from tests.voxel.brain import crops, damaged
from tests.voxel.loss_inputs import fuzz
from tests.voxel.test_losses import occupancy, structure
from tests.voxel.test_perceptual import gradient_of, plain

NUM_INPUTS = 50_000
Loss = Callable[[Tensor, Tensor], Tensor]


def frozen(*, use_checkpoint: bool = False) -> Loss:
    """The plain form for a network that is not trained."""
    network = Perceptual3DLoss().network

    def loss(prediction: Tensor, target: Tensor) -> Tensor:
        total = prediction.new_zeros(())
        for stage in network:  # type: ignore[attr-defined]
            with torch.no_grad():
                target = stage(target)
            prediction = checkpoint(stage, prediction, use_reentrant=False) if use_checkpoint else stage(prediction)
            total = total + (_unit(prediction) - _unit(target)).square().sum(1).mean()
        return total

    return loss


def _unit(features: Tensor) -> Tensor:
    return features / (features.square().sum(1, keepdim=True) + 1e-4).sqrt()


def monai() -> Loss:
    from monai.losses.perceptual import MedicalNetPerceptualSimilarity

    loss = MedicalNetPerceptualSimilarity.__new__(MedicalNetPerceptualSimilarity)
    nn.Module.__init__(loss)
    loss.model = Perceptual3DLoss(in_channels=1).network
    loss.channel_wise = False
    return lambda prediction, target: loss(prediction, target).mean()


def forms() -> dict[str, Loss]:
    trained = Perceptual3DLoss().network.requires_grad_()  # type: ignore[attr-defined]
    return {
        "plain": lambda prediction, target: plain(trained, prediction, target),
        "plain, frozen": frozen(),
        "plain, frozen, checkpoint": frozen(use_checkpoint=True),
        "MONAI's forward": monai(),
        "memkit": Perceptual3DLoss(),
        "memkit, use_checkpoint": Perceptual3DLoss(use_checkpoint=True),
        "memkit, chunk_size=2": Perceptual3DLoss(chunk_size=2),
    }


def volumes(num_samples: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = num_samples, 4, size, size, size
    prediction, target = ((torch.rand(shape, generator=generator) > 0.97).float() for _ in range(2))
    return prediction.requires_grad_(), target


def peak(loss: Loss, num_samples: int, size: int) -> int:
    prediction, target = volumes(num_samples, size)
    return trace_allocations(lambda: loss(prediction, target).backward()).peak


def times(ways: dict[str, Loss], num_samples: int, size: int, num_rounds: int) -> dict[str, float]:
    """Medians of rounds, as shares of the plain way's."""
    prediction, target = volumes(num_samples, size)

    def seconds(loss: Loss) -> float:
        gc.collect()
        return seconds_of(lambda: loss(prediction, target).backward())

    found = in_turns(ways, num_rounds, seconds)
    return {name: round(median_ratio(each, found["plain"]), 2) for name, each in found.items()}


def digits() -> dict[str, float]:
    """Relative error of the prediction's gradient, against the plain form in float64."""
    target = crops(2, 32)
    prediction = damaged(target)
    exact = Perceptual3DLoss().double().network
    truth = gradient_of(lambda p, t: plain(exact, p, t), prediction.double(), target.double())[1]
    ways = {
        "plain, frozen": frozen(),
        "memkit": Perceptual3DLoss(),
        "memkit, use_checkpoint": Perceptual3DLoss(use_checkpoint=True),
    }
    return {
        name: float((gradient_of(loss, prediction, target)[1] - truth).norm() / truth.norm())
        for name, loss in ways.items()
    }


def main() -> None:
    torch.set_num_threads(1)
    ways = forms()
    figures: dict[str, Any] = {
        "perceptual": {"4 x 64^3": {name: {"peak_bytes": peak(loss, 4, 64)} for name, loss in ways.items()}},
        "input_bytes_4_x_64^3": volumes(4, 64)[1].nbytes,
        "gradient_errors": digits(),
    }
    growing = ("plain", "plain, frozen", "memkit", "memkit, use_checkpoint")
    figures["growth"] = {
        name: {str(num_samples): peak(ways[name], num_samples, 48) for num_samples in (2, 4, 8)} for name in growing
    }
    figures["input_bytes_1_x_48^3"] = volumes(1, 48)[1].nbytes
    figures["time_of_plain"] = times(ways, 2, 48, 3)
    grids = {
        "structure": {"plain": structure, "memkit": StructurePreservingLoss()},
        "occupancy": {"plain": occupancy, "memkit": OccupancyAwareLoss()},
    }
    figures["grids"] = {
        name: {
            "peaks_in_grids": {
                way: round(peak(loss, 4, 80) / volumes(4, 80)[1].nbytes, 2) for way, loss in pair.items()
            },
            "time_of_plain": times(pair, 4, 80, 5),
        }
        for name, pair in grids.items()
    }
    print(json.dumps(figures, indent=1), flush=True)
    figures["generated_inputs"] = fuzz(NUM_INPUTS, seed=0)
    print(json.dumps(figures["generated_inputs"]))
    write_result("voxel_losses", figures, peers=("monai",))


if __name__ == "__main__":
    main()
