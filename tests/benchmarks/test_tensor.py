"""`benchmarks sharing --race`: engines reach the same losses, and a hop carries each activation once."""

import json

import pytest

from benchmarks import sharing
from benchmarks.peers import tensor_engines
from weft.tools.netbed import missing

SMALL = ["--race", "qwen3", "--hidden", "64", "--length", "32", "--steps", "3"]


@pytest.fixture(autouse=True)
def netbed():
    if missing():
        pytest.skip(f"weft netbed: {missing()}")


@pytest.mark.slow
def test_losses_and_norms_are_those_of_one_process(tmp_path):
    file = tmp_path / "found.json"
    assert sharing.main([*SMALL, "--json", str(file)]) == 0
    (found,) = json.loads(file.read_text())["figures"]
    alone = found["one process"]
    for engine in tensor_engines.ENGINES:
        assert not found[engine]["failure"]
        assert found[engine]["losses"] == pytest.approx(alone["losses"], rel=1e-3)
    assert found["Weft"]["norms"] == pytest.approx(alone["norms"], rel=1e-5)
    assert found["Weft"]["step_bytes"] < min(found[engine]["step_bytes"] for engine in ("transformers", "DeepSpeed"))


@pytest.mark.slow
def test_members_send_no_more_over_a_hop_than_one_rank():
    assert sharing.main(["--hops", "qwen3", "--hidden", "256", "--length", "256", "--steps", "3"]) == 0
