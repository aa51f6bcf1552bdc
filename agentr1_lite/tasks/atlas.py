"""Atlas, the default task: questions about a world that does not exist.

A world holds people, cities, companies, rivers, books and countries with
functional relations between them, told in plain English, one passage an
entity. Names are drawn anew for every world, so nothing can be answered from
memory and every gain comes from searching.

A name is two invented words. Inside a world no word occurs in two names, and a
checksum of the whole name decides its split: train, dev and test share words
but no entity (`split_of`).
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

from agentr1_lite.env import ToolEnv
from agentr1_lite.mdp import Task
from agentr1_lite.retrieval import BM25, Passage, make_search_tool
from agentr1_lite.tasks import TaskSet
from agentr1_lite.tasks import task as register

SYSTEM_PROMPT = "Search for facts, then reply <answer> name </answer>."
READ_PROMPT = "Read, then reply <answer> name </answer>."
ONSETS = ("b", "br", "d", "dr", "f", "g", "gr", "h", "k", "kl", "l", "m", "n", "p", "r", "s", "st", "t", "v", "z")
VOWELS = ("a", "e", "i", "o", "u")
CODAS = ("", "l", "m", "n", "nd", "r", "rn", "s", "sk", "th")
NUM_WORDS = 300
SPLITS = ("train", "dev", "test")


def name_words() -> list[str]:
    """The fixed list of invented words that names are made of; the tokenizer holds each as one token."""
    rng = random.Random(20)
    words: set[str] = set()
    while len(words) < NUM_WORDS:
        syllables = rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice("lmnrstvk") + rng.choice(VOWELS)
        words.add((syllables + rng.choice(CODAS)).capitalize())
    return sorted(words)


def split_of(name: str) -> str:
    """Train (80 %), dev or test (10 % each) by a checksum of the whole name."""
    return SPLITS[max(0, zlib.crc32(name.encode()) % 10 - 7)]


@dataclass(frozen=True)
class Relation:
    """One fact type: `noun` names it in queries, `head` asks for it, `sentence` tells it."""

    noun: str
    subject: str
    object: str
    head: str
    sentence: str


RELATIONS = (
    Relation("birthplace", "person", "city", "In which city was {} born?", "was born in {}"),
    Relation("employer", "person", "company", "Which company does {} work for?", "works for {}"),
    Relation("spouse", "person", "person", "Who is married to {}?", "is married to {}"),
    Relation("mayor", "city", "person", "Who is the mayor of {}?", "has a mayor named {}"),
    Relation("river", "city", "river", "Which river flows through {}?", "lies on the river {}"),
    Relation("country", "city", "country", "In which country is {}?", "belongs to the country {}"),
    Relation("founder", "company", "person", "Who founded {}?", "was founded by {}"),
    Relation("seat", "company", "city", "In which city is {} based?", "is based in {}"),
    Relation("author", "book", "person", "Who wrote {}?", "was written by {}"),
    Relation("setting", "book", "city", "In which city is {} set?", "is set in {}"),
    Relation("source", "river", "country", "In which country does {} rise?", "rises in {}"),
    Relation("port", "river", "city", "In which port does {} end?", "reaches the sea at {}"),
    Relation("capital", "country", "city", "What is the capital of {}?", "has its capital at {}"),
    Relation("ruler", "country", "person", "Who rules {}?", "is ruled by {}"),
)
SHARES = {"person": 0.34, "city": 0.22, "company": 0.16, "book": 0.12, "river": 0.09, "country": 0.07}
TRADES = {
    "person": ("painter", "doctor", "singer", "baker", "pilot", "judge"),
    "city": ("quiet city", "walled city", "busy city"),
    "company": ("maker of ships", "maker of clocks", "maker of glass"),
    "book": ("novel", "book of poems", "mystery"),
    "river": ("slow river", "wild river", "deep river"),
    "country": ("small country", "old country", "cold country"),
}
ALIASES = {
    "city": "the city of {}",
    "company": "{} Company",
    "river": "River {}",
    "book": "the book {}",
    "country": "the country {}",
}
GOSSIP = ("once met", "often writes to", "has a cousin named", "dislikes")


@dataclass(frozen=True)
class Entity:
    name: str
    kind: str
    facts: dict[str, str]  # relation noun -> name of the other entity; "trade" -> what it is


class World:
    """Entities of one split, with facts; a function of its arguments alone.

    Args:
        seed: the world's seed.
        split: names are drawn from this split only.
        size: number of entities.
        distractors: share of people whose passage names an unrelated person too.
    """

    def __init__(self, seed: int = 0, split: str = "train", size: int = 120, distractors: float = 0.5):
        if split not in SPLITS:
            raise ValueError(f"atlas: split {split!r} is unknown; use one of {', '.join(SPLITS)}")
        if not 24 <= size <= NUM_WORDS // 2 - 10:
            raise ValueError(f"atlas: size {size} is out of range; use 24 to {NUM_WORDS // 2 - 10} entities")
        self.rng = random.Random(f"{seed}/{split}/{size}")
        self.seed, self.split = seed, split
        names = self._names(size)
        kinds = [kind for kind, share in SHARES.items() for _ in range(max(2, round(share * size)))]
        kinds = (kinds + ["person"] * size)[:size]
        members: dict[str, list[str]] = {}
        for name, kind in zip(names, kinds, strict=True):
            members.setdefault(kind, []).append(name)
        self.members = members
        self.entities: dict[str, Entity] = {}
        for kind, group in members.items():
            for name in group:
                facts = {"trade": self.rng.choice(TRADES[kind])}
                for relation in RELATIONS:
                    if relation.subject == kind:
                        facts[relation.noun] = self.rng.choice([n for n in members[relation.object] if n != name])
                self.entities[name] = Entity(name, kind, facts)
        self.passages = [(name, self._tell(entity, distractors)) for name, entity in self.entities.items()]
        self.rng.shuffle(self.passages)

    def _names(self, size: int) -> list[str]:
        """Pairs of words whose name belongs to the split; a first word that finds no partner is left out."""
        words = name_words()
        self.rng.shuffle(words)
        names: list[str] = []
        while len(names) < size and words:
            first = words.pop(0)
            partner = next((w for w in words if split_of(f"{first} {w}") == self.split), None)
            if partner is not None:
                words.remove(partner)
                names.append(f"{first} {partner}")
        if len(names) < size:
            raise ValueError(
                f"atlas: seed {self.seed} gives {len(names)} {self.split} names; ask for a smaller world than {size}"
            )
        return names

    def _tell(self, entity: Entity, distractors: float) -> str:
        """The entity's passage: what it is, then its facts in random order."""
        relations = [r for r in RELATIONS if r.subject == entity.kind]
        clauses = [r.sentence.format(entity.facts[r.noun]) for r in relations]
        self.rng.shuffle(clauses)
        text = f"{entity.name} is a {entity.facts['trade']}. It " + " and ".join(clauses) + "."
        if entity.kind == "person":
            text = text.replace(". It ", ". This person ")
            if self.rng.random() < distractors:
                other = self.rng.choice([n for n in self.members["person"] if n != entity.name])
                text += f" {entity.name} {self.rng.choice(GOSSIP)} {other}."
        return text

    def chain(self, start: str, nouns: Sequence[str]) -> list[tuple[str, str, str]]:
        """Follow relations from an entity: ``[(noun, subject, object), ...]``."""
        steps = []
        for noun in nouns:
            steps.append((noun, start, self.entities[start].facts[noun]))
            start = steps[-1][2]
        return steps

    def bridge(self, hops: int, rng: random.Random) -> Task:
        """A question along a chain of `hops` facts; the answer never stands in the question or on the way."""
        while True:
            start = rng.choice(list(self.entities))
            kind, nouns = self.entities[start].kind, []
            for _ in range(hops):
                relation = rng.choice([r for r in RELATIONS if r.subject == kind])
                nouns.append(relation.noun)
                kind = relation.object
            steps = self.chain(start, nouns)
            visited = [start] + [step[2] for step in steps]
            if len(set(visited)) == len(visited):
                break
        inner = start
        for noun in nouns[:-1]:
            inner = f"the {noun} of {inner}"
        question = next(r.head for r in RELATIONS if r.noun == nouns[-1]).format(inner)
        answer = visited[-1]
        alias = ALIASES.get(self.entities[answer].kind)
        golds = (answer, alias.format(answer)) if alias else (answer,)
        return self._task(question, golds, "bridge" if hops > 1 else "single", hops, visited[:-1], {"chain": [steps]})

    def comparison(self, rng: random.Random) -> Task:
        """A yes/no question over the trades of two people, as often true as false.

        A model of a million parameters learns to tell whether two of six trades are equal; whether two names out of
        tens of thousands are, it does not.
        """
        same = rng.random() < 0.5
        people = self.members["person"]
        pairs = [p for p in permutations(people, 2) if same == (len({self.entities[n].facts["trade"] for n in p}) == 1)]
        a, b = rng.choice(pairs)
        steps = [self.chain(name, ["trade"]) for name in (a, b)]
        question = f"Do {a} and {b} have the same trade?"
        return self._task(question, ("yes" if same else "no",), "comparison", 2, [a, b], {"chain": steps})

    def _task(
        self, question: str, golds: tuple[str, ...], kind: str, hops: int, evidence: list[str], info: dict
    ) -> Task:
        identity = f"atlas-{self.split}-{self.seed}-{zlib.crc32(question.encode()):08x}"
        return Task(identity, question, golds, kind, hops, tuple(evidence), info)

    def questions(self, count: int, seed: int = 0, mix: Sequence[float] = (0.25, 0.35, 0.3, 0.1)) -> list[Task]:
        """`count` different questions; `mix` weighs 1 hop, 2 hops, 3 hops and comparisons."""
        rng = random.Random(f"{self.seed}/{self.split}/{seed}/questions")
        makers = [lambda h=h: self.bridge(h, rng) for h in (1, 2, 3)] + [lambda: self.comparison(rng)]
        tasks: dict[str, Task] = {}
        repeats = 0
        while len(tasks) < count:
            task = rng.choices(makers, weights=mix)[0]()
            repeats = repeats + 1 if task.question in tasks else 0
            tasks.setdefault(task.question, task)
            if repeats > 400:
                raise ValueError(
                    f"atlas: a world of {len(self.entities)} entities has fewer than {count} such questions; "
                    "ask for fewer, or for a larger world"
                )
        return list(tasks.values())


def render(passages: Sequence[Passage]) -> str:
    """Numbered lines without titles: a passage's text names its subject first."""
    return "\n".join(f"{number}. {passage.text}" for number, passage in enumerate(passages, 1))


@register("atlas")
def load(
    split: str = "train",
    *,
    count: int = 400,
    seed: int = 0,
    size: int = 120,
    distractors: float = 0.5,
    mix: Sequence[float] = (0.25, 0.35, 0.3, 0.1),
    k: int = 2,
    failing: float = 0.1,
    noisy: float = 0.0,
    max_turns: int = 7,
    max_turn_tokens: int = 64,
    max_response_tokens: int = 900,
    max_tool_tokens: int = 256,
    **options: object,
) -> TaskSet:
    """A world of one split, its questions, and a search tool that fails now and then.

    Args:
        count, seed, size, distractors, mix: see `World` and `World.questions`.
        k: passages a search shows.
        failing, noisy: shares of stochastic failures of the search, see `make_search_tool`.
        max_turns, max_turn_tokens, max_response_tokens, max_tool_tokens, options: go to `ToolEnv`.
    """
    shares = {"distractors": distractors, "failing": failing, "noisy": noisy}
    wholes = {"count": (count, 1), "seed": (seed, 0), "size": (size, 24), "k": (k, 1)}
    for name, (value, least) in wholes.items():
        if type(value) is not int or value < least:
            raise ValueError(f"atlas: {name} is {value!r}; expected a whole number of at least {least}")
    for name, value in shares.items():
        if type(value) not in (int, float) or not 0 <= value <= 1:
            raise ValueError(f"atlas: {name} is {value!r}; expected a share from 0 to 1")
    if not isinstance(mix, list | tuple) or len(mix) != 4 or min(map(float, mix)) < 0 or not sum(map(float, mix)) > 0:
        raise ValueError(f"atlas: mix is {mix!r}; expected four weights: 1 hop, 2 hops, 3 hops, comparisons")
    world = World(seed, split, size, distractors)
    index = BM25([Passage(title, text) for title, text in world.passages])
    tool = make_search_tool(index, k=k, failing=failing, noisy=noisy, render=render)
    limits = {"max_turns": max_turns, "max_turn_tokens": max_turn_tokens}
    limits |= {"max_response_tokens": max_response_tokens, "max_tool_tokens": max_tool_tokens}
    env = ToolEnv([tool], **{"system_prompt": SYSTEM_PROMPT, **limits, **options})
    return TaskSet("atlas", split, world.questions(count, seed, mix), env, index, read_prompt=READ_PROMPT)
