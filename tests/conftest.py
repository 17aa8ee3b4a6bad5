"""Shared test set-up: eight CPU devices, strict promotion, shapes checked at run time."""

import gc
import os
import pathlib
from collections.abc import Callable

# Everything down to the first import of jax must stand in the environment before it.
os.environ["JAX_PLATFORMS"] = "cpu"
flags = [*os.environ.get("XLA_FLAGS", "").split(), "--xla_force_host_platform_device_count=8"]
# Nearly all time of the tests is that of compiling programs which run for milliseconds. Without
# optimization of machine code that takes a fifth; XLA's passes over the program stay the same.
# XLA_FLAGS=--xla_backend_optimization_level=3 compiles as users do.
if not any("xla_backend_optimization_level" in flag for flag in flags):
    flags += ["--xla_backend_optimization_level=0", "--xla_cpu_use_fusion_emitters=false"]
os.environ["XLA_FLAGS"] = " ".join(flags)
# Ahead-of-time TPU compiles: libtpu must not ask a metadata server which TPU it is on,
# and the parallel test processes must not fail on each other's lock file.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v4-8")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax  # noqa: E402
import pytest  # noqa: E402
from beartype import beartype  # noqa: E402
from jaxtyping import install_import_hook  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_threefry_partitionable", True)


def check_types(function: Callable, *args, **kwargs) -> Callable:
    """Checks a function's annotations by beartype, but no dataclass's constructor.

    A pytree of arrays is rebuilt with shapes, booleans or `None` in place of its arrays
    by `jax.tree.map`, `eval_shape` and `vmap`, and its constructor must let them pass.

    Args:
        function: what the import hook decorates.
        *args: passed on to beartype.
        **kwargs: passed on to beartype.

    Returns:
        The function, checked at each call.
    """
    if function.__name__ == "__init__":
        return function
    return beartype(function, *args, **kwargs)


if os.environ.get("SPECJAX_TYPECHECK", "1") != "0":
    # Checks happen while tracing, so compiled code is as fast as without them.
    install_import_hook(["specjax.decode", "specjax.models"], f"{__name__}.check_types")


@pytest.fixture
def getkey():
    """A function that returns a fresh PRNG key at every call, the same ones in every run."""
    state = {"key": jax.random.key(0)}

    def fresh() -> jax.Array:
        state["key"], key = jax.random.split(state["key"])
        return key

    return fresh


@pytest.fixture
def long_vectors(monkeypatch):
    """As on a CPU with AVX-512, where weights are tiled."""
    monkeypatch.setattr("specjax.models.layers.long_vectors", lambda: True)


@pytest.fixture
def x64():
    """64-bit types during the test; ask for it by `@pytest.mark.usefixtures("x64")`."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(autouse=True, scope="module")
def few_compiled_programs():
    """Every compiled program holds maps of memory, of which Linux gives a process 65,530: the compiler
    aborts at the next. So programs are forgotten long before that."""
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 25_000:
        jax.clear_caches()
        gc.collect()
