"""Which logical axis lies on which axis of the mesh: T5X's standard rules, and the user's.

References:
  T5X ``partitioning.standard_logical_axis_rules``; Xu et al. 2021, GSPMD (2105.04663), section 3.
"""

import dataclasses

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from specjax.decode import devices
from specjax.partitioning import mesh as meshes

# Logical axis to axis of the mesh; the first rule whose axis is still free wins.
Rule = tuple[str, str | None]

LOGICAL_AXES = frozenset(
    "batch length embed heads kv joined_kv grouped_kv mlp vocab mlp_activations stack layers relpos_buckets "
    "abspos_buckets unmodeled".split()
)


def standard(
    parameter_partitioning_dims: int = 1,
    additional_rules: tuple[Rule, ...] = (),
) -> tuple[Rule, ...]:
    """T5X's standard logical axis rules; activations are split by rows and heads only.

    Args:
      parameter_partitioning_dims: 2 also splits parameters over the axis of rows (``embed`` on
        ``data``), as large models are trained.
      additional_rules: appended, so they only say what the standard ones leave open.

    Raises:
      ValueError: a number other than 1 or 2, or an axis that is none.
    """
    if parameter_partitioning_dims not in (1, 2):
        raise ValueError("parameters are partitioned in 1 or 2 dimensions")
    rules: tuple[Rule, ...] = (
        ("batch", "data"),
        ("vocab", "model"),
        ("mlp", "model"),
        ("heads", "model"),
        ("joined_kv", "model"),
        ("grouped_kv", "model"),
    )
    if parameter_partitioning_dims == 2:
        rules += (("embed", "data"),)
    rules += tuple(
        (name, None)
        for name in "kv length layers stack mlp_activations relpos_buckets abspos_buckets".split()
    )
    additional_rules = tuple(tuple(rule) for rule in additional_rules)
    known = (*meshes.AXES, meshes.REPLICA, None)
    for rule in additional_rules:
        if len(rule) != 2 or rule[1] not in known:
            raise ValueError(f"a rule is (logical axis, one of {known}), got {rule}")
    return rules + additional_rules


def spec(
    axes: tuple[str, ...], shape: tuple[int, ...], rules: tuple[Rule, ...], mesh: Mesh
) -> PartitionSpec:
    """Where an array's axes lie.

    Args:
      axes: logical names, one per axis.
      shape: sizes; an axis that the mesh does not divide stays whole.
      rules: see `standard`.
      mesh: what they speak of; rules for an axis it lacks are skipped.

    Raises:
      ValueError: an axis that no rule and no model knows.
    """
    unknown = [n for n in axes if n not in LOGICAL_AXES and n not in {rule for rule, _ in rules}]
    if unknown:
        raise ValueError(f"no rule for the logical axis {unknown[0]!r}")
    out, settled = [None] * len(axes), set()
    for name, where in rules:  # in their order: mlp before embed, wherever they stand in the array
        for i, (axis, size) in enumerate(zip(axes, shape, strict=True)):
            if axis != name or i in settled:
                continue
            if where is None:
                settled.add(i)
            elif where in mesh.shape and where not in out and size % mesh.shape[where] == 0:
                out[i] = where
                settled.add(i)
    while out and out[-1] is None:
        out.pop()
    return PartitionSpec(*out)


@dataclasses.dataclass(frozen=True)
class Partitioner:
    """A mesh with its rules.

    Attributes:
      mesh: devices.
      rules: of parameters and rows; T5X's standard ones by default.
    """

    mesh: Mesh
    rules: tuple[Rule, ...] = standard()

    def __post_init__(self):
        object.__setattr__(self, "rules", tuple(tuple(rule) for rule in self.rules))

    def params(self, model, whole: bool | None = None) -> PyTree[NamedSharding]:
        """Shardings of a model's parameters.

        Args:
          model: its logical axes and shapes.
          whole: keep them whole on every device; None, which is meant for drafts (see
            `check_heads`), keeps those of a model whole whose heads the model axis does not divide
            (T5-small has six). Split, such a model would be scattered and gathered around every
            reshape into heads. So would the keys and values of grouped queries, which stay whole by
            themselves where the axis does not divide their heads.
        """
        if whole is None:
            whole = not self.divides_heads(model)
        if whole:
            return jax.tree.map(lambda _: self.replicated, model.abstract())

        split = self.mesh.shape["model"]
        grouped = getattr(model.config, "num_kv_heads", split) % split == 0
        rules = tuple(rule for rule in self.rules if grouped or rule[0] != "grouped_kv")

        def of(leaf, axes):
            return NamedSharding(self.mesh, spec(axes, leaf.shape, rules, self.mesh))

        return jax.tree.map(of, model.abstract(), model.logical_axes())

    def divides_heads(self, model) -> bool:
        """Whether the model axis divides the model's attention heads."""
        return getattr(model.config, "num_heads", 0) % self.mesh.shape["model"] == 0

    def check_heads(self, model) -> None:
        """Raises ValueError where the model axis does not divide the model's attention heads.

        For targets and what is trained, which are not to lie whole on every device unasked.
        """
        if self.divides_heads(model):
            return
        heads, size = model.config.num_heads, self.mesh.size
        fit = [n for n in range(1, size + 1) if not (size % n or heads % n)]
        raise ValueError(
            f"{self.mesh.shape['model']} model partitions do not divide the {heads} attention heads "
            f"of the {type(model).__name__}; of {size} devices possible are {', '.join(map(str, fit))}"
        )

    @property
    def rows(self) -> NamedSharding:
        """Of arrays whose first axis is rows."""
        return NamedSharding(self.mesh, PartitionSpec(devices.row_axes(self.mesh)))

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    def check_rows(self, batch: int) -> None:
        """Raises ValueError where rows do not divide evenly."""
        shards = devices.row_shards(self.mesh)
        if batch % shards:
            raise ValueError(
                f"{batch} rows do not divide over {shards} groups of devices; take a multiple of {shards}"
            )


def partitioner(
    num_partitions: int = 1,
    submesh: tuple[int, ...] | None = None,
    parameter_partitioning_dims: int = 1,
    additional_rules: tuple[Rule, ...] = (),
) -> Partitioner | None:
    """All devices, under T5X's standard rules; None where there is but one device.

    Args:
      num_partitions, submesh: see `specjax.partitioning.mesh.make`.
      parameter_partitioning_dims, additional_rules: see `standard`.
    """
    rules = standard(parameter_partitioning_dims, additional_rules)
    mesh = meshes.make(num_partitions, submesh)
    return Partitioner(mesh, rules) if mesh.size > 1 else None
