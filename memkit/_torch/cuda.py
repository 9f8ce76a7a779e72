"""What torch.cuda asks of itself before it answers, for whoever answers in its place; and what CUDA prefers."""

import re
from dataclasses import dataclass
from typing import Literal, Self

import torch

from memkit._errors import ConfigError
from memkit._torch.versions import parse

LAZY = ("_lazy_init", "_lazy_call")
"""Functions that start CUDA."""

EXCHANGE = ("_exchange_device", "_maybe_exchange_device")
"""Functions that make another device the current one, and return the one before."""

RECORD_HISTORY, SNAPSHOT = "_record_memory_history", "_snapshot"
"""Functions of the allocator's history, documented under these names."""


_SMALL_WORKSPACE, _LARGE_WORKSPACE = 2 * 4096 * 1024 + 8 * 16 * 1024, 8 * 4096 * 1024
_LT_WORKSPACE = 1024 * 1024
# cuDNN in the wheels from PyPI, as `torch.backends.cudnn.version` gives it.
_CUDNN_OF_WHEELS = {
    (2, 5): 90100, (2, 6): 90100, (2, 7): 90501, (2, 8): 91002, (2, 9): 91002, (2, 10): 91002, (2, 11): 91900,
    (2, 12): 92000, (2, 13): 92000, (2, 14): 92400, (2, 15): 92600,
}  # fmt: skip
_OPTIONS_SINCE = {
    "per_process_memory_fraction": (2, 10),
    "pinned_reserve_segment_size_mb": (2, 10),
    "large_segment_size_mb": (2, 11),
    "throw_on_cudamalloc_oom": (2, 12),
}


@dataclass(frozen=True, slots=True)
class Rules:
    """What CUDA's side of PyTorch does in another way from version to version.

    Read in the sources of 2.6.0 and 2.13.0, and in the compiled libraries of the wheels of 2.1 to 2.15; which is which
    stands in `docs/versions.md`. None of it was seen on a GPU.

    Attributes:
        version: Major and minor number of PyTorch.
        cudnn: cuDNN's version as `torch.backends.cudnn.version` gives it.
    """

    version: tuple[int, int]
    cudnn: int

    @classmethod
    def of(cls, torch_version: str | None = None, cudnn: str | None = None) -> Self:
        """The rules of versions such as ``"2.6"`` and ``"9.1"``; None for PyTorch as installed, and cuDNN of its wheel.

        Raises:
            ConfigError: A version is not a number with a dot, or is older than 2.1 of PyTorch or 8 of cuDNN.
        """
        version = parse(torch.__version__)
        if torch_version is not None:
            major, minor, *_ = _numbers("torch", torch_version, (2, 1))
            version = major, minor
        if cudnn is not None:
            major, minor, patch, *_ = (*_numbers("cudnn", cudnn, (8, 0)), 0)
            return cls(version, 10000 * major + 100 * minor + patch)
        own = torch.backends.cudnn.version() if torch_version is None else None  # type: ignore[no-untyped-call]
        known = min(max(version, min(_CUDNN_OF_WHEELS)), max(_CUDNN_OF_WHEELS))
        return cls(version, own or _CUDNN_OF_WHEELS[known])

    def attention_order(self, capability: tuple[int, int]) -> tuple[str, ...]:
        """Which kernel attention asks first: `check_prefer_cudnn_attention` and the order in sdp_utils.cpp."""
        major, minor = capability
        is_new = self.version >= (2, 10) and self.cudnn > 91500 and major in (9, 10)
        if is_new and (self.version >= (2, 13) or minor in (0, 3)):  # builds with CUDA 13, as the wheels are
            return "cudnn", "flash", "efficient", "math"
        return "flash", "efficient", "math", "cudnn"

    @property
    def pads_masks_first(self) -> bool:
        """Whether attention pads a mask to 8 numbers and expands the result, or expands it and pads that to 16."""
        return self.version >= (2, 2)

    @property
    def makes_masks_at_once(self) -> bool:
        """Whether a mask of truth values becomes numbers by one operator."""
        return self.version >= (2, 5)

    @property
    def has_fused_rms_norm(self) -> bool:
        """Whether RMSNorm is one operator."""
        return self.version >= (2, 9)

    @property
    def attends_unbatched(self) -> bool:
        """Whether fused kernels take three dimensions, and the memory-efficient one grouped heads."""
        return self.version >= (2, 14)

    def workspace_bytes(self, capability: tuple[int, int]) -> int:
        """What cuBLAS gets for itself: `getChosenWorkspaceSize` in CublasHandlePool.cpp."""
        if self.version < (2, 12):
            return _LARGE_WORKSPACE if capability == (9, 0) else _SMALL_WORKSPACE
        majors = (9, 10, 12) if self.version < (2, 14) else (9, 10, 11, 12)
        return _LARGE_WORKSPACE if capability[0] in majors else _SMALL_WORKSPACE

    @property
    def keeps_workspaces(self) -> bool:
        """Whether cuBLAS keeps its workspace, or takes it for each product."""
        return self.version < (2, 15)

    @property
    def lt_workspace(self) -> tuple[int, Literal["each", "kept", "shared"]]:
        """What cuBLASLt, which adds a bias to a product, gets: bytes, and for each call, for ever, or cuBLAS's own."""
        if self.version < (2, 9) or self.version >= (2, 15):
            return _LT_WORKSPACE, "each"
        return (_LT_WORKSPACE, "kept") if self.version < (2, 12) else (0, "shared")

    def refuse_unknown_options(self, text: str) -> None:
        """Refuse what the allocator of this version does not know in ``PYTORCH_ALLOC_CONF``.

        Raises:
            ConfigError: An option came later.
        """
        for name, since in _OPTIONS_SINCE.items():
            if name in text and self.version < since:
                version, first = (".".join(map(str, each)) for each in (self.version, since))
                raise ConfigError(
                    f"allocator_settings={text!r}, torch={version!r}",
                    got=f"the option {name!r}",
                    expected=f"options that PyTorch {version} knows; this one came with {first}",
                    fix=f"leave it out, or simulate torch={first!r}.",
                )


def _numbers(name: str, version: object, oldest: tuple[int, int]) -> tuple[int, ...]:
    found = re.match(r"\d+(\.\d+)+", version) if isinstance(version, str) else None
    numbers = tuple(map(int, found[0].split("."))) if found else (0,)
    if numbers < oldest:
        example = ".".join(map(str, oldest))
        raise ConfigError(
            f"{name}={version!r}",
            got=repr(version),
            expected=f"a version such as {example!r} or a newer one",
            fix=f"write {name}='2.6'." if name == "torch" else "write cudnn='9.1'.",
        )
    return numbers
