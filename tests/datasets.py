"""Small datasets on disk, laid out as the official ones."""

import io
import os
import pickle
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

REAL = Path(
    os.environ.get("INNERLOOP_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data"
)
"""The real datasets, if they are here."""


def needs_real(path: str) -> pytest.MarkDecorator:
    missing = not (REAL / path).exists()
    return pytest.mark.skipif(
        missing, reason=f"needs {path} in the folder INNERLOOP_DATA, or in ../shared/data"
    )


def image_file(value: int, size: int = 105, mode: str = "L", kind: str = "PNG") -> bytes:
    """A grey square whose middle has another value, as a file."""
    pixels = np.full((size, size), 255, dtype=np.uint8)
    pixels[size // 4 : -size // 4, size // 4 : size // 4 + 9] = value
    out = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(out, kind)
    return out.getvalue()


def omniglot_files(part: str, characters: int) -> dict[str, bytes]:
    return {
        f"{part}/{part[7:]}_{c % 2}/character{c:02d}/{c:04d}_{d:02d}.png": image_file(0, mode="1")
        for c in range(characters)
        for d in range(1, 21)
    }


def mini_imagenet_files(images: int = 2, prefix: str = "") -> dict[str, bytes]:
    files = {}
    for number, part in enumerate(("train", "val", "test")):
        lines = ["filename,label"]
        for c in range(2):
            label = f"n{number}{c}"
            for p in range(images):
                files[f"{prefix}images/{label}_{p}.jpg"] = image_file(9 * p, 84, "RGB", "JPEG")
                lines.append(f"{label}_{p}.jpg,{label}")
        files[f"{prefix}{part}.csv"] = "\n".join(lines).encode()
    return files


def folder_files(images: int = 2, size: int = 32) -> dict[str, bytes]:
    return {
        f"{part}/{part}_class{c}/{p}.png": image_file(10 * p, size, "RGB")
        for part in ("train", "val", "test")
        for c in range(3)
        for p in range(images)
    }


def cifar_files(images: int = 4) -> dict[str, bytes]:
    files = {}
    for name in [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]:
        data = np.random.default_rng(0).integers(0, 256, (images, 3072), dtype=np.uint8)
        batch = {b"data": data, b"labels": [p % 10 for p in range(images)]}
        files[f"cifar-10-batches-py/{name}"] = pickle.dumps(batch, protocol=2)
    meta = {b"label_names": [f"class{n}".encode() for n in range(10)]}
    files["cifar-10-batches-py/batches.meta"] = pickle.dumps(meta, protocol=2)
    return files


def write(path: Path, files: dict[str, bytes]) -> Path:
    """Writes a zip, a tar or a folder, by the ending of its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".zip":
        return write_zip(path, files)
    if path.suffix in (".tar", ".gz", ".tgz"):
        return write_tar(path, files)
    return write_folder(path, files)


def write_zip(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def write_tar(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w" if path.suffix == ".tar" else "w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def write_folder(path: Path, files: dict[str, bytes]) -> Path:
    """Writes files; a name that ends in a slash is an empty folder."""
    for name, content in files.items():
        target = path / name
        if name.endswith("/"):
            target.mkdir(parents=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
    return path
