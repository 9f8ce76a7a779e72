"""How a step is simulated: the files involved, the patches of torch, and the lifetime of its objects."""

import ast
import copy
import gc
import inspect
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import memkit as mk
from benchmarks.tables_patches import patches
from memkit._core.errors import InputTypeError, NotSimulatedError
from memkit._recorder.recorder import Recorder
from memkit._simulation.cuda.tensors import CudaTensors
from memkit._simulation.leftovers import Shared, applied
from memkit._simulation.simulation import Gpu, Host, Simulation, simulate
from memkit._simulation.tensors import Tensors
from memkit.predict.gpus import find_gpu
from tests.helpers import assert_refused
from tests.predict.step import Step
from tests.predict.truth import assert_equals_the_real_step, plain_step
from tests.toys import mean_square

PACKAGE = Path(mk.__file__).parent
MIB = 2**20


def files_of(call):
    """The files of memkit in which a function ran."""
    found = set()

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            found.add(str(Path(frame.f_code.co_filename).relative_to(PACKAGE)))

    call()  # imports, and what is cached
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


# Three of them are `_machine/devices.py`, as the settings of the allocator are those of the environment,
# `_recorder/rehearsal.py`, as what the objects of the loss function hold is restored, and `_simulation/dtypes.py`, as
# kernels refuse dtypes that shape functions accept.
@pytest.mark.parametrize(("precision", "most"), [(None, 20), ("bf16-mixed", 21)])
def test_an_estimate_on_a_card_runs_in_few_files(precision, most):
    model = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    batch = torch.zeros(2, 16, 64)

    def estimate():
        mk.estimate_memory_usage(model, batch, loss_fn=mean_square, target="RTX 4090", precision=precision)

    # 2.8's optimizers make tensors, and the seam is asked where; this module's names include one with slots. Whose a
    # module is, is asked of names in this one; the seam is asked for a tensor's gradient, too. Random numbers that a
    # step draws are guesses, parameters that fully_shard has gathered are its own, and compiled code is noted. So is
    # what an optimizer has beside torch's own attributes.
    asked = {"_torch/fake.py", "_torch/tensors.py", "_core/attributes.py", "_core/installed.py"}
    asked |= {"_simulation/draws.py", "_torch/ranks.py", "_torch/compiler.py", "_torch/optimizers.py"}
    # Of modes on 2.8; whose parameters the loss trains; arguments that a public method checks.
    asked |= {"_torch/dispatch.py", "_torch/graph.py", "_core/settings.py"}
    files = files_of(estimate) - asked
    assert len(files) <= most, sorted(files)
    assert {"_simulation/simulation.py", "_simulation/cuda/allocator.py", "_recorder/recorder.py"} <= files


@pytest.mark.parametrize(("kind", "root"), [(CudaTensors, FakeTensorMode), (Recorder, TorchDispatchMode)])
def test_two_levels_stand_above_torchs_own_class_at_most(kind, root):
    own = [each for each in kind.__mro__ if each.__module__.startswith("memkit.")]
    assert issubclass(kind, root)
    assert len(own) <= 2
    assert all(not each.__subclasses__() for each in (CudaTensors, Recorder))


def test_classes_do_not_touch_private_names_of_parents():
    def private(kind):
        tree = ast.parse(inspect.getsource(kind))
        selves = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "self"]
        stored = {n.attr for n in selves if isinstance(n.ctx, ast.Store)}
        defined = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)} | stored
        return {n.attr for n in selves if n.attr.startswith("_") and not n.attr.startswith("__")}, defined

    used, defined = private(CudaTensors)
    assert used <= defined
    assert "_made" in private(Tensors)[0]  # negative control: the parent has something to itself


# ---------------------------------------------------------------------------------------------- one way in


def test_host_card_and_ranks_are_entered_in_one_way():
    model, batch = nn.Linear(64, 64), torch.zeros(8, 64)
    for place in (Host(), Gpu(find_gpu("RTX 4090"))):
        simulation = Simulation(place)

        def run(model, batch, simulation=simulation):
            for watch in simulation.passes([]):
                with watch:
                    watch.hold(model, batch)
                    mean_square(model, batch).backward()
            return watch.record()

        record = simulate("a test", simulation, (model, batch), run)
        assert record.recording.peak_bytes() > 64 * 64 * 4
        assert (record.figures is None) == (place.device_type == "cpu")
        assert type(model.weight.data) is torch.Tensor
        assert model.weight.grad is None


def test_unrecorded_block_raises():
    watch = Simulation(Host()).first_watch()
    assert not watch.is_recording
    with pytest.raises(ValueError, match="not recorded"):
        watch.record()


# ------------------------------------------------------------------------------------------------- patches


def test_patches_are_undone_after_error_and_last_block():
    from memkit._simulation.leftovers import Patches

    class Owner:
        kept = 1

    class Heir(Owner):
        pass

    patches = [Patches(Heir, "a test", {"kept": 2, "new": 3})]
    with pytest.raises(KeyError), applied(patches):
        assert (Heir.kept, Heir.new) == (2, 3)
        raise KeyError
    assert "kept" not in vars(Heir)
    assert not hasattr(Heir, "new")
    shared = Shared(lambda: patches)
    with shared():
        with shared():
            pass
        assert Heir.kept == 2
    assert Heir.kept == 1


def test_patched_names_match_the_table():
    """No function of torch is another inside of the block but those that the docs list."""
    owners = torch.Tensor, torch.cuda, torch.cuda.memory, torch.accelerator, nn.Module, torch.utils, torch
    table = patches()
    before = [dict(vars(owner)) for owner in owners]
    with mk.VirtualGPU("RTX 4090"):
        inside = [dict(vars(owner)) for owner in owners]
    num_changed = 0
    for owner, had, has in zip(owners, before, inside, strict=True):
        for name in {name for name in has if name in had and has[name] is not had[name]}:
            assert f"`{name}`" in table, (owner, name)
            num_changed += 1
    assert num_changed > 100


# ---------------------------------------------------------------------------------------- what dies, what moves


def test_consecutive_models_take_memory_of_one():
    held = []
    with mk.VirtualGPU("RTX 4090") as gpu:
        for _ in range(3):
            model = nn.Sequential(nn.Linear(2048, 2048), nn.BatchNorm1d(2048)).cuda()
            held.append(gpu.allocated_bytes)
        del model
        gc.collect()
        assert gpu.allocated_bytes == 0
    assert held[0] == held[1] == held[2] > 16 * MIB


class Meta(torch.Tensor):
    """As MONAI's MetaTensor: a subclass that carries something along."""

    @staticmethod
    def __new__(cls, x, affine=None):
        return torch.as_tensor(x).as_subclass(cls)

    def __init__(self, x, affine=None):
        self.affine = affine

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(out, Meta) and args and isinstance(args[0], Meta):
            out.affine = getattr(args[0], "affine", None)
        return out


def test_tensor_subclass_moves_and_keeps_its_type(card):
    image = Meta(torch.rand(2, 3, 8, 8), affine=torch.eye(4))
    for moved in (image.cuda(), image.to("cuda"), image.to("cuda", non_blocking=True)):
        assert isinstance(moved, Meta)
        assert moved.is_cuda
        assert moved.affine is image.affine
    out = nn.Conv2d(3, 4, 3).cuda()(moved)
    assert isinstance(out, Meta)
    assert out.affine is image.affine
    out.sum().backward()
    assert isinstance((moved * 2).cpu(), Meta)
    assert type(moved.as_subclass(torch.Tensor)) is not Meta
    assert not card.estimate().doubts


def test_a_tensor_made_of_numbers_on_the_card_reads_none(card):
    x = torch.ones((), device="cuda")
    for made in (torch.tensor([x, x]), torch.as_tensor([x, 2.0]), torch.tensor([[x, 1], [2, x]], device="cuda")):
        assert made.numel() in (2, 4)
        assert made.dtype is torch.float32
    assert torch.tensor([x, x], dtype=torch.float64).dtype is torch.float64
    assert made.is_cuda
    assert not card.guesses
    assert torch.tensor([1, 2]).tolist() == [1, 2]


FILLED = {
    "by a vector": lambda m: m.bias.copy_(torch.linspace(0, 1, 2000)),
    "by a part of what has no data": lambda m: m.bias.copy_(m.weight[0]),
    "by a product with what has no data": lambda m: m.bias.copy_(m.weight @ m.bias),
    "in place": lambda m: m.weight.mul_(m.bias),
    "row by row": lambda m: m.weight[:10].zero_(),
}


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize("how", FILLED)
def test_filled_parameters_move(how):
    model = nn.Linear(2000, 2000)
    with torch.no_grad():
        FILLED[how](model)
    parameters = list(model.parameters())
    model.cuda()
    assert all(a is b and b.is_cuda for a, b in zip(parameters, model.parameters(), strict=True))
    model(torch.ones(2, 2000, device="cuda")).sum().backward()


@pytest.mark.usefixtures("card")
def test_shared_parameters_move():
    """A view, a graph, a weak reference: on a GPU nobody is asked."""
    import weakref

    model = nn.Linear(20, 20)
    held = model.bias[:3], model(torch.ones(1, 20)), weakref.ref(model.weight)
    model.cuda()
    assert model.bias.is_cuda
    assert not held[0].is_cuda
    assert held[2]() is model.weight


def test_assigned_data_moves_and_returns():
    model = nn.Linear(3, 3)
    expected = model.weight.detach().clone()
    with mk.VirtualGPU("RTX 4090") as gpu:
        for parameter in model.parameters():
            parameter.data = parameter.data.cuda()
        assert gpu.allocated_bytes == 2 * 512
        model(torch.ones(2, 3, device="cuda")).sum().backward()
        assert model.weight.grad.is_cuda
        model.weight.data = model.weight.data.cpu()
        assert model.weight.device.type == "cpu"
    torch.testing.assert_close(model.weight.detach(), expected, rtol=0, atol=0)
    assert model.weight.grad is None


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse().cuda(),
        lambda: torch.eye(3).to_sparse().to("cuda"),
        lambda: torch.sparse_coo_tensor(torch.tensor([[0], [1]]).cuda(), torch.ones(1).cuda(), (2, 2)),
    ],
)
def test_sparse_tensors_on_the_card_are_refused_with_a_way_out(make):
    with pytest.raises(NotSimulatedError, match=r"layout torch\.sparse_coo at .*test_simulation\.py.*dense tensors"):
        make()


NESTED = {
    "list": lambda rows: torch.nested.nested_tensor([*rows], layout=torch.jagged),
    "as_nested": lambda rows: torch.nested.as_nested_tensor([*rows], layout=torch.jagged),
    "strided": lambda rows: torch.nested.nested_tensor([*rows]),
    "offsets": lambda rows: torch.nested.nested_tensor_from_jagged(rows.flatten(0, 1), torch.tensor([0, 5, 10])),
}


@pytest.mark.parametrize("how", NESTED)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_step_that_nests_tensors_is_refused_and_a_nested_batch_is_not(how):
    model, rows = torch.nn.Linear(4, 4), torch.randn(2, 5, 4)

    def loss_fn(model, rows):
        return torch.stack([each.mean() for each in model(NESTED[how](rows)).unbind()]).sum()

    with pytest.raises(NotSimulatedError, match=r"nested tensor .*test_simulation\.py.* as in collate_fn"):
        mk.estimate_memory_usage(model, rows, loss_fn=loss_fn)
    batch = NESTED["list"](rows)  # the way out
    assert mk.estimate_memory_usage(model, batch, loss_fn=lambda model, rows: model(rows).values().sum()).peak_bytes


@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta state")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_a_sparse_tensor_in_a_batch_for_the_card_is_refused_as_those_made_there_are(layout):
    model, batch = torch.nn.Linear(4, 4), (torch.eye(20).to_sparse(layout=layout), torch.randn(20, 4))

    def loss_fn(model, batch):
        return torch.sparse.mm(batch[0], model(batch[1])).square().mean()

    with pytest.raises(NotSimulatedError, match=rf"layout {layout} at .*dense tensors"):
        mk.estimate_memory_usage(model, batch, loss_fn=loss_fn, target="RTX 4090")


def test_a_sparse_tensor_made_of_known_numbers_is_not_known_but_estimated():
    def loss_fn(model, x):
        matrix = torch.sparse_coo_tensor(
            torch.tensor([[0, 1, 2], [1, 0, 3]]), torch.ones(3), (20, 20), check_invariants=False
        )
        return torch.sparse.mm(matrix, model(x)).square().mean()

    estimate = mk.estimate_memory_usage(torch.nn.Linear(4, 4), torch.randn(20, 4), loss_fn=loss_fn)
    assert estimate.confidence == "guessed"
    assert "computes with a sparse tensor" in str(estimate)


def test_a_parameter_is_made_of_the_class_of_another_one(card):
    """As accelerate loads weights: ``type(old)(value, requires_grad=...)``."""
    model = nn.Linear(2, 2, device="meta")
    made = type(model.weight)(torch.zeros(2, 2), requires_grad=False)
    assert type(made) is nn.Parameter
    assert not made.requires_grad
    model.weight = type(model.weight)(torch.zeros(2, 2, device=card.device), requires_grad=True)
    assert isinstance(model.weight, nn.Parameter)
    assert model.weight.is_cuda


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_data_parallel_takes_a_batch_from_the_host(card, place):
    model = nn.DataParallel(nn.Linear(8, 8).cuda())
    model(torch.zeros(4, 8, device=place)).sum().backward()
    assert model.module.weight.grad.is_cuda
    assert card.peak_bytes > 0


NUMBERED = [
    lambda: torch.zeros(2, device=0),
    lambda: torch.randint(3, (2,), device=torch.cuda.current_device()),
    lambda: torch.arange(3, device=0),
    lambda: torch.ones_like(torch.ones(2), device=0),
    lambda: torch.ones(2).new_zeros(3, device=0),
    lambda: torch.tensor([1.0], device=0),
    lambda: nn.Linear(2, 2, device=0).weight,
    lambda: torch.ones(2).to(0),
]


@pytest.mark.parametrize("make", NUMBERED)
def test_a_device_may_be_a_number(make):
    with mk.VirtualGPU("RTX 4090"):
        assert make().device == torch.device("cuda", 0)


def test_the_default_device_is_for_torchs_own_functions_afterwards():
    """Torch keeps the set of functions that it is for, from the first time on that it is asked."""
    torch.utils._device._device_constructors.cache_clear()
    with mk.VirtualGPU("RTX 4090"):
        torch.set_default_device("cuda")
        assert torch.zeros(2).is_cuda
        assert torch.tensor([1]).is_cuda
    with torch.device("meta"):
        assert torch.zeros(2).is_meta
        assert torch.tensor([1]).is_meta


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(2, device="cuda:1"),
        lambda: torch.zeros(2).to("cuda:1"),
        lambda: torch.zeros(2).cuda(1),
        lambda: nn.Linear(2, 2).to("cuda:1"),
        lambda: torch.zeros(2, device=1),
        lambda: nn.DataParallel(nn.Identity(), device_ids=[0, 1])(torch.zeros(2, 2)),
    ],
)
def test_a_second_card_is_not_there(card, make):
    with pytest.raises(RuntimeError, match=r"(?s)cuda:1.*invalid device ordinal.*only cuda:0 is there") as caught:
        make()
    assert isinstance(caught.value, NotSimulatedError)  # no failure of the script, which may catch torch's RuntimeError
    assert card.allocated_bytes == 0


def test_data_parallel_on_the_only_card_takes_what_the_model_takes(card):
    model, x = nn.Linear(16, 4).cuda(), torch.randn(8, 16)
    nn.DataParallel(model, device_ids=[0])(x).sum().backward()
    assert {each.grad.device for each in model.parameters()} == {torch.device("cuda", 0)}


def test_uses_calibrated_workspace():
    gpu = replace(find_gpu("RTX 4090"), cublas_workspace_bytes=3 * MIB, confidence="calibrated")
    with mk.VirtualGPU(gpu, torch="2.13") as card:
        x = torch.zeros(512, 512, device="cuda")
        before = card.allocated_bytes
        assert (x @ x).is_cuda
        assert card.memory.workspace_bytes == card.allocated_bytes - before == 3 * MIB


@pytest.mark.parametrize("value", [torch.tensor(2.0), torch.tensor([2.0]), torch.tensor([[2.0]]), torch.tensor([1, 2])])
def test_small_buffers_are_on_the_card_too(value):
    """Numbers in an optimizer's state stay on the host; a buffer of one number does not."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 2)
            self.register_buffer("scale", value)

        def forward(self, x):
            assert self.scale.device == x.device
            return self.linear(x * self.scale.sum())

    model, x = Scaled(), torch.randn(4, 8)
    optimizer = torch.optim.Adam(model.parameters())
    mean_square(model, x).backward()
    optimizer.step()
    optimizer.zero_grad()
    estimate = mk.estimate_memory_usage(model, x, mean_square, optimizer=optimizer, target="RTX 4090")
    made = mk.estimate_memory_usage(model, x, mean_square, optimizer="adam", target="RTX 4090")
    assert estimate.peak_bytes == made.peak_bytes


def square_sent_between(model, x):
    """Nothing moves; the second time a graph holds the parameters, which torch would not swap."""
    return (model.to(x.device)(x) * model.to(x.device)(x)).mean()


def square_in_double_first(model, x):
    return model.double()(x.double()).square().mean() + model.float()(x).square().mean()


@pytest.mark.parametrize("loss_fn", [square_sent_between, square_in_double_first])
def test_modules_are_converted_within_a_step_as_with_data(loss_fn):
    assert_equals_the_real_step(lambda: Step(nn.Linear(16, 8), torch.randn(16, 16), loss_fn, torch.optim.Adam))


def distance_from_a_copy(model, x):
    with torch.no_grad():
        expected = copy.deepcopy(model).eval()(x)
    return F.mse_loss(model(x), expected)


def test_a_module_is_copied_within_a_step_as_with_data(recwarn):
    """Batch norm counts its batches in a tensor that keeps its value."""

    def make_step():
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        return Step(model, torch.randn(16, 8), distance_from_a_copy, torch.optim.Adam)

    assert_equals_the_real_step(make_step, is_other_order=True)  # torch copies a storage without an operator
    assert not recwarn.list


@pytest.mark.parametrize("place", [Host(), Gpu(find_gpu("RTX 4090"))], ids=["host", "card"])
def test_copies_of_tensors_keep_what_torch_copies(place):
    with Simulation(place).running():
        layer = nn.BatchNorm1d(3).to(place.device_type)
        layer.weight.decay = [0.1]
        layer.bias.requires_grad_(False)
        layer(torch.ones(4, 3, device=place.device_type)).sum().backward()
        twin = copy.deepcopy(layer)
        assert (twin.weight.decay, twin.weight.decay is layer.weight.decay) == ([0.1], False)
        assert isinstance(twin.weight, nn.Parameter)
        assert not twin.bias.requires_grad
        assert twin.weight.grad.shape == (3,)
        assert twin.num_batches_tracked == 1
        assert twin.weight.untyped_storage()._cdata != layer.weight.untyped_storage()._cdata


@pytest.mark.parametrize("place", [Host(), Gpu(find_gpu("RTX 4090"))], ids=["host", "card"])
def test_a_graph_from_before_a_conversion_leads_to_the_parameters(place):
    with Simulation(place).running():
        layer, x = nn.Linear(3, 2).to(place.device_type), torch.ones(4, 3, device=place.device_type)
        loss = layer(x).sum()
        layer.to(x.device)
        loss.backward()
        assert layer.weight.grad.shape == (2, 3)


def two_optimizers() -> Step:
    torch.manual_seed(0)
    encoder, decoder = nn.Linear(8, 64), nn.Linear(64, 2)
    optimizers = [torch.optim.Adam(encoder.parameters()), torch.optim.SGD(decoder.parameters(), 0.1, momentum=0.9)]
    return Step(
        nn.Sequential(encoder, nn.Tanh(), decoder).double(), torch.randn(16, 8).double(), mean_square, optimizers
    )


def test_several_optimizers_step_as_in_a_loop():
    assert_equals_the_real_step(two_optimizers)


def test_several_optimizers_are_left_as_they_were_and_their_counts_of_steps_stay_on_the_host():
    step = two_optimizers()
    encoder, decoder = step.model[0], step.model[2]
    size = 2 * sum(each.nbytes for each in encoder.parameters()) + sum(each.nbytes for each in decoder.parameters())
    options = {"optimizer": step.optimizer, "target": "RTX 4090"}
    new = mk.estimate_memory_usage(step.model, step.batch, mean_square, **options)
    assert [len(each.state) for each in step.optimizer] == [0, 0]
    plain_step(step)()
    before = copy.deepcopy([each.state_dict() for each in step.optimizer])
    warm = mk.estimate_memory_usage(step.model, step.batch, mean_square, **options)
    assert new.optimizer_bytes == warm.optimizer_bytes == size
    assert new.peak_bytes == warm.peak_bytes
    torch.testing.assert_close([each.state_dict() for each in step.optimizer], before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("make", "got"),
    [
        (lambda own: [], "no optimizer"),
        (lambda own: [*own, "adamw"], "a list with a str"),
        (lambda own: lambda parameters: own, "a function that returns a list"),
        (lambda own: 3, "a int"),
    ],
)
def test_a_list_without_optimizers_is_refused_in_a_few_lines(make, got):
    step = two_optimizers()

    def estimate():
        mk.estimate_memory_usage(step.model, step.batch, mean_square, optimizer=make(step.optimizer))

    error = assert_refused(estimate, InputTypeError, f"got {got}; ", "optimizer=[first, second].")
    assert len(str(error)) < 500


@pytest.mark.parametrize(
    ("make", "got"),
    [
        (lambda model: torch.optim.Adam(model.parameters()), "AttributeError .*has no attribute 'parameters'"),
        (lambda parameters, lr: torch.optim.SGD(parameters, lr), "TypeError .*missing 1 required positional argument"),
    ],
)
def test_a_function_that_cannot_make_an_optimizer_of_the_parameters_is_refused_as_such(make, got):
    def estimate():
        mk.estimate_memory_usage(nn.Linear(4, 2), torch.randn(8, 4), mean_square, optimizer=make)

    error = assert_refused(
        estimate, InputTypeError, f"raises {got}.*optimizer=lambda parameters: .*optimizer=make_optimizer\\(model\\)"
    )
    assert not getattr(error, "__notes__", None)


def test_rows_of_a_data_set_on_the_host_count_as_these_rows_on_a_card():
    """`.to("cuda")` copies what a view shows; on the CPU the whole data set is held."""
    data, labels = torch.randn(4096, 256), torch.zeros(16, 256)
    model = nn.Linear(256, 256)

    def loss_fn(model, batch):
        return (model(batch[0]) - batch[1]).square().mean()

    def peak_bytes(x, target):
        return mk.estimate_memory_usage(model, (x, labels), loss_fn, optimizer="sgd", target=target).peak_bytes

    assert peak_bytes(data[:16], "RTX 4090") == peak_bytes(data[:16].clone(), "RTX 4090")
    assert peak_bytes(data[:16], "cpu") - peak_bytes(data[:16].clone(), "cpu") == data[16:].nbytes


@pytest.mark.parametrize("how", ["rows", "numbers"])
def test_results_of_unique_are_as_long_as_their_storage(how):
    """Of known integers torch returns the head of a tensor as long as they are, and that is what stays allocated."""
    ids = torch.repeat_interleave(torch.arange(8), 2**12)

    def loss_fn(model, ids):
        if how == "rows":
            return model(torch.unique(ids.view(-1, 2), dim=0)).square().mean()
        unique, counts = torch.unique_consecutive(ids, return_counts=True)
        return (model(unique) * counts[:, None]).square().mean()

    def step():
        loss_fn(model, ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    model = torch.nn.Embedding(8, 8)
    optimizer = torch.optim.SGD(model.parameters())
    estimate = mk.estimate_memory_usage(model, ids, loss_fn=loss_fn, optimizer=optimizer)
    step()
    with mk.Tracker(device="cpu") as tracker:
        step()
    assert estimate.confidence == "workspace"  # of the search for equal ones
    assert estimate.peak_bytes == tracker.peak_bytes > 2 * ids.nbytes


PLACES = torch.zeros(2, dtype=torch.int64)
# Tensors on the host among those on the card: kernels refuse them.
MIXED = {
    "the weight of a convolution": lambda: F.conv2d(on_card(2, 3, 8, 8), torch.ones(1, 3, 3, 3)),
    "the input of a convolution": lambda: F.conv2d(torch.ones(2, 3, 8, 8), on_card(1, 3, 3, 3)),
    "the bias of a convolution": lambda: F.conv2d(on_card(2, 3, 8, 8), on_card(1, 3, 3, 3), torch.ones(1)),
    "a recurrent layer": lambda: nn.LSTM(6, 5)(on_card(3, 2, 6)),
    "an embedding": lambda: nn.Embedding(5, 2)(on_card(4).long()),
    "rows on the host, places on the card": lambda: torch.randn(4, 6)[on_card(2).long()],
    "rows on the card, values on the host": lambda: on_card(4, 6).index_put_(
        (torch.zeros(2).long(),), torch.ones(2, 6)
    ),
    "a sum on the host": lambda: torch.randn(4, 6).add_(on_card(4, 6)),
    "a product": lambda: on_card(4, 6) @ torch.ones(6, 4),
}
TOGETHER = {
    "a number on the host": lambda: on_card(4, 6) * torch.tensor(2.0),
    "places on the host": lambda: on_card(4, 6)[PLACES],
    "a number put at places on the host": lambda: on_card(4, 6).index_put_((PLACES,), torch.tensor(1.0)),
    "a copy": lambda: torch.zeros(4, 6).copy_(on_card(4, 6)),
}


def on_card(*sizes):
    return torch.ones(sizes, device="cuda")


@pytest.mark.parametrize("name", MIXED)
def test_tensors_of_two_devices_are_refused_as_on_a_card(name):
    with mk.VirtualGPU("RTX 4090"), pytest.raises(RuntimeError, match=r"two (different )?devices"):
        MIXED[name]()


@pytest.mark.parametrize("name", TOGETHER)
def test_tensors_of_two_devices_that_go_together_run(name):
    with mk.VirtualGPU("RTX 4090"):
        assert TOGETHER[name]().shape


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
def test_a_backward_through_weights_that_a_step_has_changed_fails_as_on_a_card(make, foreach):
    """As in a GAN whose generator is trained by scores from before the discriminator's step."""
    with mk.VirtualGPU("RTX 4090"):
        judge, maker = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).cuda(), nn.Linear(4, 4).cuda()
        optimizer = make(judge.parameters(), lr=0.1, foreach=foreach)
        score = judge(maker(torch.ones(8, 4, device="cuda")))
        score.square().mean().backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            score.mean().backward()


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8:UserWarning")  # torch's own
@pytest.mark.parametrize("target", ["cpu", "RTX 4090"])
def test_masks_of_bytes_choose_as_masks_of_booleans(target):
    model, mask = nn.Linear(4, 4), torch.tensor([True, False, True, True, False, True])

    def estimate(mask):
        def loss_fn(model, batch):
            x, mask = batch
            return model(x)[mask].sum()

        return mk.estimate_memory_usage(
            model, (torch.ones(6, 4), mask), loss_fn=loss_fn, target=target, optimizer="sgd"
        )

    assert estimate(mask.byte()).peak_bytes == estimate(mask).peak_bytes
