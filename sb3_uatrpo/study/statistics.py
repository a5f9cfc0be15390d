"""
Statistics over runs: arrays in, numbers out. Nothing here depends on records or pictures.

Returns are undiscounted sums of rewards, one for each run; of two algorithms, they are ``x`` (``n_runs_x``) and ``y``
(``n_runs_y``). ``kappa`` is a share of the runs in (0, 1], a number or any shape. Intervals are percentile bootstrap
intervals over runs, from ``scipy.stats.bootstrap``; ``options`` are further arguments of ``bootstrap``. A single run
has no interval: its bounds are NaN. A ``ValueError`` is raised if there is no run, a return is NaN, or ``kappa`` is out
of bounds.

The aggregates are rliable's, of one task (``n_runs``) or of comparable scores of several (``n_runs x n_tasks``), which
have resamples of their own.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

CONFIDENCE_LEVEL = 0.95
N_RESAMPLES = 5000
# Fewer where each takes longer
N_RESAMPLES_OVER_TRAINING = 1000
FINAL_SHARE = 0.1


class Estimate(NamedTuple):
    """A statistic of the sample and its bootstrap interval. All fields have the statistic's shape."""

    value: Array
    low: Array
    high: Array


class Welch(NamedTuple):
    """t and the two-sided p of Welch's test of equal means; NaN where the test is not defined."""

    statistic: float
    pvalue: float


def learning_curve(timesteps: ArrayLike, returns: ArrayLike, grid: ArrayLike, window: float) -> Array:
    """
    Trailing mean of training returns: at step ``t``, over the episodes that ended in ``(t - window, t]``. If none did,
    it is over the episodes that ended last before; before the first episode, the curve is NaN.

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
    # environments in lockstep end several episodes at one step
    last = t[np.maximum(end - 1, 0)] if len(t) else points
    begin = np.minimum(np.searchsorted(t, points - window, side="right"), np.searchsorted(t, last))
    return np.array([r[i:j].mean() if j > i else np.nan for i, j in zip(begin, end, strict=True)], dtype=np.float64)


def final_return(timesteps: ArrayLike, returns: ArrayLike, n_timesteps: int, share: float = FINAL_SHARE) -> float:
    """
    Mean return of the training episodes that ended in the last ``share`` of the steps; if none did, of those that
    ended last. Episodes that ended after ``n_timesteps``, in the last rollout, belong to the last share too.

    :param timesteps: steps at which episodes ended, ascending (``n_episodes``)
    :param returns: their returns (``n_episodes``)
    :param n_timesteps: length of the run in steps
    :param share: the last share of the steps, in (0, 1]
    :return: the final return, NaN without episodes
    :raises ValueError: as ``learning_curve`` does, and if ``share`` is out of bounds
    """
    if not 0 < share <= 1:
        raise ValueError(f"share must be a number in (0, 1], but it is {share!r}")
    t = np.minimum(np.asarray(timesteps, dtype=np.float64), n_timesteps)
    return float(learning_curve(t, returns, [n_timesteps], share * n_timesteps)[0])


def cvar(returns: ArrayLike, kappa: ArrayLike, axis: int = -1) -> Array:
    """
    Conditional value at risk: the mean of the worst share ``kappa`` of the runs,

    .. math:: CVaR_κ = \\frac{1}{κn} \\sum_{i=1}^{n} \\min(\\max(κn - i + 1, 0), 1) \\, x_{(i)}

    with ``x_(1) ≤ … ≤ x_(n)``. The run at the boundary of the share counts in part, so the result is exact for every
    ``kappa``: it is the mean at 1, and the worst run alone up to ``1/n``.

    :param returns: runs along ``axis``, any shape
    :return: shape of ``kappa`` followed by that of ``returns`` without ``axis``; NaN where ``returns`` contain NaN
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
    """:return: how many of ``n_runs`` runs have a weight in the κ-CVaR"""
    # 0.2 * 15 is a little more than 3 in floating point
    return max(1, math.ceil(round(kappa * n_runs, 9)))


def standard_error(values: ArrayLike, axis: int = 0) -> Array:
    """:return: standard error of the mean over ``axis``; NaN for fewer than two runs and where a run has no value"""
    from scipy import stats

    x = np.moveaxis(np.asarray(values, dtype=np.float64), axis, 0)
    # scipy would warn about a single run
    return np.asarray(stats.sem(x)) if len(x) > 1 else np.full(x.shape[1:], np.nan)


def share_at_least(values: ArrayLike, threshold: float) -> float:
    """:return: share of the values (any shape) that are at least ``threshold``; NaN do not count, NaN if all are"""
    x = np.asarray(values, dtype=np.float64)
    x = x[~np.isnan(x)]
    return float(np.mean(x >= threshold)) if len(x) else math.nan


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
    """
    from scipy import stats

    arrays = [np.asarray(sample, dtype=np.float64) for sample in samples]
    n_runs = min(array.shape[-1] for array in arrays)
    if n_runs == 0:
        raise ValueError("returns must hold at least one run, but they are empty")
    if any(np.isnan(array).any() for array in arrays):
        raise ValueError("returns must be numbers, but they hold NaN: leave out runs without a return")
    value = np.asarray(statistic(*arrays, axis=-1))
    if n_runs == 1:
        return Estimate(value, np.full_like(value, np.nan), np.full_like(value, np.nan))
    # a batch bounds the memory: its resamples are held at the same time. BCa intervals are undefined if leaving out one
    # run changes nothing, as for the CVaR of few runs.
    options: dict[str, Any] = {"batch": 500, "method": "percentile", "rng": np.random.default_rng(seed)}
    options |= {"confidence_level": confidence_level, "n_resamples": n_resamples}
    result = stats.bootstrap(arrays, statistic, vectorized=True, axis=-1, **options)
    return Estimate(value, *map(np.asarray, result.confidence_interval))


def bootstrap_mean(returns: ArrayLike, **options: Any) -> Estimate:
    """:return: mean of the returns, runs along the last axis, and interval"""
    return bootstrap(np.mean, returns, **options)


def bootstrap_cvar(returns: ArrayLike, kappa: ArrayLike, **options: Any) -> Estimate:
    """:return: CVaR of the returns, runs along the last axis, and interval, of the shape that ``cvar`` returns"""
    return bootstrap(lambda x, axis: cvar(x, kappa, axis), returns, **options)


def difference_of_means(x: ArrayLike, y: ArrayLike, **options: Any) -> Estimate:
    """:return: mean of ``x`` minus mean of ``y``, and interval"""
    return bootstrap(lambda x, y, axis: x.mean(axis) - y.mean(axis), x, y, **options)


def difference_of_cvars(x: ArrayLike, y: ArrayLike, kappa: ArrayLike, **options: Any) -> Estimate:
    """:return: CVaR of ``x`` minus CVaR of ``y``, and interval, of the shape of ``kappa``"""
    return bootstrap(lambda x, y, axis: cvar(x, kappa, axis) - cvar(y, kappa, axis), x, y, **options)


def welch_test(x: ArrayLike, y: ArrayLike) -> Welch:
    """:return: two-sided t-test of equal means with unequal variances; NaN for one run, or if no returns vary"""
    from scipy import stats

    a, b = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if min(len(a), len(b)) < 2 or (np.ptp(a) == 0 and np.ptp(b) == 0):
        return Welch(math.nan, math.nan)
    # from moments: the test on samples warns if all returns of one algorithm are equal, as on solved tasks
    moments = (a.mean(), a.std(ddof=1), len(a), b.mean(), b.std(ddof=1), len(b))
    result = stats.ttest_ind_from_stats(*moments, equal_var=False)
    return Welch(float(result.statistic), float(result.pvalue))


def interquartile_mean(returns: ArrayLike, **options: Any) -> Estimate:
    """
    Mean without the lowest and the highest quarter of the runs, over all tasks. The number left out is rounded down, so
    with fewer than four runs it is the mean.
    """
    from scipy import stats

    def pooled(*tasks: Array, axis: int) -> Array:
        return stats.trim_mean(np.concatenate(tasks, axis), 0.25, axis)

    return bootstrap(pooled, *_tasks(returns), **options)


def probability_of_improvement(x: ArrayLike, y: ArrayLike, **options: Any) -> Estimate:
    """P(X > Y) + ½P(X = Y): how often a run of one algorithm ends above a run of the other, averaged over tasks."""
    n = len(_tasks(x))

    def probability(*tasks: Array, axis: int) -> Array:
        pairs = zip(tasks[:n], tasks[n:], strict=True)
        wins = [np.heaviside(a[..., :, None] - b[..., None, :], 0.5).mean((-1, -2)) for a, b in pairs]
        return np.mean(wins, axis=0)

    return bootstrap(probability, *_tasks(x), *_tasks(y), **options)


def performance_profile(returns: ArrayLike, thresholds: ArrayLike, **options: Any) -> Estimate:
    """Share of runs that end above each threshold (``n_thresholds``, in the unit of ``returns``), over all tasks."""
    taus = np.asarray(thresholds, dtype=np.float64)[:, None]

    # as scipy wants it, resamples are the last axis
    def above(*tasks: Array, axis: int) -> Array:
        return np.moveaxis((np.concatenate(tasks, axis)[..., None, :] > taus).mean(-1), -1, 0)

    return bootstrap(above, *_tasks(returns), **options)


def _tasks(returns: ArrayLike) -> Array:
    """Returns of shape ``n_runs`` or ``n_runs x n_tasks`` as ``n_tasks x n_runs``."""
    return np.atleast_2d(np.asarray(returns, dtype=np.float64).T)
