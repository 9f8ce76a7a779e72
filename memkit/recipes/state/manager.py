"""TrainingStateManager: a training that goes on bit for bit, whatever stopped it."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, final

import torch

from memkit._core.errors import ConfigError, FileFormatError, InputError, MemkitWarning, StateError
from memkit._core.protocols import Closing, Uncopied
from memkit._machine import random_state
from memkit.recipes.state.checks import as_metric, as_step, check_given, check_which
from memkit.recipes.state.files import (
    Draft,
    SavedState,
    describe_file,
    drafting,
    list_states,
    list_strays,
    locked,
    remove_states,
    write_file,
)
from memkit.recipes.state.manifest import file_of_rank
from memkit.recipes.state.objects import (
    check_objects,
    describe_object,
    find_replicated,
    name_parameters,
    own_part,
    saved_state_of,
)
from memkit.recipes.state.plain import Flattener, has_placeholders
from memkit.recipes.state.ranks import Crew
from memkit.recipes.state.restore import RANDOM, Restoration
from memkit.recipes.state.shards import write_shards


@final
class TrainingStateManager(Uncopied, Closing):
    """Saves all that a training's next step depends on, so that it can be stopped at any instant.

    A state is a folder that is there as a whole or not at all, with a checksum of each file. `restore` takes the newest
    one that is whole, and names in a warning what it passed over. The random state of torch, NumPy and Python is always
    part of a state, and an optimizer's gradients where there are some, so a state may be saved in the middle of an
    accumulation group. No file is unpickled: restoring a state runs no code from it.

    On several ranks all must call `save` and `restore`. Models in DistributedDataParallel and their optimisers are
    written once (gradients by each rank), sharded tensors (``fully_shard``) by each rank its own, and everything else
    by each rank.

    Memory cost: on the host, the state once while restoring, and once while it is written with ``background=True``;
    on the device none. Time cost: `save` writes the state and waits for the disk.

    Args:
        directory: Where the states are; made when the first one is saved. One training uses it at a time.
        keep: How many of the newest states stay. The one with the best metric stays as well.
        mode: Whether the best metric is the least (``"min"``) or the greatest (``"max"``). None: as the monitor of the
            loop says that saves here, else as the newest state says, else the least.
        background: Write in a thread: `save` copies the state into host memory and returns. It first waits for the
            state before, so there is one copy and one writer. An error comes out of the next call.

    Attributes:
        directory: Where the states are.
        mode: As given, or as a monitor has said; None as long as nobody has.

    Raises:
        ConfigError: A setting is wrong.

    Example:
        >>> import tempfile, torch, memkit as mk
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> state = mk.TrainingStateManager(tempfile.mkdtemp())
        >>> state.restore(model=model, optimizer=optimizer) is None  # nothing there yet
        True
        >>> state.save(1000, model=model, optimizer=optimizer, metric=0.25)
        >>> state.restore(model=model, optimizer=optimizer)
        1000
    """

    instead = "make another TrainingStateManager for the same directory."

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep: int = 3,
        *,
        mode: Literal["min", "max"] | None = None,
        background: bool = False,
    ) -> None:
        if keep < 1 or mode not in {None, "min", "max"}:
            raise ConfigError(
                f"TrainingStateManager(directory, keep={keep!r}, mode={mode!r})",
                got=f"keep={keep!r}, mode={mode!r}",
                expected="keep of 1 or more, and mode 'min' or 'max'",
                fix="leave them out for keep=3 and the least metric.",
            )
        self.directory = Path(directory)
        self.mode = mode
        self._keep, self._background = keep, background
        self._busy = threading.Lock()
        self._writer: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._untold: list[str] = []  # the failure in words, until a call has raised it
        weakref.finalize(self, _tell_of_failures, self._untold, self.directory)

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps of the states that are there, the newest first."""
        return tuple(state.step for state in list_states(self.directory))

    @property
    def best_step(self) -> int | None:
        """Step of the state with the best metric; None where none was given."""
        best = self._find_best(list_states(self.directory))
        return None if best is None else best.step

    def save(self, step: int, /, *, metric: float | torch.Tensor | None = None, **objects: Any) -> None:
        """Save a state; when it returns, the state is on the disk (with ``background=True``: in the host's memory).

        Args:
            step: The training step, 0 or more; `restore` returns it.
            metric: How good the state is. NaN is never best.
            **objects: Anything with ``state_dict()`` and ``load_state_dict()``: model, optimiser, schedule, scaler,
                average, `ResumableLoader`, `MemoryEfficientTrainingWrapper`, `GradientAccumulator`, your own. Models
                are stored without the wrappers of torch.compile and DistributedDataParallel.

        Raises:
            OSError: It cannot be written (disk full, read-only). What was saved before is untouched, and nothing of
                the failed state is left.
            InputError: The step is negative, or there is no object.
            InputTypeError: An object has no state, or there is something in it that a safe load would refuse; the step
                or the metric is no number.
            StateError: Another save of this manager is under way (a signal handler, another thread), or another rank
                failed.
            ConfigError: ``background=True`` on several ranks.
        """
        with self._alone():
            self._save(as_step(step), as_metric(step, metric), objects)

    def restore(self, which: Literal["latest", "best"] | int = "latest", /, **objects: Any) -> int | None:
        """Put a state back into the objects, and the random state with it: into all of them or into none.

        All values are read into host memory first, compared with the objects, and copied from there into the tensors
        that the objects have. Hyper-parameters (learning rate, weight decay) are part of a state and come back too.

        Args:
            which: ``"latest"``: the newest state that is whole. ``"best"``: the one with the best metric. Or a step.
            **objects: By the names that they were saved under. Leave out what you do not need; ``"latest"`` warns of
                that, and of all else that keeps the training from going on as it was.

        Returns:
            The step; None where nothing was saved yet.

        Raises:
            FileFormatError: There are states, but none is whole (or not the one that was asked for); or the state is
                not one of these objects: another class, other parameters, shapes or dtypes (a model may hold in a wider
                dtype what was saved). No object is changed then. Only where an object of your own refuses its state,
                and cannot take back the one that it had, a note on the error says that it may be changed.
            InputError: There are states, but not the one that was asked for.
            InputTypeError: An object has no state.
            OSError: The directory cannot be read.
        """
        check_which(which)
        with self._alone(), contextlib.ExitStack() as stack:
            crew = Crew()
            if not crew.first(self.directory.exists):
                return None
            # Before the states are listed: a writer removes old ones.
            crew.together(lambda: _discard(stack.enter_context(locked(self.directory, alone=False))))
            candidates = crew.first(lambda: self._choose(which))
            for stray in crew.first(lambda: list_strays(self.directory)) if which == "latest" else ():
                _warn(f"passes over {stray}: it is no folder")
            if not candidates:
                return None
            restoration = Restoration(self._find_whole(candidates, crew), objects, crew, resumes=which == "latest")
            for remark in restoration.remarks:
                _warn(remark)
            return restoration.commit()

    def wait(self) -> None:
        """Wait until a state that is written in the background is on the disk; raises its error."""
        with self._alone():
            pass

    def close(self) -> None:
        """The same as `wait`: call it at the end of the training."""
        self.wait()

    def _save(self, step: int, metric: float | None, objects: dict[str, Any]) -> None:
        check_given(step, objects)
        crew = Crew()
        flattener = Flattener(copy=self._background)
        replicated = find_replicated(objects) if crew.rank else set()  # rank 0 has them
        state: dict[str, Any] = {"step": step, RANDOM: random_state.capture().state_dict()}

        def collect() -> set[str]:
            """Return the names of the objects that have sharded tensors."""
            targets = check_objects("save", objects)
            names = name_parameters(targets)
            states = {
                name: own_part(each) if name in replicated else saved_state_of(each) for name, each in targets.items()
            }
            plain = {name: flattener.plain(each, name) for name, each in states.items() if each is not None}
            about = {name: describe_object(each, names) for name, each in targets.items() if name not in replicated}
            state.update(objects=plain, about=about)
            return {name for name, each in plain.items() if has_placeholders(each)}

        state["sharded"] = sorted(set().union(*crew.together(collect)))
        sharded = flattener.sharded  # the flattener itself keeps the originals of what it has copied

        def write() -> None:
            self._write(step, metric, state, sharded, crew)

        if not self._background:
            write()
            return
        if crew.size > 1 or sharded:
            raise ConfigError(
                "TrainingStateManager(background=True)",
                got=f"{crew.size} ranks",
                expected="one process without sharded tensors: a thread's messages would mix with the training's",
                fix="leave out background=True.",
            )
        self._writer = threading.Thread(target=self._write_guarded, args=(write,), name="memkit-state")
        self._writer.start()

    def _write_guarded(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:  # noqa: BLE001 - raised by the next call
            self._failure = error
            self._untold.append(str(error))

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Wait for the thread that writes, raise its error, and let nobody else in."""
        if not self._busy.acquire(blocking=False):
            raise StateError(
                "TrainingStateManager.save(step)",
                got="a call while this manager saves or restores",
                expected="one call after the other, from one thread",
                fix="in a signal handler only set a flag, and save after the step.",
            )
        try:
            if self._writer is not None:
                self._writer.join()
                self._writer = None
            failure, self._failure = self._failure, None
            if failure is not None:
                self._untold.clear()
                raise failure
            yield
        finally:
            self._busy.release()

    def _write(
        self, step: int, metric: float | None, state: dict[str, Any], sharded: dict[str, torch.Tensor], crew: Crew
    ) -> None:
        with contextlib.ExitStack() as stack:
            drafts: list[Draft] = []  # on rank 0

            def begin() -> Path:
                drafts.append(stack.enter_context(drafting(self.directory)))
                return drafts[0].path

            def finish() -> None:
                notes = {"metric": metric, "mode": self.mode, "num_ranks": crew.size, "is_sharded": is_sharded}
                drafts[0].commit(step, files, notes)
                self._prune()

            folder = crew.first(begin)
            mine = folder / file_of_rank(crew.rank)
            entries = crew.together(lambda: write_file(mine, lambda file: torch.save(state, file)))
            files = {file_of_rank(rank): entry for rank, entry in enumerate(entries)}
            is_sharded = bool(state["sharded"])
            if is_sharded:
                crew.together(lambda: write_shards(folder, sharded))
                names = crew.first(lambda: sorted(path.name for path in folder.iterdir() if path.name not in files))
                for described in crew.together(
                    lambda: {name: describe_file(folder / name, flush=True) for name in crew.share(names)}
                ):
                    files.update(described)
            crew.first(finish)

    def _prune(self) -> None:
        states = [state for state in list_states(self.directory) if not state.path.is_symlink()]  # a link is not ours
        best = self._find_best(states)
        others = {notes["mode"] for notes in _read_notes(states).values()} - {None, self.mode or "min"}
        if self.mode is not None and others:
            warnings.warn(
                f"TrainingStateManager(mode={self.mode!r}): {self.directory} has states that were saved with "
                f"mode={others.pop()!r}. The best of them is not kept. Use another directory, or leave mode out.",
                MemkitWarning,
                stacklevel=2,
            )
        remove_states(state for state in states[self._keep :] if state != best)

    def use_mode(self, mode: Literal["min", "max"]) -> None:
        """Let a monitor say which metric is the best, where ``mode`` was left out.

        Raises:
            ConfigError: Another one was chosen: the worst state would be kept.
        """
        if self.mode not in {None, mode}:
            raise ConfigError(
                f"TrainingStateManager(mode={self.mode!r})",
                got=f"a monitor with mode={mode!r}",
                expected="one idea of the best metric",
                fix="leave mode out here, and the monitor's counts.",
            )
        self.mode = mode

    def _find_best(self, states: list[SavedState]) -> SavedState | None:
        metrics, mode = {}, None
        for state, notes in _read_notes(states).items():
            metrics[state], mode = notes["metric"], notes["mode"] or mode  # the newest that was told
        mode = self.mode or mode
        known = {state: value for state, value in metrics.items() if value is not None and not math.isnan(value)}
        sign = -1 if mode == "max" else 1
        return min(known, key=lambda state: sign * known[state], default=None)

    def _choose(self, which: str | int) -> list[SavedState]:
        """The states to try, in order."""
        states = list_states(self.directory)
        if which == "latest" or not states:
            return states
        best = self._find_best(states)
        chosen = [each for each in states if (each == best if which == "best" else each.step == which)]
        if not chosen:
            raise InputError(
                f"TrainingStateManager.restore({which!r})",
                got=f"states of the steps {', '.join(str(state.step) for state in states)}",
                expected="a state saved with metric=..." if which == "best" else f"one of step {which}",
                fix="restore() without an argument takes the newest.",
            )
        return chosen

    def _find_whole(self, candidates: list[SavedState], crew: Crew) -> SavedState:
        """Return the first state whose files are all what was written; the ranks share the reading."""
        for saved in candidates:
            problem = next((each for each in crew.gather(_find_problem(saved, crew)) if each), None)
            if problem is None:
                return saved
            _warn(f"passes over {saved.path}: {problem}", stacklevel=4)
        raise FileFormatError(
            "TrainingStateManager.restore()",
            got=f"no state that is whole in {self.directory} ({len(candidates)} tried)",
            expected="files that are what was written",
            fix="look at the warnings for the reasons; move the folders away to start from the beginning.",
        )


def _read_notes(states: list[SavedState]) -> dict[SavedState, dict[str, Any]]:
    """Return what the manifests say that can be read, the first that was saved first."""
    notes = {}
    for state in reversed(states):
        with contextlib.suppress(OSError, ValueError):
            notes[state] = state.read_manifest()
    return notes


def _find_problem(saved: SavedState, crew: Crew) -> str | None:
    try:
        files = saved.read_manifest()["files"]
        saved.check_files({name: files[name] for name in crew.share(sorted(files))})
    except (OSError, ValueError) as error:
        return str(error)
    return None


def _warn(text: str, *, stacklevel: int = 3) -> None:
    warnings.warn(f"TrainingStateManager.restore(): {text}.", MemkitWarning, stacklevel=stacklevel)


def _tell_of_failures(failures: list[str], directory: Path) -> None:
    """Say that a state was not written where no call came after it that could have raised the error."""
    for failure in failures:
        text = f"TrainingStateManager(background=True) could not write the last state in {directory}: {failure}"
        warnings.warn(f"{text}. Call close() at the end, which raises the error.", MemkitWarning, stacklevel=2)


def _discard(_: object) -> None:
    """What ranks need not tell each other."""
