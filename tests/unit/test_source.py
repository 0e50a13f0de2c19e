"""The prompt source: exact epochs, one ledger, identities that survive everything."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from activities.rollout.source import PromptSource
from models.errors import ConfigurationError, ContractViolation
from models.prompt import DataState, PreparedPrompt, PromptDraw, PromptMetadata
from models.sample import FinishReason, Sample, SampleGroup, TokenSpan

SHA = "c" * 64


def prompts(count):
    return [
        PreparedPrompt(
            input=str(row),
            label="",
            prompt_token_ids=(1,),
            metadata=PromptMetadata(
                prepared_sample_id=f"t:train:{row}",
                source_dataset="t",
                source_row=row,
                query=str(row),
                verifiers=(),
                run_prompt_tokens=1,
                run_prompt_token_ids_sha256="",
            ),
        )
        for row in range(count)
    ]


def source(count, state=None, shuffle=True, seed=17, train_sha256=SHA):
    return PromptSource(
        prompts(count),
        seed=seed,
        shuffle=shuffle,
        samples_per_prompt=2,
        train_sha256=train_sha256,
        state=state,
    )


def rows(draws):
    return [draw.row for draw in draws]


def indices(draws):
    return [draw.group_index for draw in draws]


def test_order_is_a_permutation_seeded_by_seed_and_epoch():
    drawn = source(10).draw(20)
    for epoch in (0, 1):
        order = list(range(10))
        random.Random(f"17:epoch:{epoch}").shuffle(order)
        assert rows(drawn)[10 * epoch : 10 * epoch + 10] == order
    assert [draw.epoch_id for draw in drawn] == [0] * 10 + [1] * 10
    assert indices(drawn) == [*range(20)]
    assert [draw.first_sample_index for draw in drawn] == [*range(0, 40, 2)]
    assert rows(source(10, seed=18).draw(10)) != rows(drawn[:10])


def test_without_shuffle_rows_come_in_file_order():
    assert rows(source(3, shuffle=False).draw(7)) == [0, 1, 2, 0, 1, 2, 0]


def test_a_data_set_smaller_than_a_batch_spans_epochs():
    drawn = source(2).draw(5)
    assert [draw.epoch_id for draw in drawn] == [0, 0, 1, 1, 2]
    for epoch in (0, 1):
        assert sorted(rows(drawn[2 * epoch : 2 * epoch + 2])) == [0, 1]


def test_one_row_is_drawn_for_ever():
    assert rows(source(1).draw(4)) == [0, 0, 0, 0]


def test_resume_at_the_exact_end_of_an_epoch_goes_on_with_the_next():
    first = source(4)
    first.assign(0, indices(first.draw(4)))
    state = first.snapshot(0)
    assert (state.sample_offset, state.epoch_id, state.pending) == (4, 0, ())
    assert rows(source(4, state).draw(4)) == rows(first.draw(4))


def test_pending_holds_everything_drawn_and_not_consumed():
    # Of four groups, one is dropped, one trained, one generating, one finished.
    ledger = source(8, shuffle=False)
    drawn = ledger.draw(4)
    ledger.assign(0, [drawn[1].group_index, drawn[0].group_index])
    ledger.assign(1, [drawn[3].group_index])
    state = ledger.snapshot(0)
    assert state.sample_offset == 4
    assert state.train_sha256 == SHA
    assert indices(state.pending) == [2, 3]
    resumed = source(8, state, shuffle=False)
    again = resumed.draw(3)
    assert rows(again) == [2, 3, 4]
    assert [draw.first_sample_index for draw in again] == [4, 6, 8]
    assert indices(ledger.snapshot(-1).pending) == [0, 1, 2, 3]


def test_requeue_goes_to_the_front_in_order_with_the_same_identity():
    ledger = source(8, shuffle=False)
    drawn = ledger.draw(4)
    ledger.requeue([2, 0])
    again = ledger.draw(3)
    assert indices(again) == [2, 0, 4]
    assert [draw.requeues for draw in again] == [1, 1, 0]
    assert again[1].model_copy(update={"requeues": 0}) == drawn[0]


def test_requeueing_a_waiting_group_moves_it_and_never_doubles_it():
    ledger = source(8, shuffle=False)
    ledger.draw(3)
    ledger.requeue([0, 1])
    ledger.requeue([1])
    assert indices(ledger.draw(4)) == [1, 0, 3, 4]


@pytest.mark.parametrize("group_index", [5, -1])
def test_an_unknown_identity_is_an_error(group_index):
    ledger = source(8)
    ledger.draw(2)
    for call in (
        lambda: ledger.requeue([group_index]),
        lambda: ledger.assign(0, [group_index]),
    ):
        with pytest.raises(ContractViolation, match=str(group_index)):
            call()


def test_a_group_joins_one_collection_only():
    ledger = source(8)
    ledger.draw(2)
    ledger.assign(0, [0])
    with pytest.raises(ContractViolation, match="is in collection 0"):
        ledger.assign(1, [0])
    ledger.requeue([1])
    with pytest.raises(ContractViolation, match="waits"):
        ledger.assign(1, [1])


def test_forgetting_drops_trained_groups():
    ledger = source(8)
    ledger.draw(2)
    ledger.assign(0, [0])
    ledger.assign(1, [1])
    ledger.forget(0)
    assert indices(ledger.snapshot(-1).pending) == [1]
    with pytest.raises(ContractViolation, match="never handed out, or done"):
        ledger.requeue([0])


def test_collections_of_a_dead_epoch_are_taken_apart():
    ledger = source(8, shuffle=False)
    ledger.draw(3)
    for update in range(3):
        ledger.assign(update, [update])
    ledger.give_back_from(1)
    again = ledger.draw(3)
    assert indices(again) == [1, 2, 3]
    assert [draw.requeues for draw in again] == [0, 0, 0]


def test_a_stale_group_goes_back_with_its_own_count():
    ledger = source(8, shuffle=False)
    ledger.draw(2)
    ledger.requeue([1, 0], failed=False, stale=True)
    ledger.requeue([1], failed=False, stale=True)
    again = ledger.draw(2)
    assert [(draw.group_index, draw.requeues, draw.stale) for draw in again] == [
        (1, 0, 2),
        (0, 0, 1),
    ]
    assert ledger.most_stale == 2
    ledger.assign(0, [1])
    assert ledger.most_stale == 2  # consumed, not trained yet
    ledger.forget(0)
    assert ledger.most_stale == 1
    assert source(8, ledger.snapshot(0), shuffle=False).draw(1)[0].stale == 1


def test_groups_of_a_collection_that_failed_stay_handed_out():
    ledger = source(8, shuffle=False)
    drawn = ledger.draw(3)
    ledger.assign(0, [0, 2])
    ledger.release([0, 2])
    assert indices(ledger.snapshot(0).pending) == [0, 1, 2]
    assert indices(ledger.draw(1)) == [3]
    ledger.assign(0, [0, 2])
    ledger.release([drawn[0].group_index])
    assert indices(ledger.snapshot(0).pending) == [0, 1, 3]


def test_a_snapshot_counts_what_generates_and_what_waits_for_the_trainer():
    """Three groups taken; the first is trained, one generates, one is finished and not consumed."""
    ledger = source(8, shuffle=False)
    first, generating, completed = ledger.draw(3)
    ledger.assign(0, [first.group_index])
    state = ledger.snapshot(0)
    assert state.sample_offset == 3
    assert list(state.pending) == [generating, completed]
    assert rows(state.pending) == [1, 2]
    resumed = source(8, DataState.model_validate_json(state.model_dump_json()), shuffle=False)
    again = resumed.draw(3)
    assert rows(again) == [1, 2, 3]
    sample_indices = [draw.first_sample_index + each for draw in again for each in (0, 1)]
    assert sample_indices == [2, 3, 4, 5, 6, 7]


def test_nothing_is_handed_out_while_a_snapshot_is_taken(monkeypatch):
    ledger = source(8, shuffle=False)
    ledger.draw(2)
    inside, go_on, drawn = threading.Event(), threading.Event(), threading.Event()
    in_order = PromptSource._in_order

    def held(self):
        inside.set()
        assert go_on.wait(20)
        return in_order(self)

    monkeypatch.setattr(PromptSource, "_in_order", held)
    with ThreadPoolExecutor(2) as pool:
        snapshot = pool.submit(ledger.snapshot, -1)
        assert inside.wait(20)
        draws = pool.submit(lambda: (ledger.draw(1), drawn.set())[0])
        assert not drawn.wait(0.2)
        go_on.set()
        assert indices(snapshot.result(20).pending) == [0, 1]
        assert indices(draws.result(20)) == [2]
    assert snapshot.result().sample_group_index == 2  # what came later is not in it


def test_adopting_undoes_what_was_drawn_since():
    maker = source(6, shuffle=False)
    drawn = maker.draw(2)
    maker.assign(0, indices(drawn))
    after = maker.snapshot(0)
    maker.assign(1, indices(maker.draw(2)))  # of an epoch that is over
    maker.draw(1)
    maker.adopt(0, [group_of(draw) for draw in drawn], after)
    assert maker.snapshot(0) == after
    assert indices(maker.draw(3)) == [2, 3, 4]


def test_adopting_a_collection_keeps_its_groups_until_they_are_trained():
    maker = source(6)
    drawn = maker.draw(3)
    maker.assign(0, indices(drawn))
    after = maker.snapshot(0)
    heir = source(6)
    heir.adopt(0, [group_of(draw) for draw in drawn[:2]], after, drawn[2:])
    assert heir.snapshot(-1) == maker.snapshot(-1)
    assert heir.draw(2) == maker.draw(2)


def group_of(draw: PromptDraw) -> SampleGroup:
    sample = Sample(
        sample_index=draw.first_sample_index,
        group_index=draw.group_index,
        prompt_token_ids=[1],
        response_token_ids=[2],
        logprobs=[-1.0],
        spans=[TokenSpan(0, 0, 1)],
        finish_reason=FinishReason.STOP,
    )
    return SampleGroup(draw.group_index, draw.prepared_sample_id, draw.epoch_id, [sample])


def test_another_training_file_is_refused_with_both_digests():
    state = source(4).snapshot(-1)
    with pytest.raises(ConfigurationError) as caught:
        source(4, state, train_sha256="d" * 64)
    assert SHA in str(caught.value)
    assert "d" * 64 in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sample_offset": 9}, "outside the 8 prompts"),
        ({"sample_offset": -1}, "outside the 8 prompts"),
        ({"sample_group_index": 1}, "1 groups were handed out"),
    ],
)
def test_a_broken_position_is_refused(change, message):
    ledger = source(8)
    ledger.draw(2)
    state = ledger.snapshot(-1).model_copy(update=change)
    with pytest.raises(ContractViolation, match=message):
        source(8, state)


def test_a_ledger_of_other_rows_is_refused():
    ledger = source(8)
    draw = ledger.draw(1)[0]
    wrong = draw.model_copy(update={"prepared_sample_id": "other:train:0"})
    state = ledger.snapshot(-1)
    with pytest.raises(ContractViolation, match="other:train:0"):
        source(8, state.model_copy(update={"pending": (wrong,)}))
    with pytest.raises(ContractViolation, match="at row 8"):
        source(8, state.model_copy(update={"pending": (draw.model_copy(update={"row": 8}),)}))
    with pytest.raises(ContractViolation, match="twice"):
        source(8, state.model_copy(update={"pending": (draw, draw)}))


def test_no_prompts_are_refused():
    with pytest.raises(ConfigurationError, match="no prompts"):
        source(0, DataState())
