"""Real trainers of other libraries in place of the wrapper's model: each is led to the adapter that is there for it."""

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


@pytest.mark.parametrize("make", [hugging_face, lightning, fabric])
@pytest.mark.parametrize("has_optimizer", [True, False])
def test_a_trainer_is_led_to_its_adapter(make, has_optimizer, tmp_path):
    optimizer = [torch.optim.SGD(nn.Linear(4, 2).parameters(), lr=0.1)] * has_optimizer
    with pytest.raises(mk.errors.InputTypeError) as caught:
        mk.MemoryEfficientTrainingWrapper(make(tmp_path), *optimizer)
    module, name = re.search(
        r"(memkit\.integrations\.\w+)(?: import |\.)(\w+)", caught.value.fix
    ).groups()  # what is written there is there
    assert isinstance(getattr(importlib.import_module(module), name), type)


def test_an_accelerator_is_no_model_but_what_it_prepares_is_one():
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(mk.errors.InputTypeError, match=r"accelerator\.prepare\(model, optimizer\)"):
        mk.MemoryEfficientTrainingWrapper(accelerator, optimizer)
    trainer = mk.MemoryEfficientTrainingWrapper(*accelerator.prepare(model, optimizer))
    assert trainer.train_step(torch.ones(6, 4), mean_square).stepped


def test_a_lightning_module_works_in_a_loop_of_ones_own_with_a_word():
    found = pytest.importorskip("lightning")

    class Net(found.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x):
            return self.layer(x)

    model = Net()
    with pytest.warns(mk.MemkitWarning, match="MemoryEfficientModule instead"):
        trainer = mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert trainer.train_step(torch.ones(6, 4), mean_square).stepped
    with pytest.raises(mk.errors.InputTypeError, match=r"trainer\.fit\(module\)"):
        mk.MemoryEfficientTrainingWrapper(model)
