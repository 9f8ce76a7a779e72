"""The exact gradient of a loss over all embeddings of a batch, with the activations of one chunk at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from memkit._errors import ConfigError, InputError, InputTypeError
from memkit.train.replay import BufferWatch, Replay
from memkit.train.split import count_rows, take_rows


def cached_backward(
    encoder: nn.Module,
    batch: Any,
    loss_on_embeddings: Callable[[Any], torch.Tensor],
    *,
    chunk_size: int,
    backward: Callable[[torch.Tensor], object] = torch.Tensor.backward,
) -> torch.Tensor:
    """Compute the gradient of a contrastive loss over a whole batch, in chunks of its rows.

    Such a loss compares every row with every other, so that a batch cannot be split. Its embeddings are small, though:
    all chunks are encoded without keeping activations, the loss and its gradient are taken on all embeddings at once,
    and each chunk is encoded once more as backward reaches it. The gradient is the whole batch's, not an approximation.

    The second encoding repeats the first: the same dropout masks (torch's, NumPy's and Python's random state are
    replayed), the autocast state of the call, and buffers that change once. A BatchNorm in training mode sees one
    chunk's statistics, in both.

    Args:
        encoder: Called as ``encoder(chunk)``. For several towers, one module that returns a tuple or dict.
        batch: Pytree of tensors (N, ...), see `count_rows`.
        loss_on_embeddings: Gets what the encoder returns for all N rows: a pytree of tensors (N, ...). It may use
            parameters of its own, such as a temperature. Returns a 0-dim loss.
        chunk_size: Rows encoded at a time.
        backward: Called with the loss instead of ``loss.backward()``: ``accumulator.backward``, or
            ``lambda loss: scaler.scale(loss).backward()``.

    Returns:
        The loss, 0-dim and detached.

    Raises:
        ConfigError: ``chunk_size`` is not a positive int.
        InputTypeError: ``encoder`` is not a module, or returns something else than tensors.
        InputError: The batch has no rows, or the encoder does not return one row per row.

    Memory cost: the activations of one chunk, all embeddings with their gradient, and what the loss keeps; per chunk
    some 30 KB of random state. Time cost: one more forward.

    Source: Gao et al. 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup" (GradCache).

    Example:
        >>> import torch, memkit as mk
        >>> encoder = torch.nn.Linear(4, 2)
        >>> def contrast(embeddings):
        ...     return torch.nn.functional.cross_entropy(embeddings @ embeddings.T, torch.arange(len(embeddings)))
        >>> loss = mk.cached_backward(encoder, torch.randn(32, 4), contrast, chunk_size=8)
        >>> encoder.weight.grad.shape
        torch.Size([2, 4])
    """
    _check(encoder, chunk_size)
    num_rows = count_rows(batch)
    watch = BufferWatch(encoder)
    chunks: list[list[torch.Tensor]] = []
    structure = None
    for start in range(0, num_rows, chunk_size):
        chunk = take_rows(batch, start, min(start + chunk_size, num_rows), num_rows=num_rows)
        leaves, structure = pytree.tree_flatten(run_again_in_backward(encoder, chunk, watch))
        _check_embeddings(leaves, min(chunk_size, num_rows - start))
        chunks.append(leaves)
    if structure is None:
        raise InputError(
            "cached_backward(encoder, batch)", got="no rows", expected="one row or more", fix="skip empty batches."
        )
    columns = [torch.cat(column) for column in zip(*chunks, strict=True)]
    loss = loss_on_embeddings(pytree.tree_unflatten(columns, structure))
    backward(loss)
    return loss.detach()


def run_again_in_backward(encoder: nn.Module, chunk: Any, watch: BufferWatch) -> Any:
    """Run a module without its activations; the backward runs it again, with the same random numbers and buffers."""
    # Measured: as little memory as a first pass under no_grad and a second one against the embeddings' gradient. And
    # as the graph is whole, any backward works on it: an accumulator's, which stops at its own parameters, too.
    replay = Replay(watch)
    return checkpoint(encoder, chunk, use_reentrant=False, context_fn=lambda: (replay, replay.again))


def _check(encoder: object, chunk_size: object) -> None:
    if not isinstance(encoder, nn.Module):
        raise InputTypeError(
            "cached_backward(encoder, ...)",
            got=f"a {type(encoder).__name__}",
            expected="a module, whose buffers can be kept from changing twice",
            fix="put the towers into one module whose forward returns their embeddings.",
        )
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
        raise ConfigError(
            f"cached_backward(chunk_size={chunk_size!r})",
            got=repr(chunk_size),
            expected="a whole number of rows, 1 or more",
            fix="pass the number of rows whose activations fit.",
        )


def _check_embeddings(leaves: list[Any], num_rows: int) -> None:
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            raise InputTypeError(
                "cached_backward(encoder, ...)",
                got=f"a {type(leaf).__name__} from the encoder",
                expected="tensors with one row per row of the batch",
                fix="return the embeddings only.",
            )
        if leaf.ndim == 0 or len(leaf) != num_rows:
            raise InputError(
                "cached_backward(encoder, ...)",
                got=f"a tensor of shape {tuple(leaf.shape)} from the encoder for {num_rows} rows",
                expected="tensors with one row per row of the batch",
                fix="return the embeddings only; what belongs to no row, such as a temperature, "
                "loss_on_embeddings reads from the module itself.",
            )
