"""The core of one hospital in one run: `hear` a request, `answer` what the hospital's program asks.

    reply = core.hear(request)          what the server sent; a `Reply` goes back to it at once,
    totals -> the program               `Totals` go to the program, and its question, or its result,
    reply = core.answer(question)       comes back: this reply goes to the server

That is all. Between the two stand, in this order: the table of states, the keys, the check of the totals, the
judgements, the plan's limits, the sums over records, noise, masks, and the journal.

**Judgements.** Before the first question, and where the program names terms, the core runs a judgement by
itself (`judgement`): its rounds look like all others, and their totals reach no program. What a core finds of
its own people travels in its next answer: one that refuses puts noise in place of the answer, and a sealed
word, which the cores read. So nothing of that round is readable, the server cannot tell a refusal from an
answer, nobody learns whose it was, and the run ends for all with one code. An error in computing, which may
depend on records, ends it in the same way. If a judgement needs finer products, the question is asked again.

**Crashes.** A core that starts with a journal takes the recorded requests again (`recorder`) and gives the
recorded replies without a pass over the records, but for what a judgement keeps. Without its journal it gives
the same bytes too: everything is a function of keys, plan, run, records and what was heard. With other
records its own opening has another nonce, and the run does not go on.

**Charges.** Refusals that depend on records are charged to the plan's author: each says something about
them. A broken seal or a message out of order says nothing, and a server could make as many as it likes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, final

from fedtmle_core import messages
from fedtmle_core.around import Asked, Heard, Hospital, Named, Records, Reply, Rules, Totals
from fedtmle_core.errors import DecodeError, FedTMLEError, InputError, JournalError
from fedtmle_core.judgement import Judge, Outcome, Step
from fedtmle_core.masks import Word
from fedtmle_core.messages import (
    FORMAT,
    RUN_BYTES,
    Answered,
    Ask,
    Close,
    Closed,
    Code,
    Finished,
    Keys,
    Open,
    Opened,
    Refused,
    Settle,
    Settled,
    result_statement,
)
from fedtmle_core.noise import discrete_gaussian
from fedtmle_core.plan import Lane, Plan, Question
from fedtmle_core.recorder import Record, Recorder
from fedtmle_core.seal import Place, Roster, Seal, Session, digest
from fedtmle_core.state import Message, State, after

T = TypeVar("T")

SENDS = (Step.COUNTS, Step.COARSE, Step.FINE)  # the rounds of a judgement; verdicts travel in answers
VERDICTS = {Step.COARSE: Step.COARSE_VERDICTS, Step.FINE: Step.FINE_VERDICTS}
WORDS = {Outcome.REFUSED: Word.REFUSED, Outcome.UNCLEAR: Word.UNCLEAR}
CODES = {Word.REFUSED: Code.PEOPLE, Word.FAILED: Code.FAILED}


class _StrayError(Exception):
    """A request is refused, and nothing changes."""

    def __init__(self, code: Code, why: Exception | None = None) -> None:
        super().__init__(code)
        self.code, self.why = code, why


class _EndError(_StrayError):
    """The run ends here."""


@final
@dataclass(frozen=True)
class _Sending:
    """What is sent in a round: the digest and the lanes of what is asked, and how to compute the values.

    ``word`` takes the place of the values. ``keeps`` says that the values are needed later.
    """

    question: bytes
    lanes: tuple[Lane, ...]
    compute: Callable[[], Sequence[int]]
    asked: str
    word: Word | None
    keeps: bool = False


@final
class Core:
    """One hospital's end of one run. `hear` and `answer` are its whole interface.

    ``error`` says why something was refused or failed. It may depend on records, and is for the owner.
    """

    def __init__(self, hospital: Hospital, plan: Plan, records: Records, rules: Rules) -> None:
        self.error: Exception | None = None
        self._hospital, self._plan, self._records, self._rules = hospital, plan, records, rules
        self._recorder = Recorder(hospital, plan, records.digest)
        self._state = State.NEW
        self._session: Session | None = None
        self._roster: Roster | None = None
        self._seal: Seal | None = None
        self._round, self._heard = 0, b""  # the last round, and the digest of all broadcasts
        self._place, self._lanes = Place(0, b"", b""), tuple[Lane, ...]()
        self._word: Word | None = None  # what this core has put in place of its last answer
        self._judge: Judge | None = None
        self._is_judged = False  # whether the judgement before the fits has begun
        self._named = tuple[bytes, ...]()  # digests of what the last judgement is about; none: the plan
        self._question: Question | None = None  # the program's, not answered yet
        self._exact = self._published = b""  # the result
        self._request = b""  # the last one that was admitted,
        self._outcome: Heard | None = None  # and what came of it
        self._numbers = self._bits = 0
        self._is_charged = self._is_broken = self._has_failed = False

    # ---- Hearing ----

    def hear(self, request: bytes) -> Heard:
        """Return what follows from a request; the same request again has the same outcome."""
        if self._outcome is not None and request == self._request:
            return self._outcome
        try:
            message = self._in_order(request)
            self._outcome = self._admitted(request, message)
        except _EndError as end:
            self._request = request
            return self._ended(end)
        except _StrayError as stray:
            return self._stray(stray)
        except JournalError as error:
            return self._broken(error)
        return self._outcome

    def _in_order(self, request: bytes) -> messages.Request:
        """Return a request that is the next one of this run."""
        if self._is_broken:
            raise JournalError("this core cannot go on without a restart")
        try:
            message = messages.decode_request(request)
        except DecodeError as error:
            raise _StrayError(Code.MALFORMED, error) from None
        recorded = self._recorder.next
        is_next = after(self._state, message) is not None
        is_next &= recorded is None or request == recorded.request
        if isinstance(message, Open):
            is_next &= message.format == FORMAT and len(message.run) == RUN_BYTES
        else:
            is_next &= self._session is not None and message.run == self._session.run
        if isinstance(message, Ask):
            is_next &= message.round == self._round
        if not is_next:
            raise _StrayError(Code.ORDER)
        return message

    def _admitted(self, request: bytes, message: messages.Request) -> Heard:
        """Return what follows from a request that is in order; until `Keys` a bad one may be sent anew."""
        match message:
            case Open():
                reply: messages.Reply = self._open(message)
            case Settle():
                reply = self._settle(message)
            case Keys():
                self._unlock(message)
                self._go_on(request, message)
                return Totals(0)
            case Ask():
                self._go_on(request, message)
                return self._read(message)
            case Close():
                self._go_on(request, message)
                return self._say(self._close(message))
        self._go_on(request, message)
        return self._say(reply)

    def _go_on(self, request: bytes, message: Message) -> None:
        """Admit a request. If it ended the run before a restart, it does so again."""
        self._move(message)
        self._request = request
        recorded = self._recorder.next
        if recorded is not None:
            reply = messages.decode_reply(recorded.reply)
            if isinstance(reply, Refused):
                raise _EndError(reply.code)

    def _open(self, message: Open) -> Opened:
        hospital = self._hospital
        if message.plan != self._plan.digest:
            raise _StrayError(Code.PLAN)
        why = "" if self._recorder.next is not None else hospital.office.refuses(self._plan)
        if why:
            raise _StrayError(Code.PLAN, InputError(why))
        self._session = Session(
            hospital.identity,
            hospital.name,
            hospital.consortium,
            self._plan,
            message.run,
            self._records.digest,
        )
        self._recorder.begin(message.run)
        return Opened(self._session.opening)

    def _settle(self, message: Settle) -> Settled:
        session = _given(self._session)
        try:
            roster = session.settle(message.openings)
        except DecodeError as error:
            raise _StrayError(Code.PLAN, error) from None
        if not self._hospital.office.settles(self._plan, session.run, roster.digest):
            raise _StrayError(Code.PLAN, InputError("this plan has had other hospitals before"))
        self._roster, self._heard = roster, roster.digest
        return Settled(roster.copies())

    def _unlock(self, message: Keys) -> None:
        try:
            self._seal = _given(self._roster).seal(message.copy)
        except DecodeError as error:
            raise _StrayError(Code.SEAL, error) from None

    def _read(self, message: Ask) -> Heard:
        """Read the totals of a round, and return what follows from them."""
        read: tuple[int, ...] | Word | None
        try:
            read = _given(self._seal).read(self._place, self._lanes, message.summed)
        except DecodeError as error:
            self.error, read = error, None
        self._heard = digest("heard", self._heard, message.round, message.summed)
        for word in (self._word, read):  # a core that has refused ends the run, whatever it is told
            if isinstance(word, Word) and word in CODES:
                raise _EndError(CODES[word], self.error)
        judge = self._judge
        has_verdict = judge is not None and judge.step not in SENDS
        if read is None or (isinstance(read, Word) and not has_verdict) or self._word not in (None, read):
            raise _EndError(Code.SEAL, self.error)
        if isinstance(read, Word):  # somebody's judgement is unclear
            _given(judge).hear((0, 1))
            return self._next()
        if judge is None or has_verdict:
            # All have answered: nobody refused, and a judgement that waited for that is over.
            shown = self._rules.shown(_given(self._question), read)
            self._judge = self._question = None
            return Totals(message.round, shown)
        self._judged(judge, read)
        if judge.step in VERDICTS.values() and self._question is None:
            return Totals(message.round)
        return self._next()

    def _judged(self, judge: Judge, read: tuple[int, ...]) -> None:
        """Let a judgement hear its totals. If that fails, it must not show before the next answer."""
        following = VERDICTS.get(judge.step, Step.REFUSED)
        try:
            judge.hear(read)
        except Exception as error:  # whatever went wrong depends on records
            self.error, self._has_failed = error, True
            judge.step = following

    # ---- Answering ----

    def answer(self, asked: Asked) -> bytes:
        """Return the reply to the request that was heard last, from what the program asks next."""
        if self._state is not State.ASKED or not isinstance(self._outcome, Totals):
            raise InputError("the core is asked for an answer, but no request waits for one")
        try:
            self._outcome = self._answered(asked)
        except _EndError as end:
            return self._ended(end).data
        except JournalError as error:
            return self._broken(error).data
        except FedTMLEError as error:  # the rules': it depends on the plan and on totals alone
            return self._ended(_EndError(Code.PLAN, error)).data
        return self._outcome.data

    def _answered(self, asked: Asked) -> Reply:
        if self._recorder.next is None and self._hospital.office.has_withdrawn(self._plan):
            raise _EndError(Code.PLAN, InputError("the owner has withdrawn the approval"))
        if isinstance(asked, Question):
            self._rules.admit(asked)
            if not self._is_judged:
                self._judge, self._is_judged = self._rules.before_fits(self._hospitals), True
            self._question = asked
            return self._next()
        if self._judge is not None or not self._is_judged:
            raise InputError("a program asks a question first, and after it has named terms")
        if isinstance(asked, Named):
            self._judge = self._rules.before_targeting(asked.terms, self._hospitals)
            self._named = tuple(term.digest for term in asked.terms)
            return self._next()
        self._exact, self._published = asked.exact, self._rules.publish(asked.exact)
        return self._say(Finished(self._round, _given(self._seal).commitment(asked.exact)))

    def _next(self) -> Reply:
        """Send what comes next: a round of the judgement, or the answer to the program's question."""
        self._round += 1
        sending = self._sending()
        if self._round > self._plan.most_rounds or self._numbers > self._plan.most_numbers:
            raise _EndError(Code.PLAN, InputError("the program asks for more than the plan allows"))
        self._place = Place(self._round, self._heard, sending.question)
        self._lanes = sending.lanes
        entry = self._recorder.next
        if entry is None:
            sealed, self._word = self._sealed(sending)
            return self._say(Answered(self._round, sealed), sending)
        if entry.question != sending.question:
            raise JournalError("the program asks for something else than before the restart")
        self._word = entry.word
        if sending.keeps and self._word is None:
            sending.compute()
        return self._say(messages.decode_reply(entry.reply), sending)

    def _sending(self) -> _Sending:
        judge, question = self._judge, self._question
        word = Word.FAILED if self._has_failed else None
        if judge is not None and judge.step not in VERDICTS.values():
            if judge.step not in SENDS:
                # Counts that refuse the study are followed by what would come next, with the word.
                word, judge = word or Word.REFUSED, replace(judge, step=Step.COARSE)
            about = digest("judgement", self._named, judge.step.name)
            lanes = tuple(map(Lane, judge.lanes()))
            return _Sending(about, lanes, judge.answer, judge.step.value, word, keeps=True)
        question = _given(question)
        if judge is not None:
            word = word or WORDS.get(judge.verdict.outcome)
        lanes = question.lanes(self._plan)
        self._numbers += len(lanes)
        asked = ", ".join(type(block).__name__.lower() for block in question.blocks)
        return _Sending(question.digest, lanes, lambda: self._sums(question), asked, word)

    def _sealed(self, sending: _Sending) -> tuple[bytes, Word | None]:
        """Return the sealed answer; noise with a word if this core refuses, or cannot compute it."""
        seal, word, values = _given(self._seal), sending.word, tuple[int, ...]()
        try:
            values = tuple(sending.compute())  # if it refuses too: the time must not show it
        except Exception as error:  # whatever went wrong depends on records
            self.error, word = error, word or Word.FAILED
        if word is None:
            return seal.send(self._place, self._lanes, values), None
        if word in CODES:
            self._charge()
        return seal.refuse(self._place, self._lanes, word), word

    def _sums(self, question: Question) -> Sequence[int]:
        """Return the question's integers, with this hospital's share of the noise if it asks for any."""
        values = self._records.answer(question, self._plan)
        if question.noise is None:
            return values
        below = _given(self._seal).below(question.digest)
        return [value + discrete_gaussian(question.noise, below) for value in values]

    def _close(self, message: Close) -> Closed:
        """Sign what is published, if all hospitals that have a result have the same."""
        session, roster = _given(self._session), _given(self._roster)
        names = [commitment.name for commitment in message.commitments]
        own = _given(self._seal).commitment(self._exact)
        if (
            names != [name for name in roster.names if name in names]
            or session.name not in names
            or len(names) < self._plan.min_hospitals
            or any(commitment.value != own for commitment in message.commitments)
        ):
            raise _EndError(Code.SEAL)
        statement = result_statement(self._plan.digest, session.run, names, self._published)
        document = self._published if session.name == names[0] else b""
        return Closed(session.identity.sign(*statement), document)

    # ---- Saying, and ending ----

    @property
    def _hospitals(self) -> int:
        return len(_given(self._roster).names)

    def _move(self, message: Message) -> None:
        self._state = _given(after(self._state, message))

    def _say(self, reply: messages.Reply, sending: _Sending | None = None, note: str = "") -> Reply:
        """Record a reply to the last request, and only then return it."""
        self._move(reply)
        if isinstance(reply, Answered):
            self._bits += 8 * len(reply.sealed)
        if sending is not None and self._word is Word.FAILED:
            note = str(self.error)
        elif sending is not None and self._word is not None:
            note = _given(self._judge).verdict.remedy
        data = messages.encode(reply)
        question, word = (b"", None) if sending is None else (sending.question, self._word)
        record = Record(self._request, data, question, word)
        asked = "" if sending is None else sending.asked
        self._recorder.keep(record, asked=asked, numbers=self._numbers, bits=self._bits, note=note)
        return Reply(data)

    def _ended(self, end: _EndError) -> Reply:
        """End the run with a code."""
        self.error = end.why or self.error
        try:
            if end.code in CODES.values():
                self._charge()
            self._outcome = self._say(Refused(end.code), note=str(self.error or ""))
        except JournalError as error:
            return self._broken(error)
        return self._outcome

    def _stray(self, stray: _StrayError) -> Reply:
        """Refuse a request that changes nothing."""
        self.error = stray.why or self.error
        try:
            self._recorder.stray(stray.code)
        except JournalError as error:
            return self._broken(error)
        return Reply(messages.encode(Refused(stray.code)))

    def _broken(self, error: JournalError) -> Reply:
        """Refuse everything until a restart: what this core has done may not be in its journal."""
        if not self._is_broken:
            self.error, self._is_broken, self._outcome = error, True, None
        return Reply(messages.encode(Refused(Code.FAILED)))

    def _charge(self) -> None:
        """Charge the plan's author, once in a run."""
        if not self._is_charged:
            self._hospital.office.charge(self._plan)
            self._is_charged = True


def _given(value: T | None) -> T:
    """Return what the table of states says is there by now."""
    if value is None:
        raise AssertionError("the table of states has let something out of order through")
    return value
