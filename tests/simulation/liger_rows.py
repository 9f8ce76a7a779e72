"""Operators of the Liger-Kernel project's benchmark in plain PyTorch, and its harness, on a virtual GPU.

Written anew after github.com/linkedin/Liger-Kernel, benchmark/scripts; the measured rows are in tests/data.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, silu

from memkit._core.units import MIB
from memkit.predict.virtual_gpu import VirtualGPU

ROWS: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "data" / "liger_rows.json").read_text())["rows"]
_NUM_RUNS = 3  # of ten: from the second on all are alike


def peak_bytes(row: dict[str, Any]) -> int:
    """What ``torch.cuda.max_memory_allocated`` would say of a row's last run."""
    config = {name: value for name, value in row["config"].items() if name not in {"dtype", "hidden_act"}}
    config |= {row["variable"]: row["value"]}
    with VirtualGPU(row["gpu"], torch="2.13") as gpu:
        run = _OPERATORS[row["kernel"]](row, config)
        for _ in range(_NUM_RUNS):
            torch.cuda.reset_peak_memory_stats()
            run()
        return gpu.peak_bytes


def as_printed(num_bytes: int) -> float:
    """MiB as the harness keeps them, in float32: of 16 GiB and more to 1 or 2 KiB."""
    return torch.tensor(num_bytes / MIB, dtype=torch.float32).item()


def measured_bytes(row: dict[str, Any]) -> int:
    """What the card said."""
    return round(row["measured_mib"] * MIB)


def _dtype(row: dict[str, Any]) -> torch.dtype:
    return getattr(torch, row["config"]["dtype"].removeprefix("torch."))


def _loss(loss: Callable[[], Tensor], *, keeps_graph: bool) -> Callable[[], None]:
    return lambda: loss().backward(retain_graph=keeps_graph)


def _cross_entropy(_: dict[str, Any], config: dict[str, int]) -> Callable[[], None]:
    rows = config["B"] * config["T"]
    x = torch.randn(rows, config["V"], requires_grad=True, device="cuda")
    target = torch.randint(config["V"], (rows, 1), device="cuda").squeeze(1)
    return _loss(lambda: nn.CrossEntropyLoss()(x, target), keeps_graph=False)


def _linear_cross_entropy(row: dict[str, Any], config: dict[str, int]) -> Callable[[], None]:
    heads = _with_rival(lambda: nn.Linear(config["H"], config["V"], bias=False, dtype=_dtype(row)))
    x = torch.randn(config["BT"], config["H"], requires_grad=True, dtype=_dtype(row), device="cuda")
    target = torch.randint(config["V"], (config["BT"], 1), device="cuda").squeeze(1)

    def forward() -> Tensor:
        logits = heads[0](x)
        return nn.CrossEntropyLoss()(logits, target)

    return _loss(forward, keeps_graph=False)


def _with_rival(make: Callable[[], nn.Module]) -> nn.ModuleList:
    """The harness also holds the project's own module, with weights of the same size."""
    return nn.ModuleList([make(), make()]).to("cuda")


class _Gated(nn.Module):
    def __init__(self, width: int, inner: int, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.gate(x)) * self.up(x))


def _gated(row: dict[str, Any], config: dict[str, int]) -> Callable[[], None]:
    batch = config.get("bsz") or config["B"]
    shape = batch, config["T"], config["hidden_size"]
    is_gelu = row["config"]["hidden_act"].startswith("gelu")
    layer = _Gated(
        config["hidden_size"],
        config["intermediate_size"],
        (lambda y: gelu(y, approximate="tanh")) if is_gelu else silu,
    )
    _warm_up()
    x = torch.randn(*shape, device="cuda", dtype=_dtype(row), requires_grad=True)
    layer = layer.to("cuda").to(_dtype(row))
    return _in_mode(row["mode"], lambda: layer(x), lambda y: torch.randn_like(y))


def _warm_up() -> None:
    """The harness measured other modes in the same process before: both threads have their handles of cuBLAS."""
    nn.Linear(8, 8, device="cuda")(torch.zeros(8, 8, device="cuda")).sum().backward()


def _norm(make: Callable[[], nn.Module], shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[], None]:
    modules = _with_rival(make)
    x = torch.randn(shape, dtype=dtype, device="cuda")
    grad = torch.randn_like(x)
    x.requires_grad_()
    return _in_mode("full", lambda: modules[0](x), lambda _: grad)


def _in_mode(mode: str, forward: Callable[[], Tensor], gradient: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    if mode == "forward":
        return lambda: (forward(), None)[1]
    if mode == "backward":
        y = forward()
        grad = gradient(y)
        return lambda: y.backward(grad, retain_graph=True)

    def full() -> None:
        y = forward()
        y.backward(gradient(y), retain_graph=True)

    return full


class _RootMeanSquareNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + 1e-6)
        return self.weight * x.to(dtype)


def _rms_norm(row: dict[str, Any], config: dict[str, int]) -> Callable[[], None]:
    return _norm(lambda: _RootMeanSquareNorm(config["H"]), (config["M"], config["H"]), _dtype(row))


def _layer_norm(row: dict[str, Any], config: dict[str, int]) -> Callable[[], None]:
    return _norm(lambda: nn.LayerNorm(config["N"]), (config["M"], config["N"]), _dtype(row))


def _group_norm(row: dict[str, Any], config: dict[str, int]) -> Callable[[], None]:
    channels = config["C"]
    shape = config["M"], channels, config["H"]  # the harness takes no notice of the mode
    return _norm(lambda: nn.GroupNorm(channels // config["channels_per_group"], channels), shape, _dtype(row))


def _distributions(rows: int, width: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, width, requires_grad=True, device="cuda").log_softmax(dim=-1)
    return x, torch.randn(rows, width, device="cuda")


def _kl_div(_: dict[str, Any], config: dict[str, int]) -> Callable[[], None]:
    x, target = _distributions(config["B"] * config["T"], config["V"])
    target = target.softmax(dim=-1)
    return _loss(lambda: nn.KLDivLoss(reduction="batchmean")(x, target), keeps_graph=True)


def _jsd(row: dict[str, Any], config: dict[str, int]) -> Callable[[], None]:
    is_old = row["version"].startswith("0.3")
    rows = config["B"] * config["T"] if is_old else config["BT"]
    x, target = _distributions(rows, config["V"] if is_old else config["vocab_size"])
    target = target.log_softmax(dim=-1)
    return _loss(lambda: (_old_jsd if is_old else _new_jsd)(x, target), keeps_graph=True)


def _old_jsd(log_p: Tensor, log_q: Tensor) -> Tensor:
    divergence = nn.KLDivLoss(reduction="batchmean", log_target=True)
    middle = 0.5 * (torch.exp(log_p) + torch.exp(log_q))
    log_middle = torch.log(middle)
    return 0.5 * (divergence(log_middle, log_p) + divergence(log_middle, log_q))


def _new_jsd(log_q: Tensor, log_p: Tensor) -> Tensor:
    divergence = nn.KLDivLoss(reduction="none", log_target=True)
    middle = torch.lerp(torch.exp(log_q), torch.exp(log_p), 0.5)
    loss = 0.5 * divergence(torch.log(middle), log_p).sum(dim=-1) + 0.5 * divergence(torch.log(middle), log_q).sum(
        dim=-1
    )
    return (loss / log_q.shape[0]).sum()


_OPERATORS = {
    "cross_entropy": _cross_entropy,
    "fused_linear_cross_entropy": _linear_cross_entropy,
    "geglu": _gated,
    "swiglu": _gated,
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "group_norm": _group_norm,
    "kl_div": _kl_div,
    "jsd": _jsd,
}
