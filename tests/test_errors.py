"""Every refusal says what you wrote, what is needed, why and what to write; and changes nothing."""

import copy
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

import innerloop as il
from problems import Net, flat, regression, relative_error, sgd
from test_functional import assert_untouched, fingerprint


def assert_four_parts(error, *names):
    """The four parts in order, none empty, and everything in ``names`` mentioned."""
    message = str(error)
    parts = re.fullmatch(r"(.+) Needed: (.+) Why: (.+) Write: (.+)", message, re.DOTALL)
    assert parts is not None, message
    assert all(len(part.strip()) > 3 for part in parts.groups()), message
    for name in names:
        assert name in message, (name, message)


class refuses:
    """Expects an error in four parts that mentions ``names``; model and optimizer stay the same."""

    def __init__(self, *names, kind=il.InnerLoopError, model=None, optimizer=None, loop=None):
        self.names, self.kind = names, kind
        self.model, self.optimizer, self.loop = model, optimizer, loop

    def snapshot(self):
        return {
            "optimizer": None if self.optimizer is None else self._settings(self.optimizer),
            "weights": None if self.loop is None else [id(w) for w in self.loop[0].fast_params],
            "history": None if self.loop is None else len(self.loop[0]._fast_params),
            "diffopt": None if self.loop is None else self._settings(self.loop[1]),
        }

    @staticmethod
    def _settings(optimizer):
        state = optimizer.state_dict()
        return repr(state), [
            {k: [id(p) for p in v] if k == "params" else id(v) for k, v in group.items()}
            for group in optimizer.param_groups
        ]

    def __enter__(self):
        self.before = self.snapshot()
        self.prints = None if self.model is None else fingerprint(self.model)
        self.raises = pytest.raises(self.kind)
        self.info = self.raises.__enter__()

    def __exit__(self, *details):
        result = self.raises.__exit__(*details)
        if not result:
            return result
        assert type(self.info.value) is self.kind
        assert_four_parts(self.info.value, *self.names)
        assert self.snapshot() == self.before
        if self.model is not None:
            assert_untouched(self.model, self.prints)
        return result


class Loop:
    """A loop under way: a model, a warm optimizer, a patched model after one step."""

    def __init__(self, make_optimizer=sgd, **settings):
        self.model, self.loss = Net(), regression()
        self.optimizer = make_optimizer(self.model.parameters())
        self.loss(self.model).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.context = il.innerloop_ctx(self.model, self.optimizer, **settings)
        self.fmodel, self.diffopt = self.context.__enter__()
        self.diffopt.step(self.loss(self.fmodel))

    def refuses(self, *names, kind=il.InnerLoopError):
        return refuses(
            *names,
            kind=kind,
            model=self.model,
            optimizer=self.optimizer,
            loop=(self.fmodel, self.diffopt),
        )

    def assert_goes_on(self):
        """One more step is the one that a loop without the error would have made."""
        weights = [w.detach().clone().requires_grad_() for w in self.fmodel.fast_params]
        named = dict(zip(dict(self.model.named_parameters()), weights, strict=True))
        value = self.loss(lambda x: torch.func.functional_call(self.model, named, (x,)))
        grads = torch.autograd.grad(value, weights)
        self.diffopt.step(self.loss(self.fmodel))
        expected = flat(w - 0.1 * g for w, g in zip(weights, grads, strict=True))
        assert relative_error(flat(self.fmodel.parameters()), expected) < 1e-12


@pytest.fixture
def loop():
    return Loop()


def adam(params):
    return torch.optim.Adam(params, lr=0.1, amsgrad=True)


# The classes. -----------------------------------------------------------------------------------


def test_one_family_of_errors():
    assert issubclass(il.InnerLoopError, ValueError)
    assert issubclass(il.RequirementError, il.InnerLoopError)


# Modules. ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", [il.functional, il.monkeypatch])
@pytest.mark.parametrize("thing", [3, "model", torch.nn.Linear, lambda x: x])
def test_what_is_not_a_module(entry, thing):
    with refuses(type(thing).__name__, "torch.nn.Module"):
        entry(thing)


@pytest.mark.parametrize("entry", [il.functional, il.monkeypatch])
@pytest.mark.parametrize("make", [torch.jit.script, torch.jit.trace])
@pytest.mark.parametrize("where", ["root", "nested"])
def test_script_modules(entry, make, where):
    arguments = () if make is torch.jit.script else (torch.randn(1, 2),)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit")
        if where == "root":
            model = make(Net(), *arguments)
        else:
            model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(make(Net(), *arguments)))
    with refuses("ScriptModule", "torch.jit.script", *(["1.0"] if where == "nested" else [])):
        entry(model)


@pytest.mark.parametrize("entry", [il.functional, il.monkeypatch])
def test_lazy_modules_before_their_first_call(entry):
    model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3))
    with refuses("lazy", "'1'", "'weight'", "model(example_input)"):
        entry(model)
    model(torch.randn(1, 2))
    entry(model)


def test_a_patched_model_patched_again(loop):
    with loop.refuses("patched"):
        il.monkeypatch(loop.fmodel)


def test_weights_of_a_function():
    model = Net()
    f = il.functional(model)
    with refuses("3 weights", "4", model=model):
        f(list(model.parameters())[:3], torch.randn(1, 2))
    with refuses("last.bias", "first.weight", model=model):
        f({k: v for k, v in f.params.items() if k != "last.bias"}, torch.randn(1, 2))
    with refuses("typo", model=model):
        f({**f.params, "typo": torch.zeros(1)}, torch.randn(1, 2))
    with refuses("running_men", "running_mean", model=model):
        norm = il.functional(nn.BatchNorm1d(2))
        norm.bind(norm.params, {"running_men": torch.zeros(2)})


def test_weights_of_a_patched_model(loop):
    with loop.refuses("3 weights", "4"):
        loop.fmodel.update_params(list(loop.fmodel.parameters())[:3])
    with loop.refuses("3 weights", "4"):
        loop.fmodel(torch.randn(1, 2), params=list(loop.fmodel.parameters())[:3])
    with loop.refuses("time=7", "0 to 1"):
        loop.fmodel.parameters(time=7)
    with loop.refuses("'off'", "True or False"):
        loop.fmodel.track_higher_grads = "off"
    loop.assert_goes_on()


def test_history_of_a_patched_model_that_keeps_none():
    fmodel = il.monkeypatch(Net(), track_higher_grads=False)
    fmodel.update_params([torch.zeros_like(p) for p in fmodel.parameters()])
    for ask in (lambda: fmodel.parameters(time=1), lambda: fmodel.init_fast_params):
        with refuses("track_higher_grads"):
            ask()


# Optimizers and their settings. -----------------------------------------------------------------


def test_an_optimizer_over_foreign_parameters():
    model, other = Net(), Net()
    for optimizer, place in (
        (sgd(other.parameters()), ("Parameter 0 of group 0", "(3, 2)")),
        (
            torch.optim.Adam(
                [{"params": model.first.parameters()}, {"params": [other.last.bias]}], lr=0.1
            ),
            ("Parameter 0 of group 1", "(1,)"),
        ),
    ):
        expected = refuses(*place, "model.parameters()", model=model, optimizer=optimizer)
        with expected, il.innerloop_ctx(model, optimizer):
            pass
        with expected:
            il.get_diff_optim(optimizer, model.parameters())


class OwnStep(torch.optim.SGD):
    def step(self, closure=None):
        return None


def test_an_optimizer_that_is_not_known():
    model = Net()
    optimizer = OwnStep(model.parameters(), lr=0.1)
    expected = refuses("OwnStep", "register_optim", model=model, optimizer=optimizer)
    with expected, il.innerloop_ctx(model, optimizer):
        pass


def test_lbfgs_and_sparse_adam():
    model = Net()
    for kind in (torch.optim.LBFGS, torch.optim.SparseAdam):
        optimizer = kind(model.parameters())
        expected = refuses(kind.__name__, model=model, optimizer=optimizer)
        with expected, il.innerloop_ctx(model, optimizer):
            pass


WRONG_OVERRIDES = {
    "unknown": ({"learning_rate": [0.1]}, ("'learning_rate'", "lr, betas, eps, weight_decay")),
    "flag": ({"amsgrad": [True]}, ("'amsgrad'", "discrete", "torch.optim.Adam(..., amsgrad=")),
    "implementation": ({"foreach": [True]}, ("'foreach'", "discrete")),
    "too_many": ({"lr": [0.1, 0.2]}, ("2 values", "'lr'", "1 parameter group")),
    "shape": ({"lr": [torch.zeros(7, 7)]}, ("(7, 7)", "'lr'")),
    "not_for_all": ({"lr": [torch.zeros(3, 2)]}, ("(3, 2)", "'lr'")),
    "per_parameter": ({"lr": [[0.1, 0.2, 0.3]]}, ("3 values", "'lr'", "4 parameters")),
    "one_beta": ({"betas": [0.9]}, ("0.9", "'betas'", "2")),
    "three_betas": ({"betas": [(0.9, 0.9, 0.9)]}, ("'betas'", "2")),
    "text": ({"lr": ["fast"]}, ("'lr'", "str", "number")),
    "boolean": ({"lr": [True]}, ("'lr'", "bool", "number")),
    "boolean_tensor": ({"lr": [torch.tensor(True)]}, ("'lr'", "number")),
    "second_is_wrong": ({"lr": [0.5], "amsgrad": [False]}, ("'amsgrad'",)),
}


@pytest.mark.parametrize("name", WRONG_OVERRIDES)
def test_an_override_that_does_not_fit(name):
    override, names = WRONG_OVERRIDES[name]
    loop = Loop(adam)
    with loop.refuses(*names):
        loop.diffopt.step(loop.loss(loop.fmodel), override=override)
    expected = refuses(*names, model=loop.model, optimizer=loop.optimizer)
    with expected, il.innerloop_ctx(loop.model, loop.optimizer, override=override):
        pass
    with expected:
        il.get_diff_optim(loop.optimizer, loop.model.parameters(), override=override)


def test_an_override_of_the_wrong_length_with_several_groups():
    model = Net()
    groups = [{"params": [p]} for p in model.parameters()]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    for given in ([0.1] * 3, torch.full((3,), 0.1)):
        expected = refuses("3 values", "'lr'", "4 parameter groups", model=model)
        with expected, il.innerloop_ctx(model, optimizer, override={"lr": given}):
            pass


def test_apply_trainable_opt_params_that_do_not_fit():
    model = Net()
    optimizer = adam(model.parameters())
    for override, names in (
        ({"lr": [torch.tensor(0.5)], "momentum": [torch.tensor(0.5)]}, ("'momentum'",)),
        ({"eps": [torch.tensor(0.5)], "lr": [torch.zeros(2)]}, ("'lr'",)),
        ({"lr": [torch.tensor(0.5)] * 2}, ("2 values", "'lr'")),
        ({"lr": [torch.tensor(0.5)], "betas": [0.5]}, ("'betas'",)),
    ):
        with refuses(*names, model=model, optimizer=optimizer):
            il.apply_trainable_opt_params(optimizer, override)


def test_create_diff_optim_over_nothing():
    with refuses("neither params nor fmodel"):
        il.create_diff_optim(torch.optim.SGD, {"lr": 0.1})


def test_register_optim_of_something_else():
    with refuses("Adam", "DifferentiableOptimizer"):
        il.register_optim(OwnStep, torch.optim.Adam)


def test_a_step_without_params_or_with_too_few(loop):
    diffopt = il.get_diff_optim(loop.optimizer, loop.model.parameters())
    value = loop.loss(loop.model)
    with refuses("params", model=loop.model, optimizer=loop.optimizer):
        diffopt.step(value)
    with refuses("3 parameters", "4", model=loop.model, optimizer=loop.optimizer):
        diffopt.step(value, params=list(loop.model.parameters())[:3])


def test_state_that_does_not_fit(loop):
    other = torch.optim.SGD(loop.model.first.parameters(), lr=0.7)
    with loop.refuses("[2]", "[4]"):
        loop.diffopt.load_state_dict(other.state_dict())
    with loop.refuses("[2]"):
        loop.diffopt.write_to(other)
    assert other.param_groups[0]["lr"] == 0.7
    with loop.refuses("in a group already"):
        loop.diffopt.add_param_group({"params": [loop.model.last.bias]})
    with loop.refuses("Parameter 0 of group 1"):
        loop.diffopt.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    loop.assert_goes_on()


# Losses. ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda output: output, "(5, 1)"),
        (lambda output: output.sum().item(), "."),
        (lambda output: None, "None"),
        (lambda output: output[:0].sum(0).flatten()[:0], "(0,)"),
    ],
    ids=["vector", "number", "none", "empty"],
)
def test_a_loss_that_is_not_a_scalar(loop, make, name):
    with loop.refuses(name, "loss.mean()"):
        loop.diffopt.step(make(loop.fmodel(torch.randn(5, 2))), override={"lr": [0.7]})
    loop.assert_goes_on()


def test_a_loss_with_one_value_but_one_dimension_is_accepted(loop):
    kept = flat(loop.fmodel.parameters())
    loop.diffopt.step(loop.loss(loop.fmodel).reshape(1))
    assert not torch.equal(flat(loop.fmodel.parameters()), kept)


@pytest.mark.parametrize("cut", ["detach", "no_grad"])
def test_a_loss_that_does_not_require_grad(loop, cut):
    if cut == "detach":
        value = loop.loss(loop.fmodel).detach()
    else:
        with torch.no_grad():
            value = loop.loss(loop.fmodel)
    with loop.refuses("does not require grad", "fmodel", kind=il.RequirementError):
        loop.diffopt.step(value, override={"lr": [0.7]})
    loop.assert_goes_on()


@pytest.mark.parametrize("track", [True, False])
@pytest.mark.parametrize("which", ["older", "original", "other"])
def test_a_loss_that_does_not_depend_on_the_present_weights(which, track):
    loop = Loop(track_higher_grads=track)
    if which == "older":
        value = loop.loss(loop.fmodel)
        loop.diffopt.step(value, retain_graph=True)
    elif which == "original":
        value = loop.loss(loop.model)
    else:
        value = torch.ones((), requires_grad=True).square()
    with loop.refuses(
        "does not depend", "loss_fn(fmodel(x), y)", "diffopt.step", kind=il.RequirementError
    ):
        loop.diffopt.step(value, override={"lr": [0.7]})
    loop.assert_goes_on()


def test_a_callback_that_fails_changes_nothing(loop):
    def fail(grads):
        raise RuntimeError("not today")

    kept, time = list(loop.fmodel.fast_params), len(loop.fmodel._fast_params)
    with pytest.raises(RuntimeError, match="not today"):
        loop.diffopt.step(loop.loss(loop.fmodel), override={"lr": [0.7]}, grad_callback=fail)
    assert all(a is b for a, b in zip(loop.fmodel.fast_params, kept, strict=True))
    assert len(loop.fmodel._fast_params) == time
    assert loop.diffopt.param_groups[0]["lr"] == 0.1
    loop.assert_goes_on()


# Operations without a second derivative. --------------------------------------------------------


class SquaredOnce(torch.autograd.Function):
    """Its backward makes numbers, not functions of its input."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


@pytest.mark.parametrize("after", ["sum", "square"])
@pytest.mark.parametrize("step", [0, 2])
def test_a_function_that_is_differentiable_once(after, step):
    """After a sum torch would take its gradient for a constant, silently; after a square raise."""
    loop = Loop(copy_initial_weights=False)
    x = torch.randn(5, 2)
    for _ in range(step):
        loop.diffopt.step(loop.loss(loop.fmodel))
    hidden = SquaredOnce.apply(loop.fmodel.first(x))
    value = hidden.sum() if after == "sum" else hidden.square().sum()
    with loop.refuses(
        "SquaredOnce", "'first.", "second derivative", "first_order=True", kind=il.RequirementError
    ):
        loop.diffopt.step(value)
    loop.assert_goes_on()


@pytest.mark.parametrize("settings", [{"first_order": True}, {"track_higher_grads": False}])
def test_a_function_that_is_differentiable_once_is_enough_for_first_order(settings):
    loop, x = Loop(**settings), torch.randn(5, 2)
    before = list(loop.fmodel.fast_params)
    loop.diffopt.step(SquaredOnce.apply(loop.fmodel.first(x)).sum())
    inner = torch.autograd.grad(
        F.linear(x, before[0].detach().requires_grad_(), before[1]).square().sum(), before[1]
    )[0]
    assert relative_error(loop.fmodel.first.bias, before[1] - 0.1 * inner) < 1e-12


def attention(hidden):
    heads = hidden.unflatten(-1, (1, 3)).transpose(0, 1).unsqueeze(0)
    return F.scaled_dot_product_attention(heads, heads, heads).square().mean()


def ctc(hidden):
    lengths = torch.tensor([5]), torch.tensor([2])
    return F.ctc_loss(hidden.log_softmax(-1).unsqueeze(1), torch.tensor([[1, 2]]), *lengths)


DEAD_ENDS = {
    "attention": (attention, "scaleddotproduct", "SDPBackend.MATH"),
    "ctc": (ctc, "ctcloss", ""),
    "cdist": (lambda hidden: torch.cdist(hidden, torch.ones(2, 3)).mean(), "cdist", ""),
    "pdist": (lambda hidden: F.pdist(hidden).mean(), "pdist", ""),
    "multi_margin": (
        lambda hidden: F.multi_margin_loss(hidden, torch.tensor([0, 1, 2, 0, 1]), p=2),
        "multimarginloss",
        "",
    ),
    "embedding_bag": (
        lambda hidden: F.embedding_bag(torch.tensor([[0, 1], [2, 3]]), hidden).square().sum(),
        "embeddingbag",
        "",
    ),
}


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("name", DEAD_ENDS)
def test_an_operation_without_second_derivative(name, step, inside):
    operation, spelled, remedy = DEAD_ENDS[name]
    loop = Loop(copy_initial_weights=False)
    x = torch.randn(5, 2)
    for _ in range(step):
        loop.diffopt.step(loop.loss(loop.fmodel))

    def refused_somewhere():
        loop.diffopt.step(operation(loop.fmodel.first(x)))
        if not inside:
            loop.context.__exit__(None, None, None)
        loop.loss(loop.fmodel).backward()

    before = fingerprint(loop.model)
    with pytest.raises(il.RequirementError) as caught:
        refused_somewhere()
    assert_four_parts(caught.value, "'first.", "second derivative", remedy)
    wrote = str(caught.value).split(" Needed: ")[0]
    assert spelled in wrote.lower().replace("_", ""), wrote
    assert_untouched(loop.model, before)


@pytest.mark.parametrize("name", DEAD_ENDS)
def test_an_operation_without_second_derivative_is_enough_for_first_order(name):
    operation, x = DEAD_ENDS[name][0], torch.randn(5, 2)
    model = Net()
    plain = copy.deepcopy(model)
    optimizer = sgd(model.parameters())
    with il.innerloop_ctx(model, optimizer, copy_initial_weights=False, first_order=True) as (
        fmodel,
        diffopt,
    ):
        diffopt.step(operation(fmodel.first(x)))
        fmodel(x).square().mean().backward()
    operation(plain.first(x)).backward()
    sgd(plain.parameters()).step()
    plain.zero_grad()
    plain(x).square().mean().backward()
    expected = flat(p.grad for p in plain.parameters())
    assert relative_error(flat(p.grad for p in model.parameters()), expected) < 1e-12


def test_a_dead_end_is_found_though_it_was_harmless_before():
    loop = Loop(copy_initial_weights=False)
    x, others = torch.randn(5, 2), torch.randn(2, 3, requires_grad=True)
    apart = torch.cdist(others, torch.ones(2, 3)).mean()
    loop.diffopt.step(loop.loss(loop.fmodel) + apart)
    loop.diffopt.step(torch.cdist(loop.fmodel.first(x), torch.ones(2, 3)).mean())
    with pytest.raises(il.RequirementError) as caught:
        loop.loss(loop.fmodel).backward()
    assert_four_parts(caught.value, "cdist", "'first.")


def test_a_dead_end_that_no_meta_gradient_crosses_is_no_error():
    """Weights that were trained so are fine, as long as only the later steps are differentiated."""
    loop = Loop()
    x = torch.randn(5, 2)
    loop.diffopt.step(attention(loop.fmodel.first(x)))
    middle = loop.fmodel.fast_params
    loop.diffopt.step(loop.loss(loop.fmodel))
    grads = torch.autograd.grad(loop.loss(loop.fmodel), middle)
    assert all(g.isfinite().all() for g in grads)
