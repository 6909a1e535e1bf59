"""
Does early intervention raise IQ? Eight hospitals, one estimate
===============================================================

The Infant Health and Development Program gave premature infants at eight hospitals either the usual care or
an intensive early intervention, and measured IQ at 36 months. 77 of 985 infants were never tested. The
hospitals want one estimate of the effect for all infants, without putting the records into one table.
"""

# %%
# Each hospital has a table of its own. Here they come with the package; in practice each silo reads a file or
# a database that only it can open.
from dataclasses import replace

import numpy as np

import fedtmle as ft
from fedtmle.datasets import ihdp, ihdp_variables

columns = ihdp()
hospitals = {
    f"hospital {site:.0f}": {name: values[columns["site"] == site] for name, values in columns.items()}
    for site in np.unique(columns["site"])
}
for name, table in hospitals.items():
    print(name, len(table["treat"]), "infants,", int(np.isnan(table["iqsb_36"]).sum()), "without an IQ score")

# %%
# A study states the estimand, the three nuisance models and the dictionary: what each variable is, in which
# range and unit. The outcome is missing for some infants, so a third model says who was tested.
baby = "bw + nnhealth + sex + mlt_birt"
mother = "momage + b_marr + mom_lths + mom_hs + mom_scoll + momblack + momhisp + cigs"
study = ft.Study(
    target=ft.ATE(outcome="iqsb_36", treatment="treat"),
    outcome_model=ft.GLM(f"treat + {baby} + {mother} + C(site)"),
    treatment_model=ft.GLM("bw + C(site)"),
    missingness_model=ft.GLM(f"treat + {baby} + {mother} + C(site)"),
    variables=ihdp_variables(),
)

# %%
# ``release`` names the hospitals that allow their own estimate to be shown.
result = ft.run(study, hospitals, release=tuple(hospitals))
print(result.table())

# %%
# The same study with all records in one place gives the same numbers. The certificate of the federated run
# bounds the difference before anyone has pooled anything.
pooled = ft.run(replace(study, algorithm=ft.Central(tolerance=1e-10)), hospitals)
federated_effect, pooled_effect = (r.document["estimates"][0]["estimate"] for r in (result, pooled))
print(f"federated {federated_effect:.6f}, pooled {pooled_effect:.6f}")

# %%
# The forest plot shows the hospitals that agreed, and the joint estimate below them.
ft.plots.forest(result)

# %%
# Are the arms alike once they are weighted? The Love plot shows each covariate before and after.
ft.plots.balance(result)
