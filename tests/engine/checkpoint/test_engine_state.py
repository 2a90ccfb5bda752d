"""Tests of an engine's stored state: stored, copied, validated, and read by the ranks that need it."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from weft.engine.checkpoint import CheckpointError, Piece, engine_state, open_checkpoint, save
from weft.engine.checkpoint.folder import LATEST
from weft.engine.checkpoint.pieces import share
from weft.engine.layout import RankLayout

COUNTERS = {name: number for number, name in enumerate(engine_state.COUNTERS, start=3)}
META = {
    LATEST: True,
    "client_state": {},
    "groups": {"weight/a": {"lr": 0.1}},
    "lr_scheduler": {},
    "loss_scale": {},
    "layout": {},
    "counters": COUNTERS,
}


def an_engine():
    model = nn.BatchNorm1d(3)
    stage = SimpleNamespace(model=model, prefix="model.")
    engine = SimpleNamespace(
        global_rank=2, device=torch.device("cpu"), module=SimpleNamespace(stages={0: stage}), **COUNTERS
    )
    return engine, model


@pytest.mark.parametrize("copy", [False, True])
def test_a_moment_holds_counters_buffers_and_random_states(copy):
    engine, model = an_engine()
    torch.manual_seed(5)
    state = torch.get_rng_state()
    moment = engine_state.Moment.now(engine, copy=copy)
    assert moment.counters == COUNTERS
    assert set(moment.buffers) == {f"model.{name}" for name, _ in model.named_buffers()}
    assert torch.equal(moment.random_states["rng/cpu/2"], state)
    model.running_mean.add_(7.0)
    assert bool((moment.buffers["model.running_mean"] == 7.0).all()) is not copy


@pytest.mark.parametrize(
    "change",
    [
        {"groups": {"weight/a": 3}},
        {"groups": []},
        {"client_state": None},
        {"counters": {}},
        {"counters": COUNTERS | {"another": 1}},
        {"counters": COUNTERS | {"global_steps": "3"}},
        {"loss_scale": 1.0},
        {"layout": 0},
        {"lr_scheduler": "none"},
    ],
)
def test_meta_of_another_form_is_refused(tmp_path, change):
    path = save(tmp_path, 1, [], META)
    assert engine_state.check_form(open_checkpoint(path)).step == 1
    path = save(tmp_path, 2, [], META | change)
    with pytest.raises(CheckpointError, match="meta is not an engine's"):
        engine_state.check_form(open_checkpoint(path))


@given(st.data())
@settings(deadline=None)
def test_sources_are_the_files_that_hold_a_ranks_fragments(data):
    """A fragment needs the files of its elements and no others; a state of another shape all of its files."""
    size, parts = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 4))
    start = data.draw(st.integers(0, size - 1))
    stop = data.draw(st.integers(start + 1, size))
    held = [Piece.whole("weight/a", torch.arange(float(size))), Piece.whole("optim/exp_avg/a", torch.ones(size))]
    pieces = [list(share(held, part, parts)) for part in range(parts)]
    files = [{piece.name: (piece.start, piece.start + piece.data.numel()) for piece in own} for own in pieces]
    stored = SimpleNamespace(
        names=["weight/a", "optim/exp_avg/a", "optim/step/a", "client/b", "buffer/c", "rng/cpu/9"],
        shape=lambda name: () if name == "optim/step/a" else (size,),
        pieces=lambda name, low=0, high=None, cut=None: [
            (SimpleNamespace(file=file), "F32")
            for file in {
                f"file {part}"
                for part, own in enumerate(files)
                if name in own and own[name][0] < (size if high is None else high) and low < own[name][1]
            }
            or {name}
        ],
    )
    engine, _ = an_engine()
    fragment = SimpleNamespace(name="a", shape=(size,), cut=None, start=start, tensor=torch.empty(stop - start))
    expected = {"optim/step/a", "client/b"}
    for name in ("weight/a", "optim/exp_avg/a"):
        expected |= {
            f"file {part}"
            for part, own in enumerate(files)
            if name in own and set(range(*own[name])) & set(range(start, stop))
        }
    assert engine_state.sources(engine, [fragment], stored) == expected


def test_in_another_layout_replicas_draw_anew_and_members_of_one_alike():
    """By step, so that what is resumed twice draws the same, and after another step something else."""
    layout = RankLayout((1,), 3, tensor=2)
    before, seeds = torch.get_rng_state(), {}
    try:
        for step in (5, 6):
            for rank in range(layout.world_size):
                engine = SimpleNamespace(
                    global_rank=rank,
                    layout=layout,
                    module=SimpleNamespace(placement=SimpleNamespace(rank_stages=((0,),))),
                    num_replicas=3,
                    device=torch.device("cpu"),
                    optimizer=SimpleNamespace(loss_scaler=SimpleNamespace(dynamic=False)),
                )
                meta = {"loss_scale": {}, "counters": COUNTERS, "layout": {}}
                engine_state._restore_progress(engine, SimpleNamespace(step=step, meta=meta))
                assert {name: getattr(engine, name) for name in COUNTERS} == COUNTERS
                seeds[step, rank] = torch.initial_seed()
    finally:
        torch.set_rng_state(before)
    for (step, rank), seed in seeds.items():
        alike = {key for key, other in seeds.items() if other == seed}
        replica = layout.position(rank).replica
        assert alike == {(step, r) for r in range(layout.world_size) if layout.position(r).replica == replica}


def test_fragments_are_taken_once_nothing_is_being_gathered():
    log = []
    sharding = SimpleNamespace(settle=lambda: log.append("settled"), fragments=lambda: log.append("taken") or ["one"])
    assert engine_state.fragments(SimpleNamespace(sharding=sharding)) == ["one"]
    assert log == ["settled", "taken"]
