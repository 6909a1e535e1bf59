"""
My estimand is not on the list. Can I add it?
=============================================

A new effect is usually a new combination of means that the package already targets. This page adds the number
needed to treat, in 30 lines, with its confidence interval, and runs it like any other estimand.
"""

# %%
# An effect says which means it needs, how they become numbers, and the gradient of those numbers for the
# delta method.
from dataclasses import dataclass
from typing import final

import numpy as np

import fedtmle as ft


@final
@dataclass(frozen=True, kw_only=True)
class NumberNeededToTreat(ft.AbstractEffect):
    """1 / (E[Y(reference)] - E[Y(arm)]): how many patients to treat to avoid one event."""

    description = "a number needed to treat"

    def question_stem(self):
        return f"How many need {self.comparison} to avoid one case of {self.outcome}"

    def summarise(self, psi, label):
        reference, treated = psi
        reduction = reference - treated
        return [
            ft.Summary(
                name=f"NumberNeededToTreat {label}".strip(),
                value=float(1 / reduction),
                gradient=np.array([-1, 1]) / reduction**2,
                scale=ft.Scale.DIFFERENCE,
            )
        ]


# %%
# It runs like the estimands that ship: same models, same algorithms, same certificate.
rng = np.random.default_rng(4)


def hospital(n):
    age = rng.uniform(40, 90, n)
    treated = rng.binomial(1, 1 / (1 + np.exp(-(age - 65) / 30)))
    died = rng.binomial(1, 1 / (1 + np.exp(-((age - 65) / 15 - 0.9 * treated)))).astype(float)
    return {"age": age, "treated": treated, "died": died}


silos = {"north": hospital(900), "south": hospital(600)}
variables = ft.Variables(
    {
        "died": {"kind": "binary"},
        "treated": {"kind": "binary"},
        "age": {"kind": "number", "range": (18, 110), "unit": "years"},
    }
)


def study(target):
    return ft.Study(
        target=target(outcome="died", treatment="treated"),
        outcome_model=ft.GLM("treated + age"),
        treatment_model=ft.GLM("age"),
        variables=variables,
    )


result = ft.run(study(NumberNeededToTreat), silos)
print(result)

# %%
# It agrees with the risk difference, of which it is the negative reciprocal.
difference = ft.run(study(ft.ATE), silos).document["estimates"][0]["estimate"]
print(f"{-1 / difference:.6f}", f"{result.document['estimates'][0]['estimate']:.6f}")

# %%
# The interval is the delta method's, which is honest only while the risk difference is clearly not zero: the
# figure shows both.
ft.plots.forest(result)

# %%
# To offer the estimand to other people's study files and hospitals, ship it in a package of its own: the
# guide to targets says how, and ``examples/late`` in the repository is one.
