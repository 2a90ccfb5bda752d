"""Tests of the known state of a worker: its bubbles, its cost model, its remaining work."""

import json
import os
from dataclasses import replace

import pytest

from weft.conf.schema import ControllerConfig, PrefillConfig, PrefillWorkerConfig
from weft.inference.controller.fleet import MOST_BUBBLES, NO_BUBBLES_S, Fleet
from weft.inference.controller.metrics import Metrics
from weft.inference.controller.peers import SILENT_S, Peers, PlacedWork
from weft.inference.controller.slowdown import MEMORY_S, SAMPLE_S, Slowdown
from weft.inference.controller.worker import LEAST_LEFT, QUIET_S, Ticket, Worker
from weft.inference.placement.prefill_cost import TRUSTED, PrefillCost
from weft.inference.requests import Refusal
from weft.inference.worker.command import stage_file


class Board:
    """Bubbles that a test sets, and how far they were asked for."""

    def __init__(self, *bubbles):
        self.bubbles, self.horizon_s = list(bubbles), None

    def upcoming(self, horizon_s):
        self.horizon_s = horizon_s
        return self.bubbles


class Clock:
    def __init__(self, now_s=1000.0):
        self.now_s = now_s

    def __call__(self):
        return self.now_s


def address(cost=""):
    return PrefillWorkerConfig(url="http://w/", boards=["x"], cost=str(cost))


def learnt(path, steps=TRUSTED, token_s=1e-3):
    cost = PrefillCost()
    for step in range(steps):
        cost.observe(16 + step, 0, 0.0, 0.002 + (16 + step) * token_s)
    cost.save(path)
    return cost


def ticket(expected_s, work_s=4.0, placed_s=0.0, worker=0):
    times = {"work_s": work_s, "placed_s": placed_s, "expected_s": expected_s, "queued_s": work_s}
    return Ticket(worker=worker, **times, passed_s=0.0, slowdown=0.0, waited=False, others_done_s=0.0)


def always_idle(now_s=1000.0):
    """A worker that is in a bubble all the time."""
    worker = Worker(0, address(), [Board((now_s, now_s + 100.0))])
    worker.refresh(now_s, 100.0, 0.9)
    worker.set_pattern(100.0, overhead_s=0.0, guard_s=0.0)
    return worker


@pytest.mark.parametrize(
    ("after_s", "left_s"), [(0.0, 4.0), (1.0, 3.0), (2.0, 2.0), (3.9, 0.2), (4.0, 0.2), (90.0, 0.2)]
)
def test_work_is_left_in_proportion_and_what_is_overdue_may_end_at_any_moment(after_s, left_s):
    worker = always_idle()
    worker.tickets = [ticket(1004.0)]
    assert worker.left_s(1000.0 + after_s) == pytest.approx(left_s) and left_s >= LEAST_LEFT * 4.0
    worker.tickets.append(ticket(1010.0, work_s=7.0))
    assert worker.left_s(1000.0 + after_s) == pytest.approx(left_s + 7.0)


def test_a_prompt_begins_when_the_one_before_it_ends():
    worker = always_idle()
    worker.tickets = [ticket(1004.0), ticket(1008.0)]
    worker.end(worker.tickets[0], 1010.0, answered=True)
    assert worker.left_s(1010.0) == pytest.approx(4.0)
    assert worker.left_s(1011.0) == pytest.approx(3.0)


def test_the_last_bubbles_stay_for_a_while_when_none_are_predicted():
    worker = Worker(0, address(), [Board()])
    assert worker.url == "http://w"
    worker.update_bubbles([[(1.0, 2.0)]], 100.0)
    worker.update_bubbles([[]], 100.0 + QUIET_S)
    assert worker.bubbles == [(1.0, 2.0)]
    worker.update_bubbles([[]], 100.0 + QUIET_S + 0.01)
    assert worker.bubbles == []
    worker.update_bubbles([[(1.0, 2.0)]], 200.0)
    worker.update_bubbles([None], 200.1)
    assert worker.bubbles == [], "they end at once with training"


def test_a_cost_model_is_read_again_when_its_file_changes(tmp_path):
    path = tmp_path / "cost.json"
    worker = Worker(0, address(path), [Board()])
    worker.reload_cost(0.9)
    assert worker.costs[0].steps == 0 and worker.learning, "not written yet"
    learnt(path, steps=TRUSTED - 1)
    worker.reload_cost(0.9)
    assert worker.costs[0].steps == TRUSTED - 1 and worker.learning and worker.costs[0].quantile == 0.9
    kept = worker.costs[0]
    worker.reload_cost(0.9)
    assert worker.costs[0] is kept, "as it was"
    learnt(path)
    os.utime(path, (1, 1))
    worker.reload_cost(0.9)
    assert worker.costs[0].steps == TRUSTED and not worker.learning
    path.write_text("{")
    worker.reload_cost(0.9)
    assert worker.costs[0].steps == TRUSTED
    assert not Worker(0, address(), [Board()]).learning, "one without a file is not waited for"


def fleet_of(*boards, clock, addresses=None, cost="", peers=None, **settings):
    """A fleet of workers that are up, each with one board."""
    served = zip(addresses or [address(cost)] * len(boards), ([board] for board in boards), strict=True)
    return all_up(Fleet(list(served), ControllerConfig(**settings), PrefillConfig(), clock, peers))


def test_a_prompt_goes_to_another_site_only_if_its_cache_arrives_sooner_and_in_time(tmp_path):
    """9 ms of the link for a token: 1.8 s for 200, which training leaves to caches."""
    clock = Clock()
    busy, idle = ((1004.0, 1010.0),), ((1000.0, 1010.0),)

    def made(near, far):
        there = PrefillWorkerConfig(url="http://far/")
        served = [(address(), [Board(*near)]), (there, [Board(*far)])]
        fleet = all_up(Fleet(served, ControllerConfig(), PrefillConfig(), clock, cache_token_s=0.009))
        fleet.workers[1].costs = [learnt(tmp_path / "reported")]
        fleet.refresh()
        return fleet

    fleet = made(busy, idle)
    assert fleet.place(200, 8.0).worker == 1  # there by 1002.1, here by 1004.3
    assert fleet.place(200, 8.0).worker == 1  # there by 1003.9, after the first one
    assert fleet.place(200, 8.0).worker == 0
    assert made(idle, idle).place(200, 8.0).worker == 0
    alone = made((), idle)
    assert alone.place(200, 2.5).worker == 1
    with pytest.raises(Refusal, match="would arrive late"):
        alone.place(200, 2.5)
    clock.now_s += 2.0
    assert alone.place(200, 2.5).worker == 1  # the first cache has arrived


def all_up(fleet):
    for worker in fleet.workers:
        fleet.set_up(worker, True)
    return fleet


def accepted(*fleets, prompts=200):
    """Return how many prompts are accepted by fleets that get them by turns."""
    count = 0
    for number in range(prompts):
        try:
            fleets[number % len(fleets)].place(200, 5.0)
        except Refusal as refusal:
            assert refusal.status == 503 and refusal.retry_after_s > 0
        else:
            count += 1
    return count


def test_bubbles_that_have_been_are_counted_once():
    clock, board = Clock(), Board((1000.0, 1002.0), (1005.0, 1009.0))
    made = fleet_of(board, clock=clock, deadline_s=30.0)
    assert board.horizon_s == 30.0
    lengths = []
    for clock.now_s in (1001.0, 1004.0, 1006.0, 1006.0, 1020.0):
        made.refresh()
        lengths.append(made.workers[0].bubble_s)
    assert lengths == [1.0, 2.0, 3.0, 3.0, 6.0]


def test_only_workers_that_are_up_and_have_bubbles_serve():
    clock = Clock()
    made = fleet_of(Board((1000.0, 1010.0)), Board(), Board((1000.0, 1010.0)), clock=clock)
    assert made.serving == 2
    clock.now_s = 1003.0
    made.set_up(made.workers[0], False)
    assert made.serving == 1
    assert [worker.heard_s for worker in made.workers] == [1000.0] * 3
    made.set_up(made.workers[2], True)
    assert made.workers[2].heard_s == 1003.0
    assert made.place(10, 30.0).worker == 2
    with pytest.raises(Refusal, match="training publishes no bubbles") as caught:
        made.place(10, 30.0, without=[2])
    assert caught.value.status == 503 and caught.value.retry_after_s == NO_BUBBLES_S
    with pytest.raises(Refusal, match="no worker answers"):
        made.place(10, 30.0, without=[1, 2])


def test_a_queue_is_full_at_its_limit_and_accepts_when_one_is_done():
    clock = Clock()
    made = fleet_of(Board((1000.0, 1010.0)), clock=clock, max_queue=2)
    first, second = made.place(10, 30.0), made.place(10, 30.0)
    assert second.expected_s >= first.expected_s + 0.9 * second.work_s, "one after the other"
    with pytest.raises(Refusal, match="every queue holds 2 requests"):
        made.place(10, 30.0)
    made.done(first)
    third = made.place(10, 30.0)
    assert third.worker == 0 and made.workers[0].tickets == [second, third]


def test_what_was_late_makes_what_follows_expected_later():
    clock = Clock()
    made = fleet_of(Board((1000.0, 1010.0)), clock=clock)
    for _ in range(3):
        late = made.place(1000, 30.0)
        clock.now_s += 3 * (late.expected_s - late.placed_s)
        made.done(late, answered=True)
    factor = made.workers[0].slowdown.factor(clock.now_s)
    assert factor == pytest.approx(3.0, rel=0.1)
    clock.now_s, work_s = 1010.0, late.work_s
    later = made.place(1000, 30.0)
    assert later.expected_s - later.placed_s == pytest.approx(factor * work_s, rel=0.1)
    # Refused, moved or abandoned: how long it took is no measure.
    clock.now_s += 5.0
    made.done(later)
    assert made.workers[0].slowdown.factor(clock.now_s) == factor


def test_a_slowdown_leaves_out_the_slowest_sample_and_old_ones():
    slowdown = Slowdown()
    assert slowdown.factor(5.0) == 1.0
    slowdown.learn(5.0, 20 * SAMPLE_S, SAMPLE_S)
    assert slowdown.factor(5.0) == 1.0, "one stall"
    for _ in range(10):
        slowdown.learn(10.0, 3 * SAMPLE_S, SAMPLE_S)
    assert slowdown.factor(10.0) == slowdown.factor(10.0 + MEMORY_S) == 3.0
    assert slowdown.factor(10.1 + MEMORY_S) == 1.0
    for _ in range(10):
        slowdown.learn(99.0, SAMPLE_S / 2, SAMPLE_S)
    assert slowdown.factor(99.0) == 1.0, "who is early is not faster the next time"


def test_prompts_that_end_together_are_one_sample():
    """A step of a worker can compute many: most of them take no time of their own."""
    slowdown = Slowdown()
    for _ in range(10):
        slowdown.learn(5.0, 2 * SAMPLE_S, SAMPLE_S / 8)
        for _ in range(7):
            slowdown.learn(5.0, 0.0, SAMPLE_S / 8)
    assert slowdown.factor(5.0) == 2.0


def test_metrics_say_what_was_placed_answered_moved_and_refused():
    clock, board = Clock(), Board((1000.0, 1010.0))
    made = fleet_of(board, Board(), clock=clock)
    metrics = Metrics(made)
    made.set_up(made.workers[1], False)
    made.workers[0].tickets = [ticket(1002.0)]
    made.workers[0].bubble_s = 12.5
    late = ticket(1000.3, work_s=0.25, placed_s=1000.0)
    metrics.granted(late)
    metrics.granted(ticket(1040.0, placed_s=1000.0, worker=1))
    metrics.answered(late, 1000.35)
    metrics.answered(ticket(1003.0, work_s=2.0, placed_s=1000.0), 1002.5)
    metrics.moved(late)
    metrics.refused(503)
    metrics.refused(503)
    lines = set(metrics.text().decode().splitlines())
    assert {
        'weft_prefill_grants_total{worker="0"} 1.0',
        'weft_prefill_grants_total{worker="1"} 1.0',
        'weft_prefill_refusals_total{status="503"} 2.0',
        'weft_prefill_moved_total{worker="0"} 1.0',
        'weft_prefill_work_seconds_total{worker="0"} 2.25',
        'weft_prefill_ttft_predicted_seconds_bucket{le="0.2"} 0.0',
        'weft_prefill_ttft_predicted_seconds_bucket{le="0.5"} 1.0',
        'weft_prefill_ttft_predicted_seconds_bucket{le="30.0"} 1.0',
        "weft_prefill_ttft_predicted_seconds_count 2.0",
        'weft_prefill_ttft_seconds_bucket{le="0.2"} 0.0',
        'weft_prefill_ttft_seconds_bucket{le="0.5"} 1.0',
        'weft_prefill_ttft_seconds_bucket{le="5.0"} 2.0',
        'weft_prefill_lateness_seconds_bucket{le="0.0"} 1.0',
        'weft_prefill_lateness_seconds_bucket{le="0.02"} 1.0',
        'weft_prefill_lateness_seconds_bucket{le="0.1"} 2.0',
        'weft_prefill_worker_up{worker="0"} 1.0',
        'weft_prefill_worker_up{worker="1"} 0.0',
        'weft_prefill_queue{worker="0"} 1.0',
        'weft_prefill_queue{worker="1"} 0.0',
        'weft_prefill_bubble_seconds_total{worker="0"} 12.5',
    } <= lines


def test_histograms_have_these_bounds():
    """Dashboards name them."""
    metrics = Metrics(fleet_of(Board(), clock=Clock()))
    found = {}
    for line in metrics.text().decode().splitlines():
        if "_bucket{le=" in line:
            name, _, bound = line.split(" ")[0].removesuffix('"}').partition('_bucket{le="')
            found.setdefault(name.removeprefix("weft_prefill_"), []).append(float(bound))
    seconds = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, float("inf")]
    late = [0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0, float("inf")]
    assert found == {"ttft_predicted_seconds": seconds, "ttft_seconds": seconds, "lateness_seconds": late}


def test_prompts_behind_an_overdue_one_are_still_to_come():
    """A worker that was stopped has done nothing of them, however late they are."""
    worker = always_idle()
    worker.tickets = [ticket(1001.0 + n, work_s=1.0) for n in range(50)]
    assert worker.left_s(1090.0) == pytest.approx(49.05)


def test_two_controllers_count_each_others_prompts(tmp_path):
    """The placed work of one controller is excluded for the other, until it has finished; see test_admission.py as
    well."""
    clock = Clock()
    alone = accepted(fleet_of(Board((1000.0, 1010.0)), clock=clock, max_queue=500))
    peers = [Peers(tmp_path / "boards") for _ in range(2)]
    one, other = (fleet_of(Board((1000.0, 1010.0)), clock=clock, max_queue=500, peers=each) for each in peers)
    one.refresh()
    assert alone - 1 <= accepted(one, other) <= alone
    # What one has finished is free for the other.
    for done in list(one.workers[0].tickets):
        one.done(done)
    assert other.place(200, 5.0)
    one.close()
    other.close()
    assert not list((tmp_path / "boards").iterdir())


def test_what_a_controller_that_died_or_stopped_has_placed_is_not_counted(tmp_path, monkeypatch):
    folder, now_s = tmp_path / "boards", 1000.0
    monkeypatch.setattr("weft.inference.controller.peers.monotonic", lambda: now_s)
    mine = Peers(folder)
    dead = folder / "controller-1-0.json"
    dead.write_text(json.dumps({"process": [os.getpid(), 1], "at_s": now_s, "work": {"w": [5.0, 0.0]}}))
    broken = folder / "controller-2-0.json"
    broken.write_text("{")
    mine.refresh()
    assert not dead.exists() and broken.exists() and not mine.work()
    other = Peers(folder)
    mine.refresh()
    other.publish({"w": PlacedWork(2.0, 1.0), "v": PlacedWork(0.12345678901234, 0.0)})
    other.publish({"w": PlacedWork(1.5, 1.5)})
    assert mine.work() == {"w": PlacedWork(1.5, 1.5)}
    now_s += SILENT_S + 0.1
    assert mine.work() == {"w": PlacedWork(0.0, 1.5)}, "stopped; what it has done was done"
    other.close()
    mine.refresh()
    assert not mine.work()
    mine.close()


def test_controllers_that_place_at_the_same_time_accept_no_more_than_fits(tmp_path):
    """Between what one counts and what it publishes, the other publishes as well."""
    clock, folder = Clock(), tmp_path / "boards"
    made = [fleet_of(Board((1000.0, 1010.0)), clock=clock, max_queue=500, peers=Peers(folder)) for _ in range(2)]
    alone = fleet_of(Board((1000.0, 1010.0)), clock=clock, max_queue=500)
    fits = accepted(alone)
    made[0].refresh()
    publish, placed = made[0]._peers.publish, []

    def publish_after_the_other(work):
        made[0]._peers.publish = publish
        placed.append(accepted(made[1], prompts=1))
        publish(work)

    for _ in range(100):
        made[0]._peers.publish = publish_after_the_other
        placed.append(accepted(made[0], prompts=1))
    assert fits - 2 <= sum(placed) <= fits
    for fleet in made:
        fleet.close()


def test_controllers_may_reach_a_worker_by_different_addresses(tmp_path):
    clock, folder = Clock(), tmp_path / "boards"
    urls = ("http://127.0.0.1:8301", "http://localhost:8301/")
    one, other = (
        fleet_of(Board((1000.0, 1010.0)), clock=clock, addresses=[replace(address(), url=url)], peers=Peers(folder))
        for url in urls
    )
    one.refresh()
    before = one.place(1000, 5.0)
    assert other.place(1000, 5.0).expected_s > before.expected_s + before.work_s / 2
    for fleet in (one, other):
        fleet.close()


def test_a_worker_that_has_learnt_little_gets_prompts_that_would_wait_elsewhere(tmp_path):
    """Otherwise it would learn nothing as long as others are fast enough for the deadline."""
    learnt(tmp_path / "known.json")
    learnt(tmp_path / "fresh.json", steps=TRUSTED - 1)
    addresses = [address(tmp_path / f"{name}.json") for name in ("known", "fresh")]
    made = fleet_of(*(Board((1000.0, 1010.0)) for _ in addresses), clock=Clock(), addresses=addresses)
    tickets = [made.place(100, 60.0) for _ in range(TRUSTED + 3)]
    assert [each.worker for each in tickets] == [0, *[1] * TRUSTED, 0, 0], "as many as it has to learn"
    made.done(tickets[1])
    assert made.place(100, 60.0).worker == 1


def test_workers_that_have_learnt_little_promise_no_more_than_a_few_prompts_too_many(tmp_path):
    """Their first burst would be late otherwise, whatever its deadline."""
    known = fleet_of(Board((1000.0, 1010.0)), clock=Clock(), max_queue=500)
    fresh = fleet_of(Board((1000.0, 1010.0)), clock=Clock(), max_queue=500, cost=tmp_path / "none.json")
    most = accepted(known)
    assert most < 100 and accepted(fresh) <= most + TRUSTED


def test_a_pipeline_gets_prompts_although_its_ranks_are_never_idle_together(tmp_path):
    path, clock = tmp_path / "cost.json", Clock()
    for stage in range(2):
        learnt(stage_file(path, stage))
    first, second = (Board(*((1000.0 + n + shift_s, 1000.4 + n + shift_s) for n in range(9))) for shift_s in (0.0, 0.5))
    of_two = replace(address(path), boards=["x", "y"], stages=2)
    made = all_up(Fleet([(of_two, [first, second])], ControllerConfig(), PrefillConfig(), clock))
    one, other = made.place(100, 8.0), made.place(100, 8.0)
    assert one.expected_s > 1000.5, "in the second stage's bubble"
    assert one.expected_s < other.expected_s < one.expected_s + 1.5
    first.bubbles = []
    clock.now_s += QUIET_S + 0.1
    made.refresh()
    assert not made.serving, "a stage without bubbles"


def test_predictions_of_a_long_deadline_are_as_much_work_as_of_a_short_one_and_repeat():
    horizons, clock = [], Clock()

    class Periodic(Board):
        def upcoming(self, horizon_s):
            horizons.append(horizon_s)
            return [(clock() + 0.5 * number, clock() + 0.5 * number + 0.4) for number in range(int(horizon_s / 0.5))]

    made = fleet_of(Periodic(), clock=clock, deadline_s=36_000.0, max_queue=500)
    made.refresh()
    assert horizons[-1] == pytest.approx(0.5 * MOST_BUBBLES) == made.horizon_s
    short = fleet_of(Periodic(), clock=clock, deadline_s=100.0)
    short.refresh()
    assert short.horizon_s == 100.0
    tokens = 3000
    for _ in range(200):  # far beyond the predicted bubbles
        ticket = made.place(tokens, 36_000.0)
    assert ticket.expected_s - clock() > 2 * made.horizon_s
