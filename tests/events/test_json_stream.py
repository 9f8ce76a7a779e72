"""JSON in pieces: the same values and the same refusals as in one piece, whatever the pieces are."""

import json
import random

import pytest

from memkit._events import json_stream
from memkit._events.json_stream import JsonStream, NotWholeError


def pieces(data, chance):
    while data:
        size = chance.choice((1, 1, 2, 3, 7, 50))
        yield data[:size]
        data = data[size:]


def stream(data, chance=None):
    return JsonStream([data] if chance is None else pieces(data, chance), json.JSONDecoder())


def read_array(source):
    found = list(source.elements())
    source.expect_end()
    return found


def read_object(source):
    found = {name: source.value() for name in source.names()}
    source.expect_end()
    return found


def values(chance, depth=0):
    kinds = [
        lambda: chance.choice((None, True, False, 0, -17, 10**20, 1.5, -2e-7, "", "é€😀", 'a"\\\n', "[{}]", "\ud800")),
        lambda: [values(chance, depth + 1) for _ in range(chance.randrange(4))],
        lambda: {chance.choice("abc€"): values(chance, depth + 1) for _ in range(chance.randrange(4))},
    ]
    return chance.choice(kinds if depth < 3 else kinds[:1])()


def test_values_are_those_of_json():
    chance = random.Random(0)
    for _ in range(300):
        value = chance.choice(([values(chance) for _ in range(5)], {str(at): values(chance) for at in range(5)}))
        text = json.dumps(value, indent=chance.choice((None, 1)), ensure_ascii=chance.random() < 0.5)
        if "\ud800" in text:
            text = json.dumps(value)
        source = stream(f" {text}\n".encode(), chance)
        assert (read_array if isinstance(value, list) else read_object)(source) == value


def test_rejects_invalid_json():
    """Cut, changed and lengthened at each place."""
    text = json.dumps([{"a": [1, 2.5, "x\\u00e9", None]}, True, "😀", []], ensure_ascii=False).encode()
    chance, num_refused = random.Random(1), 0
    for place in range(len(text)):
        for changed in (text[:place], text[:place] + b"]" + text[place:], text[:place] + b"\xff" + text[place + 1 :]):
            try:
                expected = json.loads(changed)
            except ValueError:
                num_refused += 1
                with pytest.raises(NotWholeError):
                    read_array(stream(changed, chance))
            else:
                assert read_array(stream(changed, chance)) == expected
    assert num_refused > len(text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[1,", "character 3 (Expecting value)"),
        ("[1", "character 2 (Expecting ',' or ']')"),
        ("[1] 2", "character 4 (Extra data)"),
        ('{"a" 1}', "character 5 (Expecting ':')"),
        ("{a:1}", "character 1 (Expecting '\"')"),
        ("{1:1}", "character 1 (Expecting '\"')"),
        ("", "character 0 (Expecting '[')"),
        ('[5, "a', "character 4 (Unterminated string starting at)"),
    ],
)
def test_places_of_errors(text, problem):
    read = read_object if text.startswith("{") else read_array
    for chance in (None, random.Random(2)):
        with pytest.raises(NotWholeError) as raised:
            read(stream(text.encode(), chance))
        assert problem in str(raised.value)


def test_a_value_is_not_held_without_end(monkeypatch):
    monkeypatch.setattr(json_stream, "_LARGEST_CHARS", 1000)
    monkeypatch.setattr(json_stream, "_SMALL_CHARS", 100)
    num_read = 0

    def endless(piece):
        nonlocal num_read
        yield b'[["'
        while True:
            num_read += 1
            yield piece

    with pytest.raises(ValueError, match="a value of over 1000 characters at character 1"):
        read_array(JsonStream(endless(b"x" * 50), json.JSONDecoder()))
    assert num_read < 80
    with pytest.raises(ValueError, match="containers in"):
        read_array(JsonStream(endless(b'",[],"'), json.JSONDecoder()))
    text = b"[" + b" " * 5000 + b'"%s"' % (b"x" * 900) + b" " * 5000 + b"]"
    assert len(read_array(stream(text, random.Random(3)))) == 1  # spaces are no values


def test_a_large_value_is_not_parsed_again_with_each_piece():
    class Counting(json.JSONDecoder):
        num_calls = 0

        def raw_decode(self, text, at=0):
            self.num_calls += 1
            return super().raw_decode(text, at)

    decoder, text = Counting(), json.dumps(["x" * 100_000]).encode()
    source = JsonStream((text[at : at + 10] for at in range(0, len(text), 10)), decoder)
    assert read_array(source) == ["x" * 100_000]
    assert decoder.num_calls < 20


def test_detects_lone_surrogates():
    source = stream(b'["a", "\\ud83d\\ude00"]')
    assert (read_array(source), source.may_have_halves) == (["a", "😀"], True)
    source = stream(b'["a", "\\u00e9"]')
    assert (read_array(source), source.may_have_halves) == (["a", "é"], False)
