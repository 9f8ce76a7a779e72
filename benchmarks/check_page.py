"""Writes the rules' part of docs/check.md from the rules themselves and from the reviewed public scripts.

The part stands between ``<!-- rules -->`` and ``<!-- rules end -->``. Run: python -m benchmarks.check_page
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from benchmarks.result import read_result
from memkit.check.check import RULES
from memkit.check.findings import Rule
from memkit.check.launch import RULES as SHELL_RULES

PAGE = Path(__file__).parents[1] / "docs" / "check.md"


def render(text: str) -> str:
    figures = read_result("check_scripts")["figures"]
    rules = "\n".join(section(rule, figures["rules"][rule.id]) for rule in RULES)
    part = f"<!-- rules -->\n{summary(figures)}\n{rules}<!-- rules end -->"
    return re.sub(r"<!-- rules -->.*<!-- rules end -->", lambda _: part, text, flags=re.DOTALL)


def summary(figures: dict[str, Any]) -> str:
    """The review as a table."""
    names = {
        "all": "all scripts",
        "tuned": "read while the rules were written",
        "held_out": "fetched afterwards",
        "without_the_three_most_frequent_rules": "all scripts, without the three most frequent rules",
    }
    lines = ["| public training scripts | repositories | scripts | findings | true |", "|---|---|---|---|---|"]
    for key, name in names.items():
        row = figures[key]
        counts = f"{row['num_repositories']} | {row['num_scripts']} | {row['num_findings']}"
        lines.append(f"| {name} | {counts} | {row['num_true']} ({row['precision']:.1%}) |")
    first, speed = figures["held_out_at_first"], figures["speed"]
    lines += [
        "",
        f"At the first look at all {first['num_files']:,} files of the repositories that were fetched afterwards,",
        f"{first['num_false']} of {first['num_findings']} findings were false; {first['num_put_right']} have been put",
        "right by changes to the rules.",
        f"All {speed['num_files']:,} files of both sets are checked in {speed['cpu_seconds']:.0f} s of one core.",
    ]
    return "\n".join(lines) + "\n"


def section(rule: Rule[Any], found: dict[str, int]) -> str:
    language = "bash" if rule in SHELL_RULES else "py"
    seen = f"{found['num_findings']} found, {found['num_true']} true" if found["num_findings"] else "none found"
    lines = [
        f"### {rule.id}",
        "",
        f"{rule.level.capitalize()}: {rule.what}. {rule.why[0].upper()}{rule.why[1:]}",
        "",
        *([f"- Figure: {rule.figure}."] if rule.figure else []),
        f"- Fix: {rule.fix}",
        f"- In the public scripts: {seen}.",
        "",
        f"```{language}",
        f"{rule.example.strip()}",
        "```",
        "",
        "Not found in:",
        "",
        f"```{language}",
        f"{rule.near_miss.strip()}",
        "```",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text()))
