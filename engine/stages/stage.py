"""A virtual stage: some decoder layers of a Hugging Face model, run by the model's own forward."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from weft.engine.stages.placeholders import Leave, Port
from weft.engine.stages.skeleton import decoder_layers

Batch = Mapping[str, Tensor]
"""``input_ids``, ``labels`` (-100 = ignored, not shifted) and ``position_ids``, each int64 [B, S];
optionally ``attention_mask`` [B, S]."""


class Stage(nn.Module):
    """One virtual stage.

    The model's own forward runs on every stage. Layers of other stages are placeholders: the
    one before the stage's own hands in the received hidden state, the one after ends the
    forward. So masks, rotary tables and everything else that Hugging Face's code derives from
    the batch are rebuilt on each stage, by that code.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        index: int,
        num_stages: int,
        port: Port,
        tied: frozenset[str] = frozenset(),
        prefix: str = "",
    ) -> None:
        """Wrap a pruned model.

        Args:
            model: a pruned Hugging Face model, or peft's around it.
            index: of the virtual stage.
            num_stages: virtual stages of the whole model.
            port: takes the hidden state into the model.
            tied: names in ``model`` of parameters that another stage holds, too.
            prefix: put before names in ``model`` to make them those of the whole model.
        """
        super().__init__()
        self.index, self.num_stages = index, num_stages
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.model = model
        self.prefix = prefix
        shared = tied if num_stages > 1 else frozenset[str]()
        self.tied = frozenset(prefix + name for name, _ in model.named_parameters() if name in shared)
        self._port = port
        self._arguments = _arguments_of_forward(self.hf_model)

    @property
    def hf_model(self) -> PreTrainedModel:
        """The Hugging Face model, with peft's layers in it but not peft's wrapper around it."""
        return hf_model(self.model)

    def forward(self, hidden: Tensor | None, batch: Batch, num_items: Tensor | None = None) -> Tensor:
        """Run the stage's layers.

        Args:
            hidden: [B, S, H] from the stage before; None on the first.
            batch: the micro-batch, the same on every stage.
            num_items: labels that count, over everything that the loss is averaged over; None
                averages over this micro-batch.

        Returns:
            The hidden state [B, S, H] for the next stage; on the last one the loss: the sum of
            the tokens' losses divided by ``num_items``.
        """
        if not self.is_last:
            return self._hidden(hidden, batch)
        return self._output(hidden, batch, labels=batch["labels"], num_items_in_batch=num_items).loss

    def logits(self, hidden: Tensor | None, batch: Batch) -> Tensor:
        """Logits [B, S, V] of the last stage, for evaluation."""
        assert self.is_last
        return self._output(hidden, batch).logits

    def hidden_spec(self, batch: Batch) -> tuple[torch.Size, torch.dtype]:
        """Shape and dtype of the hidden state that this stage receives for a micro-batch."""
        width = self.hf_model.config.get_text_config().hidden_size
        return torch.Size((*batch["input_ids"].shape, width)), self.hf_model.dtype

    def named_global_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters with their names in the whole model, each once."""
        for name, parameter in self.model.named_parameters():
            yield self.prefix + name, parameter

    def blocks(self) -> list[nn.Module]:
        """The stage's decoder layers and its head, in order: only their own forwards use their weights."""
        layers = self.hf_model.get_submodule(decoder_layers(self.hf_model))
        assert isinstance(layers, nn.ModuleList)
        head = self.hf_model.get_output_embeddings() if self.is_last else None
        return [block for block in (*layers, head) if block is not None and any(True for _ in block.parameters())]

    def _hidden(self, hidden: Tensor | None, batch: Batch) -> Tensor:
        try:
            self._output(hidden, batch)
        except Leave as leave:
            return leave.hidden
        raise AssertionError("the forward ran past the stage's last layer")

    def accepted(self, batch: Batch, **more: Any) -> dict[str, Any]:
        """What the model's own forward takes of a micro-batch without its labels, and of ``more``."""
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids") if name in batch}
        return {
            name: value for name, value in (inputs | more).items() if self._arguments is None or name in self._arguments
        }

    def _output(self, hidden: Tensor | None, batch: Batch, **more: Any) -> Any:
        assert (hidden is None) == self.is_first
        self._port.hidden = hidden
        try:
            return self.hf_model(**self.accepted(batch, **more), use_cache=False)
        finally:
            self._port.hidden = None


def hf_model(model: nn.Module) -> PreTrainedModel:
    """The Hugging Face model itself, out of peft's wrapper if it has one."""
    return model if isinstance(model, PreTrainedModel) else model.get_base_model()


def tied_names(stage: Stage) -> frozenset[str]:
    """Names, in the whole model, of a stage's parameters that another virtual stage holds, too."""
    return stage.tied


def _arguments_of_forward(model: PreTrainedModel) -> frozenset[str] | None:
    """Names of the arguments that the model's forward takes; None if it takes any."""
    parameters = inspect.signature(model.forward).parameters.values()
    return None if any(p.kind is p.VAR_KEYWORD for p in parameters) else frozenset(p.name for p in parameters)
