"""`weft check`: show whether and where a model can be cut into stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from transformers import PreTrainedConfig

from weft.conf import load
from weft.conf.fields import choices
from weft.conf.schema import ModelConfig, WeftConfig
from weft.engine.models.kernels import kernel_kinds
from weft.engine.models.skeleton import config_skeleton, model_class
from weft.engine.stages.checking.axis_check import check_axes
from weft.engine.stages.checking.self_check import check_packing, self_check
from weft.engine.stages.cutting.outline import Outline, outline_of
from weft.engine.stages.files.loading import load_hf_config, quantization_of
from weft.tools import parsers


def main(argv: Sequence[str]) -> int:
    """Run ``model=FOLDER|HUB_NAME`` or ``model.arch=TYPE [model.overrides.NAME=VALUE ...] [parallel.AXIS=N ...]``.

    Raises:
        ValueError: the model cannot be read, or its stages or the members of an axis differ from the whole.
    """
    _, overrides = parsers.check().parse_known_args(argv)
    config = load([_expand(text) for text in overrides])
    print("\n".join([report(config.model), *shared_lines(config)]))
    return 0


def _expand(text: str) -> str:
    """Return ``model.path=FOLDER`` for ``model=FOLDER``, unless the text names a choice of the group ``model``."""
    key, _, value = text.partition("=")
    return f"model.path={value}" if key == "model" and value not in choices("model") else text


def report(config: ModelConfig) -> str:
    """Check a model and describe how it is cut.

    Raises:
        ValueError: see `self_check`.
    """
    hf_config = load_hf_config(config)
    self_check(hf_config)
    cls = model_class(hf_config)
    outline = outline_of(cls, hf_config)
    kinds = kernel_kinds(config_skeleton(hf_config))
    lines = [
        f"{cls.__name__} (model_type={hf_config.model_type}, {outline.num_layers} layers): "
        "logits, loss and gradients of its stages equal Hugging Face's own run",
        f"  cut between: {outline.layers}",
        f"  first stage: {', '.join(outline.before)}",
        f"  last stage:  {', '.join(outline.after)}{_tied(hf_config.get_text_config(), outline)}",
        f"  packing:     {_packing(hf_config)}",
        f"  kernels:     {', '.join(sorted(kinds)) or 'none'} can be fused (model.kernels=fused)",
    ]
    return "\n".join(lines)


def shared_lines(config: WeftConfig) -> list[str]:
    """Check that ranks can share the layers of a model along the configured axes, and return lines that describe it.

    Raises:
        ValueError: see `check_axes`.
    """
    sizes = asdict(config.parallel)
    used = {axis: sizes[axis] for axis in ("tensor", "context", "expert") if sizes[axis] > 1}
    if not used:
        return []
    hf_config = load_hf_config(config.model)
    if (quantized := quantization_of(config.model)) is not None:
        quantized.require_whole_layers(tensor=sizes["tensor"], expert=sizes["expert"])
    check_axes(hf_config, **used, exchange=config.parallel.context_exchange, packing=config.data.packing)
    named = ", ".join(f"parallel.{axis}={size}" for axis, size in used.items())
    return [f"  shared:      {named}: logits, loss and gradients of two members each equal one process"]


def _tied(text_config: object, outline: Outline) -> str:
    tied = getattr(text_config, "tie_word_embeddings", False) and outline.before and outline.after
    return f", and the weights of {outline.before[0]} (tied)" if tied else ""


def _packing(hf_config: PreTrainedConfig) -> str:
    try:
        check_packing(hf_config)
    except ValueError as error:
        return str(error)
    return "documents stay apart"
