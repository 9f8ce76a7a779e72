"""Read the divisors of a loss from its graph, to distinguish means over rows from means over tokens or classes."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from operator import attrgetter, itemgetter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from memkit._core.errors import warn_user
from memkit._torch.dispatch import without_modes
from memkit._torch.graph import inputs_of, saved, saved_as_stored, saved_or_none
from memkit.train.gradients import graph_nodes

_TOLERANCE = 1e-4
_MAX_NODES = 64  # at the head of a graph, where numbers are added and scaled
_BATCH_NORMS = {"NativeBatchNormBackward", "CudnnBatchNormBackward", "MiopenBatchNormBackward", "BatchNormBackward"}
_WEIGHTS = "weights of rows"  # last operator of a term that ends in weights
_KEEPING = ("Sum", "Mean", "View", "Reshape", "Squeeze", "Unsqueeze", "Index", "Neg")  # below a sum: no weights
_WEIGHING = ("Mul", "Div", "Dot")
_COMBINING = ("Mean", *_WEIGHING)
_ABOVE_WEIGHTS = (*_KEEPING, "Permute")  # einsum adds up by a product of matrices, which it permutes
_MAY_WEIGH = (*_ABOVE_WEIGHTS, *_WEIGHING, "Bmm")
_MOST_WEIGHTS = 2**20  # that are compared row by row
_MAX_TERMS = 8  # losses with more terms are not analyzed

_OPERATORS, _DIFFERENCE, _TERMS = attrgetter("operators"), attrgetter("difference"), itemgetter(1)  # of a note

Factor = float | Tensor


SUM_IS_AVERAGED = "The loss is a sum over rows, and the parts are averaged"
# GroupNorm's statistics take in the padding, of which each micro-batch may have another length.
NORMS_OF_A_ROW = (
    "GroupNorm or LayerNorm (where rows are padded to the longest one of each part, LayerNorm over the channels of "
    "each position)"
)


class Term(NamedTuple):
    """A term of a loss.

    Attributes:
        operators: From the loss down to its reduction.
        factors: The divisors on the way.
        nums_summed: How many numbers the reduction adds up unweighted: all of them, then those that are not masked or
            ignored; empty if it is not a sum, or weights them.
        difference: That of the rows' constant weights, as a share of the largest; None if there are none.
        summed_over: The count by which a sum is divided besides, after its graph; 1 for a mean.
        is_mean: Whether the reduction itself is a mean, whose divisor is therefore the number of its items.
    """

    operators: tuple[str, ...]
    factors: tuple[Factor, ...]
    nums_summed: tuple[Factor, ...] = ()
    difference: Factor | None = None
    summed_over: Factor = 1.0
    is_mean: bool = False


Note = tuple[Factor, tuple[Term, ...]]  # a micro-batch's weight, and the result of `divisors` on its loss


def divisors(loss: Tensor, *, counts_sums: bool = False) -> tuple[Term, ...]:
    """Read the divisor of each term of a loss from its graph, without waiting for a device.

    Args:
        loss: 0-dim, with its graph.
        counts_sums: Whether to read the terms' `nums_summed` too.

    Returns:
        For each term the factors of its divisor, numbers or 0-dim tensors; the terms come in the order of the graph.
        Empty if there are too many terms.
    """
    # An active mode (a FLOP counter) would see numbers that torch saved as tensors, and not recognize them.
    with without_modes():
        has_values = type(loss) is Tensor  # a simulation has none
        terms = list(_walk(loss.grad_fn, counts_sums=counts_sums)) if has_values else []
    return tuple(terms) if len(terms) <= _MAX_TERMS else ()


def divisors_of_sum(terms: Sequence[Term], count: Factor) -> tuple[Term, ...]:
    """Return the terms of a loss that was declared as the sum over its count, as those of its mean.

    Only then a penalty on the weights that is multiplied by the count is a constant term like any other.
    """
    return tuple([each._replace(nums_summed=(), summed_over=count) for each in terms])


def normalizes_over_batch(loss: Tensor) -> bool:
    """Return whether a loss's graph contains a batch normalization in training mode, from any module or function."""
    return any(
        node.name().rstrip("0123456789") in _BATCH_NORMS and saved(node, "training") and not _is_per_sample(node)
        for node in graph_nodes(loss)
    )


def _is_per_sample(node: Any) -> bool:
    """Return whether a node is an instance normalization: torch runs it as a batch normalization of one viewed row."""
    before = [each.name() for each, _ in node.next_functions if each is not None]  # of the input and the weights
    return len(saved(node, "input")) == 1 and any("View" in name or "Repeat" in name for name in before)


def _walk(node: Any, *, counts_sums: bool) -> Iterator[Term]:
    # Plain tuples on the way: a micro-batch's loss is read in each step.
    todo: list[tuple[Any, Any, tuple[str, ...], tuple[Factor, ...]]] = [(None, node, (), ())]
    for _ in range(_MAX_NODES):
        if not todo:
            return
        above, node, operators, factors = todo.pop(0)
        if node is None:
            continue
        name = node.name()
        factor, is_end = _read(node)
        operators, factors = (*operators, name), factors if factor is None else (*factors, factor)
        if not is_end:
            todo += [(node, each, operators, factors) for each, _ in node.next_functions]
            continue
        nums_summed = _nums_summed(above, node) if counts_sums else ()
        if name.startswith(_COMBINING) and (divisor := _divisor_of_columns(node)) is not None:
            yield Term((*operators, "columns"), (divisor,))
        elif name.startswith(_MAY_WEIGH) and (weights := _weights_of_rows(node)) is not None:
            if weights.dim() == 1:
                operators, factors = (*operators, _WEIGHTS), (*factors, _spread(weights))
            yield Term(operators, factors, nums_summed, _difference(weights))
        else:
            yield Term(operators, factors, nums_summed, is_mean=factor is not None)


def _nums_summed(above: Any, node: Any) -> tuple[Factor, ...]:
    """Return how many numbers a reduction adds up, as in `Term`.

    Args:
        above: The reduction, unless it is a loss of torch's own.
        node: What it reduces, or that loss.
    """
    name = node.name().rstrip("0123456789")
    if (name.endswith("LossBackward") or name.startswith(("BinaryCrossEntropy", "NllLoss"))) and _is_sum_of_loss(node):
        return saved(node, "self").numel(), *(_nums_counted(node) if name.startswith("NllLoss") else ())
    if above is None or not above.name().startswith("Sum"):
        return ()
    number, counted = math.prod(saved(above, "self_sym_sizes")), tuple[Factor, ...]()
    node = _below_kept(node)
    mask = None if node is None else _mask_of(node)
    if mask is not None:
        node = _below_kept(next((each for each, _ in node.next_functions if each is not None), None))
        counted = (int(mask.sum()) * number // max(1, mask.numel()),)
    elif node is not None and node.name().startswith("NllLoss"):
        counted = _nums_counted(node)
    is_weighted = node is None or node.name().startswith(("Div", "Mean") if counted else (*_WEIGHING, "Mean"))
    return () if is_weighted else (number, *counted)


def _below_kept(node: Any) -> Any:
    """Return the first node that may weight the rows, or is not looked through, at or below a node; None without."""
    while node is not None and node.name().startswith(_KEEPING):
        if node.name().startswith("Mean") and not _keeps_rows(node):
            return node
        node = node.next_functions[0][0]
    return node


def _nums_counted(node: Any) -> tuple[Factor, ...]:
    """Return how many targets a cross-entropy does not ignore, and their class weights if it is their sum.

    Class weights are added up in the dtype of the loss, which may be a coarse one.
    """
    found = [saved(node, "total_weight")] if _is_sum_of_loss(node) else []
    target, ignored = next(iter(saved_as_stored(node, "_raw_saved_target")), None), saved(node, "ignore_index")
    if type(target) is Tensor:  # no hook has packed it
        found.append((target != (ignored if ignored < 2**63 else ignored - 2**64)).sum())  # stored unsigned
    return tuple(map(_on_host, found))


def _is_sum_of_loss(node: Any) -> bool:
    return bool(saved_or_none(node, "reduction") == 2)  # at::Reduction::Sum


def _mask_of(node: Any) -> Tensor | None:
    """Return the mask of zeros and ones if a node is a product with one on the host, otherwise None."""
    constant = [each for each in (saved_or_none(node, "self"), saved_or_none(node, "other")) if type(each) is Tensor]
    mask = constant[0] if len(constant) == 1 and node.name().startswith("Mul") else None
    if mask is None or mask.requires_grad or not mask.is_cpu or mask.is_complex():
        return None
    return mask if mask.dtype == torch.bool or bool((mask * mask == mask).all()) else None


def _divisor_of_columns(node: Any) -> Factor | None:
    """Combine the per-column divisors of a mean over columns (tasks, classes) of sums over rows into one number."""
    below = node.next_functions[0][0] if node.name().startswith("MeanBackward") else None
    if below is None or not below.name().startswith("DivBackward"):
        return None
    other, total = saved(below, "other"), below.next_functions[0][0]
    is_of_rows = total is not None and total.name().startswith("SumBackward1") and 0 in saved(total, "dim")
    if not isinstance(other, Tensor) or other.numel() < 2 or not is_of_rows:
        return None
    # Non-integer weights: columns whose divisors swap places do not cancel.
    weights = torch.arange(1, other.numel() + 1, device=other.device, dtype=torch.float64).sqrt()
    return _on_host((other.detach().reshape(-1) * weights).sum().float())


def _weights_of_rows(node: Any) -> Tensor | None:
    """Return the constant weights of the summed numbers, one per row; or others, with the rows first; or None."""
    if node.name().startswith("MeanBackward"):
        node = node.next_functions[0][0]
    top = node
    scale: Factor = 1.0
    for _ in range(_MAX_TERMS):
        if node is None or not node.name().startswith(("MulBackward", "DotBackward", "DivBackward")):
            break
        saved = [saved_or_none(node, each) for each in ("self", "other", "tensor")]
        constant = [each for each in saved if type(each) is Tensor and not (each.requires_grad or each.is_complex())]
        if len(constant) == 1 and constant[0].dim() == 1 and len(constant[0]) and not node.name().startswith("Div"):
            return constant[0].float() * scale
        if len(constant) != 1 or constant[0].dim():
            break
        scale = scale / constant[0] if node.name().startswith("Div") else scale * constant[0]
        node = node.next_functions[0][0] or node.next_functions[1][0]
    return _weights_below(top) if top is not None and top.name().startswith(_MAY_WEIGH) else None


def _weights_below(node: Any) -> Tensor | None:
    """Return constant weights of more than one dimension, or under sums and means within each row; None without any.

    Only the first product is looked at: what a product further down has saved may have to be brought back.
    """
    for _ in range(_MAX_TERMS):
        if node is None or not node.name().startswith(_MAY_WEIGH):
            return None
        if node.name().startswith(("Mul", "Bmm")):
            shape = inputs_of(node)[0].shape
            is_einsum = node.name().startswith("Bmm")  # its rows and columns are in one dimension
            if is_einsum and math.prod(shape) != 1:
                return None
            saved = [saved_or_none(node, each) for each in ("self", "other", "mat2")]
            tensors = [each for each in saved if isinstance(each, Tensor) and each.numel() != 1]
            if tensors:
                found = next((each for each in tensors if _are_weights(each, None if is_einsum else shape)), None)
                return found.reshape(-1, 1) if is_einsum and found is not None else found
        node = next((each for each, _ in node.next_functions if each is not None), None)
    return None


def _are_weights(tensor: Tensor, shape: Sequence[int] | None) -> bool:
    """Return whether a tensor is constant and, in a product of this shape, not the same for all rows."""
    is_constant = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.requires_grad
    is_small = 0 < tensor.numel() <= _MOST_WEIGHTS and not tensor.is_complex()
    return is_constant and is_small and (shape is None or (tensor.dim() == len(shape) and len(tensor) == shape[0]))


def _difference(weights: Tensor) -> Factor:
    """Return how much the weights of different rows differ, as a share of the largest."""
    of_rows = weights.detach().reshape(len(weights), -1).sum(1, dtype=torch.float32)
    tiny = torch.finfo(torch.float32).tiny
    return _on_host((of_rows.max() - of_rows.min()) / of_rows.abs().max().clamp(min=tiny))


def have_unequal_weights(terms: Sequence[Term]) -> bool:
    """Return whether constant weights of a loss's rows differ; waits for the device."""
    return any(each.difference is not None and float(each.difference) > _TOLERANCE for each in terms)


def _spread(weights: Tensor) -> Factor:
    """Return 1 plus the spread of weights that were normalized by their own sum, which the graph does not hold.

    Such weights add up to 1, or to their number, in each micro-batch, whatever they were before. Equal weights give 1.
    """
    total, number = weights.sum(), weights.numel()
    is_normalized = ((total - 1).abs() < _TOLERANCE) | ((total - number).abs() < _TOLERANCE * number)
    return _on_host(1 + (weights.max() - weights.min()) * number * is_normalized)


def _read(node: Any) -> tuple[Factor | None, bool]:
    """Return a node's divisor, and whether it reduces many numbers to one."""
    name = node.name().rstrip("0123456789")
    if name == "MeanBackward":
        numel = saved(node, "self_sym_numel")
        return (None if _keeps_rows(node) else float(numel) / math.prod(inputs_of(node)[0].shape)), True
    if name in {"NllLossBackward", "NllLoss2DBackward"}:
        is_mean = saved(node, "reduction") == 1
        return (_on_host(saved(node, "total_weight")) if is_mean else None), True
    if name.endswith("LossBackward") or name.startswith("BinaryCrossEntropy"):
        is_mean = saved_or_none(node, "reduction") == 1
        return (float(saved(node, "self").numel()) if is_mean else None), True
    metadata: Any = inputs_of(node)
    is_one_number = len(metadata) == 1 and not metadata[0].shape  # with one row, vectors have one element
    if name in {"DivBackward", "MulBackward"}:
        other = saved_or_none(node, "other")
        if isinstance(other, Tensor):
            if other.numel() != 1 or (other.dim() > 0 and not is_one_number):
                return None, name == "MulBackward"  # elements of several rows, each with its own weight
            other = _on_host(other.detach().reshape(()))
        elif not isinstance(other, (int, float)):
            return None, name == "MulBackward"
        return (other if name == "DivBackward" else 1.0 / other if _is_not_zero(other) else None), False
    return None, not is_one_number or name.startswith(("Norm", "Linalg", "Dot"))


def _keeps_rows(node: Any) -> bool:
    """Return whether a mean is taken within each row, so that it does not divide by the number of rows."""
    dims, number = saved_or_none(node, "dim"), len(saved_or_none(node, "self_sym_sizes") or ())
    return bool(dims) and 0 not in dims and (-number) % 2**64 not in dims  # dimensions are stored unsigned


def _on_host(value: Factor) -> Factor:
    """Convert a number to a float if this needs no synchronization."""
    return value if not isinstance(value, Tensor) else float(value) if value.is_cpu else value.detach()


def _is_not_zero(number: Factor) -> bool:
    return isinstance(number, Tensor) or number != 0


class _Values:
    """Values on an accelerator, which are read one call later, to avoid a synchronization."""

    def __init__(self) -> None:
        self._pending: Tensor | None = None
        self._arrival: torch.Event | None = None

    def exchange(self, table: list[list[Factor]]) -> list[list[float]] | None:
        """Hand over a step's values, and return those of the step before; None if there are none."""
        previous, is_there = self._pending, self._arrival is None or self._arrival.query()
        if not is_there:  # the host is more than a step ahead: skip this group
            return None
        device = next(each.device for line in table for each in line if isinstance(each, Tensor) and not each.is_cpu)
        values = _stacked(table, device)
        self._pending = torch.empty(values.shape, dtype=values.dtype, pin_memory=device.type == "cuda")
        self._pending.copy_(values, non_blocking=True)
        self._arrival = torch.Event(device)
        self._arrival.record()
        return None if previous is None else previous.tolist()


class DivisorWatch:
    """Detects micro-batches whose losses were divided by something not proportional to their weights.

    Attributes:
        has_unequal_weights: Whether rows had constant weights that differ in the last step whose values are there.
    """

    def __init__(self) -> None:
        self._divisors, self._differences = _Values(), _Values()
        self.has_unequal_weights = False

    def is_uneven(self, group: Sequence[Note], *, compares_equal: bool = False) -> bool:
        """Return whether the divisors of one step's micro-batches are not proportional to their weights.

        Values on an accelerator are read one call later, to avoid a synchronization.

        Args:
            group: The micro-batches.
            compares_equal: Whether weights that differ are wrong for means over equal numbers of items.
        """
        self.has_unequal_weights = False
        if len(group) < 2 or any(isinstance(each, Tensor) and type(each) is not Tensor for each, _ in group):
            return False
        with without_modes(), torch.no_grad():
            differences = {*map(_DIFFERENCE, itertools.chain.from_iterable(map(_TERMS, group)))} - {None}
            if differences:
                self._note_differences(sum(differences))
            columns = [[_divisor(each, number) for number, each in enumerate(terms)] for terms in _in_step(group)]
            if not columns:
                return False
            is_of_means = compares_equal and _are_means(group, columns)
            table: list[list[Factor]] = [[weight for weight, _ in group], *columns]
            if any(isinstance(each, Tensor) and not each.is_cpu for line in table for each in line):
                previous = self._divisors.exchange(table)
                # The step before had the same kind of loss.
                return previous is not None and _is_uneven(previous, is_of_means=is_of_means)
            return _is_uneven([[float(each) for each in line] for line in table], is_of_means=is_of_means)

    def _note_differences(self, total: Factor) -> None:
        is_there = not isinstance(total, Tensor) or total.is_cpu
        values = [[float(total)]] if is_there else self._differences.exchange([[total]])
        self.has_unequal_weights = values is not None and values[0][0] > _TOLERANCE


def _stacked(table: Sequence[Sequence[Factor]], device: torch.device | None = None) -> Tensor:
    """Stack numbers and 0-dim tensors into one matrix."""
    lines = [[torch.as_tensor(each, dtype=torch.float32) for each in line] for line in table]
    return torch.stack(
        [torch.stack([each.reshape(()).to(device, non_blocking=True) for each in line]) for line in lines]
    )


class WeightCheck:
    """Warns of accumulator groups whose gradient is not that of their objective, as far as the graphs show.

    Args:
        accumulation_steps: Micro-batches of a group.
        objective: As in the accumulator. For ``"sum"`` only means over more or less than 1 are read, which are
            multiplied by it; other losses are added up as they are.

    Attributes:
        accumulation_steps: See above.
    """

    def __init__(self, accumulation_steps: int, objective: Literal["mean", "sum"]) -> None:
        self.accumulation_steps, self._objective = accumulation_steps, objective
        self._divisors, self._sums = DivisorWatch(), _Values()
        self._group: list[Note] = []
        self._num_uncounted = 0  # micro-batches of the group that came without a count
        self._has_warned_of_weights = self._has_checked_norms = False

    def read(self, loss: Tensor, weight: Factor, *, is_sum: bool = False) -> Note | None:
        """Read a micro-batch's loss before backward frees its graph; None if there is nothing more to report.

        Args:
            loss: The loss.
            weight: Its weight.
            is_sum: Whether the user declared it as the sum over its weight.
        """
        if self._objective == "sum" and (is_sum or weight == 1):
            return None
        if self._group and not self._has_checked_norms:
            self._has_checked_norms = True
            if normalizes_over_batch(loss):
                warn_user(
                    "GradientAccumulator: a batch normalization in training mode sees the statistics of each "
                    "micro-batch, so the group's gradient is not that of one large batch. Use "
                    f"{NORMS_OF_A_ROW}, or freeze the statistics with .eval()."
                )
        if self._has_warned_of_weights:
            return None
        # Without a split check, it is unknown whether counts follow normalized weights.
        terms = divisors(loss, counts_sums=True)
        is_weighted = [each.operators[-1] == _WEIGHTS for each in terms]
        bare = [each._replace(operators=each.operators[:-1], factors=each.factors[:-1]) for each in terms]
        terms = tuple(bare[k] if is_weighted[k] else each for k, each in enumerate(terms))
        return weight, divisors_of_sum(terms, weight) if is_sum else terms

    def add(self, note: Note, *, has_count: bool) -> None:
        """Add a micro-batch whose backward is done, and which came with a count or without one."""
        self._group.append(note)
        self._num_uncounted += not has_count

    def discard(self) -> None:
        """Forget the current group."""
        self._group.clear()
        self._num_uncounted = 0

    def end_group(self) -> None:
        """Warn, once, if the group's losses are sums, or were divided by something not proportional to the weights."""
        found = "" if self._has_warned_of_weights else self._found()
        if found:
            self._has_warned_of_weights = True
            warn_user(f"GradientAccumulator: {found}")

    def _found(self) -> str:
        """Return what is wrong with the group, and the way out; empty if nothing is."""
        is_mean, number = self._objective == "mean", self.accumulation_steps
        if is_mean and _are_divided(self._group, number):
            return (
                f"each loss of a group was divided by {number}, its number of micro-batches. The accumulator does that "
                f"by itself, so gradients are {number} times smaller than the whole batch's. Way out: remove "
                f"`/ {number}` from the loss. If it is the loss's own divisor, pass check_weights=False."
            )
        if is_mean and 0 < self._num_uncounted < len(self._group) and _have_counts(self._group):
            return (
                "some micro-batches of a group came with a count and others without one, which is a count of 1: those "
                "hardly weigh. Way out: call accumulator.backward(loss, count=n) for each of them, where n is the "
                "divisor of the loss; if 1 is meant, write count=1."
            )
        to_sum = "call accumulator.backward(loss, reduction='sum')"
        if is_mean:
            to_sum = f"build GradientAccumulator(optimizer, accumulation_steps={number}, objective='sum') and {to_sum}"
        if _are_sums(self._group, self._sums, is_mean=is_mean):
            if not is_mean:
                return (
                    "the group's gradient is not the sum's. The loss is a sum over rows, and is multiplied by the "
                    f"count that comes with it, as a mean is: {to_sum}."
                )
            return (
                f"the group's gradient is neither the mean's nor the sum's. {SUM_IS_AVERAGED}: for the mean over all "
                "rows call accumulator.backward(loss, count=n, reduction='sum'); for the gradient of the sum "
                f"{to_sum}."
            )
        if len(self._group) > 1 and _lacks_terms(self._group):
            return (
                "some losses of a group are the mean of fewer things than others, as where a mean over selected rows "
                "is left out because there are none: then the group's gradient is not the whole batch's. Way out: "
                f"divide each sum by its number in the whole group, also where it is 0, and {to_sum}. If each "
                "micro-batch is a task of its own, pass check_weights=False."
            )
        if self._divisors.is_uneven(self._group, compares_equal=is_mean):
            return (
                "the losses of a group were means over different numbers of items (rows, valid tokens, class weights) "
                f"than count= and reduction= say: the group's gradient is not the {self._objective} over its "
                "items. Call accumulator.backward(loss, count=n), where n is the divisor of the loss. If it is a sum "
                f"of means over different things, divide each of their sums by its number in the whole group, and "
                f"{to_sum}. If the counts are weights of your own, pass check_weights=False."
            )
        return ""


def _have_counts(group: Sequence[Note]) -> bool:
    """Return whether a weight is more than to take a micro-batch or to leave it out."""
    return any(isinstance(weight, Tensor) or weight not in (0, 1) for weight, _ in group)


def _are_divided(group: Sequence[Note], number: int) -> bool:
    """Return whether the last operator of each loss divided it by this number."""
    terms = [each for _, terms in group for each in terms]
    return number > 1 and bool(terms) and all(_is_divided(each, number) for each in terms)


def _is_divided(term: Term, number: int) -> bool:
    is_scaled = term.operators[0].startswith(("DivBackward", "MulBackward"))
    factor = term.factors[0] if is_scaled and term.factors else None
    return isinstance(factor, (int, float)) and math.isclose(factor, number, rel_tol=_TOLERANCE)


def _are_sums(group: Sequence[Note], values: _Values, *, is_mean: bool) -> bool:
    """Return whether the losses are sums over as many numbers as their weights, and not divided by them.

    A sum with a constant factor counts if the weights differ; if they are equal, the factor may be their divisor.
    Without counts, all weights are 1: then a sum counts if it is over different numbers with the same factor.

    Args:
        group: The micro-batches.
        values: Takes the numbers on an accelerator, which are read one call later.
        is_mean: Whether the group is averaged; otherwise one micro-batch tells.
    """
    group = [(weight, terms) for weight, terms in group if weight != 0]
    weights = [weight for weight, _ in group if not isinstance(weight, Tensor) and weight >= 1]
    if len(weights) < max(2 if is_mean else 1, len(group)):
        return False
    sums = [column for column in _in_step(group) if _is_sum(column)]
    if max(weights) == 1:
        return any(len({each.nums_summed[0] for each in column}) > 1 for column in sums)
    is_ragged = len(set(weights)) > 1
    if not is_ragged and any(each.factors or not each.nums_summed for _, terms in group for each in terms):
        return False
    return _are_over_weights(sums, weights, values)


def _are_over_weights(sums: Sequence[Sequence[Term]], weights: Sequence[float], values: _Values) -> bool:
    """Return whether a sum is over as many numbers as the weights, or a whole multiple of it, in each micro-batch."""
    lines = [list(line) for column in sums for line in zip(*(each.nums_summed for each in column), strict=False)]
    on_device = [line for line in lines if any(isinstance(each, Tensor) for each in line)]
    on_host = [line for line in lines if not any(isinstance(each, Tensor) for each in line)]
    if any(_is_multiple(line, weights) for line in on_host):
        return True
    with without_modes(), torch.no_grad():
        found = values.exchange([[*weights], *on_device]) if on_device else None
    return found is not None and any(_is_multiple(line, found[0]) for line in found[1:])


def _is_sum(column: Sequence[Term]) -> bool:
    """Return whether a term is a sum with the same constant factor in each micro-batch."""
    is_constant = not any(isinstance(factor, Tensor) for each in column for factor in each.factors)
    return is_constant and len({each.factors for each in column}) == 1 and all(each.nums_summed for each in column)


def _is_multiple(numbers: Sequence[Any], weights: Sequence[Any]) -> bool:
    """Return whether numbers are the same whole multiple of their weights; 0 is none."""
    multiple = round(numbers[0] / weights[0])
    return multiple > 0 and all(
        math.isclose(number, multiple * weight, rel_tol=_TOLERANCE)
        for number, weight in zip(numbers, weights, strict=True)
    )


def _divisor(term: Term, number: int) -> Factor:
    """Return a micro-batch's divisor; for normalized weights, whose divisor is unknown, a different one in each."""
    result = term.summed_over
    for factor in term.factors:
        result = result * factor
    if term.operators[-1] == _WEIGHTS:
        result = result * (1 + (term.factors[-1] - 1) * number)
    return result


def _in_step(group: Sequence[Note]) -> list[list[Term]]:
    """Match terms across micro-batches, if each has as many of one kind: those at the same place belong together.

    As many as there are items, or several times as many, come from a loop over samples and are weighted like the
    samples: a mean of their means. Without counts, the number of items is unknown.
    """
    found = [tuple(map(_OPERATORS, terms)) for _, terms in group]
    if len(found[0]) == 1 and found.count(found[0]) == len(found) and not _has_additions(found[0][0]):
        return [[terms[0] for _, terms in group]]  # nearly always, without counting
    kinds = list(map(Counter, found))
    columns: list[list[Term]] = []
    for kind, number in kinds[0].items():
        if not all(each[kind] == number for each in kinds):
            continue
        is_of_samples = (
            any(_may_be_of_samples(number, weight) for weight, _ in group) if number > 1 else _in_loop(kind, group)
        )
        if not is_of_samples:
            of_kind = [each for _, terms in group for each in terms if each.operators == kind]
            columns += [of_kind[place::number] for place in range(number)]
    return columns


def _in_loop(kind: tuple[str, ...], group: Sequence[Note]) -> bool:
    """Return whether a term is one of those that a loop over samples adds up: each has other additions above it."""
    if not _has_additions(kind):  # most losses
        return False
    alike = _without_additions(kind)
    numbers = [each[alike] for each in _divided_terms(group)]
    return all(numbers) and _are_of_samples(numbers, group)


def _lacks_terms(group: Sequence[Note]) -> bool:
    """Return whether some micro-batches lack means that others have, and items do not tell why.

    A mean over selected items is left out where there are none: its gradient should then count more in the others. A
    loop over samples has as many terms as there are samples.
    """
    found = [list(map(_OPERATORS, terms)) for _, terms in group]
    if found.count(found[0]) == len(found):  # nearly always
        return False
    kinds = _divided_terms(group)
    if not all(kinds) or any(isinstance(weight, Tensor) or weight <= 1 for weight, _ in group):
        return False
    for kind in set().union(*kinds):
        numbers = [each[kind] for each in kinds]
        if len(set(numbers)) > 1 and not _are_of_samples(numbers, group):
            return True
    return False


def _divided_terms(group: Sequence[Note]) -> list[Counter[tuple[str, ...]]]:
    """Count the terms of each kind that are divided by something, in each micro-batch."""
    return [Counter(_without_additions(each.operators) for each in terms if each.factors) for _, terms in group]


def _has_additions(operators: tuple[str, ...]) -> bool:
    return any(each.startswith("AddBackward") for each in operators)


def _without_additions(operators: tuple[str, ...]) -> tuple[str, ...]:
    """Return the kind of a term, whatever place it has in a sum that Python adds up one by one."""
    return tuple(each for each in operators if not each.startswith("AddBackward"))


def _are_of_samples(numbers: Sequence[int], group: Sequence[Note]) -> bool:
    """Return whether each micro-batch has one or several terms of a kind for each of its items."""
    weights = [weight for weight, _ in group]
    return all(
        not isinstance(weight, Tensor) and weight > 1 and number % weight == 0
        for number, weight in zip(numbers, weights, strict=True)
    )


def _may_be_of_samples(num_terms: int, weight: Factor) -> bool:
    return isinstance(weight, Tensor) or weight <= 0 or num_terms % weight == 0


def _are_means(group: Sequence[Note], columns: Sequence[object]) -> bool:
    """Return whether all terms of the losses are means, and compared: one with another divisor could follow counts."""
    return all(len(terms) == len(columns) and all(each.is_mean for each in terms) for _, terms in group)


def _is_uneven(table: Sequence[Sequence[float]], *, is_of_means: bool) -> bool:
    """Return whether a divisor changes between micro-batches, but not in proportion to the weights.

    Constant terms (a penalty on the weights) are right with any weights, unless all terms are means and constant.
    """
    weights, *lines = table
    changing = [line for line in lines if max(line) - min(line) > _TOLERANCE * max(map(abs, line), default=0.0)]
    if is_of_means and not changing:
        given = [each for each in weights if each] or [0.0]
        return max(given) - min(given) > _TOLERANCE * max(given)
    return any(not _is_proportional(line, weights) for line in changing)


def _is_proportional(one: Sequence[float], other: Sequence[float]) -> bool:
    total, other_total = sum(one), sum(other)
    if not (total and other_total):
        return False
    return all(abs(a / total - b / other_total) <= _TOLERANCE for a, b in zip(one, other, strict=True))
