"""A file of prompts, a line each, answered in class batch: behind everybody who waits for an answer. Each prompt has an
id of its own, so a run that was broken off is started again and gets the answers that are there.
Usage: batch.py FILE [NAME]"""

import asyncio
import json
import sys
from pathlib import Path

from laps_sd import AsyncClient, RequestError

AT_ONCE = 8


async def main(prompts: list[str], name: str) -> None:
    turns = asyncio.Semaphore(AT_ONCE)

    async def answer(number: int, prompt: str) -> None:
        async with turns:
            try:
                done = await client.complete(
                    messages=[{"role": "user", "content": prompt}],
                    max_tokens=48,
                    priority="batch",
                    on_disconnect="detach",  # a lost connection is looked for again by the client itself
                    request_id=f"{name}-{number}",
                )
            except RequestError as error:
                print(json.dumps({"number": number, "error": str(error)}), flush=True)
            else:
                print(json.dumps({"number": number, "text": done.text}), flush=True)

    async with AsyncClient(max_retries=20) as client:  # a service that is full says when to come back
        await asyncio.gather(*(answer(*each) for each in enumerate(prompts)))


if len(sys.argv) not in (2, 3):
    sys.exit("usage: batch.py FILE [NAME]")
file, name = (*sys.argv[1:], "batch")[:2]
asyncio.run(main(Path(file).read_text().splitlines(), name))
