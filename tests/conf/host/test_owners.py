"""Tests that files executed or trusted from a cache belong to this user; others are made again or refused."""

import ctypes
import os

import pytest

from weft.comm.native import Kind, build
from weft.conf.host.files import JsonCache
from weft.conf.host.owners import own_folder, why_untrusted

OTHER = 54321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's file")


def writable(path):
    path.chmod(path.stat().st_mode | 0o022)


def given_away(path):
    os.chown(path, OTHER, OTHER)


DOINGS = [writable, pytest.param(given_away, marks=as_root)]


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Compiles a function that returns 7, from a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "seven.c"
    source.write_text("int seven(void) { return 7; }\n")
    return lambda: build([source], kind=Kind.library)


@pytest.mark.parametrize("change", DOINGS)
def test_a_library_that_another_user_could_have_written_is_compiled_again(library, change):
    path = library()
    path.write_bytes(b"not what was compiled")
    change(path)
    assert ctypes.CDLL(str(library())).seven() == 7
    assert path.stat().st_uid == os.geteuid() and not path.stat().st_mode & 0o077


@pytest.mark.parametrize("change", DOINGS)
def test_a_cache_of_libraries_that_another_user_can_change_is_refused(library, change):
    change(library().parent)
    with pytest.raises(ValueError, match=r"XDG_CACHE_HOME: what is in .*native is not trusted: "):
        library()


@pytest.mark.parametrize("change", DOINGS)
@pytest.mark.parametrize("what", ["file", "folder"])
def test_measurements_that_another_user_could_have_written_do_not_count(tmp_path, caplog, change, what):
    cache = JsonCache(tmp_path / "cache" / "devices.json")
    cache.add({"flops": 1e12})
    assert cache.read() == {"flops": 1e12}
    change(cache.path if what == "file" else cache.path.parent)
    assert cache.read() == {}
    assert f"{cache.path} is not used" in caplog.text
    cache.add({"memory": 1})
    assert cache.read() == ({"memory": 1} if what == "file" else {})


@as_root
def test_a_link_to_another_users_file_is_not_trusted(tmp_path):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "a.json").write_text('{"a": 1}')
    given_away(theirs)
    (tmp_path / "a.json").symlink_to(theirs / "a.json")
    assert JsonCache(tmp_path / "a.json").read() == {}


def test_what_is_the_users_or_roots_is_trusted(tmp_path):
    assert why_untrusted(own_folder(tmp_path / "a" / "b", "data.cache_dir")) == ""
    assert why_untrusted(tmp_path / "a" / "missing.json") == ""
    assert why_untrusted(type(tmp_path)("/etc/passwd")) == ""
