"""All silos' rows in one table, for the centralised comparator."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedtmle.algorithms.study import Study
from fedtmle.initial.crossfit import POOLED_SILO
from fedtmle.model.table import Factor, Table
from fedtmle.protocol.clusters import ClustersQuery
from fedtmle.protocol.tables import sort_levels


def pooled_rows(study: Study, tables: Mapping[str, Table]) -> Table:
    """All rows in one table; clusters are within silos, or the same in all, as the study declares."""
    own = study.cluster if study.cluster_scope == "silo" else None
    if study.cluster is not None and study.cluster_scope == "shared":
        query = ClustersQuery(column=study.cluster, spanning=False)
        query.pool({name: query.of(table) for name, table in tables.items()}, {})
    return pool_tables(tables, own)


def pool_tables(silos: Mapping[str, Table], cluster: str | None = None) -> Table:
    """All rows in one table, for the centralised comparator; factors by the union of their levels.

    Folds stay within silos, as they are when the rows do, and so does a ``cluster`` of the silos' own.
    """
    tables = list(silos.values())
    silo = np.repeat(np.arange(len(tables)), [table.n_rows for table in tables])
    factors = {POOLED_SILO: Factor(silo, tuple(silos))}
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
