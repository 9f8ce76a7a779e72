"""Gradient penalties for a GAN's discriminator, in float32 under any surrounding precision."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import nn

from memkit._core.errors import InputError, InputTypeError, warn_user
from memkit._core.settings import Checker
from memkit._core.words import guided
from memkit.train.row_mixers import scan_modules

_WARNED_OF: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@guided(
    words={
        "real": "real_data real_samples x inputs",
        "fake": "fake_data fake_samples",
        "multiply its result: 10.0 * gradient_penalty(discriminator, real, fake)": "lambda_gp gp_weight weight",
        "the penalty is computed where the inputs are": "device",
    }
)
def gradient_penalty(
    discriminator: Callable[[torch.Tensor], torch.Tensor],
    real: torch.Tensor,
    fake: torch.Tensor | None = None,
    *,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Penalize the discriminator's gradient with respect to its input: R1, or WGAN-GP if ``fake`` is given.

    ``real`` alone: the mean over rows of ``||gradient||^2`` (R1; on fake samples alone it is R2). With ``fake``: the
    mean over rows of ``(||gradient|| - 1)^2`` at a random point between each pair (WGAN-GP). Multiply by your weight.

    Autocast is off inside, inputs are float32 (float64 stays), and half-precision parameters and buffers are used as
    float32 copies, so the value is the float32 one: in half precision a second derivative has no digits left. The
    inner gradient needs no loss scaling either: scale the sum of the losses, as usual.

    Args:
        discriminator: A module or function of one tensor. Its output, (N,), (N, 1) or patches (N, 1, H, W), is
            summed. It runs once more, so its spectral norms and BatchNorms are updated once more.
        real: Floating tensor (N, ...).
        fake: Like ``real``. Neither gets a gradient.
        generator: Draws the points between the pairs.

    Returns:
        0-dim tensor, float32 or float64, with a graph to the discriminator's parameters if gradients are enabled.

    Raises:
        InputError: The input is not floating or has no rows, the shapes differ, or the output does not depend on it.
        InputTypeError: The input is not a tensor, ``generator`` is not a generator, or discriminator and input were
            swapped.

    Memory cost: one forward's activations and the graph of its backward; float32 copies of half-precision parameters.

    Source: R1: Mescheder et al. 2018 (arXiv:1801.04406). WGAN-GP: Gulrajani et al. 2017 (arXiv:1704.00028).

    Example:
        >>> import torch, memkit as mk
        >>> discriminator = torch.nn.Linear(2, 1)
        >>> penalty = mk.train.gradient_penalty(discriminator, torch.ones(3, 2))
        >>> torch.testing.assert_close(penalty, discriminator.weight.square().sum())
    """
    _check_types(discriminator, real, fake)
    if generator is not None:
        expected, fix = "a torch.Generator, or None", "pass generator=torch.Generator().manual_seed(0)."
        Checker("gradient_penalty(generator=...)").instance(generator, torch.Generator, expected, fix)
    _warn_of_norms(discriminator)
    points = _as_points(real, "real")
    if fake is not None:
        points = _between(points, _as_points(fake, "fake"), generator)
    create_graph = torch.is_grad_enabled()
    points = points.requires_grad_()
    with torch.enable_grad(), torch.autocast(points.device.type, enabled=False):
        outputs = _call(discriminator, points)
        gradient: torch.Tensor | None = None
        if outputs.requires_grad:
            (gradient,) = torch.autograd.grad(outputs.sum(), points, create_graph=create_graph, allow_unused=True)
        if gradient is None:
            raise InputError(
                "gradient_penalty(discriminator, real)",
                got="an output that does not depend on the input",
                expected="a discriminator that autograd can differentiate with respect to its input",
                fix="do not detach inside the discriminator, and let its output depend on the tensor that it receives.",
            )
        # vector_norm has gradient zero at zero, where the square root of a sum of squares has none.
        norms = torch.linalg.vector_norm(gradient.reshape(len(gradient), -1), dim=1)
        penalty: torch.Tensor = (norms - (0 if fake is None else 1)).square().mean()
        return penalty


def _check_types(discriminator: object, real: object, fake: object) -> None:
    given = [real] if fake is None else [real, fake]
    if callable(discriminator) and all(isinstance(each, torch.Tensor) for each in given):
        return
    kinds = ", ".join(f"a {type(each).__name__}" for each in (discriminator, *given))
    raise InputTypeError(
        "gradient_penalty(discriminator, real, fake)",
        got=kinds,
        expected="a module or function of one tensor, and tensors",
        fix=f"write gradient_penalty(discriminator, real{'' if fake is None else ', fake'}): the discriminator first, "
        "then tensors of its input",
    )


def _warn_of_norms(discriminator: object) -> None:
    """Warn, once per discriminator, of norms that mix rows: a row's gradient would depend on all outputs."""
    if not isinstance(discriminator, nn.Module) or discriminator in _WARNED_OF:
        return
    names = scan_modules(discriminator)
    if names:
        _WARNED_OF.add(discriminator)
        warn_user(
            f"gradient_penalty: {', '.join(names[:5])} normalize over the rows of the batch, so each row's gradient "
            "contains those of all outputs, and the penalty is not computed per row. Use InstanceNorm, GroupNorm, "
            "LayerNorm or spectral_norm in the discriminator, or call .eval() on these layers."
        )


def _as_points(rows: torch.Tensor, name: str) -> torch.Tensor:
    if not rows.is_floating_point() or rows.ndim == 0 or rows.numel() == 0:
        raise InputError(
            f"gradient_penalty(discriminator, {name})",
            got=f"a tensor of shape {tuple(rows.shape)} and {rows.dtype}",
            expected="a floating-point tensor with rows in dimension 0",
            fix=f"pass {name} as the discriminator's floating-point input; penalize embeddings rather than indices.",
        )
    return rows.detach().to(torch.promote_types(rows.dtype, torch.float32))


def _between(real: torch.Tensor, fake: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    if real.shape != fake.shape:
        raise InputError(
            "gradient_penalty(discriminator, real, fake)",
            got=f"shapes {tuple(real.shape)} and {tuple(fake.shape)}",
            expected="as many fake samples as real ones, of the same shape",
            fix="cut the larger one: n = min(len(real), len(fake)), then real[:n] and fake[:n].",
        )
    device = real.device if generator is None else generator.device
    shares = torch.rand(len(real), dtype=real.dtype, device=device, generator=generator).to(real.device)
    return torch.lerp(real, fake, shares.view(-1, *[1] * (real.ndim - 1)))


def _call(discriminator: Callable[[torch.Tensor], torch.Tensor], points: torch.Tensor) -> torch.Tensor:
    """Call the discriminator with half-precision parameters and buffers replaced by float32 copies."""
    if not isinstance(discriminator, nn.Module):
        return discriminator(points)
    widened = {
        name: tensor.to(points.dtype)
        for name, tensor in [*discriminator.named_parameters(), *discriminator.named_buffers()]
        if tensor.dtype in {torch.float16, torch.bfloat16}
    }
    outputs: torch.Tensor = (
        torch.func.functional_call(discriminator, widened, (points,)) if widened else discriminator(points)
    )
    return outputs
