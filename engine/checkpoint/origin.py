"""The origin of a checkpoint: base model, inputs and settings, which a resumed run compares with its own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from weft.conf.schema import WeftConfig
from weft.conf.trees import shown_tree
from weft.engine.checkpoint.durable import OtherBaseError

OF_THE_LAUNCH = ("cluster.master_addr", "cluster.master_port", "dry_run", "checkpoint.resume")
"""Settings that may differ between starts."""
OF_FILES = ("_name_or_path", "architectures", "dtype", "transformers_version")
"""Fields of a model's configuration that tell how its folder was written."""
OF_MODEL = ("model.config.", "model.adapters.")
"""Beginnings of the names of `model_settings`."""
OF_PEFT = ("base_model_name_or_path", "inference_mode", "peft_version", "revision")
"""Fields of adapters' configurations that do not change what is trained."""
SHOWN = 20
"""Most differences that a message lists."""


@dataclass(frozen=True)
class Origin:
    """The sources of a run.

    Attributes:
        base: fingerprint of the initial weights, or empty if they are random.
        path: configured folder or hub name of those weights.
        settings: values by their dotted names.
        inputs: fingerprints of files that settings name, such as the tokenizer and the data.
    """

    base: str = ""
    path: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=dict)

    def to_tree(self) -> dict[str, Any]:
        """Return the origin as JSON values."""
        tree: dict[str, Any] = _plain(asdict(self))
        return tree

    def require_base(self, saved: Mapping[str, Any], checkpoint: Path) -> None:
        """Check that the run that wrote a checkpoint has the same base model as this run.

        A model that was loaded from the checkpoint's own export passes.

        Args:
            saved: the checkpoint's origin, or empty for checkpoints of earlier versions.

        Raises:
            OtherBaseError: the base models differ.
        """
        exported = bool(self.path) and Path(self.path).expanduser().absolute() in checkpoint.absolute().parents
        if not saved or saved["base"] == self.base or exported:
            return
        raise OtherBaseError(
            f"{checkpoint}: it was trained from {_shown(saved['base'], saved['path'])}, and this run begins from "
            f"{_shown(self.base, self.path)}: other weights. Give the model that the checkpoint was trained from, or "
            "start anew with another train.name or with checkpoint.resume=never"
        )

    def differences(self, saved: Mapping[str, Any]) -> list[str]:
        """Return differences from a checkpoint's origin, as texts such as ``optimizer.lr=1e-05 (was 0.001)``."""
        if not saved:
            return []
        own = self.to_tree()
        inputs = own["inputs"].keys() & saved["inputs"].keys()
        return [
            *_differences(own["settings"], saved["settings"]),
            *(f"other content of {name}" for name in sorted(inputs) if own["inputs"][name] != saved["inputs"][name]),
        ]

    def report(self, saved: Mapping[str, Any]) -> str:
        """Return one line with all differences from a checkpoint's origin, or an empty string if there are none."""
        found = self.differences(saved)
        more = [f"and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
        return ", ".join([*found[:SHOWN], *more])


def model_settings(config: Any, adapters: Mapping[str, Any]) -> dict[str, Any]:
    """Return a Hugging Face model's configuration, and those of its peft adapters by name, as `flat` settings."""
    fields = {name: value for name, value in config.to_diff_dict().items() if name not in OF_FILES}
    peft = {name: {k: v for k, v in each.to_dict().items() if k not in OF_PEFT} for name, each in adapters.items()}
    ordered = {name: sorted(v) if isinstance(v, set) else v for name, v in flat(peft, "model.adapters.").items()}
    return flat(fields, "model.config.") | ordered


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of a tree of settings by their dotted names."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        leaves |= flat(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value}
    return leaves


def _differences(own: Mapping[str, Any], saved: Mapping[str, Any]) -> Iterator[str]:
    """Yield the settings that differ. Settings that an earlier version did not record are unknown, and left out."""
    defaults = _plain(flat(shown_tree(WeftConfig())))
    described = any(name.startswith(OF_MODEL) for name in saved)
    for name in sorted(own.keys() | saved.keys()):
        is_new = name not in saved and name in defaults and own[name] == defaults[name]
        is_unknown = is_new or (name.startswith(OF_MODEL) and not described)
        if own.get(name) != saved.get(name) and not is_unknown and name not in OF_THE_LAUNCH:
            yield f"{name}={own.get(name)} (was {saved.get(name)})"


def _plain(tree: Any) -> Any:
    return json.loads(json.dumps(tree, default=str))


def _shown(base: str, path: str) -> str:
    if not base:
        return "a new model"
    return f"model {path or '(given in memory)'} (fingerprint {base[:8]})"
