"""Tensor and sequence parallelism by hooks: a model's own forward runs, on parts of its matrices.

Between blocks the hidden state is this member's slice of the sequence, [B, S / members, H]. A block is a part of a
decoder layer, such as attention or the feed-forward part. Slices are gathered before it, and after it the members'
outputs are summed and scattered. This is the method of "Reducing Activation Recomputation in Large Transformer Models"
(section 4.2), without changes to the model's code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from weft.engine.parallel import functions
from weft.engine.parallel.axis import Alone, AxisGroup, UnshareableError
from weft.engine.parallel.cut import Cut
from weft.engine.parallel.dropout import hook_dropout
from weft.engine.parallel.tensor_cuts import hold_in_place, require_divisible, tensor_cuts
from weft.engine.parallel.tensor_styles import Style, TensorPlan
from weft.engine.parallel.vocabulary import VocabularyLoss, cut_embedding

SEQUENCE = 1
"""Dimension of the sequence in a hidden state [B, S, H]."""


def share_layers(model: PreTrainedModel, group: AxisGroup, layers: str) -> dict[str, Cut]:
    """Reduce a model to this member's part of it, in place, and hook its forward to the group's collectives.

    Args:
        model: a stage's model or the whole model. It may have peft's layers.
        layers: path of the list of decoder layers.

    Returns:
        This member's parts of divided parameters, by name.

    Raises:
        UnshareableError: the group cannot divide the model.
    """
    if group.size == 1:
        return {}
    plan = TensorPlan(model)
    cuts = tensor_cuts(model, plan, group, layers)
    hold_in_place(model, cuts)
    for name in cuts:
        _tell_size(model.get_submodule(name.rpartition(".")[0]))
    _hook_matrices(model, plan, group, layers)
    hooked = [block for path, block in _blocks(model, layers) if _hook_block(path, block, plan, group)]
    hook_dropout(model, plan, group, layers, hooked)
    first = next(iter(model.get_submodule(layers).children()))
    first.register_forward_pre_hook(_OnInput(group, _slice), with_kwargs=True)
    _hook_vocabulary(model, group)
    return cuts


def require_shareable(model: PreTrainedModel, size: int, layers: str) -> None:
    """Check that a tensor group can divide a whole model, which may be on the meta device.

    Raises:
        UnshareableError: it cannot divide it. The message names the part and the remedy.
    """
    plan = TensorPlan(model)
    require_divisible(model, plan, size, layers)
    tensor_cuts(model, plan, Alone("tensor", size), layers)


def _tell_size(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape


def _hook_vocabulary(model: PreTrainedModel, group: AxisGroup) -> None:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    for name, module in (("embedding", embedding), ("head", head)):
        if isinstance(module, BaseTunerLayer):
            raise UnshareableError(
                f"parallel.tensor={group.size}: the {name} of {type(model).__name__} has an adapter, which cannot be "
                "divided over the vocabulary; leave it out of model.lora.target_modules"
            )
    embedding, head = _in_use(embedding), _in_use(head)
    if isinstance(embedding, nn.Embedding):
        cut_embedding(group, embedding)
    if isinstance(head, nn.Linear):
        head.register_forward_pre_hook(_OnInput(group, _gather), with_kwargs=True)
        if model.loss_function is not ForCausalLMLoss:
            raise UnshareableError(
                f"parallel.tensor={group.size}: {type(model).__name__} has a loss other than the usual causal one; "
                "set parallel.tensor=1"
            )
        model.loss_function = VocabularyLoss(group)


def _in_use(module: nn.Module | None) -> nn.Module | None:
    """Return the module that is used: peft's trained copy if it is in ``modules_to_save``, otherwise the module
    itself.
    """
    if isinstance(module, ModulesToSaveWrapper):
        return module.modules_to_save[module.active_adapters[0]]
    return module


def _hook_matrices(model: PreTrainedModel, plan: TensorPlan, group: AxisGroup, layers: str) -> None:
    for _, module, style in plan.modules(model, layers):
        if style is Style.gathered_columns:
            module.register_forward_hook(_OnOutput(group, _gather_features))
        elif style is Style.sliced_rows:
            module.register_forward_pre_hook(partial(_slice_features, group))
        if style.sums and getattr(module, "bias", None) is not None:
            module.register_forward_hook(partial(_add_bias_once, group))


def _blocks(model: PreTrainedModel, layers: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the blocks of decoder layers, and their paths."""
    for number, layer in model.get_submodule(layers).named_children():
        yield from _parts(layer, f"{layers}.{number}")


def _parts(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _parts(child, f"{path}.{name}")
        else:
            yield f"{path}.{name}", child


def _hook_block(path: str, module: nn.Module, plan: TensorPlan, group: AxisGroup) -> bool:
    """Hook a block, so that the hidden state is gathered before it, and summed or sliced after it.

    Return False without hooks if the block works on slices.
    """
    parts = [path, *(f"{path}.{name}" for name, _ in (*module.named_modules(), *module.named_parameters()))]
    styles = {style for part in parts if (style := plan.style(part.rstrip("."))) is not None}
    own = plan.style(path)
    has_parts = any(True for _ in module.children()) and any(True for _ in module.parameters())
    if not styles and not has_parts and not isinstance(module, nn.Conv1d):
        return False
    if own is None or not own.sums:
        module.register_forward_pre_hook(_OnInput(group, _gather), with_kwargs=True)
    if own is None or own.sums:
        sums = any(style.sums for style in styles)
        module.register_forward_hook(_OnOutput(group, _scatter_sum if sums else _take_slice))
    return True


Change = Callable[[AxisGroup, Tensor], Tensor]
"""An exchange of hidden states or features between members."""


@dataclass(frozen=True)
class _OnInput:
    """A forward pre-hook that replaces the hidden state in the arguments."""

    group: AxisGroup
    change: Change

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace ``hidden_states``, or else the first tensor among the arguments."""
        if isinstance(kwargs.get("hidden_states"), Tensor):
            return args, kwargs | {"hidden_states": self.change(self.group, kwargs["hidden_states"])}
        for number, value in enumerate(args):
            if isinstance(value, Tensor):
                return (*args[:number], self.change(self.group, value), *args[number + 1 :]), kwargs
        for name, value in kwargs.items():
            if isinstance(value, Tensor):
                return args, kwargs | {name: self.change(self.group, value)}
        return args, kwargs


@dataclass(frozen=True)
class _OnOutput:
    """A forward hook that replaces the output, or the first element of an output tuple."""

    group: AxisGroup
    change: Change

    def __call__(self, module: nn.Module, args: Any, answer: Any) -> Any:
        if isinstance(answer, tuple):
            return (self.change(self.group, answer[0]), *answer[1:])
        return self.change(self.group, answer)


_gather = partial(functions.gather, dim=SEQUENCE)
_scatter_sum = partial(functions.scatter_sum, dim=SEQUENCE)
_take_slice = partial(functions.take_slice, dim=SEQUENCE)


def _slice(group: AxisGroup, hidden: Tensor) -> Tensor:
    if hidden.shape[SEQUENCE] % group.size:
        raise UnshareableError(
            f"parallel.tensor={group.size}: {hidden.shape[SEQUENCE]} tokens in a sequence, which "
            f"{group.size} ranks cannot divide evenly; pad sequences, or set data.sequence_length"
        )
    return _take_slice(group, hidden)


def _gather_features(group: AxisGroup, features: Tensor) -> Tensor:
    return functions.gather(group, features, features.dim() - 1)


def _slice_features(group: AxisGroup, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (functions.take_slice(group, args[0], args[0].dim() - 1), *args[1:])


def _add_bias_once(group: AxisGroup, module: Any, args: Any, output: Tensor) -> Tensor:
    """Reduce the output by the bias times (1 - 1 / members), because all members of a sum add the bias."""
    return output - module.bias * (1 - 1 / group.size)
