"""Laws of chunks' ways through a pipeline, over random bubbles and costs."""

import random

import pytest

from weft.inference.placement.chain import Stage, most_tokens, spans_of
from weft.inference.placement.prefill_cost import PrefillCost

CASES = 500
HOP_S = 0.002


def bubbles(draw, at_s):
    found = []
    for _ in range(draw.randint(0, 8)):
        at_s += draw.uniform(0.0, 0.3)
        found.append((at_s, at_s := at_s + draw.uniform(0.001, 0.2)))
    return found


def stages_of(draw, count):
    found = []
    for _ in range(count):
        a, b = draw.uniform(0.0, 0.02), draw.uniform(1e-5, 5e-4)
        free_s = draw.uniform(0.0, 0.3)
        found.append(Stage(bubbles(draw, 0.0), free_s, lambda tokens, _, a=a, b=b: a + b * tokens))
    return found


def test_a_grant_fits_a_bubble_of_every_stage_and_one_token_more_does_not():
    draw, granted = random.Random(1), 0
    for _ in range(CASES):
        stages, at_s, wanted = stages_of(draw, draw.randint(1, 6)), draw.uniform(0.0, 0.5), draw.randint(1, 2000)
        tokens = most_tokens(stages, wanted, at_s, HOP_S)
        assert 0 <= tokens <= wanted
        if tokens < wanted:
            assert spans_of(stages, tokens + 1, at_s, HOP_S) is None
        if not tokens:
            continue
        granted += 1
        spans = spans_of(stages, tokens, at_s, HOP_S)
        assert spans is not None and len(spans) == len(stages)
        arrives_s = at_s
        for stage, (begin_s, end_s) in zip(stages, spans, strict=True):
            assert begin_s >= max(arrives_s, stage.free_s)
            assert end_s == begin_s + stage.seconds(tokens, begin_s)
            assert any(opens_s <= begin_s and end_s <= closes_s for opens_s, closes_s in stage.bubbles), "in training"
            arrives_s = end_s + HOP_S
    assert CASES / 4 < granted < CASES


def test_fewer_tokens_end_no_later_at_any_stage():
    draw = random.Random(2)
    for _ in range(CASES):
        stages, few = stages_of(draw, draw.randint(1, 6)), draw.randint(1, 500)
        more = spans_of(stages, few + draw.randint(1, 500), 0.0, HOP_S)
        if more is not None:
            less = spans_of(stages, few, 0.0, HOP_S)
            assert less is not None
            assert all(early[1] <= late[1] for early, late in zip(less, more, strict=True))


@pytest.mark.parametrize("left_s", [0.0, 0.01, 0.04, 0.2, 3.0])
@pytest.mark.parametrize("context", [0, 700])
def test_one_stage_gets_what_the_cost_model_alone_grants(left_s, context):
    cost = PrefillCost()
    for tokens in range(16, 400, 16):
        cost.observe(tokens, 0, 0.0, 0.004 + 4e-5 * tokens + 2e-8 * tokens * tokens)
    stage = Stage([(1.0, 1.0 + left_s)], 0.0, lambda tokens, _: cost.predict_s(tokens, context, 0.03))
    alone = cost.tokens_within(left_s, context, 0.03, 2048)
    assert most_tokens([stage], 2048, 1.0, HOP_S) == pytest.approx(alone, abs=1)
