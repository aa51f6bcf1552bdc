"""Credit assignment: from rewards on tokens to an advantage for every action token.

B rows, T tokens, M the action mask, R = Σ_t r_t · M_t the return of a rollout,
g the group of rollouts of one question. `estimate` drops every token the policy
did not choose, hands the estimator dense rows of action tokens, and puts the
result back. Inside an estimator there are no observations left, so neither γ
nor λ can decay across a tool reply and no return is reset by one (verl#2337,
verl#7278). `mask` (K, N) there only says where a row has ended.

An estimator is one function ``(rewards, mask, *, …) -> (advantages, returns)``
under one `@estimator` line; its keyword names say what it needs, so that one
that names ``values`` is given a critic and ``training.algorithm`` takes its name. Critic-free
estimators have no value target: their returns repeat the advantages, as in verl.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from agentr1_lite.credit import (
    Dense,
    GroupScores,
    checked,
    dense_inputs,
    discounted_sum,
    group_scores,
    move_rewards_to_actions,
    normalise_process_rewards,
    whitened,
    zero_variance_share,
)
from agentr1_lite.settings import fold

__all__ = [
    "ESTIMATORS",
    "Advantages",
    "compute_gae",
    "compute_returns",
    "estimate",
    "estimator",
    "find",
    "inputs",
    "move_rewards_to_actions",
    "names",
    "normalise_process_rewards",
    "zero_variance_share",
]

Pair = tuple[Tensor, Tensor]
ESTIMATORS: dict[str, Callable[..., Pair]] = {}
_KEYS: dict[str, str] = {}
_INPUTS = frozenset({"values", "group_ids", "gamma", "lam", "turn_ids", "anchor_ids", "baseline", "trajectory_index"})


class Advantages(NamedTuple):
    """Both (B, T), finite, and exactly 0 where the action mask is 0."""

    advantages: Tensor
    returns: Tensor


def estimator(name: str, *aliases: str) -> Callable[[Callable[..., Pair]], Callable[..., Pair]]:
    """Register an estimator; names are found whatever their case and punctuation ("Dr. GRPO", "REINFORCE++")."""

    def register(function: Callable[..., Pair]) -> Callable[..., Pair]:
        ESTIMATORS[name] = function
        _KEYS.update({fold(alias): name for alias in (name, *aliases)})
        return function

    return register


def names() -> list[str]:
    """The registered estimators, by their own names."""
    return list(ESTIMATORS)


def find(name: str) -> Callable[..., Pair]:
    """The estimator called ``name``, an alias included; raises ``ValueError`` listing the names."""
    if fold(name) not in _KEYS:
        raise ValueError(f"no estimator is called {name!r}; choose one of {', '.join(ESTIMATORS)}")
    return ESTIMATORS[_KEYS[fold(name)]]


def inputs(name: str) -> dict[str, inspect.Parameter]:
    """What the estimator called ``name`` reads beside rewards and mask: ``values`` of a critic, ``baseline``, …"""
    named = list(inspect.signature(find(name)).parameters.items())[2:]
    return {key: p for key, p in named if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}


def _episode_scores(rewards: Tensor, mask: Tensor, group_ids: Tensor) -> GroupScores:
    """`group_scores` of whole rollouts, with a warning where a group has a single one."""
    groups = group_scores(rewards.sum(-1), mask.any(-1), group_ids, rewards.abs().sum(-1))
    alone = ((groups.count == 1) & mask.any(-1)).nonzero().flatten().tolist()
    if alone:
        warnings.warn(
            f"{len(alone)} group(s) hold a single rollout (the first is rollout {alone[0]}): with nothing to compare, "
            "the advantage is 0; sample at least 2 rollouts a question",
            stacklevel=2,
        )
    return groups


def _broadcast(advantage: Tensor, mask: Tensor) -> Pair:
    spread = torch.where(mask, advantage.unsqueeze(-1), 0.0)
    return spread, spread


def _following(x: Tensor, n: int = 1) -> Tensor:
    """``x_{t+n}``, 0 behind the end."""
    return torch.nn.functional.pad(x, (0, n))[..., n:]


def _turn_index(turn_ids: Tensor, mask: Tensor) -> Tensor:
    """Number the turns of each row 0, 1, …; (K, N). Tokens behind the end join turn 0: their rewards are 0."""
    starts = torch.ones_like(mask)
    starts[:, 1:] = turn_ids[:, 1:] != turn_ids[:, :-1]
    return torch.where(mask, starts.cumsum(-1) - 1, 0)


# Estimators with a critic


@estimator("gae", "ppo")
def gae(
    rewards: Tensor, mask: Tensor, *, values: Tensor, gamma: float = 1.0, lam: float = 1.0, whiten: bool = True
) -> Pair:
    """Generalised advantage estimation (Schulman et al., arXiv 1506.02438).

    δ_t = r_t + γ V_{t+1} − V_t,  A_t = δ_t + γλ A_{t+1},  returns = A + V;  V behind the last action is 0.
    ``whiten`` (default) standardises A over M, as PPO does; the returns are never whitened.
    """
    advantages = discounted_sum(rewards + gamma * _following(values) - values, gamma * lam)
    return whitened(advantages, mask, whiten), advantages + values


@estimator("turn_gae", "turn_level_gae")
def turn_gae(
    rewards: Tensor,
    mask: Tensor,
    *,
    values: Tensor,
    turn_ids: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
    whiten: bool = True,
) -> Pair:
    """GAE over turns instead of tokens: a turn is one action.

    V_k = V at the first token of turn k, r_k = Σ of the turn's rewards, then GAE over k;
    advantage and return are broadcast over the turn's tokens. γ and λ count turns.
    """
    turn = _turn_index(turn_ids, mask)
    turn_rewards = torch.zeros_like(rewards).scatter_add(1, turn, rewards)
    first = torch.ones_like(mask)
    first[:, 1:] = turn[:, 1:] != turn[:, :-1]
    turn_values = torch.zeros_like(values).scatter_add(1, turn, torch.where(first & mask, values, 0.0))
    advantages, returns = gae(turn_rewards, mask, values=turn_values, gamma=gamma, lam=lam, whiten=False)
    return whitened(advantages.gather(1, turn), mask, whiten), returns.gather(1, turn)


@estimator("n_step")
def n_step(
    rewards: Tensor, mask: Tensor, *, values: Tensor, n: int = 5, gamma: float = 1.0, whiten: bool = False
) -> Pair:
    """n-step advantage (Mnih et al., arXiv 1602.01783); n = 1 is the TD error, n ≥ T Monte Carlo minus V.

    A_t = Σ_{i<n} γ^i r_{t+i} + γ^n V_{t+n} − V_t  over action tokens,  returns = A + V.
    """
    if n < 1:
        raise ValueError(f"n_step: n is {n}; give the number of steps to look ahead, at least 1")
    to_go = discounted_sum(rewards, gamma)  # the sum of n rewards is a difference of two of these
    n = min(n, rewards.shape[-1])
    returns = to_go - gamma**n * _following(to_go, n) + gamma**n * _following(values, n)
    return whitened(returns - values, mask, whiten), returns


# Estimators that compare the rollouts of one question


@estimator("grpo", "gspo", "dapo", "cispo")
def grpo(rewards: Tensor, mask: Tensor, *, group_ids: Tensor, scale: str = "group", eps: float = 1e-6) -> Pair:
    """Group-relative advantage (Shao et al., arXiv 2402.03300): A = (R − mean_g) / (std_g + ε), broadcast over M.

    ``scale``: "group" divides by the group's std, "batch" by the std of all returns, "none" is Dr. GRPO.
    """
    g = _episode_scores(rewards, mask, group_ids)
    scores = g.scores[mask.any(-1)]
    divisors = {"group": g.std + eps, "batch": scores.std(correction=int(scores.numel() > 1)) + eps, "none": 1.0}
    if scale not in divisors:
        raise ValueError(f"grpo: scale is {scale!r}; choose one of {', '.join(divisors)}")
    return _broadcast(g.centred / divisors[scale], mask)


@estimator("dr_grpo")
def dr_grpo(rewards: Tensor, mask: Tensor, *, group_ids: Tensor) -> Pair:
    """Dr. GRPO (Liu et al., arXiv 2503.20783): A = R − mean_g; pair it with the "constant" aggregation."""
    return _broadcast(_episode_scores(rewards, mask, group_ids).centred, mask)


@estimator("rloo")
def rloo(rewards: Tensor, mask: Tensor, *, group_ids: Tensor) -> Pair:
    """REINFORCE leave-one-out (Ahmadian et al., arXiv 2402.14740).

    A = R_i − mean_{j≠i} R_j = n/(n−1) · (R_i − mean_g); unbiased, since the baseline does not see rollout i.
    """
    g = _episode_scores(rewards, mask, group_ids)
    return _broadcast(g.centred * g.count / (g.count - 1).clamp(min=1), mask)


@estimator("opo")
def opo(rewards: Tensor, mask: Tensor, *, group_ids: Tensor) -> Pair:
    """On-policy optimum baseline (Hao et al., arXiv 2505.23585): A = R − Σ_g len·R / Σ_g len, len in action tokens."""
    g = _episode_scores(rewards, mask, group_ids)
    length = mask.sum(-1).to(rewards.dtype)
    index = torch.unique(group_ids, return_inverse=True)[1]
    total = torch.zeros_like(length).index_add(0, index, length)[index]
    shift = torch.zeros_like(length).index_add(0, index, length * g.centred)[index] / total.clamp(min=1)
    return _broadcast(torch.where(g.equal, 0.0, g.centred - shift), mask)


@estimator("gpg")
def gpg(rewards: Tensor, mask: Tensor, *, group_ids: Tensor) -> Pair:
    """Group policy gradient (Chu et al., arXiv 2504.02546): A = B / #{R ≠ 0} · (R − mean_g)."""
    g = _episode_scores(rewards, mask, group_ids)
    return _broadcast(g.centred * mask.any(-1).sum() / g.scores.count_nonzero().clamp(min=1), mask)


@estimator("grpo_passk")
def grpo_passk(rewards: Tensor, mask: Tensor, *, group_ids: Tensor, scale: str = "group", eps: float = 1e-6) -> Pair:
    """Pass@k (arXiv 2503.19595, as in verl): a group's best rollout gets (R_max − R_second) / (std_g + ε), others 0."""
    g = _episode_scores(rewards, mask, group_ids)
    advantages = torch.zeros_like(g.scores)
    for group in torch.unique(group_ids):
        rows = ((group_ids == group) & mask.any(-1)).nonzero().flatten()
        if len(rows) > 1 and not g.equal[rows[0]]:
            best = g.scores[rows].topk(2)
            winner = rows[best.indices[0]]
            divisor = g.std[winner] + eps if scale == "group" else 1.0
            advantages[winner] = (best.values[0] - best.values[1]) / divisor
    return _broadcast(advantages, mask)


@estimator("gigpo")
def gigpo(
    rewards: Tensor,
    mask: Tensor,
    *,
    group_ids: Tensor,
    turn_ids: Tensor,
    anchor_ids: Tensor,
    gamma: float = 1.0,
    step_weight: float = 1.0,
    scale: str = "group",
    eps: float = 1e-6,
) -> Pair:
    """Group-in-group (Feng et al., arXiv 2505.10978): A = A_episode + step_weight · A_step.

    A_episode is GRPO's. A step is a turn with its discounted return Σ_{j≥k} γ^{j−k} r_j; A_step compares the
    steps of one group that started from the same anchor observation. Anchor −1 and a lone anchor give A_step = 0.
    """
    turn = _turn_index(turn_ids, mask)
    step_rewards = torch.zeros_like(rewards).scatter_add(1, turn, rewards)
    size = torch.zeros_like(rewards).scatter_add(1, turn, rewards.abs())
    anchor = torch.full_like(anchor_ids, -1).scatter_reduce(1, turn, torch.where(mask, anchor_ids, -1), "amax")
    keys = torch.stack([group_ids.unsqueeze(-1).expand_as(anchor), anchor], -1).flatten(0, 1)
    _, step_groups = torch.unique(keys, dim=0, return_inverse=True)
    step_returns = discounted_sum(step_rewards, gamma).flatten()
    used = (anchor >= 0).flatten()
    g = group_scores(step_returns, used, step_groups, discounted_sum(size, gamma).flatten())
    step = (g.centred / (g.std + eps if scale == "group" else 1.0)).view_as(rewards)
    episode, _ = grpo(rewards, mask, group_ids=group_ids, scale=scale, eps=eps)
    advantages = torch.where(mask, episode + step_weight * step.gather(1, turn), 0.0)
    return advantages, advantages


# Estimators with another baseline, or none


@estimator("reinforce_pp")
def reinforce_pp(rewards: Tensor, mask: Tensor, *, gamma: float = 1.0, whiten: bool = True) -> Pair:
    """REINFORCE++ (Hu et al., arXiv 2501.03262): G_t = r_t + γ G_{t+1} over action tokens, whitened over the batch."""
    returns = discounted_sum(rewards, gamma)
    return whitened(returns, mask, whiten), returns


@estimator("reinforce_pp_baseline")
def reinforce_pp_baseline(rewards: Tensor, mask: Tensor, *, group_ids: Tensor, whiten: bool = True) -> Pair:
    """REINFORCE++-baseline (arXiv 2501.03262): A = R − mean_g, broadcast over M, whitened over the batch."""
    spread, _ = _broadcast(_episode_scores(rewards, mask, group_ids).centred, mask)
    advantages = whitened(spread, mask, whiten)
    return advantages, advantages


@estimator("remax")
def remax(rewards: Tensor, mask: Tensor, *, baseline: Tensor, gamma: float = 1.0) -> Pair:
    """ReMax (Li et al., arXiv 2310.10505): A_t = G_t − b, ``baseline`` b (B,) the return of the greedy rollout."""
    returns = discounted_sum(rewards, gamma)
    return torch.where(mask, returns - baseline.unsqueeze(-1), 0.0), returns


def estimate(
    name: str,
    rewards: Any,
    action_mask: Any,
    *,
    values: Any = None,
    group_ids: Any = None,
    gamma: float = 1.0,
    lam: float = 1.0,
    **options: Any,
) -> Advantages:
    """Advantages of one whole batch by the estimator called ``name``.

    Args:
        name: see `names`; case and punctuation do not matter, "PPO" is "gae".
        rewards: (B, T). Rewards on masked tokens are kept: `move_rewards_to_actions` comes first.
        action_mask: (B, T), true where the policy sampled the token. A row without one gets 0, takes no part in any
            statistic and is warned about. Off the mask every input may hold anything, NaN included.
        values: (B, T), V of the state before token t. group_ids: (B,) tensor or strings, one id a question.
        gamma, lam: per action token (per turn in turn_gae and gigpo's steps), both in [0, 1].
        options: inputs ``turn_ids`` (B, T; default: runs of the mask), ``anchor_ids`` (B, T), ``baseline`` (B,),
            ``trajectory_index`` (B,; rows with one number are the segments of one rollout, in order), and the
            keywords of the estimators (``whiten``, ``n``, ``step_weight``, ``scale``, ``eps``); those that ``name``
            does not know are ignored, those that no estimator knows raise.

    Returns:
        `Advantages`, on the device and in the dtype of ``rewards``.

    Raises:
        ValueError: unknown name or option, a missing input, a wrong shape, NaN on an action token.
    """
    function = find(name)
    given = {**options, "values": values, "group_ids": group_ids, "gamma": gamma, "lam": lam}
    _check_options(given)
    source, mask = torch.as_tensor(rewards), torch.as_tensor(action_mask).detach().cpu().bool()
    if source.dim() != 2:
        raise ValueError(f"estimate: rewards has shape {tuple(source.shape)}; give (B, T), a row for each rollout")
    mask = checked("action_mask", mask, source.shape, None, torch.bool)
    rewards = move_rewards_to_actions(checked("rewards", source, mask.shape, mask, torch.float64), mask)
    if not (acts := mask.any(-1)).all():
        first = int((~acts).nonzero()[0])
        warnings.warn(f"row {first} has no action token: its advantages are 0 and no statistic counts it", stacklevel=2)
    if not acts.any():
        return Advantages(_like(torch.zeros_like(rewards), source), _like(torch.zeros_like(rewards), source))
    dense = Dense.of(mask, options.get("trajectory_index"))
    given |= dense_inputs(mask, dense, given)
    advantages, returns = function(dense.pack(rewards), dense.pack(mask), **_arguments(name, given))
    return Advantages(_like(dense.unpack(advantages), source), _like(dense.unpack(returns), source))


def _check_options(given: dict[str, Any]) -> None:
    known = _INPUTS.union(*(inspect.signature(f).parameters for f in ESTIMATORS.values())) - {"rewards", "mask"}
    if unknown := sorted(set(given) - known):
        raise ValueError(f"estimate: no estimator has an option {unknown[0]!r}; known are {', '.join(sorted(known))}")
    for name in ("gamma", "lam"):
        if not 0 <= given[name] <= 1:
            raise ValueError(f"estimate: {name} is {given[name]}; it lies between 0 and 1")


def _arguments(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Those of ``given`` that the estimator's signature names; raises where one without a default is missing."""
    named = inputs(name)
    chosen = {key: given[key] for key in named if given.get(key) is not None}
    for p in named.values():
        if p.default is p.empty and p.name not in chosen:
            raise ValueError(f"estimate: {name!r} needs {p.name}; pass {p.name}=… (shapes: the docstring of estimate)")
    return chosen


def _like(x: Tensor, source: Any) -> Any:
    """``x`` (float64) as the caller's kind: a tensor's device and float dtype, or a list."""
    if not isinstance(source, Tensor):
        return x.tolist()
    return x.to(source.dtype if source.is_floating_point() else torch.get_default_dtype()).to(source.device)


def compute_returns(rewards: Sequence[float] | Tensor, gamma: float) -> Any:
    """``G_t = r_t + γ G_{t+1}`` of one trajectory; a list gives a list, a tensor (…, T) a tensor."""
    return _like(discounted_sum(torch.as_tensor(rewards).detach().cpu().double(), gamma), rewards)


def compute_gae(values: Sequence[float] | Tensor, rewards: Sequence[float] | Tensor, gamma: float, lam: float) -> Any:
    """Unwhitened GAE of one trajectory; a list gives a list, a tensor (…, T) a tensor.

    ``values`` is as long as ``rewards``, or one longer: the last is then the value of the state behind the end.
    """
    v, r = (torch.as_tensor(x).detach().cpu().double() for x in (values, rewards))
    if v.shape[-1] - r.shape[-1] not in (0, 1):
        raise ValueError(f"compute_gae: {v.shape[-1]} values for {r.shape[-1]} rewards; give as many, or one more")
    following = v[..., 1:] if v.shape[-1] > r.shape[-1] else _following(v)
    return _like(discounted_sum(r + gamma * following - v[..., : r.shape[-1]], gamma * lam), rewards)
