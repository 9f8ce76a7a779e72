"""BudgetBatchSampler: pack samples of different sizes into batches within a budget, each sample once per epoch."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from itertools import islice
from operator import le
from typing import SupportsIndex, final

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from memkit._core.epochs import EpochOrder
from memkit._core.errors import ConfigError, InputError, InputTypeError
from memkit._core.settings import Checker
from memkit._core.units import parse_bytes
from memkit._core.words import guided
from memkit.points.bits import draw_key, random_bits
from memkit.points.cache import fingerprint
from memkit.points.cells import Points, host_array

_CALL = "BudgetBatchSampler(sizes)"
_MOST_OPEN = 64  # batches that may still take samples: more would take time without improving the fill


_ONE_BUDGET = "max_points=100_000"  # the budget determines how many samples fit


@guided(
    words={
        "max_points": "max_num max_nodes max_tokens max_num_points",
        _ONE_BUDGET: "batch_size",
        "the budget's name selects it: max_points=, max_edges= or max_bytes=": "mode",
        "samples are reshuffled every epoch, by seed and epoch": "shuffle",
        "no sample is dropped": "drop_last",
        "a sample above the budget is an error: remove it from the dataset": "skip_too_big",
        "an epoch contains every sample once": "num_steps",
        "sizes=[len(sample) for sample in dataset]": "dataset",
    },
    absent={"len(batch), for each of its batches": "batch_size"},
)
@final
# The text on seed, ranks and epochs is repeated in `ResumableBatchSampler`: help() shows one class at a time.
class BudgetBatchSampler(EpochOrder):
    """Batches with as many samples as fit a budget, for ``DataLoader(dataset, batch_sampler=...)``.

    The samples are reshuffled every epoch, and each goes into the open batch in which it leaves the least room (best
    fit); then the batches are shuffled. Nothing is sorted by size, so large and small samples mix. Each sample is in
    exactly one batch of the epoch, and no batch exceeds any budget.

    A sample larger than the budget is an error at construction, before training starts. It does not get a batch of its
    own, because that batch would run out of memory.

    Several ranks take turns on the batches of one packing, and all get the same number: if the number of batches is not
    divisible by the number of ranks, the batches with the most samples are halved until it is. No sample is lost or
    repeated.

    Args:
        sizes: (S,) ints, the size of each sample of the dataset, in the unit of the one budget given; or, for several
            budgets, a dict such as ``{"points": [...], "edges": [...]}``.
        max_points: Maximum points per batch.
        max_edges: Maximum edges per batch.
        max_bytes: Maximum bytes per batch, also as text such as ``"512MiB"``.
        seed: In [0, 2^63). The batches of an epoch depend only on sizes, budgets, seed and epoch.
        num_replicas: Number of ranks that share the epoch. Required if torch.distributed has several.
        rank: This process's rank.

    Attributes:
        seed: The seed.
        epoch: The current epoch, see `set_epoch`.

    Raises:
        ConfigError: There is no budget, a budget without sizes or vice versa, a setting out of range, or several ranks
            without ``num_replicas``.
        InputError: A sample exceeds a budget (the first is named), sizes are negative or differ in length; or, with
            ranks, there are too few samples to give each the same number of batches.
        InputTypeError: Sizes are not numbers.

    Memory cost: 8 bytes per sample and budget, and the batches of one epoch as Python lists. Time cost: at the start of
    an epoch 2 microseconds per sample, 9 with two budgets.

    Example:
        >>> import torch, memkit as mk
        >>> num_points = torch.randint(100, 900, (1000,), generator=torch.Generator().manual_seed(0))
        >>> batches = mk.points.BudgetBatchSampler(num_points, max_points=2000, seed=0)
        >>> max(int(num_points[batch].sum()) for batch in batches)
        2000
        >>> len(batches), round(batches.fill["points"], 3)
        (261, 0.979)
    """

    def __init__(
        self,
        sizes: Points | Mapping[str, Points],
        max_points: SupportsIndex | None = None,
        max_edges: SupportsIndex | None = None,
        max_bytes: SupportsIndex | str | None = None,
        *,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        most_bytes = None if max_bytes is None else parse_bytes(max_bytes, name="max_bytes")
        given = {"points": max_points, "edges": max_edges, "bytes": most_bytes}
        check = Checker(_CALL)
        data: object = sizes
        if isinstance(data, Dataset):
            raise InputTypeError(
                _CALL,
                got=f"a {type(data).__name__}",
                expected="the size of each sample",
                fix="write BudgetBatchSampler([len(sample) for sample in dataset], max_points=...)",
            )
        self._budgets = {
            name: check.whole(f"max_{name}", budget, 1) for name, budget in given.items() if budget is not None
        }
        self._sizes = _columns(sizes, self._budgets)
        _refuse_larger(self._sizes, self._budgets)
        super().__init__(seed=seed, num_replicas=num_replicas, rank=rank)
        self._batches = self._pack()

    @property
    def fill(self) -> dict[str, float]:
        """Mean fill of this epoch's batches over all ranks, as a fraction of each budget; 1.0 without batches."""
        available = {name: budget * len(self._batches) for name, budget in self._budgets.items()}
        totals = dict(zip(self._budgets, self._sizes.sum(axis=0).tolist(), strict=True))
        return {name: totals[name] / available[name] if available[name] else 1.0 for name in available}

    @property
    def num_samples(self) -> int:
        """Number of samples per epoch, over all ranks."""
        return len(self._sizes)

    def __len__(self) -> int:
        """Number of batches of this epoch per rank; another epoch may need slightly more or fewer."""
        return len(self._batches) // self._num_replicas

    def _batches_from(self, start: int) -> Iterator[list[int]]:
        return map(list, islice(self._batches, self._rank + start * self._num_replicas, None, self._num_replicas))

    def _made_of(self) -> str:
        return f"sizes {fingerprint(self._sizes).hex()}, budgets {self._budgets}, {self._num_replicas} ranks"

    def _plan_epoch(self) -> None:
        self._batches = self._pack()

    def _pack(self) -> list[list[int]]:
        """Return all ranks' batches of the epoch."""
        bits = random_bits(draw_key((self.seed, self.epoch)))
        order = bits.random_raw(len(self._sizes)).argsort(kind="stable")
        batches = _best_fit(self._sizes, list(self._budgets.values()), order)
        batches = [batches[each] for each in bits.random_raw(len(batches)).argsort(kind="stable").tolist()]
        while len(batches) % self._num_replicas:
            largest = max(batches, key=len)
            if len(largest) == 1:
                raise InputError(
                    f"BudgetBatchSampler(sizes, num_replicas={self._num_replicas})",
                    got=f"{len(self._sizes)} samples, which give only {len(batches)} batches of one sample",
                    expected="the same number of batches for each rank, with no sample lost or repeated",
                    fix="remove a few samples, or raise the budget.",
                )
            batches.append(largest[1::2])
            del largest[1::2]
        return batches


def _best_fit(sizes: NDArray[np.int64], budgets: list[int], order: NDArray[np.int64]) -> list[list[int]]:
    """Put each sample into the batch with the least room in the tightest budget and enough in all others."""
    tightest = np.argsort(-sizes.sum(axis=0) / budgets)
    sizes = sizes[:, tightest]
    empty = [budgets[each] for each in tightest]
    batches: list[list[int]] = []
    open_batches: list[tuple[int, ...]] = []  # ascending: rooms, then the batch number
    for sample, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        place = bisect_left(open_batches, (size[0],))
        while place < len(open_batches) and not all(map(le, size, open_batches[place])):
            place += 1
        if place < len(open_batches):
            *rooms, number = open_batches.pop(place)
        else:
            rooms, number = empty, len(batches)
            batches.append([])
            if len(open_batches) == _MOST_OPEN:
                del open_batches[0]  # the fullest
        batches[number].append(sample)
        insort(open_batches, (*(room - used for room, used in zip(rooms, size, strict=True)), number))
    return batches


def _columns(sizes: Points | Mapping[str, Points], budgets: dict[str, int]) -> NDArray[np.int64]:
    """Return the sizes as (S, number of budgets), in the order of the budgets."""
    names = ", ".join(f"max_{name}" for name in budgets) or "no budget"
    if not isinstance(sizes, Mapping):
        if len(budgets) != 1:
            raise ConfigError(
                _CALL,
                got=f"one size for each sample, but {names}",
                expected="one budget, or a dict with sizes for each budget",
                fix='pass max_points=... alone, or sizes={"points": [...], "edges": [...]} with several budgets.',
            )
        sizes = dict.fromkeys(budgets, sizes)
    if not budgets or set(sizes) != set(budgets):
        raise ConfigError(
            _CALL,
            got=(f"sizes of {', '.join(sizes)}" if sizes else "no sizes") + f", but {names}",
            expected="the same names for sizes and budgets: points, edges, bytes",
            fix="pass one budget for each column of sizes, and omit the others.",
        )
    columns = [_column(sizes[name], name) for name in budgets]
    if len({len(column) for column in columns}) > 1:
        raise InputError(
            _CALL,
            got=" and ".join(f"{len(column)} sizes of {name}" for name, column in zip(budgets, columns, strict=True)),
            expected="one size for each sample in each column",
            fix="compute all columns from the same list of samples.",
        )
    return np.stack(columns, axis=1)


def _column(values: Points, name: str) -> NDArray[np.int64]:
    column = host_array(values, _CALL, f"sizes of {name}")
    column = column if column.size else column.astype(np.int64)  # an empty list has no dtype
    if column.ndim != 1 or column.dtype.kind not in "iu" or bool((column < 0).any()):
        raise InputError(
            _CALL,
            got=f"sizes of {name} of dtype {column.dtype} and shape {column.shape}, minimum {column.min(initial=0)}",
            expected="one whole number of at least 0 for each sample",
            fix="count points, edges or bytes: [len(scene.coords) for scene in scenes].",
        )
    return column.astype(np.int64)


def _refuse_larger(sizes: NDArray[np.int64], budgets: dict[str, int]) -> None:
    for column, (name, budget) in zip(sizes.T, budgets.items(), strict=True):
        larger = np.flatnonzero(column > budget)
        if larger.size:
            raise InputError(
                f"BudgetBatchSampler(sizes, max_{name}={budget})",
                got=f"{column[larger[0]]} {name} in sample {larger[0]}; {larger.size} samples exceed the budget",
                expected="samples that each fit into a batch",
                fix=f"pass max_{name}={column.max()} or more, reduce these samples, or remove them from the dataset.",
            )
