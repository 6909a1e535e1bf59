"""Strategies for decoders' tests: encoded examples with a little damage, so that many still decode."""

from __future__ import annotations

from hypothesis import strategies as st

from fedtmle.protocol.codes import Bits


def flipped(example: bytes, *, keep: int = 0) -> st.SearchStrategy[bytes]:
    """The example with one bit flipped, but none in its first ``keep`` bytes."""
    whole = int.from_bytes(example, "big")
    bits = st.integers(0, max(0, 8 * (len(example) - keep) - 1))
    return bits.map(lambda bit: (whole ^ 1 << bit).to_bytes(len(example), "big")) if example else st.just(b"")


def spliced(example: bytes) -> st.SearchStrategy[bytes]:
    """The example with some bytes changed, put in or left out."""
    change = st.tuples(st.integers(0, len(example)), st.integers(0, 3), st.binary(max_size=3))

    def apply(changes: list[tuple[int, int, bytes]]) -> bytes:
        data = example
        for start, removed, put in changes:
            data = data[:start] + put + data[start + removed :]
        return data

    return st.lists(change, max_size=3).map(apply)


@st.composite
def damaged(draw: st.DrawFn, example: bytes, *, keep: int = 0) -> bytes:
    """The example as it is, in a third of the draws; with one bit flipped or bytes changed; or any bytes."""
    if draw(st.integers(0, 2)) == 0:
        return example
    return draw(st.one_of(flipped(example, keep=keep), spliced(example), st.binary(max_size=120)))


@st.composite
def damaged_bits(draw: st.DrawFn, example: Bits) -> Bits:
    """The bit string as it is, with one bit flipped in any place but the padding, or any bits."""
    kind = draw(st.integers(0, 4))
    if kind == 0 or not example.length:
        return example
    if kind == 1:
        data = draw(st.binary(max_size=60))
        return Bits(max(0, 8 * len(data) - draw(st.integers(0, 7))), data)
    at = draw(st.integers(0, example.length - 1))
    changed = bytearray(example.data)
    changed[at // 8] ^= 128 >> at % 8
    return Bits(example.length, bytes(changed))
