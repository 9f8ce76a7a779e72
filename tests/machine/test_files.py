"""A file is the old one or the new one, whatever kills the writer."""

import errno
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memkit._machine import files
from memkit.errors import InputError

WRITER = """
import sys
from memkit._machine.files import atomic_writer
path = sys.argv[1]
value = 0
while True:
    value += 1
    with atomic_writer(path) as file:
        for _ in range(64):
            file.write(value.to_bytes(4, "big") * 16384)
"""


def test_kill_at_random_instants_never_tears_the_file(tmp_path):
    """Kills during back-to-back writes of 4 MiB: one value throughout, and nothing left after the next write."""
    path = tmp_path / "state.bin"
    chance = random.Random(7)
    leftovers = num_kills = 0
    while num_kills < 15 or (not leftovers and num_kills < 100):  # on a busy machine few of them hit the middle
        num_kills += 1
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)])
        deadline = time.monotonic() + 20
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.06 + chance.random() * 0.05)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        data = path.read_bytes()
        assert len(data) == 64 * 16384 * 4
        assert data == data[:4] * (len(data) // 4)
        leftovers += len(list(tmp_path.iterdir())) - 1
    assert leftovers > 0  # the kills did hit the middle of writes
    files.write_bytes(path, b"last")
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.bin"]


def test_an_error_in_the_block_leaves_the_old_file_alone(tmp_path):
    path = tmp_path / "file"
    files.write_text(path, "old")
    with pytest.raises(KeyError), files.atomic_writer(path) as file:
        file.write(b"half of the new")
        raise KeyError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_leaves_the_old_file_alone(tmp_path):
    """A real EFBIG by RLIMIT_FSIZE: the write fails as it does on a full disk."""
    path = tmp_path / "file"
    files.write_text(path, "old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError) as raised:  # noqa: PT011 - the number is checked below
            files.write_bytes(path, bytes(5000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert raised.value.errno == errno.EFBIG
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_links_and_permissions_stay(tmp_path):
    real = tmp_path / "real"
    link = tmp_path / "link"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)
    files.write_text(link, "new\n")
    assert link.is_symlink()
    assert real.read_bytes() == b"new\n"
    assert real.stat().st_mode & 0o777 == 0o640
    fresh = tmp_path / "fresh"
    files.write_text(fresh, "x")
    ordinary = tmp_path / "ordinary"
    ordinary.write_text("x")
    assert fresh.stat().st_mode == ordinary.stat().st_mode


def test_sweep_spares_the_living_and_the_strangers(tmp_path):
    path = tmp_path / "file"
    prefix = files._prefix(path)
    living = tmp_path / f"{prefix}{os.getppid()}.aa{files._SUFFIX}"
    other_target = tmp_path / f"{files._prefix(tmp_path / 'other')}999999999.aa{files._SUFFIX}"
    no_number = tmp_path / f"{prefix}mine.aa{files._SUFFIX}"
    dead = tmp_path / f"{prefix}999999999.aa{files._SUFFIX}"
    for each in (living, other_target, no_number, dead):
        each.touch()
    files.write_text(path, "x")
    assert {each.name for each in tmp_path.iterdir()} == {each.name for each in (path, living, other_target, no_number)}


def test_the_longest_file_name_works(tmp_path):
    path = tmp_path / ("x" * 255)
    files.write_text(path, "x")
    assert path.read_text() == "x"


def test_rejects_dangling_links_and_special_files(tmp_path):
    """Else a link that somebody has laid chooses where a file appears, and a device becomes a file."""
    elsewhere = tmp_path / "elsewhere"
    for name, leads_to in {"link": elsewhere, "loop": "loop", "chain": "link"}.items():
        (tmp_path / name).symlink_to(leads_to)
        with pytest.raises(FileNotFoundError, match="a link to a missing file"):
            files.write_text(tmp_path / name, "x")
        assert (tmp_path / name).is_symlink()
    assert not elsewhere.exists()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "null").symlink_to("/dev/null")
    for name in ("pipe", "null"):
        with pytest.raises(OSError, match="not a regular file"):
            files.write_text(tmp_path / name, "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chain", "link", "loop", "null", "pipe"]


def test_a_missing_directory_is_told_by_the_callers_path(tmp_path):
    (tmp_path / "file").write_text("old")
    for path, text in (
        (tmp_path / "no" / "x", f"{str(tmp_path / 'no')!r}, which is not a directory.*create it first: os.makedirs"),
        (tmp_path / "file" / "x", rf"which is not a directory.*use a directory, for example {str(tmp_path)!r}\.$"),
        (tmp_path, "got a directory; expected the path of a file.*add a file name"),
    ):
        with pytest.raises(InputError, match=text) as raised:
            files.write_text(path, "x")
        assert raised.value.call == f"writing {str(path)!r}"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a directory in which nobody may create a file")
def test_a_refused_write_names_the_callers_path():
    with pytest.raises(OSError) as raised:  # noqa: PT011 - the name is checked below
        files.write_text("/proc/self/x.json", "x")
    assert (raised.value.filename, raised.value.filename2) == ("/proc/self/x.json", None)
    assert "memkit-tmp" not in str(raised.value)
