"""Operators as CUDA takes them: autocast and its cache, attention by card, softmax, what kernels take inside."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memkit._simulation.cuda.attention import Attention, attention_backend
from memkit._simulation.cuda.autocast import operators_by_policy
from memkit._simulation.cuda.memory import Processors, in_order, inside, reduction_workspace
from memkit._torch import aten
from memkit._torch.cuda import rules_of
from memkit.predict.virtual_gpu import VirtualGPU
from tests.rules import VERSION
from tests.versions import has

_aten = torch.ops.aten
TURING, AMPERE, GAMING_AMPERE, ADA, HOPPER, BLACKWELL, GAMING_BLACKWELL = (
    (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0),
)  # fmt: skip
ADA_CARD = Processors.of(ADA, 128)
RULES = rules_of(VERSION)


def names(card):
    recording = card.record().recording
    return [name.removeprefix("aten.") for name in recording.names["operator"]]


# ---------------------------------------------------------------------------------------------------- autocast


def test_the_lists_are_cudas_own():
    lists = operators_by_policy((2, 13))
    assert {"matmul", "linear", "conv2d", "scaled_dot_product_attention"} <= set(lists["lower precision"])
    # On a CPU these keep their precision.
    assert {"layer_norm", "group_norm", "exp", "pow.Tensor_Scalar", "log_softmax.int"} <= set(
        lists["float32"] + lists["float32 by dtype"]
    )
    assert {"softmax.int", "sum"} <= set(lists["float32 by dtype"])
    assert "index_put" in lists["widest"]
    assert "rms_norm" in lists["float32"]
    assert "rms_norm" not in operators_by_policy((2, 11))["float32"]


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (lambda x: x @ x, torch.bfloat16),
        (lambda x: F.softmax(x.bfloat16(), dim=0), torch.float32),
        (lambda x: F.layer_norm(x.bfloat16(), [8]), torch.float32),
        (lambda x: x.bfloat16().pow(2), torch.float32),
        (lambda x: x.bfloat16().exp(), torch.float32),
        (lambda x: torch.cat([x, x.bfloat16()]), torch.float32),
        (lambda x: x.bfloat16() + 1, torch.bfloat16),
        (lambda x: x.double() @ x.double(), torch.float64),
        (lambda x: x.bfloat16().norm(), torch.float32),
    ],
)
@pytest.mark.usefixtures("card")
def test_autocast_takes_each_operator_as_its_list_says(function, dtype):
    x = torch.ones(8, 8, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        assert function(x).dtype is dtype


@pytest.mark.parametrize(
    ("context", "is_kept"), [(torch.enable_grad, True), (torch.no_grad, True), (torch.inference_mode, False)]
)
def test_autocast_caches_weights_except_in_inference(card, context, is_kept):
    """As the allocator shows on a CPU, and as inference was recorded on a GPU."""
    layer = nn.Linear(512, 512, bias=False, device="cuda")
    x = torch.ones(4, 512, device="cuda", dtype=torch.bfloat16)
    layer(x.float())  # cuBLAS has its workspace
    before = card.allocated_bytes
    with context(), torch.autocast("cuda", torch.bfloat16):
        for _ in range(2):
            layer(x)
            assert card.allocated_bytes - before == (512 * 512 * 2 if is_kept else 0)
    assert card.allocated_bytes == before


@pytest.mark.usefixtures("card")
def test_cast_without_graph_is_not_reused_with_graph():
    layer = nn.Linear(8, 8, bias=False, device="cuda")
    x = torch.ones(4, 8, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        with torch.no_grad():
            layer(x)
        out = layer(x)
    out.sum().backward()
    assert layer.weight.grad is not None


# --------------------------------------------------------------------------------------------------- attention


def call(dtype=torch.float16, heads=8, rows=64, width=64, **changes):
    query = torch.empty(2, heads, rows, width, dtype=dtype, device="meta")
    fields = {"query": query, "key": query, "value": query, "mask": None, "dropout": 0.0}
    return Attention(**(fields | {"is_causal": False, "enable_gqa": False} | changes))


@pytest.mark.parametrize(
    ("made", "capability", "backend"),
    [
        (call(), TURING, "efficient"),
        (call(), AMPERE, "flash"),
        (call(), HOPPER, "cudnn" if {(9, 0), (9, None)} & set(RULES.prefers_cudnn) else "flash"),
        (call(), BLACKWELL, "cudnn" if {(9, 0), (9, None)} & set(RULES.prefers_cudnn) else "flash"),
        (call(), (10, 3), "cudnn" if {(10, 3), (10, None)} & set(RULES.prefers_cudnn) else "flash"),
        (call(), GAMING_BLACKWELL, "flash"),
        (call(torch.bfloat16), TURING, "math"),
        (call(torch.bfloat16), ADA, "flash"),
        (call(torch.float32), ADA, "efficient"),
        (call(torch.float32), HOPPER, "efficient"),
        (call(torch.float64), ADA, "math"),
        (call(width=256), AMPERE, "flash"),
        (call(width=256), HOPPER, "flash"),
        (call(width=512), ADA, "efficient"),
        (call(torch.float32, width=30), ADA, "math"),
        (call(mask=torch.empty(64, 64, dtype=torch.float16, device="meta")), ADA, "efficient"),
        (call(dropout=0.1), HOPPER, "flash"),
    ],
)
def test_choice_of_attention_kernel(made, capability, backend):
    assert attention_backend(made, capability, RULES) == backend


def test_wide_heads_with_a_gradient_do_not_flash_on_gaming_cards():
    query = torch.empty(2, 8, 64, 256, dtype=torch.float16, device="meta", requires_grad=True)
    wide = Attention(query, query, query, None, 0.1, is_causal=False, enable_gqa=False)
    assert attention_backend(wide, AMPERE, RULES) == "flash"
    assert attention_backend(wide, GAMING_AMPERE, RULES) == attention_backend(wide, ADA, RULES) == "efficient"


def test_respects_disabled_kernels():
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert attention_backend(call(), ADA, RULES) == "math"


def test_inference_mode_takes_the_same_attention_and_shows_it(card):
    x = torch.ones(2, 8, 64, 64, device="cuda", dtype=torch.float16)
    with torch.inference_mode():
        F.scaled_dot_product_attention(x, x, x)
    assert "_scaled_dot_product_flash_attention.default" in names(card)


def test_inference_mode_shows_the_parts_of_operators(card):
    x, y = torch.ones(4, 64, 8, device="cuda"), torch.ones(4, 8, 64, device="cuda").transpose(1, 2)
    with torch.inference_mode():
        torch.einsum("bij,bkj->bik", x, y)
    assert "bmm.default" in names(card)


def test_a_layer_of_inference_shows_its_operators(card):
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).cuda().eval()
    with torch.inference_mode():
        layer(torch.ones(2, 16, 64, device="cuda"))
    assert "addmm.default" in names(card)


# ------------------------------------------------------------------------------------------- softmax and others


@pytest.mark.parametrize(
    ("dtype", "asked", "num_bytes"),
    [
        (torch.float16, torch.float32, 4 * 2**20),
        (torch.bfloat16, torch.float32, 8 * 2**20),
        (torch.float32, None, 4 * 2**20),
    ],
)
def test_softmax_widens_float16_inside_and_bfloat16_before(card, dtype, asked, num_bytes):
    x = torch.ones(1024, 1024, device="cuda", dtype=dtype)
    before = card.allocated_bytes
    torch.cuda.reset_peak_memory_stats()
    F.softmax(x, dim=-1, dtype=asked)
    assert card.peak_bytes - before == num_bytes


def test_operators_with_a_kernel_of_cudas_own_stay_whole(card):
    x = torch.ones(64, 64, device="cuda", requires_grad=True)
    (F.silu(x) + F.mish(x) + F.rms_norm(x, [64])).sum().backward()
    assert {"silu_backward.default", "mish_backward.default"} <= set(names(card))
    # In one operator since 2.9.
    is_whole = has("torch.ops.aten._fused_rms_norm_backward")
    assert {"_fused_rms_norm.default", "_fused_rms_norm_backward.default"} & set(names(card)) == (
        {"_fused_rms_norm.default", "_fused_rms_norm_backward.default"} if is_whole else set()
    )


# --------------------------------------------------------------------------------------- what kernels take inside


@pytest.mark.parametrize("rows", [256, 512, 1024, 2048, 4096])
def test_sum_over_rows_matches_recorded_gpus(rows):
    x = torch.empty(rows, 1024, device="meta")
    partial = rows // 64 * 1024 * 32 * 4 * 4
    assert reduction_workspace(_aten.sum.dim_IntList, (x, [0]), ADA_CARD) == ((partial, 32) if rows >= 1024 else ())


@pytest.mark.parametrize(
    ("shape", "dims"), [((4096, 1024), [1]), ((8, 8), [0, 1]), ((0, 4), [0]), ((), []), ((100_000, 64), [1])]
)
def test_sums_within_one_block_take_nothing(shape, dims):
    assert reduction_workspace(_aten.sum.dim_IntList, (torch.empty(shape, device="meta"), dims), ADA_CARD) == ()


def test_the_sum_of_all_numbers_is_split_over_the_whole_card():
    x = torch.empty(2**24, device="meta")
    small, large = (reduction_workspace(_aten.sum.default, (x,), Processors.of(ADA, count)) for count in (16, 128))
    assert small == (2**24 // 512 // 256 * 4, 4)  # no thread adds up more than 256 numbers
    assert large == (128 * 3 * 4, 4)


def test_index_add_matches_recorded_gpus():
    weights, values = torch.empty(10_000, 1024, device="meta"), torch.empty(4096, 1024, device="meta")
    for num_rows, sort_bytes in ((2048, 1), (4096, 72_191)):
        index = torch.empty(num_rows, dtype=torch.int64, device="meta")
        phases = inside(_aten.index_put.default, (weights, [index], values[:num_rows], True), ADA_CARD)
        assert phases == ((num_rows * 8,), (num_rows * 8,) * 4 + (sort_bytes,))
        assert inside(_aten.index_put.default, (weights, [index], values[:num_rows], False), ADA_CARD) == ()


def test_large_embedding_gradient_is_summed_in_tens():
    grad, index = torch.empty(8192, 768, device="meta"), torch.empty(8192, dtype=torch.int64, device="meta")
    few, out = (grad[:3072], index[:3072], 50_257, -1, False), torch.empty(50_257, 768, device="meta")
    assert in_order(_aten.embedding_dense_backward.default, few, out) == (0, 0, out, None, None)
    order = in_order(_aten.embedding_dense_backward.default, (grad, index, 50_257, -1, False), out)
    assert max(each for each in order if isinstance(each, int)) == (819 + 8192) * 768 * 4


def test_embeddings_sort_by_all_bits_of_their_indices():
    grad, index = torch.empty(4096, 512, device="meta"), torch.empty(4096, dtype=torch.int64, device="meta")
    order = in_order(_aten.embedding_dense_backward.default, (grad, index, 256, -1, False), grad)
    sort = order[5]
    assert sort == 8 * 256 * 8 + 2 * 256 * 4 + 2 * 4096 * 8 + 511  # an H100's is 1 KiB smaller: it sorts larger blocks


def test_bags_are_summed_as_a_recorded_gpu_does():
    """65,536 words of 500,000: the largest block that an H100 took inside."""
    grad, index = torch.empty(1024, 128, device="meta"), torch.empty(65_536, dtype=torch.int64, device="meta")
    arguments = (grad, index, index[:1024], index, index[:1024], index[:0], 500_000, False, 1, False, None)
    order = in_order(aten.embedding_bag_backward, arguments, grad)
    assert max(each for each in order if isinstance(each, int)) == 36_909_568
    assert in_order(aten.embedding_bag_backward, (*arguments[:8], 2, *arguments[9:]), grad) == ()  # largest of each bag


def test_values_with_gaps_are_copied_before_they_are_added_up():
    weights, index = torch.empty(100, 64, device="meta"), torch.empty(4096, dtype=torch.int64, device="meta")
    wide = torch.empty(4096, 128, device="meta")
    for values, copied in ((wide[:, :64], 4096 * 64 * 4), (torch.empty(4096, 64, device="meta"), 0)):
        _, blocks = inside(_aten.index_put.default, (weights, [index], values, True), ADA_CARD)
        assert sum(blocks) - 4 * 4096 * 8 - blocks[-1] == copied


@pytest.mark.parametrize(
    ("source", "result", "copied"),
    [
        (torch.bool, torch.int64, 8),
        (torch.float32, torch.float64, 8),
        (torch.float32, torch.float32, 0),
        (torch.bfloat16, torch.float32, 0),  # the kernel adds up in float32
        (torch.float16, torch.float64, 8),
    ],
)
def test_sums_cast_their_input(source, result, copied):
    x, out = torch.empty(16, 100, dtype=source, device="meta"), torch.empty(16, dtype=result, device="meta")
    (blocks,) = inside(_aten.sum.dim_IntList, (x, [1]), ADA_CARD, out)
    assert sum(blocks) == 1600 * copied


def test_means_of_losses_are_split_over_the_card():
    x = torch.empty(2**24, device="meta")
    ((losses, *mean),) = inside(_aten.mse_loss.default, (x, x), ADA_CARD)
    assert losses == 2**26
    assert tuple(mean) == reduction_workspace(_aten.mean.default, (x,), ADA_CARD) != ()


def attention(shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("shape", "largest"),
    [((8, 8, 512, 64), 8_396_800), ((8, 4, 512, 128), 8_392_704), ((32, 6, 197, 64), 12_595_200)],
)
def test_gradients_of_attention_in_float32_match_recorded_gpus(shape, largest):
    x = attention(shape).transpose(1, 2).contiguous().transpose(1, 2)
    arguments = (x, x, x, x, None, x, x[..., 0], None, None, 0.0, [True, True, True, False])
    order = in_order(aten.efficient_attention_backward, arguments, (x, x, x, None))
    taken = [each for each in order if isinstance(each, int) and each > 0]
    assert taken[-1] == largest
    gaps = in_order(aten.efficient_attention_backward, (attention(shape), *arguments[1:]), (x, x, x, None))
    assert (order[0], gaps[0]) == (0, x.nbytes)  # a gradient in another order is copied first


@pytest.mark.parametrize(
    ("shape", "workspace"),
    [((8, 8, 512, 64), 8_519_936), ((8, 4, 512, 128), 8_454_400), ((2, 4, 512, 128), 2_113_792)],
)
def test_gradients_of_attention_by_cudnn_match_recorded_gpus(shape, workspace):
    x = attention(shape, torch.bfloat16)
    assert inside(aten.cudnn_attention_backward, (x, x, x, x, x), ADA_CARD) == ((workspace,),)


def test_layer_norm_sums_in_groups_only_with_many_short_rows():
    def taken(rows, width):
        x, stat = torch.empty(rows, width, device="meta"), torch.empty(rows, 1, device="meta")
        args = (x, x, [width], stat, stat, None, None, [True, True, True])
        return inside(_aten.native_layer_norm_backward.default, args, ADA_CARD)

    assert taken(65_536, 256) == taken(100_000, 4096) == ()
    assert taken(131_072, 256) == ((4096 * 256 * 4,) * 2,)


@pytest.mark.parametrize(("step", "is_copied"), [(1, False), (2, True)])
def test_copies_strided_matrix_before_product(card, step, is_copied):
    x, y = torch.ones(512, 512 * step, device="cuda")[:, ::step], torch.ones(512, 512, device="cuda")
    x @ y  # cuBLAS has its workspace
    before = card.allocated_bytes
    torch.cuda.reset_peak_memory_stats()
    x.T @ y
    assert card.peak_bytes - before == 512 * 512 * 4 * (1 + is_copied)


def test_kernels_take_any_form_of_their_arguments(card):
    x = torch.ones(64, 32, device="cuda")
    x.sum(), x.sum(dim=-1), x.T.sum(0), x[::2, ::3].mean((0, 1)), x[:0].sum(0), torch.ones((), device="cuda").sum()
    x.max(dim=1), x.argmax(), x.var(), x.amax(), x.norm(), x[:1].sum(0)
    x.index_put((x > 0,), x.sum(), accumulate=True)
    assert "index_put.default" in names(card)


@pytest.mark.parametrize(
    ("select", "num_bytes"),
    [
        (lambda x, mask: x[mask], 512 * 8),
        (lambda x, mask: x.masked_select(mask.unsqueeze(1)), 512 * 256 * 2 * 8),
        (lambda x, mask: x.index_put((mask,), x[:512]), 512 * 8),
        (lambda x, mask: x.index_put((mask,), x[0, 0]), 0),  # filled in where the mask lies
        (lambda x, mask: x.masked_scatter(mask.unsqueeze(1), x), 1024 * 256 * (8 + 1)),
    ],
)
def test_kernels_look_up_the_positions_of_a_mask(card, select, num_bytes):
    x, mask = torch.ones(1024, 256, device="cuda"), (torch.arange(1024) % 2 == 0).to("cuda")
    before = card.allocated_bytes
    torch.cuda.reset_peak_memory_stats()
    out = select(x, mask)
    assert card.peak_bytes - before == out.nbytes + num_bytes


def test_a_mask_on_the_host_selects_what_it_does_with_data(card):
    """Beside a tensor of the card, and in the backward, which looks the positions up again."""
    mask = torch.zeros(16, dtype=torch.bool)
    mask[::2] = True
    weight = torch.randn(8, 16, device="cuda", requires_grad=True)
    padded = weight.new_zeros((16, 16))
    padded[mask] = weight
    assert padded[mask].shape == (8, 16)
    padded.square().mean().backward()
    assert weight.grad.shape == weight.shape
    mask[1] = True  # read anew, not kept
    assert padded[mask].shape == (9, 16)
    assert mask.cuda().nonzero().shape == (9, 1)


def test_fused_layers_of_inference_are_back_afterwards():
    assert torch.backends.mha.get_fastpath_enabled()
    with VirtualGPU("RTX 4090"):
        assert not torch.backends.mha.get_fastpath_enabled()
    assert torch.backends.mha.get_fastpath_enabled()
