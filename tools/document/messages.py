"""`docs/messages.md`: every message that can leave a silo, with an example and its residual risk."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import cast, get_args

from fedtmle.protocol.flows import ViewedQuery
from fedtmle.protocol.masked import AbstractLook
from fedtmle.protocol.messages import Reason, Reply
from fedtmle.protocol.policy import TARGETS, Policy
from fedtmle.protocol.query import Local, Phase, Query
from tools.document.examples import SILO, classes, examples, shown, size

HEAD = """\
# For the site admin and the data-protection officer

Your records stay on your machine. What leaves it is answers, and this page lists every kind there is.
It is written from the code by `python -m tools.document`, and a test fails when a kind of answer is
missing from it. The examples are real answers of invented records.

**Keeping records local is not in itself a privacy guarantee.** Every answer is a function of your
records. In an open study the server sees your silo's answers by themselves; in a
[masked study](masks.md) it sees their total over all silos, and "who learns it" says which answers are the
exceptions. "What it may disclose" is its content beyond its purpose; "limited by" names keys of your policy.
Attacks that were tried, what stops each, and what nothing stops are on [their own page](threats.md).

## How a silo is asked

* The server never says *what* to compute. It broadcasts what was pooled in the round before; your silo
  runs the same public program and derives the question itself. A request has no room for a query, a
  column, a path or a row number ([the protocol on the wire](wire.md)).
* Your silo answers only the plan you approved (its SHA-256 is compared), in order, once: repeating a
  request returns the recorded bytes.
* Before you approve, rehearse the study on your own records; then say yes or no. Nothing leaves:

```sh
.venv/bin/fedtmle init example
.venv/bin/fedtmle silo preview example/study.toml --silo example/north.toml
.venv/bin/fedtmle silo home --silo example/north.toml --create
.venv/bin/fedtmle silo approve example/study.toml --silo example/north.toml --yes
.venv/bin/fedtmle silo decisions --silo example/north.toml
```

* Every request, decision, reply and running total goes to your own ledger, a file in which each line
  carries the hash of the one before. `fedtmle ledger verify` checks it, `fedtmle ledger show` prints it,
  and `fedtmle watch ledger.jsonl --ledger` shows it as a page: what have I sent so far?
* Your policy guards what your silo file describes. A table that a study lists without one
  (`north = "north.csv"` under `[silos]`) has no policy: whoever runs that study holds the records already.

"""

# What an answer may tell about records, beyond its purpose.
RISKS = {
    "BinsQuery": (
        "Counts and means by bin of probabilities and predictions; by arm, of covariates, events and times "
        "of leaving. Your silo joins neighbouring bins until each has enough people; others, such as "
        "events, it discloses all together, or none."
    ),
    "PresenceQuery": (
        "Whether your silo has anyone with an event of each cause, anyone censored, and in each arm anyone "
        "at risk at the last horizon: one bit each. If a model has C(silo), also whether your silo's own "
        "coefficients predict some response perfectly, as where all responses are the same. Under masks the "
        "silos are only counted."
    ),
    "ClustersQuery": (
        "How many clusters you have, and which of them other silos have too. Whoever has a digest can test a "
        "guess at the identifier behind it, unless the hospitals share a secret that keys the digests."
    ),
    "SpanningQuery": (
        "That your part of every cluster shared with other silos is as large as your smallest cell; the "
        "closing message then holds sums over each such part."
    ),
    "SumsQuery": (
        "Sums over few records are close to the records. In model fitting, sums of curvature are "
        "weighted products of covariates, from which their means and covariances follow. Many "
        "sums at different points are many equations about the same records; with more equations "
        "than unknowns, single values can be solved for."
    ),
    "MomentsQuery": (
        "Your silo's own estimate and standard error follow from it, whether or not you consent "
        "to showing them: consent governs the report, not what the server can compute."
    ),
    "NoisySums": (
        "Differential privacy bounds it for every record and every attacker, if the sums are masked, or to "
        "everyone but the server if it is trusted. Without a mask your share of the noise alone is too small."
    ),
    "TallyQuery": (
        "Exact counts of your silo by arm and of observed outcomes; with weights or strata, their sums."
    ),
    "CalibrationQuery": (
        "The curvature of your silo's records at the start, rounded to ten bits: the spread of "
        "the clever covariates, or one norm of it."
    ),
    "RoundedGradientQuery": (
        "Your silo's mean gradient on a public grid, at every point of the path. Differences from "
        "the last message are sent, so the length of a message tells how large the change was."
    ),
    "SwitchQuery": (
        "Your silo's mean gradient and its own fit on a public grid: the fit tells how your silo differs "
        "from the others."
    ),
    "FitGradientQuery": (
        "Your silo's mean gradient of a nuisance model, rounded to a public grid that becomes finer as "
        "the fit converges. Differences are sent, so the length of a message tells how large the change was."
    ),
    "FitCurvatureQuery": (
        "Means of products of covariates, or of such products weighted by a model, rounded to a coarse "
        "grid; to a finer one where covariates are nearly collinear."
    ),
    "PeopleQuery": (
        "In a masked study alone: how many people have each column of a model and each reference level, or "
        "have each column behind the closing sums, in total over groups of silos. If fewer than "
        "`min_support` people of all silos have one, your silo refuses what is asked next."
    ),
    "LookQuery": (
        "In a masked study alone: sums over groups of silos of products of two columns of a model, weighted "
        "by the size of the residuals, and rounded: to 1/1000 of the number of all rows, in coordinates in "
        "which the mean is near 1. By these your silo judges the next sums (`min_pooled`, and `min_people` "
        "if a silo lies). Only columns that `min_support` people or more have are asked about; otherwise "
        "masks and rounding are what protects the products. Of the rows behind closing sums it is asked if "
        "some silo's own rows prove too little, at ten levels of size: totals are rounded by up to 1, and a "
        "person adds at most 1."
    ),
    "SharesQuery": (
        "In a masked study of three to five silos: whether your silo has more than a given share of any "
        "combination of a model's sums or the closing sums, for 80 shares. Only the numbers of silos are "
        "disclosed. They bound what a curious silo learns by subtracting its own rows."
    ),
    "GainsQuery": (
        "In a masked study of four or five silos with fewer than ten people to a column, or of sums over "
        "periods: a rounded matrix of the squares of your silo's shares of a model's sums. Only its total is "
        "disclosed: how unevenly the rows lie among the silos. Your silo refuses before if one person has "
        "more than 1/`min_pooled` of a combination."
    ),
    "ShownQuery": (
        "In a masked study alone: one bit for each part of the next answer that your silo may leave out, "
        "such as a bin or a covariate by arm. Only the numbers of silos are disclosed. If too few would "
        "disclose a part, or too few would not, all silos leave it out."
    ),
    "FitQuery": (
        "Your silo's own fit, on a fine public grid, at each update: it tells how your silo differs "
        "from the others. A two-bit outcome tells whether a fit was found. A silo that has retired sends "
        "zeros."
    ),
    "FitCountQuery": (
        "Two bits, before the fits of an update: whether your silo's own fit is zero, was found, or has no "
        "end. Under masks the silos are only counted, and the fits of fewer than two more silos than may "
        "collude are not asked for."
    ),
    "ModelsQuery": (
        "A whole model fitted on your records alone and broadcast to all silos; split points of "
        "trees lie between values of records. No other answer discloses as much: agree to it "
        "expressly."
    ),
    "DeparturesQuery": (
        "One number for each of the models of treatment and outcome: how far your silo as a whole departs "
        "from the pooled fit, in standard errors squared, without the direction. Only their sum over the "
        "silos is reported, as a test of whether silos differ."
    ),
    "SpreadQuery": (
        "The sum over your rows of the gradient of the targeting step, and their covariance in your silo, "
        "once, if local fits are averaged. They tell how your silo's mean differs from the others'."
    ),
    "PopulationsQuery": (
        "One number: how far the mean gradient of your rows is from that of all, in standard errors squared, "
        "without the direction. Only the sum over the silos is reported."
    ),
    "OwnEstimateQuery": (
        "Only that it is withheld, unless your policy has release = true: then the estimate of the study on "
        "your records alone with its covariance, or a coarse reason why there is none, to all parties."
    ),
    "OmittedQuery": (
        "How many of your records have no treatment and are left out, if the study declares so. A number "
        "below min_missing is refused."
    ),
    "ViewedQuery": (
        "The same as the query inside, about your rows after missing values were filled in by a public rule. "
        "Imputation models are fitted like the others; imputed values never leave."
    ),
    "JointQuery": ("Several of the others in one message, which discloses what they disclose."),
}
EVERY = ("min_rows", "min_silos", "min_fold", "max_queries", "max_functionals", "lifetime_days")
GRADIENTS = {"min_support", "min_people"}


def limits(queries: Iterable[Query]) -> list[str]:
    """The keys of the policy that the guard holds such queries against, beyond those for every query."""
    keys: set[str] = set()
    for query in (member for asked in queries for member in asked.members):
        for point in query.evaluations():
            keys |= GRADIENTS | ({"min_pooled"} if point.model.judged_together else set())
            keys |= {"max_coefficient"} if query.phase is Phase.NUISANCE else {"max_eps", "max_path"}
            keys |= {"allow_curvature"} if point.curvature and not point.is_coarse else set()
        for cell in query.cells():
            keys |= {cell.floor, cell.rest_floor} - {""} | ({"allow_one_arm"} if cell.is_arm else set())
        keys |= {"min_people"} if _discloses_columns(query) else set()
        keys |= {"allow_models"} if query.ships_model(SILO) else set()
        keys |= set(query.floors)
        # An example draws no batches; a query that can, is held against their floor.
        keys |= {"min_batch"} if "batch" in vars(query) else set()
    return [limit.name for limit in Policy.limits() if limit.name in keys]


def learned_by(queries: Iterable[Query]) -> str:
    """Say who learns an answer in an open study and in a masked one."""
    members = [member for query in queries for member in query.members]
    if all(isinstance(member, AbstractLook) for member in members):
        return "the server and the silos learn the total over all silos. It is not asked in an open study."
    consents = {member.open_consent for member in members if member.lanes is None}
    open_study = "in an open study, the server"
    if any(member.lanes is not None for member in members):
        masked = "in a masked study nobody: the server and the silos learn the total over all silos"
        if consents:
            masked += "; parts or variants that are no sums are sent as they are with consent, or refused"
        return f"{open_study}; {masked}."
    if consents == {None}:
        return f"{open_study}. It is not asked in a masked study."
    if "" in consents:
        return "with your consent, all parties, in an open study and in a masked one."
    consent = " and ".join(f"`{key}`" for key in sorted(filter(None, consents)))
    return f"{open_study}; in a masked study the same, and only with {consent}."


def _discloses_columns(query: Query) -> bool:
    """Whether the guard judges columns of the query, its own or those of the query behind a view."""
    inner = query.query if isinstance(query, ViewedQuery) else query
    return inner.disclosed_columns(cast(Local, None)) is not None  # the rows are read later, if at all


def page() -> str:
    """The whole page."""
    return HEAD + "\n".join([*_answers(), *_envelopes(), *_policy()]) + "\n"


def _answers() -> Iterator[str]:
    examples_by_kind = examples()
    yield "## Every answer"
    yield ""
    every = ", ".join(f"`{key}`" for key in EVERY)
    yield f"All of them are limited by {every} of [your policy](#your-policy)."
    yield ""
    for kind in classes():
        example = examples_by_kind[kind.__name__]
        query, answer = example.query, example.answer
        yield f"### `{kind.__name__}` ({query.phase.value if query.phase != 'nuisance' else 'models'})"
        yield ""
        yield f"Discloses {query.explanation}."
        yield ""
        yield f"* **Example**, from silo {SILO} (60 records), {size(query, answer):,} bits: {shown(answer)}"
        yield f"* **What it may disclose**: {RISKS[kind.__name__]}"
        yield f"* **Who learns it**: {learned_by(example.queries)}"
        keys = limits(example.queries)
        if keys:
            yield f"* **Also limited by**: {', '.join(f'`{key}`' for key in keys)}"
        yield ""


def _envelopes() -> Iterator[str]:
    yield "## Every reply"
    yield ""
    yield "An answer travels in one of these replies; nothing else leaves."
    yield ""
    yield "| reply | fields | says |"
    yield "|---|---|---|"
    for kind in get_args(Reply):
        fields = ", ".join(f"`{name}`" for name in kind.__struct_fields__)
        yield f"| `{kind.__name__}` | {fields} | {' '.join((inspect.getdoc(kind) or '').split())} |"
    yield ""
    yield "A refusal is one of these sentences and carries no number:"
    yield ""
    for reason in Reason:
        yield f"* {reason.value}"
    yield ""


def _policy() -> Iterator[str]:
    yield "## Your policy"
    yield ""
    yield (
        "The section `[policy]` of your silo's file may be stricter than these limits in any key. You may "
        "make a floor or a cap laxer, in the file or for one plan with `fedtmle silo approve --lower`, with "
        "a written reason ([how](deploy.md#a-limit-that-you-lower)); a study never can."
    )
    yield ""
    yield "| key | the package's own limit | it | limits |"
    yield "|---|---|---|---|"
    for limit in Policy.limits():
        default = str(limit.default).lower() if isinstance(limit.default, bool) else f"{limit.default:,}"
        yield f"| `{limit.name}` | {default} | {limit.direction.value} | {limit.meaning} |"
    yield (
        f"| `{TARGETS}` | none | the owner's free choice | the distributions whose targets may run here, "
        "each as its name or as name==version; [their code](target.md#ship-it-in-a-package-of-your-own) "
        "runs at the silo |"
    )
