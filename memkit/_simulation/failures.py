"""Notes on errors of the user's own code that ran on tensors without data: the place and the way out.

The error and its traceback stay unchanged: unless values were guessed, real data would cause the same error, or a
similar one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from memkit._core.errors import InputError, InputTypeError, MemkitError
from memkit._torch.pytree import tree_leaves

_LONGEST = 80  # characters of a module's own description
# In errors of operators that cannot run without data: one that makes a tensor of a list in C++, and nested tensors.
_LIMITS_OF_TORCH = ("its data is not allocated yet", "shape_env must not be None", "NestedTensorImpl doesn't support")

_NO_HIGHER_ORDER = "There was no rule registered for HOP"


def note_failure(call: str, error: Exception, model: object, batch: object, guesses: Iterable[str]) -> None:
    """Add a note to an error of the user's code: where in the model it arose, and what to try.

    Args:
        call: Name of the user's call.
        error: The error.
        model: The model, whose modules are named.
        batch: The batch.
        guesses: The reads that were answered without data, in order.

    Raises:
        InputTypeError: The batch is a shape instead of tensors, and the code could not use it.
    """
    guesses = list(guesses)
    if isinstance(error, InputError) and guesses:
        error.add_note(
            f"memkit: {call} ran this code on tensors without data, and numbers that it read were guessed (such as "
            f"{guesses[-1]}): a loop or a branch that depends on them may have gone another way than with data. Way "
            "out: pass such numbers as Python numbers, or watch a real step with mk.Tracker()."
        )
    if isinstance(error, (MemkitError, MemoryError, torch.OutOfMemoryError)):
        return
    shape = _as_shape(batch)
    if shape is not None and isinstance(error, TypeError):
        raise InputTypeError(
            f"{call}(model, sample_batch)",
            got=f"the shape {shape} as batch",
            expected="a batch of tensors, as in the training step",
            fix=f"write sample_batch=torch.empty{shape}; on the meta device it takes no memory.",
        ) from error
    error.add_note(_note(call, error, model, guesses) + _about_lists(batch))


def _note(call: str, error: Exception, model: object, guesses: Sequence[str]) -> str:
    text = f"memkit: {call} ran this code on tensors without data"
    place = _module_at(error.__traceback__, model)
    text += "." if place is None else f"; it failed in {place}."
    if "convert cuda" in str(error) and "numpy" in str(error):
        return f"{text} NumPy cannot read tensors of a GPU: compute with torch, or write .detach().cpu().numpy()."
    if _is_between_devices(error):
        return (
            f"{text} A tensor on the CPU met one on the card: the model and the batch are on the card here, and the "
            "model or loss_fn names 'cpu' itself, as self.device does, or no device where it makes a tensor, as "
            "torch.arange(n) does. Way out: take the device of a tensor that is there, as torch.arange(n, "
            "device=x.device) and indices.to(x.device); or set the stored one for this call: model.device = 'cuda'."
        )
    if _NO_HIGHER_ORDER in str(error):
        return (
            f"{text} PyTorch {torch.__version__} cannot follow an operator such as flex_attention; newer versions can. "
            "Way out: update torch, or watch a real step with mk.Tracker()."
        )
    if any(words in str(error) for words in _LIMITS_OF_TORCH):
        return (
            f"{text} With data it may run: torch's own code needs values in this place. Way out: pass numbers as "
            "tensors instead of lists, as F.ctc_loss takes lengths; pad instead of nesting tensors "
            "(nn.TransformerEncoder(layer, n, enable_nested_tensor=False)); or watch a real step with mk.Tracker()."
        )
    if guesses:
        return (
            f"{text} Way out: run loss_fn(model, sample_batch) once by itself. If it runs, what was answered without "
            f"data does not fit together (such as {guesses[-1]}): if masks select, selected_fraction=1.0 makes their "
            "sizes equal; otherwise watch a real step with mk.Tracker()."
        )
    return (
        f"{text} Way out: run loss_fn(model, sample_batch) once by itself, which most likely fails on the same line; "
        "if it runs, watch a real step with mk.Tracker()."
    )


def _is_between_devices(error: Exception) -> bool:
    """Whether an operator got tensors of the host and of a simulated GPU, which no step on the host alone can do."""
    text = str(error)
    return isinstance(error, RuntimeError) and all(word in text for word in ("device", "cpu", "cuda"))


def _about_lists(batch: object) -> str:
    """Say what to do with a list of batches, which looks like a batch that is a list of samples."""
    if type(batch) is not list or not all(isinstance(each, (tuple, list, Mapping)) for each in batch):
        return ""
    return " If it is a list of batches, pass one of them, or mk.predict.find_worst_batch(batches, model, loss_fn)."


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
