"""A registry and rendezvous for tests and benchmarks, from which a real service could grow.

An independent reading of the protocol: nothing here imports the product. See `service` for
how to run it, `faults` and `sockets.Socket` for what can be made to go wrong.
"""

from tests.relay_service.envelope import Envelope, Kind, build, read, reset, reset_reason
from tests.relay_service.faults import TO_EXECUTOR, TO_HARNESS, FrameFault, HttpFault
from tests.relay_service.journal import Message, Request
from tests.relay_service.registry import Answer, Endpoint
from tests.relay_service.service import RelayService, ThreadedRelayService
from tests.relay_service.sockets import BINARY, TEXT, Socket
from tests.relay_service.state import Form

__all__ = [
    "BINARY",
    "TEXT",
    "TO_EXECUTOR",
    "TO_HARNESS",
    "Answer",
    "Endpoint",
    "Envelope",
    "Form",
    "FrameFault",
    "HttpFault",
    "Kind",
    "Message",
    "RelayService",
    "Request",
    "Socket",
    "ThreadedRelayService",
    "build",
    "read",
    "reset",
    "reset_reason",
]
