"""Settings for before any test imports torch or starts a process."""

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a forked rank hangs in OpenMP if its parent ever used more than one thread
os.environ.setdefault("CUDA_HOME", "")  # keeps torch's compiler from announcing on a machine without a GPU that it found none
# A suite that is started with nohup ignores SIGHUP, and so would every process it starts: a run that is told so stays.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
