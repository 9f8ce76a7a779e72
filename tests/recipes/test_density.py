"""A step on several densities has the gradient of the plain loop, in each mode; what it keeps and says is small."""

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memkit as mk
from memkit import (
    MemkitOutOfMemoryError,
    MemkitWarning,
    MemoryEfficientTrainingWrapper,
    MemoryManager,
)
from memkit.errors import ConfigError, InputError
from memkit.points.grid import GridIndex
from memkit.points.nested import single_within
from memkit.points.sampler import GridAwareSampler
from memkit.recipes.density import DensityInvariantTrainer
from memkit.recipes.density_records import PointBatch, PointScene
from tests.helpers import assert_refused, relative_error
from tests.points.scenes import on_mesh

GRID_MM = 12.0
WEIGHT = 3.0


class CellNet(nn.Module):
    """Points see the mean of their cell, each cloud for itself; dropout, to see whether passes repeat it."""

    def __init__(self, width=32, dropout=0.0):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(3, width), nn.GELU(), nn.LayerNorm(width), nn.Dropout(dropout))
        self.second = nn.Sequential(nn.Linear(2 * width, width), nn.GELU(), nn.Linear(width, 2))

    def forward(self, batch):
        x = self.first(batch.features)
        cell = GridIndex.from_coords(batch.coords, GRID_MM, batch.offsets).cell_of_point()
        mean = x.new_zeros(int(cell.max()) + 1, x.shape[1]).index_add(0, cell, x) / cell.bincount()[:, None]
        return self.second(torch.cat([x, mean[cell]], 1))


def scene(num_points=400, seed=0, dtype=torch.float64):
    coords = torch.from_numpy(on_mesh(num_points, seed)).to(dtype)
    return PointScene(coords, coords / 10, (coords[:, 2] > coords[:, 2].median()).long())


def model_of(seed=0, **settings):
    torch.manual_seed(seed)
    return CellNet(**settings).double()


def one_step(model, scenes, mode="joint", *, weight=WEIGHT, trainer=None, **settings):
    """Take a step of plain SGD with rate 1, so that parameters move by the gradient."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    settings = {"grid_size": GRID_MM} | settings
    with DensityInvariantTrainer(
        trainer or model,
        GridAwareSampler(seed=5),
        F.cross_entropy,
        weight=weight,
        mode=mode,
        optimizer=None if trainer else optimizer,
        **settings,
    ) as density:
        return density.train_step(scenes)


def moved(model, before):
    """The gradient that the step took."""
    return torch.cat([(b - a).flatten() for a, b in zip(model.parameters(), before.parameters(), strict=True)])


def draw(sampler, each):
    """Rows of half, of single, and of single within half."""
    index = GridIndex.from_coords(each.coords, GRID_MM)
    half = sampler.sample_half_density(index)
    single = single_within(sampler, index, half)
    return half.indices, single, torch.isin(half.indices, single).nonzero()[:, 0]


def plain_gradient(model, scenes, mode="joint", weight=WEIGHT):
    """The step as one would write it by hand: every cloud by itself, and all kept."""
    sampler = GridAwareSampler(seed=5)
    total = 0
    for each in scenes:
        half, single, _ = draw(sampler, each)

        def run(rows, each=each):
            offsets = torch.tensor([len(rows)])
            return model(PointBatch(each.coords[rows], each.features[rows], offsets))

        dense = run(torch.arange(len(each.coords)))
        sparse = {"half": (run(half), half), "single": (run(single), single)}
        tasks = [F.cross_entropy(output, each.targets[rows]) for output, rows in sparse.values()]
        if mode == "stopgrad":
            dense = dense.detach()
        else:
            tasks.append(F.cross_entropy(dense, each.targets))
        distances = [F.mse_loss(output, dense[rows]) for output, rows in sparse.values()]
        total += (sum(tasks) / len(tasks) + weight * sum(distances) / 2) / len(scenes)
    return torch.cat([g.flatten() for g in torch.autograd.grad(total, list(model.parameters()))]), total.detach()


@pytest.mark.parametrize("num_scenes", [1, 2])
@pytest.mark.parametrize("mode", ["joint", "cached", "stopgrad"])
def test_gradient_and_loss_are_those_of_the_plain_loop(mode, num_scenes):
    model, scenes = model_of(), [scene(seed=seed, num_points=300 + 100 * seed) for seed in range(num_scenes)]
    before = copy.deepcopy(model)
    want, loss = plain_gradient(before, scenes, mode)
    result = one_step(model, scenes, mode)
    assert relative_error(moved(model, before), want) < 1e-12
    torch.testing.assert_close(result.loss, loss, rtol=1e-12, atol=0)
    # The other two objectives are far away: the agreement is no accident.
    other = "joint" if mode == "stopgrad" else "stopgrad"
    assert relative_error(plain_gradient(before, scenes, other)[0], want) > 1e-2
    assert relative_error(plain_gradient(before, scenes, mode, weight=0.0)[0], want) > 1e-4


def test_cached_repeats_dropout():
    """With dropout the second pass must draw the first one's masks: the finite difference of the loss says so."""
    model = model_of(dropout=0.3)
    before = copy.deepcopy(model)
    torch.manual_seed(3)
    one_step(model, scene(), "cached")
    direction = moved(model, before)
    losses = []
    for size in (1e-6, -1e-6):
        shifted = copy.deepcopy(before)
        for parameter, step in zip(
            shifted.parameters(), direction.split([p.numel() for p in before.parameters()]), strict=True
        ):
            parameter.data += size * step.view_as(parameter)
        torch.manual_seed(3)
        losses.append(one_step(shifted, scene(), "cached").loss)
    slope = ((losses[0] - losses[1]) / 2e-6).item()
    assert slope == pytest.approx(direction.square().sum().item(), rel=1e-6)


def test_scenes_in_micro_batches_are_the_same_step():
    scenes = [scene(seed=seed, num_points=200 + 50 * seed) for seed in range(3)]
    model = model_of()
    before = copy.deepcopy(model)
    wrapper = MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters(), lr=1.0), accumulation_steps=3)
    result = one_step(model, scenes, trainer=wrapper)
    want, loss = plain_gradient(before, scenes)
    assert relative_error(moved(model, before), want) < 1e-12
    torch.testing.assert_close(result.loss, loss, rtol=1e-12, atol=0)
    wrapper.close()


class Fails(nn.Module):
    """Runs out of memory where a call holds more than so many points."""

    def __init__(self, inner, most):
        super().__init__()
        self.inner, self.most = inner, most

    def forward(self, batch):
        if len(batch.coords) > self.most:
            raise torch.OutOfMemoryError("not enough memory")
        return self.inner(batch)


def test_survives_out_of_memory_with_fewer_scenes_at_a_time():
    scenes = [scene(seed=seed, num_points=300) for seed in range(2)]
    model = Fails(model_of(), most=900)  # one scene with its sparser densities, not two
    before = copy.deepcopy(model.inner)
    with pytest.raises(MemkitOutOfMemoryError, match="could not be checked"):  # there is no room for two at once
        one_step(model, scenes)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer = mk.MemoryEfficientTrainingWrapper(model, optimizer, on_oom="inexact")
    with pytest.warns(MemkitWarning, match="could not check that splitting"):
        result = one_step(model, scenes, trainer=trainer)
    want, loss = plain_gradient(before, scenes)
    assert relative_error(moved(model.inner, before), want) < 1e-12
    torch.testing.assert_close(result.loss, loss, rtol=1e-12, atol=0)

    assert_refused(lambda: one_step(Fails(model_of(), most=350), scenes), MemkitOutOfMemoryError)
    assert one_step(Fails(model_of(), most=350), scenes, mode="cached").stepped


def test_scenarios_are_nested_and_counted():
    each = scene(2000)
    seen = []

    class Sees(CellNet):
        def forward(self, batch):
            seen.append(batch)
            return super().forward(batch)

    torch.manual_seed(0)
    result = one_step(Sees().double(), each)
    (batch,) = seen  # one forward for all
    half, single, inner = draw(GridAwareSampler(seed=5), each)
    assert torch.equal(half[inner], single)
    assert batch.offsets.tolist() == [2000, 2000 + len(half), 2000 + len(half) + len(single)]
    assert torch.equal(batch.coords, torch.cat([each.coords, each.coords[half], each.coords[single]]))
    assert result.num_points == {"dense": 2000, "half": len(half), "single": len(single)}
    assert list(result.task) == ["dense", "half", "single"]
    assert list(result.consistency) == ["half", "single"]
    cells = GridIndex.from_coords(each.coords, GRID_MM)
    assert len(single) == cells.num_cells


def test_without_dense_half_is_the_densest():
    model = model_of()
    before = copy.deepcopy(model)
    each = scene()
    result = one_step(model, each, scenarios=("single", "half"))
    half, single, inner = draw(GridAwareSampler(seed=5), each)
    outputs = [
        before(PointBatch(each.coords[rows], each.features[rows], torch.tensor([len(rows)]))) for rows in (half, single)
    ]
    task = sum(F.cross_entropy(o, each.targets[rows]) for o, rows in zip(outputs, (half, single), strict=True)) / 2
    loss = task + WEIGHT * F.mse_loss(outputs[1], outputs[0][inner])
    torch.testing.assert_close(result.loss, loss.detach(), rtol=1e-12, atol=0)
    assert list(result.consistency) == ["single"]


def test_steps_draw_anew_and_resume():
    each = scene()

    def losses(sampler, num):
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with DensityInvariantTrainer(
            model, sampler, F.cross_entropy, optimizer=optimizer, grid_size=GRID_MM
        ) as trainer:
            return [trainer.train_step(each).loss.item() for _ in range(num)]

    sampler = GridAwareSampler(seed=1)
    first = losses(sampler, 2)
    state = sampler.state_dict()
    then = losses(sampler, 2)
    assert len(set(first + then)) == 4
    other = GridAwareSampler(seed=0)
    other.load_state_dict(state)
    assert losses(other, 2) == then


class TwoOutputs(CellNet):
    def forward(self, batch):
        logits = super().forward(batch)
        return {"logits": logits, "features": (self.first(batch.features),)}


@pytest.mark.parametrize(("error", "place"), [(torch.OutOfMemoryError, "draw"), (KeyboardInterrupt, "forward")])
def test_a_step_that_failed_draws_the_same_points_again(error, place, monkeypatch):
    def train(*, fails):
        model, sampler, is_due = model_of(), GridAwareSampler(seed=5), False
        index = sampler.index

        def fail():
            nonlocal is_due
            if is_due:
                is_due = False
                raise error("out of memory")

        def failing_index(coords, *arguments, **settings):
            if len(coords) == 300:  # of the second scene: the first one's points are drawn
                fail()
            return index(coords, *arguments, **settings)

        if place == "draw":
            monkeypatch.setattr(sampler, "index", failing_index)
        else:
            model.register_forward_pre_hook(lambda *_: fail())
        optimizer, scenes = torch.optim.SGD(model.parameters(), lr=0.1), [scene(), scene(300, seed=1)]
        with DensityInvariantTrainer(
            model, sampler, F.cross_entropy, optimizer=optimizer, grid_size=GRID_MM
        ) as density:
            density.train_step(scenes)
            is_due = fails
            if fails:
                with pytest.raises(error):
                    density.train_step(scenes)
            density.train_step(scenes)
        return model.state_dict()

    torch.testing.assert_close(train(fails=True), train(fails=False), rtol=0, atol=0)


def test_outputs_may_be_a_tree_and_the_consistency_a_function():
    def distance(sparse, dense):
        return (sparse["features"][0] - dense["features"][0]).abs().mean()

    torch.manual_seed(0)
    model = TwoOutputs().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with DensityInvariantTrainer(
        model,
        GridAwareSampler(),
        lambda output, targets: F.cross_entropy(output["logits"], targets),
        distance,
        optimizer=optimizer,
        grid_size=GRID_MM,
    ) as trainer:
        result = trainer.train_step(scene())
    assert result.consistency["half"] == 0  # these features belong to the points alone


def test_kl_is_the_divergence_of_the_dense_prediction():
    torch.manual_seed(0)
    model = model_of()
    result = one_step(model, scene(), consistency="kl")
    before = model_of()
    each = scene()
    half, _, _ = draw(GridAwareSampler(seed=5), each)
    dense = before(PointBatch(each.coords, each.features, torch.tensor([len(each.coords)])))[half].softmax(1)
    sparse = before(PointBatch(each.coords[half], each.features[half], torch.tensor([len(half)]))).softmax(1)
    want = (dense * (dense / sparse).log()).sum(1).mean()
    torch.testing.assert_close(result.consistency["half"], want.detach())


def bytes_in_tensors():
    # By type, not isinstance: other tests leave objects of torch's behind that warn when they are asked.
    tensors = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors if tensor.layout is torch.strided)


def test_keeps_no_step_tensors_alive():
    model, each = model_of(), scene()
    results = [one_step(model, each) for _ in range(2)]  # twice: the first fills caches
    gc.collect()
    before = bytes_in_tensors()
    results.append(one_step(model, each))
    gc.collect()
    assert bytes_in_tensors() - before < 500  # seven numbers
    tensors = [results[-1].loss, *results[-1].task.values(), *results[-1].consistency.values()]
    assert all(t.untyped_storage().nbytes() == 8 and not t.requires_grad for t in tensors)


def peak_of(mode):
    model = CellNet(width=128)
    each = scene(4000, dtype=torch.float32)
    one_step(copy.deepcopy(model), each, mode)
    memory = MemoryManager("cpu")
    with memory.track() as tracker:
        result = one_step(model, each, mode, memory=memory)
    memory.close()
    assert max(figures.peak_bytes for figures in result.phases.values()) <= tracker.peak_bytes
    return tracker.peak_bytes


def test_cached_and_stopgrad_take_less_memory():
    joint, cached, stopgrad = map(peak_of, ("joint", "cached", "stopgrad"))
    assert cached < 0.75 * joint
    assert stopgrad < 0.75 * joint


def test_phases_make_up_the_step():
    memory = MemoryManager("cpu")
    result = one_step(model_of(), scene(), memory=memory)
    assert list(result.phases) == ["sampling", "data", "forward", "consistency", "backward", "optimizer"]
    parts = sum(figures.seconds for figures in result.phases.values())
    assert 0 < parts <= result.seconds
    assert all(figures.peak_bytes is None for figures in result.phases.values())  # nobody counts on the CPU
    assert memory.phases["step/forward"].num_calls == 1
    assert result.line().startswith(f"{result.seconds:.3f} s: sampling ")
    memory.close()


def test_cached_refuses_batch_norm():
    model = nn.Sequential(nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = DensityInvariantTrainer(
        model, GridAwareSampler(), F.cross_entropy, mode="cached", optimizer=optimizer, grid_size=GRID_MM
    )
    with trainer, pytest.raises(ConfigError, match=r"0 in training mode.*mode='joint'"):
        trainer.train_step(scene())


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"scenarios": ("dense",)}, "two or three of"),
        ({"scenarios": ("dense", "dense")}, "two or three of"),
        ({"scenarios": ("dense", "quarter")}, "quarter"),
        ({"mode": "together"}, "'stopgrad'"),
        ({"consistency": "l3"}, "'mse', 'kl'.*or a function"),
        ({"weight": float("nan")}, "from 0"),
        ({"optimizer": None}, "an optimizer, because the model is a plain module"),
    ],
)
def test_refuses_settings(settings, text):
    model = nn.Linear(3, 2)
    settings = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)} | settings
    with pytest.raises(ConfigError, match=text):
        DensityInvariantTrainer(model, GridAwareSampler(), F.cross_entropy, **settings)


def test_a_wrapper_brings_its_own_optimizer_and_stays_open():
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapper = MemoryEfficientTrainingWrapper(model, optimizer)
    with pytest.raises(ConfigError, match="no optimizer together with a wrapper"):
        DensityInvariantTrainer(wrapper, GridAwareSampler(), F.cross_entropy, optimizer=optimizer)
    assert one_step(model, scene(), trainer=wrapper).stepped
    assert one_step(model, scene(), trainer=wrapper).stepped
    assert wrapper.num_steps == 2
    wrapper.close()


@pytest.mark.parametrize(
    ("scenes", "text"),
    [
        ([], "no scene"),
        (PointScene(torch.zeros(0, 3), torch.zeros(0, 3), torch.zeros(0)), "0 coords"),
        (
            PointScene(torch.zeros(4, 3), torch.zeros(3, 3), torch.zeros(4)),
            "3 features and 4 targets; .* with the same number of rows",
        ),
    ],
)
def test_refuses_scenes(scenes, text):
    assert_refused(lambda: one_step(model_of(), scenes), InputError, text)


@pytest.mark.parametrize(
    ("output", "loss_fn", "text"),
    [
        (lambda x: x[:-1], F.cross_entropy, r"shape \(\d+, 2\), .* from the model"),
        (lambda x: (x, 3), F.cross_entropy, "a int from the model"),
        (lambda x: x, lambda x, y: F.cross_entropy(x, y, reduction="none"), r"shape \(400,\), .* from loss_fn"),
        (lambda x: x, lambda x, y: 0.0, "a float from loss_fn"),
    ],
)
def test_rejects_invalid_model_and_loss_results(output, loss_fn, text):
    class Wrong(CellNet):
        def forward(self, batch):
            return output(super().forward(batch))

    model = Wrong().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        DensityInvariantTrainer(model, GridAwareSampler(), loss_fn, optimizer=optimizer, grid_size=GRID_MM) as trainer,
        pytest.raises(InputError, match=text),
    ):
        trainer.train_step(scene())


# ---- clouds without a label


def unlabeled(each):
    return PointScene(each.coords, each.features, torch.full_like(each.targets, -100))


@pytest.mark.parametrize("mode", ["joint", "cached", "stopgrad"])
def test_unlabeled_scene_adds_no_task_loss(mode):
    """Its mean over no label is NaN; the consistency of its densities counts, and the other scene's task."""
    model, scenes = model_of(), [scene(seed=0), unlabeled(scene(seed=1))]
    before = copy.deepcopy(model)
    result = one_step(model, scenes, mode)
    task_and_distance, loss = plain_gradient(copy.deepcopy(before), scenes[:1], mode)
    zero_targets = PointScene(scenes[1].coords, scenes[1].features, torch.zeros_like(scenes[1].targets))
    sampler = GridAwareSampler(seed=5)
    draw(sampler, scenes[0])
    half, single, _ = draw(sampler, zero_targets)
    outputs = []
    for rows in (torch.arange(len(zero_targets.coords)), half, single):
        batch = PointBatch(zero_targets.coords[rows], zero_targets.features[rows], torch.tensor([len(rows)]))
        outputs.append(before(batch))
    dense = outputs[0].detach() if mode == "stopgrad" else outputs[0]
    distance = (
        WEIGHT * sum(F.mse_loss(out, dense[rows]) for out, rows in zip(outputs[1:], (half, single), strict=True)) / 2
    )
    only = torch.cat([g.flatten() for g in torch.autograd.grad(distance, list(before.parameters()))])
    assert relative_error(moved(model, before), (task_and_distance + only) / 2) < 1e-12
    torch.testing.assert_close(result.loss, (loss + distance.detach()) / 2, rtol=1e-12, atol=0)
    assert all(each.isfinite() for each in result.task.values())


def test_no_label_at_all_leaves_the_consistency():
    model = model_of()
    before = copy.deepcopy(model)
    result = one_step(model, unlabeled(scene()))
    assert result.stepped
    assert result.loss.isfinite()
    assert all(each.isnan() for each in result.task.values())
    assert moved(model, before).isfinite().all()


def test_a_count_of_zero_says_the_same():
    """For users who mark missing labels differently."""

    def loss_fn(output, targets):
        valid = targets != 255
        return mk.Loss(sum=F.cross_entropy(output, targets, ignore_index=255, reduction="sum"), count=valid.sum())

    model, each = model_of(), scene()
    blank = PointScene(each.coords, each.features, torch.full_like(each.targets, 255))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    settings = {"grid_size": GRID_MM, "optimizer": optimizer}
    with DensityInvariantTrainer(model, GridAwareSampler(seed=5), loss_fn, **settings) as density:
        result = density.train_step([each, blank])
        assert result.loss.isfinite()
        assert all(loss.isfinite() for loss in result.task.values())
        assert density.train_step(blank).loss.isfinite()


def test_diverging_task_stays_visible():
    """NaN where points have labels is no missing label."""
    model = model_of()
    with torch.no_grad():
        model.second[2].bias[0] = float("nan")
    assert one_step(model, scene()).loss.isnan()
