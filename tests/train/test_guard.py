"""The guard of steps: no room for its files or for the step, and third-party optimizers."""

import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Joinable, JoinHook

import memkit as mk
from memkit.train.guard import StepGuard
from tests.allocations import trace_allocations
from tests.helpers import assert_refused, assert_same, run_python
from tests.toys import mean_square, out_of_memory
from tests.train.faults import FailingOperator, Short

pytestmark = pytest.mark.filterwarnings("ignore:optimizer.step.*memkit does not know how")


class Foreign(torch.optim.SGD):
    """Keeps state in places where torch's own optimizers do not, and fails as often as it is told."""

    failures = 0

    def step(self):
        self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1
        self.state["total"] = self.state.get("total", 0) + 1
        super().step()
        if Foreign.failures:
            Foreign.failures -= 1
            out_of_memory()


class ForeignAdam(torch.optim.AdamW):
    """A class that may do anything in its step."""

    def step(self, closure=None):
        return super().step(closure)


class Partitioned(torch.optim.SGD, Joinable):
    """Announces, as all that works with torch's Join, that its step exchanges something."""

    join_device = join_process_group = None

    def __init__(self, parameters, **settings):
        torch.optim.SGD.__init__(self, parameters, **settings)

    def join_hook(self, **_):
        return JoinHook()

    def step(self, closure=None):
        return super().step(closure)


def make(width=200):
    torch.manual_seed(0)
    model = nn.Linear(width, width)
    optimizer = Foreign(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, width)).sum().backward()
    return model, optimizer


def step(optimizer):
    optimizer.step()
    return True


@pytest.mark.parametrize("num_failures", [0, 1, 2])
def test_state_in_unusual_places(num_failures):
    model, optimizer = make()
    guard = StepGuard([optimizer])
    guard.run(lambda: step(optimizer))
    before = model.weight.detach().clone()
    Foreign.failures = num_failures
    if num_failures == 2:
        with pytest.raises(mk.MemkitOutOfMemoryError, match="as they were before the step"):
            guard.run(lambda: step(optimizer))
        assert_same(model.weight.detach(), before)
    else:
        assert guard.run(lambda: step(optimizer))
    expected = 1 if num_failures == 2 else 2
    assert optimizer.param_groups[0]["k"] == optimizer.state["total"] == expected
    Foreign.failures = 0


class Decaying(Foreign):
    """Adds weight decay to the gradients in place, as older optimizers do, and gives one a new gradient."""

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.grad.add_(parameter.detach(), alpha=0.5)
        self.param_groups[0]["params"][0].grad = self.param_groups[0]["params"][0].grad * 2
        super().step()


@pytest.mark.parametrize("is_sparse", [False, True])
def test_the_second_try_starts_from_the_gradients_of_the_first(is_sparse):
    def stepped(num_failures):
        torch.manual_seed(0)
        model = nn.Embedding(200, 200, sparse=is_sparse)
        model(torch.tensor([3, 5])).sum().backward()
        kind = Foreign if is_sparse else Decaying
        Foreign.failures = num_failures
        assert StepGuard([optimizer := kind(model.parameters(), lr=0.1)]).run(lambda: step(optimizer))
        return model.weight.detach()

    assert_same(stepped(1), stepped(0))


def test_without_a_folder_the_step_runs_unguarded(monkeypatch, tmp_path):
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    model, optimizer = make()
    before = model.weight.detach().clone()
    assert StepGuard([optimizer]).run(lambda: step(optimizer))
    assert not torch.equal(model.weight, before)
    Foreign.failures = 1
    with pytest.raises(mk.MemkitOutOfMemoryError, match="as Foreign left them, perhaps half stepped"):
        StepGuard([optimizer]).run(lambda: step(optimizer))


class Elsewhere(torch.optim.Optimizer):
    """Scales each update by what it keeps outside of its state, and fails once in the middle of a step."""

    fails_at = 0  # updates until then, on the class, which nobody restores

    def __init__(self, params, where):
        super().__init__(params, {"lr": 0.1})
        self.where, self.count, self.counts = where, 0, [0]
        self.scale, self.array = torch.ones((), dtype=torch.float64), np.ones(2)
        parameters = self.param_groups[0]["params"]
        self.slow = {"weights": [each.detach().clone() for each in parameters]}
        self.inner = torch.optim.Adam(parameters, lr=0.1, foreach=False)

    def factor(self, number):
        group = self.param_groups[0]
        if self.where == "group":
            group["count"] = group.get("count", 0) + 1
            return 1 / group["count"]
        if self.where == "number":
            self.count += 1
            return 1 / self.count
        if self.where == "list":
            self.counts[0] += 1
            return 1 / self.counts[0]
        if self.where == "tensor":
            return self.scale.mul_(0.9)
        if self.where == "another tensor":
            self.scale = self.scale * 0.9
            return self.scale
        if self.where == "storage":
            self.scale.data = self.scale * 0.9
            return self.scale
        if self.where == "array":
            self.array *= 0.9
            return float(self.array[1])
        if self.where == "slow weights":
            slow = self.slow["weights"][number]
            return slow.lerp_(group["params"][number], 0.5)
        return torch.rand((), dtype=torch.float64)

    @torch.no_grad()
    def step(self, closure=None):
        if self.where == "inner optimizer":
            self.inner.step()
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            factor = self.factor(number)
            Elsewhere.fails_at -= 1
            if Elsewhere.fails_at == 0:
                out_of_memory()
            parameter.sub_(0.1 * factor * parameter.grad)


WHERE = ("group", "number", "list", "tensor", "another tensor", "storage", "array", "slow weights", "inner optimizer")


@pytest.mark.parametrize("where", [*WHERE, "random numbers"])
@pytest.mark.parametrize("fails_at", [2, 6])
def test_what_an_optimizer_keeps_outside_of_its_state_is_undone_too(where, fails_at):
    """In the middle of the first and of the second step of a model of four parameters."""

    def trained(fails_at):
        torch.manual_seed(0)
        Elsewhere.fails_at = fails_at
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        optimizer = Elsewhere(model.parameters(), where)
        xs = torch.randn(3, 8, 4, dtype=torch.float64)
        with mk.MemoryEfficientTrainingWrapper(model, optimizer) as trainer:
            num_ooms = [trainer.train_step(x, mean_square).num_ooms for x in xs]
        state = [optimizer.scale, *optimizer.slow["weights"], torch.tensor([optimizer.count, *optimizer.counts])]
        inner = [each for one in optimizer.inner.state.values() for each in one.values()]
        return num_ooms, [*model.parameters(), *state, *inner, torch.get_rng_state()]

    (num_ooms, found), (_, plain) = trained(fails_at), trained(0)
    assert num_ooms == ([1, 0, 0] if fails_at == 2 else [0, 1, 0])
    assert_same(found, plain)


def test_a_group_entry_that_a_failed_step_made_is_gone():
    """It would else be counted on by the next try, which finds it there."""
    _, optimizer = make()
    Foreign.failures = 2
    assert_refused(lambda: StepGuard([optimizer]).run(lambda: step(optimizer)), mk.MemkitOutOfMemoryError)
    assert "k" not in optimizer.param_groups[0]
    assert dict(optimizer.state) == {}


def test_no_file_stays(monkeypatch, tmp_path):
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    _, optimizer = make()
    Foreign.failures = 2
    assert_refused(lambda: StepGuard([optimizer]).run(lambda: step(optimizer)), mk.MemkitOutOfMemoryError)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("num_optimizers", [1, 2])
@pytest.mark.parametrize("num_failures", [1, 2])
def test_a_loss_scaler_goes_on_after_a_failed_step(num_optimizers, num_failures):
    torch.manual_seed(0)
    models = [nn.Linear(2, 2) for _ in range(num_optimizers)]
    optimizers = [Foreign(model.parameters(), lr=0.1) for model in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    accumulator = mk.GradientAccumulator(optimizers, scaler=scaler, guard_steps=True)
    for failures in (num_failures, 0):
        Foreign.failures = failures
        accumulator.backward(sum(model(torch.ones(1, 2)).sum() for model in models))
        if failures == 2:
            assert_refused(lambda: accumulator.step(), mk.MemkitOutOfMemoryError)
        else:
            assert accumulator.step() is True
    assert scaler.get_scale() == 4.0
    assert accumulator.num_steps == (2 if num_failures == 1 else 1)


SHORT_OF_MEMORY = """
import resource, torch
import memkit as mk
from memkit.train.guard import StepGuard
from tests.allocations import trace_allocations
from tests.train.faults import FailingOperator, Short

class Mine(torch.optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)

def attempt():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(700, 700) for _ in range(4)))  # 8 MB
    optimizer = Mine(model.parameters(), foreach=True)
    guard = StepGuard([optimizer])

    def step():
        optimizer.step()
        return True

    def everything():
        return [t for p in model.parameters() for t in (p.detach(), *optimizer.state[p].values())]

    for number in range(4):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1.0 + number)
        if number == 3:
            before = [tensor.clone() for tensor in everything()]
            data = 1024 * int(next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1])
            resource.setrlimit(resource.RLIMIT_DATA, (data + 4_000_000, resource.RLIM_INFINITY))
            try:
                guard.run(step)
            except mk.MemkitOutOfMemoryError as error:
                is_as_before = all(map(torch.equal, before, everything()))
                print("as before" if is_as_before else "half done", "|", str(error))
            resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert guard.run(step)

attempt()
StepGuard._has_room = lambda self: True
attempt()
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are set as Linux does")
def test_later_step_without_room_leaves_all_unchanged():
    """The state is there by then; without asking for room first, a foreach step fails between its operators."""
    watched, unwatched = run_python(SHORT_OF_MEMORY, MALLOC_MMAP_THRESHOLD_="65536").stdout.splitlines()
    assert watched.startswith("as before | ")
    assert "as they were before" in watched
    assert unwatched.startswith("half done | ")
    assert "perhaps half stepped" in unwatched


def test_later_step_requests_its_room_without_copies(monkeypatch):
    model = nn.Linear(200, 200)
    optimizer = ForeignAdam(model.parameters(), foreach=True)
    model(torch.ones(1, 200)).sum().backward()
    guard = StepGuard([optimizer])
    for _ in range(2):
        guard.run(lambda: step(optimizer))
    monkeypatch.setattr(StepGuard, "_copy", lambda self: pytest.fail("there is room"))
    asked = guard._temporary_bytes[torch.device("cpu")]
    assert model.weight.nbytes < asked <= trace_allocations(lambda: step(optimizer)).peak <= asked + 1024  # numbers
    assert trace_allocations(lambda: guard.run(lambda: step(optimizer))).peak <= asked + 1024  # and given back before


class TestWarningsForUnknownOptimizers:
    """Automatic copies, and steps without protection, are reported once, with the way out."""

    pytestmark = pytest.mark.filterwarnings("error:optimizer.step.*memkit does not know how")

    def test_a_copy_and_its_size(self):
        _, optimizer = make()
        guard = StepGuard([optimizer])
        with pytest.warns(
            mk.MemkitWarning,
            match=r"does not know how Foreign steps; parameters, gradients and state \(314\.06 KiB now\) are copied.*"
            r"memkit\.train\.register_parameterwise\(Foreign\).*guard_steps=False",
        ):
            guard.run(lambda: step(optimizer))
        guard.run(lambda: step(optimizer))

    def test_a_large_one_is_not_copied(self, monkeypatch):
        monkeypatch.setattr("memkit.train.guard._MOST_BYTES", 1000)
        _, optimizer = make()
        monkeypatch.setattr("memkit.train.guard._Copy", lambda *_: pytest.fail("nobody has asked for it"))
        guard = StepGuard([optimizer])
        with pytest.warns(
            mk.MemkitWarning, match=r"half stepped\. They are not copied, because 314\.06 KiB is too much"
        ):
            guard.run(lambda: step(optimizer))
        assert guard.run(lambda: step(optimizer))

    def test_warns_if_copy_cannot_be_made(self, monkeypatch, tmp_path):
        import tempfile

        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
        _, optimizer = make()
        with pytest.warns(mk.MemkitWarning, match="may leave parameters and state half stepped"):
            StepGuard([optimizer]).run(lambda: step(optimizer))

    def test_subclass_with_inherited_step_is_known(self):
        kind = type("Mere", (torch.optim.SGD,), {})
        model = nn.Linear(4, 4)
        trainer = mk.MemoryEfficientTrainingWrapper(model, kind(model.parameters(), lr=0.1))
        assert trainer.train_step(torch.ones(2, 4), mean_square).stepped

    def test_registered_optimizer_is_known(self):
        kind = mk.train.register_parameterwise(type("Mine", (torch.optim.SGD,), {"step": torch.optim.SGD.step}))
        model = nn.Linear(4, 4)
        trainer = mk.MemoryEfficientTrainingWrapper(model, kind(model.parameters(), lr=0.1))
        assert trainer.train_step(torch.ones(2, 4), mean_square).stepped

    def test_an_optimizer_that_exchanges_is_neither_registered_nor_advised_to_be(self):
        """ZeroRedundancyOptimizer is one: with its step in parts, on one rank alone, the others would wait for ever."""
        assert_refused(lambda: mk.train.register_parameterwise(Partitioned), mk.errors.ConfigError, "other ranks")
        line, plain = nn.Linear(200, 200).double(), nn.Linear(200, 200).double()
        plain.load_state_dict(line.state_dict())
        optimizer, own = Partitioned(line.parameters(), lr=0.1), torch.optim.SGD(plain.parameters(), lr=0.1)
        for model in (line, plain):
            model(torch.ones(1, 200, dtype=torch.float64)).sum().backward()
        own.step()
        with pytest.warns(mk.MemkitWarning, match="does not know how Partitioned steps") as caught:
            StepGuard([optimizer]).run(lambda: step(optimizer))
        assert "register_parameterwise" not in str(caught[0].message)
        torch.testing.assert_close(line.state_dict(), plain.state_dict())


class TestStepHooks:
    """Those that have run are not called again."""

    def make(self):
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        return model, optimizer, mk.MemoryEfficientTrainingWrapper(model, optimizer)

    def step(self, trainer):
        return trainer.train_step(torch.ones(4, 4), mean_square)

    def test_failing_post_hook_leaves_step_done(self):
        model, optimizer, trainer = self.make()
        calls, before = [], model.weight.detach().clone()
        optimizer.register_step_post_hook(lambda *_: calls.append("average"))

        handle = optimizer.register_step_post_hook(out_of_memory)
        assert_refused(lambda: self.step(trainer), mk.MemkitOutOfMemoryError, r"in a step hook.*parameters are stepped")
        assert calls == ["average"]
        assert trainer.num_steps == 1
        assert not torch.equal(model.weight, before)
        handle.remove()
        self.step(trainer)
        assert (calls, trainer.num_steps) == (["average"] * 2, 2)

    def test_failing_pre_hook_leaves_step_undone(self):
        model, optimizer, trainer = self.make()
        before = model.weight.detach().clone()

        optimizer.register_step_pre_hook(out_of_memory)
        assert_refused(lambda: self.step(trainer), mk.MemkitOutOfMemoryError, "as they were before the step")
        assert trainer.num_steps == 0
        assert torch.equal(model.weight, before)


def refused_from(place):
    """Memory runs out for good at an operator of the second step; return the message, and whether one stays torn."""
    said = ""
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizer = torch.optim.Adam(weights, lr=0.1)
    guard = StepGuard([optimizer])
    for number in range(2):
        for each in weights:
            each.grad = torch.ones(1)
        guard.forget()
        steps = [int(optimizer.state[each]["step"]) if number else 0 for each in weights]
        with Short(place if number else 10**6, 0):
            try:
                guard.run(lambda: optimizer.step() is None)
            except (torch.OutOfMemoryError, mk.MemkitOutOfMemoryError) as error:
                said = str(error)
    torn = [
        int(optimizer.state[each]["step"]) > before and each.item() == pytest.approx(0.9, abs=1e-3)
        for each, before in zip(weights, steps, strict=True)
    ]
    return said, any(torn)


def test_reports_torn_parameter():
    """Too small for slices, at the first out-of-memory in a step that makes no copies."""
    found = [refused_from(place) for place in range(1, 30)]
    typed = [(text, is_torn) for text, is_torn in found if "smallest parts" in text]
    assert any(is_torn for _, is_torn in typed)
    for text, is_torn in typed:
        assert ("one more is half stepped" in text) == is_torn, text
        assert ("resume from the last checkpoint" in text) == is_torn
        assert "of 2 parameters are stepped" in text or "as they were before" in text


def test_hooks_run_once_despite_interrupted_step():
    """In torch's own marks around a step, and inside of it: the step goes on, and no hook runs twice."""
    weights = []
    for place in (None, *range(1, 40)):
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer, calls = torch.optim.Adam([weight], lr=0.1), []
        optimizer.register_step_pre_hook(lambda *_, calls=calls: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append("after"))
        guard = StepGuard([optimizer])
        for number in range(2):
            weight.grad = torch.full((3,), 1.0 + number)
            guard.forget()
            with FailingOperator(*() if number == 0 or place is None else (place,)):
                assert guard.run(lambda optimizer=optimizer: optimizer.step() is None)
        assert calls == ["before", "after"] * 2
        assert len(optimizer._optimizer_step_pre_hooks) == len(optimizer._optimizer_step_post_hooks) == 1
        weights.append(weight.detach())
    assert_same(weights, weights[:1] * len(weights))


class FailingAddcdiv(FailingOperator):
    """Raises an out-of-memory the first times that Adam updates a parameter."""

    def __init__(self, num_failures):
        super().__init__()
        self.num_left = num_failures

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name == "aten::addcdiv_" and self.num_left:
            self.num_left -= 1
            out_of_memory()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("make_optimizer", [torch.optim.AdamW, Foreign])
def test_a_result_counts_what_the_step_survived(make_optimizer):
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    trainer = mk.MemoryEfficientTrainingWrapper(model, make_optimizer(model.parameters(), lr=0.1))
    batch, num_ooms = torch.randn(8, 4), []
    for num_failures in (0, 1, 0):
        Foreign.failures = num_failures if make_optimizer is Foreign else 0
        with FailingAddcdiv(num_failures):
            result = trainer.train_step(batch, lambda model, x: model(x).square().mean())
        assert result.stepped
        assert result.sizes == (8,)
        num_ooms.append(result.num_ooms)
    assert num_ooms == [0, 1, 0]


class TiedByMemory(nn.Module):
    """The decoder's weight is a parameter of its own over the encoder's memory."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(600, 400).double(), nn.Linear(400, 600).double()
        self.decoder.weight = nn.Parameter(self.encoder.weight.t())

    def forward(self, x):
        return self.decoder(self.encoder(x).tanh())


@pytest.mark.parametrize("foreach", [False, True])
def test_parameters_over_the_same_memory_step_in_the_optimizers_own_order(foreach):
    """All operators of a `foreach` step change that memory twice before the next operator does."""

    def train(*places, by_hand=False):
        torch.manual_seed(0)
        model = TiedByMemory()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=foreach)
        trainer = mk.MemoryEfficientTrainingWrapper(model, optimizer)
        count = FailingOperator()
        for number in range(4):
            x = torch.randn(6, 600, dtype=torch.float64)
            if by_hand:
                optimizer.zero_grad()
                mean_square(model, x).backward()
                optimizer.step()
            elif number == 1:
                with FailingOperator(*places) as count:
                    trainer.train_step(x, mean_square)
            else:
                trainer.train_step(x, mean_square)
        assert count.num_failures == len(places)
        return count.num_operators, model.encoder.weight.detach()

    _, wanted = train(by_hand=True)
    num_operators, found = train()
    assert_same([found], [wanted])
    for place in range(num_operators - 5, num_operators):  # inside the optimizer
        assert_same([train(place)[1]], [wanted])


def test_parameters_over_the_same_memory_are_not_stepped_one_by_one():
    optimizer = torch.optim.AdamW(TiedByMemory().parameters(), foreach=True)
    for block in (mk.train.atomic_steps, mk.train.step_in_backward):
        assert_refused(lambda block=block: block(optimizer).__enter__(), mk.errors.ConfigError, "share memory")
    flat = torch.zeros(20)  # next to each other: not the same memory
    parameters = [nn.Parameter(flat[:10]), nn.Parameter(flat[10:].view(2, 5).t())]
    with mk.train.atomic_steps(torch.optim.AdamW(parameters, foreach=True)):
        pass
