"""The networks of `models.py` as functions of their weights, which keep their names from there."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

Weights = dict[str, Array]
Network = Callable[[Weights, Array], Array]


def _linear(weights: Weights, name: str, x: Array) -> Array:
    out = x @ weights[f"{name}.weight"].T
    return out + weights[f"{name}.bias"] if f"{name}.bias" in weights else out


def mlp(widths: list[int]) -> Network:
    def network(weights: Weights, x: Array) -> Array:
        for layer in range(len(widths) - 2):
            x = jax.nn.relu(_linear(weights, f"{2 * layer}", x))
        return _linear(weights, f"{2 * (len(widths) - 2)}", x)

    return network


# --- images: [batch, channel, height, width] ---------------------------------------------------


def _conv(weights: Weights, name: str, x: Array) -> Array:
    layout = ("NCHW", "OIHW", "NCHW")
    out = jax.lax.conv_general_dilated(
        x, weights[f"{name}.weight"], (1, 1), "SAME", dimension_numbers=layout
    )
    if f"{name}.bias" in weights:
        out = out + weights[f"{name}.bias"][:, None, None]
    return out


def _norm(weights: Weights, name: str, x: Array) -> Array:
    mean = x.mean((0, 2, 3), keepdims=True)
    var = x.var((0, 2, 3), keepdims=True)
    scale = weights[f"{name}.weight"][:, None, None] * jax.lax.rsqrt(var + 1e-5)
    return (x - mean) * scale + weights[f"{name}.bias"][:, None, None]


def _larger(a: Array, b: Array) -> Array:
    """Not a maximum, whose derivative looks for the values that equal the result. With a reshape
    and `max`, compiled under `vmap`, the meta-gradient was wrong; see the README."""
    return jnp.where(a >= b, a, b)


def _halved(x: Array) -> Array:
    """The largest of every 2x2 pixels."""
    height, width = (size // 2 * 2 for size in x.shape[2:])
    rows = _larger(x[:, :, 0:height:2], x[:, :, 1:height:2])
    return _larger(rows[..., 0:width:2], rows[..., 1:width:2])


def conv4(way: int = 5, channels: int = 64, colours: int = 1, size: int = 28) -> Network:
    def network(weights: Weights, x: Array) -> Array:
        for block in range(4):
            x = _conv(weights, f"{4 * block}", x)
            x = _halved(jax.nn.relu(_norm(weights, f"{4 * block + 1}", x)))
        return _linear(weights, "17", x.reshape(x.shape[0], -1))

    return network


def resnet12(way: int = 5, channels: int = 64, colours: int = 1) -> Network:
    def block(weights: Weights, name: str, x: Array) -> Array:
        short = _conv(weights, f"{name}.shortcut.0", x)
        short = _norm(weights, f"{name}.shortcut.1", short)
        for layer in (0, 3, 6):
            x = _conv(weights, f"{name}.body.{layer}", x)
            x = _norm(weights, f"{name}.body.{layer + 1}", x)
            x = jax.nn.relu(x) if layer < 6 else x
        return _halved(jax.nn.relu(x + short))

    def network(weights: Weights, x: Array) -> Array:
        for number in range(4):
            x = block(weights, f"{number}", x)
        return _linear(weights, "6", x.mean((2, 3)))

    return network


# --- text: [batch, length] ---------------------------------------------------------------------


def _layer_norm(weights: Weights, name: str, x: Array) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def _attention(weights: Weights, name: str, x: Array, heads: int) -> Array:
    batch, length, width = x.shape
    parts = _linear(weights, f"{name}.project", x).reshape(batch, length, 3, heads, -1)
    query, key, value = parts.transpose(2, 0, 3, 1, 4)
    scores = query @ key.swapaxes(-1, -2) * (width // heads) ** -0.5
    past = jnp.tril(jnp.ones((length, length), bool))
    mixed = jax.nn.softmax(jnp.where(past, scores, -jnp.inf), -1) @ value
    return _linear(weights, f"{name}.merge", mixed.swapaxes(1, 2).reshape(x.shape))


def gpt(
    layers: int = 4, width: int = 256, heads: int = 8, length: int = 256, vocabulary: int = 256
) -> Network:
    def block(weights: Weights, name: str, x: Array) -> Array:
        normed = _layer_norm(weights, f"{name}.norm1", x)
        x = x + _attention(weights, f"{name}.attention", normed, heads)
        wide = _linear(weights, f"{name}.expand", _layer_norm(weights, f"{name}.norm2", x))
        return x + _linear(weights, f"{name}.contract", jax.nn.gelu(wide, approximate=False))

    def network(weights: Weights, tokens: Array) -> Array:
        x = weights["token.weight"][tokens] + weights["position"]
        for layer in range(layers):
            x = block(weights, f"blocks.{layer}", x)
        return _linear(weights, "head", _layer_norm(weights, "norm", x))

    return network
