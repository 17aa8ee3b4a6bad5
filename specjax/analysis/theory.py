"""What speculative decoding should gain, by the formulas of Leviathan et al.

Symbols, as in the paper: alpha, the acceptance rate, taken as equal and independent at
every position; gamma, drafted tokens per block; c, the time of a draft step over the time
of a plain target step. One symbol is ours: v, the time of a verify block over the time of
a plain step. The paper takes it as 1, which holds while decoding is bound by memory.

Arguments may be numbers or NumPy arrays that broadcast; numbers give a float back.

References:
    Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding",
    ICML 2023, arXiv:2211.17192.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

# The bisection halves [0, 1] this often, which is as fine as float64 gets near 1.
_HALVINGS = 53


def expected_tokens(alpha: ArrayLike, gamma: ArrayLike) -> float | np.ndarray:
    """Returns the expected tokens per iteration, E = (1 - α^(γ+1)) / (1 - α).

    Args:
        alpha: acceptance rate, within [0, 1]; at 1 all γ + 1 tokens are emitted.
        gamma: drafted tokens per block, a whole number from 0.

    Returns:
        E, between 1 and γ + 1.

    Raises:
        ValueError: an argument is out of its range.

    References:
        Section 3.1, Eq. 1.
    """
    alpha, gamma = _rate("alpha", alpha), _count("gamma", gamma)
    certain = alpha == 1
    # expm1 keeps every digit where α is close to 1; α = 0 gives log -inf, as it should.
    with np.errstate(divide="ignore"):
        rejected = -np.expm1((gamma + 1) * np.log(alpha))
    return _plain(np.where(certain, gamma + 1.0, rejected / np.where(certain, 1, 1 - alpha)))


def speedup_from_block_efficiency(
    tau: ArrayLike, gamma: ArrayLike, c: ArrayLike, v: ArrayLike = 1.0
) -> float | np.ndarray:
    """Returns the speed-up that a measured block efficiency implies, τ / (γ c + v).

    Args:
        tau: block efficiency, tokens emitted per round, bonus token included.
        gamma: drafted tokens per block.
        c: draft step time over plain target step time.
        v: verify block time over plain target step time.

    Returns:
        Plain decoding's time per token over speculative decoding's.

    Raises:
        ValueError: an argument is out of its range.

    References:
        Theorem 3.8's proof, with E replaced by τ and the verify block's 1 by v.
    """
    tau, c, v = _at_least_zero("tau", tau), _at_least_zero("c", c), _positive("v", v)
    return _plain(tau / (_count("gamma", gamma) * c + v))


def walltime_factor(
    alpha: ArrayLike, gamma: ArrayLike, c: ArrayLike, v: ArrayLike = 1.0
) -> float | np.ndarray:
    """Returns the wall-time improvement factor, S = E / (γ c + v).

    Args:
        alpha: acceptance rate, within [0, 1].
        gamma: drafted tokens per block.
        c: draft step time over plain target step time.
        v: verify block time over plain target step time; the paper's is 1.

    Returns:
        S, above 1 where speculative decoding is faster.

    Raises:
        ValueError: an argument is out of its range.

    References:
        Theorem 3.8.
    """
    return speedup_from_block_efficiency(expected_tokens(alpha, gamma), gamma, c, v)


def operations_factor(alpha: ArrayLike, gamma: ArrayLike, c_hat: ArrayLike) -> float | np.ndarray:
    """Returns the growth of arithmetic operations, (γ ĉ + γ + 1) / E.

    Args:
        alpha: acceptance rate, within [0, 1].
        gamma: drafted tokens per block.
        c_hat: the draft's operations per token over the target's.

    Returns:
        Operations per emitted token over plain decoding's, never below 1.

    Raises:
        ValueError: an argument is out of its range.

    References:
        Theorem 3.11.
    """
    drafted = _count("gamma", gamma)
    c_hat = _at_least_zero("c_hat", c_hat)
    return _plain((drafted * c_hat + drafted + 1) / expected_tokens(alpha, gamma))


def guaranteed_factor(alpha: ArrayLike, c: ArrayLike) -> float | np.ndarray:
    """Returns a lower bound of the best γ's wall-time factor, (1 + α) / (1 + c).

    Args:
        alpha: acceptance rate, within [0, 1].
        c: draft step time over plain target step time.

    Returns:
        The bound; 1, which plain decoding reaches, where α ≤ c.

    Raises:
        ValueError: an argument is out of its range.

    References:
        Corollary 3.9.
    """
    alpha, c = _rate("alpha", alpha), _at_least_zero("c", c)
    return _plain(np.maximum(1.0, (1 + alpha) / (1 + c)))


def free_draft_limit(alpha: ArrayLike) -> float | np.ndarray:
    """Returns the factor of a draft that costs nothing, at unbounded γ: 1 / (1 - α).

    Args:
        alpha: acceptance rate, within [0, 1].

    Returns:
        The limit; infinity at α = 1.

    Raises:
        ValueError: alpha is out of its range.

    References:
        Section 3.6; section 3.5 has the same limit for an oracle that knows γ.
    """
    with np.errstate(divide="ignore"):
        return _plain(1 / (1 - _rate("alpha", alpha)))


def optimal_gamma(alpha: float, c: float, v: float = 1.0, max_gamma: int = 64) -> int:
    """Returns the γ with the largest wall-time factor, the smallest one among equals.

    Args:
        alpha: acceptance rate, within [0, 1].
        c: draft step time over plain target step time.
        v: verify block time over plain target step time, the same for every γ.
        max_gamma: the largest γ to try; a free draft wants as many as it is allowed.

    Returns:
        The γ; 0, plain decoding, where no γ gains.

    Raises:
        ValueError: an argument is out of its range.

    References:
        Section 3.5.
    """
    return int(np.argmax(_factors(alpha, c, v, max_gamma)))


def best_factor(alpha: float, c: float, v: float = 1.0, max_gamma: int = 64) -> float:
    """Returns the wall-time factor at `optimal_gamma`, never below plain decoding's 1.

    Args:
        alpha: acceptance rate, within [0, 1].
        c: draft step time over plain target step time.
        v: verify block time over plain target step time, the same for every γ.
        max_gamma: the largest γ to try.

    Returns:
        The factor.

    Raises:
        ValueError: an argument is out of its range.

    References:
        Section 3.5.
    """
    return float(np.max(_factors(alpha, c, v, max_gamma)))


def required_alpha(
    speedup: float, c: float, gamma: int | None = None, v: float = 1.0, max_gamma: int = 64
) -> float | None:
    """Returns the smallest acceptance rate that reaches a speed-up, by bisection.

    Args:
        speedup: the wall-time factor wanted.
        c: draft step time over plain target step time.
        gamma: drafted tokens per block; None takes the best γ for each α.
        v: verify block time over plain target step time, the same for every γ.
        max_gamma: the largest γ to try when gamma is None.

    Returns:
        The α; None where even α = 1 is too slow.

    Raises:
        ValueError: an argument is out of its range.

    References:
        The inverse of Theorem 3.8 in α; S grows with α.
    """
    _positive("speedup", speedup)

    def reaches(alpha: float) -> bool:
        if gamma is None:
            return best_factor(alpha, c, v, max_gamma) >= speedup
        return walltime_factor(alpha, gamma, c, v) >= speedup

    return _smallest(reaches)


def lenient_acceptance_rate(
    p: ArrayLike, q: ArrayLike, lenience: ArrayLike = 1.0
) -> float | np.ndarray:
    """Returns the chance that a token drawn from q is kept, Σ min(p / l, q).

    Args:
        p: the target's distributions, [..., V].
        q: the draft's distributions, [..., V].
        lenience: l, within (0, 1]; 1 is the exact rule, less accepts more and is lossy.

    Returns:
        The rates, [...].

    Raises:
        ValueError: p and q differ in shape, one is no distribution, or l is out of range.

    References:
        Appendix A.5.
    """
    p, q = _distribution("p", p), _distribution("q", q)
    if p.shape != q.shape:
        raise ValueError(f"p and q must have one shape, got {p.shape} and {q.shape}")
    lenience = _positive("lenience", _rate("lenience", lenience))
    # Rounding may carry the sum of a q that is kept for sure above 1.
    return _plain(np.minimum(p / lenience[..., None], q).sum(-1).clip(max=1.0))


def acceptance_rate(p: ArrayLike, q: ArrayLike) -> float | np.ndarray:
    """Returns the chance that speculative sampling keeps a token, β = Σ min(p, q).

    Args:
        p: the target's distributions, [..., V].
        q: the draft's distributions, [..., V].

    Returns:
        The rates, [...]; their mean over positions is α.

    Raises:
        ValueError: p and q differ in shape or one is no distribution.

    References:
        Theorem 3.5 and Corollary 3.6.
    """
    return lenient_acceptance_rate(p, q)


def alpha_from_counts(accepted: int, tested: int) -> float | None:
    """Returns the acceptance rate estimated from counts, accepted / tested.

    Args:
        accepted: drafted tokens that were kept.
        tested: drafted tokens that were judged, those behind a rejection left out.

    Returns:
        The estimate; None where nothing was tested.

    Raises:
        ValueError: a count is negative or more was accepted than tested.
    """
    if not 0 <= accepted <= tested:
        raise ValueError(f"need 0 <= accepted <= tested, got {accepted} and {tested}")
    return accepted / tested if tested else None


def _factors(alpha: float, c: float, v: float, max_gamma: int) -> np.ndarray:
    """Wall-time factors for γ = 0 … max_gamma; γ = 0 is a plain step, whatever v is."""
    gammas = np.arange(1, 1 + int(_count("max_gamma", max_gamma)))
    return np.concatenate([[1.0], walltime_factor(alpha, gammas, c, v)])


def _smallest(reaches: Callable[[float], bool]) -> float | None:
    """The smallest rate in [0, 1] at which a monotone condition holds, None if it never does."""
    if reaches(0.0):
        return 0.0
    if not reaches(1.0):
        return None
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if reaches(middle) else (middle, high)
    return high


def _rate(name: str, value: ArrayLike) -> np.ndarray:
    value = np.asarray(value, np.float64)
    if not ((value >= 0) & (value <= 1)).all():
        raise ValueError(f"{name} must lie within [0, 1], got {value}")
    return value


def _count(name: str, value: ArrayLike) -> np.ndarray:
    value = _at_least_zero(name, value)
    if not (value == np.floor(value)).all():
        raise ValueError(f"{name} must be a whole number, got {value}")
    return value


def _at_least_zero(name: str, value: ArrayLike) -> np.ndarray:
    value = np.asarray(value, np.float64)
    if not ((value >= 0) & np.isfinite(value)).all():
        raise ValueError(f"{name} must be finite and at least 0, got {value}")
    return value


def _positive(name: str, value: ArrayLike) -> np.ndarray:
    value = _at_least_zero(name, value)
    if not (value > 0).all():
        raise ValueError(f"{name} must be above 0, got {value}")
    return value


def _distribution(name: str, value: ArrayLike) -> np.ndarray:
    value = np.asarray(value, np.float64)
    # Float32 softmax outputs over large vocabularies sum to 1 within about 1e-5.
    if value.ndim == 0 or not ((value >= 0).all() and np.allclose(value.sum(-1), 1, atol=1e-4)):
        raise ValueError(f"{name} must hold distributions on its last axis")
    return value


def _plain(value: np.ndarray) -> float | np.ndarray:
    """A float where all arguments were numbers, else the array."""
    return float(value) if np.ndim(value) == 0 else value
