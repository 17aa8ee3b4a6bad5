"""Our own checkpoints: Orbax's arrays (its v0 interface), and the model's configuration as JSON.

Parameters alone lie in ``params/`` beside ``specjax.json``, which is written last: a folder without it
is an unfinished save. A training run has a ``specjax.json`` too, beside its ``checkpoints/``, and is
loaded from the newest of them.
"""

import json
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jaxtyping import PyTree

from specjax.checkpoints import place, structure
from specjax.models import families
from specjax.models.families import Config, Network

FORMAT, RUN = "specjax.params", "specjax.run"
VERSION = 1
DESCRIPTION = "specjax.json"
PARAMS = "params"


def save(path: str | os.PathLike, model: Network, params: PyTree) -> None:
    """Writes parameters, in the types they have; all is on disk when this returns.

    With several processes each of them calls this.

    Args:
      path: the folder, which must hold no checkpoint yet.
      model: its configuration is stored beside the arrays.
      params: the parameters, sharded or not.

    Raises:
      ValueError: the parameters do not fit the model (all leaves are named), or the folder holds a
        checkpoint already.
    """
    folder = pathlib.Path(path).expanduser().resolve()
    structure.check(structure.shapes(params), structure.shapes(model.abstract()), "the tree")
    if (folder / DESCRIPTION).exists():
        raise ValueError(f"{folder} holds a checkpoint already")
    with ocp.StandardCheckpointer() as checkpointer:
        # What an unfinished save left is overwritten.
        checkpointer.save(folder / PARAMS, params, force=True)
        checkpointer.wait_until_finished()
    describe(folder, model, FORMAT)


def describe(folder: pathlib.Path, model: Network, kind: str) -> None:
    """Writes ``specjax.json``: what the folder is (`FORMAT` or `RUN`), and the model's configuration."""
    content = {"format": kind, "version": VERSION, **families.dump(model)}
    if jax.process_index() == 0:
        (folder / DESCRIPTION).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_config(path: str | os.PathLike) -> Config:
    """The stored configuration.

    Args:
      path: the folder.

    Raises:
      ValueError: no such file, or of another format or model.
    """
    return _read(path)[1]


def _read(path: str | os.PathLike) -> tuple[str, Config]:
    """What the folder is, and the configuration."""
    file = pathlib.Path(path).expanduser() / DESCRIPTION
    if not file.is_file():
        raise ValueError(f"no such file: {file}")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        found = content["format"], content["version"]
        if found not in ((FORMAT, VERSION), (RUN, VERSION)):
            raise ValueError(f"it is {found}, not {(FORMAT, VERSION)}")
        return found[0], families.parse(content["model"], content["config"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} describes no model that is known here: {error}") from None


def load(
    path: str | os.PathLike, model: Network, dtype=jnp.float32, shardings: PyTree | None = None
) -> PyTree:
    """Parameters for ``model``; Orbax puts each leaf straight on its shards.

    Args:
      path: a folder that `save` wrote, or a training run's.
      model: its configuration must fit the arrays.
      dtype: type of the parameters returned.
      shardings: see `place.targets`; without them all leaves lie on the first local device.

    Returns:
      The tree that ``model.abstract(dtype)`` describes.

    Raises:
      ValueError: no checkpoint, missing, unexpected or misshapen leaves (all are named), or damaged
        data.
    """
    if shardings is None:
        # Orbax would otherwise ask for the devices that the parameters were saved from.
        shardings = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    wanted = place.targets(model, dtype, shardings)
    kind, _ = _read(path)  # of another format: refused before Orbax looks at it
    if kind == RUN:
        return load_run(path, structure.unflatten(wanted))
    folder = pathlib.Path(path).expanduser().resolve() / PARAMS
    with ocp.StandardCheckpointer() as checkpointer:
        found = _shapes(checkpointer, folder)
        structure.check(found, {n: x.shape for n, x in wanted.items()}, str(folder))
        try:
            return checkpointer.restore(folder, structure.unflatten(wanted))
        except Exception as error:  # of damaged data Orbax raises nothing narrower
            reason = _first_line(error.__cause__ or error)
            raise ValueError(f"{folder} cannot be read: {reason}") from error


def load_run(path: str | os.PathLike, abstract: PyTree, step: int | None = None) -> PyTree:
    """Parameters of a training run's newest (or given) checkpoint.

    Args:
      path: the run's folder.
      abstract: shapes and types the caller expects; anything else is an error.
      step: a saved step, the newest by default.

    Raises:
      ValueError: no such checkpoint, or it has other parameters (all are named).
    """
    folder = pathlib.Path(path).expanduser().resolve() / "checkpoints"
    if not folder.is_dir():
        raise ValueError(f"no checkpoints in {folder}")
    with ocp.CheckpointManager(folder) as manager:
        step = manager.latest_step() if step is None else step
        if step not in manager.all_steps():
            raise ValueError(f"no checkpoint of step {step} in {folder}: {manager.all_steps()}")
        with ocp.StandardCheckpointer() as checkpointer:
            found = _metadata(checkpointer, folder / str(step) / "state")["params"]
        wanted = structure.shapes(abstract)
        structure.check(structure.shapes(found), wanted, f"step {step} of {folder}")
        args = ocp.args.PyTreeRestore(
            {"params": abstract},
            partial_restore=True,
            restore_args=ocp.checkpoint_utils.construct_restore_args({"params": abstract}),
        )
        return manager.restore(step, args=ocp.args.Composite(state=args))["state"]["params"]


def _shapes(checkpointer: ocp.StandardCheckpointer, folder: pathlib.Path) -> dict[str, Any]:
    """Name to shape, from Orbax's metadata."""
    return structure.shapes(_metadata(checkpointer, folder))


def _metadata(checkpointer: ocp.StandardCheckpointer, folder: pathlib.Path) -> PyTree:
    """The tree that was saved, without its arrays."""
    try:
        found = checkpointer.metadata(folder).item_metadata
    except (ValueError, OSError, KeyError) as error:
        raise ValueError(f"{folder} is no Orbax checkpoint: {_first_line(error)}") from error
    if found is None:  # Orbax itself only warns
        raise ValueError(f"{folder} is no Orbax checkpoint, or its metadata are lost")
    return found.tree


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
