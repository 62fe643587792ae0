"""A module that takes long to import."""

import time

time.sleep(60)
