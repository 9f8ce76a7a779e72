"""Every rule finds its own example, at one place, and leaves its near miss alone."""

import pytest

from memkit.check.check import RULES, check_source
from memkit.check.launch import RULES as SHELL_RULES


def found(rule, text):
    path = "run.sh" if rule in SHELL_RULES else "train.py"
    return [finding for finding in check_source(text, path=path) if finding.rule == rule.id]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_example_and_near_miss(rule):
    (finding,) = found(rule, rule.example)
    assert finding.level == rule.level
    assert rule.what in finding.message
    assert rule.why in finding.message
    assert finding.fix == rule.fix
    assert not found(rule, rule.near_miss)


STEP = """
import torch
from torch import nn
model.cuda()
for i, (x, y) in enumerate(loader):
    due = i == 7
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    {}
"""


def rules_in_step(line):
    return [finding.rule for finding in check_source(STEP.format(line))]


@pytest.mark.parametrize(
    "setting", ["verbose", "args.verbose", "not quiet", "mode == 'long'", "log is not None", "True"]
)
def test_a_setting_does_not_make_a_habit_rare(setting):
    assert rules_in_step(f"if {setting}: print(loss)") == ["sync-in-step"]


@pytest.mark.parametrize(
    "guard", ["i % 10 == 0", "i", "due", "i == last", "len(x) > 3", "i > 5 and verbose", "ready()"]
)
def test_values_that_change_between_steps_count(guard):
    assert rules_in_step(f"if {guard}: print(loss)") == []


@pytest.mark.parametrize("context", ["torch.no_grad()", "torch.inference_mode()"])
def test_a_sum_without_gradients_has_no_graph_but_a_list_keeps_that_of_its_items(context):
    assert rules_in_step(f"with {context}: total += loss") == []
    assert rules_in_step(f"with {context}: total = total + loss") == []
    assert rules_in_step(f"with {context}: losses.append(loss)") == ["graph-kept"]
    assert rules_in_step(f"with {context}: losses += [loss]") == ["graph-kept"]


@pytest.mark.parametrize(
    "line",
    [
        "total += loss",
        "total = total + loss",
        "total += loss * len(x)",
        "self.losses.append(loss)",
        "history.append((i, loss))",
        "average = 0.9 * average + 0.1 * loss",
    ],
)
def test_ways_to_keep_a_graph(line):
    assert rules_in_step(line) == ["graph-kept"]


@pytest.mark.parametrize(
    "line",
    [
        "total += loss.detach()",
        "total += 1",
        "loss = loss.detach(); total += loss",
        "parts = []; parts.append(loss)",
        "meter.update(loss)",
        "with torch.no_grad(): value = metric(x); total += value",
    ],
)
def test_ways_to_keep_none(line):
    assert rules_in_step(line) == []


def test_distinguishes_trial_network_from_one_built_every_step():
    trial = "for width in widths:\n    net = nn.Linear(width, 1)\n    optimizer = torch.optim.SGD(net.parameters())\n"
    steps = "    net(x).sum().backward()\n    optimizer.step()\n"
    assert not check_source(f"import torch\nfrom torch import nn\n{trial}{steps}")
    assert rules_in_step("y = nn.Sequential(nn.Linear(3, 3), nn.ReLU())(x)") == ["built-in-step"]


@pytest.mark.parametrize(
    ("wrapper", "num_found"),
    [("", 1), ("@torch.no_grad()\n", 0), ("@torch.inference_mode()\n", 0), ("@nograd\n", 0), ("@cache\n", 1)],
)
def test_decorators_disabling_gradients(wrapper, num_found):
    text = "def validate():\n    model.eval()\n    for x in loader:\n        y = model(x)\n"
    assert len(check_source(f"import torch\n{wrapper}{text}")) == num_found


def test_gradients_disabled_by_caller_and_discarded_forward():
    text = "import torch\ndef validate():\n    model.eval()\n    for x in loader:\n        {}model(x)\n"
    assert check_source(text.format("y = "))
    assert not check_source(text.format(""))
    assert not check_source(text.format("y = ") + "with torch.no_grad():\n    validate()\n")
