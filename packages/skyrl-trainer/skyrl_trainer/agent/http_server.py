"""An HTTP server in a thread."""

import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette

from skyrl_trainer.errors import UserError

CLOSE_SECONDS = 10.0
KEEP_SECONDS = 3600
"""That a connection may lie idle: an agent's tools take their time."""


class HTTPServer:
    """Takes its port at once (0: a free one); answers while `running`."""

    def __init__(self, host: str, port: int) -> None:
        try:
            self._socket = socket.create_server((host, port), backlog=512)
        except (OSError, OverflowError) as error:
            raise UserError(f"Nobody can listen on {host}:{port} ({error}); port 0 takes a free one.") from None
        self.url = f"http://{host}:{self._socket.getsockname()[1]}/v1"

    @contextmanager
    def running(self, application: Starlette, wait: float = CLOSE_SECONDS) -> Iterator[None]:
        """With an event loop of its own. wait: seconds for those who are being answered at its end."""
        settings = uvicorn.Config(application, log_level="error", lifespan="off", timeout_keep_alive=KEEP_SECONDS)
        settings.timeout_graceful_shutdown = 2
        server = uvicorn.Server(settings)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [self._socket]}, daemon=True)
        thread.start()
        try:
            yield
        finally:
            # Who is cut off now is no error to be told; another server of this process has its own.
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
            server.should_exit = True
            thread.join(wait)
            if wait:
                logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
            self._socket.close()
