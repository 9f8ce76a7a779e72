"""Find tensors that a function captures from outside, whose gradients would be silently missing."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from memkit._core.attributes import attributes_of
from memkit._core.errors import InputError
from memkit._torch.graph import graph_behind, inputs_of, sequence_number

UNSHARDED = "do not shard this module separately: call fully_shard on the module around it, whose forward calls memkit."
"""The way out where a function calls a module that fully_shard gathers for each call, into other tensors."""


class _Edge(NamedTuple):
    node: Node
    output: int


class CapturedTensors:
    """Tensors that a function captured. Create it before the function runs: older graph nodes are from outside.

    Args:
        call: The user's call, for the message.
        fn: The function; its variables are searched for the tensor's name.
    """

    def __init__(self, call: str, fn: Callable[..., Any]) -> None:
        self._call, self._fn = call, fn
        with torch.inference_mode(False), torch.enable_grad():  # noqa: FBT003 - torch.compile knows no mode=
            mark: Any = torch.empty(0, requires_grad=True).view(-1).grad_fn
        self._newest_before = sequence_number(mark)
        self._has_shards = False

    def refuse(self, results: Sequence[Tensor], known: Sequence[Tensor]) -> list[weakref.ref[Tensor]]:
        """Refuse results that depend on a tensor that needs a gradient and is not known.

        Args:
            results: The function's results, with a graph.
            known: Leaf tensors whose gradients will be computed.

        Returns:
            Unknown leaves, which the function may have made itself, as physics-informed networks do
            (``x.detach().requires_grad_()``): `refuse_survivors` decides, once the graph is gone.

        Raises:
            InputError: There is such a tensor; the message gives its name and shape, and a fix.
        """
        reached, oldest = graph_behind(results)
        if oldest > self._newest_before and set(map(id, reached)).issubset(map(id, known)):
            return []  # the usual case, in few steps of Python for each node
        self._has_shards = any(hasattr(each, "to_local") for each in known)  # DTensors, whose module is slow to import
        # A function may take a row's gradient itself (forces): such a row is known, even if not needed outside.
        sources = {get_gradient_edge(leaf).node for leaf in known if leaf.requires_grad}
        seen: set[Node] = set()
        edges = [_Edge(*get_gradient_edge(result)[:2]) for result in results if result.requires_grad]
        strangers: list[_Edge] = []
        while edges:
            edge = edges.pop()
            if edge.node in sources or edge.node in seen:
                continue
            seen.add(edge.node)
            if self._is_from_outside(edge.node, sources):
                strangers.append(edge)
            else:
                edges += [_Edge(node, output) for node, output in edge.node.next_functions if node is not None]
        if any(not _is_leaf(edge.node) for edge in strangers):
            raise self._refusal(strangers)
        leaves: list[Any] = [edge.node for edge in strangers]
        return [weakref.ref(leaf.variable) for leaf in leaves]

    def refuse_survivors(self, leaves: Sequence[weakref.ref[Tensor]]) -> None:
        """Refuse leaves that something still holds: a leaf that the function made lives only as long as the graph.

        Args:
            leaves: The leaves that `refuse` returned; its results must have been freed.

        Raises:
            InputError: See `refuse`.
        """
        if any(leaf() is not None for leaf in leaves):
            gc.collect()  # perhaps only a cycle holds it
        survivors = [leaf for each in leaves if (leaf := each()) is not None]
        if survivors:
            raise self._refusal([_Edge(*get_gradient_edge(leaf)[:2]) for leaf in survivors])

    def _refusal(self, strangers: Iterable[_Edge]) -> InputError:
        found = ", ".join(sorted(map(self._describe, strangers)))
        return InputError(
            self._call,
            got=f"a function that uses {found} without receiving it as an argument",
            expected="every tensor that needs a gradient as an argument or a parameter: otherwise it would "
            "silently get no gradient",
            fix=UNSHARDED
            if self._has_shards
            else "pass it as an argument if it has one entry per row; pass leaf tensors as params=[...] "
            "(params=module.parameters()); compute non-leaf tensors inside the function; detach() tensors that "
            "need no gradient.",
        )

    def _is_from_outside(self, node: Node, sources: set[Node]) -> bool:
        # Autocast keeps a parameter's conversion for the whole autocast block, so it may be older than this call.
        is_conversion = node.name() == "ToCopyBackward0" and all(source in sources for source, _ in node.next_functions)
        return _is_leaf(node) or (sequence_number(node) <= self._newest_before and not is_conversion)

    def _describe(self, edge: _Edge) -> str:
        node: Any = edge.node
        like = node.variable if _is_leaf(node) else inputs_of(node)[edge.output]
        shape = f"of shape {tuple(like.shape)}"
        for name, value in _named_values(self._fn):
            own = value.named_parameters(name) if isinstance(value, nn.Module) else [(name, value)]
            for path, tensor in own:
                if isinstance(tensor, Tensor) and tensor.requires_grad and get_gradient_edge(tensor)[:2] == tuple(edge):
                    return f"`{path}` {shape}"
        return f"a tensor {shape}"


def _is_leaf(node: Node) -> bool:
    return node.name() == "torch::autograd::AccumulateGrad"


def named_tensors(fn: object) -> Iterator[tuple[str, Tensor]]:
    """Yield the outside tensors that a function's code names, including its own object's, excluding modules'."""
    return ((name, value) for name, value in _named_values(fn) if isinstance(value, Tensor))


def _named_values(fn: object) -> Iterator[tuple[str, object]]:
    if isinstance(fn, functools.partial):
        yield from _named_values(fn.func)
        for name, value in [*enumerate(fn.args), *fn.keywords.items()]:
            yield from [(str(name), value), *_named_values(value)]
    elif inspect.ismethod(fn):
        yield from ((f"self.{name}", value) for name, value in attributes_of(fn.__self__).items())
        yield from _named_values(fn.__func__)
    elif inspect.isfunction(fn):
        with contextlib.suppress(ValueError):  # a variable without a value yet
            variables = inspect.getclosurevars(fn)
            yield from [*variables.nonlocals.items(), *variables.globals.items()]
