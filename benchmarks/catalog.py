"""Every case: about how long it takes on a quiet core, what it needs, and which of its figures are counters.

A counter is the same in every run on one kind of processor: bytes, FLOPs, calls, shares of right answers. The patterns
are those of `benchmarks.counters`. All other figures are times, or come from what the system hands out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# Without it a loop's times depend on when the C library gives memory back to the system.
STEADY_HEAP = {"MALLOC_MMAP_THRESHOLD_": "1073741824", "MALLOC_TRIM_THRESHOLD_": "4294967296"}
BYTES = "*_bytes"
PEAKS = "*/peak_bytes"
SOURCES = "{sources}"


@dataclass(frozen=True)
class Case:
    """One result file and what makes it.

    Attributes:
        minutes: Of one core that does nothing else.
        counters: Patterns of its figures' names.
        needs: What else it needs, in words.
        arguments: On its command line; "{sources}" stands for the folder of public code.
        module: What is run, if not the module of `benchmarks.cases` that is named like the case.
        environment: Variables that it runs under.
    """

    minutes: float
    counters: tuple[str, ...] = ()
    needs: str = ""
    arguments: tuple[str, ...] = ()
    module: str = ""
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def takes_sources(self) -> bool:
        return SOURCES in self.arguments

    @property
    def is_quick(self) -> bool:
        return self.minutes <= 1 and not self.takes_sources


CASES = {
    "acceptance": Case(
        30,
        ("*/lines_*", "*/exactness/is_equal", "*/peak_bytes/*"),
        "public projects",
        ("--sources", SOURCES),
        module="benchmarks.acceptance",
    ),
    "accumulation_error": Case(0.5, ("loss / steps/*",)),
    "activation_offload": Case(4, ("*/saved_bytes", "*peak_bytes", "*bit_equal")),
    "advice": Case(3, (BYTES, "*/status", "statuses/*", "*/measured_flops_ratio")),
    "allocation_pages": Case(4, ("*/snapshot_bytes", "*/num_actions", "*/peak_*"), "2 GB"),
    "allocator_replay": Case(0.2, ("num_*", "traces/*", "traces_that_a_wrong_model_cannot_follow/*")),
    "batch_size_search": Case(0.5, ("*",)),
    "block_treatments": Case(2, (BYTES, "*_flops", "*/is_bit_equal")),
    "budget_batches": Case(0.2, ("num_*", "m*_points", "cases/*")),
    "check_scripts": Case(0.4, ("*/num_*", "rules/*", "scripts/*"), "public scripts", (SOURCES,)),
    "chunk_budget": Case(10, (BYTES, "*/chunk_size", "*/num_*"), "10 GB"),
    "chunked_loss": Case(2, (BYTES, "*rows")),
    "clouds": Case(3, (PEAKS,), "8 GB"),
    "compiler_budget": Case(4, ("*_bytes", "*_flops", "*/is_equal")),
    "deep_stack": Case(0.5, (PEAKS, "*/flops")),
    "density_training": Case(1.5, (PEAKS, "*/num_cells")),
    "dry_run": Case(
        5, ("truth/models/*", "truth/num_*", "truth/interval_holds", "*/answers", "*/num_operators_in_two_steps")
    ),
    "dryrun_scripts": Case(5, ("scripts/*/is_*", "scripts/*_bytes"), "public scripts", (SOURCES,)),
    "edge_mlp": Case(8, (BYTES,), "8 GB"),
    "first_step": Case(5, ("summary/num_cases", "*/whole_batch_bytes")),
    "flight_cost": Case(1.5, ("counters/*",), environment=STEADY_HEAP),
    "graph_layers": Case(12, (PEAKS, "*/flops")),
    "grid_backends": Case(2, ("identical/*",)),
    "grid_sampler": Case(3, ("*/num_cells", "*/most_points_in_a_cell", "*/extra_bytes")),
    "hygiene": Case(0.3, ("*",)),
    "kill_nine": Case(6, ("memkit*/unreadable", "memkit*/lost_saves", "memkit*/other_weights")),
    "leak_watch": Case(2, ("summary/*", "planted/*", "clean/*")),
    "liger_rows": Case(0.1, ("*",)),
    "log_fuzz": Case(2, ("fuzz/num_logs", "fuzz/anything else")),
    "loop_cost": Case(8, environment=STEADY_HEAP),
    "loop_semantics": Case(0.1, ("*",)),
    "manager_cost": Case(6, environment=STEADY_HEAP),
    "metric_fuzz": Case(3, ("*",)),
    "oom_classifier": Case(0.1, ("*",)),
    "packed_batches": Case(1, ("*_bytes*", "*/num_*", "evenness/*")),
    "planner": Case(60, ("*_bytes", "*/num_searched", "*/fits")),
    "point_maxima": Case(1, (PEAKS, "*/flops", "points*")),
    "public_runs": Case(4, (BYTES, "*/num_*")),
    "rank_faults": Case(15, ("faults/*/finished", "faults/*/drawn", "everywhere/*/fired")),
    "recorded_card": Case(1, ("summary/*", "trainings/*")),
    "recorded_convolutions": Case(1.5, ("summary/*", "rows/*"), "recorded runs, torchvision", (SOURCES,)),
    "recorded_intervals": Case(0.1, ("*",)),
    "recorded_openmmlab": Case(1, ("summary/*", "rows/*", "growth_with_depth/*"), "recorded runs", (SOURCES,)),
    "recorded_timm": Case(60, ("growth/*", "brackets/*"), "recorded runs, timm", (SOURCES,)),
    "recorded_transformers": Case(5, ("summary/*", "rows/*"), "recorded runs, transformers 4.51", (SOURCES,)),
    "recorder_vs_profiler": Case(8, ("models/*", "hidden_workspace_bytes/*", "operator_sweep/*")),
    "report_pages": Case(8, ("fuzz/num_logs", "fuzz/anything else")),
    "resolution_levels": Case(0.2, ("num_*",)),
    "recovery_search": Case(20, ("faults/*/operators", "faults/*/runs", "faults/*/faults")),
    "rows_in_chunks": Case(0.3, (PEAKS, "*/flops")),
    "s0_sweep": Case(2, ("num_*", "largest_difference_bytes", "bytes_at_one_million_edges/*", "points/*"), "2 GB"),
    "scaling_law": Case(10, ("num_*", "families/*/dry_run_bytes", "families/*/predicted_bytes", "families/*/tier")),
    "shards": Case(2, ("*s_bytes", "*/optimizer_bytes", "*/*er_bytes", PEAKS, "*/num_parameters")),
    "shards_cards": Case(2, ("*",), arguments=("cards",), module="benchmarks.cases.shards"),
    "shards_published": Case(0.5, ("*",)),
    "silence": Case(10, ("num_cases", "num_steps", "num_silent", "fewest_*")),
    "sparse_voxels": Case(0.4, ("*bytes", "*/mode", "*/computed", "*/occupancy")),
    "split_check": Case(3, (BYTES, "*_flops")),
    "step_faults": Case(3, ("faults/*", "memory/*_peak")),
    "step_timeline": Case(0.5, ("*",)),
    "tail_group": Case(0.1, ("*",)),
    "tensor_plans": Case(9, ("*/summary/*", "*/plain/*_bytes", "*/plain/flops", "*/plain/is_*equal")),
    "tiled": Case(0.7, (PEAKS, "*/share_of_equal_labels")),
    "torch_versions": Case(
        100,
        needs="an environment of some gigabytes for each version of PyTorch, one after the other",
        arguments=("2.8.0", "2.10.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0"),
    ),
    "track_cost": Case(4),
    "track_vs_profiler": Case(0.3, ("*",)),
    "trainer_parts": Case(2, (BYTES,), environment={"HF_HUB_OFFLINE": "1"}),
    "virtual_gpu_cost": Case(0.5, ("*/num_operators_in_two_steps",)),
    "voxel_augmentation": Case(5, ("costs/*_bytes", "fuzz/*")),
    "voxel_losses": Case(4, ("perceptual/*", "growth/*", "*/peaks_in_grids/*", "generated_inputs/*"), "2 GB"),
    "worst_batch": Case(
        4, ("*/num_*", "*_bytes", "*/foreseen*", "*/real/*", "*/by_size_alone/*", "*/smaller_but_more/*")
    ),
    "wrapper_memory": Case(6, ("*_bytes", "*_flops")),
    "wrapper_overhead": Case(1.5, ("host_reads/*",), environment=STEADY_HEAP),
}
