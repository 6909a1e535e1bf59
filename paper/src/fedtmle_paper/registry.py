"""Every numbered statement of the paper: the function that computes it and the test that checks it.

A statement without a function has a reason. ``python -m tools.document`` writes the table to docs/proved.md.
A test compares the two, imports every function and looks up every test.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

OBJECT = "a definition that the code is built on, not a bound"
ASSUMPTION = "an assumption; the certificate labels the constants that a run rests on"


@dataclass(frozen=True, kw_only=True)
class Statement:
    """A label of the paper (or the section of an unnumbered statement), and where it is computed."""

    label: str
    functions: tuple[str, ...] = ()  # full names, e.g. fedtmle.theory.communication.round_bound
    tests: tuple[str, ...] = ()  # below tests, e.g. theory/test_runs.py::test_...
    reason: str = ""


_TRANSCRIPTION = "theory/test_transcription.py::test_agrees_with_the_second_transcription"
_RUNS = "theory/test_runs.py::test_no_realised_quantity_exceeds_its_bound"
_PERSONAL = "theory/test_runs.py::test_no_averaging_error_or_gap_exceeds_its_bound"
_DESCENT = "theory/test_attained.py::test_descent_energy_steps_rounds_and_path_length"
_MESSAGES = "theory/test_attained.py::test_bits_of_first_and_later_messages"
_CHAIN = "theory/test_exact_constants.py::test_the_universal_constant_of_bits"
_HISTORY = "theory/test_attained.py::test_history_code_length"
_GAPS = "theory/test_identities.py::test_gaps_split_into_descent_and_averaging_and_telescope"
_CHI = "theory/test_identities.py::test_chi_in_both_modes_is_the_common_form_and_its_sum_counts_participation"
_QUADRATICS = "theory/test_attained.py::test_quadratics_attain_the_averaging_and_gap_bounds"
_FOURTH = "theory/test_exact_constants.py::test_fourth_order_terms"
_IDENTITIES = "theory/test_identities.py::test_interpolation_and_trapezoid_identities_are_exact"

_GAINS = "theory/test_attained.py::test_quadratics_attain_the_gains_of_rounding_and_of_inexact_fits"
_RETIREMENT = "theory/test_future.py::test_early_retirement_stays_within_its_bound"

_FORMS = "privacy/test_modulus.py::test_primal_dual_and_spectral_agree"
_SOLVERS = "privacy/test_modulus.py::test_against_general_solvers"
_COLLISION = "privacy/test_collision.py::test_distance_and_response_stay_on_their_sides"
_SANDWICH = "privacy/test_disclosure.py::test_the_sandwich_holds_against_brute_force"
_DECODER = "privacy/test_disclosure.py::test_no_adversary_beats_the_decoders_guarantee"


_ELSEWHERE = {
    "history": "fedtmle_paper.history",
    "lemmas": "fedtmle_paper.lemmas",
    "design": "fedtmle_paper.privacy.design",
    "discrete": "fedtmle_paper.privacy.discrete",
    "collision": "fedtmle_paper.privacy.collision",
    "disclosure": "fedtmle_paper.privacy.disclosure",
    "family": "fedtmle_paper.privacy.family",
    "certificate": "fedtmle.runtime.certificate",
}  # modules of this package, and those elsewhere in fedtmle than the statement's room


def _computed(label: str, functions: str, *tests: str) -> Statement:
    """Return a statement of the theory; ``functions`` are names within it, separated by spaces."""
    return Statement(label=label, functions=_named("fedtmle.theory", functions), tests=tests)


def _disclosed(label: str, functions: str, *tests: str) -> Statement:
    """Return a statement of section 4.3; ``functions`` are names, separated by spaces."""
    return Statement(label=label, functions=_named("fedtmle.privacy", functions), tests=tests)


def _named(package: str, functions: str) -> tuple[str, ...]:
    """Return the full names of ``functions``, whose modules are in ``_ELSEWHERE`` or in ``package``."""
    split = (name.split(".") for name in functions.split())
    return tuple(f"{_ELSEWHERE.get(module, f'{package}.{module}')}.{name}" for module, name in split)


def _not(label: str, reason: str) -> Statement:
    return Statement(label=label, reason=reason)


_STATEMENTS: tuple[Statement, ...] = (
    # Section 2.
    _not("eq:remainder", "R_2 needs p_0: an argument of remainder_bound, evaluated in simulation"),
    _not("eq:plugin-expansion", "an identity with p_0 in it; its terms are those of thm:statistical"),
    _not("eq:eif-equation", OBJECT),
    _not("def:fluctuation", OBJECT),
    _not("eq:local-score", "a property of a target, which check_problem tests"),
    _not("eq:fluctuation-objective", OBJECT),
    _computed("section 2.3, residual", "communication.residual_bound", _TRANSCRIPTION, _RUNS),
    _not("alg:centralized-tmle", "algorithms.gradient.Central"),
    # Section 3.
    _not("alg:gradient-aggregation", "algorithms.gradient.Gradient"),
    _not("eq:local-average", "algorithms.local.LocalAverage"),
    _not("alg:local-averaging", "algorithms.local.LocalAverage"),
    # Section 4.1.
    _computed("ass:smooth", "path.realised_smoothness", _RUNS),
    _computed("eq:loss-budget", "path.loss_budget", _RUNS),
    _computed("ass:recentering", "path.recentering path.first_gradient", _RUNS),
    _computed(
        "ass:statistical-code",
        "history.encode_initial",
        "theory/test_history.py::test_what_the_initial_code_holds",
    ),
    _not("ass:local-regularity", ASSUMPTION),
    _not("eq:personalized-regularity", ASSUMPTION),
    _not("ass:local-complexity", ASSUMPTION),
    _computed("section 4.1, compact example", "lemmas.log_cover_compact", _TRANSCRIPTION),
    # Section 4.2 and S.2.1.
    _computed("eq:lattice-spacing", "lemmas.spacing_range communication.scaled_tolerance", _RUNS),
    _not("eq:protocol-action", "protocol.coded.RoundedGradientQuery.action"),
    _computed(
        "eq:rounding-guarantee",
        "lemmas.rounding_bound",
        _RUNS,
        "theory/test_attained.py::test_rounding_bound_is_nearly_attained",
    ),
    _computed(
        "section 4.2, fixed width",
        "communication.fixed_width_bits communication.fixed_width_cost",
        "algorithms/test_coded.py::test_fixed_width_has_the_same_decoded_iterates",
    ),
    _not("alg:coded-gradient", "algorithms.coded.Coded"),
    _computed(
        "section 4.2, one step per update",
        "communication.one_step_round_bound",
        _RUNS,
        "theory/test_identities.py::test_one_step_per_update_varies_by_kappa_alone",
    ),
    _computed(
        "thm:communication",
        "communication.round_bound communication.universal_bit_bound certificate.coded_checks",
        _RUNS,
        _CHAIN,
    ),
    _computed(
        "eq:main-communication",
        "communication.round_bound communication.planned_bit_bound communication.universal_bit_bound",
        _DESCENT,
        _CHAIN,
    ),
    _computed("eq:pathwise-bit-bound", "communication.pathwise_bit_bound", _RUNS, _TRANSCRIPTION),
    _computed(
        "eq:variation-summary",
        "communication.energy_bound communication.variation_bound",
        _RUNS,
        "theory/test_attained.py::test_variation_summary",
    ),
    _computed(
        "eq:proof-code-length",
        "lemmas.code_length_bound",
        "theory/test_attained.py::test_code_lengths",
    ),
    _computed("eq:proof-rounding-error", "lemmas.rounding_bound", _RUNS),
    _not("eq:proof-pooled-smoothness", "an average of the silos' inequalities: no number of its own"),
    _computed(
        "S.2.1, decrease of a step",
        "lemmas.rounded_step_decrease communication.step_decrease lemmas.step_decrease_floor",
        _RUNS,
        _DESCENT,
    ),
    _computed("eq:proof-energy-and-steps", "communication.energy_bound communication.step_bound", _DESCENT),
    _computed("eq:proof-rounds", "lemmas.rounds communication.round_bound", _RUNS, _DESCENT),
    _computed("eq:proof-path-length", "lemmas.path_length_bound lemmas.path_length_ceiling", _DESCENT),
    _computed(
        "eq:proof-within-variation",
        "lemmas.variation_within",
        "theory/test_attained.py::test_variation_within_and_across",
    ),
    _computed(
        "eq:proof-recenter-variation",
        "lemmas.variation_across",
        "theory/test_attained.py::test_variation_within_and_across",
    ),
    _computed("eq:proof-total-variation", "communication.variation_bound", _RUNS),
    _computed("eq:proof-pooled-variation", "communication.variation_bound", _RUNS),
    _computed("eq:proof-initial-bits", "lemmas.first_message_bits", _MESSAGES),
    _computed("eq:proof-upload-sum", "lemmas.upload_bits", _MESSAGES),
    _computed("eq:proof-broadcast-sum", "lemmas.broadcast_bits", _MESSAGES),
    _computed("eq:proof-pathwise-bits", "communication.bits_at_spacing", _MESSAGES),
    # thm:statistical and S.2.2.
    _computed(
        "thm:statistical",
        "statistical.code_allowance lemmas.remainder_bound history.decode_law",
        "theory/test_history.py::test_the_code_decodes_to_the_identical_law",
        "theory/test_statistical.py::test_remainder_bound_covers_the_error_of_coded_runs",
    ),
    _computed(
        "eq:history-length",
        "statistical.history_bits lemmas.history_bits_bound lemmas.history_bits_rate "
        "statistical.history_bits_ceiling",
        _HISTORY,
        _RUNS,
    ),
    _computed(
        "eq:history-statistical-bound",
        "lemmas.remainder_bound",
        _TRANSCRIPTION,
        "theory/test_statistical.py::test_remainder_bound_covers_the_error_of_coded_runs",
    ),
    _computed(
        "S.2.2, sum of history integers",
        "lemmas.history_sum_bound lemmas.history_sum_ceiling",
        _DESCENT,
        _RUNS,
    ),
    _computed(
        "eq:proof-integer-kraft",
        "lemmas.integer_kraft",
        "theory/test_history.py::test_kraft_sums_are_exact",
    ),
    _computed(
        "eq:proof-history-kraft",
        "lemmas.history_kraft",
        "theory/test_history.py::test_kraft_sums_are_exact",
    ),
    _computed(
        "eq:proof-moment-control",
        "lemmas.fixed_code_deviation",
        "theory/test_exact_constants.py::test_moment_series_gives_the_envelope_constant",
    ),
    _computed(
        "S.2.2, fixed-code bound",
        "lemmas.fixed_code_deviation lemmas.fixed_code_tail",
        "theory/test_probability.py::test_fixed_code_bernstein_bound_holds_exactly",
        "theory/test_probability.py::test_no_smaller_bernstein_constant_holds",
    ),
    _computed(
        "eq:proof-vector-concentration",
        "statistical.process_bound",
        "theory/test_probability.py::test_simultaneous_bound_over_a_family_of_codes_by_frequency",
    ),
    # cor:inference and S.2.3.
    _computed(
        "cor:inference",
        "statistical.tolerance_schedule statistical.negligible_tolerance",
        "theory/test_statistical.py::test_schedule_and_orders",
    ),
    _computed("eq:inference-cost", "lemmas.cost_order", _TRANSCRIPTION),
    _computed(
        "eq:inference-conditions",
        "statistical.inference_conditions",
        "theory/test_statistical.py::test_conditions_are_open_where_data_cannot_tell",
    ),
    _not("eq:canonical-limit", "a limit in distribution: nothing to evaluate on one run"),
    _computed(
        "eq:history-asymptotic",
        "lemmas.history_order lemmas.history_order_constant",
        "theory/test_statistical.py::test_schedule_and_orders",
    ),
    _computed("eq:proof-root-n-bound", "lemmas.root_n_bound", _TRANSCRIPTION),
    # Section 4.3, S.2.4 and S.2.5.
    _disclosed(
        "eq:robust-channel", "audit.audit", "privacy/test_audit.py::test_what_is_left_is_what_answers_allow"
    ),
    _disclosed(
        "thm:reconstruction",
        "collision.collision_pair collision.reconstruction_risk",
        _COLLISION,
        "privacy/test_figure.py::test_records_stay_open_while_their_mean_is_known",
    ),
    _disclosed(
        "eq:query-smoothness",
        "collision.segment_smoothness",
        "privacy/test_figure.py::test_smoothness_of_a_known_function",
    ),
    _disclosed(
        "eq:collision-pair",
        "collision.collision_pair collision.distance_floor collision.response_ceiling",
        _COLLISION,
        "privacy/test_collision.py::test_moments_below_s_cancel_and_the_next_does_not",
        "privacy/test_collision.py::test_the_response_bound_is_attained_by_the_monomial",
    ),
    _disclosed(
        "eq:reconstruction-risk",
        "collision.reconstruction_risk collision.sharper_reconstruction_risk",
        "privacy/test_collision.py::test_the_risk_bound_is_half_of_a_pair_that_the_noise_hides",
    ),
    _disclosed(
        "eq:attribute-smoothness",
        "disclosure.response_smoothness disclosure.Smooth",
        "privacy/test_disclosure.py::test_mean_gradients_have_the_stated_smoothness",
        "privacy/test_attacks.py::test_attributes_have_the_gradients_they_say",
    ),
    _disclosed("eq:disclosure-design", "design.design_modulus", _FORMS, _SOLVERS),
    _disclosed("thm:disclosure", "disclosure.attribute_risk disclosure.affine_decoder", _SANDWICH, _DECODER),
    _disclosed("eq:disclosure-sandwich", "disclosure.attribute_risk", _SANDWICH),
    _disclosed("eq:disclosure-spectrum", "design.modulus_forms", _FORMS, _SOLVERS),
    _disclosed("eq:proof-collision-distance", "collision.collision_distance", _COLLISION),
    _disclosed(
        "eq:proof-level-derivative",
        "collision.level_points",
        "privacy/test_collision.py::test_moments_below_s_cancel_and_the_next_does_not",
    ),
    _disclosed(
        "eq:proof-collision-response",
        "collision.response_ceiling collision.transcript_ceiling",
        _COLLISION,
        "privacy/test_collision.py::test_the_response_bound_is_attained_by_the_monomial",
    ),
    _disclosed(
        "eq:collision-jacobian",
        "collision.conditioning_ceiling",
        "privacy/test_collision.py::test_conditioning_is_no_better_than_its_bound",
    ),
    _disclosed("eq:proof-recovery-modulus", "design.modulus_forms", _FORMS, _SOLVERS),
    _disclosed("eq:proof-recovery-dual", "design.modulus_forms", _FORMS),
    _disclosed(
        "eq:proof-design-infimum",
        "family.design_infimum",
        "privacy/test_modulus.py::test_the_infimum_of_a_small_family_is_that_of_all_its_blocks",
        "privacy/test_modulus.py::test_the_gap_of_a_large_family_is_certified_and_small",
    ),
    _disclosed("eq:proof-quadratic-dual", "audit.multipliers", _FORMS),
    _disclosed("eq:proof-modulus-spectrum", "audit.values", _FORMS, _SOLVERS),
    _disclosed(
        "eq:proof-query-remainders",
        "disclosure.curvature",
        "privacy/test_disclosure.py::test_constants",
        _SANDWICH,
    ),
    _disclosed("eq:proof-affine-error", "disclosure.affine_decoder", _DECODER),
    _disclosed(
        "S.2.5, relative bounds",
        "disclosure.relative_bounds",
        _SANDWICH,
        "privacy/test_disclosure.py::test_constants",
    ),
    _disclosed(
        "S.2.5, reduced radius",
        "disclosure.reduced_radius_bound",
        "privacy/test_disclosure.py::test_a_smaller_ball_gives_a_bound_where_the_whole_ball_bends_too_much",
    ),
    _disclosed(
        "S.2.5, kernel and range",
        "design.kernel_floor design.range_slope disclosure.range_error",
        "privacy/test_modulus.py::test_limits",
        "privacy/test_disclosure.py::test_the_range_case_bounds_the_decoder",
    ),
    _disclosed(
        "S.2.5, threshold",
        "disclosure.threshold_is_identified disclosure.decided",
        "privacy/test_disclosure.py::test_the_threshold_is_identified_exactly_where_the_error_allows",
    ),
    _disclosed(
        "discrete records",
        "discrete.enumeration_risk discrete.separation",
        "privacy/test_attacks.py::test_enumeration_counts_only_pairs_that_noise_can_hide",
        "privacy/test_attacks.py::test_separation_is_the_distance_of_two_discs_images",
    ),
    # Section 4.4, S.2.6 to S.2.8.
    _not("eq:retirement-weights", "protocol.fits.Weighting"),
    _not("alg:local-retirement", "algorithms.local.Personalized"),
    _computed("def:local-stability", "averaging.follow_fits", _GAPS),
    _computed(
        "lem:local-derivatives",
        "lemmas.zeta lemmas.derivative_bound lemmas.mean_difference_tail",
        "theory/test_probability.py::test_cross_silo_derivatives_by_frequency",
        "theory/test_probability.py::test_hoeffding_tail_of_two_silos_holds_exactly_and_no_faster_decay_does",
    ),
    _computed("eq:local-derivative-comparison", "lemmas.derivative_bound", _TRANSCRIPTION),
    _computed(
        "section 4.4, disagreement moments",
        "personalized.disagreement lemmas.spread",
        "theory/test_identities.py::test_v2_is_the_weighted_variance",
    ),
    _computed(
        "eq:retirement-sampling-modes",
        "personalized.chi lemmas.chi_uniform lemmas.chi_size",
        _CHI,
    ),
    _computed(
        "lem:local-fourth-order",
        "personalized.fourth_order_bound personalized.quadratic_bound personalized.averaging_bound",
        _PERSONAL,
        _QUADRATICS,
        _FOURTH,
    ),
    _computed("eq:local-fourth-order-error", "personalized.fourth_order_bound", _PERSONAL, _FOURTH),
    _computed(
        "thm:personalized-convergence",
        "personalized.convergence_bound certificate.personal_checks",
        _PERSONAL,
        _GAPS,
    ),
    _computed("eq:personalized-convergence-bound", "personalized.convergence_bound", _PERSONAL),
    _computed("eq:proof-retire-interpolation", "personalized.fourth_order_bound", _IDENTITIES),
    _computed("eq:proof-retire-trapezoid", "personalized.fourth_order_bound", _IDENTITIES),
    _computed("eq:proof-retire-average-identity", "personalized.fourth_order_bound", _FOURTH),
    _computed("eq:proof-retire-sampling-moment", "personalized.chi", _CHI),
    _computed(
        "eq:proof-retire-second-moment",
        "lemmas.spread",
        "theory/test_identities.py::test_v2_is_the_weighted_variance",
    ),
    _computed("eq:proof-retire-fourth-moment", "personalized.disagreement", _TRANSCRIPTION),
    _computed("eq:proof-retire-pair-curvature", "personalized.fourth_order_bound", _FOURTH),
    _not(
        "eq:proof-retire-absorption",
        "runtime.silo keeps a retired silo's law",
    ),
    _computed(
        "eq:proof-retire-gap-score",
        "personalized.gap_floor",
        _QUADRATICS,
        "theory/test_identities.py::test_each_gap_is_at_least_its_squared_eif_norm_over_two_beta",
    ),
    _computed("eq:proof-retire-loss-identity", "averaging.follow_fits averaging.personal_loss_budget", _GAPS),
    _computed(
        "eq:retirement-imbalance",
        "lemmas.imbalance",
        "theory/test_attained.py::test_imbalance_is_one_for_equal_sizes_only",
    ),
    _computed("S.2.8, participation duration", "lemmas.chi_total_size lemmas.chi_total_uniform", _CHI),
    _computed(
        "S.2.8, diameter form",
        "lemmas.diameter_bound lemmas.disagreement_from_diameter",
        "theory/test_attained.py::test_diameter_form_is_nearly_attained_by_a_simplex",
    ),
    _computed(
        "S.2.8, per-client factor",
        "lemmas.client_factor",
        "theory/test_identities.py::test_each_gap_is_at_least_its_squared_eif_norm_over_two_beta",
    ),
    _computed(
        "lattice retirement",
        "personalized.lattice_gap_bound lemmas.lattice_score_bound personalized.lattice_quadratic_bound "
        "personalized.lattice_fourth_order",
        "theory/test_attained.py::test_lattice_retirement_is_attained_at_a_corner_of_the_box",
        _GAINS,
        _PERSONAL,
    ),
    _computed(
        "future work, adaptive switching",
        "communication.one_step_round_bound communication.step_decrease",
        "theory/test_future.py::test_adaptive_rounds_descend_and_stay_within_the_bound",
        _TRANSCRIPTION,
    ),
    _computed(
        "future work, retirement by tolerance",
        "personalized.tolerance_gap_bound personalized.convergence_bound",
        _RETIREMENT,
        _GAINS,
    ),
    _computed("future work, the noise rule", "personalized.noise_gap_bound", _RETIREMENT, _GAINS),
    _computed(
        "future work, inexact local fits",
        "personalized.inexact_bound",
        _GAINS,
        "theory/test_future.py::test_inexact_fits_stay_within_their_bound",
    ),
    _computed(
        "future work, population gaps",
        "personalized.population_bound",
        "theory/test_attained.py::test_quadratics_with_population_gaps_attain_half_of_the_bound",
        "theory/test_future.py::test_the_population_bound_holds_where_silos_differ",
    ),
    _not("eq:experiment-target", "fedtmle_paper.optimal_transport.OptimalTransport"),
)

_FRACTIONS = "privacy/test_collision.py::test_bounds_are_the_papers_fractions"
_MOVES = "theory/test_statistical.py::test_remainder_bound_where_the_influence_function_moves"
_BEFOREHAND = "theory/test_runs.py::test_recentering_and_smoothness_against_constants_known_beforehand"
_ORIGINAL = "theory/test_runs.py::test_recentering_from_the_influence_function_itself"
_UNION = "theory/test_probability.py::test_zeta_spends_xi_on_the_union"
# Two-sided tests of values whose one-sided tests a loose constant would pass.
_TWO_SIDED = {
    "eq:collision-pair": (_FRACTIONS,),
    "eq:collision-jacobian": (
        _FRACTIONS,
        "privacy/test_collision.py::test_the_conditioning_bound_is_nearly_attained",
    ),
    "eq:proof-collision-response": (_FRACTIONS,),
    "thm:statistical": (_MOVES, _TRANSCRIPTION),
    "eq:history-statistical-bound": (_MOVES,),
    "eq:proof-vector-concentration": (_MOVES, _TRANSCRIPTION),
    "S.2.2, fixed-code bound": ("theory/test_probability.py::test_the_level_of_the_fixed_code_bound",),
    "lem:local-derivatives": (_UNION,),
    "eq:local-derivative-comparison": (_UNION,),
    "ass:recentering": (_BEFOREHAND, _ORIGINAL),
    "ass:smooth": (_BEFOREHAND,),
    "eq:loss-budget": (_BEFOREHAND,),
}
STATEMENTS = tuple(
    replace(
        statement,
        tests=tuple(
            dict.fromkeys(
                (
                    *statement.tests,
                    *_TWO_SIDED.get(statement.label, ()),
                )
            )
        ),
    )
    for statement in _STATEMENTS
)
