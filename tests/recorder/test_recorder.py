"""The recorder's promises one by one: what is counted, when, and under which name."""

import copy
import gc
import inspect
import pickle
import sys
import threading
import warnings
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import memkit
from memkit._core.errors import InputError, StateError
from memkit._recorder.recorder import Recorder
from memkit._recorder.recording import Recording
from tests.forked import run_python_forked
from tests.helpers import assert_refused
from tests.versions import has, lacks
from tests.zoo import CASES, no_mark

HERE = __file__
PACKAGE = Path(memkit.__file__).parent
FLOAT = 4


def line_of(function, text: str) -> str:
    """The source that a recording gives for the one line of a function that contains a text."""
    lines, first = inspect.getsourcelines(function)
    (offset,) = (k for k, line in enumerate(lines) if text in line)
    return f"{HERE}:{first + offset} in {function.__name__}"


def by_size(recording: Recording, nbytes: int):
    return [s for s in recording.storages() if s.nbytes == nbytes]


def test_births_deaths_and_views():
    with Recorder() as recorder:
        x = torch.zeros(100)
        view = x.view(10, 10)[2:]
        y = x + 1
        del x  # the view keeps it
        assert recorder.live_bytes() == recorder.live_bytes("cpu") == 200 * FLOAT
        del view
        assert recorder.live_bytes() == 100 * FLOAT
        z = y * 2
        del y, z
    recording = recorder.recording()
    np.testing.assert_array_equal(recording.event_bytes, np.array([1, 1, -1, 1, -1, -1]) * 100 * FLOAT)
    np.testing.assert_array_equal(recording.event_storage, [0, 1, 0, 2, 1, 2])
    np.testing.assert_array_equal(recording.timeline(), np.array([1, 2, 1, 2, 1, 0]) * 100 * FLOAT)
    assert (recording.peak_bytes(), recording.peak_event(), recording.live_bytes()) == (800, 1, 0)
    assert [(s.birth, s.death) for s in recording.storages()] == [(0, 2), (1, 4), (3, 5)]


def test_an_operator_takes_few_functions():
    # What an operator costs, counted: a storage that is known takes no function of its own, and no line is looked up.
    x, y = torch.zeros(10), torch.zeros(10)
    runs = [lambda: x.add_(y), x.t, lambda: x + y]
    with Recorder():
        for run in runs:
            run()  # adopts both, and meets each operator and place
        in_place, view, born = map(functions_entered, runs)
    assert in_place == view == ["__torch_dispatch__"]
    assert born == ["__torch_dispatch__", "place", "_caller", "_note", "_book", "_follow", "_died"]


def test_looks_up_source_line_once_per_operator():
    x = torch.zeros(10, 10)
    with Recorder():
        x.add_(1)
        made = functions_entered(lambda: torch.native_layer_norm(x, (10,), None, None, 1e-5))
    assert (made.count("place"), made.count("_book")) == (1, 3)


def test_labels_of_a_later_step_take_as_many_functions_for_any_number_of_tensors():
    def entered(num_layers):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_layers)))
        optimizer = torch.optim.AdamW(model.parameters())
        with Recorder() as recorder:
            first = functions_entered(lambda: train(model, optimizer))
            assert first.count("_categorize") > 2 * num_layers
            return [
                *functions_entered(lambda: recorder._before_optimizer(optimizer)),
                *functions_entered(lambda: recorder._after_optimizer(optimizer)),
            ]

    assert entered(1) == entered(9)
    assert not {"_categorize", "_add_leaves"}.intersection(entered(9))


def test_one_tensor_that_is_replaced_between_steps_is_labeled():
    # Labels are checked for all tensors together: one new tensor among them is enough.
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with Recorder() as recorder:
        train(model, optimizer)
        optimizer.state[model[1].weight]["exp_avg"] = torch.zeros(10, 10)[:4, :4]
        model[0].weight.data = torch.zeros(9, 9)[:4, :4]
        train(model, optimizer)
    recording = recorder.recording()
    assert [(s.category, s.module) for s in by_size(recording, 100 * FLOAT)] == [("optimizer", "")]
    assert [(s.category, s.module) for s in by_size(recording, 81 * FLOAT)] == [("parameter", "0")]


def train(model, optimizer):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def test_lists_of_numbers_are_passed_over_and_lists_of_tensors_are_not():
    x, y = torch.zeros(10), torch.zeros(20)
    with Recorder() as recorder:
        x.view(5, 2)
        sizes = functions_entered(lambda: x.view(2, 5))
        kept = torch.cat([x, y])
    assert sizes == ["__torch_dispatch__"]
    assert [s.nbytes for s in recorder.recording().storages()] == [40, 80, 120]
    del kept


def functions_entered(run) -> list[str]:
    """Functions of memkit that a call enters."""
    entered = []
    sys.setprofile(lambda frame, event, _: entered.append(frame.f_code) if event == "call" else None)
    try:
        run()
    finally:
        sys.setprofile(None)
    return [code.co_name for code in entered if Path(code.co_filename).is_relative_to(PACKAGE)]


def test_the_same_line_is_the_same_place():
    # Memory: a place is kept once, however many storages come from it.
    with Recorder() as recorder:
        kept = [torch.zeros(size) for size in range(1, 5)]
        other = torch.zeros(5)
    places = recorder.events_since(0).places
    assert len({id(place) for place in places}) == 2
    assert places[0] == places[3] != places[4]
    del kept, other


def test_live_tensors_have_no_death_and_later_ones_are_ignored():
    with Recorder() as recorder:
        x = torch.zeros(100)
    del x
    assert recorder.live_bytes() == 400
    recording = recorder.recording()
    assert recording.live_bytes() == 400
    assert recording.storages()[0].death is None


def test_records_resizes():
    with Recorder() as recorder:
        x = torch.zeros(100)
        x.resize_(300)
        assert recorder.live_bytes() == 1200
        x.untyped_storage().resize_(0)  # as FSDP frees a gathered parameter
        assert recorder.live_bytes() == 0
        x.untyped_storage().resize_(400)
        assert recorder.live_bytes() == 400
    recording = recorder.recording()
    np.testing.assert_array_equal(recording.timeline(), [400, 1200, 0, 400])
    assert recording.top(1)[0].nbytes == 1200


def test_a_gathered_parameter_is_born_when_its_storage_grows():
    gathered = torch.zeros(100).untyped_storage()
    gathered.resize_(0)
    with Recorder() as recorder:
        gathered.resize_(800)
        gathered.resize_(0)
    assert recorder.recording().peak_by("category") == {"parameter": 800}
    assert recorder.live_bytes() == 0


def test_counts_preexisting_tensors_from_the_start():
    model, late = nn.Linear(10, 10, bias=False), torch.zeros(30)
    with Recorder() as recorder:
        big = torch.zeros(1000)
        del big
        model(torch.zeros(1, 10))
        late + 1
    recording = recorder.recording()
    assert recording.peak_bytes() == 4000 + 400 + 120  # both were there while the big one lived
    assert recording.peak_by("category") == {"temporary": 4000, "parameter": 400, "input": 120}
    assert [s.birth for s in recording.storages() if not s.operator] == [0, 1]


def test_batches_of_later_steps_do_not_count_from_the_start():
    model = nn.Linear(1000, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder() as recorder:
        for _ in range(5):
            batch = torch.from_numpy(np.ones((50, 1000), dtype=np.float32))  # no operator makes it
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            del batch
    assert recorder.recording().peak_by("category")["input"] == 200_000


def test_new_tensors_made_below_the_dispatcher_are_births():
    with Recorder() as recorder:
        big = torch.zeros(1000)
        del big
        x = torch.tensor([1.0] * 50)
    recording = recorder.recording()
    assert recording.peak_bytes() == 4000
    assert by_size(recording, 200)[0].operator == "aten.lift_fresh.default"
    del x


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
def test_counts_storages_of_sparse_tensors():
    with Recorder() as recorder:
        indices, values = torch.zeros(1, 10, dtype=torch.int64), torch.ones(10, 3)
        coo = torch.sparse_coo_tensor(indices, values, (100, 3), check_invariants=False)
        del indices, values
        assert recorder.live_bytes() == 80 + 120
        twice = coo + coo
        assert recorder.live_bytes() > 200
        csr = torch.eye(8).to_sparse_csr()
        live = recorder.live_bytes()
        del csr
        # The columns are a view of a block that holds rows and columns.
        assert live - recorder.live_bytes() == 9 * 8 + 2 * 8 * 8 + 8 * FLOAT
        del coo, twice
        assert recorder.live_bytes() == 0


def test_sparse_gradients():
    embedding = nn.Embedding(100, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(embedding.parameters())
    with Recorder() as recorder:
        embedding(torch.arange(10)).sum().backward()
        optimizer.step()
    assert recorder.recording().peak_by("category")["gradient"] == 10 * (8 + 4 * FLOAT)


def test_names_opaque_layouts_without_counting():
    with Recorder() as recorder:
        x = torch.zeros(8, 8).to_mkldnn()
        y = x + x
    assert recorder.recording().peak_bytes() == 256
    assert set(recorder.recording().untracked) >= {"aten.add.Tensor: torch._mkldnn"}
    del y


def test_wrapper_subclasses_count_by_their_inner_tensors():
    from torch.testing._internal.two_tensor import TwoTensor

    with Recorder() as recorder:
        x = TwoTensor(torch.zeros(100), torch.zeros(100))
        y = x * 2
        del x
        assert recorder.live_bytes() == 800
    del y
    assert {s.operator for s in recorder.recording().storages()} == {"aten.zeros.default", "aten.mul.Tensor"}


class Planted(nn.Module):
    """Two layers of the same kind: the second one's activation is the big one."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Linear(4, 4)
        self.inner = nn.ModuleDict({"wide": nn.Linear(4, 1000)})

    def forward(self, x):
        x = self.small(x)
        x = self.inner["wide"](x)  # big
        return torch.sigmoid(x)  # after it


def train_planted(model, x):
    y = model(x)
    loss = y.square().mean()
    loss.backward()  # engine


def test_names_module_operator_and_line_in_forward_and_backward():
    with Recorder() as recorder:
        train_planted(Planted(), torch.zeros(64, 4))
    recording = recorder.recording()
    size = 64 * 1000 * FLOAT
    big = [(s.phase, s.operator, s.module, s.source) for s in by_size(recording, size)]
    forward, after = line_of(Planted.forward, "# big"), line_of(Planted.forward, "# after it")
    square = line_of(train_planted, "square")
    assert big[:3] == [
        ("forward", "aten.addmm.default", "inner.wide", forward),
        ("forward", "aten.sigmoid.default", "Planted", after),
        ("forward", "aten.pow.Tensor_Scalar", "", square),
    ]
    backward = big[3:]
    assert {(phase, source) for phase, _, _, source in backward} == {("backward", square), ("backward", after)}
    assert ("backward", "aten.sigmoid_backward.default", "Planted", after) in backward
    weight_gradient = next(s for s in by_size(recording, 1000 * 4 * FLOAT) if s.phase == "backward")
    assert (weight_gradient.module, weight_gradient.source) == ("inner.wide", forward)
    assert weight_gradient.category == "gradient"


DEEP = """
import torch
from memkit._recorder.recorder import Recorder

class Deeper(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, depth):
        ctx.save_for_backward(x)
        ctx.depth = depth
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            inner = Deeper.apply(y, ctx.depth - 1) if ctx.depth else y
            inner.sigmoid().sum().backward()
        return y.grad, None

x = torch.ones(1000, requires_grad=True)
with Recorder() as recorder:
    Deeper.apply(x, 70).sum().backward()
made = [each for each in recorder.recording().storages() if each.operator == "aten.sigmoid_backward.default"]
print(len(made), *sorted({each.phase for each in made}))
"""


@pytest.mark.slow
def test_operators_in_autograds_own_threads_have_a_place():
    """There, as in every backward on a GPU, no Python frame calls the operator.

    Beyond some depth of a backward in another, autograd goes on in a thread of its own; a process with such threads
    cannot be forked any more, so this is one of its own.
    """
    assert run_python_forked(DEEP).stdout.split() == ["71", "backward"]


def test_two_roots_have_distinct_names():
    first, second = nn.Sequential(nn.Linear(2, 30)), nn.Sequential(nn.Linear(30, 40))
    with Recorder() as recorder:
        second(first(torch.zeros(5, 2)))
    names = {s.nbytes: s.module for s in recorder.recording().storages()}
    assert names[2 * 30 * FLOAT] == names[5 * 30 * FLOAT] == "0"
    assert names[30 * 40 * FLOAT] == names[5 * 40 * FLOAT] == "Sequential#2.0"


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputed_tensors_belong_to_their_module(use_reentrant):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 500), nn.Linear(500, 8)

        def forward(self, x):
            return self.down(self.up(x).relu())

    model = nn.Sequential(nn.Linear(8, 8), Block())
    with Recorder() as recorder:
        h = model[0](torch.zeros(16, 8, requires_grad=True))
        checkpoint(model[1], h, use_reentrant=use_reentrant).sum().backward()
    made = [(s.phase, s.operator, s.module) for s in by_size(recorder.recording(), 16 * 500 * FLOAT)]
    assert made.count(("forward", "aten.addmm.default", "Block.up")) == 1
    assert made.count(("backward", "aten.addmm.default", "Block.up")) == 1
    assert made.count(("backward", "aten.relu.default", "Block")) == 1


def test_categories_of_a_training_step():
    model = nn.Sequential(nn.Linear(10, 20, bias=False), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 1, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with Recorder() as recorder:
        x, y = torch.zeros(32, 10), torch.zeros(32, 1)
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    category = {(s.nbytes, s.operator, s.phase): s.category for s in recorder.recording().storages()}
    assert category[800, "", "other"] == "parameter"
    assert category[80, "", "other"] in ("parameter", "buffer")
    assert category[1280, "aten.zeros.default", "other"] == "input"
    assert category[128, "aten.zeros.default", "other"] == "input"  # the target: no module sees it
    assert category[32 * 20 * FLOAT, "aten.mm.default", "forward"] == "activation"
    assert (
        category[32 * 20 * FLOAT, "aten.native_batch_norm.default", "forward"] == "temporary"
    )  # ReLU keeps its result instead
    assert category[800, "aten.mm.default", "backward"] == "gradient"
    assert category[800, "aten.zeros_like.default", "optimizer"] == "optimizer"
    assert category[800, "aten.sqrt.default", "optimizer"] == "temporary"  # inside of the optimizer


def test_category_sums_and_every_other_sum_add_up_to_the_peak():
    with Recorder() as recorder:
        case = CASES["gan"]()
        for _ in range(2):
            case.step(no_mark)
    recording = recorder.recording()
    for label in recording.codes:
        assert sum(recording.peak_by(label).values()) == recording.peak_bytes() > 0
        assert sum(recording.peak_by(label, "cpu").values()) == recording.peak_bytes("cpu")
    holders = recording.top(10_000)
    assert sum(s.nbytes for s in holders) == recording.peak_bytes()
    assert [s.nbytes for s in holders] == sorted((s.nbytes for s in holders), reverse=True)
    assert recording.timeline()[-1] == recording.live_bytes() == recorder.live_bytes()


def test_peaks_are_per_device():
    with Recorder() as recorder:
        host = torch.zeros(10)
        other = torch.zeros(100, device="meta")
        del host
        more = torch.zeros(5)
    recording = recorder.recording()
    assert recording.devices == ("cpu", "meta")
    assert (recording.peak_bytes("cpu"), recording.peak_bytes("meta"), recording.peak_bytes()) == (40, 400, 440)
    assert recording.peak_by("operator", "cpu") == {"aten.zeros.default": 40}
    assert_refused(lambda: recording.peak_bytes("cuda:0"), InputError, "a device of this recording: cpu, meta")
    assert_refused(lambda: recording.peak_by("color"), InputError, "peak_by('color')", "one of device")
    assert_refused(lambda: recording.live_by("color"), InputError, "live_by('color')", "one of device")
    del other, more


def test_phases_follow_the_step():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with Recorder() as recorder:
        for _ in range(2):
            x = torch.zeros(3, 4)
            model(x).sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    step = ["other", "forward", "backward", "other", "optimizer"]
    assert [phase for _, phase in recorder.recording().phases] == [*step, *step, "other"]


def test_double_backward_is_forward_again_after_the_first():
    def penalty():
        x = torch.ones(1000, requires_grad=True)
        (g,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        norm = g.square()  # of the gradient
        norm.sum().backward()

    with Recorder() as recorder:
        penalty()
    recording = recorder.recording()
    assert [phase for _, phase in recording.phases] == ["other", "forward", "backward", "forward", "backward"]
    second = [s for s in recording.storages() if s.phase == "backward" and "of the gradient" not in s.source]
    assert f"{HERE}:" in second[-1].source
    assert any(s.source == line_of(penalty, "# of the gradient") for s in recording.storages())


def test_custom_functions_hooks_and_threads_do_not_confuse():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2 + grad * 0  # in the function

    def in_another_thread():
        nn.Linear(8, 8)(torch.zeros(1000, 8))

    with Recorder() as recorder:
        x = torch.ones(500, requires_grad=True)
        y = x * 1
        y.register_hook(lambda grad: grad * 1)
        (Double.apply(y) + y.sin()).sum().backward()
        thread = threading.Thread(target=in_another_thread)
        thread.start()
        thread.join()
    recording = recorder.recording()
    assert not by_size(recording, 1000 * 8 * FLOAT)  # the mode belongs to a thread
    assert not any(s.module for s in recording.storages())
    sources = {s.source for s in recording.storages() if s.phase == "backward"}
    assert line_of(Double.backward, "# in the function") in sources


def test_inference_and_autocast():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
    with Recorder() as recorder, torch.inference_mode():
        model(torch.zeros(8, 64))
    assert recorder.recording().peak_by("category")["input"] == 8 * 64 * FLOAT
    with Recorder() as recorder, torch.autocast("cpu", torch.bfloat16):
        model(torch.zeros(8, 64))
    assert by_size(recorder.recording(), 64 * 64 * 2)[0].operator == "aten._to_copy.default"


class Traced(TorchDispatchMode):
    """The naive way to do without torch's wrapper."""

    num_operators = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_operators += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("mode", "is_compiled"), [(Recorder, False), (Traced, True)])
def test_the_compiler_leaves_the_recorder_alone(mode, is_compiled):
    wrapper = "torch.utils._python_dispatch.TorchDispatchMode._should_skip_dynamo"
    if is_compiled and not has(wrapper):
        pytest.skip(lacks(wrapper, "the control is about it"))
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).requires_grad_(requires_grad=False)
    compiled = torch.compile(model, backend="eager")
    with warnings.catch_warnings(action="ignore"), mode():
        for rows in (2, 3):
            compiled(torch.zeros(rows, 4))
    entries = _debug_get_cache_entry_list(mode.__torch_dispatch__.__code__)
    assert bool(entries) == is_compiled


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")  # torch says that it sees global module hooks
@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("before", [0, 1], ids=["first call", "later call"])
def test_compiled_code_is_used_again_after_the_block(fullgraph, before):
    """torch.compile skips a function that runs under a dispatch mode, in later calls too."""
    calls = []

    def backend(graph, _):
        def run(*args):
            calls.append(None)
            return graph.forward(*args)

        return run

    torch.compiler.reset()  # other tests' modes made it skip functions that all modules share
    model = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), backend=backend, fullgraph=fullgraph)
    for _ in range(before):
        model(torch.ones(2, 4))
    with Recorder():
        model(torch.ones(2, 4)).sum().backward()
    assert len(calls) == before
    model(torch.ones(2, 4))
    assert len(calls) == before + 1


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")  # torch says that it sees global module hooks
def test_compiled_code_is_used_again_whichever_threads_block_ends_first():
    """Torch has one stance for all threads: set back by the first block to end, it would stay what the second found."""
    began, may_end, graphs = threading.Event(), threading.Event(), []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    def other():
        with Recorder():
            began.set()
            may_end.wait()

    torch.compiler.reset()
    model = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), backend=backend)
    thread = threading.Thread(target=other)
    with Recorder():
        thread.start()
        began.wait()
        model(torch.ones(2, 4))
    model(torch.ones(2, 4))  # in the other thread's block still
    assert not graphs
    may_end.set()
    thread.join()
    model(torch.ones(2, 4))
    assert len(graphs) == 1


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")  # torch says that it sees global module hooks
def test_compiled_model_is_recorded_eagerly():
    compiled = torch.compile(nn.Sequential(nn.Linear(64, 64), nn.ReLU()), backend="eager")
    with Recorder() as recorder:
        out = compiled(torch.zeros(8, 64))
    assert [s.module for s in by_size(recorder.recording(), 8 * 64 * FLOAT)][-1].endswith("1")
    del out


def test_error_in_the_block_leaves_no_trace():
    hooks = [
        module_hooks._global_forward_pre_hooks,
        module_hooks._global_forward_hooks,
        module_hooks._global_forward_hooks_always_called,
        optimizer_hooks._global_optimizer_pre_hooks,
        optimizer_hooks._global_optimizer_post_hooks,
    ]
    before = [len(h) for h in hooks]

    class Fails(nn.Module):
        def forward(self, x):
            self.y = x * 2
            raise torch.OutOfMemoryError("planted")

    with Recorder() as recorder:
        with pytest.raises(torch.OutOfMemoryError):
            nn.Sequential(nn.Identity(), Fails())(torch.zeros(100))
        after = torch.zeros(7)  # no module is left on the stack
    del after
    with pytest.raises(torch.OutOfMemoryError), Recorder() as failed:
        Fails()(torch.zeros(100))
    assert [len(h) for h in hooks] == before
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    assert by_size(recorder.recording(), 28)[0].module == ""
    assert failed.recording().peak_bytes() == 800
    with pytest.raises(StateError, match="entered before"), failed:
        pass


def test_no_tensor_is_kept_alive():
    with Recorder() as recorder:
        model = CASES["encoder"]()
        model.step(no_mark)
        x = torch.zeros(100)
        dead_inside = weakref.ref(x.untyped_storage())
        del x
        assert dead_inside() is None
    kept = [weakref.ref(p) for p in model.model.parameters()] + [weakref.ref(model.model)]
    del model
    gc.collect()
    assert [ref() for ref in kept] == [None] * len(kept)
    assert recorder.recording().peak_bytes() > 0


@pytest.mark.parametrize("name", ["encoder_dropout", "point_net", "checkpointed", "gan"])
def test_results_are_bit_equal_to_a_run_without_recorder(name):
    torch.manual_seed(1)
    plain = CASES[name]()
    watched = copy.deepcopy(plain.model)
    state = torch.get_rng_state()
    for _ in range(3):
        plain.step(no_mark)
    torch.manual_seed(1)
    case = CASES[name]()
    case.model.load_state_dict(watched.state_dict())
    torch.set_rng_state(state)
    with Recorder():
        for _ in range(3):
            case.step(no_mark)
    for ours, theirs in zip(case.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_shared_gradients_are_not_taken_for_sums_in_place():
    # Plain autograd must not write into a gradient that a hook keeps, so neither may the recorder count it as reused.
    def peak(*, keep: bool) -> int:
        kept = []
        with Recorder() as recorder:
            x = torch.ones(1000, requires_grad=True)
            y = x * 1
            z = torch.sin(y)
            w = torch.cos(y)
            for branch in (z, w):
                branch.register_hook(lambda grad: None)
            if keep:
                y.register_hook(lambda grad: None)
            v = Keep.apply(y, kept) if keep else y * 1
            (z + w + v).sum().backward()
        return sum(s.phase == "backward" and s.nbytes == 4000 for s in recorder.recording().storages())

    assert peak(keep=True) == peak(keep=False) + 1


class Keep(torch.autograd.Function):
    """Multiplies by one, and keeps the gradient that it returns."""

    @staticmethod
    def forward(ctx, x, kept):
        ctx.kept = kept
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        result = grad * 1
        ctx.kept.append(result)
        return result, None


def test_a_recording_is_data():
    num = 50_000
    storage = np.concatenate([np.arange(num), np.arange(num)])
    change = np.concatenate([np.full(num, 8), np.full(num, -8)])
    code = np.zeros(num, dtype=np.int64)
    labels = ("device", "category", "module", "operator", "phase", "source")
    recording = Recording(storage, change, dict.fromkeys(labels, code), dict.fromkeys(labels, ("a",)), (), ())
    assert recording.peak_by("module") == {"a": 8 * num}
    assert len(recording.top(10)) == 10
    assert recording.timeline("a")[-1] == recording.live_bytes() == 0
    again = pickle.loads(pickle.dumps(recording))
    assert again.peak_by("source") == recording.peak_by("source")


def test_empty_recording_is_valid():
    with Recorder() as recorder:
        pass
    recording = recorder.recording()
    assert (recording.peak_bytes(), recording.live_bytes(), recording.peak_event()) == (0, 0, -1)
    assert recording.peak_by("module") == {}
    assert recording.top(3) == recording.storages() == ()


def test_lazy_module_has_no_memory_before_materializing():
    model = torch.nn.Sequential(torch.nn.LazyLinear(8))
    with Recorder() as recorder:
        model(torch.zeros(2, 4))
    assert recorder.recording().peak_bytes() >= 8 * 4 * 4


TABLE = torch.zeros(8, 256)


class Tabled(nn.Module):
    """Takes parts of a table that it holds as a plain attribute."""

    def __init__(self):
        super().__init__()
        self.linear, self.table = nn.Linear(256, 256), torch.zeros(8, 256)

    def forward(self, x):
        return self.linear(x) * self.table[: len(x)]


PARTS = {
    "a slice": lambda: TABLE[:4],
    "a row": lambda: TABLE.unbind(0)[0],
    "a half": lambda: torch.chunk(TABLE, 2)[1],
    "a view of a view": lambda: TABLE[2:].t()[:, :4].t(),
    "whole, then a part": lambda: (TABLE * TABLE)[:4] + TABLE[:4],
}


@pytest.mark.parametrize("part", [*PARTS, "of an attribute"])
def test_parts_of_a_tensor_from_outside_count_once_without_data_as_with_it(part):
    """Operators without data make views without data, whose memory is that of the tensor with data."""
    model, x = Tabled() if part == "of an attribute" else nn.Linear(256, 256), torch.randn(4, 256)
    take = PARTS.get(part, lambda: 1.0)

    def loss_fn(model, x):
        return (model(x) * take()).square().mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    estimate = memkit.estimate_memory_usage(model, x, loss_fn, optimizer=optimizer)

    def step():
        loss_fn(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with Recorder() as recorder:
        step()
    assert estimate.peak_bytes == recorder.recording().peak_bytes()
