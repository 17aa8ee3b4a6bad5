"""One entry for all kinds of checkpoint."""

import dataclasses
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from specjax import checkpoints
from specjax.checkpoints import huggingface, int8, native, t5x
from specjax.models.t5 import T5
from tests.checkpoints.conftest import MODELS, T5X, error_of

TINY = MODELS["t5x_tiny"]
KINDS = ("t5x", "huggingface", "native", "int8")


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """The same model in every format."""
    folder = tmp_path_factory.mktemp("open")
    params = t5x.load(T5X / "t5x_tiny", TINY)
    huggingface.save(params, TINY, folder / "huggingface", 50_000)
    native.save(folder / "native", TINY, params)
    int8.save(folder / "a.int8.safetensors", TINY, params)
    found = {kind: folder / kind for kind in KINDS}
    return found | {"t5x": T5X / "t5x_tiny", "int8": folder / "a.int8.safetensors"}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_recognised(paths, kind):
    assert checkpoints.infer_config(str(paths[kind])) == TINY.config
    model, params = checkpoints.load_any(paths[kind])
    assert model == TINY
    exact = t5x.load(T5X / "t5x_tiny", TINY) if kind != "int8" else int8.load(paths[kind], TINY)
    jax.tree.map(np.testing.assert_array_equal, params, exact)
    assert {x.dtype for x in jax.tree.leaves(params)} == {np.dtype("float32")}


@pytest.mark.parametrize("kind", KINDS)
def test_type_shardings_and_model_are_passed_on(paths, kind):
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    over = NamedSharding(mesh, P("data"))
    wide = T5(dataclasses.replace(TINY.config, dtype="bfloat16"))
    model, params = checkpoints.load_any(paths[kind], wide, jnp.bfloat16, over)
    assert model == wide
    assert {(x.dtype, x.sharding) for x in jax.tree.leaves(params)} == {
        (np.dtype(jnp.bfloat16), over)
    }
    whole = checkpoints.load_any(paths[kind], dtype="bfloat16")[1]
    jax.tree.map(np.testing.assert_array_equal, params, whole)
    other = T5(dataclasses.replace(TINY.config, vocab_size=65))
    assert "misshapen" in error_of(checkpoints.load_any, paths[kind], other)


def test_where_there_is_nothing_the_message_says_what_was_looked_for(tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        said = error_of(checkpoints.load_any, path)
        assert said.startswith(f"no checkpoint at {path}; looked for a T5X folder")
        for name in ("checkpoint_N/", "config.json", "model.safetensors.index.json",
                     "specjax.json", "int8"):  # fmt: skip
            assert name in said
        assert error_of(checkpoints.infer_config, path) == said
    (tmp_path / "model.bin").write_bytes(b"x")
    assert "no checkpoint at" in error_of(checkpoints.infer_config, tmp_path / "model.bin")
    (tmp_path / "checkpoint_1.tmp-17").mkdir()
    assert "no T5X checkpoint" in error_of(checkpoints.infer_config, tmp_path)


def test_a_model_directory_of_t5x_with_a_configuration_beside_it(tiny):
    (tiny / "config.json").write_text("{}")
    assert checkpoints.infer_config(tiny) == TINY.config
    assert checkpoints.infer_config(tiny / "checkpoint_0" / "checkpoint") == TINY.config


def test_only_what_is_needed_is_imported(paths):
    program = (
        "import sys; from specjax import checkpoints;"
        f"checkpoints.infer_config({str(paths['int8'])!r});"
        "print([m for m in ('orbax.checkpoint', 'tensorstore') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
