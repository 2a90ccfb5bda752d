"""Expert parallelism: each member of an expert group holds some experts, and tokens are sent to them and back.

Hugging Face's blocks look up the implementation of experts by a name in the config. Each member registers its own
under a unique name. It sends each token to the members that hold its experts, runs the configured implementation
(such as grouped products) on its own experts, and sends results back to be weighted. Routers are not divided: Hugging
Face's code runs them on a member's own tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from weft.engine.parallel import functions
from weft.engine.parallel.axis import AxisGroup, AxisGroups, UnshareableError
from weft.engine.parallel.cut import Cut, held_cut

GROUPED_BYTES = 16
"""Multiple of bytes to which torch's grouped matrix products require rows to be aligned."""


def expert_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules with a layer's experts, and their paths. Dim 0 of their parameters is the expert."""
    for name, module in model.named_modules():
        if hasattr(module, "_is_expert_parallel"):  # set by transformers' `use_experts_implementation`
            yield name, module


def expert_cuts(model: PreTrainedModel, group: AxisGroup) -> dict[str, Cut]:
    """Return this member's parts of the experts' parameters, by names in the whole model.

    Raises:
        UnshareableError: the group cannot divide the experts evenly, or dim 0 of a parameter is not the expert.
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
    """Check that a whole model has experts that the members of a group can divide.

    Raises:
        UnshareableError: there are none, or the model does not run them through transformers' interface.
    """
    if size > 1 and not any(True for _ in expert_modules(model)):
        raise UnshareableError(
            f"parallel.expert={size}: {type(model).__name__} has no experts that transformers runs through its experts "
            "interface; set parallel.expert=1"
        )


def require_grouped_rows(model: PreTrainedModel, cuts: Mapping[str, Cut], dtype: torch.dtype, tensor: int) -> None:
    """Check that torch's grouped products support a rank's parts of experts.

    Args:
        model: the whole model, possibly on the meta device.
        cuts: a rank's parts of divided parameters, by name.
        dtype: type in which experts compute.
        tensor: size of the tensor group.

    Raises:
        UnshareableError: rows are not aligned. The message names a parameter and the remedy.
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
    """Replace parameters by new ones with this rank's parts of them."""
    for name, cut in cuts.items():
        path, _, own = name.rpartition(".")
        module = model.get_submodule(path)
        whole = module.get_parameter(own)
        if held_cut(whole) is cut:
            continue
        setattr(module, own, nn.Parameter(cut.take(whole.detach()), requires_grad=whole.requires_grad))


def dispatch_over(axes: AxisGroups, model: PreTrainedModel, *, summed: bool = False) -> None:
    """Make a model with this member's experts send tokens to the experts of other members.

    Args:
        summed: whether the outputs of a tensor group's members are summed after the block.
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
    """One member's implementation of experts, which exchanges tokens with the other members.

    Members of a tensor group have the same tokens. Each of them sends its part of them.
    """

    def __init__(self, axes: AxisGroups, base: str, summed: bool) -> None:
        self._group, self._tensor, self._summed = axes.expert, axes.tensor, summed
        self._base = base
        self.name = f"weft_expert_{base}_{id(self)}"

    def run(self, module: nn.Module, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted outputs of the chosen experts for each token.

        Args:
            module: the module with this member's experts.
            hidden: the tokens' hidden states, [T, H].
            experts: each token's choice among the experts of all members, [T, K].
            weights: weights of the chosen experts, [T, K].

        Returns:
            The outputs [T, H]. If a tensor group sums its members' outputs, they are zero except for this member's
        tokens.
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
        """Exchange the numbers of tokens per expert.

        This synchronises the host with the device, because the sizes of the transfers must be known.

        Returns:
            The number of hidden states to send to each member, the number to receive from each, and the local expert of
            each received one.
        """
        size = self._group.size
        counts = chosen.new_zeros(size * held).scatter_add_(0, chosen, torch.ones_like(chosen)).view(size, held)
        theirs = self._group.all_to_all(counts, [1] * size, [1] * size).wait()
        if counts.is_meta:  # traced without data: all experts have equally many tokens
            send = receive = [len(chosen) // size] * size
        else:
            send, receive = torch.stack([counts.sum(1), theirs.sum(1)]).tolist()
        own = torch.arange(held, device=chosen.device).repeat(size)
        return send, receive, own.repeat_interleave(theirs.reshape(-1), output_size=sum(receive))

    def _run_own(self, module: nn.Module, rows: Tensor, numbers: Tensor, like: Tensor) -> Tensor:
        """Apply this member's experts to hidden states [N, H], expert ``numbers[n]`` to the n-th.

        Without hidden states, the first expert gets a dummy one. So its gradients are zero instead of missing, and
        every member's backward has the same transfers.
        """
        count = len(rows)
        if not count:
            rows, numbers = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), numbers.new_zeros(1)
        eager = type(module).forward.__wrapped__
        compute = ExpertsInterface().get_interface(self._base, eager)
        return compute(module, rows, numbers.unsqueeze(-1), like.new_ones(len(rows), 1))[:count]
