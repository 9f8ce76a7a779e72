"""Internals of torch.cuda, for code that simulates it, and the version-dependent rules of CUDA."""

import re
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Self, TypeAlias

import torch

from memkit._core.errors import ConfigError
from memkit._torch.versions import parse

accelerator_owner: Any = torch._C
"""Holds the function through which FSDP2 and `torch.accelerator` find the accelerator."""

GET_ACCELERATOR = "_get_accelerator"
"""Name of that function."""

LAZY = ("_lazy_init", "_lazy_call")
"""Functions that initialize CUDA."""

EXCHANGE = ("_exchange_device", "_maybe_exchange_device")
"""Functions that switch the current device, and return the previous one."""

RECORD_HISTORY, SNAPSHOT = "_record_memory_history", "_snapshot"
"""Functions of the allocator's history, documented under these names."""


Cards: TypeAlias = tuple[int, int | None]
# cuDNN version of the wheels on PyPI, as given by `torch.backends.cudnn.version`.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Behavior of PyTorch's CUDA code that differs between versions.

    Taken from the source of 2.6.0, and from the compiled libraries of the wheels of 2.1 to 2.15; `docs/versions.md`
    lists the source of each rule. On a GPU those of 2.11 were observed, on an H100.

    Attributes:
        version: Major and minor number of PyTorch.
        cudnn: cuDNN's version as given by `torch.backends.cudnn.version`.
        prefers_cudnn: GPUs on which attention tries cuDNN first: (major, minor) numbers of compute capability, with
            minor None for any. `check_prefer_cudnn_attention` in sdp_utils.cpp.
        checks_cudnn_dropout: Whether cuDNN's attention is left out where dropout is no multiple of 1/16:
            `check_cudnn_dropout` in sdp_utils.cpp, merged when 2.11 was out of the main branch. An H100 with 2.11 ran
            cuDNN with dropout of 0.1.
        pads_masks_first: Whether attention pads a mask to 8 numbers and expands the result, or expands it and pads that
            to 16: `preprocess_mask` in attention.cpp.
        makes_masks_at_once: Whether a bool mask is converted to numbers by one operator.
        attends_unbatched: Whether fused kernels accept three dimensions, and the memory-efficient kernel grouped heads.
        has_fused_rms_norm: Whether RMSNorm is one operator.
        large_workspaces: GPUs on which cuBLAS gets 32 MiB, in the form of `prefers_cudnn`; on others it gets 8.125 MiB:
            `getChosenWorkspaceSize` in CublasHandlePool.cpp.
        keeps_workspaces: Whether cuBLAS keeps its workspace, or allocates it for each product.
        lt_workspace: Whether cuBLASLt, which adds a bias to a product, allocates 1 MiB for each call, keeps it, or
            shares cuBLAS's workspace.
    """

    version: tuple[int, int]
    cudnn: int
    prefers_cudnn: tuple[Cards, ...]
    checks_cudnn_dropout: bool
    pads_masks_first: bool
    makes_masks_at_once: bool
    attends_unbatched: bool
    has_fused_rms_norm: bool
    large_workspaces: tuple[Cards, ...]
    keeps_workspaces: bool
    lt_workspace: Literal["each", "kept", "shared"]

    @classmethod
    def of_version(cls, version: tuple[int, int], cudnn: int) -> Self:
        """Return the rules of a version of PyTorch with a version of cuDNN."""
        prefers_cudnn: tuple[Cards, ...] = ()
        if version >= (2, 10) and cudnn > 91500:  # from 2.13 on the wheels are built with CUDA 13
            prefers_cudnn = ((9, None), (10, None)) if version >= (2, 13) else ((9, 0), (9, 3), (10, 0), (10, 3))
        large_workspaces: tuple[Cards, ...] = ((9, 0),)
        if version >= (2, 12):
            large_workspaces = tuple((major, None) for major in (9, 10, 12, *((11,) if version >= (2, 14) else ())))
        lt_workspace: Literal["each", "kept", "shared"] = "each"
        if (2, 9) <= version < (2, 15):
            lt_workspace = "kept" if version < (2, 12) else "shared"
        return cls(
            version=version,
            cudnn=cudnn,
            prefers_cudnn=prefers_cudnn,
            checks_cudnn_dropout=version >= (2, 12),
            pads_masks_first=version >= (2, 2),
            makes_masks_at_once=version >= (2, 5),
            attends_unbatched=version >= (2, 14),
            has_fused_rms_norm=version >= (2, 9),
            large_workspaces=large_workspaces,
            keeps_workspaces=version < (2, 15),
            lt_workspace=lt_workspace,
        )

    def refuse_unknown_options(self, text: str) -> None:
        """Reject options in ``PYTORCH_ALLOC_CONF`` that this version's allocator does not know.

        Raises:
            ConfigError: An option was added in a later version.
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


@cache
def rules_of(torch_version: str | None = None, cudnn: str | None = None) -> Rules:
    """Return the rules of versions such as ``"2.6"`` and ``"9.1"``.

    Args:
        torch_version: PyTorch's version; None for the installed one.
        cudnn: cuDNN's version; None for the one in this PyTorch's wheel, or the installed one.

    Raises:
        ConfigError: A version is not a number with a dot, or is older than PyTorch 2.1 or cuDNN 8.
    """
    version = parse(torch.__version__)
    if torch_version is not None:
        major, minor, *_ = _numbers("torch", torch_version, (2, 1))
        version = major, minor
    if cudnn is not None:
        major, minor, patch, *_ = (*_numbers("cudnn", cudnn, (8, 0)), 0)
        return Rules.of_version(version, 10000 * major + 100 * minor + patch)
    own = torch.backends.cudnn.version() if torch_version is None else None  # type: ignore[no-untyped-call]
    known = min(max(version, min(_CUDNN_OF_WHEELS)), max(_CUDNN_OF_WHEELS))
    return Rules.of_version(version, own or _CUDNN_OF_WHEELS[known])


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
