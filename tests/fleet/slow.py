"""A module whose import takes for ever; a file says when it has begun."""

import os
import time
from pathlib import Path

Path(os.environ["MEGALITH_TEST_SIGN"]).touch()
while True:
    time.sleep(3600)
