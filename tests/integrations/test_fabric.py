"""Fabric's loops: objects from fabric.setup, plain and with memkit, must train the same."""

import logging

import pytest
import torch

L = pytest.importorskip("lightning")

from lightning.fabric.plugins.precision import MixedPrecision  # noqa: E402
from lightning.fabric.strategies import DDPStrategy  # noqa: E402
from torch import nn  # noqa: E402

import memkit as mk  # noqa: E402
from memkit.integrations.fabric import FabricSplitLoss  # noqa: E402
from memkit.integrations.lightning import MemoryEfficientModule  # noqa: E402
from tests.integrations.scripts import changed, num_changed_lines  # noqa: E402
from tests.integrations.test_lightning_strategies import ranks  # noqa: E402, F401 - a fixture
from tests.train.faults import FailingOperator  # noqa: E402

# Lightning's own words on torch's pytree, and on loaders without workers.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
]
logging.getLogger("lightning.fabric").setLevel(logging.ERROR)

PLAIN = """
import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def loss_fn(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)

def train(fabric, num_steps=3):
    torch.manual_seed(0)
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data / 16).float(), torch.tensor(digits.target))
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=50))
    losses = []
    for number, batch in zip(range(2 * num_steps), loader):
        is_accumulating = number % 2 == 0
        with fabric.no_backward_sync(model, enabled=is_accumulating):
            loss = loss_fn(model, batch)
            fabric.backward(loss / 2)
        losses.append(loss.detach())
        if not is_accumulating:
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
    return losses, model.state_dict()
"""
CHANGES = [
    ("import lightning as L\n", "import lightning as L\nfrom memkit.integrations.fabric import FabricSplitLoss\n"),
    (
        "    loader = fabric",
        "    split = FabricSplitLoss(model, num_microbatches=3)\n    WATCH(split)\n    loader = fabric",
    ),
    ("loss = loss_fn(model, batch)", "loss = split(batch, loss_fn)"),
]


def memkit_script():
    return changed(PLAIN, CHANGES)


def train(fabric, script, faults=()):
    """Run a script; faults come in forwards and backwards of the last rank's parts."""

    def watch(split):
        call, mode = split.split_loss, FailingOperator(*(faults if fabric.global_rank == fabric.world_size - 1 else ()))

        def run(*args, **kwargs):
            with mode:
                return call(*args, **kwargs)

        split.split_loss = run

    names = {"WATCH": watch}
    exec(compile(script, "script.py", "exec"), names)
    return names["train"](fabric)


def test_the_script_changes_in_few_lines():
    assert num_changed_lines(PLAIN, memkit_script().replace("    WATCH(split)\n", ""))[0] == 3


@pytest.mark.parametrize(("precision", "tolerance"), [("32-true", 1e-5), ("bf16-mixed", 2e-3)])
def test_the_script_in_parts_trains_as_the_plain_one(precision, tolerance):
    def fabric():
        return L.Fabric(accelerator="cpu", devices=1, precision=precision)

    plain, parts = train(fabric(), PLAIN), train(fabric(), memkit_script(), (8, 60))
    torch.testing.assert_close(parts, plain, rtol=tolerance, atol=tolerance)


def test_half_precision_is_scaled_on_the_way():
    def fabric():  # asked for by name, Fabric takes bfloat16 on the CPU
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        return L.Fabric(accelerator="cpu", devices=1, plugins=MixedPrecision("16-mixed", "cpu", scaler))

    def tiny(script):  # its gradients vanish in float16 without the scale
        return script.replace("(model(x), y)", "(model(x), y) * 1e-6").replace("lr=0.1", "lr=1e5")

    plain, parts = train(fabric(), tiny(PLAIN)), train(fabric(), tiny(memkit_script()))
    torch.testing.assert_close(parts[1], plain[1], rtol=2e-3, atol=2e-3)


class Net(MemoryEfficientModule):
    def __init__(self, num_parts):
        super().__init__()
        torch.manual_seed(0)
        self.split_options = {"num_microbatches": num_parts}
        self.layer = nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        self.sizes.append(len(batch))
        self.log("loss", batch.mean())
        return self.layer(batch).square().mean()


def test_lightning_module_splits_under_fabric():
    gradients, x = [], torch.arange(15.0).reshape(5, 3)
    for num_parts in (1, 2):
        fabric, logged = L.Fabric(accelerator="cpu", devices=1), []
        fabric.log_dict = lambda metrics, step=None, logged=logged: logged.append(metrics)
        module = Net(num_parts)
        module.sizes = []
        model = fabric.setup_module(module)
        fabric.backward(model.training_step(x, 0))
        gradients.append(module.layer.weight.grad)
        assert module.sizes[:num_parts] == ([5], [3, 2])[num_parts - 1]
        assert [float(each["loss"]) for each in logged] == [float(x.mean())]
    torch.testing.assert_close(*gradients)


def test_parts_see_the_model_as_fabric_gives_it():
    fabric, seen = L.Fabric(accelerator="cpu", devices=1, precision="bf16-mixed"), []
    model = fabric.setup_module(nn.Linear(3, 1))

    def loss_fn(model, x):
        scores = model(x)
        seen.append((scores.dtype, model.weight is inner.weight))
        return scores.square().mean()

    inner = model.module
    fabric.backward(FabricSplitLoss(model)(torch.ones(2, 3), loss_fn))
    assert seen == [(torch.float32, True)]


def test_a_model_without_fabric_is_refused():
    with pytest.raises(mk.errors.InputTypeError, match="got a Linear; expected a model set up by Fabric"):
        FabricSplitLoss(nn.Linear(2, 2))


def compare(fabric):
    torch.set_num_threads(1)
    torch.testing.assert_close(train(fabric, memkit_script(), (8, 60, 61)), train(fabric, PLAIN))


@pytest.mark.slow
@pytest.mark.usefixtures("ranks")
def test_a_rank_recovers_alone_under_ddp():
    strategy = DDPStrategy(start_method="spawn", process_group_backend="gloo")
    L.Fabric(accelerator="cpu", devices=2, strategy=strategy).launch(compare)
