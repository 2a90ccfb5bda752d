"""A checkpoint of one layout is restored in any other, exactly, and training goes on from it."""

import itertools
import re
from math import prod
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.fp16 import loss_scaler
from torch.optim import SGD, AdamW

from tests.engine.cut_engine import CutEngine
from tests.engine.small_engine import SmallEngine, assert_equal, joined
from tests.engine.zero.replicas import small_muon
from tests.thread_ranks import run_in_threads
from weft.conf.schema import ZeroConfig
from weft.engine.checkpoint import (
    BackgroundWriter,
    CheckpointError,
    Wanted,
    check_folder,
    engine_checkpoint,
    exporting,
    load_newest,
    load_tagged,
    save_engine,
)
from weft.engine.checkpoint.pieces import whole_name
from weft.engine.checkpoint.shard_file import ShardReader
from weft.engine.zero.finite import NonFiniteError

KINDS = {
    "adamw": lambda parameters: AdamW(parameters, lr=0.02, weight_decay=0.1),
    "momentum": lambda parameters: SGD(parameters, lr=0.02, momentum=0.9),
    "plain": lambda parameters: SGD(parameters, lr=0.02),
    "muon": small_muon,
}
LAYOUTS = [(1, 1, 0), (1, 2, 1), (1, 3, 3), (2, 1, 0), (2, 2, 0), (2, 2, 2), (2, 1, 3)]
"""Stages, replicas, ZeRO's stage; a model has as many parts as stages, so those of one number go together."""
BUCKETS = {"reduce_bucket_size": 90, "allgather_bucket_size": 90}
CLIENT = {"mark": [1, None, "x"], "ema": torch.arange(5.0), "nested": {"a": (1.5, True)}}


def engine(stages, zero, kind, **more):
    make = CutEngine if "tensor" in more else SmallEngine
    return make(stages, ZeroConfig(stage=zero, **BUCKETS), KINDS[kind], **more)


def save(folder, stages, zero, kind, **more):
    """Two steps, a checkpoint, another step; the state at the checkpoint, and at the end."""
    made = engine(stages, zero, kind, **more)
    for _ in range(2):
        made.step()
    check_folder(made, folder, keep=2)
    save_engine(made, folder, client_state=CLIENT)
    at = made.held()
    made.step()
    return at, made.held()


def load(folder, stages, zero, kind, **more):
    """Return the restored state, and the state after another step."""
    made = engine(stages, zero, kind, **more)
    if zero == 2:  # over a state of its own
        made.step()
    path, client = load_newest(made, folder)
    at = made.held()
    made.step()
    return path.name, client, at, made.held()


PAIRS = [(a, b) for a, b in itertools.product(LAYOUTS, LAYOUTS) if a[0] == b[0]]
CASES = [(*pair, list(KINDS)[number % len(KINDS)]) for number, pair in enumerate(PAIRS)]


@pytest.mark.parametrize(("first", "second", "kind"), CASES)
def test_any_layout_goes_on_from_any_other(tmp_path, first, second, kind):
    tied = kind == "momentum"
    saved = run_in_threads(first[0] * first[1], save, tmp_path, first[0], first[2], kind, tied=tied)
    at, after = (joined(states) for states in zip(*saved, strict=True))
    found = run_in_threads(second[0] * second[1], load, tmp_path, second[0], second[2], kind, tied=tied)
    names, clients, ats, afters = zip(*found, strict=True)
    assert set(names) == {"step-00000002"}
    for client in clients:
        assert torch.equal(client["ema"], CLIENT["ema"])
        assert client["mark"] == CLIENT["mark"] and client["nested"] == CLIENT["nested"]
    assert_equal(joined(ats), at)
    assert_equal(joined(afters), after, exactly=first == second)


CUT = [(1, 1, 1, 0), (1, 1, 2, 1), (1, 1, 4, 0), (1, 2, 2, 0), (1, 2, 2, 1), (1, 2, 2, 3), (1, 3, 1, 2)]
"""Stages, replicas, members of a tensor group, ZeRO's stage."""
CUT_CASES = [
    (first, second, ("adamw", "momentum")[number % 2])
    for number, (first, second) in enumerate(itertools.product(CUT, CUT))
]


@pytest.mark.parametrize(("first", "second", "kind"), CUT_CASES)
def test_any_number_of_members_goes_on_from_any_other(tmp_path, first, second, kind):
    """Exactly what was saved is restored, from and to any parts of matrices."""
    saved = run_in_threads(prod(first[:3]), save, tmp_path, first[0], first[3], kind, tensor=first[2])
    at, after = (joined(states) for states in zip(*saved, strict=True))
    found = run_in_threads(prod(second[:3]), load, tmp_path, second[0], second[3], kind, tensor=second[2])
    names, _, ats, afters = zip(*found, strict=True)
    assert set(names) == {"step-00000002"}
    assert_equal(joined(ats), at)
    assert_equal(joined(afters), after, exactly=first == second)


def parts_of_a_checkpoint(folder, wanted):
    """A checkpoint under a tag is restored in part by an engine that has gone on with another learning rate."""
    made = engine(1, 1, "adamw", dynamic_scale=True)
    made.step()
    torch.manual_seed(5 + made.global_rank)
    save_engine(made, folder, client_state={}, tag="best")
    saved, random = made.held(), torch.get_rng_state()
    for _ in range(3):
        made.step()
    torch.manual_seed(99)
    before = made.held()
    with pytest.raises(CheckpointError, match="worst"):
        load_tagged(made, folder, "worst")
    path, client = load_tagged(made, folder, "best", wanted)
    assert (path.name, client) == ("best", {})
    return saved, before, made.held(), torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("optimizer", [False, True])
@pytest.mark.parametrize("scheduler", [False, True])
@pytest.mark.parametrize("progress", [False, True])
def test_only_what_is_wanted_is_restored(tmp_path, monkeypatch, optimizer, scheduler, progress):
    monkeypatch.setattr(loss_scaler, "dist", torch.distributed)  # it says who tells that the scale has grown
    wanted = Wanted(optimizer=optimizer, scheduler=scheduler, progress=progress)
    ((saved, before, found, random),) = run_in_threads(1, parts_of_a_checkpoint, tmp_path, wanted)
    assert saved["scale"] != before["scale"] and saved["rates"] != before["rates"]
    for key, kept in {"rates": scheduler, "scheduler": scheduler, "scale": progress, "counters": progress}.items():
        assert found[key] == (saved if kept else before)[key], key
    assert random is progress
    found, saved, before = (joined([state])["tensors"] for state in (found, saved, before))
    for name, tensor in found.items():
        assert torch.equal(tensor, (saved if optimizer or name.startswith("weight/") else before)[name]), name


def refused(folder, change):
    """An engine whose model or optimiser is not the one that saved; what it says."""
    made = engine(1, 1, "adamw")
    made.step()
    save_engine(made, folder, client_state={})
    other = change()
    with pytest.raises(CheckpointError) as caught:
        load_newest(other, folder)
    return str(caught.value)


CHANGES = {
    "an optimiser without its state": (lambda: engine(1, 1, "momentum"), "saved .* which SGD does not have"),
    "another number of parts": (
        lambda: SmallerEngine(),
        "holds 4 tensors that this model lacks, such as weight/part0.layers.1",
    ),
}


class SmallerEngine(SmallEngine):
    """Its model has lost a block."""

    def __init__(self):
        super().__init__(1, ZeroConfig(stage=1, **BUCKETS), KINDS["adamw"])
        kept = [f for f in self.sharding.fragments() if "layers.1" not in f.name]
        self.sharding.fragments = lambda: iter(kept)


@pytest.mark.parametrize("name", CHANGES)
def test_another_model_or_optimiser_is_refused_on_every_rank(tmp_path, name):
    change, said = CHANGES[name]
    for text in run_in_threads(2, refused, tmp_path, change):
        assert re.search(said, text), text


def exported(folder):
    """The stages that a rank hands over for export, and whether their weights were whole then."""
    seen = []

    def export_stages(stages, target, *, rank, gather, tokenizer, dtype):
        whole = [all(p.untyped_storage().nbytes() for p in stage.parameters()) for stage in stages]
        seen.append((target, rank, [stage.index for stage in stages], all(whole), gather(rank), tokenizer, dtype))

    made = engine(2, 3, "adamw")
    made.step()
    made.sharding._weights[made.pipe_rank].release()
    with pytest.MonkeyPatch.context() as patch:
        if made.global_rank == 0:
            patch.setattr(exporting, "export_stages", lambda *args, **more: exports[dist.get_rank()](*args, **more))
        exports[made.global_rank] = export_stages
        dist.barrier()
        exporting.export(made, folder, tokenizer="tokenizer", dtype=torch.float16)
        dist.barrier()
    return seen


exports = {}


def test_the_first_replica_exports_whole_weights(tmp_path):
    for rank, seen in enumerate(run_in_threads(4, exported, tmp_path)):
        stage, replica = divmod(rank, 2)
        assert seen == [
            (tmp_path, rank, [stage] if replica == 0 else [], True, [0, 1, 2, 3], "tokenizer", torch.float16)
        ]


def export_of_nan(folder):
    made = engine(1, 1, "adamw")
    made.check_finite = Mock(side_effect=NonFiniteError("diverged"))
    with pytest.raises(NonFiniteError, match="diverged"):
        exporting.export(made, folder / "model")
    return sorted(folder.iterdir())


def test_nothing_is_exported_of_a_model_that_has_diverged(tmp_path):
    assert run_in_threads(1, export_of_nan, tmp_path) == [[]]


def asked_for_room(folder):
    made = engine(1, 1, "adamw")
    made.step()
    check_folder(made, folder, keep=2)
    save_engine(made, folder, client_state={})
    check_folder(made, folder, keep=2)


@pytest.mark.parametrize("world", [1, 3])
def test_one_rank_asks_for_the_room_that_all_need(tmp_path, monkeypatch, world):
    asked = []
    monkeypatch.setattr(engine_checkpoint, "check_space", lambda folder, needed: asked.append((folder, needed)))
    run_in_threads(world, asked_for_room, tmp_path)
    (folder, three), (_, two) = asked
    assert folder == tmp_path
    assert three % 3 == 0 and two == three // 3 * 2, "as many as are kept and one more, less those that are there"


def saved_meanwhile(folder):
    """A checkpoint that is written while training goes on; its state, and what is restored."""
    made, writer = engine(1, 1, "adamw"), BackgroundWriter.open()
    made.step()
    path = save_engine(made, folder, client_state=CLIENT, background=writer, latest=False, tag="best")
    at = made.held()
    made.step()
    assert writer.wait() == path == folder / "best"
    assert load_newest(made, folder) is None, "only by its name"
    found, client = load_tagged(made, folder, "best")
    assert found == path and torch.equal(client["ema"], CLIENT["ema"])
    return at, made.held()


@pytest.mark.parametrize("world", [1, 2])
def test_what_is_written_in_the_background_is_of_the_moment_when_it_began(tmp_path, world):
    at, found = (joined(states) for states in zip(*run_in_threads(world, saved_meanwhile, tmp_path), strict=True))
    assert_equal(found, at)


class Members:
    """The members of a tensor group: all ranks."""

    def all_gather(self, shard):
        parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, shard)
        return SimpleNamespace(wait=lambda: torch.cat(parts))


def exported_parts(folder):
    """Return a member's exported parts, its name for each weight, and what it holds before and afterwards."""
    made, handed = engine(1, 1, "adamw", tensor=2), {}
    made.step()
    made.axes = SimpleNamespace(tensor=Members())
    before = made.held()["model"]

    def export_stages(stages, *_, **__):
        handed.update({name: p.detach().clone() for stage in stages for name, p in stage.named_global_parameters()})

    exports[made.global_rank] = export_stages
    with pytest.MonkeyPatch.context() as patch:
        if made.global_rank == 0:
            patch.setattr(exporting, "export_stages", lambda *args, **more: exports[dist.get_rank()](*args, **more))
        dist.barrier()
        exporting.export(made, folder)
        dist.barrier()
    return handed, before, made.held()["model"], made.part.cuts


def test_matrices_are_exported_whole_by_the_first_member_and_are_parts_again_afterwards(tmp_path):
    found = run_in_threads(2, exported_parts, tmp_path)
    (handed, *_), (none, *_) = found
    assert none == {}
    whole = {}
    for _, before, after, cuts in found:
        assert before.keys() == after.keys()
        for name, weight in before.items():
            assert torch.equal(after[name], weight)
            bare = whole_name(name).removeprefix("weight/")
            cut = cuts.get(bare)
            if cut is None:
                whole[bare] = weight
            else:
                cut.put(weight, whole.setdefault(bare, torch.empty(cut.shape)))
    assert handed.keys() == whole.keys()
    assert all(torch.equal(handed[name], weight) for name, weight in whole.items())


def test_what_replicas_hold_alike_is_read_by_one_of_them(tmp_path, monkeypatch):
    run_in_threads(1, save, tmp_path, 1, 0, "adamw")
    read, whole = [], ShardReader.read
    monkeypatch.setattr(
        ShardReader, "read", lambda reader, piece, dtype: read.append(piece.key) or whole(reader, piece, dtype)
    )
    run_in_threads(2, load, tmp_path, 1, 0, "adamw")
    shared = [key for key in read if key.startswith(("weight/", "optim/"))]
    assert shared and len(shared) == len(set(shared))
