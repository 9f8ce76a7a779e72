"""Tables in the docs are made from committed result files."""

from benchmarks.tables import DOCS, RESULTS, render


def test_tables_are_what_the_result_files_say():
    assert {path.name for path in DOCS} >= {"README.md", "gradient-accumulation.md"}
    for path in DOCS:
        assert render(path.read_text()) == path.read_text(), f"run python -m benchmarks.tables to renew {path.name}"


def test_every_result_has_environment_and_commit():
    for path in RESULTS.glob("*.json"):
        import json

        environment = json.loads(path.read_text())["environment"]
        assert environment["commit"], path.name
        assert environment["versions"]["torch"], path.name
