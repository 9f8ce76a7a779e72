"""The docs agree with the rules, and with the reviewed verdicts on public scripts."""

from benchmarks.cases.check_scripts import by_rule, counts
from benchmarks.check_page import PAGE, render
from benchmarks.result import read_result
from memkit.check.check import RULES

FIGURES = read_result("check_scripts")["figures"]


def test_page_matches_rules_and_results():
    assert render(PAGE.read_text()) == PAGE.read_text(), "run python -m benchmarks.check_page to renew it"
    assert f"{len(RULES)} habits" in PAGE.read_text()


def test_precision_on_public_scripts():
    scripts = FIGURES["scripts"]
    assert FIGURES["all"] == counts(scripts)
    assert FIGURES["rules"] == by_rule(scripts)
    assert FIGURES["all"]["num_scripts"] >= 20
    for part in ("all", "tuned", "held_out", "without_the_three_most_frequent_rules"):
        assert FIGURES[part]["precision"] >= 0.9
    first = FIGURES["held_out_at_first"]
    assert first["num_false"] / first["num_findings"] <= 0.1


def test_every_finding_has_a_verdict_and_a_reason():
    known = {rule.id for rule in RULES}
    for script in FIGURES["scripts"]:
        assert script["commit"]
        for finding in script["findings"]:
            assert finding["rule"] in known
            assert isinstance(finding["verdict"], bool)
            assert finding["why"]
