"""Scores that workers compute ahead belong to the tokens of the step, and come from senders that have the key."""

import asyncio
import json
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.inference.scorers import KEY, likelihoods, worker
from tests.inference.worker.test_middleware import app_of
from weft.engine.models.preference import label_log_probs
from weft.engine.scores import Ahead, ahead
from weft.engine.scores.ahead import refuse_other_tokens
from weft.engine.scores.step_scores import of_labels
from weft.inference.worker import vllm_scores
from weft.inference.worker.proofs import HEADER, answer_proof, request_proof
from weft.inference.worker.score_arrays import ROUTE
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


@pytest.fixture
def ask(monkeypatch):
    """Return a function that sends a request to a worker's middleware, whose engine knows the tokens below 50."""

    async def compute(engine, prompt, most):
        if prompt[-1] == 9:
            return None  # dropped
        if prompt[-1] == 8:
            await asyncio.sleep(60.0)
        value = {"prompt": prompt, "top_k": most, "words": 50}
        rows = [array.tolist() for array in likelihoods(MODEL, value)[1:]]
        own = [[[float(token), -3.0]] if most else [] for token in prompt[1:]]
        flat = [pair for first, row in zip(own, rows, strict=True) for pair in (*first, *row)]
        ids, logs = ([pair[n] for pair in flat] for n in (0, 1))
        return SimpleNamespace(start_indices=[0] * len(prompt), token_ids=ids, logprobs=logs)

    monkeypatch.setattr(vllm_scores, "_compute", compute)
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    models = SimpleNamespace(is_base_model=lambda name: name == "m")
    engine = SimpleNamespace(model_config=SimpleNamespace(get_vocab_size=lambda: 50))
    app = app_of(openai_serving_models=models, engine_client=engine)

    def send_request(credentials="", *, gone=False, **changes):
        body = json.dumps({"model": "m", "prompt": [1, 2, 3], "top_k": 4, "words": 50} | changes).encode()
        messages, sent = iter([{"type": "http.request", "body": body}]), []

        async def receive():
            if (message := next(messages, None)) is None:
                await asyncio.sleep(0.05 if gone else 60.0)
            return message or {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)

        given = credentials or f"Weft abc:{request_proof(KEY.encode(), 'abc')}"
        headers = [(b"authorization", given.encode())]
        scope = {"type": "http", "method": "POST", "path": ROUTE, "headers": headers, "app": app}
        asyncio.run(ApiMiddleware(None)(scope, receive, send))
        return sent[0]["status"], dict(sent[0]["headers"]), sent[1]["body"], body

    return send_request


def test_worker_answers_with_a_proof_to_a_request_with_one(ask):
    status, headers, answer, body = ask()
    assert status == 200 and headers[HEADER.encode()].decode() == answer_proof(KEY.encode(), "abc", body, answer)
    for wrong in ("Weft abc:00", f"Weft abd:{request_proof(KEY.encode(), 'abc')}", f"Bearer {KEY}", "Bearer other"):
        assert ask(wrong)[0] == 401


@pytest.mark.parametrize("top_k", [0, 1, 4, 50])
@pytest.mark.parametrize("words", [50, 45])
def test_worker_sends_the_likeliest_of_the_tokens_that_count(ask, top_k, words):
    status, _, answer, _ = ask(top_k=top_k, words=words)
    if top_k > words:
        assert status == 422
        return
    with torch.no_grad():
        logs = MODEL(torch.tensor([[1, 2, 3]])).logits[0, :-1].log_softmax(-1)
    found = torch.from_numpy(np.frombuffer(answer, "<f4").reshape(3, max(1, top_k), 2).copy())
    best, ids = logs[:, :words].topk(top_k, -1) if top_k else (logs.gather(-1, own := torch.tensor([[2], [3]])), own)
    assert not found[0].any() and torch.equal(found[1:, :, 0], ids.float())
    torch.testing.assert_close(found[1:, :, 1], best)


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"model": "other"}, 404),
        ({"prompt": [1]}, 400),
        ({"prompt": [1, -2]}, 400),
        ({"prompt": "text"}, 400),
        ({"prompt": [True, 2]}, 400),
        ({"top_k": -1}, 400),
        ({"top_k": 2.5}, 400),
        ({"words": 0}, 400),
        ({"prompt": [1, 9]}, 503),
        ({"prompt": [1, 8], "gone": True}, 499),
    ],
)
def test_worker_refuses_what_it_cannot_score(ask, changes, status):
    assert ask(**changes)[0] == status


def test_documents_of_packed_rows_are_scored_alone_and_without_padding():
    asked = []

    def scorer(ids):
        asked.append(tuple(ids))
        return np.array([float(-token) for token in ids])

    ids = torch.tensor([[1, 2, 3, 4, 5, 6, 0, 0], [7, 8, 9, 10, 1, 2, 3, 11]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 0, 1], [0, 1, 2, 3, 0, 1, 2, 0]])
    labels = ids.masked_fill((positions == 0) | (ids == 0), -100)
    scores = Ahead([scorer])
    packed = {"input_ids": ids, "position_ids": positions, "labels": labels}
    scores.request([packed])
    found = after(lambda: scores.take(packed))
    assert sorted(asked) == [(1, 2, 3), (4, 5, 6), (7, 8, 9, 10)]
    torch.testing.assert_close(found, -labels.clamp(min=0).float())
    scores.close()


def likely(ids, logs):
    return np.stack([np.broadcast_to(ids, (3, 3)), np.broadcast_to(logs, (3, 3))], -1).astype(np.float32)


@pytest.mark.parametrize(
    ("ids", "logs"),
    [
        ([1, 2, 50], [-1, -2, -3]),
        ([1, 2, -1], [-1, -2, -3]),
        ([1, 2, 2.5], [-1, -2, -3]),
        ([1, 2, np.nan], [-1, -2, -3]),
        ([1, 2, 1], [-1, -2, -3]),
        ([1, 2, 3], [-1, -3, -2]),
        ([1, 2, 3], [-0.1, -0.2, -0.3]),
        ([1, 2, 3], [-1, -2, np.nan]),
        ([1, 2, 3], [-1, -2, -1e30]),
        ([1, 2, 3], [0.1, -2, -3]),
    ],
)
def test_likely_tokens_that_no_model_gives_are_refused(ids, logs):
    refuse_other_tokens(likely([1, 2, 49], [-1, -2, -2]), 50)
    with pytest.raises(ValueError, match=r"tokens|log-probabilities"):
        refuse_other_tokens(likely(ids, logs), 50)
