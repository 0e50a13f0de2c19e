"""The tiny model: sizes, tokenizer, warm-up to an accuracy."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from activities.storage.store import Store
from configs.model import TinySpec
from models.errors import ConfigurationError
from workers.sources.characters import BOS_ID, EOS_ID, character_tokenizer
from workers.sources.model import prepare_model
from workers.sources.tasks import Question
from workers.sources.tiny import make_tiny_model

SMALL = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}


def copies(count: int) -> list[Question]:
    """A task that a one-layer model learns in seconds: say the letter again."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    return [Question(f"{letters[i % 26]}=", letters[i % 26], str(i)) for i in range(count)]


def test_every_printable_character_is_one_token_and_back():
    tokenizer = character_tokenizer()
    text = "".join(map(chr, range(32, 127))) + "\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode("é", add_special_tokens=False) == [tokenizer.unk_token_id]
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "ab="}], tokenize=False, add_generation_prompt=True
    )
    assert rendered == "<bos>ab="
    assert tokenizer.encode(rendered, add_special_tokens=False)[0] == BOS_ID


def test_the_default_is_a_million_parameters(tmp_path):
    report = make_tiny_model(tmp_path, TinySpec(warmup_accuracy=0), [])
    # embedding, then a layer: q and o, k and v, gate/up/down, two norms and two head norms
    layer = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 512 + 2 * 128 + 2 * 32
    assert report.num_parameters == 100 * 128 + 4 * layer + 128
    assert (report.batches, report.accuracy) == (0, 0.0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert sum(p.numel() for p in model.parameters()) == report.num_parameters
    assert model.generation_config.eos_token_id == EOS_ID
    assert AutoTokenizer.from_pretrained(tmp_path).eos_token_id == EOS_ID


def test_sizes_of_a_published_model_can_be_asked_for(tmp_path):
    sizes = {"hidden_size": 32, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2}
    others = {"head_dim": 16, "intermediate_size": 48, "vocab_size": 300, "max_positions": 64}
    report = make_tiny_model(tmp_path, TinySpec(**sizes, **others, warmup_accuracy=0), [])
    # q and o of 32 x 64, k and v of 32 x 32, three of 32 x 48, norms of layer, heads and stack
    layer = 2 * 32 * 64 + 2 * 32 * 32 + 3 * 32 * 48 + 2 * 32 + 2 * 16
    assert report.num_parameters == 300 * 32 + layer + 32
    config = AutoModelForCausalLM.from_pretrained(tmp_path).config
    assert (config.head_dim, config.max_position_embeddings) == (16, 64)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == 300
    # every id has a text of its own, and text never becomes such an id
    assert tokenizer.decode([299, 100]) == " 299 100"
    assert max(tokenizer.encode(" 299 100", add_special_tokens=False)) < 100


def test_the_warm_up_stops_at_the_accuracy_and_it_is_real(tmp_path):
    tiny = TinySpec(**SMALL, warmup_accuracy=0.5, warmup_learning_rate=1e-2)
    report = make_tiny_model(tmp_path, tiny, copies(1000))
    assert report.accuracy >= 0.5
    assert 20 <= report.batches < 200
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    right = 0
    for letter in "abcdefghijklmnopqrstuvwxyz":
        ids = torch.tensor([[BOS_ID, *tokenizer.encode(f"{letter}=", add_special_tokens=False)]])
        first = int(model(input_ids=ids).logits[0, -1].argmax())
        right += tokenizer.decode([first]) == letter
    assert right >= 13


def test_the_same_seed_makes_the_same_model_and_leaves_the_global_one(tmp_path):
    tiny = TinySpec(**SMALL, warmup_accuracy=0.05, warmup_learning_rate=1e-2)
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        make_tiny_model(tmp_path / name, tiny, copies(300))
    assert torch.equal(torch.rand(1), expected)
    left, right = ((tmp_path / n / "model.safetensors").read_bytes() for n in ("a", "b"))
    assert left == right


def test_an_accuracy_out_of_reach_is_an_error(tmp_path):
    tiny = TinySpec(**SMALL, warmup_accuracy=0.9, warmup_max_batches=20)
    with pytest.raises(ConfigurationError, match="after 20 batches"):
        make_tiny_model(tmp_path, tiny, copies(300))


def test_a_warm_up_needs_answers(tmp_path):
    with pytest.raises(ConfigurationError, match="one right answer"):
        make_tiny_model(tmp_path, TinySpec(**SMALL), [Question("a=", "", "a")])


@pytest.mark.parametrize("sizes", [{"hidden_size": 33}, {"num_heads": 4, "num_kv_heads": 3}])
def test_sizes_that_do_not_fit_are_refused(tmp_path, sizes):
    tiny = TinySpec(**{**SMALL, **sizes}, warmup_accuracy=0)
    with pytest.raises(ConfigurationError, match="must be a multiple"):
        make_tiny_model(tmp_path, tiny, [])


def test_prepare_warms_up_on_training_questions_of_the_first_task(make_spec, tmp_path, monkeypatch):
    seen: list[Question] = []

    def spy(stage, tiny, questions):
        seen.extend(questions)
        return make_tiny_model(stage, tiny.model_copy(update={"warmup_accuracy": 0.0}), questions)

    monkeypatch.setattr("workers.sources.tiny.make_tiny_model", spy)
    task = {"task": "reverse_word", "train_count": 8, "eval_count": 64, "params": {"letters": 2}}
    spec = make_spec(
        data={"tasks": (task,), "prompt_data": None},
        model={"source": "tiny", "tiny": {**SMALL, "warmup_max_batches": 20}},
    )
    prepared = prepare_model(spec, Store(tmp_path / "root"))
    assert (prepared.vocab_size, prepared.eos_token_ids) == (100, (EOS_ID,))
    from workers.sources.tasks import generate_questions

    held_out = {q.key for q in generate_questions(spec.data.tasks[0], spec.data.seed).held_out}
    assert len(seen) == 64 * 20 + 256
    assert not held_out & {q.key for q in seen}
    other = make_spec(
        data={"tasks": (task,), "prompt_data": None},
        model={"source": "tiny", "tiny": {**SMALL, "warmup_max_batches": 21}},
    )
    Store(tmp_path / "root").write_json("rollouts/0000000.e1.json", {})
    with pytest.raises(ConfigurationError, match="warmup_max_batches"):
        prepare_model(other, Store(tmp_path / "root"))
