"""Tensor metadata: version counter, storage, and hooks."""

import itertools
from collections.abc import Callable, Iterable
from functools import cache
from operator import attrgetter, methodcaller
from typing import Any, TypeGuard

import torch

from memkit._torch.versions import require

_WITH_DATA = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
_WORD = 8
_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
"""Returns autograd's count of in-place changes to a tensor; not for inference tensors."""


def versions_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the version of each tensor."""
    return [each._version for each in tensors]


def bit_sums(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return a sum over the bits of each tensor with data, to tell whether it was written; invisible to modes."""
    dense = [each for each in tensors if type(each) in _WITH_DATA and each.layout is torch.strided]
    dense = [each for each in dense if not (each.is_meta or each.is_quantized or each.is_conj() or each.is_neg())]
    sums = []
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        for each in dense:
            whole = _WHOLE.get(each.dtype.itemsize)
            if whole is torch.int8 and each.is_contiguous() and each.numel() % _WORD == 0:
                each, whole = each.view(-1), torch.int64  # noqa: PLW2901 - a sum of one byte would often stay the same
            if whole is not None:
                sums.append(int(each.view(whole).sum(dtype=whole)))  # in its own width: another one takes a copy
    return sums


def has_storage(value: object) -> TypeGuard[torch.Tensor]:
    """Whether a value is a tensor with a storage of its own: not a sparse one or a wrapper around others."""
    return type(value) in _WITH_DATA and value.layout is torch.strided  # type: ignore[attr-defined]  # a tensor


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor's bits as integers of the same size; a quantized tensor's are its own integers."""
    if tensor.is_quantized:
        return tensor.int_repr()
    plain = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor.resolve_neg()
    return plain.view(_WHOLE[plain.dtype.itemsize])


def content_sums(tensor: torch.Tensor) -> list[int]:
    """Return sums over a tensor's bits: all of it, every other row, and every other column; see `bit_sums`.

    Unlike a single sum, they also tell of values that changed places.
    """
    if type(tensor) not in _WITH_DATA or tensor.layout is not torch.strided or tensor.is_nested:
        return []
    return bit_sums([tensor, tensor[::2], tensor[..., ::2]] if tensor.dim() else [tensor])


def live_versions(references: Iterable[Callable[[], torch.Tensor | None]]) -> list[int] | None:
    """Return the version of each weakly referenced tensor; None if one is gone."""
    try:
        return [each()._version for each in references]  # type: ignore[union-attr]  # tried, as a check takes longer
    except AttributeError:
        return None


def share_memory(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether the memory of some tensors overlaps, from the first to the last byte of each."""
    by_storage: dict[int, list[tuple[int, int]]] = {}
    for each in tensors:
        if type(each) in _WITH_DATA and each.layout is torch.strided and each.numel():
            begin = each.storage_offset() * each.itemsize
            last = sum((size - 1) * stride for size, stride in zip(each.shape, each.stride(), strict=True))
            end = begin + (last + 1) * each.itemsize
            by_storage.setdefault(storage_key(each.untyped_storage()), []).append((int(begin), int(end)))
    return any(
        end > begin for spans in by_storage.values() for (_, end), (begin, _) in itertools.pairwise(sorted(spans))
    )


def share_versions(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether some tensors share a version: what is written to one then seems to be written to the other.

    Parameters made of views of one tensor do, without being views. Nothing tells of it but a write, here of no element.
    """
    by_storage: dict[int, list[torch.Tensor]] = {}
    for each in tensors:
        by_storage.setdefault(storage_key(each.untyped_storage()), []).append(each)
    with torch.no_grad():
        for group in by_storage.values():
            for number, one in enumerate(group[:-1]):
                before = [other._version for other in group[number + 1 :]]
                one.detach().as_strided((0,), (1,)).zero_()
                if before != [other._version for other in group[number + 1 :]]:
                    return True
    return False


@cache
def versions_tell_together() -> bool:
    """Return whether this torch's operators on many tensors, those of `foreach`, increment the version of each."""
    with torch.inference_mode(mode=False), torch.no_grad():
        probe = torch.zeros(1, device="cpu")
        torch._foreach_add_([probe], 1)
    return version_of(probe) == 1


def marks_of(tensors: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
    """Return the tensors that have a version (inference tensors have none), each with its current one."""
    marks = []
    for each in tensors:
        if not each.is_inference():
            marks.append((each, each._version))  # noqa: PERF401 - a comprehension enters a function before Python 3.12
    return marks


def are_unwritten(marks: Iterable[tuple[torch.Tensor, int]]) -> bool:
    """Return whether no tensor was changed in place since `marks_of`."""
    return all(each._version == version for each, version in marks)


def leaf_gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of a leaf; None for a tensor with a graph, of which torch warns if it is asked."""
    return tensor.grad if tensor.is_leaf else None


def put_back(tensor: torch.Tensor, place: torch.Tensor) -> None:
    """Give a tensor back the storage that an alias of it still has, if it got another one (`tensor.data = other`)."""
    if type(tensor) in _WITH_DATA and tensor.layout is torch.strided is place.layout:
        is_there = storage_key(tensor.untyped_storage()) == storage_key(place.untyped_storage())
        if not is_there or tensor.shape != place.shape or tensor.stride() != place.stride():
            tensor.data = place


def gradient_marks(parameters: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """Return identity and version of each parameter's gradient: another list tells that one was changed or replaced."""
    marks = []
    for each in parameters:
        gradient = each.grad
        marks.append((0, 0) if gradient is None else (id(gradient), gradient._version))
    return marks


storage_key: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""Returns a key that is the same for all Python objects of one storage."""


def strided_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the strided tensors that hold a tensor's memory: itself, or the parts of a sparse one; () if unknown."""
    layout = tensor.layout
    if layout is torch.strided:
        return (tensor,)
    if layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()  # as they are: the public methods require it to be coalesced
    if layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()


def bytes_held(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's values, and of the indices of a sparse one."""
    return sum(part.nbytes for part in strided_parts(tensor.detach()))


use_count: Callable[[torch.Tensor], int] = methodcaller("_use_count")
"""Returns the number of C++ references to a tensor."""


def hooks_of(tensor: torch.Tensor) -> Any:
    """Return the hooks on a tensor's gradient; None if it never had any."""
    return tensor._backward_hooks


def set_hooks(tensor: torch.Tensor, hooks: Any) -> None:
    """Set a tensor's hooks, as returned by `hooks_of`."""
    tensor._backward_hooks = hooks


def accumulate_hooks(tensor: torch.Tensor) -> Any:
    """Return the hooks that run after a leaf's gradient is accumulated; empty or None if there are none."""
    return tensor._post_accumulate_grad_hooks


def set_accumulate_hooks(tensor: torch.Tensor, hooks: Any) -> None:
    """Set a leaf's hooks, as returned by `accumulate_hooks`."""
    tensor._post_accumulate_grad_hooks = hooks


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the base of a view; None if the tensor is not a view."""
    return tensor._base


is_zero_tensor: Callable[[torch.Tensor], bool] = torch.Tensor._is_zerotensor
"""Returns whether a tensor is one of autograd's zeros, which take no memory."""


is_view: Callable[[torch.Tensor], bool] = methodcaller("_is_view")
"""Returns whether a tensor is a view."""


MAKE_SUBCLASS = "_make_subclass"
"""Name of the tensor's static method that creates parameters and other subclasses."""
MAKE_WRAPPER = "_make_wrapper_subclass"
"""Name of the tensor's static method that creates tensors without memory of their own, which wrap others or none."""


def gradient_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    """Return the dtype in which autograd keeps a tensor's gradient; None if any is allowed."""
    return tensor.grad_dtype if _HAS_GRADIENT_DTYPE else tensor.dtype


def assign_gradient_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> None:
    """Set the dtype in which autograd keeps a tensor's gradient.

    Raises:
        TorchVersionError: The dtype is not the tensor's own, and torch is older than 2.10.
    """
    if _HAS_GRADIENT_DTYPE:
        tensor.grad_dtype = dtype
    elif dtype is not None and dtype != tensor.dtype:
        require_gradient_dtypes("a gradient in another dtype than its parameter's")


def require_gradient_dtypes(feature: str) -> None:
    """Reject a feature that keeps gradients in a dtype other than their parameters'.

    Raises:
        TorchVersionError: torch is older than 2.10.
    """
    require(_HAS_GRADIENT_DTYPE or None, name="Tensor.grad_dtype", since="2.10", feature=feature)


_HAS_GRADIENT_DTYPE = hasattr(torch.Tensor, "grad_dtype")  # 2.8 lacks it, 2.10 has it
