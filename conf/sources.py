"""Sources of training data: one, or several that are mixed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from weft.conf.host.private import CREDENTIALS, HIDDEN, without_credentials
from weft.conf.schema import DataConfig, DataKind, PreferenceConfig, SourceConfig, WeftConfig
from weft.conf.schema.ranges import NATURAL, POSITIVE

T = TypeVar("T")
_OWN = ("weight", "epochs")
"""Fields of a source that `DataConfig` lacks."""


def sources_of(data: DataConfig) -> list[DataConfig]:
    """Return one configuration for each source of a mixture, or ``[data]`` if it describes a single source."""
    return [replace(data, sources=[], **_settings(source)) for source in data.sources] or [data]


def for_each_source(data: DataConfig, function: Callable[[DataConfig], T]) -> list[T]:
    """Call ``function`` for each source, and return the results.

    Raises:
        ValueError: as of ``function``. The message names the source of a mixture.
    """
    results = []
    for number, each in enumerate(sources_of(data)):
        try:
            results.append(function(each))
        except ValueError as error:
            if not data.sources:
                raise
            raise ValueError(f"data.sources[{number}]: {error}") from error
    return results


def holds_out(data: DataConfig) -> bool:
    """True if there is data for evaluation."""
    return data.eval_fraction > 0 or all(each.eval_split for each in sources_of(data))


def pass_credentials(data: DataConfig, environment: MutableMapping[str, str]) -> None:
    """Set a variable for the processes that read the configuration from a file, where URLs have no credentials."""
    urls = {without_credentials(each.path): each.path for each in _with_paths(data)}
    if found := {shown: url for shown, url in urls.items() if shown != url}:
        environment[CREDENTIALS] = json.dumps(found)


def take_credentials(data: DataConfig, environment: Mapping[str, str]) -> None:
    """Put the credentials of `pass_credentials` into the URLs of ``data``.

    Raises:
        ValueError: the variable does not have a URL.
    """
    for each in _with_paths(data):
        if f"://{HIDDEN}@" in each.path or f"={HIDDEN}" in each.path:
            try:
                each.path = str(json.loads(environment[CREDENTIALS])[each.path])
            except (KeyError, ValueError, TypeError):
                raise ValueError(
                    f"data.path={each.path}: {HIDDEN} stands for credentials, which no file has; give the whole URL, "
                    f'or set {CREDENTIALS} to JSON such as {{{json.dumps(each.path)}: "URL"}}'
                ) from None


def _with_paths(data: DataConfig) -> list[DataConfig | SourceConfig]:
    return [data, *data.sources]


def source_problems(config: WeftConfig) -> Iterator[str]:
    """Yield a line for each problem of the data's settings."""
    data, kind = config.data, config.data.kind.name
    if data.kind is DataKind.corpus and data.path:
        yield f"data.path={data.path}: unused by data.kind=corpus; set data.kind to text or chat"
    if data.chat_template and data.kind not in (DataKind.chat, DataKind.preference):
        yield f"data.chat_template={data.chat_template!r}: unused by data.kind={kind}; set data.kind=chat"
    if data.kind is DataKind.preference:
        yield from _pair_problems(config)
    elif config.train.preference != PreferenceConfig():
        yield f"train.preference: unused by data.kind={kind}; set data.kind=preference, or leave it out"
    if config.train.eval_every and not holds_out(data):
        yield (
            f"train.eval_every={config.train.eval_every}: there is no evaluation data; "
            "set data.eval_fraction=0.01 or data.eval_split, or set train.eval_every=0"
        )
    epochs = config.train.epochs
    if epochs and data.streaming:
        yield f"train.epochs={epochs:g}: streamed data has no known length; set train.steps, and train.epochs=0"
    if epochs and not all(source.epochs for source in data.sources):
        yield f"train.epochs={epochs:g}: a mixture has no end; set data.sources[].epochs for all, or train.steps"
    if data.sources:
        yield from _mixture_problems(data)


def _pair_problems(config: WeftConfig) -> Iterator[str]:
    if config.data.packing:
        yield "data.packing=true: the two answers of a pair are sequences of their own; set data.packing=false"
    for name in ("microbatch_size", "batch_size"):
        if (size := getattr(config.train, name)) % 2:
            yield f"train.{name}={size}: it counts sequences, of which a pair has two; choose an even number"
    if config.distill.enabled:
        yield "distill.enabled=true: pairs have a loss of their own; set data.kind=text or chat"
    if config.model.arch and not config.model.path:
        yield "model.path='': the reference is the model before training; set it to a trained model"


def _mixture_problems(data: DataConfig) -> Iterator[str]:
    if data.path:
        yield f"data.path={data.path}: data.sources replaces it; leave one of them out"
    if data.kind is DataKind.corpus:
        yield "data.sources: unused by data.kind=corpus; set data.kind to text or chat"
    seen: dict[tuple[str, str, str], int] = {}
    for number, (source, each) in enumerate(zip(data.sources, sources_of(data), strict=True)):
        label = f"data.sources[{number}]"
        if not source.path:
            yield f"{label}.path='': each source needs one; set it to a file, a folder or a hub name"
        for name, allowed in (("weight", POSITIVE), ("epochs", NATURAL)):
            if (value := getattr(source, name)) not in allowed:
                yield f"{label}.{name}={value:g}: outside its range; choose a value {allowed.remedy(value)}"
        first = seen.setdefault((each.path, each.name, each.split), number)
        if first != number:
            yield f"{label}.path={source.path}: the same as data.sources[{first}]; raise its weight instead"


def _settings(source: SourceConfig) -> dict[str, Any]:
    values = {field.name: getattr(source, field.name) for field in fields(source) if field.name not in _OWN}
    return {name: value for name, value in values.items() if value or name == "path"}
