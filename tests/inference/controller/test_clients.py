"""Clients: who has no key or uses too much is refused, with the time after which it may try again."""

import asyncio
import contextlib
import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.inference.controller.fake_workers import DECODE, PATH, FakeWorkers, controller
from weft.inference.controller import clients as module
from weft.inference.controller.clients import Client, Clients, Limits
from weft.inference.controller.peers import Peers
from weft.inference.requests import Refusal

WHOLE = {"model": "tiny", "prompt": "one two three", "max_tokens": 9}


@pytest.fixture
def clients_file(tmp_path):
    def write(text, mode=0o600):
        path = tmp_path / "clients.yaml"
        path.write_text(text)
        path.chmod(mode)
        return path

    return write


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        ("alice: {key: a}", 0o644, "chmod 600"),
        ("[]", 0o600, "no clients"),
        ("alice: 3", 0o600, "alice has no key"),
        ("alice: {key: 12}", 0o600, "in quotes"),
        ("alice: {key: ' '}", 0o600, "alice has no key"),
        ("alice: {key: a, at_most: 3}", 0o600, "alice.at_most is not a limit; the limits are requests_per_minute"),
        *(
            (f"alice: {{key: a, at_once: {number}}}", 0o600, r"alice.at_once=.+: give an integer from 1 to 1e\+12")
            for number in (0, 0.5, 1.5, -1, ".nan", ".inf", "'8'", "true", "[8]", 10**400)
        ),
        *(
            (
                f"alice: {{key: a, {field}_per_minute: {number}}}",
                0o600,
                rf"{field}_per_minute=.+: give a number from 1e-06",
            )
            for field in ("requests", "tokens")
            for number in (0, -1, ".nan", ".inf", "5e-324", "'60'", "true", "null", 10**400)
        ),
        ("alice: {key: a}\nbob: {key: a}", 0o600, "the key of another client"),
        ("alice: {key: default}", 0o600, "the key of another client"),
        ("alice: {key: schl\u00fcssel}", 0o600, "alice: the key has characters that an HTTP header cannot carry"),
        ("{", 0o600, "not YAML"),
    ],
)
def test_a_wrong_file_of_clients_is_refused_with_a_remedy(clients_file, text, mode, words):
    with pytest.raises(ValueError, match=words) as raised:
        Clients("default", str(clients_file(text, mode)))
    assert str(raised.value).startswith("inference.controller.clients=")


def test_a_missing_file_of_clients_is_refused(tmp_path):
    with pytest.raises(ValueError, match="No such file"):
        Clients("", str(tmp_path / "none"))


def test_a_changed_file_holds_at_once_and_a_damaged_one_changes_nothing(clients_file):
    path = clients_file("alice: {key: a}\nbob: {key: b, at_once: 1}")
    clients = Clients("", str(path))
    bob = clients.of("Bearer b")
    clients_file("bob: {key: b, at_once: 1}\ncarol: {key: c}")
    os.utime(path, (1, 1))
    assert clients.of("bearer c").name == "carol"
    assert clients.of("Bearer b") is bob, "what a client has used stays counted"
    with pytest.raises(Refusal):
        clients.of("Bearer a")
    clients_file("bob: [")
    os.utime(path, (2, 2))
    assert clients.of("Bearer c").name == "carol"
    path.unlink()
    assert clients.of("Bearer c").name == "carol"


def test_an_edit_of_a_client_keeps_what_it_has_used(clients_file, monkeypatch):
    monkeypatch.setattr(module.time, "monotonic", lambda: 0.0)
    path = clients_file("alice: {key: a, requests_per_minute: 4}")
    clients, served = Clients("", str(path)), []
    for version, edited in enumerate(["key: a, requests_per_minute: 4", "key: b, requests_per_minute: 6, at_once: 9"]):
        clients_file(f"alice: {{{edited}}}")
        os.utime(path, (version, version))
        client = clients.of(f"Bearer {edited[5]}")
        served.append(0)
        with contextlib.suppress(Refusal):
            while True:
                with client.admitted(1):
                    served[-1] += 1
    assert served == [4, 2]
    clients_file("alice: {key: b, requests_per_minute: 1}")
    os.utime(path, (2, 2))
    with pytest.raises(Refusal) as refused, clients.of("Bearer b").admitted(1):
        pass
    assert refused.value.retry_after_s == 60, "a smaller bucket is empty, and no more"


@given(per_minute=st.floats(0.5, 1e4), amounts=st.lists(st.tuples(st.floats(0, 30), st.integers(1, 5000)), max_size=40))
def test_a_client_gets_its_rate_and_one_burst_and_a_retry_in_time_is_served(per_minute, amounts):
    clock_s, served = 0.0, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.time, "monotonic", lambda: clock_s)
        client = Client("alice", "a", Limits(tokens_per_minute=per_minute))
        for pause_s, tokens in amounts:
            clock_s += pause_s
            try:
                with client.admitted(tokens):
                    pass
            except Refusal as refusal:
                assert refusal.status == 429 and refusal.retry_after_s >= 1
                clock_s += refusal.retry_after_s
                with client.admitted(tokens):
                    pass
            served.append(tokens)
            # The last one may be larger than the bucket.
            assert sum(served[:-1]) <= per_minute * (1 + clock_s / 60) * (1 + 1e-9)


async def test_requests_are_limited_by_key_until_their_answers_have_been_sent(clients_file):
    path = clients_file("alice: {key: a, at_once: 1}\nbob: {key: b, requests_per_minute: 2}")
    workers = FakeWorkers(1)
    async with controller(workers, clients=path, decode_url=DECODE) as client:
        assert (await client.post(PATH, json=WHOLE)).status_code == 401
        workers.gate.clear()
        first = asyncio.create_task(client.post(PATH, json=WHOLE | {"stream": True}, headers=bearer("a")))
        while not workers.decoded:
            await asyncio.sleep(0.01)
        second = await client.post(PATH, json=WHOLE, headers=bearer("a"))
        assert (second.status_code, second.headers["retry-after"]) == (429, "1")
        assert "alice: more than at_once=1" in second.json()["error"]["message"]
        workers.gate.set()
        assert (await first).status_code == 200
        assert (await client.post(PATH, json=WHOLE, headers=bearer("a"))).status_code == 200
        codes = [(await client.post(PATH, json=WHOLE, headers=bearer("b"))).status_code for _ in range(3)]
        assert codes == [200, 200, 429]
        metrics = (await client.get("/metrics", headers=bearer("b"))).text
        assert 'weft_client_requests_total{client="bob"} 2.0' in metrics
        assert 'weft_client_prompt_tokens_total{client="alice"} 6.0' in metrics
        assert 'weft_prefill_refusals_total{status="429"} 2.0' in metrics


@pytest.fixture
def two_controllers(clients_file, tmp_path):
    """The client alice as two controllers of the same workers see her, and the peers of both."""

    def make(limits):
        path = str(clients_file(f"alice: {{key: a, {limits}}}"))
        peers = [Peers(tmp_path / "boards") for _ in range(2)]
        peers[0].refresh()
        return [Clients("", path, each) for each in peers], peers

    return make


def test_requests_in_progress_are_limited_over_all_controllers(two_controllers):
    (one, other), peers = two_controllers("at_once: 2")
    one, other = (clients.of("Bearer a") for clients in (one, other))
    with one.admitted(1), other.admitted(1):
        for client in (one, other):
            with pytest.raises(Refusal, match="at_once=2"), client.admitted(1):
                pass
    with one.admitted(1):
        peers[0].close()  # a controller that has ended
        peers[1].refresh()
        with other.admitted(1), other.admitted(1):
            pass


def test_what_a_client_uses_of_two_controllers_is_limited_once(two_controllers, monkeypatch):
    clock_s, served = 0.0, 0
    monkeypatch.setattr(module.time, "monotonic", lambda: clock_s)
    (one, other), _ = two_controllers("tokens_per_minute: 600")
    for second in range(1, 300):
        clock_s = second * 1.0
        for clients in (one, other):
            # Idle for two minutes, then one of them is used by bursts, then both are at once.
            if second > 240 or (clients is one and second > 120):
                while True:
                    try:
                        with clients.of("Bearer a").admitted(3):
                            served += 3
                    except Refusal:
                        break
            clients.count_others()
        used_s = max(0, second - 120)
        assert served <= 600 + used_s * 10 + 2 * 3
    assert served >= 600 + (used_s - 1) * 10


async def test_what_has_no_known_prompt_counts_by_its_bytes(clients_file):
    path = clients_file("alice: {key: a, tokens_per_minute: 100}")
    async with controller(FakeWorkers(1), clients=path, decode_url=DECODE) as client:
        body = WHOLE | {"prompt": {"unknown": "x" * 3000}}
        codes = [(await client.post(PATH, json=body, headers=bearer("a"))).status_code for _ in range(2)]
        assert codes == [200, 429]


async def test_a_client_that_leaves_is_not_counted_any_more(clients_file):
    path = clients_file("alice: {key: a, at_once: 1}")
    workers = FakeWorkers(1)
    workers.fault = {"w0": "slow"}
    async with controller(workers, clients=path) as client:
        prefill = WHOLE | {"max_tokens": 1}
        lost = asyncio.create_task(client.post(PATH, json=prefill, headers=bearer("a")))
        while not workers.seen:
            await asyncio.sleep(0.01)
        lost.cancel()
        await asyncio.wait([lost])
        workers.fault = {}
        begun_s = time.monotonic()
        while (await client.post(PATH, json=prefill, headers=bearer("a"))).status_code == 429:
            assert time.monotonic() - begun_s < 5
            await asyncio.sleep(0.01)
