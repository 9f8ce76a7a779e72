"""Distinctions that each family of rules makes beyond its own examples."""

import pytest

from memkit.check.check import check_source


def rules_of(text, path="train.py"):
    return [finding.rule for finding in check_source(f"import torch\n{text}", path=path)]


# ------------------------------------------------------------------------------------------------- shell scripts


@pytest.mark.parametrize(
    "text",
    [
        "CUDA_VISIBLE_DEVICES=0 nohup python a.py > a.log 2>&1 &\nCUDA_VISIBLE_DEVICES=0,1 python b.py &",
        "CUDA_VISIBLE_DEVICES=0 python a.py \\\n  --seed 1 &\n# the second\nCUDA_VISIBLE_DEVICES=0 torchrun b.py",
        "CUDA_VISIBLE_DEVICES='1' python a.py & \n\nCUDA_VISIBLE_DEVICES=1 python b.py",
    ],
)
def test_busy_card(text):
    (finding,) = check_source(text, path="run.sh")
    assert finding.rule == "two-processes-one-gpu"
    assert text.split("\n")[finding.line - 1].startswith("CUDA_VISIBLE_DEVICES")
    assert finding.line > 1


@pytest.mark.parametrize(
    "text",
    [
        "CUDA_VISIBLE_DEVICES=0 python a.py\nCUDA_VISIBLE_DEVICES=0 python b.py",
        "CUDA_VISIBLE_DEVICES=0 python a.py && CUDA_VISIBLE_DEVICES=0 python b.py",
        "CUDA_VISIBLE_DEVICES=0 python a.py &\nCUDA_VISIBLE_DEVICES=0 nvidia-smi",
        "CUDA_VISIBLE_DEVICES=$1 python a.py &\nCUDA_VISIBLE_DEVICES=$1 python b.py &",
        "CUDA_VISIBLE_DEVICES=0 python a.py &\nwait $!\nCUDA_VISIBLE_DEVICES=0 python b.py &",
        "if [ $A ]; then\nCUDA_VISIBLE_DEVICES=0 python a.py &\nelse\nCUDA_VISIBLE_DEVICES=0 python b.py &\nfi",
        "#CUDA_VISIBLE_DEVICES=0 python a.py &\nCUDA_VISIBLE_DEVICES=0 python b.py &",
    ],
)
def test_free_or_unknown_card(text):
    assert not check_source(text, path="run.sh")


def test_processes_for_exported_cards():
    launch = "torchrun --nproc-per-node 4 train.py"
    assert rules_of(f"export CUDA_VISIBLE_DEVICES=0,1\n{launch}", path="run.sh") == ["more-processes-than-gpus"]
    assert not check_source(f"export CUDA_VISIBLE_DEVICES=0,1,2,3\n{launch}", path="run.sh")
    assert not check_source(f"export CUDA_VISIBLE_DEVICES=0\nexport CUDA_VISIBLE_DEVICES=$2\n{launch}", path="run.sh")


# ------------------------------------------------------------------------------------------------- setup


@pytest.mark.parametrize(
    "text",
    [
        "torch.utils.data.DataLoader(data, pin_memory=True, **settings)",
        "torch.utils.data.DataLoader(data, 8, True, None, None, 4, pin_memory=True)",
        "torch.utils.data.DataLoader(data, num_workers=args.workers, persistent_workers=True)",
        "torch.utils.data.DataLoader(data, prefetch_factor=None)",
        "mine.DataLoader(data, persistent_workers=True)",
        "torch.load(path, **settings)",
        "torch.load(path, 'cpu', weights_only=safe)",
        "torch.utils.checkpoint.checkpoint(f, x, **settings)",
        "mine.checkpoint(f, x)",
        "torch.set_default_device(args.device)",
        "data = torch.load(path, weights_only=True).to(device)",
        "model.cpu()\ntorch.save(model.state_dict(), p)\nnet.cuda().load_state_dict(torch.load(p, weights_only=True))",
        "scaler.step(optimizer)",
        "param.grad += update\noptimizer.zero_grad(set_to_none=False)",
    ],
)
def test_valid_or_unknown_settings(text):
    assert rules_of(text) == []


@pytest.mark.parametrize(
    "load",
    [
        "state = torch.load(p, weights_only=True)\nmodel.load_state_dict(state)",
        "state = torch.load(p, weights_only=True)\nmodel.load_state_dict(state['model'])",
        "state = torch.load(p, weights_only=True)['model']\nmodel.load_state_dict(state, strict=False)",
        "model.load_state_dict(torch.load(p, weights_only=True)['model'])",
    ],
)
def test_ways_to_copy_a_checkpoint(load):
    assert rules_of(f"model.to(device)\n{load}") == ["load-without-map-location"]


def test_import_aliases_of_torch():
    assert rules_of("import torch as t\nt.autograd.set_detect_anomaly(True)") == ["anomaly-left-on"]
    assert rules_of("from torch.autograd import set_detect_anomaly as f\nf(mode=True)") == ["anomaly-left-on"]
    assert rules_of("if __name__ == '__main__':\n    torch.autograd.set_detect_anomaly(True)") == ["anomaly-left-on"]


# ------------------------------------------------------------------------------------------------- precision, graphs

SCALED = "scaler = torch.amp.GradScaler()\nfor x, y in loader:\n    scaler.scale(loss(x, y)).backward()\n"


@pytest.mark.parametrize(
    "steps",
    [
        "scaler.unscale_(optimizer); clip_grad_norm_(p, 1.0); scaler.step(optimizer); scaler.update()",
        "scaler.step(optimizer); scaler.update()\n    if scaler.get_scale() >= before: scheduler.step()",
        "scaler.step(optimizer_d); scaler.step(optimizer_g); scaler.update()",
        "scaler_d.step(optimizer_d); scaler_d.update(); scaler_g.step(optimizer_g); scaler_g.update()",
    ],
)
def test_valid_orders(steps):
    assert rules_of(f"{SCALED}    {steps}\n") == []


def test_schedule_stepped_in_branch_without_scaler():
    text = (
        "    if amp:\n        scaler.step(optimizer)\n    else:\n        optimizer.step()\n        scheduler.step()\n"
    )
    assert rules_of(SCALED + text) == []


@pytest.mark.parametrize(
    "revive", ["large.requires_grad_()", "large.requires_grad_(True)", "large.requires_grad = True"]
)
def test_ways_to_revive_a_detached_tensor(revive):
    cut = "images = generator(z)\nwith torch.no_grad():\n    large = upscaler(images)\n"
    assert rules_of(f"{cut}{revive}\n") == ["gradient-cut"]
    assert rules_of(cut) == []


def test_graph_retained_for_second_use():
    step = "for x in loader:\n    out = net(x).sum()\n    out.backward(retain_graph=True)\n{}    optimizer.step()\n"
    assert rules_of(step.format("")) == ["retain-graph"]
    assert rules_of(step.format("    g = torch.autograd.grad(out, x)\n")) == []
    assert rules_of(step.format("    for part in parts(out):\n        part.backward()\n")) == []


def test_accumulation_under_ddp():
    text = (
        "from torch.nn.parallel import DistributedDataParallel as DDP\nnet = DDP(net)\n"
        "for i, x in enumerate(loader):\n    {}net(x).sum().backward()\n"
        "    if i % 4 == 3:\n        optimizer.step()\n"
    )
    assert rules_of(text.format("")) == ["chunks-reduced"]
    assert rules_of(text.format("with net.no_sync() if i % 4 < 3 else plain(): ")) == []


def test_tail_stepped_after_the_loop():
    text = "for i, x in enumerate(loader):\n    net(x).sum().backward()\n    if (i + 1) % 4 == 0: optimizer.step()\n"
    assert rules_of(text) == ["accumulation-tail"]
    assert rules_of(f"{text}optimizer.step()\n") == []
