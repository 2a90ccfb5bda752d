"""Introspection of the schema: dotted name, type and docstring of every field."""

from __future__ import annotations

import ast
import difflib
import inspect
import re
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from weft.conf.schema import WeftConfig

FOLDER = Path(__file__).parent
ELSEWHERE = {
    "learning_rate": "optimizer.lr",
    "optim": "optimizer.kind",
    "lr_scheduler_type": "optimizer.schedule",
    "lr_scheduler": "optimizer.schedule",
    "scheduler": "optimizer.schedule",
    "momentum": "optimizer.betas",
    "adam_beta1": "optimizer.betas",
    "adam_beta2": "optimizer.betas",
    "adam_epsilon": "optimizer.eps",
    "epsilon": "optimizer.eps",
    "max_grad_norm": "optimizer.clip",
    "gradient_clipping": "optimizer.clip",
    "max_steps": "train.steps",
    "num_steps": "train.steps",
    "num_train_epochs": "train.epochs",
    "num_epochs": "train.epochs",
    "per_device_train_batch_size": "train.microbatch_size",
    "train_micro_batch_size_per_gpu": "train.microbatch_size",
    "micro_batch_size": "train.microbatch_size",
    "train_batch_size": "train.batch_size",
    "global_batch_size": "train.batch_size",
    "gradient_accumulation_steps": "pipeline.microbatches",
    "num_microbatches": "pipeline.microbatches",
    "pipeline_parallel_size": "pipeline.stages",
    "num_stages": "pipeline.stages",
    "gradient_checkpointing": "pipeline.recompute",
    "activation_checkpointing": "pipeline.recompute",
    "tensor_parallel_size": "parallel.tensor",
    "context_parallel_size": "parallel.context",
    "expert_parallel_size": "parallel.expert",
    "dtype": "train.precision",
    "torch_dtype": "train.precision",
    "bf16": "train.precision",
    "fp16": "train.precision",
    "run_name": "train.name",
    "eval_steps": "train.eval_every",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "resume_from_checkpoint": "checkpoint.resume",
    "logging_steps": "logging.every",
    "report_to": "logging.wandb",
    "model_name_or_path": "model.path",
    "dataset": "data.path",
    "dataset_name": "data.path",
    "max_length": "data.sequence_length",
    "max_seq_length": "data.sequence_length",
    "max_seq_len": "data.sequence_length",
    "seq_len": "data.sequence_length",
    "r": "model.lora.rank",
    "lora_r": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "lora_dropout": "model.lora.dropout",
    "load_in_4bit": "model.lora.quantize",
    "quantization": "model.lora.quantize",
    "attention": "model.attn_implementation",
    "flash_attention": "model.attn_implementation",
    "hidden_size": "model.overrides",
    "num_hidden_layers": "model.overrides",
    "num_layers": "model.overrides",
    "vocab_size": "model.overrides",
    "model.name": "model.path",
    "file": "data.path",
    "train_file": "data.path",
    "validation_file": "data.eval_split",
    "validation_split": "data.eval_split",
    "test_size": "data.eval_fraction",
    "block_size": "data.sequence_length",
    "data.max_tokens": "data.sequence_length",
    "data.type": "data.kind",
    "distill.alpha": "distill.weight",
    "tp": "parallel.tensor",
    "tensor_model_parallel_size": "parallel.tensor",
    "sequence_parallel": "parallel.tensor",
    "cp": "parallel.context",
    "ep": "parallel.expert",
    "pp": "pipeline.stages",
    "pipeline_model_parallel_size": "pipeline.stages",
    "pipeline.kind": "pipeline.schedule",
    "optimizer.name": "optimizer.kind",
    "optimizer.type": "optimizer.kind",
    "num_gpus": "cluster.ranks",
    "num_processes": "cluster.ranks",
    "nproc_per_node": "cluster.ranks",
    "world_size": "cluster.ranks",
    "cluster.gpus": "cluster.ranks",
    "evaluation_strategy": "train.eval_every",
    "logging_dir": "train.output_dir",
    "checkpoint.dir": "train.output_dir",
    "checkpoint.path": "train.output_dir",
    "patience": "train.early_stopping_patience",
    "push_to_hub": "train.hub_model_id",
    "save_every": "checkpoint.every",
    "save_interval": "checkpoint.every",
    "checkpoint_every": "checkpoint.every",
    "checkpoint.steps": "checkpoint.every",
    "logging.steps": "logging.every",
}
"""Fields by the names that they have in Hugging Face, DeepSpeed and Megatron, or by a name in a group."""
SIMILAR = 1.25
"""Least similarity of names, of at most 2.3."""


@cache
def field_types(kind: type = WeftConfig, prefix: str = "") -> dict[str, Any]:
    """Return the type of every field and group under ``kind``, by its dotted name."""
    hints = get_type_hints(kind)
    found: dict[str, Any] = {}
    for field in fields(kind):
        found[prefix + field.name] = hints[field.name]
        if is_dataclass(hints[field.name]):
            found |= field_types(hints[field.name], f"{prefix}{field.name}.")
    return found


@cache
def groups() -> dict[str, type]:
    """Return the schema class of each YAML group, by the group's name."""
    return {
        name: kind for name, kind in get_type_hints(WeftConfig).items() if isinstance(kind, type) and is_dataclass(kind)
    }


def choices(group: str) -> list[str]:
    """Return the options of a YAML group, or of ``recipe``, as in ``model=NAME``."""
    named = sorted(path.stem for path in (FOLDER / group).glob("*.yaml"))
    return named if group == "recipe" else ["schema", *named]


@cache
def docstrings() -> dict[str, dict[str, str]]:
    """Return the docstring of every field, by class name and field name.

    Python drops the docstrings under fields, so they are parsed from the sources of `weft.conf.schema`.
    """
    trees = [ast.parse(path.read_text()) for path in sorted((FOLDER / "schema").glob("*.py"))]
    return {node.name: _field_docs(node) for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}


def _field_docs(node: ast.ClassDef) -> dict[str, str]:
    found: dict[str, str] = {}
    for field, below in zip(node.body, node.body[1:], strict=False):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            found[field.target.id] = inspect.cleandoc(below.value.value)
    return found


def item_class(kind: Any) -> type | None:
    """Return the dataclass of a ``list[...]`` field's items, or None if they are not dataclasses."""
    if get_origin(kind) is not list:
        return None
    (items,) = get_args(kind)
    return items if isinstance(items, type) and is_dataclass(items) else None


@cache
def text_places(kind: type = WeftConfig, prefix: str = "") -> frozenset[str]:
    """Return the places of texts under ``kind``: dotted names, in which ``*`` stands for each item of a list."""
    found = set[str]()
    for name, each in field_types(kind, prefix).items():
        if each is str:
            found.add(name)
        elif item := item_class(each):
            found |= text_places(item, f"{name}.*.")
        else:
            while get_origin(each) is list:
                name, (each,) = f"{name}.*", get_args(each)
            found |= {name} if each is str else set()
    return frozenset(found)


def expectation(kind: Any) -> str:
    """Return a description of a field's type, for messages."""
    if NoneType in get_args(kind):
        return f"{expectation(get_args(kind)[0])}, or null"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"one of {', '.join(kind.__members__)}"
    if item := item_class(kind):
        return f"a list of {{{', '.join(field.name for field in fields(item))}}}"
    if get_origin(kind) is list:
        return f"a list such as [{', '.join([_EXAMPLES[get_args(kind)[0]]] * 2)}]"
    if get_origin(kind) is dict:
        return "a mapping such as {name: value}"
    return _NAMES.get(kind, "a group of fields")


_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
_EXAMPLES = {int: "1", float: "0.5", str: "a"}


def unknown(name: str, known: Iterable[str]) -> str:
    """Return a message for an unknown field ``name``, with the nearest of the ``known`` dotted names."""
    known = list(known)
    near = _nearest(name.lower().replace("-", "_"), known)
    group = name.rpartition(".")[0]
    others = [full.rpartition(".")[2] for full in known if group and full.rpartition(".")[0] == group]
    hint = f"{group} has {', '.join(others)}" if others else "`weft config` lists every field"
    return f"there is no field {name}; " + (f"did you mean {' or '.join(near)}?" if near else hint)


def _nearest(name: str, known: Sequence[str]) -> list[str]:
    """Return the fields that ``name`` may mean: by the names of others, or by letters and words."""
    ours = ELSEWHERE.get(name) or ELSEWHERE.get(name.rpartition(".")[2], "")
    if ours in known:
        return [ours]
    if "." not in name and (typo := difflib.get_close_matches(name, known, n=1, cutoff=0.8)):
        return typo
    scores = {full: _similarity(name, full) for full in known if "." in full}
    best = max(scores.values(), default=0.0)
    if best < SIMILAR:
        return []
    return [full for full, score in scores.items() if score == best][:3]


def _similarity(name: str, full: str) -> float:
    (group, _, leaf), (other_group, _, other) = name.rpartition("."), full.rpartition(".")
    words, others = (set(re.split("[._]", text)) for text in (name, full))
    groups = difflib.SequenceMatcher(None, group, other_group).ratio()
    return difflib.SequenceMatcher(None, leaf, other).ratio() + len(words & others) / len(words | others) + 0.3 * groups
