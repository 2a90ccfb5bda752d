"""A run that goes on with other settings uses them from its first step, and says which they are."""

import pytest

from tests.recipes.runs import prepare, records, run_all
from weft.tools.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


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
