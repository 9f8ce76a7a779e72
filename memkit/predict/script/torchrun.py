"""Run the first rank of a torchrun job without the others: communication succeeds but transfers nothing.

The environment is torchrun's. A process group has the requested size and torch's own fake backend, which exchanges
nothing; code that asks for the backend's name gets NCCL. `torch.multiprocessing.spawn` runs the first process here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import cuda  # noqa: TID251 - patched here, never queried
from torch.nn.parallel import DistributedDataParallel

from memkit._simulation.leftovers import Patches, applied
from memkit._simulation.ranks import keep_first_buckets, shard_patches
from memkit._torch.fake_ranks import FakeStore

_PORT = "29500"  # nothing listens on it


@contextmanager
def launched_as_first_rank(num_ranks: int | None) -> Iterator[None]:
    """Act as the first of ``num_ranks`` processes on one machine; None: the script itself starts its processes."""
    with ExitStack() as stack:
        if num_ranks is not None:
            stack.enter_context(_environment(num_ranks))
            cards = Patches(cuda, "as many cards as processes", {"device_count": lambda: num_ranks})
            stack.enter_context(applied([cards]))
        stack.enter_context(applied(_patches(num_ranks)))
        yield


@contextmanager
def _environment(num_ranks: int) -> Iterator[None]:
    """Set the environment variables that torchrun sets."""
    given = {
        "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "ROLE_RANK": "0",
        "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks), "ROLE_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _PORT,
        "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
    }  # fmt: skip
    before = {name: os.environ.get(name) for name in given}  # noqa: TID251 - this acts as torchrun
    os.environ.update(given)  # noqa: TID251
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)  # noqa: TID251
            else:
                os.environ[name] = value  # noqa: TID251


def _patches(num_ranks: int | None) -> list[Patches]:
    asked = ["nccl"]  # the backend that the script requested last
    return [
        Patches(
            dist,
            "a process group that exchanges nothing",
            {
                "init_process_group": _init(dist.init_process_group, num_ranks, asked),
                "is_nccl_available": lambda: True,
                "get_backend": lambda group=None: asked[-1],  # noqa: ARG005 - torch's own signature
                "barrier": _nothing,
                "all_gather_object": _gathered,
                "gather_object": _gathered_there,
                "broadcast_object_list": _nothing,
            },
        ),
        Patches(
            DistributedDataParallel,
            "gradients in buckets that are not exchanged",
            {"__init__": _replicating(DistributedDataParallel.__init__)},
        ),
        *shard_patches(),
        Patches(torch.multiprocessing, "the first of the processes that a script starts", {"spawn": _spawned}),
    ]


def _init(init: Callable[..., None], num_ranks: int | None, asked: list[str]) -> Callable[..., None]:
    @wraps(init)
    def init_process_group(*args: Any, **options: Any) -> None:
        """Make a group with only the first rank."""
        arguments = signature(init).bind(*args, **options).arguments
        asked.append(str(arguments.get("backend") or "nccl"))
        given = arguments.get("world_size", -1)
        size = given if given > 0 else num_ranks or int(os.environ["WORLD_SIZE"])  # noqa: TID251 - as torch
        init("fake", store=FakeStore(), rank=0, world_size=size)

    return init_process_group


def _replicating(initialize: Callable[..., None]) -> Callable[..., None]:
    made = signature(initialize)

    @wraps(initialize)
    def replicate(self: DistributedDataParallel, *args: Any, **options: Any) -> None:
        given = made.bind(self, *args, **options).arguments
        initialize(**{**given, "init_sync": False, "static_graph": False})
        keep_first_buckets(self, [])

    return replicate


def _gathered(object_list: list[Any], obj: Any, *_: Any, **__: Any) -> None:
    """Fill the list as if all ranks had this rank's object."""
    object_list[:] = [obj] * len(object_list)


def _gathered_there(obj: Any, object_gather_list: list[Any] | None = None, *_: Any, **__: Any) -> None:
    if object_gather_list is not None:
        _gathered(object_gather_list, obj)


def _spawned(fn: Callable[..., Any], args: tuple[Any, ...] = (), *_: Any, **__: Any) -> None:
    fn(0, *args)


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing: there are no other ranks."""
