"""T5X checkpoints on gs://: epath's calls are redirected, TensorStore asks a server of its own."""

import contextlib
import http.server
import os
import pathlib
import threading
import urllib.parse

import jax
import numpy as np
import pytest
from etils.epath import gpath, testing
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from specjax.checkpoints import structure, t5x
from tests.checkpoints.conftest import MODELS, T5X, error_of

TINY = MODELS["t5x_tiny"]


class Storage(http.server.BaseHTTPRequestHandler):
    """The one request of Google's JSON API that TensorStore makes: an object's bytes."""

    protocol_version = "HTTP/1.1"
    asked: list[str] = []

    def do_GET(self) -> None:
        bucket, _, name = urllib.parse.urlsplit(self.path).path.partition("/o/")
        file = T5X / urllib.parse.unquote(name)
        self.asked.append(name)
        found = bucket == "/storage/v1/b/bucket" and file.is_file()
        content = file.read_bytes() if found else b"{}"
        self.send_response(200 if found else 404)
        self.send_header("Content-Length", str(len(content)))
        if found:
            self.send_header("x-goog-generation", "1")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args) -> None:
        """Says nothing."""


@pytest.fixture(scope="module")
def storage():
    """Serves the fixtures as the bucket ``bucket``, to TensorStore's driver for gs://."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Storage)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with pytest.MonkeyPatch.context() as patch:
        # Read when the driver is first used in this process, which only this module does.
        patch.setenv("TENSORSTORE_GCS_HTTP_URL", f"http://127.0.0.1:{server.server_port}")
        patch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "token")
        yield
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def no_tensorflow(monkeypatch):
    """Where TensorFlow is installed, epath asks it and never the mock."""
    monkeypatch.setattr(gpath, "_is_tf_installed", lambda: False)


@contextlib.contextmanager
def bucket():
    """epath finds the fixtures under gs://bucket."""

    def local(path) -> pathlib.Path:
        text = os.fspath(path)
        assert text.startswith("gs://bucket/"), text
        return T5X / text.removeprefix("gs://bucket/")

    with testing.mock_epath(
        exists=lambda _, path: local(path).exists(),
        isdir=lambda _, path: local(path).is_dir(),
        listdir=lambda _, path: [child.name for child in local(path).iterdir()],
        open=lambda _, path, mode: local(path).open(mode),
    ):
        yield


@pytest.mark.parametrize("name", ["gs://bucket/t5x_tiny", "gs://bucket/t5x_tiny/checkpoint_0/"])
def test_the_directory_is_found_in_the_bucket(name):
    with bucket():
        assert os.fspath(t5x.find(name)) == "gs://bucket/t5x_tiny/checkpoint_0"
        assert t5x.find(t5x.find(name) / "checkpoint") == t5x.find(name)
        said = error_of(t5x.find, "gs://bucket/t5x_tiny/none")
    assert said.startswith("no T5X checkpoint") and said.endswith("gs://bucket/t5x_tiny/none")


@pytest.mark.parametrize("driver", ["file", "gcs", "gfile"])
def test_arrays_are_read_through_the_driver_for_gs(driver):
    spec = {"kvstore": {"driver": driver, "path": "target.x/"}}
    assert t5x.kvstore("gs://bucket/a/checkpoint_1", spec) == {
        "driver": "gcs",
        "bucket": "bucket",
        "path": "a/checkpoint_1/target.x/",
    }


@pytest.mark.usefixtures("storage")
def test_a_checkpoint_in_a_bucket_is_the_local_one():
    with bucket():
        assert t5x.infer_config("gs://bucket/t5x_tiny") == TINY.config
        remote = t5x.load("gs://bucket/t5x_tiny", TINY)
        raw = t5x.read("gs://bucket/t5x_tiny")
    jax.tree.map(np.testing.assert_array_equal, remote, t5x.load(T5X / "t5x_tiny", TINY))
    assert len(raw) == len(structure.flatten(remote))


@pytest.mark.usefixtures("storage")
def test_nothing_is_fetched_twice():
    """Eight devices and three scanned layers read parts of the same chunks."""
    model = MODELS["t5x_scanned"]
    mesh = jax.make_mesh((8,), ("model",))
    Storage.asked.clear()
    axes = {"vocab": "model", "mlp": "model", "joined_kv": "model"}
    shardings = jax.tree.map(
        lambda names: NamedSharding(mesh, P(*map(axes.get, names))),
        model.logical_axes(),
        is_leaf=lambda x: isinstance(x, tuple),
    )
    with bucket():
        params = t5x.load("gs://bucket/t5x_scanned", model, shardings=shardings)
    assert len(Storage.asked) == len(set(Storage.asked)) > 20
    jax.tree.map(np.testing.assert_array_equal, params, t5x.load(T5X / "t5x_scanned", model))


def test_what_a_remote_file_system_raises_is_one_line():
    def fail(*_):
        raise RuntimeError("no credentials\nfor this bucket")

    with testing.mock_epath(exists=fail, isdir=fail, listdir=fail, open=fail):
        said = error_of(t5x.load, "gs://bucket/t5x_tiny", TINY)
    assert said == "cannot read gs://bucket/t5x_tiny: RuntimeError: no credentials"
