"""Reduce a block's activation memory: by full or selective recomputation, or by offloading."""

from __future__ import annotations

import contextlib
import functools
import itertools
import types
import zlib
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any, Literal, NoReturn, TypeAlias

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from memkit._core.errors import AbsentError, StateError, warn_user
from memkit._machine import devices
from memkit._recorder.attributes import Attributes
from memkit._recovery.makeup import Flags
from memkit._recovery.replay import Replay, ReusableRerun
from memkit._recovery.snapshot import StateWatch
from memkit._tape.kept import KeptResults, is_kept
from memkit._torch.graph import have_tangents, is_transforming
from memkit._torch.pytree import tree_leaves
from memkit._torch.script import as_written
from memkit._torch.tensors import bit_sums, versions_of
from memkit.train.checks import check_transforms
from memkit.train.models import device_of
from memkit.train.nesting import LookInside, Nesting
from memkit.train.offload import offload_activations

Treatment: TypeAlias = Literal["full", "selective", "offload"]
TREATMENTS: tuple[Treatment, ...] = ("full", "selective", "offload")


class ChangedInputError(StateError):
    """A block changes its input in place, so it cannot be recomputed."""


_WITHOUT_STATE = (torch.Tensor, nn.Module, bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
# Modules have a rollback of their own, and functions are long to search.
_NOT_PASSED = (nn.Module, types.FunctionType, types.MethodType, functools.partial)
_NUM_COMPARED = 2  # forwards of each block; later ones do the same
_OWN_SETTINGS = {"use_reentrant", "context_fn", "determinism_check", "debug", "early_stop", "preserve_rng_state"}


class _Passed:
    """The tensors and arrays that a block was passed, in objects too, and the state of the objects.

    Args:
        arguments: Positional and keyword arguments.
    """

    def __init__(self, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        leaves = tree_leaves(arguments)
        self.tensors = [each for each in leaves if isinstance(each, torch.Tensor) and not each.is_inference()]
        self.arrays: list[Any] = []
        others = [each for each in leaves if not isinstance(each, _WITHOUT_STATE)]
        self.held = Attributes(others, except_for=_NOT_PASSED) if others else None
        if self.held is not None:
            self.tensors += [each for each in self.held.plain_tensors() if not each.is_inference()]
            self.arrays = self.held.arrays()

    def sums(self) -> list[int]:
        """Return sums that change if a tensor or an array is written to."""
        return [*bit_sums(self.tensors), *(zlib.crc32(each.tobytes()) for each in self.arrays)]


class _SameInputs:
    """A block's forward that compares what its rerun is passed with its first run's, by sums of the bits.

    No version tells of a write through ``.data`` or NumPy.

    Args:
        forward: The block's forward.
        refuse: Raises the error, given whether another number of tensors was passed.
    """

    def __init__(self, forward: Callable[..., Any], refuse: Callable[[bool], NoReturn]) -> None:
        self._forward, self._refuse = forward, refuse
        self._sums: list[int] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        sums = _Passed((args, kwargs)).sums()
        if self._sums is None:
            self._sums = sums
        elif self._sums != sums:
            self._refuse(len(self._sums) != len(sums))
        return self._forward(*args, **kwargs)


class _AsPassed:
    """A block's forward that gets its lists, dicts and objects in a rerun as they were passed.

    Blocks pop from lists that they share, and collapse the edges of a mesh that the next block gets.

    Args:
        forward: The block's forward.
        arguments: Its arguments.
        held: The state of the objects among them.
        flags: Which of its tensors require a gradient.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
        held: Attributes | None,
        flags: Flags,
    ) -> None:
        self._forward, self._held, self._flags = forward, held, flags
        self._arguments, self._is_rerun = _copied_containers(arguments, {}), False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._is_rerun:
            self._is_rerun = True
            return self._forward(*args, **kwargs)
        args, kwargs = _copied_containers(self._arguments, {})
        with self._flags.again(), self._held.in_effect() if self._held is not None else contextlib.nullcontext():
            return self._forward(*args, **kwargs)


class TreatedForward:
    """A block's forward with reduced activation memory.

    It is an object, not a closure: a deep copy of the model (an EMA) must call the copy's block, not the original's.

    Args:
        name: The block's name in the model, for messages.
        block: The module it belongs to.
        treatment: The treatment to apply.
        offload: The activation store of offloaded blocks, shared by all blocks of a model.
        nesting: Detects that the model itself checkpoints the block.
        told: Names of blocks whose plain runs a warning has told of, shared by all blocks of a model.
    """

    def __init__(
        self,
        name: str,
        block: nn.Module,
        treatment: Treatment,
        offload: BlockOffload,
        nesting: Nesting,
        told: list[str],
    ) -> None:
        self.treatment = treatment
        self._name = name
        self._block = block
        self._forward = block.__dict__.get("forward")  # the instance may already have its own
        self._watch = StateWatch(block)
        self._offload = offload
        self._nesting, self._is_looked_into = nesting, False
        self._told = told
        self._num_compared = 0
        self._running_in: set[int] = set()  # threads in which the block's own forward runs
        self.is_suspended = False

    @property
    def first_step_bytes(self) -> int:
        """Copies of the block's state in its first forward, which were not needed."""
        return self._watch.dropped_bytes

    @property
    def __globals__(self) -> NoReturn:
        """Refuse a compiler that reads the forward's source: here, `torch.jit.script` reads this attribute first."""
        raise AbsentError(
            f"torch.jit.script of the block {self._name!r}, with checkpoint {self.treatment!r}",
            got="a model whose blocks memkit treats, chosen by checkpoint= or recomputed since an out-of-memory",
            expected="forwards that are plain functions, whose source TorchScript reads",
            fix="end the treatment, with trainer.close() or Checkpointing.close(), before torch.jit.script(model) and "
            "before a deep copy is made for it; or run the model instead: with torch.no_grad(): "
            "torch.jit.trace(model.eval(), x), or torch.export.export(model.eval(), (x,)).",
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block's own forward, with the treatment if gradients are enabled.

        A call from within that forward (a block that calls itself for a child) runs plainly: the outer one covers it.

        So does one inside a transform of `torch.func`, or with tangents: backward would run the block again outside.

        Raises:
            StateError: The block is to be recomputed in backward, but has changed its input in place. From backward:
                its input was changed unseen by autograd, which the first two forwards of each block are tested for.
        """
        forward = self._forward or functools.partial(type(self._block).forward, self._block)
        if self.is_suspended or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            return self._compiled(forward, *args, **kwargs)
        if get_ident() in self._running_in:
            return forward(*args, **kwargs)
        forward = functools.partial(self._run, forward)
        if self.treatment == "offload":
            return self._offloaded(forward, *args, **kwargs)
        passed = _Passed((args, kwargs))
        if is_transforming() or have_tangents(itertools.chain(passed.tensors, self._block.parameters())):
            self._tell_of_plain_runs()
            return forward(*args, **kwargs)
        versions = versions_of(passed.tensors)
        if self._num_compared < _NUM_COMPARED and not devices.is_capturing():
            self._num_compared += 1
            forward = _SameInputs(forward, self._refuse_unseen_write)
        forward = _AsPassed(forward, (args, kwargs), passed.held, Flags(passed.tensors))
        if _OWN_SETTINGS & kwargs.keys():  # checkpoint() would consume these itself
            forward, kwargs = functools.partial(forward, **kwargs), {}
        try:
            out = checkpoint(forward, *args, use_reentrant=False, context_fn=self._contexts, **kwargs)
        except RuntimeError as error:
            check_transforms(error, call=f"the forward of the block {self._name!r} with checkpoint {self.treatment!r}")
            raise
        is_changed = versions != versions_of(passed.tensors)
        if is_changed and any(tensor.requires_grad for tensor in _tensors(out)):  # otherwise it is never recomputed
            raise ChangedInputError(
                f"the forward of the block {self._name!r} with checkpoint {self.treatment!r}",
                got=f"a {type(self._block).__name__} that changes its own input in place",
                expected="a block that leaves its inputs unchanged, because it runs on them again in backward",
                fix="set inplace=False in that block, choose a larger block around it that does not begin with an "
                "in-place operation, or use checkpoint 'offload' for this block.",
            )
        return out

    def _compiled(self, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run the forward in a graph: the compiler recomputes by copying operators, not by rerunning Python."""
        if self.treatment == "offload":  # no hooks inside a graph: run the block uncompiled
            return torch.compiler.disable(self._offloaded)(forward, *args, **kwargs)  # type: ignore[no-untyped-call]
        if self.treatment == "full":
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        contexts = functools.partial(create_selective_checkpoint_contexts, _policy)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    def _run(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        thread = get_ident()
        self._running_in.add(thread)
        try:
            return forward(*args, **kwargs)
        finally:
            self._running_in.discard(thread)

    def _tell_of_plain_runs(self) -> None:
        """Warn, once for a model."""
        if not self._told:
            self._told.append(self._name)
            warn_user(
                f"The block {self._name!r} with checkpoint {self.treatment!r} is called inside torch.func.vmap, "
                "torch.func.grad or another transform of functions, or with tangents (torch.func.jvp): backward would "
                "run it again outside of that. It runs as without a checkpoint there, with the same result, and its "
                "activations are kept. Way out: derivatives by torch.autograd.grad(..., create_graph=True), and losses "
                "with reduction='none' in place of vmap, are recomputed."
            )

    def _refuse_unseen_write(self, is_other_number: bool) -> NoReturn:  # noqa: FBT001 - the only argument
        got = "an input with other values than in the forward, written through .data or NumPy, unseen by autograd"
        fix = "write it out of place, as x = x.masked_fill(mask, 0), or leave this block out of checkpoint=."
        if is_other_number:
            got = "a container with other tensors than in the forward: the block or code after it changed its content"
            fix = "pass a plain list or dict, as list(container): the block gets it again as it was. Or use checkpoint "
            fix += "'offload' for this block."
        raise ChangedInputError(
            f"backward() through the block {self._name!r} with checkpoint {self.treatment!r}",
            got=got,
            expected="inputs that stay as they are until backward, because the block runs on them again",
            fix=fix,
        )

    def _offloaded(self, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
        # Scripted functions keep the plan of their first runs for all blocks, also for those that run again.
        with as_written(), self._offload.of(self._block):
            return forward(*args, **kwargs)

    def _contexts(self) -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
        replay = Replay(self._watch)
        first: contextlib.AbstractContextManager[None] = replay
        repetition = replay.repetition
        if self.treatment == "selective":
            kept = KeptResults(
                "backward() through a block with checkpoint 'selective'",
                "use checkpoint 'offload' for this block, or make its forward depend on its inputs alone.",
            )
            first, repetition = _within(replay, kept.first()), lambda: _within(replay.repetition(), kept.repetition())
        return self._nesting.around(self._name, first), ReusableRerun(lambda: self._looked_into(repetition()))

    @contextlib.contextmanager
    def _looked_into(self, repetition: contextlib.AbstractContextManager[None]) -> Iterator[None]:
        """Run a repetition; in the first one also watch for checkpoints inside the block."""
        is_first, self._is_looked_into = not self._is_looked_into, True
        with repetition, LookInside(self._nesting, self._name) if is_first else contextlib.nullcontext():
            yield


class BlockOffload:
    """Store for the activations of a model's offloaded blocks: on disk for the CPU, in host memory for an accelerator.

    One for all blocks, so that a tensor saved by two of them is moved once. A copy of a model gets its own.
    """

    def __init__(self) -> None:
        self._offloads: dict[Literal["disk", "host"], offload_activations] = {}

    def __reduce__(self) -> tuple[type[BlockOffload], tuple[()]]:
        return BlockOffload, ()

    def of(self, block: nn.Module) -> contextlib.AbstractContextManager[offload_activations]:
        """Return a context that offloads a block's forward; its parameters and buffers stay."""
        to: Literal["disk", "host"] = "disk" if device_of(block).type == "cpu" else "host"
        if to not in self._offloads:
            self._offloads[to] = offload_activations(to=to)
        return self._offloads[to].within(block)


@contextlib.contextmanager
def _within(
    outer: contextlib.AbstractContextManager[None], inner: contextlib.AbstractContextManager[None]
) -> Iterator[None]:
    with outer, inner:
        yield


def _policy(context: object, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:  # noqa: ARG001 - torch's form
    return CheckpointPolicy.MUST_SAVE if is_kept(func, args, kwargs) else CheckpointPolicy.PREFER_RECOMPUTE


def _tensors(tree: Any) -> list[torch.Tensor]:
    """List the tensors of a pytree that have version counters."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and not leaf.is_inference()]


def _copied_containers(value: Any, copies: dict[int, Any]) -> Any:
    """Copy lists and dicts, also in tuples; what they hold stays, and what is passed twice is one copy.

    Args:
        value: The value.
        copies: Those made so far, by `id` of the original.
    """
    kind = type(value)
    if kind not in (list, dict, tuple):
        return value
    if kind is tuple:
        return tuple(_copied_containers(each, copies) for each in value)
    if id(value) not in copies:
        copies[id(value)] = made = kind()
        if kind is list:
            made.extend(_copied_containers(each, copies) for each in value)
        else:
            made.update({key: _copied_containers(each, copies) for key, each in value.items()})
    return copies[id(value)]
