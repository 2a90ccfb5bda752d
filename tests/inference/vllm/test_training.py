"""`weft serve` beside `weft launch` with the recipes distill and dpo: losses with vLLM's scores are those without."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.inference.vllm.test_handover import until_ready
from tests.inference.vllm.test_recipe import ROOT, WEFT

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(3000),
    pytest.mark.skipif(not WEFT.exists(), reason=f"needs {WEFT}: make test-vllm"),
]
PREPARE = """
import json, sys
from pathlib import Path
from tests.recipes import preferences, test_distill

recipe, folder = sys.argv[1], Path(sys.argv[2])
if recipe == "distill":
    settings = test_distill.prepare_both(folder, width=128)
    losses = test_distill.plain_losses(settings, folder)
else:
    settings = [*preferences.prepare(folder, width=128), "pipeline.microbatches=4", "train.microbatch_size=2"]
    losses = preferences.losses_of_trl(folder)
print(json.dumps([settings, losses]))
"""
"""Writes models and texts, and prints the settings of a run and the losses of its peer."""
LENGTH, STEPS, PORT = 48, 20, 18901


@pytest.mark.parametrize("recipe", ["distill", "dpo"])
def test_training_with_scores_of_vllm_has_the_losses_of_its_peer(recipe, tmp_path):
    env = dict(os.environ, OMP_NUM_THREADS="1", VLLM_NO_USAGE_STATS="1", DS_ACCELERATOR="cpu", WEFT_API_KEY="secret")
    env.pop("PYTHONPATH", None)
    words = [str(WEFT.parent / "python"), "-c", PREPARE, recipe, str(tmp_path)]
    prepared = subprocess.run(words, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert prepared.returncode == 0, prepared.stderr[-3000:]
    settings, losses = json.loads(prepared.stdout.splitlines()[-1])
    settings += [
        "inference=bubbles",
        "inference.scores.enabled=true",
        "inference.prefill.ranks=[0]",
        f"inference.prefill.max_tokens={LENGTH + 1}",  # one more than the models have positions
        f"inference.prefill.first_port={PORT}",
        f"inference.prefill.python={sys.executable}",
        f"inference.prefill.cost_dir={tmp_path}",
        "inference.prefill.yield_cores=false",
        f"inference.boards={tmp_path / 'boards'}",
        f"train.steps={STEPS}",
    ]
    log = tmp_path / "serve"
    with log.open("wb") as out:
        words = [str(WEFT), "serve", *settings]
        serving = subprocess.Popen(words, env=env, stdout=out, stderr=out, start_new_session=True)
    ahead = 0
    try:
        until_ready(PORT, serving, log, patience_s=1200.0)
        # On a busy machine the short steps of a run may end before the worker's first answer.
        for name in map(str, range(3)):
            if ahead:
                break
            words = [str(WEFT), "launch", *settings, f"train.name={name}"]
            launched = subprocess.run(words, env=env, capture_output=True, text=True, check=False, timeout=1500)
            assert launched.returncode == 0, launched.stdout[-3000:] + launched.stderr[-3000:]
            records = map(json.loads, (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines())
            steps = [record for record in records if record["kind"] == "train"]
            assert [step["loss"] for step in steps] == pytest.approx(losses, abs=1e-4)
            ahead = sum(step["scores_ahead"] for step in steps)
    finally:
        os.killpg(serving.pid, signal.SIGTERM)
        serving.wait(120)
    worker = (tmp_path / "boards" / "worker0.log").read_text()[-3000:]
    assert ahead, f"{log.read_text()}\n{worker}"
