"""A resumed run goes on as if it had never stopped, in the same layout and in others."""

import json
import shutil
from itertools import chain, product
from pathlib import Path

import pytest
import torch

from tests.engine.checkpoint.engines import PRECISIONS, each, resave, resume, save_and_go_on, save_in_background, tags
from tests.engine.tiny import tiny_config
from weft.conf.schema import LoraConfig, PlacementKind, ScheduleKind
from weft.engine.checkpoint import CheckpointError, newest, open_checkpoint
from weft.engine.checkpoint.pieces import checksum
from weft.tools.ranks import run_ranks

TOTAL = 4
"""Micro-batches of a step over all replicas."""


def config(stages, replicas, *, precision=PRECISIONS[0], zero=0, arch="llama", layers=4, **overrides):
    made = tiny_config(stages=stages, microbatches=TOTAL // replicas, layers=layers)
    made.train.precision = precision
    made.zero.stage = zero
    made.pipeline.debug = False
    made.model.arch = arch
    made.model.overrides |= overrides
    return made


@pytest.mark.slow
def test_same_layout_is_bit_equal(tmp_path):
    """Read by other processes than those that wrote."""
    layouts = [*product(PRECISIONS, (0, 1, 3))]
    configs = [config(1, 2, precision=precision, zero=zero) for precision, zero in layouts]
    folders = [str(tmp_path / f"{precision.name} {zero}") for precision, zero in layouts]
    written = [(made, folder, 3, 4, TOTAL) for made, folder in zip(configs, folders, strict=True)]
    read = [(made, folder, 4, TOTAL) for made, folder in zip(configs, folders, strict=True)]
    whole = run_ranks(2, each, save_and_go_on, written, timeout_s=240)
    again = run_ranks(2, each, resume, read, timeout_s=240)
    for of_rank, after_of_rank in zip(whole, again, strict=True):
        for layout, before, after in zip(layouts, of_rank, after_of_rank, strict=True):
            assert after["losses"] == before["losses"][3:], layout
            assert after["rng"] == before["rng"], layout
            assert after["lr"] == before["lr"], layout
            assert after["client"] == {"mark": 3}, layout
            assert after["path"] == "step-00000003", layout
            assert after["steps"] == 7, layout


@pytest.mark.slow
def test_background(tmp_path):
    """The checkpoint has the state at the time of the call, not that of later training."""
    made = config(2, 1)
    whole = run_ranks(2, save_in_background, made, str(tmp_path), 2, 3, TOTAL)
    again = run_ranks(2, resume, made, str(tmp_path), 3, TOTAL)
    assert [rank["losses"] for rank in again] == whole


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 3])
def test_tags_and_parts(tmp_path, zero):
    """Only the requested parts are restored."""
    made = config(1, 2, zero=zero)
    made.checkpoint.keep = 1
    for seen in run_ranks(2, tags, made, str(tmp_path), TOTAL):
        assert Path(seen["newest"]).name == "step-00000005"
        parts = [seen[name] for name in ("all", "no moments", "no rates", "module only")]
        assert {part["path"] for part in parts} == {"best"}
        assert {tuple(part["ema"]) for part in parts} == {(0, 1, 2)}
        assert len({part["loss"] for part in parts}) == 1, "all have the weights"
        assert [part["steps"] for part in parts] == [2, 2, 2, 5]
        assert [part["kept_moments"] for part in parts] == [False, True, False, True]
        assert [part["rate"] for part in parts] == [seen[name] for name in ("rate", "rate", "last_rate", "last_rate")]
        assert seen["again"] == seen["losses"][2:]
        assert "tag='worst': " in seen["missing"] and "there are: best, step-00000005" in seen["missing"]
        assert "client_state.args: a object cannot be stored without pickle" in seen["unfit"]
        assert seen["strict"].startswith("ValueError: load_checkpoint: load_module_strict=False")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sites_that_share_no_file_system(tmp_path):
    """Two stages of two replicas each, one site per stage; the embeddings at both ends are tied."""
    roots = {zero: tmp_path / f"zero {zero}" for zero in (0, 1)}
    folders = {zero: f"{root}/site{{site}}" for zero, root in roots.items()}
    made = {zero: config(2, 2, zero=zero, tie_word_embeddings=True) for zero in roots}
    other = {zero: config(1, 4, zero=zero, tie_word_embeddings=True) for zero in roots}

    def run(function, configs, *args):
        """By rank and, in order, by ZeRO stage."""
        return run_ranks(4, each, function, [(configs[zero], folders[zero], *args) for zero in roots])

    whole = run(save_and_go_on, made, 2, 3, TOTAL)
    for root in roots.values():
        assert {path.name for path in root.iterdir()} == {"site0", "site1"}
    rest = [[found["losses"][2:] for found in rank] for rank in whole]
    assert [[found["losses"] for found in rank] for rank in run(resume, made, 3, TOTAL)] == rest
    for error in chain.from_iterable(run(refused, other)):
        assert "was written on another file system" in error
    for root in roots.values():
        for source, target in (("site0", "site1"), ("site1", "site0")):
            for file in (root / source / "step-00000002").glob("*.safetensors"):
                shutil.copy(file, root / target / "step-00000002")
    for rank, before in zip(run(resume, other, 3, TOTAL), rest, strict=True):
        for found, expected in zip(rank, before, strict=True):
            assert found["losses"] == pytest.approx(expected, rel=1e-5)
    for root in roots.values():
        shutil.rmtree(root / "site1")
    for error in chain.from_iterable(run(refused, made)):
        assert "none is complete on every rank" in error


def refused(made, folder: str) -> str:
    """The error of loading."""
    with pytest.raises(CheckpointError) as caught:
        resume(made, folder, 0, TOTAL)
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS[:2], ids=lambda p: p.name)
def test_another_layout_goes_on_alike(tmp_path, precision):
    """Stages, replicas and ZeRO stage change; tied embeddings lie on two ranks, then on one."""
    first = config(2, 2, zero=1, precision=precision, tie_word_embeddings=True)
    other = config(1, 2, zero=0, precision=precision, tie_word_embeddings=True)
    whole = run_ranks(4, save_and_go_on, first, str(tmp_path), 3, 4, TOTAL)
    again = run_ranks(2, resume, other, str(tmp_path), 4, TOTAL, 2)
    tolerance = {"rel": 1e-5} if precision is PRECISIONS[0] else {"rel": 2e-3}
    for rank in again:
        assert rank["losses"] == pytest.approx(whole[0]["losses"][3:], **tolerance)
        assert rank["lr"] == whole[0]["lr"]
        assert rank["steps"] == 7


def assert_resaves(folder: Path, count: int) -> None:
    """All ``count`` checkpoints hold the same values, bit for bit."""
    saved = [open_checkpoint(newest(folder / str(number))) for number in range(count)]
    names = {name for name in saved[0].names if not name.startswith("rng/")}
    expected = saved[0].load(names)
    assert any(name.startswith("optim/exp_avg_sq/") for name in names)
    for checkpoint in saved[1:]:
        assert {name for name in checkpoint.names if not name.startswith("rng/")} == names
        for name, tensor in checkpoint.load(names).items():
            assert torch.equal(tensor, expected[name]), name
        for key in ("counters", "groups", "lr_scheduler"):
            assert checkpoint.meta[key] == saved[0].meta[key]
        for key in ("cur_scale", "cur_iter", "last_overflow_iter"):
            assert checkpoint.meta["loss_scale"].get(key) == saved[0].meta["loss_scale"].get(key)


LAYOUTS = {
    "stages, replicas and ZeRO": [(4, 1, 0), (1, 4, 1), (2, 2, 3), (1, 4, 0), (2, 2, 2), (1, 4, 3), (4, 1, 1)],
    "folds": [(2, 2, 2, "w"), (4, 1, 0), (2, 2, 3, "zbv"), (1, 4, 1)],
}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_layouts_hold_equal_values(tmp_path):
    chains = {}
    for (name, layouts), precision in product(LAYOUTS.items(), PRECISIONS):
        configs = []
        for stages, replicas, zero, *schedule in layouts:
            made = config(stages, replicas, zero=zero, precision=precision, tie_word_embeddings=True)
            if schedule:
                made.pipeline.schedule = ScheduleKind[schedule[0]]
                made.pipeline.placement = PlacementKind.fold
                made.pipeline.microbatches = 8
            configs.append(made)
        chains[tmp_path / f"{name} {precision.name}"] = configs
    run_ranks(4, each, resave, [(configs, str(folder)) for folder, configs in chains.items()], timeout_s=280)
    for folder, configs in chains.items():
        assert_resaves(folder, len(configs))


@pytest.mark.slow
def test_buffers(tmp_path):
    """DeepSeek-V3's routers keep a bias that is a buffer, not a parameter."""
    model = {
        "arch": "deepseek_v3",
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 16,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    }
    run_ranks(2, resave, [config(2, 1, **model), config(1, 2, zero=1, **model)], str(tmp_path))
    assert_resaves(tmp_path, 2)
    names = open_checkpoint(newest(tmp_path / "1")).names
    assert {n for n in names if n.startswith("buffer/")} == {
        f"buffer/model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2, 3)
    }


@pytest.mark.slow
def test_adapters(tmp_path):
    """With frozen weights in bf16, and a layout in which a rank trains nothing of its own."""
    configs = [config(2, 1, precision=PRECISIONS[1]), config(1, 2, precision=PRECISIONS[1], zero=3)]
    for made in configs:
        made.model.lora = LoraConfig(enabled=True, rank=2)
    run_ranks(2, resave, configs, str(tmp_path))
    assert_resaves(tmp_path, 2)
    checkpoint = open_checkpoint(newest(tmp_path / "1"))
    assert any("lora_A" in name for name in checkpoint.names)


@pytest.mark.slow
def test_other_models_are_refused(tmp_path):
    made = config(1, 2)
    run_ranks(2, resave, [made], str(tmp_path))
    folder = str(tmp_path / "0")
    others = [config(1, 2, layers=3), config(1, 2, layers=5), config(1, 2, intermediate_size=48)]
    for fewer, more, narrower in run_ranks(2, each, refused, [(other, folder) for other in others]):
        assert "9 tensors that this model lacks" in fewer
        assert "lacks the model's model.layers.4." in more
        assert "has shape (32, 64), the model's has (32, 48)" in narrower or "(48, 32)" in narrower


@pytest.mark.slow
def test_a_flipped_bit_falls_back(tmp_path):
    """Damage inside a tensor shows only when it is read; then every rank takes the checkpoint before."""
    made = config(1, 2, zero=1)
    run_ranks(2, save_and_go_on, made, str(tmp_path), 2, 0, TOTAL)
    expected = run_ranks(2, resume, made, str(tmp_path), 1, TOTAL)
    shutil.copytree(tmp_path / "step-00000002", tmp_path / "step-00000009")
    manifest = tmp_path / "step-00000009" / "manifest.json"
    body = json.loads(manifest.read_text())["checkpoint"] | {"serial": 2}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    manifest.write_text(f'{{"checksum":"{checksum(text.encode())}","checkpoint":{text}}}')
    assert newest(tmp_path) == tmp_path / "step-00000009"
    shard = tmp_path / "step-00000009" / "rank-001.safetensors"
    content = bytearray(shard.read_bytes())
    content[-20000] ^= 4
    shard.write_bytes(content)
    again = run_ranks(2, resume, made, str(tmp_path), 1, TOTAL)
    assert [rank["path"] for rank in again] == ["step-00000002"] * 2
    assert [rank["losses"] for rank in again] == [rank["losses"] for rank in expected]
