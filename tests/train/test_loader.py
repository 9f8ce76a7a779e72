"""Loaders that suit the machine they are told of, and batches that keep their containers on the way to a device."""

import collections
import dataclasses
import logging
import multiprocessing

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import memkit as mk
from memkit._machine.devices import resolve_device
from memkit._torch import pytree
from memkit.train.loader import Machine, choose_settings, make_dataloader, to_device
from tests.helpers import FunctionsEntered, assert_refused

GIB = 2**30


def machine(**facts):
    usual = {
        "num_cores": 16,
        "available_bytes": 64 * GIB,
        "shared_memory_bytes": 8 * GIB,
        "has_accelerator": True,
        "may_start_processes": True,
    }
    return Machine(**(usual | facts))


class Images(Dataset):
    """Samples of 1 MiB, and a random one each time."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return torch.rand(2**18), {"label": index}


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(20))


def choice(dataset=None, **facts):
    chosen, _ = choose_settings(dataset or Images(), 8, machine(**facts))
    return chosen["num_workers"], chosen.get("prefetch_factor"), chosen["pin_memory"]


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, (4, 2, True)),
        ({"has_accelerator": False}, (4, 2, False)),
        ({"num_cores": 3}, (2, 2, True)),
        ({"num_cores": 1}, (0, None, True)),
        ({"may_start_processes": False}, (0, None, True)),
        ({"shared_memory_bytes": 2**26}, (4, 1, True)),  # 64 MiB, Docker's: half holds four batches of 8 MiB
        ({"shared_memory_bytes": 2**25}, (2, 1, True)),
        ({"shared_memory_bytes": 2**20}, (0, None, True)),
        ({"available_bytes": 2**27}, (4, 1, True)),
        ({"shared_memory_bytes": None}, (4, 2, True)),
        ({"dataset": TensorDataset(torch.zeros(9))}, (0, None, True)),
        ({"dataset": Stream()}, (4, 2, True)),
    ],
)
def test_the_choice_and_its_reason(facts, expected):
    assert choice(**facts) == expected


def test_batches_in_flight_never_exceed_their_share():
    for shared in range(2**20, 2**28, 2**22):
        chosen, _ = choose_settings(Images(), 8, machine(shared_memory_bytes=shared))
        assert chosen["num_workers"] * chosen.get("prefetch_factor", 0) * 8 * 2**20 <= shared / 2


def test_the_loader_is_torchs_own_and_says_why(caplog):
    with caplog.at_level(logging.INFO, logger="memkit"):
        loader = make_dataloader(Images(), device="cpu", num_workers=1, shuffle=True, drop_last=True)
    assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (1, 2, True)
    assert not loader.pin_memory
    assert "memory is not pinned: there is no accelerator" in caplog.text
    assert "num_workers as given" in caplog.text
    assert [len(images) for images, _ in loader] == [8, 8]


def test_inspecting_a_sample_does_not_change_draws():
    state = torch.get_rng_state()
    make_dataloader(Images(), device="cpu", num_workers=0)
    assert torch.equal(torch.get_rng_state(), state)


def _plan_in_child(connection):
    connection.send(make_dataloader(Images(), device="cpu").num_workers)


def test_starts_no_workers_inside_a_worker():
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_plan_in_child, args=(theirs,), daemon=True)
    child.start()
    theirs.close()  # so that a child that dies ends the wait
    assert ours.recv() == 0
    child.join()


def test_a_batch_sampler_takes_the_place_of_the_batch_size():
    loader = make_dataloader(TensorDataset(torch.arange(6)), device="cpu", batch_sampler=[[0, 1, 2, 3], [4, 5]])
    assert [len(rows) for (rows,) in loader] == [4, 2]
    assert_refused(lambda: make_dataloader(Images(), 0), mk.errors.ConfigError, r"batch_size=0.*1 or more")


Pair = collections.namedtuple("Pair", "left right")


@dataclasses.dataclass(frozen=True, slots=True)
class Scene:
    points: torch.Tensor
    name: str
    parts: list


class Own:
    def __init__(self, value):
        self.value = value

    def to(self, device):
        return Own(self.value.to(device))


def test_containers_keep_their_types():
    x = torch.ones(2)
    batch = {
        "pair": Pair(x, [x, "text", 3]),
        "scene": Scene(x, "room", [x]),
        "ordered": collections.OrderedDict(a=x),
        "tokens": collections.UserDict(ids=[x]),  # as a tokenizer's BatchEncoding is one
        "own": Own(x),
        "packed": pack_sequence([torch.ones(3), torch.ones(2)]),
    }
    moved = to_device(batch, "meta")
    assert type(moved["pair"]) is Pair
    assert type(moved["scene"]) is Scene
    assert type(moved["ordered"]) is collections.OrderedDict
    assert type(moved["tokens"]) is collections.UserDict
    assert moved["pair"].right[1:] == ["text", 3]
    assert moved["scene"].name == "room"
    tensors = [moved["pair"].left, moved["pair"].right[0], moved["scene"].points, moved["scene"].parts[0]]
    tensors += moved["tokens"]["ids"]
    tensors += [moved["ordered"]["a"], moved["own"].value, moved["packed"].data]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert batch["scene"].points.device.type == batch["tokens"]["ids"][0].device.type == "cpu"


def test_device_is_named_consistently():
    assert to_device(torch.ones(2), "auto").device == resolve_device("auto")
    with pytest.raises(mk.errors.ConfigError, match="expected 'auto' or a device of this machine"):
        to_device(torch.ones(2), "gpu")


def test_does_not_copy_tensors_already_there():
    x = torch.ones(2)
    assert to_device([x], "cpu")[0] is x
    assert [type(each) for each in to_device({"a": [x], "b": "name"}, "meta").values()] == [list, str]


@pytest.mark.parametrize("container", [tuple, list, lambda pair: dict(enumerate(pair))])
def test_batch_that_is_there_takes_few_functions(container):
    """Each batch, in training on a CPU: between two steps, a function takes microseconds."""
    here, target = container((torch.ones(2), torch.ones(3))), torch.device("cpu")
    with FunctionsEntered() as entered:
        assert to_device(here, target) is here
    assert len(entered.own) == 2
    assert all(each.is_meta for each in pytree.children_of(to_device(here, torch.device("meta"))))


def test_only_pinned_memory_is_copied_without_waiting():
    """Without an accelerator nothing can be pinned: a tensor that says it is shows what is asked of it."""

    class Asked(torch.Tensor):
        is_there = False

        def is_pinned(self):
            return self.is_there

        def to(self, device, non_blocking=False):
            calls.append((torch.device(device).type, non_blocking))
            return self

    calls = []
    tensor = torch.ones(2).as_subclass(Asked)
    for is_pinned in (False, True):
        tensor.is_there = is_pinned
        to_device([tensor], "meta")
        to_device([tensor], "cpu")
    assert calls == [("meta", False), ("cpu", False), ("meta", True), ("cpu", False)]


def test_a_container_that_holds_itself_is_refused():
    batch = [torch.ones(1)]
    batch.append(batch)
    assert_refused(lambda: to_device(batch, "meta"), mk.errors.InputError, r"a list that holds itself")
