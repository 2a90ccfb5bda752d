"""Check a user's DeepSpeed configuration with a `weft` section, and split it."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import hjson

from weft.conf.fields import field_types
from weft.conf.host.documents import read_text
from weft.conf.schema import OptimizerKind, OptimizerState, WeftConfig
from weft.conf.trees import from_tree
from weft.engine.deepspeed.names import REMOVED, check_names
from weft.engine.deepspeed.table import (
    DEEPSPEED_DEFAULTS,
    MUON_PARAMETERS,
    OPTIMIZERS,
    PRECISIONS,
    REFUSED,
    TAKEN_OVER,
    WHOLE_ONLY,
    Refusal,
    handling,
)

MISSING = object()
_MOST_BYTES = 2**20


def split_deepspeed_config(user: Mapping[str, Any] | str | Path) -> tuple[WeftConfig | None, dict[str, Any]]:
    """Split a DeepSpeed configuration into Weft's configuration and the sections for DeepSpeed.

    Args:
        user: a dictionary or JSON file, with a section ``"weft": {"enabled": true, ...}`` that
            contains groups of the schema.

    Returns:
        The Weft configuration (each field checked, but not their combination), and the DeepSpeed
        sections to pass on unchanged. If the section is missing or disabled: None, and everything
        except the section.

    Raises:
        ValueError: an unknown key in either part, a value of "auto", a feature that the pipeline
            does not support, or a setting with different values in the two parts.
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
    # The refused keys that remain have harmless values. The names in their sections are still checked.
    tree = {name: value for name, value in tree.items() if name not in REFUSED or isinstance(value, Mapping)}
    check_names(tree, source)
    _check_handled(tree, source)
    tree = {name: value for name, value in tree.items() if name not in REFUSED}
    _merge(section, tree, source)
    for name in ("tensorboard", "wandb"):
        if _get(section, f"logging.{name}") is True:
            raise ValueError(
                f"{source}: weft.logging.{name}=True: it is for recipes; set {name}.enabled=true next to the section"
            )
    config = from_tree(section, source=f"{source}: weft")
    _check_optimizer(tree, config, source)
    return config, _kept(tree, config)


def weft_section(user: Mapping[str, Any] | str | Path) -> WeftConfig | None:
    """Return the configuration in the section "weft", with unchecked combinations, or None if it is off or missing.

    The rest of ``user`` may still have values of "auto".

    Raises:
        ValueError: an unknown key in the section, or a value of the wrong type.
    """
    source = "DeepSpeed config" if isinstance(user, Mapping) else str(user)
    section = (user if isinstance(user, Mapping) else _read(Path(user).expanduser())).get("weft")
    if not isinstance(section, Mapping) or not section.get("enabled"):
        return None
    return from_tree({name: value for name, value in section.items() if name != "enabled"}, source=f"{source}: weft")


def _read(path: Path) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if twice := [name for name, times in Counter(name for name, _ in pairs).items() if times > 1]:
            raise ValueError(f"{path}: {', '.join(sorted(twice))}: given twice; leave one out")
        return dict(pairs)

    try:
        text = read_text(path, most_bytes=_MOST_BYTES)
    except ValueError as error:
        raise ValueError(f"config={path}: {error}; give a DeepSpeed JSON file that can be read") from error
    try:
        tree = hjson.loads(text, object_pairs_hook=once)
    except (hjson.HjsonDecodeError, RecursionError) as error:
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
            raise ValueError(f"{source}: {name}={value!r}: Weft does not support it; {refusal.remedy}")


def _without_removed(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Drop disabled sections of older DeepSpeed versions, which the current one refuses."""
    off = Refusal("")
    return {
        name: value
        for name, value in tree.items()
        if not (name in REMOVED and (not value or off.asks_for_nothing(value)))
    }


def _check_handled(tree: Mapping[str, Any], source: str) -> None:
    """Raise an error for keys that DeepSpeed accepts but Weft does not handle."""
    for name, value in _leaves(tree):
        if not handling(name):
            raise ValueError(f"{source}: {name}={value!r}: Weft does not support it; leave it out")


def _check_optimizer(tree: Mapping[str, Any], config: WeftConfig, source: str) -> None:
    kind = _get(tree, "optimizer.type")
    if config.zero.stage and isinstance(kind, str) and kind.lower() in WHOLE_ONLY:
        raise ValueError(
            f"{source}: optimizer.type={kind!r}: it needs whole parameters, and zero_optimization.stage="
            f"{config.zero.stage} shards them; choose stage 0, or another optimizer"
        )
    given = _get(tree, "optimizer.params")
    state = config.optimizer.state
    if state is not OptimizerState.fp32 and _get(tree, "optimizer.params.adam_w_mode") is False:
        raise ValueError(
            f"{source}: optimizer.params.adam_w_mode=False: {state.value} moments have decoupled weight decay only; "
            "set weft.optimizer.state=fp32"
        )
    if config.optimizer.kind is not OptimizerKind.muon or not isinstance(given, Mapping):
        return
    for name, value in given.items():  # DeepSpeed ignores misspelt ones
        if name not in MUON_PARAMETERS:
            near = difflib.get_close_matches(name, MUON_PARAMETERS, n=1)
            remedy = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(MUON_PARAMETERS))}"
            raise ValueError(f"{source}: optimizer.params.{name}={value!r}: Muon has no such parameter; {remedy}")
    if (method := given.get("ns_method", "gram")) not in ("gram", "standard"):
        raise ValueError(f"{source}: optimizer.params.ns_method={method!r}: choose gram or standard")


def _merge(section: dict[str, Any], tree: Mapping[str, Any], source: str) -> None:
    """Set the fields of the `weft` section that have DeepSpeed keys, from these keys or from DeepSpeed's defaults."""
    said = {mine: (theirs, _get(tree, theirs)) for theirs, mine in TAKEN_OVER.items()}
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
            raise ValueError(f"{source}: {theirs}={value}: weft.{mine}={given} differs; leave one out")
        _set(section, mine, value)
    silent = DEEPSPEED_DEFAULTS | _open_batch(section, _get(tree, "train_micro_batch_size_per_gpu"))
    for mine, value in silent.items():
        if _get(section, mine) is MISSING:
            _set(section, mine, value)


def _open_batch(section: Mapping[str, Any], micro: Any) -> dict[str, int]:
    """Return defaults for batch sizes that were not given, by DeepSpeed's rule. 0 means derived from the others."""
    if _get(section, "train.batch_size") not in (MISSING, None, 0):
        return {"train.microbatch_size": 0, "pipeline.microbatches": 0}
    return {} if micro in (MISSING, None) else {"pipeline.microbatches": 1}


def _kept(tree: dict[str, Any], config: WeftConfig) -> dict[str, Any]:
    """Return the sections for DeepSpeed, with defaults for its Adam and for bucket sizes added."""
    kept = {name: value for name, value in tree.items() if name not in TAKEN_OVER}
    optimizer = kept.get("optimizer")
    if optimizer and str(optimizer.get("type")).lower() in ("adam", "adamw"):
        # DeepSpeed's own Adam compiles C++ at its first use; torch_adam=false selects it.
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
