"""One LightningModule's step in parts: what it logs and returns, how groups are weighted, what the callback keeps."""

import contextlib
import json
import re

import pytest
import torch

L = pytest.importorskip("lightning")

import torchmetrics  # noqa: E402 - comes with lightning
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import memkit as mk  # noqa: E402
from memkit.integrations.lightning import MemoryCallback, MemoryEfficientModule  # noqa: E402
from tests.helpers import assert_refused  # noqa: E402
from tests.integrations.test_lightning import QUIET, pytestmark  # noqa: E402, F401 - the same of Lightning's words

X = torch.arange(16.0).reshape(8, 2) / 16


class Linear(MemoryEfficientModule):
    """One layer; ``step`` is the training_step's body."""

    def __init__(self, step):
        super().__init__()
        torch.manual_seed(0)
        self.split_options = {"num_microbatches": 2}
        self.net, self.step, self.count = nn.Linear(2, 1), step, torchmetrics.SumMetric()

    def training_step(self, batch, batch_idx):
        return self.step(self, batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Outputs(L.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.last = outputs


def fit(module, *callbacks, batch_size=5, loader=None, **options):
    trainer = L.Trainer(max_epochs=1, accelerator="cpu", callbacks=list(callbacks), **QUIET, **options)
    trainer.fit(module, loader or DataLoader(TensorDataset(X), batch_size=batch_size))
    return trainer


def mean_square(module, x):
    return module.net(x).square().mean()


def test_logged_values_are_those_of_the_whole_batch():
    def step(module, x):
        module.count.update(x.sum())
        module.log("mean", x.mean(), True, on_epoch=True)  # the third is prog_bar
        module.log("number", float(x.mean()), on_epoch=True, batch_size=len(x))
        for name in ("min", "max", "sum"):
            module.log(name, getattr(x, name)(), reduce_fx=getattr(torch, name), on_epoch=True)
        module.log("count", module.count, on_step=False, on_epoch=True)
        return mean_square(module, x)

    metrics = fit(Linear(step), batch_size=5).callback_metrics  # of 3 + 2 and of 2 + 1 rows
    for name, value in {"mean": X.mean(), "number": X.mean(), "min": X.min(), "max": X.max(), "sum": X.sum()}.items():
        torch.testing.assert_close(metrics[f"{name}_epoch"], value, msg=name)
        whole = X[5:].sum() if name == "sum" else getattr(X[5:], name if name in ("min", "max") else "mean")()
        torch.testing.assert_close(metrics[f"{name}_step"], whole, msg=name)
    torch.testing.assert_close(metrics["count"], X.sum())


def test_outputs_beside_the_loss_are_put_together():
    def step(module, x):
        return {"loss": mean_square(module, x), "rows": module.net(x), "more": {"mean": x.mean(), "number": 0.5}}

    outputs = Outputs()
    module = Linear(step)
    fit(module, outputs, batch_size=8)
    assert outputs.last["rows"].shape == (8, 1)
    assert not outputs.last["rows"].requires_grad
    torch.testing.assert_close(outputs.last["more"], {"mean": X.mean(), "number": 0.5})


@pytest.mark.parametrize(
    ("beside", "got"),
    [
        (lambda x: {"ids": ["a"]}, "got str in 'ids'"),
        (lambda x: {"ids": ["a"] * len(x)}, "got list in 'ids'"),
        (lambda x: {"more": {"first": x} if x[0, 0] == 0 else {"second": x}}, "got dict in 'more'"),
        (lambda x: {"first": x} if x[0, 0] == 0 else {}, "got Tensor (3, 2), NoneType in 'first'"),
        (lambda x: {} if x[0, 0] == 0 else {"last": x}, "got NoneType, Tensor (2, 2) in 'last'"),
        (lambda x: {"pairs": x @ x.T}, "got Tensor (3, 3), Tensor (2, 2) in 'pairs'"),
    ],
)
def test_rejects_incompatible_outputs(beside, got):
    module = Linear(lambda module, x: {"loss": mean_square(module, x), **beside(x)})
    assert_refused(lambda: fit(module), mk.errors.InputError, re.escape(got) + r".*self\.log")


def test_count_weighs_the_loss_and_none_skips_the_batch():
    def counted(module, x):
        kept = x[x[:, 0] > 0.3]  # none in the first part, two rows in the second
        loss_sum = module.net(kept).square().sum()
        module.log("loss", loss_sum / max(1, len(kept)), on_epoch=True)
        return mk.Loss(sum=loss_sum, count=len(kept))

    outputs, module = Outputs(), Linear(counted)
    whole = mean_square(module, X[X[:, 0] > 0.3][:2])
    trainer = fit(module, outputs, limit_train_batches=1)
    torch.testing.assert_close(outputs.last["loss"], whole.detach())
    torch.testing.assert_close(trainer.callback_metrics["loss_epoch"], whole.detach())

    skipping = Linear(lambda module, x: None if x[0, 0] > 0.3 else {"loss": mean_square(module, x), "rows": x})
    before = skipping.net.weight.detach().clone()
    with pytest.warns(UserWarning, match="`training_step` returned `None`"):
        fit(skipping, outputs, limit_train_batches=1)  # its second part asks for it
    assert outputs.last == {}
    assert torch.equal(skipping.net.weight, before)


def test_step_runs_whole_in_validation_and_in_parent():
    class Child(Linear):
        def training_step(self, batch, batch_idx):
            return 2 * super().training_step(batch, batch_idx)

    seen = []
    module = Child(lambda module, x: seen.append(len(x)) or mean_square(module, x))
    module.training_step((X,), 0)
    fit(module, batch_size=8)
    assert seen[0] == 8
    assert seen[1:3] == [4, 4]


def test_short_last_group_has_full_weight():
    for is_exact in (False, True):
        module = Linear(mean_square)
        twin = nn.Linear(2, 1)
        twin.load_state_dict(module.net.state_dict())
        warned = pytest.warns(
            mk.MemkitWarning, match=r"the epoch's last 1 batches by accumulate_grad_batches=2: .* 1/2"
        )
        with contextlib.nullcontext() if is_exact else warned:
            # Groups of 3 + 3 and of 2 rows.
            fit(module, MemoryCallback(exact_accumulation=is_exact), batch_size=3, accumulate_grad_batches=2)
        for rows, factor in ((X[:6], 1.0), (X[6:], 1.0 if is_exact else 0.5)):
            twin.zero_grad()
            (twin(rows).square().mean() * factor).backward()
            torch.optim.SGD(twin.parameters(), lr=0.5).step()
        torch.testing.assert_close(module.net.state_dict(), twin.state_dict())


def test_exact_accumulation_weighs_a_short_batch_by_its_rows():
    module = Linear(mean_square)
    loss = mean_square(module, X)
    weight = module.net.weight - 0.5 * torch.autograd.grad(loss, module.net.weight)[0]
    fit(module, MemoryCallback(exact_accumulation=True), accumulate_grad_batches=2)  # 5 + 3 rows
    torch.testing.assert_close(module.net.weight, weight)


def test_batch_without_common_rows_runs_whole():
    def step(module, x):
        loss = mean_square(module, x)
        module.log("loss", loss)
        return {"loss": loss, "nodes": x}

    graph = (torch.ones(4, 2), torch.zeros(2, 9))
    loader, outputs = DataLoader([graph], batch_size=None), Outputs()
    module = Linear(step)
    module.split_options = {"on_oom": "raise"}
    loss = mean_square(module, graph[0]).item()
    assert fit(module, outputs, loader=loader).callback_metrics["loss"].item() == pytest.approx(loss)
    assert outputs.last["nodes"].shape == (4, 2)
    module = Linear(step)  # in two parts
    with pytest.raises(mk.errors.InputError, match=r"tensors with \[2, 4\] rows.*pass split_fn="):
        fit(module, loader=loader)
    module, callback = Linear(step), MemoryCallback(exact_accumulation=True)  # which has no split_fn, and no on_oom
    module.split_options = {"on_oom": "raise"}
    with pytest.raises(mk.errors.InputError, match=r"tensors with \[2, 4\] rows.*give each tensor"):
        fit(module, callback, loader=loader, accumulate_grad_batches=2)


def test_failing_batch_leaves_no_open_phase():
    def step(module, x):
        raise ZeroDivisionError

    with mk.MemoryManager("cpu") as memory:
        with pytest.raises(ZeroDivisionError):
            fit(Linear(step), MemoryCallback(memory))
        with memory.phase("own"):
            pass
        assert list(memory.phases) == ["step", "own"]


def test_a_sum_over_one_rank_does_not_wait_for_the_device():
    class NoReduction(L.Callback):
        def on_train_start(self, trainer, module):
            trainer.strategy.reduce = lambda *_, **__: pytest.fail("by way of the device")

    fit(Linear(mean_square), NoReduction(), MemoryCallback(exact_accumulation=True), accumulate_grad_batches=2)


def test_callback_notes_survived_and_fatal_errors(tmp_path):
    def step(module, x):
        if len(x) > module.most_rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (a planted fault).")
        return mean_square(module, x)

    module, memory = Linear(step), mk.MemoryManager("cpu", log=tmp_path / "log.jsonl")
    module.most_rows, module.split_options = (
        1,
        {**module.split_options, "probe": False},
    )  # of one row at a time there is nothing to compare
    trainer = fit(module, MemoryCallback(memory, post_mortem=tmp_path))
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert logged["memkit/num_ooms"] == 1
    assert logged["memkit/num_microbatches"] == 3
    assert not any("bytes" in name for name in logged)  # nobody counts them on the CPU: unknown is not zero
    module.most_rows = 0
    assert_refused(lambda: fit(module, MemoryCallback(memory, post_mortem=tmp_path)), mk.MemkitOutOfMemoryError)
    memory.close()
    events = mk.report.read_memory_events(tmp_path / "log.jsonl").events
    assert [event.event for event in events] == ["step", "oom", "step_1", "step", "step_2", "out_of_memory", "step"]
    assert events[1].note == {"num_ooms": 1, "sizes": [1, 1, 1, 1, 1]}
    assert "planted" in json.loads((tmp_path / "out-of-memory.json").read_text())["error"]


class Seeing(MemoryEfficientModule):
    """Keeps the volumes that it is trained on."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(1, 1), []

    def training_step(self, batch, batch_idx):
        if self._part is not None:
            self.seen.append(batch)
        return self.layer(batch.mean().reshape(1, 1)).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_the_callback_tells_data_sets_and_batch_samplers_the_epoch():
    """Lightning tells samplers alone: a data set that draws by the epoch would draw the same in all of them."""
    volumes = [torch.arange(8.0).reshape(1, 2, 2, 2) + number for number in range(8)]
    dataset = mk.voxel.VoxelDataset(volumes, augmentation_config={"noise_std": 0.1})
    order = mk.recipes.ResumableBatchSampler(8, 4)
    trainer = L.Trainer(accelerator="cpu", max_epochs=3, callbacks=[MemoryCallback()], **QUIET)
    module = Seeing()
    trainer.fit(module, torch.utils.data.DataLoader(dataset, batch_sampler=order))
    again = mk.recipes.ResumableBatchSampler(8, 4)
    expected = []
    for epoch in range(3):
        again.set_epoch(epoch)
        dataset.set_epoch(epoch)
        expected += [torch.stack([dataset[index] for index in batch]) for batch in again]
    torch.testing.assert_close(module.seen, expected, rtol=0, atol=0)


def test_exact_accumulation_is_a_switch():
    call = lambda: MemoryCallback(exact_accumulation="False")  # noqa: E731
    assert_refused(call, mk.errors.ConfigError, "pass exact_accumulation=False.")
