"""Savings and recomputation of the compiler's activation_memory_budget, with a backend that needs no C++ compiler."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._functorch.config as functorch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.compile_fx import select_decomp_table
from torch.fx import GraphModule, Node
from torch.utils.flop_counter import flop_registry

from tests.allocations import trace_allocations


def compile_with(budget: float, forward: Callable[[], Tensor]) -> dict[str, Any]:
    """Compile a forward and run it with its backward.

    The graphs run uncompiled, operator by operator, as of the backend ``aot_eager_decomp_partition``. FLOPs are read
    from them: a counter that runs along would make torch run the forward uncompiled.

    Returns:
        Bytes alive after the forward, without the loss, and FLOPs of all graphs; or the error, in a line.
    """
    graphs: list[GraphModule] = []
    torch.compiler.reset()

    def keep(graph: GraphModule, _: Sequence[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=keep,
        bw_compiler=keep,
        decompositions=select_decomp_table,
        partition_fn=functools.partial(min_cut_rematerialization_partition, compiler="inductor"),
    )
    losses: list[Tensor] = []
    try:
        with functorch.patch(activation_memory_budget=budget):
            compiled = torch.compile(forward, backend=backend, dynamic=False)
            compiled().backward()
            saved = int(trace_allocations(lambda: losses.append(compiled())).live[-1]) - 4
    except Exception as error:  # noqa: BLE001 - what a peer cannot do, in its words
        return {"error": f"{type(error).__name__}: {error}".partition("\n")[0]}
    return {
        "compiled_saved_bytes": saved,
        "compiled_flops": sum(map(graph_flops, graphs)),
        "num_graphs": len(graphs),
    }


def graph_flops(graph: GraphModule) -> int:
    """Multiplications and additions of a graph's matrix products and convolutions, as torch counts them."""
    return sum(map(node_flops, graph.graph.nodes))


def node_flops(node: Node) -> int:
    formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return 0
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    return int(formula(*args, **kwargs, out_val=node.meta["val"]))
