"""innerloop.nn.batch_norm: values as torch's, derivatives of first to third order."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

import innerloop as il
from innerloop.nn import batch_norm
from problems import relative_error

SHAPES = [(5, 3), (4, 3, 2), (4, 3, 2, 2), (2, 3, 2, 2, 2)]


def arguments(shape, affine):
    x = torch.randn(*shape).requires_grad_()
    if not affine:
        return (x,)
    return x, torch.rand(shape[1]).add(0.5).requires_grad_(), torch.randn(shape[1]).requires_grad_()


def ours(x, weight=None, bias=None):
    return batch_norm(x, weight, bias)


def composed(x, weight=None, bias=None):
    over = [d for d in range(x.dim()) if d != 1]
    variance, mean = torch.var_mean(x, over, correction=0, keepdim=True)
    y = (x - mean) * (variance + 1e-5).rsqrt()
    channel = [1, -1, *[1] * (x.dim() - 2)]
    return y if weight is None else y * weight.view(channel) + bias.view(channel)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_derivatives_equal_finite_differences(shape, affine):
    args = arguments(shape, affine)
    assert torch.autograd.gradcheck(ours, args)
    assert torch.autograd.gradgradcheck(ours, args)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_third_derivative(shape, affine):
    args = arguments(shape, affine)

    def third(function):
        first = torch.autograd.grad(function(*args).pow(3).sum(), args[0], create_graph=True)[0]
        second = torch.autograd.grad(first.pow(2).sum(), args[0], create_graph=True)[0]
        return torch.autograd.grad(second.pow(2).sum(), args[0])[0]

    assert relative_error(third(ours), third(composed)) < 1e-10


@pytest.mark.parametrize("only", ["weight", "bias", "both"])
def test_second_derivative_when_only_some_gradients_are_used(only):
    x, weight, bias = arguments((4, 3, 2, 2), True)
    wanted = {"weight": [weight], "bias": [bias], "both": [weight, bias]}[only]

    def second(function):
        loss = (function(x, weight, bias) ** 5).sum()
        grads = torch.autograd.grad(loss, wanted, create_graph=True)
        return torch.autograd.grad(sum(g.pow(2).sum() for g in grads), x)[0]

    assert relative_error(second(ours), second(composed)) < 1e-12


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("track", [True, False])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_a_replicas_layer_does_what_torchs_does(momentum, track, affine, training):
    layer = nn.BatchNorm2d(3, momentum=momentum, track_running_stats=track, affine=affine)
    layer.train(training)
    model = nn.Sequential(nn.Conv2d(2, 3, 1), layer)
    fmodel = il.monkeypatch(model)
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    for _ in range(3):
        x = torch.randn(4, 2, 3, 3)
        given = {**dict(model.named_parameters()), **buffers}
        assert relative_error(fmodel(x), functional_call(model, given, (x,))) < 1e-12
        for name, buffer in fmodel.named_buffers():
            torch.testing.assert_close(buffer, buffers[name], rtol=1e-12, atol=0)


def test_one_value_per_channel_is_refused_as_by_torch():
    fmodel = il.monkeypatch(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        fmodel(torch.randn(1, 2))


def test_running_statistics_are_updated_in_place():
    x = torch.randn(6, 3, requires_grad=True)
    mean, var = torch.zeros(3), torch.ones(3)
    reference = mean.clone(), var.clone()
    batch_norm(x, None, None, mean, var, 0.3)
    F.batch_norm(x, *reference, training=True, momentum=0.3)
    assert torch.equal(mean, reference[0])
    assert torch.equal(var, reference[1])
