"""Objects that hold hooks, locks or files of their process refuse to be pickled or copied, and name the way out."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import memkit as mk
from memkit._core.protocols import Composed


def make():
    model = nn.Linear(3, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


MAKERS = {
    "MemoryEfficientTrainingWrapper": lambda _: mk.MemoryEfficientTrainingWrapper(*make(), precision="bf16-mixed"),
    "GradientAccumulator": lambda _: mk.GradientAccumulator(make()[1], 2),
    "SplitLoss": lambda _: mk.SplitLoss(make()[0], num_microbatches=2),
    "MemoryManager": lambda folder: mk.MemoryManager("cpu", log=folder / "log.jsonl"),
    "TrainingStateManager": lambda folder: mk.TrainingStateManager(folder),
    "DensityInvariantTrainer": lambda _: mk.DensityInvariantTrainer(
        mk.MemoryEfficientTrainingWrapper(*make()), mk.GridAwareSampler(1.0), torch.nn.functional.mse_loss
    ),
    "Tracker": lambda _: mk.Tracker(device="cpu"),
    "VirtualGPU": lambda _: mk.VirtualGPU("RTX 4090"),
}
WAYS = {
    "pickle": pickle.dumps,
    "torch.save": lambda value: torch.save(value, io.BytesIO()),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "inside of others": lambda value: copy.deepcopy({"objects": [value]}),
}


@pytest.mark.parametrize("name", MAKERS)
def test_rejects_copy_with_way_out(tmp_path, name):
    value = MAKERS[name](tmp_path)
    for way in WAYS.values():
        with pytest.raises(mk.errors.InputTypeError, match=f"a pickle or a copy of a {name}") as raised:
            way(value)
        assert raised.value.fix == value.instead
    if hasattr(value, "state_dict"):
        assert "state_dict()" in value.instead
        pickle.loads(pickle.dumps(value.state_dict()))
    if hasattr(value, "close"):
        value.close()


def test_pickling_a_loop_names_the_wrapper_inside():
    trainer = mk.MemoryEfficientTrainingWrapper(*make())
    loop = mk.MemoryEfficientTrainLoop(trainer, [torch.ones(2, 3)], lambda model, batch: model(batch).mean())
    with pytest.raises(mk.errors.InputTypeError, match="a pickle or a copy of a MemoryEfficientTrainingWrapper"):
        pickle.dumps(loop)


@pytest.mark.parametrize(
    "cls", [mk.MemoryEfficientTrainingWrapper, mk.GradientAccumulator, mk.MemoryEfficientTrainLoop]
)
def test_what_only_the_saving_of_states_asks_for_is_no_public_method(cls):
    assert issubclass(cls, Composed)
    assert not [name for name in vars(Composed) if not name.startswith("_")]
