"""Prints the coefficient tables of math.h and activation.h (python fit.py; needs mpmath, numpy, scipy).

The fits of the inverses agree with the headers within the errors stated there, not to the last digit.
"""

from __future__ import annotations

from collections.abc import Callable

import mpmath as mp
import numpy as np
from scipy.special import erfcx, expit

mp.mp.dps = 40


def remez(f: Callable, points: list, m: int, n: int, weight: Callable, fixed: dict) -> tuple:
    """Minimax P/Q of degrees m, n (Q(0) = 1) of f over the points; `fixed` pins coefficients of P."""
    free = [i for i in range(m + 1) if i not in fixed]
    size, last = len(free) + n + 1, len(points) - 1
    values, weights = [f(x) for x in points], [weight(x) for x in points]
    chosen = [int(last * (1 - np.cos(np.pi * (2 * i + 1) / (2 * size))) / 2) for i in range(size)]
    level = mp.mpf(0)
    for _ in range(30):
        for _ in range(40):  # the levelled error is a factor of Q: iterate
            a, rhs = mp.matrix(size, size), mp.matrix(size, 1)
            for row, i in enumerate(chosen):
                x, sign = points[i], (-1) ** row / weights[i]
                for col, k in enumerate(free):
                    a[row, col] = x**k
                for k in range(1, n + 1):
                    a[row, len(free) + k - 1] = -(values[i] + sign * level) * x**k
                a[row, size - 1] = -sign
                rhs[row] = values[i] - sum(v * x**k for k, v in fixed.items())
            solution = mp.lu_solve(a, rhs)
            before, level = level, solution[size - 1]
            if abs(level - before) <= abs(level) * mp.mpf(10) ** -10:
                break
        p = [mp.mpf(fixed.get(k, 0)) for k in range(m + 1)]
        for col, k in enumerate(free):
            p[k] = solution[col]
        q = [mp.mpf(1)] + [solution[len(free) + k] for k in range(n)]
        fit = [mp.polyval(p[::-1], x) / mp.polyval(q[::-1], x) for x in points]
        error = [(v - y) * w for v, y, w in zip(values, fit, weights, strict=True)]
        worst = max(abs(e) for e in error)
        peaks: list[int] = []
        for i, e in enumerate(error):
            if not peaks or (e >= 0) != (error[peaks[-1]] >= 0):
                peaks.append(i)
            elif abs(e) > abs(error[peaks[-1]]):
                peaks[-1] = i
        while len(peaks) > size:  # drop the smallest: at an end alone, inside with its smaller neighbour
            height = [abs(error[i]) for i in peaks]
            low = height.index(min(height))
            if low in (0, len(peaks) - 1) or len(peaks) - size == 1:
                peaks.pop(0 if height[0] < height[-1] else -1)
            else:
                first = low - 1 if height[low - 1] < height[low + 1] else low
                del peaks[first : first + 2]
        if worst < abs(level) * mp.mpf("1.01") or len(peaks) < size:
            break
        chosen = peaks
    return p, q, worst


def lawson(u: np.ndarray, f: np.ndarray, weight: np.ndarray, m: int, n: int) -> tuple:
    """Near-minimax P/Q (Q(0) = 1) by reweighted least squares, in double: for fits above 1e-11."""
    importance, q_old, best = np.ones_like(u), np.ones_like(u), (np.inf, None, None)
    for _ in range(500):
        row = weight * np.sqrt(importance) / np.abs(q_old)
        powers = [u[:, None] ** np.arange(m + 1), -f[:, None] * u[:, None] ** np.arange(1, n + 1)]
        a = np.concatenate(powers, axis=1) * row[:, None]
        scale = np.sqrt((a**2).sum(axis=0))
        s = np.linalg.lstsq(a / scale, f * row, rcond=1e-15)[0] / scale
        p, q = s[: m + 1], np.concatenate([[1.0], s[m + 1 :]])
        q_old = np.polyval(q[::-1], u)
        error = np.abs((np.polyval(p[::-1], u) / q_old - f) * weight)
        if q_old.min() > 0 and error.max() < best[0]:
            best = (error.max(), p, q)
        importance = importance * (error / error.max()) ** 0.3 + 1e-10
        importance /= importance.max()
    return best[1], best[2], best[0]


def show(title: str, p: list, q: list, error: float, digits: int) -> None:
    print(f"{title}: error {mp.nstr(mp.mpf(error), 3)}")
    print("  p:", ", ".join(mp.nstr(mp.mpf(c), digits) for c in p))
    if len(q) > 1:
        print("  q:", ", ".join(mp.nstr(mp.mpf(c), digits) for c in q[1:]))


def spread(a: float, b: float, bend: float, count: int = 400) -> list:
    """Chebyshev points of [a, b], drawn towards a by a Moebius map when bend is small."""
    u = [(1 - mp.cos(mp.pi * i / (count - 1))) / 2 for i in range(count)]
    return [a + (b - a) * bend * v / (1 + bend - v) for v in u]


def mills(t: mp.mpf) -> mp.mpf:
    return mp.erfc(t / mp.sqrt(2)) / 2 * mp.exp(t * t / 2)


def near_zero(f: Callable, limit: float) -> Callable:
    return lambda x: mp.mpf(limit) if abs(x) < mp.mpf(10) ** -12 else f(x)


def elementary() -> None:
    half = mp.log(2) / 2
    exp_tail = near_zero(lambda r: (mp.expm1(r) - r) / r**2, 0.5)
    for degree, digits in ((4, 10), (9, 20)):
        p, q, e = remez(exp_tail, spread(-half, half, 1e6), degree, 0, lambda r: abs(r) + mp.mpf("1e-3"), {})
        show(f"exp: (expm1(r) - r) / r^2, |r| < ln2/2, relative in expm1, degree {degree}", p, q, e, digits)
    atanh = near_zero(lambda z: (2 * mp.atanh(mp.sqrt(z)) / mp.sqrt(z) - 2) / z, mp.mpf(2) / 3)
    for degree, digits in ((3, 10), (8, 20)):
        p, q, e = remez(atanh, spread(0, mp.mpf(1) / 9, 1e6), degree, 0, lambda z: z / 2 + mp.mpf("1e-4"), {})
        title = "log1p: (log1p(e) / s - 2) / s^2, s = e / (2 + e), in s^2, relative in log1p"
        show(f"{title}, degree {degree}", p, q, e, digits)
    tanh = near_zero(lambda z: (mp.tanh(mp.sqrt(z)) - mp.sqrt(z)) / mp.sqrt(z) ** 3, mp.mpf(-1) / 3)
    for degree, digits in ((4, 10), (11, 20)):
        p, q, e = remez(tanh, spread(0, mp.mpf("0.7") ** 2, 1e6), degree, 0, lambda z: z + mp.mpf("1e-3"), {})
        show(f"tanh: (tanh(x) - x) / x^3 in x^2, |x| < 0.7, relative, degree {degree}", p, q, e, digits)
    ratio = near_zero(lambda f: mp.log1p(f) / f, 1)
    low, high = mp.sqrt(0.5) - 1, mp.sqrt(2) - 1
    for degree in (4, 8):
        p, q, e = remez(ratio, spread(low, high, 1e6), degree, 0, lambda f: 1 / ratio(f), {})
        show(
            f"log_near_one: log1p(f) / f on [sqrt(1/2) - 1, sqrt(2) - 1], relative, degree {degree}",
            p,
            q,
            e,
            10,
        )
    p, q, e = remez(ratio, spread(mp.mpf("-0.25"), 0, 1e6), 5, 0, lambda f: 1 / ratio(f), {})
    show("log_near_one, on a device: log1p(f) / f on [-1/4, 0], relative, degree 5", p, q, e, 10)
    p, q, e = remez(mills, spread(0, 39, 1 / 39), 10, 11, lambda t: 1 / mills(t), {0: mp.mpf(1) / 2})
    show("normal tail: Phi(-t) exp(t^2/2) on [0, 39], relative, 10/11", p, q, e, 20)
    t = np.concatenate([np.linspace(0, 1, 150), np.linspace(1, 4.5, 150), np.linspace(4.5, 13.1, 100)])
    ratio = erfcx(t / np.sqrt(2)) / 2
    weight = np.exp(-1.5 * np.maximum(t - 4.5, 0)) / ratio
    for m, n in ((4, 4), (2, 3)):
        show(f"normal tail on [0, 4.5], relative, {m}/{n}", *lawson(t, ratio, weight, m, n), 10)
    for degree in (6, 4):
        p, q, e = remez(lambda r: 2**r, spread(-0.5, 0.5, 1e6), degree, 0, lambda r: 2**-r, {})
        show(f"exp2 on [-1/2, 1/2], relative, degree {degree}", p, q, e, 10)


def gelu(x: np.ndarray) -> tuple:
    tail = erfcx(np.abs(x) / np.sqrt(2)) / 2 * np.exp(-x * x / 2)
    cdf, pdf = np.where(x < 0, tail, 1 - tail), np.exp(-x * x / 2) / np.sqrt(2 * np.pi)
    return x * cdf, cdf + x * pdf


def gelu_tanh(x: np.ndarray) -> tuple:
    k, c = np.sqrt(8 / np.pi), 0.044715
    s, r = expit(k * (x + c * x**3)), expit(-k * (x + c * x**3))
    return x * s, s + x * s * r * k * (1 + 3 * c * x * x)


def silu(x: np.ndarray) -> tuple:
    return x * expit(x), expit(x) * (1 + x * expit(-x))


def mish(x: np.ndarray) -> tuple:
    e = np.exp(x)
    n = e * (e + 2)
    return x * n / (n + 2), n / (n + 2) + x * 4 * e * (1 + e) / (n + 2) ** 2


# x at the ends of Op::start; Op::reach, Op::centre and the degrees of Op::slope_fit on the left; x at the ends of
# Op::coarse_fit and its centre
INVERSES = {
    gelu: ((-13, 6), (2.4798, 1.24), (4, 4), (-5.2, 5.2, 0.95)),
    gelu_tanh: ((-10, 6), (2.3855, 1.19), (4, 4), (-5, 5, 0.93)),
    silu: ((-85, 20), (4.5007, 1.58), (4, 3), (-15, 14.5, 1.66)),
    mish: ((-85, 12), (3.2654, 1.63), (4, 3), (-15, 8, 1.16)),
}


def constants(f: Callable) -> tuple:
    exact = {
        gelu: lambda x: x * mp.ncdf(x),
        gelu_tanh: lambda x: x / (1 + mp.exp(-mp.sqrt(8 / mp.pi) * (x + mp.mpf("0.044715") * x**3))),
        silu: lambda x: x / (1 + mp.exp(-x)),
        mish: lambda x: x * mp.tanh(mp.log1p(mp.exp(x))),
    }[f]
    x0 = mp.findroot(lambda x: mp.diff(exact, x), -1)
    y0, bend = exact(x0), mp.diff(exact, x0, 2)
    rest = mp.nstr(y0 - mp.mpf(float(y0)), 3)
    print(f"{f.__name__}: x0 {mp.nstr(x0, 20)} y0 {mp.nstr(y0, 20)} rest {rest} f'' {mp.nstr(bend, 12)}")
    return float(x0), float(y0)


def inverse_fits(f: Callable, x0: float, y0: float) -> None:
    """Functions of u = sqrt(y - y0) right of the minimum, sqrt(log(y0 / y)) left of it.

    start: (x - x0) / u. Newton's step from there leaves a slope error of |f3 / 2 - f2^2 / (2 f1)| dx^2, with
    fk the k-th derivative: its root is the weight. slope_fit: f' / u in u - centre right, f' / (u y) left.
    coarse_fit: f' / (s (s + sqrt(-y0))) in s - centre, s = +-sqrt(y - y0) on either side.
    """
    ends, (reach, centre), degrees, coarse = INVERSES[f]
    for side, end, m in (("right", ends[1], 3), ("left", ends[0], 2)):
        x = x0 + (end - x0) * np.linspace(0.01, 1, 1500) ** 1.5
        (y, d1), h = f(x), 1e-4
        d2, d3 = (f(x + h)[1] - f(x - h)[1]) / (2 * h), (f(x + h)[1] - 2 * d1 + f(x - h)[1]) / h**2
        u = np.sqrt(y - y0) if side == "right" else np.sqrt(np.log(y0 / y))
        weight = np.sqrt(np.abs(d3 / 2 - d2**2 / (2 * d1)) + 1e-7) * u
        p, q, error = lawson(u, (x - x0) / u, weight, m, m)
        show(f"  start {side}, to x = {end}: root of the slope error", p, q, error, 8)
        far = reach**2 + y0 + 0.1 if side == "right" else max(ends[0], -28)
        x = x0 + (far - x0) * np.linspace(0.002, 1, 1500)
        y, d1 = f(x)
        u = np.sqrt(y - y0) if side == "right" else np.sqrt(np.log(y0 / y))
        keep = u <= (reach if side == "right" else 5)
        u, y, d1 = u[keep], y[keep], d1[keep]
        if side == "right":
            p, q, error = lawson(u - centre, d1 / u, u, 8, 7)
        else:
            p, q, error = lawson(u, d1 / (y * u), -y * u, *degrees)
        show(f"  slope_fit {side}: error of the slope", p, q, error, 9)
    low, high, centre = coarse
    t = np.linspace(0.003, 1, 260)
    x = np.unique(np.concatenate([x0 + (high - x0) * t**2, x0 + (low - x0) * t]))
    y, d1 = f(x)
    s, end = np.copysign(np.sqrt(y - y0), x - x0), np.sqrt(-y0)
    factor = s * (s + end)
    p, q, error = lawson(s - centre, d1 / factor, np.abs(factor), 6, 6)
    show(f"  coarse_fit, to s = {s.max():.4f}: error of the slope", p, q, error, 8)


if __name__ == "__main__":
    elementary()
    for op in INVERSES:
        inverse_fits(op, *constants(op))
