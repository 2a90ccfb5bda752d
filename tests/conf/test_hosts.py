"""The hostfile, which may come from somebody else."""

import os

import pytest

from weft.conf.hosts import read_hostfile


@pytest.mark.parametrize("line", ["-oProxyCommand=x slots=1", "--help slots=1", "a slots=0", "a"])
def test_a_line_that_names_no_host_is_refused(tmp_path, line):
    (tmp_path / "hosts").write_text(f"# hosts\n{line}\n")
    with pytest.raises(ValueError, match=f"line 2 is '{line}'; write it as"):
        read_hostfile(tmp_path / "hosts")


def test_a_pipe_a_binary_and_a_missing_file_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name in ("pipe", "binary", "missing"):
        with pytest.raises(ValueError, match=f"cluster.hostfile={tmp_path}/{name}: cannot be read"):
            read_hostfile(tmp_path / name)
