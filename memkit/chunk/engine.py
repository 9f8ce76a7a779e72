"""The engine of all row-wise functions: one autograd node per call, which runs a function in chunks.

Chunk sizes are chosen beforehand. A call is described by `ChunkedCall`; its `Assembly` combines the chunk results into
the call's result. The forward keeps no graph; the backward recomputes each chunk, takes its gradients, and frees it.
The parameters are inputs of the node, so that autograd accumulates each gradient once, which DistributedDataParallel
relies on.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from memkit._core.errors import InputError, InputTypeError, MemkitError, warn_user
from memkit._gradients.captured import CapturedTensors
from memkit._gradients.streamed import (
    accumulator_dtype,
    refuse_reentrant,
    refuse_second_derivative,
    refuse_transforms,
    refuse_unsliced,
    spans,
    sparse_sum,
    without_hooks,
)
from memkit._machine.devices import is_capturing
from memkit._recovery.attempt import Done, Failed, OutOfMemory, attempt, unless_failed
from memkit._tape.kept import KeptResults
from memkit._tape.references import Run
from memkit._torch import foreach, pytree
from memkit._torch.autocast import graphs
from memkit._torch.dispatch import fake_mode
from memkit._torch.graph import gradients_of
from memkit._torch.script import as_written
from memkit._torch.tensors import as_integers, versions_of
from memkit.chunk.assembly import Assembly, ChunkResults, ChunkRows, Upstream
from memkit.chunk.circumstances import Circumstances, ReplayedChunk
from memkit.chunk.gather import Gathered
from memkit.chunk.independence import NUM_PROBED, check_independence, note_rows, warn_of_draws
from memkit.chunk.params import used_parameters
from memkit.chunk.probes import undone, unpacked
from memkit.chunk.sizing import ChunkPlan, Sizer, plan_of
from memkit.chunk.trial import CallTensors, TrialCall
from memkit.chunk.volumes import spatial_call, without_batch

Keep: TypeAlias = Literal["nothing", "products", "graph"]
"""Parts of a chunk kept for the backward: "products" are the results of matrix products and convolutions."""

# Measured on a CPU: up to 16 terms, a product takes hardly longer than the copy of its bias.
_LEAST_TERMS = 17
_TENSOR = object()  # stands for a tensor when only the structure is kept
_ONE_TENSOR = pytree.tree_flatten(_TENSOR)
# In torch's errors of torch.autograd.grad, Tensor.register_hook and Tensor.retain_grad.
_WITHOUT_GRAPH = ("does not require grad", "doesn't require gradient", "has requires_grad=False")
_FEW_ROWS = 3  # of two, an order or a place is often right by chance
_SAME_OPERATORS = "make the function depend on its arguments alone, or pass chunk_size=4096, which keeps nothing."


@dataclass(slots=True)
class ChunkedCall:
    """One call of a function in chunks. Create it, then `run` it once.

    Attributes:
        name: The user's call, for messages.
        fn: The user's function.
        assembly: How chunk results are combined.
        size: Rows of a chunk, or the `Sizer` that chooses them.
        num_rows: Rows of the call; None to take them from the arguments.
        num_kept: Number of last chunks whose graphs are kept, so that the backward does not recompute them.
        num_partly_kept: Number of chunks after the first of which the results of matrix products and convolutions are
            kept, so that the backward recomputes the rest only.
        check: Whether to verify first, on a few rows, that the function treats each row independently.

        plan: How the call is cut, set when it runs; None if its size was given.
    """

    name: str
    fn: Callable[..., Any]
    assembly: Assembly
    size: int | Sizer
    num_rows: int | None = None
    num_kept: int = 0
    num_partly_kept: int = 0
    check: bool = False
    plan: ChunkPlan | None = field(init=False, default=None)
    # Set by `run`. No tensor that needs a gradient may be stored here: autograd must be able to free those.
    _num_rows: int = field(init=False)
    _head: int = field(init=False, default=0)  # rows of a first short chunk
    _draws_for_all: bool = field(init=False, default=False)  # random numbers that belong to no row
    _differentiates: bool = field(init=False, default=False)  # the function takes gradients itself, which need graphs
    _draws: bool = field(init=False, default=False)  # random numbers of any kind; known where rows may be left out
    _arguments: list[Any] = field(init=False)  # leaves of (args, kwargs), None in place of chunk rows
    _tree: pytree.TreeSpec = field(init=False)
    _names: tuple[str, ...] | None = field(init=False)  # of the keyword arguments, if no argument is a container
    _chunks: list[ChunkRows] = field(init=False)  # of the last forward
    _slots: list[int] = field(init=False)  # position of each input among the leaves
    _picks: list[Tensor | None] = field(init=False)  # index that gathers each input's rows; None: cut directly
    _result: tuple[list[Any], pytree.TreeSpec] = field(init=False)  # structure of the function's result

    @property
    def chunk_size(self) -> int:
        """Rows of a chunk, once chosen."""
        assert isinstance(self.size, int)  # noqa: S101 - ensured by `run`
        return self.size

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any], *, params: Iterable[Tensor] | None) -> Any:
        """Run the function over all rows.

        Args:
            args: Its arguments: tensors of rows, `Gathered`, anything else, or containers of them.
            kwargs: Its keyword arguments, of the same kinds.
            params: Leaf tensors that the function uses besides its arguments and its own parameters.

        Returns:
            The function's result, as assembled.

        Raises:
            InputError: The arguments do not have the same number of rows.
            StateError: See `refuse_transforms`.
        """
        inputs = self._take_arguments(args, kwargs)
        refuse_transforms(self.name, inputs, "call the function itself there, fn(*rows), with all rows at once.")
        tensors = self._prepare(inputs, params)
        outputs: Sequence[Tensor]
        if torch.is_grad_enabled():
            outputs = _ChunkedFunction.apply(self, len(inputs), *inputs, *tensors.params)  # type: ignore[no-untyped-call]
        else:
            outputs, _ = self.assembly.collect(self.results(tensors, None))
        template, tree = self._result
        results = iter(outputs)
        return pytree.tree_unflatten([next(results) if leaf is _TENSOR else leaf for leaf in template], tree)

    def choose(self, args: Sequence[Any], kwargs: Mapping[str, Any], *, params: Iterable[Tensor] | None) -> ChunkPlan:
        """Return how the call would be cut, without running it."""
        tensors = self._prepare(self._take_arguments(args, kwargs), params)
        return self.plan or plan_of(TrialCall(self, tensors), self.chunk_size)

    def _prepare(self, inputs: Sequence[Tensor], params: Iterable[Tensor] | None) -> CallTensors:
        """Check the function, and choose the size if it is not given."""
        self._check(inputs)
        is_enabled = torch.is_grad_enabled()
        own = used_parameters(self.name, self.fn, params) if is_enabled else []
        tensors = CallTensors(inputs, own, [is_enabled and tensor.requires_grad for tensor in (*inputs, *own)])
        if isinstance(self.size, Sizer):
            self.plan = self.size.plan(TrialCall(self, tensors))
            self.size, self.num_kept = self.plan.chunk_size, self.plan.num_kept
            self.num_partly_kept = self.plan.num_partly_kept
            self._warn_of_one_row(inputs)
        if self._draws_for_all and self._num_rows > self.chunk_size:
            warn_of_draws(self.name)
        return tensors

    def _warn_of_one_row(self, inputs: Sequence[Tensor]) -> None:
        if self._num_rows == 1 and (where := spatial_call(self.fn, inputs)):
            warn_user(
                f"{self.name}: {tuple(inputs[0].shape)} is 1 row, so nothing is cut: chunks are rows of dimension 0. "
                f"Way out: {where} cuts space, with the same result."
            )

    def first_rows(self, num_rows: int, chunk_size: int, head: int) -> ChunkedCall:
        """Return this call on its first rows only, with a short chunk first; the last chunk's graph is kept."""
        first = copy.copy(self)
        first.size = chunk_size
        first.num_kept = 1
        first._num_rows = num_rows  # noqa: SLF001 - its own
        first._head = head  # noqa: SLF001
        return first

    @property
    def count(self) -> int:
        """Rows of the call, known once its arguments are flattened."""
        return self._num_rows

    @property
    def layout(self) -> list[Any]:
        """Whether each input's rows are gathered, followed by all arguments that are not cut."""
        return [*(pick is not None for pick in self._picks), *self._arguments]

    def _take_arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """Record the positions of the tensors among the arguments, and return the tensors."""
        leaves, self._tree = pytree.tree_flatten((tuple(args), dict(kwargs)))
        direct = [*args, *kwargs.values()]
        is_flat = len(direct) == len(leaves) and all(map(operator.is_, direct, leaves))
        self._names = tuple(kwargs) if is_flat else None
        self._slots = [number for number, leaf in enumerate(leaves) if isinstance(leaf, (Tensor, Gathered))]
        found = [leaves[slot] for slot in self._slots]
        self._picks = [leaf.pick if isinstance(leaf, Gathered) else None for leaf in found]
        self._arguments = [None if number in self._slots else leaf for number, leaf in enumerate(leaves)]
        self._num_rows = self._count_rows([leaf.pick if isinstance(leaf, Gathered) else leaf for leaf in found])
        return [leaf.tensor if isinstance(leaf, Gathered) else leaf for leaf in found]

    def _count_rows(self, tensors: Sequence[Tensor]) -> int:
        shapes = [tuple(tensor.shape) for tensor in tensors]
        num_rows = self.num_rows
        if not shapes and any(hasattr(each, "__array__") for each in self._arguments):
            raise InputTypeError(
                self.name,
                got="NumPy arrays",
                expected="tensors, which are cut into rows",
                fix="pass torch.from_numpy(x).",
            )
        if not shapes and (kind := _dataclass_among(self._arguments)):
            raise InputTypeError(
                self.name,
                got=f"a dataclass ({kind}), which is passed on as it is, and no tensor",
                expected="tensors with the rows in dimension 0, or dicts, lists and tuples of them",
                fix="pass its tensors as arguments or in a dict, and build the dataclass inside the function.",
            )
        refuse_unsliced(self.name, tensors)
        if num_rows is None:
            num_rows = shapes[0][0] if shapes and shapes[0] else -1
        if not shapes or any(shape[:1] != (num_rows,) for shape in shapes):
            raise InputError(
                self.name,
                got=f"tensors of shapes {', '.join(map(str, shapes))}" if shapes else "no tensor",
                expected=f"{'the same number of' if self.num_rows is None else num_rows} rows in dimension 0 of each",
                fix=f"pass an index or a ptr for these {shapes[0][0]} rows."
                if len(shapes) == 1 and shapes[0]
                else "bind arguments that are the same for all rows with functools.partial."
                if shapes
                else "pass tensors with the rows in dimension 0: torch.as_tensor(x) makes one.",
            )
        return num_rows

    @property
    def indices(self) -> list[Tensor]:
        """Tensors read by both forward and backward that need no gradient."""
        return [*(pick for pick in self._picks if pick is not None), *self.assembly.indices]

    def collect(self, tensors: CallTensors, replay: Circumstances) -> tuple[list[Tensor], list[Tensor]]:
        """Run the forward of a call, after which a backward may follow: see `Assembly.collect`."""
        collected = self._collect(tensors, replay)
        self._draws = self.assembly.passes_few and replay.has_drawn
        if self._num_rows > self.chunk_size and replay.drew_on_the_host and not self._draws_for_all:
            warn_of_draws(self.name)
        return collected

    def _collect(self, tensors: CallTensors, replay: Circumstances) -> tuple[list[Tensor], list[Tensor]]:
        try:
            return self.assembly.collect(self.results(tensors, replay))
        except RuntimeError as error:
            if self._differentiates or not any(words in str(error) for words in _WITHOUT_GRAPH):
                raise
        # The function calls torch.autograd.grad, or registers a hook, and a chunk had no graph.
        self._differentiates = True
        replay.start_over()
        return self.assembly.collect(self.results(tensors, replay))

    def results(self, tensors: CallTensors, replay: Circumstances | None) -> ChunkResults:
        """Run the forward of a call; with ``replay``, a backward may follow."""
        chunks = self._chunks = [ChunkRows(*each) for each in spans(self._num_rows, self.chunk_size, self._head)]
        num_kept, num_partly_kept = (self.num_kept, self.num_partly_kept) if any(tensors.needs) else (0, 0)

        def run_chunks() -> Iterator[tuple[ChunkRows, list[Tensor]]]:
            for number, rows in enumerate(chunks):
                if replay is None:
                    yield rows, self._run_chunk(tensors, rows).results
                else:
                    how: Keep = "graph" if number >= len(chunks) - num_kept else "nothing"
                    if how == "nothing" and 0 < number <= num_partly_kept:
                        how = "products"
                    yield rows, self._recorded(tensors, replay, rows, how, is_first=not number)

        return ChunkResults(run_chunks(), self._num_rows, for_backward=replay is not None and any(tensors.needs))

    def _recorded(
        self, tensors: CallTensors, replay: Circumstances, rows: ChunkRows, keep: Keep, *, is_first: bool
    ) -> list[Tensor]:
        """Run one chunk, and keep its graph or its products for the backward if wanted. No local outlives the chunk."""
        # The first chunk always has a graph: it reveals tensors that the function captures from outside. Those that
        # only later chunks use are revealed in the backward, for which a chunk whose graph is kept needs this too.
        captured = CapturedTensors(self.name, self.fn) if is_first or keep == "graph" else None
        products = self._new_products() if keep == "products" and not self._differentiates else None
        # It also shows what the other chunks' reruns can leave out.
        around = replay.end.first if is_first and keep == "nothing" and any(tensors.needs) else None
        with graphs(enabled=keep != "nothing" or is_first or self._differentiates):
            chunk = self._run_chunk(tensors, rows, None if products is None else products.first(), around)
        if captured and is_first and captured.refuse(chunk.results, [*chunk.rows, *tensors.params]):
            self._differentiates = True
            self._refuse_captured(captured, tensors)
        if captured and keep == "graph":
            replay.kept.append((chunk, captured))
        if products:
            products.forget_unused(chunk.results)
            replay.products[rows.start] = products
        return [result.detach() for result in chunk.results]

    def _new_products(self) -> KeptResults:
        return KeptResults(self.name, _SAME_OPERATORS, least_terms=_LEAST_TERMS)

    def product_bytes(self, tensors: CallTensors, num_rows: int) -> int:
        """Run the first rows; return the bytes that are kept for a chunk whose products are kept."""
        products = self._new_products()
        with graphs(enabled=True):
            chunk = self._run_chunk(tensors, ChunkRows(0, num_rows), products.first())
        products.forget_unused(chunk.results)
        return products.num_bytes

    def _refuse_captured(self, captured: CapturedTensors, tensors: CallTensors) -> None:
        """Refuse leaves that are not the function's own: those of a short chunk whose graph is gone."""

        def unknown_leaves(which: ChunkRows) -> list[weakref.ref[Tensor]]:
            chunk = self._run_chunk(tensors, which)
            return captured.refuse(chunk.results, [*chunk.rows, *tensors.params])

        with unpacked(), undone(self.fn, self._arguments), graphs(enabled=True):
            few = unless_failed((Exception,), unknown_leaves, ChunkRows(0, min(NUM_PROBED, self._num_rows)))
            if isinstance(few, Failed) and isinstance(few.error, MemkitError):
                raise few.error
            # The function may refuse a few rows, but has taken those of the first chunk.
            leaves = few.result if isinstance(few, Done) else unknown_leaves(self._chunks[0])
            captured.refuse_survivors(leaves)  # here: what the function keeps is gone after the block

    def _run_chunk(
        self,
        tensors: CallTensors,
        which: ChunkRows,
        products: contextlib.AbstractContextManager[None] | None = None,
        around: Callable[[Run, int], list[Tensor]] | None = None,
    ) -> ReplayedChunk:
        """Run the function on one chunk.

        Args:
            tensors: The call's.
            which: The chunk's rows.
            products: Context that keeps or reuses the results of products.
            around: Runs the function, to see its last result or to leave it out.
        """
        rows, length = self._rows(tensors.inputs, which), which.length
        for each, need in zip(rows, tensors.needs, strict=False):
            each.requires_grad_(need)
        if products is None and around is None:
            return ReplayedChunk(rows, self._call(rows, length))
        with as_written():
            if around is not None:
                return ReplayedChunk(rows, around(functools.partial(self._call, rows, length), length))
            with products or contextlib.nullcontext():
                return ReplayedChunk(rows, self._call(rows, length))

    def _rows(self, inputs: Sequence[Tensor], which: ChunkRows) -> list[Tensor]:
        # Detached, so that slicing records no node: a slice's gradient would be as large as the whole tensor.
        return [
            which.of(tensor) if pick is None else tensor.index_select(0, which.of(pick))
            for tensor, pick in zip(map(Tensor.detach, inputs), self._picks, strict=True)
        ]

    def _check(self, inputs: Sequence[Tensor]) -> None:
        if not self.check:
            return
        size = self.size if isinstance(self.size, int) else NUM_PROBED
        length = min(NUM_PROBED, self._num_rows, max(size, _FEW_ROWS))
        while length > size:
            # The function may have no memory for more rows than a chunk has, or refuse them.
            outcome = attempt(self._check_rows, inputs, length, others=(Exception,))
            if isinstance(outcome, Failed) and isinstance(outcome.error, MemkitError):
                raise outcome.error
            if isinstance(outcome, Done):
                self._draws_for_all = bool(outcome.result)
                return
            length -= 1
            if length == 1:
                warn_user(
                    f"{self.name}: could not check that each row is computed from that row alone: with two rows the "
                    f"function raised {outcome.description}. Way out: call it first with two small rows, or pass "
                    "check=False."
                )
        if length > 1:
            self._check_few(inputs, length)

    def _check_few(self, inputs: Sequence[Tensor], length: int) -> None:
        few = unless_failed((Exception,), self._check_rows, inputs, length)
        if isinstance(few, Done) and few.result is not None:
            self._draws_for_all = few.result
            return
        is_size_known = isinstance(self.size, int)
        if isinstance(few, Failed) and (isinstance(few.error, MemkitError) or not is_size_known):
            raise few.error
        if is_size_known and self.chunk_size < self._num_rows:  # else nothing is cut
            self._check_chunks(inputs, few)

    def _check_chunks(self, inputs: Sequence[Tensor], few: Done[bool | None] | Failed) -> None:
        """Check with the first two chunks, since the function needs a certain number of rows, or fails anyway."""
        length = min(2 * self.chunk_size, self._num_rows)
        outcome = attempt(self._check_rows, inputs, length, self.chunk_size, others=(Exception,))
        if isinstance(outcome, Done):
            self._draws_for_all = bool(outcome.result)
        elif isinstance(outcome.error, MemkitError):
            raise outcome.error
        elif isinstance(few, Failed):
            raise few.error
        elif isinstance(outcome, OutOfMemory):
            warn_user(
                f"{self.name}: could not check that each row is computed from that row alone: the function refuses "
                f"some numbers of rows, and with two chunks it raised {outcome.description}. Way out: pass a smaller "
                "chunk_size, or check=False."
            )

    def _check_rows(self, inputs: Sequence[Tensor], length: int, chunk_size: int | None = None) -> bool | None:
        first = [
            rows.requires_grad_(tensor.requires_grad)
            for rows, tensor in zip(self._rows(inputs, ChunkRows(0, length)), inputs, strict=True)
        ]
        return check_independence(
            lambda *rows: (self._call(rows, len(rows[0])), self._result),
            first,
            call=self.name,
            behind=self.fn,
            unbatched=without_batch(self.fn, first),
            others=self._arguments,
            pick=lambda numbers: self._picked(inputs, numbers),
            whole=[tensor for tensor, pick in zip(inputs, self._picks, strict=True) if pick is None],
            chunk_size=chunk_size,
        )

    def _picked(self, inputs: Sequence[Tensor], numbers: Tensor) -> list[Tensor]:
        rows = []
        for tensor, pick in zip(inputs, self._picks, strict=True):
            places = numbers.to(tensor.device) if pick is None else pick.index_select(0, numbers.to(pick.device))
            whole = tensor.detach()
            try:
                found = whole[places]
            except NotImplementedError:  # of unsigned integers, in PyTorch 2.8
                found = as_integers(whole)[places].view(whole.dtype)
            rows.append(found.requires_grad_(tensor.requires_grad))
        return rows

    def _call(self, rows: Sequence[Tensor], length: int) -> list[Tensor]:
        filled = list(self._arguments)
        for slot, each in zip(self._slots, rows, strict=True):
            filled[slot] = each
        if self._names is None:
            args, kwargs = pytree.tree_unflatten(filled, self._tree)
        else:  # the usual case, without a walk through the tree
            num_args = len(filled) - len(self._names)
            args, kwargs = filled[:num_args], dict(zip(self._names, filled[num_args:], strict=True))
        try:
            result = self.fn(*args, **kwargs)
        except Exception as error:
            if length < self._num_rows:
                note_rows(error, self.name, length)
            raise
        if isinstance(result, Tensor) and result.shape[:1] == (length,):
            self._result = _ONE_TENSOR
            return [result]
        leaves, tree = pytree.tree_flatten(result)
        results = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        shapes = [tuple(result.shape) for result in results]
        if not shapes and (kind := _dataclass_among(leaves)):
            raise InputTypeError(
                self.name,
                got=f"a function that returns a dataclass ({kind})",
                expected="tensors with one row of output for each input row, or dicts, lists and tuples of them",
                fix="return its tensors in a dict or a tuple, and build the dataclass from the result.",
            )
        if not shapes or any(shape[:1] != (length,) for shape in shapes):
            raise InputError(
                self.name,
                got=f"a function that returns {shapes or 'no tensor'} for a chunk of {length} rows",
                expected="one row of output for each input row",
                fix=without_batch(self.fn, rows)
                or "reduce the result outside the function, or use chunked_segment_reduce or chunked_loss.",
            )
        self._result = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves], tree
        return results

    def marked(self, gradients: Sequence[Tensor | None], saved: Sequence[Tensor]) -> Tensor | None:
        """Return a mask of the rows that get a gradient, if it may pay to run only those again.

        The other rows contribute zero to every gradient. If the function draws random numbers, all rows must run again.
        """
        if not self.assembly.passes_few or self._draws or gradients[0] is None:
            return None
        if fake_mode() is not None or gradients[0].is_meta or is_capturing():
            return None
        # The mask takes no more than is spared: a chunk that leaves out rows is half as large.
        if self._num_rows > self.chunk_size // 2 * gradients[0][:1].nbytes:
            return None
        return self.assembly.rows_with_gradient(saved)

    def _again(self, marked: Tensor) -> Iterator[ChunkRows] | None:
        """Return chunks of the marked rows; None if they are more than half of all."""
        counts: list[int] = torch.stack([part.sum() for part in torch.split(marked, self.chunk_size)]).tolist()
        return _chunks_of(marked, self._chunks, counts) if 0 < sum(counts) <= self._num_rows // 2 else None

    def gradients(
        self,
        tensors: CallTensors,
        upstream: Upstream,
        replay: Circumstances,
        totals: list[Tensor | None],
        marked: Tensor | None = None,
    ) -> list[Tensor | None]:
        """Add the gradients of inputs and parameters to the totals chunk by chunk, kept chunks first.

        Args:
            tensors: The call's.
            upstream: Gives the gradients of a chunk's results.
            replay: State of the forward.
            totals: The sums of the gradients so far.
            marked: Mask of the rows that get a gradient; None for all. If they are few, kept chunks are dropped, since
                running those rows again takes less than the whole chunks' backward.
        """
        kept, products = replay.taken()
        chunks = self._chunks.copy()
        few = None if marked is None else self._again(marked)
        if few is not None:
            kept, products = [], {}
        # No local may hold a chunk when the next one runs.
        while kept:
            rows = chunks.pop()
            chunk, captured = kept.pop()
            unknown = captured.refuse(chunk.results, [*chunk.rows, *tensors.params])
            self._add_gradients(totals, tensors, chunk, upstream(rows), rows)
            del chunk
            if unknown:
                self._refuse_unknown(captured, unknown)
        captured = CapturedTensors(self.name, self.fn)  # in this thread, which may be another one than the forward's
        for rows in few or chunks:
            chunk = self._recompute(tensors, replay, rows, products.pop(rows.start, None))
            unknown = captured.refuse(chunk.results, [*chunk.rows, *tensors.params])
            self._add_gradients(totals, tensors, chunk, upstream(rows), rows)
            del chunk
            if unknown:
                self._refuse_unknown(captured, unknown)
        return [
            None if total is None else total.to(tensor.dtype)
            for total, tensor in zip(totals, [*tensors.inputs, *tensors.params], strict=True)
        ]

    def _refuse_unknown(self, captured: CapturedTensors, leaves: Sequence[weakref.ref[Tensor]]) -> None:
        """Refuse leaves that got no gradient from a chunk, and that are not the function's own: its graph is gone."""
        # A function that differentiates makes leaves, no parameters, and may keep one in an attribute.
        captured.refuse_survivors(
            [each for each in leaves if not self._differentiates or isinstance(each(), nn.Parameter)]
        )

    @torch.enable_grad()
    def _recompute(
        self, tensors: CallTensors, replay: Circumstances, rows: ChunkRows, products: KeptResults | None
    ) -> ReplayedChunk:
        if products is not None:
            return self._run_chunk(tensors, rows, products.repetition())
        return self._run_chunk(tensors, rows, around=replay.end.again if replay.end.is_known else None)

    def _add_gradients(
        self,
        totals: list[Tensor | None],
        tensors: CallTensors,
        chunk: ReplayedChunk,
        upstream: list[Tensor | None],
        rows: ChunkRows,
    ) -> None:
        ends = [(y, g.to(y.device)) for y, g in zip(chunk.results, upstream, strict=True) if g is not None]
        ends = [(y, g) for y, g in ends if y.requires_grad]
        if not ends:
            return
        leaves = [*chunk.rows, *tensors.params]
        wanted = [number for number, need in enumerate(tensors.needs) if need]
        found = gradients_of([y for y, _ in ends], [g for _, g in ends], [leaves[number] for number in wanted])
        sums: list[tuple[Tensor, Tensor]] = []
        for number, gradient in zip(wanted, found, strict=True):
            if gradient is None:
                continue
            total = totals[number]
            if number < len(tensors.inputs):
                self._add_rows(totals, tensors.inputs[number], number, gradient, rows)
            elif gradient.is_sparse or (total is not None and total.is_sparse):
                totals[number] = sparse_sum(total, gradient.to(accumulator_dtype(gradient.dtype)))
            elif total is None:  # a copy: autograd may return the upstream gradient itself
                totals[number] = gradient.to(accumulator_dtype(gradient.dtype), copy=True)
            elif type(gradient) is Tensor:
                sums.append((total, gradient))
            else:
                total.add_(gradient)
        if sums:
            foreach.add_(*map(list, zip(*sums, strict=True)))

    def _add_rows(
        self, totals: list[Tensor | None], tensor: Tensor, number: int, gradient: Tensor, rows: ChunkRows
    ) -> None:
        pick, total = self._picks[number], totals[number]
        if total is None:  # zeros: some chunks may have no gradient
            dtype = gradient.dtype if pick is None else accumulator_dtype(gradient.dtype)
            totals[number] = total = torch.zeros_like(tensor, dtype=dtype)
        if pick is not None:
            total.index_add_(0, rows.of(pick), gradient.to(total.dtype))
        elif rows.numbers is not None:
            total.index_copy_(0, rows.numbers, gradient)
        else:
            total.narrow(0, rows.start, rows.length).copy_(gradient)


def _dataclass_among(leaves: Iterable[object]) -> str | None:
    return next((type(each).__name__ for each in leaves if is_dataclass(each) and not isinstance(each, type)), None)


def _chunks_of(marked: Tensor, chunks: Iterable[ChunkRows], counts: Iterable[int]) -> Iterator[ChunkRows]:
    """Yield the marked rows in chunks that are half as large at most; where most rows are marked, all of them."""
    begin = end = waiting = 0  # range of the marked rows so far, and their number
    for rows, count in zip(chunks, counts, strict=True):
        if waiting and waiting + count > rows.length // 2:
            yield _marked_rows(marked, begin, end, waiting)
            waiting = 0
        if count > rows.length // 2:
            yield rows
        elif count:
            begin, end = begin if waiting else rows.start, rows.start + rows.length
            waiting += count
    if waiting:
        yield _marked_rows(marked, begin, end, waiting)


def _marked_rows(marked: Tensor, start: int, end: int, count: int) -> ChunkRows:
    part = marked[start:end]
    # On a GPU, nonzero() waits for the device.
    numbers = torch.nonzero_static(part, size=count) if part.is_cuda else part.nonzero()
    return ChunkRows(start, count, numbers.squeeze(1).add_(start))


class _ChunkedFunction(torch.autograd.Function):
    """The single autograd node of a call."""

    @staticmethod
    def forward(ctx: Any, call: ChunkedCall, num_inputs: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        inputs = tensors[:num_inputs]
        replay = Circumstances(inputs, call.fn, tensors[num_inputs:])
        counted = [tensor for tensor in inputs if not tensor.is_inference()]
        versions = versions_of(counted)
        outputs, saved = call.collect(CallTensors(inputs, tensors[num_inputs:], ctx.needs_input_grad[2:]), replay)
        replay.over()
        if versions != versions_of(counted):
            raise InputError(
                call.name,
                got="a function that changes its arguments in place",
                expected="unchanged arguments, because the backward runs the function on them again",
                fix="work on a copy, for example inplace=False in the first activation.",
            )
        ctx.call, ctx.replay, ctx.num_inputs, ctx.num_tensors = call, replay, num_inputs, len(tensors)
        ctx.save_for_backward(*tensors, *saved, *call.indices)  # autograd refuses the indices too if they change
        ctx.num_saved = len(saved)
        ctx.set_materialize_grads(value=False)
        ctx.mark_non_differentiable(
            *(output for output in outputs if not (output.is_floating_point() or output.is_complex()))
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        call, replay = ctx.call, ctx.replay
        refuse_second_derivative(
            call.name,
            "for second derivatives run the chunks through torch's own checkpoint: torch.cat([checkpoint(fn, part, "
            "use_reentrant=False) for part in rows.split(4096)]).",
        )
        saved = ctx.saved_tensors
        inputs, params = saved[: ctx.num_inputs], saved[ctx.num_inputs : ctx.num_tensors]
        own = saved[ctx.num_tensors : ctx.num_tensors + ctx.num_saved]
        upstream, marked = call.assembly.upstream(gradients, own), call.marked(gradients, own)
        with replay.again(), without_hooks(params), refuse_reentrant(call.name):
            needs = ctx.needs_input_grad[2:]
            found = call.gradients(CallTensors(inputs, params, needs), upstream, replay, [None] * len(needs), marked)
        return None, None, *found
