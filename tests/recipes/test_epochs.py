"""Every loop sets the epoch on all objects that draw by it, at any depth; a loop without epochs is warned."""

import copy
import pickle
import re
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    StackDataset,
    Subset,
)

import memkit as mk
from memkit.recipes.order import tell_epoch
from tests.helpers import assert_refused, assert_same, one_in
from tests.toys import mean_square, trainer_of

VOLUMES = [torch.arange(64.0).reshape(1, 4, 4, 4) + number for number in range(4)]
FLIPS = {"flip_prob": 0.5, "rotate_prob": 0.5, "noise_std": 0.1}


def voxels(**settings):
    return mk.voxel.VoxelDataset(VOLUMES, augmentation_config=FLIPS, **settings)


def epoch_of(number):
    """The samples of an epoch, drawn again."""
    dataset = voxels()
    dataset.set_epoch(number)
    return torch.stack([dataset[index] for index in range(4)])


class Drawing(Dataset):
    """Keeps what it is told, like many data sets of others."""

    def __init__(self, inner=None):
        self.inner, self.epoch = inner, None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index


class Plain:
    """A wrapper with names of its own, around a loader or a data set."""

    def __init__(self, inner):
        self.wrapped = inner

    def __len__(self):
        return len(self.wrapped)

    def __getitem__(self, index):
        return self.wrapped[index]

    def __iter__(self):
        return iter(self.wrapped)


def progressive(loader, **settings):
    """What each step of two stages, the second of two epochs, is given."""
    seen = []
    stages = [mk.recipes.Stage(4, batch_size=4), mk.recipes.Stage(4, batch_size=4, epochs=2)]
    mk.ProgressiveTrainer(lambda batch, rows: seen.append(batch), stages, resize=lambda batch, side: batch).run(loader)
    return seen


class TestProgressiveTrainer:
    @pytest.mark.parametrize("wrap", [lambda dataset: dataset, lambda dataset: Subset(dataset, range(4))])
    def test_each_epoch_of_each_stage_has_its_own_augmentations(self, wrap):
        seen = progressive(DataLoader(wrap(voxels()), batch_size=4))
        assert_same(seen, [epoch_of(number) for number in range(3)])
        assert not torch.equal(seen[0], seen[1])

    @pytest.mark.parametrize(
        "settings",
        [
            {"sampler": DistributedSampler(range(16), num_replicas=1, rank=0), "batch_size": 4},
            {"batch_sampler": BatchSampler(DistributedSampler(range(16), num_replicas=1, rank=0), 4, drop_last=False)},
            {"batch_sampler": mk.recipes.ResumableBatchSampler(16, 4, seed=0)},
            {"batch_sampler": mk.points.BudgetBatchSampler([1] * 16, max_points=4)},
        ],
    )
    def test_each_epoch_has_an_order_of_its_own(self, settings):
        seen = progressive(DataLoader(torch.arange(16), **settings))
        epochs = [torch.cat(seen[start : start + 4]).tolist() for start in (0, 4, 8)]
        assert [sorted(each) for each in epochs] == [list(range(16))] * 3
        assert epochs[0] != epochs[1] != epochs[2] != epochs[0]

    def test_a_resumable_loader(self):
        loader = mk.recipes.ResumableLoader(
            DataLoader(torch.arange(16), batch_sampler=mk.recipes.ResumableBatchSampler(16, 4))
        )
        seen = progressive(loader)
        assert loader.epoch == 2
        assert torch.cat(seen[:4]).tolist() != torch.cat(seen[4:8]).tolist()

    def test_a_resumed_stage_goes_on_with_its_own_epoch(self):
        stages = [mk.recipes.Stage(4, batch_size=4, epochs=2), mk.recipes.Stage(4, batch_size=4)]
        seen = []
        trainer = mk.ProgressiveTrainer(lambda batch, _: seen.append(batch), stages, resize=lambda batch, _: batch)
        trainer.load_state_dict({"version": 1, "done": [0, 1]})
        trainer.run(DataLoader(voxels(), batch_size=4))
        assert_same(seen, [epoch_of(1), epoch_of(2)])

    def test_estimating_statistics_consumes_no_batches(self):
        model = nn.Sequential(nn.Conv3d(1, 2, 1), nn.BatchNorm3d(2))
        seen = []
        stages = [mk.recipes.Stage(4, batch_size=4), mk.recipes.Stage(4, batch_size=4)]
        trainer = mk.ProgressiveTrainer(
            lambda batch, _: seen.append(batch), stages, resize=lambda batch, _: batch, model=model
        )
        trainer.run(DataLoader(voxels(), batch_size=4))
        assert_same(seen, [epoch_of(0), epoch_of(1)])


class TestEpochPropagation:
    @pytest.mark.parametrize(
        "wrap",
        [
            lambda each: DataLoader(each),
            lambda each: DataLoader(Subset(Subset(each, range(3)), range(2))),
            lambda each: DataLoader(ConcatDataset([Drawing(), each])),
            lambda each: DataLoader(StackDataset(image=Drawing(), mask=each)),
            lambda each: DataLoader(mk.voxel.VoxelDataset(each)),
            lambda each: DataLoader(Plain(Subset(each, range(2)))),
            lambda each: Plain(DataLoader(each)),
            lambda each: {"a": DataLoader(Drawing()), "b": DataLoader(each)},
            lambda each: [DataLoader(each)],
            lambda each: DataLoader(Drawing(inner=each)),
        ],
    )
    def test_a_data_set_at_any_depth(self, wrap):
        dataset = Drawing()
        tell_epoch(wrap(dataset), 7)
        assert dataset.epoch == 7

    def test_outer_sampler_overrides_inner_epoch(self):
        class Curriculum(Drawing):
            def set_epoch(self, epoch):
                self.inner.set_epoch(epoch // 2)

        inner = Drawing()
        tell_epoch(DataLoader(Curriculum(inner)), 7)
        assert inner.epoch == 3

    def test_loader_counting_its_own_epochs(self):
        """As accelerate's does: at its next epoch it would tell its own number."""

        class Loader(DataLoader):
            iteration = 0

            def set_epoch(self, epoch):
                self.iteration = epoch
                self.dataset.set_epoch(epoch)

        loader = Loader(Drawing())
        tell_epoch(loader, 3)
        assert loader.iteration == loader.dataset.epoch == 3

    def test_samples_are_not_looked_through(self):
        class Sample:
            def __init__(self, *_):
                pytest.fail("must not be asked")

            __getattr__ = __init__

        sample = object.__new__(Sample)
        loader = DataLoader([1.0, *[sample] * 3])
        loader.dataset.append(loader.dataset)
        tell_epoch(loader, 1)

    def test_a_train_loop_tells_a_sampler_inside_a_batch_sampler(self):
        model = nn.Linear(1, 1)
        trainer = trainer_of(model)
        sampler = BatchSampler(DistributedSampler(range(16), num_replicas=1, rank=0), 4, drop_last=False)
        seen = []

        def loss_fn(model, batch):
            seen.extend(batch.flatten().tolist())
            return model(batch).mean()

        loader = DataLoader(torch.arange(16.0)[:, None], batch_sampler=sampler)
        mk.MemoryEfficientTrainLoop(trainer, loader, loss_fn, progress=False).run(num_epochs=2)
        assert sorted(seen[:16]) == sorted(seen[16:]) == list(range(16))
        assert seen[:16] != seen[16:]


def show_warnings(_=0):
    """Write them to standard error, as Python does where nobody has asked for errors."""
    warnings.simplefilter("always")
    warnings.showwarning = lambda message, category, *_: sys.stderr.write(f"{category.__name__}: {message}\n")


WORKERS = [
    {},
    {"num_workers": 2, "multiprocessing_context": "fork"},
    {"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": True},
]


class TestForgottenEpochs:
    @pytest.mark.parametrize("workers", WORKERS)
    def test_a_data_set_warns_in_its_second_pass(self, workers, capfd):
        loader = DataLoader(voxels(), batch_size=2, worker_init_fn=show_warnings, **workers)
        list(loader)
        with warnings.catch_warnings():
            show_warnings()
            list(loader)
        del loader  # and its workers, which have written by then
        assert re.search(
            r"MemkitWarning: VoxelDataset: . of 4 samples of epoch 0 .*returned again.*set_epoch\(epoch\)",
            capfd.readouterr().err,
        )

    @pytest.mark.parametrize("workers", WORKERS)
    def test_no_warning_if_epoch_is_set(self, workers):
        dataset = voxels()
        loader = DataLoader(dataset, batch_size=2, **workers)
        for epoch in (0, 1, 1, 1):
            dataset.set_epoch(epoch)
            assert_same(torch.cat(list(loader)), epoch_of(epoch))
        del loader

    def test_warns_once_per_epoch(self):
        dataset = voxels()
        with pytest.warns(mk.MemkitWarning) as found:
            sum(len(list(dataset)) for _ in range(6))
        assert len(found) == 1

    def test_earlier_reads_are_no_second_pass(self):
        dataset = voxels()
        loader = mk.train.make_dataloader(dataset, 4, device="cpu", num_workers=0)  # looks at the first
        dataset[1]
        assert [len(batch) for batch in loader] == [4]

    def test_drawing_with_replacement_is_no_second_pass(self):
        dataset = mk.voxel.VoxelDataset([torch.ones(1, 2, 2, 2)] * 200)
        sampler = torch.utils.data.RandomSampler(dataset, replacement=True)
        assert len(list(DataLoader(dataset, sampler=sampler))) == 200

    def test_a_validation_is_not_training(self):
        dataset = mk.voxel.VoxelDataset(VOLUMES, use_augmentation=False)
        for _ in range(4):
            assert_same(list(dataset), VOLUMES)

    @pytest.mark.parametrize("seed", range(2))
    def test_copied_data_set_gets_the_epoch(self, seed):
        """Its workers live on, and must see the epoch change."""
        dataset = [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))][seed](voxels())
        loader = DataLoader(dataset, batch_size=4, **WORKERS[2])
        for epoch in range(2):
            dataset.set_epoch(epoch)
            assert_same(next(iter(loader)), epoch_of(epoch))
        del loader

    @pytest.mark.parametrize(
        "make",
        [lambda: mk.recipes.ResumableBatchSampler(64, 4), lambda: mk.points.BudgetBatchSampler([1] * 64, max_points=4)],
    )
    @pytest.mark.parametrize("workers", one_in(2, WORKERS))
    def test_an_order_warns_at_its_second_pass(self, make, workers):
        batches = make()
        batches.set_epoch(5)
        loader = DataLoader(torch.arange(64), batch_sampler=batches, **workers)
        list(loader)
        with pytest.warns(mk.MemkitWarning, match=r"epoch 5 begins again.*set_epoch\(5\)"):
            list(loader)
        batches.set_epoch(5)  # it is meant
        list(loader)
        batches.set_epoch(6)
        next(iter(loader))  # left early
        list(loader)
        batches.load_state_dict(batches.state_dict(num_done=2))
        list(loader)
        del loader

    def test_unshuffled_order_needs_no_epoch(self):
        batches = mk.recipes.ResumableBatchSampler(16, 4, shuffle=False)
        assert list(batches) == list(batches)

    def test_a_validation_in_a_loop_repeats_its_batches_on_purpose(self):
        model = nn.Linear(1, 1)
        trainer = trainer_of(model)
        data = torch.arange(16.0)[:, None]
        val_loader = DataLoader(data, batch_sampler=mk.points.BudgetBatchSampler([1] * 16, max_points=4))
        settings = {"val_loader": val_loader, "progress": False}
        loop = mk.MemoryEfficientTrainLoop(trainer, DataLoader(data, 4), mean_square, **settings)
        assert loop.run(num_epochs=3).validation["loss"] > 0

        class TrainLoop:
            def __init__(self):
                self.model = model

            def run_step(self, batch):
                trainer.train_step(batch, mean_square)

            def run_loop(self):
                for _ in range(6):
                    self.run_step(data[:4])

        enhanced = mk.create_enhanced_train_loop(
            TrainLoop(), val_loader, val_interval=2, val_fn=lambda model, x: {"loss": model(x).square()}
        )
        assert enhanced.run_loop() == "epochs"


@pytest.mark.parametrize("num_done", [-1, 2.0, "3", 17])
@pytest.mark.parametrize(
    "make",
    [lambda: mk.recipes.ResumableBatchSampler(64, 4), lambda: mk.points.BudgetBatchSampler([1] * 64, max_points=4)],
)
def test_a_number_of_batches_that_the_epoch_does_not_have_is_refused(make, num_done):
    assert_refused(lambda: make().state_dict(num_done=num_done), mk.errors.ConfigError, "num_done", "of this epoch")
    state = make().state_dict()
    if num_done != 17:
        assert_refused(
            lambda: make().load_state_dict(state | {"num_done": num_done}), mk.errors.FileFormatError, "num_done"
        )
    assert make().state_dict(num_done=16)["num_done"] == 16
