"""The seal: who may open it, what the server sees, and what its lies do."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest
from hospitals import (
    NAMES,
    PLACE,
    QUESTION,
    RUN,
    consortium,
    four,
    identity,
    openings,
    plan,
    sealed,
    session,
)

from fedtmle_core import seal
from fedtmle_core.errors import DecodeError, InputError
from fedtmle_core.masks import Word, add
from fedtmle_core.plan import Lane, Member
from fedtmle_core.seal import Consortium, Copy, Identity, Opening, Place, Seal, Session, digest

VECTORS = Path(__file__).with_name("seal.json")
LANES = (Lane(1000), Lane(2**60), Lane(3))
VALUES = [(1, 2**50, 0), (-400, 7, 1), (401, -(2**51), -3), (99, 0, 2)]
TOTALS = (101, -(2**50) + 7, 0)


def sent(seals: list[Seal], place: Place = PLACE, values: Sequence[tuple[int, ...]] = VALUES) -> list[bytes]:
    return [each.send(place, LANES, own) for each, own in zip(seals, values, strict=True)]


# ---- Who is there ----


def test_everything_is_made_from_the_seed() -> None:
    one, other = Identity(bytes(32)), Identity(bytes(32))
    assert one.member("a") == other.member("a")
    assert one.sign("x") == other.sign("x")
    assert one.secret("x") == other.secret("x")
    assert (
        len({one.secret("x"), one.secret("y"), one.secret("x", b""), Identity(bytes(31) + b"1").secret("x")})
        == 4
    )
    with pytest.raises(InputError, match="seed"):
        Identity(bytes(31))


def test_a_fingerprint_covers_names_and_keys() -> None:
    names = list(NAMES)
    found = consortium(names)
    assert re.fullmatch(r"(\d{5} ){9}\d{5}", found.fingerprint)
    assert consortium(names[::-1]).fingerprint == found.fingerprint
    swapped = Consortium(
        tuple(replace(member, name=name) for member, name in zip(found.members, names[::-1], strict=True))
    )
    others = [
        swapped,
        consortium(names[:3]),
        consortium([*names, "invented"]),
        *(
            Consortium(
                (
                    replace(found.members[0], **{key: getattr(identity("z").member("z"), key)}),
                    *found.members[1:],
                )
            )
            for key in ("signing", "exchange")
        ),
    ]
    assert len({found.fingerprint, *(other.fingerprint for other in others)}) == 6


def test_a_list_has_no_name_or_key_twice_and_no_weak_key() -> None:
    good = consortium().members
    small_order = bytes(32)
    for extra, why in [
        (good[0], "name of its own"),
        (replace(good[0], name=""), "name of its own"),
        (replace(good[0], name="other"), "same public key"),
        (replace(identity("z").member("z"), exchange=good[0].exchange), "same public key"),
        (replace(identity("z").member("z"), exchange=small_order), "are not keys"),
        (replace(identity("z").member("z"), exchange=b"short"), "are not keys"),
        (replace(identity("z").member("z"), signing=b"short"), "are not keys"),
    ]:
        with pytest.raises(InputError, match=why):
            Consortium((*good, extra))


def test_a_plan_has_hospitals_of_the_list_alone() -> None:
    invented = identity("invented").member("invented")
    with pytest.raises(InputError, match="'invented'"):
        session("north", of=plan(members=(*consortium().members, invented)))
    taken = Member(name="west", signing=invented.signing, exchange=invented.exchange)
    with pytest.raises(InputError, match="'west'"):
        session("north", of=plan(members=(*consortium().members[:3], taken)))
    with pytest.raises(InputError, match="'west' is not in it"):
        session("west", of=plan(NAMES[:3]))


# ---- How a run begins ----


def test_a_nonce_depends_on_plan_run_and_table_alone() -> None:
    base = session("north").opening
    assert base == session("north").opening
    others = [
        session("north", run=b"another run ....").opening,
        session("north", table=b"other rows").opening,
        session("north", of=plan(floor=6)).opening,
        session("south", table=b"rows of north").opening,
    ]
    assert len({base.nonce, *(other.nonce for other in others)}) == 5


def test_every_core_checks_all_openings() -> None:
    sessions = four()
    said = list(openings(sessions))
    roster = sessions[1].settle(said)
    assert roster.names == NAMES
    assert {each.settle(said).digest for each in sessions} == {roster.digest}
    assert sessions[1].settle(said[:3]).digest != roster.digest
    forged = Opening("west", bytes(32), identity("server").sign("opening"))
    stranger = Opening("zero", said[3].nonce, said[3].signature)
    cases = [
        (said[::-1], "order of their names"),
        ([said[0], *said], "order of their names"),
        (said[:2], "fewer hospitals"),
        ([], "fewer hospitals"),
        ([*said[:3], forged], "not signed"),
        ([*said, stranger], "not signed"),
        ([*said[:3], Opening("west", said[3].nonce + b"0", said[3].signature)], "not signed"),
        ([*said[:3], session("west", run=b"another run ....").opening], "not signed"),
        ([*said[:3], session("west", of=plan(floor=6)).opening], "not signed"),
        ([said[0], session("north", table=b"other rows").opening, *said[2:]], "own opening"),
        ([said[0], *said[2:]], "own opening"),
    ]
    for given, why in cases:
        with pytest.raises(DecodeError, match=why):
            sessions[1].settle(given)


def test_a_hospital_that_somebody_invented_is_refused() -> None:
    """The server signs an opening with keys of its own, under a name of the list or a new one."""
    sessions, server = four(), identity("server")
    for name in ("west", "invented"):
        nonce = bytes(32)
        statement = ("opening", consortium().digest, plan().digest, RUN, name, nonce)
        said = (*openings(sessions[:3]), Opening(name, nonce, server.sign(*statement)))
        with pytest.raises(DecodeError, match="not signed"):
            sessions[0].settle(tuple(sorted(said, key=lambda opening: opening.name)))


def test_a_copy_opens_for_its_hospital_in_its_run_alone() -> None:
    sessions = four()
    rosters = [each.settle(openings(sessions)) for each in sessions]
    copies = rosters[0].copies()
    assert [len(roster.copies()) for roster in rosters] == [3, 0, 0, 0]
    assert rosters[1].seal(copies[0])
    fewer = sessions[1].settle(openings(sessions[:3]))
    cases: list[tuple[object, Copy | None]] = [
        (rosters[0], copies[0]),
        (rosters[1], None),
        (rosters[1], copies[1]),
        (fewer, copies[0]),
    ]
    for field in ("sealed", "signature"):
        value = bytearray(getattr(copies[0], field))
        value[-1] ^= 1
        cases.append((rosters[1], msgspec.structs.replace(copies[0], **{field: bytes(value)})))
    short = copies[0].sealed[:-1]
    statement = ("copy of the group key", rosters[0].digest, "east", "north", short)
    cases.append((rosters[1], Copy(short, sessions[0].identity.sign(*statement))))
    for roster, copy in cases:
        with pytest.raises(DecodeError, match="copy"):
            roster.seal(copy)  # type: ignore[attr-defined]


def test_a_copy_needs_the_signature_of_the_first() -> None:
    """Whoever has stolen one hospital's keys still cannot send it a group key."""
    sessions = four()
    rosters = [each.settle(openings(sessions)) for each in sessions]
    copy = rosters[0].copies()[0]
    statement = ("copy of the group key", rosters[1].digest, "east", "north", copy.sealed)
    with pytest.raises(DecodeError, match="copy"):
        rosters[1].seal(Copy(copy.sealed, sessions[1].identity.sign(*statement)))


# ---- A round ----


def test_hospitals_read_the_totals_and_bytes_repeat() -> None:
    seals, again = sealed(four()), sealed(four())
    messages = sent(seals)
    assert sent(again) == messages
    for each in seals:
        assert each.read(PLACE, LANES, add(messages)) == TOTALS


@pytest.mark.parametrize("names", [NAMES[:3], NAMES[1:], NAMES])
def test_a_roster_may_lack_hospitals(names: tuple[str, ...]) -> None:
    seals = sealed([session(name) for name in names])
    messages = sent(seals, values=VALUES[: len(names)])
    expected = tuple(map(sum, zip(*VALUES[: len(names)], strict=True)))
    assert all(each.read(PLACE, LANES, add(messages)) == expected for each in seals)


@dataclass(frozen=True)
class Stub:
    """What the seal reads of a plan."""

    members: tuple[Member, ...]
    digest: bytes = bytes(range(32))
    min_hospitals: int = 3


def vectors() -> dict[str, object]:
    """Return the bytes of a small run, as text. `python core/tests/test_seal.py` records them."""
    stub, all_listed = Stub(consortium(NAMES[:3]).members), consortium(NAMES[:3])
    sessions = [
        Session(identity(name), name, all_listed, stub, RUN, b"rows")  # type: ignore[arg-type]
        for name in NAMES[:3]
    ]
    roster, seals = sessions[0].settle(openings(sessions)), sealed(sessions)
    messages = sent(seals, values=VALUES[:3])
    draws = seals[0].below(QUESTION)
    return {
        "seeds": {name: hashlib.sha256(name.encode()).hexdigest() for name in NAMES[:3]},
        "fingerprint": all_listed.fingerprint,
        "opening": msgspec.msgpack.encode(sessions[0].opening).hex(),
        "roster": roster.digest.hex(),
        "copy": msgspec.msgpack.encode(roster.copies()[0]).hex(),
        "answers": [message.hex() for message in messages],
        "sum": add(messages).hex(),
        "refusal": seals[1].refuse(PLACE, LANES, Word.REFUSED).hex(),
        "noise": [draws(1000) for _ in range(5)],
        "commitment": seals[0].commitment(b"document").hex(),
    }


def test_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another implementation must give these bytes; a change of them needs another `RELEASE`."""
    monkeypatch.setattr("fedtmle_core.seal.__version__", "0")
    assert vectors() == json.loads(VECTORS.read_text())


def uniform(data: bytes) -> float:
    """Return the chi-square statistic of bytes against the uniform distribution, standardised."""
    counts, expected = Counter(data), len(data) / 256
    statistic = sum((counts[byte] - expected) ** 2 / expected for byte in range(256))
    return float((statistic - 255) / (2 * 255) ** 0.5)


def test_the_server_sees_uniform_bytes() -> None:
    """Each answer and each sum is uniform over many rounds, whether values are zero or large."""
    seals = sealed(four())
    for values in ([(0, 0, 0)] * 4, [(250, 2**58, 0)] * 4):
        seen: dict[object, bytearray] = {}
        for number in range(1500):
            place = replace(PLACE, round=number)
            messages = sent(seals, place, values)
            summed = add(messages)
            for key, data in [*enumerate(messages), ("sum", summed)]:
                seen.setdefault(key, bytearray()).extend(data)
            frame = seals[0].frame(LANES)
            stream = int.from_bytes(seals[1]._stream(place, frame), "little")
            opened = (int.from_bytes(summed, "little") - stream) % frame.modulus
            seen.setdefault("opened", bytearray()).extend(opened.to_bytes(frame.size, "little"))
        # The premise: this test would notice bytes that are not uniform, and there are enough of them.
        assert uniform(bytes(seen.pop("opened"))) > 100
        assert all(len(data) > 40_000 for data in seen.values())
        assert all(abs(uniform(bytes(data))) < 5 for data in seen.values())


def test_two_data_sets_give_equal_lengths_and_unrelated_bytes() -> None:
    one = sealed(four())
    other = sealed([session(name, table=b"other rows of " + name.encode()) for name in NAMES])
    agree = total = 0
    for number in range(300):
        place = replace(PLACE, round=number)
        for first, second in zip(sent(one, place), sent(other, place, [(0, 0, 0)] * 4), strict=True):
            assert len(first) == len(second)
            agree += sum(a == b for a, b in zip(first, second, strict=True))
            total += len(first)
    assert total > 40_000
    assert abs(agree - total / 256) < 5 * (total / 256) ** 0.5


def test_one_message_under_other_rows_is_unrelated_although_the_others_have_theirs() -> None:
    """A table that changes behind a lost journal changes every key, so that no mask covers two texts."""
    changed = [session(NAMES[0]), session(NAMES[1], table=b"other rows"), *map(session, NAMES[2:])]
    one, other = sealed(four()), sealed(changed)
    for first, second in zip(sent(one), sent(other), strict=True):
        assert sum(a == b for a, b in zip(first, second, strict=True)) <= 3


def unreadable(seals: list[Seal], place: Place, summed: bytes) -> None:
    for each in seals:
        with pytest.raises(DecodeError):
            each.read(place, LANES, summed)


def test_a_server_that_drops_repeats_or_changes_answers_is_noticed() -> None:
    seals, draws = sealed(four()), random.Random(2)  # noqa: S311
    messages = sent(seals)
    earlier = sent(seals, replace(PLACE, round=2))
    size = len(messages[0])
    cases = [
        messages[:3],
        [*messages, messages[0]],
        [*messages[:3], messages[0]],
        [*messages[:3], earlier[3]],
        [*messages, (1).to_bytes(size, "little")],
        [*messages, (1 << 8 * size - 1).to_bytes(size, "little")],
        *([*messages, draws.randbytes(size)] for _ in range(50)),
    ]
    for given in cases:
        unreadable(seals, PLACE, add(given))
    unreadable(seals, PLACE, add(earlier))
    unreadable(seals, replace(PLACE, round=2), add(messages))
    unreadable(seals, PLACE, add(messages)[:-1])
    unreadable(seals, PLACE, add(messages) + b"\0")
    assert seals[0].read(PLACE, LANES, add(messages[::-1])) == TOTALS  # a sum has no order


def test_two_stories_or_two_questions_give_noise_to_everybody() -> None:
    seals = sealed(four())
    for other in (
        replace(PLACE, heard=b"another story"),
        replace(PLACE, question=digest("another question")),
        replace(PLACE, round=4),
    ):
        for odd in range(4):
            messages = [
                each.send(other if place == odd else PLACE, LANES, own)
                for place, (each, own) in enumerate(zip(seals, VALUES, strict=True))
            ]
            for place in (PLACE, other):
                unreadable(seals, place, add(messages))


def test_a_hospital_that_has_the_group_key_reads_no_other_hospital() -> None:
    """It takes the stream away from one answer; what is left is masked by the other honest hospital."""
    seen = bytearray()
    seals = sealed(four())
    for number in range(1500):
        place = replace(PLACE, round=number)
        frame = seals[0].frame(LANES)
        message = int.from_bytes(seals[0].send(place, LANES, (0, 0, 0)), "little")
        message -= int.from_bytes(seals[3]._stream(place, frame), "little")
        # The broken hospital is west: it also knows the mask that it shares with east.
        shared = Seal(replace(seals[3]._roster), seals[3]._group)
        shared._pairs = [shared._pairs[0]]
        message += int.from_bytes(shared._masked(place, frame, 0), "little")
        seen += (message % frame.modulus).to_bytes(frame.size, "little")
    assert abs(uniform(bytes(seen))) < 5


def test_a_refusal_is_read_by_hospitals_and_looks_like_an_answer() -> None:
    seals, seen = sealed(four()), bytearray()
    for number in range(1500):
        place = replace(PLACE, round=number)
        messages = sent(seals, place)
        word = Word(number % 3)
        refused = seals[2].refuse(place, LANES, word)
        assert refused == seals[2].refuse(place, LANES, word)
        assert len(refused) == len(messages[2])
        messages[2] = refused
        assert [each.read(place, LANES, add(messages)) for each in seals] == [word] * 4
        seen += refused
    assert abs(uniform(bytes(seen))) < 5


def test_noise_is_the_same_for_the_same_question() -> None:
    """It depends on no broadcast, so that a hospital that lost its journal adds the same noise again."""
    seals, again = sealed(four()), sealed(four())
    limits = [1, 2, 3, 1000, 2**70] * 40
    first = [seals[0].below(QUESTION)(limit) for limit in limits]
    draws = seals[0].below(QUESTION)
    drawn = [draws(limit) for limit in limits]
    draws = again[0].below(QUESTION)
    assert drawn == [draws(limit) for limit in limits]
    assert first[:5] * 40 == first  # each call starts the source anew
    others = [seals[1].below(QUESTION), seals[0].below(digest("another question"))]
    assert all([other(limit) for limit in limits] != drawn for other in others)
    fewer = sealed([session(name) for name in NAMES[:3]])[0].below(QUESTION)
    assert [fewer(limit) for limit in limits] != drawn
    moved = sealed([*four()[:3], session("west", table=b"other")])[0].below(QUESTION)
    assert [moved(limit) for limit in limits] == drawn  # another hospital cannot make this one draw again


def test_draws_are_uniform() -> None:
    draws = sealed(four())[0].below(QUESTION)
    counts = Counter(draws(5) for _ in range(20_000))
    assert set(counts) == set(range(5))
    statistic = sum((count - 4000) ** 2 / 4000 for count in counts.values())
    assert statistic < 30  # the 1e-5 quantile of chi-square with 4 degrees of freedom is 28.5


def test_a_commitment_is_to_the_result_and_the_run() -> None:
    seals = sealed(four())
    assert {each.commitment(b"result") for each in seals} == {seals[0].commitment(b"result")}
    assert seals[0].commitment(b"result") != seals[0].commitment(b"other")
    other = sealed([session(name, run=b"another run ....") for name in NAMES])
    assert seals[0].commitment(b"result") != other[0].commitment(b"result")


if __name__ == "__main__":
    seal.__version__ = "0"  # type: ignore[attr-defined]
    VECTORS.write_text(json.dumps(vectors(), indent=1) + "\n")
