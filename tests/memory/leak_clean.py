"""Training scripts that keep nothing longer than they should, however much they make: no alarm may come from them."""

CLEAN = {
    "SGD": """
for x, y in batches(6):
    loss = F.cross_entropy(net(x), y)
    update(loss)
    check()
""",
    "AdamW, baseline before the first step": """
optimizer = torch.optim.AdamW(net.parameters())
watch = LeakWatch()
for x, y in batches(6):
    check()
    out = net(x)
    loss = F.cross_entropy(out, y)
    update(loss, optimizer)
check()
""",
    "AdamW, baseline after it": """
optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
for number, (x, y) in enumerate(batches(6)):
    update(F.cross_entropy(net(x), y), optimizer)
    if number == 0:
        watch = LeakWatch()
    check()
""",
    "one check after many steps": """
optimizer = torch.optim.AdamW(net.parameters())
feats = []
watch = LeakWatch()
check()
for x, y in batches(6):
    feats = []
    for layer in net:
        x = layer(x)
        feats.append(x)
    update(F.cross_entropy(x, y), optimizer)
check()
""",
    "gradients kept between steps": """
for x, y in batches(6):
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    check()
""",
    "EMA": """
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
ema = None
for x, y in batches(6):
    update(F.cross_entropy(net(x), y))
    if ema is None:
        ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    ema.update_parameters(net)
    check()
""",
    "GradientAccumulator": """
import memkit as mk
accumulator = mk.GradientAccumulator(optimizer, accumulation_steps=4)
for x, y in batches(9):
    loss = F.cross_entropy(net(x), y)
    accumulator.backward(loss, count=len(x))
    accumulator.step()
    check()
""",
    "summed losses of a window": """
window_loss = 0
for step, (x, y) in enumerate(batches(9)):
    window_loss = window_loss + F.cross_entropy(net(x), y) / 4
    if step % 4 == 3:
        update(window_loss)
        window_loss = 0
    check()
""",
    "checkpointing": """
from torch.utils.checkpoint import checkpoint
for x, y in batches(6):
    loss = F.cross_entropy(checkpoint(net, x, use_reentrant=False), y)
    update(loss)
    check()
""",
    "deque with maxlen": """
recent = collections.deque(maxlen=5)
for x, y in batches(8):
    out = net(x)
    update(F.cross_entropy(out, y))
    recent.append(out)
    check()
""",
    "deque with maxlen in a dict": """
class Meter:
    def __init__(self):
        self.windows = {"loss": collections.deque(maxlen=5), "out": collections.deque(maxlen=5)}
meter = Meter()
for x, y in batches(8):
    out = net(x).detach()
    meter.windows["out"].append(out)
    meter.windows["loss"].append(out * 2)
    check()
""",
    "last three outputs by slices": """
recent = []
for x, y in batches(8):
    recent.append(net(x).detach())
    recent = recent[-3:]
    check()
""",
    "ring of slots": """
ring = [None] * 5
for step, (x, y) in enumerate(batches(9)):
    ring[step % 5] = net(x)
    check()
""",
    "evaluation between": """
def evaluate():
    outputs = []
    with torch.no_grad():
        for x, y in batches(6):
            outputs.append(net(x))
    return torch.cat(outputs).mean()
for step, (x, y) in enumerate(batches(9)):
    update(F.cross_entropy(net(x), y))
    if step % 2:
        score = evaluate()
    check()
""",
    "scheduler": """
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20)
for x, y in batches(6):
    update(F.cross_entropy(net(x), y))
    scheduler.step()
    check()
""",
    "DataLoader": """
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.randn(256, 64), torch.randint(8, (256,)))
for epoch in range(2):
    for x, y in DataLoader(data, batch_size=32, shuffle=True):
        update(F.cross_entropy(net(x), y))
        check()
""",
    "lazily made buffer": """
class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.cache = {}
        self.register_buffer("scale", None)
    def forward(self, x):
        if self.scale is None:
            self.scale = torch.ones(64)
        if "mask" not in self.cache:
            self.cache["mask"] = torch.ones(32, 64)
        self.cache["last"] = x
        self.last_output = x * self.scale * self.cache["mask"]
        return self.last_output
net.insert(0, Lazy())
for x, y in batches(6):
    update(F.cross_entropy(net(x), y))
    check()
""",
    "list cleared each three steps": """
pending = []
for x, y in batches(9):
    pending.append(net(x))
    if len(pending) == 3:
        update(torch.stack(pending).square().mean())
        pending.clear()
    check()
""",
    "list made anew each three steps": """
class Buffer:
    def __init__(self):
        self.start()
    def start(self):
        self.items = []
buffer = Buffer()
for step, (x, y) in enumerate(batches(9)):
    if step % 3 == 0:
        buffer.items = []
    buffer.items.append(net(x).detach())
    check()
""",
    "detached scalars": """
losses, curve = [], collections.defaultdict(list)
for x, y in batches(6):
    loss = F.cross_entropy(net(x), y)
    update(loss)
    losses.append(loss.detach())
    curve["loss"].append(loss.item())
    check()
""",
    "hidden state detached": """
cell = nn.GRUCell(64, 64)
hidden = torch.zeros(32, 64)
for x, y in batches(6):
    hidden = cell(x, hidden)
    loss = hidden.square().mean()
    loss.backward()
    hidden = hidden.detach()
    check()
""",
    "GAN": """
D = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
optimizers = {"g": torch.optim.Adam(net.parameters()), "d": torch.optim.Adam(D.parameters())}
losses = {}
for step, (x, y) in enumerate(batches(8)):
    fake = net(x)
    if step % 2:
        losses["d"] = F.softplus(D(fake.detach())).mean() + F.softplus(-D(torch.randn(32, 8))).mean()
        update(losses["d"], optimizers["d"])
    else:
        losses["g"] = F.softplus(-D(fake)).mean()
        update(losses["g"], optimizers["g"])
    check()
""",
    "target made once with its graph": """
style = nn.Linear(64, 8)
target = None
for x, y in batches(6):
    if target is None:
        target = style(x)
    loss = F.mse_loss(net(x), target)
    loss.backward(retain_graph=True)
    check()
""",
    "lru_cache with maxsize": """
@functools.lru_cache(maxsize=6)
def positions(length):
    return torch.arange(length, dtype=torch.float32)
for step, (x, y) in enumerate(batches(8)):
    positions(1024 + step)
    check()
""",
    "own bounded cache": """
class Cache:
    def __init__(self):
        self.entries = collections.OrderedDict()
    def put(self, key, value):
        self.entries[key] = value
        if len(self.entries) > 4:
            self.entries.popitem(last=False)
cache = Cache()
for step, (x, y) in enumerate(batches(8)):
    cache.put(step, net(x))
    check()
""",
    "previous and current": """
class Tracker:
    previous = current = None
tracker = Tracker()
pair = [None, None]
for x, y in batches(6):
    tracker.previous, tracker.current = tracker.current, net(x).detach()
    pair[0], pair[1] = pair[1], tracker.current
    check()
""",
    "hooks removed": """
for x, y in batches(6):
    handle = net[0].register_forward_hook(lambda *args: None)
    out = net(x)
    handle.remove()
    check()
""",
    "reference cycles": """
class Node:
    def __init__(self, value):
        self.value, self.itself = value, self
for x, y in batches(6):
    Node(net(x))
    check()
""",
    "own names for locals": """
def train(lr=0.1, width=3):
    arguments = locals()
    before = dict(arguments)
    for x, y in batches(5):
        out = net(x)
        check()
    assert arguments == before
train()
""",
    "best weights so far": """
import copy
best = None
for step, (x, y) in enumerate(batches(6)):
    update(F.cross_entropy(net(x), y))
    best = copy.deepcopy(net.state_dict())
    check()
""",
}
