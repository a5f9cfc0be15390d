"""Against values computed by hand, against scipy, and by property."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from rliable import library, metrics
from scipy import stats

from sb3_uatrpo.study import statistics
from sb3_uatrpo.study.statistics import cvar, final_return, learning_curve

RETURNS = st_numpy.arrays(
    np.float64, st.integers(1, 12), elements=st.floats(-1e4, 1e4, allow_subnormal=False, width=32)
)
KAPPA = st.floats(1e-3, 1.0)


# ------------------------------------------------------------------------------------------------------------- one run


def test_final_return_by_hand():
    timesteps, returns = [100, 500, 900, 901, 1000], [1.0, 2.0, 3.0, 10.0, 20.0]
    assert final_return(timesteps, returns, 1000) == 15.0


def test_final_return_of_long_episodes_is_that_of_the_last():
    assert final_return([300, 600], [1.0, 2.0], 1000) == 2.0
    assert math.isnan(final_return([], [], 1000))


def test_episodes_that_end_at_one_step_count_alike():
    timesteps, returns = [300, 600, 600, 600], [9.0, 1.0, 2.0, 6.0]
    for order in (returns, [9.0, 6.0, 2.0, 1.0]):
        assert final_return(timesteps, order, 1000) == 3.0
        assert learning_curve(timesteps, order, [200, 500, 650, 900], 100).tolist()[1:] == [9.0, 3.0, 3.0]


def test_learning_curve_by_hand():
    curve = learning_curve([10, 20, 30, 60], [1.0, 3.0, 5.0, 7.0], [5, 10, 20, 30, 40, 50, 60, 80], window=20)
    np.testing.assert_array_equal(curve, [np.nan, 1.0, 2.0, 4.0, 5.0, 5.0, 7.0, 7.0])


@pytest.mark.parametrize(
    ("timesteps", "returns", "message"), [([1, 2], [1.0], "of one length"), ([2, 1], [1.0, 2.0], "ascend")]
)
def test_malformed_episodes_are_refused(timesteps, returns, message):
    with pytest.raises(ValueError, match=message):
        final_return(timesteps, returns, 10)


# --------------------------------------------------------------------------------------------------------------- CVaR


@pytest.mark.parametrize(
    ("kappa", "expected"),
    [(1.0, 4.0), (0.25, 1.0), (0.2, 1.0), (0.01, 1.0), (0.5, 1.5), (0.375, (1 + 0.5 * 2) / 1.5), (0.75, 6 / 3)],
)
def test_cvar_by_hand(kappa, expected):
    assert cvar([10.0, 2.0, 3.0, 1.0], kappa) == pytest.approx(expected, rel=1e-12)


def test_cvar_does_not_hide_a_missing_return():
    assert np.isnan(cvar([1.0, np.nan, 2.0], 0.2))


@pytest.mark.parametrize("kappa", [0.0, -0.1, 1.1, np.nan, [0.5, 2.0]])
def test_kappa_out_of_bounds(kappa):
    with pytest.raises(ValueError, match=r"kappa must be in \(0, 1\]"):
        cvar([1.0], kappa)


def test_cvar_of_nothing():
    with pytest.raises(ValueError, match="at least one run"):
        cvar([], 0.5)


@given(RETURNS, KAPPA, KAPPA)
def test_cvar_grows_with_kappa(x, first, second):
    low, high = cvar(x, sorted([first, second]))
    assert low <= high + 1e-6
    assert x.min() - 1e-6 <= low
    assert high <= x.mean() + 1e-6


@pytest.mark.parametrize(
    ("n_runs", "kappa", "expected"), [(4, 0.2, 1), (15, 0.2, 3), (6, 0.2, 2), (50, 1.0, 50), (1, 0.1, 1)]
)
def test_runs_behind_cvar(n_runs, kappa, expected):
    assert statistics.runs_behind_cvar(n_runs, kappa) == expected


# ---------------------------------------------------------------------------------------------------- other statistics


def test_welch_against_scipy():
    rng = np.random.default_rng(0)
    x, y = rng.normal(1.0, 1.0, 5), rng.normal(0.0, 3.0, 9)
    expected = stats.ttest_ind(x, y, equal_var=False)
    np.testing.assert_allclose(statistics.welch_test(x, y), (expected.statistic, expected.pvalue), rtol=1e-9)


def test_welch_where_runs_end_alike():
    assert all(map(math.isnan, statistics.welch_test([500.0, 500.0], [500.0, 500.0])))
    assert all(map(math.isnan, statistics.welch_test([500.0], [1.0, 2.0])))
    t, p = statistics.welch_test([500.0] * 4, [500.0, 480.0, 490.0, 470.0])
    assert t > 0
    assert 0 < p < 1


# ----------------------------------------------------------------------------------------------------------- intervals


def test_bootstrap_against_scipy():
    x = np.random.default_rng(0).normal(size=20)
    got = statistics.bootstrap_mean(x, n_resamples=999, seed=3)
    expected = stats.bootstrap((x,), np.mean, n_resamples=999, method="percentile", rng=np.random.default_rng(3))
    np.testing.assert_allclose(got, (x.mean(), *expected.confidence_interval), rtol=1e-12)
    assert got == statistics.bootstrap_mean(x, n_resamples=999, seed=3)
    assert got != statistics.bootstrap_mean(x, n_resamples=999, seed=4)


def test_the_interval_of_a_mean_covers_it():
    """With 20 normal runs, about 93 of 100 percentile intervals hold the true mean."""
    rng = np.random.default_rng(0)
    intervals = statistics.bootstrap_mean(rng.normal(size=(300, 20)), n_resamples=999)
    assert 0.88 <= np.mean((intervals.low <= 0) & (0 <= intervals.high)) <= 0.97


def test_bands_hold_their_estimate_and_have_its_shape():
    x = np.random.default_rng(0).normal(size=8)
    kappas = np.linspace(0.05, 1.0, 20)
    band = statistics.bootstrap_cvar(x, kappas, n_resamples=500)
    np.testing.assert_array_equal(band.value, cvar(x, kappas))
    assert band.low.shape == band.high.shape == (20,)
    assert np.all((band.low <= band.value) & (band.value <= band.high))
    curves = np.random.default_rng(0).normal(size=(6, 8))
    assert statistics.bootstrap_cvar(curves, 0.2, n_resamples=500).low.shape == (6,)


def test_differences():
    x, y = np.array([3.0, 4.0, 5.0]), np.array([1.0, 1.5])
    mean = statistics.difference_of_means(x, y, n_resamples=500)
    assert mean.value == 4.0 - 1.25
    assert 1.5 <= mean.low <= mean.value <= mean.high <= 4.0
    worst = statistics.difference_of_cvars(x, y, 0.2, n_resamples=500)
    assert worst.value == 2.0
    assert 1.5 <= worst.low <= worst.high <= 4.0
    np.testing.assert_allclose(statistics.difference_of_cvars(x, y, 1.0, n_resamples=500), mean, rtol=1e-12)


INTERVALS = [
    lambda x: statistics.bootstrap_mean(x),
    lambda x: statistics.bootstrap_cvar(x, 0.2),
    lambda x: statistics.difference_of_means(x, [1.0, 2.0]),
    lambda x: statistics.difference_of_cvars([1.0, 2.0], x, 0.2),
    lambda x: statistics.interquartile_mean(x),
    lambda x: statistics.probability_of_improvement(x, [1.0, 2.0]),
    lambda x: statistics.performance_profile(x, [1.0, 2.0]),
]


@pytest.mark.parametrize("interval", INTERVALS)
def test_one_run_has_no_interval(interval):
    value, low, high = interval([1.5])
    assert np.all(np.isfinite(value))
    assert np.all(np.isnan(low))
    assert np.all(np.isnan(high))


@pytest.mark.parametrize("interval", INTERVALS)
def test_no_runs_and_runs_without_a_return_have_no_statistic(interval):
    with pytest.raises(ValueError, match="returns must hold at least one run, but they are empty"):
        interval([])
    for value in (math.nan, math.inf):
        with pytest.raises(ValueError, match="returns must be finite, but they hold NaN or infinity"):
            interval([1.0, value])


@pytest.mark.parametrize("n_runs", [2, 3, 4])
def test_runs_that_end_alike_have_intervals_of_no_width(n_runs):
    solved = np.full(n_runs, 500.0)
    for estimate in (
        statistics.bootstrap_mean(solved, n_resamples=100),
        statistics.bootstrap_cvar(solved, 0.2, n_resamples=100),
        statistics.interquartile_mean(solved, n_resamples=100),
    ):
        assert tuple(float(np.squeeze(x)) for x in estimate) == (500.0, 500.0, 500.0)
    assert tuple(map(float, map(np.squeeze, statistics.probability_of_improvement(solved, solved)))) == (0.5, 0.5, 0.5)


# ------------------------------------------------------------------------------------------------------ several tasks


@pytest.mark.parametrize("n_runs", [2, 3, 4, 9])
def test_interquartile_mean(n_runs):
    x = np.random.default_rng(0).normal(size=n_runs)
    estimate = statistics.interquartile_mean(x, n_resamples=200)
    assert estimate.value == pytest.approx(np.sort(x)[n_runs // 4 : n_runs - n_runs // 4].mean())
    assert estimate.low <= estimate.value <= estimate.high
    matrix = np.random.default_rng(0).normal(size=(n_runs, 3))
    expected = metrics.aggregate_iqm(matrix)
    assert statistics.interquartile_mean(matrix, n_resamples=50).value == pytest.approx(expected, rel=1e-12)


def test_probability_of_improvement_by_hand():
    # of six pairs, X is above in four, and equal in one
    estimate = statistics.probability_of_improvement([1.0, 2.0, 3.0], [1.0, 1.5], n_resamples=200)
    assert estimate.value == pytest.approx(4.5 / 6)
    assert 0 <= estimate.low <= estimate.value <= estimate.high <= 1


@pytest.mark.parametrize("n_tasks", [1, 3])
def test_values_are_those_of_rliable(n_tasks):
    rng = np.random.default_rng(0)
    for _ in range(20):
        # ties too
        x, y = (rng.integers(0, 6, (n_runs, n_tasks)).astype(float) for n_runs in (5, 7))
        estimate = statistics.probability_of_improvement(x, y, n_resamples=10)
        np.testing.assert_allclose(estimate.value, metrics.probability_of_improvement(x, y), rtol=1e-14)
        thresholds = np.linspace(-1, 6, 15)
        profile = statistics.performance_profile(x, thresholds, n_resamples=10)
        np.testing.assert_allclose(profile.value, library.score_distributions(x, thresholds), rtol=1e-14)


def test_intervals_are_those_of_rliable():
    """Up to the error of resampling, of samples of several tasks, which are resampled task by task."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(0.0, 1.0, (20, 3)), rng.normal(0.5, [0.3, 1.0, 2.0], (12, 3))
    thresholds = np.linspace(-1.0, 1.0, 5)
    of_rliable = {
        "iqm": ([x], lambda x: np.array([metrics.aggregate_iqm(x)])),
        "probability": (
            [x, y],
            lambda x, y: np.array([np.mean([np.mean(a[:, None] > b) for a, b in zip(x.T, y.T, strict=True)])]),
        ),
        "profile": ([x], lambda x: np.array([np.mean(x > tau) for tau in thresholds])),
    }
    ours = {
        "iqm": statistics.interquartile_mean(x),
        "probability": statistics.probability_of_improvement(x, y),
        "profile": statistics.performance_profile(x, thresholds),
    }
    for name, (samples, statistic) in of_rliable.items():
        scores = {"": samples if len(samples) > 1 else samples[0]}
        np.random.seed(0)
        values, intervals = library.get_interval_estimates(scores, statistic, reps=2000)
        np.testing.assert_allclose(np.atleast_1d(ours[name].value), values[""], rtol=1e-12)
        bounds = np.atleast_2d(np.transpose(ours[name][1:])).T
        width = np.ptp(intervals[""], axis=0)
        # a bound of 2,000 resamples is uncertain by some 3% of the interval
        np.testing.assert_allclose(bounds - intervals[""], 0, atol=0.1 * width.max(), err_msg=name)


def test_performance_profile_by_hand():
    estimate = statistics.performance_profile([1.0, 2.0, 3.0, 4.0], [0.0, 2.0, 3.5, 5.0], n_resamples=200)
    np.testing.assert_array_equal(estimate.value, [1.0, 0.5, 0.25, 0.0])
    assert np.all((estimate.low <= estimate.value) & (estimate.value <= estimate.high))


def test_intervals_are_repeatable_and_leave_the_global_generator_alone():
    x = np.random.default_rng(0).normal(size=6)
    np.random.seed(7)
    expected = np.random.random()
    np.random.seed(7)
    first = statistics.interquartile_mean(x, n_resamples=100, seed=1)
    assert np.random.random() == expected
    second = statistics.interquartile_mean(x, n_resamples=100, seed=1)
    np.testing.assert_array_equal(first, second)
