"""Writes the site's reference while it is built: a page for each task, with the public names that serve it.

A hook of mkdocs and an extension of griffe, which reads the docstrings (both named in mkdocs.yml). No page is
committed. A test stops a new name until it has a task here.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
from typing import Any

from griffe import Extension, Object
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import memkit
import memkit.cli

_TASKS = {  # by page: its title, and its names
    "predict": """Predict a step:
        estimate_memory_usage MemoryEstimate Holder find_worst_batch WorstBatch Shard VirtualGPU CachingAllocator
        AllocatorSettings find_gpu all_gpus GPU profile_scaling ScalingResult ScalingPoint fit_points measure_scaling
        run_memory_test MemoryTestConfig MemoryTestResult get_preset_config print_config_summary TrainingConfig""",
    "plan": """Plan a step:
        prepare PreparedTrainer plan_training TrainingPlan SavedTensorPlan treat_saved_tensors
        advise Advice AdviceTable""",
    "fit": """Make a step fit:
        MemoryEfficientTrainingWrapper Loss GradientAccumulator SplitLoss Checkpointing check_split cached_backward
        gradient_penalty is_out_of_memory recover_from_oom offload_activations offload_state step_in_backward
        atomic_steps materialize_state register_parameterwise""",
    "chunk": """Functions and losses in pieces:
        ChunkedProcessor chunked_map chunked_segment_reduce chunked_loss chunked_linear_cross_entropy tiled_apply
        SparsityAwareProcessor submanifold_conv3d DynamicResolutionProcessor""",
    "loops": """Training loops and state:
        MemoryEfficientTrainLoop LoopResult create_enhanced_train_loop ValidationMonitor Accuracy Mean WeightedMean
        TrainingStateManager ResumableBatchSampler ResumableLoader ProgressiveTrainer Stage make_dataloader
        to_device""",
    "measure": """Measure and report:
        MemoryManager Tracker format_bytes parse_bytes read_memory_events write_report""",
    "check": "Check scripts: " + " ".join(memkit.check.__all__),
    "points": """Points:
        GridIndex GridAwareSampler GridSample BudgetBatchSampler first_points fragments sample_edges split_packed
        voxel_mean DensityInvariantTrainer PointBatch PointScene""",
    "voxel": "Volumes and clouds: " + " ".join(memkit.voxel.__all__),
    "errors": "Errors: " + " ".join(memkit.errors.__all__),
}
_INTEGRATIONS = ("transformers", "lightning", "fabric", "torch_geometric")


def pages() -> dict[str, str]:
    """Write the pages.

    Returns:
        The Markdown of each page by its name: one for each task, "integrations" for what is imported from
        `memkit.integrations`, "shell" for the commands, and "index".
    """
    rooms = {name: room for room in memkit._PACKAGES for name in getattr(memkit, room).__all__}  # noqa: SLF001
    written, anchors, index = {}, {}, []
    for page, text in _TASKS.items():
        title, _, names = text.partition(":")
        lines = []
        for name in names.split():
            anchors[name] = f"{page}.md#memkit.{rooms[name]}.{name}"
            called = name if name in memkit.__all__ else f"{rooms[name]}.{name}"
            lines.append(f"- [`mk.{called}`]({anchors[name]}): {_summary(rooms[name], name)}")
        entries = (f"::: memkit.{rooms[name]}.{name}" for name in names.split())
        written[page] = "\n\n".join([f"# {title}", *entries]) + "\n"
        index.append(f"## {title}\n\n" + "\n".join(lines) + "\n")
    first = "\n".join(f"- [`mk.{name}`]({anchors[name]}) {text}" for name, text in _first_names())
    index.insert(0, f"# All names, by task\n\nStart with these six, after `import memkit as mk`:\n\n{first}\n")
    index.append("Names for other frameworks are imported by their module: [memkit.integrations](integrations.md).\n")
    return written | {"integrations": _integrations(), "shell": _shell(), "index": "\n".join(index)}


def _first_names() -> list[tuple[str, str]]:
    """Read the six names that memkit's own docstring begins with."""
    found = re.findall(r"^- `(\w+)` (.*?)(?=^- |^$)", memkit.__doc__, re.MULTILINE | re.DOTALL)
    return [(name, " ".join(text.split())) for name, text in found]


def _summary(room: str, name: str) -> str:
    """Read the first paragraph of a name's docstring."""
    text = inspect.getdoc(getattr(getattr(memkit, room), name)) or ""
    return " ".join(text.partition("\n\n")[0].split())


def _integrations() -> str:
    """Name each module that a user imports for a framework; griffe reads them without importing the framework."""
    modules = "\n\n".join(f"::: memkit.integrations.{name}" for name in _INTEGRATIONS)
    return f"# memkit.integrations\n\n{modules}\n"


def _shell() -> str:
    """Write what each command says about itself."""
    commands = argparse.ArgumentParser(prog="memkit").add_subparsers()
    for name in memkit.cli._COMMANDS:  # noqa: SLF001 - the one list of them
        importlib.import_module(f"memkit.cli.{name}").add_parser(commands)
    texts = (f"## memkit {name}\n\n```text\n{each.format_help()}```" for name, each in commands.choices.items())
    return "\n\n".join(["# The shell", *texts]) + "\n"


def on_files(files: Files, *, config: MkDocsConfig, **_: Any) -> None:
    """Add the pages to the site."""
    for name, content in pages().items():
        files.append(File.generated(config, f"reference/{name}.md", content=content))


class ExampleSections(Extension):
    """Lets an ``Example:`` be set as code; griffe knows the section as ``Examples:``."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rename the section in one docstring."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
