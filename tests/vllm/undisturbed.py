"""`python -m tests.vllm.undisturbed`, in vLLM's environment: what stock vLLM answers by its own scheduler, without
drafts. JSON on stdin: [[token ids of the prompt, output tokens at most, ids that end it], ...]; tokens on stdout."""

import json
import sys
from contextlib import redirect_stdout

from tests.vllm.drive import add, make_core, run_all


def main() -> None:
    asked = json.load(sys.stdin)
    with redirect_stdout(sys.stderr):  # vLLM's own words
        core = make_core()
        for number, (prompt, most, ends) in enumerate(asked):
            add(core, str(number), prompt, most, stop_token_ids=ends)
        texts = run_all(core)
        core.shutdown()
    json.dump([texts[str(number)] for number in range(len(asked))], sys.stdout)


if __name__ == "__main__":
    main()
