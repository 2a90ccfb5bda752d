"""A supervised run whose rank becomes slow: layers move to the other at a checkpoint, or a spare takes its place."""

import json

import pytest

from tests.engine.supervision.test_supervised_launch import LIMIT_S, config_folder, events, start
from tests.recipes.runs import prepare, run
from weft.conf import load
from weft.tools.ranks import run_ranks

STEPS = 36


@pytest.fixture
def settings(tmp_path):
    hostfile = tmp_path / "hosts"
    hostfile.write_text("left slots=1\nright slots=1\nspare slots=1\n")
    return [
        *prepare(tmp_path),
        "model.overrides.num_hidden_layers=8",
        f"cluster.hostfile={hostfile}",
        "cluster.manager=local",
        "pipeline=auto",
        "pipeline.stages=2",
        "pipeline.placement=straight",
        "pipeline.adapt=true",
        "pipeline.adapt_steps=2",
        "supervise.least_deadline_s=200",  # ranks wait for the plan, of which the supervisor does not know
        f"train.steps={STEPS}",
        "checkpoint.every=4",
    ]


def losses(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = {line["step"]: line["loss"] for line in lines}  # of steps after the checkpoint the last is valid
    assert [*found] == list(range(1, STEPS + 1))
    return [*found.values()]


@pytest.mark.slow
@pytest.mark.parametrize("spares", ["[]", "[spare]"])
def test_a_run_moves_layers_or_takes_a_spare_and_computes_the_same_losses(settings, spares, tmp_path):
    pipeline = ("cluster", "pipeline=", "pipeline.stages", "pipeline.placement", "pipeline.adapt")
    one = [*(each for each in settings if not each.startswith(pipeline)), "train.name=calm"]
    assert run_ranks(1, run, one, timeout_s=LIMIT_S)[0]["steps"] == STEPS
    if spares == "[]":
        (tmp_path / "hosts").write_text("left slots=1\nright slots=1\n")
    process, folder = start([*settings, f"cluster.spares={spares}"], "slowing", target="slowing_ranks")
    assert process.wait(LIMIT_S) == 0
    first, second = events(folder, "attempt")
    assert second["reason"] == "adapt" and not events(folder, "fault")
    hosts = [each["host"] for each in events(folder, "evict")]
    layers = json.loads((folder / "plan.json").read_text())["layers"]
    if spares == "[]":
        assert not hosts and layers[0] > layers[1] and first["slots"] == second["slots"]
    else:
        assert hosts == ["right"] and layers == [4, 4] and list(second["slots"]) == ["left", "spare"]
    assert losses(folder) == pytest.approx(losses(config_folder(load(one))), rel=1e-5)
