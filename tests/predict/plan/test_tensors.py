"""Choices of saved tensors: their sums against dry runs and against every choice there is."""

import copy
import dataclasses
import itertools
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import memkit as mk
from memkit._core.errors import ConfigError, MemkitWarning
from memkit._recorder.recorder import Recorder
from memkit._tape.notes import OperatorNote, SaveNote, ValueNote
from memkit.predict.plan import tensors, trial
from memkit.predict.plan.host import HostTimes
from memkit.predict.plan.tensors import TensorChoices
from memkit.train.saved_tensors import treat_saved_tensors
from tests.helpers import FunctionsEntered, assert_refused, assert_same, one_in
from tests.train.test_treatments import UNet


def mean_square(model, x):
    return model(x).square().mean()


def chain(depth=4, width=64):
    layers = [nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(depth)]
    return nn.Sequential(*layers)


def encoder():
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


MODELS = {
    "chain": (chain, (512, 64)),
    "encoder": (encoder, (8, 64, 64)),
    "unet": (UNet, (4, 3, 64, 64)),
}


@pytest.fixture
def offloading_is_the_fastest(monkeypatch):
    monkeypatch.setattr(HostTimes, "moving_seconds", lambda *_: 1e-9)
    monkeypatch.setattr(HostTimes, "following_seconds", lambda *_: 1e-3)  # on a busy machine it may seem to be free


@pytest.fixture
def choices_of(monkeypatch):
    """Plans for a machine with a slow disk, and returns the choices that the plan was made from."""
    found = []
    monkeypatch.setattr(HostTimes, "moving_seconds", lambda _, num_bytes: num_bytes / 1e8)
    make = trial.StepTrials.tensor_choices
    monkeypatch.setattr(
        trial.StepTrials, "tensor_choices", lambda self, arrangement: found.append(make(self, arrangement)) or found[-1]
    )

    def plan(model, x, **settings):
        settings = {"budget": "1GiB", "micro_batch_size": len(x), "treat": "tensors", "curve": True} | settings
        plan = mk.plan_training(model, x, mean_square, "sgd", **settings)
        return plan, found[-1]

    return plan


@pytest.mark.parametrize("name", one_in(3, MODELS))
def test_sums_match_dry_runs(name, choices_of):
    make, shape = MODELS[name]
    torch.manual_seed(0)
    plan, choices = choices_of(make(), torch.randn(shape))
    by_plan = {choices.plan(each): each for each in choices.choices}
    plain = plan.candidates[0]
    num_equal = 0
    for each in plan.candidates[1:]:
        choice = by_plan[each.saved_tensors]
        less, found = choices.choices[0].peak_bytes - choice.peak_bytes, plain.required_bytes - each.required_bytes
        assert abs(less - found) <= 0.05 * plain.required_bytes  # which choices are tried depends on the machine
        num_equal += abs(less - found) <= 0.001 * plain.required_bytes
        assert each.seconds >= plain.seconds
    assert num_equal >= 0.7 * len(plan.candidates[1:])
    assert plan.least_bytes == min(each.required_bytes for each in plan.candidates) < 0.75 * plain.required_bytes


@pytest.mark.parametrize("name", ["chain", pytest.param("encoder", marks=pytest.mark.slow)])
@pytest.mark.parametrize("share", [pytest.param(0.8, marks=pytest.mark.slow), 0.5])
def test_real_step_matches_the_plan(name, share, choices_of):
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape)
    held = sum(each.nbytes for each in model.parameters())
    whole = mk.estimate_memory_usage(model, x, mean_square, optimizer="sgd").peak_bytes
    budget = 2 * held + int(share * (whole - 2 * held))
    plan, _ = choices_of(model, x, budget=budget, curve=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with mk.MemoryEfficientTrainingWrapper(model, optimizer, probe=False, **plan.wrapper_settings()) as trainer:
        trainer.train_step(x, mean_square)
        with Recorder() as recorder:
            recorder.label(list(model.parameters()), "parameter")
            recorder.label([x], "input")
            trainer.train_step(x, mean_square)
    peak = recorder.recording().peak_bytes()
    assert plan.predicted_peak_bytes <= peak <= plan.required_bytes <= budget
    assert peak - plan.predicted_peak_bytes <= 5056 * (2 + plan.saved_tensors.num_random) + 64  # random state, numbers


def test_no_choice_of_all_is_faster_at_its_memory(choices_of):
    """Every subset of the tensors of a small model, by the same sums: the order of choices is near the best."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 96), nn.GELU(), nn.Tanh(), nn.Linear(96, 32)) for _ in "12"))
    _, choices = choices_of(model, torch.randn(4096, 32), curve=False, budget="6MiB")
    saved = [each for each in choices.values if each.is_saved and each.nbytes > 1000]
    assert len(saved) <= 10
    found = []
    for kept in itertools.product((False, True), repeat=len(saved)):
        again = {maker for value, keeps in zip(saved, kept, strict=True) if not keeps for maker in value.makers}
        held = {value.number for value, keeps in zip(saved, kept, strict=True) if keeps}
        found.append(choices._choice(frozenset(again | _unsaved(choices, again, held)), frozenset()))
    for budget in [each.peak_bytes for each in choices.choices if not each.offloaded]:
        best = min(each.seconds for each in found if each.peak_bytes <= budget)
        assert choices.within(budget).seconds <= 1.15 * best + 1e-9


def test_keeps_what_is_gone_by_the_peak():
    """The later of two tensors is larger, so moving it saves more per second; but the peak comes when it is gone."""
    operators = [OperatorNote("aten.bernoulli.default", 0.0, 0, repeats=False, is_random=True) for _ in "12"]
    early = ValueNote(0, 1000, [0], death=1, is_saved=True, first_use=9)
    late = ValueNote(1, 4000, [1], death=2, is_saved=True, first_use=4)
    operators[0].makes, operators[1].makes = [early], [late]
    base = np.array([0, 1000, 5000, 0, 4000, 0, 9000, 0, 0, 1000, 0])
    saves = [SaveNote("floating 2-D", each) for each in (early, late)]
    choices = TensorChoices(operators, [early, late], saves, base, 0, True, lambda size: 1 + size / 1000, 1.0, 1.0, 1.0)
    assert choices.choices[0].peak_bytes == 10_000
    found = choices.within(9000)
    assert (found.offloaded, found.peak_bytes) == ({0}, 9000)
    assert choices.plan(found).moved == {0}
    assert choices.within(8999) is None


def test_keeps_again_what_would_need_more_at_the_peak():
    """The second value is cheap to make again, but from the first one, which would then be there earlier."""
    heavy, light = (OperatorNote(f"operator {number}", 1.0 - number / 2, 0, True, False) for number in range(2))
    first, second = (ValueNote(number, 1_000, [number], death=2, is_saved=True) for number in range(2))
    first.first_use, second.first_use = 9, 5
    heavy.makes, light.makes, light.sources = [first], [second], [first]
    base = np.array([0, 0, 0, 0, 0, 0, 1_500, 1_500, 0, 0, 0])  # the second value is there for its use
    choices = TensorChoices([heavy, light], [first, second], [], base, 0, False, lambda size: 1.0, 0.0, 0.0, 0.0)
    for again in {1}, {0, 1}:
        assert choices.levels(frozenset(again), frozenset()).max() == 2_500  # as without
    assert choices.within(1_500).recomputed == {0}
    assert choices.least.recomputed == {0}


def test_memory_is_added_up_in_proportion_to_the_operators(monkeypatch):
    """Each sum goes through all of them, and a descent has as many moves: models of thousands need fewer descents."""
    monkeypatch.setattr(tensors, "_MOST_OPERATORS", 80)
    num_sums = []
    for depth in (20, 80):
        operators = [OperatorNote(f"operator {number}", 1.0, 0, True, False) for number in range(depth)]
        values = [ValueNote(number, 100, [number], death=depth, is_saved=True) for number in range(depth)]
        for number, (operator, value) in enumerate(zip(operators, values, strict=True)):
            value.first_use = 2 * depth - number
            operator.makes, operator.sources = [value], values[max(0, number - 1) : number]
        base = np.zeros(2 * depth + 1, dtype=np.int64)
        choices = TensorChoices(operators, values, [], base, 0, False, lambda size: 1.0, 0.0, 0.0, 0.0)
        with FunctionsEntered() as entered:
            assert choices.within(depth * 75) is not None
        num_sums.append(entered.own.count(TensorChoices.levels.__code__))
    assert num_sums[1] < 3 * num_sums[0]


@pytest.mark.parametrize(("tape_seconds", "is_moved"), [(10.0, True), (1.0, False)])
def test_time_of_the_tape_decides_between_offload_and_recomputation(tape_seconds, is_moved):
    operator = OperatorNote("aten.gelu.default", 1.0, 0, repeats=True, is_random=False)
    value = ValueNote(0, 1000, [0], death=1, is_saved=True, first_use=4)
    operator.makes = [value]
    saves = [SaveNote("floating 2-D", value)]
    base = np.array([0, 1000, 5000, 0, 1000, 0])
    choices = TensorChoices([operator], [value], saves, base, 0, True, lambda size: size / 200, 1.0, 1.0, tape_seconds)
    found = choices.within(5500)
    assert (found.offloaded == {0}, found.recomputed == {0}) == (is_moved, not is_moved)
    assert found.seconds == (6.0 if is_moved else 4.0)  # to save, and to move; or the operator, Python and the tape


@pytest.mark.slow
@pytest.mark.parametrize("treat", [pytest.param("tensors", marks=pytest.mark.slow), "blocks"])
def test_offload_can_be_ruled_out(treat):
    model, x = encoder(), torch.randn(8, 64, 64)
    settings = {"micro_batch_size": 8, "treat": treat, "may_offload": False}
    whole = mk.plan_training(model, x, mean_square, "sgd", budget="1GiB", micro_batch_size=8).required_bytes
    plan = mk.plan_training(model, x, mean_square, "sgd", budget=int(0.8 * whole), **settings)
    treated = plan.saved_tensors
    assert "offload" not in (plan.checkpoint or {}).values()
    assert treated is None or (treated.offloaded, treated.moved, treated.offloaded_bytes) == (
        frozenset(),
        frozenset(),
        0,
    )
    assert treated is not None or plan.checkpoint
    assert_refused(
        lambda: mk.plan_training(model, x, mean_square, "sgd", budget="100KiB", **settings),
        ConfigError,
        "leave may_offload=False out",
    )


def test_scratch_memory_inside_a_kernel_decides_what_goes(choices_of):
    """oneDNN's backward of an LSTM takes more than all that waits: only what waits by then is worth giving up."""
    torch.manual_seed(0)

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Sequential(*(each for _ in range(4) for each in (nn.Linear(64, 64), nn.Tanh())))
            self.net, self.head = nn.LSTM(64, 64, batch_first=True), nn.Sequential(nn.Linear(64, 256), nn.Tanh())

        def forward(self, x):
            return self.head(self.net(self.first(x))[0])

    model, x = Tagger(), torch.randn(16, 64, 64)
    whole = mk.plan_training(model, x, mean_square, "sgd", budget="1GiB", micro_batch_size=16).required_bytes
    plan, choices = choices_of(model, x, curve=False, budget=whole - x.nbytes * 3 // 2)
    chosen = plan.saved_tensors
    lstm = next(number for number, name in enumerate(chosen.operators) if "rnn" in name)
    assert chosen.recomputed_bytes + chosen.offloaded_bytes == 2 * x.nbytes
    assert all(number < lstm for number in chosen.recomputed | chosen.offloaded)
    assert choices.saved_bytes > 10 * x.nbytes


def _unsaved(choices: TensorChoices, again: set[int], held: set[int]) -> set[int]:
    """Operators of unsaved values that those among ``again`` need."""
    more, waiting = set(), list(again)
    while waiting:
        for source in choices.operators[waiting.pop()].sources:
            if not source.is_saved and source.number not in held and not more.issuperset(source.makers):
                more.update(source.makers)
                waiting += source.makers
    return more


@pytest.mark.slow
def test_a_card_and_a_model_without_data():
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.1, batch_first=True)
        model = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        x = torch.empty(48, 1024, 512)
    settings = {"budget": "6GiB", "target": "RTX 4090", "precisions": ["bf16-mixed"], "micro_batch_size": 48}
    by_tensors = mk.plan_training(model, x, mean_square, "adamw", treat="tensors", **settings)
    by_blocks = mk.plan_training(model, x, mean_square, "adamw", treat="blocks", **settings)
    assert by_tensors.required_bytes <= 6 * 2**30
    assert by_tensors.saved_tensors is not None
    assert by_tensors.checkpoint is None
    assert by_tensors.predicted_seconds < by_blocks.predicted_seconds


def test_reports_least_possible_budget():
    model, x = chain(), torch.randn(512, 64)
    settings = {"micro_batch_size": 512, "may_offload": False}  # what is offloaded depends on measured times
    plan = mk.plan_training(model, x, mean_square, "sgd", budget="1GiB", curve=True, **settings)
    with pytest.raises(ConfigError) as caught:
        mk.plan_training(model, x, mean_square, "sgd", budget="600KiB", treat="tensors", **settings)
    assert f"budget='{plan.least_bytes}B'" in str(caught.value)


@pytest.mark.slow
def test_least_without_offload_is_the_same_each_time(choices_of):
    """Times are measured within the budget; the least budget that an error names must do in the next call."""
    torch.manual_seed(0)
    _, choices = choices_of(UNet(), torch.randn(4, 3, 64, 64))
    found = set()
    for seed in range(3):
        drawn = np.random.default_rng(seed).exponential(1.0, len(choices.operators))
        timed = [
            dataclasses.replace(each, seconds=seconds) for each, seconds in zip(choices.operators, drawn, strict=True)
        ]
        found.add(dataclasses.replace(choices, operators=timed, may_offload=False).least.recomputed)
    assert len(found) == 1


def test_a_teacher_is_sent_to_the_device_in_each_micro_batch():
    """Nothing moves; torch would not swap parameters that the notes on the forward refer to."""
    model, teacher = chain(), chain().requires_grad_(False)

    def distill(model, x):
        return nn.functional.mse_loss(model(x), teacher.to(x.device)(x))

    def distill_at_once(model, x):
        return nn.functional.mse_loss(model(x), teacher(x))

    options = {"activation_budget": 0.5, "micro_batch_size": 128, "may_offload": False}
    plan, expected = (
        mk.plan_training(model, torch.rand(512, 64), each, "sgd", **options) for each in (distill, distill_at_once)
    )
    assert plan.accumulation_steps == 4
    assert plan.required_bytes == expected.required_bytes


def test_does_not_recompute_from_changed_buffer(choices_of):
    """A codebook that is updated in place after it was read: what was made from it stays."""

    class Codebook(nn.Module):
        def __init__(self):
            super().__init__()
            self.lift, self.drop = nn.Linear(32, 64), nn.Linear(64, 32)
            self.register_buffer("codes", torch.randn(256, 64))

        def forward(self, x):
            codes = self.codes.clone()
            weights = torch.softmax(self.lift(x) @ codes.T, -1)
            quantized = weights @ codes
            self.codes.mul_(0.99)
            return self.drop(torch.tanh(torch.sigmoid(torch.tanh(quantized))))

    torch.manual_seed(0)
    model, x = Codebook(), torch.randn(512, 32)
    _, choices = choices_of(model, x)
    treated = choices.plan(max(itertools.chain(*choices.descents), key=lambda each: len(each.recomputed)))
    clone = next(number for number, each in enumerate(choices.operators) if each.name == "aten.clone.default")
    assert clone not in treated.recomputed
    assert treated.recomputed
    found = []
    for saved_tensors in (None, treated):
        twin = copy.deepcopy(model)
        for _ in range(2):
            with treat_saved_tensors(saved_tensors):
                loss = mean_square(twin, x)
            loss.backward()
        found.append([each.grad for each in twin.parameters()])
    assert_same(*found)


def test_warns_of_plan_for_other_mode():
    model, x = encoder(), torch.randn(8, 64, 64)
    plan = mk.plan_training(model, x, mean_square, "sgd", budget="9MiB", micro_batch_size=8, treat="tensors")
    model.eval()
    with pytest.warns(MemkitWarning, match="not the planned one"), treat_saved_tensors(plan.saved_tensors):
        mean_square(model, x).backward()


@pytest.mark.filterwarnings("error::memkit.MemkitWarning")
def test_numbers_read_and_classes_marked_in_the_forward_are_as_planned():
    """Neither has the operators in a dry run that it has with data, unless memkit sees to it."""

    class Marking(nn.Module):
        def __init__(self):
            super().__init__()
            self.read, self.mark, self.back = nn.Linear(64, 64), nn.Linear(256, 64), nn.Linear(64, 64)
            self.largest = 0.0

        def forward(self, x):
            self.largest = x.max().item()
            classes = nn.functional.one_hot(x.long().abs().clamp(max=255), 256).float().mean(1)
            return self.back(torch.tanh(self.read(x)) + torch.sigmoid(self.mark(classes)))

    model, x = Marking(), torch.randn(64, 64)
    plan = mk.plan_training(model, x, mean_square, "sgd", activation_budget=0.5)
    optimizer = torch.optim.SGD(model.parameters())
    with mk.Tracker(device="cpu") as tracker:
        with treat_saved_tensors(plan.saved_tensors):
            loss = mean_square(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert tracker.peak_bytes == plan.estimate.peak_bytes


def test_what_a_graph_saved_that_died_in_the_forward_does_not_wait():
    class Sparse(nn.Module):
        """Attends to a few rows, which scores of another kind have found."""

        def __init__(self):
            super().__init__()
            self.score, self.lift, self.drop = nn.Linear(64, 512), nn.Linear(64, 128), nn.Linear(128, 64)

        def forward(self, x):
            found = torch.tanh(self.score(x)).exp().sum(-1).topk(8).indices
            return self.drop(torch.sigmoid(torch.tanh(self.lift(x)))) * x[found].mean()

    model, x = Sparse(), torch.randn(256, 64)
    plan = mk.plan_training(model, x, mean_square, "sgd", activation_budget=0.5).saved_tensors
    with mk.Tracker(device="cpu") as tracker:
        before = tracker.live_bytes
        loss = mean_square(model, x)
        left = tracker.live_bytes - before
    assert abs(left - x.nbytes - sum(each.nbytes for each in model.parameters()) - plan.saved_bytes) < 4096
    del loss


@pytest.mark.parametrize(
    ("may_offload", "zero_infinity", "has_lists"),
    [
        (True, False, False),
        pytest.param(False, False, False, marks=pytest.mark.slow),
        pytest.param(False, True, False, marks=pytest.mark.slow),
        (False, True, True),
    ],
)
@pytest.mark.usefixtures("offloading_is_the_fastest")
def test_a_loss_that_saves_other_tensors_when_it_is_followed(may_offload, zero_infinity, has_lists):
    """CTC under a dispatch mode, as in the simulation, saves lengths; else floats made from them."""
    model, x = nn.Sequential(chain(), nn.LogSoftmax(-1)), torch.randn(8, 40, 64)
    batch = x, torch.randint(1, 64, (8, 6)), torch.full((8,), 40), torch.full((8,), 6)

    def ctc(model, batch):
        x, targets, lengths, target_lengths = batch
        log_probs, lengths = model(x).transpose(0, 1), ([40] * 8, [6] * 8) if has_lists else (lengths, target_lengths)
        return nn.functional.ctc_loss(log_probs, targets, *lengths, zero_infinity=zero_infinity)

    whole = mk.plan_training(model, batch, ctc, "sgd", budget="1GiB", micro_batch_size=8).required_bytes
    settings = {"micro_batch_size": 8, "treat": "tensors", "may_offload": may_offload}
    plan = mk.plan_training(model, batch, ctc, "sgd", budget=int(0.9 * whole), **settings).saved_tensors
    assert bool(plan.offloaded) is may_offload
    assert bool(plan.recomputed) is not may_offload
    with warnings.catch_warnings():
        warnings.simplefilter("error", MemkitWarning)
        with treat_saved_tensors(plan):
            loss = ctc(model, batch)
    loss.backward()


@pytest.mark.usefixtures("offloading_is_the_fastest")
def test_noise_that_is_saved_before_it_is_drawn_keeps_the_tape():
    """What autograd saves does not tell when a tensor has content; operators do."""
    model, x = nn.Sequential(chain(), nn.RReLU()), torch.randn(512, 64)
    whole = mk.plan_training(model, x, mean_square, "sgd", budget="1GiB", micro_batch_size=512).required_bytes
    settings = {"micro_batch_size": 512, "treat": "tensors"}
    plan = mk.plan_training(model, x, mean_square, "sgd", budget=int(0.8 * whole), **settings).saved_tensors
    assert plan.offloaded
    assert plan.needs_tape
    found = []
    for treated in (treat_saved_tensors(None), treat_saved_tensors(plan)):
        torch.manual_seed(3)
        with treated:
            loss = mean_square(model, x)
        found.append(torch.autograd.grad(loss, list(model.parameters())))
    assert all(map(torch.equal, *found))


def test_copies_for_a_recovery_are_no_operators_of_the_forward():
    """A discriminator with buffers, which the wrapper copies when the forward first runs it."""
    model, x = chain(), torch.randn(512, 64)
    judge = nn.utils.spectral_norm(nn.Linear(64, 64))

    def judged(model, x):
        return judge(model(x)).square().mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    plan = mk.plan_training(model, x, judged, optimizer, activation_budget=0.5, micro_batch_size=512)
    assert plan.saved_tensors.recomputed
    with (
        warnings.catch_warnings(),
        mk.MemoryEfficientTrainingWrapper(model, optimizer, probe=False, **plan.wrapper_settings()) as trainer,
    ):
        warnings.simplefilter("error", MemkitWarning)
        trainer.train_step(x, judged)


def test_operators_that_run_again_read_a_part_of_a_cached_storage():
    """A `hann_window` is no view, but its storage is larger than it; the storage of its stand-in is not."""
    cache = {"window": torch.hann_window(64)}

    class Windowed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

        def forward(self, x):
            for layer in self.layers:
                x = torch.tanh(layer(x) * cache["window"])
            return x

    model, x = Windowed(), torch.randn(1024, 64)
    budget = int(0.8 * mk.estimate_memory_usage(model, x, mean_square, optimizer="sgd").peak_bytes)
    settings = {"micro_batch_size": 1024, "treat": "tensors", "may_offload": False}
    plan = mk.plan_training(model, x, mean_square, "sgd", budget=budget, **settings)
    assert plan.saved_tensors.recomputed
    with treat_saved_tensors(plan.saved_tensors):
        loss = mean_square(model, x)
    assert_same(*(torch.autograd.grad(each, list(model.parameters())) for each in (loss, mean_square(model, x))))


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("normalize", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_a_step_within_a_plan_holds_no_old_weights_of_another_network(normalize):
    """Hooks compute them anew in each forward."""
    model, x = chain(), torch.randn(256, 64)
    judge = nn.Sequential(*(normalize(nn.Linear(64, 64)) for _ in range(4)))

    def judged(model, x):
        return judge(model(x)).square().mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    plan = mk.plan_training(model, x, judged, optimizer, activation_budget=0.5, micro_batch_size=256)
    with mk.MemoryEfficientTrainingWrapper(model, optimizer, probe=False, **plan.wrapper_settings()) as trainer:
        for _ in range(2):
            with mk.Tracker(device="cpu") as tracker:
                trainer.train_step(x, judged)
    assert tracker.peak_bytes <= plan.required_bytes
