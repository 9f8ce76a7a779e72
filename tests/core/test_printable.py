"""JSON that may be shown on a terminal."""

import json
import sys

from memkit._core.printable import printable_json


def test_escaping_round_trips_every_character():
    text = "".join(chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000)
    shown = printable_json(json.dumps(text, ensure_ascii=False))
    assert shown.isprintable()
    assert json.loads(shown) == text
    assert "é€汉😀" in printable_json('"é€汉😀"')
