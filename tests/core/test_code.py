"""Names that code looks up outside of itself."""

from memkit._core.code import global_names

counter, data, inner = 0, 1, 2  # the second has the name of an attribute


def counts(x):
    global counter
    counter += 1
    local = x.data + x.inner

    def within():
        return inner + local

    return within


def test_names_are_those_of_variables_and_not_of_attributes():
    assert global_names(counts.__code__) == {"counter", "inner"}


def test_the_code_of_modules_and_classes_looks_up_names():
    names = global_names(compile("import math\ntotal = math.pi + offset\n", "module", "exec"))
    assert {"total", "offset", "math"} <= names
    assert "pi" not in names
