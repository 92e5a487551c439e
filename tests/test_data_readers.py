"""Omniglot, mini-ImageNet, CIFAR-10 and folders: official layouts, real files, damaged files."""

import gzip
import io
import json
import os
import pickle
import random
import tarfile
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image

import datasets
from datasets import REAL, needs_real
from hostile import TIMES, TRIED
from innerloop.__main__ import main
from innerloop.data import Sampler, cifar10, folder, load, mini_imagenet, omniglot
from innerloop.data.archive import ENDINGS
from innerloop.errors import InnerLoopError

SPLITS = (3, 1, 2)

needs_links = pytest.mark.skipif(not hasattr(os, "symlink"), reason="no symbolic links here")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("INNERLOOP_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("INNERLOOP_DATA", raising=False)
    return tmp_path / "cache"


def write_omniglot(root, ending=".zip"):
    for part, characters in (("images_background", 4), ("images_evaluation", 2)):
        files = datasets.omniglot_files(part, characters)
        datasets.write(root / f"{part}{ending}" if ending else root, files)


@pytest.mark.parametrize("place", ["", "omniglot", "omniglot/python"])
@pytest.mark.parametrize("ending", [".zip", ""])
def test_omniglot_layouts(tmp_path, ending, place):
    write_omniglot(tmp_path / "data" / place, ending)
    splits = load("omniglot", tmp_path / "data", splits=SPLITS)
    assert [len(images) for images in splits] == [12, 1, 2]
    assert splits.train.pixels.shape == (240, 1, 28, 28)
    # Strokes are bright on dark: the corner is paper.
    assert splits.val.pixels[0, 0, 0, 0] == 0 and splits.val.pixels[0].max() > 200


def test_omniglot_split_follows_the_seed(tmp_path):
    write_omniglot(tmp_path)
    one, two = (omniglot(tmp_path, seed=1, splits=SPLITS, rotations=False) for _ in range(2))
    names = [name for images in one for name in images.names]
    assert len(set(names)) == 6 and names == [n for images in two for n in images.names]
    others = [omniglot(tmp_path, seed=s, splits=SPLITS).test.names for s in range(5)]
    assert len(set(others)) > 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"splits": (1150, 50, 423)}, r"6 characters.*needs 1623"),
        ({"splits": (3.0, 1, 2)}, "splits=3.0"),
        ({"splits": (3, 1)}, "three splits"),
        ({"seed": 2**64}, "seed="),
    ],
)
def test_omniglot_settings_without_a_meaning(tmp_path, settings, words):
    write_omniglot(tmp_path)
    with pytest.raises(InnerLoopError, match=words):
        omniglot(tmp_path, **{"splits": SPLITS, **settings})


def test_wrong_omniglot(tmp_path):
    write_omniglot(tmp_path, ending="")
    next((tmp_path / "images_background").rglob("*.png")).unlink()
    with pytest.raises(InnerLoopError, match=r"images_background.*has 19 drawings, not 20"):
        omniglot(tmp_path, splits=SPLITS)
    for part in ("images_background", "images_evaluation"):
        datasets.write(tmp_path / f"{part}.zip", datasets.omniglot_files("images_background", 4))
    with pytest.raises(InnerLoopError, match=r"in images_background.zip and again in images_eval"):
        omniglot(tmp_path, splits=SPLITS)


@pytest.mark.parametrize("prefix", ["", "mini-imagenet/"])
def test_mini_imagenet_layouts(tmp_path, prefix):
    path = tmp_path / "mini-imagenet.zip"
    datasets.write(path, datasets.mini_imagenet_files(3, prefix))
    for root in (tmp_path, path):
        splits = mini_imagenet(root)
        assert [images.pixels.shape for images in splits] == [(6, 3, 84, 84)] * 3
    assert splits.val.names == ("n10", "n11")
    datasets.write(tmp_path / "data" / "mini-imagenet", datasets.mini_imagenet_files())
    for root in (tmp_path / "data", tmp_path / "data" / "mini-imagenet"):
        assert len(load("mini-imagenet", root).train) == 2


def listed_again(part, label):
    """Adds a image of train.csv, n00_0.jpg, to a class of some csv file."""

    def change(files):
        files[f"{part}.csv"] += f"\nn00_0.jpg,{label}".encode()

    return change


MINI_MISTAKES = {
    "in two splits": (listed_again("test", "n20"), "n00_0.jpg is in class 'n00'.* 'n20' of test"),
    "in two classes": (listed_again("train", "n01"), "n00_0.jpg is in class 'n00'.* class 'n01'"),
    "twice in a class": (listed_again("train", "n00"), "n00_0.jpg is in class 'n00'.*again in"),
    "no csv": (lambda f: f.pop("val.csv"), "0 files named val.csv"),
    "no image": (lambda f: f.pop("images/n10_1.jpg"), "images/n10_1.jpg.*missing"),
    "no label": (lambda f: f.update({"test.csv": b"filename,label\na.jpg"}), "line 2 of test.csv"),
    "other columns": (lambda f: f.update({"test.csv": b"a,b\n1,2"}), "lacks a filename"),
    "empty csv": (lambda f: f.update({"test.csv": b""}), "test.csv lists no images"),
    "not text": (lambda f: f.update({"test.csv": b"\xff\xfe\x00"}), "test.csv: it cannot be read"),
    "same class": (lambda f: f.update({"val.csv": f["train.csv"]}), "'n00' is in train.csv and"),
    "not a image": (lambda f: f.update({"images/n00_0.jpg": b"hello"}), "n00_0.jpg: it cannot"),
    "half": (
        lambda f: f.update({"images/n00_0.jpg": f["images/n00_0.jpg"][:400]}),
        "n00_0.jpg: it cannot be read",
    ),
}


@pytest.mark.parametrize("mistake", MINI_MISTAKES)
def test_wrong_mini_imagenet(tmp_path, mistake):
    change, words = MINI_MISTAKES[mistake]
    files = datasets.mini_imagenet_files()
    change(files)
    path = datasets.write(tmp_path / "mini-imagenet.zip", files)
    with pytest.raises(InnerLoopError, match=words) as caught:
        mini_imagenet(tmp_path)
    assert str(path) in str(caught.value)


def test_folders(tmp_path):
    datasets.write(tmp_path / "cifar-fs", datasets.folder_files(size=32))
    (tmp_path / "cifar-fs" / "train" / ".DS_Store").write_bytes(b"junk")
    for splits in (load("cifar-fs", tmp_path), load("folder", tmp_path / "cifar-fs")):
        assert splits.train.pixels.shape == (6, 3, 32, 32)
        assert splits.test.names == ("test_class0", "test_class1", "test_class2")
    grey = folder(tmp_path / "cifar-fs", size=16, channels=1)
    assert grey.train.pixels.shape == (6, 1, 16, 16)


def test_wrong_folders(tmp_path):
    files = datasets.folder_files()
    datasets.write(tmp_path / "a", {n: c for n, c in files.items() if "val" not in n})
    with pytest.raises(InnerLoopError, match="no images in val/class"):
        folder(tmp_path / "a")
    datasets.write(tmp_path / "b", {**files, "test/x/1.png": datasets.image_file(3, 20)})
    with pytest.raises(InnerLoopError, match=r"test/x/1.png.*20 x 20.*size=32.*--size 32"):
        folder(tmp_path / "b")
    with pytest.raises(InnerLoopError, match="no such folder"):
        folder(tmp_path / "c")
    with pytest.raises(InnerLoopError, match="channels=4"):
        folder(tmp_path / "b", channels=4)


FOLDER_MISTAKES = {
    "class in two splits": ("test/train_class0/0.png", "'train_class0' is in train/ and again in"),
    "class of classes": ("train/animals/dog/0.png", "'train/animals/dog/0.png' is not at train/cl"),
    "no class": ("val/0.png", "'val/0.png' is not at val/class/image"),
    "second place": ("backup/train/x/0.png", r"in \./ and in \./backup/"),
    "other type": ("train/train_class0/0.bmp", "0.bmp' is neither PNG nor JPEG"),
    "no images": ("train/notes/0.txt", "no images in train/notes/"),
    "empty class": ("train/nothing/", "no images in train/nothing/"),
}


@pytest.mark.parametrize("ending", ["", ".zip"])
@pytest.mark.parametrize("mistake", FOLDER_MISTAKES)
def test_no_image_of_a_folder_is_dropped_or_moved(tmp_path, mistake, ending):
    name, words = FOLDER_MISTAKES[mistake]
    path = tmp_path / f"data{ending}"
    datasets.write(path, datasets.folder_files())
    folder(path)  # so that all else is in the cache
    datasets.write(path, {**datasets.folder_files(), name: datasets.image_file(5, 32)})
    with pytest.raises(InnerLoopError, match=words):
        folder(path)


def test_folders_around_and_beside_the_splits(tmp_path):
    files = {f"a/b/{name}": content for name, content in datasets.folder_files().items()}
    files |= {"a/b/logo.png": b"", "a/b/more/0.png": b"", "a/b/train/train_class0/notes.txt": b""}
    files["a/b/train/test/0.png"] = datasets.image_file(5, 32)  # a class that is called test
    splits = folder(datasets.write(tmp_path / "data.zip", files))
    assert [len(images) for images in splits] == [4, 3, 3] and splits.train.names[0] == "test"


@pytest.mark.parametrize("settings", [{"size": "8"}, {"size": 8.5}, {"size": 1025}, {"size": 0}])
def test_a_size_that_is_none_is_refused(tmp_path, settings):
    datasets.write(tmp_path, datasets.folder_files())
    with pytest.raises(InnerLoopError, match=f"size={settings['size']!r}.*from 1 to 1024"):
        folder(tmp_path, **settings)


@pytest.mark.parametrize("channels", [1, 3])
def test_grey_of_16_bits_is_scaled(tmp_path, channels):
    out = io.BytesIO()
    Image.fromarray(np.array([[0, 255], [32768, 65535]], dtype=np.uint16)).save(out, "PNG")
    files = datasets.folder_files(size=2) | {"train/train_class0/0.png": out.getvalue()}
    datasets.write(tmp_path, files)
    pixels = folder(tmp_path, channels=channels).train.pixels
    assert pixels[0].tolist() == [[[0, 0], [128, 255]]] * channels


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_is_white(tmp_path, mode):
    image = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    image.paste((0, 0, 0, 255), (1, 1, 3, 3))
    out = io.BytesIO()
    image.convert(mode).save(out, "PNG", **({"transparency": 0} if mode == "P" else {}))
    with Image.open(out) as written:
        assert written.has_transparency_data
    files = datasets.folder_files(size=4) | {"train/train_class0/0.png": out.getvalue()}
    datasets.write(tmp_path, files)
    found = folder(tmp_path, channels=1).train.pixels[0, 0]
    if mode == "P":  # a palette has one transparent colour
        assert found.max() == 255
    else:
        assert found.sum() == 12 * 255 and found[1:3, 1:3].sum() == 0


@needs_links
def test_a_link_in_a_circle_is_refused(tmp_path):
    datasets.write(tmp_path, datasets.folder_files())
    (tmp_path / "train" / "again").symlink_to(tmp_path, target_is_directory=True)
    with pytest.raises(InnerLoopError, match="Too many levels of symbolic links"):
        folder(tmp_path)


@needs_links
def test_classes_may_be_links(tmp_path):
    """All of them, to a folder beside the splits; and one to another class, which stays."""
    for name, content in datasets.folder_files().items():
        part, label, file = name.split("/")
        datasets.write(tmp_path / "all", {f"{label}/{file}": content})
        (tmp_path / part).mkdir(exist_ok=True)
        if not (tmp_path / part / label).exists():
            (tmp_path / part / label).symlink_to(f"../all/{label}", target_is_directory=True)
    (tmp_path / "train" / "a").symlink_to("../train/train_class0", target_is_directory=True)
    splits = folder(tmp_path)
    assert [len(images) for images in splits] == [4, 3, 3]
    assert splits.train.names == ("a", "train_class0", "train_class1", "train_class2")
    (tmp_path / "test" / "train_class0").symlink_to("../all/train_class0")
    with pytest.raises(InnerLoopError, match="'train_class0' is in train/ and again in test/"):
        folder(tmp_path)


@pytest.mark.parametrize("kind", ENDINGS)
def test_all_kinds_of_archives(tmp_path, kind):
    datasets.write(tmp_path / f"cifar-10-python{kind}", datasets.cifar_files(1))
    datasets.write(tmp_path / f"mini-imagenet{kind}", datasets.mini_imagenet_files())
    write_omniglot(tmp_path, kind)
    assert len(cifar10(tmp_path).train.labels) == 5
    assert len(mini_imagenet(tmp_path).train) == 2
    assert len(omniglot(tmp_path, splits=SPLITS).test) == 2
    # tar czf images.tar.gz -C images . writes names that begin with ./
    files = {f"./{name}": content for name, content in datasets.folder_files().items()}
    path = datasets.write(tmp_path / f"images{kind}", files)
    datasets.write(tmp_path / "unpacked", files)
    assert torch.equal(folder(path).train.pixels, folder(tmp_path / "unpacked").train.pixels)


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["tar", "tar.gz"])
def test_a_tar_that_is_cut_off_or_damaged_is_refused(tmp_path, pack):
    """Where one file ends, too: Python's reader takes that, or a broken header, for the end."""
    path = datasets.write(tmp_path / "plain.tar", datasets.folder_files())
    content = path.read_bytes()
    with tarfile.open(path) as archive:
        ends = [*[member.offset for member in archive][1:], archive.offset]
    damaged = content[: ends[3]] + bytes([1]) * 512 + content[ends[3] + 512 :]
    path = tmp_path / ("images.tar" if pack is bytes else "images.tar.gz")
    for tar in (damaged, *(content[:end] for end in [*ends, ends[3] + 100])):
        path.write_bytes(pack(tar))
        with pytest.raises(InnerLoopError, match=r"images.tar.*(cut off|unexpected end)"):
            folder(path)
    if pack is not bytes:
        packed = pack(content)
        path.write_bytes(packed[:-8] + bytes(4) + packed[-4:])  # another checksum
        with pytest.raises(InnerLoopError, match=r"images.tar.gz.*CRC"):
            folder(path)
    path.write_bytes(pack(content))
    assert len(folder(path).train) == 3


def test_cifar10_archive_and_folder(tmp_path):
    files = datasets.cifar_files(images=4)
    dotted = {f"./{name}": content for name, content in files.items()}
    datasets.write(tmp_path / "dotted/cifar-10-python.tar.gz", dotted)
    assert cifar10(tmp_path / "dotted").train.images.shape == (20, 3, 32, 32)
    datasets.write(tmp_path / "one/cifar10/cifar-10-python.tar.gz", files)
    datasets.write(tmp_path / "two", files)
    one, two, inside = (cifar10(tmp_path / p) for p in ("one", "two", "two/cifar-10-batches-py"))
    assert one.train.images.shape == (20, 3, 32, 32) and one.test.labels.tolist() == [0, 1, 2, 3]
    assert torch.equal(one.train.images, two.train.images) and one.names == inside.names
    expected = np.random.default_rng(0).integers(0, 256, (4, 3072), dtype=np.uint8)
    assert torch.equal(one.test.images, torch.from_numpy(expected).view(4, 3, 32, 32))


def test_cifar10_as_python_2_wrote_it(tmp_path):
    """The official files: strings of Python 2, and the array's module under its old name."""
    data = bytes(range(256)) * 12
    pickled = (
        b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray"
        b"\nq\x04K\x00\x85q\x05U\x01bq\x06\x87q\x07Rq\x08(K\x01K\x01M\x00\x0c\x86q\x09cnumpy\n"
        b"dtype\nq\x0aU\x02u1q\x0bK\x00K\x01\x87q\x0cRq\x0d(K\x03U\x01|q\x0eNNNJ\xff\xff\xff\xff"
        b"J\xff\xff\xff\xffK\x00tq\x0fb\x89T\x00\x0c\x00\x00" + data + b"q\x10tq\x11b"
        b"U\x06labelsq\x12]q\x13K\x07au."
    )
    files = datasets.cifar_files()
    files["cifar-10-batches-py/test_batch"] = pickled
    datasets.write(tmp_path, files)
    images, labels = cifar10(tmp_path).test
    assert images.flatten().tolist() == list(data) and labels.tolist() == [7]


class Evil:
    def __reduce__(self):
        return os.system, ("echo evil > evil",)


def altered(**changes):
    batch = {b"data": np.zeros((2, 3072), dtype=np.uint8), b"labels": [0, 1]}
    return pickle.dumps({**batch, **{k.encode(): v for k, v in changes.items()}}, protocol=2)


CIFAR_MISTAKES = {
    "code": (pickle.dumps({b"data": Evil()}, protocol=2), r"posix.system|nt.system"),
    "code by protocol 4": (pickle.dumps({b"data": Evil()}, protocol=4), r"posix.system|nt.system"),
    "eval": (b"\x80\x02c__builtin__\neval\nX\x03\x00\x00\x001+1\x85R.", "__builtin__.eval"),
    "other names": (pickle.dumps({b"data": io.BytesIO}, protocol=2), "_io.BytesIO"),
    "memo bomb": (b"\x80\x02}r\xff\xff\xff\x7f.", "cannot be read"),
    "objects": (altered(data=np.array([None])), "not of type uint8"),
    "floats": (altered(data=np.zeros((2, 3072))), "not of type uint8"),
    "column by column": (altered(data=np.zeros((2, 3072), np.uint8, order="F")), "row by row"),
    "other shape": (altered(data=np.zeros((2, 9), np.uint8)), r"data \[2, 9\] for 2 labels"),
    "too few labels": (altered(labels=[1]), "for 1 labels"),
    "labels past the end": (altered(labels=[1, 10]), "from 0 to 9"),
    "no labels": (pickle.dumps({b"data": np.zeros((1, 3072), np.uint8)}, 2), "labels"),
    "a list": (pickle.dumps([1], protocol=2), "a list, not a dictionary"),
    "changing a stand-in": (b"\x80\x02cnumpy\nndarray\n}X\x01\x00\x00\x00aK\x01sb.", "cannot be"),
    "empty": (b"", "cannot be read"),
    "half": (altered()[:3000], "cannot be read"),
}


@pytest.mark.parametrize("mistake", CIFAR_MISTAKES)
def test_wrong_cifar10(tmp_path, mistake, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content, words = CIFAR_MISTAKES[mistake]
    files = {**datasets.cifar_files(), "cifar-10-batches-py/data_batch_3": content}
    datasets.write(tmp_path / "cifar-10-python.tar.gz", files)
    with pytest.raises(InnerLoopError, match=words) as caught:
        cifar10(tmp_path)
    assert "data_batch_3" in str(caught.value)
    assert not (tmp_path / "evil").exists()


def test_cifar10_with_a_missing_file(tmp_path):
    files = datasets.cifar_files()
    del files["cifar-10-batches-py/data_batch_5"]
    datasets.write(tmp_path / "cifar-10-python.tar.gz", files)
    with pytest.raises(InnerLoopError, match="lacks data_batch_5"):
        cifar10(tmp_path)


@pytest.mark.parametrize(
    "name", ["a/../../outside", "a\\..\\..\\outside", "/absolute", "C:\\absolute", "\\absolute"]
)
def test_names_that_lead_out_of_an_archive_are_refused(tmp_path, name):
    datasets.write(tmp_path / "mini-imagenet.zip", {**datasets.mini_imagenet_files(), name: b"x"})
    datasets.write(tmp_path / "cifar-10-python.tar.gz", {**datasets.cifar_files(), name: b"x"})
    for read in (mini_imagenet, cifar10):
        with pytest.raises(InnerLoopError, match="leads out of the archive"):
            read(tmp_path)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_links_in_a_tar_are_refused(tmp_path, kind):
    info = tarfile.TarInfo("cifar-10-batches-py/link")
    info.type, info.linkname = kind, "/etc/passwd"
    with tarfile.open(tmp_path / "cifar-10-python.tar.gz", "w:gz") as archive:
        archive.addfile(info)
    with pytest.raises(InnerLoopError, match="link or a device"):
        cifar10(tmp_path)


def test_links_and_giants_in_a_zip_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "mini-imagenet.zip"
    link = zipfile.ZipInfo("images/link.jpg")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(InnerLoopError, match="link or a device"):
        mini_imagenet(tmp_path)
    monkeypatch.setattr("innerloop.data.archive.LARGEST", 1000)
    datasets.write(path, {"images/zeros.jpg": bytes(1001)})
    with pytest.raises(InnerLoopError, match="more than"):
        mini_imagenet(tmp_path)


def test_a_image_that_claims_to_be_huge_is_refused(tmp_path):
    import struct
    import zlib

    header = b"IHDR" + struct.pack(">IIBBBBB", 30_000, 30_000, 8, 0, 0, 0, 0)
    bomb = datasets.image_file(0)
    bomb = bomb[:12] + header + struct.pack(">I", zlib.crc32(header)) + bomb[33:]
    files = {**datasets.folder_files(), "train/train_class0/0.png": bomb}
    datasets.write(tmp_path, files)
    with pytest.raises(InnerLoopError, match=r"0\.png.*bomb"):
        folder(tmp_path)


@pytest.mark.parametrize("read", [omniglot, mini_imagenet, cifar10])
def test_missing_data(tmp_path, read, monkeypatch):
    with pytest.raises(InnerLoopError, match="INNERLOOP_DATA"):
        read()
    with pytest.raises(InnerLoopError, match="has none of"):
        read(tmp_path)
    monkeypatch.setenv("INNERLOOP_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(InnerLoopError, match="nowhere"):
        read()


# Mutated files: a clear error, or (where the change hit nothing that matters) the data.


def mutable_archive(read, name, files):
    def write(root):
        path = datasets.write(root / name, files)
        return path, lambda: read(path)

    return write


def mutable_file(read, files, name):
    def write(root):
        datasets.write(root, files)
        return root / name, lambda: read(root)

    return write


MUTABLE = {
    "zip": mutable_archive(mini_imagenet, "images.zip", datasets.mini_imagenet_files()),
    "tar": mutable_archive(cifar10, "cifar.tar", datasets.cifar_files(1)),
    "pickle": mutable_file(cifar10, datasets.cifar_files(1), "cifar-10-batches-py/test_batch"),
    "png": mutable_file(folder, datasets.folder_files(), "train/train_class0/0.png"),
    "jpeg": mutable_file(mini_imagenet, datasets.mini_imagenet_files(), "images/n00_0.jpg"),
}


def mutate(content: bytes, chance: random.Random) -> bytes:
    """Change a few bytes, most of them near the ends: the middle is pixels."""
    for _ in range(chance.randint(1, 4)):
        end = len(content)
        low, high = chance.choice([(0, 200), (end - 60, end), (0, end)])
        at, value = chance.randint(max(low, 1), max(high, 1)), chance.randrange(256)
        kind = chance.choice(["set", "set", "cut", "drop", "repeat"])
        if kind == "set":
            content = content[: at - 1] + bytes([value]) + content[at:]
        elif kind == "cut":
            content = content[:at]
        elif kind == "drop":
            content = content[:at] + content[at + value :]
        else:
            content = content[: at + value] + content[at:]
    return content


@pytest.mark.parametrize("kind", MUTABLE)
def test_mutated_files(tmp_path, kind):
    path, read = MUTABLE[kind](tmp_path / "data")
    original, accepted = path.read_bytes(), 0
    for seed in range(150 * TIMES):
        TRIED["mutated files"] += 1
        path.write_bytes(mutate(original, random.Random(seed)))
        try:
            read()
            accepted += 1
        except InnerLoopError as error:
            assert str(path) in str(error)
    print(kind, accepted)
    assert 0 < accepted < 75 * TIMES


# The real files, where they are.


@needs_real("omniglot/images_background.zip")
@needs_real("omniglot/images_evaluation.zip")
def test_a_slice_of_real_omniglot(tmp_path):
    for part in ("images_background", "images_evaluation"):
        with zipfile.ZipFile(REAL / f"omniglot/{part}.zip") as archive:
            names = [name for name in archive.namelist() if name.endswith(".png")][:400]
            datasets.write(tmp_path / f"{part}.zip", {n: archive.read(n) for n in names})
    splits = omniglot(tmp_path, splits=(30, 4, 6))
    assert [len(images) for images in splits] == [120, 4, 6]
    assert 0.04 < splits.train.pixels.double().mean() / 255 < 0.16


@pytest.mark.slow
@needs_real("omniglot/images_background.zip")
@needs_real("omniglot/images_evaluation.zip")
def test_real_omniglot(tmp_path, monkeypatch):
    monkeypatch.setenv("INNERLOOP_DATA", str(REAL))
    splits = load("omniglot", seed=0)
    assert [len(images) for images in splits] == [4600, 50, 423]
    assert splits.train.pixels.shape == (4 * 1150 * 20, 1, 28, 28)
    assert splits.test.pixels.flatten(1).amax(1).min() > 100
    ink = splits.test.pixels.double().mean() / 255
    assert 0.05 < ink < 0.15
    again = load("omniglot", seed=0, rotations=False)
    assert torch.equal(again.test.pixels, splits.test.pixels)
    assert not {*again.train.names} & {*again.val.names, *again.test.names}
    (x, y), (query, labels) = Sampler(splits.test, 5, 1, 5, 100).sample()
    nearest = torch.cdist(query.flatten(2), x.flatten(2)).argmin(-1)
    assert 0.35 < (y.gather(1, nearest) == labels).double().mean() < 0.75


@needs_real("mini-imagenet/mini-imagenet.zip")
def test_a_slice_of_real_mini_imagenet(tmp_path):
    files = {}
    with zipfile.ZipFile(REAL / "mini-imagenet/mini-imagenet.zip") as archive:
        for part in ("train", "val", "test"):
            head, *rows = archive.read(f"{part}.csv").decode().splitlines()
            by_class = {}
            for row in rows:
                by_class.setdefault(row.split(",")[1], []).append(row)
            kept = [row for listed in by_class.values() for row in listed[:2]]
            files[f"{part}.csv"] = "\n".join([head, *kept]).encode()
            for row in kept:
                name = f"images/{row.split(',')[0]}"
                files[name] = archive.read(name)
    datasets.write(tmp_path / "mini-imagenet.zip", files)
    splits = load("mini-imagenet", tmp_path)
    assert [len(images) for images in splits] == [64, 16, 20]
    assert splits.train.pixels.shape == (128, 3, 84, 84)
    assert 80 < splits.train.pixels.double().mean() < 150
    flags = "--way 5 --query 1 --tasks 2 --model mlp --filters 4 --steps 1 --iterations 2 --epoch 1"
    out = ["--out", str(tmp_path / "run"), "--data", str(tmp_path), "--val-tasks", "2"]
    known = ["--dataset", "mini-imagenet", "--test-tasks", "2"]
    assert main(["maml", *known, *flags.split(), *out]) == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["pictures"] == {"train": 128, "val": 32, "test": 40}


@needs_real("cifar10/cifar-10-python.tar.gz")
def test_real_cifar10():
    train, test, names = cifar10(REAL)
    assert len(train.images) == len(train.labels) and len(train.images) == 5 * len(test.images)
    assert test.labels.bincount().tolist() == [len(test.labels) // 10] * 10
    assert names[0] == "airplane" and names[9] == "truck"
