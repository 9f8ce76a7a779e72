"""The truth: a step of the plain loop over the whole batch, and one over given parts, without memkit."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from tests.search.batches import CONTAINERS, Fields, cast, take
from tests.search.losses import LOSSES
from tests.search.models import Net, read_output, transfer
from tests.search.specs import Spec, Step
from tests.search.worlds import Feed, Told, World

Gradients = dict[str, torch.Tensor]

# A step is unequal where a parameter's gradient is off by more than this share of its norm, or by ten times what the
# plain step in the same precision is off.
FLOORS = {torch.float64: 1e-6, torch.float32: 2e-5, torch.bfloat16: 4e-2}
EXACT_FLOOR = 1e-6  # of two float64 steps
SLACK = 10.0
LEAST = 1e-6  # norm: a gradient that vanishes leaves rounding only, of whatever it was summed from
GRAY = 5.0  # between the tolerance and so many tolerances nobody is to blame


def build(spec: Spec, world: World) -> Net:
    """The case's model; always the same values."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed * 100_003 + spec.index)
        net = widen_model(Net(spec.body, spec.traits, spec.style, world), spec.dtype)
        for name, buffer in net.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                buffer.uniform_(0.5, 1.5)
    return widen_model(net, torch.float64) if world.exact else net


def widen_model(net: Net, dtype: torch.dtype) -> Net:
    """``net.to(dtype)`` that leaves complex numbers complex."""
    complex_dtype = torch.complex128 if dtype == torch.float64 else torch.complex64
    for each in (*net.parameters(), *net.buffers()):
        if each.is_floating_point() or each.is_complex():
            each.data = each.data.to(complex_dtype if each.is_complex() else dtype)
    return net


def make_loss_fn(spec: Spec, step: Step, world: World) -> Any:
    """``loss_fn(model, micro)`` as the case's user writes it; it says a tensor, a `Told` or a bare tuple."""
    kind, unwrap = LOSSES[spec.loss_of(step)], CONTAINERS[step.container].unwrap

    def loss_fn(model: Any, micro: Any) -> Any:
        fields = unwrap(micro)
        inputs = {key: fields.get(key) for key in ("mask", "ids", "anchors", "mixing")}
        out = read_output(model(fields["x"], **inputs))
        said = kind.fn(world, out, fields, model)
        if spec.mode.startswith("split_fn") and isinstance(said, torch.Tensor):
            said = Told(mean=said, count=len(fields["x"]))  # the rows of such parts say nothing
        return add_aux(said, sum(each.aux for each in model.traits if each.aux is not None))

    return loss_fn


def add_aux(said: Any, aux: Any) -> Any:
    if isinstance(said, Told):
        return said._replace(
            mean=None if said.mean is None else said.mean + aux,
            sum=None if said.sum is None else said.sum + aux * said.count,
        )
    return (said[0] + aux, said[1]) if isinstance(said, tuple) else said + aux


def value_of(said: Any) -> torch.Tensor:
    """The loss that the user means."""
    if isinstance(said, Told):
        return said.value
    return said[0] if isinstance(said, tuple) else said


class Twin:
    """A model without memkit, in a world of its own, that starts each step where another model stands.

    Args:
        spec: The case.
        exact: In float64; else in the case's own precision.
        fed: Whether noise is told by row; else it is drawn as the user's code draws it.
    """

    def __init__(self, spec: Spec, *, exact: bool, fed: bool = True) -> None:
        self.spec, self.exact = spec, exact
        self.feed = Feed(spec.seed * 7919 + spec.index) if spec.is_noisy and fed else None
        self.world = World(exact=exact, feed=self.feed)
        self.model = build(spec, self.world)
        self.dtype = torch.float64 if exact else spec.dtype

    def whole(self, start: torch.nn.Module, step: Step, fields: Fields) -> Gradients:
        """The gradients of the whole batch."""
        rows = len(fields["x"])
        return self.parts(start, step, fields, [rows])

    def parts(
        self, start: torch.nn.Module, step: Step, fields: Fields, sizes: Sequence[int], *, weigh: str = "rows"
    ) -> Gradients:
        """The gradients of parts, weighed by the counts that are told, or else by their rows.

        Args:
            start: Where the model stands.
            step: The step.
            fields: Its data.
            sizes: Rows of each part.
            weigh: "rows"; "sum": losses add up; "one": all parts alike, but where a count is told.
        """
        transfer(start, self.model)
        loss_fn, wrap = make_loss_fn(self.spec, step, self.world), CONTAINERS[step.container].wrap
        fields, at, total, weights = cast(fields, self.dtype), 0, {}, 0.0
        for size in sizes:
            if self.feed:
                self.feed.at(at, at + size)
            with self._autocast():
                said = loss_fn(self.model, wrap(take(fields, at, at + size)))
            weight = size if weigh == "rows" else 1.0
            if isinstance(said, Told):
                weight = float(said.count)
            weights += weight
            if weight:
                self.model.zero_grad()
                value_of(said).backward()
                _add(total, read_gradients(self.model), weight)
            at += size
        share = 1.0 if weigh == "sum" and not isinstance(said, Told) else 1.0 / (weights or 1.0)
        return {name: gradient * share for name, gradient in total.items()}

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.spec.precision and not self.exact:
            return torch.autocast("cpu", torch.bfloat16)
        return contextlib.nullcontext()


def _add(total: Gradients, gradients: Gradients, weight: float) -> None:
    for name, gradient in gradients.items():
        total[name] = total.get(name, 0.0) + gradient * weight


def read_gradients(model: torch.nn.Module) -> Gradients:
    """Dense float64 (or complex128) copies of all gradients that are there."""
    return {name: widen(each.grad) for name, each in model.named_parameters() if each.grad is not None}


def widen(gradient: torch.Tensor) -> torch.Tensor:
    dense = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
    return dense.to(torch.complex128 if dense.is_complex() else torch.float64, copy=True)


def errors(found: Gradients, truth: Gradients) -> dict[str, float]:
    """For each parameter how far its gradient is off, as a share of the true one's norm.

    A gradient that is zero but for rounding is measured by the norm of all.
    """
    total = sum(float(each.norm()) ** 2 for each in truth.values() if each.isfinite().all()) ** 0.5
    off = {}
    for name in truth.keys() | found.keys():
        true, got = truth.get(name), found.get(name)
        zero = torch.zeros_like(true if got is None else got)
        true, got = zero if true is None else true, zero if got is None else got
        same_holes = bool((true.isfinite() == got.isfinite()).all())
        difference = float((true - got)[true.isfinite() & got.isfinite()].norm())
        norm = float(true[true.isfinite()].norm())
        scale = norm if norm > 1e-11 * total else total
        off[name] = difference / max(scale, LEAST) if same_holes else float("inf")
    return off


def worst(found: Gradients, truth: Gradients, plain: dict[str, float], floor: float) -> tuple[float, str]:
    """The largest error in tolerances, and whose it is; above 1 is unequal."""
    ratios = {name: each / max(floor, SLACK * plain.get(name, 0.0)) for name, each in errors(found, truth).items()}
    name = max(ratios, key=lambda each: ratios[each], default="")
    return ratios.get(name, 0.0), name


def is_finite(gradients: Gradients) -> bool:
    return all(bool(each.isfinite().all()) for each in gradients.values())
