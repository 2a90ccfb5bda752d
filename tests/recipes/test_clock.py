"""A chat template shows the same date on all ranks, and after a resume on another day."""

import json
from datetime import datetime

import pytest

from weft.conf.schema import DataConfig, DataKind
from weft.engine.data import build_loader, open_source
from weft.engine.data.tokenizer import train_bpe
from weft.recipes import preparation
from weft.recipes.preparation import read_clock, start_clock

DATED = (
    "{{ strftime_now('%Y-%m-%d %H:%M') }}{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


class Another(datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2030, 5, 6, 7, 8, 9, 10)


def test_run_keeps_the_time_of_its_start(tmp_path, monkeypatch):
    first = start_clock(tmp_path)
    monkeypatch.setattr(preparation, "datetime", Another)
    assert start_clock(tmp_path) == first == read_clock(tmp_path).isoformat()
    assert start_clock(tmp_path, anew=True) == "2030-05-06T07:08:09"
    (tmp_path / "clock.json").write_text("{}")
    with pytest.raises(ValueError, match=r"clock\.json: holds no time .*remove it"):
        read_clock(tmp_path)


@pytest.mark.parametrize("streaming", [False, True])
def test_template_shows_the_run_s_time(tmp_path, streaming):
    """Also where tokens of another run are cached."""
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    data = DataConfig(
        kind=DataKind.chat, path=str(path), chat_template=DATED, streaming=streaming, cache_dir=str(tmp_path / "c")
    )
    tokenizer = train_bpe(["2030-05-06 user: a assistant: b"], 300)
    for day in (datetime(2030, 5, 6, 7, 8), datetime(2031, 6, 7, 8, 9)):
        source = open_source(data, tokenizer, evaluation=False, now=day)
        loader = build_loader(data, tokenizer, microbatch_size=1, replica=0, num_replicas=1, seed=0, source=source)
        text = tokenizer.decode(next(loader)["input_ids"][0])
        loader.close()
        assert text.startswith(f"{day:%Y-%m-%d %H:%M}user: a")
