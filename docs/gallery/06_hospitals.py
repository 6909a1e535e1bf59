"""
The hospitals differ. Is there one effect?
==========================================

A pooled effect is an average. If the treatment works at one hospital and not at another, readers want to
know. This page adjusts for the hospital, shows each hospital's own estimate, and measures how much they
differ.
"""

# %%
# Six simulated hospitals. The mean outcome differs between them, and so does the effect.
import numpy as np

import fedtmle as ft

rng = np.random.default_rng(2)


def hospital(level, effect, n):
    age = rng.uniform(30, 85, n)
    treated = rng.binomial(1, 1 / (1 + np.exp(-(age - 57) / 25)))
    pressure = np.clip(120 + level + 0.4 * (age - 57) - effect * treated + rng.normal(0, 12, n), 70, 220)
    return {"age": age, "treated": treated, "sbp": pressure}


names = ("north", "south", "west", "east", "harbour", "hill")
levels, effects = rng.normal(0, 5, 6), rng.normal(6, 3, 6)
silos = {
    name: hospital(level, effect, 250) for name, level, effect in zip(names, levels, effects, strict=True)
}
variables = ft.Variables(
    {
        "sbp": {"kind": "number", "range": (60, 240), "unit": "mmHg", "label": "Systolic blood pressure"},
        "treated": {"kind": "binary"},
        "age": {"kind": "number", "range": (18, 110), "unit": "years"},
    }
)

# %%
# ``C(silo)`` in a formula is the hospital itself: each fits an intercept of its own and keeps it. Without it
# the study warns that the hospitals differ.
study = ft.Study(
    target=ft.ATE(outcome="sbp", treatment="treated"),
    outcome_model=ft.GLM("treated + age + C(silo)"),
    treatment_model=ft.GLM("age + C(silo)"),
    variables=variables,
)
result = ft.run(study, silos, release=names)
print(result)

# %%
# Each hospital that consents (``release``) runs its own TMLE on its own records and tells the estimate. The
# diamond is the joint estimate; the leave-one-out estimates show whether one hospital drives it.
ft.plots.forest(result)

# %%
# The random-effects summary and the prediction interval answer another question: what to expect at a seventh
# hospital.
spread = result.document["heterogeneity"][0]
print(f"Q = {spread['Q']:.1f} on {spread['df']} degrees of freedom, I2 = {spread['I2']:.0%}")
summary = spread["summaries"][0]
print(f"at another hospital: {summary['prediction_low']:.1f} to {summary['prediction_high']:.1f} mmHg")
ft.plots.heterogeneity(result)
