"""Advice from facts: which remedies they call for, in both languages, in one order; and the catalog of remedies."""

import ast
import json
import re
import string
from dataclasses import replace
from pathlib import Path

import pytest

from memkit._advice import catalog
from memkit._advice.suggest import Facts, rank, suggest
from memkit._core.records import HostMemory
from memkit._core.units import GIB

CATALOG = json.loads(Path(catalog.__file__).with_name("catalog.json").read_text("utf-8"))
PACKAGE = Path(catalog.__file__).parents[1]
BOTH_SET = {
    "PYTORCH_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:128",
    "PYTORCH_CUDA_ALLOC_CONF": "garbage_collection_threshold:0.8",
}
# The known figures, and by symptom the remedies that they call for, with the most that each can save.
CASES = [
    (Facts(), []),
    (Facts(peak_bytes=0, components=(("vae", 0),), loaded_bytes=0, unattributed_bytes=0), []),
    (
        Facts(peak_bytes=16 * GIB, components=(("t5", 10 * GIB), ("vae", 1 * GIB), ("t5", 4 * GIB))),
        [
            ("component", "offload_component", 10 * GIB),
            ("component", "offload_component", 4 * GIB),
            ("component", "half_bits", 5 * GIB),
            ("component", "half_bits", 2 * GIB),
            ("component", "smaller_component", None),
            ("component", "smaller_component", None),
        ],
    ),
    (
        Facts(peak_bytes=8 * GIB, loaded_bytes=6 * GIB),
        [("activations", "checkpoint", 2 * GIB), ("activations", "chunks", 2 * GIB)],
    ),
    (Facts(peak_bytes=8 * GIB, loaded_bytes=7 * GIB), []),
    (Facts(growth_bytes=10**6), [("growth", "find_leak", None)]),
    (Facts(growth_bytes=10**6, growth_holder="global `history`"), [("growth", "empty_holder", None)]),
    (Facts(growth_bytes=10**6, peak_bytes=GIB, total_bytes=8 * GIB), [("growth", "find_leak", None)]),
    (
        Facts(peak_bytes=12 * GIB, reserved_bytes=20 * GIB),
        [("fragmentation", "expandable_segments", 8 * GIB)],
    ),
    (
        Facts(peak_bytes=12 * GIB, reserved_bytes=20 * GIB, has_expandable_segments=True, split_bytes=GIB),
        [("fragmentation", "fewer_shapes", 8 * GIB)],
    ),
    (Facts(peak_bytes=18 * GIB, reserved_bytes=20 * GIB), []),
    (
        Facts(settings=BOTH_SET),
        [("allocator settings", "one_variable", None), ("allocator settings", "no_split_limit", None)],
    ),
    (
        Facts(peak_bytes=22 * GIB, total_bytes=24 * GIB),
        [("room", "micro_batches", None), ("room", "larger_card", None)],
    ),
    (Facts(peak_bytes=15 * GIB, total_bytes=24 * GIB), []),
    (Facts(peak_bytes=1 * GIB, total_bytes=24 * GIB), [("room", "larger_batch", None)]),
    (
        Facts(peak_bytes=1 * GIB, reserved_bytes=20 * GIB, total_bytes=24 * GIB, has_expandable_segments=True),
        [("fragmentation", "fewer_shapes", 19 * GIB)],
    ),  # what is reserved has to fit too
    (
        Facts(host=HostMemory(rss_bytes=0, available_bytes=GIB, total_bytes=16 * GIB, limited_by="cgroup")),
        [("host memory", "lighter_loader", None)],
    ),
    (Facts(others=(17,)), [("shared device", "own_card", None)]),
    (Facts(others=(17, 18)), [("shared device", "own_card", None)]),
    (Facts(lacks_stages=True), [("log", "reset_peaks", None)]),
    (Facts(peak_bytes=8 * GIB, unattributed_bytes=2 * GIB), [("log", "track", None)]),
    (Facts(lacks_reserved=True), [("log", "record_reserved", None)]),
]


@pytest.mark.parametrize(("facts", "expected"), CASES)
def test_facts_trigger_advice(facts, expected):
    tips = suggest(facts)
    assert [(tip.topic, tip.remedy, tip.saves_bytes) for tip in tips] == expected
    for tip in tips:
        assert str(tip) == f"{tip.topic}: {tip.evidence}. {tip.action}"
        assert tip.evidence.isascii()
        assert tip.action.endswith(".")
        assert not re.search(r"[{}]|None", str(tip))


@pytest.mark.parametrize("facts", [facts for facts, _ in CASES])
def test_chinese_has_the_same_figures(facts):
    figures = re.compile(r"\d[\d.,]*\d")
    for english, chinese in zip(suggest(facts), suggest(facts, "zh"), strict=True):
        assert sorted(figures.findall(chinese.evidence)) == sorted(figures.findall(english.evidence))
        assert chinese.action.endswith("。")
        assert not re.search(r"[{}]", str(chinese))
        assert replace(chinese, evidence=english.evidence, action=english.action) == english


def test_advice_contains_the_code_to_write():
    checkpoint, chunks = suggest(Facts(peak_bytes=8 * GIB, loaded_bytes=GIB))
    assert "mk.MemoryEfficientTrainingWrapper(model, optimizer, checkpoint='auto')" in checkpoint.action
    assert "mk.ChunkedProcessor(module, chunk_size='auto')(x) in place of module(x)" in chunks.action
    assert checkpoint.action.endswith("It saves nothing in a run without backward.")


def test_one_order():
    gib = {"exact": True, "saved_bytes": GIB}
    best_first = [
        rank(exact=False, saved_bytes=1, is_verified=True),
        rank(**gib),
        rank(**gib, flops_ratio=2.0),
        rank(exact=True, saved_bytes=0),
        rank(exact=True, saved_bytes=None),
        rank(**gib, moves=True),
        rank(exact=False, saved_bytes=9 * GIB),
        rank(exact=None, saved_bytes=None),
    ]
    assert best_first == sorted(best_first)
    assert len(set(best_first)) == len(best_first)


# ---- the catalog


def pairs(values):
    """Every text in two languages of the catalog."""
    if isinstance(values, dict) and "en" in values:
        yield {language: text for language, text in values.items() if language != "topic"}
    elif isinstance(values, dict):
        for each in values.values():
            yield from pairs(each)


def test_every_text_is_in_both_languages_with_the_same_places():
    found = list(pairs(CATALOG))
    assert len(found) > 30
    for pair in found:
        assert set(pair) == {"en", "zh"}, pair
        english, chinese = (
            sorted(name for _, name, _, _ in string.Formatter().parse(text) if name) for text in pair.values()
        )
        assert english == chinese, pair


def test_entries_and_references_match():
    named = {"suggest": set(), "remedies": set()}
    for path in (PACKAGE / "_advice/suggest.py", PACKAGE / "recipes/advice/remedies.py"):
        tree = ast.parse(path.read_text("utf-8"))
        named[path.stem] = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    told = {tip for _, tips in CASES for _, tip, _ in tips}
    assert {key for key, entry in CATALOG["remedies"].items() if "action" in entry} == told
    tried = {key for key, entry in CATALOG["remedies"].items() if "name" in entry}
    assert tried <= named["remedies"]
    assert told | tried == set(CATALOG["remedies"])
    assert set(CATALOG["symptoms"]) <= named["suggest"]


def test_a_remedy_fills_in_and_joins():
    halves = catalog.remedy("micro_batches").filled(settings={"accumulation_steps": 2}, parts=2)
    backward = catalog.remedy("step_in_backward")
    assert (halves.name, halves.exact, halves.compares) == ("2 micro-batches", True, "gradients")
    assert halves.full_code("bf16-mixed") == (
        "mk.MemoryEfficientTrainingWrapper(model, optimizer, precision='bf16-mixed', accumulation_steps=2)"
    )
    pair = halves.with_other(backward)
    assert (pair.name, pair.compares, pair.redraws, pair.moves) == (
        "2 micro-batches + step in backward",
        "gradients",
        True,
        False,
    )
    assert pair.full_code().splitlines() == [halves.full_code(), backward.full_code()]
    assert backward.with_other(catalog.remedy("optimizer_form")).compares == "updates"
    assert backward.with_other(catalog.remedy("bfloat16")).exact is False
    sums = "same gradient, summed in another order"
    assert pair.effect == f"{sums}; no clipping by the total norm, no accumulation"
    assert catalog.remedy("checkpoint").with_other(halves).effect == sums
    both = catalog.remedy("checkpoint").with_other(catalog.remedy("offload_activations"))
    assert both.effect == catalog.remedy("offload_activations").effect
    with pytest.raises(KeyError):
        catalog.remedy("micro_batches").filled()
