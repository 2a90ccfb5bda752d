"""Tests of a host's vital signs: figures, and telling lines of logs."""

import json

import pytest

from weft.engine.supervision.agent.reports import LONGEST_LINE, MOST_MATCHES, LogMatches, host_vitals, pattern_of

WARNINGS = {
    "Xid": ["[1234.5] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus."],
    "ECC": ["RuntimeError: CUDA error: uncorrectable ECC error encountered"],
    "CUDA error": [
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx",
    ],
    "device memory": ["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"],
    "NCCL": [
        "node7:123:456 [3] NCCL WARN NET/IB : Got completion with error 12",
        "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=77)",
    ],
    "host memory": ["Out of memory: Killed process 99 (python)", "OSError: [Errno 12] Cannot allocate memory"],
    "numbers": ["weft train: step 7: the norm of the gradient is nan: training has diverged", "loss: inf at step 3"],
    "disk full": ["OSError: [Errno 28] No space left on device"],
    "storage": ["OSError: [Errno 5] Input/output error", "OSError: [Errno 116] Stale file handle"],
    "network": ["ConnectionResetError: [Errno 104] Connection reset by peer"],
    "crash": ["Fatal Python error: Segmentation fault"],
}
USUAL = [
    "step 12: loss 2.345, 10,000 tok/s, MFU 45.0%, bubbles 3%",
    "plan: runs/x/plan.json (predicted step 0.5 s, bubbles 10.0%, 20 GiB on the fullest rank)",
    "resumed after step 40 from runs/x/checkpoints/step40",
    "Loading weights: information on normal layers",
    "CUBLAS_STATUS_SUCCESS",
]


@pytest.mark.parametrize("name, line", [(name, line) for name, lines in WARNINGS.items() for line in lines])
def test_warnings_are_known(name, line):
    assert pattern_of(line) == name


@pytest.mark.parametrize("line", USUAL)
def test_usual_lines_are_not_taken_for_warnings(line):
    assert pattern_of(line) is None


def test_matches_are_reported_once_and_not_without_bound():
    matches = LogMatches()
    matches.take(3, ["fine", "NCCL WARN " + "x" * 1000, *("No space left on device" for _ in range(100))])
    told = matches.drain()
    assert len(told) == MOST_MATCHES and told[-1] == (3, "disk full", "No space left on device")
    assert matches.drain() == []
    matches.take(1, ["NCCL WARN " + "x" * 1000])
    assert len(matches.drain()[0][2]) == LONGEST_LINE


def test_a_host_tells_what_it_has(tmp_path):
    matches = LogMatches()
    matches.take(0, ["NCCL WARN"])
    found = json.loads(json.dumps(host_vitals(tmp_path, matches)))
    assert 0 <= found["disk_free_bytes"] <= found["disk_bytes"]
    assert 0 < found["memory_free_bytes"] <= found["memory_bytes"]
    assert found["tcp_resent"] >= 0 and found["load"] >= 0
    assert found["patterns"] == [[0, "NCCL", "NCCL WARN"]]


def test_a_folder_that_is_gone_is_left_out(tmp_path):
    assert "disk_bytes" not in host_vitals(tmp_path / "gone", LogMatches())
