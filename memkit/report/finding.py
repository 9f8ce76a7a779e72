"""One thing that a log shows to be wrong, or right."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Severity = Literal["fault", "warning", "note", "good"]
"""The run will fail, or has failed; memory is wasted; worth knowing; nothing is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFinding:
    """One finding. Its texts are ``find_KIND`` and ``next_KIND``, with the values filled in.

    Attributes:
        kind: Such as ``"leak"``.
        severity: How bad it is.
        at_stake: Bytes that it costs; growth counts over 1,000 steps.
        values: Values for the placeholders of the texts: bytes are ints, all others are text.
        suspect: The line of code, variable, module or phase that it comes from; None if the log does not show it.
        rank: The process that it is about, of several; None for all of them, or the only one.
    """

    kind: str
    severity: Severity
    at_stake: int = 0
    values: Mapping[str, object] = field(default_factory=dict)
    suspect: str | None = None
    rank: int | None = None
