"""Each block's treatment: bit-equal gradients, FLOPs, saved bytes, and peaks that a dry run predicts to the byte."""

import collections
import contextlib
import copy
import itertools
import os
import pickle
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

import memkit as mk
from memkit._recorder.recorder import Recorder
from memkit._simulation.simulation import hold
from memkit._tape.kept import is_kept
from memkit.train.checkpointing import Checkpointing
from memkit.train.treatments import TREATMENTS, BlockOffload, ChangedInputError
from tests.allocations import trace_allocations
from tests.helpers import Noted, assert_refused, assert_same, gradient_of, gradients, one_in
from tests.ranks import join, leave, spawn
from tests.toys import mean_square, trainer_of
from tests.train.faults import FailingOperator


def mlp():
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 128), nn.Tanh())
            for _ in "1234"
        )
    )


def encoder():
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


class Level(nn.Sequential):
    """Two convolutions; the second one's result is overwritten by its activation."""

    def __init__(self, before, after):
        first, second = nn.Conv2d(before, after, 3, padding=1), nn.Conv2d(after, after, 3, padding=1)
        super().__init__(first, nn.BatchNorm2d(after), nn.SiLU(), second, nn.ReLU(inplace=True))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.levels = nn.ModuleList([Level(3, 16), Level(16, 32), Level(32, 32), Level(64, 16), Level(32, 16)])
        self.head = nn.Conv2d(16, 1, 1)

    def forward(self, x):
        fine = self.levels[0](x)
        coarse = self.levels[1](F.max_pool2d(fine, 2))
        x = self.levels[2](F.max_pool2d(coarse, 2))
        x = self.levels[3](torch.cat([F.interpolate(x, scale_factor=2.0), coarse], 1))
        return self.head(self.levels[4](torch.cat([F.interpolate(x, scale_factor=2.0), fine], 1)))


CASES = {  # model, shape of the batch, names of blocks
    "mlp": (mlp, (256, 128), ["0", "1", "2", "3"]),
    "encoder": (encoder, (4, 64, 64), [f"layers.{k}" for k in range(3)]),
    "unet": (UNet, (2, 3, 48, 48), [f"levels.{k}" for k in (0, 1, 3, 4)]),
}
MIX = ("full", "selective", "offload")


def build(name):
    torch.manual_seed(0)
    make, shape, blocks = CASES[name]
    return make(), torch.randn(shape), blocks


def outcome(model, x, *, steps=2):
    """All that must not depend on the treatment."""
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        loss = mean_square(model, x)
        loss.backward()
        losses.append(loss.detach())
    return losses, gradients(model), list(model.buffers()), torch.rand(1)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("treatment", [*TREATMENTS, "mix"])
def test_bit_equal_to_the_plain_model(name, treatment):
    plain, x, blocks = build(name)
    model = copy.deepcopy(plain)
    treatments = dict(zip(blocks, MIX, strict=False)) if treatment == "mix" else dict.fromkeys(blocks, treatment)
    with Checkpointing(model, treatments) as checkpointing:
        assert checkpointing.treatments == treatments
        assert_same(outcome(model, x), outcome(plain, x))
    assert not any("forward" in module.__dict__ for module in model.modules())


def offloads(checkpointing):
    (offload,) = {installed._offload for installed in checkpointing._installed.values()} or {BlockOffload()}
    return list(offload._offloads.values())


def recorded_peak(model, x):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step():
        mean_square(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with Recorder() as recorder:
        hold(recorder, model, x)
        step()
    return recorder.recording().peak_bytes()


@pytest.mark.parametrize("name", one_in(2, CASES))
def test_a_dry_run_foretells_the_peak_to_the_byte(name):
    model, x, blocks = build(name)
    peaks = []
    for treatment in (None, *reversed(TREATMENTS), "mix"):
        choice = dict.fromkeys(blocks, treatment) if treatment in TREATMENTS else {}
        with Checkpointing(model, dict(zip(blocks, MIX, strict=False)) if treatment == "mix" else choice) as applied:
            estimate = mk.estimate_memory_usage(model, x, loss_fn=mean_square, optimizer="sgd")
            assert not any(offload._stores for offload in offloads(applied))  # of a fake tensor nothing is written
            assert estimate.peak_bytes == recorded_peak(model, x)
        peaks.append(estimate.peak_bytes)
    plain, offload, selective, full, mix = peaks
    assert plain > selective > full > offload
    assert plain > mix > offload


def flops(model, x):
    with FlopCounterMode(display=False) as forward:
        loss = mean_square(model, x)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    return backward.get_total_flops() / forward.get_total_flops()


def test_flops_of_backward_over_forward():
    model, x, blocks = build("mlp")
    x.requires_grad_()
    for treatment, ratio in ((None, 2), ("full", 3), ("selective", 2), ("offload", 2)):
        with Checkpointing(model, dict.fromkeys(blocks, treatment) if treatment else {}):
            assert flops(model, x) == ratio
    with Checkpointing(model, {"0": "full"}):
        assert flops(model, x) == 2.25


class Attention(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.qkv, self.out, self.dropout = nn.Linear(64, 192), nn.Linear(64, 64), dropout

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)
        return self.out(x.transpose(1, 2).flatten(2)).tanh()


def test_scores_of_an_attention_are_computed_again():
    """With dropout the CPU has no kernel for attention: a third of the forward's FLOPs are in two batched products."""
    x = torch.randn(2, 64, 64, requires_grad=True)
    with Checkpointing(nn.Sequential(Attention(0.1)), {"0": "selective"}) as checkpointing:
        assert flops(checkpointing.blocks["0"], x) == 2 + 1 / 3


def test_a_kernel_with_dropout_inside_is_computed_again():
    """Skipped, it would draw nothing, and all later dropout would draw something else than in the forward."""
    q = torch.empty(1, 2, 8, 8)
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default
    assert is_kept(flash, (q, q, q), {})
    assert is_kept(efficient, (q, q, q, None, True), {"is_causal": True})
    assert not is_kept(flash, (q, q, q, 0.1), {})
    assert not is_kept(efficient, (q, q, q, None, True), {"dropout_p": 0.1})


def test_tensors_waiting_for_backward():
    """In batches, of each of four blocks: its input; selective: two products, one twice as wide; plain: 7 in all."""
    model, x, blocks = build("mlp")
    for treatment, num_batches in ((None, 4 * 7), ("full", 4), ("selective", 4 * (1 + 2 + 1)), ("offload", 1)):
        with Checkpointing(model, dict.fromkeys(blocks, treatment) if treatment else {}), Recorder() as recorder:
            loss = mean_square(model, x)
        there = {tensor.untyped_storage() for tensor in (x, loss, *model.parameters())}
        # The first block's input is the batch, which is there anyway; the last block's result is kept by the loss.
        assert recorder.live_bytes() - sum(storage.nbytes() for storage in there) == num_batches * x.nbytes


@pytest.mark.parametrize("treatment", TREATMENTS)
def test_a_kept_graph_and_a_second_derivative(treatment):
    found = []
    for choice in ({}, {"[0-3]": treatment}):
        model, x, _ = build("mlp")
        with Checkpointing(model, choice):
            x.requires_grad_()
            torch.manual_seed(1)
            loss = mean_square(model, x)
            loss.backward(retain_graph=True)
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            slope.square().sum().backward()
        found.append(gradients(model))
    assert_same(*found)


def test_recomputes_result_changed_after_its_block():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            x = self.linear(x)
            return x, x.tanh().exp()

    torch.manual_seed(0)
    model, x = nn.ModuleDict({"block": Two()}), torch.randn(3, 8)
    found = []
    for choice in ({}, {"block": "selective"}):
        model.zero_grad()
        with Checkpointing(model, choice):
            first, second = model["block"](x)
            first.add_(1)
            (first.square().sum() + second.sum()).backward()
        found.append(gradients(model))
    assert_same(*found)


class ShiftsItsInput(nn.Linear):
    """With its tensor nested: torch saves no such input, and would run the block again on the changed one, silently."""

    def forward(self, inputs):
        return super().forward(inputs["x"].add_(self.bias))


def overwriting_model(make_block):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.block = nn.Linear(4, 4), make_block()

        def forward(self, x):
            x = self.first(x)
            return self.block({"x": x} if isinstance(self.block, ShiftsItsInput) else x)

    torch.manual_seed(0)
    return Model(), torch.randn(3, 4)


def beginning_in_place():
    return nn.Sequential(nn.LeakyReLU(0.2, inplace=True), nn.Linear(4, 4))


@pytest.mark.parametrize("treatment", ["full", "selective"])
@pytest.mark.parametrize("make", [beginning_in_place, lambda: ShiftsItsInput(4, 4)])
def test_rejects_block_changing_its_input(treatment, make):
    model, x = overwriting_model(make)
    kind = type(model.block).__name__
    with (
        Checkpointing(model, {"block": treatment}),
        pytest.raises(
            mk.errors.StateError, match=rf"'block' .*'{treatment}': got a {kind} .* in place;.*inplace=False.*larger"
        ),
    ):
        model(x)


def test_ways_out_for_block_changing_its_input():
    found = []
    for choice in ({}, {"block": "offload"}, {"": "full"}):
        model, x = overwriting_model(beginning_in_place)
        whole = nn.ModuleDict({"whole": model})
        with Checkpointing(whole, {f"whole.{key}".rstrip("."): value for key, value in choice.items()}):
            mean_square(whole["whole"], x).backward()
        found.append(gradients(model))
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])


def by_jvp(model, x):
    return torch.func.jvp(model, (x,), (torch.ones_like(x),))


def by_dual_numbers(model, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x))))


def by_weights_with_tangents(model, x):
    def out(weight):
        return torch.func.functional_call(model, {"0.0.weight": weight}, (x,))

    weight = model[0][0].weight
    return torch.func.jvp(out, (weight,), (torch.ones_like(weight),))


@pytest.mark.parametrize("derivative", [by_jvp, by_dual_numbers, by_weights_with_tangents])
def test_a_block_whose_input_has_a_tangent_is_not_recomputed(derivative):
    """PINNs: torch's own checkpoint recomputes without the tangent, and meets another number of saved tensors."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 3)).double()
    x = torch.randn(6, 4, dtype=torch.float64)

    def gradients_with(choice):
        model.zero_grad()
        with Checkpointing(model, choice):
            torch.stack([each.square().mean() for each in derivative(model, x)]).sum().backward()
        return gradients(model)

    plain = gradients_with({})
    assert_same(gradients_with({"0": "offload"}), plain)
    for treatment in ("full", "selective"):
        with pytest.warns(mk.MemkitWarning, match=rf"'{treatment}' is called inside .* or with tangents"):
            assert_same(gradients_with({"0": treatment}), plain)


def per_sample(model, x):
    return torch.func.vmap(lambda row: mean_square(model, row))(x).mean()


def slopes(model, x):
    return torch.func.vmap(torch.func.jacrev(model))(x).square().mean()


@pytest.mark.parametrize("treatment", TREATMENTS)
def test_a_block_that_calls_a_transform_is_refused(treatment):
    class Sloping(nn.Linear):
        def forward(self, x):
            return torch.func.grad(lambda x: super(Sloping, self).forward(x).square().sum())(x)

    model, x = nn.ModuleList([Sloping(4, 4)]), torch.randn(3, 4)
    with Checkpointing(model, {"0": treatment}):
        assert_refused(lambda: model[0](x), mk.errors.ConfigError, "torch.func.grad", "without checkpoint=")


@pytest.mark.parametrize("loss_fn", [per_sample, slopes])
@pytest.mark.parametrize("treatment", ["full", "selective"])
def test_a_block_inside_of_vmap_is_not_recomputed(treatment, loss_fn):
    """Torch reports a tensor that escaped from vmap: backward runs the block outside of it."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)]
    model = nn.Sequential(*blocks, nn.Linear(4, 3)).double()
    x = torch.randn(6, 4, dtype=torch.float64)
    plain = gradient_of(loss_fn(model, x), model)
    with (
        Checkpointing(model, {"0": treatment, "1": treatment}),
        pytest.warns(mk.MemkitWarning, match=r"is called inside torch\.func\.vmap.*with the same result") as caught,
    ):
        loss_fn(model, x).backward()
    assert len(caught) == 1  # for both blocks
    assert_same(gradients(model), plain)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("treatment", TREATMENTS)
@pytest.mark.parametrize(
    "compile_block", [lambda block, x: torch.jit.trace(block, x), lambda block, _: torch.jit.script(block)]
)
def test_traced_and_scripted_blocks(compile_block, treatment):
    x, block = torch.randn(6, 4), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    model = nn.Sequential(nn.Linear(4, 4), compile_block(block, x))
    found = []
    for choice in ({}, {"1": treatment}):
        model.zero_grad()
        with Checkpointing(model, choice):
            mean_square(model, x).backward()
        found.append(gradients(model))
    assert_same(found[1], found[0])


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("treatment", TREATMENTS)
def test_scripting_a_treated_model_is_refused_with_ways_out(treatment):
    """TorchScript reads the source of a forward, and failed at a treated one with a raw AttributeError."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 3)).double().eval()
    x = torch.randn(6, 4, dtype=torch.float64)
    plain = model(x)
    blocks = Checkpointing(model, {"0": treatment})
    for each in (model, copy.deepcopy(model)):
        with pytest.raises(mk.errors.AbsentError, match=r"torch\.jit\.script of the block '0'.*torch\.jit\.trace"):
            torch.jit.script(each)
        with torch.no_grad():
            torch.testing.assert_close(torch.jit.trace(each, x)(x), plain)
            torch.testing.assert_close(torch.export.export(each, (x,)).module()(x), plain)
    blocks.close()
    torch.testing.assert_close(torch.jit.script(model)(x), plain)


class WritesUnseen(nn.Module):
    """Masks a block's input after the block has run, as public models of speech do to their padding."""

    def __init__(self, dtype=torch.float64, writes=(True,)):
        super().__init__()
        self.first, self.block = nn.Linear(4, 4, dtype=dtype), nn.Sequential(nn.ReLU(), nn.Linear(4, 4, dtype=dtype))
        self.writes, self.num_runs = writes, 0

    def forward(self, x):
        h = self.first(x)
        y = self.block(h)
        if self.writes[min(self.num_runs, len(self.writes) - 1)]:
            h.data[:, 2:] = 1
        self.num_runs += 1
        return y + h


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("treatment", ["full", "selective"])
def test_rejects_unseen_write_to_input(treatment, dtype):
    x = torch.randn(3, 4, dtype=dtype)
    torch.manual_seed(0)
    plain = gradients_of(WritesUnseen(dtype), x)
    torch.manual_seed(0)
    treated = WritesUnseen(dtype)
    with Checkpointing(treated, {"block": treatment}):
        with pytest.raises(mk.errors.StateError, match=r"'block' .*written through .data or NumPy.*masked_fill"):
            gradients_of(treated, x)
        treated.num_runs, treated.writes = 0, (False, False, True)  # nobody looks at the third forward
        for _ in range(2):
            gradients_of(treated, x)
        late = gradients_of(treated, x)
    assert not all(map(torch.equal, late, plain))  # what the error is for


class Sharing(nn.Module):
    """Blocks that change the containers they are passed, as U-Nets pop what they skip and caches are filled."""

    class Block(nn.Linear):
        def forward(self, x, skips, named):
            (skips,) = skips
            x = (super().forward(x) + skips.pop() + named["all"][-1]).tanh()
            skips.insert(0, x * 2)
            named[len(named)] = x * 3
            return x

    def __init__(self, make_list):
        super().__init__()
        self.make_list, self.blocks = make_list, nn.ModuleList(self.Block(4, 4) for _ in range(3))

    def forward(self, x):
        skips = self.make_list(x * number for number in range(3))
        named = {"all": skips}  # the same one
        for block in self.blocks:
            x = block(x, (skips,), named)
        skips.clear()
        return x + sum(value for key, value in named.items() if key != "all")


@pytest.mark.parametrize("treatment", TREATMENTS)
def test_a_block_may_change_lists_and_dicts(treatment):
    def run(choice):
        torch.manual_seed(0)
        model, x = Sharing(list), torch.randn(3, 4, requires_grad=True)
        with Checkpointing(model, choice):
            for _ in range(3):
                mean_square(model, x).backward()
        return [*gradients(model), x.grad]

    assert_same(run({"blocks.*": treatment}), run({}))


class Mesh:
    """What blocks read and change: a count, a list, an array of lists, a tensor that is replaced."""

    def __init__(self, features):
        self.features, self.count, self.edges = features, 3, [1.0, 2.0, 3.0, 4.0]
        self.neighbors = np.empty(2, dtype=object)
        self.neighbors[:] = [[1, 2, 3, 4], [5, 6, 7, 8]]


class OnMesh(nn.Module):
    """Blocks that convolve the features of a mesh and collapse one of its edges, or leave that to the model."""

    class Block(nn.Linear):
        def forward(self, mesh, x, collapses):
            x = (super().forward(x) * mesh.count + mesh.features * mesh.edges[-1]).tanh() * len(mesh.neighbors[1])
            if collapses:
                OnMesh.collapse(mesh, x)
            return x

    def __init__(self, in_blocks):
        super().__init__()
        self.in_blocks, self.blocks = in_blocks, nn.ModuleList(self.Block(4, 4).double() for _ in range(3))

    @staticmethod
    def collapse(mesh, x):
        mesh.count -= 1
        mesh.edges.pop()
        mesh.neighbors[1].pop()
        mesh.features = mesh.features + x

    def forward(self, x):
        mesh = Mesh(x * 2)
        for block in self.blocks:
            x = block(mesh, x, self.in_blocks)
            if not self.in_blocks:
                self.collapse(mesh, x)
        self.last = mesh
        return x


@pytest.mark.parametrize("in_blocks", [True, False])
@pytest.mark.parametrize("treatment", TREATMENTS)
def test_objects_that_change_in_a_block_or_after_it_are_as_they_were_in_its_rerun(treatment, in_blocks):
    def run(choice):
        torch.manual_seed(0)
        model, x = OnMesh(in_blocks), torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
        with Checkpointing(model, choice):
            for _ in range(3):
                mean_square(model, x).backward()
        left = model.last.count, model.last.edges, list(model.last.neighbors)
        return [*gradients(model), x.grad], left

    (treated, left), (plain, expected) = run({"blocks.*": treatment}), run({})
    assert_same(treated, plain)
    assert left == expected == (0, [1.0], [[1, 2, 3, 4], [5]])  # changed once


@pytest.mark.parametrize("is_inside", [True, False])
@pytest.mark.parametrize("treatment", ["full", "selective"])
def test_an_array_that_changes_after_the_block_is_refused(treatment, is_inside):
    class Scaled(nn.Linear):
        def forward(self, x, given):
            return super().forward(x).tanh() * float((given.edges if is_inside else given)[0])

    model, mesh = nn.Sequential(Scaled(4, 4)), Mesh(None)
    mesh.edges = np.array([2.0])
    with Checkpointing(model, {"0": treatment}):
        loss = model[0](torch.ones(2, 4, requires_grad=True), mesh if is_inside else mesh.edges).sum()
        mesh.edges -= 1
        with pytest.raises(ChangedInputError, match=r"written through \.data or NumPy"):
            loss.backward()


def test_another_kind_of_list_is_refused_with_a_way_out():
    model, x = Sharing(collections.deque), torch.randn(3, 4)
    told = r"a container with other tensors.*list\(container\).*'offload'"
    with Checkpointing(model, {"blocks.*": "full"}), pytest.raises(ChangedInputError, match=told):
        mean_square(model, x).backward()


def test_unseen_write_check_takes_no_memory():
    def recorded(num_before):
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 8))), torch.randn(64, 8)
        with Checkpointing(model, {"1": "full"}):
            for _ in range(num_before):
                gradients_of(model, x)
            model.zero_grad()
            with Recorder() as recorder:
                hold(recorder, model, x)
                gradients_of(model, x)
            model.zero_grad()  # the profiler would count some of what is freed, if an earlier one knew their addresses
            peak = trace_allocations(lambda: gradients_of(model, x)).peak
        return recorder.recording().peak_bytes(), peak

    assert recorded(0) == recorded(3)


def gradients_of(model, x):
    model.zero_grad()
    mean_square(model, x).backward()
    return gradients(model)


def test_frozen_block_may_change_its_input():
    model, x = overwriting_model(beginning_in_place)
    with Checkpointing(model.requires_grad_(False), {"block": "full"}):
        assert not model(x).requires_grad


def test_another_repetition_is_refused():
    calls = itertools.count()  # no attribute of the module or its class, which would be as in the first run

    class Fickle(nn.Linear):
        def forward(self, x):
            x = super().forward(x).tanh()
            return (torch.addmm(self.bias, x, self.weight) if next(calls) else x @ self.weight).tanh()

    model = nn.Sequential(Fickle(4, 4), nn.Tanh())
    with Checkpointing(model, {"0": "selective"}):
        loss = model(torch.randn(4, 4)).sum()
        with pytest.raises(mk.errors.StateError, match=r"aten\.addmm.* where the first one ran aten\.mm.*'offload'"):
            loss.backward()


def assert_same_gradients(treatment, dtype, compiles):
    found = []
    for choice in ({}, {"[0-3]": treatment}):
        torch.manual_seed(0)
        model, x = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in "1234")), torch.randn(99, 64)
        with Checkpointing(model, choice), torch.autocast("cpu", dtype, enabled=dtype is not None):
            run = torch.compile(model, backend="aot_eager") if compiles else model
            mean_square(run, x).backward()
        found.append(gradients(model))
    assert_same(*found)


@pytest.mark.parametrize("treatment", TREATMENTS)
def test_under_autocast(treatment):
    assert_same_gradients(treatment, torch.bfloat16, compiles=False)


@pytest.mark.slow
@pytest.mark.parametrize("treatment", TREATMENTS)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch.compile reads it
def test_compiled(treatment):
    assert_same_gradients(treatment, None, compiles=True)


@pytest.mark.parametrize("treatment", TREATMENTS)
@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_treated_by_itself(treatment, how):
    model, x, _ = build("mlp")
    checkpointing = Checkpointing(model, {"[0-3]": treatment})
    mean_square(model, x).backward()
    twin = how(model)
    written = [offload.written_bytes for offload in offloads(checkpointing)]
    checkpointing.close()
    assert_same(outcome(twin, x)[0], outcome(model, x)[0])
    assert [offload.written_bytes for offload in offloads_of(twin)] == [2 * each for each in written]


def offloads_of(model):
    (offload,) = {block.forward._offload for block in model}
    return list(offload._offloads.values())


@pytest.mark.parametrize("treatment", TREATMENTS)
def test_does_nothing_without_gradients(treatment):
    model, x, _ = build("mlp")
    with Checkpointing(model.eval(), {"[0-3]": treatment}) as checkpointing, torch.no_grad():
        with FakeTensorMode(allow_non_fake_inputs=True):
            model(x)
        model(x)
        assert offloads(checkpointing) == []


@pytest.mark.parametrize("treatment", TREATMENTS)
def test_the_graph_outlives_the_treatment(treatment):
    found = []
    for choice in ({}, {"levels.[0-3]": treatment}):
        model, x, _ = build("unet")
        with Checkpointing(model, choice):
            torch.manual_seed(1)
            loss = mean_square(model, x)
        loss.backward()
        found.append(gradients(model))
    assert_same(*found)


@pytest.mark.parametrize("treatment", TREATMENTS)
def test_out_of_memory_inside_a_block_leaves_nothing(treatment):
    model, x, _ = build("mlp")
    with Checkpointing(model, {"[0-3]": treatment}) as checkpointing:
        mean_square(model, x).backward()
        sizes = []
        model.zero_grad()
        with FailingOperator() as counter:
            mean_square(model, x).backward()
        for place in range(2, counter.num_operators, 5):
            model.zero_grad()
            with FailingOperator(place), pytest.raises(torch.OutOfMemoryError):
                mean_square(model, x).backward()
            assert not _get_current_dispatch_mode_stack()
            assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
            for offload in offloads(checkpointing):
                sizes.append(os.fstat(offload._stores[torch.device("cpu")]._file.fileno()).st_size)
                assert offload.held_bytes == 0
        assert len(set(sizes)) <= 1
        model.zero_grad()
        found = outcome(model, x)
    model.zero_grad()
    assert_same(found, outcome(model, x))


@pytest.mark.parametrize("treatment", TREATMENTS)
def test_the_wrapper_recovers_inside_a_block(treatment):
    found = []
    for choice, places in ((None, ()), ({"[0-3]": treatment}, (9, 60))):
        model, x, _ = build("mlp")
        model.double().eval()  # no dropout: parts of another size would draw other numbers
        trainer = trainer_of(model, checkpoint=choice, probe=False)
        assert trainer.checkpointed_blocks == (("0", "1", "2", "3") if choice and treatment != "offload" else ())
        with FailingOperator(*places):
            results = [trainer.train_step(x.double(), mean_square) for _ in range(2)]
        assert sum(result.num_ooms for result in results) == len(places)
        found.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(*found, rtol=0, atol=1e-14)


def test_blocks_share_saved_tensors():
    """The result of one block is the input of the next one: tanh and linear save the same storage."""
    model, x, _ = build("mlp")
    with Checkpointing(model, {"[0-3]": "offload"}) as checkpointing:
        loss = mean_square(model, x)
        (offload,) = offloads(checkpointing)
        # Of each block its input, and as wide as two of these: the product, dropout's noise and result. And the end.
        assert offload.written_bytes == x.nbytes * (4 * (1 + 2 + 2 + 2) + 1)
        loss.backward()


def ddp_worker(rank, folder):
    join(rank, folder)
    found = []
    for choice in ({}, dict(zip("012", TREATMENTS, strict=True))):
        model, x, _ = build("mlp")
        with Checkpointing(model, choice):
            outcome(DistributedDataParallel(model), x[128 * rank : 128 * rank + 128])
        found.append(gradients(model))
    assert_same(*found)
    dist.barrier()
    leave()


@pytest.mark.slow
def test_on_two_ranks(tmp_path):
    spawn(ddp_worker, tmp_path)


RUNS = Noted()  # attributes of a module are as in the first run, and so are lists


class Recursive(nn.Module):
    """A Tree-LSTM's form: the forward of a node calls itself for the child."""

    def __init__(self, by_call):
        super().__init__()
        self.linear, self.drop, self.by_call = nn.Linear(4, 4), nn.Dropout(0.2), by_call

    def forward(self, x, depth):
        if depth < 0:
            raise ValueError("a wrong depth")
        h = (self if self.by_call else self.forward)(x, depth - 1) if depth else x
        RUNS.append(depth)
        return self.drop(self.linear(h).tanh())


@pytest.mark.parametrize("by_call", [False, True])
@pytest.mark.parametrize(("treatment", "times"), [("full", 2), ("selective", 2), ("offload", 1)])
def test_a_forward_that_calls_itself_runs_once_more(treatment, times, by_call, recwarn):
    def run(choice):
        torch.manual_seed(0)
        RUNS.take()
        model, x = nn.ModuleDict({"cell": Recursive(by_call)}), torch.randn(3, 4)
        with Checkpointing(model, choice):
            with pytest.raises(ValueError, match="a wrong depth"):
                model["cell"](x, -1)  # what follows is treated all the same
            for _ in range(2):
                model["cell"](x, 5).square().mean().backward()
        return len(RUNS.take()), gradients(model)

    (num_runs, found), (plain_runs, expected) = run({"cell": treatment}), run({})
    assert num_runs == times * plain_runs == times * 2 * 6
    assert_same(found, expected)
    assert len(recwarn) == 0


class Noisy(nn.Module):
    """Draws from generators of its own, and of every kind."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.noise = torch.Generator().manual_seed(1)
        self.others = [np.random.default_rng(2), random.Random(3)]

    def forward(self, x):
        scale = self.others[0].normal() + self.others[1].random()
        return torch.tanh(self.linear(x * torch.randn(x.shape, generator=self.noise) * scale))


@pytest.mark.parametrize("treatment", ["full", "selective"])
def test_replays_generators_of_a_block(treatment):
    found = []
    for choice in (None, {"[01]": treatment}):
        torch.manual_seed(0)
        model = nn.Sequential(Noisy(), Noisy(), nn.Linear(4, 1))
        checkpointing = Checkpointing(model, choice) if choice else contextlib.nullcontext()
        with checkpointing:
            for _ in range(2):
                model(torch.ones(3, 4)).sum().backward()
        states = [each.noise.get_state() for each in model[:2]] + [model[0].others[1].getstate()]
        found.append((gradients(model), states))
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("treatment", TREATMENTS)
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_recurrent_layers_modifying_parts_of_a_result(kind, treatment):
    """PyTorch's GRU on a CPU changes parts made by `unsafe_chunk`: the version of the whole does not show it."""

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.head = nn.Sequential(kind(16, 64, 2)), nn.Linear(64, 3)

        def forward(self, x):
            return self.head(self.block(x)[0])

    torch.manual_seed(0)
    model, x = Recurrent(), torch.randn(6, 8, 16)
    found = []
    for choice in ({}, {"block": treatment}):
        model.zero_grad()
        with Checkpointing(model, choice):
            mean_square(model, x).backward()
        found.append(gradients(model))
    assert_same(*found)


def test_a_changed_mask_is_noticed_whose_sum_in_one_byte_is_the_same():
    """256 values that turn from one to zero leave a sum of bytes as it was."""

    class Masked(nn.Linear):
        def forward(self, x, mask):
            return super().forward(x * mask.view(-1, 1)).tanh()

    model, mask = nn.ModuleList([Masked(4, 4)]), torch.ones(512, dtype=torch.bool)
    with Checkpointing(model, {"0": "full"}):
        loss = model[0](torch.randn(512, 4, requires_grad=True), mask).sum()
        mask.numpy()[:256] = False
        with pytest.raises(ChangedInputError, match="other values than in the forward"):
            loss.backward()


def meta_loss(model, x):
    """One unrolled step of gradient descent, as MAML takes it."""
    own = dict(model.named_parameters())
    inner = torch.func.functional_call(model, own, (x,)).square().mean()
    slopes = torch.autograd.grad(inner, tuple(own.values()), create_graph=True)
    fast = {name: each - 0.5 * slope for (name, each), slope in zip(own.items(), slopes, strict=True)}
    return torch.func.functional_call(model, fast, (x,)).square().mean()


class TestTensorsInPlaceOfParameters:
    """A block runs again with those tensors that `functional_call` had put in the place of its parameters."""

    @staticmethod
    def make():
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in "12")).double()

    @pytest.mark.parametrize("treatment", TREATMENTS)
    def test_meta_learning(self, treatment):
        model, x = self.make(), torch.randn(4, 8, dtype=torch.float64)
        meta_loss(model, x).backward()
        right = gradients(model)
        model.zero_grad()
        with Checkpointing(model, {"?": treatment}):
            meta_loss(model, x).backward()
        assert_same(gradients(model), right)

    @pytest.mark.parametrize("treatment", TREATMENTS)
    def test_parameters_of_another_model(self, treatment):
        model, other, x = self.make(), copy.deepcopy(self.make()), torch.randn(4, 8, dtype=torch.float64)
        with torch.no_grad():
            other[0][0].weight.mul_(2)
        other(x).square().mean().backward()
        right, own = gradients(other), list(model.parameters())
        other.zero_grad()
        with Checkpointing(model, {"?": treatment}):
            torch.func.functional_call(model, dict(other.named_parameters()), (x,)).square().mean().backward()
        assert_same(gradients(other), right)
        assert gradients(model) == [None] * 8
        assert all(now is was for now, was in zip(model.parameters(), own, strict=True))

    @pytest.mark.parametrize("treatment", TREATMENTS)
    def test_modes_and_frozen_parameters_between_forward_and_backward(self, treatment):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 8)) for _ in "12")).double()
        x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)

        def gradient():
            torch.manual_seed(0)
            out = model.train()(x)
            model.eval().requires_grad_(requires_grad=False)
            try:
                return torch.autograd.grad(out.square().mean(), x)[0]
            finally:
                model.requires_grad_()

        right = gradient()
        with Checkpointing(model, {"?": treatment}):
            for _ in range(3):
                torch.testing.assert_close(gradient(), right)

    def test_torch_runs_again_with_the_own_parameters(self):
        model, x = self.make(), torch.randn(4, 8, dtype=torch.float64)
        meta_loss(model, x).backward()
        right = gradients(model)
        model.zero_grad()
        for block in model:
            run = block.forward
            block.forward = lambda x, run=run: torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False)
        meta_loss(model, x).backward()
        assert max((a - b).abs().max() for a, b in zip(gradients(model), right, strict=True)) > 1e-3


@pytest.mark.parametrize("treatment", ["full", "selective", "offload"])
@pytest.mark.parametrize("place", ["input", "parameters"])
def test_a_gradient_that_is_required_later_does_not_change_the_rerun(place, treatment):
    """NeuS calls requires_grad_() on the points between two forwards; a GAN unfreezes a network before backward."""

    def gradient(**settings):
        torch.manual_seed(0)
        block = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in "12")).double()
        model = nn.ModuleDict({"first": nn.Linear(8, 8).double(), "block": block})
        x = torch.randn(8, 8, dtype=torch.float64)
        with mk.Checkpointing(model, settings) if settings else contextlib.nullcontext():
            if place == "input":
                y = model["block"](x)
                x.requires_grad_()
                (slope,) = torch.autograd.grad(model["block"](x)[:, 0].sum(), x, create_graph=True)
                loss = y.square().mean() + slope.square().mean()
            else:
                block.requires_grad_(requires_grad=False)
                loss = model["block"](model["first"](x)).square().mean()
                block.requires_grad_(requires_grad=True)
            loss.backward()
        return [each.grad for each in model.parameters()]

    assert_same(gradient(block=treatment), gradient(), 1e-14)


class Handling(nn.Module):
    """Runs its operators where an exception is handled: torch ends a recomputation by one."""

    def __init__(self, how):
        super().__init__()
        self.up, self.down, self.how = nn.Linear(8, 16), nn.Linear(16, 8), how

    def operate(self, x):
        return x + self.down(F.gelu(self.up(x)))

    def forward(self, x):
        try:
            out = self.operate(x)
        except Exception as error:  # noqa: BLE001 - as libraries do around each operator
            if self.how == "raise another":
                raise ValueError(f"an operator failed: {type(error).__name__}") from None
            if self.how == "fall back at once":
                return self.operate(x)
            out = None
        return self.operate(x) if out is None else out


@pytest.mark.parametrize("treatment", ["full", "selective"])
@pytest.mark.parametrize("how", ["raise another", "fall back at once", "fall back later"])
def test_a_block_that_handles_exceptions_is_recomputed(how, treatment):
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Handling(how) for _ in range(3))).double(), torch.randn(4, 8, dtype=torch.float64)
    mean_square(model, x).backward()
    expected = gradients(model)
    model.zero_grad()
    with mk.Checkpointing(model, dict.fromkeys("012", treatment)):
        mean_square(model, x).backward()
    torch.testing.assert_close(gradients(model), expected, rtol=1e-13, atol=1e-15)


def test_an_error_of_a_recomputed_block_is_its_own():
    class Failing(Handling):
        def operate(self, x):
            if torch._C._current_graph_task_id() >= 0:  # in backward
                raise KeyError("not twice")
            return super().operate(x)

    model = nn.Sequential(Failing("raise another"), nn.Linear(8, 1)).double()
    with mk.Checkpointing(model, {"0": "full"}):
        loss = mean_square(model, torch.ones(4, 8, dtype=torch.float64))
        with pytest.raises(ValueError, match="an operator failed: KeyError"):
            loss.backward()
