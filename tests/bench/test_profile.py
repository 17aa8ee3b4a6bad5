"""Where a round's time goes: scopes of a compiled program, and a profile of a tiny decode."""

import pytest

from specjax.bench import profile
from specjax.bench.harness import Method, Runner
from specjax.bench.profile import Parts
from specjax.decode.interfaces import Params
from specjax.drafters.small_model import SmallModel
from tests import toys

HLO = """
  %fusion.1 = f32[1] fusion(%a), metadata={op_name="jit(run)/while/body/draft/while/body/add" id=1}
  ROOT %dot.2 = f32[1] dot(%a), metadata={op_name="jit(run)/while/body/verify/dot_general"}
  %copy.3 = f32[1] copy(%a), metadata={op_name="jit(run)/while/body/commit/drafty"}
  %copy.4 = f32[1] copy(%a), metadata={op_name="jit(run)/drafting/x"}
  %copy.5 = f32[1] copy(%a)
"""


def test_an_instruction_stands_in_the_scope_it_was_written_in():
    assert profile.scopes(HLO) == {
        "fusion.1": "draft",
        "dot.2": "verify",
        "copy.3": "commit",
        "copy.4": "rest",
    }


def test_seconds_are_summed_by_scope_and_containers_are_not_counted_twice():
    ran = [("fusion.1", 1.0), ("fusion.1", 2.0), ("dot.2", 4.0), ("copy.5", 8.0), ("while.9", 99.0)]
    found = profile.by_scope(ran, profile.scopes(HLO))
    assert found == {"draft": 3.0, "verify": 4.0, "commit": 0.0, "rest": 8.0}


def test_c_is_a_drafted_token_over_a_plain_step():
    assert profile.c(Parts(0.6, 2.0, 0.1, 0.2), Parts(0.0, 0.0, 0.0, 2.0), 3) == pytest.approx(0.1)


def test_a_folder_without_a_trace_is_one_clear_line(tmp_path):
    with pytest.raises(ValueError, match=f"no trace in {tmp_path}"):
        profile.events(tmp_path)


def test_rounds_are_profiled_and_their_traces_stay(tmp_path):
    """A plain step stands in no scope; a speculative round has time in each."""
    params, draft = toys.pair_of(0)
    methods = [Method("plain"), Method("small model", 2, SmallModel(toys.T5, 2))]
    both, ask = Params(params, {"small model": draft}), toys.ask(0)
    runner = Runner(toys.T5, toys.STEPS)
    found = profile.profile(runner, methods, both, ask, tmp_path, count=4)
    plain, drafted = (found[m] for m in methods)
    assert plain.rest > 0 and plain.draft == plain.verify == plain.commit == 0
    assert min(drafted.draft, drafted.verify, drafted.commit) > 0
    assert drafted.total == pytest.approx(sum(drafted))
    assert list((tmp_path / "small-model-2").glob("**/*.trace.json.gz"))
