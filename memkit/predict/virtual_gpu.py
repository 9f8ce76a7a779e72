"""`VirtualGPU`: run the user's own code on a simulated GPU."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from memkit._charts.overview import Overview, Overviewed
from memkit._core.errors import StateError
from memkit._core.foreign import PEAK, SUMMARY
from memkit._core.printable import counted
from memkit._core.protocols import Uncopied
from memkit._core.units import format_bytes
from memkit._core.words import guided
from memkit._machine.files import write_bytes
from memkit._recorder.recorder import Recorder
from memkit._recorder.recording import Category
from memkit._simulation.cuda.allocator import AllocatorSettings
from memkit._simulation.cuda.tensors import CARD
from memkit._simulation.leftovers import empty_caches, patched
from memkit._simulation.simulation import Gpu, Record, Simulation
from memkit._simulation.tensors import check_selected_fraction
from memkit._torch.cuda import rules_of
from memkit._torch.modules import APPLY, buffers_of, parameters_of
from memkit.predict.estimate import MemoryEstimate
from memkit.predict.gpus import GPU, capability_of, look_up
from memkit.predict.words import GPU_WORDS

_ABSENT = {
    "gpu.peak_bytes": PEAK,
    "gpu.allocated_bytes": "allocated memory_allocated current",
    "gpu.reserved_peak_bytes": "reserved reserved_peak max_memory_reserved reserved_bytes",
    "print(gpu.estimate())": f"{SUMMARY} explain memory_summary",
    "with mk.VirtualGPU('RTX 4090') as gpu: ...": "start run __call__",
    "gpu.save_snapshot('run.pickle')": "snapshot",
    "gpu.estimate().fits('RTX 4090')": "fits",
}


@guided(words=GPU_WORDS, absent=_ABSENT, methods=("save_snapshot",))
class VirtualGPU(Uncopied, Overviewed):
    """A context in which ``cuda`` is a simulated GPU.

    Code inside builds models, moves them with ``.cuda()`` or ``.to("cuda")`` and runs training steps as it would on the
    GPU: the same operators, autocast, streams and `torch.cuda` queries. Tensors on the GPU have sizes but no data; host
    tensors have data, except for floating point tensors of more than 1 MiB that PyTorch fills (the weights of a new
    model). Memory comes from a model of PyTorch's allocator, and where the GPU would run out,
    `torch.OutOfMemoryError` is raised at the same line with the same figures. The scratch memory inside cuDNN's
    convolutions is counted only with ``torch.backends.cudnn.benchmark = True``, by a rule derived from recorded runs;
    otherwise it is left out: see ``docs/virtual-gpu.md``.

    Where code reads a number from the GPU (``loss.item()``), the answer is 1, or False for a truth value; `guesses`
    counts these. The block leaves no change in PyTorch; tensors on the GPU are useless after it. Modules built outside
    that were moved inside have their data back afterwards.

    Only one can be active in a process: it changes the meaning of ``cuda`` for all threads.

    Args:
        gpu: A GPU name that `memkit.find_gpu` accepts, or a `GPU`. ``"cuda"`` is the GPU of this machine.
        selected_fraction: As for `memkit.estimate_memory_usage`.
        allocator_settings: The value of ``PYTORCH_ALLOC_CONF``, such as ``"expandable_segments:True"``, or an
            `AllocatorSettings`; "" is torch's own. None: those of this process's environment.
        torch: The version of PyTorch whose CUDA build is simulated, such as ``"2.6"``. Versions differ in attention,
            cuBLAS's workspaces, RMSNorm and the allocator's options, as ``docs/versions.md`` says. The operators
            themselves are those of the installed version. None: the installed version.
        cudnn: The version of cuDNN, such as ``"9.1"``. None: the version that this PyTorch's wheel ships with.

    Raises:
        InputError: No GPU has this name.
        InputTypeError: ``gpu`` is neither text nor a `GPU`.
        ConfigError: The GPU is not an NVIDIA GPU, so the memory of its operators is unknown; ``allocator_settings``
            holds an unknown option; ``selected_fraction`` is not in (0, 1]; or a version is invalid.

    Attributes:
        gpu: The GPU.
        memory: The memory of its tensors: the allocator, the current stream.
        guesses: How often each ``"operator at line"`` was answered without data.

    Memory cost:
        Host tensors; about 1 kB for each operator.

    Source:
        `docs/virtual-gpu.md`.

    Example:
        >>> import torch
        >>> import memkit as mk
        >>> with mk.VirtualGPU("RTX 4090", torch="2.13") as gpu:
        ...     model = torch.nn.Linear(4096, 4096).cuda()
        ...     optimizer = torch.optim.AdamW(model.parameters())
        ...     for _ in range(2):
        ...         loss = model(torch.randn(64, 4096, device="cuda")).square().mean()
        ...         loss.backward()
        ...         optimizer.step()
        >>> gpu.peak_bytes // 2**20, gpu.reserved_peak_bytes // 2**20
        (338, 348)
    """

    instead = "keep its figures, such as peak_bytes, or call save_snapshot(path)."

    def __init__(
        self,
        gpu: str | GPU,
        *,
        selected_fraction: float | None = None,
        allocator_settings: AllocatorSettings | str | None = None,
        torch: str | None = None,
        cudnn: str | None = None,
    ) -> None:
        self.gpu = look_up(gpu, f"VirtualGPU({gpu.name if isinstance(gpu, GPU) else repr(gpu)})")
        capability_of(self.gpu)
        rules = rules_of(torch, cudnn)
        rules.refuse_unknown_options(_options_of(allocator_settings))
        place = Gpu(
            self.gpu,
            capacity_bytes=self.gpu.total_bytes,
            settings=allocator_settings,
            rules=rules,
            has_history=True,
        )
        self.memory = place.memory
        check_selected_fraction("VirtualGPU(...)", selected_fraction)
        self._simulation = Simulation(place, selected_fraction=selected_fraction)
        self.guesses = self._simulation.tensors.guesses
        self._watch = self._simulation.watch()
        self._stack = ExitStack()
        self._was_entered = False

    def __enter__(self) -> Self:
        if self._was_entered:
            raise StateError(
                "with VirtualGPU(...)",
                got="a VirtualGPU that was already entered",
                expected="one `with` block for each VirtualGPU",
                fix="create a new one: with VirtualGPU(...).",
            )
        self._was_entered = True
        with ExitStack() as stack:
            stack.enter_context(self._simulation.running())
            stack.enter_context(self._watch)
            stack.enter_context(_noting_modules(self._watch.recorder))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        empty_caches(self._simulation.tensors)

    def _overview(self) -> Overview:
        total = format_bytes(self.gpu.total_bytes)
        num_guesses = self.guesses.total()
        rows = [
            ("allocated now", format_bytes(self.allocated_bytes)),
            ("reserved, at most", format_bytes(self.reserved_peak_bytes)),
            ("driver and libraries", format_bytes(self.gpu.context_bytes)),
            *[("answered without data", counted(num_guesses, "time"))] * bool(num_guesses),
        ]
        return Overview(f"virtual {self.gpu.name}: peak {format_bytes(self.peak_bytes)} of {total}", rows)

    @property
    def device(self) -> torch.device:
        """``cuda:0``, for code that takes its device as an argument."""
        return CARD

    @property
    def allocated_bytes(self) -> int:
        """Bytes now in tensors on the GPU and in library workspaces."""
        return self.memory.allocator.allocated_bytes

    @property
    def peak_bytes(self) -> int:
        """Peak of `allocated_bytes`, as ``torch.cuda.max_memory_allocated`` would report it."""
        return self.memory.allocator.peak_allocated_bytes

    @property
    def reserved_peak_bytes(self) -> int:
        """Peak of the reserved bytes, as ``torch.cuda.max_memory_reserved`` would report it."""
        return self.memory.allocator.peak_reserved_bytes

    @property
    def timeline(self) -> NDArray[np.int64]:
        """Allocated bytes after each allocation or free of a block, int64, shape ``(num_events,)``."""
        return np.asarray(self.memory.timeline, dtype=np.int64)

    def save_snapshot(self, path: str | os.PathLike[str]) -> None:
        """Write everything the allocator has done so far as a CUDA memory snapshot, for the usual snapshot viewers.

        pytorch.org/memory_viz and ``python -m torch.cuda._memory_viz`` open it, and so does `read_memory_events`. Where
        a real snapshot has a stack, it has the operator, the module and the user's line. It has no times, because
        simulated work takes none. Inside the block, ``torch.cuda.memory._dump_snapshot`` writes the same.

        Args:
            path: The file; an existing file is replaced atomically.

        Raises:
            InputError: ``path`` is a directory, or lies in one that does not exist.
            OSError: The file cannot be written.

        Example:
            >>> import pathlib, tempfile
            >>> import torch
            >>> import memkit as mk
            >>> path = pathlib.Path(tempfile.mkdtemp(), "run.pickle")
            >>> with mk.VirtualGPU("RTX 4090") as gpu:
            ...     batch = torch.ones(1_000_000, device="cuda")
            >>> gpu.save_snapshot(path)
            >>> mk.report.read_memory_events(path).events[-1].requested_bytes
            4000000
        """
        write_bytes(path, pickle.dumps(self.memory.snapshot(), protocol=4))

    def estimate(self) -> MemoryEstimate:
        """Return the GPU's memory at the peak, broken down by category, module and line.

        Returns:
            The estimate, as from `memkit.estimate_memory_usage`, for everything run so far.
        """
        return MemoryEstimate.of(self.record())

    def record(self) -> Record:
        """Return the record so far: storages from allocation to free, and the allocator's figures."""
        return self._watch.record()


def _options_of(settings: AllocatorSettings | str | None) -> str:
    """Return the names of set options that not every version knows; text settings are returned unchanged."""
    if not isinstance(settings, AllocatorSettings):
        return str(settings or "")
    is_set = {
        "large_segment_size_mb": settings.large_segment_bytes != AllocatorSettings().large_segment_bytes,
        "per_process_memory_fraction": settings.memory_fraction != 1,
    }
    return ",".join(name for name, is_given in is_set.items() if is_given)


@contextmanager
def _noting_modules(recorder: Recorder) -> Iterator[None]:
    """Label parameters and buffers as soon as a module has them on the GPU, before any step uses them."""
    apply = getattr(nn.Module, APPLY)

    @wraps(apply)
    def applied(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        moved: nn.Module = apply(module, *args, **kwargs)
        note(parameters_of(moved).values(), "parameter")
        note(buffers_of(moved).values(), "buffer")
        return moved

    def note(tensors: Iterable[Any], category: Category) -> None:
        recorder.label([each for each in tensors if each is not None], category)

    def note_parameter(module: nn.Module, name: str, parameter: Any) -> None:  # noqa: ARG001 - torch's own form
        note([parameter], "parameter")

    def note_buffer(module: nn.Module, name: str, buffer: Any) -> None:  # noqa: ARG001 - torch's own form
        note([buffer], "buffer")

    with ExitStack() as stack:
        stack.callback(register_module_parameter_registration_hook(note_parameter).remove)
        stack.callback(register_module_buffer_registration_hook(note_buffer).remove)
        stack.enter_context(patched(nn.Module, APPLY, applied))
        yield
