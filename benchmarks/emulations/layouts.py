"""The jobs: emulated layers on 2 to 16 ranks of this machine, on one host or at sites of a netbed."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.peers.emulated_stage import EmulatedWork
from benchmarks.peers.layout import Layout

LAYER_MS = 60.0
"""Milliseconds of a layer's forward and of each gradient. The host takes about 0.3 ms of a slot, and twice that where
eight real
ranks share two processors, which emulated ones do not: of slots of 30 ms that alone is more than the goal."""
TIMEOUT_S = 280.0


def work_of_layers(layer_ms: float) -> EmulatedWork:
    """Return the work of each layer of a job."""
    seconds = layer_ms / 1e3
    return EmulatedWork(forward_s=seconds, input_s=seconds, weight_s=seconds, hidden_bytes=2**18, weight_elements=2**14)


LAYOUTS = (
    Layout("straight"),
    Layout("w, fold", schedule="w", placement="fold"),
    Layout("site fold", schedule="w", placement="site_fold", sites=(2, 2)),
    Layout("cells of 2", replicas=2, sites=(2, 2), cell=2),
    Layout("eight stages", stages=8),
    Layout("uneven layers", layers=(3, 1, 3, 1)),
    Layout("interleaved", schedule="interleaved", placement="interleaved"),
    Layout("2 replicas, ZeRO-0", stages=2, replicas=2, zero=0),
    Layout("2 replicas, ZeRO-2", stages=2, replicas=2, zero=2),
    Layout("4 replicas, ZeRO-3", stages=2, replicas=4, zero=3),
    Layout("4 x 4", stages=4, replicas=4),
    Layout("straggler", slow=(2, 0.8)),
    Layout("two stages", stages=2),
    Layout("auto", schedule="auto", placement="fold"),
)
_LARGEST = Layout("4 x 4", stages=4, replicas=4)
_LARGEST_AT_SITES = Layout("4 x 2 at two sites", replicas=2, sites=(2, 2))
CHANGES = {
    "slow rank": (_LARGEST, replace(_LARGEST, name="4 x 4, a rank at 80 %", slow=(5, 0.8))),
    "jitter": (_LARGEST_AT_SITES, replace(_LARGEST_AT_SITES, name="4 x 2, 10 ms of jitter", jitter_ms=10.0)),
    "bandwidth": (_LARGEST_AT_SITES, replace(_LARGEST_AT_SITES, name="4 x 2, twice the bandwidth", bandwidth=2.0)),
}
"""Pairs of a job and the same job with one change, on as many ranks as this machine can run concurrently."""
