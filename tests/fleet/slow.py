"""A module whose import never ends. It creates a file when the import begins."""

import os
import time
from pathlib import Path

Path(os.environ["MEGALITH_TEST_SIGN"]).touch()
while True:
    time.sleep(3600)
