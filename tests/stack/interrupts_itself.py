"""A program that gets a Ctrl-C while it runs."""

import os
import signal
import time

os.kill(os.getpid(), signal.SIGINT)
time.sleep(60)
