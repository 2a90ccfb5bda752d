"""Ranks find out which of them share a folder, in few collectives, however they do."""

from dataclasses import replace

import pytest

from tests.engine.checkpoint.ranks_in_threads import in_threads
from weft.engine.checkpoint import CheckpointError
from weft.engine.checkpoint.ranks import LEADERS, Store, find_stores

SHARED = {
    "one for all": "aaaaaa",
    "two sites": "aabbab",
    "each its own": "abcdefghij",
    "hosts of two": "aabbccddeeff",
    "a large one late": "abcdefgggg",
}


def run(folders, leaders):
    """Return each rank's result, and the number of its collectives; the error of a rank that failed."""
    counts = [0] * len(folders)

    def rank_does(ranks):
        def counted(value):
            counts[ranks.rank] += 1
            return ranks.gather(value)

        return find_stores(folders[ranks.rank], replace(ranks, gather=counted), leaders=leaders)

    return in_threads(len(folders), rank_does), counts


@pytest.mark.parametrize("leaders", [0, 1, LEADERS])
@pytest.mark.parametrize("shared", SHARED.values(), ids=SHARED)
def test_who_shares_a_folder(shared, leaders, tmp_path):
    found, counts = run([tmp_path / letter / "new" for letter in shared], leaders)
    members = [tuple(rank for rank, of in enumerate(shared) if of == letter) for letter in dict.fromkeys(shared)]
    assert found == [tuple(map(Store, members))] * len(shared)
    assert set(counts) == {2 * min(len(members), leaders + 1)}, "two for each leader, and two for all that are left"
    assert not [path for letter in shared for path in (tmp_path / letter / "new").iterdir()], "probes are removed"


@pytest.mark.parametrize("leaders", [0, LEADERS])
def test_a_folder_that_cannot_be_made_is_everyones_error(leaders, tmp_path):
    (tmp_path / "file").write_text("")
    folders = [tmp_path / "file" / "new", tmp_path / "b", tmp_path / "b"]
    found, _ = run(folders, leaders)
    assert all(isinstance(error, CheckpointError) for error in found)
    assert not list(tmp_path.glob("b/*")), "probes are removed"
