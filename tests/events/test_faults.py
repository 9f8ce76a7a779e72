"""A file that is not a log, or a malformed one, is refused with one typed error that names the place."""

import json
from pathlib import Path

import pytest
from hypothesis import example, given, strategies as st

from benchmarks.cases import log_fuzz
from memkit._core.errors import FileFormatError, InputError, InputTypeError
from memkit._events import file
from memkit._events.log import Event
from memkit._events.reader import EventLog, LogNotFoundError, read_memory_events
from tests.helpers import assert_refused

START = b'{"schema":"memkit.events/1","run_id":"r","wall_s":1.0}\n'


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda folder: folder / "missing.jsonl", LogNotFoundError, "no file at this path, and none of a rank"),
        (lambda folder: folder / "no" / "missing.jsonl", FileNotFoundError, "no file at this path, and none of a rank"),
        (lambda folder: Path("/dev/null"), LogNotFoundError, "something other than a regular file"),
        (lambda folder: folder, InputError, "got a directory with 2 logs: a.jsonl, b.jsonl"),
        (lambda folder: folder / "empty", InputError, "got a directory with 0 logs; expected a directory with one log"),
        (lambda folder: [], InputError, "a list in a list, or an empty one"),
        (lambda folder: [[folder / "a.jsonl"]], InputError, "a list in a list, or an empty one"),
        (lambda folder: b"a.jsonl", InputTypeError, "got a bytes; expected a path as text"),
        (lambda folder: None, InputTypeError, "got a NoneType"),
        (
            lambda folder: [folder / "a.jsonl", folder / "old.json"],
            InputError,
            "format together with other files",
        ),
        (lambda folder: "a\0b", LogNotFoundError, "no file at this path"),
    ],
)
def test_rejects_path_without_log(tmp_path, make, error, text):
    (tmp_path / "empty").mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_bytes(START)
    (tmp_path / "old.json").write_text("[]")
    assert_refused(lambda: read_memory_events(make(tmp_path)), error, text)


# ---- the older form


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ('[{"event":"a","peak_memory":1,"incremental_memory":1}]', "index 0, event 'a': both numbers"),
        ('[{"event":"a","peak_memory":1},{"event":"b"}]', "index 1, event 'b': no number; expected"),
        ('[{"event":"a","peak_memory":null}]', "index 0, event 'a': peak_memory=None"),
        ('[{"event":"a","peak_memory":"1GB"}]', "index 0, event 'a': peak_memory='1GB'"),
        ('[{"event":"a","peak_memory":true}]', "index 0, event 'a': peak_memory=True"),
        ('[{"event":"a","peak_memory":1.5}]', "index 0, event 'a': peak_memory=1.5"),
        ('[{"event":"a","incremental_memory":-1}]', "index 0, event 'a': incremental_memory=-1"),
        ('[{"event":"a","peak_memory":9223372036854775808}]', "peak_memory=an integer of 64 bits"),
        ('[{"event":"a","peak_memory":1e400}]', "peak_memory=inf"),
        ('[{"event":"a","peak_memory":NaN}]', "got NaN, which is not a JSON number"),
        ('[{"event":"a","peak_memory":' + "1" * 5000 + "}]", "Exceeds the limit (4300 digits)"),
        ('[{"event":"a","peak_memory":1,"peak_memory":2}]', "got the key 'peak_memory' twice in one object"),
        ('[{"peak_memory":1}]', "index 0, event None: event=None; expected text that is not empty"),
        ('[{"event":5,"peak_memory":1}]', "index 0, event 5: event=5"),
        ('[["a",1]]', "index 0: ['a', 1]; expected {\"event\": NAME} with either"),
        ('[{"event":"a","peak_memory":1}', "invalid JSON at character 30"),
        ('[{"event":"a","peak_memory":1}]]', "invalid JSON at character 31 (Extra data)"),
        ('[{"event":"\\ud800","peak_memory":1}]', "got text that is not valid Unicode"),
        ("[" * 100_000, "got JSON that is nested too deeply"),
        ("[1," * 300, "invalid JSON at character"),
    ],
)
def test_invalid_array_error_names_the_place(tmp_path, content, text):
    path = tmp_path / "memory_events.json"
    path.write_text(content)
    assert_refused_briefly(path, text)


# ---- wrong lines

AFTER = b'{"event":"z"}\n'


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b'{"event":"a","step":', "line 2: invalid JSON at character 2"),
        (b"\x00\x00\x00", "line 2: invalid JSON at character 0"),
        (b'{"event":"\xff"}', "line 2: text that is not UTF-8"),
        (b'{"event":"\xed\xa0\x80"}', "line 2: text that is not UTF-8"),
        (b'{"event":"\\udc00"}', "line 2: text that is not valid Unicode: half of a surrogate pair"),
        (b'{"event":"a","wall_s":Infinity}', "line 2: Infinity, which is not a JSON number"),
        (b'{"event":"a","event":"b"}', "line 2: the key 'event' twice in one object"),
        (b'{"event":"a","x":' + b"[" * 100_000, "line 2: JSON that is nested too deeply"),
        (b'{"event":"a","step":' + b"1" * 5000 + b"}", "line 2: Exceeds the limit (4300 digits)"),
        (b'{"event":"a","peak_bytes":-1}', "line 2, event 'a': peak_bytes=-1; expected an integer from 0 to"),
        (b'{"event":"a","peak_bytes":true}', "line 2, event 'a': peak_bytes=True"),
        (b'{"event":"a","peak_bytes":1.0}', "line 2, event 'a': peak_bytes=1.0"),
        (b'{"event":"a","wall_s":1e400}', "line 2, event 'a': wall_s=inf"),
        (b'{"event":"a","kind":"guess"}', "line 2, event 'a': kind='guess'"),
        (b'{"event":"a","note":[1]}', "line 2, event 'a': note=[1]"),
        (b'{"event":"a","note":{"x":1e400}}', "line 2, event 'a': note['x']=inf"),
        (b'{"event":["a"]}', "line 2, event ['a']: event=['a']"),
        (b'{"step":1}', "line 2, event None: event=None"),
        (b"[]", "line 2: []; expected a header line first, then one JSON object"),
        (b'{"schema":"memkit.events/2","run_id":"r","wall_s":1}', "line 2: schema='memkit.events/2'"),
        (b'{"schema":"memkit.events/1","wall_s":1}', "line 2, the run's header: run_id=None"),
        (b'{"schema":"memkit.events/1","run_id":"r","wall_s":-1}', "line 2, the run's header: wall_s=-1"),
        (START.strip()[:-1] + b',"units":"GiB"}', "line 2: units other than bytes"),
        (START.strip()[:-1] + b',"rank":4}', "the run's header: rank=4; expected a rank below world_size=1"),
        (START.strip()[:-1] + b',"argv":"ab"}', "the run's header: argv='ab'"),
        (START.strip()[:-1] + b',"versions":[]}', "the run's header: versions=[]"),
        (START.strip()[:-1] + b',"fields":{"peak_bytes":3}}', "the run's header: fields['peak_bytes']=3"),
        (START.strip()[:-1] + b',"device":{"total_bytes":-1}}', "the run's header: total_bytes=-1"),
    ],
)
def test_invalid_line_error_names_the_place(tmp_path, line, text):
    path = tmp_path / "log.jsonl"
    path.write_bytes(START + line)
    if text.startswith(("line 2: invalid JSON", "line 2: text that is not UTF-8")):
        assert text in read_memory_events(path).problems[0]  # as the last line it may have been cut
    else:
        assert_refused(lambda: read_memory_events(path), FileFormatError)
    path.write_bytes(START + line + b"\n" + AFTER)
    assert_refused_briefly(path, text)


def assert_refused_briefly(path, text):
    error = assert_refused(
        lambda: read_memory_events(path), FileFormatError, f"read_memory_events({str(path)!r})", text
    )
    assert len(str(error)) < 1000


@pytest.mark.parametrize(
    "content", [b"GIF89a\x00", b"event,peak\n", b"{}\n", b'"a"\n', AFTER, b"{\n", b"\xff\xfe[\0]\0"]
)
def test_rejects_foreign_file(tmp_path, content):
    path = tmp_path / "log.jsonl"
    path.write_bytes(content)
    assert_refused(lambda: read_memory_events(path), FileFormatError, r"got line 1: .*; expected (the|a) header line")


def test_rejects_endless_line_without_buffering(tmp_path, monkeypatch):
    monkeypatch.setattr(file, "LONGEST_LINE_BYTES", 200)
    path = tmp_path / "log.jsonl"
    path.write_bytes(START + b'{"event":"' + b"x" * 1000 + b'"}\n')
    assert_refused(lambda: read_memory_events(path), FileFormatError, "got line 2, longer than 200 bytes")
    monkeypatch.setattr(file, "_LARGEST_WHOLE_BYTES", 100)
    path.write_bytes(b"[" + b" " * 100 + b"]")
    assert_refused(lambda: read_memory_events(path), FileFormatError, "got more than 100 bytes")


# ---- everything at once


@pytest.mark.slow
def test_damaged_logs_are_read_or_refused_with_one_typed_error():
    figures = log_fuzz.fuzz(3_000, seed=1)
    assert figures["anything else"] == 0
    assert figures["read"] > 500
    assert figures["refused"] > 500
    assert figures["num_distinct_refusals"] > 50
    assert figures["slowest_ms"] < 5_000


def test_negative_control_a_plain_reader_fails_on_them(monkeypatch):
    def plain(path):
        return EventLog((), tuple(Event(**json.loads(line)) for line in path.read_text().splitlines()[1:]))

    monkeypatch.setattr(log_fuzz, "read_memory_events", plain)
    assert log_fuzz.fuzz(200)["anything else"] > 100


_KEYS = st.sampled_from(['"a"', '"b"', '"a":"x"', '"c d"', '"q\\":"'])
_VALUES = st.sampled_from(["1", '"x:y"', '"\\":"', '{"a":1}', '[{"a":1,"a":2}]', "null", '":"'])
_PAIRS = st.tuples(_KEYS, st.sampled_from([":", " :", ": ", "\t:"]), _VALUES).map("".join)
_OBJECTS = st.lists(_PAIRS, max_size=4).map(lambda pairs: f"{{{','.join(pairs)}}}")


@given(st.lists(_OBJECTS, min_size=1, max_size=3))
@example(['{"a":1,"a" :2}'])
@example(['{"a":"x:y","b":1}'])
def test_repeated_keys_are_seen_without_a_call_for_each_object(objects):
    """Colons are counted: however a colon is spelled, and wherever it stands, none hides a repeated key."""

    def outcome(decode):
        try:
            return decode("[[" + "],\n[".join(objects) + "]]")
        except ValueError:
            return "refused"

    assert outcome(file._decode) == outcome(file._decoder.decode)
