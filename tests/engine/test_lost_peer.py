"""Errors caused by a lost peer are distinguished from a rank's own errors."""

import pytest
import torch.distributed as dist

from weft.comm.channel import ChannelError
from weft.engine.distributed import first_to_fail, lost_peer


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            ChannelError("link rank 1 -> rank 2: 2RECV_F0 did not arrive"),
            "link rank 1 -> rank 2: 2RECV_F0 did not arrive",
        ),
        (
            RuntimeError("[x/gloo/transport/tcp/pair.cc:553] Connection closed by peer\nException raised from"),
            "another rank has ended or cannot be reached: [x/gloo/transport/tcp/pair.cc:553] Connection closed by peer",
        ),
        (dist.DistNetworkError("no route"), "another rank has ended or cannot be reached: no route"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None),
    ],
)
def test_only_a_lost_peer_is_said_in_one_line(error, said):
    assert lost_peer(error) == said


@pytest.mark.parametrize(("rank", "speaks"), [("1", True), ("2", False)])
def test_where_the_store_has_gone_one_rank_speaks(monkeypatch, rank, speaks):
    settings = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "RANK": rank, "WORLD_SIZE": "4"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert first_to_fail() is speaks
