"""innerloop.models: shapes, counts, and exact meta-gradients through each model."""

import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import innerloop as il
from innerloop import models
from innerloop.errors import InnerLoopError
from problems import flat, relative_error

FEW_SHOT = [name for name in models.NAMES if not name.startswith("densenet-bc")]
# As small as each may be: filters and the size of the images.
TINY = {
    "vgg": (3, 16),
    "resnet-4": (2, 16),
    "resnet-8": (2, 16),
    "resnet-12": (2, 16),
    "densenet-8": (2, 8),
    "densenet-bc-2-10": (None, 8),
    "mlp": (2, 4),
}


def tiny(name):
    filters, size = TINY[name]
    return models.build(name, in_channels=2, classes=3, size=size, filters=filters)


def episode(name, tasks=None):
    """Support and query: two images of each of three classes."""
    size = TINY[name][1]
    lead = () if tasks is None else (tasks,)
    labels = torch.arange(3).repeat(2).expand(*lead, 6)
    support, query = (torch.randn(*lead, 6, 2, size, size) for _ in range(2))
    return [(support, labels)] * 2, (query, labels)


def loss(model, batch):
    return cross_entropy(model(batch[0]), batch[1])


def inner_loop(name):
    model = tiny(name)
    return il.InnerLoop(model, torch.optim.SGD(model.parameters(), lr=0.05), loss)


def count(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("channels", "size"), [(1, 28), (3, 84), (3, 33)])
@pytest.mark.parametrize("name", FEW_SHOT)
def test_one_logit_for_each_class(name, channels, size):
    model = models.build(name, in_channels=channels, classes=5, size=size, filters=4)
    logits = model(torch.rand(3, channels, size, size))
    assert logits.shape == (3, 5) and logits.isfinite().all()


# By hand: convolutions (no biases), two numbers per channel of each batch norm, the linear layer.
@pytest.mark.parametrize(
    ("name", "options", "parameters"),
    [
        ("vgg", {}, 9 * 64 + 3 * 9 * 64**2 + 4 * 128 + 64 * 5 + 5),
        (
            "vgg",
            {"in_channels": 3, "size": 84, "filters": 48},
            9 * 3 * 48 + 3 * 9 * 48**2 + 4 * 96 + 25 * 48 * 5 + 5,
        ),
        (
            "resnet-4",
            {},
            10 * (64 + 64 * 128 + 128 * 256 + 256 * 512) + 4 * (64 + 128 + 256 + 512) + 512 * 5 + 5,
        ),
        ("mlp", {}, 784 * 256 + 256 * 128 + 128 * 64 + 64**2 + 2 * (256 + 128 + 128) + 64 * 5 + 5),
    ],
    ids=["vgg for Omniglot", "vgg for mini-ImageNet", "resnet-4", "mlp"],
)
def test_number_of_parameters(name, options, parameters):
    assert count(models.build(name, **{"in_channels": 1, "classes": 5} | options)) == parameters


@pytest.mark.parametrize(
    ("name", "convolutions", "between"),
    [
        ("resnet-4", 4, 4),  # of 1 by 1: shortcuts
        ("resnet-8", 8, 4),
        ("resnet-12", 12, 4),
        ("densenet-8", 8, 3),  # of 1 by 1: between blocks
    ],
)
def test_number_of_layers(name, convolutions, between):
    model = models.build(name, in_channels=3, classes=5, filters=2)
    kernels = [m.kernel_size for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert kernels.count((3, 3)) == convolutions
    assert kernels.count((1, 1)) == between


def test_densenet_bc_is_that_of_huang_et_al():
    model = models.build("densenet-bc-12-100", in_channels=3, classes=10)
    assert len(list(model.parameters())) == 299
    assert count(model) == count(models.DenseNetBC(growth=12, depth=100)) == 769_162
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert len(convolutions) + 1 == 100


# Parameters in millions, from table 2 of Huang et al.
@pytest.mark.parametrize(("growth", "depth", "millions"), [(12, 100, 0.8), (24, 250, 15.3)])
def test_densenet_bc_in_other_sizes(growth, depth, millions):
    with torch.device("meta"):
        model = models.build(f"densenet-bc-{growth}-{depth}", in_channels=3, classes=10)
    assert round(count(model) / 1e6, 1) == millions


@pytest.mark.parametrize("name", FEW_SHOT)
def test_evaluation_mode_goes_by_the_batch_too(name):
    model = tiny(name)
    x = episode(name)[1][0]
    assert torch.equal(model.train()(x), model.eval()(x))
    assert not list(model.buffers())


def test_densenet_bc_keeps_running_statistics():
    model = tiny("densenet-bc-2-10")
    x = episode("densenet-bc-2-10")[1][0]
    before = model.eval()(x)
    model.train()(x)
    assert not torch.equal(before, model.eval()(x))


@pytest.mark.parametrize("name", TINY)
def test_state_dict_and_pickle_give_the_same_model(name):
    first, second = tiny(name), tiny(name)
    x = episode(name)[1][0]
    second.load_state_dict(first.state_dict())
    copied = pickle.loads(pickle.dumps(first))
    assert torch.equal(first(x), second(x)) and torch.equal(first(x), copied(x))


@pytest.mark.parametrize("name", TINY)
def test_biases_and_norms_start_at_zero_and_one(name):
    for path, module in tiny(name).named_modules():
        if isinstance(module, nn.Linear) and module.bias is not None:
            assert not module.bias.any()
        if isinstance(module, nn.BatchNorm2d | nn.BatchNorm1d):
            # A residual block starts as its convolutions alone.
            assert (module.weight == (0 if "shortcut" in path else 1)).all()
            assert not module.bias.any()


@pytest.mark.parametrize("name", TINY)
def test_meta_gradient_equals_finite_differences(name):
    inner = inner_loop(name)
    train, val = episode(name)
    params = list(inner.parameters())
    inner(train, val).backward()
    start = [p.detach().clone() for p in params]
    direction = [torch.randn_like(p) * p.detach().abs().mean().clamp_min(0.1) for p in params]

    def at(distance):
        with torch.no_grad():
            for p, s, d in zip(params, start, direction, strict=True):
                p.copy_(s + distance * d)
            return inner(train, val)

    # This small because the loss jumps where an inner gradient passes the kink of a ReLU.
    eps = 1e-7
    expected = (at(eps) - at(-eps)) / (2 * eps)
    found = sum((p.grad * d).sum() for p, d in zip(params, direction, strict=True))
    assert relative_error(found, expected) < 1e-6


@pytest.mark.parametrize("name", TINY)
def test_tasks_at_once_equal_tasks_in_turn(name):
    inner = inner_loop(name)
    train, val = episode(name, tasks=3)
    found = []
    for way in (il.tasks.vmap(), il.tasks.loop()):
        inner.zero_grad()
        losses = inner(train, val, tasks=way)
        losses.mean().backward()
        found.append((losses.detach(), flat(p.grad for p in inner.parameters())))
    (losses, grad), (expected_losses, expected_grad) = found
    assert relative_error(losses, expected_losses) < 1e-12
    assert relative_error(grad, expected_grad) < 1e-10


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("resnet8", "resnet-8"),
        ("ResNet-12", "resnet-12"),
        ("vgg16", "vgg"),
        ("densenet", "densenet-8"),
        ("densenet-bc", "densenet-bc-12-100"),
        ("MLP", "mlp"),
        (None, ""),
        ("", ""),
        ("vgg\n", "vgg"),
    ],
)
def test_an_unknown_name_gets_the_nearest_right_one(name, nearest):
    with pytest.raises(InnerLoopError, match=f"Write: '{nearest}") as error:
        models.build(name, in_channels=1, classes=5)
    assert all(known in str(error.value) for known in models.NAMES)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("vgg", {"size": 15}, "size=15 to vgg.*16 by 16"),
        ("resnet-8", {"size": 8}, "size=8 to resnet-8"),
        ("densenet-8", {"size": 7}, "size=7 to densenet-8"),
        ("mlp", {"size": 0}, "size=0"),
        ("vgg", {"classes": 0}, "classes=0"),
        ("resnet-4", {"in_channels": 1.0}, "in_channels=1.0"),
        ("mlp", {"filters": True}, "filters=True"),
        ("densenet-bc-12-99", {}, "depth=99.*depth=100"),
        ("densenet-bc-12-4", {}, "depth=4"),
        ("densenet-bc-0-10", {}, "growth=0"),
        ("densenet-bc-12-100", {"filters": 24}, "densenet-bc-24-100"),
        ("densenet-bc-1000-994", {}, "densenet-bc-1000-994.*which has .* weights"),
        ("densenet-bc-1-999994", {}, "depth=999994.*at most 1000"),
        ("resnet-12", {"filters": 4096}, "filters=4096, which has .* weights"),
        ("mlp", {"filters": 4096, "size": 1000}, "weights"),
        ("densenet-bc-12-40", {"size": -3}, "size=-3"),
        ("densenet-bc-12-40", {"size": 3}, "size=3 to densenet-bc-12-40.*4 by 4"),
    ],
)
def test_impossible_shapes_are_refused(name, options, message):
    with pytest.raises(InnerLoopError, match=message):
        models.build(name, **{"in_channels": 1, "classes": 5} | options)


def test_a_name_is_checked_by_its_size_too():
    for depth in (100, 190):  # published
        models.check(f"densenet-bc-40-{depth}")
    with pytest.raises(InnerLoopError, match=r"densenet-bc-1000-994.*which has .* weights"):
        models.check("densenet-bc-1000-994")


def test_the_seed_decides_and_counting_weights_draws_no_random_numbers():
    torch.manual_seed(0)
    built = models.build("vgg", in_channels=1, classes=5, filters=4)
    torch.manual_seed(0)
    expected = models.VGG(in_channels=1, classes=5, filters=4)
    assert torch.equal(flat(built.parameters()), flat(expected.parameters()))


@pytest.mark.parametrize("name", FEW_SHOT)
def test_whole_numbers_of_other_libraries_are_taken(name):
    shape = {"in_channels": np.int64(1), "classes": torch.tensor(5), "size": np.uint8(20)}
    model = models.build(name, **shape, filters=np.int32(4))
    assert model(torch.rand(3, 1, 20, 20)).shape == (3, 5)
    assert all(type(m.in_features) is int for m in model.modules() if isinstance(m, nn.Linear))


@pytest.mark.parametrize("name", ["vgg", "mlp"])
def test_images_that_a_linear_layer_does_not_fit_are_refused(name):
    model = models.build(name, in_channels=1, classes=5, size=32, filters=4)
    with pytest.raises(InnerLoopError, match=r"square, of the size the model was built for"):
        model(torch.rand(3, 1, 48, 32))
