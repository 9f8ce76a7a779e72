"""Savings and costs of the wrapper's settings, by deterministic counters: allocator bytes, operations, host reads."""

import contextlib
import copy
import gc
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import memkit as mk
from benchmarks.cases.wrapper_memory import Run, measure_flops, measure_peaks, measure_saved_bytes
from benchmarks.cases.wrapper_overhead import count_host_reads, mean_loss, summed_loss
from benchmarks.models import Task, transformer, unet
from memkit._recorder.recorder import Recorder
from memkit._recovery.snapshot import Rollback, StateWatch
from tests.helpers import FunctionsEntered, assert_same
from tests.toys import mean_square, trainer_of
from tests.versions import has, lacks

TASKS = {
    "transformer": lambda: transformer(width=32, length=64),
    "unet": lambda: unet(width=4, stride=2),
}

pytestmark = pytest.mark.filterwarnings("ignore:.*profil.*:UserWarning")


@pytest.fixture(params=["transformer", pytest.param("unet", marks=pytest.mark.slow)])
def build(request):
    return TASKS[request.param]


def test_default_settings_take_no_memory(build):
    plain, wrapped = measure_peaks(Run(build(), None)), measure_peaks(Run(build(), {}))
    assert 0 <= wrapped["peak_bytes"] - plain["peak_bytes"] < 8192  # torch's random state, 5056 bytes


def test_four_microbatches_take_a_quarter_of_the_activations(build):
    plain, quarter = measure_peaks(Run(build(), None)), measure_peaks(Run(build(), {"accumulation_steps": 4}))
    assert quarter["activation_bytes"] <= 0.3 * plain["activation_bytes"]
    assert quarter["peak_bytes"] < plain["peak_bytes"]


def test_checkpointing_keeps_little_for_backward(build):
    plain, checkpointed = Run(build(), None), Run(build(), {"checkpoint": "auto"})
    assert measure_saved_bytes(checkpointed) <= 0.4 * measure_saved_bytes(plain)
    # The peak falls less: the largest block is there as a whole while it is recomputed.
    assert measure_peaks(checkpointed)["activation_bytes"] <= 0.55 * measure_peaks(plain)["activation_bytes"]


def test_bf16_keeps_about_half_for_backward(build):
    plain, mixed = Run(build(), None), Run(build(), {"precision": "bf16-mixed"})
    assert measure_saved_bytes(mixed) <= 0.65 * measure_saved_bytes(plain)  # a transformer's residual stays float32


def test_measures_together_reach_ninety_percent_of_the_activations(build):
    # Without the copies that make an optimizer's step whole: a few MiB, which is much beside so small a model.
    settings = {"accumulation_steps": 4, "checkpoint": "auto", "on_oom": "raise"}
    plain, both = measure_peaks(Run(build(), None)), measure_peaks(Run(build(), settings))
    assert both["activation_bytes"] <= 0.15 * plain["activation_bytes"]


def test_clipping_does_not_widen_gradients_of_one_micro_batch():
    def peak_bytes(max_grad_norm):
        model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(8)])
        trainer = trainer_of(model, precision="bf16-true", max_grad_norm=max_grad_norm, probe=False)
        with Recorder() as recorder:
            trainer.train_step(torch.randn(4, 256), lambda model, x: model(x).float().pow(2).mean())
        return recorder.recording().peak_bytes()

    assert peak_bytes(1.0) <= peak_bytes(None) + 4096


class Stack(nn.Module):
    """Only matrix products, and each block ends in an operator that keeps its result: nothing can be left out."""

    def __init__(self):
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(16))  # so that the first layer's input needs a gradient too
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh()) for _ in range(3)
        )

    def forward(self, x):
        x = x + self.offset
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize(("settings", "ratio"), [(None, 2), ({}, 2), ({"checkpoint": "auto"}, 3)])
def test_backward_costs_two_forwards_and_recomputation_one_more(settings, ratio):
    task = Task(Stack(), torch.randn(8, 16), mean_square)
    flops = measure_flops(Run(task, settings))
    assert flops["forward_flops"] == 8 * 2 * 16 * 32 * 2 * 3
    assert flops["backward_flops"] == ratio * flops["forward_flops"]


def test_recomputation_skips_unneeded_operators():
    plain, flops = (measure_flops(Run(TASKS["transformer"](), {"checkpoint": each})) for each in (None, "auto"))
    again = flops["backward_flops"] - plain["backward_flops"]
    # Of a block's 12 width^2 products per token the last 4, the MLP's second layer, keep nothing for backward. (Since
    # 2.15 torch counts the CPU's attention too.)
    assert 0 < again / flops["forward_flops"] < 0.75


class Noisy(nn.Module):
    """Dropout and BatchNorm in blocks."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 8))
            for _ in range(3)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def test_checkpointing_changes_no_bit():
    model, batch = Noisy(), torch.randn(12, 8)
    states = []
    for checkpoint in (None, "auto"):
        twin = copy.deepcopy(model)
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
        trainer = mk.MemoryEfficientTrainingWrapper(
            twin, optimizer, accumulation_steps=3, checkpoint=checkpoint, probe=False
        )
        torch.manual_seed(1)
        for _ in range(3):
            trainer.train_step(batch, mean_square)
        trainer.close()
        states.append(twin.state_dict())
    assert_same(*states)
    assert states[0]["blocks.0.1.num_batches_tracked"] == 9


@pytest.mark.filterwarnings("ignore:precision='fp16-mixed' on a CPU")
@pytest.mark.parametrize(
    ("loss_fn", "settings", "num_reads"),
    [
        (mean_loss, {}, 0),
        (mean_loss, {"on_oom": "raise"}, 0),
        (mean_loss, {"max_grad_norm": 1.0}, 0),
        (mean_loss, {"precision": "bf16-mixed", "checkpoint": ["2"]}, 0),
        (summed_loss, {}, 1),  # the weight of the whole batch, at the step
        (mean_loss, {"precision": "fp16-mixed"}, 1),  # the scaler asks whether to skip the step
    ],
)
def test_a_warm_step_does_not_wait_for_the_device(loss_fn, settings, num_reads):
    assert count_host_reads(loss_fn, **settings) == num_reads


def num_entered_by_a_warm_step(num_parts=1, num_layers=3, as_batch=tuple, **settings):
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(num_layers)])
    batch = as_batch((torch.ones(4 * num_parts, 4), torch.ones(4 * num_parts, 4)))
    trainer = trainer_of(model, accumulation_steps=num_parts, **settings)
    for _ in range(5):  # until sizes are proven, generators are found, and the split is checked for the 4th time
        trainer.train_step(batch, mean_loss)
    with FunctionsEntered() as entered:
        trainer.train_step(batch, mean_loss)
    # A trainer that a page of the docs has left alive looks at all optimizers' steps.
    return sum(not each.co_filename.endswith("bystanders.py") for each in entered.own)


@pytest.mark.parametrize(("on_oom", "most", "most_more"), [("raise", 60, 60), ("exact", 102, 64)])
def test_a_warm_step_enters_few_functions(on_oom, most, most_more):
    """Each takes about a microsecond or two in a large model, whose tensors have taken the processor's caches."""
    whole = num_entered_by_a_warm_step(on_oom=on_oom)
    assert whole <= most
    assert num_entered_by_a_warm_step(num_layers=40, on_oom=on_oom) == whole
    assert num_entered_by_a_warm_step(as_batch=list, on_oom=on_oom) <= most
    assert num_entered_by_a_warm_step(memory="1GiB", on_oom=on_oom) <= most + 29
    in_parts = [num_entered_by_a_warm_step(num_parts=each, on_oom=on_oom) for each in (3, 4)]
    assert in_parts[1] - in_parts[0] <= most_more


@pytest.mark.parametrize(
    "settings", [{}, {"on_oom": "raise"}, {"accumulation_steps": 4}, {"checkpoint": "auto"}], ids=str
)
def test_a_dropped_trainer_frees_model_and_optimizer_at_once(settings):
    """As after a loop by hand, without a garbage collection: until one, a GPU's memory would stay taken."""

    def references():
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(2)]
        model = nn.Sequential(*blocks, nn.Linear(8, 8))  # parts of a batch have other means: it is checked, and told
        trainer = trainer_of(model, **settings)
        batch = torch.ones(8, 8), torch.ones(8, 8)
        for _ in range(3):
            trainer.train_step(batch, mean_loss)
        (optimizer,) = [each for name, each in trainer.parts().items() if name == "optimizer"]
        trainer.close()
        return [weakref.ref(each) for each in (model, optimizer, trainer)]

    with pytest.warns(mk.MemkitWarning) if "accumulation_steps" in settings else contextlib.nullcontext():
        references()  # torch keeps a process's first optimizer
    gc.collect()
    gc.disable()
    try:
        with warnings.catch_warnings(action="ignore"):
            assert [each() for each in references()] == [None] * 3
    finally:
        gc.enable()


@pytest.mark.skipif(
    not has("torch._foreach_clone"), reason=lacks("torch._foreach_clone", "buffers are copied one after the other")
)
def test_a_snapshot_of_many_batch_norms_takes_no_more_operators():
    class Operators(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    found = []
    for num_layers in (1, 20):
        watch = StateWatch(nn.Sequential(*[nn.BatchNorm1d(3) for _ in range(num_layers)]))
        watch.changes_attributes = watch.moves_trained = False
        with Operators() as operators:
            Rollback(watch)
        found.append(operators.names)
    assert found[0] == found[1]
