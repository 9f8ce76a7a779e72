"""The 1,797 digits of scikit-learn where MNIST is asked for: 1,500 to train, the rest to test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from sklearn.datasets import load_digits
from torch.utils.data import Dataset

NUM_TRAIN = 1500


class MNIST(Dataset):
    """Digits of 28 by 28 pixels: each of the 8 by 8 is repeated 3 times, with a border of 2."""

    def __init__(self, *_: Any, train: bool = True, transform: Callable[[Any], Any], **__: Any) -> None:
        digits = load_digits()
        part = slice(NUM_TRAIN) if train else slice(NUM_TRAIN, None)
        self.images, self.targets = digits.images[part], digits.target[part].tolist()
        self.transform = transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = np.pad(np.kron(self.images[index] / 16, np.ones((3, 3))), 2)
        return self.transform(image), self.targets[index]
