"""Settings, figures and modes that would be silently wrong: each is right, warned of or refused."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import memkit as mk
from tests.helpers import assert_refused
from tests.toys import mean_square

DATA = torch.randn(10, 3, generator=torch.Generator().manual_seed(0))


def loop_with(val_fn, **settings):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    trainer = mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters(), lr=0.0))
    settings |= {"val_loader": DataLoader(DATA, batch_size=4), "val_fn": val_fn, "progress": False}  # 4, 4 and 2 rows
    return model, mk.MemoryEfficientTrainLoop(trainer, DataLoader(DATA, batch_size=4), mean_square, **settings)


class TestValidations:
    @pytest.mark.parametrize("shape", [(), (1,)])
    def test_a_mean_of_a_batch_is_refused(self, shape):
        """Averaged over batches it would weigh the last two rows like four."""
        _, loop = loop_with(lambda model, x: {"loss": model(x).square().mean().reshape(shape)})
        with pytest.raises(
            mk.errors.InputError, match=r"one number as figure 'loss' of a batch of 4 rows.*reduction='none'"
        ):
            loop.run()

    def test_its_two_ways_out_are_the_mean(self):
        for val_fn in (
            lambda model, x: {"loss": model(x).square().mean(1)},
            lambda model, x: {"loss": (model(x).square().mean()[None], torch.tensor([float(len(x))]))},
        ):
            model, loop = loop_with(val_fn)
            figures = loop.run().validation
            assert figures["loss"] == pytest.approx(model(DATA).square().mean().item(), rel=1e-6)

    def test_a_number_is_refused(self):
        _, loop = loop_with(lambda model, x: {"loss": model(x).square().mean().item()})
        assert_refused(lambda: loop.run(), mk.errors.InputTypeError, r"a float as figure 'loss'.*not \.item\(\)")

    def test_a_reducer_without_its_figure_is_refused(self):
        """Else the scores would be averaged with the targets as weights, and the reducer would give None."""
        val_fn = lambda model, x: {"accuracy": (model(x), (x[:, 0] > 0).long())}  # noqa: E731
        _, loop = loop_with(val_fn, reducers={"acc": mk.recipes.Accuracy()})
        assert_refused(lambda: loop.run(), mk.errors.InputError, r"reducers=\{'acc'.*figures 'accuracy'")

    def test_a_monitor_on_several_ranks_is_warned_of(self):
        model = nn.Linear(3, 1)
        trainer = mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters(), lr=0.0))
        trainer._sum.ranks = type("Ranks", (), {"num_ranks": 2})()
        with pytest.warns(mk.MemkitWarning, match="on 2 ranks: each rank decides by its own validation"):
            mk.MemoryEfficientTrainLoop(
                trainer, [DATA], lambda *_: None, val_loader=[DATA], monitor=mk.ValidationMonitor()
            )


class TestMonitors:
    @pytest.mark.parametrize("metric", ["accuracy", "iou", "f1", "score", "val/dice", "reward"])
    def test_requires_mode_for_unknown_metric(self, metric):
        with pytest.raises(mk.errors.ConfigError, match=f"whichever is better for '{metric}'"):
            mk.ValidationMonitor(metric=metric)
        assert mk.ValidationMonitor(metric=metric, mode="max").update(0.5)

    @pytest.mark.parametrize("metric", ["loss", "val_loss", "val/loss", "mse", "chamfer_pytorch3d", "Test Error"])
    def test_but_not_of_losses_and_errors(self, metric):
        assert mk.ValidationMonitor(metric=metric).mode == "min"

    @pytest.mark.parametrize("value", [None, torch.ones(2), "a"])
    def test_rejects_non_numeric_values(self, value):
        with pytest.raises(mk.errors.InputTypeError, match="expected a number, the figure 'loss'"):
            mk.ValidationMonitor().update(value)

    def test_a_row_of_nan_is_not_correct(self):
        accuracy = mk.recipes.Accuracy()
        accuracy.update(torch.full((4, 3), float("nan")), torch.tensor([0, 0, 0, 1]))
        assert accuracy.result() == 0.0
        accuracy.update(torch.tensor([[1.0, 0.0], [0.0, float("nan")]]), torch.tensor([0, 1]))
        assert accuracy.result() == pytest.approx(1 / 6)


def norms():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Dropout(0.1), nn.BatchNorm2d(2))


class TestProgressiveTrainer:
    def run(self, model, **settings):
        stages = [mk.recipes.Stage(4, batch_size=4), mk.recipes.Stage(4, batch_size=4)]
        batches = [torch.randn(4, 1, 4, 4, generator=torch.Generator().manual_seed(n)) + 3 for n in range(2)]
        modes = []
        step = lambda *_: modes.append([each.training for each in model.modules()])  # noqa: E731
        mk.ProgressiveTrainer(step, stages, resize=lambda batch, _: batch, model=model, **settings).run(batches)
        return modes, torch.cat(batches)

    def test_a_frozen_norm_stays_frozen(self):
        """Torch's update_bn resets all statistics, and leaves the whole model in training mode."""
        model = norms()
        model[3].eval()
        model[3].running_mean.fill_(7.0)
        modes, data = self.run(model)
        assert modes == [[True, True, True, True, False]] * 4
        assert model[3].running_mean.tolist() == [7.0, 7.0]
        torch.testing.assert_close(model[1].running_mean, model[0](data).mean((0, 2, 3)).detach())

    def test_a_model_in_evaluation_mode_is_estimated_and_left_in_it(self):
        model = norms().eval()
        modes, data = self.run(model)
        assert modes == [[False] * 5] * 4
        torch.testing.assert_close(model[1].running_mean, model[0](data).mean((0, 2, 3)).detach())

    def test_no_batches_change_nothing(self):
        model = norms()
        model[1].running_mean.fill_(7.0)
        self.run(model, bn_batches=0)
        assert model[1].running_mean.tolist() == [7.0, 7.0]
        assert_refused(lambda: self.run(model, bn_batches=-1), mk.errors.ConfigError, "bn_batches")

    @pytest.mark.parametrize("numbers", [(8.5, 2), (8, 2.5), (True, 2), (8, 2, 0.5), ("8", 2)])
    def test_stages_have_whole_numbers(self, numbers):
        assert_refused(lambda: mk.recipes.Stage(*numbers), mk.errors.ConfigError, "a whole number, 1 or more")


def test_warns_of_offloading_host_tensors_to_host():
    layer, offload = nn.Linear(64, 64), mk.train.offload_activations(to="host", min_bytes=0)
    with pytest.warns(mk.MemkitWarning, match=r"are on the CPU: \d+ stay where they are.*to='disk'"), offload:
        layer(torch.randn(64, 64)).tanh().sum()
    with offload:  # said once
        layer(torch.randn(64, 64)).tanh().sum()


def test_warns_of_penalty_over_row_mixing_norms():
    critic = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    with pytest.warns(mk.MemkitWarning, match="gradient_penalty: 1 normalize over the rows.*spectral_norm"):
        mk.train.gradient_penalty(critic, DATA)
    mk.train.gradient_penalty(critic, DATA)  # said once
    mk.train.gradient_penalty(copy.deepcopy(critic).eval(), DATA)
    mk.train.gradient_penalty(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1)), DATA)
