"""webshop_lite: pages and transitions, the published reward, goals and their near misses, the expert, user catalogs."""

import json
import os
import random
import re
from collections import Counter, defaultdict

import gymnasium as gym
import pytest
from hypothesis import given
from hypothesis import strategies as st

import skyrl_gym  # noqa: F401
from skyrl_gym.bm25 import terms
from skyrl_gym.envs.webshop_lite.catalog import Product, load, price_limit
from skyrl_gym.envs.webshop_lite.env import parse_action
from skyrl_gym.envs.webshop_lite.generate import pages, words
from skyrl_gym.envs.webshop_lite.reward import normalize_color, purchase, token_set_ratio

FULL = os.environ.get("SKYRL_TEST_FULL") == "1"
CODE = r"B\d{9}"
SPLITS, LANGS = ("train", "val", "test"), pytest.mark.parametrize("lang", ["en", "zh"])


def make(**kwargs):
    return gym.make("skyrl/webshop_lite-v0", **kwargs)


def play(env, *actions):
    """The observation and info after the actions, each of which must be valid."""
    for action in actions:
        observation, _, _, _, info = env.step(action)
        assert info["valid_action"], action
    return observation, info


def finish(env):
    """The reward and info of the expert's way from here to the end."""
    while True:
        _, reward, terminated, truncated, info = env.step(env.unwrapped.expert_action())
        assert info["valid_action"] and not truncated and (terminated or reward == 0.0)
        if terminated:
            return reward, info


@given(st.text("ab[]\n ", max_size=12) | st.text(max_size=12))
def test_actions_are_read_as_webshop_reads_them(action):
    match = re.match(r"(.+)\[(.+)\]", action)
    assert parse_action(action) == ((match[1], match[2].lower()) if match else ("", ""))


def test_the_five_pages_and_their_transitions():
    env = make().env
    observation, info = env.reset(options={"task_id": "val:3:en:0"})
    instruction, shop = env.unwrapped.task.text, env.unwrapped._shop
    assert info["page"] == "search" and info["has_search_bar"] and info["clickables"] == []
    assert observation.split(" [SEP] ")[:2] == ["Instruction:", instruction]
    results, info = play(env, "search[Lip Balm or Hand Lotion]")
    asins = [text for text in info["clickables"] if text.upper() in shop.products]
    assert info["clickables"] == ["back to search", "next >", *asins] and len(asins) == 10
    assert not info["has_search_bar"] and "Page 1 (Total results: 50)" in results
    observation, info = play(env, *["click[next >]"] * 4)
    assert info["clickables"][:3] == ["back to search", "< prev", "next >"] and len(info["clickables"]) == 13
    observation, info = play(env, "click[next >]")
    assert info["clickables"] == ["back to search", "< prev", "next >"] and "Page 6" in observation
    assert play(env, *["click[< prev]"] * 5)[0] == results
    item, info = play(env, f"click[{asins[3]}]")
    product, buttons = shop.products[asins[3].upper()], ["description", "features", "reviews", "buy now"]
    assert info["clickables"] == ["back to search", "< prev", *sum(product.options.values(), []), *buttons]  # noqa: RUF017
    assert info["admissible_actions"] == [f"click[{text}]" for text in info["clickables"]]
    for name, text in zip(buttons, [product.description[0], product.features[1], product.reviews[0]], strict=False):
        observation, info = play(env, f"click[{name}]")
        assert text in observation and text not in item and info["clickables"] == ["back to search", "< prev"]
        assert info["page"] == name and instruction in observation and play(env, "click[< prev]")[0] == item
    assert play(env, "click[< prev]")[0] == results
    assert play(env, "click[back to search]", "search[!]", "click[back to search]")[1]["has_search_bar"]
    _, info = play(env, "search[lip balm or hand lotion]", f"click[{asins[0]}]", "click[buy now]")
    assert info["page"] == "done" and info["clickables"] == info["admissible_actions"] == []


def test_options_are_one_per_group_kept_on_sub_pages_and_forgotten_with_the_results():
    env = make(observation="text_rich").env
    env.reset(options={"task_id": "train:3:en:1"})
    search, shop = "search[granola clusters]", env.unwrapped._shop
    asin = shop.search("granola clusters")[0]
    item, _ = play(env, search, f"click[{asin.lower()}]")
    one, two, *_ = shop.products[asin].options["flavor"]
    chosen, _ = play(env, f"click[{one}]", f"click[{two}]", "click[beta]")
    assert re.findall(r"\[clicked button\] (.*?) \[clicked button_\]", chosen) == [two, "beta"]
    assert f"You have clicked {two}." in chosen
    assert play(env, "click[reviews]", "click[< prev]")[0] == chosen
    assert f"[clicked button] {asin} [clicked button_]" in play(env, "click[< prev]")[0]
    assert play(env, f"click[{asin.lower()}]")[0] == item
    assert play(env, f"click[{one}]", "click[back to search]", search, f"click[{asin.lower()}]")[0] == item


@LANGS
@pytest.mark.parametrize(
    "action", ["", "buy now", "click[]", "click[nothing]", " click[x]", "Search[x]", "x\nclick[x]"]
)
def test_an_invalid_action_changes_nothing_and_says_so(action, lang):
    env = make(lang=lang)
    before, _ = env.reset(seed=3)
    for _ in range(3):
        state = env.unwrapped.get_env_state()
        observation, reward, terminated, _, info = env.step(action)
        assert (reward, terminated, info["valid_action"]) == (0.0, False, False)
        assert env.unwrapped.get_env_state() == state and observation.split("\n", 1)[1] == before
        before = env.step(env.unwrapped.expert_action())[0]
    assert not env.step("search[x]")[4]["valid_action"]


def test_token_set_ratio_has_the_values_of_rapidfuzz_and_colors_are_normalised_as_published():
    known = {("x-large", "large"): 100, ("8", "8.5"): 100, ("size 8", "8"): 100, ("red", "blue"): 29, ("-", "a"): 0}
    known |= {
        ("machine wash", "machine washable"): 86,
        ("non slip", "slip on"): 93,
        ("青色", "藏青色"): 80,
        ("", ""): 0,
    }
    assert {pair: token_set_ratio(*pair) for pair in known} == known
    known = {"titanium": "tan", "stand alone": "tan", "shredded": "red", "navy blue": "blue", "xl": "xl"}
    assert {text: normalize_color(text) for text in known} == known


def product(**fields):
    row = {"asin": "B1", "name": "Acme Boots", "query": "boots", "product_category": "A › B › C", "pricing": "$49.99"}
    return Product(row | {"Attributes": ["non slip"], "nouns": ["acme", "boots"]} | fields, {})


def test_r_type_in_the_published_order():
    goal = {"attributes": ["non slip"], "options": {}, "price_upper": 60.0}
    twenty, far = [str(number) for number in range(20)], {"query": "x", "product_category": "A › X"}
    for fields, r_type in (({}, 1.0), (far, 0.5), ({"query": "x"}, 1.0), ({"product_category": "X"}, 1.0)):
        assert (
            purchase(goal, product(nouns=twenty), product(nouns=twenty[:4], **fields), {}, False)[1]["r_type"] == r_type
        )
    for common, r_type in ((0, 0.0), (1, 0.1), (2, 1.0)):  # few common nouns override query and category
        parts, terms = purchase(goal, product(nouns=twenty), product(nouns=[*twenty[:common], "x"]), {}, False)
        assert terms["r_type"] == sum(parts.values()) == r_type


def test_parts_published_and_strict():
    goal = {"attributes": ["non slip", "waterproof"], "options": {"size": "8", "color": "navy"}, "price_upper": 40.0}
    for strict, attributes, options in ((False, 2, 2), (True, 1, 0)):
        bought, chosen = product(full_description="Quite WATERPROOF."), {"size": "8.5", "color": "navy stripe"}
        parts, terms = purchase(goal, product(), bought, chosen, strict)
        assert parts == {"attributes": attributes / 5, "options": options / 5, "price": 0.0}
        assert (terms["r_att"], terms["r_option"], terms["r_price"]) == (attributes / 2, options / 2, 0.0)


def test_a_perfect_purchase_is_exactly_one_however_much_is_asked():
    for names in ([f"attribute{number}" for number in range(count)] for count in range(1, 20)):
        for chosen in ({str(number): "x" for number in range(count)} for count in range(20)):
            goal = {"attributes": names, "options": chosen, "price_upper": 60.0}
            assert sum(purchase(goal, product(), product(Attributes=names), chosen, True)[0].values()) == 1.0


def test_price_limits():
    for price, limits in ((5.0, {20, 30, 40}), (10.0, {30, 40, 50}), (975.0, {990}), (985.0, {None})):
        assert {price_limit(price, f"key {number}") for number in range(200)} == limits


def canonical(goal):
    return goal["asin"], frozenset(goal["attributes"]), frozenset(goal["options"].items()), goal["price_upper"]


@LANGS
def test_goals_of_many_products_which_with_their_kind_and_title_are_in_one_split(lang):
    shop = load(None, lang)
    goals, products = shop.goals, shop.products
    assert len(products) == 2400
    assert [len(goals[split, level]) for split in SPLITS for level in (1, 2, 3)] == [3840] * 3 + [1280] * 6
    forms = [canonical(goal) for each in goals.values() for _, goal in each]
    assert len({*forms}) == len(forms), "no canonical form twice, so none in two splits"
    for found in (
        {split: {goal["asin"] for level in (1, 2, 3) for _, goal in goals[split, level]} for split in SPLITS},
        {
            split: {products[goal["asin"]].name for level in (1, 2, 3) for _, goal in goals[split, level]}
            for split in SPLITS
        },
    ):
        assert sum(map(len, found.values())) == len(set().union(*found.values()))
    assert all(len({goal["asin"] for _, goal in each}) >= 300 for each in goals.values())
    for key in goals:
        for (text, goal), (_, same) in zip(load(None, "en").goals[key], goals[key], strict=True):
            assert (goal["asin"], goal["price_upper"]) == (same["asin"], same["price_upper"]) and text


@LANGS
def test_a_goal_says_nothing_in_the_words_of_the_title_the_options_or_the_attributes(lang):
    shop = load(None, lang)
    for each in shop.goals.values():
        for text, goal in each:
            wanted = shop.products[goal["asin"]]
            said, title = (
                {term for term in terms(part) if lang == "en" or len(term) > 1} for part in (text, wanted.name)
            )
            assert not said & title, (text, wanted.name)
            assert not any(
                x in text for x in [goal["asin"], wanted.price_tag, *goal["attributes"], *goal["options"].values()]
            )
            assert f"{goal['price_upper']:.2f}" in text


@LANGS
def test_one_product_meets_a_goal_and_others_of_its_title_miss_exactly_one_thing(lang):
    shop, kinds, near = load(None, lang), defaultdict(list), Counter()
    for one in shop.products.values():
        kinds[one.query].append(one)
    for (_, level), goals in shop.goals.items():
        for _, goal in goals if FULL else goals[::40]:
            wanted, missed = shop.products[goal["asin"]], []
            asked = len(goal["attributes"]) + len(goal["options"]) + 1
            for other in kinds[wanted.query]:
                chosen = {
                    group: x if x in other.options[group] else other.options[group][0]
                    for group, x in goal["options"].items()
                }
                parts, terms_ = purchase(goal, wanted, other, chosen, False)
                assert (parts, terms_) == purchase(goal, wanted, other, chosen, True)
                assert (sum(parts.values()) == 1) == (other is wanted)
                if other.name == wanted.name and round(asked * sum(parts.values()), 6) == asked - 1:
                    missed += [name for name in ("r_att", "r_option", "r_price") if terms_[name] < 1]
            assert missed.count("r_att") >= (3 if level == 1 else 2)
            near.update({*missed})
    assert near["r_option"] > 0.2 * near["r_att"] < 5 * near["r_price"]


@LANGS
def test_neither_price_nor_options_nor_search_tell_a_goals_product_from_three_others(lang):
    shop, side = load(None, lang), ("en", "zh").index(lang)
    for facet in words()["facets"].values():
        if facet["page"] == "description":  # the one page of which search knows all
            for form in (0, 1):
                assert len({tuple(sorted(terms(value[1][form][side]))) for value in facet["values"]}) == 1
    for _, goal in sum(shop.goals.values(), [])[::50]:  # noqa: RUF017
        wanted = shop.products[goal["asin"]]
        alike = [p for p in shop.products.values() if (p.name, p.options) == (wanted.name, wanted.options)]
        assert len({p.price // 10 for p in alike}) == 2 and sum(p.price // 10 == wanted.price // 10 for p in alike) == 4
        assert len({(p.features[0], p.query, *p.categories) for p in alike}) == len({p.query for p in alike})
        assert shop.search(wanted.name)[:6] == [
            p for p in shop.search(wanted.name) if shop.products[p].name == wanted.name
        ]


@LANGS
def test_the_expert_buys_only_what_its_pages_have_told_it(lang):
    env, told = make(lang=lang), pages(lang)
    for seed in range(60):
        env.reset(seed=seed, options={"difficulty": 1 + seed % 3, "split": "val"})
        goal, read, info = env.unwrapped.task.ground_truth, set(), {"page": "search"}
        while info["page"] != "done":
            info = env.step(env.unwrapped.expert_action())[4]
            read = set() if info["page"] == "results" else read | {info["page"]}
        assert read - {"item", "done"} == {
            told[name] for name in (*goal["attributes"][1:], *goal["options"]) if name in told
        }


@LANGS
@pytest.mark.parametrize("matching", ["webshop", "strict"])
def test_the_expert_gets_exactly_one_for_every_goal(lang, matching):
    env = make(lang=lang, matching=matching)
    for (split, level), goals in load(None, lang).goals.items():
        for index in range(0, len(goals), 1 if FULL else 100):
            env.reset(options={"task_id": f"{split}:{level}:{lang}:{index}"})
            reward, info = finish(env)
            assert reward == 1.0 == sum(info["reward_parts"].values()) and info["success"]


@LANGS
def test_the_expert_goes_on_from_any_state_and_a_restored_one_is_the_same(lang):
    rng, env, other = random.Random(5), make(lang=lang, observation="text_rich").unwrapped, make().unwrapped
    for seed in range(60):
        _, info = env.reset(seed=seed, options={"difficulty": 1 + seed % 3})
        for _ in range(seed % 12):
            actions = [each for each in info["admissible_actions"] if not re.search("buy now|立即购买", each)]
            info = env.step(rng.choice(actions))[4]
        other.set_state(json.loads(json.dumps(env.get_state())))
        assert other.get_state() == env.get_state() and other.step("x") == env.step("x")
        assert finish(env) == finish(other) and env.get_state() == other.get_state()


@LANGS
def test_a_random_policy_over_admissible_actions_succeeds_in_less_than_a_fiftieth(lang):
    rng, env, wins, episodes = random.Random(7), make(lang=lang), 0, 1000 if FULL else 300
    for seed in range(episodes):
        _, info = env.reset(seed=seed, options={"difficulty": 1 + seed % 3})
        done = False
        while not done:
            _, _, terminated, truncated, info = env.step(rng.choice(info["admissible_actions"]))
            assert info["valid_action"]
            done = terminated or truncated
        wins += info["success"]
    assert wins < 0.02 * episodes


ROW = {"name": "Trek [X] boots", "category": "fashion", "query": "Boots", "product_category": "Shoes › Boots"}
ROW |= {
    "pricing": "$1,010.00$1,020.50",
    "Attributes": ["Non Slip"],
    "small_description": ["good sole"],
    "images": ["u"],
}
SIZES = {"Size": [{"value": "8/9"}, {"value": "Buy Now"}], "Fit": [{"value": "8/9"}], "x": None}
ROWS = [{"asin": f"A{number}", **ROW, "customization_options": SIZES} for number in range(12)]


def test_webshops_own_schema_with_synthetic_and_human_goals(tmp_path):
    human = {"instruction": "boots, please.", "instruction_attributes": ["good sole"], "instruction_options": ["8/9"]}
    first = ROWS[0] | {"pricing": "", "instructions": [human, human | {"instruction_attributes": []}]}
    second = ROWS[1] | {"instruction_text": "find me boots", "full_description": None}
    path = tmp_path / "items.json"
    path.write_text(json.dumps([first, second, *ROWS]))  # a repeated asin does not count
    shop = load(str(path), "en")
    goals = [goal for each in shop.goals.values() for goal in each]
    assert (
        len(goals) == 11 * 2 + 1
        and sum(text.startswith("find me boots with fit: 8 | 9 (fit)") for text, _ in goals) == 2
    )
    limit = next(goal.pop("price_upper") for text, goal in goals if text.startswith("boots, please, and price lower"))
    assert {"asin": "A0", "attributes": ["good sole"], "options": {"size": "8 | 9"}} in [goal for _, goal in goals]
    assert 120 <= limit <= 140 and shop.products["A0"].price == 100.0 and 1010 <= shop.products["A1"].price <= 1020.5
    env = make(catalog=path)
    load.cache_clear()  # the goal that was changed above is read anew
    for key, found in load(str(path), "en").goals.items():
        for index in range(len(found)):
            env.reset(options={"task_id": f"{key[0]}:{key[1]}:en:{index}"})
            assert finish(env)[0] == 1.0
    with pytest.raises(ValueError, match=r"items.json has no goals .*; it has train:"):
        env.reset(options={"difficulty": 3})


BAD = {"instruction_attributes": ["a"], "instruction_options": ["red"]}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"asin": None}, "field asin must be a string of letters and digits, got None"),
        ({"asin": "A B"}, "field asin must be a string of letters and digits, got 'A B'"),
        ({"name": 3}, "field name must be a string that is not empty, got 3"),
        ({"pricing": "12.99"}, r"field pricing must be a string such as '\$12.99' or .*, got '12.99'"),
        ({"small_description": "x"}, "field small_description must be a list, got 'x'"),
        ({"customization_options": {"c": [{"v": 1}]}}, r"field customization_options.c\[0\].value must be a string"),
        ({"instructions": [{"instruction": "x"}]}, r"field instructions\[0\].instruction_attributes must be a list"),
        ({"instructions": [BAD]}, r"field instructions\[0\].instruction_options must be values .* got \['red'\]"),
    ],
)
def test_a_malformed_catalog_names_file_row_and_field(tmp_path, change, message):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps([*ROWS, ROWS[0] | {"asin": "B77"} | change]))
    with pytest.raises(ValueError, match=rf"bad.json row 13: {message}"):
        make(catalog=str(path))


@LANGS
def test_numbered_results_are_the_same_shop_without_codes_in_an_order_of_the_episodes_own(lang):
    env, plain, ui, moved = make(lang=lang, codes="numbered"), make(lang=lang), load(None, lang).ui, 0
    for seed in range(5):
        shown = []
        for one in (env, plain):
            one.reset(seed=seed)
            texts = one.step(one.unwrapped.expert_action())[0].split(" [SEP] ")
            shown.append(texts[texts.index(ui["next"]) + 1 :])
        numbered, coded = shown
        assert numbered[::3] == [str(number) for number in range(1, 11)] and all(
            re.fullmatch(CODE, code) for code in coded[::3]
        )
        title = numbered[1]  # of six products
        assert numbered[1:18:3] == coded[1:18:3] == [title] * 6
        assert sorted(numbered[2:18:3]) == sorted(coded[2:18:3])
        moved += numbered[2:18:3] != coded[2:18:3]
        env.step(f"click[{ui['next']}]")
        again = env.step(f"click[{ui['prev']}]")[0].split(" [SEP] ")
        assert again[-30:] == numbered and finish(env)[0] == 1.0
    assert moved > 0


@LANGS
def test_pages_go_without_the_instruction(lang):
    env, plain = make(lang=lang, observation="page"), make(lang=lang)
    first, action = env.reset(seed=3)[0], env.unwrapped.expert_action()
    assert first == plain.reset(seed=3)[0]
    instruction = first.rsplit(" [SEP] ", 1)[0]
    assert f"{instruction} [SEP] {env.step(action)[0]}" == plain.step(action)[0]
    assert finish(env)[0] == 1.0


@LANGS
def test_an_expert_that_thinks_says_what_it_wants_and_what_it_reads(lang):
    env = make(lang=lang, thoughts="on")
    yes = no = 0
    for seed in range(20):
        env.reset(seed=seed)
        goal, info, done = env.unwrapped.task.ground_truth, {"page": "search"}, False
        while not done:
            page, action = info["page"], env.unwrapped.expert_action()
            observation, reward, done, _, info = env.step(action)
            if not action.startswith("think["):
                continue
            assert observation == {"en": "OK.", "zh": "好。"}[lang] and info["valid_action"] and info["page"] == page
            assert not done and reward == 0.0 and env.unwrapped.expert_action() != action
            if page == "search":
                assert all(value in action for value in goal["options"].values())
                continue
            differs, read = re.fullmatch(r"think\[(not |不是)?(.+)\]", action).groups()
            assert (read in goal["attributes"]) == (differs is None)
            yes, no = yes + (differs is None), no + (differs is not None)
        assert reward == 1.0
    assert yes == 20 and no > 0
    env = make(lang=lang)
    env.reset(seed=0)
    assert not env.step("think[hm]")[-1]["valid_action"] and "think" not in env.reset(seed=0)[1]["instructions"]


@LANGS
def test_a_hasty_expert_leaves_out_options_in_a_third_and_reading_in_two_thirds_of_its_episodes(lang):
    env = make(lang=lang, expert="hasty")
    read = chosen = solved = 0
    for seed in range(600):
        env.reset(seed=seed)
        info, seen, clicked = {"page": "search"}, set(), set()
        while info["page"] != "done":
            action = env.unwrapped.expert_action()
            info = env.step(action)[4]
            seen, clicked = seen | {info["page"]}, clicked | {action}
        read += bool(seen & {"description", "features", "reviews"})
        chosen += any(f"click[{value}]" in clicked for value in env.unwrapped.task.ground_truth["options"].values())
        solved += info["success"]
    assert 160 < read < 240 and 360 < chosen < 440 and 180 < solved < 250


@LANGS
def test_a_hasty_expert_opens_results_as_they_are_listed_and_minds_the_price_on_their_pages(lang):
    env = make(lang=lang, expert="hasty", codes="numbered", thoughts="on")
    shop, dear = load(None, lang), 0
    for seed in range(100):
        env.reset(seed=seed)
        goal, info, opened = env.unwrapped.task.ground_truth, {"page": "search"}, []
        assert env.unwrapped.expert_action().endswith(f"{goal['price_upper']:.0f}]")
        while info["page"] != "done":
            action = env.unwrapped.expert_action()
            info = env.step(action)[4]
            opened += [int(found[1])] if (found := re.fullmatch(r"click\[(\d+)\]", action)) else []
            price = shop.products[env.unwrapped._view.asin].price if info["page"] == "item" else 0.0
            dear += bool(found) and price > goal["price_upper"]
        assert opened == sorted({*opened}) and info["r_price"]
    assert dear > 10
