"""PyG batches are cut between graphs, as PyG itself would batch them; a training script in PyG's style survives."""

import functools
import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memkit as mk
from tests.allocations import trace_allocations
from tests.helpers import assert_refused
from tests.integrations.scripts import num_changed_lines
from tests.points.patches import patches
from tests.train.faults import FailingOperator

pytest.importorskip("torch_geometric", reason="an extra: pip install torch_geometric")

from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GATConv, GCNConv, GraphConv, SAGEConv, global_mean_pool
from torch_geometric.utils import add_self_loops

from memkit.integrations.torch_geometric import split_graphs

SIZES = [4, 0, 7, 2, 5, 3]  # nodes; one graph has none


def edges(n, k=2):
    return torch.stack([torch.arange(n).repeat(k), (torch.arange(n).repeat(k) + 1) % max(n, 1)])


def homogeneous(n):
    edge_index = edges(n)
    return Data(
        x=torch.rand(n, 3),
        edge_index=edge_index,
        edge_attr=torch.rand(edge_index.shape[1], 2),
        y=torch.tensor([n]),
        label=torch.arange(n) % 3,
        edge_label=torch.arange(edge_index.shape[1]) % 2,
        center_index=torch.tensor(max(n - 1, 0)),  # 0-dim, and it counts up with the nodes
        weight=n / 2,
        name=f"ring of {n}",
    )


def without_features(n):
    return Data(num_nodes=n, edge_index=edges(n))


def nested(n):
    return Data(x=torch.rand(n, 3), levels={"index": edges(n), "pos": torch.rand(n, 2)}, views=[torch.rand(2, 1)] * 2)


class Pair(Data):
    """Two graphs in one sample, as in PyG's documentation of mini-batches, and edges between them."""

    def __inc__(self, key, value, *args, **kwargs):
        counts = {"edge_index_s": self.x_s.size(0), "edge_index_t": self.x_t.size(0)}
        counts["edge_index_st"] = torch.tensor([[self.x_s.size(0)], [self.x_t.size(0)]])
        return counts.get(key, 0) if key != "raw_index" else 0

    def __cat_dim__(self, key, value, *args, **kwargs):
        return None if key == "table" else super().__cat_dim__(key, value, *args, **kwargs)


def pair(n):
    between = torch.stack([torch.arange(n), torch.arange(n)])
    return Pair(
        x_s=torch.rand(n, 2),
        x_t=torch.rand(n + 1, 2),
        edge_index_s=edges(n),
        edge_index_t=edges(n + 1),
        edge_index_st=between,
        raw_index=torch.arange(n),
        table=torch.rand(3, 4),
    )


def hetero(n):
    graph = HeteroData(title=f"venue {n}")
    graph["paper"].x = torch.rand(n, 3)
    graph["author"].num_nodes = n + 1
    graph["paper", "by", "author"].edge_index = torch.stack([torch.arange(n), torch.arange(n)])
    graph["paper", "by", "author"].edge_attr = torch.rand(n, 1)
    graph["paper"].y = torch.arange(n)
    return graph


KINDS = {
    "homogeneous": (homogeneous, ["edge_attr", "label"]),
    "without features": (without_features, []),
    "nested": (nested, []),
    "pair": (pair, ["x_s", "x_t"]),
    "hetero": (hetero, ["y"]),
}


def assert_same(found, expected):
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


def assert_same_batch(part, expected):
    assert type(part) is type(expected)
    assert part.num_graphs == expected.num_graphs
    assert_same(part._slice_dict, expected._slice_dict)
    assert_same(part._inc_dict, expected._inc_dict)
    for store, other in zip(part.stores, expected.stores, strict=True):
        assert_same(store.to_dict(), other.to_dict())


def check_parts(batch, graphs, n, follow):
    parts = split_graphs(batch, n)
    start = 0
    for part in parts:
        expected = Batch.from_data_list(graphs[start : start + part.num_graphs], follow_batch=follow)
        assert_same_batch(part, expected)
        start += part.num_graphs
    assert start == len(graphs)
    assert len(parts) <= n
    return parts


@pytest.mark.parametrize("n", [2, 3, 9])
@pytest.mark.parametrize("kind", KINDS)
def test_parts_match_pyg_batches(kind, n):
    make, follow = KINDS[kind]
    graphs = [make(size) for size in SIZES]
    batch, untouched = (Batch.from_data_list(graphs, follow_batch=follow) for _ in range(2))
    parts = check_parts(batch, graphs, n, follow)
    assert len(parts) > 1
    assert_same_batch(batch, untouched)
    last = parts[-1]
    check_parts(last, graphs[len(graphs) - last.num_graphs :], 2, follow)  # a part of a part, as after two failures


def test_parts_are_balanced_by_nodes_and_edges():
    graphs = [homogeneous(n) for n in (300, 10, 20, 10, 30, 20)]
    parts = split_graphs(Batch.from_data_list(graphs), 3)
    assert [part.num_nodes for part in parts] == [300, 90]  # two graphs each would hold 310 at most, and a part more


@pytest.mark.parametrize(
    ("drops", "expected"),
    [
        (
            lambda batch, n: [Batch.from_data_list(batch[:1]), Batch.from_data_list(batch[1:5])],
            "5 of 6 graphs, in 2 parts",
        ),
        (lambda batch, n: [batch[0], batch[2]], "2 of 6 graphs, in 2 parts"),
        (lambda batch, n: [batch[:2], batch[2:4]], "4 of 6 graphs"),
        (lambda batch, n: [without_edges(part) for part in split_graphs(batch, n)], "0 of 42 edges"),
    ],
)
@pytest.mark.parametrize("probe", [True, False])
def test_rejects_split_fn_that_drops_graphs(drops, expected, probe):
    """All other rules see nothing: each part has two rows of edges, and as many tensors as it likes."""
    model, batch = nn.Linear(3, 1), Batch.from_data_list([homogeneous(n) for n in SIZES])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = mk.MemoryEfficientTrainingWrapper(model, optimizer, accumulation_steps=2, split_fn=drops, probe=probe)
    with pytest.raises(mk.errors.InputError, match=expected):
        trainer.train_step(batch, lambda m, b: mk.Loss(mean=m(b.x).mean(), count=b.num_nodes))


def without_edges(graphs):
    graphs = graphs.clone()
    graphs.edge_index = graphs.edge_index[:, :0]
    return graphs


def test_attributes_are_views():
    """Asking PyG for one graph after another copies all of the batch."""
    graphs = [Data(x=torch.rand(500, 64), edge_index=edges(500)) for _ in range(16)]
    batch = Batch.from_data_list(graphs)
    num_bytes = sum(value.nbytes for value in batch.to_dict().values())
    kept = []
    ours = trace_allocations(lambda: kept.append(split_graphs(batch, 4))).peak
    pyg = trace_allocations(lambda: kept.append([Batch.from_data_list(batch[i : i + 4]) for i in range(0, 16, 4)])).peak
    assert ours <= batch.edge_index.nbytes + batch.batch.nbytes + 16 * 1024
    assert pyg > num_bytes > 5 * ours


def test_one_graph_is_the_batch_itself():
    batch = Batch.from_data_list([homogeneous(5)])
    assert split_graphs(batch, 4)[0] is batch


class TestRefusals:
    def refused(self, batch, *words, error=mk.errors.InputError):
        assert_refused(lambda: split_graphs(batch, 2), error, "split_graphs(batch, 2): got", *words)

    def batch(self):
        return Batch.from_data_list([homogeneous(n) for n in SIZES])

    def test_a_neighbor_loaders_batch(self):
        """What it yields; the loader itself needs a compiled package."""
        self.refused(
            Data(x=torch.rand(9, 2), edge_index=edges(9), n_id=torch.arange(9), input_id=torch.arange(3), batch_size=3),
            *("a Data sampled around 3 seed nodes; expected a Batch", "NeighborLoader(batch_size=...)", "count="),
            error=mk.errors.InputTypeError,
        )
        typed = hetero(4)
        typed["paper"].batch_size = 2
        self.refused(typed, "a HeteroData sampled around 2 seed nodes", error=mk.errors.InputTypeError)

    def test_rejects_non_pyg_batches(self):
        self.refused({"x": torch.rand(3, 1)}, "a dict; expected a Batch", error=mk.errors.InputTypeError)
        by_hand, made = Batch(x=torch.rand(3, 1), batch=torch.tensor([0, 0, 1])), "made by Batch.from_data_list"
        self.refused(by_hand, "a DataBatch; expected a Batch ", made, error=mk.errors.InputTypeError)

    def test_rejects_attribute_set_after_batching(self):
        batch = self.batch()
        batch.edge_weight = torch.ones(batch.num_edges)
        self.refused(batch, "'edge_weight': an attribute that was added after batching")

    def test_rejects_rows_added_after_batching(self):
        batch = self.batch()
        batch.edge_index, batch.edge_attr = add_self_loops(batch.edge_index, batch.edge_attr)
        self.refused(batch, "'edge_index': 63 rows; expected the 42 rows that the graphs had", "transform=")

    @pytest.mark.filterwarnings("ignore:Sparse invariant checks")
    def test_rejects_special_tensor_types(self):
        batch = Batch.from_data_list([Data(x=torch.rand(n, 1), edge_index=EdgeIndex(edges(n))) for n in (3, 4)])
        self.refused(batch, "'edge_index': a EdgeIndex; expected tensors")
        batch = Batch.from_data_list([Data(x=torch.rand(n, 1), adj=torch.eye(n).to_sparse_coo()) for n in (3, 4)])
        self.refused(batch, "'adj': a Tensor")


# --- a training in PyG's style ---------------------------------------------------------------------------------------


@functools.cache
def meshes():
    """Patches of the cortex as graphs: is a node in a fold, and how much of the patch is?"""
    graphs = []
    for patch in patches():
        faces, pos = patch["faces"], patch["coord"] - patch["coord"].mean(0)
        ends = torch.cat([faces[:, [0, 1]], faces[:, [1, 2]], faces[:, [2, 0]]]).unique(dim=0).T
        length = (pos[ends[0]] - pos[ends[1]]).norm(dim=1)
        in_fold = patch["depth"] > 0
        graphs.append(Data(x=pos, edge_index=ends, edge_weight=length, y=in_fold.long()))
    return graphs


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = GraphConv(3, 16), GraphConv(16, 16)
        self.lin = nn.Linear(32, 2)

    def forward(self, x, edge_index, edge_weight, batch):
        x = self.conv1(x, edge_index, edge_weight).tanh()
        x = self.conv2(x, edge_index, edge_weight).tanh()
        return self.lin(torch.cat([x, global_mean_pool(x, batch)[batch]], dim=1))


def make(net=Net):
    torch.manual_seed(0)
    model = net().double()
    return model, torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


@functools.cache
def batches():
    return list(DataLoader(meshes(), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(1)))


def train(loader, model, optimizer, losses):
    model.train()
    for data in loader:
        optimizer.zero_grad()
        out = model(data.x, data.edge_index, data.edge_weight, data.batch)
        loss = F.cross_entropy(out, data.y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())


def train_with_memkit(loader, model, optimizer, losses, **settings):
    def loss_fn(model, data):
        out = model(data.x, data.edge_index, data.edge_weight, data.batch)
        return mk.Loss(sum=F.cross_entropy(out, data.y, reduction="sum"), count=len(data.y))

    trainer = mk.MemoryEfficientTrainingWrapper(model, optimizer, split_fn=split_graphs, **settings)
    model.train()
    for data in loader:
        losses.append(trainer.train_step(data, loss_fn).loss.item())
    return trainer


def run(how, net=Net, **settings):
    model, optimizer = make(net)
    losses = []
    trainer = how(batches(), model, optimizer, losses, **settings)
    return losses, dict(model.named_parameters()), trainer


@functools.cache
def plain():
    return run(train)[:2]


def assert_plain(found):
    torch.testing.assert_close(found[0], plain()[0], rtol=1e-10, atol=0)
    torch.testing.assert_close(found[1], plain()[1], rtol=1e-9, atol=1e-11)
    assert len(found[0]) == len(batches())


def test_few_lines_are_changed():
    added, removed = num_changed_lines(*(inspect.getsource(each) for each in (train, train_with_memkit)))
    assert added <= 10  # the name of the function, too, and not the import
    assert removed <= added


@pytest.mark.parametrize("num_parts", [3, 8])
def test_a_training_in_parts_is_the_whole_training(num_parts):
    found = run(train_with_memkit, accumulation_steps=num_parts)
    assert_plain(found)
    assert found[2].num_steps == len(batches())


@functools.cache
def num_operators():
    batches()
    with FailingOperator() as counter:
        run(train_with_memkit)
    return counter.num_operators


@pytest.mark.parametrize("share", [0.05, 0.33, 0.52, 0.8])
def test_survives_an_out_of_memory(share):
    with FailingOperator(int(share * num_operators())) as planted:
        found = run(train_with_memkit)
    assert planted.num_failures == 1
    assert_plain(found)
    assert found[2].num_steps == len(batches())


class LimitedNet(Net):
    """Runs out of memory with more edges than this."""

    limit, num_failures = 8000, 0

    def forward(self, x, edge_index, edge_weight, batch):
        if edge_index.shape[1] > self.limit:
            self.num_failures += 1
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().forward(x, edge_index, edge_weight, batch)


def test_survives_a_limit_and_remembers_the_size():
    assert max(graph.num_edges for graph in meshes()) < LimitedNet.limit
    assert sum(batch.num_edges > LimitedNet.limit for batch in batches()) == 7
    found = run(train_with_memkit, LimitedNet)
    assert_plain(found)
    assert found[2].num_steps == len(batches())
    assert 1 <= found[2].model.num_failures < 7  # without memory, each of the seven fails again


def test_the_mean_over_parts_is_another_training():
    def unweighted(loader, model, optimizer, losses):
        for data in loader:
            optimizer.zero_grad()
            parts = split_graphs(data, 4)
            total = sum(F.cross_entropy(model(p.x, p.edge_index, p.edge_weight, p.batch), p.y) for p in parts)
            (total / len(parts)).backward()
            optimizer.step()
            losses.append(total.item() / len(parts))

    with pytest.raises(AssertionError, match="not close"):
        assert_plain(run(unweighted))


def test_oversized_graph_error_has_way_out():
    model, optimizer = make()
    trainer = mk.MemoryEfficientTrainingWrapper(model, optimizer, split_fn=split_graphs)

    def never(model, data):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(mk.MemkitOutOfMemoryError, match=r"elements.*Way out"):
        trainer.train_step(Batch.from_data_list(meshes()[:4]), never)


@pytest.mark.parametrize("target", ["cpu", "RTX 4090"])
def test_an_estimate_has_the_batch_on_its_target(target):
    """A `Batch` is neither a mapping nor a dataclass; its tensors lie in storages within it."""
    data, model = Batch.from_data_list([homogeneous(30), homogeneous(50)]), GraphConv(3, 4)
    x, plain = data.x, (data.x, data.edge_index)

    def estimate(batch, read):
        def loss_fn(model, batch):
            return model(*read(batch)).square().mean()

        return mk.estimate_memory_usage(model, batch, loss_fn=loss_fn, optimizer="adamw", target=target)

    of_graphs, of_tensors = estimate(data, lambda batch: (batch.x, batch.edge_index)), estimate(plain, tuple)
    names = ("batch", "ptr", "edge_attr", "y", "label", "edge_label", "center_index", "weight")
    unread = sum(-(-data[name].nbytes // 512) * 512 for name in names)  # in the card's blocks
    assert of_tensors.peak_bytes <= of_graphs.peak_bytes <= of_tensors.peak_bytes + unread
    assert data.x is x


class TwoLayers(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.first, self.second, self.head = layer(16, 32), layer(32, 32), nn.Linear(32, 4)

    def forward(self, data):
        x = self.first(data.x, data.edge_index).relu()
        return self.head(global_mean_pool(self.second(x, data.edge_index).relu(), data.batch))


@pytest.mark.parametrize(
    "layer", [SAGEConv, *(pytest.param(each, marks=pytest.mark.slow) for each in (GCNConv, GATConv))]
)
def test_saved_tensors_of_a_batch_are_planned(layer):
    """Some of the layers select edges by masks, whose values a dry run of a recomputation would not have."""

    def graph(n):
        return Data(x=torch.randn(n, 16), edge_index=torch.randint(n, (2, 8 * n)), y=torch.randint(4, (1,)))

    def loss_fn(model, data):
        return F.cross_entropy(model(data), data.y)

    torch.manual_seed(0)
    data, model, found = Batch.from_data_list([graph(n) for n in (30, 50, 20, 44)]), TwoLayers(layer), []
    plan = mk.plan_training(model, data, loss_fn, "adamw", activation_budget=0.5).saved_tensors
    assert plan.recomputed
    assert plan.kept_share <= 0.5
    for treatment in (None, plan):
        model.zero_grad()
        with mk.train.treat_saved_tensors(treatment):
            loss = loss_fn(model, data)
        loss.backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
