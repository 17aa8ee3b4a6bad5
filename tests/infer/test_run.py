"""`infer` and `eval` end to end on a tiny model: order, resuming, refusals."""

import dataclasses
import functools
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import Prompt, Sampling, assets, generate
from specjax.bench import run as bench
from specjax.checkpoints import int8
from specjax.data import datastore, prompts
from specjax.data.sources import Example, TextFile
from specjax.data.vocabulary import Bytes, Vocabulary
from specjax.decode.interfaces import Params
from specjax.decode.processors import MinLength
from specjax.drafters.lookahead import Lookahead
from specjax.drafters.ngram import Ngram
from specjax.drafters.prompt_lookup import PromptLookup
from specjax.drafters.rest import Rest
from specjax.drafters.small_model import SmallModel
from specjax.drafters.staged import Staged
from specjax.drafters.trie import Trie
from specjax.infer import run, streaming, system
from specjax.infer.run import Settings
from specjax.infer.system import Checkpoint
from specjax.models.t5 import T5, T5Config
from specjax.partitioning import mesh as meshes
from specjax.partitioning.rules import Partitioner
from specjax.training.batches import TokenPairs, save_pairs

LENGTHS = {"inputs": 24, "targets": 12}
TEXTS = [
    "A library.",
    "",
    "Tools for the network",
    "x",
    "A game",
    "Data",
    "A parser of XML",
    "Fonts",
    "a b c",
]


def model(emb_dim=16, vocab_size=8000) -> T5:
    return T5(T5Config(vocab_size, emb_dim, 2, 8, 32, 1, 1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two tiny checkpoints with the shipped vocabulary beside them, and a text file."""
    root = tmp_path_factory.mktemp("system")
    vocabulary = (assets.folder() / "sentencepiece.model").read_bytes()
    (root / "sentencepiece.model").write_bytes(vocabulary)
    for seed, name in enumerate(("target", "draft")):
        params = model().init(jax.random.key(seed))
        int8.save(root / f"{name}.safetensors", model(), params)
    (root / "in.txt").write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    return root


def infer(
    folder,
    out,
    *,
    drafter=SmallModel,
    sampling=Sampling(),
    stream=False,
    partitioner=None,
    **settings,
):
    draft = None if drafter is None else Checkpoint(str(folder / "draft.safetensors"))
    options = {"task_feature_lengths": LENGTHS, "batch_size": 4, "part_size": 4} | settings
    return run.infer(
        TextFile(str(folder / "in.txt")), Checkpoint(str(folder / "target.safetensors")), str(out),
        drafter, draft, sampling=sampling, settings=Settings(**options), stream=stream,
        partitioner=partitioner,
    )  # fmt: skip


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_predictions_are_what_generate_says_in_input_order(folder, tmp_path):
    lines = read(infer(folder, tmp_path, include_tokens=True))
    assert [line["inputs"]["inputs_pretokenized"] for line in lines] == TEXTS
    loaded = system.load(Checkpoint(str(folder / "target.safetensors")))
    prompt = Prompt(*map(jax.numpy.asarray, loaded.vocabulary.batch(TEXTS, LENGTHS["inputs"])))
    out = generate(loaded.target, loaded.params.target, prompt, max_decode_len=LENGTHS["targets"])
    for i, line in enumerate(lines):
        ids = np.asarray(out.tokens[i, : out.lengths[i]]).tolist()
        assert line["prediction_tokens"] == ids
        assert line["prediction"] == loaded.vocabulary.decode(ids)
        assert line["aux"]["length"] == len(ids)
        assert line["aux"]["finish_reason"] in ("stop", "length")
    assert (tmp_path / "config.gin").exists()


def test_a_stream_prints_the_text_and_writes_the_same_file(folder, tmp_path, monkeypatch, capsys):
    """Sampled, in the order of the input, some tokens at a time, whatever the batch size is."""
    hot = dict(sampling=Sampling(1.0), include_tokens=True)
    lines = read(infer(folder, tmp_path / "file", **hot))
    capsys.readouterr()
    shown, write = [], sys.stdout.write
    monkeypatch.setattr(sys.stdout, "write", lambda text: (shown.append(text), write(text))[1])
    streamed = read(infer(folder, tmp_path / "stream", stream=True, **hot))
    for line in lines:
        line["aux"]["scores"] = pytest.approx(line["aux"]["scores"], abs=1e-4)
    assert streamed == lines
    heads = [f"[{i}] {text}".rstrip() for i, text in enumerate(TEXTS)]
    told = [f"{a}\n{b['prediction']}\n\n" for a, b in zip(heads, streamed, strict=True)]
    assert capsys.readouterr().out.startswith("".join(told))
    first = shown[1 : shown.index("[1]\n")]
    assert len(first) == lines[0]["aux"]["rounds"] + 1 > 3
    assert "".join(first) == lines[0]["prediction"] + "\n\n"


def test_a_stream_goes_on_where_it_was(folder, tmp_path, monkeypatch, capsys):
    """And what is there is not told again; a run that was not streamed is another one."""
    whole = infer(folder, tmp_path / "whole", stream=True).read_text()
    monkeypatch.setattr(run.Outputs, "join", lambda self: self.final)
    infer(folder, tmp_path / "cut", stream=True)
    monkeypatch.undo()
    sorted((tmp_path / "cut").glob("tmp-*/part_*"))[1].unlink()
    capsys.readouterr()
    assert infer(folder, tmp_path / "cut", stream=True).read_text() == whole
    heads = [x for x in capsys.readouterr().out.splitlines() if x.startswith("[")]
    assert heads == [f"[{i}] {TEXTS[i]}" for i in range(4, 8)]
    with pytest.raises(ValueError, match="holds another run .*stream"):
        infer(folder, tmp_path / "cut")


def test_a_stream_is_of_one_process_and_one_row(folder, tmp_path, monkeypatch):
    """Refused before anything is loaded or written."""
    with pytest.raises(ValueError, match="the mesh has 8 groups of devices for rows; set NUM_PART"):
        infer(folder, tmp_path / "out", stream=True, partitioner=Partitioner(meshes.make(1)))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(
        ValueError, match="one prompt after the other in one process, this run has 2"
    ):
        infer(folder, tmp_path / "out", stream=True)
    assert not (tmp_path / "out").exists()


def test_a_long_prompt_is_shown_by_its_beginning():
    """One line of it, of 72 characters at most."""

    def of(text):
        return streaming._head(Example(3, np.zeros(1, np.int32), {"inputs_pretokenized": text}))

    assert of("a\nb") == "[3] a" and of("") == of("\n") == "[3]"
    assert of("x" * 72) == "[3] " + "x" * 72 and of("x" * 73) == "[3] " + "x" * 71 + "…"


def test_batches_and_shards_change_no_output(folder, tmp_path):
    """Sampled: the random numbers go with the example, not with its place in a batch."""
    hot = dict(sampling=Sampling(1.0), include_aux=False)
    whole = infer(folder, tmp_path / "a", **hot).read_text()
    assert infer(folder, tmp_path / "b", batch_size=2, group=2, **hot).read_text() == whole
    shards = [read(infer(folder, tmp_path / f"s{i}", shard=i, num_shards=2, **hot)) for i in (0, 1)]
    merged = [shards[i % 2][i // 2] for i in range(len(TEXTS))]
    assert merged == [json.loads(line) for line in whole.splitlines()]


def test_an_interrupted_run_goes_on(folder, tmp_path, monkeypatch):
    """What was decoded is not decoded again, and the file is the same."""
    whole = infer(folder, tmp_path / "whole", sampling=Sampling(1.0)).read_text()
    original, seen = run._decode, []

    def dies(*args):
        for i, item in enumerate(original(*args)):
            if i == 6:
                raise KeyboardInterrupt
            seen.append(item[0])
            yield item

    monkeypatch.setattr(run, "_decode", dies)
    with pytest.raises(KeyboardInterrupt):
        infer(folder, tmp_path / "cut", sampling=Sampling(1.0))
    again = []

    def watches(*args):
        for item in original(*args):
            again.append(item[0])
            yield item

    monkeypatch.setattr(run, "_decode", watches)
    assert infer(folder, tmp_path / "cut", sampling=Sampling(1.0)).read_text() == whole
    assert 0 < len(again) < len(TEXTS)
    done = {n for n in range(len(TEXTS)) if n not in again}
    assert done <= set(seen)


def test_a_finished_run_decodes_nothing(folder, tmp_path, monkeypatch):
    first = infer(folder, tmp_path).read_text()
    monkeypatch.setattr(run, "_decode", None)
    assert infer(folder, tmp_path).read_text() == first


def test_a_folder_of_another_run_is_refused(folder, tmp_path):
    infer(folder, tmp_path)
    with pytest.raises(ValueError, match="holds another run .*temperature=1.0"):
        infer(folder, tmp_path, sampling=Sampling(1.0))
    with pytest.raises(ValueError, match="holds another run .*SmallModel.*None"):
        infer(folder, tmp_path, drafter=None)


def test_shards_share_a_folder(folder, tmp_path):
    """Two jobs of one run write beside each other; another run is still refused."""
    both = [infer(folder, tmp_path, shard=i, num_shards=2) for i in (0, 1)]
    assert [path.name[-14:] for path in both] == ["00000-of-00002", "00001-of-00002"]
    assert [len(read(path)) for path in both] == [5, 4]
    with pytest.raises(ValueError, match="holds another run .*num_shards"):
        infer(folder, tmp_path, num_shards=3)


def test_a_changed_reference_is_another_run(folder, tmp_path):
    """Else a score would be made of references that are no longer there."""
    row = {"inputs": "A tool", "targets": "Ein Werkzeug"}
    source = tmp_path / "in.jsonl"
    for targets, fits in (("Ein Werkzeug", True), ("Ein Werkzeug", True), ("Das Werkzeug", False)):
        source.write_text(json.dumps(row | {"targets": targets}) + "\n")
        run_again = lambda: run.infer(  # noqa: E731
            TextFile(str(source)), Checkpoint(str(folder / "target.safetensors")),
            str(tmp_path / "out"), settings=Settings(task_feature_lengths=LENGTHS),
        )  # fmt: skip
        if fits:
            run_again()
        else:
            with pytest.raises(ValueError, match="holds another run .*examples"):
                run_again()


def test_few_examples_left_are_decoded_by_the_same_program(folder, tmp_path, monkeypatch):
    """The batch is the shard's, not what is left of it: scores are equal to the last digit."""
    hot = dict(sampling=Sampling(1.0), batch_size=8, part_size=2)
    whole = infer(folder, tmp_path / "whole", **hot).read_text()
    monkeypatch.setattr(run.Outputs, "join", lambda self: self.final)
    infer(folder, tmp_path / "cut", **hot)
    monkeypatch.undo()
    parts = sorted((tmp_path / "cut").glob("tmp-*/part_*"))
    assert len(parts) == 5
    parts[3].unlink()
    assert infer(folder, tmp_path / "cut", **hot).read_text() == whole


def test_what_cannot_work_is_refused_before_anything_is_written(folder, tmp_path):
    target, source = (
        Checkpoint(str(folder / "target.safetensors")),
        TextFile(str(folder / "in.txt")),
    )
    out, bare = str(tmp_path / "out"), Settings(task_feature_lengths=LENGTHS)
    with pytest.raises(ValueError, match="a stop sequence needs at least one id"):
        run.infer(source, target, out, stop=[[]], settings=bare)
    with pytest.raises(ValueError, match="MinLength forbids id 2, but text ends at id 1"):
        run.infer(
            source, target, out, sampling=Sampling(processors=(MinLength(3, 2),)), settings=bare
        )
    with pytest.raises(ValueError, match="a drafter is named, but not its draft"):
        run.infer(source, target, out, SmallModel, settings=bare)
    with pytest.raises(ValueError, match="9 of 9 inputs have no 'targets' to score against"):
        run.evaluate(lambda: 1 / 0, source)
    assert not (tmp_path / "out").exists()


def test_over_long_inputs_are_refused_before_anything_is_written(folder, tmp_path):
    with pytest.raises(ValueError, match="inputs are longer than 3 ids with EOS"):
        infer(folder, tmp_path / "out", task_feature_lengths={"inputs": 3, "targets": 4})
    assert not (tmp_path / "out").exists()
    cut = {"inputs": 3, "targets": 4}
    infer(folder, tmp_path / "out", task_feature_lengths=cut, truncate=True)


def test_no_length_is_the_empty_answer(folder, tmp_path):
    lines = read(infer(folder, tmp_path, task_feature_lengths={"inputs": 24, "targets": 0}))
    assert [line["prediction"] for line in lines] == [""] * len(TEXTS)
    assert {line["aux"]["length"] for line in lines} == {0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task_feature_lengths": {"inputs": 4}}, "must hold 'inputs' and 'targets'"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"task_feature_lengths": {"inputs": 4, "targets": -1}}, "must not be negative, got -1"),
        ({"shard": 2, "num_shards": 2}, "shard must lie in 0 .. 1, got 2"),
    ],
)
def test_settings_out_of_range_are_one_line(change, message):
    with pytest.raises(ValueError, match=message):
        Settings(**change)


def test_a_draft_of_other_pieces_is_refused(folder, tmp_path):
    params = model(vocab_size=64).init(jax.random.key(0))
    int8.save(tmp_path / "small.safetensors", model(vocab_size=64), params)
    target = Checkpoint(str(folder / "target.safetensors"))
    with pytest.raises(ValueError, match="have 8000 and 64 pieces; they must share a vocabulary"):
        system.load(target, SmallModel, Checkpoint(str(tmp_path / "small.safetensors")))

    class Other(Vocabulary):
        def pieces(self):
            return ("<pad>", "</s>", "<unk>", "else", *super().pieces()[4:])

    same = Checkpoint(str(folder / "draft.safetensors"))
    vocabulary = Other(target.vocabulary().processor)
    object.__setattr__(same, "vocabulary", lambda: vocabulary)
    with pytest.raises(ValueError, match="not the target's: id 3 is 'else'"):
        system.load(target, SmallModel, same)


def test_a_draft_that_shares_the_encoder_decodes_and_must_fit_it(folder, tmp_path):
    """The same text as without it; another width is refused before anything is compiled."""
    config = model().config
    for name, width in (("fits", config.emb_dim), ("other", 24)):
        small = T5(dataclasses.replace(config, num_encoder_layers=0, encoded_dim=width))
        int8.save(tmp_path / f"{name}.safetensors", small, small.init(jax.random.key(2)))
    target = Checkpoint(str(folder / "target.safetensors"))
    with pytest.raises(ValueError, match="width 24 .*the target's has 16"):
        system.load(target, SmallModel, Checkpoint(str(tmp_path / "other.safetensors")))
    source, fits = TextFile(str(folder / "in.txt")), Checkpoint(str(tmp_path / "fits.safetensors"))
    settings = Settings(task_feature_lengths=LENGTHS, batch_size=4)
    out = run.infer(source, target, str(tmp_path / "out"), SmallModel, fits, settings=settings)
    plain = read(infer(folder, tmp_path / "plain", drafter=None))
    assert [line["prediction"] for line in read(out)] == [line["prediction"] for line in plain]
    assert sum(line["aux"]["drafted"] for line in read(out)) > 0


def test_an_ngram_drafts_without_changing_the_text(folder, tmp_path):
    """A table counted on token arrays, as configs/methods/ngram.gin makes it."""
    rng = np.random.default_rng(0)
    texts = [rng.integers(2, 8000, size=n).astype(np.int32) for n in (3, 5, 4)]
    save_pairs(tmp_path / "counted.npz", TokenPairs(texts, texts))
    plain = read(infer(folder, tmp_path / "plain", drafter=None))
    draft = system.Counts(str(tmp_path / "counted.npz"), 1, 8000)
    out = run.infer(
        TextFile(str(folder / "in.txt")), Checkpoint(str(folder / "target.safetensors")),
        str(tmp_path / "ngram"), functools.partial(Ngram, 1), draft,
        settings=Settings(task_feature_lengths=LENGTHS, batch_size=4),
    )  # fmt: skip
    assert [line["prediction"] for line in read(out)] == [line["prediction"] for line in plain]
    assert sum(line["aux"]["drafted"] for line in read(out)) > 0
    with pytest.raises(ValueError, match="the order must be 1 or 2, got 3"):
        system.Counts(str(tmp_path / "counted.npz"), 3, 8000).load()
    target = Checkpoint(str(folder / "target.safetensors"))
    with pytest.raises(ValueError, match="the table has 9000 pieces, the target 8000"):
        system.load(target, Ngram, system.Counts(str(tmp_path / "counted.npz"), 1, 9000))


def datastore_of(folder, vocabulary, parts):
    """A datastore of ids of which the tiny target says some."""
    rng = np.random.default_rng(0)
    rows = [rng.integers(2, 8000, size=40) for _ in range(4)]
    np.savez(folder / "rows.npz", tokens=np.concatenate([[*row, 1] for row in rows]))
    sources = [datastore.Tokens(str(folder / "rows.npz"))]
    nothing = prompts.Excluded(frozenset())
    out = folder / f"store{parts}"
    datastore.build(out, sources, vocabulary, nothing, parts=parts, quiet=True)
    return system.Datastore(str(out))


def test_a_datastore_drafts_without_changing_the_text(folder, tmp_path):
    """As configs/methods/rest.gin makes it; one of another vocabulary is refused."""
    target = Checkpoint(str(folder / "target.safetensors"))
    plain = read(infer(folder, tmp_path / "plain", drafter=None))
    store = datastore_of(tmp_path, target.vocabulary(), 1)
    out = run.infer(
        TextFile(str(folder / "in.txt")), target, str(tmp_path / "rest"),
        functools.partial(Rest, 4, 1, 4, 2, 4), store,
        settings=Settings(task_feature_lengths=LENGTHS, batch_size=4),
    )  # fmt: skip
    assert [line["prediction"] for line in read(out)] == [line["prediction"] for line in plain]
    assert sum(line["aux"]["drafted"] for line in read(out)) > 0
    other = datastore_of(tmp_path, Bytes(extra_ids=7741), 2)
    with pytest.raises(ValueError, match="another vocabulary's: .* 8000 pieces, .* has 8000"):
        system.load(target, Rest, other)
    with pytest.raises(ValueError, match="no datastore at"):
        system.load(target, Rest, system.Datastore(str(tmp_path / "none")))


def test_a_datastore_s_parts_are_split_over_the_model_axis(folder, tmp_path):
    vocabulary = Checkpoint(str(folder / "target.safetensors")).vocabulary()
    one, two = (datastore_of(tmp_path, vocabulary, parts) for parts in (1, 2))
    mesh = Partitioner(meshes.make(2))
    shapes = lambda store: {s.data.shape[0] for s in store.tokens.addressable_shards}  # noqa: E731
    assert two.load()[1].tokens.shape[0] == 2
    assert shapes(two.load(mesh)[1]) == {1}
    assert shapes(dataclasses.replace(two, whole=True).load(mesh)[1]) == {2}
    assert one.load(mesh)[1].tokens.sharding.is_fully_replicated
    with pytest.raises(
        ValueError, match="2 model partitions do not divide the datastore's 1 parts"
    ):
        dataclasses.replace(one, whole=False).load(mesh)


def test_drafters_that_copy_need_no_draft(folder, tmp_path):
    """As configs/methods/{prompt_lookup,trie}.gin make them; a trie may know texts beforehand."""
    target = Checkpoint(str(folder / "target.safetensors"))
    plain = read(infer(folder, tmp_path / "plain", drafter=None))
    said = [target.vocabulary().encode(line["prediction"]) for line in plain]
    save_pairs(tmp_path / "said.npz", TokenPairs(said, said))
    for i, (drafter, draft) in enumerate((
        (functools.partial(PromptLookup, copy=3), system.Texts()),
        (functools.partial(Trie, depth=3, budget=6), system.Texts(str(tmp_path / "said.npz"), 64)),
    )):  # fmt: skip
        out = run.infer(
            TextFile(str(folder / "in.txt")), target, str(tmp_path / str(i)), drafter, draft,
            settings=Settings(task_feature_lengths=LENGTHS, batch_size=4),
        )  # fmt: skip
        assert [line["prediction"] for line in read(out)] == [line["prediction"] for line in plain]
        assert sum(line["aux"]["drafted"] for line in read(out)) > 0
    loaded = system.load(target, drafter, draft)
    assert loaded.drafter.eos_id == loaded.target.eos_id and loaded.params.draft.tokens.shape == (
        64,
    )
    save_pairs(tmp_path / "other.npz", TokenPairs([np.asarray([3])], [np.asarray([3, 9000])]))
    with pytest.raises(ValueError, match="has ids up to 9000, the vocabulary 8000 pieces"):
        system.load(target, Trie, system.Texts(str(tmp_path / "other.npz")))


def test_a_draft_may_have_a_drafter_of_its_own(folder, tmp_path):
    """As configs/methods/staged.gin makes it, and a stage deeper; all say what plain decoding says."""
    target = Checkpoint(str(folder / "target.safetensors"))
    draft = Checkpoint(str(folder / "draft.safetensors"))
    plain = read(infer(folder, tmp_path / "plain", drafter=None))
    copies = functools.partial(PromptLookup, copy=2)
    staged = functools.partial(Staged, gamma=2)
    out = run.infer(
        TextFile(str(folder / "in.txt")), target, str(tmp_path / "staged"), staged,
        system.Stages(draft, copies, system.Texts()),
        settings=Settings(task_feature_lengths=LENGTHS, batch_size=4),
    )  # fmt: skip
    assert [line["prediction"] for line in read(out)] == [line["prediction"] for line in plain]
    assert sum(line["aux"]["drafted"] for line in read(out)) > 0
    deeper = system.Stages(draft, staged, system.Stages(draft, SmallModel, draft))
    loaded = system.load(target, staged, deeper)
    assert loaded.drafter.inner.inner == SmallModel(loaded.drafter.inner.model)
    assert loaded.params.draft.draft.draft is not None
    with pytest.raises(ValueError, match="no checkpoint"):
        system.load(target, staged, system.Stages(Checkpoint("/no/such"), copies, system.Texts()))


def test_stages_hand_on_the_target_s_encoder_output():
    """The shipped draft has no encoder: what drafts for it reads what it reads itself."""
    assets = pathlib.Path("specjax/assets/debian").resolve()
    target, draft = (Checkpoint(str(assets / f"{n}.int8.safetensors")) for n in ("target", "draft"))
    staged = functools.partial(Staged, gamma=1)
    loaded = system.load(target, staged, system.Stages(draft, SmallModel, draft))
    contest = bench.Contest(
        "pair", loaded.target, {}, Params(loaded.params.target, {}), loaded.vocabulary,
        methods={"two": [staged]},
    )  # fmt: skip
    two = {"two": system.Stages(draft, SmallModel, draft)}
    made = bench._with_drafts(contest, two)
    assert made.methods["two"] == [loaded.drafter]
    assert jax.tree.structure(made.params.draft["two"]) == jax.tree.structure(loaded.params.draft)
    with pytest.raises(
        ValueError, match="two: heads, stages and several models draft by a drafter"
    ):
        bench._with_drafts(contest._replace(methods={}), two)
    prompt = Prompt(*map(jnp.asarray, loaded.vocabulary.batch(["summarize: a library"], 8)))
    take = dict(max_decode_len=4)
    plain = generate(loaded.target, loaded.params.target, prompt, **take)
    out = generate(
        loaded.target, loaded.params.target, prompt, drafter=loaded.drafter,
        draft_params=loaded.params.draft, **take,
    )  # fmt: skip
    np.testing.assert_array_equal(out.tokens, plain.tokens)


def test_a_drafter_without_weights_names_nothing(folder):
    """As configs/methods/lookahead.gin does."""
    target = Checkpoint(str(folder / "target.safetensors"))
    loaded = system.load(target, Lookahead, system.Nothing())
    assert loaded.drafter == Lookahead() and loaded.params.draft is None


def test_a_missing_checkpoint_or_vocabulary_is_one_line(folder, tmp_path):
    with pytest.raises(ValueError, match="no checkpoint at /no/such.safetensors"):
        system.load(Checkpoint("/no/such.safetensors"))
    with pytest.raises(ValueError, match="no checkpoint at .*looked for a T5X folder"):
        system.load(Checkpoint(str(tmp_path)))
    (tmp_path / "bare.safetensors").write_bytes((folder / "target.safetensors").read_bytes())
    with pytest.raises(ValueError, match="no vocabulary .* set vocabulary_path"):
        system.load(Checkpoint(str(tmp_path / "bare.safetensors")))


def test_eval_scores_what_infer_wrote(tmp_path):
    """Through the command line's own configuration, with references."""
    file = tmp_path / "metrics" / "in-metrics.jsonl"
    out = tmp_path / "metrics"
    out.mkdir()
    texts = ("ein Haus am See", "zwei Boote auf dem See")
    pairs = [{"inputs_pretokenized": "a", "targets_pretokenized": text} for text in texts]
    lines = [{"inputs": p, "prediction": t} for p, t in zip(pairs, texts, strict=True)]
    (out / "predict").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "in.jsonl").write_text(
        "".join(json.dumps({"inputs": "a", "targets": text}) + "\n" for text in texts)
    )
    source = TextFile(str(tmp_path / "in.jsonl"))
    found = run.evaluate(lambda: out / "predict", source)
    assert found["bleu"] == pytest.approx(100)
    assert json.loads(file.read_text())["examples"] == 2
    with pytest.raises(ValueError, match="num_shards must be 1"):
        run.evaluate(lambda: out / "predict", source, Settings(num_shards=2))


@pytest.mark.long
def test_infer_killed_at_random_moments_completes(folder, tmp_path):
    """SIGKILL, several times: the same file, nothing lost or doubled."""
    text = "\n".join(f"package number {i} of the archive" for i in range(200))
    (tmp_path / "many.txt").write_text(text)
    command = [
        sys.executable, "-m", "specjax.main", "--run_mode=infer", "--gin_file=configs/runs/infer.gin",
        "--gin_file=configs/methods/small_model.gin", "--gin.SOURCE=@sources.TextFile()",
        f"--gin.sources.TextFile.path='{tmp_path / 'many.txt'}'", "--gin.MIXTURE_OR_TASK_NAME='many'",
        f"--gin.CHECKPOINT_PATH='{folder / 'target.safetensors'}'", "--gin.TEMPERATURE=1.0",
        f"--gin.DRAFT_CHECKPOINT_PATH='{folder / 'draft.safetensors'}'", "--gin.BATCH_SIZE=4",
        "--gin.TASK_FEATURE_LENGTHS={'inputs': 32, 'targets': 96}", "--gin.run.Settings.part_size=8",
    ]  # fmt: skip
    start = lambda out: subprocess.Popen(  # noqa: E731
        [*command, f"--gin.INFER_OUTPUT_DIR='{tmp_path / out}'"],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert start("whole").wait() == 0
    parts, rng = tmp_path / "cut" / "tmp-many-00000-of-00001", random.Random(0)
    killed = 0
    for wanted in (2, 9, 15):
        process = start("cut")
        while process.poll() is None and (
            not parts.exists() or len(list(parts.glob("part_*"))) < wanted
        ):
            time.sleep(0.01)
        time.sleep(rng.random() / 10)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            killed += 1
        process.wait()
    assert killed >= 1
    assert start("cut").wait() == 0
    name = "many-predict.jsonl-00000-of-00001"
    assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
