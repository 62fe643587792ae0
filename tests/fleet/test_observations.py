"""Records of observations keep their layout: the tag follows the time and the step."""

import json

from megalith.fleet import observations
from megalith.fleet.tiers import Tier


def test_a_record_of_an_observation_has_its_kind_after_time_and_step() -> None:
    record = '{"time": 1.5, "step": 7, "kind": "save_failed", "tier": "disk", "error": "full"}'
    observation = observations.SaveFailed(time=1.5, step=7, tier=Tier.DISK, error="full")
    assert json.dumps(observations.dump(observation)) == record
    assert observations.load(json.loads(record)) == observation
