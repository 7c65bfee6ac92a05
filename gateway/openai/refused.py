"""Fields that no model of a body has: REFUSED lists those that would change the answer, and that this service does not
have; ACCEPTED those that have no effect. Any other field is ignored and counted. Nothing is decided about a request
here."""

from collections.abc import Mapping
from typing import Any, Final

# Fields that would change the answer, each with the values that ask for nothing.
REFUSED: Final[Mapping[str, tuple[Any, ...]]] = {
    "adapter_id": (),  # of a LoRA adapter, as other servers call it; so do the two beginning with lora
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (),  # or the same as `n`
    "chat_template": (),
    "documents": ([],),
    "ebnf": (),  # SGLang's, as `regex`; `grammar` and `json_schema` are llama.cpp's
    "function_call": (),
    "functions": ([],),
    "grammar": ("",),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "json_schema": (),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "lora_name": (),
    "lora_path": (),
    "lora_request": (),
    "min_p": (0,),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "prediction": (),
    "priority": (),  # an integer, whose meaning differs between services; `class` is ours
    "prompt_embeds": (),
    "regex": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_token_ids": ([],),
    "store": (False,),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}

REFUSED_RESPONSES: Final[Mapping[str, tuple[Any, ...]]] = {
    "background": (False,),
    "conversation": (),
    "previous_response_id": (),
    "prompt": (),
    "service_tier": ("auto", "default"),
    "top_logprobs": (0,),
    "truncation": ("disabled", "auto"),  # what does not fit is refused, never cut
}

# Fields without effect on the answer.
ACCEPTED: Final = frozenset(
    {
        "metadata",
        "parallel_tool_calls",  # an answer has one call at most
        "prompt_cache_key",
        "prompt_cache_retention",
        "reasoning",
        "reasoning_effort",
        "safety_identifier",
        "user",
        "verbosity",
    }
)

# The same, of the Responses API alone.
ACCEPTED_RESPONSES: Final = frozenset(
    {
        "max_tool_calls",  # of tools that the service runs itself: there are none
        "store",  # nothing is kept for long, whatever it says
        "stream_options",
    }
)
