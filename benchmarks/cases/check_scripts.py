"""`memkit check` on public training scripts: every finding with the verdict of a person who read the code around it.

The scripts are not part of memkit. The folder given holds them as OWNER+NAME/PATH; those missing are skipped. Which
ones, at which commit, and the verdicts are in the result file, by hand: a finding is true if the habit is there and
what the rule says of it holds for this code. A finding without a verdict, or a verdict without its finding, ends the
case.

Set "tuned": read while the rules were written. Set "held out": fetched afterwards. `held_out_at_first` counts what was
false there before the rules were changed for it, in all files of those repositories, not only the training scripts.

Run: python -m benchmarks.cases.check_scripts FOLDER   (20 seconds)
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.result import RESULTS, read_result, write_result
from memkit.check.check import RULES, check_paths


def review(scripts: list[dict[str, Any]], folder: Path) -> int:
    """Compare the findings of today with the verdicts, and return how many scripts were there."""
    num_read = 0
    for script in scripts:
        path = folder / script["repo"].replace("/", "+") / script["path"]
        if not path.exists():
            continue
        num_read += 1
        found = {(finding.line, finding.rule) for finding in check_paths([path]).findings}
        judged = {(finding["line"], finding["rule"]) for finding in script["findings"]}
        assert found == judged, f"{path}: without a verdict {found - judged}, not found any more {judged - found}"
    return num_read


def counts(scripts: list[dict[str, Any]]) -> dict[str, Any]:
    findings = [finding for script in scripts for finding in script["findings"]]
    num_true = sum(finding["verdict"] for finding in findings)
    return {
        "num_scripts": len(scripts),
        "num_repositories": len({script["repo"] for script in scripts}),
        "num_findings": len(findings),
        "num_true": num_true,
        "precision": round(num_true / len(findings), 3),
    }


def by_rule(scripts: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    findings = [finding for script in scripts for finding in script["findings"]]
    all_of, true_of = Counter(f["rule"] for f in findings), Counter(f["rule"] for f in findings if f["verdict"])
    return {rule.id: {"num_findings": all_of[rule.id], "num_true": true_of[rule.id]} for rule in RULES}


def figures(scripts: list[dict[str, Any]], first_look: dict[str, Any], speed: dict[str, Any]) -> dict[str, Any]:
    frequent = {"sync-in-step", "load-without-map-location", "eval-with-graph"}
    rare = [script | {"findings": [f for f in script["findings"] if f["rule"] not in frequent]} for script in scripts]
    return {
        "all": counts(scripts),
        "tuned": counts([script for script in scripts if script["set"] == "tuned"]),
        "held_out": counts([script for script in scripts if script["set"] == "held out"]),
        "without_the_three_most_frequent_rules": counts(rare),
        "held_out_at_first": first_look,
        "rules": by_rule(scripts),
        "speed": speed,
        "scripts": scripts,
    }


def time_of(folder: Path) -> dict[str, Any]:
    start = time.process_time()
    result = check_paths([folder])
    return {"num_files": result.num_files, "cpu_seconds": round(time.process_time() - start, 1)}


def main() -> None:
    (given,) = sys.argv[1:]
    before = read_result("check_scripts", RESULTS)["figures"]
    num_read = review(before["scripts"], Path(given))
    print(f"{num_read} of {len(before['scripts'])} scripts are here, and their findings are those of the result file")
    assert num_read, "no script found"
    print(write_result("check_scripts", figures(before["scripts"], before["held_out_at_first"], time_of(Path(given)))))


if __name__ == "__main__":
    main()
