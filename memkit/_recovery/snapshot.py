"""Snapshots of the state that a forward may change besides its results: buffers, modes, random state."""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
import weakref
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from memkit._core.errors import StateError, warn_user
from memkit._core.printable import list_some
from memkit._core.recent import keep_newest
from memkit._machine import random_state
from memkit._recorder.attributes import Attributes
from memkit._recovery.attempt import insist
from memkit._recovery.loss_key import key_of_loss
from memkit._torch import foreach
from memkit._torch.fake import FakeTensor
from memkit._torch.modules import all_parameters, buffers_of, is_compiled, parameters_of, training_flags
from memkit._torch.ranks import gathered_parameters
from memkit._torch.tensors import as_integers, bit_sums, content_sums, is_view, leaf_gradient, version_of

_Key = tuple[nn.Module, str]
_Reference = weakref.ref[nn.Module]
_NUM_SEARCHES = 3  # for generators: a forward may create its own
_COMPARED_BYTES = 2**18  # at a time: a card needs a quarter of it for the results
_LARGEST_BYTES = 2**26  # of a plain attribute that a trial saves: a codebook, but no replay buffer
_MOST_FROZEN_BYTES = 2**28  # of larger frozen parameters that a trial saves: a momentum encoder, but no language model
_SMALL_BYTES = 2**20  # buffers up to this size are copied whether or not they ever changed


class StateWatch:
    """Tracks the state that a forward may change: buffers, attributes, modes, and generators that modules hold.

    Large buffers that a forward leaves unchanged are not copied: a BatchNorm's statistics and a spectral norm's vectors
    change, a large mask or position table does not.

    Args:
        module: The module, including its children.

    Attributes:
        module: The module.
        restless: Modules that `discover` has found, and whose forwards may change their attributes: until one is seen
            to leave them unchanged. By weak references, like all that is known of modules that the loss function may
            make anew in each step; in a dict for its order.
        changes_attributes: Whether forwards may change attributes: until one is seen to leave them unchanged.
        is_restless_inside: Whether attributes were seen to differ in the middle of a forward, which may put them back.
        moves_trained: The same for the parameters that are trained.
        is_loss_restless_inside: The same for what a loss function holds.
        loss_fn: The loss function of the current step, which may hold a batch; None if there is none.
        quiet_losses: Keys of loss functions that were seen to change nothing of what they hold.
        last_quiet: Returns the last of them, if it is still there: most loops call the same one in each step.
        host: Cache of the random state of NumPy and Python.
        dropped_bytes: Copies that the first forwards had, until they were seen to leave the originals unchanged.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, self.dropped_bytes = module, 0
        self._own = dict.fromkeys(module.modules())
        self._found: dict[_Reference, None] = {}
        self.restless: dict[_Reference, None] = {}
        # torch.compile recompiles, and warns, when it finds a global module hook.
        self._is_compiled = any(is_compiled(each) for each in self._own)
        self.changes_attributes = self.moves_trained = self._watches_attributes = not self._is_compiled
        self.is_restless_inside = self.is_loss_restless_inside = False
        self.loss_fn: object = None
        self.quiet_losses: dict[object, None] = {}
        self.last_quiet: Callable[[], object] = _nothing
        self._has_told_of_held = self._has_told_of_trained = False
        self._still: dict[tuple[_Reference, str], int] = {}
        self._generators: dict[int, Any] = {}
        self._num_searches = 0
        self._hook: RemovableHandle | None = None  # the last one
        self.host = random_state.HostState()

    @property
    def owners(self) -> dict[nn.Module, None]:
        """All modules whose state is tracked, in a dict for its order: the module's own, and those that were found."""
        found = map(operator.call, self._found)  # in no step of Python more
        owners: dict[Any, None] = self._own | dict.fromkeys(found)
        if None in owners:
            del owners[None]
            self._found = dict.fromkeys(map(weakref.ref, list(owners)[len(self._own) :]))
        return owners

    def held(self, *, is_trial: bool) -> Attributes | None:
        """Save what the loss function holds; None if attributes are not looked at, unless it is for a trial."""
        # A rollback looks after the model's own parameters, also where the loss function reaches them in its closure.
        mine = set(map(id, all_parameters(self.module)))
        apart = mine if is_trial or self.changes_attributes else set()
        how: dict[str, Any] = {"apart": apart, "gradients_but_of": mine, "with_optimizers": True}
        if is_trial:
            return Attributes([self.loss_fn], content="saved", trained=(), **how)
        # A compiler's state in the model's own modules is not the user's.
        own = tuple({type(each) for each in self.module.modules()}) if self._is_compiled else ()
        return Attributes([self.loss_fn], content="versions", is_for_rerun=True, except_for=own, **how)

    def held_by_others(self, found: nn.Module | None = None) -> list[tuple[nn.Module, Attributes]]:
        """Save the attributes of networks outside of the model; where the loss function is known, `held` has them."""
        if self.loss_fn is not None or not self._watches_attributes:
            return []
        roots = map(operator.call, self.restless) if found is None else (found,)
        how: dict[str, Any] = {"content": "versions", "is_for_rerun": True}
        return [(each, Attributes([each], **how)) for each in roots if each is not None]

    def learn_of_held(self, held: Attributes) -> bool:
        """Compare with what was saved before a completed forward; whether all of it is as it was."""
        if self.loss_fn is None or self.is_loss_restless_inside or held.differ():
            return False
        keep_newest(self.quiet_losses, key_of_loss(self.loss_fn), None)  # each step may make a loss object of its own
        with contextlib.suppress(TypeError):  # an object with slots
            self.last_quiet = weakref.ref(self.loss_fn)
        return True

    def tell_of_held(self, differences: Sequence[str], what: str = "what loss_fn holds") -> None:
        """Warn, once, of what a failed attempt has changed and nobody restores."""
        if differences and not self._has_told_of_held:
            self._has_told_of_held = True
            warn_user(
                f"Recovery from out-of-memory: the attempt that failed had changed {what} "
                f"({list_some(differences, 3)}), and that stays changed: if the loss depends on it, the result differs "
                "from that of a step which fits. Way out: keep such state in buffers or attributes of the model, which "
                "are restored, or change it after the step."
            )

    def tell_of_trained(self, *, is_trial: bool) -> None:
        """Warn, once, that a trial or a failed attempt has moved parameters, which nobody restores."""
        if self._has_told_of_trained:
            return
        self._has_told_of_trained = True
        if is_trial:
            warn_user(
                "A run of memkit's own, of which nothing should stay, has moved parameters that the model's forward "
                "trains itself, and they stay moved: unless the forward sets them anew whenever it runs, the result "
                "differs from that of a training without the run. Way out: train them after the step, or omit "
                "memory=... and set accumulation_steps."
            )
        else:
            warn_user(
                "Recovery from out-of-memory: the attempt that failed had moved parameters that the model's forward "
                "trains itself, and they stay moved: unless the forward sets them anew whenever it runs, the result "
                "differs from that of a step which fits. Way out: call requires_grad_(False) on its networks that the "
                "optimizer does not train (these are restored), or train them after the step."
            )

    def generators(self) -> Iterable[Any]:
        """Return random generators (torch, NumPy, Python) in modules' attributes, or in lists and dicts there.

        The search runs only in the first steps, which may create generators.
        """
        if self._num_searches < _NUM_SEARCHES:
            self._num_searches += 1
            self._generators |= {id(each): each for owner in self.owners for each in _held_generators(owner)}
        return self._generators.values()

    def trained(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that are trained."""
        for owner in self.owners:
            for each in parameters_of(owner).values():
                if each is not None and each.requires_grad and not is_lazy(each):
                    yield each

    def snapshot(self) -> BufferSnapshot:
        """Copy the buffers, except large ones that an earlier forward left unchanged."""
        return BufferSnapshot(self.owners if self._found else self._own, self._still)

    def learn(self, snapshot: BufferSnapshot) -> None:
        """Compare with a snapshot taken before a completed forward; drop copies that are not needed."""
        for key, entry in snapshot.entries.items():
            if entry.copy is None or entry.copy.nbytes <= _SMALL_BYTES:
                continue
            now = buffers_of(key[0]).get(key[1])
            if now is not None and _mark(now) == entry.mark and are_same(entry.copy, now):
                self._still = {each: digest for each, digest in self._still.items() if each[0]() is not None}
                self._still[weakref.ref(key[0]), key[1]] = entry.digest = _digest(entry.copy)
                self.dropped_bytes += entry.copy.nbytes
                entry.copy = None

    def adopt(self, modules: Iterable[nn.Module], snapshot: BufferSnapshot) -> None:
        """Track more modules, with their buffers as they are now."""
        found = [each for each in modules if each not in self._own and weakref.ref(each) not in self._found]
        self._found.update(dict.fromkeys(map(weakref.ref, found)))
        snapshot.add(found, self._still)

    @contextlib.contextmanager
    def discover(self, rollback: Rollback) -> Iterator[None]:
        """Detect, in the block, modules outside the watched one (a GAN's other network) before they first run."""
        thread = threading.get_ident()  # other threads train models of their own

        def notice(module: nn.Module, inputs: Any) -> None:  # noqa: ARG001 - the hook's signature
            is_known = module in self._own or weakref.ref(module) in self._found
            if not is_known and threading.get_ident() == thread:
                self.adopt(module.modules(), rollback.buffers)
                restless = (*self.restless, weakref.ref(module))
                self.restless = {each: None for each in restless if each() is not None}
                rollback.others += self.held_by_others(module)

        if self._is_compiled:
            yield
            return
        if self._hook is not None:  # an interrupt left it
            self._hook.remove()
        self._hook = register_module_forward_pre_hook(notice)
        try:
            with looking_inside(self.module, rollback.look_inside):
                yield
        finally:
            self._hook.remove()


@contextlib.contextmanager
def looking_inside(model: nn.Module, look: Callable[[], object]) -> Iterator[None]:
    """Call ``look`` in forwards of the block, at ever fewer of the calls of their modules, and at their ends.

    State that a forward changes and puts back (a depth, a list that the loss empties) can be seen only there.
    """
    thread, num_calls, next_call = threading.get_ident(), 0, 1

    def notice(_: nn.Module, __: Any) -> None:
        nonlocal num_calls, next_call
        if torch.compiler.is_compiling():  # a function around the model: nothing of this is for its graph
            return
        if threading.get_ident() == thread:
            num_calls += 1
            if num_calls == next_call:
                next_call += max(1, num_calls // 2)
                look()

    def notice_end(module: nn.Module, _: Any, __: Any) -> None:
        if not torch.compiler.is_compiling() and module is model and threading.get_ident() == thread:
            look()

    if any(map(is_compiled, model.modules())):  # it would be compiled again, for a hook on all modules
        yield
        return
    hooks = register_module_forward_pre_hook(notice), register_module_forward_hook(notice_end)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@dataclass(slots=True)
class _Entry:
    buffer: torch.Tensor | None  # the object itself: a forward may replace it
    copy: torch.Tensor | None
    gradient: torch.Tensor | None = None  # where a forward may keep counts
    gradient_copy: torch.Tensor | None = None
    is_leaf: bool = True
    mark: tuple[int, int] | None = None  # of one that is not copied, or too large to keep the copy if it is not needed
    digest: int | None = None  # of a large buffer that earlier forwards left unchanged; a sparse one has none


class BufferSnapshot:
    """Values of buffers at one instant.

    Args:
        owners: The modules that have the buffers.
        still: Buffers that are not copied, with their known digests.

    Attributes:
        owners: The same modules, without those that `add` takes in.
        entries: The buffers, by module and name.
    """

    def __init__(self, owners: Collection[nn.Module], still: Mapping[tuple[_Reference, str], int]) -> None:
        self.owners = owners
        self.entries: dict[_Key, _Entry] = {}
        if holders := list(filter(buffers_of, owners)):
            self.add(holders, still)

    def add(self, owners: Iterable[nn.Module], still: Mapping[tuple[_Reference, str], int]) -> None:
        """Add the buffers of more modules."""
        holders = list(filter(buffers_of, owners))
        if not holders:
            return
        copied: dict[_Key, torch.Tensor] = {}
        for owner in holders:
            for name, buffer in buffers_of(owner).items():
                key, digest = (owner, name), still.get((weakref.ref(owner), name))
                if buffer is None or is_lazy(buffer) or digest is not None or buffer.layout is not torch.strided:
                    self.entries[key] = _Entry(buffer, None, mark=_mark(buffer), digest=digest)
                else:
                    copied[key] = buffer
        values = _all_cloned(list(copied.values())) if copied else []
        for (key, buffer), value in zip(copied.items(), values, strict=True):
            entry = self.entries[key] = _Entry(buffer, value, leaf_gradient(buffer), is_leaf=buffer.is_leaf)
            if entry.gradient is not None:
                entry.gradient_copy = cloned(entry.gradient)
            entry.mark = _mark(buffer) if value.nbytes > _SMALL_BYTES else None

    def differ(self) -> bool:
        """Return whether a buffer that was copied has changed."""
        for (owner, name), entry in self.entries.items():
            now, copy = buffers_of(owner).get(name), entry.copy
            if now is not entry.buffer:
                return True
            if not (now is None or copy is None or (now.shape == copy.shape and are_same(copy, now))):
                return True
        return False

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the buffers: the same objects with their original values.

        Raises:
            StateError: A large buffer changed that no earlier forward had changed, so its value was not saved.
        """
        for (owner, name), entry in self.entries.items():
            if entry.copy is None and entry.buffer is not None and not is_lazy(entry.buffer):
                was_written = entry.digest is not None and _digest(entry.buffer) != entry.digest  # through .data
                if was_written or _mark(entry.buffer) != entry.mark:
                    raise StateError(
                        "rolling back a failed attempt",
                        got=f"the large buffer {name!r} of a {type(owner).__name__}, which the failed attempt "
                        "changed for the first time",
                        expected="large buffers that change in the first steps, or never",
                        fix="restart from the last checkpoint.",
                    )
            elif entry.copy is not None and entry.buffer is not None:
                if entry.buffer.shape != entry.copy.shape:  # an observer's first forward resizes its buffers
                    entry.buffer.data = entry.buffer.data.resize_(entry.copy.shape)
                entry.buffer.data.copy_(entry.copy)
                if entry.is_leaf and not entry.buffer.is_leaf and not is_view(entry.buffer):
                    entry.buffer.detach_()  # what the failed attempt wrote there holds its graph
                if leaf_gradient(entry.buffer) is not entry.gradient:
                    entry.buffer.grad = entry.gradient
                if entry.gradient is not None and entry.gradient_copy is not None:
                    entry.gradient.data.copy_(entry.gradient_copy)
            if name in buffers_of(owner):
                buffers_of(owner)[name] = entry.buffer


class HeldState:
    """Saved state of a function or a module, and of all that it holds: attributes, variables, buffers, generators.

    Args:
        root: The function or module.
        content: See `Attributes`.
        trained: See `Attributes`.
        left_out: See `Attributes`.
        except_for: Modules whose buffers are left out.
    """

    def __init__(
        self,
        root: object,
        *,
        content: Literal["counts", "saved"],
        trained: Container[int] | None = None,
        left_out: Container[int] = (),
        except_for: Container[nn.Module] = (),
    ) -> None:
        self._attributes = Attributes([root], content=content, trained=trained, left_out=left_out)
        self._buffers = BufferSnapshot([each for each in self._attributes.modules() if each not in except_for], {})

    def differ(self) -> bool:
        """Return whether anything of it has changed."""
        return self._attributes.differ() or self._buffers.differ()

    def restore(self) -> None:
        """Restore all of it."""
        self._attributes.restore()  # before the buffers: what stands in a tensor's place leaves it again
        self._buffers.restore()


class RandomNumbers:
    """Saved random state of torch, NumPy, Python, and the generators that modules hold.

    Args:
        generators: Additional generators, of torch, NumPy or Python.
        of_torch: Whether to include torch's own random state, or leave it to other code.
        host: Cache of NumPy's and Python's state.
    """

    def __init__(
        self, generators: Iterable[Any] = (), *, of_torch: bool = True, host: random_state.HostState | None = None
    ) -> None:
        self._of_torch, self._host = of_torch, host
        self._random: random_state.RandomState | random_state.HostRandomState
        if of_torch:
            self._random = random_state.capture(host)
        else:
            self._random = random_state.capture_host() if host is None else host.get()
        self._states = [(each, random_state.generator_state(each)) for each in generators] if generators else []

    def restore(self) -> None:
        """Restore all generators."""
        if isinstance(self._random, random_state.RandomState):
            random_state.restore(self._random, self._host)
        else:
            random_state.restore_host(self._random, self._host)
        for generator, state in self._states:
            random_state.set_generator_state(generator, state)

    def have_moved(self) -> bool:
        """Return whether any number was drawn since the state was saved."""
        now = RandomNumbers((each for each, _ in self._states), of_torch=self._of_torch, host=self._host)
        pairs = zip(self._states, now._states, strict=True)
        return not random_state.is_same_state(self._random, now._random) or any(
            not random_state.is_same_state(a, b) for (_, a), (_, b) in pairs
        )

    def host_has_moved(self) -> bool:
        """Return whether NumPy or Python has drawn a number since the state was saved."""
        before = self._random.host if isinstance(self._random, random_state.RandomState) else self._random
        return not random_state.is_same_state(before, random_state.capture_host())

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Replay the draws from the saved state in the block, then restore the state from before the block."""
        now = RandomNumbers((each for each, _ in self._states), of_torch=self._of_torch, host=self._host)
        try:
            self.restore()
            yield
        finally:
            now.restore()


def held_generators(modules: Iterable[nn.Module]) -> list[Any]:
    """Return random generators in attributes of modules and their children, or in lists and dicts there."""
    owners = dict.fromkeys(owner for module in modules for owner in module.modules())
    return list({id(each): each for owner in owners for each in _held_generators(owner)}.values())


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values can be copied and compared in place; a sparse one has no bytes of its own."""
    return tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_inference())


class AttributeStates:
    """Saved attributes of modules, with the contents of their lists, dictionaries and non-trainable tensors.

    Args:
        watch: The watch of the modules.
        is_trial: Whether nothing may stay, and no forward follows: weights that hooks compute anew before each are
            saved, too. Larger tensors are copied than otherwise, and frozen parameters of 256 MiB in all; changes of
            still larger ones are refused.
    """

    def __init__(self, watch: StateWatch, *, is_trial: bool = False) -> None:
        self._attributes = Attributes([watch.module], content="arrays", is_for_rerun=not is_trial)
        largest_bytes = _LARGEST_BYTES if is_trial else _SMALL_BYTES
        buffers = {id(each) for each in watch.module.buffers()}
        gathered = gathered_parameters(watch.module.modules())
        frozen = [each for each in all_parameters(watch.module) if not each.requires_grad and id(each) not in gathered]
        frozen = [each for each in frozen if _is_dense(each)]
        plain = [each for each in self._attributes.plain_tensors() if _is_dense(each) and id(each) not in buffers]
        saved = _worth_saving(frozen, _MOST_FROZEN_BYTES if is_trial else 0)
        self._tensors = [
            (each, version_of(each), cloned(each) if is_saved else None)
            for each, is_saved in (
                *((each, each.nbytes <= largest_bytes) for each in plain),
                *zip(frozen, saved, strict=True),
            )
        ]
        # Writes through `.data`, as to a codebook, make no new version. Only trials read all of the frozen parameters.
        digested = (torch.Tensor, nn.Parameter) if is_trial else (torch.Tensor,)
        self._digests = [
            (each, _digest(each))
            for each, _, kept in self._tensors
            if kept is None and type(each) in digested and not each.is_meta
        ]

    @property
    def num_bytes(self) -> int:
        """Memory of the copies of tensors."""
        return sum(kept.nbytes for _, _, kept in self._tensors if kept is not None)

    @property
    def restored(self) -> set[int]:
        """Ids of the tensors whose content `restore` restores."""
        return {id(each) for each, _, kept in self._tensors if kept is not None}

    def plainly_differ(self) -> bool:
        """Return whether an attribute has changed, other than by a write to a tensor."""
        return self._attributes.differ()

    def differ(self) -> bool:
        """Return whether any attribute has changed.

        Versions do not tell of statistics in frozen parameters, to which `batch_norm` writes.
        """
        return (
            self._attributes.differ()
            or any(version_of(each) != version for each, version, _ in self._tensors)
            or not all(are_same(each, kept) for each, _, kept in self._tensors if kept is not None)
            or any(_digest(each) != digest for each, digest in self._digests)
        )

    @torch.no_grad()
    def restore(self) -> None:
        """Restore all attributes.

        Raises:
            StateError: A large tensor changed.
        """
        lost: list[tuple[int, ...]] = [each.shape for each in self._attributes.lost_arrays()]
        if not lost:
            self._attributes.restore()
        for each, version, kept in self._tensors:
            if kept is not None:
                each.data.copy_(kept)
            elif version_of(each) != version or any(one is each and _digest(one) != was for one, was in self._digests):
                lost.append(tuple(each.shape))
        if lost:
            raise StateError(
                "rolling back a failed attempt, or running a block again",
                got=f"a large tensor or array of shape {lost[0]} that forward changes in place, and that stays changed",
                expected="a registered buffer for each tensor that forward changes in place",
                fix="register the tensor with register_buffer, or update it after the step.",
            )


class Rollback:
    """Saved state of everything that a forward may change: random state, buffers, attributes, modes.

    Memory cost: a copy of the buffers, except large ones that earlier forwards left unchanged. Until forwards are known
    to leave attributes and frozen parameters unchanged, also a copy of those of their tensors that are at most 1 MiB.

    Args:
        watch: The watch of the model.
        of_torch: Whether to include torch's own random state, or leave it to other code.
        is_trial: Whether the forward is only a trial, of which nothing may stay: attributes too, whether or not they
            ever changed.

    Attributes:
        buffers: The buffers.
        random: The random state.
        attributes: The attributes; None if forwards leave them unchanged.
        held: What the loss function holds. Only a trial restores all of it; a failed attempt's changes are undone in
            the attributes of networks that have run, and else are told. None like the attributes.
        others: Networks outside of the model with what they hold, where no loss function is known.
    """

    def __init__(self, watch: StateWatch, *, of_torch: bool = True, is_trial: bool = False) -> None:
        self._watch = watch
        self.buffers = watch.snapshot()
        owners = self._owners = self.buffers.owners
        self._modes = training_flags(owners)
        self.random = RandomNumbers(watch.generators(), of_torch=of_torch, host=watch.host)
        self._is_trial = is_trial
        self._trained: list[tuple[nn.Parameter, Any]] = []
        if is_trial or watch.moves_trained:
            gathered = gathered_parameters(owners)
            self._trained = [(each, _content_mark(each)) for each in watch.trained() if id(each) not in gathered]
            if gathered and not self._trained:
                watch.moves_trained = False  # all of them are left to fully_shard
        self.attributes = None
        if watch.changes_attributes or is_trial:
            self.attributes = AttributeStates(watch, is_trial=is_trial)
        loss_fn, self.held = watch.loss_fn, None
        if loss_fn is not None:
            is_quiet = watch.last_quiet() is loss_fn or key_of_loss(loss_fn) in watch.quiet_losses
            self.held = watch.held(is_trial=is_trial) if is_trial or not is_quiet else None
        if is_trial and self.held is not None:  # which restores the parameters of others, found by an earlier trial
            own = set(map(id, all_parameters(watch.module)))
            self._trained = [pair for pair in self._trained if id(pair[0]) in own or not self.held.hold(pair[0])]
        if self.held is not None:  # a criterion that comes later, where forwards of a size that fits are not watched
            watch.adopt([each for each in self.held.holders() if isinstance(each, nn.Module)], self.buffers)
        self.others = watch.held_by_others() if watch.restless else []

    def discover(self) -> AbstractContextManager[None]:
        """Return a context for a forward: other modules that run in it are also rolled back from then on."""
        return self._watch.discover(self)

    def look_inside(self) -> None:
        """Find out, in the middle of a forward, what it may put back before its end."""
        if self._is_trial:
            return
        watch = self._watch
        if self.attributes is not None and not watch.is_restless_inside:
            watch.is_restless_inside = insist(self.attributes.plainly_differ, "comparing attributes")
        if self.held is not None and not watch.is_loss_restless_inside:
            watch.is_loss_restless_inside = insist(self.held.differ, "comparing what the loss holds")

    def learn(self) -> None:
        """Drop copies of buffers that the forward since then has left unchanged."""
        insist(lambda: self._watch.learn(self.buffers), "comparing buffers")
        attributes = None if self._watch.is_restless_inside else self.attributes
        if attributes is not None and not insist(attributes.differ, "comparing attributes"):
            self._watch.changes_attributes, self.attributes = False, None
            self._watch.dropped_bytes += attributes.num_bytes
        if self._trained and not insist(self._has_moved_trained, "comparing parameters"):
            self._watch.moves_trained, self._trained = False, []
        if self.held is not None and self._watch.learn_of_held(self.held):
            self.held = None
        for other in self.others.copy():
            module, held = other
            if not insist(held.differ, "comparing attributes"):
                self._watch.restless.pop(weakref.ref(module), None)
                self.others.remove(other)

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Run the block, then restore everything."""
        try:
            with self.discover():
                yield
        finally:
            self.restore()

    def restore(self, *, is_rerun: bool = True) -> None:
        """Restore everything in place; starts over if memory runs out on the way.

        Args:
            is_rerun: Whether the batch runs again: what the loss function holds then matters.
        """
        insist(functools.partial(self._restore, is_rerun=is_rerun), "undoing a failed attempt")

    def _restore(self, *, is_rerun: bool) -> None:
        if self.attributes is not None:
            self.attributes.restore()  # before the buffers: what forward has put in a tensor's place leaves it again
        self.buffers.restore()
        for module, is_training in zip(self._owners, self._modes, strict=True):
            if module.training != is_training:
                module.training = is_training
        self.random.restore()
        if self.held is not None:
            self._restore_held(self.held, is_rerun=is_rerun)
        for module, held in self.others:
            held.restore_modules(self._watch.owners)
            if is_rerun:
                what = f"tensors of a {type(module).__name__} outside of the model"
                self._watch.tell_of_held(held.differences(self._restored), what)
        if (self._is_trial or is_rerun) and self._has_moved_trained():
            self._watch.tell_of_trained(is_trial=self._is_trial)

    @property
    def _restored(self) -> set[int]:
        return set() if self.attributes is None else self.attributes.restored

    def _has_moved_trained(self) -> bool:
        return any(_content_mark(each) != mark for each, mark in self._trained)

    def _restore_held(self, held: Attributes, *, is_rerun: bool) -> None:
        if self._is_trial:
            held.restore(self._restored)
            return
        held.restore_modules(self._watch.owners)
        if is_rerun:  # the state of networks is back: what differs still is not theirs
            self._watch.tell_of_held(held.differences(self._restored))


def _nothing() -> None:
    """Return nothing, like a reference to an object that is gone."""


def _worth_saving(frozen: Sequence[torch.Tensor], room_bytes: int) -> list[bool]:
    """Return which parameters to save: all that are small, and larger ones as long as there is room for them."""
    are_saved = []
    for each in frozen:
        is_large = each.nbytes > _SMALL_BYTES
        are_saved.append(not is_large or each.nbytes <= room_bytes)
        room_bytes -= each.nbytes if is_large and are_saved[-1] else 0
    return are_saved


def cloned(buffer: torch.Tensor) -> torch.Tensor:
    """Return a copy that is not part of a graph and not an inference tensor."""
    with torch.inference_mode(mode=False):
        return buffer.detach().clone()


def _all_cloned(buffers: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return `cloned` of each buffer; ordinary tensors in one call, since a BatchNorm has three small ones."""
    if any(type(each) is not torch.Tensor or each.layout is not torch.strided for each in buffers):
        return [cloned(each) for each in buffers]
    with torch.inference_mode(mode=False), torch.no_grad():
        return foreach.clone_aside(buffers)


def are_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one shape have the same bits; NaN equals NaN.

    Large ones are compared a part at a time: a step within a budget has no room for more.
    """
    if isinstance(one, FakeTensor):
        return True  # in a simulation their versions tell
    if one.dtype is not other.dtype:  # of ``buffer.data = buffer.half()``
        return False
    if one.nbytes > _COMPARED_BYTES and one.dim():
        if len(one) == 1:
            return are_same(one[0], other[0])
        num_rows = max(1, len(one) * _COMPARED_BYTES // one.nbytes)
        return all(map(are_same, torch.split(one, num_rows), torch.split(other, num_rows)))
    return torch.equal(as_integers(one), as_integers(other))


def _mark(buffer: torch.Tensor | None) -> tuple[int, int]:
    """Return identity and version: the mark changes if the buffer is overwritten or replaced."""
    if buffer is None or is_lazy(buffer) or buffer.is_inference():
        return id(buffer), 0
    return id(buffer), version_of(buffer)


def _content_mark(parameter: nn.Parameter) -> object:
    """Return what tells of any write to a parameter, through `.data` too; its version where there are no data."""
    return bit_sums([parameter.detach()]) or version_of(parameter)


def _digest(buffer: torch.Tensor) -> int:
    """Return a hash of sums over the buffer's bits, which take no memory; collisions are very unlikely."""
    return hash(tuple(content_sums(buffer.detach())))


def _held_generators(module: nn.Module) -> Iterator[Any]:
    for name, value in vars(module).items():
        if isinstance(value, random_state.GENERATORS):
            yield value
        elif isinstance(value, (list, tuple, dict)) and not name.startswith("_"):
            values = value.values() if isinstance(value, dict) else value
            yield from (each for each in values if isinstance(each, random_state.GENERATORS))
