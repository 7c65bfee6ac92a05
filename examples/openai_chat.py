"""The package `openai`, unmodified. `pip install openai`."""

import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8080/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),  # any, while the service asks for no keys
)
model = client.models.list().data[0].id

stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Why is the sky blue?"}],
    max_tokens=40,
    stream=True,
    extra_body={"class": "interactive"},  # our own field: how urgent it is
)
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
print()

answer = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Name a colour."}],
    response_format={
        "type": "json_schema",
        "json_schema": {"name": "colour", "schema": {"enum": ["red", "green", "blue"]}},
    },
)
print(answer.choices[0].message.content, answer.usage)
