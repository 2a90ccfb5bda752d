"""A run whose newest checkpoint is damaged goes on from the one before, and trains what it would have trained."""

import json
import os
import pickle
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.recipes.runs import Disk, prepare, records, run_all
from weft.tools.ranks import run_ranks

STEPS = 7


class Payload:
    """An object whose unpickling would run code."""

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def truncated(newest: Path, _: Path) -> None:
    shard = next(newest.glob("*.safetensors"))
    os.truncate(shard, shard.stat().st_size // 2)


def flipped(newest: Path, _: Path) -> None:
    shard = next(newest.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)


def missing(newest: Path, _: Path) -> None:
    next(newest.glob("*.safetensors")).unlink()


def empty_manifest(newest: Path, _: Path) -> None:
    (newest / "manifest.json").write_text("")


def pickled(newest: Path, touched: Path) -> None:
    payload = Payload()
    payload.path = touched
    for path in newest.iterdir():
        path.write_bytes(pickle.dumps(payload))
    (newest / "mp_rank_00_model_states.pt").write_bytes(pickle.dumps(payload))


DAMAGES = (truncated, flipped, missing, empty_manifest, pickled)


@pytest.mark.slow
def test_the_checkpoint_before_takes_over(tmp_path):
    settings = [*prepare(tmp_path), f"train.steps={STEPS}", "checkpoint.every=2", "checkpoint.keep=3"]
    runs = tmp_path / "runs"

    def attempt(name, **given):
        return {"settings": [*settings, f"train.name={name}"], **given}

    run_ranks(1, run_all, [attempt("whole"), attempt("killed", killed_at=7)])
    expected = [line["loss"] for line in records(runs / "whole", "train").values()]
    assert len(expected) == STEPS
    for damage in DAMAGES:
        shutil.copytree(runs / "killed", runs / damage.__name__)
        newest = runs / damage.__name__ / "checkpoints" / "step-00000006"
        damage(newest, tmp_path / "touched")
    ((*ends,),) = run_ranks(1, run_all, [attempt(damage.__name__) for damage in DAMAGES], timeout_s=300)
    assert [end["steps"] for end in ends] == [STEPS] * len(DAMAGES)
    for damage in DAMAGES:
        found = records(runs / damage.__name__, "train")
        assert [line["loss"] for line in found.values()] == expected, damage.__name__
    assert not (tmp_path / "touched").exists(), "a pickle was executed"


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own, of 90 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=90m", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)  # a rank may still be ending


@pytest.mark.slow
def test_a_disk_that_fills_up(tmp_path, small_disk):
    """The checkpoint that does not fit is said to, the one before stays, and with room the run goes on alike."""
    settings = [*prepare(tmp_path), f"train.steps={STEPS}", "checkpoint.every=2"]

    def attempt(folder, **given):
        return {"settings": [*settings, f"train.output_dir={folder}"], **given}

    whole, full, freed = attempt(tmp_path / "whole"), attempt(small_disk), attempt(small_disk / "freed")
    full["settings"].append("checkpoint.storage_wait_s=0")
    full |= {"disk": Disk(filled_at=(5, 32 << 10))}
    freed |= {"disk": Disk(filled_at=(4, 0), freed_at=5)}
    ((whole, full),) = run_ranks(1, run_all, [whole, full])
    assert whole["steps"] == STEPS
    assert re.search(r"needs [\d.]+ KiB, \d+ KiB are free; free space", full["error"]), "of the checkpoint at the end"
    assert len(records(small_disk / "run", "train")) == STEPS, "training goes on without the one before"
    kept = sorted(path.name for path in (small_disk / "run" / "checkpoints").iterdir())
    assert kept == ["step-00000002", "step-00000004"]
    (small_disk / "ballast").unlink()
    ((again,),) = run_ranks(1, run_all, [attempt(small_disk)])
    assert again["steps"] == STEPS
    expected, found = (records(folder / "run", "train") for folder in (tmp_path / "whole", small_disk))
    assert [line["loss"] for line in found.values()] == [line["loss"] for line in expected.values()]
    ((again,),) = run_ranks(1, run_all, [freed])
    assert again["steps"] == STEPS
    kept = {path.name for path in (small_disk / "freed" / "run" / "checkpoints").iterdir()}
    assert "step-00000007" in kept and "step-00000004" not in kept, "it did not fit"
    lines = (small_disk / "freed" / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, STEPS + 1)), "lines have waited for room"


@pytest.mark.slow
def test_the_last_checkpoint_waits_for_room(tmp_path, small_disk):
    settings = [*prepare(tmp_path), f"train.steps={STEPS}", f"train.output_dir={small_disk}"]
    ((end,),) = run_ranks(1, run_all, [{"settings": settings, "disk": Disk(filled_at=(STEPS, 0), freed_after_s=3.0)}])
    assert end["steps"] == STEPS
    assert [path.name for path in (small_disk / "run" / "checkpoints").iterdir()] == [f"step-{STEPS:08d}"]
    assert len(records(small_disk / "run", "train")) == STEPS


@pytest.mark.slow
def test_training_goes_on_while_its_folder_is_read_only(tmp_path, small_disk):
    settings = [*prepare(tmp_path), f"train.steps={STEPS}", "checkpoint.every=1", f"train.output_dir={small_disk}"]
    ((end,),) = run_ranks(1, run_all, [{"settings": settings, "disk": Disk(read_only=range(3, 6))}])
    assert end["steps"] == STEPS
    kept = {path.name for path in (small_disk / "run" / "checkpoints").iterdir()}
    assert f"step-{STEPS:08d}" in kept and len(kept) == 2
    lines = (small_disk / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, STEPS + 1)), "lines have waited"


@pytest.mark.slow
def test_a_stopped_run_resumes_as_if_it_had_not_been(tmp_path):
    """A signal to one rank ends all of them after the same step, also where an evaluation is due.

    Without clipping the norm, with which the request travels, is read one step later.
    """
    settings = [*prepare(tmp_path), f"train.steps={STEPS}", "train.eval_every=3", "pipeline.stages=2"]
    runs = tmp_path / "runs"

    def attempts(clip, **given):
        own = [*settings, f"optimizer.clip={clip}", f"train.name=stopped{clip}"]
        return [{"settings": [*own, f"train.name=whole{clip}"]}, {"settings": own, **given}, {"settings": own}]

    ends = run_ranks(2, run_all, [*attempts(1, signalled_at=3), *attempts(0, signalled_at=4)], timeout_s=280)[0]
    assert ends[1] == {"stopped": 143, "after": 3} and ends[4] == {"stopped": 143, "after": 5}
    for clip, again in ((1, ends[2]), (0, ends[5])):
        assert again["steps"] == STEPS
        for kind in ("train", "eval"):
            expected, found = (records(runs / f"{name}{clip}", kind) for name in ("whole", "stopped"))
            assert {s: line["loss"] for s, line in found.items()} == {s: line["loss"] for s, line in expected.items()}
