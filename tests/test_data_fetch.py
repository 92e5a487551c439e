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
        server.asked += 1
        content = server.files.get(self.path)
        if content is None:
            return self.send_error(404)
        self.send_response(200)
        if server.lengths:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: server.cuts.pop(0)] if server.cuts else content)
        return None

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(download, "TIMEOUT", 5)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.files, server.asked, server.cuts, server.lengths = {"/data": CONTENT}, 0, [], True
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


def test_a_download(get, server, tmp_path):
    seen = []
    path = get(progress=lambda *args: seen.append(args))
    assert path.read_bytes() == CONTENT and list(path.parent.iterdir()) == [path]
    assert seen[0] == ("set/data.bin", 0, len(CONTENT))
    assert seen[-1] == ("set/data.bin", len(CONTENT), len(CONTENT))
    get()
    assert server.asked == 1  # the second call found the file


def test_an_interrupted_download_leaves_nothing_and_starts_again(get, server, tmp_path):
    server.cuts = [100_000]
    with pytest.raises(InnerLoopError, match=r"ended after 100000 of 512000 bytes.*from the start"):
        get()
    assert list((tmp_path / "set").iterdir()) == []
    assert get().read_bytes() == CONTENT


def test_ctrl_c_leaves_nothing(get, tmp_path):
    def stop(name, done, total):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        get(progress=stop)
    assert list((tmp_path / "set").iterdir()) == []


def test_a_server_that_does_not_say_the_length(get, server):
    server.lengths = False
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
    assert path.read_bytes() == b"mine" and server.asked == 0


def test_no_such_file(get, server):
    server.files = {}
    with pytest.raises(InnerLoopError, match="404"):
        get()


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
