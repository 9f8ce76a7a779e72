"""Two processes on one card see each other; a dead one is seen by nobody; a foreign directory is not trusted."""

import os
import signal
import subprocess
import sys
import warnings

import pytest

from memkit.memory.sharing import DeviceClaim

CHILD = """
import sys
from pathlib import Path
from memkit.memory.sharing import DeviceClaim
claim = DeviceClaim("GPU-1", directory=Path({directory!r}))
print("ready", flush=True)
for line in sys.stdin:
    print(claim.others(), flush=True)
"""


class Process:
    def __init__(self, directory):
        script = CHILD.format(directory=str(directory))
        self.popen = subprocess.Popen(
            [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.popen.stdout.readline() == "ready\n"

    def others(self):
        self.popen.stdin.write("?\n")
        self.popen.stdin.flush()
        return self.popen.stdout.readline().strip()

    def end(self, number=signal.SIGKILL):
        self.popen.send_signal(number)
        self.popen.communicate(timeout=60)


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "claims"


def test_processes_see_each_other_until_one_is_killed(directory):
    first, second = Process(directory), Process(directory)
    try:
        assert first.others() == f"({second.popen.pid},)"
        assert second.others() == f"({first.popen.pid},)"
        second.end()
        assert first.others() == "()"
        assert [path.name.split(".")[1] for path in directory.iterdir()] == [str(first.popen.pid)]  # swept
    finally:
        first.end()
        second.end()


def test_another_card_is_another_matter(directory):
    process = Process(directory)
    try:
        claims = [DeviceClaim(identity, directory=directory) for identity in ("GPU-1", "GPU-2", "GPU-1/../GPU 3")]
        assert [claim.others() for claim in claims] == [(process.popen.pid,), (), ()]
        for claim in claims:
            claim.close()
        assert len(list(directory.iterdir())) == 1
    finally:
        process.end()


def test_claims_of_one_process_count_once_until_closed(directory):
    process = Process(directory)
    try:
        one, two = DeviceClaim("GPU-1", directory=directory), DeviceClaim("GPU-1", directory=directory)
        assert one.others() == two.others() == (process.popen.pid,)
        assert process.others() == f"({os.getpid()},)"
        one.close()
        assert process.others() == f"({os.getpid()},)"
        two.close()
        two.close()
        assert process.others() == "()"
    finally:
        process.end()


def test_a_claim_that_is_freed_is_released(directory):
    claim = DeviceClaim("GPU-1", directory=directory)
    assert len(list(directory.iterdir())) == 1
    with warnings.catch_warnings(action="error"):  # of a file that is not closed
        del claim
    assert list(directory.iterdir()) == []


def test_a_forked_copy_that_is_freed_releases_nothing(directory):
    process = Process(directory)
    claim = DeviceClaim("GPU-1", directory=directory)
    pid = os.fork()
    if pid == 0:
        del claim
        os._exit(0)
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert process.others() == f"({os.getpid()},)"
    finally:
        claim.close()
        process.end()


def test_claim_ends_with_its_process_despite_forks(directory):
    process = Process(directory)
    claim = DeviceClaim("GPU-1", directory=directory)
    try:
        pid = os.fork()
        if pid == 0:
            os._exit(0 if claim.others() == tuple(sorted((process.popen.pid, os.getppid()))) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert process.others() == f"({os.getpid()},)"
    finally:
        claim.close()
        process.end()


def test_many_processes_at_once_all_get_a_claim(directory):
    """Each looks while the others make theirs: a file that is made but not locked yet looks like a dead one's."""
    script = (
        "from pathlib import Path\nfrom memkit.memory.sharing import DeviceClaim\n"
        f"directory = Path({str(directory)!r})\n"
        "for _ in range(300):\n"
        "    claim = DeviceClaim('GPU-1', directory=directory)\n"
        "    claim.others()\n"
        "    assert Path(claim._file.name).exists()\n"
        "    claim.close()\n"
    )
    processes = [subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE) for _ in range(3)]
    assert [process.communicate(timeout=120)[1] for process in processes] == [b""] * 3
    assert list(directory.iterdir()) == []


def nobody_is_found(directory):
    claim = DeviceClaim("GPU-1", directory=directory)
    assert claim.others() == ()
    claim.close()


def test_does_not_trust_world_writable_directory(directory):
    directory.mkdir()
    directory.chmod(0o777)
    process = Process(directory)
    try:
        nobody_is_found(directory)
        assert list(directory.iterdir()) == []
    finally:
        process.end()


def test_a_link_in_place_of_the_directory_is_not_followed(tmp_path, directory):
    target = tmp_path / "elsewhere"
    target.mkdir(mode=0o700)
    directory.symlink_to(target)
    nobody_is_found(directory)
    assert list(target.iterdir()) == []


def test_a_file_in_place_of_the_directory_stops_nothing(directory):
    directory.write_text("")
    nobody_is_found(directory)


def test_no_directory_to_write_to_stops_nothing(tmp_path):
    nobody_is_found(tmp_path / "not there" / "claims")
