"""Weft's Trainer logs what the stock Trainer logs, step by step."""

import re
import shutil
from functools import partial
from pathlib import Path

import pytest

from tests.engine.huggingface.runs import (
    eval_loss_by_hand,
    operations,
    other_base,
    over_sites,
    readme_example,
    refusals,
    section,
    stock,
    weft,
)
from weft.comm.key import VARIABLE
from weft.engine.huggingface.refusals import _UNCALLED
from weft.tools.ranks import run_ranks

pytestmark = pytest.mark.slow


def close(found, expected):
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-4), (ours, theirs)


@pytest.mark.parametrize("use_cpu", [False, True])
def test_two_stages_match_one_process(tmp_path, use_cpu):
    """40 sequences, 2 per micro-batch, 4 micro-batches: 5 steps per epoch; also with smoothed labels, and the number of
    micro-batches from accelerate's settings.
    """
    accelerated = {"gradient_accumulation_kwargs": {"num_steps": 4}}
    more = {"gradient_accumulation_steps": 1, "accelerator_config": accelerated, "label_smoothing_factor": 0.1}
    more = more if use_cpu else {}
    expected = run_ranks(1, stock, str(tmp_path), 40, more)[0]
    for logs in run_ranks(2, weft, str(tmp_path), 40, more | {"use_cpu": use_cpu}, section(2)):
        close(logs, expected)
    assert len(expected) == 10


def test_floating_point_operations_are_counted_as_by_the_stock_trainer(tmp_path):
    """On two stages and a fold of four, alone and with two replicas."""
    ((expected,),) = run_ranks(1, operations, str(tmp_path), 0, {})
    assert expected > 0
    assert run_ranks(2, operations, str(tmp_path), 2, {}) == [[expected] * 2] * 2
    halved = {"gradient_accumulation_steps": 2}
    assert run_ranks(4, operations, str(tmp_path), 2, halved) == [[expected] * 2] * 4


def test_two_sites_talk_over_weft_alone(tmp_path, monkeypatch):
    """The Trainer's own groups, made by transformers and DeepSpeed, span the sites as well."""
    monkeypatch.setenv(VARIABLE, "a key for tests, long enough")
    sites = section(2)
    sites["weft"] |= {"cluster": {"sites": [{"name": name, "ranks": 1} for name in ("east", "west")]}}
    sites["weft"]["comm"] = {"connections": 2}
    expected = run_ranks(2, weft, str(tmp_path), 40, {"use_cpu": True}, section(2))
    assert run_ranks(2, over_sites, str(tmp_path), 40, {"use_cpu": True}, sites) == expected


def test_two_replicas_match_two_processes(tmp_path):
    """The last step of an epoch has 1 micro-batch instead of 4 per replica, and evaluation a short batch or none."""
    more = {"eval_strategy": "epoch", "gradient_accumulation_steps": 4, "weight_decay": 0.0}
    expected = run_ranks(2, stock, str(tmp_path), 36, more)[0]
    stage1 = section(2, zero_optimization={"stage": 1})
    found = run_ranks(4, weft, str(tmp_path), 36, more, stage1, False, "", None, [7, 1, 20])
    for logs in found:
        assert [entry["step"] for entry in logs] == [entry["step"] for entry in expected]
        close([e for e in logs if "loss" in e], [e for e in expected if "loss" in e])


@pytest.mark.parametrize("axis", ["tensor", "context"])
def test_layers_that_ranks_share_match_one_process(tmp_path, axis):
    """Losses, norms and evaluation between steps; the saved folder is whole."""
    more = {"eval_strategy": "epoch"}
    expected = run_ranks(1, stock, str(tmp_path), 40, more)[0]
    shared = section(2)
    shared["weft"]["parallel"] = {axis: 2}
    saved = tmp_path / "saved"
    found = run_ranks(4, weft, str(tmp_path), 40, more | {"use_cpu": True}, shared, False, str(saved))
    for logs in found:
        close([e for e in logs if "loss" in e], [e for e in expected if "loss" in e])
    assert eval_loss_by_hand(str(saved)) == pytest.approx(found[0][-1]["eval_loss"], rel=1e-4)


def test_layers_that_cannot_be_shared_are_refused(tmp_path):
    shared = section(1)
    shared["weft"]["parallel"] = {"tensor": 4}
    with pytest.raises(RuntimeError, match=r"parallel\.tensor=4: LlamaForCausalLM has num_key_value_heads=2"):
        run_ranks(4, weft, str(tmp_path), 40, {"use_cpu": True}, shared)


def test_evaluation_is_the_mean_over_tokens(tmp_path):
    more = {"num_train_epochs": 1, "learning_rate": 0.0, "eval_strategy": "epoch", "eval_on_start": True}
    found = run_ranks(2, weft, str(tmp_path), 8, more, section(2))[0]
    losses = [entry["eval_loss"] for entry in found if "eval_loss" in entry]
    assert losses == pytest.approx([eval_loss_by_hand()] * 2, rel=1e-5)


def test_resume_is_exact(tmp_path):
    """From the middle of an epoch, with dropout; also from the checkpoint before a damaged one."""
    more = {"save_strategy": "steps", "save_steps": 3, "use_cpu": True}
    model = {"attention_dropout": 0.1}
    whole = run_ranks(2, weft, str(tmp_path), 40, more, section(2), False, "", model)
    last = tmp_path / "checkpoint-9"
    assert (last / "model.safetensors.index.json").exists() or (last / "model.safetensors").exists()
    again = run_ranks(2, weft, str(tmp_path), 40, more, section(2), True, "", model)
    assert [logs[-1:] for logs in again] == [logs[-1:] for logs in whole]
    for path in (tmp_path / "checkpoint-9", tmp_path / "checkpoint-10"):
        for shard in path.rglob("rank-001.safetensors"):
            shard.write_bytes(shard.read_bytes()[:-8])
    again = run_ranks(2, weft, str(tmp_path), 40, more | {"save_strategy": "no"}, section(2), True, "", model)
    assert [logs[-4:] for logs in again] == [logs[-4:] for logs in whole]


def test_resume_uses_changed_learning_rate_schedule_and_steps(tmp_path):
    """From the first step after it; as a run would have that had them all along."""
    more = {"save_strategy": "steps", "save_steps": 3, "use_cpu": True, "max_steps": 3}
    run_ranks(1, weft, str(tmp_path / "run"), 40, more, section(1))
    changed = more | {"learning_rate": 2e-3, "warmup_steps": 5, "lr_scheduler_type": "cosine", "max_steps": 9}
    changed |= {"save_strategy": "no"}
    (whole,) = run_ranks(1, weft, str(tmp_path / "whole"), 40, changed, section(1))
    (again,) = run_ranks(1, weft, str(tmp_path / "run"), 40, changed, section(1), True)
    rates = [{entry["step"]: entry["learning_rate"] for entry in logs if "loss" in entry} for logs in (whole, again)]
    assert [rates[1][step] for step in range(4, 10)] == [rates[0][step] for step in range(4, 10)]


def test_resume_of_another_base_is_refused(tmp_path):
    more = {"save_strategy": "steps", "save_steps": 1, "use_cpu": True, "max_steps": 1}
    assert run_ranks(1, other_base, str(tmp_path), more, section(1)) == [[True, False, True]]


def test_a_stopped_trainer_resumes_as_if_it_had_not_been(tmp_path):
    """The signal reaches one rank; all save after the same step, though the arguments ask for no checkpoints."""
    more = {"save_strategy": "no", "use_cpu": True}
    whole = run_ranks(2, weft, str(tmp_path / "whole"), 40, more, section(2), False)
    folder = str(tmp_path / "stopped")
    run = partial(run_ranks, 2, weft, folder, 40, more, section(2))
    stopped = run(False, "", None, False, False, 4)
    assert [logs[-1] for logs in stopped] == [{"exit": 143.0}] * 2
    assert [path.name for path in (tmp_path / "stopped").glob("checkpoint-*")] == ["checkpoint-4"]
    again = run(True)
    assert [logs[-2:] for logs in again] == [logs[-2:] for logs in whole]


def test_resume_in_another_layout_and_export(tmp_path):
    """A run that 2 stages began is finished by 2 replicas of a whole model; the saved folder is plain Hugging Face."""
    more = {"save_strategy": "steps", "save_steps": 5, "eval_strategy": "epoch"}
    whole = run_ranks(2, weft, str(tmp_path / "run"), 40, more, section(2))[0]
    shutil.rmtree(tmp_path / "run" / "checkpoint-10")
    half = more | {"gradient_accumulation_steps": 2}
    saved = tmp_path / "run"
    again = run_ranks(2, weft, str(saved), 40, half, section(1, zero_optimization={"stage": 1}), True, str(saved))[0]
    close(again[-6:], whole[-6:])
    assert (saved / "checkpoint-5").exists()
    assert (saved / "tokenizer.json").exists(), "without a processing class, that of the collator, as in transformers"
    assert eval_loss_by_hand(str(saved)) == pytest.approx(whole[-1]["eval_loss"], rel=1e-4)


def test_folded_w_schedule_with_its_own_optimizer_section(tmp_path):
    """A loss of its own, evaluated before it is trained, and layers that are computed again in the backward."""
    optimizer = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "betas": "auto", "eps": "auto"}}
    deepspeed = section(2, "w", optimizer=optimizer)
    deepspeed["weft"]["pipeline"]["placement"] = "fold"
    more = {
        "weight_decay": 0.0,
        "gradient_accumulation_steps": 8,
        "num_train_epochs": 4,
        "gradient_checkpointing": True,
    }
    expected = run_ranks(1, stock, str(tmp_path), 40, more, True, True)[0]
    close(run_ranks(2, weft, str(tmp_path), 40, more, deepspeed, False, "", None, True, True)[0], expected)


def test_trainer_example_of_the_docs_trains(tmp_path):
    """With one stage, because one rank runs here."""
    text = (Path(__file__).parents[3] / "docs/fine_tuning.md").read_text()
    pattern = r"^weft\.init_distributed\(\)\narguments = TrainingArguments\(.*?^trainer\.train\(\)$"
    (example,) = re.findall(pattern, text, re.M | re.S)
    example = example.replace('"stages": 4', '"stages": 1').replace('"runs/trainer"', "folder")
    assert run_ranks(1, readme_example, example, str(tmp_path))[0] > 0


REFUSED = [
    "TRL's SFTTrainer",
    "args of TRL",
    *_UNCALLED,
    "compute_metrics",
    "preprocess_logits_for_metrics",
    "optimizers",
    "lr_scheduler_type, or",
    "max_grad_norm",
    "num_train_epochs",
    "lr_scheduler_type",
    "torch_compile",
    "auto_find_batch_size",
    "neftune_noise_alpha",
    "debug=underflow_overflow",
    "bf16_full_eval",
    "save_only_model",
    "torch_empty_cache_steps",
    "average_tokens_across_devices=False",
    "train_sampling_strategy",
    "split_batches",
    "predict",
    "hyperparameter_search",
    "fsdp",
    "zero_optimization.stage=3",
    "no section",
    "contradicts",
    "use_cpu=True",
    "no_such_field",
    "trained already",
    "no whole checkpoint",
]


def test_refusals(tmp_path):
    """A setting that would have no effect is an error that names it."""
    said = run_ranks(1, refusals, str(tmp_path))[0]
    assert list(said) == REFUSED
    for name, message in said.items():
        assert name in message, f"{name}: {message}"
