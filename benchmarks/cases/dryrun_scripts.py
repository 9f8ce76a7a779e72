"""`memkit dryrun` on public training scripts, unchanged, each next to the same script run for real on the CPU.

The scripts are not part of memkit: the folder given holds clones of their repositories (those missing are skipped).
They run in a copy of it, with small data sets of the layouts that they ask for, made here of random numbers.

Truth: the same script with its own option for the CPU, the same number of steps, watched by memkit's recorder. Compared
are the highest bytes of each category. Parameters, gradients and optimizer state must be equal (`is_equal`).
Activations are a ratio, near 1 where the operators are the same on both devices; `differs` says which are not.

Run: python -m benchmarks.cases.dryrun_scripts FOLDER   (5 minutes; needs torchvision, pillow, tqdm, transformers,
datasets, evaluate)
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.result import write_result
from memkit._recorder.recording import Recording

STEPS = 3
GPU = "RTX 4090"
ROOT = Path(__file__).parents[2]
CATEGORIES = ("parameter", "gradient", "optimizer", "activation")
WORDS = ("the", "card", "runs", "out", "of", "memory", "here", "and", "there", ".")


# ------------------------------------------------------------------------------------------------------- data


def mnist(folder: Path) -> None:
    raw = folder.parent / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", 2000), ("t10k", 1000)):
        header = b"".join(number.to_bytes(4, "big") for number in (0x803, count, 28, 28))
        images = np.random.default_rng(0).integers(0, 255, (count, 28, 28), np.uint8)
        (raw / f"{name}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        header = b"".join(number.to_bytes(4, "big") for number in (0x801, count))
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(header + (np.arange(count) % 10).astype(np.uint8).tobytes())


def characters(folder: Path) -> None:
    target = folder / "data" / "shakespeare_char"
    target.mkdir(parents=True, exist_ok=True)
    for name in ("train", "val"):
        np.random.default_rng(0).integers(0, 65, 20_000).astype(np.uint16).tofile(target / f"{name}.bin")
    (target / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 65}))


def words(folder: Path) -> None:
    target = folder / "data" / "wikitext-2"
    target.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", 4000), ("valid", 300), ("test", 300)):
        text = " ".join(np.random.default_rng(0).choice([f"{word}{n}" for word in WORDS for n in range(500)], count))
        (target / f"{name}.txt").write_text(text.replace(".1 ", "\n"))


def pictures(folder: Path) -> None:
    from PIL import Image

    for name in ("imgs", "masks"):
        (folder / "data" / name).mkdir(parents=True, exist_ok=True)
    for index in range(12):
        numbers = np.random.default_rng(index)
        Image.fromarray(numbers.integers(0, 255, (256, 384, 3), np.uint8)).save(folder / f"data/imgs/p{index}.jpg")
        Image.fromarray(numbers.integers(0, 2, (256, 384), np.uint8)).save(folder / f"data/masks/p{index}_mask.gif")
    # The script logs to a service; this stands for its client.
    (folder / "wandb.py").write_text(
        "class _Run:\n    config = {}\n    def log(self, record): pass\n"
        "def init(**_): return _Run()\ndef Histogram(x): return None\ndef Image(x): return None\n"
    )


def points(folder: Path) -> None:
    target = folder / "shapenet"
    (target / "train_test_split").mkdir(parents=True, exist_ok=True)
    (target / "synsetoffset2category.txt").write_text("Airplane 02691156\nBag 02773838\n")
    files = []
    for category in ("02691156", "02773838"):
        for kind in ("points", "points_label"):
            (target / category / kind).mkdir(parents=True, exist_ok=True)
        for index in range(160):
            cloud = np.random.default_rng(index).normal(size=(300, 3))
            np.savetxt(target / category / "points" / f"p{index}.pts", cloud)
            np.savetxt(target / category / "points_label" / f"p{index}.seg", np.ones(300), fmt="%d")
            files.append(f"shape_data/{category}/p{index}")
    for split in ("train", "test"):
        (target / "train_test_split" / f"shuffled_{split}_file_list.json").write_text(json.dumps(files))


def tokens(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate([*WORDS, "<end>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="."))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder / "tokenizer")
    for name in ("train", "valid"):
        lines = [" ".join(np.random.default_rng(row).choice(WORDS, 64)) for row in range(400)]
        (folder / f"{name}.txt").write_text("\n".join(lines))


# ------------------------------------------------------------------------------------------------------- scripts


class Script(NamedTuple):
    name: str
    path: str
    prepare: Callable[[Path], None]
    arguments: str
    on_card: str = ""
    on_cpu: str = ""
    differs: str = ""


SCRIPTS = (
    Script(
        "nanoGPT", "nanoGPT/train.py", characters,
        "config/train_shakespeare_char.py --eval_iters=1 --gradient_accumulation_steps=2 --batch_size=16",
        on_cpu="--device=cpu --compile=False", differs="autocast, attention, dropout",
    ),
    Script(
        "nanoGPT float32", "nanoGPT/train.py", characters,
        "config/train_shakespeare_char.py --eval_iters=1 --dropout=0.0 --dtype=float32 --batch_size=16",
        on_cpu="--device=cpu --compile=False", differs="attention",
    ),
    Script("dcgan", "examples/dcgan/main.py", lambda _: None, "--dataset fake --batchSize 16", on_card="--accel"),
    Script("vae", "examples/vae/main.py", mnist, "", on_cpu="--no-accel"),
    Script("mnist", "examples/mnist/main.py", mnist, "", on_cpu="--no-accel", differs="dropout"),
    Script("mnist rnn", "examples/mnist_rnn/main.py", mnist, "", on_card="--accel", differs="LSTM, dropout"),
    Script("siamese network", "examples/siamese_network/main.py", mnist, "", on_cpu="--no-accel"),
    Script(
        "word LSTM", "examples/word_language_model/main.py", words, "--epochs 1", on_card="--accel",
        differs="LSTM, dropout",
    ),
    Script(
        "word transformer", "examples/word_language_model/main.py", words,
        "--epochs 1 --model Transformer --dropout 0.0", on_card="--accel", differs="attention, dropout in the encoder",
    ),
    Script("U-Net", "Pytorch-UNet/train.py", pictures, "--scale 0.25 --batch-size 2"),
    Script("U-Net mixed", "Pytorch-UNet/train.py", pictures, "--scale 0.25 --batch-size 2 --amp", differs="autocast"),
    Script(
        "PointNet", "pointnet.pytorch/utils/train_classification.py", points,
        "--dataset ../shapenet --num_points 500 --workers 2",
    ),
    Script(
        "Trainer run_clm", "transformers/run_clm.py", tokens,
        "--model_type gpt2 --config_overrides n_layer=4,n_embd=128,n_head=4,vocab_size=512 --tokenizer_name tokenizer "
        "--train_file train.txt --validation_file valid.txt --do_train --output_dir out --block_size 128 "
        "--per_device_train_batch_size 4 --report_to none",
        on_cpu="--use_cpu", differs="attention, dropout",
    ),
)  # fmt: skip


def command(script: Script, arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run in the script's folder, as its users do; PointNet's is one above."""
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if script.name == "PointNet":
        paths.append(str(folder.parent))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def dry(script: Script, file: Path) -> dict[str, Any]:
    own = f"{script.arguments} {script.on_card}".split()
    options = ["--gpu", GPU, "--steps", str(STEPS), "--json"]
    done = command(script, ["-m", "memkit", "dryrun", file.name, *own, *options], file.parent)
    if done.returncode != 0:
        print(done.stderr[-3000:], done.stdout[-1500:])
    report = json.loads(done.stdout)
    figures = report.pop("estimate")
    return {
        "ended": report["ended"], "num_steps": report["num_steps"], "seconds": round(report["seconds"], 1),
        "num_written": len(report["written"]), "num_guesses": len(figures["guesses"]), "figures": figures,
        "problem": report["problem"], "exit_code": done.returncode,
    }  # fmt: skip


def watched(script: Script, file: Path, where: str) -> dict[str, int] | None:
    """Highest bytes of each category, of the script with data on the CPU or on the virtual GPU."""
    own = f"{script.arguments} {script.on_cpu if where == 'cpu' else script.on_card}".split()
    done = command(script, [str(Path(__file__)), f"--{where}", file.name, *own], file.parent)
    try:
        return json.loads((file.parent / f"{where}.json").read_text())
    except FileNotFoundError:
        print(done.stderr[-3000:])
        return None


def watch(script: str, where: str) -> None:
    """In a process of its own."""
    import torch

    from memkit._recorder.recorder import Recorder
    from memkit.predict.script.imports import AtImport
    from memkit.predict.script.process import StepCounter, _EndOfStepsError
    from memkit.predict.virtual_gpu import VirtualGPU

    sys.path[0] = str(Path(script).resolve().parent)
    sys.meta_path.insert(0, AtImport())  # so that torchvision can be imported
    module = ModuleType("__main__")
    module.__file__ = script
    sys.modules["__main__"] = module
    steps = StepCounter(STEPS)
    if where == "cpu":  # for scripts that know of no CPU
        torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_: self
    gpu = Recorder() if where == "cpu" else VirtualGPU(GPU)
    gpu.__enter__()
    with steps.counted(), suppress(_EndOfStepsError):
        exec(compile(Path(script).read_bytes(), script, "exec"), vars(module))
    recording = gpu.recording() if isinstance(gpu, Recorder) else gpu.record().recording
    highest = {name: _highest(recording, name) for name in CATEGORIES} | {"num_steps": steps.num_done}
    Path(f"{where}.json").write_text(json.dumps(highest))


def _highest(recording: Recording, category: str) -> int:
    """The highest bytes of one category; an optimizer's counters of steps lie on the host in both cases."""
    is_in = np.array([name == category for name in recording.names["category"]])[recording.codes["category"]]
    if category == "optimizer":
        is_in &= np.abs(_sizes(recording)) > 4
    chosen = is_in[recording.event_storage]
    return int(np.cumsum(recording.event_bytes[chosen]).max(initial=0))


def _sizes(recording: Recording) -> NDArray[np.int64]:
    return np.array([storage.nbytes for storage in recording.storages()])


def main(sources: Path) -> None:
    rows = []
    for script in SCRIPTS:
        if not (sources / script.path).is_file():
            print(f"{script.name}: no {script.path}, skipped")
            continue
        with tempfile.TemporaryDirectory() as copy:
            shutil.copytree(sources, copy, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".git", "*.ipynb"))
            file = Path(copy, script.path)
            script.prepare(file.parent.parent if script.name == "PointNet" else file.parent)
            before = sorted(path for path in Path(copy).rglob("*"))
            seen = dry(script, file)
            is_untouched = sorted(path for path in Path(copy).rglob("*")) == before
            card, cpu = (watched(script, file, where) for where in ("card", "cpu"))
        row = {"script": script.name, "path": script.path, "arguments": script.arguments, "differs": script.differs}
        row |= {key: value for key, value in seen.items() if key != "figures"} | {"is_untouched": is_untouched}
        row |= {name: seen["figures"][name] for name in ("peak_bytes", "reserved_bytes")} | compare(card, cpu)
        rows.append(row)
        print(row, flush=True)
    write_result("dryrun_scripts", {"gpu": GPU, "steps": STEPS, "scripts": rows})


def compare(card: dict[str, int] | None, cpu: dict[str, int] | None) -> dict[str, Any]:
    if card is None or cpu is None:
        return {"is_equal": None}
    return {
        "is_equal": all(card[name] == cpu[name] for name in ("parameter", "optimizer", "gradient", "num_steps")),
        "activations_ratio": round(card["activation"] / max(1, cpu["activation"]), 4),
        "card": card,
        "cpu": cpu,
    }


if __name__ == "__main__":
    if sys.argv[1] in {"--cpu", "--card"}:
        where = sys.argv[1].removeprefix("--")
        del sys.argv[:2]
        watch(sys.argv[0], where)
    else:
        main(Path(sys.argv[1]).resolve())
