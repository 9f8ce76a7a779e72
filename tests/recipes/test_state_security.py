"""A forged state runs no code: each file is replaced by a pickle that would, with correct checksums."""

import contextlib
import io
import json
import os
import pickle
import shutil
import subprocess
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from memkit._core.errors import FileFormatError, MemkitWarning
from memkit._core.pickles import load_noted, rebuild
from memkit._torch.pickles import MEMORY_FORMATS
from memkit.recipes.state.files import list_states
from memkit.recipes.state.manager import TrainingStateManager
from memkit.recipes.state.reader import TensorFile
from tests.helpers import assert_refused, assert_same, one_in
from tests.recipes.stateforge import archive, by_torch, forge, gadgets, persistent, sign

NAMES = list(gadgets(Path("canary")))


@pytest.fixture
def canary(tmp_path):
    path = tmp_path / "canary"
    yield path
    assert not path.exists(), "the state ran code"


def objects_of(value):
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, value)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of two states."""
    manager = TrainingStateManager(tmp_path_factory.mktemp("states"))
    manager.save(10, **objects_of(1.0))
    manager.save(20, **objects_of(2.0))
    return manager.directory


@pytest.fixture
def manager(saved, tmp_path):
    return TrainingStateManager(shutil.copytree(saved, tmp_path / "states"))


def newest(manager):
    return list_states(manager.directory)[0].path


def restore_or_refuse(manager, objects=None):
    """Restore; return the step, or None where the state was refused, and then nothing has changed."""
    objects = objects or objects_of(-1.0)
    before = [each.detach().clone() for each in objects["model"].parameters()]
    random = torch.get_rng_state()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", MemkitWarning)
            return manager.restore(**objects)
    except FileFormatError:
        assert_same(list(objects["model"].parameters()), before)
        assert_same(torch.get_rng_state(), random)
        return None


def test_crafted_files_run_code_when_unpickled(tmp_path):
    """Otherwise the tests below would prove nothing."""
    readers = (
        pickle.loads,
        lambda data: torch.load(io.BytesIO(data), weights_only=False),
        lambda data: np.load(io.BytesIO(data), allow_pickle=True),
    )
    ran = set()
    for name, data in gadgets(tmp_path / "canary").items():
        for read in readers:
            with contextlib.suppress(Exception):
                read(data)
            if (tmp_path / "canary").exists():
                (tmp_path / "canary").unlink()
                ran.add(name)
    assert set(NAMES) - ran <= {"script", "tape", "packed zip", "persistent id", "persistent module"}
    assert len(ran) >= 16


@pytest.mark.parametrize("name", NAMES)
def test_no_file_of_a_state_runs(manager, canary, name):
    folder = newest(manager)
    for file in (".metadata", "__0_0.distcp", "rank-0.pt"):
        (folder / file).write_bytes(gadgets(canary)[name])
        forge(folder)
        assert restore_or_refuse(manager) == (None if file == "rank-0.pt" else 20)
    (folder / "manifest.json").write_bytes(gadgets(canary)[name])
    assert restore_or_refuse(manager) == 10


@pytest.mark.parametrize("name", NAMES)
def test_ignores_manifest_claiming_shards(manager, canary, name):
    """As found: the manifest alone sent an ordinary restore into the unpickling of an index."""
    (newest(manager) / ".metadata").write_bytes(gadgets(canary)[name])
    forge(newest(manager), is_sharded=True)
    with pytest.raises(FileFormatError, match="a manifest with is_sharded=True, unlike its files"):
        manager.restore(**objects_of(-1.0))


@pytest.mark.parametrize("name", ["zip", "zip of a rebuilt tensor", "protocol 2", "old torch.save"])
def test_does_not_call_globals_registered_as_safe(manager, canary, name):
    """`torch.load(weights_only=True)` calls what somebody has added to its list."""
    (newest(manager) / "rank-0.pt").write_bytes(gadgets(canary)[name])
    forge(newest(manager))
    with torch.serialization.safe_globals([subprocess.check_call, (exec, "builtins.exec"), (exec, "__builtin__.exec")]):
        assert restore_or_refuse(manager) is None


def sharded_objects(mesh, value):
    from torch.distributed.fsdp import fully_shard

    objects = objects_of(value)
    fully_shard(objects["model"], mesh=mesh)
    objects["optimizer"] = torch.optim.AdamW(objects["model"].parameters())
    return objects


@pytest.fixture(scope="module")
def saved_sharded(tmp_path_factory, one_rank):
    manager = TrainingStateManager(tmp_path_factory.mktemp("states"))
    for step in (1, 2):
        objects = sharded_objects(one_rank, float(step))
        objects["model"](torch.ones(1, 3)).sum().backward()
        objects["optimizer"].step()
        manager.save(step, **objects)
    return manager.directory


@pytest.fixture
def sharded(saved_sharded, one_rank, tmp_path):
    manager = TrainingStateManager(shutil.copytree(saved_sharded, tmp_path / "states"))
    return manager, lambda: sharded_objects(one_rank, -1.0)


def test_a_sharded_state_comes_back(sharded):
    manager, make = sharded
    objects = make()
    assert manager.restore(**objects) == 2
    assert objects["model"].weight.full_tensor().min() > 1.9
    assert objects["optimizer"].state_dict()["state"][0]["exp_avg"].full_tensor().abs().sum() > 0
    assert objects["model"].weight.grad.full_tensor().abs().sum() > 0
    assert sorted(path.name for path in newest(manager).iterdir()) == [
        ".metadata", "__0_0.distcp", "manifest.json", "rank-0.pt",
    ]  # fmt: skip


def test_an_index_as_older_pythons_write_it_comes_back(sharded):
    """Before 3.11.4, a member of an enum is pickled as a call of getattr: noted, and never made."""
    from torch.distributed.checkpoint import metadata

    manager, make = sharded
    index = pickle.loads((newest(manager) / ".metadata").read_bytes())
    kind = getattr(metadata, MEMORY_FORMATS)

    class Older(pickle.Pickler):
        def reducer_override(self, value):
            return (getattr, (kind, value.name)) if isinstance(value, kind) else NotImplemented

    with (newest(manager) / ".metadata").open("wb") as file:
        Older(file).dump(index)
    assert b"getattr" in (newest(manager) / ".metadata").read_bytes()
    forge(newest(manager))
    objects = make()
    assert manager.restore(**objects) == 2
    assert objects["model"].weight.full_tensor().min() > 1.9


@pytest.mark.parametrize("name", one_in(2, NAMES))
def test_no_file_of_a_sharded_state_runs(sharded, canary, name):
    manager, make = sharded
    for file in ("rank-0.pt", ".metadata", "__0_0.distcp"):
        kept = (newest(manager) / file).read_bytes()
        (newest(manager) / file).write_bytes(gadgets(canary)[name])
        forge(newest(manager))
        assert restore_or_refuse(manager, make()) is None
        (newest(manager) / file).write_bytes(kept)
    forge(newest(manager))
    assert restore_or_refuse(manager, make()) == 2


def test_whole_and_sharded_tensors_are_not_mixed_up(sharded, tmp_path):
    manager, make = sharded
    plain = TrainingStateManager(tmp_path / "plain")
    plain.save(3, **objects_of(3.0))
    assert_refused(lambda: plain.restore(**make()), FileFormatError, "sharded")
    assert_refused(lambda: manager.restore(**objects_of(0.0)), FileFormatError, "sharded")


class Shadow:
    """An average of sharded weights, as somebody writes it: it copies what it is given."""

    def __init__(self, model, factor):
        self.values = {name: parameter.detach() * factor for name, parameter in model.named_parameters()}

    def state_dict(self):
        return self.values

    def load_state_dict(self, state):
        self.values = {name: value.clone() for name, value in state.items()}


def test_object_copying_sharded_values(one_rank, tmp_path):
    model, manager = sharded_objects(one_rank, 2.0)["model"], TrainingStateManager(tmp_path)
    manager.save(1, model=model, shadow=Shadow(model, 5.0))
    other = sharded_objects(one_rank, 1.0)["model"]
    shadow = Shadow(other, 3.0)
    manager.restore(model=other, shadow=shadow)
    assert shadow.values["weight"].full_tensor().unique().tolist() == [10.0]
    assert other.weight.full_tensor().unique().tolist() == [2.0]


INDEX_CHANGES = {
    "another folder": lambda data: data.replace(b"__0_0.distcp", b"../../secret"),
    "a pipe": lambda data: data.replace(b"\x8c\x0c__0_0.distcp", b"\x8c\x09/dev/zero"),
    "another shape": lambda data: data.replace(b"K\x02K\x03\x86", b"K\x02K\x04\x86"),
    "no parts": lambda data: data.replace(b"chunks", b"chanks"),
    "another name": lambda data: data.replace(b"model.weight", b"model.wheigt"),
    "cut": lambda data: data[:-20],
    "empty": lambda _: b"",
}


@pytest.mark.parametrize("change", INDEX_CHANGES)
def test_rejects_index_pointing_elsewhere(sharded, change):
    manager, make = sharded
    index = newest(manager) / ".metadata"
    changed = INDEX_CHANGES[change](index.read_bytes())
    assert changed != index.read_bytes()
    index.write_bytes(changed)
    forge(newest(manager))
    assert restore_or_refuse(manager, make()) is None


def test_names_in_a_manifest_stay_in_the_folder(manager, tmp_path):
    (tmp_path / "outside").write_text("x")
    folder = newest(manager)
    content = json.loads((folder / "manifest.json").read_text())["content"]
    for name in ("../../outside", str(tmp_path / "outside"), "/dev/zero", "."):
        sign(folder, content | {"files": content["files"] | {name: {"bytes": 1, "sha256": "0"}}})
        with pytest.warns(MemkitWarning, match=r"manifest\.json does not have the entries of a state"):
            assert manager.restore(**objects_of(-1.0)) == 10


@pytest.mark.parametrize("file", ["rank-0.pt", "manifest.json"])
def test_a_pipe_or_a_device_does_not_block(manager, file):
    path = newest(manager) / file
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir):
        path.unlink()
        make(path)
        with pytest.warns(MemkitWarning, match="skips"):
            assert manager.restore(**objects_of(-1.0)) == 10
        path.rmdir() if path.is_dir() else path.unlink()
        path.touch()


# ---- the readers by themselves


def read(data):
    file = TensorFile(io.BytesIO(data))
    return file.read(file.value)


def note(name, *parts):
    module, _, function = name.rpartition(".")
    return f"c{module}\n{function}\n".encode() + b"".join(parts)


STORAGE = b"(X\x07\x00\x00\x00storage" + note("torch.FloatStorage") + b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ"


def tensor(offset=b"K\x00", shape=b"K\x04\x85", strides=b"K\x01\x85", storage=STORAGE):
    return note("torch._utils._rebuild_tensor_v2", b"(", storage, offset, shape, strides, b"\x89Nt", b"R")


def test_a_tensor_is_read():
    torch.testing.assert_close(read(archive(b"\x80\x02" + tensor() + b".")), torch.zeros(4))


@pytest.mark.parametrize(
    "pickled",
    {
        "longer than its bytes": tensor(storage=STORAGE.replace(b"K\x04t", b"K\x40t"), shape=b"K\x40\x85"),
        "beyond its end": tensor(offset=b"K\x01"),
        "far strides": tensor(strides=b"K\x63\x85"),
        "spread out": tensor(shape=b"M\xff\x7f\x85", strides=b"K\x00\x85"),
        "negative": tensor(shape=b"J\xff\xff\xff\xff\x85"),
        "no number": tensor(shape=b"X\x01\x00\x00\x00a\x85"),
        "another key": tensor(storage=STORAGE.replace(b"X\x01\x00\x00\x000", b"X\x01\x00\x00\x001")),
        "a storage alone": STORAGE,
        "no storage": tensor(storage=b"N"),
        "a storage's class": note("torch.FloatStorage", b")R"),
        "a dtype that is called": note("torch.float32", b")R"),
        "a dict with attributes": note("collections.OrderedDict", b")R}X\x05\x00\x00\x00itemsK\x01sb"),
        "a size that is changed": note("torch.Size", b"K\x01\x85\x85R}X\x01\x00\x00\x00aK\x01sb"),
        "a class that is changed": note("collections.Counter", b"}X\x06\x00\x00\x00updateK\x01sb"),
        "wrong arguments": note("torch.Size", b"K\x01\x85R"),
        "an unknown device": note("torch.device", b"X\x01\x00\x00\x00a\x85R"),
        "inside itself": b"]q\x00h\x00a",
        "over and over": b"]q\x00" + b"".join(b"](" + b"h%c" % at * 20 + b"eq%c" % (at + 1) for at in range(20)),
        "a far memo": b"}r\xff\xff\xff\x7f",
        "nested": b"]" * 10_000 + b"a" * 9_999,
        "another name": note("torch._utils._rebuild_parameter", b")R"),
    }.items(),
    ids=lambda pair: pair[0],
)  # fmt: skip
def test_rejects_foreign_pickle_contents(pickled):
    with pytest.raises(ValueError, match=r"."):
        read(archive(b"\x80\x02" + pickled[1] + b"."))


ARCHIVES = {
    "not a zip file": b"no",
    "empty": b"",
    "cut": by_torch({"a": torch.ones(100)})[:-30],
    "packed": archive(b"\x80\x02}.", compression=8),
    "no pickle": archive(b"\x80\x02}.").replace(b"data.pkl", b"data.pkk"),
    "another byte order": archive(b"\x80\x02}.").replace(b"little", b"bigger"),
    "persistent text": archive(persistent(b"X\x01\x00\x00\x00a")),
    "a number": b"\x00" * 200,
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_rejects_malformed_torch_files(name):
    with pytest.raises(ValueError, match=r"."):
        read(ARCHIVES[name])


def test_notes_of_one_file_are_not_those_of_another():
    """A pickle may change the class that stands for a name: only its own."""
    changed = load_noted(b"\x80\x02ctorch\nfloat32\n.", "state", {"torch.float32"})
    changed.name = "changed"
    again = load_noted(b"\x80\x02ctorch\nfloat32\n.", "state", {"torch.float32"})
    assert rebuild(again, lambda noted: noted.name, 10) == "torch.float32"
