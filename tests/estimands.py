"""An example of every registered estimand, for tests that must hold for each of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import fedtmle as ft
from fedtmle.targets.effects import estimands

# Arguments that only some estimands need; a new one that needs another fails here until it has an example.
NEEDED = {
    "rules": (ft.Static("1"), ft.Threshold("x", 0.0, arm="1", otherwise="0"), ft.Stochastic((0.3, 0.7)))
}


def example(kind: type[ft.AbstractEffect], **arguments: Any) -> ft.AbstractEffect:
    """Return an estimand of this kind for the outcome y and the treatment a."""
    needed = {
        field.name: NEEDED[field.name]
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING and field.name != "outcome"
    }
    treatment: dict[str, Any] = {"treatment": "a", "arms": ("0", "1")} if kind.has_treatment else {}
    return kind(**{"outcome": "y", **treatment, **needed, **arguments})


def names() -> list[str]:
    return [kind.__name__ for kind in estimands.ESTIMANDS]
