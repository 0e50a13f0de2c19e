"""The trainer learns: a tiny model gets better at reversing words by reward alone."""

import random

import pytest
import torch
from transformers import GenerationConfig

from activities.rollout.advantages import group_advantages
from configs.data import TaskSpec
from configs.model import TinySpec
from models.sample import FinishReason, Sample, SampleGroup, TokenSpan
from workers.sources.characters import BOS_ID, EOS_ID, PAD_ID, character_tokenizer
from workers.sources.tasks import generate_questions
from workers.sources.tiny import make_tiny_model, questions_needed
from workers.trainers.local import LocalTrainer

LETTERS, GROUPS, SIZE, UPDATES = 2, 16, 8, 60
TINY = TinySpec(hidden_size=64, num_layers=2, warmup_accuracy=0.1, warmup_learning_rate=3e-3)


def respond(model, prompts: list[list[int]]) -> list[list[int]]:
    """One sampled response a prompt (all prompts have one length), stop token included."""
    ids = torch.tensor(prompts)
    settings = GenerationConfig(
        do_sample=True,
        top_k=0,
        max_new_tokens=LETTERS + 2,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    output = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=settings
    )
    responses = []
    for row in output[:, ids.shape[1] :].tolist():
        end = row.index(EOS_ID) + 1 if EOS_ID in row else len(row)
        responses.append(row[:end])
    return responses


def behavior_logprobs(model, prompts: list[list[int]], responses: list[list[int]]):
    """Log-probs of each response, in one forward padded on the right."""
    width = max(len(p) + len(r) for p, r in zip(prompts, responses, strict=True))
    rows = [
        [*p, *r, *[PAD_ID] * (width - len(p) - len(r))]
        for p, r in zip(prompts, responses, strict=True)
    ]
    with torch.no_grad():
        log_p = torch.log_softmax(model(input_ids=torch.tensor(rows)).logits, -1)
    return [
        log_p[i, torch.arange(len(p) - 1, len(p) + len(r) - 1), r].tolist()
        for i, (p, r) in enumerate(zip(prompts, responses, strict=True))
    ]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_reward_alone_raises_the_accuracy(make_spec, tmp_path):
    task = TaskSpec(
        task="reverse_word", train_count=400, eval_count=128, params={"letters": LETTERS}
    )
    questions = generate_questions(task, 17, train_count=questions_needed(TINY))
    make_tiny_model(tmp_path, TINY, questions.train)
    spec = make_spec(
        training={
            "num_rollouts": UPDATES,
            "rollout_batch_size": GROUPS,
            "samples_per_prompt": SIZE,
            "global_batch_size": GROUPS * SIZE // 2,
            "loss_aggregation": "token",
        },
        optimizer={"learning_rate": 2e-3, "lr_warmup_steps": 10},
    )
    trainer = LocalTrainer(spec, tmp_path)
    tokenizer = character_tokenizer()
    rng = random.Random(0)

    def encode(text: str) -> list[int]:
        return [BOS_ID, *tokenizer.encode(text, add_special_tokens=False)]

    def accuracy() -> float:
        torch.manual_seed(0)
        prompts = [encode(q.question) for q in questions.held_out]
        texts = [tokenizer.decode(r[:-1]) for r in respond(trainer.model, prompts)]
        return sum(t == q.answer for t, q in zip(texts, questions.held_out, strict=True)) / len(
            texts
        )

    start = accuracy()
    for update in range(UPDATES):
        torch.manual_seed(1000 + update)
        groups = []
        drawn = rng.sample(questions.train, GROUPS)
        prompts = [encode(q.question) for q in drawn for _ in range(SIZE)]
        responses = respond(trainer.model, prompts)
        logprobs = behavior_logprobs(trainer.model, prompts, responses)
        for g, question in enumerate(drawn):
            samples = [
                Sample(
                    sample_index=s,
                    group_index=g,
                    prompt_token_ids=prompts[s],
                    response_token_ids=responses[s],
                    logprobs=logprobs[s],
                    spans=[TokenSpan(trainer.policy_version, 0, len(responses[s]))],
                    finish_reason=FinishReason.STOP,
                    reward=float(tokenizer.decode(responses[s][:-1]) == question.answer),
                )
                for s in range(g * SIZE, (g + 1) * SIZE)
            ]
            rewards = [sample.reward for sample in samples]
            groups.append(SampleGroup(g, str(g), 0, samples, group_advantages(rewards, False)))
        trainer.optimize(update, str(update), groups)
    assert accuracy() >= start + 0.3
