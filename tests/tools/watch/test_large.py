"""The memory of a view of a large run grows with its ranks and shown steps, and not with the length of the run."""

import tracemalloc

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.tools.watch.large import record_large
from weft.tools.watch import FOLDER
from weft.tools.watch.analysis import heat
from weft.tools.watch.outliers import outliers
from weft.tools.watch.record import RunRecord
from weft.tools.watch.step_files import StepFiles


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return {
        (lines, steps): record_large(
            folder / f"{lines}-{steps}", stages=4, lines=lines, steps=steps, slow={2 * lines + 1: 1.1}
        )
        for lines, steps in ((100, 30), (100, 200), (400, 30))
    }


def peak_bytes(folder, window):
    """Return the most bytes of arrays and of Parquet's buffers while a heat map is made."""
    record = RunRecord(folder)
    heat(record, window)  # what is loaded once
    before = pa.default_memory_pool().max_memory()
    tracemalloc.start()
    heat(record, window)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak + pa.default_memory_pool().max_memory() - before


def test_a_run_seven_times_as_long_needs_no_more_memory_and_four_times_as_many_ranks_need_more(runs):
    short, long, wide = (peak_bytes(runs[key], 20) for key in ((100, 30), (100, 200), (400, 30)))
    assert long < 1.1 * short
    assert short < wide


def test_only_the_slow_rank_of_a_large_run_is_named(runs):
    found = outliers(RunRecord(runs[400, 30]))
    assert [(each.rank, each.section) for each in found] == [(801, "compute")]


def test_windows_and_totals_are_the_sums_of_the_file(runs):
    record = RunRecord(runs[100, 200])
    table = pd.read_parquet(record.folder / FOLDER / "steps-host-00001.parquet")
    table = table[(table.step > 180) & table.section.isin(["F", "data"])]
    seconds = (table["count"] * table.mean_s).groupby([table.step, table["rank"], table.section.astype(str)]).sum()
    expected = np.stack([seconds.xs(name, level=2).unstack().to_numpy() for name in ("F", "data")], axis=-1)
    found = record.steps.window(181, 200, ("F", "data"))
    np.testing.assert_allclose(found.seconds, expected)
    assert found.is_recorded.all() and found.ranks.tolist() == list(range(400))
    np.testing.assert_allclose(record.steps.totals(181, 200, ("F", "data")).seconds, expected.sum(axis=0))


def rows_of(step, rank, section, mean_s):
    names = pa.array(section).dictionary_encode()
    return pa.table({"step": step, "rank": rank, "section": names, "count": [1] * len(step), "mean_s": mean_s})


def test_the_last_repetition_of_a_step_counts_and_parts_of_a_step_add_up(tmp_path):
    parts = [
        rows_of([0, 1, 1, 2, 2], [0] * 5, ["step", "F", "step", "F", "step"], [9.0, 1.0, 2.0, 3.0, 4.0]),
        rows_of([2, 2, 3], [0] * 3, ["F", "step", "F"], [30.0, 40.0, 5.0]),
        rows_of([3, 3, 3], [0, 0, 7], ["F", "step", "F"], [50.0, 60.0, 99.0]),
    ]
    for number, part in enumerate(parts, start=1):
        parquet.write_table(part, tmp_path / f"steps-host-{number:05d}.parquet")
    files = StepFiles(tmp_path, [0, 1])
    assert files.refresh() and not files.refresh()
    assert files.step_range == (1, 3)
    found = files.window(1, 3, ("F", "step"))
    assert found.seconds[:, 0].tolist() == [[1.0, 2.0], [30.0, 40.0], [55.0, 60.0]]
    assert found.is_recorded.tolist() == [[True, False]] * 3
    assert files.totals(1, 3, ("F",)).seconds.tolist() == [[86.0], [0.0]]
    (tmp_path / "steps-host-00002.parquet").write_bytes(b"PAR1")
    assert files.refresh() and files.totals(1, 3, ("F",)).seconds[0, 0] == 54.0
