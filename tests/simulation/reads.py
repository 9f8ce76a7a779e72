"""Steps that read numbers from tensors, as people write them. No test module: pytest would rewrite their asserts."""

import contextlib
import copy
import json
import math
import warnings

import numpy as np
import torch
from torch.nn import functional as F

import memkit as mk

LOG = []
BEST = {"loss": math.inf}


class Meter:
    def __init__(self):
        self.total, self.count, self.history = 0.0, 0, []

    def update(self, value, count=1):
        self.total += value * count
        self.count += count
        self.history.append(value)

    @property
    def average(self):
        return self.total / max(self.count, 1)


class NotPositiveError(ArithmeticError):
    pass


def count_of(x):
    return x.long().max().item() + 1


# What the code decides with a number or a truth value: none of these may be silent.
def any_of_a_mask(m, x):
    y = m(x)
    if (y > 0).any():
        y = m(m(y))
    return y.sum()


def a_mask_alone(m, x):
    y = m(x)
    if (y > 0).all():
        return y.sum()
    return (y * y).sum()


def not_any(m, x):
    y = m(x)
    return y.sum() if not (y > 0).any() else y.square().sum()


def bool_of(m, x):
    flag = bool((m(x) > 0).any())
    return m(m(x)).sum() if flag else m(x).sum()


def and_then(m, x):
    y = m(x)
    return ((y > 0).any() and y.sum()) or y.square().sum()


def item_as_size(m, x):
    n = m(x).long().max().item()
    return torch.ones(n, 8).to(x.device).sum() + m(x).sum()


def int_plus_one(m, x):
    n = int(m(x).max()) + 1
    return (torch.ones(n, 8, device=x.device) @ m.weight).sum()


def item_of_a_float(m, x):
    return torch.ones(math.ceil(m(x).max().item() * 4), 8, device=x.device).sum() + m(x).sum()


def rounded(m, x):
    return torch.ones(round(m(x).mean().item()), 8, device=x.device).sum() + m(x).sum()


def list_of_sizes(m, x):
    parts = m(x).split(m(x)[:, 0].long().tolist())
    return sum(part.sum() for part in parts)


def loop_over_range(m, x):
    for _ in range(m(x).long().max().item()):
        x = m(x)
    return m(x).sum()


def loop_in_a_helper(m, x):
    y = m(x)
    for _ in range(count_of(y)):
        y = m(y)
    return y.sum()


def slice_by_a_tensor(m, x):
    return m(x)[: m(x).long().max()].sum()


def slice_by_an_item(m, x):
    n = m(x).long().max().item()
    return m(x)[:n].sum()


def index_of_a_list(m, x):
    return [m(x).sum(), m(m(x)).sum()][m(x).long().max().item()]


def size_at_a_place(m, x):
    sizes = torch.tensor([1, 2, 3, 4])
    return m(x).repeat(int(sizes[m(x)[:, 0].argmax()]), 1).sum()


def arange(m, x):
    return torch.arange(m(x).long().max().item(), device=x.device).float().sum() + m(x).sum()


def one_hot(m, x):
    return F.one_hot(m(x).long().abs()).float().sum() * 0 + m(x).sum()


def while_loop(m, x):
    y = m(x)
    while y.abs().max().item() > 2:
        y = m(y)
    return y.sum()


def while_tensor(m, x):
    y = m(x)
    while (y > 0).any():
        y = m(y)
    return y.sum()


def threshold(m, x):
    loss = m(x).square().mean()
    return loss if loss.item() < 3 else m(m(x)).sum()


def threshold_of_a_sum(m, x):
    meter = Meter()
    for _ in range(3):
        meter.update(m(x).mean().item())
    return m(x).sum() if meter.average < 0.5 else m(m(x)).sum()


def perplexity(m, x):
    loss = m(x).square().mean()
    return m(x).sum() if math.exp(loss.item()) > 20 else m(m(x)).sum()


def logarithm(m, x):
    bits = math.log(m(x).square().mean().item())
    return m(x).sum() if bits > 0.5 else m(m(x)).sum()


def through_numpy(m, x):
    return m(x).sum() if np.mean([m(x).mean().item()]) > 20 else m(m(x)).sum()


def numpy_function(m, x):
    return m(x).sum() if np.exp(m(x).mean().item()) > 20 else m(m(x)).sum()


def float_compared(m, x):
    return m(x).sum() if float(m(x).mean()) > 20 else m(m(x)).sum()


def truth_of_a_number(m, x):
    return m(x).sum() if m(x).mean().item() else m(m(x)).sum()


def contained(m, x):
    return m(x).sum() if 3 in m(x) else m(m(x)).sum()


def kept_on_an_object(m, x):
    meter = Meter()
    meter.count = m(x).long().max().item()
    return m(x).repeat(meter.count, 1).sum()


def dictionary(m, x):
    sizes = {"n": m(x).long().sum().item()}
    return m(x).expand(sizes["n"], -1, -1).sum()


def stored_and_returned(m, x):
    LOG.append(count_of(m(x)))
    return m(x).sum()


def copied(m, x):
    n = copy.deepcopy(m(x).mean().item())
    return m(x).sum() if n > 2 else m(m(x)).sum()


def equal(m, x):
    return m(x).sum() if torch.equal(m(x), x) else m(m(x)).sum()


def text_compared(m, x):
    loss = m(x).mean()
    return m(m(x)).sum() if f"{loss.item():.2f}" < "0.90" else loss


def text_of_a_variable(m, x):
    loss = m(x).mean().item()
    shown = "%.2f" % loss  # noqa: UP031 - which calls no method of the number
    return m(m(x)).sum() if shown.startswith("0") or shown < "0.90" else m(x).sum()


def text_as_a_number(m, x):
    return torch.zeros(int(f"{m(x).sum().item():.0f}")).sum() + m(x).sum()


def text_of_a_tensor(m, x):
    loss = m(x).mean()
    return m(m(x)).sum() if "nan" in str(loss) else loss


def text_of_a_history(m, x):
    meter = Meter()
    meter.update(m(x).mean().item())
    return m(m(x)).sum() if "{:.2f}".format(meter.history[0]) == "1.00" else m(x).sum()  # noqa: UP032 - as people do


def caught_error(m, x):
    y = m(x)
    try:
        if y.mean().item() < 0.9:
            raise ValueError("not yet converging")  # noqa: TRY301 - as people do
    except ValueError:
        return m(y).sum()
    return y.sum()


def caught_assertion(m, x):
    y = m(x)
    try:
        assert (y > -100).all()
    except (RuntimeError, AssertionError):
        y = m(y)
    return y.sum()


def caught_difference(m, x):
    y = m(x)
    with contextlib.suppress(Exception):
        torch.testing.assert_close(y, x)
        return y.sum()
    return m(y).sum()


def positive(y):
    if not (y > 0).all():
        raise NotPositiveError
    return y.log()


def caught_in_the_caller(m, x):
    try:
        return positive(m(x)).sum()
    except ArithmeticError:
        return m(m(x)).sum()


DECIDING = (
    any_of_a_mask, a_mask_alone, not_any, bool_of, and_then, item_as_size, int_plus_one, item_of_a_float, rounded,
    list_of_sizes, loop_over_range, loop_in_a_helper, slice_by_a_tensor, slice_by_an_item, index_of_a_list,
    size_at_a_place, arange, one_hot, while_loop, while_tensor, threshold, threshold_of_a_sum, perplexity, logarithm,
    through_numpy, numpy_function, float_compared, truth_of_a_number, contained, kept_on_an_object, dictionary,
    stored_and_returned, copied, equal, text_compared,
    text_of_a_variable, text_as_a_number, text_of_a_tensor, text_of_a_history, caught_error, caught_assertion,
    caught_difference, caught_in_the_caller,
)  # fmt: skip


# What ordinary steps do with numbers: the verdict stays.
def logged(m, x):
    loss = m(x).square().mean()
    print(f"loss {loss.item():.3f} {loss:.3f}", loss.item(), f"{float(loss):.1e} {loss}")
    print("loss %.2f" % loss.item(), str(loss.item()), repr(round(loss.item(), 2)))  # noqa: UP031 - as people write
    return loss


def appended(m, x):
    loss = m(x).square().mean()
    LOG.append(loss.item())
    BEST["last"] = loss.item()
    return loss


def averaged(m, x):
    meter, loss = Meter(), m(x).square().mean()
    meter.update(loss.item(), len(x))
    print(f"average {meter.average:.3f}", json.dumps({"loss": meter.average}), round(meter.average, 3))
    return loss


def accuracy(m, x):
    y, correct, total = m(x), 0, 0
    for _ in range(2):
        correct += (y.argmax(1) == 0).sum().item()
        total += int((y.argmax(1) >= 0).sum())
    print(f"accuracy {100.0 * correct / total:.1f}%")
    return y.sum()


def norm_clipped(m, x):
    loss = m(x).sum()
    (grad,) = torch.autograd.grad(loss, m.weight, create_graph=True)
    norm = torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0, error_if_nonfinite=True)
    print(norm.item() if isinstance(norm, torch.Tensor) else norm)
    return loss + grad.sum() * 0


def not_a_number(m, x):
    loss = m(x).square().mean()
    if torch.isnan(loss):
        raise FloatingPointError("the loss is NaN")
    if not torch.isfinite(loss) or torch.isinf(loss).any():
        raise FloatingPointError("the loss is infinite")
    if not math.isfinite(loss.item()) or math.isnan(float(loss)):
        raise SystemExit(1)
    assert not (loss != loss).any()
    return loss


def watched_for_anomalies(m, x):
    with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(True):
        warnings.simplefilter("ignore")
        (grad,) = torch.autograd.grad(m(x).sum(), m.weight)
    return m(x).sum() + grad.sum()


def skipped_if_not_finite(m, x):
    loss = m(x).square().mean()
    return loss.nan_to_num() if (torch.isnan(loss) | torch.isinf(loss)) else loss


def checked(m, x):
    y = m(x)
    if (y > 1e9).any():
        raise ValueError("too large")
    assert (y.abs() < 1e9).all(), f"too large: {y.max().item()}"
    if y.max().item() > 1e9:
        raise ValueError("too large")
    if not (y < 1e9).all():
        print("too large")
        raise ValueError("too large")
    return y.sum()


def checked_where_other_errors_are_caught(m, x):
    y = m(x)
    try:
        if y.max().item() > 1e9:
            raise NotPositiveError  # noqa: TRY301 - as above
        assert (y.abs() < 1e9).all()
        positive(y.exp())
    except (torch.OutOfMemoryError, KeyError):
        y = m(m(x))
    except NotPositiveError as error:
        raise ValueError("too large") from error
    return y.sum()


def written_down(m, x):
    loss = m(x).mean()
    shown = f"{loss.item():.3f} {loss:.2e}"
    LOG.append(shown if len(shown) < 80 else shown[:80])
    print(str(loss.item()).ljust(10), repr(loss), {f"{loss.item():.1f}": shown}, "%.3f" % loss.item())  # noqa: UP031
    return loss


def compared(m, x):
    y = m(x)
    same = y.clone()
    assert torch.allclose(y, same), "differs"
    assert torch.equal(y, same)
    if not torch.equal(y, same):
        raise ValueError("differs")
    torch.testing.assert_close(y, same)
    return y.sum()


def scaled(m, x):
    scale = m(x).abs().max().item()
    return m(x).sum() / scale + m(x).sum() * scale


def weighted(m, x):
    y = m(x)
    valid = y > 0
    print(mk.Loss(sum=y.sum(), count=valid.sum().item()).count)
    return mk.Loss(sum=y.sum(), count=int(valid.sum()) + 1)


def printed_by_numpy(m, x):
    print(m(x).detach().cpu().numpy(), m(x).tolist())
    return m(x).sum()


def best_row(m, x):
    y = m(x)
    best = y[:, 0].argmax()
    y[0, best] = y[1, best]
    return y[best].sum() + y[:1][y[:1, 0].argmax()].sum()  # the last one has one row


ORDINARY = (
    logged, appended, averaged, accuracy, norm_clipped, not_a_number, watched_for_anomalies, skipped_if_not_finite,
    checked, checked_where_other_errors_are_caught, written_down, compared, scaled, weighted, printed_by_numpy,
    best_row,
)  # fmt: skip
