"""The replay of a trace: what is read, what is placed, how much room is used."""

from itertools import islice
from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

import weft.inference.placement.replay as replay_module
from weft.inference.placement.bubble_pattern import BubblePattern
from weft.inference.placement.prompt_work import PromptWork
from weft.inference.placement.replay import (
    SAME_SHARE,
    STUDENT_95,
    Arrival,
    Replay,
    length_s,
    read_trace,
    replay,
    sped_up,
    steady_state,
)
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


def test_a_trace_is_read_in_order_and_its_errors_are_named(tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text(TRACE)
    assert [(round(a.at_s, 3), a.tokens) for a in read_trace(file)] == [(0.0, 1000), (0.052, 2000), (1.052, 3000)]
    for text, part in (
        (TRACE.replace("2000", "many"), "line 2"),
        (TRACE.replace("2000", "0"), "at least 1 token"),
        (TRACE.replace("TIMESTAMP", "TIME"), "needs columns TIMESTAMP"),
        (TRACE.splitlines()[0], "at least 2"),
        (TRACE.splitlines()[0] + "\n" + TRACE.splitlines()[1], "1 prompts; a replay needs at least 2"),
        (TRACE.splitlines()[0] + 2 * ("\n" + TRACE.splitlines()[1]), "all 2 prompts have one TIMESTAMP"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match="trace") as error:
            read_trace(file)
        assert part in str(error.value)
    with pytest.raises(ValueError, match="cannot be read"):
        read_trace(tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("rows", "part"),
    [
        (["0001-01-01 00:00:00,5", "9999-12-31 00:00:00,5"], "span 3,652,058 days, and at most 366 are replayed"),
        (["2024-01-01 00:00:00,5", "2024-01-01 00:00:01," + "9" * 4000], "at most 1,000,000,000"),
        (["2024-01-01 00:00:00," + "9" * 200_000], "cannot be read"),
    ],
)
def test_a_trace_that_would_never_end_is_refused(tmp_path, rows, part):
    file = tmp_path / "trace.csv"
    file.write_text("\n".join(["TIMESTAMP,ContextTokens", *rows]))
    with pytest.raises(ValueError, match="trace") as error:
        read_trace(file)
    assert part in str(error.value) and "\n" not in str(error.value)


def test_times_with_a_zone_are_read(tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text("TIMESTAMP,ContextTokens\n2024-01-01T00:00:00+00:00,5\n2024-01-01T00:00:02+00:00,6\n")
    assert read_trace(file) == [Arrival(0.0, 5), Arrival(2.0, 6)]


def test_a_trace_twice_as_fast_begins_anew_when_it_ends():
    trace = [Arrival(0.0, 1), Arrival(2.0, 2)]
    found = list(islice(sped_up(trace, 2.0), 5))
    assert found == [Arrival(0.0, 1), Arrival(1.0, 2), Arrival(2.0, 1), Arrival(3.0, 2), Arrival(4.0, 1)]


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_a_speed_that_leads_nowhere_is_refused(factor):
    with pytest.raises(ValueError, match="sped up"):
        next(sped_up([Arrival(0.0, 1), Arrival(2.0, 2)], factor))
    with pytest.raises(ValueError, match="sped up"):
        next(sped_up([Arrival(0.0, 1), Arrival(0.0, 2)], 1.0))


def test_an_idle_fleet_queues_no_prompt_and_a_full_one_is_used():
    trace = [Arrival(0.1 * number, 500 + 700 * (number % 5)) for number in range(20)]
    patterns = fleet()
    (quiet,) = replay(patterns, trace, WORK, window_s=2.0)
    assert max(quiet.queued_s) < 1e-3
    assert not quiet.refused and not quiet.steady
    windows = replay(patterns, sped_up(trace, 40.0), WORK, window_s=6.0, deadline_s=3.0)
    flood = steady_state(windows, deadline_s=3.0)
    room = sum(pattern.open_s for pattern in patterns) / len(patterns)
    assert 0.97 * room <= flood.prefill_share <= room
    assert flood.refused and flood.steady
    assert max(flood.ttfts_s) <= 3.0


def test_windows_share_out_every_prompt_and_every_second_of_work():
    trace = [Arrival(0.1 * number, 500 + 700 * (number % 5)) for number in range(40)]
    (whole,) = replay(fleet(), trace, WORK, window_s=8.0)
    parts = list(replay(fleet(), trace, WORK, window_s=0.5))
    for name in ("waits_s", "queued_s", "ttfts_s"):
        assert [value for part in parts for value in getattr(part, name)] == list(getattr(whole, name))
    assert len(parts) == 8
    busy_s = sum(part.prefill_share for part in parts) * 0.5
    assert 0.9 * 8.0 * whole.prefill_share < busy_s <= 8.0 * whole.prefill_share + 1e-9  # the last bubbles are beyond


def test_a_transient_is_not_reported_as_steady():
    """A fifth more than there is room for: queues fill for a while before anyone is refused (long prompts first)."""
    trace = [Arrival(0.1 * number, 500 + 700 * (number % 5)) for number in range(20)]
    patterns = fleet()
    room = sum(pattern.capacity_s / pattern.period_s for pattern in patterns)
    factor = 1.2 * room / (sum(WORK.work_s(arrival.tokens) for arrival in trace) / length_s(trace))
    # Windows of some 560 prompts: one more or less of them that is refused does not count.
    window_s = length_s(trace) / factor * round(8.0 * factor / length_s(trace))
    first, *_ = windows = list(
        islice(replay(patterns, sped_up(trace, factor), WORK, window_s=window_s, deadline_s=3.0), 12)
    )
    found = steady_state(windows, deadline_s=3.0)
    assert first.refused_share < 0.05
    assert found.steady and found.refused_share == pytest.approx(windows[-1].refused_share, abs=0.01)
    assert found.refused_share > 0.05
    assert found.prefill_share == pytest.approx(room / len(patterns), rel=0.06)


def test_what_never_settles_is_said_to_be_unsteady():
    trace = [Arrival(2.0**number, 1000) for number in range(12)]
    windows = replay(fleet(2), trace, WORK, window_s=40.0)
    assert not steady_state(windows, deadline_s=3.0, most=2).steady


def test_where_all_are_refused_there_is_nothing_to_divide_by():
    trace = [Arrival(0.1 * number, 4000) for number in range(20)]
    (found,) = replay(fleet(), trace, WORK, window_s=2.0, deadline_s=0.01)
    assert found.refused_share == 1.0 and found.mean_queued_s == found.prefill_share == 0.0


@pytest.fixture
def simulated(tmp_path):
    """Arguments of `weft simulate` that replay `TRACE` on 8 GPUs in 2 cells."""
    schedule, trace = tmp_path / "s.json", tmp_path / "trace.csv"
    trace.write_text(TRACE)
    assert main(["schedule", "1f1b", "--ranks=2", "--microbatches=4", "--format=json", f"--out={schedule}"]) == 0
    return ["simulate", str(schedule), f"--prefill={trace}", "--gpus=8", "--cells=2"]


def test_simulate_replays_a_trace_over_dp_cells(simulated, capsys):
    assert main([*simulated, "--loads=0.5"]) == 0
    said = capsys.readouterr().out
    assert "8 GPUs in 2 DP-cells of 4" in said and "*" not in said
    assert main([*simulated, "--loads=0.5", "--gpus=9"]) == 2
    assert "--gpus=9: not a multiple of --cells=2 x 2" in capsys.readouterr().err


def test_simulate_cuts_the_model_over_neighbouring_gpus(simulated, capsys):
    options = ["--loads=0.5", "--stages", "1", "2", "4"]
    assert main([*simulated, *options]) == 0
    said = capsys.readouterr().out
    assert all(weights in said for weights in ("16.1", "8.1", "4.0"))
    assert main([*simulated, *options, "3"]) == 2
    assert "--stages=3: not a divisor of --gpus=8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--loads=-1"], "--loads=-1: give shares of the room above 0"),
        (["--loads", "0.5", "nan"], "--loads=nan: give shares"),
        (["--loads=inf"], "--loads=inf: give shares"),
        (["--loads=1e9"], "--loads=1e+09: give shares"),
        (["--gpus=0"], "--gpus=0: give a whole number above 0"),
        (["--cells=-2"], "--cells=-2: give a whole number above 0"),
        (["--deadline=nan"], "--deadline=nan: give a number of seconds"),
        (["--weights=nan"], "--weights=nan: give a number of gigabytes"),
        (["--deadline=0"], "--deadline=0: give a number of seconds"),
        (["--guard=-5"], "--guard=-5: give a number of milliseconds"),
        (["--guard=1e9"], "no bubble is long enough"),
        (["--prefill-cost=0,0,0"], "--prefill-cost: give times"),
        (["--prefill-cost=nan,1,1"], "--prefill-cost: give times"),
        (["--prefill-cost=-1,1,1"], "--prefill-cost: give times"),
        (["--format=text"], "--format: with --prefill a table is printed; leave it out"),
    ],
)
def test_options_that_mean_nothing_are_refused(simulated, capsys, options, part):
    assert main([*simulated, *options]) == 2
    assert part in capsys.readouterr().err


def test_prompts_that_are_all_refused_leave_dashes(simulated, capsys):
    assert main([*simulated, "--deadline=0.001", "--loads=0.5"]) == 0
    assert "100.0%" in capsys.readouterr().out


def test_a_prompt_is_queued_by_as_much_as_it_ends_later_than_on_an_idle_fleet():
    tokens = [900, 2500, 700, 1800]
    (alone,) = replay(fleet(1), [Arrival(0.0, tokens[0])], WORK, window_s=60.0)
    (crowd,) = replay(fleet(1), [Arrival(0.0, each) for each in tokens], WORK, window_s=60.0)
    assert list(alone.queued_s) == [0.0]
    singles = [next(replay(fleet(1), [Arrival(0.0, each)], WORK, window_s=60.0)).ttfts_s[0] for each in tokens]
    for queued_s, ttft_s, single_s in zip(crowd.queued_s, crowd.ttfts_s, singles, strict=True):
        assert queued_s == pytest.approx(ttft_s - single_s, abs=1e-5)
    assert list(crowd.queued_s) == sorted(crowd.queued_s)
    assert crowd.queued_s[1] > 0.0


def test_a_sample_of_prompts_is_compared_with_an_idle_fleet():
    trace = [Arrival(0.1 * number, 500 + 700 * (number % 5)) for number in range(40)]
    (whole,) = replay(fleet(), trace, WORK, window_s=8.0)
    (some,) = replay(fleet(), trace, WORK, window_s=8.0, sample=4)
    assert list(some.queued_s) == list(whole.queued_s)[::4]
    assert some.ttfts_s == whole.ttfts_s


def test_a_prompt_waits_from_its_arrival_to_its_bubble():
    closed = Arrival(5.5, 500)  # the worker of the only rank has bubbles from 0.1 to 0.45 and from 0.7 to 0.95
    (found,) = replay(fleet(1), [closed], WORK, window_s=60.0)
    assert 0.2 <= found.waits_s[0] < 0.25 and found.waits_s[0] < found.ttfts_s[0]


def test_prompts_may_come_at_the_same_time_as_long_as_not_all_do(tmp_path):
    file = tmp_path / "trace.csv"
    head, first, *_ = TRACE.splitlines()
    file.write_text("\n".join([head, first, first, first.replace("18:17:04", "18:17:08")]))
    assert [(a.at_s, a.tokens) for a in read_trace(file)] == [(0.0, 2000), (0.0, 2000), (4.0, 2000)]


def window(refused=0, accepted=0, queued_s=0.0, share=0.0):
    waits = [queued_s] * accepted
    return Replay(
        seconds=1.0,
        waits_s=waits,
        queued_s=waits,
        ttfts_s=[1.0] * accepted,
        refused=refused,
        prefill_share=share,
        places_us=[],
    )


def test_shares_and_means_are_of_what_arrived_and_of_what_was_accepted():
    assert (window().refused_share, window().mean_queued_s) == (0.0, 0.0)
    assert window(refused=1).refused_share == 1.0
    assert window(accepted=1, queued_s=3.0).mean_queued_s == 3.0
    assert window(refused=1, accepted=3, queued_s=3.0).refused_share == 0.25
    assert not window().steady


@given(st.lists(st.integers(0, 1), min_size=1, max_size=12), st.integers(1, 12))
def test_a_replay_stops_when_the_later_half_of_its_windows_agrees(levels, most):
    windows = [window(accepted=1, share=0.5 * level + number * 1e-6) for number, level in enumerate(levels)]
    looked = windows[:most]
    halves = [looked[:n][-max(2, n // 2) :] for n in range(2, len(looked) + 1)]
    agree = [half for half in halves if max(w.prefill_share for w in half) - min(w.prefill_share for w in half) < 0.1]
    found = steady_state(windows, deadline_s=3.0, most=most)
    assert found.steady == bool(agree)
    counted = agree[0] if agree else looked[len(looked) // 2 :]
    assert found.prefill_share == pytest.approx(sum(w.prefill_share for w in counted) / len(counted))
    assert found.seconds == len(found.ttfts_s) == len(counted)


@pytest.mark.parametrize(
    ("field", "least", "unit"),
    [("share", 0.5, SAME_SHARE), ("queued_s", 1.0, 3.0 * SAME_SHARE), ("refused", 10_000, 100_000 * SAME_SHARE)],
)
@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("count", [2, 4])
def test_intervals_are_narrow_up_to_a_share_in_every_way(field, least, unit, sign, count):
    """The half of an interval is Student's t times the standard error, here of a value and its opposite in turns."""
    error = {2: 0.5, 4: 1 / sqrt(12)}[count]
    for times, narrow in ((0.8, True), (1.2, False)):
        apart = sign * times * unit / (STUDENT_95[count - 2] * error)
        windows = []
        for number in range(count):
            value = least + apart * (number % 2)
            refused = round(value) if field == "refused" else 0
            more = {field: value} if field != "refused" else {"refused": refused}
            windows.append(window(accepted=100_000 - refused, **more))
        assert replay_module._is_narrow(windows, 3.0) == narrow, times
