"""The cost model of chunks: what it learns, and that it is cautious."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.inference.placement.prefill_cost import (
    GAPS_S,
    LATEST,
    LATEST_SCALE,
    OUTLIER,
    PRIOR_SCALE,
    TRUSTED,
    PrefillCost,
    scale_of,
)
from weft.inference.placement.prompt_work import PromptWork


def machine(tokens, context, gap_s, noise, *, a=4.6e-3, b=41.8e-6, c=34.2e-9):
    """A small Llama on one core, slower after a gap."""
    return (a + b * tokens + c * (tokens * context + tokens * tokens / 2)) * (1.0 + 2.0 * min(gap_s, 0.1) / 0.1) * noise


def learnt(seed, steps=400, **costs):
    draw = random.Random(seed)
    cost = PrefillCost(quantile=0.98)
    for _ in range(steps):
        n, context, gap_s = draw.randint(1, 512), draw.randint(0, 4096), draw.choice([0.0, 0.01, 0.2])
        cost.observe(n, context, gap_s, machine(n, context, gap_s, draw.lognormvariate(0, 0.05), **costs))
    return cost, draw


@pytest.mark.parametrize("scale", [0.02, 1.0, 30.0])
def test_it_is_rarely_too_low_and_seldom_far_too_high(scale):
    costs = {"a": 4.6e-3 * scale, "b": 41.8e-6 * scale, "c": 34.2e-9 * scale}
    cost, draw = learnt(1, **costs)
    late, ratios = 0, []
    for _ in range(500):
        n, context, gap_s = draw.randint(16, 512), draw.randint(0, 4096), draw.choice([0.0, 0.01, 0.2])
        real_s = machine(n, context, gap_s, draw.lognormvariate(0, 0.05), **costs)
        late += real_s > cost.predict_s(n, context, gap_s)
        ratios.append(cost.predict_s(n, context, gap_s) / real_s)
    assert late <= 25
    assert sorted(ratios)[250] < 1.5


def test_a_prompts_chunks_take_what_was_learnt():
    cost, _ = learnt(4)
    work = PromptWork.of(cost, gap_s=0.01, chunk_tokens=512, max_tokens=4096)
    for tokens, context in [(1, 0), (512, 0), (200, 3000)]:
        assert work.chunk_s(tokens, context) == pytest.approx(cost.predict_s(tokens, context, 0.01), rel=1e-6)
    assert (work.chunk_tokens, work.max_tokens) == (512, 4096)


def test_a_gap_before_costs_more():
    cost, _ = learnt(2)
    assert cost.predict_s(128, 0, 0.2) > 2 * cost.predict_s(128, 0, 0.0)


@given(
    st.integers(0, 30),
    st.floats(1e-4, 1.0),
    st.integers(0, 4096),
    st.sampled_from([0.0, 0.003, 0.2]),
    st.integers(0, 2048),
)
@settings(deadline=None)
def test_a_grant_is_the_longest_that_fits(seed, seconds, context, gap_s, most):
    cost, _ = learnt(seed % 3, steps=40)
    tokens = cost.tokens_within(seconds, context, gap_s, most)
    assert 0 <= tokens <= most
    if tokens:
        assert cost.predict_s(tokens, context, gap_s) <= seconds * (1 + 1e-9)
    if tokens < most:
        assert cost.predict_s(tokens + 1, context, gap_s) >= seconds * (1 - 1e-9)


def test_it_is_kept_between_runs(tmp_path):
    cost, _ = learnt(3)
    cost.save(tmp_path / "model.json")
    again = PrefillCost.load(tmp_path / "model.json", quantile=0.98)
    assert again == cost
    assert PrefillCost.load(tmp_path / "other.json", quantile=0.9) == PrefillCost(quantile=0.9)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 99}', '{"format": 1}'])
def test_a_file_that_is_no_cost_model_is_set_aside_and_costs_are_learnt_anew(tmp_path, caplog, text):
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"broken\.json"):
        PrefillCost.load(path, quantile=0.9)
    assert PrefillCost.load_or_set_aside(path, quantile=0.9) == PrefillCost(quantile=0.9)
    assert "broken.json" in caplog.text and (tmp_path / "broken.json.former").read_text() == text
    learnt(3)[0].save(path)
    assert PrefillCost.load(path, quantile=0.98).steps == 400


def test_each_class_of_gap_has_a_scale_of_its_own_once_it_has_been_seen_often_enough():
    """Until then it is the prior's; and only the last steps count."""
    cost = PrefillCost(quantile=1.0)
    for number in range(TRUSTED - 1):
        cost.observe(10 + number, 0, 0.0, (10 + number) * 1e-3)
    fit = cost._fit
    assert cost.predict_s(20, 0, 0.0) == pytest.approx(PRIOR_SCALE * cost.typical_s(20, 0))
    cost.observe(20, 0, 0.0, 20e-3)
    assert cost.predict_s(20, 0, 0.0) == pytest.approx(20e-3, rel=1e-3) and cost.steps == TRUSTED
    unseen_s = PRIOR_SCALE * cost.typical_s(20, 0)
    for edge in GAPS_S:
        seen = edge == GAPS_S[0]
        assert cost.predict_s(20, 0, edge * 0.999) == pytest.approx(20e-3 if seen else unseen_s, rel=1e-3)
        assert cost.predict_s(20, 0, edge) == pytest.approx(unseen_s)
    for tokens, seconds in ((0, 1.0), (-1, 1.0), (5, 0.0), (5, -1.0)):
        cost.observe(tokens, 0, 0.0, seconds)
    assert cost.steps == TRUSTED, "what cannot have been teaches nothing"
    assert fit != cost._fit


def test_a_cost_that_does_not_grow_with_what_is_attended_to_is_divided():
    cost = PrefillCost()
    cost._fit, cost._scales = (0.01, 1e-3, 0.0), [2.0] * len(cost._scales)
    assert cost.tokens_within(0.1, 500, 0.0, 10**6) == 40  # half of the seconds, less the step's own
    assert cost.tokens_within(0.1, 500, 0.0, 7) == 7
    assert cost.tokens_within(0.02, 0, 0.0, 7) == cost.tokens_within(0.1, 0, 0.0, 0) == 0
    cost._fit = (0.01, 0.0, 0.0)
    assert cost.tokens_within(0.1, 500, 0.0, 7) == 7


def test_it_says_what_it_has_learnt():
    cost = PrefillCost(quantile=1.0)
    assert str(cost).endswith("times the prior")
    cost._fit = (1.5e-3, 20e-6, 3e-9)
    cost._scales[0], cost._scales[2] = 1.25, 2.0
    for gap in (0, 2):
        cost._seen[gap].extend([(1, 0.0, 1.0)] * TRUSTED)
    text = "1.50 ms + 20.0 us n + 3.0 ns (n c + n^2 / 2), times 1.25 below 1 ms, 2.00 after 5 ms"
    assert str(cost) == text


@pytest.mark.parametrize("steps", [TRUSTED, 20, 49, 200])
@pytest.mark.parametrize("stall_s", [0.5, 5.0, 24.0])
def test_one_stall_does_not_change_a_prediction(tmp_path, steps, stall_s):
    """Neither in the class of idle time that it hit nor in another, now or after a restart."""
    cost, calm = PrefillCost(), PrefillCost()
    for model in (cost, calm):
        for number in range(steps):
            model.observe(16 + number, 0, 0.05, 0.002 + (16 + number) * 1e-4)
    cost.observe(16, 0, 0.05, stall_s)
    cost.save(tmp_path / "cost.json")
    again = PrefillCost.load(tmp_path / "cost.json", quantile=0.98)
    for gap_s in (0.0, 0.05, 1.0):
        calm_s = calm.predict_s(64, 0, gap_s)
        assert cost.predict_s(64, 0, gap_s) == pytest.approx(calm_s, rel=0.1)
        assert again.predict_s(64, 0, gap_s) == pytest.approx(calm_s, rel=0.1)


def test_a_stall_among_the_first_steps_does_not_spoil_the_fit():
    cost = PrefillCost()
    cost.observe(16, 0, 0.05, 24.0)
    for number in range(TRUSTED):
        cost.observe(16 + number, 0, 0.05, 0.002 + (16 + number) * 1e-4)
    assert cost.predict_s(64, 0, 0.05) < 3 * (0.002 + 64e-4)


def test_after_a_slow_period_a_few_steps_are_enough(tmp_path):
    """Also where it lasted until a restart."""
    cost = PrefillCost()
    for factor, steps in ((1.0, 50), (20.0, 30)):
        for number in range(steps):
            cost.observe(16 + number, 0, 0.05, factor * (0.002 + (16 + number) * 1e-4))
    real_s = 0.002 + 64e-4
    assert cost.predict_s(64, 0, 0.05) > 10 * real_s
    cost.save(tmp_path / "cost.json")
    cost = PrefillCost.load(tmp_path / "cost.json", quantile=0.98)
    for _ in range(LATEST):
        cost.observe(64, 0, 0.05, real_s)
    assert real_s < cost.predict_s(64, 0, 0.05) < 2 * LATEST_SCALE * real_s


def test_what_many_steps_take_is_no_outlier():
    rare, often = [1.0] * 95 + [2 * OUTLIER] * 5, [1.0, 1.0, 1.0, 1.0, 2 * OUTLIER] * 20
    assert scale_of(rare, 0.98) == 1.0
    assert scale_of(often, 0.98) == 2 * OUTLIER
    assert scale_of([*often, 1.0, 1.0, 1.0, 1.0], 0.98) == LATEST_SCALE
    assert scale_of([1.0, 1.1, 1.2, 1.3], 1.0) == 1.3


def test_scales_follow_the_fit_in_classes_that_get_no_steps():
    cost = PrefillCost()
    for number in range(40):
        cost.observe(100 + number, 0, 0.05, (100 + number) * 1e-3)
    for number in range(400):
        cost.observe(100 + number % 40, 0, 0.0, (100 + number % 40) * 1e-4)
    assert cost.predict_s(100, 0, 0.05) == pytest.approx(0.1, rel=0.05), "ten times as slow after a pause"
    assert cost.predict_s(100, 0, 0.0) == pytest.approx(0.01, rel=0.05)
