"""Device meshes with T5X's axes: ``data`` for rows, ``model`` for parameters, ``replica`` for slices.

One mesh serves decoding and training. Which logical axis of an array lies on which of these is said in
`specjax.partitioning.rules`.
"""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

AXES = ("data", "model")
REPLICA = "replica"


def make(
    num_partitions: int = 1,
    submesh: Sequence[int] | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """A mesh over all devices (or the given ones), as T5X's partitioner makes it.

    Devices of several TPU slices get a third, outer axis ``replica``, so that only what is split by
    rows crosses the slow network between slices.

    Args:
      num_partitions: devices that a model is split over; the others hold copies for other rows.
      submesh: instead, the four numbers of T5X's ``model_parallel_submesh``: chips along x, y and z,
        and cores per chip (1 on TPU v4), which together hold one copy of the model.
      devices: what the mesh is made of; all of them by default.

    Returns:
      A mesh with axes ``data`` and ``model``, whose placement XLA decides (`AxisType.Auto`).

    Raises:
      ValueError: both ways are given, a number is below 1, or they do not divide the devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    if submesh is not None:
        if num_partitions != 1:
            raise ValueError("set num_partitions or the submesh, not both")
        if len(submesh) != 4 or min(submesh) < 1:
            raise ValueError(
                f"a submesh is four positive numbers (x, y, z, cores per chip), got {submesh}"
            )
        num_partitions = math.prod(submesh)
    if num_partitions < 1:
        raise ValueError(f"num_partitions must be at least 1, got {num_partitions}")
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    each = len(devices) // slices
    if each % num_partitions:
        of = f" of each of {slices} slices" if slices > 1 else ""
        raise ValueError(
            f"{num_partitions} model partitions do not divide the {each} devices{of}; "
            f"possible are {', '.join(str(n) for n in range(1, each + 1) if each % n == 0)}"
        )
    shape = (each // num_partitions, num_partitions)
    if slices > 1:
        grid = mesh_utils.create_hybrid_device_mesh((1, *shape), (slices, 1, 1), devices)
        return _mesh(grid, (REPLICA, *AXES))
    return _mesh(_grid(shape, submesh, devices), AXES)


def _grid(shape: tuple[int, int], submesh, devices: list) -> np.ndarray:
    """Devices ``[data, model]``; on a TPU the model's lie next to each other."""
    if devices[0].platform != "tpu":
        return np.array(devices).reshape(shape)
    if submesh is None:
        try:
            return mesh_utils.create_device_mesh(shape, devices)
        except NotImplementedError:  # 8 on a slice of 4 x 4 x 4: no whole axes make it
            return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return _by_submesh(tuple(submesh), devices)


def _by_submesh(submesh: tuple[int, ...], devices: list) -> np.ndarray:
    """The slice cut into boxes of ``submesh``, each of them one model."""
    where = np.array([(*d.coords, getattr(d, "core_on_chip", 0)) for d in devices])
    where = where - where.min(axis=0)
    size = where.max(axis=0) + 1
    if any(n % m for n, m in zip(size, submesh, strict=True)):
        raise ValueError(
            f"a submesh of {submesh} does not divide the slice's {tuple(size.tolist())} "
            "(x, y, z, cores per chip)"
        )
    box, inside = where // submesh, where % submesh
    boxes = np.ravel_multi_index(box.T, size // submesh)
    places = np.ravel_multi_index(inside.T, submesh)
    grid = np.empty((len(devices) // math.prod(submesh), math.prod(submesh)), object)
    for device, i, j in zip(devices, boxes, places, strict=True):
        grid[i, j] = device
    return grid


def _mesh(grid: np.ndarray, names: tuple[str, ...]) -> Mesh:
    return Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))
