"""The search attributes that runs are listed by."""

from temporalio import workflow
from temporalio.common import SearchAttributeKey

from models.run import LoopPlan, RunProgress

RUN_STATE = SearchAttributeKey.for_keyword("RunState")
POLICY_VERSION = SearchAttributeKey.for_int("PolicyVersion")
UPDATE_INDEX = SearchAttributeKey.for_int("UpdateIndex")
MODEL_NAME = SearchAttributeKey.for_keyword("ModelName")
RECIPE_NAME = SearchAttributeKey.for_keyword("RecipeName")


def index(progress: RunProgress, plan: LoopPlan) -> None:
    """Upsert them: one history event, so on a phase change or checkpoint only."""
    if not progress.search_attributes:
        return
    workflow.upsert_search_attributes(
        [
            RUN_STATE.value_set(progress.state.value),
            POLICY_VERSION.value_set(progress.policy_version),
            UPDATE_INDEX.value_set(progress.next_update),
            MODEL_NAME.value_set(plan.model_name),
            RECIPE_NAME.value_set(plan.recipe_name),
        ]
    )
