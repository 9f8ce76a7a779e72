"""Recurrent layers for the virtual GPU: when CUDA runs cuDNN's operator for the whole sequence, and what that takes.

cuDNN does not document the sizes of its reserve, which is kept for the backward, and of its workspace. The formulas
here explain to the byte what an H100 took with cuDNN 9.19 for three nets of two layers: an LSTM in float32 and in
float16, and a GRU in both directions. `RecurrentCall.is_recorded` says what they are taken to hold for; all else has a
bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, NamedTuple, Self, TypeAlias

import torch
from torch import Tensor, nn

from memkit._core.units import MIB
from memkit._simulation.tensors import Tensors
from memkit._torch import aten
from memkit._torch.cuda import Rules
from memkit._torch.dispatch import DispatchKey
from memkit._torch.fake import FakeTensor
from memkit._torch.modules import FLAT_WEIGHTS
from memkit._torch.operators import run_kernel_of

_RELU, _TANH, _LSTM, _GRU = range(4)  # cudnnRNNMode_t
_NUM_GATES = {_RELU: 1, _TANH: 1, _LSTM: 4, _GRU: 3}
# Numbers that the backward needs of each state: an LSTM's gates and cell; for a GRU as recorded, twice its gates; for
# plain layers an assumption.
_NUM_KEPT = {_RELU: 2, _TANH: 2, _LSTM: 5, _GRU: 6}
_MOST_PERSISTENT = {_RELU: 384, _TANH: 384, _LSTM: 192, _GRU: 192}  # width of kernels for narrow layers
_RESERVE_HEAD, _WORKSPACE_HEAD = 256, 2304  # bytes
_PER_DIRECTION = 16 * MIB
_RECORDED_LAYERS, _RECORDED_DIRECTIONS = 2, {_LSTM: 1, _GRU: 2}
_BFLOAT16_SINCE = (2, 8)  # assumed, like its sizes
_FLATTENED = {torch.float16, torch.float32, torch.float64}  # `CUDNN_TENSOR_DTYPES`
_FLATTEN = nn.RNNBase.flatten_parameters
_MODES = {"lstm": _LSTM, "gru": _GRU, "rnn_tanh": _TANH, "rnn_relu": _RELU}


class RecurrentCall(NamedTuple):
    """The arguments of `_cudnn_rnn` and its backward that determine what they take."""

    x: Tensor
    weights: Sequence[Tensor]
    weights_per_layer: int  # and direction
    hx: Tensor
    cx: Tensor | None
    mode: int
    hidden_size: int
    proj_size: int
    num_layers: int
    batch_first: bool
    dropout: float
    train: bool
    bidirectional: bool
    batch_sizes: Sequence[int]

    @classmethod
    def of_forward(cls, args: Sequence[Any]) -> Self:
        """Read the arguments of `_cudnn_rnn`."""
        return cls(*args[:3], *args[4:15])

    @classmethod
    def of_backward(cls, args: Sequence[Any]) -> Self:
        """Read the arguments of `_cudnn_rnn_backward`."""
        return cls(*args[:3], *args[4:6], *args[10:19])

    @property
    def num_directions(self) -> int:
        """One, or two."""
        return 2 if self.bidirectional else 1

    @property
    def out_size(self) -> int:
        """Width of the output, of each direction."""
        return self.proj_size or self.hidden_size

    @property
    def num_states(self) -> int:
        """States of one layer in one direction: for packed rows as many as if all were as long as the longest."""
        rows = len(self.batch_sizes) * self.batch_sizes[0] if self.batch_sizes else math.prod(self.x.shape[:2])
        return rows * self.hidden_size

    @property
    def layers(self) -> list[int]:
        """Numbers in the matrices of each layer, in one direction."""
        widths = [self.x.shape[-1], *[self.out_size * self.num_directions] * (self.num_layers - 1)]
        num_gates = _NUM_GATES[self.mode]
        return [
            num_gates * self.hidden_size * (width + self.out_size) + self.proj_size * self.hidden_size
            for width in widths
        ]

    @property
    def num_weights(self) -> int:
        """Numbers in the flat buffer of the weights: both biases are in it even if the layer has none."""
        biases = 2 * _NUM_GATES[self.mode] * self.hidden_size * self.num_layers
        return (sum(self.layers) + biases) * self.num_directions

    @property
    def weights_bytes(self) -> int:
        """Bytes of the flat buffer."""
        return self.num_weights * self.x.element_size()

    @property
    def reserve_bytes(self) -> int:
        """Bytes that are kept for the backward: what it needs of each state, and the outputs between layers."""
        each = self.num_states * self.num_directions
        kept = each * (_NUM_KEPT[self.mode] * self.num_layers + self.num_layers - 1)
        return kept * self.x.element_size() + _RESERVE_HEAD

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the workspace, the same in all passes: gradients of one layer, and a copy of the largest weights."""
        numbers = self.num_states * self.num_directions * (_NUM_KEPT[self.mode] + 1) + max(self.layers)
        return numbers * self.x.element_size() + self.num_directions * _PER_DIRECTION + _WORKSPACE_HEAD

    @property
    def may_persist(self) -> bool:
        """Whether a kernel that keeps the weights on the chip may run, in some pass and on some cards: `get_algo`."""
        if self.proj_size or self.batch_sizes or self.x.dtype is torch.float64:
            return False
        is_narrow = self.hidden_size <= _MOST_PERSISTENT[self.mode]
        is_single = self.num_layers == self.num_directions == 1 and self.hidden_size <= 1024
        is_aligned = self.hidden_size % 128 == self.x.shape[-1] % 128 == 0
        return is_narrow or (self.x.dtype is torch.float16 and is_single and is_aligned)

    @property
    def is_plain(self) -> bool:
        """Whether this trains an LSTM or GRU, on rows of one length, by cuDNN's standard algorithm."""
        return (
            self.mode in _RECORDED_DIRECTIONS
            and self.train
            and self.x.dtype is not torch.bfloat16
            and not (self.dropout or self.proj_size or self.batch_sizes or self.may_persist)
        )

    @property
    def is_recorded(self) -> bool:
        """Whether the sizes are those of a layer like the recorded ones: two layers, and as many directions."""
        directions = _RECORDED_DIRECTIONS.get(self.mode)
        is_known = self.x.dtype in (torch.float16, torch.float32)
        return self.is_plain and is_known and (self.num_layers, self.num_directions) == (_RECORDED_LAYERS, directions)

    @property
    def bound(self) -> int:
        """Most bytes that it may take inside where its sizes are not known, with what is known of its workspace.

        Two numbers more for each state, one to keep and one in the workspace; or as much again.
        """
        if self.is_recorded:
            return 0
        each = self.num_states * self.num_layers * self.num_directions * self.x.element_size()
        more = 2 * each if self.is_plain else self.reserve_bytes + self.workspace_bytes
        return self.workspace_bytes + more

    def sequence(self, tensor: Tensor) -> Tensor:
        """Return a tensor with time as its first dimension, as cuDNN wants it."""
        return tensor.transpose(0, 1) if self.batch_first and not self.batch_sizes else tensor

    def copied_bytes(self, tensor: Tensor) -> int:
        """Bytes of a tensor's contiguous copy with time as the first dimension; 0 if it lies so."""
        return 0 if self.sequence(tensor).is_contiguous() else tensor.numel() * tensor.element_size()

    def empty_like_sequence(self, tensor: Tensor, width: int) -> Tensor:
        """Make a tensor of rows of this width that is contiguous with time as its first dimension."""
        if self.batch_sizes or not self.batch_first:
            return tensor.new_empty((*tensor.shape[:-1], width))
        batch, steps = tensor.shape[:2]
        return tensor.new_empty_strided((batch, steps, width), (width, batch * width, 1))


# ------------------------------------------------------------------------------------------- scratch memory

BlockOrder: TypeAlias = tuple[int | Tensor | None, ...]
"""Allocations of an operator, in order: the size of scratch memory, or a result. None frees the last scratch block, -2
the one before it."""


def recurrent_order(args: Sequence[Any], out: Sequence[Tensor]) -> BlockOrder:
    """`_cudnn_rnn`: the input with time first, and the workspace."""
    call = RecurrentCall.of_forward(args)
    output, hy, cy, reserve, _ = out
    return call.copied_bytes(call.x), output, hy, cy, call.workspace_bytes, reserve, None, None


def recurrent_backward_order(args: Sequence[Any], out: Sequence[Any]) -> BlockOrder:
    """`_cudnn_rnn_backward`: zeros for gradients that are not there, then the input's gradient, then the weights'."""
    call = RecurrentCall.of_backward(args)
    output, *gradients = args[6:10]
    zeros = [
        like.numel() * like.element_size()
        for like, gradient in zip((output, call.hx, call.cx), gradients, strict=True)
        if gradient is None and like is not None
    ]
    x, workspace = call.copied_bytes(call.x), call.workspace_bytes
    y = call.copied_bytes(output if gradients[0] is None else gradients[0])
    dx, dhx, dcx, parts = out
    of_states = (dhx,) if dcx is None else (dhx, dcx)
    of_input: BlockOrder = x, y, dx, *of_states, workspace, None, None, None
    if not parts:
        return *zeros, *of_input, *[None] * len(zeros)
    if _has_all_weights(call):
        of_weights: BlockOrder = x, parts[0], workspace, None, None
    else:
        of_weights = x, call.weights_bytes, workspace, None, *parts, None, None
    return *zeros, *of_input, *of_weights, *[None] * len(zeros)


def recurrent_bound(func: Any, args: Sequence[Any]) -> int:
    """Return the most that an operator of `RECURRENT` may take beyond its known sizes."""
    read = RecurrentCall.of_forward if func is aten.cudnn_rnn else RecurrentCall.of_backward
    return read(args).bound


def _has_all_weights(call: RecurrentCall) -> bool:
    """Whether the layer has biases: then its gradients are views of one buffer, and copies of its parts otherwise."""
    return call.weights_per_layer == (5 if call.proj_size else 4)


# ------------------------------------------------------------------------------------------- operators


def _run(*args: Any) -> tuple[Tensor, ...]:
    """`_cudnn_rnn` on tensors without data."""
    call, weight_buffer = RecurrentCall.of_forward(args), args[3]
    x, hx, cx = call.x, call.hx, call.cx
    for name, state in (("hx", hx), ("cx", cx)):
        if state is not None and not state.is_contiguous():
            raise RuntimeError(f"rnn: {name} is not contiguous")
    output = call.empty_like_sequence(x, call.out_size * call.num_directions)
    cy = hx.new_empty(0) if cx is None else cx.new_empty(cx.shape)
    reserve = x.new_empty(call.reserve_bytes if call.train else 0, dtype=torch.uint8)
    return output, hx.new_empty(hx.shape), cy, reserve, weight_buffer


def _run_backward(*args: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None, list[Tensor]]:
    """`_cudnn_rnn_backward` on tensors without data."""
    call = RecurrentCall.of_backward(args)
    if not call.train:
        raise RuntimeError("cudnn RNN backward can only be called in training mode")
    x, hx, cx = call.x, call.hx, call.cx
    gradients = (
        call.empty_like_sequence(x, x.shape[-1]),
        hx.new_empty(hx.shape),
        None if cx is None else cx.new_empty(cx.shape),
    )
    if not args[21][3]:
        return *gradients, []
    if not _has_all_weights(call):
        return *gradients, [each.new_empty(each.shape) for each in call.weights]
    flat, first, parts = call.weights[0].new_empty(call.num_weights), 0, []
    for each in call.weights:
        parts.append(flat.as_strided(each.shape, torch.empty(each.shape, device="meta").stride(), first))
        first += each.numel()
    return *gradients, parts


@wraps(_FLATTEN)
def flatten_parameters(module: nn.RNNBase) -> None:
    """`RNNBase.flatten_parameters` for weights on the card too: it moves them into one buffer, as cuDNN wants them."""
    weights = getattr(module, FLAT_WEIGHTS)
    if not _are_for_cudnn(weights):
        _FLATTEN(module)
        return
    biases = 0 if module.bias else 2 * sum(each.shape[0] for each in weights[:: 2 + bool(module.proj_size)])
    with torch.no_grad():
        numbers = sum(each.numel() for each in weights) + biases
        buffer, first = torch.zeros(numbers, dtype=weights[0].dtype, device=weights[0].device), 0
        for each in weights:
            each.set_(buffer.untyped_storage(), first, each.shape, each.stride())
            first += each.numel()


def _are_for_cudnn(weights: Sequence[Any]) -> bool:
    """Whether weights are to be moved; stand-ins in an estimate stay, as they live as long as it, and count as flat."""
    if not weights or not all(isinstance(each, FakeTensor) and each.is_cuda for each in weights):
        return False
    first = weights[0]
    if len({each.dtype for each in weights}) > 1 or first.dtype not in _FLATTENED or not torch.backends.cudnn.enabled:
        return False
    return not (isinstance(first.fake_mode, Tensors) and first.fake_mode.is_stand_in(first))


def _run_layer(
    operator: Any, mode: int, capability: tuple[int, int], rules: Rules, x: Tensor, *args: Any
) -> tuple[Tensor, ...]:
    """Run a layer as `RNN.cpp` does."""
    if _is_acceptable(x, capability, rules):
        return _by_cudnn(mode, [], x, *args)
    return _by_steps(operator, x, *args)


def _run_packed_layer(
    operator: Any, mode: int, capability: tuple[int, int], rules: Rules, x: Tensor, batch_sizes: Tensor, *args: Any
) -> tuple[Tensor, ...]:
    """Run a layer on packed rows as `RNN.cpp` does."""
    if _is_acceptable(x, capability, rules):
        options = (*args, False)  # batch_first
        return _by_cudnn(mode, batch_sizes.tolist(), x, *options)
    return _by_steps(operator, x, batch_sizes, *args)


def _run_cell(operator: Any, _: tuple[int, int], __: Rules, x: Tensor, *args: Any) -> Any:
    """Run a cell, which is one fused operator on a card, as its parts."""
    return _by_steps(operator, x, *args)


def _is_acceptable(x: Tensor, capability: tuple[int, int], rules: Rules) -> bool:
    """`cudnn_is_acceptable`."""
    dtypes = {torch.float16, torch.float32, torch.float64}
    if rules.version >= _BFLOAT16_SINCE and capability >= (8, 0):
        dtypes.add(torch.bfloat16)
    return torch.backends.cudnn.enabled and x.dtype in dtypes and x.numel() > 0


def _by_cudnn(
    mode: int,
    batch_sizes: list[int],
    x: Tensor,
    hx: Any,
    weights: Sequence[Tensor],
    has_biases: bool,  # noqa: FBT001
    num_layers: int,
    dropout: float,
    train: bool,  # noqa: FBT001
    bidirectional: bool,  # noqa: FBT001
    batch_first: bool,  # noqa: FBT001
) -> tuple[Tensor, ...]:
    """`_cudnn_impl`, for weights in one flat buffer, as `flatten_parameters` leaves them on a GPU."""
    h, c = (hx[0], hx[1]) if mode == _LSTM else (hx, None)
    hidden_size, proj_size = h.shape[2], 0
    if c is not None and c.shape[2] != h.shape[2]:
        hidden_size, proj_size = c.shape[2], h.shape[2]
    num_weights = (4 if has_biases else 2) + bool(proj_size)
    options = num_layers, batch_first, dropout, train, bidirectional, batch_sizes, None
    out, hy, cy, *_ = aten.cudnn_rnn(
        x, weights, num_weights, weights[0].detach(), h, c, mode, hidden_size, proj_size, *options
    )
    return (out, hy) if c is None else (out, hy, cy)


def _by_steps(operator: Any, x: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Run a layer step by step: CUDA's cells are one operator each, so that what they keep is a doubt."""
    if isinstance(x, FakeTensor) and isinstance(x.fake_mode, Tensors):
        x.fake_mode.guesses.approximated(str(operator))
    out: tuple[Tensor, ...] = run_kernel_of(operator, DispatchKey.CompositeImplicitAutograd, (x, *args), {})
    return out


RECURRENT: Mapping[Any, Callable[..., Any]] = {aten.cudnn_rnn: _run, aten.cudnn_rnn_backward: _run_backward}
"""Shape functions; torch's own function for these operators has no reserve."""

LAYERS: Mapping[str, Callable[..., Any]] = {
    name: partial(run, getattr(getattr(torch.ops.aten, packet), overload), mode)
    for packet, mode in _MODES.items()
    for overload, run in (("input", _run_layer), ("data", _run_packed_layer))
    for name in (f"{packet}.{overload}",)
} | {name: partial(_run_cell, getattr(torch.ops.aten, name).default) for name in ("lstm_cell", "gru_cell")}
"""Kernels of recurrent layers, by operator; their first two arguments are the card's compute capability and rules."""
