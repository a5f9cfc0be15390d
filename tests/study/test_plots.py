"""What is drawn: lines that go through the right points, on the axes that were given."""

import numpy as np
import pytest
from matplotlib.figure import Figure

from sb3_uatrpo.study import plots
from sb3_uatrpo.study.statistics import Estimate, cvar

RETURNS = {"uatrpo": np.array([1.0, 2.0, 3.0, 4.0]), "trpo": np.array([0.0, 5.0])}
STEPS = np.array([100.0, 200.0, 300.0])
CURVES = {
    "uatrpo": (STEPS, np.array([[np.nan, 1.0, 2.0], [0.0, 3.0, 4.0]])),
    "one run": (STEPS, np.array([[1.0, 2.0, 3.0]])),
}


@pytest.fixture
def ax():
    return Figure(layout="constrained").subplots()


def lines(ax) -> dict[str, np.ndarray]:
    return {line.get_label(): line.get_xydata() for line in ax.lines if not line.get_label().startswith("_")}


def test_learning_curves(ax):
    assert plots.plot_learning_curves(ax, CURVES) is ax
    drawn = lines(ax)
    # from where all runs are known
    np.testing.assert_array_equal(drawn["uatrpo"], [[200, 2], [300, 3]])
    np.testing.assert_array_equal(drawn["one run"][:, 1], [1, 2, 3])
    traces = [line for line in ax.lines if line.get_label().startswith("_")]
    # a single run is its own mean
    assert len(traces) == 2
    assert ax.get_xlim() == (0, 300)
    assert "steps" in ax.get_xlabel()
    ax.figure.canvas.draw()


def test_cvar(ax):
    kappas = np.array([0.25, 0.5, 1.0])
    assert plots.plot_cvar(ax, RETURNS, kappas=kappas, n_resamples=100) is ax
    for label, returns in RETURNS.items():
        np.testing.assert_allclose(lines(ax)[label], np.stack([kappas, cvar(returns, kappas)], axis=1))
    assert len(ax.collections) == 2
    ax.figure.canvas.draw()


def test_cvar_over_training_begins_where_all_runs_are_known(ax):
    assert plots.plot_cvar_over_training(ax, CURVES, kappa=0.5, n_resamples=100) is ax
    np.testing.assert_array_equal(lines(ax)["uatrpo"], [[200, 1], [300, 2]])
    np.testing.assert_array_equal(lines(ax)["one run"][:, 1], [1, 2, 3])
    assert ax.get_ylabel().startswith("50%-CVaR")
    plots.plot_cvar_over_training(ax, CURVES, kappa=0.125, n_resamples=100)
    assert ax.get_ylabel().startswith("12.5%-CVaR")
    ax.figure.canvas.draw()


def test_kl_ratio(ax):
    ratios = {"uatrpo": [0.95, 1.0, 1.05, 2.5], "trpo": [3.5, 40.0], "ppo": [], "a2c": [-3.0, 1.0]}
    assert plots.plot_kl_ratio(ax, ratios) is ax
    _, labels = ax.get_legend_handles_labels()
    assert labels == ["uatrpo", "trpo", "a2c"]
    assert [text.get_text() for text in ax.texts] == ["25% ≥ 2, 0% ≥ 3", "100% ≥ 2, 100% ≥ 3", "0% ≥ 2, 0% ≥ 3"]
    shares = [patch.get_data().values.sum() for patch in ax.patches]
    np.testing.assert_allclose(shares, 1.0)
    # what is too large for the axis is in the last bin, and what is too small in the first
    assert ax.patches[3].get_data().values[-1] == 0.5
    assert ax.patches[-1].get_data().values[0] == 0.5
    ax.figure.canvas.draw()


def test_kl_ratio_over_training(ax):
    """Two runs of 100 updates each: the first update of a fiftieth has 1, the second 2, in the other run 3 and 10."""
    steps = np.arange(1000, 101_000, 1000)
    both = np.concatenate([np.tile([1.0, 2.0], 50), np.tile([3.0, 10.0], 50)])
    ratios = {"both": (np.tile(steps, 2), both), "one": (steps[:50], np.full(50, 0.5)), "short": ([500.0], [7.0])}
    assert plots.plot_kl_ratio_over_training(ax, ratios) is ax
    drawn = lines(ax)
    np.testing.assert_allclose(drawn["both"], np.stack([np.arange(2000, 101_000, 2000), np.full(50, 2.5)], axis=1))
    np.testing.assert_allclose(drawn["one"], np.stack([np.arange(2000, 51_000, 2000), np.full(25, 0.5)], axis=1))
    np.testing.assert_allclose(drawn["short"], [[2000, 7.0]])
    # a line of one point would be invisible
    assert {line.get_label(): line.get_marker() for line in ax.get_lines() if line.get_label() in ratios} == {
        "both": "None", "one": "None", "short": "o",
    }  # fmt: skip
    band = ax.collections[0].get_paths()[0].vertices
    assert (band[:, 1].min(), band[:, 1].max()) == (1.75, 4.75)
    assert ax.get_yscale() == "log"
    ax.figure.canvas.draw()


@pytest.mark.parametrize(
    ("lowest", "highest"), [(0.98, 1.03), (0.9, 1.4), (0.5, 3.0), (0.6, 5.0), (0.5, 5.0), (0.5, 20.0), (0.01, 300.0)]
)
def test_ratios_over_training_can_be_read_off(ax, lowest, highest):
    plots.plot_kl_ratio_over_training(ax, {"one": (np.arange(1, 101), np.geomspace(lowest, highest, 100))})
    ax.figure.canvas.draw()
    low, high = ax.get_ylim()
    named = [label for tick, label in zip(ax.get_yticks(), ax.get_yticklabels(), strict=True) if low <= tick <= high]
    assert 4 <= len([label for label in named if label.get_text()]) <= 14


@pytest.mark.parametrize("returns", [RETURNS, {"solved": np.full(3, 500.0)}, {"zero": np.zeros(2)}])
def test_performance_profile(ax, returns):
    assert plots.plot_performance_profile(ax, returns, n_resamples=50) is ax
    for line in lines(ax).values():
        assert line[0, 1] == 1
        assert line[-1, 1] == 0
        assert np.all(np.diff(line[:, 1]) <= 0)
    ax.figure.canvas.draw()


def test_estimates(ax):
    estimates = {
        "mean": Estimate(np.array(1.0), np.array(0.5), np.array(2.0)),
        "one run": Estimate(np.array([3.0]), np.array([np.nan]), np.array([np.nan])),
    }
    assert plots.plot_estimates(ax, estimates, "difference", reference=0.0) is ax
    assert [text.get_text() for text in ax.get_yticklabels()] == ["mean", "one run"]
    points = [line.get_xydata()[0].tolist() for line in ax.lines if line.get_marker() == "o"]
    assert points == [[1.0, 0.0], [3.0, 1.0]]
    ax.figure.canvas.draw()


def test_styles_differ_also_without_colour():
    styles = plots.styles(["a", "b", "c", "d"])
    assert len({style["linestyle"] for style in styles.values()}) == 4
    assert len({style["color"] for style in styles.values()}) == 4
    assert plots.styles([]) == {}
    # more labels than the palette has colours
    assert len(plots.styles([str(i) for i in range(15)])) == 15
