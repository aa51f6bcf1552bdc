"""Estimators against verl's and TRL's numbers, public failing inputs, properties, and an exactly solvable MDP."""

from __future__ import annotations

import itertools
import json
import math
import statistics
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentr1_lite import advantages as adv
from agentr1_lite.advantages import compute_gae, compute_returns, estimate, move_rewards_to_actions, names

GOLDEN = Path(__file__).parent / "golden"
VERL = json.loads((GOLDEN / "verl.json").read_text())
TRL = json.loads((GOLDEN / "trl.json").read_text())
ALONE = 6  # the row of the verl batch whose group has no second rollout
SETTINGS = settings(max_examples=15, deadline=None)


def close(a, b, tolerance=1e-5):
    torch.testing.assert_close(torch.as_tensor(a).double(), torch.as_tensor(b).double(), atol=tolerance, rtol=1e-5)


def run(name, rewards, mask, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return estimate(name, torch.as_tensor(rewards), torch.as_tensor(mask), **options)


def verl(key):
    """Golden inputs as estimate() takes them and golden outputs; outputs off the mask are not compared."""
    row = VERL[key]
    mask = torch.tensor(row["inputs"]["response_mask"]).bool()
    outputs = [torch.tensor(x) for x in row["outputs"]]
    return torch.tensor(row["inputs"]["token_level_rewards"]), mask, row["inputs"], outputs


@pytest.mark.parametrize(
    ("key", "name", "options"),
    [
        ("grpo", "grpo", {}),
        ("grpo_vectorized", "GRPO", {}),
        ("grpo_nostd", "dr_grpo", {}),
        ("grpo_nostd", "grpo", {"scale": "none"}),
        ("rloo", "rloo", {}),
        ("rloo_vectorized", "RLOO", {}),
        ("opo", "opo", {}),
        ("gpg", "gpg", {}),
        ("grpo_passk_without_group_of_one", "grpo_passk", {}),
    ],
)
def test_group_estimators_equal_verl(key, name, options):
    rewards, mask, inputs, outputs = verl(key)
    ours = run(name, rewards, mask, group_ids=inputs["index"], **options)
    for mine, theirs in zip(ours, outputs, strict=True):
        close(mine[:ALONE][mask[:ALONE]], theirs[:ALONE][mask[:ALONE]])


@pytest.mark.parametrize("key", ["grpo", "grpo_nostd", "rloo", "opo", "gpg"])
def test_group_of_one_is_zero_where_verl_gives_its_raw_reward(key):
    """verl: 2.0 (gpg 2.33) for the rollout without a companion, as if its baseline were 0. With nothing to compare
    there is no evidence that the rollout was good: we give 0 and say so (PITFALLS, rewards)."""
    rewards, mask, inputs, outputs = verl(key)
    assert outputs[0][ALONE, 0] > 1.9
    name = {"grpo_nostd": "dr_grpo"}.get(key, key)
    with pytest.warns(UserWarning, match=r"single rollout \(the first is rollout 6\)"):
        ours = estimate(name, rewards, mask, group_ids=inputs["index"])
    assert (ours.advantages[ALONE] == 0).all()


def test_reinforce_pp_baseline_differs_from_verl_only_by_the_group_of_one():
    """verl whitens with row 6's centred score 2.0, ours with 0; hence every number moves. Undoing that one
    difference by hand gives verl's numbers; ours are checked against the textbook formula."""
    rewards, mask, inputs, outputs = verl("reinforce_pp_baseline")
    centred = [0.375, -0.625, -0.125, 0.375, 0.0, 0.0]
    lengths = mask.sum(-1).tolist()

    def white(scores):
        tokens = [s for s, n in zip(scores, lengths, strict=True) for _ in range(n)]
        return [(s - statistics.mean(tokens)) / math.sqrt(statistics.variance(tokens) + 1e-8) for s in scores]

    close(white([*centred, 2.0]), outputs[0][:, 0])
    ours = run("REINFORCE++-baseline", rewards, mask, group_ids=inputs["index"]).advantages
    close(ours[:, 0], white([*centred, 0.0]))
    assert (ours[~mask] == 0).all()


@pytest.mark.parametrize("key", ["reinforce_pp", "reinforce_pp_gamma.9_toolgap"])
def test_reinforce_pp_equals_verl(key):
    rewards, mask, inputs, outputs = verl(key)
    ours = run("REINFORCE++", rewards, mask, gamma=inputs["config"]["gamma"])
    for mine, theirs in zip(ours, outputs, strict=True):
        close(mine[mask], theirs[mask])


def test_remax_equals_verl():
    rewards, mask, inputs, outputs = verl("remax")
    ours = run("ReMax", rewards, mask, baseline=inputs["reward_baselines"])
    for mine, theirs in zip(ours, outputs, strict=True):
        close(mine[mask], theirs[mask])


@pytest.mark.parametrize("key", ["gae_g1.0_l1.0", "gae_g0.99_l0.95"])
def test_gae_equals_verl_on_action_tokens_and_is_zero_elsewhere(key):
    """verl whitens masked positions too and leaves numbers there (row 2: −1.10); they must never be used: ours 0."""
    rewards, mask, inputs, outputs = verl(key)
    ours = run("PPO", rewards, mask, values=inputs["values"], gamma=inputs["gamma"], lam=inputs["lam"])
    for mine, theirs in zip(ours, outputs, strict=True):
        close(mine[mask], theirs[mask])
        assert (mine[~mask] == 0).all()


def test_reward_on_a_masked_token_is_kept_where_verl_loses_it():
    """Case rl04: the episode ends on a tool reply and the reward lies on its last token. verl: all 0 (miles#1827)."""
    rewards, mask, inputs, outputs = verl("gae_reward_on_masked_token_is_lost")
    assert (outputs[0] == 0).all()
    ours = run("gae", rewards, mask, values=inputs["values"], whiten=False)
    close(ours.advantages, [[1.0, 1.0, 0.0, 0.0]])
    close(move_rewards_to_actions(rewards, mask), [[0.0, 1.0, 0.0, 0.0]])


def test_move_rewards_goes_back_to_the_action_that_earned_it():
    nan, inf = math.nan, math.inf
    mask = torch.tensor([[0, 1, 1, 0, 0, 1, 0], [0, 0, 1, 0, 1, 0, 0], [0] * 7])
    rewards = torch.tensor([[4.0, 0, 1, 2, nan, 8, 16], [1.0, inf, 0, 0, 2, 4, -inf], [1.0] * 7])
    expected = [[0, 4, 3, 0, 0, 24, 0], [0, 0, 1, 0, 6, 0, 0], [0] * 7]
    close(move_rewards_to_actions(rewards, mask), torch.tensor(expected))


@pytest.mark.parametrize("case", ["basic", "none", "batch"])
def test_grpo_equals_trl(case):
    row = TRL["advantages"][case]
    rewards, scale = torch.tensor(row["rewards"]), row["kw"].get("scale_rewards", "group")
    groups = [i // row["num_generations"] for i in range(len(rewards))]
    ours = run("grpo", rewards, torch.ones_like(rewards), group_ids=groups, scale=scale, eps=1e-4).advantages
    close(ours[:, 0], row["advantages"])


@pytest.mark.parametrize("group", [[1.0] * 4, [0.0] * 4, [0.7] * 8, [1.3] * 8, [10.1] * 8])
def test_equal_rewards_give_exactly_zero(group):
    """Case rl01. By their std, verl's float32 gives 0.056, 0.106 and 0.472 for the last three groups, TRL less."""
    rewards = torch.tensor(group).unsqueeze(-1)
    for name in ("grpo", "dr_grpo", "rloo", "opo", "gpg", "grpo_passk", "reinforce_pp", "reinforce_pp_baseline"):
        ours = run(name, rewards, torch.ones_like(rewards), group_ids=[0] * len(group))
        assert (ours.advantages == 0).all(), name
    assert adv.zero_variance_share(group, ["q"] * len(group)) == 1.0
    assert adv.zero_variance_share([*group, 5.0, 6.0], ["q"] * len(group) + ["r", "r"]) == 0.5


def test_equal_returns_earned_on_different_tokens_give_exactly_zero():
    """0.1 + 0.2 and 0.3 differ by rounding; no std may blow that up."""
    rewards = torch.tensor([[0.1, 0.2, 0.0], [0.0, 0.0, 0.3], [0.5, 0.1, -0.3], [0.3, 0.0, 0.0]])
    assert (run("grpo", rewards, torch.ones(4, 3), group_ids=[0] * 4).advantages == 0).all()
    cancelling = torch.tensor([[0.7, 0.0, -0.7], [0.1, 0.6, -0.7]])
    assert (run("grpo", cancelling, torch.ones(2, 3), group_ids=[0] * 2).advantages == 0).all()


def test_whitening_does_not_blow_up_rounding():
    """Returns 0.3 and 0.1 + 0.2 on one action differ by 7e-9 in float32; whitened without a guard, by 5e-5."""
    rewards, mask = torch.tensor([[0.3, 0.0], [0.1, 0.2]]), torch.tensor([[1, 0], [1, 0]])
    for name in ("reinforce_pp", "gae", "turn_gae"):
        assert (run(name, rewards, mask, values=torch.zeros(2, 2)).advantages == 0).all()


def test_returns_are_carried_across_a_tool_reply():
    """Case rl03 (verl#7278): a reset at every masked token gives [0, 0, 0, 0, 1, 1]."""
    ours = run("reinforce_pp", [[0, 0, 0, 0, 0, 1.0]], [[1, 1, 0, 0, 1, 1]], gamma=1.0)
    close(ours.returns, [[1.0, 1, 0, 0, 1, 1]])
    close(
        run("reinforce_pp", [[0, 0, 0, 0, 0, 1.0]], [[1, 1, 0, 0, 1, 1]], gamma=0.5).returns,
        [[0.125, 0.25, 0, 0, 0.5, 1]],
    )


def test_n_step_by_hand():
    rewards, values, mask = [[1.0, 9, 2, 3, 4]], [[0.5, 99, 0.1, 0.2, 0.3]], [[1, 0, 1, 1, 1]]
    one = run("n_step", rewards, mask, values=values, n=1, gamma=0.5).advantages
    # the 9 lies on the tool reply and belongs to the action before it: r = (10, 2, 3, 4)
    close(one, [[10 + 0.05 - 0.5, 0, 2 + 0.1 - 0.1, 3 + 0.15 - 0.2, 4 - 0.3]])
    two = run("n-step", rewards, mask, values=values, n=2, gamma=0.5).advantages
    close(two, [[10 + 1 + 0.05 - 0.5, 0, 2 + 1.5 + 0.25 * 0.3 - 0.1, 3 + 2 - 0.2, 4 - 0.3]])
    with pytest.raises(ValueError, match="n is 0"):
        run("n_step", rewards, mask, values=values, n=0)


def test_turn_gae_by_hand():
    mask = [[1, 1, 0, 1, 1, 1]]
    rewards = [[0.0, 0.5, 0, 0, 0.25, 1.0]]
    values = [[0.2, 7, 7, 0.4, 7, 7]]
    ours = run("turn_gae", rewards, mask, values=values, gamma=0.9, lam=0.5, whiten=False)
    second = 1.25 - 0.4
    first = 0.5 + 0.9 * 0.4 - 0.2 + 0.45 * second
    close(ours.advantages, [[first, first, 0, second, second, second]])
    close(ours.returns, [[first + 0.2, first + 0.2, 0, 1.25, 1.25, 1.25]])
    explicit = run("turn_gae", rewards, mask, values=values, turn_ids=[[0, 0, -1, 0, 0, 0]], whiten=False)
    close(explicit.advantages, [[1.75 - 0.2, 1.55, 0, 1.55, 1.55, 1.55]])  # one turn around a tool reply


def test_turn_gae_with_one_token_turns_is_gae():
    rewards, values, mask = torch.rand(3, 8), torch.rand(3, 8), torch.tensor([[1, 0] * 4] * 3)
    options = {"values": values, "gamma": 0.9, "lam": 0.8}
    close(run("turn_gae", rewards, mask, **options).advantages, run("gae", rewards, mask, **options).advantages)


def test_gigpo_by_hand():
    mask = [[1, 1, 0, 1], [1, 0, 1, 1], [1, 1, 1, 1]]
    rewards = [[0.0, 0, 0, 1], [0, 0, 0, 0.0], [0, 0, 0, 4.0]]
    options = {
        "group_ids": ["a", "a", "b"],
        "turn_ids": [[0, 0, -1, 1], [0, -1, 1, 1], [0, 0, 1, 1]],
        "anchor_ids": [[5, 5, -1, 6], [5, -1, 7, 7], [5, 5, 6, 6]],
    }
    ours = run("GiGPO", rewards, mask, gamma=0.5, step_weight=2.0, scale="none", **options).advantages
    # anchor 5 of group a: step returns 0.5 and 0, centred ±0.25; anchors 6 and 7 are met once
    close(ours, [[0.5 + 0.5, 1.0, 0, 0.5], [-0.5 - 0.5, 0, -0.5, -0.5], [0.0, 0, 0, 0]])
    scaled = run("gigpo", rewards, mask, gamma=0.5, **options).advantages
    assert scaled[0, 0] == pytest.approx(2 * math.sqrt(0.5), abs=1e-4)  # both levels: ±0.5·d / (d/√2)


def test_grpo_passk_pays_the_winner_its_lead():
    rewards = torch.tensor([[3.0], [1.0], [2.0]])
    ours = run("grpo_passk", rewards, torch.ones(3, 1), group_ids=[0, 0, 0]).advantages
    close(ours[:, 0], [1.0, 0.0, 0.0])


def test_compute_returns_and_gae_on_lists_and_tensors():
    assert compute_returns([0, 0, 1], 0.5) == [0.25, 0.5, 1.0]
    close(compute_returns(torch.tensor([0, 0, 1]), 0.5), [0.25, 0.5, 1.0])
    assert compute_returns([], 0.9) == []
    gae = compute_gae([0.5, 0.25], [0.0, 1.0], 0.9, 0.8)
    assert gae == pytest.approx([0.9 * 0.25 - 0.5 + 0.72 * 0.75, 0.75])
    assert compute_gae([0.5, 0.25, 2.0], [0.0, 1.0], 0.9, 0.8)[1] == pytest.approx(0.75 + 1.8)
    values = torch.tensor([0.5, 0.25], requires_grad=True)
    close(compute_gae(values, torch.tensor([0.0, 1.0]), 0.9, 0.8), gae)
    with pytest.raises(ValueError, match="1 values for 3 rewards"):
        compute_gae([1.0], [1.0, 2, 3], 1.0, 1.0)


def test_normalise_process_rewards():
    mask = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0]])
    ours = adv.normalise_process_rewards(torch.tensor([[1.0, 1, 2, -1], [0.5, 0, 0, math.nan]]), mask)
    close(ours, torch.tensor([[1.0, 3, 0, -1], [0.5, 0, 0, 0]]) / 3)  # |reverse cumulative sums|: 3, 2, −1 and 0.5
    assert (adv.normalise_process_rewards(torch.zeros(1, 4), mask[:1]) == 0).all()


# Names and errors


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("PPO", "gae"),
        ("REINFORCE++", "reinforce_pp"),
        ("reinforce_plus_plus", "reinforce_pp"),
        ("reinforce_plus_plus_baseline", "reinforce_pp_baseline"),
        ("Dr. GRPO", "dr_grpo"),
        ("n-step", "n_step"),
        ("turn-level GAE", "turn_gae"),
        ("GSPO", "grpo"),
    ],
)
def test_aliases(alias, name):
    assert adv.find(alias) is adv.ESTIMATORS[name]


def test_names_hold_every_estimator():
    asked = {
        "gae",
        "turn_gae",
        "n_step",
        "grpo",
        "dr_grpo",
        "reinforce_pp",
        "reinforce_pp_baseline",
        "rloo",
        "remax",
        "gigpo",
    }
    assert asked <= set(names())


ONES = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("grop", ONES, ONES), {}, "no estimator is called 'grop'; choose one of gae"),
        (("gae", ONES, ONES), {}, "'gae' needs values"),
        (("grpo", ONES, ONES), {}, "'grpo' needs group_ids"),
        (("remax", ONES, ONES), {}, "'remax' needs baseline"),
        (("gigpo", ONES, ONES), {"group_ids": [0, 0]}, "'gigpo' needs anchor_ids"),
        (("grpo", ONES, ONES), {"group_ids": [0, 0, 0]}, r"group_ids has shape \(3,\)"),
        (("grpo", ONES, torch.ones(2, 4)), {"group_ids": [0, 0]}, r"action_mask has shape \(2, 4\)"),
        (("grpo", torch.ones(3), torch.ones(3)), {"group_ids": [0]}, r"rewards has shape \(3,\); give \(B, T\)"),
        (("grpo", ONES, ONES), {"group_ids": [0, 0], "wihten": True}, "no estimator has an option 'wihten'"),
        (("grpo", ONES, ONES), {"group_ids": [0, 0], "gamma": 1.5}, "gamma is 1.5"),
        (("grpo", ONES, ONES), {"group_ids": [0, 0], "scale": "std"}, "scale is 'std'"),
        (
            ("grpo", ONES * math.nan, ONES),
            {"group_ids": [0, 0]},
            "rewards is nan on the action token at row 0, token 0",
        ),
    ],
)
def test_errors_are_one_sentence(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        estimate(*arguments, **options)


# Properties of every estimator

numbers = st.floats(-3, 3, width=32)


@st.composite
def batches(draw):
    """Rows of action tokens only, with what each estimator may ask for."""
    rows, length = draw(st.integers(2, 5)), draw(st.integers(1, 6))
    matrix = st.lists(st.lists(numbers, min_size=length, max_size=length), min_size=rows, max_size=rows)
    lengths = torch.tensor(draw(st.lists(st.integers(1, length), min_size=rows, max_size=rows)))
    ids = st.lists(st.lists(st.integers(0, 2), min_size=length, max_size=length), min_size=rows, max_size=rows)
    turns = torch.tensor(draw(ids)).cumsum(-1)  # steps of 0, 1 or 2: turns of any length
    anchors = (turns * 7 + torch.arange(rows).unsqueeze(-1) % 2) % 3
    return (
        torch.tensor(draw(matrix)),
        torch.arange(length) < lengths.unsqueeze(-1),
        {
            "values": torch.tensor(draw(matrix)),
            "group_ids": torch.tensor(draw(st.lists(st.integers(0, 1), min_size=rows, max_size=rows))),
            "baseline": torch.tensor(draw(st.lists(numbers, min_size=rows, max_size=rows))),
            "turn_ids": turns,
            "anchor_ids": anchors,
        },
    )


def per_token(options):
    return {k: v for k, v in options.items() if v.dim() == 2}


def pad_with_observations(batch, gaps, filler):
    """Put ``gaps[t]`` masked tokens before place t (and behind the end), with ``filler`` in every input."""
    rewards, mask, options = batch
    place = torch.tensor(gaps[: rewards.shape[1]]).cumsum(0) + torch.arange(rewards.shape[1])
    total = int(place[-1]) + 1 + gaps[-1]

    def spread(x, fill):
        out = torch.full((len(x), total), fill, dtype=x.dtype)
        out[:, place] = x
        return out

    fillers = {"values": filler, "turn_ids": -1, "anchor_ids": 2}
    wide = {k: spread(v, fillers[k]) for k, v in per_token(options).items()}
    bad = filler if not math.isfinite(filler) else 0.0  # a finite reward on an observation counts, garbage does not
    return spread(torch.where(mask, rewards, bad), bad), spread(mask, False), {**options, **wide}, place


@pytest.mark.parametrize("name", names())
@SETTINGS
@given(
    batch=batches(),
    gaps=st.lists(st.integers(0, 3), min_size=7, max_size=7),
    filler=st.sampled_from([0.0, math.nan, math.inf, -math.inf, 1e9]),
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
)
def test_inserted_observations_change_nothing(name, batch, gaps, filler, gamma):
    rewards, mask, options = batch
    plain = run(name, torch.where(mask, rewards, 0.0), mask, gamma=gamma, lam=0.9, n=2, **options)
    wide_rewards, wide_mask, wide, place = pad_with_observations(batch, gaps, filler)
    padded = run(name, wide_rewards, wide_mask, gamma=gamma, lam=0.9, n=2, **wide)
    for before, after in zip(plain, padded, strict=True):
        assert torch.equal(after[:, place], before)
        assert after.isfinite().all() and (after[~wide_mask] == 0).all()


@pytest.mark.parametrize("name", names())
@SETTINGS
@given(batch=batches(), data=st.data())
def test_order_of_rows_and_names_of_groups_do_not_matter(name, batch, data):
    rewards, mask, options = batch
    if name == "grpo_passk":  # a tie has one winner, the first
        rewards[:, 0] += torch.arange(len(rewards)) * 10.0
    order = torch.tensor(data.draw(st.permutations(range(len(rewards)))))
    plain = run(name, rewards, mask, gamma=0.9, **options)
    shuffled = {k: v[order] for k, v in options.items()}
    shuffled["group_ids"] = [f"question {int(g)}" for g in shuffled["group_ids"]]
    for before, after in zip(plain, run(name, rewards[order], mask[order], gamma=0.9, **shuffled), strict=True):
        close(after, before[order])


@pytest.mark.parametrize("name", names())
@SETTINGS
@given(batch=batches(), cut=st.integers(1, 5))
def test_segments_of_one_trajectory_are_one_rollout(name, batch, cut):
    """Two rows with one trajectory_index stand for one long row: context policies change no credit."""
    rewards, mask, options = batch
    rewards = torch.where(mask, rewards, 0.0)
    whole = run(name, rewards, mask, gamma=0.9, lam=0.8, **options)
    early = torch.arange(rewards.shape[1]) < cut
    twice = {k: v.repeat_interleave(2, 0) for k, v in options.items()}
    halves = torch.stack([mask & early, mask & ~early], 1).flatten(0, 1)
    index = torch.arange(len(rewards)).repeat_interleave(2)
    rewards = torch.where(halves, rewards.repeat_interleave(2, 0), 0.0)
    parts = run(name, rewards, halves, gamma=0.9, lam=0.8, trajectory_index=index, **twice)
    for part, total in zip(parts, whole, strict=True):
        close(part.unflatten(0, (-1, 2)).sum(1), total)


@SETTINGS
@given(batch=batches())
def test_grpo_sums_to_zero_in_every_group(batch):
    rewards, mask, options = batch
    for name in ("grpo", "dr_grpo", "rloo"):
        ours = run(name, rewards, mask, group_ids=options["group_ids"]).advantages[:, 0]
        for group in (0, 1):
            assert abs(ours[options["group_ids"] == group].sum()) < 1e-4


@SETTINGS
@given(reward=st.floats(-1e4, 1e4, width=32), size=st.integers(1, 9), tokens=st.integers(1, 5))
def test_any_equal_rewards_give_exactly_zero(reward, size, tokens):
    rewards = torch.zeros(size, tokens)
    rewards[torch.arange(size), torch.arange(size) % tokens] = reward
    for name in ("grpo", "dr_grpo", "rloo", "opo", "gpg", "reinforce_pp_baseline"):
        assert (run(name, rewards, torch.ones(size, tokens), group_ids=[0] * size).advantages == 0).all()


@pytest.mark.parametrize("name", names())
def test_rows_without_actions_are_finite_zero_and_said(name):
    rewards = torch.tensor([[1.0, 0.0], [3.0, math.nan], [0.0, 1.0], [5.0, 0.0]])
    mask = torch.tensor([[1, 1], [0, 0], [1, 1], [1, 0]])
    options = {
        "values": torch.full((4, 2), 0.5),
        "group_ids": [0, 0, 0, 0],
        "baseline": torch.zeros(4),
        "anchor_ids": torch.zeros(4, 2, dtype=torch.long),
    }
    with pytest.warns(UserWarning, match="row 1 has no action token"):
        ours = estimate(name, rewards, mask, **options)
    assert all(x.isfinite().all() and (x[1] == 0).all() for x in ours)
    keep = [0, 2, 3]
    without = {k: [v[i] for i in keep] if isinstance(v, list) else v[keep] for k, v in options.items()}
    close(run(name, rewards[keep], mask[keep], **without).advantages, ours.advantages[keep])
    nothing = run(name, rewards, torch.zeros(4, 2), **options)
    assert all((x == 0).all() for x in nothing)


def test_dtype_and_device_follow_the_rewards():
    mask = torch.ones(2, 2)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0]], dtype=dtype)
        assert run("grpo", rewards, mask, group_ids=[0, 0]).advantages.dtype == dtype
    assert run("grpo", torch.tensor([[0, 1], [0, 0]]), mask, group_ids=[0, 0]).advantages.dtype == torch.float32


# An agent MDP small enough to enumerate: token a, token b; b = 1 calls a tool whose reply o is random,
# and the policy then answers c. Every expectation below is a sum over all trajectories, nothing is sampled.

THETA = {"": [0.3, -0.2], "0": [0.1, 0.5], "1": [-0.4, 0.2]}
THETA |= {a + "1" + o: [0.2 * int(a) - 0.1, 0.3 * int(o)] for a in "01" for o in "01"}
REPLY = {"0": 0.3, "1": 0.8}  # P_E(o = 1 | a)
OFF = {"": 0.7, "0": -0.3, "1": 0.2, "010": 0.9, "011": -0.5, "110": 0.1, "111": 0.4}  # a wrong critic


class Enumerated:
    """All trajectories as rows: probabilities (K,), log-probs with gradient, mask, rewards, states (K, T=4)."""

    def __init__(self):
        self.theta = {s: torch.tensor(x, dtype=torch.float64, requires_grad=True) for s, x in THETA.items()}
        log = {s: x.log_softmax(0) for s, x in self.theta.items()}
        rows = []
        for a, b in itertools.product("01", "01"):
            if b == "0":  # answers at once: two tokens
                rows.append((1.0, [log[""][int(a)], log[a][0]], [1, 1, 0, 0], [0, 0.4 * int(a), 0, 0], ["", a]))
                continue
            for o, c in itertools.product("01", "01"):
                reply = REPLY[a] if o == "1" else 1 - REPLY[a]
                outcome = 1.0 if (o == c) else -0.2 * int(a)
                steps = [log[""][int(a)], log[a][1], log[a + b + o][int(c)]]
                rows.append((reply, steps, [1, 1, 0, 1], [0, -0.1, 0, outcome], ["", a, None, a + b + o]))
        self.mask = torch.tensor([row[2] for row in rows]).bool()
        self.rewards = torch.tensor([row[3] for row in rows], dtype=torch.float64)
        self.states = [(row[4] + [None, None])[:4] for row in rows]
        self.logprobs = torch.zeros(len(rows), 4, dtype=torch.float64)
        self.logprobs = self.logprobs.masked_scatter(self.mask, torch.stack([x for row in rows for x in row[1]]))
        self.p = torch.tensor([row[0] for row in rows], dtype=torch.float64) * self.logprobs.sum(-1).exp()

    def gradient(self, objective):
        grads = torch.autograd.grad(objective, list(self.theta.values()), retain_graph=True)
        return torch.cat([g.flatten() for g in grads])

    def exact(self):
        return self.gradient((self.p * self.rewards.sum(-1)).sum())

    def true_values(self):
        """V(s) = E[rewards from s on]; what came before s is subtracted."""
        values, p = {}, self.p.detach()
        for state in {s for row in self.states for s in row if s is not None}:
            rows = [(k, row.index(state)) for k, row in enumerate(self.states) if state in row]
            to_go = sum(p[k] * self.rewards[k, t:].sum() for k, t in rows)
            values[state] = float(to_go / sum(p[k] for k, _ in rows))
        return values

    def critic(self, table):
        return torch.tensor([[table[s] if s is not None else math.nan for s in row] for row in self.states])

    def expected(self, name, group=1, **options):
        """E[Σ_t A_t ∇ log π(a_t)] over all groups of ``group`` independent rollouts, per rollout."""
        index = torch.tensor(list(itertools.product(range(len(self.p)), repeat=group)))  # (groups, G)
        weight = self.p.detach()[index].prod(-1, keepdim=True).expand_as(index).flatten() / group
        rows, ids = index.flatten(), torch.arange(len(index)).repeat_interleave(group)
        options = {k: v[rows] if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        credit = run(name, self.rewards[rows], self.mask[rows], group_ids=ids, **options).advantages
        return self.gradient((weight.unsqueeze(-1) * credit * self.logprobs[rows]).sum())


@pytest.fixture(scope="module")
def mdp():
    return Enumerated()


def test_the_enumeration_is_whole(mdp):
    assert mdp.p.sum().item() == pytest.approx(1.0)
    assert mdp.true_values()[""] == pytest.approx((mdp.p * mdp.rewards.sum(-1)).sum().item())


@pytest.mark.parametrize(
    ("name", "critic", "options"),
    [
        ("reinforce_pp", None, {"whiten": False}),
        ("gae", "wrong", {"lam": 1.0, "whiten": False}),  # λ = 1: any critic is only a baseline
        ("gae", "true", {"lam": 0.0, "whiten": False}),  # a true critic: any λ
        ("gae", "true", {"lam": 0.7, "whiten": False}),
        ("turn_gae", "wrong", {"lam": 1.0, "whiten": False}),
        ("turn_gae", "true", {"lam": 0.3, "whiten": False}),
        ("n_step", "wrong", {"n": 9}),
        ("n_step", "true", {"n": 1}),
        ("n_step", "true", {"n": 2}),
        ("remax", None, {"baseline": torch.full((10,), 0.37)}),
    ],
)
def test_expected_gradient_is_the_exact_gradient(mdp, name, critic, options):
    table = {"true": mdp.true_values(), "wrong": OFF}.get(critic)
    values = {} if table is None else {"values": mdp.critic(table)}
    close(mdp.expected(name, **values, **options), mdp.exact(), 1e-6)


@pytest.mark.parametrize("group", [2, 3])
def test_expected_gradient_of_group_baselines(mdp, group):
    """RLOO is unbiased; a mean that holds the rollout itself shrinks the gradient by (n − 1)/n; GRPO's std bends it."""
    exact = mdp.exact()
    close(mdp.expected("rloo", group), exact, 1e-6)
    shrunk = exact * (group - 1) / group
    close(mdp.expected("dr_grpo", group), shrunk, 1e-6)
    close(mdp.expected("reinforce_pp_baseline", group, whiten=False), shrunk, 1e-6)
    grpo = mdp.expected("grpo", group)
    assert torch.nn.functional.cosine_similarity(grpo, exact, dim=0) < 0.999


def test_a_wrong_critic_biases_short_lambda(mdp):
    values = mdp.critic(OFF)
    assert (mdp.expected("gae", values=values, lam=0.0, whiten=False) - mdp.exact()).abs().max() > 0.01
