"""The page on architectures: which of transformers' causal types train in stages, and along which axes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import transformers

from benchmarks.verification.architectures import Finding, Verdict

MEANING: Mapping[Verdict, str] = {
    Verdict.exact: "logits, loss and gradients of its stages equal those of the whole model",
    Verdict.refused: "cannot be trained in stages; the self-check says why before anything starts",
    Verdict.untried: "transformers itself cannot build or run a small text-only model of it",
    Verdict.wrong: "accepted by the self-check, and yet other than the whole model: a defect",
}
SHARED = ("tensor 2", "context 2", "context 2, ring", "expert 2")
"""Ranks along the axes inside of layers that the page has columns for."""
SCHEDULED = ("tensor 2", "context 2")
"""Those that are tried under schedules as well."""


def summary(findings: Sequence[Finding]) -> str:
    """Counts, in one line."""
    exact = sum(finding.verdict is Verdict.exact for finding in findings)
    tried = sum(finding.verdict is not Verdict.untried for finding in findings)
    share = f"{100 * exact / tried:.0f} %" if tried else "none"
    return f"{len(findings)} causal architectures: {_counts(findings)}; {share} of those that could be tried are exact"


def page(
    findings: Sequence[Finding],
    shared: Mapping[str, Sequence[Finding]],
    scheduled: Mapping[str, Mapping[str, Finding]],
) -> str:
    """The page `docs/architectures.md`.

    Args:
        findings: of stages.
        shared: of members of each of `SHARED`.
        scheduled: of members of each of `SCHEDULED` under schedules, by type; some may be left out.
    """
    lines = [
        "# Architectures",
        "",
        f"Every type that transformers {transformers.__version__} has a causal language model for, tried by "
        "`python -m benchmarks parity --all`; with `--table docs/architectures.md` it also writes this page.",
        "",
        "## In stages",
        "",
        summary(findings) + ".",
        "",
        *(f"- **{verdict.value}**: {meaning}." for verdict, meaning in MEANING.items()),
        "",
        "Each is a small copy with random weights and every kind of layer of its default configuration (or of one from "
        "`benchmarks/verification/small_configs.py`, where the default cannot be shrunk), in fp32 on a CPU, each layer "
        "on a stage of its own and in two stages; plain, padded and packed batches, tolerance 1e-5 of the largest "
        "value. *Packing* says whether Hugging Face's own forward keeps packed documents apart; where it does not, "
        "`data.packing=true` is refused. *Folder* says whether stages load from a saved folder and export one that "
        "transformers loads, with equal logits.",
        "",
        *_rows("model_type", "class", "stages", "packing", "folder"),
    ]
    for finding in _sorted(findings):
        lines += _rows(finding.model_type, finding.model_class, _cell(finding), finding.packing, finding.folder)
    return "\n".join([*lines, "", *_shared_lines(shared), "", *_scheduled_lines(shared, scheduled)]) + "\n"


def _shared_lines(shared: Mapping[str, Sequence[Finding]]) -> list[str]:
    """The part on axes inside of layers."""
    lines = [
        "## Inside of layers",
        "",
        "The same types with two members of each axis of [parallelism](parallelism.md), by "
        "`python -m benchmarks parity --all --tensor 2`, `--context 2`, `--context 2 --exchange ring` and "
        "`--expert 2`. *Refused* is what the check "
        "before a run refuses. What it accepts is held against Hugging Face's own forward in more ways: several "
        "micro-batches, padded and packed rows, in two stages, with checkpointed layers and in evaluation; tolerance "
        "1e-4 of the largest value, for members add up in another order.",
        "",
        *(f"- **{axis}**: {_counts(shared[axis])}." for axis in SHARED),
        "",
        *_rows("model_type", *SHARED),
    ]
    cells = {axis: {finding.model_type: _cell(finding) for finding in shared[axis]} for axis in SHARED}
    for name in sorted(cells[SHARED[0]]):
        lines += _rows(name, *(cells[axis][name] for axis in SHARED))
    return lines


def _scheduled_lines(
    shared: Mapping[str, Sequence[Finding]], scheduled: Mapping[str, Mapping[str, Finding]]
) -> list[str]:
    """The part on axes under each kind of schedule that splits backwards or pairs micro-batches."""
    exact = {axis: {f.model_type for f in shared[axis] if f.verdict is Verdict.exact} for axis in SCHEDULED}
    lines = [
        "## Inside of layers, by schedule",
        "",
        "Types that are exact above, under `zbv`, `dualpipev` and `auto`, by "
        "`python -m benchmarks parity --all --schedules` with `--tensor 2` or `--context 2`: two members execute the "
        "schedule of two pipeline ranks with ZeRO's buckets, "
        "split backwards and interleaved strand pairs; first the model with all biases that its config can switch on, "
        "then with LoRA on all matrices, trained biases, a resized vocabulary and `modules_to_save`. *Exact* is exact "
        "under every kind, in loss and gradients; tolerance 1e-4 of the largest value.",
        "",
    ]
    for axis in SCHEDULED:
        found = [finding for name, finding in scheduled[axis].items() if name in exact[axis]]
        left_out = sorted(exact[axis] - scheduled[axis].keys())
        rest = f"; not tried: {', '.join(left_out)}" if left_out else ""
        lines.append(f"- **{axis}**: {_counts(found)}{rest}.")
    lines += ["", *_rows("model_type", *SCHEDULED)]
    for name in sorted(set().union(*exact.values())):
        cells = (scheduled[axis].get(name) if name in exact[axis] else None for axis in SCHEDULED)
        lines += _rows(name, *("" if cell is None else _cell(cell) for cell in cells))
    return lines


def _sorted(findings: Sequence[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: finding.model_type)


def _counts(findings: Sequence[Finding]) -> str:
    counts = Counter(finding.verdict for finding in findings)
    return ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in Verdict)


def _cell(finding: Finding) -> str:
    return finding.verdict.value + (f": {finding.reason}" if finding.reason else "")


def _rows(*cells: str) -> list[str]:
    """A row of a table; the head, which begins with ``model_type``, has its line."""
    row = "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    return [row, "|" + "---|" * len(cells)] if cells[0] == "model_type" else [row]
