# ruff: noqa: SLF001 - the pickler in Python is private, and has parts that can be replaced
"""Writes CUDA memory snapshots of any size, as `torch.cuda.memory._dump_snapshot` does, without holding them.

A training of a transformer on an allocator that keeps blocks by size: parameters and optimizer states that stay,
activations that a backward frees, gradients, temporary blocks, batches of changing length (so segments break up), a
buffer that leaks in each step, and an out-of-memory error at the end. Stacks are 20 to 40 deep and shared as torch
shares them. The same arguments write the same bytes. They are those that `pickle` itself writes
(`tests/report/test_allocations.py`).

Run: python -m benchmarks.long_snapshot run.pickle 1000000000
"""

from __future__ import annotations

import pickle
import random
import struct
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

MIB = 2**20
NUM_LAYERS, WIDTH = 24, 1024
LENGTHS = (512, 640, 768, 1024)  # tokens of a batch
_START_US = 1_760_000_000_000_000
_SITES = ("q", "k", "v", "scores", "mix", "out", "norm1", "up", "act", "down", "norm2")
_OPERATORS = {
    **dict.fromkeys(("q", "k", "v", "out", "up", "down"), "addmm"),
    **dict.fromkeys(("norm1", "norm2"), "native_layer_norm"),
    "scores": "_softmax",
    "mix": "bmm",
    "act": "gelu",
}
_FACTORS = {"up": 4, "act": 4, "scores": 2}
_KEYS = ("action", "addr", "size", "stream", "time_us", "compile_context", "user_metadata", "pool_id", "frames")


class Action(NamedTuple):
    """One action; ``stack`` is a number of `Training.stacks`, or -1 for that of the action before."""

    kind: str
    address: int
    num_bytes: int
    time_us: int
    stack: int


class Training:
    """The training: `actions` plays it, and what is in use lies in ``live`` and ``segments`` afterwards."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._frames: dict[tuple[str, int, str], dict[str, Any]] = {}
        self._numbers: dict[tuple[str, int], int] = {}
        self.stacks: list[list[dict[str, Any]]] = []
        self.segments: list[tuple[int, int]] = []
        self.blocks: dict[int, list[tuple[int, int]]] = defaultdict(list)  # of each segment: address and size
        self.live: dict[int, tuple[int, int]] = {}  # bytes asked for, and the stack
        self._free: dict[int, list[int]] = defaultdict(list)
        self._room: dict[bool, tuple[int, int, int]] = {}
        self._next, self._time = 0x7F00_0000_0000, _START_US

    def actions(self, num_steps: int) -> Iterator[Action]:
        """Play the steps, then run out of memory."""
        held = []
        for layer in range(NUM_LAYERS):
            for site in _SITES:
                address = yield from self._take(WIDTH * WIDTH * _FACTORS.get(site, 1) // 8, self._stack("build", layer))
                held.append((layer, address))
        for step in range(num_steps):
            yield from self._step(step, held)
        yield Action("oom", 0, 40 * 2**30, self._tick(), self._stack("forward scores", 0))

    def _step(self, step: int, held: list[tuple[int, int]]) -> Iterator[Action]:
        tokens, kept = self._chance.choice(LENGTHS), []
        for layer in range(NUM_LAYERS):
            for site in _SITES:
                num_bytes = 8 * tokens * WIDTH * _FACTORS.get(site, 1) - self._chance.randrange(400)
                kept.append((layer, site, (yield from self._take(num_bytes, self._stack(f"forward {site}", layer)))))
            scratch = yield from self._take(4096 + 512 * layer, self._stack("forward scratch", layer))
            yield from self._give(scratch, self._stack("free scratch", layer))
        for layer, site, address in reversed(kept):
            gradient = yield from self._take(2 * WIDTH * tokens, self._stack(f"backward {site}", layer))
            yield from self._give(address, self._stack(f"free {site}", layer))
            yield from self._give(gradient, self._stack("free gradient", layer))
        for layer, _ in held[:: len(_SITES)]:
            if step == 0:
                yield from self._take(2 * WIDTH * WIDTH, self._stack("state", layer))
            change = yield from self._take(WIDTH * WIDTH // 2, self._stack("optimizer", layer))
            yield from self._give(change, self._stack("free change", layer))
        yield from self._take(8192, self._stack("leak", 0))

    def _take(self, num_bytes: int, stack: int) -> Iterator[Action]:
        size = -(-num_bytes // 512) * 512
        if not self._free[size]:
            yield from self._grow(size, stack)
        address = self._free[size].pop()
        self.live[address] = num_bytes, stack
        yield Action("alloc", address, num_bytes, self._tick(), stack)
        return address

    def _grow(self, size: int, stack: int) -> Iterator[Action]:
        """Put a block of this size at the end of a segment with room, or in a new one."""
        is_small = size <= MIB
        segment, address, room = self._room.get(is_small, (0, 0, 0))
        if room < size:
            room = 2 * MIB if is_small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            segment = address = self._next
            self._next += room
            self.segments.append((segment, room))
            yield Action("segment_alloc", segment, room, self._tick(), stack)
        self.blocks[segment].append((address, size))
        self._free[size].append(address)
        self._room[is_small] = segment, address + size, room - size

    def _give(self, address: int, stack: int) -> Iterator[Action]:
        num_bytes, _ = self.live.pop(address)
        self._free[-(-num_bytes // 512) * 512].append(address)
        yield Action("free_requested", address, num_bytes, self._tick(), stack)
        yield Action("free_completed", address, num_bytes, self._time, -1)

    def _tick(self) -> int:
        self._time += 7
        return self._time

    def _stack(self, what: str, layer: int) -> int:
        number = self._numbers.get((what, layer))
        if number is None:
            number = self._numbers[what, layer] = len(self.stacks)
            self.stacks.append([self._frame(*frame) for frame in _frames_of(what, layer)])
        return number

    def _frame(self, file: str, line: int, name: str) -> dict[str, Any]:
        """Return a frame, the same object for the same place: torch shares them."""
        return self._frames.setdefault((file, line, name), {"name": name, "filename": file, "line": line})


def _frames_of(what: str, layer: int) -> Iterator[tuple[str, int, str]]:
    """Yield the frames of a place in the training, innermost first."""
    part, _, site = what.partition(" ")
    yield "??", 0, "torch::unwind::unwind()"
    yield "??", 0, "torch::CapturedTraceback::gather(bool, bool, bool)"
    for depth in range(5 + (len(what) + layer) % 11):
        yield "??", 0, f"at::native::step_{depth}(at::Tensor const&, c10::ArrayRef<long>) of {part}"
    operator = _OPERATORS.get(site, "empty_memory_format")
    yield "??", 0, f"at::_ops::{operator}::call(at::Tensor const&, at::Tensor const&)"
    if part == "backward":
        for depth in range(12):
            yield "??", 0, f"torch::autograd::Engine::thread_{depth}(std::shared_ptr<torch::autograd::GraphTask>)"
        return
    if part in ("state", "optimizer"):
        yield "/env/lib/python3.11/site-packages/torch/optim/adamw.py", 220, "step"
    if part == "forward":
        yield "/env/lib/python3.11/site-packages/torch/nn/modules/linear.py", 125, "forward"
        for line in (1751, 1762):
            yield "/env/lib/python3.11/site-packages/torch/nn/modules/module.py", line, "_call_impl"
        yield "/work/project/model/block.py", 40 + _SITES.index(site) if site in _SITES else 60, "forward"
        yield "/work/project/model/transformer.py", 100 + layer, "forward"
    yield "/work/project/train.py", {"build": 12, "forward": 48, "state": 60, "optimizer": 60}.get(part, 52), "step"
    yield "/work/project/train.py", 90, "main"
    for depth in range(6):
        yield "??", 0, f"_PyEval_Vector_{depth}"


class _Lazy:
    """A list of actions, made while it is written."""

    def __init__(self, actions: Callable[[], Iterator[_Entry]]) -> None:
        self.actions = actions


class _Entry(NamedTuple):
    action: Action
    frames: list[dict[str, Any]]


class _Pickler(pickle._Pickler):  # type: ignore[name-defined, misc]  # the one in Python, whose parts can be replaced
    """Writes actions without keeping them, where it can in one piece."""

    def __init__(self, file: Any, keys: list[str]) -> None:
        super().__init__(file, protocol=4)
        self._keys = keys
        self._count, self._shared = 0, 0

    def memoize(self, obj: object) -> None:
        self.memo[id(obj)] = self._count, obj
        self._note()

    def _note(self) -> None:
        self.write(pickle.MEMOIZE)
        self._count += 1

    def save_lazy(self, lazy: _Lazy) -> None:
        self.write(pickle.EMPTY_LIST)
        self._note()
        self._batch_appends(lazy.actions())

    def save_entry(self, entry: _Entry) -> None:
        kind, address, num_bytes, time_us, stack = entry.action
        if kind == "oom" or any(id(each) not in self.memo for each in (*self._keys, kind, "", *entry.frames)):
            self._save_by_parts(entry)
            return
        get, keys = self._get, self._keys
        pieces = [b"}\x94(", get(keys[0]), get(kind), get(keys[1]), _number(address), get(keys[2]), _number(num_bytes)]
        pieces += [
            get(keys[3]),
            b"K\x00",
            get(keys[4]),
            _number(time_us),
            get(keys[5]),
            _CONTEXT,
            get(keys[6]),
            get(""),
        ]
        pieces += [get(keys[7]), b"K\x00", b"K\x00\x86\x94", get(keys[8])]
        if stack < 0:
            pieces.append(self.get(self._shared))
        else:
            self._shared = self._count + 3
            pieces += [b"]\x94(", *map(get, entry.frames)]
            pieces[-1] += b"e"
        pieces[-1] += b"u"
        self._count += 3 + (stack >= 0)
        frame, whole = self.framer.current_frame, b"".join(pieces)
        if frame.tell() + len(whole) < self.framer._FRAME_SIZE_TARGET:
            frame.write(whole)
            return
        for piece in pieces:
            self.framer.commit_frame()
            self.write(piece)

    def _save_by_parts(self, entry: _Entry) -> None:
        """Write an entry with an object that the file does not have yet."""
        kind, address, num_bytes, time_us, _ = entry.action
        names = {"addr": "device_free"} if kind == "oom" else {}
        values = (kind, 3 * MIB if kind == "oom" else address, num_bytes, 0, time_us, None, "", None, None)
        self.write(pickle.EMPTY_DICT)
        self._note()
        self.write(pickle.MARK)
        for key, value in zip(self._keys, values, strict=True):
            self.save(names.get(key, key))
            if key == "frames":
                self._shared = self._count
                self._save_new(pickle.EMPTY_LIST)
                self._batch_appends(entry.frames)
            elif key == "pool_id":
                self.save(0)
                self.save(0)
                self.write(pickle.TUPLE2)
                self._note()
            elif key == "compile_context":
                self._save_new(_CONTEXT[:-1])
            else:
                self.save(value)
        self.write(pickle.SETITEMS)

    def _save_new(self, data: bytes) -> None:
        self.framer.commit_frame()
        self.write(data)
        self._note()

    def _get(self, obj: object) -> bytes:
        index = self.memo[id(obj)][0]
        return b"h%c" % index if index < 256 else b"j" + struct.pack("<I", index)

    dispatch = pickle._Pickler.dispatch | {_Lazy: save_lazy, _Entry: save_entry}  # type: ignore[attr-defined]


_CONTEXT = b"\x8c\x03N/A\x94"


def _number(value: int) -> bytes:
    if value < 256:
        return b"K%c" % value
    if value < 65536:
        return b"M" + struct.pack("<H", value)
    if value < 2**31:
        return b"J" + struct.pack("<i", value)
    data = pickle.encode_long(value)
    return b"\x8a%c" % len(data) + data


def write_snapshot(path: Path, num_bytes: int, *, seed: int = 0) -> int:
    """Write a snapshot of about this length.

    Returns:
        The number of actions in it.
    """
    num_steps = steps_for(num_bytes, seed)
    played = Training(seed)
    num_actions = sum(1 for _ in played.actions(num_steps))
    with path.open("wb") as file:
        pickler = _Pickler(file, list(_KEYS))
        pickler.dump(
            {
                "segments": [_segment(played, *each) for each in played.segments],
                "device_traces": [_Lazy(lambda: _entries(Training(seed), num_steps))],
                "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1},
                "external_annotations": [],
            }
        )
    return num_actions


def _entries(training: Training, num_steps: int) -> Iterator[_Entry]:
    frames: list[dict[str, Any]] = []
    for action in training.actions(num_steps):
        frames = frames if action.stack < 0 else training.stacks[action.stack]
        yield _Entry(action, frames)


def steps_for(num_bytes: int, seed: int) -> int:
    """Return the number of steps that fill a file, from the length of the first few."""
    training, lengths = Training(seed), []
    for num_steps in (1, 3):
        training = Training(seed)
        lengths.append(sum(_length(training, each) for each in training.actions(num_steps)))
    per_step = (lengths[1] - lengths[0]) / 2
    return max(1, round((num_bytes - lengths[0]) / per_step) + 1)


def _length(training: Training, action: Action) -> int:
    return 71 + (5 if action.stack < 0 else 3 + 5 * len(training.stacks[action.stack]))


def _segment(played: Training, address: int, size: int) -> dict[str, Any]:
    blocks = [_block(played, *each) for each in played.blocks[address]]
    used = sum(each["size"] for each in blocks)
    if used < size:
        blocks.append(_block(played, address + used, size - used))
    live = [each for each in blocks if each["state"] == "active_allocated"]
    return {
        "device": 0,
        "address": address,
        "total_size": size,
        "allocated_size": sum(each["size"] for each in live),
        "active_size": sum(each["size"] for each in live),
        "requested_size": sum(each["requested_size"] for each in live),
        "stream": 0,
        "segment_type": "small" if size <= 2 * MIB else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }


def _block(played: Training, address: int, size: int) -> dict[str, Any]:
    asked, stack = played.live.get(address, (0, -1))
    return {
        "address": address,
        "size": size,
        "requested_size": asked,
        "state": "inactive" if stack < 0 else "active_allocated",
        "frames": [] if stack < 0 else played.stacks[stack],
    }


if __name__ == "__main__":
    print(f"{write_snapshot(Path(sys.argv[1]), int(sys.argv[2])):,} actions")
