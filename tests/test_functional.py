"""Any module as a function of its weights: right values and derivatives, the original untouched."""

import copy
import pickle
import threading
import warnings
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import innerloop as il
from modules import (
    KINDS,
    CrossAttention,
    DotProduct,
    SelfAttention,
    TakesParams,
    TiedHead,
    python_calls,
)
from problems import Net, flat, relative_error


def tensors_in(output):
    """All floating tensors of a module's output, whatever container it is."""
    if isinstance(output, torch.Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, dict):
        output = output.values()
    return [t for part in output for t in tensors_in(part)]


def scalar(output):
    return sum(t.sin().sum() for t in tensors_in(output))


def fingerprint(model):
    """Everything of a model that a replica could have disturbed."""
    found = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key == "_modules":
                found[name, key] = [(k, id(m)) for k, m in value.items()]
            elif key in ("_parameters", "_buffers"):
                found[name, key] = [
                    (k, id(t), None if t is None else (t._version, t.grad, t.requires_grad))
                    for k, t in value.items()
                ]
            elif isinstance(value, OrderedDict):
                found[name, key] = [(k, id(v)) for k, v in value.items()]
            elif isinstance(value, list | dict | set):
                found[name, key] = (id(value), len(value))
            else:
                found[name, key] = id(value)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    return found, values


def assert_untouched(model, before):
    found, values = before
    now, now_values = fingerprint(model)
    assert now == found
    assert all(torch.equal(now_values[name], value) for name, value in values.items())


def fresh_weights(model):
    """Other weights for a model, near its own, that require grad where those do."""
    return {
        name: (p + 0.1 * torch.randn_like(p)).detach().requires_grad_(p.requires_grad)
        for name, p in model.named_parameters()
    }


def learned(weights):
    return [w for w in weights.values() if w.requires_grad]


def by_functional(model, weights):
    return lambda *args, **kwargs: il.functional(model)(weights, *args, **kwargs)


def by_monkeypatch(model, weights):
    fmodel = il.monkeypatch(model)
    fmodel.update_params(weights.values())
    return fmodel


ENTRIES = [by_functional, by_monkeypatch]


class Reference:
    """A second model of the same kind, into which weights are loaded: plain torch."""

    def __init__(self, kind, model):
        self.model = kind.make()
        self.model.train(model.training)
        self.state = {name: value.clone() for name, value in model.state_dict().items()}

    def __call__(self, weights, *args, **kwargs):
        self.model.load_state_dict(self.state)
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(weights[name])
        return self.model(*args, **kwargs)

    def gradient(self, weights, create_graph=False, args=(), kwargs=None):
        params = [p for p in self.model.parameters() if p.requires_grad]
        value = scalar(self(weights, *args, **(kwargs or {})))
        return torch.autograd.grad(value, params, create_graph=create_graph, materialize_grads=True)


def gradient_and_product(value, weights, directions):
    """The gradient and the product of the Hessian with a direction."""
    grads = torch.autograd.grad(value, weights, create_graph=True, materialize_grads=True)
    inner = sum((g * d).sum() for g, d in zip(grads, directions, strict=True))
    return grads, torch.autograd.grad(inner, weights, materialize_grads=True)


def product_by_differences(gradient, weights, directions, eps=1e-4):
    """The product of the Hessian with a direction, from first derivatives alone."""
    moved = dict(zip([n for n, w in weights.items() if w.requires_grad], directions, strict=True))

    def at(size):
        return flat(
            gradient({n: w.detach() + size * moved.get(n, 0.0) for n, w in weights.items()})
        )

    return (8 * (at(eps) - at(-eps)) - (at(2 * eps) - at(-2 * eps))) / (12 * eps)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("name", KINDS)
def test_replica_has_the_values_and_derivatives_of_the_module(name, entry):
    kind = KINDS[name]
    model = kind.make()
    args, kwargs = kind.args(), kind.kwargs
    reference = Reference(kind, model)
    weights = fresh_weights(model)
    directions = [torch.randn_like(w) for w in learned(weights)]
    before = fingerprint(model)

    output = entry(model, weights)(*args, **kwargs)
    grads, product = gradient_and_product(scalar(output), learned(weights), directions)
    assert_untouched(model, before)

    expected = reference(weights, *args, **kwargs)
    assert len(tensors_in(output)) == len(tensors_in(expected))
    for actual, wanted in zip(tensors_in(output), tensors_in(expected), strict=True):
        assert relative_error(actual, wanted) < 1e-12

    def gradient(weights, **options):
        return reference.gradient(weights, args=args, kwargs=kwargs, **options)

    assert relative_error(flat(grads), flat(gradient(weights))) < 1e-12
    if kind.smooth:
        expected_product = product_by_differences(gradient, weights, directions)
        assert relative_error(flat(product), expected_product) < 1e-6
    else:
        first = gradient(weights, create_graph=True)
        inner = sum((g * d).sum() for g, d in zip(first, directions, strict=True))
        params = [p for p in reference.model.parameters() if p.requires_grad]
        expected_product = torch.autograd.grad(inner, params, materialize_grads=True)
        assert relative_error(flat(product), flat(expected_product)) < 1e-12


# The interface. ---------------------------------------------------------------------------------


def test_params_are_named_and_ordered_as_the_modules():
    model = TiedHead()
    f = il.functional(model)
    assert list(f.params) == [name for name, _ in model.named_parameters()]
    assert all(a is b for a, b in zip(f.params.values(), model.parameters(), strict=True))
    assert list(il.functional(nn.BatchNorm1d(2)).buffers) == [
        "running_mean", "running_var", "num_batches_tracked",
    ]  # fmt: skip


def test_params_may_be_a_sequence():
    model, x = Net(), torch.randn(4, 2)
    weights = fresh_weights(model)
    f = il.functional(model)
    for given in (list(weights.values()), tuple(weights.values()), iter(weights.values())):
        assert torch.equal(f(given, x), f(weights, x))


def test_weights_are_used_as_they_are():
    weights = fresh_weights(Net())
    replica = il.functional(Net()).bind(weights)
    assert replica.first.weight is weights["first.weight"]
    assert dict(replica.named_parameters())["last.bias"] is weights["last.bias"]


def test_repr_names_the_class():
    assert repr(il.functional(Net())) == "functional(Net)"


def test_works_under_func_grad_and_vmap():
    model, x, y = Net(), torch.randn(3, 5, 2), torch.randn(3, 5, 1)
    f = il.functional(model)

    def loss(weights, x, y):
        return F.mse_loss(f(weights, x), y)

    def plain(weights, x, y):
        return F.mse_loss(functional_call(model, weights, (x,)), y)

    def after_a_step(loss):
        def run(weights, x, y):
            grads = torch.func.grad(loss)(weights, x, y)
            return loss({n: w - 0.1 * grads[n] for n, w in weights.items()}, x, y)

        return torch.func.vmap(torch.func.grad(run), in_dims=(None, 0, 0))

    weights = fresh_weights(model)
    actual = after_a_step(loss)(weights, x, y)
    expected = after_a_step(plain)(weights, x, y)
    assert relative_error(flat(actual.values()), flat(expected.values())) < 1e-12


# Buffers. ---------------------------------------------------------------------------------------


def test_buffers_evolve_in_the_replica_only():
    model, plain = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    weights = fresh_weights(model)
    plain.load_state_dict({**plain.state_dict(), **weights})
    before = fingerprint(model)
    replica = il.functional(model).bind(weights)
    for _ in range(3):
        x = torch.randn(5, 3)
        replica(x)
        plain(x)
    for name, buffer in replica.named_buffers():
        assert torch.equal(buffer, plain.get_buffer(name))
    assert replica.num_batches_tracked.item() == 3
    assert_untouched(model, before)


def test_every_call_starts_from_the_modules_own_buffers():
    model, x = nn.Sequential(nn.BatchNorm1d(3, momentum=0.5), nn.Linear(3, 1)), torch.randn(5, 3)
    f = il.functional(model)
    weights = fresh_weights(model)
    assert torch.equal(f(weights, x), f(weights, x))
    model.eval()
    first = f(weights, x)
    model[0].running_mean.fill_(3.0)
    assert not torch.equal(first, f(weights, x))


def test_given_buffers_are_used_and_stay_as_they_are():
    model, x = nn.BatchNorm1d(3).eval(), torch.randn(5, 3)
    f = il.functional(model)
    given = {"running_mean": torch.randn(3), "running_var": torch.rand(3) + 0.5}
    kept = {name: value.clone() for name, value in given.items()}
    expected = F.batch_norm(x, given["running_mean"], given["running_var"])
    replica = f.bind(f.params, given)
    assert relative_error(replica(x), expected) < 1e-12
    replica.train()(x)
    assert all(torch.equal(value, kept[name]) for name, value in given.items())
    assert not torch.equal(replica.running_mean, kept["running_mean"])


def test_a_shared_submodule_stays_one():
    norm = nn.BatchNorm1d(2)
    model = nn.Sequential(norm, nn.Linear(2, 2), norm)
    replica = il.functional(model).bind(list(model.parameters()))
    assert replica[0] is replica[2]
    replica(torch.randn(4, 2))
    assert replica[0].num_batches_tracked.item() == 2
    assert norm.num_batches_tracked.item() == 0


# Methods, submodules, hooks. --------------------------------------------------------------------


def test_other_methods_and_direct_submodule_calls():
    model, x = Net(), torch.randn(4, 2)
    weights = fresh_weights(model)
    plain = Net()
    plain.load_state_dict(weights)
    replica = il.functional(model).bind(weights)
    assert torch.equal(replica.encode(x), plain.encode(x))
    assert torch.equal(replica.first(x), plain.first(x))
    assert torch.equal(replica.last(torch.tanh(replica.first(x))), plain(x))


def test_methods_of_a_model_with_attention_can_be_differentiated_twice():
    class Encoder(DotProduct):
        def encode(self, x):
            return super().forward(x).mean(2)

    model, x = Encoder(), torch.randn(2, 3, 4)
    weights = fresh_weights(model)
    directions = [torch.randn_like(w) for w in learned(weights)]
    value = scalar(il.functional(model).bind(weights).encode(x))
    _, product = gradient_and_product(value, learned(weights), directions)

    def gradient(weights):
        weights = {name: w.detach().requires_grad_() for name, w in weights.items()}
        output = functional_call(model, weights, (x,)).mean(2)
        return torch.autograd.grad(scalar(output), list(weights.values()))

    expected = product_by_differences(gradient, weights, directions)
    assert relative_error(flat(product), expected) < 1e-6


def test_hooks_registered_later_stay_where_they_are():
    model, x = Net(), torch.randn(4, 2)
    weights = list(model.parameters())
    replica = il.functional(model).bind(weights)
    before = fingerprint(model)
    handle = replica.first.register_forward_hook(lambda module, args, output: output * 0)
    replica.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    assert_untouched(model, before)
    expected = model.last(torch.zeros(4, 3))
    assert torch.equal(replica(x), expected)
    handle.remove()
    assert torch.equal(replica(x), model(x + 1))

    model.last.register_forward_hook(lambda module, args, output: output * 0)
    assert torch.equal(il.functional(model)(weights, x), torch.zeros(4, 1))
    assert torch.count_nonzero(replica(x)) > 0


def test_an_argument_called_params_belongs_to_the_model():
    model, x = TakesParams(), torch.randn(4, 2)
    weights = fresh_weights(model)
    f = il.functional(model)
    assert torch.equal(f(weights, x, params={"scale": 2.0}), 2 * f(weights, x, {"scale": 1.0}))


# What is unwrapped, what is refused. ------------------------------------------------------------


def compiled(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the import of torch's compiler
        return torch.compile(model)


def compiled_child(model):
    model.first = compiled(model.first)
    return model


def compiled_in_place(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model.compile()
    return model


def data_parallel_child(model):
    model.last = nn.DataParallel(model.last)
    return model


def distributed(model):
    return nn.parallel.DistributedDataParallel(model)


@pytest.fixture
def one_process_group(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


WRAPPERS = [compiled, compiled_child, compiled_in_place, nn.DataParallel, data_parallel_child]


def assert_unwrapped(wrap):
    model, plain, x = Net(), Net(), torch.randn(4, 2)
    plain.load_state_dict(model.state_dict())
    wrapped = wrap(model)
    before = fingerprint(wrapped)
    f = il.functional(wrapped)
    assert list(f.params) == [name for name, _ in plain.named_parameters()]
    assert all(a is b for a, b in zip(f.params.values(), wrapped.parameters(), strict=True))
    weights = fresh_weights(plain)
    directions = [torch.randn_like(w) for w in weights.values()]
    inputs = list(weights.values())
    for replica in (f.bind(weights), by_monkeypatch(wrapped, weights)):
        assert type(replica).__name__ == "Net"
        actual = gradient_and_product(scalar(replica(x)), inputs, directions)
        output = functional_call(plain, weights, (x,))
        expected = gradient_and_product(scalar(output), inputs, directions)
        for one, other in zip(actual, expected, strict=True):
            assert relative_error(flat(one), flat(other)) < 1e-12
    assert_untouched(wrapped, before)


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_wrappers_are_left_out(wrap):
    assert_unwrapped(wrap)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_distributed_wrappers_are_left_out(one_process_group):
    assert_unwrapped(distributed)
    assert_unwrapped(lambda model: compiled(distributed(model)))


# Copies, threads, exceptions. -------------------------------------------------------------------


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda f: pickle.loads(pickle.dumps(f))],
    ids=["deepcopy", "pickle"],
)
@pytest.mark.parametrize("make", [Net, TiedHead, CrossAttention, lambda: nn.LSTM(2, 3)])
def test_deepcopy_and_pickle(make, duplicate):
    model = make()
    f = il.functional(model)
    twin = duplicate(f)
    assert twin.module is not model
    assert list(twin.params) == list(f.params)
    for name, value in twin.params.items():
        assert torch.equal(value, f.params[name]) and value is not f.params[name]
    weights = fresh_weights(model)
    replica, other = f.bind(weights), duplicate(f.bind({n: w.detach() for n, w in weights.items()}))
    assert all(
        torch.equal(a, b) for a, b in zip(replica.parameters(), other.parameters(), strict=True)
    )


def inner_loop(model, x, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with il.innerloop_ctx(model, optimizer, copy_initial_weights=False) as (fmodel, diffopt):
        for _ in range(steps):
            diffopt.step(fmodel(x).square().mean())
        value = fmodel(x).square().mean()
    return flat(torch.autograd.grad(value, list(model.parameters())))


def twice_by_functional(model, x):
    f = il.functional(model)
    weights = {name: p * (1 + x.mean()) for name, p in f.params.items()}
    inner = torch.autograd.grad(f(weights, x).square().mean(), weights.values(), create_graph=True)
    weights = {n: w - g for (n, w), g in zip(weights.items(), inner, strict=True)}
    return flat(torch.autograd.grad(f(weights, x).square().mean(), list(model.parameters())))


def test_binding_weights_costs_few_calls():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3).eval(), nn.Tanh(), nn.Linear(3, 1))
    template, x = il.functional(model).template(), torch.randn(4, 2)
    plain = python_calls(lambda: model(x))
    assert python_calls(lambda: template.bind(template.params, template.buffers)(x)) <= plain + 10


def fused_attention():
    """Whether this thread's attention runs on torch's own choice of kernel."""
    x = torch.randn(1, 1, 2, 4, requires_grad=True)
    found = F.scaled_dot_product_attention(x, x, x).grad_fn.name()
    return found.startswith("ScaledDotProduct")


class Pauses(DotProduct):
    """Tells when its forward has begun, and goes on when it may."""

    def __init__(self, begun, go_on):
        super().__init__()
        self.events = begun, go_on

    def forward(self, x):
        begun, go_on = self.events
        begun.set()
        assert go_on.wait(60)
        assert not fused_attention()
        return super().forward(x)


def test_another_threads_attention_keeps_its_kernel():
    begun, go_on = threading.Event(), threading.Event()
    f, x = il.functional(Pauses(begun, go_on)), torch.randn(2, 3, 4)
    outputs = []
    thread = threading.Thread(target=lambda: outputs.append(f(f.params, x)))
    thread.start()
    assert begun.wait(60)
    assert fused_attention()
    go_on.set()
    thread.join()
    assert len(outputs) == 1


@pytest.mark.parametrize("run", [inner_loop, twice_by_functional])
def test_two_threads_share_one_model(run):
    model = nn.Sequential(SelfAttention(need_weights=False), DotProduct())
    inputs = [torch.randn(2, 3, 4) for _ in range(2)]
    expected = [run(model, x) for x in inputs]
    before = fingerprint(model)
    ready = threading.Barrier(2)
    wrong = []

    def work(x, wanted):
        ready.wait()
        for _ in range(15):
            try:
                if not torch.equal(run(model, x), wanted):
                    wrong.append("another result")
            except Exception as error:
                wrong.append(error)

    threads = [
        threading.Thread(target=work, args=pair) for pair in zip(inputs, expected, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert fused_attention()
    assert_untouched(model, before)


class Fragile(SelfAttention):
    def forward(self, x):
        output = super().forward(x)
        if x.isnan().any():
            raise RuntimeError("not a number")
        return output


def test_an_exception_in_a_forward_leaves_everything_as_it_was():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(3), Fragile()), torch.randn(2, 3, 4)
    f = il.functional(model)
    weights = fresh_weights(model)
    expected = f(weights, x)
    kept = {name: w.detach().clone() for name, w in weights.items()}
    before = fingerprint(model)
    with pytest.raises(RuntimeError, match="not a number"):
        f(weights, x * torch.nan)
    assert fused_attention()
    assert all(torch.equal(w, kept[name]) for name, w in weights.items())
    assert_untouched(model, before)
    assert torch.equal(f(weights, x), expected)


# Models of other people. ------------------------------------------------------------------------


def gpt2(transformers):
    config = transformers.GPT2Config(
        vocab_size=11, n_embd=4, n_layer=2, n_head=2, n_positions=6, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    tokens = torch.randint(1, 11, (2, 5))
    return transformers.GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}


def t5(transformers):
    config = transformers.T5Config(
        vocab_size=11, d_model=4, d_kv=2, d_ff=5, num_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    batch = {"input_ids": torch.randint(1, 11, (2, 5)), "labels": torch.randint(1, 11, (2, 4))}
    return transformers.T5ForConditionalGeneration(config), batch


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("make", [gpt2, t5])
def test_hugging_face_models_with_keyword_arguments_and_loss(make):
    transformers = pytest.importorskip("transformers")
    model, batch = make(transformers)
    weights = fresh_weights(model)
    before = fingerprint(model)
    output = il.functional(model)(weights, **batch)
    grads = torch.autograd.grad(output.loss, list(weights.values()), materialize_grads=True)
    assert_untouched(model, before)

    model.load_state_dict(weights, strict=False)
    expected = model(**batch)
    assert type(output) is type(expected)
    assert relative_error(output.logits, expected.logits) < 1e-6
    assert relative_error(output.loss, expected.loss) < 1e-6
    expected_grads = torch.autograd.grad(
        expected.loss, list(model.parameters()), materialize_grads=True
    )
    assert relative_error(flat(grads), flat(expected_grads)) < 1e-5
