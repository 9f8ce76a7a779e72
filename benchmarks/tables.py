"""Write the docs' tables from the committed result files.

A table stands between ``<!-- result: CASE -->`` and ``<!-- end -->``; ``CASE.part`` is another table of that case's
file. Run: python -m benchmarks.tables
"""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import tables_patches, tables_peers
from benchmarks.acceptance.project import all_projects
from benchmarks.markdown import Across, Row, Table, rows_at
from benchmarks.result import RESULTS, read_result

ROOT = Path(__file__).parents[1]
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_TABLE = re.compile(r"(<!-- result: ([\w.]+) -->\n).*?(<!-- end -->)", re.DOTALL)
OF_CI = "2.13.0"

MODELS = {"transformer": "transformer, 12 blocks", "unet": "3D U-Net"}
ADVISED = {
    "language": "transformer, text",
    "unet": "3D U-Net, MNI152 brain",
    "denoiser": "convolutions, a slice of it",
    "edge_mlp": "edge MLP, fsaverage5",
    "residual_net": "residual net with BatchNorm, digits",
    "vae": "variational autoencoder, digits",
    "point_net": "point net, fsaverage5",
    "wide_mlp": "wide MLP, foreach AdamW",
}
IN_README = {  # of the acceptance kit's projects, one of each kind
    "dcgan": "the generator's activations wait on the disk",
    "improved_diffusion": "its micro-batches, with exact weights",
    "nanogpt": "logits and their loss in chunks, exact accumulation",
    "nerf": "rays and points in chunks, backward too",
    "vae": "a batch in 8 parts, for a loss that is a sum",
}
PEAKS = (  # a figure and its unit stay on one line
    "{peak_bytes/plain:.0f in MB}&nbsp;MB → {peak_bytes/memkit:.0f in MB}&nbsp;MB ({more:+.0%})"
)
LINES_AND_PEAKS = "+{lines_added}&nbsp;-{lines_removed} | " + PEAKS
LOOP_COSTS = {
    "by hand again, over by hand": "the loop by hand, over another one",
    "train_step by hand, over by hand": "`train_step` in a loop by hand, over the loop by hand",
    "loop, over train_step by hand": "`MemoryEfficientTrainLoop`, over `train_step` in a loop by hand",
    "loop with on_oom='raise', over by hand": '... with `on_oom="raise"`, over the loop by hand',
    "loop, over by hand": "`MemoryEfficientTrainLoop`, over the loop by hand",
    "lightning, over by hand": "Lightning, over the loop by hand",
}
LOOP_SEMANTICS = {
    "10 batches, one skipped by the loss scaler: optimizer steps / schedule steps": (
        "{LIB/skipped_step/optimizer_steps} / {LIB/skipped_step/schedule_steps}"
    ),
    "52 samples, 4 x 4 to a step: gradient of the last step (1 is right)": "{LIB/last_group/last_group_ratio:.2f}",
    "stopped after 9 of 16 shuffled batches: samples of that epoch never trained on": (
        "{LIB/resume/never_trained_on} of {LIB/resume/trained_on}"
    ),
    "the same weights as without the stop": "{LIB/resume/same_weights:yes|no}",
}
SCORED = (
    "models | runs | error of the recorded peak: median, worst | within 5% | the least is consistent | "
    "verdict: fits / too close / does not fit / not known, of those that ran | of those that ran out"
)
SCORES = (
    "{family} | {num_rows} | {median_error:.1%}, {worst_error:.1%} | {within_5_percent:.0%} | "
    "{bracket_respected:.0%} | "
    "{verdicts/fits, ran} / {verdicts/too close, ran} / {verdicts/does not fit, ran} / {verdicts/not known, ran} | "
    "{verdicts/fits, ran out} / {verdicts/too close, ran out} / {verdicts/does not fit, ran out} / "
    "{verdicts/not known, ran out}"
)
MISSED = "run | card | error | reason"
MISSES = (
    "{result/figures/rows/@row/model}, {result/figures/rows/@row/optimizer}, batch {result/figures/rows/@row/batch} | "
    "{result/figures/rows/@row/gpu} | {error:+.1%} | {reason}"
)
Rows = Iterator[dict[str, Any]]


def more(place: str, than: str) -> Callable[[Row], float]:
    """By how much a figure is above another, as a share."""
    return lambda row: row[place] / row[than] - 1


def with_more(place: str, than: str) -> Callable[[Row], str]:
    """Bytes, and by how much they differ, where they do."""

    def shown(row: Row) -> str:
        change = f" ({more(place, than)(row):+.0%})" if row[place] != row[than] else ""
        return row.show(f"{{{place}:.1f MB}}") + change

    return shown


def measured(row: Row, name: str) -> str:
    """A name that starts with a library's, with the version that was measured."""
    library, comma, rest = name.partition(",")
    version = row["result/environment/versions"].get(library.lower())
    return f"{library} {version}{comma}{rest}" if version and library != "memkit" else name


def projects_in_readme(result: Any) -> Rows:
    for name, words in IN_README.items():
        yield {"name": name, "words": words, **result["figures"][name]}


def patches(result: Any) -> Rows:
    return (vars(project) for name, project in all_projects().items() if name in result["figures"])


def controls(result: Any) -> Rows:
    for project in patches(result):
        if found := result["figures"][project["name"]].get("control"):
            yield {"name": project["name"], "wrong": project["control"], **found}


def verified(row: Row) -> list[dict[str, Any]]:
    return [each for each in row["advice"].values() if each["status"] == "verified"]


def errors_of(key: str) -> Callable[[Row], str]:
    def shown(row: Row) -> str:
        errors = [each[key] for each in verified(row) if each.get(key) is not None]
        return f"{statistics.median(errors):.1%} ({max(errors):.1%})" if errors else ""

    return shown


def ratios(key: str) -> Callable[[Row], str]:
    return lambda row: ", ".join(f"{each[key]:.2f}" for each in row["budgets"])


def by_tensors(row: Row, budgets: str = "budgets") -> list[dict[str, Any]]:
    """The plans by saved tensors that were carried out, each with its budget's figures."""
    found = ((budget, budget["ways"]["tensors"]) for budget in row[budgets])
    return [budget | figures for budget, figures in found if "error" not in figures]


def all_by_tensors(row: Row) -> list[dict[str, Any]]:
    return by_tensors(row) + by_tensors(row, "without_offload")


def over_blocks(key: str) -> Callable[[Row], str]:
    def shown(row: Row) -> str:
        ratios = [each[key] for each in by_tensors(row) if key in each]
        return ", ".join(f"{each:.2f}" for each in ratios[1:])  # of the first budget nothing is treated

    return shown


def over_recomputed_blocks(row: Row) -> str:
    ratios = [each.get("time_of_best_by_blocks") for each in by_tensors(row, "without_offload")]
    return ", ".join(f"{each:.2f}" for each in ratios if each)


def share_of_plain(way: str) -> Callable[[Row], float]:
    return lambda row: row["least_bytes"][way] / row["plain"]["required_bytes"]


def recomputed(place: str) -> Callable[[Row], str]:
    """FLOPs that run again, over the plain step's."""
    return lambda row: "" if row.get(place) is None else f"{row[place] / row['plain_flops']:.1%}"


def added_by(manager: str) -> Callable[[Row], str]:
    def shown(row: Row) -> str:
        loop = row[f"result/figures/loops/{manager}: {row['step']}"]
        return f"{loop['calls_us']:.0f} us ({loop['calls_ratio'] - 1:.2%})"

    return shown


def chunked_losses(result: Any) -> Rows:
    for row in rows_at(result, "rows/{way}"):
        yield {"loss": "MLP, 50,000 rows", "way": row["way"], **row.figures}
    for row in rows_at(result, "cross_entropy/{case}/modes/{way}"):
        if row["case"] == 0:  # the others have a table of their own
            loss = row.show("{case/rows:,} tokens of width {case/width}, {case/num_classes:,} words")
            yield {"loss": loss, "way": row["way"], **row.figures}


def other_sizes(result: Any) -> Rows:
    yield from result["figures"]["cross_entropy"][1:]


def first_steps(result: Any) -> Rows:
    for model in result["figures"]["cases"]:
        yield {"model": model, "way": "foreseen", "key": "with"}
        yield {"model": model, "way": "tried", "key": "without"}


def predictors(result: Any) -> Rows:
    """Each predictor's errors on xMem's runs, of both cases."""
    others = read_result("recorded_transformers")["figures"]["predictors"]
    for name, found in result["figures"]["predictors"].items():
        yield {"predictor": name, "convolutions": found, "transformers": others[name]}


def samplers(result: Any) -> Rows:
    """Each way of sampling a grid, and whether its sample is random."""
    exact = {"loop", "global sort, float64", "global sort, int64"}
    yield {"way": "memkit", "key": "memkit", "random": "yes"}
    for way in next(iter(result["figures"].values()))["times_faster"]:
        if way != "index, cold":
            yield {"way": way, "key": way, "random": "" if way.endswith("pass") else "yes" if way in exact else "no"}
    yield {"way": "the index, once", "key": "index, cold", "random": ""}
    yield {"way": "memory of a draw", "key": "", "random": ""}


def sampler_cell(row: Row) -> str:
    key = row["key"]
    if not key:
        return row.show("{scene/extra_bytes:.1f MB}")
    shown = f"{row['scene/ms'][key]:.1f} ms"
    if key in ("memkit", "index, cold"):
        return shown
    return f"{shown} ({row['scene/times_faster'][key]:#.3g})".replace(".)", ")")


def batches(row: Row) -> str:
    fill = row.show(" ({case/@way/fill?:.1%} full, spread {case/@way/spread?:.2f})")
    return row.show("{case/@way/num_batches:.0f}") + fill


def process_peak(row: Row) -> int | None:
    size = {"20k": "20000", "200k uniform": "200000"}.get(row["size"])
    return row[f"result/figures/kdtree_process_peak_bytes/{size}"] if row["way"] == "kdtree" and size else None


def only_here(figures: dict[str, Any], version: str) -> dict[str, str]:
    """Tests that a version of PyTorch skips and the one that CI runs does not, with the reasons."""
    usual = figures.get(OF_CI, {"skipped": {}})["skipped"]
    return {name: reason for name, reason in figures[version]["skipped"].items() if name not in usual}


def lacks(result: Any) -> Rows:
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for version in result["figures"]:
        for reason in only_here(result["figures"], version).values():
            lack = re.sub(r"^PyTorch has no ", "", re.sub(r"^Skipped: ", "", reason)).partition(" (")[0]
            found[lack][version] += 1
    for lack, counts in sorted(found.items()):
        yield {"lack": lack, "versions": ", ".join(f"{version} ({count})" for version, count in counts.items())}


def peaks_that_differ(result: Any) -> Rows:
    versions = [row["peak_bytes"]["cpu"] for row in result["figures"].values()]
    for model in sorted({model for peaks in versions for model in peaks}):
        if len({peaks[model] for peaks in versions if model in peaks}) > 1:
            yield {"model": model}


def peaks_on_a_card(result: Any) -> Rows:
    """How each version's peaks differ from those of the version that CI runs."""
    usual = result["figures"][OF_CI]["peak_bytes"]["RTX 4090"]
    for version, row in result["figures"].items():
        pairs = [(peak, usual.get(model)) for model, peak in row["peak_bytes"]["RTX 4090"].items()]
        more = [peak - other for peak, other in pairs if isinstance(peak, int) and isinstance(other, int)]
        if version != OF_CI:
            yield {"version": version, "num": len(more), "equal": more.count(0), "least": min(more), "most": max(more)}


TABLES: dict[str, Table | tuple[Table, ...]] = {
    # All result files
    "all.peers": tables_peers.PEERS,
    "all.counts": tables_peers.COUNTED,
    "all.reasons": tables_peers.REASONS,
    # Recorded GPUs
    "recorded_convolutions": Table(
        "summary/{family}",
        SCORED,
        SCORES,
    ),
    "recorded_transformers": Table("summary/{family}", SCORED, SCORES),
    "recorded_convolutions.predictors": Table(
        predictors,
        "predictor | convolutions: median error, worst | within 5% | transformers: median error, worst | within 5%",
        "{predictor} | {convolutions/median_error:.1%}, {convolutions/worst_error:.0%} | "
        "{convolutions/within_5_percent:.0%} | {transformers/median_error:.1%}, {transformers/worst_error:.0%} | "
        "{transformers/within_5_percent:.0%}",
    ),
    "recorded_convolutions.misses": Table("misses/{row}", MISSED, MISSES),
    "recorded_transformers.misses": Table("misses/{row}", MISSED, MISSES),
    "recorded_openmmlab": Table(
        "summary/{family}",
        "networks | trainings | error of allocated bytes: median, worst | within 5% | "
        "median without the rule for `cudnn.benchmark`",
        "{family} | {num_rows} | {median_error:.1%}, {worst_error:+.1%} | {within_5_percent:.0%} | "
        "{median_error_without_workspaces:.1%}",
    ),
    "recorded_timm.growth": Table(
        "growth/summary/{models}",
        "models | growths | median error | bias | within 5% | FakeTensor's, as recorded | "
        "median without the rule for `cudnn.benchmark` | the rule chosen by the other families | models shuffled",
        "{num_models} | {num_rows} | {median_error:.1%} | {bias:+.1%} | {within_5_percent:.0%} | "
        "{faketensor_median_error:.1%} | {median_error_without_workspaces:.1%} | {leave_one_family_out:.1%} | "
        "{median_error_shuffled:.0%}",
    ),
    "recorded_intervals": Table(
        "intervals/{source}",
        "recorded | runs | within the interval | median width | with another run's interval",
        "{source} | {num_rows} | {held:.1%} | {median_width:.1%} | {held_shuffled:.0%}",
    ),
    "recorded_intervals.margins": Table(
        "",
        "chosen by the other families: within, median width | chosen by the other cards | median width of 95%: these "
        "margins | with another run's elastic part | a share of all alone",
        "{chosen/by_family/held:.1%}, {chosen/by_family/median_width:.1%} | "
        "{chosen/by_gpu/held:.1%}, {chosen/by_gpu/median_width:.1%} | {control/median_width:.1%} | "
        "{control/median_width_with_elastic_parts_swapped:.1%} | {control/median_width_by_a_share_alone:.1%}",
    ),
    "recorded_intervals.verdicts": Table(
        "verdicts/{group}",
        "card or family | runs | that ran: fits / too close / does not fit / not known | that ran out | too close | "
        "right, of the clear verdicts",
        "{group} | {num_rows} | {fits, ran} / {too close, ran} / {does not fit, ran} / {not known, ran} | "
        "{fits, ran out} / {too close, ran out} / {does not fit, ran out} / {not known, ran out} | "
        "{share_too_close:.0%} | {share_right:.1%}",
    ),
    "recorded_intervals.wrong": Table(
        "wrong/{number}",
        "model | card | layout | batch | verdict | because",
        "{model?} | {gpu} | {layout?} | {batch} | {verdict}, but it {ran:ran|ran out} | {reason}",
    ),
    # Public code and whole runs
    "acceptance": Table(
        "{project}",
        "project | lines | peak | time | losses differ by | state differs by | compared in, allowed | steps",
        "[{project}](https://github.com/{repository}/tree/{commit}) | "
        + LINES_AND_PEAKS
        + " | {time_ratio:.2f} | {exactness/loss_difference?not alike:.0e} | "
        "{exactness/state_difference?not alike:.0e} | {exactness/dtype}, {exactness/stated:.0e} | "
        "{exactness/num_steps}",
        {"more": more("peak_bytes/memkit", "peak_bytes/plain")},
    ),
    "acceptance.short": Table(
        projects_in_readme,
        "project, and what memkit does in it | peak | time | losses differ by",
        "[{name}](https://github.com/{repository}): {words} | "
        + PEAKS
        + " | {time_ratio:.2f} | {exactness/loss_difference?not alike:.0e}",
        {"more": more("peak_bytes/memkit", "peak_bytes/plain")},
    ),
    "acceptance.patches": Table(
        patches, "project | what memkit does in it | trained on | what failed", "{name} | {shows} | {data} | {failed}"
    ),
    "acceptance.controls": Table(
        controls,
        "project | wrong on purpose | losses differ by | state differs by",
        "{name} | {wrong?} | {loss_difference?not alike:.0e} | {state_difference?not alike:.0e}",
    ),
    "dryrun_scripts": Table(
        "scripts/{number}",
        "script | peak | reserved | parameters, gradients, optimizer state | activations, card to CPU | "
        "operators that differ on a card",
        "{script} | {peak_bytes:,.0f MiB} | {reserved_bytes:,.0f MiB} | {is_equal:equal|differ} | "
        "{activations_ratio:.3f} | {otherwise}",
        {"otherwise": lambda row: row["differs"] or "nothing"},
    ),
    "public_runs": Table(
        "{run}",
        "run | precision | GPU's peak | memkit | GPU's reserve | memkit | allocations in the same order",
        "{name} | {precision} | {gpu_peak_bytes:,} | {off:+,} | {gpu_reserved_bytes:,} | {reserve_off:+.2%} | "
        "{num_allocations_alike?:,} of {num_gpu_allocations?:,}",
        {
            "name": lambda row: row["run"].replace("_", " ").replace("medium", "sequences of"),
            "off": lambda row: row["peak_bytes"] - row["gpu_peak_bytes"],
            "reserve_off": more("reserved_bytes", "gpu_reserved_bytes"),
        },
    ),
    "recorded_card": Table(
        "trainings/{name}",
        "training | the card's peak | memkit | in the first run | the card's reserve | memkit | in the first run",
        "{name} | {measured_peak_bytes:,.0f MiB} | {off} | {peak_error_then:+.2%} | "
        "{measured_reserved_bytes?:,.0f MiB} | {reserved_error?:+.2%} | {reserved_error_then?:+.2%}",
        {"off": lambda row: f"{row['peak_error']:+.2%}{'*' if row['reason'] else ''}" if row["peak_error"] else "0"},
    ),
    "recorded_card.summary": Table(
        "summary/{which}",
        "  | trainings | median error | worst | within 1%",
        "peak | {num_trainings} | {peak_error_median:.2%} | {peak_error_worst:.2%} | "
        "{peak_error_num_within_1_percent}\n"
        "peak, in the first run | {num_trainings} | {peak_error_then_median:.2%} | {peak_error_then_worst:.2%} | "
        "{peak_error_then_num_within_1_percent}\n"
        "reserve | {reserved_error_num} | {reserved_error_median:.2%} | {reserved_error_worst:.2%} | "
        "{reserved_error_num_within_1_percent}\n"
        "reserve, in the first run | {reserved_error_num} | {reserved_error_then_median:.2%} | "
        "{reserved_error_then_worst:.2%} | {reserved_error_then_num_within_1_percent}",
    ),
    "recorded_card.misses": Table(
        lambda result: [{"name": name, **row} for name, row in result["figures"]["trainings"].items() if row["reason"]],
        "training | error | reason",
        "{name} | {peak_error:+.2%} | {reason}",
        empty="None.\n",
    ),
    "recorded_card.losses": Table(
        "cases/losses/{way}", "way | peak beyond inputs | time", "{way} | {peak_bytes:,.0f MiB} | {ms:.1f} ms"
    ),
    "recorded_card.edges": Table(
        "cases/edges in chunks/{way}", "way | peak beyond inputs | time", "{way} | {peak_bytes:,.0f MiB} | {ms:.1f} ms"
    ),
    "recorded_card.recovery": Table(
        "cases/recovery/{name}",
        "network | plain reserves | limit | plain | memkit reserves | losses differ by",
        "{name} | {plain_reserved_bytes:,.0f MiB} | {limit_bytes:,.0f MiB} | {plain_ran_out:ran out|finished} | "
        "{reserved_bytes:,.0f MiB} | {largest_difference:.0e}",
    ),
    "liger_rows": Table(
        "{row}",
        "operator | card | rows equal in every digit | peaks",
        "{operator} | {card} | {num_as_printed} of {num_rows} | "
        "{smallest_peak_bytes:,.0f in MiB} to {largest_peak_bytes:,.0f MiB}",
        {
            "operator": lambda row: row["row"].partition(", ")[0].replace("_", " "),
            "card": lambda row: row["row"].partition(", ")[2],
        },
    ),
    "torch_versions": Table(
        "{version}",
        "version | build | commit | Python | passed | skipped | ... for this version | failed",
        "{version} | {build} | {commit} | {python} | {num_passed:,} | {skipped:num} | {only_here:num} | {failed:num}",
        {"only_here": lambda row: only_here(row["result/figures"], row["version"])},
    ),
    "torch_versions.skipped": Table(
        lacks, "what is missing | versions (tests)", "`{lack}` | {versions}", empty="None.\n"
    ),
    "torch_versions.peaks": Table(
        peaks_that_differ,
        "model",
        "{model}",
        across=Across("{version}", "{version}", "{version/peak_bytes/cpu/@model?None:,}"),
        empty="None differs.\n",
    ),
    "torch_versions.card": Table(
        peaks_on_a_card,
        "version | models | of these with the same peak | least difference | greatest",
        "{version} | {num} | {equal} | {least:+,} | {most:+,}",
    ),
    "silence": Table(
        "",
        " | steps",
        """
        steps, each split and judged | {num_steps:,}
        parts train something else than the whole batch | {num_unequal:,}
        ... of these warned of | {verdicts/unequal, told?0:,}
        ... refused | {verdicts/unequal, refused?0:,}
        ... silent | {num_silent:,}
        raw errors | {num_crashes:,}
        equal | {num_equal:,}
        ... warned of or refused all the same | {num_false_alarms:,}
        """,
    ),
    "leak_watch": Table(
        "",
        "what | figure",
        """
        planted leaks named | {summary/named} of {summary/planted}
        reports of something else in those scripts | {summary/other_reports}
        clean scripts with an alarm | {summary/false_alarms} of {summary/clean}
        a check among {costs/objects:,} Python objects | {costs/check_without_suspects_ms:.0f} ms
        of it one garbage collection | {costs/collect_ms:.0f} ms
        a check while something grows | {costs/check_with_a_leak_ms:.0f} ms
        """,
    ),
    # Training steps and loops
    "tail_group": Table(
        "{library}",
        "library | whole groups | last group",
        "{name} | {whole_groups_mean_ratio:.4f} | {last_group_ratio:.4f}",
        {"name": lambda row: measured(row, row["library"]).replace("plain", "plain loop, `loss / steps`")},
    ),
    "loop_semantics": Table(
        "",
        " | memkit | accelerate | Lightning",
        "\n".join(
            " | ".join([words, *(cell.replace("LIB", library) for library in ("memkit", "accelerate", "lightning"))])
            for words, cell in LOOP_SEMANTICS.items()
        ),
    ),
    "loop_cost": Table(
        "",
        " | whole steps | with operators' own time as by hand",
        "\n".join(
            f"{words} | {{cost/{pair}/ratio:.3f}} ± {{cost/{pair}/standard_error:.3f}} | "
            f"{{cost/{pair}/own_ratio:.4f}} ± {{cost/{pair}/own_standard_error:.4f}}"
            for pair, words in LOOP_COSTS.items()
        ),
    ),
    "kill_nine": Table(
        "{way}",
        "way | killed in a save | states that could not be read | temporary files left",
        "{name} | {kills_in_save} | {unreadable} | {temporary_files_left}",
        {"name": lambda row: measured(row, row["way"])},
    ),
    "trainer_parts": Table(
        "{step:plain|whole|2 parts|4 parts|8 parts}",
        "step | peak | gradient's error | time",
        "{name} | {peak} | {gradient_error:.1g} | {time_ratio:.2f}",
        {
            "name": lambda row: row["step"].replace("plain", "`Trainer`"),
            "peak": with_more("peak_bytes", "result/figures/plain/peak_bytes"),
        },
    ),
    "wrapper_memory": Table(
        "{model}/{setting}",
        "model | setting | peak | activations | saved for backward | backward / forward FLOPs | time",
        "{name} | {setting} | {peak} | {activations} | {saved} | {flops_ratio:.2f} | {time_ratio:.2f}",
        {
            "name": lambda row: MODELS[row["model"]],
            "peak": with_more("peak_bytes", "model/plain/peak_bytes"),
            "activations": with_more("activation_bytes", "model/plain/activation_bytes"),
            "saved": with_more("saved_bytes", "model/plain/saved_bytes"),
            "flops_ratio": lambda row: row["backward_flops"] / row["forward_flops"],
        },
    ),
    "wrapper_overhead": (
        Table(
            "overhead/{step}",
            'step | per micro-batch, `on_oom="raise"` | per micro-batch, `on_oom="exact"`',
            "{step} micro-batches | {raise_us_per_microbatch:.0f} us ({raise:+.1%}) | "
            "{exact_us_per_microbatch:.0f} us ({exact:+.1%})",
            {"raise": lambda row: row["raise_ratio"] - 1, "exact": lambda row: row["exact_ratio"] - 1},
        ),
        Table("host_reads/{loss}", "loss | host reads per step", "{loss} | {}"),
    ),
    "step_faults": Table(
        "faults/{step}",
        "step | plain: torn of faults | wrapper: torn | `atomic_steps`: torn | peaks of the three | "
        "times of the last two",
        "{step} | {plain/torn} of {plain/faults} | {guarded/torn} of {guarded/faults} | "
        "{in chunks/torn} of {in chunks/faults} | "
        "{costs/plain_peak:.2f} / {costs/guarded_peak:.2f} / {costs/in_chunks_peak:.2f} | "
        "{costs/guarded_time_ratio:.2f} / {costs/in_chunks_time_ratio:.2f}",
        {"costs": lambda row: row["result/figures/memory/@step/equal"]},
    ),
    "recovery_search": (
        Table(
            "faults/{step}",
            "model, optimizer | operators | faults, in three threads | runs with other parts | wrong",
            "{step} | {operators} | {faults} | {cut} | {wrong:num}",
        ),
        Table(
            "interrupts/{step}",
            "model, optimizer | interrupts | step done | step undone | wrong",
            "{step} | {interrupts} | {done} | {undone} | {wrong:num}",
            {"undone": lambda row: row["interrupts"] - row["done"]},
        ),
    ),
    "first_step": Table(
        first_steps,
        "model | size",
        "{model} | {way}",
        across=Across(
            "cases/mlp/limits/{number}",
            "{share:.0%}",
            "{result/figures/cases/@model/limits/@number/@key/num_ooms/0?died}",
        ),
    ),
    "hygiene": Table(
        "{habit}",
        "habit | claimed | saves | of | note",
        "{habit} | {claim} | {saving:.0%} | {bad_bytes:.1f MB} | {note}",
    ),
    "split_check": Table(
        "{step}",
        "step | peak of a check, of a plain step | operations, in plain steps | time, in plain steps",
        "{step} | {look_bytes:,.0f in MiB} of {plain_bytes:,.0f MiB} | {operations:.2f} | {time_ratio:.2f}",
        {"operations": lambda row: row["look_flops"] / row["plain_flops"]},
    ),
    # What is measured and foretold
    "track_cost": Table(
        lambda result: ({"way": way} for way in next(iter(result["figures"].values()))["ways"] if way != "bare"),
        "way",
        "{name}",
        {"name": lambda row: f"`{row['way']}`" if row["way"].startswith("track") else row["way"]},
        Across(
            "{size}",
            "{size}, {ways/bare/ms_per_step:.1f} ms",
            "{size/ways/@way/steps_ratio:.2f} ({size/ways/@way/whole_ratio:.2f})",
        ),
    ),
    "allocation_pages": Table(
        "{size}",
        "snapshot | actions | processor time | memory | page",
        "{size} | {num_actions:,} | {cpu_seconds:.1f} s | {resident_bytes:,.0f in MiB} MiB | {page_bytes:.2f MB}",
    ),
    "flight_cost": Table(
        "loops/{name}",
        "in each training step | added",
        "{label} | {extra_us:.0f} us ({percent:.1%}), known to {standard_error_us:.0f} us",
        {"label": lambda row: row["name"], "percent": lambda row: row["ratio"] - 1},
    ),
    "manager_cost": Table(
        lambda _: ({"step": step} for step in ("step()", "3 phases, step()", "4 phases, step()")),
        "in each training step | memory only | log file | `reset_peaks=True`",
        "{name} | {memory} | {log} | {peaks}",
        {
            "name": lambda row: row["step"].replace("step()", "`step()`").replace(", ", " and "),
            "memory": added_by("memory only"),
            "log": added_by("log file"),
            "peaks": added_by("reset_peaks"),
        },
    ),
    "dry_run": (
        Table(
            "truth/scores/{tool}",
            "tool | answers | within 64 bytes | median error | largest | peak inside the interval",
            "{name} | {answers} of {truth/num_models} | {within_64_bytes} | {median_error:.2%} | "
            "{largest_error:.0%} | {inside}",
            {
                "name": lambda row: measured(row, row["tool"].replace("MemTracker", "torch, MemTracker")),
                "inside": lambda row: row.show(
                    "{truth/interval_holds} of {truth/num_models}" if row["tool"] == "memkit" else "no interval"
                ),
                "truth": lambda row: row["result/figures/truth"],
            },
        ),
        Table(
            "speed/{step}",
            "step | operators, two steps | each | in all",
            "{step} | {num_operators_in_two_steps:,} | {ms_per_operator:.3f} ms | {seconds:.2f} s",
            {"billions": lambda row: row["result/figures/70B/num_parameters"] / 1e9},
            last="{billions:.1f} billion parameters, {70B/highest_resident_bytes_of_the_process:.2f GB} of host memory"
            " |  |  | {70B/seconds:.1f} s",
        ),
    ),
    "scaling_law": Table(
        "families/{family}/train",
        "step | n | law | law over dry run, 100 times as large | processor time | secant over dry run | "
        "law over a real run that fits | real run within the interval",
        "{family} | {n} | {law} | {predicted_over_dry_run?:.7f} | {seconds:.1f} s | {secant_over_actual?:.3f} | "
        "{predicted_over_real?:.7f} | {real_is_in_interval?:yes|no}",
        {"law": lambda row: row["tier"] + row.show(", order {order?}")},
    ),
    "s0_sweep": Table(
        "bytes_at_one_million_edges/{mlp:edge MLP 64x64|edge MLP 128x128x128|edge MLP 256x256x256}",
        "MLP | training | inference",
        "{widths} | {train:.2f in GiB} | {inference:.2f in GiB}",
        {"widths": lambda row: row["mlp"].removeprefix("edge MLP ")},
    ),
    # What makes a step fit
    "advice": Table(
        "models/{model}",
        "model | plain peak | verified | saves most, by the allocator | live tensors, largest error | "
        "with the kernels' workspace, median (largest) | by subtraction, median (largest)",
        "{name} | {peak_bytes:.1f MB} | {verified:num} | {best/name}: {best/allocator_saved_bytes:.1f MB} | "
        "{off:.1%} | {allocator} | {naive}",
        {
            "name": lambda row: ADVISED[row["model"]],
            "verified": verified,
            "best": lambda row: max(verified(row), key=lambda each: each["allocator_saved_bytes"]),
            "off": lambda row: max(each["saved_off_by"] for each in verified(row)),
            "allocator": errors_of("allocator_off_by"),
            "naive": errors_of("naive_off_by"),
        },
    ),
    "planner": Table(
        "{model}",
        "model | budgets that held | time over the best that fits, `measure=True` | by predicted times alone | "
        "gradient error, float64",
        "{model} | {held} of {budgets:num} | {measured} | {predicted} | {error:.1e}",
        {
            "held": lambda row: sum(each["fits"] for each in row["budgets"]),
            "measured": ratios("time_over_best"),
            "predicted": ratios("by_prediction_over_best"),
            "error": lambda row: max(each["gradient_error"] for each in row["budgets"]),
        },
    ),
    "tensor_plans": Table(
        "{model}",
        "model | plain step | budgets that held, bits equal, bytes off by | least: by blocks, by tensors | "
        "time over the best by blocks, at equal peaks | without `treat` | without offload | "
        "predicted time over measured, pairs in order",
        "{model} | {plain/peak_bytes:.0f MB}, {ms:.0f} ms | {held} of {plans:num}, {summary/are_bits_equal:yes|no}, "
        "{summary/largest_off_bytes:,} | {by_blocks:.0%}, {by_tensors:.0%} | {ratios} | {chosen} | {recomputing} | "
        "{low:.2f} to {high:.2f}, {order/tensors/in_order} of {order/tensors/pairs}",
        {
            "ms": lambda row: 1000 * row["plain/seconds"],
            "plans": all_by_tensors,
            "held": lambda row: sum(each["peak_bytes"] <= each["budget_bytes"] for each in all_by_tensors(row)),
            "by_blocks": share_of_plain("blocks"),
            "by_tensors": share_of_plain("tensors"),
            "ratios": over_blocks("time_of_best_by_blocks"),
            "chosen": over_blocks("chosen_time_of_best_by_blocks"),
            "recomputing": over_recomputed_blocks,
            "low": lambda row: min(each["predicted_seconds"] / each["seconds"] for each in by_tensors(row)),
            "high": lambda row: max(each["predicted_seconds"] / each["seconds"] for each in by_tensors(row)),
        },
    ),
    "compiler_budget": Table(
        "{model}/budgets/{budget}",
        "model | `activation_memory_budget` | it saves | memkit saves | it recomputes | memkit recomputes",
        "{model} | {budget} | {compiled_saved_bytes?:.2f MB} | {memkit/saved_bytes?:.2f MB} | {compiler} | {memkits}",
        {
            "compiler": lambda row: row.get("error") or recomputed("compiled_recomputed_flops")(row),
            "memkits": recomputed("memkit/recomputed_flops"),
        },
        is_grouped=True,
    ),
    "block_treatments": Table(
        "cases/{model}/{way}",
        "model | treatment | peak | saved | backward / forward FLOPs | bit-equal | time",
        "{model} | {treatment} | {peak} | {saved_bytes?:.1f MB} | {backward_over_forward_flops?:.2f} | "
        "{is_bit_equal?:yes|no} | {time_ratio?:.2f}",
        {
            "treatment": lambda row: row["way"] if row["way"].startswith(("keep", "torch")) else f"**{row['way']}**",
            "peak": lambda row: row.show("{peak_bytes?:.1f MB}") or row["error"].partition("!")[0].strip(),
        },
    ),
    "activation_offload": Table(
        "cases/{model}",
        "model | plain | on the disk | times lower | processor time",
        "{model} | {plain_peak_bytes:.1f MB} | {offload_peak_bytes:.1f MB} | {times_lower:.1f} | {cpu_time_ratio:.2f}",
    ),
    "edge_mlp": Table(
        "cases/{case}/ways/{way}",
        "hidden layers, edges, reduction | way | peak | time | gradient error",
        "{case/hidden}, {case/edges:,} edges, {case/reduce}{case/gather:, gathered|}"
        "{case/norms?:, LayerNorm and SiLU|}{case/pages_kept?:, pages kept|} | {way} | {peak_bytes:,.1f MiB} | "
        "{ratio?:.2f} | {gradient_error?:.1e}",
        is_grouped=True,
    ),
    "chunk_budget": Table(
        "cases/{case}/ways/{way}",
        "edges, reduction | budget | rows | chunks | kept | peak | first call | time",
        "{case/edges:,} edges, {case/reduce}{case/gather:, gathered|} | {way} | {chunk_size?:,} | {num_chunks?:,} | "
        "{num_kept?:,} | {peak_bytes:,.2f MiB} | {first_peak_bytes:,.2f MiB} | {ratio:.2f}",
        is_grouped=True,
    ),
    "chunked_loss": Table(
        chunked_losses,
        "loss | way | peak | time | gradients differ by",
        "{loss} | {way} | {peak_bytes:,.1f MiB} | {time_ratio:.2f} | {gradient_difference:.0e}",
        is_grouped=True,
    ),
    "chunked_loss.sizes": Table(
        other_sizes,
        "tokens x width, words | plain | memkit | torch, memkit's rows | Liger's method, memkit's rows",
        "{rows:,} x {width}, {num_classes:,} | {modes/plain/peak_bytes:,.1f MiB} | "
        + " | ".join(
            f"{{modes/{way}/peak_bytes:,.1f MiB}}, {{modes/{way}/time_ratio:.2f}}"
            for way in ("memkit", "torch, memkit's rows", "Liger's method, memkit's rows")
        ),
    ),
    "tiled": Table(
        "inference/{way}",
        "way | training: peak | time | inference: peak | time | error",
        "{way} | {trained/peak_bytes?:.0f MB} | {trained/time_ratio?:.2f} | {peak_bytes:.0f MB} | {time_ratio:.2f} | "
        "{error?:.0e}",
        {"trained": lambda row: row["result/figures/training/@way"]},
    ),
    # Points, clouds, voxels
    "budget_batches": Table(
        "cases/1,600 points/{way}", "way", "{way}", {"batches": batches}, Across("cases/{case}", "{case}", "{batches}")
    ),
    "worst_batch": Table(
        "{data}",
        "data set | batches, kinds | predicted | epoch peaks at | predicted bytes | live bytes, measured | "
        "with what kernels take | batches with equal live bytes | by the largest sample, by the sum of samples, by "
        "elements",
        "{data} | {num_batches}, {num_kinds} | {foreseen} | {real/allocated} | {predicted_bytes:,} | {live_bytes:,} | "
        "{allocated_bytes:,} | {num_batches_of_equal_live_bytes} of {num_batches} | "
        "{by_size_alone/the largest sample}, {by_size_alone/the largest samples together}, "
        "{by_size_alone/the most elements}",
    ),
    "worst_batch.cost": Table(
        "{data}",
        "data set | a kind | all kinds | `num_estimates=12` | its answer | the epoch | smaller but more, CPU | "
        "smaller but more, RTX 4090",
        "{data} | {seconds_per_kind:.2f} s | {seconds_of_search:.1f} s | {seconds_of_few:.1f} s | {foreseen_of_few} | "
        "{seconds_of_epoch:.1f} s | {smaller_but_more/cpu/num_more} of {smaller_but_more/cpu/num_pairs} pairs | "
        "{smaller_but_more/RTX 4090/num_more} of {smaller_but_more/RTX 4090/num_pairs}",
    ),
    "grid_sampler": Table(
        samplers,
        "way | random sample",
        "{way} | {random}",
        {"cell": sampler_cell},
        Across("{scene}", "{scene}", "{cell}"),
    ),
    "density_training": (
        Table(
            "modes/{mode}",
            "mode | peak of a step | time | gradient against joint",
            "`{mode}` | {peak_bytes:.0f MB} | {time_ratio:.2f} | {gradient_error:.0e}",
        ),
        Table(
            "training/{way}",
            "trained on | dense | half | single | single as dense",
            "{way} | {dense/right:.1%} ({dense/right_if_dense:.1%}) | {half/right:.1%} ({half/right_if_dense:.1%}) | "
            "{single/right:.1%} ({single/right_if_dense:.1%}) | {single/same:.1%}",
        ),
        Table(
            "sampling/{points}",
            "points | sampling | step | share",
            "{num_points:,} | {sampling_ms:.1f} ms | {step_ms:.0f} ms | {share:.1%}",
            {"num_points": lambda row: int(row["points"])},
        ),
    ),
    "clouds": Table(
        "{size:20k|200k uniform|200k lidar-like}/{way}",
        "points of each cloud | way | peak of tensors | processor time | peak of the process",
        "{size} | {name} | {peak_bytes:,.1f MB} | {cpu_seconds:.2f} s | {process?:.1f MB}",
        {
            "name": lambda row: row.show("`torch.cdist`, {way}" if row["way"] == "all pairs" else '`backend="{way}"`'),
            "process": process_peak,
        },
    ),
    "clouds.far": Table(
        "far_away/{number}",
        "distance of the clouds from the origin | `torch.cdist` | tiled | pruned | k-d tree",
        "{offset_m:g} m | {torch.cdist:.1e} | {tiled:.1e} | {pruned:.1e} | {kdtree:.1e}",
    ),
    "clouds.oracles": Table(
        "oracles/{metric}",
        "metric | memkit | the other | relative difference",
        "{metric} | {memkit:.6f} | {other:.6f} | {relative:.0e}",
    ),
    "resolution_levels": (
        Table("num_active_by_level/{level}", "level | occupied voxels", "{level} | {:,}"),
        Table("ms/{way}", "all levels by | time", "{way} | {:.0f} ms"),
    ),
    "sparse_voxels": (
        Table(
            "convolution/{surface}",
            "surface | occupied | dense, peak | sparse, peak + neighbors | time (neighbors) | error, float64",
            "{surface} | {occupancy:.2%} | {dense/peak_bytes:.1f MB} | "
            "{sparse/peak_bytes:.2f MB} + {neighbours/bytes:.2f MB} | "
            "{sparse/ratio:.3f} ({neighbours/ratio:.3f}) | {error_float64:.0e}",
        ),
        Table(
            "modes/{network}/{way}",
            "network | mode | runs over | peak | time | error",
            "{network} | {shown} | {computed:.0%} | {peak_bytes:.0f MB} | {ratio:.2f} | {error:.0e}",
            {"shown": lambda row: row.show("`{way}`" if row["way"] == row["mode"] else "`{way}`: `{mode}`")},
            is_grouped=True,
        ),
    ),
    "voxel_losses": Table(
        "perceptual/4 x 64^3/{way}",
        "way | peak, 4 x 4 x 64³ | of plain | time, 2 x 4 x 48³",
        "{way} | {peak_bytes:,.0f MiB} | 1/{part:.1f} | {result/figures/time_of_plain/@way:.2f}",
        {"part": lambda row: row["result/figures/perceptual/4 x 64^3/plain/peak_bytes"] / row["peak_bytes"]},
    ),
    "voxel_losses.growth": Table(
        "growth/{way}", "way | 2 samples | 4 | 8", "{way} | {2:,.1f MiB} | {4:,.1f MiB} | {8:,.1f MiB}"
    ),
    "voxel_losses.grids": Table(
        "grids/{loss}/peaks_in_grids/{way}",
        "loss | peak | time",
        "{loss}, {way} | {:.2f} | {loss/time_of_plain/@way:.2f}",
    ),
    "voxel_augmentation": Table(
        "costs/{volume}/ways/{way}",
        "volume | way | input | peak / input | time / the usual form's",
        "{volume}, {volume/occupancy:.0%} occupied | {way} | {input_bytes:.1f MB} | {peak_of_input:.2f} | "
        "{time_ratio:.2f}",
    ),
    "voxel_augmentation.inputs": Table(
        "fuzz/counts/{outcome}",
        "{fuzz/num_inputs:,} inputs | number",
        "{outcome} | {:,}",
        last="anything else | {fuzz/anything_else:num}",
    ),
}


def load(case: str) -> dict[str, Any]:
    """A case's result file; of "all" every one, by its case."""
    if case == "all":
        return {path.stem: read_result(path.stem) for path in RESULTS.glob("*.json")}
    return read_result(case)


def render_tables(name: str) -> str:
    tables, result = TABLES[name], load(name.partition(".")[0])
    return "\n".join(each.render(result) for each in (tables if isinstance(tables, tuple) else (tables,)))


def render(text: str) -> str:
    return tables_patches.render(_TABLE.sub(lambda match: match[1] + render_tables(match[2]) + match[3], text))


def main() -> None:
    for path in DOCS:
        path.write_text(render(path.read_text()))


if __name__ == "__main__":
    main()
