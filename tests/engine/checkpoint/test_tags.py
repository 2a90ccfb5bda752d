"""Checkpoints under a name of the caller's."""

import pytest
import torch

from tests.engine.checkpoint.ranks_in_threads import Crash, failing, verify
from weft.engine.checkpoint import CheckpointError, Piece, newest, open_checkpoint, save
from weft.engine.checkpoint.folder import LATEST, candidates, prune, tagged


def write(folder, step, tag=None, keep=0, latest=True):
    pieces = [Piece.whole("weight/a", torch.full((5,), float(step)))]
    return save(folder, step, pieces, {LATEST: latest}, keep=keep, tag=tag)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_tagged_checkpoint_is_not_pruned_and_does_not_count(tmp_path):
    assert write(tmp_path, 1, tag="best", keep=2) == tmp_path / "best"
    for step in range(2, 6):
        write(tmp_path, step, keep=2)
    assert names(tmp_path) == ["best", "step-00000004", "step-00000005"]
    assert open_checkpoint(tagged(tmp_path, "best")).step == 1


def test_one_of_the_same_tag_is_replaced(tmp_path):
    for step in (3, 1):
        write(tmp_path, step, tag="best")
    assert names(tmp_path) == ["best"]
    assert open_checkpoint(tmp_path / "best").step == 1


def test_the_newest_may_have_a_tag(tmp_path):
    write(tmp_path, 4)
    write(tmp_path, 6, tag="epoch1")
    assert newest(tmp_path) == tmp_path / "epoch1"
    write(tmp_path, 5)
    assert newest(tmp_path) == tmp_path / "step-00000005"


def test_one_that_is_saved_aside_is_found_by_name_only(tmp_path):
    write(tmp_path, 4)
    write(tmp_path, 6, tag="aside", latest=False)
    assert newest(tmp_path) == tmp_path / "step-00000004"
    assert newest(tmp_path / "aside") == tagged(tmp_path, "aside") == tmp_path / "aside"


def test_what_else_lies_there_is_left_alone(tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    (site / "manifest.json").write_text("{}")
    (tmp_path / "mine.tmp").mkdir()
    (tmp_path / "mine.old").mkdir()
    write(tmp_path, 1, tag="best")
    write(tmp_path, 2, keep=1)
    prune(tmp_path, 1)
    assert names(tmp_path) == ["best", "mine.old", "mine.tmp", "site", "step-00000002"]
    assert {path.name for path in candidates(tmp_path)} == {"best", "step-00000002"}


@pytest.mark.parametrize(
    "tag", ["", ".", "..", "a/b", "../a", "/a", "-a", "step-3", "step-x", "a.tmp", "a.old", "a b", "ä"]
)
def test_bad_tags_are_refused(tmp_path, tag):
    with pytest.raises(CheckpointError, match="not a name for a checkpoint; choose letters"):
        write(tmp_path, 1, tag=tag)
    assert not names(tmp_path)


@pytest.mark.parametrize("tag", ["best", "../best", "step-00000007", "step-00000001.tmp", "", "/"])
def test_a_tag_that_is_not_there_is_an_error(tmp_path, tag):
    write(tmp_path, 1)
    with pytest.raises(CheckpointError, match="tag="):
        tagged(tmp_path, tag)
    assert tagged(tmp_path, "step-00000001") == tmp_path / "step-00000001"


def test_whatever_happens_one_of_that_tag_is_whole(tmp_path):
    write(tmp_path, 1, tag="best")
    for number in range(200):
        try:
            with failing(number, Crash(), dead_after=True):
                write(tmp_path, 2, tag="best")
        except Crash:
            checkpoint = open_checkpoint(tagged(tmp_path, "best"))
            verify(checkpoint)
            assert checkpoint.step in (1, 2)
            assert newest(tmp_path) is not None
            continue
        assert number > 5, "no file operation failed"
        assert names(tmp_path) == ["best"]
        return
    pytest.fail("it never ended")


def test_error_of_a_missing_tag_lists_existing_tags(tmp_path):
    with pytest.raises(CheckpointError, match="holds no such checkpoint; there are: none"):
        tagged(tmp_path, "best")
    write(tmp_path, 2)
    write(tmp_path, 1, tag="last")
    with pytest.raises(CheckpointError, match="there are: last, step-00000002"):
        tagged(tmp_path, "best")


def test_one_that_is_being_replaced_is_found_until_the_other_is_there(tmp_path):
    write(tmp_path, 1, tag="best")
    (tmp_path / "best").rename(tmp_path / "best.old")
    assert tagged(tmp_path, "best") == tmp_path / "best.old"
    (tmp_path / "best").mkdir()
    assert tagged(tmp_path, "best") == tmp_path / "best.old", "what is there is no checkpoint yet"
    write(tmp_path, 2, tag="best")
    assert open_checkpoint(tagged(tmp_path, "best")).step == 2 and names(tmp_path) == ["best"]
