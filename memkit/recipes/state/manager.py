"""TrainingStateManager: saved training states from which a run resumes bit for bit."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, NoReturn, final

import torch

from memkit._core.errors import ConfigError, FileFormatError, InputError, InputTypeError, StateError, warn_user
from memkit._core.protocols import Closing, Uncopied
from memkit._core.settings import Checker, as_whole
from memkit._core.words import guided
from memkit._machine import random_state
from memkit._recovery.attempt import Done, unless_failed
from memkit.recipes.state.files import (
    LARGEST_STEP,
    Draft,
    SavedState,
    describe_file,
    drafting,
    file_of_rank,
    list_states,
    list_strays,
    locked,
    remove_states,
    write_file,
)
from memkit.recipes.state.objects import (
    check_objects,
    describe_object,
    find_replicated,
    gather_divided,
    name_parameters,
    own_part,
    saved_state_of,
    tell_of_unsaved,
)
from memkit.recipes.state.plain import Flattener, has_placeholders
from memkit.recipes.state.ranks import RankGroup
from memkit.recipes.state.restore import RANDOM, Restoration
from memkit.recipes.state.shards import write_shards
from memkit.recipes.words import STATE_ABSENT, STATE_WORDS


@guided(
    words=STATE_WORDS,
    absent=STATE_ABSENT,
    methods=("save", "restore"),
    rewrite={"save": lambda _: "save(step, model=model, optimizer=optimizer)"},
)
@final
class TrainingStateManager(Uncopied, Closing):
    """Saves everything the next training step depends on, so that a run can be stopped at any moment.

    A state is a folder that is written atomically, with a checksum of each file. `restore` loads the newest intact one,
    and warns about those it skipped. The random state of torch, NumPy and Python is always part of a state, and so are
    an optimizer's gradients if there are any, so a state may be saved in the middle of an accumulation group. Nothing
    is unpickled: restoring a state runs no code from it.

    On several ranks, all must call `save` and `restore`. Models in DistributedDataParallel and their optimizers are
    written once (gradients by each rank; a ZeroRedundancyOptimizer's parts are gathered first), sharded tensors
    (``fully_shard``) by the rank that holds the shard, and everything else by each rank.

    Memory cost: on the host, the state once while restoring, and once while ``background=True`` writes it; on the
    device none. Time cost: `save` writes the state and waits for the disk.

    Args:
        directory: Where the states are stored; created by the first save. Only one training run may use it at a time.
        keep: How many of the newest states to keep. The one with the best metric is kept as well.
        mode: Whether the best metric is the smallest (``"min"``) or the largest (``"max"``). None: the mode of the
            monitor of the loop that saves here, else that of the newest state, else ``"min"``.
        background: Write in a thread: `save` copies the state into host memory and returns. It first waits for the
            previous write, so there is one copy and one writer. The next call raises an error of the thread.

    Attributes:
        directory: Where the states are stored.
        mode: As given, or as set by a monitor; None until then.

    Raises:
        ConfigError: A setting is invalid.

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

    instead = "create another TrainingStateManager for the same directory."

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep: int = 3,
        *,
        mode: Literal["min", "max"] | None = None,
        background: bool = False,
    ) -> None:
        check = Checker("TrainingStateManager(...)")
        if mode is not None:
            check.choice("mode", mode, ("min", "max"))
        if not isinstance(directory, str | os.PathLike):
            raise InputTypeError(
                "TrainingStateManager(directory)",
                got=f"a {type(directory).__name__}",
                expected="the path of a directory",
                fix="write TrainingStateManager('states').",
            )
        self.directory = Path(directory)
        if self.directory.exists() and not self.directory.is_dir():
            raise InputError(
                f"TrainingStateManager({str(directory)!r})",
                got="the path of a file",
                expected="a directory, which is created if it does not exist",
                fix=f"write TrainingStateManager({str(self.directory.with_name('states'))!r}).",
            )
        self.mode = mode
        self._keep, self._background = check.whole("keep", keep, 1), background
        self._has_told = False  # of what the objects train with and no state has
        self._serial: int | None = None  # of the last state that this manager has saved
        self._has_told_of_others = False
        self._busy = threading.Lock()
        self._writer: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._untold: list[str] = []  # the error message, until a call has raised the error
        weakref.finalize(self, _tell_of_failures, self._untold, self.directory)

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps of the stored states, newest first."""
        return tuple(state.step for state in list_states(self.directory))

    @property
    def best_step(self) -> int | None:
        """Step of the state with the best metric; None if no state has one."""
        best = self._find_best(list_states(self.directory))
        return None if best is None else best.step

    def save(self, step: int, /, *, metric: float | torch.Tensor | None = None, **objects: Any) -> None:
        """Save a state; on return it is on disk (with ``background=True``: in host memory).

        Args:
            step: The training step, 0 or more; `restore` returns it.
            metric: How good the state is. NaN is never the best.
            **objects: Anything with ``state_dict()`` and ``load_state_dict()``: model, optimizer, schedule, scaler,
                average, `ResumableLoader`, `MemoryEfficientTrainingWrapper`, `GradientAccumulator`, your own. Models
                are stored without the wrappers of torch.compile and DistributedDataParallel.

        Raises:
            OSError: The state cannot be written (disk full, read-only). Earlier states are untouched, and nothing of
                the failed one is left behind.
            InputError: The step is negative, or no object was passed.
            InputTypeError: An object has no state, or its state holds something that a safe load would refuse; or the
                step or the metric is not a number.
            StateError: Another save of this manager is in progress (in a signal handler or another thread), or another
                rank failed.
            ConfigError: ``background=True`` on several ranks.
        """
        call = f"TrainingStateManager.save({as_whole(step) if as_whole(step) is not None else 'step'}, ...)"
        with self._exclusively(call):
            self._save(call, _as_step(step), _as_metric(step, metric), objects)

    def restore(self, which: Literal["latest", "best"] | int = "latest", /, **objects: Any) -> int | None:
        """Restore a state into the objects, with the random state: into all of them or none.

        All values are first read into host memory and compared with the objects, then copied into the objects' existing
        tensors. Hyperparameters (learning rate, weight decay) are part of a state and are restored too.

        Args:
            which: ``"latest"``: the newest intact state. ``"best"``: the one with the best metric. Or a step.
            **objects: The objects, under the names they were saved with. Leave out what you do not need; ``"latest"``
                warns about that, and about anything else that keeps the training from continuing exactly.

        Returns:
            The step; None if nothing has been saved yet.

        Raises:
            FileFormatError: There are states, but none is intact (or the requested one is not); or the state does not
                match the objects: another class, other parameters, shapes or dtypes (a model may hold the values in a
                wider dtype). No object is changed in that case. Only if one of your own objects refuses its state, and
                also cannot take its previous state back, a note on the error says that it may have changed.
            InputError: There are states, but not the requested one.
            InputTypeError: An object has no state.
            OSError: The directory cannot be read.
        """
        _check_which(which)
        with self._exclusively(f"TrainingStateManager.restore({which!r}, ...)"), contextlib.ExitStack() as stack:
            ranks = RankGroup()
            if not ranks.first(self.directory.exists):
                return None

            def lock() -> None:  # before the states are listed: a writer removes old ones
                stack.enter_context(locked(self.directory, exclusive=False))

            ranks.together(lock)

            def choose() -> list[SavedState]:
                self._tell_of_others(self._find_newer())
                return self._choose(which)

            candidates = ranks.first(choose)
            for stray in ranks.first(lambda: list_strays(self.directory)) if which == "latest" else ():
                _warn(f"skips {stray}: it is not a folder")
            if not candidates:
                return None
            restoration = Restoration(self._find_whole(candidates, ranks), objects, ranks, resumes=which == "latest")
            for remark in restoration.remarks:
                _warn(remark)
            return restoration.commit()

    def wait(self) -> None:
        """Wait until a state being written in the background is on disk; raise its error, if any."""
        with self._exclusively("TrainingStateManager.wait()"):
            pass

    def close(self) -> None:
        """Same as `wait`; call it at the end of the training. Nothing is left open, so that it may save again."""
        self.wait()

    def _save(self, call: str, step: int, metric: float | None, objects: dict[str, Any]) -> None:
        _check_given(step, objects)
        ranks = RankGroup()
        if self._background and ranks.size > 1:
            _refuse_background(f"{ranks.size} ranks")
        flattener = Flattener(copy=self._background)
        replicated = find_replicated(objects) if ranks.rank else set()  # rank 0 saves them
        state: dict[str, Any] = {"step": step, RANDOM: random_state.capture().state_dict()}

        def collect() -> set[str]:
            """Return the names of the objects that have sharded tensors."""
            targets = check_objects("save", objects)
            names = name_parameters(targets)
            states = {
                name: own_part(each) if name in replicated else saved_state_of(each) for name, each in targets.items()
            }
            plain = {name: flattener.plain(each, name) for name, each in states.items() if each is not None}
            if ranks.rank == 0 and not self._has_told:  # after that: it refuses a list that holds itself
                self._has_told = tell_of_unsaved("TrainingStateManager.save()", targets, states)
            about = {name: describe_object(each, names) for name, each in targets.items() if name not in replicated}
            state.update(objects=plain, about=about)
            return {name for name, each in plain.items() if has_placeholders(each)}

        gather_divided(objects)
        state["sharded"] = sorted(set().union(*ranks.together(collect)))
        sharded = flattener.sharded  # the flattener itself keeps the originals of the copied tensors alive

        def write() -> None:
            try:
                self._write(step, metric, state, sharded, ranks)
            except OSError as error:
                error.add_note(
                    f"{call} could not write to {str(self.directory)!r}. The states there are intact, and nothing of "
                    "this one is left. Way out: free disk space, keep fewer states (keep=1), or choose another "
                    "directory; then call save again."
                )
                raise

        if not self._background:
            write()
            return
        if sharded:
            _refuse_background("sharded tensors")
        self._writer = threading.Thread(target=self._write_guarded, args=(write,), name="memkit-state")
        self._writer.start()

    def _write_guarded(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:  # noqa: BLE001 - raised by the next call
            self._failure = error
            self._untold.append(str(error))

    @contextlib.contextmanager
    def _exclusively(self, call: str) -> Iterator[None]:
        """Wait for the writer thread, raise its error, and lock out other calls."""
        if not self._busy.acquire(blocking=False):
            raise StateError(
                call,
                got="a call while this manager saves or restores",
                expected="one call at a time, from one thread",
                fix="only set a flag in a signal handler, and save after the step.",
            )
        try:
            if self._writer is not None:
                if self._writer.ident is not None:  # otherwise its start has failed, or was interrupted
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
        self, step: int, metric: float | None, state: dict[str, Any], sharded: dict[str, torch.Tensor], ranks: RankGroup
    ) -> None:
        with contextlib.ExitStack() as stack:
            drafts: list[Draft] = []  # on rank 0

            def begin() -> Path:
                drafts.append(stack.enter_context(drafting(self.directory)))
                return drafts[0].path

            def finish() -> None:
                notes = {"metric": metric, "mode": self.mode, "num_ranks": ranks.size, "is_sharded": is_sharded}
                newer = self._find_newer()
                try:
                    drafts[0].commit(step, files, notes)
                finally:  # it may be there, though the disk failed to flush it
                    self._serial = max((state.serial for state in list_states(self.directory)), default=None)
                self._prune()
                self._tell_of_others(newer)

            folder = ranks.first(begin)
            mine = folder / file_of_rank(ranks.rank)
            entries = ranks.together(lambda: write_file(mine, lambda file: torch.save(state, file)))
            files = {file_of_rank(rank): entry for rank, entry in enumerate(entries)}
            is_sharded = bool(state["sharded"])
            if is_sharded:
                ranks.together(lambda: write_shards(folder, sharded))
                names = ranks.first(lambda: sorted(path.name for path in folder.iterdir() if path.name not in files))
                for described in ranks.together(
                    lambda: {name: describe_file(folder / name, flush=True) for name in ranks.share(names)}
                ):
                    files.update(described)
            ranks.first(finish)

    def _find_newer(self) -> list[SavedState]:
        """Find states that are newer than the last one of this manager: the lock only orders the saves."""
        if self._serial is None:
            return []
        return list(
            reversed(_read_notes([state for state in list_states(self.directory) if state.serial > self._serial]))
        )

    def _tell_of_others(self, newer: list[SavedState]) -> None:
        """Warn, once."""
        if self._has_told_of_others or not newer:
            return
        self._has_told_of_others = True
        warn_user(
            f"TrainingStateManager: another training has saved step {newer[0].step} in {self.directory} since this "
            "one's last save. Each removes the other's states as its keep= says, and restore() returns the newest, "
            "whoever saved it. Way out: give each training a directory of its own."
        )

    def _prune(self) -> None:
        states = [state for state in list_states(self.directory) if not state.path.is_symlink()]  # links are not ours
        best = self._find_best(states)
        others = {notes["mode"] for notes in _read_notes(states).values()} - {None, self.mode or "min"}
        if self.mode is not None and others:
            warn_user(
                f"TrainingStateManager(mode={self.mode!r}): {self.directory} has states that were saved with "
                f"mode={others.pop()!r}. The best of them is not kept. Way out: use another directory, or omit mode."
            )
        remove_states(state for state in states[self._keep :] if state != best)

    def use_mode(self, mode: Literal["min", "max"]) -> None:
        """Take the mode from a monitor, if ``mode`` was omitted.

        Raises:
            ConfigError: The other mode was set: the worst state would be kept.
        """
        if self.mode not in {None, mode}:
            raise ConfigError(
                f"TrainingStateManager(mode={self.mode!r})",
                got=f"a monitor with mode={mode!r}",
                expected="the same mode in the manager and the monitor",
                fix="omit mode here: the monitor's mode is then used.",
            )
        self.mode = mode

    def _find_best(self, states: list[SavedState]) -> SavedState | None:
        metrics, mode = {}, None
        for state, notes in _read_notes(states).items():
            metrics[state], mode = notes["metric"], notes["mode"] or mode  # the newest mode that was recorded
        mode = self.mode or mode
        known = {state: value for state, value in metrics.items() if value is not None and not math.isnan(value)}
        sign = -1 if mode == "max" else 1
        return min(known, key=lambda state: sign * known[state], default=None)

    def _choose(self, which: str | int) -> list[SavedState]:
        """Return the states to try, in order."""
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
                fix="call restore() without an argument to restore the newest state.",
            )
        return chosen

    def _find_whole(self, candidates: list[SavedState], ranks: RankGroup) -> SavedState:
        """Return the first state whose files are all intact; the ranks share the reading."""
        for saved in candidates:
            problem = next((each for each in ranks.gather(_find_problem(saved, ranks)) if each), None)
            if problem is None:
                return saved
            _warn(f"skips {saved.path}: {problem}")
        raise FileFormatError(
            "TrainingStateManager.restore()",
            got=f"no intact state in {self.directory} ({len(candidates)} tried)",
            expected="at least one state whose files are unchanged since they were saved",
            fix="see the warnings for the reasons; to start from the beginning, move the folders elsewhere.",
        )


def _refuse_background(got: str) -> NoReturn:
    raise ConfigError(
        "TrainingStateManager(background=True)",
        got=got,
        expected="one process without sharded tensors: communication of a background thread would mix with that of the "
        "training",
        fix="write TrainingStateManager(directory, background=False).",
    )


def _check_given(step: int, objects: Collection[str]) -> None:
    """Refuse a state without objects."""
    if not objects:
        raise InputError(
            f"TrainingStateManager.save({step})",
            got="no objects",
            expected="the objects that the next step depends on",
            fix="call save(step, model=model, optimizer=optimizer, ...).",
        )


def _as_step(step: object) -> int:
    """Return the step as an int."""
    number = as_whole(step)
    if number is None:
        raise InputTypeError(
            f"TrainingStateManager.save({step!r})",
            got=type(step).__name__,
            expected="a whole number",
            fix="count the optimizer steps from the start of the training.",
        )
    if not 0 <= number <= LARGEST_STEP:
        raise InputError(
            f"TrainingStateManager.save({number})",
            got=str(number),
            expected="a step of at least 0" if number < 0 else "a step of at most 18 digits",
            fix="count the optimizer steps from the start of the training.",
        )
    return number


def _as_metric(step: object, metric: object) -> float | None:
    """Return the metric as a float."""
    if metric is None:
        return None
    outcome = unless_failed((TypeError, ValueError, RuntimeError), float, metric)  # non-numbers are refused here
    if isinstance(outcome, Done):
        return outcome.result
    raise InputTypeError(
        f"TrainingStateManager.save({step!r}, metric=...)",
        got=type(metric).__name__,
        expected="a number, or a tensor with one",
        fix="pass metric=loss.item(), or omit metric.",
    )


def _check_which(which: object) -> None:
    """Refuse an invalid choice of state."""
    if which not in ("latest", "best") and not isinstance(which, Integral):
        raise InputError(
            f"TrainingStateManager.restore({which!r})",
            got=repr(which),
            expected="'latest', 'best', or a step as a whole number",
            fix="call restore() without an argument to restore the newest state.",
        )


def _read_notes(states: list[SavedState]) -> dict[SavedState, dict[str, Any]]:
    """Return the contents of all readable manifests, oldest first."""
    notes = {}
    for state in reversed(states):
        with contextlib.suppress(OSError, ValueError):
            notes[state] = state.read_manifest()
    return notes


def _find_problem(saved: SavedState, ranks: RankGroup) -> str | None:
    try:
        files = saved.read_manifest()["files"]
        saved.check_files({name: files[name] for name in ranks.share(sorted(files))})
    except (OSError, ValueError) as error:
        return str(error)
    return None


def _warn(text: str) -> None:
    warn_user(f"TrainingStateManager.restore(): {text}.")


def _tell_of_failures(failures: list[str], directory: Path) -> None:
    """Warn about a state that was not written, if no later call could raise the error."""
    for failure in failures:
        text = f"TrainingStateManager(background=True) could not write the last state in {directory}: {failure}"
        warn_user(f"{text}. Call close() at the end, which raises the error.")
