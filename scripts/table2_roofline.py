"""Leviathan et al.'s Table 2 beside rooflines of our compiled steps, on a TPU v4 chip that need not be there.

  python scripts/table2_roofline.py

For each row: the paper's alpha, c and gamma through Theorem 3.8 (its own expectation), the same alpha and
gamma with c and v from the rooflines of our compiled steps, and what the paper measured. Nothing is
fitted. Takes some seven minutes on two cores; needs libtpu.
"""

import functools

from specjax import config
from specjax.analysis import papers, theory
from specjax.drafters.small_model import SmallModel
from specjax.partitioning import aot

COLUMNS = (
    "task", "draft", "T", "γ", "α", "c (paper)", "expected (paper)", "c (ours)", "v (ours)",
    "expected (ours)", "measured (paper)",
)  # fmt: skip


@functools.cache
def compiled(draft: str, gamma: int) -> aot.Compiled:
    """T5-XXL with one of its drafts, in bfloat16 on one chip."""
    config.parse(["configs/tpu/models.gin"])
    target, small = config.macro("TARGET"), config.macro(draft.upper())
    drafter = functools.partial(SmallModel, gamma=gamma)
    return aot.decode(target, small, drafter, "v4-2", input_length=256, max_decode_len=128)


def line(row: dict) -> list:
    """One line of the table, from one of the paper's Table 4."""
    gamma, alpha, c = row["gamma"], row["alpha"], row["c"]
    ours = compiled(row["Mq"], gamma)
    return [
        row["task"], row["Mq"], row["temp"], gamma, alpha, c,
        f"{theory.walltime_factor(alpha, gamma, c):.2f}",
        f"{ours.c:.4f}", f"{ours.v:.3f}",
        f"{theory.walltime_factor(alpha, gamma, ours.c, ours.v):.2f}",
        row["empirical_x"],
    ]  # fmt: skip


def main() -> None:
    lines = [line(row) for row in papers.load("leviathan2022").table("Table 4 (App A.3)")]
    for cells in (COLUMNS, ["---"] * len(COLUMNS), *lines):
        print("| " + " | ".join(str(cell) for cell in cells) + " |")


if __name__ == "__main__":
    main()
