"""Mistakes that would train nothing, or wrongly: optimizers of other models, steps after close, float16 on a CPU."""

import copy

import pytest
import torch
from torch import nn

import memkit as mk
from tests.helpers import assert_same
from tests.toys import mean_square, trainer_of

ADAM = torch.optim.Adam


def make(**keywords):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    return model, mk.MemoryEfficientTrainingWrapper(model, ADAM(model.parameters()), **keywords)


class TestAnOptimizerOfAnotherModel:
    def test_is_refused(self):
        model = make()[0]
        other = copy.deepcopy(model)
        with pytest.raises(
            mk.errors.ConfigError, match=r"Adam over 4 tensors, none of which .*Adam\(model\.parameters\(\)"
        ):
            mk.MemoryEfficientTrainingWrapper(model, ADAM(other.parameters()))

    def test_is_rejected_if_parameters_are_replaced_later(self):
        model = make()[0]
        optimizer = ADAM(model.parameters())
        model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
        with pytest.raises(mk.errors.ConfigError, match="none of which is a parameter of the model"):
            mk.MemoryEfficientTrainingWrapper(model, optimizer)

    def test_a_parameter_alone_is_trained_as_the_message_says(self):
        """SAC's temperature has a step of its own, and the actor's wrapper trains on."""
        actor, log_alpha = make()[0], nn.Parameter(torch.zeros(1))
        way_out = r"torch\.nn\.ParameterList\(\[log_alpha\]\), Adam\(\[log_alpha\]\)\)"
        with pytest.raises(mk.errors.ConfigError, match=way_out):
            mk.MemoryEfficientTrainingWrapper(actor, ADAM([log_alpha]))
        with pytest.raises(mk.errors.InputTypeError, match=r"got a Parameter; .*ParameterList\(\[tensor\]\)"):
            mk.MemoryEfficientTrainingWrapper(log_alpha, ADAM([log_alpha]))
        trainer = mk.MemoryEfficientTrainingWrapper(nn.ParameterList([log_alpha]), ADAM([log_alpha]))
        assert trainer.train_step(torch.randn(6, 4), lambda _, x: (log_alpha.exp() * (1 - actor(x).detach())).mean())
        assert log_alpha != 0
        assert trainer_of(actor).train_step(torch.randn(6, 4), mean_square).stepped

    @pytest.mark.parametrize(
        "choose",
        [
            lambda model: ADAM([*model.parameters(), nn.Parameter(torch.ones(2))]),  # a superset
            lambda model: ADAM(model[2].parameters()),  # a subset
            lambda model: [ADAM(model.parameters()), ADAM(nn.Linear(2, 2).parameters())],  # a criterion's own
            lambda model: [ADAM(model[0].parameters()), ADAM(model[2].parameters())],
            lambda model: torch.optim.Adam([{"params": model[0].weight}, {"params": model[2].bias}]),
        ],
    )
    def test_others_go_on_working(self, choose):
        model = make()[0]
        trainer = mk.MemoryEfficientTrainingWrapper(model, choose(model))
        assert trainer.train_step(torch.randn(6, 4), mean_square).stepped

    def test_lazy_parameters(self):
        model = nn.Sequential(nn.LazyLinear(3))
        trainer = trainer_of(model)
        model(torch.ones(1, 4))
        assert trainer.train_step(torch.randn(6, 4), mean_square).stepped

    def test_adapters_over_a_frozen_model(self):
        """As with LoRA: the adapter's parameters are the only ones that train."""
        model = make()[0].requires_grad_(False)
        model.append(nn.Linear(2, 2))
        trainer = mk.MemoryEfficientTrainingWrapper(model, ADAM(p for p in model.parameters() if p.requires_grad))
        assert trainer.train_step(torch.randn(6, 4), mean_square).stepped

    def test_a_prompt_through_a_frozen_model(self):
        model = make()[0]
        prompt = nn.Parameter(torch.zeros(4))
        with pytest.raises(mk.errors.ConfigError, match=r"model\.requires_grad_\(False\) first"):
            mk.MemoryEfficientTrainingWrapper(model, ADAM([prompt]))
        trainer = mk.MemoryEfficientTrainingWrapper(model.requires_grad_(False), ADAM([prompt]))
        assert trainer.train_step(torch.randn(6, 4), lambda model, x: model(x + prompt).square().mean()).stepped

    def test_a_compiled_model(self):
        model = make()[0]
        optimizer = ADAM(model.parameters())
        trainer = mk.MemoryEfficientTrainingWrapper(torch.compile(model), optimizer)
        assert trainer.parts()["optimizer"] is optimizer


class TestIdleSteps:
    def test_a_loss_of_another_model_is_warned_of(self):
        _, trainer = make()
        other = make()[0]
        with pytest.warns(mk.MemkitWarning, match="nothing was trained"):
            assert not trainer.train_step(torch.randn(6, 4), lambda model, x: other(x).square().mean()).stepped

    def test_adapters_added_after_the_optimizer(self):
        model = make()[0]
        optimizer = ADAM(model.parameters())
        model.requires_grad_(False).append(nn.Linear(2, 2))
        trainer = mk.MemoryEfficientTrainingWrapper(model, optimizer)
        with pytest.warns(mk.MemkitWarning, match=r"all frozen \(requires_grad=False\)"):
            trainer.train_step(torch.randn(6, 4), mean_square)

    def test_weightless_group_does_not_warn(self):
        _, trainer = make()
        assert not trainer.train_step(
            torch.randn(6, 4), lambda model, x: mk.Loss(sum=model(x).sum() * 0, count=0)
        ).stepped


class TestAfterClose:
    def test_rejects_step_before_running(self):
        _, trainer = make()
        trainer.close()
        with pytest.raises(mk.errors.StateError, match=r"trainer\.train_step: got a call after close\(\)"):
            trainer.train_step(torch.randn(6, 4), lambda model, x: pytest.fail("must not run"))
        with pytest.raises(mk.errors.StateError, match=r"trainer\.microbatches: got a call after close\(\)"):
            next(trainer.microbatches(torch.randn(6, 4)))

    def test_state_and_evaluation_stay(self):
        _, trainer = make()
        trainer.train_step(torch.randn(6, 4), mean_square)
        trainer.close()
        assert trainer.state_dict()["accumulator"]["num_steps"] == 1
        with trainer.evaluation() as evaluate:
            evaluate(torch.randn(6, 4), lambda model, x: {"loss": model(x).square().mean(1)})

    def test_an_accumulator(self):
        model = make()[0]
        with mk.GradientAccumulator(ADAM(model.parameters())) as accumulator:
            pass
        with pytest.raises(mk.errors.StateError, match=r"GradientAccumulator: got a call after close\(\)"):
            accumulator.backward(mean_square(model, torch.randn(6, 4)))


def test_float16_on_a_cpu_is_warned_of():
    with pytest.warns(mk.MemkitWarning, match=r"precision='fp16-mixed' on a CPU.*Use precision=None"):
        make(precision="fp16-mixed")


def test_an_optimizer_that_differentiates_the_gradients_is_refused_with_a_way_out_that_works():
    class AdaHessian(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})

        def step(self, closure=None):
            params = self.param_groups[0]["params"]
            grads = [each.grad for each in params]
            if any(each.grad_fn is None for each in grads):
                raise RuntimeError("Gradient tensor has no grad_fn: make sure that create_graph is set to True")
            traces = torch.autograd.grad(grads, params, [torch.ones_like(each) for each in params])
            for each, trace in zip(params, traces, strict=True):
                each.data -= 0.1 * each.grad.detach() / (trace.abs() + 1)

    def make():
        torch.manual_seed(0)
        blocks = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(2)]
        model = torch.nn.Sequential(*blocks, torch.nn.Linear(4, 1)).double()
        return model, AdaHessian(model.parameters())

    def step_by_hand(model, optimizer):
        grads = torch.autograd.grad(model(x).square().mean(), list(model.parameters()), create_graph=True)
        for each, grad in zip(model.parameters(), grads, strict=True):  # as backward(create_graph=True), which warns
            each.grad = grad
        optimizer.step()
        return [each.detach().clone() for each in model.parameters()]

    x = torch.randn(6, 4, dtype=torch.float64)
    expected = step_by_hand(*make())
    model, optimizer = make()
    with (
        mk.MemoryEfficientTrainingWrapper(model, optimizer, on_oom="raise") as trainer,
        pytest.raises(mk.errors.ConfigError, match=r"AdaHessian.*backward\(create_graph=True\).*mk.Checkpointing"),
    ):
        trainer.train_step(x, lambda model, x: model(x).square().mean())
    optimizer.zero_grad()
    with mk.Checkpointing(model, {"0": "full", "1": "full"}):
        torch.testing.assert_close(step_by_hand(model, optimizer), expected)


class Membrane(nn.Module):
    """A spiking neuron: its potential goes from call to call, with its graph, until somebody resets it."""

    potential = 0.0

    def forward(self, x):
        self.potential = self.potential + (x - self.potential) / 2
        return torch.sigmoid(self.potential - 1)


def test_a_graph_that_is_carried_between_micro_batches_is_named_and_its_way_out_is_exact():
    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), Membrane(), nn.Linear(8, 2)).double()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(model, x):
        return sum(model(x) for _ in range(3)).square().mean()

    def reset_and_loss(model, x):
        model[1].potential = 0.0
        return loss_fn(model, x)

    x = torch.randn(8, 4, dtype=torch.float64)
    plain, optimizer = make()
    loss_fn(plain, x).backward()
    optimizer.step()
    model, optimizer = make()
    trainer = mk.MemoryEfficientTrainingWrapper(model, optimizer, accumulation_steps=2)
    with pytest.raises(mk.errors.StateError, match=r"carries tensors from call to call.*Way out: reset what the model"):
        trainer.train_step(x, loss_fn)
    trainer.train_step(x, reset_and_loss)
    torch.testing.assert_close(model[0].weight, plain[0].weight, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize("which", ["optimizer.step", "scheduler.step", "average.update_parameters", "another's step"])
@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")
@pytest.mark.filterwarnings("ignore:.*but not what forward writes to Adam.param_groups")  # the learning rate
def test_a_step_that_a_loop_has_left_in_the_loss_function_is_refused(which, num_parts):
    model, other = nn.Linear(4, 1), nn.Linear(4, 1)
    optimizer, others = ADAM(model.parameters()), ADAM(other.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    average = torch.optim.swa_utils.AveragedModel(model)
    step = {
        "optimizer.step": optimizer.step,
        "scheduler.step": scheduler.step,
        "average.update_parameters": lambda: average.update_parameters(model),
        "another's step": others.step,
    }[which]

    def loss_fn(model, x):
        loss = mean_square(model, x)
        if is_left:
            step()
        return loss

    trainer = mk.MemoryEfficientTrainingWrapper(
        model, optimizer, accumulation_steps=num_parts, scheduler=scheduler, average=average
    )
    before, is_left = copy.deepcopy(model.state_dict()), True
    if which == "another's step":
        assert trainer.train_step(torch.randn(8, 4), loss_fn).stepped
        return
    with pytest.raises(mk.errors.StateError, match=rf"{which}\(.*\) inside loss_fn.*remove {which}"):
        trainer.train_step(torch.randn(8, 4), loss_fn)
    assert_same(dict(model.state_dict()), before)
    is_left = False
    assert trainer.train_step(torch.randn(8, 4), loss_fn).stepped
