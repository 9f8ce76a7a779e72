"""Results of a forward's operators that can be made again: the operators are written down and run again when needed.

Memory is held by storages, so a `Value` is the content of a storage: the operator that made it, and those that changed
it in place. A recorded operator refers to other values, or to tensors that stay. Nothing is held longer than needed: a
value that nobody refers to any more is gone, and so are the operators that only it needed.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, NoReturn, TypeAlias, TypeVar

import torch
from torch import Tensor

from memkit._core.errors import StateError
from memkit._torch import aten
from memkit._torch.dispatch import OpOverload, below_autograd, below_modes, counting_in_views
from memkit._torch.fake import FakeTensor
from memkit._torch.foreach import COPIES
from memkit._torch.graph import current_backward, current_node, keeps_graph
from memkit._torch.operators import kernel_of, schema_of
from memkit._torch.tensors import is_zero_tensor, version_of

T = TypeVar("T")
_NO_BACKWARD = -1
_FEW_BYTES = 2**16
_aten = torch.ops.aten
# Places of the running mean, the running variance and the flag for training. These kernels update the statistics, and
# in training they use nothing of them.
_STATISTICS: Mapping[Any, tuple[int, int, int]] = {
    _aten.native_batch_norm.default: (3, 4, 5),
    _aten.cudnn_batch_norm.default: (3, 4, 5),
    _aten.miopen_batch_norm.default: (3, 4, 5),
}
_NOT_OF_A_FORWARD = frozenset({aten.local_scalar_dense, _aten.ones_like.default, *COPIES})
_NOT_COUNTED = frozenset({"prim", "profiler", "c10d", "_c10d_functional", "fsdp"})
# Their results have no content yet.
_UNFILLED = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"})
# Places of arguments that autograd saves, if they take gradients, and of which backward reads the shape alone. They are
# saved right before the operator runs.
_SHAPE_ONLY: Mapping[Any, int] = {_aten.index_add.default: 3, _aten.index_add_.default: 3}
# These change a storage in a way that cannot be repeated on another one.
_ODD = frozenset({"set_", "resize_", "resize_as_", "resize", "set", "set_data"})
_MASKS = frozenset({torch.bool, torch.uint8})
_REAL = frozenset({Tensor, torch.nn.Parameter})
_PLAIN = frozenset({Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor})


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is just a view of one storage; the zeros of forward-mode AD have an empty one."""
    return (
        type(tensor) in _PLAIN
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or is_zero_tensor(tensor))
        and not tensor.is_inference()
    )


def are_counts(tensor: Tensor) -> bool:
    """Return whether these are a few whole numbers in a row, such as a packed sequence's batch sizes.

    They stay: there is nothing to gain, and C++ reads them, so that in a simulation too they have their data.
    """
    is_row = tensor.dtype is torch.int64 and tensor.dim() == 1
    return is_row and tensor.untyped_storage().nbytes() <= _FEW_BYTES


def repeats(func: Any) -> bool:
    """Return whether an operator gives the same results when it runs again on the same tensors, and changes no others.

    Only torch's own operators are known to; of others, what they do besides is unknown.
    """
    return getattr(func, "namespace", "") == "aten" and func.overloadpacket.__name__ not in _ODD


def selects_by_values(func: Any, args: Sequence[Any]) -> bool:
    """Return whether the size of an operator's result depends on values, which a simulated rerun does not have."""
    if func is _aten.index.Tensor:
        return any(each.dtype in _MASKS for each in args[1] if each is not None)
    return torch.Tag.dynamic_output_shape in getattr(func, "tags", ())


def leaves_unfilled(func: Any) -> bool:
    """Return whether an operator makes tensors that others are to fill: `rrelu` saves its noise before it draws it."""
    return func.overloadpacket.__name__ in _UNFILLED


def counts(func: Any) -> bool:
    """Return whether an operator counts on a tape.

    Views do not: they make nothing, and autograd makes more of them in some forwards than in others. Nor do reads of a
    number, which stand-ins mostly answer without an operator, questions that only stand-ins are asked, operators that
    DistributedDataParallel and profilers run around a forward, copies of buffers for a recovery, and the ones that a
    backward inside of the block begins with.
    """
    is_empty = getattr(func, "is_view", False) or func in _NOT_OF_A_FORWARD
    return not is_empty and getattr(func, "namespace", "") not in _NOT_COUNTED


def operator_name(func: Any) -> str:
    """Return an operator's name on a tape.

    CTC loss with lengths in tensors is one operator with two names: torch chooses by whether a mode sees it, and so do
    estimates.
    """
    return str(aten.ctc_loss.default if func is aten.ctc_loss.Tensor else func)


def without_unfilled(counts: Mapping[str, int]) -> dict[str, int]:
    """Leave out of counts by name the operators whose results have no content yet.

    C++ makes a tensor from a list by one, such as CTC's from lengths; Python's own, as in a simulation, goes without.
    """
    return {name: count for name, count in counts.items() if _UNFILLED.isdisjoint(name.split("."))}


def may_be_random(func: Any) -> bool:
    """Return whether an operator can draw random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags


def is_random(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operator draws random numbers; attention without dropout does not."""
    if not may_be_random(func):
        return False
    names = [argument.name for argument in schema_of(func).arguments]
    if "dropout_p" not in names:
        return True
    place = names.index("dropout_p")
    return bool(args[place] if place < len(args) else kwargs.get("dropout_p", 0))


def changes_arguments(func: Any) -> bool:
    """Return whether an operator changes some of its arguments in place."""
    return isinstance(func, OpOverload) and schema_of(func).is_mutable


def written_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that an operator changes in place."""
    written = []
    for place, argument in enumerate(schema_of(func).arguments if changes_arguments(func) else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            written += [
                each for each in (given if isinstance(given, (list, tuple)) else [given]) if isinstance(each, Tensor)
            ]
    return written


def shape_only_argument(func: Any, args: Sequence[Any]) -> Tensor | None:
    """Return the argument that autograd has just saved for its shape alone; None if there is none."""
    place = _SHAPE_ONLY.get(func)
    return args[place] if place is not None and torch.is_grad_enabled() and args[place].requires_grad else None


def without_statistics(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of an operator without running statistics that it would only update."""
    places = _STATISTICS.get(func)
    if places is None or not args[places[2]]:
        return args
    return tuple(None if place in places[:2] else each for place, each in enumerate(args))


class PlannedForward(ABC):
    """A forward under a plan. Its hooks on saved tensors are its methods."""

    @abstractmethod
    def counts(self) -> dict[str, int]:
        """Return what the plan goes by, and how often there was each."""


class SavedKind(NamedTuple):
    """Kind of a saved tensor, which depends neither on its precision nor on its sizes; as text ``"floating 3-D"``."""

    is_floating: bool
    num_dims: int

    @classmethod
    def parse(cls, text: str) -> SavedKind:
        """Read it from its text."""
        name, num_dims = text.split()
        return cls(name == "floating", int(num_dims.removesuffix("-D")))

    def __str__(self) -> str:
        return f"{'floating' if self.is_floating else 'other'} {self.num_dims}-D"


class Value:
    """Content of one storage, made by an operator of the forward and perhaps changed in place by others.

    Attributes:
        steps: The operators; empty if they are no longer needed.
        num_steps: Their number.
        made: The tensor that its first operator has returned, as soon as it was made again.
        is_read: Whether the content after the last operator may be asked for.
        is_lost: Whether the storage was changed since, by an operator that is not written down.
        is_filled: Whether there is content yet.
    """

    __slots__ = ("__weakref__", "_is_read_between", "is_filled", "is_lost", "is_read", "made", "num_steps", "steps")

    def __init__(self, step: Step) -> None:
        self.steps, self.num_steps, self.made = [step], 1, None
        self.is_read = self.is_lost = self._is_read_between = False
        self.is_filled = not leaves_unfilled(step.func)

    steps: list[Step]
    made: Tensor | None

    def append(self, step: Step) -> None:
        """Append an operator that changes the storage in place."""
        self.steps.append(step)
        self.num_steps += 1
        self.is_filled = True
        self._is_read_between |= self.is_read
        self.is_read = False

    def fill(self, made: Tensor) -> Tensor:
        """Hold the content; the operators are dropped unless they may be needed again."""
        self.made = made
        if not self._is_read_between and current_backward() != _NO_BACKWARD and not keeps_graph():
            self.steps = []
        return made


class Storages(Generic[T]):
    """Entries for the storages of a forward, kept while these live."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}  # by id() of the storage's Python object, which lives as long as it

    def learn(self, tensor: Tensor, known: T, on_death: Callable[[T], object] | None = None) -> T:
        """Note something about a tensor's storage.

        Args:
            tensor: A plain tensor.
            known: What to note.
            on_death: Called with it when the storage is freed.
        """
        storage = tensor.untyped_storage()

        def forget(_: object, key: int = id(storage)) -> None:
            self._entries.pop(key, None)
            if on_death is not None:
                on_death(known)

        entry = _Entry(storage, forget)
        entry.known = known
        self._entries[id(storage)] = entry
        return known

    def find(self, tensor: Tensor) -> T | None:
        """Return what is known of a tensor's storage."""
        try:
            entry = self._entries.get(id(tensor.untyped_storage()))
        except (NotImplementedError, RuntimeError):  # sparse or opaque: no storage of its own
            return None
        return None if entry is None or not is_plain(tensor) else entry.known


class _Entry(weakref.ref[torch.UntypedStorage]):
    """Weak reference to a storage with what is known of it."""

    __slots__ = ("known",)
    known: Any


class View(NamedTuple):
    """How a tensor looks at its storage."""

    dtype: torch.dtype
    device: torch.device
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> View:
        """Describe a plain tensor."""
        return cls(tensor.dtype, tensor.device, int(tensor.storage_offset()), tensor.shape, tensor.stride())

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """Return such a view of a storage."""
        view = torch.empty(0, dtype=self.dtype, device=self.device)
        return view.set_(storage, self.offset, self.shape, self.stride)

    def beside(self, tensor: Tensor) -> Tensor:
        """Return such a view of a plain tensor's storage: the tensor itself, if it is one."""
        if (
            tensor.shape == self.shape
            and tensor.dtype is self.dtype
            and tensor.stride() == self.stride
            and tensor.storage_offset() == self.offset
        ):
            return tensor
        return self.on(tensor.untyped_storage())

    def stand_in(self) -> Tensor:
        """Return a tensor of this shape without data, for an operator's backward that reads nothing else."""
        node = current_node()
        if node is None or not node.name().startswith("IndexAdd"):
            _refuse_shape_only(self.shape, node)
        return torch.empty((), dtype=self.dtype, device=self.device).expand(self.shape)


class Reading(NamedTuple):
    """A view of a value, as an operator or autograd has seen it: after so many of its operators."""

    value: Value
    num_steps: int
    view: View

    @classmethod
    def of(cls, tensor: Tensor, value: Value) -> Reading:
        """Describe a tensor over the value's storage."""
        value.is_read = True
        return cls(value, value.num_steps, View.of(tensor))


class Leaf:
    """A tensor that stays for an operator that runs again, and its version.

    Args:
        tensor: The tensor, below autograd.

    Attributes:
        is_plain: Whether it is just a view of one storage.
    """

    __slots__ = ("__weakref__", "_num_bytes", "_seen_version", "_tensor", "is_plain")

    def __init__(self, tensor: Tensor) -> None:
        with counting_in_views():
            self._tensor = tensor.detach()  # an operator's own result would keep its graph alive
        self._seen_version = version_of(self._tensor)
        self.is_plain = is_plain(tensor)
        # Of the tensor that stays: a simulation puts one without the storage's other parts in a real one's place.
        self._num_bytes = self._tensor.untyped_storage().nbytes() if self.is_plain else 0

    def copy(self) -> None:
        """Keep a copy instead: the tensor is about to change."""
        self._tensor = self._tensor.clone()
        self._seen_version = version_of(self._tensor)
        self._num_bytes = self._tensor.untyped_storage().nbytes()

    def unpack(self) -> Tensor:
        """Return the tensor.

        Raises:
            StateError: It was changed in place, or its memory was released.
        """
        if self._num_bytes and self._tensor.untyped_storage().nbytes() < self._num_bytes:
            _refuse_released(self._tensor)
        if version_of(self._tensor) != self._seen_version:
            _refuse_changed(self._tensor)
        return self._tensor


class Saved:
    """A tensor that autograd saves and that stays, and its version. It is made for nearly each of them: in little time.

    Args:
        tensor: The tensor.
    """

    __slots__ = ("_seen_version", "_tensor")

    def __init__(self, tensor: Tensor) -> None:
        modes = below_modes() if type(tensor) in _REAL else None
        try:
            self._tensor = tensor.detach()  # an operator's own result would keep its graph alive
        finally:
            del modes
        self._seen_version = version_of(self._tensor)

    def unpack(self) -> Tensor:
        """Return the tensor.

        Raises:
            StateError: It was changed in place.
        """
        if version_of(self._tensor) != self._seen_version:
            _refuse_changed(self._tensor)
        return self._tensor


class Unpackable(NamedTuple):
    """Any other way to a tensor, such as back from the disk."""

    unpack: Callable[[], Tensor]


OperatorInput: TypeAlias = Reading | Leaf | Saved | Unpackable
_INPUTS = frozenset({Reading, Leaf, Saved, Unpackable, Tensor, torch.nn.Parameter})
_NUMBERS = frozenset({int, float, bool, type(None)})


class Step:
    """An operator that has run, with everything that it needs to run again.

    Args:
        func: The operator.
        args: Its arguments, with an `OperatorInput` in place of each tensor.
        kwargs: Its named arguments, likewise.
        random: The random state that it started from; None if it draws no numbers.

    Attributes:
        uses: The values that it needs.
        results: For each tensor among its results the value, if there is one.
    """

    __slots__ = ("_has_gradients", "_run", "args", "func", "kwargs", "random", "results", "uses")

    def __init__(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], random: GeneratorState | None
    ) -> None:
        self.func, self.args, self.kwargs, self.random = func, args, kwargs, random
        self._run = kernel_of(func) if type(func) is OpOverload else func
        self.uses = [each for each in _leaves((*args, *kwargs.values())) if type(each) is Reading]
        self._has_gradients = torch.is_grad_enabled()  # kernels of recurrent layers look at it
        self.results: list[weakref.ref[Value] | None] = []  # of each tensor among its results

    def run(self, find: Callable[[OperatorInput], Tensor]) -> list[Tensor]:
        """Run it again, with gradients enabled; return the tensors among its results."""
        args = [mapped(find, each) for each in self.args]
        kwargs = mapped(find, self.kwargs) if self.kwargs else {}
        if self.random is None and self._has_gradients:  # contexts take as long as small operators
            return tensors_in(self._run(*args, **kwargs))
        random = contextlib.nullcontext() if self.random is None else self.random.again()
        with random, torch.set_grad_enabled(self._has_gradients):
            return tensors_in(self._run(*args, **kwargs))


class GeneratorState:
    """State of the generator that an operator draws from.

    Args:
        generator: The operator's own; None for the default one of the device.
        device: The device of the operator's tensors.
    """

    def __init__(self, generator: torch.Generator | None, device: torch.device) -> None:
        module: Any = torch if device.type == "cpu" else getattr(torch, device.type)
        if generator is not None:
            self._get, self._set = generator.get_state, generator.set_state
        elif device.type == "cpu":
            self._get, self._set = module.get_rng_state, module.set_rng_state
        else:
            self._get = lambda: module.get_rng_state(device)
            self._set = lambda state: module.set_rng_state(state, device)
        self._state = self._get()

    _get: Callable[[], Tensor]
    _set: Callable[[Tensor], object]

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Draw the same numbers within the block; the generator goes on afterwards as if nothing had been drawn."""
        now = self._get()
        self._set(self._state)
        try:
            yield
        finally:
            self._set(now)


class Rerun:
    """Makes values again; one for a forward, which several threads of its backward may use."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def tensor(self, source: OperatorInput) -> Tensor:
        """Return the tensor of a source, made again if need be."""
        if not isinstance(source, Reading):
            return source.unpack()
        with self._lock:
            made = source.value.made
            if made is not None and source.num_steps == source.value.num_steps:
                return source.view.beside(made)
            device_type = source.view.device.type
            is_autocasting = torch.is_autocast_enabled(device_type)
            autocast = torch.autocast(device_type, enabled=False) if is_autocasting else contextlib.nullcontext()
            with below_autograd(), torch.enable_grad(), autocast:
                return self._view(source)

    def _view(self, source: OperatorInput) -> Tensor:
        if not isinstance(source, Reading):
            return source.unpack()
        value = source.value
        if source.num_steps < value.num_steps:
            return source.view.beside(self._run(value, source.num_steps))
        return source.view.beside(self._make(value) if value.made is None else value.made)

    def _make(self, wanted: Value) -> Tensor:
        """Make a value and, before it, the values that it needs. A loop: chains are longer than Python's stack."""
        waiting = [wanted]
        while waiting:
            value = waiting[-1]
            missing = [] if value.made is not None else _missing(value)
            waiting += missing
            if not missing:
                waiting.pop()
                made = value.fill(self._run(value, value.num_steps)) if value.made is None else value.made
            del value, missing  # nothing is held longer than it is needed
        return made

    def _run(self, value: Value, num_steps: int) -> Tensor:
        """Run the first operators of a value on a new storage."""
        own: Tensor | None = None

        def find(source: OperatorInput) -> Tensor:
            if own is not None and type(source) is Reading and source.value is value:
                return source.view.beside(own)
            return self._view(source)

        for step in value.steps[:num_steps]:
            results = step.run(find)
            if own is None:
                for number, made in enumerate(step.results):
                    other = None if made is None else made()
                    if other is value:
                        own = results[number]
                    elif other is not None and other.num_steps == 1 and other.made is None:
                        other.fill(results[number])
            del results
        if own is None:
            raise StateError(
                "backward() of what treat_saved_tensors has packed",
                got=f"{value.steps[0].func}, which made another number of tensors when it ran again",
                expected="operators that do the same each time",
                fix="plan with treat='blocks'.",
            )
        return own


def _missing(value: Value) -> list[Value]:
    return [
        use.value
        for step in value.steps
        for use in step.uses
        if use.value is not value and use.value.made is None and use.num_steps == use.value.num_steps
    ]


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Replace each source, or each tensor, inside of arguments by what a function returns for it."""
    kind = type(value)
    if kind in _NUMBERS:
        return value
    if kind in _INPUTS or isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)([mapped(function, each) for each in value])
    if isinstance(value, dict):
        return {name: mapped(function, each) for name, each in value.items()}
    return value


def tensors_in(value: Any) -> list[Tensor]:
    """List the tensors inside of arguments or results."""
    if isinstance(value, Tensor):
        return [value]
    if type(value) in _NUMBERS:
        return []
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for each in value for tensor in tensors_in(each)] if isinstance(value, (list, tuple)) else []


def _leaves(values: Sequence[Any]) -> Iterator[Any]:
    for each in values:
        if isinstance(each, (list, tuple)) and not isinstance(each, (Reading, Unpackable)):
            yield from _leaves(each)
        else:
            yield each


def _refuse_released(tensor: Tensor) -> NoReturn:
    raise StateError(
        "backward() of what treat_saved_tensors has packed",
        got=f"a tensor of shape {tuple(tensor.shape)} whose memory was released after the forward, as FSDP does with "
        "gathered parameters",
        expected="parameters and inputs that are there until backward",
        fix="plan a sharded model with treat='blocks'.",
    )


def _refuse_shape_only(shape: tuple[int, ...], node: Any) -> NoReturn:
    raise StateError(
        "backward() of what treat_saved_tensors has packed",
        got=f"a tensor of shape {shape}, of which the plan keeps the shape, asked for by "
        f"{node.name() if node else 'code outside of a backward'}",
        expected="`index_add`, whose backward reads the shape alone",
        fix="plan with treat='blocks'.",
    )


def _refuse_changed(tensor: Tensor) -> NoReturn:
    node = current_node()
    raise StateError(
        "backward() of what treat_saved_tensors has packed",
        got=f"a tensor of shape {tuple(tensor.shape)} that was changed in place after it was needed for "
        f"{node.name() if node else 'backward'}",
        expected="tensors that stay unchanged until backward",
        fix="change a copy (x = x + 1 instead of x += 1), or change it after backward.",
    )
