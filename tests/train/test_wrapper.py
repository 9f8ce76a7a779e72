"""The wrapper in a loop: exact steps, precision, schedules, evaluation, packed batches, GANs, no trace afterwards."""

import contextlib
import copy
import queue
import warnings
from collections import UserDict

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import memkit as mk
from memkit._torch import tensors
from memkit.errors import ConfigError, FileFormatError, InputError, InputTypeError, StateError
from tests.helpers import assert_refused
from tests.toys import fits, mean_square, mlp, out_of_memory, trainer_of


def make(width=16, **keywords):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, mk.MemoryEfficientTrainingWrapper(model, optimizer, **keywords)


def batches(num=3, rows=10):
    generator = torch.Generator().manual_seed(5)
    for _ in range(num):
        x = torch.randn(rows, 4, dtype=torch.float64, generator=generator)
        y = torch.randint(0, 3, (rows,), generator=generator)
        y[::3] = -100
        yield x, y


def row_loss(model, micro):
    return model(micro[0]).pow(2).mean()


def token_loss(model, micro):
    loss_sum = F.cross_entropy(model(micro[0]), micro[1], reduction="sum")
    return mk.Loss(sum=loss_sum, count=(micro[1] != -100).sum())


def train_plainly(loss_fn):
    model, optimizer, _ = make()
    losses = []
    for x, y in batches():
        loss = loss_fn(model, (x, y))
        loss = loss.average() if isinstance(loss, mk.Loss) else loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return dict(model.state_dict()), losses


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 10, 25])
@pytest.mark.parametrize("loss_fn", [row_loss, token_loss])
def test_a_step_is_the_full_batch_step(steps, loss_fn):
    model, _, trainer = make(accumulation_steps=steps)
    results = [trainer.train_step(batch, loss_fn) for batch in batches()]
    state, losses = train_plainly(loss_fn)
    torch.testing.assert_close(dict(model.state_dict()), state, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close([result.loss for result in results], losses, rtol=1e-12, atol=0)
    assert [result.num_microbatches for result in results] == [min(steps, 10)] * 3
    assert trainer.num_steps == 3


def test_microbatches_keep_own_loop():
    model, _, trainer = make(accumulation_steps=4)
    for x, y in batches():
        for attempt in trainer.microbatches((x, y)):
            with attempt as (micro_x, micro_y):
                with trainer.autocast():
                    loss = F.cross_entropy(model(micro_x), micro_y, reduction="sum")
                trainer.backward(loss, count=(micro_y != -100).sum(), reduction="sum")
        assert trainer.step() is True
    state, _ = train_plainly(token_loss)
    torch.testing.assert_close(dict(model.state_dict()), state, rtol=1e-10, atol=1e-12)


def test_the_block_runs_again_after_an_out_of_memory():
    model, _, trainer = make()
    sizes = []
    for x, y in batches():
        for attempt in trainer.microbatches((x, y)):
            with attempt as (micro_x, _):
                if not attempt.is_check:
                    sizes.append(len(micro_x))
                if len(micro_x) > 4:
                    raise MemoryError
                trainer.backward(model(micro_x).pow(2).mean())
        trainer.step()
    assert sizes[:8] == [10, 5, 2, 2, 1, 2, 2, 1]
    state, _ = train_plainly(row_loss)
    torch.testing.assert_close(dict(model.state_dict()), state, rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore:Recovery from out-of-memory")  # its loss function notes what it holds
def test_failed_attempt_is_freed_before_the_next():
    import weakref

    _, _, trainer = make(width=8)
    alive, kept = [], []

    def loss_fn(model, micro):
        alive.append(sum(reference() is not None for reference in kept))
        hidden = model[0](micro[0])
        cycle = [hidden]
        cycle.append(cycle)
        kept.append(weakref.ref(hidden))
        if len(micro[0]) > 3:
            out_of_memory()
        return model[2](hidden).pow(2).mean()

    trainer.train_step(next(batches()), loss_fn)
    assert alive[:2] == [0, 0]


class TestSchedulesAndAverages:
    @pytest.mark.filterwarnings("ignore:precision='fp16-mixed' on a CPU")
    def test_follow_real_steps_only(self):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        average = torch.optim.swa_utils.AveragedModel(model)
        trainer = mk.MemoryEfficientTrainingWrapper(
            model, optimizer, precision="fp16-mixed", scheduler=scheduler, average=average, max_grad_norm=1.0
        )
        scale = [1.0, float("inf"), 1.0]
        stepped = []
        for factor, (x, _) in zip(scale, batches(), strict=True):
            result = trainer.train_step(x.float(), lambda model, x, f=factor: (model(x) * f).float().pow(2).mean())
            stepped.append(result.stepped)
        assert stepped[1] is False
        assert sum(stepped) == trainer.num_steps == int(average.n_averaged)
        assert scheduler.get_last_lr() == [0.5 ** sum(stepped)]


class TestPrecision:
    @pytest.mark.filterwarnings("ignore:precision='fp16-mixed' on a CPU")
    @pytest.mark.parametrize(("precision", "dtype"), [("bf16-mixed", torch.bfloat16), ("fp16-mixed", torch.float16)])
    def test_mixed(self, precision, dtype):
        model, optimizer, _ = make()
        model.float()
        trainer = mk.MemoryEfficientTrainingWrapper(model, optimizer, precision=precision)
        seen = []

        def loss_fn(model, x):
            out = model(x)
            seen.append(out.dtype)
            return out.float().pow(2).mean()

        assert trainer.train_step(next(batches())[0].float(), loss_fn).stepped
        assert seen == [dtype]
        assert {p.dtype for p in model.parameters()} == {torch.float32}

    def test_bf16_true_converts_and_restores_the_model(self):
        model, optimizer, _ = make()
        model.float()
        ids = [id(p) for p in model.parameters()]
        trainer = mk.MemoryEfficientTrainingWrapper(
            model, optimizer, precision="bf16-true", accumulation_steps=2, probe=False
        )
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        assert trainer.train_step(next(batches())[0].float(), lambda model, x: model(x).float().pow(2).mean()).stepped
        trainer.close()
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert [id(p) for p in model.parameters()] == ids
        assert {p.grad_dtype for p in model.parameters()} == {torch.float32}
        assert model(torch.ones(1, 4)).dtype == torch.float32

    def test_true_converts_frozen_parameters_that_a_model_does_not_list(self):
        class Adapted(nn.Module):
            def __init__(self):
                super().__init__()
                self.base, self.adapter = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)

            def parameters(self, recurse=True):
                return self.adapter.parameters(recurse)

            def forward(self, x):
                return self.base(x) + self.adapter(x)

        model = Adapted()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = mk.MemoryEfficientTrainingWrapper(model, optimizer, precision="bf16-true")
        assert trainer.train_step(torch.ones(2, 4), lambda model, x: model(x).float().mean()).stepped
        assert model.base.weight.dtype is torch.bfloat16
        trainer.close()
        assert model.base.weight.dtype is torch.float32

    @pytest.mark.parametrize("way", ["out of memory", "a budget", "accumulation_steps"])
    def test_true_adds_up_in_float32_however_the_parts_came(self, way):
        torch.manual_seed(0)
        model = nn.Linear(16, 8)
        x = torch.randn(96, 16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        budget = sum(2 * p.numel() for p in model.parameters()) * 2 + 1500 if way == "a budget" else None
        trainer = mk.MemoryEfficientTrainingWrapper(
            model,
            optimizer,
            precision="bf16-true",
            accumulation_steps=96 if way == "accumulation_steps" else 1,
            memory=budget and f"{budget}B",
            probe=way != "out of memory",  # where one row alone fits, there is nothing to compare
        )
        reference = copy.deepcopy(model).double()
        reference(x.bfloat16().double()).pow(2).mean().backward()
        seen = []
        optimizer.register_step_pre_hook(lambda *_: seen.append(model.weight.grad.clone()))

        result = trainer.train_step(x, fits(1, mean_square) if way == "out of memory" else mean_square)
        assert result.num_microbatches > 10
        assert seen[0].dtype == torch.bfloat16
        error = (seen[0] - reference.weight.grad).norm() / reference.weight.grad.norm()
        assert error < 3.5e-3  # where they add up in bfloat16: 4.7e-3 to 9.2e-3

    def test_true_can_be_probed(self):
        """The probe's twin is in float64: its inputs must be too, or nobody sees that the loss compares rows."""
        model = nn.Linear(4, 4)
        trainer = trainer_of(model, precision="bf16-true", accumulation_steps=2)
        with pytest.raises(ConfigError, match="expected a loss that adds up over the rows"):
            trainer.train_step(torch.randn(16, 4), lambda model, x: (model(x) @ model(x).T).softmax(0).diag().mean())

    def test_bf16_true_is_checked_in_float32_after_a_step(self):
        """Sums in float32 leave a parameter with a gradient dtype of its own, to which a look was rounded: refused."""
        model = mlp(6, 32, 32, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        with mk.MemoryEfficientTrainingWrapper(
            model, optimizer, precision="bf16-true", accumulation_steps=2, probe="require"
        ) as trainer:
            for rows in torch.randn(9, 16, 6):
                assert trainer.train_step(rows, mean_square).stepped
            dtypes = {tensors.gradient_dtype(each) for each in model.parameters()}
        assert dtypes == {torch.bfloat16}

    def test_bf16_true_with_float32_norm(self):
        """The first parameter is no measure of the model: the layer after the norm takes what the norm gives."""

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm, self.layer = nn.LayerNorm(4), nn.Linear(4, 2)

            def forward(self, x):
                dtypes.append(x.dtype)
                return self.layer(self.norm(x.float()).to(self.layer.weight.dtype))

        dtypes = []
        model = Model()
        trainer = trainer_of(model, precision="bf16-true")
        model.norm.float()
        trainer.train_step(torch.ones(3, 4), lambda model, x: model(x).sum())
        assert dtypes == [torch.bfloat16]

    def test_true_converts_inputs_in_any_mapping(self):
        class Model(nn.Linear):
            def forward(self, batch):
                return super().forward(batch["x"])

        model = Model(4, 2)
        trainer = trainer_of(model, precision="bf16-true")
        batch = UserDict(x=torch.ones(3, 4))  # as a tokenizer's BatchEncoding is one
        assert trainer.train_step(batch, lambda model, batch: model(batch).sum()).stepped
        assert batch["x"].dtype == torch.float32

    def test_true_says_which_inputs_it_does_not_convert(self):
        class Model(nn.Linear):
            def encode(self, x):
                return super().forward(x)

        trainer = trainer_of(Model(4, 2), precision="bf16-true")
        with pytest.raises(RuntimeError) as caught:
            trainer.train_step(torch.ones(3, 4), lambda model, x: model.encode(x).sum())
        (note,) = caught.value.__notes__
        assert "model.encode(x)" in note
        assert "x.to(torch.bfloat16)" in note
        assert trainer.train_step(torch.ones(3, 4), lambda model, x: model.encode(x.to(torch.bfloat16)).sum()).stepped

    def test_auto_and_none(self):
        trainer = make(precision="auto")[2]
        assert trainer._precision.name in (None, "bf16-mixed")
        assert make()[2]._precision.name is None


def test_a_hidden_state_outside_of_the_batch_is_told_to_be_put_into_it():
    """And there it trains as in one piece, from step to step."""
    torch.manual_seed(0)
    rnn, chunks = nn.GRU(4, 3, batch_first=True).double(), torch.randn(3, 8, 5, 4, dtype=torch.float64)
    h, whole, parts = torch.zeros(1, 8, 3, dtype=torch.float64), copy.deepcopy(rnn), copy.deepcopy(rnn)
    outside = trainer_of(rnn, accumulation_steps=2)
    with pytest.raises(RuntimeError, match="Expected hidden size") as caught:
        outside.train_step(chunks[0], lambda model, x: model(x, h)[0].square().mean())
    (note,) = caught.value.__notes__
    assert "a hidden state) into the batch, with the rows in dimension 0, h.transpose(0, 1), and return" in note

    def loss_fn(model, batch):
        y, after = model(batch[0], batch[1].transpose(0, 1).contiguous())
        return mk.Loss(mean=y.square().mean(), outputs=after.transpose(0, 1))

    for model, num_parts in ((whole, 1), (parts, 2)):
        trainer, state = trainer_of(model, accumulation_steps=num_parts), h.transpose(0, 1)
        for x in chunks:
            state = torch.cat(trainer.train_step((x, state), loss_fn).outputs)
    torch.testing.assert_close(dict(parts.state_dict()), dict(whole.state_dict()), rtol=1e-10, atol=1e-12)


class TestEvaluation:
    def test_modes_come_back_one_by_one(self):
        model, _, trainer = make()
        model.insert(1, nn.BatchNorm1d(16).double().eval())
        model.insert(1, nn.Dropout(0.5))
        modes = [module.training for module in model.modules()]
        with pytest.raises(KeyError), trainer.evaluation():
            assert not any(module.training for module in model.modules())
            assert not model(torch.ones(2, 4).double()).requires_grad
            raise KeyError
        assert [module.training for module in model.modules()] == modes
        assert torch.is_grad_enabled()


class TestPackedBatches:
    @staticmethod
    def split(batch, n):
        """A batch of scenes: points (P, C) with offsets (S,), cut between scenes."""
        points, offsets = batch
        bounds = [0, *offsets.tolist()]
        parts = []
        for scenes in torch.arange(len(offsets)).tensor_split(n):
            if len(scenes):
                start, stop = bounds[scenes[0]], bounds[scenes[-1] + 1]
                parts.append((points[start:stop], offsets[scenes] - start))
        return parts

    @staticmethod
    def loss(model, batch):
        points, offsets = batch
        scenes = model(points).tensor_split(offsets[:-1])
        return mk.Loss(sum=torch.stack([scene.mean(0).pow(2).sum() for scene in scenes]).sum(), count=len(offsets))

    def data(self):
        torch.manual_seed(3)
        return torch.randn(20, 4).double(), torch.tensor([3, 4, 11, 15, 20])

    @pytest.mark.parametrize("capacity", [100, 60, 35])
    def test_scenes_are_never_cut(self, capacity):
        # Where only one scene fits, there is nothing to compare.
        model, _, trainer = make(accumulation_steps=2, split_fn=self.split, probe=capacity > 35)

        def limited(model, batch):
            if batch[0].numel() > capacity:
                out_of_memory()
            return self.loss(model, batch)

        result = trainer.train_step(self.data(), limited)
        plain, optimizer, _ = make()
        self.loss(plain, self.data()).average().backward()
        optimizer.step()
        torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=1e-10, atol=1e-12)
        assert (result.num_ooms > 0) == (capacity < 60)

    @pytest.mark.parametrize(
        ("split_fn", "num_parts", "loss_fn", "error", "words"),
        [
            (split, 2, lambda model, batch: model(batch[0]).mean(), InputError, "no count for a part made by split_fn"),
            (split, 1, out_of_memory, mk.MemkitOutOfMemoryError, "elements.*pass split_fn"),
            # One scene that cannot be cut: the parts are the scene itself and nothing.
            (lambda batch, n: [batch, (batch[0][:0], batch[1][:0])], 1, out_of_memory, mk.MemkitOutOfMemoryError, ""),
            (lambda batch, n: None, 2, loss, InputError, r"split_fn\(batch, 2\): got None"),
        ],
    )
    def test_rejects_untrainable_parts(self, split_fn, num_parts, loss_fn, error, words):
        trainer = make(accumulation_steps=num_parts, split_fn=split_fn)[2]
        assert_refused(lambda: trainer.train_step(self.data(), loss_fn), error, words)


def test_half_precision_losses_do_not_overflow_in_the_mean():
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    trainer = mk.MemoryEfficientTrainingWrapper(model, optimizer, accumulation_steps=2, probe=False)
    result = trainer.train_step(torch.ones(200_000, 1), lambda model, x: (model(x) * 0 + 3).mean(0).half())
    assert result.loss.shape == ()
    assert float(result.loss) == 3.0


def test_two_wrappers_train_a_gan_with_gradient_penalty():
    """Interleaved, split, one of them out of memory: the same as the hand-written loop on whole batches."""

    def nets():
        torch.manual_seed(0)
        disc = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        gen = nn.Linear(2, 4).double()
        return disc, gen, torch.optim.SGD(disc.parameters(), lr=0.1), torch.optim.SGD(gen.parameters(), lr=0.1)

    data = [(torch.randn(6, 4).double(), torch.randn(6, 2).double()) for _ in range(3)]

    def d_loss(disc, gen, real, noise):
        fake = gen(noise).detach()
        return F.softplus(disc(fake)).mean() + F.softplus(-disc(real)).mean() + mk.train.gradient_penalty(disc, real)

    disc, gen, opt_d, opt_g = nets()
    d_trainer = mk.MemoryEfficientTrainingWrapper(disc, opt_d, accumulation_steps=2, probe=False)
    g_trainer = mk.MemoryEfficientTrainingWrapper(gen, opt_g, probe=False)

    g_step = fits(3, lambda gen, noise: F.softplus(-disc(gen(noise))).mean())
    for real, noise in data:
        d_trainer.train_step((real, noise), lambda disc, micro: d_loss(disc, gen, *micro))
        assert g_trainer.train_step(noise, g_step).num_microbatches == 2
    got = dict(disc.state_dict()), dict(gen.state_dict())

    disc, gen, opt_d, opt_g = nets()
    for real, noise in data:
        opt_d.zero_grad()
        d_loss(disc, gen, real, noise).backward()
        opt_d.step()
        opt_g.zero_grad()
        F.softplus(-disc(gen(noise))).mean().backward()
        opt_g.step()
    torch.testing.assert_close(got, (dict(disc.state_dict()), dict(gen.state_dict())), rtol=1e-10, atol=1e-12)


class TestProbe:
    def test_unsplit_batch_is_not_probed(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        trainer = trainer_of(model)
        assert trainer.train_step(torch.randn(8, 4), mean_square).stepped


def enter_without_backward(trainer):
    for attempt in trainer.microbatches(next(batches())):
        with attempt:
            pass


class TestMisuse:
    @pytest.mark.parametrize(
        ("use", "error", "words"),
        [
            (lambda it: it.backward(torch.ones((), requires_grad=True)), StateError, "a call outside of an attempt"),
            (lambda it: list(it.microbatches(next(batches()))), StateError, "never entered"),
            (enter_without_backward, StateError, r"without trainer\.backward"),
            (lambda it: it.train_step(next(batches()), lambda model, micro: 1.5), InputTypeError, "a float"),
            (lambda it: it.load_state_dict({"version": 9}), FileFormatError, "version 9"),
        ],
    )
    def test_is_refused(self, use, error, words):
        trainer = make()[2]
        assert_refused(lambda: use(trainer), error, words)

    def test_backward_twice_for_one_micro_batch(self):
        model, _, trainer = make()
        attempts = trainer.microbatches(next(batches()))
        attempt = next(attempts)
        with (
            pytest.raises(StateError, match=r"a second call for one micro-batch.*add up the losses"),
            attempt as micro,
        ):
            trainer.backward(row_loss(model, micro))
            trainer.backward(row_loss(model, micro))

    def test_a_step_inside_of_the_loop(self):
        model, _, trainer = make(accumulation_steps=2)
        attempts = trainer.microbatches(next(batches()))
        with next(attempts) as micro:
            trainer.backward(row_loss(model, micro))
        assert_refused(lambda: trainer.step(), StateError, "a batch with unfinished micro-batches")
        attempts.close()
        assert trainer.train_step(next(batches()), row_loss).stepped

    def test_a_step_after_a_loop_that_was_left_early(self):
        model, _, trainer = make(accumulation_steps=2, probe=False)
        for attempt in trainer.microbatches(next(batches())):
            with attempt as micro:
                trainer.backward(row_loss(model, micro))
            break
        words = "a loop over trainer.microbatches(batch) that was left early.*else: trainer.step().*count=0"
        assert_refused(lambda: trainer.step(), StateError, words.replace("(", r"\(").replace(")", r"\)"))
        for number, attempt in enumerate(trainer.microbatches(next(batches()))):  # the way out: only the first counts
            with attempt as micro:
                trainer.backward(row_loss(model, micro), count=0 if number else None)
        assert trainer.step()
        plain, optimizer, _ = make()
        row_loss(plain, [each[:5] for each in next(batches())]).backward()
        optimizer.step()
        torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=1e-10, atol=1e-12)
        trainer.train_step(next(batches()), row_loss)
        assert_refused(lambda: trainer.step(), StateError, "no micro-batch since the last step")

    def test_abandoned_loop_does_not_touch_the_next_batch(self):
        model, _, trainer = make(accumulation_steps=2, probe=False)
        old = trainer.microbatches(next(batches()))
        with next(old) as micro:
            trainer.backward(row_loss(model, micro))
        assert_refused(lambda: next(trainer.microbatches(next(batches()))), StateError, "a new batch before step")
        old.close()
        attempts = trainer.microbatches(next(batches()))
        with next(attempts) as micro:
            trainer.backward(row_loss(model, micro))
        old.close()  # again, as the garbage collector would
        with next(attempts) as micro:
            trainer.backward(row_loss(model, micro))
        assert next(attempts, None) is None
        assert trainer.step() is True
        plain, optimizer, _ = make()
        row_loss(plain, next(batches())).backward()
        optimizer.step()
        torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=1e-10, atol=1e-12)

    def test_failed_constructor_leaves_model_unchanged(self):
        model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        assert_refused(lambda: trainer_of(model, precision="bf16-true", checkpoint=["typo"]), ConfigError, "typo")
        with pytest.raises(ConfigError, match="LBFGS"):
            mk.MemoryEfficientTrainingWrapper(model, torch.optim.LBFGS(model.parameters()), checkpoint=["0"])
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert not model._forward_pre_hooks
        assert not any("forward" in module.__dict__ for module in model.modules())

    def test_rejects_schedule_requiring_a_metric(self):
        model, optimizer, _ = make()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        with pytest.raises(ConfigError, match=r"MemoryEfficientTrainLoop\(\.\.\., plateau=scheduler\)"):
            mk.MemoryEfficientTrainingWrapper(model, optimizer, scheduler=scheduler)

    def test_other_error_loses_only_its_step(self):
        model, _, trainer = make(accumulation_steps=2)
        calls = []

        def fails_in_the_second(model, micro):
            calls.append(None)
            if len(calls) == 2:
                raise KeyError("a bug in the loss")
            return row_loss(model, micro)

        with pytest.raises(KeyError):
            trainer.train_step(next(batches()), fails_in_the_second)
        assert all(p.grad is None for p in model.parameters())
        for batch in batches():
            trainer.train_step(batch, row_loss)
        torch.testing.assert_close(dict(model.state_dict()), train_plainly(row_loss)[0], rtol=1e-10, atol=1e-12)

    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            ({"accumulation_steps": 0}, "accumulation_steps"),
            ({"accumulation_steps": 1.5}, "accumulation_steps"),
            ({"on_oom": "skip"}, "on_oom"),
            ({"offload": {"parameters"}}, "offload"),
            ({"precision": "16-mixed"}, r"precision='16-mixed'.*Way out: pass precision='fp16-mixed'"),
            ({"max_grad_norm": -1}, r"MemoryEfficientTrainingWrapper: got max_grad_norm=-1;"),
        ],
    )
    def test_settings(self, settings, words):
        assert_refused(lambda: make(**settings), ConfigError, words)


class CountReads(TorchDispatchMode):
    """Counts reads of a tensor's value by the host: on an accelerator each one waits for the device."""

    num_reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_no_host_sync(max_grad_norm):
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    trainer = mk.MemoryEfficientTrainingWrapper(
        model, optimizer, accumulation_steps=2, max_grad_norm=max_grad_norm, probe=False
    )
    x = torch.randn(8, 4)
    trainer.train_step(x, mean_square)
    with CountReads() as plain:
        model(x).pow(2).mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    with CountReads() as ours:
        trainer.train_step(x, mean_square)
    assert ours.num_reads == plain.num_reads  # AdamW reads its own step counters, which lie on the host


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch.compile reads it
def test_compiled_model_compiles_once_per_shape():
    """Equal micro-batches are one shape; a split after an out-of-memory costs what its new sizes cost, once."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    plain, optimizer, _ = make()
    model = torch.compile(plain, backend=counter, dynamic=False)
    trainer = mk.MemoryEfficientTrainingWrapper(
        model, optimizer, accumulation_steps=4, checkpoint=["0"], on_oom="inexact"
    )
    assert trainer.checkpointed_blocks == ("0",)
    data = [x[:8] for x, _ in batches()]
    results = [trainer.train_step(x, mean_square) for x in data]
    assert counter.frame_count == 1
    assert [result.num_compilations for result in results] == [1] + [0] * (len(data) - 1)
    state, _ = train_plainly(lambda model, batch: model(batch[0][:8]).pow(2).mean())
    torch.testing.assert_close(dict(plain.state_dict()), state, rtol=1e-10, atol=1e-12)

    with pytest.warns(mk.MemkitWarning, match=r"could not check that splitting .* CUDA out of memory.*check_split"):
        results = [trainer.train_step(x, fits(1, mean_square)) for x in data]
    assert counter.frame_count == 2
    assert [result.num_compilations for result in results] == [1] + [0] * (len(data) - 1)
    trainer.close()
    torch._dynamo.reset()


def test_stateful_parts():
    model = nn.Linear(2, 2)
    optimizers = [torch.optim.SGD([each], 0.1) for each in model.parameters()]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizers[0], 1)
    trainer = mk.MemoryEfficientTrainingWrapper(model, optimizers, scheduler=scheduler)
    assert trainer.parts() == {
        "model": model,
        "trainer": trainer,
        "optimizer": optimizers[0],
        "optimizer2": optimizers[1],
        "scheduler": scheduler,
    }
    assert trainer.num_ranks == 1


def test_each_optimizer_may_have_a_schedule(tmp_path):
    def trained(num_steps):
        model = nn.Linear(2, 2)
        optimizers = [torch.optim.SGD([each], 1.0) for each in model.parameters()]
        schedules = [
            torch.optim.lr_scheduler.ExponentialLR(each, gamma)
            for each, gamma in zip(optimizers, (0.5, 0.1), strict=True)
        ]
        with (
            mk.MemoryEfficientTrainingWrapper(model, optimizers, scheduler=schedules) as trainer,
            mk.TrainingStateManager(tmp_path) as state,
        ):
            parts = trainer.parts()
            assert [parts["scheduler"], parts["scheduler2"]] == schedules
            state.restore(**parts)
            for _ in range(num_steps):
                trainer.train_step(torch.ones(4, 2), lambda model, x: model(x).mean())
            state.save(num_steps, **parts)
        return [each.param_groups[0]["lr"] for each in optimizers]

    assert trained(2) == pytest.approx([0.25, 0.01])
    assert trained(1) == pytest.approx([0.125, 0.001])
    with pytest.raises(mk.errors.InputTypeError, match=r"got the class SGD; expected .* or a list of such schedules"):
        model = nn.Linear(2, 2)
        mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters()), scheduler=[torch.optim.SGD])


def test_transforms_of_functions_beside_saved_tensor_hooks():
    """MAML by torch.func.grad: beside hooks, torch asks the user to open an issue; blocks run without a checkpoint."""

    def adapted_loss(model, x):
        def inner(parameters):
            return (torch.func.functional_call(model, parameters, (x,)) - x).square().mean()

        parameters = dict(model.named_parameters())
        gradients = torch.func.grad(inner)(parameters)
        return inner({name: each - 0.1 * gradients[name] for name, each in parameters.items()})

    def train(**settings):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
        with mk.MemoryEfficientTrainingWrapper(
            model, torch.optim.SGD(model.parameters(), lr=0.1), **settings
        ) as trainer:
            trainer.train_step(torch.ones(2, 4, dtype=torch.float64), adapted_loss)
        return list(model.parameters())

    plain = train()
    with pytest.raises(mk.errors.ConfigError, match=r"torch\.func\.grad.*without checkpoint=, .*offload="):
        train(offload=("activations",))
    with pytest.warns(mk.MemkitWarning, match="is called inside torch.func.vmap, torch.func.grad"):
        checkpointed = train(checkpoint=["0", "1"])
    torch.testing.assert_close(checkpointed, plain)


# ------------------------------------------------------------------------------------------ sparse matrices


class OnGraph(nn.Module):
    """A graph network with its adjacency as a sparse matrix: in a buffer, an attribute or a list."""

    def __init__(self, place, layout):
        super().__init__()
        adjacency = (torch.rand(30, 30) < 0.2).double().to_sparse(layout=layout)
        self.linear, self.words = nn.Linear(4, 4).double(), nn.Embedding(30, 4, sparse=True).double()
        self.place, self.adjacencies = place, [adjacency] if place == "list" else None
        if place == "buffer":
            self.register_buffer("adjacency", adjacency)
        else:
            self.adjacency = adjacency if place == "attribute" else None

    def forward(self, x):
        adjacency = self.adjacencies[0] if self.place == "list" else self.adjacency
        return torch.sparse.mm(adjacency, self.linear(x) + self.words(torch.arange(30)))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")  # torch's own
@pytest.mark.parametrize("settings", [{}, {"checkpoint": {"linear": "full"}}, {"offload": {"activations"}}], ids=str)
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=["coo", "csr"])
@pytest.mark.parametrize("place", ["attribute", "list", "buffer"])
def test_a_model_with_a_sparse_matrix_trains_as_in_a_plain_loop(place, layout, settings):
    def train(make_step):
        torch.manual_seed(0)
        model = OnGraph(place, layout)
        step = make_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(3):
            step(torch.randn(30, 4, dtype=torch.float64))
        return list(model.parameters())

    def plain(model, optimizer):
        def step(x):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    def wrapped(model, optimizer):
        trainer = mk.MemoryEfficientTrainingWrapper(model, optimizer, **settings)
        return lambda x: trainer.train_step(x, lambda model, x: model(x).square().mean())

    torch.testing.assert_close(train(wrapped), train(plain))


class _FailingDetach(TorchDispatchMode):
    """One ``detach`` fails: the ones of a part's loss come after its gradient was added."""

    def __init__(self, place):
        super().__init__()
        self.place, self.num_seen = place, queue.SimpleQueue()  # no check puts a queue back

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            self.num_seen.put(1)
            if self.num_seen.qsize() == self.place:
                out_of_memory()
        return func(*args, **(kwargs or {}))


def test_a_part_that_fails_after_its_gradient_was_added_is_not_added_twice():
    def train(place=None):
        torch.manual_seed(0)
        model = nn.Linear(5, 1).double()
        trainer = mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters()), accumulation_steps=2)
        with _FailingDetach(place) as fault, warnings.catch_warnings():
            warnings.simplefilter("ignore", mk.MemkitWarning)
            # In the check of the split: the step did not begin.
            with contextlib.suppress(torch.OutOfMemoryError, mk.MemkitOutOfMemoryError):
                trainer.train_step(torch.randn(6, 5, dtype=torch.float64), mean_square)
                return model.weight.detach(), fault.num_seen.qsize()
        return None

    expected, num_places = train()
    survived = [found[0] for place in range(1, num_places + 1) if (found := train(place))]
    assert len(survived) > 10
    for each in survived:
        torch.testing.assert_close(each, expected, rtol=1e-13, atol=0)


def test_an_error_of_batch_norm_on_a_part_of_one_row_says_why():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    trainer = mk.MemoryEfficientTrainingWrapper(
        model, torch.optim.SGD(model.parameters()), accumulation_steps=3, probe=False
    )
    for step in (trainer.train_step, mk.SplitLoss(model, num_microbatches=3, probe=False)):
        with pytest.raises(ValueError, match="more than 1 value per channel") as caught:
            step(torch.randn(5, 4), mean_square)
        note = caught.value.__notes__[0]
        assert "a micro-batch of 1 of 5, and BatchNorm in training mode needs" in note
        assert "fewer micro-batches (accumulation_steps=, of SplitLoss num_microbatches=)" in note


@pytest.mark.parametrize("number", [torch.tensor(2), np.int64(2)])
def test_a_number_of_steps_may_be_a_tensor(number):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trainer = mk.MemoryEfficientTrainingWrapper(model, optimizer, accumulation_steps=number)
    assert trainer.train_step(torch.ones(6, 4), lambda model, x: model(x).square().mean()).sizes == (3, 3)
