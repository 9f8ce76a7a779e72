"""Lightning's Trainer: a script of its own style, plain and with memkit, must train and log the same."""

import logging
import warnings

import pytest
import torch

L = pytest.importorskip("lightning")

import memkit as mk  # noqa: E402
from memkit.integrations.lightning import MemoryCallback, MemoryEfficientModule  # noqa: E402
from tests.helpers import assert_refused  # noqa: E402
from tests.integrations.scripts import changed, num_changed_lines  # noqa: E402
from tests.train.faults import FailingOperator  # noqa: E402

pytestmark = [
    # What Lightning itself says of loaders without workers, of short epochs, and about its own dependencies.
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*"),
]
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

PLAIN = """
import lightning as L
import torch, torchmetrics
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(10, average="micro")

    def training_step(self, batch, batch_idx):
        x, y = batch
        scores = self.net(x)
        loss = nn.functional.cross_entropy(scores, y)
        self.accuracy(scores, y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"accuracy": self.accuracy}, on_step=True, on_epoch=True)
        self.log("largest", scores.max(), reduce_fx="max", on_epoch=True, batch_size=len(x))
        return {"loss": loss, "scores": scores, "mean": loss.detach()}

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=6)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

def fit(recorder, max_epochs=2, **options):
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.data[:218] / 16, dtype=torch.float64), torch.tensor(digits.target[:218])
    trainer = L.Trainer(
        max_epochs=max_epochs,
        accelerator="cpu",
        precision="64-true",
        accumulate_grad_batches=3,
        gradient_clip_val=0.5,
        callbacks=[recorder],
        **QUIET,
    )
    model = Classifier()
    recorder.prepare(model)
    trainer.fit(model, DataLoader(TensorDataset(x, y), batch_size=32), **options)
    return trainer, model
"""
CHANGES = [
    ("import lightning as L\n", "import lightning as L\nfrom memkit.integrations.lightning import *\n"),
    ("L.LightningModule", "MemoryEfficientModule"),
    ("callbacks=[recorder]", "callbacks=[recorder, MemoryCallback()]"),
]
QUIET = {
    "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False
}  # fmt: skip


class Recorder(L.Callback):
    """Records a run: outputs, learning rates and logged values of each batch; injects faults where asked to."""

    def __init__(self, faults=(), split_options=None):
        self.mode, self.split_options = FailingOperator(*faults), split_options
        self.history, self.logged, self.sizes = [], [], []

    def prepare(self, model):
        if isinstance(model, MemoryEfficientModule):
            model.split_options = self.split_options or {}
            model._split_loss = WithFaults(model.split_loss, self.mode) if self.mode.places else None

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        lr = trainer.optimizers[0].param_groups[0]["lr"]
        self.history.append({**outputs, "lr": torch.tensor(lr), "steps": torch.tensor(trainer.global_step)})
        if isinstance(module, MemoryEfficientModule):
            self.sizes.append(module.split_loss.sizes)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.logged.append(values(trainer.logged_metrics))

    def on_train_epoch_end(self, trainer, module):
        self.logged.append(values(trainer.callback_metrics))


class WithFaults:
    """A `SplitLoss` whose forwards and backwards may fail; the trainer's own work may not."""

    def __init__(self, split_loss, mode):
        self.split_loss, self.mode = split_loss, mode

    def __call__(self, *args, **options):
        with self.mode:
            return self.split_loss(*args, **options)

    def __getattr__(self, name):
        return getattr(self.split_loss, name)


def values(metrics):
    return {name: float(value) for name, value in metrics.items() if not name.startswith("memkit/")}


def memkit_script():
    return changed(PLAIN, CHANGES)


def run(script, recorder, **options):
    names = {"QUIET": QUIET, "mk": mk}
    exec(compile(script, "script.py", "exec"), names)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Lightning divides the gradient", mk.MemkitWarning)  # tested below
        trainer, model = names["fit"](recorder, **options)
    return trainer, model


@pytest.fixture(scope="module")
def plain():
    recorder = Recorder()
    return *run(PLAIN, recorder), recorder


def assert_same(plain, trainer, model, recorder, tolerance=1e-12):
    plain_trainer, plain_model, plain_recorder = plain
    torch.testing.assert_close(recorder.history, plain_recorder.history, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(
        dict(model.named_parameters()), dict(plain_model.named_parameters()), rtol=tolerance, atol=tolerance
    )
    assert len(recorder.logged) == len(plain_recorder.logged)
    for mine, theirs in zip(recorder.logged, plain_recorder.logged, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6)  # torchmetrics counts in float32
    assert trainer.global_step == plain_trainer.global_step == 6


def test_the_script_changes_in_few_lines():
    assert num_changed_lines(PLAIN, memkit_script())[0] == 3


@pytest.mark.parametrize(
    "options",
    [{}, {"num_microbatches": 4}, pytest.param({"num_microbatches": 5, "on_oom": "raise"}, marks=pytest.mark.slow)],
)
def test_the_script_in_parts_trains_and_logs_as_the_plain_one(plain, options):
    recorder = Recorder(split_options=options)
    trainer, model = run(memkit_script(), recorder)
    assert_same(plain, trainer, model, recorder)
    num = options.get("num_microbatches", 1)
    assert [len(sizes) for sizes in recorder.sizes] == [num] * 14
    assert sum(recorder.sizes[6]) == 26


# Two in a row; in later steps; and slowly in the first part's forward and backward, and in the second part.
SLOW = [pytest.param(each, marks=pytest.mark.slow) for each in [(3,), (14,), (25, 26)]]


@pytest.mark.parametrize("faults", [(160, 700), pytest.param((40, 41), marks=pytest.mark.slow), *SLOW])
def test_survives_out_of_memory_anywhere(plain, faults):
    recorder = Recorder(faults, {"num_microbatches": 2})
    trainer, model = run(memkit_script(), recorder)
    assert recorder.mode.num_failures == len(faults)
    assert_same(plain, trainer, model, recorder)


def test_parts_with_wrong_weights_would_be_noticed(plain):
    def cut(batch, n):
        return list(zip(*(each.tensor_split(n) for each in batch), strict=True))

    recorder = Recorder(
        split_options={"num_microbatches": 3, "split_fn": cut, "probe": False}
    )  # 11, 11 and 10 rows, each counted as 1
    script = memkit_script().replace('"loss": loss,', '"loss": mk.Loss(mean=loss, count=1),')
    trainer, model = run(script, recorder)
    with pytest.raises(AssertionError):
        assert_same(plain, trainer, model, recorder, tolerance=1e-6)


def test_resumed_run_keeps_size_and_matches_plain_run(tmp_path):
    runs = []
    for script, faults in ((PLAIN, ()), (memkit_script(), (16, 45))):
        first, resumed = (Recorder(each, {"probe": False}) for each in (faults, ()))
        trainer, _ = run(script, first, max_epochs=1)
        trainer.save_checkpoint(tmp_path / "first.ckpt")
        runs.append((*run(script, resumed, ckpt_path=tmp_path / "first.ckpt"), resumed))
    assert first.sizes[0] == resumed.sizes[0] == (8, 8, 8, 8)
    assert_same(runs[0], *runs[1])
    assert_refused(lambda: MemoryCallback().load_state_dict({"version": 2}), mk.errors.FileFormatError, "got version 2")
