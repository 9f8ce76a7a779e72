"""Small networks for the tests of tiling: what can be cut, and what cannot."""

import torch
import torch.nn.functional as F
from torch import nn


class UNet(nn.Module):
    """One level down and up, with a skip connection; the result has the input's size."""

    def __init__(self, conv, grow, *, width=4):
        super().__init__()
        self.enter, self.leave = conv(1, width, 3, padding=1), conv(2 * width, 2, 3, padding=1)
        self.shrink, self.grow = conv(width, width, 2, stride=2), grow(width, width, 2, stride=2)
        self.middle = conv(width, width, 3, padding=1)

    def forward(self, x):
        a = F.gelu(self.enter(x))
        b = F.gelu(self.middle(self.shrink(a)))
        return self.leave(torch.cat([self.grow(b), a], 1))


class Excited(nn.Module):
    """Squeeze and excitation: channels are scaled by their mean over space."""

    def __init__(self):
        super().__init__()
        self.conv, self.pool, self.scale = nn.Conv2d(1, 4, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Conv2d(4, 4, 1)

    def forward(self, x):
        y = self.conv(x)
        return y * torch.sigmoid(self.scale(self.pool(y)))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.attend = nn.Conv2d(1, 4, 3, padding=1), nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        y = self.enter(x)
        tokens = y.flatten(2).transpose(1, 2)
        return self.attend(tokens, tokens, tokens)[0].transpose(1, 2).view_as(y)


class StopsNaN(nn.Module):
    """NaN passes by one convolution, and stops on the way through two."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x):
        y = self.first(x)
        return y + self.second(torch.nan_to_num(y))


class Coordinates(nn.Module):
    """Depends on its position: the column's number is a channel."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x):
        return self.conv(torch.cat([x, torch.linspace(0, 1, x.shape[-1], dtype=x.dtype).expand_as(x)], 1))


class HiddenStride(nn.Module):
    """A wide convolution hides that the result also depends on a branch that works in steps of 4."""

    def __init__(self):
        super().__init__()
        self.wide, self.coarse = nn.Conv1d(1, 2, 15, padding=7), nn.Conv1d(1, 2, 1)
        nn.init.zeros_(self.coarse.weight)  # as residual branches often start

    def forward(self, x):
        return self.wide(x) + F.interpolate(self.coarse(F.avg_pool1d(x, 4)), scale_factor=4)


conv = nn.Conv2d


def same(num_in, num_out, **kwargs):
    """A convolution that keeps the size."""
    return conv(num_in, num_out, 3, padding=1, **kwargs)


def exact_nets():
    """Name -> module that tiles can be exact for, and the sizes (a, b) of an input."""
    act = nn.GELU
    return {
        "stack": (nn.Sequential(same(1, 4), act(), conv(4, 4, 5, padding=2), act(), conv(4, 2, 1)), (37, 30)),
        "dilated": (nn.Sequential(conv(1, 4, 3, padding=2, dilation=2), act(), same(4, 2)), (37, 30)),
        "padding modes": (
            nn.Sequential(
                conv(1, 4, 3, padding=1, padding_mode="reflect"),
                act(),
                conv(4, 2, 3, padding=1, padding_mode="replicate"),
            ),
            (37, 30),
        ),
        "no padding": (nn.Sequential(conv(1, 4, 3), act(), conv(4, 2, (3, 5))), (37, 30)),
        "more padding": (conv(1, 2, 3, padding=2), (37, 30)),
        "strided, odd sizes": (nn.Sequential(conv(1, 4, 3, stride=2, padding=1), act(), same(4, 2)), (37, 31)),
        "stride 3": (nn.Sequential(conv(1, 4, 3, stride=3), act(), nn.ConvTranspose2d(4, 2, 3, stride=3)), (37, 31)),
        "stride without looking": (conv(1, 2, 1, stride=2), (37, 31)),
        "transposed": (nn.Sequential(same(1, 4), act(), nn.ConvTranspose2d(4, 2, 4, 2, 1)), (25, 30)),
        "2 in, 3 out": (nn.Sequential(conv(1, 4, 2, stride=2), nn.ConvTranspose2d(4, 2, 5, stride=3)), (36, 30)),
        "pooling": (nn.Sequential(same(1, 4), nn.MaxPool2d(2), same(4, 2)), (37, 30)),
        "ceil": (nn.Sequential(same(1, 4), nn.MaxPool2d(3, 2, 1, ceil_mode=True)), (37, 30)),
        "bilinear": (nn.Sequential(nn.AvgPool2d(2), same(1, 2), nn.Upsample(None, 2, "bilinear")), (36, 28)),
        "depthwise": (nn.Sequential(conv(1, 4, 1), conv(4, 4, 3, padding=1, groups=4), act(), conv(4, 2, 1)), (37, 30)),
        "1x1": (nn.Sequential(conv(1, 4, 1), act(), conv(4, 2, 1)), (37, 30)),
        "in place": (nn.Sequential(nn.LeakyReLU(0.5, inplace=True), same(1, 2)), (37, 30)),
        "batch norm": (nn.Sequential(same(1, 4), nn.BatchNorm2d(4), act(), same(4, 2)).eval(), (37, 30)),
        "u-net": (UNet(nn.Conv2d, nn.ConvTranspose2d), (36, 28)),
    }  # fmt: skip


class Padding(nn.Module):
    """Pads its input to a multiple, and crops the result, as U-Nets and windowed attention do."""

    def __init__(self, inner, multiple, *, is_centered=False, mode="constant"):
        super().__init__()
        self.inner, self.multiple, self.is_centered, self.mode = inner, multiple, is_centered, mode

    def forward(self, x):
        rests = [-size % self.multiple for size in x.shape[2:]]
        before = [rest // 2 if self.is_centered else 0 for rest in rests]
        pads = [each for rest, first in zip(rests, before, strict=True) for each in (first, rest - first)][::-1]
        pads = [pads[i ^ 1] for i in range(len(pads))]
        y = self.inner(nn.functional.pad(x, pads, mode=self.mode))
        for dim, (first, size) in enumerate(zip(before, x.shape[2:], strict=True), start=2):
            y = y.narrow(dim, first, size)
        return y


def refused_nets():
    """Name -> module that no tile can be exact for, and the words that the message must contain."""
    first = same(1, 4)
    return {
        "group norm": (nn.Sequential(first, nn.GroupNorm(2, 4)), r"first in `1` \(GroupNorm\)"),
        "instance norm": (nn.Sequential(first, nn.InstanceNorm2d(4)), r"first in `1` \(InstanceNorm2d\)"),
        "batch norm in training": (nn.Sequential(first, nn.BatchNorm2d(4)), r"buffer `1.running_mean` \(BatchNorm2d\)"),
        "batch norm without statistics": (
            nn.Sequential(first, nn.BatchNorm2d(4, track_running_stats=False)),
            r"first in `1` \(BatchNorm2d\)",
        ),
        "squeeze and excitation": (Excited(), r"first in `pool` \(AdaptiveAvgPool2d\)"),
        "attention": (Attention(), r"first in `attend` \(MultiheadAttention\)"),
        "circular padding": (nn.Sequential(same(1, 2, padding_mode="circular")), r"first in `0` \(Conv2d\)"),
        "spectral norm": (nn.utils.parametrizations.spectral_norm(same(1, 2)), "buffer `parametrizations.weight.0._u`"),
        "coordinates": (Coordinates(), "tiles differ from the whole"),
        "nan_to_num on the way": (
            StopsNaN(),
            r"tiles differ from the whole .* halo \(1, 1\) that propagating NaN shows",
        ),
        "align_corners": (
            nn.Sequential(conv(1, 2, 2, stride=2), nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)),
            "tiles differ from the whole",
        ),
    }  # fmt: skip
