"""The statement that makes a name grow is found in the source, with what empties it."""

import pytest

from memkit.memory.sources import Growth, NamePlace, find_call, find_growth

LOOP = "for batch in loader:\n    "


@pytest.mark.parametrize(
    ("source", "name", "line", "emptied", "restarted"),
    [
        (f"kept = []\n{LOOP}kept.append(1)", "kept", 3, False, False),
        (f"kept = {{}}\n{LOOP}kept[step] = 1", "kept", 3, False, False),
        (f"total = 0\n{LOOP}total += loss", "total", 3, False, False),
        (f"{LOOP}h = cell(x, h)", "h", 2, False, False),
        (f"{LOOP}out, h = rnn(x, h)", "h", 2, False, False),
        (f"{LOOP}self.store.setdefault(k, []).append(x)", "store", 2, False, False),
        (f"{LOOP}store['a'][0].append(x)", "store", 2, False, False),
        (f"{LOOP}kept.append(1)\n    if full:\n        kept.clear()", "kept", 2, True, False),
        (f"{LOOP}kept.append(1)\n    del kept[0]", "kept", 2, True, False),
        (f"{LOOP}kept.append(1)\n    kept = kept[-3:]", "kept", 2, True, False),
        (f"{LOOP}ring[step % 4] = x", "ring", 2, True, False),
        (f"{LOOP}if step % 3:\n        kept = []\n    kept.append(1)", "kept", 4, True, True),
        ("for epoch in epochs:\n    kept = []\n    for x in y:\n        kept.append(x)", "kept", 4, False, True),
        ("for epoch in epochs:\n    kept: list = []\n    for x in y:\n        kept.append(x)", "kept", 4, False, True),
        ("kept = []\nkept.append(1)\nkept.append(2)", "kept", 2, False, False),
    ],
)  # fmt: skip
def test_growth(source, name, line, emptied, restarted, tmp_path):
    file = str(tmp_path / "train.py")
    (tmp_path / "train.py").write_text(source)
    assert find_growth(NamePlace(name, file), []) == Growth(f"{file}:{line}", True, emptied, restarted)


@pytest.mark.parametrize(
    "source",
    [
        f"{LOOP}cache['last'] = x",  # replaced at each step
        f"{LOOP}kept = net(batch)",
        "def __init__(self, kept):\n    self.kept = kept",
        f"{LOOP}kept.count += 1",
        f"{LOOP}other.append(kept)",
        f"{LOOP}del kept",
        "for",  # no Python
    ],
)
def test_no_growth(source, tmp_path):
    (tmp_path / "train.py").write_text(source)
    for name in ("kept", "cache"):
        found = find_growth(NamePlace(name, str(tmp_path / "train.py")), [])
        assert found == Growth(None, False, False, False)


def test_looks_in_own_scope_then_file_then_others(tmp_path):
    own, other = tmp_path / "own.py", tmp_path / "other.py"
    own.write_text(
        "def f(kept):\n    kept.append(1)\n\n@cached\ndef g(kept):\n    kept.append(2)\n\nclass C:\n    pass\n"
    )
    other.write_text("c.kept.append(3)\nc.more.append(4)\n")
    own, other = str(own), str(other)
    assert find_growth(NamePlace("kept", own, 4, is_local=True), [other]).line == f"{own}:6"
    assert find_growth(NamePlace("kept", own, "C"), [other]).line == f"{own}:2"
    assert find_growth(NamePlace("more", own, "C"), [other]).line == f"{other}:2"
    assert find_growth(NamePlace("less", own, "C"), [other]) == Growth(f"{own}:8", False, False, False)
    assert find_growth(NamePlace("more", own, 4, is_local=True), [other]).line == f"{own}:4"
    assert find_growth(NamePlace("more", None), [own]) == Growth(None, False, False, False)


def test_call_is_found_by_its_method(tmp_path):
    (tmp_path / "train.py").write_text("net = make()\nnet[0].register_forward_hook(hook)\n")
    file = str(tmp_path / "train.py")
    assert find_call("register_forward_hook", [file]) == f"{file}:2"
    assert find_call("register_full_backward_hook", [file]) is None
