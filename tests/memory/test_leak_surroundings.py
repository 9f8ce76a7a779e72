"""The leak watch among objects that misbehave, errors, threads and many objects."""

import gc
import sys
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from memkit.memory.graphs import GraphWalk, graph_of
from memkit.memory.holders import References, locals_of
from memkit.memory.leaks import LeakWatch


def boom(*args):
    raise RuntimeError("asked")


class Hostile:
    """Every operation on it raises."""

    __slots__ = ("__weakref__", "kept")
    __class__ = property(boom)
    __dict__ = property(boom)
    __eq__ = __bool__ = __len__ = __iter__ = __repr__ = __getattr__ = __getattribute__ = boom
    __hash__ = boom


class HostileDict(dict):
    __len__ = __iter__ = __getitem__ = items = keys = values = __contains__ = boom


class HostileList(list):
    __len__ = __iter__ = __getitem__ = boom


class HostileTensor(torch.Tensor):
    grad = grad_fn = property(boom)

    @classmethod
    def __torch_function__(cls, *args, **kwargs):
        raise RuntimeError("asked")


def watch_a_leak(keep, num_steps=4):
    watch = LeakWatch()
    watch.check()
    for step in range(num_steps):
        keep(step, torch.ones(1000))
        leaks = watch.check()
    return leaks


def test_misbehaving_objects_do_not_stop_the_watch():
    hostile, plain_dict = [], HostileDict()

    def keep(step, tensor):
        each = Hostile.__new__(Hostile)
        object.__setattr__(each, "kept", tensor)
        hostile.append(each)
        dict.__setitem__(plain_dict, step, torch.ones(500))

    found = [(leak.num_tensors, leak.growth_bytes) for leak in watch_a_leak(keep)]
    hostile.clear()
    assert found == [(4, 4000), (4, 2000)]


def test_list_with_failing_methods():
    kept = HostileList()
    assert [leak.num_tensors for leak in watch_a_leak(lambda step, tensor: list.append(kept, tensor))] == [4]


def test_tensors_of_other_kinds_are_among_the_living():
    with FakeTensorMode():
        fake = torch.ones(10, requires_grad=True) * 2
    odd = [
        fake,
        torch.ones(3).as_subclass(HostileTensor),
        nn.UninitializedParameter(),
        torch.ones(3, device="meta"),
        torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
    ]
    kept = []
    (leak,) = watch_a_leak(lambda step, tensor: kept.append([*odd, tensor]))
    assert leak.growth_bytes == 4000


def test_saved_tensors_are_read_without_their_hooks():
    calls = []

    def pack(tensor):
        calls.append("pack")
        return tensor.clone()

    def unpack(tensor):
        calls.append("unpack")
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        out = torch.ones(100, requires_grad=True).exp()
    calls.clear()
    walk = GraphWalk()
    walk.add([graph_of(out)])
    assert calls == []
    assert sum(walk.storages.values()) == 400
    out.sum().backward()
    freed = GraphWalk()
    freed.add([graph_of(out)])
    assert freed.storages == {}


def test_recomputation_of_a_checkpoint_is_not_run():
    runs = []

    def block(x):
        runs.append(1)
        return x.exp().exp()

    out = torch.utils.checkpoint.checkpoint(block, torch.ones(10, requires_grad=True), use_reentrant=False)
    walk = GraphWalk()
    walk.add([graph_of(out)])
    assert len(runs) == 1


def test_names_last_error():
    def fail():
        outputs = [torch.ones(1000)]
        raise ValueError(len(outputs))

    try:
        fail()
    except ValueError as exc:
        sys.last_exc = exc
    try:
        outputs = next(frame for frame in _frames(sys.last_exc.__traceback__) if frame.f_code.co_name == "fail")
        kept = dict(locals_of(outputs))["outputs"]
        references = References(gc.get_objects(), [])
        text = references.holder_of(kept[0]).text
    finally:
        del sys.last_exc
    # This test's own frame holds the list too: the search stops at the first name.
    assert "kept[0]" in text or "the last exception's traceback `sys.last_exc`" in text


def _frames(traceback):
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def test_locals_are_read_without_a_trace():
    def holder():
        value = torch.ones(3)
        before = sys.getrefcount(value)
        names = [name for name, _ in locals_of(sys._getframe())]
        return names, sys.getrefcount(value) - before

    assert holder() == (["value", "before"], 0)


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="f_locals is no dict of the frame's any more")
def test_keeps_dict_returned_by_locals():
    def configure(width, depth):
        options = locals()
        before = list(options)
        names = locals_of(sys._getframe())
        return names, before == list(options)

    assert configure(1, 2) == ([], True)


def test_array_of_objects_inside_an_object():
    class Store:
        def __init__(self):
            self.results = np.empty(10, dtype=object)

    store = Store()

    def keep(step, tensor):
        store.results[step] = tensor

    (leak,) = watch_a_leak(keep)
    assert leak.holder.startswith("attribute `results` of test_array_of_objects_inside_an_object.<locals>.Store")


def test_many_threads():
    done = threading.Event()
    threads = [threading.Thread(target=done.wait) for _ in range(200)]
    for thread in threads:
        thread.start()
    try:
        kept = []
        assert len(watch_a_leak(lambda step, tensor: kept.append(tensor))) == 1
    finally:
        done.set()
        for thread in threads:
            thread.join()


@pytest.mark.slow
def test_among_all_objects_of_a_full_process():
    """The other tests see few objects: what was there before this file is set aside for them (tests/conftest.py)."""
    kept = []
    gc.unfreeze()
    try:
        (leak,) = watch_a_leak(lambda step, tensor: kept.append(tensor), num_steps=2)
    finally:
        gc.freeze()
    assert leak.num_tensors == 2
    assert "kept" in leak.holder


def test_no_suspects_no_search(monkeypatch):
    net = nn.Linear(8, 8)
    watch = LeakWatch()
    monkeypatch.setattr(gc, "get_referrers", boom)
    for _ in range(4):
        (net(torch.ones(2, 8)).sum()).backward()
        if watch._num_checks != 1:  # the second check looks at all that is new
            assert watch.check() == []
        else:
            monkeypatch.undo()
            watch.check()
            monkeypatch.setattr(gc, "get_referrers", boom)


def test_check_cost_ignores_objects_without_tensors():
    def num_calls(num_objects):
        junk = [[{"a": [number]}] for number in range(num_objects)]
        watch, calls = LeakWatch(), []
        watch.check()
        watch.check()
        sys.setprofile(lambda frame, event, argument: calls.append(event))
        watch.check()
        sys.setprofile(None)
        assert len(junk) == num_objects
        return len(calls)

    assert num_calls(20_000) < 2 * num_calls(1_000) + 1_000


class Pair:
    pass


def test_each_of_two_tensors_of_one_object_has_its_name():
    """Before Python 3.13, looking up the first one makes the object's dict, which then holds the second."""
    pair = Pair()
    pair.one, pair.two = torch.ones(1), torch.ones(1)
    references = References(gc.get_objects(), [])
    names = [references.holder_of(tensor).text.split(" (")[0] for tensor in (pair.one, pair.two)]
    assert names == ["attribute `one` of Pair", "attribute `two` of Pair"]
