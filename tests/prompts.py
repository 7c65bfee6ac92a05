"""Two hundred prompts of the project's own: chat, code, reasoning, paragraphs to summarise. No data set of others. None
is made as those of laps_sd/own_prompts.py are, which heads may have learned from."""

from itertools import chain, product
from pathlib import Path

_TOPICS = (
    "umbrellas", "the Silk Road", "soap", "dictionaries", "avalanches", "rent", "submarines", "the inner ear",
    "monsoons", "juggling",
)  # fmt: skip
_CHAT = (
    "How did {} begin?",
    "Give me three good reasons to read about {}.",
    "Write the first paragraph of a short story in which {} matter.",
    "Which words should I know before I ask an expert about {}?",
    "Make a quiz of four questions on {}, with the answers below.",
    "Put into Spanish, then into Italian: my sister has always liked to hear of {}.",
)
_TASKS = (
    "draws a calendar of one month", "swaps two columns of a table", "measures how long a call takes",
    "picks a winner at random", "turns text into Morse code", "reads a sensor once a minute", "adds a watermark",
    "guesses the language of a text", "keeps the ten highest scores", "waits for a file to appear",
)  # fmt: skip
_CODE = (
    "Show me idiomatic Ruby that {}.",
    "I need TypeScript that {}. Keep it short.",
    "Sketch the tests you would write first for a program that {}.",
    "# This module {}.\nimport sys\n\n",
    "What could go wrong in a service that {}? Name the three worst cases.",
    "Here is the plan: a script {}, and then prints a summary. Write it in Kotlin.",
)
_NUMBERS = ((3, 12), (7, 5), (24, 18), (15, 40), (9, 9), (120, 35), (2, 64), (11, 13), (50, 8), (6, 31))
_REASONING = (
    "A baker fills {} trays with {} rolls each and burns one tray. How many rolls are good?",
    "Subtract {} from {} and halve the result. Explain as you go.",
    "Lena reads {} pages on Monday and {} on each later day. How far is she on Sunday?",
    "Which is more: a {}th of 1000, or {} per cent of 300? Reason it out.",
    "A lift carries {} people or {} boxes. What may it carry when half of the people are aboard?",
    "Two clocks chime every {} and every {} minutes. When do they next chime together?",
)
_PARAGRAPHS = Path(__file__).with_name("paragraphs.txt")  # of technical Markdown: text, tables, a command
_SUMMARISE = "Say in one sentence what this is about.\n\n{}"


def two_hundred() -> list[str]:
    kinds = ((_CHAT, _TOPICS), (_CODE, _TASKS))
    short = [[form.format(x) for form, x in product(forms, items)] for forms, items in kinds]
    short.append([form.format(*pair) for form, pair in product(_REASONING, _NUMBERS)])
    long = [_SUMMARISE.format(text) for text in _PARAGRAPHS.read_text().split("\n\n")]
    prompts = [*chain(*short), *long]
    assert len(set(prompts)) == 200
    return prompts


def templates() -> set[str]:
    return {*_CHAT, *_CODE, *_REASONING, _SUMMARISE}
