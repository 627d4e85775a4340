import pytest
import torch
import toys

from bench.oracles.plain_reference import decay, dpace, draft_hidden, full_logit_loss
from drafter.step import backward, slot_weights_of


@pytest.mark.parametrize(("loss", "weigh"), [("dpace", dpace(0.5)), ("decay", decay(1.75))])
def test_a_training_step_has_the_plain_references_loss_and_gradients(loss, weigh, tmp_path):
    model, frozen = toys.drafter(), toys.frozen()
    rows = [toys.row(18, 3, seed=1), toys.row(10, 5, seed=2), toys.row(13, 2, seed=3)]
    anchors = [[3, 6, 14], [5], [2, 9]]
    share = [(row, torch.tensor(a)) for row, a in zip(rows, anchors, strict=True)]
    settings = toys.config(tmp_path, loss=loss).train
    found, hits = backward(model, frozen, share, slot_weights_of(settings, 4), normalizer=6)

    weights = toys.weights_of(model)
    documents = [toys.document(row, a) for row, a in zip(rows, anchors, strict=True)]
    hidden = draft_hidden(weights, toys.numbers(model.shape), documents, frozen.embedding, toys.MASK_TOKEN_ID)
    labels = [[row.ids[a + k].item() for k in (1, 2, 3)] for row, some in zip(rows, anchors, strict=True) for a in some]
    expected = full_logit_loss(hidden, frozen.head, torch.tensor(labels), weigh, 6)
    expected.backward()

    assert abs(found - float(expected.detach())) < 1e-9
    for name, parameter in model.named_parameters():
        assert (parameter.grad - weights[name].grad).abs().max() < 1e-9, name
        assert weights[name].grad.abs().max() > 1e-6, f"{name} is trained"
    guesses = (hidden.detach() @ frozen.head.T).argmax(-1)
    assert hits.tolist() == (guesses == torch.tensor(labels)).sum(0).tolist()
