"""Logs and reports called as people guess them: the way out is the right call."""

import pytest

import memkit as mk

LEGACY = '[{"event": "init", "peak_memory": 0}, {"event": "t5_loaded", "peak_memory": 11362869248}]'


@pytest.fixture
def log(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "e.json").write_text(LEGACY)
    return mk.report.read_memory_events("e.json")


TABLE = [
    (lambda log: log["init"], "InputTypeError", "write [event for event in log.events if event.event == name]"),
    (lambda log: log.peak, "AbsentError", "write max(event.peak_bytes or 0 for event in log.events)"),
    (lambda log: log.save("a.json"), "AbsentError", "write mk.write_report(log, 'report.html')"),
    (lambda log: log.plot(), "AbsentError", "write mk.write_report(log, 'report.html')"),
    (
        mk.report.read_memory_events,
        "InputTypeError",
        "write mk.write_report(log, 'report.html'): the log has already been read.",
    ),
    (
        lambda _: mk.report.read_memory_events([{"event": "init", "peak_memory": 0}]),
        "InputTypeError",
        "json.dump(events, open('memory_events.json', 'w'))",
    ),
    (lambda _: mk.report.read_memory_events([1]), "InputTypeError", "pass the log's path, or a list of paths."),
    (lambda log: mk.write_report("a.html", log), "InputTypeError", "write write_report(log, 'a.html')."),
    (
        lambda _: mk.write_report("e.json", "a.html"),
        "InputTypeError",
        "write write_report(mk.report.read_memory_events('e.json'), 'a.html').",
    ),
    (
        lambda log: mk.write_report(log, "a.pdf"),
        "InputError",
        "write 'a.html', and print it to PDF in a browser: the page has a style for paper.",
    ),
    (lambda log: mk.write_report(log, ""), "InputError", "write 'report.html'."),
    (lambda log: mk.write_report(log, "a.html", sections=len), "ConfigError", "pass sections=[...]."),
    (lambda log: mk.write_report(log, "a.html", sections=["a"]), "InputTypeError", "not its result sections()."),
    (lambda log: mk.write_report(log, "no/a.html"), "InputError", "create it first: os.makedirs('no', exist_ok=True)."),
    (lambda log: mk.write_report(log, "a.html", before=log), "InputTypeError", "'a.html', baseline=baseline)"),
    (lambda log: mk.write_report(log, "a.html", "e.json"), "InputTypeError", "'a.html', baseline='e.json')"),
    (lambda log: mk.write_report(log, "a.html", format="html"), "InputTypeError", "write write_report(log, 'a.html')"),
    (lambda log: mk.write_report(log, "a.html", language="fr"), "ConfigError", "or 'zh' for Chinese."),
]


@pytest.mark.parametrize(("call", "kind", "end"), TABLE, ids=range(len(TABLE)))
def test_the_way_out_is_the_right_call(log, call, kind, end):
    with pytest.raises(mk.MemkitError) as caught:
        call(log)
    assert type(caught.value).__name__ == kind
    assert not caught.value.call.startswith("Words(")
    assert str(caught.value).endswith(end), str(caught.value)
