"""The adapter for Hugging Face's Trainer, in scripts as its users write them, on the standard library's sources."""

import argparse
import functools
import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import (
    GPT2Config,
    GPT2ForQuestionAnswering,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

import memkit as mk
from memkit.integrations import transformers as adapter
from memkit.integrations.transformers import MemoryCallback, MemoryEfficientTrainer
from memkit.train.split_watch import SplitWatch
from tests.helpers import assert_same, one_in
from tests.integrations.scripts import num_changed_lines
from tests.train.faults import FailingOperator

PLAIN = """
import argparse
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

with open(argparse.__file__, "rb") as file:
    text = file.read()


class Lines(torch.utils.data.Dataset):
    lines = [line for line in text.splitlines() if line.strip()][:22]

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, index):
        ids = torch.tensor(list(self.lines[index][:40]))
        return {"input_ids": ids, "labels": ids}


def collate(rows):  # the usual padding: ignored in the loss
    pad = torch.nn.utils.rnn.pad_sequence
    ids = [row["input_ids"] for row in rows]
    return {
        "input_ids": pad(ids, batch_first=True),
        "attention_mask": pad([torch.ones_like(each) for each in ids], batch_first=True),
        "labels": pad(ids, batch_first=True, padding_value=-100),
    }


torch.manual_seed(0)
config = GPT2Config(
    vocab_size=256, n_positions=40, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, loss_type="ForCausalLM",
)
model = GPT2LMHeadModel(config).to(dtype)
args = TrainingArguments(
    output_dir=folder,
    num_train_epochs=2,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=4,
    learning_rate=1e-2,
    warmup_steps=1,
    weight_decay=0.1,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    use_cpu=True,
)
trainer = Trainer(
    model=model,
    args=args,
    train_dataset=Lines(),
    data_collator=collate,
)
trainer.train()
"""


def with_memkit(script, settings=""):
    first = "import torch\n"
    script = script.replace(first, first + "from memkit.integrations.transformers import MemoryEfficientTrainer\n", 1)
    return script.replace("trainer = Trainer(", "trainer = MemoryEfficientTrainer(" + settings)


MEMKIT = with_memkit(PLAIN, "\n    num_microbatches=2,")


def run(script, folder, dtype=torch.float64):
    names = {"folder": str(folder), "dtype": dtype, "__name__": "script"}
    exec(compile(script, "script", "exec"), names)
    return names["trainer"]


@functools.cache
def plain_run(folder, dtype=torch.float64):
    return run(PLAIN, folder, dtype)


def weights(trainer):
    return [each.detach() for each in trainer.model.parameters()]


def history(trainer):
    """Loss, gradient norm, learning rate and epoch of each step; the losses are float32 there."""
    keys = ("loss", "grad_norm", "learning_rate", "epoch", "step")
    return [[entry[key] for key in keys] for entry in trainer.state.log_history if "loss" in entry]


def assert_same_training(got, want, tolerance):
    torch.testing.assert_close(weights(got), weights(want), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(history(got), history(want), rtol=max(tolerance, 1e-6), atol=0)
    for name in ("global_step", "max_steps", "epoch", "total_flos"):
        assert getattr(got.state, name) == getattr(want.state, name)
    assert got.args.train_batch_size == want.args.train_batch_size


def test_few_lines_change():
    assert num_changed_lines(PLAIN, MEMKIT)[0] == 3


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), pytest.param(torch.float32, 2e-5, marks=pytest.mark.slow)]
)
def test_the_script_trains_as_without_memkit(dtype, tolerance, tmp_path):
    """22 rows in batches of 4, four of them a step: the last group of an epoch is short, and so is its last batch."""
    plain, ours = plain_run(tmp_path, dtype), run(MEMKIT, tmp_path, dtype)
    assert plain.state.global_step == 4
    assert ours.split_loss.sizes == (1, 1)
    assert_same_training(ours, plain, tolerance)


def failing(monkeypatch, *places):
    """Out-of-memory at these operators of all that runs in parts."""
    fault, inner = FailingOperator(*places), MemoryEfficientTrainer._compute_in_parts

    def compute(*args, **kwargs):
        with fault:
            return inner(*args, **kwargs)

    monkeypatch.setattr(MemoryEfficientTrainer, "_compute_in_parts", compute)
    return fault


@pytest.mark.parametrize(
    "places",
    [(60,), *(pytest.param(places, marks=pytest.mark.slow) for places in ((700,), (1500, 2100), (40, 2600)))],
)
def test_out_of_memory_changes_nothing(places, monkeypatch, tmp_path):
    fault = failing(monkeypatch, *places)
    ours = run(with_memkit(PLAIN), tmp_path)
    num_ooms = ours.split_loss.num_ooms
    assert 1 <= num_ooms <= fault.num_failures == len(places)  # a copy of buffers is simply made again
    assert_same_training(ours, plain_run(tmp_path), 1e-12)
    logged = [entry for entry in ours.state.log_history if "loss" in entry]
    assert logged[-1]["memkit/num_ooms"] == num_ooms
    assert logged[-1]["memkit/host_bytes"] > 0
    assert "memkit/peak_bytes" not in logged[-1]  # the CPU has no counter
    events = [event.event for event in ours.callback_handler.callbacks[0].memory.events]
    assert 1 <= events.count("oom") <= num_ooms


def test_checkpoint_keeps_fitting_sizes(monkeypatch, tmp_path):
    saving = with_memkit(PLAIN).replace('"no"', '"steps", save_steps=2')
    with monkeypatch.context() as patch:
        failing(patch, 200)
        first = run(saving, tmp_path)
    saved = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    assert saved["stateful_callbacks"]["MemoryCallback"]["attributes"]["sizes"]
    resumed = run(
        saving.replace(".train()", f".train(resume_from_checkpoint={str(tmp_path / 'checkpoint-2')!r})"), tmp_path
    )
    assert max(resumed.split_loss.sizes) <= 2 < 4
    assert resumed.split_loss.num_ooms == 0
    assert_same_training(resumed, first, 1e-12)


# ---------------------------------------------------------------------------------------------- what parts weigh


def tokens(num_rows=6, width=24):
    """Rows of text with ever fewer labels that count."""
    text = Path(argparse.__file__).read_bytes()
    ids = torch.tensor(list(text[: num_rows * width])).view(num_rows, width)
    labels = ids.clone()
    for row in range(num_rows):
        labels[row, width - 3 * row - 2 :] = -100
    return {"input_ids": ids, "labels": labels}


def classes():
    batch = tokens()
    return batch | {"labels": batch["labels"][:, 0] % 3}


SMALL = {"vocab_size": 256, "n_positions": 24, "n_embd": 8, "n_layer": 1, "n_head": 2, "bos_token_id": 0}
SMALL |= {"eos_token_id": 0, "pad_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def causal():
    return GPT2LMHeadModel(GPT2Config(**SMALL, loss_type="ForCausalLM")), tokens()


def classifier():
    """Takes num_items_in_batch, as all of its kind do, and ignores it."""
    return GPT2ForSequenceClassification(GPT2Config(**SMALL, num_labels=3)), classes()


def translator():
    """The same, with a mean over the labels that count."""
    config = T5Config(vocab_size=256, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, dropout_rate=0.0)
    config.decoder_start_token_id = 0
    return T5ForConditionalGeneration(config), tokens()


class OwnModule(nn.Module):
    """No model of the library: a mean over its rows."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 8), nn.Linear(8, 1)

    def forward(self, input_ids, labels):
        return {"loss": F.mse_loss(self.head(self.embed(input_ids).mean(1)).squeeze(-1), labels)}


def own():
    return OwnModule(), {"input_ids": tokens()["input_ids"], "labels": torch.linspace(-1, 1, 6, dtype=torch.float64)}


class Focal(nn.Module):
    """Means over rows, or over all their tokens, made from a cross-entropy with reduction="none"."""

    def __init__(self, reduce=torch.mean):
        super().__init__()
        self.embed, self.head, self.reduce = nn.Embedding(256, 8), nn.Linear(8, 4), reduce

    def forward(self, input_ids, labels):
        hidden = self.embed(input_ids)
        logits = self.head(hidden if labels.dim() == 2 else hidden.mean(1))
        losses = F.cross_entropy(logits.movedim(-1, 1), labels, reduction="none")
        return {"loss": self.reduce((1 - (-losses).exp()) ** 2 * losses)}


def focal():
    return Focal(), classes()


def focal_of_tokens():
    ids = tokens()["input_ids"]
    return Focal(), {"input_ids": ids, "labels": ids % 4}


def focal_of_rows():
    ids = tokens()["input_ids"]
    return Focal(lambda losses: 0.7 * losses.mean(1).mean()), {"input_ids": ids, "labels": ids % 4}


def answers(start=(0, 3, 24, 5, 24, 7), end=(1, 4, 24, 6, 24, 24)):
    """Questions with answers at these tokens; the model ignores those after the last one, here 24."""
    model = GPT2ForQuestionAnswering(GPT2Config(**SMALL, num_labels=2))
    targets = {"start_positions": torch.tensor(start), "end_positions": torch.tensor(end)}
    return model, {"input_ids": tokens()["input_ids"]} | targets


def agreeing_answers():
    return answers(start=(0, 3, 24, 5, 24, 24))


def answers_as_labels(rows):
    batch = default_data_collator(rows)
    labels = torch.stack([batch.pop("start_positions"), batch.pop("end_positions")], 1)
    return batch | {"labels": labels.masked_fill(labels == 24, -100)}


def answers_loss(outputs, labels, num_items_in_batch=None):
    logits = torch.stack([outputs.start_logits, outputs.end_logits], 2)
    return F.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch


def loss_func(outputs, labels, num_items_in_batch=None):
    loss = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    return loss / num_items_in_batch


class OwnLoss(MemoryEfficientTrainer):
    """A compute_loss below the adapter, which does without num_items_in_batch."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        logits = model(**inputs).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class PlainOwnLoss(Trainer):
    compute_loss = OwnLoss.compute_loss


class Stacked(MemoryEfficientTrainer, PlainOwnLoss):
    """Put before another trainer, whose compute_loss it is."""


def one_step(kind, make, folder, args=(), **settings):
    torch.manual_seed(0)
    model, batch = make()
    options = {"max_steps": 2, "learning_rate": 0.1, "optim": "sgd", "gradient_accumulation_steps": 2, "use_cpu": True}
    options |= {"per_device_train_batch_size": 6, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    rows = [{key: value[row] for key, value in batch.items()} for row in range(6)]
    arguments = TrainingArguments(str(folder), **options | dict(args))
    trainer = kind(model.double(), arguments, train_dataset=rows, **settings)
    trainer.train()
    return trainer


CASES = {
    "causal": (causal, {}, {}, Trainer, MemoryEfficientTrainer),
    "classifier": (classifier, {}, {}, Trainer, MemoryEfficientTrainer),
    "translator": (translator, {}, {}, Trainer, MemoryEfficientTrainer),
    "own module": (own, {}, {}, Trainer, MemoryEfficientTrainer),
    "focal": (focal, {}, {}, Trainer, MemoryEfficientTrainer),
    "focal of tokens": (focal_of_tokens, {}, {}, Trainer, MemoryEfficientTrainer),
    "focal of rows": (focal_of_rows, {}, {}, Trainer, MemoryEfficientTrainer),
    "agreeing answers": (agreeing_answers, {}, {}, Trainer, MemoryEfficientTrainer),
    "answers as labels": (
        answers,
        {},
        {"data_collator": answers_as_labels, "compute_loss_func": answers_loss},
        Trainer,
        MemoryEfficientTrainer,
    ),
    "smoothed": (causal, {"label_smoothing_factor": 0.1}, {}, Trainer, MemoryEfficientTrainer),
    "loss function": (causal, {}, {"compute_loss_func": loss_func}, Trainer, MemoryEfficientTrainer),
    "own compute_loss": (causal, {}, {}, PlainOwnLoss, OwnLoss),
    "another trainer's": (causal, {}, {}, PlainOwnLoss, Stacked),
    "checkpointed": (causal, {"activation_checkpointing": True}, {}, Trainer, MemoryEfficientTrainer),
}


SLOW_CASES = {"smoothed", "loss function", "another trainer's", "checkpointed"}


@pytest.mark.parametrize(
    "case",
    one_in(2, CASES, slow=SLOW_CASES),
)
def test_parts_have_the_weights_of_the_models_loss(case, tmp_path):
    make, args, settings, plain, ours = CASES[case]
    want = one_step(plain, make, tmp_path, args, **settings)
    got = one_step(ours, make, tmp_path, args, num_microbatches=4, **settings)
    assert got.split_loss.sizes == (2, 2, 1, 1)
    torch.testing.assert_close(weights(got), weights(want), rtol=1e-7, atol=1e-9)  # T5 normalizes in float32


@pytest.mark.parametrize(
    ("case", "name", "rule"),
    [
        ("translator", "_count_items", lambda loss, part: len(part["labels"])),  # by rows, where tokens differ
        pytest.param(
            "classifier",
            "_adds_up",
            lambda *_: True,  # believing a signature
            marks=pytest.mark.skipif(
                int(transformers.__version__.partition(".")[0]) < 5,
                reason="transformers 4 promises no more than it does",
            ),
        ),
    ],
)
def test_other_weights_train_something_else(case, name, rule, monkeypatch, tmp_path):
    make = CASES[case][0]
    want = one_step(Trainer, make, tmp_path)
    monkeypatch.setattr(adapter if name == "_count_items" else MemoryEfficientTrainer, name, rule)
    monkeypatch.setattr(SplitWatch, "is_due", lambda *_, **__: False)
    got = one_step(MemoryEfficientTrainer, make, tmp_path, num_microbatches=4)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(weights(got), weights(want), rtol=1e-6, atol=1e-6)


class WithAuxiliary(OwnModule):
    def forward(self, input_ids, labels, num_items_in_batch=None, **_):
        rows = self.head(self.embed(input_ids)).squeeze(-1)
        return {"loss": rows.square().sum() / num_items_in_batch + 0.01 * rows.mean()}


class Hidden(OwnModule):
    """A mean over the labels that count, in a form that does not say so."""

    def forward(self, input_ids, labels):
        valid = labels.ne(-100)
        return {"loss": self.head(self.embed(input_ids)).squeeze(-1)[valid].square().mean()}


@pytest.mark.parametrize(
    ("model", "match"), [(WithAuxiliary, "twice the num_items_in_batch"), (Hidden, "ignored .-100..*compute_loss_func")]
)
def test_unweighable_loss_is_rejected_or_runs_whole(model, match, tmp_path):
    with pytest.raises(mk.errors.InputError, match=match):
        one_step(MemoryEfficientTrainer, lambda: (model(), tokens()), tmp_path, num_microbatches=2)
    trainer = one_step(MemoryEfficientTrainer, lambda: (model(), tokens()), tmp_path)
    assert math.isfinite(trainer.state.log_history[-1]["train_loss"])


UNREDUCED = r"a cross-entropy with reduction='none' or 'sum' whose graph does not show a mean over all rows;"


@pytest.mark.parametrize(
    "reduce",
    [
        torch.sum,
        lambda losses: losses.topk(2).values.mean(),
        lambda losses: (losses * (weights := torch.arange(1.0, 1 + len(losses)).double())).sum() / weights.sum(),
        lambda losses: losses.mean() + losses.var(),
    ],
)
def test_other_reductions_of_a_cross_entropy_are_refused(reduce, tmp_path):
    with pytest.raises(mk.errors.InputError, match=UNREDUCED):
        one_step(MemoryEfficientTrainer, lambda: (Focal(reduce), classes()), tmp_path, num_microbatches=2)


def test_a_batch_without_labels_is_refused_with_ways_out_that_work(tmp_path):
    """The ways out are the cases "agreeing answers" and "answers as labels"."""
    match = r"different numbers of items \(. and .\).*ignore the same rows.*batch\['labels'\].*compute_loss_func"
    with pytest.raises(mk.errors.InputError, match=match):
        one_step(MemoryEfficientTrainer, answers, tmp_path, num_microbatches=2)


class Compared(OwnModule):
    def forward(self, input_ids, labels):
        return {"loss": self.head(self.embed(input_ids).mean(1)).var()}


def test_rejects_loss_comparing_rows(tmp_path):
    with pytest.raises(mk.errors.ConfigError, match="compares or mixes the rows"):
        one_step(MemoryEfficientTrainer, lambda: (Compared(), own()[1]), tmp_path, num_microbatches=2)


def test_rejects_model_parallel_settings(monkeypatch, tmp_path):
    monkeypatch.setattr(TrainingArguments, "n_gpu", property(lambda self: 2))
    monkeypatch.setattr(Trainer, "_wrap_model", lambda self, model, *_, **__: model)
    with pytest.raises(mk.errors.ConfigError, match=r"DataParallel over 2 GPUs.*torchrun"):
        one_step(MemoryEfficientTrainer, own, tmp_path)


class Reporter(TrainerCallback):
    def __init__(self):
        self.logged = []

    def on_log(self, *_, logs, **__):
        self.logged.append(dict(logs))


def test_user_callback_reaches_reporting_callbacks(tmp_path):
    reporter, memory = Reporter(), mk.MemoryManager("cpu")
    callbacks = [reporter, MemoryCallback(memory)]
    one_step(MemoryEfficientTrainer, own, tmp_path, {"logging_steps": 1}, callbacks=callbacks)
    assert reporter.logged[0]["memkit/num_microbatches"] == 1
    assert memory.num_steps == 2


def test_the_callback_can_be_removed(tmp_path):
    class Without(MemoryEfficientTrainer):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.remove_callback(MemoryCallback)

    trainer = one_step(Without, own, tmp_path, num_microbatches=2)
    assert len(trainer.split_loss.sizes) == 2


def test_the_callback_alone_watches_any_trainer(tmp_path):
    memory = mk.MemoryManager("cpu", log=tmp_path / "memory.jsonl")
    trainer = one_step(Trainer, own, tmp_path, {"logging_steps": 1}, callbacks=[MemoryCallback(memory)])
    memory.close()
    log = mk.report.read_memory_events(tmp_path / "memory.jsonl")
    assert sum(event.event == "step" for event in log.events) >= 2
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert all(entry["memkit/host_bytes"] > 0 and "memkit/num_ooms" not in entry for entry in logged)
    assert len(logged) == memory.num_steps == 2


class ByTheEpoch(torch.utils.data.Dataset):
    """Records the epochs that were set before its samples were read."""

    epoch, read_in = None, ()

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 6

    def __getitem__(self, index):
        self.read_in = (*self.read_in, self.epoch)
        return {"input_ids": tokens()["input_ids"][index], "labels": torch.tensor(0.5, dtype=torch.float64)}


def test_the_callback_tells_a_data_set_inside_another_the_epoch(tmp_path):
    """Accelerate tells the loader's own data set only."""
    dataset = ByTheEpoch()
    subset = torch.utils.data.Subset(dataset, range(6))
    options = {"num_train_epochs": 3, "use_cpu": True, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    arguments = TrainingArguments(str(tmp_path), per_device_train_batch_size=6, **options)
    Trainer(OwnModule().double(), arguments, train_dataset=subset, callbacks=[MemoryCallback()]).train()
    assert dataset.read_in == (0,) * 6 + (1,) * 6 + (2,) * 6


@pytest.mark.parametrize("family", ["mistral", "t5"])
def test_caches_that_blocks_are_passed_are_as_they_were_in_a_rerun(family):
    """Their keys and values would be appended once more: transformers makes a cache in training too."""
    sizes = {"vocab_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}

    def run(checkpoint):
        torch.manual_seed(0)
        if family == "mistral":
            config = transformers.MistralConfig(
                hidden_size=16, intermediate_size=32, num_key_value_heads=1, sliding_window=4, **sizes
            )
            model = transformers.MistralForCausalLM(config).double()
        else:
            config = T5Config(
                d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, vocab_size=20, decoder_start_token_id=0
            )
            model = T5ForConditionalGeneration(config).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tokens = torch.randint(20, (2, 12))
        with mk.MemoryEfficientTrainingWrapper(model, optimizer, checkpoint=checkpoint) as trainer:
            for _ in range(3):
                trainer.train_step(tokens, lambda model, tokens: model(input_ids=tokens, labels=tokens).loss)
            assert bool(trainer.checkpointed_blocks) is (checkpoint is not None)
        return list(model.parameters())

    assert_same(run("auto"), run(None))
