"""Exact gradient of a loss over all embeddings of a batch, with the activations of one chunk at a time."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memkit._core.errors import ConfigError, InputError, InputTypeError, warn_user
from memkit._core.foreign import LOSS
from memkit._core.printable import list_some
from memkit._core.settings import Checker
from memkit._core.words import guided
from memkit._gradients.left import LeftResults
from memkit._gradients.loss import Loss, refuse_complex
from memkit._recovery.replay import contexts_of
from memkit._recovery.snapshot import StateWatch
from memkit._torch import pytree
from memkit._torch.fake import FakeTensor
from memkit._torch.tensors import bit_sums
from memkit.train.divisors import NORMS_OF_A_ROW
from memkit.train.samples import mark_samples, unmark_samples
from memkit.train.split import count_rows, structure_of, take_rows
from memkit.train.split_check import check_split
from memkit.train.split_verdict import SplitVerdict, how_to_update

_CALL = "cached_backward(encoder, ...)"
_WHOLE = "or raise chunk_size to the rows of the batch"
# The modes and batch structures in which each encoder was checked, so that a loop pays once.
_CHECKED: weakref.WeakKeyDictionary[nn.Module, set[object]] = weakref.WeakKeyDictionary()


@guided(
    words={
        "loss_on_embeddings": LOSS,
        "call optimizer.step() after it": "optimizer",
        "backward=lambda loss: scaler.scale(loss).backward()": "scaler",
    }
)
def cached_backward(
    encoder: nn.Module,
    batch: Any,
    loss_on_embeddings: Callable[[Any], torch.Tensor],
    *,
    chunk_size: int,
    backward: Callable[[torch.Tensor], object] = torch.Tensor.backward,
    check: bool = True,
) -> torch.Tensor:
    """Compute the gradient of a contrastive loss over a whole batch, in chunks of its rows.

    Such a loss compares every row with every other, so a batch cannot be split. Its embeddings are small, though: all
    chunks are encoded without keeping activations, the loss and its gradient are computed on all embeddings at once,
    and each chunk is encoded again as backward reaches it. The gradient is the whole batch's, not an approximation.

    The second encoding repeats the first: the same dropout masks (torch's, NumPy's and Python's random state are
    replayed), the autocast state of the call, and buffers that change once.

    This requires that each row's embedding depends on that row alone, which is checked on a few rows, once for each
    encoder, mode and batch structure. A BatchNorm in training mode, or a custom normalization, sees one chunk's
    statistics: this gives a warning, and so does state that each chunk changes. An encoder that mixes its rows even
    in evaluation mode is refused.

    Args:
        encoder: Called as ``encoder(chunk)``. For several towers, one module that returns a tuple or dict.
        batch: Pytree of tensors (N, ...), see `count_rows`.
        loss_on_embeddings: Takes the encoder's output for all N rows: a pytree of tensors (N, ...). It may use
            parameters of its own, such as a temperature. Returns a 0-dim loss.
        chunk_size: Rows encoded at a time.
        backward: Called with the loss instead of ``loss.backward()``: ``accumulator.backward``, or
            ``lambda loss: scaler.scale(loss).backward()``.
        check: Whether to check the encoder.

    Returns:
        The loss, 0-dim and detached.

    Raises:
        ConfigError: ``chunk_size`` is not a positive int; the encoder mixes its rows.
        InputTypeError: ``encoder`` is not a module, or does not return tensors.
        InputError: The batch has no rows, or the encoder does not return one output row per input row.

    Warns:
        MemkitWarning: Chunks do not give the whole batch's gradient, or end with different buffers, or this could not
            be checked.

    Memory cost: the activations of one chunk, all embeddings with their gradient, and the loss's own graph; per chunk
    about 30 KB of random state. Time cost: one more forward; at first, three of at most 8 rows, with their backwards.

    Source: Gao et al. 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup" (GradCache).

    Example:
        >>> import torch, memkit as mk
        >>> encoder = torch.nn.Linear(4, 2)
        >>> def contrast(embeddings):
        ...     return torch.nn.functional.cross_entropy(embeddings @ embeddings.T, torch.arange(len(embeddings)))
        >>> loss = mk.train.cached_backward(encoder, torch.randn(32, 4), contrast, chunk_size=8)
        >>> encoder.weight.grad.shape
        torch.Size([2, 4])
    """
    _check(encoder, chunk_size, loss_on_embeddings)
    Checker("cached_backward").function("backward", backward)
    marked = mark_samples(batch)
    num_rows = count_rows(marked)
    changes = _check_rows(encoder, batch, num_rows, chunk_size) if check and chunk_size < num_rows else None
    watch = StateWatch(encoder)
    chunks: list[list[torch.Tensor]] = []
    structure = None
    for start in range(0, num_rows, chunk_size):
        chunk = unmark_samples(take_rows(marked, start, min(start + chunk_size, num_rows), num_rows=num_rows))
        leaves, structure = pytree.tree_flatten(run_again_in_backward(encoder, chunk, watch))
        _check_embeddings(leaves, min(chunk_size, num_rows - start))
        chunks.append(leaves)
        if changes is not None:
            changes.note()
    if changes is not None:
        changes.warn()
    if structure is None:
        raise InputError(
            "cached_backward(encoder, batch)", got="no rows", expected="at least one row", fix="skip empty batches."
        )
    columns = [torch.cat(column) for column in zip(*chunks, strict=True)]
    loss = loss_on_embeddings(pytree.tree_unflatten(columns, structure))
    _check_loss(loss)
    backward(loss)
    return loss.detach()


def _check_rows(encoder: nn.Module, batch: Any, num_rows: int, chunk_size: int) -> _Changes | None:
    """Check on a few rows whether chunks give the whole's gradient; return the watch over the buffers.

    None if this encoder was already checked in these modes, on batches of this structure, or has no values to compare.
    """
    if any(isinstance(each, FakeTensor) for each in encoder.parameters()):
        return None
    key = (tuple(module.training for module in encoder.modules()), structure_of(mark_samples(batch)))
    known = _CHECKED.setdefault(encoder, set())
    if key in known:
        return None
    if not any(parameter.requires_grad for parameter in encoder.parameters()):
        known.add(key)
        return _Changes(encoder, SplitVerdict(exact=True))

    kept: SimpleQueue[str] = SimpleQueue()  # the check puts back what its runs do to a list

    def loss_fn(model: nn.Module, part: tuple[Any, torch.Tensor]) -> Loss:
        rows, numbers = part
        results = LeftResults(model.named_modules())
        embeddings = pytree.tree_leaves(model(rows))
        for name in results.names():
            kept.put(name)
        trained = [each for each in embeddings if isinstance(each, torch.Tensor) and each.requires_grad]
        return Loss(sum=sum(_weighed(each, numbers) for each in trained), count=len(numbers))  # type: ignore[arg-type]  # at least one

    numbers = torch.arange(num_rows)
    verdict = check_split(encoder, (batch, numbers), loss_fn, num_parts=-(-num_rows // chunk_size))
    _report(verdict)
    if not kept.empty():
        warn_user(
            f"cached_backward: the encoder keeps a result in the attribute {kept.get()!r} when it is called. "
            "After the chunks, it is that of the last one, and a loss that reads it gets a gradient of no chunk. Way "
            f"out: return it from the encoder, as one value per row, {_WHOLE}."
        )
    if not verdict.is_uninformative:
        known.add(key)
    return _Changes(encoder, verdict)


def _weighed(embeddings: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Sum embeddings with a different weight for each element, as the gradient of a loss has.

    The squares tell of other rows' values that were added or multiplied without a gradient, as a center is.
    """
    flat = (torch.view_as_real(embeddings) if embeddings.is_complex() else embeddings).reshape(len(numbers), -1)
    rows, columns = torch.meshgrid(numbers.double() + 1, torch.arange(flat.shape[1]).double() + 1, indexing="ij")
    weights = torch.cos(1.7 * rows * columns.sqrt() + columns).to(flat.device, flat.dtype)
    return ((flat + flat.square() / 2) * weights).sum()


def _report(verdict: SplitVerdict) -> None:
    """Raise or warn according to the verdict."""
    if verdict.loss in {"rows", "weights"}:
        error = "" if verdict.error is None else f", off by {verdict.error:.2g} in chunks"
        raise ConfigError(
            _CALL,
            got=f"an encoder whose result for one row depends on other rows{error}",
            expected="an encoder that computes each row's embedding from that row alone",
            fix=verdict.advice
            if verdict.state
            else "move operations that mix rows (a mean, a softmax, attention over them) into loss_on_embeddings, "
            f"{_WHOLE}; check=False skips this check.",
        )
    if verdict.modules:
        names = list_some(verdict.modules)
        warn_user(
            f"cached_backward: in training mode {names} would see the statistics of each chunk, not of the batch, "
            "and change running statistics once per chunk, so the gradient is not that of the whole batch. Use "
            f"{NORMS_OF_A_ROW}, freeze the statistics with .eval(), {_WHOLE}."
        )
    if verdict.exact is None and not verdict.is_uninformative:
        warn_user(
            "cached_backward: could not check that chunks give the whole batch's gradient: "
            f"{verdict.reason.rstrip('.')}. Pass check=False if you know that each row's embedding depends on that "
            "row alone."
        )


class _Changes:
    """Finds buffers and frozen parameters that several chunks change: a step on the whole batch changes them once."""

    def __init__(self, encoder: nn.Module, verdict: SplitVerdict) -> None:
        self._encoder, self._verdict = encoder, verdict
        self._before: dict[str, torch.Tensor] | None = None
        self._found: dict[str, None] = {}
        self._sums: dict[str, list[int]] = {}  # of frozen parameters, which may be large
        self._moved: dict[str, None] = {}

    def note(self) -> None:
        """Call after each chunk. The first chunk may fill a cache; later chunks must change no buffer."""
        # By value: a BatchNorm changes its statistics without raising their version.
        now = {name: buffer for name, buffer in self._encoder.named_buffers() if not self._is_reported(name)}
        for name, value in (self._before or {}).items():
            if name in now and now[name].shape == value.shape and not torch.equal(now[name], value):
                self._found[name] = None
        self._before = {name: buffer.clone() for name, buffer in now.items()}
        sums = {name: bit_sums([each]) for name, each in self._encoder.named_parameters() if not each.requires_grad}
        self._moved |= {name: None for name in sums if self._sums.get(name, sums[name]) != sums[name]}
        self._sums = sums

    def warn(self) -> None:
        """Warn of changed state that the embeddings depend on, otherwise of changed buffers."""
        if self._moved:
            warn_user(
                f"cached_backward: each chunk moves frozen parameters ({list_some([*self._moved])}), which a step on "
                "the whole batch moves once, so embeddings that depend on them differ, and so does the gradient. Move "
                f"them before the call, outside of forward, {_WHOLE}."
            )
        names = ", ".join([*(self._verdict.state or self._found)][:5])
        if self._verdict.loss == "state":
            names = names or "something that memkit cannot name"
            warn_user(
                f"cached_backward: each chunk changes state that the embeddings depend on ({names}), which a step on "
                "the whole batch changes once, so the gradient differs. Update it "
                f"{how_to_update(self._verdict.state)}, {_WHOLE}."
            )
        elif names:
            warn_user(
                f"cached_backward: each chunk changes the buffers {names}, which a step on the whole batch changes "
                "once. No embedding depends on them, but the buffers end up with different values. Freeze them with "
                ".eval(), or update them outside of forward."
            )

    def _is_reported(self, name: str) -> bool:
        return any(name.startswith(f"{each}.") for each in self._verdict.modules)


def run_again_in_backward(encoder: nn.Module, chunk: Any, watch: StateWatch) -> Any:
    """Run a module without keeping activations; backward runs it again, with the same random numbers and buffers."""
    # Measured: as little memory as a first pass under no_grad and a second one against the embeddings' gradient. Since
    # the graph is complete, any backward works, even an accumulator's, which stops at its own parameters.
    return checkpoint(encoder, chunk, use_reentrant=False, context_fn=functools.partial(contexts_of, watch))


def _check_loss(loss: object) -> None:
    call, expected = "cached_backward(encoder, batch, loss_on_embeddings)", "a 0-dim loss with its graph"
    if not isinstance(loss, torch.Tensor):
        fix = "end loss_on_embeddings with `return loss`."
        raise InputTypeError(call, got=f"a {type(loss).__name__}", expected=expected, fix=fix)
    if loss.is_complex():
        refuse_complex(loss, call=call)
    if loss.numel() != 1:
        fix = "end loss_on_embeddings with `return losses.mean()`."
        raise InputError(call, got=f"a loss of shape {tuple(loss.shape)}", expected=expected, fix=fix)


def _check(encoder: object, chunk_size: object, loss_on_embeddings: object) -> None:
    check = Checker("cached_backward(encoder, ...)")
    if isinstance(loss_on_embeddings, type) or not callable(loss_on_embeddings):
        raise InputTypeError(
            "cached_backward(encoder, batch, loss_on_embeddings)",
            got=f"the class {loss_on_embeddings.__name__}"
            if isinstance(loss_on_embeddings, type)
            else f"a {type(loss_on_embeddings).__name__}",
            expected="a function of all embeddings that returns the loss",
            fix="write cached_backward(encoder, batch, lambda embeddings: criterion(embeddings), chunk_size=64)",
        )
    fix = "put the towers into one module whose forward returns their embeddings."
    check.instance(encoder, nn.Module, "a module, whose buffers can be kept from changing twice", fix)
    check.whole(
        "chunk_size",
        chunk_size,
        1,
        fix="pass the number of rows whose activations fit into memory, for example chunk_size=64.",
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
                fix="return the embeddings only; let loss_on_embeddings read values that belong to no row, such as "
                "a temperature, from the module itself.",
            )
