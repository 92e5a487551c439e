"""Downloads, against a local server: whole, interrupted, wrong, refused."""

import hashlib
import http.server
import importlib
import threading

import pytest

import datasets
from innerloop.data import fetch, omniglot
from innerloop.errors import InnerLoopError

download = importlib.import_module("innerloop.data.fetch")
CONTENT = bytes(range(256)) * 2000


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves ``server.files``; ``server.cuts`` ends the next replies after so many bytes."""

    def do_GET(self):
        server = self.server
        asked = self.headers.get("Range")
        server.asked.append(asked)
        content = server.files.get(self.path)
        if content is None or server.errors:
            return self.send_error(server.errors.pop(0) if server.errors else 404)
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0
        if not server.ranges:
            start, asked = 0, None
        if asked and start >= len(content):
            return self.send_error(416)
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        body = content[start + server.shift :] if asked else content
        if server.lengths:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: server.cuts.pop(0)] if server.cuts else body)
        return None

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(download, "PAUSE", 0.0)
    monkeypatch.setattr(download, "TIMEOUT", 5)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.files, server.asked, server.cuts, server.errors = {"/data": CONTENT}, [], [], []
    server.ranges, server.lengths, server.shift = True, True, 0
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def get(server, tmp_path):
    def get(content=CONTENT, progress=None):
        url = f"http://127.0.0.1:{server.server_port}/data"
        file = download.File(url, "set/data.bin", hashlib.md5(content).hexdigest())
        return download.fetch_files([file], tmp_path, progress)[0]

    return get


def part(tmp_path):
    return tmp_path / "set" / "data.bin.part"


def test_a_download(get, server, tmp_path):
    seen = []
    path = get(progress=lambda *args: seen.append(args))
    assert path.read_bytes() == CONTENT and not part(tmp_path).exists()
    assert seen[0] == ("set/data.bin", 0, len(CONTENT))
    assert seen[-1] == ("set/data.bin", len(CONTENT), len(CONTENT))
    get()
    assert server.asked == [None]  # the second call found the file


def test_an_interrupted_download_goes_on_at_once(get, server):
    server.cuts = [1000, 200_000]
    assert get().read_bytes() == CONTENT
    assert server.asked == [None, "bytes=1000-", "bytes=201000-"]


def test_an_interrupted_download_goes_on_at_the_next_call(get, server, tmp_path):
    server.cuts = [100_000, 10, 10]
    with pytest.raises(InnerLoopError, match=r"100020 bytes have arrived.*again"):
        get()
    assert part(tmp_path).read_bytes() == CONTENT[:100_020]
    assert not (tmp_path / "set" / "data.bin").exists()
    assert get().read_bytes() == CONTENT
    assert server.asked[-1] == "bytes=100020-"


def test_ctrl_c_keeps_what_has_arrived(get, server, tmp_path):
    def stop(name, done, total):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        get(progress=stop)
    assert 0 < part(tmp_path).stat().st_size < len(CONTENT)
    assert get().read_bytes() == CONTENT


def test_a_server_without_ranges_starts_again(get, server):
    server.ranges, server.cuts = False, [1000]
    assert get().read_bytes() == CONTENT


def test_a_server_that_sends_another_range_is_noticed_by_the_checksum(get, server, tmp_path):
    server.shift, server.cuts = 5, [1000]
    with pytest.raises(InnerLoopError, match=r"MD5 checksum.*deleted"):
        get()
    assert get().read_bytes() == CONTENT


def test_a_server_that_does_not_say_the_length(get, server):
    server.lengths = False
    assert get().read_bytes() == CONTENT


def test_a_complete_part_needs_nothing_more(get, server, tmp_path):
    part(tmp_path).parent.mkdir()
    part(tmp_path).write_bytes(CONTENT)
    assert get().read_bytes() == CONTENT


def test_a_part_that_is_too_long_starts_again(get, server, tmp_path):
    part(tmp_path).parent.mkdir()
    part(tmp_path).write_bytes(CONTENT + b"more")
    assert get().read_bytes() == CONTENT


def test_a_wrong_checksum(get, tmp_path):
    with pytest.raises(InnerLoopError, match=r"MD5 checksum.*deleted"):
        get(content=b"something else")
    assert list((tmp_path / "set").iterdir()) == []


def test_another_file_in_its_place_is_left_alone(get, server, tmp_path):
    path = tmp_path / "set" / "data.bin"
    path.parent.mkdir()
    path.write_bytes(b"mine")
    with pytest.raises(InnerLoopError, match="not overwritten"):
        get()
    assert path.read_bytes() == b"mine" and server.asked == []


def test_errors_of_the_server(get, server):
    server.errors = [503]
    assert get().read_bytes() == CONTENT


def test_no_such_file(get, server):
    server.files = {}
    with pytest.raises(InnerLoopError, match="404"):
        get()
    assert len(server.asked) == 1


def test_no_server(server, tmp_path):
    file = download.File("http://127.0.0.1:1/x", "x", "0")
    with pytest.raises(InnerLoopError, match=r"127\.0\.0\.1:1/x could not be downloaded"):
        download.fetch_files([file], tmp_path)


def test_omniglot_from_a_server(server, tmp_path, monkeypatch):
    monkeypatch.setenv("INNERLOOP_CACHE", str(tmp_path / "cache"))
    files = []
    for name in ("images_background", "images_evaluation"):
        packed = datasets.write_zip(tmp_path / name, datasets.omniglot_files(name, 2))
        server.files[f"/{name}.zip"] = content = packed.read_bytes()
        url = f"http://127.0.0.1:{server.server_port}/{name}.zip"
        official = [f for f in download.SOURCES["omniglot"] if name in f.url]
        assert official[0].url.endswith(f"brendenlake/omniglot/master/python/{name}.zip")
        files.append(download.File(url, official[0].path, hashlib.md5(content).hexdigest()))
    monkeypatch.setitem(download.SOURCES, "omniglot", tuple(files))
    paths = fetch("omniglot", tmp_path / "root")
    assert [path.name for path in paths] == ["images_background.zip", "images_evaluation.zip"]
    assert len(omniglot(tmp_path / "root", splits=(2, 1, 1)).val) == 1


def test_what_cannot_be_downloaded(tmp_path):
    with pytest.raises(InnerLoopError, match=r"mini-imagenet.*omniglot, cifar10.*ImageNet's terms"):
        fetch("mini-imagenet", tmp_path)


def test_a_root_that_is_a_file(server, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InnerLoopError, match="could not be downloaded"):
        fetch("omniglot", tmp_path / "file")
