/* What a compiled loop costs: built on the spot with gcc -O3 -march=native -ffast-math. */
#include <math.h>

/* One pass over the bytes of X, shape (3, n): the limit that memory sets. */
double memory_pass(const double *x, long n, long first, long last) {
    const double *a = x, *b = x + n, *c = x + 2 * n;
    double s = 0, t = 0, u = 0;
    for (long i = first; i < last; i++) {
        s += a[i];
        t += b[i];
        u += c[i];
    }
    return s + t + u;
}

/* The gradient of the logistic fluctuation: sums of expit(eps . x) x_j. */
void gradient(const double *x, long n, const double *eps, long first, long last, double *sums) {
    const double *a = x, *b = x + n, *c = x + 2 * n;
    double e = eps[0], f = eps[1], g = eps[2], s = 0, t = 0, u = 0;
    for (long i = first; i < last; i++) {
        double p = 1.0 / (1.0 + exp(-(e * a[i] + f * b[i] + g * c[i])));
        s += p * a[i];
        t += p * b[i];
        u += p * c[i];
    }
    sums[0] = s;
    sums[1] = t;
    sums[2] = u;
}

/* A Gaussian kernel density in the plane: log of the mean of exp(-|p - c|^2 / 2). */
void kernel_density(const double *points, long n, const double *centres, long n0, long first, long last,
                    double *result) {
    for (long i = first; i < last; i++) {
        double x = points[i], y = points[n + i], total = 0;
        for (long k = 0; k < n0; k++) {
            double dx = x - centres[k], dy = y - centres[n0 + k];
            total += exp(-0.5 * (dx * dx + dy * dy));
        }
        result[i] = log(total / n0);
    }
}
