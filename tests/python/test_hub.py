"""The messages of `unisono run` and its hub, against hostile bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.bootstrap.hub import (
    HEADER_BYTES,
    MAX_PAYLOAD,
    Decoder,
    Frame,
    FrameError,
    Header,
    Hub,
    Kind,
    encode,
)
from unisono.clock import Clock
from unisono.errors import MismatchError

U32 = st.integers(0, 0xFFFFFFFF)


@settings(max_examples=100)
@given(st.lists(st.tuples(U32, U32, U32, U32, st.binary(max_size=200)), max_size=5), st.data())
def test_messages_come_out_as_they_went_in(
    fields: list[tuple[int, int, int, int, bytes]], data: st.DataObject
) -> None:
    frames = [
        Frame(Header(Kind.DATA, rank, channel, sequence, timeout, len(payload)), payload)
        for rank, channel, sequence, timeout, payload in fields
    ]
    stream = b"".join(encode(h.kind, h.rank, h.place, payload, h.timeout_ms) for h, payload in frames)
    decoder, out = Decoder(), []
    while stream:
        cut = data.draw(st.integers(1, len(stream)))
        out += decoder.feed(stream[:cut])
        stream = stream[cut:]
    assert out == frames and decoder.partial == 0


GOOD = encode(Kind.DATA, 1, (0, 0), b"payload", 1000)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "starts with b'G"),
        (b"\x80\x05", r"starts with b'\\x80"),
        (b"UNSO\x02" + GOOD[5:], "version is 2"),
        (b"UNSO\x01\x09" + GOOD[6:], "kind 9"),
        (b"UNSO\x01\x00" + GOOD[6:], "kind 0"),
        (b"UNSO\x01\x01\x00\x01" + GOOD[8:], "reserved field 1"),
        (GOOD[:24] + b"\xff\xff\xff\xff", "length 4294967295 is above"),
        (GOOD[:24] + (MAX_PAYLOAD + 1).to_bytes(4, "big"), "length 1048577 is above"),
        (GOOD + b"U?", "starts with b'U"),
    ],
    ids=lambda value: value.replace(" ", "_") if isinstance(value, str) else "",
)
def test_a_bad_message_is_refused_at_once(data: bytes, words: str) -> None:
    with pytest.raises(FrameError, match=words):
        Decoder().feed(data)
    with pytest.raises(FrameError, match=words):
        decoder = Decoder()
        for byte in data:
            decoder.feed(bytes([byte]))


def test_a_truncated_message_is_held_not_delivered() -> None:
    for cut in range(len(GOOD)):
        decoder = Decoder()
        assert decoder.feed(GOOD[:cut]) == [] and decoder.partial == cut
    with pytest.raises(FrameError, match="ends after 10 of the 28"):
        Header.unpack(GOOD[:10])
    with pytest.raises(FrameError, match="above the limit"):
        encode(Kind.DATA, 0, (0, 0), bytes(MAX_PAYLOAD + 1))


def _mutated() -> st.SearchStrategy[bytes]:
    """Returns valid messages with a few bytes changed, which get further than noise."""
    message = st.builds(
        encode, st.sampled_from(Kind), st.integers(0, 2), st.tuples(U32, U32), st.binary(max_size=40), U32
    )
    change = st.lists(st.tuples(st.integers(0, 80), st.integers(0, 255)), max_size=2)

    def apply(data: bytes, changes: list[tuple[int, int]]) -> bytes:
        out = bytearray(data)
        for index, value in changes:
            if index < len(out):
                out[index] = value
        return bytes(out)

    return st.builds(apply, message, change) | st.binary(max_size=60) | st.just(GOOD)


@settings(max_examples=300)
@given(st.lists(_mutated(), max_size=6))
def test_the_decoder_raises_nothing_but_frame_errors_and_holds_little(pieces: list[bytes]) -> None:
    decoder = Decoder()
    try:
        for piece in pieces:
            decoder.feed(piece)
    except FrameError:
        return
    assert decoder.partial <= min(HEADER_BYTES + MAX_PAYLOAD, sum(map(len, pieces)))


# The hub


@settings(max_examples=300)
@given(st.lists(_mutated(), max_size=6), st.booleans())
def test_the_others_get_an_answer_after_any_bytes_of_a_hostile_rank(pieces: list[bytes], first: bool) -> None:
    """Ranks 0 and 2 are honest; rank 1 sends anything and ends. Both get the same answer or error."""
    now = [0.0]
    hub = Hub(3, clock=lambda: now[0])
    honest = [encode(Kind.DATA, rank, (0, 0), b"honest", 1000) for rank in range(3)]
    hub.receive(0, honest[0])
    if first:
        hub.receive(2, honest[2])
    for piece in pieces:
        hub.receive(1, piece)
        hub.outbox[1].clear()  # rank 1 reads everything
    hub.lost(1, "exited with status 0")
    if not first:
        hub.receive(2, honest[2])
    now[0] = 1.0
    hub.expire()
    answers = [Decoder().feed(bytes(hub.outbox[rank])) for rank in (0, 2)]
    assert answers[0] == answers[1]
    kinds = [frame.header.kind for frame in answers[0]]
    assert kinds == [Kind.DATA] * 3 or (len(kinds) == 1 and b"rank 1" in answers[0][0].payload), answers


def _hub(size: int) -> tuple[Hub, list[float], Callable[[int], list[Frame]]]:
    now = [100.0]
    hub = Hub(size, clock=lambda: now[0])

    def answer(rank: int) -> list[Frame]:
        frames = Decoder().feed(bytes(hub.outbox[rank]))
        hub.outbox[rank].clear()
        return frames

    return hub, now, answer


def test_a_gap_between_two_looks_counts_little() -> None:
    """This holds however long the process or the machine was stopped."""
    now = [5.0]
    clock = Clock(lambda: now[0])
    for later, counted in ((5.1, 0.1), (5.2, 0.2), (3600.0, 0.4), (3600.05, 0.45)):
        now[0] = later
        assert clock() == pytest.approx(counted)


def test_the_hub_names_who_is_late_and_stays_failed() -> None:
    hub, now, answer = _hub(4)
    hub.receive(1, encode(Kind.DATA, 1, (0, 0), b"", 9000))
    hub.receive(3, encode(Kind.DATA, 3, (0, 0), b"", 2000))
    assert hub.deadline == 102.0
    now[0] = 101.9
    hub.expire()
    assert answer(1) == []
    now[0] = 102.0
    hub.expire()
    (frame,) = answer(1)
    text = b"ranks 0 and 2 did not reach the all_gather that ranks 1 and 3 waited in for 2 s"
    assert (frame.header.kind, frame.payload) == (Kind.TIMEOUT, text)
    hub.receive(0, encode(Kind.DATA, 0, (0, 0), b"", 9000))
    assert [late.payload for late in answer(0)] == [text]


def test_the_hub_finds_ranks_in_different_calls() -> None:
    hub, _, answer = _hub(3)
    hub.receive(0, encode(Kind.DATA, 0, (1, 4), b"", 1000))
    hub.receive(2, encode(Kind.DATA, 2, (0, 4), b"", 1000))
    for rank in (0, 2):
        (frame,) = answer(rank)
        assert frame.header.kind is Kind.MISMATCH and frame.header.kind.error is MismatchError
        assert b"rank 0 is in all_gather 4 of communicator 1, rank 2 is in" in frame.payload


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (encode(Kind.DATA, 0, (0, 0), b"", 1000), b"rank 0"),  # rank 1 says that it is rank 0
        (encode(Kind.DATA, 1, (0, 0), b"", 0), b"timeout 0 ms"),
        (encode(Kind.LOST, 1, (0, 0), b"", 1000), b"kind LOST"),
        (encode(Kind.DATA, 1, (0, 0), b"", 1000) * 2, b"before the answer"),
    ],
)
def test_the_hub_refuses_forbidden_messages(message: bytes, words: bytes) -> None:
    hub, _, answer = _hub(3)
    hub.receive(0, encode(Kind.DATA, 0, (0, 0), b"", 1000))
    hub.receive(1, message)
    assert not hub.listening(1) and hub.listening(0)
    for rank in (0, 1):
        (frame,) = answer(rank)
        assert frame.header.kind is Kind.INVALID and words in frame.payload, frame
        assert frame.payload.startswith(b"rank 1 sent the launcher bytes that are no Unisono message")
    hub.receive(1, b"more")
    assert answer(1) == []


def test_the_hub_says_where_a_rank_ended() -> None:
    hub, _, answer = _hub(12)
    hub.receive(0, encode(Kind.DATA, 0, (0, 0), b"", 1000))
    hub.receive(1, GOOD[:-1])
    hub.lost(1, "was killed by SIGKILL")
    (frame,) = answer(0)
    text = b"rank 1 was killed by SIGKILL, 34 bytes into a message, while rank 0 waited in an all_gather"
    assert (frame.header.kind, frame.payload) == (Kind.LOST, text)
