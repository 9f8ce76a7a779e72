"""Tables over all result files: memkit beside each peer, and in words who is better, as the figures have it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.markdown import Table, at

NO_DIFFERENCE_IN_BYTES, NO_DIFFERENCE_IN_TIME = 0.01, 0.1  # as shares of memkit's figure
NUM_OPERATORS = 4  # shown of each row
Results = Mapping[str, dict[str, Any]]  # every result file by its case


@dataclass(frozen=True)
class Twin:
    """The ways of one result file to do one piece of work.

    Attributes:
        case: The result file.
        work: The piece of work, in words.
        place: Where its ways lie: keys and list numbers, joined by "/".
        memkit: The way of memkit's that is compared.
        peers: Ways of others, each with the package whose version is shown, or "" for a method that is rebuilt here.
        plain: The way without any library.
        time: Where the ratio of a way's time to a common one lies.
    """

    case: str
    work: str
    place: str
    memkit: str
    peers: dict[str, str]
    plain: str = "plain"
    time: str = "{place}/{way}/time_ratio"

    def rows(self, results: Results) -> Iterator[dict[str, Any]]:
        result = results[self.case]
        plain, ours = (self._bytes(result, way) for way in (self.plain, self.memkit))
        for peer, package in self.peers.items():
            row = {
                "work": self.work,
                "plain": megabytes(plain),
                "memkit": megabytes(ours),
                "peer": with_version(peer, package, result),
            }
            if "peak_bytes" not in figure(result, f"{self.place}/{peer}"):
                yield {**row, "words": "the peer fails"}
                continue
            more_bytes = self._bytes(result, peer) / ours
            more_time = self._time(result, peer) / self._time(result, self.memkit)
            yield {
                **row,
                "peak": megabytes(self._bytes(result, peer)),
                "more_bytes": more_bytes,
                "more_time": more_time,
                "words": f"{takes(more_bytes)}, {is_fast(more_time)}",
            }

    def reasons(self, results: Results) -> Iterator[dict[str, Any]]:
        """For each peer that is faster: the operators that take memkit longer, and those that take it less."""
        result = results[self.case]
        for row, peer in zip(self.rows(results), self.peers, strict=True):
            if "the peer is faster" not in row["words"]:
                continue
            ours, theirs = (figure(result, f"{self.place}/{way}").get("operator_ms", {}) for way in (self.memkit, peer))
            more = {name: ours.get(name, 0.0) - theirs.get(name, 0.0) for name in ours | theirs}
            order = sorted(more, key=lambda name: more[name])
            yield {
                **row,
                "longer": listed(more, order[: -NUM_OPERATORS - 1 : -1]),
                "shorter": listed(more, order[:NUM_OPERATORS]),
                "all": sum(more.values()),
            }

    def _bytes(self, result: dict[str, Any], way: str) -> int:
        return figure(result, f"{self.place}/{way}/peak_bytes")

    def _time(self, result: dict[str, Any], way: str) -> float:
        return figure(result, self.time.format(place=self.place, way=way))


def listed(more: Mapping[str, float], names: Iterable[str]) -> str:
    """Operators with the milliseconds that they take longer."""
    return ", ".join(f"`{name.removeprefix('aten::')}` {more[name]:+.1f}" for name in names)


def megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.{1 if num_bytes >= 1e6 else 3}f} MB"


def takes(ratio: float) -> str:
    if abs(ratio - 1) < NO_DIFFERENCE_IN_BYTES:
        return "as much memory"
    return "memkit takes less" if ratio > 1 else "**the peer takes less**"


def is_fast(ratio: float) -> str:
    if abs(ratio - 1) < NO_DIFFERENCE_IN_TIME:
        return "as fast"
    return "memkit is faster" if ratio > 1 else "**the peer is faster**"


@dataclass(frozen=True)
class Count:
    """One figure that several libraries have in common.

    Attributes:
        case: The result file.
        what: The figure, in words.
        place: Where it lies, with "{way}" for the library.
        ways: memkit's way first, then the peers', each with its package.
        best: What is right, or where it lies.
        plain: The way without any library; "" where there is none.
    """

    case: str
    what: str
    place: str
    ways: dict[str, str]
    best: float | str = 0
    plain: str = ""

    def rows(self, results: Results) -> Iterator[dict[str, Any]]:
        result = results[self.case]
        (memkit, _), *peers = self.ways.items()
        ours = self._figure(result, memkit)
        for peer, package in peers:
            theirs = self._figure(result, peer)
            yield {
                "what": self.what,
                "plain": short(self._figure(result, self.plain)) if self.plain else "",
                "memkit": short(ours),
                "peer": with_version(peer, package, result),
                "theirs": short(theirs),
                "words": self._verdict(result, ours, theirs),
            }

    def _figure(self, result: dict[str, Any], way: str) -> float:
        return figure(result, self.place.format(way=way))

    def _verdict(self, result: dict[str, Any], ours: float, theirs: float) -> str:
        best = figure(result, self.best) if isinstance(self.best, str) else self.best
        off, peer_off = abs(ours - best), abs(theirs - best)
        if math.isclose(off, peer_off, rel_tol=1e-6, abs_tol=1e-9):
            return "alike"
        return "memkit is better" if off < peer_off else "**the peer is better**"


def figure(result: dict[str, Any], place: str) -> Any:
    return at(result["figures"], place.split("/"))


def with_version(peer: str, package: str, result: dict[str, Any]) -> str:
    return f"{peer} ({result['environment']['versions'][package]})" if package else peer


def short(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:.3g}"


TORCH = "torch"
PYG = {"PyG": "torch_geometric", "PyG, checkpoint": "torch_geometric"}
HEAD = {
    "torch, memkit's rows": TORCH,
    "torch compact, memkit's rows": TORCH,
    "Liger's method, memkit's rows": "",
}
TWINS = (
    Twin("rows_in_chunks", "MLP of 10,242 rows, training", "training", "memkit",
         {"torch.vmap": TORCH, "torch, checkpoint per chunk": TORCH}),
    Twin("rows_in_chunks", "the same within 40 MiB", "training", "memkit, 40MiB", {"torch.vmap": TORCH}),
    Twin("rows_in_chunks", "the same, inference", "inference", "memkit", {"torch.vmap": TORCH, "torch, loop": TORCH}),
    Twin("rows_in_chunks", "the same, inference, 256 outputs", "inference, 256 outputs", "memkit",
         {"torch.vmap": TORCH, "torch, loop": TORCH}),
    Twin("edge_mlp", "edge MLP, 1,000,000 edges, sum", "cases/2/ways", "memkit, chunks of 4096",
         {"checkpoint per chunk of 4096": TORCH}, time="{place}/{way}/ratio"),
    Twin("graph_layers", "`EdgeConv`, sum", "EdgeConv, sum", "memkit, 16MiB", PYG),
    Twin("graph_layers", "`EdgeConv`, sum, pages kept", "EdgeConv, sum, pages kept", "memkit, 16MiB", PYG),
    Twin("graph_layers", "`EdgeConv`, max", "EdgeConv, max", "memkit, 16MiB", PYG),
    Twin("graph_layers", "`EdgeConv`, max, pages kept", "EdgeConv, max, pages kept", "memkit, 16MiB", PYG),
    Twin("graph_layers", "`IntegralTransform`", "IntegralTransform, mean", "memkit, 4MiB",
         {"neuraloperator": "neuraloperator"}),
    Twin("point_maxima", "PointNet's MLP, maximum of 10,242 points", "training", "memkit",
         {"PyG": "torch_geometric", "torch, checkpoint per chunk": TORCH}),
    Twin("chunked_loss", "cross entropy, 1,024 tokens, 32,000 words", "cross_entropy/0/modes", "memkit",
         HEAD | {"torch, its own rows": TORCH, "Liger's method, its own rows": "", "loop over chunks": ""}),
    Twin("chunked_loss", "the same, Liger's rows in memkit too", "cross_entropy/0/modes", "memkit, Liger's rows",
         {"Liger's method, its own rows": ""}),
    Twin("chunked_loss", "the same, 4,096 tokens, width 512", "cross_entropy/11/modes", "memkit", HEAD),
    Twin("chunked_loss", "the first, with seven in ten targets ignored", "prompts ignored/modes", "memkit",
         {"torch, its own rows": TORCH, "torch, memkit's rows": TORCH, "Liger's method, its own rows": ""}),
    Twin("deep_stack", "12 blocks, all run again", "", "memkit, all blocks full",
         {f"torch checkpoint_sequential, {num} segments": TORCH for num in (12, 4)}),
    Twin("block_treatments", "U-Net, blocks run again", "cases/U-Net, 5 levels", "full",
         {"torch checkpoint_wrapper": TORCH}, plain="keep"),
    Twin("block_treatments", "U-Net, cheap operators run again", "cases/U-Net, 5 levels", "selective",
         {"torch selective": TORCH}, plain="keep"),
    Twin("voxel_augmentation", "augmentation of a brain", "costs/MNI152/ways", "memkit",
         {"MONAI, no dropout": "monai"}, plain="the usual form"),
    Twin("voxel_losses", "perceptual loss", "perceptual/4 x 64^3", "memkit", {"MONAI's forward": "monai"},
         time="time_of_plain/{way}"),
)  # fmt: skip

TRAINERS = {"memkit": "", "accelerate": "accelerate", "lightning": "lightning"}
SEARCHES = {"accelerate": "accelerate", "Lightning, power": "lightning", "Lightning, binsearch": "lightning"}
COUNTS = (
    Count("tail_group", "gradient of the last group, 1 is right", "{way}/last_group_ratio", TRAINERS, 1, "plain"),
    Count("loop_semantics", "schedule steps in 9 optimizer steps", "{way}/skipped_step/schedule_steps", TRAINERS, 9),
    Count("loop_semantics", "samples lost by a resume", "{way}/resume/never_trained_on", TRAINERS),
    Count("oom_classifier", "out-of-memory messages known", "judges/{way}/certain_recognised", TRAINERS,
          "corpus/certain"),
    Count("batch_size_search", "calls until a size fits, four limits", "ways/{way}/num_calls",
          {"memkit": ""} | SEARCHES, plain="plain"),
    Count("batch_size_search", "size found, as a share of the limit, 1 is all", "ways/{way}/share_of_limit",
          {"memkit": ""} | SEARCHES, 1, "plain"),
    Count("batch_size_search", "the same, memkit given sizes by tenths", "ways/{way}/share_of_limit",
          {"memkit, sizes by tenths": ""} | SEARCHES, 1, "plain"),
    Count("batch_size_search", "bytes of failed tries still alive", "ways/{way}/left_bytes",
          {"memkit": ""} | SEARCHES, plain="plain"),
    Count("kill_nine", "unreadable states after 300 kills", "{way}/unreadable",
          {"memkit": "", "Lightning": "lightning", "accelerate": "accelerate"}, plain="torch.save"),
    Count("dry_run", "median error of a foretold peak, 65 models", "truth/scores/{way}/median_error",
          {"memkit": "", "MemTracker": TORCH, "accelerate": "accelerate", "torch-kitsune": "torch-kitsune"}),
    Count("track_cost", "time of steps under `track()`, 4 blocks of 64, over bare",
          "small: 4 blocks of 64/ways/{way}/steps_ratio",
          {"track()": "", "torch MemTracker": TORCH, "torch.profiler, memory": TORCH}, plain="bare"),
    Count("track_cost", "the same, with entering, leaving and reading the peak",
          "small: 4 blocks of 64/ways/{way}/whole_ratio",
          {"track()": "", "torch MemTracker": TORCH, "torch.profiler, memory": TORCH}, plain="bare"),
    Count("loop_cost", "time of a training step over one by hand, with equal operators",
          "cost/{way}, over by hand/own_ratio",
          {"loop": "", "lightning": "lightning"}),
    Count("loop_cost", "the same, memkit with `on_oom='raise'`", "cost/{way}, over by hand/own_ratio",
          {"loop with on_oom='raise'": "", "lightning": "lightning"}),
)  # fmt: skip


PEERS = Table(
    lambda results: (row for twin in TWINS for row in twin.rows(results)),
    "work | plain | memkit | peer | peak | peak over memkit's | time over memkit's | in words",
    "{work} | {plain} | {memkit} | {peer} | {peak?} | {more_bytes?:.2f} | {more_time?:.2f} | {words}",
)
REASONS = Table(
    lambda results: (row for twin in TWINS for row in twin.reasons(results)),
    "work | peer | operators that take memkit longer, ms | that take it less | all operators",
    "{work} | {peer} | {longer} | {shorter} | {all:+.1f}",
)
COUNTED = Table(
    lambda results: (row for count in COUNTS for row in count.rows(results)),
    "counted | plain | memkit | peer | the peer's | in words",
    "{what} | {plain} | {memkit} | {peer} | {theirs} | {words}",
)
