"""Coverage-guided fuzzing of every decoder: `make fuzz SECONDS=600`.

The first byte of an input chooses the decoder. An input that raises anything but the documented
error, or that is decoded and does not re-encode to itself, is written to a file and ends the run;
so does one that takes more than ten seconds or two gigabytes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(
    include=["fedtmle.protocol", "fedtmle.runtime", "fedtmle.initial.superlearner"]
):
    from tests.decoders import decoders

DECODERS = tuple(decoders().values())


def one_input(data: bytes) -> None:
    if not data:
        return
    decoder, data = DECODERS[data[0] % len(DECODERS)], data[1:]
    try:
        again = decoder.again(data)
    except decoder.error:
        return
    if again != data:
        raise AssertionError(f"{decoder.name}: decoded, and encoded to something else")


def seed(corpus: Path) -> None:
    corpus.mkdir(parents=True, exist_ok=True)
    for number, decoder in enumerate(DECODERS):
        for k, example in enumerate(decoder.examples):
            (corpus / f"example-{number}-{k}").write_bytes(bytes([number]) + example)


if __name__ == "__main__":
    corpus, seconds = Path(sys.argv[1]), int(sys.argv[2])
    seed(corpus)
    options = [f"-max_total_time={seconds}", "-max_len=2000", "-timeout=10", "-rss_limit_mb=2048"]
    atheris.Setup([sys.argv[0], str(corpus), *options, "-print_final_stats=1"], one_input)
    atheris.Fuzz()
