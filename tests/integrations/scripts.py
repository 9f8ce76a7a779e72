"""The changes that a user makes to a script to use memkit."""

import difflib


def changed(script, changes):
    """The script with each (before, after) made at its one place."""
    for before, after in changes:
        assert script.count(before) == 1, before
        script = script.replace(before, after)
    return script


def num_changed_lines(plain, ours):
    """How many lines are added to the plain script, and how many are removed from it."""
    signs = [line[0] for line in difflib.ndiff(plain.splitlines(), ours.splitlines())]
    return signs.count("+"), signs.count("-")
