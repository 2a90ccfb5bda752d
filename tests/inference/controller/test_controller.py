"""The controller before fake workers: what it takes, where it sends it, and what goes wrong."""

import asyncio
import json

import pytest

from tests.inference.controller.fake_workers import TOKEN_S, FakeBoard, FakeWorkers, controller
from weft.conf.schema import ControllerConfig, PrefillConfig, PrefillWorkerConfig
from weft.inference.controller.fleet import Fleet
from weft.inference.placement.prefill_cost import TRUSTED, PrefillCost

PATH = "/v1/completions"
PREFILL = {"model": "tiny", "prompt": "one two three", "max_tokens": 1}
TOO_LARGE = 5_000_000
FAULTS = ["dead", "dying", "hung", "broken"]
REMOTE = {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}


def run(scenario):
    return asyncio.run(asyncio.wait_for(scenario, 20))


def test_a_request_and_its_answer_pass_unchanged():
    async def scenario():
        workers = FakeWorkers(1)
        async with controller(workers) as client:
            body = PREFILL | REMOTE | {"stream": False}
            answer = await client.post(PATH, json=body, headers={"X-Request-Id": "abc"})
            assert answer.status_code == 200
            assert answer.json() == {"worker": "w0", "kv_transfer_params": {"do_remote_prefill": True}}
            assert answer.headers["x-weft-worker"] == "0"
            ((_, request, seen),) = workers.seen
            assert seen == body
            assert request.headers["x-request-id"] == "abc"
            assert request.url.path == PATH
            chat = {"messages": [{"role": "user", "content": "hello"}], "max_completion_tokens": 1}
            assert (await client.post("/v1/chat/completions", json=chat)).status_code == 200
            assert (await client.get("/v1/models")).json() == {"data": [{"id": "tiny"}]}

    run(scenario())


def test_the_worker_that_finishes_soonest_gets_it():
    async def scenario():
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

    run(scenario())


def test_a_body_that_is_said_to_be_too_large_is_not_waited_for():
    async def scenario():
        async def drip():
            while True:
                yield b" "
                await asyncio.sleep(0.01)

        async with controller(FakeWorkers(1), receive_timeout_s=0.2) as client:
            answer = await client.post(PATH, content=drip(), headers={"Content-Length": str(TOO_LARGE)})
            assert answer.status_code == 413

    run(scenario())


@pytest.mark.parametrize(
    ("body", "status", "part"),
    [
        (b"", 400, "not valid JSON"),
        (b"[]", 400, "not a JSON object"),
        (b'{"prompt": ' + b"[" * 10**5, 400, "nested deeper than 32"),
        (json.dumps(PREFILL | {"max_tokens": 7}), 400, "set max_tokens=1, or kv_transfer_params"),
        (json.dumps(PREFILL | {"prompt": [1] * 10**6}), 400, "the prompt has about 1000000 tokens"),
        (json.dumps(PREFILL | {"prompt": {"a": 1}}), 400, "give a string, a list of tokens"),
        (json.dumps({"messages": "hi", "max_tokens": 1}), 400, "give a list of {role, content}"),
        (b" " * TOO_LARGE, 413, "larger than 4194304"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(body, status, part):
    async def scenario():
        workers = FakeWorkers(1)
        async with controller(workers) as client:
            answer = await client.post(PATH, content=body)
            assert answer.status_code == status
            assert part in answer.json()["error"]["message"]
            assert not workers.seen
            metrics = (await client.get("/metrics")).text
            assert f'weft_prefill_refusals_total{{status="{status}"}} 1.0' in metrics

    run(scenario())


def test_a_worker_that_decodes_gets_any_request():
    async def scenario():
        async with controller(FakeWorkers(1), allow_decode=True) as client:
            assert (await client.post(PATH, json=PREFILL | {"max_tokens": 7})).status_code == 200

    run(scenario())


def test_who_has_no_key_gets_nothing_but_health():
    async def scenario():
        workers = FakeWorkers(1)
        async with controller(workers, api_key="secret") as client:
            for path in ("/v1/models", "/metrics"):
                assert (await client.get(path)).status_code == 401
            for value in ("Bearer wrong", "secret", "Bearer sécret"):
                headers = {"Authorization": value.encode()}
                assert (await client.post(PATH, json=PREFILL, headers=headers)).status_code == 401
            assert not workers.seen
            assert (await client.get("/health")).status_code == (await client.get("/ready")).status_code == 200
            for scheme in ("Bearer", "bearer", "BEARER"):
                headers = {"Authorization": f"{scheme} secret"}
                assert (await client.post(PATH, json=PREFILL, headers=headers)).status_code == 200
            assert workers.seen[0][1].headers["authorization"] == "Bearer secret"

    run(scenario())


def test_what_would_be_late_is_refused_at_once_with_when_to_come_again():
    async def scenario():
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

    run(scenario())


def test_queues_are_bounded():
    async def scenario():
        workers = FakeWorkers(2)
        workers.fault = {"w0": "slow", "w1": "slow"}
        async with controller(workers, max_queue=2, answer_slack_s=5.0) as client:
            answers = await asyncio.gather(*(client.post(PATH, json=PREFILL) for _ in range(8)))
            assert sorted(answer.status_code for answer in answers) == [200] * 4 + [503] * 4
            refused = next(answer for answer in answers if answer.status_code == 503)
            assert "every queue holds 2 requests" in refused.json()["error"]["message"]
            assert not any(worker.tickets for worker in client.fleet.workers)

    run(scenario())


@pytest.mark.parametrize("fault", FAULTS)
def test_when_a_worker_fails_another_takes_over(fault):
    async def scenario():
        workers = FakeWorkers(2)
        # The second worker's bubble is later, so the first worker is the one that is asked first.
        async with controller(workers, [FakeBoard(), FakeBoard(((5.0, 10.0),))]) as client:
            workers.fault = {"w0": fault}
            answers = [await client.post(PATH, json=PREFILL) for _ in range(4)]
            assert [answer.json().get("worker") for answer in answers] == ["w1"] * 4
            # One that answers with an error lives.
            up = float(fault == "broken")
            assert f'weft_prefill_worker_up{{worker="0"}} {up}' in (await client.get("/metrics")).text

    run(scenario())


@pytest.mark.parametrize("fault", ["dead", "hung"])
def test_the_caller_gets_an_error_when_all_workers_fail(fault):
    async def scenario():
        workers = FakeWorkers(2)
        async with controller(workers) as client:
            workers.fault = {"w0": fault, "w1": fault}
            answer = await client.post(PATH, json=PREFILL)
            if fault == "hung":  # it may have been the prompt's fault
                assert answer.status_code == 502
                assert "2 workers stopped answering while processing this prompt" in answer.json()["error"]["message"]
                answer = await client.post(PATH, json=PREFILL)
            assert answer.status_code == 503
            assert "no worker answers" in answer.json()["error"]["message"]
            assert answer.headers["retry-after"]
            ready = await client.get("/ready")
            assert (ready.status_code, ready.json()) == (503, {"workers": 2, "up": 0, "serving": 0})
            assert (await client.get("/health")).status_code == 200

    run(scenario())


@pytest.mark.parametrize(("fault", "status", "up"), [("broken", 500, 4), ("dying", 502, 2)])
def test_a_prompt_that_breaks_workers_meets_two_of_them_only(fault, status, up):
    async def scenario():
        workers = FakeWorkers(4)
        async with controller(workers) as client:
            workers.fault = dict.fromkeys(workers.names, fault)
            answer = await client.post(PATH, json=PREFILL)
            assert answer.status_code == status
            assert len(workers.seen) == len({name for name, *_ in workers.seen}) == 2
            assert (await client.get("/ready")).json()["up"] == up
            for name in workers.names:
                if workers.fault[name] == fault:
                    del workers.fault[name]
            assert (await client.post(PATH, json=PREFILL)).status_code == 200

    run(scenario())


def test_a_slow_worker_keeps_its_prompts():
    """Later than expected by many times the slack, and still asked once only."""

    async def scenario():
        workers = FakeWorkers(2)
        async with controller(workers, answer_slack_s=0.05, probe_s=0.05) as client:
            workers.fault = dict.fromkeys(workers.names, "slow")
            answers = await asyncio.gather(*(client.post(PATH, json=PREFILL) for _ in range(20)))
            assert [answer.status_code for answer in answers] == [200] * 20
            assert len(workers.seen) == 20
            assert workers.asked < 100  # not by each of those that wait
            assert (await client.get("/ready")).json() == {"workers": 2, "up": 2, "serving": 2}

    run(scenario())


@pytest.mark.parametrize("fault", ["mute", "crossing"])
def test_a_worker_that_does_not_say_how_it_is_counts_as_alive_for_a_while(fault):
    async def scenario():
        workers = FakeWorkers(1)
        async with controller(workers, answer_slack_s=0.05, probe_s=0.05, silence_s=30.0) as client:
            workers.fault = {"w0": fault}
            answers = [await client.post(PATH, json=PREFILL) for _ in range(2)]
            assert [answer.status_code for answer in answers] == [200, 200]
            assert len(workers.seen) == 2

    run(scenario())


def test_two_hundred_at_once_are_answered_by_one_slow_worker():
    async def scenario():
        workers = FakeWorkers(1)
        settings = {"max_queue": 256, "deadline_s": 300.0, "answer_slack_s": 0.05, "probe_s": 0.05}
        async with controller(workers, [FakeBoard([(0.0, 600.0)])], **settings) as client:
            workers.fault = {"w0": "busy"}
            answers = await asyncio.gather(*(client.post(PATH, json=PREFILL) for _ in range(200)))
            assert [answer.status_code for answer in answers] == [200] * 200
            assert len(workers.seen) == 200

    run(scenario())


def test_a_fresh_worker_is_tried_before_anyone_is_refused(tmp_path):
    """One sample in its cost model, of a first step that took seconds: nothing to refuse prompts by."""
    cost, file = PrefillCost(), tmp_path / "cost.json"
    cost.observe(16, 0, 1.0, 6.7)
    cost.save(file)

    async def scenario():
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

    run(scenario())


def test_a_fresh_worker_spoils_no_others_predictions(tmp_path):
    known, fresh = PrefillCost(), PrefillCost()
    for tokens in range(16, 1616, 16):
        known.observe(tokens, 0, 0.05, 0.001 + tokens * 1e-5)
    known.save(tmp_path / "known.json")
    fresh.observe(16, 0, 1.0, 6.7)
    fresh.save(tmp_path / "fresh.json")
    workers = [
        (PrefillWorkerConfig(url=f"http://{name}", boards=["x"], cost=str(tmp_path / f"{name}.json")), FakeBoard())
        for name in ("fresh", "known")
    ]
    fleet = Fleet(workers, ControllerConfig(), PrefillConfig())
    for worker in fleet.workers:
        fleet.set_up(worker, True)
    ticket = fleet.place(1200, 1.0)
    assert ticket.worker == 1 and ticket.expected_s - ticket.placed_s < 0.1
    # Where the others would be late, it is tried.
    assert fleet.place(1200, 0.001).worker == 0


def test_prompts_that_wait_are_sent_back_when_training_ends(monkeypatch):
    monkeypatch.setattr("weft.inference.controller.worker.QUIET_S", 0.1)

    async def scenario():
        workers, board = FakeWorkers(1), FakeBoard()
        async with controller(workers, [board], answer_slack_s=0.05, probe_s=0.05) as client:
            workers.fault = {"w0": "slow"}
            asked = asyncio.create_task(client.post(PATH, json=PREFILL))
            while not workers.seen:
                await asyncio.sleep(0.01)
            board.bubbles = ()
            answer = await asked
            assert answer.status_code == 503
            assert "training has published no bubbles" in answer.json()["error"]["message"]

    run(scenario())


def test_prompts_that_wait_are_sent_back_as_soon_as_training_ends():
    """However far ahead their end was, and without the pause after which a silent trainer counts as ended."""

    async def scenario():
        workers, board = FakeWorkers(1), FakeBoard()
        async with controller(workers, [board], answer_slack_s=1000.0, probe_s=0.05) as client:
            workers.fault = {"w0": "slow"}
            asked = asyncio.create_task(client.post(PATH, json=PREFILL))
            while not workers.seen:
                await asyncio.sleep(0.01)
            board.upcoming = lambda _: None
            answer = await asked
            assert answer.status_code == 503 and answer.headers["retry-after"]
            assert "or has ended" in answer.json()["error"]["message"]

    run(scenario())


@pytest.mark.parametrize("tokens", [4096, 100_000])
def test_a_prompt_that_never_fits_is_left_to_the_worker_to_refuse(tokens):
    """As a stock server does, and not sent elsewhere with a time to come again."""

    async def scenario():
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

    run(scenario())


def test_a_prompt_that_is_never_answered_is_given_up():
    async def scenario():
        workers = FakeWorkers(1)
        async with controller(workers, answer_slack_s=0.05, answer_timeout_s=0.2) as client:
            workers.fault = {"w0": "slow"}
            answer = await client.post(PATH, json=PREFILL)
            assert answer.status_code == 504
            assert not client.fleet.workers[0].tickets

    run(scenario())


def test_a_trainer_that_is_silent_for_a_moment_refuses_no_request():
    async def scenario():
        workers, board = FakeWorkers(1), FakeBoard()
        async with controller(workers, [board], answer_slack_s=0.05, probe_s=0.02) as client:
            workers.fault = {"w0": "slow"}
            asked = asyncio.create_task(client.post(PATH, json=PREFILL))
            while not workers.seen:
                await asyncio.sleep(0.01)
            board.bubbles = ()
            await asyncio.sleep(0.1)
            answers = [await asked, await client.post(PATH, json=PREFILL)]
            assert [answer.status_code for answer in answers] == [200, 200]

    run(scenario())


def test_a_look_that_fails_is_not_the_last(monkeypatch):
    monkeypatch.setattr("weft.inference.controller.worker.QUIET_S", 0.0)

    async def scenario():
        workers, board = FakeWorkers(1), FakeBoard()
        async with controller(workers, [board], probe_s=0.02) as client:
            board.upcoming = None
            await asyncio.sleep(0.1)
            del board.upcoming
            board.bubbles = ()
            while (await client.get("/ready")).status_code != 503:
                await asyncio.sleep(0.02)

    run(scenario())


def test_a_worker_that_comes_back_is_used_again():
    async def scenario():
        workers = FakeWorkers(1)
        workers.fault = {"w0": "dead"}
        async with controller(workers, probe_s=0.05) as client:
            assert (await client.post(PATH, json=PREFILL)).status_code == 503
            workers.fault.clear()
            while (await client.get("/ready")).status_code == 503:
                await asyncio.sleep(0.02)
            assert (await client.post(PATH, json=PREFILL)).status_code == 200

    run(scenario())


def test_an_error_of_the_worker_about_the_request_is_the_callers():
    async def scenario():
        workers = FakeWorkers(2)
        workers.fault = {"w0": "strict", "w1": "strict"}
        async with controller(workers) as client:
            answer = await client.post(PATH, json=PREFILL)
            assert (answer.status_code, answer.json()) == (404, {"error": "no such model"})
            metrics = (await client.get("/metrics")).text
            assert "weft_prefill_ttft_seconds_count 0.0" in metrics
            assert 'weft_prefill_refusals_total{status="404"} 1.0' in metrics
            assert "weft_prefill_work_seconds_total{" not in metrics
            assert client.fleet.workers[0].slowdown.factor(0.0) == 1.0
        assert len(workers.seen) == 1

    run(scenario())


@pytest.mark.parametrize("fault", ["leaving", "full"])
def test_a_prompt_that_a_worker_drops_is_moved_and_not_counted_as_answered(fault):
    async def scenario():
        workers = FakeWorkers(4)
        boards = [FakeBoard()] * 3 + [FakeBoard([(5.0, 10.0)])]
        async with controller(workers, boards) as client:
            workers.fault = dict.fromkeys(workers.names[:3], fault)
            answer = await client.post(PATH, json=PREFILL)  # more workers than a prompt may break
            assert (answer.status_code, answer.json()["worker"]) == (200, "w3")
            workers.fault["w3"] = fault
            answer = await client.post(PATH, json=PREFILL)
            assert answer.status_code == 503 and answer.headers["retry-after"]
            assert "weft_prefill_ttft_seconds_count 1.0" in (await client.get("/metrics")).text

    run(scenario())


def test_prefills_for_another_decoder_are_bounded_and_several_at_once_refused():
    async def scenario():
        workers = FakeWorkers(1)
        async with controller(workers) as client:
            decoding = PREFILL | REMOTE | {"n": 3, "max_tokens": 99, "min_tokens": 4}
            assert (await client.post(PATH, json=decoding)).status_code == 200
            assert workers.seen[0][2] == decoding | {"n": 1, "max_tokens": 1, "min_tokens": 1}
            answer = await client.post(PATH, json=decoding | {"prompt": ["one", "two"]})
            assert answer.status_code == 400 and "one request for each prompt" in answer.json()["error"]["message"]
            answer = await client.post(PATH, content=rb'{"prompt": "\ud800", "max_tokens": 1}')
            assert answer.status_code == 400 and "surrogate" in answer.json()["error"]["message"]
            assert len(workers.seen) == 1

    run(scenario())


def test_a_header_in_any_encoding_is_forwarded():
    async def scenario():
        workers = FakeWorkers(1)
        async with controller(workers) as client:
            for value in ("é".encode(), b"\xe9"):
                answer = await client.post(PATH, json=PREFILL, headers={"X-Request-Id": value})
                assert answer.status_code == 200
                assert dict(workers.seen[-1][1].headers.raw)[b"x-request-id"] == value

    run(scenario())


def test_a_slow_list_of_models_takes_no_worker_down():
    async def scenario():
        workers = FakeWorkers(2)
        async with controller(workers) as client:
            workers.fault = {"w0": "slow"}
            assert (await client.get("/v1/models")).status_code == 200
            workers.fault["w1"] = "slow"
            assert (await client.get("/v1/models")).status_code == 503
            assert (await client.get("/ready")).json()["up"] == 2

    run(scenario())


def test_without_bubbles_nothing_is_granted():
    async def scenario():
        async with controller(FakeWorkers(1), [FakeBoard([])]) as client:
            answer = await client.post(PATH, json=PREFILL)
            assert answer.status_code == 503
            assert "training publishes no bubbles" in answer.json()["error"]["message"]

    run(scenario())


def test_bubbles_that_seem_too_short_are_tried_one_request_at_a_time():
    async def scenario():
        workers = FakeWorkers(1)
        workers.fault = {"w0": "slow"}
        async with controller(workers, [FakeBoard([(0.0, 0.01)])], answer_slack_s=5.0) as client:
            first, second = await asyncio.gather(*(client.post(PATH, json=PREFILL) for _ in range(2)))
            assert (first.status_code, second.status_code) == (200, 503)
            assert "no bubble is long enough" in second.json()["error"]["message"]

    run(scenario())


def test_a_caller_that_sends_slowly_is_not_waited_for():
    async def scenario():
        async def drip():
            for _ in range(100):
                yield b" "
                await asyncio.sleep(0.05)

        async with controller(FakeWorkers(1), receive_timeout_s=0.2) as client:
            answer = await client.post(PATH, content=drip())
            assert answer.status_code == 408

    run(scenario())


def test_metrics_count_what_happened():
    async def scenario():
        async with controller(FakeWorkers(2), probe_s=0.05) as client:
            for _ in range(3):
                await client.post(PATH, json=PREFILL)
            values = {}
            while float(values.get('weft_prefill_bubble_seconds_total{worker="0"}', 0)) <= 0.1:
                await asyncio.sleep(0.02)
                metrics = (await client.get("/metrics")).text
                values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
            assert sum(float(values.get(f'weft_prefill_grants_total{{worker="{n}"}}', 0)) for n in (0, 1)) == 3
            for name in ("ttft_predicted", "ttft", "lateness"):
                assert values[f"weft_prefill_{name}_seconds_count"] == "3.0"
            assert values['weft_prefill_queue{worker="0"}'] == "0.0"

    run(scenario())


def test_models_are_those_of_the_first_worker_that_answers():
    async def scenario():
        workers = FakeWorkers(3)
        async with controller(workers) as client:
            workers.fault = {"w0": "dead"}
            assert (await client.get("/v1/models")).json() == {"data": [{"id": "tiny"}]}
            metrics = (await client.get("/metrics")).text
            up = [f'weft_prefill_worker_up{{worker="{number}"}} {number and 1}.0' in metrics for number in range(3)]
            assert up == [True] * 3
            workers.fault = dict.fromkeys(workers.names, "dead")
            for _ in range(2):
                answer = await client.get("/v1/models")
                assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
                assert "no worker answers" in answer.json()["error"]["message"]

    run(scenario())


@pytest.mark.parametrize("deadline", ["0.9", "1", "86399.9"])
def test_a_deadline_may_be_short_or_almost_a_day(deadline):
    async def scenario():
        async with controller(FakeWorkers(1), [FakeBoard([(0.0, 4.0)])]) as client:
            answer = await client.post(PATH, json=PREFILL, headers={"X-Weft-Deadline-S": deadline})
            assert answer.status_code == 200

    run(scenario())


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("more", [0, 1])
def test_a_body_may_be_as_large_as_the_limit(more, told):
    """With and without a Content-Length."""

    async def scenario():
        body = json.dumps(PREFILL).encode()

        async def parts():
            yield body[:5]
            yield body[5:]

        async with controller(FakeWorkers(1), max_body_bytes=len(body) - more) as client:
            answer = await client.post(PATH, content=body if told else parts())
            assert answer.status_code == (413 if more else 200)

    run(scenario())
