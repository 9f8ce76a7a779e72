"""The folder of states: other processes in it, files that are not ours, and manifests that are odd."""

import itertools
import json
import multiprocessing
import os
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from memkit._core.errors import FileFormatError, InputError, InputTypeError, MemkitWarning, StateError
from memkit.recipes.state import files as statefiles
from memkit.recipes.state.manager import TrainingStateManager
from tests.helpers import assert_refused
from tests.recipes.stateforge import sign
from tests.recipes.test_state_files import DAMAGE, model_of, newest, value_of

FORK = multiprocessing.get_context("fork")  # nothing to import again
pytestmark = pytest.mark.usefixtures("no_flush")


@pytest.fixture
def manager(tmp_path):
    manager = TrainingStateManager(tmp_path / "states")
    manager.save(10, model=model_of(1.0))
    manager.save(20, model=model_of(2.0))
    return manager


# ---- other processes


def restore_many(folder, num_restores):
    """Restore again and again; return the steps. Each has the weights of its step."""
    manager, model, steps = TrainingStateManager(folder), nn.Linear(2, 2), []
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a state that was passed over is one that was removed meanwhile
        for _ in range(num_restores):
            steps.append(manager.restore(model=model))
            assert bool((model.weight == steps[-1]).all())
    return steps


def save_for_ever(folder, has_begun):
    manager, model = TrainingStateManager(folder, keep=1), nn.Linear(2, 2)
    for step in itertools.count():
        nn.init.constant_(model.weight, float(step))
        manager.save(step, model=model)
        has_begun.set()


def test_restores_beside_writer_keeping_one_state(tmp_path):
    has_begun = FORK.Event()
    writer = FORK.Process(target=save_for_ever, args=(tmp_path, has_begun))
    writer.start()
    try:
        assert has_begun.wait(10)
        steps = restore_many(tmp_path, 100)
    finally:
        writer.kill()
        writer.join()
    assert steps == sorted(steps)
    assert len(set(steps)) > 10  # the writer went on meanwhile


def test_processes_restore_at_the_same_time(tmp_path):
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, 7.0)
    TrainingStateManager(tmp_path).save(7, model=model)
    with FORK.Pool(2) as pool:
        assert pool.starmap(restore_many, [(tmp_path, 20)] * 2) == [[7] * 20] * 2


def test_restore_waits_for_the_background(tmp_path):
    """The same manager takes what it is writing; another one waits for the lock."""
    with TrainingStateManager(tmp_path, keep=1, background=True) as manager:
        for step in range(1, 11):
            manager.save(step, model=model_of(float(step)))
            if step % 2:
                assert value_of(manager) == (step, float(step))
            else:
                seen, value = value_of(TrainingStateManager(tmp_path))
                assert seen == value
                assert seen in {step - 1, step}


def read_as_a_stranger(folder, result):
    os.chdir(folder)
    if os.getuid() == 0:
        os.setuid(65534)
    result.put((value_of(TrainingStateManager(".")), os.access(".", os.W_OK)))


def test_reads_read_only_folder(manager):
    for path in [*manager.directory.rglob("*"), manager.directory]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    result = FORK.Queue()
    reader = FORK.Process(target=read_as_a_stranger, args=(manager.directory, result))
    reader.start()
    assert result.get(timeout=10) == ((20, 2.0), False)
    reader.join()
    manager.directory.chmod(0o755)


def test_reports_long_held_lock(manager, monkeypatch):
    monkeypatch.setattr(statefiles, "_PATIENCE_S", 0.05)
    told = []
    monkeypatch.setattr(warnings, "warn", lambda *args, **_: told.append(args))
    with statefiles.locked(manager.directory, exclusive=True):
        other = threading.Thread(target=value_of, args=(manager,))
        other.start()
        time.sleep(0.3)
    other.join()
    ((text, kind),) = told
    assert kind is MemkitWarning
    assert "has waited 0 s for another process that uses" in text


def test_warns_of_file_system_without_locks(manager, monkeypatch):
    def refuse(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(statefiles.fcntl, "flock", refuse)
    with pytest.warns(MemkitWarning, match="cannot lock .*: let one process at a time use it"):
        assert value_of(manager) == (20, 2.0)


# ---- what is not ours


def folder_with_a_file(path):
    path.mkdir()
    (path / "notes.txt").write_text("mine")


STRAYS = {
    "a file that looks hidden": lambda path: (path / ".memkit-x").write_text("mine"),
    "a file in the draft's place": lambda path: (path / ".memkit-new").write_text("mine"),
    "a folder in the draft's place": lambda path: folder_with_a_file(path / ".memkit-new"),
    "a hidden folder": lambda path: folder_with_a_file(path / ".memkit-x"),
    "a hidden state with a file": lambda path: folder_with_a_file(path / ".memkit-00000001-step-10"),
    "a link in the draft's place": lambda path: (path / ".memkit-new").symlink_to(path.parent / "outside"),
    "a link to a hidden state": lambda path: (path / ".memkit-00000001-step-10").symlink_to(path.parent / "outside"),
    "a link to nowhere": lambda path: (path / ".memkit-new").symlink_to("nowhere"),
    "a file named like a step": lambda path: (path / "00000009-step-90").write_text("mine"),
    "a link named like a step": lambda path: (path / "00000000-step-0").symlink_to(path.parent / "outside"),
    "a link to nowhere named like a step": lambda path: (path / "00000009-step-90").symlink_to("nowhere"),
    "an empty folder named like the next step": lambda path: (path / "00000003-step-30").mkdir(),
    "a folder of a large number": lambda path: folder_with_a_file(path / "999999999999999999999-step-1"),
    "a pipe": lambda path: os.mkfifo(path / ".memkit-new"),
    "a pipe named like a step": lambda path: os.mkfifo(path / "00000009-step-90"),
    "names that are not text": lambda path: (path / os.fsdecode(b".memkit-\xff")).write_text("mine"),
    "our own form of another number": lambda path: folder_with_a_file(path / "9-step-9"),
}


@pytest.mark.parametrize("stray", STRAYS)
def test_foreign_files_are_left_alone_and_saves_continue(tmp_path, stray):
    outside, folder = tmp_path / "outside", tmp_path / "states"
    folder_with_a_file(outside)
    (outside / "rank-0.pt").write_text("mine")
    folder.mkdir()
    STRAYS[stray](folder)
    before = {path: path.lstat() for path in [*folder.rglob("*"), *outside.rglob("*")]}
    manager = TrainingStateManager(folder, keep=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in (30, 31, 32):
            manager.save(step, model=model_of(float(step)))
    for path, stat in before.items():
        assert (path.lstat().st_ino, path.lstat().st_mtime_ns) == (stat.st_ino, stat.st_mtime_ns)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MemkitWarning)
        assert value_of(manager) == (32, 32.0)
    own = {path.name for path in folder.iterdir()} - {path.name for path in before if path.parent == folder}
    assert len(own) == 1


def test_restore_warns_of_file_named_like_a_step(manager):
    (manager.directory / "00000009-step-90").write_text("mine")
    with pytest.warns(MemkitWarning, match="skips .*00000009-step-90: it is not a folder"):
        assert value_of(manager) == (20, 2.0)


def test_a_linked_state_is_read_and_never_removed(manager, tmp_path):
    """A state that somebody has moved to a larger disk, with a link in its place."""
    (state,) = (each for each in statefiles.list_states(manager.directory) if each.step == 10)
    moved = tmp_path / "elsewhere"
    state.path.rename(moved)
    state.path.symlink_to(moved)
    assert value_of(manager, 10) == (10, 1.0)
    single = TrainingStateManager(manager.directory, keep=1)
    single.save(30, model=model_of(3.0))
    assert single.steps == (30, 10)
    assert sorted(path.name for path in moved.iterdir()) == ["manifest.json", "rank-0.pt"]


def test_a_state_with_somebodys_file_is_not_removed(manager):
    (newest(manager) / "notes.txt").write_text("mine")
    single = TrainingStateManager(manager.directory, keep=1)
    with pytest.warns(MemkitWarning, match="does not remove .*step-20.*not written by memkit"):
        single.save(30, model=model_of(3.0))
    assert single.steps == (30, 20)
    assert value_of(single, 20) == (20, 2.0)


def test_unremovable_state_does_not_fail_the_save(manager, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuse)
    single = TrainingStateManager(manager.directory, keep=1)
    with pytest.warns(MemkitWarning, match="Permission denied"):
        single.save(30, model=model_of(3.0))
    monkeypatch.undo()
    assert value_of(single) == (30, 3.0)
    single.save(40, model=model_of(4.0))
    assert len(list(manager.directory.iterdir())) == 1


def test_rejects_last_possible_step_number(manager):
    (manager.directory / "999999999999-step-1").mkdir()
    with pytest.raises(StateError, match=r"999999999999 as the number of a state.*move that folder elsewhere"):
        manager.save(30, model=model_of(3.0))
    assert not list(manager.directory.glob(".memkit-*"))


# ---- manifests


def change(**changes):
    def damage(path):
        content = json.loads((path / "manifest.json").read_text())["content"]
        sign(path, content | changes)

    return damage


def without(name):
    def damage(path):
        content = json.loads((path / "manifest.json").read_text())["content"]
        del content[name]
        sign(path, content)

    return damage


def write(text):
    return lambda path: (path / "manifest.json").write_bytes(text)


def twice(path):
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"content"', '"content": 1, "content"'))


MANIFESTS = {
    "nested deeply": write(b'{"content":' + b"[" * 10**5 + b"]" * 10**5 + b"}"),
    "nested deeply with a checksum": write(b'{"sha256": "0", "content":' + b'{"a":' * 2000 + b"1" + b"}" * 2001),
    "no version": without("version"),
    "another version": change(version=1),
    "a version as text": change(version="2"),
    "a version of the future": change(version=99),
    "no files": without("files"),
    "no step": without("step"),
    "no mode": without("mode"),
    "no metric": without("metric"),
    "a list": lambda path: sign(path, []),
    "nothing": lambda path: sign(path, None),
    "a metric as text": change(metric="good"),
    "a metric that is huge": change(metric=10**400),
    "a mode that is a list": change(mode=["min"]),
    "no ranks": change(num_ranks=0),
    "a million ranks": change(num_ranks=10**6),
    "ranks as text": change(num_ranks="1"),
    "sharded as text": change(is_sharded="no"),
    "files as a list": change(files=[]),
    "a file without a size": change(files={"rank-0.pt": {"sha256": ""}}),
    "a file that is a number": change(files={"rank-0.pt": 3}),
    "another step": change(step=21),
    "keys twice": twice,
    "a number of a million digits": write(b'{"sha256": "0", "content": ' + b"9" * 10**6 + b"}"),
    "a long text": write(b'{"sha256": "0", "content": "' + b"x" * 10**7 + b'"}'),
    "bytes": write(b"\xff\xfe\x00"),
    "half a character": write(b'{"sha256": "0", "content": "\\ud800"}'),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_an_odd_manifest_leads_to_the_older_state(manager, name):
    MANIFESTS[name](newest(manager))
    with pytest.warns(MemkitWarning, match=f"skips .*{newest(manager).name}"):
        assert value_of(manager) == (10, 1.0)
    manager.save(30, model=model_of(3.0), metric=0.5)
    assert manager.best_step == 30
    assert value_of(manager) == (30, 3.0)


def test_a_renamed_folder_is_not_another_step(manager):
    newest(manager).rename(newest(manager).with_name("00000002-step-99"))
    with pytest.warns(MemkitWarning, match="step 20: the folder was renamed"):
        assert value_of(manager) == (10, 1.0)


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_best_state_is_an_error(manager, damage):
    """Asked for by name, nothing else is taken in its place."""
    DAMAGE[damage](newest(manager))
    with (
        pytest.warns(MemkitWarning, match="skips"),
        pytest.raises(FileFormatError, match=r"no intact state in .* \(1 tried\)"),
    ):
        value_of(manager, 20)


# ---- what it is told


@pytest.mark.parametrize("which", ["lastest", None, 1.5, [1], "20"])
def test_chooses_the_state(manager, tmp_path, which):
    for each in (manager, TrainingStateManager(tmp_path / "new")):
        with pytest.raises(InputError, match="expected 'latest', 'best', or a step"):
            each.restore(which, model=model_of(0.0))


def test_rejects_empty_state(manager):
    assert_refused(lambda: manager.save(30), InputError, r"save\(30\): got no object")
    assert manager.steps == (20, 10)


@pytest.mark.parametrize("metric", ["good", [1.0], torch.ones(2), object()])
def test_metrics_are_numbers(manager, metric):
    with pytest.raises(InputTypeError, match=r"save\(30, metric=\.\.\.\): got"):
        manager.save(30, metric=metric, model=model_of(3.0))


@pytest.mark.parametrize(
    ("step", "error", "words"),
    [
        (1.5, InputTypeError, r"TrainingStateManager\.save\("),
        ("3", InputTypeError, r"TrainingStateManager\.save\("),
        (10**18, InputError, r"TrainingStateManager\.save\("),
        (-1, InputError, r"save\(-1\): got -1; expected a step of at least 0"),
    ],
)
def test_steps_are_whole_numbers(manager, step, error, words):
    assert_refused(lambda: manager.save(step, model=model_of(3.0)), error, words)


def test_a_file_in_the_folders_place(tmp_path):
    manager = TrainingStateManager(tmp_path / "file")
    (tmp_path / "file").write_text("x")
    with pytest.raises((FileFormatError, NotADirectoryError)):
        manager.restore(model=model_of(0.0))


def test_warns_of_conflicting_best(tmp_path):
    TrainingStateManager(tmp_path, mode="max").save(1, metric=0.9, model=model_of(1.0))
    other = TrainingStateManager(tmp_path, keep=1, mode="min")
    with pytest.warns(MemkitWarning, match="mode='max'"):
        other.save(2, metric=0.1, model=model_of(2.0))


def test_a_second_training_in_the_same_directory_is_told_of_once(tmp_path):
    model = nn.Linear(2, 2)
    first, second = TrainingStateManager(tmp_path, keep=2), TrainingStateManager(tmp_path, keep=2)
    first.save(10, model=model)
    first.restore(model=model)
    second.save(1, model=model)  # it may continue a training that has ended
    second.save(2, model=model)
    with pytest.warns(MemkitWarning, match="another training has saved step 2 .* a directory of its own"):
        first.restore(model=model)
    first.save(20, model=model)
