"""Autograd's graph while a backward runs: which node, which backward, in which order nodes were made."""

from torch._C import _current_autograd_node as current_node  # that the engine runs now
from torch._C import _current_graph_task_id as current_backward  # -1 outside of one
from torch._C._autograd import _get_current_graph_task_keep_graph as keeps_graph  # whether it may run again
from torch._C._autograd import _get_sequence_nr as next_sequence_number  # of the next node in this thread
from torch.autograd.graph import _engine_run_backward as run_engine  # with nothing of `torch.autograd.backward` around

__all__ = ["current_backward", "current_node", "keeps_graph", "next_sequence_number", "run_engine"]
