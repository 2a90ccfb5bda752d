"""Large recorded runs: one simulated pipeline, repeated with other durations on every rank and step."""

import json

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from tests.tools.watch.recorded import Recording
from weft.tools.watch import FOLDER
from weft.tools.watch.collector import summaries

STEPS_OF_GROUP = 5


def record_large(folder, *, stages, lines, steps, slow=None, jitter=0.01):
    """Write a run of ``lines`` pipelines, and return its folder. ``slow`` are factors of ranks' computations."""
    template = Recording(folder / "template", stages=stages, lines=1)
    template.run(1, jitter=0.0)
    recording = Recording(folder / "run", stages=stages, lines=lines)
    columns = summaries(template.events[0])
    section = columns["section"].to_numpy(zero_copy_only=False)
    by_rank = [np.flatnonzero(columns["rank"] == stage) for stage in range(stages)]
    each = np.concatenate([np.tile(rows, lines) for rows in by_rank])  # a stage's ranks follow each other
    rank = np.concatenate(
        [np.repeat(np.arange(lines) + stage * lines, len(rows)) for stage, rows in enumerate(by_rank)]
    )
    factors = np.ones(stages * lines)
    for number, factor in (slow or {}).items():
        factors[number] = factor
    factors = np.where(np.isin(section[each], ["F", "B", "I", "W"]), factors[rank], 1.0)
    path, rng, writer = recording.folder / FOLDER / "steps-host-00001.parquet", np.random.default_rng(0), None
    for first in range(1, steps + 1, STEPS_OF_GROUP):
        tables = []
        for step in range(first, min(first + STEPS_OF_GROUP, steps + 1)):
            seconds = factors * (1 + jitter * rng.standard_normal(len(each)))
            found = {name: values.take(pa.array(each)) for name, values in columns.items() if name == "section"}
            found |= {name: columns[name][each] for name in ("stage", "count")}
            found |= {"step": np.full(len(each), step, "i4"), "rank": rank.astype("i4")}
            found |= {name: columns[name][each] * seconds for name in ("mean_s", "max_s")}
            tables.append(pa.table(found))
        table = pa.concat_tables(tables)
        writer = writer or parquet.ParquetWriter(path, table.schema, compression="zstd")
        writer.write_table(table)
    writer.close()
    entries = ({"step": step, "kind": "train", "loss": 1.0, "step_seconds": 0.5} for step in range(1, steps + 1))
    (recording.folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return recording.folder
