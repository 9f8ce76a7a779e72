"""What the user's own code failed at, while it ran on tensors without data: a note on its error, and no log of torch's.

The error itself stays what it is, with its traceback: real data would end in the same one, or in one much like it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from memkit._core.errors import InputTypeError, MemkitError
from memkit._recovery.errors import is_out_of_memory
from memkit._torch.fake import FAKE_LOGGER
from memkit._torch.pytree import tree_leaves

_LONGEST = 80  # characters of a module's own description


@contextmanager
def without_fake_log() -> Iterator[None]:
    """Keep torch from logging a traceback of its own for each operator that fails on tensors without data."""
    log = logging.getLogger(FAKE_LOGGER)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


@contextmanager
def noting_failures(call: str, model: object, batch: object) -> Iterator[None]:
    """Add to an error of the user's code where it arose, in the model's terms, and what to try.

    Args:
        call: Name of the user's call.
        model: The model, whose modules are named.
        batch: The batch.

    Raises:
        InputTypeError: The batch is a shape instead of tensors, and the code could not use it.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, MemkitError) or is_out_of_memory(error):
            raise
        shape = _as_shape(batch)
        if shape is not None and isinstance(error, TypeError):
            raise InputTypeError(
                f"{call}(model, sample_batch)",
                got=f"the shape {shape} as batch",
                expected="a batch of tensors, as the training step gets it",
                fix=f"write sample_batch=torch.empty{shape}; on the meta device it takes no memory.",
            ) from error
        error.add_note(_note(call, error, model))
        raise


def _note(call: str, error: Exception, model: object) -> str:
    text = f"memkit: {call} ran this code on tensors without data"
    place = _module_at(error.__traceback__, model)
    text += "." if place is None else f"; it failed in {place}."
    if "convert cuda" in str(error) and "numpy" in str(error):
        return f"{text} NumPy cannot read tensors of a GPU: compute with torch, or write .detach().cpu().numpy()."
    return f"{text} Way out: run loss_fn(model, sample_batch) once by itself, which fails in the same line."


def _module_at(trace: TracebackType | None, model: object) -> str | None:
    """Describe the innermost module whose forward is in a traceback, and its inputs; None if there is none."""
    names = {id(module): name for name, module in model.named_modules()} if isinstance(model, nn.Module) else {}
    found = None
    while trace is not None:
        values = trace.tb_frame.f_locals
        module = values.get("self")
        if trace.tb_frame.f_code.co_name == "forward" and isinstance(module, nn.Module):
            code = trace.tb_frame.f_code
            given = [values.get(name) for name in code.co_varnames[1 : code.co_argcount]]
            shapes = [str(tuple(each.shape)) for each in given if isinstance(each, Tensor)]
            name = names.get(id(module))
            described = repr(module).partition("\n")[0][:_LONGEST].removesuffix("(")
            found = f"module {name!r}, {described}" if name else described
            found += f", given a tensor of shape {' and one of '.join(shapes)}" if shapes else ""
        trace = trace.tb_next
    return found


def _as_shape(batch: object) -> tuple[int, ...] | None:
    """Return a batch that is a shape; None if it is anything else."""
    if isinstance(batch, Mapping) or not isinstance(batch, (tuple, list)):
        return None
    leaves: list[Any] = tree_leaves(batch)
    return tuple(leaves) if leaves and all(type(each) is int for each in leaves) else None
