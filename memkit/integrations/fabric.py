"""Fabric: split losses for loops that use ``fabric.setup`` and ``fabric.backward``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric import is_wrapped
from torch import nn

from memkit._core.errors import InputTypeError
from memkit.train.split_loss import SplitLoss


class FabricSplitLoss:
    """A `SplitLoss` for a model from ``fabric.setup``: runs parts in Fabric's precision, syncs ranks once per batch.

    A plain `SplitLoss` would run the prepared model itself: mixed precision refuses a backward that is not Fabric's,
    and DistributedDataParallel would see one forward per part.

    Args:
        model: The model returned by ``fabric.setup`` or ``fabric.setup_module``.
        **options: For `SplitLoss`: ``num_microbatches``, ``reduction``, ``on_oom``, ``split_fn``, ``probe``.

    Attributes:
        split_loss: The `SplitLoss`, with its ``sizes``, ``num_ooms`` and ``state_dict()``.

    Raises:
        InputTypeError: The model was not set up by Fabric.
        ConfigError: Its parameters are sharded, or an option is invalid.

    Example:
        >>> import lightning as L
        >>> import torch
        >>> from memkit.integrations.fabric import FabricSplitLoss
        >>> fabric = L.Fabric(accelerator="cpu", devices=1)
        >>> model = torch.nn.Linear(3, 1)
        >>> model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> split = FabricSplitLoss(model, num_microbatches=2)
        >>> loss = split(torch.ones(5, 3), lambda model, x: model(x).square().mean())
        >>> fabric.backward(loss)
        >>> split.split_loss.sizes
        (3, 2)
    """

    def __init__(self, model: nn.Module, **options: Any) -> None:
        if not is_wrapped(model):
            raise InputTypeError(
                "FabricSplitLoss(model)",
                got=f"a {type(model).__name__}",
                expected="a model set up by Fabric",
                fix="pass the model returned by fabric.setup(model, optimizer); without Fabric use memkit.SplitLoss.",
            )
        # The module that Fabric wraps (the user's own, or in DistributedDataParallel) and its precision are private.
        self.split_loss = SplitLoss(model._forward_module, **options)  # type: ignore[arg-type]  # noqa: SLF001
        self._precision: Any = model._strategy.precision  # type: ignore[union-attr]  # noqa: SLF001

    def __call__(self, batch: Any, loss_fn: Callable[[Any, Any], Any]) -> torch.Tensor:
        """Run forward and backward on a batch; return its loss for ``fabric.backward(loss)``.

        Args:
            batch: As for `SplitLoss`.
            loss_fn: As for `SplitLoss`; its model behaves like the one set up by Fabric, including the precision.
        """
        scaler = getattr(self._precision, "scaler", None)
        return self.split_loss(
            batch,
            lambda model, micro: loss_fn(_InPrecision(model, self._precision), micro),
            scale=1.0 if scaler is None else scaler.get_scale(),
        )


class _InPrecision:
    """A module whose call casts inputs and outputs as Fabric does; everything else is the module's own."""

    def __init__(self, module: nn.Module, precision: Any) -> None:
        self.module, self._precision = module, precision

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._precision.convert_input((args, kwargs))
        with self._precision.forward_context():
            output = self.module(*args, **kwargs)
        return self._precision.convert_output(output)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)
