"""The benchmark of a block: kernels compute the same, speeds follow from shapes, and what is missing is named."""

import json
import os
from contextlib import nullcontext

import pytest
import torch

from benchmarks import block
from benchmarks.blocks.clock import Clock, Measured
from benchmarks.blocks.llama import LLAMA_8B, TINY, VARIANTS, Block
from tests.interpreter import python

CPU = torch.device("cpu")
SOON = ("--tiny", "--tokens", "8", "--row-seconds", "0.001")


def bench(*arguments, timeout_s=500, **environment):
    """Run the benchmark in a process of its own, because Triton decides at its import whether it interprets."""
    return python("-m", "benchmarks", "block", *SOON, *arguments, timeout_s=timeout_s, env=os.environ | environment)


def rows_of(file):
    tables = json.loads(file.read_text())["tables"]
    return [[dict(zip(table["columns"], row, strict=True)) for row in table["rows"]] for table in tables]


@pytest.mark.parametrize("tokens", [4096, 8192])
def test_operations_are_those_of_the_shapes(tokens):
    """Products with weights, and the half of attention that the causal mask leaves; the backward has twice as many."""
    weights = 2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336
    pairs = tokens * (tokens + 1) / 2
    assert LLAMA_8B.flops(tokens) == pytest.approx(3 * (2 * tokens * weights + 2 * 2 * pairs * 4096), rel=1e-3)


def test_rows_of_a_block_state_speed_memory_and_difference(tmp_path):
    file = tmp_path / "block.json"
    more = ("--parts", "block", "--variants", "plain", "varlen", "split", "--json", str(file))
    assert block.main([*SOON, *more]) == 0
    *_, table = json.loads(file.read_text())["tables"]
    rows = {row[0]: dict(zip(table["columns"], row, strict=True)) for row in table["rows"]}
    assert rows.keys() == {"plain", "varlen", "split"}
    for row in rows.values():
        seconds = (float(row["forward ms"]) + float(row["backward ms"])) / 1e3
        assert float(row["TFLOP/s"]) == pytest.approx(TINY.flops(8) / seconds / 1e12, rel=0.02)
        assert row["MFU"] == "" and float(row["peak MB"]) > 0, "without a data sheet there is no MFU"
    assert rows["plain"]["time / first"] == "1.00" and float(rows["plain"]["difference"]) == 0
    assert float(rows["split"]["difference"]) == 0, "the same products, in another order"
    assert 0 < float(rows["varlen"]["difference"]) < 2e-2


def test_mfu_is_of_the_data_sheet_and_judged_on_an_h100(monkeypatch):
    measured = Measured(forward_s=1.0, backward_s=2.0, peak_bytes=1, results={"output": torch.ones(2)})
    monkeypatch.setattr(block, "data_sheet", lambda device: block.GPU_KINDS["H100"])
    rows = block.Rows(Clock(CPU, 0.0), 60.0)
    rows.clock.measure = lambda passes: measured
    with Block(TINY, 8, CPU).passes(VARIANTS["plain"], 8) as passes:
        row = rows.row(("block",), lambda device: None, lambda: nullcontext(passes), 3 * 0.6 * 989.4e12)
    assert row["MFU"] == "60.0%" and rows.best_mfu == pytest.approx(0.6)


class TestMissing:
    def test_a_gpu(self):
        with pytest.raises(ValueError, match=r"no GPU: a block of a Llama-8B takes minutes .* with --tiny"):
            block.main([])

    def test_a_named_variant(self):
        with pytest.raises(ValueError, match=r"--variants 'flash_attention_2': model\.attn_.*flash-attn is"):
            block.main([*SOON, "--variants", "flash_attention_2"])

    def test_an_unknown_variant_and_no_tokens(self):
        with pytest.raises(ValueError, match="--variants fast: not known; choose from plain, fused"):
            block.main([*SOON, "--variants", "fast"])
        with pytest.raises(ValueError, match="--tokens 0: at least 1"):
            block.main(["--tiny", "--tokens", "0"])

    def test_what_a_row_needs_is_its_note_and_a_failure_ends_no_other_row(self):
        def fails(_):
            raise RuntimeError("no kernel image\nis available")

        rows = block.Rows(Clock(CPU, 0.0), 60.0)
        assert rows.row((), VARIANTS["flex_attention"].check, fails)["note"].startswith("left out: model.attn_impl")
        assert not rows.has_failed
        assert rows.row((), lambda device: None, lambda: fails(0))["note"] == (
            "FAILED: RuntimeError: no kernel image is available"
        )
        assert rows.has_failed
        late = block.Rows(Clock(CPU, 0.0), -1.0)
        assert late.row((), lambda device: None, lambda: fails(0))["note"] == "left out: no time is left"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kernels_and_fused_blocks_compute_what_torch_computes(tmp_path):
    """Through Triton's interpreter. What torch.compile makes is compiled for the CPU."""
    pytest.importorskip("triton")
    pytest.importorskip("liger_kernel")
    file = tmp_path / "block.json"
    variants = ("plain", "fused", "fused, split")
    done = bench("--variants", *variants, "--json", str(file), TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr
    blocks, kernels = rows_of(file)
    assert [row["block"] for row in blocks] == list(variants)
    assert all(float(row["difference"]) < 2e-2 for row in blocks)
    made = {(row["kernel"], row["of"]) for row in kernels}
    assert {kernel for kernel, of in made if of.startswith("Liger")} == {"RMSNorm", "rotary", "SwiGLU", "cross-entropy"}
    assert ("cross-entropy", "Weft") in made
    assert all(float(row["difference"]) < 2e-2 for row in kernels if "linear_cross" not in row["of"])


@pytest.mark.gpu(
    shows="fused kernels round a Llama-8B's block, in bf16 at 4k tokens, no worse than Hugging Face's code"
)
def test_a_fused_block_is_as_exact_as_hugging_faces():
    """On an emulated GPU the shapes are tiny, because Triton interprets the kernels."""
    pytest.importorskip("liger_kernel")
    device = torch.device("cuda")
    is_real = torch.version.cuda is not None or torch.version.hip is not None
    shape, tokens = (LLAMA_8B, 4096) if is_real else (TINY, 8)
    model = Block(shape, tokens, device)

    def results(name):
        with model.passes(VARIANTS[name], tokens) as passes:
            return {name: tensor.detach().float() for name, tensor in passes.run().items()}

    found = {name: results(name) for name in ("plain", "fused", "varlen", "fused, split")}
    model.stage.float()
    exact = results("plain")
    errors = {
        name: {part: float((got[part] - want).norm() / want.norm()) for part, want in exact.items()}
        for name, got in found.items()
    }
    for name, of in errors.items():
        worse = {part: error for part, error in of.items() if error > 1.5 * errors["plain"][part] + 1e-3}
        assert not worse, f"{name}: {worse}, plain: {errors['plain']}"
    assert max(errors["plain"].values()) < 0.05
