"""Triton's own client, by the Open Inference Protocol. `pip install 'tritonclient[grpc]'`."""

import json
import os
import queue

import numpy as np
import tritonclient.grpc as triton

client = triton.InferenceServerClient(os.environ.get("LAPS_SD_SERVER", "127.0.0.1:50051"))
model = os.environ.get("MODEL", "smollm2-135m")
assert client.is_server_ready()
assert client.is_model_ready(model)


def tensor(name: str, value: str | bool) -> triton.InferInput:
    kind = "BOOL" if isinstance(value, bool) else "BYTES"
    made = triton.InferInput(name, [1], kind)
    made.set_data_from_numpy(np.array([value], bool if kind == "BOOL" else object))
    return made


text = tensor("text_input", "1, 2, 3, 4,")
settings = tensor("sampling_parameters", json.dumps({"max_tokens": 16, "temperature": 0}))
print(client.infer(model, [text, settings]).as_numpy("text_output")[0].decode())

answers: queue.Queue[tuple[triton.InferResult | None, Exception | None]] = queue.Queue()
client.start_stream(lambda result, error: answers.put((result, error)))
client.async_stream_infer(model, [text, settings, tensor("stream", True)], enable_empty_final_response=True)
final = False
try:
    while not final:
        result, error = answers.get(timeout=60)
        if error is not None or result is None:
            raise SystemExit(str(error))
        final = result.get_response().parameters["triton_final_response"].bool_param
        piece = result.as_numpy("text_output")
        print(piece[0].decode(), end="\n" if final else "", flush=True)
finally:
    client.stop_stream()  # its thread would keep this program from ending
