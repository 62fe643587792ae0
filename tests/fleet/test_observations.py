"""Records of signs keep their layout: the tag follows the time and the step."""

import json

from megalith.fleet import observations
from megalith.fleet.tiers import Tier


def test_a_record_of_a_sign_has_its_kind_after_time_and_step() -> None:
    record = '{"time": 1.5, "step": 7, "kind": "save_failed", "tier": "disk", "error": "full"}'
    sign = observations.SaveFailed(time=1.5, step=7, tier=Tier.DISK, error="full")
    assert json.dumps(observations.dump(sign)) == record
    assert observations.load(json.loads(record)) == sign
