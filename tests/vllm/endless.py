"""A program that never ends by itself: it opens the named pipe that it is told, writes a line, and keeps it open."""

import sys
import threading

if __name__ == "__main__":
    with open(sys.stdin.read(), "w") as pipe:
        print("began", file=pipe, flush=True)
        threading.Event().wait()
