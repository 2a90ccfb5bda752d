"""`weft doctor ring`: it covers every neighbour, and names the pair that is slow, wrong or silent."""

import json

import pytest

from tests.interpreter import python
from tests.tools.diagnostics.ring_ranks import ring_rank
from weft.conf.host.diagnosis import Outcome
from weft.tools import cli
from weft.tools.diagnostics.ring import _Seen, judge_pairs, rounds
from weft.tools.ranks import run_ranks


@pytest.mark.parametrize("size", range(2, 12))
def test_rounds_cover_the_ring(size):
    met = []
    for pairs in rounds(size):
        busy = [rank for pair in pairs for rank in pair]
        assert len(busy) == len(set(busy))
        met += pairs
    ring = {frozenset((rank, (rank + 1) % size)) for rank in range(size)}
    assert {frozenset(pair) for pair in met} == ring and len(met) == len(ring)


def judged(rates, hosts, problems=()):
    seen = [_Seen(pair, rate, dict(problems).get(pair, "")) for pair, rate in rates.items() for _ in range(2)]
    return {result.check: result for result in judge_pairs(seen, hosts, 0.3)}


def test_a_pair_is_compared_with_its_kind():
    hosts = ["a", "a", "b", "b", "c", "c", "d", "d"]
    inside = {(0, 1): 8e9, (2, 3): 9e9, (4, 5): 8e9, (6, 7): 1e9}
    between = {(1, 2): 1e9, (3, 4): 1e9, (5, 6): 0.1e9, (7, 0): 1.1e9}
    found = judged(inside | between, hosts)
    bad = [name for name, result in found.items() if result.outcome is Outcome.failed]
    assert bad == ["pair 5-6", "pair 6-7"]
    assert "b and c: 1 GB/s, 100% of the median" in found["pair 3-4"].text


def test_few_pairs_are_not_compared():
    found = judged({(0, 1): 1e9, (1, 2): 1e3}, ["a", "b", "c"])
    assert all(result.outcome is Outcome.passed and result.least is None for result in found.values())


def test_a_problem_of_one_side_is_the_pairs():
    seen = [_Seen((0, 1), 1e9), _Seen((0, 1), 1e9, "rank 1 received wrong numbers from rank 0")]
    (result,) = judge_pairs(seen, ["a", "b"], 0.3)
    assert result.outcome is Outcome.failed and result.text == "a and b: rank 1 received wrong numbers from rank 0"


def ring(*options):
    """As four ranks of a job; all end with the same code, and the first prints the results."""
    (code, said), *others = run_ranks(4, ring_rank, options, timeout_s=280)
    assert others == [(code, "")] * 3
    return code, *findings_of(said)


def findings_of(said):
    results = json.loads(said)
    return {entry["check"]: entry for entry in results if entry["outcome"] == "failed"}, results


@pytest.mark.slow
def test_healthy_ranks():
    code, failed, results = ring("--share", "0", "--timeout", "120")
    assert code == 0 and not failed
    assert [entry["check"] for entry in results] == ["pair 0-1", "pair 1-2", "pair 2-3", "pair 3-0", "all ranks"]


@pytest.mark.slow
def test_wrong_numbers_by_the_command_that_starts_all_ranks():
    options = ["--ranks", "4", "--json", "--share", "0", "--timeout", "120", "--inject", "wrong=2"]
    done = python("-m", "weft.tools.doctor", "ring", *options, timeout_s=280)
    assert done.stdout, done.stderr[-3000:]
    failed, _ = findings_of(done.stdout)
    assert done.returncode == 1 and list(failed) == ["pair 2-3"]
    assert "rank 3 received wrong numbers from rank 2" in failed["pair 2-3"]["text"]


@pytest.mark.slow
def test_a_slow_pair():
    code, failed, _ = ring("--timeout", "120", "--inject", "slow=1")
    assert code == 1 and "pair 1-2" in failed


@pytest.mark.slow
def test_a_rank_that_hangs():
    code, failed, _ = ring("--share", "0", "--timeout", "6", "--inject", "hung=1")
    assert code == 1
    assert "did not answer" in failed["pair 1-2"]["text"] and "rank 1" in failed["pair 1-2"]["text"]


@pytest.mark.parametrize("option", ["--ranks=1", "--ranks=-3", "--ranks=100000", "--timeout=nan", "--share=-1"])
def test_options_that_no_ring_has_are_one_line(option, capsys):
    assert cli.main(["doctor", "ring", "--ranks=2", option]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert option in error
