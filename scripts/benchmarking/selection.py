"""Which rows of a result file docs/performance.md and the charts show."""

MOST_ROWS = 16


def selected(rows: list[dict]) -> list[dict]:
    """Rows with a target, peers, ratios, and of the others the first until there are MOST_ROWS; in their
    order.
    """
    others = [row for row in rows if not is_first(row)]
    left_out = {row["name"] for row in others[max(0, MOST_ROWS - (len(rows) - len(others))) :]}
    return [row for row in rows if row["name"] not in left_out]


def is_first(row: dict) -> bool:
    return row["target"] is not None or "times_ours" in row or "ratio" in row or "speedup" in row
