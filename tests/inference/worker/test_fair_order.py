"""The order of waiting prompts: by request, and not by how many prompts a request brings."""

from collections import deque
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.inference.worker.fair_order import FairOrder, request_of


def prompt(name, tokens=10):
    return SimpleNamespace(request_id=name, num_tokens=tokens)


class Queue:
    """Prompts arrive at the end, as in vLLM, and run from the front."""

    def __init__(self):
        self.order, self.waiting = FairOrder(), deque()

    def add(self, name, tokens=10):
        one = prompt(name, tokens)
        self.waiting.append(one)
        self.order.place(one, self.waiting)

    def run(self):
        self.order.began(self.waiting[0].request_id)
        return self.waiting.popleft().request_id


@pytest.mark.parametrize(
    ("name", "request_name"),
    [
        ("cmpl-abc-0-01234567", "cmpl-abc"),
        ("cmpl-abc-17-89abcdef", "cmpl-abc"),
        ("5_cmpl-abc-0-01234567", "cmpl-abc"),
        ("chatcmpl-abc-01234567", "chatcmpl-abc"),
        ("12_chatcmpl-user-7-01234567", "chatcmpl-user-7"),
        ("cmpl-user-7-0-01234567", "cmpl-user-7"),
        ("0", "0"),
    ],
)
def test_prompts_of_one_request_are_known_by_their_ids(name, request_name):
    assert request_of(name) == request_name


@pytest.mark.parametrize("children", ["cmpl-many-{}-01234567", "{}_chatcmpl-many-01234567"])
def test_a_short_prompt_is_not_behind_a_hundred_children_of_one_request(children):
    queue = Queue()
    for number in range(100):
        queue.add(children.format(number))
    assert [queue.run() for _ in range(3)] == [children.format(number) for number in range(3)]
    queue.add("cmpl-short-0-01234567", 3)
    queue.add("cmpl-next-0-01234567", 3)
    assert [queue.run() for _ in range(3)] == [
        "cmpl-short-0-01234567",
        "cmpl-next-0-01234567",
        children.format(3),
    ]
    assert len([queue.run() for _ in range(96)]) == 96


def test_requests_of_one_prompt_keep_their_order():
    queue = Queue()
    names = [f"cmpl-{number}-0-01234567" for number in range(5)]
    for number, name in enumerate(names):
        queue.add(name, 100 - number)
    assert [queue.run() for _ in names] == names


def test_a_prompt_that_was_preempted_stays_in_front():
    queue = Queue()
    queue.add("cmpl-a-0-01234567")
    name = queue.run()
    queue.waiting.appendleft(prompt(name))
    queue.add("cmpl-b-0-01234567")
    assert queue.run() == name


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 50), st.booleans()), max_size=60))
def test_no_request_is_lost_or_overtakes_itself(arrivals):
    queue, added, ran = Queue(), [], []
    for number, (request, tokens, then_run) in enumerate(arrivals):
        name = f"cmpl-{request}-{number}-01234567"
        queue.add(name, tokens)
        added.append(name)
        if then_run:
            ran.append(queue.run())
    while queue.waiting:
        ran.append(queue.run())
    assert sorted(ran) == sorted(added)
    for request in range(4):
        own = f"cmpl-{request}-"
        assert [name for name in ran if name.startswith(own)] == [name for name in added if name.startswith(own)]
