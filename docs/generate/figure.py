"""The figure of the front page: facts learned against near answers kept, of the experiment `facts`."""

from __future__ import annotations

from pathlib import Path

from docs.generate.results_tables import ROOT, load_results

FIGURE = ROOT / "docs" / "images" / "learned-against-kept.svg"
LEFT_OUT = ("backbone", "lora-1000", "routed-1000")


def draw_figure(path: Path) -> None:
    """Draw the figure as an SVG file, with the same bytes at every call.

    Args:
        path: The file to write.
    """
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    results = load_results(ROOT / "experiments" / "facts")
    style = {"svg.hashsalt": "graftlm", "svg.fonttype": "none", "font.size": 9}
    with plt.rc_context(style):
        rows = [row for row in results["rows"] if row["id"] not in LEFT_OUT]
        figure, axes = plt.subplots(figsize=(6.4, 3 + 0.2 * len(rows)), layout="constrained")
        for number, row in enumerate(rows):
            kept = row["metrics"]["locality_near"]
            learned = row["metrics"]["generalization"]
            axes.errorbar(
                kept["mean"],
                learned["mean"],
                xerr=[[kept["mean"] - kept["low"]], [kept["high"] - kept["mean"]]],
                yerr=[[learned["mean"] - learned["low"]], [learned["high"] - learned["mean"]]],
                fmt="os^DvP*X"[number % 8],
                capsize=2,
                linewidth=1,
                label=row["label"],
            )
        axes.set_xlabel("near answers that stay right, share")
        axes.set_ylabel("facts right in unseen phrasings, share")
        axes.set_xlim(-0.03, 1.03)
        axes.set_ylim(-0.03, 1.03)
        axes.grid(alpha=0.3)
        figure.legend(loc="outside lower left", frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
