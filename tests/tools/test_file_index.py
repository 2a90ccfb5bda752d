"""The file index, README and map: complete, and short enough to read."""

from pathlib import Path

import pytest

from tests import file_index

ROOT = Path(__file__).parents[2]


def test_file_index_names_every_file_and_is_current():
    assert file_index.PAGE.read_text() == file_index.page(), "run `make files`"


def test_readme_and_map_together_are_at_most_4000_words():
    words = {name: len((ROOT / name).read_text().split()) for name in ("README.md", "docs/architecture.md")}
    assert words["README.md"] <= 1000 and sum(words.values()) <= 4000, words


def test_file_without_docstring_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(file_index, "ROOT", tmp_path)
    (tmp_path / "empty.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match=r"empty\.py has no docstring"):
        file_index.summary(Path("empty.py"))
