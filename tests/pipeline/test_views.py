"""Schedules and timelines as text, trace and picture."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pipeline.cases import costs_for, maybe_lowered
from weft.pipeline import plot
from weft.pipeline.action import Action, Op
from weft.pipeline.costs import CostModel, LinkCost, StageCost
from weft.pipeline.generators import generate
from weft.pipeline.lowering import lower, open_pairs, split_backwards
from weft.pipeline.perfetto import write_perfetto
from weft.pipeline.placement import Placement
from weft.pipeline.plot import plot_timelines
from weft.pipeline.simulation import simulate
from weft.pipeline.text import bytes_text, grid_text, timeline_text
from weft.pipeline.timeline import COMPUTE_LANE, Span, Timeline


def test_grid_of_1f1b():
    assert grid_text(generate("1f1b", Placement.straight(3), 3)).splitlines() == [
        "rank 0   0F0 0F1 0F2 .   .   0B0 .   0B1 .   0B2",
        "rank 1   .   1F0 1F1 .   1B0 1F2 1B1 .   1B2 .",
        "rank 2   .   .   2F0 2B0 2F1 2B1 2F2 2B2 .   .",
    ]


def test_grid_of_interleaved():
    assert grid_text(generate("interleaved", Placement.interleaved(2, 2), 4)).splitlines() == [
        "rank 0   0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 .   2B2 .   2B3 0B2 0B3",
        "rank 1   .   1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3 .",
    ]


def test_grid_of_w():
    assert grid_text(generate("w", Placement.fold(2), 3)).splitlines() == [
        "rank 0   0F0 0F1 .   3F0 0F2|3B0 3F1     3B1     3F2|0B0 3B2 0B1 .   0B2",
        "rank 1   .   1F0 2F0 1F1 2F1     1F2|2B0 2F2|1B0 2B1     1B1 2B2 1B2 .",
    ]


def test_grid_shows_pairs_and_cuts_at_a_width():
    schedule = generate("w", Placement.fold(2), 4)
    assert "0F2|3B0" in grid_text(schedule)
    lines = grid_text(schedule, width=40).splitlines()
    assert lines[-1].startswith("... and ")
    assert all(len(line) <= 40 for line in lines)


@given(maybe_lowered)
def test_every_action_stands_in_the_grid_once(schedule):
    cells = [cell for line in grid_text(schedule).splitlines() for cell in line.split()[2:] if cell != "."]
    assert sorted(part for cell in cells for part in cell.split("|")) == sorted(
        str(action) for rank in range(schedule.num_ranks) for action in schedule.actions(rank)
    )


def test_timeline_text():
    text = timeline_text(simulate(generate("1f1b", Placement.straight(2), 2), CostModel.unit(2)))
    assert text.splitlines() == [
        "1f1b predicted: step 9 s, bubbles 33.3 %",
        "rank        busy s   bubbles    peak activations  live chunks",
        "0                6    33.3 %                 2 B            2",
        "1                6    33.3 %                 1 B            1",
    ]


@pytest.mark.parametrize(("num_bytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * 2**30, "3 GiB")])
def test_bytes(num_bytes, text):
    assert bytes_text(num_bytes) == text


@given(st.data())
def test_a_trace_holds_every_span_and_no_thread_overlaps(tmp_path_factory, data):
    schedule = data.draw(maybe_lowered)
    timeline = simulate(schedule, data.draw(costs_for(schedule.placement.num_stages)))
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    write_perfetto([timeline, timeline], path)
    events = json.loads(path.read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == 2 * len(timeline.spans)
    assert {event["pid"] for event in slices} <= {event["pid"] for event in events if event["name"] == "process_name"}
    threads = {}
    for event in slices:
        threads.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for intervals in threads.values():
        intervals.sort()
        assert all(before[1] <= after[0] + 1e-6 for before, after in pairwise(intervals))
    arrows = [event["id"] for event in events if event["ph"] == "s"]
    assert sorted(arrows) == sorted(event["id"] for event in events if event["ph"] == "f")
    begins = {(event["pid"], event["ts"]) for event in slices}
    assert all((event["pid"], event["ts"]) in begins for event in events if event["ph"] in "sf"), "arrows join slices"


def test_ranks_of_two_timelines_lie_side_by_side(tmp_path):
    timeline = simulate(generate("1f1b", Placement.straight(2), 2), CostModel.unit(2))
    write_perfetto([timeline, timeline], tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = sorted((event["pid"], event["args"]["name"]) for event in events if event["name"] == "process_name")
    assert [name for _, name in names] == [f"rank {rank}: 1f1b predicted" for rank in (0, 0, 1, 1)]


@pytest.mark.parametrize("kind", ["w", "zbv"])
def test_pictures_are_written_whole(tmp_path, kind):
    one = StageCost(forward_s=0.01, input_s=0.01, weight_s=0.01, activation_bytes=1e6, output_bytes=1e5, reduce_s=0.02)
    costs = CostModel(stages=(one,) * 8, local=LinkCost(bandwidth_bps=1e9, latency_s=1e-4))
    timeline = simulate(lower(generate(kind, Placement.fold(4), 8)), costs)
    plot_timelines([timeline, timeline], tmp_path / "new" / "timeline.png")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["timeline.png"]
    assert (tmp_path / "new" / "timeline.png").read_bytes().startswith(b"\x89PNG")


def drawn(tmp_path, monkeypatch, schedule, costs):
    return figure_of(tmp_path, monkeypatch, [simulate(lower(schedule), costs)])


def figure_of(tmp_path, monkeypatch, timelines):
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: (figures.append(self), path.touch()))
    plot_timelines(timelines, tmp_path / "timeline.png")
    return figures[0]


def test_the_legend_tells_backwards_apart_and_explains_the_shades(tmp_path, monkeypatch):
    both = split_backwards(generate("w", Placement.fold(2), 4), {0, 3})
    figure = drawn(tmp_path, monkeypatch, open_pairs(both), CostModel.unit(4))
    (legend,) = figure.legends
    colours = {
        text.get_text(): patch.get_facecolor()
        for text, patch in zip(legend.get_texts(), legend.get_patches(), strict=True)
    }
    assert "light: a rank's first chunk, dark: its last" in colours
    names = ("forward", "backward", "input gradient", "weight gradient")
    assert len({colours.get(name, name) for name in names}) == len(names)
    assert {"backward"} <= colours.keys()
    straight = drawn(tmp_path, monkeypatch, generate("1f1b", Placement.straight(2), 4), CostModel.unit(2))
    assert not any("chunk" in text.get_text() for text in straight.legends[0].get_texts())


def test_a_large_schedule_is_drawn_wide_enough_to_tell_slots_apart(tmp_path, monkeypatch):
    large = drawn(tmp_path, monkeypatch, generate("1f1b", Placement.straight(16), 64), CostModel.unit(16))
    slot_pixels = (
        large.axes[0].bbox.width / simulate(generate("1f1b", Placement.straight(16), 64), CostModel.unit(16)).step_s
    )
    assert slot_pixels > 8
    small = drawn(tmp_path, monkeypatch, generate("1f1b", Placement.straight(4), 24), CostModel.unit(4))
    numbers = [text for text in small.axes[0].texts if text.get_text().isdigit()]
    assert len(numbers) == 2 * 4 * 24


@pytest.mark.parametrize(("slots", "inches"), [(40, 16.0), (150, 2.4 + 19 / 150 * 150), (10_000, 64.0)])
def test_pictures_are_so_wide_that_most_slots_fit_a_number(tmp_path, monkeypatch, slots, inches):
    """A fifth of the slots are shorter than the others, and do not count."""
    ends = [float(number + 1) for number in range(slots)]
    spans = tuple(
        Span(0, COMPUTE_LANE, (Action(Op.F, 0, 0),), end_s - (1.0 if number % 5 else 0.5), end_s)
        for number, end_s in enumerate(ends)
    )
    monkeypatch.setattr(plot, "_write_number", lambda *_: True)
    figure = figure_of(tmp_path, monkeypatch, [Timeline("slots", 1, spans, (ends[-1],), (1,))])
    assert figure.get_size_inches()[0] == pytest.approx(inches)


def test_timelines_of_a_picture_have_one_scale_and_rows_that_say_their_rank(tmp_path, monkeypatch):
    one, two, other = (Action(Op.F, 0, 0),), (Action(Op.F, 0, 1), Action(Op.B, 0, 0)), (Action(Op.F, 1, 1),)
    short = Timeline("short", 1, (Span(0, COMPUTE_LANE, one, 0.0, 1.0),), (1.0,), (10,))
    spans = Span(0, COMPUTE_LANE, two, 0.0, 2.0), Span(1, COMPUTE_LANE, other, 1.0, 3.0)
    figure = figure_of(tmp_path, monkeypatch, [short, Timeline("long", 2, spans, (3.0, 3.0), (10, 40))])
    rows, bars = figure.axes[::2], figure.axes[1::2]
    assert [axes.get_xlim() for axes in rows] == [(0, 3.0), (0, 3.0)]
    assert len({axes.get_xlim() for axes in bars}) == 1
    labels = [[label.get_text() for label in axes.get_yticklabels()] for axes in rows]
    assert labels == [["rank 0"], ["rank 0", "rank 1"]]
    boxes = {
        tuple(float(corner) for corner in (*path.vertices.min(0).round(4), *path.vertices.max(0).round(4)))
        for collection in rows[1].collections[1:]
        for path in collection.get_paths()
    }
    assert boxes == {(0.0, 0.06, 2.0, 0.38), (0.0, 0.38, 2.0, 0.7), (1.0, 1.06, 3.0, 1.7)}


def test_nothing_to_draw_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="nothing to draw"):
        plot_timelines([], tmp_path / "t.png")
    with pytest.raises(ValueError, match="nothing to draw"):
        plot_timelines([Timeline("empty", 1, (), (0.0,), (0,))], tmp_path / "t.png")


@pytest.mark.parametrize("limit", ["_MOST_SPANS", "_MOST_RANKS"])
def test_more_than_a_picture_can_show_is_refused_rather_than_drawn_for_minutes(tmp_path, monkeypatch, limit):
    timeline = simulate(generate("1f1b", Placement.straight(4), 4), CostModel.unit(4))
    most = {"_MOST_SPANS": len(timeline.spans), "_MOST_RANKS": 4}[limit]
    monkeypatch.setattr(f"weft.pipeline.plot.{limit}", most)
    plot_timelines([timeline], tmp_path / "t.png")
    with pytest.raises(
        ValueError, match=r"64 spans in 8 rows are more than .* fewer ranks or micro-batches, or .*Perfetto"
    ):
        plot_timelines([timeline, timeline], tmp_path / "more.png")
    assert [path.name for path in tmp_path.iterdir()] == ["t.png"]


def test_spans_of_a_lane_that_overlap_have_threads_that_say_so(tmp_path):
    spans = [
        Span(0, lane, (Action(Op.F, 0, m),), start, start + 2.0)
        for lane in ("compute", "F>1")
        for m, start in enumerate((0.0, 1.0, 2.0))
    ]
    write_perfetto([Timeline("by hand", 1, tuple(spans), (0.0,), (0,))], tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    threads = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert [threads[tid] for tid in sorted(threads)] == ["compute", "compute (2)", "F>1", "F>1 (2)"]
