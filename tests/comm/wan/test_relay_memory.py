"""Memory of relayed messages is taken again, and no more is kept than was in use at once."""

import ctypes
from itertools import count, pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import weft.comm.wan
from weft.comm.native import Kind, build

HERE = Path(__file__).parent
PAGE = 4096


@pytest.fixture(scope="module")
def library():
    headers = Path(weft.comm.wan.__file__).parent
    sources = [HERE / "relay_blocks.cpp", headers / "relay_memory.hpp"]
    library = ctypes.CDLL(str(build(sources, kind=Kind.library, flags=[f"-I{headers}"])))
    library.blocks_open.restype = library.blocks_take.restype = ctypes.c_void_p
    library.blocks_bytes.restype = ctypes.c_uint64
    for name in ("close", "drop", "bytes", "take"):
        numbers = [ctypes.c_int, ctypes.c_uint64][: {"take": 2, "drop": 1}.get(name, 0)]
        getattr(library, f"blocks_{name}").argtypes = [ctypes.c_void_p, *numbers]
    return library


class Memory:
    """Blocks that are held, by number."""

    def __init__(self, library):
        self._library, self._native, self._next = library, library.blocks_open(), count()
        self.spans = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._library.blocks_close(self._native)

    def take(self, num_bytes):
        number = next(self._next)
        place = self._library.blocks_take(self._native, number, num_bytes)
        ctypes.memset(place, number % 256, num_bytes)  # it is all there
        self.spans[number] = (place, place + num_bytes)
        return number

    def drop(self, number):
        del self.spans[number]
        self._library.blocks_drop(self._native, number)

    @property
    def num_bytes(self):
        return self._library.blocks_bytes(self._native)


def test_memory_is_taken_again_the_last_freed_first(library):
    with Memory(library) as memory:
        one, other = memory.take(1 << 20), memory.take(1 << 20)
        places = memory.spans[one], memory.spans[other]
        memory.drop(one)
        memory.drop(other)
        assert memory.spans[memory.take(1 << 20)] == places[1]
        assert memory.spans[memory.take((1 << 20) - 5)][0] == places[0][0]  # pages count, not bytes
        assert memory.num_bytes == 2 << 20


def test_a_message_without_bytes_has_a_place(library):
    with Memory(library) as memory:
        assert memory.spans[memory.take(0)][0]


@settings(max_examples=100, deadline=None)
@given(steps=st.lists(st.tuples(st.sampled_from("++-"), st.integers(0, 6 * PAGE)), max_size=80))
def test_no_two_blocks_overlap_and_no_more_is_kept_than_was_in_use_at_once(library, steps):
    with Memory(library) as memory:
        most = 0
        for what, number in steps:
            if what == "+":
                memory.take(number)
            elif memory.spans:
                memory.drop(list(memory.spans)[number % len(memory.spans)])
            sizes = [max(1, -(-(end - start) // PAGE)) * PAGE for start, end in memory.spans.values()]
            most = max(most, sum(sizes))
            assert sum(sizes) <= memory.num_bytes <= most
            assert all(end <= start for (_, end), (start, _) in pairwise(sorted(memory.spans.values())))
