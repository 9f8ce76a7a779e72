"""The memory of a simulated GPU: blocks of storages while they live, and scratch memory inside kernels.

Kernels use three kinds of scratch memory: allocations in an operator's own code (`_KERNELS`); partial sums and counters
of reductions in which many thread blocks share a result (`setReduceConfig` in ATen/native/cuda/Reduce.cuh and the order
of dimensions in ATen/TensorIterator.cpp); and workspaces of cuDNN's convolutions, given as an interval because cuDNN
chooses its algorithm at run time. The lower end is zero: implicit GEMM needs none. The upper end is the need of cuDNN's
known algorithms, each named where it is computed. It is not a proven bound: `docs/virtual-gpu.md` lists which published
figures lie within it and which do not. With ``cudnn.benchmark`` the fastest algorithm's workspace is also taken from
the GPU (`tuned_workspaces`).
"""

from __future__ import annotations

import math
import weakref
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, islice, pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from memkit._core.protocols import SimulatedGpu
from memkit._core.units import MIB
from memkit._recorder.recorder import Recorder
from memkit._simulation.cuda.allocator import Block, CachingAllocator, shares_large_segment
from memkit._simulation.cuda.ctc import ctc_backward_order, ctc_order
from memkit._simulation.cuda.history import Asker, History
from memkit._simulation.cuda.recurrent import (
    RECURRENT,
    BlockOrder,
    recurrent_backward_order,
    recurrent_bound,
    recurrent_order,
)
from memkit._simulation.cuda.selection import SELECTING
from memkit._simulation.cuda.tensors import CARD, convolution_format, is_undivided, run_divided
from memkit._simulation.tensors import is_mask, is_matrix, masks_bytes, num_selected, selected_shape
from memkit._torch import aten
from memkit._torch.aten import overloads
from memkit._torch.cuda import Cards, Rules
from memkit._torch.dispatch import no_dispatch
from memkit._torch.fake import FakeTensor
from memkit._torch.graph import current_backward

_aten = torch.ops.aten
_NONE = 0  # at::Reduction
_MAX_OF_BAG = 2  # of `nn.EmbeddingBag`'s modes
_ATTENTION_TILE = 64
_SORTED_AT_ONCE = 3072  # rows that embedding's backward accumulates without sorting
_FLOAT, _INDEX = 4, 8  # bytes
_MOST_THREADS = 512  # per block
_WARP = 32
_VECTOR = 4  # numbers that a thread loads at a time
_FEWEST_VALUES, _MOST_VALUES = 16, 256  # values that a thread reduces
_COUNTER = 4  # bytes
_WITH_INDEX, _MOMENTS = 16, 16  # bytes of an accumulator: a value and its index; mean and squares
# Scratch memory of convolutions of any size, as recorded runs show: split sums and tables (4 MiB, 128 MiB).
_FIXED_BYTES = 128 * MIB
# Without `cudnn.benchmark`: channels of images, taps of a 7x7 window, and, where float32 results are written in order,
# channels of the input and positions of the output.
_FEW_CHANNELS, _LARGE_WINDOW, _SLICE, _MOST_POSITIONS = 4, 49, 64, 2**15
_HOPPER = 9  # major number of its compute capability
_ALIGNED = 16  # bytes, of a channel's positions where an image is a matrix as it lies
_TILE_ACROSS, _TILE_DOWN = 128, 64  # of the matrix product that a weight's gradient is
_TILE = 4  # non-fused Winograd F(4x4, 3x3): 36 numbers for each tile of 16 positions
Phases: TypeAlias = tuple[tuple[int, ...], ...]
_EMPTY_CACHE = 0  # no request is for zero bytes
_LOAN = 2**62  # added to the bytes of scratch memory that a library can do without
_FINEST, _FINEST_SHARE = 2 * MIB, 256  # how exactly the least is sought: a segment's rounding, or a share of the whole
_HELD_BEFORE = (2 * MIB, 4 * MIB, 6 * MIB, 8 * MIB)
"""Bytes that libraries may hold beside what is known, for `ReservedRange`.

Only blocks of 1 to 10 MiB share segments. What is smaller or larger moves no block of a model.
"""


MULTIPLYING = overloads("addbmm", "addmm", "addmv", "baddbmm", "bmm", "dot", "mm", "mv", "vdot", "_scaled_mm")
"""Operators that use a cuBLAS handle."""
CONVOLVING = frozenset({_aten.convolution.default, _aten.convolution_backward.default})
"""Operators of `convolution_bound`."""
_LOSSES = overloads("mse_loss", "smooth_l1_loss", "soft_margin_loss", "binary_cross_entropy", "huber_loss")
_NO_BACKWARD = -1
_SMALL_WORKSPACE, _LARGE_WORKSPACE = 2 * 4096 * 1024 + 8 * 16 * 1024, 8 * 4096 * 1024  # for cuBLAS
_LT_WORKSPACE = 1024 * 1024


class CudaMemory:
    """Drives an allocator by the allocations and frees of one GPU's tensors.

    Attributes:
        allocator: The model of the GPU's allocator.
        workspace_bytes: Workspace bytes held by library handles.
        timeline: Allocated bytes after each allocation or free of a block.
        stream: Number of the current stream, for which blocks are allocated.
        history: The allocator's actions; None if they are not kept.
        asker: Returns the origin of the current request.
        shortages: Origin of each request that ran out of memory.
        on_request: Called with the bytes of each request.
        convolves: Whether a convolution or a recurrent layer ran whose scratch memory is not fully known.
        tuned: The convolutions for which ``cudnn.benchmark`` has tried all algorithms.
    """

    def __init__(
        self, card: SimulatedGpu, allocator: CachingAllocator, rules: Rules, history: History | None = None
    ) -> None:
        self.allocator = allocator
        self.history = history
        self.asker: Callable[[], Asker] = lambda: Asker("", None)
        self.shortages: list[Asker] = []
        self.on_request: Callable[[int], None] | None = None
        self.workspace_bytes = 0
        self.timeline: list[int] = []
        self.stream = 0
        self._capability = capability = card.compute_capability or (0, 0)
        self._processors = Processors.of(capability, card.num_multiprocessors)
        is_large = _is_one_of(rules.large_workspaces, capability)
        by_rule, measured = _LARGE_WORKSPACE if is_large else _SMALL_WORKSPACE, card.cublas_workspace_bytes
        # A GPU that was calibrated under another setting has its own size.
        is_own = measured is not None and measured not in (_LARGE_WORKSPACE, _SMALL_WORKSPACE)
        self._rules, self._workspace_size = rules, int(measured or 0) if is_own else by_rule
        self._handles: set[tuple[str, bool]] = set()
        self._blocks: dict[int, tuple[weakref.ref[torch.UntypedStorage], Block]] = {}
        self._requests = RequestLog()
        self._operator: Callable[[], Any] = lambda: ""
        self._waiting: dict[int, torch.UntypedStorage] = {}  # results of an operator of `_ORDERED`
        self._num_before = 0  # requests before the peaks were reset
        self.convolves = False
        self.tuned: set[tuple[Any, ...]] = set()

    def snapshot(self) -> dict[str, Any]:
        """Return what ``torch.cuda.memory._snapshot`` would; without a history it is empty."""
        return {"segments": [], "device_traces": [[]]} if self.history is None else self.history.snapshot()

    def empty_cache(self) -> None:
        """Free all cached segments, as ``torch.cuda.empty_cache`` does."""
        self._requests.emptied()
        self.allocator.empty_cache()

    def least_reserved(self) -> LeastReserved:
        """Return the least bytes that the allocator must be able to reserve for all that was done so far."""
        return LeastReserved(self._requests, self.allocator)

    def reserved_range(self, *, of_all: bool = False) -> ReservedRange:
        """Return how far what is reserved depends on a few MiB at the start: since the peaks were reset, or ever."""
        return ReservedRange(self._requests, self.allocator, 0 if of_all else self._num_before)

    def begin(self, recorder: Recorder) -> None:
        """Follow a recorder from now on, and reset the peaks."""
        self._operator = lambda: recorder.operator
        self.asker = lambda: Asker(str(recorder.operator or ""), recorder.moment().place)
        self.reset_peaks()

    def reset_peaks(self) -> None:
        """Reset the peaks to the current figures."""
        self._num_before = len(self._requests)
        self.allocator.reset_peaks()

    def hold(self, storage: torch.UntypedStorage) -> None:
        """Allocate a block for a storage until it dies."""
        if id(storage) in self._blocks or not storage.nbytes():
            return
        if self._operator() in _ORDERED:
            self._waiting[id(storage)] = storage
        else:
            self._watch(storage, self._take(storage.nbytes()))

    def pass_on(self, key: int, storage: torch.UntypedStorage) -> None:
        """Transfer the block of the storage whose `id` is ``key`` to another storage."""
        if key in self._blocks:
            self._watch(storage, self._blocks.pop(key)[1])

    def resize(self, storage: torch.UntypedStorage) -> None:
        """Allocate a block of a storage's new size and free its old one."""
        old = self._blocks.pop(id(storage), None)
        self.hold(storage)
        if old is not None:
            self._give_back(old[1])

    def counts(self, device: torch.device) -> bool:
        """Whether a device is the simulated GPU."""
        return device.type == "cuda"

    def device_of(self, storage: torch.UntypedStorage) -> torch.device:  # noqa: ARG002 - a storage does not know it
        """Return the simulated GPU."""
        return CARD

    def run_inside(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
        """Allocate and free the scratch memory of an operator's kernels; return the bound of cuDNN's in addition."""
        if func not in TAKING or not (is_on_card(out) or is_on_card(args)):
            return 0
        if func in _ORDERED:
            return self._run_ordered(func, args, out)
        for phase in inside(func, args, self._processors, out):
            blocks = [self._take(num_bytes) for num_bytes in phase if num_bytes]
            if func in MULTIPLYING:
                blocks += map(self._take, self._workspaces(is_biased=adds_bias(func, args, kwargs, self._rules)))
            for block in reversed(blocks):  # the order in which C++ destroys locals
                self._give_back(block)
        if func not in CONVOLVING:
            return 0
        if torch.backends.cudnn.enabled:
            self._convolve(Convolution.of(func, args, out))
        return convolution_bound(func, args, out)

    def _run_ordered(self, func: Any, args: Sequence[Any], out: Any) -> int:
        try:
            self._run_in_order(in_order(func, args, out))
            if func not in _PARTLY_ON_HOST:
                self._hold_waiting()
        finally:
            self._waiting.clear()
        bound = recurrent_bound(func, args) if func in RECURRENT else 0
        self.convolves = self.convolves or bound > 0
        return bound

    def _run_in_order(self, order: BlockOrder) -> None:
        """Allocate an operator's results and its scratch memory."""
        blocks: list[Block | None] = []  # None for what needs no bytes
        try:
            for each in order:
                if each is None or (isinstance(each, int) and each < 0):
                    block = blocks.pop(-1 if each is None else each)
                    if block is not None:
                        self._give_back(block)
                elif isinstance(each, Tensor):
                    storage = self._waiting.pop(id(each.untyped_storage()), None)
                    if storage is not None:
                        self._watch(storage, self._take(storage.nbytes()))
                else:
                    blocks.append(self._take(each) if each else None)
        except torch.OutOfMemoryError:
            for block in reversed(blocks):
                if block is not None:
                    self._give_back(block)
            raise

    def _hold_waiting(self) -> None:
        """Allocate the results that the order of an operator leaves out, such as the parts of a sparse one."""
        for storage in self._waiting.values():
            self._watch(storage, self._take(storage.nbytes()))

    def _convolve(self, convolution: Convolution) -> None:
        """Allocate and free cuDNN's workspaces."""
        self.convolves = True
        if torch.backends.cudnn.benchmark:
            self._tune(convolution)
            taken = tuned_workspaces(convolution, self._capability, self._processors)
        else:
            taken = workspaces(convolution, self._capability, self._processors)
        for num_bytes in filter(None, taken):
            self._lend(num_bytes)

    def _tune(self, convolution: Convolution) -> None:
        """Empty the cache if ``cudnn.benchmark`` meets this convolution for the first time, as PyTorch does.

        The trial of all algorithms may have taken gigabytes: `findAlgorithms` in Conv_v7.cpp, `run_single_conv` in
        Conv_v8.cpp. The trial takes only free memory, and no run depends on it, so it is not simulated.
        """
        new = convolution.searches - self.tuned
        if new:
            self.tuned |= new
            self.empty_cache()

    def _lend(self, num_bytes: int) -> None:
        """Allocate and free scratch memory that cuDNN can do without: where there is no room, it takes less."""
        history = self.history
        if history is not None:
            history.stream = self.stream
        block = self.allocator.try_allocate(num_bytes, self.stream)
        self._requests.lent(num_bytes, self.stream)
        if block is None:
            return
        self.timeline.append(self.allocator.allocated_bytes)
        if history is not None:
            history.note_alloc(block.address, num_bytes, self.asker())
            history.note_free(block.address, num_bytes, self.stream)
        self.allocator.free(block)
        self.timeline.append(self.allocator.allocated_bytes)

    def divided(self, func: Any, args: Sequence[Any]) -> Callable[..., Any] | None:
        """Return a function that runs an operator's parts, if the operator was not decomposed."""
        return run_divided(func) if is_undivided(func) and is_on_card(args) else None

    def _workspaces(self, *, is_biased: bool) -> list[int]:
        """Return the libraries' workspaces for one matrix product; allocate permanent ones right away."""
        lt = self._rules.lt_workspace
        each = [_LT_WORKSPACE] if is_biased and lt == "each" else []
        if self._rules.keeps_workspaces:
            self._keep("cublas", self._workspace_size)
        elif not is_biased:
            each.append(self._workspace_size)
        if is_biased and lt == "kept":
            self._keep("cublaslt", _LT_WORKSPACE)
        return each

    def _keep(self, library: str, num_bytes: int) -> None:
        """Keep a workspace for each handle; autograd's thread has a handle of its own."""
        handle = library, current_backward() != _NO_BACKWARD
        if handle not in self._handles:
            self._handles.add(handle)
            self.workspace_bytes += self._take(num_bytes).num_bytes

    def _watch(self, storage: torch.UntypedStorage, block: Block) -> None:
        key = id(storage)
        self._blocks[key] = weakref.ref(storage, lambda _: self._died(key)), block

    def _died(self, key: int) -> None:
        self._give_back(self._blocks.pop(key)[1])

    def _take(self, num_bytes: int) -> Block:
        if self.on_request is not None:
            self.on_request(num_bytes)
        history = self.history
        asker = None if history is None else self.asker()
        if history is not None:
            history.stream = self.stream
        try:
            block = self.allocator.allocate(num_bytes, self.stream)
        except torch.OutOfMemoryError:
            asker = asker or self.asker()
            self.shortages.append(asker)
            if history is not None:
                history.note_shortage(num_bytes, asker)
            raise
        self._requests.took(block, num_bytes)
        if history is not None and asker is not None:
            history.note_alloc(block.address, num_bytes, asker)
        self.timeline.append(self.allocator.allocated_bytes)
        return block

    def _give_back(self, block: Block) -> None:
        if self.history is not None:
            self.history.note_free(block.address, block.requested_bytes, block.pool.stream)
        self._requests.freed(block)
        self.allocator.free(block)
        self.timeline.append(self.allocator.allocated_bytes)


class RequestLog:
    """The requests of a run, in order, so that they can be made again of another allocator.

    Memory cost:
        8 bytes for each allocation and each free.
    """

    def __init__(self) -> None:
        self._log = array("q")  # bytes of an allocation, or the complement of the position of the one that is freed
        self._streams: dict[int, int] = {}
        self._positions: dict[int, int] = {}  # of live blocks, by address

    def took(self, block: Block, num_bytes: int) -> None:
        """Note an allocation."""
        self._positions[block.address] = len(self._log)
        self._append(num_bytes, block.pool.stream)

    def freed(self, block: Block) -> None:
        """Note that a block was freed."""
        self._log.append(~self._positions.pop(block.address))

    def lent(self, num_bytes: int, stream: int) -> None:
        """Note that a block was asked for, and freed again if there was room for it."""
        self._append(_LOAN + num_bytes, stream)

    def emptied(self) -> None:
        """Note that the cache was emptied."""
        self._log.append(_EMPTY_CACHE)

    def _append(self, entry: int, stream: int) -> None:
        if stream:
            self._streams[len(self._log)] = stream
        self._log.append(entry)

    def __len__(self) -> int:
        return len(self._log)

    def first_shared(self, num_requests: int) -> int | None:
        """Return the position of the first block that shares a large segment; None if there is none."""
        taken = enumerate(islice(self._log, num_requests))
        return next((position for position, entry in taken if shares_large_segment(entry)), None)

    def stream_at(self, position: int) -> int:
        """Return the stream of an allocation."""
        return self._streams.get(position, 0)

    def make_again(
        self, allocator: CachingAllocator, blocks: dict[int, Block], start: int, stop: int, *, lends: bool
    ) -> bool:
        """Make the requests from ``start`` to ``stop`` of an allocator; return whether it can meet them.

        Args:
            allocator: It has met the requests before ``start``.
            blocks: The live blocks by position, which are kept up to date.
            start: Position of the first request.
            stop: Position after the last one.
            lends: Whether it lends what libraries can do without.
        """
        for position, entry in enumerate(islice(self._log, start, stop), start):
            if entry > _LOAN:
                block = allocator.try_allocate(entry - _LOAN, self.stream_at(position)) if lends else None
                if block is not None:
                    allocator.free(block)
            elif entry > 0:
                block = allocator.try_allocate(entry, self.stream_at(position))
                if block is None:
                    return False
                blocks[position] = block
            elif entry < 0:
                allocator.free(blocks.pop(~entry))
            else:
                allocator.empty_cache()
        return True


class LeastReserved:
    """The least bytes that an allocator must be able to reserve for the requests so far, rounded up.

    Reserved memory is elastic: where the driver has no more, torch's allocator frees the segments that it caches and
    tries again. So a run may finish, more slowly, with less than it reserves where memory is plenty. How much less
    follows from its requests alone, which are made again on smaller and smaller cards when the bytes are first asked
    for.

    Args:
        requests: The requests.
        allocator: The one that met them.
    """

    def __init__(self, requests: RequestLog, allocator: CachingAllocator) -> None:
        self._requests, self._num_requests, self._settings = requests, len(requests), allocator.settings
        self._low, self._high = allocator.highest_allocated_bytes, allocator.highest_reserved_bytes

    def __call__(self) -> int:
        """Return the bytes."""
        step = max(_FINEST, self._high // _FINEST_SHARE // _FINEST * _FINEST)
        while self._high - self._low > step:
            middle = (self._low + self._high) // 2 // _FINEST * _FINEST
            if self._ends_in(middle):
                self._high = middle
            else:
                self._low = middle
        return self._high

    def _ends_in(self, capacity_bytes: int) -> bool:
        allocator = CachingAllocator(capacity_bytes, settings=self._settings)
        allocator.set_memory_fraction(1.0)
        return self._requests.make_again(allocator, {}, 0, self._num_requests, lends=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (int, self())  # a copy knows the answer


class ReservedRange:
    """The least and most bytes that an allocator reserves for the requests so far, whatever libraries hold beside.

    Blocks of 1 to 10 MiB share segments, and lie in the remainders of larger ones. So where such a block lies may
    decide whether a block of hundreds of MiB finds room, and this may depend on a few MiB that were taken long before:
    workspaces and handles of libraries, which differ between their versions. The requests are made again with
    `_HELD_BEFORE` of them next to the first block that shares a segment. They are made when the bytes are first asked
    for.

    Args:
        requests: The requests.
        allocator: The one that met them.
        num_before: How many of them came before what is looked at.
    """

    def __init__(self, requests: RequestLog, allocator: CachingAllocator, num_before: int) -> None:
        self._requests, self._num_requests, self._num_before = requests, len(requests), num_before
        self._empty = allocator.make_another()
        self._found = {allocator.peak_reserved_bytes if num_before else allocator.highest_reserved_bytes}
        self._is_sought = False

    def __call__(self) -> tuple[int, int]:
        """Return the bytes, least first: the same twice if no more is reserved, and no less."""
        first = None if self._is_sought else self._requests.first_shared(self._num_requests)
        self._is_sought = True
        if first is not None:
            self._found |= {reserved for held in _HELD_BEFORE if (reserved := self._with(held, first)) is not None}
        return min(self._found), max(self._found)

    def _with(self, held_bytes: int, first: int) -> int | None:
        """Return what is reserved with a block of this size before the first one; None where there is no room."""
        allocator, blocks = self._empty.make_another(), dict[int, Block]()
        for start, stop in pairwise((*sorted({0, first, self._num_before}), self._num_requests)):
            if start == self._num_before:
                allocator.reset_peaks()
            if start == first:
                allocator.try_allocate(held_bytes, self._requests.stream_at(first))
            if not self._requests.make_again(allocator, blocks, start, stop, lends=True):
                return None
        return allocator.peak_reserved_bytes

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (tuple, self())  # a copy knows the answer


def is_on_card(value: Any) -> bool:
    """Whether a tensor, or the first of several, is on the simulated GPU."""
    if isinstance(value, (tuple, list)):
        return any(is_on_card(item) for item in value)
    return isinstance(value, torch.Tensor) and value.device.type == "cuda"


# ------------------------------------------------------------------------------------------------------------ kernels


def _is_one_of(cards: tuple[Cards, ...], capability: tuple[int, int]) -> bool:
    return any(capability[0] == major and minor in (None, capability[1]) for major, minor in cards)


def inside(func: Any, args: Sequence[Any], processors: Processors, out: Any = None) -> Phases:
    """Return the bytes of the blocks that a kernel allocates and frees before it returns.

    Returns:
        Consecutive phases: blocks that are live at the same time, in allocation order.
    """
    kernel = _KERNELS.get(func)
    if kernel is not None:
        return kernel(args, processors)
    cast = _cast_bytes(args[0], out) if func in _CASTING else 0
    carried = out.element_size() if cast else 0
    return ((cast, *reduction_workspace(func, args, processors, carried)),)


def in_order(func: Any, args: Sequence[Any], out: Any) -> BlockOrder:
    """Return what an operator allocates and frees, where its results do not come first."""
    return _ORDERED[func](args, out)


def _cast_bytes(x: Tensor, out: Tensor) -> int:
    """`make_reduction_from_ty` in ReduceOps.cpp: an input of another dtype is cast first, such as a mask to integers.

    The kernels of sums of half precision numbers accumulate them in float32 themselves.
    """
    is_widened = x.dtype in (torch.float16, torch.bfloat16) and out.dtype is torch.float32
    return 0 if out.dtype is x.dtype or is_widened else x.numel() * out.element_size()


def _product(args: Sequence[Any], _: Processors) -> Phases:
    """`prepare_matrix_for_cublas`: a matrix whose rows and columns both have gaps is copied first."""
    matrices = [arg for arg in args if isinstance(arg, Tensor)][-2:]
    return (tuple(matrix.numel() * matrix.element_size() for matrix in matrices if not is_matrix(matrix)),)


def adds_bias(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], rules: Rules) -> bool:
    """Whether cuBLASLt multiplies and adds a bias in one kernel: `addmm_out_cuda_impl` in Blas.cpp."""
    if func is not _aten.addmm.default or kwargs.get("beta", 1) != 1:
        return False
    bias, left, right = args[:3]
    is_wide = min(right.shape) > 1 and (rules.version < (2, 10) or min(left.shape) > 1)
    return bias.dim() == 1 and bias.is_contiguous() and bias.shape[0] == right.shape[1] and is_wide


def _loss(args: Sequence[Any], processors: Processors) -> Phases:
    """The unreduced losses, if the loss is reduced, and what their mean takes."""
    if next((arg for arg in reversed(args) if isinstance(arg, int)), 1) == _NONE:
        return ()
    mean = reduction_workspace(_aten.mean.default, args[:1], processors)
    return ((args[0].numel() * args[0].element_size(), *mean),)


def _log_of_sum(args: Sequence[Any], _: Processors) -> Phases:
    """`logsumexp_out_impl` in ReduceOps.cpp: the largest numbers, and the exponentials."""
    x, dims = args[0], args[1]
    dims = [dims] if isinstance(dims, int) else dims or range(x.dim())
    itemsize = x.element_size() if x.is_floating_point() or x.is_complex() else _FLOAT
    num_summed = math.prod(x.shape[dim] for dim in dims) if x.dim() else 1
    return ((x.numel() // max(1, num_summed) * itemsize, x.numel() * itemsize),)


def _roll(args: Sequence[Any], _: Processors) -> Phases:
    """`roll_common` in TensorTransformations.h: one dimension after the other, and a copy of what is not contiguous."""
    x, num_dims = args[0], len(args[1])
    num_copies = max(num_dims - 1, 0 if x.is_contiguous() else 1)
    return ((x.numel() * x.element_size(),) * num_copies,) if num_copies else ()


def _flash_backward(args: Sequence[Any], _: Processors) -> Phases:
    """`mha_bwd` in flash_api.cpp: sums of the rows, and the gradient of the queries in float32."""
    batch, heads, rows, width = args[1].shape
    rows = math.ceil(rows / 128) * 128
    width = math.ceil(width / 32) * 32 if width <= 192 else 256
    return ((batch * heads * rows * _FLOAT, batch * heads * rows * width * _FLOAT),)


def _efficient(args: Sequence[Any], out: Sequence[Tensor]) -> BlockOrder:
    """`_efficient_attention_forward`: the random state is on the card with dropout only."""
    has_dropout = len(args) > 5 and args[5] > 0  # arguments at the end that have their default are left out
    return tuple(out[: 4 if has_dropout else 2])


def _efficient_backward(args: Sequence[Any], out: Sequence[Any]) -> BlockOrder:
    """`_efficient_attention_backward`: half precision accumulates in float32.

    In float32 output times gradient is summed up first, and all of it lives until the sum has its order; then the
    queries' gradient is added up in tiles, each with a lock of 16 bytes (`GradQTempStorage` in kernel_backward.h).
    """
    grad, query, output = args[0], args[1], args[5]
    batch, heads, rows, width = query.shape
    delta = batch * heads * rows * _FLOAT
    made = _copied_bytes(grad.transpose(1, 2)), *(each for each in out if each is not None)
    if query.dtype is not torch.float32:
        return *made, delta, output.numel() * _FLOAT, -2, None, None
    tile = _ATTENTION_TILE if width <= _ATTENTION_TILE else 2 * _ATTENTION_TILE
    tiles = batch * heads * math.ceil(rows / _ATTENTION_TILE) * math.ceil(width / tile)
    workspace = tiles * (_ATTENTION_TILE * tile * _FLOAT + 16)
    return *made, output.numel() * _FLOAT, delta, delta, -2, -2, workspace, -2, None, None


def _layer_norm_backward(args: Sequence[Any], processors: Processors) -> Phases:
    """`LaunchGammaBetaBackwardCUDAKernel`: many short rows are first summed in groups."""
    width = math.prod(args[2])
    rows, columns = args[1].numel() // width, math.ceil(width / 32)
    copies = tuple(each.numel() * each.element_size() for each in args[:2] if not each.is_contiguous())
    if rows <= 64 * 1024 or width // 32 >= processors.multiprocessors // 2:
        return (copies,) if copies else ()
    groups = min(32 * 1024 // columns, math.ceil(rows / 32))
    return ((*copies, *(groups * width * args[1].element_size(),) * sum(args[-1][1:])),)


def _layer_norm(args: Sequence[Any], _: Processors) -> Phases:
    """`layer_norm_cuda`: tensors that are not contiguous are copied first."""
    return () if args[0].is_contiguous() else ((args[0].numel() * args[0].element_size(),),)


def _group_norm(args: Sequence[Any], _: Processors) -> Phases:
    """Scale and shift of each channel."""
    rows, channels, size = args[3:6]
    has_weights = args[1] is not None or args[2] is not None
    return ((rows * channels * _FLOAT,) * 2,) if size > 1 and has_weights else ()


def _group_norm_backward(args: Sequence[Any], _: Processors) -> Phases:
    """Two sums per channel; for the input's gradient two factors per group and one per channel."""
    rows, channels, size, groups = args[5:9]
    if size == 1:
        return ()
    per_channel, per_group = rows * channels * _FLOAT, rows * groups * _FLOAT
    factors = (per_group, per_group, per_channel if args[4] is not None else 0) if args[9][0] else ()
    return ((per_channel, per_channel, *factors),)


def _dropout(_: Sequence[Any], out: Sequence[Tensor]) -> BlockOrder:
    """`dropout_cuda`: the mask first."""
    return tuple(reversed(out))


def _cudnn_attention(_: Sequence[Any], out: Sequence[Any]) -> BlockOrder:
    """`_scaled_dot_product_cudnn_attention_cuda`: the random state first; on an H100 the workspace is 256 bytes."""
    output, sums, *_, seed, offset, _ = out
    return seed, offset, output, *((sums,) if sums is not None else ()), 256, None


def _cudnn_attention_backward(args: Sequence[Any], _: Processors) -> Phases:
    """The workspace of `run_cudnn_SDP_bprop`: the gradient of the queries in float32, sums of the rows, 256 bytes more.

    So on an H100 with cuDNN 9.19, for five shapes, with masks and dropout and without.
    """
    batch, heads, rows, width = args[1].shape
    return ((batch * heads * rows * (width + 1) * _FLOAT + 256,),)


def _embedding(args: Sequence[Any], out: Tensor) -> BlockOrder:
    """`at::embedding`: indices of several dimensions are first made one row."""
    return (_copied_bytes(args[1]) if args[1].dim() != 1 else 0), out, None


def _copied_bytes(tensor: Tensor) -> int:
    """Return the bytes of a contiguous copy; 0 if the tensor is contiguous."""
    return 0 if tensor.is_contiguous() else tensor.numel() * tensor.element_size()


def _embedding_backward(args: Sequence[Any], out: Tensor) -> BlockOrder:
    """`embedding_dense_backward_cuda`: few rows are added in order; more are sorted, then summed in groups of ten."""
    grad, indices, num_weights = args[:3]
    copies = _copied_bytes(indices), _copied_bytes(grad)
    if indices.numel() <= _SORTED_AT_ONCE and not args[4]:
        return *copies, out, None, None
    return *copies, *_summed_in_tens(grad, indices, num_weights, out), None, None


def _bag_backward(args: Sequence[Any], out: Tensor) -> BlockOrder:
    """`_embedding_bag_dense_backward_cuda`: sums and means as for an embedding, however few rows there are."""
    grad, indices, num_weights, mode, is_sparse = args[0], args[1], args[6], args[8], args[9]
    if is_sparse or mode == _MAX_OF_BAG or not indices.numel():
        return ()
    copies = _copied_bytes(indices), _copied_bytes(grad)
    return *copies, *_summed_in_tens(grad, indices, num_weights, out), None, None


def _summed_in_tens(grad: Tensor, indices: Tensor, num_weights: int, out: Tensor) -> BlockOrder:
    """`embedding_backward_cuda_kernel`: rows in the order of their indices, all bits of them, and sums of up to ten."""
    num_rows, size, width = indices.numel(), indices.element_size(), grad.shape[-1]
    rows = num_rows * size
    num_segments = min(num_rows, num_weights)
    num_parts = num_rows // 10 + num_segments
    parts = num_parts * size, num_parts * width * _FLOAT
    sort = rows, rows, rows, _radix_sort(num_rows, 2 ** (8 * size) - 1, size), None, None
    sums = rows, 8, num_segments * size, num_segments * size, 8, *parts
    return *sort, out, *sums, *[None] * (len(sums) + 2)


def _pack(args: Sequence[Any], _: Processors) -> Phases:
    """`PackedSequence.cpp`: the rows of each run of steps that equally many have, unless they lie together already."""
    x, lengths, batch_first = args
    values: Any = lengths.constant if isinstance(lengths, FakeTensor) else lengths  # known, as it was packed
    known: list[int] = values.tolist()
    with no_dispatch():
        steps = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        steps = steps.transpose(0, 1) if batch_first else steps
        runs = [
            steps[start:stop, : sum(length > start for length in known)]
            for start, stop in pairwise(sorted({0, *known}))
        ]
    return (tuple(run.nbytes for run in runs if not run.is_contiguous()),)


def _index_put(args: Sequence[Any], _: Processors) -> Phases:
    """`index_put_with_sort_kernel`, if values are accumulated: positions, and their order."""
    masks = tuple(masks_bytes(args[1]))
    if len(args) < 4 or not args[3]:
        return (masks,) if masks and args[2].numel() > 1 else ()  # one number is filled in
    indices = list(chain.from_iterable(map(_positions, args[1])))
    given = [index for index in indices if index is not None]
    num_rows = math.prod(torch.broadcast_shapes(*(index.shape for index in given)))  # type: ignore[no-untyped-call]
    num_slots = math.prod(size for size, index in zip(args[0].shape, indices, strict=False) if index is not None)
    positions = num_rows * _INDEX
    values = _copied_bytes(args[2].expand(_indexed_shape(args[0], indices, given)))
    sort = _radix_sort(num_rows, num_slots, _INDEX)
    return (*masks, positions), masks + ((values,) if values else ()) + (positions,) * 4 + (sort,)


def _positions(index: Tensor | None) -> list[Tensor | None]:
    """Return an index as the kernel takes it: a mask as the positions that it selects, in each of its dimensions."""
    if not is_mask(index):
        return [index]
    with no_dispatch():
        return [torch.empty(num_selected(index, index.shape), dtype=torch.int64, device="meta")] * index.dim()


def _index(args: Sequence[Any], out: Tensor) -> BlockOrder:
    """`at::index`: the positions that masks select are found first."""
    masks = masks_bytes(args[1])
    return *masks, out, *[None] * len(masks)


def _masked_select(args: Sequence[Any], out: Tensor) -> BlockOrder:
    """`masked_select_out_cuda_impl`: an index by the mask, for each element of the shape of both."""
    shape = selected_shape(*args[:2])
    return num_selected(args[1], shape) * len(shape) * _INDEX, out, None


def _masked_scatter(args: Sequence[Any], _: Processors) -> Phases:
    """`masked_scatter__cuda`: where each selected element's value lies, and what is not contiguous as a copy."""
    x, mask, source = args[:3]
    return ((x.numel() * _INDEX, _copied_bytes(mask.expand(selected_shape(x, mask))), _copied_bytes(source)),)


def _indexed_shape(x: Tensor, indices: Sequence[Tensor | None], given: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the shape of what is indexed with dimensions that are indexed first, as the kernel sorts them."""
    places = [dim for dim, index in enumerate(indices) if index is not None]
    others = [size for dim, size in enumerate(x.shape) if dim not in places]
    rows = torch.broadcast_shapes(*(index.shape for index in given))  # type: ignore[no-untyped-call]
    is_together = places == list(range(places[0], places[-1] + 1))
    before = places[0] if is_together else 0
    return (*others[:before], *rows, *others[before:])


def _radix_sort(num_rows: int, num_keys: int, size: int) -> int:
    """Return the temporary storage of CUB's `DeviceRadixSort::SortPairs`: none (reported as 1 byte) for one block."""
    if num_rows <= 256 * (19 * 4 // size):
        return 1
    num_passes = math.ceil(num_keys.bit_length() / 8)
    num_blocks = math.ceil(num_rows / (384 * (17 if size == 4 else 10)))
    second = math.ceil(num_rows * size / 256) * 256 if num_passes > 1 else 0
    return num_passes * 256 * 8 + num_blocks * 256 * 4 + 2 * second + 256 + 255


# -------------------------------------------------------------------------------------------- reductions


class Processors(NamedTuple):
    """Properties of a GPU that determine how a kernel is launched.

    Attributes:
        multiprocessors: Number of multiprocessors.
        threads: Maximum number of resident threads per multiprocessor.
    """

    multiprocessors: int
    threads: int

    @classmethod
    def of(cls, capability: tuple[int, int], count: int | None) -> Processors:
        """Return the properties of a GPU; if its number of multiprocessors is unknown, use that of an A100."""
        threads = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536}.get(capability, 2048)
        return cls(count or 108, 1536 if capability[0] == 12 else threads)


def reduction_workspace(
    func: Any, args: Sequence[Any], processors: Processors, least_carried: int = 0
) -> tuple[int, ...]:
    """Return the bytes of a reduction's partial results and counters; empty if it needs none.

    An accumulator has at least ``least_carried`` bytes.
    """
    rule = _RULES.get(func)
    if rule is None or args[0].layout is not torch.strided or not args[0].numel():
        return ()
    x, carried, position = args[0], *rule
    carried = max(carried, least_carried)
    dims = args[position] if 0 < position < len(args) else None
    if isinstance(dims, int):
        dims = [dims]
    if not dims:
        dims = range(x.dim())
    return _split_over_blocks(x, {dim % x.dim() for dim in dims if x.dim()}, max(carried, x.element_size()), processors)


class _Dimension(NamedTuple):
    """A dimension with the strides of input and output in elements; the output's is zero if it is reduced."""

    size: int
    step: int
    step_out: int


def _dimensions(x: Tensor, reduced: set[int]) -> list[_Dimension]:
    """Return the kernel's dimensions: reduced ones first, fastest first, with contiguous ones merged."""
    dims, step_out = [], 1
    for dim in reversed(range(x.dim())):
        dims.append(_Dimension(x.shape[dim], x.stride(dim), 0 if dim in reduced else step_out))
        step_out *= 1 if dim in reduced else x.shape[dim]
    merged: list[_Dimension] = []
    for new in sorted(dims, key=lambda d: (d.step_out, d.step if d.step_out == 0 else 0)):
        last = merged[-1] if merged else None
        if last is None:
            merged.append(new)
        elif last.size == 1:
            merged[-1] = new
        elif new.size == 1 or (last.size * last.step, last.size * last.step_out) == (new.step, new.step_out):
            merged[-1] = last._replace(size=last.size * new.size)
        else:
            merged.append(new)
    return merged


def _split_over_blocks(x: Tensor, reduced: set[int], carried: int, processors: Processors) -> tuple[int, ...]:
    dims = _dimensions(x, reduced)
    num_reduced = sum(dim.step_out == 0 for dim in dims)
    num_outputs = math.prod(x.shape[dim] for dim in range(x.dim()) if dim not in reduced)
    num_inputs = x.numel() // num_outputs
    is_along_rows = num_reduced == len(dims) or dims[0].step < dims[num_reduced].step
    across, down = (num_inputs, num_outputs) if is_along_rows else (num_outputs, num_inputs)
    fastest = dims[0 if is_along_rows else num_reduced].step if dims else 1
    vector_out = 1
    if fastest == 1 and is_along_rows and across > 128 and num_reduced == 1 and carried != _MOMENTS:
        across //= _VECTOR
    elif fastest == 1 and not is_along_rows:
        others = [dim.step for index, dim in enumerate(dims) if index != num_reduced]
        vector_out = math.gcd(_VECTOR, x.storage_offset(), dims[num_reduced].size, *others)
        across //= vector_out

    most_threads = _MOST_THREADS // vector_out
    across, down = (_power_of_two(min(number, most_threads)) for number in (across, down))
    height = min(down, most_threads // min(across, _WARP))
    width = min(across, most_threads // height)
    step_in, step_out = (width, 1) if is_along_rows else (1, width)
    values = math.ceil(num_inputs / step_in)
    if values < height * _FEWEST_VALUES and values < _MOST_VALUES:
        return ()
    values = math.ceil(num_inputs / (step_in * height))
    grid = math.ceil(num_outputs // vector_out / step_out)
    room = processors.multiprocessors * (processors.threads // (width * height))
    if values < _MOST_VALUES or grid > room:
        return ()
    blocks = max(
        min(math.ceil(room / grid), math.ceil(values / _FEWEST_VALUES)),
        math.ceil(values / _MOST_VALUES),
    )
    if blocks == 1:
        return ()
    per_output = 1 if is_along_rows else width * vector_out
    return carried * num_outputs * blocks * per_output, _COUNTER * grid


def _power_of_two(number: int) -> int:
    return 1 << (max(1, number).bit_length() - 1)


# ------------------------------------------------------------------------------------------ convolutions


def _convolution(args: Sequence[Any], _: Processors) -> Phases:
    """`cudnn_convolution_forward`: tensors in another order of dimensions than cuDNN's are copied first."""
    x, weight = args[:2]
    return (_copies((x, weight), convolution_format(x, weight)),)


def _convolution_backward(args: Sequence[Any], processors: Processors) -> Phases:
    """`convolution_backward`: copies as in the forward, then the sum over the gradient of a bias."""
    grad, x, weight, mask = args[0], args[1], args[2], args[10]
    used = [grad, *([weight] if mask[0] else []), *([x] if mask[1] else [])]
    copies = _copies(used, convolution_format(x, weight))
    others = [dim for dim in range(grad.dim()) if dim != 1]
    sums = reduction_workspace(_aten.sum.dim_IntList, (grad, others), processors) if mask[2] else ()
    return copies, sums


def _copies(tensors: Iterable[Tensor], memory_format: torch.memory_format) -> tuple[int, ...]:
    return tuple(
        each.numel() * each.element_size() for each in tensors if not each.is_contiguous(memory_format=memory_format)
    )


class Convolution(NamedTuple):
    """A convolution, or its backward.

    Attributes:
        x: Its input.
        weight: Its weight.
        y: Its output, or the output's gradient.
        dilation: Per dimension of space.
        is_transposed: Whether it is a transposed convolution.
        groups: Number of groups.
        stride: Per dimension of space.
        passes: What is computed: "output", "input gradient", "weight gradient".
    """

    x: Tensor
    weight: Tensor
    y: Tensor
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    is_transposed: bool
    groups: int
    passes: tuple[str, ...]

    @classmethod
    def of(cls, func: Any, args: Sequence[Any], out: Any) -> Convolution:
        """Read the arguments of an operator of `CONVOLVING`."""
        if func is _aten.convolution.default:
            x, weight, _, stride, _, dilation, is_transposed, _, groups = args
            return cls(x, weight, out, tuple(stride), tuple(dilation), is_transposed, groups, ("output",))
        y, x, weight, _, stride, _, dilation, is_transposed, _, groups, mask = args
        passes = tuple(
            each for each, is_asked in zip(("input gradient", "weight gradient"), mask, strict=False) if is_asked
        )
        return cls(x, weight, y, tuple(stride), tuple(dilation), is_transposed, groups, passes)

    @property
    def copies_bytes(self) -> int:
        """Bytes of a copy of its tensors in another order of dimensions."""
        return sum(map(_bytes_of, (self.x, self.weight, self.y)))

    @property
    def is_depthwise(self) -> bool:
        """Whether each channel is convolved by itself."""
        return self.groups == self.x.shape[1] > 1 and not self.is_transposed

    @property
    def is_product(self) -> bool:
        """Whether it is a plain matrix product."""
        return math.prod(self.weight.shape[2:]) == 1 and set(self.stride) == {1}

    @property
    def searches(self) -> set[tuple[Any, ...]]:
        """Keys of the searches that ``cudnn.benchmark`` makes, one for each pass; empty if cuDNN does not compute it.

        PyTorch has kernels of its own for depthwise convolutions, `use_cudnn_depthwise` in Convolution.cpp.
        """
        x, weight = self.x, self.weight
        is_last = convolution_format(x, weight) is not torch.contiguous_format
        if self.is_depthwise and not is_last and x.dtype is not torch.float16:
            return set()
        sizes = x.shape, x.stride(), x.dtype, weight.shape, weight.stride(), self.y.shape
        return {(each, *sizes, self.stride, self.dilation, self.is_transposed, self.groups) for each in self.passes}

    @property
    def suits_winograd(self) -> bool:
        """Whether the kernel is 3x3 or smaller, and its positions are next to each other."""
        return all(size <= 3 for size in self.weight.shape[2:]) and set(self.dilation) == {1}


def workspaces(convolution: Convolution, capability: tuple[int, int], processors: Processors) -> tuple[int, ...]:
    """Return the workspace of the algorithm that cuDNN's heuristics choose without ``cudnn.benchmark``, one a pass.

    Hopper's tensor cores work in channels-last order: input, weight and output in another order are copied in forward
    and backward. The gradient of the weight is summed in parts, so that all multiprocessors have work. An H100 recorded
    this, with the exceptions in `_bytes_of_pass`, for 18 shapes in three dtypes and for the convolutions of 18
    trainings. Ampere and Ada took nothing in recorded runs, which have hardly any kernel larger than 1x1 that is not
    depthwise; of other cards there is no record: `docs/virtual-gpu-proof.md`.
    """
    if capability[0] != _HOPPER or _is_last(convolution) or convolution.is_depthwise:
        return ()
    if not _has_tensor_cores(convolution.x.dtype, capability):
        return ()
    return tuple(
        _bytes_of_pass(convolution, each) + (_parts_bytes(convolution, processors) if each == "weight gradient" else 0)
        for each in convolution.passes
    )


def _bytes_of_pass(convolution: Convolution, what: str) -> int:
    x, weight, y = convolution.x, convolution.weight, convolution.y
    num_taps = math.prod(weight.shape[2:])
    if convolution.is_product:
        is_aligned = _bytes_of(x) // (x.shape[0] * x.shape[1]) % _ALIGNED == 0
        return 0 if is_aligned else _bytes_of(x) + _bytes_of(y)
    # Images: kernels of their own, but for very large windows.
    if x.shape[1] <= _FEW_CHANNELS and what != "input gradient" and num_taps < _LARGE_WINDOW:
        return convolution.copies_bytes if convolution.is_transposed else 0
    if what != "output":
        return convolution.copies_bytes
    if num_taps == 1:
        return convolution.copies_bytes - _bytes_of(weight)
    positions = math.prod(y.shape[2:])
    writes_in_order = x.dtype is torch.float32 and x.shape[1] == _SLICE <= y.shape[1] and positions <= _MOST_POSITIONS
    return convolution.copies_bytes - (_bytes_of(y) if writes_in_order and not convolution.is_transposed else 0)


def _parts_bytes(convolution: Convolution, processors: Processors) -> int:
    """Bytes of the weight's gradient in parts, in float32: of images, or of as many tiles as there are processors."""
    x, weight = convolution.x, convolution.weight
    if convolution.is_product:
        return 0 if _bytes_of_pass(convolution, "weight gradient") else x.shape[0] * weight.numel() * _FLOAT
    if x.shape[1] <= _FEW_CHANNELS and math.prod(weight.shape[2:]) < _LARGE_WINDOW:
        return 0
    across, down = weight.shape[0], math.prod(weight.shape[1:])
    tiles = math.ceil(across / _TILE_ACROSS) * math.ceil(down / (_TILE_ACROSS if across > _TILE_ACROSS else _TILE_DOWN))
    return processors.multiprocessors // tiles * weight.numel() * _FLOAT


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _has_tensor_cores(dtype: torch.dtype, capability: tuple[int, int]) -> bool:
    if dtype in (torch.float16, torch.bfloat16):
        return capability >= (7, 0)
    return dtype is torch.float32 and capability >= (8, 0) and torch.backends.cudnn.allow_tf32


def _is_last(convolution: Convolution) -> bool:
    return convolution_format(convolution.x, convolution.weight) is not torch.contiguous_format


def tuned_workspaces(convolution: Convolution, capability: tuple[int, int], processors: Processors) -> tuple[int, ...]:
    """Return the workspace of the algorithm that ``cudnn.benchmark`` finds to be the fastest, one for each pass.

    On Hopper it is that of the heuristics. On earlier tensor cores, tensors in another order than channels-last are
    copied in the backward passes of kernels larger than 1x1 (no record shows a copy for 1x1 kernels, or in the
    forward). Without tensor cores, non-fused
    Winograd of 3x3 kernels takes the most. Both follow from recorded runs with ``cudnn.benchmark``:
    `docs/virtual-gpu-proof.md`.
    """
    if capability[0] == _HOPPER:
        return workspaces(convolution, capability, processors)
    x, weight, y = convolution.x, convolution.weight, convolution.y
    if convolution.groups != 1 or convolution.is_transposed:
        return ()
    if _has_tensor_cores(x.dtype, capability):
        backward = [each for each in convolution.passes if each != "output"]
        is_point = math.prod(weight.shape[2:]) == 1  # a plain matrix product
        return () if _is_last(convolution) or is_point else (convolution.copies_bytes,) * len(backward)
    if x.dtype is not torch.float32 or weight.shape[2:] != (3, 3):
        return ()
    if not convolution.suits_winograd or set(convolution.stride) != {1}:
        return ()
    tiles = x.shape[0] * math.prod(math.ceil(size / _TILE) for size in y.shape[2:])
    inputs, outputs = x.shape[1], y.shape[1]
    numbers = (_TILE + 2) ** 2 * (tiles * (inputs + outputs) + inputs * outputs)
    return (numbers * _FLOAT,) * len(convolution.passes)


def convolution_bound(func: Any, args: Sequence[Any], out: Any) -> int:
    """Return the most scratch memory that a known algorithm uses; zero if this is not a convolution.

    With ``torch.backends.cudnn.enabled = False`` the exact size is known: a column for each position of one image.
    """
    if func not in CONVOLVING:
        return 0
    convolution = Convolution.of(func, args, out)
    x, weight, y = convolution.x, convolution.weight, convolution.y
    if not torch.backends.cudnn.enabled:
        positions = x if convolution.is_transposed else y
        column = weight.numel() // weight.shape[1 if convolution.is_transposed else 0]
        return int(math.prod(positions.shape[2:]) * column * x.element_size())
    methods = [convolution.copies_bytes]  # into channels-last order
    if torch.backends.cudnn.benchmark and convolution.suits_winograd:
        methods.append(_winograd(x, y))
    return int(_FIXED_BYTES + max(methods))


def _winograd(x: Tensor, y: Tensor) -> int:
    return int((_TILE + 2) ** 2 / _TILE**2 * (x.numel() + y.numel()) * 4)  # transformed in float32


# ----------------------------------------------------------------------------------------------- tables

_KERNELS: dict[Any, Callable[[Sequence[Any], Processors], Phases]] = {
    **dict.fromkeys((_aten.native_layer_norm.default, *aten.FUSED_RMS_NORM), _layer_norm),
    aten.flash_attention_backward: _flash_backward,
    _aten.native_layer_norm_backward.default: _layer_norm_backward,
    **dict.fromkeys(aten.FUSED_RMS_NORM_BACKWARD, _layer_norm_backward),
    _aten.native_group_norm.default: _group_norm,
    _aten.native_group_norm_backward.default: _group_norm_backward,
    aten.cudnn_attention_backward: _cudnn_attention_backward,
    aten.pack_padded_sequence: _pack,
    _aten.convolution.default: _convolution,
    _aten.convolution_backward.default: _convolution_backward,
    **dict.fromkeys((_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default), _product),
    **dict.fromkeys(_LOSSES, _loss),
    _aten.logsumexp.default: _log_of_sum,
    _aten.roll.default: _roll,
    **SELECTING,
    **dict.fromkeys(overloads("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"), _index_put),
    **dict.fromkeys(overloads("masked_scatter.default", "masked_scatter_"), _masked_scatter),
}
_CASTING = overloads(
    "sum.default", "sum.dim_IntList", "nansum.default", "prod.default", "prod.dim_int", "mean.default", "mean.dim"
)  # reductions that cast their input to the dtype of the result
# Bytes of a reduction's accumulator (0: of the input's dtype), and which argument names its dimensions.
_RULES: dict[Any, tuple[int, int]] = {
    _aten.sum.default: (_FLOAT, 0),
    _aten.sum.dim_IntList: (_FLOAT, 1),
    _aten.nansum.default: (_FLOAT, 1),
    _aten.mean.default: (_FLOAT, 0),
    _aten.mean.dim: (_FLOAT, 1),
    _aten.linalg_vector_norm.default: (_FLOAT, 2),
    _aten.prod.default: (_FLOAT, 0),
    _aten.prod.dim_int: (_FLOAT, 1),
    _aten.amax.default: (0, 1),
    _aten.amin.default: (0, 1),
    _aten.max.default: (0, 0),
    _aten.min.default: (0, 0),
    _aten.max.dim: (_WITH_INDEX, 1),
    _aten.min.dim: (_WITH_INDEX, 1),
    _aten.argmax.default: (_WITH_INDEX, 1),
    _aten.argmin.default: (_WITH_INDEX, 1),
    _aten.var.correction: (_MOMENTS, 1),
    _aten.std.correction: (_MOMENTS, 1),
    _aten.var_mean.correction: (_MOMENTS, 1),
    _aten.std_mean.correction: (_MOMENTS, 1),
}
_PARTLY_ON_HOST = overloads("_scaled_dot_product_efficient_attention.default")
# Operators whose results and scratch memory are allocated in an order of their own; others' results come first.
_ORDERED: dict[Any, Callable[[Sequence[Any], Any], BlockOrder]] = {
    **dict.fromkeys((aten.ctc_loss.default, aten.ctc_loss.Tensor), ctc_order),
    **dict.fromkeys((aten.ctc_loss_backward.default, aten.ctc_loss_backward.Tensor), ctc_backward_order),
    aten.cudnn_rnn: recurrent_order,
    aten.cudnn_rnn_backward: recurrent_backward_order,
    **dict.fromkeys(overloads("_scaled_dot_product_cudnn_attention.default"), _cudnn_attention),
    **dict.fromkeys(_PARTLY_ON_HOST, _efficient),
    aten.efficient_attention_backward: _efficient_backward,
    _aten.embedding.default: _embedding,
    _aten.embedding_dense_backward.default: _embedding_backward,
    aten.embedding_bag_backward: _bag_backward,
    _aten.native_dropout.default: _dropout,
    _aten.index.Tensor: _index,
    _aten.masked_select.default: _masked_select,
}
TAKING = frozenset({*_KERNELS, *_RULES, *_ORDERED, *MULTIPLYING, *CONVOLVING})
"""Operators with known scratch memory; all others use none."""
