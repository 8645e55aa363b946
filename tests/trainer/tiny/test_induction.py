"""The tiny policy can copy before it has learned anything."""

import torch

from skyrl_trainer.settings import TinyConfig
from skyrl_trainer.tiny.init_policy import make_model, make_tokenizer


def continued(induction: bool, alphabet: int = 100, **config: int) -> float:
    """Share of tokens guessed right, greedily, in the last half of strings that say the same again elsewhere."""
    tokenizer = make_tokenizer(["some text"], 300)
    model = make_model(tokenizer, TinyConfig(induction=induction, config_kwargs=config), seed=0)
    generator = torch.Generator().manual_seed(0)
    text_BT = torch.randint(alphabet, (64, 200), generator=generator)
    ids_BT = torch.cat([text_BT, text_BT[:, 100:112]], dim=1)
    with torch.no_grad():
        guess_BT = model(ids_BT).logits.argmax(-1)[:, :-1]
    return (guess_BT == ids_BT[:, 1:])[:, -6:].float().mean().item()


def test_copies_before_any_training():
    assert continued(True) > 0.15
    assert continued(True, num_hidden_layers=2) > 0.15
    assert continued(True, num_hidden_layers=2, num_key_value_heads=4) > 0.15
    assert continued(False) < 0.03


def test_models_too_small_for_the_circuit_are_left_as_they_are():
    assert continued(True, num_hidden_layers=1) < 0.03


def test_same_seed_same_weights_and_the_callers_generator_is_left_alone():
    tokenizer = make_tokenizer(["some text"], 300)
    before = torch.get_rng_state()
    one, same, other = (make_model(tokenizer, TinyConfig(induction=True), seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    name = "model.layers.1.self_attn.q_proj.weight"
    assert not torch.equal(one[name], other[name])
    assert torch.equal(before, torch.get_rng_state())


def test_weights_do_not_depend_on_the_number_of_threads():
    """Last bits of the circuit's weights did, and made other clones: one that solved half of its task, or nothing."""
    tokenizer, threads, made = make_tokenizer(["some text"], 300), torch.get_num_threads(), []
    for number in (1, 2):
        torch.set_num_threads(number)
        made.append(make_model(tokenizer, TinyConfig(induction=True), 0).state_dict())
        assert torch.get_num_threads() == number
    torch.set_num_threads(threads)
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])


def test_odd_shapes():
    tokenizer = make_tokenizer(["some text"], 300)
    for config in ({"hidden_size": 24}, {"num_attention_heads": 2, "num_key_value_heads": 1}, {"head_dim": 64}):
        model = make_model(tokenizer, TinyConfig(induction=True, config_kwargs=config), seed=0)
        assert all(p.isfinite().all() for p in model.parameters())
