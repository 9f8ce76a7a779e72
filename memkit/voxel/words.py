"""The names that torchio, MONAI, kornia and albumentations use for the arguments and methods here, for `guided`."""

from __future__ import annotations

from typing import TypedDict

_KEYS = (
    "all volumes of a dict are flipped and turned together; to change the values of some only, write "
    "functools.partial(aug, photometric=['image'])"
)
WORDS = {
    _KEYS: "keys include",
    "a key missing from a sample is not an error": "allow_missing_keys",
    "the grid is read from the volume": "spatial_size",
    "call torch.manual_seed(seed) first, or aug.sample(shape, seed=seed)": "generator seed",
}
ALWAYS = {"it changes every sample: set only its strength": "p prob probability"}


class _Calls(TypedDict):
    methods: tuple[str, ...]
    absent: dict[str, str]


CALLS: _Calls = {
    "methods": ("__call__", "sample", "apply", "inverse", "apply_joint", "affine_after"),
    "absent": {
        "aug(x)": "forward transform augment apply_transform",
        "aug.last_params": "params get_params",
        "aug.apply(x, aug.last_params)": "replay",
        "torch.manual_seed(seed)": "set_random_state",
        "params = aug.sample(x.shape, seed=seed)": "randomize draw_params",
        "aug.inverse(y, aug.last_params)": "invert",
        "aug(x), on the device of x": "to",
    },
}
