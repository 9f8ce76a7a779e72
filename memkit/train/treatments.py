"""What keeps a block's activations small: the block runs again, in whole or in part, or they wait elsewhere."""

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
from memkit._torch.aten import FUSED_ATTENTION
from memkit._torch.dispatch import TorchDispatchMode, counting_in_views
from memkit._torch.graph import keeps_graph
from memkit._torch.operators import schema_of
from memkit._torch.pytree import tree_leaves, tree_map
from memkit._torch.tensors import version_of, versions_of
from memkit.train.models import device_of
from memkit.train.offload import offload_activations

Treatment: TypeAlias = Literal["full", "selective", "offload"]
TREATMENTS: tuple[Treatment, ...] = ("full", "selective", "offload")

_aten = torch.ops.aten
# What a "selective" block keeps of its forward: results that took many FLOPs for each of their bytes. Not bmm: in an
# attention that is written out it makes the scores, which are the largest tensors of the block.
KEPT_OPERATORS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.convolution.default,
        *FUSED_ATTENTION,
    }
)


class ChangedInputError(StateError):
    """A block changes its input in place, so that it cannot run again."""


_OWN_SETTINGS = {"use_reentrant", "context_fn", "determinism_check", "debug", "early_stop", "preserve_rng_state"}


class TreatedForward:
    """A block's forward whose activations are kept small.

    An object and not a closure: a deep copy of the model (an EMA) must call the copy's block, not the original's.

    Args:
        name: The block's name in the model, for messages.
        block: The module whose forward it is.
        treatment: What is done.
        elsewhere: Where the activations of offloaded blocks wait, one for all blocks of a model.
    """

    def __init__(self, name: str, block: nn.Module, treatment: Treatment, elsewhere: Elsewhere) -> None:
        self.treatment = treatment
        self._name = name
        self._block = block
        self._forward = block.__dict__.get("forward")  # somebody may have put one on the instance already
        self._watch = StateWatch(block)
        self._elsewhere = elsewhere
        self.is_suspended = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block's own forward, treated where gradients are wanted.

        Raises:
            StateError: The block would run again in backward, and has changed its input in place.
        """
        forward = self._forward or functools.partial(type(self._block).forward, self._block)
        if self.is_suspended or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if self.treatment == "offload":
            if torch.compiler.is_compiling():  # a graph has no hooks inside: the block runs between graphs, as written
                return torch.compiler.disable(self._offloaded)(forward, *args, **kwargs)  # type: ignore[no-untyped-call]
            return self._offloaded(forward, *args, **kwargs)
        if torch.compiler.is_compiling():  # the compiler recomputes by copying operators, not by calling Python again
            if self.treatment == "full":
                return checkpoint(forward, *args, use_reentrant=False, **kwargs)
            contexts = functools.partial(create_selective_checkpoint_contexts, _policy)
            return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        inputs = _tensors((args, kwargs))
        versions = versions_of(inputs)
        if _OWN_SETTINGS & kwargs.keys():  # checkpoint() would take these for its own
            forward, kwargs = functools.partial(forward, **kwargs), {}
        out = checkpoint(forward, *args, use_reentrant=False, context_fn=self._contexts, **kwargs)
        is_changed = versions != versions_of(inputs)
        if is_changed and any(tensor.requires_grad for tensor in _tensors(out)):  # else it never runs again
            raise ChangedInputError(
                f"the forward of the block {self._name!r} with checkpoint {self.treatment!r}",
                got=f"a {type(self._block).__name__} that changes its own input in place",
                expected="a block that leaves its inputs as they are, for it runs again on them in backward",
                fix="set inplace=False where it does so, choose a larger block around it that does not begin with an "
                "operation in place, or give this one checkpoint 'offload'.",
            )
        return out

    def _offloaded(self, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
        with self._elsewhere.of(self._block):
            return forward(*args, **kwargs)

    def _contexts(self) -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
        replay = Replay(self._watch)
        if self.treatment == "full":
            return replay, replay.again
        kept = KeptResults()
        return kept.first(replay), Again(lambda: kept.repetition(replay))


class Elsewhere:
    """Where the activations of a model's offloaded blocks wait: on the CPU the disk, beside an accelerator the host.

    One for all blocks, so that what two of them save is moved once. A copy of a model gets its own.
    """

    def __init__(self) -> None:
        self._offloads: dict[Literal["disk", "host"], offload_activations] = {}

    def __reduce__(self) -> tuple[type[Elsewhere], tuple[()]]:
        return Elsewhere, ()

    def of(self, block: nn.Module) -> contextlib.AbstractContextManager[offload_activations]:
        """A context in which a block's forward is offloaded; its parameters and buffers stay."""
        to: Literal["disk", "host"] = "disk" if device_of(block).type == "cpu" else "host"
        if to not in self._offloads:
            self._offloads[to] = offload_activations(to=to)
        return self._offloads[to].within(block)


class KeptResults:
    """Results of `KEPT_OPERATORS` in one forward, which are given out when it runs again.

    As `torch.utils.checkpoint.create_selective_checkpoint_contexts`, but a kept graph can be used again, and a result
    that is changed in place afterwards (by ``ReLU(inplace=True)``) is computed again where torch's raises an error.
    """

    def __init__(self) -> None:
        self._results: list[tuple[Any, Any]] = []  # operator and result in order; None where it must be computed again

    @contextlib.contextmanager
    def first(self, replay: Replay) -> Iterator[None]:
        """Run a forward for the first time."""
        with replay, _OnKept(self._keep):
            yield
        self._results = [(func, result if _is_unchanged(result) else None) for func, result in self._results]

    @contextlib.contextmanager
    def repetition(self, replay: Replay) -> Iterator[None]:
        """Run it again."""
        order = itertools.count()

        def run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            return self._give(next(order), func, args, kwargs)

        with replay.repetition(), _OnKept(run):
            yield

    def _keep(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        out = func(*args, **kwargs)
        result = tree_map(lambda part: _Result(part) if isinstance(part, torch.Tensor) else part, out)
        self._results.append((func, result))
        return out

    def _give(self, index: int, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        then, result = self._results[index] if index < len(self._results) else (None, None)
        if then != func:
            raise StateError(
                "backward() through a block with checkpoint 'selective'",
                got=f"{func} in the repeated forward where the first one ran {then or 'nothing more'}",
                expected="a forward that runs the same operators when it runs again",
                fix="give this block checkpoint 'offload', or make its forward depend on its inputs alone.",
            )
        if not keeps_graph():
            self._results[index] = func, None  # so that it goes as soon as backward is through with it
        if not _is_unchanged(result):
            return func(*args, **kwargs)
        return tree_map(lambda part: part.get() if isinstance(part, _Result) else part, result)


class _Result:
    """A tensor, and whether it is still what it was."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = _detached(tensor)
        self._version = version_of(self._tensor)

    def is_unchanged(self) -> bool:
        return version_of(self._tensor) == self._version

    def get(self) -> torch.Tensor:
        return _detached(self._tensor)  # an object of its own, which autograd will give a history


class _OnKept(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own class hook
    """Runs `KEPT_OPERATORS` through a function."""

    supports_higher_order_operators = True

    def __init__(self, run: Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = run

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled parts of the block run compiled, as torch's own selective checkpoint does."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        return self._run(func, args, kwargs) if _is_kept(func, args, kwargs) else func(*args, **kwargs)


def _is_kept(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Say whether a result is kept. One with dropout inside is not: what is skipped would draw no random numbers."""
    if func not in KEPT_OPERATORS:
        return False
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return True
    place = [argument.name for argument in schema_of(func).arguments].index("dropout_p")
    return not (args[place] if place < len(args) else kwargs.get("dropout_p", 0))


def _policy(context: object, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:  # noqa: ARG001 - torch's form
    return CheckpointPolicy.MUST_SAVE if _is_kept(func, args, kwargs) else CheckpointPolicy.PREFER_RECOMPUTE


def _tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors of a pytree that count their changes."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and not leaf.is_inference()]


def _is_unchanged(result: Any) -> bool:
    return result is not None and all(part.is_unchanged() for part in tree_leaves(result) if isinstance(part, _Result))


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    # Below autograd a view would count its changes by itself; torch's own selective checkpoint does this, too.
    with counting_in_views():
        return tensor.detach()
