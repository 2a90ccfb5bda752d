"""What ranks ask of the store, as it is counted and fitted."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from benchmarks import startup
from benchmarks.starts.clients import Asked, ask_as_many
from benchmarks.starts.counted_store import CountedStore
from benchmarks.starts.first_step import PEER, WEFT, Run
from benchmarks.starts.ranks import DEEPSPEED, ENGINE, WORLD, EmulatedStart, Part, start_for_real
from weft.tools.ranks import run_ranks


def test_a_counted_store_answers_as_the_store_behind_it_and_counts():
    store = CountedStore(dist.HashStore())
    through = dist.PrefixStore("group", store)  # as torch hands it to process groups
    through.set("a", "1")
    assert through.get("a") == b"1"
    assert through.add("n", 2) == 2
    assert through.check(["a"])
    through.wait(["a"], timedelta(seconds=1))
    through.multi_set(["b", "c"], ["2", "3"])
    assert through.multi_get(["b", "c"]) == [b"2", b"3"]
    assert through.compare_set("a", "1", "4") == b"4"
    assert store.store.get("group/a") == b"4"
    assert store.has_extended_api()
    once = ("set", "get", "add", "check", "wait", "multi_set", "multi_get", "compare_set")
    assert store.asked == dict.fromkeys(once, 1)


def test_what_the_store_behind_raises_is_raised():
    with pytest.raises(dist.DistStoreError):
        CountedStore(dist.HashStore()).wait(["never"], timedelta(milliseconds=1))


def test_operations_of_the_busiest_rank_are_fitted_over_the_number_of_ranks():
    ranks = {
        count: [{name: Part({"get": 2 * count, "set": 1}, 0.1) for name in (WORLD, ENGINE, DEEPSPEED)}]
        for count in (4, 8, 16)
    }
    one_replica = {4: [{name: Part({"get": 1}, 0.1) for name in (WORLD, ENGINE, DEEPSPEED)}]}
    for fitted in (ranks, ranks | one_replica):
        assert startup._fits(fitted)[0] == f"{WORLD}: 2.00 n +1.0 operations of a rank of n"
    assert startup._fits({4: ranks[4], 8: ranks[8]}) == []
    row = startup._real_rows(ranks)[0]
    assert (row["of a rank, at most"], row["which"], row["of all"]) == (9, "8 get, 1 set", 9)


def test_numbers_that_cannot_be_started_are_refused_before_anything_is(monkeypatch):
    monkeypatch.setattr(startup, "run_ranks", lambda *args, **kwargs: pytest.fail("nothing starts"))
    with pytest.raises(ValueError, match="6 ranks: give a multiple of 4"):
        startup.main(["--ranks", "6", "--clients"])
    with pytest.raises(ValueError, match=r"--clients 400000000: a process may open \d+ files"):
        startup.main(["--ranks", "--clients", "400000000"])


@pytest.mark.parametrize(("seconds", "code"), [(1.0, 0), (5.0, 1)])
def test_a_store_that_takes_longer_than_its_goal_fails_the_bench(monkeypatch, seconds, code):
    monkeypatch.setattr(startup, "_emulated", lambda count: EmulatedStart(0.1, (count, 4)))
    monkeypatch.setattr(startup, "_asked", lambda count, start: Asked(10, seconds, seconds / 2, 0.1))
    assert startup.main(["--ranks", "--clients", "2048"]) == code


@pytest.mark.parametrize(("count", "files"), [(2048, 20_000), (10_240, 20_000), (10_240, 12_000), (10_240, 10**6)])
def test_no_process_opens_more_files_than_it_may(count, files):
    fronts = startup.fronts_for(count, files)
    at_store, at_front = (count, 2 * count / fronts) if fronts else (3 * count, 0)
    assert max(at_store, at_front) + startup.OTHER_FILES <= files
    assert (fronts == 0) == (3 * count + startup.OTHER_FILES <= files)  # as a job's, wherever that is possible


@pytest.mark.slow
@pytest.mark.parametrize("fronts", [0, 2])
def test_clients_ask_a_store_behind_as_many_processes_as_are_given(fronts):
    found = run_ranks(1 + fronts + 3, ask_as_many, 16, (16, 4), 60.0, fronts, timeout_s=100)
    assert [asked.operations for asked in found] == [0] * (1 + fronts) + [12, 10, 10]


@pytest.mark.slow
def test_a_group_asks_as_much_of_the_store_whatever_its_size():
    for stages, replicas in ((3, 1), (2, 2)):
        for parts in run_ranks(stages * replicas, start_for_real, stages, replicas, 60.0, timeout_s=100):
            assert parts[WORLD].asked == {"set": 1, "multi_get": 1}
            assert "wait" not in parts[ENGINE].asked


@pytest.mark.parametrize(("cpu_s", "code"), [(1.0, 0), (1.2, 1)])
def test_a_start_that_takes_more_than_the_peer_fails_the_bench(monkeypatch, cpu_s, code):
    found = {WEFT: [Run(0.1, 1.0, 1.0, cpu_s)] * 3, PEER: [Run(1.0, 1.0, 1.0, 1.0)] * 3}
    monkeypatch.setattr(startup, "compare", lambda rounds: found)
    assert startup.main(["--ranks", "--clients", "--rounds", "3"]) == code
