"""A preview as 80 columns of text: what a silo would send, its limits, and whether its policy allows it."""

from __future__ import annotations

from fedtmle.layout import aligned, bits, phase_name, wrapped
from fedtmle.studies.preview import Preview


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
        lines += wrapped(f"{kind.explanation} ({phase_name(kind.phase)})", first="* ", indent="  ")
        lines += [
            f"    {kind.times} time{'s'[: kind.times != 1]}, {kind.numbers:,} numbers, {bits(kind.bits)}; "
            "the first begins",
            f"    {kind.example}",
        ]
    lines += ["", "Your limits:"]
    lines += aligned(
        [(limit.name, limit.text, "ok" if limit.is_met else "NOT MET") for limit in view.limits], indent="  "
    )
    lines += ["", *verdict(view)]
    for obstacle in view.obstacles:
        lines += wrapped(obstacle, first="* ", indent="  ")
    return "\n".join(lines)


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
            "Your policy would allow every one of these messages as far as your own rows tell. Sums are "
            "masked: the silos judge those of the study's models together during the run (min_pooled), and "
            "your silo may refuse one then."
        )
    return wrapped(
        "Your policy would allow every one of these messages. The real run also depends on the other silos, "
        "so its questions may differ: your silo decides on each request anew, and may still refuse one."
    )


def refusal(view: Preview) -> str:
    """Return by which limit the silo would refuse a study, and how much would have left before."""
    key = view.refused_by.removeprefix("memory: ")
    by = f"because of an earlier study (limit {key})" if key != view.refused_by else f"by its key {key}"
    before = (
        f"Before the refusal: {view.numbers_sent:,} numbers." if view.numbers_sent else "Nothing would leave."
    )
    return f"Your policy would refuse this study here, {by}. {before}"
