"""What people do with memkit on a GPU: each test runs on the CPU, and where there is a card, on it too.

Run on a card: pytest -m gpu tests/test_on_a_card.py
"""

import contextlib
import copy
import gc
import json
import random
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memkit as mk
from memkit._core.units import MIB
from tests.helpers import gradients, one_in, run_python

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ON_CUDA = pytest.mark.gpu
EXACT = {"rtol": 1e-12, "atol": 1e-12}


@pytest.fixture(params=DEVICES)
def device(request):
    """A device whose products are those of the CPU: no TF32."""
    return torch.device(request.param)


@pytest.fixture
def free_card():
    """The card as a process finds it: nothing of earlier tests in the allocator's cache, nor held by libraries."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def net(device, dtype=torch.float64, *, dropout=0.0):
    torch.manual_seed(0)
    layers = (nn.Linear(8, 64), nn.GELU(), nn.Dropout(dropout), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
    return nn.Sequential(*layers).to(device, dtype)


def rows(device, dtype=torch.float64, num=32):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num, 8, generator=generator).to(device, dtype), (torch.arange(num) % 4).to(device)


def loss_fn(model, batch):
    x, y = batch
    return F.cross_entropy(model(x).float() if x.dtype.itemsize < 4 else model(x), y)


def losses_by_hand(model, optimizer, batch, num_steps=3):
    losses = []
    for _ in range(num_steps):
        loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# ------------------------------------------------------------------------------------------------------- the wrapper


@pytest.mark.parametrize("accumulation_steps", [1, 3])
def test_a_wrapped_step_is_the_plain_one(device, accumulation_steps):
    plain, wrapped = (net(device) for _ in range(2))
    batch = rows(device)
    expected = losses_by_hand(plain, torch.optim.AdamW(plain.parameters()), batch)
    trainer = mk.MemoryEfficientTrainingWrapper(
        wrapped, torch.optim.AdamW(wrapped.parameters()), accumulation_steps=accumulation_steps
    )
    found = [trainer.train_step(batch, loss_fn).loss.item() for _ in range(3)]
    assert found == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(list(wrapped.parameters()), list(plain.parameters()), **EXACT)


@ON_CUDA
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_autocast_is_that_of_a_loop_by_hand(precision):
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    plain, wrapped = (net("cuda", torch.float32) for _ in range(2))
    batch = rows("cuda", torch.float32)
    optimizer, scaler = torch.optim.AdamW(plain.parameters()), torch.amp.GradScaler("cuda", enabled=precision == "fp16")
    expected = []
    for _ in range(4):
        with torch.autocast("cuda", dtype):
            loss = loss_fn(plain, batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        expected.append(loss.item())
    trainer = mk.MemoryEfficientTrainingWrapper(
        wrapped, torch.optim.AdamW(wrapped.parameters()), precision=precision, max_grad_norm=1.0
    )
    found = [trainer.train_step(batch, loss_fn).loss.item() for _ in range(4)]
    assert found == expected
    torch.testing.assert_close(list(wrapped.parameters()), list(plain.parameters()), rtol=0, atol=0)


class RunsOut(nn.Module):
    """Asks the device for more than it has while the batch has more rows than fit."""

    def __init__(self, layers, most_rows):
        super().__init__()
        self.layers, self.most_rows = layers, most_rows

    def forward(self, x):
        x = self.layers(x)
        if len(x) > self.most_rows:
            torch.empty(2**50, dtype=torch.uint8, device=x.device)
        return x


def test_a_step_that_runs_out_ends_with_the_whole_batchs_gradient(device):
    """The error is the device's own."""
    plain, inner = net(device), net(device)
    batch = rows(device)
    expected = losses_by_hand(plain, torch.optim.AdamW(plain.parameters()), batch)
    wrapped = RunsOut(inner, 8)
    trainer = mk.MemoryEfficientTrainingWrapper(wrapped, torch.optim.AdamW(wrapped.parameters()))
    results = [trainer.train_step(batch, loss_fn) for _ in range(3)]
    assert results[0].num_ooms >= 2
    assert results[0].num_microbatches >= 4
    assert sum(result.num_ooms for result in results[1:]) == 0
    assert [result.loss.item() for result in results] == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(list(inner.parameters()), list(plain.parameters()), **EXACT)


class FailsOnce(torch.optim.AdamW):
    """Runs out in the middle of its first step, when half of the parameters are updated."""

    failures = 0

    def step(self, closure=None):
        if not self.failures:
            self.failures += 1
            for parameter in self.param_groups[0]["params"][:2]:
                parameter.data.add_(1.0)
            torch.empty(2**50, dtype=torch.uint8, device=parameter.device)
        return super().step(closure)


def test_an_optimizer_that_runs_out_is_undone(device):
    plain, wrapped = net(device), net(device)
    batch = rows(device)
    expected = losses_by_hand(plain, torch.optim.AdamW(plain.parameters()), batch)
    trainer = mk.MemoryEfficientTrainingWrapper(wrapped, FailsOnce(wrapped.parameters()))
    with (
        pytest.warns(mk.MemkitWarning, match="does not know how FailsOnce steps"),
        pytest.warns(mk.MemkitWarning, match="stepped when its attributes failures were left as"),
    ):
        first = trainer.train_step(batch, loss_fn)
    found = [first.loss.item(), *(trainer.train_step(batch, loss_fn).loss.item() for _ in range(2))]
    assert found == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(list(wrapped.parameters()), list(plain.parameters()), **EXACT)


def test_dropout_after_a_recovery_is_that_of_the_step_that_fits(device):
    """Random numbers are taken back with the step: another attempt draws what the first one drew."""
    batch = rows(device)

    def train(most_failures):
        """With so many failures; the step that fits is always one of the same micro-batches."""
        model = net(device, dropout=0.5)
        failures = []  # of numbers that are appended recovery says nothing

        def fragile(model, batch):
            loss = loss_fn(model, batch)
            if len(failures) < most_failures:
                failures.append(len(failures))
                torch.empty(2**50, dtype=torch.uint8, device=batch[0].device)
            return loss

        trainer = mk.MemoryEfficientTrainingWrapper(
            model, torch.optim.SGD(model.parameters(), lr=0.1), accumulation_steps=2
        )
        torch.manual_seed(5)
        return [trainer.train_step(batch, fragile).loss.item() for _ in range(2)]

    assert train(1) == pytest.approx(train(0), rel=1e-12)


@ON_CUDA
def test_the_demo_dies_and_finishes_on_a_card():
    out = run_python("from memkit.cli import main; main(['demo'])").stdout
    assert "died in step" in out
    assert "memkit finished" in out


# ------------------------------------------------------------------------------- checkpoints, offload, saved tensors


WAYS = {
    "checkpoints": {"checkpoint": "auto"},
    "selective checkpoints": {"checkpoint": {f"blocks.{number}": "selective" for number in range(4)}},
    "offload": {"offload": ("activations",)},
    "optimizer state": {"offload": ("optimizer",)},
}


class Blocks(nn.Module):
    def __init__(self, num_blocks=4, width=256):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width))
            for _ in range(num_blocks)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def blocks(device):
    torch.manual_seed(0)
    return Blocks().to(device), torch.linspace(-1, 1, 1024 * 256).view(1024, 256).to(device)


def mean_square(model, x):
    return model(x).square().mean()


@pytest.mark.parametrize("way", one_in(4, WAYS))
def test_what_saves_memory_keeps_every_bit(device, way):
    found = {}
    for settings in ({}, WAYS[way]):
        model, x = blocks(device)
        trainer = mk.MemoryEfficientTrainingWrapper(model, torch.optim.AdamW(model.parameters(), lr=1e-3), **settings)
        torch.manual_seed(3)
        steps = [trainer.train_step(x, mean_square).loss.item() for _ in range(3)]
        found[bool(settings)] = steps, [each.detach().cpu() for each in model.parameters()]
        trainer.close()
    torch.testing.assert_close(found[True], found[False], rtol=0, atol=0)


@ON_CUDA
@pytest.mark.parametrize("way", ["checkpoints", "offload"])
def test_what_saves_memory_saves_it_on_the_card(free_card, way):
    peaks = {}
    for settings in ({}, WAYS[way]):
        model, x = blocks("cuda")
        trainer = mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters(), lr=1e-3), **settings)
        trainer.train_step(x, mean_square)
        torch.cuda.reset_peak_memory_stats()
        trainer.train_step(x, mean_square)
        peaks[bool(settings)] = torch.cuda.max_memory_allocated()
        trainer.close()
    saved = 4 * 1024 * 1024 * 4  # one tensor of each block's four that are four times as wide
    assert peaks[True] < peaks[False] - saved


def test_treated_tensors_have_the_plain_gradient(device):
    model, x = blocks(device)
    plan = mk.plan_training(model, x, mean_square, "sgd", activation_budget=0.4, micro_batch_size=len(x))
    treated = mk.train.treat_saved_tensors(plan.saved_tensors)
    found = []
    for way in (torch.enable_grad(), treated):
        model.zero_grad()
        torch.manual_seed(3)
        with way:
            loss = mean_square(model, x)
        loss.backward()
        found.append(gradients(model))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    assert plan.saved_tensors.waiting_bytes <= 0.4 * plan.saved_tensors.saved_bytes


# --------------------------------------------------------------------------------------------------- what is predicted


@ON_CUDA
def test_an_estimate_for_this_card_is_what_it_takes(free_card):
    model, x = blocks("cuda")
    before = torch.cuda.memory_allocated() - sum(each.nbytes for each in (*model.parameters(), x))
    estimate = mk.estimate_memory_usage(model, x, loss_fn=mean_square, optimizer="adamw", target="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        mean_square(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()
    measured = torch.cuda.max_memory_allocated() - before
    assert estimate.peak_bytes == pytest.approx(measured, rel=0.01)
    assert estimate.fits("cuda")


@ON_CUDA
def test_advice_is_measured_on_the_card():
    model, x = blocks("cuda")
    for advice in mk.advise(model, x, mean_square, optimizer="adamw"):
        assert "refuted" not in str(advice)


@ON_CUDA
def test_a_prepared_trainer_keeps_its_budget(free_card):
    model, x = blocks("cuda")
    context = mk.find_gpu("cuda").context_bytes
    trainer = mk.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        x,
        mean_square,
        budget=context + 128 * MIB,
        micro_batch_size=1024,
    )
    for _ in range(3):
        result = trainer.train_step(x, mean_square)
    assert result.num_ooms == 0
    assert torch.cuda.max_memory_reserved() <= 128 * MIB


def planned_in(num_bytes, model, x):
    """A trainer planned for a limit on the process, and how often it ran out of that."""
    torch.cuda.set_per_process_memory_fraction(num_bytes / torch.cuda.get_device_properties(0).total_memory)
    try:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = mk.prepare(model, optimizer, x, mean_square, micro_batch_size=1024)
        return trainer, sum(trainer.train_step(x, mean_square).num_ooms for _ in range(3))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@ON_CUDA
def test_a_limit_on_the_process_is_the_budget(free_card):
    trainer, num_ooms = planned_in(128 * MIB, *blocks("cuda"))
    context_bytes = mk.find_gpu("cuda").context_bytes
    assert trainer.plan.budget_bytes == pytest.approx(128 * MIB + context_bytes, abs=4096)
    assert num_ooms == 0


@ON_CUDA
def test_a_plan_counts_what_else_is_on_the_card(free_card):
    """A tensor that the step does not use is within the limit too."""
    model, x = blocks("cuda")
    other = torch.zeros(128 * MIB, dtype=torch.uint8, device="cuda")
    trainer, num_ooms = planned_in(256 * MIB, model, x)
    assert num_ooms == 0
    assert other.sum().item() == 0
    beside = next(note for note in trainer.plan.notes if "of this process" in note)
    assert float(beside.split()[0]) == pytest.approx(128, abs=2)


# ----------------------------------------------------------------------------------------------------------- in chunks


def test_a_map_in_chunks_is_the_whole_one(device):
    mlp = net(device)
    x = rows(device, num=1000)[0].requires_grad_()
    found = []
    for way in (mlp, partial(mk.chunked_map, mlp, chunk_size=96), mk.ChunkedProcessor(mlp, memory_budget="1MiB")):
        mlp.zero_grad()
        x.grad = None
        y = way(x)
        y.square().mean().backward()
        found.append((y.detach(), x.grad, gradients(mlp)))
    torch.testing.assert_close(found[1], found[0], **EXACT)
    torch.testing.assert_close(found[2], found[0], **EXACT)


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min", "softmax"])
def test_segments_in_chunks_are_the_whole_ones(device, reduce):
    mlp, num_edges, num_nodes = net(device), 500, 37
    x = rows(device, num=num_edges)[0].requires_grad_()
    nodes = torch.linspace(-1, 1, num_nodes * 4, dtype=torch.float64).view(num_nodes, 4).to(device).requires_grad_()
    index, source = (torch.arange(num_edges, device=device) * step % num_nodes for step in (7, 11))

    class Message(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = mlp

        def forward(self, edges, x_j):
            return self.mlp(edges) * x_j

    message = Message()
    found = []
    for chunk_size in (num_edges, 64):
        mlp.zero_grad()
        x.grad = nodes.grad = None
        y = mk.chunked_segment_reduce(
            message, x, index=index, num_segments=num_nodes, reduce=reduce, gather={"x_j": (nodes, source)},
            chunk_size=chunk_size,
        )  # fmt: skip
        (y * torch.linspace(0, 1, y.numel(), dtype=torch.float64, device=device).view_as(y)).sum().backward()
        found.append((y.detach(), x.grad, nodes.grad, gradients(mlp)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-12)
    if reduce == "sum":
        expected = torch.zeros(num_nodes, 4, dtype=torch.float64, device=device)
        expected.index_add_(0, index, message(x, nodes[source]).detach())
        torch.testing.assert_close(found[1][0], expected, **EXACT)


@ON_CUDA
def test_chunks_keep_their_budget_on_the_card(free_card):
    mlp = net("cuda", torch.float32)
    x = torch.rand(2_000_000, 8, device="cuda")
    processor = mk.ChunkedProcessor(mlp, memory_budget="64MiB")
    processor(x).square().mean().backward()  # measures, and makes cuBLAS's workspace
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = processor(x)
    forward = torch.cuda.max_memory_allocated() - before
    upstream = torch.ones_like(y)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y.backward(upstream)
    backward = torch.cuda.max_memory_allocated() - before
    assert forward <= 64 * MIB + y.nbytes
    assert backward <= 64 * MIB
    plain = 2_000_000 * 64 * 4 * 4
    assert plain > 4 * 64 * MIB


def test_a_loss_in_chunks_is_the_whole_one(device):
    x = rows(device, num=100)[0].requires_grad_()
    weight = torch.linspace(-1, 1, 50 * 8, dtype=torch.float64).view(50, 8).to(device).requires_grad_()
    labels = torch.arange(100, device=device) % 50
    found = []
    for way in (
        lambda: F.cross_entropy(x @ weight.t(), labels),
        lambda: mk.chunked_linear_cross_entropy(x, weight, labels),
    ):
        x.grad = weight.grad = None
        loss = way()
        loss.backward()
        found.append((loss.detach(), x.grad, weight.grad))
    torch.testing.assert_close(found[1], found[0], **EXACT)


def test_tiles_are_the_whole_volume(device):
    torch.manual_seed(0)
    conv = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, 2, 3, padding=1)).double().to(device)
    volume = torch.linspace(-1, 1, 24**3, dtype=torch.float64).view(1, 1, 24, 24, 24).to(device).requires_grad_()
    found = []
    for way in (conv, partial(mk.tiled_apply, conv, tile_size=12)):
        conv.zero_grad()
        volume.grad = None
        y = way(volume)
        y.square().sum().backward()
        found.append((y.detach(), volume.grad, gradients(conv)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-11)


# ----------------------------------------------------------------------------------------------------- what was used


@ON_CUDA
def test_a_managers_peaks_are_the_allocators(free_card, tmp_path):
    def train(memory):
        """The peak of three steps that are the same each time."""
        model, x = blocks("cuda")
        optimizer = torch.optim.AdamW(model.parameters())
        peaks = []
        for _ in range(3):
            if memory is None:
                torch.cuda.reset_peak_memory_stats()
            phase = contextlib.nullcontext if memory is None else memory.phase
            with phase("forward"):
                loss = mean_square(model, x)
            with phase("backward"):
                loss.backward()
            with phase("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
            del loss
            peaks.append(torch.cuda.max_memory_allocated())
            if memory is not None:
                memory.step()
        return max(peaks)

    train(None)  # the libraries' workspaces
    expected = train(None)
    memory = mk.MemoryManager("cuda", log=tmp_path / "run.jsonl", reset_peaks=True)
    train(memory)
    phases = memory.phases
    assert {*phases} == {"forward", "backward", "optimizer"}
    assert max(each.peak_bytes for each in phases.values()) == expected
    memory.close()
    events = mk.report.read_memory_events(tmp_path / "run.jsonl")
    assert len(events.events) > 3
    mk.write_report(events, tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size > 10_000


@ON_CUDA
def test_a_tracker_sees_the_bytes_of_the_card(free_card):
    """Of tensors that the block only reads, too."""
    model, x = blocks("cuda")
    mean_square(model, x).backward()  # cuBLAS's workspace
    model.zero_grad()
    read_bytes = sum(each.nbytes for each in (*model.parameters(), x))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with mk.Tracker(device="cuda", workspace=True) as tracker:
        mean_square(model, x).backward()
    taken = torch.cuda.max_memory_allocated() - before
    assert tracker.peak_bytes == pytest.approx(taken + read_bytes, abs=64 * 512)  # blocks are multiples of 512 bytes
    assert tracker.peak_where.operator.startswith("aten.")


@ON_CUDA
def test_a_snapshot_of_the_card_is_read_and_reported(tmp_path):
    torch.cuda.memory._record_memory_history(max_entries=100_000)
    try:
        model, x = blocks("cuda")
        for _ in range(2):
            mean_square(model, x).backward()
        torch.cuda.memory._dump_snapshot(str(tmp_path / "snapshot.pickle"))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    events = mk.report.read_memory_events(tmp_path / "snapshot.pickle")
    assert len(events.events) > 50
    mk.write_report(events, tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size > 10_000


# -------------------------------------------------------------------------------------------------- state and samplers


def test_a_resumed_training_goes_on_bit_for_bit(device, tmp_path):
    """Dropout on the card draws from the card's generator, which is a part of the state."""
    batch = rows(device, torch.float32)

    def start():
        model = net(device, torch.float32, dropout=0.5)
        return model, torch.optim.AdamW(model.parameters())

    torch.manual_seed(7)
    model, optimizer = start()
    state = mk.TrainingStateManager(tmp_path)
    losses_by_hand(model, optimizer, batch)
    state.save(3, model=model, optimizer=optimizer)
    expected = losses_by_hand(model, optimizer, batch)
    torch.manual_seed(999)
    random.seed(1)
    model, optimizer = start()
    assert mk.TrainingStateManager(tmp_path).restore(model=model, optimizer=optimizer) == 3
    assert losses_by_hand(model, optimizer, batch) == expected


@ON_CUDA
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_the_samplers_of_a_card_draw_what_numpy_draws(backend):
    pytest.importorskip("nilearn", reason="the scenes are its surfaces")
    from tests.points.backends import are_identical

    assert are_identical(backend, "cuda")


def test_augmented_voxels_do_not_depend_on_the_device(device):
    volume = torch.linspace(0, 1, 2 * 16**3).view(2, 1, 16, 16, 16)
    aug = mk.VoxelAugmentation(dropout_prob=0.1)
    params = aug.sample(volume.shape, seed=0, epoch=0, index=[3, 4])
    expected, found = aug.apply(volume, params), aug.apply(volume.to(device), params)
    assert found.device.type == device.type
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)
    assert not torch.equal(expected, volume)


# ------------------------------------------------------------------------------------------------- plans as records


@ON_CUDA
def test_plan_report_and_log_are_json_on_a_card():
    model, x = blocks("cuda")
    plan = mk.plan_training(model, x, mean_square, "sgd", budget="cuda")
    assert json.loads(json.dumps(plan.as_dict()))
    assert copy.deepcopy(plan).required_bytes == plan.required_bytes
