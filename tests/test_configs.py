"""Every gin file parses, and says what it should."""

import ast
import math
import pathlib

import gin
import jax
import pytest

from specjax import config
from specjax.drafters.assisted import Assisted, Schedule

ROOT = pathlib.Path(__file__).resolve().parents[1] / "configs"
# Millions of parameters, as the models' authors give them (rounded there).
SIZES = {
    "t5_1_1_small": 77, "t5_1_1_base": 248, "t5_1_1_large": 783, "t5_1_1_xl": 2850,
    "t5_1_1_xxl": 11135, "t5_1_0_small": 60.5, "t5_1_0_base": 223, "t5_1_0_large": 738,
    "t5_1_0_3b": 2852, "t5_1_0_11b": 11307, "mt5_small": 300, "mt5_base": 582, "mt5_large": 1230,
    "mt5_xl": 3743, "mt5_xxl": 12921,
}  # fmt: skip
REQUIRED = {
    "runs/infer.gin": "CHECKPOINT_PATH INFER_OUTPUT_DIR MIXTURE_OR_TASK_NAME",
    "runs/aot.gin": "TARGET TOPOLOGY",
    "runs/eval.gin": "CHECKPOINT_PATH EVAL_OUTPUT_DIR MIXTURE_OR_TASK_NAME",
    "examples/smollm2_infer.gin": "INFER_OUTPUT_DIR",
    "examples/smollm2_bench.gin": "SPEC_BENCH",
    "examples/smollm2_bench_long.gin": "SPEC_BENCH",
    "examples/smollm2_methods.gin": "SPEC_BENCH DATASTORE",
    "examples/debian_methods.gin": "DATASTORE",
    "examples/smollm2_heads.gin": "SPEC_BENCH",
    "papers/leviathan2022_table2_ende.gin": "TARGET_CHECKPOINT_PATH DRAFT_SMALL_CHECKPOINT_PATH "
    "DRAFT_BASE_CHECKPOINT_PATH DRAFT_LARGE_CHECKPOINT_PATH VOCABULARY_PATH OUTPUT_DIR",
}
# Read only through files that include them.
PARTS = (
    "papers/leviathan2022_table2.gin",
    "papers/leviathan2022_finetune_ende.gin",
    "papers/leviathan2022_finetune_cnndm.gin",
    "runs/finetune.gin",
    "runs/compared.gin",
    "tpu/models.gin",
    "tpu/decoders.gin",
    "runs/aot_train.gin",
    "train/debian_heads.gin",
    "train/smollm2_heads.gin",
)
FINETUNE = "MODEL_DIR INITIAL_CHECKPOINT_PATH MIXTURE_OR_TASK_NAME"
for _task in ("ende", "cnndm"):
    for _size in ("small", "base", "large", "xxl"):
        REQUIRED[f"papers/leviathan2022_finetune_{_task}_{_size}.gin"] = "MODEL_DIR"
REQUIRED["papers/leviathan2022_table2_cnndm.gin"] = REQUIRED["papers/leviathan2022_table2_ende.gin"]


def files(folder: str) -> list[str]:
    return sorted(str(p.relative_to(ROOT)) for p in (ROOT / folder).glob("*.gin"))


@pytest.mark.parametrize("name", SIZES)
def test_models_have_their_published_size(name):
    config.parse([f"configs/models/{name}.gin"])
    leaves = jax.tree.leaves(config.macro("MODEL").abstract())
    millions = sum(math.prod(leaf.shape) for leaf in leaves) / 1e6
    assert millions == pytest.approx(SIZES[name], rel=0.005)


@pytest.mark.parametrize("name", [n for n in files("models") if n.startswith("models/flan")])
def test_flan_models_are_v1_1_models(name):
    config.parse([f"configs/{name}"])
    flan = config.macro("MODEL")
    config.parse([f"configs/{name.replace('flan_t5', 't5_1_1')}"])
    assert flan == config.macro("MODEL")


@pytest.mark.parametrize(
    "name", [n for d in ("runs", "papers", "examples", "train", "tpu") for n in files(d)]
)
def test_what_runs_parses_once_its_required_macros_are_set(name):
    """And says which one is missing otherwise."""
    macros = REQUIRED.get(name, "").split()
    bindings = [f"{macro}='x'" for macro in macros]
    if name in ("runs/infer.gin", "runs/eval.gin"):
        bindings.append("TASK_FEATURE_LENGTHS={'inputs': 8, 'targets': 8}")
    if name in PARTS:
        return  # included by others
    config.parse([f"configs/{name}"], bindings)
    for missing in macros:
        with pytest.raises(ValueError, match="not subsequently overridden"):
            config.parse([f"configs/{name}"], [b for b in bindings if not b.startswith(missing)])


def test_a_slice_s_file_names_models_and_slice():
    """What the file is called is what it says."""
    config.parse(["configs/tpu/t5_xxl_base_v4_8.gin"])
    sizes = {name: config.macro(name).config.emb_dim for name in ("TARGET", "DRAFT")}
    assert sizes == {"TARGET": 4096, "DRAFT": 768}
    assert (config.macro("TOPOLOGY"), config.macro("NUM_PARTITIONS")) == ("v4-8", 4)
    for name in ("small", "base", "large", "xxl"):
        config.parse(["configs/tpu/models.gin"])
        macro = {"xxl": "TARGET"}.get(name, name.upper())
        ours = config.macro(macro)
        config.parse([f"configs/models/t5_1_1_{name}.gin"], ["DTYPE='bfloat16'"])
        assert ours == config.macro("MODEL")


# Billions of parameters, as the models' authors give them (rounded there).
DECODERS = {
    "VICUNA_7B": 6.74, "VICUNA_13B": 13.0, "VICUNA_33B": 32.5, "LLAMA_65B": 65.2, "LLAMA2_70B": 69.0,
    "LLAMA_68M": 0.068, "TINYLLAMA": 1.1, "OPT_30B": 30.0, "OPT_125M": 0.125,
}  # fmt: skip


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_for_tpus_have_their_published_size(name):
    config.parse(["configs/tpu/decoders.gin"])
    leaves = jax.tree.leaves(config.macro(name).abstract())
    billions = sum(math.prod(leaf.shape) for leaf in leaves) / 1e9
    assert billions == pytest.approx(DECODERS[name], rel=0.02)


def test_methods_add_a_drafter_to_a_run():
    lengths = "TASK_FEATURE_LENGTHS={'inputs': 8, 'targets': 8}"
    bindings = [f"{m}='x'" for m in REQUIRED["runs/infer.gin"].split()]
    more = ["DRAFT_CHECKPOINT_PATH='y'", "GAMMA=4"]
    names = ["configs/runs/infer.gin", "configs/methods/small_model.gin"]
    config.parse(names, [*bindings, *more, lengths])
    assert gin.query_parameter("small_model.SmallModel.gamma").scoped_configurable_fn() == 4
    assert "draft/system.Checkpoint" in gin.config_str()
    names[1] = "configs/methods/assisted.gin"
    config.parse(names, [*bindings, *more, "START=2", "CONFIDENCE=None", lengths])
    made = gin.query_parameter("infer.drafter").scoped_configurable_fn(model=None)
    assert made == Assisted(None, 4, Schedule(2), None)


@pytest.mark.parametrize(
    ("binding", "message"),
    [
        ("TEMPRATURE=1.0", "no gin file knows TEMPRATURE"),
        ("sources.TextFle.path='x'", "TextFle"),
        ("CHECKPOINT_PATH=/models/x", "(?i)syntax|malformed|unable|parse"),
        ("nonsense.x=3", "No configurable matching 'nonsense'"),
        ("sources.TextFile.no_such=3", "no_such"),
    ],
)
def test_a_wrong_binding_is_one_clear_error(binding, message):
    """A typing error must neither pass silently nor end in a traceback of gin's."""
    bindings = [f"{m}='x'" for m in REQUIRED["runs/infer.gin"].split()]
    lengths = "TASK_FEATURE_LENGTHS={'inputs': 8, 'targets': 8}"
    with pytest.raises(ValueError, match=message):
        config.parse(["configs/runs/infer.gin"], [*bindings, lengths, binding])


def test_an_ngram_and_a_verifier_are_methods_too():
    bindings = [f"{m}='x'" for m in REQUIRED["runs/infer.gin"].split()]
    more = ["TASK_FEATURE_LENGTHS={'inputs': 8, 'targets': 8}", "COUNTS_PATH='y'", "VOCAB_SIZE=9"]
    names = [
        f"configs/{n}.gin" for n in ("runs/infer", "methods/ngram", "methods/block_verification")
    ]
    config.parse(names, [*bindings, *more])
    assert "verify.BlockVerification()" in gin.config_str()
    assert "system.Counts()" in gin.config_str()


def test_a_datastore_is_a_method_and_must_be_named():
    bindings = [f"{m}='x'" for m in REQUIRED["runs/infer.gin"].split()]
    bindings += ["TASK_FEATURE_LENGTHS={'inputs': 8, 'targets': 8}", "NODES=8", "DEPTH=8"]
    names = ["configs/runs/infer.gin", "configs/methods/rest.gin"]
    config.parse(names, [*bindings, "DATASTORE='store'"])
    assert gin.query_parameter("rest.Rest.nodes").scoped_configurable_fn() == 8
    assert "system.Datastore()" in gin.config_str()
    with pytest.raises(ValueError, match="not subsequently overridden"):
        config.parse(names, bindings)


@pytest.mark.parametrize("name", ["prompt_lookup.PromptLookup", "trie.Trie"])
def test_drafters_that_copy_are_methods_and_need_no_draft(name):
    bindings = [f"{m}='x'" for m in REQUIRED["runs/infer.gin"].split()]
    bindings += ["TASK_FEATURE_LENGTHS={'inputs': 8, 'targets': 8}", "MAX_MATCH=4"]
    names = ["configs/runs/infer.gin", f"configs/methods/{name.split('.')[0]}.gin"]
    config.parse(names, bindings)
    assert gin.query_parameter(f"{name}.max_match").scoped_configurable_fn() == 4
    drafter = gin.query_parameter("run.infer.drafter").scoped_configurable_fn(eos_id=7)
    assert (drafter.max_match, drafter.eos_id) == (4, 7)
    assert drafter == type(drafter)(
        max_match=4, eos_id=7
    )  # the file's other values are the defaults
    assert gin.query_parameter("run.infer.draft").scoped_configurable_fn().path is None


def test_staged_drafts_may_be_drafted_for_by_a_smaller_model():
    bindings = [f"{m}='x'" for m in REQUIRED["runs/infer.gin"].split()]
    bindings += ["TASK_FEATURE_LENGTHS={'inputs': 8, 'targets': 8}", "DRAFT_CHECKPOINT_PATH='y'"]
    names = ["configs/runs/infer.gin", "configs/methods/staged.gin"]
    config.parse(names, bindings)
    stages = gin.query_parameter("run.infer.draft").scoped_configurable_fn()
    assert stages.draft.path == "y" and stages.drafter(eos_id=1).copy == 3
    smaller = ["INNER=@small_model.SmallModel", "INNER_DRAFT=@inner/system.Checkpoint()"]
    config.parse(names, [*bindings, *smaller, "inner/system.Checkpoint.path='z'"])
    stages = gin.query_parameter("run.infer.draft").scoped_configurable_fn()
    assert stages.inner.path == "z" and stages.drafter is not None


def test_lookahead_is_a_method_without_a_draft():
    bindings = [f"{m}='x'" for m in REQUIRED["runs/infer.gin"].split()]
    more = ["TASK_FEATURE_LENGTHS={'inputs': 8, 'targets': 8}", "WINDOW=3", "FOLLOW=True"]
    config.parse(["configs/runs/infer.gin", "configs/methods/lookahead.gin"], [*bindings, *more])
    assert gin.query_parameter("lookahead.Lookahead.window").scoped_configurable_fn() == 3
    assert "system.Nothing()" in gin.config_str()


def test_table_2_compares_three_drafts_on_the_paper_s_task():
    name = "papers/leviathan2022_table2_cnndm.gin"
    config.parse([f"configs/{name}"], [f"{m}='x'" for m in REQUIRED[name].split()])
    assert sorted(gin.query_parameter("run.bench.drafts")) == ["T5-base", "T5-large", "T5-small"]
    assert config.macro("MIXTURE_OR_TASK_NAME") == "cnn_dailymail_v002"


def test_fine_tuning_needs_a_model_and_says_so():
    bindings = [f"{macro}='x'" for macro in FINETUNE.split()]
    bindings += ["TASK_FEATURE_LENGTHS={'inputs': 8, 'targets': 8}", "TRAIN_STEPS=4"]
    config.parse(["configs/models/t5_1_1_base.gin", "configs/runs/finetune.gin"], bindings)
    with pytest.raises(ValueError, match="MODEL"):
        config.parse(["configs/runs/finetune.gin"], bindings)


@pytest.mark.parametrize("size", ["small", "base", "large", "xxl"])
def test_the_papers_models_are_fine_tuned_on_the_papers_tasks(size):
    """Target and drafts of table 2: v1.1, bfloat16 activations, each task under T5's name."""
    for task, name in (("ende", "wmt_t2t_ende_v003"), ("cnndm", "cnn_dailymail_v002")):
        config.parse(
            [f"configs/papers/leviathan2022_finetune_{task}_{size}.gin"], ["MODEL_DIR='x'"]
        )
        assert config.macro("MIXTURE_OR_TASK_NAME") == name
        model = config.macro("MODEL").unrolled  # the large ones are scanned
        config.parse([f"configs/models/t5_1_1_{size}.gin"], ["DTYPE='bfloat16'"])
        assert model == config.macro("MODEL")


@pytest.mark.parametrize("name", ["medusa.MedusaHeads", "eagle.EagleHead"])
def test_heads_are_methods_and_must_be_named(name):
    bindings = [f"{m}='x'" for m in REQUIRED["runs/infer.gin"].split()]
    bindings += ["TASK_FEATURE_LENGTHS={'inputs': 8, 'targets': 8}", "WIDTHS=(2, 1)", "DRAWS=True"]
    names = ["configs/runs/infer.gin", f"configs/methods/{name.split('.')[0]}.gin"]
    config.parse(names, [*bindings, "HEADS_PATH='y'"])
    assert gin.query_parameter(f"{name}.widths").scoped_configurable_fn() == (2, 1)
    assert "system.Heads()" in gin.config_str()
    with pytest.raises(ValueError, match="not subsequently overridden"):
        config.parse(names, bindings)


def test_a_growing_tree_and_lossy_rules_are_methods_too():
    bindings = [f"{m}='x'" for m in REQUIRED["runs/infer.gin"].split()]
    more = [
        "TASK_FEATURE_LENGTHS={'inputs': 8, 'targets': 8}",
        "HEADS_PATH='y'",
        "DEPTH=4",
        "NODES=7",
    ]
    rules = ("typical", "EPSILON=0.2"), ("top_k", "K=3"), ("lenient", "FORM='square'")
    for rule, setting in rules:
        names = [f"configs/{n}.gin" for n in ("runs/infer", "methods/eagle2", f"methods/{rule}")]
        config.parse(names, [*bindings, *more, setting])
        made = gin.query_parameter("run.infer.drafter").scoped_configurable_fn(model=None)
        assert (made.depth, made.expand, made.nodes) == (4, 10, 7)
        chosen = gin.query_parameter("run.infer.verifier").scoped_configurable_fn()
        assert (
            not chosen.lossless and ast.literal_eval(setting.split("=")[1]) in vars(chosen).values()
        )


def test_a_binding_may_name_what_no_file_mentions():
    """All of a module that the files (or what they include) import, and settings of it."""
    train = "configs/train/debian_distill.gin"
    for name in ("ForwardKL", "ReverseKL", "JensenShannon", "TotalVariation"):
        config.parse([train], [f"DIVERGENCE=@divergences.{name}()", "OUTPUT_DIR='a.b/c.d'"])
        assert type(config.macro("DIVERGENCE")).__name__ == name
    config.parse(
        [train],
        ["DIVERGENCE=@x/divergences.JensenShannon()", "x/divergences.JensenShannon.beta=.25"],
    )
    assert config.macro("DIVERGENCE").beta == 0.25
    mentioned = ["loop.train.evaluation_period=1", "StudentBatches.seed=1", "OUTPUT_DIR='x'"]
    config.parse([train], mentioned)  # whatever files mention goes by any of its names, as before
    with pytest.raises(ValueError, match="divergences.Unknown"):
        config.parse([train], ["DIVERGENCE=@divergences.Unknown()"])
