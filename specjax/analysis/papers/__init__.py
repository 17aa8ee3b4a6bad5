"""The papers' printed tables as data, one YAML file a paper."""

import dataclasses
from importlib import resources
from typing import Any

import yaml


@dataclasses.dataclass(frozen=True)
class Paper:
    """What one paper printed.

    Attributes:
        name: the file's name without its ending, e.g. "leviathan2022".
        title: the paper's title.
        arxiv: its arXiv number.
        facts: the whole file: tables, formulas, hardware, models, notes, sources.
    """

    name: str
    title: str
    arxiv: str
    facts: dict[str, Any]

    def table(self, id: str) -> list[dict[str, Any]]:
        """Returns a table's rows, each a dict from column to cell.

        Args:
            id: the table's id as the file has it, e.g. "Table 1".

        Returns:
            The rows in print order; empty cells are None.

        Raises:
            ValueError: the paper's file has no such table.
        """
        tables = {table["id"]: table for table in self.facts["tables"]}
        if id not in tables:
            raise ValueError(f"{self.name} has no table {id!r}; it has {sorted(tables)}")
        columns = tables[id]["columns"]
        return [dict(zip(columns, row, strict=True)) for row in tables[id]["rows"]]


def names() -> list[str]:
    """Returns the names of all papers that `load` knows."""
    files = resources.files(__name__).iterdir()
    return sorted(file.name[:-5] for file in files if file.name.endswith(".yaml"))


def load(name: str) -> Paper:
    """Reads one paper's facts.

    Args:
        name: the file's name without its ending, e.g. "leviathan2022".

    Returns:
        The paper.

    Raises:
        ValueError: there is no such file.
    """
    if name not in names():
        raise ValueError(f"no paper {name!r}; there are {names()}")
    text = (resources.files(__name__) / f"{name}.yaml").read_text(encoding="utf-8")
    facts = yaml.safe_load(text)
    return Paper(name=name, title=facts["title"], arxiv=facts["arxiv"], facts=facts)
