"""Epochs, the best checkpoint and early stopping; all of it survives the end of the process."""

import json
from math import inf, nan

import pytest
import torch
from safetensors.torch import load_file

from tests.recipes.runs import prepare, records, run_all
from weft.engine.checkpoint import open_checkpoint
from weft.recipes.history import Evaluations
from weft.tools.ranks import run_ranks

LOSSES = {2: 5.0, 4: 3.0} | {step: 4.0 + step / 100 for step in range(6, 30, 2)}


def exported(folder):
    return load_file(folder / "export" / "model.safetensors")


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_what_is_decided_by_evaluations_survives_a_kill(tmp_path):
    settings = [
        *prepare(tmp_path),
        "train.epochs=1.2",
        "train.eval_every=2",
        "checkpoint.every=6",
        "checkpoint.keep=1",
        "checkpoint.load_best_model_at_end=true",
        "train.export=true",
    ]

    def attempts(name, *kills, **more):
        own = [*settings, f"train.name={name}", *(f"{key.replace('__', '.')}={value}" for key, value in more.items())]
        return [{"settings": own, "losses": LOSSES, "killed_at": step} for step in (*kills, 0)]

    patience = {"train__early_stopping_patience": 3}
    ((whole, _, _, killed, last, stopped, _, again, once_more),) = run_ranks(
        1,
        run_all,
        [
            *attempts("whole"),
            *attempts("killed", 4, 9),
            *attempts("last", checkpoint__load_best_model_at_end="false"),
            *attempts("stopped", **patience),
            *attempts("again", 9, **patience),
            *attempts("again", **patience),
        ],
        timeout_s=300,
    )
    runs = tmp_path / "runs"
    losses = {name: [line["loss"] for line in records(runs / name, "train").values()] for name in ("whole", "killed")}

    # 59 sequences a pass, of which 1.2 take 18 steps of 4, and a part of the next.
    assert whole["steps"] == killed["steps"] == 18 == len(losses["whole"])
    assert records(runs / "whole", "train")[18]["epoch"] == pytest.approx(1 + 13 / 59)
    assert records(runs / "whole", "train")[18]["lr"] < records(runs / "whole", "train")[4]["lr"] / 5, "it decays to 18"
    assert losses["killed"] == losses["whole"]

    # The best is kept in addition to the newest, and exported; a resumed run finds the same.
    for name in ("whole", "killed"):
        folder = runs / name / "checkpoints"
        assert sorted(path.name for path in folder.iterdir()) == ["best", "step-00000018"]
        best = open_checkpoint(folder / "best")
        assert best.meta["client_state"]["evaluations"] == {
            "best_loss": 3.0,
            "best_step": 4,
            "last_step": 4,
            "without_gain": 0,
        }
        weights = {
            key.removeprefix("weight/"): best.load([key])[key] for key in best.names if key.startswith("weight/")
        }
        assert same(exported(runs / name), {key: weights[key] for key in exported(runs / name)})
    assert last["steps"] == 18 and not same(exported(runs / "last"), exported(runs / "whole"))

    # Evaluations without gain are counted over attempts; a run that has stopped stays so.
    for seen in (stopped, again, once_more):
        assert seen["steps"] == 10
    assert sorted(records(runs / "again", "eval")) == sorted(records(runs / "stopped", "eval")) == [2, 4, 6, 8, 10]
    assert same(exported(runs / "again"), exported(runs / "whole"))


SEQUENCES = [
    # losses, threshold; which are the best, and how many without a gain each leaves
    ([5, 3, 4, 4, 2], 0, [True, True, False, False, True], [0, 0, 1, 2, 0]),
    ([5, 4.9, 4.8, 4.4], 0.3, [True, True, True, True], [0, 1, 2, 0]),
    ([3, 3, 3], 0, [True, False, False], [0, 1, 2]),
    ([nan, 3, nan, 2], 0, [False, True, False, True], [0, 0, 1, 0]),
    ([inf, 3], 0, [True, True], [0, 0]),
]


@pytest.mark.parametrize(("losses", "threshold", "best", "without_gain"), SEQUENCES)
def test_evaluations(losses, threshold, best, without_gain):
    seen = Evaluations()
    for step, loss in enumerate(losses, start=1):
        assert seen.add(step, float(loss), threshold=threshold) is best[step - 1]
        assert seen.without_gain == without_gain[step - 1]
        seen = Evaluations(**json.loads(json.dumps(vars(seen))))
    assert seen.best_step == max(step for step, is_best in enumerate(best, start=1) if is_best)
