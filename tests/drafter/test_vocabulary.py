import torch
import toys

from drafter.loss import block_loss
from drafter.vocabulary import Vocabulary

REPLIES = [torch.tensor([3, 4, 4, 9]), torch.tensor([9, 20])]


def test_no_sample_or_one_that_would_cover_the_rest_is_the_whole_vocabulary():
    head = toys.frozen().head
    for num_sampled in (None, 28, 100):
        candidates = Vocabulary(head, num_sampled=num_sampled, occurring=REPLIES).at(0)
        assert candidates.head is head and candidates.logit_offset is None
        assert torch.equal(candidates.labels(REPLIES[0]), REPLIES[0])


def test_every_occurring_token_keeps_its_own_row_and_no_offset():
    head = toys.frozen().head
    candidates = Vocabulary(head, num_sampled=5, occurring=REPLIES).at(3)
    assert candidates.head.shape == (4 + 5, 16)
    for ids in REPLIES:
        assert torch.equal(candidates.head[candidates.labels(ids)], head[ids])
        assert not candidates.logit_offset[candidates.labels(ids)].any()
    drawn = candidates.head[4:]
    assert not (drawn[:, None] == head[[3, 4, 9, 20]]).all(-1).any(), "the sample is of the other tokens"


def test_everything_that_a_step_looks_up_is_where_the_head_is():
    candidates = Vocabulary(toys.frozen().head.to("meta"), num_sampled=5, occurring=REPLIES).at(3)
    assert {candidates.head.device.type, candidates.logit_offset.device.type, candidates.place.device.type} == {"meta"}


def test_a_steps_sample_is_its_own_and_repeats():
    vocabulary = Vocabulary(toys.frozen().head, num_sampled=5, occurring=REPLIES, seed=1)
    assert torch.equal(vocabulary.at(2).head, vocabulary.at(2).head)
    assert not torch.equal(vocabulary.at(2).head, vocabulary.at(3).head)


def test_the_sample_estimates_the_softmaxs_denominator_without_bias():
    head = toys.frozen().head * 0.3
    hidden = torch.randn(1, 1, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole = (hidden[0] @ head.T).exp().sum()
    vocabulary = Vocabulary(head, num_sampled=8, occurring=REPLIES)
    estimates = []
    for step in range(2000):
        candidates = vocabulary.at(step)
        estimates.append((hidden[0] @ candidates.head.T + candidates.logit_offset).exp().sum())
    estimates = torch.stack(estimates)
    error = estimates.std() / len(estimates) ** 0.5
    assert abs(estimates.mean() - whole) < 4 * error < 0.05 * whole


def test_the_offset_enters_the_loss_and_its_gradient():
    head, offset = toys.frozen().head[:9], torch.linspace(-1, 2, 9, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(3, 2, 16, generator=generator, dtype=torch.float64, requires_grad=True)
    b = a.detach().clone().requires_grad_()
    labels = torch.tensor([[0, 8], [4, 4], [1, 7]])
    found, _ = block_loss(a, head, labels, torch.ones_like, normalizer=3, logit_offset=offset)
    expected = torch.nn.functional.cross_entropy((b @ head.T + offset).view(6, 9), labels.view(6), reduction="sum") / 3
    found.backward()
    expected.backward()
    assert abs(float(found.detach() - expected.detach())) < 1e-9
    assert (a.grad - b.grad).abs().max() < 1e-9
