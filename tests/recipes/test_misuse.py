"""Loops, monitors, states and stages called in other libraries' words: the way out is the right call."""

import logging
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import memkit as mk

Stage = mk.recipes.Stage


def loss_fn(model, batch):
    return model(batch[0]).square().mean()


MODEL = nn.Linear(4, 1)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.1)
LOADER = DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=4)


def wrapper():
    return mk.MemoryEfficientTrainingWrapper(MODEL, OPTIMIZER)


def loop(**settings):
    return mk.MemoryEfficientTrainLoop(wrapper(), LOADER, loss_fn, **{"progress": False, **settings})


def enhanced(**settings):
    return mk.create_enhanced_train_loop(base_train_loop=loop(), **settings)


def monitor(**settings):
    return mk.ValidationMonitor(**settings)


def state(**settings):
    return mk.TrainingStateManager("never written", **settings)


def step(batch, rows):
    return batch, rows


def stages(*given, fn=step, **settings):
    return mk.ProgressiveTrainer(fn, stages=list(given), **{"resize": step, **settings})


TABLE = [
    # the monitor
    (lambda: monitor().should_stop(), "InputTypeError", "write monitor.should_stop, without parentheses"),
    (lambda: monitor().step(1.0), "AbsentError", "write monitor.update(value)"),
    (lambda: monitor()(0.3), "InputTypeError", "write monitor.update(value)"),
    (lambda: monitor().best_score, "AbsentError", "write monitor.best"),
    (lambda: monitor().best_epoch, "AbsentError", "write monitor.best_step"),
    (lambda: monitor(monitor="val_loss"), "InputTypeError", "write ValidationMonitor(metric='val_loss')"),
    (lambda: monitor(threshold=0.1), "InputTypeError", "write ValidationMonitor(min_delta=0.1)"),
    (lambda: monitor(greater_is_better=True), "InputTypeError", "write ValidationMonitor(mode='max')"),
    (lambda: monitor(patience="5"), "ConfigError", "write patience=5."),
    (lambda: monitor(patience=0), "ConfigError", "write patience=None to watch without stopping."),
    (lambda: monitor().update({"loss": 1.0}), "InputTypeError", "write monitor.update(value['loss'])."),
    (lambda: monitor().update(torch.ones(3)), "InputTypeError", "write monitor.update(value.mean())."),
    (lambda: monitor().update([1.0]), "InputTypeError", "or monitor.update(values[-1])."),
    (lambda: monitor().load_state_dict({}), "FileFormatError", "with the version of memkit that saved it."),
    # the loop
    (
        lambda: loop(max_epochs=3),
        "InputTypeError",
        "(trainer, train_loader, loss_fn, progress=False)",
    ),
    (lambda: loop(eval_steps=3), "InputTypeError", "validate_every=3, progress=False)"),
    (lambda: loop().fit(), "AbsentError", "write loop.run(num_epochs=10)"),
    (lambda: loop()(), "InputTypeError", "write loop.run(num_epochs=10)"),
    (lambda: loop().run(epochs=3), "InputTypeError", "write run(num_epochs=3)"),
    (lambda: loop().run(max_epochs=3), "InputTypeError", "write run(num_epochs=3)"),
    (lambda: loop().run("3"), "ConfigError", "pass num_epochs=3."),
    (lambda: loop().run(1.5), "ConfigError", "pass num_epochs=1."),
    (lambda: loop().run(-1), "ConfigError", "pass num_epochs=0."),
    (lambda: loop().load_state_dict({}), "FileFormatError", "to the loop, which resumes by itself."),
    (lambda: loop().load_state_dict([1]), "FileFormatError", "to the loop, which resumes by itself."),
    (
        lambda: loop().load_state_dict({"num_steps": "3", "validated_at": None, "position": {}}),
        "FileFormatError",
        "to the loop, which resumes by itself.",
    ),
    (lambda: loop(state="dir"), "InputTypeError", "pass state=mk.TrainingStateManager('dir')."),
    (lambda: loop(state=mk.TrainingStateManager), "InputTypeError", "pass state=mk.TrainingStateManager('states')."),
    (lambda: loop(val_loader=3), "InputTypeError", "write MemoryEfficientTrainLoop(..., val_loader=val_loader)."),
    (lambda: loop(val_loader=LOADER, monitor="loss"), "InputTypeError", "mk.ValidationMonitor(patience=5)."),
    (lambda: loop(val_loader=LOADER, val_fn="loss"), "InputTypeError", "the function itself, not its result val_fn()."),
    (lambda: loop(val_loader=LOADER, reducers=[1]), "InputTypeError", "{'accuracy': mk.recipes.Accuracy()}."),
    (
        lambda: loop(val_loader=LOADER, reducers={"a": mk.recipes.Accuracy}),
        "InputTypeError",
        "pass reducers={'a': Accuracy()}.",
    ),
    (lambda: loop(writer="runs"), "InputTypeError", "pass writer=torch.utils.tensorboard.SummaryWriter()."),
    (lambda: loop(progress="no"), "ConfigError", "pass progress=False."),
    (
        lambda: mk.MemoryEfficientTrainLoop(MODEL, LOADER, loss_fn),
        "InputTypeError",
        "and MemoryEfficientTrainLoop(trainer, train_loader, loss_fn).",
    ),
    (
        lambda: mk.MemoryEfficientTrainLoop(wrapper(), loss_fn, LOADER),
        "InputTypeError",
        "write MemoryEfficientTrainLoop(trainer, train_loader, loss_fn).",
    ),
    (
        lambda: mk.MemoryEfficientTrainLoop(wrapper(), LOADER),
        "InputTypeError",
        "write MemoryEfficientTrainLoop(trainer, train_loader, loss_fn)",
    ),
    (lambda: mk.MemoryEfficientTrainLoop(wrapper(), 3, loss_fn), "InputTypeError", "train_loader, loss_fn)."),
    (lambda: mk.MemoryEfficientTrainLoop(wrapper(), LOADER, 3), "InputTypeError", "model(batch[0]), batch[1]))."),
    # the enhanced loop
    (lambda: enhanced(val_loader=LOADER), "InputTypeError", "val_dataloader=val_dataloader)"),
    (
        lambda: enhanced(val_dataloader=LOADER, patience=3),
        "InputTypeError",
        "mk.ValidationMonitor(patience=5))",
    ),
    (lambda: enhanced(val_dataloader=LOADER, memory_fraction=90), "ConfigError", "pass memory_fraction=0.9."),
    (lambda: enhanced(val_dataloader=LOADER, memory_fraction=0), "ConfigError", "write memory_fraction=0.9."),
    (lambda: enhanced(state="dir"), "InputTypeError", "pass state=mk.TrainingStateManager('dir')."),
    (lambda: enhanced(val_dataloader=3), "InputTypeError", "val_dataloader, a DataLoader or a list."),
    (lambda: enhanced(val_dataloader=LOADER, monitor=3), "InputTypeError", "mk.ValidationMonitor(patience=5)."),
    (lambda: enhanced(val_dataloader=LOADER, val_fn=3), "InputTypeError", "not its result val_fn()."),
    (lambda: enhanced(val_dataloader=LOADER, reducers=3), "InputTypeError", "mk.recipes.Accuracy()}."),
    (lambda: enhanced(enable_validation="no"), "ConfigError", "pass enable_validation=False."),
    (lambda: enhanced(num_epochs=1.5), "ConfigError", "pass num_epochs=1."),
    (lambda: enhanced().run(), "AbsentError", "write loop.run_loop()"),
    (lambda: mk.recipes.ResumableBatchSampler(6, 3, shuffle="False"), "ConfigError", "pass shuffle=False."),
    (lambda: mk.recipes.ResumableBatchSampler(6, 3, drop_last=None), "ConfigError", "pass drop_last=False."),
    (lambda: mk.recipes.ResumableLoader([1]), "InputTypeError", "ResumableBatchSampler(len(dataset), 32))."),
    (lambda: mk.recipes.ResumableLoader(None), "InputTypeError", "ResumableBatchSampler(len(dataset), 32))."),
    # reducers
    (lambda: mk.recipes.WeightedMean().update(None, None), "InputTypeError", "two tensors of the same shape."),
    (lambda: mk.recipes.Accuracy().update([1], None), "InputTypeError", "scores (N, C) and targets (N,)."),
    (lambda: mk.recipes.Accuracy(top=0), "ConfigError", "pass top=1."),
    (lambda: mk.recipes.Accuracy(float("inf")), "ConfigError", "pass top=1."),
    (lambda: mk.recipes.Accuracy(None), "ConfigError", "pass top=1."),
    (lambda: mk.recipes.Accuracy(ignore_index="3"), "ConfigError", "pass the class as an int."),
    (
        lambda: mk.recipes.Accuracy(top=5).update(torch.ones(4, 3), torch.zeros(4, dtype=torch.int64)),
        "InputError",
        "write Accuracy(top=2).",
    ),
    # states
    (lambda: state(save_top_k=3), "InputTypeError", "keep=3)"),
    (lambda: state(background="yes"), "ConfigError", "pass background=True."),
    (lambda: state().save(MODEL, 3), "InputTypeError", "write save(step, model=model, optimizer=optimizer)"),
    (lambda: state().save(model=MODEL), "InputTypeError", "write save(step, model=model)"),
    (lambda: state().save(step=3, model=MODEL), "InputTypeError", "write save(3, model=model)"),
    (lambda: state().save(1, model=MODEL.state_dict()), "InputTypeError", "itself instead of its state_dict()."),
    (lambda: state().save(1, loader=LOADER), "InputTypeError", "ResumableLoader(...) around the DataLoader."),
    (lambda: state().save(1, model=MODEL, epoch=3), "InputTypeError", "metric=value, ...) for a figure of the model."),
    (lambda: state().load(model=MODEL), "AbsentError", "state.restore(model=model, optimizer=optimizer)"),
    (lambda: state().load_best(model=MODEL), "AbsentError", "write state.restore('best', model=model)"),
    # stages
    (lambda: stages(32, 64), "ConfigError", "write mk.recipes.Stage(resolution=32, batch_size=...)."),
    (lambda: stages((32, 16, 5)), "ConfigError", "write mk.recipes.Stage(resolution=32, batch_size=16, epochs=5)."),
    (lambda: stages({"res": 32, "batch_size": 2}), "InputTypeError", "write Stage(resolution=32, batch_size=2)"),
    (lambda: stages({"resolution": 32}), "InputTypeError", "write Stage(resolution=32, batch_size=batch_size)"),
    (lambda: stages(Stage(8, 2), fn=MODEL), "InputTypeError", "MemoryEfficientTrainingWrapper(model, optimizer)."),
    (lambda: stages(Stage(8, 2), resize=3), "InputTypeError", "pass the function itself, not its result resize()."),
    (lambda: stages(Stage(8, 2)).fit(LOADER), "AbsentError", "write progressive.run(loader)"),
    (lambda: stages(Stage(8, 2)).load_state_dict({"version": 1}), "FileFormatError", "progressive.state_dict()."),
    (lambda: mk.ProgressiveTrainer(step, [Stage(8, 2)]), "InputTypeError", "(step_fn, stages, resize=...)"),
    (lambda: Stage(res=32, batch_size=2), "InputTypeError", "write Stage(resolution=32, batch_size=2)"),
    # reports and recoveries
    (lambda: mk.write_report("a.jsonl", "a.html"), "InputTypeError", "read_memory_events('a.jsonl'), 'a.html')."),
    (lambda: mk.write_report("a.html", 3), "InputTypeError", "read_memory_events('a.html'), 'report.html')."),
    (lambda: mk.recover_from_oom([8, 4], step), "InputTypeError", "write recover_from_oom(fn, sizes)."),
    (lambda: mk.recover_from_oom(3, 8), "InputTypeError", "recover_from_oom(lambda size: step(size), sizes)."),
    (lambda: mk.recover_from_oom(step, "8"), "InputTypeError", "or recover_from_oom(fn, 256)."),
]


@pytest.mark.parametrize(("call", "kind", "end"), TABLE, ids=range(len(TABLE)))
def test_the_way_out_is_the_right_call(call, kind, end):
    with pytest.raises(mk.MemkitError) as caught:
        call()
    assert type(caught.value).__name__ == kind
    assert str(caught.value).endswith(end)


def test_dicts_are_stages():
    batches = [torch.randn(5, 1, 32) for _ in range(2)]
    seen = []
    given = [{"resolution": 8, "batch_size": 4, "epochs": 1}, Stage(16, batch_size=5)]
    trainer = mk.ProgressiveTrainer(
        lambda batch, rows: seen.append((tuple(batch.shape), rows)), given, resize=lambda batch, side: batch[..., :side]
    )
    assert trainer.run(batches) == len(seen) == 5
    assert seen[0] == ((4, 1, 8), 4)
    assert seen[-1] == ((5, 1, 16), 5)


def test_should_stop_is_a_bool_unless_called():
    watched = monitor(patience=1, mode="max")
    assert watched.should_stop is False
    watched.update(2.0)
    watched.update(1.0)
    assert watched.should_stop is True
    assert (not watched.should_stop, bool(watched.should_stop), [watched.should_stop][0]) == (False, True, True)
    holder = {"monitor": watched}
    with pytest.raises(mk.errors.InputTypeError, match="without parentheses"):
        holder["monitor"].should_stop()


def test_should_stop_check_is_skipped_on_unknown_bytecode(monkeypatch):
    """A right use must never be refused, so there a wrong one gets Python's own error."""
    monkeypatch.setattr(sys, "version_info", (3, 15, 0))
    assert monitor().should_stop is False
    with pytest.raises(TypeError, match="'bool' object is not callable"):
        monitor().should_stop()


def test_a_monitor_knows_its_best_step_and_its_history():
    watched = monitor(mode="max")
    for step_number, value in ((100, 0.1), (200, 0.5), (300, float("nan")), (400, 0.4)):
        watched.update(value, step_number)
    assert (watched.best, watched.best_step, watched.plateau) == (0.5, 200, 2)
    assert [at for at, _ in watched.history] == [100, 200, 300, 400]
    again = monitor(mode="max")
    again.load_state_dict(watched.state_dict())
    assert (again.best_step, again.history[:2]) == (200, [(100, 0.1), (200, 0.5)])


def test_a_loop_tells_its_monitor_the_step():
    watched = monitor(patience=None)
    loop(val_loader=LOADER, monitor=watched).run(3)
    assert [at for at, _ in watched.history] == [2, 4, 6]
    assert watched.best_step == min(watched.history, key=lambda each: each[1])[0]


def test_a_report_says_how_far_the_run_is(caplog):
    with caplog.at_level(logging.INFO, logger="memkit"):
        loop(report_every=1).run(2)
        mk.MemoryEfficientTrainLoop(wrapper(), iter(list(LOADER)), loss_fn, report_every=1, progress=False).run(1)
    shares = [line.split(": ")[0].partition(", step ")[2] for line in caplog.messages if ", step " in line]
    assert [share.rpartition(", ")[0] for share in shares[:4]] == [
        "1 of 4 (25%",
        "2 of 4 (50%",
        "3 of 4 (75%",
        "4 of 4 (100%",
    ]
    assert shares[3].endswith("0 s left)")
    assert shares[4:] == ["1", "2"]  # a loader without a length


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59, "59 s"), (61, "1 min 01 s"), (7500, "2 h 05 min")])
def test_durations(seconds, text):
    from memkit.recipes.loop import _format_seconds

    assert _format_seconds(seconds) == text
