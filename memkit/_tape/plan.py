"""`SavedTensorPlan`: which tensors that autograd saves are made again in backward, and which wait elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self, TypeAlias

from memkit._charts.overview import Overview, Overviewed
from memkit._core.settings import check_version
from memkit._core.units import format_bytes

_VERSION = 6
# How often each operator of a forward runs, by name; where nothing runs again, how often each kind of tensor is saved.
ForwardCounts: TypeAlias = frozenset[tuple[str, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensorPlan(Overviewed):
    """Treatment of each tensor that a forward saves for its backward, identified by the operator that made it.

    Operators and saved tensors are counted from the start of the forward. A tensor whose operator is in neither set
    stays.

    Attributes:
        operators: Names of all operators of the forward, in order.
        recomputed: Numbers of the operators that run again in backward: their results are not kept.
        offloaded: Numbers of the operators whose results wait elsewhere: on disk, or, with an accelerator, in host
            memory.
        shape_only: Numbers of the operators that save an argument of which backward reads the shape alone
            (`index_add`): for them it is not kept.
        saves: What autograd saves, in order: the kind of each tensor, such as ``"floating 3-D"``. With it, a plan that
            only offloads does not have to follow operators.
        moved: Numbers of the saved tensors that wait elsewhere.
        last_save: Number of saved tensors up to the last one that is recomputed or waits elsewhere: so far a forward
            has to be followed. 0 is to its end.
        last_operator: Number of operators by then.
        recomputed_bytes: Saved bytes that are not kept because they are recomputed.
        offloaded_bytes: Saved bytes that wait elsewhere.
        shape_only_bytes: Saved bytes that are not kept because backward reads their shape alone.
        held_bytes: Bytes of tensors that autograd does not save, but that wait for operators which run again.
        recomputed_flops: Floating point operations of the operators that run again, as torch counts them.
        num_random: Operators among the recomputed ones that draw random numbers.
        saved_bytes: All bytes that the forward saves without a plan, apart from parameters and inputs.
        rehearsed: Forwards that it was rehearsed with, one for each kind of batch: how often each operator runs, or how
            often each kind of tensor is saved.

    Example:
        >>> import torch
        >>> import memkit as mk
        >>> model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in "123"))
        >>> x, loss_fn = torch.ones(512, 64), lambda model, x: model(x).square().mean()
        >>> plan = mk.plan_training(model, x, loss_fn, budget="1MiB", micro_batch_size=512, treat="tensors")
        >>> with mk.train.treat_saved_tensors(plan.saved_tensors):
        ...     loss = loss_fn(model, x)
        >>> loss.backward()
    """

    operators: tuple[str, ...]
    recomputed: frozenset[int] = frozenset()
    offloaded: frozenset[int] = frozenset()
    shape_only: frozenset[int] = frozenset()
    saves: tuple[str, ...] = ()
    moved: frozenset[int] = frozenset()
    last_save: int = 0
    last_operator: int = 0
    recomputed_bytes: int = 0
    offloaded_bytes: int = 0
    shape_only_bytes: int = 0
    held_bytes: int = 0
    recomputed_flops: int = 0
    num_random: int = 0
    saved_bytes: int = 0
    rehearsed: frozenset[ForwardCounts] = field(default=frozenset(), compare=False)

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as plain types, ready for JSON; `from_dict` reads it."""
        return {
            "version": _VERSION,
            "operators": list(self.operators),
            "recomputed": sorted(self.recomputed),
            "offloaded": sorted(self.offloaded),
            "shape_only": sorted(self.shape_only),
            "saves": list(self.saves),
            "moved": sorted(self.moved),
            "last_save": self.last_save,
            "last_operator": self.last_operator,
            "recomputed_bytes": self.recomputed_bytes,
            "offloaded_bytes": self.offloaded_bytes,
            "shape_only_bytes": self.shape_only_bytes,
            "held_bytes": self.held_bytes,
            "recomputed_flops": self.recomputed_flops,
            "num_random": self.num_random,
            "saved_bytes": self.saved_bytes,
            "rehearsed": sorted(sorted(each) for each in self.rehearsed),
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Self:
        """Rebuild a plan from `as_dict`.

        Raises:
            FileFormatError: Another version of memkit wrote it.
        """
        check_version("SavedTensorPlan.from_dict(state)", state, _VERSION)
        return cls(
            operators=tuple(state["operators"]),
            recomputed=frozenset(state["recomputed"]),
            offloaded=frozenset(state["offloaded"]),
            shape_only=frozenset(state["shape_only"]),
            saves=tuple(state["saves"]),
            moved=frozenset(state["moved"]),
            last_save=state["last_save"],
            last_operator=state["last_operator"],
            recomputed_bytes=state["recomputed_bytes"],
            offloaded_bytes=state["offloaded_bytes"],
            shape_only_bytes=state["shape_only_bytes"],
            held_bytes=state["held_bytes"],
            recomputed_flops=state["recomputed_flops"],
            num_random=state["num_random"],
            saved_bytes=state["saved_bytes"],
            rehearsed=frozenset(frozenset((name, count) for name, count in each) for each in state["rehearsed"]),
        )

    @property
    def needs_tape(self) -> bool:
        """Whether the operators of the forward have to be followed, and not only what autograd saves."""
        return bool(self.recomputed or self.shape_only or (self.offloaded and not self.saves))

    def counts(self, *, is_whole: bool = True) -> dict[str, int]:
        """Return how often each operator runs, or, without a tape, how often each kind of tensor is saved.

        Args:
            is_whole: Whether in the whole forward, or as far as it has to be followed.
        """
        names, last = (self.operators, self.last_operator) if self.needs_tape else (self.saves, self.last_save)
        return dict(Counter(names if is_whole else names[:last]))

    @property
    def waiting_bytes(self) -> int:
        """Bytes that the forward leaves for its backward under the plan, apart from parameters and inputs."""
        gone = self.recomputed_bytes + self.offloaded_bytes + self.shape_only_bytes
        return self.saved_bytes + self.held_bytes - gone

    @property
    def kept_share(self) -> float:
        """`waiting_bytes` over the bytes that wait without a plan."""
        return self.waiting_bytes / max(1, self.saved_bytes)

    @property
    def summary(self) -> str:
        """Readable summary, such as ``"35% kept, 60% recomputed, 5% offloaded"``."""
        shares = [
            ("recomputed", self.recomputed_bytes),
            ("offloaded", self.offloaded_bytes),
            ("shapes only", self.shape_only_bytes),
        ]
        others = "".join(f", {each / max(1, self.saved_bytes):.0%} {name}" for name, each in shares if each)
        return f"{self.kept_share:.0%} of {format_bytes(self.saved_bytes)} kept{others}"

    def _overview(self) -> Overview:
        return Overview(
            f"keeps {format_bytes(self.waiting_bytes)} of the {format_bytes(self.saved_bytes)} that a forward saves",
            [
                ("recomputed", f"{format_bytes(self.recomputed_bytes)}, by {len(self.recomputed)} operators"),
                ("recomputed FLOPs", f"{self.recomputed_flops:,}"),
                ("offloaded", f"{format_bytes(self.offloaded_bytes)}, of {len(self.offloaded)} operators"),
                *[("shapes only", format_bytes(self.shape_only_bytes))] * bool(self.shape_only_bytes),
                ("operators", str(len(self.operators))),
            ],
        )
