"""Operations that starting ranks perform on the job's store."""

from datetime import timedelta

import pytest
import torch.distributed as dist

from tests.comm.counted_starts import ENGINE, WORLD, start_for_real
from tests.comm.counted_store import CountedStore
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


@pytest.mark.slow
def test_a_group_asks_as_much_of_the_store_whatever_its_size():
    for stages, replicas in ((3, 1), (2, 2)):
        for parts in run_ranks(stages * replicas, start_for_real, stages, replicas, 60.0, timeout_s=100):
            assert parts[WORLD].asked == {"set": 1, "multi_get": 1}
            assert "wait" not in parts[ENGINE].asked
