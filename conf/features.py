"""Optional features. The core imports each by name, and trains without those that are not installed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, reduce
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from weft.conf.schema import ClusterManager, KvConnector, PairChoice, WeftConfig


@dataclass(frozen=True, kw_only=True)
class Feature:
    """Commands and settings of a feature, and the module that the core calls.

    Attributes:
        entry: the module that the core calls. No import statement outside of the feature names it.
        commands: module and summary of each command.
        checks: module of each check of `weft doctor`.
        settings: fields or sections that need the feature. They do not need it while they have their defaults or one of
            the given values.
    """

    entry: str
    commands: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    checks: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


FEATURES = {
    "wan": Feature(
        entry="weft.comm.wan",
        commands={"netbed": ("weft.tools.netbed.command", "emulate a WAN on this machine, with real TCP and faults")},
        checks={"net": "weft.tools.netbed.probing"},
        settings={"cluster.sites": (), "inference.prefill.connector": (KvConnector.none, KvConnector.nixl)},
    ),
    "planner": Feature(
        entry="weft.pipeline.planner",
        commands={
            "plan": (
                "weft.tools.planning.command",
                "find the sites, GPUs and layout to train a model with, and the cost",
            )
        },
    ),
    "prefill": Feature(
        entry="weft.inference",
        commands={
            "serve": ("weft.recipes.serving.serve", "serve prompts in the bubbles of a training run"),
            "controller": (
                "weft.recipes.serving.controller",
                "run the controller: one address in front of all prefill workers",
            ),
            "evaluate": ("weft.recipes.serving.evaluate", "score held-out data with each checkpoint, by workers"),
        },
        settings={
            "inference.enabled": (False,),
            "inference.evaluate.enabled": (False,),
            "inference.scores.enabled": (False,),
        },
    ),
    "strands": Feature(entry="weft.engine.strands", settings={"pipeline.pairs": (PairChoice.never,)}),
    "supervision": Feature(
        entry="weft.engine.supervision",
        commands={
            "evict": ("weft.tools.supervision.evict", "exclude hosts from runs, or list those that are excluded"),
            "readmit": ("weft.tools.supervision.readmit", "let excluded hosts back in"),
        },
        settings={
            "supervise.enabled": (False,),
            "checkpoint.memory_every": (),
            "cluster.manager": (ClusterManager.local, ClusterManager.ssh),
            "cluster.spares": (),
        },
    ),
    "watch": Feature(
        entry="weft.tools.watch",
        commands={
            "watch": ("weft.tools.watch.command", "show a live or finished run: a web page, or --text in the terminal"),
            "explain": ("weft.tools.watch.explain", "name what limits a run and what to change, with the gain"),
            "stacks": ("weft.tools.watch.stacks", "show what a run's ranks execute, ranks of equal stacks together"),
        },
        settings={"logging.prometheus_port": ()},
    ),
    "emulation": Feature(
        entry="weft.recipes.emulation",
        commands={
            "emulate": (
                "weft.recipes.emulation.command",
                "measure the step time of a large job with a few real ranks on this machine",
            )
        },
    ),
}
"""Features by name. `setup.cfg` lists their folders, which the core does not import."""


@cache
def is_installed(name: str) -> bool:
    """True if the entry module of a feature exists."""
    try:
        return find_spec(FEATURES[name].entry) is not None
    except ModuleNotFoundError:
        return False


def entry(name: str) -> Any:
    """Import and return a feature's entry module. Raise ValueError if the feature is not installed."""
    require(name, f"the feature {name}")
    return import_module(FEATURES[name].entry)


def require(name: str, asker: str) -> None:
    """Check that a feature is installed.

    Args:
        asker: the command or setting that needs it, as the user knows it.

    Raises:
        ValueError: the feature is not installed.
    """
    if not is_installed(name):
        raise ValueError(_absence(name, asker))


def _absence(name: str, asker: str) -> str:
    return f"{asker}: needs the feature {name!r}, which is not installed; leave it out, or install the whole of Weft"


def missing_features(config: WeftConfig) -> Iterator[str]:
    """Yield a line for each setting whose feature is not installed."""
    defaults = WeftConfig()
    for name in (name for name in FEATURES if not is_installed(name)):
        for path, harmless in FEATURES[name].settings.items():
            value, default = (reduce(getattr, path.split("."), of) for of in (config, defaults))
            if value not in (default, *harmless):
                yield _absence(name, path)
