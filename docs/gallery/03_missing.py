"""
Some covariates are missing. What should the study do?
======================================================

C-reactive protein was not measured for every patient, and the sickest were measured most often. Leaving out
the patients without it would change whom the study is about. This page compares three ways to go on.
"""

# %%
# Two simulated hospitals. Severity (``crp``) confounds the treatment, which lowers the risk by 10 percentage
# points on average.
import numpy as np
import pandas as pd

import fedtmle as ft

rng = np.random.default_rng(3)


def expit(x):
    return 1 / (1 + np.exp(-x))


def hospital(n):
    age = rng.uniform(40, 90, n)
    crp = np.clip(20 + 0.8 * (age - 65) + rng.normal(0, 15, n), 0, 200)
    treated = rng.binomial(1, expit((crp - 20) / 25))
    risk = expit(-1 + (crp - 20) / 20 + (age - 65) / 30)
    died = rng.binomial(1, np.clip(risk - 0.1 * treated, 0, 1)).astype(float)
    measured = rng.random(n) < expit(0.5 + (age - 65) / 10)  # the older, the more often measured
    return {"age": age, "crp": np.where(measured, crp, np.nan), "treated": treated, "died": died}


silos = {"north": hospital(1500), "south": hospital(1500)}
for name, table in silos.items():
    print(name, f"{np.isnan(table['crp']).mean():.0%} without C-reactive protein")


# %%
# The dictionary says what to do with a missing value: ``"indicator"`` adds a column that says that the value
# is missing, ``"impute"`` completes the records several times by regressions fitted over all silos and
# combines the results by Rubin's rules.
def study(**missing):
    crp = {"kind": "number", "range": (0, 200), "unit": "mg/l", **missing}
    return ft.Study(
        target=ft.ATE(outcome="died", treatment="treated"),
        outcome_model=ft.GLM("treated + age + crp"),
        treatment_model=ft.GLM("age + crp"),
        variables=ft.Variables(
            {
                "died": {"kind": "binary"},
                "treated": {"kind": "binary"},
                "age": {"kind": "number", "range": (18, 110), "unit": "years"},
                "crp": crp,
            }
        ),
    )


results = {way: ft.run(study(missing=way), silos) for way in ("indicator", "impute")}

# %%
# For comparison, the analysis that many papers report: only the patients with a measurement.
complete = {
    name: {column: values[~np.isnan(table["crp"])] for column, values in table.items()}
    for name, table in silos.items()
}
results["complete cases"] = ft.run(study(), complete)
rows = {way: result.document["estimates"][0] for way, result in results.items()}
print(pd.DataFrame(rows).T[["estimate", "std_error", "conf_low", "conf_high"]])

# %%
# ``n`` shows whom each answer is about: those with a measurement, or everyone.
print({way: result.document["n"] for way, result in results.items()})

# %%
# The figure sets the intervals beside each other. The indicator method leaves confounding among the patients
# without a measurement, since severity cannot be adjusted for there; imputation uses their age, treatment and
# outcome to complete it.
import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(6, 2.4), layout="constrained")
for place, row in enumerate(rows.values()):
    axes.plot([row["conf_low"], row["conf_high"]], [place, place], color="C0")
    axes.plot(row["estimate"], place, "o", color="C0")
axes.set_yticks(range(len(rows)), list(rows))
axes.invert_yaxis()
axes.axvline(0, color="grey", linewidth=0.8)
axes.set_xlabel("risk difference")
