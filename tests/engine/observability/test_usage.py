"""Usage of devices, over all ranks."""

import pytest
import torch
import torch.distributed as dist

from tests.thread_ranks import run_in_threads
from weft.engine.observability import usage
from weft.engine.observability.usage import gather_usage


def test_shares_are_averaged_and_the_fullest_rank_counts(monkeypatch):
    monkeypatch.setattr(usage, "_peak_bytes", lambda _: 7 * 2**40 + dist.get_rank())

    def of_rank():
        return gather_usage(0.25 * dist.get_rank(), torch.device("cpu"))

    for found in run_in_threads(3, of_rank):
        assert found.bubble_share == pytest.approx(0.25)
        assert found.peak_bytes == 7 * 2**40 + 2, "exact beyond what single precision holds"


def test_a_process_holds_memory():
    assert usage._peak_bytes(torch.device("cpu")) > 2**20
