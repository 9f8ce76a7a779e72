"""A scene's draw in two Triton kernels: a random number per slot; then the steps, with one lane per piece."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from memkit.points.bits import GOLDEN, HALFWAY, LAST_SHIFT, MIXING, Key, signed

_WORDS = 128  # of 4 numbers each, per program: few enough that most programs redraw none
_PIECES = 128
_GOLDEN, _LAST, _HALFWAY = (tl.constexpr(each) for each in (GOLDEN, LAST_SHIFT, HALFWAY))
(_SHIFT_A, _FACTOR_A), (_SHIFT_B, _FACTOR_B) = ((tl.constexpr(each) for each in pair) for pair in MIXING)


def choose_on_device(left: Tensor, steps: Tensor, needed: Tensor, key: Key) -> Tensor:
    """Run `passes.take_steps` on a device; return (N,) uint8, 1 in the slots that are kept."""
    num, num_pieces = len(left) - 1, len(needed)
    below = torch.empty(num, dtype=torch.uint8, device=left.device)
    chosen = torch.empty_like(below)
    if num:
        grid = (triton.cdiv(num, 4 * _WORDS),)
        _draw_below[grid](left, below, num, signed(key.tag), signed(key.key), _WORDS)
        _keep[(triton.cdiv(num_pieces, _PIECES),)](below, steps, needed, chosen, len(steps) - 1, num_pieces, _PIECES)
    return chosen


def are_compiled() -> bool:
    """Return whether Triton compiles the kernels; otherwise it interprets them, on any device."""
    return isinstance(_keep, triton.JITFunction)


@triton.jit(do_not_specialize=["num", "seed", "redraw_seed"])  # type: ignore[untyped-decorator,unused-ignore]
def _draw_below(left, below, num, seed, redraw_seed, WORDS: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202, N803
    number = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    lane = tl.arange(0, 4)[None, :]
    word = _word(number.to(tl.uint64), seed)[:, None]
    drawn = ((word >> (16 * lane).to(tl.uint64)) & 0xFFFF).to(tl.uint32)
    slot = 4 * number[:, None] + lane
    here = tl.load(left + slot, mask=slot < num, other=1).to(tl.uint32)
    chosen = drawn // (65535 // here)
    refused = chosen == here
    if tl.max(refused.to(tl.int32)) > 0:  # rare
        more = _word(slot.to(tl.uint64) + _HALFWAY, redraw_seed) >> 9
        chosen = tl.where(refused, ((more * here.to(tl.uint64)) >> 55).to(tl.uint32), chosen)
    tl.store(below + slot, chosen.to(tl.uint8), mask=slot < num)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _word(number, seed):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202 # as `bits.words_at`
    word = (number + 1) * _GOLDEN + seed.to(tl.uint64)
    word = (word ^ (word >> _SHIFT_A)) * _FACTOR_A
    word = (word ^ (word >> _SHIFT_B)) * _FACTOR_B
    return word ^ (word >> _LAST)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _keep(below, steps, needed, chosen, num_steps, num_pieces, PIECES: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202, N803
    first = tl.program_id(0) * PIECES
    piece = first + tl.arange(0, PIECES)
    still = tl.load(needed + piece, mask=piece < num_pieces, other=0)
    step = tl.arange(0, 128)  # there are at most 127
    start = tl.load(steps + step, mask=step < num_steps, other=0)
    stop = tl.load(steps + step + 1, mask=step < num_steps, other=0)
    num_without = tl.sum((stop - start <= first).to(tl.int32)) - (128 - num_steps)  # leading steps without these pieces
    for number in range(num_without, num_steps):
        start_here, stop_here = tl.load(steps + number), tl.load(steps + number + 1)
        live = start_here + piece < stop_here
        keep = live & (tl.load(below + start_here + piece, mask=live, other=255) < still)
        tl.store(chosen + start_here + piece, keep.to(tl.uint8), mask=live)
        still -= keep.to(tl.uint8)
