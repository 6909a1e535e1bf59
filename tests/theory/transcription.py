"""The paper's bounds a second time, from its LaTeX, importing nothing of the first transcription.

Each function quotes the formula it was read from; logarithms, roots and sums are written as the paper
prints them, without the factorings of `fedtmle.theory`.
"""

from __future__ import annotations

from itertools import product
from math import ceil, exp, log, log2, sqrt

import numpy as np


# \frac{\delta}{8\sqrt d}<h\leq\frac{\delta}{4\sqrt d}
def spacing_range(delta, d):
    return delta / (8 * sqrt(d)), delta / (4 * sqrt(d))


# h\sqrt d
def rounding_bound(h, d):
    return h * d**0.5


# \beta\|\epsilon^k\|+\|\nabla\ell_k(\epsilon^k)\|
def residual_bound(beta, eps, gradient):
    return beta * eps + gradient


# 3d+2\sum_{j=1}^d\log_2(1+|v_j|)
def code_length_bound(v):
    return 3 * len(v) + 2 * sum(log2(1 + abs(a)) for a in v)


# b=\lceil\log_2(2\lceil G/h\rceil+1)\rceil
def fixed_width_bits(G, h):
    return ceil(log2(2 * ceil(G / h) + 1))


# 2MdbR+2MR
def fixed_width_cost(M, d, b, R):
    return 2 * M * d * b * R + 2 * M * R


# \frac{\|g\|^2}{2\beta}(1-\frac{2h\sqrt d}{\|g\|})
def rounded_step_decrease(g, beta, h, d):
    return g * g / (2 * beta) * (1 - 2 * h * sqrt(d) / g)


# \frac{\|g\|^2}{6\beta}
def step_decrease(g, beta):
    return g * g / (6 * beta)


# \frac{3\delta^2}{32\beta}
def step_decrease_floor(delta, beta):
    return 3 * delta * delta / (32 * beta)


# 6\beta\Delta
def energy_bound(beta, Delta):
    return 6 * beta * Delta


# \frac{32\beta\Delta}{3\delta^2}
def step_bound(beta, Delta, delta):
    return 32 * beta * Delta / (3 * delta * delta)


# R=S+K+1
def rounds(S, K):
    return 1 + K + S


# 1+\frac{64\beta\Delta}{3\delta^2}
def round_bound(beta, Delta, delta):
    return 1 + 64 * beta * Delta / (3 * delta * delta)


# One step per update: R=S+1, S\leq\frac{32\beta\Delta}{3\delta^2}
def one_step_round_bound(beta, Delta, delta):
    return 1 + 32 * beta * Delta / (3 * delta * delta)


# \sqrt{\frac{6\Delta S}{\beta}}
def path_length_bound(beta, Delta, S):
    return sqrt(6 * Delta * S / beta)


# \frac{8\Delta}{\delta}
def path_length_ceiling(Delta, delta):
    return 8 * Delta / delta


# \|g_{m,r+1}-g_{m,r}\|\leq\|\widetilde g_r\|
def variation_within(g):
    return g


# (\kappa+\beta)\|\epsilon^k\|
def variation_across(beta, kappa, eps):
    return kappa * eps + beta * eps


# (2+\kappa/\beta)\sqrt{6\beta\Delta S}
def variation_bound(beta, kappa, Delta, S):
    return (2 + kappa / beta) * sqrt(6 * beta * Delta * S)


# 8Md+4Md\log_2(2+G/h)
def first_message_bits(M, d, G, h):
    return 8 * M * d + 4 * M * d * log2(2 + G / h)


# 3Md(R-1)+2Md(R-1)\log_2(2+\frac{V}{(R-1)h\sqrt d})
def upload_bits(M, d, R, h, V):
    return 3 * M * d * (R - 1) + 2 * M * d * (R - 1) * log2(2 + V / ((R - 1) * h * sqrt(d)))


# 3Md(R-1)+2Md(R-1)\log_2(3+\frac{V}{(R-1)h\sqrt d})
def broadcast_bits(M, d, R, h, V):
    return 3 * M * d * (R - 1) + 2 * M * d * (R - 1) * log2(3 + V / ((R - 1) * h * sqrt(d)))


# 8MdR+4Md\log_2(2+G/h)+4Md(R-1)\log_2(3+\frac{V}{(R-1)h\sqrt d})
def bits_at_spacing(M, d, R, G, h, V):
    return (
        8 * M * d * R
        + 4 * M * d * log2(2 + G / h)
        + 4 * M * d * (R - 1) * log2(3 + V / ((R - 1) * h * sqrt(d)))
    )


# eq. (pathwise-bit-bound)
def pathwise_bit_bound(M, d, R, S, beta, kappa, Delta, G, delta):
    first = 8 * M * d * R + 4 * M * d * log2(2 + 8 * G * sqrt(d) / delta)
    inside = 3 + 8 * (2 + kappa / beta) * sqrt(6 * beta * Delta * S) / ((R - 1) * delta)
    return first + 4 * M * d * (R - 1) * log2(inside)


# Md\{8+\frac{512a}{3}+4\log_2(2+8x)+\frac{256a}{3}\log_2(3+3\sqrt2\,c)\}
def planned_bit_bound(M, d, beta, kappa, Delta, G, delta):
    a = beta * Delta / delta**2
    c = 2 + kappa / beta
    x = G * sqrt(d) / delta
    return M * d * (8 + 512 * a / 3 + 4 * log2(2 + 8 * x) + 256 * a / 3 * log2(3 + 3 * sqrt(2) * c))


# CMd\{(1+\frac{\beta\Delta}{\delta^2})\log_2(4+\frac\kappa\beta)+\log_2(2+\frac{G\sqrt d}{\delta})\}, C=256
def universal_bit_bound(M, d, beta, kappa, Delta, G, delta):
    main = (1 + beta * Delta / delta**2) * log2(4 + kappa / beta)
    return 256 * M * d * (main + log2(2 + G * sqrt(d) / delta))


# \frac{\sqrt{6d\beta\Delta S}}h
def history_sum_bound(d, beta, Delta, S, h):
    return sqrt(6 * d * beta * Delta * S) / h


# \frac{64d\beta\Delta}{\delta^2}
def history_sum_ceiling(d, beta, Delta, delta):
    return 64 * d * beta * Delta / delta**2


# 1+2\log_2(K+1)+3Kd+2Kd\log_2(1+\frac1{Kd}\sum)
def history_bits_bound(K, d, total):
    return 1 + 2 * log2(K + 1) + 3 * K * d + 2 * K * d * log2(1 + total / (K * d))


# 1+19Kd\log_2(2+\frac{\beta\Delta}{K\delta^2})
def history_bits_rate(K, d, beta, Delta, delta):
    return 1 + 19 * K * d * log2(2 + beta * Delta / (K * delta**2))


# 20\{1+Kd\log_2(2+\frac{\beta\Delta}{K\delta^2})\}
def history_bits_ceiling(K, d, beta, Delta, delta):
    return 20 * (1 + K * d * log2(2 + beta * Delta / (K * delta**2)))


# \sqrt{\frac{2vx}{n}}+\frac{4Gx}{3n}
def fixed_code_deviation(v, G, x, n):
    return sqrt(2 * v * x / n) + 4 * G * x / (3 * n)


# 2e^{-x}
def fixed_code_tail(x):
    return 2 * exp(-x)


# x_K=H_K\log2+\log(2d/\xi)
def code_allowance(H, d, xi):
    return H * log(2) + log(2 * d / xi)


# \sqrt{\frac{2x}{n}}\|D(p)-D(p_0)\|+\frac{4G\sqrt d\,x}{3n}
def process_bound(d, n, G, x, distance):
    return sqrt(2 * x / n) * distance + 4 * G * sqrt(d) * x / (3 * n)


# \delta+\|R_2\|+...
def remainder_bound(d, n, delta, R_2, G, x, distance):
    return delta + R_2 + sqrt(2 * x / n) * distance + 4 * G * sqrt(d) * x / (3 * n)


# (a_n\sqrt n)^{-1}
def tolerance_schedule(n, a):
    return (a * sqrt(n)) ** -1


# na_n^2
def cost_order(n, a):
    return n * a * a


# 1+Kd\log(2+\frac{na_n^2}{K\vee1})
def history_order(K, d, n, a):
    return 1 + K * d * log(2 + n * a * a / max(K, 1))


# 1+\log_2A_+, A_+=\max(1,A)
def history_order_constant(A):
    return 1 + log2(max(1, A))


# \frac1{a_n}+\sqrt n\|R_2\|+\sqrt{2x_K}\|D-D\|+\frac{4G\sqrt d\,x_K}{3\sqrt n}, x_K=H_K\log2+\log(2dn)
def root_n_bound(*, n, d, a_n, H, G, R_2, eif_distance):
    x = H * log(2) + log(2 * d * n)
    return 1 / a_n + sqrt(n) * R_2 + sqrt(2 * x) * eif_distance + 4 * G * sqrt(d) * x / (3 * sqrt(n))


# 2\exp(-\frac{t^2}{2s_{mj}}), s_{mj}=N_m^{-1}+N_j^{-1}
def mean_difference_tail(t, N_m, N_j):
    return 2 * exp(-(t**2) / (2 * (N_m**-1 + N_j**-1)))


# \sqrt{8\log(4M^2\mathcal N_n/\xi)}
def zeta(xi, M, log_cover):
    return sqrt(8 * log(4 * M**2 * exp(log_cover) / xi))


# G_1\zeta\sqrt{N_m^{-1}+N_j^{-1}}
def derivative_bound(scale, zeta, N_m, N_j):
    return scale * zeta * sqrt(N_m**-1 + N_j**-1)


# \log2+q\log(2+2Cn\sqrt q)
def log_cover_compact(n, q, C):
    return log(2 * (2 + 2 * C * n * sqrt(q)) ** q)


# \sum_m\frac{\alpha_m}{N_m}(1-\frac{\alpha_m}a)
def chi(alpha, sizes):
    a = sum(alpha)
    return sum(alpha[m] / sizes[m] * (1 - alpha[m] / a) for m in range(len(alpha)))


# \frac{|A|-1}{M|A|}\sum N_m^{-1}
def chi_uniform(sizes, M):
    return (len(sizes) - 1) / (M * len(sizes)) * sum(N**-1 for N in sizes)


# \frac{|A|-1}n
def chi_size(active, n):
    return (active - 1) / n


# \frac{\sum\alpha_m\alpha_j\|\hat\epsilon_m-\hat\epsilon_j\|^r}{2\sum\alpha_m}
def disagreement(r, alpha, fits):
    pairs = product(range(len(alpha)), repeat=2)
    top = sum(alpha[m] * alpha[j] * sqrt(sum((fits[m] - fits[j]) ** 2)) ** r for m, j in pairs)
    return top / (2 * sum(alpha))


# 2aV_2=2a\sum_m\alpha_m\|\hat\epsilon_m-\epsilon\|^2, so the weighted variance is the pairwise moment
def spread(alpha, fits):
    gram = fits @ fits.T
    pairs = product(range(len(alpha)), repeat=2)
    return sum(alpha[m] * alpha[j] * (gram[m, m] + gram[j, j] - 2 * gram[m, j]) for m, j in pairs) / (
        2 * sum(alpha)
    )


# \frac{2G_1\zeta}3\sqrt{\chi V_2}+\frac{\beta\zeta}6\sqrt{\chi V_4}+\frac{\beta_4}{18}V_4
def fourth_order_bound(G_1, beta, beta_4, zeta, chi, V_2, V_4):
    return 2 * G_1 * zeta / 3 * sqrt(chi * V_2) + beta * zeta / 6 * sqrt(chi * V_4) + beta_4 / 18 * V_4


# \beta V_2/2
def quadratic_bound(beta, V_2):
    return beta * V_2 / 2


# S.2.8, the diameter form
def diameter_bound(G_1, beta, beta_4, zeta, ratio, diam):
    return (
        2 * G_1 * zeta / (3 * sqrt(2)) * diam * sqrt(ratio)
        + beta * zeta / (6 * sqrt(2)) * diam**2 * sqrt(ratio)
        + beta_4 / 36 * diam**4
    )


# \frac{\operatorname{diam}^r}2
def disagreement_from_diameter(r, diam):
    return diam**r / 2


# \frac1{2\beta}\|g\|^2
def gap_floor(beta, g):
    return g**2 / (2 * beta)


# \frac1K\sum\alpha\{\}+\frac1K\sum_k\{\}
def convergence_bound(budget, averaging, lattice):
    K = len(averaging)
    return budget / K + sum(averaging) / K + lattice / K


# (\alpha_m)^{-1}
def client_factor(alpha):
    return alpha**-1


# \frac{(\sum N)(\sum N^{-1})}{s^2}
def imbalance(sizes):
    N = np.array(sizes, dtype=float)
    return N.mean() / (len(N) / (1 / N).sum())  # arithmetic over harmonic mean


# \frac1n\sum_{k<K}(|A_k|-1)_+
def chi_total_size(tau, K, n):
    return sum(max(sum(k < t for t in tau) - 1, 0) for k in range(K)) / n


# \sum_{k<K}\chi_k with eq. (retirement-sampling-modes)
def chi_total_uniform(tau, sizes, K):
    M, total = len(sizes), 0.0
    for k in range(K):
        active = [N for N, t in zip(sizes, tau, strict=True) if k < t]
        total += (len(active) - 1) / (M * len(active)) * sum(1 / N for N in active) if active else 0.0
    return total


# MATH: beta d lambda^2/8, beta sqrt(d) lambda/2, and beta V_2/2 + beta a d lambda^2/8
def lattice_gap_bound(beta, d, spacing):
    return beta / 2 * (sqrt(d) * spacing / 2) ** 2


def lattice_score_bound(beta, d, spacing):
    return beta * (sqrt(d) * spacing / 2)


# The update is rounded twice, to half a unit and to half of a sixteenth of one
def lattice_quadratic_bound(beta, V_2, d, spacing, mass):
    return beta / 2 * (V_2 + mass * d * (spacing / 2 + spacing / 32) ** 2)


def lattice_fourth_order(beta, V_2, d, spacing, mass):
    s = sqrt(d) * (spacing / 2 + spacing / 32)
    return beta * s * sqrt(mass * V_2) + beta * mass * s * s / 2


def tolerance_gap_bound(tau, lattice):
    return tau if tau > lattice else lattice


# ||g||^2/(2 mu), ||g||^2 <= c^2 d v
def noise_gap_bound(c, d, v, mu):
    return (c * sqrt(d * v)) ** 2 / (2 * mu)


# 2/3 tau sqrt(a V_2) + 1/6 (2 tau sqrt(a V_2)) + 1/6 nu V_2
def inexact_bound(tau, a, V_2, nu):
    return 2 * tau / 3 * sqrt(a * V_2) + 2 * tau / 6 * sqrt(a * V_2) + nu / 6 * V_2


# \frac13\frac{B_g}{2a}a\sqrt{2aV_2}+\frac16\{2...\}
def population_bound(B_g, B_H, a, V_2, V_4):
    linear = B_g / (2 * a) * a * sqrt(2 * a * V_2)
    return linear / 3 + (2 * linear + B_H / (2 * a) * a * sqrt(2 * a * V_4)) / 6
