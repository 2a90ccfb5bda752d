"""Memory checkpoints of ranks on emulated hosts: what a host or a bit takes away, another host gives back."""

import shutil
import threading
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, sleep

import pytest
import torch
import torch.distributed as dist
from torch.optim import AdamW

from tests.engine.cut_engine import CutEngine
from tests.engine.small_engine import SmallEngine, assert_equal, joined
from tests.thread_ranks import run_in_threads
from weft.comm.channel import ChannelError
from weft.conf.schema import ZeroConfig
from weft.engine.checkpoint import CheckpointError
from weft.engine.checkpoint.durable import OtherBaseError
from weft.engine.checkpoint.origin import Origin
from weft.engine.supervision.memory import checkpoints
from weft.engine.supervision.memory.checkpoints import MemoryCheckpoints
from weft.engine.supervision.memory.partners import send_copy
from weft.engine.supervision.memory.slots import HostMemory, Slot

STEPS = 3
LAYOUTS = {
    "one stage, ZeRO-1": (1, 1, (0, 1)),
    "two stages, ZeRO-0": (2, 0, (0, 1, 0, 1)),
    "ZeRO-3": (1, 3, (0, 0, 1)),
    "tensor 2, ZeRO-0": (1, 0, (0, 0, 1, 1)),
    "tensor 2, ZeRO-1": (1, 1, (0, 0, 1, 1)),
}
"""Stages, ZeRO's stage, and the host of each rank."""
ONE_HOST = {"one host": (1, 1, (0, 0)), "tensor 1": (1, 1, (0, 1)), "tensor 4": (1, 0, (0, 0, 1, 1))}


def opened(root, layout, **options):
    stages, zero, hosts = (LAYOUTS | ONE_HOST)[layout]
    axis, _, members = layout.partition(" ")
    make, more = (CutEngine, {"tensor": int(members[0])}) if axis == "tensor" else (SmallEngine, {})
    made = make(
        stages,
        ZeroConfig(stage=zero, reduce_bucket_size=90),
        lambda parameters: AdamW(parameters, lr=0.02),
        tied=stages > 1,
        **more,
    )
    host = HostMemory(Path(root, f"host{hosts[made.global_rank]}"))
    memory = MemoryCheckpoints.open(made, host, sites=[0] * len(hosts), timeout_s=20, **options)
    made.before_update.append(memory.before_step)
    return made, memory


def trained(root, layout):
    """The state after each step, after each of which a memory checkpoint is taken."""
    made, memory = opened(root, layout)
    states = []
    for step in range(1, STEPS + 1):
        made.step()
        memory.take({"step": step, "ema": torch.full((3,), float(step))})
        states.append(made.held())
    memory.finish()
    assert memory.num_whole == STEPS
    assert memory.stalled_s > 0
    assert memory.recover(least_step=STEPS + 1) is None
    memory.close()
    dist.barrier()
    return states


def recovered(root, layout):
    """Return the checkpoint that new ranks restore, and their state; then they take another memory checkpoint."""
    made, memory = opened(root, layout)
    found = memory.recover()
    state = made.held()
    made.step()
    memory.take({"step": made.global_steps})
    memory.finish()
    again = memory.recover()
    assert again == (made.global_steps, {"step": made.global_steps})
    memory.close()
    dist.barrier()
    return found and (found[0], found[1]["step"], found[1]["ema"].tolist()), state


@pytest.fixture(scope="module", params=LAYOUTS)
def run(request, tmp_path_factory):
    """The layout, its memories after `STEPS` steps, and the whole state after each."""
    root = tmp_path_factory.mktemp("memory")
    count = len(LAYOUTS[request.param][2])
    states = run_in_threads(count, trained, root, request.param)
    return request.param, count, root, [joined(each) for each in zip(*states, strict=True)]


def restored(run, root):
    layout, count, _, states = run
    founds, found_states = zip(*run_in_threads(count, recovered, root, layout), strict=True)
    assert all(found == founds[0] for found in founds)
    if founds[0] is None:
        return None
    step, told, ema = founds[0]
    assert told == step and ema == [float(step)] * 3
    assert_equal(joined(found_states), states[step - 1])
    left = sorted({path.name for host in root.iterdir() for path in host.iterdir()})
    assert len({name[:-2] for name in left}) == 1, "nothing is left of the attempt before"
    return step


def test_one_host_alone_keeps_its_own(tmp_path):
    run_in_threads(2, trained, tmp_path, "one host")
    for found, _ in run_in_threads(2, recovered, tmp_path, "one host"):
        assert found == (STEPS, STEPS, [float(STEPS)] * 3)


@pytest.fixture
def memories(run, tmp_path):
    shutil.copytree(run[2], tmp_path / "memories")
    return tmp_path / "memories"


@pytest.mark.parametrize("other", ["tensor 1", "tensor 4"])
def test_another_number_of_members_takes_a_memory_checkpoint_up(tmp_path, other):
    states = run_in_threads(4, trained, tmp_path, "tensor 2, ZeRO-1")
    expected = joined([of_rank[-1] for of_rank in states])
    count = len((LAYOUTS | ONE_HOST)[other][2])
    founds, found_states = zip(*run_in_threads(count, recovered, tmp_path, other), strict=True)
    assert founds == ((STEPS, STEPS, [float(STEPS)] * 3),) * count
    assert_equal(joined(found_states), expected)


@contextmanager
def naming():
    """As `Lifeline.watching`, which knows who is lost."""
    try:
        yield
    except RuntimeError as error:
        raise ChannelError("rank 1 has ended") from error


def with_a_lost_partner(root, layout):
    _, memory = opened(root, layout, watching=naming)
    memory.take({})
    with pytest.raises(ChannelError, match="rank 1 has ended"):
        memory.finish()
    memory.close()


def test_a_rank_that_is_lost_while_copies_are_sent_is_named(tmp_path, monkeypatch):
    def lost(*_):
        raise RuntimeError("Connection closed by peer [127.0.0.1]:55440")

    monkeypatch.setattr(checkpoints, "send_copy", lost)
    run_in_threads(2, with_a_lost_partner, tmp_path, "one stage, ZeRO-1")


def with_another_base(root, layout):
    made, memory = opened(root, layout)
    made.origin = Origin(base="another")
    with pytest.raises(OtherBaseError):
        memory.recover()
    memory.close()


def test_another_base_takes_nothing_from_memory_and_loses_nothing(run, memories):
    layout, count, *_ = run
    run_in_threads(count, with_another_base, memories, layout)
    assert restored(run, memories) == STEPS


def newest(host):
    held = list(HostMemory(host).whole())
    last = max(commit.step for _, commit in held)
    return [path for path, commit in held if commit.step == last]


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) * 3 // 4] ^= 4
    path.write_bytes(data)


def test_the_last_step_is_restored(run, memories):
    assert restored(run, memories) == STEPS


@pytest.mark.parametrize("host", [0, 1])
def test_either_host_may_be_lost(run, memories, host):
    shutil.rmtree(memories / f"host{host}")
    assert restored(run, memories) == STEPS


def test_a_flipped_bit_on_one_host_costs_nothing(run, memories):
    flip(newest(memories / "host1")[0])
    assert restored(run, memories) == STEPS


def test_flipped_bits_on_both_hosts_cost_a_step(run, memories):
    for host in ("host0", "host1"):
        flip(newest(memories / host)[0])
    assert restored(run, memories) == STEPS - 1


def test_without_memories_there_is_nothing_to_restore(run, tmp_path):
    assert restored(run, tmp_path) is None


def test_parts_of_a_step_do_not_make_a_whole(run, memories):
    """All hosts have lost one rank's part of the newest."""
    part = newest(memories / "host0")[0].name
    for host in ("host0", "host1"):
        for path in newest(memories / host):
            if path.name == part:
                path.unlink()
    assert restored(run, memories) == STEPS - 1


def forgetting(root):
    made, memory = opened(root, "one stage, ZeRO-1")
    for _ in range(2):  # so that both slots are in use, one of them still being written
        made.step()
        memory.take({})
    memory.forget()
    assert memory.num_whole == 2, "what was begun was whole before it was forgotten"
    left = list(memory.memory.root.iterdir())
    dist.barrier()
    made.step()
    memory.take({"after": True})
    memory.finish()
    found = memory.recover()
    memory.close()
    return left, found


def test_what_is_forgotten_is_gone_everywhere(tmp_path, monkeypatch):
    commit = Slot.commit

    def slow(slot, text):
        sleep(0.1)
        commit(slot, text)

    monkeypatch.setattr(Slot, "commit", slow)
    assert run_in_threads(2, forgetting, tmp_path) == [([], (3, {"after": True}))] * 2


def forgetting_in_turn(root, others_came, gone):
    """On one host: its leader forgets slowly, the other rank comes to it late."""
    made, memory = opened(root, "one host")
    made.step()
    memory.take({})
    memory.finish()
    leads = made.global_rank == 0
    if leads:
        forget = memory.memory.forget

        def slowly():
            assert others_came.is_set(), "the other rank still counts on what is there"
            sleep(0.1)
            forget()
            gone.set()

        memory.memory.forget = slowly
    else:
        sleep(0.1)
        others_came.set()
    memory.forget()
    assert gone.is_set(), "what is written now would be removed"
    memory.close()
    return memory.recover()


def test_all_ranks_forget_together_and_continue_when_all_is_gone(tmp_path):
    assert run_in_threads(2, forgetting_in_turn, tmp_path, threading.Event(), threading.Event()) == [None, None]


def without_room(root, where):
    """The second memory checkpoint fails on one rank: in its own slot, or in its partner's."""
    made, memory = opened(root, "one stage, ZeRO-1")
    made.step()
    memory.take({"step": 1})
    memory.finish()
    made.step()
    unable = made.global_rank == 1
    open_ = Slot.open

    def open_or_fail(slot, num_bytes):
        own = slot.path.name == f"rank-{made.global_rank:03d}.safetensors"
        here = threading.current_thread().__dict__.get("weft_world") is world
        if here and unable and own is (where == "own"):
            raise OSError("no space")
        open_(slot, num_bytes)

    world = threading.current_thread().__dict__["weft_world"]
    dist.barrier()
    if unable:
        Slot.open = open_or_fail
    dist.barrier()
    memory.take({"step": 2})
    memory.finish()
    dist.barrier()
    if unable:
        Slot.open = open_
    dist.barrier()
    whole = memory.num_whole
    found = memory.recover()
    memory.close()
    return whole, found


@pytest.mark.parametrize("where", ["own", "guest"])
def test_without_memory_on_one_rank_the_earlier_checkpoint_stays(tmp_path, where, caplog, monkeypatch):
    """Where only the copy is missing, all parts are there as long as all hosts are."""
    monkeypatch.setattr(Slot, "open", Slot.open)  # puts it back afterwards, whatever happens
    step = {"own": 1, "guest": 2}[where]
    assert run_in_threads(2, without_room, tmp_path, where) == [(1, (step, {"step": step}))] * 2
    said = {"own": "rank 1: no space", "guest": "rank 1: no copy of rank 0: no space"}[where]
    assert f"memory checkpoint after step 2: {said}; the one before it stays" in caplog.text


def too_small(root):
    with pytest.raises(CheckpointError, match="too little") as caught:
        opened(root, "one stage, ZeRO-1")
    return str(caught.value)


def _refuse(needed):
    raise CheckpointError(f"too little: {needed}")


def test_a_host_needs_memory_for_two_of_its_own_checkpoints_and_its_partners(tmp_path, monkeypatch):
    """Each of two hosts holds all of it twice: fp32 weights and Adam's two moments of each."""
    numel = sum(p.numel() for p in run_in_threads(1, _parameters)[0])
    monkeypatch.setattr(HostMemory, "check_room", lambda self, needed: _refuse(needed))
    said = run_in_threads(2, too_small, tmp_path)
    assert said[0] == said[1]
    needed = int(said[0].split(": ")[-1])
    least = 2 * numel * 4 * 3
    assert least <= needed < least + 2 * 2 * 20_000  # and random states


def _parameters():
    made = SmallEngine(1, ZeroConfig(), lambda parameters: AdamW(parameters))
    return list(made.part.parameters())


def waiting(root):
    """Seconds that training is said to have waited, and those that it can have waited at most."""
    made, memory = opened(root, "one stage, ZeRO-1")
    begun = perf_counter()
    memory.before_step()
    assert memory.stalled_s == 0.0, "nothing is being copied"
    memory._copied.clear()
    threading.Timer(0.05, memory._copied.set).start()
    memory.before_step()
    assert memory._copied.is_set()
    first = memory.stalled_s
    made.step()
    memory.take({})
    memory.finish()
    memory.close()
    return first, memory.stalled_s, perf_counter() - begun


def test_the_time_that_training_waits_is_counted(tmp_path):
    for first, stalled, most in run_in_threads(2, waiting, tmp_path):
        assert 0 < first <= stalled <= most


def _trained_beside_a_slow_commit(root, copied, told):
    made, memory = opened(root, "one host")
    made.step()
    memory.take({})
    memory.before_step()  # returns although no commit can be written yet
    if copied.wait(20) == 0:
        told.set()
    memory.finish()
    whole = memory.num_whole
    memory.close()
    dist.barrier()
    return whole


def test_the_optimiser_waits_for_the_copy_and_not_for_its_commit(tmp_path, monkeypatch):
    copied, told, commit = threading.Barrier(2), threading.Event(), Slot.commit

    def slow(slot, text):
        assert told.wait(20), "the optimiser was not let go on"
        commit(slot, text)

    monkeypatch.setattr(Slot, "commit", slow)
    assert run_in_threads(2, _trained_beside_a_slow_commit, tmp_path, copied, told) == [1, 1]


def seldom(root, layout, steps, share=1.0):
    """Steps of which memory checkpoints became whole where partners are slow to receive them."""
    told, found = [], []
    made, memory = opened(root, layout, share=share, whole=told.append)
    for step in range(1, steps + 1):
        made.step()
        sleep(0.02)
        memory.take({"step": step})
        found.append(memory.num_whole)
    memory.finish()
    whole, last = memory.num_whole, memory.recover()
    assert len(told) == whole and told[-1] == last[0]
    memory.close()
    dist.barrier()
    return found, whole, last


def test_where_copies_take_long_fewer_are_taken_and_training_goes_on(tmp_path, monkeypatch):
    def send_slowly(*args):
        sleep(0.5)
        return send_copy(*args)

    monkeypatch.setattr(checkpoints, "WAIT_S", 0.1)
    monkeypatch.setattr(checkpoints, "send_copy", send_slowly)
    said = run_in_threads(2, seldom, str(tmp_path), "one stage, ZeRO-1", 60)
    assert said[0] == said[1], "all ranks take the same"
    found, whole, (last, state) = said[0]
    assert 1 < whole < 30 and state == {"step": last} and found == sorted(found)
    (_, fewer, _), _ = run_in_threads(2, seldom, str(tmp_path / "share"), "one stage, ZeRO-1", 60, 0.1)
    assert 1 <= fewer < whole, "copies take their share of the time"
