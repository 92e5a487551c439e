"""Scaled dot-product attention that can be differentiated any number of times.

The fused kernels of torch have a first derivative only, on the CPU too. Their composition from
products and a softmax has all of them. ``torch.nn.attention.sdpa_kernel`` would choose it for the
whole process; a mode for functions of torch chooses it for one thread.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``F.scaled_dot_product_attention``, composed."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        zeros = torch.zeros_like(attn_mask, dtype=query.dtype)
        attn_mask = zeros.masked_fill(~attn_mask, -torch.inf)
    return torch.ops.aten._scaled_dot_product_attention_math(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        None,
        scale=scale,
        enable_gqa=enable_gqa,
    )[0]


def multi_head_attention_forward(*args: Any, need_weights: bool = True, **kwargs: Any) -> Any:
    """``F.multi_head_attention_forward``, which composes attention where weights are needed."""
    output, weights = functional.multi_head_attention_forward(*args, need_weights=True, **kwargs)
    return output, weights if need_weights else None


COMPOSED: dict[Any, Any] = {
    functional.scaled_dot_product_attention: attention,
    functional.multi_head_attention_forward: multi_head_attention_forward,
}
"""Replacements for a mode for functions of torch, which compilers follow."""
