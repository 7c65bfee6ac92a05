"""The JSON objects of an answer: whole and streamed, of chats and of completions, with usage and what speculation did.
Pure: what comes in is the chunks of the choices; nothing is sent here."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gateway.chunk import Chunk
from gateway.openai.choice import Choice
from protos.times import seconds

TIMES = ("time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second")


@dataclass(frozen=True, slots=True)
class Answer:
    """Of one body. `started`: when it was asked, on the monotonic clock, in seconds; None: it is resumed, so that its
    times are not known. `prompt_tokens` counts each prompt once, however many choices continue it."""

    id: str
    model: str
    chat: bool
    choices: Sequence[Choice]
    prompt_tokens: int
    created: int
    started: float | None

    def whole(self) -> dict[str, Any]:
        """Once all choices have ended."""
        kind = "chat.completion" if self.chat else "text_completion"
        choices = [choice.whole() for choice in self.choices]
        told = self.choices[0].of_prompt if self.chat else None
        apart = {} if told is None else {"prompt_logprobs": told}
        return self._object(kind, choices) | apart | self.end(usage=True)

    def opening(self, *, usage: bool = False) -> list[dict[str, Any]]:
        """The events that tell the roles of several choices, to go before all others: OpenAI's client puts choices
        together in the order in which they come."""
        return [self.text_event(choice) | ({"usage": self.usage()} if usage else {}) for choice in self.choices]

    def events(self, index: int, chunk: Chunk, *, usage: bool = False) -> list[dict[str, Any]]:
        """The events of one chunk of a choice. `usage`: each has the usage so far."""
        said = self.choices[index].events(chunk)
        return [self._event([choice]) | ({"usage": self.usage()} if usage else {}) for choice in said]

    def text_event(self, choice: Choice) -> dict[str, Any]:
        """An event that adds an empty text."""
        return self._event([choice.text_entry()])

    def last_event(self) -> dict[str, Any]:
        """After the end of all choices, for clients that want the usage."""
        return self._event([]) | self.end(usage=True)

    def end(self, *, usage: bool) -> dict[str, Any]:
        """The fields that are of all choices together, at their end."""
        told = {"usage": self.usage()} if usage else {}
        finals = [choice.final for choice in self.choices if choice.final is not None]
        ours = {
            "preemptions": sum(final.preemptions for final in finals),
            "rounds": sum(final.rounds for final in finals),
        }
        return told | {"metrics": self.metrics(), "laps_sd": ours}

    def usage(self) -> dict[str, Any]:
        """The details are OpenAI's names for drafts that were accepted, and that were not."""
        output = sum(choice.figures.tokens for choice in self.choices)
        made = [choice.speculation() for choice in self.choices]
        accepted, drafted = sum(each.accepted for each in made), sum(each.drafted for each in made)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": output,
            "total_tokens": self.prompt_tokens + output,
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            },
        }

    def metrics(self) -> dict[str, Any]:
        """Under vLLM's names. Of several choices: the first token of any, the shortest wait before it, the sum of
        counts."""
        return self._times() | {"speculative_decoding": self._speculation()}

    def _times(self) -> dict[str, float | None]:
        if self.started is None:
            return dict.fromkeys(TIMES)
        figures = [choice.figures for choice in self.choices]
        begun = [(each.first_s, each.last_s, each.tokens) for each in figures if each.first_s is not None]
        first_s = min((first for first, _, _ in begun), default=time.monotonic())
        last_s = max((last for _, last, _ in begun), default=first_s)
        generating_s = sum(last - first for first, last, _ in begun)
        between = sum(tokens - 1 for _, _, tokens in begun)
        queues = [seconds(choice.final.queue_time) for choice in self.choices if choice.final is not None]
        spent = last_s - self.started
        return {
            "time_to_first_token_ms": _ms(first_s - self.started),
            "generation_time_ms": _ms(last_s - first_s),
            "queue_time_ms": _ms(min(queues, default=0.0)),
            "mean_itl_ms": _ms(generating_s / between) if between else None,
            "tokens_per_second": round(sum(each.tokens for each in figures) / spent, 3) if spent > 0 else None,
        }

    def _speculation(self) -> dict[str, Any]:
        made = [choice.speculation() for choice in self.choices]
        steps, drafted = sum(each.steps for each in made), sum(each.drafted for each in made)
        accepted, longest = sum(each.accepted for each in made), max(len(each.histogram) for each in made)
        return {
            "mean_acceptance_length": round(1 + accepted / steps, 4) if steps else None,
            "draft_acceptance_rate": round(accepted / drafted, 4) if drafted else None,
            "acceptance_histogram": [
                sum(each.histogram[i] for each in made if i < len(each.histogram)) for i in range(longest)
            ],
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
            "num_spec_tokens": max(each.longest_draft for each in made),
        }

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._object("chat.completion.chunk" if self.chat else "text_completion", choices)

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}


def _ms(duration_s: float) -> float:
    return round(duration_s * 1000, 3)
