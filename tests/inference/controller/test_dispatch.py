"""Routes of prompts to workers, also while training is silent or ends."""

import asyncio

import pytest

from tests.inference.controller.fake_workers import PATH, PREFILL, TOKEN_S, FakeBoard, FakeWorkers, controller
from weft.conf.schema import ControllerConfig, PrefillConfig, PrefillWorkerConfig
from weft.inference.controller.fleet import Fleet
from weft.inference.placement.prefill_cost import TRUSTED, PrefillCost


async def test_the_worker_that_finishes_soonest_gets_it():
    workers = FakeWorkers(3)
    boards = [FakeBoard([(5.0, 9.0)]), FakeBoard([(0.0, 4.0)]), FakeBoard([])]
    async with controller(workers, boards) as client:
        for _ in range(3):
            await client.post(PATH, json=PREFILL)
        # A prompt for which the open bubble is too short, but the two that are left of it are not.
        await client.post(
            PATH, json=PREFILL | {"prompt": [1] * int(3.5 / TOKEN_S)}, headers={"X-Weft-Deadline-S": "60"}
        )
    assert [name for name, _, _ in workers.seen] == ["w1"] * 4


async def test_what_would_be_late_is_refused_at_once_with_when_to_come_again():
    workers = FakeWorkers(1)
    async with controller(workers, [FakeBoard([(4.5, 9.5)])]) as client:
        answer = await client.post(PATH, json=PREFILL, headers={"X-Weft-Deadline-S": "2"})
        assert answer.status_code == 503
        assert 2 <= int(answer.headers["retry-after"]) <= 4
        assert "or elsewhere" in answer.json()["error"]["message"]
        assert (await client.post(PATH, json=PREFILL)).status_code == 200
        for text in ("soon", "-1", "0", "86400", "nan", "inf"):
            assert (await client.post(PATH, json=PREFILL, headers={"X-Weft-Deadline-S": text})).status_code == 400
    assert len(workers.seen) == 1


async def test_queues_are_bounded():
    workers = FakeWorkers(2)
    workers.fault = {"w0": "slow", "w1": "slow"}
    async with controller(workers, max_queue=2, answer_slack_s=5.0) as client:
        answers = await asyncio.gather(*(client.post(PATH, json=PREFILL) for _ in range(8)))
        assert sorted(answer.status_code for answer in answers) == [200] * 4 + [503] * 4
        refused = next(answer for answer in answers if answer.status_code == 503)
        assert "every queue holds 2 requests" in refused.json()["error"]["message"]
        assert not any(worker.tickets for worker in client.fleet.workers)


async def test_two_hundred_at_once_are_answered_by_one_slow_worker():
    workers = FakeWorkers(1)
    settings = {"max_queue": 256, "deadline_s": 300.0, "answer_slack_s": 0.05, "probe_s": 0.05}
    async with controller(workers, [FakeBoard([(0.0, 600.0)])], **settings) as client:
        workers.fault = {"w0": "busy"}
        answers = await asyncio.gather(*(client.post(PATH, json=PREFILL) for _ in range(200)))
        assert [answer.status_code for answer in answers] == [200] * 200
        assert len(workers.seen) == 200


async def test_a_fresh_worker_is_tried_before_anyone_is_refused(tmp_path):
    """One sample in its cost model, of a first step that took seconds: nothing to refuse prompts by."""
    cost, file = PrefillCost(), tmp_path / "cost.json"
    cost.observe(16, 0, 1.0, 6.7)
    cost.save(file)
    workers = FakeWorkers(1)
    prompt = PREFILL | {"prompt": [1] * 1200}
    async with controller(workers, cost=str(file), probe_s=0.05) as client:
        answers = await asyncio.gather(*(client.post(PATH, json=prompt) for _ in range(4)))
        assert [answer.status_code for answer in answers] == [200] * 4
        for _ in range(TRUSTED):
            cost.observe(16, 0, 0.05, 6.7)
        cost.save(file)
        while (await client.post(PATH, json=prompt)).status_code != 503:
            await asyncio.sleep(0.02)


def test_a_fresh_worker_spoils_no_others_predictions(tmp_path):
    known, fresh = PrefillCost(), PrefillCost()
    for tokens in range(16, 1616, 16):
        known.observe(tokens, 0, 0.05, 0.001 + tokens * 1e-5)
    known.save(tmp_path / "known.json")
    fresh.observe(16, 0, 1.0, 6.7)
    fresh.save(tmp_path / "fresh.json")
    workers = [
        (PrefillWorkerConfig(url=f"http://{name}", boards=["x"], cost=str(tmp_path / f"{name}.json")), [FakeBoard()])
        for name in ("fresh", "known")
    ]
    fleet = Fleet(workers, ControllerConfig(), PrefillConfig())
    for worker in fleet.workers:
        fleet.set_up(worker, True)
    ticket = fleet.place(1200, 1.0)
    assert ticket.worker == 1 and ticket.expected_s - ticket.placed_s < 0.1
    # Where the others would be late, it is tried.
    assert fleet.place(1200, 0.001).worker == 0


async def asked_of_a_slow_worker(client, workers):
    """A request that a worker has and does not answer yet."""
    workers.fault = {"w0": "slow"}
    asked = asyncio.create_task(client.post(PATH, json=PREFILL))
    while not workers.seen:
        await asyncio.sleep(0.01)
    return asked


async def test_prompts_that_wait_are_sent_back_when_training_ends(monkeypatch):
    monkeypatch.setattr("weft.inference.controller.worker.QUIET_S", 0.1)
    workers, board = FakeWorkers(1), FakeBoard()
    async with controller(workers, [board], answer_slack_s=0.05, probe_s=0.05) as client:
        asked = await asked_of_a_slow_worker(client, workers)
        board.bubbles = ()
        answer = await asked
        assert answer.status_code == 503
        assert "training has published no bubbles" in answer.json()["error"]["message"]


async def test_prompts_that_wait_are_sent_back_as_soon_as_training_ends():
    """However far ahead their end was, and without the pause after which a silent trainer counts as ended."""
    workers, board = FakeWorkers(1), FakeBoard()
    async with controller(workers, [board], answer_slack_s=1000.0, probe_s=0.05) as client:
        asked = await asked_of_a_slow_worker(client, workers)
        board.upcoming = lambda _: None
        answer = await asked
        assert answer.status_code == 503 and answer.headers["retry-after"]
        assert "or has ended" in answer.json()["error"]["message"]


@pytest.mark.parametrize("tokens", [4096, 100_000])
async def test_a_prompt_that_never_fits_is_left_to_the_worker_to_refuse(tokens):
    """As a stock server does, and not sent elsewhere with a time to come again."""
    workers = FakeWorkers(1)
    async with controller(workers) as client:
        workers.fault = {"w0": "strict"}
        headers = {"X-Weft-Deadline-S": "0.5"}
        answer = await client.post(PATH, json=PREFILL | {"prompt": [1] * tokens}, headers=headers)
        assert answer.status_code == 404, "the worker's own answer"
        answer = await client.post(PATH, json=PREFILL | {"prompt": [1] * 4000}, headers=headers)
        assert answer.status_code == 503, "one that fits is measured by the deadline"
        short = {"prompt": [1] * tokens, "truncate_prompt_tokens": 10}
        assert (await client.post(PATH, json=PREFILL | short, headers=headers)).status_code == 404


async def test_a_trainer_that_is_silent_for_a_moment_refuses_no_request():
    workers, board = FakeWorkers(1), FakeBoard()
    async with controller(workers, [board], answer_slack_s=0.05, probe_s=0.02) as client:
        asked = await asked_of_a_slow_worker(client, workers)
        board.bubbles = ()
        await asyncio.sleep(0.1)
        answers = [await asked, await client.post(PATH, json=PREFILL)]
        assert [answer.status_code for answer in answers] == [200, 200]


async def test_without_bubbles_nothing_is_granted():
    async with controller(FakeWorkers(1), [FakeBoard([])]) as client:
        answer = await client.post(PATH, json=PREFILL)
        assert answer.status_code == 503
        assert "training publishes no bubbles" in answer.json()["error"]["message"]


async def test_bubbles_that_seem_too_short_are_tried_one_request_at_a_time():
    workers = FakeWorkers(1)
    workers.fault = {"w0": "slow"}
    async with controller(workers, [FakeBoard([(0.0, 0.01)])], answer_slack_s=5.0) as client:
        first, second = await asyncio.gather(*(client.post(PATH, json=PREFILL) for _ in range(2)))
        assert (first.status_code, second.status_code) == (200, 503)
        assert "no bubble is long enough" in second.json()["error"]["message"]
