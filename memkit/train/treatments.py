"""Ways to reduce a block's activation memory: full or selective recomputation, or offloading."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from memkit._core.errors import StateError
from memkit._recovery.replay import Again, Replay
from memkit._recovery.snapshot import StateWatch
from memkit._tape.tape import changes_arguments, is_plain, written_arguments
from memkit._torch.aten import FUSED_ATTENTION
from memkit._torch.dispatch import LeanDispatchMode, counting_in_views
from memkit._torch.graph import keeps_graph
from memkit._torch.operators import schema_of
from memkit._torch.pytree import tree_leaves, tree_map
from memkit._torch.script import as_written
from memkit._torch.tensors import version_of, versions_of
from memkit.train.models import device_of
from memkit.train.nesting import LookInside, Nesting
from memkit.train.offload import offload_activations

Treatment: TypeAlias = Literal["full", "selective", "offload"]
TREATMENTS: tuple[Treatment, ...] = ("full", "selective", "offload")

_aten = torch.ops.aten
# Operators whose results a "selective" block keeps: many FLOPs per byte of result. Not bmm: in unfused attention it
# computes the scores, which are the largest tensors of the block.
KEPT_OPERATORS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.convolution.default,
        *FUSED_ATTENTION,
    }
)


class ChangedInputError(StateError):
    """A block changes its input in place, so it cannot be recomputed."""


_OWN_SETTINGS = {"use_reentrant", "context_fn", "determinism_check", "debug", "early_stop", "preserve_rng_state"}


class TreatedForward:
    """A block's forward with reduced activation memory.

    It is an object, not a closure: a deep copy of the model (an EMA) must call the copy's block, not the original's.

    Args:
        name: The block's name in the model, for messages.
        block: The module it belongs to.
        treatment: The treatment to apply.
        elsewhere: The activation store of offloaded blocks, shared by all blocks of a model.
        nesting: Notices that the model checkpoints the block itself.
    """

    def __init__(
        self, name: str, block: nn.Module, treatment: Treatment, elsewhere: Elsewhere, nesting: Nesting
    ) -> None:
        self.treatment = treatment
        self._name = name
        self._block = block
        self._forward = block.__dict__.get("forward")  # the instance may already have its own
        self._watch = StateWatch(block)
        self._elsewhere = elsewhere
        self._nesting, self._is_looked_into = nesting, False
        self.is_suspended = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block's own forward, with the treatment if gradients are enabled.

        Raises:
            StateError: The block is to be recomputed in backward, but has changed its input in place.
        """
        forward = self._forward or functools.partial(type(self._block).forward, self._block)
        if self.is_suspended or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if self.treatment == "offload":
            if torch.compiler.is_compiling():  # no hooks inside a graph: run the block uncompiled
                return torch.compiler.disable(self._offloaded)(forward, *args, **kwargs)  # type: ignore[no-untyped-call]
            return self._offloaded(forward, *args, **kwargs)
        if torch.compiler.is_compiling():  # the compiler recomputes by copying operators, not by rerunning Python
            if self.treatment == "full":
                return checkpoint(forward, *args, use_reentrant=False, **kwargs)
            contexts = functools.partial(create_selective_checkpoint_contexts, _policy)
            return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        inputs = _tensors((args, kwargs))
        versions = versions_of(inputs)
        if _OWN_SETTINGS & kwargs.keys():  # checkpoint() would consume these itself
            forward, kwargs = functools.partial(forward, **kwargs), {}
        out = checkpoint(forward, *args, use_reentrant=False, context_fn=self._contexts, **kwargs)
        is_changed = versions != versions_of(inputs)
        if is_changed and any(tensor.requires_grad for tensor in _tensors(out)):  # otherwise it is never recomputed
            raise ChangedInputError(
                f"the forward of the block {self._name!r} with checkpoint {self.treatment!r}",
                got=f"a {type(self._block).__name__} that changes its own input in place",
                expected="a block that leaves its inputs unchanged, because it runs on them again in backward",
                fix="set inplace=False in that block, choose a larger block around it that does not begin with an "
                "in-place operation, or use checkpoint 'offload' for this block.",
            )
        return out

    def _offloaded(self, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
        # Scripted functions keep the plan of their first runs for all blocks, also for those that run again.
        with as_written(), self._elsewhere.of(self._block):
            return forward(*args, **kwargs)

    def _contexts(self) -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
        replay = Replay(self._watch)
        first: contextlib.AbstractContextManager[None] = replay
        repetition = replay.repetition
        if self.treatment == "selective":
            kept = KeptResults()
            first, repetition = kept.first(replay), functools.partial(kept.repetition, replay)
        return self._nesting.around(self._name, first), Again(lambda: self._looked_into(repetition()))

    @contextlib.contextmanager
    def _looked_into(self, repetition: contextlib.AbstractContextManager[None]) -> Iterator[None]:
        """Run a repetition; in the first one also look for checkpoints inside of the block."""
        is_first, self._is_looked_into = not self._is_looked_into, True
        with repetition, LookInside(self._nesting, self._name) if is_first else contextlib.nullcontext():
            yield


class Elsewhere:
    """Store for the activations of a model's offloaded blocks: on disk for the CPU, in host memory for an accelerator.

    One for all blocks, so that a tensor saved by two of them is moved once. A copy of a model gets its own.
    """

    def __init__(self) -> None:
        self._offloads: dict[Literal["disk", "host"], offload_activations] = {}

    def __reduce__(self) -> tuple[type[Elsewhere], tuple[()]]:
        return Elsewhere, ()

    def of(self, block: nn.Module) -> contextlib.AbstractContextManager[offload_activations]:
        """Return a context that offloads a block's forward; its parameters and buffers stay."""
        to: Literal["disk", "host"] = "disk" if device_of(block).type == "cpu" else "host"
        if to not in self._offloads:
            self._offloads[to] = offload_activations(to=to)
        return self._offloads[to].within(block)


class KeptResults:
    """Results of `KEPT_OPERATORS` in one forward, reused when it is recomputed.

    Like `torch.utils.checkpoint.create_selective_checkpoint_contexts`, but a retained graph can be used again, and a
    result that is later changed in place (by ``ReLU(inplace=True)``) is recomputed where torch raises an error.
    """

    def __init__(self) -> None:
        self._results: list[tuple[Any, Any]] = []  # operators and results in order; None must be recomputed
        self._by_storage: dict[int, list[_Result]] = {}  # by id(): the results hold the storages

    @contextlib.contextmanager
    def first(self, replay: Replay) -> Iterator[None]:
        """Record the results of the first forward in the block."""
        with replay, _OnKept(self._keep, self._note_change):
            yield
        self._by_storage.clear()
        self._results = [(func, result if _is_unchanged(result) else None) for func, result in self._results]

    @contextlib.contextmanager
    def repetition(self, replay: Replay) -> Iterator[None]:
        """Reuse the results in the recomputed forward in the block."""
        order = itertools.count()

        def run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            return self._give(next(order), func, args, kwargs)

        with replay.repetition(), _OnKept(run):
            yield

    def _keep(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        out = func(*args, **kwargs)
        result = tree_map(lambda part: _Result(part) if isinstance(part, torch.Tensor) else part, out)
        self._results.append((func, result))
        for part in tree_leaves(result):
            if isinstance(part, _Result):
                self._by_storage.setdefault(part.storage_id, []).append(part)
        return out

    def _note_change(self, written: Sequence[torch.Tensor]) -> None:
        """Note changes that no version tells: parts by `unsafe_chunk`, as in PyTorch's GRU, have their own versions."""
        for tensor in filter(is_plain, written):
            for part in self._by_storage.get(id(tensor.untyped_storage()), ()):
                part.is_changed = True

    def _give(self, index: int, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        then, result = self._results[index] if index < len(self._results) else (None, None)
        if then != func:
            raise StateError(
                "backward() through a block with checkpoint 'selective'",
                got=f"{func} in the repeated forward where the first one ran {then or 'nothing more'}",
                expected="a forward that runs the same operators each time",
                fix="use checkpoint 'offload' for this block, or make its forward depend on its inputs alone.",
            )
        if not keeps_graph():
            self._results[index] = func, None  # free it as soon as backward is done with it
        if not _is_unchanged(result):
            return func(*args, **kwargs)
        return tree_map(lambda part: part.get() if isinstance(part, _Result) else part, result)


class _Result:
    """A tensor that knows whether it was changed."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = _detached(tensor)
        self._version = version_of(self._tensor)
        self._storage = tensor.untyped_storage() if is_plain(tensor) else None
        self.is_changed = False

    @property
    def storage_id(self) -> int:
        return id(self._storage)

    def is_unchanged(self) -> bool:
        return not self.is_changed and version_of(self._tensor) == self._version

    def get(self) -> torch.Tensor:
        return _detached(self._tensor)  # a new object, which gets an autograd history


class _OnKept(LeanDispatchMode):
    """Runs `KEPT_OPERATORS` through a function, and may tell of tensors that other operators are about to change."""

    supports_higher_order_operators = True

    def __init__(
        self,
        run: Callable[[Any, Sequence[Any], Mapping[str, Any]], Any],
        note_change: Callable[[Sequence[torch.Tensor]], None] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run, self._note_change = run, note_change

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled parts of the block run compiled, as torch's own selective checkpoint does."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_kept(func, args, kwargs):
            return self._run(func, args, kwargs)
        if self._note_change is not None and changes_arguments(func):
            self._note_change(written_arguments(func, args, kwargs))
        return func(*args, **kwargs)


def _is_kept(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a result is kept; not with dropout inside, since a skipped operator draws no random numbers."""
    if func not in KEPT_OPERATORS:
        return False
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return True
    place = [argument.name for argument in schema_of(func).arguments].index("dropout_p")
    return not (args[place] if place < len(args) else kwargs.get("dropout_p", 0))


def _policy(context: object, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:  # noqa: ARG001 - torch's form
    return CheckpointPolicy.MUST_SAVE if _is_kept(func, args, kwargs) else CheckpointPolicy.PREFER_RECOMPUTE


def _tensors(tree: Any) -> list[torch.Tensor]:
    """List the tensors of a pytree that have version counters."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and not leaf.is_inference()]


def _is_unchanged(result: Any) -> bool:
    return result is not None and all(part.is_unchanged() for part in tree_leaves(result) if isinstance(part, _Result))


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    # Below autograd a view would get its own version counter; torch's own selective checkpoint does this, too.
    with counting_in_views():
        return tensor.detach()
