"""A run's workers score its checkpoints in bubbles as plain transformers does, while it trains on."""

import json
import os
import signal
import subprocess
import sys
import time
from math import exp
from pathlib import Path

import pytest

from tests.inference.vllm.test_recipe import WEFT
from tests.quickstart import TINY_QUICKSTART

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(not WEFT.exists(), reason=f"needs {WEFT}: make test-vllm"),
]
LONGEST_S = 1800.0
SETTINGS = {
    "inference": "bubbles",
    "inference.evaluate.enabled": "true",
    "inference.evaluate.documents": 8,
    "inference.prefill.ranks": "[0]",
    "inference.prefill.max_tokens": 64,
    "inference.prefill.first_port": 18601,
    "inference.prefill.yield_cores": "false",
    "inference.prefill.python": sys.executable,
    "cluster.ranks": 2,
    "cluster.master_port": 0,
    "pipeline.stages": 2,
    "pipeline.microbatches": 2,
    "model.overrides.hidden_size": 128,  # vLLM on CPUs has no heads of 8 numbers
    "data.eval_fraction": 0.02,
    "checkpoint.every": 50,
    "checkpoint.keep": 100,
    "train.steps": 1_000_000,
}
PEER = """
import json, sys, torch
from pathlib import Path
from transformers import AutoConfig, AutoModelForCausalLM
from weft.conf import load
from weft.engine.checkpoint import open_checkpoint
from weft.engine.checkpoint.folder import complete
from weft.engine.data import load_tokenizer, open_source

config = load(sys.argv[2:])
source = open_source(config.data, load_tokenizer(config.model, config.data), evaluation=True)
documents = next(source.blocks({}, 0)).documents
rows = [torch.from_numpy(documents[n].ids[:32].astype("int64"))[None] for n in range(8)]
losses = {}
run = Path(sys.argv[1])
for path, manifest in complete(run / "checkpoints"):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(next(run.glob("evaluation/0*")))).eval()
    weights = open_checkpoint(path).load(f"weight/{name}" for name, _ in model.named_parameters())
    model.load_state_dict({name.removeprefix("weight/"): each for name, each in weights.items()}, strict=False)
    with torch.no_grad():
        total = sum(float(model(ids, labels=ids).loss) * (ids.shape[1] - 1) for ids in rows)
    losses[manifest.step] = total / sum(ids.shape[1] - 1 for ids in rows)
print(json.dumps(losses))
"""
"""Prints transformers' loss of each checkpoint of a run, on the same documents."""


def test_checkpoints_are_scored_while_the_run_trains(tmp_path):
    own = {"train.output_dir": tmp_path, "inference.boards": tmp_path / "boards", "data.cache_dir": tmp_path / "cache"}
    settings = [*TINY_QUICKSTART, *(f"{name}={value}" for name, value in (SETTINGS | own).items())]
    env = dict(os.environ, OMP_NUM_THREADS="1", VLLM_NO_USAGE_STATS="1", DS_ACCELERATOR="cpu", WEFT_API_KEY="secret")
    env.pop("PYTHONPATH", None)
    run = tmp_path / "quickstart"
    processes = []
    try:
        for command in ("serve", "launch"):
            with (tmp_path / command).open("wb") as out:
                words = [str(WEFT), command, *settings]
                processes.append(subprocess.Popen(words, env=env, stdout=out, stderr=out, start_new_session=True))
        deadline = time.monotonic() + LONGEST_S
        while len(found := logged(run)) < 3:
            said = "".join((tmp_path / name).read_text()[-3000:] for name in ("serve", "launch"))
            assert time.monotonic() < deadline and all(each.poll() is None for each in processes), said
            time.sleep(1.0)
    finally:
        for process in reversed(processes):
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(120)
    found = logged(run)
    words = [str(WEFT.parent / "python"), "-c", PEER, str(run), *settings]
    losses = json.loads(subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout)
    expected = {int(step): loss for step, loss in losses.items() if int(step) in found}
    assert expected and list(found) == sorted(found)
    for step, loss in expected.items():
        assert found[step]["loss"] == pytest.approx(loss, rel=1e-5)
        assert found[step]["perplexity"] == pytest.approx(exp(loss), rel=1e-3)


def logged(run: Path) -> dict[int, dict[str, float]]:
    """Return the run's own records of its checkpoints."""
    file = run / "metrics.jsonl"
    lines = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
    return {line["step"]: line for line in lines if line["kind"] == "checkpoint"}
