"""SmolLM2 as a writer of abstracts at its smallest: prompts, losses, metrics of texts, results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from experiments import Options, reproduce, summarize_smollm2
from experiments.summarize.corpora import CORPORA, Sample, sample_of
from experiments.summarize_smollm2.prompts import PromptMaker, PromptSizes, gold_sentences, unlike
from experiments.summarize_smollm2.run import RIVALS, abstract_nats
from experiments.summarize_smollm2.tables import LAYOUTS, WRITTEN, tabulate, text_scores
from graftlm.backbone import Backbone
from graftlm.evaluation import Results, value_of
from proposals import proposal
from tiny import tiny_model, tiny_tokenizer

CHAT = (
    "{% for m in messages %}{{ m['role'] + m['content'] + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant' }}{% endif %}"
)
SIZES = PromptSizes(window=400, abstract=24)


@pytest.fixture(scope="module")
def maker() -> PromptMaker:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT
    return PromptMaker(Backbone.wrap(tiny_model("llama", max_position_embeddings=1024), tokenizer), SIZES)


def sample(number: int = 2, **changes: str) -> Sample:
    return sample_of("eips", proposal("eips", number) | changes)


def test_layouts_share_the_introduction_and_differ_behind_it(maker: PromptMaker) -> None:
    row = maker.row(sample())
    texts = {name: maker.tokenizer.decode([*row["start"], *ids]) for name, ids in row["prompts"].items()}
    assert set(texts) == set(LAYOUTS)
    assert all(text.count("Every window has a handle that breaks.") >= 1 for text in texts.values())
    assert all(len(row["start"]) + len(ids) + SIZES.abstract <= SIZES.window for ids in row["prompts"].values())
    assert [name for name, text in texts.items() if "Most important sentences" in text] == [
        "ie_gold",
        "ie_selected",
        "ie_random",
    ]
    assert len(row["prompts"]["i_long"]) > len(row["prompts"]["i"])
    assert not any("gets a new handle" in text for text in texts.values()), "no prompt has the abstract"


def test_gold_sentences_are_the_most_like_the_abstract() -> None:
    made = sample(abstract="The new handle of eips is made of oak. The old handle costs a lot.")
    assert [made.document.sentences[index].text for index in gold_sentences(made)[:2]] == [
        "The new handle of eips is made of oak.",
        "The old handle costs 11 coins.",
    ]


def test_a_loss_behind_a_shared_start_is_that_of_the_whole_prompt(maker: PromptMaker) -> None:
    row = maker.row(sample())
    model = maker.writers["i"].model
    answer = torch.tensor(row["answer"])
    for name, nats in abstract_nats(model, row).items():
        ids = torch.tensor([*row["start"], *row["prompts"][name], *row["answer"]])
        log_p = model(input_ids=ids[None]).logits[0].detach().log_softmax(-1)[-len(answer) - 1 : -1]
        assert nats == pytest.approx(-float(log_p.gather(1, answer[:, None]).sum()), rel=1e-4)


def test_a_near_copy_of_a_training_document_is_left_out() -> None:
    copy = sample(2)
    changed = sample(2, abstract="Another abstract altogether, about nothing that anybody else has written about yet.")
    assert unlike([copy, changed, sample(3)], [sample(2)]) == [sample(3)]
    assert unlike([copy], []) == [copy]


@pytest.mark.slow
def test_shares_of_texts() -> None:
    milk = "Cats drink milk daily."
    document = {"id": "x", "abstract": [milk], "source": "cats drink milk daily and sleep"}
    document |= {"read": {"i": "We think.", "ie": milk}, "rivals": {"lead3": ["Dogs do not."]}}
    scores = text_scores(f"{milk} {milk}", document)
    assert scores["unsupported_share"] == 0
    assert scores["new_pairs"] == pytest.approx(1 / 7), "only 'daily cats' is no pair of the source"
    assert scores["repeated_share"] == pytest.approx(1 / 5), "of five runs of four words, the last is the first"
    assert scores["rouge1"] == pytest.approx(100 * 2 * 0.5 / 1.5)
    assert text_scores("", document)["unsupported_share"] == 1
    assert text_scores(f"{milk} The kiwi has 7 wings.", document)["unsupported_share"] == 0.5


def test_differences_are_paired_over_documents_and_seeds_averaged() -> None:
    documents = {
        name: {
            "id": name,
            "answer": [1, 2],
            "abstract": ["a b."],
            "source": "a b",
            "read": {"i": "a b."},
            "rivals": {"extract": ["a b."]},
        }
        for name in "xyz"
    }
    texts = {layout: dict.fromkeys(documents, "a b") for layout in WRITTEN}

    def run(gains: tuple[float, ...]) -> dict[str, object]:
        nats = {
            name: {layout: 6.0 + 40 * number - gain * (layout == "ie_selected") for layout in LAYOUTS}
            for number, (name, gain) in enumerate(zip(documents, gains, strict=True))
        }
        return {"nats": nats, "texts": texts}

    runs = [[run((1, 1, 1))], [run((3, 3, 3))]]
    metrics, minus, by_seed = tabulate(runs, documents, runs[0])
    loss = minus["abstract_nll_i"]
    assert tuple(loss.values()) == pytest.approx((-1, -1, -1)), "2 nats of 2 tokens in each document"
    assert metrics["i"]["abstract_nll"].high > metrics["i"]["abstract_nll"].low
    assert by_seed["i"][0] - by_seed["ie_selected"][0] == pytest.approx(0.5)
    assert value_of(metrics["ie_gold"]["unsupported_share"]) == 0
    fewer = {"nats": {"y": {}}, "texts": {"i": {"z": ""}}}
    metrics, _, _ = tabulate(runs, documents, [fewer])
    assert value_of(metrics["i"]["abstract_nll"]) == 23, "46 nats of 2 tokens: of the second document alone"


@pytest.mark.slow
@pytest.mark.slow
def test_every_row_is_measured(tmp_path: Path) -> None:
    data, model = tmp_path / "data", tmp_path / "model"
    (data / "longdocs").mkdir(parents=True)
    for corpus in CORPORA:
        lines = (json.dumps(proposal(corpus, number)) + "\n" for number in range(8))
        (data / "longdocs" / f"{corpus}.jsonl").write_text("".join(lines))
    (data / "lm_text").mkdir()
    novels = "".join(json.dumps({"text": f"The house number {number} is old. " * 40}) + "\n" for number in range(21))
    (data / "lm_text/eltec_eng.jsonl").write_text(novels)
    tiny_model("llama", max_position_embeddings=1024).save_pretrained(model)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(model)
    results = reproduce(
        "summarize-smollm2", Options(data=data, out=tmp_path / "out", quick=True, jobs=1, backbone=str(model))
    )
    check_results(results)


def check_results(results: Results) -> None:
    rows = {f"{layout}_{variant}" for variant in ("zero_shot", "grafted", "zero_shot_same") for layout in LAYOUTS} | {
        *RIVALS
    }
    assert {row.id for row in results.rows} == rows
    for variant in ("zero_shot", "grafted"):
        minus = results.details["minus"][variant]
        losses = [value_of(results.row(f"{name}_{variant}").metrics["abstract_nll"]) for name in ("ie_selected", "i")]
        assert minus["abstract_nll_i"]["mean"] == pytest.approx(losses[0] - losses[1], abs=1e-6)
        first, second, _ = (aim for aim in results.aims if variant in aim.text)
        assert first.met == (first.measured <= -0.1)
        assert second.measured == pytest.approx(minus["abstract_nll_i"]["high"])
    assert {name: len(tried) for name, tried in results.details["searched"].items()} == {"neutral": 3, "lora": 3}


def test_the_committed_results() -> None:
    results = Results.read(Path(summarize_smollm2.__file__).parent)
    check_results(results)
    assert len(results.seeds) == 3
