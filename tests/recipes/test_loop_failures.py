"""After a run that ends with an error, finished steps are not lost, and no rank waits for another."""

import pytest
import torch
from torch.utils.data import DataLoader

import memkit as mk
from memkit.recipes.state.manager import TrainingStateManager
from memkit.recipes.validation import ValidationMonitor
from tests.helpers import assert_refused, one_in_product
from tests.recipes.loop_parts import digits, loader_of, make, weights


def test_an_iterator_is_not_taken_for_many_epochs(tmp_path):
    """It would train once, and call two epochs of nothing done. What it has trained is kept."""
    with TrainingStateManager(tmp_path, keep=10) as manager:
        loop, model = make(iter(list(loader_of(40))), state=manager, save_every=2)
        assert_refused(lambda: loop.run(num_epochs=3), mk.errors.InputError, r"epoch 2: got no batch")
        assert loop.num_steps == 3
        assert manager.steps == (3, 2)
        again, restored = make()
        manager.restore(**again.objects())
    assert torch.equal(weights(restored), weights(model))


def test_an_epoch_without_a_batch_at_the_start_saves_nothing(tmp_path):
    with TrainingStateManager(tmp_path) as manager:
        loop, _ = make(iter(()), state=manager)
        assert_refused(lambda: loop.run(), mk.errors.InputError, r"epoch 1: got no batch")
        assert manager.steps == ()


@pytest.mark.parametrize(
    ("every", "error"),
    one_in_product(
        4,
        [{"validate_every": 2, "save_every": 2}, {"save_every": 2}, {}],
        [ZeroDivisionError, KeyboardInterrupt, mk.errors.ConfigError],
    ),
)
def test_failing_validation_loses_no_state(every, error, tmp_path):
    """It comes before the save of its step. The run that goes on makes up for it, and ends as without the error."""

    def val_fn(model, batch):
        if is_broken and error is not mk.errors.ConfigError:
            raise error
        return {"other" if is_broken else "loss": batch}

    def start():
        settings = {"val_loader": [torch.zeros(1)], "val_fn": val_fn, "monitor": ValidationMonitor(), **every}
        return make(loader_of(64, generator=torch.Generator().manual_seed(0)), state=manager, **settings)

    is_broken = True
    with TrainingStateManager(tmp_path / "broken") as manager:
        loop, _ = start()
        assert_refused(lambda: loop.run(num_epochs=2), error)
        failed_at = 2 if "validate_every" in every else 4
        assert manager.steps[0] == loop.num_steps == failed_at
        is_broken = False
        again, model = start()
        assert again.run(num_epochs=2).validation == {"loss": 0.0}
    with TrainingStateManager(tmp_path / "whole") as manager:
        whole, expected = start()
        whole.run(num_epochs=2)
    assert again.num_steps == whole.num_steps == 8
    assert torch.equal(weights(model), weights(expected))


def test_a_run_that_is_stopped_while_it_skips_done_batches_leaves_the_random_state():
    class Unreliable(torch.utils.data.TensorDataset):
        left = 0

        def __getitem__(self, index):
            self.left -= 1
            if self.left == 0:
                raise OSError("the network drive is gone")
            return super().__getitem__(index)

    def train(stops):
        loop, model = make(DataLoader(data := Unreliable(*digits(64)), batch_size=8, shuffle=True))
        for stop in stops:
            data.left = stop
            assert_refused(lambda: loop.run(), OSError, "network drive")
        data.left = 0
        loop.run()
        return weights(model)

    assert torch.equal(train([36, 12]), train([]))  # in the fifth batch; then in the second of the four done ones
