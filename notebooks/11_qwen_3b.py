# %% [markdown]
# # 11 · Qwen2.5-3B on one GPU
#
# **Aim.** Train a real model with the code of the lessons before: plan its memory, load it in 4 bits with adapters,
# look at one rollout, train a few steps, evaluate, stop and resume, export. You end with a folder that any program
# loads, and you know what every byte of the card was for.
#
# **Before this** lessons 03 (rollouts), 04 (advantages), 05 (losses).
#
# **Time.** ≈ 45 min to read and do, {run_seconds} s to run on two cores. On a GPU add the download of the weights (6
# GB) and some minutes.
#
# **With or without a GPU.** With a GPU of 8 GiB or more these cells train Qwen2.5-3B-Instruct on HotpotQA. Without one
# the **same cells** are a **dry run**: a tiny model on the invented world Atlas walks through the very same code (4-bit
# base, adapters, recomputed layers). The banner below says which of the two you see. **Nothing that a dry run shows is
# a figure of Qwen2.5-3B.**

# %% tags=["setup"]

# %%
import gc
import importlib.util
import json
import math
import shutil

import torch
from IPython.display import display

from agentr1_lite import AgentR1Trainer, QwenPolicy, collect_trajectory, load_config, load_task, rollout
from agentr1_lite.batch import collate
from agentr1_lite.course import table
from agentr1_lite.evaluation import difference, evaluate, run_baseline
from agentr1_lite.exercises import check
from agentr1_lite.loading import data_root
from agentr1_lite.mdp import Task
from agentr1_lite.optimizers import LossScale
from agentr1_lite.pipeline import held_out, make_policy, make_task
from agentr1_lite.planner import plan, plan_for
from agentr1_lite.retrievers import recall_at_k
from agentr1_lite.shapes import SHAPES, shape_of
from agentr1_lite.timing import CARDS, expected_curve, step_seconds
from agentr1_lite.views import figure, line, series, show, show_trajectory
from agentr1_lite.views.memory import plan_panel
from agentr1_lite.views.theme import part

# %% [markdown]
# ## One switch
#
# `MODEL` decides everything below. `None` takes Qwen2.5-3B where there is a GPU, else `atlas-tiny`. `"smollm2-135m"` is
# the choice in between: a real pretrained model on a CPU (tens of minutes; its recipe says where the weights come
# from). It cannot play Atlas before imitation, so in this lesson its reward is likely to stay 0 and its weights as they
# are; `python -m agentr1_lite train smollm2-135m` imitates first. Each name is a recipe of the package; the settings
# behind it make the lesson short: few questions, few steps.

# %%
MODEL = None  # or "qwen2.5-3b", "qwen2.5-1.5b", "qwen2.5-0.5b", "smollm2-135m", "atlas-tiny"

four_bits = ["model.quantization=nf4", "model.device=cpu"] if importlib.util.find_spec("bitsandbytes") else []
# "task.knobs.path=FOLDER" reads official files of yours instead of the hub
few = ["task.knobs.limit=200", "evaluation.questions=24", "training.batch_size=2", "training.group_size=4"]
SETTINGS = {
    "qwen2.5-3b": few,
    "qwen2.5-1.5b": few,
    "qwen2.5-0.5b": few,
    "smollm2-135m": ["evaluation.questions=24", "training.batch_size=2", "training.group_size=4"],
    "atlas-tiny": [
        *four_bits,
        "model.lora_rank=16",
        "model.gradient_checkpointing=true",
        "environment.failing=0",
        "training.lr=1e-3",
        "training.batch_size=4",
        f"training.group_size={4 if FAST else 6}",
        f"evaluation.questions={20 if FAST else 80}",
    ],
}
STEPS = 2 if FAST else 4
RUNS = data_root().parent / "runs" / "lesson11"
shutil.rmtree(RUNS, ignore_errors=True)

gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
enough = gpu is not None and gpu.total_memory >= 7.5 * 2**30  # cards sold with 8 GB show a little less
recipe = MODEL or ("qwen2.5-3b" if enough else "atlas-tiny")


def configured(folder):
    """The recipe with this lesson's settings, its run in ``folder``."""
    common = ["run.progress=false", "run.save_every=1", f"run.output={RUNS / folder}"]
    return load_config(recipe, [*SETTINGS[recipe], *common])


NOTE = f"dry run: numbers of {recipe}, not of Qwen2.5-3B"
NOTE = f"{recipe}, {STEPS} steps" if "qwen" in recipe else NOTE
card = "torch sees no GPU" if gpu is None else f"{gpu.name}, {gpu.total_memory / 2**30:.1f} GiB"
show(part(f"<h4>{NOTE}</h4><p>{card}</p>"), alt=NOTE)

# %% [markdown]
# ## Plan
#
# Before anything is downloaded: does it fit? The plan counts every tensor that a step will hold, from the model's shape
# alone. A step has three phases (rollout, log-prob pass, update); the highest of the three must stay below the card.
# Below is the recipe's plan for a T4, Colab's free card: sold with 16 GB, it shows about 15 GiB.

# %%
plan_panel(gpu_memory_gib=15)

# %% [markdown]
# Move the controls and watch which phase grows:
#
# - **`micro_batch_tokens`** drives the update: activations and logits of the rows that pass at once.
# - **`max_rows`** drives the rollout: keys and values of the episodes that are decoded at once.
# - **`response_tokens`** drives both. **`lora_rank`** costs little. **`group_size`** costs time, hardly memory: a large
#   group is only passed in more micro-batches.
# - PPO adds a third adapter and its optimiser.
#
# Where a plan does not fit, it says what to change, each with the peak it leads to:

# %%
too_much = plan("qwen2.5-3b", 15, batch_size=32, max_rows=256)
print(*too_much.sentences(), sep="\n")

# %% [markdown]
# ### How long?
#
# Let $P$ be the weights in linear layers, $F$ a card's 16-bit operations a second, $B$ its bytes a second, both from
# its data sheet, and $\eta = 0.3$ the share of $F$ that such code reaches. Decoding one token for $R$ rows reads every
# weight once, so memory traffic bounds it; a pass over whole rows is bound by arithmetic:
#
# $$t_{\text{token}} = \max\Big(\frac{b P}{B},\ \frac{2 P R}{\eta F}\Big) + \frac{\text{KV bytes}}{B} + \text{launches}
# \cdot 8\,\mu\text{s}$$
#
# $$t_{\text{rollout}} = \frac{\text{episodes}}{R} \cdot \text{sampled} \cdot t_{\text{token}} + \frac{2 P \cdot
# \text{tokens fed}}{\eta F}, \qquad t_{\text{log-prob}} = \frac{2 P \cdot \text{tokens}}{\eta F}, \qquad
# t_{\text{update}} = \frac{6 P \cdot \text{tokens}}{\eta F}$$
#
# $b = 4.5$ bytes a weight in NF4 (half a byte is read, the 16-bit layer written and read). The update passes three
# times: forward, forward again (recomputed layers), and backward to the activations; the frozen base needs no gradient.
# PPO's critic doubles the log-prob and update passes. A layer is taken to need 80 launches a token, an average episode
# to hold 900 tokens behind its prompt, 300 of them sampled; a group's prompt is fed once. Evaluations come on top.
#
# These are **estimates from data sheets, until someone measures**: `python tests/gpu/run_gpu_checks.py` measures the
# memory of each phase and tokens a second of rollout and update, on any CUDA machine; divide your tokens by them.

# %%
full = load_config("qwen2.5-3b")
steps = full.rlhf.online_rollouts // (full.training.batch_size * full.training.group_size)
rows = []
for card in CARDS.values():
    made = plan_for(full, card.memory)
    seconds = step_seconds(made.setting, card)
    number = "bfloat16" if card.bf16 else "float16"
    parts = [f"{seconds[phase]:.0f}" for phase in ("rollout", "log-prob", "update")]
    hours = steps * sum(seconds.values()) / 3600
    fits = f"{'yes' if made.fits else 'no'}, {made.peak_gib:.1f} of {card.memory} GiB"
    rows.append([card.name, fits, number, *parts, f"{sum(seconds.values()):.0f}", f"{hours:.1f}"])
head = ["card", "fits", "numbers", "rollout (s)", "log-prob (s)", "update (s)", "a step (s)", f"{steps} steps (h)"]
display(table(head, rows))
print("estimates from data sheets; nothing in this table was measured")

# %% [markdown]
# ### What to expect
#
# For HotpotQA the paper ([2511.14460](https://arxiv.org/abs/2511.14460) v1, table 3) reports an exact match of .1372
# for Qwen2.5-3B-Instruct with tools and .4405 after GRPO. These two numbers are **theirs**, with another corpus and
# far more training: 51,200 questions, where this recipe's 100 steps see 800. Do not expect .44 from it, nor the pace of
# this curve. What lies between the two numbers is an **assumption about its shape**: early training gains most, and
# every `half` of it gains half of the way that is left. It is drawn so that you can tell a slow start from a broken run.


# %%
def draw_expected(half):
    fig, ax = figure(7.5, 2.9)
    x = torch.linspace(0, 100, 201)
    ax.plot(
        x, [expected_curve(float(n), 0.1372, 0.4405, half) for n in x], label=f"assumed, half = {half} %", **line(0)
    )
    for value, words in ((0.1372, "the paper: before"), (0.4405, "the paper: after GRPO")):
        ax.axhline(value, color=series(5), linestyle=":")
        ax.annotate(words, (100, value + 0.012), ha="right", fontsize=8)
    ax.set(xlabel="share of the paper's training (%)", ylabel="exact match", ylim=(0, 0.5))
    ax.set_title("Illustration, not measured")
    ax.legend(loc="center right", fontsize=8)
    return show(fig, alt="An assumed curve between the paper's exact match before and after GRPO")


draw_expected(half=20)

# %% [markdown]
# ## Four bits
#
# 3.1 billion weights in 16 bits are 5.7 GiB. We never train them, so they may be coarse. **NF4**
# ([2305.14314](https://arxiv.org/abs/2305.14314)) stores each weight as one of 16 levels. The weights of a layer look
# like draws from a normal distribution; so the levels are quantiles of one: close together where many weights are.
#
# Rows of 64 weights, a *block*, share a scale: their largest absolute value.


# %%
def nf4_levels():
    """16 levels in [−1, 1]: quantiles of the normal distribution, 7 below zero, zero, 8 above; (16,)."""
    edge = 1 - (1 / 30 + 1 / 32) / 2  # the outermost quantile: half a step from the end, of 15 steps and of 16
    below = torch.special.ndtri(torch.linspace(edge, 0.5, 8, dtype=torch.float64)[:-1])
    above = torch.special.ndtri(torch.linspace(edge, 0.5, 9, dtype=torch.float64)[:-1])
    levels = torch.cat([-below, torch.zeros(1, dtype=torch.float64), above]).sort().values
    return (levels / levels.abs().max()).float()


def quantise(W, levels, block=64):
    """Codes 0 … 15 (one a weight) and a scale a block; W of any shape, its size a multiple of ``block``."""
    blocks = W.reshape(-1, block)
    scales = blocks.abs().amax(-1, keepdim=True)
    codes = ((blocks / scales)[..., None] - levels).abs().argmin(-1)  # the nearest level
    return codes, scales


def restore(codes, scales, levels, shape):
    return (levels[codes] * scales).reshape(shape)


# %% [markdown]
# One row by hand, then a matrix as a layer has it. For comparison: 16 levels at equal distances.

# %%
nf4, even = nf4_levels(), torch.linspace(-1, 1, 16)
small = torch.tensor([[0.30, -0.02, 0.11, -0.24]])
codes, scales = quantise(small, nf4, block=4)
rows = [["weight", *(f"{x:+.2f}" for x in small[0])], ["code", *map(str, codes[0].tolist())]]
rows += [["restored", *(f"{x:+.3f}" for x in restore(codes, scales, nf4, (4,)))]]
display(table(["", *(f"#{n}" for n in range(4))], rows))

W = 0.02 * torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
errors = {}
for name, levels in {"NF4": nf4, "equal steps": even}.items():
    errors[name] = (restore(*quantise(W, levels), levels, W.shape) - W).norm() / W.norm()
print(", ".join(f"{name}: error {error:.1%} of the weights' norm" for name, error in errors.items()))

# %%
fig, axes = figure(8.4, 3.1, cols=2, width_ratios=(1.3, 1))
scaled = (W / W.abs().amax(-1, keepdim=True)).flatten()
axes[0].hist(scaled, bins=48, color=series(5), alpha=0.45, density=True)
axes[0].vlines(nf4, 0, 1.5, color=series(0), lw=1.6, label="16 levels of NF4")
axes[0].vlines(even, -0.35, -0.05, color=series(1), lw=1.6, linestyle="-", label="16 at equal steps")
axes[0].set(
    xlabel="weight / scale of its block", ylabel="density", title="Levels where the weights are", ylim=(-0.4, 2.4)
)
axes[0].legend(loc="upper center", ncols=2, fontsize=8)
axes[0].set_xticks([-1, -0.5, 0, 0.5, 1])
x = torch.linspace(-1, 1, 1001)
for i, (name, levels) in enumerate({"NF4": nf4, "equal steps": even}.items()):
    axes[1].plot(x, (x[:, None] - levels).abs().amin(-1), label=name, **line(i))
axes[1].set(xlabel="weight / scale of its block", ylabel="|error|", title="Error of each weight", ylim=(0, 0.2))
axes[1].legend(loc="upper center", ncols=2, fontsize=8)
show(fig, alt="Histogram of weights with the levels of NF4 and of equal steps, and the error of both")

# %% [markdown]
# NF4 is finer in the middle, where most weights are, and coarser at the ends. A float32 scale for every 64 weights
# would add $32 / 64 = 0.5$ bits. **Double quantisation** stores the scales in 8 bits too, in groups of 256 with one
# float32 constant each:
#
# $$4 + \frac{8}{64} + \frac{32}{64 \cdot 256} = 4.127 \text{ bits a weight.}$$
#
# To compute, a layer is written out in 16 bits, multiplied, and thrown away. Only linear layers are stored so;
# embeddings and norms stay as they are. `bitsandbytes` does all this with the same 16 levels:

# %%
if importlib.util.find_spec("bitsandbytes"):
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    theirs = dequantize_4bit(*quantize_4bit(W, blocksize=64, quant_type="nf4"))
    apart = (restore(*quantise(W, nf4), nf4, W.shape) - theirs).abs().max()
    print(f"largest difference to bitsandbytes: {apart:.1e}, of weights up to {W.abs().max():.2f}")
    assert apart < 1e-5

# %% [markdown]
# ## Adapters
#
# A code of four bits has no gradient, so the base stays frozen. What is trained lies beside it: **LoRA**
# ([2106.09685](https://arxiv.org/abs/2106.09685)) adds to every linear layer a product of two thin matrices,
#
# $$y = W x + \frac{\alpha}{r} B A x, \qquad A: (r, \text{in}), \quad B: (\text{out}, r), \quad B = 0 \text{ at the
# start,}$$
#
# so that training starts from the base exactly; the kit takes $\alpha = 2r$. QLoRA is the two together: NF4 for $W$, LoRA for the rest.


# %%
def lora_linear(x, W, A, B, alpha):
    """W x + α/r · B A x; x (N, in), W (out, in), A (r, in), B (out, r) → (N, out)."""
    return x @ W.T + alpha / len(A) * (x @ A.T) @ B.T


torch.manual_seed(0)
x, A, B = torch.randn(5, 64), torch.randn(4, 64, requires_grad=True), torch.zeros(64, 4, requires_grad=True)
assert torch.equal(lora_linear(x, W, A, B, alpha=8), x @ W.T)  # B = 0: nothing has changed yet
lora_linear(x, W, A, B, alpha=8).square().sum().backward()
print(f"first gradient of A: {A.grad.abs().max():.1f} (B is 0, so A has no say yet), of B: {B.grad.abs().max():.1f}")
merged = W + 8 / 4 * (B + 0.1) @ A  # after training: one matrix again
assert torch.allclose(lora_linear(x, W, A, B + 0.1, 8), x @ merged.T, atol=1e-4)

# %% [markdown]
# The KL term needs a frozen reference, PPO a critic. As whole models that would be three copies of the base. As
# adapters they share one:

# %%
shape = SHAPES["qwen2.5-3b"]
adapter, GIB = shape.lora_weights(16), 2**30
copies = plan("qwen2.5-3b", 80, lora_rank=0, quantization=None, dtype="float16", algorithm="PPO").parts["weights"]
base = plan("qwen2.5-3b", 15).parts["weights"]
rows = [
    (
        "actor, reference, critic: three models in 16 bits",
        f"{copies:.1f} GiB",
        f"{shape.parameters:,} each, actor and critic",
    ),
    ("one base in NF4", f"{base:.1f} GiB", "none"),
    ("an adapter of rank 16 on it, float32", f"{4 * adapter / GIB:.2f} GiB", f"{adapter:,}"),
    ("three of them: actor, reference, critic", f"{12 * adapter / GIB:.2f} GiB", "actor and critic"),
]
display(table(["Qwen2.5-3B", "weights in memory", "trained"], rows))
print(f"{adapter / shape.parameters:.1%} of the weights are trained; AdamW in 8 bits keeps 2 bytes for each of them")

# %% [markdown]
# The actor's adapter is switched on to sample and to train, the reference's to compare, the critic's to value.
# Switching adapters *off* would compare with the base model, which is not the policy that the phase started from.
#
# ## Load
#
# The recipe's name is enough. Which numbers the base computes in is decided by the card: bfloat16 from compute
# capability 8.0 (Ampere: A100, L4, H200), float16 before (a T4 has 7.5 and no bfloat16 units), float32 on a CPU.

# %%
config = configured("whole")
print(plan_for(config).verdict())
policy = make_policy(config)
trained = sum(p.numel() for p in policy.actor_parameters())
assert trained == shape_of(config.model.base_model).lora_weights(config.model.lora_rank)
rows = [
    ("base", f"{config.model.base_model}, {'NF4' if policy.quantized else 'not quantised'}, {policy.causal.dtype}"),
    ("on", str(policy.device)),
    (
        "trained weights",
        f"{trained:,} in {len(policy.actor_parameters())} matrices, {policy.actor_parameters()[0].dtype}",
    ),
    ("weights in memory", f"{policy.causal.get_memory_footprint() / 2**20:,.1f} MiB, the adapter among them"),
    ("recomputed layers", "yes" if policy.gradient_checkpointing else "no"),
    ("loss scale", f"{LossScale.of(policy.causal.dtype).value:g}"),
]
display(table([NOTE, ""], rows))


# %% [markdown]
# ## The questions
#
# HotpotQA gives ten paragraphs with each question, of which two hold the evidence. A row looks like this one of ours;
# files of that form, or the hub's own data set (`task.knobs.path=hub`), become tasks, and their paragraphs the corpus
# that the agent searches.

# %%
PARAGRAPHS = [
    ["Glass Meadow", ["Glass Meadow is a string quartet.", " It was written by Ilse Varga in 1931."]],
    ["Ilse Varga", ["Ilse Varga was a composer.", " She was born in Torrenham."]],
    ["Torrenham", ["Torrenham is a market town.", " The river Ambel runs through it."]],
    ["Ambel", ["The Ambel is a river of 90 kilometres."]],
    ["Meadow pipit", ["The meadow pipit is a small bird of open country."]],
    ["Glass harmonica", ["The glass harmonica is a musical instrument of turning bowls."]],
]
ROWS = [
    {
        "_id": "toy-1",
        "question": "In which town was the composer of Glass Meadow born?",
        "answer": "Torrenham",
        "type": "bridge",
        "level": "easy",
        "supporting_facts": [["Glass Meadow", 1], ["Ilse Varga", 1]],
        "context": PARAGRAPHS,
    },
    {
        "_id": "toy-2",
        "question": "Which river runs through the town where Ilse Varga was born?",
        "answer": "Ambel",
        "type": "bridge",
        "level": "easy",
        "supporting_facts": [["Ilse Varga", 1], ["Torrenham", 1]],
        "context": PARAGRAPHS,
    },
]
RUNS.mkdir(parents=True)
(RUNS / "hotpot_dev_toy.json").write_text(json.dumps(ROWS), encoding="utf-8")
toy = load_task("hotpotqa", "dev", path=RUNS / "hotpot_dev_toy.json", rewards={"agent_r1": 1.0})
print(toy.env.system_prompt)

# %% [markdown]
# That is the prompt of these tasks, after the paper's: a thought before every action, one action a turn. Can the agent
# find the evidence at all? **Recall@k** is the share of gold passages among the first $k$ of one search with the
# question itself; the **scripted expert** knows what must be found, and still has to find it by searching. If its exact
# match is low, retrieval is what limits you, and no training will help.

# %%
train_set, test_set = make_task(config, "train"), held_out(config)
ks = (1, 2, 5, 10)
sets = {"the toy above": toy, f"held-out questions of this run ({train_set.name})": test_set}
rows = []
for name, task_set in sets.items():
    recall = recall_at_k(task_set.index, task_set.tasks, ks)
    expert = run_baseline("scripted_expert", policy, task_set).mean()
    rows.append((name, len(task_set.tasks), *(f"{recall[k]:.2f}" for k in ks), f"{expert:.2f}"))
table(["", "questions", *(f"recall@{k}" for k in ks), "expert's EM"], rows)

# %% [markdown]
# ### The reward
#
# The paper's reward, `agent_r1`, looks at the form first: with the format score $f$ (the share of turns that are a
# thought and a clean call, or at last a thought and an answer) it is exact match where $f = 1$, else $f - 1$. Six
# episodes played by hand on the toy:

# %%
SEARCH = '<tool_call>\n{"name": "search", "arguments": {"query": "composer of Glass Meadow"}}\n</tool_call>'
EPISODES = {
    "in format, right": [
        "<think>Who wrote it?</think>\n" + SEARCH,
        "<think>Varga.</think>\n<answer>Torrenham</answer>",
    ],
    "in format, wrong": ["<think>Who wrote it?</think>\n" + SEARCH, "<think>Hm.</think>\n<answer>Ambel</answer>"],
    "right, one thought missing": [SEARCH, "<think>Varga.</think>\n<answer>Torrenham</answer>"],
    "right, no thoughts": [SEARCH, "<answer>Torrenham</answer>"],
    "in format, right, never searched": ["<think>I know it.</think>\n<answer>Torrenham</answer>"],
    "in format, searches to the end": ["<think>Who wrote it?</think>\n" + SEARCH] * 5,
}
rows = []
for name, turns in EPISODES.items():
    env = toy.env.fork()
    env.reset(toy.tasks[0], seed=0)
    results = [env.step(turn) for turn in turns]
    rows.append((name, f"{sum(result.reward for result in results):+.1f}"))
table(["episode", "agent_r1"], rows)

# %% [markdown]
# Form pays before success does: that is what teaches a model to think and to call in the first steps. Searching as such
# pays nothing: an answer from memory earns as much, if it is right. The
# recipe `qwen2.5-3b` trains on this reward; the recipes on Atlas train on exact match alone, for their small models
# seldom write a thought.
#
# ## One rollout
#
# Look before you train. The prompt as tokens, with the tools in the system turn:

# %%
task = test_set.tasks[0]
messages = test_set.env.fork().reset(task, seed=0)
prompt = policy.chat.prompt_ids(messages, tools=test_set.env.tool_schemas)
print(f"{len(prompt)} tokens:\n{policy.chat.decode(prompt)}")

# %%
(episode,) = rollout(policy, test_set.env, [task], temperature=1.0, seed=0)
show_trajectory(episode, "source", tokenizer=policy.tokenizer, title=f"Before training ({NOTE})")

# %% [markdown]
# ## Half precision and the loss scale
#
# On a T4 the base computes in float16. Its smallest positive number is $6 \cdot 10^{-8}$; bfloat16 reaches $10^{-40}$
# with fewer digits. A step of the recipe averages over 64 episodes of some 300 sampled tokens, so each token's loss is
# divided by $N \approx 19{,}000$ before anything else happens. The cure is old
# ([1710.03740](https://arxiv.org/abs/1710.03740)): multiply the loss by $S = 4096$, and divide the gradient of the
# weights by $S$ again, in float32.

# %%
N, S = 64 * 300, LossScale.of(torch.float16).value


def through(value, kind, factor=1.0):
    """What is left of a number that passes through a number type, times a factor there and divided by it after."""
    return f"{torch.tensor(value * factor).to(kind).float().item() / factor:.2e}"


rows = []
for words, value in {"1 / N": 1 / N, "a sure token: × 0.01": 0.01 / N, "a surer one: × 0.0001": 1e-4 / N}.items():
    float16, bfloat16 = (through(value, kind) for kind in (torch.float16, torch.bfloat16))
    rows.append((words, f"{value:.2e}", float16, through(value, torch.float16, S), bfloat16))
table(["gradient of a logit", "true", "float16", f"float16, S = {S:g}", "bfloat16"], rows)

# %% [markdown]
# And here are true gradients: of one episode's loss with respect to the states between the layers. Those travel in the
# base's number type; what lies left of the line would arrive as 0.


# %%
def state_gradients(episode, scale):
    """scale · d loss / d state, of every layer and token of one episode; those that are not 0, float32."""
    one = collate([episode], pad_id=policy.chat.pad_id).to(policy.device)
    out = policy.causal(one.input_ids, output_hidden_states=True)
    logp = out.logits[:, :-1].float().log_softmax(-1).gather(-1, one.input_ids[:, 1:, None])[..., 0]
    loss = -(logp * one.action_mask[:, 1:]).sum() / N
    found = torch.autograd.grad(scale * loss, out.hidden_states[1:])
    found = torch.cat([g.float().flatten() for g in found]).abs()
    return found[found > 0].cpu()


gradients = state_gradients(episode, S)
smallest = 2.0**-24
fig, ax = figure(7.5, 2.9)
bins = torch.linspace(-14, 0, 85).tolist()
for i, (name, values) in enumerate({"as they are": gradients / S, f"times S = {S:g}": gradients}.items()):
    lost = (values < smallest / 2).float().mean()
    look = {"color": series(i), "alpha": 0.5, "linestyle": ("-", "--")[i]}
    ax.hist(values.log10(), bins=bins, histtype="stepfilled", label=f"{name}: {lost:.0%} would be 0", **look)
ax.axvline(math.log10(smallest), color=series(3), label="smallest float16")
ax.set(xlabel="log10 |gradient|", ylabel="how many", title=NOTE, yticks=[], xticks=range(-14, 1, 2))
ax.legend(fontsize=8, loc="upper left")
show(fig, alt="Gradients between the layers before and after the loss scale, against the smallest float16")

# %% [markdown]
# Where a scaled gradient overflows instead, the step is left out and $S$ halved; after 200 good steps it doubles. In
# the other number types $S = 1$. The run log shows `loss_scale`.
#
# ## Train
#
# The trainer tells whoever listens: `on_step` after each step, `on_trajectories` with what was sampled. A listener
# needs no base class, any of the methods will do. This one draws a line, three curves and the best episode of the step.
# It writes each into its own place and *updates* it, so nothing flickers and nothing piles up.


# %%
class Watch:
    """Progress line, curves and an episode, each updated in its place."""

    def __init__(self, steps):
        self.steps, self.rows = steps, []
        self.line, self.curves, self.episode = (display(show(part("")), display_id=True) for _ in range(3))

    def on_trajectories(self, trainer, step, trajectories):
        best = max(trajectories, key=lambda t: t.total_reward)
        title = f"Step {step}: an episode with the highest reward"
        self.episode.update(show_trajectory(best, "source", tokenizer=trainer.policy.tokenizer, title=title))

    def on_step(self, trainer, phase, step, metrics):
        self.rows.append({"step": step, **metrics})
        seconds = sum(row["seconds"] for row in self.rows)
        bar = "●" * step + "○" * (self.steps - step)
        said = f"{bar} step {step} of {self.steps}, reward {metrics['reward']:+.2f}, {seconds / step:.1f} s a step"
        self.line.update(show(part(f"<p>{said} · {NOTE}</p>"), alt=said))
        self.curves.update(draw_curves(self.rows, self.steps))


def draw_curves(rows, steps):
    fig, axes = figure(8.4, 2.5, cols=3)
    names = {"reward": "mean reward", "action_tokens": "sampled tokens an episode", "grad_norm": "gradient norm"}
    for i, (key, label) in enumerate(names.items()):
        axes[i].plot([row["step"] for row in rows], [row[key] for row in rows], **line(i, marker=True))
        axes[i].set(xlabel="step", title=label, xlim=(0.5, steps + 0.5), xticks=range(1, steps + 1))
    return show(fig, alt="Reward, sampled tokens and gradient norm of every step so far")


# %%
rollouts = STEPS * config.training.batch_size * config.training.group_size
before = {temperature: evaluate(policy, test_set, temperature=temperature) for temperature in (0.0, 1.0)}
trainer = AgentR1Trainer(policy, config, callbacks=[Watch(STEPS)])
history = trainer.online_rl(train_set, rollouts)

# %% [markdown]
# These curves show that everything runs, not how well it learns: the questions change from step to step, and so does
# the mean reward. What must hold from the first step on is what the trainer's own checks look at:

# %%
assert all(math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"]) for row in history)
apart = max(row["first_log_ratio_max"] for row in history)
print(f"sampler and trainer agree: before each step the largest |log ratio| is {apart:.1e}")
doubts = [finding for finding in trainer.findings if finding.level != "ok"]
print(f"of {len(trainer.findings)} checks of the last step, {len(doubts)} ask for a look", *doubts, sep="\n")

# %% [markdown]
# ## Evaluate
#
# Held-out questions, exact match, with a 95 % interval over questions, greedy and sampled at temperature 1 as in
# training. The difference is taken question by question; it is beyond chance only where its interval leaves 0 out.

# %%
after = {temperature: evaluate(policy, test_set, temperature=temperature) for temperature in before}
rows = []
for temperature, words in {0.0: "greedy", 1.0: "sampled"}.items():
    for name, report in (("before", before[temperature]), (f"after {STEPS} steps", after[temperature])):
        low, high = report.interval()
        recall = f"{report.mean('recall'):.2f}"
        rows.append((f"{words}, {name}", f"{report.mean():.3f}", f"[{low:.2f}, {high:.2f}]", recall))
    gain = difference(after[temperature], before[temperature])
    rows.append((f"{words}, difference", f"{gain.mean:+.3f}", f"[{gain.low:+.2f}, {gain.high:+.2f}]", ""))
table([f"{len(after[0.0])} questions; {NOTE}", "EM", "95 % interval", "evidence found"], rows)

# %% [markdown]
# The two need not agree. Training raises the *sampled* reward, little by little; greedy decoding takes the likelier
# action, and leaps where that flips. The dry run's tiny model knows how to search a second time, does so sometimes when
# it samples and seldom when it is greedy. A few steps tip that single habit, and the greedy score leaps while the sampled
# one moves by a fraction. Do not expect this of a real model.
#
# With so few questions the interval is wide: ± 0.1 takes about 100 questions, ± 0.03 about 1,000.
# The recipe evaluates on 200; the paper's figures are of whole test sets.
#
# ## Stop and resume
#
# Colab disconnects. A checkpoint holds the adapters, the optimiser's moments, the state of every random generator and
# the place in the order of questions; the base is not in it. We stop a second run after its first step, throw policy
# and trainer away, and resume in new ones. The weights must be those of the run that was never stopped.


# %%
class StopAfter:
    def __init__(self, step):
        self.step = step

    def on_step(self, trainer, phase, step, metrics):
        if step == self.step:
            trainer.stop()  # what Ctrl-C and the stop button do: finish the step, save, leave


whole = {name: weight.cpu().clone() for name, weight in policy.state_dict().items()}
moved = max(float(weight.abs().max()) for name, weight in whole.items() if "actor" in name and "lora_B" in name)
print(f"the run that was not stopped moved B from 0 to {moved:.1e} at most")
del trainer, policy  # one at a time in the GPU's memory
config = configured("stopped")
trainer = AgentR1Trainer(make_policy(config), config, callbacks=[StopAfter(1)])
try:
    trainer.online_rl(train_set, rollouts)
except KeyboardInterrupt as stop:
    print(stop)
print("in its folder:", *sorted(path.name for path in (RUNS / "stopped").iterdir()))
del trainer  # as if the machine were gone
_ = gc.collect()

# %%
policy = make_policy(config)
trainer = AgentR1Trainer(policy, config).resume()
print(f"goes on in phase {trainer.phase!r} after step {trainer.step}")
trainer.online_rl(train_set, rollouts)
apart = max(float((weight.cpu() - whole[name]).abs().max()) for name, weight in policy.state_dict().items())
print(f"largest difference of a weight to the run that was not stopped: {apart:g}")
assert apart == 0 or policy.device.type == "cuda"

# %% [markdown]
# Exactly 0 on a CPU. On a GPU some kernels add in an order that varies, so a last digit may differ, and with it, in
# time, a sampled token.
#
# The real run on Colab needs only a folder that survives: mount your Drive and name it as `run.output`. After a
# disconnect mount it again, and resume with the settings the run began with:
#
# ```
# from google.colab import drive; drive.mount("/content/drive")
# !python -m agentr1_lite train qwen2.5-3b run.output=/content/drive/MyDrive/qwen-3b
# !python -m agentr1_lite train --resume run.output=/content/drive/MyDrive/qwen-3b
# ```
#
# The recipe saves every five steps. A save is written beside the former one and renamed, so a disconnect while saving
# costs the new checkpoint and never the old one.
#
# ## Export
#
# `save` writes the adapter alone (some megabytes; it names its base). `merge` adds it to the base, $W +
# \frac{\alpha}{r} B A$, with $W$ as the 4-bit base really was while the adapter learned, and writes a plain model.

# %%
folders = {"adapter": policy.save(RUNS / "adapter"), "merged": policy.merge(RUNS / "merged")}
rows = []
for name, folder in folders.items():
    files = sorted(folder.iterdir(), key=lambda file: -file.stat().st_size)
    shown = ", ".join(f"{file.name} ({file.stat().st_size / 1e6:.2f} MB)" for file in files[:3])
    rows.append((name, shown + f" and {len(files) - 3} more"))
table(["folder", "its largest files"], rows)

# %%
plain = QwenPolicy(RUNS / "merged", dtype=policy.causal.dtype)
one = collate([episode], pad_id=policy.chat.pad_id).to(policy.device)
with torch.no_grad():
    trained, exported = policy.log_probs(one).logprobs, plain.log_probs(one.to(plain.device)).logprobs
apart = float((trained.cpu() - exported.cpu()).abs().max())
print(f"{type(plain.model).__name__}, {plain.causal.dtype}, no adapter left; log-probs differ by {apart:.1e} at most")
question = Task("mine", task.question)  # without a known answer: nobody scores it
answered = collect_trajectory(test_set.env, plain, question, greedy=True)
show_trajectory(answered, "source", tokenizer=plain.tokenizer, title=f"The exported model ({NOTE})")

# %% [markdown]
# `AutoModelForCausalLM.from_pretrained("runs/lesson11/merged")` loads the same folder, as do vLLM or llama.cpp's
# converter. To talk to it in a terminal, with its search tool, from the clone's folder:

# %%
plain_model = "model.lora_rank=0 model.quantization=null"
print(f"python -m agentr1_lite chat {recipe} --policy runs/lesson11/merged --split dev {plain_model}")

# %% [markdown]
# ## Exercises
#
# **1. The memory of a 4-bit base.** Bytes of a layer of `weights` numbers: codes of 4 bits, for each `block` of weights
# a scale of 8 bits, for each `group` of scales a constant of 32 bits.


# %%
def nf4_bytes(weights, block, group):
    codes = ...
    scales = ...
    constants = ...
    return ...


# %%
check("nf4_bytes", nf4_bytes)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def nf4_bytes(weights, block, group):
#     codes = weights / 2
#     scales = weights / block
#     constants = 4 * weights / (block * group)
#     return codes + scales + constants
# ```
# For the 2.77 billion weights in Qwen2.5-3B's linear layers: 1.33 GiB.
# </details>
#
# **2. What is trained.** How many weights has one adapter? `linears` lists (in, out) of the linear layers of one
# decoder layer; the model has `layers` of these.


# %%
def lora_weights(linears, layers, rank):
    return ...


# %%
check("lora_weights", lora_weights)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def lora_weights(linears, layers, rank):
#     return layers * sum(rank * (inputs + outputs) for inputs, outputs in linears)
# ```
# For Qwen2.5-3B at rank 16: 29,933,568, one in a hundred.
# </details>
#
# **3. Under the loss scale.** `gradient` $(N,)$ is that of `scale` times the loss. Return what the optimiser gets and
# the next scale. First the factor comes off. Where a number is not finite, the step is left out (zeros) and the scale
# halved. Else a norm above `limit` is brought down to `limit`, and the scale stays.


# %%
def unscaled(gradient, scale, limit):
    gradient = ...
    return ...


# %%
check("unscaled", unscaled)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def unscaled(gradient, scale, limit):
#     gradient = gradient / scale
#     norm = gradient.norm()
#     if not torch.isfinite(norm):
#         return torch.zeros_like(gradient), scale / 2
#     return gradient * min(1.0, limit / norm), scale
# ```
# </details>
#
# ## Summary
#
# - Plan first: weights are the small part; rows decoded at once and tokens passed at once are what you choose.
# - NF4: 16 quantiles of a normal distribution, a scale for each 64 weights, 4.127 bits a weight. It is frozen.
# - LoRA: $B = 0$ at the start, one weight in a hundred is trained; actor, reference and critic share one base.
# - float16 loses the gradients of single tokens; a factor on the loss saves them. bfloat16 and float32 need none.
# - Check the chain before the model: recall@k, the scripted expert, one rollout, the reward of episodes played by hand.
# - A run that was stopped and resumed equals one that was not. If it does not, something is missing in the checkpoint.
# - Few questions give wide intervals. A figure without its interval and its model is no figure.
#
# **Break it and mend it.** Call `trainer.optimizers.clear()` after `resume()` and compare the weights again; give
# `quantise` a block of 1,024 and watch the error; plan `qwen2.5-7b` for 10 GiB.
#
# ## Where this lives in the package
#
# | here | there |
# |---|---|
# | the plan and its picture | [`planner.py`](../agentr1_lite/planner.py), [`views/memory.py`](../agentr1_lite/views/memory.py) |
# | shapes, seconds a step | [`shapes.py`](../agentr1_lite/shapes.py), [`timing.py`](../agentr1_lite/timing.py) |
# | NF4, number types | [`loading.py`](../agentr1_lite/loading.py) |
# | adapters, save, merge | [`policy.py`](../agentr1_lite/policy.py), [`storage.py`](../agentr1_lite/storage.py) |
# | loss scale, 8-bit AdamW | [`optimizers.py`](../agentr1_lite/optimizers.py) |
# | questions and retrieval | [`multihop.py`](../agentr1_lite/tasks/multihop.py), [`retrievers.py`](../agentr1_lite/retrievers.py) |
# | listeners, resume | [`trainer.py`](../agentr1_lite/trainer.py), [`checkpoint.py`](../agentr1_lite/checkpoint.py) |
# | the recipe | [`qwen2.5-3b.yaml`](../agentr1_lite/recipes/qwen2.5-3b.yaml) |
#
# To come: lesson 12, a task of your own in under 80 lines, which this recipe trains as it is.
