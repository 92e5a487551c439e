"""The table of module kinds: what a replica must carry over, one small model for each."""

import functools
import sys
import types
import warnings
import weakref
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from problems import Net


def python_calls(function: Callable[[], Any]) -> int:
    """The number of calls of Python functions that the second call of this one makes."""
    function()
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


class Kind(NamedTuple):
    """A model, the arguments of one call, and whether its gradient sees all that it computes.

    A power iteration runs without a graph, so there finite differences of a gradient are not its
    derivative: ``smooth`` is false.
    """

    make: Callable[[], nn.Module]
    args: Callable[[], tuple[Any, ...]]
    kwargs: dict[str, Any] = {}  # noqa: RUF012
    smooth: bool = True


def rows(features: int = 2, count: int = 5) -> Callable[[], tuple[Tensor]]:
    return lambda: (torch.randn(count, features),)


def sequence(features: int = 4) -> Callable[[], tuple[Tensor]]:
    return lambda: (torch.randn(2, 3, features),)


def images(channels: int = 2) -> Callable[[], tuple[Tensor]]:
    return lambda: (torch.randn(3, channels, 4, 4),)


def tokens() -> tuple[Tensor]:
    return (torch.tensor([[0, 1, 1, 3], [2, 3, 0, 1]]),)


def mode(make: Callable[[], nn.Module], train: bool) -> Callable[[], nn.Module]:
    return lambda: make().train(train)


def chain(*makes: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(make() for make in makes))


def linear(inputs: int = 2, outputs: int = 2, **options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(inputs, outputs, **options)


# Sharing. ---------------------------------------------------------------------------------------


class TiedHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.middle = nn.Linear(3, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.middle(self.embed(tokens))))


class TwoPlaces(nn.Module):
    """One submodule, with weights and buffers, under two names and at two depths."""

    def __init__(self):
        super().__init__()
        shared = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.left = nn.Sequential(nn.Linear(2, 2), shared)
        self.right = shared

    def forward(self, x):
        return torch.tanh(self.left(x)) * self.right(x)


class ListsAndDicts(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.randn(2, 2)) for _ in range(2))
        self.named = nn.ParameterDict({"bias": nn.Parameter(torch.randn(2))})
        self.heads = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
        self.blocks = nn.ModuleList([nn.Linear(2, 2)])

    def forward(self, x):
        for weight in self.layers:
            x = torch.tanh(x @ weight + self.named["bias"])
        for name in self.heads:
            x = torch.tanh(self.heads[name](x))
        return self.blocks[0](x) + self.layers[-1].sum()


class ReadsChild(nn.Module):
    def __init__(self):
        super().__init__()
        self.child = nn.Linear(2, 3)

    def forward(self, x):
        return F.linear(torch.tanh(F.linear(x, self.child.weight, self.child.bias)), self.tied)

    @property
    def tied(self):
        return torch.tanh(self.child.weight).t()


class NoneParts(Net):
    def __init__(self):
        super().__init__()
        self.register_module("shortcut", None)
        self.register_parameter("scale", None)
        self.register_buffer("mask", None)
        self.extra = nn.Linear(1, 1)
        self.extra = None

    def forward(self, x):
        parts = (self.shortcut, self.scale, self.mask, self.extra)
        return super().forward(x) if all(part is None for part in parts) else None


# Attention and recurrence. ----------------------------------------------------------------------


class SelfAttention(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.options = options

    def forward(self, x):
        return self.attention(x, x, x, **self.options)[0]


class CrossAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(
            4, 2, kdim=3, vdim=5, add_bias_kv=True, batch_first=True
        )

    def forward(self, x, key, value):
        padding = torch.tensor([[False, False, True], [False, False, False]])
        return self.attention(x, key, value, key_padding_mask=padding, need_weights=False)[0]


class DotProduct(nn.Module):
    def __init__(self, causal=False):
        super().__init__()
        self.project = nn.Linear(4, 12)
        self.causal = causal

    def forward(self, x):
        # Four dimensions: with fewer, torch does not take the fused kernel.
        q, k, v = (t.unflatten(-1, (2, 2)).transpose(1, 2) for t in self.project(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)


class Cell(nn.Module):
    def __init__(self, cell):
        super().__init__()
        self.cell = cell(2, 3)

    def forward(self, x):
        state = None
        for row in x.unbind(1):
            state = self.cell(row, state)
        return state[0] if isinstance(state, tuple) else state


def encoder_layer(**options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.TransformerEncoderLayer(
        4, 2, 5, dropout=0.0, batch_first=True, activation="gelu", **options
    )


def encoder() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # advice on nested tensors
        return nn.TransformerEncoder(encoder_layer()(), 2, enable_nested_tensor=False)


def decoder_layer() -> nn.Module:
    return nn.TransformerDecoderLayer(4, 2, 5, dropout=0.0, batch_first=True, activation="gelu")


# Weights that are computed. ---------------------------------------------------------------------


class Symmetric(nn.Module):
    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.randn(2, 2))

    def forward(self, x):
        return x.triu() + x.triu(1).t() + self.shift

    def right_inverse(self, x):
        return x.triu() - self.shift


def parametrized(change: Callable[[nn.Module], object], inputs: int = 2, outputs: int = 3):
    def make() -> nn.Module:
        layer = nn.Linear(inputs, outputs)
        change(layer)
        return nn.Sequential(layer, nn.Tanh(), nn.Linear(outputs, 2))

    return make


def parametrized_convolution() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Conv2d(2, 3, 2), dim=1), nn.Tanh())


def twice_parametrized() -> nn.Module:
    layer = nn.Linear(2, 2)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    parametrize.register_parametrization(layer, "weight", nn.Tanh())
    return layer


def old_weight_norm(dim: int | None):
    def change(layer: nn.Module) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            nn.utils.weight_norm(layer, dim=dim)

    return parametrized(change)


def orthogonal(map_name: str, use_trivialization: bool = True):
    return parametrized(
        lambda layer: parametrizations.orthogonal(
            layer, orthogonal_map=map_name, use_trivialization=use_trivialization
        )
    )


# Hooks. -----------------------------------------------------------------------------------------


class Scaled(Net):
    def forward(self, x, *, scale=1.0):
        return super().forward(x) * scale


class HookedByItself(Net):
    """Hooks that are bound methods of modules in the tree."""

    def __init__(self):
        super().__init__()
        self.first.register_forward_hook(self.shifted)
        self.last.register_forward_pre_hook(self.widened)

    def shifted(self, module, args, output):
        return output + self.last.weight.sum() * module.bias

    def widened(self, module, args):
        return (args[0] * self.first.weight.norm(),)


def hooked(register: Callable[[nn.Module], object]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = Scaled()
        register(model)
        return model

    return make


def keyword_hooks(model: nn.Module) -> None:
    model.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {"scale": kwargs["scale"] + module.last.bias.sum()}),
        with_kwargs=True,
    )
    model.register_forward_hook(
        lambda module, args, kwargs, output: output * kwargs["scale"], with_kwargs=True
    )


def closure_hook(model: nn.Module) -> None:
    other = model.last
    model.first.register_forward_hook(lambda module, args, output: output * other.weight.sum())


def default_argument_hook(model: nn.Module) -> None:
    def hook(module, args, output, other=model.last, *, more=model.last.bias):
        return output * other.weight.sum() + more

    model.first.register_forward_hook(hook)


def callable_object_hook(model: nn.Module) -> None:
    class Hook:
        def __init__(self, other):
            self.other = other

        def __call__(self, module, args, output):
            return output * self.other.weight.sum()

    model.first.register_forward_hook(Hook(model.last))


# Instance-level forward. ------------------------------------------------------------------------


def with_forward(change: Callable[[nn.Module], None]) -> Callable[[], nn.Module]:
    """The change made to a submodule and to the root."""

    def make() -> nn.Module:
        inner, outer = Net(), nn.Sequential(nn.Linear(2, 2), nn.Tanh())
        outer.append(inner)
        change(inner)
        change(outer)
        return outer

    return make


def by_method(module: nn.Module) -> None:
    module.forward = types.MethodType(lambda self, x: 2 * type(self).forward(self, x), module)


def by_partial(module: nn.Module) -> None:
    def forward(module, factor, *args):
        return factor * module.plain(*args)

    module.plain = module.forward
    module.forward = functools.partial(forward, module, 2)


def by_wrapped_partial(module: nn.Module) -> None:
    by_partial(module)
    module.forward = functools.update_wrapper(module.forward, module.plain)


def by_closure(module: nn.Module) -> None:
    plain = module.forward
    module.forward = lambda x: 2 * plain(x)


def by_default_argument(module: nn.Module) -> None:
    module.forward = lambda x, plain=module.forward: 2 * plain(x)


# Python objects that refer into the tree. -------------------------------------------------------


class Holder:
    def __init__(self, **attributes):
        vars(self).update(attributes)


@dataclass(frozen=True)
class Record:
    layers: list[nn.Module] = field(default_factory=list)


def circle(layer: nn.Module, weight: Tensor) -> Holder:
    """Two objects that know each other."""
    one, other = Holder(m=layer), Holder(w=weight)
    one.other, other.other = other, one
    return one


Pair = namedtuple("Pair", ["layer", "weight"])


class Refers(nn.Module):
    """Reaches its layer and its weight only through what ``wrap`` made of them."""

    def __init__(self, wrap, unwrap):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.weight = nn.Parameter(torch.randn(2, 2))
        self.held = wrap(self.layer, self.weight)
        self.unwrap = unwrap

    def forward(self, x):
        layer, weight = self.unwrap(self.held)
        return torch.tanh(layer(x)) @ weight


REFERENCES = {
    "list": (lambda m, w: [m, w], lambda held: held),
    "tuple": (lambda m, w: (m, w), lambda held: held),
    "namedtuple": (Pair, lambda held: (held.layer, held.weight)),
    "nested": (lambda m, w: {"a": [(m, [w])]}, lambda held: (held["a"][0][0], held["a"][0][1][0])),
    "dict": (lambda m, w: {"m": m, "w": w}, lambda held: (held["m"], held["w"])),
    "dict_keys": (lambda m, w: {m: w}, lambda held: next(iter(held.items()))),
    "ordered_dict": (lambda m, w: OrderedDict(m=m, w=w), lambda held: held.values()),
    "default_dict": (
        lambda m, w: defaultdict(list, {"m": [m], "w": [w]}),
        lambda held: (held["m"][0], held["w"][0]),
    ),
    "deque": (lambda m, w: deque([m, w], maxlen=2), lambda held: held),
    "set": (lambda m, w: [{m}, {w}], lambda held: [next(iter(part)) for part in held]),
    "object": (lambda m, w: Holder(m=m, w=w), lambda held: (held.m, held.w)),
    "object_with_list": (lambda m, w: Holder(parts=[m, w]), lambda held: held.parts),
    "object_in_object": (
        lambda m, w: Holder(inner=Holder(m=m, w=w)),
        lambda held: (held.inner.m, held.inner.w),
    ),
    "list_of_objects": (
        lambda m, w: [Holder(part=m), Holder(part=w)],
        lambda held: [one.part for one in held],
    ),
    "objects_in_a_circle": (circle, lambda held: (held.other.other.m, held.other.w)),
    "frozen_dataclass": (lambda m, w: Record([m, w]), lambda held: held.layers),
    "bound_method": (lambda m, w: [m.forward, w], lambda held: held),
    "partial": (
        lambda m, w: functools.partial(lambda m, w: (m, w), m, w=w),
        lambda held: held(),
    ),
    "closure": (lambda m, w: lambda: (m, w), lambda held: held()),
    "weakref": (lambda m, w: [weakref.ref(m), w], lambda held: (held[0](), held[1])),
}


class Recursive(nn.Module):
    """Its parent and a list that contains itself, kept out of the module tree."""

    def __init__(self):
        super().__init__()
        self.child = Net()
        self.child.parent = [self]
        self.child.parent.append(self.child.parent)
        self.scale = nn.Parameter(torch.randn(1))
        self.child.register_forward_hook(
            lambda module, args, output: output * module.parent[1][0].scale
        )

    def forward(self, x):
        return self.child(x)


class Delegates(nn.Module):
    """Looks up in its inner module what it does not have itself."""

    def __init__(self):
        super().__init__()
        self.inner = Net()

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x):
        return self.last(self.encode(x)) + self.first.weight.sum()


# Forwards with something special. ---------------------------------------------------------------


class TakesParams(Net):
    """Its forward has an argument of the name that the patched model uses too."""

    def forward(self, x, params):
        return super().forward(x) * params["scale"]


class Checkpointed(Net):
    def body(self, x):
        return self.last(torch.tanh(self.first(x)))

    def forward(self, x):
        hidden = checkpoint(self.first, x, use_reentrant=False)
        return checkpoint(self.body, x, use_reentrant=False) * hidden.square().sum()


class CheckpointedAttention(SelfAttention):
    def __init__(self):
        super().__init__(need_weights=False)

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class CheckpointedDotProduct(DotProduct):
    def attend(self, x):
        return super().forward(x)

    def forward(self, x):
        return checkpoint(self.attend, x, use_reentrant=False)


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.act = nn.SiLU(inplace=True)
        self.middle = nn.Linear(3, 3)
        self.last = nn.Linear(3, 1)

    def forward(self, x):
        hidden = F.elu(self.middle(self.act(self.first(x))), inplace=True)
        output = self.last(hidden)
        output.add_(self.last.bias).mul_(self.first.bias.sum())
        return output


class Mixed(nn.Module):
    """Frozen weights, a bare parameter at the root, convolutions and every norm."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.randn(1))
        self.body = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.GELU(),
            nn.GroupNorm(2, 4),
            nn.Conv2d(4, 4, 1),
            nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
            nn.LayerNorm([4, 4, 4]),
            nn.AvgPool2d(2),
        )
        self.body[4].weight.requires_grad_(False)

    def forward(self, x):
        return self.body(x).flatten(1) + self.shift


def called_lazy() -> nn.Module:
    model = nn.Sequential(nn.LazyLinear(3), nn.Tanh(), nn.LazyBatchNorm1d(), nn.LazyLinear(1))
    model(torch.randn(4, 2))
    return model


KINDS: dict[str, Kind] = {
    "plain": Kind(Net, rows()),
    "mixed_train": Kind(Mixed, images()),
    "mixed_eval": Kind(mode(Mixed, False), images()),
    "tied": Kind(TiedHead, tokens),
    "two_places": Kind(TwoPlaces, rows()),
    "lists_and_dicts": Kind(ListsAndDicts, rows()),
    "reads_child": Kind(ReadsChild, rows()),
    "none_parts": Kind(NoneParts, rows()),
    "lazy_after_first_call": Kind(called_lazy, rows()),
    "in_place": Kind(InPlace, rows()),
    "takes_params": Kind(TakesParams, rows(), {"params": {"scale": 3.0}}),
    "checkpointed": Kind(Checkpointed, rows()),
    "checkpointed_attention": Kind(CheckpointedAttention, sequence()),
    "checkpointed_dot_product": Kind(CheckpointedDotProduct, sequence()),
    "multihead": Kind(lambda: SelfAttention(need_weights=False), sequence()),
    "multihead_with_weights": Kind(lambda: SelfAttention(need_weights=True), sequence()),
    "multihead_eval": Kind(lambda: SelfAttention(need_weights=False).eval(), sequence()),
    "multihead_cross": Kind(
        CrossAttention,
        lambda: (torch.randn(2, 3, 4), torch.randn(2, 3, 3), torch.randn(2, 3, 5)),
    ),
    "dot_product": Kind(DotProduct, sequence()),
    "dot_product_causal": Kind(lambda: DotProduct(causal=True), sequence()),
    "encoder_layer_train": Kind(encoder_layer(), sequence()),
    "encoder_layer_eval": Kind(mode(encoder_layer(), False), sequence()),
    "encoder_layer_norm_first": Kind(encoder_layer(norm_first=True), sequence()),
    "encoder_eval": Kind(mode(encoder, False), sequence()),
    "decoder_layer": Kind(decoder_layer, lambda: (torch.randn(2, 3, 4), torch.randn(2, 2, 4))),
    "rnn": Kind(lambda: nn.RNN(2, 3), sequence(2)),
    "rnn_relu": Kind(lambda: nn.RNN(2, 3, nonlinearity="relu", num_layers=2), sequence(2)),
    "lstm": Kind(lambda: nn.LSTM(2, 3, num_layers=2, bidirectional=True), sequence(2)),
    "lstm_projected": Kind(lambda: nn.LSTM(2, 3, proj_size=2, batch_first=True), sequence(2)),
    "gru": Kind(lambda: nn.GRU(2, 3, batch_first=True), sequence(2)),
    "rnn_cell": Kind(lambda: Cell(nn.RNNCell), sequence(2)),
    "lstm_cell": Kind(lambda: Cell(nn.LSTMCell), sequence(2)),
    "gru_cell": Kind(lambda: Cell(nn.GRUCell), sequence(2)),
    "weight_norm": Kind(parametrized(parametrizations.weight_norm), rows()),
    "weight_norm_other_dim": Kind(
        parametrized(functools.partial(parametrizations.weight_norm, dim=-1)), rows()
    ),
    "weight_norm_of_all": Kind(
        parametrized(functools.partial(parametrizations.weight_norm, dim=None)), rows()
    ),
    "weight_norm_convolution": Kind(parametrized_convolution, images()),
    "spectral_norm_eval": Kind(mode(parametrized(parametrizations.spectral_norm), False), rows()),
    "spectral_norm_train": Kind(parametrized(parametrizations.spectral_norm), rows(), {}, False),
    "orthogonal_exp": Kind(orthogonal("matrix_exp"), rows()),
    "orthogonal_cayley": Kind(orthogonal("cayley"), rows()),
    "orthogonal_householder": Kind(orthogonal("householder", False), rows()),
    "own_parametrization_twice": Kind(twice_parametrized, rows()),
    "hook_weight_norm": Kind(old_weight_norm(0), rows()),
    "hook_weight_norm_other_dim": Kind(old_weight_norm(1), rows()),
    "hook_weight_norm_of_all": Kind(old_weight_norm(None), rows()),
    "hook_spectral_norm_eval": Kind(mode(parametrized(nn.utils.spectral_norm), False), rows()),
    "hook_spectral_norm_train": Kind(parametrized(nn.utils.spectral_norm), rows(), {}, False),
    "hooks_bound_methods": Kind(HookedByItself, rows()),
    "hooks_keywords": Kind(hooked(keyword_hooks), rows(), {"scale": 2.0}),
    "hooks_closure": Kind(hooked(closure_hook), rows()),
    "hooks_default_argument": Kind(hooked(default_argument_hook), rows()),
    "hooks_callable_object": Kind(hooked(callable_object_hook), rows()),
    "forward_method": Kind(with_forward(by_method), rows()),
    "forward_partial": Kind(with_forward(by_partial), rows()),
    "forward_wrapped_partial": Kind(with_forward(by_wrapped_partial), rows()),
    "forward_closure": Kind(with_forward(by_closure), rows()),
    "forward_default_argument": Kind(with_forward(by_default_argument), rows()),
    "recursive": Kind(Recursive, rows()),
    "delegates": Kind(Delegates, rows()),
} | {
    f"refers_by_{name}": Kind(functools.partial(Refers, *how), rows())
    for name, how in REFERENCES.items()
}
