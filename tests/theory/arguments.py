"""Random arguments of the bounds, by the paper's names, for comparing the two transcriptions."""

from __future__ import annotations

import inspect
import types
from functools import cache
from typing import Any

import numpy as np

from fedtmle.theory import communication, personalized, statistical
from fedtmle_paper import lemmas

# Computed from data or trivial: tested against independent sources elsewhere.
NOT_TRANSCRIBED = {
    "scaled_tolerance",  # test_runs: against eq. (lattice-spacing)
    "history_bits",  # test_history: the length of the code itself
    "integer_kraft",  # test_history: exact enumeration
    "history_kraft",
    "negligible_tolerance",  # a product
    "inference_conditions",  # test_statistical
    "averaging_bound",  # a minimum
}
# What `statistical` evaluates on one run, by no formula of the paper's own.
ON_A_RUN = {
    "history_of_doubles",  # test_remainder
    "remainder",
    "root_distance",  # test_anytime: against the true minimum
    "distance_to_convergence",
}
MODULES = (communication, statistical, personalized, lemmas)


@cache
def bounds() -> dict[str, types.FunctionType]:
    """Return every public function of the modules of formulas that states one."""
    return {
        name: function
        for module in MODULES
        for name, function in vars(module).items()
        if inspect.isfunction(function) and function.__module__ == module.__name__
        if name[0] != "_" and name not in ON_A_RUN
    }


def draw(name: str, rng: np.random.Generator) -> dict[str, Any]:
    """One random argument list for the function called ``name``."""
    positive = float(np.exp(rng.normal()))
    s = int(rng.integers(1, 7))
    R = int(rng.integers(2, 500))
    sizes = tuple(int(N) for N in rng.integers(2, 900, size=s))
    values = {
        "M": int(rng.integers(len(sizes), 40)),
        "d": int(rng.integers(1, 9)),
        "n": int(rng.integers(3, 10**6)),
        "R": R,
        "S": int(rng.integers(1, R)),
        "K": int(rng.integers(1, 30)),
        "b": int(rng.integers(1, 60)),
        "N_m": int(rng.integers(2, 900)),
        "N_j": int(rng.integers(2, 900)),
        "q": int(rng.integers(1, 6)),
        "order": int(rng.choice([2, 4])),
        "active": s,
        "values": tuple(int(v) for v in rng.integers(-(10**6), 10**6, size=s)),
        "sizes": sizes,
        "alpha": tuple(rng.dirichlet(np.ones(s)) * rng.random()),
        "fits": rng.normal(size=(s, 3)),
        "averaging": tuple(rng.random(s)),
        "retired_at": tuple(float(t) for t in rng.choice([0, 1, 2, 5, 9, np.inf], size=s)),
        "xi": float(rng.random() * 0.5 + 1e-3),
        "x": 10 * positive,
        "alpha_m": float(rng.random() + 1e-3),
        "log_cover": float(rng.random() * 300),
    }
    if name == "rounded_step_decrease":
        values["norm"] = 40 * positive
    if name == "chi_total_uniform":
        values["sizes"] = sizes
    parameters = inspect.signature(bounds()[name]).parameters
    return {p: values.get(p, float(np.exp(rng.normal()))) for p in parameters}
