"""The profiler below torch.profiler: it sees what operators take inside, and costs little when nobody listens."""

from torch._C._autograd import ProfilerEvent
from torch._C._autograd import _disable_profiler_legacy as stop_profiler
from torch._C._autograd import _enable_profiler_legacy as start_profiler
from torch._C._autograd import _enable_record_function as record_functions  # off in some builds' threads
from torch._C._autograd import _profiler_type as running_profiler
from torch._C._profiler import ActiveProfilerType, ProfilerConfig, ProfilerState
from torch._C._profiler import _ExperimentalConfig as ExperimentalConfig
from torch._C._profiler import _RecordFunctionFast as Mark  # a named span

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
