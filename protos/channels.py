"""Connections between processes: their options, and which addresses only this machine can reach. Needs nothing but
gRPC, since the clients of strangers load it, too."""

from ipaddress import ip_address

PUBLIC_MESSAGE_BYTES = 4 << 20
LINK_MESSAGE_BYTES = 64 << 20  # a ModelInfo carries a whole tokenizer
ATTEMPT_MS = 3_000  # to connect, with TLS and the first frames of HTTP/2

_KEEPALIVE: list[tuple[str, int]] = [
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # gRPC waits for the longer of the two, and this one is a minute otherwise
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Without these two a server ends a long decode with `too_many_pings`.
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
]


def options(max_message_bytes: int, *, by_proxy: bool = False) -> list[tuple[str, int]]:
    """Options for channels and servers: the same on both ends of a link. `by_proxy`: a channel goes through the HTTP
    proxy that the environment names, if any."""
    return [
        *_KEEPALIVE,
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.enable_http_proxy", int(by_proxy)),
        ("grpc.so_reuseport", 0),  # two services on one port is a mistake, never a load balancer
        # A peer that was restarted is found again within a second; by default it could take two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        # Whatever its name says: how long an attempt may take. It delays none.
        ("grpc.min_reconnect_backoff_ms", ATTEMPT_MS),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        # The same if it came back under another address; by default the resolver waits thirty seconds.
        ("grpc.dns_min_time_between_resolutions_ms", 500),
    ]


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. Of names only localhost counts, since any other may be resolved to
    any address."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
