"""A state's manifest: the files that belong to it, with a checksum of each and one of its own."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

MANIFEST = "manifest.json"
LARGEST_STEP = 10**18 - 1
OWN_FILE = re.compile(
    r"rank-\d+\.pt|manifest\.json|__\d+_\d+\.distcp|\.metadata(\.tmp)?|\.[0-9a-f]{8}\..*\.memkit-tmp", re.ASCII
)
"""Names of files that a writer creates in a state's folder: its own, and temporary ones that are renamed when whole."""

ManifestEntry = dict[str, Any]  # one file: its size in bytes, and its SHA-256
_VERSION = 2


def write_manifest(content: Mapping[str, Any]) -> str:
    """Return the text of a manifest."""
    versioned = {"version": _VERSION, **content}
    return json.dumps({"sha256": _digest(versioned), "content": versioned}, indent=1) + "\n"


def parse_manifest(text: str) -> dict[str, Any]:
    """Parse a manifest.

    Raises:
        ValueError: It was not written by `write_manifest`.
    """
    try:
        record = json.loads(text, object_pairs_hook=_unique)
        if not isinstance(record, dict) or record.get("sha256") != _digest(record.get("content")):
            raise ValueError(f"{MANIFEST} does not match its own checksum")
    except RecursionError:
        raise ValueError(f"{MANIFEST} is nested too deeply") from None
    content = record["content"]
    if not isinstance(content, dict) or type(content.get("version")) is not int:
        raise ValueError(f"{MANIFEST} has no version")
    if content["version"] != _VERSION:
        raise ValueError(f"{MANIFEST} has version {content['version']}, this memkit reads {_VERSION}")
    if not _is_manifest(content):
        raise ValueError(f"{MANIFEST} has other entries than those of a state")
    return content


def file_of_rank(rank: int) -> str:
    """Return the name of a rank's own file."""
    return f"rank-{rank}.pt"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError(f"{MANIFEST} has {Counter(name for name, _ in pairs).most_common(1)[0][0]!r} twice")
    return values


def _is_manifest(content: Mapping[str, Any]) -> bool:
    """Whether a manifest has the entries of a state, each of the right type."""
    files, num_ranks = content.get("files"), content.get("num_ranks")
    if type(content.get("step")) is not int or type(num_ranks) is not int or num_ranks < 1:
        return False
    if type(content.get("metric", "")) not in {float, type(None)} or type(content.get("is_sharded")) is not bool:
        return False
    if content.get("mode", "") not in (None, "min", "max") or not isinstance(files, dict):
        return False
    is_whole = all(file_of_rank(rank) in files for rank in range(min(num_ranks, len(files) + 1)))
    return is_whole and all(
        OWN_FILE.fullmatch(name) and isinstance(entry, dict) and type(entry.get("bytes")) is int
        for name, entry in files.items()
    )


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
