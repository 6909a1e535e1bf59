"""
What does the server see? Masked sums, and noise for the rest
=============================================================

In an open run the server reads each hospital's sums. Masks hide them: it reads totals over all hospitals
only. Noise goes one step further and limits what the published numbers say about any one patient. Both keep
the interval honest.
"""

# %%
# Four simulated hospitals with 3,000 patients each.
from dataclasses import replace

import numpy as np
import pandas as pd

import fedtmle as ft

rng = np.random.default_rng(8)


def hospital(n):
    age = rng.uniform(30, 85, n)
    treated = rng.binomial(1, 1 / (1 + np.exp(-(age - 57) / 40)))
    died = rng.binomial(1, 1 / (1 + np.exp(-(-0.5 + (age - 57) / 25 - 0.6 * treated)))).astype(float)
    return {"age": age, "treated": treated, "died": died}


silos = {name: hospital(3000) for name in ("north", "south", "west", "east")}
study = ft.Study(
    target=ft.ATE(outcome="died", treatment="treated"),
    outcome_model=ft.GLM("treated + age"),
    treatment_model=ft.GLM("age"),
    algorithm=ft.OneStep(),
    variables=ft.Variables(
        {
            "died": {"kind": "binary"},
            "treated": {"kind": "binary"},
            "age": {"kind": "number", "range": (18, 110), "unit": "years"},
        }
    ),
)

# %%
# Masks change nothing in the result, because the totals are the same integers.
open_run = ft.run(replace(study, aggregation="open"), silos)
masked = ft.run(replace(study, aggregation="masked"), silos, policy=ft.Policy())

# %%
# With a privacy budget each hospital adds its share of discrete Gaussian noise before masking. The interval
# counts the noise: it is wider, and it still covers the effect in 95 % of studies.
private = ft.run(replace(study, aggregation="masked", privacy=ft.Privacy(epsilon=2.0, delta=1e-6)), silos)
rows = {
    "open": open_run.document["estimates"][0],
    "masked": masked.document["estimates"][0],
    "masked, epsilon = 2": private.document["estimates"][0],
}
print(pd.DataFrame(rows).T[["estimate", "std_error", "conf_low", "conf_high"]])

# %%
# The result says what is guaranteed, and what is not.
print(private)

# %%
# The figure sets the three intervals beside each other.
import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(6, 2.2), layout="constrained")
for place, row in enumerate(rows.values()):
    axes.plot([row["conf_low"], row["conf_high"]], [place, place], color="C0")
    axes.plot(row["estimate"], place, "o", color="C0")
axes.set_yticks(range(len(rows)), list(rows))
axes.invert_yaxis()
axes.set_xlabel("risk difference")
