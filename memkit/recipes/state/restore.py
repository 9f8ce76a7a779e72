"""Restore a state: into all of its objects, or into none."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any, final

import torch

from memkit._core.errors import FileFormatError, MemkitError
from memkit._core.pickles import refuse_pickle
from memkit._core.protocols import Stateful
from memkit._machine import random_state
from memkit.recipes.state.files import SavedState, file_of_rank, opened
from memkit.recipes.state.objects import (
    Parameters,
    check_fits,
    check_objects,
    is_checked,
    keep_copy,
    load_into,
    name_parameters,
    saved_state_of,
    with_own_parts,
    without_pending,
)
from memkit.recipes.state.plain import Flattener, ShardedTensors, fill_placeholders, has_placeholders
from memkit.recipes.state.ranks import RankGroup
from memkit.recipes.state.reader import TensorFile
from memkit.recipes.state.shards import ShardFiles

RANDOM = "random"


@final
class Restoration:
    """A state that was read and compared with its target objects; `commit` changes them.

    All ranks create one together: a refusal on one rank is an error on all.

    Args:
        saved: The state, whose files are intact.
        objects: The objects, by the names under which they were saved.
        ranks: The processes that restore together.
        resumes: Whether training is to continue exactly.

    Attributes:
        remarks: Differences that do not prevent the restore.

    Raises:
        FileFormatError: The state does not match the objects, or was not written by `TrainingStateManager.save`. No
            object was changed.
        InputTypeError: An object has no state.
    """

    def __init__(self, saved: SavedState, objects: Mapping[str, Any], ranks: RankGroup, *, resumes: bool) -> None:
        self.remarks: list[str] = []
        self._saved, self._ranks, self._resumes = saved, ranks, resumes
        self._targets: dict[str, Stateful] = {}
        self._states: dict[str, Any] = {}
        self._shards: list[tuple[torch.Tensor, torch.Tensor]] = []  # sharded tensors, and this rank's new values
        self._random: random_state.RandomState | None = None
        ranks.together(lambda: self._prepare(objects))

    def commit(self) -> int:
        """Load the state into the objects, restore the random state, and return the step.

        Objects whose `load_state_dict` may refuse come first; if one does, the previous states are restored.
        """
        now, copies = random_state.capture(), dict[str, Mapping[str, Any] | None]()
        unforeseen = {name for name, target in self._targets.items() if not is_checked(target)}
        try:
            self._ranks.together(lambda: self._load(unforeseen, copies))
            for tensor, values in self._shards:  # all ranks got this far
                _fill(tensor, values)
            self._ranks.together(lambda: self._load(self._targets.keys() - unforeseen, copies))
        except BaseException as error:
            random_state.restore(now)
            if changed := self._undo(copies):
                error.add_note(f"Already changed, at least in part: {', '.join(changed)}.")
            raise
        if self._random is not None:
            random_state.restore(self._random)
        return self._saved.step

    def _load(self, names: Set[str], copies: dict[str, Mapping[str, Any] | None]) -> None:
        for name, target in self._targets.items():
            if name in names:
                copies[name] = None if is_checked(target) else keep_copy(target, name)
                load_into(target, self._states.pop(name), name)

    def _undo(self, copies: Mapping[str, Mapping[str, Any] | None]) -> list[str]:
        """Restore the previous states; return the names of objects for which that is not certain."""
        changed = []
        for name, before in copies.items():
            try:
                if before is None:
                    changed.append(name)
                else:
                    load_into(self._targets[name], before, name)
            except Exception:  # noqa: BLE001 - the first error is raised; this one means that the object has changed
                changed.append(name)
        return changed

    def _prepare(self, objects: Mapping[str, Any]) -> None:
        call = "TrainingStateManager.restore()"
        try:
            with contextlib.ExitStack() as stack:
                self._read(objects, stack)
        except MemkitError as error:
            if error.call:
                raise
            fix = "restore an older state by its step, and check where this one came from."
            raise FileFormatError(
                call, got=f"{error.got} in {self._saved.path}", expected=error.expected, fix=fix
            ) from None
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise FileFormatError(
                call,
                got=f"{type(error).__name__}: {error} in {self._saved.path}",
                expected="a state written by TrainingStateManager.save",
                fix="restore an older state by its step, and check where this one came from.",
            ) from error

    def _read(self, objects: Mapping[str, Any], stack: contextlib.ExitStack) -> None:
        notes, rank = self._saved.read_manifest(), self._ranks.rank
        shared = stack.enter_context(_opened_state(self._saved.path / file_of_rank(0)))
        files = [shared]
        if 0 < rank < notes["num_ranks"]:
            files.append(stack.enter_context(_opened_state(self._saved.path / file_of_rank(rank))))
        heads = [file.read({key: each for key, each in file.value.items() if key != "objects"}) for file in files]
        if notes["is_sharded"] != bool(heads[0]["sharded"]):
            refuse_pickle(
                f"a manifest with is_sharded={notes['is_sharded']}, unlike its files", "the manifest of this state"
            )
        if any(head["step"] != self._saved.step for head in heads):
            refuse_pickle("files of another step", "the files of this step")
        self._compare_names({name for file in files for name in file.value["objects"]}, set(objects))
        self._targets = check_objects("restore", objects)
        parts = [
            file.read({name: part for name, part in file.value["objects"].items() if name in objects}) for file in files
        ]
        self._states = functools.reduce(with_own_parts, parts)
        self._fit_ranks(notes["num_ranks"])
        about = heads[0]["about"] | heads[-1]["about"]
        self._place_shards({name for name in heads[0]["sharded"] if name in objects})
        names = name_parameters(self._targets)
        for name, target in self._targets.items():
            self._check(name, target, about[name], names)
        self._choose_random(heads[-1][RANDOM] if rank < notes["num_ranks"] else None)

    def _check(self, name: str, target: Stateful, about: Mapping[str, Any], names: Parameters) -> None:
        remarks = check_fits(name, target, self._states[name], about, names)
        if self._resumes:
            self.remarks += remarks

    def _compare_names(self, saved: set[str], given: set[str]) -> None:
        if not given <= saved:
            raise FileFormatError(
                f"TrainingStateManager.restore({', '.join(f'{name}=...' for name in sorted(given - saved))})",
                got=f"a state of {', '.join(sorted(saved)) or 'no objects'}",
                expected="objects under the names that they were saved with",
                fix="use these names, or omit new objects.",
            )
        if self._resumes and given != saved:
            self.remarks.append(
                f"the state has {', '.join(sorted(saved - given))} too; without it the training does not continue "
                'exactly. To restore only a part on purpose, write restore("best", ...) or restore(step, ...)'
            )

    def _fit_ranks(self, num_ranks: int) -> None:
        """Drop what belongs to the ranks that saved it, if there are more or fewer now."""
        if num_ranks == self._ranks.size:
            return
        self.remarks.append(
            f"{self._saved.path} was saved on {num_ranks} ranks, and now there are {self._ranks.size}: new ranks "
            "take rank 0's values, and random states differ"
        )
        rest = {name: without_pending(state) for name, state in self._states.items()}
        if dropped := [name for name, state in rest.items() if state is not self._states[name]]:
            self._states |= rest
            self.remarks.append(
                f"pending gradients ({', '.join(sorted(dropped))}) are dropped, since each of the ranks that saved "
                "them had its own: micro-batches whose step was still to come are not trained on. To train on them, "
                f"restore on {num_ranks} ranks"
            )

    def _place_shards(self, names: set[str]) -> None:
        """Replace each placeholder by a sharded tensor, and read this rank's part of its values."""
        sharded = {name for name, state in self._states.items() if has_placeholders(state)}
        if not sharded <= names:
            refuse_pickle("sharded tensors in an object that has none", "a complete state")
        if not sharded:
            return
        live = Flattener()
        for name in sorted(sharded):
            live.plain(saved_state_of(self._targets[name]), name)
        places = ShardedTensors(live.sharded)
        for name in sharded:  # objects that may refuse their state get new tensors, not the live ones
            choose = functools.partial(places.choose, always_new=not is_checked(self._targets[name]))
            self._states[name] = fill_placeholders(self._states[name], choose)
        files, alive = ShardFiles(self._saved.path), {id(tensor) for tensor in live.sharded.values()}
        for name, tensor in places.chosen.items():
            values = files.read(name, tensor)
            if id(tensor) in alive:
                self._shards.append((tensor, values))
            else:
                _fill(tensor, values)

    def _choose_random(self, state: Mapping[str, Any] | None) -> None:
        """Check that the random state can be restored, and that it belongs to the same devices."""
        if state is None:
            return
        self._random, now = random_state.RandomState.from_state_dict(state), random_state.capture()
        try:
            random_state.restore(self._random)
        except (RuntimeError, TypeError, ValueError, OverflowError) as error:
            refuse_pickle(f"a random state that cannot be restored ({error})", "one of torch, NumPy and Python")
        finally:
            random_state.restore(now)
        num_devices = self._random.num_devices
        if self._resumes and num_devices not in {0, now.num_devices}:
            self.remarks.append(
                f"{self._saved.path} has the random states of {num_devices} accelerators, but {now.num_devices} are in "
                "use now: random numbers drawn there will differ. Move the model there before you restore"
            )


def _fill(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Copy this rank's values into a sharded tensor."""
    with torch.no_grad():
        tensor.to_local().copy_(values)  # type: ignore[attr-defined] # a DTensor's


@contextlib.contextmanager
def _opened_state(path: Path) -> Iterator[TensorFile]:
    with opened(path) as file:
        state = TensorFile(file)
        entries = {"step", RANDOM, "objects", "about", "sharded"}
        if (
            not isinstance(state.value, dict)
            or state.value.keys() != entries
            or type(state.value["objects"]) is not dict
        ):
            refuse_pickle(f"{path.name}, which is not a state", "a file written by TrainingStateManager.save")
        yield state
