"""Against values computed by hand, against scipy and rliable, and by property."""

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


@pytest.mark.parametrize(
    ("timesteps", "returns", "expected"),
    [
        # the last tenth of the steps
        ([100, 500, 900, 901, 1000], [1.0, 2.0, 3.0, 10.0, 20.0], 15.0),
        # the last episode, and episodes that end at one step
        ([300, 600], [1.0, 2.0], 2.0),
        ([300, 600, 600, 600], [9.0, 1.0, 2.0, 6.0], 3.0),
        ([300, 600, 600, 600], [9.0, 6.0, 2.0, 1.0], 3.0),
        ([], [], math.nan),
    ],
)
def test_final_return_by_hand(timesteps, returns, expected):
    np.testing.assert_equal(final_return(timesteps, returns, 1000), expected)


def test_learning_curve_by_hand():
    curve = learning_curve([10, 20, 30, 60], [1.0, 3.0, 5.0, 7.0], [5, 10, 20, 30, 40, 50, 60, 80], window=20)
    np.testing.assert_array_equal(curve, [np.nan, 1.0, 2.0, 4.0, 5.0, 5.0, 7.0, 7.0])
    for order in ([9.0, 1.0, 2.0, 6.0], [9.0, 6.0, 2.0, 1.0]):
        curve = learning_curve([300, 600, 600, 600], order, [200, 500, 650, 900], 100)
        np.testing.assert_array_equal(curve, [np.nan, 9.0, 3.0, 3.0])


@pytest.mark.parametrize(
    ("kappa", "expected"),
    [(1.0, 4.0), (0.25, 1.0), (0.2, 1.0), (0.01, 1.0), (0.5, 1.5), (0.375, (1 + 0.5 * 2) / 1.5), (0.75, 6 / 3)],
)
def test_cvar_by_hand(kappa, expected):
    assert cvar([10.0, 2.0, 3.0, 1.0], kappa) == pytest.approx(expected, rel=1e-12)
    # it does not hide a missing return
    assert np.isnan(cvar([10.0, np.nan, 3.0, 1.0], kappa))


@given(RETURNS, KAPPA, KAPPA)
def test_cvar_grows_with_kappa(x, first, second):
    low, high = cvar(x, sorted([first, second]))
    assert x.min() - 1e-6 <= low <= high + 1e-6
    assert high <= x.mean() + 1e-6


@pytest.mark.parametrize(
    ("n_runs", "kappa", "expected"), [(4, 0.2, 1), (15, 0.2, 3), (6, 0.2, 2), (50, 1.0, 50), (1, 0.1, 1)]
)
def test_runs_behind_cvar(n_runs, kappa, expected):
    assert statistics.runs_behind_cvar(n_runs, kappa) == expected


def test_welch_against_scipy_and_where_runs_end_alike():
    rng = np.random.default_rng(0)
    x, y = rng.normal(1.0, 1.0, 5), rng.normal(0.0, 3.0, 9)
    expected = stats.ttest_ind(x, y, equal_var=False)
    np.testing.assert_allclose(statistics.welch_test(x, y), (expected.statistic, expected.pvalue), rtol=1e-9)
    t, p = statistics.welch_test([500.0] * 4, [500.0, 480.0, 490.0, 470.0])
    assert t > 0 < p < 1
    assert all(map(math.isnan, statistics.welch_test([500.0, 500.0], [500.0, 500.0])))
    assert all(map(math.isnan, statistics.welch_test([500.0], [1.0, 2.0])))


# ----------------------------------------------------------------------------------------------------------- intervals


def test_bootstrap_against_scipy():
    x = np.random.default_rng(0).normal(size=20)
    got = statistics.bootstrap_mean(x, n_resamples=999, seed=3)
    expected = stats.bootstrap((x,), np.mean, n_resamples=999, method="percentile", rng=np.random.default_rng(3))
    np.testing.assert_allclose(got, (x.mean(), *expected.confidence_interval), rtol=1e-12)
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


INTERVALS = {
    "mean": lambda x: statistics.bootstrap_mean(x, n_resamples=100),
    "CVaR": lambda x: statistics.bootstrap_cvar(x, 0.2, n_resamples=100),
    "difference of means": lambda x: statistics.difference_of_means(x, [500.0, 500.0]),
    "difference of CVaRs": lambda x: statistics.difference_of_cvars([500.0, 500.0], x, 0.2),
    "IQM": lambda x: statistics.interquartile_mean(x, n_resamples=100),
    "probability": lambda x: statistics.probability_of_improvement(x, [500.0, 500.0]),
    "profile": lambda x: statistics.performance_profile(x, [400.0]),
}


@pytest.mark.parametrize("name", INTERVALS)
def test_one_run_has_no_interval_and_runs_that_end_alike_have_one_of_no_width(name):
    value, low, high = INTERVALS[name]([1.5])
    assert np.all(np.isfinite(value))
    assert np.all(np.isnan(low))
    assert np.all(np.isnan(high))
    solved = {"mean": 500.0, "CVaR": 500.0, "IQM": 500.0, "probability": 0.5, "profile": 1.0}.get(name, 0.0)
    for n_runs in (2, 3, 4):
        assert [float(np.squeeze(x)) for x in INTERVALS[name](np.full(n_runs, 500.0))] == [solved] * 3


@pytest.mark.parametrize(
    ("function", "message"),
    [
        *(
            (lambda of=of: of([]), "returns must hold at least one run, but they are empty")
            for of in INTERVALS.values()
        ),
        *(
            (lambda of=of, x=x: of([1.0, x]), "returns must be finite, but they hold NaN or infinity")
            for of in INTERVALS.values()
            for x in (math.nan, math.inf)
        ),
        *((lambda k=k: cvar([1.0], k), r"kappa must be in \(0, 1\]") for k in (0.0, -0.1, 1.1, np.nan, [0.5, 2.0])),
        (lambda: cvar([], 0.5), "at least one run"),
        (lambda: final_return([1, 2], [1.0], 10), "of one length"),
        (lambda: final_return([2, 1], [1.0, 2.0], 10), "ascend"),
    ],
)
def test_what_has_no_statistic_is_refused(function, message):
    with pytest.raises(ValueError, match=message):
        function()


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


def test_several_tasks_by_hand():
    # of six pairs, X is above in four, and equal in one
    estimate = statistics.probability_of_improvement([1.0, 2.0, 3.0], [1.0, 1.5], n_resamples=200)
    assert estimate.value == pytest.approx(4.5 / 6)
    assert 0 <= estimate.low <= estimate.value <= estimate.high <= 1
    estimate = statistics.performance_profile([1.0, 2.0, 3.0, 4.0], [0.0, 2.0, 3.5, 5.0], n_resamples=200)
    np.testing.assert_array_equal(estimate.value, [1.0, 0.5, 0.25, 0.0])
    assert np.all((estimate.low <= estimate.value) & (estimate.value <= estimate.high))


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
    for ours, samples, statistic in (
        (statistics.interquartile_mean(x), [x], lambda x: np.array([metrics.aggregate_iqm(x)])),
        (
            statistics.probability_of_improvement(x, y),
            [x, y],
            lambda x, y: np.array([np.mean([np.mean(a[:, None] > b) for a, b in zip(x.T, y.T, strict=True)])]),
        ),
        (
            statistics.performance_profile(x, thresholds),
            [x],
            lambda x: np.array([np.mean(x > tau) for tau in thresholds]),
        ),
    ):
        scores = {"": samples if len(samples) > 1 else samples[0]}
        values, intervals = library.get_interval_estimates(scores, statistic, reps=2000)
        np.testing.assert_allclose(np.atleast_1d(ours.value), values[""], rtol=1e-12)
        bounds = np.atleast_2d(np.transpose(ours[1:])).T
        width = np.ptp(intervals[""], axis=0)
        # a bound of 2,000 resamples is uncertain by some 3% of the interval
        np.testing.assert_allclose(bounds - intervals[""], 0, atol=0.1 * width.max())


def test_intervals_are_repeatable_and_leave_the_global_generator_alone():
    x, state = np.random.default_rng(0).normal(size=6), np.random.get_state()
    first, second = (statistics.interquartile_mean(x, n_resamples=100, seed=1) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    np.testing.assert_equal(np.random.get_state(), state)
