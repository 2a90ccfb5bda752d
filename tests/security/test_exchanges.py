"""Ranks tell each other values, not pickles, which would run what an unauthenticated peer wrote into them."""

from pathlib import Path

import pytest

from tests.security.exchanges import (
    beside_a_boaster,
    beside_an_impostor,
    recipe_without_pickles,
    trainers_without_pickles,
    work_without_pickles,
)
from weft.tools.ranks import run_ranks


@pytest.mark.slow
def test_no_pickle_passes_between_ranks(tmp_path):
    run_ranks(4, work_without_pickles, str(tmp_path))


@pytest.mark.slow
def test_no_pickle_passes_between_ranks_of_a_recipe(tmp_path):
    assert run_ranks(4, recipe_without_pickles, str(tmp_path), timeout_s=110) == [3] * 4


@pytest.mark.slow
@pytest.mark.parametrize("use_cpu", [True, False], ids=["as on processors", "as on GPUs"])
def test_no_pickle_passes_between_ranks_of_a_trainer(tmp_path, use_cpu):
    """Neither of Weft's nor of transformers' and accelerate's, which have exchanges of objects of their own."""
    assert run_ranks(2, trainers_without_pickles, str(tmp_path), use_cpu, timeout_s=110) == [[1, 2, 2]] * 2


@pytest.mark.slow
def test_a_pickle_from_a_rank_is_refused_and_not_run(tmp_path):
    trap = tmp_path / "an impostor was here"
    refused, _ = run_ranks(2, beside_an_impostor, str(trap))
    assert not trap.exists()
    assert refused.startswith("cannot decode a value")


@pytest.mark.slow
@pytest.mark.parametrize("length", [-1, 1 << 62])
def test_a_length_that_no_value_has_is_refused_before_memory_is_taken(length):
    refused, _ = run_ranks(2, beside_a_boaster, length)
    assert refused == f"a rank announced a value of {length} bytes; the maximum is {1 << 30}"


ALLOWED = {
    "flight_recorder.py: import pickle": "torch's record of a process's own calls, in that process: JSON has no frames",
    "remote_calls.py: import pickle": "objects of vLLM, once the peer has proved the key (test_message_stream.py)",
    "vllm_worlds.py: broadcast_object": "is replaced, so that nothing is exchanged",
    "vllm_interfaces.py: broadcast_object": "likewise",
}


def test_nothing_in_the_package_exchanges_pickles():
    """Whatever no test reaches: the words themselves are absent.

    `ALLOWED` has the exceptions.
    """
    root = Path(__file__).parents[2]
    words = ("gather_object", "broadcast_object", "scatter_object", "send_object", "recv_object", "import pickle")
    sources = [
        path
        for folder in ("comm", "conf", "engine", "inference", "pipeline", "recipes")
        for path in (root / folder).rglob("*.py")
    ]
    assert sources
    found = [f"{path.name}: {word}" for path in sources for word in words if f"{word}" in _code(path)]
    assert sorted(found) == sorted(ALLOWED)


def _code(path: Path) -> str:
    """Less the lines that speak of what others do."""
    return "\n".join(line for line in path.read_text().splitlines() if "`torch.distributed." not in line)
