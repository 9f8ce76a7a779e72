"""Tables in the docs are made from committed result files."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.markdown import Across, Table
from benchmarks.result import RESULTS
from benchmarks.tables import DOCS, TABLES, render, render_tables

RESULT = {"figures": {"cases": [{"rows": 1024, "ways": {"plain": {"bytes": 3 * 2**20}, "memkit": {"bytes": 0}}}]}}


def test_tables_match_result_files():
    assert {path.name for path in DOCS} >= {"README.md", "gradient-accumulation.md"}
    for path in DOCS:
        assert render(path.read_text()) == path.read_text(), f"run python -m benchmarks.tables to renew {path.name}"


@pytest.mark.parametrize("name", TABLES)
def test_no_column_is_empty(name):
    for text in render_tables(name).split("\n\n"):
        _, _, *rows = [line.split(" | ") for line in text.strip().removeprefix("| ").splitlines()]
        assert all(any(cell.strip(" |") for cell in column) for column in zip(*rows, strict=True))


def test_every_table_is_in_a_page():
    pages = "".join(path.read_text() for path in DOCS)
    assert [name for name in TABLES if f"<!-- result: {name} -->" not in pages] == []


def test_a_table_is_filled_from_a_result_file():
    table = Table(
        "cases/{case}/ways/{way}",
        "rows | way of {cases/0/rows:,}",
        "{case/rows} | {name}",
        {"name": lambda row: row["way"].title()},
        Across("cases/{other}", "peak in {other}", "{other/ways/@way/bytes:.1f MiB}, {bytes:some|none}"),
        is_grouped=True,
        last="all | {cases/0/seconds?unknown:.2f} | {cases/0/seconds?:.2f} s",
    )
    assert table.render(RESULT).splitlines() == [
        "| rows | way of 1,024 | peak in 0 |",
        "| --- | --- | --- |",
        "| 1024 | Plain | 3.0 MiB, some |",
        "|  | Memkit | 0.0 MiB, none |",
        "| all | unknown |  |",
    ]


@pytest.mark.parametrize(("cells", "problem"), [("{way} | {byte}", KeyError), ("{way}", ValueError)])
def test_rejects_mismatched_template(cells, problem):
    with pytest.raises(problem):
        Table("cases/{case}/ways/{way}", "way | peak", cells).render(RESULT)


def test_every_result_has_environment_and_commit():
    for path in RESULTS.glob("*.json"):
        environment = json.loads(path.read_text())["environment"]
        assert environment["commit"], path.name
        assert environment["versions"]["torch"], path.name


def test_pages_skip_blocks_of_missing_libraries():
    """Its blocks run where the library is installed, and are skipped elsewhere."""
    asked = {}
    for path in (Path(__file__).parents[1] / "docs").rglob("*.md"):
        text = path.read_text("utf-8")
        if used := set(re.findall(r"^(?:from|import) (monai|torchio)\b", text, re.MULTILINE)):
            asked[path.stem] = used
            assert used == set(re.findall(r'^<!-- skip: start if\(is_missing\("(\w+)"\)', text, re.MULTILINE)), (
                path.name
            )
    assert asked == {"monai": {"monai"}, "torchio": {"torchio"}}
