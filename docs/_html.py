"""Finishes the HTML of each page: the language of the Chinese ones, and the tables that a phone shows as cards.

A hook of mkdocs, named in mkdocs.yml. `site.css` has the style of the cards.
"""

from __future__ import annotations

import html
import re
from itertools import zip_longest
from typing import Any

from mkdocs.structure.pages import Page

# Of a screen 500 px wide, in px: room for a table, a character, and the padding of a column.
_ROOM, _CHARACTER, _PADDING = 455, 7, 15


def on_page_content(content: str, **_: Any) -> str:
    """Turn tables that are too wide for a phone into cards there: each cell is given the heading of its column."""
    return re.sub(r"<table>.*?</table>", _with_headings, content, flags=re.DOTALL)


def on_post_page(output: str, *, page: Page, **_: Any) -> str:
    """Say that a page under zh/ is Chinese."""
    return output.replace('<html lang="en"', '<html lang="zh"', 1) if page.file.src_uri.startswith("zh/") else output


def _with_headings(table: re.Match[str]) -> str:
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL) for row in table[0].split("<tr>")[1:]]
    texts = [[html.unescape(re.sub(r"<[^>]+>", "", cell)) for cell in row] for row in rows]
    columns = zip_longest(*texts, fillvalue="")
    longest = [max((len(word) for cell in column for word in cell.split()), default=0) for column in columns]
    if not any(texts[0]) or sum(longest) * _CHARACTER + len(longest) * _PADDING <= _ROOM:
        return table[0]

    def with_headings(row: re.Match[str]) -> str:
        headings = iter(texts[0])
        return re.sub(r"<td", lambda _: f'<td data-heading="{html.escape(next(headings))}"', row[0])

    return re.sub(r"<tr>.*?</tr>", with_headings, table[0], flags=re.DOTALL).replace("<table>", "<table data-cards>", 1)
