"""Steps with bad numbers are skipped, and batches that keep on giving them are left out."""

import json

import pytest

from tests.recipes.runs import Spoilt, prepare, records, run_all
from weft.engine.zero.skipping import SkippedStep, SkippedTooOften
from weft.recipes.history import BadData
from weft.tools.ranks import run_ranks

STEPS, SIZE = 10, 8
"""Steps of a run, and sequences that a step reads over both replicas."""


def of(*steps: int) -> range:
    """The sequences that these steps, which follow one another, read in an undisturbed run."""
    return range((steps[0] - 1) * SIZE, steps[-1] * SIZE)


def spoilt_at(*steps: int, **which) -> Spoilt:
    return Spoilt(sequences=of(*steps), **which)


@pytest.mark.slow
def test_bad_numbers_from_one_batch_to_all(tmp_path):
    settings = [
        *prepare(tmp_path),
        f"train.steps={STEPS}",
        "pipeline.stages=2",
        "checkpoint.every=4",
        "zero.stage=1",
        "supervise.max_skips=3",
    ]

    def attempt(name, *more, **given):
        return {"settings": [*settings, f"train.name={name}", *more], **given}

    spike = {"spoilt": spoilt_at(4, value=1e6)}
    attempts = {
        "plain": attempt("plain", "supervise.max_skips=0"),
        "watched": attempt("watched"),
        "once": attempt("once", spoilt=spoilt_at(4)),
        "once left out": attempt("once left out", left_out=of(4)),
        "unclipped": attempt("unclipped", "optimizer.clip=0", spoilt=spoilt_at(4)),
        "unclipped left out": attempt("unclipped left out", "optimizer.clip=0", left_out=of(4)),
        "thrice": attempt("thrice", spoilt=spoilt_at(5, 6, 7)),
        "thrice left out": attempt("thrice left out", left_out=of(5, 6, 7)),
        "killed": attempt("killed", spoilt=spoilt_at(5, 6, 7), killed_at=9),
        "resumed": attempt("killed", spoilt=spoilt_at(5, 6, 7)),
        "always": attempt("always", spoilt=spoilt_at(5, 200)),
        "saved meanwhile": attempt("saved meanwhile", "checkpoint.every=1", "train.steps=20", spoilt=spoilt_at(5, 200)),
        "early": attempt("early", spoilt=spoilt_at(1, 200)),
        "strict": attempt("strict", "supervise.max_skips=0", spoilt=spoilt_at(4)),
        "no spike": attempt("no spike", "supervise.spike=100", **spike),
    }
    everywhere = run_ranks(4, run_all, list(attempts.values()), timeout_s=500)
    ends = dict(zip(attempts, everywhere[0], strict=True))
    assert all(list(ends.values()) == others for others in everywhere), "all ranks agree"
    assert not any(end.pop("warnings", []) for end in ends.values())

    def losses(name):
        lines = (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
        steps = [line["step"] for line in map(json.loads, lines)]
        assert steps == sorted(set(steps)), "no step has two lines"
        return [line["loss"] for line in records(tmp_path / "runs" / name, "train").values()]

    plain = losses("plain")
    assert losses("watched") == plain and len(plain) == STEPS and ends["watched"]["skipped"] == 0

    # One bad step: as if its data were not there, and the step were not counted.
    for name in ("once", "unclipped"):
        found, without = losses(name), losses(f"{name} left out")
        assert found[:3] + found[4:] == without[:-1]
        assert found[:3] == without[:3] and without[3:] != losses("plain")[3:]
        assert ends[name] == {"steps": STEPS, "skipped": 1, "left_out": []}

    # Three: back to the checkpoint after step 4, and on without their data.
    assert losses("thrice") == losses("thrice left out") == losses("killed")
    for name in ("thrice", "resumed"):
        assert ends[name] == {"steps": STEPS, "skipped": 0, "left_out": [(of(5).start, of(7).stop)]}

    # Other data is as bad: it ends, and says what was read.
    assert (
        "step 7: the last 3 steps were skipped, because the norms of their gradients were nan"
        in (ends["always"]["error"])
    )
    assert f"they read sequences {of(11).start} to {of(13).stop - 1} of the data" in ends["always"]["error"]
    assert losses("always")[:4] == plain[:4]
    assert ends["saved meanwhile"]["error"].startswith("step 11: the last 3 steps were skipped")
    assert "there is no checkpoint to go back to: set checkpoint.every" in ends["early"]["error"]
    assert "step 4: the norm of the gradient is nan" in ends["strict"]["error"]
    assert ends["no spike"]["skipped"] == 0, "there are too few norms to tell one"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_numbers_that_one_rank_spoils_name_that_rank(tmp_path):
    """Gradients of a replica and of the last stage, from which NaN travels to the first, and hidden states."""
    settings = [*prepare(tmp_path), f"train.steps={STEPS}"]
    replicas, stages = [*settings, "pipeline.stages=1"], [*settings, "pipeline.stages=2"]
    alone = {"spoilt": spoilt_at(3, 200, rank=1)}
    attempts = {
        "replica": {"settings": [*replicas, "zero.stage=0", "supervise.max_skips=0"], **alone},
        "one step later": {"settings": [*replicas, "zero.stage=2", "optimizer.clip=0"], **alone},
        "skipped": {"settings": [*replicas, "zero.stage=1", "supervise.max_skips=2"], **alone},
        "stage": {"settings": [*stages, "supervise.max_skips=0"], **alone},
        "all replicas": {"settings": [*replicas, "supervise.max_skips=0"], "spoilt": spoilt_at(3, 200)},
        **{
            f"forward {stage}": {
                "settings": [*stages, "supervise.max_skips=0"],
                "spoilt": spoilt_at(3, 200, stage=stage),
            }
            for stage in range(2)
        },
        **{
            name: {
                "settings": [*layout, "supervise.max_skips=0", "model.overrides.tie_word_embeddings=false"],
                "spoilt": spoilt_at(3, 200, stage=int(layout is stages), part=name.split(" of ")[0]),
            }
            for name, layout in (
                ("logits", stages),
                ("weight", stages),
                ("weight of replicas", [*replicas, "zero.stage=3"]),
            )
        },
        "layer of replicas": {
            "settings": [*replicas, "supervise.max_skips=0", "optimizer.clip=0"],
            "spoilt": spoilt_at(3, 200, stage=0, part="layer"),
        },
    }
    for number, attempt in enumerate(attempts.values()):
        attempt["settings"].append(f"train.name=run{number}")
    first, second = run_ranks(2, run_all, list(attempts.values()), timeout_s=300)
    assert first == second, "all ranks agree"
    ends = dict(zip(attempts, first, strict=True))
    assert "training has diverged" in ends["all replicas"]["error"] and not ends.pop("all replicas")["ranks"]
    layer = ends.pop("layer of replicas")
    assert layer["ranks"] == (0, 1), layer
    assert "weights (model.layers.0.self_attn.o_proj.weight) of ranks 0, 1, before this step" in layer["error"]
    for name, end in ends.items():
        if "weight" in name:
            ranks, whose = ((0, 1), "ranks 0, 1") if "replicas" in name else ((1,), "rank 1")
            assert end["ranks"] == ranks and "the checkpoint or the model.path" in end["error"], (name, end)
            assert f"first appeared in the weight of the model's head of {whose}, before this step" in end["error"]
            continue
        rank = 0 if name == "forward 0" else 1
        place = f"the forward of stage {rank}" if "forward" in name else "the gradients"
        place = "the logits of the model's head" if name == "logits" else place
        assert end["ranks"] == (rank,), (name, end)
        assert f"first appeared in {place} of rank {rank}, although" in end["error"], name
        assert "training has diverged" not in end["error"], name


def skipped(*steps: int) -> SkippedTooOften:
    return SkippedTooOften(tuple(SkippedStep(step, float("nan")) for step in steps))


def test_what_skipped_steps_have_read():
    data = BadData()
    assert data.last == (0, 0)
    for step in range(1, 200):
        data.begin(step, 10 * step)
    assert data.last == (199, 1990)
    assert data.of(skipped(197, 198, 199), consumed=2000) == (1970, 2000)
    assert data.of(skipped(197, 198), consumed=2000) == (1970, 1990)
    data.begin(198, 5000)  # it has gone back
    assert data.last == (198, 5000)
    assert data.of(skipped(197, 198), consumed=5010) == (1970, 5010)


def test_going_back_is_hopeless_when_nothing_is_gained():
    data = BadData()
    assert not data.is_hopeless(after=56)
    data.trained(32)  # between the checkpoint and what is left out
    assert not data.is_hopeless(after=80)
    data.trained(80)
    assert not data.is_hopeless(after=104), "something was learnt beyond"
    assert not data.is_hopeless(after=128)
    data.trained(120)
    assert data.is_hopeless(after=152)
