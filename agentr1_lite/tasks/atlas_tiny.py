"""How `atlas-tiny` is made: a Qwen2 of about a million parameters that can read, search and copy.

Pretraining stands for what a language model brings along before any phase of
the kit. Every step draws a fresh random world, so nothing can be memorised, and
shows four kinds of text: lists of names that repeat (copying), passages with
questions about them (reading), pairs of trades (comparing), and transcripts of
scripted players (tool use).
The last tenth is mostly careless transcripts, so the base model is able but lazy:
what the three phases change is what it does, not what it could do.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from agentr1_lite.chat import ChatFormat
from agentr1_lite.env import ToolEnv
from agentr1_lite.mdp import Segment
from agentr1_lite.retrieval import BM25, Passage, make_search_tool
from agentr1_lite.tasks.atlas import READ_PROMPT, RELATIONS, SYSTEM_PROMPT, TRADES, World, name_words, render
from agentr1_lite.tasks.scripted import encode_log, record, say_answer, say_verdict

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<tool_call>", "</tool_call>")
SKILLED = {"expert": 0.5, "doubter": 0.2, "careful": 0.1, "hasty": 0.2}
CARELESS = {"expert": 0.1, "doubter": 0.1, "guesser": 0.1, "hasty": 0.7}
NAME_WEIGHT, VERDICT_WEIGHT, OTHER_WEIGHT = 4.0, 12.0, 0.1
WIDTH, HEADS = 128, 4

# ChatML; tools as one short line in the system turn, replies in one user turn as Qwen2.5 does
TEMPLATE = Path(__file__).with_name("atlas_tiny.jinja")


def environment(world: World, failing: float = 0.1) -> ToolEnv:
    index = BM25([Passage(title, text) for title, text in world.passages])
    return ToolEnv(
        [make_search_tool(index, k=2, failing=failing, render=render)], system_prompt=SYSTEM_PROMPT, max_turns=8
    )


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE in which every name word, with and without a space before it, is one token."""
    rng = random.Random(0)
    texts = []
    for seed in range(8):
        world = World(seed + 1, "train")
        env = environment(world)
        for task in world.questions(40):
            log = record(env, task, rng.choice(list(CARELESS)), seed)
            texts += ["\n".join([m["role"], m["content"], "assistant"]) for m in log["messages"]]
    plain = [text.replace(TAGS[0], "\n").replace(TAGS[1], "\n") for text in texts]
    for word in [*name_words(), "yes", "no"]:
        plain += [f" {word}"] * 300 + [word] * 30
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        min_frequency=20,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=list(SPECIAL),
        show_progress=False,
    )
    tokenizer.train_from_iterator(plain, trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = TEMPLATE.read_text(encoding="utf-8").strip()
    fast.model_max_length = 2048
    split = [w for w in name_words() for form in (w, f" {w}") if len(fast.encode(form, add_special_tokens=False)) != 1]
    if split:
        raise RuntimeError(f"the tokenizer splits {len(split)} name words, such as {split[0]!r}; lower min_frequency")
    return fast


def build_model(vocabulary: int, seed: int = 0) -> Qwen2ForCausalLM:
    """Qwen2 with 4 layers of width 128, tied embeddings, and an induction circuit to start from."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=-(-vocabulary // 64) * 64,
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=4,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(0, 0.09)
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            for linear in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
                linear.weight.normal_(0, WIDTH**-0.5)
            attention.o_proj.weight.zero_()
            mlp.down_proj.weight.zero_()
        seed_induction(model)
    return model


def seed_induction(model: Qwen2ForCausalLM, sharpness: float = 6.0, waves: int = 6) -> None:
    """Write an induction circuit (Olsson et al., arXiv 2209.11895) into the first two layers.

    Head 0 of layer 0 looks one token back: the biases of query and key, turned by the rotary embedding, agree best at
    distance 1. It copies what it sees into a subspace of its own. Heads 0 and 1 of layer 1 compare the present token
    with that subspace, find where it stood before, and copy the token behind it. From random weights this circuit
    appears late and suddenly; an hour of one core is better spent on reading.
    """
    size = WIDTH // HEADS
    angles = 10_000.0 ** (-torch.arange(waves) * 2 / size)
    basis, copy = (torch.linalg.qr(torch.randn(WIDTH, WIDTH))[0] for _ in range(2))
    read, written = basis[:size], basis[size : 2 * size]
    back, match = model.model.layers[0].self_attn, model.model.layers[1].self_attn
    head = slice(0, size)
    for projection in (back.q_proj, back.k_proj):
        projection.weight[head] *= 0.1
    back.q_proj.bias[:waves] = sharpness
    back.k_proj.bias[:waves] = sharpness * angles.cos()
    back.k_proj.bias[size // 2 : size // 2 + waves] = sharpness * angles.sin()
    back.v_proj.weight[head], back.o_proj.weight[:, head] = read, 0.2 * written.T
    for head in (slice(0, size), slice(size, 2 * size)):
        match.q_proj.weight[head], match.k_proj.weight[head] = 2.0 * read, 2.0 * written
        match.v_proj.weight[head], match.o_proj.weight[:, head] = copy[head], 0.2 * copy[head].T


def reading(world: World, chat: ChatFormat, rng: random.Random, questions: int = 3) -> Segment:
    """One or two passages and questions about them, answered from the text; every relation is asked as often."""
    texts = dict(world.passages)
    asked_for = rng.sample(RELATIONS, 2)
    about = [rng.choice(world.members[relation.subject]) for relation in asked_for][: rng.choice((1, 2))]
    lines = [f"{i}. {texts[name]}" for i, name in enumerate(about, 1)]
    segment = Segment()
    for turn in range(questions):
        entity = world.entities[rng.choice(about)]
        relation = rng.choice([r for r in RELATIONS if r.subject == entity.kind])
        question = relation.head.format(entity.name)
        if turn == 0:
            system = {"role": "system", "content": READ_PROMPT}
            segment.extend(chat.prompt_ids([system, {"role": "user", "content": "\n".join([*lines, question])}]))
        else:
            asked = chat.observation_ids([{"role": "user", "content": question}], ended_by=chat.turn_end_id)
            segment.extend(asked.ids)
        ids = chat.turn_ids(say_answer(entity.facts[relation.noun]))
        segment.extend(ids, [0.0] * len(ids))
    return segment


def comparing(chat: ChatFormat, rng: random.Random, pairs: int = 6) -> Segment:
    """Thoughts that put two trades side by side, and the verdict: teaches to tell whether they are equal."""
    segment = Segment()
    trades = TRADES["person"]
    for _ in range(pairs):
        first = rng.choice(trades)
        second = first if rng.random() < 0.5 else rng.choice(trades)
        ids = chat.turn_ids(say_verdict(first, second))
        segment.extend(ids, [0.0] * len(ids))
    return segment


def copying(words: list[int], rng: random.Random) -> Segment:
    """Eight random two-word names, then names drawn from them again: teaches copying and nothing else."""
    names = [rng.sample(words, 2) for _ in range(8)]
    again = [token for _ in range(16) for token in rng.choice(names)]
    segment = Segment()
    segment.extend([token for name in names for token in name])
    segment.extend(again, [0.0] * len(again))
    return segment


@dataclass(frozen=True)
class Cycle:
    """A stretch of pretraining with its own warm-up and cosine decay, and what its steps show.

    ``short``: share of steps, at the start, on short texts and one-hop episodes alone; ``careless``: share of steps,
    at the end, on careless transcripts. ``texts``: lists to copy, passages to read, episodes, of a later step.
    ``mix``: 1 hop, 2 hops, 3 hops, comparisons. Every step also shows two lists of comparisons.
    """

    steps: int
    lr: float
    short: float
    careless: float
    texts: tuple[int, int, int]
    mix: tuple[float, float, float, float]


CYCLES = (
    Cycle(1600, 2e-3, 0.25, 0.1, (1, 6, 16), (0.25, 0.3, 0.25, 0.2)),
    Cycle(900, 1.5e-3, 0.0, 0.12, (0, 5, 17), (0.15, 0.35, 0.35, 0.15)),
    Cycle(700, 1.2e-3, 0.0, 0.14, (0, 4, 17), (0.2, 0.3, 0.35, 0.15)),
    Cycle(500, 1e-3, 0.0, 0.16, (0, 3, 18), (0.25, 0.3, 0.3, 0.15)),
)


def lesson(number: int, place: float, cycle: Cycle, chat: ChatFormat, words: list[int]) -> list[Segment]:
    """The texts of pretraining step ``number``, at ``place`` (0 to 1) of its cycle."""
    rng = random.Random(f"pretrain/{number}")
    world = World(1_000 + number, "train")
    short = place < cycle.short
    lists, passages, episodes = (4, 14, 4) if short else cycle.texts
    out = [copying(words, rng) for _ in range(lists)]
    out += [reading(world, chat, rng) for _ in range(passages)]
    out += [comparing(chat, rng) for _ in range(2)]
    env = environment(world)
    players = CARELESS if place >= 1 - cycle.careless else SKILLED
    for task in world.questions(episodes, number, (1, 0, 0, 0) if short else cycle.mix):
        player = rng.choices(list(players), list(players.values()))[0]
        out += encode_log(record(env, task, player, number), chat).segments
    return out


def parts(segments: list[Segment], count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Micro-batches of similar length: token ids and action masks (b, T), right-padded."""
    ordered = sorted(segments, key=len)
    size = -(-len(ordered) // count)
    for start in range(0, len(ordered), size):
        part = ordered[start : start + size]
        width = max(map(len, part))
        ids = torch.tensor([s.token_ids + [0] * (width - len(s)) for s in part])
        acted = torch.tensor([s.action_mask + [False] * (width - len(s)) for s in part])
        real = torch.tensor([[t < len(s) for t in range(width)] for s in part])
        yield ids, torch.where(acted, 1.0, OTHER_WEIGHT) * real


def pretrain(
    folder: str | Path, cycles: Sequence[Cycle] = CYCLES, seed: int = 0, progress: bool = True
) -> dict[str, float]:
    """Build tokenizer and model, pretrain, and save both to ``folder``; returns the last losses.

    Loss: cross-entropy, weight 1 on action tokens (4 on names in them, which carry what is to be learned) and
    0.1 elsewhere; AdamW, started anew in every cycle.
    """
    tokenizer, started = build_tokenizer(), time.perf_counter()
    model = build_model(len(tokenizer), seed)
    losses, number = {}, 0
    for cycle in cycles:
        losses = run_cycle(model, ChatFormat(tokenizer), cycle, number, progress)
        number += cycle.steps
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    Path(folder).mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {**losses, "seconds": time.perf_counter() - started}


def run_cycle(
    model: Qwen2ForCausalLM, chat: ChatFormat, cycle: Cycle, first: int = 0, progress: bool = True
) -> dict[str, float]:
    """One cycle, its steps numbered from ``first``; returns running means of the losses on actions and on names."""
    words, trades, verdicts = (
        [chat.tokenizer.encode(f" {w}", add_special_tokens=False)[0] for w in texts]
        for texts in (name_words(), TRADES["person"], ("yes", "no"))
    )
    value = torch.ones(model.config.vocab_size)
    value[words + trades], value[verdicts] = NAME_WEIGHT, VERDICT_WEIGHT
    optimizer = torch.optim.AdamW(model.parameters(), lr=cycle.lr, betas=(0.9, 0.98), weight_decay=0.01)
    averages: dict[str, float] = {}
    bar = tqdm(range(cycle.steps), desc="pretraining atlas-tiny", disable=not progress)
    for step in bar:
        place = step / cycle.steps
        rate = cycle.lr * min(1.0, (step + 1) / 100) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * place)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        batches = []
        for ids, weight in parts(lesson(first + step, place, cycle, chat, words), 3):
            targets, weight = ids[:, 1:], weight[:, 1:]
            batches.append((ids, torch.where(weight == 1, value[targets], weight)))
        seen = fit(model, batches)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for label, loss in seen.items():
            averages[label] = 0.95 * averages.get(label, loss) + 0.05 * loss
        bar.set_postfix({k: f"{v:.3f}" for k, v in averages.items()}, refresh=False)
    return averages


def fit(model: Qwen2ForCausalLM, batches: list[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Add the gradient of the weighted cross-entropy of (ids (b, T), weights (b, T − 1)); returns mean losses."""
    total = sum(float(weight.sum()) for _, weight in batches)
    sums, counts = {"action": 0.0, "name": 0.0, "verdict": 0.0}, {"action": 0, "name": 0, "verdict": 0}
    for ids, weight in batches:
        kept = weight > 0
        hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
        nll = F.cross_entropy(model.lm_head(hidden[kept]), ids[:, 1:][kept], reduction="none")
        ((nll * weight[kept]).sum() / total).backward()
        chosen_by = {"action": weight[kept] >= 1, "name": weight[kept] == NAME_WEIGHT}
        for label, chosen in {**chosen_by, "verdict": weight[kept] == VERDICT_WEIGHT}.items():
            sums[label] += float(nll.detach()[chosen].sum())
            counts[label] += int(chosen.sum())
    return {label: sums[label] / max(counts[label], 1) for label in sums}
