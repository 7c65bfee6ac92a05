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
    "background": (False,),
    "bad_words": ([],),
    "best_of": (),  # or the same as `n`
    "chat_template": (),
    "conversation": (),
    "documents": ([],),
    "ebnf": (),  # SGLang's, as `regex`; `grammar` and `json_schema` are llama.cpp's
    "enable_thinking": (),
    "extra_body": ({},),  # an argument of OpenAI's client, no field
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
    "max_new_tokens": (),  # other servers' names of `max_tokens`, as two below, and of other fields of ours
    "min_p": (0,),
    "mirostat": (0,),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "n_predict": (-1,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "num_predict": (-1,),
    "prediction": (),
    "previous_response_id": (),
    "priority": (),  # an integer, whose meaning differs between services; `class` is ours
    "prompt_embeds": (),
    "regex": (),
    "repeat_penalty": (1,),
    "repetition_detection": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_sequences": ([],),
    "stop_token_ids": ([],),
    "suffix": ("",),
    "thinking_token_budget": (),
    "top_logprobs": (0,),  # of chats alone
    "truncate_prompt_tokens": (),
    "truncation": ("disabled", "auto"),  # what does not fit is refused, never cut
    "typical_p": (1,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "web_search_options": (),
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
        "store",  # nothing is kept for long, whatever it says
        "user",
        "verbosity",
    }
)

# The same, of the Responses API alone.
ACCEPTED_RESPONSES: Final = frozenset(
    {
        "max_tool_calls",  # of tools that the service runs itself: there are none
        "stream_options",
    }
)
