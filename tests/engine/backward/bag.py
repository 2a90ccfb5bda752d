"""A module that applies its matrix in many ways, and the gradients of a module."""

import torch
import torch.nn.functional as F
from torch import nn


class Bag(nn.Module):
    """Owns a matrix, and applies it in the way that a test names."""

    def __init__(self, way, width=6, bias=True):
        super().__init__()
        self.way = way
        self.weight = nn.Parameter(torch.randn(width, width))
        self.bias = nn.Parameter(torch.randn(width)) if bias else None

    def forward(self, x):
        return WAYS[self.way](self, x)


def _conv1d(self, x):
    bias = x.new_zeros(x.shape[-1]) if self.bias is None else self.bias
    return torch.addmm(bias, x.reshape(-1, x.shape[-1]), self.weight).view_as(x)


WAYS = {
    "linear": lambda self, x: F.linear(x, self.weight, self.bias),
    "linear_keywords": lambda self, x: F.linear(input=x, weight=self.weight, bias=self.bias),
    "changed_in_place": lambda self, x: F.linear(x, self.weight, self.bias).add_(x),
    "at": lambda self, x: x @ self.weight,
    "matmul": lambda self, x: torch.matmul(x, self.weight.t()),
    "mm": lambda self, x: torch.mm(x.reshape(-1, x.shape[-1]), self.weight).view_as(x),
    "slice": lambda self, x: (
        F.linear(x, self.weight[:3].repeat_interleave(2, 0)) + F.linear(x, self.weight[::2], None).sum()
    ),
    "addmm": _conv1d,
    "twice": lambda self, x: F.linear(F.linear(x, self.weight), self.weight),
    "vector": lambda self, x: (
        F.linear(x, self.weight) + F.linear(x[..., 0, :].reshape(-1, x.shape[-1])[0], self.weight)
    ),
    "computed": lambda self, x: F.linear(x, self.weight.exp()),
    "scaled": lambda self, x: torch.addmm(x.reshape(-1, x.shape[-1]), x.reshape(-1, x.shape[-1]), self.weight).view_as(
        x
    ),
}


def collect(module):
    grads = {n: p.grad for n, p in module.named_parameters()}
    module.zero_grad()
    return grads
