"""Whatever happens in whatever order, no prompt draw is lost and none is trained twice."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from activities.rollout.source import PromptSource
from models.prompt import PreparedPrompt, PromptMetadata

SHA = "a" * 64
COUNT = 5


def make_source(state=None):
    prompts = [
        PreparedPrompt(
            input="",
            label="",
            prompt_token_ids=(1,),
            metadata=PromptMetadata(
                prepared_sample_id=f"p{row}",
                source_dataset="t",
                source_row=row,
                query="",
                verifiers=(),
                run_prompt_tokens=1,
                run_prompt_token_ids_sha256="",
            ),
        )
        for row in range(COUNT)
    ]
    return PromptSource(
        prompts, seed=3, shuffle=True, samples_per_prompt=4, train_sha256=SHA, state=state
    )


class Ledger(RuleBasedStateMachine):
    """The model: each group index is out, in a collection, or done (trained or dropped)."""

    def __init__(self):
        super().__init__()
        self.source = make_source()
        reference = make_source()
        self.expected = {draw.group_index: draw for draw in reference.draw(400)}
        self.owed: set[int] = set()  # handed out at least once, not done
        self.out: set[int] = set()  # handed out now
        self.done: set[int] = set()
        self.update = 0

    def take(self, draw):
        expected = self.expected[draw.group_index]
        assert draw.model_copy(update={"requeues": 0}) == expected
        assert draw.group_index not in self.out
        assert draw.group_index not in self.done
        self.owed.add(draw.group_index)
        self.out.add(draw.group_index)

    @rule(count=st.integers(1, 4))
    def draw(self, count):
        if max(self.owed | self.done, default=0) < 380:
            for draw in self.source.draw(count):
                self.take(draw)

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def requeue(self, data):
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.out)), unique=True, min_size=1))
        self.source.requeue(chosen)
        self.out -= set(chosen)

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def train(self, data):
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.out)), unique=True, min_size=1))
        self.source.assign(self.update, chosen)
        assert {draw.group_index for draw in self.source.snapshot(self.update).pending} == (
            self.owed - set(chosen)
        )
        self.source.forget(self.update)
        self.update += 1
        self.out -= set(chosen)
        self.owed -= set(chosen)
        self.done |= set(chosen)

    @rule()
    def kill_and_resume(self):
        state = self.source.snapshot(self.update - 1)
        assert [draw.group_index for draw in state.pending] == sorted(self.owed)
        self.source = make_source(type(state).model_validate_json(state.model_dump_json()))
        self.out.clear()

    @invariant()
    def snapshot_names_exactly_what_is_owed(self):
        pending = self.source.snapshot(self.update - 1).pending
        assert [draw.group_index for draw in pending] == sorted(self.owed)
        handed_out = self.owed | self.done
        assert handed_out == set(range(len(handed_out)))


Ledger.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLedger = Ledger.TestCase
