"""Scores that workers compute ahead belong to the tokens of the step, and come from senders that have the key."""

import asyncio
import json
import time

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.inference.scorers import KEY, worker
from weft.engine.models.preference import label_log_probs
from weft.engine.scores import Ahead, ahead
from weft.engine.scores.step_scores import of_labels
from weft.inference.worker.proofs import HEADER, answer_proof, request_proof
from weft.inference.worker.scorer import Scorer
from weft.inference.worker.vllm_middleware import KEY_VARIABLE, ApiMiddleware

MODEL = LlamaForCausalLM(
    LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
).eval()


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 50, (4, 9), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 6:] = mask[3, 4:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :3] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def after(taken, seconds=5.0):
    deadline = time.monotonic() + seconds
    while (found := taken()) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def test_scores_of_a_microbatch_are_those_of_its_model():
    with worker(MODEL) as (url, lengths):
        scores = Ahead([Scorer(url, KEY, "m").log_probs])
        scores.request([batch()])
        found = after(lambda: scores.take(batch()))
        assert sorted(lengths) == [4, 6, 9, 9]
        assert scores.take(batch(1)) is None
        scores.close()
    with torch.no_grad():
        logits = MODEL(input_ids=batch()["input_ids"], attention_mask=batch()["attention_mask"]).logits
    torch.testing.assert_close(of_labels(found, batch()), label_log_probs(logits, batch()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fault", ["nan", "huge", "other key", "other prompt", "no proof"])
def test_scores_that_are_implausible_or_without_proof_are_refused(fault, monkeypatch):
    monkeypatch.setattr(ahead, "PAUSE_S", 0.0)
    with worker(MODEL, fault) as (url, lengths):
        scores = Ahead([Scorer(url, KEY, "m").log_probs])
        scores.request([batch()])
        assert after(lambda: scores.num_refused >= 4 or None)
        assert scores.take(batch()) is None and len(lengths) == 4
        scores.close()


@pytest.mark.parametrize("fault", ["killed", "stopped"])
def test_worker_that_fails_or_hangs_leaves_the_rows_to_others(fault, monkeypatch):
    monkeypatch.setattr(ahead, "PAUSE_S", 0.05)
    with worker(MODEL, fault) as (bad, _), worker(MODEL) as (good, _):
        scores = Ahead([Scorer(url, KEY, "m").log_probs for url in (bad, good)], at_once=1)
        wanted = [batch(seed) for seed in range(4)]
        begun = time.monotonic()
        scores.request(wanted)
        assert [scores.take(each) for each in wanted].count(None) >= 3
        assert time.monotonic() - begun < 1.0, "a request waited for a worker"
        arrived = after(lambda: sum(scores.take(each) is not None for each in wanted) >= 3 or None)
        assert arrived
        scores.close()


def test_rows_that_no_step_needs_are_dropped():
    asked = []
    scores = Ahead([lambda ids: asked.append(len(ids)) or [0.0] * len(ids)], at_once=1)
    scores.request([batch()])
    assert after(lambda: scores.take(batch())) is not None
    scores.request([batch(1)])
    assert scores.take(batch()) is None
    scores.close()


def test_worker_answers_with_a_proof_to_a_request_with_one(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    body, seen, sent = json.dumps({"prompt": [1, 2], "max_tokens": 1}).encode(), [], []

    async def vllm(scope, receive, send):
        seen.append(dict(scope["headers"])[b"authorization"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        await send({"type": "http.response.body", "body": b"two"})

    async def receive():
        return {"type": "http.request", "body": body}

    async def send(message):
        sent.append(message)

    def ask(credentials):
        sent.clear()
        scope = {"type": "http", "method": "POST", "path": "/v1/completions"}
        asyncio.run(
            ApiMiddleware(vllm)({**scope, "headers": [(b"authorization", credentials.encode())]}, receive, send)
        )
        return sent[0]["status"]

    assert ask(f"Weft abc:{request_proof(KEY.encode(), 'abc')}") == 200
    assert seen == [b"Bearer secret"]
    assert dict(sent[0]["headers"])[HEADER.encode()].decode() == answer_proof(KEY.encode(), "abc", body, b"onetwo")
    assert sent[1]["body"] == b"onetwo"
    assert ask("Weft abc:00") == ask(f"Weft abd:{request_proof(KEY.encode(), 'abc')}") == 401
    assert len(seen) == 1
