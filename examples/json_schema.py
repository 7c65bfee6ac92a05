"""An answer that follows a JSON schema, however small the model is. Our client:
`pip install dist/laps_sd_client-*.whl`."""

import json

from laps_sd import Client

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "country": {"enum": ["France", "Italy", "Spain"]},
        "capital": {"type": "boolean"},
    },
    "required": ["city", "country", "capital"],
    "additionalProperties": False,
}

with Client() as client:
    answer = client.complete(
        messages=[{"role": "user", "content": "Describe Paris as JSON: city, country, capital."}],
        json_schema=SCHEMA,
        max_tokens=80,
    )
    city = json.loads(answer.text)
    print(city["city"], city["country"], city["capital"])

    vote = client.complete("The sky is blue. True or false? Answer:", choice=[" true", " false"])
    print(vote.text)
