"""The cache: used when right, made again when not, never in the way."""

import importlib

import pytest
import torch

import datasets
from innerloop.data import folder, omniglot


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setenv("INNERLOOP_CACHE", str(tmp_path / "cache"))
    datasets.write(tmp_path / "data", datasets.folder_files())
    return tmp_path / "data"


@pytest.fixture
def decoded(monkeypatch):
    """Counts how often images are decoded."""
    calls = []
    reader = importlib.import_module("innerloop.data.folder")
    original = reader._decode
    monkeypatch.setattr(reader, "_decode", lambda *args: calls.append(1) or original(*args))
    return calls


def kept(data):
    return sorted((data.parent / "cache").glob("*.pt"))


def test_the_second_time_nothing_is_decoded(data, decoded):
    one, two = folder(data), folder(data)
    assert len(decoded) == 1 and len(kept(data)) == 1
    assert torch.equal(one.train.pixels, two.train.pixels) and one.test.names == two.test.names


def test_other_settings_and_other_data_are_other_files(data, decoded):
    folder(data)
    assert folder(data, size=16).train.pixels.shape[-1] == 16
    (data / "train/train_class0/new.png").write_bytes(datasets.image_file(1, 32))
    assert len(folder(data).train.pixels) == 7
    assert len(decoded) == 3 and len(kept(data)) == 3


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1  # a pixel
    path.write_bytes(content)


DAMAGE = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:1000]),
    "a bit": flip_a_bit,
    "empty": lambda path: path.write_bytes(b""),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_made_again(data, decoded, damage):
    first = folder(data)
    [path] = kept(data)
    DAMAGE[damage](path)
    assert torch.equal(folder(data).train.pixels, first.train.pixels)
    assert len(decoded) == 2
    folder(data)
    assert len(decoded) == 2


def test_a_kept_file_cannot_run_code(data, tmp_path):
    folder(data)
    [path] = kept(data)
    torch.save({"evil": print}, path)
    assert len(folder(data).train) == 3


def test_without_a_place_to_write_it_warns_and_works(data, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("INNERLOOP_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.warns(UserWarning, match="INNERLOOP_CACHE"):
        assert len(folder(data).train) == 3


def test_a_failed_write_leaves_nothing(data, monkeypatch):
    def full(content, file):
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.warns(UserWarning, match="No space left"):
        folder(data)
    assert list((data.parent / "cache").iterdir()) == []


def test_the_data_folder_is_not_written_to(data):
    before = sorted(data.rglob("*"))
    folder(data)
    assert sorted(data.rglob("*")) == before


def test_a_changed_archive_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setenv("INNERLOOP_CACHE", str(tmp_path / "cache"))
    for characters in (2, 3):
        for part in ("images_background", "images_evaluation"):
            datasets.write(tmp_path / f"{part}.zip", datasets.omniglot_files(part, characters))
        found = omniglot(tmp_path, splits=(1, 1, 2 * characters - 2))
        assert len(found.test) == 2 * characters - 2
