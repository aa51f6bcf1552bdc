"""Two Boxes: tables, value and gradient against hand calculation, finite differences and full enumeration."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from agentr1_lite.advantages import compute_returns, estimate
from agentr1_lite.mdp import StopReason, states
from agentr1_lite.tasks.solvable import (
    ANSWER,
    CALL,
    EASY,
    LEFT,
    OPEN,
    PEEK,
    REPLY,
    WORDS,
    Boxes,
    exact_gradient,
    imitation,
    objective,
    probabilities,
    solve,
)
from agentr1_lite.tasks.solvable_gradients import advantages, gradient_samples, policy_gradient, quality, sample

ONE_TURN = Boxes(accuracy=(0.9,), max_turns=1)
WORLD = Boxes()


def random_logits(world, seed=0):
    return torch.randn(len(world.states), 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_one_turn_by_hand():
    # answering earns 0.5 on average, calling costs (0.02 + 0.1) / 2: J = 0.5 · 0.5 − 0.5 · 0.06
    logits = torch.zeros(3, 2, dtype=torch.float64)
    assert ONE_TURN.states == [(EASY,), (EASY, CALL), (EASY, ANSWER)]
    assert objective(ONE_TURN, logits).item() == pytest.approx(0.22)
    # d(s) π(a | s) (Q(s, a) − V(s)) at the root (Q = −0.06 and 0.5) and behind `call` (Q = −0.02 and −0.1)
    wanted = torch.tensor([[-0.14, 0.14], [0.01, -0.01], [0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(exact_gradient(ONE_TURN, logits), wanted)


def test_what_a_reply_tells_follows_bayes():
    state = WORLD.states.index((EASY, CALL, PEEK, REPLY, LEFT, CALL))
    again = {e.reply: e.probability for e in WORLD.ways[state] if e.choice == 0}
    assert again[LEFT] == pytest.approx(0.9 * 0.9 + 0.1 * 0.1)  # P(left again | left once)
    twice = WORLD.states.index((EASY, *(CALL, PEEK, REPLY, LEFT) * 2, ANSWER))
    right = [e.probability for e in WORLD.ways[twice] if e.choice == 0 and e.reward == 1.0]
    assert right == [pytest.approx(0.81 / 0.82)]
    sure = WORLD.states.index((EASY, CALL, OPEN, REPLY, LEFT, ANSWER))
    assert [(e.choice, e.probability, e.reward) for e in WORLD.ways[sure]] == [(0, 1.0, 1.0), (1, 1.0, 0.0)]


def test_the_optimum_by_hand():
    values, _ = solve(WORLD)
    # easy: peek, then say what it showed; hard: open, and after an error open again, and after two guess
    hard = -0.1 + 0.7 + 0.3 * (-0.1 + 0.7 + 0.3 * 0.5)
    assert values[WORLD.roots].tolist() == pytest.approx([0.9 - 0.02, hard])


def test_probabilities_sum_to_one_for_each_question():
    chances = probabilities(WORLD, random_logits(WORLD))
    for question in range(2):
        own = torch.tensor([WORLD.states[path[0].state] == (question,) for path in WORLD.paths])
        assert chances[own].sum().item() == pytest.approx(1.0)
    for state in range(len(WORLD.states)):
        for choice in range(2):
            assert sum(e.probability for e in WORLD.ways[state] if e.choice == choice) == pytest.approx(1.0)


def test_enumeration_and_backward_induction_agree():
    logits = random_logits(WORLD)
    values, q = solve(WORLD, logits)
    assert objective(WORLD, logits).item() == pytest.approx(values[WORLD.roots].mean().item())
    torch.testing.assert_close((logits.softmax(-1) * q).sum(-1), values)


def test_gradient_equals_finite_differences():
    logits, step = random_logits(WORLD), 1e-5
    gradient = exact_gradient(WORLD, logits)
    for state, choice in [(0, 0), (0, 1), (1, 0), (2, 1), (40, 0), (len(WORLD.states) - 1, 1)]:
        shift = torch.zeros_like(logits)
        shift[state, choice] = step
        slope = (objective(WORLD, logits + shift) - objective(WORLD, logits - shift)) / (2 * step)
        assert gradient[state, choice].item() == pytest.approx(slope.item(), abs=1e-9)


@pytest.mark.parametrize(
    ("name", "options", "unbiased"),
    [
        ("reinforce_pp", {"whiten": False}, True),
        ("reinforce_pp", {"whiten": False, "gamma": 0.8}, False),
        ("gae", {"whiten": False, "lam": 0.3}, True),  # the critic is exact
        ("gae", {"whiten": False, "lam": 0.3, "critic": 0.0}, False),
        ("gae", {"whiten": False, "lam": 1.0, "critic": 0.0}, True),
        ("turn_gae", {"whiten": False, "lam": 0.5}, True),
        ("n_step", {"n": 2}, True),
        ("n_step", {"n": 2, "critic": 0.0}, False),
    ],
)
def test_expected_gradient_over_all_trajectories(name, options, unbiased):
    """Every trajectory once, weighted by its probability: the expectation itself, without sampling."""
    logits, rows = random_logits(WORLD), WORLD.rows
    values = solve(WORLD, logits)[0] * options.get("critic", 1.0)
    options = {k: v for k, v in options.items() if k != "critic"}
    given = estimate(
        name, rows.rewards, rows.action_mask, values=values[rows.state], turn_ids=rows.turn_ids, **options
    ).advantages
    each = policy_gradient(WORLD, logits, torch.arange(len(WORLD.paths))[:, None], given[:, None])
    mean = torch.einsum("k,ksa->sa", probabilities(WORLD, logits), each) / 2
    assert torch.allclose(mean, exact_gradient(WORLD, logits), atol=1e-12) is unbiased


def test_group_estimators_over_all_pairs():
    """Groups of two in the one-turn world: RLOO is unbiased, the group's own mean as baseline halves the gradient."""
    logits, rows = random_logits(ONE_TURN), ONE_TURN.rows
    chance, exact = probabilities(ONE_TURN, logits), exact_gradient(ONE_TURN, logits)
    for name, factor in (("rloo", 1.0), ("dr_grpo", 0.5)):
        mean = torch.zeros_like(exact)
        for i, j in itertools.product(range(len(chance)), repeat=2):
            index = torch.tensor([i, j])
            given = estimate(name, rows.rewards[index], rows.action_mask[index], group_ids=[0, 0]).advantages
            mean += chance[i] * chance[j] * policy_gradient(ONE_TURN, logits, index[None], given[None])[0]
        torch.testing.assert_close(mean, factor * exact)


def test_samples_come_from_the_policy():
    logits = random_logits(WORLD)
    batch = sample(WORLD, logits, groups=2, group_size=20_000, seed=3)
    chance = probabilities(WORLD, logits)
    for group in range(2):
        drawn = batch.index[0][batch.group_ids == group]
        assert {WORLD.states[WORLD.paths[k][0].state] for k in set(drawn.tolist())} == {(group,)}
        share = torch.bincount(drawn, minlength=len(chance)) / len(drawn)
        own = torch.tensor([WORLD.states[path[0].state] == (group,) for path in WORLD.paths])
        error = (chance * (1 - chance) / len(drawn)).sqrt()
        assert ((share - chance).abs() <= 5 * error + 1e-12)[own].all()
    best = torch.tensor([WORLD.rows.rewards[k].sum() for k in range(len(chance))])
    assert set(batch.baseline.flatten().tolist()) <= set(best.tolist())
    assert torch.equal(sample(WORLD, logits, seed=3).index, sample(WORLD, logits, seed=3).index)


def test_dr_grpo_is_short_by_the_group_size():
    logits = torch.zeros(len(WORLD.states), 2, dtype=torch.float64)
    exact = exact_gradient(WORLD, logits).flatten()
    gain = quality(gradient_samples(WORLD, logits, "dr_grpo", 600, group_size=2), exact).gain
    assert abs(gain.value - (1 - 1 / 2)) < gain.high - gain.low  # four standard errors
    assert gain.high < 1


def test_quality_recovers_a_known_bias():
    exact, side = torch.tensor([3.0, 4.0]).double(), torch.tensor([-4.0, 3.0]).double()
    noise = torch.randn(4000, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = quality(2 * exact + side + 2 * noise, exact)
    # |exact + side| / |exact|, atan(|side| / |2 exact|), 2 · √2 / |2 exact|; up to four standard errors
    for figure, wanted in zip(found, (2, math.sqrt(2), math.degrees(math.atan(1 / 2)), math.sqrt(2) / 5), strict=True):
        assert abs(figure.value - wanted) < figure.high - figure.low < 0.1 * wanted


def test_intervals_cover_and_noise_is_not_taken_for_bias():
    exact = torch.ones(20, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    runs = [quality(exact + 9 * torch.randn(300, 20, generator=generator).double(), exact) for _ in range(200)]
    assert sum(run.gain.low < 1 < run.gain.high for run in runs) >= 180
    assert sum(run.bias.low == 0 for run in runs) >= 180
    # a plug-in |mean − exact| would report sqrt(20 · 81 / 300) / |exact| = 0.52 on average
    assert sum(run.bias.value for run in runs) / len(runs) < 0.25


def test_potential_keeps_the_optimum_and_a_bonus_does_not():
    plain, shaped, paid = Boxes(), Boxes(potential=2.0), Boxes(bonus=1.5)
    value, q = solve(plain)
    shaped_value, shaped_q = solve(shaped)
    torch.testing.assert_close(shaped_q.argmax(-1), q.argmax(-1))
    torch.testing.assert_close(shaped_value[shaped.roots], value[plain.roots] - 2 * 0.5)  # V − Φ(s_0)
    greedy = torch.nn.functional.one_hot(solve(paid)[1].argmax(-1), 2).double().log()
    assert objective(plain, greedy).item() == pytest.approx(-3 * 0.02)  # peeks three times and never answers
    # all trajectories of a question pay the same potential in sum
    difference = shaped.rows.rewards.sum(-1) - plain.rows.rewards.sum(-1)
    torch.testing.assert_close(difference, torch.full_like(difference, -1.0))


def test_imitation_leads_to_the_optimum_where_learning_from_nothing_stops_at_guessing():
    reached = []
    for logits in (imitation(WORLD), imitation(WORLD, 0.0)):
        for _ in range(200):
            logits = logits + 20 * exact_gradient(WORLD, logits)
        reached.append(solve(WORLD, logits)[0][WORLD.roots].tolist())
    assert reached[0] == pytest.approx(solve(WORLD)[0][WORLD.roots].tolist(), abs=0.01)
    assert reached[1] == pytest.approx([0.88, 0.5], abs=0.01)


def test_a_trajectory_says_what_its_row_says():
    logits = random_logits(WORLD)
    for k in range(0, len(WORLD.paths), 7):
        trajectory, row = WORLD.trajectory(k, logits), WORLD.rows.select(torch.tensor([k]))
        trajectory.check()
        segment = trajectory.segments[0]
        size = len(segment)
        assert segment.token_ids == row.tokens[0, :size].tolist()
        assert (row.tokens[0, size:] == -1).all()
        assert trajectory.info["pieces"] == [[f"{WORDS[i]} " for i in segment.token_ids]]
        assert segment.action_mask == row.action_mask[0, :size].tolist()
        assert trajectory.token_rewards()[0] == pytest.approx(row.rewards[0, :size].tolist())
        assert math.exp(sum(segment.logprobs)) * WORLD.chance[k] == pytest.approx(probabilities(WORLD, logits)[k])
        met = [state.token_ids for state, action, _ in states(trajectory) if action is not None]
        assert met == [WORLD.states[edge.state] for edge in WORLD.paths[k]]
        ended = StopReason.ANSWER if segment.token_ids[-2] == ANSWER else StopReason.MAX_TURNS
        assert trajectory.stop_reason is ended


def test_advantages_see_anchors_turns_and_baselines():
    logits = torch.zeros(len(WORLD.states), 2, dtype=torch.float64)
    batch, values = sample(WORLD, logits, seed=5), solve(WORLD, logits)[0]
    rows = WORLD.rows.select(batch.index[0])
    remax = advantages(WORLD, "remax", batch, values=values)
    for b in range(len(rows.rewards)):
        returns = compute_returns(rows.rewards[b][rows.action_mask[b]], 1.0) - batch.baseline[0, b]
        torch.testing.assert_close(remax[b][rows.action_mask[b]], returns)
    assert set(rows.anchor_ids[:, 1].tolist()) == {0, 1}  # the question
    second = rows.action_mask[:, 5]
    assert rows.anchor_ids[second, 5].tolist() == rows.tokens[second, 4].tolist()  # the reply


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"accuracy": (1.2,)}, "probabilities"),
        ({"accuracy": (0.5, 0.6, 0.7)}, "two questions"),
        ({"max_turns": 0}, "max_turns is 0"),
    ],
)
def test_bad_worlds_are_refused(arguments, says):
    with pytest.raises(ValueError, match=says):
        Boxes(**arguments)


def test_uneven_groups_are_refused():
    with pytest.raises(ValueError, match="3 groups for 2 questions"):
        sample(WORLD, random_logits(WORLD), groups=3)
