"""The one training loop: a recipe is a loss, data is anything indexed by position.

A run continues where it stopped, bit for bit: parameters, optimizer state, step, key and data
position are saved together, and a batch is a function of its position.
"""

import contextlib
import dataclasses
import functools
import json
import pathlib
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jaxtyping import Array, Int, Key, PyTree
from rich import progress as rich_progress

from specjax import config, runs
from specjax.checkpoints import native
from specjax.decode import devices
from specjax.partitioning import hosts
from specjax.partitioning.rules import Partitioner
from specjax.training import placement


class Recipe(Protocol):
    """What is trained, and on which loss.

    Attributes:
      model: whose parameters are trained.

    A recipe may also have ``rates(params)``: a tree like the parameters of what the learning rate is
    multiplied by for each of them, 0 for what stays as it is. Without it all are trained alike.
    """

    model: Any

    def init(self, key: Key[Array, ""]) -> PyTree:
        """Parameters to start from."""
        ...

    def loss(self, params: PyTree, batch: dict, key: Key[Array, ""]) -> tuple[Array, dict]:
        """(summed loss, sums to report: at least ``tokens``, by which the others are divided).

        A sum called ``name/of`` is divided by the sum ``of`` instead, and reported as ``name``.
        """
        ...

    def evaluate(self, params: PyTree, batch: dict) -> dict[str, Array]:
        """The sums on held-out data, without any noise."""
        ...


class Batches(Protocol):
    """Batches by position; the same position always gives the same batch.

    One that has long work to do first does it in ``prepare()``, and keeps it: it may be stopped there.
    One whose texts are what the trained model says has ``said_by(params)``: the batches as it says them now.
    """

    def __len__(self) -> int: ...
    def __getitem__(self, position: int) -> dict[str, np.ndarray]: ...


class PartedBatches(Batches, Protocol):
    """Batches that can be read in parts, so that each of several processes reads its own rows only.

    What a row holds follows from the position and the row's number, whoever reads it.

    Attributes:
      batch_size: rows of every batch.
    """

    batch_size: int

    def part(self, position: int, rows: np.ndarray) -> dict[str, np.ndarray]:
        """These rows of the batch at a position: int ``[N]``, rising, some of them twice perhaps."""
        ...


class TrainState(NamedTuple):
    """Everything a run needs to go on.

    Attributes:
      params: parameters.
      optimizer: the optimizer's state.
      step: int32, steps done, which is also the data position.
      key: raw key data; folded with the step for each batch.
    """

    params: PyTree
    optimizer: PyTree
    step: Int[Array, ""]
    key: Array


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Linear warm-up, constant, linear decay to zero over the last ``decay`` steps."""

    peak: float = 1e-2
    warmup: int = 200
    steps: int = 10_000
    decay: int = 2_000

    def __call__(self, step):
        step = jnp.asarray(step, jnp.float32)
        up = (step + 1) / max(self.warmup, 1)
        down = (self.steps - step) / max(self.decay, 1)
        return self.peak * jnp.clip(jnp.minimum(up, down), 0.0, 1.0)


def adam(schedule: Schedule, clip: float = 1.0) -> optax.GradientTransformation:
    """Adam whose step of each array is relative to the array's root mean square.

    T5 needs it: its initial scales span two orders of magnitude (embeddings 1, queries 1/sqrt(d D)),
    so one absolute step freezes the former and shakes the latter. Adafactor, which T5 was trained
    with, scales the same way (Shazeer and Stern 2018, 1804.04235, section 8).
    """
    return optax.chain(
        optax.clip_by_global_norm(clip),
        optax.scale_by_adam(b1=0.9, b2=0.98, eps=1e-9),
        optax.scale_by_param_block_rms(),
        optax.scale_by_learning_rate(schedule),
    )


def adafactor(schedule: Schedule) -> optax.GradientTransformation:
    """Adafactor as T5X fine-tunes with: step relative to the array's scale, no momentum.

    Memory of the second moments is that of rows and columns, which is what fits T5-XXL on a slice.

    References:
      Shazeer and Stern 2018 (1804.04235), algorithms 4 and 5 with decay exponent 0.8.
    """
    return optax.adafactor(schedule, decay_rate=0.8, multiply_by_parameter_scale=True)


def adamw(
    schedule: Schedule, clip: float = 0.5, b2: float = 0.95, decay: float = 0.0
) -> optax.GradientTransformation:
    """AdamW with the clipping and the second beta that EAGLE's heads are trained with.

    References:
      Li et al. 2024 (2401.15077), section 4 (training).
    """
    return optax.chain(
        optax.clip_by_global_norm(clip),
        optax.adamw(schedule, b1=0.9, b2=b2, weight_decay=decay),
    )


OPTIMIZERS = {"adam": adam, "adafactor": adafactor, "adamw": adamw}


def make_optimizer(name: str, schedule: Schedule) -> optax.GradientTransformation:
    """One of `OPTIMIZERS`.

    Raises:
      ValueError: there is none of this name.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {name!r}, known are {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name](schedule)


def train(
    recipe: Recipe,
    batches: Batches,
    output_dir: str,
    schedule: Schedule = Schedule(),
    validation: Mapping[str, Batches] | None = None,
    seed: int = 0,
    checkpoint_period: int = 200,
    evaluation_period: int = 400,
    log_period: int = 20,
    initial_params: PyTree | Callable[[], PyTree] | None = None,
    optimizer: str = "adam",
    partitioner: Partitioner | None = None,
    accumulation: int = 1,
) -> TrainState:
    """Trains to ``schedule.steps``, or until SIGTERM, which saves and returns.

    Writes Orbax checkpoints under ``output_dir/checkpoints``, one JSON line per report to
    ``metrics.jsonl`` and TensorBoard scalars beside it. A run found in ``output_dir`` is continued.

    Args:
      recipe: loss and initial parameters.
      batches: training data; with several processes each reads its own rows of `PartedBatches`, and
        all rows of others.
      output_dir: where the run lives.
      schedule: learning rate over steps.
      validation: name to data; all batches of each are read at every evaluation.
      seed: initial parameters and noise.
      checkpoint_period, evaluation_period, log_period: in steps.
      initial_params: start from these instead of ``recipe.init``; or a function that is called with
        ``shardings=`` those of the parameters (None for one device) and returns them.
      optimizer: "adam", "adafactor" or "adamw".
      partitioner: the devices of all processes, and what lies where; None trains on one.
      accumulation: batches whose mean gradient makes one update. ``schedule`` counts updates, all other
        steps are batches.

    Returns:
      The last state.

    Raises:
      ValueError: there is no such optimizer, the mesh does not divide the model's heads, or
        ``output_dir`` holds another run or is remote.
    """
    folder = pathlib.Path(runs.local(output_dir, "training runs")).expanduser().resolve()
    update = _grouped(make_optimizer(optimizer, schedule), recipe)
    if accumulation > 1:
        update = optax.MultiSteps(update, accumulation).gradient_transformation()
    hosts.decide(functools.partial(_claim, folder, recipe, batches, optimizer, seed, accumulation))
    every = _Periods(checkpoint_period, evaluation_period, log_period)
    for source in (batches, *(validation or {}).values()):
        # Before signals are held back until a step's end: what this computes is kept by itself.
        getattr(source, "prepare", lambda: None)()
    with (
        ocp.CheckpointManager(folder / "checkpoints", options=_options()) as manager,
        _Log(folder) as log,
        _stop_signal() as stopped,
        _progress() as bar,
        placement.using(partitioner),
    ):
        state = _start(recipe, update, manager, seed, initial_params, partitioner)
        native.describe(folder, recipe.model, native.RUN)
        run_step = make_step(recipe, update)
        evaluate = make_evaluation(recipe, validation or {}, partitioner)
        steps = schedule.steps * accumulation
        task = bar.add_task("training", total=steps, loss="")
        meter = _Meter()
        for step in range(int(state.step), steps):
            given = batches.said_by(state.params) if hasattr(batches, "said_by") else batches
            state, sums = run_step(state, placement.read(given, step, partitioner))
            meter.add(sums)
            done, last = step + 1, step + 1 == steps
            # Processes stop together; to ask all of them costs time, so that is not done in every step.
            together = jax.process_count() == 1 or done % every.log == 0
            stop = together and hosts.any_of(stopped())
            bar.update(task, completed=done)
            if done % every.log == 0:
                report = meter.read()
                log.write(done, "train", report)
                bar.update(task, loss=f"loss {report['loss']:.3f}")
            if done % every.evaluation == 0 or last:
                for name, report in evaluate(state.params).items():
                    log.write(done, name, report)
            if done % every.checkpoint == 0 or last or stop:
                save(manager, state)
            if stop:
                break
    return state


def _grouped(optimizer: optax.GradientTransformation, recipe: Recipe):
    """The optimizer at every parameter's own rate."""
    if not hasattr(recipe, "rates"):
        return optimizer
    rates = sorted(set(jax.tree.leaves(recipe.rates(recipe.model.abstract()))))
    of = lambda rate: optax.chain(optimizer, optax.scale(rate)) if rate else optax.set_to_zero()  # noqa: E731
    names = lambda params: jax.tree.map(str, recipe.rates(params))  # noqa: E731
    return optax.partition({str(rate): of(rate) for rate in rates}, names)


class _Periods(NamedTuple):
    checkpoint: int
    evaluation: int
    log: int


class _Meter:
    """Sums of the steps since the last report, and how fast they came."""

    def __init__(self):
        self.sums, self.since = {}, time.perf_counter()

    def add(self, sums: dict) -> None:
        self.sums = jax.tree.map(jnp.add, self.sums, sums) if self.sums else sums

    def read(self) -> dict[str, float]:
        report = averages(self.sums)
        report["tokens_per_second"] = report.pop("tokens") / (time.perf_counter() - self.since)
        self.sums, self.since = {}, time.perf_counter()
        return report


def make_step(recipe: Recipe, optimizer: optax.GradientTransformation):
    """One jitted update; the state is donated."""

    def step(state: TrainState, batch: dict) -> tuple[TrainState, dict]:
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)

        def mean_loss(params):
            total, sums = recipe.loss(params, batch, key)
            return total / jnp.maximum(sums["tokens"], 1.0), sums

        grads, sums = jax.grad(mean_loss, has_aux=True)(state.params)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes Python floats with int32 counts
            updates, optimizer_state = optimizer.update(grads, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(params, optimizer_state, state.step + 1, state.key), sums

    return jax.jit(step, donate_argnums=0)


def make_evaluation(
    recipe: Recipe, data: Mapping[str, Batches], partitioner: Partitioner | None = None
):
    """Returns ``evaluate(params) -> {name: averages}`` over all batches of each data set."""
    loss = jax.jit(recipe.evaluate)

    def evaluate(params: PyTree) -> dict[str, dict[str, float]]:
        out = {}
        for name, batches in data.items():
            placed = (placement.read(batches, i, partitioner) for i in range(len(batches)))
            sums = [jax.device_get(loss(params, batch)) for batch in placed]
            out[name] = averages(jax.tree.map(lambda *x: sum(x), *sums))
        return out

    return evaluate


def averages(sums: dict) -> dict[str, float]:
    """Sums per token, or per what their name says; ``tokens`` stays the count."""
    sums = {name: float(value) for name, value in sums.items()}
    counts = {name.partition("/")[2] for name in sums} - {""}
    out = {}
    for name, value in sums.items():
        short, _, of = name.partition("/")
        if name not in counts:
            out[short] = value if name == "tokens" else value / max(sums[of or "tokens"], 1.0)
    return out


def save(manager: ocp.CheckpointManager, state: TrainState) -> None:
    """Saves state and data position, unless this step is saved already."""
    step = int(state.step)
    if step == manager.latest_step():
        return
    position = {"position": step}
    items = {"state": ocp.args.StandardSave(state._asdict()), "data": ocp.args.JsonSave(position)}
    manager.save(step, args=ocp.args.Composite(**items))


def _start(recipe, optimizer, manager, seed, initial_params, partitioner) -> TrainState:
    key = jax.random.key(seed)

    def fresh(params=None) -> TrainState:
        params = recipe.init(key) if params is None else params
        noise = jax.random.key_data(jax.random.fold_in(key, 1))
        return TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32), noise)

    abstract, places = jax.eval_shape(fresh), None
    if partitioner is not None:
        places = placement.state_shardings(partitioner, recipe.model, optimizer, abstract)
    if manager.latest_step() is None:
        params = _initial(initial_params, None if places is None else places.params)
        return jax.jit(fresh, out_shardings=places, donate_argnums=0)(params)
    if places is None:
        # Else Orbax puts the state back on the devices that it was saved from.
        places = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        places = jax.tree.map(lambda _: places, abstract)
    abstract = placement.shapes(abstract, places)._asdict()
    args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract), data=ocp.args.JsonRestore())
    restored = manager.restore(manager.latest_step(), args=args)
    state = TrainState(**restored["state"])
    if restored["data"]["position"] != int(state.step):
        raise ValueError(f"checkpoint {manager.latest_step()}: data position and step disagree")
    return state


def _initial(given, shardings) -> PyTree | None:
    """Parameters to start from, which the caller does not hold: they are given away."""
    if callable(given):
        return given(shardings=shardings)
    if given is None:
        return None
    if shardings is not None:
        return devices.put(given, shardings)
    return jax.tree.map(jnp.copy, given)


def _claim(
    folder: pathlib.Path, recipe: Recipe, batches: Batches, optimizer, seed, accumulation
) -> None:
    """Makes the folder this run's; how long it trains may change from start to start."""
    named = (
        type(batches).__repr__ is not object.__repr__
    )  # which would tell where it lies in memory
    data = repr(batches) if named else type(batches).__name__
    described = {"recipe": repr(recipe), "data": data, "optimizer": optimizer, "seed": seed}
    described |= {"accumulation": accumulation} if accumulation > 1 else {}
    runs.claim(str(folder), described)
    config.save(str(folder))


def _options() -> ocp.CheckpointManagerOptions:
    return ocp.CheckpointManagerOptions(max_to_keep=2, create=True)


def _progress() -> rich_progress.Progress:
    return rich_progress.Progress(
        *rich_progress.Progress.get_default_columns(),
        rich_progress.MofNCompleteColumn(),
        rich_progress.TextColumn("{task.fields[loss]}"),
        disable=not hosts.leads(),
    )


@contextlib.contextmanager
def _stop_signal():
    """Yields a function that says whether SIGTERM came; the old handler is put back at the end."""
    seen = []
    old = signal.signal(signal.SIGTERM, lambda *_: seen.append(True))
    try:
        yield lambda: bool(seen)
    finally:
        signal.signal(signal.SIGTERM, old)


class _Log:
    """``metrics.jsonl`` and TensorBoard scalars, of the first process."""

    def __init__(self, folder: pathlib.Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder

    def __enter__(self):
        from tensorboardX import SummaryWriter

        if not hosts.leads():
            return self
        self.lines = open(self.folder / "metrics.jsonl", "a")
        self.board = SummaryWriter(str(self.folder / "tensorboard"))
        return self

    def write(self, step: int, name: str, report: dict[str, float]) -> None:
        if not hosts.leads():
            return
        self.lines.write(json.dumps({"step": step, "data": name, **report}) + "\n")
        self.lines.flush()
        for key, value in report.items():
            self.board.add_scalar(f"{name}/{key}", value, step)

    def __exit__(self, *error):
        if hosts.leads():
            self.lines.close()
            self.board.close()
