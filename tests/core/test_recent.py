"""A dict keeps its newest entries."""

from memkit._core.recent import keep_newest


def test_the_oldest_entries_go_and_one_that_comes_again_is_the_newest():
    entries = {}
    for key in range(100):
        keep_newest(entries, key, str(key))
    assert list(entries) == list(range(36, 100))
    keep_newest(entries, 36, "again")
    keep_newest(entries, 100, "new")
    assert list(entries) == [*range(38, 100), 36, 100]
    assert entries[36] == "again"
