"""`weft watch`: show a live or finished run as a web page, or in the terminal."""

from __future__ import annotations

import argparse
import os
import socket
from importlib.util import find_spec
from pathlib import Path

from weft.conf.hosts import is_loopback
from weft.pipeline.limits import count
from weft.tools.parsers import refuse_unused
from weft.tools.watch.record import RunRecord

TOKEN = "WEFT_WATCH_TOKEN"
"""Environment variable with the token of a page that other machines reach. Without it, a token is made and printed."""


def main(argv: list[str]) -> int:
    """Run ``weft watch RUN [--text] [--host ADDRESS] [--port PORT]`` until Ctrl-C, and return the exit code.

    With ``--against RUN`` show where the time goes next to another run.
    With ``--otlp ADDRESS`` send a step as a trace instead.

    Raises:
        ValueError: there is no run, the port is in use, a package is missing, or no one takes the trace.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    if args.text:
        refuse_unused(parser, argv, ("otlp", "host", "port"), "--text shows the run in this terminal; leave out one")
    if not args.text:
        refuse_unused(parser, argv, ("once",), "only --text uses it; give both, or leave it out")
    if args.otlp:
        refuse_unused(parser, argv, ("against", "host", "port"), "--otlp sends a step and shows no page; leave out one")
    else:
        refuse_unused(parser, argv, ("step",), "only --otlp uses it; give both, or leave it out")
    record = RunRecord(args.run)
    other = RunRecord(args.against) if args.against else None
    if args.text:
        from weft.tools.watch.text import show

        return show(record, once=args.once, other=other)
    if args.otlp:
        return _send(record, args.otlp, args.step)
    if missing := [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]:
        raise ValueError(
            f"the page needs {' and '.join(missing)}: pip install 'weft[watch]', or use `weft watch {args.run} --text`"
        )
    import uvicorn

    from weft.tools.watch.server import OwnUserProtocol, make_app, new_token

    token = "" if is_loopback(args.host) else os.environ.get(TOKEN) or new_token()
    app = make_app(record, host=args.host, token=token, other=other)
    listener = _listen(args.host, args.port)
    address = f"http://{args.host}:{listener.getsockname()[1]}/" + (f"?token={token}" if token else "")
    print(f"{record.name}: {address}", flush=True)
    config = uvicorn.Config(
        app,
        http="auto" if token else OwnUserProtocol,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    uvicorn.Server(config).run([listener])
    return 0


def _send(record: RunRecord, address: str, step: int | None) -> int:
    if not address.startswith(("http://", "https://")):
        raise ValueError(f"--otlp {address}: not an address such as http://127.0.0.1:4318/v1/traces")
    if find_spec("opentelemetry") is None:
        raise ValueError("--otlp needs OpenTelemetry: pip install 'weft[otlp]'")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # type: ignore[attr-defined,unused-ignore]

    from weft.tools.watch.otlp import send

    try:
        shown, count = send(record, OTLPSpanExporter(endpoint=address), step)
    except ValueError as error:
        raise ValueError(f"--otlp {address}: {error}") from error
    print(f"{count} spans of step {shown} sent to {address}")
    return 0


def _listen(host: str, port: int) -> socket.socket:
    count(port, "--port", least=0, most=65535)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise ValueError(f"--host {host} --port {port}: {error.strerror}; choose another, or --port 0") from error
    return listener


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="weft watch", description="Show a live or finished run.")
    parser.add_argument("run", type=Path, help="folder of the run, such as runs/quickstart")
    parser.add_argument("--against", type=Path, metavar="RUN", help="another run, next to which the time is shown")
    parser.add_argument("--text", action="store_true", help="show it in this terminal instead of on a page")
    parser.add_argument("--once", action="store_true", help="with --text: print it once")
    parser.add_argument("--otlp", metavar="ADDRESS", help="send a step to this OpenTelemetry collector, and end")
    parser.add_argument("--step", type=int, help="with --otlp: the step; the newest by default")
    parser.add_argument("--host", default="127.0.0.1", help="address of the page; others than loopback need a token")
    parser.add_argument("--port", type=int, default=8765, help="port of the page; 0 takes a free one")
    return parser
