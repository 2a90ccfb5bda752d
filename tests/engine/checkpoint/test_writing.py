"""A checkpoint is whole or absent, whatever happens while it is written."""

import errno
import os
import resource
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tests.engine.checkpoint.ranks_in_threads import NUM_RANKS, Crash, check, failing, save_step, verify
from weft.engine.checkpoint import (
    BackgroundWriter,
    CheckpointError,
    Piece,
    check_space,
    durable,
    newest,
    open_checkpoint,
    save,
)
from weft.engine.checkpoint.folder import complete


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_save_and_read(tmp_path):
    outcomes = save_step(tmp_path, 7)
    assert outcomes == [tmp_path / "step-00000007"] * NUM_RANKS
    assert check(tmp_path, {7}) == 7
    assert newest(tmp_path / "step-00000007") == tmp_path / "step-00000007"


def test_keep(tmp_path):
    for step in range(1, 6):
        save_step(tmp_path, step, keep=2)
    assert names(tmp_path) == ["step-00000004", "step-00000005"]
    for step in range(6, 9):
        save_step(tmp_path, step, keep=0)
    assert len(names(tmp_path)) == 5


def test_all_are_kept_unless_a_number_is_given(tmp_path):
    for step in range(1, 4):
        save(tmp_path, step, [], {})
    assert len(names(tmp_path)) == 3


def test_going_back_to_an_earlier_step(tmp_path):
    """The checkpoint written last counts, not the highest step; and it is not pruned."""
    for step in (10, 20, 30):
        save_step(tmp_path, step, keep=0)
    save_step(tmp_path, 15, keep=2)
    assert check(tmp_path, {15}) == 15
    assert names(tmp_path) == ["step-00000015", "step-00000030"]


def test_same_step_again(tmp_path):
    save_step(tmp_path, 5, num_ranks=2)
    save_step(tmp_path, 5, num_ranks=3)
    assert names(tmp_path) == ["step-00000005"]
    assert len(list((tmp_path / "step-00000005").glob("rank-*"))) == 3
    check(tmp_path, {5})


def operations(folder: Path, step: int) -> int:
    with failing(10**9, Crash(), dead_after=True) as seen:
        save_step(folder, step, keep=1, num_ranks=2)
    return len(seen)


@pytest.mark.parametrize("again", [False, True], ids=["next step", "same step"])
def test_crash_at_every_operation(tmp_path, again):
    """After a crash anywhere the newest checkpoint is whole, and the next save cleans up."""
    step = 1 if again else 2
    save_step(tmp_path / "dry", 1)
    count = operations(tmp_path / "dry", step)
    assert count > 20
    for at in range(count):
        folder = tmp_path / str(at)
        save_step(folder, 1)
        with failing(at, Crash(), dead_after=True):
            outcomes = save_step(folder, step, keep=1, num_ranks=2)
        assert any(isinstance(outcome, Crash) for outcome in outcomes)
        check(folder, {1, step})
        save_step(folder, 3, keep=1)
        assert names(folder) == ["step-00000003"]
        check(folder, {3})


def test_disk_full_at_every_operation(tmp_path):
    """Any failed operation is one clear error on every rank, and the checkpoint before it stays."""
    save_step(tmp_path / "dry", 1)
    for at in range(operations(tmp_path / "dry", 2)):
        folder = tmp_path / str(at)
        save_step(folder, 1)
        with failing(at, OSError(errno.ENOSPC, "No space left on device"), dead_after=False) as seen:
            outcomes = save_step(folder, 2, keep=1, num_ranks=2)
        failed = [outcome for outcome in outcomes if isinstance(outcome, CheckpointError)]
        assert len(failed) in (0, 2), seen[at]
        for error in failed:
            assert "no space left" in str(error)
            assert "train.output_dir" in str(error)
        check(folder, {1, 2})


def held_open(folder: Path) -> list[str]:
    """Return the files of a folder that this process has open, the folder included."""
    targets = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the one that lists them
            targets.append(os.readlink(descriptor))
    return [target for target in targets if Path(target).is_relative_to(folder)]


def test_nothing_stays_open_whether_it_was_written_or_not(tmp_path):
    """A run writes checkpoints for months."""
    folder = tmp_path / "a"
    for at in range(operations(tmp_path / "dry", 1)):
        with failing(at, OSError(errno.EIO, "an error"), dead_after=False):
            save_step(folder, at, keep=1, num_ranks=2)
    save_step(folder, 10**6, num_ranks=2)
    check(folder, {10**6})
    assert held_open(tmp_path) == []


def test_file_size_limit(tmp_path):
    """The operating system's own refusal in the middle of a file."""
    save_step(tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    piece = Piece.whole("weight/big", torch.zeros(1 << 20))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(CheckpointError, match="no space left"):
            save(tmp_path, 2, [piece], {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == ["step-00000001"]
    check(tmp_path, {1})


def test_too_little_space_is_said_beforehand(tmp_path):
    with pytest.raises(CheckpointError, match=r"needs 3 GiB, 1.5 MiB are free.*checkpoint.keep"):
        check_space(tmp_path / "not" / "yet", 3 << 30, free_bytes=3 << 19)
    check_space(tmp_path / "not" / "yet", 1)


SITES = ["a", "b", "a", "b", "c"]


def test_sites_that_share_no_file_system(tmp_path):
    """Each has all that its own ranks wrote; what another wrote is named, and read once it is copied."""
    save_step(tmp_path, 4, site_of=SITES)
    for site in "abc":
        check(tmp_path / site, {4})
        assert names(tmp_path / site / "step-00000004") == ["manifest.json"] + [
            f"rank-{rank:03d}.safetensors" for rank, own in enumerate(SITES) if own == site
        ]
    here, there = (tmp_path / site / "step-00000004" for site in "ab")
    assert open_checkpoint(here).load(["own/2"])["own/2"] == 2
    with pytest.raises(CheckpointError, match=r"rank-003.*another file system"):
        open_checkpoint(here).load(["own/3"])
    shutil.copy(there / "rank-003.safetensors", here)
    assert open_checkpoint(here).load(["own/3"])["own/3"] == 3
    assert len({open_checkpoint(path).manifest.name for path in (here, there)}) == 1


def test_crash_at_every_operation_of_several_sites(tmp_path):
    """There is always a step that every site has whole."""
    save_step(tmp_path / "dry", 1, site_of=SITES)
    with failing(10**9, Crash(), dead_after=True) as seen:
        save_step(tmp_path / "dry", 2, keep=1, site_of=SITES)
    for at in range(len(seen)):
        folder = tmp_path / str(at)
        save_step(folder, 1, site_of=SITES)
        with failing(at, Crash(), dead_after=True):
            save_step(folder, 2, keep=1, site_of=SITES)
        held = [{path.name for path, _ in complete(folder / site)} for site in "abc"]
        common = set.intersection(*held)
        assert common, held
        for site in "abc":
            for name in common:
                verify(open_checkpoint(folder / site / name))


def test_values_that_are_no_json(tmp_path):
    with pytest.raises(CheckpointError, match="client_state"):
        save(tmp_path, 1, [], {"client_state": {"x": object()}})
    assert names(tmp_path) == []


def test_background(tmp_path):
    writer = BackgroundWriter()
    assert writer.wait() is None
    writer.submit(lambda: save(tmp_path, 1, [Piece.whole("a", torch.ones(3))], {}))
    assert writer.wait() == tmp_path / "step-00000001"

    def fail() -> Path:
        raise CheckpointError("full")

    writer.submit(fail)
    with pytest.raises(CheckpointError, match="full"):
        writer.submit(lambda: tmp_path)
    assert writer.wait() == tmp_path / "step-00000001"


@pytest.mark.parametrize("there", ["nothing", "a folder", "a link to a folder", "a link to nothing"])
def test_what_is_removed_is_gone_and_what_it_leads_to_stays(tmp_path, there):
    kept, path = tmp_path / "kept", tmp_path / "path"
    kept.mkdir()
    (kept / "file").write_text("x")
    if there == "a folder":
        shutil.copytree(kept, path)
    elif there != "nothing":
        path.symlink_to(kept if there == "a link to a folder" else tmp_path / "nowhere")
    durable.remove(path)
    assert not path.is_symlink() and not path.exists()
    assert (kept / "file").read_text() == "x"


def test_a_file_is_written_before_it_is_synced_and_a_folder_has_its_parents(tmp_path, monkeypatch):
    folder, synced = tmp_path / "run" / "checkpoints" / "step", []
    durable.make_new_folder(folder)
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_size))
    assert durable.write(folder / "data", [b"ab", b"c"]) == 3
    assert synced == [3]
    with pytest.raises(FileExistsError):
        durable.make_new_folder(folder)


def test_space_that_is_just_enough_is_enough(tmp_path):
    check_space(tmp_path, 1000, free_bytes=1000)
    with pytest.raises(CheckpointError, match="needs 1001 bytes, 1000 bytes are free"):
        check_space(tmp_path, 1001, free_bytes=1000)
    check_space(tmp_path, 0, free_bytes=0)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (1, "1 bytes"),
        (1023, "1023 bytes"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (1 << 20, "1 MiB"),
        (5 << 30, "5 GiB"),
        (1 << 40, "1 TiB"),
        (3 << 50, "3072 TiB"),
    ],
)
def test_error_gives_sizes_in_readable_units(tmp_path, num_bytes, text):
    with pytest.raises(CheckpointError, match=f"needs {text}, 0 bytes are free"):
        check_space(tmp_path, num_bytes, free_bytes=0)


def test_names_reach_the_disk_with_the_folder_that_holds_them(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(durable, "sync_folder", synced.append)
    durable.make_folder(tmp_path / "a" / "b")
    assert synced == [tmp_path, tmp_path / "a"]
    durable.make_folder(tmp_path / "a" / "b")
    assert len(synced) == 2, "it is there"
    durable.make_new_folder(tmp_path / "a" / "c" / "d")
    assert synced[2:] == [tmp_path / "a", tmp_path / "a" / "c"]
    assert (tmp_path / "a" / "c" / "d").stat().st_mode & 0o777 == 0o700
    durable.rename(tmp_path / "a" / "c", tmp_path / "a" / "e")
    assert synced[4:] == [tmp_path / "a"] and (tmp_path / "a" / "e" / "d").is_dir()
    with pytest.raises(AssertionError):
        durable.rename(tmp_path / "a" / "e", tmp_path / "e")


def test_a_failed_write_is_raised_once_and_the_next_may_follow(tmp_path):
    writer = BackgroundWriter()

    def fail() -> Path:
        raise CheckpointError("full")

    writer.submit(fail)
    with pytest.raises(CheckpointError, match="full"):
        writer.wait()
    assert writer.wait() is None
    writer.submit(lambda: tmp_path)
    assert writer.wait() == writer.wait() == tmp_path
