"""Figures of who was studied: overlap, modelled probabilities, heterogeneity between silos."""

from __future__ import annotations

from itertools import pairwise

from fedtmle.report.charts import ROW, Draw, is_wide, x_axis
from fedtmle.report.series import Overlap, Probabilities, Spread
from fedtmle.report.svg import Canvas, label, linear, shortened, ticks


def overlap(data: Overlap) -> Draw:
    """Records by arm (with outcome, without, below the bound on g) and effective sizes."""

    def draw(width: float) -> Canvas:
        wide = is_wide(width)
        left, right, top = (170.0 if wide else 104.0), width - 70, 8.0
        bars = len(data.arms) + len(data.effective)
        bottom = top + ROW * (bars + 2)
        canvas = Canvas(width, bottom + 42)
        most = max([*(arm.records for arm in data.arms), *data.effective.values(), 1])
        x = linear(0, most, left, right)
        x_axis(canvas, x, ticks(0, most, 5 if wide else 3), top, bottom)
        y = top
        canvas.text(0, y + 14, "Records by arm", "group")
        for arm in data.arms:
            y += ROW
            canvas.text(10, y + 14, shortened(arm.name, left - 18), "name")
            said = f"{arm.name}: {arm.records:,} records, {arm.observed:,} with an outcome"
            canvas.rect(left, y + 4, x(arm.records) - left, 12, "bar all", said)
            canvas.rect(left, y + 4, x(arm.observed) - left, 12, "bar seen", said)
            below = f"{arm.truncated:,} of {arm.records:,} records of {arm.name} below the bound on g"
            canvas.rect(left, y + 13, x(arm.truncated) - left, 3, "bar truncated", below)
            canvas.text(x(arm.records) + 5, y + 14, f"{arm.truncated:,} cut", "tick")
        y += ROW
        canvas.text(0, y + 14, "Effective number of records", "group")
        for name, size in data.effective.items():
            y += ROW
            canvas.text(10, y + 14, shortened(name, left - 18), "name")
            canvas.rect(left, y + 4, x(size) - left, 12, "bar effective", f"{name}: {size:,.1f}")
            canvas.text(x(size) + 5, y + 14, f"{size:,.0f}", "tick")
        canvas.text((left + right) / 2, bottom + 36, "records", "axis", "middle")
        return canvas

    return draw


def probabilities(data: Probabilities) -> Draw:
    """One histogram under the other, by the arm that was taken, over the same probabilities."""

    def draw(width: float) -> Canvas:
        left, right, tall = 40.0, width - 8, 92.0
        canvas = Canvas(width, tall * len(data.counts) + 42)
        x = linear(0, 1, left, right)
        most = max([1, *(count or 0 for counts in data.counts.values() for count in counts)])
        for k, (arm, counts) in enumerate(data.counts.items()):
            top, bottom = tall * k + 22, tall * (k + 1)
            y = linear(0, most, bottom, top)
            canvas.text(left, top - 6, f"those in arm {shortened(arm, width - 180)}", "group")
            canvas.line(left, bottom, right, bottom, "null")
            canvas.text(left - 6, top + 8, f"{most:,}", "tick", "end")
            for (low, high), count in zip(pairwise(data.edges), counts, strict=True):
                if count is None:
                    canvas.text((x(low) + x(high)) / 2, bottom - 4, "?", "warn", "middle")
                elif count:
                    said = f"{count:,} with a probability of {low:g} to {high:g}"
                    canvas.rect(
                        x(low) + 1, y(count), x(high) - x(low) - 2, bottom - y(count), "bar seen", said
                    )
        bottom = tall * len(data.counts)
        for mark in (0, 0.2, 0.4, 0.6, 0.8, 1):
            canvas.text(x(mark), bottom + 16, label(mark), "tick", "middle")
        canvas.text((left + right) / 2, bottom + 36, f"probability of arm {data.of}", "axis", "middle")
        return canvas

    return draw


def heterogeneity(data: Spread) -> Draw:
    """Each silo's distance from the weighted mean in its own standard errors."""

    def draw(width: float) -> Canvas:
        left, right, top = (170.0 if is_wide(width) else 104.0), width - 14, 8.0
        bottom = top + ROW * len(data.distance)
        canvas = Canvas(width, bottom + 42)
        most = max([2.2, *(abs(value) * 1.05 for value in data.distance.values())])
        x = linear(-most, most, left, right)
        canvas.rect(x(-1.96), top, x(1.96) - x(-1.96), bottom - top, "usual", "within 1.96 standard errors")
        x_axis(canvas, x, ticks(-most, most, 6 if is_wide(width) else 4), top, bottom)
        canvas.line(x(0), top, x(0), bottom, "null")
        for i, (silo, value) in enumerate(data.distance.items()):
            y = top + ROW * (i + 0.5)
            canvas.text(10, y + 4, shortened(silo, left - 18), "name")
            canvas.line(x(0), y, x(value), y, "whisker silo")
            canvas.circle(x(value), y, 4.0, "dot silo", f"{silo}: {value:+.2f} standard errors")
        said = "distance from the weighted mean, in standard errors"
        canvas.text(
            (left + right) / 2, bottom + 36, said if is_wide(width) else "standard errors", "axis", "middle"
        )
        return canvas

    return draw
