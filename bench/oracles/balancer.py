"""A TCP load balancer: every new connection goes to the next backend that accepts it."""

import contextlib
import itertools
import selectors
import socket
import socketserver
import threading
from collections.abc import Sequence

_PIECE = 1 << 16


class Balancer:
    """``with Balancer(ports) as url:`` – one address in front of servers on this machine."""

    def __init__(self, ports: Sequence[int]):
        turns = itertools.count()

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                first = next(turns)
                for i in range(len(ports)):
                    with contextlib.suppress(OSError):
                        backend = socket.create_connection(("127.0.0.1", ports[(first + i) % len(ports)]), timeout=1)
                        backend.settimeout(None)
                        with backend, contextlib.suppress(OSError):
                            _forward(self.request, backend)
                        return

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads, allow_reuse_address, request_queue_size = True, True, 128

        self._server = Server(("127.0.0.1", 0), Handler)

    def __enter__(self) -> str:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def _forward(client: socket.socket, backend: socket.socket) -> None:
    """Both ways, until one side ends."""
    with selectors.DefaultSelector() as ready:
        ready.register(client, selectors.EVENT_READ, backend)
        ready.register(backend, selectors.EVENT_READ, client)
        while True:
            for key, _ in ready.select():
                piece = key.fileobj.recv(_PIECE)
                if not piece:
                    return
                key.data.sendall(piece)
