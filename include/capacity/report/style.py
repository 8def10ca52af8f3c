"""The one style of all figures.

Readable in grey and by colour-blind people: every line differs in marker and dash as well as in colour,
every bar in hatch. Colours are those of M. Okabe and K. Ito ("Color Universal Design", 2008). Text in
SVG stays text, so files are small and can be searched; names are never read as mathematics.
"""

from __future__ import annotations

from typing import Any

BLUE, VERMILION, GREEN, ORANGE, SKY, PINK, YELLOW = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#E69F00",
    "#56B4E9",
    "#CC79A7",
    "#F0E442",
)
INK, FAINT, GRID = "#1b1f24", "#6b7480", "#e3e6ea"

RC: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Helvetica", "Arial", "sans-serif"],
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "text.color": INK,
    "text.parse_math": False,
    "lines.linewidth": 1.7,
    "lines.markersize": 5.5,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "hatch.linewidth": 0.6,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "svg.fonttype": "none",
}

LINES: tuple[dict[str, Any], ...] = (
    {"color": BLUE, "marker": "o", "linestyle": "-"},
    {"color": VERMILION, "marker": "s", "linestyle": "--"},
    {"color": GREEN, "marker": "^", "linestyle": "-."},
    {"color": PINK, "marker": "D", "linestyle": ":"},
    {"color": ORANGE, "marker": "v", "linestyle": (0, (5, 1, 1, 1))},
    {"color": SKY, "marker": "P", "linestyle": (0, (1, 1))},
    {"color": INK, "marker": "X", "linestyle": (0, (3, 1, 1, 1, 1, 1))},
)
"""One entry a line; more lines than entries start again."""

OUTCOME_BARS: dict[str, dict[str, Any]] = {
    "completed": {"facecolor": "#9ecae9", "hatch": ""},
    "rejected": {"facecolor": VERMILION, "hatch": "//"},
    "server_error": {"facecolor": "#7a1f5c", "hatch": "xx"},
    "connect_failed": {"facecolor": "#8c8c8c", "hatch": "++"},
    "connection_lost": {"facecolor": YELLOW, "hatch": "\\\\"},
    "first_token_timeout": {"facecolor": ORANGE, "hatch": ".."},
    "deadline_exceeded": {"facecolor": PINK, "hatch": "--"},
    "truncated": {"facecolor": GREEN, "hatch": "oo"},
    "stream_error": {"facecolor": "#3d3d3d", "hatch": "||"},
    "malformed": {"facecolor": "#c9b38c", "hatch": "**"},
    "empty": {"facecolor": "#ffffff", "hatch": "xx"},
}
