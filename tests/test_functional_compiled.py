"""torch.compile(fullgraph=True) takes a replica, its gradient and a rule's update as they are."""

import pytest
import torch
from torch import nn, optim
from torch.func import grad, vmap

import innerloop as il
from innerloop.modules.replica import Template
from problems import flat, relative_error

# Dynamo reads it of every tensor that it meets.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")


class SelfAttention(nn.Module):
    """Without biases: that of the keys has gradient 0, of which Adam makes steps of round-off."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, bias=False, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


def with_hook():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model[0].register_forward_hook(lambda module, args, output: 2 * output)
    return model


MODELS = {
    "batch norm": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()),
    "averaged batch norm": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None)),
    "layer norm": lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 1)),
    "attention": SelfAttention,
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 2)),
    "weight norm by a hook": lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()),
    "forward hook": with_hook,
}
OPTIMIZERS = {
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "Adam": lambda p: optim.Adam(p, lr=0.1),
}


def inputs(name, *tasks):
    return torch.randn(*tasks, 2, 3, 4) if name == "attention" else torch.randn(*tasks, 5, 4)


def setup(name, optimizer="SGD"):
    torch.manual_seed(1)
    model = MODELS[name]()
    if name == "weight norm by a hook":
        with pytest.warns(FutureWarning, match="weight_norm"):
            nn.utils.weight_norm(model[0])
    template = Template(model)
    rule = il.optim.from_torch(OPTIMIZERS[optimizer](model.parameters()), template.params)
    params = {name: p.detach().clone() for name, p in template.params.items()}
    return template, rule, params


def compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, backend="eager", fullgraph=True)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_a_step(name, optimizer):
    template, rule, params = setup(name, optimizer)
    x = inputs(name)

    def step(params, state, x):
        def loss(params):
            replica = template.bind(params)
            return replica(x).square().sum(), template.buffers_of(replica)

        grads, buffers = grad(loss, has_aux=True)(params)
        return *rule.update(params, grads, state), buffers

    expected, expected_state, expected_buffers = step(params, rule.init(params), x)
    new, state, buffers = compiled(step)(params, rule.init(params), x)
    assert relative_error(flat(new.values()), flat(expected.values())) < 1e-12
    for block, other in zip(state, expected_state, strict=True):
        for slot, value in block.slots.items():
            assert relative_error(value.double(), other.slots[slot].double()) < 1e-12
    for key, value in expected_buffers.items():
        torch.testing.assert_close(buffers[key], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["batch norm", "layer norm", "attention", "forward hook"])
def test_the_derivative_of_a_step_over_tasks(name):
    """Without running statistics, since ``vmap`` would write those of all tasks into one."""
    template, rule, params = setup(name)
    for module in template.source.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.track_running_stats = False
    template, x = Template(template.source), inputs(name, 3)

    def after_a_step(params, x):
        def loss(params):
            return template.bind(params)(x).square().sum()

        new, _ = rule.update(params, grad(loss)(params), rule.init(params))
        return loss(new)

    def total(params):
        return vmap(after_a_step, (None, 0))(params, x).sum()

    found = compiled(grad(total))(params)
    expected = grad(lambda p: sum(after_a_step(p, one) for one in x))(params)
    assert relative_error(flat(found.values()), flat(expected.values())) < 1e-12
