"""Operators that copy, cast or choose by version inside: what they take on a GPU that is not there."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._python_dispatch import TorchDispatchMode

import memkit as mk
from memkit._core.errors import ConfigError, NotSimulatedError
from memkit._torch.cuda import rules_of
from tests.allocations import trace_allocations
from tests.helpers import assert_refused
from tests.versions import has, lacks

KIB, MIB = 2**10, 2**20


def taken(call, **options):
    """Bytes at the peak of a call above what was there, and what it leaves."""
    with mk.VirtualGPU("RTX 4090", **options) as gpu:
        run = call()
        before = gpu.allocated_bytes
        torch.cuda.reset_peak_memory_stats()
        kept = run()
        return gpu.peak_bytes - before, gpu.allocated_bytes - before, kept


# -------------------------------------------------------------------------------------------- attention masks


def masked(length, mask_heads=1, dtype=torch.float16):
    def call():
        x = torch.zeros(4, 8, length, 64, device="cuda", dtype=dtype, requires_grad=True)
        mask = torch.zeros(4, mask_heads, 1, length, device="cuda", dtype=dtype)
        return lambda: F.scaled_dot_product_attention(x, x, x, attn_mask=mask).sum().backward()

    return call


LENGTHS = sorted({*range(57, 98, 3), 64, 65, 72, 80, 81, 96, 97})


@pytest.mark.parametrize("version", ["2.6", "2.10", None])
def test_peak_and_reserve_grow_with_the_length_under_a_mask(version):
    peaks = [taken(masked(length), torch=version)[0] for length in LENGTHS]
    assert peaks == sorted(peaks)

    def reserved(length):
        """Of blocks of 10 MiB and more, which have segments of their own."""
        with mk.VirtualGPU("RTX 4090", torch=version) as gpu:
            x = torch.zeros(16, 16, length, 64, device="cuda", dtype=torch.float16, requires_grad=True)
            mask = torch.zeros(16, 1, 1, length, device="cuda", dtype=torch.float16)
            F.scaled_dot_product_attention(x, x, x, attn_mask=mask).sum().backward()
            return gpu.reserved_peak_bytes

    reserves = [reserved(length) for length in range(600, 1200, 149)]
    assert reserves == sorted(reserves)


def test_masks_before_2_2():
    """The negative control: a mask was expanded first, and copied as a whole."""
    peaks = [taken(masked(length), torch="2.1")[0] for length in LENGTHS]
    assert peaks != sorted(peaks)
    assert taken(masked(80), torch="2.1")[0] == taken(masked(80))[0]  # of a multiple of 16 nothing was copied


def with_mask(length, make_mask):
    """What a mask adds to the same kernel without one."""

    def call(mask):
        def made():
            x = torch.zeros(4, 8, length, 64, device="cuda", dtype=torch.float16)
            given = None if mask is None else mask()
            return lambda: F.scaled_dot_product_attention(x, x, x, attn_mask=given)

        return made

    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        return taken(call(make_mask))[0] - taken(call(None))[0]


@pytest.mark.parametrize(("length", "row"), [(64, 0), (65, 72), (71, 72), (72, 0), (80, 0), (90, 96)])
def test_a_mask_is_padded_to_eight_at_its_own_size(length, row):
    """`pad_bias<8>`, then `expand_symint`: rows that lie at multiples of 8 are taken as they are."""
    added = with_mask(length, lambda: torch.zeros(4, 1, 1, length, device="cuda", dtype=torch.float16))
    assert added == -(-4 * row * 2 // 512) * 512


def test_aligned_sizes_with_unaligned_strides_are_padded():
    added = with_mask(64, lambda: torch.zeros(4, 1, 64, 66, device="cuda", dtype=torch.float16)[..., :64])
    assert added == 4 * 64 * 72 * 2


def test_a_mask_of_truths_becomes_numbers_in_two_steps_until_2_4():
    """`logical_not` made another mask of truths beside."""

    def call():
        x = torch.zeros(1, 1, 1024, 64, device="cuda", dtype=torch.float16)
        mask = torch.ones(1024, 1024, device="cuda", dtype=torch.bool)
        return lambda: F.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    older, newer = (taken(call, torch=version)[0] for version in ("2.4", "2.5"))
    assert newer >= 2 * MIB
    assert 0.8 * MIB < older - newer <= MIB


def test_three_dimensions_attend_in_one_kernel_since_2_14():
    def call():
        x = torch.zeros(8, 1024, 64, device="cuda", dtype=torch.float16)
        return lambda: F.scaled_dot_product_attention(x, x, x)

    assert taken(call, torch="2.14")[0] < taken(call, torch="2.13")[0] / 4  # the scores are 16 MiB


# --------------------------------------------------------------------------------------- copies inside kernels


def test_batch_norm_copies_noncontiguous_input():
    def call(is_in_order):
        def made():
            norm = nn.BatchNorm3d(16).cuda()
            x = torch.zeros(2, 16, 16, 32, 32, device="cuda")
            x = x if is_in_order else x.transpose(2, 3)
            return lambda: norm(x)

        return made

    statistics = 2 * 512
    assert taken(call(is_in_order=True))[1] == 2 * MIB + statistics
    assert taken(call(is_in_order=False))[1] == 2 * 2 * MIB + statistics


def test_batch_norm_of_channels_last_is_not_copied():
    def call():
        norm = nn.BatchNorm2d(16).cuda()
        x = torch.zeros(2, 16, 128, 128, device="cuda").to(memory_format=torch.channels_last)
        return lambda: norm(x)

    assert taken(call)[1] == 2 * MIB + 2 * 512


def convolved(memory_format, dtype=torch.float32, groups=1, of_weight=None, dims=2):
    """A convolution of tensors in this order, its results, and the gradients of input and weight."""
    make, size = {1: (nn.Conv1d, (32,)), 2: (nn.Conv2d, (32, 32)), 3: (nn.Conv3d, (8, 16, 16))}[dims]
    layer = make(64, 64, 3, padding=1, groups=groups, dtype=dtype).cuda()
    if of_weight is not None:
        layer = layer.to(memory_format=of_weight)
    x = torch.zeros(4, 64, *size, device="cuda", dtype=dtype).to(memory_format=memory_format).requires_grad_()
    y = layer(x)
    return [y, *torch.autograd.grad(y, [x, layer.weight], torch.zeros(y.shape, device="cuda", dtype=dtype))]


@pytest.mark.parametrize("groups", [1, 64])
def test_convolution_uses_format_of_input_or_weight(groups):
    """Without CUDA torch says that every order is the plain one, also for tensors that are said to be on a GPU."""
    last, plain = torch.channels_last, torch.contiguous_format
    with mk.VirtualGPU("RTX 4090"):
        for tensors in (convolved(last, groups=groups), convolved(plain, of_weight=last)):
            assert all(each.is_contiguous(memory_format=last) for each in tensors)
        for each in convolved(torch.channels_last_3d, dims=3):
            assert each.is_contiguous(memory_format=torch.channels_last_3d)
        with torch.backends.cudnn.flags(enabled=False):
            without_cudnn = convolved(last)
        for tensors in (convolved(plain), convolved(last, torch.float64), convolved(plain, dims=1), without_cudnn):
            assert all(each.is_contiguous() for each in tensors)
    on_host = F.conv2d(torch.zeros(2, 3, 8, 8).to(memory_format=last), torch.zeros(4, 3, 3, 3))
    assert on_host.is_contiguous(memory_format=last)


def test_convolution_copies_other_memory_format():
    def call(*, in_order, backward):
        def made():
            layer = nn.Conv2d(64, 64, 3, padding=1, bias=False).cuda().to(memory_format=torch.channels_last)
            x = torch.zeros(16, 64, 64, 64, device="cuda", requires_grad=True)
            x = x if not in_order else x.to(memory_format=torch.channels_last)
            if not backward:
                return lambda: layer(x)
            y, grad = layer(x), torch.zeros(16, 64, 64, 64, device="cuda")
            grad = grad if not in_order else grad.to(memory_format=torch.channels_last)
            return lambda: torch.autograd.grad(y, [x, layer.weight], grad)

        return made

    size, weight = 16 * MIB, 64 * 64 * 9 * 4
    assert taken(call(in_order=True, backward=False))[0] == size
    assert taken(call(in_order=False, backward=False))[0] == 2 * size
    assert taken(call(in_order=True, backward=True))[0] == size + weight
    assert taken(call(in_order=False, backward=True))[0] == 3 * size + weight  # input and gradient


def test_a_log_of_sums_takes_its_exponentials_and_a_roll_its_first_turn():
    """Composed in C++, where no mode sees their parts: as much as the same written in Python."""

    def peak(function):
        with mk.VirtualGPU("RTX 4090") as gpu:
            x = torch.zeros(1024, 4096, device="cuda")
            torch.cuda.reset_peak_memory_stats()
            function(x)
            return gpu.peak_bytes - x.nbytes

    def exponentials(x):
        largest = x.amax(1, keepdim=True)
        return (x - largest).exp_().sum(1).log_().add_(largest.squeeze(1))

    size = 4 * 1024 * 4096
    assert peak(lambda x: x.logsumexp(1)) == peak(exponentials) > size
    assert peak(lambda x: x.roll((3, 5), (0, 1))) == peak(lambda x: x.roll(3, 0).roll(5, 1)) == 2 * size
    assert peak(lambda x: x.roll(3, 0)) == size
    assert peak(lambda x: x.T.roll(3, 0)) == 2 * size


def test_the_gradient_of_a_bias_is_summed_in_parts():
    def call(bias):
        def made():
            layer = nn.Conv2d(3, 64, 3, padding=1, bias=bias).cuda()
            y = layer(torch.zeros(16, 3, 256, 256, device="cuda"))
            grad = torch.zeros_like(y)
            return lambda: torch.autograd.grad(y, list(layer.parameters()), grad)

        return made

    assert taken(call(bias=True))[0] > taken(call(bias=False))[0] + 64 * 4


def test_does_not_copy_inputs_outside_cudnn():
    def call():
        norm = nn.BatchNorm2d(16, affine=False).cuda()
        x = torch.zeros(2, 16, 128, 128, device="cuda").transpose(2, 3)
        return lambda: norm(x)

    assert taken(call)[1] == 2 * MIB


def test_batch_norm_runs_in_inference_mode():
    """PyTorch's Python adds kernels to it that its C++ does not have: asked for, they ended the process."""
    with mk.VirtualGPU("RTX 4090"), torch.inference_mode():
        layer = nn.BatchNorm1d(8).cuda()
        assert layer(torch.zeros(4, 8, 16, device="cuda")).shape == (4, 8, 16)


@pytest.mark.parametrize(
    ("dtype", "affine", "shape", "name"),
    [
        (torch.float32, True, (4, 16, 32, 32), "cudnn_batch_norm"),
        (torch.float16, True, (4, 16, 32), "cudnn_batch_norm"),
        (torch.bfloat16, True, (4, 16, 32), "native_batch_norm"),
        (torch.float32, True, (4, 16), "native_batch_norm"),
        (torch.float32, False, (4, 16, 32), "native_batch_norm"),
    ],
)
def test_batch_norm_is_the_operator_of_a_card(dtype, affine, shape, name):
    """As an H100 recorded it; a plan whose operators have other names would be told not to fit the forward."""
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)]
    with mk.VirtualGPU("RTX 4090"), Operators() as seen:
        layer = kind(16, affine=affine).cuda()
        layer(torch.zeros(shape, device="cuda", dtype=dtype, requires_grad=True)).sum().backward()
        assert layer.num_batches_tracked == 1
    assert {each for each in seen.names if "batch_norm" in each} == {
        f"aten.{name}.default",
        f"aten.{name}_backward.default",
    }


class Operators(TorchDispatchMode):
    """The names of what runs."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_materialized_lazy_layer_moves():
    with mk.VirtualGPU("RTX 4090") as gpu:
        model = nn.Sequential(nn.LazyLinear(64), nn.LazyBatchNorm1d())
        model(torch.zeros(4, 32))
        model.cuda()(torch.zeros(4, 32, device="cuda")).sum().backward()
        assert model[0].weight.grad.shape == (64, 32)
    assert gpu.estimate().parameters_bytes >= 64 * 32 * 4


@pytest.mark.parametrize("layer", [nn.LayerNorm, nn.RMSNorm])
def test_a_norm_copies_an_expanded_gradient(layer):
    if layer is nn.RMSNorm and not has("torch.ops.aten._fused_rms_norm_backward"):
        pytest.skip(lacks("torch.ops.aten._fused_rms_norm_backward", "the test is about it"))

    def call(is_expanded):
        def made():
            norm = layer(256).cuda()
            x = torch.zeros(16, 256, 256, device="cuda", requires_grad=True)
            out = norm(x)
            gradient = torch.ones((), device="cuda").expand_as(out) if is_expanded else torch.ones_like(out)
            return lambda: out.backward(gradient)

        return made

    plain, expanded = (taken(call(choice), torch="2.13")[0] for choice in (False, True))
    assert expanded - plain == 16 * 256 * 256 * 4


@pytest.mark.parametrize("dims", [3, 4, 5])
def test_a_bias_is_added_in_place(dims):
    """`at::linear` adds it out of place to tensors without data, which CUDA's are not."""

    def call():
        layer = nn.Linear(64, 64).cuda()
        x = torch.zeros(*[8] * (dims - 2), 1024, 64, device="cuda").transpose(0, dims - 2)
        layer(torch.zeros(1, 64, device="cuda"))  # the library has its workspace
        return lambda: layer(x)

    peak, kept, out = taken(call)
    copy = out.numel() * 4  # of the input, which is kept for the weight's gradient
    assert kept == out.numel() * 4 + copy
    assert peak == kept


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(64,), (8, 64), (2, 8, 64), (2, 2, 8, 64)])
@pytest.mark.parametrize("context", [torch.enable_grad, torch.inference_mode])
def test_linear_matches_real_devices(bias, shape, context):
    with mk.VirtualGPU("RTX 4090"), context():
        layer = nn.Linear(64, 32, bias=bias).cuda()
        out = layer(torch.zeros(*shape, device="cuda"))
        assert out.shape == (*shape[:-1], 32)
        assert out.is_cuda
        assert out.requires_grad == (context is torch.enable_grad)


# ---------------------------------------------------------------------------------------------------- versions


def after_a_product(version, gpu="RTX 4090"):
    with mk.VirtualGPU(gpu, torch=version) as card:
        layer = nn.Linear(512, 512).cuda()
        before = card.allocated_bytes
        layer(torch.zeros(64, 512, device="cuda"))
        return card.allocated_bytes - before, card.peak_bytes - before


OUT = 64 * 512 * 4
SMALL, LARGE = 8519680, 32 * MIB


@pytest.mark.parametrize(
    ("version", "gpu", "kept", "passing"),
    [
        ("2.6", "RTX 4090", SMALL, MIB),
        ("2.6", "H100 PCIe", LARGE, MIB),
        ("2.6", "B200", SMALL, MIB),
        ("2.10", "RTX 4090", SMALL + MIB, 0),
        ("2.12", "B200", LARGE, 0),
        ("2.13", "RTX 5090", LARGE, 0),
        ("2.11", "RTX 5090", SMALL + MIB, 0),
        ("2.15", "RTX 4090", 0, MIB),
    ],
)
def test_cublas_workspaces_by_version(version, gpu, kept, passing):
    batch = OUT
    now, peak = after_a_product(version, gpu)
    assert now == kept  # the result is dropped at once
    assert peak - kept == OUT + batch + passing


def test_since_2_15_products_return_their_workspace():
    def call():
        x = torch.zeros(512, 512, device="cuda")
        return lambda: x @ x

    peak, kept, _ = taken(call, torch="2.15")
    assert (peak, kept) == (MIB + SMALL, MIB)


@pytest.mark.parametrize(
    ("version", "cudnn", "gpu", "first"),
    [
        ("2.6", None, "H100 PCIe", "flash"),
        ("2.10", None, "H100 PCIe", "flash"),
        ("2.10", "9.16", "H100 PCIe", "cudnn"),
        ("2.11", None, "H100 PCIe", "cudnn"),
        ("2.13", None, "B200", "cudnn"),
        ("2.13", "9.1", "B200", "flash"),
        ("2.13", None, "RTX 5090", "flash"),
        ("2.13", None, "RTX 4090", "flash"),
    ],
)
def test_first_choice_of_attention_kernel(version, cudnn, gpu, first):
    with mk.VirtualGPU(gpu, torch=version, cudnn=cudnn) as card:
        x = torch.zeros(2, 8, 64, 64, device="cuda", dtype=torch.bfloat16)
        F.scaled_dot_product_attention(x, x, x)
    operators = card.record().recording.names["operator"]
    assert any(f"_scaled_dot_product_{first}_attention" in name for name in operators)


def test_grouped_heads_attend_in_pieces_before_2_14_in_float32():
    def call():
        q, k = (torch.zeros(2, heads, 256, 64, device="cuda") for heads in (8, 2))
        return lambda: F.scaled_dot_product_attention(q, k, k, enable_gqa=True)

    assert taken(call, torch="2.14")[0] < taken(call, torch="2.13")[0]


def test_rms_norm_is_one_operator_since_2_9():
    def operators(version):
        with mk.VirtualGPU("RTX 4090", torch=version) as card:
            nn.RMSNorm(64).cuda()(torch.zeros(8, 64, device="cuda"))
        return {name.split(".")[1] for name in card.record().recording.names["operator"] if name}

    assert "rsqrt" in operators("2.8")
    assert ("rsqrt" in operators("2.9")) == (not hasattr(torch.ops.aten, "_fused_rms_norm_backward"))


LARGE_SEGMENTS = mk.predict.AllocatorSettings(large_segment_bytes=30 * 2**20)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"torch": "two"}, ("torch='two'", "such as '2.1'")),
        ({"torch": "1.13"}, ("torch='1.13'",)),
        ({"torch": 2.6}, ("torch=2.6", "write torch='2.6'")),
        ({"cudnn": "7.6"}, ("cudnn='7.6'", "write cudnn='9.1'")),
        ({"torch": "2.6", "allocator_settings": "large_segment_size_mb:30"}, ("came with 2.11",)),
        (
            {"torch": "2.6", "allocator_settings": mk.predict.AllocatorSettings(large_segment_bytes=30 << 20)},
            ("came with 2.11",),
        ),
        ({"torch": "2.8", "allocator_settings": "per_process_memory_fraction:0.5"}, ("came with 2.10",)),
    ],
)
def test_rejects_unknown_versions_and_later_options(options, words):
    assert_refused(lambda: mk.VirtualGPU("RTX 4090", **options), ConfigError, *words)


def test_without_a_version_the_installed_one_is_simulated():
    installed = ".".join(torch.__version__.split(".")[:2])
    assert rules_of(installed).version == rules_of().version
    assert rules_of() is rules_of()


def test_rejects_autocast_unsafe_loss_like_a_gpu():
    with mk.VirtualGPU("RTX 4090"), torch.autocast("cuda"):
        x = torch.rand(4, device="cuda")
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            F.binary_cross_entropy(x, x)
        F.binary_cross_entropy_with_logits(x, x)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_code_is_scripted_as_elsewhere():
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor(2.0) + torch.as_tensor(0.0)

    with mk.VirtualGPU("RTX 4090"):
        scripted = torch.jit.script(double)
        assert scripted(torch.ones(2)).tolist() == [2, 2]
    assert torch.jit.script(double)(torch.ones(2)).tolist() == [2, 2]


# -------------------------------------------------------------------------------------------- packed sequences


@pytest.mark.parametrize("lengths", [[9, 9, 9], [12, 5, 5, 1], [7]], ids=str)
@pytest.mark.parametrize("batch_first", [True, False])
def test_packing_copies_the_rows_of_each_run_of_steps(lengths, batch_first):
    """Its C++ is that of the CPU, whose allocator says what it takes."""
    shape = (len(lengths), 12, 2048) if batch_first else (12, len(lengths), 2048)

    def call(device):
        x = torch.zeros(shape, device=device)
        return lambda: pack_padded_sequence(x, torch.tensor(lengths), batch_first)

    peak, kept, packed = taken(lambda: call("cuda"))
    trace = trace_allocations(call("cpu"))
    counts = max(lengths) * 8  # on the host, with the lengths
    assert kept == sum(lengths) * 2048 * 4
    assert 0 <= trace.peak - counts - peak <= 64
    assert packed.batch_sizes.tolist() == [sum(length > step for length in lengths) for step in range(max(lengths))]


def test_lengths_must_be_on_the_host_and_known():
    def loss_fn(model, batch):
        return model(pack_padded_sequence(batch[0], batch[1], batch_first=True))[0].data.sum()

    model, x = nn.GRU(4, 8, batch_first=True), torch.zeros(2, 5, 4)
    with pytest.raises(RuntimeError, match="should be a 1D CPU int64 tensor, but got 1D cuda:0 Long tensor"):
        mk.estimate_memory_usage(model, (x, torch.tensor([5, 2])), loss_fn=loss_fn, target="RTX 4090")
    assert mk.estimate_memory_usage(model, (x, torch.tensor([5, 2])), loss_fn=loss_fn).guesses == ()
    computed = torch.tensor([5.0, 2.0])  # numbers that are computed are not known
    assert_refused(
        lambda: mk.estimate_memory_usage(model, (x, computed), lambda m, b: loss_fn(m, (b[0], b[1].long()))),
        NotSimulatedError,
        "size depends on data",
        "lengths that come with the batch",
    )


# -------------------------------------------------------------------------------------------- order of requests


def sizes_of(call):
    """Bytes of each allocation of a call, in order, and of each release as a negative number."""
    with mk.VirtualGPU("H100", torch="2.11") as gpu:
        run = call()
        torch.cuda.memory._record_memory_history(context=None)
        (before,) = torch.cuda.memory._snapshot()["device_traces"]
        kept = run()  # noqa: F841 - alive until the requests are read
        sizes, requests = {}, []
        for entry in torch.cuda.memory._snapshot()["device_traces"][0][len(before) :]:
            if entry["action"] == "alloc":
                sizes[entry["addr"]] = entry["size"]
                requests.append(entry["size"])
            elif entry["action"] == "free_completed":
                requests.append(-sizes.get(entry["addr"], 0))
        assert gpu.allocated_bytes
        return requests


def test_arguments_are_cast_from_the_last_to_the_first():
    def call():
        layer, x = nn.Linear(256, 640).cuda(), torch.zeros(1024, 256, device="cuda")

        def run():
            with torch.autocast("cuda", torch.bfloat16):
                return layer(x)

        return run

    bias, weight, x, out = 640 * 2, 256 * 640 * 2, 1024 * 256 * 2, 1024 * 640 * 2
    assert [each for each in sizes_of(call) if each in (bias, weight, x, out)] == [bias, weight, x, out]


def test_the_mask_of_dropout_comes_before_its_result():
    def call():
        x = torch.zeros(1024, 1024, device="cuda", requires_grad=True)
        return lambda: F.dropout(x)

    assert sizes_of(call) == [2**20, 2**22]


def test_indices_with_gaps_are_copied_before_they_are_looked_up():
    def call():
        table, x = nn.Embedding(100, 256).cuda(), torch.zeros(8, 65, dtype=torch.int64, device="cuda")
        return lambda: (table(x[:, 1:]), table(x))

    copy, out, whole = 8 * 64 * 8, 8 * 64 * 256 * 4, 8 * 65 * 256 * 4
    assert sizes_of(call) == [copy, out, -copy, whole]


@pytest.mark.parametrize(("version", "kernel"), [("2.11", "cudnn"), ("2.13", "flash")])
def test_cudnn_attends_with_any_dropout_to_2_11(version, kernel):
    with mk.VirtualGPU("H100", torch=version):
        x = torch.zeros(2, 4, 128, 64, device="cuda", dtype=torch.float16, requires_grad=True)
        out = F.scaled_dot_product_attention(x, x, x, dropout_p=0.1)
        assert kernel in out.grad_fn.name().lower()


def test_random_state_of_attention_is_on_the_card_with_dropout_only():
    def call(dropout):
        x = torch.zeros(2, 4, 128, 64, device="cuda", requires_grad=True)
        return lambda: F.scaled_dot_product_attention(x, x, x, dropout_p=dropout)

    (without, with_dropout) = (sizes_of(lambda dropout=dropout: call(dropout)) for dropout in (0.0, 0.1))
    assert with_dropout == [*without, 8, 8]


@pytest.mark.parametrize("mode", ["max", "mean"])
def test_gradients_of_bags_are_counted(mode):
    with mk.VirtualGPU("H100") as gpu:
        bag = nn.EmbeddingBag(10_000, 64, mode=mode).cuda()
        before = gpu.allocated_bytes
        bag(torch.zeros(16, 8, dtype=torch.int64, device="cuda")).sum().backward()
        assert gpu.allocated_bytes - before >= 10_000 * 64 * 4


# ------------------------------------------------------------------------------------------------------- selection

FLOAT, PLACE = 4, 8


def blocks(*sizes):
    return sum(-(-size // 512) * 512 for size in sizes)


# Of a tensor: the call, the bytes of its results, and what it takes beside them by the code of its kernels.
SELECTIONS = {
    "a few of short rows": ((5000, 64), lambda x: x.topk(2), (10_000 * FLOAT, 10_000 * PLACE), ()),
    "a few of columns": ((64, 5000), lambda x: x.t().topk(2), (10_000 * FLOAT, 10_000 * PLACE), (320_000 * FLOAT,)),
    "a few of a long row": (  # 652 blocks of 256 threads with 6 numbers each, on 128 multiprocessors
        (1_000_000,),
        lambda x: x.topk(100),
        (100 * FLOAT, 100 * PLACE),
        (FLOAT, 2 * 4, 2 * 4, 652 * 512, 256 * 4, 652 * 4, 652 * 4, (32 + 1) * 16),
    ),
    "rows": ((100, 1000), lambda x: x.sort(1), (100_000 * FLOAT, 100_000 * PLACE), (1000 * PLACE,)),
    "columns": ((100, 1000), lambda x: x.sort(0), (100_000 * FLOAT, 100_000 * PLACE), (100 * PLACE,)),
    "median": ((1000,), lambda x: x.median(), (FLOAT,), (1000 * FLOAT, 1000 * PLACE, 1000 * PLACE)),
    "sums of rows": ((100, 1000), lambda x: x.cumsum(1), (100_000 * FLOAT,), ()),
    "sums of a line": ((100_000,), lambda x: x.cumsum(0), (100_000 * FLOAT,), ((32 + 98) * 16,)),
    "a draw by weights": ((100, 1000), lambda x: x.multinomial(1), (100 * PLACE,), (100_000 * FLOAT,)),
}


@pytest.mark.parametrize("name", SELECTIONS)
def test_selections_take_what_their_kernels_allocate(name):
    shape, call, results, inside = SELECTIONS[name]

    def prepared():
        x = torch.ones(shape, device="cuda")
        return lambda: call(x)

    peak, left, _ = taken(prepared)
    assert (peak, left) == (blocks(*results, *inside), blocks(*results))


def test_a_router_of_experts_is_known_to_the_byte():
    router, tokens = nn.Linear(64, 8), torch.rand(4096, 64)

    def loss_fn(model, tokens):
        weights, experts = model(tokens).softmax(1).topk(2)
        return (weights * experts).square().mean()

    estimate = mk.estimate_memory_usage(router, tokens, loss_fn, target="RTX 4090", optimizer="sgd")
    assert estimate.confidence == "exact"
