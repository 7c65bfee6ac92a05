"""A stream that its reader leaves, and reads on later: here, or on another machine. Nothing is computed twice."""

from laps_sd import Client

with Client() as client:
    stream = client.generate("Once upon a time", max_tokens=60, ignore_eos=True, on_disconnect="detach")
    text, read = "", 0
    for chunk in stream:
        text += chunk.text
        read = chunk.offset + len(chunk.token_ids)
        if read >= 10:
            request_id = chunk.request_id
            break
    stream.close()  # the request runs on, since it is detached
    print(f"left request {request_id} after {read} tokens: it is {client.status(request_id).state}")

with Client() as another:
    for chunk in another.resume(request_id, read):
        text += chunk.text
    print(text)
    whole = "".join(chunk.text for chunk in another.resume(request_id))
    assert text == whole
