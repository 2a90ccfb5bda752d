"""The table of architectures: what is found, kept and shown; a few types tried for good."""

import os

import pytest

from weft.tools.verification import architectures, parity, shared_architectures
from weft.tools.verification.architecture_page import SHARED, page, summary
from weft.tools.verification.architectures import Finding, Verdict, examine, read_findings, write_finding
from weft.tools.verification.shared_architectures import examine_shared

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


@pytest.mark.parametrize(
    ("model_type", "sizes", "verdict", "reason"),
    [
        ("llama", {"tensor": 2}, Verdict.exact, ""),
        ("mixtral", {"expert": 2}, Verdict.exact, ""),
        ("gpt2", {"tensor": 2}, Verdict.refused, "transformers has no tensor-parallel plan"),
        ("bloom", {"context": 2}, Verdict.refused, "does not look up its attention by name"),
        ("llama", {"expert": 2}, Verdict.refused, "has no experts"),
    ],
)
def test_shared_inside_of_layers(model_type, sizes, verdict, reason):
    found = examine_shared(model_type, sizes)
    assert found.verdict is verdict and reason in found.reason, found


def test_what_members_get_wrong_is_found(monkeypatch):
    """The survey does not rest on the check before a run."""
    monkeypatch.setattr(shared_architectures, "check_axes", lambda *_, **__: None)
    assert examine_shared("bart", {"context": 2}).verdict is Verdict.wrong


def test_findings_are_kept(tmp_path):
    file = tmp_path / "found.jsonl"
    for finding in FOUND:
        write_finding(finding, file)
    assert list(read_findings(file).values()) == FOUND and read_findings(tmp_path / "none") == {}
    write_finding(Finding("opt", "OPTForCausalLM", Verdict.exact, transformers="0.0"), file)
    assert "opt" not in read_findings(file)  # of another version
    shared = Finding("llama", "LlamaForCausalLM", Verdict.refused, "why", shared="tensor 2")
    write_finding(shared, file)
    assert read_findings(file)["llama"] == FOUND[0] and read_findings(file, "tensor 2") == {"llama": shared}
    with file.open("a") as stream:
        stream.write("{}\n")
    with pytest.raises(ValueError, match="line 6 is no finding"):
        read_findings(file)


def test_the_page():
    assert "1 exact, 1 refused, 1 untried, 0 WRONG; 50 % of those" in summary(FOUND)
    lines = page(FOUND, dict.fromkeys(SHARED, FOUND)).splitlines()
    assert "| llama | LlamaForCausalLM | exact | apart | loads and exports |" in lines
    assert r"| gemma3n | Gemma3nForCausalLM | refused: layers \| share |  |  |" in lines
    assert "| llama | exact | exact | exact |" in lines
    assert "- **tensor 2**: 1 exact, 1 refused, 1 untried, 0 WRONG." in lines


def _die(model_type: str) -> Finding:
    os._exit(3)


def test_a_process_that_dies_is_a_finding():
    found: list[Finding] = []
    architectures.survey(["llama"], jobs=1, stop_after_s=0, note=found.append, trial=_die)
    assert [(f.verdict, f.reason) for f in found] == [(Verdict.untried, "its process ended without a word")]


def test_every_type_is_asked_about():
    assert len(architectures.causal_types()) > 150
    with pytest.raises(ValueError, match="no such causal architecture"):
        parity.main(["--all", "lama"])
