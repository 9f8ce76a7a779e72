"""Loss functions, batches and calls written the wrong way: each error shows the line to write."""

import functools
import traceback
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import memkit as mk
from memkit.errors import ConfigError, InputError, InputTypeError, StateError
from tests.helpers import assert_refused
from tests.toys import mean_square, trainer_of

CRITERION = nn.CrossEntropyLoss()
LAMBDA = "write loss_fn=lambda model, batch: criterion(model(batch[0]), batch[1])"


def make_batch():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 4, generator=generator), torch.randint(0, 3, (8,), generator=generator)


def make_trainer(**settings):
    torch.manual_seed(0)
    return trainer_of(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), **settings)


def right(model, batch):
    return CRITERION(model(batch[0]), batch[1])


def of_data(batch, model):
    return CRITERION(model(batch[0]), batch[1])


def of_columns(model, x, y):
    return CRITERION(model(x), y)


def of_predictions(pred, target):
    return (pred - target).square().mean()


class Dice(nn.Module):
    """A criterion of the user's own."""

    def forward(self, logits, target):
        return logits.sigmoid().mean()


class Lit(nn.Module):
    """A model with its own training step, as Lightning's."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x)

    def training_step(self, batch, batch_idx):
        return CRITERION(self(batch[0]), batch[1])

    def loss(self, batch):
        return CRITERION(self(batch[0]), batch[1])


def of_lit(name):
    model = Lit()
    trainer_of(model).train_step(make_batch(), getattr(model, name))


LOSS_FUNCTIONS = [  # (the loss function, the last line)
    (CRITERION, LAMBDA),
    (nn.BCEWithLogitsLoss(), LAMBDA),
    (nn.MSELoss(), LAMBDA),
    (Dice(), LAMBDA),
    (F.cross_entropy, "loss_fn=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1])"),
    (
        functools.partial(F.cross_entropy, label_smoothing=0.1),
        "loss_fn=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1])",
    ),
    (of_predictions, "write loss_fn=lambda model, batch: of_predictions(model(batch[0]), batch[1])"),
    (lambda batch: batch[0].mean(), LAMBDA),
    (lambda: torch.zeros(()), LAMBDA),
    (of_columns, "write loss_fn=lambda model, batch: of_columns(model, batch[0], batch[1])"),
    (lambda m, x, y: CRITERION(m(x), y), "loss_fn=lambda model, batch: your_loss(model, batch[0], batch[1])"),
    (of_data, "write loss_fn=lambda model, batch: of_data(batch, model)"),
    (lambda b, m: CRITERION(m(b[0]), b[1]), "write loss_fn=lambda m, b: ..."),
    (nn.Linear(4, 3), LAMBDA),
    (nn.CrossEntropyLoss, f"write criterion = CrossEntropyLoss() once, and {LAMBDA.removeprefix('write ')}"),
    (None, LAMBDA),
]


@pytest.mark.parametrize(("loss_fn", "ending"), LOSS_FUNCTIONS)
@pytest.mark.parametrize("settings", [{}, {"accumulation_steps": 4}, {"on_oom": "raise"}], ids=str)
def test_an_invalid_loss_function_gets_the_line_to_write(loss_fn, ending, settings):
    trainer = make_trainer(**settings)
    with pytest.raises(InputTypeError) as caught:
        trainer.train_step(make_batch(), loss_fn)
    assert str(caught.value).endswith(ending)
    assert "train_step" in caught.value.call
    assert trainer.train_step(make_batch(), right).stepped


@pytest.mark.parametrize(
    "call",
    [
        lambda fn: make_trainer().train_step(make_batch(), fn),
        lambda fn: mk.SplitLoss(make_trainer().model)(make_batch(), fn),
        lambda fn: mk.estimate_memory_usage(make_trainer().model, make_batch(), fn),
        lambda fn: mk.advise(make_trainer().model, make_batch(), fn, target="RTX 4090"),
        lambda fn: mk.plan_training(make_trainer().model, make_batch(), fn, budget="RTX 4090"),
        lambda fn: mk.MemoryEfficientTrainLoop(make_trainer(), [make_batch()], fn).run(1),
    ],
    ids=["step", "split", "estimate", "advise", "plan", "loop"],
)
def test_every_loss_fn_argument_rejects_criterion(call):
    with pytest.raises(InputTypeError, match="the criterion CrossEntropyLoss") as caught:
        call(CRITERION)
    assert str(caught.value).endswith(LAMBDA)
    assert isinstance(caught.value.__cause__, TypeError)  # torch's own, for those who want it


def test_error_names_mapping_keys():
    x, y = make_batch()
    with pytest.raises(InputTypeError, match=r"criterion\(model\(batch\['image'\]\), batch\['label'\]\)$"):
        make_trainer().train_step({"image": x, "name": "a", "label": y}, CRITERION)

    def by_name(model, image, label):
        return CRITERION(model(image), label)

    with pytest.raises(InputTypeError, match=r"by_name\(model, batch\['image'\], batch\['label'\]\)$"):
        make_trainer().train_step({"image": x, "label": y}, by_name)


def wrong_inside(model, batch):
    return model(batch[0]).no_such_method()


def wrong_call_inside(model, batch):
    return right(model)


def wrong_shape_inside(model, batch):
    return CRITERION(model(batch[0])[:, :, 0], batch[1])


def wrong_key_inside(model, batch):
    return {}["loss"]


class Learned(nn.Module):
    """A loss function that is a module, of a model and a batch."""

    def forward(self, model, batch):
        return model(batch[0]).no_such_method()


@pytest.mark.parametrize(
    ("loss_fn", "error"),
    [
        (wrong_inside, AttributeError),
        (wrong_call_inside, TypeError),
        (wrong_shape_inside, IndexError),
        (wrong_key_inside, KeyError),
        (Learned(), AttributeError),
        (lambda model, batch: batch(), TypeError),
    ],
)
def test_an_error_inside_stays_the_users_own(loss_fn, error):
    for settings in ({}, {"accumulation_steps": 2}):
        with pytest.raises(error) as caught:
            make_trainer(**settings).train_step(make_batch(), loss_fn)
        assert type(caught.value) is error
        assert caught.value.__cause__ is None
        name = "forward" if isinstance(loss_fn, nn.Module) else loss_fn.__name__
        assert name in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]


def test_a_function_is_looked_at_only_after_an_error(monkeypatch):
    def never(*_):
        raise AssertionError("looked at a function that works")

    trainer = make_trainer(accumulation_steps=2)
    monkeypatch.setattr("memkit._gradients.loss._misuse", never)
    assert trainer.train_step(make_batch(), right).stepped


RESULTS = [  # (what is returned, the error, the last line)
    (lambda losses: losses, InputError, "reduce it: end loss_fn with `return losses.mean()`."),
    (lambda losses: None, InputTypeError, "end loss_fn with `return loss`."),
    (lambda losses: losses.mean().item(), InputTypeError, "return the loss itself, not loss.item()."),
    (lambda losses: np.float32(losses.mean().item()), InputTypeError, "which has no gradients, and `return loss`."),
    (lambda losses: losses.detach().numpy().mean(), InputTypeError, "which has no gradients, and `return loss`."),
    (lambda losses: losses.mean().detach(), InputError, "not under torch.no_grad(), not detached."),
    (lambda losses: torch.tensor(1.0), InputError, "not under torch.no_grad(), not detached."),
    (lambda losses: {"loss": losses.mean()}, InputTypeError, "with the rest as outputs."),
    (lambda losses: {"total": losses.mean()}, InputTypeError, "and anything else as outputs."),
    (lambda losses: (losses.mean(), losses), InputError, "for a loss and other outputs."),
]


@pytest.mark.parametrize(("give", "error", "ending"), RESULTS)
@pytest.mark.parametrize("steps", [1, 2])
def test_an_invalid_loss_gets_the_last_line_to_write(give, error, ending, steps):
    def loss_fn(model, batch):
        return give(F.cross_entropy(model(batch[0]), batch[1], reduction="none"))

    with pytest.raises(error) as caught:
        make_trainer(accumulation_steps=steps).train_step(make_batch(), loss_fn)
    assert str(caught.value).endswith(ending)
    assert caught.value.call == "loss_fn of trainer.train_step"


def test_distinguishes_frozen_model_from_detached_loss():
    trainer = make_trainer()
    trainer.model.requires_grad_(False)
    with pytest.raises(InputError, match=r"unfreeze the parameters to train: model\.requires_grad_\(True\)\.$"):
        trainer.train_step(make_batch(), right)


class Graph:
    """An object with tensors, such as PyG's Data."""

    def __init__(self, x):
        self.x = x


def square_mask():
    return torch.ones(8, 8).tril().bool()


CALLS = [  # (the call, the error, its end)
    (lambda: make_trainer().train_step(None, right), InputTypeError, "an empty tuple: trainer.train_step((), loss_fn)"),
    (
        lambda: make_trainer().train_step(DataLoader(TensorDataset(*make_batch())), right),
        InputTypeError,
        "write for batch in loader: trainer.train_step(batch, loss_fn)",
    ),
    (
        lambda: make_trainer().train_step(iter([make_batch()]), right),
        InputTypeError,
        "write for batch in loader: trainer.train_step(batch, loss_fn)",
    ),
    (
        lambda: make_trainer().train_step(tuple(each.numpy() for each in make_batch()), right),
        InputTypeError,
        "write batch = torch.utils.data.default_convert(batch) before the call",
    ),
    (lambda: make_trainer().train_step(right, make_batch()), InputTypeError, "trainer.train_step(batch, loss_fn)"),
    (
        lambda: mk.SplitLoss(make_trainer().model)(right, make_batch()),
        InputTypeError,
        "write SplitLoss(model)(batch, loss_fn)",
    ),
    (
        lambda: make_trainer(accumulation_steps=2).train_step((torch.randn(8, 8, 4), square_mask()), mean_square),
        InputError,
        "pass mask[:, None], or split_fn=...",
    ),
    (
        lambda: make_trainer(accumulation_steps=2).train_step(
            {"feat": torch.ones(5, 4), "offset": torch.ones(2)}, right
        ),
        InputError,
        "pass split_fn=memkit.points.split_packed.",
    ),
    (
        lambda: make_trainer(accumulation_steps=2).train_step(Graph(torch.ones(5, 4)), right),
        InputError,
        "pass split_fn=..., which takes (batch, n) and returns a list of n parts.",
    ),
    (lambda: make_trainer(probe="yes"), ConfigError, "pass probe=True, probe=False or probe='require'."),
    (lambda: make_trainer(probe=3), ConfigError, "pass probe=True, probe=False or probe='require'."),
    (
        lambda: make_trainer().evaluation()(make_batch(), right),
        StateError,
        "write with trainer.evaluation() as evaluate: outputs = evaluate(batch, fn)",
    ),
    (
        lambda: mk.SplitLoss(make_trainer().model, accumulation_steps=4),
        InputTypeError,
        "write SplitLoss(model, num_microbatches=4)",
    ),
    (lambda: mk.SplitLoss(make_trainer().model, chunks=4), InputTypeError, "SplitLoss(model, num_microbatches=4)"),
    (
        lambda: mk.SplitLoss(make_trainer().model).train_step(make_batch(), right),
        mk.errors.AbsentError,
        "write loss = split(batch, loss_fn), then loss.backward() and optimizer.step()",
    ),
    (
        lambda: mk.train.cached_backward(nn.Linear(4, 2), torch.ones(8, 4), torch.mean),
        InputTypeError,
        "write cached_backward(encoder, batch, loss_on_embeddings, chunk_size=...)",
    ),
    (
        lambda: mk.train.cached_backward(nn.Linear(4, 2), torch.ones(8, 4), torch.mean, batch_size=4),
        InputTypeError,
        "write cached_backward(encoder, batch, loss_on_embeddings, chunk_size=4)",
    ),
    (
        lambda: mk.train.cached_backward(nn.Linear(4, 2), torch.ones(8, 4), None, chunk_size=4),
        InputTypeError,
        "write cached_backward(encoder, batch, lambda embeddings: criterion(embeddings), chunk_size=64)",
    ),
    (
        lambda: mk.train.cached_backward(nn.Linear(4, 2), torch.ones(8, 4), torch.abs, chunk_size=4),
        InputError,
        "end loss_on_embeddings with `return losses.mean()`.",
    ),
    (
        lambda: mk.train.gradient_penalty(torch.ones(8, 4), nn.Linear(4, 1)),
        InputTypeError,
        "write gradient_penalty(discriminator, real): the discriminator first, then tensors of its input",
    ),
    (
        lambda: mk.train.gradient_penalty(nn.Linear(4, 1), torch.ones(8, 4), lambda_gp=10.0),
        InputTypeError,
        "write gradient_penalty(discriminator, real)",
    ),
    (
        lambda: mk.train.make_dataloader(DataLoader(TensorDataset(*make_batch()))),
        InputTypeError,
        "write make_dataloader(loader.dataset, batch_size=8)",
    ),
    (
        lambda: mk.train.make_dataloader(TensorDataset(*make_batch()), num_workers="auto"),
        ConfigError,
        "write make_dataloader(dataset): the number of workers is chosen for this machine",
    ),
    (
        lambda: mk.train.make_dataloader(TensorDataset(*make_batch()), workers=2),
        InputTypeError,
        "write make_dataloader(dataset, num_workers=2)",
    ),
    (
        lambda: mk.train.make_dataloader(iter(make_batch())),
        InputTypeError,
        "write make_dataloader(list(samples)), or pass a torch Dataset",
    ),
]


@pytest.mark.parametrize(("call", "error", "ending"), CALLS)
def test_other_calls_get_the_corrected_one(call, error, ending):
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    assert str(caught.value).endswith(ending)


def evaluating(*args):
    trainer = make_trainer()
    args = [trainer.model if each == "model" else each for each in args]
    with trainer.evaluation() as evaluate:
        return evaluate(*args)


@pytest.mark.parametrize(
    ("args", "ending"),
    [
        ((torch.ones(8, 4), "model"), "write evaluate(batch, lambda model, rows: model(rows))"),
        ((mean_square, torch.ones(8, 4)), "write evaluate(batch, fn)"),
        ((torch.ones(8, 4), torch.ones(8, 4)), "write evaluate(batch, lambda model, rows: model(rows))"),
        ((torch.ones(8, 4),), "evaluate"),
    ],
)
def test_evaluations_get_the_corrected_call(args, ending):
    with pytest.raises(InputTypeError) as caught:
        evaluating(*args)
    assert ending in str(caught.value).partition("Way out: ")[2] or "Evaluation.__call__" in str(caught.value)


@pytest.mark.parametrize("use", [lambda attempt: attempt[0], lambda attempt: list(attempt)])
def test_an_attempt_is_not_a_micro_batch(use):
    trainer = make_trainer(accumulation_steps=2)
    with pytest.raises(StateError, match="write `with attempt as micro:` around forward"):
        for attempt in trainer.microbatches(make_batch()):
            use(attempt)


def test_unknown_batch_object_stays_whole():
    result = make_trainer().train_step(Graph(torch.ones(5, 4)), lambda model, graph: model(graph.x).square().mean())
    assert result.stepped
    assert result.num_microbatches == 1


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(6, 6).triu(1).bool(),
        torch.zeros(6, 6).masked_fill(torch.ones(6, 6).triu(1).bool(), float("-inf")),
        torch.eye(6).bool(),
    ],
)
def test_a_square_mask_is_not_cut(mask):
    x = torch.randn(6, 4)
    with pytest.raises(InputError, match="a different mask"):
        make_trainer(accumulation_steps=2).train_step((x, mask), lambda model, b: model(b[0]).square().mean())
    assert make_trainer().train_step((x, mask), lambda model, b: model(b[0]).square().mean()).stepped


PADDING = torch.arange(6) < torch.tensor([2, 5, 1, 6, 3, 4])[:, None]


@pytest.mark.parametrize("square", [torch.randn(6, 6), torch.eye(6), torch.eye(6).long(), PADDING])
def test_other_square_tensors_are_rows(square):
    """Features, one-hot labels, padding: as many columns as rows by chance."""
    result = make_trainer(accumulation_steps=2).train_step(
        (torch.randn(6, 4), square), lambda model, b: model(b[0]).square().mean() + 0 * b[1].float().sum()
    )
    assert result.sizes == (3, 3)


def _policy_loss(model, batch):
    """PPO's: the first epoch keeps the probabilities that later epochs compare with."""
    chosen = model(batch["x"]).log_softmax(-1)[:, 0]
    if "old" not in batch:
        batch["old"] = chosen.detach()
    return -((chosen - batch["old"]).exp() * batch["x"][:, 0]).mean()


@pytest.mark.parametrize("on_oom", ["exact", "raise"])
def test_warns_where_a_later_step_cannot_find_what_an_earlier_one_wrote_into_parts(on_oom):
    model = nn.Linear(4, 3).double()
    trainer = mk.MemoryEfficientTrainingWrapper(
        model, torch.optim.SGD(model.parameters(), 0.1), accumulation_steps=2, on_oom=on_oom
    )
    batch = {"x": torch.rand(8, 4, dtype=torch.float64)}
    trainer.train_step(batch, _policy_loss)
    with pytest.warns(mk.MemkitWarning, match="the batch is that of an earlier step, in which .* wrote old into it"):
        trainer.train_step(batch, _policy_loss)
    assert set(batch) == {"x"}


@pytest.mark.parametrize("num_parts", [1, 2])
def test_what_a_forward_writes_into_new_batches_is_no_reason_to_warn(num_parts):
    """Detectors hand their features on in the batch; a new batch has none, however it lies in memory."""
    model = nn.Linear(4, 3).double()
    trainer = mk.MemoryEfficientTrainingWrapper(
        model, torch.optim.SGD(model.parameters(), 0.1), accumulation_steps=num_parts
    )
    for _ in range(200):
        trainer.train_step({"x": torch.rand(8, 4, dtype=torch.float64)}, _policy_loss)
    whole = {"x": torch.rand(8, 4, dtype=torch.float64)}
    for _ in range(3 if num_parts == 1 else 1):
        trainer.train_step(whole, _policy_loss)
    assert set(whole) == ({"x", "old"} if num_parts == 1 else {"x"})


@pytest.mark.parametrize("lets_go", [False, True])
def test_new_dicts_around_the_same_tensors_are_no_batches_of_earlier_steps(lets_go):
    """Training on all of the data in each step, with a dict that is made there; it may lie where an earlier one lay."""
    model = nn.Linear(4, 3).double()
    trainer = mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters(), 0.1), accumulation_steps=2)
    x = torch.rand(8, 4, dtype=torch.float64)
    for _ in range(200):
        batch = {"x": x}
        trainer.train_step(batch, _policy_loss)
        if lets_go:
            del batch
    assert len(trainer._driver._written) == 1


def test_warns_of_an_earlier_batch_that_comes_again_after_others_and_notes_no_more_than_64():
    model = nn.Linear(4, 3).double()
    trainer = mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters(), 0.1), accumulation_steps=2)
    batches = [{"x": torch.rand(8, 4, dtype=torch.float64)} for _ in range(100)]
    for batch in batches:
        trainer.train_step(batch, _policy_loss)
    assert len(trainer._driver._written) == 64
    trainer.train_step(batches[0], _policy_loss)
    with pytest.warns(mk.MemkitWarning, match="the batch is that of an earlier step"):
        trainer.train_step(batches[50], _policy_loss)


def test_what_the_caller_has_put_into_the_batch_since_is_not_lost():
    model = nn.Linear(4, 3).double()
    trainer = mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters(), 0.1), accumulation_steps=2)
    batch = {"x": torch.rand(8, 4, dtype=torch.float64)}
    trainer.train_step(batch, _policy_loss)
    batch["old"] = model(batch["x"]).log_softmax(-1)[:, 0].detach()
    trainer.train_step(batch, _policy_loss)


def test_a_batch_that_was_written_to_is_let_go_when_the_next_one_comes():
    model = nn.Linear(4, 3).double()
    trainer = mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters(), 0.1), accumulation_steps=2)
    trainer.train_step({"x": (x := torch.rand(8, 4, dtype=torch.float64))}, _policy_loss)
    first = weakref.ref(x)
    del x
    seen = []

    def loss_fn(model, batch):
        seen.append(first())
        return _policy_loss(model, batch)

    trainer.train_step({"x": torch.rand(8, 4, dtype=torch.float64)}, loss_fn)
    assert set(seen) == {None}


def test_a_batch_with_a_graph_is_refused_with_a_way_out_that_works():
    """Features of an encoder outside: the first micro-batch's backward frees the graph that the second one needs."""
    torch.manual_seed(0)
    models = nn.ModuleDict({"encoder": nn.Linear(3, 3), "head": nn.Linear(3, 1)}).double()
    x = torch.randn(8, 3, dtype=torch.float64)

    def plain():
        return mean_square(models["head"], models["encoder"](x))

    plain().backward()
    right = [each.grad for each in models.parameters()]
    models.zero_grad()
    optimizer, got = torch.optim.SGD(models.parameters(), lr=0.0), []
    optimizer.register_step_pre_hook(lambda *_: got.extend(each.grad for each in models.parameters()))

    def by_step(batch, loss):
        mk.MemoryEfficientTrainingWrapper(models, optimizer, accumulation_steps=2).train_step(batch, loss)

    def by_loop(batch, loss):
        trainer = mk.MemoryEfficientTrainingWrapper(models, optimizer, accumulation_steps=2)
        for attempt in trainer.microbatches(batch):
            with attempt as micro:
                trainer.backward(loss(models, micro))
        trainer.step()

    def by_split(batch, loss):
        models.zero_grad()
        mk.SplitLoss(models, num_microbatches=2)(batch, loss).backward()
        optimizer.step()

    def of_head(models, micro):
        return mean_square(models["head"], micro)

    def of_all(models, micro):
        return mean_square(models["head"], models["encoder"](micro))

    for run, where in ((by_step, "inside loss_fn"), (by_loop, "there"), (by_split, "inside loss_fn")):
        wanted = f"another backward.* has used.*compute {where} everything that has gradients: `.*`.$"
        assert_refused(lambda run=run: run(models["encoder"](x), of_head), StateError, wanted)
        models.zero_grad()
        got.clear()
        run(x, of_all)
        torch.testing.assert_close(got, right)
