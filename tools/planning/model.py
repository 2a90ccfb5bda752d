"""The work of a model, from a config.json, a folder or a hub name; traced once, then read from a cache."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from typing import Any

from weft.conf.host.documents import parse_json, read_text
from weft.conf.host.files import JsonCache
from weft.conf.schema import LoraConfig
from weft.pipeline.limits import short_repr
from weft.pipeline.workload import WORK_FORM, ModelWork


def model_work(model: str, sequence_length: int, cache: Path, lora: LoraConfig | None = None) -> ModelWork:
    """Return the operations and bytes per sequence of each layer of a model.

    Args:
        model: a file such as config.json, a folder with a config.json, or a hub name.
        cache: a JSON file in which results are stored.
        lora: adapters that are trained instead of the model's weights.

    Raises:
        ValueError: the model cannot be read or traced.
    """
    text = _config_text(model)
    adapters = f" {lora}" if lora else ""
    key = hashlib.sha256(f"{WORK_FORM} {sequence_length} {text or model}{adapters}".encode()).hexdigest()
    store = JsonCache(cache.expanduser())
    try:
        return ModelWork.from_dict(store.read()[key])
    except (KeyError, TypeError):
        pass
    work = _traced(model, text, sequence_length, lora)
    with contextlib.suppress(OSError):  # it is traced again the next time
        store.add({key: work.to_dict()})
    return work


def config_of(model: str) -> dict[str, Any] | None:
    """Return the fields of a model's config.json, or None for a hub name.

    Raises:
        ValueError: the file cannot be read.
    """
    text = _config_text(model)
    if text is None:
        return None
    try:
        found = parse_json(text)
    except ValueError as error:
        raise ValueError(f"--model {model}: not JSON ({error}); give a Hugging Face config.json") from error
    if not isinstance(found, dict) or not isinstance(found.get("model_type"), str):
        raise ValueError(
            f"--model {model}: it has no model_type; give a Hugging Face config.json, not {short_repr(found)}"
        )
    return found


def _config_text(model: str) -> str | None:
    path = Path(model).expanduser()
    if path.is_dir():
        path = path / "config.json"
    elif not path.is_file() and not model.endswith(".json") and model.count("/") <= 1:
        return None
    try:
        return read_text(path, most_bytes=2**20)
    except ValueError as error:
        raise ValueError(f"--model {model}: {error}; give a config.json, a folder with one, or a hub name") from error


def _traced(model: str, text: str | None, sequence_length: int, lora: LoraConfig | None) -> ModelWork:
    fields = config_of(model)
    from transformers import AutoConfig  # takes seconds to load

    from weft.engine.models.lora import require_adapters
    from weft.engine.models.skeleton import causal_config, model_class
    from weft.engine.models.tracing import trace_model

    path = Path(model)
    name = (
        path.stem if path.suffix == ".json" and path.stem != "config" else path.resolve().parent.name if text else model
    )
    try:
        if fields is None:
            config = AutoConfig.from_pretrained(model)
        else:
            config = AutoConfig.for_model(**fields)
    except Exception as error:  # any: configs validate with errors of several libraries
        raise ValueError(
            f"--model {model}: {' '.join(str(error).split())}; give a config.json, a folder with one, or a hub name"
        ) from error
    config = causal_config(config)
    if lora is not None:
        require_adapters(lora, model_class(config), config)
    return trace_model(config, sequence_length, name=name, lora=lora)
