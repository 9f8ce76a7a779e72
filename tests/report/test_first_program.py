"""The first program's example is right in every figure, in every format."""

import json

import pytest

from memkit.predict.gpus import find_gpu
from memkit.recipes.report import write_report
from memkit.report.figures import read_figures
from tests.report.pages import ALL, END, STEP, T5, Page, first_log, markdown_rows


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    for suffix in ("md", "html", "txt", "json"):
        write_report(first_log(), folder / f"report.{suffix}")
    return {suffix: (folder / f"report.{suffix}").read_text("utf-8") for suffix in ("md", "html", "txt", "json")}


def test_the_figures():
    figures = read_figures(first_log(), None)
    assert (figures.peak.num_bytes, figures.peak.event, figures.peak.is_exact) == (END, "inference_end", True)
    assert figures.is_cumulative
    found = figures.components
    assert [(load.name, load.num_bytes) for load in found.loads] == [("t5", T5), ("vae", None), ("dit", None)]
    assert (found.whole_bytes, found.unattributed_bytes) == (ALL, ALL - T5)
    assert figures.unattributed.low == END - T5
    steps = figures.steps
    assert [(step.number, step.change_bytes) for step in steps.steps] == [(1, STEP), (2, STEP), (10, STEP)]
    assert (steps.num_missing, steps.measure, steps.spread) == (7, "incremental", None)
    assert steps.rise == (3 * STEP, STEP)
    assert (steps.trend, steps.growth_bytes) == (None, STEP)  # by the record: what was added was given back
    assert figures.seconds is None
    assert figures.layers.reserved_bytes is None


SHOWN = {
    "t5": ["10.58 GiB", "45.8%", "growth since init"],
    "unattributed": ["12.54 GiB", "54.2%", "may include components that are not recorded: vae, dit"],
    "everything loaded": ["23.12 GiB", "100.0%", "model_loaded"],
    "vae": ["not recorded", "not recorded", " "],
    "t5_loaded": ["1", "10.58 GiB", "45.7%", "not recorded"],
    "forward_pass": ["1", "not recorded", "not recorded", "+33.50 MiB"],
    "inference_end": ["1", "23.15 GiB", "100.0%", "not recorded"],
    "1": ["+33.50 MiB"],
    "10": ["+33.50 MiB"],
    "RTX 4090": ["too small", "23.03 GiB", "100.5%", "observed"],
    "RTX 5090": ["fits", "30.37 GiB", "76.2%", "observed"],
}


def test_markdown(written):
    rows = markdown_rows(written["md"])
    assert {name: rows[name] for name in SHOWN} == {name: [cell.strip() for cell in row] for name, row in SHOWN.items()}
    names = list(rows)
    assert names.index("1") < names.index("2") < names.index("10")


def test_html_shows_the_same(written):
    page = Page(written["html"])
    for name, cells in SHOWN.items():
        assert page.rows[name] == [cell.strip() for cell in cells], name
    exact = [attributes["title"] for tag, attributes in page.tags if tag == "data"]
    assert {f"{T5:,} B", f"{END:,} B", f"+{STEP:,} B"} <= set(exact)


def test_json_has_plain_bytes(written):
    figures = json.loads(written["json"])["figures"]
    assert figures["peak"]["num_bytes"] == END
    assert figures["components"]["loads"][0] == {"name": "t5", "num_bytes": T5, "since": "init", "is_record": True}
    assert figures["unattributed_bytes"] == END - T5
    assert figures["rating"]["points"] is None
    assert figures["cards"]["RTX 4090"] == "no"
    assert figures["cards"]["RTX 5090"] == "fits"


def test_missing_figures_are_reported_not_zero(written):
    for page in (written["md"], written["txt"], written["html"]):
        text = " ".join(page.split())
        assert "Nothing wrong found, but the log cannot show whether memory grows; peak 23.15 GiB" in text[:9000]
        assert "The peaks of this log are cumulative" in text
        assert "7 step numbers in between are missing from the log" in text
        assert "Together the steps added 100.49 MiB, but the running peak rose by only 33.50 MiB" in " ".join(
            text.split()
        )
        assert "Not in this log: breakdown of the peak; capacity of the device. To record them:" in " ".join(
            text.split()
        )
        assert "No rating: 3 figures are needed, and only 2 can be derived from this log." in text


def test_the_card_may_be_named(tmp_path):
    write_report(first_log(), tmp_path / "report.json", gpu="RTX 5090")
    rating = json.loads((tmp_path / "report.json").read_text())["figures"]["rating"]
    headroom = rating["marks"]["headroom"]
    assert headroom["value"] == pytest.approx(1 - END / find_gpu("RTX 5090").total_bytes)
    unattributed = (0.6 - (END - T5) / END) / 0.5
    growth = 1 - STEP / END / 0.1
    assert rating["points"] == round(100 * (30 + 20 * growth + 10 * unattributed) / (30 + 20 + 10)) == 85
