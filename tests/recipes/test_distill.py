"""The recipe `distill` has the losses of a plain loop, with the teacher in line or computed ahead by workers."""

from contextlib import nullcontext

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.engine.distilled import plain_loss
from tests.recipes.preferences import LENGTH, STEPS, losses, prepare, shares_ahead, train_with_key
from weft.conf import load
from weft.engine.data import open_source
from weft.tools.ranks import run_ranks

MICROBATCHES = 4
SCORES = ["inference.enabled=true", "inference.scores.enabled=true", "distill.top_k=8"]


def prepare_both(folder, *, width=64):
    """Write a student and a teacher that has more tokens, and return the settings of a run."""
    settings = prepare(folder, "distill", width=width)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "teacher")
    torch.manual_seed(1)
    shape = {"hidden_size": 3 * width // 4, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 3}
    teacher = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer) + 6, max_position_embeddings=LENGTH, **shape))
    teacher.lm_head.weight.data.mul_(20)
    teacher.save_pretrained(folder / "teacher")
    return [
        *settings,
        f"distill.teacher={folder / 'teacher'}",
        "distill.top_k=8",
        "distill.temperature=1.5",
        f"pipeline.microbatches={MICROBATCHES}",
        "train.microbatch_size=1",
        "data.packing=false",
        "checkpoint.every=5",
    ]


def plain_losses(settings, folder):
    """Return the losses of a loop of transformers over the same texts."""
    config = load(settings)
    student, teacher = (AutoModelForCausalLM.from_pretrained(folder / name) for name in ("model", "teacher"))
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    documents = next(open_source(config.data, tokenizer, evaluation=False).blocks({}, 0)).documents
    assert not config.optimizer.weight_decay
    optimizer = torch.optim.AdamW(student.parameters(), lr=config.optimizer.lr, weight_decay=0.0)
    found = []
    for step in range(STEPS):
        rows = [documents[n].ids[:LENGTH] for n in range(MICROBATCHES * step, MICROBATCHES * (step + 1))]
        rows = [torch.from_numpy(ids.astype("int64"))[None] for ids in rows]
        items = torch.tensor(sum(ids.shape[1] - 1 for ids in rows))
        parts = [
            plain_loss(config.distill, teacher.eval(), student, {"input_ids": ids, "labels": ids}, items, len(rows))
            for ids in rows
        ]
        sum(parts).backward()
        found.append(float(sum(parts).detach()))
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("fault", [None, "", "slow", "stopped", "nan"])
def test_losses_are_those_of_a_plain_loop_whatever_the_workers_do(fault, stages, tmp_path):
    from tests.inference.scorers import KEY, worker  # with the feature prefill only

    settings = [*prepare_both(tmp_path), f"cluster.ranks={stages}", f"pipeline.stages={stages}"]
    teacher = AutoModelForCausalLM.from_pretrained(tmp_path / "teacher", dtype=torch.float32)
    with nullcontext((None, [])) if fault is None else worker(teacher, fault) as (url, lengths):
        ahead = [f"inference.controller.workers=[{{url: '{url}', boards: [none]}}]"]
        ahead += ["inference.enabled=true", "inference.scores.enabled=true", f"inference.boards={tmp_path / 'boards'}"]
        given = [*settings, *(ahead if url else [])]
        for steps in (STEPS // 2, STEPS):  # with a resume
            run_ranks(stages, train_with_key, KEY, [*given, f"train.steps={steps}"], timeout_s=200)
    run = tmp_path / "runs" / "distill"
    assert losses(run) == pytest.approx(plain_losses(settings, tmp_path), abs=1e-4)
    if fault is not None:
        assert lengths and (fault == "slow" or any(shares_ahead(run)) == (fault == ""))


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_packed_documents_have_the_losses_that_they_have_in_line(tmp_path):
    from tests.inference.scorers import KEY, worker

    settings = [*prepare_both(tmp_path), "cluster.ranks=2", "train.microbatch_size=2"]
    settings[settings.index("data.packing=false")] = "data.packing=true"
    run_ranks(2, train_with_key, KEY, [*settings, "train.name=inline"], timeout_s=200)
    with worker(AutoModelForCausalLM.from_pretrained(tmp_path / "teacher", dtype=torch.float32)) as (url, lengths):
        ahead = [f"inference.controller.workers=[{{url: '{url}', boards: [none]}}]", f"inference.boards={tmp_path}/b"]
        ahead += ["inference.enabled=true", "inference.scores.enabled=true", "train.name=ahead"]
        run_ranks(2, train_with_key, KEY, [*settings, *ahead], timeout_s=200)
    own, expected = (losses(tmp_path / "runs" / name) for name in ("ahead", "inline"))
    assert own == pytest.approx(expected, abs=1e-5)
    assert max(lengths) < LENGTH and any(shares_ahead(tmp_path / "runs" / "ahead"))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (["distill.top_k=0"], "scores.enabled=true: distill.top_k=0: workers send likely tokens"),
        (["inference.prefill.model=a/b"], "scores.enabled=true: inference.prefill.model=a/b: workers have c/d"),
        (["parallel.context=2"], "scores.enabled=true: parallel.tensor=1 parallel.context=2"),
        (["inference.prefill.max_tokens=512"], "max_tokens=512: shorter than data.sequence_length=1024"),
        (["inference.enabled=false"], "scores.enabled=true: inference.enabled=false: ranks publish no bubbles"),
    ],
)
def test_settings_with_which_workers_cannot_score_are_refused(settings, problem):
    given = {name: value for name, _, value in (each.partition("=") for each in [*SCORES, *settings])}
    with pytest.raises(ValueError, match=problem):
        load(
            ["recipe=distill", "model.path=a/b", "distill.teacher=c/d", "data.path=e/f", *map("=".join, given.items())]
        )
