"""GridAwareSampler: a random fraction of the points of every grid cell; exact, reproducible, new at each call."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, Literal, SupportsIndex, final, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import get_worker_info

from memkit._core.attributes import UserState
from memkit._core.errors import ConfigError, FileFormatError, InputError, InputTypeError
from memkit._core.settings import Checker, nearest_word
from memkit._core.units import MIB, parse_bytes
from memkit._core.words import guided
from memkit._torch.compiler import runs_eagerly
from memkit._torch.dispatch import fake_mode, without_modes
from memkit.points.backends import GridBackend, HostBackend, host_passes, resolved
from memkit.points.bits import Key, draw_key
from memkit.points.cache import IndexCache, ProcessLock, fingerprint, spot_check
from memkit.points.cells import Groups, Lengths, Points, host_array
from memkit.points.device import DeviceDraws, array_to_device
from memkit.points.draw import Workspace, choose, choose_one, pieces_kept
from memkit.points.grid import GridIndex
from memkit.points.passes import Ints, Rounding
from memkit.points.sample import GridSample, Scenario

Ahead = tuple[tuple[int, ...], Future[dict[Scenario, GridSample]]]  # a draw's key and its future

_VERSION = 1
_ALGO_VERSION = 3  # increment it whenever the same key would give a different sample
_CODES: dict[Scenario, int] = {"dense": 0, "half": 1, "single": 2}
_FROM_SEED, _FROM_GENERATOR = 0, 1  # the two kinds of keys never collide
_NUMBER = 2  # position of the call number in a key


_IN_INDEX = "the cells are those of an index: sampler.index(coords, grid_size=0.05)"


@guided(
    words={_IN_INDEX: "grid_size voxel_size"},
    absent={
        "sampler.sample_half_density(index)": "sample sample_half",
        "sampler.sample_scenarios(index, ('dense',))": "sample_dense",
        "sampler.sample_single_per_grid(index)": "sample_single",
        "sampler.index(coords, grid_size=0.05)": "build_index fit",
        "no call at all: each sample is a new draw": "set_epoch",
        "sampler.sample_half_density(sampler.index(coords, grid_size=0.05))": "()",
    },
    methods=("sample_half_density", "sample_single_per_grid", "sample_scenarios", "draw_ahead", "index"),
)
@final
class GridAwareSampler(UserState):
    """Thins out every grid cell without leaving one empty, for training that does not depend on density.

    Each cell draws its own ratio and keeps that fraction of its points, at least one; every subset of that size is
    equally likely. Each call is a new draw: its random numbers depend on the seed, the call number, the scene's
    position in the batch, and the scenario. The same calls after the same seed, or after `load_state_dict`, give the
    same samples bit for bit, with every backend, on every machine. (Cells above 127 points use NumPy's hypergeometric
    draw, which may differ in another version or on another machine.)

    In a DataLoader worker the worker's own seed, which is derived from torch's seed, is mixed in, so that workers and
    epochs draw differently. The call count stays in the worker. To resume in the middle of an epoch, pass your own
    ``generator`` for each item.

    Args:
        ratio: Minimum and maximum fraction that a cell keeps, drawn uniformly for each cell; or one fraction for all.
        seed: In [0, 2^63).
        rounding: ``"nearest"``, or ``"floor"``, which keeps half a point less per cell on average.
        cache_bytes: Total size of the indexes cached by `index`.
        backend: Implementation of the passes over the points; the samples are the same. ``"auto"``: NumPy on the CPU,
            Triton kernels on CUDA if Triton is installed, otherwise torch operators. ``"numba"``, on the CPU, compiles
            for a few seconds on first use; ``"torch"`` and ``"triton"`` can be requested too.
        device: Device on which samples are drawn and their ``indices`` stay. Per-cell values are drawn on the host,
            which therefore knows how many points are kept and never waits for an accelerator. From its first draw on,
            an index holds 5 bytes per point on the device for as long as it lives.

    Memory cost: 2 bytes per point of the largest scene, and 0.4 MB, are kept for the next draw, per thread; a draw's
    own arrays take 8 bytes per kept point and 40 per cell.

    Raises:
        ConfigError: A setting is out of range, or the backend does not run on the device or is not installed.

    Example:
        >>> import torch
        >>> from memkit import GridAwareSampler, GridIndex
        >>> coords = torch.rand(1000, 3, generator=torch.Generator().manual_seed(0))
        >>> index = GridIndex.from_coords(coords, grid_size=0.25)
        >>> sampler = GridAwareSampler(ratio=(0.3, 0.7), seed=0)
        >>> half = sampler.sample_half_density(index)
        >>> coords[half.indices].shape[0] == int(half.counts.sum())
        True
        >>> state = sampler.state_dict()
        >>> after = sampler.sample_single_per_grid(index).indices
        >>> sampler.load_state_dict(state)
        >>> torch.equal(sampler.sample_single_per_grid(index).indices, after)
        True
    """

    def __init__(
        self,
        ratio: float | tuple[float, float] = (0.3, 0.7),
        *,
        seed: int = 0,
        rounding: Rounding = "nearest",
        cache_bytes: SupportsIndex | str = 256 * MIB,
        backend: GridBackend = "auto",
        device: torch.device | str = "cpu",
    ) -> None:
        check = Checker("GridAwareSampler(...)")
        fix = "pass ratio=(0.3, 0.7)."
        if getattr(ratio, "__len__", lambda: 2)() != 2:  # text has a length too
            raise check.refusal("ratio", ratio, "a fraction such as 0.5, or (low, high)", fix=fix)
        ends = check.series("ratio", ratio, 2) if isinstance(ratio, Iterable) else (ratio, ratio)
        low, high = (check.number("ratio", each, fix=fix) for each in ends)
        if not 0 < low <= high <= 1:
            raise check.refusal(
                "ratio",
                ratio,
                "a fraction such as 0.5, or (low, high) with 0 < low <= high <= 1",
                fix=f"pass ratio={_ratio_meant(low, high)}.",
            )
        check.choice("rounding", rounding, get_args(Rounding), fix="pass rounding='nearest'.")
        self.ratio = (low, high)
        self.seed = check.whole("seed", seed)
        self.rounding: Rounding = rounding
        self.cache = IndexCache(parse_bytes(cache_bytes, name="cache_bytes"))
        self.device = _device(device)
        call = f"GridAwareSampler(backend={backend!r}, device={str(self.device)!r})"
        self.backend: GridBackend = resolved(backend, self.device, call)
        self._host_backend: HostBackend = "numba" if self.backend == "numba" else "numpy"
        self._host = _HostDraws(self._host_backend, call)
        self._draws = (
            DeviceDraws(self.device, with_triton=self.backend == "triton")
            if self.backend in ("torch", "triton")
            else self._host
        )
        self._num_draws = 0
        self._num_waiting = 0  # of these, drawn ahead but not handed out yet
        self._lock = ProcessLock()

    @runs_eagerly
    def sample_half_density(self, index: GridIndex, generator: torch.Generator | None = None) -> GridSample:
        """Keep a random fraction of each cell's points, without replacement.

        Args:
            index: Index of one scene or a batch.
            generator: Replaces the seed and the call count: one number is drawn from it.
        """
        return self._sample(index, "half", self._key(generator))

    @runs_eagerly
    def sample_single_per_grid(self, index: GridIndex, generator: torch.Generator | None = None) -> GridSample:
        """Keep one random point of each cell. For ``generator`` see `sample_half_density`."""
        return self._sample(index, "single", self._key(generator))

    @runs_eagerly
    def sample_scenarios(
        self,
        index: GridIndex,
        scenarios: Iterable[Scenario] = ("dense", "half", "single"),
        generator: torch.Generator | None = None,
    ) -> dict[Scenario, GridSample]:
        """Draw several densities of the same points in one call, identical to those of the separate methods.

        Args:
            index: Index of one scene or a batch.
            scenarios: ``"dense"`` keeps every point, ``"half"`` and ``"single"`` as the methods of these names.
            generator: See `sample_half_density`; one number for all.

        Raises:
            InputError: A scenario is unknown.
        """
        wanted = _checked_scenarios(scenarios, "GridAwareSampler.sample_scenarios(scenarios=...)")
        return self._scenarios(index, wanted, self._key(generator))

    def draw_ahead(
        self,
        indexes: Iterable[GridIndex],
        scenarios: Iterable[Scenario] = ("dense", "half", "single"),
        *,
        depth: int = 1,
    ) -> Iterator[dict[Scenario, GridSample]]:
        """Yield `sample_scenarios` of each index, drawn in a background thread while the previous step runs.

        The samples are the same as without prefetching. A state saved in between counts only the draws handed out, so a
        resumed run whose draws are all made ahead continues bit for bit. A loop that exits early returns the call
        numbers of waiting draws, except those followed by another call's draw.

        Args:
            indexes: The indexes in order; consumed ``depth`` steps early.
            scenarios: See `sample_scenarios`.
            depth: Maximum number of waiting draws; their memory is held.

        Raises:
            InputError: A scenario is unknown, or the depth is negative. Arguments are checked in this call, not at the
                first draw.
            InputTypeError: ``indexes`` cannot be iterated over.
        """
        call = "GridAwareSampler.draw_ahead(indexes)"
        wanted = _checked_scenarios(scenarios, "GridAwareSampler.draw_ahead(scenarios=...)")
        Checker(call, InputError).whole("depth", depth)
        given: object = indexes
        if not isinstance(given, Iterable):
            raise InputTypeError(
                call,
                got=f"a {type(given).__name__}",
                expected="an iterable of indexes",
                fix="write draw_ahead([index])",
            )
        return self._drawn_ahead(indexes, wanted, depth)

    def _drawn_ahead(
        self, indexes: Iterable[GridIndex], wanted: list[Scenario], depth: int
    ) -> Iterator[dict[Scenario, GridSample]]:
        waiting: deque[Ahead] = deque()
        with ThreadPoolExecutor(1, "memkit-sampler") as pool:
            try:
                for index in indexes:
                    key = self._key(None)
                    waiting.append((key, pool.submit(self._scenarios, index, wanted, key)))
                    with self._lock:
                        self._num_waiting += 1
                    if len(waiting) > depth:
                        yield self._handed_out(waiting)
                while waiting:
                    yield self._handed_out(waiting)
            finally:  # the loop exited early: these call numbers were not used
                with self._lock:  # take them back, but never below a number that another call has used since
                    self._num_waiting -= len(waiting)
                    while waiting and waiting.pop()[0][_NUMBER] == self._num_draws - 1:
                        self._num_draws -= 1

    def _handed_out(self, waiting: deque[Ahead]) -> dict[Scenario, GridSample]:
        try:
            return waiting[0][1].result()
        finally:  # a draw that fails has used its call number, as without prefetching
            with self._lock:
                waiting.popleft()
                self._num_waiting -= 1

    @runs_eagerly
    def index(
        self,
        coords: Points,
        grid_size: Lengths = 0.05,
        *,
        key: Hashable | None = None,
        offsets: Points | None = None,
        batch: Points | None = None,
        origin: Lengths = 0.0,
    ) -> GridIndex:
        """Build the index of some coordinates, or return the cached one.

        Args:
            coords: See `GridIndex.from_coords`.
            grid_size: See `GridIndex.from_coords`.
            key: Your own name for the coordinates, such as the scene's. Without it, their whole content is compared
                (10 ms for a million points). With it, only shape, dtype and 64 rows are compared, so use another key
                for modified coordinates.
            offsets: See `GridIndex.from_coords`.
            batch: See `GridIndex.from_coords`.
            origin: See `GridIndex.from_coords`.

        The parameters are part of the key: the same scene with a different ``grid_size`` gives a different index.
        """
        call = "GridAwareSampler.index(coords)"
        array = host_array(coords, call, "coords")
        if getattr(key, "__hash__", None) is None:  # of None and all other hashable objects it is a method
            fix = "pass key='scene_1', or another text, number or tuple of them."
            raise InputTypeError(call, got=f"key as a {type(key).__name__}", expected="a hashable key", fix=fix)
        content = fingerprint(array) if key is None else (key, spot_check(array))
        scenes = {"offsets": offsets, "batch": batch}
        ends = tuple(
            None if each is None else fingerprint(host_array(each, call, name)) for name, each in scenes.items()
        )
        lengths = tuple(tuple(np.ravel(each).tolist()) for each in (grid_size, origin))
        return self.cache.get(
            (content, ends, lengths),
            lambda: GridIndex.from_coords(
                array, grid_size, offsets, batch=batch, origin=origin, backend=self._host_backend
            ),
        )

    def state_dict(self) -> dict[str, int]:
        """Return the state that determines the next draw, as plain ints. The cache is not part of it."""
        return {
            "version": _VERSION,
            "algo_version": _ALGO_VERSION,
            "seed": self.seed,
            "num_draws": self._num_draws - self._num_waiting,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the draws of the sampler that produced this state.

        Raises:
            FileFormatError: The state comes from a memkit version that draws differently, or is not a sampler's state.
        """
        call = "GridAwareSampler.load_state_dict(state)"
        if not isinstance(state, Mapping):
            raise FileFormatError(
                call,
                got=f"a {type(state).__name__}",
                expected="the dict that state_dict() returned",
                fix="write sampler.load_state_dict(saved['sampler']), with the name under which it was saved.",
            )
        versions = (state.get("version"), state.get("algo_version"))
        if versions != (_VERSION, _ALGO_VERSION):
            raise FileFormatError(
                call,
                got=f"version {versions[0]!r} and algo_version {versions[1]!r}",
                expected=f"version {_VERSION} and algo_version {_ALGO_VERSION}",
                fix="continue with the version of memkit that saved the state, or start a new sampler.",
            )
        check = Checker(call, FileFormatError)
        fix = "load the state as state_dict() returned it."
        seed, num_draws = (check.whole(name, state.get(name), fix=fix) for name in ("seed", "num_draws"))
        self.seed, self._num_draws = seed, num_draws

    def _key(self, generator: torch.Generator | None) -> tuple[int, ...]:
        if generator is not None:
            if not isinstance(generator, torch.Generator):
                raise InputTypeError(
                    "GridAwareSampler.sample_...(index, generator)",
                    got=f"generator={generator!r}"[:80],
                    expected="a torch.Generator, or None",
                    fix="pass generator=torch.Generator().manual_seed(seed).",
                )
            drawn = torch.randint(2**63 - 1, (), generator=generator, device=generator.device)
            return _FROM_GENERATOR, int(drawn), 0, 0
        with self._lock:
            number = self._num_draws
            self._num_draws += 1
        worker = get_worker_info()
        return _FROM_SEED, self.seed, number, worker.seed if worker else 0

    def _scenarios(self, index: GridIndex, wanted: list[Scenario], key: tuple[int, ...]) -> dict[Scenario, GridSample]:
        return {each: self._sample(index, each, key) for each in wanted}

    def _sample(self, index: GridIndex, scenario: Scenario, key: tuple[int, ...]) -> GridSample:
        given: object = index
        if not isinstance(given, GridIndex):
            method = {"half": "sample_half_density", "single": "sample_single_per_grid"}.get(scenario, "...")
            raise InputTypeError(
                f"GridAwareSampler.{method}(index)",
                got=f"a {type(given).__name__}",
                expected="a GridIndex",
                fix=f"write {method}(sampler.index(coords, grid_size=0.05))",
            )
        # An estimate runs on tensors without data; the index has data, and so have the draws.
        with nullcontext() if fake_mode() is None else without_modes():
            return self._sample_here(index, scenario, key)

    def _sample_here(self, index: GridIndex, scenario: Scenario, key: tuple[int, ...]) -> GridSample:
        if scenario == "dense":
            return self._sample_of(index, scenario, index.counts.copy(), index.offsets.copy(), None)
        drawn, kept = [], []
        for place, scene in enumerate(index.scenes):
            rows, counts = self._draw(index, place, scenario, draw_key((*key, place, _CODES[scenario])))
            if scene.first_point:
                rows += scene.first_point
            drawn.append(rows)
            kept.append(counts)
        leading = [0] * (len(index.offsets) - len(index.scenes))  # as in the index: PyG's ptr begins with 0
        ends = np.cumsum([*leading, *(len(rows) for rows in drawn)], dtype=np.int64)
        chosen = drawn[0] if len(drawn) == 1 else torch.cat([torch.arange(0, device=self.device), *drawn])
        return self._sample_of(index, scenario, _joined(kept), ends, chosen)

    def _draw(self, index: GridIndex, place: int, scenario: Literal["half", "single"], key: Key) -> tuple[Tensor, Ints]:
        """Return the kept rows of a scene, on the device, and the number kept per cell."""
        scene = index.scenes[place]
        counts = scene.groups.counts
        if scenario == "single":
            return array_to_device(self._host.choose_one(scene.groups, key), self.device), np.ones(
                len(counts), np.int64
            )
        kept = self._host.kept_counts(counts, self.ratio, self.rounding, key)
        needed = pieces_kept(scene.layout, kept, key)
        return self._draws.choose(index, place, needed, int(kept.sum()), key), kept

    def _sample_of(
        self, index: GridIndex, scenario: Scenario, counts: Ints, ends: Ints, chosen: Tensor | None
    ) -> GridSample:
        return GridSample(
            scenario=scenario,
            counts=torch.from_numpy(counts),
            offsets=torch.from_numpy(ends),
            cell_sizes=index.counts,
            num_points=index.num_points,
            chosen=chosen,
            device=self.device,
        )


class _HostDraws:
    """Draws in host memory; the counterpart of `DeviceDraws`, and the source of its per-cell draws."""

    def __init__(self, backend: HostBackend, call: str) -> None:
        self._backend = backend
        self._passes = host_passes(backend, call)
        self._workspace = Workspace()

    def kept_counts(self, counts: Ints, ratio: tuple[float, float], rounding: Rounding, key: Key) -> Ints:
        return self._passes.kept_counts(counts, ratio, rounding, key, self._workspace.words)

    def choose_one(self, groups: Groups, key: Key) -> Ints:
        return choose_one(groups, key, self._passes, self._workspace.words)

    def choose(self, index: GridIndex, place: int, needed: NDArray[np.uint8], num_kept: int, key: Key) -> Tensor:
        layout = index.scenes[place].layout
        return torch.from_numpy(choose(layout, needed, num_kept, key, self._passes, self._workspace))

    def __reduce__(self) -> tuple[Any, ...]:
        return _HostDraws, (self._backend, "GridAwareSampler")  # modules cannot be pickled


def _ratio_meant(low: float, high: float) -> float | tuple[float, float]:
    """Return the ratio that was probably meant: the ends in order, percentages as fractions."""
    low, high = (each / 100 if 5 <= each <= 100 else each for each in sorted((low, high)))
    if not 0 < low <= high <= 1:
        return 0.3, 0.7
    return low if low == high else (low, high)


def _device(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        text = str(device)
        meant = "cuda" if "gpu" in text.lower() else nearest_word(text, ("cpu", "cuda", "mps", "xpu")) or "cpu"
        raise ConfigError(
            f"GridAwareSampler(device={device!r})",
            got=repr(device),
            expected="a torch device",
            fix=f"pass device={meant!r}.",
        ) from error


def _joined(parts: list[Ints]) -> Ints:
    return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, np.int64), *parts])


def _checked_scenarios(scenarios: Iterable[Scenario], call: str) -> list[Scenario]:
    check = Checker(call, InputError)
    if isinstance(scenarios, str) or not isinstance(scenarios, Iterable):
        meant = nearest_word(str(scenarios), _CODES) or "half"
        raise check.refusal("scenarios", scenarios, "a tuple of names", fix=f"write scenarios=({meant!r},)")
    fix = "pass scenarios=('dense', 'half', 'single'), or some of these."
    scenarios = tuple(scenarios)
    if not scenarios:
        raise check.refusal("scenarios", scenarios, "at least one name", fix=fix)
    return [check.choice("scenarios", each, _CODES, fix=fix) for each in scenarios]
