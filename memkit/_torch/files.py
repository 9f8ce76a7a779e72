"""Files of torch, by their path in its package."""

WRAPPERS = (
    "_tensor.py",
    "_subclasses",
    "overrides.py",
    "_ops.py",
    "_compile.py",
    "_dynamo",
    "utils/_stats.py",
    "utils/_python_dispatch.py",
)
"""Those whose frames lie between a line of code and the operator that it calls."""
ADAFACTOR = "optim/_adafactor.py"
