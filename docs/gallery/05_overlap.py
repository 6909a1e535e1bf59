"""
Some patients could hardly have had the other treatment. What now?
==================================================================

Where nearly everyone above a severity gets the new drug, the effect among the severe rests on a handful of
patients. The result warns, shows how much the estimate depends on the bound on the propensity score, and
offers an effect that the data can answer.
"""

# %%
# Two simulated hospitals in which severity all but decides the treatment.
import numpy as np
import pandas as pd

import fedtmle as ft

rng = np.random.default_rng(11)


def hospital(n):
    severity = rng.normal(0, 1, n)
    treated = rng.binomial(1, 1 / (1 + np.exp(-3.5 * severity)))
    died = rng.binomial(1, 1 / (1 + np.exp(-(severity - 0.6 * treated)))).astype(float)
    return {"severity": severity, "treated": treated, "died": died}


silos = {"north": hospital(800), "south": hospital(800)}
variables = ft.Variables(
    {
        "died": {"kind": "binary"},
        "treated": {"kind": "binary"},
        "severity": {"kind": "number", "range": (-6, 6)},
    }
)


def study(target):
    return ft.Study(
        target=target(outcome="died", treatment="treated"),
        outcome_model=ft.GLM("treated + severity"),
        treatment_model=ft.GLM("severity"),
        variables=variables,
    )


everyone = ft.run(study(ft.ATE), silos)
print(*everyone.warnings, sep="\n")

# %%
# The propensity scores of the two arms hardly overlap.
ft.plots.overlap(everyone)

# %%
# The ladder repeats the estimate under other bounds on the propensity score. Here it moves by a standard
# error from the first rung to the last: how the severe would fare without the drug is mostly the outcome
# model's guess.
ladder = [{"bound": rung["bound"], **rung["estimates"][0]} for rung in everyone.document["ladder"]]
print(
    pd.DataFrame(ladder)[["bound", "estimate", "std_error", "conf_low", "conf_high"]].to_string(index=False)
)

# %%
# The overlap-weighted effect (``ATO``) asks about the patients who could have had either treatment. No
# patient has a large weight, so it needs no bound, and there is no warning. It is another question: say so in
# the paper.
among_the_eligible = ft.run(study(ft.ATO), silos)
rows = {
    "everyone (ATE)": everyone.document["estimates"][0],
    "could have had either (ATO)": among_the_eligible.document["estimates"][0],
}
print(pd.DataFrame(rows).T[["estimate", "std_error", "conf_low", "conf_high"]])
print("warnings about the second:", len(among_the_eligible.warnings))
