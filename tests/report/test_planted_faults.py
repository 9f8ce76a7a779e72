"""A small training with one planted fault, logged as the docs say: the first line of the report names the fault."""

import re
import subprocess
import sys
from html import unescape

import pytest

import memkit as mk
from memkit._core.units import MIB
from memkit._events.log import Event
from memkit.cli import main
from memkit.recipes.report import make_report
from memkit.report.build import build_comparison
from memkit.report.nodes import Paragraph
from tests.helpers import one_in
from tests.report import planted
from tests.report.pages import log_of as event_log

pytestmark = pytest.mark.filterwarnings("ignore:MemoryEfficientTrainingWrapper")

# Fault: how it is run, what the first line says, and the suspect.
FAULTS = {
    "leak_per_step": ("cpu", r"Memory grows 512\.00 KiB per step over 30 steps: probably a leak", "`history`"),
    "leak_per_epoch": ("cpu", r"Memory grows 1\.00 MiB with each epoch: (probably|perhaps) a leak", "`best`"),
    "graph_kept": ("cpu", r"Each step keeps its graph", "`losses`"),
    "evaluation_with_gradients": ("cpu", r"Evaluation with gradients: validation builds graphs", "validation"),
    "fragmentation": ("cuda", r"Fragmentation: the allocator holds .* more than tensors ever took", ""),
    "first_step_peak": ("cpu", r"Only the first step, or something before it, peaks at .*; later steps take", ""),
    "survived_out_of_memory": ("cpu", r"Out of memory 2 times, and recovered: .* 4 parts of at most 128 rows", ""),
    "host_memory": ("process", r"Host memory grows [34]\.\d\d MiB per step over 20 steps, but tensors do not", ""),
    "workers": ("process", r"Child processes, such as data loader workers, grow .* per step", ""),
    "optimizer_twice": ("cpu", r"optimizer added 2\.01 MiB again at step 7, .* duplicate optimizer state", "optimizer"),
    "large_validation": ("cpu", r"The batches of validation are too large: it sets the peak of", "validation"),
    "clean": ("cpu", r"Nothing wrong found: memory stays level over 30 steps; peak", ""),
}

# The same on other devices, with other lengths, and two at once.
VARIANTS = {
    "leak on a card, not tracked": ("leak_per_step", "cuda untracked", "per step over 30 steps: probably a leak"),
    "leak on a card": ("leak_per_step", "cuda", "per step over 30 steps: probably a leak"),
    "leak of a process, not tracked": ("host_memory", "process untracked", "The process grows"),
    "leak under noise": ("leak_under_noise", "cpu", r"Memory grows 1\.\d\d MiB per step over 60 steps"),
    "leak per epoch on a card": ("leak_per_epoch", "cuda untracked", "with each epoch"),
    "leak of batches": ("leak_of_batches", "cpu", "512.00 KiB per step"),
    "graph without a backward": ("graph_kept_unused", "cpu", "Each step keeps its graph: memory grows 192.00 KiB"),
    "evaluation on a card": ("evaluation_with_gradients", "cuda untracked", "Evaluation with gradients"),
    "optimizer on a card": ("optimizer_twice", "cuda untracked", "duplicate optimizer state"),
    "validation on a card": ("large_validation", "cuda untracked", "too large: it sets the peak"),
    "a leak and an evaluation": ("leak_and_evaluation", "cpu", "Memory grows 512.00 KiB per step"),
}
CLEAN = ("clean", "clean_epochs", "clean_cache", "clean_lengths", "clean_resizing", "clean_preloaded", "clean_pair")


def log_of(name, how, path, **settings):
    train, track = getattr(planted, name), "untracked" not in how
    if how.startswith("process"):  # whose own memory is not that of the tests before
        arguments = [name, str(path), "track" if track else "untracked"]
        subprocess.run([sys.executable, "-m", "tests.report.planted", *arguments], check=True, timeout=240)
        return mk.report.read_memory_events(path)
    if how.startswith("cuda"):
        with mk.VirtualGPU("RTX 4090"):
            return planted.run(train, path, device="cuda", track=track, **settings)
    return planted.run(train, path, track=track, **settings)


def first_lines(log, folder, capsys):
    """The first line for the reader, in each form."""
    pages = {}
    for suffix in ("html", "md", "txt"):
        mk.write_report(log, folder / f"report.{suffix}")
        pages[suffix] = (folder / f"report.{suffix}").read_text("utf-8")
    assert main(["report", str(folder / "log.jsonl"), "--output", str(folder / "shell.md")]) == 0
    return {
        "html": unescape(re.search(r"<body>.*?<h1>(.*?)</h1>", pages["html"], re.DOTALL)[1]),
        "md": re.sub(r"\\(.)", r"\1", pages["md"].splitlines()[1].removeprefix("# ")),
        "txt": " ".join(re.split(r"\n(?:\n|Suspect|Next)", pages["txt"])[0].split()),
        "shell": " ".join(re.split(r"\n(?:Suspect|Next|Peak)", capsys.readouterr().out)[0].split()),
    }


@pytest.mark.parametrize(
    "name",
    one_in(3, FAULTS, slow={"workers", "host_memory"}),
)
def test_the_first_line_names_the_fault(name, tmp_path, capsys):
    how, words, suspect = FAULTS[name]
    log = log_of(name, how, tmp_path / "log.jsonl")
    lines = first_lines(log, tmp_path, capsys)
    assert set(lines.values()) == {lines["html"]}
    assert re.match(words, lines["html"]), lines["html"]
    report = make_report(log)
    assert suspect in (report.hints[0] if report.hints else "")
    assert (report.severity == "good") is (name == "clean")


@pytest.mark.parametrize("name", one_in(4, VARIANTS, slow={"leak of a process, not tracked"}))
def test_variants(name, tmp_path):
    fault, how, words = VARIANTS[name]
    report = make_report(log_of(fault, how, tmp_path / "log.jsonl"))
    assert re.search(words, report.headline), report.headline


@pytest.mark.parametrize("num_steps", one_in(3, [12, 5, 200]))
def test_a_leak_is_found_in_short_and_long_logs(num_steps, tmp_path):
    log = log_of("leak_per_step", "cuda untracked", tmp_path / "log.jsonl", num_steps=num_steps, rows=64)
    assert f"Memory grows 64.00 KiB per step over {num_steps} steps" in make_report(log).headline


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", one_in(3, CLEAN))
def test_no_false_alarm(name, device, tmp_path):
    report = make_report(log_of(name, device, tmp_path / "log.jsonl"))
    assert report.severity == "good", report.headline


def test_two_faults_list_the_worse_first(tmp_path):
    report = make_report(log_of("leak_and_evaluation", "cpu", tmp_path / "log.jsonl"))
    assert [finding["kind"] for finding in report.figures()["findings"]] == ["leak", "evaluation_graph"]
    also = next(section for section in report.sections if section.title.startswith("Findings")).nodes
    assert also[0].text == "Also found:"
    assert also[1].items[0].startswith("Evaluation with gradients: validation builds graphs")


def test_report_is_consistent_with_its_first_line(tmp_path):
    log = log_of("leak_per_step", "cuda untracked", tmp_path / "log.jsonl")
    report = make_report(log)
    tiles = dict(report.highlights)
    assert tiles["growth of tensors per step"].low == 512 * 2**10
    assert int(tiles["rating"].split()[0]) <= 40
    page = "\n".join(node.text for section in report.sections for node in section.nodes if isinstance(node, Paragraph))
    assert "does not grow" not in page
    with mk.VirtualGPU("RTX 4090", torch="2.13"):  # by 2.15, half of what so small a run reserves is unused
        clean = make_report(planted.run(planted.clean, tmp_path / "clean.jsonl", device="cuda", track=False))
    assert dict(clean.highlights)["growth of tensors per step"] == "none"
    assert int(dict(clean.highlights)["rating"].split()[0]) > 40


def test_comparison_names_gone_and_new_findings(tmp_path):
    faulty = log_of("evaluation_with_gradients", "cpu", tmp_path / "faulty.jsonl")
    clean = log_of("clean", "cpu", tmp_path / "clean.jsonl")
    assert [hint[:32] for hint in build_comparison(faulty, clean).hints] == ["Gone: Evaluation with gradients:"]
    worse = build_comparison(clean, faulty)
    assert [hint[:31] for hint in worse.hints] == ["New: Evaluation with gradients:"]
    assert worse.severity == "warning"
    assert build_comparison(faulty, faulty).hints == ()


def test_weighs_evaluation_by_its_largest_call():
    """What the last one kept is given back by the next: that one peaks higher, and adds less."""
    nodes = {"phase": "validation", "duration_ns": 10**8, "note": {"graph_nodes": 5}}
    events = [
        Event("step_1", time_ns=1 * 10**9, step=1, allocated_bytes=100 * MIB, peak_bytes=110 * MIB),
        Event("validation", time_ns=2 * 10**9, allocated_bytes=500 * MIB, peak_bytes=600 * MIB, **nodes),
        Event("step_2", time_ns=3 * 10**9, step=2, allocated_bytes=500 * MIB, peak_bytes=510 * MIB),
        Event("validation", time_ns=4 * 10**9, allocated_bytes=500 * MIB, peak_bytes=610 * MIB, **nodes),
    ]
    assert "and takes 500.00 MiB" in make_report(event_log(*events)).headline


def test_a_fault_without_advice_is_not_called_nothing(tmp_path):
    pages = {}
    for name in ("evaluation_with_gradients", "clean"):
        mk.write_report(log_of(name, "cpu", tmp_path / f"{name}.jsonl"), tmp_path / f"{name}.md")
        pages[name] = (tmp_path / f"{name}.md").read_text("utf-8")
    assert "give no reason to change anything beyond the next step at the top" in pages["evaluation_with_gradients"]
    assert "The figures give no reason to change anything." in pages["clean"]
