"""S4, piece by piece: each name that users of the project wrote, on toy data, with the least edits.

`s4_radar_to_lidar.py` is the whole job; here each name stands alone. Edits are said beside the line, and with their
reasons in docs/upgrade.md.

Run: python examples/s4_usage.py [--smoke]
"""

import argparse
import tempfile

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import memkit as mk


def presets() -> mk.predict.TrainingConfig:
    config = mk.get_preset_config("medium", gpu_memory_gb=24.0)
    mk.print_config_summary(config)
    print("fits 24 GiB:", mk.estimate_memory_usage(config).fits("24GiB"))  # a size with its unit
    return config


def pieces(volume: Tensor) -> None:
    net = nn.Sequential(nn.Conv3d(4, 8, 1), nn.GELU(), nn.Conv3d(8, 4, 1))
    torch.testing.assert_close(mk.SparsityAwareProcessor(net)(volume), net(volume))
    resolution = mk.DynamicResolutionProcessor(max_active_voxels=64)
    resolution.choose(volume[0].any(0).nonzero())  # points, or the places of occupied voxels; then the volume
    print("coarser, and back:", resolution.restore(resolution.apply(volume)).shape)
    rows = torch.rand(1000, 4)  # rows alone are cut by ChunkedProcessor; space is cut by mk.tiled_apply
    mlp = nn.Linear(4, 2)
    torch.testing.assert_close(mk.ChunkedProcessor(mlp, chunk_size=128)(rows), mlp(rows))
    torch.testing.assert_close(mk.tiled_apply(net, volume, tile_size=8), net(volume))


def augmentations(volume: Tensor) -> Tensor:
    augment = mk.ComposedAugmentation(
        [
            mk.VoxelAugmentation(flip_prob=0.5, rotate_prob=0.3, noise_std=0.02),
            mk.CutoutAugmentation(),
            mk.MixupAugmentation(),
        ]
    )
    return augment(volume)


def losses_and_metrics(prediction: Tensor, target: Tensor) -> Tensor:
    criterion = mk.CompositeLoss3D(  # {name: (loss, weight)}
        {
            "perceptual": (mk.Perceptual3DLoss(in_channels=4, base_channels=8, use_checkpoint=True), 0.1),
            "edges": (mk.StructurePreservingLoss(), 0.5),
            "occupancy": (mk.OccupancyAwareLoss(), 1.0),
        }
    )
    clouds = [(each[0, 0] > 0.5).nonzero().float() for each in (prediction, target)]
    figures = {
        "chamfer": mk.voxel.chamfer_distance(*clouds, convention="pytorch3d"),
        "hausdorff": mk.voxel.hausdorff_distance(*clouds),
        "f_score": mk.voxel.f_score(*clouds, threshold=1.5),
        "iou": mk.voxel.voxel_iou(prediction[:, 0] > 0.5, target[:, 0] > 0.5),
        "feature_mae": mk.voxel.feature_mae(prediction, target),
    }
    print({name: round(float(value), 3) for name, value in figures.items()})
    return criterion(prediction, target)


def own_loop(model: nn.Module, batches: DataLoader, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    accumulator = mk.GradientAccumulator(optimizer, accumulation_steps=steps)
    for x, y in batches:
        accumulator.backward(nn.functional.mse_loss(model(x), y), count=len(x))  # in place of loss / steps
        accumulator.step()
    accumulator.flush()


def loops(model: nn.Module, data: TensorDataset, config: mk.predict.TrainingConfig, epochs: int) -> None:
    def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:  # in place of a criterion
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    folder = tempfile.mkdtemp()
    trainer = mk.MemoryEfficientTrainingWrapper.from_config(model, torch.optim.AdamW(model.parameters()), config)
    state = mk.TrainingStateManager(folder, keep=3)
    loader = DataLoader(data, batch_size=config.effective_batch_size)
    loop = mk.MemoryEfficientTrainLoop(trainer, loader, loss_fn, state=state, progress=False)
    enhanced = mk.create_enhanced_train_loop(
        base_train_loop=loop,
        val_dataloader=DataLoader(data, batch_size=2),
        enable_validation=True,
        val_interval=1,
        num_epochs=epochs,
        memory_fraction=0.9,
        monitor=mk.ValidationMonitor(patience=5, mode="min"),
    )
    enhanced.run_loop()
    state.save(loop.num_steps, **trainer.parts())
    print(f"{loop.num_steps} steps, {enhanced.figures}, restored: {state.restore(**trainer.parts())}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="one epoch")
    epochs = 1 if parser.parse_args().smoke else 5
    torch.manual_seed(0)
    config = presets()
    volumes = (torch.rand(16, 4, 16, 16, 16) > 0.9).float()
    pieces(volumes[:1])
    moved = augmentations(volumes)
    print(f"loss {losses_and_metrics(moved[:2], volumes[:2]):.3f}")
    model, data = nn.Conv3d(4, 4, 3, padding=1), TensorDataset(volumes, volumes)
    own_loop(model, DataLoader(data, batch_size=2), config.gradient_accumulation_steps)
    loops(model, data, config, epochs)


if __name__ == "__main__":
    main()
