"""Run the tests, runs and benchmarks of a GPU machine; write a report and archive."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter

from weft.tools.doctor import NODE_CHECKS

TAIL_LINES = 25
"""Last lines of each output in the report itself."""
LEAVE_S = 30.0
"""Seconds for a program to end after SIGTERM, because only it can end its ranks."""


@dataclass(frozen=True)
class Item:
    """A command to run.

    Attributes:
        name: name of the output file.
        shows: what the command demonstrates.
        command: arguments; the first is a program, or a module of this Python after ``-m``.
        needs: a package without which the item is left out.
    """

    name: str
    shows: str
    command: tuple[str, ...]
    num_gpus: int = 1
    limit_s: float = 60.0
    needs: str = ""


WEFT = ("-m", "weft.tools.cli")
PYTEST_GPU = ("-m", "pytest", "-v", "-m", "gpu")
BENCHMARKS = ("-m", "benchmarks")
QUICKSTART = ("launch", "recipe=quickstart", "train.max_seconds=120", "train.export=false", "train.sample=")
LLAMA_1B = (2048, 8192, 16)
LLAMA_8B_BLOCKS = (4096, 14336, 4)
"""Width, inner width and layers of models that one GPU trains."""
LEAST_S = 15.0
"""Seconds that have to be left for an item to begin."""
EMULATED_GPUS = 2
EMULATED_LIMITS = 10
"""Emulated GPUs take so many times as long at most."""
SITE = Path("tests/device/site").absolute()
"""A Python with this folder in its path has emulated GPUs."""
LLAMA_7B = ("model.arch=llama", "train.precision=bf16", "train.microbatch_size=1", "data.sequence_length=2048")
LLAMA_TINY = ("recipe=quickstart", "train.precision=bf16", "pipeline.stages=1")


def items(out: Path, *, emulated: bool = False) -> tuple[Item, ...]:
    """Return the programs to run, in order.

    Args:
        emulated: True for the same programs with small models, as a dry run on emulated GPUs.
    """
    # Other files may import what a GPU machine without network does not have.
    tests = sorted(str(path) for path in Path("tests").rglob("test_*.py") if "mark.gpu" in path.read_text())

    def run(name: str, shows: str, ranks: int, *settings: str, limit_s: float = 60.0) -> Item:
        folder = f"train.output_dir={out / 'runs'}"
        command = (*WEFT, *QUICKSTART, f"cluster.ranks={ranks}", f"train.name={name}", *settings, folder)
        return Item(name, shows, command, ranks, limit_s)

    def model(name: str, shows: str, width: int, inner: int, layers: int) -> Item:
        more = ("train.max_seconds=40", "model.self_check=false")
        return run(
            name, shows, 1, "pipeline.stages=1", *_llama(width, inner, layers, emulated=emulated), *more, limit_s=100.0
        )

    def bench(
        name: str,
        shows: str,
        *more: str,
        on: tuple[str, ...] = (),
        part: str = "",
        num_gpus: int = 0,
        limit_s: float = 60.0,
        needs: str = "",
    ) -> Item:
        parts = ("--parts", part) if part else ()
        command = (*on, *BENCHMARKS, name, *parts, *more, "--json", str(out / f"{part or name}.json"))
        return Item(part or name, shows, command, num_gpus, limit_s, needs)

    of_block = "a block of a Llama-8B at 4k and 8k tokens: MFU by kernels and attention"
    of_worker = "a vLLM worker in the bubbles of a pipeline, on one GPU: how much longer a step takes"
    scores = ("--gpu", "--evaluate", "16", "--python", sys.executable, "--rounds", "2")
    shape = ("--shape", *_llama(*LLAMA_1B, emulated=emulated))
    of_kernels = "its kernels and its loss, compared with torch.compile and Liger"
    cache = str(out / "cache")
    seven, seconds = (LLAMA_TINY, "2") if emulated else (LLAMA_7B, "30")
    profile = ("profile", *seven, "--seconds", seconds, "--out", str(out / "profile.yaml"), f"data.cache_dir={cache}")
    on_emulated, steps = (("--device=emulated",), ("--steps", "1")) if emulated else ((), ())
    tiny = ("--tiny", "--tokens", "8", "--row-seconds", "0.001") if emulated else ()  # Triton's interpreter is slow
    on_two = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    products = {"gemm", "bits"}  # take hours on a CPU
    checks = ("--only", *(name for name in NODE_CHECKS if name not in products)) if emulated else ()
    node = (*WEFT, "doctor", "node", "--cache", f"{cache}/best.json", *checks)
    # Their layers sleep, and their ranks talk over gloo, whatever the machine has.
    engines = ("host", "--cases", "2", "--engines", "weft-1f1b", "weft-auto", "deepspeed-1f1b", "torch-1f1b")
    return (
        Item("machine", "GPUs and drivers", ("nvidia-smi",), 0, 10.0),
        Item("tests", "every test that needs a GPU", (*PYTEST_GPU, *on_emulated, *tests), 0, 150.0),
        bench("block", of_block, "--seconds", "140", *tiny, part="block", num_gpus=1, limit_s=180.0),
        bench("device", "memory against the plan, host waits and host time of steps", *steps, num_gpus=1, limit_s=90.0),
        model("llama-1b", "a Llama-1B on one GPU: step time, MFU, peak memory", *LLAMA_1B),
        model("llama-8b-blocks", "blocks of a Llama-8B on one GPU: step time, MFU, peak memory", *LLAMA_8B_BLOCKS),
        bench("block", of_kernels, "--seconds", "60", *tiny, part="kernels", num_gpus=1, limit_s=90.0),
        run("two", "a pipeline over NCCL", 2, "pipeline.stages=2"),
        run("replicas", "ZeRO over NCCL", 2, "pipeline.stages=1", "zero.stage=3"),
        Item("profile", "layers of a Llama-7B on a GPU; what all GPUs' collectives take", (*WEFT, *profile), 1, 100.0),
        Item("node", "memory, matrix products, NCCL", node, 1, 60.0),
        bench("collectives", "rewrites over NCCL alongside plain ones", "--cache", cache, on=on_two, num_gpus=2),
        run("one", "a run on one GPU", 1, "pipeline.stages=1"),
        Item("links", "how the GPUs are joined", ("nvidia-smi", "topo", "-m"), 0, 10.0),
        Item("software", "torch, CUDA, NCCL", ("-m", "torch.utils.collect_env"), 0, 30.0),
        bench("bubbles", of_worker, *scores, *shape, num_gpus=1, limit_s=200.0, needs="vllm"),
        bench("strands", "a step with strand pairs, on one GPU", *shape, num_gpus=1, limit_s=100.0),
        bench("engines", "a step over its simulation, on this machine's processor", *engines, limit_s=200.0),
    )


def _llama(width: int, inner: int, layers: int, *, emulated: bool) -> tuple[str, ...]:
    """Return the settings of a Llama that one GPU trains, or of a small one."""
    words, tokens = 128256, 4096
    if emulated:
        width, inner, layers, words, tokens = 128, 256, 2, 8192, 128
    sizes = f"hidden_size={width} intermediate_size={inner} num_hidden_layers={layers} vocab_size={words}"
    heads = f"max_position_embeddings={tokens} num_attention_heads=32 num_key_value_heads=8"
    overrides = (f"model.overrides.{each}" for each in f"{sizes} {heads}".split())
    batch = (f"data.sequence_length={tokens}", "train.microbatch_size=1", "pipeline.microbatches=4")
    return *overrides, *batch, "train.precision=bf16", "pipeline.recompute=layers"


def write_report(argv: Sequence[str]) -> int:
    """Run every item that this machine supports and return 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_report")
    parser.add_argument(
        "--out", type=Path, default=Path("gpu-report"), help="folder; FOLDER.tar.gz is made alongside it"
    )
    parser.add_argument("--seconds", type=float, default=720.0, help="limit of all items together; each has its own")
    parser.add_argument(
        "--emulated", action="store_true", help="a dry run on the tests' emulated GPUs, which takes longer"
    )
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    num_gpus = EMULATED_GPUS if args.emulated else len(list(Path("/dev").glob("nvidia[0-9]*")))
    slower = EMULATED_LIMITS if args.emulated else 1
    env = os.environ | {"NO_COLOR": "1"}
    path = {"PYTHONPATH": os.pathsep.join([str(SITE), str(Path.cwd()), os.environ.get("PYTHONPATH", "")])}
    emulated = path | {"WEFT_EMULATED_GPUS": str(EMULATED_GPUS), "DS_ACCELERATOR": "cuda"} if args.emulated else {}
    results: list[tuple[Item, str, int | None]] = []
    end = perf_counter() + args.seconds * slower
    for item in items(args.out, emulated=args.emulated):
        limit_s = min(item.limit_s * slower, end - perf_counter())
        of_item = env | emulated if item.num_gpus else env  # tests emulate a GPU themselves
        results.append((item, *_run(item, args.out, limit_s, num_gpus, of_item)))
        print(f"{item.name:15s} {results[-1][1]}", flush=True)
        # Written before the next item begins, because the machine may be taken away at any time.
        (args.out / "report.md").write_text("\n".join(_report(results, args.out, num_gpus)) + "\n")
    archive = args.out.with_name(f"{args.out.name}.tar.gz")
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(args.out, args.out.name)
    print(f"{args.out / 'report.md'}, with all outputs in {archive}")
    return int(any(code not in (0, None) for _, _, code in results))


def _run(item: Item, out: Path, limit_s: float, num_gpus: int, env: Mapping[str, str]) -> tuple[str, int | None]:
    """Run a program; return its result, and its exit code or None if it could not be started.

    A benchmark that missed a goal has run, and its code counts as 0.
    """
    if item.num_gpus > num_gpus:
        return f"left out: needs {item.num_gpus} GPUs, this machine has {num_gpus}", None
    if item.needs and find_spec(item.needs) is None:
        return f"left out: {item.needs} is not installed", None
    if limit_s < min(LEAST_S, item.limit_s):
        return "left out: no time is left", None
    command = [sys.executable, *item.command] if item.command[0] == "-m" else list(item.command)
    figures = out / f"{item.name}.json"
    figures.unlink(missing_ok=True)
    start = perf_counter()
    with (out / f"{item.name}.txt").open("w") as file:
        try:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=env, start_new_session=True)
        except FileNotFoundError:
            return f"left out: there is no {command[0]} here", None
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"FAILED: had not ended after {limit_s:g} s", 1
        finally:
            _end(process)
    missed = code == 1 and figures.exists() and json.loads(figures.read_text())["met"] is False
    said = "passed" if code == 0 else "ran, and MISSED a goal," if missed else f"FAILED with {code}"
    return f"{said} after {perf_counter() - start:.0f} s", 0 if missed else code


def _end(process: subprocess.Popen) -> None:
    """End a program with all its processes, which would take time from the next one."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(LEAVE_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _report(results: Sequence[tuple[Item, str, int | None]], out: Path, num_gpus: int) -> list[str]:
    lines = [f"# Weft on {num_gpus} GPUs", "", "| | shows | result |", "|---|---|---|"]
    lines += [f"| {item.name} | {item.shows} | {said} |" for item, said, _ in results]
    for item, _, _ in results:
        file = out / f"{item.name}.txt"
        if file.exists():
            tail = file.read_text(errors="replace").splitlines()[-TAIL_LINES:]
            lines += ["", f"## {item.name}", "", "```", *tail, "```"]
    return lines


if __name__ == "__main__":
    sys.exit(write_report(sys.argv[1:]))
