"""Pinned memory is taken for several messages at once, once for each size that torch's cache tells apart."""

from weft.comm.wan.staging import BLOCKS_PER_SIZE, PinnedPreallocation


def test_memory_is_there_before_the_second_message():
    live, most, taken = 0, 0, []

    class Block:
        def __init__(self, size):
            nonlocal live, most
            live, most = live + 1, max(most, live + 1)
            taken.append(size)

        def __del__(self):
            nonlocal live
            live -= 1

    stock = PinnedPreallocation(Block)
    for num_bytes in (1000, 1024, 513, 0, 1025, 2000, 1000):
        stock.prepare(num_bytes)
    assert taken == [1024] * BLOCKS_PER_SIZE + [2048] * BLOCKS_PER_SIZE
    assert (
        most == BLOCKS_PER_SIZE and live == 0
    )  # held together, so that they are different blocks; then the cache has them
