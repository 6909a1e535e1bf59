"""
I do not trust one model. Can the hospitals share a super learner?
==================================================================

The outcome may depend on age in a way that a main-effects model misses. A super learner fits several
candidates, measures each on held-out records of all hospitals, and combines them with weights that no
hospital could choose alone.
"""

# %%
# Three simulated hospitals. The risk is highest for the youngest and the oldest, and the treatment is given
# to the old.
import numpy as np
import pandas as pd

import fedtmle as ft

rng = np.random.default_rng(6)


def hospital(n):
    age = rng.uniform(20, 90, n)
    treated = rng.binomial(1, 1 / (1 + np.exp(-(age - 55) / 20)))
    curve = ((age - 55) / 18) ** 2 - 1.5
    died = rng.binomial(1, 1 / (1 + np.exp(-(curve - 0.7 * treated)))).astype(float)
    return {"age": age, "treated": treated, "died": died}


silos = {name: hospital(700) for name in ("north", "south", "west")}
variables = ft.Variables(
    {
        "died": {"kind": "binary"},
        "treated": {"kind": "binary"},
        "age": {"kind": "number", "range": (18, 110), "unit": "years"},
    }
)

# %%
# The candidates are a main-effects model, a quadratic and a spline. Five folds decide between them.
line, square, bend = (
    ft.GLM("treated + age"),
    ft.GLM("treated + age + I(age**2)"),
    ft.GLM("treated + spline(age, knots=[40, 55, 70])"),
)


def study(outcome_model):
    return ft.Study(
        target=ft.ATE(outcome="died", treatment="treated"),
        outcome_model=outcome_model,
        treatment_model=ft.GLM("age"),
        variables=variables,
    )


learned = ft.run(study(ft.SuperLearner((line, square, bend), folds=5)), silos)
print(learned)

# %%
# The main-effects model alone would have been saved by the treatment model, which is right: the estimate is
# doubly robust. The super learner has the smaller standard error.
alone = ft.run(study(line), silos)
rows = {"super learner": learned.document["estimates"][0], "main effects": alone.document["estimates"][0]}
print(pd.DataFrame(rows).T[["estimate", "std_error", "conf_low", "conf_high"]])

# %%
# Does the outcome model fit? The calibration plot of each result answers that in the report; here is where
# the bits went.
ft.plots.bits(learned)
