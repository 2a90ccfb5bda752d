"""A run whose workers' scores are outstanding when it restarts has the losses of a plain loop."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine.supervision.test_supervised_launch import LIMIT_S, events, start
from tests.recipes.preferences import losses
from tests.recipes.test_distill import plain_losses, prepare_both
from weft.conf.host.processes import free_port


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S + 60)
@pytest.mark.parametrize("fault", ["", "slow"])
def test_restart_with_outstanding_scores_costs_no_loss(fault, tmp_path):
    from tests.inference.scorers import KEY, worker  # with the feature prefill only

    settings = prepare_both(tmp_path)
    hostfile = tmp_path / "hosts"
    hostfile.write_text("left slots=1\nright slots=1\n")
    teacher = AutoModelForCausalLM.from_pretrained(tmp_path / "teacher", dtype=torch.float32)
    with worker(teacher, fault) as (url, lengths):
        process, folder = start(
            [
                *settings,
                f"cluster.hostfile={hostfile}",
                "cluster.manager=local",
                f"cluster.master_port={free_port()}",
                f"inference.controller.workers=[{{url: '{url}', boards: [none]}}]",
                "inference.enabled=true",
                "inference.scores.enabled=true",
                f"inference.boards={tmp_path / 'boards'}",
            ],
            "faulty",
            "1:1:7:SIGKILL 2:0:14:SIGKILL",
            WEFT_API_KEY=KEY,
        )
        assert process.wait(LIMIT_S) == 0
    assert [event["culprit"]["rank"] for event in events(folder, "fault")] == [1, 0]
    assert losses(folder) == pytest.approx(plain_losses(settings, tmp_path), abs=1e-4)
    assert lengths
