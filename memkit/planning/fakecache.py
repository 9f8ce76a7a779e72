"""Torch's cache of what operators return on fake tensors, with keys that are cheap to make."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import NoneType
from typing import Any

import torch

from memkit._torch.fake import BypassDispatchCache, DispatchCacheKey, FakeTensor, FakeTensorMode, default_device
from memkit._torch.operators import schema_of

_PLAIN = (int, float, complex, str, NoneType, torch.dtype, torch.device, torch.layout, torch.memory_format)
_READ_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class CachedFakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]  # torch's own class hook
    """A fake tensor mode whose sizes are all numbers.

    torch's keys are made for symbolic sizes and for all layouts, and making them is most of a warm dry run. It also
    caches nothing that touches a tensor with values (labels, lengths). But values only matter to an operator if it has
    those of all its tensors, or writes them, or its result's size follows from them.
    """

    def _cache_key(
        self,
        state: object,  # noqa: ARG002 - what symbolic sizes need
        func: Any,
        args: Sequence[object],
        kwargs: Mapping[str, object],
    ) -> DispatchCacheKey:
        """Torch calls this before it looks a result up; `BypassDispatchCache` says that there is none."""
        key = [
            type(self),  # the cache is one for all modes
            func,
            torch.get_default_dtype(),
            default_device(),
            torch.is_inference_mode_enabled(),
            *kwargs,
        ]
        has_values = self._add(key, (*args, *kwargs.values()))
        is_mutable = schema_of(func).is_mutable
        if True in has_values and (False not in has_values or is_mutable or not _READ_VALUES.isdisjoint(func.tags)):
            raise BypassDispatchCache("values")
        return DispatchCacheKey(tuple(key))

    def _add(self, key: list[object], arguments: Iterable[object]) -> set[bool]:
        """Add arguments to a key; returns whether the tensors among them have values."""
        has_values = set()
        for argument in arguments:
            if isinstance(argument, FakeTensor):
                if argument.fake_mode is not self or argument.layout is not torch.strided:
                    raise BypassDispatchCache("another mode's tensor, or no strides")
                has_values.add(argument.constant is not None)
                key += (
                    argument.dtype,
                    argument.shape,
                    argument.stride(),
                    argument.storage_offset(),
                    argument.untyped_storage().nbytes(),
                    argument.fake_device,
                    argument.requires_grad,
                    argument.is_conj(),
                    argument.is_neg(),
                    argument.is_inference(),
                )
            elif isinstance(argument, (list, tuple)):
                key += type(argument), len(argument)
                has_values |= self._add(key, argument)
            elif isinstance(argument, _PLAIN):
                key += type(argument), argument  # 1 and 1.0 are equal, but their results are not
            else:
                raise BypassDispatchCache("an argument that is no plain value")
        return has_values
