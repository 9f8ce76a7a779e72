"""Gradient utilities: scaled steps, gradient dtypes, graph inspection."""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from memkit._core.errors import InputTypeError
from memkit._core.printable import described
from memkit._core.protocols import GradScaler
from memkit._torch import foreach
from memkit._torch.graph import asks_for_whole_backward
from memkit._torch.optimizers import states_of_scaler
from memkit._torch.tensors import accumulate_hooks, assign_gradient_dtype, gradient_dtype, gradient_marks, hooks_of


def given_optimizers(call: str, optimizer: object) -> list[Optimizer]:
    """Return the optimizers that a user's call was given, one or several, as a list.

    Raises:
        InputTypeError: There is none, or something else among them, such as a model.
    """
    optimizers: list[Any] = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    wrong = next((each for each in optimizers if not isinstance(each, Optimizer)), None)
    if wrong is not None or not optimizers or None in optimizers:
        raise InputTypeError(
            f"{call}(optimizer)",
            got=f"a model ({type(wrong).__name__})"
            if isinstance(wrong, nn.Module)
            else described(optimizer if wrong is None else wrong),
            expected="an optimizer of torch, or a list of them",
            fix=f"write optimizer = torch.optim.AdamW(model.parameters()), then {call}(optimizer).",
        )
    return optimizers


_is_trainable: Callable[[torch.Tensor], bool] = operator.attrgetter("requires_grad")
_groups_of: Callable[[Optimizer], list[dict[str, Any]]] = operator.attrgetter("param_groups")
_listed_in: Callable[[dict[str, Any]], list[torch.Tensor]] = operator.itemgetter("params")


def parameters_in_order(*optimizers: Optimizer) -> list[torch.Tensor]:
    """List all parameters of the optimizers in the order of their groups, also those that are frozen."""
    groups = itertools.chain.from_iterable(map(_groups_of, optimizers))
    return list(itertools.chain.from_iterable(map(_listed_in, groups)))


def list_parameters(optimizers: Sequence[Optimizer]) -> list[nn.Parameter]:
    """List the trainable parameters of the optimizers, each once."""
    listed: list[nn.Parameter] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            listed += filter(_is_trainable, group["params"])
    unique = set(map(id, listed))
    return listed if len(unique) == len(listed) else list({id(parameter): parameter for parameter in listed}.values())


def add_gradients(parameters: Sequence[nn.Parameter], gradients: Sequence[torch.Tensor | None]) -> None:
    """Add gradients to the parameters' own, bit for bit as autograd does.

    It never adopts a tensor: autograd may return one tensor for two parameters, or one that is referenced elsewhere.
    """
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None:
            continue
        if parameter.grad is not None:
            parameter.grad.add_(gradient)
        elif gradient.is_sparse:
            parameter.grad = gradient.detach().clone()
        else:
            parameter.grad = torch.empty_like(parameter, dtype=gradient_dtype(parameter)).copy_(gradient)


def multiply_gradients(parameters: Sequence[nn.Parameter], factor: float) -> None:
    """Multiply all gradients in place; a factor of one does nothing.

    Of sharded ones it takes this rank's parts: torch does not multiply them together with others.
    """
    if factor == 1.0:
        return
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    dense = [gradient for gradient in gradients if not gradient.is_sparse]
    if dense:
        foreach.multiply_([each if type(each) is torch.Tensor else local_part(each) for each in dense], factor)
    for gradient in gradients:
        if gradient.is_sparse:
            gradient.mul_(factor)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor that may be sharded."""
    to_local = getattr(tensor, "to_local", None)  # a DTensor, whose module is slow to import
    return to_local() if to_local else tensor


def has_accumulate_hooks(parameters: Sequence[nn.Parameter]) -> bool:
    """Return whether any post-accumulate hook exists, which `torch.autograd.grad` would not call."""
    return any(map(accumulate_hooks, parameters))


def have_hooks_together(parameters: Sequence[nn.Parameter]) -> bool:
    """Return whether a hook waits for several gradients, which fails in `torch.autograd.grad`."""
    return any(
        getattr(hook, "__module__", None) == torch.autograd.graph.__name__
        for parameter in parameters
        for hook in (hooks_of(parameter) or {}).values()
    )


def have_gradients(parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether any of the parameters has a gradient; a loop, as a generator takes longer."""
    for parameter in parameters:  # noqa: SIM110 - faster
        if parameter.grad is not None:
            return True
    return False


def have_nonzero_gradients(parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether this process's part of any gradient is not zero; waits for the device."""
    parts = [local_part(each.grad) for each in parameters if each.grad is not None]
    return any(bool((each.coalesce().values() if each.is_sparse else each).any()) for each in parts)


def has_gradient(optimizer: Optimizer) -> bool:
    """Return whether any parameter of an optimizer has a gradient."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                return True
    return False


def step_optimizers(optimizers: Sequence[Optimizer], scaler: GradScaler | None) -> bool:
    """Step each optimizer, through the scaler if there is one; return whether any actually stepped."""
    if scaler is None:
        for optimizer in optimizers:
            optimizer.step()
        return bool(optimizers)
    _set_stages(scaler, optimizers, OptState.STEPPED, OptState.UNSCALED)  # if this is a retry
    stepped = [_scaled_step(scaler, optimizer) for optimizer in optimizers]
    if optimizers:
        scaler.update()  # once, after all: an update in between would unscale the next one wrongly
    return any(stepped)


def forget_unscaling(scaler: GradScaler, optimizers: Sequence[Optimizer]) -> None:
    """Reset a scaler that has unscaled gradients which will not be used for a step."""
    _set_stages(scaler, optimizers, OptState.UNSCALED, OptState.READY)
    _set_stages(scaler, optimizers, OptState.STEPPED, OptState.READY)


def _set_stages(scaler: GradScaler, optimizers: Sequence[Optimizer], before: OptState, after: OptState) -> None:
    states = states_of_scaler(scaler)
    for optimizer in optimizers:
        if id(optimizer) in states and states[id(optimizer)]["stage"] is before:
            states[id(optimizer)]["stage"] = after


def _scaled_step(scaler: GradScaler, optimizer: Optimizer) -> bool:
    """Step through the scaler, and return whether the optimizer actually stepped.

    `torch.amp.GradScaler.step` does not say so. It skips by not calling the optimizer, which a hook on the optimizer
    detects without a synchronization; a fused optimizer is always called and skips based on the infinity count that
    the scaler passes to it.
    """
    stepped = False

    def note(optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG001 - the hook's signature
        nonlocal stepped
        found_inf = getattr(optimizer, "found_inf", None)
        stepped = found_inf is None or not bool(found_inf)

    handle = optimizer.register_step_post_hook(note)
    try:
        scaler.step(optimizer)
    finally:
        handle.remove()
    return stepped


def graph_nodes(loss: torch.Tensor) -> Iterator[Any]:
    """Iterate over the nodes of a loss's graph, each once."""
    seen, nodes = set(), [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        yield node
        seen.add(node)
        nodes.extend(parent for parent, _ in node.next_functions)


def has_reentrant_checkpoint(loss: torch.Tensor) -> bool:
    """Return whether the graph has a checkpoint that refuses a backward with given inputs.

    `checkpoint(use_reentrant=True)` does, and so do those of reversible networks.
    """
    return any(map(asks_for_whole_backward, graph_nodes(loss)))


def set_gradient_dtype(parameter: nn.Parameter, dtype: torch.dtype | None) -> None:
    """Change the dtype in which autograd keeps a parameter's gradient, and convert the existing gradient."""
    gradient = None if parameter.grad is None else parameter.grad.to(dtype)  # first: it may run out of memory
    parameter.grad = None
    assign_gradient_dtype(parameter, dtype)
    parameter.grad = gradient


def set_gradient(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Set a parameter's gradient, also in a wider dtype, as in the middle of a group."""
    parameter.grad = None
    if gradient is not None:
        assign_gradient_dtype(parameter, gradient.dtype)
        parameter.grad = gradient


@contextlib.contextmanager
def gradients_set_aside(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Run the block without gradients, and put them back: what a backward leaves in the block goes to new ones."""
    held = [(parameter, parameter.grad) for parameter in parameters]
    try:
        for parameter, _ in held:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in held:
            parameter.grad = gradient


class HeldGradients:
    """The parameters' gradients as they are now, without copies, to tell and undo what a nested backward does to them.

    Args:
        parameters: The parameters.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        # With references: the `id` of a gradient that is gone would come again.
        self._held = [(each, each.grad) for each in parameters]
        self._marks = gradient_marks(each for each, _ in self._held)

    def are_same(self) -> bool:
        """Return whether no gradient was replaced or written to since."""
        return gradient_marks(each for each, _ in self._held) == self._marks

    def restore(self) -> bool:
        """Put the gradients back; return False if one was written to, so that its values are gone."""
        for parameter, gradient in self._held:
            if parameter.grad is not gradient:
                set_gradient(parameter, gradient)
        return self.are_same()


def clear_gradients(parameters: Sequence[nn.Parameter], dtype: torch.dtype | None) -> None:
    """Drop the gradients; the next ones have their parameters' dtype again, even after `widen_gradients`."""
    for parameter in parameters:
        parameter.grad = None
    if dtype is not None:
        narrow_gradients(parameters, dtype)


def widen_gradients(parameters: Sequence[nn.Parameter], dtype: torch.dtype | None, *, missing: bool = False) -> None:
    """Keep the gradients of half-precision parameters in ``dtype``; with ``missing`` also those still to come.

    None changes nothing.
    """
    for parameter in parameters if dtype is not None else ():
        is_half = parameter.dtype in {torch.bfloat16, torch.float16}
        if is_half and gradient_dtype(parameter) != dtype and (missing or parameter.grad is not None):
            set_gradient_dtype(parameter, dtype)


def narrow_gradients(parameters: Sequence[nn.Parameter], dtype: torch.dtype | None) -> None:
    """Undo `widen_gradients`: gradients have their parameters' dtype again."""
    for parameter in parameters if dtype is not None else ():
        if gradient_dtype(parameter) != parameter.dtype:
            set_gradient_dtype(parameter, parameter.dtype)
