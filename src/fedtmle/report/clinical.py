"""Figures about the people of a study: covariate balance, estimates by truncation bound, survival curves."""

from __future__ import annotations

from collections.abc import Sequence

from fedtmle.layout import Document
from fedtmle.report.charts import ROW, Draw, is_wide, name_column, x_axis
from fedtmle.report.series import Horizons, Love
from fedtmle.report.svg import Canvas, Scale, label, linear, shortened, ticks

BALANCED = 0.1  # standard deviations: the usual limit for a difference that needs no attention
CURVES = 4  # number of curve styles in the style sheet


def love(data: Love) -> Draw:
    """Draw standardised differences, one row per covariate: open dots before weighting, filled ones after."""

    def draw(width: float) -> Canvas:
        left, right, top = name_column(data.names, width), width - 12, 8.0
        bottom = top + ROW * len(data.names)
        canvas = Canvas(width, bottom + 66)
        known = [abs(v) for values in (data.unweighted, data.weighted) for v in values if v is not None]
        most = max([2.2 * BALANCED, *(value * 1.05 for value in known)])
        x = linear(-most, most, left, right)
        canvas.rect(x(-BALANCED), top, x(BALANCED) - x(-BALANCED), bottom - top, "usual", "within 0.1")
        x_axis(canvas, x, ticks(-most, most, 6 if is_wide(width) else 4), top, bottom)
        canvas.line(x(0), top, x(0), bottom, "null")
        for i, name in enumerate(data.names):
            y = top + ROW * (i + 0.5)
            canvas.text(0, y + 4, shortened(name, left - 8), "name")
            before, after = data.unweighted[i], data.weighted[i]
            pale = " pale" if data.is_partial[i] else ""
            if before is None and after is None:
                canvas.text(x(0), y + 4, "hidden", "tick", "middle")
            if before is not None:
                canvas.circle(x(before), y, 4.0, f"dot step{pale}", f"{name}: {before:+.2f} unweighted")
            if after is not None:
                canvas.circle(x(after), y, 4.0, f"dot silo{pale}", f"{name}: {after:+.2f} weighted")
        words = "standardised difference" if is_wide(width) else "difference (sd)"
        canvas.text((left + right) / 2, bottom + 36, words, "axis", "middle")
        canvas.circle(left + 6, bottom + 54, 4.0, "dot step")
        canvas.text(left + 16, bottom + 58, "unweighted", "tick")
        canvas.circle(left + 102, bottom + 54, 4.0, "dot silo")
        canvas.text(left + 112, bottom + 58, "weighted", "tick")
        return canvas

    return draw


def ladder(rows: Sequence[tuple[str, float, float, float]], null: float | None, axis: str) -> Draw:
    """Draw estimates with their intervals, one row per bound on the propensity score."""

    def draw(width: float) -> Canvas:
        left, right, top = name_column([row[0] for row in rows], width), width - 12, 8.0
        bottom = top + ROW * len(rows)
        canvas = Canvas(width, bottom + 42)
        ends = [end for _, _, low, high in rows for end in (low, high)] + ([] if null is None else [null])
        x = linear(min(ends), max(ends), left, right)
        x_axis(canvas, x, ticks(min(ends), max(ends), 6 if is_wide(width) else 4), top, bottom)
        if null is not None:
            canvas.line(x(null), top, x(null), bottom, "null")
        for i, (name, estimate, low, high) in enumerate(rows):
            y = top + ROW * (i + 0.5)
            canvas.text(0, y + 4, shortened(name, left - 8), "name")
            canvas.line(x(low), y, x(high), y, "whisker silo")
            canvas.circle(
                x(estimate), y, 4.0, "dot silo", f"{name}: {estimate:.4g} ({low:.4g} to {high:.4g})"
            )
        canvas.text((left + right) / 2, bottom + 36, axis, "axis", "middle")
        return canvas

    return draw


def curves(drawn: Sequence[Document], axis: str, begin: float = 0.0) -> Draw:
    """Draw the estimate at each horizon, joined by lines, one colour per arm, with the simultaneous band.

    Every curve has the value ``begin`` at time 0.
    """
    keys = ("estimate", "band_low", "band_high")
    drawn = [
        {**curve, "times": [0.0, *curve["times"]], **{key: [begin, *curve[key]] for key in keys}}
        for curve in drawn
    ]

    def draw(width: float) -> Canvas:
        left, right, top, bottom = 46.0, width - 12, 10.0, 250.0
        canvas = Canvas(width, bottom + 44 + 18.0 * len(drawn))
        times = [time for curve in drawn for time in curve["times"]]
        ends = [v for curve in drawn for key in ("band_low", "band_high") for v in curve[key]]
        low, high = min([0.0, *ends]), max(ends)
        x, y = linear(0.0, max(times), left, right), linear(low, high, bottom, top)
        x_axis(canvas, x, ticks(0.0, max(times), 6 if is_wide(width) else 4), top, bottom)
        for value in ticks(low, high, 5):
            canvas.line(left, y(value), right, y(value), "grid")
            canvas.text(left - 6, y(value) + 4, label(value), "tick", "end")
        for k, curve in enumerate(drawn):
            _band(canvas, curve, x, y, k % CURVES)
            points = _points(curve["times"], curve["estimate"], x, y)
            canvas.curve(points, f"curve arm{k % CURVES}")
            estimated = list(zip(points, curve["times"], curve["estimate"], strict=True))[1:]
            for (at, height), time, value in estimated:
                canvas.circle(
                    at, height, 2.5, f"dot arm{k % CURVES}", f"{curve['name']}, {time:g}: {value:.4g}"
                )
            place = bottom + 56 + 18.0 * k
            canvas.line(left, place - 4, left + 22, place - 4, f"curve arm{k % CURVES}")
            canvas.text(left + 30, place, shortened(str(curve["name"]), right - left - 40), "tick")
        canvas.text((left + right) / 2, bottom + 34, axis, "axis", "middle")
        return canvas

    return draw


def horizons(data: Horizons) -> Draw:
    """Draw a comparison by horizon: bars are pointwise intervals, the band holds for all horizons at once."""

    def draw(width: float) -> Canvas:
        left, right, top, bottom = 46.0, width - 12, 10.0, 230.0
        canvas = Canvas(width, bottom + 44)
        ends = [*data.band_low, *data.band_high, *([] if data.null is None else [data.null])]
        x = linear(0.5, data.horizons[-1] + 0.5, left, right)
        y = linear(min(ends), max(ends), bottom, top)
        step = -(-data.horizons[-1] // (12 if is_wide(width) else 6))
        x_axis(canvas, x, [float(h) for h in range(1, data.horizons[-1] + 1, step)], top, bottom)
        for value in ticks(min(ends), max(ends), 5):
            canvas.line(left, y(value), right, y(value), "grid")
            canvas.text(left - 6, y(value) + 4, label(value), "tick", "end")
        if data.null is not None:
            canvas.line(left, y(data.null), right, y(data.null), "null")
        band = {"times": data.horizons, "band_low": data.band_low, "band_high": data.band_high}
        _band(canvas, band, x, y, 0)
        points = _points(data.horizons, data.estimate, x, y)
        canvas.curve(points, "curve arm0")
        for (at, height), horizon, value, low, high in zip(
            points, data.horizons, data.estimate, data.low, data.high, strict=True
        ):
            canvas.line(at, y(low), at, y(high), "whisker silo")
            canvas.circle(at, height, 3.5, "dot arm0", f"{horizon}: {value:.4g} ({low:.4g} to {high:.4g})")
        canvas.text((left + right) / 2, bottom + 34, "horizon, in periods", "axis", "middle")
        return canvas

    return draw


def _band(canvas: Canvas, curve: Document, x: Scale, y: Scale, style: int) -> None:
    upper = _points(curve["times"], curve["band_high"], x, y)
    lower = _points(curve["times"], curve["band_low"], x, y)
    outline = "L".join(f"{a:.1f} {b:.1f}" for a, b in [*upper, *reversed(lower)])
    canvas.path(f"M{outline}Z", f"band arm{style}")


def _points(times: Sequence[float], values: Sequence[float], x: Scale, y: Scale) -> list[tuple[float, float]]:
    return [(x(time), y(value)) for time, value in zip(times, values, strict=True)]
