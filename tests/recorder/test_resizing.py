"""Listeners to `UntypedStorage.resize_`, which come and go in any order."""

import torch

from memkit._recorder.recorder import on_resize


def test_listeners_receive_events_of_their_own_time():
    storage, resize = torch.zeros(10).untyped_storage(), torch.UntypedStorage.resize_
    heard = {"first": [], "second": []}
    first, second = (on_resize(lambda storage, name=name: heard[name].append(storage.nbytes())) for name in heard)
    first.__enter__()
    storage.resize_(1)
    second.__enter__()
    storage.resize_(2)
    first.__exit__(None, None, None)
    storage.resize_(3)
    second.__exit__(None, None, None)
    storage.resize_(4)
    assert heard == {"first": [1, 2], "second": [2, 3]}
    assert torch.UntypedStorage.resize_ is resize
