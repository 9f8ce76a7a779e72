"""The edge-count memory analysis in one call: all of its curves, predicted or measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, SupportsIndex, TypeAlias

from memkit._core.errors import ConfigError, InputTypeError, warn_user
from memkit._core.settings import Checker
from memkit._core.units import parse_bytes
from memkit._machine.devices import resolve_device
from memkit.predict.scaling.measured import measure_scaling
from memkit.predict.scaling.points import ScalingPoint
from memkit.predict.scaling.profile import profile_scaling
from memkit.predict.scaling.traces import BuildStep
from memkit.recipes.memory_test.config import MemoryTestConfig
from memkit.recipes.memory_test.curves import ScalingCurve, capacities
from memkit.recipes.memory_test.outputs import MemoryTestResult
from memkit.recipes.memory_test.plots import Analysis
from memkit.recipes.memory_test.reference import EdgeCase, core_cases, full_cases

OnPoint: TypeAlias = Callable[[str, ScalingPoint], None]


def run_memory_test(
    config: MemoryTestConfig | None = None,
    analysis: Literal["full", "core"] = "full",
    *,
    gpus: Sequence[str] = (),
    memory_limit: SupportsIndex | str | None = None,
    on_point: OnPoint = lambda *_: None,
) -> MemoryTestResult:
    """Determine how the memory of a neural operator grows with the edges of its graph.

    Args:
        config: The ranges to sweep over, and whether to predict or measure; None for the defaults.
        analysis: ``"full"``: encoder, decoder, whole model. ``"core"``: the edge MLP alone, with all its settings.
        gpus: Names of GPUs to compare with; if empty, one of each class that the source names.
        memory_limit: For measured runs only: as for `measure_scaling`.
        on_point: Called with the curve's name and each point as soon as it is available.

    Returns:
        Curves with points and laws; `MemoryTestResult.write` writes the files, `MemoryTestResult.explain` returns the
        text.

    Raises:
        ConfigError: No part or no mode is enabled, ``analysis`` is invalid, or ``memory_limit`` is set although the
            config asks for a prediction.
        InputError: A name in ``gpus`` does not match exactly one GPU, or ``memory_limit`` is not a size.
        InputTypeError: ``config`` is not a `MemoryTestConfig`.

    Warns:
        MemkitWarning: Measuring was requested on a device that is not available; the figures are predicted.

    Memory cost:
        Predicted: no tensor memory. Measured: that of the step, in its own process.

    Source:
        The memory test of the GAOT-3D project, whose names and files are kept; `docs/scaling.md`.

    Example:
        >>> import memkit as mk
        >>> config = mk.MemoryTestConfig(test_decoder=False, num_test_points=2)
        >>> result = mk.recipes.run_memory_test(config)
        >>> encoder = result.curves[0]
        >>> encoder.name, encoder.result.law["train"].tier, encoder.result.peaks("train")[500_000] > 2**30
        ('encoder', 'structural', True)
    """
    config = MemoryTestConfig() if config is None else config
    if not isinstance(config, MemoryTestConfig):
        raise InputTypeError(
            f"run_memory_test({config!r})",
            got=f"a {type(config).__name__}",
            expected="a MemoryTestConfig, or None for its defaults",
            fix="pass a MemoryTestConfig, or call run_memory_test(analysis='core') for the other analysis.",
        )
    makers = {"full": full_cases, "core": core_cases}
    check = Checker("run_memory_test(config, analysis)")
    check.choice("analysis", analysis, makers)
    if isinstance(gpus, str):
        raise check.refusal("gpus", gpus, "a list of names of GPUs", fix=f"pass gpus=[{gpus!r}].")
    cases = makers[analysis](config)
    if not cases or not config.modes:
        raise ConfigError(
            f"run_memory_test(config, {analysis!r})",
            got="a config that disables everything",
            expected="at least one part and one mode enabled",
            fix="pass for example MemoryTestConfig(test_encoder=True, test_training_mode=True).",
        )
    sizes = config.num_edges if analysis == "full" else config.core_num_edges
    steps = [(_name(case), case, case.build_step) for case in cases]
    return sweep(analysis, steps, sizes, config, gpus=gpus, memory_limit=memory_limit, on_point=on_point)


def sweep(
    analysis: Analysis,
    steps: Sequence[tuple[str, EdgeCase | None, BuildStep]],
    sizes: Sequence[int],
    config: MemoryTestConfig,
    *,
    gpus: Sequence[str],
    memory_limit: SupportsIndex | str | None,
    on_point: OnPoint,
) -> MemoryTestResult:
    """Run an analysis: of the reference operator, or ``"script"``, of the user's own step.

    Args:
        analysis: Its name.
        steps: For each curve its name, the part of the operator (None for the user's own step), and the function that
            builds a step: as for `profile_scaling`, for a measured run as for `measure_scaling`.
        sizes: The sizes to sweep over.
        config: Source, device and modes.
        gpus: As for `run_memory_test`.
        memory_limit: As for `run_memory_test`.
        on_point: As for `run_memory_test`.
    """
    if memory_limit is not None:
        parse_bytes(memory_limit, name="memory_limit", is_large=True)
        if config.source == "fake":
            raise ConfigError(
                f"a memory test with memory_limit={memory_limit!r}",
                got="a config with source='fake', which starts no process that could be limited",
                expected="a memory limit only for measured runs",
                fix="omit memory_limit, or set source='measured'.",
            )
    cards, device, curves = capacities(gpus), _device_of(config), []
    for name, case, build_step in steps:
        if device is None:
            result = profile_scaling(build_step, sizes, config.modes)
            for point in result.points:
                on_point(name, point)
        else:
            result = measure_scaling(
                build_step,
                sizes,
                config.modes,
                device=device,
                memory_limit=memory_limit,
                on_point=partial(on_point, name),
            )
        curves.append(ScalingCurve(name, case, result))
    return MemoryTestResult(analysis, device, tuple(curves), cards)


def _device_of(config: MemoryTestConfig) -> str | None:
    """Return the device to measure on; None if the config wants a prediction, or this machine can only predict.

    Warns:
        MemkitWarning: The machine lacks the device.
    """
    if config.source == "fake":
        return None
    try:
        return str(resolve_device(config.device))
    except ConfigError:
        warn_user(
            f"this machine has no {config.device} device, so all points are predicted. Way out: set device='cpu' to "
            "measure here."
        )
        return None


def _name(case: EdgeCase) -> str:
    if case.part != "edge MLP":
        return case.part
    return f"{'x'.join(map(str, case.mlp))}, {case.coord_dim} coordinates, {case.feature_dim} features"
