"""Clusters in more than one silo: how they are found, and what that discloses.

A variance by cluster needs the sum of D over *all* of a cluster's rows. If the
rows of a cluster are in two silos and are treated as two clusters, the products between its two parts are
lost, and the standard error is wrong.

A study declares one of these with ``cluster_scope``:

* "silo": an identifier means nothing elsewhere. Nothing is compared, nothing is sent.
* "shared": the same identifier is the same cluster. Each silo sends the digests of its identifiers, once;
  the server tells every silo how many clusters are in more than one silo. If there is any, the run stops.
* "spanning": the same, but such clusters are allowed. Their digests are broadcast, and the closing message
  carries each one's sums, added over silos (`targets.effects.moments`). A silo's guard refuses if its part
  of such a cluster is smaller than the silo's smallest cell: the sum over one row is that row's.

"shared" and "spanning" disclose to the server how many clusters each silo has, and how many any two silos
share. They disclose to each silo how many clusters are shared ("spanning": which of its own).
A digest has 128 bits, so that none collide by chance. Identifiers themselves never leave a silo, but whoever
has a digest can test guesses at its identifier: all numbers from 1 to a million take a second.
Therefore a silo file may give the column a ``secret`` that the hospitals share and the server does not know;
the digests are then keyed with it where the records are read. If silos use
different secrets, the run is refused, because their digests would never match.
"""

from __future__ import annotations

import hmac
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import final

from fedtmle.errors import DataError, DecodeError, InputError
from fedtmle.model.table import Table
from fedtmle.protocol.codes import AbstractCode, BitReader, BitWriter, Integers, Nothing, read_count
from fedtmle.protocol.query import AbstractQuery, AbstractTotals, Local
from fedtmle.targets.effects.prepare import DIGEST, cluster_digest

FINGERPRINT = 4  # bytes that distinguish one secret from another
MOST_CLUSTERS = 1 << 24
MOST_SPANNING = 1 << 12  # each adds its own sums to the closing message
_KEYED = "keyed:"

Digests = tuple[bytes, ...]


def keyed(label: str, secret: str) -> str:
    """Return an identifier as a keyed digest, behind a fingerprint of the secret."""
    key = secret.encode()
    mark = hmac.digest(key, b"fedtmle fingerprint", "sha256")[:FINGERPRINT].hex()
    return f"{_KEYED}{mark}:{hmac.digest(key, b'id:' + label.encode(), 'sha256')[:DIGEST].hex()}"


@dataclass(frozen=True, kw_only=True)
class Clusters:
    """One silo's clusters: the fingerprint of its secret (zeros without one), and the digests, sorted."""

    fingerprint: bytes
    digests: Digests


@final
@dataclass(frozen=True)
class DigestsCode(AbstractCode[Digests]):
    """A count of at most ``most`` and so many digests, sorted."""

    numbers = 0  # unknown: one digest per cluster of the silo

    most: int

    def write(self, value: Digests, out: BitWriter) -> None:
        out.gamma((len(value),))
        # Append all digests as one number: appending one by one would copy the earlier ones each time.
        out.uint(int.from_bytes(b"".join(value), "big"), 8 * DIGEST * len(value))

    def read(self, bits: BitReader) -> Digests:
        count = read_count(bits, self.most)
        data = bits.uint(8 * DIGEST * count).to_bytes(DIGEST * count, "big")
        digests = tuple(data[k : k + DIGEST] for k in range(0, len(data), DIGEST))
        if list(digests) != sorted(set(digests)):
            raise DecodeError("clusters are not sorted, or repeat")
        return digests


@final
@dataclass(frozen=True)
class ClustersCode(AbstractCode[Clusters]):
    """The fingerprint of the secret, then the digests."""

    numbers = 0

    digests: DigestsCode = DigestsCode(MOST_CLUSTERS)

    def write(self, value: Clusters, out: BitWriter) -> None:
        out.uint(int.from_bytes(value.fingerprint, "big"), 8 * FINGERPRINT)
        self.digests.write(value.digests, out)

    def read(self, bits: BitReader) -> Clusters:
        mark = bits.uint(8 * FINGERPRINT).to_bytes(FINGERPRINT, "big")
        return Clusters(fingerprint=mark, digests=self.digests.read(bits))


@final
@dataclass(frozen=True, kw_only=True)
class ClustersQuery(AbstractQuery[Clusters, Digests]):
    """Silos send the digests of all clusters; those in more than one silo are broadcast, or stop the run."""

    open_consent = "allow_open"

    column: str
    spanning: bool  # whether a cluster may be in more than one silo

    @property
    def explanation(self) -> str:
        return f"a digest of each identifier in {self.column}, to see which clusters other silos have too"

    @property
    def answer_code(self) -> ClustersCode:
        return ClustersCode()

    @property
    def pooled_code(self) -> DigestsCode:
        return DigestsCode(MOST_SPANNING if self.spanning else 0)

    def answer(self, local: Local) -> Clusters:
        return local.evaluate(self.of)

    def of(self, table: Table) -> Clusters:
        """Return the clusters of one table."""
        labels = table.factors[self.column].levels
        if len(labels) > MOST_CLUSTERS:
            raise DataError(f"column '{self.column}' has more than {MOST_CLUSTERS} clusters")
        marks = {bytes.fromhex(label.split(":")[1]) for label in labels if label.startswith(_KEYED)}
        return Clusters(
            fingerprint=next(iter(marks), bytes(FINGERPRINT)),
            digests=tuple(sorted(map(cluster_digest, labels))),
        )

    def pool(self, answers: Mapping[str, Clusters], sizes: Mapping[str, int]) -> Digests:
        self._check(answers)
        silos = Counter(digest for clusters in answers.values() for digest in clusters.digests)
        shared = tuple(sorted(digest for digest, count in silos.items() if count > 1))
        if shared and not self.spanning:
            raise InputError(self._refusal(answers, len(shared)))
        if len(shared) > MOST_SPANNING:
            raise InputError(
                f"cluster: {len(shared)} clusters of '{self.column}' are in more than one silo, more than "
                f"{MOST_SPANNING}; bring the rows of each to one silo"
            )
        return shared

    def _check(self, answers: Mapping[str, Clusters]) -> None:
        """Refuse identifiers that are keyed with different secrets."""
        by_mark: dict[bytes, str] = {}
        for silo, clusters in answers.items():
            by_mark.setdefault(clusters.fingerprint, silo)
        if len(by_mark) > 1:
            one, other = list(by_mark.values())[:2]
            raise InputError(
                f"cluster: silos '{one}' and '{other}' keyed column '{self.column}' with different secrets, "
                "or one without; give all silo files the same"
            )

    def _refusal(self, answers: Mapping[str, Clusters], count: int) -> str:
        pairs = combinations(answers.items(), 2)
        shared = {(a, b): len(set(one.digests) & set(other.digests)) for (a, one), (b, other) in pairs}
        (a, b), most = max(shared.items(), key=lambda item: item[1])
        return (
            f"cluster: {count} cluster(s) of '{self.column}' are in more than one silo, {most} of them in "
            f"'{a}' and '{b}'. If each silo numbers its own clusters, declare cluster_scope = \"silo\"; if "
            'they are the same clusters, bring the rows of each to one silo, or declare "spanning"'
        )


@final
@dataclass(frozen=True, kw_only=True)
class SpanningQuery(AbstractTotals[None, None]):
    """Ask each silo to agree to add its parts of the clusters that span silos; a silo that may not, refuses.

    No bit is sent: to answer is to agree. The sum over a part of a few rows would disclose each of them,
    and so would the sum over all rows less the parts, if few are in none.
    """

    floors = ("min_cell",)
    lanes = ()

    column: str
    spanning: Digests

    @property
    def explanation(self) -> str:
        return f"that the silo's part of each cluster of {self.column} that others have too is large enough"

    @property
    def answer_code(self) -> Nothing:
        return Nothing(numbers=1)  # discloses that the silo's parts are large enough

    @property
    def pooled_code(self) -> Nothing:
        return Nothing()

    def people(self, local: Local) -> Iterable[int]:
        return local.evaluate(self._parts)

    def _parts(self, table: Table) -> list[int]:
        """Return how many rows the silo has in each of the clusters that span silos, and in none of them."""
        factor = table.factors[self.column]
        shared = set(self.spanning)
        parts = [
            count
            for count, label in zip(factor.counts, factor.levels, strict=True)
            if cluster_digest(label) in shared
        ]
        return [*parts, table.n_rows - sum(parts)]

    def answer(self, local: Local) -> None:
        pass

    def addends(self, answer: None, n_rows: int) -> Integers:
        return ()

    def pool_totals(self, totals: Integers) -> None:
        pass
