"""The verdict on reuse, on scores that are plain."""

import numpy as np
import pandas as pd
import pytest
from judge_sample_reuse import judge, term

TASKS = ["Ant-v4", "Hopper-v4", "Walker2d-v4"]


def runs(**gains: list[float]) -> pd.DataFrame:
    """Scores near one, plus the gain of an arm in each task."""
    noise = np.random.default_rng(0).normal(0.0, 0.01, 6)
    rows = [
        {"label": label, "env": env, "final": 1 + x + gain, "area": 1 + x + gain, "final_return": 1000 * (1 + x + gain)}
        for label, of_tasks in gains.items()
        for env, gain in zip(TASKS, of_tasks, strict=True)
        for x in noise
    ]
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    ("arm", "preset", "verdict"),
    [
        ([0.1, 0.1, 0.1], [0.0] * 3, "Reuse holds: primary yes, not below the preset in either mean yes"),
        ([0.0, 0.0, 0.0], [0.0] * 3, "Reuse does not hold: primary no"),
        ([-0.1, -0.1, -0.1], [-0.2] * 3, "Reuse does not hold: primary no"),
        ([0.1, 0.1, 0.1], [0.2] * 3, "Reuse does not hold: primary yes, not below the preset in either mean no"),
        ([0.5, 0.5, -0.2], [0.0] * 3, "tasks with a veto: Walker2d-v4."),
        # too little for a tenth, and yet significant
        ([0.5, 0.5, -0.05], [0.0] * 3, "tasks with a veto: Walker2d-v4."),
    ],
)
def test_verdicts(arm, preset, verdict):
    lines, table = judge(runs(arm=arm, same=[0.0] * 3, preset=preset), "arm", "same", "preset")
    assert verdict in lines[-1]
    assert list(table.task) == TASKS


@pytest.mark.parametrize(("gain", "changes"), [(-0.1, True), (0.1, False), (0.0, False)])
def test_only_a_term_that_is_worse_is_left_out(gain, changes):
    line = term(runs(preset=[gain] * 3, without=[0.0] * 3), "preset", "without")
    assert line.endswith("the preset sets uncertainty_coef 0") == changes
