"""Composition with Hydra: converts overrides and a recipe to a `WeftConfig`, or raises one clear `ValueError`."""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Sequence
from functools import cache
from typing import Any, get_origin

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from weft.conf.fields import FOLDER, choices, field_types, groups, text_places, unknown
from weft.conf.recipe_file import read_recipe
from weft.conf.schema import WeftConfig
from weft.conf.trees import explain

# Name in the group `recipe` for a recipe file of the user.
FROM_FILE = "_file"
_SEARCH = "hydra.searchpath"


def compose(overrides: Sequence[str] = (), *, recipe_file: str | None = None) -> WeftConfig:
    """Return the configuration that ``overrides`` describe, converted to dataclasses but not checked.

    Raises:
        ValueError: an unknown key, a wrong type, an unknown choice, a sweep, two recipes, or two models.
    """
    settings = list(map(_parse, overrides))
    recipes = [setting for setting in settings if setting.key_or_group == "recipe"]
    # Choices of files decide what is composed; values are set in the result.
    chosen, values = list[str](), list[str]()
    for setting in settings:
        if setting.key_or_group != "recipe":
            is_choice = setting.key_or_group in groups() or setting.key_or_group == _SEARCH
            (chosen if is_choice else values).append(_line(setting))
    values += _left_open(settings)
    named = [str(recipe.value()) for recipe in recipes] + [recipe_file] * bool(recipe_file)
    if len(named) > 1:
        raise ValueError(
            f"recipe={', '.join(map(str, named))}: one recipe at a time; a recipe file can build on another "
            "through `defaults: [NAME, _self_]`"
        )
    for recipe in named:
        chosen.append(f"recipe={_recipe(str(recipe), is_file=bool(recipe_file))}")
    is_users_file = bool(named) and chosen[-1].endswith(FROM_FILE)
    where = f"{named[0]}: " if is_users_file else ""
    try:
        # Files of the user may have changed since they were composed.
        composed = _composed.__wrapped__ if is_users_file or any(_SEARCH in choice for choice in chosen) else _composed
        tree = copy.deepcopy(composed(*chosen))
        if not tree.model.path and any(each.key_or_group == "model.path" and each.value() for each in settings):
            OmegaConf.update(tree, "model.overrides", {}, merge=False)  # they describe the recipe's new model
        ConfigLoaderImpl._apply_overrides_to_config(OverridesParser.create().parse_overrides(values), tree)
        config = OmegaConf.to_object(tree)
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(where + _explain(error)) from error
    assert isinstance(config, WeftConfig)
    if config.model.path and any(each.key_or_group == "model.arch" and each.value() for each in settings):
        raise ValueError(
            f"model.arch={config.model.arch}: model.path={config.model.path} has an architecture of its own; set "
            "model.arch for a new model, or model.path for one to load"
        )
    return config


def _left_open(settings: Sequence[Override]) -> list[str]:
    """Return an override that derives ``pipeline.microbatches`` if only ``train.batch_size`` is overridden.

    Otherwise the recipe's number of micro-batches would contradict it. For other overrides, return an empty list.
    """
    given = {setting.key_or_group: setting.value() for setting in settings}
    open_ = given.get("train.batch_size") and "pipeline.microbatches" not in given
    return ["pipeline.microbatches=0"] if open_ else []


@cache
def _composed(*chosen: str) -> DictConfig:
    """Return the configuration of a choice in each group. Cached, because Hydra takes long."""
    _register()
    with hydra.initialize_config_dir(str(FOLDER), version_base="1.3"):
        return hydra.compose("config", overrides=list(chosen))


@cache
def _register() -> None:
    store = ConfigStore.instance()
    store.store(name="schema", node=WeftConfig)
    for group, kind in groups().items():
        store.store(group=group, name="schema", node=kind)


def _parse(text: str) -> Override:
    """Parse one override with Hydra's grammar."""
    if text in ("-m", "--multirun"):
        raise ValueError(f"{text}: a sweep would run once per rank; run `weft launch` once for each setting")
    if text.startswith("-"):
        raise ValueError(f"{text}: this option is not known; settings are written key=value, as in train.steps=10")
    try:
        override = _parse_value(text)
    except HydraException as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{text}: not a setting ({reason}); write key=value, and quote text: key='a=b, c'") from error
    if "@" in text.partition("=")[0]:
        raise ValueError(f"{text}: groups have one place each; write {override.key_or_group}=NAME")
    if override.is_delete() and override.key_or_group in field_types():
        raise ValueError(f"{text}: fields cannot be removed; leave it away to keep the default")
    if (changed := _changed(override.value(), override.key_or_group, text.partition("=")[2])) is not None:
        raise ValueError(f"{text}: a text in it would become {changed!r}; put it in quotes")
    if override.is_sweep_override():
        raise ValueError(f"{text}: a sweep would run once per rank; give one value, and quote text with commas")
    return override


def _parse_value(text: str) -> Override:
    """Parse an override. A text that Hydra's grammar lacks or converts, as ``a[1`` and ``007``, stays as it is."""
    parser = OverridesParser.create()
    name, equals, value = text.partition("=")
    try:
        override = parser.parse_override(text)
        if not isinstance(override.value(), int | float) or field_types().get(override.key_or_group) is not str:
            return override
    except HydraException:
        if field_types().get(name) is not str or value[:1] in ("'", '"'):
            raise
    quoted = value.strip().replace("'", "\\'")
    return parser.parse_override(f"{name}{equals}'{quoted}'")


def _changed(value: Any, place: str, written: str) -> int | float | None:
    """Return a number or truth value where a text belongs, if it was not written so, or None."""
    if isinstance(value, list):
        inside = ((each, f"{place}.*") for each in value)
    elif isinstance(value, dict):
        inside = ((each, f"{place}.{key}") for key, each in value.items())
    else:
        is_changed = isinstance(value, int | float) and not re.search(
            rf"(?<![\w.]){re.escape(str(value))}(?![\w.])", written
        )
        return value if is_changed and place in text_places() else None
    return next((found for each, where in inside if (found := _changed(each, where, written)) is not None), None)


def _line(override: Override) -> str:
    """Return the override in the form that Hydra expects."""
    name, text, known = override.key_or_group, str(override.input_line), field_types()
    if name in groups():
        _require_choice(name, str(override.value()))
        return text
    if get_origin(known.get(name)) is dict:
        return f"++{text.lstrip('+')}"  # its keys are open
    if name in known or name == _SEARCH:
        return text.lstrip("+")
    parents = [name[:end] for end, letter in enumerate(name) if letter == "."]
    if any(get_origin(known.get(parent)) is dict for parent in parents):
        return text if text.startswith(("+", "~")) else f"++{text}"
    raise ValueError(f"{text}: {unknown(name, known)}")


def _recipe(recipe: str, *, is_file: bool) -> str:
    """Return the name by which Hydra finds a recipe, which is built in or the user's file."""
    if not is_file and not recipe.endswith((".yaml", ".yml")):
        _require_choice("recipe", recipe)
        return recipe
    ConfigStore.instance().store(group="recipe", name=FROM_FILE, node=read_recipe(recipe), package="_global_")
    return FROM_FILE


def _require_choice(group: str, choice: str) -> None:
    options = choices(group)
    if choice not in options:
        near = difflib.get_close_matches(choice, options, n=1)
        hint = f"did you mean {group}={near[0]}?" if near else f"single fields are set as in {group}.NAME=VALUE"
        if group == "recipe":
            hint = hint if near else "a recipe of your own is given as recipe=FILE.yaml"
        raise ValueError(f"{group}={choice}: not one of {', '.join(options)}; {hint}")


def _explain(error: BaseException) -> str:
    """Return a line of text from Hydra's nested exception."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, choice = str(error.missing_cfg_file).rpartition("/")
        return (
            f"defaults: there is no {choice} in {group or 'the root'}; one of {', '.join(choices(group or 'recipe'))}"
        )
    cause = error
    while not isinstance(cause, OmegaConfBaseException) and (inner := cause.__cause__ or cause.__context__):
        cause = inner
    return explain(cause) if isinstance(cause, OmegaConfBaseException) else " ".join(str(cause).split())
