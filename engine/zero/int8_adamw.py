"""AdamW whose moments have 8 bits in blocks with a scale each (Dettmers et al. 2022), on shards of parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from weft.engine.models.state_blocks import block_of, set_block
from weft.engine.zero.adamw import CompactAdamW, update
from weft.pipeline.memory import INT8_BLOCK, has_int8_state


class Int8AdamW(CompactAdamW):
    """AdamW of bitsandbytes, of which shards hold whole blocks.

    So moments and scales have the same values however parameters are divided. Parameters with few elements have fp32
    moments, by the number of elements of the whole parameter.
    """

    state_blocks: ClassVar[Mapping[str, int]] = {"absmax1": INT8_BLOCK, "absmax2": INT8_BLOCK}
    """State with one element for each block, and the elements of a block."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        """Create the optimiser. Parameters need the blocks that `tag` sets."""
        super().__init__(*args, **settings)
        self._codes: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def _step(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, block = self.state[weight], block_of(weight)
        if not state:
            moment = torch.uint8 if block > 1 else torch.float32
            state["step"] = 0
            for number in (1, 2):
                state[f"state{number}"] = torch.zeros_like(weight, dtype=moment)
                if block > 1:
                    scales = math.ceil(weight.numel() / block)
                    state[f"absmax{number}"] = torch.zeros(scales, dtype=torch.float32, device=weight.device)
        state["step"] += 1
        (_step_blocks if block > 1 else _step_whole)(weight, gradient, state, group, self._codes_on(weight.device))

    def _codes_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the values of the 256 codes of the first and second moment, as shares of a block's scale."""
        if device not in self._codes:
            from bitsandbytes.functional import create_dynamic_map

            signed, unsigned = (create_dynamic_map(signed=signed).to(device) for signed in (True, False))
            self._codes[device] = signed, unsigned
        return self._codes[device]


def _step_blocks(
    weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any], codes: tuple[Tensor, Tensor]
) -> None:
    from bitsandbytes.functional import optimizer_update_8bit_blockwise

    (beta1, beta2), (signed, unsigned) = group["betas"], codes
    optimizer_update_8bit_blockwise(
        "adam",
        gradient,
        weight,
        state["state1"],
        state["state2"],
        beta1,
        beta2,
        0.0,
        0.0,
        group["eps"],
        state["step"],
        float(group["lr"]),
        signed,
        unsigned,
        state["absmax1"],
        state["absmax2"],
        group["weight_decay"],
    )


def _step_whole(
    weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any], _: tuple[Tensor, Tensor]
) -> None:
    update(weight, gradient, (state["state1"], state["state2"]), state["step"], group)


def tag(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Set the blocks of parameters whose moments have 8 bits."""
    for _, parameter in named:
        set_block(parameter, INT8_BLOCK if has_int8_state(parameter.numel()) else 1)
