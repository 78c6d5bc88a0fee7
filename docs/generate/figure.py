"""The figure of the front page: learned against own_kl of the experiment `keep-smollm2`."""

from __future__ import annotations

from pathlib import Path

from docs.generate.results_tables import ROOT, load_results, value_at

FIGURE = ROOT / "docs" / "images" / "learned-against-changed.svg"
ROWS = {
    "lora": "LoRA, no old text",
    "adapter": "adapters, no old text",
    "neutral": "neutral residues, no old text",
    "lora_replay": "LoRA, replay",
    "lora_kl": "LoRA, distilled",
    "adapter_kl": "adapters, distilled",
    "neutral_self_replay": "neutral residues, replay",
    "neutral_self_distil": "neutral residues, distilled",
}


def draw_figure(path: Path) -> None:
    """Draw the figure as an SVG file, with the same bytes at every call.

    Args:
        path: The file to write.
    """
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    results = load_results(ROOT / "experiments" / "keep_smollm2")
    style = {"svg.hashsalt": "graftlm", "svg.fonttype": "none", "font.size": 9}
    with plt.rc_context(style):
        figure, axes = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
        for number, (row, label) in enumerate(ROWS.items()):
            learned = value_at(results, f"rows/{row}/learned")
            changed = value_at(results, f"rows/{row}/own_kl")
            axes.errorbar(
                learned["mean"],
                changed["mean"],
                xerr=[[learned["mean"] - learned["low"]], [learned["high"] - learned["mean"]]],
                yerr=[[changed["mean"] - changed["low"]], [changed["high"] - changed["mean"]]],
                fmt="os^DvP*X"[number],
                capsize=2,
                linewidth=1,
                label=label,
            )
        axes.set_xlabel("learned: fall of the loss on German novels, nats per token")
        axes.set_ylabel("own_kl, nats per token")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
