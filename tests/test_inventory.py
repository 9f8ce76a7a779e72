"""Everything that memkit offered at fcdc795 is there and tested, or went for a reason: see `tests/inventory.py`."""

import pytest

from tests import inventory

GROUPS = {name: lambda name=name: inventory.entries_of_name(name) for name in inventory.THEN["names"]} | {
    "the shell": inventory.entries_of_shell,
    "the log": inventory.entries_of_log,
    "the pages": inventory.entries_of_pages,
}


@pytest.mark.parametrize("entries", GROUPS.values(), ids=GROUPS)
def test_each_entry_has_a_place_and_a_test_or_a_reason(entries):
    for entry in entries():
        if inventory.place(entry) is None:
            assert len(inventory.CHANGES["went"].get(entry, "")) > 20, f"{entry} is gone, and no reason says why"
        else:
            assert entry not in inventory.CHANGES["went"], f"{entry} is there"
            assert inventory.test_of(entry) or inventory.CHANGES["tested"].get(entry), f"no test names {entry}"


def test_reasons_are_of_entries():
    known = set(inventory.all_entries())
    assert set(inventory.CHANGES["went"]) | set(inventory.CHANGES["tested"]) <= known
    for entry, test in inventory.CHANGES["tested"].items():
        path, _, name = test.partition("::")
        assert f"def {name}(" in (inventory.ROOT / path).read_text("utf-8"), entry
        assert inventory.test_of(entry) is None, f"{entry} needs no note: {inventory.test_of(entry)} names it"


def test_merged_pages_exist_only_at_their_new_place():
    for old, new in inventory.CHANGES["merged"].items():
        assert not (inventory.ROOT / old).exists(), old
        assert (inventory.ROOT / new).exists(), new


def test_upgrade_page_lists_moved_and_removed_names():
    words = set(inventory.WORD.findall((inventory.ROOT / "docs/upgrade.md").read_text("utf-8")))
    left = [name for name in inventory.THEN["names"] if inventory.place(name) != f"memkit.{name}"]
    assert len(left) > 80
    assert [name for name in left if name not in words] == []


def test_detects_missing_entries():
    assert inventory.place("MemoryManager.phase(name)") == "memkit.MemoryManager.phase(name)"
    assert inventory.place("GridSample") == "memkit.points.GridSample"
    for entry in ("NoSuchName", "MemoryManager.no_such", "MemoryManager.phase(other)", "memkit estimate --no-such"):
        assert inventory.place(entry) is None
    assert inventory.place("docs/no-such.md") is None
    assert inventory.place("event key no_such") is None
    assert inventory.test_of("MemoryManager.no_such_thing_at_all") is None
