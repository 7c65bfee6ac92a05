#!/bin/sh
# A chat with curl: whole, streamed, and where its request stands.
set -eu
url=${OPENAI_BASE_URL:-http://127.0.0.1:8080/v1}
model=${MODEL:-smollm2-135m}
ask() { # the rest of the body
    echo "{\"model\": \"$model\", \"messages\": [{\"role\": \"user\", \"content\": \"Why is the sky blue?\"}], \"max_tokens\": 24$1}"
}
call() { # the path, and further arguments of curl; without keys the service takes any
    path=$1 && shift
    curl -sS --fail-with-body "$url/$path" -H "authorization: Bearer ${OPENAI_API_KEY:-none}" "$@"
}

ask '' | call chat/completions -H 'content-type: application/json' -d @-
echo

ask ', "stream": true, "stream_options": {"include_usage": true}' |
    call chat/completions -N -H 'content-type: application/json' -d @-

# Under an id of your own a request can be asked about, read again, and ended.
id=example-$$
ask ", \"request_id\": \"$id\"" | call chat/completions -o /dev/null -H 'content-type: application/json' -d @-
call "requests/$id"
echo
