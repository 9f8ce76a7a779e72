"""Real trainers of other libraries passed as the wrapper's model: each error names the right adapter."""

import importlib
import re

import pytest
import torch
from torch import nn

import memkit as mk
from tests.toys import mean_square

pytestmark = pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*")


def hugging_face(tmp_path):
    transformers = pytest.importorskip("transformers")
    arguments = transformers.TrainingArguments(output_dir=tmp_path, report_to=[], use_cpu=True)
    return transformers.Trainer(model=nn.Linear(4, 2), args=arguments)


def lightning(tmp_path):
    found = pytest.importorskip("lightning")
    return found.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, default_root_dir=tmp_path)


def fabric(tmp_path):
    return pytest.importorskip("lightning").Fabric(accelerator="cpu", devices=1)


MODEL = nn.Linear(4, 2)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.1)
TAKERS = {
    "wrapper": lambda found: mk.MemoryEfficientTrainingWrapper(found, OPTIMIZER),
    "wrapper alone": mk.MemoryEfficientTrainingWrapper,
    "preset": lambda found: mk.MemoryEfficientTrainingWrapper.from_config(
        found, OPTIMIZER, mk.get_preset_config("low")
    ),
    "optimizer": lambda found: mk.MemoryEfficientTrainingWrapper(MODEL, found),
    "accumulator": mk.GradientAccumulator,
    "accumulator's model": lambda found: mk.GradientAccumulator(OPTIMIZER, model=found),
    "split loss": mk.train.SplitLoss,
    "loop": lambda found: mk.MemoryEfficientTrainLoop(found, [torch.ones(2, 4)], mean_square),
}


@pytest.mark.parametrize("make", [hugging_face, lightning, fabric])
@pytest.mark.parametrize("take", TAKERS.values(), ids=TAKERS)
def test_a_trainer_is_led_to_its_adapter(make, take, tmp_path):
    with pytest.raises(mk.errors.InputTypeError) as caught:
        take(make(tmp_path))
    module, name = re.search(
        r"(memkit\.integrations\.\w+)(?: import |\.)(\w+)", caught.value.fix
    ).groups()  # what is written there is there
    assert isinstance(getattr(importlib.import_module(module), name), type)


def test_suggested_hugging_face_code_runs(tmp_path):
    theirs = hugging_face(tmp_path)
    with pytest.raises(mk.errors.InputTypeError) as caught:
        mk.MemoryEfficientTrainingWrapper(theirs, OPTIMIZER)
    names = {"model": theirs.model, "args": theirs.args, "dataset": [{"x": torch.ones(4)}]}
    exec(caught.value.fix.rstrip("."), names)
    assert isinstance(names["trainer"], type(theirs))


def test_suggested_fabric_code_runs(tmp_path):
    theirs = fabric(tmp_path)
    with pytest.raises(mk.errors.InputTypeError) as caught:
        mk.MemoryEfficientTrainingWrapper(theirs, OPTIMIZER)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = {
        "fabric": theirs,
        "model": model,
        "optimizer": optimizer,
        "batch": torch.ones(6, 4),
        "loss_fn": mean_square,
    }
    exec(caught.value.fix.rstrip("."), names)
    assert model.weight.grad is not None


def test_accepts_prepared_model_but_no_accelerator():
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(mk.errors.InputTypeError, match=r"accelerator\.prepare\(model, optimizer\)"):
        mk.MemoryEfficientTrainingWrapper(accelerator, optimizer)
    trainer = mk.MemoryEfficientTrainingWrapper(*accelerator.prepare(model, optimizer))
    assert trainer.train_step(torch.ones(6, 4), mean_square).stepped


def test_lightning_module_works_in_own_loop_with_a_warning():
    found = pytest.importorskip("lightning")

    class Net(found.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x):
            return self.layer(x)

    model = Net()
    trainer = mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.warns(mk.MemkitWarning, match="MemoryEfficientModule instead"):
        assert trainer.train_step(torch.ones(6, 4), mean_square).stepped
    with pytest.raises(mk.errors.InputTypeError, match=r"trainer\.fit\(module\)"):
        mk.MemoryEfficientTrainingWrapper(model)
