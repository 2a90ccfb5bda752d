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
from benchmarks.verification.architecture_page import INDENT, SCHEDULED, SHARED, page, summary
from benchmarks.verification.architectures import ArchitectureResult, Support, examine, read_results, write_result
from benchmarks.verification.scheduled_architectures import examine_scheduled
from benchmarks.verification.shared_architectures import examine_shared
from weft.conf.schema import ContextExchange
from weft.engine.backward import SavedForward

FOUND = [
    ArchitectureResult("llama", "LlamaForCausalLM", Support.exact, packing="apart", folder="loads and exports"),
    ArchitectureResult("gemma3n", "Gemma3nForCausalLM", Support.refused, "layers | share"),
    ArchitectureResult("blt", "BltForCausalLM", Support.untried, "no number of layers"),
]


@pytest.mark.parametrize(("model_type", "packing"), [("llama", "apart"), ("openai-gpt", "leaks")])
def test_exact(model_type, packing):
    found = examine(model_type)
    assert (found.support, found.folder, found.packing) == (Support.exact, "loads and exports", packing), found


def test_refused_and_untried():
    assert examine("xlm").support is Support.refused
    assert examine("gemma4_assistant").support is Support.untried


@pytest.mark.parametrize(
    ("model_type", "sizes", "support", "reason"),
    [
        ("llama", {"tensor": 2}, Support.exact, ""),
        ("mixtral", {"expert": 2}, Support.exact, ""),
        ("gpt2", {"tensor": 2}, Support.refused, "transformers has no tensor-parallel plan"),
        ("bloom", {"context": 2}, Support.refused, "does not look up its attention by name"),
        ("llama", {"expert": 2}, Support.refused, "has no experts"),
    ],
)
def test_shared_inside_of_layers(model_type, sizes, support, reason):
    found = examine_shared(model_type, sizes)
    assert found.support is support and reason in found.reason, found


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("model_type", "sizes", "support"),
    [("gpt_neox", {"tensor": 2}, Support.exact), ("gpt2", {"tensor": 2}, Support.refused)],
)
def test_schedules_inside_of_layers(model_type, sizes, support):
    """Under zbv, dualpipev and auto, with biases, and with adapters and a resized vocabulary."""
    found = examine_scheduled(model_type, sizes)
    assert found.support is support and found.shared == "tensor 2, schedules", found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_bias_reduced_after_its_first_gradient_is_wrong(monkeypatch):
    """The table finds what it has to: a bucket that does not wait for a bias's gradient of W."""
    monkeypatch.setattr(
        SavedForward, "coming", lambda saved: Counter(list(saved.tape._deferred)) if saved.tape else None
    )
    known = {"gpt_neox": ArchitectureResult("gpt_neox", "GPTNeoXForCausalLM", Support.exact)}
    found = examine_scheduled("gpt_neox", {"tensor": 2}, known)
    assert found.support is Support.wrong and "a gradient came after the last one" in found.reason, found


@pytest.mark.parametrize(
    ("model_type", "support", "reason"),
    [
        ("llama", Support.exact, ""),
        ("gemma2", Support.exact, ""),
        ("gpt_oss", Support.refused, "parallel.context_exchange=ring"),
    ],
)
def test_rings(model_type, support, reason):
    found = examine_shared(model_type, {"context": 2}, ContextExchange.ring)
    assert found.support is support and reason in found.reason and found.shared == "context 2, ring", found


def test_what_members_get_wrong_is_found(monkeypatch):
    """The survey does not rest on the check before a run."""
    monkeypatch.setattr(shared_architectures, "check_axes", lambda *_, **__: None)
    assert examine_shared("bart", {"context": 2}).support is Support.wrong


def test_results_are_read_back_from_their_file(tmp_path):
    file = tmp_path / "found.jsonl"
    for result in FOUND:
        write_result(result, file)
    assert list(read_results(file).values()) == FOUND and read_results(tmp_path / "none") == {}
    write_result(ArchitectureResult("opt", "OPTForCausalLM", Support.exact, transformers="0.0"), file)
    assert "opt" not in read_results(file)  # of another version
    shared = ArchitectureResult("llama", "LlamaForCausalLM", Support.refused, "why", shared="tensor 2")
    write_result(shared, file)
    assert read_results(file)["llama"] == FOUND[0] and read_results(file, "tensor 2") == {"llama": shared}
    with file.open("a") as stream:
        stream.write("{}\n")
    with pytest.raises(ValueError, match="line 6 is not a result"):
        read_results(file)


def test_page_has_a_row_per_type_and_reasons_as_notes():
    assert "1 exact, 1 refused, 1 untried, 0 WRONG; 50 % of those" in summary(FOUND)
    scheduled = {"tensor 2": {"llama": FOUND[0]}, "context 2": {}}
    lines = page(FOUND, dict.fromkeys(SHARED, FOUND), scheduled).splitlines()
    rows = {name: cells for name, *cells in _rows_of("\n".join(lines))}
    assert rows["llama"] == ["exact", "apart", *4 * ["exact"], "exact", "-"]
    assert rows["gemma3n"] == ["refused:2", "-", *4 * ["refused:2"], "-", "-"]
    assert "2. layers | share" in lines
    assert any(line.startswith("- **tensor**: tensor 2: 1 exact, 1 refused, 1 untried, 0 WRONG") for line in lines)


PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"


def _rows_of(text: str) -> list[list[str]]:
    """Return the name and the results of each type on a page: in its columns, then those under schedules."""
    rows: list[list[str]] = []
    cells: list[str] = []
    for line in text.split("```")[1].strip().splitlines()[1:]:
        if line.startswith(INDENT):
            rows += [[name, *cells] for name in line.split()]
        else:
            both = [cell.partition("/") for cell in line.split()]
            cells = [cell for cell, _, _ in both]
            cells += [under or cell for cell, _, under in both[2 : 2 + len(SCHEDULED)]]
    return sorted(rows)


def _results_of(
    text: str,
) -> tuple[list[ArchitectureResult], dict[str, list[ArchitectureResult]], dict[str, dict[str, ArchitectureResult]]]:
    """Read a page back: results of stages, of members of each axis, and of those under schedules."""
    version = re.search(r"Every type for which transformers (\S+) has", text).group(1)
    notes = dict(re.findall(r"(?m)^(\d+)\. (.*)$", text))
    rows = _rows_of(text)

    def result(model_type: str, cell: str, **more: str) -> ArchitectureResult:
        support, _, note = cell.partition(":")
        name = architectures.causal_class(model_type)
        return ArchitectureResult(model_type, name, Support(support), notes.get(note, ""), transformers=version, **more)

    def of_stages(name: str, cell: str, packing: str) -> ArchitectureResult:
        more = {"packing": packing, "folder": "loads and exports"} if cell.startswith("exact") else {}
        return result(name, cell, **more)

    return (
        [of_stages(*row[:3]) for row in rows],
        {
            axis: [result(row[0], row[column], shared=axis) for row in rows]
            for column, axis in enumerate(SHARED, start=3)
        },
        {
            axis: {row[0]: result(row[0], row[column]) for row in rows if row[column] != "-"}
            for column, axis in enumerate(SCHEDULED, start=3 + len(SHARED))
        },
    )


def test_the_page_of_the_docs_is_of_the_types_that_there_are():
    """It is what `page` writes of its own rows, so that counts, too, are true; and those are of this transformers."""
    text = PAGE.read_text()
    stages, shared, scheduled = _results_of(text)
    assert {result.transformers for result in stages} == {transformers.__version__}, (
        "run `python -m benchmarks parity --all`"
    )
    assert [result.model_type for result in stages] == architectures.causal_types()
    assert {name: architectures.causal_class(name) for name in architectures.causal_types()} == {
        result.model_type: result.model_class for result in stages
    }
    for axis in SHARED:
        assert [result.model_type for result in shared[axis]] == architectures.causal_types(), axis
    assert page(stages, shared, scheduled) == text
    found = [*stages, *(result for some in shared.values() for result in some)]
    found += [result for some in scheduled.values() for result in some.values()]
    assert Support.wrong not in {result.support for result in found}


def _die(model_type: str) -> ArchitectureResult:
    os._exit(3)


def _compute(model_type: str) -> ArchitectureResult:
    while True:
        pass


def _sleep(model_type: str) -> ArchitectureResult:
    time.sleep(2)
    return ArchitectureResult(model_type, "", Support.exact)


@pytest.mark.parametrize(
    ("trial", "support", "reason"),
    [
        (_die, Support.untried, "its process ended with 3"),
        (_compute, Support.untried, "not done after 1 s of processor time"),
        (_sleep, Support.exact, ""),
    ],
)
def test_only_processor_time_counts_against_an_architecture(monkeypatch, trial, support, reason):
    monkeypatch.setattr(architectures, "LIMIT_S", 1)
    found: list[ArchitectureResult] = []
    architectures.survey(["llama"], jobs=1, stop_after_s=0, note=found.append, trial=trial)
    assert [(f.support, f.reason) for f in found] == [(support, reason)]


def test_an_architecture_that_waits_for_ever_is_given_up(monkeypatch):
    monkeypatch.setattr(architectures, "STUCK_S", 0.2)
    found: list[ArchitectureResult] = []
    architectures.survey(["llama"], jobs=1, stop_after_s=0, note=found.append, trial=_sleep)
    assert [(f.support, f.reason) for f in found] == [(Support.untried, "not done after 0.2 s")]


def test_every_type_is_asked_about():
    assert len(architectures.causal_types()) > 150
    with pytest.raises(ValueError, match="no such causal architecture"):
        parity.main(["--all", "lama"])
