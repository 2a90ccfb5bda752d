"""The recipe `dpo` has the losses of TRL's DPOTrainer, with the reference computed in line."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.recipes.preferences import (
    STEPS,
    losses,
    losses_of_trl,
    prepare,
    shares_ahead,
    train,
    train_with_key,
    train_with_slow_rank,
)
from weft.conf import load
from weft.conf.host.processes import free_port
from weft.tools.ranks import run_ranks

TWO = ["cluster.ranks=2", "pipeline.microbatches=4", "train.microbatch_size=2"]
SCORES = ["inference.enabled=true", "inference.scores.enabled=true"]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The losses of TRL on what `prepare` writes, which is the same for all tests."""
    folder = tmp_path_factory.mktemp("trl")
    prepare(folder)
    return losses_of_trl(folder)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_losses_are_those_of_trl_also_after_a_resume_and_with_sharded_weights(tmp_path, expected):
    settings = prepare(tmp_path)
    first = [*settings, *TWO, "train.name=two", f"train.steps={STEPS // 2}", "checkpoint.every=5"]
    for part in (first, [*first, f"train.steps={STEPS}"]):
        run_ranks(2, train, part, timeout_s=200)
    sharded = [*settings, "train.name=four", "cluster.ranks=4", "zero.stage=3", "pipeline.microbatches=2"]
    (found, *_) = run_ranks(4, train, [*sharded, "train.microbatch_size=2"], timeout_s=200)
    assert found == ["0 ahead", "2 in line"]
    for name in ("two", "four"):
        assert losses(tmp_path / "runs" / name) == pytest.approx(expected, abs=1e-5), name
    assert max(expected) - min(expected) > 0.1


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("fault", ["", "slow", "stopped", "nan"])
def test_scores_of_workers_change_no_loss_whatever_the_workers_do(fault, tmp_path, expected):
    from tests.inference.scorers import KEY, worker  # with the feature prefill only

    settings = [*prepare(tmp_path), *TWO, "inference.enabled=true", "inference.scores.enabled=true"]
    with worker(AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32), fault) as (url, lengths):
        ahead = f"inference.controller.workers=[{{url: '{url}', boards: [none]}}]"
        run_ranks(2, train_with_key, KEY, [*settings, ahead, f"inference.boards={tmp_path / 'boards'}"], timeout_s=300)
    assert losses(tmp_path / "runs" / "dpo") == pytest.approx(expected, abs=1e-4)
    assert lengths and (fault == "slow" or any(shares_ahead(tmp_path / "runs" / "dpo")) == (fault == ""))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_replicas_that_move_micro_batches_while_scores_are_outstanding_have_the_same_losses(tmp_path, expected):
    from tests.inference.scorers import KEY, worker  # with the feature prefill only

    adapt = ["pipeline.schedule=auto", "pipeline.adapt=true", "pipeline.adapt_steps=2"]
    settings = [*prepare(tmp_path), *TWO, *SCORES, *adapt, "pipeline.stages=1", "pipeline.microbatches=2"]
    with worker(AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32), "") as (url, _):
        settings.append(f"inference.controller.workers=[{{url: '{url}', boards: [none]}}]")
        settings.append(f"inference.boards={tmp_path / 'boards'}")
        assert run_ranks(2, train_with_slow_rank, KEY, settings, timeout_s=300) == [(3, 1)] * 2
    assert losses(tmp_path / "runs" / "dpo") == pytest.approx(expected, abs=1e-4)
    assert any(shares_ahead(tmp_path / "runs" / "dpo")[-5:])


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("rank", [0, 1])
def test_supervised_run_that_restarts_while_scores_are_outstanding_has_the_same_losses(
    rank, tmp_path, expected, monkeypatch
):
    from tests.engine.supervision.test_supervised_launch import events, start  # with the features only
    from tests.inference.scorers import KEY, worker

    (tmp_path / "hosts").write_text("left slots=1\nright slots=1\n")
    hosts = [f"cluster.hostfile={tmp_path / 'hosts'}", "cluster.manager=local", f"cluster.master_port={free_port()}"]
    settings = [
        *prepare(tmp_path),
        *TWO,
        *hosts,
        *SCORES,
        "checkpoint.every=5",
        f"inference.boards={tmp_path / 'boards'}",
    ]
    monkeypatch.setenv("WEFT_API_KEY", KEY)
    with worker(AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32), "slow") as (url, asked):
        ahead = f"inference.controller.workers=[{{url: '{url}', boards: [none]}}]"
        process, folder = start([*settings, ahead], "dpo", faults=f"1:{rank}:8:SIGKILL 2:{1 - rank}:12:SIGSTOP")
        assert process.wait(300) == 0
    assert [fault["culprit"]["rank"] for fault in events(folder, "fault")] == [rank, 1 - rank]
    assert losses(folder) == pytest.approx(expected, abs=1e-4)
    assert len(asked) > 12, "scores were requested by each attempt"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (["data.packing=true"], "data.packing=true: the two answers of a pair"),
        (["train.microbatch_size=3"], "train.microbatch_size=3: it counts sequences"),
        (["model.path=", "model.arch=llama", "model.tokenizer=a"], "model.path='': the reference is the model before"),
        (["train.preference.beta=0"], "train.preference.beta=0"),
        (["inference.scores.enabled=true"], "scores.enabled=true: inference.enabled=false: ranks publish no bubbles"),
        ([*SCORES, "parallel.tensor=2"], "scores.enabled=true: parallel.tensor=2"),
        ([*SCORES, "inference.prefill.model=e/f"], "scores.enabled=true: inference.prefill.model=e/f"),
        ([*SCORES, "inference.prefill.max_tokens=512"], "max_tokens=512: shorter than data.sequence_length=1024"),
        ([*SCORES, "data.kind=chat"], "scores.enabled=true: data.kind=chat"),
    ],
)
def test_settings_without_pairs_or_a_reference_are_refused(settings, problem):
    with pytest.raises(ValueError, match=problem):
        load(["recipe=dpo", "model.path=a/b", "data.path=c/d", *settings])
