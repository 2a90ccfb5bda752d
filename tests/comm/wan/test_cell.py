"""Temporal bandwidth sharing: slices that travel over the uplinks of a whole DP-cell."""

import time
from contextlib import ExitStack, contextmanager
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.comm.wan.proxy import Proxy
from tests.comm.wan.test_endpoint import KEY, noise
from weft.comm.channel import ChannelError, TensorSpec
from weft.comm.links import Cell
from weft.comm.wan.channel import cut
from weft.comm.wan.endpoint import WanEndpoint
from weft.comm.wan.network import join
from weft.comm.wan.transport import Path

SMALL = {
    "tls": False,
    "connections": 2,
    "deadline_s": 20.0,
    "timeout_s": 20.0,
    "chunk_bytes": 4096,
    "buffer_bytes": 1 << 20,
}


@contextmanager
def cell_of(pipelines, *, proxied=(), piece_bytes=16 << 10, **keywords):
    """All channels of a cell by rank, near ranks 0 .., far ranks 10 ..; proxies of the crossings named."""
    cell = Cell(tuple(range(pipelines)), tuple(10 + i for i in range(pipelines)), number=2)
    with ExitStack() as stack:
        ends = {
            rank: stack.enter_context(WanEndpoint(rank=rank, bind="127.0.0.1", key=KEY, **{**SMALL, **keywords}))
            for rank in (*cell.near, *cell.far)
        }
        proxies = {i: stack.enter_context(Proxy(ends[10 + i].address)) for i in proxied}
        for rank, end in ends.items():
            for peer in cell.links(rank):
                crossing = proxies.get(rank) if peer == rank + 10 else None
                address = crossing.address if crossing else ends[peer].address
                end.link(peer, address=address if rank < peer else None)
        yield {rank: join(end, cell, piece_bytes=piece_bytes) for rank, end in ends.items()}, ends, proxies


def exchange(channels, messages):
    """Each of ``messages`` (sender, tag, tensor) crosses, all at once."""
    receives = [
        (channels[(sender + 10) % 20].recv(tag, TensorSpec(tuple(tensor.shape), tensor.dtype)), tensor)
        for sender, tag, tensor in messages
    ]
    sends = [channels[sender].send(tag, tensor) for sender, tag, tensor in messages]
    for handle, tensor in receives:
        assert torch.equal(handle.wait(), tensor)
    for handle in sends:
        handle.wait()


@pytest.mark.parametrize("pipelines", [1, 2, 3])
def test_every_pipeline_reaches_its_opposite_both_ways(pipelines):
    with cell_of(pipelines) as (channels, ends, _):
        messages = [
            (sender, tag, noise(size, sender + size))
            for size in (0, 5, 70_000, 300_001)
            for sender in channels
            for tag in ("a", "b")
        ]
        exchange(channels, messages)
        if pipelines > 1:
            sent = [ends[rank].counters(rank + 10).sent_bytes for rank in range(pipelines)]
            assert max(sent) < 1.2 * min(sent)


def test_one_pipelines_tensor_uses_all_uplinks():
    with cell_of(3) as (channels, ends, _):
        exchange(channels, [(0, "a", noise(3_000_000))])
        sent = [ends[rank].counters(rank + 10).sent_bytes for rank in range(3)]
        assert sum(sent) == 3_000_000
        assert max(sent) - min(sent) < 1000


def test_many_messages_of_one_tag_stay_in_order_through_relays_that_break():
    with cell_of(2, proxied=(0, 1)) as (channels, ends, proxies):
        messages = [(0, "a", noise(400_000, i)) for i in range(6)] + [(11, "a", noise(400_000, i)) for i in range(6)]
        for _ in range(2):
            exchange(channels, messages)
            for proxy in proxies.values():
                proxy.kill(2)
        exchange(channels, messages)
        assert ends[1].counters(11).broken > 0


def test_a_relay_holds_back_what_its_uplink_cannot_carry():
    with cell_of(2, proxied=(1,), buffer_bytes=64 << 10) as (channels, ends, proxies):
        exchange(channels, [(0, "a", noise(200_000))])
        proxies[1].frozen = True
        before = ends[1].counters(0).received_bytes
        send = channels[0].send("b", noise(4_000_000))
        receive = channels[10].recv("b", TensorSpec((4_000_000,), torch.uint8))
        until_still(lambda: ends[1].counters(0).received_bytes)
        assert ends[1].counters(0).received_bytes - before < 1_000_000
        proxies[1].frozen = False
        assert torch.equal(receive.wait(), noise(4_000_000))
        send.wait()


def test_a_relay_whose_uplink_dies_fails_both_of_its_neighbours_by_name():
    with cell_of(2, proxied=(1,), deadline_s=0.6, timeout_s=20.0) as (channels, _, proxies):
        exchange(channels, [(0, "a", noise(200_000))])
        proxies[1].frozen = True
        send = channels[0].send("b", noise(4_000_000))
        receive = channels[10].recv("b", TensorSpec((4_000_000,), torch.uint8))
        # The news comes to each from its neighbour, or round the cell from the other end of the uplink.
        uplink = "(rank 1 lost rank 11|rank 11 lost rank 1)$"
        with pytest.raises(ChannelError, match=rf"link rank 0 - rank 1\d?\b.*: {uplink}"):
            send.wait()
        with pytest.raises(ChannelError, match=rf"link rank 10 - rank 1?[10]\b.*: {uplink}"):
            receive.wait()


@given(num_bytes=st.integers(0, 1 << 20), paths=st.integers(1, 5), piece_kb=st.integers(1, 64))
def test_pieces_cover_a_tensor_exactly_once(num_bytes, paths, piece_kb):
    pieces = cut([Path(peer, 0) for peer in range(paths)], num_bytes, piece_kb << 10)
    spans = sorted((at, at + size) for _, at, size in pieces)
    assert spans[0][0] == 0
    assert spans[-1][1] == num_bytes
    assert all(end == start for (_, end), (start, _) in pairwise(spans))
    if len(pieces) > 1:
        assert all(0 < size <= piece_kb << 10 for _, _, size in pieces)


@pytest.mark.parametrize(
    ("near", "far", "number"), [((0, 1), (2,), 0), ((), (), 0), ((0, 1), (1, 2), 0), ((0,), (1,), 300)]
)
def test_a_cell_that_makes_no_sense_is_refused(near, far, number):
    with pytest.raises(ValueError, match="DP-cell"):
        Cell(near, far, number)


def test_a_rank_outside_the_cell_is_refused():
    with pytest.raises(ValueError, match="rank 7 is not in the DP-cell"):
        Cell((0,), (1,)).links(7)


def until_still(value, pause_s=0.3):
    last = None
    while (now := value()) != last:
        last = now
        time.sleep(pause_s)
