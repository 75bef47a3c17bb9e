"""The hub of `unisono run`: the message format, and the launcher's half of an all_gather of bytes.

A rank sends one DATA message per all_gather over its socket to the launcher. When every rank has sent one,
the launcher answers each with `size` DATA messages in rank order. If the all_gather cannot complete, the
launcher answers with one message that says why. `Hub` reads no socket: `run.run_local` and the tests feed it.

Message (network byte order, 28 bytes, then the payload):
    magic 4s | version u8 | kind u8 | zero u16 | rank u32 | channel u32 | sequence u32 | timeout_ms u32 |
    length u32
`channel` counts the bootstraps that a rank has made, `sequence` the all_gathers on one channel; both must
agree between ranks. No received field is used as an address or a size unchecked: length is at most
MAX_PAYLOAD.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable
from typing import NamedTuple

from ..errors import MismatchError, PeerLostError, TimeoutError, UnisonoError

__all__ = ["HEADER_BYTES", "MAX_PAYLOAD", "Decoder", "Frame", "FrameError", "Header", "Hub", "Kind", "encode"]

MAX_PAYLOAD = 1 << 20  # bytes that one rank may give to one all_gather
_MAX_TEXT = 2000  # characters of an error text
_MAGIC = b"UNSO"
_VERSION = 1
_HEADER = struct.Struct("!4sBBHIIIII")
HEADER_BYTES = _HEADER.size
Place = tuple[int, int]  # channel and sequence


class Kind(enum.IntEnum):
    """The content of a message: a rank's bytes, or, as UTF-8 text, the reason why the all_gather failed."""

    DATA = 1
    LOST = 2
    TIMEOUT = 3
    MISMATCH = 4
    INVALID = 5

    @property
    def error(self) -> type[UnisonoError]:
        """Returns the exception that a rank raises on a message of this kind."""
        return _ERRORS.get(self, UnisonoError)


_ERRORS: dict[Kind, type[UnisonoError]] = {
    Kind.LOST: PeerLostError,
    Kind.TIMEOUT: TimeoutError,
    Kind.MISMATCH: MismatchError,
}


class FrameError(UnisonoError):
    """Bytes that are not a Unisono message. The text names the wrong field; the caller adds the sender."""


class Header(NamedTuple):
    """The fixed part of a message. `timeout_ms`: how long the rank waits for the others; 0 in an answer."""

    kind: Kind
    rank: int
    channel: int
    sequence: int
    timeout_ms: int
    length: int

    @property
    def place(self) -> Place:
        """Returns channel and sequence, which identify the all_gather of this message."""
        return self.channel, self.sequence

    def pack(self) -> bytes:
        """Returns the header's 28 bytes."""
        return _HEADER.pack(_MAGIC, _VERSION, self.kind, 0, *self[1:])

    @staticmethod
    def unpack(data: bytes | bytearray) -> Header:
        """Returns the header in the first 28 bytes of `data`. Raises FrameError."""
        if not data.startswith(_MAGIC):
            raise FrameError(f"the message starts with {bytes(data[:4])!r}, not with {_MAGIC!r}")
        if len(data) < HEADER_BYTES:
            raise FrameError(f"the message ends after {len(data)} of the {HEADER_BYTES} bytes of a header")
        _, version, kind, zero, rank, channel, sequence, timeout_ms, length = _HEADER.unpack_from(data)
        if version != _VERSION:
            raise FrameError(
                f"the version is {version}, this process speaks {_VERSION}: install one version of unisono"
            )
        if zero != 0 or kind not in Kind.__members__.values():
            raise FrameError(f"the message's kind {kind} (reserved field {zero}) is unknown")
        if length > MAX_PAYLOAD:
            raise FrameError(f"the message's length {length} is above the limit of {MAX_PAYLOAD} bytes")
        return Header(Kind(kind), rank, channel, sequence, timeout_ms, length)


class Frame(NamedTuple):
    """A whole message."""

    header: Header
    payload: bytes


def encode(kind: Kind, rank: int, place: Place, payload: bytes, timeout_ms: int = 0) -> bytes:
    """Returns one message as bytes. Raises FrameError for a payload above MAX_PAYLOAD."""
    if len(payload) > MAX_PAYLOAD:
        raise FrameError(f"a message of {len(payload)} bytes is above the limit of {MAX_PAYLOAD}")
    return Header(kind, rank, *place, timeout_ms, len(payload)).pack() + payload


class Decoder:
    """Cuts a stream of bytes into messages. Holds at most one unfinished message and the bytes fed last."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def partial(self) -> int:
        """Returns how many bytes of an unfinished message it holds."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[Frame]:
        """Takes the next bytes of the stream. Returns the messages that they complete.

        Raises:
            FrameError: the bytes cannot become a message. The decoder cannot be used any more.
        """
        self._buffer += data
        frames: list[Frame] = []
        while self._buffer:
            if len(self._buffer) < HEADER_BYTES:
                if self._buffer[:4] != _MAGIC[: len(self._buffer)]:
                    Header.unpack(self._buffer)  # raises: names the bytes that are there
                break
            header = Header.unpack(self._buffer)
            end = HEADER_BYTES + header.length
            if len(self._buffer) < end:
                break
            frames.append(Frame(header, bytes(self._buffer[HEADER_BYTES:end])))
            del self._buffer[:end]
        return frames


class Hub:
    """The launcher's side: collects one message per rank, then answers all. No input makes it raise.

    After a failure (a rank lost, late or mismatched, or bytes that are no message) every later all_gather
    gets the same answer, because the ranks no longer agree on their place.

    Args:
        size: number of ranks.
        clock: returns seconds, as `Clock` does.
    """

    def __init__(self, size: int, clock: Callable[[], float]) -> None:
        # bytes to write to each rank; the caller removes those that are written
        self.outbox = [bytearray() for _ in range(size)]
        self.deadline: float | None = None  # when to call expire(), by `clock`
        self._size = size
        self._clock = clock
        self._decoders = [Decoder() for _ in range(size)]
        self._waiting: dict[int, Frame] = {}
        self._gone: dict[int, str] = {}
        self._failure: tuple[Kind, int, bytes] | None = None

    def listening(self, rank: int) -> bool:
        """Returns whether bytes from `rank` still count."""
        return rank not in self._gone

    def receive(self, rank: int, data: bytes) -> None:
        """Takes bytes that arrived from `rank`, however the stream is cut."""
        if not self.listening(rank):
            return
        try:
            for frame in self._decoders[rank].feed(data):
                self._take(rank, frame)
        except FrameError as error:
            self._refuse(rank, f"rank {rank} sent the launcher bytes that are no Unisono message: {error}")

    def lost(self, rank: int, why: str) -> None:
        """Notes that `rank` sends no more; earlier bytes count. `why`: a clause: 'was killed by SIGKILL'."""
        if self.listening(rank):
            cut = self._decoders[rank].partial
            self._gone[rank] = f"rank {rank} {why}" + (f", {cut} bytes into a message" if cut else "")
            self._advance()

    def expire(self) -> None:
        """Fails the all_gather under way if its deadline has passed."""
        if self.deadline is not None and self._clock() >= self.deadline:
            first = min(self._waiting.values(), key=lambda frame: frame.header.timeout_ms).header
            missing = [rank for rank in range(self._size) if rank not in self._waiting]
            waited = f"{_ranks(sorted(self._waiting))} waited in for {first.timeout_ms / 1000:g} s"
            self._fail(
                Kind.TIMEOUT, missing[0], f"{_ranks(missing)} did not reach the all_gather that {waited}"
            )

    def _take(self, rank: int, frame: Frame) -> None:
        header = frame.header
        if header.kind is not Kind.DATA or header.rank != rank or header.timeout_ms == 0:
            text = f"kind {header.kind.name}, rank {header.rank}, timeout {header.timeout_ms} ms"
            raise FrameError(f"the fields ({text}) do not fit rank {rank}")
        if rank in self._waiting or self.outbox[rank]:  # also bounds the outbox
            raise FrameError("the message came before the answer to the last one")
        self._waiting[rank] = frame
        end = self._clock() + header.timeout_ms / 1000
        self.deadline = end if self.deadline is None else min(self.deadline, end)
        for other, theirs in self._waiting.items():
            if theirs.header.place != header.place:
                places = f"{_place(other, theirs.header)}, {_place(rank, header)}"
                self._fail(
                    Kind.MISMATCH, rank, f"{places}: make communicators in the same order on every rank"
                )
                return
        self._advance()

    def _advance(self) -> None:
        """Answers the waiting ranks if the outcome is known."""
        if not self._waiting:
            return
        missing = [rank for rank in range(self._size) if rank not in self._waiting]
        gone = [rank for rank in missing if rank in self._gone]
        if self._failure is not None:
            self._answer_failure()
        elif gone:
            text = "; ".join(self._gone[rank] for rank in gone)
            self._fail(
                Kind.LOST, gone[0], f"{text}, while {_ranks(sorted(self._waiting))} waited in an all_gather"
            )
        elif not missing:
            payloads = [self._waiting[rank].payload for rank in range(self._size)]
            for rank, frame in self._waiting.items():
                for source, payload in enumerate(payloads):
                    self.outbox[rank] += encode(Kind.DATA, source, frame.header.place, payload)
            self._rest()

    def _refuse(self, rank: int, text: str) -> None:
        """Tells `rank` that it broke the format, ignores it from now on, and fails the others."""
        self._waiting.pop(rank, None)
        self._gone[rank] = text
        self.outbox[rank] += encode(Kind.INVALID, rank, (0, 0), _text(text))
        self._fail(Kind.INVALID, rank, text)

    def _fail(self, kind: Kind, rank: int, text: str) -> None:
        if self._failure is None:
            self._failure = (kind, rank, _text(text))
        self._answer_failure()

    def _answer_failure(self) -> None:
        assert self._failure is not None
        kind, culprit, text = self._failure
        for rank, frame in self._waiting.items():
            self.outbox[rank] += encode(kind, culprit, frame.header.place, text)
        self._rest()

    def _rest(self) -> None:
        self._waiting.clear()
        self.deadline = None


def _text(text: str) -> bytes:
    return text[:_MAX_TEXT].encode("utf-8", "replace")


def _place(rank: int, header: Header) -> str:
    return f"rank {rank} is in all_gather {header.sequence} of communicator {header.channel}"


def _ranks(ranks: list[int]) -> str:
    """Returns the ranks in words: 'rank 3', 'ranks 0, 2 and 3'. More than 8 are cut."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 8:
        return f"ranks {', '.join(map(str, ranks[:7]))} and {len(ranks) - 7} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
