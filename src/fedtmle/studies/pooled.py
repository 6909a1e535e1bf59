"""All silos' rows in one table, for the centralised comparator."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedtmle.initial.crossfit import POOLED_SILO
from fedtmle.model.table import Factor, Table
from fedtmle.protocol.tables import sort_levels


def pool_tables(tables: Sequence[Table], cluster: str | None = None) -> Table:
    """All rows in one table, for the centralised comparator; factors by the union of their levels.

    Clusters and folds stay within silos, as they are when the rows do.
    """
    silo = np.repeat(np.arange(len(tables)), [table.n_rows for table in tables])
    factors = {POOLED_SILO: Factor(silo, tuple(map(str, range(len(tables)))))}
    for name in tables[0].factors:
        own = [table.factors[name] for table in tables]
        if name == cluster:
            levels = tuple(f"{m}:{level}" for m, factor in enumerate(own) for level in factor.levels)
            first = np.cumsum([0, *(len(factor.levels) for factor in own)])
            codes = [factor.codes + start for factor, start in zip(own, first, strict=False)]
        else:
            levels = sort_levels({level for factor in own for level in factor.levels})
            codes = [factor.recode(levels) for factor in own]
        factors[name] = Factor(np.concatenate(codes), levels)
    return Table(
        n_rows=sum(table.n_rows for table in tables),
        numeric={name: np.concatenate([t.numeric[name] for t in tables]) for name in tables[0].numeric},
        factors=factors,
    )
