"""Logs of a service: a JSON object on each line of stderr, of its own words and of what its libraries say. No prompt
text is ever logged."""

import logging
import sys
import traceback

import structlog


def configure_logs(service: str, level: str = "info", **who: str) -> structlog.stdlib.BoundLogger:
    """Structured logs, each line with `who` logs. Bind request ids as `request_id`. Warnings and errors that libraries
    and our engine log by `logging` become such lines, too: an exception in a handler of gRPC is told nowhere else."""

    def name_service(logger: object, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        return {"service": service, **who, **event}

    structlog.configure(
        processors=[
            name_service,
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    logger: structlog.stdlib.BoundLogger = structlog.get_logger()
    logging.basicConfig(handlers=[_Libraries(logging.WARNING)])
    return logger


def trace(error: BaseException) -> list[str]:
    """Where an error comes from, for a log: its type and its stack frames. Its message is left out, because it may
    contain a client's text."""
    frames = traceback.extract_tb(error.__traceback__)
    return [type(error).__name__, *(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames)]


class _Libraries(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            error = record.exc_info[1] if record.exc_info else None
            where = {"trace": trace(error)} if error else {}
            words = record.getMessage().partition("\n")[0]  # behind it asyncio shows an error's message
            level = min(record.levelno // 10 * 10, logging.CRITICAL)  # structlog knows no others
            structlog.get_logger().log(level, words, logger=record.name, **where)
        except Exception:  # of a record that is malformed: no log may break what is logged
            self.handleError(record)
