"""How torchio, MONAI, kornia and albumentations call what augmentations do, for `guided`."""

from __future__ import annotations

from typing import TypedDict

_KEYS = (
    "all volumes of a dict are flipped and turned alike; let values change in some only, with "
    "functools.partial(aug, photometric=['image'])"
)
_REPLAY = "aug.apply(x, aug.last_params)"

WORDS = {
    "p": "prob",
    "probability": "prob",
    "keys": _KEYS,
    "include": _KEYS,
    "allow_missing_keys": "a key that a sample lacks is no error",
    "spatial_size": "the grid is read from the volume",
    "generator": "call torch.manual_seed(seed) before, or aug.sample(shape, seed=seed)",
    "seed": "call torch.manual_seed(seed) before, or aug.sample(shape, seed=seed)",
}
ALWAYS = {
    "p": "it changes every sample: set its size alone",
    "prob": "it changes every sample: set its size alone",
    "probability": "it changes every sample: set its size alone",
}


class _Calls(TypedDict):
    methods: tuple[str, ...]
    absent: dict[str, str]


CALLS: _Calls = {
    "methods": ("sample", "apply", "inverse", "apply_joint", "affine_after"),
    "absent": {
        "forward": "aug(x)",
        "transform": "aug(x)",
        "augment": "aug(x)",
        "apply_transform": "aug(x)",
        "params": "aug.last_params",
        "get_params": "aug.last_params",
        "replay": _REPLAY,
        "set_random_state": "torch.manual_seed(seed)",
        "randomize": "params = aug.sample(x.shape, seed=seed)",
        "draw_params": "params = aug.sample(x.shape, seed=seed)",
        "invert": "aug.inverse(y, aug.last_params)",
        "to": "aug(x), on the device of x",
    },
}
