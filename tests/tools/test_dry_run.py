"""A dry run refuses what ranks refuse at their start."""

import os

import pytest

from weft.conf import load
from weft.engine import initialize
from weft.tools import dry_run, preflight

QUICK = ["recipe=quickstart", "data.sequence_length=32", "train.microbatch_size=1", "pipeline.microbatches=2"]


def refused(message, *overrides):
    with pytest.raises(ValueError, match=message) as caught:
        list(dry_run.report(load([*QUICK, *overrides])))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["", "mine", "mine/export", "mine/checkpoints"])
def test_what_is_in_the_way_of_the_outputs_is_refused(name, tmp_path, monkeypatch):
    given = [f"train.output_dir={tmp_path / 'runs'}", "train.name=mine"]
    path = tmp_path / "runs" / name
    path.mkdir(parents=True)
    monkeypatch.setattr(os, "access", lambda asked, mode: str(asked) != str(path))
    refused(rf"^train\.output_dir=.*/runs: {path} cannot be written; remove it, or choose another", *given)
    path.rmdir()
    path.touch()
    refused(r"^train\.output_dir=.*/runs.* not a folder; ", *given)
    with pytest.raises(ValueError, match="not a folder; "):
        preflight.check_run_folder(load([*QUICK, *given]))


def test_the_self_check_runs_unless_it_is_off(monkeypatch):
    def fail(config):
        raise ValueError("stages differ")

    monkeypatch.setattr(dry_run, "check_stages", fail)
    refused("stages differ")
    assert list(dry_run.report(load([*QUICK, "model.self_check=false"])))


def test_axes_that_ranks_refuse_are_refused(monkeypatch):
    def fail(config, model, exchange):
        raise ValueError(f"{model.model_type} cannot share the work of its layers")

    monkeypatch.setattr(initialize, "require_axes", fail)
    refused("llama cannot share the work of its layers")


def test_layers_skipped_at_random_are_refused_where_state_is_sharded():
    sizes = "{hidden_size: 32, ffn_dim: 32, word_embed_proj_dim: 32, num_hidden_layers: 2, num_attention_heads: 2"
    model = [
        "model.arch=opt",
        f"model.overrides={sizes}, layerdrop: 0.1}}",
        "data.sequence_length=32",
        "data.packing=false",
    ]
    for stage in (1, 3):
        with pytest.raises(ValueError, match=r"opt skips layers at random \(layerdrop=0\.1\)"):
            preflight.check_model(load([*model, f"zero.stage={stage}"]))
    preflight.check_model(load([*model, "zero.stage=0"]))


def test_steps_with_jitter_are_shown_for_both_plans(tmp_path):
    file = tmp_path / "costs.yaml"
    file.write_text("layers: {count: 8, forward_ms: 10, input_ms: 10, weight_ms: 10, activation_bytes: 1, jitter: 0.5}")
    costs = ["pipeline=auto", "pipeline.stages=2", f"pipeline.costs_file={file}", "pipeline.search_seconds=0.1"]
    lines = list(dry_run.report(load([*QUICK, *costs, "pipeline.microbatches=4", "pipeline.jitter_samples=4"])))
    assert [line.partition(":")[0] for line in lines[-2:]] == ["with jitter", "planned by the medians"]
    file.write_text(file.read_text().replace("0.5", "0"))
    refused("costs have no jitter to sample", *costs, "pipeline.jitter_samples=4")
