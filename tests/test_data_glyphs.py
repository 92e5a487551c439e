"""Glyphs: the same for the same seed, hard for pixels, fast enough to draw at every start."""

import pytest
import torch
from torch.nn.functional import one_hot

from innerloop.data import Episode, Sampler, glyphs, load
from innerloop.errors import InnerLoopError


@pytest.fixture(scope="module")
def episode() -> Episode:
    return Sampler(glyphs(train=1, val=1, test=200).test, 5, 1, 15, 200, seed=1).sample()


def test_the_seed_decides():
    one, two, other = (glyphs(20, 5, 5, drawings=4, seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(a.pixels, b.pixels) for a, b in zip(one, two, strict=True))
    assert not torch.equal(one.train.pixels, other.train.pixels)
    assert not torch.equal(one.val.pixels, one.test.pixels)
    assert torch.equal(one.test.pixels, glyphs(3, 2, 5, drawings=4, seed=1).test.pixels)


def test_neither_threads_nor_default_dtype_change_a_pixel():
    before = glyphs(50, 1, 1).train.pixels
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(4)
    try:
        assert torch.equal(before, glyphs(50, 1, 1).train.pixels)
    finally:
        torch.set_num_threads(1)


def test_shapes_and_contrast():
    images = load("glyphs", train=100, val=5, test=5, drawings=10).train
    assert images.pixels.shape == (1000, 1, 28, 28) and len(images) == 100
    assert images.pixels.flatten(1).amax(1).min() > 200  # no empty drawing
    ink = (images.pixels > 127).double().mean((1, 2, 3))
    assert 0.03 < ink.mean() < 0.3
    drawings = images.pixels.view(100, 10, -1)
    assert (drawings[:, :1] != drawings[:, 1:]).any(-1).all()  # no drawing twice


def test_nearest_neighbour_on_pixels_is_far_from_solving_it(episode):
    (x, y), (query, labels) = episode
    nearest = torch.cdist(query.flatten(2), x.flatten(2)).argmin(-1)
    accuracy = (y.gather(1, nearest) == labels).double().mean()
    assert 0.3 < accuracy < 0.7


def test_a_linear_probe_is_far_from_solving_it(episode):
    (x, y), (query, labels) = episode
    x, query = x.flatten(2).double(), query.flatten(2).double()
    for ridge in (0.1, 10.0, 1000.0):
        weights = torch.linalg.solve(x @ x.mT + ridge * torch.eye(5), one_hot(y, 5).double())
        accuracy = ((query @ x.mT @ weights).argmax(-1) == labels).double().mean()
        assert accuracy < 0.7


def test_empty_splits_are_refused():
    with pytest.raises(InnerLoopError, match="at least 1"):
        glyphs(train=0)


@pytest.mark.parametrize("settings", [{"train": 2.5}, {"drawings": "9"}, {"seed": 2**63}])
def test_numbers_that_are_not_whole_or_too_large_are_refused(settings):
    [(name, value)] = settings.items()
    with pytest.raises(InnerLoopError, match=f"{name}={value!r}.*whole number"):
        load("glyphs", **settings)


def test_settings_of_another_dataset_are_refused():
    with pytest.raises(TypeError, match=r"glyphs.*'rotations'"):
        load("glyphs", rotations=False)


def test_unknown_datasets_are_refused():
    with pytest.raises(InnerLoopError, match=r"'mnist'.*glyphs, omniglot"):
        load("mnist")
    with pytest.raises(InnerLoopError, match="one of glyphs"):
        load(["glyphs"])
