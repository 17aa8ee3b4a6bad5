"""What drafters have in common whose state a round does not change."""

from jaxtyping import Array, Int

from specjax.decode.interfaces import Outcome, Params


class Stateless:
    """The half of the `Drafter` protocol that has nothing to do: the text says all there is to know."""

    taps = ()
    reach = 0

    def observe(self, params: Params, state, outcome: Outcome):
        del params, outcome
        return state

    def rewind(self, state, length: Int[Array, "B"]):
        del length
        return state
