"""Texts that end an answer: where an engine stops, and what is left of the turn."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from skyrl_trainer.agent.message_prompt import MessagePrompt
from skyrl_trainer.engine.stops import StopCheck, cut_at_stop, first_stop, read_stops
from skyrl_trainer.types import Turn
from tests.trainer.fakes import tiny_tokenizer

TEXTS = st.text(st.sampled_from("ab <>/é€"), min_size=1, max_size=30)
STOPS = st.lists(st.text(st.sampled_from("ab</>é€"), min_size=1, max_size=4), min_size=1, max_size=3)


def decode(ids: list[int]) -> str:
    return str(tiny_tokenizer().decode(ids))


@settings(max_examples=300, deadline=None)
@given(TEXTS, STOPS, st.booleans())
@example("12 + 34 = ?", ["3"], True)
@example("the answer is", ["swe"], True)
@example("a€b", ["€"], False)
def test_an_engine_stops_at_the_token_that_completes_a_stop_and_the_turn_ends_there(
    text: str, stops: list[str], merged: bool
) -> None:
    """Whether the tokens are pieces of words or single bytes."""
    encode = tiny_tokenizer().encode
    ids = encode(text) if merged else [token for char in text for token in encode(char)]
    check, asked = StopCheck(decode), tuple(stops)
    ends = next((n for n in range(1, len(ids) + 1) if check(ids[:n], asked)), None)
    assert ends == next((n for n in range(1, len(ids) + 1) if any(stop in decode(ids[:n]) for stop in stops)), None)
    turn = Turn([1], list(ids), [-0.5] * len(ids), [0] * len(ids), decode(ids))
    stop = cut_at_stop(decode, turn, asked)
    assert (stop is None) == (ends is None)
    if stop is None:
        assert turn.output_ids == ids and turn.action == text
    else:
        assert turn.output_ids == ids[: len(turn.logprobs)] and len(turn.weight_versions) == len(turn.logprobs)
        assert len(turn.output_ids) == ends
        assert text.startswith(turn.action + stop) and not any(each in turn.action for each in stops)


def test_the_first_stop_counts() -> None:
    assert first_stop("<search>x</search><answer>", ["<answer>", "</search>"]) == (9, "</search>")
    assert first_stop("abc", ["abc", "b"]) == (1, "b"), "by where they end, as sampling would have"
    assert first_stop("nothing", ["</search>"]) is None


def test_a_message_of_an_endpoint_is_one_token_and_stays() -> None:
    prompt = MessagePrompt()
    prompt.first("", "Which?")
    ids = [prompt.add("assistant", "<a>7</a>"), 0]
    turn = Turn([1], ids, [0.0, 0.0], [0, 0], prompt.decode(ids))
    assert cut_at_stop(prompt.decode, turn, ("</a>",)) == "</a>" and turn.action == "<a>7"
    assert turn.output_ids == ids[:1] and len(prompt.observation("Right.", turn.output_ids)) == 1


def test_what_an_env_may_say() -> None:
    assert read_stops(("</a>",)) == ("</a>",) and read_stops(["</a>", "</b>"]) == ("</a>", "</b>")
    for wrong in ([7], [""], ["</a>", None], 3, "</a>"):
        with pytest.raises(TypeError, match="stop"):
            read_stops(wrong)
