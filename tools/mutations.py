"""Break the protocol in one place at a time and report which test notices.

    python -m tools.mutations            all mutations
    python -m tools.mutations guard      those whose name contains "guard"
    python -m tools.mutations --list     names only
    python -m tools.mutations --quick    without a first run of the tests on the unchanged code

Each mutation replaces one piece of code, which must occur exactly once in its file, in a copy of the source
tree; the files of this tree are not touched. The tests named for it then run on the copy. The exit status
is 1 if a mutation survives, or no longer applies because the code has changed: then mend the line here.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("src", "core/src")  # what is copied and mutated
PATIENCE = 600.0  # seconds for the tests of one mutation: one that never ends counts as caught
OPTIONS = ("-q", "-x", "--no-header", "--tb=no", "-p", "no:cacheprovider", "--hypothesis-profile=ci")


@dataclass(frozen=True)
class Mutation:
    """One piece of code of ``file`` (below src/fedtmle or core/src), its replacement, and the tests."""

    name: str
    file: str
    code: str
    instead: str
    tests: tuple[str, ...]


def _many(file: str, tests: str, *changes: tuple[str, str, str]) -> tuple[Mutation, ...]:
    """Return mutations of one file with the same tests; a change is a name, the code and its replacement."""
    room = Path(file).stem
    return tuple(
        Mutation(f"{room}: {name}", file, code, instead, tuple(tests.split()))
        for name, code, instead in changes
    )


ATTACKS = "tests/attacks/test_attacks.py::test_a_guarded_silo_refuses_it"
SUPPRESSED = "tests/attacks/test_attacks.py::test_a_guarded_silo_hides_what_is_few"
GUARD = f"tests/attacks/test_guard.py {ATTACKS} tests/attacks/test_decisions.py"
CODES = "tests/protocol/test_bits.py"
DECODERS = "tests/protocol/test_decoders.py"
LATTICE = (
    "tests/protocol/test_lattice.py "
    f"{DECODERS}::test_extreme_but_canonical_lattices "
    f"{DECODERS}::test_a_lattice_with_one_number_that_is_not_canonical_is_refused"
)
CODED = f"{ATTACKS} tests/protocol/test_calibration.py tests/algorithms/test_coded.py"
FITS = "tests/algorithms/test_local.py tests/runtime/test_retirement.py"
FOLLOWER = "tests/protocol/test_follower.py tests/runtime/test_silo.py tests/algorithms/test_local.py"
MESSAGES = f"tests/protocol/test_messages.py tests/runtime/test_silo.py {ATTACKS}"
SILO = f"tests/runtime/test_silo.py {ATTACKS} tests/runtime/test_records.py"

LEVERAGE = "tests/model/test_leverage.py"
OWN = "tests/effects/test_own.py"
OWN_BLOCKS = "tests/effects/test_own_blocks.py"
OWN_TIME = (
    "tests/regimes/test_own.py::test_two_shifts_that_differ_in_one_person_are_judged_together "
    "tests/regimes/test_own.py::test_own_coefficients_are_found_once_for_each_model "
    "tests/regimes/test_own.py::test_every_model_is_that_of_indicator_columns"
)
OWN_REFUSED = "tests/studies/test_approval.py::test_columns_of_one_silo_are_refused_under_masks"
LOOKS = "tests/protocol/test_looks.py"
CLOSING = "tests/protocol/test_closing.py"
DIFFERENCES = "tests/attacks/test_differences.py"
LOWERED = "tests/protocol/test_guard.py tests/studies/test_lowered.py"
MASKS = "tests/protocol/test_masks.py"
NOISE = "core/tests/test_noise.py tests/model/test_shares.py tests/effects/test_noisy_sums.py"
PUBLISHED = "core/tests/test_publish.py core/tests/test_published_result.py"

MUTATIONS: tuple[Mutation, ...] = (
    *_many(
        "protocol/guard.py",
        "tests/effects/test_noisy_sums.py::test_noise_that_is_shared_leaves_only_under_masks",
        ("noise needs no mask", "if query.needs_masks and not self._is_masked:", "if False:"),
        (
            "noise is refused under masks",
            "if query.needs_masks and not self._is_masked:",
            "if query.needs_masks and self._is_masked:",
        ),
    ),
    *_many(
        "protocol/guard.py",
        GUARD,
        (
            "one silo fewer is enough",
            "len(plan.roster) < policy.min_silos",
            "len(plan.roster) + 1 < policy.min_silos",
        ),
        (
            "one row fewer is enough",
            "if n_rows < self.policy.min_rows:",
            "if n_rows + 1 < self.policy.min_rows:",
        ),
        ("folds are not checked", "if smallest_part < min(self.policy.min_fold, n_rows):", "if False:"),
        (
            "one query too many",
            "if self.queries > policy.max_queries:",
            "if self.queries > policy.max_queries + 1:",
        ),
        ("numbers are not charged", "self.functionals += query.functionals", "self.functionals += 0"),
        ("not a number is not far", "elif not size <= policy.max_eps:", "elif size > policy.max_eps:"),
        (
            "the path is not followed",
            "self._length(point) + size <= policy.max_path",
            "size <= policy.max_path",
        ),
        ("coefficients have no bound", "if not size <= policy.max_coefficient:", "if False:"),
        ("labels of nobody are refused", "any(0 < people < floor for", "any(0 <= people < floor for"),
        (
            "the floor itself is refused",
            "if 0 < people < _floor(self.policy, key):",
            "if 0 < people <= _floor(self.policy, key):",
        ),
        ("the others are not counted", "(total - count, cell.rest_floor)", "(count, cell.rest_floor)"),
        (
            "an empty arm is disclosed",
            "if count == 0 and total > 0 and cell.is_arm and",
            "if count < 0 and total > 0 and cell.is_arm and",
        ),
        ("looks are skipped too far away", "<= self.radius", "<= 1.5 * self.radius + 0.1"),
        (
            "another model's look is used",
            "None if is_batch else self._examined.get(key)",
            "next(iter(self._examined.values()), None)",
        ),
        (
            "the law's displacement is left out",
            "map(add, here, origins[0].tolist())",
            "map(add, here, origins[1].tolist())",
        ),
        (
            "leverages may be twice as large",
            "(1.0 + 1e-9) / policy.min_people",
            "(2.0 + 1e-9) / policy.min_people",
        ),
        (
            "not a number is no leverage",
            "if not leverage <= self._allowed:",
            "if leverage > self._allowed + 1:",
        ),
        ("support is not checked", "(people < floor)", "(people < 0)"),
        (
            "a batch may be small",
            "if len(rows) < self.policy.min_batch:",
            "if len(rows) < self.policy.min_batch - 1:",
        ),
        ("batches may overlap", "if (owners != first).any() or", "if"),
        ("rows in no batch may be few", "if 0 < rest < self.policy.min_batch:", "if rest < 0:"),
        (
            "part of a batch may come again",
            "elif self._batch_sizes[first] != len(rows):",
            "elif self._batch_sizes[first] < len(rows):",
        ),
        (
            "exact curvatures are always sent",
            "if point.curvature and not point.is_coarse and not policy.allow_curvature:",
            "if False:",
        ),
        (
            "disclosed columns are not judged",
            "(disclosed := query.disclosed_columns(local)) is None:",
            "(disclosed := None) is None:",
        ),
        (
            "a Hessian is not looked at",
            "is_batch = point.batch is not None\n        for part in point.parts:",
            "is_batch = point.batch is not None\n        for part in (Part.GRADIENT,):",
        ),
        (
            "a gradient's look answers for the Hessian",
            "key = id(point.model), part is Part.HESSIAN\n            examined = None if",
            "key = id(point.model), False\n            examined = None if",
        ),
        (
            "a batch has the look of all rows",
            "None if is_batch else self._examined.get(key)",
            "self._examined.get(key)",
        ),
        (
            "the columns of other models are forgotten",
            "if not self._designs.add(point.model, submodel, self._allowed) <=",
            "if not 0.0 * self._designs.add(point.model, submodel, self._allowed) <=",
        ),
        ("predictions are not judged", "shares.max(initial=0.0)", "shares.min(initial=0.0)"),
        (
            "optional sums are always disclosed",
            "return EVERYBODY if id(member) in left_out else",
            "return EVERYBODY if id(member) is None else",
        ),
        (
            "optional sums are refused",
            "if not member.is_optional:\n                self._examine_columns(",
            "if True:\n                self._examine_columns(",
        ),
        (
            "an open part needs no consent",
            "if consent is None or (consent and not getattr(self.policy, consent)):",
            "if consent is None:",
        ),
        (
            "two silos hide each other",
            "plan.fewest_together < policy.colluders + 2:",
            "plan.fewest_together < policy.colluders + 1:",
        ),
        (
            "numbers have no limit",
            "if self.functionals > policy.max_functionals:",
            "if self.functionals > policy.max_functionals + 1:",
        ),
        (
            "any target is allowed",
            "if not all(map(self.policy.allows, plan.brought)):",
            "if not any(map(self.policy.allows, plan.brought)) and False:",
        ),
        ("models may be shipped", "if not self.policy.allow_models and", "if self.policy.allow_models and"),
    ),
    *_many(
        "protocol/guard.py",
        "tests/programs/test_declined.py",
        ("a silo declines without end", "and self.declined + more < MOST_DECLINED", ""),
        ("every query may be declined", "return query.is_declinable and is_open", "return is_open"),
        (
            "a declined answer is disclosed",
            "left_out(query, local, self.policy) | declined",
            "left_out(query, local, self.policy)",
        ),
        ("what is declined is not charged", "self.declined += declined", "self.declined += 0"),
    ),
    *_many(
        "protocol/looks.py",
        LOOKS,
        (
            "a group has one silo more than may lie",
            "len(ordered) // (liars + 2)",
            "len(ordered) // (liars + 1)",
        ),
        ("as many groups as liars", "count if count > liars else 1", "count if count >= liars else 1"),
        ("a doubted silo of few is believed", "and set(doubted).isdisjoint(self.groups[0])", ""),
        (
            "few silos are believed against the owner's will",
            "if trusts and self.discloses_shares",
            "if self.discloses_shares",
        ),
        ("few silos need not tell their shares", "len(self.groups) == 1 and self.liars > 0", "False"),
        ("doubted silos are trusted", "if not set(doubted).isdisjoint(group)]", "if False]"),
        ("liars are everywhere", "if len(others) <= liars:", "if len(others) < liars:"),
    ),
    *_many(
        "protocol/subjects.py",
        LOOKS,
        ("sums shrink slowly", "return math.exp(delta) if family", "return math.exp(delta / 4.0) if family"),
        ("a look holds everywhere", "if not distance <= 1.0:", "if False:"),
        ("people are counted twice", "found += is_in.sum(axis=1)", "found += 2 * is_in.sum(axis=1)"),
        ("sums over periods are not looked at", "or self.is_summed", ""),
        ("the rows of periods count apart", "if not self.is_summed:", "if True:"),
        (
            "sums over periods are scaled down",
            "return self.weight * self.facts.periods * np.array",
            "return self.weight * np.array",
        ),
    ),
    *_many(
        "protocol/masked.py",
        LOOKS,
        ("liars are not left out", "if k not in left_out]\n        matrix", "]\n        matrix"),
        (
            "a look is not rounded",
            "return self.dim * 2.0 ** (self.grid - 1)",
            "return 2.0 ** (self.grid - 60)",
        ),
        ("rare columns are looked at", "in named if 0 < total < floor", "in named if False"),
        (
            "an old look is as good for few people",
            "(CLOSE if self._is_rare or self.is_crowded else 1.0)",
            "1.0",
        ),
        ("a silo hides its share", "rest = 1.0 - self.own", "rest = 1.0 - 0.5 * self.own"),
        ("one silo may leave nothing", "== self.silos - 1", ">= self.silos - 2"),
        ("nobody subtracts", "max(0.0, 1.0 - colluders * (1.0 - least))", "1.0"),
    ),
    *_many(
        "protocol/masked.py",
        CLOSING,
        (
            "rounding of closing rows does not count",
            "others -= np.diag(silos * gram.unit / 2.0",
            "others -= np.diag(0.0 * silos * gram.unit",
        ),
        (
            "the own part counts twice",
            "others, silos = others - gram.rounded_part(local), silos - 1",
            "silos = silos - 1",
        ),
        (
            "liars about closing rows are not left out",
            "k for k in range(len(gram.groups)) if k not in left_out]\n            others",
            "k for k in range(len(gram.groups))]\n            others",
        ),
        ("errors are shared out too small", "return np.asarray(w.sum() / w)", "return np.asarray(0.2 / w)"),
        ("every round may be void", "            if self.may_be_void:\n", "            if True:\n"),
    ),
    *_many(
        "protocol/guard.py",
        CLOSING,
        ("one alone is looked at", "if largest <= NEARLY_ALONE and", "if"),
        ("a void answer is sent", "self.is_void = True", "self.is_void = False"),
        (
            "closing rows are not judged",
            "                self._examine_closing(query, number, local",
            "                (query, number, local",
        ),
    ),
    *_many(
        "protocol/guard.py",
        DIFFERENCES,
        ("fits to the own rows are not judged", "            self._examine_own_fits(member, rows)\n", ""),
        ("too many completions are answered", "        if crowded:\n", "        if False:\n"),
        ("hazards are judged one by one", "union = all_periods(joined)", "union = joined[place]"),
        (
            "folds are not judged",
            "            if not any(union is each for each in self._unions):\n",
            "            if False:\n",
        ),
    ),
    *_many(
        "protocol/looks.py",
        DIFFERENCES,
        ("folds are not looked at", "if left_out is None or left_out.folds.count < 3:", "if True:"),
        ("two folds are looked at", "or left_out.folds.count < 3:", "or left_out.folds.count < 2:"),
        ("hazards are looked at one by one", "known = all_periods(summed)", "known = self._unions[number]"),
    ),
    *_many(
        "protocol/subjects.py",
        DIFFERENCES,
        ("the people of another fold", "== (fold - 1) % folds.count", "== fold"),
        ("people are left out", "[each[:, size:] for each in full]", "[None] * len(parts)"),
        ("a fold has a floor", "    has_floor = False", "    has_floor = True"),
    ),
    *_many(
        "protocol/fits.py",
        DIFFERENCES,
        ("a fit that is counted is not judged", "return self.fits.own_evaluations(rows)", "return ()"),
    ),
    *_many(
        "programs/imputation.py",
        DIFFERENCES,
        ("one data set more does not count", "(study.imputations - 1) * max(columns)", "max(columns)"),
        ("columns of two variables count", "& imputed == {own}", "& imputed >= {own}"),
    ),
    *_many(
        "protocol/subjects.py",
        CLOSING,
        (
            "own rows do not contradict",
            "                    return False\n        return True\n\n    def has_columns_of",
            "                    return True\n        return True\n\n    def has_columns_of",
        ),
    ),
    *_many(
        "protocol/looks.py",
        CLOSING,
        (
            "a closing is asked before its look though one was void",
            "self._has_been_void = False, pooled is VOID",
            "self._has_been_void = False, False",
        ),
        (
            "a second look is asked at once",
            "grid = self.groups.groups, 1 - (",
            "grid = self.groups.groups, 3 - (",
        ),
    ),
    *_many(
        "protocol/masks.py",
        CLOSING,
        (
            "noise is none",
            'return _expanded(hmac.digest(self._own, _context(n, round, heard), "sha256"), packing)',
            "return Masked(0, 0)",
        ),
    ),
    *_many(
        "protocol/guard.py",
        LOOKS,
        (
            "what others leave is not counted",
            "allowed = self._allowed_by(rule) * factor",
            "allowed = self._allowed_by(rule)",
        ),
        ("own rows stand in for all", 'discloses_shares and rule.floor != "min_pooled"', "discloses_shares"),
    ),
    *_many(
        "protocol/masked.py",
        "tests/protocol/test_looks.py",
        ("gains have no squares", "(values**2 / (1.0 - values))", "values**2"),
        ("the bound by gains is no tangent", "1.0 + m - slope * f", "1.0 - slope * f"),
        (
            "gains are those of the point of the look",
            "public @ vectors * math.sqrt(shrunk)",
            "public @ vectors",
        ),
        ("all of a combination is no share", "if values[-1] > MOST_SHARE:", "if values[-1] > 2.0:"),
        (
            "few people to a column are enough",
            "return self.n * least < CROWDED",
            "return self.n * least < 0.0",
        ),
        (
            "own gains hide no less",
            "np.linalg.eigh((self.gains - own) * unit)",
            "np.linalg.eigh(0.5 * (self.gains - own) * unit)",
        ),
    ),
    *_many(
        "protocol/looks.py",
        "tests/protocol/test_looks.py",
        ("three silos state gains", "self.groups.liars + 3", "self.groups.liars + 2"),
    ),
    *_many(
        "protocol/guard.py",
        "tests/protocol/test_looks.py",
        (
            "gains are stated of one person",
            "                self._examine_gains(member, local)\n",
            "                pass\n",
        ),
    ),
    *_many(
        "protocol/masked.py",
        "tests/protocol/test_looks.py",
        (
            "sums over periods need no gains",
            "if self.subject.is_summed:\n            return True",
            "if False:\n            return True",
        ),
    ),
    *_many(
        "protocol/masked.py",
        "tests/protocol/test_shown.py",
        ("one silo may show a part alone", "self._are_several(disclosing) and", "True and"),
        ("one silo may hide a part alone", "and self._are_several(hiding)):", "):"),
        ("a liar may be one of two", "sorted(counts)[: len(counts) - self.liars]", "counts"),
        ("colluders are two silos", "sum(counts) >= self.liars + 2", "sum(counts) >= 2"),
        (
            "nobody leaves out what too few show",
            "self.query.hiding(hidden) if hidden else",
            "self.query if hidden else",
        ),
    ),
    *_many(
        "protocol/guard.py",
        "tests/protocol/test_shown.py",
        (
            "it is believed that a silo shows what it hides",
            "for k, is_shown in enumerate(query.shown(disclosed)) if k in self._shown_by_all",
            "for k, is_shown in ()",
        ),
    ),
    *_many(
        "protocol/bins.py",
        "tests/protocol/test_bins.py",
        ("the complement of a level is shown", "if min(hidden) >= floor:", "if min(hidden) >= 0:"),
        ("what all leave out is shown", "bin_ is not None and first + b in self.hidden", "False"),
        ("who leaves in a hidden bin is lost", "kept[last] = _joined(before, bin_)", "kept[last] = before"),
    ),
    *_many(
        "model/leverage.py",
        "tests/model/test_leverage.py",
        (
            "residuals that stand out raise the spread",
            "WITHIN_ONE_SD * (len(residuals) - 1)",
            "len(residuals) - 1",
        ),
        ("the spread exceeds the deviation", "min(within, math.sqrt", "max(within, math.sqrt"),
        ("rows without weight spread", "residuals if w is None else residuals[w != 0]", "residuals"),
    ),
    *_many(
        "protocol/guard.py",
        f"{ATTACKS}[LoneEvent] {ATTACKS}[LoneCensored]",
        (
            "sums over periods are not judged by the own rows",
            "            self._examine_periods(point.model, local)\n",
            "",
        ),
    ),
    *_many(
        "protocol/masked.py",
        LOOKS,
        ("sums over periods are looked at first", "        return self.points\n", "        return ()\n"),
    ),
    *_many(
        "model/submodels.py",
        f"{OWN_BLOCKS} {OWN}",
        (
            "nothing of the block is taken from a curvature",
            "row[k] = (pivot * row[k] - factor * above[k]) // minor",
            "row[k] = pivot * row[k] // minor",
        ),
        ("rounding counts as curvature of a block", "if pivot <= rows * minor:", "if pivot <= 0:"),
        (
            "rows are judged without regression on the block",
            "PersonRows(piece.rows[self.common] - slopes @ block, piece.counts)",
            "PersonRows(piece.rows[self.common], piece.counts)",
        ),
        (
            "a person's share under masks ignores the block",
            "space.leverages(piece), 1.0 - share",
            "space.leverages(piece), 1.0 - 0.0 * share",
        ),
        ("a look at slopes holds elsewhere", "if not self.is_level:  # a slope", "if False:  # a slope"),
    ),
    *_many(
        "initial/own.py",
        f"{OWN_BLOCKS} {OWN}",
        ("undetermined coefficients are fitted", "        self._require_determined(gram)\n", ""),
        (
            "no silo is reported as separated",
            "return cholesky(hessian - SEPARATED * at_zero) is None",
            "return False",
        ),
        (
            "slopes are not fitted",
            "return _BlockSearch(submodel=alone, family=self._family).minimum(start)",
            "return start",
        ),
        ("a pooled look at slopes holds elsewhere", "is_bounded=self.is_level,", "is_bounded=True,"),
        (
            "a search ends where one direction is separated",
            "            if rest[j, j] > self.unit:\n",
            "            if rest[j, j] <= self.unit:\n                return []\n            if True:\n",
        ),
        (
            "terms that the block spans stay",
            "if term not in with_silo and is_left(term))",
            "if term not in with_silo)",
        ),
    ),
    *_many(
        "programs/nuisance.py",
        "tests/attacks/test_attacks.py::test_what_is_not_asked_for_is_not_learned",
        (
            "C(silo) has columns",
            "return own_formula(glm.parsed, levels) if self.own else None",
            "return None",
        ),
    ),
    *_many(
        "programs/regimes.py",
        OWN_TIME,
        (
            "own coefficients of later periods are unknown",
            "yield from (step.outcome for step in reversed(chain.steps))",
            "yield from (step.outcome for step in chain.steps[:0])",
        ),
        (
            "own coefficients are found in order of time",
            "for step in reversed(chain.steps))",
            "for step in chain.steps)",
        ),
        (
            "own coefficients are those of period 1",
            "own=study.profiles_silo,\n            view=self.view(period),",
            "own=study.profiles_silo,\n            view=self.view(1),",
        ),
        (
            "own coefficients start from common ones",
            "known |= dict.fromkeys(() if own is None else column_names(own.own, levels), 0.0)",
            "known |= dict.fromkeys(() if own is None else column_names(own.own, levels), 0.5)",
        ),
    ),
    *_many(
        "initial/glm.py",
        OWN_TIME,
        (
            "an offset hides the one below it",
            "return predictor if offset is None else predictor + offset",
            "return predictor",
        ),
    ),
    *_many(
        "initial/own.py",
        OWN_TIME,
        (
            "own coefficients are found in every view",
            "return self._found.of(rows, lambda _: {silo: self.of(part) for silo, part in by_silo(show())})",
            "return {silo: self.of(part) for silo, part in by_silo(show())}",
        ),
        (
            "modified rows with own coefficients share nothing",
            "        return self.whole.shared_residuals\n",
            "        return None\n",
        ),
    ),
    *_many(
        "programs/flow.py",
        "tests/time/test_study.py",
        (
            "a silo that retires shares its first round",
            "if study.algorithm.fewest_active is None:",
            "if True:",
        ),
    ),
    *_many(
        "programs/study.py",
        OWN_REFUSED,
        (
            "a masked study may have columns of one silo",
            '        if self.aggregation == "masked":\n            self.refuse_silo_columns()\n',
            "",
        ),
    ),
    *_many(
        "studyfile/file.py",
        OWN_REFUSED,
        (
            "a masked plan may have columns of one silo",
            "        if is_masked:\n            file.study.refuse_silo_columns()\n",
            "",
        ),
    ),
    *_many(
        "model/leverage.py",
        LEVERAGE,
        ("doubtful directions are left out", "kept = values > RESOLUTION**2", "kept = values > 1.0"),
        (
            "rounding is too large",
            "rounding * rounding / 12.0\n        size = np.sqrt(np.diag",
            "rounding * rounding\n        size = np.sqrt(np.diag",
        ),
        ("rounding hides nothing", "(gram + np.diag(noise)) * scale", "gram * scale"),
        (
            "rows of one person count apart",
            "ends[stops] - ends[stops - piece.counts]",
            "np.maximum.reduceat(each, stops - 1)",
        ),
        (
            "the largest of the last piece",
            "return max((float(space.leverages",
            "return min((float(space.leverages",
        ),
        (
            "an early bound counts groups apart",
            "and read >= next_look and not has_groups:",
            "and read >= next_look:",
        ),
        (
            "an early bound is half",
            "bound = _bound_of_all(gram, bounds, enough)",
            "bound = _bound_of_all(gram, bounds, enough) / 4",
        ),
        (
            "a bound forgets all columns but one",
            "min(float(reach.sum()) ** 2,",
            "min(float(reach.max()) ** 2,",
        ),
        (
            "an outcome that stands out is not seen",
            "return np.maximum(np.abs(np.where(eta > 0",
            "return np.minimum(np.abs(np.where(eta > 0",
        ),
        (
            "a prediction hides itself",
            "/ (1.0 + shrunk) - y), deviation)",
            "/ (1.0 + shrunk) - y), 0.0 * deviation)",
        ),
        (
            "a residual may vanish",
            "return np.maximum(residuals, least)",
            "return residuals",
        ),
        ("a logistic look reaches twice as far", "return 0.5 * math.log(ratio)", "return math.log(ratio)"),
        (
            "a linear look reaches too far",
            "((root - 1.0) / (root + 1.0) if",
            "((root - 1.0) / (root - 0.5) if",
        ),
        ("moves are signed", "map(mul, map(abs, move), self.columns", "map(mul, move, self.columns"),
    ),
    *_many(
        "protocol/subjects.py",
        "tests/protocol/test_designs.py",
        ("the response is not compared", "_same(self.y, submodel.y) and", ""),
        ("the weights are not compared", " and _agree(self.w, submodel.w)", ""),
        ("weights are left out", "x[part] if w is None else x[part] * w[part]", "x[part]"),
        ("rows of other weights are another response", "and _agree(self.w,", "and _same(self.w,"),
        ("columns of other rows are known", "_same(w, weights) and (by_name or", "(by_name or"),
        (
            "all weights agree",
            "bool(((left == right) | (left == 0.0) | (right == 0.0)).all())",
            "True",
        ),
        (
            "the last model alone",
            "known = self.columns.setdefault(name, [])",
            "self.columns = {name: (known := [])}",
        ),
        (
            "a second model adds nothing",
            "if is_first or not any(is_new):",
            "if is_first or True:",
        ),
        (
            "rows after the first part",
            "for start in range(0, len(columns[0][0]), LOOK_ROWS):",
            "for start in range(0, 1, LOOK_ROWS):",
        ),
        ("copies are other responses", "left is right or np.array_equal(left, right)", "left is right"),
    ),
    *_many(
        "protocol/bins.py",
        f"tests/protocol/test_bins.py {SUPPRESSED}",
        (
            "small numbers of those left",
            "runs[run].is_enough(floor) and left[run].is_enough(floor)",
            "runs[run].is_enough(floor)",
        ),
        (
            "those who stay hide the last",
            "runs[run].is_enough(floor) and left[run].is_enough(floor)",
            "left[run].is_enough(floor)",
        ),
        (
            "a hidden number is an empty bin",
            "shown: list[BinTotal | None] = [None] * len(group)",
            "shown: list[BinTotal | None] = [replace(stay, count=0)] * len(group)",
        ),
        (
            "too few are shown together",
            "if firsts is None and not left[0, end].is_enough(floor):",
            "if False:",
        ),
        ("leavers are bins of their own", "rule = _left if self.bins.of_leavers else", "rule ="),
    ),
    *_many(
        "protocol/masked.py",
        "tests/protocol/test_alone.py",
        ("a liar's people are believed", "most = min(liars, len(groups) - 1)", "most = 0"),
        ("nobody is believed", "most = min(liars, len(groups) - 1)", "most = liars"),
        ("own people are others", "people > count * is_mine", "people > 0"),
        ("a column that nobody has here", "if count and others <= most:", "if others <= most:"),
    ),
    *_many(
        "protocol/guard.py",
        "tests/protocol/test_alone.py",
        ("own columns are answered", "if found and not self.policy.allow_own_columns:", "if False:"),
        ("own columns are not noted", "self.remark = about_alone(tuple(found))", "pass"),
        ("a rehearsal names all levels", "if count and count == max(people) and", "if count and"),
    ),
    *_many(
        "programs/time.py",
        f"{ATTACKS} {SUPPRESSED}",
        ("events need no floor", '"min_events" if cause else "min_missing"', '""'),
        ("events are not hidden", 'floors=("min_cell", "min_events")', "floors=()"),
    ),
    *_many(
        "programs/regimes.py",
        ATTACKS,
        (
            "events need no floor",
            'CountCell(k, floor="min_events", rest_floor="")',
            'CountCell(k, floor="", rest_floor="")',
        ),
        (
            "censored need no floor",
            'CountCell(k, floor="min_missing", rest_floor="")',
            'CountCell(k, floor="", rest_floor="")',
        ),
    ),
    *_many(
        "targets/time/statistics.py",
        ATTACKS,
        (
            "weights of a life table",
            "return range(len(self.names)) if self.columns.weights else ()",
            "return ()",
        ),
    ),
    *_many(
        "protocol/masks.py",
        MASKS,
        (
            "a lane is one bit narrower",
            "return (2 * self.reach).bit_length()",
            "return (2 * self.reach).bit_length() - 1",
        ),
        ("totals beyond their bound", "if offset > 2 * self.reach:", "if offset > 4 * self.reach:"),
        ("the check is not compared", "if self.pack(totals).check != whole.check:", "if False:"),
        ("the check forgets the order", "factor = factor * FACTOR % PRIME", "factor = FACTOR"),
        (
            "a carry leaves its lane",
            "low = (one.packed & ~self._tops) + (other.packed & ~self._tops)",
            "low = one.packed + other.packed",
        ),
        (
            "minus is the complement",
            "return self.add(complement, Masked(self._ones, 0))",
            "return complement",
        ),
        ("both silos add", "if subtracts:", "if False:"),
        (
            "one key for all sessions",
            '_digest("fedtmle masks", plan, session)',
            '_digest("fedtmle masks", plan)',
        ),
        (
            "one key for all plans",
            '_digest("fedtmle masks", plan, session)',
            '_digest("fedtmle masks", session)',
        ),
        (
            "the same mask in every round",
            '_digest("fedtmle round", n, round, heard)',
            '_digest("fedtmle round", n, heard)',
        ),
        (
            "silos that heard other things",
            '_digest("fedtmle round", n, round, heard)',
            '_digest("fedtmle round", n, round)',
        ),
        (
            "another number of rows",
            '_digest("fedtmle round", n, round, heard)',
            '_digest("fedtmle round", round, heard)',
        ),
        (
            "names are not in the key",
            "msgspec.msgpack.encode((roster[first], roster[second]))",
            "msgspec.msgpack.encode((first, second))",
        ),
        ("a check may be any number", "if check >= PRIME:", "if check > PRIME + 1:"),
        ("the check has no mask", 'int.from_bytes(data[size:], "big") % PRIME', "0"),
    ),
    *_many(
        "model/budget.py",
        NOISE,
        ("colluders add noise too", "return variance / (silos - colluders)", "return variance / silos"),
        ("sharing costs nothing", "Fraction(10 * (silos - 1) * lanes, 4 << halvings)", "Fraction(0)"),
    ),
    *_many(
        "fedtmle_core/noise.py",
        NOISE,
        ("half of the noise", "2 * a * b * t * t, below)", "a * b * t * t, below)"),
        ("zero has twice its mass", "            if x:\n                return -x", "            return -x"),
        ("every remainder is as likely", "if not _exp_coin(u, t, below):", "if False:"),
    ),
    *_many(
        "fedtmle_core/publish/counts.py",
        PUBLISHED,
        ("a few are safe", "count >= k for count in counts", "count >= 1 for count in counts"),
        (
            "the rest of a group may be few",
            "return nearest if total - nearest >= k else",
            "return nearest if True else",
        ),
        ("a table's total is not the published one", "    sums[-1] = total\n", ""),
        ("few may be left in the largest cell", "if found[largest] >= k:", "if True:"),
        ("few who are left out are counted", "omitted if is_safe([omitted], k) else", "omitted if True else"),
    ),
    *_many(
        "fedtmle_core/publish/rules.py",
        PUBLISHED,
        (
            "a key that is not listed goes out",
            "in document.items() if key in allowed}",
            "in document.items()}",
        ),
        ("rungs differ by anybody", "goes = all(gap == 0 or gap >= k", "goes = all(True or gap >= k"),
        ("a p-value of the exact estimate", "math.erfc(distance / error / math.sqrt(2))", 'row["p_value"]'),
        ("people at risk are exact", "chain = [rounded(left, whole) for", "chain = [left for"),
    ),
    *_many(
        "fedtmle_core/publish/groups.py",
        PUBLISHED,
        ("one person may be most of a mean", "return least >= 2 * width and people", "return people"),
        ("one person may be most of the squares", "and people * sd * sd >= 2 * width * width", ""),
        ("means of some hospitals", 'and not line["hidden_in"] and people >= whole.k', ""),
        ("a share is exact", "round(cut(mean * people, people, whole.k) / people, 4)", "mean"),
        ("bins of a few events", "least[0] >= needed - 1e-6 and min(least) >= 2", "True"),
    ),
    *_many(
        "fedtmle_core/publish/allowed.py",
        PUBLISHED,
        ("a sentence with numbers goes out", "instead or sentence)", "sentence)"),
        ("messages have a digest", '"transcript": left_out()', '"transcript": EXACT'),
    ),
    *_many(
        "protocol/sums.py",
        "tests/effects/test_noisy_sums.py",
        ("noise for half the budget", "// (2 * self.rho))", "// (4 * self.rho))"),
        (
            "the sensitivity has no rounding",
            "return root + math.isqrt(len(self.columns.names)) + 1",
            "return root - 1",
        ),
        ("the variance is not the square", "-(-(self.sensitivity**2) //", "-(-(self.sensitivity) //"),
    ),
    *_many(
        "targets/effects/noisy.py",
        "tests/effects/test_noisy_sums.py",
        (
            "a record changes one stratum only",
            "moments = max(moments, 2 * (1 + Fraction(COUNT_SCALE) ** 2 + Fraction(self.scale) ** 2))",
            "moments = moments / 2",
        ),
        (
            "strata have the scale of one dimension",
            "SQUARE_SCALE[2 if self.strata else min(self.dim, 2)]",
            "SQUARE_SCALE[min(self.dim, 2)]",
        ),
        ("terms are not clipped", "t /= np.maximum(length, 1.0)", "t /= 1.0"),
    ),
    *_many(
        "programs/noisy.py",
        "tests/studies/test_private.py tests/studies/test_private_table.py",
        ("everyone has the noise of one stratum", "math.sqrt(len(parts)) * of_sums", "of_sums"),
        ("widths are compared with noise", "np.maximum(least, np.diag(observed) - 2.0 * error)", "math.inf"),
    ),
    *_many(
        "model/budget.py",
        "tests/model/test_budget.py",
        ("epsilon without delta", "- (delta * alpha).ln() / excess", "- alpha.ln() / excess"),
        (
            "rho is rounded up",
            "Fraction(int(rho * 2**PLACES) - 1, 2**PLACES)",
            "Fraction(int(rho * 2**PLACES) + 2, 2**PLACES)",
        ),
        (
            "parts add up to more",
            "Fraction(int(self.rho * Fraction(share) * 2**PLACES), 2**PLACES)",
            "Fraction(int(self.rho * Fraction(share) * 2**PLACES) + 1, 2**PLACES)",
        ),
    ),
    *_many(
        "protocol/codes.py",
        CODES,
        ("the sign is lost", "return 2 * a + 1 if a >= 0 else -2 * a", "return 2 * abs(a) + 1"),
        (
            "fixed width is one too small",
            "return (2 * largest).bit_length()",
            "return max(1, (2 * largest).bit_length() - 1)",
        ),
        ("the range is not checked", "if value > reach:", "if value > reach + 1:"),
        ("bits may follow", "if self._at < self._end:", "if self._at + 8 < self._end:"),
        ("padding may be anything", "if self._peek(bits.length, self._end):", "if False:"),
        (
            "the length is not compared",
            "if bits.length < 0 or len(bits.data) != (bits.length + 7) // 8:",
            "if bits.length < 0:",
        ),
        (
            "a codeword may go on past the end",
            "if width > self._end - self._at:",
            "if width > self._end - self._at + 8:",
        ),
        ("a count may be too large", "if not least <= count <= most:", "if not least <= count:"),
        (
            "numbers may be infinite",
            "if not all(map(math.isfinite, values)):",
            "if any(map(math.isnan, values)):",
        ),
        ("differences from the wrong end", "tuple(before + step for", "tuple(before - step for"),
    ),
    *_many(
        "protocol/lattice.py",
        LATTICE,
        (
            "a coordinate's tolerance is doubled",
            "4 * self.h * abs(image) <= 3 * self.delta * scale",
            "2 * self.h * abs(image) <= 3 * self.delta * scale",
        ),
        (
            "the spacing is the widest coordinate's",
            "return min((self.delta * scale) ** 2",
            "return max((self.delta * scale) ** 2",
        ),
        ("half is rounded up", "(twice == 0 and quotient % 2 == 1)", "(twice == 0)"),
        ("half is rounded to odd", "quotient % 2 == 1", "quotient % 2 == 0"),
        ("the spacing is half as large", "h = Fraction(2) ** power", "h = Fraction(2) ** (power - 1)"),
        (
            "whitened spacing is rounded down twice",
            "h = math.isqrt(math.floor(widest / unit**2)) * unit",
            "h = (math.isqrt(math.floor(widest / unit**2)) - 1) * unit",
        ),
        (
            "a step may be small",
            "16 * self.raw_norm_squared(q) <= 9 * self.delta**2",
            "16 * self.raw_norm_squared(q) <= 4 * self.delta**2",
        ),
        ("the certificate leaves rounding out", "+ root_up(rounding), math.inf)", ", math.inf)"),
        (
            "the check is not compared",
            "if bits.uint(CHECK_BITS) != lattice.digest():",
            "if bits.uint(CHECK_BITS) < 0:",
        ),
        ("an even mantissa is read", "if mantissa % 2 == 0 and not", "if mantissa % 4 == 2 and not"),
        (
            "an exponent has no bound",
            "if abs(exponent) > LARGEST_EXPONENT:",
            "if abs(exponent) > 2 * LARGEST_EXPONENT:",
        ),
        ("beta may be negative", "if beta <= 0 or any(", "if any("),
        ("the public gradient is left out", "+ n_rows * round(", "+ 0 * round("),
        (
            "C is rounded to seven bits",
            "unit = Fraction(2) ** (exponent - SIGNIFICANT_BITS)",
            "unit = Fraction(2) ** (exponent - SIGNIFICANT_BITS + 1)",
        ),
        ("the norm's bound is not proved", "if pivot_row[i] <= 0:", "if False:"),
    ),
    *_many(
        "protocol/coded.py",
        CODED,
        ("the action is not checked", "if action != self.query.action(q):", "if action > 3:"),
        (
            "the run ends where it accepts",
            "return Action.FINISH if self.at_origin else Action.ACCEPT",
            "return Action.FINISH",
        ),
        (
            "silos are not weighted",
            "return tuple(n_rows * z for z in answer)",
            "return tuple(self.n // 2 * z for z in answer)",
        ),
        ("a curvature has no bound", "if abs(exponent) > LARGEST_EXPONENT:", "if False:"),
        (
            "the smallest silo's smoothness",
            "significant(factor * (max(norms) + spread), up=True)",
            "significant(factor * (min(norms) / 8 + spread), up=True)",
        ),
    ),
    *_many(
        "protocol/fits.py",
        FITS,
        (
            "retired silos are averaged",
            "if not (self.retiring and answer.outcome is FitOutcome.ZERO)",
            "if True",
        ),
        ("an outcome need not agree", "eps.any() != (outcome is FitOutcome.FITTED):", "eps.any() is None:"),
        ("the noise is not squared", "<= self.noise**2 * len(gradient))", "<= self.noise * len(gradient))"),
        ("a fit beyond the ball", "min(max(z, -self.reach), self.reach)", "z"),
        (
            "the average is not divided",
            "round(AVERAGE_STEPS * total / mass) for total",
            "round(AVERAGE_STEPS * total) for total",
        ),
        (
            "the gap is half as large",
            "rounded = beta * self.dim * self.rule.lattice**2 / 8",
            "rounded = beta * self.dim * self.rule.lattice**2 / 16",
        ),
        ("the mildest ending counts", "worst=max((answer.outcome", "worst=min((answer.outcome"),
        (
            "people of retired silos count",
            "people = (n_rows * (answer.outcome is not FitOutcome.ZERO),)",
            "people = (n_rows,)",
        ),
        (
            "retired silos still fit",
            "return self.silos - self.by_outcome[FitOutcome.ZERO]",
            "return self.silos",
        ),
        (
            "people need not agree with silos",
            "if self.retiring and (mass > 0) != (fitting > 0):",
            "if False:",
        ),
        (
            "nobody knows that it retired",
            "return self if self.retiring and addends[FitOutcome.ZERO - len(FitOutcome)] else None",
            "return None",
        ),
    ),
    *_many(
        "protocol/plan.py",
        FOLLOWER,
        ("a round is not counted", "self.heard = self.round + 1, None", "self.heard = self.round, None"),
        ("the outcome is lost", "self.query, self.outcome = None, stop.value", "self.query = None"),
        ("the query stays", "self.query = self._flow.send(pooled)", "self._flow.send(pooled)"),
        ("any broadcast is shared", "self.round == number + 1 and self.heard == broadcast", "True"),
        ("a follower alone forgets", "self._broadcasts.append(broadcast)", "pass"),
        ("another run is shared", "path.plan is plan and path.n == n and", "path.plan is plan and"),
        ("another plan is shared", "if path.plan is plan and path.n == n", "if path.n == n"),
        ("a run that has begun is joined", "path.n == n and path.round == 1:", "path.n == n:"),
        (
            "a flow fails for one party only",
            "self.round, self.heard = self.round + 1, None",
            "self.round, self.heard = self.round + 1, broadcast",
        ),
        ("a follower alone begins again", "for broadcast in self._broadcasts:", "for broadcast in ():"),
        (
            "the looks of a later round are used",
            "if self._path.looks is not None and self._path.round != self.round:",
            "if False:",
        ),
    ),
    *_many(
        "protocol/policy.py",
        LOWERED,
        ("no reason is needed", "if limit is None or not limit.is_laxer(stated):", "if True:"),
        ("an empty reason will do", "if not 0 < len(words) <=", "if not 0 <= len(words) <="),
        ("a reason is as long as it likes", "0 < len(words) <= LONGEST_REASON or", "0 < len(words) or"),
        ("a reason has any characters", " or not words.isprintable()", ""),
        (
            "a permission is lowered",
            "if limit is None or limit.direction not in (Direction.FLOOR, Direction.CAP):",
            "if limit is None:",
        ),
        ("a stricter limit needs a reason", "    if not limit.is_laxer(value):", "    if False:"),
        (
            "half a record is a limit",
            "if isinstance(limit.default, int) and value != int(value):",
            "if False:",
        ),
        ("a floor is laxer if higher", "return value < self.default", "return value > self.default"),
        ("a cap is laxer if lower", "return value > self.default", "return value < self.default"),
        (
            "earlier reasons stay in force",
            "reset = replace(self, reasons={}, **{key: defaults[key] for key in self.reasons})",
            "reset = self",
        ),
        ("a reason for nothing is accepted", "        for name in reasons:\n", "        for name in ():\n"),
    ),
    *_many(
        "studies/home.py",
        LOWERED,
        (
            "the silo file lowers what no approval signs",
            "return self.lowering(decision.lowered if decision is not None and decision.approved else ())",
            "return self if decision is None else self.lowering(decision.lowered)",
        ),
        (
            "a rejected plan lowers limits",
            "if decision is not None and decision.approved else ()",
            "if decision is not None else ()",
        ),
        ("an approval lowers nothing", "            lowered=self.file.policy.lowered,\n", ""),
    ),
    *_many(
        "runtime/signing.py",
        LOWERED,
        (
            "lowered limits are not signed",
            '(*titled, {"lowered": self.lowered}) if self.lowered else titled',
            "titled",
        ),
    ),
    *_many(
        "runtime/silo.py",
        LOWERED,
        (
            "lowered limits are not stated",
            "lowered = policy.lowered if policy.reasons else ()",
            "lowered = ()",
        ),
    ),
    *_many(
        "runtime/session.py",
        LOWERED,
        ("the server believes any limit", "[checked_limit(limit) for limit in limits]", "list(limits)"),
    ),
    *_many(
        "protocol/messages.py",
        MESSAGES,
        ("a message has many forms", "if encode(message) != data:", "if len(encode(message)) > len(data):"),
        ("a message has any length", "if len(data) > MAX_BYTES:", "if False:"),
        (
            "a refusal does not end the run",
            "Event.REPLIED: State.ANSWERING, Event.REFUSED: State.REFUSED}",
            "Event.REPLIED: State.ANSWERING, Event.REFUSED: State.ANSWERING}",
        ),
        (
            "a refused opening ends it",
            "{Event.REPLIED: State.OPENED, Event.REFUSED: State.NEW}",
            "{Event.REPLIED: State.OPENED, Event.REFUSED: State.REFUSED}",
        ),
        (
            "a closed silo answers",
            "{Event.REPLIED: State.CLOSED, Event.REFUSED: State.REFUSED}",
            "{Event.REPLIED: State.ANSWERING, Event.REFUSED: State.REFUSED}",
        ),
        ("a flood does not end", "EXHAUSTED = State.REFUSED", "EXHAUSTED = State.NEW"),
    ),
    *_many(
        "runtime/silo.py",
        SILO,
        (
            "any plan",
            "return None if message.plan == self._plan.digest else Reason.OTHER_PLAN",
            "return None",
        ),
        ("any format", "if message.format != messages.WIRE_FORMAT:", "if False:"),
        ("any session", "fits = message.session == position.session", "fits = True"),
        (
            "rows beyond n",
            "range(1 if self._plan.is_masked else message.n - self.n_rows + 1)",
            "range(message.n + 1)",
        ),
        (
            "any round",
            "fits = fits and message.round == self._follower.round + 1",
            "fits = fits and message.round > self._follower.round",
        ),
        ("a repeat is computed again", "if last is not None and request == last[0]:", "if False:"),
        ("strays are not counted", "self._position.strays += 1", "self._position.strays += 0"),
        (
            "rows are not examined",
            "        self._guard.examine(query, self._rows",
            "        (lambda *_: None)(query, self._rows",
        ),
        (
            "the answer is not released by the guard",
            "return self._guard.release(query, answer, self.n_rows)",
            "return answer",
        ),
        (
            "an approval is not asked for",
            "if keeper.approves is not None and not keeper.approves(plan.digest):",
            "if False:",
        ),
        ("a study does not expire", "today > plan.expires", "today < plan.expires"),
        (
            "a day has an hour",
            "keeper.policy.lifetime_days * 86_400",
            "keeper.policy.lifetime_days * 864_000",
        ),
        (
            "a close may come early",
            "        if outcome is None:\n            raise DecodeError",
            "        if False:\n            raise DecodeError",
        ),
        (
            "what was heard is not digested",
            "position.heard.update(messages.encode(message))\n            self._follower.hear(",
            'position.heard.update(b"")\n            self._follower.hear(',
        ),
        ("an answer is not charged", "        guard.charge(query, reply.payload.length, len(without))\n", ""),
    ),
)


def main(arguments: Sequence[str]) -> int:
    """Run the mutations whose names contain every word given; return the exit status."""
    parser = argparse.ArgumentParser(description="Break the code one line at a time and see a test fail.")
    parser.add_argument(
        "words", nargs="*", help="run the mutations whose names contain every word; all if none"
    )
    parser.add_argument("--list", action="store_true", help="print the names and run nothing")
    parser.add_argument(
        "--quick", action="store_true", help="skip the first run of the tests on the unchanged code"
    )
    options = parser.parse_args(arguments)
    chosen = [mutation for mutation in MUTATIONS if all(word in mutation.name for word in options.words)]
    if options.list:
        _say(*(mutation.name for mutation in chosen))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Tree(Path(folder))
        tests = sorted({test for mutation in chosen for test in mutation.tests})
        failing = "" if options.quick else tree.first_failure(tests)
        if failing:
            _say(f"without any mutation {failing} fails: mend it first")
            return 1
        results = []
        for mutation in chosen:
            results.append(tree.attempt(mutation))
            _say(f"{mutation.name:60} {results[-1]}")
    survived, obsolete = results.count(SURVIVED), sum(one.startswith(OBSOLETE) for one in results)
    caught = len(results) - survived - obsolete
    _say(f"{len(results)} mutations: {caught} caught, {survived} survived, {obsolete} no longer apply")
    return int(survived + obsolete > 0)


SURVIVED = "SURVIVED"
OBSOLETE = "DOES NOT APPLY"


class Tree:
    """A copy of the source tree on which tests run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._now = time.time()
        for package in PACKAGES:  # with what is compiled already
            shutil.copytree(ROOT / package, folder / package)

    def attempt(self, mutation: Mutation) -> str:
        """Return the test that notices the mutation, or why there is none."""
        folder = "core/src" if mutation.file.startswith("fedtmle_core/") else "src/fedtmle"
        path = self._folder / folder / mutation.file
        original = path.read_text(encoding="utf-8")
        count = original.count(mutation.code)
        if count != 1:
            return f"{OBSOLETE}: its code occurs {count} times in {mutation.file}, expected once"
        self._write(path, original.replace(mutation.code, mutation.instead))
        try:
            return self.first_failure(mutation.tests) or SURVIVED
        finally:
            self._write(path, original)

    def _write(self, path: Path, text: str) -> None:
        """Write the file with a time of its own: compiled files are kept by the second of the change."""
        path.write_text(text, encoding="utf-8")
        self._now += 2
        os.utime(path, (self._now, self._now))

    def first_failure(self, tests: Sequence[str]) -> str:
        """Return the first test that fails on this tree, '' if none does."""
        paths = (*(self._folder / package for package in PACKAGES), ROOT / "paper" / "src", ROOT)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "HYPOTHESIS_STORAGE_DIRECTORY": str(self._folder / "hypothesis"),
        }
        command = [sys.executable, "-m", "pytest", *OPTIONS, *tests]
        try:
            done = subprocess.run(  # noqa: S603 - our own tests
                command,
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                timeout=PATIENCE,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return "the tests, which do not end"
        if done.returncode == 0:
            return ""
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, flags=re.MULTILINE)
        return failed[1] if failed else f"pytest, which ends with status {done.returncode}"


def _say(*lines: str) -> None:
    sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
