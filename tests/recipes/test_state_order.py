"""An epoch that is stopped and gone on with: every sample once, none read again."""

import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from memkit._core.errors import ConfigError, FileFormatError, InputTypeError, MemkitWarning, StateError
from memkit.points.batches import BudgetBatchSampler
from memkit.recipes.loop import MemoryEfficientTrainLoop
from memkit.recipes.order import ResumableBatchSampler, ResumableLoader
from memkit.recipes.state.manager import TrainingStateManager
from tests.toys import trainer_of


class Counting(Dataset):
    """Returns its indices, and notes them."""

    def __init__(self):
        self.read = []

    def __len__(self):
        return 103

    def __getitem__(self, index):
        self.read.append(index)
        return index


def make(dataset=None, **settings):
    batches = ResumableBatchSampler(103, 8, seed=5)
    loader = DataLoader(dataset or Counting(), batch_sampler=batches, generator=torch.Generator(), **settings)
    return ResumableLoader(loader)


class Shifting(Counting):
    """Returns numbers that depend on how many it has returned before."""

    def __init__(self):
        super().__init__()
        self.num_read, self.dataset = 0, self  # some refer to themselves

    def __getitem__(self, index):
        self.num_read += 1
        return index + self.num_read


class Saving(Shifting):
    def state_dict(self):
        return {"num_read": self.num_read}

    def load_state_dict(self, state):
        self.num_read = state["num_read"]


def test_what_a_data_set_counts_itself_is_told_of(tmp_path):
    loader, manager = make(torch.utils.data.Subset(Shifting(), range(103))), TrainingStateManager(tmp_path)
    manager.save(0, loader=loader)  # nothing is read yet
    batches = iter(loader)
    next(batches)
    with pytest.warns(MemkitWarning, match=r"changes Shifting\.num_read, which no saved state has"):
        manager.save(1, loader=loader)
    next(batches)
    manager.save(2, loader=loader)  # once


def test_what_a_data_set_saves_itself_goes_on(tmp_path):
    dataset = Saving()
    loader, manager = make(dataset), TrainingStateManager(tmp_path)
    batches = iter(loader)
    next(batches)
    manager.save(1, loader=loader, dataset=dataset)
    rest = [batch.tolist() for batch in batches]
    again = Saving()
    loader = make(again)
    manager.restore(loader=loader, dataset=again)
    assert [batch.tolist() for batch in loader] == rest


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stopped_epoch_goes_on(tmp_path, num_workers):
    """Workers have fetched ten batches when three are trained on: the rest begins at the fourth."""
    workers = {"num_workers": num_workers} | ({"prefetch_factor": 4} if num_workers else {})
    loader, manager = make(**workers), TrainingStateManager(tmp_path)
    loader.set_epoch(2)
    whole = list(loader)
    loader.set_epoch(2)
    first = list(itertools.islice(loader, 3))
    manager.save(3, loader=loader)
    dataset = Counting()
    again = make(dataset, **workers)
    manager.restore(loader=again)
    assert again.epoch == 2
    again.set_epoch(2)  # as the loop over epochs does
    rest = list(again)
    assert [batch.tolist() for batch in first + rest] == [batch.tolist() for batch in whole]
    if not num_workers:
        assert len(dataset.read) == 103 - 3 * 8  # nothing that is done is read
    again.set_epoch(3)
    assert len(list(again)) == len(again) == 13
    assert again.state_dict()["num_done"] == 13


def test_resuming_draws_no_random_numbers():
    loader = make()
    before = torch.get_rng_state()
    list(loader)
    assert torch.equal(torch.get_rng_state(), before)


class Drawing(Counting):
    """Draws by the epoch; names itself as what it is made of, as some wrappers do."""

    def __init__(self):
        super().__init__()
        self.epoch, self.dataset = 0, self

    def set_epoch(self, epoch):
        self.epoch = epoch


def test_data_set_keeps_its_own_epoch():
    dataset = Drawing()
    loader = make(dataset)
    for epoch in range(1, 3):
        dataset.set_epoch(epoch)
        loader.set_epoch(0)
        list(loader)
        assert dataset.epoch == epoch
    loader.set_epoch(5)
    list(loader)
    assert dataset.epoch == 5
    again = make(other := Drawing())
    again.load_state_dict(loader.state_dict())
    list(again)
    assert other.epoch == 5


def test_accepts_any_order_from_seed_and_epoch():
    def start():
        batches = BudgetBatchSampler([1 + number % 7 for number in range(103)], max_points=20, seed=5)
        return ResumableLoader(DataLoader(Counting(), batch_sampler=batches))

    loader, again = start(), start()
    whole = [batch.tolist() for batch in loader]
    loader.set_epoch(0)
    list(itertools.islice(loader, 4))
    again.load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in again] == whole[4:]
    again.set_epoch(0)
    assert [batch.tolist() for batch in again] == whole


@pytest.mark.parametrize(("num_replicas", "drop_last"), [(1, False), (1, True), (4, False), (4, True)])
def test_ranks_share_an_epoch(num_replicas, drop_last):
    ranks = [
        ResumableBatchSampler(103, 8, num_replicas=num_replicas, rank=rank, drop_last=drop_last)
        for rank in range(num_replicas)
    ]
    batches = [list(each) for each in ranks]
    samples = sorted(itertools.chain(*itertools.chain(*batches)))
    assert {len(each) for each in batches} == {len(ranks[0])}
    if drop_last:
        assert {len(batch) for each in batches for batch in each} == {8}
        assert len(set(samples)) == len(samples) == 103 // (8 * num_replicas) * 8 * num_replicas
    else:
        assert samples == list(range(103))
        lasts = [len(each[-1]) for each in batches]
        assert max(lasts) - min(lasts) <= 1
    states = [each.state_dict() for each in ranks]
    assert all(state == states[0] for state in states)


def test_orders():
    batches = ResumableBatchSampler(10, 4, seed=1)
    first = list(batches)
    assert first == [[3, 5, 2, 9], [7, 0, 8, 6], [1, 4]]  # of any torch and NumPy, for ever
    batches.set_epoch(1)
    assert list(batches) != first
    assert list(ResumableBatchSampler(10, 4, seed=2)) != first
    assert list(ResumableBatchSampler(10, 4, shuffle=False)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_the_position_alone_takes_the_place(tmp_path):
    """To pass over nine million samples takes as long as to pass over none."""
    batches = ResumableBatchSampler(10_000_000, 100, shuffle=False)
    batches.load_state_dict(batches.state_dict(num_done=90_000))
    assert next(iter(batches))[0] == 9_000_000
    assert batches.state_dict()["num_done"] == 90_001


def test_errors():
    for setting in (
        {"batch_size": 0},
        {"batch_size": "4"},
        {"seed": "a"},
        {"num_replicas": 0},
        {"rank": 1},
        {"num_samples": -1},
    ):
        ((name, value),) = setting.items()
        with pytest.raises(ConfigError, match=rf"ResumableBatchSampler.*got {name}={value!r}; expected a whole"):
            ResumableBatchSampler(**{"num_samples": 10, "batch_size": 4} | setting)
    with pytest.raises(ConfigError, match="got 2 samples for the last batches of 4 ranks"):
        ResumableBatchSampler(18, 4, num_replicas=4, rank=0)
    with pytest.raises(FileFormatError, match=r"made of '10 samples, batches of 4 over all .*made of '11 samples"):
        ResumableBatchSampler(11, 4).load_state_dict(ResumableBatchSampler(10, 4).state_dict())
    with pytest.raises(InputTypeError, match="whose batch_sampler is BatchSampler"):
        ResumableLoader(DataLoader(Counting(), 4))


def in_a_loop(loader):
    model = nn.Linear(1, 1)
    trainer = trainer_of(model)
    return MemoryEfficientTrainLoop(trainer, loader, lambda model, batch: model(batch[:, None].float()).mean())


@pytest.mark.parametrize("wrap", [ResumableLoader, in_a_loop])
def test_batches_of_another_number_of_samples_than_the_data_set(wrap):
    def made_for(num_samples, **settings):
        return wrap(DataLoader(range(10), batch_sampler=ResumableBatchSampler(num_samples, 4, **settings)))

    made_for(10, drop_last=True)
    with pytest.warns(MemkitWarning, match="the last 2 of the dataset's 10 samples are in no batch"):
        made_for(8)
    with pytest.raises(
        ConfigError, match=r"got a sampler for 11 samples and a dataset of 10; .*\(len\(dataset\), \.\.\.\)"
    ):
        made_for(11)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_warns_of_state_loaded_inside_the_loop(tmp_path, num_workers):
    """The running loop's next batch would count as one of the state's, and the state's would be read again."""
    loader, manager = make(num_workers=num_workers), TrainingStateManager(tmp_path)
    manager.save(0, loader=loader)
    with pytest.raises(StateError, match=r"load_state_dict\(state\): got a state that was loaded while a loop"):
        for batch in loader:
            assert len(batch) == 8
            manager.restore(loader=loader)
    assert [len(batch) for batch in loader] == [8] * 12 + [7]  # and a new loop is the state's
    order = ResumableBatchSampler(103, 8)
    with pytest.raises(StateError, match=r"ResumableBatchSampler\.load_state_dict"):
        for _ in order:
            order.load_state_dict(order.state_dict())
