"""Memory checkpoints: whole or not there, found among hosts, and kept where the loss of a host leaves them."""

import os
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.engine.checkpoint import CheckpointError, Piece
from weft.engine.checkpoint.pieces import share
from weft.engine.checkpoint.ranks import Ranks, Store
from weft.engine.supervision.memory.partners import Hosts, partners
from weft.engine.supervision.memory.recovery import Part, _is_intact, _Recovery, newest_whole
from weft.engine.supervision.memory.slots import COMMIT, Commit, HostMemory, Slot, in_order, read_commit


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.data())
def test_any_host_may_be_lost(sizes, data):
    """Each host's copies lie on one other host, of its own site if that has two, and no host keeps many more."""
    sites = [data.draw(st.integers(0, 2)) for _ in sizes]
    hosts = [host for host, size in enumerate(sizes) for _ in range(size)]
    kept = partners(hosts, [sites[host] for host in hosts])
    if len(sizes) == 1:
        assert kept == (None,) * sizes[0]
        return
    for host, size in enumerate(sizes):
        keepers = [kept[rank] for rank, of_rank in enumerate(hosts) if of_rank == host]
        keeping = {hosts[keeper] for keeper in keepers}
        assert len(keeping) == 1 and host not in keeping
        if sites.count(sites[host]) > 1:
            assert sites[keeping.pop()] == sites[host]
        assert max(Counter(keepers).values()) == -(-size // sizes[hosts[keepers[0]]])
    in_use = Counter(hosts[keeper] for keeper in set(kept))
    assert all(count <= sizes[host] for host, count in in_use.items())


def pieces(step):
    """Return pieces of every width, so that offsets have to be aligned."""
    kinds = (torch.uint8, torch.float32, torch.bfloat16, torch.int64, torch.float64)
    whole = [Piece.whole(f"weight/{n}", torch.full((5, n + 1), step + n).to(kind)) for n, kind in enumerate(kinds)]
    return in_order(
        [*share(whole, 0, 2), Piece.whole("weight/none", torch.empty(0)), Piece.whole("x", torch.tensor(3))]
    )


def fill(slot, step, *, rank=0, num_ranks=1, lineage=1):
    held = pieces(step)
    for place, piece in zip(slot.places(held), held, strict=True):
        place.copy_(piece.data)
    commit = slot.sealed(lineage=lineage, token="t", step=step, rank=rank, num_ranks=num_ranks, meta={"step": step})
    slot.commit(commit.text())
    return commit


def two_slots(tmp_path):
    memory = HostMemory(tmp_path / "memory")
    slots = []
    for index in (0, 1):
        memory.folder(1, index).mkdir()
        slots.append(Slot(memory.folder(1, index), 0))
    return memory, slots


def steps(memory):
    return sorted(commit.step for _, commit in memory.whole())


def test_what_is_begun_is_gone_and_the_one_before_stays(tmp_path):
    memory, (first, second) = two_slots(tmp_path)
    fill(first, 1)
    assert fill(second, 2) == read_commit(second.path.with_suffix(COMMIT))
    assert steps(memory) == [1, 2]
    assert _is_intact(first.path) and _is_intact(second.path)
    places = first.places(pieces(3))
    assert steps(memory) == [2], "the copy has begun"
    places[0].fill_(7)
    assert steps(memory) == [2], "in the middle of it"
    fill(first, 3)
    assert steps(memory) == [2, 3]
    assert _is_intact(first.path)


def test_sizes_may_change(tmp_path):
    _, (first, _) = two_slots(tmp_path)
    fill(first, 1)
    more = [*pieces(2), Piece.whole("more", torch.arange(1000))]
    for place, piece in zip(first.places(in_order(more)), in_order(more), strict=True):
        place.copy_(piece.data)
    commit = first.sealed(lineage=1, token="t", step=2, rank=0, num_ranks=1, meta={})
    first.commit(commit.text())
    assert _is_intact(first.path) and commit.num_bytes == first.path.stat().st_size


def test_no_descriptor_of_a_slot_without_room_stays_open(tmp_path, monkeypatch):
    """A partner's copy for which there is no space is tried again at every step."""
    _, (slot, _) = two_slots(tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: os.stat("/none"))
    for attempt in range(3):
        with pytest.raises(OSError):
            slot.open(100 + attempt)
    assert slot.bytes.numel() == 0, "nothing is mapped that is not there"
    links = [Path(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    assert str(slot.path) not in {str(link.resolve()) for link in links}


@pytest.mark.parametrize("what", ["commit cut", "commit flipped", "file cut", "no file"])
def test_torn_ones_are_not_there(tmp_path, what):
    memory, (slot, _) = two_slots(tmp_path)
    fill(slot, 1)
    commit = slot.path.with_suffix(COMMIT)
    text = bytearray(commit.read_bytes())
    if what == "commit cut":
        commit.write_bytes(text[:-5])
    elif what == "commit flipped":
        text[len(text) // 2] ^= 1
        commit.write_bytes(text)
    elif what == "file cut":
        os.truncate(slot.path, slot.path.stat().st_size - 1)
    else:
        slot.path.unlink()
    assert steps(memory) == []


def test_a_flipped_bit_is_found_wherever_it_is(tmp_path):
    _, (slot, _) = two_slots(tmp_path)
    fill(slot, 1)
    for at in range(0, slot.bytes.numel(), 7):
        slot.bytes[at] ^= 1
        assert not _is_intact(slot.path), at
        slot.bytes[at] ^= 1
    assert _is_intact(slot.path)


def test_other_ranks_files_do_not_pass_for_ones_own(tmp_path):
    memory, (slot, _) = two_slots(tmp_path)
    fill(slot, 1, rank=3, num_ranks=4)
    assert steps(memory) == []


def part(lineage, step, rank, num_ranks=2, token="t", folder="memory-000001-a"):
    return Part(lineage, step, token, folder, rank, num_ranks)


def test_the_newest_whole_one_wins():
    held = [
        [part(1, 5, 0), part(1, 4, 0, folder="memory-000001-b"), part(1, 4, 1, folder="memory-000001-b")],
        [part(1, 4, 1, folder="memory-000001-b")],
    ]
    found = newest_whole(held)
    assert {(p.step, p.rank): hosts for p, hosts in found.items()} == {(4, 0): [0], (4, 1): [0, 1]}
    assert newest_whole(held, least_step=5) == {}
    held[1].append(part(1, 5, 1))
    assert {p.step for p in newest_whole(held)} == {5}
    held[0] += [part(2, 2, 0), part(2, 2, 1)]
    assert {(p.lineage, p.step) for p in newest_whole(held)} == {(2, 2)}, "a later attempt took steps back"


def test_parts_of_different_attempts_are_not_mixed():
    assert newest_whole([[part(1, 5, 0)], [part(1, 5, 1, token="u")]]) == {}
    assert newest_whole([[part(1, 5, 0)], [part(2, 5, 1)]]) == {}
    assert newest_whole([[part(1, 5, 0), part(1, 5, 1)], []]) != {}
    assert newest_whole([[part(1, 5, 0, num_ranks=3), part(1, 5, 1, num_ranks=3)], []]) == {}
    assert newest_whole([]) == {}


def test_commits_survive_as_text():
    commit = Commit(1, "t", 5, 0, 2, 100, 16, "abc", ["d"], {"a": [1.5, None, "x"]})
    assert Commit.parse(commit.text()) == commit
    assert Commit.parse(b"") is None
    assert Commit.parse(commit.text() + b" ") is None


def test_the_folder_is_private_and_has_space(tmp_path):
    memory, slots = two_slots(tmp_path)
    fill(slots[0], 1)
    memory.check_room(0)
    with pytest.raises(CheckpointError, match=r"checkpoint.memory_every.*enlarge /dev/shm"):
        memory.check_room(1 << 60)
    memory.forget({memory.folder(1, 1)})
    assert [path.name for path in memory.root.iterdir()] == ["memory-000001-b"]
    memory.root.chmod(0o755)
    with pytest.raises(ValueError, match="not a folder of this user alone"):
        HostMemory(memory.root)


def test_no_memory_is_kept_without_a_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("WEFT_MEMORY", raising=False)
    assert HostMemory.of_environment() is None
    monkeypatch.setenv("WEFT_MEMORY", str(tmp_path / "m"))
    assert HostMemory.of_environment().root == tmp_path / "m"


def test_memory_that_is_just_enough_is_enough(tmp_path, monkeypatch):
    memory = HostMemory(tmp_path / "m")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=3 << 30))
    memory.check_room(3 << 30)
    with pytest.raises(CheckpointError, match=r"take 4\.50 GiB, and .* has 3\.00 GiB free"):
        memory.check_room(9 << 29)


@pytest.mark.parametrize("gone", [False, True])
def test_parts_that_cannot_be_restored_are_withdrawn_damaged_ones_first(tmp_path, gone):
    """All of them where none is damaged; one whose commit is gone already is no error."""
    memory = HostMemory(tmp_path / "memory")
    folder = memory.folder(1, 0)
    folder.mkdir()
    where = {}
    for rank in range(3):
        fill(Slot(folder, rank), 1, rank=rank, num_ranks=3)
        where[Part(1, 1, "t", folder.name, rank, 3)] = [0]
    stores = (Store((0,)),)
    recovery = _Recovery(None, memory, Hosts(stores, (None,)), None, Ranks(), where)
    damaged = folder / "rank-001.safetensors"
    if gone:
        damaged.with_suffix(COMMIT).unlink()
    else:
        data = bytearray(damaged.read_bytes())
        data[len(data) - 1] ^= 1
        damaged.write_bytes(data)
    left = {"rank-000" + COMMIT, "rank-002" + COMMIT}
    recovery.drop_damaged()
    assert {path.name for path in folder.iterdir() if path.suffix == COMMIT} == left
    if gone:
        shutil.copy(folder / ("rank-000" + COMMIT), folder / ("rank-001" + COMMIT))
    for part in list(where):
        if part.rank == 1:
            del where[part]
    recovery.drop_damaged()
    assert [path for path in folder.iterdir() if path.suffix == COMMIT and "001" not in path.name] == []
    assert recovery.step == 1


def test_a_recovery_begins_with_a_private_folder_of_whole_parts_alone(tmp_path):
    memory = HostMemory(tmp_path / "memory")
    folder = memory.folder(1, 0)
    where = {Part(1, 1, "t", folder.name, 0, 1): [0]}
    recovery = _Recovery(None, memory, Hosts((Store((0,)),), (None,)), None, Ranks(), where)
    recovery._clear()
    assert folder.stat().st_mode & 0o777 == 0o700 and list(folder.iterdir()) == []
    with pytest.raises(CheckpointError, match=r"rank-000.*is gone"):
        recovery._entries()
    fill(Slot(folder, 0), 1)
    fill(Slot(folder, 1), 1, rank=1)
    (folder / "else").touch()
    recovery._clear()
    assert {path.name for path in folder.iterdir()} == {"rank-000.safetensors", "rank-000" + COMMIT}
    ((meta, item),) = recovery._entries()
    assert meta == {"step": 1} and item.file.name == "rank-000.safetensors"
