"""A misspelt name is an error for type checkers: an ignore that nobody needs would be one as well."""

import memkit as mk

mk.MemoryEfficentTrainingWrapper  # type: ignore[attr-defined]  # noqa: B018
mk.chamfer_distance  # type: ignore[attr-defined]  # noqa: B018
mk.voxel.chamfer_distanse  # type: ignore[attr-defined]  # noqa: B018
mk.errors.ConfigErorr  # type: ignore[attr-defined]  # noqa: B018
