"""Checkpointed blocks: bit-equal gradients, randomness and buffers; twice the forward; fewer saved bytes; no trace."""

import contextlib
import copy
import pickle
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import memkit as mk
from memkit._core.errors import StateError
from memkit.train.blocks import choose_blocks
from memkit.train.checkpointing import Checkpointing
from tests.helpers import assert_refused, assert_same, gradients
from tests.toys import mean_square, mlp, out_of_memory, trainer_of


class Block(nn.Module):
    """Everything that a careless recomputation would get wrong."""

    def __init__(self, width=8):
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(width, width))
        self.norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(0.3)
        self.out = nn.Linear(width, width)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("table", torch.arange(float(width)))

    def forward(self, x, *, scale=1.0):
        self.calls += 1
        x = self.dropout(torch.relu(self.norm(self.linear(x + self.table))))
        return scale * self.out(x) * (1 + 0.1 * random.random()) + 0.1 * np.random.normal()


class Net(nn.Module):
    def __init__(self, num_blocks=3):
        super().__init__()
        self.enter = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x, scale=0.5)
        return self.head(x)


def seed():
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)


def run(model, *, steps=2):
    """Two steps of forward and backward; everything that must not depend on checkpointing."""
    seed()
    outputs = []
    for _ in range(steps):
        loss = model(torch.randn(6, 4)).pow(2).mean()
        loss.backward()
        outputs.append(loss.detach())
    draws = [torch.rand(1), torch.tensor(random.random()), torch.tensor(np.random.random())]
    return outputs, gradients(model), dict(model.named_buffers()), draws


@pytest.mark.parametrize(
    "choice", ["auto", ["blocks.*"], ["blocks"], ["blocks.0", "blocks.2"], lambda name, _: "blocks." in name]
)
def test_bit_equal_to_the_plain_model(choice):
    torch.manual_seed(0)
    plain = Net()
    model = copy.deepcopy(plain)
    keys = list(model.state_dict())
    checkpointing = Checkpointing(model, choice)
    assert all(name.startswith("blocks.") and name.count(".") == 1 for name in checkpointing.blocks)
    assert_same(run(model), run(plain))
    assert list(model.state_dict()) == keys
    assert type(model.blocks[0]) is Block
    checkpointing.close()
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_torch_alone_gets_buffers_and_foreign_randomness_wrong():
    """Negative control: the same blocks under `torch.utils.checkpoint`."""
    torch.manual_seed(0)
    plain = Net()
    model = copy.deepcopy(plain)
    for block in model.blocks:
        forward = type(block).forward.__get__(block)
        block.forward = lambda *args, f=forward, **kwargs: checkpoint(f, *args, use_reentrant=False, **kwargs)
    got, want = run(model), run(plain)
    assert got[2]["blocks.0.calls"] == 4
    assert want[2]["blocks.0.calls"] == 2
    assert not torch.equal(got[2]["blocks.0.norm.running_mean"], want[2]["blocks.0.norm.running_mean"])
    assert any(not torch.equal(a, b) for a, b in zip(got[1], want[1], strict=True))


def test_torch_alone_refuses_a_kept_graph_and_a_change_in_place():
    """Negative control for what `KeptResults` does otherwise."""
    layer = nn.Linear(4, 4)
    keep = [torch.ops.aten.addmm.default]
    for change, again, message in (
        (torch.relu_, False, "has been mutated"),
        (torch.relu, True, "backward an extra time"),
    ):

        def contexts():
            return create_selective_checkpoint_contexts(keep)

        x = torch.randn(2, 4, requires_grad=True)
        out = checkpoint(lambda x, f=change: f(layer(x)).exp(), x, use_reentrant=False, context_fn=contexts)
        with pytest.raises(RuntimeError, match=message):
            out.sum().backward(retain_graph=again)
            out.sum().backward()


def test_a_kept_graph_is_recomputed_for_each_backward():
    torch.manual_seed(0)
    plain = Net()
    model = copy.deepcopy(plain)
    Checkpointing(model, "auto")
    for each in (plain, model):
        seed()
        loss = each(torch.randn(6, 4)).pow(2).mean()
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same(gradients(model), gradients(plain))
    assert_same(dict(model.named_buffers()), dict(plain.named_buffers()))


@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_runs_its_own_blocks(how):
    """An EMA is a deep copy: a closure would go on calling the original's blocks."""
    model = mlp_blocks()
    Checkpointing(model, "auto")
    x = torch.randn(6, 32)
    want = model(x)
    twin = how(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    torch.testing.assert_close(twin(x), want)
    twin(x).sum().backward()
    assert all(parameter.grad is not None for parameter in twin.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())


def mlp_blocks(width=32, num_blocks=4):
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.GELU()) for _ in range(num_blocks)
    ]
    return nn.Sequential(*blocks)


class TestChoice:
    def test_auto_takes_the_repeated_blocks(self):
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        model = nn.Sequential(nn.Linear(4, 8), nn.TransformerEncoder(layer, 3, enable_nested_tensor=False))
        assert list(choose_blocks(model, "auto")) == ["1.layers.0", "1.layers.1", "1.layers.2"]

    def test_auto_goes_into_a_network_that_holds_the_blocks_alone(self):
        """As EDM's preconditioning, or a LightningModule's network, whose blocks are attributes or in a ModuleDict."""

        class Wrapped(nn.Module):
            def __init__(self, **parts):
                super().__init__()
                for name, part in parts.items():
                    self.add_module(name, part)

        def unet():
            parts = [nn.ModuleDict({"in": nn.Linear(8, 8), "0": Block(), "1": Block()}) for _ in range(2)]
            return Wrapped(enter=mlp(4, 8, 8), encoder=parts[0], decoder=parts[1])

        inner = ["encoder.0", "encoder.1", "decoder.0", "decoder.1"]
        assert list(choose_blocks(unet(), "auto")) == inner
        assert list(choose_blocks(Wrapped(model=unet()), "auto")) == [f"model.{name}" for name in inner]
        nested = Wrapped(module=Wrapped(model=unet()), enter=nn.Linear(4, 4))
        assert list(choose_blocks(nested, "auto")) == [f"module.model.{name}" for name in inner]
        with_head = Wrapped(backbone=unet(), head=mlp(8, 8, 1))
        assert list(choose_blocks(with_head, "auto")) == [*(f"backbone.{name}" for name in inner), "head"]

        class Pair(Wrapped):
            """Another class, so that none occurs more than once."""

        towers = Wrapped(one=unet(), other=Pair(first=Block(), second=Block()))
        names = [*(f"one.{name}" for name in inner), "other.first", "other.second"]
        assert list(choose_blocks(towers, "auto")) == names

    def test_auto_keeps_a_network_without_blocks_of_most_of_its_layers(self):
        assert list(choose_blocks(nn.Sequential(nn.Linear(4, 4), mlp(4, 8, 8)), "auto")) == ["1"]  # layers alone
        decoder = nn.TransformerDecoderLayer(8, 2, 16, batch_first=True)  # of nine layers, four are its attentions'
        assert list(choose_blocks(nn.ModuleList([decoder, mlp(8, 8, 8)]), "auto")) == ["0", "1"]
        alone = nn.Sequential(nn.Linear(8, 8), decoder)  # the whole as one block would save nothing
        assert list(choose_blocks(alone, "auto")) == ["1.self_attn", "1.multihead_attn"]

    def test_a_container_with_a_forward_of_its_own_is_one_block(self):
        """As torchvision's IntermediateLayerGetter: its inplace ReLU may not begin a block, but may be inside one."""

        class Getter(nn.ModuleDict):
            def forward(self, x):
                found = {}
                for name, module in self.items():
                    found[name] = x = module(x)
                return found

        class Stages(nn.ModuleList):
            def forward(self, x):
                for each in self:
                    x = each(x)
                return x

        class Halves(nn.Sequential):
            def forward(self, x):
                return self[1](self[0](x) / 2)

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.backbone = Getter({"0": nn.Linear(4, 8), "1": nn.BatchNorm1d(8), "2": nn.ReLU(inplace=True)})
                self.stages = Stages([mlp(8, 8, 8), nn.ReLU(inplace=True), mlp(8, 8, 8)])
                self.halves = Halves(mlp(8, 8, 8), nn.Linear(8, 1))

            def forward(self, x):
                return self.halves(self.stages(self.backbone(x)["2"]))

        names = ["backbone", "stages", "halves"]
        torch.manual_seed(0)
        plain, x = Model(), torch.randn(5, 4)
        for choice in (names, [Getter, Stages, Halves], dict.fromkeys(names, "selective")):
            model = copy.deepcopy(plain)
            with Checkpointing(model, choice) as checkpointing:
                assert list(checkpointing.blocks) == names
                model(x).square().mean().backward()
            twin = copy.deepcopy(plain)
            twin(x).square().mean().backward()
            assert_same(gradients(model), gradients(twin))
        with Checkpointing(Model().backbone, "*") as checkpointing:
            assert list(checkpointing.blocks) == ["0", "1", "2"]
        # By itself, memkit looks inside for the repeated blocks, as into a Sequential: the layers of DenseNet's blocks.
        dense = nn.Sequential(*(Getter({"0": mlp(8, 8, 8), "1": mlp(8, 8, 8)}) for _ in range(2)))
        assert list(choose_blocks(dense, "auto")) == ["0.0", "0.1", "1.0", "1.1"]

    def test_unmatched_pattern_suggests_names(self):
        with pytest.raises(mk.errors.ConfigError, match=r"'block.0', which matches no module of Net.*'blocks.0'"):
            choose_blocks(Net(), ["block.0"])

    def test_model_without_blocks(self):
        with pytest.raises(mk.errors.ConfigError, match="selects no block of Linear"):
            choose_blocks(nn.Linear(2, 2), "auto")

    def test_error_quotes_true_as_written(self):
        with pytest.raises(mk.errors.ConfigError, match=r"^checkpoint=True: .* Way out: omit checkpoint"):
            trainer_of(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), checkpoint=True)

    def test_through_the_wrapper(self):
        model = Net()
        trainer = trainer_of(model, checkpoint=["blocks.*"])
        assert trainer.checkpointed_blocks == ("blocks.0", "blocks.1", "blocks.2")
        assert trainer.train_step(torch.randn(4, 4), mean_square).stepped
        trainer.close()
        assert not any("forward" in module.__dict__ for module in model.modules())


def encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoder(layer, 3, enable_nested_tensor=False))


LAYERS = ["1.layers.0", "1.layers.1", "1.layers.2"]
LAYER = nn.TransformerEncoderLayer


class TestForms:
    @pytest.mark.parametrize(
        ("choice", "chosen"),
        [
            (lambda _: True, dict.fromkeys(LAYERS, "full")),
            (lambda _: False, {}),
            (lambda _: LAYER, dict.fromkeys(LAYERS, "full")),
            (lambda _: (LAYER,), dict.fromkeys(LAYERS, "full")),
            (lambda _: [LAYER, "0"], dict.fromkeys([*LAYERS, "0"], "full")),
            (lambda model: model[1], {"1": "full"}),
            (lambda model: model[1].layers, dict.fromkeys(LAYERS, "full")),
            (lambda model: [model[1].layers[0], model[1].layers[2]], {LAYERS[0]: "full", LAYERS[2]: "full"}),
            (lambda _: {LAYER: "selective"}, dict.fromkeys(LAYERS, "selective")),
            (
                lambda model: {LAYER: "selective", model[1].layers[1]: "offload"},
                dict.fromkeys(LAYERS, "selective") | {LAYERS[1]: "offload"},
            ),
            (
                lambda _: {LAYER: "selective", LAYERS[1]: "full"},
                dict.fromkeys(LAYERS, "selective") | {LAYERS[1]: "full"},
            ),
            (lambda _: lambda name, module: isinstance(module, LAYER), dict.fromkeys(LAYERS, "full")),
        ],
    )
    def test_classes_modules_and_truth_values(self, choice, chosen):
        model = encoder()
        with Checkpointing(model, choice(model)) as blocks:
            assert blocks.treatments == chosen
        assert not any("forward" in module.__dict__ for module in model.modules())

    def test_without_a_choice(self):
        with Checkpointing(encoder()) as blocks:
            assert list(blocks.blocks) == LAYERS

    @pytest.mark.parametrize(("checkpoint", "chosen"), [(True, LAYERS), (False, []), (LAYER, LAYERS)])
    def test_through_the_wrapper(self, checkpoint, chosen):
        trainer = trainer_of(encoder(), checkpoint=checkpoint)
        assert list(trainer.checkpointed_blocks) == chosen
        assert trainer.train_step(torch.randn(4, 5, 8), mean_square).stepped

    @pytest.mark.parametrize(
        ("choice", "ending"),
        [
            (nn.Conv2d, "write Checkpointing(model, ['0', '1'])"),
            ("Auto", "write Checkpointing(model, 'auto')"),
            ("selective", f"write Checkpointing(model, {dict.fromkeys(LAYERS, 'selective')})"),
            (None, "write Checkpointing(model, 'auto')"),
            (4, "write Checkpointing(model, 'auto')"),
            ([], f"write Checkpointing(model, {LAYERS})"),
            (nn.Linear(2, 2), "write Checkpointing(model, ['0', '1'])"),
            ({LAYER: "Full"}, "write Checkpointing(model, {TransformerEncoderLayer: 'full'})"),
            ({LAYER: LAYER}, "write Checkpointing(model, {TransformerEncoderLayer: 'full'})"),
            (lambda module: True, "write lambda name, module: ..."),
            (lambda name, module: False, f"write Checkpointing(model, {LAYERS})"),
            (
                {LAYER: "full", nn.TransformerEncoder: "offload"},
                "write Checkpointing(model, {TransformerEncoder: 'offload'})",
            ),
        ],
    )
    def test_a_misuse_ends_in_the_line_to_write(self, choice, ending):
        with pytest.raises(mk.errors.ConfigError) as caught:
            Checkpointing(encoder(), choice)
        assert str(caught.value).endswith(ending), str(caught.value)

    @pytest.mark.parametrize(
        ("call", "ending"),
        [
            (lambda model: Checkpointing(), "write Checkpointing(model)"),
            (lambda model: Checkpointing("auto", model), "write Checkpointing(model, 'auto')"),
            (lambda model: Checkpointing(model, layers=["1"]), "write Checkpointing(model, choice=['1'])"),
            (
                lambda model: Checkpointing(model, use_reentrant=False),
                "restore the random state; write Checkpointing(model)",
            ),
            (
                lambda model: Checkpointing(model)(torch.ones(1, 5, 8)),
                "write model(...): the model is treated in place",
            ),
        ],
    )
    def test_a_wrong_call_ends_in_the_line_to_write(self, call, ending):
        with pytest.raises(mk.errors.InputTypeError) as caught:
            call(encoder())
        assert str(caught.value).endswith(ending), str(caught.value)

    def test_the_model_itself_is_led_to_its_blocks(self):
        model = encoder()
        with pytest.raises(mk.errors.ConfigError, match=r"got the whole Sequential.*write checkpoint=\['1.layers.0'"):
            trainer_of(model, checkpoint=model)


class TestMapping:
    def choose(self, choice):
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        return Checkpointing(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), choice).treatments

    def test_a_blocks_own_name_counts_before_patterns(self):
        assert self.choose({"layers.1": "offload", "layers.*": "full"}) == {
            "layers.0": "full",
            "layers.1": "offload",
            "layers.2": "full",
        }
        assert self.choose({"layers": "selective", "layers.1": "full"})["layers.1"] == "full"
        assert self.choose({"layers": "selective"}) == {f"layers.{k}": "selective" for k in range(3)}
        assert self.choose({"layers.[01]": "full", "layers.1": "full"}) == {"layers.0": "full", "layers.1": "full"}
        assert self.choose({}) == {}

    @pytest.mark.parametrize(
        ("choice", "message"),
        [
            ({"layers.*": "full", "layers.[12]": "offload"}, r"differ on the block 'layers.1'.*'layers.1': 'full'"),
            ({"layers.0": "full", "layers.0.linear1": "offload"}, r"'layers.0.linear1', whose modules all lie inside"),
            ({"layers.0": "disk"}, r"'disk' for 'layers.0'; expected one of \('full', 'selective', 'offload'\)"),
            ({"layer.0": "full"}, r"'layer.0', which matches no module of TransformerEncoder.*'layers.0'"),
            ({"layer.0": "offload"}, r"write .*\{'layers.0': 'offload'[^}]*\}"),  # not a list, which means "full"
            ({0: "full"}, "patterns as strings"),
            ([0], "patterns as strings"),
            (4, "patterns as strings"),
        ],
    )
    def test_refused(self, choice, message):
        assert_refused(lambda: self.choose(choice), mk.errors.ConfigError, message)

    def test_rejects_block_with_other_treatment(self):
        model = mlp_blocks()
        with Checkpointing(model, {"[0-3]": "full"}):
            with Checkpointing(model, {"0": "full"}):
                pass
            with pytest.raises(mk.errors.ConfigError, match="already has the treatment 'full'"):
                Checkpointing(model, {"0": "offload"})
            assert len([1 for block in model if "forward" in block.__dict__]) == 4


def test_restores_instance_forward():
    model = Net()
    own = model.blocks[1].forward
    model.blocks[1].forward = lambda x, scale: own(x, scale=2 * scale)
    mine = model.blocks[1].__dict__["forward"]
    checkpointing = Checkpointing(model, "auto")
    run(model)
    checkpointing.close()
    assert model.blocks[1].__dict__["forward"] is mine


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch.compile reads it
def test_compiled_model():
    torch.manual_seed(0)
    plain = mlp_blocks()
    model = copy.deepcopy(plain)
    Checkpointing(model, "auto")
    compiled = torch.compile(model, backend="aot_eager")
    x = torch.randn(4, 32)
    compiled(x).pow(2).sum().backward()
    plain(x).pow(2).sum().backward()
    torch.testing.assert_close(gradients(model), gradients(plain))


def test_model_without_submodules_has_no_names():
    error = assert_refused(lambda: mk.Checkpointing(nn.Linear(2, 2), "all"), mk.errors.ConfigError, "matches no module")
    assert "omit checkpoint" in error.fix


class Counting(nn.Module):
    """Changes an attribute and, in place, buffers and statistics."""

    def __init__(self):
        super().__init__()
        self.norm, self.num_calls = nn.BatchNorm1d(6), 0
        self.register_buffer("mean", torch.ones(6))

    def forward(self, x):
        self.num_calls += 1
        self.mean.mul_(0.9).add_(x.detach().mean(0))
        return self.norm(x) * self.mean.clone() * self.num_calls


CHANGING = {
    "an attribute and buffers": Counting,
    "spectral norm by hooks": lambda: nn.utils.spectral_norm(nn.Linear(6, 6)),  # its weight is an attribute
}


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("treatment", ["full", "selective", "offload"])
@pytest.mark.parametrize("make", CHANGING.values(), ids=CHANGING)
def test_buffers_change_once_with_changing_attributes(make, treatment):
    def trained(is_treated):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(make(), nn.Tanh(), nn.Linear(6, 6))).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with mk.Checkpointing(model, {"1": treatment}) if is_treated else contextlib.nullcontext():
            for _ in range(3):
                model(torch.randn(4, 6, dtype=torch.float64)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return [*model.parameters(), *model.buffers()]

    assert_same(trained(is_treated=True), trained(is_treated=False))


class FullAt(TorchDispatchMode):
    """Memory runs out at the nth copy of a tensor."""

    def __init__(self, left):
        super().__init__()
        self.left = left

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.clone.default:
            self.left -= 1
            if not self.left:
                out_of_memory()
        return func(*args, **(kwargs or {}))


def test_a_repeated_forward_that_finds_no_memory_leaves_buffers_and_attributes():
    """Others hold the buffers as well: averages of the model, DDP."""
    model = nn.Sequential(nn.Sequential(Counting(), nn.Linear(6, 6)), nn.Linear(6, 1))
    block = model[0][0]
    buffers = dict(model.named_buffers())
    with mk.Checkpointing(model, ["0"]):
        for num_copies in range(1, 20):
            loss = model(torch.randn(4, 6) + 5).sum()
            after = {name: buffer.clone() for name, buffer in buffers.items()}
            full = FullAt(num_copies)
            with contextlib.suppress(torch.OutOfMemoryError), full:
                loss.backward()
            assert all(now is buffers[name] for name, now in model.named_buffers())
            assert_same(dict(buffers), after)
            assert block.num_calls == num_copies
            if full.left > 0:
                break
    assert 5 < num_copies < 19  # at least one for each buffer


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("treatment", [None, "full", "selective"])
def test_a_step_between_forward_and_backward_is_refused_as_by_autograd(treatment, is_frozen):
    """As of a GAN's other half, which may be frozen in this forward; a step after backward, and no step, are right."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(2))).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    expected = gradient_of_input(model)
    with mk.Checkpointing(model, {"*": treatment} if treatment else {}):
        model.requires_grad_(not is_frozen)
        x, loss = loss_of_input(model)
        model.requires_grad_(True)
        model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
        loss.backward(retain_graph=True)
        assert_same(x.grad, expected)
        optimizer.step()
        if treatment is None:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        else:
            assert_refused(loss.backward, StateError, "changed in place since the forward: [02].(weight|bias)", "again")
        found = gradient_of_input(model)
    assert_same(found, gradient_of_input(model))


def loss_of_input(model):
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(2, 6).requires_grad_()
    return x, model(x).square().mean()


def gradient_of_input(model):
    x, loss = loss_of_input(model)
    return torch.autograd.grad(loss, x)[0]


class Decaying(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.mul_(0.9)
        return super().forward(x)


@pytest.mark.parametrize("treatment", ["full", "selective"])
def test_rejects_block_changing_its_parameters(treatment):
    """It would change them twice in a step, and train something else."""
    model = nn.Sequential(nn.Sequential(Decaying(6, 6), nn.Tanh()), nn.Linear(6, 1))
    before = model[0][0].weight.detach().clone()
    with mk.Checkpointing(model, {"0": treatment}):
        loss = model(torch.randn(4, 6)).sum()
        assert_refused(loss.backward, StateError, "changes its own parameters", "checkpoint 'offload'")
    assert torch.equal(model[0][0].weight, before * 0.9)


def test_an_embedding_with_a_largest_norm_changes_its_weight_once():
    """That it does so again when it is repeated changes nothing."""
    block = nn.Sequential(nn.Embedding(9, 6, max_norm=0.5), nn.Tanh(), nn.Linear(6, 6))
    model, tokens = nn.Sequential(block, nn.Linear(6, 1)), torch.arange(8).view(2, 4)
    twin = copy.deepcopy(model)
    with mk.Checkpointing(model, {"0": "full"}):
        model(tokens).square().sum().backward()
    twin(tokens).square().sum().backward()
    assert_same([each.grad for each in model.parameters()], [each.grad for each in twin.parameters()])
    assert_same(list(model.parameters()), list(twin.parameters()))


def test_a_module_under_two_names_is_inside_the_block_that_holds_it():
    """As BYOL's network, which is an attribute of the learner and of its online encoder."""

    class Encoder(nn.Module):
        def __init__(self, net):
            super().__init__()
            self.net, self.head = net, mlp(8, 16, 8)

        def forward(self, x):
            return self.head(self.net(x))

    class Learner(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp(6, 8, 8)
            self.online = Encoder(self.net)
            self.other = Encoder(mlp(6, 8, 8))

        def forward(self, x):
            return self.online(x) - self.other(x)

    model = Learner()
    for choice in ("auto", ["net", "o*"]):
        with mk.Checkpointing(model, choice) as checkpointing:
            assert list(checkpointing.blocks) == ["online", "other"]
            model(torch.randn(5, 6)).square().mean().backward()  # without a warning of a block that runs three times
    with pytest.raises(mk.errors.ConfigError, match="inside other chosen blocks"):
        mk.Checkpointing(model, {"net": "full", "online": "selective"})
