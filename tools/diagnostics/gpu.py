"""The state of this host's GPUs, from nvidia-smi and the kernel's log: memory errors, throttling, Xid."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping

from weft.conf.host.diagnosis import CheckResult, Outcome

_MOST_S = 8.0
_ECC = "ecc.errors.uncorrected.volatile.total"
_RETIRED = "retired_pages.pending"
_SLOWDOWNS = {
    "clocks_throttle_reasons.hw_slowdown": "slowed down by hardware",
    "clocks_throttle_reasons.hw_thermal_slowdown": "slowed down by heat",
    "clocks_throttle_reasons.hw_power_brake_slowdown": "slowed down by the power supply",
}
_FIELDS = ("index", "name", "temperature.gpu", _ECC, _RETIRED, *_SLOWDOWNS)
_XID = re.compile(r"NVRM: Xid \((?P<where>[^)]*)\): (?P<code>\d+)")
# Those that an application's own mistake may cause say nothing about the device (NVIDIA's Xid catalogue).
_APPLICATION = {13, 31, 43, 45, 68}


def check_gpus() -> CheckResult:
    """Fail if a GPU reports uncorrectable memory errors, pages to retire, or a slowdown by its hardware."""
    if shutil.which("nvidia-smi") is None:
        return CheckResult("GPU state", Outcome.does_not_apply, "nvidia-smi is not installed")
    command = ["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_MOST_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return CheckResult("GPU state", Outcome.failed, f"nvidia-smi does not answer: {error}")
    if done.returncode:
        said = " ".join((done.stdout + done.stderr).split())[:200]
        return CheckResult("GPU state", Outcome.failed, f"nvidia-smi ended with {done.returncode}: {said}")
    rows = [
        dict(zip(_FIELDS, map(str.strip, row), strict=False)) for row in csv.reader(done.stdout.splitlines()) if row
    ]
    if not rows:
        return CheckResult("GPU state", Outcome.does_not_apply, "nvidia-smi knows no GPU")
    wrong = [f"GPU {row['index']} {problem}" for row in rows for problem in _problems(row)]
    if wrong:
        return CheckResult("GPU state", Outcome.failed, "; ".join(wrong), float(len(wrong)), "problems")
    degrees = ", ".join(row["temperature.gpu"] for row in rows)
    return CheckResult(
        "GPU state", Outcome.passed, f"{len(rows)} GPUs without a fault, {degrees} degrees", 0.0, "problems"
    )


def check_xid(log: str | None = None) -> CheckResult:
    """Fail if the kernel's log has an Xid that points to the device rather than to a program.

    Args:
        log: text of the log; None reads the kernel's log.
    """
    if log is None:
        if shutil.which("nvidia-smi") is None:
            return CheckResult("Xid", Outcome.does_not_apply, "nvidia-smi is not installed")
        try:
            done = subprocess.run(["dmesg"], capture_output=True, text=True, errors="replace", timeout=_MOST_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            return CheckResult("Xid", Outcome.does_not_apply, f"the kernel's log cannot be read: {error}")
        if done.returncode:
            return CheckResult(
                "Xid", Outcome.does_not_apply, f"the kernel's log cannot be read: {done.stderr.strip()[:100]}"
            )
        log = done.stdout
    found = [(match["where"], int(match["code"])) for match in _XID.finditer(log)]
    bad = [(where, code) for where, code in found if code not in _APPLICATION]
    if bad:
        where, code = bad[-1]
        return CheckResult(
            "Xid", Outcome.failed, f"{len(bad)} since boot, the last {code} of {where}", len(bad), "Xids"
        )
    others = f", {len(found)} that programs may cause" if found else ""
    return CheckResult("Xid", Outcome.passed, f"none of a device since boot{others}", 0.0, "Xids")


def _problems(row: Mapping[str, str]) -> Iterator[str]:
    errors = row.get(_ECC, "")
    if errors.isdigit() and int(errors):
        yield f"has {errors} uncorrectable memory errors"
    if row.get(_RETIRED, "").lower() == "yes":
        yield "has memory pages to retire at its next reset"
    for field, says in _SLOWDOWNS.items():
        if row.get(field, "").lower() == "active":
            yield f"is {says}"
