"""Records of signs keep their layout: the tag follows the time and the step."""

import json

from megalith.fleet import signs
from megalith.fleet.tiers import Tier


def test_a_record_of_a_sign_has_its_kind_after_time_and_step() -> None:
    record = '{"time": 1.5, "step": 7, "kind": "save_failed", "tier": "disk", "error": "full"}'
    sign = signs.SaveFailed(time=1.5, step=7, tier=Tier.DISK, error="full")
    assert json.dumps(signs.dump(sign)) == record
    assert signs.load(json.loads(record)) == sign
