"""The user's options for distributing a step over ranks, which `memkit._simulation.ranks` carries out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import torch

from memkit._core.errors import ConfigError
from memkit._core.settings import Checker, as_whole, nearest_word
from memkit._core.words import guided

ShardKind = Literal["ddp", "fsdp2", "zero1", "zero2", "zero3"]
REPLICATED = ("ddp", "zero1")
_OF_SHARDED = {"units", "param_dtype", "reduce_dtype"}  # options of the other kinds


def _corrected(args: tuple[Any, ...]) -> str | None:
    """Return the call that was meant by ``Shard(2)``."""
    return f"Shard('fsdp2', ranks={args[0]})" if args and type(args[0]) is int else None


@guided(
    words={
        "kind": "strategy type mode",
        "units": "wrap auto_wrap_policy blocks layers",
        "kind='zero2'": "zero_stage stage",
    },
    rewrite={"__init__": _corrected},
)
@dataclass(frozen=True, slots=True)
class Shard:
    """Distribution of a step over ranks: the ``shard=`` of `memkit.estimate_memory_usage`.

    Attributes:
        kind: ``"ddp"``: DistributedDataParallel. ``"zero1"``: the same with ZeroRedundancyOptimizer, which partitions
            the optimizer state by whole parameters. ``"fsdp2"``: `fully_shard`. ``"zero2"`` and ``"zero3"``:
            `fully_shard` with ``reshard_after_forward`` False and True, torch's forms of ZeRO 2 and 3.
        ranks: Number of ranks, 2 or more.
        units: Names of the modules that are gathered and freed separately, each with its own `fully_shard` call:
            ``"layers.*"`` is each child of ``layers``; a star stands for one part of a dotted name. The model itself is
            always the last unit. For "fsdp2", "zero2" and "zero3".
        reshard_after_forward: As in `fully_shard`: True, False, or a divisor of ``ranks``. None: according to the kind;
            for "fsdp2" torch's own default: True except for the last unit. For "fsdp2".
        param_dtype: `MixedPrecisionPolicy.param_dtype`. For "fsdp2", "zero2" and "zero3".
        reduce_dtype: `MixedPrecisionPolicy.reduce_dtype`. For "fsdp2", "zero2" and "zero3".
        gradient_as_bucket_view: As in DistributedDataParallel. For "ddp" and "zero1".

    Raises:
        ConfigError: A value is invalid, or belongs to another kind.

    Source:
        `docs/howto/fsdp.md`; checked against two gloo processes in ``tests/predict/test_shards.py``.

    Example:
        >>> import memkit as mk, torch
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(1000, 1000, device="meta") for _ in range(4)))
        >>> batch, loss_fn = torch.empty(8, 1000), lambda model, x: model(x).square().mean()
        >>> shard = mk.predict.Shard("fsdp2", 4, units=("*",))
        >>> estimate = mk.estimate_memory_usage(model, batch, loss_fn=loss_fn, shard=shard)
        >>> estimate.parameters_bytes == 4 * 4 * (250 * 1000 + 250)
        True
    """

    kind: ShardKind
    ranks: int
    units: tuple[str, ...] = ()
    reshard_after_forward: bool | int | None = None
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    gradient_as_bucket_view: bool = False

    def __post_init__(self) -> None:
        """Reject invalid values, and options of another kind."""
        self._check("kind", self.kind in get_args(ShardKind), f"one of {', '.join(get_args(ShardKind))}")
        Checker(f"Shard({self.kind!r}, ...)").whole("ranks", self.ranks, 2)
        self._check("units", type(self.units) is tuple, 'a tuple of names, such as ("layers.*",)')
        every = self.reshard_after_forward
        is_valid = _may_reshard(every, self.ranks)
        self._check("reshard_after_forward", is_valid, "None, True, False, or a divisor of ranks between 1 and ranks")
        if self.kind in REPLICATED:
            for name in ("units", "param_dtype", "reduce_dtype"):
                self._check(name, not getattr(self, name), "unset: it belongs to fsdp2, zero2 and zero3")
        else:
            for name in ("param_dtype", "reduce_dtype"):
                self._check(name, _may_cast_to(getattr(self, name)), "None, or a floating-point torch.dtype")
            self._check("gradient_as_bucket_view", not self.gradient_as_bucket_view, "unset: it belongs to ddp, zero1")
        if self.kind != "fsdp2":
            self._check("reshard_after_forward", every is None, "unset: it belongs to fsdp2")

    def _meant(self, name: str) -> str:
        """Return the nearest valid call, with the given options that its kind takes."""
        kinds = get_args(ShardKind)
        kind = self.kind if self.kind in kinds else nearest_word(str(self.kind), kinds) or "fsdp2"
        if name == "reshard_after_forward" or (name in _OF_SHARDED and kind in REPLICATED):
            kind = "fsdp2"  # which takes it
        ranks = self.ranks if as_whole(self.ranks) is not None and self.ranks > 1 else 2
        taken = {"gradient_as_bucket_view"} if kind in REPLICATED else _OF_SHARDED
        if kind == "fsdp2" and _may_reshard(self.reshard_after_forward, ranks):
            taken = taken | {"reshard_after_forward"}
        values = {each.name: getattr(self, each.name) for each in fields(self)} | {"units": _as_names(self.units)}
        values |= {name: _as_dtype(values[name]) for name in ("param_dtype", "reduce_dtype")}
        given = [each.name for each in fields(self) if each.name in taken and values[each.name] != each.default]
        return f"Shard({', '.join([repr(kind), f'ranks={ranks}', *(f'{name}={values[name]!r}' for name in given)])})"

    def _check(self, name: str, is_valid: bool, expected: str) -> None:  # noqa: FBT001
        if not is_valid:
            value = getattr(self, name)
            raise ConfigError(
                f"Shard({self.kind!r}, {self.ranks!r}, {name}={value!r})",
                got=repr(value),
                expected=expected,
                fix=f"write {self._meant(name)}.",
            )


def _may_reshard(every: object, ranks: int) -> bool:
    """Whether `fully_shard` takes this as ``reshard_after_forward`` on so many ranks."""
    is_divisor = isinstance(every, int) and 1 < every < ranks and ranks % every == 0
    return every is None or isinstance(every, bool) or is_divisor


def _may_cast_to(dtype: object) -> bool:
    return dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)


def _as_dtype(dtype: object) -> object:
    """Return the dtype that a name means; for anything else that nothing can be cast to, the most common one."""
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype.removeprefix("torch."), torch.bfloat16)
    return dtype if _may_cast_to(dtype) else torch.bfloat16


def _as_names(units: object) -> tuple[object, ...]:
    """Return a name or an iterable of names as a tuple; anything else as no names."""
    if isinstance(units, str):
        return (units,)
    return tuple(units) if isinstance(units, Iterable) else ()
