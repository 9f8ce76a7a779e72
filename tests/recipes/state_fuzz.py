"""Damage and forge folders of states at random, and see what `restore` makes of them."""

from __future__ import annotations

import copy
import io
import json
import os
import random
import shutil
import time
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memkit._core.errors import FileFormatError, InputError, MemkitWarning
from memkit.recipes.state.files import list_states, read_file
from memkit.recipes.state.manager import TrainingStateManager
from tests.helpers import gradients
from tests.recipes.stateforge import forge, gadgets, put, sign

NASTY = (
    None, True, -1, 0, 1, 2, 1.5, float("nan"), 2**70, 10**400, "", "x", "\x00", "../x", "/dev/zero", "rank-0.pt",
    [], {}, [[]], {"a": 1}, [None], [1] * 50, "min", "x" * 10**5,
)  # fmt: skip
# Operations of pickles that are put into others: calls, names, marks, memos, ends, lengths.
OPERATIONS = (
    b"R", b"b", b"Q", b"\x81", b"\x93", b"(", b"t", b".", b"0", b"1", b"2", b"}", b"]", b")", b"s", b"u", b"a", b"e",
    b"N", b"h\x00", b"h\x05", b"q\x00", b"r\xff\xff\xff\x7f", b"j\x00\x00\x00\x00", b"K\x01", b"J\xff\xff\xff\xff",
    b"M\xff\xff", b"X\x01\x00\x00\x00a", b"X\xff\xff\xff\xff", b"\x8a\x01\xff", b"\x8b\xff\xff\xff\x7f", b"\x8c\x01a",
    b"\x80\x05", b"P0\n", b"cposix\nsystem\n", b"cbuiltins\nexec\n", b"ctorch\nfloat16\n", b"ctorch\nSize\n",
    b"ccollections\nOrderedDict\n", b"c__builtin__\nset\n", b"ctorch._utils\n_rebuild_tensor_v2\n",
    b"ctorch\nLongStorage\n", b"i__builtin__\nexec\n", b"\x82\x01",
)  # fmt: skip


class Monitor:
    """What somebody writes himself."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {"best": 0.5, "history": [1, (2, 3)], "seen": {1, 2}}

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state


def make_objects(value: float) -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3),
        "monitor": Monitor(),
    }


def save_two(folder: Path, make: Callable[[float], dict[str, Any]]) -> dict[int, str]:
    """Save two states; return what each one's objects were, by step."""
    manager, expected = TrainingStateManager(folder), {}
    for step in (1, 2):
        objects = make(float(step))
        objects["model"](torch.ones(2, 3)).sum().backward()
        objects["optimizer"].step()
        manager.save(step, metric=0.5 / step, **objects)
        expected[step] = describe(objects)
    return expected


def describe(objects: dict[str, Any]) -> str:
    """All that the objects hold, as text."""

    def whole(value: object) -> object:
        return value.full_tensor() if hasattr(value, "full_tensor") else value

    states = [each.state_dict() for each in objects.values()]
    leaves = torch.utils._pytree.tree_leaves([states, gradients(objects["model"])])
    return repr([each.tolist() if isinstance(each, torch.Tensor) else each for each in map(whole, leaves)])


class Fuzz:
    """Changes of a folder; each returns whether what it made has right checksums, so that it may be what it says."""

    def __init__(self, chance: random.Random, canary: Path) -> None:
        self.chance, self.gadgets = chance, list(gadgets(canary).values())

    def change(self, folder: Path) -> bool:
        """Change something in a folder of states."""
        damages = (self.damage, self.damage, self.exchange, self.stray)
        forgeries = (self.forge_bytes, self.gadget, *(self.forge_pickle, self.forge_manifest) * 2)
        chosen = self.chance.choices(damages + forgeries, k=self.chance.choice((1, 1, 2)))
        return sum(change(folder) for change in chosen) > 0

    def state(self, folder: Path) -> Path:
        return self.chance.choice([state.path for state in list_states(folder)] or [folder])

    def file(self, folder: Path) -> Path:
        return self.chance.choice(
            sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
        )

    def bytes(self, data: bytes) -> bytes:
        place, end = sorted(self.chance.randrange(len(data) + 1) for _ in range(2))
        kind = self.chance.randrange(6)
        if kind == 0 and place < len(data):
            return data[:place] + bytes([data[place] ^ (1 << self.chance.randrange(8))]) + data[place + 1 :]
        if kind == 1:
            return data[:place]
        if kind == 2:
            return data[:place] + data[end:]
        if kind == 3:
            return data[:place] + bytes(end - place) + data[end:]
        if kind == 4:
            return data[:place] + self.chance.randbytes(self.chance.randrange(1, 30)) + data[place:]
        return data + data[place:end]

    def damage(self, folder: Path) -> bool:
        path = self.file(folder)
        path.write_bytes(self.bytes(path.read_bytes()))
        return False

    def forge_bytes(self, folder: Path) -> bool:
        path = self.file(folder)
        if path.name == "manifest.json" or not (path.parent / "manifest.json").is_file():
            return self.damage(folder)
        path.write_bytes(self.bytes(path.read_bytes()))
        return self.signed(path.parent)

    def forge_pickle(self, folder: Path) -> bool:
        """Change the program in a file, in an archive or the index, and make all checksums right."""
        state = self.state(folder)
        path = state / self.chance.choice(("rank-0.pt", "rank-0.pt", ".metadata"))
        try:
            data = read_file(path)
            if path.name == ".metadata":
                put(path, self.program(data))
                return self.signed(state)
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                records = {name: archive.read(name) for name in archive.namelist()}
        except Exception:  # noqa: BLE001 - whatever an earlier change has made of it
            return self.damage(folder)
        made = io.BytesIO()
        with zipfile.ZipFile(made, "w") as archive:
            for name, record in records.items():
                archive.writestr(name, self.program(record) if name.endswith("data.pkl") else record)
        path.write_bytes(made.getvalue())
        return self.signed(state)

    def program(self, data: bytes) -> bytes:
        for _ in range(self.chance.choice((1, 1, 2, 5))):
            place = self.chance.randrange(2, max(3, len(data)))
            kind = self.chance.randrange(5)
            if kind == 0:
                data = data[:place] + self.chance.choice(OPERATIONS) + data[place:]
            elif kind == 1:
                data = data[:place] + self.chance.choice(OPERATIONS) + data[place + 1 :]
            elif kind == 2:
                data = data[:place] + self.chance.choice(self.gadgets)[2:-1] + data[place:]
            elif kind == 3:
                data = data.replace(b"K%c" % self.chance.randrange(9), b"K%c" % self.chance.randrange(99))
            else:
                data = self.bytes(data)
        return data

    def forge_manifest(self, folder: Path) -> bool:
        state = self.state(folder)
        try:
            content = json.loads(read_file(state / "manifest.json"))["content"]
        except (OSError, ValueError, LookupError, TypeError):
            return self.damage(folder)
        spots = list(self.spots(content))
        place, key = self.chance.choice(spots) if spots else ({}, "a")
        if self.chance.random() < 0.2 and isinstance(place, dict):
            del place[key]
        else:
            place[key] = copy.deepcopy(self.chance.choice(NASTY))
        try:
            sign(state, content)
        except ValueError:  # a number that Python does not write
            return False
        return True

    def spots(self, value: Any):
        for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
            yield value, key
            yield from self.spots(value[key])

    def exchange(self, folder: Path) -> bool:
        """Put one file in another's place, or one state."""
        first, second = self.file(folder), self.file(folder)
        if self.chance.random() < 0.3:
            target = folder / f"{self.chance.randrange(1, 5):08d}-step-{self.chance.randrange(4)}"
            if not os.path.lexists(target):
                copied = [path for path in self.state(folder).iterdir() if path.is_file() and not path.is_symlink()]
                target.mkdir()
                for path in copied:  # never a device, which has no end
                    shutil.copyfile(path, target / path.name)
            return True  # an older one may be the newest now
        shutil.copyfile(first, second) if first != second else None
        return False

    def stray(self, folder: Path) -> bool:
        place = self.chance.choice((folder, self.state(folder)))
        names = (
            ".memkit-new",
            ".memkit-x",
            "00000009-step-9",
            ".memkit-00000001-step-1",
            "manifest.json",
            "rank-0.pt",
            "a",
        )
        path = place / self.chance.choice(names)
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        make = self.chance.choice((Path.mkdir, Path.touch, os.mkfifo, lambda path: path.symlink_to("/dev/zero"),
                                   lambda path: path.symlink_to("nowhere"), lambda path: None))  # fmt: skip
        make(path)
        return False

    def gadget(self, folder: Path) -> bool:
        state = self.state(folder)
        name = self.chance.choice(("rank-0.pt", ".metadata", "__0_0.distcp", "manifest.json"))
        if (state / name).is_dir() and not (state / name).is_symlink():
            return False
        put(state / name, self.chance.choice(self.gadgets))
        return self.signed(state)

    def signed(self, state: Path) -> bool:
        try:
            forge(state, **({"is_sharded": True} if self.chance.random() < 0.2 else {}))
        except (OSError, ValueError, LookupError, TypeError):
            return False
        return True


def fuzz(num_variants: int, seed: int, folder: Path, make: Callable[[float], dict[str, Any]]) -> Counter[str]:
    """Restore from changed folders; raise at the first thing that is wrong.

    Returns:
        How many were restored as saved (the newest, or the older), as forged, and refused.
    """
    chance, canary, outcomes = random.Random(seed), folder / "canary", Counter[str]()
    changes, expected = Fuzz(chance, canary), save_two(folder / "saved", make)
    objects = make(-1.0)
    for number in range(num_variants):
        case = shutil.copytree(folder / "saved", folder / "case")
        is_forged = changes.change(case)
        before, began = describe(objects), time.monotonic()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                step = TrainingStateManager(case).restore(**objects)
                outcome = "as saved" if describe(objects) == expected.get(step, "") else "as forged"
                assert is_forged or step is None or outcome == "as saved", f"variant {number}: damaged values"
                if outcome == "as saved" and step == 1:
                    assert is_forged or any(issubclass(each.category, MemkitWarning) for each in told), (
                        f"variant {number}: silent"
                    )
                    outcome = "the older"
            except (FileFormatError, InputError):
                assert describe(objects) == before, f"variant {number}: refused, and yet changed"
                outcome = "refused"
        assert time.monotonic() - began < 20, f"variant {number}: {time.monotonic() - began} s"
        assert sorted(path.name for path in folder.iterdir()) == ["case", "saved"], f"variant {number}: something ran"
        outcomes[outcome] += 1
        if number % 5 == 0:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", MemkitWarning)
                fresh = make(3.0)
                TrainingStateManager(case, keep=1).save(3, **fresh)
                wanted = describe(fresh)
                assert TrainingStateManager(case).restore(**objects) == 3, f"variant {number}: no save afterwards"
                assert describe(objects) == wanted
        if outcome == "as forged" or number % 5 == 0:
            objects = make(-1.0)
        shutil.rmtree(case)
    return outcomes
