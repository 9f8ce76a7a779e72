"""The committed counters are those of today's code, every case is declared, and a wrong counter is found."""

import json
import re

import pytest

from benchmarks.__main__ import (
    ROOT,
    compare,
    main,
    num_counters,
    peers,
    run_into,
    source_of,
)
from benchmarks.catalog import CASES
from benchmarks.counters import counters_of, differences, named_figures
from benchmarks.result import RESULTS, read_result, version_of

FAST = "recorded_intervals"  # half a second; the default run has it in two tests below
QUICK = [name for name, case in CASES.items() if case.is_quick and case.counters and name != FAST]


@pytest.fixture(scope="module")
def today(tmp_path_factory):
    """A folder with the result file of a run of today."""
    folder = tmp_path_factory.mktemp("results")
    assert run_into(folder, FAST) is None
    return folder


def test_counters_are_the_committed_ones(today):
    assert num_counters(FAST) > 50
    assert compare(FAST, today, RESULTS) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_counters_of_every_quick_case_are_the_committed_ones(name, tmp_path):
    if absent := [peer for peer in peers(name) if not version_of(peer)]:
        pytest.skip(f"needs {', '.join(absent)}")
    assert run_into(tmp_path, name) is None
    assert compare(name, tmp_path, RESULTS) == []


def test_differing_counter_is_shown_with_both_values(today, tmp_path):
    result = read_result(FAST)
    figures = result["figures"]["chosen"]["by_gpu"]
    right = figures["held"]
    figures["held"] += 1
    (tmp_path / f"{FAST}.json").write_text(json.dumps(result))
    assert compare(FAST, today, tmp_path) == [f"chosen/by_gpu/held: committed {right + 1}, now {right}"]


def test_names_removed_and_added_counters():
    assert differences({"a": 1, "b": 2}, {"b": 2, "c": True}) == [
        "a: committed 1, now absent",
        "c: committed absent, now True",
    ]


def test_only_fractions_may_differ_in_their_last_digits():
    assert differences({"a": 0.1 + 0.2}, {"a": 0.3}) == []
    assert len(differences({"a": 10**12}, {"a": 10**12 + 1})) == 1


def test_figures_are_selected_by_path_patterns():
    figures = {"rows": [{"peak_bytes": 3, "seconds": 0.1}, {"peak_bytes": 4}], "name": "a.b, c"}
    assert dict(named_figures(figures)) == {
        "rows/0/peak_bytes": 3,
        "rows/0/seconds": 0.1,
        "rows/1/peak_bytes": 4,
        "name": "a.b, c",
    }
    assert counters_of(figures, ("*_bytes",)) == {"rows/0/peak_bytes": 3, "rows/1/peak_bytes": 4}


def test_every_case_is_declared_and_every_declaration_has_a_case():
    cases = {path for path in (ROOT / "benchmarks" / "cases").glob("*.py") if path.stem != "__init__"}
    assert cases | {ROOT / "benchmarks" / "acceptance" / "__main__.py"} == {source_of(name) for name in CASES}
    assert {path.stem for path in RESULTS.glob("*.json")} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_patterns_match_only_stable_figures(name):
    figures = read_result(name)["figures"]
    for pattern in CASES[name].counters:
        found = counters_of(figures, (pattern,))
        assert found, pattern
        changing = re.compile(r"seconds|(^|/|_)(ms|us|milliseconds)(/|$)|_us_|time|resident")
        assert not [place for place in found if changing.search(place)]


def test_check_exits_with_1_if_a_case_cannot_run(capsys):
    assert main(["check", "check_scripts"]) == 1
    assert "--sources FOLDER" in capsys.readouterr().out


def test_list_names_every_case(capsys):
    assert main(["list"]) == 0
    lines = capsys.readouterr().out
    assert all(f"\n{name} " in f"\n{lines}" for name in CASES)
