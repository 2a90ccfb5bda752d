"""Workers that fail, hang, are slow or come back: their prompts move, and the caller gets an answer or an error."""

import asyncio
import contextlib
import re
from functools import partial

import pytest

from tests.inference.controller.fake_workers import PATH, PREFILL, FakeBoard, FakeWorkers, controller, fleet_of
from weft.inference.controller.clients import Clients
from weft.inference.controller.service import Service

FAULTS = ["dead", "dying", "crashing", "hung", "broken"]


@pytest.mark.parametrize("fault", FAULTS)
async def test_when_a_worker_fails_another_takes_over(fault):
    workers = FakeWorkers(2)
    # The second worker's bubble is later, so the first worker gets the first request.
    async with controller(workers, [FakeBoard(), FakeBoard(((5.0, 10.0),))]) as client:
        workers.fault = {"w0": fault}
        answers = [await client.post(PATH, json=PREFILL) for _ in range(4)]
        assert [answer.json().get("worker") for answer in answers] == ["w1"] * 4
        # One that answers with an error lives.
        up = float(fault == "broken")
        assert f'weft_prefill_worker_up{{worker="0"}} {up}' in (await client.get("/metrics")).text


@pytest.mark.parametrize("fault", ["dying", "crashing"])
async def test_a_prompt_whose_only_worker_ends_is_to_be_sent_again(fault):
    workers = FakeWorkers(1)
    async with controller(workers, probe_s=0.05) as client:
        workers.fault = {"w0": fault}
        answer = await client.post(PATH, json=PREFILL)
        assert answer.status_code == 503 and answer.headers["retry-after"]
        workers.fault.clear()
        while (await client.get("/ready")).status_code == 503:
            await asyncio.sleep(0.02)
        assert (await client.post(PATH, json=PREFILL)).status_code == 200


@pytest.mark.parametrize("fault", ["dead", "hung"])
async def test_the_caller_gets_an_error_when_all_workers_fail(fault):
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


async def test_a_worker_is_up_while_the_controller_itself_gets_no_processor(monkeypatch):
    workers, states = FakeWorkers(1), []
    async with controller(workers, probe_s=0.05, silence_s=0.3) as client:
        set_up = client.fleet.set_up
        monkeypatch.setattr(client.fleet, "set_up", lambda worker, up: (states.append(up), set_up(worker, up)))
        workers.fault = {"w0": "late"}
        while workers.asked < 6:
            await asyncio.sleep(0.01)
        assert states and all(states)


@pytest.mark.parametrize(("fault", "status", "up"), [("broken", 500, 4), ("dying", 502, 2)])
async def test_a_prompt_that_breaks_workers_meets_two_of_them_only(fault, status, up):
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


async def test_a_slow_worker_keeps_its_prompts():
    """Later than expected by many times the slack, and still asked once only."""
    workers = FakeWorkers(2)
    async with controller(workers, answer_slack_s=0.05, probe_s=0.05) as client:
        workers.fault = dict.fromkeys(workers.names, "slow")
        answers = await asyncio.gather(*(client.post(PATH, json=PREFILL) for _ in range(20)))
        assert [answer.status_code for answer in answers] == [200] * 20
        assert len(workers.seen) == 20
        assert workers.asked < 100  # not by each of those that wait
        assert (await client.get("/ready")).json() == {"workers": 2, "up": 2, "serving": 2}


@pytest.mark.parametrize("fault", ["mute", "crossing"])
async def test_a_worker_that_does_not_say_how_it_is_counts_as_alive_for_a_while(fault):
    """And its answers need not wait until it says so."""
    workers, settings = FakeWorkers(1), {"answer_slack_s": 0.05, "probe_s": 0.05, "silence_s": 30.0}
    async with asyncio.timeout(25.0), controller(workers, **settings) as client:
        workers.fault = {"w0": fault}
        answers = [await client.post(PATH, json=PREFILL) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 200]
        assert len(workers.seen) == 2


async def test_a_prompt_that_is_never_answered_is_given_up():
    workers = FakeWorkers(1)
    async with controller(workers, answer_slack_s=0.05, answer_timeout_s=0.2) as client:
        workers.fault = {"w0": "slow"}
        answer = await client.post(PATH, json=PREFILL)
        assert answer.status_code == 504
        assert not client.fleet.workers[0].tickets


async def test_a_look_that_fails_is_not_the_last(monkeypatch):
    monkeypatch.setattr("weft.inference.controller.worker.QUIET_S", 0.0)
    workers, board = FakeWorkers(1), FakeBoard()
    async with controller(workers, [board], probe_s=0.02) as client:
        board.upcoming = None
        await asyncio.sleep(0.1)
        del board.upcoming
        board.bubbles = ()
        while (await client.get("/ready")).status_code != 503:
            await asyncio.sleep(0.02)


async def test_a_worker_that_comes_back_is_used_again():
    workers = FakeWorkers(1)
    workers.fault = {"w0": "dead"}
    async with controller(workers, probe_s=0.05) as client:
        assert (await client.post(PATH, json=PREFILL)).status_code == 503
        workers.fault.clear()
        while (await client.get("/ready")).status_code == 503:
            await asyncio.sleep(0.02)
        assert (await client.post(PATH, json=PREFILL)).status_code == 200


async def test_an_error_of_the_worker_about_the_request_is_the_callers():
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


@pytest.mark.parametrize("fault", ["leaving", "full"])
async def test_a_prompt_that_a_worker_drops_is_moved_and_not_counted_as_answered(fault):
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


async def test_a_slow_list_of_models_takes_no_worker_down():
    workers = FakeWorkers(2)
    async with controller(workers) as client:
        workers.fault = {"w0": "slow"}
        assert (await client.get("/v1/models")).status_code == 200
        workers.fault["w1"] = "slow"
        assert (await client.get("/v1/models")).status_code == 503
        assert (await client.get("/ready")).json()["up"] == 2


@pytest.mark.parametrize(("closes", "connections"), [("never", [1, 1]), ("idle", [2, 1]), ("asked", [2, 1])])
async def test_prompts_use_the_connections_that_a_worker_keeps(closes, connections):
    """If the worker closes one they go on: over a new one, or if it has just been used, at the next worker."""
    opened, prompts = [0, 0], [0, 0]

    async def serve(worker, reader, writer):
        opened[worker] += 1
        with contextlib.suppress(asyncio.IncompleteReadError):  # the controller has ended
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                (length,) = re.findall(rb"content-length: (\d+)", head.lower()) or [b"0"]
                await reader.readexactly(int(length))
                prompts[worker] += head.startswith(b"POST")
                is_last = prompts[worker] == 3 and opened[worker] == 1
                if is_last and closes == "asked":
                    break
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}")
                if is_last and closes == "idle":
                    break
        writer.close()

    async with contextlib.AsyncExitStack() as servers:
        workers = FakeWorkers(0)
        for number in range(2):
            server = await asyncio.start_server(partial(serve, number), "127.0.0.1", 0)
            await servers.enter_async_context(server)
            workers.names.append(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        # The second worker's bubble is later, so the first worker gets all prompts.
        boards = [FakeBoard(), FakeBoard(((5.0, 10.0),))]
        client = await servers.enter_async_context(controller(workers, boards, over_tcp=True))
        for _ in range(6):
            assert (await client.post(PATH, json=PREFILL)).status_code == 200
    assert opened == connections
    assert prompts == ([6, 1] if closes == "asked" else [6, 0])


@pytest.mark.parametrize("name", ["inner", "outer"])
async def test_a_request_that_is_cancelled_at_any_moment_leaves_no_busy_connection(name):
    opened = set()

    async def serve(reader, writer):
        opened.add(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        opened.remove(writer)
        writer.close()

    workers = FakeWorkers(0)
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        workers.names.append(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        service, url = Service(*fleet_of(workers), count=len, clients=Clients("")), f"http://{workers.names[0]}/health"
        async with getattr(service, name) as servers:
            for moments in range(80):
                asked = asyncio.create_task(servers.ask("GET", url))
                for _ in range(moments):
                    await asyncio.sleep(0)
                asked.cancel()
                await asyncio.wait([asked])
            await servers.ask("GET", url)  # over the one that is kept
            async with asyncio.timeout(5):
                while len(opened) > (name == "inner"):
                    await asyncio.sleep(0.01)


async def test_the_connections_of_many_prompts_at_once_are_closed_after_a_while(monkeypatch):
    monkeypatch.setattr("weft.inference.controller.server_connections.KEPT_S", 0.2)
    opened, release = set(), asyncio.Event()

    async def serve(reader, writer):
        opened.add(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while await reader.readuntil(b"\r\n\r\n"):
                await release.wait()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        opened.remove(writer)
        writer.close()

    workers = FakeWorkers(0)
    async with await asyncio.start_server(serve, "127.0.0.1", 0, backlog=100) as server:
        workers.names.append(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        service = Service(*fleet_of(workers), count=len, clients=Clients(""))
        async with service.inner as servers, asyncio.timeout(20):
            url = f"http://{workers.names[0]}/health"
            asked = [asyncio.create_task(servers.ask("GET", url)) for _ in range(100)]
            while len(opened) < 100:
                await asyncio.sleep(0.01)
            release.set()
            await asyncio.gather(*asked)
            while opened:
                await asyncio.sleep(0.01)
