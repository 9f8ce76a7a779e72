"""A model that checkpoints itself and is treated as well: the warning comes only where a forward runs three times."""

import functools
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memkit as mk
from tests.helpers import Noted, assert_same
from tests.toys import mean_square, trainer_of

AS_PLAIN = ("inside, reentrant", "all inside", "all inside, by keyword", "around all")
RUNS = Noted()  # of parts of blocks; a repeated forward has no side effects


class Block(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.enter, self.leave, self.how = nn.Linear(4, 4), nn.Linear(4, 4), how

    def part(self, x):
        RUNS.append(self)
        return self.leave(self.enter(x).relu())

    def forward(self, x):
        inside = INSIDE.get(self.how)
        return x + self.part(x) if inside is None else inside(self, x)


def with_own_hooks(block, x):
    with torch.autograd.graph.save_on_cpu():
        y = block.part(x)
    return y.exp()


def twice(block, x):
    x = x + checkpoint(block.part, x, use_reentrant=False)
    return x + checkpoint(block.part, x, use_reentrant=False)


INSIDE = {
    "inside": lambda block, x: checkpoint(block.part, x, use_reentrant=False).exp(),
    "inside, by keyword": lambda block, x: checkpoint(block.part, x=x, use_reentrant=False).exp(),
    "inside, by a variable around it": lambda block, x: checkpoint(lambda: block.part(x), use_reentrant=False).exp(),
    "inside, by partial": lambda block, x: checkpoint(functools.partial(block.part, x), use_reentrant=False).exp(),
    "inside, twice": twice,
    "inside, reentrant": lambda block, x: x + checkpoint(block.part, x, use_reentrant=True),
    "inside, reentrant, by a variable around it": lambda block, x: checkpoint(
        lambda _: block.part(x), torch.ones(1, requires_grad=True), use_reentrant=True
    ).exp(),
    "inside, hooks of its own": with_own_hooks,  # which are no checkpoint
    # torch ends the block's repetition before the part's
    "all inside": lambda block, x: x + checkpoint(block.part, x, use_reentrant=False),
    # the block saves nothing, and is not repeated
    "all inside, by keyword": lambda block, x: x + checkpoint(block.part, x=x, use_reentrant=False),
}


class Net(nn.Module):
    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.how = nn.ModuleList(Block(how) for _ in range(3)), how

    def trunk(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x):
        match self.how:
            case "around all":
                return checkpoint(self.trunk, x, use_reentrant=False)
            case "around each":  # as transformers does; torch ends the outer repetition before the block's
                for block in self.blocks:
                    x = checkpoint(block, x, use_reentrant=False)
                return x
            case "around each, reentrant":
                for block in self.blocks:
                    x = checkpoint(block, x, use_reentrant=True)
                return x
        return self.trunk(x)


class Again(torch.autograd.Function):
    """A forward inside of a backward that is no repetition."""

    @staticmethod
    def forward(ctx, x, model):
        ctx.model = model
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            ctx.model(torch.ones(2, 4, requires_grad=True)).sum().backward()
        return gradient, None


def runs_of(how, treatment):
    """Forward and backward, twice; the most runs of a part, the gradients, and what was warned of."""
    model = Net(how)
    with warnings.catch_warnings(record=True) as caught, mk.Checkpointing(model, {"blocks.*": treatment}):
        warnings.simplefilter("always")
        for _ in range(2):
            RUNS.take()
            model(torch.linspace(-1, 1, 8).view(2, 4).requires_grad_()).sum().backward()
    runs = RUNS.take()
    most = max(runs.count(block) for block in model.blocks)
    return most, [each.grad for each in model.parameters()], [str(each.message) for each in caught]


@pytest.mark.parametrize("treatment", ["full", "selective"])
@pytest.mark.parametrize(
    ("how", "num_runs"),
    [
        ("plain", 2),
        ("inside", 3),
        ("inside, by keyword", 3),
        ("inside, by a variable around it", 3),
        ("inside, by partial", 3),
        ("inside, reentrant, by a variable around it", 3),
        ("inside, hooks of its own", 2),
        ("all inside, by keyword", 2),
        ("inside, twice", 5),  # two parts: the second of the block is run twice, the first three times
        ("inside, reentrant", 3),
        ("all inside", 2),
        ("around all", 3),
        ("around each", 2),
        ("around each, reentrant", 3),
    ],
)
def test_warns_once_of_third_run(how, num_runs, treatment):
    found, gradients, told = runs_of(how, treatment)
    assert found == num_runs
    assert len(told) == (num_runs > 2)
    assert all("runs three times" in each and each.endswith("or leave Checkpointing(model) out.") for each in told)
    assert_same(gradients, runs_of("plain" if how in AS_PLAIN else how, "offload")[1])


@pytest.mark.parametrize("how", ["inside", "around each, reentrant"])
def test_offloaded_blocks_run_twice_without_warning(how):
    found, _, told = runs_of(how, "offload")
    assert (found, told) == (2, [])


def test_a_forward_in_a_backward_is_not_a_repetition(recwarn):
    model = Net("plain")
    with mk.Checkpointing(model):
        Again.apply(torch.ones(2, 4, requires_grad=True), model).sum().backward()
    assert not recwarn.list


@pytest.mark.parametrize(
    ("method", "ending"),
    [
        ("gradient_checkpointing_disable", "write model.gradient_checkpointing_disable(); or pass checkpoint=None."),
        ("set_grad_checkpointing", "write model.set_grad_checkpointing(False); or pass checkpoint=None."),
        ("other", "or pass its use_checkpoint=False; or pass checkpoint=None."),
    ],
)
def test_the_way_out_is_the_models_own(method, ending):
    model = Net("inside")
    setattr(model, method, lambda: None)
    trainer = trainer_of(model, checkpoint="auto")
    with pytest.warns(mk.MemkitWarning, match=r"checkpoint='auto': the forward of the block 'blocks\.\d'") as caught:
        trainer.train_step(torch.ones(2, 4), mean_square)
    trainer.train_step(torch.ones(2, 4), mean_square)  # which would fail with another warning
    assert len(caught) == 1
    assert str(caught[0].message).endswith(ending)
    assert caught[0].filename == __file__
