"""The docs site: each page has a place, each name a reference, each figure its script, each translation its code."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import memkit as mk
from benchmarks.gpu import evidence
from benchmarks.gpu.page import peaks_of

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
CODE = re.compile(r"^```python\n.*?^```$", re.DOTALL | re.MULTILINE)


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def figures_of(case):
    return json.loads((ROOT / "benchmarks" / "results" / f"{case}.json").read_text())["figures"]


def pages_in_nav():
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    return re.findall(r": (\S+\.md)$", nav, re.MULTILINE)


def test_nav_has_each_page_once():
    written = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    named = [page for page in pages_in_nav() if not page.startswith("reference/")]
    assert sorted(named) == sorted(written - {"architecture.md", "explanation-recorder.md", "releasing.md"})


def test_reference_lists_each_name_once():
    pytest.importorskip("mkdocs", reason="Requires: [docs]")
    pages = load(DOCS / "_reference.py").pages()
    names = re.findall(r"^::: memkit\.(\w+)\.(\w+)$", "\n".join(pages.values()), re.MULTILINE)
    rooms = [(room, name) for room in mk._PACKAGES for name in getattr(mk, room).__all__]
    assert sorted(each for each in names if each[0] != "integrations") == sorted(rooms)
    assert len(re.findall(r"^- \[`mk\.", pages["index"].partition("\n## ")[0], re.MULTILINE)) == 6
    assert all(f"[`mk.{name}`]" in pages["index"] for name in mk.__all__)
    assert {f"reference/{name}.md" for name in pages} == {each for each in pages_in_nav() if each.startswith("ref")}


def test_figures_match_their_script():
    figures = load(DOCS / "figures" / "make.py").FIGURES
    committed = {path.stem: path.read_text("utf-8") for path in (DOCS / "figures").glob("*.svg")}
    assert {figure.__name__: figure() for figure in figures} == committed, "run python docs/figures/make.py"


def test_each_figure_is_shown_and_each_picture_has_a_text():
    pictures = [
        each for path in DOCS.rglob("*.md") for each in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", path.read_text())
    ]
    assert all(len(text) > 40 for text, _ in pictures)
    assert {Path(target).name for _, target in pictures} == {path.name for path in (DOCS / "figures").glob("*.svg")}


def test_figures_in_the_prose_are_those_of_the_result_files():
    edges = next(each["ways"] for each in figures_of("edge_mlp")["cases"] if each["edges"] == 1_000_000)
    plain, pieces = (edges[way] for way in ("plain", "memkit, chunks of 4096"))
    from_to = f"{pieces['peak_bytes'] / 2**20:.0f} MiB {{}}instead of {plain['peak_bytes'] / 2**20:,.0f}"
    tiles = figures_of("tiled")["training"]
    megabytes = {way: f"{row['peak_bytes'] / 1e6:.0f} MB" for way, row in tiles.items()}
    slabs = f"{megabytes['slabs 16']} in place of {megabytes['plain'][:-3]}, in {tiles['slabs 16']['time_ratio']:.2f}"
    cubes = f"{megabytes['cubes 40']} in {tiles['cubes 40']['time_ratio']:.2f} times"
    habits = {name: f"saved {row['saving'] * 100:.0f} %" for name, row in figures_of("hygiene").items()}
    runs = figures_of("public_runs").values()
    errors = [
        max(abs(run[f"{kind}_bytes"] / run[f"gpu_{kind}_bytes"] - 1) for run in runs) for kind in ("peak", "reserved")
    ]
    h200 = evidence.read(evidence.FOLDER / "nvidia-h200-torch-2.11.0-memkit-f08f1a49.json").predictions()
    near = sum(abs(peaks_of(name, each)[1]) <= 0.01 for name, each in h200.items())
    assert len(runs) == 9
    assert errors[0] < 0.0002
    assert errors[1] < 0.02
    for page, words in (
        ("index.md", from_to.format("together ")),
        ("index.md", "the peak is met within 0.02 %, what the allocator reserves within 2 %"),
        ("../README.md", from_to.format("")),
        ("../README.md", "the predicted peak is within 0.02 %"),
        ("../README.md", f"on an H200 within 1 % for {near} small trainings of {len(h200)}"),
        ("howto/one-sample.md", f"{from_to.format('')}, in {pieces['ratio']:.2f} times"),
        ("howto/one-sample.md", slabs),
        ("howto/one-sample.md", cubes),
        ("howto/gan.md", habits["no_grad for the generator in D's step"]),
        ("howto/does-not-fit.md", habits["no_grad in evaluation"]),
    ):
        assert words in " ".join((DOCS / page).read_text().split()), f"{page}: {words}"


def test_files_named_on_pages_exist():
    # The site links pages only; a file of the repository is named by its path.
    named = {
        (path.name, file)
        for path in DOCS.rglob("*.md")
        for file in re.findall(r"`((?:benchmarks|examples|memkit|tests)/[\w./-]+\.\w+)`", path.read_text())
    }
    assert named
    assert not [each for each in named if not (ROOT / each[1]).exists()]


def test_the_chinese_tutorial_has_the_same_code():
    english, chinese = (CODE.findall((DOCS / page).read_text()) for page in ("tutorial.md", "zh/index.md"))
    assert english == chinese


def test_wide_tables_label_cells_for_phones():
    pytest.importorskip("mkdocs", reason="Requires: [docs]")
    row = "<tr><td>{}</td><td><code>b</code></td></tr>"
    table = "<table><tr><th>way</th><th>peak of <em>tensors</em></th></tr>" + row + "</table>"
    shown = load(DOCS / "_html.py").on_page_content(f"{table.format('a')}<p>{table.format('a' * 80)}")
    narrow, _, wide = shown.partition("<p>")
    assert narrow == table.format("a")
    assert re.findall("<td[^>]*>", wide) == ['<td data-heading="way">', '<td data-heading="peak of tensors">']


@pytest.mark.slow
def test_site_builds_without_a_warning_and_fetches_nothing(tmp_path):
    pytest.importorskip("mkdocs", reason="Requires: [docs]")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    built = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)
    assert built.returncode == 0, built.stderr
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(
            r'<(?:script|img|iframe|link(?! rel="canonical"))[^>]*(?:src|href)="(http[^"]*)', page.read_text()
        )
        assert not loaded, page
    assert '<html lang="zh"' in (tmp_path / "zh" / "index.html").read_text("utf-8")
