#!/bin/sh
# A chat with curl: whole, streamed, and where its request stands.
set -eu
url=${OPENAI_BASE_URL:-http://127.0.0.1:8080/v1}
model=${MODEL:-smollm2-135m}
ask() { # the rest of the body
    echo "{\"model\": \"$model\", \"messages\": [{\"role\": \"user\", \"content\": \"Why is the sky blue?\"}], \"max_tokens\": 24$1}"
}

ask '' | curl -sS --fail-with-body "$url/chat/completions" -H 'content-type: application/json' -d @-
echo

ask ', "stream": true, "stream_options": {"include_usage": true}' |
    curl -sSN --fail-with-body "$url/chat/completions" -H 'content-type: application/json' -d @-

# Under an id of your own a request can be asked about, read again, and ended.
id=example-$$
ask ", \"request_id\": \"$id\"" |
    curl -sS --fail-with-body -o /dev/null "$url/chat/completions" -H 'content-type: application/json' -d @-
curl -sS --fail-with-body "$url/requests/$id"
echo
