"""Predictions called in other libraries' words, or with parts swapped: the way out is the right call."""

import dataclasses
import logging

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import memkit as mk

MODEL = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
OPTIMIZER = torch.optim.AdamW(MODEL.parameters())
X = torch.randn(8, 4)
BATCH = (X,)


def loss_fn(model, batch):
    return model(batch[0]).square().mean()


def estimate(*args, **kwargs):
    return mk.estimate_memory_usage(*args, **kwargs)


def plan(*args, **kwargs):
    return mk.plan_training(*args, **kwargs)


def prepare(*args, **kwargs):
    return mk.prepare(*args, **kwargs)


def advise(*args, **kwargs):
    return mk.advise(*args, **kwargs)


class Trainer:
    """Like Hugging Face's: it has a model, but is not one."""

    def __init__(self):
        self.model = MODEL


TABLE = [
    # words of other libraries
    (lambda: estimate(MODEL, BATCH, loss_fn=loss_fn, gpu="T4"), "InputTypeError", "loss_fn=loss_fn, target='T4')"),
    (
        lambda: estimate(MODEL, BATCH, loss_fn, budget="24GiB"),
        "InputTypeError",
        "estimate.fits('24GiB'); write estimate_memory_usage(model, sample_batch, loss_fn)",
    ),
    (lambda: estimate(MODEL, input_size=(8, 4)), "InputTypeError", "sample_batch=torch.empty(shape))"),
    (
        lambda: estimate(MODEL, BATCH, loss_fn, mixed_precision="bf16-mixed"),
        "InputTypeError",
        "loss_fn, precision='bf16-mixed')",
    ),
    (
        lambda: estimate(MODEL, BATCH, loss_fn, gradient_accumulation_steps=4),
        "InputTypeError",
        "loss_fn, accumulation_steps=4)",
    ),
    (
        lambda: estimate(MODEL, BATCH, loss_fn, zero_stage=2),
        "InputTypeError",
        "Shard('fsdp2', ranks=2))",
    ),
    (lambda: estimate(MODEL, BATCH, loss_fn, batch_size=64), "InputTypeError", "(model, sample_batch, loss_fn)"),
    (lambda: estimate(MODEL, BATCH), "InputTypeError", "criterion(model(batch[0]), batch[1]))."),
    (
        lambda: estimate(MODEL, BATCH, loss_fn, precision="fp32"),
        "ConfigError",
        "to convert a model to float32 call model.float().",
    ),
    (lambda: estimate(MODEL, BATCH, loss_fn, precision="bf16"), "ConfigError", "a model that is in bf16 itself."),
    (lambda: estimate(MODEL, BATCH, loss_fn, precision="fp16"), "ConfigError", "a CPU has no fp16 autocast here."),
    (lambda: plan(MODEL, BATCH, loss_fn), "ConfigError", "or budget='RTX 4090' for all memory of a GPU."),
    (lambda: plan(MODEL, BATCH, loss_fn, memory="24GiB"), "InputTypeError", "loss_fn, budget='24GiB')"),
    (lambda: plan(MODEL, BATCH, loss_fn, budget=24), "InputError", "write '24GiB', or '24B' if bytes are meant."),
    (
        lambda: plan(MODEL, BATCH, loss_fn, budget="T4", precision="bf16-mixed"),
        "InputTypeError",
        "budget='T4', precisions=(None, 'bf16-mixed'))",
    ),
    (lambda: plan(MODEL, BATCH, loss_fn, budget="T4", precisions="bf16"), "ConfigError", "precisions=('bf16-mixed',)."),
    (lambda: plan(MODEL, BATCH, loss_fn, budget="T4", target="T4"), "ConfigError", "a size such as budget='20GiB'."),
    (lambda: plan(MODEL, BATCH, loss_fn, budget="T4").batch_size, "AbsentError", "write plan.micro_batch_size"),
    (lambda: plan(MODEL, BATCH, loss_fn, budget="T4").plot(), "AbsentError", "write plan.pareto.plot()"),
    (
        lambda: prepare(MODEL, OPTIMIZER, BATCH, loss_fn, memory="24GB"),
        "InputTypeError",
        "write prepare(model, optimizer, sample_batch, loss_fn, budget='24GB')",
    ),
    (lambda: advise(MODEL, BATCH), "InputTypeError", "write advise(model, sample_batch, loss_fn)"),
    (lambda: advise(MODEL, BATCH, loss_fn, gpu="T4"), "InputTypeError", "loss_fn, target='T4')"),
    (lambda: advise(MODEL, BATCH, loss_fn, precision="fp16"), "ConfigError", "write precision='bf16-mixed'."),
    (lambda: mk.VirtualGPU("T4", memory="12GB"), "InputTypeError", "name a smaller card; write VirtualGPU('T4')"),
    (lambda: mk.VirtualGPU(target="T4"), "InputTypeError", "write VirtualGPU(gpu='T4')"),
    (lambda: mk.VirtualGPU("T4").max_memory_allocated(), "AbsentError", "write gpu.peak_bytes"),
    # parts swapped, or of another kind
    (
        lambda: estimate(OPTIMIZER, MODEL, loss_fn),
        "InputTypeError",
        "estimate_memory_usage(model, sample_batch, ...).",
    ),
    (lambda: estimate(Trainer(), BATCH, loss_fn), "InputTypeError", "write estimate_memory_usage(trainer.model, ...)."),
    (
        lambda: plan(Trainer(), BATCH, loss_fn, budget="T4"),
        "InputTypeError",
        "plan_training(trainer.model, ...).",
    ),
    (lambda: advise(Trainer(), BATCH, loss_fn), "InputTypeError", "write advise(trainer.model, ...)."),
    (lambda: estimate(nn.Linear, BATCH, loss_fn), "InputTypeError", "and estimate_memory_usage(model, ...)."),
    (
        lambda: estimate(MODEL.state_dict(), BATCH, loss_fn),
        "InputTypeError",
        "write estimate_memory_usage(model, ...).",
    ),
    (lambda: estimate([MODEL], BATCH, loss_fn), "InputTypeError", "(torch.nn.ModuleList(models), ...)."),
    (
        lambda: estimate(MODEL, DataLoader(TensorDataset(X)), loss_fn),
        "InputTypeError",
        "write estimate_memory_usage(model, next(iter(loader)), loss_fn, ...).",
    ),
    (
        lambda: prepare(OPTIMIZER, MODEL, BATCH, loss_fn, budget="T4"),
        "InputTypeError",
        "write prepare(model, optimizer, sample_batch, loss_fn, ...).",
    ),
    (lambda: estimate(MODEL, (8, 4), loss_fn), "InputTypeError", "on the meta device it takes no memory."),
    (lambda: estimate(MODEL, BATCH, loss_fn, shard=2), "ConfigError", "shard=mk.predict.Shard('fsdp2', 8)."),
    (lambda: mk.predict.Shard(2), "InputTypeError", "write Shard('fsdp2', ranks=2)"),
    (lambda: mk.predict.Shard("ddp", world_size=2), "InputTypeError", "write Shard('ddp', ranks=2)"),
    # cards
    (lambda: estimate(MODEL, BATCH, loss_fn, target=24), "InputTypeError", "plan_training(..., budget='24GiB')."),
    (lambda: estimate(MODEL, BATCH, loss_fn, target="24GB"), "InputError", "plan_training(..., budget='24GB')."),
    (lambda: mk.VirtualGPU(24), "InputTypeError", "plan_training(..., budget='24GiB')."),
    (lambda: mk.find_gpu("A100"), "InputError", "write for example 'A100 40GB'."),
    (lambda: mk.find_gpu("GTX 970"), "InputError", "estimate.fits('8GiB') says whether a size is enough."),
    (lambda: estimate(MODEL, BATCH, loss_fn, target="RX 7900 XTX"), "ConfigError", "such as 'L4'."),
    # figures
    (lambda: estimate(MODEL, BATCH, loss_fn).total_gb, "AbsentError", "write estimate.total_bytes"),
    (lambda: estimate(MODEL, BATCH, loss_fn).peak, "AbsentError", "write estimate.peak_bytes"),
    (lambda: estimate(MODEL, BATCH, loss_fn).fits(), "InputTypeError", "write fits(capacity)"),
    (lambda: estimate(MODEL, BATCH, loss_fn).fits(gpu="T4"), "InputTypeError", "write fits(capacity='T4')"),
    (lambda: estimate(MODEL, BATCH, loss_fn).fits(24), "InputError", "write '24GiB', or '24B' if bytes are meant."),
    # presets
    (lambda: mk.get_preset_config(24, "medium"), "ConfigError", "write get_preset_config('medium', 24)."),
    (lambda: mk.get_preset_config("medium", "24GB"), "ConfigError", "write gpu_memory_gb=24."),
    (lambda: mk.get_preset_config(), "InputTypeError", "write get_preset_config(name)"),
    (
        lambda: mk.get_preset_config("medium", accumulation_steps=8),
        "ConfigError",
        "gradient_accumulation_steps=8.",
    ),
    (lambda: mk.get_preset_config("medium", precision="fp16"), "ConfigError", "write precision='fp16-mixed'."),
    (lambda: mk.get_preset_config("medium", bf16=True), "ConfigError", "write precision='bf16-mixed'."),
    (lambda: mk.get_preset_config("medium", batch_size=0), "ConfigError", "write batch_size=1."),
    (lambda: mk.get_preset_config("medium", resolution=100), "ConfigError", "write resolution=96."),
    (lambda: mk.get_preset_config("medium", checkpointing="yes"), "ConfigError", "write checkpointing=True."),
    (lambda: mk.MemoryTestConfig(min_edges=1000, max_edges=10), "ConfigError", "write max_edges=1000."),
    (lambda: mk.MemoryTestConfig(device="gpu"), "ConfigError", "write device='cuda'."),
    (lambda: mk.MemoryTestConfig(mlp=128), "ConfigError", "write mlp=(128,)."),
    (lambda: mk.MemoryTestConfig(num_points=5), "ConfigError", "write num_test_points=5."),
    # forms of the arguments
    (
        lambda: estimate(MODEL, BATCH, loss_fn="mse"),
        "InputTypeError",
        "lambda model, batch: criterion(model(batch[0]), batch[1])",
    ),
    (
        lambda: estimate(MODEL, BATCH, loss_fn=loss_fn, shard="fsdp"),
        "ConfigError",
        "write shard=mk.predict.Shard('fsdp2', 8).",
    ),
    (lambda: estimate(MODEL, BATCH, loss_fn=loss_fn)["peak_bytes"], "InputTypeError", "write estimate.as_dict()"),
    (lambda: float(estimate(MODEL, BATCH, loss_fn=loss_fn)), "InputTypeError", "estimate.peak_bytes / 2**30 in GiB"),
    (lambda: mk.predict.Shard("fsdp", ranks=4), "ConfigError", "write Shard('fsdp2', ranks=4)."),
    (
        lambda: mk.predict.Shard("ddp", ranks=2, units=["a"]),
        "ConfigError",
        "write Shard('fsdp2', ranks=2, units=('a',)).",
    ),
    (lambda: mk.print_config_summary(), "InputTypeError", "write print_config_summary(get_preset_config('medium'))"),
    (
        lambda: mk.predict.profile_scaling(lambda n: None, sizes=5),
        "ConfigError",
        "sizes=[1000, 10_000], modes=('train',).",
    ),
    (lambda: mk.predict.profile_scaling(lambda: None, sizes=[1, 2]), "InputTypeError", "write `def build_step(n):`."),
    (
        lambda: mk.predict.profile_scaling(lambda n: None, sizes=[1], modes="train"),
        "ConfigError",
        "sizes=[1000, 10_000], modes=('train',).",
    ),
    (
        lambda: mk.predict.find_worst_batch([BATCH], loss_fn, MODEL),
        "InputTypeError",
        "write find_worst_batch(loader, model, loss_fn).",
    ),
    (lambda: mk.predict.TrainingConfig(use_amp=True), "ConfigError", "write precision='bf16-mixed'."),
    (
        lambda: mk.predict.TrainingConfig(accumulate_grad_batches=4),
        "ConfigError",
        "write gradient_accumulation_steps=4.",
    ),
    (lambda: estimate(MODEL, BATCH, loss_fn, optimizer=lambda ps: None), "InputTypeError", "[first, second]."),
    (lambda: advise(MODEL, BATCH, loss_fn, optimizer=lambda ps: None), "InputTypeError", "[first, second]."),
    (lambda: mk.find_gpu("RTX 4090", calibrated=1), "InputTypeError", "pass calibrated='path/to/it'."),
    (lambda: mk.predict.all_gpus(1), "InputTypeError", "pass calibrated='path/to/it'."),
    (lambda: mk.predict.AllocatorSettings.parse(None), "InputTypeError", "parse('expandable_segments:True')."),
    # values that stand for nothing
    (lambda: plan(MODEL, BATCH, loss_fn, budget="1GiB", target=""), "InputError", "says whether a size is enough."),
    (lambda: plan(MODEL, BATCH, loss_fn, budget="1GiB", target=0), "InputTypeError", "budget='0GiB')."),
    (lambda: plan(MODEL, BATCH, loss_fn, budget="1GiB", target=[]), "InputTypeError", "for the GPU of this machine."),
    (lambda: advise(MODEL, BATCH, loss_fn, split_fn="rows"), "InputTypeError", "not its result split_fn()."),
    (lambda: advise(MODEL, BATCH, loss_fn, fewer_edges="half"), "InputTypeError", "not its result fewer_edges()."),
    (lambda: mk.predict.profile_scaling(loss_fn, b"x"), "ConfigError", "[1000, 10_000], modes=('train',)."),
    (lambda: mk.predict.profile_scaling(None, [1, 2]), "InputTypeError", "not its result build_step()."),
    (lambda: mk.recipes.run_memory_test(analysis="all"), "ConfigError", "pass analysis='full'."),
    (lambda: mk.recipes.run_memory_test(gpus="RTX 4090"), "ConfigError", "pass gpus=['RTX 4090']."),
]


@pytest.mark.parametrize(("call", "kind", "end"), TABLE, ids=range(len(TABLE)))
def test_the_way_out_is_the_right_call(call, kind, end):
    with pytest.raises(mk.MemkitError) as caught:
        call()
    assert type(caught.value).__name__ == kind
    assert str(caught.value).endswith(end)


def test_a_card_of_another_maker_is_not_suggested():
    with pytest.raises(mk.errors.InputError) as caught:
        mk.find_gpu("GTX 970")
    assert "RX" not in caught.value.expected
    assert "GTX 1060" in caught.value.expected


def test_the_budget_may_be_the_target_alone():
    assert plan(MODEL, BATCH, loss_fn, target="T4").budget_bytes == mk.find_gpu("T4").total_bytes


# ---------------------------------------------------------------------------------- the user's code fails


@pytest.mark.parametrize("call", [estimate, lambda *args, target: plan(*args, budget=target), advise])
def test_shape_mismatch_names_the_place_without_logs(call, caplog):
    with caplog.at_level(logging.DEBUG), pytest.raises(RuntimeError, match=r"8.*5") as caught:
        call(MODEL, (torch.randn(8, 5),), loss_fn, target="T4")
    assert not [each for each in caplog.records if each.name.startswith("torch")]
    (note,) = set(caught.value.__notes__)
    assert "module '0', Linear(in_features=4, out_features=16, bias=True), given a tensor of shape (8, 5)" in note
    assert note.endswith("which most likely fails on the same line; if it runs, watch a real step with mk.Tracker().")


@pytest.mark.parametrize("make", [tuple, torch.tensor])
def test_lengths_as_lists_are_not_the_users_fault(make):
    """In C++ torch makes a tensor of them, which has no values here; with tensors the same loss is estimated."""

    def loss_fn(model, batch):
        lengths = make([8, 8, 5, 6]), make([3, 2, 3, 1])
        return torch.ctc_loss(model(batch[0]).log_softmax(-1), batch[1], *lengths, 0, 1)  # the mean

    model, batch = nn.Linear(4, 10), (torch.ones(8, 4, 4), torch.ones(4, 3, dtype=torch.long))
    if make is torch.tensor:
        assert estimate(model, batch, loss_fn, target="cpu").peak_bytes > 0
        return
    with pytest.raises(RuntimeError, match="not allocated yet") as caught:
        estimate(model, batch, loss_fn, target="cpu")
    (note,) = set(caught.value.__notes__)
    assert "fails on the same line" not in note
    assert "pass numbers as tensors instead of lists" in note


def test_a_loop_that_a_guessed_number_ended_is_not_said_to_be_detached():
    """As in a solver with fixed steps: their number is read from a tensor of times."""

    def integrated(model, batch):
        y, times = batch
        num_steps = int(torch.ceil((times[-1] - times[0]) / 0.25).item())
        for _ in range(num_steps - 1):
            y = y + model(y).mean()
        return y.sum()

    batch = torch.ones(8, 4), torch.linspace(0, 1, 5)
    assert integrated(MODEL, batch).requires_grad
    with pytest.raises(mk.errors.InputError, match="a loss without a graph") as caught:
        estimate(MODEL, batch, integrated)
    (note,) = caught.value.__notes__
    assert "numbers that it read were guessed (such as aten._local_scalar_dense.default at" in note
    assert "a loop or a branch that depends on them may have gone another way" in note


@pytest.mark.parametrize("call", [estimate, lambda *args, **kwargs: plan(*args, budget="T4", **kwargs), advise])
def test_guessed_sizes_that_do_not_fit_together_are_not_the_users_fault(call):
    def matched(model, batch):
        rows = model(batch[0])
        found = rows[batch[0].sum(1) > 0]
        assert len(found) == len(rows)
        return found.sum()

    batch = (torch.ones(8, 4), None)
    matched(MODEL, batch)
    with pytest.raises(AssertionError) as caught:
        call(MODEL, batch, matched, selected_fraction=0.5)
    (note,) = set(caught.value.__notes__)
    assert "fails on the same line" not in note
    assert "If it runs, what was answered without data" in note
    assert "aten.nonzero" in note
    assert "selected_fraction=1.0" in note


class KeepsItsDevice(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.device, self.embedding = device, nn.Embedding(10, 4)

    def forward(self, tokens):
        return self.embedding(torch.tensor(tokens).to(self.device))


def test_a_stored_device_is_named_as_the_cause():
    model, batch = KeepsItsDevice("cpu"), [[1, 2], [3, 4]]
    with pytest.raises(RuntimeError, match=r"same device|two different devices") as caught:
        estimate(model, batch, lambda m, b: m(b).sum(), target="T4")
    (note,) = caught.value.__notes__
    assert "fails on the same line" not in note
    assert "A tensor on the CPU met one on the card" in note
    assert "model.device = 'cuda'" in note
    model.device = "cuda"  # the way out
    assert estimate(model, batch, lambda m, b: m(b).sum(), target="T4").guesses == ()


def test_a_tensor_made_without_a_device_is_named_as_the_cause():
    def made(name):
        return lambda m, b: (m(b[0])[:, 0] * torch.arange(8, device=name and b[0].device)).sum()

    with pytest.raises(RuntimeError, match=r"same device|two different devices") as caught:
        estimate(MODEL, BATCH, made(None), target="T4")
    assert "torch.arange(n, device=x.device)" in caught.value.__notes__[0]
    assert estimate(MODEL, BATCH, made("the way out"), target="T4")


def test_the_log_of_torch_is_as_before_afterwards():
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.disabled
    estimate(MODEL, BATCH, loss_fn)
    assert log.disabled is before


def test_numpy_of_gpu_tensor_suggests_cpu():
    def loss(model, batch):
        return loss_fn(model, batch) + float(model(batch[0]).detach().numpy().mean())

    with pytest.raises(TypeError, match=r"to numpy") as caught:
        estimate(MODEL, BATCH, loss, target="T4")
    assert caught.value.__notes__[0].endswith("or write .detach().cpu().numpy().")
    assert estimate(
        MODEL, BATCH, lambda m, b: loss_fn(m, b) + float(m(b[0]).detach().cpu().numpy().mean()), target="T4"
    )


@pytest.mark.parametrize("optimizer", [{}, {"optimizer": "sgd"}])
def test_a_model_without_parameters_is_refused(optimizer):
    with pytest.raises(mk.errors.InputError, match=r"model without parameters.*ModuleList"):
        mk.estimate_memory_usage(nn.Flatten(), torch.randn(4, 3, 2), loss_fn=lambda m, x: m(x).mean(), **optimizer)


def test_a_dataclass_is_a_batch():
    @dataclasses.dataclass
    class Graph:
        x: torch.Tensor
        name: str = "a"

    graph = Graph(X)
    for target in ("cpu", "T4"):
        of_graph = estimate(MODEL, graph, lambda model, g: model(g.x).square().mean(), target=target)
        of_tuple = estimate(MODEL, BATCH, loss_fn, target=target)
        assert of_graph.peak_bytes == of_tuple.peak_bytes
    assert graph.x is X
