"""One thing that a log shows to be wrong, or right."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Severity = Literal["fault", "warning", "note", "good"]
"""A run that will end, or has; memory that is spent for nothing; worth knowing; nothing wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFinding:
    """One finding. Its texts are ``find_KIND`` and ``next_KIND``, with the values filled in.

    Attributes:
        kind: Such as ``"leak"``.
        severity: How bad it is.
        at_stake: Bytes that it costs; what grows counts for 1,000 steps.
        values: What the texts say: bytes are ints, all else is text.
        suspect: The line of code, variable, module or phase that it comes from; None if the log does not tell.
    """

    kind: str
    severity: Severity
    at_stake: int = 0
    values: Mapping[str, object] = field(default_factory=dict)
    suspect: str | None = None
