"""The example that `fedtmle init` writes: a commented study, the silo files of two hospitals, toy records."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from pathlib import Path

from fedtmle.errors import InputError
from fedtmle.targets.effects import estimands
from fedtmle.targets.regimes.estimands import REGIME_ESTIMANDS
from fedtmle.targets.time.estimands import TIME_ESTIMANDS

_SHORT = """\
# A study: the question, the method and the silos. Check it with `fedtmle validate study.toml`, describe
# the cohort with `fedtmle preflight study.toml`, run it with `fedtmle run study.toml`.
# `fedtmle init FOLDER --all-keys` writes this study with every other key in comments.
"""

_QUESTION = """\
# A study: the question, the method and the silos. Check it with `fedtmle validate study.toml`, describe
# the cohort with `fedtmle preflight study.toml`, run it with `fedtmle run study.toml`.
# Lines that start with '#' are comments; commented settings show the default or an alternative.

title = "Exercise and blood pressure at two hospitals"          # of the study and its report

[target]
kind = "ATE"                    # or another of these:
"""

_REST = """\
outcome = "sbp_12"              # missing for some
treatment = "programme"         # its levels in [variables] are the arms
# arms = ["usual", "exercise"]  # the arms in another order; the first is the reference
# strata = "sex"                # effects by subgroup as well

# Means under known rules, for kind = "PolicyMeans":
# [[target.rules]]
# kind = "Static"               # everyone gets one arm
# arm = "exercise"
# [[target.rules]]
# kind = "Threshold"            # one arm if a column is at least the cut, otherwise another
# column = "sbp_0"
# cut = 140
# arm = "exercise"
# otherwise = "usual"
# [[target.rules]]
# kind = "Stochastic"           # each arm with a probability, in the order of the arms
# shares = [0.5, 0.5]

# Time to an event, for the kinds from Risk on. The outcome is then the column that says what ended a person's
# follow-up, and the models are [models.hazard], [models.treatment] and [models.censoring]; formulas of the
# first and the last may use period, or C(period). Without them hazards are counted by arm and period.
# time = "days"                 # when follow-up ended
# entry = "day_of_entry"        # when it began; by default at 0
# periods = 10                  # a public grid: no event time leaves a silo, only the period
# period_length = 182.625
# grid = [30, 90, 180, 365]     # or: the end of each period
# horizons = [2, 10]            # numbers of periods; by default the last
# subperiods = 1                # parts of each period in which hazards are estimated
# compare_subperiods = 4        # also estimate with these parts, and show both; by default not
# causes = ["relapse", "death"] # codes of the outcome that are events; by default 1
# censored = "none"             # the code of no event; by default 0
# beyond = "truncate"           # follow-up ends with the grid; by default a time beyond it is refused

# Treatment over time, for kind = "RegimeMean", "RegimeDifference" or "RegimeRatio". Columns by period, in
# order; the dictionary and formulas use the names on the left, and lag1_l for the period before:
# censoring = "c"                 # 1 in the period in which a person is censored
# over_time = {a = ["a1", "a2"], l = ["l1", "l2"], c = ["c1", "c2"]}
# [[target.rules]]
# kind = "Planned"              # an arm for each period
# plan = ["exercise", "usual"]
# [[target.rules]]
# kind = "Onset"                # an arm from the first period in which a column is at least the cut
# column = "l"
# cut = 140
# arm = "exercise"
# otherwise = "usual"
# below = false                 # true: from the first period in which it is below
# [[target.rules]]
# kind = "Shift"                # of a treatment that is a number: factor times it plus by, within limits
# by = -1
# factor = 1
# least = 0
# most = 10

# The dictionary: what each variable is, the same for every silo. A silo checks every value against it, and
# nobody is asked for labels or for the size of values. Ranges are what is possible, never a sample's minimum
# and maximum, which are two patients. Kinds: number, count, binary (0 and 1), category, identifier (of
# clusters). `fedtmle init --from table.csv` drafts this section from a table.
[variables]
sbp_12 = {kind = "number", range = [70, 260], label = "Systolic blood pressure at 12 months", unit = "mmHg"}
programme = {kind = "category", levels = ["usual", "exercise"], label = "Programme"}
sbp_0 = {kind = "number", range = [70, 260], label = "Systolic blood pressure at baseline", unit = "mmHg"}
age = {kind = "number", range = [18, 110], label = "Age", unit = "years"}
sex = {kind = "category", levels = ["female", "male"], label = "Sex"}
smoker = {kind = "binary", label = "Current smoker"}
# sampling_weight = {kind = "number", range = [0, 50]}
# family = {kind = "identifier"}

[models.outcome]                # its formula may use the treatment
formula = "C(programme) + sbp_0 + age + C(sex) + smoker"
# family = "auto"               # by the kind of the outcome: gaussian, binomial or poisson
# ridge = 0.0

# Alternative: predictions that each silo already has as columns, one per arm.
# [models.outcome]
# supplied = ["q_usual", "q_exercise"]

# Alternative: a model that one silo fits on its own records and discloses to all.
# [models.outcome]
# kind = "Pilot"
# at = "north"
# formula = "C(programme) + sbp_0 + age"

# Alternative: a model that is fitted on a public file with the study's names; no silo sends anything for it.
# [models.outcome]
# kind = "Pilot"
# sample = "public.csv"
# trees = {formula = "C(programme) + sbp_0", rounds = 50, depth = 3, rate = 0.1, min_leaf = 20}

# Alternative: known coefficients, in the order of the formula's columns, on the outcome's scale.
# [models.outcome]
# kind = "Pilot"
# formula = "C(programme) + sbp_0"
# family = "gaussian"
# levels = {programme = ["usual", "exercise"]}
# coefficients = [40.0, -6.0, 0.7]

# Alternative: a super learner, which weights models by how well they predict records not used in their fit.
# [models.outcome]
# kind = "SuperLearner"
# folds = 5
# seed = 0
# [[models.outcome.learners]]
# formula = "C(programme) + sbp_0 + age + C(sex) + smoker"
# [[models.outcome.learners]]
# formula = "C(programme)*spline(sbp_0, knots=[120, 140, 160]) + age"
# [[models.outcome.learners]]
# kind = "Pilot"
# at = "north"
# trees = {formula = ["sbp_0", "age", "smoker"]}
# [[models.outcome.learners]]
# kind = "PerSilo"              # trees that each silo fits on its own records and discloses to all
# trees = {formula = "sbp_0 + age + smoker", rounds = 20}

[models.treatment]              # the propensity score, a logistic model of the treatment
formula = "sbp_0 + age + C(sex) + smoker"

[models.missingness]            # whether the outcome is observed; leave it out if none may be missing
formula = "C(programme) + age + smoker"

[algorithm]
kind = "Coded"                  # Adaptive, Gradient, LocalAverage, Personalized; Central pools the rows
tolerance = "practical"         # 1e-6 of a standard error; "negligible", or a number
# coordinates = "whitened"      # raw
# smoothness = "estimated"      # certified, pooled, a number, or {factor = 1.05, over = "silos"}
# smoothness = {kind = "certified", along = "segments", over = "pooled"}  # or along = "everywhere"
# inner = "step"                # adaptive: the paper's inner solves, more rounds, a shorter history
# max_rounds = 10000
# fixed_width = 1000            # send absolute integers instead of differences

# Alternative: the average of the silos' own fits while it pays, then coded gradients.
# [algorithm]
# kind = "Adaptive"
# cost = 1.0                    # of a local round, in gradient rounds

# Alternative: pooled gradients, here with stochastic gradient descent.
# [algorithm]
# kind = "Gradient"
# tolerance = 0.5
# max_updates = 100
# optimizer = {kind = "sgd", batch = 64, step = 1e-4, steps = 9, seed = 0, batches = "fixed", replace = false}

# Alternative: gradient descent with backtracking; optimizer = "newton" or "descent" has the defaults.
# [algorithm]
# kind = "Gradient"
# [algorithm.optimizer]
# kind = "descent"              # or newton
# max_steps = 1000
# stop = 0.1
# step = {first = 1.0, armijo = 1e-4, grow = 2.0, max_halvings = 50}    # or a fixed number, or per update
#                               # and step: {kind = "Schedule", steps = [[0.5, 0.5], [0.1]]}

# Alternative: all rows in one place, each update an exact fit; for comparison.
# [algorithm]
# kind = "Central"
# optimizer = {kind = "exact", radius = 64, exhaustive = false}

# Alternative: the average of the silos' own fits.
# [algorithm]
# kind = "LocalAverage"
# weights = {north = 0.6, south = 0.4}          # size, uniform, or one number per silo
# max_updates = 100
# radius = 64
# exhaustive = false
# progress_tolerance = 1e-9
# solver = {kind = "lbfgs", gradient = 1e-8}    # newton; fits stop at this gradient norm
# lattice = "fine"              # 2^-10 of the tolerance; a spacing, or "none" to send doubles

# Alternative: each silo leaves with its own estimate once its own equation holds.
# [algorithm]
# kind = "Personalized"
# weights = "size"              # uniform
# noise = 0.5                   # leave once the EIF mean is within half of the silo's own sampling error
# gap = 1e-6                    # or: leave once the silo's own fit would gain no more than this
# lattice = 1e-3                # or: round fits to this spacing, so that small ones are zero
# min_active = 1                # fewest silos whose fits are averaged; under masks at least colluders + 2

[options]
g_bounds = "auto"               # truncation at 5/(sqrt(n) log n); or a number below 0.5, or "none"
confidence = 0.95
# on_refusal = "stop"           # "go on": without a silo that refuses or is absent when the study opens
# imputations = 5               # data sets, where a variable of [variables] has missing = "impute"
# imputation_sweeps = 5         # over the variables to impute, in each of them
# diagnostics = true            # false: no tables of overlap and fit; the silos disclose less
# sums = "auto"                 # rounded: gradients and sums on coarse grids; exact: to the last bit
# aggregation = "auto"          # masked: the server reads totals over all silos only; open: each silo's own
# fit_accuracy = 1e-6           # of rounded sums: their effect on the estimate, in standard errors
# clever = "covariate"          # weight
# submodel = "per arm"          # contrast
# link = "logistic"             # linear
# weights = "sampling_weight"   # a column of observation weights
# weight_ceiling = 64           # the largest weight over the mean weight
# cluster = "family"            # a column of cluster identifiers
# cluster_scope = "shared"      # "shared": an identifier means the same cluster in all silos, and a cluster
#                               # in two silos is refused; "silo": each silo numbers its own; "spanning":
#                               # a cluster may be in several silos, in parts above each silo's smallest cell
# largest_cluster = 4096
# folds = 10                    # cross-fitting of the models
# seed = 0

# For a deployed run: the last day on which silos answer, and the keys with which they sign what they receive,
# so that a server cannot send them different broadcasts. `fedtmle silo decisions` prints a silo's key.
# [plan]
# expires = 2027-06-30
# keys = {north = "00..", south = "00.."}
# colluders = 1                 # silos that may lie about their rows; see docs/masks.md

[silos]                         # name = its silo file (.toml), or a .csv or .parquet with the study's names
north = "north.toml"
south = "south.toml"
"""

NORTH = """\
# The northern hospital's names for the study's columns. The file stays at the hospital.

[silo]
name = "north"
home = "north.home"             # your institution's own folder: keys, ledgers, and whom studies were about

[data]
path = "north.csv"              # or .parquet; or database = "records.duckdb" with table or query
# person = "PATIENT_NO"         # the column of the person: no study reads it, the home keeps digests of it
# encoding = "latin-1"          # of a .csv that is not UTF-8: latin-1, cp1252 or utf-16
# decimal = ","                 # how the .csv writes numbers; thousands = "." for 1.234,5

[columns]                       # study's name = this hospital's name; columns not listed keep their name
sbp_12 = "SBP_FOLLOWUP"
sbp_0 = "SBP_BASELINE"
age = "AGE_YEARS"
sex = {column = "SEX", levels = {M = "male", F = "female"}}
programme = {column = "GROUP", levels = {0 = "usual", 1 = "exercise"}}
smoker = {column = "smoker", missing = [9]}     # codes for a missing value
# family = {column = "FAM_NO", secret = "words that the hospitals alone share"}   # cluster identifiers

[policy]                        # what this hospital allows: stricter than the defaults, laxer with a reason
min_cell = 10                   # smallest count in preflight tables, and floor of bins and covariates later
# release = true                # its own estimate may be shown
"""

SOUTH = """\
# The southern hospital measures blood pressure in kPa and ages in months; it has its own codes.

[silo]
name = "south"
home = "south.home"

[data]
path = "south.csv"

[columns]
sbp_12 = {column = "bp_12m_kpa", scale = 7.50062}       # the study's value = theirs * scale + shift
sbp_0 = {column = "bp_start_kpa", scale = 7.50062}
age = {column = "age_months", scale = 0.0833333333}
sex = {column = "gender", levels = {1 = "male", 2 = "female"}}
programme = {column = "therapy", levels = {control = "usual", gym = "exercise"}}
smoker = {column = "smokes", levels = {yes = 1, no = 0}}
"""

Patient = dict[str, float]


def study_text() -> str:
    """Return the commented study file, with a line for each registered estimand."""
    kinds = (*estimands.ESTIMANDS, *TIME_ESTIMANDS, *REGIME_ESTIMANDS)
    width = max(len(kind.__name__) for kind in kinds) + 2
    lines = [f"{' ' * 32}#   {kind.__name__.ljust(width)}{kind.description}\n" for kind in kinds]
    return "".join([_QUESTION, *lines, _REST])


def short_text() -> str:
    """Return the same study without the lines that are comments."""
    lines = [line for line in study_text().splitlines() if not line.lstrip().startswith("#")]
    sections = re.sub(r"\n{2,}", "\n\n", "\n".join(lines)).strip()
    return f"{_SHORT}\n{sections.replace('# or another of these:', '# the average treatment effect')}\n"


def write_template(folder: Path, *, force: bool, all_keys: bool = True) -> list[Path]:
    """Write the example into ``folder`` and return its files; without ``force`` nothing is overwritten.

    With ``all_keys`` the study file has every key of a study, in comments.
    """
    files = {
        "study.toml": study_text() if all_keys else short_text(),
        "north.toml": NORTH,
        "south.toml": SOUTH,
        "north.csv": "\n".join(_north()) + "\n",
        "south.csv": "\n".join(_south()) + "\n",
        "public.csv": "\n".join(_public()) + "\n",
    }
    existing = [name for name in files if (folder / name).exists()]
    if existing and not force:
        raise InputError(f"{folder}: {', '.join(existing)} already exist; choose another folder, or --force")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in files]


def _north() -> Iterator[str]:
    yield "SBP_FOLLOWUP,SBP_BASELINE,AGE_YEARS,SEX,smoker,GROUP"
    for p in _patients(240, seed=1, shift=0.0):
        after = "" if math.isnan(p["after"]) else f"{p['after']:.0f}"
        sex = "F" if p["female"] else "M"
        yield f"{after},{p['before']:.0f},{p['age']:.0f},{sex},{p['smoker']:.0f},{p['treated']:.0f}"


def _south() -> Iterator[str]:
    yield "bp_12m_kpa,bp_start_kpa,age_months,gender,smokes,therapy"
    for p in _patients(160, seed=2, shift=4.0):
        after = "" if math.isnan(p["after"]) else f"{p['after'] / 7.50062:.2f}"
        codes = (
            2 if p["female"] else 1,
            "yes" if p["smoker"] else "no",
            "gym" if p["treated"] else "control",
        )
        yield f"{after},{p['before'] / 7.50062:.2f},{12 * p['age']:.0f},{codes[0]},{codes[1]},{codes[2]}"


def _public() -> Iterator[str]:
    yield "sbp_12,sbp_0,age,sex,smoker,programme"
    for p in _patients(120, seed=3, shift=-2.0):
        after = "" if math.isnan(p["after"]) else f"{p['after']:.0f}"
        sex, arm = "female" if p["female"] else "male", "exercise" if p["treated"] else "usual"
        yield f"{after},{p['before']:.0f},{p['age']:.0f},{sex},{p['smoker']:.0f},{arm}"


def _patients(count: int, *, seed: int, shift: float) -> Iterator[Patient]:
    """Yield invented patients: younger ones take part more often, older ones are lost; the effect is -6."""
    draw = random.Random(seed)  # noqa: S311 - toy records, the same on every machine
    for _ in range(count):
        age = min(85.0, max(30.0, draw.gauss(58, 10)))
        female, smoker = draw.random() < 0.5, draw.random() < 0.25
        before = 142 + shift + 0.4 * (age - 58) + 4 * smoker + draw.gauss(0, 12)
        treated = draw.random() < 1 / (1 + math.exp(0.2 + 0.03 * (age - 58) + 0.5 * smoker))
        after = 40 + 0.7 * before - 6 * treated + 2 * smoker - 1.5 * female + draw.gauss(0, 8)
        observed = draw.random() < 1 / (1 + math.exp(-2.4 + 0.03 * (age - 58) - 0.4 * treated))
        yield {
            "age": age,
            "female": female,
            "smoker": smoker,
            "before": before,
            "treated": treated,
            "after": after if observed else math.nan,
        }
