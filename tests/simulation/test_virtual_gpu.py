"""Users' code on a virtual GPU: the values it sees, the memory it takes, and the state it leaves."""

import copy
import pickle
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

import memkit as mk
from memkit import is_out_of_memory, recover_from_oom
from memkit._core.errors import ConfigError, InputError, InputTypeError, StateError
from memkit._machine.devices import allocator_counters
from memkit._simulation.cuda.allocator import AllocatorSettings
from memkit._torch.cuda import rules_of
from memkit._torch.versions import parse
from memkit.predict.usage import estimate_memory_usage
from memkit.predict.virtual_gpu import VirtualGPU
from memkit.train.wrapper import MemoryEfficientTrainingWrapper
from tests.helpers import assert_refused
from tests.rules import VERSION

RULES = rules_of(VERSION)
FIRST_ON_HOPPER = "cudnn" if {(9, 0), (9, None)} & set(RULES.prefers_cudnn) else "flash"
KIB, MIB = 2**10, 2**20
WORKSPACE = 2 * 4 * MIB + 8 * 16 * KIB  # of one cuBLAS handle on an RTX 4090


def perceptron():
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64))


def operators(card):
    recording = card.record().recording
    return {name.removeprefix("aten.").split(".")[0] for name in recording.names["operator"]}


# ---------------------------------------------------------------------------------------------- what code sees


def test_cuda_is_there_inside_and_gone_outside():
    torch.ones(2, requires_grad=True).sum().backward()  # autograd's threads are counted at the first backward
    owners = torch.Tensor, FakeTensor, torch.cuda, torch.cuda.memory, torch.accelerator, torch.utils, nn.Module
    before = [dict(vars(owner)) for owner in owners]
    functions = torch.compile, torch.Generator, torch.is_autocast_enabled, torch.clear_autocast_cache
    with VirtualGPU("RTX 4090"):
        assert torch.cuda.is_available()
        assert torch.cuda.device_count() == 1
        assert "4090" in torch.cuda.get_device_name(0)
        assert torch.cuda.get_device_capability() == (8, 9)
        assert torch.cuda.get_device_properties(0).total_memory > 23 * 2**30
        x = torch.ones(4, 4, device="cuda")
        assert x.device == torch.device("cuda:0")
        assert x.is_cuda
        assert x.get_device() == 0
        torch.set_default_device("cuda")
        assert torch.ones(2).is_cuda
    for owner, had in zip(owners, before, strict=True):  # submodules may have been loaded
        assert {name: value for name, value in vars(owner).items() if name in had} == had
        assert not any(callable(vars(owner)[name]) for name in vars(owner).keys() - had.keys())
    assert functions == (torch.compile, torch.Generator, torch.is_autocast_enabled, torch.clear_autocast_cache)
    assert torch.ones(2).device.type == "cpu"
    assert not torch.cuda.is_available() or torch.version.cuda


def test_the_accelerator_is_the_card(card):
    accelerator = torch.accelerator
    assert accelerator.current_accelerator() == torch.device("cuda")  # without an index, as on a GPU
    assert (accelerator.device_count(), accelerator.current_device_index()) == (1, 0)
    x = torch.ones(1000, device=accelerator.current_accelerator())
    assert x.device == torch.device("cuda:0")
    if hasattr(accelerator, "memory"):  # 2.8 lacks it
        with accelerator.device_index(0):
            held = accelerator.memory_allocated(), accelerator.memory.memory_allocated()
        assert held == (card.allocated_bytes, card.allocated_bytes) == (4096, 4096)


@pytest.mark.usefixtures("card")
def test_the_host_holds_data_and_the_card_does_not():
    x = torch.arange(5)
    assert x.sum().item() == 10
    assert type(torch.randn(10, 10)) is torch.Tensor
    assert (x + 1).tolist() == [1, 2, 3, 4, 5]
    y = x.cuda()
    assert y.to("cuda") is y
    assert y.cpu().device.type == "cpu"
    assert (y * 2).device.type == "cuda"
    with pytest.raises(RuntimeError, match="device"):
        torch.ones(3) + torch.ones(3, device="cuda")


def test_weights_of_a_large_model_take_no_memory(card):
    model = nn.Linear(100_000, 100_000, bias=False)  # 37 GiB
    with pytest.raises(torch.OutOfMemoryError):
        model.cuda()
    assert card.allocated_bytes == 0


@pytest.mark.usefixtures("card")
def test_parameters_stay_the_same_objects_and_tied():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8))
    model[1].weight = model[0].weight
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.to("cuda")
    assert model[1].weight is model[0].weight
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert optimizer.param_groups[0]["params"][0].is_cuda
    assert model[2].running_mean.is_cuda


def test_hooks_and_attributes_of_a_parameter_move_with_it():
    torch.manual_seed(0)
    layer, twin = nn.Linear(3, 2).double(), nn.Linear(3, 2).double()
    twin.load_state_dict(layer.state_dict())
    ran = []

    def step(parameter):
        with torch.no_grad():
            parameter.sub_(parameter.grad)
        parameter.grad = None
        ran.append("step")

    def double(gradient):
        ran.append("double")
        return 2 * gradient

    layer.weight.register_post_accumulate_grad_hook(step)
    removable, layer.weight.group = layer.weight.register_hook(double), "decayed"
    with VirtualGPU("RTX 4090"):
        for moves in (
            layer.cuda,
            layer.half,
            lambda: setattr(layer.weight, "data", layer.weight.data.cpu()),
            layer.cuda,
        ):
            moves()
            assert layer.weight.group == "decayed"
        layer(torch.ones(4, 3, dtype=torch.half, device="cuda")).sum().backward()
        assert (ran, layer.weight.grad) == (["double", "step"], None)
    x = torch.randn(4, 3, dtype=torch.float64)
    layer(x).square().sum().backward()  # each hook is there once
    twin(x).square().sum().backward()
    assert (ran, layer.weight.group) == (["double", "step"] * 2, "decayed")
    torch.testing.assert_close(layer.weight.detach(), twin.weight.detach() - 2 * twin.weight.grad, rtol=1e-13, atol=0)
    removable.remove()
    assert len(layer.weight._backward_hooks) == 0


@pytest.mark.usefixtures("card")
def test_copies_are_copies():
    model = nn.Linear(1000, 1000).cuda()  # made without data
    model(torch.ones(2, 1000, device="cuda")).sum().backward()
    twin = copy.deepcopy(model)
    assert isinstance(twin.weight, nn.Parameter)
    assert twin.weight.is_cuda
    assert twin.weight is not model.weight
    assert twin.weight.grad is not model.weight.grad
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)


def test_a_module_from_outside_has_its_data_back():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    expected = copy.deepcopy(model.state_dict())
    with VirtualGPU("RTX 4090"):
        model.cuda()
        model(torch.randn(2, 3, device="cuda")).sum().backward()
        assert model[0].weight.grad.is_cuda
    torch.testing.assert_close(model.state_dict(), expected, rtol=0, atol=0)
    model(torch.randn(2, 3)).sum().backward()  # and it works


def test_numbers_from_the_card_are_guessed_and_counted(card):
    loss = torch.randn(3, device="cuda").square().mean()
    assert loss.item() == 1.0
    assert not bool((loss > 0).any())
    lengths = torch.tensor([2, 3]).cuda()
    assert lengths.tolist() == [2, 3]
    assert lengths.sum().item() == 5
    assert sum(card.guesses.values()) == 2
    assert all("test_virtual_gpu.py" in guess for guess in card.guesses)


@pytest.mark.usefixtures("card")
@pytest.mark.filterwarnings("ignore:To copy construct")  # torch's own
def test_new_tensors_and_types_are_those_of_another_tensor():
    x = torch.ones(3, device="cuda")
    for data in ([1, 2], 5, torch.arange(4), x, [x[0], x[1]], np.ones(2)):
        made = x.new_tensor(data)
        assert (made.shape, made.dtype, made.device) == (torch.as_tensor(data).shape, x.dtype, x.device)
    assert x.new_tensor([1], dtype=torch.int64, device="cpu", requires_grad=False).tolist() == [1]
    assert x.long().new_tensor([2, 3]).tolist() == [2, 3]
    assert x.new_tensor([1.0], requires_grad=True).requires_grad
    assert torch.ones(2).new_tensor([1, 2]).tolist() == [1.0, 2.0]
    assert x.type() == "torch.cuda.FloatTensor"
    assert (torch.ones(2).type(), x.cpu().half().type()) == ("torch.FloatTensor", "torch.HalfTensor")
    assert torch.arange(3).type(x.type()).type() == x.type()
    assert x.type("torch.FloatTensor").device.type == "cpu"


@pytest.mark.filterwarnings("error")
def test_storages_without_data_have_addresses_that_agree_with_their_tensors():
    large = torch.empty(2**20)  # outside: it has data
    with VirtualGPU("T4"):
        model, on_host = perceptron().cuda(), torch.randn(2**20)
        tensors = [*model.state_dict().values(), on_host, large]
        assert len({each.untyped_storage().data_ptr() for each in tensors}) == len(tensors)
        for each in tensors:
            start = each.untyped_storage().data_ptr()
            assert 0 != start == each.data_ptr() == each.view(-1).untyped_storage().data_ptr()
            assert each.view(-1)[1:].data_ptr() == start + each.element_size()
    assert torch.UntypedStorage.data_ptr is torch._C.StorageBase.data_ptr


@pytest.mark.usefixtures("card")
def test_random_state_and_streams_answer():
    generator = torch.Generator(device="cuda").manual_seed(3)
    assert all(isinstance(each, torch.Generator) for each in (generator, torch.default_generator))
    assert not isinstance(3, torch.Generator)
    assert torch.randn(3, generator=generator, device="cuda").is_cuda
    torch.cuda.manual_seed_all(0)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.synchronize()
    start = torch.cuda.Event(enable_timing=True)
    start.record()
    assert start.elapsed_time(start) == 0
    assert torch.compile(torch.sin)(torch.ones(2, device="cuda")).is_cuda


# ---------------------------------------------------------------------------------------------- what it takes


def test_allocated_bytes_are_rounded_storages_and_workspaces(card):
    x = torch.empty(1000, device="cuda")  # 4000 B
    assert torch.cuda.memory_allocated() == card.allocated_bytes == 4096
    assert torch.cuda.memory_reserved() == 2 * MIB
    y = x.view(10, 100)[2:]
    assert card.allocated_bytes == 4096
    del x, y
    assert card.allocated_bytes == 0
    a = torch.empty(64, 64, device="cuda", requires_grad=True)
    b = a @ a
    assert card.allocated_bytes == 2 * 64 * 64 * 4 + WORKSPACE
    b.sum().backward()
    assert card.allocated_bytes == 3 * 64 * 64 * 4 + 2 * WORKSPACE  # autograd's thread has a handle of its own
    assert torch.cuda.max_memory_allocated() == card.peak_bytes >= card.allocated_bytes
    assert card.timeline.max() == card.peak_bytes
    torch.cuda.reset_peak_memory_stats()
    assert card.peak_bytes == card.allocated_bytes


def test_counters_read_by_scripts(card):
    half, other = (torch.empty(12 * MIB, dtype=torch.uint8, device="cuda") for _ in range(2))
    blocks = [torch.empty(3 * MIB, dtype=torch.uint8, device="cuda") for _ in range(4)]
    del half, other, blocks[1]
    stats = torch.cuda.memory_stats()
    assert stats["active_bytes.all.current"] == torch.cuda.memory_allocated() == 9 * MIB
    assert stats["active_bytes.all.peak"] == torch.cuda.max_memory_allocated() == 36 * MIB
    # Of the segment of 20 MiB, two blocks of 3 MiB are free on one side, and what was never used on the other.
    assert stats["inactive_split_bytes.all.current"] == 11 * MIB
    assert allocator_counters(torch.device("cuda")).inactive_split_bytes == 11 * MIB


def test_the_estimate_is_the_second_step(card):
    def loss_fn(model, x):
        return F.mse_loss(model(x), x)

    model, x = perceptron().cuda(), torch.randn(512, 64).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        loss_fn(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()
    peak_bytes = card.peak_bytes
    seen = card.estimate()
    assert seen.peak_bytes == peak_bytes
    card._stack.close()
    estimate = estimate_memory_usage(perceptron(), torch.randn(512, 64), loss_fn=loss_fn, target="RTX 4090")
    assert estimate.peak_bytes == peak_bytes
    assert estimate.reserved_bytes >= peak_bytes
    assert estimate.total_bytes == estimate.reserved_bytes + estimate.context_bytes
    assert estimate.fits("RTX 4090")
    assert not estimate.fits("100MiB")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_cudas(card, dtype):
    x = torch.randn(16, 64, device="cuda", requires_grad=True)
    weight = torch.randn(64, 64, device="cuda", requires_grad=True)
    with torch.autocast("cuda", dtype=dtype):
        assert torch.is_autocast_enabled()
        assert (x @ weight).dtype is dtype
        allocated = card.allocated_bytes
        assert F.linear(x, weight).dtype is dtype
        assert card.allocated_bytes == allocated  # both casts were kept
        low = x @ weight
        # Float32 on CUDA, but not on a CPU.
        assert {low.exp().dtype, low.softmax(-1).dtype, F.layer_norm(low, (64,)).dtype, low.sum().dtype} == {
            torch.float32
        }
        assert torch.cat([low, low]).dtype is dtype
    with torch.autocast("cuda", dtype=dtype), torch.no_grad():
        allocated = card.allocated_bytes
        torch.mm(x, weight)
        assert card.allocated_bytes == allocated + (x.nbytes + weight.nbytes) // 2  # kept without gradients too
    with torch.autocast("cuda", dtype=dtype), torch.inference_mode():
        allocated = card.allocated_bytes
        torch.mm(x, weight)
        assert card.allocated_bytes == allocated
    assert (x @ weight).dtype is torch.float32


@pytest.mark.parametrize(
    ("gpu", "dtype", "width", "dropout", "expected"),
    [
        ("RTX 4090", torch.bfloat16, 64, 0.0, "_scaled_dot_product_flash_attention"),
        ("RTX 4090", torch.float32, 64, 0.0, "_scaled_dot_product_efficient_attention"),
        ("RTX 4090", torch.float32, 63, 0.0, "bmm"),
        ("RTX 4090", torch.bfloat16, 200, 0.1, "_scaled_dot_product_efficient_attention"),
        ("T4", torch.float16, 64, 0.0, "_scaled_dot_product_efficient_attention"),
        ("H100", torch.bfloat16, 64, 0.0, f"_scaled_dot_product_{FIRST_ON_HOPPER}_attention"),
    ],
)
def test_attention_is_the_cards(gpu, dtype, width, dropout, expected):
    with VirtualGPU(gpu) as card:
        q = torch.randn(2, 4, 32, width, device="cuda", dtype=dtype, requires_grad=True)
        F.scaled_dot_product_attention(q, q, q, dropout_p=dropout).sum().backward()
        assert expected in operators(card)


def test_a_step_takes_cudas_operators(card):
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    out = model(torch.randn(8, 64, device="cuda"))
    mask_bytes = {s.nbytes for s in card.record().recording.top(20) if "native_dropout" in s.operator}
    assert mask_bytes == {8 * 64 * 4, 8 * 64}  # the mask is of bytes
    out.sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert {"_foreach_norm", "_foreach_sqrt"} <= operators(card)
    state = optimizer.state[model[0].weight]
    assert (state["step"].device.type, state["exp_avg"].device.type) == ("cpu", "cuda")


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_fused_optimizers_take_only_their_state(card, make):
    model = nn.Linear(512, 512, bias=False).cuda()
    optimizer = make(model.parameters(), lr=0.1, fused=True)
    if make is torch.optim.Adagrad and parse(torch.__version__) < (2, 12):
        model(torch.ones(2, 512, device="cuda")).sum().backward()
        with pytest.raises(RuntimeError, match="fused=True"):  # as on a card: 2.10 has no kernel for CUDA, 2.12 has one
            optimizer.step()
        return
    for _ in range(2):
        model(torch.ones(2, 512, device="cuda")).sum().backward()
        allocated = card.allocated_bytes
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
    assert card.peak_bytes <= allocated + 4 * KIB  # scalars


def test_view_of_known_integers_stays_known(card):
    rows = torch.arange(4096).view(64, 64).cuda()
    allocated = card.allocated_bytes
    views = [rows[:, :-1], rows[:, 1:], rows[3], rows.T, rows.view(-1), rows[::2].unsqueeze(0)]
    assert card.allocated_bytes == allocated
    assert (views[2].tolist()[:3], int(views[1][0, 0])) == ([192, 193, 194], 1)
    copy = rows[:, :-1].contiguous()
    assert card.allocated_bytes == allocated + 64 * 63 * 8
    assert int(copy[1, 0]) == 64
    rows += 1  # written in place: what was known of its views is no more
    assert card.allocated_bytes == allocated + 64 * 63 * 8


@pytest.mark.parametrize(
    ("parts_of", "are_views"),
    [
        (lambda edges: edges.unbind(0), True),
        (lambda edges: edges.split(1), True),
        (lambda edges: edges.t().chunk(2), True),
        (lambda edges: (lambda sources, targets: (sources, targets))(*edges), True),
        (lambda edges: tuple(edges.sort(1)), False),
        (lambda edges: tuple(edges.max(1)), False),
    ],
    ids=["unbind", "split", "chunk", "unpacked", "sort", "max"],
)
def test_parts_of_whole_numbers_stay_on_the_card(card, parts_of, are_views):
    """`sources, targets = edges` is how graphs are taken apart."""
    edges = torch.tensor([[0, 1, 1], [2, 0, 1]])
    on_card = edges.to("cuda")
    allocated = card.allocated_bytes
    parts = parts_of(on_card)
    assert {part.device for part in parts} == {torch.device("cuda", 0)}
    assert (card.allocated_bytes == allocated) == are_views
    assert [part.tolist() for part in parts] == [part.tolist() for part in parts_of(edges)]


@pytest.mark.usefixtures("card")
def test_recurrent_layers_run_without_a_warning():
    layer = nn.LSTM(8, 16, num_layers=2, batch_first=True).cuda()
    out, _ = layer(torch.ones(2, 5, 8, device="cuda"))
    out.sum().backward()
    assert layer.weight_hh_l1.grad.is_cuda


@pytest.mark.usefixtures("card")
def test_a_gradient_scaler_steps():
    model = nn.Linear(8, 8).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    with torch.autocast("cuda"):
        loss = model(torch.randn(4, 8, device="cuda")).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert optimizer.state


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_saves(use_reentrant):
    def peak(wrap):
        with VirtualGPU("RTX 4090") as card:
            blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 64)) for _ in range(4))
            blocks.cuda()
            x = torch.randn(4096, 64, device="cuda", requires_grad=True)
            for block in blocks:
                x = wrap(block, x)
            x.sum().backward()
            return card.peak_bytes

    plain = peak(lambda block, x: block(x))
    less = peak(lambda block, x: checkpoint(block, x, use_reentrant=use_reentrant))
    assert less < 0.7 * plain


# ---------------------------------------------------------------------------------------------- where it runs out


def test_out_of_memory_at_the_line_of_the_card(card):
    x = torch.empty(20 * 2**30, dtype=torch.uint8, device="cuda")
    with pytest.raises(
        torch.OutOfMemoryError, match=r"Tried to allocate 10\.00 GiB. GPU 0 has a total capacity"
    ) as caught:
        torch.empty(10 * 2**30, dtype=torch.uint8, device="cuda")
    assert is_out_of_memory(caught.value)
    assert card.allocated_bytes == x.numel()
    assert card.estimate().temporaries_bytes == x.numel()  # what did not fit was never there


@pytest.mark.usefixtures("card")
def test_recovery_finds_fitting_size():
    tried = []

    def step(size):
        tried.append(size)
        return torch.empty(size, 2**30, dtype=torch.uint8, device="cuda").shape

    assert recover_from_oom(step, [64, 32, 16]) == (16, 2**30)
    assert tried == [64, 32, 16]


@pytest.mark.parametrize("num_rows", [50_000, pytest.param(400_000, marks=pytest.mark.slow)])
def test_the_wrapper_makes_the_batch_fit(num_rows):
    """Blocks run again, and where that does not suffice, the batch is split."""
    with VirtualGPU("RTX 3060") as card:
        model = nn.Sequential(
            *(nn.Sequential(nn.Linear(2048, 8192), nn.GELU(), nn.Linear(8192, 2048)) for _ in range(6))
        )
        model.cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        trainer = MemoryEfficientTrainingWrapper(model, optimizer, precision="fp16-mixed", max_grad_norm=1.0)
        x = torch.randn(num_rows, 2048, device="cuda")
        results = [trainer.train_step(x, lambda model, x: model(x).float().square().mean()) for _ in range(2)]
        assert [result.stepped for result in results] == [True, True]
        assert results[0].num_ooms >= 1
        assert (results[1].num_microbatches >= 2) == (num_rows == 400_000)
        assert bool(trainer.checkpointed_blocks) == (num_rows == 50_000)
        assert results[1].num_ooms == 0
        assert results[1].peak_bytes == card.peak_bytes < card.gpu.usable_bytes
        assert not card.guesses  # no number was read from the card


def test_settings_of_the_allocator_count():
    def reserved(settings):
        with VirtualGPU("RTX 4090", allocator_settings=settings) as card:
            blocks = [torch.empty(3 * MIB, dtype=torch.uint8, device="cuda") for _ in range(20)]
            del blocks[::2]
            large = torch.empty(25 * MIB, dtype=torch.uint8, device="cuda")
            del blocks, large
            return card.reserved_peak_bytes

    expandable = "expandable_segments:True"
    assert reserved(expandable) == reserved(AllocatorSettings.parse(expandable)) != reserved("")
    assert_refused(lambda: VirtualGPU("RTX 4090", allocator_settings="no_such_option:1"), ConfigError)


def test_wrong_arguments():
    assert_refused(lambda: VirtualGPU("RTX 4090", selected_fraction=50), ConfigError, "selected_fraction=50")
    assert_refused(lambda: VirtualGPU(None), InputTypeError, "the name of a GPU as a string")
    assert_refused(lambda: VirtualGPU("RTX 4091"), InputError, "RTX")
    amd = "a dry run on 'Instinct MI300X': got a GPU from AMD", "NVIDIA"
    assert_refused(lambda: VirtualGPU("MI300X"), ConfigError, *amd)


# ---------------------------------------------------------------------------------------------- errors and ends


def test_one_at_a_time(card):
    with pytest.raises(StateError, match="one virtual GPU at a time"), VirtualGPU("RTX 3090"):
        pass
    assert_refused(card.__enter__, StateError, "already entered")
    assert torch.cuda.is_available()


def test_tensors_of_the_card_end_with_it():
    with VirtualGPU("RTX 4090"):
        x = torch.ones(3, device="cuda", requires_grad=True)
        y = x * 2
    assert_refused(y.sum, StateError, "virtual GPU")


def test_all_is_undone_after_an_error():
    to = torch.Tensor.to
    with pytest.raises(ZeroDivisionError), VirtualGPU("RTX 4090"):
        _ = 1 / 0
    assert torch.Tensor.to is to
    assert (torch.ones(2) * 2).sum() == 4
    with torch.autocast("cpu"):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16


def test_run_failing_before_first_step_counts_parameters():
    with VirtualGPU("T4") as card:
        model = nn.Sequential(nn.Linear(1024, 1024), nn.BatchNorm1d(1024)).cuda()
        made_there = nn.Linear(1024, 1024, device="cuda")
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2**34, device="cuda")
    estimate = card.estimate()
    parameters = [*model.parameters(), *made_there.parameters()]
    assert estimate.parameters_bytes == sum(each.numel() * 4 for each in parameters)
    assert estimate.temporaries_bytes == 0
    assert estimate.other_bytes >= 2 * 1024 * 4  # the running statistics


def test_only_one_thread_gets_the_card():
    barrier, results = threading.Barrier(3), []
    refused = threading.Semaphore(0)

    def enter():
        barrier.wait()
        try:
            with VirtualGPU("T4") as gpu:
                weight = torch.ones(256, 256, device="cuda", requires_grad=True)
                (weight @ weight).sum().backward()
                results.append(gpu.peak_bytes > 256 * 256 * 4)
                for _ in range(2):
                    refused.acquire(timeout=10)
        except StateError as error:
            results.append(str(error))
            refused.release()

    threads = [threading.Thread(target=enter) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (entered,) = (each for each in results if isinstance(each, bool))
    assert entered
    assert sum("one virtual GPU at a time" in str(each) for each in results) == 2
    with VirtualGPU("T4"):  # and the next one may have it
        assert torch.cuda.is_available()


@pytest.mark.usefixtures("card")
def test_other_threads_of_the_host_go_on():
    results = []
    thread = threading.Thread(target=lambda: results.append((torch.ones(3) * 2).sum().item()))
    thread.start()
    thread.join()
    assert results == [6]


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.full((8,), float(index))


def collate(rows):
    large = torch.ones(len(rows), 2**19)  # larger than a tensor of the host that keeps its values, elsewhere
    return torch.stack(rows), large


@pytest.mark.parametrize("pin_memory", [False, True])
def test_large_batches_arrive_from_workers(card, pin_memory):
    loader = torch.utils.data.DataLoader(
        Rows(), batch_size=2, num_workers=1, collate_fn=collate, pin_memory=pin_memory, multiprocessing_context="fork"
    )
    batches = [(rows.tolist(), large.sum().item(), large.cuda()) for rows, large in loader]
    assert [rows[0][0] for rows, *_ in batches] == [0.0, 2.0]
    assert [num_ones for _, num_ones, _ in batches] == [2 * 2**19] * 2  # they have data
    assert card.allocated_bytes == 2 * 2 * 2**19 * 4
    assert not card.guesses


def test_a_tensor_without_data_does_not_travel(card):
    sent = pickle.dumps(torch.zeros(2**19, device="cuda"))
    assert_refused(lambda: pickle.loads(sent), StateError, "another process")


@pytest.mark.parametrize("call", ["estimate_memory_usage", "plan_training", "advise", "find_worst_batch"])
def test_a_simulation_inside_of_another_one_is_refused(call):
    model, batch = nn.Linear(4, 2), torch.randn(8, 4)
    others = {"plan_training": {"budget": "1MiB"}}
    predict = getattr(mk, call, None) or getattr(mk.predict, call)
    first, second = ([batch], model) if call == "find_worst_batch" else (model, batch)

    def loss_fn(module, rows):
        return module(rows).square().mean()

    def run(loss):
        return predict(first, second, loss, **others.get(call, {}))

    def inside():
        with VirtualGPU("RTX 4090"):
            run(loss_fn)

    def nested(module, rows):
        run(loss_fn)
        return loss_fn(module, rows)

    way_out = f"call {call}(...) before the block or the step, or after it"
    assert_refused(inside, StateError, way_out)
    assert_refused(lambda: estimate_memory_usage(model, batch, nested), StateError, way_out)
