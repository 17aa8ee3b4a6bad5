"""The harness: what is compared, how differences are judged, what the report says of it."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import assets
from specjax.bench import harness, report, run
from specjax.bench.free_draft import FreeDraft
from specjax.bench.harness import Costs, Measured, Method, Run, Runner, Workload
from specjax.data.sources import Heldout, TextFile
from specjax.data.vocabulary import Vocabulary
from specjax.decode import stats
from specjax.decode.interfaces import Params, Prompt
from specjax.decode.verify import BlockVerification, GreedyMatch, LenientSampling
from specjax.drafters.lookahead import Lookahead
from specjax.drafters.small_model import SmallModel
from specjax.infer import system
from specjax.models.t5 import T5, T5Config

TINY = T5Config(
    vocab_size=8000,
    emb_dim=16,
    num_heads=2,
    head_dim=8,
    mlp_dim=32,
    num_encoder_layers=1,
    num_decoder_layers=1,
)


@pytest.fixture(scope="module")
def pair() -> assets.Pair:
    """A random tiny target and a noisy copy of it as draft."""
    model = T5(TINY)
    target = model.init(jax.random.key(0))
    noise = jax.random.key(1)
    draft = jax.tree.map(lambda x: x + 0.02 * jax.random.normal(noise, x.shape), target)
    vocabulary = Vocabulary.load(assets.folder() / "sentencepiece.model")
    return assets.Pair(model, target, model, draft, vocabulary)


def drafted(pair: assets.Pair) -> Params:
    return Params(pair.target_params, {"small model": pair.draft_params})


def workload_of(pair, task, half, count, length, batch_size) -> Workload:
    found = harness.halves(Heldout(task), pair.vocabulary, length)[half]
    return harness.make_workload(task, half, found, count, length, batch_size)


def made_up(prefill: float, decode: float, lengths: list[int], rounds: int) -> Run:
    count = stats.empty(len(lengths), 1)
    count = jax.tree.map(
        np.asarray, count._replace(rounds=jnp.full(len(lengths), rounds, jnp.int32))
    )
    lengths = np.array(lengths)
    return Run(np.zeros((len(lengths), 4)), lengths, np.ones(len(lengths)), prefill, decode, count)


def test_seconds_per_token_are_summed_over_batches_before_dividing():
    """Two batches of 3 and 1 tokens in 3 and 5 seconds: 2 seconds a token, not (1 + 5) / 2."""
    measured = Measured([[made_up(1.0, 2.0, [3], 3), made_up(1.0, 4.0, [1], 1)]])
    np.testing.assert_allclose(measured.per_token(), [2.0])
    np.testing.assert_allclose(measured.per_token("decode_seconds"), [1.5])


def test_costs():
    """c is a drafted token, v a round without drafting, both over the plain step."""
    costs = Costs(plain_seconds=2.0, verify_seconds=3.0, round_seconds=4.0)
    assert costs.draft_seconds == pytest.approx(1.0)
    assert costs.c(5) == pytest.approx(0.1)
    assert costs.v == pytest.approx(1.5)
    assert Costs(2.0, 3.0, 2.9).c(5) == 0.0  # noise must not make drafting earn time


def test_every_drafting_method_has_costs(pair):
    work = workload_of(pair, "debian_ende", "calibration", 1, 32, 1)
    methods = [Method("plain"), Method("small model", 2, SmallModel(pair.draft, 2))]
    found = Costs.measure(Runner(pair.target, 8), methods, drafted(pair), work.prompts[0])
    assert list(found) == methods[1:]
    assert min(found[methods[1]]) > 0


def test_the_last_batch_is_filled_up_and_padding_rows_are_not_counted(pair):
    workload = workload_of(pair, "debian_ende", "report", 5, 64, 4)
    assert workload.real == [4, 1]
    assert [len(p.length) for p in workload.prompts] == [4, 4]
    assert len(workload.examples) == 5
    runner = Runner(pair.target, 4)
    params = Params(pair.target_params, None)
    found = harness.measure(runner, [Method("plain")], params, workload, 0.0, 1)
    assert [len(r.lengths) for r in found[Method("plain")].runs[0]] == [4, 1]


def test_halves_are_different_sentences(pair):
    a, b = (
        workload_of(pair, "debian_synopsis", half, 16, 64, 1) for half in ("calibration", "report")
    )
    tokens = lambda w: {np.asarray(p.tokens).tobytes() for p in w.prompts}  # noqa: E731
    assert not tokens(a) & tokens(b)


def test_any_source_has_halves_that_share_nothing(pair, tmp_path):
    """Every second line of a file calibrates; what does not fit is left out, never cut."""
    (tmp_path / "in.txt").write_text("a\nb\n" + "long " * 40 + "\nc\nd\n")
    found = harness.halves(TextFile(str(tmp_path / "in.txt")), pair.vocabulary, 8)
    texts = {half: [e.text["inputs_pretokenized"] for e in part] for half, part in found.items()}
    assert texts == {"calibration": ["a", "c"], "report": ["b", "d"]}


def test_too_few_sentences_is_one_clear_line(pair):
    with pytest.raises(ValueError, match="debian_ende report: 1000 examples asked for"):
        workload_of(pair, "debian_ende", "report", 1000, 64, 1)


def test_differences_are_judged_by_the_plain_program(pair):
    """A planted wrong token is found, and is no near-tie; equal runs have no difference."""
    texts = ["translate English to German: A library.", "summarize: A tool."]
    prompt = Prompt(*map(jnp.asarray, pair.vocabulary.batch(texts, 16)))
    workload = Workload("debian_ende", [prompt], [2], [])
    runner, params = Runner(pair.target, 6), drafted(pair)
    plain = runner(Method("plain"), params, prompt, 2, 0.0)
    other = runner(Method("small model", 2, SmallModel(pair.draft, 2)), params, prompt, 2, 0.0)
    assert harness.differences(runner, params, workload, [plain], [other]) == []
    wrong = plain.tokens.copy()
    wrong[1, 3] = (wrong[1, 3] + 17) % 8000
    (found,) = harness.differences(
        runner, params, workload, [plain], [plain._replace(tokens=wrong)]
    )
    assert (found.row, found.position, found.near_tie) == (1, 3, False)
    assert found.gap > 1e-3


def test_settings_say_what_is_wrong():
    with pytest.raises(ValueError, match="gammas must hold 0"):
        run.Settings(gammas=(1, 3))
    with pytest.raises(ValueError, match="gamma must not be negative"):
        run.Settings(gammas=(0, -1))
    with pytest.raises(ValueError, match="at least 2 sentences"):
        run.Settings(sentences=1)
    with pytest.raises(ValueError, match="1 repeat of each kind"):
        run.Settings(batch_repeats=0)
    with pytest.raises(ValueError, match="temperature must not be negative, got -1"):
        run.Settings(temperatures=(0.0, -1.0))
    with pytest.raises(ValueError, match="batch_sizes must be at least 1"):
        run.Settings(batch_sizes=(0, 1))
    with pytest.raises(ValueError, match="two sources have one name"):
        run.bench(run.Settings(), sources=[TextFile("a/x.txt"), TextFile("b/x.txt")])


@pytest.mark.slow
def test_a_whole_report(pair, tmp_path, monkeypatch):
    """A tiny bench writes rows with the documented keys, equal greedy output, and pictures."""
    monkeypatch.setattr(assets, "load_pair", lambda: pair)
    settings = run.Settings(
        gammas=(0, 2), batch_sizes=(1, 2), sentences=4, repeats=2, batch_repeats=1, max_decode_len=8
    )
    run.bench(settings, str(tmp_path))
    content = json.loads((tmp_path / "report.json").read_text())
    assert len(content["rows"]) == 2 * 2 * 2 * 2  # tasks, temperatures, gammas, batch sizes
    keys = """task model method temperature gamma batch_size tokens seconds tokens_per_second speedup
        speedup_quartiles acceptance_rate block_efficiency identical differences predicted_speedup
        predicted_from_alpha c v compile_seconds""".split()
    for row in content["rows"]:
        assert not set(keys) - set(row)
        assert row["identical"] is (True if row["temperature"] == 0 else None)
        assert row["emitted"] == row["tokens"]
        if row["gamma"] == 0:
            assert row["speedup"] == 1.0 and row["block_efficiency"] == pytest.approx(1.0)
    text = (tmp_path / "report.md").read_text()
    assert "identical to plain decoding's" in text
    for name in ("speedup.png", "acceptance.png", "trace-debian_ende.png", "bandwidth.png"):
        assert (tmp_path / name).stat().st_size > 5000 and name in text


def test_cells():
    assert report.cell("alpha", None) == "–"
    assert report.cell("identical", False) == "NO"
    assert report.cell("c", 0.0512) == "0.051"
    assert report.cell("speedup_quartiles", [1.0, 2.0]) == "1.00–2.00"


def test_a_lossy_rule_is_no_method_of_a_report(tmp_path):
    lenient = {"lenient": LenientSampling(0.5)}
    with pytest.raises(ValueError, match="lenient: no lossless rule"):
        run.bench(run.Settings(), str(tmp_path), verifiers=lenient)
    with pytest.raises(ValueError, match="GreedyMatch is lossless at temperature 0 only"):
        run.bench(run.Settings(), str(tmp_path), verifiers={"greedy": GreedyMatch()})
    with pytest.raises(ValueError, match="reports are written to a local folder, not to gs://x"):
        run.bench(run.Settings(), "gs://x")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_verifiers_and_profiles_stand_in_the_report(pair, tmp_path, monkeypatch):
    """Every draft is judged by every rule, under a name of its own; c comes from a profile too."""
    monkeypatch.setattr(assets, "load_pair", lambda: pair)
    settings = run.Settings(
        tasks=("debian_ende",), temperatures=(1.0,), gammas=(0, 2), batch_sizes=(1,), sentences=4,
        repeats=2, max_decode_len=8,
    )  # fmt: skip
    rules = {"block verification": BlockVerification()}
    traces = tmp_path / "traces"
    found = run.bench(settings, str(tmp_path), verifiers=rules, profile_dir=str(traces))
    names = [row["method"] for row in found.rows]
    assert names == ["plain", "small model", "small model, block verification"]
    assert [one["method"] for one in found.profile] == names
    assert found.profile[1]["c"] > 0 and found.profile[0]["c"] is None
    text = (tmp_path / "report.md").read_text()
    assert "| task | method |" in text and "| small model, block verification | 2 |" in text
    assert list(traces.glob("**/*.trace.json.gz"))


@pytest.mark.slow
def test_methods_stand_beside_small_models(pair, tmp_path, monkeypatch):
    """Trees of several settings: the faster one is chosen, and alone reported where that is asked for."""
    monkeypatch.setattr(assets, "load_pair", lambda: pair)
    settings = run.Settings(
        tasks=("debian_ende",), gammas=(0, 2), temperatures=(0.0, 1.0), batch_sizes=(1,), sentences=4,
        repeats=2, max_decode_len=8, only_chosen=True,
    )  # fmt: skip
    size = pair.target.vocab_size
    guesses = [FreeDraft(2, n, size, chain=False, drawn=False) for n in (3, 5)]
    found = run.bench(settings, str(tmp_path), methods={"guess": guesses})
    assert [row["method"] for row in found.rows] == ["plain", "small model", "guess"] * 2
    for row in found.rows:
        if row["method"] == "guess":
            assert row["chosen"] and row["setting"] in ("nodes 3", "nodes 5")
            assert row["gamma"] == 2 and row["predicted_from_alpha"] is None
            assert str(row["nodes"]) == row["setting"].removeprefix("nodes ")
    assert found.identical
    text = (tmp_path / "report.md").read_text()
    assert "| guess |" in text and "methods.png" in text
    assert (tmp_path / "methods.png").stat().st_size > 5000


def test_settings_of_a_method_are_told_apart():
    make = lambda depth, nodes: FreeDraft(depth, nodes, 32, chain=False)  # noqa: E731
    labels = [label for label, _ in harness.told_apart([make(2, 3), make(2, 4)])]
    assert labels == ["nodes 3", "nodes 4"]
    assert harness.told_apart([make(2, 3)])[0][0] == "–"
    with pytest.raises(ValueError, match="the same setting twice"):
        harness.told_apart([make(2, 3), make(2, 3)])
    with pytest.raises(ValueError, match="no setting to try"):
        harness.told_apart([])
    mixed = [label for label, _ in harness.told_apart([make(2, 3), Lookahead(2, 3, 2)])]
    assert mixed[0].startswith("depth 2 nodes 3") and "window 2 ngram 3" in mixed[1]


def test_rules_for_chains_are_not_crossed_with_trees(pair):
    contest = run._shipped()._replace(
        verifiers={"block": BlockVerification()}, methods={"guess": [FreeDraft(2, 3, 32, False)]}
    )
    found = run._methods(run.Settings(gammas=(0, 2)), contest)
    names = ["plain", "small model", "small model, block", "guess"]
    assert [method.name for method in found] == names


def test_what_a_method_decodes_with_must_fit_the_target(pair, tmp_path, monkeypatch):
    """Ids of another vocabulary would be drafted as if they were the target's."""
    monkeypatch.setattr(assets, "load_pair", lambda: pair)
    counts = system.Counts("nowhere.npz", 1, 9000)
    with pytest.raises(ValueError, match="the table has 9000 pieces"):
        run.bench(run.Settings(), str(tmp_path), drafts={"unigram": counts})
