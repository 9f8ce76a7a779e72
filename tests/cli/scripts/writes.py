"""Writes of every kind; each looks done to the script."""
# As users write.
# ruff: noqa: PTH101, PTH102, PTH103, PTH104, PTH105, PTH107, PTH110, PTH112, PTH123, PTH202, PTH207, PTH208, PTH211, SIM115

import glob
import os
import shutil
import tempfile
from os import makedirs
from pathlib import Path

import numpy as np
import torch

# What there was: kept/old.txt ("old\n"), kept/other.txt, runs/old/first.txt
assert Path("kept/old.txt").read_text() == "old\n"
with open("kept/old.txt", "a") as file:
    file.write("new\n")
assert Path("kept/old.txt").read_text() == "old\nnew\n"
assert os.path.getsize("kept/old.txt") == 8

makedirs("made/deep", exist_ok=True)
Path("made/deep/x.txt").write_text("x")
try:
    open("made/deep/x.txt", "x")
except FileExistsError:
    pass
else:
    raise AssertionError
for path in ("nowhere/x", "nowhere/deep/y"):
    try:
        open(path, "w")
    except FileNotFoundError:
        pass
    else:
        raise AssertionError
assert sorted(os.listdir("made/deep")) == ["x.txt"]
assert {entry.name for entry in os.scandir(".")} >= {"kept", "made"}
assert glob.glob("made/**/*.txt", recursive=True) == ["made/deep/x.txt"]
assert [str(path) for path in Path("made").rglob("*.txt")] == ["made/deep/x.txt"]

np.save("kept/data.npy", np.arange(3))
assert np.load("kept/data.npy").tolist() == [0, 1, 2]
mapped = np.memmap("kept/map.bin", dtype=np.int32, mode="w+", shape=(4,))
mapped[:] = 7
mapped.flush()
assert np.fromfile("kept/map.bin", np.int32).tolist() == [7] * 4

os.rename("kept/other.txt", "made/moved.txt")
assert not os.path.exists("kept/other.txt")
assert Path("made/moved.txt").read_text() == "other\n"
Path("runs/second.txt").write_text("second\n")
os.rename("runs", "earlier")  # with what was there before
assert not os.path.exists("runs")
assert sorted(os.listdir("earlier")) == ["old", "second.txt"]
assert Path("earlier/old/first.txt").read_text() == "first\n"
os.remove("kept/old.txt")
assert sorted(os.listdir("kept")) == ["data.npy", "map.bin"]
assert not Path("kept/old.txt").exists()
shutil.rmtree("kept")
assert not os.path.isdir("kept")
os.mkdir("kept")
assert os.listdir("kept") == []

with tempfile.NamedTemporaryFile("w", dir=".", delete=False) as file:
    file.write("atomic")
os.replace(file.name, "final.txt")
assert Path("final.txt").read_text() == "atomic"
shutil.copy("final.txt", "copy.txt")
shutil.copytree("made", "copied")
assert Path("copied/deep/x.txt").read_text() == "x"
os.symlink("final.txt", "latest")
assert Path("latest").read_text() == "atomic"
os.chmod("layers.py", 0o600)
Path("touched").touch()

layer = torch.nn.Linear(3, 3)
torch.save(layer.state_dict(), "host.pt")
assert torch.equal(torch.load("host.pt")["weight"], layer.weight)  # host tensors keep their data in files
torch.save(layer.cuda(), "whole.pt")
assert torch.load("whole.pt", weights_only=False).weight.is_cuda
assert not torch.load("whole.pt", map_location="cpu", weights_only=False).weight.is_cuda
tied = torch.ones(1000, device="cuda")
torch.save([tied, tied[10:20]], "tied.pt")
before = torch.cuda.memory_allocated()
loaded = torch.load("tied.pt")
assert torch.cuda.memory_allocated() - before == 4096  # one storage
assert loaded[1].storage_offset() == 10
torch.nn.Linear(1, 1).cuda()
