"""Two hundred prompts of the project's own: chat, code, reasoning, paragraphs to summarise. No data set of others."""

from itertools import chain, product
from pathlib import Path

_TOPICS = (
    "queues in supermarkets", "the tides", "sourdough bread", "the printing press", "glaciers", "compound interest",
    "bicycles", "the human heart", "volcanoes", "sailing",
)  # fmt: skip
_CHAT = (
    "Explain {} to a child of six.",
    "List five surprising facts about {}.",
    "Write a haiku about {}.",
    "What do people most often get wrong about {}? Answer in two sentences.",
    "Write a short letter to a friend who is afraid of {}.",
    "Translate into French, then into German: I have read a book about {}.",
)
_TASKS = (
    "reverses a linked list", "counts the vowels of a string", "merges two sorted lists", "finds the longest word",
    "checks whether brackets are balanced", "computes the n-th Fibonacci number", "transposes a matrix",
    "removes duplicates but keeps the order", "parses a date such as 2024-02-29", "sorts a list without sort()",
)  # fmt: skip
_CODE = (
    "Write a Python function that {}.",
    "Write a JavaScript function that {}, with a comment on each line.",
    "Write three unit tests, with pytest, of a function that {}.",
    "def solution(x):\n    # a function that {}\n",
    "In C, write a function that {}. Say what its complexity is.",
    "Which mistakes are likely in code that {}? Give a list.",
)
_NUMBERS = ((3, 12), (7, 5), (24, 18), (15, 40), (9, 9), (120, 35), (2, 64), (11, 13), (50, 8), (6, 31))
_REASONING = (
    "A shop sells {} apples a day at {} cents each. What does it take in a week? Think step by step.",
    "A train covers {} km in {} minutes. What is its speed in km/h? Show each step.",
    "Anna has {} marbles, Ben has {} more than she has. How many have they together? Explain.",
    "What is {} times {}? First estimate, then compute it digit by digit.",
    "If x + {} = {}, what is x? Then check the answer.",
    "One pump fills a pool in {} hours, another in {} hours. How long do both take together?",
)
_PARAGRAPHS = Path(__file__).with_name("paragraphs.txt")  # of technical Markdown: text, tables, a command
_SUMMARISE = "Summarise this in one sentence.\n\n{}"


def two_hundred() -> list[str]:
    kinds = ((_CHAT, _TOPICS), (_CODE, _TASKS))
    short = [[form.format(x) for form, x in product(forms, items)] for forms, items in kinds]
    short.append([form.format(*pair) for form, pair in product(_REASONING, _NUMBERS)])
    long = [_SUMMARISE.format(text) for text in _PARAGRAPHS.read_text().split("\n\n")]
    prompts = [*chain(*short), *long]
    assert len(set(prompts)) == 200
    return prompts
