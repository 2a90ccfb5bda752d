"""Laws of the host's loader. In fast tests a thread serves the ranks, because a process takes seconds to import."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import pytest
import torch

from weft.conf.host.threads import Thread
from weft.conf.schema import DataConfig, DataKind, ModelConfig, SourceConfig
from weft.engine.data import HostLoader, Stream, build_loader
from weft.engine.data import host_loader as module
from weft.engine.data.host_loader import HostBlocks
from weft.engine.data.loader import open_order
from weft.engine.data.loader_process import Blocks, Server
from weft.engine.data.order import Cursor
from weft.engine.data.shared_block import read_block, write_block
from weft.engine.deal import dealt

SIZES = {"microbatch_size": 1, "num_replicas": 2, "seed": 3}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> DataConfig:
    """A streamed mixture of two files."""
    folder = tmp_path_factory.mktemp("streamed")
    for name, word in (("a", "alpha"), ("b", "beta")):
        rows = [json.dumps({"text": f"{word} {n} " * (1 + n % 4)}) + "\n" for n in range(60)]
        (folder / f"{name}.jsonl").write_text("".join(rows))
    return DataConfig(
        kind=DataKind.text,
        sources=[SourceConfig(path=str(folder / "a.jsonl"), weight=2), SourceConfig(path=str(folder / "b.jsonl"))],
        streaming=True,
        sequence_length=16,
        shuffle_buffer=20,
        eval_fraction=0.2,
        cache_dir=str(folder / "cache"),
    )


def open_host(data, tokenizer) -> HostLoader:
    folder = Path(data.cache_dir) / "tokenizer"
    tokenizer.save_pretrained(folder)
    return HostLoader(
        f"test-{os.urandom(8).hex()}", Stream(model=ModelConfig(tokenizer=str(folder)), data=data, seed=3)
    )


def serve(host) -> HostLoader:
    """Serve the ranks of ``host`` from a thread."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(host._address)
    listener.listen()
    Thread(Server(host.stream).serve, listener, name="served").start()
    return host


def read(loader, count):
    return [batch["input_ids"] for batch in islice(loader, count)]


def same(left, right):
    return len(left) == len(right) and all(map(torch.equal, left, right))


def test_a_shared_block_has_the_sequences_of_the_order(data, tokenizer):
    order = open_order(data, tokenizer, seed=3, evaluation=False)
    placed = next(order.blocks(Cursor()))
    file = write_block(placed)
    with pytest.raises(OSError):
        os.ftruncate(file, 0)  # it is sealed
    with pytest.raises(OSError):
        os.pwrite(file, b"x", 0)
    shared = read_block(file)
    os.close(file)
    assert (shared.cursor, len(shared.layout)) == (placed.cursor, len(placed.layout))
    for number in range(len(placed.layout)):
        for one, other in zip(placed.documents(number), shared.documents(number), strict=True):
            assert (one.ids == other.ids).all() and (one.labels == other.labels).all()


def test_each_block_is_made_once_for_all_ranks(data, tokenizer):
    blocks = Blocks(open_order(data, tokenizer, seed=3, evaluation=True))
    cursors = [Cursor()] * 3
    ended = False
    for number in range(10):
        files = [blocks.find(cursor, after=number > 0) for cursor in cursors]
        if ended := files[0] is None:
            assert files == [None] * 3
            break
        assert len(set(files)) == 1 and blocks.made == number + 1
        cursors = [read_block(file).cursor for file in files]
    assert ended
    blocks.forget()


def compare(data, tokenizer, host, between=lambda: None):
    """Compare the batches of two ranks that use the host's loader with those of loaders in the ranks."""
    reference = [build_loader(data, tokenizer, **SIZES, replica=replica) for replica in range(2)]
    ranks = [build_loader(data, tokenizer, **SIZES, replica=replica, host=host) for replica in range(2)]
    for count in (40, 120):  # within a pass over the sources, and over several
        assert all(same(read(rank, count), read(alone, count)) for rank, alone in zip(ranks, reference, strict=True))
        between()
    state = ranks[0].state_dict()
    assert state == reference[0].state_dict()
    for loader in (ranks[1], reference[1]):
        loader.load_state_dict(state)
        loader.leave_out(state["consumed"] + 3, state["consumed"] + 9)
    assert same(read(ranks[1], 20), read(reference[1], 20))
    for loader in (*reference, *ranks):
        loader.close()


def test_batches_equal_those_of_a_loader_in_the_rank(data, tokenizer):
    host = serve(open_host(data, tokenizer))
    compare(data, tokenizer, host)
    evaluations = [
        build_loader(data, tokenizer, **SIZES, replica=0, evaluation=True, host=each) for each in (host, None)
    ]
    assert same(*[read(iter(loader), 1000) for loader in evaluations])
    assert same(*[read(iter(loader), 2) for loader in evaluations])
    for loader in evaluations:
        loader.close()


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_batches_are_equal_to_the_last_token_after_sigkill(data, tokenizer):
    host = open_host(data, tokenizer)
    host.start()
    killed = []

    def kill():
        killed.append(host.process.pid)
        os.kill(host.process.pid, signal.SIGKILL)

    compare(data, tokenizer, host, kill)
    assert len({*killed, host.process.pid}) == 3
    host.close()


def test_moved_micro_batches_of_a_stream_are_those_of_a_loader_in_the_rank(data, tokenizer):
    host = serve(open_host(data, tokenizer))
    alone = build_loader(data, tokenizer, **SIZES | {"num_replicas": 1}, replica=0)
    ranks = [build_loader(data, tokenizer, **SIZES, replica=replica, host=host) for replica in range(2)]
    for counts in [(2, 2), (1, 3), (1, 3), (3, 1), (2, 2)] * 3:
        usual, moved = read(alone, sum(counts)), {}
        for rank, count, numbers in zip(ranks, counts, dealt(counts), strict=True):
            rank.peek(7)  # micro-batches by the previous counts
            rank.deal(counts)
            moved |= zip(numbers, read(rank, count), strict=True)
        assert same([moved[number] for number in range(sum(counts))], usual)
        assert ranks[0].state_dict() == ranks[1].state_dict() == alone.state_dict()
    for loader in (alone, *ranks):
        loader.close()


def test_ranks_that_end_leave_the_loader_to_the_others(data, tokenizer):
    host = serve(open_host(data, tokenizer))
    for _ in range(3):
        connection = host.connect()
        connection.sendall(b'{"evaluation": false, "after"')  # a rank that is killed within a request
        connection.close()
    loader = build_loader(data, tokenizer, **SIZES, replica=0, host=host)
    assert len(read(loader, 5)) == 5
    loader.close()


def test_a_fault_in_the_data_is_raised_by_each_rank(tmp_path, tokenizer):
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in ["one", "two"]) + '{"text": 3}\n')
    data = DataConfig(kind=DataKind.text, path=str(file), streaming=True, cache_dir=str(tmp_path), shuffle_buffer=2)
    host = serve(open_host(data, tokenizer))
    for replica in range(2):
        loader = build_loader(data, tokenizer, **SIZES, replica=replica, host=host)
        with pytest.raises(ValueError, match=r"row 3 holds a number, not text; remove the row"):
            read(loader, 9)
        loader.close()


@pytest.mark.timeout(30)
def test_a_wait_for_a_block_can_be_interrupted(data, tokenizer):
    host = open_host(data, tokenizer)
    with socket.socket(socket.AF_UNIX) as listener:  # it never answers
        listener.bind(host._address)
        listener.listen()
        blocks, found = HostBlocks(host, evaluation=False), []
        reader = Thread(lambda: found.extend(blocks.read(Cursor())), name="reader")
        reader.start()
        listener.accept()[0].recv(10)
        blocks.interrupt()
        reader.join()
    assert not found and host.process is None


@pytest.mark.timeout(30)
def test_an_interruption_while_it_connects_is_not_lost(data, tokenizer, monkeypatch):
    host = open_host(data, tokenizer)
    blocks, (ours, theirs) = HostBlocks(host, evaluation=False), socket.socketpair()  # it never answers

    def connect():
        blocks.interrupt()
        return ours

    monkeypatch.setattr(host, "connect", connect)
    assert not list(blocks.read(Cursor()))
    theirs.close()


@pytest.mark.timeout(60)
def test_a_process_that_always_ends_is_an_error(data, tokenizer, monkeypatch):
    monkeypatch.setattr(module.sys, "executable", "/bin/false")
    host = open_host(data, tokenizer)
    loader = build_loader(data, tokenizer, **SIZES, replica=0, host=host)
    with pytest.raises(RuntimeError, match=r"has ended \(exit code 1\) 3 times at one block"):
        next(loader)
    host.close()


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_the_process_ends_with_its_rank(tmp_path):
    program = (
        "import os, time; from weft.engine.data import HostLoader, Stream\n"
        "from weft.conf.schema import DataConfig, ModelConfig\n"
        "host = HostLoader(os.urandom(8).hex(), Stream(model=ModelConfig(), data=DataConfig(), seed=0)); host.start()\n"
        "print(host.process.pid, flush=True); time.sleep(60)"
    )
    rank = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    started = int(rank.stdout.readline())
    rank.kill()
    rank.wait()
    rank.stdout.close()
    while Path(f"/proc/{started}").exists():
        time.sleep(0.05)


def test_no_other_user_is_served(data, tokenizer, monkeypatch):
    host = open_host(data, tokenizer)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(host._address)
        listener.listen()
        monkeypatch.setattr(module, "peer_process", lambda connection: (1, os.getuid() + 1))
        with pytest.raises(PermissionError, match="belongs to another user"):
            host.connect()
    host.close()
