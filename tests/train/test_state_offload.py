"""Offloaded optimizer state: bit-identical steps, no memory of the process, state that is lent and returned."""

import copy

import pytest
import torch
from torch import nn

import memkit as mk
from memkit.train import chunked_steps, parameterwise
from memkit.train.state_offload import offload_state
from tests.allocations import trace_allocations
from tests.helpers import assert_same
from tests.toys import mean_square
from tests.train.faults import FailingOperator
from tests.train.test_chunked_steps import MUST, bits, everything, give_gradients, guarded, make, train


@pytest.mark.parametrize("lent", [False, True])
@pytest.mark.parametrize("kind", ["adafactor", "muon", "nadam", "nesterov", "rprop", *MUST])
def test_steps_are_bit_identical(kind, lent, monkeypatch):
    """``lent``: as on an accelerator, whose state comes to it and goes back for each chunk, also for slices."""
    if lent:
        monkeypatch.setattr(parameterwise, "_is_on_other_device", lambda value, parameter: value.dim() > 0)
        monkeypatch.setattr(chunked_steps, "_SMALLEST_CHUNK_BYTES", 2048)
    expected = everything(*train(kind, foreach=True))
    parameters, optimizer, generator = make(kind, foreach=True)
    with offload_state(optimizer):
        for number in range(5):
            give_gradients(parameters, generator, number)
            homes = [value for state in optimizer.state.values() for value in state.values()]
            optimizer.step()
            assert all(map(lambda a, b: a is b, homes, [v for s in optimizer.state.values() for v in s.values()]))
    assert_same(everything(parameters, optimizer), expected)


@pytest.mark.parametrize("kind", MUST)
def test_faults_leave_lent_state_whole(kind, monkeypatch):
    monkeypatch.setattr(parameterwise, "_is_on_other_device", lambda value, parameter: value.dim() > 0)
    expected = everything(*train(kind, foreach=True, num_steps=1))
    for place in range(2, 120, 23):
        parameters, optimizer, generator = make(kind, foreach=True)
        give_gradients(parameters, generator, 0)
        parameterwise.materialize_state(optimizer)
        with FailingOperator(place):
            guarded(optimizer)
        assert_same(everything(parameters, optimizer), expected)


def test_the_state_takes_no_memory_of_the_process_and_comes_back():
    model = nn.Linear(1000, 1000)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1000)).sum().backward()
    contexts = []

    def enter():
        contexts.append(offload_state(optimizer))
        contexts[0].__enter__()

    assert trace_allocations(enter).live[-1] < 1000  # counters
    optimizer.step()
    with torch.no_grad():
        values = [value.clone() for state in optimizer.state.values() for value in state.values()]
    assert trace_allocations(lambda: contexts[0].__exit__(None, None, None)).live[-1] >= 8 * 1000 * 1000
    found = [value for state in optimizer.state.values() for value in state.values()]
    assert_same(bits(found), bits(values))


@pytest.mark.parametrize("shapes", [[(0,)], [(3, 0)], [(3, 0), (5,)], [(5,), (0, 3)]])
def test_the_state_of_empty_parameters_is_moved_too(shapes):
    parameters = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = torch.optim.Adam(parameters, lr=0.5)
    with offload_state(optimizer):
        for each in parameters:
            each.grad = torch.ones_like(each)
        optimizer.step()
    assert [optimizer.state[each]["exp_avg"].shape for each in parameters] == [torch.Size(each) for each in shapes]
    assert_same([each.detach() for each in parameters], [torch.full(shape, 0.5) for shape in shapes], 1e-6)


def test_a_loaded_state_is_moved_out_again():
    parameters, optimizer, generator = make("adamw", foreach=False)
    with offload_state(optimizer):
        give_gradients(parameters, generator, 0)
        optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        before = [value.clone() for value in everything(parameters, optimizer)[len(parameters) :]]
        optimizer.step()
        assert trace_allocations(lambda: optimizer.load_state_dict(saved)).live[-1] < 1000
        assert_same(everything(parameters, optimizer)[len(parameters) :], before)


def test_wrapper_offloads_state_on_request():
    x, results = torch.randn(8, 16), []
    for offload in ((), ("optimizer", "activations")):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        with mk.MemoryEfficientTrainingWrapper(model, optimizer, offload=offload) as trainer:
            for _ in range(3):
                trainer.train_step(x, mean_square)
        results.append(everything(list(model.parameters()), optimizer))
    assert_same(results[0], results[1])


def test_the_way_out_for_an_unknown_optimizer_works_before_and_after_its_first_step():
    class Lion(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                momentum = self.state[p].setdefault("m", torch.zeros_like(p))
                p.sub_(0.1 * torch.sign(0.9 * momentum + 0.1 * p.grad))
                momentum.mul_(0.99).add_(p.grad, alpha=0.01)

    parameters = [nn.Parameter(torch.ones(2))]
    optimizer = Lion(parameters)
    for _ in range(2):
        with pytest.raises(mk.errors.ConfigError, match="leave 'optimizer' out of offload="), offload_state(optimizer):
            pass
        with pytest.raises(mk.errors.ConfigError, match="omit this call"):
            parameterwise.materialize_state(optimizer)
        parameters[0].square().sum().backward()
        optimizer.step()


def test_unknown_optimizers_are_refused_by_name():
    parameters = [nn.Parameter(torch.ones(2))]
    with pytest.raises(mk.errors.ConfigError, match="LBFGS"), offload_state(torch.optim.LBFGS(parameters)):
        pass
