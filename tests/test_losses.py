"""Losses against verl's and TRL's numbers, hand calculations, public failing inputs, and properties."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentr1_lite import losses
from agentr1_lite.losses import aggregate, kl, kl_loss, normalizer_for, policy_loss

GOLDEN = Path(__file__).parent / "golden"
VERL = json.loads((GOLDEN / "verl.json").read_text())
TRL = json.loads((GOLDEN / "trl.json").read_text())
SETTINGS = settings(max_examples=25, deadline=None)
GARBAGE = [math.nan, math.inf, -math.inf, 1e30]


def close(a, b, tolerance=1e-5):
    torch.testing.assert_close(torch.as_tensor(a).double(), torch.as_tensor(b).double(), atol=tolerance, rtol=1e-5)


# Golden numbers


@pytest.mark.parametrize("key", [k for k in VERL if k.startswith("agg_") and k != "agg_all_masked"])
def test_aggregations_equal_verl(key):
    row = VERL[key]["inputs"]
    ours = aggregate(
        torch.tensor(row["loss_mat"]),
        torch.tensor(row["loss_mask"]),
        row["loss_agg_mode"],
        max_length=row.get("loss_scale_factor"),
    )
    close(ours, VERL[key]["outputs"][0])


@pytest.mark.parametrize("mode", losses.AGGREGATIONS)
def test_nothing_left_gives_zero_where_verl_gives_nan(mode):
    """trl#5826: a micro-batch of masked rows only must add 0 to loss and gradient, not spoil the step."""
    row = VERL["agg_all_masked"]
    assert row["outputs"] == [None]  # NaN
    matrix = torch.tensor(row["inputs"]["loss_mat"], requires_grad=True)
    loss = aggregate(matrix, torch.tensor(row["inputs"]["loss_mask"]), mode)
    loss.backward()
    assert loss.item() == 0 and (matrix.grad == 0).all()


@pytest.mark.parametrize(
    ("key", "estimator"),
    [
        ("kl_kl", "k1"),
        ("kl_kl", "kl"),
        ("kl_abs", "abs"),
        ("kl_mse", "k2"),
        ("kl_low_var_kl", "k3"),
        ("kl_k3+", "k3+"),
        ("kl_k1+", "k1+"),
    ],
)
def test_kl_equals_verl(key, estimator):
    row = VERL[key]
    close(kl(*(torch.tensor(row["inputs"][x]) for x in ("logprob", "ref_logprob")), estimator), row["outputs"][0])


@pytest.mark.parametrize(
    ("key", "options", "stats"),
    [
        ("loss_vanilla_token-mean", {"dual_clip": 3.0}, True),
        ("loss_vanilla_seq-mean-token-mean", {"dual_clip": 3.0}, True),
        ("loss_gspo_seq-mean-token-mean", {"ratio": "sequence"}, True),
        ("loss_cispo_token-mean", {"kind": "cispo"}, True),
        ("loss_gpg_token-mean", {"kind": "reinforce"}, False),
    ],
)
def test_policy_losses_equal_verl(key, options, stats):
    row, (loss, numbers) = VERL[key]["inputs"], VERL[key]["outputs"]
    config = row["config"]
    ours, mine = policy_loss(
        *(torch.tensor(row[x]) for x in ("log_prob", "old_log_prob", "advantages", "response_mask")),
        clip_low=config["clip_ratio_low"],
        clip_high=config["clip_ratio_high"],
        aggregation=row["loss_agg_mode"],
        **options,
    )
    close(ours, loss)
    if stats:
        close(mine["clip_fraction"], numbers["actor/pg_clipfrac"])
        close(mine["approx_kl"], numbers["actor/ppo_kl"])
        close(mine["dual_clip_fraction"], numbers["actor/pg_clipfrac_lower"])


MASKED_TOKENS_COUNTED = ("luspo_token", "luspo_sequence_beta")


@pytest.mark.parametrize("key", [k for k in TRL["losses"] if not k.startswith(MASKED_TOKENS_COUNTED)])
def test_policy_losses_equal_trl(key):
    """TRL's loss types are settings of one function."""
    name, extra = key, ""
    for suffix in ("_toolmask", "_beta.04", "_delta1.5"):
        if key.endswith(suffix):
            name, extra = key.removesuffix(suffix), suffix
    loss_type, ratio = name.rsplit("_", 1)
    x = {k: torch.tensor(v) for k, v in TRL["inputs"].items() if isinstance(v, list)}
    mask = x["mask"] * x["tool_mask"] if extra == "_toolmask" else x["mask"]
    options = {"clip_low": 0.2, "clip_high": 0.28, **losses.PRESETS[loss_type], "ratio": ratio}
    if extra == "_delta1.5" and loss_type != "cispo":  # as in TRL, cispo knows no second bound
        options["ratio_cap"] = 1.5
    ours, _ = policy_loss(x["logps"], x["old"], x["adv"], mask, **options)
    if extra == "_beta.04":
        ours = ours + 0.04 * kl_loss(x["logps"], x["ref"], mask, "k3", options["aggregation"])
    close(ours, TRL["losses"][key])


def test_luspo_leaves_out_the_masked_token_that_trl_counted():
    """The golden number is the mean over *all* positions of length × loss, the masked one of row 0 included, which
    TRL has since changed to the masked sum. A masked token never counts here: mean over rows of the sum over M."""
    x = {k: torch.tensor(v) for k, v in TRL["inputs"].items() if isinstance(v, list)}
    ratio = (x["logps"] - x["old"]).exp()
    advantages = x["adv"].unsqueeze(-1)
    matrix = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
    close((matrix * x["mask"].sum(-1, keepdim=True)).mean(), TRL["losses"]["luspo_token"])
    options = {**losses.PRESETS["luspo"], "ratio": "token", "clip_high": 0.28}
    ours, _ = policy_loss(x["logps"], x["old"], x["adv"], x["mask"], **options)
    close(ours, (matrix * x["mask"]).sum() / 2)


# By hand and from public reports


def test_sequence_ratio_counts_action_tokens_only():
    """Case rl06: with the tool token (log ratio 5) the mean log ratio would be 1.733."""
    new, old = torch.tensor([[0.4, 5.0, -0.2]]), torch.zeros(1, 3)
    ratio = losses.policy_ratio(new, old, torch.tensor([[1, 0, 1]]), "sequence")
    close(ratio.log(), [[0.1, 0.0, 0.1]])


def test_sequence_gradient_is_gspos():
    new = torch.tensor([[-0.5, -1.2, -0.7], [-0.3, -2.0, -0.1]], dtype=torch.float64, requires_grad=True)
    old, mask = torch.full((2, 3), -0.8, dtype=torch.float64), torch.tensor([[1, 0, 1], [1, 1, 1]])
    advantages = torch.tensor([0.7, -0.4])
    loss, _ = policy_loss(
        new, old, advantages, mask, ratio="sequence", aggregation="seq-mean-token-mean", clip_low=0.9, clip_high=9.0
    )
    s = (((new - old) * mask).sum(-1) / mask.sum(-1)).exp()
    theirs = -(s * advantages).mean()
    close(loss, theirs)
    close(torch.autograd.grad(loss, new)[0], torch.autograd.grad(theirs, new)[0])


def test_clipping_by_hand():
    """Ratios 2, 0.5 with A = ±1: clipped where the move already went far enough; c = 3 bounds A < 0."""
    new = torch.tensor([[2.0, 0.5, 2.0, 0.5, 4.0]]).log().requires_grad_()
    advantages = torch.tensor([[1.0, 1.0, -1.0, -1.0, -1.0]])
    ones = torch.ones(1, 5)
    loss, stats = policy_loss(new, 0 * ones, advantages, ones, dual_clip=3.0, clip_high=0.28, aggregation="token-sum")
    close(loss, -1.28 - 0.5 + 2.0 + 0.8 + 3.0)
    loss.backward()
    close(new.grad, [[0.0, -0.5, 2.0, 0.0, 0.0]])
    close(torch.stack([stats["clip_fraction"], stats["dual_clip_fraction"]]), [0.4, 0.2])
    close(torch.stack([stats["ratio_mean"], stats["ratio_max"], stats["ratio_min"]]), [9 / 5, 4.0, 0.5])
    assert not any(x.requires_grad for x in stats.values())


def test_cispo_keeps_a_gradient_on_every_token():
    new = torch.tensor([[2.0, 0.5, 1.0]]).log().requires_grad_()
    loss, _ = policy_loss(
        new, torch.zeros(1, 3), torch.ones(1, 3), torch.ones(1, 3), kind="cispo", aggregation="token-sum"
    )
    loss.backward()
    close(new.grad, [[-1.2, -0.8, -1.0]])


def test_on_the_first_pass_all_kinds_give_the_same_gradient():
    new = torch.tensor([[-0.5, -1.5], [-0.1, -3.0]], requires_grad=True)
    advantages, ones = torch.tensor([1.5, -0.5]), torch.ones(2, 2)
    grads = []
    for kind in losses.KINDS:
        loss, stats = policy_loss(new, new.detach(), advantages, ones, kind=kind)
        assert stats["ratio_max"] == stats["ratio_min"] == 1
        grads.append(torch.autograd.grad(loss, new)[0])
    assert len(grads) == 3
    for grad in grads:
        close(grad, -advantages.unsqueeze(-1).expand(2, 2) / 4)


def test_huge_log_ratios_stay_finite():
    new = torch.tensor([[500.0, -500.0]], requires_grad=True)
    for options in ({}, {"ratio": "sequence"}, {"kind": "cispo"}):
        loss, stats = policy_loss(new, torch.zeros(1, 2), torch.tensor([[-1.0, 1.0]]), torch.ones(1, 2), **options)
        assert loss.isfinite() and torch.autograd.grad(loss, new)[0].isfinite().all()
        assert all(x.isfinite() for x in stats.values())


def test_value_loss_by_hand():
    values = torch.tensor([[1.0, 2.0, 0.2, 9.0]], requires_grad=True)
    old, returns = torch.zeros(1, 4), torch.tensor([[1.0, 0.5, 1.0, 0.0]])
    loss, stats = losses.value_loss(values, old, returns, torch.tensor([[1, 1, 1, 0]]))
    # squares (0, 2.25, 0.64), clipped to 0.5: (0.25, 0, 0.64)
    close(loss, 0.5 * (0.25 + 2.25 + 0.64) / 3)
    close(stats["value_clip_fraction"], 1 / 3)
    loss.backward()
    close(values.grad, [[0.0, 1.5 / 3, -0.8 / 3, 0.0]])
    close(losses.value_loss(values, None, returns, torch.ones(1, 4))[0], 0.5 * (2.25 + 0.64 + 81) / 4)
    perfect = losses.value_loss(returns, old, returns, torch.ones(1, 4))[1]
    assert perfect["explained_variance"] == 1


def test_kl_gradients():
    """In expectation over π, k1's gradient is 0 and k2's is the gradient of the KL."""
    logits = torch.tensor([0.3, -0.5, 1.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.1, 0.4, 0.2], dtype=torch.float64).log_softmax(0)
    log = logits.log_softmax(0)
    true = torch.autograd.grad((log.exp() * (log - ref)).sum(), logits, retain_graph=True)[0]

    def expected(estimator):
        loss = (log.exp().detach() * kl(log.unsqueeze(0), ref.unsqueeze(0), estimator)[0]).sum()
        return torch.autograd.grad(loss, logits, retain_graph=True)[0]

    close(expected("k1"), torch.zeros(3), 1e-9)
    for estimator in ("k2", "k1+", "k3+"):
        close(expected(estimator), true, 1e-9)
    value = (log.exp() * (log - ref)).sum().item()
    for estimator in ("k1", "k3"):
        close((log.exp() * kl(log, ref, estimator)).sum().item(), value, 1e-9)


def test_kl_in_reward():
    nan = math.nan
    rewards, mask = torch.tensor([[0.0, 5.0, 1.0]]), torch.tensor([[1, 0, 1]])
    ours = losses.kl_in_reward(rewards, torch.tensor([[-1.0, nan, -2.0]]), torch.tensor([[-1.5, nan, -1.0]]), mask, 0.1)
    close(ours, [[-0.05, 5.0, 1.1]])


def test_kl_controller():
    fixed = losses.KLController(0.2)
    assert fixed.update(5.0, 64) == 0.2
    adaptive = losses.KLController(0.2, target=6.0, horizon=1000)
    assert adaptive.update(60.0, 100) == pytest.approx(0.2 * 1.02)  # error clipped to 0.2
    assert adaptive.update(5.4, 100) == pytest.approx(0.2 * 1.02 * 0.99)
    assert adaptive.update(math.nan, 100) == pytest.approx(0.2 * 1.02 * 0.99)


def test_entropy_by_hand():
    close(losses.entropy(torch.zeros(2, 3, 8)), torch.full((2, 3), math.log(8)))
    p = torch.tensor([0.5, 0.25, 0.25])
    close(losses.entropy(p.log() + 3.0), 1.5 * math.log(2))
    close(losses.entropy_loss(torch.tensor([[1.0, math.nan, 2.0]]), torch.tensor([[1, 0, 1]])), -1.5)


def test_imitation_and_offline_losses_by_hand():
    logprobs, mask = torch.tensor([[-1.0, -9.0, -2.0], [-3.0, -4.0, math.nan]]), torch.tensor([[1, 0, 1], [1, 1, 0]])
    close(losses.weighted_nll(logprobs, 1.0, mask), 10 / 4)
    close(losses.weighted_nll(logprobs, torch.tensor([2.0, 0.5]), mask), (6 + 3.5) / 4)
    weights = torch.tensor([[1.0, math.inf, 0.0], [2.0, 0.0, math.nan]])
    close(losses.weighted_nll(logprobs, weights, mask, "token-sum"), 1 + 6)
    close(losses.awr_weights(torch.tensor([0.0, 1.0, -2.0, 99.0]), temperature=2.0), [1, math.e**0.5, math.exp(-1), 20])
    close(losses.sequence_logprobs(logprobs, mask), [-3.0, -7.0])
    pairs = [torch.tensor([x, -1.0]) for x in (-3.0, -7.0, -4.0, -6.0)]
    loss, stats = losses.dpo_loss(*pairs, beta=0.5)
    close(loss, (math.log(1 + math.exp(-1.0)) + math.log(2)) / 2)  # margins 0.5·(1 − (−1)) and 0
    close(stats["preference_accuracy"], 0.5)
    close(losses.dpo_loss(*pairs, beta=0.5, normalizer=8)[0], loss * 2 / 8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: policy_loss(x, x, x, x, kind="ppo2"), "kind is 'ppo2'; choose one of ppo, cispo, reinforce"),
        (lambda x: policy_loss(x, x, x, x, ratio="word"), "ratio is 'word'; choose one of token, sequence"),
        (lambda x: policy_loss(x, x, x, x, dual_clip=0.5), "dual_clip is 0.5"),
        (lambda x: policy_loss(x, x, x, x, aggregation="mean"), "no aggregation is called 'mean'"),
        (lambda x: policy_loss(x, x, x, x, aggregation="mean", normalizer=3), "no aggregation is called 'mean'"),
        (lambda x: policy_loss(x, x[:, :2], x, x), r"old_logprobs has shape \(2, 2\).* needs \(2, 3\)"),
        (lambda x: policy_loss(x, x, torch.ones(3), x), r"advantages has shape \(3, 1\).* needs \(2, 3\)"),
        (lambda x: kl(x, x, "k4"), "estimator is 'k4'; choose one of k1, abs, k2, k3"),
    ],
)
def test_errors_are_one_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.ones(2, 3))


# Properties

FORMS = [
    {},
    {"dual_clip": 3.0, "clip_high": 0.28},
    {"ratio": "sequence"},
    {"kind": "cispo"},
    {"kind": "cispo", "ratio": "sequence"},
    {"kind": "reinforce"},
    {"ratio_cap": 1.5},
]
numbers = st.floats(-3, 3, width=32)


@st.composite
def batches(draw):
    rows, length = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    matrix = st.lists(st.lists(numbers, min_size=length, max_size=length), min_size=rows, max_size=rows)
    bits = st.lists(st.lists(st.booleans(), min_size=length, max_size=length), min_size=rows, max_size=rows)
    tensors = [torch.tensor(draw(matrix), dtype=torch.float64) for _ in range(4)]
    return (*tensors, torch.tensor(draw(bits)))


def total(new, old, advantages, ref, mask, aggregation, normalizer, form, max_length):
    """Everything a training step adds up, as one loss."""
    options = {"aggregation": aggregation, "normalizer": normalizer, "max_length": max_length}
    policy, stats = policy_loss(new, old, advantages, mask, **form, **options)
    value, _ = losses.value_loss(new, old, ref, mask, **options)
    rest = kl_loss(new, ref, mask, **options) + losses.entropy_loss(new, mask, **options)
    return policy + 0.5 * value + 0.1 * rest + losses.weighted_nll(new, advantages, mask, **options), stats


@pytest.mark.parametrize("aggregation", losses.AGGREGATIONS)
@SETTINGS
@given(batch=batches(), data=st.data(), form=st.sampled_from(FORMS))
def test_any_split_into_micro_batches_gives_one_gradient(aggregation, batch, data, form):
    """trl#3021, verl#593; parts are trimmed to their longest row, as micro-batches are."""
    new, old, advantages, ref, mask = batch
    normalizer = normalizer_for(mask, aggregation)
    parts = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=len(mask), max_size=len(mask))))
    leaf = new.clone().requires_grad_()
    whole, stats = total(leaf, old, advantages, ref, mask, aggregation, None, form, None)
    expected = torch.autograd.grad(whole, leaf)[0]
    collected, losses_sum, parts_stats = torch.zeros_like(new), 0.0, []
    for part in parts.unique():
        rows = (parts == part).nonzero().flatten()
        width = max(int(mask[rows].any(0).nonzero().max()) + 1 if mask[rows].any() else 1, 1)
        piece = [x[rows, :width] for x in (new, old, advantages, ref, mask)]
        piece[0] = piece[0].clone().requires_grad_()
        loss, part_stats = total(*piece, aggregation, normalizer, form, None)
        collected[rows, :width] += torch.autograd.grad(loss, piece[0])[0]
        losses_sum += loss.item()
        parts_stats.append(part_stats)
    close(collected, expected, 1e-9)
    close(losses_sum, whole.item(), 1e-9)
    merged = losses.merge_stats(parts_stats)
    assert merged == pytest.approx({k: float(v) for k, v in stats.items()}, abs=1e-6)


@pytest.mark.parametrize("form", FORMS, ids=str)
@SETTINGS
@given(batch=batches(), data=st.data(), aggregation=st.sampled_from(losses.AGGREGATIONS))
def test_masked_positions_may_hold_anything_and_get_no_gradient(form, batch, data, aggregation):
    *inputs, mask = batch
    clean = [torch.where(mask, x, 0.0) for x in inputs]
    dirty = [torch.where(mask, x, data.draw(st.sampled_from(GARBAGE))) for x in inputs]
    results = []
    for x in (clean, dirty):
        x[0].requires_grad_()
        loss, stats = total(*x, mask, aggregation, None, form, None)
        (grad,) = torch.autograd.grad(loss, x[0])
        assert loss.isfinite() and grad.isfinite().all() and (grad[~mask] == 0).all()
        results.append((loss, grad, *stats.values()))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("estimator", losses.KL_ESTIMATORS)
@SETTINGS
@given(batch=batches(), filler=st.sampled_from(GARBAGE))
def test_kl_with_a_mask_is_zero_off_it(estimator, batch, filler):
    new, ref, _, _, mask = batch
    new = torch.where(mask, new, filler).requires_grad_()
    per_token = kl(new, torch.where(mask, ref, -filler), estimator, mask)
    (grad,) = torch.autograd.grad(per_token.sum(), new)
    assert per_token.isfinite().all() and (per_token[~mask] == 0).all()
    assert grad.isfinite().all() and (grad[~mask] == 0).all()
    if estimator != "k1":
        assert (per_token >= -1e-12).all()


@SETTINGS
@given(batch=batches(), gaps=st.lists(st.integers(0, 2), min_size=7, max_size=7), form=st.sampled_from(FORMS))
def test_inserted_observations_change_nothing(batch, gaps, form):
    *inputs, mask = batch
    place = torch.tensor(gaps[: mask.shape[1]]).cumsum(0) + torch.arange(mask.shape[1])

    def spread(x, fill):
        out = torch.full((len(x), int(place[-1]) + 1 + gaps[-1]), fill, dtype=x.dtype)
        out[:, place] = x
        return out

    for aggregation in losses.AGGREGATIONS:
        plain, _ = total(*inputs, mask, aggregation, None, form, 10)
        wide, _ = total(*(spread(x, math.nan) for x in inputs), spread(mask, False), aggregation, None, form, 10)
        close(wide, plain, 1e-9)


def test_half_precision_log_probs_are_computed_in_float32():
    new = torch.full((1, 4), -1.0, dtype=torch.bfloat16, requires_grad=True)
    loss, _ = policy_loss(new, new.detach().float(), torch.ones(1), torch.ones(1, 4))
    loss.backward()
    assert loss.dtype == torch.float32 and new.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("name", losses.PRESETS)
def test_every_preset_runs(name):
    x = torch.full((2, 3), -1.0)
    assert policy_loss(x, x, torch.ones(2), torch.ones(2, 3), **losses.PRESETS[name])[0].isfinite()
