"""A trainer of two ranks beside the trainer in one process: updates, files, exports."""

import hashlib

import numpy
import pytest
from part_cases import raw_parts
from rank_cases import Job, live
from routed_groups import routed

from activities.storage import layout
from activities.storage.store import Store
from configs.run import RunSpec
from models.checkpoint import PolicyClock
from models.errors import ContractViolation, NonFiniteLoss
from models.sample import TokenSpan
from workers.trainers.ranks import SingleRank

pytestmark = pytest.mark.timeout(200)  # processes start for the first test

# Adam's first step is almost the gradient's sign, which rounding can flip where it is tiny; a large
# epsilon makes the step proportional to the gradient, so that steps can be compared.
SMOOTH = {"learning_rate": 1e-2, "adam_eps": 0.1}
SAME_ON_EVERY_RANK = (
    "train/loss",
    "train/grad_norm",
    "train/parameter_change",
    "train/entropy_loss",
    "train/ppo_kl",
    "train/ess_ratio",
    "train/train_rollout_logprob_abs_diff",
    "train/active_response_tokens",
)


def alone(job: Job, **changes):
    """What the trainer in one process makes of the same job, under a root of its own."""
    return live(SingleRank(), Job(**{**vars(job), "spec": root_alone(job.spec), **changes}))


def root_alone(spec: RunSpec) -> RunSpec:
    output = spec.output.model_copy(update={"root": f"{spec.output.root}-alone"})
    return spec.model_copy(update={"output": output})


def near(found, expected, tolerance=1e-5):
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert abs(found[name] - values).max() <= tolerance, name


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert numpy.array_equal(found[name], values), name


def events(spec, rank, name):
    rows, _ = Store(spec.output.root).read_jsonl(layout.training_contract(rank))
    return [row for row in rows if row["event"] == name]


@pytest.mark.parametrize(
    ("folder", "sections"),
    [
        ("model", {"training": {"loss_aggregation": "token", "global_batch_size": 4}}),
        ("model", {"trainer": {"micro_batch_tokens": 16, "logprob_chunk_tokens": 16}}),
        ("model", {"training": {"kl_loss_coef": 0.1, "entropy_coef": 0.01}}),
        ("model", {"trainer": {"packing": "documents", "micro_batch_tokens": 32}}),
        (
            "model",
            {
                "trainer": {
                    "packing": "documents",
                    "micro_batch_tokens": 32,
                    "activation_checkpointing": True,
                }
            },
        ),
        ("mixture", {"training": {"global_batch_size": 4, "loss_aggregation": "token"}}),
    ],
)
def test_three_updates_equal_those_of_one_process(
    two_ranks, make_spec, make_groups, model_dir, mixture_dir, folder, sections
):
    spec = make_spec(optimizer=SMOOTH, **sections)
    # the second group of the second update ties: the second rank has nothing to compute
    tied = [[0.75, -0.25, -0.25, -0.25], [0.0] * 4]
    updates = [(u, make_groups(u, advantages=tied if u == 1 else None)) for u in range(3)]
    job = Job(spec, {"model": model_dir, "mixture": mixture_dir}[folder], updates=updates)

    single = alone(job)
    both = two_ranks.run(live, job)

    for rank in both:
        near(rank.parameters, single.parameters)
        near(rank.moments, single.moments)
        for ours, theirs in zip(rank.reports, single.reports, strict=True):
            assert ours.policy_version == theirs.policy_version
            for key in SAME_ON_EVERY_RANK:
                assert ours.metrics[key] == pytest.approx(theirs.metrics[key], rel=1e-4, abs=1e-6)
        assert rank.reports[0].seconds == both[0].reports[0].seconds > 0  # of the slowest rank
    same(both[0].parameters, both[1].parameters)
    elements = sum(values.size for values in single.parameters.values())
    assert both[0].local_elements + both[1].local_elements == elements
    assert both[1].local_elements < 0.55 * elements
    for rank in (0, 1):
        steps = events(spec, rank, "optimizer")
        assert [row["step"] for row in steps] == list(
            range(1, single.reports[-1].policy_version + 1)
        )
        assert {row["rank"] for row in steps} == {rank}
        assert {row["normalization"]["world_size"] for row in steps} == {2}
        # a prompt with samples on both ranks is computed by both
        apart = {"world_size": 1, "model_tokens": 0}
        counts = [row["normalization"] | apart for row in steps]
        theirs = events(root_alone(spec), 0, "optimizer")
        assert counts == [row["normalization"] | apart for row in theirs]


def test_router_load_of_two_ranks_is_that_of_one(two_ranks, make_spec, make_groups, mixture_dir):
    job = Job(make_spec(optimizer=SMOOTH), mixture_dir, updates=[(0, make_groups())])
    (single,) = alone(job).reports
    for outcome in two_ranks.run(live, job):
        for key, value in single.metrics.items():
            if key.startswith("train/moe/") and "replica" not in key:
                assert outcome.reports[0].metrics[key] == value, key


@pytest.mark.parametrize("tied", [False, True])
def test_routes_are_replayed_on_every_rank(two_ranks, make_spec, make_groups, mixture_dir, tied):
    """Also a group that ties: the load of routers is of every sample."""
    spec = make_spec(
        optimizer=SMOOTH,
        training={"use_rollout_routing_replay": True},
        core={"replay_diagnostics": True, "scoring_pass_required": True},
        trainer={"micro_batch_tokens": 16},
    )
    advantages = [[0.75, -0.25, -0.25, -0.25], [0.0] * 4 if tied else [0.5, -0.5, 0.5, -0.5]]
    groups = routed(make_groups(advantages=advantages), mixture_dir)
    job = Job(spec, mixture_dir, updates=[(0, groups)])
    single, both = alone(job), two_ranks.run(live, job)
    near(both[1].parameters, single.parameters)
    steps = [events(spec, rank, "optimizer")[0] for rank in range(2)]
    packs = [events(spec, rank, "packing")[0]["packs"] for rank in range(2)]
    assert [step["local_microbatches"] for step in steps] == [max(packs)] * 2
    assert min(packs) > 0
    tokens = 0
    for rank in range(2):
        scoring, training = events(spec, rank, "replay_routes")
        assert (scoring["phase"], training["phase"]) == ("scoring", "training")
        for row in (scoring, training):
            assert (row["mismatches"], row["samples"]) == (0, 4)
            assert {layer["entered"] for layer in row["layers"].values()} == {packs[rank]}
        tokens += training["tokens"]
    assert tokens == steps[0]["normalization"]["model_tokens"]


def test_refresh_scores_of_two_ranks_add_up_to_those_of_one(
    two_ranks, make_spec, make_groups, model_dir
):
    """Responses that versions 0 and 1 made; all of the second rank's group, none of the first's."""
    spec = make_spec(optimizer=SMOOTH, core={"publication_mode": "refresh", "max_policy_lag": 8})
    mixed = make_groups(1)
    for sample in mixed[1].samples:
        length = len(sample.response_token_ids)
        sample.spans = [TokenSpan(0, 0, length // 2), TokenSpan(1, length // 2, length)]
    job = Job(spec, model_dir, updates=[(0, make_groups()), (1, mixed)])
    single, both = alone(job), two_ranks.run(live, job)
    expected = events(root_alone(spec), 0, "refresh_scores")[1]
    assert expected["historical_prefix"]["tokens"] == 2 + 3 + 3 + 4
    assert expected["mixed_responses"] == 4
    own = [events(spec, rank, "refresh_scores")[1] for rank in range(2)]
    assert [event["mixed_responses"] for event in own] == [0, 4]
    assert "historical_prefix" not in own[0]
    assert own[1]["historical_prefix"] == pytest.approx(expected["historical_prefix"], rel=1e-4)
    for name in ("active_tokens", "response_count"):
        assert sum(event[name] for event in own) == expected[name]
    parts = [event["latest_forward"] for event in own]
    assert max(part["max_abs_logratio"] for part in parts) == pytest.approx(
        expected["latest_forward"]["max_abs_logratio"], rel=1e-4
    )
    for name in ("mean_abs_logratio", "tis_clip_fraction"):
        total = sum(part[name] * part["tokens"] for part in parts)
        whole = expected["latest_forward"]
        assert total == pytest.approx(whole[name] * whole["tokens"], rel=1e-4)
    for rank in range(2):
        for key, value in single.reports[1].metrics.items():
            if key.startswith("train/refresh/"):
                assert both[rank].reports[1].metrics[key] == pytest.approx(value, rel=1e-4), key


def test_bfloat16_steps_are_near_those_of_one_process(two_ranks, make_spec, make_groups, model_dir):
    """Blocks are rounded to bfloat16 before they are gathered instead of after."""
    spec = make_spec(optimizer=SMOOTH, trainer={"compute_dtype": "bfloat16"})
    job = Job(spec, model_dir, updates=[(0, make_groups())])
    single, both = alone(job), two_ranks.run(live, job)
    assert both[0].reports[0].metrics["train/grad_norm"] == pytest.approx(
        single.reports[0].metrics["train/grad_norm"], rel=2e-2
    )
    near(both[0].parameters, single.parameters, 1e-3)


def test_exports_have_the_digest_of_one_process(two_ranks, make_spec, mixture_dir, tmp_path):
    job = Job(
        make_spec(inference={"dtype": "bfloat16"}),
        mixture_dir,
        export=tmp_path / "two",
        copy=tmp_path / "two-copied",
        export_model=tmp_path / "two-hf",
    )
    single = alone(
        job,
        export=tmp_path / "one",
        copy=tmp_path / "one-copied",
        export_model=tmp_path / "one-hf",
    )
    both = two_ranks.run(live, job)
    for outcome in both:
        assert outcome.exported.digest == single.exported.digest
        assert outcome.exported.path == str(tmp_path / "two")
        assert outcome.model.answer == single.model.answer
        assert outcome.model.max_abs_logit_difference <= 1e-5
    for one, two in (
        ("one", "two"),
        ("one", "one-copied"),
        ("one", "two-copied"),
        ("one-hf", "two-hf"),
    ):
        left = (tmp_path / one / "model.safetensors").read_bytes()
        assert left == (tmp_path / two / "model.safetensors").read_bytes()


@pytest.mark.parametrize(("writers", "readers"), [(2, 1), (1, 2), (2, 2)])
def test_a_checkpoint_is_restored_by_any_number_of_ranks(
    two_ranks, make_spec, make_groups, mixture_dir, tmp_path, writers, readers
):
    """The mixture's five experts are cut unevenly, three and two."""

    def on(count, job):
        return two_ranks.run(live, job) if count == 2 else [live(SingleRank(), job)]

    spec = make_spec(training={"global_batch_size": 4}, optimizer={"lr_schedule": "cosine"})
    first = Job(
        spec, mixture_dir, updates=[(u, make_groups(u)) for u in range(2)], save=tmp_path / "saved"
    )
    before = on(writers, first)
    clock = PolicyClock(completed_steps=4, published_step=-1, next_rollout_id=2)
    restored = on(readers, Job(spec, mixture_dir, load=(tmp_path / "saved", clock)))
    for outcome in restored:
        same(outcome.parameters, before[0].parameters)
        same(outcome.moments, before[0].moments)
    assert len(before[0].moments) == 3 * len(before[0].parameters)

    files = before[0].saved
    assert all(outcome.saved == files for outcome in before)
    assert {file.path for file in files} == {path.name for path in (tmp_path / "saved").iterdir()}
    for file in files:
        data = (tmp_path / "saved" / file.path).read_bytes()
        assert (hashlib.sha256(data).hexdigest(), len(data)) == (file.sha256, file.num_bytes)
    name = "model.layers.0.mlp.experts.down_proj"
    parts = {path.name: raw_parts(path) for path in (tmp_path / "saved").glob("model.*")}
    begins = {file: part[name][0] for file, part in parts.items()}
    if writers == 2:
        assert begins == {
            "model.rank0of2.safetensors": [0, 0, 0],
            "model.rank1of2.safetensors": [3, 0, 0],
        }
    rows = [parts[file][name][1] for file in sorted(begins)]
    assert numpy.array_equal(numpy.concatenate(rows), before[0].parameters[name])


def test_a_resumed_run_goes_on_as_if_nothing_had_been(
    two_ranks, make_spec, make_groups, model_dir, tmp_path
):
    spec = make_spec(training={"global_batch_size": 4})
    updates = [(u, make_groups(u)) for u in range(3)]
    whole = two_ranks.run(live, Job(spec, model_dir, updates=updates))
    two_ranks.run(live, Job(spec, model_dir, updates=updates[:2], save=tmp_path / "saved"))
    clock = PolicyClock(completed_steps=4, published_step=-1, next_rollout_id=2)
    resumed = two_ranks.run(
        live, Job(spec, model_dir, load=(tmp_path / "saved", clock), updates=updates[2:])
    )
    same(resumed[0].parameters, whole[0].parameters)


def test_a_damaged_checkpoint_is_refused_by_all_ranks(two_ranks, make_spec, model_dir, tmp_path):
    spec = make_spec()
    two_ranks.run(live, Job(spec, model_dir, save=tmp_path / "saved"))
    clock = PolicyClock(completed_steps=0, published_step=-1, next_rollout_id=0)
    restore = Job(spec, model_dir, load=(tmp_path / "saved", clock))
    part = tmp_path / "saved" / "optimizer.rank1of2.safetensors"
    good = part.read_bytes()
    part.write_bytes(good[:-4])
    for error in two_ranks.run(live, restore):
        assert type(error) is ContractViolation
        assert "optimizer.rank1of2.safetensors is damaged" in error.message
    part.unlink()
    for error in two_ranks.run(live, restore):
        assert type(error) is ContractViolation
        assert "lacks optimizer.rank1of2.safetensors" in error.message
    part.write_bytes(good)
    assert two_ranks.run(live, restore)[1].parameters


def test_a_broken_sample_on_one_rank_stops_all(two_ranks, make_spec, make_groups, model_dir):
    good, bad = make_groups(), make_groups()
    bad[1].samples[2].logprobs[3] = float("nan")
    spec = make_spec()
    jobs = [Job(spec, model_dir, updates=[(0, groups)]) for groups in (good, bad)]
    answers = two_ranks.run(live, own=jobs)
    for error in answers:
        assert type(error) is ContractViolation
        assert error.message.startswith("rank 1: ContractViolation: ")
        assert "group 1, sample 6" in error.message
        assert "log" in error.message
    assert answers[0].message == answers[1].message
    # the ranks are in step: the next job works
    assert two_ranks.run(live, jobs[0])[1].reports[0].policy_version == 1


def test_errors_of_both_ranks_are_listed(two_ranks, make_spec, make_groups, model_dir):
    first, second = make_groups(), make_groups()
    first[0].advantages[1] = float("inf")
    second[1].samples[0].spans = []
    spec = make_spec()
    jobs = [Job(spec, model_dir, updates=[(0, groups)]) for groups in (first, second)]
    for error in two_ranks.run(live, own=jobs):
        assert type(error) is NonFiniteLoss
        assert "rank 0: NonFiniteLoss: prompt group 0, sample 1: advantage is inf" in error.message
        assert "; rank 1: ContractViolation: " in error.message


def test_a_rank_that_skips_its_step_rejects_it_for_all(
    two_ranks, make_spec, make_groups, model_dir
):
    """The loss of the second rank's samples overflows; no weight and no clock moves."""
    spec = make_spec()
    huge = [[0.5, 0.5, -0.5, -0.5], [1e38, -1e38, 1e38, -1e38]]
    broken = two_ranks.run(live, Job(spec, model_dir, updates=[(0, make_groups(advantages=huge))]))
    for error in broken:
        assert type(error) is NonFiniteLoss
        assert "rank 1: NonFiniteLoss" in error.message
    skipped = [
        [row["local_optimizer_skipped"] for row in events(spec, rank, "optimizer_rejected")]
        for rank in range(2)
    ]
    assert skipped[1] == [True]
    assert len(skipped[0]) == 1
    assert not any(events(spec, rank, "optimizer") for rank in range(2))
