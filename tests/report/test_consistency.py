"""Figures that stand for the same thing are equal wherever a report has them, in logs of every kind."""

import json
import re
from itertools import pairwise

import pytest
import torch
from torch import nn

import memkit as mk
from memkit._events.log import Event, LoggedDevice, LogHeader, Origin
from memkit._events.writer import save_events
from memkit.recipes.report import make_report
from memkit.report.figures import read_figures
from memkit.report.growth import LEAST_RATE
from memkit.report.nodes import Lines, Paragraph, Table
from memkit.report.rating import rate
from memkit.report.words import Words
from tests.report.pages import S1, log_of

WORDS = Words("en")
MIB = 2**20


def train(memory, *, num_steps=10, track="run", leak_bytes=0):
    """A small training in phases, as people write it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1))
    optimizer = torch.optim.Adam(model.parameters())
    kept = []

    def step():
        with memory.phase("step"):
            with memory.phase("forward"):
                loss = model(torch.randn(512, 64)).square().mean()
            with memory.phase("backward"):
                loss.backward()
            memory.mark("checked")
            with memory.phase("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
        kept.append(torch.zeros(leak_bytes // 4))

    def run(each):
        for _ in range(num_steps):
            each()
            memory.step()

    if track == "run":
        with memory.track() as tracker:
            run(step)
        memory.mark("watched", note={"peak_by_category": tracker.peak_by_category})
    elif track == "step":

        def watched():
            with memory.track():
                step()

        run(watched)
    else:
        run(step)


def manager_log(folder, *, runs=1, **settings):
    path = folder / "log.jsonl"
    for _ in range(runs):
        with mk.MemoryManager("cpu", log=path) as memory:
            train(memory, **settings)
    return mk.report.read_memory_events(path)


def loop_log(folder):
    path = folder / "log.jsonl"
    model = nn.Linear(64, 10)
    with mk.MemoryManager("cpu", log=path) as memory, memory.track():
        trainer = mk.MemoryEfficientTrainingWrapper(
            model, torch.optim.Adam(model.parameters()), accumulation_steps=2, memory=memory
        )
        loss_fn = lambda model, x: model(x).square().mean()  # noqa: E731
        mk.MemoryEfficientTrainLoop(trainer, torch.randn(10, 32, 64).unbind(), loss_fn, progress=False).run(1)
    return mk.report.read_memory_events(path)


def older_log(folder, added, end):
    """The older form: what each of 50 steps added, and the record at the end."""
    loaded = {"init": 0, "t5_loaded": 15 * 2**30, "model_loaded": 2**34}
    events = [{"event": name, "peak_memory": num_bytes} for name, num_bytes in loaded.items()]
    events += [{"event": f"step_{n}", "incremental_memory": added(n)} for n in range(1, 51)]
    events += [] if end is None else [{"event": "inference_end", "peak_memory": 2**34 + end}]
    path = folder / "log.json"
    path.write_text(json.dumps(events))
    return mk.report.read_memory_events(path)


def snapshot_log(folder):
    with mk.VirtualGPU("RTX 4090") as gpu:
        layer = nn.Linear(1000, 1000).cuda()
        layer(torch.randn(64, 1000, device="cuda")).sum().backward()
    gpu.save_snapshot(folder / "log.pickle")
    return mk.report.read_memory_events(folder / "log.pickle")


def trace_log(folder):
    with torch.profiler.profile(profile_memory=True) as profiler:
        layer = nn.Linear(100, 100)
        layer(torch.randn(64, 100)).sum().backward()
    profiler.export_chrome_trace(str(folder / "log.json"))
    return mk.report.read_memory_events(folder / "log.json")


def rank_logs(folder):
    """Two ranks with counters, as on cards: records that nobody restarts."""
    for rank in (0, 1):
        counted = Origin("cuda_allocator", "measured")
        header = LogHeader.new(
            rank=rank,
            world_size=2,
            device=LoggedDevice("RTX 4090", 24 * 2**30, "cuda"),
            fields=dict.fromkeys(("peak_total_bytes", "allocated_bytes", "reserved_peak_bytes"), counted),
        )
        events = []
        for n in range(1, 13):
            held, record = (100 + 3 * n + rank) * MIB, (200 + min(n, 6)) * MIB
            numbers = {"peak_total_bytes": record, "reserved_peak_bytes": 2 * record, "reserved_bytes": record}
            time = {"time_ns": n * 10**9, "wall_s": header.wall_s + n, "allocated_bytes": held}
            events.append(Event("forward", phase="forward", duration_ns=10**8, **time, **numbers))
            events.append(Event(f"step_{n}", step=n, **(time | {"time_ns": n * 10**9 + 1}), **numbers))
        save_events(folder / f"log.rank{rank}.jsonl", header, events)
    return mk.report.read_memory_events(folder / "log.jsonl")


LOGS = {
    "tracked": manager_log,
    "leaking": lambda folder: manager_log(folder, leak_bytes=2 * MIB),
    "tracked by the step": lambda folder: manager_log(folder, track="step"),
    "not tracked": lambda folder: manager_log(folder, track=None),
    "two runs": lambda folder: manager_log(folder, runs=2),
    "loop": loop_log,
    "older": lambda folder: mk.report.read_memory_events(S1),
    "older, each step adds": lambda folder: older_log(folder, lambda n: 35 * MIB, 50 * 35 * MIB),
    "older, given back": lambda folder: older_log(folder, lambda n: 35 * MIB, 35 * MIB),
    "snapshot": snapshot_log,
    "trace": trace_log,
    "ranks": rank_logs,
}


@pytest.fixture(scope="module", params=LOGS)
def log(request, tmp_path_factory):
    return LOGS[request.param](tmp_path_factory.mktemp("consistency"))


@pytest.fixture
def report(log):
    return make_report(log, gpu="RTX 5090")


def tables(report):
    """All rows of a report, by the title of their section and their first cell."""
    for section in report.sections:
        for node in section.nodes:
            if isinstance(node, Table):
                yield from ((section.title, row[0], row) for row in node.rows)


def texts(report):
    for section in report.sections:
        for node in section.nodes:
            yield from [node.text] if isinstance(node, Paragraph) else getattr(node, "items", ())


def test_there_is_one_peak(log, report):
    figures = read_figures(log, None)
    if figures.peak is None:
        return
    size, num_bytes = figures.peak.size, figures.peak.num_bytes
    rows = {(title, first): row for title, first, row in tables(report)}
    assert report.highlights[0][1] == size
    assert rows[WORDS("overview_title"), WORDS("fact_peak")][1] == size
    layers = [row for (title, _), row in rows.items() if title == WORDS("layers_title")]
    assert size in [row[2] for row in layers]
    assert WORDS.size(size) in report.verdict
    text = WORDS("pattern_peak", event=figures.peak.event, size=WORDS.size(size))
    assert list(texts(report)).count(text) == 2  # pattern, and findings
    assert figures.ranks == {} or max(figures.ranks.values()) == num_bytes
    lines = [node for section in report.sections for node in section.nodes if isinstance(node, Lines)]
    seen = [y for node in lines for line in node.lines if line.name != WORDS("line_reserved") for y in line.y]
    assert max(seen, default=0) <= num_bytes
    assert all(split.whole_bytes <= num_bytes for split in figures.splits)


def test_bounds_of_stages_and_steps_hold(log):
    figures = read_figures(log, None)
    steps = figures.steps.steps if figures.steps else ()
    peak = figures.peak.num_bytes if figures.peak else 0
    for each in (*steps, *figures.stages):
        low, high = each.peak.low, each.peak.high
        assert (low or 0) <= peak
        assert low is None or high is None or low <= high
    for step in steps:
        assert step.held_bytes is None or step.peak.low >= step.held_bytes
    stages = {stage.name: stage.peak.low or 0 for stage in figures.stages}
    for name, low in stages.items():
        assert stages.get(name.rpartition("/")[0], low) >= low


def test_step_peak_covers_its_phases(log):
    figures = read_figures(log, None)
    since = {}
    for each in figures.observed if log.form == "lines" else ():
        seen = [value for value in (each.event.peak_bytes, each.event.allocated_bytes) if value is not None]
        since[each.track] = max([since.get(each.track, 0), *seen])
        if each.step is not None:
            assert (each.low or 0) >= since.pop(each.track)


def test_steps_and_events_are_counted_once(log, report):
    figures = read_figures(log, None)
    assert figures.num_events == len(figures.observed) + figures.num_predicted
    num_steps = sum(each.step is not None for each in figures.observed)
    num_ranks = max(1, len(figures.ranks))
    if figures.steps:
        numbers = [step.number for step in figures.steps.steps]
        assert num_steps == len(numbers) * num_ranks
        assert numbers == sorted(set(numbers))
        assert figures.steps.num_missing == numbers[-1] - numbers[0] + 1 - len(numbers)
    for section in report.sections:
        for node in section.nodes:
            for line in node.lines if isinstance(node, Lines) else ():
                assert len(line.x) <= figures.num_events
                assert all(a <= b for a, b in pairwise(line.x))
    assert figures.num_events + sum(run.num_events for run in figures.earlier) == len(log.events)


def test_changes_trend_and_rating_say_the_same(log):
    figures = read_figures(log, None)
    steps = figures.steps
    if steps is None:
        return
    if steps.measure == "held":
        changes = [step.change_bytes for step in steps.steps if step.change_bytes is not None]
        assert sum(changes) == steps.steps[-1].held_bytes - steps.steps[0].held_bytes
    growth = next(each for each in rate(figures).marks if each.rule.name == "growth")
    if steps.growth_bytes is not None and figures.peak:
        assert growth.value == pytest.approx(steps.growth_bytes / figures.peak.num_bytes)
    if steps.growth and steps.growth_bytes > 0.1 * figures.peak.num_bytes:
        assert growth.mark == 0
        assert steps.growth_bytes >= LEAST_RATE * (len(steps.steps) - 1)


def test_free_room_and_cards_are_the_same_everywhere(log, report):
    figures = read_figures(log, mk.find_gpu("RTX 5090").total_bytes)
    if figures.held_bytes is None:
        return
    free = 1 - figures.held_bytes / figures.layers.total_bytes
    marks = {each.rule.name: each.value for each in rate(figures).marks}
    tiles = dict(report.highlights)
    assert tiles[WORDS("tile_free")].value == pytest.approx(free) == pytest.approx(marks["headroom"])
    assert f"{free:.1%}" in report.verdict
    card = tiles.get(WORDS("tile_card"))
    if card is None:  # a run on the CPU
        assert figures.is_on_cpu
        return
    rows = {row[0]: row for title, _, row in tables(report) if title == WORDS("cards_title")}
    used = rows[card][3].value
    assert used == pytest.approx(figures.held_bytes / rows[card][2].low)
    deploy = WORDS("deploy_card", name=card, share=f"{used:.1%}")
    assert any(deploy in text for text in texts(report))


def test_a_log_does_not_differ_from_itself(log):
    report = make_report(log, baseline=log)
    changes = report.figures()["changes"]
    assert {change["presence"] for change in changes} == {"both"}
    assert {change["after_bytes"] for change in changes} - {None}
    assert all(change["before_bytes"] == change["after_bytes"] for change in changes)


def test_formats_have_the_same_numbers(log, tmp_path):
    """Charts aside, which have axes in a page and ranges in a text."""
    charts = {
        "md": r"(?m)^    .*$",
        "txt": r"(?m)^  .*(?:[█░▁▂▃▄▅▆▇]| \.\. ).*$",
        "html": r"(?s)<(script|style|figure).*?</\1>|<[^>]*>",
    }
    numbers, above_cards = {}, {}
    for suffix, chart in charts.items():
        mk.write_report(log, tmp_path / f"report.{suffix}", gpu="RTX 5090")
        page = re.sub(r"\s+", " ", re.sub(chart, " ", (tmp_path / f"report.{suffix}").read_text()))
        numbers[suffix], above_cards[suffix] = (
            set(re.findall(r"[+-]?\d[\d.,]* [KMG]?i?B\b", text)) for text in (page, page.split(WORDS("cards_near"))[0])
        )
    assert above_cards["md"] == above_cards["txt"] == above_cards["html"]
    assert above_cards["md"]
    assert numbers["txt"] <= numbers["md"] == numbers["html"]  # text folds the long table of cards


# ---- what newcomers met


def points(log):
    return rate(read_figures(log, 24 * 2**30)).points


class TestStepIncrements:
    """A leak in each step is worse than one step that grows once; what was given back is no leak."""

    @pytest.fixture
    def logs(self, tmp_path):
        kinds = {
            "leak": (lambda n: 35 * MIB, 50 * 35 * MIB),
            "leak without an end": (lambda n: 35 * MIB, None),
            "once": (lambda n: 35 * MIB * (n == 1), 35 * MIB),
            "given back": (lambda n: 35 * MIB, 35 * MIB),
        }
        logs = {}
        for name, (added, end) in kinds.items():
            (tmp_path / name).mkdir()
            logs[name] = older_log(tmp_path / name, added, end)
        return logs

    def test_the_rating_falls_with_the_leak(self, logs):
        rated = {name: points(log) for name, log in logs.items()}
        assert max(rated["leak"], rated["leak without an end"]) + 10 < min(rated["once"], rated["given back"])
        for name, value in (("leak", 49 * 35 / (16 * 1024 + 50 * 35)), ("once", 0.0)):
            marks = {each.rule.name: each for each in rate(read_figures(logs[name], None)).marks}
            assert marks["growth"].value == pytest.approx(value)
            assert marks["spread"].value is None

    def test_the_text_names_the_leak(self, logs):
        pages = {name: "\n".join(texts(make_report(log))) for name, log in logs.items()}
        for name in ("leak", "leak without an end"):
            assert "each step adds +35.00 MiB (95 % interval +35.00 MiB to +35.00 MiB)" in pages[name]
            assert "probably a leak" in pages[name]
            assert make_report(logs[name]).headline == "Memory grows 35.00 MiB per step over 50 steps: probably a leak"
        for name in ("once", "given back"):
            assert "probably a leak" not in pages[name]
        assert "memory was freed in between" in pages["given back"]


def test_rating_without_capacity_names_the_option():
    events = [Event(f"step_{n}", step=n, allocated_bytes=MIB, peak_bytes=2 * MIB) for n in range(10)]
    log = log_of(*events, total_bytes=None)
    page = "\n".join(texts(make_report(log)))
    assert "No rating: 3 figures are needed, and only 2 can be derived from this log." in page
    assert page.count("--gpu NAME") == 2  # beside the facts, and beside the rating
    assert "--gpu" not in "\n".join(texts(make_report(log, gpu="RTX 4090")))


def test_a_second_run_in_the_same_file_is_a_run_of_its_own(tmp_path):
    once, twice = (manager_log(folder, runs=runs) for folder, runs in ((tmp_path, 1), (tmp_path, 1)))
    first, second = read_figures(once, None), read_figures(twice, None)
    assert len(twice.headers) == 2
    assert second.num_events == first.num_events
    assert [run.num_events for run in second.earlier] == [first.num_events]
    assert {stage.name: stage.num_events for stage in second.stages} == {
        stage.name: stage.num_events for stage in first.stages
    }
    assert second.seconds < second.header.wall_s - first.header.wall_s + second.seconds
    assert "Earlier runs in the same log: 1." in "\n".join(texts(make_report(twice)))


def test_tracked_manager_reports_tensors(tmp_path):
    with mk.MemoryManager("cpu", log=tmp_path / "log.jsonl") as memory:
        assert "tensors not recorded" in memory.line()
        train(memory)
        peak = max(totals.peak_bytes for totals in memory.phases.values())
        assert "tensors not recorded" not in memory.summary()
        assert f"tensors not counted now, peak {mk.memory.format_bytes(peak)} inside track()" in memory.line()
    figures = read_figures(mk.report.read_memory_events(tmp_path / "log.jsonl"), None)
    assert figures.peak.num_bytes == peak
    for name, totals in memory.phases.items():
        stage = next(stage for stage in figures.stages if stage.name == name)
        assert stage.peak.low == totals.peak_bytes


def test_a_step_inside_of_a_tracker_has_its_own_peak(tmp_path):
    figures = read_figures(manager_log(tmp_path), None)
    first, *others = figures.steps.steps
    assert not first.peak.is_known  # it began before the tracker did
    assert all(step.peak.is_known for step in others)


def test_the_peak_of_a_tracked_block_is_not_drawn_as_that_of_a_stage_after_it(tmp_path):
    memory = mk.MemoryManager("cpu", log=tmp_path / "log.jsonl")
    with memory.track():
        with memory.phase("train"):
            torch.ones(2**22)
        memory.step()
        with memory.phase("validation"):
            torch.ones(2**18)
        memory.step()
    memory.close()
    report = make_report(mk.report.read_memory_events(tmp_path / "log.jsonl"))
    lines = [node for section in report.sections for node in section.nodes if isinstance(node, Lines)]
    peaks = [curve for curve in lines[0].lines if curve.name == WORDS("line_peak")]
    assert [list(curve.y) for curve in peaks] == [[16 * MIB, MIB, MIB]]  # train, validation, the last step
