"""What papers print of the methods and tasks that `bench` measures, to stand beside our own figures."""

from collections.abc import Iterator
from typing import NamedTuple

from specjax.analysis import papers


class Figure(NamedTuple):
    """A printed speed-up over plain decoding.

    Attributes:
      method, task: in our names; EAGLE-2's, Medusa's and EAGLE's by the same rule.
      temperature: 0, or 1 for what was sampled; the model says so where it was another one.
      speedup: as printed; a string where it is a range.
      tau: tokens per step, where they are printed.
      model: on which.
      source: paper and table.
    """

    method: str
    task: str
    temperature: float
    speedup: float | str
    tau: float | None
    model: str
    source: str


# Spec-Bench and EAGLE-2 name methods and tasks in their own way.
METHODS = {
    "prompt lookup": "PLD",
    "lookahead": "Lookahead",
    "REST": "REST",
    "small model": "SpS",
    "Medusa": "Medusa",
    "EAGLE": "EAGLE",
    "EAGLE-2": "EAGLE-2",
    "EAGLE-3": "EAGLE-3",
}
SPEC_BENCH = {
    "mt_bench": "MT",
    "translation": "Translation",
    "summarization": "Summarization",
    "qa": "QA",
    "math_reasoning": "Math",
    "rag": "RAG",
}
EAGLE3 = {"humaneval": "HE", "mt_bench": "MT", "math_reasoning": "GSM", "summarization": "CNNDM"}
EAGLE2 = {
    "humaneval": "HE",
    "mt_bench": "MT",
    "math_reasoning": "GSM",
    "qa": "NQ",
    "summarization": "CNNDM",
}

# The methods' own papers, for the tasks nearest to ours: (method, task, T), (file, table, column), the cells
# that name the row, and what it was measured on.
OWN = (
    (("prompt lookup", "summarization", 0), ("prompt_lookup2023", "Headline", "item"), {}, "2.4",
     "Mistral-7B"),
    (("prompt lookup", "rag", 0), ("llma2023", "Headline", "item"), {}, "2–3", "LLaMA (LLMA)"),
    (("lookahead", "humaneval", 0), ("lookahead_decoding2024", "Figure 5", "7B"),
     {"benchmark": "HumanEval completion (CodeLlama)"}, None, "CodeLlama-7B"),
    (("lookahead", "mt_bench", 0), ("lookahead_decoding2024", "Figure 5", "7B"),
     {"benchmark": "MT-Bench (LLaMA-2-chat)"}, None, "LLaMA-2-7B"),
    (("lookahead", "math_reasoning", 0), ("lookahead_decoding2024", "Figure 5", "7B"),
     {"benchmark": "GSM8K (CodeLlama-Instruct)"}, None, "CodeLlama-7B"),
    (("lookahead", "summarization", 1), ("lookahead_decoding2024", "Table 2", "speedup_x"),
     {"dataset": "CNNDM"}, None, "LLaMA-2-7B"),
    (("trie", "humaneval", 0), ("alibaba_lookahead2023", "README public", "speedup_x"),
     {"model": "Llama2-7b-chat(fused)", "dataset": "Humaneval-x", "gpu": "A100-80G"}, None,
     "LLaMA-2-7B, warmed trie"),
    (("trie", "math_reasoning", 0), ("alibaba_lookahead2023", "README public", "speedup_x"),
     {"model": "Llama2-7b-chat", "dataset": "GSM-8k"}, None, "LLaMA-2-7B, warmed trie"),
    (("REST", "humaneval", 0), ("rest2023", "Table 1", "REST_x"),
     {"benchmark": "HumanEval", "decoding": "greedy", "model": "CodeLlama-7B"}, None, "CodeLlama-7B"),
    (("REST", "mt_bench", 0), ("rest2023", "Table 1", "REST_x"),
     {"benchmark": "MT-bench", "decoding": "greedy", "model": "Vicuna-7B"}, None, "Vicuna-7B"),
    (("small model", "humaneval", 1), ("chen2023_speculative_sampling", "Table 1", "speedup_x"),
     {"benchmark": "HumanEval"}, None, "Chinchilla, T = 0.8"),
    (("small model", "summarization", 0), ("chen2023_speculative_sampling", "Table 1", "speedup_x"),
     {"benchmark": "XSum", "sampling": "greedy"}, None, "Chinchilla, XSum"),
    (("small model", "debian_ende", 0), ("leviathan2022", "Table 2", "speed_x"),
     {"task": "EnDe", "Mq": "T5-small 77M", "temp": 0}, None, "T5-XXL, WMT EnDe"),
    (("small model", "debian_ende", 1), ("leviathan2022", "Table 2", "speed_x"),
     {"task": "EnDe", "Mq": "T5-small 77M", "temp": 1}, None, "T5-XXL, WMT EnDe"),
    (("small model", "debian_synopsis", 0), ("leviathan2022", "Table 2", "speed_x"),
     {"task": "CNNDM", "Mq": "T5-small 77M", "temp": 0}, None, "T5-XXL, CNN/DM"),
    (("small model", "debian_synopsis", 1), ("leviathan2022", "Table 2", "speed_x"),
     {"task": "CNNDM", "Mq": "T5-small 77M", "temp": 1}, None, "T5-XXL, CNN/DM"),
    (("Medusa", "mt_bench", 0), ("medusa2024", "Fig 3", "Medusa-1_x"), {"model": "Vicuna-7B"}, None,
     "Vicuna-7B, Medusa-1, typical acceptance"),
    (("Medusa", "debian_ende", 0), ("blockwise2018", "Table 4", "speedup_x"), {"k": 4}, None,
     "blockwise heads, k = 4, WMT EnDe"),
    (("blockwise", "debian_ende", 0), ("blockwise2018", "Table 4", "speedup_x"), {"k": 4}, None,
     "blockwise heads, k = 4, WMT EnDe"),
)  # fmt: skip


def figures() -> Iterator[Figure]:
    """All of them: the methods' own papers first, then the comparisons of EAGLE-2, EAGLE-3 and Spec-Bench."""
    for (method, task, temperature), (name, table, column), cells, given, model in OWN:
        row = _row(name, table, cells)
        yield Figure(
            method, task, temperature, given or row[column], None, model, f"{name}, {table}"
        )
    for row in papers.load("eagle2_2024").table("Table 1"):
        for method, task in _pairs(row, "V-7B", EAGLE2):
            x, tau = (row[f"{EAGLE2[task]}_{end}"] for end in ("x", "tau"))
            yield Figure(method, task, row["T"], x, tau, "Vicuna-7B", "eagle2_2024, Table 1")
    for row in papers.load("eagle3_2025").table("Table 1"):
        for method, task in _pairs(row, "V-13B", EAGLE3):
            if method == "EAGLE-3":
                x, tau = (row[f"{EAGLE3[task]}_{end}"] for end in ("x", "tau"))
                yield Figure(method, task, row["T"], x, tau, "Vicuna-13B", "eagle3_2025, Table 1")
    for row in papers.load("specbench2024").table("Paper Table 5"):
        for method, task in _pairs(row, None, SPEC_BENCH):
            x = row[SPEC_BENCH[task]]
            yield Figure(method, task, row["T"], x, None, "Vicuna-7B", "specbench2024, Table 5")


def of(method: str, task: str, temperature: float) -> list[Figure]:
    """What is printed of one cell; longest-standing source first."""
    wanted = (method, task, temperature)
    return [f for f in figures() if (f.method, f.task, f.temperature) == wanted]


def _row(name: str, table: str, cells: dict) -> dict:
    rows = [r for r in papers.load(name).table(table) if cells.items() <= r.items()]
    if len(rows) != 1 and cells:
        raise ValueError(f"{name}, {table}: {len(rows)} rows are {cells}")
    return rows[0]


def _pairs(row: dict, model: str | None, tasks: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Our names of a row's method, with all tasks."""
    ours = {theirs: method for method, theirs in METHODS.items()}
    if row["method"] in ours and (model is None or row["model"] == model):
        yield from ((ours[row["method"]], task) for task in tasks)
