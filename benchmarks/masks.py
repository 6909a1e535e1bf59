"""The cost of masks: what a silo and the server spend on them in one round, by silos and lanes.

    .venv/bin/python -m benchmarks.masks

Times are medians of processor time over rounds, in one thread. "keys" is spent once in a session, for each
silo. "relay" is the check of the signatures of all silos, and the addition of their answers, by one silo in
one round.
"""

from __future__ import annotations

import hashlib
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from fedtmle.protocol.codes import BitWriter
from fedtmle.protocol.masks import CHECK_BITS, Lane, Masker, Packing
from fedtmle_core.signing import SigningKey, is_signed

SILOS = (3, 10, 50, 200)
LANES = (3, 300)
WIDTH = 40  # bits of a lane
ROUNDS = 15


def median(run: Callable[[int], Any], times: int = ROUNDS) -> float:
    """Return the median processor time of a call, in milliseconds."""
    spent = []
    for number in range(times):
        began = time.process_time()
        run(number)
        spent.append(1e3 * (time.process_time() - began))
    return statistics.median(spent)


def measured(silos: int, lanes: int) -> tuple[float, ...]:
    """Return the milliseconds for keys, masks, addition and relay, and the bytes of a message."""
    keys = [SigningKey(hashlib.sha256(b"%d" % m).digest()) for m in range(silos)]
    roster = [(f"silo {m}", key.mask_key.public) for m, key in enumerate(keys)]

    def masker(m: int) -> Masker:
        return Masker(keys[m].mask_key, roster, roster[m][0], plan=b"plan", session=b"session")

    packing = Packing((Lane((1 << WIDTH - 1) - 1),) * lanes)
    rng = random.Random(1)  # noqa: S311 - a benchmark
    values = [rng.randrange(1 << 30) for _ in range(lanes)]
    own = masker(0)
    sent = [
        masker(m).mask(packing, values if m == 0 else (0,) * lanes, n=9, round=1, heard=b"")
        for m in range(silos)
    ]
    if packing.totals(sent) != tuple(values):
        raise AssertionError("the masks do not cancel")
    out = BitWriter()
    packing.write(sent[0], out)
    data = out.finish().data
    signature = keys[0].sign(data)

    def relay(_: int) -> None:
        for _ in range(silos):
            is_signed(data, signature, keys[0].public)
        packing.totals(sent)

    return (
        median(lambda _: masker(0), 5),
        median(lambda number: own.mask(packing, values, n=9, round=number, heard=b"")),
        median(lambda _: packing.totals(sent)),
        median(relay, 5),
        (lanes * WIDTH + CHECK_BITS + 7) // 8,
    )


def main() -> None:
    print("| silos | lanes | keys, ms | mask, ms | add up, ms | relay, ms | bytes up | bytes relayed |")
    print("|---|---|---|---|---|---|---|---|")
    for silos in SILOS:
        for lanes in LANES:
            keys, mask, total, relay, size = measured(silos, lanes)
            relayed = f"{silos * (size + 64):,.0f}" if silos <= 50 else "-"
            print(
                f"| {silos} | {lanes} | {keys:.2f} | {mask:.2f} | {total:.2f} | "
                f"{f'{relay:.2f}' if silos <= 50 else '-'} | {size:,.0f} | {relayed} |"
            )


if __name__ == "__main__":
    main()
