"""The project's own prompts: chat, code and reasoning, seven hundred of each. Nothing is random here."""

from collections.abc import Iterator
from itertools import product

# Of answers in tokens: round numbers, as clients give them, small ones more often. DECISIONS.md, "A comparison bounds
# answers".
BOUNDS = (16, 16, 16, 16, 32, 32, 32, 64, 64, 128, 256, 512)

_CHAT = (
    "Explain {} to a child of six.",
    "List five surprising facts about {}.",
    "Write a haiku about {}.",
    "What do people most often get wrong about {}? Answer in two sentences.",
    "Write a short letter to a friend who is afraid of {}.",
    "Who first wrote about {}, and why does it matter today?",
    "I have to give a talk on {} tomorrow. How should I begin?",
    "Is there anything funny about {}? Tell me a joke.",
    "Describe {} as a travel guide would.",
    "Argue for and against spending a whole year on {}.",
    "Name a film, a song and a book that are about {}.",
    "Plan a week for a school class that wants to learn about {}.",
    "My neighbour cannot stop talking about {}. How do I change the subject politely?",
    "What will people think of {} in a hundred years?",
)
_TOPICS = (
    "queues in supermarkets", "the tides", "sourdough bread", "the printing press", "glaciers", "compound interest",
    "bicycles", "the human heart", "volcanoes", "sailing", "chess", "bees", "the moon landing", "opera", "passports",
    "coral reefs", "insurance", "photography", "earthquakes", "tea", "the Roman roads", "vaccines", "kites", "deserts",
    "public libraries", "lighthouses", "elections", "mushrooms", "clocks", "trains", "the alphabet", "snow", "jazz",
    "elephants", "bridges", "dreams", "money", "gardens", "maps", "marathons", "cheese", "stars", "wolves", "museums",
    "recycling", "language learning", "weather forecasts", "small talk", "old age", "left-handed people",
)  # fmt: skip
_CODE = (
    "Write a Python function that {}.",
    "Write a JavaScript function that {}, with a comment on each line.",
    "Write three unit tests, with pytest, of a function that {}.",
    "def solution(x):\n    # a function that {}\n",
    "In C, write a function that {}. Say what its complexity is.",
    "Which mistakes are likely in code that {}? Give a list.",
    "Write a class in Java that {}.",
    "Explain in one paragraph how a program {}.",
    "Write Go code that {}, and a main function that shows it.",
    "Rewrite a slow program so that it {}; show before and after.",
    "Give the signature and the documentation of a function that {}, but not its body.",
    "Write a shell script that {}, or say why a shell is the wrong tool.",
    "Review this for me: a colleague's function {} and uses recursion. What would you ask?",
    "Write Rust that {}, without any library.",
)
_TASKS = (
    "reverses a linked list", "counts the vowels of a string", "merges two sorted lists", "finds the longest word",
    "checks whether brackets are balanced", "computes the n-th Fibonacci number", "transposes a matrix",
    "removes duplicates but keeps the order", "parses a date such as 2024-02-29", "sorts a list without sort()",
    "finds the shortest path in a grid", "reads a CSV file", "counts the words of a file", "validates an address",
    "draws a triangle of stars", "converts Roman numerals", "computes a moving average", "flattens nested lists",
    "finds all anagrams", "implements a stack", "implements an LRU cache", "splits a bill",
    "adds two binary strings", "finds a missing number", "rotates an image by 90 degrees", "compresses runs of letters",
    "generates passwords", "solves a Sudoku", "plays tic-tac-toe", "counts islands in a map", "multiplies matrices",
    "finds prime factors", "checks for palindromes", "groups records by a key", "joins two tables", "renames files",
    "computes a checksum", "schedules tasks by priority", "searches a sorted list", "evaluates an expression",
    "pages through results", "retries with pauses", "limits how often it is called", "walks a directory tree",
    "formats a table of text", "finds the median", "rounds amounts of money", "checks leap years", "shuffles cards",
    "counts bits",
)  # fmt: skip
_REASONING = (
    "A shop sells {} apples a day at {} cents each. What does it take in a week? Think step by step.",
    "A train covers {} km in {} minutes. What is its speed in km/h? Show each step.",
    "Anna has {} marbles, Ben has {} more than she has. How many have they together? Explain.",
    "What is {} times {}? First estimate, then compute it digit by digit.",
    "If x + {} = {}, what is x? Then check the answer.",
    "One pump fills a pool in {} hours, another in {} hours. How long do both take together?",
    "{} friends share {} sweets as equally as they can. How many are left over?",
    "A tank holds {} litres and loses {} litres a day. When is it empty?",
    "Of {} tickets {} were sold at half price. What share is that, in per cent?",
    "A rectangle is {} m long and {} m wide. Give its area, its perimeter and its diagonal.",
    "The sum of two numbers is {}, their difference is {}. Which are they?",
    "A recipe for {} people takes {} g of flour. How much do seven people need?",
    "What is the remainder of {} to the power of {} when divided by 7? Explain the pattern.",
    "From {} red and {} blue balls one is drawn, then another. How likely are both red?",
)


def texts() -> Iterator[tuple[str, str]]:
    """The kind of each prompt, and its text; kind by kind."""
    numbers = [(3 + 7 * i % 97, 2 + 11 * i % 89) for i in range(50)]
    yield from (("chat", form.format(topic)) for form, topic in product(_CHAT, _TOPICS))
    yield from (("code", form.format(task)) for form, task in product(_CODE, _TASKS))
    yield from (("reasoning", form.format(*pair)) for form, pair in product(_REASONING, numbers))
