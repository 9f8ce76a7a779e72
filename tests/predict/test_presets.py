"""Presets: the table, names that are not in it, and cards that do not match."""

import warnings
from pathlib import Path

import pytest

from memkit._core.errors import ConfigError, MemkitWarning
from memkit._core.units import GIB
from memkit.predict.formula import estimate_by_formula
from memkit.predict.gpus import all_gpus
from memkit.predict.presets import PRESETS, get_preset_config
from tests.helpers import assert_refused


@pytest.mark.parametrize(
    ("name", "batch_size", "steps", "channels"), [("low", 1, 8, 48), ("medium", 2, 4, 64), ("high", 4, 2, 96)]
)
def test_the_table(name, batch_size, steps, channels):
    config = get_preset_config(name)
    assert (config.preset, config.gpu_memory_gb) == (name, None)
    assert (config.batch_size, config.gradient_accumulation_steps, config.model_channels) == (
        batch_size,
        steps,
        channels,
    )
    assert config.effective_batch_size == 8


@pytest.mark.parametrize("name", PRESETS)
def test_presets_fit_their_cards_with_11_percent_free(name):
    lowest, highest = PRESETS[name].range_gb
    estimate = estimate_by_formula(get_preset_config(name))
    cards = [card for card in all_gpus() if card.vendor == "NVIDIA" and lowest <= card.box_bytes / GIB <= highest]
    assert len(cards) > 10
    for card in cards:
        assert estimate.context_bytes >= card.context_bytes
        assert estimate.headroom_bytes(card.name) >= 0.11 * card.total_bytes, card.name


@pytest.mark.parametrize(
    ("name", "gpu_memory_gb"),
    [("low", 8), ("low", 12), ("low", 15), ("medium", 16), ("medium", 24), ("medium", 31), ("high", 32), ("high", 80)],
)
def test_a_matching_card_is_silent(name, gpu_memory_gb):
    config = get_preset_config(name, gpu_memory_gb)  # warnings are errors
    assert config.gpu_memory_gb == gpu_memory_gb


@pytest.mark.parametrize(
    ("name", "gpu_memory_gb", "text"),
    [
        ("high", 24, "'high' (32 GB and more) does not fit a card of 24 GB; 'medium' fits."),
        ("medium", 12.5, "'medium' (16-24 GB) does not fit a card of 12.5 GB; 'low' fits."),
        ("low", 16, "'low' (8-12 GB) would leave memory unused on a card of 16 GB; 'medium' fits."),
        ("medium", 32, "'medium' (16-24 GB) would leave memory unused on a card of 32 GB; 'high' fits."),
        (
            "low",
            7.9,
            "no preset fits a card of 7.9 GB: the smallest, 'low', is for 8-12 GB. Override checkpointing=True",
        ),
        ("high", 4, "no preset fits a card of 4 GB"),
    ],
)
def test_mismatched_card_warns_and_names_fitting_preset(name, gpu_memory_gb, text):
    with pytest.warns(MemkitWarning) as caught:
        config = get_preset_config(name, gpu_memory_gb)
    assert config.preset == name
    assert text in str(caught[0].message)
    assert caught[0].filename == __file__, "the warning must point at the caller's line"


def test_the_advice_for_a_small_card_works():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = get_preset_config("low", 6, checkpointing=True)
    assert estimate_by_formula(config).fits("6GiB")


def test_with_overrides_the_estimate_decides():
    assert get_preset_config("high", 16, resolution=64).resolution == 64
    assert get_preset_config("low", 24, batch_size=4).batch_size == 4
    with pytest.warns(MemkitWarning, match=r"with these overrides is estimated at .* more than a card of 8 GB has"):
        get_preset_config("low", 8, batch_size=4)


def test_overrides_are_validated():
    call, other_preset = "get_preset_config('medium', 24, batch_size='2'): ", "the override preset='high'"
    assert_refused(lambda: get_preset_config("medium", 24, batch_size="2"), ConfigError, call)
    assert_refused(lambda: get_preset_config("medium", model_chanels=64), ConfigError, "write model_channels=64")
    assert_refused(lambda: get_preset_config("medium", preset="high"), ConfigError, other_preset, "config('high')")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, 0, "24", "24GB", True, [24]])
def test_rejects_nonpositive_card_size(value):
    words = f"get_preset_config('medium', {value!r}): ", "the number on the graphics card's box"
    assert_refused(lambda: get_preset_config("medium", value), ConfigError, *words)


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("hgih", "write get_preset_config('high')."),
        ("Medium", "write get_preset_config('medium')."),
        ("rtx", "write get_preset_config('medium')."),
    ],
)
def test_an_unknown_name_lists_the_known(name, way_out):
    error = assert_refused(lambda: get_preset_config(name), ConfigError)
    assert error.expected == "one of 'low', 'medium', 'high'"
    assert error.fix == way_out


@pytest.mark.parametrize("name", [24, None, ["low"], ("low",)])
def test_a_name_of_a_wrong_type_is_unknown(name):
    assert_refused(lambda: get_preset_config(name), ConfigError, "one of 'low', 'medium', 'high'")


def test_presets_are_ordered_from_small_to_large():
    assert [preset.min_gpu_gb for preset in PRESETS.values()] == [8, 16, 32]


def test_docs_table_matches_the_formula():
    card = (Path(__file__).parents[2] / "docs" / "gpus.md").read_text()
    for name, preset in PRESETS.items():
        config = get_preset_config(name)
        estimate = estimate_by_formula(config)
        sizes = (estimate.peak_bytes, estimate.total_bytes, estimate.headroom_bytes(preset.min_gpu_gb * GIB))
        cells = [name, preset.cards, config.batch_size, config.gradient_accumulation_steps, config.model_channels]
        assert f"| {' | '.join(map(str, cells + [f'{size / GIB:.2f} GiB' for size in sizes]))} |" in card
    activations = [
        estimate_by_formula(get_preset_config("low", precision=precision, checkpointing=checkpointing))
        for precision, checkpointing in (("fp32", False), ("bf16-mixed", False), ("bf16-mixed", True))
    ]
    row = " | ".join(f"{estimate.activations_bytes / GIB:.2f} GiB" for estimate in activations)
    assert f"| activations of `low` | {row} |" in card
