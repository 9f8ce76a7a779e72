"""Objects as text and in a notebook: the verdict first, all text escaped, and no object changed by printing it."""

import html
import re

import pytest
import torch
from torch import nn

import memkit as mk
from memkit._charts.overview import Overview, Overviewed
from memkit._charts.pictures import Picture

EVIL = "<script>alert('x')</script>\x1b[31m\u202e&"


def loss_fn(model, x):
    return model(x).square().mean()


def objects():
    model, batch = nn.Sequential(nn.Linear(64, 64), nn.GELU()), torch.ones(8, 64)
    memory = mk.MemoryManager("cpu", budget="1GiB")
    with memory.phase("step"), memory.track() as tracker:
        loss_fn(model, batch).backward()
    return {
        "estimate": mk.estimate_memory_usage(model, batch, loss_fn, target="RTX 4090"),
        "estimate that does not fit": _too_large(),
        "estimate on the CPU": mk.estimate_memory_usage(model, batch, loss_fn),
        "preset": mk.estimate_memory_usage(mk.get_preset_config("medium", 24)),
        "plan": mk.plan_training(model, batch, loss_fn, budget="RTX 4090"),
        "manager": memory,
        "tracker": tracker,
        "wrapper": mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters(), lr=0.1)),
        "worst batch": mk.predict.find_worst_batch([batch], model, loss_fn, target="T4"),
        "virtual GPU": _virtual(),
    }


def _virtual():
    with mk.VirtualGPU("T4") as gpu:
        torch.ones(2**20, device="cuda")
    return gpu


def _too_large():
    model = nn.Linear(60_000, 60_000, device="meta")
    return mk.estimate_memory_usage(model, torch.empty(8, 60_000, device="meta"), loss_fn, target="T4")


HEADLINES = {
    "estimate": r"fits RTX 4090: it needs at most [\d.]+ MiB and leaves 2[23]\.\d\d GiB free",
    "estimate that does not fit": r"does not fit T4: it needs at least [\d.]+ GiB, [\d.]+ GiB more than there is",
    "estimate on the CPU": r"needs at most [\d.]+ KiB of live tensors on the CPU",
    "preset": r"fits a GPU of 24 GB: it needs at most .*",
    "plan": r"fits into 23\.\d\d GiB: it needs at most [\d.]+ MiB",
    "manager": r"cpu: [\d.]+ (B|[KMG]iB) available within a budget of 1\.00 GiB",
    "tracker": r"peak [\d.]+ KiB of live tensors on cpu",
    "wrapper": r"trains Sequential with SGD on cpu: 0 steps",
    "virtual GPU": r"virtual T4: peak 4\.00 MiB of 14\.56 GiB",
    "worst batch": r"batch 0 of 1 is the largest; fits T4: it needs at most .*",
}


@pytest.fixture(scope="module")
def shown():
    return objects()


@pytest.mark.parametrize("name", HEADLINES)
def test_the_verdict_comes_first_and_the_notebook_shows_the_same(shown, name):
    text, page = str(shown[name]), shown[name]._repr_html_()
    first, *rows = text.splitlines()
    assert re.fullmatch(HEADLINES[name], first)
    assert rows
    assert all(row.startswith("  ") for row in rows)
    assert page.startswith("<table>")
    moving = r"[\d.]+ (B|[KMG]iB)" if name == "manager" else "$^"  # the host's memory, which others use meanwhile
    page = re.sub(moving, "some", page)
    for row in text.splitlines():
        for cell in re.split(r"\s{2,}", row.strip()):
            assert html.escape(re.sub(moving, "some", cell)) in page


def test_the_parts_of_an_estimate_add_up_to_its_peak(shown):
    estimate = shown["estimate"]
    names = [line.split("  ")[1] for line in str(estimate).splitlines()[1:]]
    assert names.index("peak of live tensors") > names.index("parameters")
    assert estimate.target == "RTX 4090"
    assert estimate.target_bytes == mk.find_gpu("RTX 4090").total_bytes
    assert mk.predict.MemoryEstimate.from_dict(estimate.as_dict()) == estimate


def test_a_doubt_is_the_verdict():
    def guesses(model, x):
        return model(x).repeat(int(model(x).max()), 1).sum()

    estimate = mk.estimate_memory_usage(nn.Linear(4, 4), torch.ones(2, 4), guesses, target="T4")
    assert str(estimate).startswith("not known whether it fits T4: ")


def test_looking_at_a_tracker_before_and_in_its_block():
    tracker = mk.memory.Tracker(device="cpu")
    assert str(tracker) == "tracks cpu once its `with` block has begun"
    with tracker:
        kept = torch.ones(256)
        assert "live now       1.00 KiB" in str(tracker)
    assert kept.nbytes == tracker.peak_bytes


def test_every_text_is_escaped():
    class Shown(Overviewed):
        def _overview(self):
            return Overview(EVIL, [(EVIL, EVIL)], [EVIL])

    text, page = str(Shown()), Shown()._repr_html_()
    assert not set(text + page) & {"\x1b", "\u202e"}
    assert "<script>" not in page
    assert page.count("&lt;script&gt;") == 4


def test_a_picture_is_shown_by_a_notebook_and_is_still_text():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in "123"))
    plan = mk.plan_training(model, torch.ones(512, 64), loss_fn, budget="1MiB")
    picture = plan.pareto.plot()
    assert isinstance(picture, Picture)
    assert picture._repr_svg_() == picture
    assert "budget 1.00 MiB" in picture


def test_front_has_no_dominated_candidate():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in "123"))
    plan = mk.plan_training(model, torch.ones(512, 64), loss_fn, budget="1MiB")
    for each in plan.candidates:
        is_beaten = any(
            other.seconds <= each.seconds and other.required_bytes <= each.required_bytes and other is not each
            for other in plan.candidates
        )
        assert (each in plan.pareto.candidates) is not is_beaten
    assert len(plan.pareto) >= 2
