"""A worker's scores are those of transformers, also of prompts that are computed in chunks in several bubbles."""

import os
import random
import subprocess
import sys
import urllib.error
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.inference.vllm.test_handover import server, until_ready
from weft.conf.schema import DistillConfig, Precision, WeftConfig
from weft.inference.worker.command import command, environment, workers_of
from weft.inference.worker.scorer import Scorer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(2400)]
TOP_K, WORDS, KEY = 30, 509, "secret"
"""More likely tokens than vLLM sends by default, of a student with fewer tokens than the teacher's 512."""


def test_scores_are_those_of_transformers(model, tmp_path):
    config = WeftConfig(distill=DistillConfig(enabled=True, teacher=str(model), top_k=TOP_K))
    config.train.precision = Precision.fp32
    inference = config.inference
    inference.boards, inference.scores.enabled = str(tmp_path / "boards"), True
    inference.prefill.model, inference.prefill.first_port = str(model), 18701
    inference.prefill.max_tokens, inference.prefill.cost_dir = 256, str(tmp_path)
    worker = workers_of(config)[0]
    package = Path(os.environ["PYTHONPATH"].split(os.pathsep)[0]).absolute()
    words = command(config, worker, python=sys.executable, num_gpus=0)
    env = environment(config, worker, dict(os.environ, VLLM_CPU_NUM_OF_RESERVED_CPU="1"), key=KEY, package=package)
    trainer = [sys.executable, Path(__file__).with_name("trainer.py"), worker.boards[0], "0.04", "0.01"]
    draw, log = random.Random(7), tmp_path / "log"
    prompts = [[draw.randrange(256) for _ in range(tokens)] for tokens in (2, 30, 200)]
    with (
        subprocess.Popen(trainer, stdout=subprocess.DEVNULL) as training,
        server(words, env, worker.port, log) as (process, _),
    ):
        try:
            until_ready(worker.port, process, log)
            scorer = Scorer(f"http://127.0.0.1:{worker.port}", KEY, str(model))
            found = [(scorer.log_probs(ids), scorer.top_log_probs(ids, top_k=TOP_K, words=WORDS)) for ids in prompts]
            for wrong in (Scorer(scorer.url, KEY, "other"), Scorer(scorer.url, "other", str(model))):
                with pytest.raises(ValueError, match=r"40[14]"):
                    wrong.log_probs(prompts[0])
            for ids in ([1] * 300, [1, 10**6]):
                with pytest.raises(ValueError, match="400"):
                    scorer.log_probs(ids)
            with pytest.raises(ValueError, match="400"):
                scorer.top_log_probs(prompts[0], top_k=TOP_K + 100, words=WORDS)
        except urllib.error.HTTPError as error:
            pytest.fail(f"{error}: {error.read()!r}\n{log.read_text()[-4000:]}")
        finally:
            training.kill()
    peer = AutoModelForCausalLM.from_pretrained(model)
    for ids, (own, likely) in zip(prompts, found, strict=True):
        with torch.no_grad():
            logs = peer(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        np.testing.assert_allclose(own[1:], logs.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0], atol=1e-4)
        best, tokens = logs[:, :WORDS].topk(TOP_K, -1)
        np.testing.assert_allclose(likely[1:, :, 1], best, atol=1e-4)
        assert (likely[1:, :, 0] == tokens.numpy()).mean() > 0.99, "but for nearly equal ones"
