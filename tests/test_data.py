"""The shipped files are what the package makes, and small."""

import pytest

from agentr1_lite.evaluation import evaluate
from agentr1_lite.loading import data_root
from agentr1_lite.policy import QwenPolicy
from agentr1_lite.tasks import build, load_task
from agentr1_lite.tasks.atlas import name_words


@pytest.fixture(scope="module")
def policy():
    return QwenPolicy("atlas-tiny")


@pytest.mark.parametrize("maker", ["worlds", "demonstrations", "offline-logs"])
def test_a_command_remakes_the_files_byte_for_byte(maker, tmp_path):
    for path in build.MAKERS[maker](tmp_path):
        assert path.read_bytes() == (data_root() / path.relative_to(tmp_path)).read_bytes(), path.name


def test_all_of_it_is_under_12_mb():
    assert sum(path.stat().st_size for path in data_root().rglob("*") if path.is_file()) < 12e6


def test_every_name_word_is_one_token(policy):
    for word in name_words():
        for form in (word, f" {word}"):
            assert len(policy.tokenizer.encode(form, add_special_tokens=False)) == 1, form


def test_the_tokenizer_has_qwens_control_tokens(policy):
    for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"):
        assert len(policy.tokenizer.encode(text, add_special_tokens=False)) == 1, text


# 0.280 and 0.935 over 200 dev questions where they were made; the bounds are 95 % of 100 questions around these
@pytest.mark.parametrize(("name", "low", "high"), [("atlas-tiny", 0.19, 0.37), ("atlas-agent", 0.88, 1.0)])
def test_the_shipped_policies_score_what_they_scored(name, low, high):
    assert low <= evaluate(QwenPolicy(name), load_task("atlas", "dev", count=100)).mean() <= high
