"""Journal of measured points, so that an interrupted sweep can be resumed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from memkit.predict.scaling.points import ScalingPoint


class SweepJournal:
    """A file with one line that describes the sweep, and one line for each point.

    Args:
        path: The file; its directory must exist. It is overwritten if it belongs to another sweep.
        sweep: Everything that the points depend on, as plain types.

    Raises:
        OSError: The file cannot be read or written.
    """

    def __init__(self, path: str | os.PathLike[str], sweep: Mapping[str, Any]) -> None:
        self._path = Path(path)
        self.known: dict[str, list[ScalingPoint]] = {}
        """Existing points, by the name of their curve."""
        head = json.dumps(sweep)
        lines = self._path.read_text("utf-8").splitlines(keepends=True) if self._path.exists() else []
        whole = [line for line in lines if line.endswith("\n")]  # the last one may have been cut off
        is_ours = whole[:1] == [head + "\n"]
        for line in whole[1:] if is_ours else ():
            record = json.loads(line)
            self.known.setdefault(record["curve"], []).append(ScalingPoint(**record["point"]))
        self._path.write_text("".join(whole) if is_ours else head + "\n", "utf-8")

    def add(self, curve: str, point: ScalingPoint) -> None:
        """Append a point."""
        if point not in self.known.get(curve, ()):
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"curve": curve, "point": asdict(point)}) + "\n")

    def remove(self) -> None:
        """Remove the file once the sweep is done and its result is saved."""
        self._path.unlink()
