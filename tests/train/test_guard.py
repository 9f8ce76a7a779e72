"""The guard of the first steps where its files cannot be written, and with optimisers of other people."""

import pytest
import torch
from torch import nn

import memkit as mk
from memkit.train.guard import StepGuard


class Foreign(torch.optim.SGD):
    """Keeps state in places where torch's own optimisers do not, and fails as often as it is told."""

    failures = 0

    def step(self):
        self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1
        self.state["total"] = self.state.get("total", 0) + 1
        super().step()
        if Foreign.failures:
            Foreign.failures -= 1
            raise torch.OutOfMemoryError("CUDA out of memory.")


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
        torch.testing.assert_close(model.weight.detach(), before, rtol=0, atol=0)
    else:
        assert guard.run(lambda: step(optimizer))
    expected = 1 if num_failures == 2 else 2
    assert optimizer.param_groups[0]["k"] == optimizer.state["total"] == expected
    Foreign.failures = 0


def test_without_a_folder_the_step_runs_unguarded(monkeypatch, tmp_path):
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    model, optimizer = make()
    before = model.weight.detach().clone()
    assert StepGuard([optimizer]).run(lambda: step(optimizer))
    assert not torch.equal(model.weight, before)
    Foreign.failures = 1
    with pytest.raises(mk.MemkitOutOfMemoryError, match="partly stepped"):
        StepGuard([optimizer]).run(lambda: step(optimizer))


def test_no_file_stays(monkeypatch, tmp_path):
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    _, optimizer = make()
    Foreign.failures = 2
    with pytest.raises(mk.MemkitOutOfMemoryError):
        StepGuard([optimizer]).run(lambda: step(optimizer))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("num_optimizers", [1, 2])
@pytest.mark.parametrize("num_failures", [1, 2])
def test_a_loss_scaler_goes_on_after_a_failed_step(num_optimizers, num_failures):
    torch.manual_seed(0)
    models = [nn.Linear(2, 2) for _ in range(num_optimizers)]
    optimizers = [Foreign(model.parameters(), lr=0.1) for model in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    accumulator = mk.GradientAccumulator(optimizers, scaler=scaler, guard_first_steps=True)
    for failures in (num_failures, 0):
        Foreign.failures = failures
        accumulator.backward(sum(model(torch.ones(1, 2)).sum() for model in models))
        if failures == 2:
            with pytest.raises(mk.MemkitOutOfMemoryError):
                accumulator.step()
        else:
            assert accumulator.step() is True
    assert scaler.get_scale() == 4.0
    assert accumulator.num_steps == (2 if num_failures == 1 else 1)
