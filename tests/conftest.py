"""Settings that must be made before any test imports torch or starts a process."""

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a forked rank hangs in OpenMP if its parent ever used more than one thread
os.environ.setdefault("CUDA_HOME", "")  # on a machine without a GPU, torch's compiler would log that it found none
# A suite that is started with nohup ignores SIGHUP, and every process that it starts would inherit this: tests of
# SIGHUP would fail.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
