"""4-bit weights of a frozen base model through bitsandbytes: QLoRA (Dettmers et al. 2023)."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module

from weft.conf.schema import LoraConfig, Quantization
from weft.engine.models.skeleton import skeleton

BLOCK, NESTED_BLOCK = 64, 256
"""Number of weights that share a scale, and number of scales that share a scale if scales are quantised, too."""
_SCALE_BYTES = "_weft_scale_bytes"


@dataclass(frozen=True)
class BaseQuantization:
    """The 4-bit type of a base model's linear layers, and whether its folder has them in this type already."""

    settings: BitsAndBytesConfig
    is_stored: bool

    def loading(
        self, cls: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype
    ) -> tuple[PreTrainedConfig, dict[str, Any]]:
        """Return the config and further arguments of ``from_pretrained`` for a part of a model.

        Each part quantises the same modules as transformers does in the whole model.

        Args:
            config: the model's config, which is not changed.
            dtype: type of the computations.
        """
        settings, config = copy.deepcopy(self.settings), copy.deepcopy(config)
        settings.llm_int8_skip_modules = self._skipped(skeleton(cls, config))
        settings.bnb_4bit_compute_dtype = dtype
        options: dict[str, Any] = {"device_map": {"": "cpu"}}
        if self.is_stored:
            config.quantization_config = settings.to_dict()
        else:
            options["quantization_config"] = settings
        return config, options

    def mark(self, whole: PreTrainedModel) -> None:
        """Mark the weights of a whole model, on the meta device, that will have 4 bits. See `scale_bytes`."""
        blocks = (1 + 4 / NESTED_BLOCK) if self.settings.bnb_4bit_use_double_quant else 4
        skipped = [*self._skipped(whole), *(whole._keep_in_fp32_modules or ())]
        for name, module in whole.named_modules():
            if (type(module) is nn.Linear or isinstance(module, Conv1D)) and should_convert_module(name, skipped):
                setattr(module.weight, _SCALE_BYTES, blocks / BLOCK)

    def require_whole_layers(self, *, tensor: int, expert: int) -> None:
        """Check that ranks do not share layers, because packed 4-bit weights cannot be cut.

        Raises:
            ValueError: the size of a group inside of layers is above 1.
        """
        for axis, size in (("tensor", tensor), ("expert", expert)):
            if size > 1:
                raise ValueError(
                    f"parallel.{axis}={size}: ranks cannot share layers whose base weights are packed in 4 bits "
                    f"({self.name}); set parallel.{axis}=1 and raise pipeline.stages, or give weights that are not "
                    "quantised"
                )

    @property
    def name(self) -> str:
        """The setting that quantises the weights."""
        kind = self.settings.bnb_4bit_quant_type
        return f"{kind} in the model's folder" if self.is_stored else f"model.lora.quantize={kind}"

    def _skipped(self, whole: PreTrainedModel) -> list[str]:
        listed = self.settings.llm_int8_skip_modules
        return sorted(get_keys_to_not_convert(whole) if listed is None else listed)


def scale_bytes(parameter: nn.Parameter) -> float:
    """Return the bytes of scales per weight of a parameter that will have 4 bits, or 0 for another one."""
    return getattr(parameter, _SCALE_BYTES, 0.0)


def base_quantization(lora: LoraConfig, source: str) -> BaseQuantization | None:
    """Return how the linear layers of a base model are quantised, or None if they are not.

    Args:
        source: folder or hub name of the model, or empty for a new one.

    Raises:
        ValueError: bitsandbytes is not installed, there is nothing to quantise, or the folder's weights are quantised
            in a form that cannot be trained.
    """
    stored = PreTrainedConfig.get_config_dict(source)[0].get("quantization_config") if source else None
    if stored is not None:
        _require_trainable(stored, lora, source)
    elif lora.quantize is Quantization.none:
        if not lora.double_quantize:
            raise ValueError("model.lora.double_quantize=false: no weights are quantised; set model.lora.quantize=nf4")
        return None
    elif not source:
        raise ValueError(
            f"model.lora.quantize={lora.quantize.name}: a new model has no trained weights to quantise; set model.path"
        )
    if find_spec("bitsandbytes") is None:
        setting = f"model.lora.quantize={lora.quantize.name}" if stored is None else f"model.path={source}"
        raise ValueError(
            f"{setting}: 4-bit weights need bitsandbytes, which is not installed; run pip install bitsandbytes"
        )
    if stored is not None:
        return BaseQuantization(BitsAndBytesConfig.from_dict(stored), is_stored=True)
    settings = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=lora.quantize.name, bnb_4bit_use_double_quant=lora.double_quantize
    )
    return BaseQuantization(settings, is_stored=False)


def _require_trainable(stored: dict[str, Any], lora: LoraConfig, source: str) -> None:
    method, storage = stored.get("quant_method"), stored.get("bnb_4bit_quant_storage") or "uint8"
    if method != "bitsandbytes" or not stored.get("load_in_4bit") or storage != "uint8":
        raise ValueError(
            f"model.path={source}: its weights are quantised by {method or 'an unknown method'}, in a form that stages "
            "cannot train; give a model that is not quantised, or in 4 bits of bitsandbytes that are stored as uint8"
        )
    if not lora.enabled:
        raise ValueError(
            f"model.path={source}: its weights are quantised to 4 bits, so that only adapters can be trained; "
            "set model.lora.enabled=true, or give a model that is not quantised"
        )
    if lora.quantize is not Quantization.none or not lora.double_quantize:
        raise ValueError(
            f"model.lora.quantize={lora.quantize.name}, double_quantize={str(lora.double_quantize).lower()}: the "
            f"weights in {source} are quantised already; leave both out"
        )


def settle_quantized(model: PreTrainedModel) -> None:
    """Prepare a loaded model with 4-bit weights for training as a stage.

    Its config becomes that of the model before quantisation, from which skeletons are made. Evaluation on a CPU would
    otherwise repack weights in place into a form that has no gradients.
    """
    del model.config.quantization_config
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
