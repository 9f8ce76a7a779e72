"""Training scripts with one planted leak each, whose line is marked. The tests and the benchmark run them."""

from __future__ import annotations

import importlib
import re
import runpy
import sys
from pathlib import Path
from typing import NamedTuple

HEADER = """
import collections, functools, gc, sys, threading
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from memkit.memory.leaks import LeakWatch

found = []
watch = LeakWatch()
net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

def batches(num=4):
    for _ in range(num):
        yield torch.randn(32, 64), torch.randint(8, (32,))

def update(loss, optimizer=optimizer):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

def check():
    found.append(watch.check())

check()
"""
_FILE = re.compile(r"^# FILE (\w+)\.py\n", re.MULTILINE)


class Planted(NamedTuple):
    """A script; the holder's text and the kind that the watch must report."""

    source: str
    holder: str
    kind: str = "tensors and graph"


class Outcome(NamedTuple):
    found: list  # of each check's leaks
    line: str | None  # of the mark


def run_script(source: str, folder: Path) -> Outcome:
    """Run a script; parts after ``# FILE name.py`` are modules that it imports."""
    main, *rest = _FILE.split(source)
    files = {"train": HEADER + main} | dict(zip(rest[::2], rest[1::2], strict=True))
    line = None
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
        for number, row in enumerate(text.splitlines(), start=1):
            if row.endswith("# LEAK"):
                line = f"{folder / name}.py:{number}"
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        return Outcome(runpy.run_path(str(folder / "train.py"), run_name="train")["found"], line)
    finally:
        sys.path.remove(str(folder))
        for name in files:
            sys.modules.pop(name, None)


PLANTED = {
    "kept loss list": Planted("""
losses = []
for x, y in batches():
    loss = F.cross_entropy(net(x), y)
    update(loss)
    losses.append(loss)  # LEAK
    check()
""", "global `losses` in train.py"),
    "running += loss": Planted("""
def train():
    running = 0
    for x, y in batches():
        loss = F.cross_entropy(net(x), y)
        update(loss)
        running += loss  # LEAK
        check()
train()
""", "local `running` of function train", "graph"),
    "running = running + loss": Planted("""
total_loss = torch.zeros(())
for x, y in batches():
    loss = F.cross_entropy(net(x), y)
    update(loss)
    total_loss = total_loss + loss  # LEAK
    check()
""", "global `total_loss` in train.py", "graph"),
    "outputs on an object": Planted("""
class Trainer:
    def __init__(self):
        self.history = []
    def step(self, x, y):
        out = net(x)
        update(F.cross_entropy(out, y))
        self.history.append(out)  # LEAK
trainer = Trainer()
for x, y in batches():
    trainer.step(x, y)
    check()
""", "attribute `history` of Trainer (global `trainer` in train.py)"),
    "dict keyed by step": Planted("""
outputs = {}
for step, (x, y) in enumerate(batches()):
    out = net(x)
    update(F.cross_entropy(out, y))
    outputs[step] = out.detach()  # LEAK
    check()
""", "global `outputs` in train.py", "tensors"),
    "records in a nested list": Planted("""
def train():
    log = {"train": []}
    for step, (x, y) in enumerate(batches()):
        out = net(x)
        update(F.cross_entropy(out, y))
        log["train"].append({"step": step, "out": out.detach()})  # LEAK
        check()
train()
""", "local `log['train']` of function train", "tensors"),
    "forward hook": Planted("""
saved = collections.defaultdict(list)
def save_activation(layer, args, output):
    saved["relu"].append(output)  # LEAK
net[1].register_forward_hook(save_activation)
for x, y in batches():
    update(F.cross_entropy(net(x), y))
    check()
""", "global `saved['relu']` in train.py"),
    "hook with a partial": Planted("""
def save_activation(store, layer, args, output):
    store.append(output.detach())
net[1].register_forward_hook(functools.partial(save_activation, []))  # LEAK
for x, y in batches():
    update(F.cross_entropy(net(x), y))
    check()
""", "forward hook on layer `net.1`: function save_activation", "tensors"),
    "backward hook": Planted("""
gradients = []
def keep(layer, grad_input, grad_output):
    gradients.append(grad_output[0])  # LEAK
net[0].register_full_backward_hook(keep)
for x, y in batches():
    update(F.cross_entropy(net(x), y))
    check()
""", "global `gradients` in train.py", "tensors"),
    "closure": Planted("""
def make_hook():
    seen = []
    def hook(layer, args, output):
        seen.append(output.detach())  # LEAK
    return hook
net[0].register_forward_hook(make_hook())
for x, y in batches():
    update(F.cross_entropy(net(x), y))
    check()
""", "closure variable `seen` of function make_hook.<locals>.hook"
" (forward hook on layer `net.0`: function make_hook.<locals>.hook)", "tensors"),
    "another module": Planted("""
import leak_store
for x, y in batches():
    out = net(x)
    update(F.cross_entropy(out, y))
    leak_store.record(out)
    check()
# FILE leak_store.py
everything = []
def record(value):
    everything.append(value)  # LEAK
""", "global `everything` in leak_store.py"),
    "class attribute": Planted("""
class Metric:
    values = []
    def update(self, out):
        self.values.append(out)  # LEAK
for x, y in batches():
    out = net(x)
    update(F.cross_entropy(out, y))
    Metric().update(out.detach())
    check()
""", "attribute `values` of class Metric (global `Metric` in train.py)", "tensors"),
    "lru_cache": Planted("""
@functools.lru_cache(maxsize=None)  # LEAK
def positions(length):
    return torch.arange(length, dtype=torch.float32)
for step, (x, y) in enumerate(batches()):
    update(F.cross_entropy(net(x + positions(1024 + 64 * step)[:64]), y))
    check()
""", "lru_cache of function `positions` (global `positions` in train.py)", "tensors"),
    "deque without maxlen": Planted("""
def evaluate():
    window = collections.deque()
    for x, y in batches():
        with torch.no_grad():
            window.append(net(x))  # LEAK
        check()
evaluate()
""", "local `window` of function evaluate", "tensors"),
    "hook registered at each step": Planted("""
def log_shape(layer, args, output):
    output.shape
for x, y in batches():
    net[0].register_forward_hook(log_shape)  # LEAK
    update(F.cross_entropy(net(x), y))
    check()
""", "forward hooks on layer `net.0`", "hooks"),
    "stored exceptions": Planted("""
def risky(x, y):
    scaled = x * 2
    raise ValueError("bad sample")
errors = []
for x, y in batches():
    try:
        risky(x, y)
    except ValueError as exc:
        errors.append(exc)  # LEAK
    check()
""", "global `errors` in train.py", "tensors"),
    "metric object": Planted("""
class Accuracy:
    def __init__(self):
        self.reset()
    def reset(self):
        self.logits = []
    def update(self, logits):
        self.logits = self.logits + [logits]  # LEAK
def train():
    metric = Accuracy()
    for x, y in batches():
        out = net(x)
        update(F.cross_entropy(out, y))
        metric.update(out.detach())
        check()
train()
""", "attribute `logits` of Accuracy (local `metric` of function train)", "tensors"),
    "optimizer": Planted("""
class Averaging(torch.optim.SGD):
    def step(self):
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("past", []).append(p.detach().clone())  # LEAK
        check()
optimizer = Averaging(net[2:].parameters(), lr=0.1)
optimizer.param_groups[0]["params"].pop()
for x, y in batches():
    update(F.cross_entropy(net(x), y), optimizer)
""", "attribute `state[<Parameter>]['past']` of Averaging (global `optimizer` in train.py)", "tensors"),
    "calling frame": Planted("""
def produce():
    for x, y in batches():
        out = net(x)
        update(F.cross_entropy(out, y))
        yield out
def main():
    kept = []
    for out in produce():
        kept.append(out)  # LEAK
        inner()
def inner():
    check()
main()
""", "local `kept` of function main"),
    "suspended generator": Planted("""
def smooth():
    past = []
    while True:
        past += [(yield)]  # LEAK
smoother = smooth()
next(smoother)
for x, y in batches():
    out = net(x)
    update(F.cross_entropy(out, y))
    smoother.send(out.detach())
    check()
""", "local `past` of generator smooth (global `smoother` in train.py)", "tensors"),
    "double backward": Planted("""
penalties = []
for x, y in batches():
    x.requires_grad_()
    loss = F.cross_entropy(net(x), y)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    penalties.append(gradient.square().sum())  # LEAK
    update(loss + penalties[-1])
    check()
""", "global `penalties` in train.py"),
    "NumPy array of objects": Planted("""
def collect():
    results = np.empty(100, dtype=object)
    for step, (x, y) in enumerate(batches()):
        with torch.no_grad():
            results[step] = net(x)  # LEAK
        check()
collect()
""", "local `results` of function collect", "tensors"),
    "preallocated list": Planted("""
results = [None] * 100
for step, (x, y) in enumerate(batches()):
    with torch.no_grad():
        results[step] = net(x)  # LEAK
    check()
""", "global `results` in train.py", "tensors"),
    "default argument": Planted("""
def accuracy(out, y, past=[]):
    past.append(out)  # LEAK
    return (out.argmax(1) == y).float().mean()
for x, y in batches():
    out = net(x)
    update(F.cross_entropy(out, y))
    accuracy(out.detach(), y)
    check()
""", "default argument `past` of function accuracy (global `accuracy` in train.py)", "tensors"),
    "thread-local": Planted("""
local = threading.local()
local.outputs = []
for x, y in batches():
    out = net(x)
    update(F.cross_entropy(out, y))
    local.outputs.append(out)  # LEAK
    check()
""", "thread-local attribute `outputs` (global `local` in train.py)"),
    "another thread": Planted("""
def work(turn, done):
    outputs = []
    for x, y in batches():
        turn.acquire()
        with torch.no_grad():
            outputs.append(net(x))  # LEAK
        done.release()
    turn.acquire()
turn, done = threading.Semaphore(0), threading.Semaphore(0)
thread = threading.Thread(target=work, args=(turn, done))
thread.start()
for _ in range(4):
    turn.release()
    done.acquire()
    check()
turn.release()
thread.join()
""", "local `outputs` of function work", "tensors"),
    "hidden state not detached": Planted("""
cell = nn.GRUCell(64, 64)
hidden = torch.zeros(32, 64)
for x, y in batches():
    hidden = cell(x, hidden)  # LEAK
    loss = hidden.square().mean()
    loss.backward(retain_graph=True)
    check()
""", "global `hidden` in train.py", "graph"),
    "custom function's context": Planted("""
class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mask = torch.rand(32, 64)
        return x * ctx.mask
    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.mask
scores = {}
for step, (x, y) in enumerate(batches()):
    out = net(Scale.apply(x.requires_grad_()))
    scores[step] = out.sum()  # LEAK
    check()
""", "global `scores` in train.py"),
    "graph in the gradient": Planted("""
weight = nn.Parameter(torch.randn(64, 64))
for x, y in batches():
    import warnings
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (x @ weight).square().mean().backward(create_graph=True)
    check()
""", "gradient of global `weight` in train.py", "graph"),
    "one check after many steps": Planted("""
losses = []
check()
found.clear()
watch = LeakWatch()
check()
for x, y in batches(8):
    loss = F.cross_entropy(net(x), y)
    update(loss)
    losses.append(loss)  # LEAK
check()
""", "global `losses` in train.py"),
}  # fmt: skip
