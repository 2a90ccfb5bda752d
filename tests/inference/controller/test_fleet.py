"""What is known of a worker: its bubbles, its cost model, the work that it has left."""

import json
import os

import pytest

from weft.conf.schema import ControllerConfig, PrefillConfig, PrefillWorkerConfig
from weft.inference.controller.fleet import NO_BUBBLES_S, QUIET_S, Fleet, Ticket, Worker
from weft.inference.controller.metrics import Metrics
from weft.inference.controller.peers import Peers
from weft.inference.controller.slowdown import HALVING_S, MOST, SHORTEST_S, WEIGHT, Slowdown
from weft.inference.placement.prefill_cost import TRUSTED, PrefillCost
from weft.inference.requests import Refusal


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


def ticket(begin_s, end_s, work_s=4.0, placed_s=0.0, worker=0):
    return Ticket(worker=worker, work_s=work_s, placed_s=placed_s, begin_s=begin_s, end_s=end_s, expected_s=end_s)


@pytest.mark.parametrize(
    ("now_s", "left_s"), [(5.0, 4.0), (10.0, 4.0), (15.0, 3.0), (20.0, 2.0), (29.0, 0.2), (29.9, 0.2), (99.0, 0.2)]
)
def test_work_is_left_in_proportion_and_what_is_overdue_may_end_at_any_moment(now_s, left_s):
    worker = Worker(0, address(), Board())
    worker.tickets = [ticket(10.0, 30.0)]
    assert worker.left_s(now_s) == pytest.approx(left_s)
    worker.tickets.append(ticket(1000.0, 1010.0, work_s=7.0))
    assert worker.left_s(now_s) == pytest.approx(left_s + 7.0)


def test_the_last_bubbles_stay_for_a_while_when_none_are_predicted():
    worker = Worker(0, address(), Board())
    assert worker.url == "http://w"
    worker.update_bubbles([(1.0, 2.0)], 100.0)
    worker.update_bubbles([], 100.0 + QUIET_S)
    assert worker.bubbles == [(1.0, 2.0)]
    worker.update_bubbles([], 100.0 + QUIET_S + 0.01)
    assert worker.bubbles == []


def test_a_cost_model_is_read_again_when_its_file_changes(tmp_path):
    path = tmp_path / "cost.json"
    worker = Worker(0, address(path), Board())
    worker.reload_cost(0.9)
    assert worker.cost.steps == 0 and worker.learning, "not written yet"
    learnt(path, steps=TRUSTED - 1)
    worker.reload_cost(0.9)
    assert worker.cost.steps == TRUSTED - 1 and worker.learning and worker.cost.quantile == 0.9
    kept = worker.cost
    worker.reload_cost(0.9)
    assert worker.cost is kept, "as it was"
    learnt(path)
    os.utime(path, (1, 1))
    worker.reload_cost(0.9)
    assert worker.cost.steps == TRUSTED and not worker.learning
    path.write_text("{")
    worker.reload_cost(0.9)
    assert worker.cost.steps == TRUSTED
    assert not Worker(0, address(), Board()).learning, "one without a file is not waited for"


def fleet_of(*boards, clock, cost="", peers=None, **settings):
    controller = ControllerConfig(**settings)
    made = Fleet([(address(cost), board) for board in boards], controller, PrefillConfig(), clock, peers)
    for worker in made.workers:
        made.set_up(worker, True)
    return made


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


def test_a_queue_is_full_when_it_says_so_and_has_room_when_one_is_done():
    clock = Clock()
    made = fleet_of(Board((1000.0, 1010.0)), clock=clock, max_queue=2)
    first, second = made.place(10, 30.0), made.place(10, 30.0)
    assert second.begin_s >= first.end_s - 1e-9, "one after the other"
    with pytest.raises(Refusal, match="every queue holds 2 requests"):
        made.place(10, 30.0)
    made.done(first)
    third = made.place(10, 30.0)
    assert third.worker == 0 and made.workers[0].tickets == [second, third]


def test_what_was_late_makes_what_follows_expected_later():
    clock = Clock()
    made = fleet_of(Board((1000.0, 1010.0)), clock=clock)
    on_time = made.place(100, 30.0)
    assert on_time.expected_s == on_time.end_s and on_time.placed_s == 1000.0
    made.done(on_time)
    clock.now_s = on_time.placed_s + 3 * max(on_time.end_s - on_time.placed_s, SHORTEST_S)
    made.learn_slowdown(on_time)
    factor = made.workers[0].slowdown.factor(clock.now_s)
    assert factor == pytest.approx(1.0 + WEIGHT * 2.0)
    later = made.place(100, 30.0)
    assert later.expected_s - clock.now_s == pytest.approx(factor * (later.end_s - clock.now_s))


def test_a_slowdown_is_an_average_that_fades():
    slowdown = Slowdown()
    assert slowdown.factor(5.0) == 1.0
    slowdown.learn(10.0, 0.0, 5.0)  # twice as long
    assert slowdown.factor(10.0) == pytest.approx(1.0 + WEIGHT)
    assert slowdown.factor(10.0 + HALVING_S) == pytest.approx(1.0 + WEIGHT / 2)
    slowdown.learn(10.0 + HALVING_S, 10.0 + HALVING_S - 1.0, 10.0 + HALVING_S)  # in time
    assert slowdown.factor(10.0 + HALVING_S) == pytest.approx(1.0 + WEIGHT / 2 * (1 - WEIGHT))
    early, short, long = Slowdown(), Slowdown(), Slowdown()
    early.learn(1.0, 0.0, 4.0)
    assert early.factor(1.0) == 1.0, "who is early is not faster the next time"
    short.learn(2 * SHORTEST_S, 0.0, SHORTEST_S / 100)
    assert short.factor(2 * SHORTEST_S) == pytest.approx(1.0 + WEIGHT)
    long.learn(1e6, 0.0, 1.0)
    assert long.factor(1e6) == pytest.approx(1.0 + WEIGHT * (MOST - 1.0))


def test_metrics_say_what_was_placed_answered_moved_and_refused():
    clock, board = Clock(), Board((1000.0, 1010.0))
    made = fleet_of(board, Board(), clock=clock)
    metrics = Metrics(made)
    made.set_up(made.workers[1], False)
    made.workers[0].tickets = [ticket(1000.0, 1002.0)]
    made.workers[0].bubble_s = 12.5
    late = ticket(1000.0, 1000.3, work_s=0.25, placed_s=1000.0)
    metrics.granted(late)
    metrics.granted(ticket(1000.0, 1040.0, placed_s=1000.0, worker=1))
    metrics.answered(late, 1000.35)
    metrics.answered(ticket(1000.0, 1003.0, work_s=2.0, placed_s=1000.0), 1002.5)
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


def test_bubbles_end_at_once_with_training():
    worker = Worker(0, address(), Board())
    worker.update_bubbles([(1.0, 2.0)], 100.0)
    worker.update_bubbles(None, 100.1)
    assert worker.bubbles == []


def test_prompts_behind_an_overdue_one_are_still_to_come():
    """A worker that was stopped has done nothing of them, however late they are."""
    worker = Worker(0, address(), Board())
    worker.tickets = [ticket(10.0 + n, 11.0 + n, work_s=1.0) for n in range(50)]
    assert worker.left_s(100.0) == pytest.approx(49.05)


def test_a_stall_is_forgotten_within_seconds():
    clock = Clock()
    made = fleet_of(Board((1000.0, 1010.0)), clock=clock)
    tickets = [made.place(10, 30.0) for _ in range(50)]
    clock.now_s += 6.0
    for late in tickets:
        made.learn_slowdown(late)
        made.done(late)
    assert made.workers[0].slowdown.factor(clock.now_s) > 2.0
    assert made.workers[0].slowdown.factor(clock.now_s + 5.0) < 1.1


def test_two_controllers_count_each_others_prompts(tmp_path):
    """Together they accept about what one accepts in the deadline, and not twice as much.

    Not exactly: the fixed cost of a bubble is counted once for all work that is known, and again for each placement.
    """

    def accepted(*fleets):
        count = 0
        for number in range(200):
            try:
                fleets[number % len(fleets)].place(200, 5.0)
            except Refusal as refusal:
                assert refusal.status == 503 and refusal.retry_after_s > 0
            else:
                count += 1
        return count

    clock = Clock()
    alone = accepted(fleet_of(Board((1000.0, 1010.0)), clock=clock, max_queue=500))
    peers = [Peers(tmp_path / "boards") for _ in range(2)]
    one, other = (fleet_of(Board((1000.0, 1010.0)), clock=clock, max_queue=500, peers=each) for each in peers)
    one.refresh()
    assert alone <= accepted(one, other) < 1.5 * alone
    # What one has finished is free for the other.
    for done in list(one.workers[0].tickets):
        one.done(done)
    assert other.place(200, 5.0)
    one.close()
    other.close()
    assert not list((tmp_path / "boards").iterdir())


def test_what_a_controller_that_died_has_placed_is_not_counted(tmp_path):
    folder = tmp_path / "boards"
    mine = Peers(folder)
    dead = folder / "controller-1-0.json"
    dead.write_text(json.dumps({"process": [os.getpid(), 1], "work_s": {"http://w": 5.0}}))
    broken = folder / "controller-2-0.json"
    broken.write_text("{")
    mine.look()
    assert not dead.exists() and broken.exists() and not mine.work_s()
    other = Peers(folder)
    mine.look()
    other.publish({"http://w": 2.0, "http://v": 0.12345678901234})
    other.publish({"http://w": 1.5})
    assert mine.work_s() == {"http://w": 1.5}
    other.close()
    mine.look()
    assert not mine.work_s()
    mine.close()


def test_a_worker_that_has_learnt_little_gets_prompts_that_would_wait_elsewhere(tmp_path):
    """Otherwise it would learn nothing as long as others are fast enough for the deadline."""
    learnt(tmp_path / "known.json")
    learnt(tmp_path / "fresh.json", steps=TRUSTED - 1)
    clock = Clock()
    workers = [(address(tmp_path / f"{name}.json"), Board((1000.0, 1010.0))) for name in ("known", "fresh")]
    made = Fleet(workers, ControllerConfig(), PrefillConfig(), clock)
    for worker in made.workers:
        made.set_up(worker, True)
    tickets = [made.place(100, 60.0) for _ in range(TRUSTED + 3)]
    assert [each.worker for each in tickets] == [0, *[1] * TRUSTED, 0, 0], "as many as it has to learn"
    made.done(tickets[1])
    assert made.place(100, 60.0).worker == 1
