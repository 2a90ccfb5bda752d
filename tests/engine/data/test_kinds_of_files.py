"""The same rows are read from every kind of file, whatever compresses it."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma

import pytest

from tests.engine.data.test_as_written import DATES, config, read
from weft.engine.data import storage
from weft.engine.data.rows import RowFault, read_rows

ROWS = [
    {"prompt": "2020-01-01", "completion": text}
    for text in (*DATES, "007", "NA", 'says "so", twice', "two\nlines", "a\ttab", "nan", "'")
]
COMPRESS = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


def separated(separator):
    text = io.StringIO()
    table = csv.DictWriter(text, list(ROWS[0]), delimiter=separator)
    table.writeheader()
    table.writerows(ROWS)
    return text.getvalue().encode()


LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
CONTENTS = {".jsonl": LINES, ".ndjson": LINES, ".json": json.dumps(ROWS).encode()} | {
    suffix: separated(separator) for suffix, separator in storage.SEPARATORS.items()
}


@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize("suffix", CONTENTS)
def test_rows_are_those_of_the_file(tokenizer, tmp_path, suffix, compression):
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "README.md").write_text("about the rows")
    file = folder / f"a{suffix}{compression}"
    file.write_bytes(COMPRESS[compression](CONTENTS[suffix]))
    assert [row for _, row in read_rows(file)] == ROWS
    expected = [row["completion"] + "<|end_turn|>" for row in ROWS]
    for path, streaming in ((file, False), (folder, True), (f"file://{folder}", True)):
        data = config(path, tmp_path, streaming=streaming)
        assert [counted for _, counted in read(data, tokenizer, len(ROWS))] == expected


def test_a_quote_that_is_never_closed_is_not_read_to_the_end(tmp_path):
    file = tmp_path / "a.csv"
    with file.open("wb") as opened:
        opened.write(b'text\n"')
        for _ in range(70):
            opened.write((b"x" * 1023 + b"\n") * 1024)
    with pytest.raises(RowFault, match=r"not a row \(field larger than field limit"):
        list(read_rows(file))
