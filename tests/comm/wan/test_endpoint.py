"""The WAN channel over loopback: what is delivered, in which order, and what breaks it."""

import gc
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.comm.wan.proxy import Proxy
from tests.waiting import until
from weft.comm.channel import ChannelError, TensorSpec
from weft.comm.key import WanKey
from weft.comm.wan.endpoint import WanEndpoint
from weft.comm.wan.library import load

KEY = WanKey(b"a key for tests, long enough")
SMALL = {
    "tls": False,
    "connections": 3,
    "deadline_s": 20.0,
    "timeout_s": 20.0,
    "chunk_bytes": 4096,
    "buffer_bytes": 1 << 20,
}


class Pair:
    """Ranks 0 and 1, linked, rank 0 connecting; through a proxy if wanted."""

    def __init__(self, stack, *, proxied=False, **keywords):
        keywords = {**SMALL, "key": KEY, "bind": "127.0.0.1", **keywords}
        self.ends = [WanEndpoint(rank=rank, **keywords) for rank in (0, 1)]
        for end in self.ends:
            stack.callback(end.close, linger_s=0.0)
        self.proxy = stack.enter_context(Proxy(self.ends[1].address)) if proxied else None
        self.ends[1].link(0)
        self.ends[0].link(1, address=self.proxy.address if proxied else self.ends[1].address)
        self.channels = [self.ends[0].channel(1), self.ends[1].channel(0)]

    def exchange(self, tag, tensor, sender=0):
        receive = self.channels[1 - sender].recv(tag, TensorSpec(tuple(tensor.shape), tensor.dtype))
        send = self.channels[sender].send(tag, tensor)
        received = receive.wait()
        assert torch.equal(received, tensor)
        assert received.dtype == tensor.dtype
        assert send.wait() is tensor


def noise(num_bytes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("tls", [False, True])
def test_tensors_arrive_as_they_were_in_both_directions(stack, tls):
    pair = Pair(stack, tls=tls)
    for sender in (0, 1):
        pair.exchange("noise", noise(100_000), sender)
        pair.exchange("matrix", torch.randn(30, 40), sender)
        pair.exchange("transposed", torch.randn(30, 40).T, sender)
        pair.exchange("bf16", torch.randn(7, 5).bfloat16(), sender)
        pair.exchange("scalar", torch.tensor(3), sender)
        pair.exchange("empty", torch.empty(0, 4), sender)
        pair.exchange("flags", torch.tensor([True, False]), sender)
        for size in (1, 4095, 4096, 4097, 3 * 4096):
            pair.exchange("sizes", noise(size, size), sender)


def test_a_receive_may_be_posted_before_or_after_its_message_arrives(stack):
    pair = Pair(stack)
    first, second = noise(50_000, 1), noise(50_000, 2)
    sends = [pair.channels[0].send("a", first), pair.channels[0].send("a", second)]
    until(lambda: pair.ends[1].counters(0).received_bytes == 100_000)
    for tensor in (first, second):
        assert torch.equal(pair.channels[1].recv("a", TensorSpec((50_000,), torch.uint8)).wait(), tensor)
    for send in sends:
        send.wait()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    messages=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 20_000)), min_size=1, max_size=12),
    order=st.randoms(use_true_random=False),
)
def test_messages_are_matched_by_tag_and_order_whatever_the_interleaving(messages, order):
    """Receives keep the order within a tag; between tags, and against the sends, any order goes."""
    with ExitStack() as stack:
        pair = Pair(stack)
        tensors = [noise(size, seed) for seed, (_, size) in enumerate(messages)]
        by_tag = {tag: [i for i, (other, _) in enumerate(messages) if other == tag] for tag in "abc"}
        tags = [tag for tag, _ in messages]
        order.shuffle(tags)
        posts = [("recv", by_tag[tag].pop(0)) for tag in tags]
        sends = [("send", i) for i in range(len(messages))]
        steps = []
        while posts or sends:
            steps.append((posts if posts and (not sends or order.random() < 0.5) else sends).pop(0))
        handles = []
        for what, i in steps:
            tag, size = messages[i]
            if what == "send":
                handles.append((pair.channels[0].send(tag, tensors[i]), tensors[i]))
            else:
                handles.append((pair.channels[1].recv(tag, TensorSpec((size,), torch.uint8)), tensors[i]))
        order.shuffle(handles)
        for handle, tensor in handles:
            assert torch.equal(handle.wait(), tensor)


def test_of_what_waits_the_least_turn_goes_first(stack):
    pair = Pair(stack, proxied=True)
    pair.exchange("first", noise(8))
    channel = replace(pair.channels[0], priorities={"late": 7, "early": 3})
    pair.proxy.frozen = True
    late, early = noise(32 << 20), noise(4096)
    arrives = {
        tag: pair.channels[1].recv(tag, TensorSpec(tuple(tensor.shape), torch.uint8))
        for tag, tensor in (("late", late), ("early", early))
    }
    sends = [channel.send("late", late), channel.send("early", early)]
    pair.proxy.freeze_after = pair.proxy.passed + (24 << 20)  # "late" cannot be whole, however slow this process is
    pair.proxy.frozen = False
    assert torch.equal(arrives["early"].wait(), early)
    assert not arrives["late"].ended()
    pair.proxy.thaw()
    assert torch.equal(arrives["late"].wait(), late)
    for send in sends:
        send.wait()


def test_of_messages_with_equal_turns_the_first_goes_first(stack):
    pair = Pair(stack, proxied=True)
    pair.exchange("before", noise(8))
    pair.proxy.frozen = True
    tensors = {"first": noise(8 << 20), "second": noise(4096), "third": noise(32 << 20)}
    arrives = {
        tag: pair.channels[1].recv(tag, TensorSpec(tuple(tensor.shape), torch.uint8)) for tag, tensor in tensors.items()
    }
    sends = [pair.channels[0].send(tag, tensor) for tag, tensor in tensors.items()]
    pair.proxy.freeze_after = pair.proxy.passed + (24 << 20)  # "third" cannot be whole
    pair.proxy.frozen = False
    for tag in ("first", "second"):
        assert torch.equal(arrives[tag].wait(), tensors[tag])
    assert not arrives["third"].ended()
    pair.proxy.thaw()
    assert torch.equal(arrives["third"].wait(), tensors["third"])
    for send in sends:
        send.wait()


def test_what_is_not_received_is_held_back_at_the_sender(stack):
    pair = Pair(stack, buffer_bytes=64 << 10)
    tensors = [noise(40 << 10, seed) for seed in range(5)]
    sends = [pair.channels[0].send("a", tensor) for tensor in tensors]
    until(lambda: pair.ends[1].counters(0).received_bytes == 64 << 10)
    time.sleep(0.1)
    assert pair.ends[1].counters(0).received_bytes == 64 << 10
    assert pair.ends[0].counters(1).queued_bytes == (5 * 40 - 64) << 10
    other = pair.ends[0].channel(1, lane=1), pair.ends[1].channel(0, lane=1)
    other[0].send("b", tensors[0])  # another lane does not wait for this one
    assert torch.equal(other[1].recv("b", TensorSpec((40 << 10,), torch.uint8)).wait(), tensors[0])
    for tensor in tensors:
        assert torch.equal(pair.channels[1].recv("a", TensorSpec((40 << 10,), torch.uint8)).wait(), tensor)
    for send in sends:
        send.wait()


def test_a_transfer_survives_every_connection_being_killed_again_and_again(stack):
    pair = Pair(stack, proxied=True)
    tensors = [noise(2 << 20, seed) for seed in range(16)]
    receives = [pair.channels[1].recv("a", TensorSpec((2 << 20,), torch.uint8)) for _ in tensors]
    back = pair.channels[0].recv("b", TensorSpec((2 << 20,), torch.uint8))
    sends = [pair.channels[0].send("a", tensor) for tensor in tensors]
    sends.append(pair.channels[1].send("b", tensors[0]))
    for count in (1, 3, 2, 3):
        limit = pair.proxy.passed + (1 << 20)
        until(lambda limit=limit: pair.proxy.passed > limit)
        pair.proxy.kill(count)
    for receive, tensor in zip([*receives, back], [*tensors, tensors[0]], strict=True):
        assert torch.equal(receive.wait(), tensor)
    for send in sends:
        send.wait()
    counters = pair.ends[0].counters(1)
    assert 0 < counters.busy_s < 60
    assert counters.broken >= 4
    assert counters.resent_chunks > 0
    assert counters.queued_bytes == 0


@pytest.mark.parametrize("tls", [False, True])
def test_a_flipped_byte_is_noticed_and_mended(stack, tls):
    pair = Pair(stack, proxied=True, tls=tls)
    pair.exchange("before", noise(1000))
    near = pair.ends[0]
    for flips in range(1, 6):
        until(lambda: near.counters(1).ready == SMALL["connections"])  # one being opened would not count as broken
        pair.proxy.flip_after = pair.proxy.passed + (200 << 10)
        pair.exchange("a", noise(1 << 20))
        assert pair.proxy.flip_after is None
        until(lambda flips=flips: near.counters(1).broken >= flips)


def test_a_silent_link_fails_by_its_deadline_and_says_which(stack):
    pair = Pair(stack, proxied=True, deadline_s=0.6)
    pair.exchange("a", noise(1000))
    waiting = [pair.channels[1].recv("b", TensorSpec((8,), torch.uint8))]
    pair.proxy.frozen = True
    waiting.append(pair.channels[0].send("c", noise(1000)))
    for handle, link in zip(waiting, ("rank 1 - rank 0", "rank 0 - rank 1"), strict=True):
        with pytest.raises(ChannelError, match=rf"link {link}.*silent for 0.6 s"):
            handle.wait()
    with pytest.raises(ChannelError, match="link rank 0 - rank 1"):
        pair.channels[0].send("d", noise(8)).wait()


def test_a_silence_shorter_than_the_deadline_costs_only_its_time(stack):
    pair = Pair(stack, proxied=True, deadline_s=8.0)
    pair.exchange("a", noise(1000))
    pair.proxy.frozen = True
    receive = pair.channels[1].recv("b", TensorSpec((1 << 20,), torch.uint8))
    send = pair.channels[0].send("b", noise(1 << 20))
    time.sleep(0.5)
    pair.proxy.frozen = False
    assert torch.equal(receive.wait(), noise(1 << 20))
    send.wait()


def test_a_peer_that_never_comes_is_an_error_with_its_last_trouble(stack):
    pair = Pair(stack, proxied=True, deadline_s=0.4, timeout_s=0.4)
    pair.proxy.kill(9)
    pair.proxy.refusing = True
    for limit_s in (0.4, 4.0, 40.0):  # a busy machine may not come to its first attempt
        with WanEndpoint(rank=2, bind="127.0.0.1", key=KEY, deadline_s=limit_s, timeout_s=limit_s, tls=False) as lonely:
            lonely.link(1, address=pair.proxy.address)
            with pytest.raises(ChannelError, match=rf"rank 2 - rank 1 .*no contact within {limit_s:g} s") as error:
                lonely.channel(1).send("a", noise(8)).wait()
        if "last trouble" in str(error.value):
            break
    assert re.search("; last trouble: .*(closed|reset)", str(error.value))


def test_a_receive_without_a_send_times_out(stack):
    pair = Pair(stack, deadline_s=1.0, timeout_s=1.0)
    pair.exchange("a", noise(8))
    time.sleep(1.2)  # longer than the deadline: a quiet link lives by its pings
    with pytest.raises(ChannelError, match=r"b did not arrive within comm.timeout_s=1, though the link is alive"):
        pair.channels[0].recv("b", TensorSpec((8,), torch.uint8)).wait()


def test_a_peer_that_closes_is_named_at_once(stack):
    pair = Pair(stack)
    pair.exchange("a", noise(8))
    receive = pair.channels[0].recv("b", TensorSpec((8,), torch.uint8))
    pair.ends[1].close()
    with pytest.raises(ChannelError, match=r"rank 0 - rank 1.*closed by the peer: closed"):
        receive.wait()
    with pytest.raises(ChannelError, match="is closed"):
        pair.channels[1].send("a", noise(8))


def test_closing_ends_what_another_thread_waits_for(stack):
    pair = Pair(stack)
    pair.exchange("a", noise(8))
    receives = [pair.channels[0].recv(f"b{n}", TensorSpec((8,), torch.uint8)) for n in range(4)]
    with ThreadPoolExecutor(len(receives)) as threads:
        waits = [threads.submit(receive.wait) for receive in receives]
        until(lambda: pair.ends[0]._transport._waiting == len(receives))
        pair.ends[0].close()
        for wait in waits:
            with pytest.raises(ChannelError, match="is closed"):
                wait.result(timeout=30)


def test_closing_sends_what_is_left(stack):
    pair = Pair(stack)
    receive = pair.channels[1].recv("a", TensorSpec((4 << 20,), torch.uint8))
    pair.channels[0].send("a", noise(4 << 20))
    pair.ends[0].close(linger_s=10.0)
    assert torch.equal(receive.wait(), noise(4 << 20))


def test_what_was_acknowledged_is_still_there_after_its_sender_has_closed(stack):
    pair = Pair(stack)
    tensors = [noise(10_000, seed) for seed in range(3)]
    sends = [pair.channels[0].send("a", tensor) for tensor in tensors]
    for send in sends:
        send.wait()
    pair.ends[0].close()
    spec = TensorSpec((10_000,), torch.uint8)
    with pytest.raises(ChannelError, match="closed by the peer: closed"):
        pair.channels[1].recv("b", spec).wait()
    for tensor in tensors:
        assert torch.equal(pair.channels[1].recv("a", spec).wait(), tensor)
    with pytest.raises(ChannelError, match="closed by the peer: closed"):
        pair.channels[1].recv("a", spec).wait()


def test_a_restarted_peer_is_not_taken_for_the_old_one(stack):
    pair = Pair(stack)
    pair.exchange("a", noise(8))
    receive = pair.channels[1].recv("b", TensorSpec((8,), torch.uint8))
    again = WanEndpoint(rank=0, bind="127.0.0.1", key=KEY, chunk_bytes=SMALL["chunk_bytes"], tls=False)
    stack.callback(again.close, linger_s=0.0)
    again.link(1, address=pair.ends[1].address)
    with pytest.raises(ChannelError, match=r"rank 1 - rank 0.*has restarted"):
        receive.wait()


def test_ends_that_disagree_on_a_size_learn_both(stack):
    pair = Pair(stack)
    pair.channels[0].send("a", noise(100))
    with pytest.raises(ChannelError, match="a: the sender's tensor has 100 bytes and the receiver expects 64"):
        pair.channels[1].recv("a", TensorSpec((64,), torch.uint8)).wait()


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"bind": "0.0.0.0"}, "bind=0.0.0.0"),
        ({"bind": "::"}, "bind=::"),
        ({"bind": "localhost"}, "IP address"),
        ({"bind": "192.0.2.1"}, "cannot listen on 192.0.2.1:0"),
        ({"connections": 0}, "connections=0"),
        ({"deadline_s": 0}, "deadline_s=0"),
        ({"deadline_s": 30, "timeout_s": 20}, "timeout_s=20"),
        ({"chunk_bytes": 100}, "chunk_bytes=100"),
        ({"buffer_bytes": 100}, "buffer_bytes=100"),
    ],
)
def test_bad_settings_are_refused_by_name(keywords, message):
    with pytest.raises(ValueError, match=message):
        WanEndpoint(rank=0, **{"bind": "127.0.0.1", "key": KEY, **keywords})


def test_bad_tags_links_and_keys_are_refused(stack, monkeypatch):
    pair = Pair(stack)
    with pytest.raises(ValueError, match="tag 'xxxx"):
        pair.channels[0].send("x" * 49, noise(8))
    with pytest.raises(ValueError, match="no link to rank 5"):
        pair.ends[0].channel(5)
    with pytest.raises(ValueError, match="give an IP address"):
        pair.ends[0].link(7, address=("nowhere", 1))
    monkeypatch.delenv("WEFT_KEY", raising=False)
    with pytest.raises(ValueError, match="WEFT_KEY is not set"):
        WanKey.from_environment()
    monkeypatch.setenv("WEFT_KEY", "short")
    with pytest.raises(ValueError, match="5 bytes are too few"):
        WanKey.from_environment()
    assert "a key for tests" not in repr(KEY)


def test_every_request_is_freed_when_its_handle_is_gone(stack):
    """By the transport's own count; failed and abandoned ones, too."""
    gc.collect()
    before = load().weft_wan_requests()
    pair = Pair(stack)
    for index in range(50):
        pair.exchange("a", noise(5000, index))
    pair.channels[0].send("never taken", noise(8))
    waiting = pair.channels[1].recv("never sent", TensorSpec((8,), torch.uint8))
    assert load().weft_wan_requests() >= before + 2
    for end in pair.ends:
        end.close(linger_s=0.0)
    del waiting, pair, end
    gc.collect()
    assert load().weft_wan_requests() == before


def test_transfers_without_a_wait_are_released(stack):
    pair = Pair(stack)
    for index in range(2000):
        pair.channels[0].send("a", noise(8, index))
        pair.channels[1].recv("a", TensorSpec((8,), torch.uint8))
        if index % 100 == 99:
            until(lambda count=8 * (index + 1): pair.ends[0].counters(1).sent_bytes == count)
    assert all(len(end._transport._held) < 600 for end in pair.ends)
    pair.exchange("a", noise(1000))
