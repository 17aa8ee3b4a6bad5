"""What papers print, by our names of methods and tasks."""

import pytest

from specjax.analysis import published


def test_every_figure_is_in_its_paper_s_table():
    figures = list(published.figures())
    assert all(f.temperature in (0, 1) for f in figures)
    numbers = [f.speedup for f in figures if not isinstance(f.speedup, str)]
    assert all(0.9 < x < 7 for x in numbers)
    assert {f.method for f in figures} == {*published.METHODS, "trie", "blockwise"}


def test_the_method_s_own_paper_comes_first_then_the_comparisons():
    found = published.of("REST", "mt_bench", 0)
    assert [(f.speedup, f.source) for f in found] == [
        (1.69, "rest2023, Table 1"), (1.49, "specbench2024, Table 5"),
    ]  # fmt: skip


def test_comparisons_give_tokens_per_step():
    (eagle2, *_) = published.of("EAGLE", "humaneval", 0)
    assert (eagle2.speedup, eagle2.tau) == (3.33, 4.29)
    (eagle3,) = published.of("EAGLE-3", "humaneval", 1)
    assert (eagle3.speedup, eagle3.tau, eagle3.model) == (5.15, 6.22, "Vicuna-13B")


def test_nothing_is_printed_of_what_nobody_measured():
    assert published.of("trie", "translation", 1) == []


def test_a_row_that_is_not_there_is_an_error():
    with pytest.raises(ValueError, match="0 rows are"):
        published._row("rest2023", "Table 1", {"model": "GPT-5"})
