"""The table of architectures: what is found, kept and shown; a few types tried for good."""

import os
import re
import time
from collections import Counter
from pathlib import Path

import pytest
import transformers

from benchmarks import parity
from benchmarks.verification import architectures, shared_architectures
from benchmarks.verification.architecture_page import SCHEDULED, SHARED, note_of, page, summary
from benchmarks.verification.architectures import Finding, Verdict, examine, read_findings, write_finding
from benchmarks.verification.scheduled_architectures import examine_scheduled
from benchmarks.verification.shared_architectures import examine_shared
from weft.conf.schema import ContextExchange
from weft.engine.backward import SavedForward

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


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("model_type", "sizes", "verdict"),
    [("gpt_neox", {"tensor": 2}, Verdict.exact), ("gpt2", {"tensor": 2}, Verdict.refused)],
)
def test_schedules_inside_of_layers(model_type, sizes, verdict):
    """Under zbv, dualpipev and auto, with biases, and with adapters and a resized vocabulary."""
    found = examine_scheduled(model_type, sizes)
    assert found.verdict is verdict and found.shared == "tensor 2, schedules", found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_bias_reduced_after_its_first_gradient_is_wrong(monkeypatch):
    """The table finds what it has to: a bucket that does not wait for a bias's gradient of W."""
    monkeypatch.setattr(
        SavedForward, "coming", lambda saved: Counter(list(saved.tape._deferred)) if saved.tape else None
    )
    known = {"gpt_neox": Finding("gpt_neox", "GPTNeoXForCausalLM", Verdict.exact)}
    found = examine_scheduled("gpt_neox", {"tensor": 2}, known)
    assert found.verdict is Verdict.wrong and "a gradient came after the last one" in found.reason, found


@pytest.mark.parametrize(
    ("model_type", "verdict", "reason"),
    [
        ("llama", Verdict.exact, ""),
        ("gemma2", Verdict.exact, ""),
        ("gpt_oss", Verdict.refused, "parallel.context_exchange=ring"),
    ],
)
def test_rings(model_type, verdict, reason):
    found = examine_shared(model_type, {"context": 2}, ContextExchange.ring)
    assert found.verdict is verdict and reason in found.reason and found.shared == "context 2, ring", found


def test_what_members_get_wrong_is_found(monkeypatch):
    """The survey does not rest on the check before a run."""
    monkeypatch.setattr(shared_architectures, "check_axes", lambda *_, **__: None)
    assert examine_shared("bart", {"context": 2}).verdict is Verdict.wrong


def test_results_are_read_back_from_their_file(tmp_path):
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
    with pytest.raises(ValueError, match="line 6 is not a result"):
        read_findings(file)


def test_page_has_a_row_per_type_and_reasons_as_notes():
    assert "1 exact, 1 refused, 1 untried, 0 WRONG; 50 % of those" in summary(FOUND)
    scheduled = {"tensor 2": {"llama": FOUND[0]}, "context 2": {}}
    lines = page(FOUND, dict.fromkeys(SHARED, FOUND), scheduled).splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in "\n".join(lines).split("```")[1].strip().splitlines()}
    assert rows["llama"] == ["exact", "apart", *4 * ["exact"], "exact", "-"]
    assert rows["gemma3n"] == ["refused:2", "-", *4 * ["refused:2"], "-", "-"]
    assert "2. layers | share" in lines
    assert any(line.startswith("- **tensor**: tensor 2: 1 exact, 1 refused, 1 untried, 0 WRONG") for line in lines)


def test_models_with_the_same_reason_share_a_note():
    one, other = (
        Finding(name, name.title(), Verdict.refused, f"{name.title()} differs, logits by {by} (full rows)")
        for name, by in (("bart", 0.3), ("mbart", 1.5))
    )
    assert note_of(one) == note_of(other) == "the model differs"


PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"


def _findings_of(text: str) -> tuple[list[Finding], dict[str, list[Finding]], dict[str, dict[str, Finding]]]:
    """Read a page back: results of stages, of members of each axis, and of those under schedules."""
    version = re.search(r"Every type for which transformers (\S+) has", text).group(1)
    notes = dict(re.findall(r"(?m)^(\d+)\. (.*)$", text))
    rows = [line.split() for line in text.split("```")[1].strip().splitlines()[1:]]

    def finding(model_type: str, cell: str, **more: str) -> Finding:
        verdict, _, note = cell.partition(":")
        name = architectures.causal_class(model_type)
        return Finding(model_type, name, Verdict(verdict), notes.get(note, ""), transformers=version, **more)

    def of_stages(name: str, cell: str, packing: str) -> Finding:
        more = {"packing": packing, "folder": "loads and exports"} if cell.startswith("exact") else {}
        return finding(name, cell, **more)

    return (
        [of_stages(*row[:3]) for row in rows],
        {
            axis: [finding(row[0], row[column], shared=axis) for row in rows]
            for column, axis in enumerate(SHARED, start=3)
        },
        {
            axis: {row[0]: finding(row[0], row[column]) for row in rows if row[column] != "-"}
            for column, axis in enumerate(SCHEDULED, start=3 + len(SHARED))
        },
    )


def test_the_page_of_the_docs_is_of_the_types_that_there_are():
    """It is what `page` writes of its own rows, so that counts, too, are true; and those are of this transformers."""
    text = PAGE.read_text()
    stages, shared, scheduled = _findings_of(text)
    assert {finding.transformers for finding in stages} == {transformers.__version__}, (
        "run `python -m benchmarks parity --all`"
    )
    assert [finding.model_type for finding in stages] == architectures.causal_types()
    assert {name: architectures.causal_class(name) for name in architectures.causal_types()} == {
        finding.model_type: finding.model_class for finding in stages
    }
    for axis in SHARED:
        assert [finding.model_type for finding in shared[axis]] == architectures.causal_types(), axis
    assert page(stages, shared, scheduled) == text
    found = [*stages, *(finding for some in shared.values() for finding in some)]
    found += [finding for some in scheduled.values() for finding in some.values()]
    assert Verdict.wrong not in {finding.verdict for finding in found}


def _die(model_type: str) -> Finding:
    os._exit(3)


def _compute(model_type: str) -> Finding:
    while True:
        pass


def _sleep(model_type: str) -> Finding:
    time.sleep(2)
    return Finding(model_type, "", Verdict.exact)


@pytest.mark.parametrize(
    ("trial", "verdict", "reason"),
    [
        (_die, Verdict.untried, "its process ended with 3"),
        (_compute, Verdict.untried, "not done after 1 s of processor time"),
        (_sleep, Verdict.exact, ""),
    ],
)
def test_only_processor_time_counts_against_an_architecture(monkeypatch, trial, verdict, reason):
    monkeypatch.setattr(architectures, "LIMIT_S", 1)
    found: list[Finding] = []
    architectures.survey(["llama"], jobs=1, stop_after_s=0, note=found.append, trial=trial)
    assert [(f.verdict, f.reason) for f in found] == [(verdict, reason)]


def test_an_architecture_that_waits_for_ever_is_given_up(monkeypatch):
    monkeypatch.setattr(architectures, "STUCK_S", 0.2)
    found: list[Finding] = []
    architectures.survey(["llama"], jobs=1, stop_after_s=0, note=found.append, trial=_sleep)
    assert [(f.verdict, f.reason) for f in found] == [(Verdict.untried, "not done after 0.2 s")]


def test_every_type_is_asked_about():
    assert len(architectures.causal_types()) > 150
    with pytest.raises(ValueError, match="no such causal architecture"):
        parity.main(["--all", "lama"])
