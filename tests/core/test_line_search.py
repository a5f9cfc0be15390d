"""The line search: the largest fraction that may be taken."""

import math

import pytest

from sb3_uatrpo.core.line_search import Evaluation, backtracking_line_search


def search(objectives, kls, max_kl=1.0, max_iter=10, before=0.0):
    tried = []

    def evaluate(fraction):
        i = len(tried)
        tried.append(fraction)
        return Evaluation(objectives[min(i, len(objectives) - 1)], kls[min(i, len(kls) - 1)])

    return backtracking_line_search(evaluate, before, max_kl, 0.5, max_iter), tried


def test_the_full_step_is_taken_if_it_may_be():
    result, tried = search([0.0], [1.0])
    assert (result.step_fraction, tried) == (1.0, [1.0])
    assert result.accepted == result.proposed == Evaluation(0.0, 1.0)


def test_the_largest_fraction_wins():
    result, tried = search([-1.0, 5.0, 1.0], [0.1, 1.1, 0.9])
    assert (result.step_fraction, tried) == (0.25, [1.0, 0.5, 0.25])
    assert result.proposed == Evaluation(-1.0, 0.1)
    assert result.accepted == Evaluation(1.0, 0.9)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_values_are_rejected(bad):
    assert search([bad, 1.0], [0.1])[0].step_fraction == 0.5
    assert search([1.0], [bad, 0.1])[0].step_fraction == 0.5


def test_an_infinite_kl_divergence_is_rejected_even_without_a_bound():
    assert search([1.0], [math.inf, 0.1], max_kl=math.inf)[0].step_fraction == 0.5


def test_the_objective_before_the_step_is_the_bound():
    assert search([0.5, 1.0], [0.1], before=1.0)[0].step_fraction == 0.5
    assert search([-0.5], [0.1], before=-1.0)[0].step_fraction == 1.0


def test_no_fraction_is_accepted_after_max_iter():
    result, tried = search([-1.0], [0.1], max_iter=4)
    assert (result.step_fraction, result.accepted) == (0.0, None)
    assert tried == [1.0, 0.5, 0.25, 0.125]
