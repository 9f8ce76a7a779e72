"""Patches that a dry run applies to third-party packages when a script imports them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from memkit._core.errors import StateError
from memkit._simulation.simulation import TRANSFORMERS_UTILS
from memkit._torch.fake import FakeTensor
from memkit.predict.script.redirected import WITHOUT_WRITE, Redirection

# The operators for which torchvision 0.28 registers shape functions when it is imported: arguments -> results.
_SIZES = "SymInt pooled_height, SymInt pooled_width"
_SHAPE = "SymInt batch_size, SymInt channels, SymInt height, SymInt width"
_BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_ROI = f"Tensor input, Tensor rois, float spatial_scale, {_SIZES}"
_DEFORM = (
    "Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, SymInt stride_h, SymInt stride_w,"
    " SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, SymInt groups, SymInt offset_groups,"
    " bool use_mask"
)
_TORCHVISION = {
    "nms": _BOXES,
    "qnms": _BOXES,
    "roi_align": f"({_ROI}, int sampling_ratio, bool aligned) -> Tensor",
    "qroi_align": f"({_ROI}, int sampling_ratio, bool aligned) -> Tensor",
    "_roi_align_backward": f"(Tensor grad, Tensor rois, float spatial_scale, {_SIZES}, {_SHAPE}, int sampling_ratio,"
    " bool aligned) -> Tensor",
    "ps_roi_align": f"({_ROI}, int sampling_ratio) -> (Tensor, Tensor)",
    "_ps_roi_align_backward": f"(Tensor grad, Tensor rois, Tensor channel_mapping, float spatial_scale, {_SIZES},"
    f" int sampling_ratio, {_SHAPE}) -> Tensor",
    "roi_pool": f"({_ROI}) -> (Tensor, Tensor)",
    "_roi_pool_backward": f"(Tensor grad, Tensor rois, Tensor argmax, float spatial_scale, {_SIZES}, {_SHAPE})"
    " -> Tensor",
    "ps_roi_pool": f"({_ROI}) -> (Tensor, Tensor)",
    "_ps_roi_pool_backward": f"(Tensor grad, Tensor rois, Tensor channel_mapping, float spatial_scale, {_SIZES},"
    f" {_SHAPE}) -> Tensor",
    "deform_conv2d": f"({_DEFORM}) -> Tensor",
    "_deform_conv2d_backward": f"(Tensor grad, {_DEFORM}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
}
_declared: list[torch.library.Library] = []  # a library's operators are removed together with it


class AtImport(MetaPathFinder):
    """A finder that patches packages when they are found; insert it as the first of ``sys.meta_path``.

    Args:
        redirection: Where the script's writes go, for packages that open files themselves; None: they go nowhere else.
    """

    def __init__(self, redirection: Redirection | None = None) -> None:
        self._changes: dict[str, Callable[[ModuleType], None]] = {TRANSFORMERS_UTILS: _treat_as_real}
        if redirection is not None:
            self._changes["pyarrow"] = partial(_read_redirected, redirection)
            self._changes["safetensors"] = partial(_refuse_writes, redirection)
            self._changes["safetensors.torch"] = _refuse_without_data

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Let the other finders find a module, and patch it once it has run."""
        spec = PathFinder.find_spec(fullname, path, target) if fullname in {*self._changes, "torchvision"} else None
        if spec is None or spec.loader is None:
            return None
        if fullname == "torchvision":
            if not _declared:  # also called when code only checks whether the package exists
                _declare_operators(spec)
            return None
        run, change = spec.loader.exec_module, self._changes[fullname]

        def run_and_change(module: ModuleType) -> None:
            run(module)
            change(module)

        spec.loader.exec_module = run_and_change  # type: ignore[method-assign]
        return spec


def _read_redirected(redirection: Redirection, pyarrow: ModuleType) -> None:
    """Redirect pyarrow's reads, which C++ performs: `datasets` reads files that it has just written."""
    memory_map = pyarrow.memory_map
    pyarrow.memory_map = lambda path, *args: memory_map(redirection.to_read(path), *args)  # type: ignore[attr-defined]


def _refuse_writes(redirection: Redirection, safetensors: ModuleType) -> None:
    """Refuse safetensors' writes, which Rust performs: its modules take the function from here."""
    write = safetensors.serialize_file

    def serialize_file(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> None:
        redirection.refuse_write_of("safetensors", filename)
        write(tensors, filename, *args, **kwargs)

    safetensors.serialize_file = serialize_file  # type: ignore[attr-defined]


def _refuse_without_data(module: ModuleType) -> None:
    """Refuse tensors without data, whose addresses Rust would read."""

    def refusing(save: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(save)
        def saved(tensors: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
            blank = next((name for name, each in tensors.items() if isinstance(each, FakeTensor)), None)
            if blank is not None:
                raise StateError(
                    f"safetensors.torch.{save.__name__}(tensors, ...)",
                    got=f"a tensor without data, {blank!r}, whose bytes safetensors reads itself",
                    expected="tensors with data",
                    fix=f"{WITHOUT_WRITE}.",
                )
            return save(tensors, *args, **kwargs)

        return saved

    for name in ("save", "save_file"):
        setattr(module, name, refusing(getattr(module, name)))


def _treat_as_real(utils: ModuleType) -> None:
    """Make transformers treat fake tensors as tensors with data; see `memkit._simulation.simulation`."""
    utils.is_fake_tensor = lambda _: False  # type: ignore[attr-defined]


def _declare_operators(spec: ModuleSpec) -> None:
    """Declare torchvision's operators if its compiled part was built for another PyTorch (a CUDA wheel).

    Without them `import torchvision` fails; datasets, transforms and models need none of them.
    """
    for compiled in Path(str(spec.origin)).parent.glob("_C.*"):
        try:
            torch.ops.load_library(compiled)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        except OSError:
            library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's own
            for name, signature in _TORCHVISION.items():
                library.define(f"{name}{signature}")  # type: ignore[no-untyped-call]
            _declared.append(library)
