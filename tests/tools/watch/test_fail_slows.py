"""Fail-slows of ranks, hosts and links are named, and nothing else is."""

import pytest

from tests.tools.watch.fail_slows import LINK_STEPS, named, recording, trial
from weft.tools.watch.explain import limits
from weft.tools.watch.record import RunRecord


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_of_twenty_random_fail_slows_nineteen_are_named_rightly(tmp_path):
    found = [trial(tmp_path / str(seed), seed) for seed in range(20)]
    assert sum(each.is_right for each in found) >= 19, [each for each in found if not each.is_right]
    assert {each.kind for each in found} == {"rank", "host", "link"} and {each.always for each in found} == {
        True,
        False,
    }


@pytest.mark.parametrize("lines", [1, 2, 4])
def test_nothing_is_named_without_a_fail_slow(tmp_path, lines):
    run = recording(tmp_path / "run", lines, lines=lines)
    run.run(60, jitter=0.02, hops={})
    record = RunRecord(run.write())
    assert [named(record, last) for last in range(25, 61, 5)] == [set()] * 8


def test_a_slow_link_of_one_pipeline_is_explained_with_the_time_of_the_others(tmp_path):
    run = recording(tmp_path / "run", 0, lines=3, link_s=0.03)
    run.run(LINK_STEPS + 4, hops={(1, 4): 1.3})
    found = [each for each in limits(RunRecord(run.write())) if each.kind == "link"]
    assert len(found) == 1 and "from rank 1 to rank 4 needs 3" in found[0].text
    assert "ms for 1 MiB, the others need" in found[0].text
