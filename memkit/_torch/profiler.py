"""The profiler below torch.profiler: it sees memory used inside operators, and costs little when inactive."""

from torch._C._autograd import (
    ProfilerEvent,
    _disable_profiler_legacy as stop_profiler,
    _enable_profiler_legacy as start_profiler,
    _enable_record_function as record_functions,  # off in some builds' threads
    _profiler_type as running_profiler,
)
from torch._C._profiler import (
    ActiveProfilerType,
    ProfilerConfig,
    ProfilerState,
    _ExperimentalConfig as ExperimentalConfig,
    _RecordFunctionFast as Mark,  # a named span
)

__all__ = [
    "ActiveProfilerType",
    "ExperimentalConfig",
    "Mark",
    "ProfilerConfig",
    "ProfilerEvent",
    "ProfilerState",
    "record_functions",
    "running_profiler",
    "start_profiler",
    "stop_profiler",
]
