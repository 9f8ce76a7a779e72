"""Probe whether a batch may be split: on a few rows in float64, does the gradient of the parts equal the whole's?"""

from __future__ import annotations

import contextlib
import copy
import logging
import sys
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode

from memkit import _rng
from memkit._device import host_memory
from memkit._errors import ConfigError, MemkitWarning
from memkit._loss import read_loss
from memkit._oom import is_out_of_memory
from memkit._units import GIB, MIB, format_bytes
from memkit.train.models import device_of
from memkit.train.replay import BufferWatch
from memkit.train.split import count_rows, map_leaves, take_rows

_logger = logging.getLogger(__name__)
_NUM_ROWS = 8, 4  # the second where the first saves more for backward than the limit; a part needs two for a BatchNorm
# Between what models that cast to float32 inside leave (1e-7) and the smallest coupling worth a word (1e-3).
_TOLERANCE = 1e-5
_MAX_ACTIVATION_BYTES = GIB
_SMALL_ACTIVATION_BYTES = 16 * MIB  # beside a model on the CPU, where the rows are not few of the batch's
_NUM_COPIES = 6  # of the parameters in float64 at once: the twin, and gradients with their temporaries

LossFn = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True, slots=True)
class SplitVerdict:
    """Whether the gradient of a batch's parts adds up to the gradient of the batch.

    Attributes:
        exact: None where it was not probed; `reason` says why.
        error: Relative error of the gradient, when 8 rows are split into 5 and 3, or 4 into halves.
        modules: Modules in training mode that mix the rows: found at fault, or suspected where ``exact`` is None.
        loss: What is wrong besides the modules. ``"rows"``: the loss, or the model in evaluation mode too, mixes the
            rows. ``"weights"``: the loss is a mean over something else than rows, or a sum.
        reason: Why it was not probed.
    """

    exact: bool | None
    error: float | None = None
    modules: tuple[str, ...] = ()
    loss: Literal["rows", "weights"] | None = None
    reason: str = ""

    @property
    def advice(self) -> str:
        """The ways out, one sentence per cause; empty where there is none."""
        sentences = []
        if self.modules:
            names = ", ".join(self.modules[:5]) + (f" and {len(self.modules) - 5} more" if self.modules[5:] else "")
            sentences.append(
                f"In training mode {names} would see the statistics of each micro-batch: use GroupNorm or LayerNorm, "
                "or freeze the statistics with .eval()."
            )
        if self.loss == "rows":
            sentences.append(
                "The loss, or the model, compares or mixes the rows of the batch: where it is a loss over embeddings, "
                "memkit.cached_backward gives its exact gradient; else keep the batch whole: one micro-batch, and "
                "on_oom='raise'."
            )
        elif self.loss == "weights":
            sentences.append(
                "The loss is a mean over something else than rows (valid tokens, class weights), or a sum: return "
                "mk.Loss(mean=loss, count=n) from loss_fn, n being what the mean is divided by."
            )
        return " ".join(sentences)


def probe_split(model: nn.Module, batch: Any, loss_fn: LossFn, *, max_parameter_bytes: int = 256 * MIB) -> SplitVerdict:
    """Compare the gradient of a few rows at once with that of the same rows in two uneven parts.

    All runs on a float64 copy of the model on the CPU, whatever device the model is on, so that accelerator memory is
    not touched. Model, gradients, buffers, modes and the random state stay as they were; hooks are copied with the
    model and do run. Modules and tensors that ``loss_fn`` reaches by another way than its arguments are not copied, and
    if they are float32, float64 meets them with an error: then the verdict is None. Dropout is silenced in the copy.

    Args:
        model: The model, not wrapped in DistributedDataParallel.
        batch: A batch with rows in dimension 0 of its tensors, see `count_rows`. At most 8 rows are used.
        loss_fn: ``loss_fn(model, micro_batch)`` returns the mean loss over rows, or a `Loss`.
        max_parameter_bytes: Larger models are not probed; their modules are still scanned.

    Returns:
        The verdict; ``exact`` is None where something stood in the way, which is never an error.

    Memory cost: on the host, six times the parameters in float64, and at most 1 GiB of activations; together at most
    half of what is available. Where 8 rows take more, 4 are tried. Where the model is on the CPU, 16 MiB of activations
    at most, unless the batch has four times as many rows. Time cost: once, three passes over these rows on the CPU.

    Example:
        >>> import torch
        >>> from memkit.train.probe import probe_split
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        >>> verdict = probe_split(model, torch.randn(16, 4), lambda model, x: model(x).pow(3).mean())
        >>> verdict.exact, verdict.modules
        (False, ('1',))
    """
    suspects = scan_modules(model)
    try:
        num_rows = count_rows(batch)
        room_bytes = host_memory().available_bytes // 4
        reason = _obstacle(model, num_rows, max_parameter_bytes, room_bytes)
        for size in () if reason else sorted({min(size, num_rows) for size in _NUM_ROWS}, reverse=True):
            limit_bytes = min(_activation_limit(model, size, num_rows), room_bytes)
            try:
                return _judge(model, take_rows(batch, 0, size), size, loss_fn, limit_bytes, suspects)
            except Exception as exc:
                if not is_out_of_memory(exc):
                    raise
                reason = str(exc)  # fewer rows are tried when the error and its frames are gone
    except Exception as exc:  # noqa: BLE001 - anything may refuse a copy, float64, the CPU or a part of a batch
        reason = f"{type(exc).__name__}: {exc}"
    _logger.debug("split probe: not probed: %s", reason)
    return SplitVerdict(None, modules=suspects, reason=reason)


def _judge(
    model: nn.Module, rows: Any, num_rows: int, loss_fn: LossFn, limit_bytes: int, suspects: tuple[str, ...]
) -> SplitVerdict:
    with contextlib.ExitStack() as stack:
        stack.enter_context(_rng.preserved())
        stack.enter_context(torch.enable_grad())
        if "torch._dynamo" in sys.modules:  # never compile for the probe
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        return _Probe(model, rows, num_rows, loss_fn, limit_bytes).judge(suspects)


def scan_modules(model: nn.Module) -> tuple[str, ...]:
    """Return the names of modules in training mode that normalise over the rows of the batch, without running any."""
    return tuple(name for name, module in model.named_modules() if _normalises_over_rows(module))


def warn_or_refuse(verdict: SplitVerdict, *, call: str) -> None:
    """Warn where splitting changes the training, and refuse where it makes the loss another one.

    Args:
        verdict: The verdict on the first batch.
        call: The user's call, for the message.

    Raises:
        ConfigError: The loss mixes the rows: parts of the batch would train something else.

    Warns:
        MemkitWarning: Modules normalise over the batch, or the weights of the rows are uneven.
    """
    if verdict.loss == "rows":
        raise ConfigError(
            call,
            got=f"a gradient that is off by {verdict.error:.2g} when the batch is split",
            expected="a loss that adds up over the rows of the batch",
            fix=verdict.advice,
        )
    if verdict.advice:
        warnings.warn(
            f"{call}: splitting the batch changes the gradient. {verdict.advice}", MemkitWarning, stacklevel=3
        )


class _Probe:
    """The float64 twin of a model, and the rows to compare.

    Args:
        model: The model.
        rows: The rows.
        num_rows: How many.
        loss_fn: The loss.
        max_activation_bytes: What a forward may save for backward.
    """

    def __init__(self, model: nn.Module, rows: Any, num_rows: int, loss_fn: LossFn, max_activation_bytes: int) -> None:
        self._twin = _copy_in_float64(model)
        self._modules = dict(self._twin.named_modules())
        self._parameters = [parameter for parameter in self._twin.parameters() if parameter.requires_grad]
        self._buffers = BufferWatch(self._twin).snapshot()
        self._rows = _map_tensors(_in_float64, rows)
        self._num_rows = num_rows
        self._loss_fn = loss_fn
        self._max_activation_bytes = max_activation_bytes
        for module in self._modules.values():
            if isinstance(module, _DropoutNd):
                module.training = False

    def judge(self, suspects: tuple[str, ...]) -> SplitVerdict:
        """Compare, and find out what is at fault by switching it off."""
        whole = self._gradient(self._rows, self._num_rows)
        if self._is_noisy(whole[0]):
            self._train_only(suspects)  # most random layers are silent in evaluation mode
            whole = self._gradient(self._rows, self._num_rows)
            if self._is_noisy(whole[0]):
                reason = "the gradient is random beyond dropout, or computed in half precision"
                return SplitVerdict(None, modules=suspects, reason=reason)
        error, _ = self._compare(whole)
        del whole  # as large as the parameters
        if error is None:
            return SplitVerdict(None, modules=suspects, reason="the gradient is zero or not finite")
        if error <= _TOLERANCE:
            return SplitVerdict(exact=True, error=error)
        self._buffers.restore()
        for name in suspects:
            _freeze(self._modules[name])
        self._buffers = BufferWatch(self._twin).snapshot()
        remaining, by_weights = self._compare(self._gradient(self._rows, self._num_rows))
        if remaining is not None and remaining <= _TOLERANCE:
            return SplitVerdict(exact=False, error=error, modules=suspects)
        if by_weights:
            return SplitVerdict(exact=False, error=error, modules=suspects, loss="weights")
        if unknown := self._find_by_mode():
            return SplitVerdict(exact=False, error=error, modules=(*suspects, *unknown))
        return SplitVerdict(exact=False, error=error, modules=suspects, loss="rows")

    def _is_noisy(self, first: torch.Tensor) -> bool:
        """Whether the gradient changes from run to run, or from rounding alone, which a scaled loss shows."""
        second, _ = self._gradient(self._rows, self._num_rows, scale=3.0)
        return bool((first - second / 3).norm() > _TOLERANCE * first.norm())

    def _compare(self, of_whole: tuple[torch.Tensor, float]) -> tuple[float | None, bool]:
        """Return the relative error of the parts, and whether other weights of the parts would make it vanish."""
        size = max(1, self._num_rows * 5 // 8)
        whole_sum, whole_count = of_whole
        first_sum, first_count = self._gradient(take_rows(self._rows, 0, size), size)
        rest_sum, rest_count = self._gradient(take_rows(self._rows, size, self._num_rows), self._num_rows - size)
        whole = whole_sum / whole_count
        norm = float(whole.norm())
        if not 0 < norm < float("inf"):
            return None, False
        error = float((whole - (first_sum + rest_sum) / (first_count + rest_count)).norm()) / norm
        return error, _fits_with_other_weights(whole, first_sum / first_count, rest_sum / rest_count)

    def _gradient(self, rows: Any, num_rows: int, *, scale: float = 1.0) -> tuple[torch.Tensor, float]:
        """Return the gradient of the scaled loss's sum as one vector, and the count that it is to be divided by."""
        self._buffers.restore()
        saved: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            if sum(saved.values()) > self._max_activation_bytes:
                limit = format_bytes(self._max_activation_bytes)
                raise MemoryError(f"the split probe saves more than {limit} for backward")
            return tensor.detach()

        with _ConvolutionsByRow():  # type: ignore[no-untyped-call]  # torch's own class
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                result = self._loss_fn(self._twin, _map_tensors(torch.clone, rows))
            loss = read_loss(result, call="loss_fn")
            count = num_rows if loss.count is None else loss.count
            loss_sum = loss.value * count if loss.reduction == "mean" else loss.value
            gradients = torch.autograd.grad(
                loss_sum * scale, self._parameters, allow_unused=True, materialize_grads=True
            )
        return torch.cat([_flatten(gradient) for gradient in gradients]), float(count)

    def _train_only(self, names: Collection[str]) -> None:
        for name, module in self._modules.items():
            module.training = module.training and name in names

    def _find_by_mode(self) -> list[str]:
        """Name modules that mix rows in training mode only and that the scan missed: a normalisation written by hand.

        One class at a time goes back to training mode, so that a deep model takes no more passes than a shallow one.
        """
        by_class: dict[type[nn.Module], list[str]] = {}
        for name, module in self._modules.items():
            if module.training:
                by_class.setdefault(type(module), []).append(name)
        self._train_only(())
        try:
            if not self._is_exact():
                return []
        except Exception:  # noqa: BLE001 - in evaluation mode a model may return something else than loss_fn expects
            return []
        found = []
        for names in by_class.values():
            for name in names:
                self._modules[name].training = True
            if not self._is_exact():
                found += [name or type(self._twin).__name__ for name in names]
            self._train_only(())
        return found

    def _is_exact(self) -> bool:
        error, _ = self._compare(self._gradient(self._rows, self._num_rows))
        return error is not None and error <= _TOLERANCE


class _ConvolutionsByRow(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own class hook
    """Runs a convolution row by row: in float64 the CPU's kernel unrolls all rows that it gets, 9 times for 3 x 3."""

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.convolution.default:
            return torch.cat([func(row, *args[1:]) for row in args[0].split(1)])
        if func is not torch.ops.aten.convolution_backward.default:
            return func(*args, **(kwargs or {}))
        rows = zip(args[0].split(1), args[1].split(1), strict=True)
        slopes, *sums = func(*next(rows), *args[2:])
        of_input = [slopes]
        for row in rows:
            slopes, *rest = func(*row, *args[2:])
            of_input.append(slopes)
            for total, each in zip(sums, rest, strict=True):
                if total is not None:
                    total.add_(each)
        return None if slopes is None else torch.cat(of_input), *sums


def _activation_limit(model: nn.Module, size: int, num_rows: int) -> int:
    """What a forward of `size` rows may save: on the CPU it must stay below what the whole batch takes there.

    In float64 a row takes as much as two, and its convolutions need room.
    """
    if device_of(model).type == "cpu" and 4 * size > num_rows:
        return min(_SMALL_ACTIVATION_BYTES, _MAX_ACTIVATION_BYTES)
    return _MAX_ACTIVATION_BYTES


def _obstacle(model: nn.Module, num_rows: int, max_parameter_bytes: int, room_bytes: int) -> str:
    """Say what keeps the probe from running; empty where nothing does."""
    parameters = list(model.parameters())
    num_bytes = sum(parameter.nbytes for parameter in parameters)
    twin_bytes = 8 * sum(parameter.numel() for parameter in parameters)
    if num_rows < 2:
        return "the batch has a single row"
    if not any(parameter.requires_grad for parameter in parameters):
        return "the model has no parameter that wants a gradient"
    if num_bytes > max_parameter_bytes:
        return f"the parameters take {format_bytes(num_bytes)}, above {format_bytes(max_parameter_bytes)}"
    if _NUM_COPIES * twin_bytes > room_bytes:
        return f"host memory is short: {format_bytes(4 * room_bytes)} available"
    if (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    ):
        return "in a process group a loss that communicates could wait for ever"
    return ""


def _normalises_over_rows(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)


def _freeze(norm: Any) -> None:
    """Make a batch normalisation independent of the batch; without running statistics of its own it gets some."""
    norm.training = False
    if norm.running_mean is None:
        norm.running_mean = torch.zeros(norm.num_features, dtype=torch.float64)
        norm.running_var = torch.ones(norm.num_features, dtype=torch.float64)


def _copy_in_float64(model: nn.Module) -> nn.Module:
    """Deep-copy a model to float64 on the CPU, without a copy of any parameter in between."""
    memo: dict[int, Any] = {id(buffer): _in_float64(buffer) for buffer in model.buffers()}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(_in_float64(parameter), requires_grad=parameter.requires_grad)
    return copy.deepcopy(model, memo)


def _map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], rows: Any) -> Any:
    return map_leaves(lambda leaf: fn(leaf) if isinstance(leaf, torch.Tensor) else leaf, rows)


def _in_float64(tensor: torch.Tensor) -> torch.Tensor:
    numeric = tensor.is_floating_point() or tensor.is_complex()
    dtype = torch.promote_types(tensor.dtype, torch.float64) if numeric else tensor.dtype
    return tensor.detach().to("cpu", dtype, copy=True)


def _flatten(gradient: torch.Tensor) -> torch.Tensor:
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    return (torch.view_as_real(dense) if dense.is_complex() else dense).flatten()


def _fits_with_other_weights(whole: torch.Tensor, first: torch.Tensor, rest: torch.Tensor) -> bool:
    """Whether the whole is a weighted mean of the parts or their sum; what mixes rows is neither."""
    if not bool(torch.isfinite(first).all() and torch.isfinite(rest).all()):
        return True  # a part without any item: 0 / 0
    limit = _TOLERANCE * float(whole.norm())
    gap = first - rest
    share = float((whole - rest) @ gap) / max(float(gap @ gap), limit**2)
    if 0 <= share <= 1 and float((whole - rest - share * gap).norm()) <= limit:
        return True
    return float((whole - first - rest).norm()) <= limit
