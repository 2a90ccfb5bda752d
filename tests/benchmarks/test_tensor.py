"""`benchmarks tensor`: engines train the same model to the same losses, and a hop carries each activation once."""

import json

import pytest

from benchmarks import tensor
from weft.tools.netbed import missing

SMALL = ["--archs", "qwen3", "--hidden", "64", "--length", "32", "--steps", "3"]


@pytest.fixture(autouse=True)
def netbed():
    if missing():
        pytest.skip(f"weft netbed: {missing()}")


@pytest.mark.slow
def test_losses_and_norms_are_those_of_one_process(tmp_path):
    file = tmp_path / "found.json"
    assert tensor.main([*SMALL, "--json", str(file)]) == 0
    (found,) = json.loads(file.read_text())["figures"]
    alone = found["one process"]
    for engine in tensor.ENGINES:
        assert not found[engine]["failure"]
        assert found[engine]["losses"] == pytest.approx(alone["losses"], rel=1e-3)
    assert found["Weft"]["norms"] == pytest.approx(alone["norms"], rel=1e-5)
    assert found["Weft"]["step_bytes"] < min(found[engine]["step_bytes"] for engine in ("transformers", "DeepSpeed"))


@pytest.mark.slow
def test_members_send_no_more_over_a_hop_than_one_rank():
    assert tensor.main([*SMALL[:2], "--hops", "--hidden", "256", "--length", "256", "--steps", "3"]) == 0
