"""Calls as users of PyG, Pointcept and the founding projects write them: each error ends in the call to write."""

import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import memkit as mk
from memkit.errors import AbsentError, ConfigError, FileFormatError, InputError, InputTypeError

COORDS = torch.rand(50, 3, generator=torch.Generator().manual_seed(0))
DST = torch.tensor([0, 0, 1, 1, 1])


def index(**scenes):
    return mk.GridIndex.from_coords(COORDS, grid_size=0.25, **scenes)


def sampler(**settings):
    return mk.GridAwareSampler(**settings)


def density(*args, **settings):
    net = torch.nn.Linear(3, 2)
    loss_fn = torch.nn.functional.cross_entropy
    given = args or (net, sampler(), loss_fn)
    return mk.DensityInvariantTrainer(*given, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), **settings)


def state(**changes):
    return sampler().state_dict() | changes


CALLS = [
    (lambda: mk.GridIndex(COORDS, 0.05), InputTypeError, "write GridIndex.from_coords(coords, grid_size=0.05)"),
    (lambda: index(ptr=[0, 50]), InputTypeError, "write from_coords(coords, grid_size=0.25, offsets=[0, 50])"),
    (lambda: index(offset=[50]), InputTypeError, "write from_coords(coords, grid_size=0.25, offsets=[50])"),
    (
        lambda: mk.GridIndex.from_coords(COORDS, voxel_size=0.1),
        InputTypeError,
        "write from_coords(coords, grid_size=0.1)",
    ),
    (lambda: mk.points.voxel_mean(None, mk.GridIndex.from_cells(DST)), InputTypeError, "pass torch.as_tensor(values)."),
    (
        lambda: mk.GridAwareSampler().index(COORDS, 0.3, key=[1]),
        InputTypeError,
        "or another text, number or tuple of them.",
    ),
    (lambda: mk.GridIndex.from_cells(DST, ptr=[0, 5]), InputTypeError, "write from_cells(cell_ids, offsets=[0, 5])"),
    (lambda: index(offsets=torch.zeros(50, dtype=torch.int64)), InputError, "if this is the scene of each point."),
    (
        lambda: index(offsets=[20, 40]),
        InputError,
        "pass offsets=torch.tensor([len(scene) for scene in scenes]).cumsum(0).",
    ),
    (lambda: index(offsets=[50], batch=[0] * 50), InputError, "write offsets=offsets, without batch."),
    (lambda: index(batch=[1] * 25 + [0] * 25), InputError, "order = batch.argsort(stable=True)."),
    (lambda: index(batch=[0] * 49), InputError, "order = batch.argsort(stable=True)."),
    (lambda: sampler(min_sample_ratio=0.3), InputTypeError, "write GridAwareSampler(ratio=(0.3, 0.7))"),
    (
        lambda: sampler(min_sample_ratio=0.3, max_sample_ratio=0.7),
        InputTypeError,
        "write GridAwareSampler(ratio=(0.3, 0.7))",
    ),
    (lambda: sampler(sample_ratio=0.5), InputTypeError, "write GridAwareSampler(ratio=0.5)"),
    (
        lambda: sampler(grid_size=0.05),
        InputTypeError,
        "the cells are those of an index: sampler.index(coords, grid_size=0.05); write GridAwareSampler()",
    ),
    (lambda: sampler(ratio=(0.7, 0.3)), ConfigError, "pass ratio=(0.3, 0.7)."),
    (lambda: sampler(ratio=(30, 70)), ConfigError, "pass ratio=(0.3, 0.7)."),
    (lambda: sampler(ratio=50), ConfigError, "pass ratio=0.5."),
    (lambda: sampler(rounding="round"), ConfigError, "pass rounding='nearest'."),
    (lambda: sampler(device="gpu"), ConfigError, "pass device='cuda'."),
    (lambda: sampler(device="cpux"), ConfigError, "pass device='cpu'."),
    (
        lambda: sampler().sample_half_density(COORDS),
        InputTypeError,
        "write sample_half_density(sampler.index(coords, grid_size=0.05))",
    ),
    (lambda: sampler().sample_half_density(index(), 3), InputTypeError, "torch.Generator().manual_seed(seed)."),
    (lambda: sampler().sample_scenarios(index(), "half"), InputError, "write scenarios=('half',)"),
    (lambda: sampler().sample_scenarios(index(), ["sparse"]), InputError, "or some of these."),
    (lambda: sampler().draw_ahead(index()), InputTypeError, "write draw_ahead([index])"),
    (lambda: sampler().draw_ahead([], depth=1.5), InputError, "pass depth=1."),
    (lambda: sampler()(COORDS), InputTypeError, "sampler.index(coords, grid_size=0.05))"),
    (lambda: sampler().load_state_dict([1]), FileFormatError, "with the name under which it was saved."),
    (lambda: sampler().load_state_dict({"version": 1}), FileFormatError, "or start a new sampler."),
    (
        lambda: sampler().load_state_dict({"version": 1, "algo_version": 3}),
        FileFormatError,
        "load the state as state_dict() returned it.",
    ),
    (lambda: sampler().load_state_dict(state(seed=-5)), FileFormatError, "as state_dict() returned it."),
    (lambda: sampler().load_state_dict(state(num_draws="3")), FileFormatError, "as state_dict() returned it."),
    (
        lambda: sampler().sample_half_density(index()).take(COORDS[:20]),
        InputError,
        "one row for each point: coords, feats = sample.take(coords, feats)",
    ),
    (
        lambda: sampler().sample_half_density(index()).take({"coord": COORDS, "segment": COORDS[:20, 0]}),
        InputError,
        "or another name if it does not belong to points.",
    ),
    (lambda: sampler().sample_half_density(index())(COORDS), InputTypeError, "write sample.take(coords, feats)"),
    (
        lambda: mk.points.sample_edges(DST, p=0.2),
        InputTypeError,
        "the fraction that is kept, ratio=1 - p; write sample_edges(dst)",
    ),
    (lambda: mk.points.sample_edges(edge_index=DST), InputTypeError, "write sample_edges(dst=dst)"),
    (
        lambda: mk.points.voxel_mean(COORDS, index(), aggr="mean"),
        InputTypeError,
        "it is the mean; write voxel_mean(values, index)",
    ),
    (
        lambda: mk.points.BudgetBatchSampler([5, 6], batch_size=2),
        InputTypeError,
        "write BudgetBatchSampler([5, 6], max_points=100_000)",
    ),
    (
        lambda: mk.points.BudgetBatchSampler([5, 6], max_num=12),
        InputTypeError,
        "write BudgetBatchSampler([5, 6], max_points=12)",
    ),
    (
        lambda: mk.points.BudgetBatchSampler([5, 6], max_points=12, shuffle=True),
        InputTypeError,
        "by seed and epoch; write BudgetBatchSampler([5, 6], max_points=12)",
    ),
    (
        lambda: mk.points.BudgetBatchSampler(TensorDataset(COORDS), max_points=12),
        InputTypeError,
        "write BudgetBatchSampler([len(sample) for sample in dataset], max_points=...)",
    ),
    (lambda: mk.points.split_packed({"offset": torch.tensor([3])}, 0), InputError, "pass n=1."),
    (lambda: mk.points.split_packed({"offset": torch.tensor([3])}, "2"), InputError, "pass n=2."),
    (lambda: mk.points.split_packed([COORDS], 2), InputTypeError, "or write your own split_fn."),
    (lambda: density(scenarios="half"), ConfigError, "pass scenarios=('dense', 'half', 'single')."),
    (lambda: density(mode="batched"), ConfigError, "pass mode='joint'."),
    (
        lambda: density(torch.nn.Linear(3, 2), 3, print),
        InputTypeError,
        "DensityInvariantTrainer(trainer, GridAwareSampler(), loss_fn)",
    ),
    (
        lambda: density(torch.nn.Linear(3, 2), sampler(), lambda model, batch: 0),
        InputTypeError,
        "write loss_fn=lambda output, targets: criterion(output, targets)",
    ),
    (
        lambda: mk.DensityInvariantTrainer(torch.nn.Linear(3, 2), sampler(), print),
        ConfigError,
        "write DensityInvariantTrainer(model, sampler, loss_fn, optimizer=optimizer)",
    ),
    (
        lambda: density().train_step({"coord": COORDS, "feat": COORDS, "segment": COORDS[:, 0]}),
        InputTypeError,
        "PointScene(coords=scene['coord'], features=scene['feat'], targets=scene['segment']))",
    ),
    (
        lambda: density().train_step(COORDS),
        InputTypeError,
        "train_step(mk.recipes.PointScene(coords, features, targets))",
    ),
    # forms of the arguments
    (
        lambda: mk.GridIndex.from_coords(COORDS.T, 0.25),
        InputError,
        "write GridIndex.from_coords(coords.T, grid_size=0.05)",
    ),
    (
        lambda: mk.GridIndex.from_coords({"coord": COORDS}),
        InputTypeError,
        "from_coords(sample['coord'], grid_size=0.05)",
    ),
    (lambda: mk.GridIndex.from_coords(COORDS.numpy().astype(object)), InputTypeError, "float64, float32 or int64."),
    (lambda: mk.GridIndex.from_coords([COORDS, COORDS]), InputError, "of a batch, and pass offsets=."),
    (lambda: mk.GridIndex.from_coords(COORDS / 0), InputError, "coords[torch.isfinite(coords).all(1)]."),
    (lambda: mk.GridIndex.from_cells(COORDS[:, 0]), InputTypeError, "from positions use GridIndex.from_coords."),
    (lambda: index()[0], InputTypeError, "write index.cell_of_point()"),
    (lambda: index().num_voxels, AbsentError, "write index.num_cells"),
    (lambda: index().to("cuda"), AbsentError, "an index is always on the host"),
    (lambda: sampler(ratio="half"), ConfigError, "pass ratio=(0.3, 0.7)."),
    (lambda: sampler(ratio=None), ConfigError, "pass ratio=(0.3, 0.7)."),
    (lambda: sampler(ratio=(0.3, 0.5, 0.7)), ConfigError, "pass ratio=(0.3, 0.7)."),
    (lambda: sampler().sample_scenarios(index(), []), InputError, "or some of these."),
    (
        lambda: sampler().sample_half_density(index(), ratio=0.5),
        InputTypeError,
        "pass it to the constructor, GridAwareSampler(..., ratio=0.5); write sample_half_density(index)",
    ),
    (
        lambda: sampler().sample_half_density(index()).take(),
        InputTypeError,
        "write coords, feats = sample.take(coords, feats)",
    ),
    (lambda: sampler().sample_half_density(index())[0], InputTypeError, "write sample.take(coords, feats)"),
    (lambda: sampler().sample_half_density(index()).mask, AbsentError, "keep[sample.indices] = True"),
    (lambda: mk.points.sample_edges(torch.stack([DST, DST])), InputError, "write sample_edges(edge_index[1])"),
    (lambda: mk.points.sample_edges(DST.float()), InputTypeError, "write sample_edges(dst.long())"),
    (lambda: mk.points.voxel_mean(index(), COORDS), InputTypeError, "write voxel_mean(values, index)"),
]


@pytest.mark.parametrize(("call", "error", "end"), CALLS)
def test_a_wrong_call_ends_in_the_call_to_write(call, error, end):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value).endswith(end), str(caught.value)


@pytest.mark.parametrize(
    ("read", "end"),
    [
        (lambda: sampler().sample, "write sampler.sample_half_density(index)"),
        (lambda: sampler().build_index, "write sampler.index(coords, grid_size=0.05)"),
        (lambda: sampler().sample_half_density(index()).idx, "write sample.indices"),
    ],
)
def test_an_absent_name_has_its_counterpart(read, end):
    with pytest.raises(mk.errors.AbsentError) as caught:
        read()
    assert str(caught.value).endswith(end)


def test_a_graph_batch_is_led_to_its_own_function():
    data = pytest.importorskip("torch_geometric.data")
    graphs = [data.Data(x=torch.rand(3, 2)) for _ in range(2)]
    batch = data.Batch.from_data_list(graphs)
    with pytest.raises(InputTypeError, match=r"write memkit.integrations.torch_geometric.split_graphs\(batch, n\)$"):
        mk.points.split_packed(batch, 2)
    from memkit.integrations.torch_geometric import split_graphs

    with pytest.raises(InputError, match=r"pass n=1\.$"):
        split_graphs(batch, 0)
    with pytest.raises(InputTypeError, match=r"write split_graphs\(Batch.from_data_list\(graphs\), n\)$"):
        split_graphs(graphs, 2)
    with pytest.raises(InputTypeError, match=r"write memkit.points.split_packed\(batch, n\)$"):
        split_graphs({"offset": torch.tensor([3])}, 2)


class TestTake:
    def test_all_forms_are_cut_by_the_same_rows(self):
        sample = sampler().sample_half_density(index())
        rows = sample.indices
        names = [str(number) for number in range(50)]
        coords, array, listed = sample.take(COORDS, COORDS.numpy(), names)
        assert torch.equal(coords, COORDS[rows])
        np.testing.assert_array_equal(array, COORDS.numpy()[rows.numpy()])
        assert listed == [names[row] for row in rows.tolist()]
        assert torch.equal(sample.take(COORDS), coords)

    def test_gradients_flow_through(self):
        x = COORDS.clone().double().requires_grad_()
        sample = sampler().sample_single_per_grid(index())
        sample.take(x).sum().backward()
        expected = torch.zeros(50, 3, dtype=torch.float64)
        expected[sample.indices] = 1
        assert torch.equal(x.grad, expected)

    def test_mapping_keeps_entries_without_points(self):
        scene = {"coord": COORDS, "offset": torch.tensor([20, 50]), "name": "hall", "pose": torch.eye(4)}
        sample = sampler().sample_half_density(index(offsets=scene["offset"]))
        cut = sample.take(scene)
        assert list(cut) == list(scene)
        assert torch.equal(cut["coord"], COORDS[sample.indices])
        assert torch.equal(cut["offset"], sample.offsets)
        assert (cut["name"], cut["pose"] is scene["pose"]) == ("hall", True)
        assert sample.take({"ptr": torch.tensor([0, 20, 50])})["ptr"].tolist() == [0, *sample.offsets.tolist()]

    def test_all_points_are_no_copy(self):
        sample = sampler().sample_scenarios(index(), ("dense",))["dense"]
        assert sample.take(COORDS) is COORDS


class TestPyGsForms:
    def test_a_pointer_is_no_further_scene_and_comes_back_in_its_form(self):
        ends, ptr = index(offsets=[20, 50]), index(offsets=torch.tensor([0, 20, 50]))
        assert len(ptr.scenes) == len(ends.scenes) == 2
        assert repr(ptr) == repr(ends)
        assert ptr.offsets.tolist() == [0, 20, 50]
        assert ptr.cell_offsets.tolist() == [0, *ends.cell_offsets.tolist()]
        for draw in ("sample_half_density", "sample_single_per_grid"):
            ours, theirs = (getattr(sampler(), draw)(each) for each in (ptr, ends))
            assert torch.equal(ours.indices, theirs.indices)
            assert ours.offsets.tolist() == [0, *theirs.offsets.tolist()]
        dense = sampler().sample_scenarios(ptr, ("dense",))["dense"]
        assert dense.offsets.tolist() == [0, 20, 50]
        assert pickle.loads(pickle.dumps(ptr)).offsets.tolist() == [0, 20, 50]

    def test_a_batch_vector_gives_the_same_scenes(self):
        batch = torch.tensor([0] * 20 + [1] * 30)
        ours, theirs = index(batch=batch), index(offsets=[20, 50])
        assert ours.offsets.tolist() == [20, 50]
        assert np.array_equal(ours.cells, theirs.cells)
        assert index(batch=[1] * 50).offsets.tolist() == [0, 50]  # the first scene is empty
        assert len(index(batch=[1] * 50).scenes) == 2
        assert mk.GridIndex.from_cells(DST, batch=[0, 0, 1, 1, 1]).offsets.tolist() == [2, 5]

    def test_the_cache_tells_them_apart(self):
        ours = sampler()
        batch = torch.tensor([0] * 20 + [1] * 30)
        first = ours.index(COORDS, 0.25, batch=batch)
        assert ours.index(COORDS, 0.25, batch=batch) is first
        assert ours.index(COORDS, 0.25) is not first
        assert ours.index(COORDS, 0.25, offsets=torch.tensor([0, 20, 50])).offsets.tolist() == [0, 20, 50]

    @pytest.mark.parametrize("name", ["offset", "ptr"])
    def test_parts_of_a_batch_keep_the_form(self, name):
        batch = {"coord": COORDS, name: torch.tensor([0, 20, 30, 50]), "name": ["a", "b", "c"]}
        parts = mk.points.split_packed(batch, 2)
        assert [part[name].tolist() for part in parts] == [[0, 20, 30], [0, 20]]
        assert [part["name"] for part in parts] == [["a", "b"], ["c"]]
        assert torch.equal(torch.cat([part["coord"] for part in parts]), COORDS)

    def test_both_of_pygs_entries(self):
        batch = {"pos": COORDS, "ptr": torch.tensor([0, 20, 50]), "batch": torch.tensor([0] * 20 + [1] * 30)}
        first, second = mk.points.split_packed(batch, 2)
        assert (first["ptr"].tolist(), second["ptr"].tolist()) == ([0, 20], [0, 30])
        assert (first["batch"].unique().tolist(), second["batch"].unique().tolist()) == ([0], [0])

    def test_empty_first_scene_is_recognized(self):
        batch = {"coord": COORDS, "offset": torch.tensor([0, 20, 50]), "name": ["empty", "a", "b"]}
        parts = mk.points.split_packed(batch, 2)
        assert [part["offset"].tolist() for part in parts] == [[0, 20], [30]]
        assert [part["name"] for part in parts] == [["empty", "a"], ["b"]]


def test_values_in_place_of_an_index():
    for call in (mk.points.first_points, lambda x: list(mk.points.fragments(x)), lambda x: mk.points.voxel_mean(x, x)):
        with pytest.raises(mk.errors.InputTypeError, match=r"expected a GridIndex\. Way out: build it .*from_coords\("):
            call(torch.zeros(5, 3))
