"""Every documented key of the policy is read: some run is refused because of it and of nothing else."""

from __future__ import annotations

from dataclasses import fields

import pytest

from fedtmle.protocol.policy import Policy
from tests.attacks.test_attacks import EACH_KEY

ELSEWHERE = {
    "min_cell": "tests/studies/test_preflight.py, test_the_strictest_floor_of_the_silo_files_holds",
    "min_truncated": "hides, does not refuse: tests/attacks/test_guard.py",
    "min_pooled": "tests/protocol/test_looks.py, test_one_person_over_all_silos_is_not_told",
    "trust_looks": "tests/protocol/test_looks.py, test_few_silos_believe_each_other_if_their_owners_let_them",
    "allow_targets": "tests/golden/runs.py, refusal/allow_targets",
    "fresh_batches": "a consent; without it min_batch refuses: tests/protocol/test_batches.py",
    "allow_own_columns": "tests/protocol/test_alone.py, test_an_owner_may_mind",
    "allow_unsigned": "tests/engine/test_endpoint.py, test_an_owner_may_want_signed_requests",
    "max_bits": "tests/studies/test_memory.py, test_the_policy_limits_what_all_studies_tell",
    "max_epsilon": "tests/studies/test_owners_budget.py, test_one_study_may_be_too_much",
    "max_epsilon_total": "tests/studies/test_owners_budget.py, test_studies_add_up",
    "reasons": "not a limit, but why others are laxer: tests/studies/test_lowered.py",
    "release": "not a limit of a session, but of what is shown of its result",
}


@pytest.mark.parametrize("key", [key.name for key in fields(Policy) if key.name not in ELSEWHERE])
def test_a_run_is_refused_because_of_this_key_alone(key: str) -> None:
    """`test_each_guard_stops_it_alone` runs these: refused with the key, named in the ledger; and
    `test_without_its_guard_it_succeeds_again` with the key off."""
    assert [name for name, stopping in EACH_KEY if stopping == key]
