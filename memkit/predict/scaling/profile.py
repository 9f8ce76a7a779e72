"""`profile_scaling`: a step at several sizes, without data, and the law behind them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache, partial

from memkit._core.errors import ConfigError, MemkitWarning
from memkit.predict.scaling.deterministic import DeterministicLaw
from memkit.predict.scaling.law import Law, checked_size
from memkit.predict.scaling.points import ScalingPoint, StepMode
from memkit.predict.scaling.result import ScalingResult
from memkit.predict.scaling.structural import structural_law
from memkit.predict.scaling.traces import BuildStep, StepTrace, trace_step


def profile_scaling(
    build_step: BuildStep,
    sizes: Sequence[int],
    modes: Sequence[StepMode] = ("train", "inference"),
    *,
    selected_fraction: float | None = None,
) -> ScalingResult:
    """Find out how the memory of a step grows with its size, on tensors without data.

    Every size is built and run twice, and the second (warm) step is what counts: live bytes of all tensors, as the CPU
    allocator counts them, with what was built. What kernels take inside of themselves is not in it.

    From a few sizes follows the law. Where the step runs the same operators at every size, live bytes after each birth
    and death of a storage are a polynomial of ``n``, and the peak is the highest of them: exact, at every size. Where
    it does not (a loop over chunks, a recurrent layer unrolled over time), the law is a lower bound, and says so.

    Args:
        build_step: ``build_step(n)`` makes model, optimizer and batch of size ``n``, and returns a function without
            arguments that runs one step of training. For inference the same function runs without a graph, and
            `Tensor.backward` does nothing. To decide yourself, give it a parameter named ``mode``:
            ``build_step(n, mode)`` returns the step of that mode, and then inference still runs without a graph.
        sizes: One or more distinct sizes of 1 or more, as a list or a NumPy array. The law is traced at the first
            multiples of the smallest and compared at all others.
        modes: ``"train"``, ``"inference"``, or both.
        selected_fraction: The share of its elements that a mask is taken to select; None refuses masks.

    Returns:
        A point per size and mode, and ``result.law[mode]`` with `predict`, `max_n`, `peak_where` and `breakpoints`;
        ``result.guesses`` says what was answered without data, ``result.doubts`` whether it may matter: where there is
        any, the laws are not known to hold.

    Raises:
        ConfigError: No sizes or modes, or unknown modes.
        InputTypeError: A size is no int, or ``build_step`` returns no function.
        InputError: A size is below 1, or the step asks for data that a fake tensor does not have.

    Warns:
        MemkitWarning: What the step takes may depend on values that were guessed.

    Memory cost:
        No tensor memory; the traces hold some hundred bytes per operator of the step and size.

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
    ascending = checked_sizes(f"profile_scaling(build_step, sizes={sizes!r}, modes={modes!r})", sizes, modes)
    points: list[ScalingPoint] = []
    laws: dict[StepMode, Law] = {}
    guesses: dict[str, None] = {}
    doubts: dict[str, None] = {}
    for mode in dict.fromkeys(modes):
        trace = cache(partial(trace_step, build_step, mode=mode, selected_fraction=selected_fraction))
        traces = [trace(size) for size in ascending]
        law = structural_law(trace, ascending)
        laws[mode] = _through(traces, law) if isinstance(law, str) else law
        points += [each.point() for each in traces]
        guesses |= dict.fromkeys(guess for each in traces for guess in each.guesses)
        doubts |= dict.fromkeys(doubt for each in traces for doubt in each.doubts)
    if doubts:
        warnings.warn(
            f"the laws are not known to hold: {'; '.join(doubts)}. Way out: let no size and no branch of the step "
            "depend on values of its tensors, or take measure_scaling, which has them.",
            MemkitWarning,
            stacklevel=2,
        )
    return ScalingResult(tuple(points), laws, tuple(guesses), tuple(doubts))


def _through(traces: Sequence[StepTrace], reason: str) -> DeterministicLaw:
    return DeterministicLaw(
        tuple(trace.size for trace in traces),
        tuple(trace.peak_bytes for trace in traces),
        tuple(trace.point().peak_where for trace in traces),
        reason,
    )


def checked_sizes(call: str, sizes: Sequence[int], modes: Sequence[StepMode]) -> list[int]:
    """The distinct sizes, ascending; raises where sizes or modes are none. ``call`` is what the user wrote."""
    if not len(sizes) or not modes or not set(modes) <= {"train", "inference"}:
        raise ConfigError(
            call,
            got=f"sizes={sizes!r} and modes={modes!r}",
            expected="one size or more, and modes among 'train' and 'inference'",
            fix="write for example sizes=[1000, 10_000], modes=('train',).",
        )
    return sorted({checked_size(size, call) for size in sizes})
