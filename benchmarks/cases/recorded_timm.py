"""Virtual GPUs against recorded GPU runs of timm's models: growth with the batch, and the largest batch that ran.

Two public records:

* GPUMemNet (itu-rad/GPUMemNet) trained models of timm on an A100 40GB at batches of 8, 16, 32, 64 and 128, and recorded
  what nvidia-smi showed. The driver's context and libraries are in that figure; the growth from one batch to the next
  cancels them. timm trains with `cudnn.benchmark`; "error_without_workspaces" takes memkit's rule for what it finds
  away. The rows are in `recorded_gpu_runs.json`, as for `recorded_convolutions`.
* timm's own benchmark (huggingface/pytorch-image-models, results/) of training with AMP on an RTX 3090, with PyTorch
  1.12: the largest batch that ran. A smaller batch than 512 says that the next larger one had failed. The loop is that
  of its `benchmark.py` at 0dbd9352. CUDA 11.3 loaded all kernels of all libraries into the context (pytorch#107667;
  PyTorch 1.13 ended it, pytorch#86509): out-of-memory errors of that time leave 1.21 to 2.00 GiB of this card outside
  of the allocator. Which of it, the runs of the other families tell.

Run: python -m benchmarks.cases.recorded_timm FOLDER   (an hour; FOLDER has recorded_gpu_runs.json and timm's CSV)
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import gc
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd

import memkit as mk
from benchmarks.recorded import (
    leave_one_family_out,
    let_torchvision_be_imported,
    narrowest,
    read_rows,
    roomy,
    shuffled_error,
    told_on,
)
from benchmarks.recorded_xmem import MISS, NOT_EXPLAINED
from benchmarks.result import environment, read_result, write_result
from memkit._core.units import MIB

LAYOUTS = ("nchw", "nhwc")
BATCHES = (8, 16, 32, 64)
LARGEST = 39_000 * MIB  # what nvidia-smi shows of a run near the A100's end may be a run that failed
TABLE = "benchmark-train-amp-{layout}-pt112-cu113-rtx3090.csv"
TOTAL = 24_259 * MIB  # of an RTX 3090, as in `gpus.json`
TRIAL = "presumably nvidia-smi saw the trial of all algorithms, which may take all that is free"
FAILED = "a run of this model failed that had room: this one may have ended in its first step as well"
REASONS = {  # of larger misses, by model and batch
    ("coatnet_rmlp_2_rw_224", 8): TRIAL,
    ("coatnet_rmlp_2_rw_224", 64): TRIAL,
    ("convmixer_1536_20", 8): TRIAL,
    ("seresnextaa101d_32x8d", 8): TRIAL,
    ("seresnextaa101d_32x8d", 16): TRIAL,
}
LEAST_CONTEXT = 1429 * MIB  # outside of the allocator, of GPUMemNet's nets without convolutions (mlp_data_step2.csv)
MOST_OF_FAKETENSOR = 2  # it counts no optimizer, and no memory of libraries
MOST_GROWTH_APART, LEAST_OF_PARAMETERS = 0.05, 4  # of FakeTensor's growth; where activations are most of what it counts
NUM_STEPS = 2
FIRST_BATCH = 512  # timm's benchmark begins here, and takes the next smaller batch after each failure


def set_fused_attention(*, enable: bool) -> None:
    import timm.layers

    timm.layers.set_fused_attn(enable=enable)


def create(name: str) -> Any:
    import timm

    return timm.create_model(name, pretrained=False).cuda().train()


def train(model: Any, batch: int, num_steps: int = NUM_STEPS) -> None:
    """timm's train.py as far as memory goes: the next batch is prepared on a second stream while one is trained on."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=2e-5)
    size, stream = model.default_cfg["input_size"], torch.cuda.Stream()

    def prepare() -> tuple[torch.Tensor, torch.Tensor]:
        with torch.cuda.stream(stream):
            images = torch.zeros(batch, *size, dtype=torch.uint8).cuda(non_blocking=True)
            return images.float().sub_(127.5).div_(127.5), torch.zeros(batch, dtype=torch.long).cuda()

    following = prepare()
    for _ in range(num_steps):
        images, labels = following
        following = prepare()
        loss = F.cross_entropy(first(model(images)), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def check_size(model: Any, millions: float) -> None:
    """Some names stand for another model in today's timm than in 2022."""
    today = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    if abs(today - millions) > 0.01 * millions + 0.01:
        raise ValueError(f"{today:.2f} million parameters, {millions} when it was recorded")


def first(outputs: Any) -> torch.Tensor:
    """A distilled model has two heads; timm trains with their mean or the first."""
    return outputs[0] if isinstance(outputs, tuple | list) else outputs


def any_overlaps(model: Any) -> bool:
    """Whether windows of a convolution overlap: cuDNN has kernels for these, and a net that only cuts patches has none.

    They are loaded when they are needed, and are part of what nvidia-smi shows.
    """
    convolutions = (each for each in model.modules() if isinstance(each, _ConvNd))
    return any(size > step for each in convolutions for size, step in zip(each.kernel_size, each.stride, strict=True))


def run_on_a100(
    name: str, batch: int, *, tunes: bool = True, num_steps: int = NUM_STEPS
) -> tuple[mk.predict.MemoryEstimate, bool]:
    """The estimate of some steps, and whether the model's convolutions overlap."""
    with (
        torch.backends.cudnn.flags(enabled=True, benchmark=tunes),
        mk.VirtualGPU(roomy(mk.find_gpu("A100 40GB"))) as gpu,
    ):
        model = create(name)
        train(model, batch, num_steps)
        overlaps = any_overlaps(model)
    del model
    gc.collect()
    return gpu.estimate(), overlaps


def runs_of(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The record of each batch, and its estimate, with and without memkit's rule for `cudnn.benchmark`."""
    peer, runs = dict(zip(row["batch"], row["faketensor_mib"], strict=True)), []
    for batch, mib in zip(row["batch"], row["gpu_mib"], strict=True):
        if batch not in BATCHES or mib * MIB >= LARGEST:
            continue
        estimates = {}
        for tunes in (True, False):
            estimates[tunes], overlaps = run_on_a100(row["model"], batch, tunes=tunes)
        runs.append(
            {
                "family": row["family"],
                "model": row["model"],
                "batch": batch,
                "recorded_bytes": mib * MIB,
                "overlaps": overlaps,
                "reserved_bytes": estimates[True].reserved_bytes,
                "reserved_without_workspaces": estimates[False].reserved_bytes,
                "faketensor_bytes": peer[batch] * MIB,
                "estimate": estimates[True],
            }
        )
    return runs


def growth_of(runs: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """For each pair of batches: how much more was recorded, and how much more is predicted."""
    for small, large in pairwise(runs):
        recorded, predicted, without, peer = (
            large[name] - small[name]
            for name in ("recorded_bytes", "reserved_bytes", "reserved_without_workspaces", "faketensor_bytes")
        )
        yield {
            "family": small["family"],
            "model": small["model"],
            "batches": [small["batch"], large["batch"]],
            "recorded_bytes": recorded,
            "predicted_bytes": predicted,
            "error": predicted / recorded - 1,
            **reason_of(predicted / recorded - 1, *((row["model"], row["batch"]) for row in (small, large))),
            "error_without_workspaces": without / recorded - 1,
            "faketensor_error": peer / recorded - 1,
        }


def check_input(runs: list[dict[str, Any]]) -> None:
    """Some names stand for another model, or for one with another size of images, in today's timm.

    FakeTensor's own figures tell: they were recorded with the runs, and no GPU is in them.
    """
    for row in runs[-1:]:
        times = row["estimate"].peak_bytes / row["faketensor_bytes"]
        if times > MOST_OF_FAKETENSOR:
            raise ValueError(f"{times:.0f} times what FakeTensor found when it was recorded: other images")
    for small, large in [*pairwise(runs)][-1:]:
        if small["faketensor_bytes"] < LEAST_OF_PARAMETERS * small["estimate"].parameters_bytes:
            continue
        grown = large["estimate"].peak_bytes - small["estimate"].peak_bytes
        apart = (large["faketensor_bytes"] - small["faketensor_bytes"]) / grown - 1
        if abs(apart) > MOST_GROWTH_APART:
            raise ValueError(f"FakeTensor grew {apart:+.0%} when it was recorded: another model")


def has_failed(row: dict[str, Any], parameters_bytes: int) -> bool:
    """Whether a run of a model failed that had room: it shows less than FakeTensor's tensors and a context.

    With gradients and momentum it had room. So memory did not end it, and what ended it may have ended others.
    """
    fixed = LEAST_CONTEXT + 2 * parameters_bytes
    return any(
        mib * MIB < peer * MIB + LEAST_CONTEXT and peer * MIB + fixed < LARGEST
        for mib, peer in zip(row["gpu_mib"], row["faketensor_mib"], strict=True)
    )


def reason_of(error: float, *runs: tuple[str, int]) -> dict[str, str]:
    """Known differences of any of these runs; a larger miss is not explained."""
    known = [REASONS[run] for run in runs if run in REASONS]
    return {"reason": known[0] if known else NOT_EXPLAINED} if known or abs(error) > MISS else {}


def ended(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs of one model that did not run out of memory, as what nvidia-smi showed of them tells.

    Those that did took less than one of a smaller batch, than FakeTensor found for the tensors alone, or than
    parameters, gradients and momentum take; or they would have taken more than the card has had they grown as before.
    """
    found: list[dict[str, Any]] = []
    for row in runs:
        if row["recorded_bytes"] < max(row["faketensor_bytes"], LEAST_CONTEXT + 3 * row["estimate"].parameters_bytes):
            continue
        if found and row["recorded_bytes"] <= found[-1]["recorded_bytes"]:
            continue
        if len(found) > 1:
            small, large = found[-2:]
            grown = (large["recorded_bytes"] - small["recorded_bytes"]) / (large["batch"] - small["batch"])
            expected = large["recorded_bytes"] + grown * (row["batch"] - large["batch"])
            if expected > mk.find_gpu("A100 40GB").total_bytes:
                continue
        found.append(row)
    return found


def totals_of(runs: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """What nvidia-smi showed, the allocator's figures, and the context that the other families tell of.

    The context is the narrowest interval that holds half of what their smallest runs took beyond what is predicted:
    kernels are loaded when they are needed, so that it differs between models. Those of the same kind tell it, if it is
    known what they did.
    """
    smallest = [row for row in runs if row["batch"] == BATCHES[0] and "other_range" not in row]
    for row in runs:
        others = [each for each in smallest if each["family"] != row["family"] and each["overlaps"] is row["overlaps"]]
        beyond = [each["recorded_bytes"] - each["reserved_bytes"] for each in others]
        low, high = narrowest(beyond)
        estimate = row["estimate"]
        error = (row["reserved_bytes"] + statistics.median(beyond)) / row["recorded_bytes"] - 1
        names = ("family", "model", "batch", "overlaps", "recorded_bytes", "reserved_bytes")
        yield {
            **{name: row[name] for name in names},
            "reserved_range": estimate.reserved_range,
            "least_reserved_bytes": estimate.least_reserved_bytes,
            "context_bytes": [low, high],
            "error": error,
            **reason_of(error, (row["model"], row["batch"])),
            **({"other_range": row["other_range"], "reason": FAILED} if "other_range" in row else {}),
        }


def next_batch(batch: int) -> int:
    """The batch that timm's benchmark had tried before: 512, 384, 256, 192, 128, 96, ..."""
    power = 1 << (batch.bit_length() - 1)
    return batch * 3 // 2 if batch == power else power * 2


def run_of(row: dict[str, str], layout: str, batch: int) -> dict[str, Any]:
    """One try of timm's benchmark on a virtual RTX 3090: whether it ends, and what it reserves and needs at least."""
    dense = torch.channels_last if layout == "nhwc" else torch.contiguous_format
    side = int(row["train_img_size"])
    with torch.backends.cudnn.flags(enabled=True, benchmark=True), mk.VirtualGPU(roomy(mk.find_gpu("RTX 3090"))) as gpu:
        model = create(row["model"]).to(memory_format=dense)
        check_size(model, float(row["param_count"]))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, nesterov=True, foreach=False)
        images = torch.zeros(batch, 3, side, side, device="cuda").to(memory_format=dense)
        for _ in range(2):
            optimizer.zero_grad(set_to_none=False)  # as in PyTorch 1: gradients live through the forward
            with torch.autocast(
                "cuda", torch.float16
            ):  # with the backward, so that all casts of weights live through it
                outputs = first(model(images))
                labels = torch.zeros(batch, dtype=torch.long, device="cuda")
                F.cross_entropy(outputs, labels).backward()
            optimizer.step()
    estimate = gpu.estimate()
    return {
        "family": row["model"].split("_")[0],
        "model": row["model"],
        "layout": layout,
        "batch": batch,
        "ran": batch == int(row["train_batch_size"]),
        "reserved_bytes": estimate.reserved_bytes,
        "least_reserved_bytes": estimate.least_reserved_bytes,
        "estimate": estimate,
    }


def room_told_by(rows: list[dict[str, Any]]) -> int:
    """The room for the allocator with which most runs end as they did, in the middle of where that is so.

    A run ends if the room is at least the least that it needs.
    """
    ends = sorted({0, *(row["least_reserved_bytes"] for row in rows)})
    errors = [sum((row["least_reserved_bytes"] <= end) is not row["ran"] for row in rows) for end in ends]
    best = errors.index(min(errors))
    above = ends[best + 1] if best + 1 < len(ends) else ends[best]
    return (ends[best] + above) // 2


def judge(rows: list[dict[str, Any]]) -> None:
    """Add the verdicts, with the card's context as the runs of the other families tell it."""
    card = mk.find_gpu("RTX 3090")
    for row in rows:
        room = room_told_by([other for other in rows if other["family"] != row["family"]])
        context = TOTAL - room
        estimate = replace(row.pop("estimate"), context_bytes=context, least_context_bytes=context)
        row |= {"context_bytes": context, "verdict": told_on(card, TOTAL, estimate)}


def growth_summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    errors, peers, without = (
        [abs(row[key]) for row in rows] for key in ("error", "faketensor_error", "error_without_workspaces")
    )
    return {
        "num_models": len({row["model"] for row in rows}),
        "num_rows": len(rows),
        "median_error": statistics.median(errors),
        "bias": statistics.median(row["error"] for row in rows),
        "within_5_percent": sum(error <= 0.05 for error in errors) / len(errors),
        "median_error_without_workspaces": statistics.median(without),
        "leave_one_family_out": leave_one_family_out(rows, ("error", "error_without_workspaces")),
        "median_error_shuffled": shuffled_error(rows, "predicted_bytes", "recorded_bytes"),
        "faketensor_median_error": statistics.median(peers),
    }


def bracket_summary(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    said = Counter((row["verdict"], row["ran"]) for row in rows)
    answers, ends = ("fits", "too close", "does not fit"), ((True, "ran"), (False, "failed"))
    return {"num_rows": said.total()} | {f"{word}, {end}": said[word, ran] for word in answers for ran, end in ends}


@contextlib.contextmanager
def noting(failed: list[str], name: str) -> Iterator[None]:
    """A model that fails, or that today's timm lacks, is part of the record and ends no other row."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever a model raises
        failed.append(f"{name}: {type(error).__name__}: {error}"[:300])
    gc.collect()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--every", type=int, default=8, help="take each n-th row")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS], help="the others stay as they are")
    given = parser.parse_args(arguments)
    let_torchvision_be_imported()
    torch.set_num_threads(1)
    figures = read_result("recorded_timm")["figures"]
    for part in given.parts:
        failed: list[str] = []
        found = PARTS[part](given.folder, given.every, failed)
        figures[part] = {"commit": environment(())["commit"], **found, "failed": failed}
    print(write_result("recorded_timm", figures, peers=("timm", "torchvision")))


def score_brackets(folder: Path, every: int, failed: list[str]) -> dict[str, Any]:
    rows = []
    set_fused_attention(enable=False)  # as in 2022: PyTorch 1.12 had none
    for layout in LAYOUTS:
        with (folder / TABLE.format(layout=layout)).open() as file:
            known = [row for row in csv.DictReader(file) if int(row["train_batch_size"]) < FIRST_BATCH]
        for row in known[::every]:
            ran = int(row["train_batch_size"])
            for batch in (ran, next_batch(ran)):
                with noting(failed, row["model"]):
                    rows.append(run_of(row, layout, batch))
    set_fused_attention(enable=True)
    judge(rows)
    summary = {layout: bracket_summary(row for row in rows if row["layout"] == layout) for layout in LAYOUTS}
    return {"summary": summary, "rows": rows}


def score_growth(folder: Path, every: int, failed: list[str]) -> dict[str, Any]:
    runs: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for row in read_rows(folder, "GPUMemNet")[::every]:
        with noting(failed, row["model"]):
            of_model = runs_of(row)
            check_input(of_model)
            of_model = ended(of_model)
            if of_model and has_failed(row, of_model[0]["estimate"].parameters_bytes):
                for run in of_model:
                    run |= {"other_range": run_on_a100(run["model"], run["batch"], num_steps=1)[0].reserved_range}
            runs += of_model
            rows += growth_of(of_model)
    return {"summary": {"all": growth_summary(rows)}, "rows": rows, "totals": list(totals_of(runs))}


PARTS = {"brackets": score_brackets, "growth": score_growth}


if __name__ == "__main__":
    main()
