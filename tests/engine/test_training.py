"""Losses of the engine equal those of a single process, whatever the schedule and layout."""

import random
from itertools import combinations, product
from math import comb

import pytest

from tests.engine.tiny import many_losses, reference_losses, tiny_config, with_costs
from tests.pipeline.random_schedules import random_placement, random_schedule
from weft.conf.schema import PairChoice
from weft.pipeline.serialization import schedule_to_json
from weft.pipeline.validation import validate
from weft.tools.ranks import run_ranks

STEPS = 5
"""Three steps of warm-up, and two of decay."""

# (stages, keywords of tiny_config); the job has four ranks, so two stages make two replicas.
FAST = {
    "1f1b": (4, {}),
    "gpipe, 5 micro-batches": (4, {"schedule": "gpipe", "microbatches": 5}),
    "two replicas, ZeRO-1, tied": (2, {"zero": 1, "tied": True}),
    "tied over four stages": (4, {"tied": True}),
    "w, fold, tied": (4, {"schedule": "w", "placement": "fold", "tied": True}),
    "auto, site fold": (4, {"schedule": "auto", "placement": "site_fold", "sites": (2, 2)}),
    "two sites, a DP-cell of two replicas": (2, {"sites": (1, 1), "cell": 2, "zero": 1}),
    "two sites, a DP-cell of two site folds": (
        2,
        {"schedule": "auto", "placement": "site_fold", "sites": (1, 1), "cell": 2, "zero": 1, "layers": 8},
    ),
    "zbv, LoRA": (4, {"schedule": "zbv", "placement": "fold", "lora": True}),
    "bf16, two replicas": (2, {"precision": "bf16"}),
    "one stage, four replicas": (1, {"zero": 1}),
}
PLACED = [
    ("gpipe", "straight"),
    ("1f1b", "straight"),
    ("interleaved", "straight"),
    ("auto", "straight"),
    ("w", "fold"),
    ("w", "site_fold"),
    ("dualpipev", "fold"),
    ("zbv", "fold"),
    ("auto", "fold"),
    ("auto", "site_fold"),
]
OPTIONS = ({"tied": True}, {"lora": True}, {"zero": 1}, {"precision": "bf16"})
# Bits of OPTIONS; few, because each is trained by a single process as well.
CHOICES = (0b0000, 0b0011, 0b0101)


def _slow() -> dict:
    """Each schedule on its placement with so many stages twice: what one run leaves out, the other has."""
    cases = {}
    for number, ((schedule, placement), stages) in enumerate(product(PLACED, (2, 4))):
        some = CHOICES[number % len(CHOICES)]
        for chosen in (some, ~some):
            more = {
                key: value for at, option in enumerate(OPTIONS) if chosen >> at & 1 for key, value in option.items()
            }
            keywords = {"microbatches": 8 if schedule == "dualpipev" else 5, **more}
            name = f"{schedule} {placement} {stages} stages {more}"
            cases[name] = (stages, {"schedule": schedule, "placement": placement, **keywords})
    return cases


SLOW = _slow()


def _config(stages, keywords):
    """Two ranks have four virtual stages at most, so four layers do."""
    keywords = {"layers": 4 if stages == 2 else 8, **keywords}
    sites = (stages // 2, stages - stages // 2) if keywords.get("placement") == "site_fold" else ()
    return tiny_config(stages=stages, **{"sites": sites, **keywords})


def test_the_matrix_has_every_pair():
    """Each schedule and number of stages with and without each option, and each option with and without each other."""
    layouts, options = set(), set()
    for stages, keywords in SLOW.values():
        on = [next(iter(option)) in keywords for option in OPTIONS]
        layouts |= {(keywords["schedule"], keywords["placement"], stages, at, here) for at, here in enumerate(on)}
        options |= {(at, on[at], other, on[other]) for at, other in combinations(range(len(on)), 2)}
    assert len(layouts) == len(PLACED) * 2 * len(OPTIONS) * 2
    assert len(options) == 4 * comb(len(OPTIONS), 2)


def _compare(cases, steps, timeout_s, costs=None):
    configs = [_config(*case) for case in cases.values()]
    if costs is not None:
        configs = [with_costs(config, costs) for config in configs]
    for config in configs:
        config.train.steps = steps  # so that learning rates come down to their end
    results = run_ranks(4, many_losses, configs, steps, timeout_s=timeout_s)
    assert all(result == results[0] for result in results), "ranks report different losses"
    wrong = {}
    for name, config, losses in zip(cases, configs, results[0], strict=True):
        precision = config.train.precision.value
        expected = reference_losses(config, 4 // config.pipeline.stages, steps)
        if losses != pytest.approx(expected, rel=1e-5 if precision == "fp32" else 1e-3):
            wrong[name] = (losses, expected)
    assert not wrong


@pytest.mark.timeout(300)
def test_any_valid_schedule_trains(tmp_path):
    """Random placements and orders, with split backwards and strand pairs kept together."""
    rng = random.Random(4)
    configs = []
    for case in range(6):
        num_ranks = rng.choice([2, 4])
        placement = random_placement(rng, num_ranks)
        while placement.num_stages > 8:
            placement = random_placement(rng, num_ranks)
        schedule = random_schedule(rng, placement, rng.randint(1, 7))
        validate(schedule)
        path = tmp_path / f"{case}.json"
        path.write_text(schedule_to_json(schedule))
        config = tiny_config("file", stages=num_ranks, microbatches=schedule.num_microbatches)
        config.pipeline.schedule_file = str(path)
        config.pipeline.pairs = PairChoice.always
        configs.append(config)
    results = run_ranks(4, many_losses, configs, 3, timeout_s=280)
    for config, losses in zip(configs, results[0], strict=True):
        expected = reference_losses(config, 4 // config.pipeline.stages, 3)
        assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.timeout(300)
def test_losses_equal_a_single_process():
    _compare(FAST, STEPS, timeout_s=240)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_losses_equal_a_single_process_where_communication_is_slow(tmp_path):
    """Buckets are cut and collectives divided as plans for slow links say."""
    _compare({name: case for name, case in FAST.items() if "zero" in case[1]}, 4, 380, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_every_schedule_placement_and_variant():
    _compare(SLOW, STEPS, timeout_s=1400)
