"""accelerate's prepared objects: handed to memkit as they are, in a script as its users write them."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState

import memkit as mk
from tests.integrations.scripts import num_changed_lines
from tests.train.faults import FailingOperator

PLAIN = """
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

images, classes = load_digits(return_X_y=True)
dataset = TensorDataset(torch.tensor(images[:200] / 16).to(dtype), torch.tensor(classes[:200]))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)).to(dtype)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=8)
loader = DataLoader(dataset, batch_size=30)

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
losses, num_right, num_steps = [], 0, 0
for x, y in loader:
    with accelerator.accumulate(model):
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            num_steps += 1
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    losses.append(accelerator.gather(loss.detach()).mean().item())
model.eval()
for x, y in loader:
    with torch.no_grad():
        predicted, references = accelerator.gather_for_metrics((model(x).argmax(-1), y))
    num_right += int((predicted == references).sum())
result = {"losses": losses, "lr": scheduler.get_last_lr(), "num_right": num_right, "num_steps": num_steps}
"""
# accelerate owns the step: accumulation, clipping, schedule and precision stay its own.
SPLIT = (
    PLAIN.replace("import torch\nimport", "import memkit as mk\nimport torch\nimport", 1)
    .replace("losses, num", "split = mk.SplitLoss(model, num_microbatches=3)\nlosses, num")
    .replace(
        "F.cross_entropy(model(x), y)\n",
        "split((x, y), lambda model, micro: F.cross_entropy(model(micro[0]), micro[1]))\n",
    )
)
# memkit owns it: for this comparison a batch is a step in both.
WHOLE = PLAIN.replace("gradient_accumulation_steps=2", "gradient_accumulation_steps=1")
WRAPPED = (
    WHOLE.replace("import torch\nimport", "import memkit as mk\nimport torch\nimport", 1)
    .replace(
        "losses, num",
        "trainer = mk.MemoryEfficientTrainingWrapper(\n"
        "    model, optimizer, scheduler=scheduler, max_grad_norm=0.5, accumulation_steps=3)\nlosses, num",
    )
    .replace(
        WHOLE[WHOLE.index("    with accelerator.accumulate") : WHOLE.index("    losses.append")],
        "    step = trainer.train_step((x, y), lambda model, micro: F.cross_entropy(model(micro[0]), micro[1]))\n"
        "    loss, num_steps = step.loss, num_steps + step.stepped\n",
    )
)


@pytest.fixture(autouse=True)
def fresh_state():
    AcceleratorState._reset_state(reset_partial_state=True)  # accelerate keeps its settings for the whole process
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def run(script, dtype=torch.float64):
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    names = {"dtype": dtype}
    exec(compile(script, "script", "exec"), names)
    return names


def assert_same_training(got, want, tolerance=1e-12):
    torch.testing.assert_close(got["result"], want["result"], rtol=tolerance, atol=0)
    got, want = (dict(names["model"].named_parameters()) for names in (got, want))
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("plain", "ours"), [(PLAIN, SPLIT), (WHOLE, WRAPPED)])
def test_few_lines_change(plain, ours):
    added, removed = num_changed_lines(plain, ours)
    assert added <= 6
    assert removed <= 10


@pytest.mark.parametrize(("plain", "ours"), [(PLAIN, SPLIT), (WHOLE, WRAPPED)])
def test_the_script_trains_as_without_memkit(plain, ours):
    """Seven batches, the last of 20 rows; with accumulation the last group is short."""
    got, want = run(ours), run(plain)
    assert got["result"]["num_steps"] == (4 if plain is PLAIN else 7)
    assert_same_training(got, want)


@pytest.mark.parametrize(("plain", "ours"), [(PLAIN, SPLIT), (WHOLE, WRAPPED)])
def test_out_of_memory_changes_nothing(plain, ours, monkeypatch):
    owner, name = (mk.SplitLoss, "__call__") if plain is PLAIN else (mk.MemoryEfficientTrainingWrapper, "train_step")
    inner, want = getattr(owner, name), run(plain)

    def failing(*places):
        fault = FailingOperator(*places)

        def call(*args, **kwargs):
            with fault:
                return inner(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)
        return fault

    fault = failing()
    run(ours)
    for place in range(9, fault.num_operators, fault.num_operators // 3):
        fault = failing(place)
        assert_same_training(run(ours), want)
        assert fault.num_failures == 1


def test_keeps_autocast_installed_by_prepare():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(torch.nn.Linear(4, 4))
    dtypes = []
    model.register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
    torch.manual_seed(0)
    x = torch.randn(6, 4)

    def loss_fn(model, x):
        return model(x).square().mean()

    split = mk.SplitLoss(model, num_microbatches=2, probe=False)
    accelerator.backward(split(x, loss_fn))
    got = model.weight.grad
    model.zero_grad()
    accelerator.backward(loss_fn(model, x))
    assert set(dtypes) == {torch.float32}  # accelerate's forward computes in bfloat16 and answers in float32
    assert not torch.equal(model(x), torch.nn.functional.linear(x, model.weight, model.bias))
    torch.testing.assert_close(got, model.weight.grad, rtol=1e-2, atol=1e-3)


def test_two_owners_of_scaling_or_accumulation_are_refused():
    model, accelerator = torch.nn.Linear(2, 2), Accelerator(cpu=True, gradient_accumulation_steps=2)
    scaled = AcceleratedOptimizer(torch.optim.SGD(model.parameters()), scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(
        mk.errors.ConfigError, match=r"AcceleratedOptimizer.*a loss scaler of its own.*precision='fp16-mixed'"
    ):
        mk.MemoryEfficientTrainingWrapper(model, scaled)
    prepared = accelerator.prepare(torch.optim.SGD(model.parameters()))
    with pytest.raises(
        mk.errors.ConfigError, match=r"gradient_accumulation_steps=1.*SplitLoss and accelerator.backward"
    ):
        mk.MemoryEfficientTrainingWrapper(model, prepared)
