"""Products give the gradients that autograd gives, in the layout of their parameters; other calls are left alone."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from weft.engine.backward import products

DIM = st.integers(1, 9)


def random(*shape):
    return torch.randn(shape, dtype=torch.float64)


def parameter(*shape, transposed=False):
    """Return a parameter of ``shape``; transposed, it is the view of one whose last two dimensions are swapped."""
    if not transposed:
        return torch.nn.Parameter(random(*shape))
    return torch.nn.Parameter(random(*shape[:-2], shape[-1], shape[-2])).transpose(-2, -1)


def hold_to_autograd(call, activation):
    """The product of ``call(activation)``, its gradients compared with autograd's."""
    function, args, kwargs = call
    found, product = products.match(function, args, kwargs)
    assert found is activation
    factors = product.parameters
    bases = [products.base_parameter(factor) for factor in factors]
    output = function(*args, **kwargs)
    gradient = torch.randn_like(output)
    wanted = torch.autograd.grad(output, [activation, *bases], gradient)
    with torch.no_grad():
        given = [product.input_gradient(gradient), *product.parameter_gradients(activation, gradient)]
    torch.testing.assert_close(given[0], wanted[0])
    for mine, theirs, factor, base in zip(given[1:], wanted[1:], factors, bases, strict=True):
        torch.testing.assert_close(mine if factor is base else mine.transpose(-2, -1), theirs)
        assert mine.shape == factor.shape
        assert mine.stride() == factor.stride() or 1 in mine.shape, "accumulating would copy"
    return product


@given(st.lists(DIM, min_size=1, max_size=3), DIM, DIM, st.booleans())
def test_a_linear_layer_is_a_product(lead, fan_in, fan_out, biased):
    activation = random(*lead, fan_in).requires_grad_()
    weight, bias = parameter(fan_out, fan_in), parameter(fan_out) if biased else None
    product = hold_to_autograd((F.linear, (activation, weight, bias), {}), activation)
    assert len(product.parameters) == 1 + biased


@given(
    st.lists(DIM, min_size=1, max_size=3), DIM, DIM, st.booleans(), st.sampled_from([torch.matmul, torch.Tensor.matmul])
)
def test_a_matrix_product_is_one_in_either_layout(lead, fan_in, fan_out, transposed, function):
    activation = random(*lead, fan_in).requires_grad_()
    matrix = parameter(fan_in, fan_out, transposed=transposed)
    hold_to_autograd((function, (activation, matrix), {}), activation)


@given(DIM, DIM, DIM, st.booleans())
def test_addmm_is_one_with_a_bias(rows, fan_in, fan_out, transposed):
    activation = random(rows, fan_in).requires_grad_()
    matrix, bias = parameter(fan_in, fan_out, transposed=transposed), parameter(fan_out)
    hold_to_autograd((torch.addmm, (bias, activation, matrix), {}), activation)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_experts_are_one_in_either_layout(sizes, fan_in, fan_out, transposed):
    fan_in, fan_out = 4 * fan_in, 4 * fan_out  # rows of 16 bytes, which the kernel asks for
    activation = torch.randn(sum(sizes), fan_in).requires_grad_()
    matrices = torch.nn.Parameter(torch.randn(len(sizes), *((fan_out, fan_in) if transposed else (fan_in, fan_out))))
    matrices = matrices.transpose(1, 2) if transposed else matrices
    offsets = torch.tensor(sizes).cumsum(0).int()
    hold_to_autograd((torch._grouped_mm, (activation, matrices), {"offs": offsets}), activation)


@given(DIM, DIM, st.lists(st.integers(0, 8), min_size=1, max_size=12), st.booleans(), st.integers(-10, 10))
def test_a_lookup_has_the_gradient_of_its_table(tokens, width, ids, by_frequency, padding):
    activation = torch.tensor([number % tokens for number in ids])
    table = parameter(tokens, width)
    padding = None if padding == 10 else padding % (2 * tokens) - tokens
    args = (activation, table, padding)
    found, product = products.match(F.embedding, args, {"scale_grad_by_freq": True} if by_frequency else {})
    output = F.embedding(*args, scale_grad_by_freq=by_frequency)
    gradient = torch.randn_like(output)
    (wanted,) = torch.autograd.grad(output, table, gradient)
    assert found is activation and product.parameters == (table,)
    torch.testing.assert_close(product.parameter_gradients(activation, gradient)[0], wanted)
    with pytest.raises(AssertionError, match="no gradient"):
        product.input_gradient(gradient)


def calls_left_alone():
    """Calls whose weight gradient cannot wait, or that are no product of an activation and a parameter."""
    rows, matrix, bias, vector = random(3, 4), parameter(4, 5), parameter(5), parameter(4)
    experts, offsets, ids = parameter(2, 4, 5), torch.tensor([1, 3], dtype=torch.int32), torch.tensor([1, 2])
    yield "a vector", torch.matmul, (rows[0], matrix), {}
    yield "times a vector", torch.matmul, (rows, vector), {}
    yield "times a batch", torch.matmul, (rows, experts), {}
    yield "scaled", torch.addmm, (bias, rows, matrix), {"alpha": 2}
    yield "scaled bias", torch.addmm, (bias, rows, matrix), {"beta": 2}
    yield "both scaled", torch.addmm, (bias, rows, matrix), {"alpha": 2, "beta": 2}
    yield "added matrix", torch.addmm, (parameter(3, 5), rows, matrix), {}
    yield "groups without offsets", torch._grouped_mm, (random(2, 3, 4), experts), {}
    yield "groups of columns", torch._grouped_mm, (rows, matrix), {"offs": offsets}
    yield "groups with a bias", torch._grouped_mm, (rows, experts), {"offs": offsets, "bias": bias}
    yield "sparse", F.embedding, (ids, matrix), {"sparse": True}
    yield "renormed", F.embedding, (ids, matrix), {"max_norm": 1.0}
    yield "another function", torch.add, (rows, parameter(3, 4)), {}
    yield "no parameter", F.linear, (rows, random(5, 4).requires_grad_()), {}
    yield "computed from one", F.linear, (rows, 2 * parameter(5, 4)), {}
    yield "frozen", F.linear, (rows, parameter(5, 4).detach()), {}
    yield "frozen bias", F.linear, (rows, parameter(5, 4), parameter(5).requires_grad_(False)), {}


@pytest.mark.parametrize("call", [pytest.param(rest, id=name) for name, *rest in calls_left_alone()])
def test_other_calls_are_left_alone(call):
    assert products.match(*call) is None


def test_nothing_waits_without_gradients_or_where_autocast_casts():
    call = F.linear, (random(3, 4), parameter(5, 4)), {}
    assert products.match(*call) is not None
    with torch.no_grad():
        assert products.match(*call) is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert products.match(*call) is None
        meta = torch.empty(3, 4, device="meta")
        assert products.match(F.linear, (meta, parameter(5, 4)), {}) is not None


def test_views_of_a_parameter_lead_to_it():
    weight = parameter(6, 4)
    assert products.base_parameter(weight) is weight
    assert products.base_parameter(weight.t()) is weight
    assert products.base_parameter(weight[2:4].view(-1)) is weight
    assert products.base_parameter(weight * 1) is None
    assert products.base_parameter(torch.zeros(3)) is None
