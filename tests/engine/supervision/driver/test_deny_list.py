"""The deny-list keeps every entry under concurrent writers, and is never taken for empty."""

import json
import os
import stat
from concurrent.futures import ProcessPoolExecutor

import pytest

from weft.conf import load
from weft.engine.supervision.driver.files import DenyList
from weft.tools.cli import main


def test_evict_and_readmit(tmp_path):
    denied = DenyList(tmp_path / "new" / "denied.json")
    assert denied.read() == {} and not denied.readmit("a")
    denied.evict("a", "GEMM: wrong\nresult", by="run7")
    denied.evict("b", "slow")
    entry = denied.read()["a"]
    assert (entry.reason, entry.by) == ("GEMM: wrong result", "run7") and entry.at > 1e9
    assert stat.S_IMODE(os.stat(denied.path).st_mode) == 0o600
    assert denied.readmit("a") and list(denied.read()) == ["b"]


def _evict(path, number):
    DenyList(path).evict(f"host{number}", "one of many")


def test_many_writers_lose_nothing(tmp_path):
    with ProcessPoolExecutor(4) as pool:
        list(pool.map(_evict, [tmp_path / "denied.json"] * 40, range(40)))
    assert len(DenyList(tmp_path / "denied.json").read()) == 40


@pytest.mark.parametrize(
    "text", ["", "[]", "nothing", '{"a": 1}', '{"a": {"reason": "x"}}', '{"a": {"reason": 1, "at": 1, "by": ""}}']
)
def test_a_damaged_list_admits_no_host(tmp_path, text):
    path = tmp_path / "denied.json"
    path.write_text(text)
    for use in (DenyList(path).read, lambda: DenyList(path).evict("b", "x"), lambda: DenyList(path).readmit("a")):
        with pytest.raises(ValueError, match="cannot be read as a deny-list"):
            use()
    assert path.read_text() == text


def test_a_pipe_in_its_place_blocks_no_one(tmp_path):
    os.mkfifo(tmp_path / "denied.json")
    with pytest.raises(ValueError, match="cannot be read as a deny-list"):
        DenyList(tmp_path / "denied.json").read()


def test_where_it_lies(tmp_path):
    config = load(["model.arch=llama", f"train.output_dir={tmp_path}"])
    assert DenyList.of(config.cluster.deny_list, config.train.output_dir).path == tmp_path / "denied_hosts.json"
    config = load(["model.arch=llama", f"cluster.deny_list={tmp_path / 'of_all.json'}"])
    assert DenyList.of(config.cluster.deny_list, config.train.output_dir).path == tmp_path / "of_all.json"


def test_commands(tmp_path, capsys):
    where = f"cluster.deny_list={tmp_path / 'denied.json'}"
    assert main(["evict", "n1", "n2", "--reason", "ECC errors", where]) == 0
    assert json.loads((tmp_path / "denied.json").read_text())["n2"]["reason"] == "ECC errors"
    assert main(["evict", "--list", where]) == 0
    shown = capsys.readouterr().out
    assert "n1" in shown and "ECC errors" in shown and "operator" in shown
    assert main(["readmit", "n1", "n3", where]) == 1
    assert "n3 was not kept out" in capsys.readouterr().out
    assert main(["readmit", "n2", where]) == 0
    assert main(["evict", "--list", where]) == 0
    assert "no host is kept out" in capsys.readouterr().out
    assert main(["evict", where]) == 2 and main(["readmit", where]) == 2
