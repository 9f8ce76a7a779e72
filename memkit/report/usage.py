"""Sections on where the memory goes: layers, components, stages, steps, time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from memkit._charts.charts import Strip, unit_of
from memkit._events.phase_names import is_evaluation
from memkit.report.components import Components, Load
from memkit.report.figures import ReportFigures
from memkit.report.nodes import Bars, Bullets, Cell, Curve, Lines, Node, Paragraph, Section, Share, Size, clean
from memkit.report.stages import OWN_MARKS, EventStage, LoggedStep, LoggedSteps
from memkit.report.thin import thin
from memkit.report.words import Words

MOST_ROWS = 40  # of a table; the number left out is shown
_MOST_SHORTAGES = 5
_FIRST_STEPS, _LAST_STEPS = 12, 3
_MOST_STRIPS, _MOST_SPANS = 5, 60  # phases along the time axis: one that runs more often would be a gray bar
_T = TypeVar("_T")


def usage_sections(figures: ReportFigures, words: Words, *, missing: Sequence[str] = ()) -> Iterator[Section]:
    """Build the sections about memory usage; a section without figures in the log has no nodes.

    Args:
        figures: The figures.
        words: The texts.
        missing: Stages known to be missing, which are listed without figures.
    """
    yield Section(words("split_title"), tuple(_splits(figures, words)))
    yield Section(words("layers_title"), tuple(_layers(figures, words)))
    yield Section(words("components_title"), tuple(_components(figures, words)))
    yield Section(words("stages_title"), tuple(_stages(figures, words, missing)))
    yield Section(words("steps_title"), tuple(_steps(figures.steps, words)))
    yield Section(words("pattern_title"), (Bullets(tuple(_pattern(figures, words))),))


def timeline_section(figures: ReportFigures, words: Words) -> Section:
    """Build the section with the curve of the run and its marks."""
    return Section(words("timeline_title"), tuple(_timeline(figures, words)))


def missing_line(figures: ReportFigures, words: Words) -> Paragraph | None:
    """Say in one line what is missing from the log, and how to record it."""
    wanted = {
        "components": ("components_title", not figures.components.loads),
        "stages": ("stages_title", not figures.stages),
        "steps": ("steps_title", figures.steps is None),
        "split": ("missing_split", not figures.splits),
        "gpu": ("missing_capacity", figures.layers.total_bytes is None and not figures.is_on_cpu),
    }
    absent = {key: title for key, (title, is_missing) in wanted.items() if is_missing}
    if not absent:
        return None
    names = words.join(words(title) for title in absent.values())
    return Paragraph(words("missing_line", names=names, how=words.join(words(f"how_{key}") for key in absent)))


def _layers(figures: ReportFigures, words: Words) -> Iterator[Node]:
    layers = figures.layers
    tensors = figures.peak.num_bytes if figures.peak else None
    is_exact = figures.peak is None or figures.peak.is_exact
    inner: tuple[tuple[str, int | None], ...] = (("layer_tensors", tensors), ("layer_allocator", layers.reserved_bytes))
    if layers.requested_bytes is not None:
        inner = (
            ("layer_requested", layers.requested_bytes),
            ("layer_rounding", tensors),
            ("layer_cache", layers.reserved_bytes),
        )
    levels = (
        *inner,
        ("layer_outside", layers.device_used_bytes),
        ("layer_free", layers.total_bytes),
    )
    rows: list[tuple[Cell, ...]] = []
    bars: list[tuple[str, int]] = []
    below = 0
    was_least = False
    for key, level in levels:
        if level is None:
            continue
        extra = max(0, level - below)
        share = Share(extra / layers.total_bytes if layers.total_bytes else None)
        # If the tensors are at least this, the layer around them adds at most that.
        is_least = key in {"layer_tensors", "layer_rounding"} and not is_exact
        added = Size(extra, None) if is_least else Size(None, extra) if was_least else Size.of(extra)
        rows.append((words(key), added, Size(level, None) if is_least else Size.of(level), share))
        was_least = is_least
        bars.append((words(key), extra))
        below = level
    if layers.host_bytes is not None:
        rows.append((words("layer_host"), Size.of(layers.host_bytes), "", "" if layers.total_bytes else None))
    if not layers.total_bytes:
        rows = [row[:-1] for row in rows]
    if rows:
        yield Paragraph(words("layers_text"))
        columns = ("col_layer", "col_layer_own", "col_layer_level", "col_of_device")
        yield words.table(columns if layers.total_bytes else columns[:-1], rows)
    if len(bars) > 1:
        yield Bars(tuple(bars), words("layers_chart"), layers.total_bytes)
    if figures.segments:
        heads = ("col_segments", "col_number", "col_blocks", "col_asked", "col_rounded", "col_reserved", "col_largest")
        segments: list[tuple[Cell, ...]] = []
        for each in figures.segments[:MOST_ROWS]:
            sizes = (each.requested_bytes, each.allocated_bytes, each.reserved_bytes, each.largest_free_bytes)
            name = words(f"segments_{each.kind}")
            segments.append((name, each.num_segments, each.num_blocks, *map(Size.of, sizes)))
        yield words.table(heads, segments, words("segments_caption"))


def _components(figures: ReportFigures, words: Words) -> Iterator[Node]:
    found = figures.components
    if not found.loads and found.whole_bytes is None:
        return
    whole = found.whole_bytes
    loads, num_left = _cut(found.loads, MOST_ROWS)
    rows = [_component_row(load, whole, words) for load in loads]
    if found.before_bytes:
        before = Size.of(found.before_bytes)
        rows.insert(0, (words("component_before"), before, _share(found.before_bytes, whole), ""))
    rows.append(_unattributed_row(found, words))
    rows.append((words("component_whole"), Size.of(whole), _share(whole, whole), clean(found.whole_event or "")))
    yield words.table(("col_component", "col_size", "col_share_loaded", "col_counted"), rows)
    yield from _left_out(num_left, words)
    named = [(clean(load.name), load.num_bytes) for load in loads if load.num_bytes is not None and load.num_bytes >= 0]
    if found.unattributed_bytes is not None and found.unattributed_bytes > 0:
        named.append((words("unattributed"), found.unattributed_bytes))
    if named:
        yield Bars(tuple(named), words("components_chart"), whole)
    if figures.unattributed.low is not None and figures.peak is not None:
        yield Paragraph(words("components_peak", size=words.size(figures.unattributed)))
    if any(load.is_record for load in loads):
        yield Paragraph(words("components_record"))


def _component_row(load: Load, whole: int | None, words: Words) -> tuple[Cell, ...]:
    if load.num_bytes is None:
        counted = ""
    elif load.since is None:
        counted = words("component_from_start")
    else:
        counted = words("component_since", event=clean(load.since))
    return clean(load.name), Size.of(load.num_bytes), _share(load.num_bytes, whole), counted


def _unattributed_row(found: Components, words: Words) -> tuple[Cell, ...]:
    missing = [clean(load.name) for load in found.loads if load.num_bytes is None]
    counted = words("component_missing", names=", ".join(missing)) if missing else ""
    num_bytes = found.unattributed_bytes
    return words("unattributed"), Size.of(num_bytes), _share(num_bytes, found.whole_bytes), counted


def _stages(figures: ReportFigures, words: Words, missing: Sequence[str]) -> Iterator[Node]:
    stages, num_left = _cut(figures.stages, MOST_ROWS)
    if not stages:
        return
    if figures.is_cumulative:
        yield Paragraph(words("cumulative_text"))
    peak = figures.peak.num_bytes if figures.peak else None
    has_time = any(stage.host_ns is not None for stage in stages)
    has_added = any(stage.added_bytes is not None for stage in stages)
    rows = [_stage_row(stage, peak, has_added=has_added, has_time=has_time) for stage in stages]
    rows += [(name, 0, *[None] * (2 + has_added + has_time)) for name in missing]
    columns = ["col_stage", "col_events", "col_peak", "col_of_peak"]
    columns += ["col_added"] * has_added + ["col_host_time"] * has_time
    yield words.table(columns, rows)
    yield from _left_out(num_left, words)
    bars = [(clean(stage.name), stage.peak.low) for stage in stages if stage.peak.low is not None]
    if len(bars) > 1:
        yield Bars(tuple(bars), words("stages_chart"), peak)


def _stage_row(stage: EventStage, peak: int | None, *, has_added: bool, has_time: bool) -> tuple[Cell, ...]:
    row: list[Cell] = [clean(stage.name), stage.num_events, stage.peak]
    row.append(_share(stage.peak.low if stage.peak.is_known else None, peak))
    if has_added:
        row.append(Size.of(stage.added_bytes, is_change=True))
    if has_time:
        row.append(None if stage.host_ns is None else _seconds(stage.host_ns / 1e9))
    return tuple(row)


def _steps(steps: LoggedSteps | None, words: Words) -> Iterator[Node]:
    if steps is None:
        return
    count, numbers = len(steps.steps), [step.number for step in steps.steps]
    yield Paragraph(words("steps_text", count=f"{count:,}", first=numbers[0], last=numbers[-1]))
    if steps.num_missing:
        yield Paragraph(words("steps_missing", count=f"{steps.num_missing:,}"))
    shown = steps.steps
    if count > _FIRST_STEPS + _LAST_STEPS:
        shown = (*steps.steps[:_FIRST_STEPS], *steps.steps[-_LAST_STEPS:])
        yield Paragraph(words("steps_shown", first=_FIRST_STEPS, last=_LAST_STEPS))
    has_peak = any(step.peak.low is not None or step.peak.high is not None for step in shown)
    has_held = any(step.held_bytes is not None for step in shown)
    columns = ["col_step"] + ["col_peak"] * has_peak + ["col_held"] * has_held
    change = f"col_change_{steps.measure}" if steps.measure else "col_change"
    yield words.table((*columns, change), (_step_row(step, has_peak=has_peak, has_held=has_held) for step in shown))
    changes = [step.change_bytes for step in steps.steps if step.change_bytes is not None]
    if changes:
        lowest, highest = (words.size(Size.of(end(changes), is_change=True)) for end in (min, max))
        key = "steps_same" if lowest == highest else "steps_changes"
        yield Paragraph(words(key, lowest=lowest, highest=highest))
    if steps.rise is not None:
        yield Paragraph(rise_text(steps.rise, words))
    is_added = steps.measure == "incremental"
    values = {
        "line_peak": [step.peak.low if step.peak.is_known else None for step in steps.steps],
        "line_held": [step.held_bytes for step in steps.steps],
        "line_change": [step.change_bytes if is_added else None for step in steps.steps],
    }
    if lines := _curves(values, [float(number) for number in numbers], [""] * count, words):
        unit = unit_of(max(max(map(abs, line.y)) for line in lines))
        yield Lines(lines, words("axis_step"), words("steps_chart"), unit=unit)


def rise_text(rise: tuple[int, int], words: Words) -> str:
    """Say that the running peak rose by less than the steps added."""
    added, grown = (words.size(Size.of(each)) for each in rise)
    return words("steps_rise", added=added, grown=grown)


def _step_row(step: LoggedStep, *, has_peak: bool, has_held: bool) -> tuple[Cell, ...]:
    change = Size.of(step.change_bytes, is_change=True)
    return (str(step.number), *[step.peak] * has_peak, *[Size.of(step.held_bytes)] * has_held, change)


def _curves(
    values: Mapping[str, Sequence[int | None]], places: Sequence[float], labels: Sequence[str], words: Words
) -> tuple[Curve, ...]:
    """Make a curve of each row with at least two known values."""
    known = {key: sizes for key, sizes in values.items() if len(sizes) - sizes.count(None) > 1}
    return tuple(thin(words(key), places, sizes, labels) for key, sizes in known.items())


def _timeline(figures: ReportFigures, words: Words) -> Iterator[Node]:
    events = [each.event for each in figures.observed]
    walls = [event.wall_s for event in events]
    has_clock = bool(walls) and None not in walls
    start = min((wall for wall in walls if wall is not None), default=0.0)
    places = [(wall or 0.0) - start if has_clock else float(index) for index, wall in enumerate(walls)]
    has_peaks = any(event.peak_bytes is not None for event in events)
    # The peak of a tracked block is that of one of its stages, or of blocks without any.
    has_stages = any(event.peak_bytes is not None and event.event not in OWN_MARKS for event in events)
    own = OWN_MARKS if has_stages else frozenset[str]()
    values = {
        "line_held": [event.allocated_bytes for event in events],
        "line_peak": [None if event.event in own else event.peak_bytes for event in events],
        "line_record": [None if has_peaks else event.peak_total_bytes for event in events],
        "line_reserved": [event.reserved_bytes for event in events],
    }
    labels = [event.event for event in events]
    lines = list(_curves(values, places, labels, words))
    if not lines and figures.is_on_cpu:  # tensors were not counted: show the process's memory instead
        lines = list(_curves({"layer_host": [event.host_peak_bytes for event in events]}, places, labels, words))
    if not lines:
        return
    lines += _slope(figures, places, words)
    lines += _failures(figures, places, lines[0], words)
    axis = words("axis_seconds") if has_clock else words("axis_event")
    top = max(max(line.y) for line in lines)
    strips = tuple(_strips(figures, start)) if has_clock else ()
    caption = words("timeline_chart" if strips else "timeline_plain")
    yield Lines(lines, axis, caption, unit=unit_of(top), strips=strips)


def _slope(figures: ReportFigures, places: Sequence[float], words: Words) -> Iterator[Curve]:
    """Draw the growth as a straight line over the steps, at the height of the held memory."""
    if figures.steps is None or figures.steps.growth is None:
        return
    steps = [(place, each) for place, each in zip(places, figures.observed, strict=True) if each.step is not None]
    held = [(place, each.event.allocated_bytes) for place, each in steps if each.event.allocated_bytes is not None]
    if len(held) < 2:
        return
    rise = figures.steps.growth.rate * (figures.steps.steps[-1].number - figures.steps.steps[0].number)
    (first, _), (last, end) = held[0], held[-1]
    rate = words.size(Size.of(round(figures.steps.growth.rate), is_change=True))
    name = f"{words('line_growth')}: {rate} / {words('axis_step')}"
    yield Curve(name, (first, last), (max(0, round(end - rise)), end), (name, name), "dashed")


def _failures(figures: ReportFigures, places: Sequence[float], line: Curve, words: Words) -> Iterator[Curve]:
    """Mark where memory ran out, at the height of the first curve."""
    names = {"oom", *(each.event for each in figures.shortages)}
    events = [each.event for each in figures.observed]
    marked = sorted({*figures.failures, *(index for index, event in enumerate(events) if event.event in names)})
    if marked:
        sizes = (events[index].allocated_bytes for index in marked)
        heights = [max(line.y) if size is None else size for size in sizes]
        labels = tuple(clean(events[index].event) for index in marked)
        yield Curve(words("line_oom"), tuple(places[index] for index in marked), heights, labels, "crosses")


def _strips(figures: ReportFigures, start: float) -> Iterator[Strip]:
    """Show when phases ran that occur only a few times: evaluations first, then the longest."""
    spans: dict[str, list[tuple[float, float]]] = {}
    for each in figures.observed:
        event = each.event
        path, duration_ns = event.phase, event.duration_ns
        if path is None or duration_ns is None:
            continue
        found = spans.get(path)
        if found is None:
            found = spans[path] = []
        if len(found) <= _MOST_SPANS:
            end = (event.wall_s or 0.0) - start
            found.append((max(0.0, end - duration_ns / 1e9), end))
    few = {path: found for path, found in spans.items() if len(found) <= _MOST_SPANS}
    order = sorted(few, key=lambda path: (not is_evaluation(path), -sum(end - begin for begin, end in few[path])))
    for path in order[:_MOST_STRIPS]:
        yield Strip(clean(path), tuple(few[path]), is_marked=is_evaluation(path))


def _splits(figures: ReportFigures, words: Words) -> Iterator[Node]:
    for split in figures.splits:
        parts, num_left = _cut(split.parts, 15)
        peak = figures.peak.num_bytes if figures.peak else None
        missing = None if peak is None else peak - split.whole_bytes
        parts = [(clean(name) or words("split_nameless"), size) for name, size in parts]
        rest = split.whole_bytes - sum(size for _, size in parts)
        if num_left:
            parts.append((words("rest", count=f"{num_left:,}"), rest))
        caption = words(f"split_{split.name.removeprefix('peak_by_')}", event=clean(split.event))
        yield Bars(tuple(parts), caption, split.whole_bytes)
        if missing:
            key = "split_beyond" if missing < 0 else "split_missing"
            yield Paragraph(words(key, size=words.size(Size.of(abs(missing)))))


def shortage_texts(figures: ReportFigures, words: Words) -> Iterator[str]:
    """Say where memory ran out and how much was missing, and how often training recovered from it."""
    shown, num_left = _cut(figures.shortages, _MOST_SHORTAGES)
    for each in shown:
        asked, free, held = (
            words.size(Size.of(size)) for size in (each.asked_bytes, each.free_bytes, each.allocated_bytes)
        )
        yield words("shortage", event=clean(each.event), asked=asked, free=free, held=held)
    if num_left:
        yield words("left_out", count=f"{num_left:,}")
    for event in (each.event for each in figures.observed if each.event.event == "out_of_memory"):
        batch = event.note.get("batch") if event.note else None
        if isinstance(batch, list) and batch:
            yield words("shortage_batch", batch=clean(", ".join(map(str, batch))))
    if figures.num_survived:
        yield words("survived", count=f"{figures.num_survived:,}")


def _pattern(figures: ReportFigures, words: Words) -> Iterator[str]:
    peak, found, steps = figures.peak, figures.components, figures.steps
    yield from shortage_texts(figures, words)
    if peak is None:
        yield words("pattern_none")
        return
    yield words("pattern_peak", event=clean(peak.event), size=words.size(peak.size))
    if found.whole_bytes is not None and peak.num_bytes:
        yield words("pattern_loaded", share=f"{found.whole_bytes / peak.num_bytes:.1%}")
    if steps and steps.trend:
        ends = (steps.trend.slope, steps.trend.low, steps.trend.high)
        slope, low, high = (words.size(Size.of(round(each), is_change=True)) for each in ends)
        yield words(f"pattern_{steps.course}", slope=slope, low=low, high=high)
    elif steps and steps.rise is not None:
        yield rise_text(steps.rise, words)
    elif steps:
        yield words("pattern_no_trend")
    if steps and steps.spread is not None:
        yield words("pattern_spread", share=f"{steps.spread:.1%}")


def _cut(rows: Sequence[_T], most: int) -> tuple[Sequence[_T], int]:
    """Return the first rows, and the number left out."""
    return rows[:most], max(0, len(rows) - most)


def _left_out(count: int, words: Words) -> Iterator[Node]:
    if count:
        yield Paragraph(words("left_out", count=f"{count:,}"))


def _share(part: int | None, whole: int | None) -> Share:
    return Share(None if part is None or not whole else part / whole)


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.2f} ms"
