"""The networks that the benchmarks train. Each is a plain `nn.Module` with random weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Norm = Callable[[int], nn.Module]  # made from the number of channels


def mlp(widths: list[int]) -> nn.Sequential:
    """Linear layers with a ReLU between them. [batch, widths[0]] -> [batch, widths[-1]]"""
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def deep_mlp() -> nn.Sequential:
    """120 linear layers, 240 parameter tensors. [batch, 32] -> [batch, 32]"""
    return mlp([32] * 121)


def wide_mlp() -> nn.Sequential:
    """Few modules, much arithmetic in each. [batch, 256] -> [batch, 10]"""
    return mlp([256, 256, 256, 256, 10])


def conv4(
    way: int = 5, channels: int = 64, colours: int = 1, size: int = 28, norm: Norm = nn.BatchNorm2d
) -> nn.Sequential:
    """The few-shot network of MAML. [batch, colours, size, size] -> [batch, way]"""
    layers: list[nn.Module] = []
    for fan_in in (colours, channels, channels, channels):
        layers += [
            nn.Conv2d(fan_in, channels, 3, padding=1),
            norm(channels),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
        size //= 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * size**2, way))


class ComposedNorm(nn.Module):
    """Training-mode BatchNorm out of operations whose second derivatives `vmap` gets right.

    torch's own kernel under `vmap` gives a wrong meta-gradient, without an error.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        var, mean = torch.var_mean(x, (0, 2, 3), correction=0, keepdim=True)
        scale = self.weight.view(-1, 1, 1) * (var + 1e-5).rsqrt()
        return (x - mean) * scale + self.bias.view(-1, 1, 1)


class _Residual(nn.Module):
    """Three 3x3 convolutions beside a 1x1 one, then halved in size."""

    def __init__(self, fan_in: int, channels: int, norm: Norm) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for previous in (fan_in, channels, channels):
            layers += [nn.Conv2d(previous, channels, 3, padding=1, bias=False), norm(channels)]
            layers += [nn.ReLU()]
        self.body = nn.Sequential(*layers[:-1])
        self.shortcut = nn.Sequential(nn.Conv2d(fan_in, channels, 1, bias=False), norm(channels))

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(F.relu(self.body(x) + self.shortcut(x)), 2)


def resnet12(
    way: int = 5, channels: int = 64, colours: int = 1, norm: Norm = nn.BatchNorm2d
) -> nn.Sequential:
    """The larger few-shot network. [batch, colours, height, width] -> [batch, way]

    Four residual blocks, with 1, 2, 4 and 8 times `channels`.
    """
    widths = [channels * 2**block for block in range(4)]
    blocks = [_Residual(*pair, norm) for pair in itertools.pairwise([colours, *widths])]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], way)]
    return nn.Sequential(*blocks, *head)


class _Bottleneck(nn.Module):
    """Adds `growth` channels: BN-ReLU-conv 1x1 to 4 * growth, then BN-ReLU-conv 3x3."""

    def __init__(self, fan_in: int, growth: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(fan_in)
        self.conv1 = nn.Conv2d(fan_in, 4 * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        new = self.conv1(F.relu(self.norm1(x)))
        new = self.conv2(F.relu(self.norm2(new)))
        return torch.cat([x, new], dim=1)


def _transition(fan_in: int, fan_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.BatchNorm2d(fan_in),
        nn.ReLU(),
        nn.Conv2d(fan_in, fan_out, 1, bias=False),
        nn.AvgPool2d(2),
    )


def densenet_bc(growth: int = 12, depth: int = 100, classes: int = 10) -> nn.Sequential:
    """DenseNet-BC for CIFAR, compression 0.5. [batch, 3, 32, 32] -> [batch, classes]

    Reference: Huang et al., "Densely Connected Convolutional Networks", 2017, section 3.
    """
    per_block = (depth - 4) // 6
    channels = 2 * growth
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1, bias=False)]
    for block in range(3):
        if block > 0:
            layers.append(_transition(channels, channels // 2))
            channels //= 2
        for _ in range(per_block):
            layers.append(_Bottleneck(channels, growth))
            channels += growth
    head = [nn.BatchNorm2d(channels), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, *head, nn.Linear(channels, classes))


def paper_densenet() -> nn.Sequential:
    """DenseNet-BC(k=12, L=100), whose size is known: 299 tensors, 0.77 M parameters."""
    model = densenet_bc()
    params = list(model.parameters())
    assert len(params) == 299, f"DenseNet-BC(12, 100) has 299 parameter tensors, not {len(params)}"
    total = sum(p.numel() for p in params)
    assert total == 769_162, f"DenseNet-BC(12, 100) has 769,162 parameters, not {total:,}"
    return model


class _Attention(nn.Module):
    """Causal self-attention, composed: the fused kernels cannot be differentiated twice."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        self.register_buffer("future", future, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        shape = (batch, length, 3, self.heads, width // self.heads)
        query, key, value = self.project(x).view(shape).permute(2, 0, 3, 1, 4)
        scores = query @ key.mT * (width // self.heads) ** -0.5
        weights = scores.masked_fill(self.get_buffer("future"), -torch.inf).softmax(-1)
        return self.merge((weights @ value).transpose(1, 2).reshape(x.shape))


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = _Attention(width, heads, length)
        self.norm2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.contract(F.gelu(self.expand(self.norm2(x))))


class _GPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*(_Block(width, heads, length) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.token(tokens) + self.position)))


def gpt(
    layers: int = 4, width: int = 256, heads: int = 8, length: int = 256, vocabulary: int = 256
) -> nn.Module:
    """A small GPT with pre-norm blocks. [batch, length] -> [batch, length, vocabulary]"""
    return _GPT(layers, width, heads, length, vocabulary)
