"""Episodes: shapes, no leaks between support and query, reproducible, restartable."""

import io

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from innerloop.data import Images, Sampler, glyphs
from innerloop.errors import InnerLoopError


def numbered(counts: list[int]) -> Images:
    """Images of two pixels: the class, and the number within the class."""
    by_class = {
        str(c): [torch.tensor([[[c, p]]], dtype=torch.uint8) for p in range(count)]
        for c, count in enumerate(counts)
    }
    return Images.stack(by_class)


def equal(a, b):
    pairs = [(p, q) for x, y in zip(a, b, strict=True) for p, q in zip(x, y, strict=True)]
    return all(torch.equal(p, q) for p, q in pairs)


@given(
    st.lists(st.integers(3, 9), min_size=2, max_size=7),
    st.integers(1, 7),
    st.integers(1, 2),
    st.integers(1, 2),
    st.integers(1, 5),
    st.integers(0, 9),
)
def test_tasks_are_what_was_asked_for(counts, way, shot, query, tasks, seed):
    images = numbered(counts)
    way, query = min(way, len(counts)), min(query, min(counts) - shot)
    sampler = Sampler(images, way, shot, query, tasks, seed)
    episode = sampler.sample()
    assert episode.support.x.shape == (tasks, way * shot, 1, 1, 2)
    assert episode.query.x.shape == (tasks, way * query, 1, 1, 2)
    assert episode.support.x.dtype == torch.float32 and episode.support.y.dtype == torch.int64
    for task in range(tasks):
        seen, class_of = set(), {}
        for x, y in ((part.x[task], part.y[task]) for part in episode):
            for (c, p), label in zip(
                (255 * x).round().int().view(-1, 2).tolist(), y.tolist(), strict=True
            ):
                assert class_of.setdefault(label, c) == c and p < counts[c]
                seen.add((c, p))
        assert len(seen) == way * (shot + query)
        assert sorted(class_of) == list(range(way)) and len(set(class_of.values())) == way


def test_every_class_and_every_image_is_drawn_equally_often():
    images = numbered([4, 6, 4, 8])
    x = Sampler(images, way=2, shot=1, query=1, tasks=20_000).sample().support.x
    pairs = (255 * x).round().long().view(-1, 2)
    share = pairs[:, 0].bincount(minlength=4) / len(pairs)
    assert (share - 0.25).abs().max() < 0.01
    largest = pairs[pairs[:, 0] == 3][:, 1].bincount(minlength=8) / (pairs[:, 0] == 3).sum()
    assert (largest - 1 / 8).abs().max() < 0.01


def test_same_seed_same_tasks_whatever_else_draws():
    images = glyphs(train=30, val=1, test=1).train
    one, two = (Sampler(images, 5, 1, 15, 8, seed=7) for _ in range(2))
    first = [one.sample() for _ in range(3)]
    torch.rand(100)
    torch.set_num_threads(4)
    try:
        assert all(equal(a, two.sample()) for a in first)
    finally:
        torch.set_num_threads(1)
    assert not equal(first[0], Sampler(images, 5, 1, 15, 8, seed=8).sample())


def test_restart_from_a_saved_state():
    images = numbered([5] * 8)
    sampler = Sampler(images, 3, 1, 2, 4, seed=7)
    sampler.sample()
    file = io.BytesIO()
    torch.save(sampler.state_dict(), file)
    following = [sampler.sample() for _ in range(3)]
    file.seek(0)
    again = Sampler(images, 3, 1, 2, 4, seed=99)
    again.load_state_dict(torch.load(file, weights_only=True))
    assert all(equal(a, again.sample()) for a in following)


def test_a_state_of_another_sampler_is_refused():
    images = numbered([5] * 8)
    state = Sampler(images, 3, 1, 2, 4).state_dict()
    with pytest.raises(InnerLoopError, match=r"'way': 3.*'way': 4"):
        Sampler(images, 4, 1, 2, 4).load_state_dict(state)
    with pytest.raises(InnerLoopError, match="settings"):
        Sampler(images, 3, 1, 2, 4).load_state_dict({})


def test_a_state_of_other_images_is_refused():
    """As many, of the same shape: only their names or their pixels tell them apart."""
    images = numbered([5] * 8)
    state = Sampler(images, 3, 1, 2, 4).state_dict()
    renamed = Images(images.pixels, images.offsets, tuple("abcdefgh"))
    redrawn = Images(images.pixels.flip(-1), images.offsets, images.names)
    for other in (renamed, redrawn):
        with pytest.raises(InnerLoopError, match="the same split"):
            Sampler(other, 3, 1, 2, 4).load_state_dict(state)
    Sampler(numbered([5] * 8), 3, 1, 2, 4).load_state_dict(state)


def test_every_image_of_a_large_split_is_in_the_digest():
    images = Images.stack({"a": [torch.zeros(1, 300, 300, dtype=torch.uint8)] * 50})
    for image in (0, 17, 49):
        other = Images(images.pixels.clone(), images.offsets, images.names)
        other.pixels[image] = 1
        assert other.digest != images.digest


def test_an_episode_goes_to_a_dtype_or_a_device():
    episode = Sampler(numbered([3, 3]), 2, 1, 1, 2).sample()
    for part in episode.to(torch.float64):
        assert part.x.dtype == torch.float64 and part.y.dtype == torch.int64
    for part in episode.to("meta"):
        assert part.x.device.type == part.y.device.type == "meta"
    with pytest.raises(InnerLoopError, match="a device, or a dtype"):
        episode.to(torch.int64)


def test_tasks_of_an_episode_are_chosen_by_a_slice():
    episode = Sampler(numbered([3, 3]), 2, 1, 1, 3).sample()
    assert torch.equal(episode.tasks(slice(1, 3)).query.x, episode.query.x[1:])
    with pytest.raises(InnerLoopError, match=r"slice\(0, 1\)"):
        episode.tasks(0)


def test_changing_an_episode_does_not_change_the_next():
    sampler = Sampler(numbered([3, 3]), 2, 1, 1, 1)
    sampler.sample().support.y.fill_(9)
    assert sampler.sample().support.y.tolist() == [[0, 1]]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"way": 9}, "9-way.*at most the 8 classes"),
        ({"query": 5}, "at most 5 per class: class '0'"),
        ({"shot": 0}, "at least 1"),
        ({"tasks": 0}, "at least 1"),
        ({"way": 3.0}, "way=3.0.*whole number"),
        ({"way": "3"}, "way='3'.*whole number"),
        ({"shot": True}, "shot=True.*whole number"),
        ({"seed": 2**70}, "seed=.*whole number, from"),
        ({"seed": 0.5}, "seed=0.5.*whole number"),
    ],
)
def test_impossible_tasks_are_refused(settings, words):
    with pytest.raises(InnerLoopError, match=words):
        Sampler(numbered([5] * 8), **{"way": 3, "shot": 1, "query": 2, "tasks": 4, **settings})


def test_rotations_are_further_classes():
    images = Images.stack({"a": [torch.arange(4, dtype=torch.uint8).view(1, 2, 2)] * 3})
    turned = images.rotated()
    assert len(turned) == 4 and turned.counts.tolist() == [3] * 4
    assert turned.pixels[3].tolist() == [[[1, 3], [0, 2]]]
    assert turned.labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    with pytest.raises(InnerLoopError, match="square"):
        numbered([1]).rotated()


def test_selected_classes_keep_their_images():
    images = numbered([2, 3, 4]).select([2, 0])
    assert images.names == ("2", "0") and images.counts.tolist() == [4, 2]
    assert images.pixels[:, 0, 0, 0].tolist() == [2, 2, 2, 2, 0, 0]


def test_whole_numbers_of_other_libraries_are_taken():
    settings = [np.int64(3), torch.tensor(1), np.uint8(2), 4]
    sampler = Sampler(numbered([5] * 8), *settings, seed=np.int32(1))
    assert sampler.sample().support.x.shape == (4, 3, 1, 1, 2)
    assert numbered([2, 3, 4]).select(np.array([2, 0])).names == ("2", "0")


@pytest.mark.parametrize(
    "classes",
    [
        torch.tensor([False, False, True]),
        [True, False, True],
        np.array([False, True, True]),
        [1.9],
        torch.tensor([1.0]),
        [1, 1],
        [3],
        [-1],
        [],
        [[0]],
        0,
    ],
)
def test_classes_that_are_no_numbers_of_classes_are_refused(classes):
    with pytest.raises(InnerLoopError, match="from 0 to 2, at least one, and none twice"):
        numbered([2, 3, 4]).select(classes)


@pytest.mark.parametrize(
    "by_class",
    [
        {},
        {"a": []},
        {"a": [torch.zeros(1, 2, 2).byte()], "b": [torch.zeros(1, 3, 3).byte()]},
        {"a": [torch.zeros(1, 2, 2).byte()], "b": []},
        {"a": [torch.zeros(1, 2, 2)]},
        {"a": np.zeros((3, 1, 2, 2), dtype=np.uint8)},
    ],
    ids=["no classes", "no images", "two sizes", "an empty class", "floats", "an array"],
)
def test_images_that_cannot_be_stacked_are_refused(by_class):
    with pytest.raises(InnerLoopError, match=r"stack\("):
        Images.stack(by_class)


def test_parts_that_do_not_fit_are_refused():
    pixels = torch.zeros(4, 1, 2, 2, dtype=torch.uint8)
    for offsets, names in [([0, 3], ("a",)), ([0, 4], ()), ([0, 4, 4], ("a", "b"))]:
        with pytest.raises(InnerLoopError, match="offsets"):
            Images(pixels, torch.tensor(offsets), names)
    with pytest.raises(InnerLoopError, match="uint8"):
        Images(pixels.float(), torch.tensor([0, 4]), ("a",))
    with pytest.raises(InnerLoopError, match="offsets list"):
        Images(pixels, [0, 4], ("a",))
    with pytest.raises(InnerLoopError, match="pixels ndarray"):
        Images(pixels.numpy(), torch.tensor([0, 4]), ("a",))
