"""Cutting of virtual stages out of a model in memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from peft import PeftModel
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from torch import nn
from transformers import PreTrainedModel

from weft.engine.models.lora import PREFIX
from weft.engine.models.skeleton import copied, decoder_layers, hf_model
from weft.engine.parallel.axis import AxisGroups
from weft.engine.parallel.cut import Cut, set_held
from weft.engine.parallel.experts import dispatch_over, expert_cuts, hold_parts
from weft.engine.parallel.tensor import share_layers
from weft.engine.parallel.tensor_styles import TensorPlan
from weft.engine.stages.cutting.outline import outline_of
from weft.engine.stages.cutting.port import Port
from weft.engine.stages.cutting.prune import open_port, prune
from weft.engine.stages.cutting.split import StageSplit
from weft.engine.stages.cutting.stage import Stage


def take_part(model: PreTrainedModel, axes: AxisGroups) -> dict[str, Cut]:
    """Reduce a model to this rank's part of it, in place.

    Returns:
        This rank's parts of divided parameters, by name.

    Raises:
        ValueError: these groups cannot divide the model.
    """
    cuts = expert_cuts(model, axes.expert)
    hold_parts(model, cuts)
    if axes.tensor.size == 1:
        dispatch_over(axes, model)
        return cuts
    plan = TensorPlan(model)
    styles = [style for name in cuts if (style := plan.style(name)) is not None]
    for name, cut in cuts.items():  # experts are not divided further, whatever their style in the plan
        set_held(model.get_parameter(name), cut)
    cuts |= share_layers(model, axes.tensor, decoder_layers(model))
    dispatch_over(axes, model, summed=any(style.sums for style in styles))
    return cuts


def named_parts(model: PreTrainedModel, axes: AxisGroups, prefix: str) -> dict[str, Cut]:
    """Call `take_part`, and prepend ``prefix`` to the parameters' names."""
    return {prefix + name: cut for name, cut in take_part(model, axes).items()}


def share_tied(stages: Sequence[Stage]) -> None:
    """Share each tied weight of ``stages``: use the parameter of the first stage that has it in all of them."""
    owned: dict[str, nn.Parameter] = {}
    for stage in stages:
        for name, parameter in list(stage.named_global_parameters()):
            if name in stage.tied and owned.setdefault(name, parameter) is not parameter:
                replace_parameter(stage, parameter, owned[name])


def replace_parameter(module: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Use the parameter ``new`` wherever ``module`` uses ``old``."""
    for child in module.modules():
        for name, parameter in list(child.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter is old:
                setattr(child, name, new)


def stages_from_model(
    model: nn.Module, split: StageSplit, stages: Sequence[int], axes: AxisGroups | None = None
) -> list[Stage]:
    """Cut virtual stages out of a Hugging Face model, or of peft's model around one.

    The model is consumed: it becomes the first of the stages. The memory of layers outside of the wanted
    stages is freed even if there are other references to the model. A single stage is the whole model, uncut.

    Args:
        split: layers of every stage of the whole model.
        stages: numbers of the virtual stages wanted.
        axes: groups that divide each layer. None does not divide.

    Raises:
        ValueError: the model cannot be cut faithfully.
    """
    whole = hf_model(model)
    require_adapters_in_layers(model)
    _checkpoint_without_reentrance(whole)
    axes = axes or AxisGroups()
    prefix = PREFIX if model is not whole else ""
    if split.num_stages == 1:
        cuts = named_parts(whole, axes, prefix)
        return [Stage(model, index=0, num_stages=1, port=Port(), axes=axes, cuts=cuts)]
    _require_apart(whole, split)
    outline = outline_of(type(whole), whole.config)
    assert split.num_layers == outline.num_layers
    bodies = [model, *(_same_weights(model) for _ in stages[1:])]
    made = []
    for index, body in zip(stages, bodies, strict=True):
        part, window = hf_model(body), split.layers[index]
        tied = prune(part, outline, window)
        port = open_port(part, outline, window, tied)
        names = frozenset(prefix + name for name in tied)
        cuts = named_parts(part, axes, prefix)
        made.append(Stage(body, index=index, num_stages=split.num_stages, port=port, tied=names, axes=axes, cuts=cuts))
    share_tied(made)
    return made


def require_adapters_in_layers(model: nn.Module) -> None:
    """Check that adapters are inside of layers of a PeftModel, and that each of their weights has memory of its own.

    Raises:
        ValueError: another model has adapters; peft does more in the whole model's forward, which stages do not run;
            or a weight is a view.
    """
    if not isinstance(model, PeftModel):
        if inside := next((name for name, part in model.named_modules() if isinstance(part, BaseTunerLayer)), None):
            raise ValueError(
                f"model: {inside} has an adapter, and {type(model).__name__} is not a PeftModel, so that an export "
                "would leave adapters out; give peft.get_peft_model(model, config) or PeftModel.from_pretrained(model, "
                "folder, is_trainable=True)"
            )
        return
    config = model.active_peft_config
    more = None
    if config.is_prompt_learning:
        more = "puts tokens before the prompt"
    elif type(model.base_model).forward is not BaseTuner.forward:
        more = "adds to the model's loss or inputs"
    elif getattr(config, "alora_invocation_tokens", None):
        more = "with alora_invocation_tokens looks for them in the prompt"
    if more is not None:
        raise ValueError(
            f"model: peft's {config.peft_type.value} {more}, which needs the whole model; use adapters inside of "
            "layers, such as LoRA"
        )
    first = dict[int, str]()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or parameter.is_meta or not parameter.numel():
            continue
        if (other := first.setdefault(parameter.data_ptr(), name)) != name:
            raise ValueError(
                f"model: {name} and {other} are two weights in the same memory, as peft makes them with "
                "ensure_weight_tying=True; leave it out, or name the embedding in modules_to_save"
            )


def _require_apart(model: PreTrainedModel, split: StageSplit) -> None:
    """Check that no trained weight is in layers of several stages, as in adapters with a bank for all layers.

    Raises:
        ValueError: one is, and each stage would train its own.
    """
    path, first = decoder_layers(model), dict[nn.Parameter, int]()
    for stage, window in enumerate(split.layers):
        for index in window:
            for name, parameter in model.get_submodule(f"{path}.{index}").named_parameters():
                if parameter.requires_grad and first.setdefault(parameter, stage) != stage:
                    raise ValueError(
                        f"model: {path}.{index}.{name} is also a weight of layers on another stage, and each stage "
                        "would train its own; set pipeline.stages=1, or use adapters without a shared weight"
                    )


def _checkpoint_without_reentrance(model: nn.Module) -> None:
    """Replace reentrant checkpointing of layers by non-reentrant checkpointing.

    Reentrant checkpointing hides from autograd all tensors except a layer's own positional arguments. It yields no
    gradient if no argument needs one, as on a first stage with a frozen embedding.
    """
    for module in model.modules():
        run = getattr(module, "_gradient_checkpointing_func", None)
        if isinstance(run, partial) and run.keywords.get("use_reentrant"):
            module._gradient_checkpointing_func = partial(run, use_reentrant=False)


def _same_weights(model: nn.Module) -> nn.Module:
    """Return a copy of the model's module tree with the same parameters and buffers."""
    tensors = [*model.parameters(), *model.buffers()]
    return copied(model, {id(tensor): tensor for tensor in tensors})
