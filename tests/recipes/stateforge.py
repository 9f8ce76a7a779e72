"""Forged states: files replaced by code that would run when read, with correct checksums."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import struct
import subprocess
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

from memkit.recipes.state import files as statefiles


def forge(folder: Path, **changes) -> None:
    """Make a state's manifest one of the files that are there now, with right checksums."""
    content = json.loads(statefiles.read_file(folder / "manifest.json"))["content"]
    names = sorted(path.name for path in folder.iterdir() if path.name != "manifest.json")
    content["files"] = {name: statefiles.describe_file(folder / name) for name in names}
    sign(folder, content | changes)


def sign(folder: Path, content: object) -> None:
    """Write a manifest with its own checksum."""
    text = json.dumps(content, sort_keys=True)
    record = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "content": content}
    put(folder / "manifest.json", json.dumps(record).encode())


def put(path: Path, data: bytes) -> None:
    """Replace a file, also a pipe, which would block a writer."""
    path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    path.write_bytes(data)


class Runs:
    """Calls a function when it is unpickled."""

    def __init__(self, call, *args):
        self.call, self.args = call, args

    def __reduce__(self):
        return self.call, self.args


class Builds:
    """Calls a function through `__setstate__` of an object that is harmless in itself."""

    def __init__(self, inner):
        self.inner = inner

    def __reduce__(self):
        return nn.Identity, (), {"hook": self.inner}


def archive(pickled: bytes, *, compression=zipfile.ZIP_STORED) -> bytes:
    """The archive that `torch.save` writes around a pickle."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as made:
        for name, data in {"data.pkl": pickled, "byteorder": b"little", "version": b"3\n", "data/0": bytes(16)}.items():
            made.writestr(f"archive/{name}", data)
    return file.getvalue()


def by_torch(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def by_old_torch(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, _use_new_zipfile_serialization=False)
    return file.getvalue()


def script() -> bytes:
    file = io.BytesIO()
    torch.jit.save(torch.jit.trace(nn.Linear(1, 1), torch.ones(1, 1)), file)
    return file.getvalue()


def tape(pickled: bytes) -> bytes:
    """The form of torch's first versions."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as made:
        for name in ("sys_info", "pickle", "tensors", "storages"):
            entry = tarfile.TarInfo(name)
            entry.size = len(pickled)
            made.addfile(entry, io.BytesIO(pickled))
    return file.getvalue()


def persistent(reference: bytes) -> bytes:
    """A pickle that asks its reader for something outside of it."""
    return b"\x80\x02" + reference + b"Q."


def array(value: object) -> bytes:
    """A NumPy file of objects."""
    file = io.BytesIO()
    np.save(file, np.array([value], dtype=object), allow_pickle=True)
    return file.getvalue()


def rebuilt(canary: Path) -> bytes:
    """A call that torch itself makes for the file: of a function that the file names."""
    command = pickle.dumps(Runs(subprocess.check_call, ["touch", str(canary)]), protocol=2)[2:-1]
    return (
        b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n(csubprocess\ncheck_call\nctorch\nTensor\n" + command + b"}tR."
    )


def gadgets(canary: Path) -> dict[str, bytes]:
    """Files that touch ``canary`` when their reader runs anything of them, by name."""
    touch = Runs(subprocess.check_call, ["touch", str(canary)])
    code = Runs(exec, f"open({str(canary)!r}, 'w').close()")
    plain = {f"protocol {number}": pickle.dumps(touch, protocol=number) for number in range(6)}
    pickled = pickle.dumps({"step": touch, "objects": code}, protocol=2)
    system = f"cposix\nsystem\n(S'touch {canary}'\ntR.".encode()
    nested = pickle.dumps(Runs(pickle.loads, pickle.dumps(touch)), protocol=2)
    return {
        **plain,
        "os.system": system,
        "builtins": pickle.dumps(code),
        "torch.save": by_torch({"objects": {"model": touch}}),
        "old torch.save": by_old_torch({"objects": touch}),
        "zip": archive(pickled),
        "packed zip": archive(pickled, compression=zipfile.ZIP_DEFLATED),
        "zip of protocol 5": archive(pickle.dumps(touch, protocol=5)),
        "zip of os.system": archive(b"\x80\x02" + system),
        "zip of a rebuilt tensor": archive(rebuilt(canary)),
        "zip of a pickle in a pickle": archive(nested),
        "__setstate__": archive(pickle.dumps(Builds(code), protocol=2)),
        "persistent id": archive(persistent(pickle.dumps(touch, protocol=2)[2:-1])),
        "persistent module": archive(persistent(b"(X" + struct.pack("<I", 6) + b"modulec__builtin__\nexec\nt")),
        "object array": array(touch),
        "zip of an object array": archive(pickle.dumps(np.array([touch], dtype=object), protocol=2)),
        "tape": tape(pickled),
        "script": script(),
    }
