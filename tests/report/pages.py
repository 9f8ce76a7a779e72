"""What the report tests share: the first program's log, and ways to read a page back."""

import html
import re
from html.parser import HTMLParser
from pathlib import Path

from memkit._events.log import LoggedDevice, LogHeader, Origin
from memkit._events.reader import EventLog, read_memory_events

S1 = Path(__file__).parents[1] / "data" / "report_s1.json"
T5, ALL, STEP, END = 11_362_869_248, 24_824_987_648, 35_122_176, 24_860_109_824


def first_log():
    return read_memory_events(S1)


def log_of(*events, device="cuda", total_bytes=25_393_692_672, kind="measured", **header):
    """A log as `read_memory_events` gives it."""
    made = LogHeader.new(
        device=LoggedDevice("RTX 4090", total_bytes, device),
        fields={"peak_bytes": Origin("cuda_allocator", kind), "allocated_bytes": Origin("cuda_allocator", kind)},
        **header,
    )
    for event in events:
        object.__setattr__(event, "run", 0)
    return EventLog((made,), tuple(events))


def markdown_rows(text):
    """Each table row of a Markdown text, by its first cell."""
    rows = {}
    for line in text.splitlines():
        if line.startswith("|"):
            first, *cells = (cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|")))
            rows.setdefault(html.unescape(re.sub(r"\\(.)", r"\1", first)), cells)
    return rows


class Page(HTMLParser):
    """An HTML page: its tags, its text, and its table rows by their first cell."""

    VOID = frozenset({"meta", "link", "line", "polyline"})

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts, self.rows, self.open = [], [], {}, []
        self._row = None
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "tr":
            self._row = []
        if tag in ("td", "th") and self._row is not None:
            self._row.append([])

    def handle_endtag(self, tag):
        if tag in self.VOID:
            return
        assert self.open.pop() == tag
        if tag == "tr":
            first, *cells = ("".join(cell) for cell in self._row)
            self.rows.setdefault(first, cells)
            self._row = None

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.texts.append(data)
        if self._row:
            self._row[-1].append(data)
