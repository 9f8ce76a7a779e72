"""The transforms that the scripts use, on square pictures in shades of gray: arrays from 0 to 1, or PIL's pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F


def as_array(image: Any) -> np.ndarray:
    """Height by width, float64."""
    array = np.asarray(image)
    return array / 255 if array.dtype == np.uint8 else array


class Compose:
    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self.transforms = transforms

    def __call__(self, image: Any) -> Any:
        for transform in self.transforms:
            image = transform(image)
        return image


class CenterCrop:
    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, image: Any) -> np.ndarray:
        array = as_array(image)
        top, left = ((length - self.size) // 2 for length in array.shape)
        return array[top : top + self.size, left : left + self.size]


class Resize:
    def __init__(self, size: int) -> None:
        self.size = (size, size)

    def __call__(self, image: Any) -> np.ndarray:
        array = torch.from_numpy(as_array(image))[None, None]
        return F.interpolate(array, size=self.size, mode="bilinear", antialias=True)[0, 0].numpy()


class ToTensor:
    def __call__(self, image: Any) -> Tensor:
        return torch.from_numpy(as_array(image))[None].to(torch.get_default_dtype())


class Normalize:
    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean, self.std = mean[0], std[0]

    def __call__(self, image: Tensor) -> Tensor:
        return (image - self.mean) / self.std
