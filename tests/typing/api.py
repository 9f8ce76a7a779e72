"""The public API as users type it: checked by mypy --strict, never run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import memkit as mk

Batch = tuple[torch.Tensor, torch.Tensor]


def accumulate(model: nn.Module, batches: list[Batch]) -> bool:
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    acc = mk.GradientAccumulator(optimizer, accumulation_steps=4, max_grad_norm=1.0, scaler=None, model=None)
    for x, y in batches:
        acc.backward((model(x) - y).pow(2).mean(), count=len(x))
        if acc.step():
            scheduler.step()
    return acc.flush()


def packed(batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    return mk.points.split_packed(batch, 4, belongs_to={"inverse": "origin_offset"})


def hosted(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    split = mk.SplitLoss([model], num_microbatches=2, reduction="mean")
    return split(batch, lambda model, micro: model(micro).mean(), scale=2.0)


def from_a_preset(model: nn.Module) -> mk.MemoryEfficientTrainingWrapper:
    def look(model: nn.Module) -> None:
        print([parameter.grad for parameter in model.parameters()])

    optimizer = torch.optim.AdamW(model.parameters())
    mk.MemoryEfficientTrainingWrapper(
        model,
        optimizer,
        precision="fp32",
        checkpoint=True,
        offload=None,
        on_gradients=look,
        scaler=torch.amp.GradScaler(),
    )
    return mk.MemoryEfficientTrainingWrapper.from_config(
        model, optimizer, mk.get_preset_config("medium", 24), max_grad_norm=1.0
    )


def scaled(model: nn.Module) -> mk.GradientAccumulator:
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)]
    return mk.GradientAccumulator(optimizers, scaler=torch.amp.GradScaler(), accumulate_dtype=torch.float32)


def wrapped(model: nn.Module, batches: list[Batch]) -> float:
    optimizer = torch.optim.AdamW(model.parameters())
    trainer = mk.MemoryEfficientTrainingWrapper(
        model,
        optimizer,
        precision="bf16-mixed",
        accumulation_steps=4,
        checkpoint=["encoder.*"],
        max_grad_norm=1.0,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 10),
        average=torch.optim.swa_utils.AveragedModel(model),
        on_oom="exact",
    )

    def loss_fn(model: nn.Module, micro: Batch) -> torch.Tensor:
        loss: torch.Tensor = (model(micro[0]) - micro[1]).pow(2).mean()
        return loss

    def summed(model: nn.Module, micro: Batch) -> mk.Loss:
        return mk.Loss(sum=(model(micro[0]) - micro[1]).pow(2).sum(), count=(micro[1] != -100).sum())

    for batch in batches:
        result = trainer.train_step(batch, loss_fn)
        trainer.train_step(batch, summed)
        for attempt in trainer.microbatches(batch):
            with attempt as micro:
                with trainer.autocast():
                    loss = loss_fn(model, micro)
                trainer.backward(loss, count=len(micro[0]))
        stepped: bool = trainer.step()
        del stepped
    with trainer.evaluation() as evaluate:
        evaluate(batches[0], lambda model, micro: model(micro[0]))
    trainer.load_state_dict(trainer.state_dict())
    trainer.close()
    with mk.Checkpointing(model, {"encoder.*": "selective"}) as blocks:
        print(blocks.treatments)
    return float(result.loss) + result.num_ooms + (result.peak_bytes or 0)


def contrastive(encoder: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return mk.train.cached_backward(encoder, batch, lambda z: (z @ z.T).logsumexp(0).mean(), chunk_size=32)


def penalty(discriminator: nn.Module, real: torch.Tensor) -> torch.Tensor:
    return mk.train.gradient_penalty(discriminator, real) + mk.train.gradient_penalty(discriminator, real, real.flip(0))


def recover() -> tuple[str, bool]:
    return mk.recover_from_oom(lambda size: "x" * size, [8, 4]), mk.is_out_of_memory(MemoryError())


def predict() -> tuple[bool, int]:
    config = mk.get_preset_config("medium", 24, batch_size=1)
    mk.print_config_summary(config)
    estimate = mk.estimate_memory_usage(config)
    return estimate.fits("24GiB"), estimate.headroom_bytes(24 * 10**9)


def remember(model: nn.Module, batches: list[torch.Tensor], folder: Path) -> tuple[int, str]:
    with mk.MemoryManager(device="auto", budget=0.5, log=folder / "memory_events.jsonl", line_every=100) as memory:
        trainer = mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters()), memory=memory)
        trainer.close()
        snapshot = memory.snapshot()
        allocated: int | None = snapshot.allocated_bytes
        resident: int = snapshot.host_rss_bytes
        for batch in batches:
            with memory.phase("step"), memory.post_mortem(folder):
                model(batch)
            memory.step()
            for leak in memory.leaks():
                memory.mark("leak", component="head", note={"holder": leak.holder, "bytes": leak.nbytes})
        with memory.track(workspace=True) as tracker:
            model(batches[0])
        print(tracker.peak_bytes, tracker.peak_by_category, tracker.peak_by_module, tracker.timeline)
        totals = memory.phases["step"]
        peak: int | None = totals.peak_bytes
        memory.events.save(folder / "saved.jsonl")
        print(memory.summary(), memory.line(), memory.advice(), allocated, resident, peak)
        return memory.release() + memory.available_bytes() + totals.num_calls, str(memory.device)


def track(model: nn.Module, batch: torch.Tensor) -> int:
    with mk.Tracker() as tracker:
        model(batch).sum().backward()
    return tracker.peak_bytes


def read_back(folder: Path) -> list[int]:
    log = mk.report.read_memory_events(folder / "memory_events.jsonl")
    peaks = [event.peak_bytes for event in log.events if event.peak_bytes is not None]
    origin = log.origin(log.events[0], "peak_bytes")
    print(origin.source, origin.kind, log.headers[0].device, log.problems)
    return peaks


def sizes() -> tuple[int, str]:
    return mk.memory.parse_bytes("24GiB"), mk.memory.format_bytes(2**30)


def pieces(mlp: nn.Module, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    proc = mk.ChunkedProcessor(mlp, chunk_size="auto", memory_budget="512MiB")
    y: torch.Tensor = proc(x)
    out = proc.segment_reduce(x, index=index, num_segments=8, reduce="softmax", gather={"x_j": (x, index)}, weight=y)
    plan = proc.plan(x)
    num_bytes: int = plan.chunk_size + plan.num_chunks + plan.predicted_peak_bytes + plan.measured_peak_bytes
    del num_bytes
    mapped: torch.Tensor = mk.chunked_map(mlp, x, chunk_size=256)
    reduced = mk.chunked_segment_reduce(mlp, x, ptr=index, reduce="mean", memory_budget=2**20)
    loss = mk.chunk.chunked_loss(mlp, x, reduction="mean") + mk.chunked_linear_cross_entropy(x, x, index)
    return proc.loss(x, y, reduction="mean") + loss + (out.sum() + mapped.sum() + reduced.sum())


def volumes(net: nn.Module, volume: torch.Tensor, coords: torch.Tensor) -> torch.Tensor:
    tiled = mk.tiled_apply(net, volume, 32)
    processor = mk.SparsityAwareProcessor(net, mode="auto")
    dense: torch.Tensor = processor(volume)
    voxels: mk.voxel.SparseVoxels = processor(mk.voxel.SparseVoxels.from_dense(volume))
    convolved: mk.voxel.SparseVoxels = mk.chunk.submanifold_conv3d(voxels, torch.ones(1, 1, 3, 3, 3))
    resolution = mk.DynamicResolutionProcessor(max_active_voxels=100_000, min_points_per_voxel=1)
    choice = resolution.choose(coords)
    level: int = choice.level + choice.num_active
    del level
    return tiled + dense + convolved.to_dense() + resolution.restore(resolution.apply(volume))


def points(coords: torch.Tensor, dst: torch.Tensor, model: nn.Module) -> int:
    index = mk.GridIndex.from_coords(coords, grid_size=0.05)
    sampler = mk.GridAwareSampler(ratio=(0.3, 0.7), seed=0, rounding="nearest")
    s = sampler.sample_half_density(index, generator=torch.Generator())
    num: int = len(s.indices) + len(s.counts) + len(s.ratios) + int(s.ratio)
    single = sampler.sample_single_per_grid(mk.GridIndex.from_cells(dst))
    scenarios = sampler.sample_scenarios(index, ("dense", "half", "single"))
    again = sampler.index(coords, grid_size=0.05, key="scene-17")
    keep = mk.points.sample_edges(dst, ratio=(0.3, 0.7), seed=0)
    batches = mk.points.BudgetBatchSampler([3, 5, 2], max_points=8, seed=0)
    sampler.load_state_dict(sampler.state_dict())
    trainer = mk.DensityInvariantTrainer(
        mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters(), lr=0.1)),
        sampler,
        nn.functional.mse_loss,
        consistency="mse",
        weight=0.1,
        scenarios=("dense", "half", "single"),
        mode="joint",
    )
    trainer.train_step(mk.recipes.PointScene(coords, features=coords, targets=coords))
    return num + len(single.indices) + len(scenarios) + again.num_cells + len(keep) + len(batches)


def predicted(model: nn.Module, batch: Batch) -> str:
    def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
        loss: torch.Tensor = (model(batch[0]) - batch[1]).pow(2).mean()
        return loss

    est = mk.estimate_memory_usage(
        model, batch, loss_fn=loss_fn, optimizer="adamw", precision="bf16-mixed", target="cpu"
    )
    by_formula = mk.estimate_memory_usage(mk.get_preset_config("medium", 24))
    on_card = mk.estimate_memory_usage(
        model,
        batch,
        loss_fn=loss_fn,
        precision="fp16-mixed",
        target="RTX 4090",
        shard=mk.predict.Shard("fsdp2", 8, units=("*",)),
    )
    with mk.VirtualGPU("RTX 4090") as gpu:
        model.cuda()
    num_bytes: int = est.peak_bytes + est.headroom_bytes("24GB") + by_formula.peak_bytes + on_card.peak_bytes
    num_bytes += gpu.peak_bytes + gpu.reserved_peak_bytes + int(gpu.timeline.max()) + mk.find_gpu("4090").usable_bytes
    return f"{num_bytes} {est.fits('24GiB')} {est.explain()}"


def planned(model: nn.Module, batch: Batch) -> tuple[int, float]:
    def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
        loss: torch.Tensor = (model(batch[0]) - batch[1]).pow(2).mean()
        return loss

    plan = mk.plan_training(model, batch, loss_fn, optimizer="adamw", budget="RTX 4090")
    trainer = mk.prepare(model, torch.optim.AdamW(model.parameters()), batch, loss_fn, budget="24GB", max_grad_norm=1.0)
    trainer.train_step(batch, loss_fn)
    trainer.flush()
    print(plan.micro_batch_size, plan.accumulation_steps, plan.precision, plan.checkpoint, trainer.plan.explain())
    advice = mk.advise(model, batch, loss_fn, budget="8GiB")
    print([each.status for each in advice], advice.explain())
    return plan.predicted_peak_bytes, plan.predicted_slowdown


def scaled_up() -> int:
    def build_step(num_rows: int) -> Callable[[], None]:
        layer, x = nn.Linear(3, 3), torch.ones(num_rows, 3)

        def step() -> None:
            layer(x).sum().backward()

        return step

    result = mk.predict.profile_scaling(build_step, sizes=[100, 200], modes=("train", "inference"))
    result.to_csv("scaling.csv")
    config = mk.MemoryTestConfig(num_test_points=3, test_full_model=True)
    print(mk.recipes.run_memory_test(config).explain(), result.law["train"].max_n("RTX 4090"), result.ratio(100))
    return result.law["train"].predict(10**6)


def losses_of_volumes(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    augmentation = mk.VoxelAugmentation(flip_prob=0.5, rotate_prob=0.3, noise_std=0.02)
    params = augmentation.sample(x.shape, seed=0, epoch=0, index=3)
    x = augmentation.inverse(augmentation.apply(x, params), params)
    mk.ComposedAugmentation([augmentation, mk.CutoutAugmentation(), mk.MixupAugmentation()])
    perceptual = mk.Perceptual3DLoss(in_channels=4, base_channels=32, use_checkpoint=True)
    losses = mk.CompositeLoss3D(
        {"features": (perceptual, 0.1), "edges": (mk.StructurePreservingLoss(), lambda step: min(1.0, step / 10))}
    )
    total: torch.Tensor = losses(x, y)
    return total


def clouds(a: torch.Tensor, b: torch.Tensor) -> float:
    pairs = mk.voxel.nearest_points(a, b, memory_budget="64MB")
    distance = mk.voxel.chamfer_distance(a, b, convention="pytorch3d") + mk.voxel.hausdorff_distance(
        pairs, quantile=0.95
    )
    score: torch.Tensor = mk.voxel.f_score(pairs, threshold=0.1)
    return float(distance + score)
