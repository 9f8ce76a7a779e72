"""The door to the machine: devices, and host memory as the tightest limit leaves it."""

import resource
from pathlib import Path

import psutil
import pytest
import torch

import memkit as mk
from memkit._core.records import DeviceMemory
from memkit._machine import devices
from tests.forked import run_python_forked
from tests.helpers import run_python

requires_cpu_only = pytest.mark.skipif(torch.accelerator.is_available(), reason="Requires: [no accelerator]")


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@requires_cpu_only
def test_auto_falls_back_to_cpu():
    assert devices.resolve_device() == torch.device("cpu")


@pytest.mark.parametrize("device", ["gpu", "cuda:banana", "", "xla"])
def test_missing_device_error_lists_available_ones(device):
    with pytest.raises(mk.errors.ConfigError, match=r"expected 'auto' or a device of this machine: .*cpu.*meta"):
        devices.resolve_device(device)


def test_an_index_beyond_the_last_card_is_refused(monkeypatch):
    """Else the error would come from deep inside torch, at the first tensor."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert devices.resolve_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(mk.errors.ConfigError, match=r"device='cuda:2'.*of this machine: cpu, meta, cuda \(2\)"):
        devices.resolve_device("cuda:2")


def test_cpu_counts_are_none_not_zero():
    assert devices.device_memory(torch.device("cpu")) == DeviceMemory()


def test_cgroup_v2_takes_tightest_level_without_page_cache(tmp_path):
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/jobs/one\n",
            "sys/fs/cgroup/jobs/one/memory.max": "max\n",
            "sys/fs/cgroup/jobs/one/memory.current": "100\n",
            "sys/fs/cgroup/jobs/memory.max": "5000000\n",
            "sys/fs/cgroup/jobs/memory.current": "3000000\n",
            "sys/fs/cgroup/jobs/memory.stat": "anon 1000000\ninactive_file 1500000\n",
            "sys/fs/cgroup/memory.current": "3000000\n",
        },
    )
    host = devices.host_memory(root)
    assert (host.available_bytes, host.total_bytes, host.limited_by) == (3_500_000, 5_000_000, "cgroup")


def test_cgroup_v1_with_container_mount_only(tmp_path):
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "3:cpu,cpuacct:/docker/abc\n2:memory:/docker/abc\n1:name=systemd:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "4000000\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "4500000\n",
            "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 200000\n",
        },
    )
    host = devices.host_memory(root)
    assert (host.available_bytes, host.total_bytes, host.limited_by) == (0, 4_000_000, "cgroup")


def test_cgroup_v1_without_a_limit_says_so_with_a_huge_number(tmp_path):
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "2:memory:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
        },
    )
    host = devices.host_memory(root)
    assert host.limited_by == "machine"
    assert host.total_bytes == psutil.virtual_memory().total


CHILD = """
import resource, psutil
from memkit._machine import devices
before = devices.host_memory()
data = next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith("VmData"))
limit = data + 100 * 2**20
resource.setrlimit(resource.{name}, (limit, resource.RLIM_INFINITY))
host = devices.host_memory()
print(host.limited_by, host.available_bytes <= 100 * 2**20, host.total_bytes == limit, host.rss_bytes > 10 * 2**20)
held = bytearray({held} * 2**20)
print(devices.under_memory_pressure("cpu"), devices.under_memory_pressure("cuda"))
"""


@pytest.mark.parametrize(("held", "pressure"), [(1, False), (88, True)])
def test_resource_limit_bounds_available_memory(held, pressure):
    if resource.getrlimit(resource.RLIMIT_DATA)[1] != resource.RLIM_INFINITY:
        pytest.skip("Requires: [no hard RLIMIT_DATA]")
    done = run_python_forked(CHILD.format(name="RLIMIT_DATA", held=held))
    assert done.stdout.splitlines() == ["RLIMIT_DATA True True True", f"{pressure} False"]


def test_release_runs_the_collector():
    class Node:
        pass

    import weakref

    node = Node()
    node.itself = node
    gone = weakref.ref(node)
    del node
    devices.release_cached_memory()
    assert gone() is None


@pytest.mark.gpu
def test_cuda_memory_counts():
    device = devices.resolve_device("cuda")
    before = devices.device_memory(device)
    held = torch.empty(2**20, device=device)
    after = devices.device_memory(device)
    assert after.allocated_bytes - before.allocated_bytes == held.nbytes
    assert after.total_bytes > after.free_bytes > 0


def test_a_memory_limit_is_real():
    out = run_python_forked("""
        import torch, memkit as mk
        from memkit._machine.devices import limit_memory
        limit_memory(torch.device('cpu'), 64 * 2**20)
        torch.empty(48 * 2**20, dtype=torch.uint8)
        try: torch.empty(80 * 2**20, dtype=torch.uint8)
        except RuntimeError as error: print(mk.is_out_of_memory(error))
        """).stdout
    assert out == "True\n"


def test_ignores_absurd_limit():
    with pytest.raises(
        mk.errors.ConfigError, match=r"limit_memory\(meta\): got meta on .*; expected CUDA, or the CPU on Linux"
    ):
        devices.limit_memory(torch.device("meta"), 2**20)


# ---- this process


def test_resident_bytes_are_psutils():
    assert devices.resident_bytes() == pytest.approx(psutil.Process().memory_info().rss, abs=4 * 2**20)


def test_a_forked_process_reads_itself():
    out = run_python_forked("""
        import os, torch
        from memkit._machine import devices
        read_peak = devices.ResidentPeak().read
        before = devices.resident_bytes()
        if os.fork() == 0:
            forked = devices.resident_bytes()
            held = torch.ones(25 * 2**20)  # 100 MiB
            grown = devices.resident_bytes() - forked
            print(90 < grown / 2**20 < 130, read_peak() >= devices.resident_bytes() - 2**20, flush=True)
            os._exit(0)
        os.wait()
        print(read_peak() - before < 50 * 2**20)
        """).stdout
    assert out == "True True\nTrue\n"


@pytest.mark.slow
def test_the_peak_is_this_programs_own_and_can_start_again():
    """The child of a process of 800 MiB begins with its peak in ru_maxrss; a restart must reach below it too."""
    out = run_python_forked("""
        import subprocess, sys, torch
        held = torch.ones(200 * 2**20)
        child = '''
        import resource, torch
        from memkit._machine import devices
        peak = devices.ResidentPeak()
        read = peak.read
        MIB = 2**20
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 800 * 1024, read() < 750 * MIB)
        before = read()
        torch.ones(25 * MIB)  # and gone
        print(90 * MIB < read() - before < 130 * MIB)
        torch.ones(250 * MIB)
        print(read() - before > 900 * MIB)  # above what was inherited, the quick count is right
        peak.restart()
        print(abs(read() - devices.resident_bytes()) < 4 * MIB)
        '''
        subprocess.run([sys.executable, "-c", __import__("textwrap").dedent(child)], check=True)
        """).stdout
    assert out.split() == ["True"] * 5


def test_trim_heap_returns_gaps_between_small_blocks():
    held = [torch.ones(2000) for _ in range(8000)]
    few = held[::100]
    before = devices.resident_bytes()
    del held
    devices.trim_heap()
    assert before - devices.resident_bytes() > 40 * 2**20
    assert len(few) == 80


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Requires: [Linux]")
@pytest.mark.slow
def test_large_blocks_leave_no_gaps_in_a_heap_that_is_kept_whole():
    out = run_python("""
        import torch
        from memkit._machine import devices

        def mapped_mib():
            return int(open("/proc/self/statm").read().split()[0]) * 4096 / 2**20

        def num_kept():
            before = mapped_mib()
            # The small ones are larger than any gap that importing torch may have left in the heap.
            held = [(torch.ones(2**18), torch.ones(2**13)) for _ in range(40)]
            small = [each for _, each in held]
            del held
            devices.trim_heap()
            return mapped_mib() - before

        block = torch.ones(2**22)
        del block  # from now on, glibc takes blocks of up to its size from the heap
        print(num_kept())
        devices.keep_heap_whole()
        print(num_kept())
        """).stdout
    by_default, whole = map(float, out.split())
    assert whole < 4
    assert by_default > 30


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"RANK": "3", "WORLD_SIZE": "4"}, "(3, 4)"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "(0, 1)"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "(0, 1)"),
        ({"RANK": "0"}, "(0, 1)"),
    ],
)
def test_the_rank_is_the_launchers(environment, expected, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert str(devices.process_rank()) == expected


def test_rank_comes_from_torch_distributed():
    out = run_python_forked(
        """
        import torch.distributed as dist
        from memkit._machine import devices
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        print(devices.process_rank())
        dist.destroy_process_group()
        """,
        RANK="1",
        WORLD_SIZE="2",
    ).stdout
    assert out.splitlines()[-1] == "(0, 1)"  # older versions of gloo say something before


def test_the_cpu_is_not_a_gpu():
    cpu = torch.device("cpu")
    assert (devices.device_identity(cpu), devices.allocator_snapshot(cpu), devices.peak_bytes(cpu)) == (
        None,
        None,
        None,
    )
    assert devices.device_name(cpu)
    assert devices.allocator_counter(cpu) is None


@pytest.mark.gpu
def test_a_card_has_a_name_an_identity_and_counters():
    device = devices.resolve_device("cuda")
    held = torch.empty(2**20, device=device)
    read = devices.allocator_counter(device)
    assert read().allocated_bytes == torch.cuda.memory_allocated(device) >= held.nbytes
    assert read().peak_bytes == devices.peak_bytes(device) == torch.cuda.max_memory_allocated(device)
    assert read().reserved_peak_bytes == torch.cuda.max_memory_reserved(device)
    assert devices.device_identity(device) == str(torch.cuda.get_device_properties(device).uuid)
    large = torch.empty(2**24, device=device)
    del large
    devices.reset_peak(device)
    assert read().peak_bytes == read().allocated_bytes
    assert devices.allocator_snapshot(device)


def test_allocator_settings_are_those_of_the_environment(monkeypatch):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    assert devices.allocator_settings() == {}
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert devices.allocator_settings() == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def test_a_limit_on_the_process_is_that_of_its_allocator():
    assert [devices.allocator_limit_bytes(name) for name in ("cpu", "RTX 4090")] == [None, None]
    with mk.VirtualGPU("RTX 4090"):
        assert devices.allocator_limit_bytes("cuda") is None
        torch.cuda.set_per_process_memory_fraction(0.5)
        total_bytes = torch.cuda.get_device_properties(0).total_memory
        assert devices.allocator_limit_bytes("cuda:0") == pytest.approx(total_bytes / 2, abs=1)
