"""
Statistics over runs: arrays in, numbers out. Nothing here depends on records or pictures.

Returns are undiscounted sums of rewards. Intervals are percentile bootstrap intervals over runs, from
``scipy.stats.bootstrap`` and rliable, which stratifies the resamples by task; ``options`` are those of ``bootstrap``. A
single run has no interval: its bounds are NaN.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

CONFIDENCE_LEVEL = 0.95
N_RESAMPLES = 5000
# Fewer where each takes longer
N_RESAMPLES_RLIABLE = 2000
N_RESAMPLES_OVER_TRAINING = 1000
FINAL_SHARE = 0.1


class Estimate(NamedTuple):
    """
    A statistic and its bootstrap interval. All fields have the statistic's shape.

    :param value: the statistic of the sample
    :param low: lower bound, NaN for fewer than two runs
    :param high: upper bound, NaN for fewer than two runs
    """

    value: Array
    low: Array
    high: Array


class Welch(NamedTuple):
    """
    Welch's test of equal means.

    :param statistic: t; NaN where the test is not defined
    :param pvalue: two-sided p; NaN where the test is not defined
    """

    statistic: float
    pvalue: float


# -------------------------------------------------------------------------------------------------------------- one run


def learning_curve(timesteps: ArrayLike, returns: ArrayLike, grid: ArrayLike, window: float) -> Array:
    """
    Trailing mean of training returns: at step ``t``, over the episodes that ended in ``(t - window, t]``. If none did,
    it is the return of the last episode before; before the first episode, the curve is NaN.

    :param timesteps: steps at which episodes ended, ascending (``n_episodes``)
    :param returns: their returns (``n_episodes``)
    :param grid: steps at which to evaluate the curve (``n_points``)
    :param window: length of the window in steps
    :return: the curve (``n_points``)
    :raises ValueError: if ``timesteps`` and ``returns`` differ in length, or ``timesteps`` descend
    """
    t, r = np.asarray(timesteps, dtype=np.float64), np.asarray(returns, dtype=np.float64)
    if t.shape != r.shape or t.ndim != 1:
        raise ValueError(f"timesteps and returns must be of one length, but their shapes are {t.shape} and {r.shape}")
    if np.any(np.diff(t) < 0):
        raise ValueError("timesteps must ascend")
    points = np.asarray(grid, dtype=np.float64)
    end = np.searchsorted(t, points, side="right")
    begin = np.minimum(np.searchsorted(t, points - window, side="right"), np.maximum(end - 1, 0))
    return np.array([r[i:j].mean() if j > i else np.nan for i, j in zip(begin, end, strict=True)], dtype=np.float64)


def final_return(timesteps: ArrayLike, returns: ArrayLike, n_timesteps: int, share: float = FINAL_SHARE) -> float:
    """
    Mean return of the training episodes that ended in the last ``share`` of the steps; if none did, the return of the
    last episode. Episodes that ended after ``n_timesteps``, in the last rollout, belong to the last share too.

    :param timesteps: steps at which episodes ended, ascending (``n_episodes``)
    :param returns: their returns (``n_episodes``)
    :param n_timesteps: length of the run in steps
    :param share: the last share of the steps, in (0, 1]
    :return: the final return, NaN without episodes
    :raises ValueError: if ``timesteps`` and ``returns`` differ in length, ``timesteps`` descend, or ``share`` is out of
        bounds
    """
    if not 0 < share <= 1:
        raise ValueError(f"share must be a number in (0, 1], but it is {share!r}")
    t = np.minimum(np.asarray(timesteps, dtype=np.float64), n_timesteps)
    return float(learning_curve(t, returns, [n_timesteps], share * n_timesteps)[0])


# ----------------------------------------------------------------------------------------------------------- many runs


def cvar(returns: ArrayLike, kappa: ArrayLike, axis: int = -1) -> Array:
    """
    Conditional value at risk: the mean of the worst share ``kappa`` of the runs,

    .. math:: CVaR_κ = \\frac{1}{κn} \\sum_{i=1}^{n} \\min(\\max(κn - i + 1, 0), 1) \\, x_{(i)}

    with ``x_(1) ≤ … ≤ x_(n)``. The run at the boundary of the share counts in part, so the result is exact for every
    ``kappa``: it is the mean at 1, and the worst run alone up to ``1/n``.

    :param returns: one per run, runs along ``axis``, any shape
    :param kappa: in (0, 1], a number or any shape
    :param axis: the axis of runs in ``returns``
    :return: shape of ``kappa`` followed by that of ``returns`` without ``axis``; NaN where ``returns`` contain NaN
    :raises ValueError: if there is no run, or ``kappa`` is out of bounds
    """
    x, share = np.asarray(returns, dtype=np.float64), np.asarray(kappa, dtype=np.float64)
    if not np.all((share > 0) & (share <= 1)):
        raise ValueError(f"kappa must be in (0, 1], but it is {kappa!r}")
    x = np.sort(np.moveaxis(x, axis, -1), axis=-1)
    n = x.shape[-1]
    if n == 0:
        raise ValueError("returns must hold at least one run, but they are empty")
    counted = share[..., None] * n
    weights = np.clip(counted - np.arange(n), 0.0, 1.0) / counted
    return np.tensordot(weights, x, axes=(-1, -1))


def runs_behind_cvar(n_runs: int, kappa: float) -> int:
    """
    :param n_runs: number of runs
    :param kappa: in (0, 1]
    :return: number of runs that have a weight in the CVaR
    """
    # 0.2 * 15 is a little more than 3 in floating point
    return max(1, math.ceil(round(kappa * n_runs, 9)))


def standard_error(values: ArrayLike, axis: int = 0) -> Array:
    """
    :param values: one per run, runs along ``axis``, NaN where a run has none
    :param axis: the axis of runs in ``values``
    :return: standard error of the mean, NaN for fewer than two runs and where a run has no value
    """
    from scipy import stats

    x = np.moveaxis(np.asarray(values, dtype=np.float64), axis, 0)
    # scipy would warn about a single run
    return np.asarray(stats.sem(x)) if len(x) > 1 else np.full(x.shape[1:], np.nan)


def share_at_least(values: ArrayLike, threshold: float) -> float:
    """
    :param values: for example the KL ratios of all proposed steps; NaN where missing (any shape)
    :param threshold: in the unit of ``values``
    :return: share of the values that are at least ``threshold``; missing values do not count. NaN if all are missing
    """
    x = np.asarray(values, dtype=np.float64)
    x = x[~np.isnan(x)]
    return float(np.mean(x >= threshold)) if len(x) else math.nan


def _complete(returns: ArrayLike, axis: int) -> Array:
    """:raises ValueError: if there are no runs along the axis, or returns are missing"""
    x = np.asarray(returns, dtype=np.float64)
    if x.shape[axis] == 0:
        raise ValueError("returns must hold at least one run, but they are empty")
    if np.isnan(x).any():
        raise ValueError("returns must be numbers, but they hold NaN: leave out runs without a return")
    return x


def bootstrap(
    statistic: Callable[..., Array],
    *samples: ArrayLike,
    confidence_level: float = CONFIDENCE_LEVEL,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
) -> Estimate:
    """
    A statistic with its percentile interval; runs are drawn with replacement, independently for each sample.

    :param statistic: function of one array per sample and of ``axis=-1``, along which it reduces them
    :param samples: one for each algorithm, runs along the last axis
    :param confidence_level: in (0, 1)
    :param n_resamples: number of bootstrap samples
    :param seed: seed of the bootstrap samples
    :return: the statistic and its bounds
    :raises ValueError: if a sample has no runs, or contains NaN
    """
    from scipy import stats

    arrays = [_complete(sample, axis=-1) for sample in samples]
    value = np.asarray(statistic(*arrays, axis=-1))
    if min(array.shape[-1] for array in arrays) < 2:
        return Estimate(value, np.full_like(value, np.nan), np.full_like(value, np.nan))
    result = stats.bootstrap(
        arrays,
        statistic,
        vectorized=True,
        axis=-1,
        confidence_level=confidence_level,
        n_resamples=n_resamples,
        # bounds the memory: the resamples of a batch are held at the same time
        batch=500,
        # BCa intervals are undefined if leaving out one run changes nothing, as for the CVaR of few runs
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    return Estimate(value, *(np.asarray(bound) for bound in result.confidence_interval))


def bootstrap_mean(returns: ArrayLike, **options: Any) -> Estimate:
    """
    :param returns: one per run, runs along the last axis
    :param options: further arguments of ``bootstrap``
    :return: mean and interval
    :raises ValueError: if there is no run, or a return is NaN
    """
    return bootstrap(np.mean, returns, **options)


def bootstrap_cvar(returns: ArrayLike, kappa: ArrayLike, **options: Any) -> Estimate:
    """
    :param returns: one per run, runs along the last axis
    :param kappa: in (0, 1], a number or any shape
    :param options: further arguments of ``bootstrap``
    :return: CVaR and interval, of the shape that ``cvar`` returns
    :raises ValueError: if there is no run, a return is NaN, or ``kappa`` is out of bounds
    """
    return bootstrap(lambda x, axis: cvar(x, kappa, axis), returns, **options)


def difference_of_means(x: ArrayLike, y: ArrayLike, **options: Any) -> Estimate:
    """
    :param x: final returns of one algorithm (``n_runs_x``)
    :param y: final returns of the other (``n_runs_y``)
    :param options: further arguments of ``bootstrap``
    :return: mean of ``x`` minus mean of ``y``, and interval
    :raises ValueError: if an algorithm has no run, or a return is NaN
    """
    return bootstrap(lambda x, y, axis: x.mean(axis) - y.mean(axis), x, y, **options)


def difference_of_cvars(x: ArrayLike, y: ArrayLike, kappa: ArrayLike, **options: Any) -> Estimate:
    """
    :param x: final returns of one algorithm (``n_runs_x``)
    :param y: final returns of the other (``n_runs_y``)
    :param kappa: in (0, 1], a number or any shape
    :param options: further arguments of ``bootstrap``
    :return: CVaR of ``x`` minus CVaR of ``y``, and interval, of the shape of ``kappa``
    :raises ValueError: if an algorithm has no run, a return is NaN, or ``kappa`` is out of bounds
    """
    return bootstrap(lambda x, y, axis: cvar(x, kappa, axis) - cvar(y, kappa, axis), x, y, **options)


def welch_test(x: ArrayLike, y: ArrayLike) -> Welch:
    """
    Welch's t-test: two-sided test of equal means with unequal variances.

    :param x: final returns of one algorithm (``n_runs_x``)
    :param y: final returns of the other (``n_runs_y``)
    :return: t and p; NaN if an algorithm has only one run, or if neither algorithm's returns vary
    """
    from scipy import stats

    a, b = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if min(len(a), len(b)) < 2 or (np.ptp(a) == 0 and np.ptp(b) == 0):
        return Welch(math.nan, math.nan)
    # from moments: the test on samples warns if all returns of one algorithm are equal, as on solved tasks
    moments = (a.mean(), a.std(ddof=1), len(a), b.mean(), b.std(ddof=1), len(b))
    result = stats.ttest_ind_from_stats(*moments, equal_var=False)
    return Welch(float(result.statistic), float(result.pvalue))


# ------------------------------------------------------------------------------------------------------------- rliable


@contextmanager
def _numpy_seeded(seed: int) -> Iterator[None]:
    """Seed NumPy's global generator, and restore it: rliable draws from it, even if it is given another one."""
    state = np.random.get_state()
    np.random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(state)


def _rliable(
    statistic: Callable[..., Array],
    *returns: ArrayLike,
    confidence_level: float = CONFIDENCE_LEVEL,
    n_resamples: int = N_RESAMPLES_RLIABLE,
    seed: int = 0,
) -> Estimate:
    """Like ``bootstrap``, for ``n_runs x n_tasks`` and with resamples stratified by task."""
    from rliable import library

    arrays = [_complete(x, axis=0) for x in returns]
    samples = [x.reshape(len(x), -1) for x in arrays]
    value = statistic(*samples)
    if min(len(sample) for sample in samples) < 2:
        return Estimate(value, np.full_like(value, np.nan), np.full_like(value, np.nan))
    scores = {"": samples[0] if len(samples) == 1 else samples}
    with _numpy_seeded(seed):
        _, intervals = library.get_interval_estimates(
            scores, statistic, reps=n_resamples, confidence_interval_size=confidence_level
        )
    return Estimate(value, *intervals[""])


def interquartile_mean(returns: ArrayLike, **options: Any) -> Estimate:
    """
    Mean without the lowest and the highest quarter of the runs. The number left out is rounded down, so with fewer than
    four runs it is the mean.

    :param returns: ``n_runs``, or ``n_runs x n_tasks`` of comparable scores, which are pooled
    :param options: ``confidence_level``, ``n_resamples`` and ``seed``, as for ``bootstrap``
    :return: IQM and interval, each of shape (1,)
    :raises ValueError: if there is no run, or a return is NaN
    """
    from rliable import metrics

    return _rliable(lambda x: np.array([metrics.aggregate_iqm(x)]), returns, **options)


def probability_of_improvement(x: ArrayLike, y: ArrayLike, **options: Any) -> Estimate:
    """
    P(X > Y) + ½P(X = Y): how often a run of one algorithm ends above a run of the other, averaged over tasks.

    :param x: final returns of one algorithm, ``n_runs_x`` or ``n_runs_x x n_tasks``
    :param y: final returns of the other, ``n_runs_y`` or ``n_runs_y x n_tasks``
    :param options: ``confidence_level``, ``n_resamples`` and ``seed``, as for ``bootstrap``
    :return: probability and interval, each of shape (1,)
    :raises ValueError: if an algorithm has no run, or a return is NaN
    """

    # the same as rliable's function of this name, whose rank test would take most of a report's time
    def probability(x: Array, y: Array) -> Array:
        wins = np.sum((x[:, None] > y) + 0.5 * (x[:, None] == y), axis=(0, 1))
        return np.mean(wins / (len(x) * len(y)), keepdims=True)

    return _rliable(probability, x, y, **options)


def performance_profile(returns: ArrayLike, thresholds: ArrayLike, **options: Any) -> Estimate:
    """
    Share of runs that end above each threshold.

    :param returns: ``n_runs``, or ``n_runs x n_tasks`` of comparable scores
    :param thresholds: in the unit of ``returns`` (``n_thresholds``)
    :param options: ``confidence_level``, ``n_resamples`` and ``seed``, as for ``bootstrap``
    :return: shares and interval, each of shape (``n_thresholds``,)
    :raises ValueError: if there is no run, or a return is NaN
    """
    taus = np.asarray(thresholds, dtype=np.float64)
    # the same as rliable's score_distributions, whose loop over thresholds would take seconds
    return _rliable(lambda x: np.mean(x[..., None] > taus, axis=(0, 1)), returns, **options)
