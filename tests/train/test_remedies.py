"""After an out-of-memory, remedies that keep the result come first; others are used only if the user allows it."""

import contextlib
import copy
import json
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._autograd import _top_saved_tensors_default_hooks

import memkit as mk
from memkit.train.offload import WrittenAsideError
from tests.helpers import assert_refused, assert_same, run_module
from tests.ranks import join, leave, spawn
from tests.toys import mean_square, out_of_memory, trainer_of

X = torch.randn(8, 6, 8, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    def __init__(self, *, is_inplace=False, norm=nn.LayerNorm):
        super().__init__()
        self.norm, self.linear, self.is_inplace = norm(8), nn.Linear(8, 8), is_inplace

    def forward(self, x):
        if self.is_inplace:
            x.mul_(1.0)
        return x + torch.tanh(self.linear(self.norm(x.flatten(0, 1)).view_as(x)))


def make(**settings):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), Block(**settings), Block(**settings), nn.Linear(8, 1)).double()


def same(one, other, **tolerance):
    torch.testing.assert_close(dict(one.state_dict()), dict(other.state_dict()), **tolerance)


class Fails:
    """A loss that runs out of memory with more than some rows, until blocks run again in backward, or for good."""

    def __init__(self, *, most, needs=""):
        self.most, self.needs, self.sizes = most, needs, []

    def __call__(self, model, x):
        self.sizes.append(len(x))
        loss = mean_square(model, x)
        recomputes = isinstance(model, nn.Sequential) and "forward" in vars(model[1])
        offloads = _top_saved_tensors_default_hooks(True) is not None
        is_helped = {
            "recompute": recomputes,
            "both": recomputes and offloads,
            "offload alone": offloads and not recomputes,
        }.get(self.needs, False)
        if len(x) > self.most and not is_helped:
            out_of_memory()
        return loss


def step(loss_fn, model=None, *, batch=X, **settings):
    """One step of plain SGD; return the model, the result, the blocks that run again, and what was told."""
    model = make() if model is None else model
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with trainer_of(model, **settings) as trainer:
            result = trainer.train_step(batch.double(), loss_fn)
            blocks = trainer.checkpointed_blocks
    told = [str(each.message) for each in caught if issubclass(each.category, mk.MemkitWarning)]
    told = [each for each in told if "a few rows have shown" not in each]  # the faults count rows, also without a graph
    return model, result, blocks, told


@pytest.fixture(scope="module")
def plain():
    model = make()
    mean_square(model, X.double()).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return model


def test_recomputes_blocks_first_without_changing_a_bit(plain):
    model, result, blocks, told = step(Fails(most=4, needs="recompute"))
    assert (result.sizes, result.num_ooms, blocks) == ((8,), 1, ("1", "2"))
    [message] = told
    assert "out of memory with a micro-batch of 8 rows (OutOfMemoryError: CUDA out of memory. Tried" in message
    assert "from now on 1, 2 run again in backward" in message
    assert "checkpoint='auto'" in message
    same(model, plain, rtol=0, atol=0)
    assert "forward" not in vars(model[1])  # close() has put it back


def test_splits_batch_next_if_proven_without_recomputing(plain):
    fails = Fails(most=4)
    model, result, blocks, told = step(fails)
    assert (result.sizes, result.num_ooms, blocks) == ((4, 4), 2, ())
    assert ["run again in backward" in each for each in told] == [True, False]
    assert "Training continues: the batch is cut into micro-batches of at most 4 rows" in told[1]
    assert fails.sizes[:2] == [8, 8]
    assert max(fails.sizes[2:]) <= 4  # the look at the split too
    same(model, plain, rtol=1e-12, atol=1e-14)


def test_a_loop_is_told_that_its_body_ran_again():
    """What its runs count goes on counting; blocks that run again may then seem to change the gradient."""

    def train(fails, odd):
        model, count = make(), 0
        trainer = trainer_of(model)
        for attempt in trainer.microbatches(X.double()):
            with attempt as micro:
                count += 1
                scale = 2.0 if count in odd else 1.0
                trainer.backward(scale * model(micro).square().mean())
                if fails and count == 1:
                    out_of_memory()
        trainer.step()
        return count

    def told(odd):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert train(True, odd) > 1
        [message] = [str(each.message) for each in caught]
        assert "The body of the loop has run more than once: lists, counters" in message
        return message.partition("continues: ")[2]

    assert train(False, ()) == 1
    assert told(()).startswith("from now on 1, 2 run again in backward")
    refuted = [told((number,)) for number in range(2, 6)]
    assert any("without recomputing blocks in backward: blocks that ran again did not" in each for each in refuted)


def test_a_model_without_blocks_is_split_at_once():
    model = nn.Linear(8, 1).double()
    _, result, blocks, told = step(Fails(most=4), model, batch=X[:, 0])
    assert (result.sizes, result.num_ooms, blocks) == ((4, 4), 1, ())
    assert len(told) == 1


def normed():
    return make(norm=nn.BatchNorm1d)


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d])
def test_a_plan_that_does_not_suffice_gives_way(norm):
    """A batch that may be split is split under the plan; otherwise all is offloaded instead of what the plan says."""
    plain, planned = make(norm=norm), make(norm=norm)
    batch = X.double()
    plan = mk.plan_training(planned, batch, mean_square, "sgd", activation_budget=0.6, micro_batch_size=8).saved_tensors
    assert plan.recomputed or plan.offloaded
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        mean_square(plain, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    may_split = norm is nn.LayerNorm
    loss_fn = Fails(most=4) if may_split else FailsFirst()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with trainer_of(planned, saved_tensors=plan) as trainer:
            results = [trainer.train_step(batch, loss_fn) for _ in range(2)]
    told = [str(each.message) for each in caught if issubclass(each.category, mk.MemkitWarning)]
    assert [result.num_microbatches for result in results] == ([2, 2] if may_split else [1, 1])
    assert not any("run again in backward" in each or "not the planned one" in each for each in told), told
    assert any("all activations are offloaded instead of those in the plan" in each for each in told) is not may_split
    same(planned, plain, **({"rtol": 1e-12, "atol": 1e-14} if may_split else {"rtol": 0, "atol": 0}))


class FailsFirst:
    """Runs out in the first forward."""

    def __init__(self):
        self.has_failed = False

    def __call__(self, model, x):
        loss = mean_square(model, x)
        if not self.has_failed:
            self.has_failed = True
            out_of_memory()
        return loss


def test_an_inexact_split_is_refused_with_the_cause():
    model = normed()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(
        mk.MemkitOutOfMemoryError, match=r"splitting the batch changes its gradient.*on_oom='inexact'"
    ) as caught:
        step(Fails(most=4), model)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert "1.norm" in str(caught.value)
    assert_same(dict(model.state_dict()), before)  # statistics too


def test_a_block_with_batch_normalization_runs_again_instead():
    model, twin = normed(), normed()
    model, result, *_ = step(Fails(most=4, needs="recompute"), model)
    mean_square(twin, X.double()).backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    assert result.sizes == (8,)
    same(model, twin, rtol=0, atol=0)


@pytest.mark.parametrize("needs", ["both", "offload alone"])
def test_offloads_what_may_not_be_split(needs):
    """A block that runs again is there as a whole: offloading alone may take less than both."""
    model, twin = normed(), normed()
    model, result, blocks, told = step(Fails(most=4, needs=needs), model)
    mean_square(twin, X.double()).backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    assert (result.sizes, bool(blocks)) == ((8,), needs == "both")
    assert any("no block runs again, and activations are offloaded" in each for each in told) == (needs != "both")
    assert not any("{" in each for each in told)
    same(model, twin, rtol=0, atol=0)


def test_offload_that_the_model_does_not_bear_is_taken_back():
    """On a card, backward finds writes through `.data` between two saved views: it is not the end of the training."""
    seen = []

    def loss_fn(model, x):
        if _top_saved_tensors_default_hooks(True) is not None:
            seen.append(len(x))
            raise WrittenAsideError("backward", got="a write", expected="none", fix="none")
        return Fails(most=4)(model, x)

    assert_refused(
        lambda: step(loss_fn, normed()), mk.MemkitOutOfMemoryError, "splitting the batch changes its gradient"
    )
    assert seen == [8]


def compares_slopes(model, x):
    """Rows are compared, so that a split is not allowed, by a transform that no offload of activations bears."""
    slopes = torch.func.grad(lambda out: out.pow(3).sum())(model(x))
    return (slopes[:, None] - slopes[None]).square().mean()


@pytest.mark.parametrize("own_loop", [False, True])
def test_offload_beside_transforms_is_taken_back_for_good(own_loop):
    """Torch runs no torch.func.grad within saved tensor hooks; the user, who set none, is told of the memory."""

    def loss_fn(model, x):
        loss = compares_slopes(model, x)
        if len(x) > 4:
            out_of_memory()
        return loss

    def train(trainer, x):
        if not own_loop:
            return trainer.train_step(x, loss_fn)
        for attempt in trainer.microbatches(x):
            with attempt as micro:
                trainer.backward(loss_fn(trainer.model, micro))
        return trainer.step()

    model, x = normed(), X.double()
    with trainer_of(model) as trainer:
        with pytest.warns(mk.MemkitWarning, match=r"without offloading activations: the loss, .* calls torch\.func"):
            caught = assert_refused(lambda: train(trainer, x), mk.MemkitOutOfMemoryError, "changes its gradient")
        assert isinstance(caught.__cause__, torch.OutOfMemoryError)
        assert "offload" not in caught.fix
        train(trainer, x[:4])
        assert trainer.num_steps == 1


def test_a_step_of_transforms_survives_an_out_of_memory_that_passes():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    twin = copy.deepcopy(model)
    _, result, _, told = step(once(compares_slopes), model)
    compares_slopes(twin, X.double()).backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    assert result.sizes == (8,)
    assert any("without offloading activations" in each for each in told)
    same(model, twin, rtol=0, atol=0)


class Sloped(Block):
    """A block that calls a transform, once it is told to."""

    slopes = False

    def forward(self, x):
        out = super().forward(x)
        return out + torch.func.grad(lambda x: self.linear(x).square().sum())(x) if self.slopes else out


def test_blocks_that_begin_to_call_transforms_are_not_recomputed_any_more():
    model = nn.Sequential(nn.Linear(8, 8), Sloped(), Sloped(), nn.Linear(8, 1)).double()
    with trainer_of(model) as trainer:
        with pytest.warns(mk.MemkitWarning, match="run again in backward"):
            trainer.train_step(X.double(), Fails(most=4, needs="recompute"))
        Sloped.slopes = True
        try:
            with pytest.warns(mk.MemkitWarning, match=r"without recomputing blocks in backward: .* torch\.func\.grad"):
                trainer.train_step(X.double(), mean_square)
            assert not trainer.checkpointed_blocks
        finally:
            Sloped.slopes = False


def test_inexact_splits_with_a_warning():
    _, result, _, told = step(Fails(most=4), normed(), on_oom="inexact")
    assert result.sizes == (4, 4)
    assert any("memory ran out, so it was split) changes the gradient" in each for each in told)


def compares_rows(model, x):
    out = model(x).flatten()
    if len(x) > 4:
        out_of_memory()
    return (out[:, None] - out[None]).pow(2).mean()


def test_loss_comparing_rows_is_rejected_or_split_with_warning():
    caught = assert_refused(lambda: step(compares_rows), mk.MemkitOutOfMemoryError, "compares or mixes the rows")
    assert isinstance(caught.__cause__, torch.OutOfMemoryError)
    _, result, _, told = step(compares_rows, on_oom="inexact")
    assert result.sizes == (4, 4)
    assert any("changes the gradient" in each for each in told)


def test_probe_false_skips_the_check():
    _, result, *_ = step(compares_rows, probe=False)
    assert result.sizes == (4, 4)


def test_without_memory_for_a_check_a_split_is_not_proven():
    assert_refused(lambda: step(Fails(most=1)), mk.MemkitOutOfMemoryError, "could not be checked: OutOfMemoryError")
    _, result, _, told = step(Fails(most=1), on_oom="inexact")
    assert result.sizes == (1,) * 8
    assert any("could not check that splitting" in each for each in told)


def test_unchecked_split_is_rejected_after_out_of_memory():
    """Rows one by one, as the user wants them; a check with two rows does not fit, and says so. Then two at a time."""
    model = nn.Linear(8, 1).double()
    fails, rows = Fails(most=1), X[:, 0].double()
    with trainer_of(model, accumulation_steps=8) as trainer:
        with pytest.warns(mk.MemkitWarning, match="could not check that splitting"):
            trainer.train_step(rows, fails)
        for _ in range(2):
            assert trainer.train_step(rows, fails).sizes == (1,) * 8
        with pytest.raises(mk.MemkitOutOfMemoryError, match="could not be checked"):
            trainer.train_step(torch.cat([rows, rows]), fails)


def test_own_loop_repeats_check_after_out_of_memory():
    model = make()
    trainer = trainer_of(model)
    fails = Fails(most=1)

    def run():
        for attempt in trainer.microbatches(X.double()):
            with attempt as micro:
                trainer.backward(fails(model, micro))

    assert_refused(run, mk.MemkitOutOfMemoryError, "could not be checked: OutOfMemoryError")


def test_a_refusal_is_remembered_and_smaller_batches_go_on():
    model = normed()
    fails = Fails(most=4)
    with trainer_of(model) as trainer:
        for _ in range(2):
            with pytest.raises(mk.MemkitOutOfMemoryError, match="changes its gradient"):
                trainer.train_step(X.double(), fails)
            assert trainer.train_step(X[:4].double(), fails).sizes == (4,)


@pytest.mark.parametrize("own_loop", [False, True])
def test_an_error_of_parts_that_memory_made_too_small_is_out_of_memory(own_loop):
    """Not even a check fits, and BatchNorm refuses a single row: the whole batch would not have failed so."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8)).double()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rows = X[:, 0].double()
    model.register_forward_pre_hook(lambda _, inputs: out_of_memory() if len(inputs[0]) > 1 else None)
    trainer = trainer_of(model)

    def run():
        if not own_loop:
            trainer.train_step(rows, mean_square)
        for attempt in trainer.microbatches(rows):
            with attempt as micro:
                trainer.backward(mean_square(model, micro))

    caught = assert_refused(run, mk.MemkitOutOfMemoryError, "a micro-batch of 1 of 8 rows.*raised ValueError")
    assert isinstance(caught.__cause__, ValueError)
    assert_same(dict(model.state_dict()), before)
    assert trainer.state_dict()["sizes"] == {}


def test_errors_of_the_users_code_stay_theirs():
    def loss_fn(model, x):
        if len(x) <= 4:
            raise KeyError("label")
        out_of_memory()

    with pytest.raises(KeyError, match="label"):
        step(loss_fn, probe=False)  # which says that parts of any size are fine


@pytest.mark.parametrize("fewest", [0, 4, 6])
def test_a_whole_batch_is_tried_again_when_memory_is_back(fewest):
    model, fails = normed(), Fails(most=8)
    with trainer_of(model) as trainer:
        trainer.train_step(X.double(), fails)
        fails.most = fewest
        with pytest.raises(mk.MemkitOutOfMemoryError):
            trainer.train_step(X.double(), fails)
        fails.most = 8
        for rows in (X, X, X[:4]):
            assert trainer.train_step(rows.double(), fails).sizes == (len(rows),)


def test_does_not_recompute_unrepeatable_blocks(plain):
    model = make(is_inplace=True)
    model, result, blocks, _ = step(Fails(most=4), model)
    assert (result.sizes, result.num_ooms, blocks) == ((4, 4), 2, ())
    same(model, plain, rtol=1e-12, atol=1e-14)


class Counted(Block):
    """Warms up: each forward counts, and the gradient depends on it."""

    def __init__(self):
        super().__init__()
        self.num_calls, self.seen = 0, []

    def forward(self, x):
        self.num_calls += 1
        self.seen.append(float(x.detach().mean()))
        return super().forward(x) * (1 + 0.1 * self.num_calls + 0.1 * len(self.seen))


def counted():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), Counted(), Counted(), nn.Linear(8, 1)).double()


class FailsOnce:
    def __init__(self):
        self.num_calls = 0

    def __call__(self, model, x):
        self.num_calls += 1
        loss = mean_square(model, x)
        if self.num_calls == 1:
            out_of_memory()
        return loss


def test_restores_attributes_after_failed_forward():
    """The retry starts where the failed one began, and blocks that run again in backward do not count that."""
    model, result, blocks, _ = step(FailsOnce(), counted())
    twin = counted()
    mean_square(twin, X.double()).backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    assert (result.sizes, blocks) == ((8,), ("1", "2"))
    assert model[1].num_calls == twin[1].num_calls == 1
    assert len(model[1].seen) == 1
    same(model, twin, rtol=0, atol=0)


def test_restores_frozen_teacher_changed_by_forward():
    class Teacher(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.weight.mul_(0.5)
            return super().forward(x)

    torch.manual_seed(0)
    teacher = Teacher(8, 1).double().requires_grad_(False)
    model = nn.Sequential(nn.Linear(8, 8), teacher).double()
    weight = teacher.weight.clone()
    step(FailsOnce(), model, batch=X[:, 0])
    assert_same(teacher.weight, weight * 0.5)


def test_hooks_see_whole_batch_gradient():
    seen = []

    def loss_fn(model, x):
        hidden = model[0](x)
        hidden.register_hook(lambda gradient: seen.append(gradient.clone()))
        return mk.Loss(mean=model[1](hidden).pow(2).mean(), count=torch.tensor(240))

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)).double()
    twin = copy.deepcopy(model)
    step(loss_fn, model)
    loss_fn(twin, X.double()).mean.backward()
    assert_same(*seen)


def test_keeps_user_choices(plain):
    model, result, blocks, told = step(Fails(most=4), checkpoint=["1"])
    assert (result.sizes, blocks) == ((4, 4), ("1",))
    assert len(told) == 1
    same(model, plain, rtol=1e-12, atol=1e-14)


def test_split_loss_remedies(plain):
    model = make()
    split = mk.SplitLoss(model)
    with pytest.warns(mk.MemkitWarning, match="SplitLoss: out of memory .*run again in backward"):
        loss = split(X.double(), Fails(most=4, needs="recompute"))
    assert split.sizes == (8,)
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    same(model, plain, rtol=1e-12, atol=1e-14)
    with pytest.raises(mk.MemkitOutOfMemoryError, match="changes its gradient"):
        mk.SplitLoss(normed())(X.double(), Fails(most=4))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="limits of memory are set as Linux does")
def test_a_unet_with_batch_normalization_inside_real_limits():
    """Recomputed blocks; these and the disk; if neither suffices, an error, or a changed result if allowed."""
    # A limit means what it says.
    done = run_module("tests.train.unet_child", 36, 26, 15, MALLOC_MMAP_THRESHOLD_="65536")
    recomputed, moved, refused = map(json.loads, done.stdout.splitlines())
    for row in (recomputed, moved):
        assert row["plain_dies"]
        assert row["num_ooms"] > 0
        assert row["sizes"] == [[16]] * 3  # whole
        assert row["losses"] == pytest.approx(row["plain_losses"], rel=1e-5)
        assert row["is_same"]  # and all of the model, bit for bit
    assert recomputed["recomputed"] == ["down1", "down2", "middle", "up2", "up1"]
    assert ["to the disk" in each for each in recomputed["told"]] == [False]
    assert ["to the disk" in each for each in moved["told"]] == [False, True, True]  # at last without recomputing
    assert "splitting the batch changes its gradient" in refused["refusal"]
    assert "can't allocate memory" in refused["cause"]
    inexact = refused["inexact"]
    assert all(len(sizes) > 1 for sizes in inexact["sizes"])
    assert inexact["losses"] != pytest.approx(refused["plain_losses"], rel=1e-5)
    assert any("changes the gradient" in each for each in inexact["told"])


class Statistics(nn.Module):
    """Statistics as frozen parameters, to which `batch_norm` writes without a new version, as in MAML's examples."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.mean = nn.Parameter(torch.zeros(8), requires_grad=False)
        self.var = nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, x):
        return nn.functional.batch_norm(self.linear(x), self.mean, self.var, training=self.training).relu()


@pytest.mark.parametrize("checkpoint", [["0", "1"], {"0": "selective", "1": "selective"}, {"[01]": "offload"}])
def test_statistics_in_frozen_parameters_are_updated_once(checkpoint):
    def train(**settings):
        torch.manual_seed(0)
        model = nn.Sequential(Statistics(), Statistics(), nn.Linear(8, 1)).double()
        trained = [each for each in model.parameters() if each.requires_grad]
        with mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(trained, lr=0.1), **settings) as trainer:
            for _ in range(3):
                trainer.train_step(torch.randn(32, 8, dtype=torch.float64), mean_square)
        return model

    same(train(checkpoint=checkpoint), train(), rtol=0, atol=0)


class Listing(nn.Module):
    """Overrides `parameters` by what is no iterator and takes no arguments, as MAML's examples do."""

    def __init__(self):
        super().__init__()
        self.own = nn.ParameterList([nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.zeros(8))])

    def forward(self, x):
        return nn.functional.linear(x, *self.own)

    def parameters(self):
        return self.own


@pytest.mark.parametrize("settings", [{}, {"checkpoint": {"0": "offload"}}, {"checkpoint": ["0"]}])
def test_a_module_with_its_own_parameters_method_is_recovered_too(settings):
    model = nn.Sequential(Listing(), nn.Tanh())
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with mk.MemoryEfficientTrainingWrapper(model, optimizer, **settings) as trainer, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert trainer.train_step(torch.randn(8, 8), Fails(most=4)).sizes == (4, 4)


class Gathering(nn.Module):
    """Gathers its results from all ranks, as MoCo does."""

    def __init__(self):
        super().__init__()
        self.body = make()

    def forward(self, x):
        y = self.body(x)
        gathered = [torch.empty_like(y) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, y.detach())
        return y


def gathering_worker(rank, folder):
    join(rank, folder, num_ranks=1)
    # The split is not checked either: it is refused, after recovery has told what it did.
    _, _, _, told = step(once(mean_square), Gathering())
    expected = "without recomputing blocks in backward: whether that keeps the gradient could not be checked here"
    assert any(expected in each and "checkpoint='auto'" in each for each in told), told
    leave()


def once(loss_fn):
    """Run out of memory at the first call."""
    failures = [True]

    def failing(model, x):
        loss = loss_fn(model, x)
        if failures:
            failures.pop()
            out_of_memory()
        return loss

    return failing


def test_recomputing_that_could_not_be_checked_is_told(tmp_path):
    spawn(gathering_worker, tmp_path, num_ranks=1)


def test_offload_is_taken_back_once_smaller_parts_are_proven():
    """With a ``split_fn``, a half that does not fit could not be checked; quarters can."""
    written = []

    def loss_fn(model, x):
        if len(x) > 2:
            mean_square(model, x)
            out_of_memory()
        written.append(_top_saved_tensors_default_hooks(True) is not None)
        return mk.Loss(mean=mean_square(model, x), count=len(x))

    model = make()
    with trainer_of(model, split_fn=lambda batch, n: list(batch.chunk(n))) as trainer, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            assert len(trainer.train_step(X.double(), loss_fn).sizes) == 4
    assert not any(written[-8:])


class Nested:
    """A tensor and its mask in an object of the user's, as DETR's collate function makes one."""

    def __init__(self, tensor, mask):
        self.tensor, self.mask = tensor, mask


def test_a_batch_that_cannot_be_cut_is_recovered_without_a_check():
    """Recomputing blocks is checked on a few rows, which cannot be taken of it."""
    _, result, blocks, told = step_of_an_object(once(lambda model, batch: mean_square(model, batch.tensor)))
    assert (result.num_ooms, blocks) == (1, ())
    assert any("a few rows cannot be taken of the batch: a Nested in it" in each for each in told)


def step_of_an_object(loss_fn):
    model = make()
    batch = Nested(X.double(), torch.ones(8, dtype=torch.bool))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with trainer_of(model) as trainer:
            result = trainer.train_step(batch, loss_fn)
            blocks = trainer.checkpointed_blocks
    return model, result, blocks, [str(each.message) for each in caught if issubclass(each.category, mk.MemkitWarning)]


@pytest.mark.filterwarnings("ignore:(?s).*out of memory:memkit.errors.MemkitWarning")
def test_a_lazy_penalty_by_transforms_runs_after_a_survived_out_of_memory():
    """Every fourth step only: no check of the remedy has seen it."""

    def make():
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2)]
        model = nn.Sequential(*blocks, nn.BatchNorm1d(8), nn.Linear(8, 1)).double()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_of(model, x, number):
        loss = model(x).square().mean()
        if number % 4 == 3:
            jacobians = torch.func.vmap(torch.func.jacrev(lambda row: model[1](model[0](row))))
            loss = loss + jacobians(x).square().mean()
        return loss

    batches = torch.randn(6, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plain, optimizer = make()
    for number, x in enumerate(batches):
        optimizer.zero_grad()
        loss_of(plain, x, number).backward()
        optimizer.step()
    model, optimizer = make()
    trainer = mk.MemoryEfficientTrainingWrapper(model, optimizer)
    is_short = iter([False, True])

    def loss_fn(model, x):
        loss = loss_of(model, x, trainer.num_steps)
        if next(is_short, False):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return loss

    for number, x in enumerate(batches):
        expected = pytest.warns(mk.MemkitWarning, match="called inside torch.func.vmap")
        with expected if number == 3 else contextlib.nullcontext():
            trainer.train_step(x, loss_fn)
    assert trainer.checkpointed_blocks
    torch.testing.assert_close(list(model.parameters()), list(plain.parameters()))
