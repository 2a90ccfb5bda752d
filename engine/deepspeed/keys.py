"""A user's own DeepSpeed configuration with a `weft` section: checked, and taken apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import hjson

from weft.conf.fields import field_types
from weft.conf.schema import WeftConfig
from weft.conf.trees import from_tree
from weft.engine.deepspeed.names import REMOVED, check_names
from weft.engine.deepspeed.table import (
    OPTIMIZERS,
    PRECISIONS,
    REFUSED,
    SAME,
    SILENT,
    WHOLE_ONLY,
    Refusal,
    fate,
)

MISSING = object()


def split_deepspeed_config(user: Mapping[str, Any] | str | Path) -> tuple[WeftConfig | None, dict[str, Any]]:
    """Take a DeepSpeed configuration apart into Weft's and the rest.

    Args:
        user: a dictionary or JSON file, with a section ``"weft": {"enabled": true, ...}`` that
            holds the schema's groups.

    Returns:
        The configuration (checked field by field, not as a whole), and the DeepSpeed sections
        that stand as given. Without the section, or with it switched off: None, and everything
        but the section, as DeepSpeed would read it.

    Raises:
        ValueError: an unknown key, in either part; a value left "auto"; a feature that cannot
            be had with the pipeline; one value given twice and differently.
    """
    source = "DeepSpeed config" if isinstance(user, Mapping) else str(user)
    tree = deepcopy(dict(user)) if isinstance(user, Mapping) else _read(Path(user).expanduser())
    section = tree.pop("weft", None)
    if section is None:
        return None, tree
    if not isinstance(section, Mapping) or not isinstance(section.get("enabled"), bool):
        raise ValueError(f"{source}: weft={section!r}: say whether it is on, as in {{'weft': {{'enabled': true}}}}")
    section = dict(section)
    if not section.pop("enabled"):
        return None, tree
    if "bfloat16" in tree and "bf16" not in tree:
        tree["bf16"] = tree.pop("bfloat16")  # the name that it had
    tree = _without_removed(tree)
    _refuse(tree, source)
    # What is left of the keys that are refused asks for nothing; of sections the names are checked all the same.
    tree = {name: value for name, value in tree.items() if name not in REFUSED or isinstance(value, Mapping)}
    check_names(tree, source)
    _check_fates(tree, source)
    tree = {name: value for name, value in tree.items() if name not in REFUSED}
    _merge(section, tree, source)
    for name in ("tensorboard", "wandb"):
        if _get(section, f"logging.{name}") is True:
            raise ValueError(
                f"{source}: weft.logging.{name}=True: it is for recipes; set {name}.enabled=true beside the section"
            )
    config = from_tree(section, source=f"{source}: weft")
    _check_optimizer(tree, config, source)
    return config, _kept(tree, config)


def _read(path: Path) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"{path}: {', '.join(sorted(twice))}: given twice; leave one out")
        return dict(pairs)

    try:
        tree = hjson.loads(path.read_text(), object_pairs_hook=once)
    except OSError as error:
        raise ValueError(f"config={path}: {error.strerror}; give a DeepSpeed JSON file that can be read") from error
    except hjson.HjsonDecodeError as error:
        raise ValueError(f"config={path}: not JSON ({error})") from error
    if not isinstance(tree, dict):
        raise ValueError(f"config={path}: holds no keys; give a DeepSpeed JSON file")
    return tree


def _refuse(tree: Mapping[str, Any], source: str) -> None:
    for name, value in _leaves(tree):
        if value == "auto":
            raise ValueError(
                f'{source}: {name}="auto": only the Hugging Face Trainer fills such values in; give the value itself'
            )
    for name, refusal in REFUSED.items():
        value = _get(tree, name)
        if value is not MISSING and not refusal.asks_for_nothing(value):
            raise ValueError(f"{source}: {name}={value!r}: it does not go with Weft; {refusal.remedy}")


def _without_removed(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Less the sections that DeepSpeed no longer has and refuses even where they are off, as old files have them."""
    off = Refusal("")
    return {
        name: value
        for name, value in tree.items()
        if not (name in REMOVED and (not value or off.asks_for_nothing(value)))
    }


def _check_fates(tree: Mapping[str, Any], source: str) -> None:
    """Refuse what DeepSpeed may understand and we would pass over."""
    for name, value in _leaves(tree):
        if not fate(name):
            raise ValueError(f"{source}: {name}={value!r}: Weft does not know what to make of it; leave it out")


def _check_optimizer(tree: Mapping[str, Any], config: WeftConfig, source: str) -> None:
    kind = _get(tree, "optimizer.type")
    if config.zero.stage and isinstance(kind, str) and kind.lower() in WHOLE_ONLY:
        raise ValueError(
            f"{source}: optimizer.type={kind!r}: it needs parameters whole, and zero_optimization.stage="
            f"{config.zero.stage} cuts them; choose stage 0, or another optimizer"
        )


def _merge(section: dict[str, Any], tree: Mapping[str, Any], source: str) -> None:
    """Write what the DeepSpeed keys say into the `weft` section."""
    said = {mine: (theirs, _get(tree, theirs)) for theirs, mine in SAME.items()}
    kind = _get(tree, "optimizer.type")
    if isinstance(kind, str) and kind.lower() in OPTIMIZERS:
        said["optimizer.kind"] = ("optimizer.type", OPTIMIZERS[kind.lower()])
    on = [name for name in PRECISIONS if _get(tree, f"{name}.enabled") is True]
    if len({PRECISIONS[name] for name in on}) > 1:
        raise ValueError(f"{source}: {' and '.join(on)}: both are enabled; choose one")
    if on:
        said["train.precision"] = (f"{on[0]}.enabled", PRECISIONS[on[0]])
    for mine, (theirs, value) in said.items():
        if value is MISSING or value is None:
            continue
        if isinstance(value, str):
            value = value.lower()
        if isinstance(value, float) and value.is_integer() and field_types()[mine] is int:
            value = int(value)  # buckets of 5e8 elements
        given = _get(section, mine)
        if given is not MISSING and given != value:
            raise ValueError(f"{source}: {theirs}={value}: weft.{mine}={given} says otherwise; leave one out")
        _set(section, mine, value)
    silent = SILENT | _open_batch(section, _get(tree, "train_micro_batch_size_per_gpu"))
    for mine, value in silent.items():
        if _get(section, mine) is MISSING:
            _set(section, mine, value)


def _open_batch(section: Mapping[str, Any], micro: Any) -> dict[str, int]:
    """What DeepSpeed makes of a batch that is given in part: 0 follows from the rest, as far as it is given."""
    if _get(section, "train.batch_size") not in (MISSING, None, 0):
        return {"train.microbatch_size": 0, "pipeline.microbatches": 0}
    return {} if micro in (MISSING, None) else {"pipeline.microbatches": 1}


def _kept(tree: dict[str, Any], config: WeftConfig) -> dict[str, Any]:
    """The sections that DeepSpeed reads as given."""
    kept = {name: value for name, value in tree.items() if name not in SAME}
    optimizer = kept.get("optimizer")
    if optimizer and str(optimizer.get("type")).lower() in ("adam", "adamw"):
        # DeepSpeed's own Adam builds C++ at its first use; whoever wants it says torch_adam=false.
        optimizer.setdefault("params", {}).setdefault("torch_adam", True)
    if "zero_optimization" in kept:
        kept["zero_optimization"].setdefault("reduce_bucket_size", config.zero.reduce_bucket_size)
        kept["zero_optimization"].setdefault("allgather_bucket_size", config.zero.allgather_bucket_size)
    return kept


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _get(tree: Mapping[str, Any], name: str) -> Any:
    value: Any = tree
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return MISSING
        value = value[part]
    return value


def _set(tree: dict[str, Any], name: str, value: Any) -> None:
    assert name in field_types(), f"{name} is no field of the schema"
    *parents, leaf = name.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[leaf] = value
