"""States on a disk: complete or absent, whatever the disk does."""

import errno
import gc
import json
import os
import resource
import shutil
import signal
import subprocess
import threading
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from memkit._core.errors import ConfigError, FileFormatError, InputError, InputTypeError, MemkitWarning
from memkit.recipes.state import files as statefiles
from memkit.recipes.state.manager import TrainingStateManager
from tests.helpers import assert_refused


def model_of(value):
    model = nn.Linear(64, 64)
    nn.init.constant_(model.weight, value)
    return model


def value_of(manager, which="latest"):
    model = model_of(-1.0)
    step = manager.restore(which, model=model)
    assert bool((model.weight == model.weight[0, 0]).all())
    return step, model.weight[0, 0].item()


@pytest.fixture
def manager(tmp_path):
    """Two states: step 10 with weights 1, step 20 with weights 2."""
    manager = TrainingStateManager(tmp_path / "states")
    manager.save(10, model=model_of(1.0))
    manager.save(20, model=model_of(2.0))
    return manager


def newest(manager):
    return statefiles.list_states(manager.directory)[0].path


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[int(place * len(data))] ^= 4
    path.write_bytes(data)


DAMAGE = {
    "a bit of a weight": lambda path: flip(path / "rank-0.pt", 0.5),
    "a bit of the header": lambda path: flip(path / "rank-0.pt", 0.0),
    "a bit of the manifest": lambda path: flip(path / "manifest.json", 0.6),
    "half of a file": lambda path: os.truncate(path / "rank-0.pt", 5000),
    "an empty file": lambda path: os.truncate(path / "rank-0.pt", 0),
    "an empty manifest": lambda path: os.truncate(path / "manifest.json", 0),
    "no file": lambda path: (path / "rank-0.pt").unlink(),
    "no manifest": lambda path: (path / "manifest.json").unlink(),
    "a manifest of something else": lambda path: (path / "manifest.json").write_text("[1]"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_falls_back_to_last_whole_state_and_names_the_other(manager, damage):
    DAMAGE[damage](newest(manager))
    with pytest.warns(MemkitWarning, match=f"skips .*{newest(manager).name}"):
        assert value_of(manager) == (10, 1.0)
    manager.save(11, model=model_of(3.0))  # the training goes on from there
    assert value_of(manager) == (11, 3.0)


def test_torch_reads_the_flipped_bit_without_a_word(manager):
    """Why there is a checksum: the zip format has one, and nobody compares it."""
    DAMAGE["a bit of a weight"](newest(manager))
    weight = torch.load(newest(manager) / "rank-0.pt", weights_only=True)["objects"]["model"]["weight"]
    assert int((weight != 2.0).sum()) == 1


def test_no_state_is_none_but_only_damaged_ones_raise(tmp_path, manager):
    assert TrainingStateManager(tmp_path / "new").restore(model=model_of(0.0)) is None
    assert not (tmp_path / "new").exists()
    for state in statefiles.list_states(manager.directory):
        DAMAGE["a bit of a weight"](state.path)
    with (
        pytest.warns(MemkitWarning, match="skips"),
        pytest.raises(FileFormatError, match=r"no intact state in .* \(2 tried\)"),
    ):
        value_of(manager)


def test_keep_and_best(tmp_path):
    manager = TrainingStateManager(tmp_path, keep=2)
    for step, metric in enumerate([0.5, float("nan"), torch.tensor(0.25), 0.25, None, float("inf"), 0.4]):
        manager.save(step, model=model_of(float(step)), metric=metric)
        assert len(manager.steps) <= 3
    assert manager.steps == (6, 5, 2)
    assert manager.best_step == 2
    assert value_of(manager, "best") == (2, 2.0)
    assert value_of(manager, 5) == (5, 5.0)
    again = TrainingStateManager(tmp_path, keep=1, mode="max")  # the metrics are in the files
    assert again.best_step == 5
    again.save(7, model=model_of(7.0), metric=0.1)
    assert again.steps == (7, 5)
    assert_refused(lambda: value_of(again, 3), InputError, r"restore\(3\): got states of the steps 7, 5")


def test_new_manager_finds_the_saved_best(tmp_path):
    manager = TrainingStateManager(tmp_path)
    manager.use_mode("max")  # as a loop's monitor does
    for step, metric in enumerate([0.1, 0.9, 0.5]):
        manager.save(step, model=model_of(float(step)), metric=metric)
    assert value_of(TrainingStateManager(tmp_path), "best") == (1, 1.0)
    again = TrainingStateManager(tmp_path, keep=1)
    again.save(3, model=model_of(3.0), metric=0.4)
    assert again.steps == (3, 1)
    again.save(4, model=model_of(4.0), metric=0.3)  # the newest state was written by who had not been told
    assert TrainingStateManager(tmp_path).best_step == 1
    assert TrainingStateManager(tmp_path, mode="min").best_step == 4


def test_without_metrics_there_is_no_best(manager):
    assert manager.best_step is None
    assert_refused(lambda: value_of(manager, "best"), InputError, "a state saved with metric=")


def test_newest_is_the_last_saved(manager):
    value_of(manager, 10)
    manager.save(11, model=model_of(3.0))
    manager.save(np.int64(11), model=model_of(4.0))
    assert manager.steps == (11, 11, 20)
    assert value_of(manager) == (11, 4.0)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"keep": 0}, "got keep=0; expected a whole number, 1 or more"),
        ({"mode": "least"}, "expected one of .min., .max."),
    ],
)
def test_settings(tmp_path, settings, text):
    assert_refused(lambda: TrainingStateManager(tmp_path, **settings), ConfigError, text)


def test_the_directory_is_checked_before_training(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    refusals = {
        None: (InputTypeError, r"got a NoneType.*write TrainingStateManager\('states'\)"),
        file: (InputError, r"got the path of a file.*write TrainingStateManager\(.*states"),
    }
    for directory, (kind, text) in refusals.items():
        assert_refused(lambda directory=directory: TrainingStateManager(directory), kind, text)


def check_failed_save(manager, error_number, *, repair):
    """A save fails and leaves all as it was; after the repair the next one works, and nothing else is there."""
    with pytest.raises(OSError) as raised:  # noqa: PT011 - the number is checked below
        manager.save(30, model=model_of(3.0))
    assert raised.value.errno == error_number
    assert any("save(30, ...) could not write to" in note for note in raised.value.__notes__)
    assert not list(manager.directory.glob(".memkit-*"))
    assert value_of(manager) == (20, 2.0)
    repair()
    manager.save(40, model=model_of(4.0))
    assert value_of(manager) == (40, 4.0)
    assert len(list(manager.directory.iterdir())) == len(manager.steps) == 3


def test_a_full_disk_by_a_real_limit(manager):
    """EFBIG by RLIMIT_FSIZE, which strikes as a full disk does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9000, limits[1]))
    try:
        check_failed_save(manager, errno.EFBIG, repair=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 128 KiB with two states; its folder."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a file system")
    try:
        manager = TrainingStateManager(folder)
        manager.save(10, model=model_of(1.0))
        manager.save(20, model=model_of(2.0))
        yield manager
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk(small_disk):
    filler = small_disk.directory.parent / "disk" / "filler"
    free = os.statvfs(small_disk.directory)
    filler.write_bytes(bytes(free.f_bavail * free.f_bsize - 16384))
    check_failed_save(small_disk, errno.ENOSPC, repair=filler.unlink)


def test_disk_becoming_read_only(small_disk):
    def remount(how):
        subprocess.run(["mount", "-o", f"remount,{how}", str(small_disk.directory)], check=True)

    remount("ro")
    check_failed_save(small_disk, errno.EROFS, repair=lambda: remount("rw"))


@pytest.mark.parametrize("call", range(4))
def test_disk_failing_at_flush(manager, monkeypatch, call):
    """EIO comes from a broken disk alone, so it is injected: at the file, the manifest, and the two folders."""
    flush, count = os.fsync, iter(range(100))

    def broken(descriptor):
        if next(count) == call:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", broken)
    if call < 3:
        check_failed_save(manager, errno.EIO, repair=monkeypatch.undo)
        return
    with pytest.raises(OSError, match="Input/output error"):
        manager.save(30, model=model_of(3.0))
    assert value_of(manager) == (30, 3.0)  # it is whole already; only its name may not be on the disk yet


def test_unreadable_disk(manager, monkeypatch):
    """EIO while a state is read back is one more reason to take the state before."""
    read, bad = statefiles.describe_file, newest(manager)

    def broken(path, **settings):
        if path.parent == bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return read(path, **settings)

    monkeypatch.setattr(statefiles, "describe_file", broken)
    with pytest.warns(MemkitWarning, match="Input/output error"):
        assert value_of(manager) == (10, 1.0)


def test_next_save_removes_files_of_dead_writers(manager):
    for name in (".memkit-new", ".memkit-00000001-step-10"):  # killed while it wrote, killed while it removed
        (manager.directory / name).mkdir()
        (manager.directory / name / "rank-0.pt").write_bytes(b"half")
    assert value_of(manager) == (20, 2.0)
    manager.save(30, model=model_of(3.0))
    assert len(list(manager.directory.iterdir())) == 3


@pytest.mark.filterwarnings("ignore:.*another training has saved step 25")
def test_one_writer_at_a_time(manager):
    """While somebody else writes, a save waits; its folder is not mistaken for one that was left over."""
    with statefiles.drafting(manager.directory) as draft:
        other = threading.Thread(target=lambda: manager.save(30, model=model_of(3.0)))
        other.start()
        other.join(timeout=0.2)
        assert other.is_alive()
        entry = statefiles.write_file(draft.path / "rank-0.pt", lambda file: file.write(b"x"))
        draft.commit(25, {"rank-0.pt": entry}, {"metric": None, "num_ranks": 1, "is_sharded": False})
    other.join()
    assert manager.steps == (30, 25, 20)


def test_background_save_writes_values_of_the_call(tmp_path, monkeypatch):
    may_write, write = threading.Event(), statefiles.drafting
    monkeypatch.setattr(
        "memkit.recipes.state.manager.drafting", lambda directory: (may_write.wait(), write(directory))[1]
    )
    model = model_of(1.0)
    values = np.ones(64, dtype=np.float32)
    model.bias.grad, memory = torch.from_numpy(values), weakref.ref(values)
    del values
    with TrainingStateManager(tmp_path, background=True) as manager:
        manager.save(1, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        nn.init.constant_(model.weight, 5.0)
        model.zero_grad()
        is_gone, steps = memory() is None, manager.steps
        may_write.set()
        assert is_gone  # what was copied may go
        assert steps == ()
        manager.wait()
        assert manager.steps == (1,)
    assert value_of(manager, 1) == (1, 1.0)


def test_an_error_in_the_background_comes_out_of_the_next_call(tmp_path):
    manager = TrainingStateManager(tmp_path / "file", background=True)
    (tmp_path / "file").write_text("in the way")
    manager.save(1, model=model_of(1.0))
    with pytest.raises(FileExistsError) as raised:
        manager.save(2, model=model_of(2.0))
    assert any("save(1, ...) could not write to" in note for note in raised.value.__notes__)
    (tmp_path / "file").unlink()
    manager.save(3, model=model_of(3.0))
    manager.close()
    assert manager.steps == (3,)
    manager.save(4, model=model_of(4.0))  # nothing that a save needs was closed
    manager.close()
    assert manager.steps == (4, 3)


def test_a_thread_that_cannot_be_started_stops_no_later_save(tmp_path, monkeypatch):
    manager = TrainingStateManager(tmp_path, background=True)

    def start(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patches, pytest.raises(RuntimeError, match="can't start"):
        patches.setattr(threading.Thread, "start", start)
        manager.save(1, model=model_of(1.0))
    manager.save(2, model=model_of(2.0))
    manager.close()
    assert manager.steps == (2,)


def test_manifest_lists_contents(manager):
    record = json.loads((newest(manager) / "manifest.json").read_text())["content"]
    assert record["step"] == 20
    assert record["files"]["rank-0.pt"] == statefiles.describe_file(newest(manager) / "rank-0.pt")


def test_background_error_is_reported_without_later_call(tmp_path):
    manager = TrainingStateManager(tmp_path / "file", background=True)
    (tmp_path / "file").write_text("in the way")
    manager.save(1, model=model_of(1.0))
    manager._writer.join()
    del manager
    with pytest.warns(MemkitWarning, match=r"could not write the last state in .*file: .*Call close\(\) at the end"):
        gc.collect()
