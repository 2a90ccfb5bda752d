"""Styles of transformers' tensor-parallel plans: how a tensor group divides a matrix."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum, auto

from torch import nn
from transformers import PreTrainedModel

from weft.engine.parallel.axis import UnshareableError


class Style(Enum):
    """How a matrix is divided over the members, and the collectives around its product."""

    columns = auto()
    """Divides output features. The output stays divided."""
    rows = auto()
    """Divides input features. The input is divided already. Outputs are parts of a sum."""
    gathered_columns = auto()
    """Divides output features. The output is gathered."""
    sliced_rows = auto()
    """Divides input features. Each member takes its slice of the input. Outputs are parts of a sum."""
    packed_columns = auto()
    """Divides output features of two concatenated matrices."""
    packed_last = auto()
    """Divides output features of two concatenated matrices, whose last dimension is the output features."""

    @property
    def sums(self) -> bool:
        """True if the members' outputs are parts of a sum."""
        return self in (Style.rows, Style.sliced_rows)


STYLES = {
    "colwise": Style.columns,
    "rowwise": Style.rows,
    "colwise_gather_output": Style.gathered_columns,
    "colwise_rep": Style.gathered_columns,
    "rowwise_split_input": Style.sliced_rows,
    "rowwise_rep": Style.sliced_rows,
    "packed_colwise": Style.packed_columns,
    "packed_rowwise": Style.packed_last,
}
HELD_IN_FULL = frozenset(
    {
        "replicated_with_grad_allreduce",
        "mla_kv_a_proj",
        "moe_tp_experts",
        "sequence_parallel",
        "embedding_rowwise",
        "all_reduce",
        "moe_identity_expert",
    }
)
"""Styles that do not divide parameters.

In Weft, each member's gradients of undivided parameters are parts of a sum.
"""


_WRAPPED = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.|$)")
"""Names under which peft's wrappers store the wrapped module or its copy."""


class TensorPlan:
    """transformers' tensor-parallel plan for a class of models, by names in a whole model."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Read the plan of a model's class. Raise UnshareableError if the plan has a style that is not supported."""
        self._name = type(model).__name__
        plan = {key: style for key, style in (model.tp_plan or {}).items() if isinstance(style, str)}
        if odd := sorted({style for style in plan.values() if style not in STYLES and style not in HELD_IN_FULL}):
            raise UnshareableError(
                f"parallel.tensor: the plan of {self._name} has the style {', '.join(odd)}, which is not supported; "
                "set parallel.tensor=1"
            )
        self._styles = {key: STYLES[style] for key, style in plan.items() if style in STYLES}

    def style(self, name: str) -> Style | None:
        """Return the style of a module or a parameter, by its name, or None if it is not divided."""
        return self._styles.get(re.sub(r"\.\d+(?=\.|$)", ".*", _WRAPPED.sub("", name)))

    def modules(self, model: nn.Module, below: str) -> Iterator[tuple[str, nn.Module, Style]]:
        """Yield the modules inside of the module ``below`` that have a style, with their paths and styles."""
        for name, module in model.get_submodule(below).named_modules(prefix=below):
            style = self.style(name)
            if style is not None and not _WRAPPED.search(name):
                yield name, module, style
