"""Verdict on whether a batch may be split, its causes and the advice for each."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from memkit._core.printable import list_some
from memkit._torch.modules import spectral_norms_among
from memkit.train.divisors import NORMS_OF_A_ROW, SUM_IS_AVERAGED

_ADVICE = {
    "modules": f"In training mode {{names}} would see the statistics of each micro-batch: use {NORMS_OF_A_ROW}, or "
    "freeze the statistics with .eval(); where its forward trains parameters of its own, keep the batch whole.",
    "mixing": "In training mode {names} would compute from each micro-batch what they compute from the whole batch (a "
    "mean over its rows, or a choice by it): call .eval() on them where training does not need that mode, compute it "
    "from each row by itself, or keep the batch whole: one micro-batch, and on_oom='raise'.",
    "rows": "The loss, or the model, compares or mixes the rows of the batch: where it is a loss over embeddings, "
    "memkit.train.cached_backward gives its exact gradient; where rows are padded to the longest one of each part, pad "
    "them to one length before the split, mask the padding in means and statistics, or replace GroupNorm by LayerNorm "
    "over the channels of each position; where it adds up means over different things (tokens and "
    "rows, or several tasks), divide each by the whole batch's count, passed along in the batch; where it adds a "
    "penalty on the weights to a sum over n rows, return mk.Loss(sum=total * num_rows + penalty * n, count=n), where "
    "total is the sum without the penalty, and num_rows the number of rows of the whole batch, or, for the mean over n "
    "items, mk.Loss(sum=total + penalty * n, count=n); or keep the batch whole: one micro-batch, and on_oom='raise'.",
    "first": "The first forward sets {names} from the rows that it gets, so parts of the batch would set other values "
    "than the whole: run the model once on a whole batch before training, `with torch.no_grad(): model(x)`.",
    "weights": "The loss is a mean over something other than rows (valid tokens, class weights): return "
    "mk.Loss(mean=loss, count=n) from loss_fn, where n is the divisor of the mean; in a loop of your own, call "
    "trainer.backward(loss, count=n).",
    "counted": "The count that loss_fn gives is not the divisor of its mean (one with + 1e-5 is another number): "
    "return mk.Loss(sum=total, count=n), where total is the sum before the division and n the number of what it sums; "
    "in a loop of your own, call trainer.backward(total, count=n, reduction='sum').",
    "not finite": "The loss of a part is not finite, where that of the batch is: a variance of a single row is 0 / 0, "
    "and so is a mean over no items. Take such statistics within each row, give a part without items the count 0, or "
    "keep the batch whole: one micro-batch, and on_oom='raise'.",
    "sum": f"{SUM_IS_AVERAGED}: return its mean over the rows; or, for the "
    "gradient of the sum itself, mk.Loss(sum=loss * num_rows, count=n), where num_rows is the number of rows of the "
    "whole batch and n that of the part; memkit.SplitLoss(reduction='sum') adds up the parts.",
    "state": "Each forward changes state that the loss depends on ({names}), so it changes once per micro-batch "
    "instead of once per batch: update it {how}, or keep the batch whole.",
    "scale": "The backward is not linear in the gradient that comes in, as that of a hook which clamps an activation's "
    "gradient, or of an autograd.Function which clips it; and how much all counts are together is known only after the "
    "last part, so the gradient comes into each part at another scale than into the whole batch. Let each row carry "
    "the whole batch's number of items per row, and return a mean over rows, which comes in at the whole's scale: "
    "`return (losses_of_rows / batch['items_per_row']).mean()`, without a count; or clip the parameters' gradients "
    "instead (max_grad_norm), or keep the batch whole: one micro-batch, and on_oom='raise'.",
    "hooks": "Hooks on parameters see the gradient of each micro-batch, or the sum so far, and change it otherwise "
    "than that of the whole: let them work on .grad before the step, by optimizer.register_step_pre_hook(...), or clip "
    "with max_grad_norm; SplitLoss runs them once per batch.",
}


_SPECTRAL_NORMS = {
    "parametrization": "a layer in torch.nn.utils.parametrizations.spectral_norm, before each step: "
    "layer.parametrizations.train(); layer.weight; layer.parametrizations.eval()",
    "hook": "layers in torch.nn.utils.spectral_norm, before each step: layer.train() on each; with torch.no_grad(): "
    "network(x[:1]), a forward of any row; layer.eval() on each",
}


def how_to_update(state: Iterable[str]) -> str:
    """Return when to update state that forwards change, so that each step changes it once."""
    how, ways = "once per step, outside of forward", [_SPECTRAL_NORMS[form] for form in spectral_norms_among(state)]
    return f"{how} ({'; '.join(ways)})" if ways else how


@dataclass(frozen=True, slots=True)
class SplitVerdict:
    """Verdict on whether the gradients of a batch's parts add up to the gradient of the batch.

    Attributes:
        exact: Whether they do; None if it could not be checked, and `reason` says why.
        error: Largest relative error of a parameter's gradient when some rows are split.
        modules: Modules in training mode that mix the rows: found at fault, or suspected if ``exact`` is None.
        state: State that a forward changes and that affects the loss: names of buffers and attributes, if they were
            found. If `loss` is ``"rows"``, what the first forward alone sets, from the rows that it gets.
        loss: Any other cause. ``"rows"``: the loss, or the model in evaluation mode too, mixes the rows.
            ``"weights"``: the loss is a mean over something other than rows. ``"sum"``: it is a sum over them.
            ``"state"``: see `state`. ``"hooks"``: hooks on parameters treat the parts of a gradient differently from
            the whole. ``"scale"``: the loss comes with a count, and its backward is not linear in the gradient that
            comes in.
        reason: Why it was not checked.
        is_out_of_memory: Whether it was not checked because memory ran out.
        is_partial: Whether memory ran out where the losses of two of the step's own parts were to be compared: fewer
            rows decide.
        is_permuted: Whether it was not checked because the step permutes the rows at random: parts mix other rows.
        is_uninformative: Whether the gradient of the checked rows is zero or not finite; another batch may show more.
        has_branches: Whether Python branches on values of tensors, so that another batch may take another path.
        kind: The operators from the loss down to its reductions; they distinguish one loss from another.
        buffers: Buffers that the parts leave with other values than the whole batch, statistics that are kept outside
            of buffers, and gradients of other networks whose backward the loss function runs itself. The gradient of
            this batch does not depend on them, but what the training does with them later may.
        has_count: Whether the loss comes with a count.
        mixing: Those of `modules` that do not look like a normalization.
        has_weights: Whether the rows that were checked have constant weights in the loss, and these differ.
    """

    exact: bool | None
    error: float | None = None
    modules: tuple[str, ...] = ()
    state: tuple[str, ...] = ()
    loss: Literal["rows", "weights", "sum", "state", "hooks", "scale"] | None = None
    reason: str = ""
    is_out_of_memory: bool = False
    is_partial: bool = False
    is_permuted: bool = False
    is_uninformative: bool = False
    has_branches: bool = False
    kind: tuple[tuple[str, ...], ...] = ()
    buffers: tuple[str, ...] = ()
    has_count: bool = False
    mixing: tuple[str, ...] = ()
    has_weights: bool = False

    def __bool__(self) -> bool:
        return self.exact is True  # for `if check_split(...):`

    @property
    def advice(self) -> str:
        """Suggested fixes, one sentence per cause; empty if there are none."""
        names = ", ".join(self.state) or "something that memkit cannot name"
        kinds = {"modules": [each for each in self.modules if each not in self.mixing], "mixing": self.mixing}
        of_modules = [_ADVICE[kind].format(names=list_some(found)) for kind, found in kinds.items() if found]
        cause: str | None = self.loss
        if cause == "rows" and self.state:
            cause = "first"
        if cause == "weights" and self.has_count:
            cause = "not finite" if self.error is not None and math.isinf(self.error) else "counted"
        of_loss = _ADVICE[cause].format(names=names, how=how_to_update(self.state)) if cause else ""
        return " ".join(filter(None, (*of_modules, of_loss)))
