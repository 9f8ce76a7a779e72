"""`profile_scaling`: run a step at several sizes without data and derive its scaling law."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from functools import cache, partial
from typing import Any

from memkit._core.errors import ConfigError, warn_user
from memkit._core.settings import Checker
from memkit._simulation.tensors import check_selected_fraction
from memkit.predict.scaling.deterministic import DeterministicLaw
from memkit.predict.scaling.law import Law, checked_size
from memkit.predict.scaling.points import ScalingPoint, StepMode
from memkit.predict.scaling.result import ScalingResult
from memkit.predict.scaling.structural import StructuralLaw, structural_law
from memkit.predict.scaling.traces import BuildStep, StepTrace, trace_step


def profile_scaling(
    build_step: BuildStep,
    sizes: Sequence[int],
    modes: Sequence[StepMode] = ("train", "inference"),
    *,
    selected_fraction: float | None = None,
) -> ScalingResult:
    """Find out how the memory of a step grows with its size, on tensors without data.

    Each size is built and run twice, and the second (warm) step counts: the live bytes of all tensors, including the
    model, optimizer and batch, as the CPU allocator counts them. Scratch memory inside kernels is not included.

    The law follows from a few sizes. If the step runs the same operators at every size, the live bytes after each
    allocation and free of a storage are a polynomial in ``n``, and the peak is the maximum of these: exact at every
    size. Otherwise (a loop over chunks, a recurrent layer unrolled over time) the law is a lower bound and says so.

    Args:
        build_step: ``build_step(n)`` makes model, optimizer and batch of size ``n``, and returns a function without
            arguments that runs one training step. For inference the same function runs without a graph, and
            `Tensor.backward` does nothing. To handle the modes yourself, give it a parameter named ``mode``:
            ``build_step(n, mode)`` returns the step for that mode; inference still runs without a graph.
        sizes: One or more distinct sizes of 1 or more, as a list or a NumPy array. The law is traced at the first
            multiples of the smallest and compared at all others.
        modes: ``"train"``, ``"inference"``, or both.
        selected_fraction: The fraction of its elements that a mask is assumed to select; None makes masks an error.

    Returns:
        A point per size and mode, and ``result.law[mode]`` with `predict`, `max_n`, `peak_where` and `breakpoints`;
        ``result.guesses`` lists the values answered without data, at these sizes and at others that the law was traced
        at, ``result.doubts`` those that may matter: if there are any, the laws may not hold.

    Raises:
        ConfigError: No sizes or modes, or unknown modes.
        InputTypeError: A size is not an int, or ``build_step`` does not return a function.
        InputError: A size is below 1, or the step needs data that a fake tensor does not have.

    Warns:
        MemkitWarning: The step's memory may depend on guessed values.

    Memory cost:
        No tensor memory; the traces hold a few hundred bytes per operator of the step and size.

    Example:
        >>> import memkit as mk
        >>> import torch
        >>> def build_step(n):
        ...     model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
        ...     optimizer = torch.optim.AdamW(model.parameters())
        ...     x = torch.randn(n, 16)
        ...     def step():
        ...         optimizer.zero_grad()
        ...         model(x).square().mean().backward()
        ...         optimizer.step()
        ...     return step
        >>> law = mk.predict.profile_scaling(build_step, sizes=[1000, 10_000]).law["train"]
        >>> law.tier, law.order, law.predict(100_000_000), law.max_n("24GiB")
        ('structural', 1, 83200014120, 30973304)
    """
    Checker("profile_scaling").function("build_step", build_step)
    ascending = checked_sizes(f"profile_scaling(build_step, sizes={sizes!r}, modes={modes!r})", sizes, modes)
    check_selected_fraction("profile_scaling(...)", selected_fraction)
    points: list[ScalingPoint] = []
    laws: dict[StepMode, Law] = {}
    guesses: dict[str, None] = {}
    doubts: dict[str, None] = {}
    for mode in dict.fromkeys(modes):
        trace = cache(partial(trace_step, build_step, mode=mode, selected_fraction=selected_fraction, guessed=guesses))
        traces = [trace(size) for size in ascending]
        law = structural_law(trace, ascending)
        laws[mode] = _through(traces, law) if isinstance(law, str) else law
        points += [each.point() for each in traces]
        if isinstance(law, StructuralLaw):  # it rests on further sizes
            traces += [trace(size) for size in (*law.traced, *law.checked)]
        doubts |= dict.fromkeys(doubt for each in traces for doubt in each.doubts)
    if doubts:
        warn_user(
            f"the laws may be wrong: {'; '.join(doubts)}. Way out, if none is named: write the step so that no size "
            "and no branch depends on the values of its tensors, or use measure_scaling, which runs on real values."
        )
    return ScalingResult(tuple(points), laws, tuple(guesses), tuple(doubts))


def _through(traces: Sequence[StepTrace], reason: str) -> DeterministicLaw:
    return DeterministicLaw(
        tuple(trace.size for trace in traces),
        tuple(trace.peak_bytes for trace in traces),
        tuple(trace.point().peak_where for trace in traces),
        reason,
    )


def checked_sizes(call: str, sizes: Any, modes: Any) -> list[int]:
    """Return the distinct sizes, ascending; raise if sizes or modes are invalid. ``call`` is the user's call."""
    is_series = isinstance(sizes, Sized) and not isinstance(sizes, str | bytes | bytearray)  # bytes hold ints
    if (
        not is_series
        or not len(sizes)
        or isinstance(modes, str)
        or not modes
        or not set(modes) <= {"train", "inference"}
    ):
        raise ConfigError(
            call,
            got=f"sizes={sizes!r} and modes={modes!r}",
            expected="at least one size, and modes among 'train' and 'inference'",
            fix="pass for example sizes=[1000, 10_000], modes=('train',).",
        )
    return sorted({checked_size(size, call) for size in sizes})
