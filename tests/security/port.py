"""`python -m tests.security.port FOLDER`: a port under mutual TLS with that folder's certificate, until stdin ends. Its
number is told on stdout. No assertions live here."""

import asyncio
import sys
from pathlib import Path

from protos.serving import LINK_MESSAGE_BYTES, Server
from protos.tls import Tls


async def main(folder: Path) -> None:
    tls = Tls(ca=folder / "ca.crt", cert=folder / "tls.crt", key=folder / "tls.key")
    server = Server(["laps_sd.link.v1.GatewayLink"], LINK_MESSAGE_BYTES, tls.server_credentials())
    sys.stdout.write(f"{await server.start('127.0.0.1', 0)}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
