"""A preview as 80 columns of text: what a silo would send, its limits, and whether its policy allows it."""

from __future__ import annotations

from collections.abc import Sequence

from fedtmle.layout import aligned, bits, phase_name, wrapped
from fedtmle.studies.preview import MessageKind, Preview

EXPLAINED = {
    "gradient": "A gradient has one number for each term of a model: the mean over your rows of the term "
    "times the prediction's error. It says in which direction the model should move to fit better.",
    "curvature": "A curvature has one number for each pair of a model's terms: a weighted mean over your "
    "rows of the product of the two. It says how far the model should move.",
}


def render(view: Preview) -> str:
    """Return the whole preview."""
    lines = [
        *wrapped(f"What silo '{view.silo}' would send in plan {view.plan[:16]}, one of {view.silos} silos."),
        "",
        *wrapped(
            f"Rehearsed on your {view.n_rows:,} rows alone. With the other silos the numbers and "
            "the number of rounds differ; the kinds of message are the same. Nothing has been sent."
        ),
        "",
    ]
    for each in view.brought:
        lines += wrapped(f"It runs code of another distribution here: {each}.")
    lines += [""] if view.brought else []
    for kind in view.kinds:
        parts = message_parts(kind)
        named = parts[0] if len(parts) == 1 else f"a message of {len(parts)} parts"
        lines += wrapped(f"{named} ({phase_name(kind.phase)})", first="* ", indent="  ")
        for part in parts if len(parts) > 1 else ():
            lines += wrapped(part, first="  - ", indent="    ")
        lines += [f"    {sent_size(kind)}; the first begins", f"    {kind.example}"]
    for meaning in explained(view):
        lines += ["", *wrapped(meaning)]
    lines += ["", "Your limits:"]
    lines += aligned(
        [(limit.name, limit.text, "ok" if limit.is_met else "NOT MET") for limit in view.limits], indent="  "
    )
    lines += lowered(view.lowered)
    lines += ["", *verdict(view)]
    for obstacle in view.obstacles:
        lines += wrapped(obstacle, first="* ", indent="  ")
    return "\n".join(lines)


def lowered(limits: Sequence[str]) -> list[str]:
    """Return the limits that are laxer than the package's own, with the owner's reasons."""
    if not limits:
        return []
    lines = [
        "",
        *wrapped("LOWERED: your policy is laxer than the package's own limits. All parties see why:"),
    ]
    for limit in limits:
        lines += wrapped(limit, first="  * ", indent="    ")
    return lines


def message_parts(kind: MessageKind) -> list[str]:
    """Return what a message holds, each once."""
    return list(dict.fromkeys(kind.explanation.split("; ")))


def explained(view: Preview) -> list[str]:
    """Return explanations of the technical words in the messages."""
    return [
        meaning for word, meaning in EXPLAINED.items() if any(word in kind.explanation for kind in view.kinds)
    ]


def sent_size(kind: MessageKind) -> str:
    """Return how often a message is sent, and how large all of them are."""
    return f"{kind.times} time{'s'[: kind.times != 1]}, {kind.numbers:,} numbers, {bits(kind.bits)}"


def verdict(view: Preview) -> list[str]:
    """Return whether the policy would allow the study."""
    if view.refused_by:
        return wrapped(f"{refusal(view)} The server would learn only this reason: {view.reason}.")
    if view.stopped:
        return wrapped(
            f"The rehearsal on your rows alone stopped: {view.stopped}. With other silos it may continue."
        )
    if view.judges_together:
        return wrapped(
            "Your policy would allow every one of these messages as far as your own rows show. Sums are "
            "masked: the silos judge those of the study's models together during the run (min_pooled), and "
            "your silo may refuse one then."
        )
    return wrapped(
        "Your policy would allow every one of these messages. The real run also depends on the other silos, "
        "so its questions may differ: your silo decides on each request anew, and may still refuse one."
    )


def refusal(view: Preview) -> str:
    """Return the limit by which the silo would refuse a study, and how much would have left before."""
    key = view.refused_by.removeprefix("memory: ")
    by = f"because of an earlier study (limit {key})" if key != view.refused_by else f"by its key {key}"
    before = (
        f"Before the refusal: {view.numbers_sent:,} numbers." if view.numbers_sent else "Nothing would leave."
    )
    return f"Your policy would refuse this study here, {by}. {before}"
