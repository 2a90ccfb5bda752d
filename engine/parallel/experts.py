"""Experts of which each member of an expert group holds some: tokens travel to them and back.

Hugging Face's blocks look up how their experts compute by a name in the config. A member registers its
own way under a name of its own: each token goes to the members that hold its experts, what was
configured before (grouped products, say) runs there on the experts at hand, and the results come
back to be weighed. Routers stay whole: they are Hugging Face's, on a member's own tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from weft.engine.parallel import functions
from weft.engine.parallel.axis import AxisGroup, AxisGroups
from weft.engine.parallel.cut import Cut, held_cut
from weft.engine.parallel.unshareable import UnshareableError

GROUPED_BYTES = 16
"""Bytes of which torch's grouped matrix products require multiples as rows."""


def expert_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that hold the experts of a layer, each of their parameters all of the layer's experts along dim 0."""
    for name, module in model.named_modules():
        if hasattr(module, "_is_expert_parallel"):  # what transformers' `use_experts_implementation` leaves on them
            yield name, module


def expert_cuts(model: PreTrainedModel, group: AxisGroup) -> dict[str, Cut]:
    """Which experts this member holds, by parameter names in a model that holds all.

    Raises:
        UnshareableError: they cannot be divided evenly.
    """
    cuts = {}
    for path, module in expert_modules(model) if group.size > 1 else ():
        if module.num_experts % group.size:
            raise UnshareableError(
                f"parallel.expert={group.size}: {type(model).__name__} has {module.num_experts} experts in a layer, "
                f"which {group.size} ranks cannot divide evenly; choose a divisor of {module.num_experts}"
            )
        for name, parameter in module.named_parameters():
            if (held := held_cut(parameter)) is not None:
                cuts[f"{path}.{name}"] = held
                continue
            shape = tuple(parameter.shape)
            if shape[:1] != (module.num_experts,):
                raise UnshareableError(
                    f"parallel.expert={group.size}: {path}.{name} of {type(model).__name__} is not one part for each "
                    "expert; set parallel.expert=1"
                )
            cuts[f"{path}.{name}"] = Cut(shape, 0, group.index, group.size, axis="expert")
    return cuts


def require_experts(model: PreTrainedModel, size: int) -> None:
    """Refuse a whole model that has no experts to hand out.

    Raises:
        UnshareableError: there are none, or the model runs them in a way of its own.
    """
    if size > 1 and not any(True for _ in expert_modules(model)):
        raise UnshareableError(
            f"parallel.expert={size}: {type(model).__name__} has no experts that transformers runs through its experts "
            "interface; set parallel.expert=1"
        )


def require_grouped_rows(model: PreTrainedModel, cuts: Mapping[str, Cut], dtype: torch.dtype, tensor: int) -> None:
    """Refuse experts of which torch's grouped products do not take what a rank holds.

    Args:
        model: whole; on the meta device, too.
        cuts: what a rank holds of parameters that it does not hold in full, by name.
        dtype: that experts compute in.
        tensor: ranks that share matrices.

    Raises:
        UnshareableError: naming a parameter, and what to do.
    """
    for path, module in expert_modules(model):
        if module.config._experts_implementation != "grouped_mm":
            continue
        for name, parameter in module.named_parameters():
            held = cuts[f"{path}.{name}"].held_shape if f"{path}.{name}" in cuts else tuple(parameter.shape)
            unfit = [row for row in held[1:] if row * dtype.itemsize % GROUPED_BYTES] if len(held) == 3 else []
            if not unfit:
                continue
            row, number = unfit[0], str(dtype).removeprefix("torch.")
            if tensor > 1:
                setting, remedy = (
                    f"parallel.tensor={tensor}",
                    "choose a smaller one, or share experts (parallel.expert)",
                )
            else:
                setting, remedy = "model", "choose other sizes of experts, or give a model that computes them eagerly"
            raise UnshareableError(
                f"{setting}: {path}.{name} of {type(model).__name__} has rows of {row} elements on a rank, "
                f"{row * dtype.itemsize} bytes in {number}, and torch's grouped products take multiples of "
                f"{GROUPED_BYTES}; {remedy}"
            )


def hold_parts(model: nn.Module, cuts: Mapping[str, Cut]) -> None:
    """Replace parameters by this rank's parts of them."""
    for name, cut in cuts.items():
        path, _, own = name.rpartition(".")
        module = model.get_submodule(path)
        whole = module.get_parameter(own)
        if held_cut(whole) is cut:
            continue
        setattr(module, own, nn.Parameter(cut.take(whole.detach()), requires_grad=whole.requires_grad))


def dispatch_over(axes: AxisGroups, model: PreTrainedModel, *, summed: bool = False) -> None:
    """Let a model that holds this member's experts send tokens to those that others hold.

    Args:
        summed: whether what members of the tensor group make of experts is added up behind their block.
    """
    modules = [module for _, module in expert_modules(model)]
    if axes.expert.size == 1 or not modules:
        return
    member = ExpertDispatch(axes, modules[0].config._experts_implementation, summed)
    ExpertsInterface.register(member.name, member.run)
    for module in modules:
        module.num_experts = len(next(module.parameters()))
        module.config._experts_implementation_internal = member.name


class ExpertDispatch:
    """One member's way of running experts.

    Members of a tensor group have the same tokens; each sends its part of them.
    """

    def __init__(self, axes: AxisGroups, base: str, summed: bool) -> None:
        self._group, self._tensor, self._summed = axes.expert, axes.tensor, summed
        self._base = base
        self.name = f"weft_expert_{base}_{id(self)}"

    def run(self, module: nn.Module, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted outputs of the chosen experts for each token.

        Args:
            module: with this member's experts.
            hidden: [T, H].
            experts: [T, K], each token's choice among the experts of all members.
            weights: [T, K].

        Returns:
            [T, H]; where members of the tensor group are summed, this one's tokens only, the others zero.
        """
        size, index = self._tensor.size, self._tensor.index
        if size == 1:
            return self._run(module, hidden, experts, weights)
        own = self._run(module, *(part.chunk(size)[index] for part in (hidden, experts, weights)))
        if not self._summed:
            return functions.gather(self._tensor, own, 0)
        before = index * len(own)
        return nn.functional.pad(own, (0, 0, before, len(hidden) - len(own) - before))

    def _run(self, module: nn.Module, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        chosen = experts.reshape(-1)
        order = chosen.argsort(stable=True)
        send, receive, numbers = self._counted(chosen, module.num_experts)
        arrived = functions.exchange(self._group, hidden[order // experts.shape[-1]], send, receive)
        done = functions.exchange(self._group, self._run_own(module, arrived, numbers, weights), receive, send)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        each = done[back].view(*experts.shape, -1)
        return (each * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)

    def _counted(self, chosen: Tensor, held: int) -> tuple[list[int], list[int], Tensor]:
        """Rows for each member, rows from each, and the number here of the expert that each of the latter is for.

        The host waits for the device: how large a transfer is has to be known to start it.
        """
        size = self._group.size
        counts = chosen.new_zeros(size * held).scatter_add_(0, chosen, torch.ones_like(chosen)).view(size, held)
        theirs = self._group.all_to_all(counts, [1] * size, [1] * size).wait()
        if counts.is_meta:  # traced without data: all experts have as many tokens
            send = receive = [len(chosen) // size] * size
        else:
            send, receive = torch.stack([counts.sum(1), theirs.sum(1)]).tolist()
        own = torch.arange(held, device=chosen.device).repeat(size)
        return send, receive, own.repeat_interleave(theirs.reshape(-1), output_size=sum(receive))

    def _run_own(self, module: nn.Module, rows: Tensor, numbers: Tensor, like: Tensor) -> Tensor:
        """Apply this member's experts to rows [N, H], row n to expert ``numbers[n]``.

        Without rows the first expert gets one that is dropped again, so that its gradients are zero instead of
        missing, and every member's backward has the same transfers.
        """
        count = len(rows)
        if not count:
            rows, numbers = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), numbers.new_zeros(1)
        eager = type(module).forward.__wrapped__
        compute = ExpertsInterface().get_interface(self._base, eager)
        return compute(module, rows, numbers.unsqueeze(-1), like.new_ones(len(rows), 1))[:count]
