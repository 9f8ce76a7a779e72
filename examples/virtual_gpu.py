"""Which card trains a volume U-Net, and with what batch? Asked on a laptop, with the training code as it is.

The head's MNI152 template (in nilearn's wheel) is the volume: the network learns which voxels are brain. `train` is
plain PyTorch for `cuda`. It runs on virtual GPUs: the largest batch that each holds is found by trying, and where a
batch is too large, PyTorch's own error names the line.

Run: pip install -c constraints.txt -e ".[test]" && python examples/virtual_gpu.py [--smoke]
"""

from __future__ import annotations

import argparse
import traceback

import torch
import torch.nn.functional as F
from nilearn import datasets
from torch import Tensor, nn

import memkit as mk

SIZE = 88  # voxels along each side


def load() -> tuple[Tensor, Tensor]:
    """A volume (1, size, size, size) and whether each of its voxels is brain, both float32."""
    head = torch.from_numpy(datasets.load_mni152_template(resolution=2).get_fdata()).float()
    brain = torch.from_numpy(datasets.load_mni152_brain_mask(resolution=2).get_fdata()).float()
    return head[:SIZE, :SIZE, :SIZE][None], brain[:SIZE, :SIZE, :SIZE][None]


class UNet(nn.Module):
    """Two levels down and up; (b, 1, d, h, w) to (b, 1, d, h, w)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = block(1, width)
        self.deep = nn.Sequential(nn.MaxPool3d(2), block(width, 2 * width), nn.Upsample(scale_factor=2))
        self.last = nn.Sequential(block(3 * width, width), nn.Conv3d(width, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(torch.cat([x, self.deep(x)], 1))


def block(width_in: int, width: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv3d(width_in, width, 3, padding=1), nn.InstanceNorm3d(width), nn.ReLU())


def train(volume: Tensor, brain: Tensor, batch_size: int) -> None:
    """Two steps, as one would write them for a card that is there."""
    model = UNet().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = (tensor.expand(batch_size, -1, -1, -1, -1).cuda() for tensor in (volume, brain))
    for _ in range(2):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.binary_cross_entropy_with_logits(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def largest_batch(card: str, volume: Tensor, brain: Tensor) -> tuple[int, int, str]:
    """The largest batch that a card holds, what it reserves then, and the line where one more runs out."""
    batch_size, reserved_bytes = 0, 0
    while True:
        try:
            with mk.VirtualGPU(card) as gpu:
                train(volume, brain, batch_size + 1)
        except torch.OutOfMemoryError as error:
            here = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == __file__]
            return batch_size, reserved_bytes, str(here[-1].line)
        batch_size, reserved_bytes = batch_size + 1, gpu.reserved_peak_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="one card instead of four")
    cards = ["RTX 2060"] if parser.parse_args().smoke else ["RTX 2060", "RTX 3060", "RTX 4090", "A100 40GB"]
    volume, brain = load()
    for card in cards:
        batch_size, reserved_bytes, line = largest_batch(card, volume, brain)
        reserved = mk.memory.format_bytes(reserved_bytes)
        print(f"{card}: batches of {batch_size} ({reserved} reserved); one more runs out at `{line}`")


if __name__ == "__main__":
    main()
