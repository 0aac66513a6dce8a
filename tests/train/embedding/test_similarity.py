"""Promise: losses are those of their papers, in a few lines of torch; pooling looks at no padding, wherever it stands;
measures are those of scikit-learn and of counting."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from shardproof.train.embedding import similarity
from shardproof.train.embedding.pooling import pooled
from shardproof.train.embedding.similarity import Embedded


def batch(rows: int, negatives: int, seed: int = 0) -> Embedded:
    chance = torch.Generator().manual_seed(seed)
    texts = functional.normalize(torch.randn(2 * rows + negatives, 8, generator=chance), dim=-1)
    keys = torch.arange(rows + negatives) + 1000 * seed
    return Embedded.of(texts, rows, keys, torch.rand(rows, generator=chance))


def test_infonce_is_cross_entropy_over_all_texts() -> None:
    found = batch(5, 3)
    texts = torch.cat([found.positives, found.negatives])
    expected = sum(
        functional.cross_entropy(torch.stack([query @ text / 0.05 for text in texts]), torch.tensor(i))
        for i, query in enumerate(found.queries)
    )
    torch.testing.assert_close(similarity.infonce(found, 0.05), expected)


def test_a_text_that_equals_the_positive_is_no_negative() -> None:
    found = batch(3, 1)
    first, _, third = found.positives
    same = found._replace(positives=torch.stack([first, first, third]), negatives=third[None])
    same = same._replace(keys=torch.tensor([7, 7, 8, 8]))
    texts = [[first, third, third], [first, third, third], [third, first, first]]
    expected = sum(
        functional.cross_entropy(torch.stack([query @ text / 0.1 for text in seen]), torch.tensor(0))
        for query, seen in zip(same.queries, texts, strict=True)
    )
    torch.testing.assert_close(similarity.infonce(same, 0.1), expected)


def test_labels_of_pairs() -> None:
    found = batch(6, 0)
    cosine = functional.cosine_similarity(found.queries, found.positives)
    expected = functional.mse_loss(cosine, found.scores, reduction="sum")
    torch.testing.assert_close(similarity.cosine_similarity(found), expected)
    yes = found._replace(scores=(found.scores > 0.5).float())
    apart = 1 - cosine
    each = [0.5 * (d**2 if s else max(0.5 - d, torch.tensor(0.0)) ** 2) for d, s in zip(apart, yes.scores, strict=True)]
    torch.testing.assert_close(similarity.contrastive(yes), torch.stack(each).sum())


@pytest.mark.parametrize("how", ["last", "mean", "cls"])
def test_pooling_with_padding_on_either_side(how: str) -> None:
    hidden = torch.randn(3, 4, 5)
    expected = {"last": hidden[:, 3], "mean": hidden.mean(1), "cls": hidden[:, 0]}[how]
    expected = functional.normalize(expected, dim=-1)
    rubbish = torch.full((3, 2, 5), 1e6)
    mask, none = torch.ones(3, 4, dtype=torch.long), torch.zeros(3, 2, dtype=torch.long)
    for order in (slice(None), slice(None, None, -1)):
        parts = torch.cat([hidden, rubbish][order], dim=1), torch.cat([mask, none][order], dim=1)
        torch.testing.assert_close(pooled(*parts, how), expected)


def test_batches_together_are_one() -> None:
    parts = [batch(4, 2), batch(3, 0, seed=1), batch(2, 5, seed=2)]
    whole = Embedded.together(parts)
    assert [len(column) for column in whole] == [9, 9, 7, 16, 9]
    for place in range(3):
        torch.testing.assert_close(whole[place], torch.cat([part[place] for part in parts]))
    assert whole.keys.tolist() == [0, 1, 2, 3, 1000, 1001, 1002, 2000, 2001, 4, 5, *range(2002, 2007)]


def test_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(similarity, "AT_ONCE", 3)
    found = batch(10, 6)
    similar = found.queries @ torch.cat([found.positives, found.negatives]).T
    places = [1 + sorted(row.tolist(), reverse=True).index(row[i].item()) for i, row in enumerate(similar)]
    measured = similarity.retrieval(found)
    assert measured["accuracy"] == sum(place == 1 for place in places) / 10
    assert measured["mrr"] == pytest.approx(sum(1 / place for place in places) / 10)
    own = similar[range(10), range(10)]
    assert measured["mean_pos"] == pytest.approx(own.mean().item(), abs=1e-6)
    assert measured["mean_neg"] == pytest.approx(((similar.sum() - own.sum()) / (160 - 10)).item(), abs=1e-6)


def test_correlations_are_those_of_scipy() -> None:
    from scipy.stats import pearsonr, spearmanr

    found = batch(20, 0)
    found = found._replace(scores=(found.scores * 4).round() / 4)  # with ties
    cosine = (found.queries * found.positives).sum(-1)
    measured = similarity.correlation(found)
    assert measured["pearson"] == pytest.approx(pearsonr(cosine, found.scores)[0], abs=1e-6)
    assert measured["spearman"] == pytest.approx(spearmanr(cosine, found.scores)[0], abs=1e-6)
