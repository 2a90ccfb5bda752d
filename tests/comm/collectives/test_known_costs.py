"""Which ranks look into their caches, which write to them, and what everyone knows afterwards."""

import pytest
import torch
import torch.distributed as dist

from tests.thread_ranks import run_in_threads
from weft.comm.collectives import AlphaBeta, CollectiveCosts, Group, LinkClass, probe
from weft.comm.collectives.cache import CostCache, topology_key
from weft.comm.collectives.communicator import Communicator
from weft.comm.job import Job

CPU = torch.device("cpu")
KNOWN, OTHER, MEASURED = (
    CollectiveCosts.of_links({LinkClass.inter: AlphaBeta(alpha_s, 1e-9)}) for alpha_s in (1e-3, 2e-3, 4e-3)
)
PAIRS = Group((0, 1), (0, 1)), Group((2, 3), (2, 3))
"""Alike: what one of them knows, both do."""
ALONE = Group((4, 5), (4, 4))
"""On one node."""


def asked(folder, known):
    """Return a rank's costs, whether it measured and with how many others, and the contents of its cache."""
    rank = dist.get_rank()
    cache = CostCache.in_folder(str(folder / str(rank)))  # each on a file system of its own
    groups = [*PAIRS, ALONE]
    communicator = Communicator.open(groups, device=CPU, timeout_s=20)
    key = topology_key(communicator.group, "cpu")
    if rank in known:
        cache.write(key, known[rank])
    costs = probe.known_costs(communicator, device=CPU, cache=cache)
    communicator.close()
    return costs, cache.read(key)


@pytest.fixture
def measuring(monkeypatch):
    """The ranks that measured, each with the number of those that did so at once."""
    done = set()

    def measure(communicator, *, device, concurrent):
        done.add((dist.get_rank(), concurrent.size()))
        return []

    monkeypatch.setattr(probe, "measure", measure)
    monkeypatch.setattr(probe, "fitted", lambda samples: MEASURED)
    return done


@pytest.mark.parametrize(
    ("known", "learnt"),
    [
        ({}, None),
        ({0: KNOWN}, KNOWN),
        ({2: KNOWN}, KNOWN),
        ({1: OTHER}, None),
        ({1: OTHER, 3: OTHER}, None),
        ({0: KNOWN, 1: OTHER, 3: OTHER}, KNOWN),
        ({4: OTHER}, None),
    ],
    ids=["none", "first", "first of the second pair", "second", "both second", "both", "another layout"],
)
def test_the_first_rank_of_a_group_reads_and_writes_its_cache(tmp_path, measuring, known, learnt):
    found = run_in_threads(6, asked, tmp_path, known)
    expected = MEASURED if learnt is None else learnt
    assert [costs for costs, _ in found[:4]] == [expected] * 4
    assert [costs for costs, _ in found[4:]] == [known.get(4)] * 2, "a group on one node is not measured"
    assert measuring == ({(rank, 4) for rank in range(4)} if learnt is None else set())
    for rank, (_, cached) in enumerate(found):
        writes = learnt is None and rank in (0, 2)
        assert cached == (MEASURED if writes else known.get(rank)), rank


def test_what_emulated_ranks_take_part_in_measures_nothing(tmp_path, measuring, monkeypatch):
    monkeypatch.setattr(Job, "is_real", False)
    found = run_in_threads(6, asked, tmp_path, {1: OTHER})
    assert [costs for costs, _ in found] == [None, OTHER, None, None, None, None]
    assert not measuring
