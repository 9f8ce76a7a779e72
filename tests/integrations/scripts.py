"""What a user changes in a script, so that it uses memkit."""


def changed(script, changes):
    """The script with each (before, after) made at its one place."""
    for before, after in changes:
        assert script.count(before) == 1, before
        script = script.replace(before, after)
    return script
