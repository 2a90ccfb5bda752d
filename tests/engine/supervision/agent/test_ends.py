"""How a process of the forkserver ends: with all that the interpreter does at its end, but for taking modules apart."""

import asyncio

import pytest

from weft.engine.supervision.agent.processes import Ranks

TARGET = "tests.engine.supervision.agent.fake_ends:run"
ENDS = {
    "returns": (5, ""),
    "raises": (1, "RuntimeError: as it does"),
    "exits": (3, ""),
    "exits with a word": (1, "the word"),
    "exits with nothing": (0, ""),
}


@pytest.mark.parametrize("how", ENDS)
def test_a_process_ends_as_the_interpreter_would_end_it(tmp_path, how):
    async def work():
        ranks = Ranks((), lambda: None)
        try:
            return await ranks.ask("it", TARGET, [str(tmp_path), how], 60.0)
        finally:
            ranks.close()

    printed, code = asyncio.run(asyncio.wait_for(work(), 120.0))
    expected, said = ENDS[how]
    assert code == expected
    assert "no end of line" in printed and said in printed
    assert {path.name for path in tmp_path.iterdir()} == {"thread", "atexit", "finalized"}
