"""Tests that files of killed runs in shared memory are removed once unused, and that files in use stay."""

import os
from time import time

import pytest

from weft.engine.supervision.progress_page import OLD_S, Ownership, remove_stale


def leave(folder, name, age_s=2 * OLD_S):
    """A page with what goes with it."""
    (folder / f"{name}.memory3" / "memory-000001-a").mkdir(parents=True)
    (folder / f"{name}.memory3" / "memory-000001-a" / "rank-00000.safetensors").write_text("x")
    for path in (folder / name, folder / f"{name}.error0"):
        path.write_text("x")
    for path in folder.glob(f"{name}*"):
        os.utime(path, (time() - age_s,) * 2)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "boards").mkdir()
    os.utime(tmp_path / "boards", (0, 0))
    return tmp_path


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_resources_without_an_owner_are_removed(folder):
    leave(folder, "progress-dead")
    leave(folder, "progress-own")
    (folder / "progress-dead.agent").symlink_to("/nowhere")
    os.utime(folder / "progress-dead.agent", (0, 0), follow_symlinks=False)
    assert remove_stale(folder, "progress-own") == ["progress-dead"]
    assert names(folder) == ["boards", "progress-own", "progress-own.error0", "progress-own.memory3"]


def test_what_an_agent_holds_stays(folder):
    leave(folder, "progress-held")
    held = Ownership(folder / "progress-held")
    os.utime(folder / "progress-held", (0, 0))
    assert remove_stale(folder, "progress-own") == []
    held.release()
    assert remove_stale(folder, "progress-own") == ["progress-held"]


def test_a_run_whose_agent_was_killed_has_time_to_start_another(folder):
    leave(folder, "progress-killed")
    held = Ownership(folder / "progress-killed")
    held.renew()
    held.release()
    assert remove_stale(folder, "progress-own") == []
    assert remove_stale(folder, "progress-own", now=time() + OLD_S + 1) == ["progress-killed"]


def test_one_part_that_is_in_use_keeps_them_all(folder):
    leave(folder, "progress-busy")
    os.utime(folder / "progress-busy.memory3")
    leave(folder, "progress-busyer")
    assert remove_stale(folder, "progress-own") == ["progress-busyer"]


def test_a_link_is_not_followed(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    (other / "precious").write_text("x")
    (folder / "progress-odd.memory1").symlink_to(other)
    os.utime(folder / "progress-odd.memory1", (0, 0), follow_symlinks=False)
    assert remove_stale(folder, "progress-own") == ["progress-odd"]
    assert (other / "precious").exists()
