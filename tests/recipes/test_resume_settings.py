"""A run that goes on with other settings uses them from its first step, and says which they are."""

from itertools import pairwise

import pytest

from tests.engine.stages.tiny import tiny, whole
from tests.recipes.runs import prepare, records, run_all
from weft.conf import load
from weft.engine.checkpoint.durable import OtherBaseError
from weft.tools.dry_run import show
from weft.tools.preflight import INPUTS, preflight
from weft.tools.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def contents(folder):
    """Each file of a run's folder but the lock, which names the last process that held it."""
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file() and file.name != "lock"}


def test_resume_uses_changed_learning_rate_and_schedule(tmp_path):
    settings = [*prepare(tmp_path), "optimizer.schedule=constant", "optimizer.warmup_steps=0", "optimizer.lr=1e-3"]

    def attempt(name, steps, **more):
        own = [f"optimizer.{key}={value}" for key, value in more.items()]
        return {"settings": [*settings, f"train.name={name}", f"train.steps={steps}", *own]}

    run_ranks(
        1,
        run_all,
        [
            *(attempt("rate", steps, lr=rate) for steps, rate in ((4, 1e-3), (6, 1e-5))),
            *(attempt("schedule", steps, schedule=kind) for steps, kind in ((4, "constant"), (8, "linear"))),
        ],
        timeout_s=250,
    )
    rates = {
        name: [line["lr"] for line in records(tmp_path / "runs" / name, "train").values()]
        for name in ("rate", "schedule")
    }
    assert rates["rate"] == [1e-3] * 4 + [1e-5] * 2
    assert rates["schedule"] == pytest.approx([1e-3] * 4 + [1e-3 * (1 - 0.9 * step / 8) for step in range(4, 8)])


def test_epochs_hold_after_the_number_of_sequences_in_a_step_has_changed(tmp_path):
    settings = [*prepare(tmp_path), "train.name=run"]
    sizes = (1, 2), (2, 8), (3, 1)
    attempts = [{"settings": [*settings, f"train.epochs={n}", f"pipeline.microbatches={size}"]} for n, size in sizes]
    run_ranks(1, run_all, attempts, timeout_s=250)
    epochs = [line["epoch"] for line in records(tmp_path / "runs" / "run", "train").values()]
    of_a_step = [after - before for before, after in pairwise([0, *epochs])]
    assert of_a_step[-1] == pytest.approx(of_a_step[0] / 2)
    assert 3 <= epochs[-1] < 3 + of_a_step[-1]


@pytest.mark.parametrize("adapters", [False, True])
def test_resume_refuses_another_base_and_lists_other_settings(adapters, tmp_path):
    settings = [setting for setting in prepare(tmp_path) if "overrides" not in setting]
    for name in ("one", "other", "moved"):
        model = tiny("llama", vocab_size=320)
        whole(model, seed=2 if name == "other" else 1).save_pretrained(tmp_path / name)
    settings += ["train.name=run", f"model.lora.enabled={adapters}", "checkpoint.every=2"]

    def attempt(name, steps, *more):
        return {"settings": [*settings, f"model.path={tmp_path / name}", f"train.steps={steps}", *more]}

    decay = "optimizer.weight_decay=0.1"
    attempts = [attempt("one", 2), attempt("moved", 4, decay), attempt("moved", 4, decay), attempt("other", 6)]
    ((first, moved, again),) = run_ranks(1, run_all, attempts[:3], timeout_s=250)
    before = contents(tmp_path / "runs" / "run")
    others = [attempts[3], attempt("moved", 6, "train.seed=7", "model.self_check=true", "pipeline.microbatches=4")]
    for setting in ("model.lora.rank=4",) if adapters else ():
        others.append(attempt("moved", 6, setting))
    ((refused, seed, *shapes),) = run_ranks(1, run_all, others, timeout_s=250)
    assert contents(tmp_path / "runs" / "run") == before, "a refused run has changed the folder"
    assert all("with which the checkpoint was written" in shape["error"] for shape in shapes)
    assert seed["kind"] == "SharedError" and "another train.seed or data setting" in seed["error"]
    assert not any("resumed" in line for line in seed["warnings"]), "it was refused"
    config = load(attempts[3]["settings"])
    for check in (lambda: preflight(config, checks=INPUTS), lambda: show(config)):
        with pytest.raises(OtherBaseError, match="other weights"):
            check()
    assert first["steps"] == 2 and not first["warnings"]
    assert "other weights" in refused["error"]
    assert str(tmp_path / "moved") in refused["error"] and str(tmp_path / "other") in refused["error"]
    assert moved["steps"] == 4
    (said,) = [line for line in moved["warnings"] if "other settings" in line]
    for part in (
        f"model.path={tmp_path / 'moved'} (was",
        "train.steps=4 (was 2)",
        "optimizer.weight_decay=0.1 (was 0.0)",
    ):
        assert part in said
    assert again["steps"] == 4 and not again["warnings"]
