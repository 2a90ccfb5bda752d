"""Tests that names in the documents exist: files, links, fields, functions, classes, commands, options."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from benchmarks.__main__ import benches
from weft.conf.fields import field_types, groups
from weft.engine.deepspeed.table import READ_BY_DEEPSPEED, REFUSED, TAKEN_OVER, WITHOUT_EFFECT
from weft.tools.cli import COMMANDS

ROOT = Path(__file__).parents[2]
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").rglob("*.md"))]
PRODUCT = ("conf", "pipeline", "comm", "inference", "engine", "recipes", "tools", "benchmarks")
FENCE = re.compile(r"^```[^\n]*\n.*?^```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = re.compile(r"(?:[\w.-]+/)*[\w-]+\.(?:py|md|yaml|hpp|cpp|c|cfg|toml|txt|json|jsonl|log|png)|(?:[\w.-]+/)+")

# Names of others, and names that stand for what the reader puts there.
FOREIGN = {
    "deepspeed": {"GatheredParameters"},
    "torch": {"add", "all_gather_object", "DTensor", "DeviceMesh", "fully_shard"},
    "torch elastic": {
        "DynamicRendezvousHandler",
        "LocalElasticAgent",
        "_monitor_workers",
        "_restart_workers",
    },
    "transformers and accelerate": {
        "gather",
        "generate",
        "Trainer",
        "TrainingArguments",
        "from_pretrained",
        "KernelConfig",
        "use_kernels",
    },
    "transformers' settings": {
        "label_smoothing_factor",
        "num_encoder_layers",
        "num_decoder_layers",
        "tie_weights_keys",
    },
    "TRL": {
        "DataCollatorForLanguageModeling",
        "DataCollatorForPreference",
        "loss_type",
        "padding_free",
        "precompute_ref_log_probs",
    },
    "vLLM and NIXL": {
        "NixlConnector",
        "OffloadingConnector",
        "max_num_queued_reqs",
        "max_num_queued_tokens",
        "prompt_logprob_token_ids",
        "weight_transfer",
        "external_kv_transfer",
        "local_compute",
        "kv_buffer_device",
        "VLLM_CPU_NUM_OF_RESERVED_CPU",
    },
    "Linux and NCCL": {"LD_PRELOAD", "TCP_NOTSENT_LOWAT", "nvidia-cuda-mps-control"},
    "Weights & Biases": {"WANDB_API_KEY"},
    "pre-commit": {"hook-type"},
    "Docker": {"shm-size"},
    "Slurm and Kubernetes": {
        "NodeAddr",
        "ReadWriteMany",
        "constraint",
        "fold-east-0-1.fold",
        "no-kill",
        "nodeSelector",
        "partition",
        "requeue",
        "salloc",
        "signal",
    },
    "the reader's": {"function", "gpu"},
}
KNOWN = frozenset().union(*FOREIGN.values())
# Files that a run, a test or the reader makes, and those of others.
MADE = {
    "plan.json",
    "costs.yaml",
    "metrics.jsonl",
    "evaluations.jsonl",
    "supervisor/journal.jsonl",
    "supervisor/set_up.jsonl",
    "self_check.json",
    "supervisor/logs/attemptN/rankR.log",
    "timeline.png",
    "timeline.json",
    "manifest.json",
    "NAME.yaml",
    "NAME.py",
    "FILE.yaml",
    "FILE.png",
    "SCHEDULE.json",
    "toy_proxy_server.py",
    "denied_hosts.json",
    "diagnostics.json",
    "config.json",
}


def spans():
    """Every text between backticks, but in code blocks: (file, text)."""
    for file in DOCS:
        for text in dict.fromkeys(SPAN.findall(FENCE.sub("", file.read_text()))):
            yield file, text


@cache
def sources():
    """Parsed Python of the product, by dotted path."""
    found = [file for folder in PRODUCT for file in (ROOT / folder).rglob("*.py")]
    return {
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): ast.parse(file.read_text())
        for file in [*found, ROOT / "__init__.py"]
    }


def sources_of_tests():
    """Sources of the tests, of which docs name functions only."""
    return (file.read_text() for file in (ROOT / "tests").rglob("*.py"))


@cache
def native():
    """C and C++ of the product."""
    files = [file for folder in PRODUCT for file in (ROOT / folder).rglob("*.[ch]*")]
    return "\n".join(file.read_text() for file in files if file.suffix in {".c", ".h", ".cpp", ".hpp"})


def definitions(nodes):
    """Functions, classes and what is assigned to, each with the arguments that it may be called with by name."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
        elif isinstance(node, ast.ClassDef):
            inside = dict(definitions(node.body))
            yield node.name, inside.get("__init__", set()) | set(inside)
        elif isinstance(node, ast.AnnAssign):
            yield from definitions([node.target])
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr, set()


@cache
def defined():
    """Every name that is defined anywhere, with the arguments that it may be called with."""
    found = {name: set() for names in re.findall(r"\b(?:class|struct) (\w+)|\b(\w+)\(", native()) for name in names}
    for tree in sources().values():
        for name, arguments in definitions(ast.walk(tree)):
            found.setdefault(name, set()).update(arguments)
    return found


@cache
def used():
    """Every identifier of the code, and every word of its texts but docstrings."""
    found = set(defined()).union(*map(used_in, sources().values()))
    found |= {name for text in sources_of_tests() for name in re.findall(r"^(?:def|class) (\w+)", text, re.MULTILINE)}
    return found | words_of(native() + (ROOT / "Makefile").read_text() + (ROOT / "setup.cfg").read_text())


def used_in(tree):
    """The identifiers of a module, and the words of its texts but docstrings."""
    found, documentation = set(), set()
    for node in ast.walk(tree):  # a docstring's statement comes before its constant
        if isinstance(node, ast.Expr):
            documentation.add(id(node.value))
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.arg | ast.keyword):
            found.add(node.arg)
        elif isinstance(node, ast.alias):
            found.update(node.name.split("."))
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            found |= words_of(node.value)
    return found


def words_of(text):
    """Words with and without hyphens."""
    return {word.strip("-") for word in re.findall(r"[\w-]+", text)} | set(re.findall(r"\w+", text))


@cache
def files():
    """Names and paths of all files and folders of the repository."""
    kept = [
        file
        for folder in (*PRODUCT, "tests", "docs", "examples", ".ci")
        for file in (ROOT / folder, *(ROOT / folder).rglob("*"))
    ]
    kept += [file for file in ROOT.iterdir() if file.is_file()]
    return {str(file.relative_to(ROOT)) for file in kept} | {file.name for file in kept}


def missing(text):
    """Return the parts of a text between backticks that do not exist; empty if all exist."""
    words = text.split()
    if words[0] == "weft" and len(words) > 1:
        return [] if words[1].endswith(":") else command(words[1:])  # `weft train: ...` is what it says
    if words[0] == "make" and len(words) > 1:
        return [word for word in words[1:2] if word.isidentifier() and word not in used()]
    if words[:3] == ["python", "-m", "benchmarks"]:
        return benchmark(words[3:])
    if words[:2] == ["python", "-m"]:
        return [] if f"{words[2].replace('.', '/')}.py" in files() else [words[2]]
    if FILE.fullmatch(text):
        return [] if text in MADE or "NAME" in text or text.rstrip("/") in files() else [text]
    if call := re.match(r"(?:\w+\.)*(\w+)\((.*)", text):
        return missing_of_call(*call.groups())
    name = text.partition("=")[0].split("(")[0].removesuffix(":")
    if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", name):
        return [] if is_dotted(name) else [name]
    if words[0].startswith("--"):
        return [word for word in words if word.startswith("--") and word[2:].partition("=")[0] not in used() | KNOWN]
    if re.fullmatch(r"\w*[a-z]_\w+|_\w+|(?:[A-Z][a-z0-9]+){2,}|[A-Z]+_[A-Z_]+", name):
        return [] if {name, name.removesuffix("_total")} & (used() | KNOWN) else [name]
    return []


def missing_of_call(name, arguments):
    """A function or class that is not defined, or its arguments that it does not take."""
    if name in KNOWN:
        return []
    if name not in defined():
        return [name]
    given = re.findall(r"(?:^|, )(\w+)=", arguments)
    return [f"{name}({argument}=)" for argument in given if argument not in defined()[name]]


def command(words):
    """Words of a `weft` command that it does not know."""
    unknown = [word for word in words[:1] if word not in COMMANDS and not word.startswith("-")]
    return unknown + unknown_options(words)


def benchmark(words):
    """Words of a `python -m benchmarks` command that it does not know."""
    unknown = [word for word in words[:1] if word not in benches() and not word.isupper()]
    return unknown + unknown_options(words)


def unknown_options(words):
    """Options that no parser of the code has."""
    options = [re.split(r"[=\]]", word.lstrip("["))[0] for word in words]
    return [word for word in options if word.startswith("--") and word[2:] not in used()]


def is_dotted(name):
    """True if `a.b` is a field, a module's, a class's, one of DeepSpeed's keys, or made of names that the code uses."""
    first, *rest = name.split(".")
    if first == "weft":
        return (rest[0] in groups() and ".".join(rest) in field_types()) or is_of_module(rest)
    if first in groups():
        return (
            name in field_types()
            or name in {*TAKEN_OVER, *READ_BY_DEEPSPEED, *REFUSED, *WITHOUT_EFFECT}
            or is_of_module([first, *rest])
        )
    return all(part in used() | KNOWN for part in rest)


def is_of_module(parts):
    """True if these are a module or folder of the package `weft` or of the benchmarks, or something in one."""
    for length in range(len(parts), -1, -1):
        tree = sources().get(".".join(parts[:length]) or "__init__")
        if tree is not None:
            return set(parts[length:]) <= used_in(tree)
    return False


@pytest.mark.parametrize("file", DOCS, ids=lambda file: str(file.relative_to(ROOT)))
def test_names_of_the_docs(file):
    wrong = {text: found for where, text in spans() if where == file and (found := missing(text))}
    assert not wrong, f"{file.name} names what is not there: {wrong}"


@pytest.mark.parametrize("file", DOCS, ids=lambda file: str(file.relative_to(ROOT)))
def test_links_of_the_docs(file):
    for link in LINK.findall(FENCE.sub("", file.read_text())):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (file.parent / path).resolve() if path else file
        assert target.exists(), f"{file.name} links to {link}, which is not there"
        if anchor and target.suffix == ".md":
            titles = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            known = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor in known, f"{file.name} links to {link}, which has no such heading"


def test_files_in_drawings():
    """Paths of sources in code blocks; a diff shows files that need not be there."""
    known = {
        str(file.relative_to(ROOT))
        for folder in (*PRODUCT, "tests", "examples")
        for file in (ROOT / folder).rglob("*.[phc]*")
    }
    for file in DOCS:
        for block in FENCE.findall(file.read_text()):
            if block.startswith("```diff"):
                continue
            for path in re.findall(r"(?<![\w./-])[\w/]+\.(?:py|hpp|cpp)\b", block):
                assert path in MADE or any(f"/{name}".endswith(f"/{path}") for name in known), (
                    f"{file.name} draws {path}, which is not there"
                )


def test_the_map_has_every_room():
    text = (ROOT / "docs/architecture.md").read_text()
    text = text[: text.index("## Three paths")]
    for folder in PRODUCT:
        assert f"`{folder}/`" in text
        for room in (ROOT / folder).iterdir():
            if (room / "__init__.py").exists():
                assert f"`{room.name}/`" in text or f"`{folder}/{room.name}/`" in text, (
                    f"the map lacks {folder}/{room.name}"
                )


def test_the_map_alone_answers_its_questions():
    """Every file that an answer names stands in the map or the paths before it."""
    before, _, rest = (ROOT / "docs/architecture.md").read_text().partition("## Questions")
    rows = [line.split("|")[1:3] for line in rest.partition("\n## ")[0].splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    for question, answer in rows:
        named = [path.rpartition("/")[2] for path in SPAN.findall(answer) if FILE.fullmatch(path)]
        assert named, question
        assert not [file for file in named if file not in before], question


def test_what_does_not_exist_is_found():
    for text in (
        "comm/nothing.py",
        "connect_all(hops)",
        "pipeline.nothing=2",
        "weft nothing",
        "NoSuchClass",
        "no_such_name",
    ):
        assert missing(text), text
    found = "comm/channel.py", "Sharding", "pipeline.stages=4", "weft.engine.zero"
    for text in (*found, "python -m benchmarks engines sharded --rate 50", "python -m tests.mutants"):
        assert not missing(text), text
