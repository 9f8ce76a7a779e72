"""Plans for what waits for backward, beside the compiler's activation_memory_budget: bytes and FLOPs on ten models.

The compiler's recomputed FLOPs are those of its graphs above those that it has without a budget; memkit's are those of
the step above the plain one's, under a plan with the compiler's saved bytes as its ``activation_budget``. On both sides
bytes are those alive after a forward that has run, without parameters, batch and loss. The compiler's graphs run
operator by operator, which needs no C++ compiler. Bits of memkit's steps are compared with those of a loop by hand.

In backward the compiler's graphs draw random numbers again without the state that they were drawn from. For ``rand``
Inductor keeps a seed, of 8 bytes, which are left out here; for others, such as dropout of whole channels, it keeps
nothing, and gradients are other ones than without a budget. A generator's state for each is added to its bytes.

Run: python -m benchmarks.cases.compiler_budget [MODEL ...]   (with names only these, kept beside earlier ones)
"""

from __future__ import annotations

import copy
import functools
import json
import sys
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

from benchmarks.cases.tensor_plans import Plans, Run, are_equal, plan_part, trainable
from benchmarks.result import read_result, write_result
from benchmarks.ten_models import TRAININGS, Training, build
from memkit._tape.tape import is_random
from tests.allocations import count_flops, trace_allocations

BUDGETS = (0.75, 0.5, 0.25)
SEEDED = (torch.ops.aten.rand.default, torch.ops.aten.randn.default)


def compare(training: Training) -> dict[str, Any]:
    """The compiler's graphs of the first loss, and memkit's plans that may leave as much for backward."""
    part, loss_fn = next(iter(training.losses.items()))
    plain, wanted = count_flops(Run(training).steps[part]), Run(training).bits()
    model = copy.deepcopy(training.model)  # compiled steps leave gradients and statistics
    with trainable(model, part):
        forward = functools.partial(loss_fn, model, training.batch)
        least, *compiled = [compile_with(budget, forward) for budget in (1.0, *BUDGETS)]
    budgets: dict[str, Any] = {}
    for budget, found in zip(BUDGETS, compiled, strict=True):
        budgets[str(budget)] = found
        if "error" not in found and "error" not in least:
            found["compiled_recomputed_flops"] = found.pop("compiled_flops") - least["compiled_flops"]
            found["plain_flops"] = plain
            found["memkit"] = planned(training, part, found["compiled_saved_bytes"], plain, wanted)
    return budgets


def planned(training: Training, part: str, num_bytes: int, plain: int, wanted: Sequence[Tensor]) -> dict[str, Any]:
    """What a plan for so many bytes takes when it runs, and what it predicted."""
    plans = Plans({part: plan_part(training, part, activation_budget=f"{num_bytes}B")})
    run, predicted = Run(training, plans), plans.saved_tensors(part)
    return {
        "saved_bytes": run.saved_bytes(part),
        "predicted_saved_bytes": predicted.waiting_bytes,
        "recomputed_flops": count_flops(run.steps[part]) - plain,
        "predicted_recomputed_flops": predicted.recomputed_flops,
        "is_equal": are_equal(Run(training, plans).bits(), wanted),
    }


def compile_with(budget: float, forward: Callable[[], Tensor]) -> dict[str, Any]:
    """Compile a forward and run it with its backward.

    The graphs run uncompiled, as of the backend ``aot_eager_decomp_partition``. FLOPs are read from them: a counter
    that runs along would make torch run the forward uncompiled.

    Returns:
        Bytes alive after the forward, without the loss, with these states; their bytes; and FLOPs of all graphs. Or the
        error, in a line.
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
    redrawn = sum(map(num_redrawn, graphs[1::2])) * torch.get_rng_state().nbytes
    return {
        "compiled_saved_bytes": saved + redrawn,
        "compiled_state_bytes": redrawn,
        "compiled_flops": sum(map(graph_flops, graphs)),
        "num_graphs": len(graphs),
    }


def num_redrawn(graph: GraphModule) -> int:
    """Number of operators of a backward that draw random numbers for which Inductor keeps no seed."""
    nodes = [each for each in graph.graph.nodes if hasattr(each.target, "overloadpacket")]
    return sum(each.target not in SEEDED and is_random(each.target, each.args, each.kwargs) for each in nodes)


def graph_flops(graph: GraphModule) -> int:
    """Multiplications and additions of a graph's matrix products and convolutions, as torch counts them."""
    return sum(map(node_flops, graph.graph.nodes))


def node_flops(node: Node) -> int:
    formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return 0
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    return int(formula(*args, **kwargs, out_val=node.meta["val"]))


def main() -> None:
    torch.set_num_threads(1)
    figures = read_result("compiler_budget")["figures"] if sys.argv[1:] else {}
    for name in sys.argv[1:] or TRAININGS:
        figures[name] = {"budgets": compare(build(name))}
        print(name, json.dumps(figures[name], indent=1), flush=True)
        print(write_result("compiler_budget", figures, peers=("nilearn", "scikit-learn")))


if __name__ == "__main__":
    main()
