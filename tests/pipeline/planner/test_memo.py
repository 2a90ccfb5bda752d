"""Plans of one model share values: they are the same as without."""

import pytest

from tests.pipeline.planner.changes import pinned, richer
from tests.pipeline.planner.random_cases import case
from weft.pipeline.planner import memo
from weft.pipeline.planner.search import plan


@pytest.fixture
def alone(monkeypatch):
    """Plans without the values of other plans."""

    def run(*args):
        with monkeypatch.context() as patch:
            patch.setattr(memo, "MOST_CELLS", 0)
            return planned(*args)

    yield run
    memo.memo_of.cache_clear()


def planned(cluster, work, request):
    try:
        return plan(cluster, work, request)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("seed", [0, 2, 44])
def test_a_plan_is_the_same_after_plans_of_other_clusters_and_requests(alone, seed):
    cluster, work, request = case(seed)
    others = [(cluster, work, one) for _, one in list(pinned(cluster, work, request))[::7]]
    others += [(one, work, request) for _, one in list(richer(cluster))[::2]]
    assert [planned(*one) for one in others] == [alone(*one) for one in others]
