"""Lightning's ways of running a module: several processes, mixed precision, torch.compile, manual steps, its tuner."""

import pytest
import torch

L = pytest.importorskip("lightning")

from lightning.pytorch.plugins.precision import MixedPrecision  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset  # noqa: E402

import memkit as mk  # noqa: E402
from memkit._torch.compiler import count_graphs  # noqa: E402
from memkit.integrations.lightning import MemoryCallback, MemoryEfficientModule  # noqa: E402
from tests.helpers import assert_refused  # noqa: E402
from tests.integrations.test_lightning import QUIET, WithFaults, pytestmark  # noqa: E402, F401 - the same of Lightning's words
from tests.train.faults import FailingOperator  # noqa: E402


@pytest.fixture(autouse=True)
def same_number_of_threads():
    """Lightning's strategies set torch's number of threads, for good."""
    yield
    torch.set_num_threads(1)


class Net:
    """A body for both kinds of LightningModule."""

    def __init__(self, faults=(), batch_size=8):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.faults, self.batch_size = faults, batch_size

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss, on_epoch=True, sync_dist=True, batch_size=len(x))
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(0)
        data = TensorDataset(torch.randn(64, 4, generator=generator), torch.randn(64, 1, generator=generator))
        # Lightning's own sampler would shuffle.
        sampler = DistributedSampler(data, shuffle=False) if torch.distributed.is_initialized() else None
        return DataLoader(data, batch_size=self.batch_size, sampler=sampler)


class Plain(Net, L.LightningModule):
    pass


class InParts(Net, MemoryEfficientModule):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.split_options = {"num_microbatches": 2}

    def on_train_start(self):
        if self.faults and self.global_rank == 0:
            self._split_loss = WithFaults(self.split_loss, FailingOperator(*self.faults))


def fit(module, **options):
    trainer = L.Trainer(
        max_epochs=1,
        **{"accelerator": "cpu", **QUIET, **options},
    )
    trainer.fit(module)
    own = module if isinstance(module, L.LightningModule) else module._orig_mod
    return dict(own.net.named_parameters()), float(trainer.callback_metrics["loss"])


def test_half_precision_is_scaled_on_the_way():
    def half():
        return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**12))

    class Tiny(InParts):  # its gradients vanish in float16 without the scale
        def training_step(self, batch, batch_idx):
            return nn.functional.mse_loss(self.net(batch[0]), batch[1]) * 1e-6

    class TinyPlain(Plain):
        training_step = Tiny.training_step.__wrapped__

    def step(module):
        before = [p.detach().clone() for p in module.parameters()]
        options = {"max_epochs": 1, "accelerator": "cpu", "plugins": half(), **QUIET}
        L.Trainer(**options).fit(module)
        return [after.detach() - b for after, b in zip(module.parameters(), before, strict=True)]

    for module in (Tiny, TinyPlain):
        module.configure_optimizers = lambda self: torch.optim.SGD(self.parameters(), lr=1e5)
    torch.testing.assert_close(step(Tiny()), step(TinyPlain()), rtol=0.02, atol=1e-3)


class Gan(L.LightningModule):
    """Two networks, stepped by hand; ``split`` is called for each loss."""

    def __init__(self, split_options=None):
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.generator, self.critic = nn.Linear(4, 4), nn.Linear(4, 1)
        self.split_options = split_options

    def configure_optimizers(self):
        return [torch.optim.SGD(each.parameters(), lr=0.05) for each in (self.generator, self.critic)]

    def on_fit_start(self):
        if self.split_options is not None:
            self.split_g = mk.SplitLoss(self.generator, **self.split_options)
            self.split_c = mk.SplitLoss(self.critic, **self.split_options)

    def critic_loss(self, critic, x):
        return (critic(self.generator(x).detach()) - critic(x)).mean() + critic.weight.square().sum()

    def generator_loss(self, generator, x):
        return -self.critic(generator(x)).mean()

    def training_step(self, batch, batch_idx):
        x, _ = batch
        step_g, step_c = self.optimizers()
        for optimizer, network, loss_fn in (
            (step_c, self.critic, self.critic_loss),
            (step_g, self.generator, self.generator_loss),
        ):
            optimizer.zero_grad()
            self.toggle_optimizer(optimizer)
            if self.split_options is None:
                loss = loss_fn(network, x)
            else:
                split = self.split_g if network is self.generator else self.split_c
                loss = split(x, loss_fn)
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    train_dataloader = Net.train_dataloader
    batch_size = 8


def test_manual_steps_take_a_split_loss_for_each_network():
    networks = []
    for options in (None, {"num_microbatches": 3}):
        gan = Gan(options)
        L.Trainer(max_epochs=1, accelerator="cpu", **QUIET).fit(gan)
        networks.append(gan.state_dict())
    torch.testing.assert_close(networks[1], networks[0])


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")  # Lightning calls it experimental
def test_rejects_unsplittable_step_with_way_out():
    class FromIterator(InParts):
        def training_step(self, dataloader_iter):
            return None

    module = InParts()
    module.automatic_optimization = False
    with pytest.raises(mk.errors.ConfigError, match=r"automatic_optimization=False.*memkit.SplitLoss for each network"):
        fit(module)
    assert_refused(lambda: fit(FromIterator()), mk.errors.ConfigError, "dataloader_iter")


@pytest.fixture
def ranks(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")  # Lightning sets them, and leaves them: now they go in the end
        monkeypatch.delenv(name)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_rejects_sharding_strategy(ranks):
    class Sharded(InParts):
        def configure_model(self):
            fully_shard(self.net, mesh=init_device_mesh("cpu", (1,)))

    with pytest.raises(mk.errors.ConfigError, match=r"ModelParallelStrategy.*MemoryEfficientTrainingWrapper"):
        fit(Sharded(), devices=1, strategy=ModelParallelStrategy(process_group_backend="gloo"))


@pytest.mark.slow
def test_batch_size_finder_sees_out_of_memory():
    from lightning.pytorch.tuner import Tuner

    class Limited(InParts):
        def __init__(self):
            super().__init__()
            self.split_options = {"on_oom": "raise"}

        def training_step(self, batch, batch_idx):
            if len(batch[0]) > 20:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (a planted fault).")
            return super().training_step(batch, batch_idx)

    trainer = L.Trainer(max_epochs=1, accelerator="cpu", **QUIET)
    assert Tuner(trainer).scale_batch_size(Limited(), init_val=4) == 16


@pytest.mark.slow
def test_a_rank_recovers_alone_under_ddp(ranks):
    strategy = DDPStrategy(start_method="spawn", process_group_backend="gloo")
    parts = fit(InParts((5, 300)), accumulate_grad_batches=2, devices=2, strategy=strategy)
    torch.testing.assert_close(parts, fit(Plain(batch_size=16), accumulate_grad_batches=2))


class Uneven(Plain):
    """Two ranks whose batches have different numbers of rows; groups of two batches and of one."""

    ROWS = (((0, 1, 2, 3), (4, 5, 6, 7), (8,)), ((9, 10), (11, 12, 13), (14, 15, 16)))

    def train_dataloader(self):
        return DataLoader(super().train_dataloader().dataset, batch_sampler=self.ROWS[self.global_rank])

    def on_train_end(self):
        both = self.all_gather(torch.cat([each.detach().flatten() for each in self.parameters()]))
        assert torch.equal(both[0], both[1]), "replicas that differ"


@pytest.mark.slow
def test_exact_accumulation_weighs_the_rows_of_all_ranks_alike(ranks):
    found, _ = fit(
        Uneven(),
        accumulate_grad_batches=2,
        devices=2,
        strategy=DDPStrategy(start_method="spawn", process_group_backend="gloo"),
        use_distributed_sampler=False,
        callbacks=[MemoryCallback(exact_accumulation=True)],
    )
    twin = Uneven()
    optimizer = twin.configure_optimizers()
    for group in (slice(0, 2), slice(2, 3)):
        rows = [row for rank in twin.ROWS for batch in rank[group] for row in batch]
        x, y = (tensor[rows] for tensor in Plain.train_dataloader(twin).dataset.tensors)
        optimizer.zero_grad()
        nn.functional.mse_loss(twin.net(x), y).backward()
        optimizer.step()
    torch.testing.assert_close(found, dict(twin.net.named_parameters()))


@pytest.mark.slow
# torch.compile looks at .grad of tensors that are no leaves; it hides the warning, but not where warnings are errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_compiled_module_runs_compiled_parts():
    plain = fit(Plain())  # Lightning's own log fails in a compiled step, where torch.compile cannot read signatures
    before = count_graphs()
    torch.testing.assert_close(fit(torch.compile(InParts(), backend="eager")), plain)
    assert count_graphs() > before
