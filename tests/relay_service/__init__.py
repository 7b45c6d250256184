"""The registry of this project with faults and a journal, for tests of its two ends.

`service` runs the real service of `exec_server.hosting` in a thread, between its listener and its
links. `faults` and `sockets.Socket` list the possible faults; `plain` adds the forms without
encryption, which the real service refuses.
"""

from tests.relay_service.faults import TO_EXECUTOR, TO_HARNESS, Answer, Endpoint
from tests.relay_service.journal import Message, Request
from tests.relay_service.plain import Form
from tests.relay_service.service import ThreadedRelayService

__all__ = [
    "TO_EXECUTOR",
    "TO_HARNESS",
    "Answer",
    "Endpoint",
    "Form",
    "Message",
    "Request",
    "ThreadedRelayService",
]
