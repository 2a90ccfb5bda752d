"""The replay of a trace: what is read, what is placed, how much room is used."""

import pytest

from weft.inference.bubble_pattern import BubblePattern
from weft.inference.prompt_work import PromptWork
from weft.inference.replay import Arrival, read_trace, replay, sped_up
from weft.tools.cli import main

WORK = PromptWork(step_s=0.005, token_s=1e-4, context_s=1e-9, max_tokens=4096)
TRACE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:04.0319600,2000,8
2023-11-16 18:17:03.9799600,1000,10
2023-11-16 18:17:05.0319600,3000,8
"""


def fleet(count=20):
    rows = [(0.1, 0.45), (0.7, 0.95)]
    return [
        BubblePattern(rows, 1.0, origin_s=rank / count, overhead_s=WORK.overhead_s, guard_s=0.002)
        for rank in range(count)
    ]


def test_a_trace_is_read_in_order_and_told_what_is_wrong_with_it(tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text(TRACE)
    assert [(round(a.at_s, 3), a.tokens) for a in read_trace(file)] == [(0.0, 1000), (0.052, 2000), (1.052, 3000)]
    for text, part in (
        (TRACE.replace("2000", "many"), "line 2"),
        (TRACE.replace("2000", "0"), "at least 1 token"),
        (TRACE.replace("TIMESTAMP", "TIME"), "no columns TIMESTAMP"),
        (TRACE.splitlines()[0], "at least 2"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match="trace") as error:
            read_trace(file)
        assert part in str(error.value)
    with pytest.raises(ValueError, match="cannot be read"):
        read_trace(tmp_path / "none.csv")


def test_a_trace_twice_as_fast_begins_anew_when_it_ends():
    trace = [Arrival(0.0, 1), Arrival(2.0, 2)]
    assert list(sped_up(trace, 2.0, 3.5)) == [Arrival(0.0, 1), Arrival(1.0, 2), Arrival(2.0, 1), Arrival(3.0, 2)]


def test_an_idle_fleet_queues_nobody_and_a_full_one_uses_its_room():
    trace = [Arrival(0.1 * number, 500 + 700 * (number % 5)) for number in range(20)]
    patterns = fleet()
    quiet = replay(patterns, trace, WORK, seconds=2.0)
    assert max(quiet.queued_s) < 1e-3
    assert not quiet.refused
    flood = replay(patterns, sped_up(trace, 40.0, 6.0), WORK, seconds=6.0, warm_s=1.0, deadline_s=3.0)
    room = sum(pattern.open_s for pattern in patterns) / len(patterns)
    assert 0.97 * room <= flood.prefill_share <= room
    assert flood.refused
    assert max(flood.ttfts_s) <= 3.0


def test_simulate_replays_a_trace_over_dp_cells(tmp_path, capsys):
    schedule, trace = tmp_path / "s.json", tmp_path / "trace.csv"
    trace.write_text(TRACE)
    assert main(["schedule", "1f1b", "--ranks=2", "--microbatches=4", "--format=json", f"--out={schedule}"]) == 0
    options = [str(schedule), f"--prefill={trace}", "--gpus=8", "--cells=2", "--loads=0.5"]
    assert main(["simulate", *options]) == 0
    assert "8 GPUs in 2 DP-cells of 4" in capsys.readouterr().out
    assert main(["simulate", *options, "--gpus=9"]) == 2
    assert "--gpus=9: not a multiple of --cells=2 x 2" in capsys.readouterr().err
