"""The figures of the summary tables are those of the committed results."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Each figure of the experiments' table with where it stands in that experiment's results: row.metric.
FIGURES = {
    "self_replay": {
        "0.016": "open-self.forgotten",
        "0.039": "open-self.forgotten_bible",
        "0.066": "ungated-self.forgotten",
        "0.170": "lora-self-distil.forgotten_bible",
        "0.114": "lora-self-distil.forgotten",
    },
    "clarify_smollm2": {
        "50.2%": "bare_all.right_form_answer",
        "50.0%": "bare_all.right_form_context",
        "50.7%": "question_all.right_form_answer",
        "52.5%": "question_all.right_form_context",
        "49.8%": "plain_all.right_form_answer",
        "51.8%": "plain_all.right_form_context",
        "50%": "bare_all.right_form_nothing",
    },
    "memory_smollm2": {
        "97.9%": "memory.recall_16_windows",
        "0.0%": "lora_window.recall_16_windows",
        "75.0%": "lora_full.recall_16_windows",
        "59.9%": "memory.validation_recall_16_windows",
        "63.5%": "lora_full.validation_recall_16_windows",
        "100.0%": "lookup.recall_16_windows",
        "2.657": "memory.nats_beyond",
        "2.730": "window_sinks.nats_beyond",
        "2.560": "lora_window.nats_beyond",
        "2.553": "full.nats_beyond",
        "0.006": "memory.gain_of_far",
        "0.126": "full.gain_of_far",
    },
    "keep_smollm2": {
        "0.021": "neutral_self_replay.own_kl",
        "0.061": "lora_replay.own_kl",
        "0.036": "lora_kl.own_kl",
        "0.015": "neutral_self_replay.own_kl_at_equal",
        "0.023": "lora_replay.own_kl_at_equal",
        "0.016": "lora_kl.own_kl_at_equal",
        "0.469": "lora_kl.learned",
        "0.434": "neutral_self_replay.learned",
    },
    "grow_smollm2": {
        "0.023": "0 - together.lost_de",
        "0.008": "0 - together.lost_fr",
        "0.039": "lora_sequential.lost_de",
        "0.042": "lora_sequential.lost_fr",
        "0.105": "lora_sequential_plain.lost_de",
        "0.102": "lora_sequential_plain.lost_fr",
        "0.090": "lora_sequential_wide.lost_de",
        "0.085": "lora_sequential_wide.lost_fr",
    },
    "audit_smollm2": {
        "0.016": "int8.own_kl",
        "0.158": "lora.own_kl",
        "0.155": "finetune.own_kl",
        "0.030": "neutral_self.own_kl",
    },
    "chat_smollm2": {
        "0.043": "lora_replay.own_kl",
        "0.029": "adapter_replay.own_kl",
        "0.028": "neutral_replay.own_kl",
        "0.105": "lora.own_kl",
        "0.347": "lora_replay.learned",
        "0.321": "adapter_replay.learned",
        "0.306": "neutral_replay.learned",
        "0.383": "lora.learned",
    },
    "summarize_smollm2": {
        "3.285": "ie_selected_zero_shot.abstract_nll",
        "3.589": "i_zero_shot.abstract_nll",
        "3.410": "i_long_zero_shot.abstract_nll",
        "3.447": "ie_random_zero_shot.abstract_nll",
        "32.4": "ie_selected_zero_shot.rouge1",
        "28.2": "i_zero_shot.rouge1",
        "36.3": "extract.rouge1",
        "2.934": "ie_selected_grafted.abstract_nll",
    },
    "neutral_residues": {
        "0.075": "neutral-residues.forgotten_unlike",
        "0.260": "none-l1-low.forgotten_unlike",
        "0.312": "relu-open-low.forgotten_unlike",
        "0.282": "lora.forgotten_unlike",
        "1.282": "neutral-residues.learned",
        "1.266": "none-l1-low.learned",
        "1.263": "relu-open-low.learned",
        "1.285": "lora.learned",
    },
    "composition_language": {
        "1.963": "both.new_bpb",
        "1.964": "mixture.new_bpb",
        "2.437": "lora.new_bpb",
        "2.381": "cross.new_bpb",
        "2.860": "both.ntrex_fr_en_bpb",
        "2.779": "random_m_a.ntrex_fr_en_bpb",
    },
    "composition_code": {
        "1.903": "both.t2c_bpb",
        "1.921": "m_a.t2c_bpb",
        "1.916": "mixture.t2c_bpb",
        "2.230": "lora.t2c_bpb",
        "2.051": "both.c2t_bpb",
        "2.075": "m_a.c2t_bpb",
        "2.070": "mixture.c2t_bpb",
        "2.211": "lora.c2t_bpb",
    },
    "composition_smollm2": {
        "2.284": "both.german_bpb",
        "2.271": "german.german_bpb",
        "2.285": "mixture.german_bpb",
        "2.439": "lora.german_bpb",
        "2.518": "vanilla_m_a.german_bpb",
        "1.086": "both.python_bpb",
        "1.034": "python.python_bpb",
    },
    "kv_arithmetic": {
        "59.1%": "composition.kv_math_held_out",
        "41.2%": "composition.kv_math_direct_held_out",
        "81.3%": "pipeline.kv_math_direct_held_out",
        "0.3%": "lora.kv_math_held_out",
    },
    "token_routing": {
        "94.0%": "routed_k2.routing_accuracy",
        "4.410": "routed_k2.nll_average",
        "4.383": "oracle.nll_average",
        "4.784": "published.nll_average",
        "4.273": "lora_all.nll_average",
    },
    "routing_smollm2": {
        "98.4%": "routed_k2.routing_accuracy",
        "99.8%": "form_classifier.routing_accuracy",
        "81.0%": "twenty_routed_k2.routing_accuracy",
        "70.7%": "twenty_bag_of_words.routing_accuracy",
        "62.4%": "twenty_form_classifier.routing_accuracy",
        "44.2%": "routed_k2.likelihood_accuracy",
        "41.4%": "xlora.likelihood_accuracy",
        "39.3%": "uniform.likelihood_accuracy",
        "26.8%": "published.likelihood_accuracy",
        "19.0%": "lora_all.accuracy",
        "17.9%": "routed_k2.accuracy",
        "15.4%": "xlora.accuracy",
        "15.1%": "uniform.accuracy",
    },
    "conditional_tasks": {
        "77.0": "lora_per_task.average",
        "74.5": "lora.average",
        "72.9": "multi_task.average",
        "70.6": "all_layers.average",
        "64.5": "lora_by_row.average",
        "75.3": "cln_all_layers.average",
        "75.7": "adapters.average",
        "75.0": "ca_mtl.average",
    },
    "block_state": {
        "2.274": "sh_delta.bpb_code",
        "2.346": "slide_ssm.bpb_code",
        "2.359": "slide.bpb_code",
        "2.743": "sh_delta.bpb_documents",
        "2.820": "slide_ssm.bpb_documents",
        "2.842": "slide.bpb_documents",
        "2.152": "gss_hybrid.bpb_code",
        "2.603": "gss_hybrid.bpb_documents",
        "2.048": "sh_delta_width384.bpb_code",
        "2.298": "slide_width384.bpb_code",
        "1.992": "gss_hybrid_width384.bpb_code",
        "2.292": "sh_delta_reset.bpb_code",
        "2.764": "sh_delta_reset.bpb_documents",
        "2.187": "sh_delta_window32.bpb_code",
        "2.230": "slide_window32.bpb_code",
    },
    "long_memory": {
        "99.6%": "sh_delta.recall64",
        "0.0%": "sh_s4d.recall64",
        "31.9%": "sh_s4d.recall",
        "97.2%": "gated_delta.recall64",
        "99.8%": "mamba2.recall",
        "61.8%": "sh_delta.copy",
        "63.2%": "block_recurrent.copy",
    },
    "summarize": {
        "36.1": "default.rouge1_lead3",
        "34.2": "modern.rouge1_lead3",
        "32.4": "lexrank.rouge1_lead3",
        "29.4": "lead.rouge1_lead3",
    },
    "clarify": {},
    "ambiguity_checkers": {"90.2": "formality_es.right_of_all", "99.6%": "formality_de.right_of_all"},
}
# The same for what the pages say of compositions, as experiment/row.metric.
COMPOSITIONS = {
    "1.963": "composition_language/both.new_bpb",
    "1.964": "composition_language/mixture.new_bpb",
    "2.437": "composition_language/lora.new_bpb",
    "2.434": "composition_language/m_b.new_bpb",
    "2.440": "composition_language/random_m_a.new_bpb",
    "2.381": "composition_language/cross.new_bpb",
    "2.860": "composition_language/both.ntrex_fr_en_bpb",
    "3.286": "composition_language/m_b.ntrex_fr_en_bpb",
    "2.779": "composition_language/random_m_a.ntrex_fr_en_bpb",
    "1.903": "composition_code/both.t2c_bpb",
    "1.921": "composition_code/m_a.t2c_bpb",
    "2.230": "composition_code/lora.t2c_bpb",
    "2.252": "composition_code/random_m_a.t2c_bpb",
    "2.284": "composition_smollm2/both.german_bpb",
    "2.271": "composition_smollm2/german.german_bpb",
    "2.439": "composition_smollm2/lora.german_bpb",
    "2.518": "composition_smollm2/vanilla_m_a.german_bpb",
    "1.911": "composition_smollm2/both.french_bpb",
    "1.906": "composition_smollm2/french.french_bpb",
    "2.025": "composition_smollm2/lora.french_bpb",
    "2.117": "composition_smollm2/vanilla_m_a.french_bpb",
    "1.086": "composition_smollm2/both.python_bpb",
    "1.034": "composition_smollm2/python.python_bpb",
    "1.101": "composition_smollm2/lora.python_bpb",
    "1.129": "composition_smollm2/vanilla_m_a.python_bpb",
    "1.097": "composition_smollm2/both.ntrex_french_english_bpb",
    "1.081": "composition_smollm2/m_b.ntrex_french_english_bpb",
    "41.2%": "kv_arithmetic/composition.kv_math_direct_held_out",
    "59.1%": "kv_arithmetic/composition.kv_math_held_out",
    "81.3%": "kv_arithmetic/pipeline.kv_math_held_out",
    "60.8%": "kv_arithmetic/probability_mixture.kv_math_held_out",
    "0.1%": "kv_arithmetic/lora.kv_math_direct_held_out",
}
SHARES: set[str] = set()  # metrics kept as shares of one, quoted in percent
METHODS = {
    "neutral residues, its own text": "open-self",
    "local loss without a gate (alpha 1)": "ungated-self",
    "plain adapters, its own text": "adapter-self",
    "neutral residues, no old text": "open",
    "LoRA, its own text distilled": "lora-self-distil",
    "LoRA, no old text": "lora",
}


@cache
def _rows(experiment: str) -> dict[str, dict[str, float]]:
    """The metrics of an experiment's committed rows."""
    results = json.loads((ROOT / "experiments" / experiment / "results.json").read_text(encoding="utf-8"))
    return {
        row["id"]: {name: value["mean"] if isinstance(value, dict) else value for name, value in row["metrics"].items()}
        for row in results["rows"]
    }


def _rounded(experiment: str, place: str, figure: str) -> str:
    """The value at that place, or the difference of two, written as the figure is."""
    terms = [term.rpartition(".") for term in place.split(" - ")]
    scales = [100 if metric in SHARES else 1 for *_, metric in terms]
    values = [
        _rows(experiment)[row][metric] * scale if row else 0.0
        for (row, _, metric), scale in zip(terms, scales, strict=True)
    ]
    value = values[0] - sum(values[1:])
    digits = len(figure.removesuffix("%").partition(".")[2])
    return f"{value:.{digits}f}" + "%" * figure.endswith("%")


def _quoted(text: str) -> set[str]:
    """The measured figures of a cell: decimals and percentages."""
    return {*re.findall(r"\d+\.\d+%?|\d+%", re.sub(r"\d+\.\d+M parameters", "", text))}


@pytest.mark.parametrize("experiment", FIGURES)
def test_the_experiments_table_quotes_committed_results(experiment: str) -> None:
    text = (ROOT / "experiments" / "README.md").read_text(encoding="utf-8")
    (line,) = [line for line in text.splitlines() if line.startswith("|") and f"({experiment}/README.md)" in line]
    figures = FIGURES[experiment]
    assert _quoted(line) == {*figures}
    assert {figure: _rounded(experiment, place, figure) for figure, place in figures.items()} == {
        figure: figure for figure in figures
    }


@pytest.mark.parametrize("method", METHODS)
def test_the_front_page_quotes_committed_results(method: str) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {method} |")]
    figures = [cell.strip(" *") for cell in line.strip("|").split("|")][1:]
    metrics = ("learned", "forgotten", "forgotten_shakespeare", "forgotten_bible")
    places = [f"{METHODS[method]}.{metric}" for metric in metrics]
    assert figures == [_rounded("self_replay", place, figure) for place, figure in zip(places, figures, strict=True)]


def test_the_front_page_quotes_the_real_model() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (item,) = [
        part for part in text.partition("## Your own")[0].split("\n- ") if "SmolLM2-135M-Instruct learns" in part
    ]
    quoted = _quoted(item)
    assert quoted == {"0.021", "0.028", "0.061", "0.036", "0.469", "0.434", "0.015", "0.019", "0.023", "0.016"}
    distilled = {"0.028": "neutral_self_distil.own_kl", "0.019": "neutral_self_distil.own_kl_at_equal"}
    places = FIGURES["keep_smollm2"] | distilled
    assert {figure: _rounded("keep_smollm2", places[figure], figure) for figure in quoted} == {f: f for f in quoted}


@pytest.mark.parametrize(
    ("page", "start"), [("docs/which-method.md", "| composition | French"), ("docs/methods/composition.md", "| ")]
)
def test_pages_on_compositions_quote_committed_results(page: str, start: str) -> None:
    """Ratios with their intervals, in round brackets, are those of `ratios` or of two rows' means."""
    text = (ROOT / page).read_text(encoding="utf-8").partition("So try a pipeline first")[0]
    lines = "\n".join(line for line in text.splitlines() if line.startswith(start))
    published = {"84.3%"}
    quoted = _quoted(re.sub(r"(ratio )?\d\.\d+ \[[^]]*\]|\[[^]]*\]", "", lines)) - published
    assert quoted <= COMPOSITIONS.keys()
    assert len(quoted) > 10
    for figure in quoted:
        experiment, _, place = COMPOSITIONS[figure].partition("/")
        assert _rounded(experiment, place, figure) == figure
    found = {float(number) for number in re.findall(r"(\d\.\d{3}) \[", lines)}
    ratios = json.loads((ROOT / "experiments/composition_smollm2/results.json").read_text())["details"]["ratios"]
    best = {round(ratio["mean"], 3) for text, ratio in ratios.items() if "better parent" in text}
    by_seed = json.loads((ROOT / "experiments/composition_smollm2/results.json").read_text())["details"]["by_seed"]
    (anchor,) = by_seed["m_b"].values()
    over_anchor = {
        round(sum(both[task] / anchor[task] for both in by_seed["both"].values()) / len(by_seed["both"]), 3)
        for task in anchor
        if task.endswith("_english_bpb")
    }
    assert found <= best | over_anchor


def test_every_experiment_has_its_figures_checked() -> None:
    compared = {"compatibility"}  # its page is compared with its cells, see tests/experiments
    assert {*FIGURES} | compared == {path.parent.name for path in ROOT.glob("experiments/*/results.json")}
