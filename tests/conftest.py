"""Set before any test imports torch."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a forked rank hangs in OpenMP if its parent ever used more than one thread
os.environ.setdefault("CUDA_HOME", "")  # keeps torch's compiler from announcing on a machine without a GPU that it found none
