"""The TRL bridge: token-exact SFT and DPO, and a ToolEnv inside GRPOTrainer."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import get_json_schema
from trl.trainer.dpo_trainer import DataCollatorForPreference

from agentr1_lite.batch import collate
from agentr1_lite.bridges import trl as bridge
from agentr1_lite.bridges import trl_offline as offline
from agentr1_lite.env import ToolEnv
from agentr1_lite.mdp import Segment, Task, Trajectory, Turn
from agentr1_lite.policy import QwenPolicy
from agentr1_lite.preferences import PreferencePair, dpo_pairs, dpo_step, split_pairs
from agentr1_lite.tools import tool
from agentr1_lite.update import Share

TEMPLATE = (
    "{%- if tools %}{{- '<|im_start|>system\n' + messages[0].content }}"
    "{%- for t in tools %}{{- '\n' + (t | tojson) }}{%- endfor %}{{- '<|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{%- endif %}"
    "{%- for m in messages %}{%- if m.role == 'tool' %}"
    "{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}"
    "{%- elif m.role != 'system' %}{{- '<|im_start|>' + m.role + '\n' + m.content }}"
    "{%- for c in m.tool_calls or [] %}"
    '{{- \'\n<tool_call>\n{"name": "\' + c.function.name + \'", "arguments": \' + (c.function.arguments | tojson) }}'
    "{{- '}\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def tiny_policy(**options) -> QwenPolicy:
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    return QwenPolicy.from_parts(Qwen2ForCausalLM(config), tokenizer, **options)


@pytest.fixture
def policy() -> QwenPolicy:
    return tiny_policy()


def episode(prompt: list[int], *parts: tuple[str, list[int]], reward: float = 0.0, task: str = "t") -> Trajectory:
    """An append-only episode: parts are ("act" | "see", ids)."""
    segment, turns = Segment(), []
    segment.extend(prompt)
    for kind, ids in parts:
        start, end = segment.extend(ids, [-1.0] * len(ids) if kind == "act" else None)
        if kind == "act":
            turns.append(Turn(0, start, end))
    return Trajectory(task, task, [segment], turns, reward=reward)


def logs() -> list[Trajectory]:
    """Six episodes of two tasks with tool text of different lengths between their turns."""
    generator = torch.Generator().manual_seed(1)

    def ids(n: int) -> list[int]:
        return torch.randint(0, 250, (n,), generator=generator).tolist()

    prompts = {"a": ids(7), "b": ids(12)}
    return [
        episode(prompts[task], ("act", ids(3)), ("see", ids(n)), ("act", ids(5)), reward=reward, task=task)
        for task, n, reward in [
            ("a", 4, 1.0),
            ("a", 9, 0.0),
            ("a", 2, 0.5),
            ("b", 6, 0.0),
            ("b", 1, 1.0),
            ("b", 3, 0.0),
        ]
    ]


def masked_logps(policy: QwenPolicy, trajectories: list[Trajectory], which: str = "actor") -> torch.Tensor:
    return policy.log_probs(collate(trajectories), which=which).logprobs.sum(-1)


class HiddenGradient:
    """Keeps the gradient at the last hidden states: position t feeds only the prediction of token t + 1."""

    def __init__(self, policy: QwenPolicy):
        self.states: torch.Tensor | None = None
        self.hook = policy.causal.base_model.register_forward_hook(self.keep)

    def keep(self, module, inputs, outputs) -> None:
        self.states = outputs.last_hidden_state
        self.states.retain_grad()

    def predicted(self) -> torch.Tensor:
        """True at tokens whose prediction got any gradient, (B, T)."""
        touched = self.states.grad.abs().sum(-1) > 0
        return torch.nn.functional.pad(touched[:, :-1], (1, 0))


def test_sft_rows_carry_labels_on_actions_only():
    two = Trajectory("t", "t", [Segment([1, 2, 3, 4], [0, 1, 0, 1], [0.0] * 4), Segment([5, 6], [0, 1], [0.0] * 2)])
    silent = Trajectory("t", "t", [Segment([7, 8], [0, 0], [0.0] * 2)])
    assert list(bridge.sft_dataset([two, silent])) == [
        {"input_ids": [1, 2, 3, 4], "labels": [-100, 2, -100, 4]},
        {"input_ids": [5, 6], "labels": [-100, 6]},
    ]
    with pytest.raises(ValueError, match="at least one demonstration"):
        bridge.sft_dataset([silent])


def test_sft_loss_is_the_masked_nll_and_other_tokens_get_no_gradient(policy, tmp_path):
    trajectories = logs()
    batch = collate(trajectories)
    expected = -masked_logps(policy, trajectories).sum() / batch.action_mask.sum()
    with bridge.lent(policy):
        trainer = offline.sft_trainer(policy, trajectories, str(tmp_path))
        inputs = trainer.data_collator(list(trainer.train_dataset))
        watch = HiddenGradient(policy)
        loss = trainer.compute_loss(trainer.model, inputs)
        loss.backward()
    assert torch.equal(
        inputs["input_ids"][inputs["attention_mask"].bool()], batch.input_ids[batch.attention_mask.bool()]
    )
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert torch.equal(watch.predicted(), batch.action_mask)


def test_sft_accumulation_leaves_the_step_unchanged():
    trajectories = logs()
    weights = []
    for options in ({"batch_size": 6}, {"batch_size": 2, "gradient_accumulation_steps": 3}):
        policy = tiny_policy()
        bridge.run_sft(policy, trajectories, optim="sgd", lr=1.0, max_grad_norm=0.0, max_steps=1, **options)
        weights.append(torch.cat([p.flatten() for p in policy.actor_parameters()]))
    assert torch.allclose(weights[0], weights[1], rtol=0, atol=1e-6)


def test_run_sft_learns_stops_and_gives_the_model_back(policy):
    trajectories = logs()
    seen = []
    history = bridge.run_sft(policy, trajectories, lr=1e-2, epochs=20, batch_size=6, on_step=seen.append)
    assert len(history) == len(seen) == 20 and seen[-1]["step"] == 20
    assert history[-1]["loss"] < 0.7 * history[0]["loss"]
    assert "forward" not in policy.causal.__dict__ and not policy.causal.training
    assert all(p.grad is None for p in policy.actor_parameters())
    assert len(bridge.run_sft(policy, trajectories, epochs=9, batch_size=6, on_step=lambda m: m["step"] < 2)) == 2


def test_pairs_meet_best_with_worst_of_one_prompt():
    good, half, bad = (episode([1, 2], ("act", [n]), reward=r) for n, r in ((3, 1.0), (4, 0.5), (5, 0.0)))
    also_good = episode([1, 2], ("act", [6]), reward=1.0)
    other_prompt = episode([9, 2], ("act", [3]), reward=-1.0)
    other_task = episode([1, 2], ("act", [3]), reward=-1.0, task="u")
    pairs = dpo_pairs([half, good, bad, also_good, other_prompt, other_task])
    assert pairs == [(good, bad), (also_good, half)]
    assert dpo_pairs([half, good, bad, also_good], min_margin=0.5) == [(good, bad)]
    assert dpo_pairs([good, also_good]) == []
    silent = Trajectory("t", "t", [Segment([1, 2], [False] * 2, [0.0] * 2)], reward=-1.0)
    assert dpo_pairs([good, silent]) == []


def test_process_rewards_decide_between_equal_outcomes():
    quick, slow = episode([1], ("act", [2]), reward=1.0), episode([1], ("act", [3]), reward=1.0)
    slow.turns[0].process_reward = -0.01
    assert dpo_pairs([slow, quick]) == [(quick, slow)]


def test_pair_collator_equals_trl_without_tool_tokens():
    pairs = [
        (episode([1, 2, 3], ("act", [4, 5]), reward=1.0), episode([1, 2, 3], ("act", [6]))),
        (episode([7, 8], ("act", [9]), reward=1.0, task="u"), episode([7, 8], ("act", [10, 11]), task="u")),
    ]
    rows = [
        offline.pair_row(PreferencePair(*pair)) | {"ref_chosen_logps": -1.0, "ref_rejected_logps": -2.0}
        for pair in pairs
    ]
    examples = [
        {"prompt_ids": [1, 2, 3], "chosen_ids": [4, 5], "rejected_ids": [6]},
        {"prompt_ids": [7, 8], "chosen_ids": [9], "rejected_ids": [10, 11]},
    ]
    ours, theirs = offline.PairCollator(0)(rows), DataCollatorForPreference(0)(examples)
    for key, value in theirs.items():
        assert torch.equal(ours[key], value), key
    assert ours["ref_chosen_logps"].tolist() == [-1.0, -1.0]


def moved_on(policy: QwenPolicy) -> QwenPolicy:
    """Freeze the reference, then change the policy."""
    policy.freeze_reference()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in policy.actor_parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return policy


def gradients(policy: QwenPolicy) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in policy.actor_parameters()])


def test_dpo_step_and_trl_have_one_loss_and_one_gradient(policy, tmp_path):
    pairs = dpo_pairs(logs())
    moved_on(policy)
    sides = [pair.chosen for pair in pairs], [pair.rejected for pair in pairs]
    now = [masked_logps(policy, side).detach() for side in sides]
    then = [masked_logps(policy, side, "reference") for side in sides]
    margin = (now[0] - then[0]) - (now[1] - then[1])
    assert margin.abs().min() > 1e-3
    expected = torch.log1p(torch.exp(-0.3 * margin)).mean().item()
    stats = dpo_step(policy, pairs, beta=0.3)
    ours = gradients(policy)
    with bridge.lent(policy):
        policy.causal.zero_grad()
        trainer = offline.dpo_trainer(policy, pairs, str(tmp_path), beta=0.3)
        inputs = trainer.data_collator(list(trainer.train_dataset))
        watch = HiddenGradient(policy)
        loss = trainer.compute_loss(trainer.model, inputs)
        loss.backward()
        theirs = gradients(policy)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert stats["loss"] == pytest.approx(expected, rel=1e-5)
    assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-7)
    assert torch.equal(watch.predicted(), collate([*sides[0], *sides[1]]).action_mask)


def test_dpo_gradient_does_not_depend_on_the_split(policy):
    pairs = dpo_pairs(logs())
    moved_on(policy)
    found = []
    for max_tokens, shares in ((10_000, 1), (1, 1), (1, 2)):
        policy.causal.zero_grad()
        for rank in range(shares):
            dpo_step(policy, pairs, max_tokens=max_tokens, share=Share(rank, shares))
        found.append(gradients(policy))
    assert [len(split_pairs(pairs, n)) for n in (10_000, 1)] == [1, 2]
    assert torch.allclose(found[0], found[1], rtol=0, atol=1e-6 * found[0].abs().max())
    assert torch.allclose(found[0], found[2], rtol=0, atol=1e-6 * found[0].abs().max())


def test_an_episode_of_two_contexts_counts_whole(policy):
    """Cut at its observation, with the context kept, an episode has the same log-prob and the same DPO loss."""
    moved_on(policy)
    whole, other, *_ = logs()
    ids, mask = whole.segments[0].token_ids, whole.segments[0].action_mask
    cut = whole.turns[1].start
    first = Segment(ids[:cut], mask[:cut], [-1.0 * m for m in mask[:cut]])
    second = Segment(ids, [False] * cut + mask[cut:], [0.0] * cut + [-1.0 * m for m in mask[cut:]])
    parted = Trajectory(whole.task_id, whole.group_id, [first, second], reward=whole.reward)
    losses = []
    for chosen in (whole, parted):
        assert dpo_pairs([other, chosen]) == [(chosen, other)]
        losses.append(dpo_step(policy, [PreferencePair(chosen, other)])["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("rank", [0, 4])
def test_run_dpo_widens_the_margin(rank):
    policy = tiny_policy(lora_rank=rank)
    frozen = {n: p.clone() for n, p in policy.causal.named_parameters() if "lora" not in n}
    history = bridge.run_dpo(policy, dpo_pairs(logs()), lr=3e-3, epochs=8, batch_size=8)
    assert history[0]["loss"] == pytest.approx(math.log(2), abs=1e-4)  # the policy is its own reference at first
    assert history[-1]["rewards/margins"] > 0.05
    moved = any(not torch.equal(p, frozen[n]) for n, p in policy.causal.named_parameters() if n in frozen)
    assert moved == (rank == 0)
    with pytest.raises(ValueError, match="different rewards"):
        bridge.run_dpo(policy, [])
    split = PreferencePair(Trajectory("t", "t", [Segment(), Segment()]), logs()[0])
    with pytest.raises(ValueError, match="2 segments"):
        bridge.run_dpo(policy, [split])


CAPITALS = {"France": "Paris", "Peru": "Lima"}


@tool
def lookup(country: str) -> str:
    """Find the capital of a country.

    Args:
        country: its English name
    """
    return f"The capital is {CAPITALS[country]}. <|im_end|>"


def capital_env(**options) -> ToolEnv:
    return ToolEnv([lookup], rewards={"em": 1.0, "step_penalty": -0.1}, max_turns=3, **options)


def capital_tasks() -> list[Task]:
    return [Task(country, f"Capital of {country}?", (capital,)) for country, capital in CAPITALS.items()]


def test_methods_carry_the_tools_schema():
    env = capital_env()
    episode_class = bridge.environment_factory(env, capital_tasks())
    read, schema = get_json_schema(episode_class().lookup), env.tools[0].schema()
    assert schema["function"]["parameters"].pop("additionalProperties") is False  # a signature cannot say it
    assert read == schema
    rogue = copy.copy(lookup)
    rogue.name = "reset"
    with pytest.raises(ValueError, match="rename the tool"):
        bridge.environment_factory(ToolEnv([rogue]), [])


def test_an_episode_through_trl_earns_what_the_environment_pays():
    env, tasks = capital_env(), capital_tasks()
    call = '<tool_call>\n{"name": "lookup", "arguments": {"country": "Peru"}}\n</tool_call>'
    env.reset(tasks[1])
    expected = sum(env.step(text).reward for text in (call, "<answer>Lima</answer>"))
    first, second = (bridge.environment_factory(env, tasks)() for _ in range(2))
    assert first.reset(task_id="Peru", prompt=[]) is None
    second.reset(task_id="France", prompt=[])
    reply = first.lookup(country="Peru")
    assert "Lima" in reply and "<|im_end|>" not in reply
    done = [{"role": "tool", "content": reply}, {"role": "assistant", "content": "<answer>Lima</answer>"}]
    wrong = [{"role": "assistant", "content": "<answer>Lyon</answer>"}]
    rewards = bridge.episode_reward([done, wrong], [first, second])
    assert rewards[0] == pytest.approx(expected) and rewards[0] > 0.5 > rewards[1]
    assert first.lookup(country="Peru") == "The episode is over."


@pytest.mark.parametrize("turns", [1, 2])
@pytest.mark.parametrize("options", [{"shaping": {"gamma": 0.9}}, {"tool_success": 1.0}])
def test_shaping_and_normalisation_pay_the_same_through_trl(options, turns):
    env = ToolEnv([lookup], rewards={"em": 1.0, **options}, normalize_process="shaping" not in options)
    calls = ['<tool_call>{"name": "lookup", "arguments": {"country": "Peru"}}</tool_call>'] * turns
    env.reset(capital_tasks()[1])
    steps = [env.step(text).reward for text in (*calls, "<answer>Lima</answer>")]
    assert sum(steps) == pytest.approx(sum(0.9**t for t in range(turns + 1)) if "shaping" in options else 2.0)
    for last in ("<answer>Lima</answer>", None):
        episode_ = bridge.environment_factory(env, capital_tasks())()
        episode_.reset(task_id="Peru")
        for _ in calls:
            episode_.lookup(country="Peru")
        said = [{"role": "assistant", "content": last}] if last else [{"role": "tool", "content": "x"}]
        (found,) = bridge.episode_reward([said], [episode_])
        turn_rewards = sum(turn.process_reward for turn in episode_._env.episode.turns)
        assert found == pytest.approx(sum(steps) if last else turn_rewards + episode_._env.outcome)


def test_a_raising_tool_reaches_the_model_as_text():
    env = bridge.environment_factory(capital_env(), capital_tasks())()
    env.reset(task_id="Peru")
    assert "Error" in env.lookup(country="Atlantis")


def script(policy: QwenPolicy, turns: list[str]) -> list[str]:
    """Let the model say ``turns`` whatever it is asked; returns the list of prompts it saw, decoded."""
    prompts: list[str] = []
    queue = iter(turns)

    def generate(input_ids, attention_mask, **_):
        said = policy.tokenizer.encode(next(queue)) + [policy.tokenizer.eos_token_id]
        prompts.extend(
            policy.tokenizer.decode(row[keep.bool()]) for row, keep in zip(input_ids, attention_mask, strict=True)
        )
        return torch.cat([input_ids, torch.tensor(said).expand(len(input_ids), -1)], dim=1)

    policy.causal.generate = generate
    return prompts


@pytest.mark.parametrize(
    ("call_format", "call"),
    [
        ("hermes", '<tool_call>\n{"name": "lookup", "arguments": {"country": "Peru"}}\n</tool_call>'),
        ("tag", "<lookup>Peru</lookup>"),
    ],
)
def test_grpo_trainer_runs_the_environment(policy, tmp_path, call_format, call):
    env, tasks = capital_env(call_format=call_format), capital_tasks()
    prompts = script(policy, [call, "<answer>Lima</answer>"])
    trainer = bridge.grpo_trainer(
        policy,
        env,
        tasks,
        str(tmp_path),
        max_steps=1,
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=400,
        shuffle_dataset=False,
    )
    batches = []
    score = trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda inputs: batches.append(score(inputs)) or batches[-1]
    trainer.train()
    batch = batches[0]
    spoken = sum(len(policy.tokenizer.encode(text)) + 1 for text in (call, "<answer>Lima</answer>"))
    assert (batch["completion_mask"] * batch["tool_mask"]).sum(-1).tolist() == [spoken] * 4
    assert [row[:1] + row[-1:] for row in batch["tool_mask"].tolist()] == [[1, 1]] * 4
    messages = env.fork().reset(tasks[0])
    assert policy.tokenizer.encode(prompts[0]) == policy.chat.prompt_ids(messages, tools=env.tool_schemas)
    assert prompts[4].startswith(
        prompts[0] + call + "<|im_end|>\n<|im_start|>user\n<tool_response>\nThe capital is Lima."
    )
    rewards = trainer.state.log_history[0]["rewards/episode_reward/mean"]
    fork = env.fork()
    fork.reset(tasks[1])
    right = sum(fork.step(text).reward for text in (call, "<answer>Lima</answer>"))
    assert rewards == pytest.approx((right + right - 1.0) / 2)  # half of the episodes ask about France
