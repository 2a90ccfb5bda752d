"""The table of architectures: what is found, kept and shown; a few types tried for good."""

import os

import pytest

from weft.tools.verification import architectures, parity
from weft.tools.verification.architectures import (
    Finding,
    Verdict,
    examine,
    read_findings,
    summary,
    table,
    write_finding,
)

FOUND = [
    Finding("llama", "LlamaForCausalLM", Verdict.exact, packing="apart", folder="loads and exports"),
    Finding("gemma3n", "Gemma3nForCausalLM", Verdict.refused, "layers | share"),
    Finding("blt", "BltForCausalLM", Verdict.untried, "no number of layers"),
]


@pytest.mark.parametrize(("model_type", "packing"), [("llama", "apart"), ("openai-gpt", "leaks")])
def test_exact(model_type, packing):
    found = examine(model_type)
    assert (found.verdict, found.folder, found.packing) == (Verdict.exact, "loads and exports", packing), found


def test_refused_and_untried():
    assert examine("xlm").verdict is Verdict.refused
    assert examine("gemma4_assistant").verdict is Verdict.untried


def test_findings_are_kept(tmp_path):
    file = tmp_path / "found.jsonl"
    for finding in FOUND:
        write_finding(finding, file)
    assert list(read_findings(file).values()) == FOUND and read_findings(tmp_path / "none") == {}
    write_finding(Finding("opt", "OPTForCausalLM", Verdict.exact, transformers="0.0"), file)
    assert "opt" not in read_findings(file)  # of another version
    with file.open("a") as stream:
        stream.write("{}\n")
    with pytest.raises(ValueError, match="line 5 is no finding"):
        read_findings(file)


def test_the_page():
    assert "1 exact, 1 refused, 1 untried, 0 WRONG; 50 % of those" in summary(FOUND)
    page = table(FOUND).splitlines()
    assert "| llama | LlamaForCausalLM | exact | apart | loads and exports |" in page
    assert r"| gemma3n | Gemma3nForCausalLM | refused: layers \| share |  |  |" in page


def _die(model_type: str) -> Finding:
    os._exit(3)


def test_a_process_that_dies_is_a_finding(monkeypatch):
    monkeypatch.setattr(architectures, "examine", _die)
    found: list[Finding] = []
    architectures.survey(["llama"], jobs=1, stop_after_s=0, note=found.append)
    assert [(f.verdict, f.reason) for f in found] == [(Verdict.untried, "its process ended without a word")]


def test_every_type_is_asked_about():
    assert len(architectures.causal_types()) > 150
    with pytest.raises(ValueError, match="no such causal architecture"):
        parity.main(["--all", "lama"])
