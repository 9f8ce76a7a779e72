"""Short names of precisions, presets in one step, scalers of the user's own, and gradients that can be looked at."""

import contextlib
import copy
import inspect
import warnings

import pytest
import torch
from torch import nn

import memkit as mk
from tests.helpers import relative_error
from tests.toys import Residual, fits, mean_square, mlp, trainer_of

ROWS = 7


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return mlp(4, 8, 2).to(dtype)


def rows(num=ROWS, dtype=torch.float32):
    return torch.randn(num, 4, generator=torch.Generator().manual_seed(1), dtype=dtype)


def parameters_after(num_steps=2, **settings):
    model = net()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*on a CPU, which emulates float16")
        trainer = trainer_of(model, **settings)
    for _ in range(num_steps):
        trainer.train_step(rows(), mean_square)
    return nn.utils.parameters_to_vector(model.parameters()).detach()


class TestPrecisionNames:
    @pytest.mark.parametrize(
        ("short", "name"), [("bf16", "bf16-mixed"), ("fp16", "fp16-mixed"), ("fp32", None), ("32-true", None)]
    )
    def test_mean_the_same_as_the_long_ones(self, short, name):
        short_after, long_after = parameters_after(precision=short), parameters_after(precision=name)
        assert torch.equal(short_after, long_after)
        assert torch.equal(short_after, parameters_after()) == (name is None)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    @pytest.mark.parametrize("name", ["fp32", "32-true"])
    def test_fp32_rejects_model_of_other_dtype(self, name, dtype):
        model = net(dtype)
        with pytest.raises(mk.errors.ConfigError, match=str(dtype).removeprefix("torch.")):
            trainer_of(model, precision=name)
        trainer_of(model.float(), precision=name).close()  # the way out

    def test_fp32_rejects_frozen_layer_of_other_dtype(self):
        model = net()
        model[0].bfloat16().requires_grad_(False)
        with pytest.raises(mk.errors.ConfigError, match="bfloat16 parameters"):
            trainer_of(model, precision="fp32")

    def test_float16_on_a_cpu_is_warned_of_under_the_short_name(self):
        with pytest.warns(mk.MemkitWarning, match="precision='fp16' on a CPU"):
            trainer_of(net(), precision="fp16")


class TestCheckpointFlags:
    def test_true_is_auto_and_false_is_none(self):
        model = nn.Sequential(*[Residual(4) for _ in range(3)])
        assert trainer_of(model, checkpoint=True).checkpointed_blocks == ("0", "1", "2")
        assert trainer_of(copy.deepcopy(model), checkpoint=False).checkpointed_blocks == ()


def test_no_offload_is_none():
    assert torch.equal(parameters_after(offload=None), parameters_after(offload=()))


class TestFromConfig:
    def config(self, **fields):
        return mk.predict.TrainingConfig(batch_size=2, gradient_accumulation_steps=3, precision="fp32", **fields)

    def make(self, config, **settings):
        model = nn.Sequential(*[Residual(4) for _ in range(3)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return mk.MemoryEfficientTrainingWrapper.from_config(model, optimizer, config, **settings)

    @pytest.mark.parametrize("name", ["low", "medium", "high"])
    def test_takes_every_preset(self, name):
        config = mk.get_preset_config(name)
        trainer = self.make(config)
        result = trainer.train_step(rows(config.effective_batch_size), mean_square)
        assert result.sizes == (config.batch_size,) * config.gradient_accumulation_steps

    def test_takes_over_all_step_settings(self):
        trainer = self.make(self.config(checkpointing=True))
        assert trainer.checkpointed_blocks == ("0", "1", "2")
        assert trainer.train_step(rows(6), mean_square).sizes == (2, 2, 2)
        with pytest.raises(mk.errors.ConfigError, match="precision='fp32'"):
            model = net(torch.bfloat16)
            mk.MemoryEfficientTrainingWrapper.from_config(
                model, torch.optim.SGD(model.parameters(), lr=0.1), self.config()
            )

    def test_settings_come_before_the_config(self):
        trainer = self.make(self.config(checkpointing=True), checkpoint=None, accumulation_steps=2, max_grad_norm=1.0)
        assert trainer.checkpointed_blocks == ()
        result = trainer.train_step(rows(6), mean_square)
        assert result.sizes == (3, 3)
        assert result.grad_norm is not None

    def test_a_loader_of_micro_batches_is_warned_of_once(self):
        trainer = self.make(self.config())
        with pytest.warns(mk.MemkitWarning, match=r"has 2 samples.*batch_size=config\.effective_batch_size"):
            trainer.train_step(rows(2), mean_square)
        trainer.train_step(rows(2), mean_square)

    @pytest.mark.parametrize(("num", "settings"), [(5, {}), (6, {}), (2, {"accumulation_steps": 1})])
    def test_other_batches_are_not(self, num, settings):
        assert self.make(self.config(), **settings).train_step(rows(num), mean_square).stepped

    def test_help_shows_the_settings(self):
        signature = inspect.signature(mk.MemoryEfficientTrainingWrapper.from_config)
        assert list(signature.parameters)[:3] == ["model", "optimizer", "config"]
        assert {"max_grad_norm", "on_gradients", "scaler"} < signature.parameters.keys()
        assert "settings" not in signature.parameters


class TestScaler:
    def test_given_scaler_is_used(self):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
        trainer = trainer_of(net(), scaler=scaler)
        trainer.train_step(rows(), mean_square)
        assert scaler.get_scale() == 8.0  # it grew: stepped and updated once
        assert trainer.state_dict()["scaler"] == scaler.state_dict()

    @pytest.mark.parametrize("accumulation_steps", [1, 3])
    def test_changes_no_bit_of_a_float32_step(self, accumulation_steps):
        """A power of two is taken out again exactly, before the clipping."""
        settings = {"accumulation_steps": accumulation_steps, "max_grad_norm": 0.01}
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        assert torch.equal(parameters_after(scaler=scaler, **settings), parameters_after(**settings))

    def test_the_norm_before_clipping_is_known_in_both_forms(self):
        model, batch = net(), rows()
        mean_square(copy_of := copy.deepcopy(model), batch).backward()
        norm = nn.utils.get_total_norm([each.grad for each in copy_of.parameters()])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        trainer = mk.MemoryEfficientTrainingWrapper(model, optimizer, accumulation_steps=2, max_grad_norm=1e-3)
        for attempt in trainer.microbatches(batch):
            with attempt as micro_batch:
                trainer.backward(mean_square(model, micro_batch))
        assert trainer.grad_norm is None
        trainer.step()
        torch.testing.assert_close(trainer.grad_norm, norm)
        torch.testing.assert_close(trainer.train_step(batch, mean_square).grad_norm, norm)

    def test_an_overflow_skips_the_step_and_its_schedule(self):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126)
        trainer = mk.MemoryEfficientTrainingWrapper(model, optimizer, scaler=scaler, scheduler=scheduler)
        before = copy.deepcopy(model.state_dict())
        assert not trainer.train_step(1e3 * rows(), mean_square).stepped
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
        assert scheduler.last_epoch == 0
        assert scaler.get_scale() == 2.0**125

    def test_replaces_default_scaler_with_fp16(self):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**7)
        with pytest.warns(mk.MemkitWarning, match="emulates float16"):
            trainer = trainer_of(net(), precision="fp16", scaler=scaler)
        trainer.train_step(rows(), mean_square)
        assert trainer.state_dict()["scaler"]["scale"] == 2.0**7

    def test_disabled_scaler_warns_with_float16(self):
        disabled = torch.amp.GradScaler("cpu", enabled=False)
        assert torch.equal(parameters_after(scaler=disabled), parameters_after())
        with pytest.warns(mk.MemkitWarning) as told:
            trainer_of(net(), precision="fp16", scaler=disabled)
        assert any("small gradients become zero" in str(each.message) for each in told)


def gradients(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def whole_gradient(dtype=torch.float64):
    model = net(dtype)
    mean_square(model, rows(dtype=dtype)).backward()
    return gradients(model)


class TestGradientsSeen:
    @pytest.mark.parametrize("accumulation_steps", [1, 2, 3, ROWS])
    def test_are_the_whole_batch_s(self, accumulation_steps):
        seen, model = [], net(torch.float64)
        trainer = trainer_of(
            model, accumulation_steps=accumulation_steps, on_gradients=lambda each: seen.append(gradients(each))
        )
        trainer.train_step(rows(dtype=torch.float64), mean_square)
        (found,) = seen
        assert max(map(relative_error, found, whole_gradient())) <= 1e-14
        assert gradients(model) == [None] * len(found)

    def test_are_there_before_the_step_of_a_loop(self):
        """Code of one's own between the last micro-batch and the step, such as clipping, sees the batch's gradients."""
        model = net(torch.float64)
        trainer, whole = trainer_of(model, accumulation_steps=3), whole_gradient()
        between = []
        for attempt in trainer.microbatches(rows(dtype=torch.float64)):
            with attempt as micro:
                trainer.backward(mean_square(model, micro), count=3 * len(micro))
                if not attempt.is_check:
                    between.append(max(map(relative_error, gradients(model), whole)))
        assert min(between) > 0.1  # the negative control: until the last, it is a sum
        assert max(map(relative_error, gradients(model), whole)) <= 1e-14
        assert trainer.step()

    def test_are_those_after_clipping_and_unscaling(self):
        seen, model = [], net()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        look = lambda each: seen.append(nn.utils.get_total_norm(gradients(each)))  # noqa: E731 - as users write it
        trainer = trainer_of(model, scaler=scaler, max_grad_norm=1e-3, on_gradients=look)
        result = trainer.train_step(rows(), mean_square)
        assert result.grad_norm > 0.1
        torch.testing.assert_close(seen[0], torch.tensor(1e-3), rtol=1e-3, atol=0)

    def test_is_called_in_own_loop(self):
        seen, model = [], net()
        trainer = trainer_of(model, accumulation_steps=2, on_gradients=seen.append)
        for attempt in trainer.microbatches(rows()):
            with attempt as micro:
                trainer.backward(mean_square(model, micro))
        assert seen == []
        assert trainer.step()
        assert seen == [model]

    def test_is_called_once_despite_out_of_memory(self):
        seen, model = [], net(torch.float64)
        trainer = trainer_of(model, on_gradients=lambda each: seen.append(gradients(each)))
        result = trainer.train_step(rows(dtype=torch.float64), fits(4, mean_square))
        assert result.num_ooms
        (found,) = seen
        assert max(map(relative_error, found, whole_gradient())) <= 1e-14

    def test_may_be_changed(self):
        model, before = net(), nn.utils.parameters_to_vector(net().parameters())
        trainer = trainer_of(model, on_gradients=lambda each: nn.utils.clip_grad_value_(each.parameters(), 1e-4))
        trainer.train_step(rows(), mean_square)
        moved = (nn.utils.parameters_to_vector(model.parameters()) - before).abs().max()
        assert 0 < moved <= 1.1e-5  # 0.1 times the value

    def test_is_not_called_for_idle_step(self):
        seen, other = [], net()
        trainer = trainer_of(net(), on_gradients=seen.append)
        with pytest.warns(mk.MemkitWarning, match="nothing was trained"):
            trainer.train_step(rows(), lambda _, x: mean_square(other, x))
        assert seen == []

    def test_error_loses_only_its_step(self):
        model, calls = net(), []

        def look(_):
            calls.append(None)
            if len(calls) == 1:
                raise KeyError("a bug in the histogram")

        trainer = trainer_of(model, on_gradients=look)
        with pytest.raises(KeyError):
            trainer.train_step(rows(), mean_square)
        torch.testing.assert_close(model.state_dict(), net().state_dict(), rtol=0, atol=0)
        trainer.train_step(rows(), mean_square)
        after = nn.utils.parameters_to_vector(model.parameters()).detach()
        assert torch.equal(after, parameters_after(1))


@pytest.mark.parametrize("dropped", [0, 1])
def test_rows_that_a_split_fn_leaves_out_of_one_tensor_are_told_of(dropped):
    """If it left out rows of all tensors, it would be refused; of one they may be padding."""
    images, boxes = torch.randn(8, 4), torch.rand(24, 4)

    def split(batch, n):
        parts = zip(batch[0].chunk(n), batch[1].chunk(n), strict=True)
        return [(images, boxes[: len(boxes) - dropped]) for images, boxes in parts]

    def loss_fn(model, batch):
        images, boxes = batch
        loss = model(images).square().mean() + model(boxes).square().mean()
        return mk.Loss(mean=loss, count=len(images))

    trainer = trainer_of(nn.Linear(4, 4), split_fn=split, accumulation_steps=2, probe=False)
    text = r"the parts that split_fn returns have 22 of 24 rows of batch\[1\], a tensor of the shape \(24, 4\)"
    with pytest.warns(mk.errors.MemkitWarning, match=text) if dropped else contextlib.nullcontext():
        for _ in range(2):
            assert trainer.train_step((images, boxes), loss_fn).num_microbatches == 2
