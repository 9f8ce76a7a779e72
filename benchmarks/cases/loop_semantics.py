"""Three training loops where loops often go wrong: a skipped step, the last group, a resume inside an epoch.

The same model and data in the documented way of each library, on the CPU:

- skipped step: the third of ten losses is infinite, so float16's loss scaler skips that step. How often did the
  optimizer step, how often the schedule? (Neither accelerate nor Lightning scales losses on a CPU by itself: both are
  given torch's scaler.)
- last group: 52 samples, micro-batches of 4, four to a step: the last step has one. Its gradient's norm over that of
  the same samples in one batch; 1 is right.
- resume: 64 samples, shuffled, batches of 4; the run is saved after 9 of 16 batches and goes on in new objects, seeded
  as the first. Which samples of the epoch were never trained on, and are order and weights those of a run that was
  not stopped?

Run: pip install -c constraints.txt -e ".[bench]" && python -m benchmarks.cases.loop_semantics
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.result import write_result
from memkit.recipes.loop import MemoryEfficientTrainLoop
from memkit.recipes.state.manager import TrainingStateManager
from memkit.train.wrapper import MemoryEfficientTrainingWrapper

SAMPLES, BATCH, DONE = 64, 4, 9  # of the resume
GROUP = 4  # micro-batches of a step, for the last group


def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.1), nn.Linear(8, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return model(rows).to(rows.dtype).pow(2).mean()  # not in the half precision of autocast


def loss_with_infinity() -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    number = itertools.count(1)
    return lambda model, rows: loss_of(model, rows) * (float("inf") if next(number) == 3 else 1.0)


def lightning_trainer(**settings: Any) -> Any:
    import lightning as pl

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return pl.Trainer(**({"enable_checkpointing": False, "max_epochs": 1} | quiet | settings))


def lightning_module(
    model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any, loss_fn: Callable[..., torch.Tensor]
) -> Any:
    import lightning as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any) -> torch.Tensor:
            return loss_fn(self.model, batch[0] if isinstance(batch, list) else batch)

        def configure_optimizers(self) -> Any:
            if schedule is None:
                return optimizer
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    return Module()


# ------------------------------------------------------------------------------------------------- a skipped step


def skipped_memkit(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any, rows: DataLoader) -> None:
    trainer = MemoryEfficientTrainingWrapper(model, optimizer, precision="fp16-mixed", scheduler=schedule)
    MemoryEfficientTrainLoop(trainer, rows, loss_with_infinity(), progress=False).run()


def skipped_accelerate(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any, rows: DataLoader) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu")
    loss_fn = loss_with_infinity()
    wrapped, wrapped_optimizer, loader, wrapped_schedule = accelerator.prepare(model, optimizer, rows, schedule)
    for batch in loader:
        accelerator.backward(loss_fn(wrapped, batch))
        wrapped_optimizer.step()
        wrapped_schedule.step()
        wrapped_optimizer.zero_grad()


def skipped_lightning(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any, rows: DataLoader) -> None:
    from lightning.pytorch.plugins.precision import MixedPrecision

    plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
    trainer = lightning_trainer(plugins=[plugin])
    trainer.fit(lightning_module(model, optimizer, schedule, loss_with_infinity()), rows)


def skipped(run: Callable[..., None]) -> dict[str, int]:
    model, optimizer = make_model()
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=100)
    steps: list[None] = []
    optimizer.register_step_post_hook(lambda *_: steps.append(None))
    run(model, optimizer, schedule, DataLoader(torch.randn(40, 3), batch_size=4))
    return {"batches": 10, "optimizer_steps": len(steps), "schedule_steps": schedule.last_epoch}


# -------------------------------------------------------------------------------------------------- the last group


def tail_memkit(model: nn.Module, optimizer: torch.optim.Optimizer, rows: torch.Tensor) -> None:
    loader = DataLoader(TensorDataset(rows), batch_size=BATCH * GROUP)
    trainer = MemoryEfficientTrainingWrapper(model, optimizer, accumulation_steps=GROUP)
    MemoryEfficientTrainLoop(trainer, loader, lambda model, batch: loss_of(model, batch[0]), progress=False).run()


def tail_accelerate(model: nn.Module, optimizer: torch.optim.Optimizer, rows: torch.Tensor) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=GROUP, cpu=True)
    loader = DataLoader(TensorDataset(rows), batch_size=BATCH)
    wrapped, wrapped_optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for (batch,) in loader:
        with accelerator.accumulate(wrapped):
            accelerator.backward(loss_of(wrapped, batch))
            wrapped_optimizer.step()
            wrapped_optimizer.zero_grad()


def tail_lightning(model: nn.Module, optimizer: torch.optim.Optimizer, rows: torch.Tensor) -> None:
    loader = DataLoader(TensorDataset(rows), batch_size=BATCH)
    trainer = lightning_trainer(accumulate_grad_batches=GROUP)
    trainer.fit(lightning_module(model, optimizer, None, loss_of), loader)


def tail(run: Callable[..., None]) -> dict[str, float]:
    torch.manual_seed(0)
    model, rows = nn.Linear(3, 1).double(), torch.randn(52, 3, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    norms: list[torch.Tensor] = []

    def note(*_: object) -> None:  # after the step, where every library's gradient is whole
        norms.append(torch.cat([p.grad.flatten() for p in model.parameters()]).norm())

    optimizer.register_step_post_hook(note)
    run(model, optimizer, rows)
    ratios = []
    for norm, group in zip(norms, rows.split(BATCH * GROUP), strict=True):
        model.zero_grad()
        loss_of(model, group).backward()
        ratios.append((norm / torch.cat([p.grad.flatten() for p in model.parameters()]).norm()).item())
    return {"whole_groups_ratio": sum(ratios[:-1]) / len(ratios[:-1]), "last_group_ratio": ratios[-1]}


# ------------------------------------------------------------------------------------------------------- a resume


def loader_of() -> DataLoader:
    """Shuffled rows, whose last number is their own."""
    rows = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(1))
    rows[:, 2] = torch.arange(SAMPLES)
    return DataLoader(rows, batch_size=BATCH, shuffle=True)


class StoppedError(Exception):
    """The end of the first run."""


def noting(seen: list[int], stop: int | None) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    """Return a loss that notes what it was trained on, and stops at a batch."""
    number = itertools.count()

    def loss_fn(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        if next(number) == stop:
            raise StoppedError
        seen.extend(rows[:, 2].int().tolist())
        return loss_of(model, rows / SAMPLES)

    return loss_fn


def resume_memkit(seen: list[int], folder: Path, stop: int | None) -> nn.Module:
    model, optimizer = make_model()
    trainer = MemoryEfficientTrainingWrapper(model, optimizer)
    with TrainingStateManager(folder) as state:
        loop = MemoryEfficientTrainLoop(
            trainer, loader_of(), noting(seen, stop), state=state, save_every=DONE, progress=False
        )
        loop.run()
    return model


def resume_accelerate(seen: list[int], folder: Path, stop: int | None, *, seedable: bool = False) -> nn.Module:
    from accelerate import Accelerator, DataLoaderConfiguration

    model, optimizer = make_model()
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=seedable))
    wrapped, wrapped_optimizer, loader = accelerator.prepare(model, optimizer, loader_of())
    batches, done, loss_fn = loader, 0, noting(seen, stop)
    if folder.exists():
        accelerator.load_state(str(folder))
        batches, done = accelerator.skip_first_batches(loader, DONE), DONE
    for number, batch in enumerate(batches, start=done + 1):
        accelerator.backward(loss_fn(wrapped, batch))
        wrapped_optimizer.step()
        wrapped_optimizer.zero_grad()
        if number == stop:
            accelerator.save_state(str(folder))
    return model


def resume_seedable(seen: list[int], folder: Path, stop: int | None) -> nn.Module:
    return resume_accelerate(seen, folder, stop, seedable=True)


def resume_lightning(seen: list[int], folder: Path, stop: int | None) -> nn.Module:
    from lightning.pytorch.callbacks import ModelCheckpoint

    model, optimizer = make_model()
    save = ModelCheckpoint(dirpath=folder, filename="last", every_n_train_steps=DONE, save_top_k=-1)
    path = folder / "last.ckpt"
    trainer = lightning_trainer(enable_checkpointing=True, callbacks=[save])
    module = lightning_module(model, optimizer, None, noting(seen, stop))
    trainer.fit(module, loader_of(), ckpt_path=str(path) if path.exists() else None, weights_only=False)
    return model


def resume(run: Callable[..., nn.Module]) -> dict[str, Any]:
    """Compare an epoch that was stopped with one that was not."""
    order: list[int] = []
    trained: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        expected = run(order, Path(folder) / "whole", None)
        with contextlib.suppress(StoppedError):
            run(trained, Path(folder) / "stopped", DONE)
        model = run(trained, Path(folder) / "stopped", None)
    return {
        "trained_on": len(trained),
        "never_trained_on": SAMPLES - len(set(trained)),
        "same_order": trained == order,
        "same_weights": all(map(torch.equal, model.parameters(), expected.parameters())),
    }


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ways = {
        "memkit": (skipped_memkit, tail_memkit, resume_memkit),
        "accelerate": (skipped_accelerate, tail_accelerate, resume_accelerate),
        "lightning": (skipped_lightning, tail_lightning, resume_lightning),
    }
    figures: dict[str, Any] = {}
    for name, (first, second, third) in ways.items():
        figures[name] = {"skipped_step": skipped(first), "last_group": tail(second), "resume": resume(third)}
        print(name, figures[name])
    figures["accelerate"]["resume_seedable_sampler"] = resume(resume_seedable)
    print(figures["accelerate"]["resume_seedable_sampler"])
    print(write_result("loop_semantics", figures, peers=("accelerate", "lightning")))


if __name__ == "__main__":
    main()
