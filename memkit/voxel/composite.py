"""A weighted sum of losses whose weights may change during training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import Tensor, nn

from memkit._core.errors import InputTypeError, StateError
from memkit._core.printable import described
from memkit._core.settings import Checker, check_version
from memkit._core.words import guided

VoxelLoss: TypeAlias = Callable[..., Tensor]
LossWeight: TypeAlias = float | Callable[[int], float]
_VERSION = 1
_TOTAL = "total"


@guided(
    words={"a loss and its weight are a pair: CompositeLoss3D({name: (loss, weight)})": "weights weight"},
    methods=("forward",),
    rewrite={"__init__": lambda _: "CompositeLoss3D({'edges': (StructurePreservingLoss(), 1.0)})"},
)
class CompositeLoss3D(nn.Module):
    """A weighted sum of losses that records each loss's last value for logging.

    Args:
        losses: ``{name: (loss, weight)}``. A loss is any ``loss(prediction, target)`` that returns a 0-dim tensor; a
            weight is a number, or a schedule: a function of the step number. A loss with weight 0 is not computed.

    Attributes:
        values: Values of the last forward: each unweighted loss, and ``"total"``; 0-dim tensors without a graph, still
            on their device. Losses that were not computed are missing.
        num_steps: Number of calls of `step`, passed to schedules. Part of the state_dict.

    Raises:
        ConfigError: There is no loss, or a name, a loss or a weight is invalid.

    Memory cost: that of its losses, one after another; each memkit loss keeps one gradient of the prediction until
    backward.

    Source: `docs/losses.md`.

    Example:
        >>> import torch
        >>> import memkit as mk
        >>> loss = mk.CompositeLoss3D(
        ...     {
        ...         "voxels": (mk.OccupancyAwareLoss(), 1.0),
        ...         "edges": (mk.StructurePreservingLoss(), lambda step: min(1.0, step / 100)),
        ...     }
        ... )
        >>> prediction = torch.zeros(1, 1, 4, 4, 4, requires_grad=True)
        >>> loss(prediction, torch.ones(1, 1, 4, 4, 4)).backward()
        >>> {name: value.item() for name, value in loss.values.items()}
        {'voxels': 1.0, 'total': 1.0}
        >>> loss.step()  # once for each optimizer step
        >>> total = loss(prediction, torch.ones(1, 1, 4, 4, 4))
        >>> sorted(loss.values), loss.weights()
        (['edges', 'total', 'voxels'], {'voxels': 1.0, 'edges': 0.01})
    """

    def __init__(self, losses: Mapping[str, tuple[VoxelLoss, LossWeight]]) -> None:
        super().__init__()
        check = Checker("CompositeLoss3D({...})")
        given: Any = losses
        if not isinstance(given, Mapping) or not given:
            raise check.refusal(
                "losses",
                losses,
                "{name: (loss, weight)}, with at least one loss",
                fix="write CompositeLoss3D({'edges': (StructurePreservingLoss(), 1.0)})",
            )
        self.losses: dict[str, VoxelLoss] = {}
        self._weights: dict[str, LossWeight] = {}
        for name, pair in given.items():
            if not isinstance(name, str) or not name.isidentifier() or name == _TOTAL or hasattr(nn.ModuleDict, name):
                raise check.refusal(
                    "losses",
                    name,
                    f"names like 'edges'; not {_TOTAL!r}, nor a method of nn.ModuleDict",
                    fix="write for example {'edges': (loss, weight)}.",
                )
            if not isinstance(pair, (list, tuple)) or len(pair) != 2:
                shown = type(pair).__name__ + "()" if isinstance(pair, nn.Module) else "loss"
                raise check.refusal(name, pair, "a pair (loss, weight)", fix=f"write {{{name!r}: ({shown}, 1.0)}}")
            loss, weight = pair
            if not callable(loss):
                is_swapped = isinstance(weight, nn.Module)
                shown = f"({type(weight).__name__}(), {loss!r})" if is_swapped else "(loss, weight)"
                fix = f"write {{{name!r}: {shown}}}"
                raise check.refusal(name, loss, "a function or module of (prediction, target)", fix=fix)
            self.losses[name] = loss
            self._weights[name] = weight if callable(weight) else check.number(name, weight)
        # Losses that are modules move with this one, and are saved with it.
        self.parts = nn.ModuleDict({name: each for name, each in self.losses.items() if isinstance(each, nn.Module)})
        self.values: dict[str, Tensor] = {}
        self.num_steps = 0

    def weights(self) -> dict[str, float]:
        """Return the weights at this step.

        Raises:
            ConfigError: A schedule did not return a finite number.
        """
        check = Checker(f"CompositeLoss3D({{...}}).weights() at step {self.num_steps}")
        return {
            name: check.number(name, weight(self.num_steps) if callable(weight) else weight)
            for name, weight in self._weights.items()
        }

    def forward(self, prediction: Any, target: Any) -> Tensor:
        """Add up the losses.

        Args:
            prediction: The prediction, as the losses take it.
            target: The target, as the losses take it.

        Returns:
            The weighted sum, 0-dim.

        Raises:
            ConfigError: A schedule did not return a finite number.
            InputTypeError: A loss did not return a 0-dim tensor.
            StateError: All weights are zero at this step.
        """
        call = "CompositeLoss3D({...})(prediction, target)"
        weights = {name: weight for name, weight in self.weights().items() if weight}
        if not weights:
            raise StateError(
                call,
                got=f"weights that are all zero at step {self.num_steps}",
                expected="at least one weight that is not zero",
                fix="let at least one schedule start above zero.",
            )
        self.values = {}
        terms = []
        for name, weight in weights.items():
            value: Any = self.losses[name](prediction, target)
            if not isinstance(value, Tensor) or value.dim():
                raise InputTypeError(
                    call,
                    got=f"{described(value)} from {name!r}",
                    expected="a 0-dim tensor",
                    fix="average inside the loss: reduction='mean'.",
                )
            self.values[name] = value.detach()
            terms.append(value * weight)
        total: Tensor = sum(terms[1:], terms[0])
        self.values[_TOTAL] = total.detach()
        return total

    def step(self) -> None:
        """Advance the schedules by one optimizer step, like a learning-rate scheduler."""
        self.num_steps += 1

    def get_extra_state(self) -> dict[str, int]:
        """Return the part of the state_dict besides the losses' own: the number of steps."""
        return {"version": _VERSION, "num_steps": self.num_steps}

    def set_extra_state(self, state: Any) -> None:
        """Restore the state of `get_extra_state`.

        Raises:
            FileFormatError: The state has a different version.
        """
        check_version("CompositeLoss3D({...}).load_state_dict(state)", state, _VERSION)
        self.num_steps = state["num_steps"]
